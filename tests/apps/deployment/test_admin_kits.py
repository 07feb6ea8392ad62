"""Errors of `fednotes run` with an admin's kit that is unusable or cannot connect."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare")

import intruders
from kits import run_command
from places import Place

from fednotes.apps.deployment import preflight
from fednotes.apps.deployment.nvflare import server
from fednotes.apps.deployment.preflight import Check
from fednotes.apps.deployment.runs import Run, build_run_facts
from fednotes.core.errors import TrainingError

JOB = 'method = "fedner"\n[sites.a]\n[sites.b]\n[sites.c]\n'
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "expired": (
        lambda kit: intruders.redate(kit, (-9, -1)),
        "client.crt: the certificate expired on ",
    ),
    "no key": (
        lambda kit: (kit / "startup" / "client.key").unlink(),
        "client.key: the kit is not complete",
    ),
    "no settings": (
        lambda kit: (kit / "startup" / "fed_admin.json").unlink(),
        "fed_admin.json is missing: ask for a new kit",
    ),
}


def words_of(action: str, folder: Path, kit: Path) -> list[object]:
    """Return the words of a command that needs the admin's kit, and write its files."""
    (folder / "job.toml").write_text(JOB)
    if action == "submit":
        return ["run", folder / "job.toml", "--on", kit, "--out", folder / "out"]
    if action.endswith("a named run"):
        option = f"--{action.partition(' ')[0]}"
        return ["run", option, "job-1", "--on", kit, "--out", folder / "out"]
    (folder / "out").mkdir()
    run = Run("job-1", kit, "a job", ("a", "b", "c"), "f" * 64)
    (folder / "out" / "run.json").write_text(json.dumps(build_run_facts(run)))
    return ["run", f"--{action}", "--out", folder / "out"]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "action", ["submit", "attach", "abort", "attach a named run", "abort a named run"]
)
def test_an_unusable_kit_is_refused_before_it_connects(
    action: str,
    damage: str,
    kits: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        server, "connecting_to_server", lambda *_: pytest.fail("connected")
    )
    spoil, message = DAMAGES[damage]
    spoil(kits["admin"])
    words = words_of(action, tmp_path, kits["admin"])
    output = run_command(*words)
    assert output.startswith("error: ")
    assert message in output
    assert (tmp_path / "out").exists() == (action in ("attach", "abort"))


def test_a_kit_that_expires_soon_is_used_with_a_warning(
    kits: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check stops at the closed port, after the warning."""
    intruders.redate(kits["admin"], (-9, 59))
    refuse_sessions(monkeypatch)
    printed: list[str] = []
    monkeypatch.setattr(
        "fednotes.apps.deployment.commands.deploy.say",
        lambda *lines, to=None: printed.extend(lines),
    )
    run_command(*words_of("submit", tmp_path, kits["admin"]))
    assert "client.crt: the certificate expires on" in printed[0]


def refuse_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server open no session, without the time that NVFlare waits for one."""

    @contextmanager
    def connect(*_: Any) -> Iterator[None]:
        raise TrainingError("no session")
        yield

    monkeypatch.setattr(server, "connecting_to_server", connect)


@pytest.mark.parametrize("action", ["submit", "abort"])
def test_a_failed_connection_names_the_server_and_the_cause(
    action: str, kits: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the words of `preflight`, which knows more than NVFlare says."""
    refuse_sessions(monkeypatch)
    words = words_of(action, tmp_path, kits["admin"])
    address = f"localhost:{intruders.PROJECT.port}"
    output = run_command(*words)
    assert output.startswith(f"error: {address} does not answer")
    answers = Check("server", True, f"{address} answers")
    monkeypatch.setattr(preflight, "check_server", lambda kit: answers)
    output = run_command(*words)
    assert output.startswith(
        f"error: {address} answers, but no session can be opened (no session)"
    )
    assert "ask the coordinator whether this kit was revoked" in output


@pytest.mark.slow
@pytest.mark.network
def test_another_program_at_the_port_is_reported_in_one_line(
    kits: dict[str, Path], tmp_path: Path
) -> None:
    """Without the lines that gRPC prints of each handshake that fails."""
    (tmp_path / "job.toml").write_text(JOB)
    handler = type(
        "Quiet", (http.server.BaseHTTPRequestHandler,), {"log_message": lambda *a: None}
    )
    address = ("127.0.0.1", intruders.PROJECT.port)
    with http.server.ThreadingHTTPServer(address, handler) as web:
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        output = Place(tmp_path).give(
            "run", "job.toml", "--on", str(kits["admin"]), "--out", "out", code=2
        )
        web.shutdown()
        thread.join()
    (line,) = output.splitlines()
    assert f"localhost:{intruders.PROJECT.port} answers, but not with TLS" in line
