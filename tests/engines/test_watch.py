"""What the server's watch does about a run that stopped."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare")

from fednotes.core.store import write_json
from fednotes.engines.nvflare.presence import (
    ATTEMPTS,
    PATIENCE_SECONDS,
    RECENT_SECONDS,
    STUCK_SECONDS,
    ServerJobs,
    Watch,
    next_step,
)

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
            "FINISHED:EXECUTION_EXCEPTION",
            False,
            {"status": "failed", "retry": True},
            "",
            "resubmit",
        ),
        ("FINISHED:FAILED_TO_RUN", False, {}, "", "resubmit"),
        ("FINISHED:ABORTED", False, {"status": "running"}, "", "done"),
    ],
)
def test_what_a_run_needs(
    status: str, alive: bool, outcome: dict[str, Any], back: str, step: str
) -> None:
    assert next_step(status, alive, outcome, frozenset(filter(None, [back]))) == step


class Server:
    """A server with one run, whose newest submission is what the test says."""

    def __init__(self, status: str) -> None:
        self.status, self.number, self.asked = status, 1, []
        self.connected, self.present = tuple(sorted(ALL)), ("h1", "h2")
        self.others: list[tuple[str, str]] = []  # other runs, and how they stand

    def jobs(self) -> list[dict[str, Any]]:
        deploy = {"app": ["server", *sorted(ALL)]}
        old = {"name": "r", "job_id": "j0", "status": "RUNNING", "submit_time": 0}
        new = {"job_id": f"j{self.number}", "status": self.status, "submit_time": self.number}
        others = [
            {"name": name, "job_id": name, "status": status, "deploy_map": deploy}
            for name, status in self.others
        ]
        return [{"name": "r", "deploy_map": deploy, **new}, old, *others]

    def sites(self) -> frozenset[str]:
        return frozenset(self.connected)

    def tell(self, job_id: str, topic: str = "") -> dict[str, Any] | None:
        if topic:
            self.asked.append((topic, job_id))
        return {"sites": list(self.present)}

    def abort(self, job: dict[str, Any]) -> None:
        self.asked.append(("abort", job["job_id"]))

    def resubmit(self, job: dict[str, Any]) -> None:
        self.asked.append(("resubmit", job["job_id"]))
        self.number += 1


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def look(watch: Watch, server: Server, clock: Clock, times: int = 2) -> None:
    for _ in range(times):
        watch.look(server)
        clock.now += 5.0


def test_one_look_decides_nothing(tmp_path: Path) -> None:
    clock = Clock()
    watch, server = Watch(tmp_path, clock), Server("FINISHED:ABNORMAL")
    look(watch, server, clock, 1)
    assert server.asked == []
    look(watch, server, clock, 1)
    assert server.asked == [("resubmit", "j1")]


def test_it_waits_for_sites_but_not_for_ever(tmp_path: Path) -> None:
    clock = Clock()
    watch, server = Watch(tmp_path, clock), Server("FINISHED:ABNORMAL")
    server.connected = ("h1",)
    look(watch, server, clock, int(PATIENCE_SECONDS // 5))
    assert server.asked == []
    look(watch, server, clock, 1)
    assert server.asked == [("resubmit", "j1")]


def test_a_site_that_is_back_joins_after_a_pause(tmp_path: Path) -> None:
    clock = Clock()
    watch, server = Watch(tmp_path, clock), Server("RUNNING")
    server.present = ("h1",)
    look(watch, server, clock, 4)
    assert server.asked == [("fednotes.pause", "j1")]  # once: it may take a while
    write_json(tmp_path / "r" / "outcome.json", {"job_id": "j1", "status": "paused", "lines": 3})
    server.status = "FINISHED:COMPLETED"
    look(watch, server, clock, 2)
    assert server.asked[1:] == [("resubmit", "j1")]


def test_a_site_that_begins_is_not_back(tmp_path: Path) -> None:
    """Nobody has answered yet: nothing is asked for."""
    clock = Clock()
    watch, server = Watch(tmp_path, clock), Server("RUNNING")
    server.present = ()
    look(watch, server, clock, 4)
    assert server.asked == []


def test_a_run_that_gets_nowhere_is_left_alone(tmp_path: Path) -> None:
    """Each attempt comes later than the one before, and then there is none."""
    clock = Clock()
    watch, server = Watch(tmp_path, clock), Server("FINISHED:ABNORMAL")
    attempts: list[float] = []
    for _ in range(2000):
        before = len(server.asked)
        look(watch, server, clock, 1)
        if len(server.asked) > before:
            attempts.append(clock.now)
    assert len(attempts) == ATTEMPTS
    waits = [later - earlier for earlier, later in pairwise(attempts)]
    assert waits == sorted(waits)
    assert waits[-1] >= 300


def test_an_attempt_that_commits_something_counts_no_longer(tmp_path: Path) -> None:
    clock = Clock()
    watch, server = Watch(tmp_path, clock), Server("FINISHED:ABNORMAL")
    for _ in range(3 * ATTEMPTS):
        outcome = {"job_id": f"j{server.number}", "status": "running", "lines": 1}
        write_json(tmp_path / "r" / "outcome.json", outcome)
        look(watch, server, clock, 4)
    assert len(server.asked) >= 3 * ATTEMPTS  # more than that many in a row


# ended by a person


def outcome(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "r" / "outcome.json").read_text())


def test_an_aborted_run_is_never_handed_in_again(tmp_path: Path) -> None:
    """Not by a watch that was started anew, nor where NVFlare has a later submission that failed:
    the watch may have handed it in at the moment of the abort."""
    write_json(tmp_path / "r" / "outcome.json", {"job_id": "j1", "status": "running", "lines": 3})
    clock = Clock()
    server = Server("FINISHED:ABORTED")
    look(Watch(tmp_path, clock), server, clock, 3)
    assert outcome(tmp_path)["status"] == "aborted"

    class Later(Server):
        def jobs(self) -> list[dict[str, Any]]:
            new, old = super().jobs()
            return [new, {**old, "status": "FINISHED:ABORTED"}]

    for status, asked in (("FINISHED:ABNORMAL", []), ("RUNNING", [("abort", "j1")] * 3)):
        later = Later(status)
        watch = Watch(tmp_path, clock)
        for _ in range(3):
            assert watch.look(later) == {"r": "done"}
            clock.now += 5.0
        assert later.asked == asked


# waiting


def test_a_run_that_waits_says_for_what(tmp_path: Path) -> None:
    clock = Clock()
    watch, server = Watch(tmp_path, clock), Server("SUBMITTED")
    server.connected = ("h1",)
    look(watch, server, clock, 2)
    assert outcome(tmp_path)["problem"] == "for h2"

    server.connected, server.others = ("h1", "h2"), [("first", "RUNNING")]
    look(watch, server, clock, 100)
    assert outcome(tmp_path) == {
        **{"job_id": "j1", "status": "waits", "lines": 0},
        "problem": "behind run first",
    }


def test_a_server_that_begins_no_job_is_found_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    clock = Clock()
    watch, server = Watch(tmp_path, clock), Server("SUBMITTED")
    look(watch, server, clock, int(STUCK_SECONDS // 5))
    assert not (tmp_path / "r" / "outcome.json").exists()
    look(watch, server, clock, 3)
    assert "fednotes server stop KIT, then start" in outcome(tmp_path)["problem"]
    assert caplog.text.count("does not begin jobs any more") == 1
    assert server.asked == []


# what is asked of NVFlare's engine


def test_a_job_is_handed_in_again_with_the_signature_and_name_of_who_did_first() -> None:
    cloned: list[dict[str, Any]] = []
    meta = {
        **{"name": "r", "job_id": "j1", "status": "RUNNING", "deploy_map": {"app": ["server"]}},
        **{"submitter_name": "admin@x.org", "submitter_org": "ward", "job_deploy_detail": ["x"]},
        "submitter_role": "project_admin",
    }
    store = SimpleNamespace(
        get_all_jobs=lambda context: [SimpleNamespace(meta=meta)],
        clone=lambda from_jid, meta, fl_ctx: cloned.append({"of": from_jid, **meta}),
    )
    late = SimpleNamespace(name="h2", last_connect_time=time.time() - RECENT_SECONDS - 1)
    engine = SimpleNamespace(
        job_def_manager=store,
        new_context=nullcontext,
        run_processes={},
        get_clients=lambda: [SimpleNamespace(name="h1", last_connect_time=time.time()), late],
    )
    jobs = ServerJobs(engine)
    (job,) = jobs.jobs()
    jobs.resubmit(job)
    assert cloned == [
        {
            **{"of": "j1", "cloned_from": "j1", "name": "r", "deploy_map": meta["deploy_map"]},
            **{key: meta[key] for key in meta if key.startswith("submitter")},
        }
    ]
    assert jobs.sites() == {"h1"}
    assert jobs.tell("j1") is None
    engine.run_processes["j1"] = object()
    for reply, told in ((None, {}), ({"data": {"sites": ["h1"]}}, {"sites": ["h1"]})):
        engine.send_app_command = lambda *_, reply=reply: reply
        assert jobs.tell("j1") == told
