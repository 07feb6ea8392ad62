"""A run in progress: its folder is locked, and a stop says how to resume it."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forked import Command

from fednotes.core.errors import BusyError
from fednotes.core.store import LOCK
from fednotes.jobs.job_file import load_job
from fednotes.jobs.simulate import simulate

JOB = """
method = "fedner"
conditions = ["federated"]
[synthetic]
sites = 2
sentences = 30
[training]
epochs = 15
batch_size = 24
[model]
tagger = "cnn-clstm-crf"
hashed_words = 64
word_dim = 4
char_dim = 4
char_filters = 6
cnn_filters = 8
lstm_units = 4
"""


class Runs:
    """Commands in one folder, which are ended with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "run"
        self.begun: list[Command] = []
        (folder / "job.toml").write_text(JOB)

    def begin(self, *words: str) -> Command:
        command = Command(self.folder, "simulate", "job.toml", "--out", "run", *words)
        self.begun.append(command)
        return command

    def simulate_here(self, *settings: str, **options: bool) -> None:
        """Simulate the job in this process."""
        job = load_job(str(self.folder / "job.toml"), settings)
        simulate(job, self.out, **options)

    def training(self, *words: str) -> Command:
        """Return a command that has written a checkpoint."""
        command = self.begin(*words)
        end = time.monotonic() + 120
        while not list(self.out.glob("federated/checkpoints/round-*")):
            assert command.is_alive(), command.wait()
            assert time.monotonic() < end
            time.sleep(0.002)
        return command

    def rounds(self) -> list[int]:
        """Return the round of every line of the run's log."""
        lines = (self.out / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["round"] for line in lines]

    def files(self) -> dict[str, bytes]:
        """Return every file's bytes, without locks that nobody holds."""
        paths = [
            path
            for path in self.folder.rglob("*")
            if path.is_file() and path.name != LOCK
        ]
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in paths}


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    live_runs = Runs(tmp_path)
    yield live_runs
    torch.set_deterministic_debug_mode("default")  # a run chooses them for its process
    for command in live_runs.begun:
        command.end()


@pytest.mark.slow
def test_no_command_changes_a_run_in_progress(runs: Runs) -> None:
    live = runs.training()
    live.send(signal.SIGSTOP)  # alive, but not done before we have looked
    before = runs.files()
    who = rf"run is in use by process {live.pid} on .* simulate job.toml --out run\)"
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(BusyError, match=who):
            runs.simulate_here(**options)
    second = runs.begin("--overwrite", "--set", "seed=9")
    code, message = second.wait()
    assert code == 2
    assert re.fullmatch(rf"error: {who}: wait until it ends, or stop it\n", message)
    assert runs.files() == before
    live.send(signal.SIGCONT)
    code, message = live.wait()
    assert code == 0, message
    assert runs.rounds() == sorted(set(runs.rounds()))
    assert not (runs.out / LOCK).exists()
    runs.simulate_here("training.epochs=1", overwrite=True)
    assert (runs.folder / "run.previous" / "summary.json").exists()
    assert not list(runs.folder.rglob(LOCK))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_prints_how_to_resume_it(
    runs: Runs, number: signal.Signals
) -> None:
    live = runs.training("--overwrite")
    live.send(number)
    code, message = live.wait()
    assert code == 128 + number
    assert (
        message == "stopped; to resume: fednotes simulate job.toml --out run --resume\n"
    )
    assert not list(runs.out.rglob(".*")), "half-written"
    assert not (runs.out / LOCK).exists()
    runs.simulate_here(resume=True)
    assert runs.rounds() == sorted(set(runs.rounds()))
    assert (runs.out / "summary.json").exists()


def test_a_run_stopped_before_it_begins_keeps_the_earlier_run(runs: Runs) -> None:
    """--resume would resume the run that --overwrite was to replace."""
    runs.simulate_here("training.epochs=1")
    before = runs.files()
    live = runs.begin("--overwrite")
    end = time.monotonic() + 60
    while not (runs.out / LOCK).exists():  # it reads its notes next
        assert time.monotonic() < end
        time.sleep(0.001)
    live.send(signal.SIGINT)
    code, message = live.wait()
    assert code == 130
    if (runs.folder / "run.previous").exists():
        pytest.skip("it was faster than this test")
    assert message == "stopped\n"
    assert runs.files() == before
