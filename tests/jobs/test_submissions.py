"""Handing in and ending runs, against a server that the test plays.

It follows NVFlare's rules of what an order to abort does: a job that waits is over at once, one
that runs is over some time later, one whose process was killed cannot be aborted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fednotes.core.errors import ConfigError, RefusedError, TrainingError
from fednotes.jobs.deployed.runs import Run, abort, claim, hand_in, prepare, read_run, release
from fednotes.jobs.deployed.site_file import load_deployed

RUN = Run("job-1", Path("/kits/admin"), "a job", ("h1", "h2"), "f" * 64)


class Server:
    """Submissions by id: name, status, and whether a process of it lives."""

    def __init__(self, *statuses: str, alive: bool = True) -> None:
        self.statuses = {f"j{n}": status for n, status in enumerate(statuses)}
        self.alive, self.asked, self.looks = alive, list[tuple[str, str]](), 0
        self.summary = False
        self.watch: Callable[[], None] = lambda: None

    def jobs(self) -> list[dict[str, Any]]:
        self.looks += 1
        for job, status in self.statuses.items():
            if status == "ENDS":
                self.statuses[job] = "FINISHED:ABORTED"
        self.watch()
        other = {"name": "other", "job_id": "x", "status": "RUNNING", "submit_time": 9}
        return [
            other,
            *(
                {"name": "job-1", "job_id": job, "status": "RUNNING", "submit_time": int(job[1:])}
                | ({} if status == "ENDS" else {"status": status})
                for job, status in self.statuses.items()
            ),
        ]

    def abort(self, job_id: str) -> None:
        self.asked.append(("abort", job_id))
        if self.statuses[job_id] == "SUBMITTED":
            self.statuses[job_id] = "FINISHED:ABORTED"
        elif self.statuses[job_id] == "RUNNING":
            if not self.alive:
                raise TrainingError(f"the server answers: Job {job_id} is not running.")
            self.statuses[job_id] = "ENDS"

    def resubmit(self, job_id: str) -> str:
        self.asked.append(("resubmit", job_id))
        new = f"j{len(self.statuses)}"
        self.statuses[new] = "SUBMITTED"
        return new

    def fetch(self, job_id: str, out: Path) -> Path:
        if self.summary:
            (out / "fednotes").mkdir()
            (out / "fednotes" / "summary.json").write_text("{}")
        return out

    def submit(self, folder: Path) -> str:
        self.asked.append(("submit", folder.name))
        return "j0"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def ended(server: Any, out: Path) -> None:
    clock = Clock()
    abort(server, RUN, out, clock, clock.sleep)


# abort


@pytest.mark.parametrize(
    ("statuses", "alive", "asked"),
    [
        (["SUBMITTED"], True, [("abort", "j0")]),
        (["RUNNING"], True, [("abort", "j0")]),
        (["FINISHED:ABNORMAL", "RUNNING"], True, [("abort", "j1")]),
        # Between two submissions: the mark of an end needs one that can be aborted.
        (["FINISHED:ABNORMAL"], True, [("resubmit", "j0"), ("abort", "j1")]),
        (["FINISHED:COMPLETED"], True, [("resubmit", "j0"), ("abort", "j1")]),  # it was paused
        (["RUNNING"], False, [("abort", "j0"), ("resubmit", "j0"), ("abort", "j1")]),
        (["FINISHED:ABORTED"], True, []),
    ],
)
def test_a_run_ends_wherever_it_stands(
    statuses: list[str], alive: bool, asked: list[tuple[str, str]], tmp_path: Path
) -> None:
    server = Server(*statuses, alive=alive)
    ended(server, tmp_path)
    assert server.asked == asked
    assert "FINISHED:ABORTED" in server.statuses.values()


def test_a_job_that_is_being_handed_out_is_aborted_once_it_runs(tmp_path: Path) -> None:
    """NVFlare would mark it as aborted, and start it all the same."""
    server = Server("DISPATCHED")

    def begin() -> None:
        if server.looks == 3:
            server.statuses["j0"] = "RUNNING"

    server.watch = begin
    ended(server, tmp_path)
    assert server.asked == [("abort", "j0")]
    assert server.looks > 3


def test_what_the_watch_hands_in_meanwhile_ends_too(tmp_path: Path) -> None:
    server = Server("RUNNING")

    def resubmit() -> None:
        if server.looks == 2:
            server.statuses["j1"] = "SUBMITTED"

    server.watch = resubmit
    ended(server, tmp_path)
    assert set(server.statuses.values()) == {"FINISHED:ABORTED"}


def test_a_run_that_is_done_is_not_aborted(tmp_path: Path) -> None:
    server = Server("FINISHED:COMPLETED")
    server.summary = True
    with pytest.raises(ConfigError, match="is done, there is nothing to abort"):
        ended(server, tmp_path)
    (tmp_path / "summary.json").write_text("{}")
    server.summary = False
    with pytest.raises(ConfigError, match="fednotes run --attach"):
        ended(server, tmp_path)
    assert server.asked == []


def test_one_that_does_not_end_is_told(tmp_path: Path) -> None:
    server = Server("DISPATCHED")
    with pytest.raises(TrainingError, match="has not yet"):
        ended(server, tmp_path)


def test_an_unknown_run_is_not_aborted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not know run job-1"):
        ended(Server(), tmp_path)


# claim, hand in


def prepared(tmp_path: Path) -> tuple[Run, dict[str, Any], int]:
    path = tmp_path / "job.toml"
    path.write_text('method = "distill"\n[sites.h1]\n[sites.h2]\n[sites.h3]\n')
    parsed, declared = load_deployed(path)
    run, least = prepare(parsed, declared, tmp_path / "admin", tmp_path / "out", 0.0)
    return run, declared, least


def test_a_folder_is_taken_before_anything_is_handed_in(tmp_path: Path) -> None:
    run, declared, least = prepared(tmp_path)
    out, server = tmp_path / "out", Server()
    claim(run, declared, out)
    assert json.loads((out / "run.json").read_text())["submitting"] is True
    assert read_run(out) == run
    hand_in(server, run, declared, least, out)
    assert server.asked == [("submit", run.name)]
    assert "submitting" not in json.loads((out / "run.json").read_text())
    assert read_run(out) == run


def test_two_runs_do_not_get_one_folder(tmp_path: Path) -> None:
    """Both may have found it empty."""
    run, declared, _ = prepared(tmp_path)
    claim(run, declared, tmp_path / "out")
    with pytest.raises(ConfigError, match="another run has just taken it"):
        claim(run, declared, tmp_path / "out")


def test_a_folder_that_cannot_be_written_is_told_before(tmp_path: Path) -> None:
    run, declared, _ = prepared(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written .*nothing was handed in"):
        claim(run, declared, tmp_path / "file" / "out")


def test_a_run_that_never_reached_the_server_is_told(tmp_path: Path) -> None:
    run, declared, _ = prepared(tmp_path)
    out = tmp_path / "out"
    claim(run, declared, out)
    with pytest.raises(ConfigError, match="stopped before it reached the server: delete"):
        abort(Server(), run, out)  # type: ignore[arg-type]
    release(out)
    assert not out.exists()


def test_a_lost_answer_leaves_the_folder_its_run(tmp_path: Path) -> None:
    """Nobody knows whether the server has it; --attach asks."""
    run, declared, least = prepared(tmp_path)
    out = tmp_path / "out"
    claim(run, declared, out)

    class Lost(Server):
        def submit(self, folder: Path) -> str:
            raise TrainingError("the connection to the server is lost")

    with pytest.raises(TrainingError, match=f"is not known: fednotes run --attach --out {out}"):
        hand_in(Lost(), run, declared, least, out)  # type: ignore[arg-type]
    assert read_run(out) == run

    class Refusing(Server):
        def submit(self, folder: Path) -> str:
            raise RefusedError("the server refuses this")

    with pytest.raises(RefusedError):
        hand_in(Refusing(), run, declared, least, out)  # type: ignore[arg-type]
