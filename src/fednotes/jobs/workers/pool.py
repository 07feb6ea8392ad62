"""Worker processes, seen by the process that starts them.

A worker is a fresh interpreter, started like any program: not a fork, because torch's
threads and locks do not survive one, and not by `multiprocessing`, because that imports
the user's script again and pickles what it passes on. A worker receives the tables of
the job, and reads the sites' data itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, NamedTuple

from fednotes.core.errors import WorkerError
from fednotes.core.messages import Reply, decode
from fednotes.core.pipes import FramePipe, PipeClosedError
from fednotes.engines.carried import (
    NumberedFrame,
    make_request,
    raise_failure,
    read_values,
)
from fednotes.engines.remote_programs import RemotePrograms
from fednotes.engines.site_programs import SitePrograms
from fednotes.jobs.job import Job, Progress
from fednotes.jobs.part_training import PartEvents, PartRun, SiteReport
from fednotes.jobs.results import Outcome
from fednotes.jobs.workers.commands import (
    BEGIN,
    CONTINUE,
    END,
    FEATURES,
    HOLD,
    OPEN,
    REPORT,
    RESULT,
    ROUND,
    TRAIN,
    decode_round,
    describe_data,
    require_same_data,
)
from fednotes.jobs.workers.dealing import (
    AUTO,
    EVERY_GPU,
    check_workers,
    choose_devices,
    count_cores,
    count_free_cores,
    count_gpus,
    deal_sites,
)

# Seconds in which a worker must end after its stdin was closed.
END_SECONDS = 5.0
# Expected seconds of work from which workers start by themselves. Their start takes a
# few seconds of each core.
LONG_SECONDS = 30.0
PIPE_BYTES = 2**20  # capacity of a pipe; the system's default needs more exchanges
_PROGRAM = "fednotes.jobs.workers.process"


class _Event(NamedTuple):
    """What a worker reports about a command.

    Attributes:
        name: One of the events in `jobs/workers/commands.py`.
        values: Its JSON values.
    """

    name: str
    values: list[Any]


class WorkerProcess:
    """One worker process, a `Link` of `engines/remote_programs.py`.

    Args:
        number: The worker's number, from 1.
        device: PyTorch device that it trains on.

    Attributes:
        duty: What it is doing, for messages, such as "site 'a'".
    """

    def __init__(self, number: int, device: str) -> None:
        self.number = number
        self.device = device
        self.duty = "no site yet"
        # The folders from which this process imports; `-P` adds no other.
        folders = [os.path.abspath(folder) for folder in sys.path]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pipesize=PIPE_BYTES,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
            # Ctrl-C in a terminal reaches only this process, which ends the workers.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pipe = FramePipe(
            self._process.stdout.fileno(), self._process.stdin.fileno()
        )

    @property
    def pid(self) -> int:
        """The process's number in the system."""
        return self._process.pid

    def fileno(self) -> int:
        """Return a descriptor that is readable when a reply comes."""
        return self._pipe.fileno()

    def send(self, frame: bytes) -> None:
        """Send an encoded request.

        Raises:
            WorkerError: The process has ended.
        """
        try:
            self._pipe.send(frame)
        except PipeClosedError:
            raise self._describe_end() from None

    def receive(self) -> Reply:
        """Wait for the next reply and return it.

        Raises:
            WorkerError: The process has ended.
        """
        try:
            frame = self._pipe.receive()
        except PipeClosedError:
            raise self._describe_end() from None
        reply = decode(frame, checked=True)
        assert isinstance(reply, Reply)
        return reply

    def ask(self, request: NumberedFrame, progress: Progress | None = None) -> Any:
        """Send a command, wait for its result, and return that.

        Args:
            request: The command.
            progress: Receives the progress of computing features.

        Raises:
            Exception: The worker raised it.
            WorkerError: The process has ended.
        """
        self.send(request.frame)
        return self.wait_for_result(progress)

    def wait_for_result(self, progress: Progress | None = None) -> Any:
        """Wait for the result of a command that was sent; see `ask`."""
        while True:
            event = self.receive_event()
            if event.name == RESULT:
                return event.values[0]
            if event.name == FEATURES and progress is not None:
                progress(*event.values)

    def receive_event(self) -> _Event:
        """Wait for the next event of a command that was sent, and return it.

        Raises:
            Exception: The worker raised it.
            WorkerError: The process has ended.
        """
        reply = self.receive()
        raise_failure(reply)
        message = read_values(reply)
        return _Event(message["event"], message["values"])

    def close(self) -> None:
        """Close the pipes; the process ends then."""
        for file in (self._process.stdin, self._process.stdout):
            if file is not None:
                with suppress(OSError):
                    file.close()

    def wait(self) -> None:
        """Wait until the process has ended; kill it if it does not end soon."""
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _describe_end(self) -> WorkerError:
        """Return the error for a process that has ended before its time."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        return WorkerError(self.number, self.duty, _describe_code(self._process))


def _describe_code(process: subprocess.Popen[bytes]) -> str:
    """Return how a process ended, to follow "the worker process"."""
    code = process.returncode
    if code is None:
        return "closed its pipe"
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    if -code == signal.SIGKILL:
        return f"was ended by {name} (the system does this when memory runs out)"
    return f"was ended by {name}"


class Workers:
    """Worker processes that share the work on a run, or on several runs.

    They start when the first job is opened, or later if they wait.

    Args:
        devices: The PyTorch device of each worker. With one device there is no worker:
            the process that has this object computes itself.
        wait: Whether they start only once the work turns out to be long (`start_late`).

    Attributes:
        all: The processes.
        device: The PyTorch device of a process that computes without workers.
    """

    def __init__(self, devices: Sequence[str], *, wait: bool = False) -> None:
        self.all: list[WorkerProcess] = []
        self.device = devices[0]
        self._wait = wait
        self._to_start = list(devices) if len(devices) > 1 else []

    @property
    def count(self) -> int:
        """The number of processes that compute for sites."""
        return max(1, len(self.all))

    def is_worthwhile(self, seconds: float) -> bool:
        """Return whether workers that wait should start now.

        Args:
            seconds: The seconds that the remaining work takes in one process.
        """
        return bool(self._wait and self._to_start) and seconds >= LONG_SECONDS

    def start_late(self, job: Job, sites: Sequence[Any], useful: int) -> None:
        """Start workers that wait, for a job that has begun in this process.

        Args:
            job: The job.
            sites: The data of its sites as they were read here.
            useful: Number of workers that will have work.
        """
        self._wait = False
        del self._to_start[useful:]
        self.begin_to_open(job)
        self.open(job, sites)

    def begin_to_open(self, job: Job) -> None:
        """Let the workers begin to read a job's data; start them for the first one."""
        if self._wait:
            return
        while self._to_start:
            device = self._to_start.pop(0)
            self.all.append(WorkerProcess(len(self.all) + 1, device))
        for worker in self.all:
            worker.duty = "the data of all sites"
            values = {
                "table": job.table,
                "name": job.name,
                "folder": str(job.folder),
                "device": worker.device,
            }
            worker.send(make_request(OPEN, values).frame)

    def open(self, job: Job, sites: Sequence[Any]) -> None:
        """Wait until the workers have read the data.

        Args:
            job: The job.
            sites: The data of its sites as they were read here.

        Raises:
            DataError: A worker has read other data.
            Exception: A worker cannot read the data.
        """
        if not self.all:
            return
        digests = describe_data(job, sites)
        for worker in self.all:
            require_same_data(digests, worker.wait_for_result())

    def reduce(self, useful: int) -> None:
        """End the workers that will have no work.

        Args:
            useful: Number of workers that will have work; 1 ends all, because one
                worker is not faster than this process.
        """
        remaining = 0 if useful == 1 else useful
        surplus = self.all[remaining:]
        del self.all[remaining:]
        _end(surplus)

    def close(self) -> None:
        """End all workers."""
        _end(self.all)
        self.all.clear()


def _end(workers: Sequence[WorkerProcess]) -> None:
    for worker in workers:
        worker.close()
    for worker in workers:
        worker.wait()


@contextmanager
def start_workers(
    device: str, number: int | Literal["auto"], threads: int
) -> Iterator[Workers]:
    """Yield workers, which start when they are needed and end with the context.

    Args:
        device: The PyTorch device; "cuda:*" deals workers out to all GPUs.
        number: Number of workers; with 1, this process computes. With "auto", workers
            for all free cores wait until the work turns out to be long; for "cuda:*",
            there is one for each GPU from the start.
        threads: Number of threads of each worker.

    Raises:
        ConfigError: This machine has no such device.
        ParameterError: The number is below 1, or needs more cores than there are.
    """
    is_auto = number == AUTO
    if number == AUTO:
        number = _choose_number(device, threads)
    else:
        check_workers(number, threads, count_cores())
    wait = is_auto and device != EVERY_GPU
    workers = Workers(choose_devices(device, number), wait=wait)
    try:
        yield workers
    finally:
        workers.close()


def _choose_number(device: str, threads: int) -> int:
    """Return the number of workers that this machine has room for."""
    if device == EVERY_GPU:
        return count_gpus()
    if device != "cpu":
        return 1  # one process uses one GPU well
    return max(1, count_free_cores() // threads)


# ---- parts whose sites are in several workers ----------------------------------------


class SitesOfWorkers:
    """The sites of a part, dealt out to workers (`PartSites`).

    Args:
        run: The part, and where it is trained.
        workers: The workers.
        sizes: The number of training examples of each site, as far as the data show it.
        progress: Receives the progress of computing features.
    """

    def __init__(
        self,
        run: PartRun,
        workers: Workers,
        sizes: Mapping[str, int],
        progress: Progress,
    ) -> None:
        hands = deal_sites(sizes, len(workers.all))
        self._holders = workers.all[: len(hands)]
        owners: dict[str, WorkerProcess] = {}
        for worker, sites in zip(self._holders, hands, strict=True):
            worker.duty = _name_sites(sites)
            owners |= dict.fromkeys(sites, worker)
            worker.send(make_request(HOLD, {**_part_values(run), "sites": sites}).frame)
        examples: dict[str, int] = {}
        shared = _SharedProgress(progress)
        for worker in self._holders:
            examples |= worker.wait_for_result(shared.of(worker.number))
        self.sizes: Sequence[int] = [examples[site] for site in sizes]
        self._names = list(sizes)
        self.programs: SitePrograms = RemotePrograms(
            {site: owners[site] for site in sizes}
        )

    def report(self) -> list[SiteReport]:
        """Let the workers score the trained models; return each site's report."""
        request = make_request(REPORT)
        for worker in self._holders:
            worker.send(request.frame)
        reports: dict[str, SiteReport] = {}
        for worker in self._holders:
            for values in worker.wait_for_result():
                reports[values["id"]] = SiteReport(**values)
        return [reports[site] for site in self._names]


def _name_sites(sites: Sequence[str]) -> str:
    names = ", ".join(map(repr, sites))
    return f"site {names}" if len(sites) == 1 else f"sites {names}"


def _part_values(run: PartRun) -> dict[str, Any]:
    """Return the JSON values by which a worker knows a part."""
    out = str(run.out.absolute())
    return {"part": run.part.name, "out": out, "resume": run.resume}


class _SharedProgress:
    """Adds up the progress of several workers.

    Args:
        progress: Receives the sums.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._done: dict[int, int] = {}
        self._totals: dict[int, int] = {}

    def of(self, worker: int) -> Progress:
        """Return the function that receives one worker's progress."""

        def report(done: int, total: int) -> None:
            self._done[worker] = done
            self._totals[worker] = total
            self._progress(sum(self._done.values()), sum(self._totals.values()))

        return report


# ---- parts that each are trained in one worker ---------------------------------------


class TrainedPart:
    """A part that one worker trains completely.

    Args:
        run: The part, and where it is trained.
        worker: The worker, which is idle.
        events: Receives the events of the part.
        progress: Receives the progress of computing features.
    """

    def __init__(
        self,
        run: PartRun,
        worker: WorkerProcess,
        events: PartEvents,
        progress: Progress,
    ) -> None:
        self.part = run.part
        self._worker = worker
        self._events = events
        self._progress = progress
        worker.duty = _name_sites([site.id for site in run.part.sites])
        worker.send(make_request(TRAIN, _part_values(run)).frame)

    def handle_reply(self) -> Outcome | None:
        """Receive the next reply; return the outcome once the part is trained.

        Raises:
            Exception: The worker raised it.
            WorkerError: The process has ended.
        """
        event = self._worker.receive_event()
        if event.name == RESULT:
            return Outcome.model_validate(event.values[0])
        if event.name == BEGIN:
            self._events.begin(*event.values)
            self._continue()
        elif event.name == ROUND:
            self._events.round(decode_round(event.values[0]))
            self._continue()
        elif event.name == END:
            self._events.end()
        elif event.name == FEATURES:
            self._progress(*event.values)
        return None

    def _continue(self) -> None:
        """Tell the worker that an event was logged."""
        self._worker.send(make_request(CONTINUE).frame)
