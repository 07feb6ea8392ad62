"""A site's executor, whose refusals are in the ledger before they leave, and the server's gate."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare")

from nvflare.apis.shareable import Shareable
from nvflare.fuel.f3.cellnet import defs as cells
from nvflare.fuel.f3.message import Message

from fednotes.core.errors import ConfigError
from fednotes.engines.nvflare import gate, site
from fednotes.engines.nvflare import server as flare
from fednotes.rules.ledger import ledger_of, show
from fednotes.rules.policy import Policy, PolicyRefusal, check_job


def context(kit: Path) -> Any:
    """What NVFlare gives an executor, as far as it is asked for."""
    workspace = SimpleNamespace(get_app_dir=lambda job: kit / job, get_root_dir=lambda: str(kit))
    return SimpleNamespace(
        get_workspace=lambda: workspace,
        get_job_id=lambda: "job-id",
        get_identity_name=lambda: "h1",
    )


def refused(monkeypatch: pytest.MonkeyPatch, error: Exception) -> site.FednotesExecutor:
    """An executor whose host does not start."""

    def fails(*anything: Any) -> None:
        raise error

    monkeypatch.setattr(site, "require_admins_signature", fails)
    return site.FednotesExecutor()


def asked(executor: site.FednotesExecutor, kit: Path) -> str | None:
    reply = executor.execute(flare.TASK, Shareable({flare.FRAME: b"x"}), context(kit), None)
    assert flare.FRAME not in reply
    reason: str | None = reply.get_header(flare.REASON)
    return reason


def test_a_refusal_of_the_executor_is_in_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each time it leaves, and with the rule's name alone."""
    try:
        policy = Policy(min_sites=7, source="[policy] of /srv/x")
        check_job(policy, "fedner", 6, 6, rounds=None, secure=False)
    except PolicyRefusal as error:
        executor = refused(monkeypatch, error)
    for number in (1, 2):
        reason = asked(executor, tmp_path)
        assert reason is not None
        assert reason.startswith("refused by min_sites of this site's policy")
        assert "7" not in reason
        lines = list(show(ledger_of(tmp_path).path))
        assert len(lines) == number
        told = (lines[-1]["run"], lines[-1]["refusal"], lines[-1]["receiver"], lines[-1]["bytes"])
        assert told == ("job-id", True, "server", len(reason))
        assert lines[-1]["sha256"] == hashlib.sha256(reason.encode()).hexdigest()
    assert "this site allows 7 sites and more" in caplog.text
    assert "/srv/x" in caplog.text


def test_what_the_ledger_does_not_take_does_not_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = refused(monkeypatch, ConfigError(f"{tmp_path}/site.toml: no such file"))
    assert asked(executor, tmp_path) == "site.toml: no such file"
    ledger = ledger_of(tmp_path).path
    good = ledger.read_bytes()
    ledger.write_bytes(good[:-9])
    assert asked(executor, tmp_path) is None
    ledger.write_bytes(good)
    assert asked(executor, tmp_path) == "site.toml: no such file"


@pytest.mark.parametrize(
    ("certified", "origin", "channel", "passes"),
    [
        ("h1", "h1", "server_command", True),
        ("h1", "h1.job-id", "server_command", True),
        ("h1", "h2", "server_command", False),
        ("h1", "h1", "_net_manager", False),  # `bulk_test` of 10^9: as many messages in memory
        (None, "server.job-id", "_net_manager", True),  # by the kit's own socket
    ],
)
def test_a_member_speaks_for_itself_and_tests_no_network(
    certified: str | None, origin: str, channel: str, passes: bool
) -> None:
    headers = {cells.MessageHeaderKey.ORIGIN: origin, cells.MessageHeaderKey.CHANNEL: channel}
    message = Message(headers, 10**9)
    message.set_prop(cells.MessagePropKey.COMMON_NAME, certified)
    assert (gate.ServerGate().judge(message) is None) == passes
