"""Runs of `fednotes` commands, and predictions in one process and in workers."""

from __future__ import annotations

import hashlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fednotes.core.kernels import compile_kernels

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))
from worker_runs import find_workers


@dataclass(frozen=True)
class Run:
    """A command that has ended.

    Attributes:
        seconds: Wall-clock seconds.
        cpu_seconds: CPU time of the command and its workers.
        command_mib: Peak memory of the command.
        worker_mib: Peak memory of the largest worker; 0 without workers.
    """

    seconds: float
    cpu_seconds: float
    command_mib: float
    worker_mib: float

    def describe(self, notes: int) -> str:
        """Return the seconds, speed and memory of a run over a number of notes."""
        return (
            f"{self.seconds:.1f} s ({self.cpu_seconds:.1f} s of CPU time), "
            f"{notes / self.seconds:.0f} notes/s, peak memory "
            f"{self.command_mib:.0f} MiB, of a worker {self.worker_mib:.0f} MiB"
        )


class NotesFile(NamedTuple):
    """A file of notes.

    Attributes:
        path: The file.
        number: The number of its notes.
    """

    path: Path
    number: int

    def name_predictions(self, workers: int) -> Path:
        """Return the file for the predictions of a number of workers."""
        return self.path.parent / f"{self.number}-notes-{workers}-workers.jsonl"


def compare_with_workers(
    model: Path, few: NotesFile, many: NotesFile, workers: int
) -> float:
    """Return how many times as fast workers predict as one process, without the start.

    Raises AssertionError if their predictions differ.

    Args:
        model: The folder of the model.
        few: A file of few notes, whose time is subtracted; see `measure_speed`.
        many: A file of many notes.
        workers: Number of workers.
    """
    speeds: dict[int, float] = {}
    hashes = set()
    for number in (1, workers):
        speeds[number] = measure_speed(model, few, many, number)
        predictions = many.name_predictions(number).read_bytes()
        hashes.add(hashlib.sha256(predictions).hexdigest())
    assert len(hashes) == 1
    return speeds[workers] / speeds[1]


def measure_speed(model: Path, few: NotesFile, many: NotesFile, workers: int) -> float:
    """Return the notes per second of a long prediction.

    This is the speed of all notes but the first: the difference between the notes of
    two files, divided by the difference between the times of two commands. So the start
    of Python and of the workers does not count, as it hardly does with a million notes.
    Kernels are compiled before the clock starts.

    Args:
        model: The folder of the model.
        few: A file of few notes.
        many: A file of many notes.
        workers: Number of workers; 1 predicts in one process.
    """
    compile_kernels()
    start_seconds = measure_prediction(model, few, workers)
    seconds = measure_prediction(model, many, workers)
    speed = (many.number - few.number) / (seconds - start_seconds)
    print(f"predict, {workers} process(es): {speed:.0f} notes/s without the start")
    return speed


def measure_prediction(model: Path, notes: NotesFile, workers: int) -> float:
    """Predict notes with a number of workers; return the seconds.

    Args:
        model: The folder of the model.
        notes: The file of notes.
        workers: Number of workers; 1 predicts in one process.
    """
    out = notes.name_predictions(workers)
    words = ["predict", str(model), str(notes.path), "--out", str(out)]
    run = measure_command([*words, "--workers", str(workers)])
    print(f"predict, {workers} process(es): {run.describe(notes.number)}", flush=True)
    return run.seconds


def measure_command(words: Sequence[str]) -> Run:
    """Run a command of fednotes; measure its time and its peak memory."""
    command = [sys.executable, "-m", "fednotes", *words]
    # The command and each of its workers compute with one thread.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    cpu_start = count_cpu_seconds()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    command_mib = 0.0
    worker_mib = 0.0
    while process.poll() is None:
        command_mib = max(command_mib, read_peak(process.pid))
        peaks = [read_peak(worker) for worker in find_workers(process.pid)]
        worker_mib = max([worker_mib, *peaks])
        time.sleep(0.25)
    seconds = time.perf_counter() - start
    assert process.returncode == 0
    return Run(seconds, count_cpu_seconds() - cpu_start, command_mib, worker_mib)


def count_cpu_seconds() -> float:
    """Return the CPU time of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def read_peak(process: int) -> float:
    """Return the peak memory of a process in MiB; 0 if it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return 0.0
