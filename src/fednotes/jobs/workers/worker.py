"""What a worker process of a simulation does, and what it replies.

A worker reads the data of the whole job, because splits, tag sets and silos depend on
all sites. It makes only the sites that it holds, and then runs their tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fednotes.core.messages import Request
from fednotes.core.tensors import require_deterministic_kernels
from fednotes.engines.carried import make_reply, read_values
from fednotes.engines.remote_programs import SiteHolder
from fednotes.engines.rounds import RoundResult
from fednotes.jobs.job import Job, Sites
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.part_training import PartRun, SitesHere, train_part
from fednotes.jobs.parts import Part, prepare
from fednotes.jobs.workers.answering import Receive, Send, answer_requests
from fednotes.jobs.workers.events import (
    BEGIN,
    END,
    FEATURES,
    RESULT,
    ROUND,
    make_event,
)
from fednotes.jobs.workers.worker_messages import (
    HOLD,
    OPEN,
    REPORT,
    TRAIN,
    digest_data,
    encode_round,
)


@dataclass(frozen=True)
class _OpenJob:
    """A job whose data have been read.

    Attributes:
        job: The job.
        device: PyTorch device to train on.
        sites: The data of all sites.
        parts: The parts of a run by name.
    """

    job: Job
    device: str
    sites: Sites
    parts: Mapping[str, Part]

    def make_part_run(self, values: Mapping[str, Any]) -> PartRun:
        """Return the part that a command names, and where it is trained."""
        part = self.parts[values["part"]]
        return PartRun(self.job, part, Path(values["out"]), values["resume"])


class Worker:
    """Serves the requests of the process that started this one.

    Args:
        send: Sends an encoded reply.
        receive: Waits for the next encoded request and returns it.
    """

    def __init__(self, send: Send, receive: Receive) -> None:
        self._send = send
        self._receive = receive
        self._open: _OpenJob | None = None
        self._held: SitesHere | None = None
        self._commands: dict[str, Callable[[Request], Any]] = {
            OPEN: self._read_job,
            HOLD: self._hold_sites,
            REPORT: self._report_sites,
            TRAIN: self._train,
        }

    def serve(self) -> None:
        """Answer requests until nobody reads the replies."""
        answer_requests(self._send, self._receive, self._answer)

    def _answer(self, request: Request) -> Iterator[bytes]:
        """Yield the encoded replies to a command, or to a task of the method."""
        command = self._commands.get(request.task)
        if command is not None:
            result = command(request)
            yield make_reply(request, "", make_event(RESULT, result))
            return
        assert self._held is not None
        yield from SiteHolder(self._held.members).answer(request)

    def _read_job(self, request: Request) -> dict[str, str]:
        """Read a job's data, and return the digest of each site's data."""
        values = read_values(request)
        self._open = None  # frees the memory of the earlier job
        self._held = None
        folder = Path(values["folder"])
        job = parse_job(values["table"], values["name"], folder, values["name"])
        device = str(values["device"])
        torch.set_num_threads(job.threads)
        require_deterministic_kernels(device)
        sites, _, parts = prepare(job)
        self._open = _OpenJob(job, device, sites, {part.name: part for part in parts})
        return digest_data(job, sites.data)

    def _hold_sites(self, request: Request) -> dict[str, int]:
        """Make sites of a part; return their numbers of training examples."""
        assert self._open is not None
        values = read_values(request)
        self._held = None  # frees the memory of earlier sites
        self._held = SitesHere(
            self._open.make_part_run(values),
            self._open.sites.data,
            self._open.device,
            progress=_Events(self, request).features,
            only=values["sites"],
        )
        names = self._held.programs.names
        return dict(zip(names, self._held.sizes, strict=True))

    def _report_sites(self, request: Request) -> list[dict[str, Any]]:
        """Score the trained models of the sites, and return their reports."""
        del request
        assert self._held is not None
        return [asdict(report) for report in self._held.report()]

    def _train(self, request: Request) -> dict[str, Any]:
        """Train a part completely, and return its outcome."""
        assert self._open is not None
        self._held = None
        run = self._open.make_part_run(read_values(request))
        events = _Events(self, request)
        sites = SitesHere(
            run, self._open.sites.data, self._open.device, progress=events.features
        )
        return train_part(run, sites, events).model_dump()

    def report_event(self, request: Request, name: str, *values: Any) -> None:
        """Send an event of the work on a request."""
        self._send(make_reply(request, "", make_event(name, *values)))

    def wait(self) -> None:
        """Wait until the other process has logged an event."""
        self._receive()


class _Events:
    """Sends the events of a part (`PartEvents`) to the process that started this one.

    Args:
        worker: The worker.
        request: The request that it is answering.
    """

    def __init__(self, worker: Worker, request: Request) -> None:
        self._worker = worker
        self._request = request

    def begin(self, first_round: int, rounds: int, examples: int) -> None:
        """Send the event, and wait until entries of repeated rounds are removed."""
        self._send(BEGIN, first_round, rounds, examples)
        self._worker.wait()

    def round(self, result: RoundResult) -> None:
        """Send the event, and wait until it is logged: the checkpoint comes later.

        After a kill between the two, the run repeats the round, and loses no entry.
        """
        self._send(ROUND, encode_round(result))
        self._worker.wait()

    def end(self) -> None:
        """Send the event."""
        self._send(END)

    def features(self, done: int, total: int) -> None:
        """Send the number of texts that have features."""
        self._send(FEATURES, done, total)

    def _send(self, name: str, *values: Any) -> None:
        self._worker.report_event(self._request, name, *values)
