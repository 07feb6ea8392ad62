"""Carry out the runs of a grid, each by a `fednotes simulate` command."""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

from fednotes.apps.experiments.grid_runs import GridRun
from fednotes.apps.experiments.search import list_search_runs
from fednotes.core.errors import FednotesError
from fednotes.core.stopping import run_child_process
from fednotes.core.store import open_unless_link
from fednotes.core.wording import format_duration
from fednotes.jobs.progress import LONG_SECONDS
from fednotes.jobs.workers.dealing import EVERY_GPU, choose_devices

# Receives the run that has ended, the number of ended runs, and the total.
RunProgress = Callable[[str, int, int], None]


class Work:
    """Carries out runs, each once and several at a time, and reports on them.

    Args:
        workers: Number of concurrent runs.
        device: The device of the runs; with "cuda:*", the GPUs in turn.
        on_run: Called after each run.
        say: Receives lines about the state and the time of the runs.
        confirm: Called with an estimate once the first run has ended, if the others
            will take long; raises an exception to stop. If given, the first run is
            carried out alone, so that the others can be stopped.

    Raises:
        ConfigError: This machine has no such device.
    """

    def __init__(
        self,
        workers: int,
        *,
        device: str = "cpu",
        on_run: RunProgress,
        say: Callable[[str], None],
        confirm: Callable[[str], None] | None,
    ) -> None:
        self._workers = workers
        # The devices of the runs that can begin now.
        self._devices: SimpleQueue[str] = SimpleQueue()
        for each in choose_devices(device, workers):
            self._devices.put(each)
        self._on_run = on_run
        self._say = say
        self._confirm = confirm
        self._folders: set[Path] = set()  # folders of the runs that were carried out
        self._total = 0
        self._ended = 0
        self._remaining = 0  # number of runs without a result
        self._is_time_announced = False

    def announce(
        self, first: Sequence[GridRun], groups: Sequence[Sequence[GridRun]]
    ) -> None:
        """Report how many runs are done, begun and not yet begun.

        Args:
            first: Runs that train models.
            groups: The runs of each row and condition.
        """
        needed = [*first]
        every = [*first]
        for group in groups:
            every += group
            needed += list_search_runs(group)
            # The setting that the search chooses, whichever it is, runs on all seeds.
            choice = group[0].choice
            needed += [
                run for run in group if run.choice == choice and not run.is_trial
            ]
        self._total = len({run.folder for run in needed})

        by_folder = {run.folder: run for run in every}
        done = sum(run.is_done() for run in by_folder.values())
        begun = sum(run.is_begun() and not run.is_done() for run in by_folder.values())
        self._remaining = max(0, self._total - done)
        to_begin = max(0, self._remaining - begun)
        self._say(
            f"{self._total} runs: {done} done, {begun} started, {to_begin} to start"
        )

    def carry_out(self, runs: Sequence[GridRun]) -> None:
        """Carry out the runs that were not carried out before.

        Raises:
            FednotesError: A run failed.
        """
        by_folder = {run.folder: run for run in runs}
        new = [run for run in by_folder.values() if run.folder not in self._folders]
        self._folders |= {run.folder for run in new}

        if self._confirm is not None and not self._is_time_announced:
            first = next((run for run in new if not run.is_done()), None)
            if first is not None:
                self._report_run(first, self._carry_out(first))
                new.remove(first)
        with ThreadPoolExecutor(max_workers=self._workers) as pool:
            for run, seconds in zip(new, pool.map(self._carry_out, new), strict=True):
                self._report_run(run, seconds)

    def _carry_out(self, run: GridRun) -> float:
        """Carry out a run on a free device; return its seconds, as `_run_timed`."""
        device = self._devices.get()
        try:
            return _run_timed(assign_device(run, device))
        finally:
            self._devices.put(device)

    def _report_run(self, run: GridRun, seconds: float) -> None:
        """Report on a run that has ended; 0 seconds if it had ended before."""
        self._ended += 1
        self._on_run(run.describe(), self._ended, self._total)
        if not seconds:
            return
        self._remaining -= 1
        if self._remaining and not self._is_time_announced:
            self._is_time_announced = True
            self._announce_time(seconds)

    def _announce_time(self, seconds: float) -> None:
        """Report how long the remaining runs may take, from the first run's seconds."""
        turns = math.ceil(self._remaining / self._workers)
        estimate = seconds * turns
        noun = "run" if self._remaining == 1 else "runs"
        line = (
            f"about {format_duration(estimate)} for {self._remaining} more {noun}, if "
            f"each takes as long as the first ({format_duration(seconds)})"
        )
        if self._workers > 1:
            line += f" and up to {self._workers} run at a time"
        self._say(line)
        if self._confirm is not None and estimate > LONG_SECONDS:
            self._confirm(line)


def assign_device(run: GridRun, device: str) -> GridRun:
    """Return a run that uses this GPU, if it was planned for any GPU."""
    arguments = (device if word == EVERY_GPU else word for word in run.arguments)
    return replace(run, arguments=tuple(arguments))


def _run_timed(run: GridRun) -> float:
    """Carry out a run; return its seconds, or 0 if it was already done."""
    was_done = run.is_done()
    started = time.monotonic()
    run_command(run)
    return 0.0 if was_done else time.monotonic() - started


def run_command(run: GridRun) -> None:
    """Run a `fednotes simulate` command, unless its run is finished.

    The output goes into a log beside the run's folder.

    Raises:
        FednotesError: The command failed; the message is the command's own.
        OSError: The log cannot be written, or is a link or FIFO.
    """
    if run.is_done():
        return
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    resume = ["--resume"] if run.is_begun() else []
    log = run.folder.with_suffix(".log")
    with open(log, "a", encoding="utf-8", opener=open_unless_link) as file:
        start = file.tell()
        code = run_child_process(
            # Runs take place at the same time, so each computes in one process.
            [sys.executable, "-m", "fednotes", *run.arguments, "--workers=1", *resume],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    if code:
        output = log.read_bytes()[start:].decode("utf-8", "replace")
        raise FednotesError(
            f"{_find_first_error(output)} (in: fednotes {shlex.join(run.arguments)})"
        )


def _find_first_error(output: str) -> str:
    """Return the first error in a command's output, or its last line."""
    lines = output.strip().splitlines() or ["no output"]
    for line in lines:
        if line.startswith("error: "):
            return line.removeprefix("error: ")
    return lines[-1]
