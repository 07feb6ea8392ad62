"""The worker processes of a simulation, seen by the process that starts them.

They run on this machine, or on the nodes of a cluster (`WorkerPlace`).

A worker receives the tables of the job, and reads the sites' data itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Protocol

from fednotes.engines.carried import make_request
from fednotes.engines.remote_programs import RemotePrograms
from fednotes.engines.site_programs import SitePrograms
from fednotes.jobs.job import Job, Progress
from fednotes.jobs.part_training import PartEvents, PartRun, SiteReport
from fednotes.jobs.results import Outcome
from fednotes.jobs.workers.child_process import SITES, ChildProcess
from fednotes.jobs.workers.cluster import Cluster, connecting_to_cluster
from fednotes.jobs.workers.dealing import (
    AUTO,
    EVERY_GPU,
    check_workers,
    choose_devices,
    choose_worker_number,
    count_cores,
    deal_sites,
)
from fednotes.jobs.workers.events import BEGIN, END, FEATURES, RESULT, ROUND
from fednotes.jobs.workers.worker_messages import (
    CONTINUE,
    HOLD,
    OPEN,
    REPORT,
    TRAIN,
    decode_round,
    digest_data,
    require_equal_data,
)
from fednotes.jobs.workers.worker_process import WorkerProcess, end_workers

# Expected seconds of work from which workers start by themselves. Their start takes a
# few seconds of each core.
LONG_SECONDS = 30.0
_REMEDY = "give `resume` to continue the run, and fewer `workers` if memory is short"


class WorkerPlace(Protocol):
    """Where workers run: on this machine, or on a cluster.

    Attributes:
        device: The PyTorch device of a process that computes without workers.
        limit: The largest number of workers.
        processors: The names of the processors on which workers started, if they may
            differ from this machine's.
    """

    device: str
    limit: int
    processors: Sequence[str]

    def start(self, number: int, folders: Sequence[Path]) -> Iterator[WorkerProcess]:
        """Start workers and yield each.

        Args:
            number: Number of workers.
            folders: The folders that they read and write; the last one is this run's.
        """


class ThisMachine:
    """This machine, whose workers are children of this process (`WorkerPlace`).

    Args:
        devices: The PyTorch device of each worker.

    Attributes:
        device: As in `WorkerPlace`.
        limit: As in `WorkerPlace`.
        processors: As in `WorkerPlace`.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self.device = devices[0]
        self.limit = len(devices)
        self.processors: Sequence[str] = ()
        self._devices = devices

    def start(self, number: int, folders: Sequence[Path]) -> Iterator[WorkerProcess]:
        """Start workers and yield each; see `WorkerPlace`."""
        del folders
        for worker, device in enumerate(self._devices[:number], 1):
            yield WorkerProcess(ChildProcess(SITES), worker, device, remedy=_REMEDY)


class Start(Enum):
    """When workers start."""

    AT_ONCE = "while this process reads the data"
    WITH_PARTS = "when the data show how many workers will have work"
    IF_LONG = "when the work turns out to be long"


class Workers:
    """Worker processes that share the work on a run, or on several runs.

    Args:
        place: Where they run. A single worker on this machine does not start: the
            process that has this object computes itself.
        start: When they start.

    Attributes:
        all: The processes.
    """

    def __init__(self, place: WorkerPlace, start: Start = Start.AT_ONCE) -> None:
        self.all: list[WorkerProcess] = []
        self._place = place
        self._start = start
        # One worker on this machine is no faster than this process. On a cluster, it
        # may run on a better machine.
        self._min_workers = 2 if isinstance(place, ThisMachine) else 1
        self._can_start = place.limit >= self._min_workers

    @property
    def count(self) -> int:
        """The number of processes that compute for sites."""
        return max(1, len(self.all))

    @property
    def device(self) -> str:
        """The PyTorch device of a process that computes without workers."""
        return self._place.device

    @property
    def processors(self) -> list[str]:
        """The names of the workers' processors, if these may differ."""
        return list(self._place.processors)

    def is_worthwhile(self, seconds: float) -> bool:
        """Return whether workers that wait should start now.

        Args:
            seconds: The seconds that the remaining work takes in one process.
        """
        waits = self._can_start and self._start is Start.IF_LONG
        return waits and seconds >= LONG_SECONDS

    def start_late(
        self, job: Job, out: Path, sites: Sequence[Any], num_useful: int
    ) -> None:
        """Start workers that wait, for a job that has begun in this process.

        Args:
            job: The job.
            out: Folder of the run.
            sites: The data of its sites as they were read here.
            num_useful: Number of workers that will have work.
        """
        self._launch(num_useful, job, out)
        self._send_job(job)
        self._wait_for_data(job, sites)

    def begin_to_open(self, job: Job, out: Path) -> None:
        """Let the workers begin to read a job's data; start them for the first one.

        Args:
            job: The job.
            out: Folder of the run.
        """
        if self._start is Start.AT_ONCE:
            self._launch(self._place.limit, job, out)
        self._send_job(job)

    def finish_opening(
        self, job: Job, out: Path, sites: Sequence[Any], num_useful: int
    ) -> None:
        """Wait until the workers have read a job's data, and end those without work.

        Call `begin_to_open` first, for the same job. With `Start.WITH_PARTS`, workers
        start here and not in `begin_to_open`, because the data decide how many will
        have work. With `Start.IF_LONG`, no workers run before `start_late`.

        Args:
            job: The job.
            out: Folder of the run.
            sites: The data of its sites as they were read here.
            num_useful: Number of workers that will have work.

        Raises:
            DataError: A worker has read other data.
            Exception: A worker cannot read the data.
        """
        if self._start is Start.WITH_PARTS and self._can_start:
            self._launch(num_useful, job, out)
            self._send_job(job)
        self._wait_for_data(job, sites)
        self._end_surplus(num_useful)

    def close(self) -> None:
        """End all workers."""
        end_workers(self.all)
        self.all.clear()

    def _launch(self, number: int, job: Job, out: Path) -> None:
        """Start workers unless they have been started."""
        if not self._can_start:
            return
        self._can_start = False
        number = min(number, self._place.limit)
        for worker in self._place.start(number, [job.folder, out]):
            self.all.append(worker)

    def _send_job(self, job: Job) -> None:
        """Let the workers begin to read a job's data."""
        for worker in self.all:
            worker.duty = "computed for the data of all sites"
            values = {
                "table": job.table,
                "name": job.name,
                "folder": str(job.folder),
                "device": worker.device,
            }
            worker.send(make_request(OPEN, values).frame)

    def _wait_for_data(self, job: Job, sites: Sequence[Any]) -> None:
        """Wait until the workers have read a job's data, the same as this process."""
        if not self.all:
            return
        digests = digest_data(job, sites)
        for worker in self.all:
            require_equal_data(digests, worker.wait_for_result())

    def _end_surplus(self, num_useful: int) -> None:
        """End the workers that will have no work.

        If fewer than `_min_workers` would be left, end all of them, because this
        process is as fast without them.
        """
        num_remaining = num_useful if num_useful >= self._min_workers else 0
        surplus = self.all[num_remaining:]
        del self.all[num_remaining:]
        end_workers(surplus)


@contextmanager
def running_workers(
    device: str,
    number: int | Literal["auto"],
    threads: int,
    cluster: str | None = None,
) -> Iterator[Workers]:
    """Yield workers, which start when they are needed and end with the context.

    Args:
        device: The PyTorch device; "cuda:*" distributes workers over all GPUs.
        number: Number of workers; with 1, this process computes. With "auto", workers
            for all free cores wait until the work turns out to be long; for "cuda:*",
            there is one for each GPU from the start. On a cluster, workers compute with
            any number, and "auto" is as many as have room there.
        threads: Number of threads of each worker.
        cluster: Address of a Ray cluster; None starts the workers on this machine.

    Raises:
        ConfigError: This machine has no such device, or the cluster has no room.
        ParameterError: The number is below 1, or needs more cores than there are.
    """
    with ExitStack() as stack:
        if cluster is not None:
            ray = stack.enter_context(connecting_to_cluster(cluster))
            place: WorkerPlace = Cluster(ray, device, number, threads)
            start = Start.WITH_PARTS
        else:
            place, start = _plan_local(device, number, threads)
        workers = Workers(place, start)
        stack.callback(workers.close)
        yield workers


def _plan_local(
    device: str, number: int | Literal["auto"], threads: int
) -> tuple[ThisMachine, Start]:
    """Return this machine with room for workers, and when they start."""
    is_auto = number == AUTO
    if number == AUTO:
        number = choose_worker_number(device, threads)
    else:
        check_workers(number, threads, count_cores())
    place = ThisMachine(choose_devices(device, number))
    return place, Start.IF_LONG if is_auto and device != EVERY_GPU else Start.AT_ONCE


# ---- parts whose sites are in several workers ----------------------------------------


def remark_on_processors(processors: Sequence[str]) -> Iterator[str]:
    """Yield a remark if the workers of a run computed on different processors."""
    if len(processors) > 1:
        yield (
            f"the workers computed on different processors ({'; '.join(processors)}), "
            "so weights may differ slightly from those of one machine"
        )


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
        self._workers = workers.all[: len(hands)]
        worker_by_site: dict[str, WorkerProcess] = {}
        for worker, sites in zip(self._workers, hands, strict=True):
            worker.duty = _describe_duty(sites)
            worker_by_site |= dict.fromkeys(sites, worker)
            worker.send(
                make_request(HOLD, {**_describe_part_run(run), "sites": sites}).frame
            )
        examples: dict[str, int] = {}
        shared = _SharedProgress(progress)
        for worker in self._workers:
            examples |= worker.wait_for_result(shared.make_progress(worker.number))
        self.sizes: Sequence[int] = [examples[site] for site in sizes]
        self._names = list(sizes)
        self.programs: SitePrograms = RemotePrograms(
            {site: worker_by_site[site] for site in sizes}
        )

    def report(self) -> list[SiteReport]:
        """Let the workers score the trained models; return each site's report."""
        request = make_request(REPORT)
        for worker in self._workers:
            worker.send(request.frame)
        reports: dict[str, SiteReport] = {}
        for worker in self._workers:
            for values in worker.wait_for_result():
                reports[values["id"]] = SiteReport(**values)
        return [reports[site] for site in self._names]


def _describe_duty(sites: Sequence[str]) -> str:
    """Return what a worker does that holds some sites."""
    names = ", ".join(map(repr, sites))
    noun = "site" if len(sites) == 1 else "sites"
    return f"computed for {noun} {names}"


def _describe_part_run(run: PartRun) -> dict[str, Any]:
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

    def make_progress(self, worker: int) -> Progress:
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
        worker.send(make_request(TRAIN, _describe_part_run(run)).frame)

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
            self._confirm_event()
        elif event.name == ROUND:
            self._events.round(decode_round(event.values[0]))
            self._confirm_event()
        elif event.name == END:
            self._events.end()
        elif event.name == FEATURES:
            self._progress(*event.values)
        return None

    def _confirm_event(self) -> None:
        """Tell the worker that an event was logged."""
        self._worker.send(make_request(CONTINUE).frame)
