"""Runs with worker processes: results, errors, kills and interrupts."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Command
from tiny_jobs import JOB, SITES, TABLE, corpus
from typer.testing import CliRunner
from worker_runs import (
    check_same_files,
    find_workers,
    is_running,
    read_run,
    wait_until,
)

from fednotes.cli import app
from fednotes.core.errors import ConfigError, DataError, ParameterError, WorkerError
from fednotes.engines.rounds import RoundResult
from fednotes.jobs.job_file import load_job, parse_job
from fednotes.jobs.parts import Part
from fednotes.jobs.progress import ProgressListener
from fednotes.jobs.results import RunResult
from fednotes.jobs.seeds import simulate_seeds
from fednotes.jobs.simulate import simulate
from fednotes.jobs.workers import child_process, dealing, pool
from fednotes.jobs.workers.child_process import (
    PREDICTIONS,
    ChildProcess,
    starting_early,
)
from fednotes.jobs.workers.child_process import SITES as SITES_OF_A_RUN
from fednotes.jobs.workers.dealing import (
    Pace,
    check_workers,
    choose_devices,
    choose_worker_number,
    count_cores,
    count_free_cores,
    count_useful_workers,
    deal_sites,
    list_devices,
    list_divided_parts,
    parse_workers,
)
from fednotes.jobs.workers.turns import Turns
from fednotes.jobs.workers.worker_messages import require_equal_data


@pytest.fixture(autouse=True)
def _many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "count_cores", lambda: 8)


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a job of two sites whose notes are in files."""
    folder = tmp_path_factory.mktemp("job")
    corpus(folder / "north.conll", "DRUG", "vol")
    corpus(folder / "south.conll", "DRUG", "tal")
    text = JOB.replace('["federated"]', '["alone", "federated"]').replace(
        "epochs = 1", "epochs = 2"
    )
    (folder / "job.toml").write_text(text + SITES)
    return folder / "job.toml"


@pytest.fixture(scope="module")
def in_one_process(job_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("one") / "run"
    simulate(load_job(str(job_file)), out)
    return out


class Log(ProgressListener):
    """Keeps the events of a run, in their order."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def begin(self, part: Part, rounds: int, sentences: int) -> None:
        self.events.append(("begin", part.name, rounds, sentences))

    def round(self, result: RoundResult) -> None:
        self.events.append(("round", result.round, result.bytes_up, result.evaluated))

    def end(self) -> None:
        self.events.append("end")

    def sort_by_part(self) -> dict[str, list[Any]]:
        """Return the events of each part, which come one part after another."""
        events: dict[str, list[Any]] = {}
        for event in self.events:
            if event[0] == "begin":
                part = events.setdefault(event[1], [])
            part.append(event)
        return events


@pytest.mark.slow
def test_a_run_in_workers_writes_the_files_of_one_process(
    job_file: Path, tmp_path: Path
) -> None:
    """Weights, scores, curves and documents counts, to the last bit; and the listener
    sees the same events."""
    here, there = Log(), Log()
    job = load_job(str(job_file))
    simulate(job, tmp_path / "here", listener=here)
    result = simulate(job, tmp_path / "there", workers=2, listener=there)
    assert read_run(tmp_path / "there") == read_run(tmp_path / "here")
    assert there.sort_by_part() == here.sort_by_part()
    assert (result.workers, result.threads) == (2, 1)
    record = json.loads((tmp_path / "there" / "job.json").read_text())
    assert (record["workers"], record["threads"]) == (2, 1)
    assert find_workers(os.getpid()) == []


OF_TAG_SETS: dict[str, Any] = {
    "seed": 2,
    "synthetic": {"sites": 3, "sentences": 30},
    "training": {"rounds": 2},
    "model": TABLE["model"],
}
METHODS: dict[str, dict[str, Any]] = {
    "fedner": TABLE,
    "fedner, secure": TABLE | {"federation": {"secure_sum": True}},
    "distill": OF_TAG_SETS | {"method": "distill"},
    "adversarial": OF_TAG_SETS | {"method": "adversarial"},
    "finetune": {
        "method": "finetune",
        "seed": 2,
        "synthetic": {"sites": 3, "sentences": 20},
        "training": {"cycles": 2, "min_tokens": 0, "min_steps": 0},
        "model": {"encoder": "BERT"},
    },
    "personal": {
        "method": "personal",
        "seed": 2,
        "synthetic": {"sites": 2, "sentences": 20},
        "training": {"cycles": 2, "distil_epochs": 1},
        "model": {"encoder": "BERT", "train": "lora"},
    },
    "fedmd": OF_TAG_SETS
    | {
        "method": "fedmd",
        "training": {"rounds": 1, "first_epochs": 1, "public_sentences": 20},
    },
    "pretrain": {
        "method": "pretrain",
        "seed": 2,
        "synthetic": {"sites": 2, "sentences": 20},
        "training": {"cycles": 2, "length": 24},
        "model": {"encoder": "BERT", "objective": "mlm"},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_each_method_writes_the_files_of_one_process_in_workers(
    name: str, bert: Path, tmp_path: Path
) -> None:
    """All conditions."""
    table = json.loads(json.dumps(METHODS[name]).replace("BERT", str(bert)))
    job = parse_job(table, "job", tmp_path, "job.toml")
    check_same_files(job, tmp_path)


@pytest.mark.slow
def test_the_runs_of_several_seeds_share_workers(
    job_file: Path, tmp_path: Path
) -> None:
    job = load_job(str(job_file))
    simulate_seeds(job, tmp_path / "one", [1, 2])
    simulate_seeds(job, tmp_path / "two", [1, 2], workers=2)
    assert read_run(tmp_path / "two") == read_run(tmp_path / "one")
    assert find_workers(os.getpid()) == []


def test_the_reported_time_per_site_does_not_depend_on_the_number_of_workers() -> None:
    """Four sites took 40 s one after another, so 20 s two at a time."""
    sites: dict[str, Any] = {site: {} for site in "abcd"}
    for workers, seconds in ((1, 40), (2, 20), (4, 10), (9, 10)):
        conditions = {"federated": {"seconds": seconds}}
        result = RunResult(sites=sites, conditions=conditions, workers=workers)
        assert result.cost == "10.0 s"


# workers that start by themselves


class Names(ProgressListener):
    """Keeps the names of the parts."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def begin(self, part: Part, rounds: int, sentences: int) -> None:
        self.names.append(part.name)


@pytest.mark.slow
def test_workers_start_automatically_for_a_long_run(
    job_file: Path,
    in_one_process: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dealing, "count_free_cores", lambda: 4)
    monkeypatch.setattr(pool, "LONG_SECONDS", 1e-9)
    listener = Names()
    result = simulate(load_job(str(job_file)), tmp_path / "run", listener=listener)
    assert result.workers == 2  # as many as there are sites
    record = json.loads((tmp_path / "run" / "job.json").read_text())
    assert record["workers"] == 2
    assert listener.names == ["alone/north", "alone/south", "federated"]
    assert read_run(tmp_path / "run") == read_run(in_one_process)
    assert find_workers(os.getpid()) == []


def test_a_short_run_starts_no_worker(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dealing, "count_free_cores", lambda: 4)
    # The limit of half a minute would be reached while other work fills the machine.
    monkeypatch.setattr(pool, "LONG_SECONDS", 600.0)

    def start(*arguments: object) -> None:
        raise AssertionError("a worker starts")

    monkeypatch.setattr(pool, "WorkerProcess", start)
    result = simulate(load_job(str(job_file)), tmp_path / "run")
    assert result.workers == 1


def test_the_pace_is_estimated_from_finished_parts() -> None:
    """Two of eight units took 6 s: three more take 9 s."""
    pace = Pace({"a": 2.0, "b": 3.0, "c": 3.0, "unknown": 0.0})
    assert pace.expect(["b"]) == 0
    pace.record("unknown", 5.0)
    assert pace.expect(["b"]) == 0
    pace = Pace({"a": 2.0, "b": 3.0, "c": 3.0})
    pace.record("a", 6.0)
    assert pace.expect(["b"]) == 9.0
    assert pace.expect(["b", "c"]) == 18.0
    assert pace.expect([]) == 0


def test_other_work_leaves_fewer_cores_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dealing, "count_cores", lambda: 8)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    for percent, free in ((2.0, 8), (16.0, 5), (95.0, 1)):
        monkeypatch.setattr(
            dealing.psutil, "cpu_percent", lambda percent=percent, **_: percent
        )
        assert count_free_cores() == free
    monkeypatch.setattr(dealing, "count_free_cores", lambda: 8)
    assert [choose_worker_number("cpu", threads) for threads in (1, 3, 9)] == [8, 2, 1]
    assert choose_worker_number("cuda", 1) == 1
    monkeypatch.setattr(dealing, "count_gpus", lambda: 4)
    assert choose_worker_number("cuda:*", 1) == 4


def test_the_number_of_workers_is_a_number_or_auto(
    run_cli: Any, tmp_path: Path
) -> None:
    assert [parse_workers(text) for text in ("auto", "3")] == ["auto", 3]
    words = ("simulate", "demo", "--out", tmp_path / "run", "--workers")
    for text in ("many", "0", "1.5"):
        code, _, printed = run_cli(*words, text)
        assert code == 2
        assert "expected a whole number of at least 1, or auto" in printed
        assert printed.startswith("error: --workers = ")


# errors


@pytest.mark.slow
def test_an_error_in_a_worker_equals_that_of_one_process(tmp_path: Path) -> None:
    """The loss of a site diverges; the text names the site and the remedy."""
    training = {**TABLE["training"], "learning_rate": 1e30}
    table = {**TABLE, "training": training, "conditions": ["federated"]}
    job = parse_job(table, "tiny", tmp_path, "tiny.toml")
    caught = []
    for workers in (1, 2):
        with pytest.raises(Exception) as raised:  # noqa: PT011 - its class is compared
            simulate(job, tmp_path / str(workers), workers=workers)
        caught.append((type(raised.value), str(raised.value)))
        failure = json.loads((tmp_path / str(workers) / "failure.json").read_text())
        caught.append(failure)
    assert caught[2:] == caught[:2]
    assert find_workers(os.getpid()) == []


def test_too_many_workers_are_refused(job_file: Path, tmp_path: Path) -> None:
    job = load_job(str(job_file), ("threads=3",))
    message = (
        r"`workers` = 3 with 3 threads each need 9 cores, but this process may use 8: "
        "set `workers` to at most 2"
    )
    with pytest.raises(ParameterError, match=message):
        simulate(job, tmp_path / "run", workers=3)
    numbers: list[Any] = [0, -1, True, 1.5, "all"]
    for number in numbers:
        with pytest.raises(ParameterError, match="a whole number of at least 1, or"):
            simulate(job, tmp_path / "run", workers=number)
    assert check_workers(1, threads=4, cores=2) == 1
    assert not (tmp_path / "run").exists()


def test_notes_that_change_while_a_run_starts_are_refused() -> None:
    require_equal_data({"a": "1"}, {"a": "1"})
    with pytest.raises(DataError, match="the notes of site 'b' have changed while"):
        require_equal_data({"a": "1", "b": "2"}, {"a": "1", "b": "3"})


# ends of processes


class KillsAWorker(ProgressListener):
    """Kills a worker in a round of the federated part."""

    def __init__(self) -> None:
        self.part = ""
        self.killed: list[int] = []

    def begin(self, part: Part, rounds: int, sentences: int) -> None:
        self.part = part.name

    def round(self, result: RoundResult) -> None:
        if self.part == "federated" and result.round == 4 and not self.killed:
            self.killed = find_workers(os.getpid())
            os.kill(self.killed[1], signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("conditions", "site"),
    [(["federated"], r"site '\w+'"), (["alone", "federated"], r"sites? '.+'")],
    ids=["sites of a part", "parts"],
)
def test_a_killed_worker_is_one_error_and_the_run_resumes_to_the_same_result(
    conditions: list[str], site: str, job_file: Path, tmp_path: Path
) -> None:
    """The workers share the sites of the only part, or each train parts."""
    job = load_job(str(job_file), (f"conditions={json.dumps(conditions)}",))
    simulate(job, tmp_path / "one")
    out = tmp_path / "run"
    listener = KillsAWorker()
    message = (
        rf"worker process \d, which computed for {site}, was ended by SIGKILL \(the "
        r"system does this when memory runs out\): give `resume` to continue the run, "
        "and fewer `workers` if memory is short"
    )
    with pytest.raises(WorkerError, match=message):
        simulate(job, out, workers=2, listener=listener)
    assert len(listener.killed) == 2
    assert not any(map(is_running, listener.killed))
    simulate(job, out, workers=2, resume=True)
    assert read_run(out) == read_run(tmp_path / "one")


needs_two_cores = pytest.mark.skipif(count_cores() < 2, reason="needs two cores")


@pytest.mark.slow
@needs_two_cores
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_no_worker_outlives_the_process_that_started_it(
    number: int, job_file: Path, in_one_process: Path, tmp_path: Path
) -> None:
    """However it ends; and the run resumes to the same bits."""
    out = tmp_path / "run"
    words = ["simulate", str(job_file), "--out", str(out), "--workers", "2"]
    command = Command(tmp_path, *words)
    log = out / "metrics.jsonl"
    wait_until(lambda: log.exists() and log.stat().st_size > 0)
    workers = find_workers(command.pid)
    assert len(workers) == 2
    command.send(number)
    code, printed = command.wait()
    wait_until(lambda: not any(map(is_running, workers)), seconds=10)
    if number == signal.SIGKILL:
        assert code == -number
    else:
        assert code == 128 + number
        assert printed.startswith("stopped; to resume: fednotes simulate ")
    simulate(load_job(str(job_file)), out, resume=True)
    assert read_run(out) == read_run(in_one_process)


def test_a_worker_that_cannot_start_is_an_error(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "_PROGRAM", "fednotes.no_such_program")
    message = (
        "worker process [12], which computed for the data of all sites, ended with"
    )
    with pytest.raises(WorkerError, match=message):
        simulate(load_job(str(job_file)), tmp_path / "run", workers=2)


def wait_for_workers(number: int) -> list[int]:
    """Return this process's workers once there are `number` of them.

    The system shows a process's command a moment after it has started.
    """
    wait_until(lambda: len(find_workers(os.getpid())) == number)
    return find_workers(os.getpid())


def test_workers_use_the_processes_that_were_started_early() -> None:
    with starting_early(SITES_OF_A_RUN, 1):
        (early,) = wait_for_workers(1)
        first = ChildProcess(SITES_OF_A_RUN)
        assert find_workers(os.getpid()) == [early]
        second = ChildProcess(SITES_OF_A_RUN)
        assert early in wait_for_workers(2)
    assert early in find_workers(os.getpid())
    for worker in (first, second):
        worker.close()
        worker.wait()
    assert not find_workers(os.getpid())


def test_processes_that_no_worker_uses_end() -> None:
    with starting_early(PREDICTIONS, 2):
        processes = wait_for_workers(min(2, os.cpu_count() or 1))
    assert not any(map(is_running, processes))


def test_no_more_processes_start_early_than_there_are_cores() -> None:
    with starting_early(PREDICTIONS, 1000):
        wait_for_workers(os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("words", "work"),
    [
        (["predict", "no-model", "notes.csv"], PREDICTIONS),
        (["simulate", "no-job.toml", "--out", "run"], SITES_OF_A_RUN),
    ],
)
@pytest.mark.parametrize("workers", ["1", "2", "auto", "two"])
def test_a_command_starts_the_workers_of_its_option_early(
    words: list[str], work: str, workers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    @contextmanager
    def start_early(work: str, number: int) -> Iterator[None]:
        started.append((work, number))
        yield

    monkeypatch.setattr(app, "starting_early", start_early)
    CliRunner().invoke(app.app, [*words, "--workers", workers])
    assert started == ([(work, 2)] if workers == "2" else [])


# dealing


def test_sites_are_distributed_by_size() -> None:
    sizes = {"a": 5, "b": 50, "c": 20, "d": 30}
    assert deal_sites(sizes, 2) == [["a", "b"], ["c", "d"]]
    assert deal_sites(sizes, 9) == [["b"], ["d"], ["c"], ["a"]]
    assert deal_sites({"a": 0, "b": 0}, 2) == [["a"], ["b"]]


def test_a_part_is_divided_if_other_parts_leave_workers_without_work() -> None:
    """With two workers, 30 units are an equal share of the first run's 60."""
    sites = {"alone/a": 1, "alone/b": 1, "federated": 2, "pooled": 1, "joint": 2}
    work = {"alone/a": 12, "alone/b": 8, "federated": 20, "pooled": 20}
    assert list_divided_parts(work, sites, 2) == []
    assert list_divided_parts(work, sites, 3) == []
    assert list_divided_parts(work, sites, 4) == ["federated"]
    # A part of one site cannot be divided.
    assert list_divided_parts({"alone/a": 5, "pooled": 90}, sites, 4) == []
    # Nothing else is left to train, or the work is unknown.
    assert list_divided_parts({"federated": 20}, sites, 2) == ["federated"]
    assert list_divided_parts({"joint": 0, "federated": 0}, sites, 2) == [
        "joint", "federated"
    ]  # fmt: skip


def test_workers_are_distributed_over_gpus_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert list_devices("cuda:*", 5, gpus=2) == [
        "cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"
    ]  # fmt: skip
    assert list_devices("cuda:1", 2, gpus=2) == ["cuda:1", "cuda:1"]
    assert choose_devices("cpu", 2) == ["cpu", "cpu"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert choose_devices("cuda:*", 4) == ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_every_gpu_is_refused_like_one(tmp_path: Path) -> None:
    for device in ("cuda", "cuda:*"):
        with pytest.raises(ConfigError, match="is not available here: use 'cpu'"):
            choose_devices(device, 2)


def test_workers_without_work_are_not_counted() -> None:
    assert count_useful_workers([]) == 1
    assert count_useful_workers([1]) == 1
    assert count_useful_workers([3]) == 3
    assert count_useful_workers([1, 1, 1, 3, 1]) == 4


def test_the_quota_of_a_container_limits_the_cores(tmp_path: Path) -> None:
    file = tmp_path / "cpu.max"
    assert dealing._read_quota(file, 8) == 8
    file.write_text("max 100000\n")
    assert dealing._read_quota(file, 8) == 8
    file.write_text("250000 100000\n")
    assert dealing._read_quota(file, 8) == 2


# turns


def test_events_of_parts_that_train_at_once_come_one_part_after_another(
    job_file: Path,
) -> None:
    parts = [Part("alone", (), None, site=name) for name in "abc"]
    log = Log()
    turns = Turns(log)
    first, second = turns.listen(parts[0]), turns.listen(parts[1])
    second.begin(parts[1], 9, 1)
    first.begin(parts[0], 9, 1)
    second.end()
    turns.end("alone/b")
    assert log.events == [("begin", "alone/a", 9, 1)]
    third = turns.listen(parts[2])
    third.begin(parts[2], 9, 1)
    first.end()
    turns.end("alone/a")
    assert log.events == [
        ("begin", "alone/a", 9, 1), "end",
        ("begin", "alone/b", 9, 1), "end",
        ("begin", "alone/c", 9, 1),
    ]  # fmt: skip
    third.end()
    turns.end("alone/c")
    assert log.events[-1] == "end"
