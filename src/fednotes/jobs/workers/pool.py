"""The worker processes of a simulation, seen by the process that starts them.

A worker receives the tables of the job, and reads the sites' data itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from fednotes.engines.carried import make_request
from fednotes.engines.remote_programs import RemotePrograms
from fednotes.engines.site_programs import SitePrograms
from fednotes.jobs.job import Job, Progress
from fednotes.jobs.part_training import PartEvents, PartRun, SiteReport
from fednotes.jobs.results import Outcome
from fednotes.jobs.workers.commands import (
    CONTINUE,
    HOLD,
    OPEN,
    REPORT,
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
    choose_number,
    count_cores,
    deal_sites,
)
from fednotes.jobs.workers.events import BEGIN, END, FEATURES, RESULT, ROUND
from fednotes.jobs.workers.worker_process import SITES, WorkerProcess, end_workers

# Expected seconds of work from which workers start by themselves. Their start takes a
# few seconds of each core.
LONG_SECONDS = 30.0
_REMEDY = "give `resume` to continue the run, and fewer `workers` if memory is short"


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
            number = len(self.all) + 1
            self.all.append(WorkerProcess(SITES, number, device, remedy=_REMEDY))
        for worker in self.all:
            worker.duty = "computed for the data of all sites"
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
        end_workers(surplus)

    def close(self) -> None:
        """End all workers."""
        end_workers(self.all)
        self.all.clear()


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
        number = choose_number(device, threads)
    else:
        check_workers(number, threads, count_cores())
    wait = is_auto and device != EVERY_GPU
    workers = Workers(choose_devices(device, number), wait=wait)
    try:
        yield workers
    finally:
        workers.close()


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
            worker.duty = _describe_duty(sites)
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


def _describe_duty(sites: Sequence[str]) -> str:
    """Return what a worker does that holds some sites."""
    names = ", ".join(map(repr, sites))
    noun = "site" if len(sites) == 1 else "sites"
    return f"computed for {noun} {names}"


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
        worker.duty = _describe_duty([site.id for site in run.part.sites])
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
