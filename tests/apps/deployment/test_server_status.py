"""Actions that `fednotes server status` proposes so that a run continues."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare")

from kits import run_command

from fednotes.apps.deployment.absence import record_known_sites
from fednotes.apps.deployment.commands import server as server_commands
from fednotes.apps.deployment.nvflare import processes
from fednotes.apps.deployment.nvflare import server as carrier
from fednotes.apps.deployment.preflight import PortUse
from fednotes.apps.deployment.status import (
    Action,
    describe_actions,
    list_resumable_runs,
)
from fednotes.core.store import write_json

SITES = ("a", "b", "c")
SILENT = "no answer from site 'c': not connected, or still busy"


def event(site: str, text: str, *, is_problem: bool) -> dict[str, Any]:
    return {"kind": "event", "site": site, "text": text, "is_problem": is_problem}


class Server:
    """A server with one run. status: NVFlare's, of its only submission."""

    def __init__(self, status: str, *lines: dict[str, Any]) -> None:
        self.status, self.lines = status, lines
        self.connected, self.named = SITES, SITES

    def list_jobs(self) -> list[dict[str, Any]]:
        deployed = {"app": ["server", *self.named]}
        job = {"name": "run-1", "job_id": "j", "status": self.status}
        return [job | {"deploy_map": deployed}]

    def list_sites(self, within: float) -> tuple[str, ...]:
        return self.connected

    def read_progress(self, job_id: str) -> dict[str, Any]:
        present = [site for site in self.named if site in self.connected]
        return {"lines": list(self.lines), "sites": present}


def show_status(
    kit: Path, server: Server, monkeypatch: pytest.MonkeyPatch, *words: str
) -> str:
    """Return what the command prints of a server that runs and answers."""

    @contextmanager
    def connect(*_: Any) -> Iterator[Server]:
        yield server

    running = processes.Status("server", "server", 7, (), kit / "fednotes.log")
    monkeypatch.setattr(processes, "read_status", lambda kit: running)
    monkeypatch.setattr(carrier, "connecting_to_server", connect)
    return run_command("server", "status", kit, *words)


def next_lines(output: str) -> list[str]:
    """Return the lines from "next:" on."""
    lines = output.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("next:"))
    return lines[start:]


def test_status_names_a_site_that_never_connected_and_a_similar_one(
    kits: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kit, server = kits["server"], Server("SUBMITTED")
    record_known_sites(kit / "state", ["alpha", "b", "c"], 0.0)
    server.named, server.connected = ("alpa", "b", "c"), ("alpha", "b", "c")
    assert next_lines(show_status(kit, server, monkeypatch)) == [
        "next: the admin: no site 'alpa' has ever connected (connected, but not in this "
        "job: alpha; did you mean 'alpha'?): if the job misspells a name, run fednotes "
        "run --abort run-1 --on KIT, and submit the corrected job; otherwise have the "
        "site started"
    ]


@pytest.mark.parametrize("status", ["SUBMITTED", "RUNNING"])
def test_status_proposes_to_start_an_absent_site(
    status: str, kits: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that was killed in the middle of a round."""
    kit = kits["server"]
    server = Server(status, event("c", SILENT, is_problem=False))
    record_known_sites(kit / "state", SITES, 0.0)
    server.connected = ("a",)
    expected = ["next: at b, c: fednotes site start KIT"]
    assert next_lines(show_status(kit, server, monkeypatch)) == expected
    server.connected = SITES
    expected = ["next: no action needed"]
    assert next_lines(show_status(kit, server, monkeypatch)) == expected


def test_status_proposes_to_approve_at_waiting_sites(
    kits: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kit, now = kits["server"], time.time()
    waits = {"kind": "approvals", "since": {"a": now, "c": now}, "text": "waiting"}
    server = Server("RUNNING", waits)
    record_known_sites(kit / "state", SITES, 0.0)
    expected = ["next: at a, c: fednotes site approve KIT"]
    assert next_lines(show_status(kit, server, monkeypatch)) == expected
    status = json.loads(show_status(kit, server, monkeypatch, "--json"))
    assert status["actions"] == [
        {"who": "a", "text": "fednotes site approve KIT"},
        {"who": "c", "text": "fednotes site approve KIT"},
    ]


def test_status_proposes_to_look_at_a_reported_problem(
    kits: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a round is done or the site is back."""
    kit = kits["server"]
    record_known_sites(kit / "state", SITES, 0.0)
    problem = event("b", "site 'b': its notes do not match the job", is_problem=True)
    server = Server("RUNNING", problem, event("", "waiting for b", is_problem=False))
    assert next_lines(show_status(kit, server, monkeypatch)) == [
        "next: at b: look at what it reports (site 'b': its notes do not match the "
        "job); its log has the details: fednotes site status KIT"
    ]
    for later in (
        {"kind": "round", "round": 0},
        event("b", "site 'b' is there", is_problem=False),
    ):
        solved = Server("RUNNING", problem, later)
        expected = ["next: no action needed"]
        assert next_lines(show_status(kit, solved, monkeypatch)) == expected


def test_status_proposes_to_restart_a_server_that_starts_no_job(
    kits: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = kits["server"]
    outcome = {"job_id": "j", "status": "waiting", "problem": "…", "is_stuck": True}
    write_json(kit / "state" / "run-1" / "outcome.json", outcome)
    assert next_lines(show_status(kit, Server("SUBMITTED"), monkeypatch)) == [
        f"next: fednotes server stop {kit}; fednotes server start {kit}"
    ]


def outcome_of(status: str, **facts: Any) -> dict[str, Any]:
    return {"job_id": "j", "status": status, **facts}


@pytest.mark.parametrize(
    ("status", "outcome", "state"),
    [
        ("ABNORMAL", outcome_of("running"), "paused"),
        ("COMPLETED", outcome_of("paused"), "paused"),
        (
            "EXECUTION_EXCEPTION",
            outcome_of("failed", problem="h1 is lost", retry=True),
            "paused (h1 is lost)",
        ),
    ],
)
def test_a_run_between_two_submissions_is_not_shown_as_finished(
    status: str,
    outcome: dict[str, Any],
    state: str,
    kits: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The site that is lost is to be started meanwhile."""
    kit, server = kits["server"], Server(f"FINISHED:{status}")
    record_known_sites(kit / "state", SITES, 0.0)
    write_json(kit / "state" / "run-1" / "outcome.json", outcome)
    output = show_status(kit, server, monkeypatch)
    assert f"run run-1: {state}; the server resumes it automatically" in output
    assert next_lines(output) == ["next: no action needed"]
    server.connected = ("a", "b")
    expected = ["next: at c: fednotes site start KIT"]
    assert next_lines(show_status(kit, server, monkeypatch)) == expected


@pytest.mark.parametrize(
    ("status", "outcome", "state"),
    [
        ("COMPLETED", outcome_of("done"), "done"),
        ("ABORTED", outcome_of("running"), "aborted"),
        ("ABORTED", {}, "aborted"),
        (
            "EXECUTION_EXCEPTION",
            outcome_of("failed", problem="no room"),
            "failed: no room",
        ),
        (
            "ABNORMAL",
            outcome_of("failed", problem="gone", retry=True, is_given_up=True),
            "failed: gone",
        ),
    ],
)
def test_status_proposes_a_new_job_after_a_finished_run(
    status: str,
    outcome: dict[str, Any],
    state: str,
    kits: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kit, server = kits["server"], Server(f"FINISHED:{status}")
    write_json(kit / "state" / "run-1" / "outcome.json", outcome)
    output = show_status(kit, server, monkeypatch)
    assert f"run run-1: {state}\n" in output
    assert "next: submit a job with the admin's kit" in output


def test_status_shows_how_long_a_run_waits_for_a_site(
    kits: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = kits["server"]
    outcome = {"job_id": "j", "status": "waiting", "problem": "for c"}
    outcome["absent"] = {"c": time.time() - 125}  # type: ignore[assignment]
    write_json(kit / "state" / "run-1" / "outcome.json", outcome)
    output = show_status(kit, Server("SUBMITTED"), monkeypatch)
    assert "run run-1: waiting for c (2 min)" in output


def test_actions_are_grouped_in_one_line_per_person() -> None:
    actions = [
        Action("b", "start"),
        Action("server", "restart"),
        Action("c", "start"),
        Action("admin", "abort"),
    ]
    assert describe_actions(actions) == [
        "at b, c: start",
        "restart",
        "the admin: abort",
    ]


# start


def test_the_server_names_continuing_runs_when_it_starts(
    kits: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kit = kits["server"]
    for run, outcome in {
        "r1": {"status": "done"},
        "r2": {"status": "running"},
        "r3": {"status": "failed", "problem": "no room", "retry": False},
        "r4": {"status": "failed", "problem": "lost", "retry": True},
        "r5": {"status": "waiting", "problem": "for a"},
        "r6": {"status": "aborted"},
    }.items():
        write_json(kit / "state" / run / "outcome.json", outcome)
    assert list_resumable_runs(kit) == ["r2", "r4", "r5"]
    process = processes.Status("server", "server", 7, (), kit / "fednotes.log")
    monkeypatch.setattr(server_commands, "start_process", lambda kit: process)
    monkeypatch.setattr(
        "fednotes.apps.deployment.preflight.await_server", lambda *_: ""
    )
    output = run_command("server", "start", kit)
    assert "these runs then resume automatically: r2, r4, r5" in output
    assert "submit a job" not in output
    for run in ("r2", "r4", "r5"):
        (kit / "state" / run / "outcome.json").unlink()
    output = run_command("server", "start", kit)
    assert "then submit a job with the admin's kit" in output


def test_starting_a_copied_kit_explains_how_to_stop_the_server(
    kits: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = PortUse(8002, is_free=False, other_program="")
    monkeypatch.setattr(
        "fednotes.apps.deployment.preflight.find_port_use", lambda kit: used
    )
    output = run_command("server", "start", kits["server"])
    assert "this server is running and answers there, from another folder" in output
    assert "to stop it there: fednotes server stop FOLDER" in output
