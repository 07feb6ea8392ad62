"""Submitting, following and ending runs, against servers that the test plays.

One follows NVFlare's rules of what an order to abort does: a job that waits is over at
once, one that runs is over some time later, one whose process was killed cannot be
aborted.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from clock import Clock
from rich.console import Console

from fednotes.apps.deployment.commands import deploy
from fednotes.apps.deployment.runs import (
    Follower,
    Run,
    abort_run,
    adopt_folder,
    build_run_facts,
    claim_folder,
    find_run,
    prepare_run,
    read_run,
    release_folder,
    submit_run,
)
from fednotes.cli.display import RichDisplay
from fednotes.core.errors import (
    ConfigError,
    DataError,
    FednotesError,
    RefusedError,
    TrainingError,
)
from fednotes.core.tables import fingerprint_table
from fednotes.jobs.declaration import load_declared, make_table_to_approve
from fednotes.jobs.results import RunResult

RUN = Run("job-1", Path("/kits/admin"), "a job", ("h1", "h2"), "f" * 64)
Table = dict[str, Any]


def job(name: str, job_id: str, status: str, when: int = 0) -> Table:
    deployed = {"app": ["server", "h1", "h2"]}
    facts = {"name": name, "job_id": job_id, "status": status, "submit_time": when}
    return {**facts, "deploy_map": deployed}


class Server:
    """Submissions of a run by id, with their status. alive: whether a process of it
    lives."""

    def __init__(self, *statuses: str, alive: bool = True) -> None:
        self.statuses = {f"j{n}": status for n, status in enumerate(statuses)}
        self.alive, self.orders, self.looks = alive, list[tuple[str, str]](), 0
        self.summary, self.text = False, "{}"
        self.watch: Callable[[], None] = lambda: None
        self.refuses: Exception | None = None

    def list_jobs(self) -> list[Table]:
        self.looks += 1
        for job_id, status in self.statuses.items():
            if status == "ENDS":
                self.statuses[job_id] = "FINISHED:ABORTED"
        self.watch()
        ours = [
            job("job-1", job_id, status.replace("ENDS", "RUNNING"), int(job_id[1:]))
            for job_id, status in self.statuses.items()
        ]
        return [job("other", "x", "RUNNING", 9), *ours]

    def abort(self, job_id: str) -> None:
        self.orders.append(("abort", job_id))
        if self.statuses[job_id] == "SUBMITTED":
            self.statuses[job_id] = "FINISHED:ABORTED"
        elif self.statuses[job_id] == "RUNNING":
            if not self.alive:
                raise TrainingError(f"the server reports: Job {job_id} is not running.")
            self.statuses[job_id] = "ENDS"

    def resubmit(self, job_id: str) -> str:
        self.orders.append(("resubmit", job_id))
        new_id = f"j{len(self.statuses)}"
        self.statuses[new_id] = "SUBMITTED"
        return new_id

    def fetch(self, job_id: str, out: Path) -> Path:
        if self.summary:
            (out / "fednotes" / "model").mkdir(parents=True)
            (out / "fednotes" / "summary.json").write_text(self.text)
        return out

    def submit(self, folder: Path) -> str:
        if self.refuses:
            raise self.refuses
        self.orders.append(("submit", folder.name))
        return "j0"


def ended(server: Any, out: Path) -> None:
    clock = Clock()
    abort_run(server, RUN, out, now=clock, sleep=clock.sleep)


# abort


@pytest.mark.parametrize(
    ("statuses", "alive", "orders"),
    [
        (["SUBMITTED"], True, [("abort", "j0")]),
        (["RUNNING"], True, [("abort", "j0")]),
        (["FINISHED:ABNORMAL", "RUNNING"], True, [("abort", "j1")]),
        # Between two submissions: the mark of an end needs one that can be aborted.
        (["FINISHED:ABNORMAL"], True, [("resubmit", "j0"), ("abort", "j1")]),
        # it was paused
        (["FINISHED:COMPLETED"], True, [("resubmit", "j0"), ("abort", "j1")]),
        (["RUNNING"], False, [("abort", "j0"), ("resubmit", "j0"), ("abort", "j1")]),
        (["FINISHED:ABORTED"], True, []),
    ],
)
def test_a_run_is_aborted_in_any_state(
    statuses: list[str], alive: bool, orders: list[tuple[str, str]], tmp_path: Path
) -> None:
    server = Server(*statuses, alive=alive)
    ended(server, tmp_path)
    assert server.orders == orders
    assert "FINISHED:ABORTED" in server.statuses.values()


@pytest.mark.parametrize(
    ("status", "look", "later", "orders"),
    [
        # NVFlare would mark it as aborted while it is handed out, and start it all the
        # same.
        ("DISPATCHED", 3, {"j0": "RUNNING"}, [("abort", "j0")]),
        # by the watch
        ("RUNNING", 2, {"j1": "SUBMITTED"}, [("abort", "j0"), ("abort", "j1")]),
    ],
)
def test_a_run_that_changes_during_an_abort_still_ends(
    status: str, look: int, later: dict[str, str], orders: list[Any], tmp_path: Path
) -> None:
    server = Server(status)
    server.watch = lambda: server.statuses.update(later if server.looks == look else {})
    ended(server, tmp_path)
    assert server.orders == orders
    assert server.looks > look
    assert set(server.statuses.values()) == {"FINISHED:ABORTED"}


def test_a_finished_run_is_not_aborted(tmp_path: Path) -> None:
    server = Server("FINISHED:COMPLETED")
    server.summary = True
    with pytest.raises(ConfigError, match="is done, so there is nothing to abort"):
        ended(server, tmp_path)
    (tmp_path / "summary.json").write_text("{}")
    server.summary = False
    with pytest.raises(ConfigError, match="fednotes run --attach"):
        ended(server, tmp_path)
    assert server.orders == []


@pytest.mark.parametrize(
    "text",
    [
        '{"sites": [[1]]}',
        '{"seconds": 1%s}' % ("0" * 400),
        '{"sites": 5, "mean": [1]}',
        "[",
    ],
)
def test_a_fetched_result_is_stored_whatever_its_summary_contains(
    text: str, tmp_path: Path
) -> None:
    server, out = Server("FINISHED:COMPLETED"), tmp_path / "out"
    server.summary, server.text = True, text
    out.mkdir()
    follower = Follower(RUN, out, mock.Mock(), print)
    with suppress(DataError):
        follower.follow(server)  # type: ignore[arg-type]
    assert (out / "summary.json").read_text() == text
    assert (out / "model").is_dir()


def test_a_server_cannot_replace_a_file_that_the_admin_wrote(tmp_path: Path) -> None:
    """Such as run.json, which names the kit that the next command uses."""

    class Replacing(Server):
        def fetch(self, job_id: str, out: Path) -> Path:
            files = super().fetch(job_id, out) / "fednotes"
            for name in ("run.json", "job.json", "report.html", "lock"):
                (files / name).write_text("of the server")
            return out

    server, out = Replacing("FINISHED:COMPLETED"), tmp_path / "out"
    server.summary = True
    out.mkdir()
    (out / "run.json").write_text("mine")
    Follower(RUN, out, mock.Mock(), print).follow(server)  # type: ignore[arg-type]
    assert (out / "run.json").read_text() == "mine"
    assert sorted(path.name for path in out.iterdir()) == [
        "model",
        "run.json",
        "summary.json",
    ]


class OddServer(Server):
    """A server whose finished run holds an odd file or, without a text, a folder."""

    def __init__(self, name: str, text: str | None) -> None:
        super().__init__("FINISHED:COMPLETED")
        self.name, self.content = name, text

    def fetch(self, job_id: str, out: Path) -> Path:
        files = super().fetch(job_id, out) / "fednotes"
        files.mkdir(exist_ok=True)
        path = files / self.name
        if path.is_dir():
            path.rmdir()
        if self.content is None:
            path.mkdir()
        else:
            path.write_text(self.content)
        return out


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("problem.json", '{"x": 1}', "will not be resumed: the server gave no reason"),
        ("problem.json", '{"again": true}', "does not resubmit it"),
        ("problem.json", None, "does not resubmit it"),
        ("summary.json", None, "does not resubmit it"),
    ],
)
def test_odd_files_of_a_server_end_the_watching_with_a_reason(
    name: str, text: str | None, message: str, tmp_path: Path
) -> None:
    clock = Clock()
    server: Any = OddServer(name, text)
    follower = Follower(RUN, tmp_path, mock.Mock(), print, now=clock, sleep=clock.sleep)
    with pytest.raises(FednotesError, match=message):
        follower.follow(server)


@pytest.mark.parametrize(("name", "text"), [("metrics.jsonl", None), ("model", "x")])
def test_a_folder_in_place_of_a_fetched_file_is_ignored(
    name: str, text: str | None, tmp_path: Path
) -> None:
    """Neither does a file replace a folder."""
    server: Any = OddServer(name, text)
    server.summary = True
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "model").mkdir()
    Follower(RUN, tmp_path, mock.Mock(), print).follow(server)
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert (tmp_path / "model").is_dir()


def test_a_run_that_does_not_end_or_is_unknown_is_reported(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="has not ended yet"):
        ended(Server("DISPATCHED"), tmp_path)
    with pytest.raises(ConfigError, match="does not know run job-1"):
        ended(Server(), tmp_path)


def test_a_run_without_its_folder_is_aborted_by_its_name(tmp_path: Path) -> None:
    server = Server("RUNNING")
    run = find_run(server, Path("/kits/admin"), "job-1")  # type: ignore[arg-type]
    assert (run.name, run.sites) == ("job-1", ("h1", "h2"))
    clock = Clock()
    abort_run(server, run, None, now=clock, sleep=clock.sleep)  # type: ignore[arg-type]
    assert server.orders == [("abort", "j0")]
    with pytest.raises(
        ConfigError,
        match=r"does not know run 'job-9'; its newest runs: job-1 \(finished:aborted\), other \(running\)$",
    ):
        find_run(server, Path("/kits/admin"), "job-9")  # type: ignore[arg-type]
    done = Server("FINISHED:COMPLETED")
    done.summary = True
    with pytest.raises(
        ConfigError, match=r"fednotes run --attach job-1 --on /kits/admin$"
    ):
        abort_run(done, run, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="does not know run job-1"):
        abort_run(Server(), run, None)  # type: ignore[arg-type]


def test_a_run_selected_by_name_gets_a_folder(tmp_path: Path) -> None:
    """The folder where it was submitted, or an empty one, and no other."""
    named_run = replace(RUN, title="job-1", fingerprint="")
    new = tmp_path / "new"
    assert adopt_folder(named_run, new) == named_run
    assert read_run(new) == named_run
    assert "submitting" not in json.loads((new / "run.json").read_text())
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.json").write_text(json.dumps(build_run_facts(RUN)))
    assert adopt_folder(named_run, tmp_path / "old") == RUN
    other_run = replace(named_run, name="job-2")
    with pytest.raises(ConfigError, match="already holds run job-1"):
        adopt_folder(other_run, new)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    with pytest.raises(ConfigError, match="is not empty: choose another"):
        adopt_folder(other_run, tmp_path / "full")


def test_the_declaration_of_a_run_without_its_folder_is_fetched(tmp_path: Path) -> None:
    """One that the admin has written stays."""
    table = {"name": "job", "job": {"method": "distill"}}
    declared = {"run": "job-1", "sites": ["h1", "h2"], "min_sites": 2, "job": table}

    class Sending(Server):
        def fetch(self, job_id: str, out: Path) -> Path:
            files = super().fetch(job_id, out)
            config = files / "app_server" / "config"
            config.mkdir(parents=True)
            (config / "job.json").write_text(json.dumps(declared))
            return files

    server, out = Sending("FINISHED:COMPLETED"), tmp_path / "out"
    server.summary = True
    out.mkdir()
    Follower(RUN, out, mock.Mock(), print).follow(server)  # type: ignore[arg-type]
    fingerprint = fingerprint_table(make_table_to_approve(table, ("h1", "h2"), 2))
    record = json.loads((out / "job.json").read_text())
    assert record == {**table, "fingerprint": fingerprint}
    (out / "job.json").write_text("{}")
    Follower(RUN, out, mock.Mock(), print).follow(server)  # type: ignore[arg-type]
    assert (out / "job.json").read_text() == "{}"


# claim, hand in


@pytest.fixture
def prepared(tmp_path: Path) -> tuple[Run, Table, int]:
    """Return a run that is ready to be submitted from `tmp_path/out`, its job and least
    sites."""
    path = tmp_path / "job.toml"
    path.write_text('method = "distill"\n[sites.h1]\n[sites.h2]\n[sites.h3]\n')
    parsed, declared = load_declared(path)
    run, least = prepare_run(
        parsed, declared, tmp_path / "admin", out=tmp_path / "out", when=0.0
    )
    return run, declared, least


def test_a_folder_is_claimed_before_the_submission(
    tmp_path: Path, prepared: tuple[Run, Table, int]
) -> None:
    (run, declared, least), out, server = prepared, tmp_path / "out", Server()
    claim_folder(run, declared, out)
    assert json.loads((out / "run.json").read_text())["submitting"] is True
    assert read_run(out) == run
    with pytest.raises(ConfigError, match="another run has just taken it"):
        claim_folder(run, declared, out)  # both may have found it empty
    with pytest.raises(
        ConfigError, match="stopped before it reached the server: delete"
    ):
        abort_run(Server(), run, out)  # type: ignore[arg-type]
    for error, match in (
        (
            TrainingError("lost"),
            f"unknown whether the server received run .* --attach --out {out}",
        ),
        (RefusedError("the server refuses this"), "the server refuses this"),
    ):
        server.refuses = error
        with pytest.raises(type(error), match=match):
            submit_run(server, run, declared, min_sites=least, out=out)  # type: ignore[arg-type]
        # nobody knows whether the server has it; --attach asks
        assert read_run(out) == run
    server.refuses = None
    submit_run(server, run, declared, min_sites=least, out=out)  # type: ignore[arg-type]
    assert server.orders == [("submit", run.name)]
    assert "submitting" not in json.loads((out / "run.json").read_text())
    assert read_run(out) == run
    release_folder(out)
    assert not out.exists()


def test_a_folder_that_cannot_be_written_is_reported_beforehand(
    tmp_path: Path, prepared: tuple[Run, Table, int]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written .*nothing was submitted"):
        claim_folder(prepared[0], prepared[1], tmp_path / "file" / "out")


# follow


def round_line(number: int) -> Table:
    line = {
        "kind": "round",
        "round": number,
        "evaluated": True,
        "took_part": 2,
        "loss": 1.0,
    }
    return line | {"bytes_up": 1, "bytes_down": 1, "seconds": 1.0}


def plan(rounds_done: int) -> Table:
    return {"kind": "plan", "rounds": 9, "examples": 5, "done": rounds_done}


class Script:
    """A server that gives one look after the other: jobs, and the lines of the one that
    runs."""

    def __init__(
        self, *looks: tuple[list[Table], list[Table]], alive: bool = True
    ) -> None:
        self.looks, self.at, self.alive = looks, -1, alive

    def list_jobs(self) -> list[Table]:
        self.at += 1
        return self.looks[self.at][0]

    def list_sites(self, within: float = 0.0) -> tuple[str, ...]:
        return ("h1", "h2")

    def read_progress(self, job_id: str, since: int = 0) -> Table | None:
        return {"lines": self.looks[self.at][1][since:]} if self.alive else None


def followed(
    server: Script, out: Path, *, just_submitted: bool = False
) -> tuple[list[int], list[str]]:
    """Return the rounds that are shown, and the printed lines."""
    display, lines, clock = mock.Mock(), list[str](), Clock()
    follower = Follower(
        RUN, out, display, lines.append, just_submitted, lambda: 0.0, clock.sleep
    )
    with pytest.raises(FednotesError, match="was aborted by a person"):
        follower.follow(server)  # type: ignore[arg-type]
    return [call.args[0].round for call in display.round.call_args_list], lines


FIRST, SECOND = job("job-1", "a", "RUNNING"), job("job-1", "b", "RUNNING", 1)
BEHIND = [job("first", "a", "RUNNING"), job("job-1", "b", "SUBMITTED", 1)]
OVER = ([job("job-1", "z", "FINISHED:ABORTED", 99)], [])


def test_a_run_that_waits_for_another_reports_it_once(tmp_path: Path) -> None:
    """And asks no site before it begins. One whose server was killed stands in nobody's
    way: NVFlare goes on to call it running."""
    server = Script((BEHIND, []), (BEHIND, []), ([SECOND], []), ([SECOND], []), OVER)
    assert followed(server, tmp_path, just_submitted=True)[1] == [
        "waiting until run first has ended (to abort that run: fednotes run --abort first --on /kits/admin)",
        "a site that has not approved the job must do so first; run there: fednotes site approve KIT",
    ]
    assert followed(Script((BEHIND, []), OVER, alive=False), tmp_path)[1] == []


@pytest.mark.parametrize(
    "line",
    [
        "text",
        None,
        {"kind": "plan"},
        {"kind": "plan", "rounds": "many", "examples": 1},
        {"kind": "round", "round": math.inf},
        {**round_line(0), "seconds": []},
        {**round_line(0), "bytes_up": 10**400},
        {**round_line(0), "loss": "small"},
        {"kind": "event"},
    ],
)
def test_a_line_that_cannot_be_shown_does_not_end_the_watching_of_a_run(
    line: Any, tmp_path: Path
) -> None:
    lines = [plan(0), line, round_line(1), {"kind": "event", "text": "goes on"}]
    said = list[str]()
    server: Any = Script(([FIRST], lines), OVER)
    with (
        RichDisplay(Console(file=io.StringIO())) as display,
        pytest.raises(FednotesError, match="was aborted by a person"),
    ):
        Follower(
            RUN, tmp_path, display, said.append, now=lambda: 0.0, sleep=lambda _: None
        ).follow(server)
    assert said == ["goes on"]


def test_progress_without_lines_does_not_end_the_watching_of_a_run(
    tmp_path: Path,
) -> None:
    server = Script(([FIRST], []), OVER)
    with mock.patch.object(server, "read_progress", return_value={"lines": 1}):
        assert followed(server, tmp_path) == ([], [])


def test_absent_sites_are_reported_with_the_minutes(
    tmp_path: Path,
) -> None:
    """Again after five minutes; a connected site that the job lacks may be meant."""
    clock, lines = Clock(), list[str]()
    waiting = ([job("job-1", "a", "SUBMITTED")], [])
    server = Script(*[waiting] * 330, OVER)
    server.list_sites = lambda within=0.0: ("h1", "h20")  # type: ignore[method-assign]
    follower = Follower(
        RUN, tmp_path, mock.Mock(), lines.append, now=clock, sleep=clock.sleep
    )
    with pytest.raises(FednotesError, match="was aborted by a person"):
        follower.follow(server)  # type: ignore[arg-type]
    advice = (
        "connected, but not in this job: h20; did you mean 'h20'? If the job "
        f"misspells a name, run fednotes run --abort --out {tmp_path}, and submit the "
        "corrected job. Otherwise, at each of these sites, run: fednotes site start KIT"
    )
    assert lines == [
        f"not connected: h2 (less than 1 min); {advice}",
        f"not connected: h2 (5 min); {advice}",
    ]


def test_a_stop_is_called_a_pause_if_the_server_continues(
    tmp_path: Path,
) -> None:
    class Failing(Server):
        def fetch(self, job_id: str, out: Path) -> Path:
            (out / "fednotes").mkdir()
            problem = {"problem": "site 'h1' is lost", "again": True}
            (out / "fednotes" / "problem.json").write_text(json.dumps(problem))
            self.statuses[job_id] = "FINISHED:ABORTED"
            return out

    lines = list[str]()
    follower = Follower(
        RUN, tmp_path, mock.Mock(), lines.append, sleep=lambda seconds: None
    )
    with pytest.raises(FednotesError, match="was aborted by a person"):
        follower.follow(Failing("FINISHED:EXECUTION_EXCEPTION"))  # type: ignore[arg-type]
    assert lines == [
        "paused: site 'h1' is lost; the server resumes the run automatically"
    ]


def test_the_remaining_time_leaves_out_what_a_run_waited(tmp_path: Path) -> None:
    """An hour for approvals before the first round, and half an hour for a site in the
    eighth. Each round takes 2 s, and after the eleventh nine are left.
    """
    ends = [3600.0 + 2 * number + 1800 * (number > 6) for number in range(11)]
    lines = [{**plan(0), "rounds": 20}]
    lines += [{**round_line(n), "seconds": seconds} for n, seconds in enumerate(ends)]
    shown = io.StringIO()
    display, clock = RichDisplay(Console(file=shown, width=200)), Clock()
    follower = Follower(RUN, tmp_path, display, print, now=clock, sleep=clock.sleep)
    with pytest.raises(FednotesError, match="was aborted by a person"):
        follower.follow(Script(([FIRST], lines), OVER))  # type: ignore[arg-type]
    left = re.findall(r"about (.+) left", shown.getvalue())
    assert left[-1] == "18.0 s"
    assert not any("min" in text or " h" in text for text in left)


def test_rounds_are_shown_only_once(tmp_path: Path) -> None:
    """A second submission tells all rounds of its checkpoint, and repeats some after
    it."""
    lines = [plan(0), *map(round_line, range(4))]
    again = (
        [FIRST | {"status": "FINISHED:ABNORMAL"}, SECOND],
        [plan(3), *map(round_line, range(6))],
    )
    server = Script(([FIRST], lines), again, again, OVER)
    assert followed(server, tmp_path) == ([0, 1, 2, 3, 4, 5], ["resumes from round 3"])


def test_missing_approvals_are_reported(tmp_path: Path) -> None:
    line = {
        "kind": "approvals",
        "since": {"h1": 1.0},
        "text": "waiting for the approval of: h1",
    }
    server = Script(([SECOND], [line]), OVER)
    assert followed(server, tmp_path) == ([], ["waiting for the approval of: h1"])


def test_a_watcher_that_attaches_later_sees_all_rounds(tmp_path: Path) -> None:
    lines = [plan(3), *map(round_line, range(5))]
    assert followed(Script(([SECOND], lines), OVER), tmp_path) == ([0, 1, 2, 3, 4], [])


def test_a_run_counts_as_submitted_once_the_server_has_it(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(
        json.dumps(build_run_facts(RUN, submitting=True))
    )
    followed(Script(OVER), tmp_path)
    assert "submitting" not in json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(
        json.dumps(build_run_facts(RUN, submitting=True))
    )
    follower = Follower(RUN, tmp_path, mock.Mock(), print)
    with pytest.raises(ConfigError, match="before it reached the server"):
        follower.follow(Script(([job("other", "x", "RUNNING")], [])))  # type: ignore[arg-type]


def test_a_run_prints_its_summary_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = RunResult(method="distill", metrics={"valid_f1": 0.5})

    def follow(follower: Follower, connect: object) -> RunResult:
        follower.say("a line about the run")
        return result

    module = "fednotes.apps.deployment.runs"
    with (
        mock.patch(f"{module}.follow_with_reconnects", follow),
        mock.patch(f"{module}.open_admin_kit", lambda kit: mock.Mock(path=kit)),
        mock.patch("fednotes.report.html.write_report"),
        mock.patch("fednotes.jobs.card.write_cards"),
    ):
        deploy._watch(RUN, tmp_path, json_output=True)
    printed = capsys.readouterr()
    assert json.loads(printed.out) == result.model_dump()
    assert "a line about the run" in printed.err


@pytest.mark.parametrize(
    ("method", "hint"),
    [
        ("distill", "fednotes predict {out}/model --text TEXT"),
        ("pretrain", 'encoder = "{out}/model"'),
    ],
)
def test_the_end_of_a_run_says_how_to_use_its_model(
    method: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that was trained on words finds no entities yet."""
    (tmp_path / "model").mkdir()
    report = tmp_path / "report.html"
    deploy._say_results(tmp_path, "job-1", RunResult(method=method), report)
    output = capsys.readouterr().out
    assert hint.format(out=tmp_path) in output
    assert ("predict" in output) == (method == "distill")


@pytest.mark.parametrize(
    ("elapsed", "time"),
    [
        (None, "13 min 31 s"),
        (
            1240.0,
            "20 min 40 s (13 min 31 s working, 7 min 09 s waiting for approvals, sites "
            "or the server)",
        ),
        (815.0, "13 min 31 s"),
    ],
)
def test_the_time_of_a_run_is_split_into_work_and_waiting(
    elapsed: float | None,
    time: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    costs: dict[str, Any] = {"rounds": 10}
    if elapsed is not None:
        costs["elapsed"] = elapsed
    result = RunResult(method="distill", seconds=811.0, conditions={"federated": costs})
    deploy._say_results(tmp_path, "job-1", result, tmp_path / "report.html")
    assert f"done: 10 rounds in {time}\n" in capsys.readouterr().out


@pytest.mark.parametrize("action", ["--attach", "--abort"])
def test_settings_are_refused_for_a_submitted_run(action: str, tmp_path: Path) -> None:
    """Otherwise a person would take its results for those of the other settings."""
    options = {"attach": action == "--attach", "abort": action == "--abort"}
    with pytest.raises(ConfigError, match="--set changes a job that is submitted"):
        deploy.run(out=tmp_path, settings=["seed=2"], **options)
