"""A transport that fails on purpose, and the table of what happens then.

    python tests/helpers/faults.py        # prints the table of docs/reliability.md

Every fault is a fixed script on a simulated clock, so a run repeats to the last bit.
"""

from __future__ import annotations

import errno
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from fault_net import Net, seal_of
from fault_toy import JOB, SITES, Took, Toy, by_hand, toy_job

from fednotes.core import store
from fednotes.core import tensors as core_tensors
from fednotes.core.errors import FednotesError
from fednotes.core.messages import (
    BEGIN,
    CHECKPOINT,
    Frame,
    decode_reply,
    decode_request,
)
from fednotes.core.update import Update
from fednotes.engines.history import OPENED
from fednotes.engines.requests import Event, Patience
from fednotes.engines.secure import SecureSum

FAULTS = (
    "crash",
    "slow",
    "duplicate",
    "stale",
    "corrupt",
    "partition",
    "disk full",
    "server kill",
)
PHASES = ("joining", "receiving", "training", "sending", "after the round")
VICTIM, STRUCK = "b", 2  # the site, and the round in which it happens
AWAY = 2  # how many tries a crash, a partition or a full disk lasts


class Killed(BaseException):
    """Stands for SIGKILL: nothing in fednotes catches it."""


class Line(Net):
    """A transport of hosts in this process, with one fault at one place.

    secure: under the secure sum, of `threshold`. task, round: where the phases in the
    middle of a round are. failures_left: tries that the fault still lasts.
    """

    def __init__(
        self,
        folder: Path,
        fault: str,
        phase: str,
        *,
        secure: bool = False,
        threshold: int = 3,
        task: str = "train",
        round: int = STRUCK,
    ) -> None:
        super().__init__(
            {site: lambda site=site: Toy(site, self._inside) for site in SITES}, folder
        )
        self.seal = (lambda site: seal_of(folder, site, threshold)) if secure else None
        self.fault, self.phase, self.task, self.round = fault, phase, task, round
        self.struck = self.dying = False
        self.late: list[tuple[str, Frame]] = []
        self.exchanged: list[tuple[str, Frame, Frame]] = []

    def exchange(
        self, frames: Mapping[str, Frame], **limits: Any
    ) -> Iterator[tuple[str, Frame]]:
        came, self.late = self.late, []
        yield from came
        answered = 0
        for site, frame in frames.items():
            self.now += 0.01
            for reply in self._through(site, frame):
                answered += 1
                yield site, reply
            if self._is("server kill", frame, site, "sending"):
                raise Killed
        if answered < len(frames):
            self.now += limits["timeout"]
        if self._is(
            "server kill", next(iter(frames.values())), VICTIM, "after the round"
        ):
            raise Killed

    def _is(self, fault: str, frame: Frame, site: str, phase: str) -> bool:
        """Return whether this is the place of the fault; True only once."""
        if self.struck or (self.fault, self.phase) != (fault, phase) or site != VICTIM:
            return False
        self.struck = self._here(frame)
        return self.struck

    def _here(self, frame: Frame) -> bool:
        request = decode_request(frame)
        if self.phase == "joining":
            return request.task == BEGIN
        if self.phase == "after the round":
            return request.task == CHECKPOINT and request.round == STRUCK - 1
        return request.task == self.task and request.round == self.round

    def _through(self, site: str, frame: Frame) -> list[Frame]:
        """Return what comes back from a site."""
        if site != VICTIM or self.struck or self.fault == "" or not self._here(frame):
            return self._ordinary(site, frame)
        if self.fault == "server kill":
            if self.phase in ("joining", "receiving"):
                self.struck = True
                raise Killed
            replies = self._ordinary(site, frame)
            if self.phase == "training":
                self.struck = True
                raise Killed
            return replies
        self.struck = True
        strike: Callable[[str, Frame], list[Frame]] = getattr(
            self, self.fault.replace(" ", "_")
        )
        return strike(site, frame)

    def _ordinary(self, site: str, frame: Frame) -> list[Frame]:
        if site == VICTIM and self.failures_left:
            self.failures_left -= 1
            if self.fault == "disk full":
                return self._full(site, frame)
            return []
        reply = self.host(site).handle(frame)
        self.exchanged.append((site, frame, reply))
        return [reply]

    def keeping(self, site: str) -> float:
        return 0.0 if site == "a" else 1e9

    def _inside(self) -> None:
        if self.dying:
            self.dying = False
            raise Killed

    # the faults at a site

    def crash(self, site: str, frame: Frame) -> list[Frame]:
        reply = []
        self.failures_left = AWAY
        self.dying = self.phase == "training"
        try:
            if self.phase not in ("joining", "receiving"):
                reply = [self.host(site).handle(frame)]
        except Killed:
            pass
        self.hosts.pop(site, None)
        return reply if self.phase == "after the round" else []

    def slow(self, site: str, frame: Frame) -> list[Frame]:
        if self.phase == "after the round":
            self.failures_left = 1  # busy when the next request comes
            return [self.host(site).handle(frame)]
        # done, but its answer comes after the deadline
        if self.phase in ("training", "sending"):
            self.late.append((site, self.host(site).handle(frame)))
        return []

    def duplicate(self, site: str, frame: Frame) -> list[Frame]:
        host = self.host(site)
        first = host.handle(frame)
        if self.phase == "receiving":
            return [host.handle(frame)]
        if self.phase == "after the round":
            self.late.append((site, first))
            return [first]
        return [first, first if self.phase == "sending" else host.handle(frame)]

    def stale(self, site: str, frame: Frame) -> list[Frame]:
        """Deliver an old request before or after the new one, or an old reply in its
        place."""
        earlier = [(f, r) for s, f, r in self.exchanged if s == site]
        if not earlier:
            return [self.host("a").handle(frame), *self._ordinary(site, frame)]
        request, reply = earlier[len(earlier) // 2]
        if self.phase == "sending":
            return [reply]
        if self.phase == "receiving":
            refused = decode_reply(self.host(site).handle(request))
            assert "is old" in refused.refusal
        replies = self._ordinary(site, frame)
        assert "is old" in decode_reply(self.host(site).handle(request)).refusal
        return replies

    def corrupt(self, site: str, frame: Frame) -> list[Frame]:
        if self.phase == "sending":
            return [_flipped(self.host(site).handle(frame))]
        # a number that is none, made by the site's own training
        if self.phase == "training":
            with mock.patch.object(Toy, "train", return_value=_nan()):
                return [self.host(site).handle(frame)]
        # its newest state on disk, found at its next start
        if self.phase == "after the round":
            reply = self.host(site).handle(frame)
            newest = max((self.folder / site / "states").iterdir())
            (newest / "facts.json").write_text("{}")
            self.hosts.pop(site)
            return [reply]
        return [self.host(site).handle(_flipped(frame))]

    def partition(self, site: str, frame: Frame) -> list[Frame]:
        self.failures_left = AWAY
        if self.phase == "after the round":
            return [self.host(site).handle(frame)]
        if self.phase in ("training", "sending"):
            self.host(site).handle(frame)
        return []

    def disk_full(self, site: str, frame: Frame) -> list[Frame]:
        self.failures_left = AWAY
        return self._full(site, frame)

    def _full(self, site: str, frame: Frame) -> list[Frame]:
        def full(*anything: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with (
            mock.patch.object(store.os, "replace", full),
            mock.patch.object(core_tensors, "save_file", full),
        ):
            try:
                return [self.host(site).handle(frame)]
            except FednotesError:  # it cannot even start
                return []


def _flipped(frame: Frame) -> bytes:
    damaged = bytearray(frame)
    damaged[len(damaged) // 2] ^= 4
    return bytes(damaged)


def _nan() -> Update:
    return Update({"least": torch.full((4,), torch.nan)}, 1.0)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run. starts: how often the server was started."""

    result: np.ndarray
    expected: np.ndarray
    took: Took
    events: tuple[Event, ...]
    starts: int
    waited: float
    struck: bool
    secure: bool = False

    @property
    def same(self) -> bool:
        return self.result.tobytes() == self.expected.tobytes()

    @property
    def close(self) -> bool:
        """Whether both results agree to a few units of float32's last place.

        A secure sum is rounded to a grid, so it need not have the same bits.
        """
        return np.allclose(self.result, self.expected, rtol=1e-6, atol=1e-6)

    def __str__(self) -> str:
        missing = sum(len(SITES) - len(sites) for sites in self.took.values())
        summary = (
            f"without b in {missing} of {len(self.took)} sums"
            if missing
            else "all in every sum"
        )
        if self.starts > 1:
            summary += ", server resumed"
        if any(event.kind == "behind" for event in self.events):
            return summary + ", b continues from an older state"
        if self.secure:
            return summary + (", same numbers" if self.close else ", OTHER NUMBERS")
        return summary + (", same bits" if self.same else ", OTHER BITS")


def run(
    fault: str,
    phase: str,
    min_sites: int,
    folder: Path,
    took: Took | None = None,
    **options: Any,
) -> Outcome:
    """The toy job with one fault; the server is started again when it is killed or
    gives up.

    took: of an earlier run in the same folder, which this one goes on from. options: of
        `Line`.
    """
    line, events = (
        Line(folder, fault, phase, threshold=min_sites, **options),
        list[Event](),
    )
    took, secure = {} if took is None else took, line.seal is not None
    patience = Patience(
        min_sites, timeout=10, knock=1, knock_every=0, pause=1, give_up=1000
    )
    for starts in itertools.count(1):
        try:
            record = folder / OPENED
            summing = (
                SecureSum(SITES, job=JOB, threshold=min_sites, record=record)
                if secure
                else None
            )
            engine = line.engine(SITES, patience, summing=summing, notify=events.append)
            result = toy_job(engine, took)
            break
        except (Killed, FednotesError):
            if starts == 5:
                raise
    expected, event_log = by_hand(took), tuple(events)
    return Outcome(
        result, expected, took, event_log, starts, line.now, line.struck, secure
    )


HEADING = (
    "| fault | when | `min_sites = 3` of 3 | `min_sites = 2` of 3 | secure sum, 2 of 3 |",
    "|---|---|---|---|---|",
)
COLUMNS = (
    (3, False),
    (2, False),
    (2, True),
)  # min_sites, and whether the sum is secure


def outcomes(fault: str, phase: str) -> tuple[Outcome, ...]:
    """Run one fault under the rules of each column of the table."""
    runs = []
    for min_sites, secure in COLUMNS:
        with tempfile.TemporaryDirectory() as folder:
            runs.append(run(fault, phase, min_sites, Path(folder), secure=secure))
    return tuple(runs)


def row(fault: str, phase: str, runs: Sequence[Outcome]) -> str:
    """Return the outcomes of one fault as a row of the table, in Markdown."""
    return f"| {fault} | {phase} | {' | '.join(map(str, runs))} |"


def table() -> Iterator[str]:
    """Yield the lines of the table of all faults, in Markdown."""
    yield from HEADING
    with mock.patch("os.fsync"):
        for fault, phase in itertools.product(FAULTS, PHASES):
            yield row(fault, phase, outcomes(fault, phase))


if __name__ == "__main__":
    for row in table():
        print(row, flush=True)
