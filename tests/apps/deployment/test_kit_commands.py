"""Commands on a kit that start no process: roles, files, rules, messages."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from applications import has_app

pytest.importorskip("nvflare")

import intruders
from kits import run_command
from nvflare.fuel.utils.config_service import ConfigService
from places import opened
from typer.testing import CliRunner

from fednotes.apps.deployment import preflight as kit_preflight
from fednotes.apps.deployment import status as kit_status
from fednotes.apps.deployment.commands import deploy
from fednotes.apps.deployment.commands import site as site_commands
from fednotes.apps.deployment.nvflare import processes
from fednotes.apps.deployment.nvflare.kit import COMM_FILE, INSIDE
from fednotes.apps.deployment.nvflare.processes import CONTACT_FILE
from fednotes.apps.deployment.preflight import Check
from fednotes.apps.deployment.problems import record_problem
from fednotes.apps.deployment.rules.guard import NotApproved, require_approved
from fednotes.apps.deployment.rules.policy import Policy
from fednotes.apps.deployment.runs import open_admin_kit
from fednotes.apps.deployment.site_file import SITE_FILE, read_site_file
from fednotes.cli.app import app
from fednotes.core.errors import ConfigError, FednotesError
from fednotes.core.store import write_json


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace the start of processes; return the kits that would be started."""
    kits: list[Path] = []

    def start(kit: Path) -> None:
        kits.append(kit)
        raise FednotesError("begun")

    monkeypatch.setattr(processes, "start", start)
    return kits


@pytest.fixture
def process_options(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace the start of processes; return the options of each start."""
    options: list[dict[str, Any]] = []

    def begin(command: list[str], **keywords: Any) -> Any:
        options.append(keywords)
        return SimpleNamespace(poll=lambda: 0)

    idle = processes.Status("x", "site", None, (), Path("log"))
    monkeypatch.setattr(processes, "read_status", lambda kit: idle)
    monkeypatch.setattr(subprocess, "Popen", begin)
    return options


def runs(monkeypatch: pytest.MonkeyPatch, pid: int = 7) -> None:
    """Make `status` report that a kit's process runs."""
    real = processes.read_status

    def status(kit: Path) -> processes.Status:
        status_found = real(kit)
        return processes.Status(
            status_found.name, status_found.role, pid, (), status_found.log
        )

    monkeypatch.setattr(processes, "read_status", status)


def site_file(folder: Path, extra: str = "", train: str = "train.conll") -> Path:
    """Write a site's file in a folder, beside a training file; return its path."""
    (folder / "train.conll").touch()
    path = folder / f"site{len(list(folder.glob('*.toml')))}.toml"
    path.write_text(f"[data]\ntrain = {train!r}\ntest = 'train.conll'\n{extra}")
    return path


# a start makes the kit ready


def test_only_the_owner_can_read_a_kit(
    shared_kits: dict[str, Path],
    kits: dict[str, Path],
    process_options: list[dict[str, Any]],
) -> None:
    """Only its owner can read a new kit.

    A start restores the permissions that an archive or a copy has widened.
    """
    assert opened(shared_kits["server"].parent) == []  # with the authority
    kit = kits["h1"]
    for path in (kit, *kit.rglob("*")):
        path.chmod(path.stat().st_mode | 0o055)
    before = os.umask(0)
    try:
        processes.start(kit)
    finally:
        os.umask(before)
    assert opened(kit) == []
    assert (kit / processes.OUTPUT_FILE).exists()
    assert process_options[0]["umask"] == 0o077
    assert process_options[0]["env"]["FEDNOTES_KIT"] == str(kit.resolve())


@pytest.mark.parametrize("name", ["server", "h1"])
def test_a_kit_of_an_earlier_version_or_from_another_folder_still_starts(
    kits: dict[str, Path], process_options: list[dict[str, Any]], name: str
) -> None:
    """A start rewrites the files of the kit that hold the names of classes and paths.

    An earlier version wrote other class names, and NVFlare's stores have the paths of
    the folder where the kit was. The file that limits connections is missing, and a job
    has brought a file that NVFlare would read in its place.
    """
    kit = kits[name]
    path = kit / "local" / "resources.json"
    current = json.loads(path.read_text())
    path.write_text(path.read_text().replace("fednotes.engines.", "fednotes.old."))
    (kit / COMM_FILE).unlink()
    job = kit / "00000000-0000-0000-0000-000000000000" / "app_h1" / "config"
    job.mkdir(parents=True)
    (job / COMM_FILE).write_text('{"internal": {"scheme": "tcp", "resources": {}}}')
    processes.start(kit)
    assert "fednotes.old" not in path.read_text()
    assert json.loads(path.read_text())["components"][1] == current["components"][1]
    assert (f'"{kit.resolve()}/store/jobs"' in path.read_text()) is (name == "server")
    config = ConfigService.load_config_dict(COMM_FILE, [str(kit)])
    assert config == {
        "internal": {"scheme": INSIDE, "resources": {}},
        "streaming_max_blob_size": 2**32,
    }


@pytest.mark.usefixtures("process_options")
@pytest.mark.parametrize("name", ["server", "h1", "admin"])
def test_a_kit_that_was_changed_on_its_way_runs_no_code(
    kits: dict[str, Path], name: str
) -> None:
    """NVFlare makes objects of the classes that its files name."""
    kit = kits[name]
    prepare = open_admin_kit if name == "admin" else processes._prepare
    files = [path for path in kit.rglob("fed_*.json") if "config" not in path.parts]
    before = [path.read_text() for path in files]
    for path in files:
        evil = {"id": "evil", "path": "subprocess.Popen", "args": {"args": "true"}}
        added = {"components": [evil], "handlers": [evil], "require_signed_jobs": False}
        path.write_text(json.dumps(json.loads(path.read_text()) | added))
    prepare(kit)
    assert [path.read_text() for path in files] == before
    assert len(files) == 1 + (name == "server")

    for added_file in (
        "local/custom/a.py",
        "startup/a__resources.json",
        "local/b.conf",
    ):
        path = kit / added_file
        is_new_folder = not path.parent.exists()
        path.parent.mkdir(exist_ok=True, parents=True)
        path.touch()
        with pytest.raises(ConfigError, match="could run code from it: ask for a new"):
            prepare(kit)
        path.unlink()
        if is_new_folder:
            path.parent.rmdir()
        prepare(kit)


@pytest.mark.usefixtures("process_options")
@pytest.mark.parametrize("name", ["server", "h1"])
def test_the_code_of_jobs_is_deleted_before_a_kit_starts(
    kits: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """The process of a job would import it. NVFlare's signatures stay for its check."""
    kit = kits[name]
    code = kit / "00000000-0000-0000-0000-000000000000" / f"app_{name}" / "custom"
    code.mkdir(parents=True)
    (code / "package").mkdir()
    for added_file in ("sitecustomize.py", "package/__init__.py", ".__nvfl_sig.json"):
        (code / added_file).touch()
    (code / "linked.py").symlink_to(tmp_path / "outside.py")
    (tmp_path / "outside.py").touch()
    processes._prepare(kit)
    assert [path.name for path in code.iterdir()] == [".__nvfl_sig.json"]
    assert (tmp_path / "outside.py").exists()


@pytest.mark.usefixtures("process_options")
def test_nothing_outside_a_kit_is_deleted(
    kits: dict[str, Path], tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.py").touch()
    job = kits["h1"] / "00000000-0000-0000-0000-000000000000" / "app_h1"
    job.mkdir(parents=True)
    (job / "custom").symlink_to(outside)
    with pytest.raises(ConfigError, match="could run code from it"):
        processes._prepare(kits["h1"])
    assert (outside / "a.py").exists()


def test_a_site_permits_no_code_whatever_its_kit_says(kits: dict[str, Path]) -> None:
    path = kits["h1"] / "local" / "authorization.json"
    before = path.read_text()
    path.write_text(before.replace('"none"', '"any"'))
    processes._prepare(kits["h1"])
    assert path.read_text() == before


@pytest.mark.usefixtures("process_options")
def test_a_start_deletes_the_oldest_folders_of_jobs(kits: dict[str, Path]) -> None:
    """The three newest stay, and so do folders that belong to no job."""
    kit, names = (
        kits["h1"],
        [f"{n:08x}-0000-4000-8000-00000000000{n}" for n in range(5)],
    )
    for age, name in enumerate(names):
        (kit / name).mkdir()
        os.utime(kit / name, (1e9 - age, 1e9 - age))
    (kit / "state" / names[0]).mkdir(parents=True)
    processes.start(kit)
    assert {path.name for path in kit.iterdir() if "-" in path.name} == set(names[:3])
    assert (kit / "state" / names[0]).exists()


@pytest.mark.usefixtures("process_options")
def test_a_start_warns_of_a_certificate_that_expires_soon(
    kits: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    processes.start(kits["h1"])
    assert caplog.text == ""
    intruders.redate(kits["h1"], (-9, 59))
    processes.start(kits["h1"])
    assert "client.crt: the certificate expires on" in caplog.text


# commands


@pytest.mark.parametrize("words", ["start", "stop", "status"])
def test_a_command_on_a_kit_of_another_role_is_refused(
    shared_kits: dict[str, Path],
    started: list[Path],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "stop", lambda kit: pytest.fail("stopped"))
    for group, wrong in (("server", "h1"), ("site", "server"), ("site", "admin")):
        role = {"h1": "site"}.get(wrong, wrong)
        expected = f"error: {shared_kits[wrong]} is the kit of {wrong} ({role}): give the kit of a {group}"
        assert run_command(group, words, shared_kits[wrong]) == expected
    assert not started


@pytest.mark.parametrize(
    "words", ["start", "stop", "status", "approve", "reject", "rules"]
)
def test_nothing_is_written_into_a_folder_that_is_not_a_kit(
    tmp_path: Path, words: str
) -> None:
    options = (
        ("--site-file", site_file(tmp_path)) if words in ("start", "rules") else ()
    )
    assert "not a kit" in run_command("site", words, tmp_path / "new", *options)
    assert not (tmp_path / "new").exists()


def test_the_misspelt_folder_of_a_kit_is_recognised(
    shared_kits: dict[str, Path], tmp_path: Path
) -> None:
    wrong = Path(f"{shared_kits['h1']}x")
    output = run_command("site", "status", wrong)
    assert "is not a kit: there is no such folder: did you mean" in output
    assert str(shared_kits["h1"]) in output
    output = run_command("site", "status", tmp_path)
    assert "give a folder that `fednotes provision` created" in output


def test_a_wrong_site_file_is_refused_before_it_is_copied_into_the_kit(
    kits: dict[str, Path], tmp_path: Path, started: list[Path]
) -> None:
    kit, good = kits["h1"], site_file(tmp_path)

    def start(file: Path) -> str:
        return run_command("site", "start", kit, "--site-file", file)

    assert "missing: train = " in start(site_file(tmp_path, train="trian.conll"))
    if has_app("phenotyping"):
        test_codes = site_file(tmp_path, "[data.patients]\ntest_codes = 'none'\n")
        assert "missing: patients.test_codes = " in start(test_codes)
    unknown = site_file(tmp_path, "trian = 'x'\n")
    assert "unknown key 'trian': did you mean 'train'?" in start(unknown)
    key = kit / "startup" / "client.key"
    key.chmod(0o644)
    assert f"other users can read this file: run chmod 600 {key}" in start(good)
    key.chmod(0o600)
    for text, header in (
        ("train = 'train.conll'\n", "data"),
        ("min_sites = 3\n", "policy"),
        ("dictionary = 'terms.obo'\n", "files"),
    ):
        (tmp_path / "bare.toml").write_text(text)
        expected = f"stands outside of a table: put it under [{header}]"
        assert expected in start(tmp_path / "bare.toml")
    assert not (kit / SITE_FILE).exists()
    assert not started
    assert start(good) == "error: begun"
    assert started == [kit]


def test_status_prints_the_state_of_a_kit_as_json(
    kits: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit, first = kits["h1"], site_file(tmp_path, "[policy]\nmin_sites = 3\n")
    assert json.loads(run_command("site", "rules", kit, "--site-file", first, "--json"))
    rules = json.loads(run_command("site", "rules", kit, "--json"))
    assert rules["policy"] == {"min_sites": 3}

    state = json.loads(run_command("site", "status", kit, "--json"))
    assert (state["name"], state["is_running"], state["process"]) == ("h1", False, None)
    assert not state["is_connected"]
    assert state["waiting_jobs"] == []
    assert state["decisions"] == state["runs"] == []
    assert (state["warnings"], state["problem"]) == ([], "")

    state = json.loads(run_command("server", "status", kits["server"], "--json"))
    assert not state["is_running"]
    assert not state["answers"]
    runs(monkeypatch)
    monkeypatch.setattr(kit_status, "ask_server", refuse_to_answer)
    state = json.loads(run_command("server", "status", kits["server"], "--json"))
    assert state["is_running"]
    assert state["problem"] == "the server does not answer: closed"
    network = kit_status.Network(("h1",), ("run a: waits",), is_busy=True)
    monkeypatch.setattr(kit_status, "ask_server", lambda kit: network)
    state = json.loads(run_command("server", "status", kits["server"], "--json"))
    assert (state["sites"], state["runs"]) == (["h1"], ["run a: waits"])
    assert state["answers"]
    assert state["is_busy"]


def test_preflight_prints_the_checks_of_a_kit_as_json(
    kits: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checks = [Check("kit", True, "sound"), Check("server", None, "look at it")]
    monkeypatch.setattr(kit_preflight, "run_checks", lambda kit: checks)
    printed = json.loads(run_command("preflight", kits["admin"], "--json"))
    assert printed == [
        {"subject": "kit", "ok": True, "message": "sound"},
        {"subject": "server", "ok": None, "message": "look at it"},
    ]
    checks.append(Check("port", False, "closed: open it"))
    with pytest.raises(FednotesError, match="1 check failed: fix these problems first"):
        deploy.preflight(kits["admin"], json_output=True)
    assert json.loads(capsys.readouterr().out)[-1]["ok"] is False


def refuse_to_answer(kit: Path) -> kit_status.Network:
    """Stand in for a server that does not answer."""
    raise FednotesError("closed")


def test_a_start_that_the_server_refuses_does_not_report_a_running_site(
    kits: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as that of a copy of a kit, whose process the command stops."""
    stopped: list[Path] = []
    running = processes.Status("h1", "site", 7, (), Path("log"))
    refused = processes.LastContact(7, refused="is there a copy of its kit?")
    answers = Check("server", True, "answers")
    monkeypatch.setattr(site_commands, "start_process", lambda kit: running)
    monkeypatch.setattr(kit_preflight, "check_server", lambda kit: answers)
    monkeypatch.setattr(kit_status, "await_contact", lambda *words: refused)
    monkeypatch.setattr(processes, "stop", stopped.append)
    words = ["site", "start", kits["h1"], "--site-file", site_file(tmp_path)]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert f"{kits['h1']}: the server refuses this site: is there" in str(
        result.exception
    )
    assert "is running" not in result.output
    assert stopped == [kits["h1"]]


def test_only_the_command_site_rules_changes_the_rules_of_a_running_site(
    kits: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = kits["h1"]
    runs(monkeypatch)
    first, second = (
        site_file(tmp_path, f"[policy]\nmin_sites = {n}\n") for n in (3, 5)
    )
    assert "+ policy.min_sites = 3" in run_command(
        "site", "rules", kit, "--site-file", first
    )
    output = run_command("site", "start", kit, "--site-file", second)
    assert (
        f"is already running (process 7); to change its rules: fednotes site rules {kit}"
        in output
    )
    assert read_site_file(kit / SITE_FILE).policy.min_sites == 3
    output = run_command("site", "rules", kit, "--site-file", second)
    assert "~ policy.min_sites: 3 → 5" in output
    assert "[policy] applies now" in output
    assert read_site_file(kit / SITE_FILE).policy.min_sites == 5
    assert "nothing has changed" in run_command(
        "site", "rules", kit, "--site-file", second
    )
    broken = site_file(tmp_path, "[policy]\nmin_sites = 'no'\n")
    assert run_command("site", "rules", kit, "--site-file", broken).startswith("error:")
    assert "min_sites = 5" in run_command("site", "rules", kit)


def test_site_status_says_whether_the_server_answers(
    kits: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kit, now = kits["h1"], time.time()

    def heard(pid: int, last: float) -> str:
        contact = {"pid": pid, "since": now, "last": last, "refused": ""}
        write_json(kit / CONTACT_FILE, contact)
        return run_command("site", "status", kit)

    assert f"next: fednotes site start {kit}" in run_command("site", "status", kit)
    runs(monkeypatch)
    output = run_command("site", "status", kit)
    assert "it has not answered yet" in output
    assert f"next: fednotes preflight {kit}" in output
    monkeypatch.setattr("fednotes.apps.deployment.preflight.run_checks", lambda kit: [])
    output = run_command("preflight", kit)  # which does not send back to `status`
    assert "it has revoked this kit" in output
    assert f"fednotes kit trust {kit} trust.pem" in output
    output = heard(7, now)
    assert "connected to localhost:" in output
    assert "next: no action needed" in output
    assert f"connected; next: fednotes site status {kit}" in run_command(
        "preflight", kit
    )
    assert "has not answered since" in heard(7, now - 90)
    assert "it has not answered yet" in heard(6, now)


def test_site_status_names_the_step_that_must_come_first(
    kits: dict[str, Path],
) -> None:
    kit = kits["h1"]
    with pytest.raises(NotApproved):
        require_approved(kit, "h1", {"name": "job"}, Policy())
    output = run_command("site", "status", kit)
    assert "\njob (" in output
    assert ") is waiting for a decision, but no run asks for it now\n" in output
    assert output.endswith(f"next: fednotes site start {kit}\n")

    refused = {"pid": 6, "since": 0.0, "last": 0.0, "refused": "is it a copy?"}
    write_json(kit / CONTACT_FILE, refused)
    record_problem(kit, "the server refuses this site: is it a copy?")
    output = run_command("site", "status", kit)
    assert "the server refuses this site: is it a copy?" in output
    assert (
        f"next: fix the last problem above; then: fednotes site start {kit}" in output
    )

    intruders.redate(kit, (-9, -1))
    output = run_command("site", "status", kit)
    assert "fednotes provision PROJECT --out KITS --again h1" in output
    assert output.endswith("next: ask the project's coordinator for a new kit\n")


def test_the_state_of_saved_runs_is_read_from_the_servers_files(tmp_path: Path) -> None:
    """The server need not run: its files hold the outcomes."""
    for run, outcome in {
        "r1": {"status": "done"},
        "r2": {"status": "waiting", "problem": "for h2"},
        "r3": {"status": "failed", "problem": "no room"},
        "r4": {"status": "running", "problem": ""},
    }.items():
        write_json(tmp_path / "state" / run / "outcome.json", outcome)
    assert sorted(kit_status.describe_saved_runs(tmp_path)) == [
        "run r1: done",
        "run r2: waiting for h2",
        "run r3: failed: no room",
        "run r4: running, resumes when the server is started",
    ]
