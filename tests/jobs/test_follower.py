"""What `fednotes run` says while it follows a run, against a server that the test plays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fednotes.cli import deploy
from fednotes.core.errors import ConfigError, FednotesError
from fednotes.jobs.deployed.runs import Follower, Run, facts_of
from fednotes.jobs.results import RunResult

RUN = Run("job-1", Path("/kits/admin"), "a job", ("h1", "h2"), "f" * 64)


def round_line(number: int) -> dict[str, Any]:
    line = {"kind": "round", "round": number, "evaluated": True, "took_part": 2, "loss": 1.0}
    return line | {"bytes_up": 1, "bytes_down": 1, "seconds": 1.0}


def plan(done: int) -> dict[str, Any]:
    return {"kind": "plan", "rounds": 9, "examples": 5, "done": done}


class Display:
    def __init__(self) -> None:
        self.begun, self.rounds = 0, list[int]()

    def begin(self, *part: Any) -> None:
        self.begun += 1

    def round(self, result: Any) -> None:
        self.rounds.append(result.round)

    def end(self) -> None:
        pass


class Server:
    """Gives one look of `script` after the other: jobs, and the lines of the one that runs."""

    def __init__(self, *script: tuple[list[dict[str, Any]], list[dict[str, Any]]]) -> None:
        self.script, self.at = script, -1
        self.alive = True

    def jobs(self) -> list[dict[str, Any]]:
        self.at += 1
        return self.script[self.at][0]

    def sites(self, within: float = 0.0) -> tuple[str, ...]:
        return ("h1", "h2")

    def tell(self, job_id: str, topic: str = "", since: int = 0) -> dict[str, Any] | None:
        return {"lines": self.script[self.at][1][since:]} if self.alive else None


def job(name: str, job_id: str, status: str, when: int = 0) -> dict[str, Any]:
    return {"name": name, "job_id": job_id, "status": status, "submit_time": when}


def followed(server: Server, out: Path, *, fresh: bool = False) -> tuple[Display, list[str]]:
    display, said = Display(), list[str]()
    follower = Follower(
        RUN,
        out,
        display,  # type: ignore[arg-type]
        said.append,
        fresh,
        now=lambda: 0.0,
        sleep=lambda seconds: None,
    )
    with pytest.raises(FednotesError, match="was aborted by a person"):
        follower.follow(server)  # type: ignore[arg-type]
    return display, said


OVER = ([job("job-1", "z", "FINISHED:ABORTED", 99)], [])


def test_a_run_that_waits_behind_another_says_so_once(tmp_path: Path) -> None:
    """And asks no site before it begins."""
    other, mine = job("first", "a", "RUNNING"), job("job-1", "b", "SUBMITTED", 1)
    runs = ([job("job-1", "b", "RUNNING", 1)], [])
    server = Server(([other, mine], []), ([other, mine], []), runs, runs, OVER)
    _, said = followed(server, tmp_path, fresh=True)
    assert said == [
        "waits behind run first (fednotes run --abort --out its folder ends it)",
        "a site that has not approved it is asked to: there, fednotes site approve KIT",
    ]


def test_a_run_whose_server_was_killed_stands_in_nobodys_way(tmp_path: Path) -> None:
    """NVFlare goes on to call it running."""
    other, mine = job("first", "a", "RUNNING"), job("job-1", "b", "SUBMITTED", 1)
    server = Server(([other, mine], []), OVER)
    server.alive = False
    assert followed(server, tmp_path)[1] == []


def test_rounds_that_were_shown_are_not_shown_again(tmp_path: Path) -> None:
    """A second submission tells all rounds of its checkpoint, and repeats some after it."""
    first, second = job("job-1", "a", "RUNNING"), job("job-1", "b", "RUNNING", 1)
    lines = [plan(0), *map(round_line, range(4))]
    again = [plan(3), *map(round_line, range(3)), *map(round_line, range(3, 6))]
    gone = job("job-1", "a", "FINISHED:ABNORMAL")
    server = Server(([first], lines), ([gone, second], again), ([gone, second], again), OVER)
    display, said = followed(server, tmp_path)
    assert display.rounds == [0, 1, 2, 3, 4, 5]
    assert said == ["goes on from round 3"]


def test_who_attaches_later_sees_all_rounds(tmp_path: Path) -> None:
    lines = [plan(3), *map(round_line, range(5))]
    display, said = followed(Server(([job("job-1", "b", "RUNNING")], lines), OVER), tmp_path)
    assert display.rounds == [0, 1, 2, 3, 4]
    assert said == []


def test_a_run_is_known_to_be_handed_in_once_the_server_has_it(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(facts_of(RUN, submitting=True)))
    followed(Server(OVER), tmp_path)
    assert "submitting" not in json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(facts_of(RUN, submitting=True)))
    follower = Follower(RUN, tmp_path, Display(), print)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="before it reached the server"):
        follower.follow(Server(([job("other", "x", "RUNNING")], [])))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "hint"),
    [
        ("distill", "fednotes predict {out}/model --text TEXT"),
        ("pretrain", 'encoder = "{out}/model"'),
    ],
)
def test_what_a_model_is_good_for(
    method: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that was trained on words finds no entities yet."""
    (tmp_path / "model").mkdir()
    with mock.patch("fednotes.report.html.write_report"):
        deploy._told(tmp_path, "job-1", RunResult(method=method))
    told = capsys.readouterr().out
    assert hint.format(out=tmp_path) in told
    assert ("predict" in told) == (method == "distill")
