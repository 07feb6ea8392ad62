"""Wrong tensors and counts in the messages of a job, and what comes of each.

The job runs once over the engine of real sites. At the first message of each task, a
copy of the process goes on for each fault, with the message changed; the run itself
goes on without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from branches import Branches
from fault_net import Net
from method_runs import SITES, Case, Job
from safetensors.torch import load_file
from torch import Tensor

from fednotes.core.errors import FednotesError
from fednotes.core.messages import (
    OURS,
    Frame,
    decode_reply,
    decode_request,
    encode_message,
)
from fednotes.core.update import Tensors, Update


def with_number(value: float) -> Callable[[Tensor], Tensor]:
    def changed(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            tensor = tensor.double()
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return changed


WRONG_TENSORS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "NaN": with_number(math.nan),
    "one row more": lambda tensor: torch.cat((tensor, tensor[:1])),
    "another type": lambda tensor: (
        tensor.float() if tensor.dtype != torch.float32 else tensor.long()
    ),
    "missing": lambda tensor: None,
}
WRONG_COUNTS: dict[str, Callable[[Mapping[str, float]], dict[str, float]]] = {
    "no counts": lambda counts: {},
    "counts that overflow": lambda counts: dict.fromkeys(counts, 1.7e308),
    "counts below zero": lambda counts: dict.fromkeys(counts, -1e12),
    "counts of zero": lambda counts: dict.fromkeys(counts, 0.0),
}


@dataclass(frozen=True)
class Fault:
    """One change of the first message of a task.

    Attributes:
        task: The task.
        kind: What is wrong.
        down: Whether what the server sends is wrong; otherwise what it receives is.
        sites: How many of the sites it concerns.
    """

    task: str
    kind: str
    down: bool = False
    sites: int = 1

    @property
    def is_of_counts(self) -> bool:
        return self.kind in WRONG_COUNTS

    def of_tensors(self, tensors: Tensors) -> dict[str, Tensor]:
        """Return the tensors, of which the first one is wrong."""
        (first, value), *_ = tensors.items()
        wrong = WRONG_TENSORS[self.kind](value)
        changed = {
            name: unchanged for name, unchanged in tensors.items() if name != first
        }
        return changed if wrong is None else {**changed, first: wrong}

    def of_update(self, update: Update) -> Update:
        if self.is_of_counts:
            return replace(update, metrics=WRONG_COUNTS[self.kind](update.metrics))
        return replace(update, tensors=self.of_tensors(update.tensors))

    def names_in(
        self, tensors: Tensors, counts: Mapping[str, float]
    ) -> tuple[str, ...]:
        """Return the names of which an error must name one: the tensor, or a count."""
        return tuple(counts) if self.is_of_counts else tuple(tensors)[:1]


@dataclass(frozen=True)
class Outcome:
    """What came of a fault.

    Attributes:
        fault: The fault.
        names: The wrong tensor, or the counts.
        sites: The sites that it concerns.
        error: The text of the run's error; "" where the run came to its end.
        not_finite: What the run has stored that is not finite, by file and tensor.
    """

    fault: Fault
    names: tuple[str, ...]
    sites: tuple[str, ...]
    error: str
    not_finite: tuple[str, ...]


@dataclass
class BranchingNet(Net):
    """Begins a copy of this process for each fault at the first message of each task.

    Attributes:
        branches: The copies.
        step: Tries every such fault; 1 tries all.
        number: The number of the next fault.
        fault: In a copy: its fault, which all messages of its task have.
        names: In a copy: the wrong tensor, or the counts.
    """

    branches: Branches = field(default_factory=lambda: Branches(Path()))
    step: int = 1
    number: int = 0
    fault: Fault | None = None
    names: tuple[str, ...] = ()
    reached: set[str] = field(default_factory=set)

    def exchange(
        self, frames: Mapping[str, Frame], **limits: Any
    ) -> Iterator[tuple[str, Frame]]:
        task = decode_request(next(iter(frames.values()))).task
        if (
            self.fault is None
            and task not in self.reached
            and not task.startswith(OURS)
        ):
            self.reached.add(task)
            has_tensors = bool(decode_request(next(iter(frames.values()))).tensors)
            self._begin_copies(downward_faults(task) if has_tensors else [])
            replies = [*super().exchange(self._changed(task, frames), **limits)]
            updates = [decode_reply(frame).update for _, frame in replies]
            self._begin_copies(upward_faults(task, updates))
        else:
            replies = [*super().exchange(self._changed(task, frames), **limits)]
        for site, frame in replies:
            yield site, self._changed_reply(task, site, frame)

    def _begin_copies(self, faults: Sequence[Fault]) -> None:
        """Begin a copy for every fault that is its turn; a copy returns with its own."""
        if self.fault is not None:
            return
        for fault in faults:
            is_chosen = self.number % self.step == 0
            self.number += 1
            if is_chosen and self.branches.begin():
                self.fault = fault
                return

    def _is_wrong(self, task: str, site: str, *, down: bool) -> bool:
        return (
            self.fault is not None
            and (self.fault.task, self.fault.down) == (task, down)
            and site in self.concerned
        )

    @property
    def concerned(self) -> tuple[str, ...]:
        """In a copy: the sites that the fault concerns."""
        return tuple(self.makes)[: self.fault.sites] if self.fault else ()

    def _changed(self, task: str, frames: Mapping[str, Frame]) -> dict[str, Frame]:
        changed = dict(frames)
        for site, frame in frames.items():
            request = decode_request(frame)
            if self._is_wrong(task, site, down=True) and request.tensors:
                assert self.fault is not None
                self.names = self.fault.names_in(request.tensors, {})
                wrong = self.fault.of_tensors(request.tensors)
                changed[site] = encode_message(replace(request, tensors=wrong))
        return changed

    def _changed_reply(self, task: str, site: str, frame: Frame) -> Frame:
        reply = decode_reply(frame)
        if not self._is_wrong(task, site, down=False) or reply.update is None:
            return frame
        assert self.fault is not None
        names = self.fault.names_in(reply.update.tensors, reply.update.metrics)
        if not names:
            return frame
        self.names = names
        return encode_message(replace(reply, update=self.fault.of_update(reply.update)))


def downward_faults(task: str) -> list[Fault]:
    """Return the changes of tensors that a site receives, none of which it can use."""
    return [Fault(task, kind, down=True) for kind in WRONG_TENSORS]


def upward_faults(task: str, updates: Sequence[Update | None]) -> list[Fault]:
    """Return the changes of what the server receives."""
    faults: list[Fault] = []
    if any(update is not None and update.tensors for update in updates):
        # The engine compares sites, whatever the method is.
        faults += [Fault(task, kind) for kind in ("NaN", "missing")]
        # Sites agree, as those of another version do.
        faults += [
            Fault(task, kind, sites=SITES) for kind in ("one row more", "missing")
        ]
    if any(update is not None and update.metrics for update in updates):
        faults.append(Fault(task, "counts that overflow"))
        kinds = ("no counts", "counts below zero", "counts of zero")
        faults += [Fault(task, kind, sites=SITES) for kind in kinds]
    return faults


def try_all(case: Case, folder: Path, step: int, first: int) -> list[Outcome]:
    """Run a short job of a case, and each fault of its messages from there on.

    Args:
        case: The case.
        folder: Where copies of the working directory are; the job runs in the latter.
        step: Tries every such fault.
        first: The number of the first fault of the run; multiples of `step` are tried.
    """
    job = Job.short(case, distil_epochs=0)  # distillation comes after the last message
    branches = Branches(folder)
    net = BranchingNet(job.makes(Path()), Path("stored"), branches=branches)
    net.step, net.number = step, first
    names = [site.id for site in job.sites]

    def finish() -> Outcome:
        error = ""
        try:
            job.train(net.engine(names))
        except FednotesError as stopped:
            if net.fault is None:
                raise
            error = str(stopped)
        fault = net.fault or Fault("", "")
        return Outcome(
            fault, net.names, net.concerned, error, tuple(not_finite(Path()))
        )

    assert branches.run(finish).not_finite == ()
    return branches.values


def not_finite(folder: Path) -> list[str]:
    """Return what a run has stored that is not finite, by file and tensor."""
    return [
        f"{path}: {name}"
        for path in sorted(folder.rglob("*.safetensors"))
        for name, value in load_file(path).items()
        if value.is_floating_point() and not bool(torch.isfinite(value).all())
    ]


def check(outcome: Outcome) -> None:
    """Assert that a fault ended in one error that names it, and left nothing broken."""
    fault = outcome.fault
    assert outcome.not_finite == (), fault
    assert outcome.names, fault
    # Many a count may be missing or zero; what matters is that nothing else fails.
    if fault.sites == SITES and fault.is_of_counts:
        return
    assert any(repr(name) in outcome.error for name in outcome.names), outcome
    if fault.sites == 1:
        assert repr(outcome.sites[0]) in outcome.error, outcome
