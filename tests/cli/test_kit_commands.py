"""The commands at a kit, as far as they start nothing: roles, files, rules, and what is said."""

from __future__ import annotations

import json
import os
import subprocess
import time
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare")

import intruders
from places import opened
from typer.testing import CliRunner

from fednotes.cli.app import app
from fednotes.core.errors import FednotesError
from fednotes.core.store import write_json
from fednotes.engines.nvflare import processes
from fednotes.engines.nvflare.authority import provision
from fednotes.engines.nvflare.processes import CONTACT_FILE
from fednotes.jobs.deployed import status as kit_status
from fednotes.jobs.deployed.site_file import SITE_FILE, read_site_file


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("kits")
    return provision(intruders.project(intruders.free_port(), "h1"), out)


@pytest.fixture
def kits(made: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    return {name: intruders.copied(kit, tmp_path / "kits" / name) for name, kit in made.items()}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The kits for which a process would begin; none does."""
    kits: list[Path] = []

    def start(kit: Path) -> None:
        kits.append(kit)
        raise FednotesError("begun")

    monkeypatch.setattr(processes, "start", start)
    return kits


def runs(monkeypatch: pytest.MonkeyPatch, pid: int = 7) -> None:
    """Let a kit's process be under way."""
    real = processes.status

    def status(kit: Path) -> processes.Status:
        found = real(kit)
        return processes.Status(found.name, found.role, pid, (), found.log)

    monkeypatch.setattr(processes, "status", status)


def given(*words: object) -> str:
    """What a command says, or the message of the error that it ends with."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(done.exception, FednotesError):
        return f"error: {done.exception}"
    assert done.exit_code == 0, done.output
    return done.output


def site_file(folder: Path, extra: str = "", train: str = "train.conll") -> Path:
    (folder / "train.conll").touch()
    path = folder / f"site{len(list(folder.glob('*.toml')))}.toml"
    path.write_text(f"[data]\ntrain = {train!r}\ntest = 'train.conll'\n{extra}")
    return path


def test_a_kit_is_for_its_owner_alone(
    made: dict[str, Path], kits: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is made; and again when it starts, where an archive or a copy opened it."""
    assert opened(made["admin"].parent) == []  # with the authority
    kit, given_to = kits["h1"], dict[str, Any]()
    for path in (kit, *kit.rglob("*")):
        path.chmod(path.stat().st_mode | 0o055)

    def begun(command: list[str], **options: Any) -> Any:
        given_to.update(options)
        return type("Process", (), {"pid": 7, "poll": lambda self: 0})()

    monkeypatch.setattr(processes, "status", lambda kit: processes.Status("h1", "site", *_IDLE))
    monkeypatch.setattr(subprocess, "Popen", begun)
    before = os.umask(0)
    try:
        processes.start(kit)
    finally:
        os.umask(before)
    assert opened(kit) == []
    assert (kit / processes.OUTPUT_FILE).exists()
    assert given_to["umask"] == 0o077


_IDLE = (None, (), Path("log"))


@pytest.mark.parametrize("words", ["start", "stop", "status"])
def test_a_command_at_another_s_kit_does_nothing(
    kits: dict[str, Path], started: list[Path], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "stop", lambda kit: pytest.fail("stopped"))
    for group, wrong in (("server", "h1"), ("site", "server"), ("site", "admin")):
        role = {"h1": "site"}.get(wrong, wrong)
        expected = f"error: {kits[wrong]}: is the kit of {wrong} ({role}), not of a {group}"
        assert given(group, words, kits[wrong]) == expected
    assert not started


@pytest.mark.parametrize("words", ["start", "stop", "status", "approve", "reject", "rules"])
def test_a_folder_that_is_no_kit_gets_no_file(tmp_path: Path, words: str) -> None:
    options = ("--site", site_file(tmp_path)) if words in ("start", "rules") else ()
    assert "not a kit" in given("site", words, tmp_path / "new", *options)
    assert not (tmp_path / "new").exists()


def test_a_wrong_file_is_refused_before_it_is_taken_over(
    kits: dict[str, Path], tmp_path: Path, started: list[Path]
) -> None:
    kit = kits["h1"]
    missing = site_file(tmp_path, train="trian.conll")
    assert "not there: train = " in given("site", "start", kit, "--site", missing)
    unknown = site_file(tmp_path, "trian = 'x'\n")
    assert "unknown key 'trian'; did you mean 'train'?" in given(
        "site", "start", kit, "--site", unknown
    )
    good = site_file(tmp_path)
    key = kit / "startup" / "client.key"
    key.chmod(0o644)
    assert f"others can read it: chmod 600 {key}" in given("site", "start", kit, "--site", good)
    key.chmod(0o600)
    assert not (kit / SITE_FILE).exists()
    assert not started
    assert given("site", "start", kit, "--site", good) == "error: begun"
    assert started == [kit]


def test_a_running_site_s_rules_change_by_a_command_of_their_own(
    kits: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = kits["h1"]
    runs(monkeypatch)
    first = site_file(tmp_path, "[policy]\nmin_sites = 3\n")
    assert "+ policy.min_sites = 3" in given("site", "rules", kit, "--site", first)
    second = site_file(tmp_path, "[policy]\nmin_sites = 5\n")
    said = given("site", "start", kit, "--site", second)
    assert f"runs already (process 7); to change its rules: fednotes site rules {kit}" in said
    assert read_site_file(kit / SITE_FILE).policy.min_sites == 3
    said = given("site", "rules", kit, "--site", second)
    assert "~ policy.min_sites: 3 → 5" in said
    assert "[policy] is in force now" in said
    assert read_site_file(kit / SITE_FILE).policy.min_sites == 5
    assert "nothing has changed" in given("site", "rules", kit, "--site", second)
    broken = site_file(tmp_path, "[policy]\nmin_sites = 'no'\n")
    assert given("site", "rules", kit, "--site", broken).startswith("error:")
    assert "min_sites = 5" in given("site", "rules", kit)


def test_a_site_s_status_says_whether_the_server_answers(
    kits: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = kits["h1"]
    assert f"next: fednotes site start {kit}" in given("site", "status", kit)
    runs(monkeypatch)
    said = given("site", "status", kit)
    assert "it has not answered yet" in said
    assert f"next: fednotes preflight {kit}" in said
    monkeypatch.setattr("fednotes.jobs.deployed.preflight.preflight", lambda kit: [])
    said = given("preflight", kit)  # which does not send back to `status`
    assert "a revoked kit" in said
    assert f"fednotes kit trust {kit} trust.pem" in said
    now = time.time()
    write_json(kit / CONTACT_FILE, {"pid": 7, "since": now, "last": now, "refused": ""})
    said = given("site", "status", kit)
    assert "connected to localhost:" in said
    assert "next: nothing to do here" in said
    assert f"next: it runs; fednotes site status {kit}" in given("preflight", kit)
    write_json(kit / CONTACT_FILE, {"pid": 7, "since": now, "last": now - 90, "refused": ""})
    assert "has not answered since" in given("site", "status", kit)
    write_json(kit / CONTACT_FILE, {"pid": 6, "since": now, "last": now, "refused": ""})
    assert "it has not answered yet" in given("site", "status", kit)


def test_the_last_problem_is_the_newest_line_of_ours(tmp_path: Path) -> None:
    log = tmp_path / "fednotes.log"
    assert kit_status.last_problem(log) is None
    when = datetime.now().replace(microsecond=0) - timedelta(seconds=30)
    log.write_text(
        f"{when},001 ERROR nvflare.x: not ours\n"
        f"{when},001 INFO fednotes.jobs.deployed.site: refused give (7): no room\n"
        f"{when},002 WARNING fednotes.contact: the server has not answered for 20 s; trying on\n"
        f"{when},003 INFO fednotes.contact: connected to the server\n"
        f"{when},004 INFO fednotes.rules: refused @scores (9): this site's scores stay here\n"
    )
    found = kit_status.last_problem(log)
    assert found == kit_status.LoggedProblem(when, "refused give (7): no room")
    assert found.recent


def test_old_folders_of_jobs_go_when_a_process_starts(
    kits: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The three newest stay, and what is no job's folder."""
    kit, begun = kits["h1"], []

    def launched(command: list[str], **options: Any) -> Any:
        begun.append(options["env"])
        return type("Process", (), {"pid": 7, "poll": lambda self: 0})()

    monkeypatch.setattr(processes, "status", lambda kit: processes.Status("h1", "site", *_IDLE))
    monkeypatch.setattr(subprocess, "Popen", launched)
    names = [f"{n:08x}-0000-4000-8000-00000000000{n}" for n in range(5)]
    for age, name in enumerate(names):
        (kit / name).mkdir()
        os.utime(kit / name, (1e9 - age, 1e9 - age))
    (kit / "state" / names[0]).mkdir(parents=True)
    processes.start(kit)
    assert {path.name for path in kit.iterdir() if "-" in path.name} == set(names[:3])
    assert (kit / "state" / names[0]).exists()
    assert begun[0]["FEDNOTES_KIT"] == str(kit.resolve())


def test_a_kit_of_an_earlier_version_or_another_folder_goes_on(
    kits: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files name classes where they were, and NVFlare's stores where it lay."""
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: SimpleNamespace(poll=lambda: 0))
    for name in ("server", "h1"):
        kit = kits[name]
        path = kit / "local" / "resources.json"
        new = json.loads(path.read_text())
        path.write_text(path.read_text().replace("fednotes.engines.", "fednotes.old."))
        (kit / "comm_config.json").unlink()
        monkeypatch.setattr(processes, "status", lambda _: processes.Status("x", "site", *_IDLE))
        processes.start(kit)
        text = path.read_text()
        assert "fednotes.old" not in text
        assert json.loads(text)["components"][1] == new["components"][1]
        assert (kit / "comm_config.json").exists()
        if name == "server":
            assert f'"{kit.resolve()}/store/jobs"' in text
