"""Certificate commands of coordinators and kit owners, and what they print."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare")

import intruders
from intruders import PROJECT
from kits import run_command

from fednotes.apps.deployment.commands import deploy
from fednotes.apps.deployment.nvflare import processes
from fednotes.apps.deployment.nvflare.authority import open_authority
from fednotes.apps.deployment.nvflare.certificates import check_kit
from fednotes.apps.deployment.nvflare.trust import Trust
from fednotes.apps.deployment.preflight import run_checks
from fednotes.cli.shared import name_options


def run_words(*words: object) -> str:
    """Return a command's output on one line."""
    return " ".join(run_command(*words).split())


@pytest.fixture
def base(kits: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of kits and of their project's file, in which commands run."""
    base = kits["server"].parents[1]
    facts = {key: getattr(PROJECT, key) for key in ("name", "server", "port")}
    text = "".join(f"{key} = {value!r}\n" for key, value in facts.items())
    (base / "project.toml").write_text(f"{text}sites = {list(PROJECT.sites)}\n")
    monkeypatch.chdir(base)
    return base


def provisioned(base: Path, *words: object) -> str:
    return run_words("provision", base / "project.toml", "--out", base / "kits", *words)


def test_an_offline_site_installs_the_list_from_a_file(base: Path) -> None:
    kits, h1 = base / "kits", base / "kits/sites/h1"
    output = provisioned(base, "--revoke", "h2")
    assert "h2: every earlier kit of this name is revoked" in output
    assert f"next: give {kits / 'trust.pem'} to the server" in output
    first = (kits / "trust.pem").read_bytes()
    (base / "first.pem").write_bytes(first)
    provisioned(base, "--revoke", "admin")
    output = run_words("kit", "trust", h1, kits / "trust.pem")
    assert "installed as number 3: 2 certificates are revoked" in output
    assert "nothing new" in run_words("kit", "trust", h1, kits / "trust.pem")
    output = run_words("kit", "trust", h1, base / "first.pem")
    assert output == (
        f"error: {base / 'first.pem'}: its number, 2, is not higher than 3, the "
        "number of this kit's list; the kit is "
        "unchanged"
    )
    (base / "cut.pem").write_bytes((kits / "trust.pem").read_bytes()[:-100])
    assert "incomplete" in run_words("kit", "trust", h1, base / "cut.pem")
    assert "cannot be read" in run_words("kit", "trust", h1, base / "none.pem")
    assert "not a kit" in run_words("kit", "trust", base, kits / "trust.pem")
    assert "'h9' is not a kit of this project" in provisioned(base, "--revoke", "h9")
    run_words("kit", "trust", kits / "sites/h2", kits / "trust.pem")
    assert "this kit no longer works" in run_words("site", "status", kits / "sites/h2")
    assert any(
        "was revoked on" in check.message for check in run_checks(kits / "sites/h2")
    )


def test_nothing_is_created_without_an_existing_authority(base: Path) -> None:
    """A wrong --out is not a new network."""
    for words in (("--revoke", "h1"), ("--new-root",), ("--sign", "x"), ("--protect",)):
        message = run_words(
            "provision", base / "project.toml", "--out", base / "new", *words
        )
        assert (
            f"{base / 'new' / 'authority'}: contains no authority of project 'ward'"
            in message
        )
    assert not (base / "new").exists()


def test_a_kit_is_renewed_by_exchanging_two_files(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    h1 = base / "kits/sites/h1"
    intruders.redate(h1, (-300, 59))
    assert f"fednotes kit renew {h1}" in run_words("site", "status", h1)
    output = run_words("kit", "renew", h1)
    assert "h1.request.pem: contains no secret" in output
    output = provisioned(base, "--sign", "h1.request.pem")
    assert "next: give h1.request.signed.pem to the kit's owner" in output
    real = processes.read_status
    with monkeypatch.context() as patch:
        running = processes.Status("h1", "site", 7, (), h1 / "log")
        patch.setattr(processes, "read_status", lambda kit: running)
        assert "is already running" in run_words(
            "kit", "renew", h1, "--take", "h1.request.signed.pem"
        )
    assert processes.read_status is real
    assert "nothing was signed" in provisioned(base, "--sign", base / "project.toml")
    assert "the kit is unchanged" in run_words(
        "kit", "renew", h1, "--take", base / "project.toml"
    )
    until = datetime.now(UTC) + timedelta(360)
    assert f"valid until {until:%Y-%m-%d}" in run_words(
        "kit", "renew", h1, "--take", "h1.request.signed.pem"
    )
    assert check_kit(h1) == []
    assert "fednotes kit renew" not in run_words("site", "status", h1)


@pytest.mark.parametrize(("days", "warned"), [(59, True), (61, False)])
def test_an_expiring_certificate_causes_a_warning_sixty_days_before(
    base: Path, days: int, warned: bool
) -> None:
    """A kit's by its own time; all of them by the time of a root that is being
    replaced."""
    kits = base / "kits"
    intruders.redate(kits / "sites/h1", (-9, days))
    intruders.redate(kits / "server", (-9, days), "server")
    for role, kit in (("site", kits / "sites/h1"), ("server", kits / "server")):
        assert (
            "the certificate expires on" in run_words(role, "status", kit)
        ) is warned
        (check,) = [
            check for check in run_checks(kit) if check.subject == "certificate"
        ]
        assert check.ok is (None if warned else True)
    provisioned(base, "--new-root", "--overlap", days)
    h2 = kits / "sites/h2"
    assert "expires" not in run_words("site", "status", h2)
    assert "new root certificate installed; the old one stays valid until" in run_words(
        "kit", "trust", h2, kits / "trust.pem"
    )
    assert ("the certificate expires on" in run_words("site", "status", h2)) is warned


def test_the_root_is_replaced_and_all_kits_are_renewed(base: Path) -> None:
    kits = base / "kits"
    output = provisioned(base, "--new-root", "--overlap", "30")
    assert f"next: send {kits / 'trust.pem'} to the server first" in output
    assert "is being replaced until" in provisioned(base, "--new-root")
    for kit in (kits / "server", kits / "admin", kits / "sites/h1"):
        run_words("kit", "renew", kit, "--out", "request.pem")
        provisioned(base, "--sign", "request.pem")
        run_words("kit", "renew", kit, "--take", "request.signed.pem")
        assert check_kit(kit) == []
        assert len(Trust.read(kit / "startup").roots) == 2


# the authority's passphrase


def test_the_key_of_the_authority_can_have_a_passphrase(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kits, state = base / "kits", base / "kits/authority/ward/state/cert.json"
    (base / "one").write_text("the first\n")
    (base / "two").write_text("the first\nthe second\n")
    output = provisioned(base, "--protect", "--passphrase-file", base / "one")
    assert "now has a passphrase" in output
    assert "BEGIN PRIVATE KEY" not in state.read_text()
    assert "the first" not in state.read_text()
    assert "run this in a terminal, or give --passphrase-file FILE" in provisioned(
        base, "--revoke", "h2"
    )
    (base / "wrong").write_text("a guess\n")
    before = state.read_bytes()
    wrong = provisioned(base, "--revoke", "h2", "--passphrase-file", base / "wrong")
    assert "check the passphrase" in wrong
    assert state.read_bytes() == before
    assert Trust.parse((kits / "trust.pem").read_bytes()).number == 1
    provisioned(base, "--revoke", "h2", "--passphrase-file", base / "one")
    assert Trust.parse((kits / "trust.pem").read_bytes()).number == 2
    provisioned(base, "--protect", "--passphrase-file", base / "two")
    assert "check the passphrase" in provisioned(
        base, "--new-root", "--passphrase-file", base / "one"
    )
    prompts: list[str] = []

    def prompt(text: str, **options: Any) -> str:
        prompts.append(text)
        assert options["hide_input"]
        return "the second"

    monkeypatch.setattr(deploy.typer, "prompt", prompt)
    terminal = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(deploy, "sys", terminal)
    provisioned(base, "--new-root")
    assert prompts == [
        "the passphrase of the authority's key",
        "a new passphrase for the authority's key",
    ]
    assert "BEGIN PRIVATE KEY" not in state.read_text()
    assert open_authority(PROJECT, kits).list_valid_roots()


def test_a_kit_of_an_earlier_version_is_not_reported_as_revoked(
    base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its serial number was not kept; where its folder is at hand it need not be."""
    state = base / "kits/authority/ward/state/cert.json"
    saved_state = json.loads(state.read_text())
    state.write_text(
        json.dumps({k: v for k, v in saved_state.items() if k.startswith("root")})
    )
    provisioned(base, "--revoke", "h2")
    assert (
        len(list(Trust.parse((base / "kits/trust.pem").read_bytes()).revocations)) == 1
    )
    (base / "kits/sites/h1").rename(base / "h1")
    message = provisioned(base, "--revoke", "h1")
    assert message.startswith("error: h1: its certificate is not on record")
    assert "use --new-root instead" in name_options(message)
    provisioned(base, "--again", "h1")
    assert (
        "h1: its earlier certificate is not on record, so it stays valid" in caplog.text
    )
