"""What the server's watch does about a stopped run, and who learns of it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare")

from clock import Clock
from time_limits import processor_time_below

from fednotes.apps.deployment.absence import SITES_FILE
from fednotes.apps.deployment.nvflare.kit import can_name_run, order_submissions
from fednotes.apps.deployment.nvflare.presence import (
    SALT_FILE,
    SECOND_FILE,
    Contact,
    Liveness,
    hash_kit_location,
)
from fednotes.apps.deployment.nvflare.processes import (
    CONTACT_FILE,
    LastContact,
    is_connected,
    read_contact,
)
from fednotes.apps.deployment.nvflare.watch import (
    ATTEMPTS,
    PATIENCE_SECONDS,
    RECENT_SECONDS,
    STUCK_SECONDS,
    ServerJobs,
    Watch,
    choose_step,
)
from fednotes.apps.deployment.problems import (
    PROBLEM_FILE,
    read_last_problem,
    record_line,
)
from fednotes.core.store import write_json, write_text
from fednotes.engines.launch import STATE_FILES

ALL = frozenset({"h1", "h2"})


@pytest.mark.parametrize(
    ("status", "alive", "outcome", "back", "step"),
    [
        ("SUBMITTED", False, {}, "", "wait"),
        ("DISPATCHED", False, {}, "", "wait"),
        ("RUNNING", True, {"status": "running"}, "", "wait"),
        ("RUNNING", True, {"status": "running"}, "h2", "pause"),
        ("RUNNING", False, {"status": "running"}, "", "resubmit"),
        ("RUNNING", False, {"status": "done"}, "", "done"),
        ("FINISHED:COMPLETED", False, {"status": "done"}, "", "done"),
        ("FINISHED:COMPLETED", False, {"status": "paused"}, "", "resubmit"),
        ("FINISHED:ABNORMAL", False, {"status": "running"}, "", "resubmit"),
        ("FINISHED:EXECUTION_EXCEPTION", False, {"status": "failed"}, "", "give up"),
        (
            "FINISHED:ABNORMAL",
            False,
            {"status": "failed", "retry": True},
            "",
            "resubmit",
        ),
        ("FINISHED:FAILED_TO_RUN", False, {}, "", "resubmit"),
        ("FINISHED:ABORTED", False, {"status": "running"}, "", "done"),
    ],
)
def test_the_next_step_follows_from_the_state_of_a_run(
    status: str, alive: bool, outcome: dict[str, Any], back: str, step: str
) -> None:
    returned = frozenset(filter(None, [back]))
    assert choose_step(status, outcome, is_alive=alive, returned_sites=returned) == step


class Server:
    """A server with one run, whose newest submission is what the test says."""

    def __init__(self, status: str) -> None:
        self.status, self.number, self.orders = status, 1, []
        self.connected, self.present = tuple(sorted(ALL)), ("h1", "h2")
        self.others: list[tuple[str, str]] = []  # other runs, and how they stand
        self.paused_for: tuple[str, ...] = ()

    def list_jobs(self) -> list[dict[str, Any]]:
        deploy = {"app": ["server", *sorted(ALL)]}
        first_job = {"name": "r", "job_id": "j0", "status": "RUNNING", "submit_time": 0}
        latest_job = {
            "job_id": f"j{self.number}",
            "status": self.status,
            "submit_time": self.number,
        }
        others = [
            {"name": name, "job_id": name, "status": status, "deploy_map": deploy}
            for name, status in self.others
        ]
        return [{"name": "r", "deploy_map": deploy, **latest_job}, first_job, *others]

    def list_sites(self) -> frozenset[str]:
        return frozenset(self.connected)

    def read_progress(self, job_id: str) -> dict[str, Any] | None:
        return {"sites": list(self.present)}

    def pause_job(self, job_id: str, sites: Iterable[str]) -> None:
        self.paused_for = tuple(sites) or self.paused_for
        self.orders.append(("pause", job_id))

    def abort(self, job: dict[str, Any]) -> None:
        self.orders.append(("abort", job["job_id"]))

    def resubmit(self, job: dict[str, Any]) -> None:
        self.orders.append(("resubmit", job["job_id"]))
        self.number += 1


class Looks:
    """A watch that looks every five seconds, by a clock that is moved by hand."""

    def __init__(self, state: Path, server: Server) -> None:
        self.clock, self.server = Clock(), server
        self.watch = Watch(state, self.clock)

    def look(self, times: int = 2) -> Any:
        for _ in range(times):
            steps = self.watch.examine_runs(self.server)
            self.clock.sleep(5.0)
        return steps


def test_a_single_observation_triggers_no_action(tmp_path: Path) -> None:
    looks = Looks(tmp_path, server := Server("FINISHED:ABNORMAL"))
    looks.look(1)
    assert server.orders == []
    looks.look(1)
    assert server.orders == [("resubmit", "j1")]


@pytest.mark.parametrize("set_back", [60.0, 3600.0, 365 * 86400.0])
def test_a_clock_that_was_set_back_causes_no_resubmission(
    set_back: float, tmp_path: Path
) -> None:
    """The submission that repeats another is the newer one, whatever the clock said
    then."""
    server = Server("RUNNING")
    stopped, running = (
        {"name": "r", "deploy_map": {"app": ["server", *sorted(ALL)]}, **facts}
        for facts in (
            {"job_id": "j0", "status": "FINISHED:ABNORMAL", "submit_time": 1e9},
            {
                "job_id": "j1",
                "status": "RUNNING",
                "submit_time": 1e9 - set_back,
                "cloned_from": "j0",
            },
        )
    )
    server.list_jobs = lambda: [running, stopped]  # type: ignore[method-assign]
    Looks(tmp_path, server).look(20)
    assert server.orders == []


@pytest.mark.parametrize(
    "facts",
    [
        {"name": "sites.json"},
        {"name": "../../elsewhere/run"},
        {"name": "{folder}/elsewhere/run"},
        {"name": ".."},
        {"name": "a\nb"},
        {"name": ["r"]},
        {"name": None},
        {"deploy_map": {"app": [{"sites": ["h1"]}]}},
        {"deploy_map": ["app"]},
        {"deploy_map": {"app": 5}},
        {"submit_time": "yesterday"},
        {"status": None},
        {"job_id": "../../elsewhere/run"},
        {"cloned_from": ["j0"]},
    ],
)
def test_the_facts_of_a_job_lead_to_no_other_folder_and_stop_no_watch(
    facts: dict[str, Any], tmp_path: Path
) -> None:
    """The admin's program writes none of these, but anyone with an admin's kit can."""
    if isinstance(facts.get("name"), str):
        facts = {"name": facts["name"].format(folder=tmp_path)}
    server = Server("FINISHED:ABNORMAL")
    odd = {
        "name": "odd",
        "job_id": "odd-1",
        "status": "SUBMITTED",
        "submit_time": 0.5,
        "deploy_map": {"app": ["server", "h9"]},
        **facts,
    }
    jobs = server.list_jobs
    server.list_jobs = lambda: [odd, *jobs()]  # type: ignore[method-assign]
    state = tmp_path / "kit" / "state"
    Looks(state, server).look(2)
    assert server.orders == [("resubmit", "j1")]
    assert list(tmp_path.iterdir()) == [tmp_path / "kit"]
    assert list((tmp_path / "kit").iterdir()) == [state]


def test_no_run_has_the_name_of_a_file_beside_the_states_of_runs() -> None:
    files = {
        CONTACT_FILE,
        PROBLEM_FILE,
        SALT_FILE,
        SECOND_FILE,
        Path("state", SITES_FILE),
    }
    assert {Path("state", name) for name in STATE_FILES} == files
    assert not can_name_run("Sites.json")
    assert can_name_run("sites")


def test_submissions_are_ordered_even_with_missing_or_cyclic_links() -> None:
    jobs = [
        {"job_id": "third", "cloned_from": "second", "submit_time": 3},
        {"job_id": "second", "cloned_from": "first", "submit_time": 9},
        {"job_id": "first", "submit_time": 5},
        {"job_id": "other", "submit_time": 7},
        {"job_id": "orphan", "cloned_from": "gone", "submit_time": 6},
        {"job_id": "itself", "cloned_from": "itself", "submit_time": 8},
        {"job_id": "timeless"},
    ]
    assert [job["job_id"] for job in order_submissions(jobs)] == [
        "timeless",
        "first",
        "second",
        "third",
        "orphan",
        "other",
        "itself",
    ]


def test_a_run_that_was_resubmitted_often_is_ordered_in_linear_time() -> None:
    """The watch orders all submissions every few seconds."""
    jobs = [
        {"job_id": f"j{number}", "cloned_from": f"j{number - 1}", "submit_time": 1}
        for number in range(2000, 0, -1)
    ]
    with processor_time_below(2):  # it was ten seconds
        ordered = [job["job_id"] for job in order_submissions(jobs)]
        assert ordered == [f"j{number}" for number in range(1, 2001)]


def test_the_watch_waits_for_sites_but_not_for_ever(tmp_path: Path) -> None:
    looks = Looks(tmp_path, server := Server("FINISHED:ABNORMAL"))
    server.connected = ("h1",)
    looks.look(int(PATIENCE_SECONDS // 5))
    assert server.orders == []
    looks.look(1)
    assert server.orders == [("resubmit", "j1")]


def test_a_site_that_is_back_joins_after_a_pause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that begins is not back: where nobody has answered yet nothing is asked for."""
    caplog.set_level(logging.INFO)
    looks = Looks(tmp_path, server := Server("RUNNING"))
    server.present = ()
    looks.look(4)
    assert server.orders == []
    server.present = ("h1",)
    looks.look(4)
    assert server.orders == [("pause", "j1")]  # once: it may take a while
    assert server.paused_for == ("h2",)
    assert "r: 'h2' is back: the run pauses when the other sites have" in caplog.text
    write_json(
        tmp_path / "r" / "outcome.json",
        {"job_id": "j1", "status": "paused", "lines": 3},
    )
    server.status = "FINISHED:COMPLETED"
    looks.look()
    assert server.orders[1:] == [("resubmit", "j1")]


def test_a_run_without_progress_is_eventually_left_alone(tmp_path: Path) -> None:
    """Each attempt comes later than the one before, and then there is none."""
    looks = Looks(tmp_path, server := Server("FINISHED:ABNORMAL"))
    attempts: list[float] = []
    for _ in range(2000):
        before = len(server.orders)
        looks.look(1)
        if len(server.orders) > before:
            attempts.append(looks.clock.now)
    assert len(attempts) == ATTEMPTS
    waits = [later - earlier for earlier, later in pairwise(attempts)]
    assert waits == sorted(waits)
    assert waits[-1] >= 300
    assert outcome(tmp_path) == {
        "job_id": f"j{server.number}",
        "status": "failed",
        "lines": 0,
        "problem": f"{ATTEMPTS} submissions in a row committed no round",
        "retry": True,
        "is_given_up": True,
    }
    Looks(tmp_path, server).look()  # a server that was started anew tries again
    assert len(server.orders) == ATTEMPTS + 1


def test_an_attempt_with_progress_resets_the_count(tmp_path: Path) -> None:
    looks = Looks(tmp_path, server := Server("FINISHED:ABNORMAL"))
    for _ in range(3 * ATTEMPTS):
        outcome = {"job_id": f"j{server.number}", "status": "running", "lines": 1}
        write_json(tmp_path / "r" / "outcome.json", outcome)
        looks.look(4)
    assert len(server.orders) >= 3 * ATTEMPTS  # more than that many in a row


# ended by a person


def outcome(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "r" / "outcome.json").read_text())


def test_an_aborted_run_is_never_resubmitted(tmp_path: Path) -> None:
    """Not by a watch that was started anew, nor where NVFlare has a later submission
    that failed: the watch may have handed it in at the moment of the abort."""
    write_json(
        tmp_path / "r" / "outcome.json",
        {"job_id": "j1", "status": "running", "lines": 3},
    )
    Looks(tmp_path, Server("FINISHED:ABORTED")).look(3)
    assert outcome(tmp_path)["status"] == "aborted"

    class Later(Server):
        def list_jobs(self) -> list[dict[str, Any]]:
            latest, first = super().list_jobs()
            return [latest, {**first, "status": "FINISHED:ABORTED"}]

    for status, orders in (
        ("FINISHED:ABNORMAL", []),
        ("RUNNING", [("abort", "j1")] * 3),
    ):
        looks = Looks(tmp_path, later := Later(status))
        assert [looks.look(1) for _ in range(3)] == [{"r": "done"}] * 3
        assert later.orders == orders


# waiting


def test_a_waiting_run_reports_what_it_waits_for(tmp_path: Path) -> None:
    looks = Looks(tmp_path, server := Server("SUBMITTED"))
    server.connected = ("h1",)
    looks.look()
    assert outcome(tmp_path)["problem"] == "for h2"
    server.connected, server.others = ("h1", "h2"), [("first", "RUNNING")]
    looks.look(100)
    expected = {
        "job_id": "j1",
        "status": "waiting",
        "lines": 0,
        "problem": "behind run first",
        "absent": {},
        "is_stuck": False,
    }
    assert outcome(tmp_path) == expected


def test_the_time_for_which_a_run_waits_for_a_site_survives_a_restart(
    tmp_path: Path,
) -> None:
    """Another site that leaves meanwhile has a time of its own."""
    looks = Looks(tmp_path, server := Server("SUBMITTED"))
    looks.watch.clock = looks.clock
    server.connected = ("h1",)
    looks.look()
    assert outcome(tmp_path)["absent"] == {"h2": 0.0}
    looks.watch = Watch(tmp_path, looks.clock, looks.clock)
    server.connected = ()
    looks.look()
    assert outcome(tmp_path)["absent"] == {"h1": 10.0, "h2": 0.0}


@pytest.mark.parametrize("status", ["SUBMITTED", "RUNNING"])
def test_a_site_that_never_connected_is_logged_with_the_likely_one(
    status: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, and again when other sites connect."""
    looks = Looks(tmp_path, server := Server(status))
    server.connected = ("h1",)
    looks.look(3)
    server.connected = ("h1", "h20")
    looks.look(3)
    assert [record.getMessage() for record in caplog.records] == [
        "r: no site 'h2' has ever connected: start the site, or abort the run and "
        "correct the name in the job",
        "r: no site 'h2' has ever connected (connected, but not in this job: h20; did "
        "you mean 'h20'?): start the site, or abort the run and correct the name in the "
        "job",
    ]
    server.connected = ("h1", "h2")
    looks.look(1)
    server.connected = ("h1",)
    looks.look(3)
    assert len(caplog.records) == 2  # it is away, and known


def test_a_server_that_starts_no_job_is_detected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    looks = Looks(tmp_path, server := Server("SUBMITTED"))
    looks.look(int(STUCK_SECONDS // 5))
    assert not (tmp_path / "r" / "outcome.json").exists()
    looks.look(3)
    assert "fednotes server stop KIT, then start" in outcome(tmp_path)["problem"]
    assert outcome(tmp_path)["is_stuck"]
    assert caplog.text.count("no longer starts jobs") == 1
    assert server.orders == []


# what is asked of NVFlare's engine


def test_a_resubmitted_job_has_the_signature_and_name_of_its_first_submitter() -> None:
    cloned: list[dict[str, Any]] = []
    meta = {
        **{
            "name": "r",
            "job_id": "j1",
            "status": "RUNNING",
            "deploy_map": {"app": ["server"]},
        },
        **{
            "submitter_name": "admin@x.org",
            "submitter_org": "ward",
            "job_deploy_detail": ["x"],
        },
        "submitter_role": "project_admin",
    }
    store = SimpleNamespace(
        get_all_jobs=lambda context: [SimpleNamespace(meta=meta)],
        clone=lambda from_jid, meta, fl_ctx: cloned.append({"of": from_jid, **meta}),
    )
    late = SimpleNamespace(
        name="h2", last_connect_time=time.time() - RECENT_SECONDS - 1
    )
    engine = SimpleNamespace(
        job_def_manager=store,
        new_context=nullcontext,
        run_processes={},
        get_clients=lambda: [
            SimpleNamespace(name="h1", last_connect_time=time.time()),
            late,
        ],
    )
    jobs = ServerJobs(engine)
    (job,) = jobs.list_jobs()
    jobs.resubmit(job)
    assert cloned == [
        {
            **{
                "of": "j1",
                "cloned_from": "j1",
                "name": "r",
                "deploy_map": meta["deploy_map"],
            },
            **{key: meta[key] for key in meta if key.startswith("submitter")},
        }
    ]
    assert jobs.list_sites() == {"h1"}
    assert jobs.read_progress("j1") is None
    engine.run_processes["j1"] = object()
    for reply, expected in (
        (None, {}),
        ({"data": {"sites": ["h1"]}}, {"sites": ["h1"]}),
    ):
        engine.send_app_command = lambda *_, reply=reply: reply
        assert jobs.read_progress("j1") == expected


# who hears of whom


def reports_problem(records: Iterable[logging.LogRecord], kit: Path) -> bool:
    """Return whether log lines of a kit leave a problem for its status to show.

    Silent servers and sites leave none, because the status has a line of its own for
    them.
    """
    for record in records:
        record_line(kit, record)
    return read_last_problem(kit) is not None


def test_a_site_knows_since_when_the_server_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock(1000.0)
    contact = Contact(tmp_path, clock, LastContact(7))
    contact.check_silence()
    assert read_contact(tmp_path, 7) == LastContact(7)
    assert not is_connected(read_contact(tmp_path, 7), clock.now)
    for _ in range(10):
        contact.note_answer()
        contact.check_silence()
        clock.sleep(5)
    assert read_contact(tmp_path, 7) == LastContact(7, 1000.0, 1045.0)
    assert is_connected(read_contact(tmp_path, 7), clock.now)
    assert read_contact(tmp_path, 8) is None  # of a process that is gone
    assert not is_connected(
        read_contact(tmp_path, 7), clock.now - 3600
    )  # set back since
    for _ in range(10):
        clock.sleep(5)
        contact.check_silence()
    assert not is_connected(read_contact(tmp_path, 7), clock.now)
    contact.note_answer()
    assert read_contact(tmp_path, 7) == LastContact(7, 1100.0, 1100.0)
    assert [record.getMessage() for record in caplog.records] == [
        "connected to the server",
        "the server has not answered for 25 s; still trying",
        "connected to the server",
    ]
    assert not reports_problem(caplog.records, tmp_path)


def test_a_site_that_never_reaches_the_server_logs_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock(1000.0)
    contact = Contact(tmp_path, clock, LastContact(7))
    for _ in range(10):
        contact.check_silence()
        clock.sleep(5)
    contact.note_answer()
    for _ in range(2):
        contact.check_silence()
        clock.sleep(5)
    assert [record.getMessage() for record in caplog.records] == [
        "the server has not answered since this process was started, 25 s ago; still "
        "trying (fednotes preflight KIT may say why)",
        "connected to the server",
    ]


def test_a_refusal_is_recorded_and_a_damaged_file_is_ignored(tmp_path: Path) -> None:
    contact = Contact(tmp_path, Clock(), LastContact(7))
    contact.note_answer()
    contact.note_refusal("a second one")
    assert read_contact(tmp_path, 7) == LastContact(7, 0.0, 0.0, "a second one")
    (tmp_path / "state" / "contact.json").write_text("[")
    assert read_contact(tmp_path, 7) is None


def test_a_second_process_of_a_kit_is_reported_with_its_place(
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock(1000.0)
    members = Liveness(clock)
    members.note_alive("h1", "here")
    clock.sleep(19)
    assert not members.is_elsewhere("h1", "here")  # started again where it was
    assert members.is_elsewhere("h1", "there")
    assert not members.is_elsewhere("h2", "there")
    clock.sleep(2)
    assert not members.is_elsewhere("h1", "there")  # the first is gone
    members.check_silence()
    members.check_silence()
    members.note_alive("h1", "there")
    members.note_left("h1")
    assert not members.is_elsewhere("h1", "here")
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "site 'h1' is connected",
        "site 'h1' has not been heard from for 20 s",
        "site 'h1' is connected",
        "site 'h1' has left",
    ]
    assert not reports_problem(caplog.records, tmp_path)


def test_a_copy_of_a_kit_has_a_different_location_hash(tmp_path: Path) -> None:
    for name, key in (("one", "k"), ("copy", "k"), ("other", "x")):
        write_text(tmp_path / name / "startup" / "client.key", key)
    places = [hash_kit_location(tmp_path / name) for name in ("one", "copy", "other")]
    assert len(set(places)) == 3
    write_text(tmp_path / "one" / "startup" / "client.key", "renewed")
    assert hash_kit_location(tmp_path / "copy" / ".." / "one") == places[0]
