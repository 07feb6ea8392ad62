"""Wrong tensors and counts, in both directions, end in one clear error for every
method.

A job of three sites runs over the engine of real sites, and the transport changes the
first message of one task. Whatever comes of it is an error that a user can read, which
names the tensor or the count, and the site where one site alone sent it; the run keeps
nothing that is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_net import Net
from method_cases import CASES, Case, fedner_case
from safetensors.torch import load_file
from torch import Tensor

from fednotes.core.errors import FednotesError
from fednotes.core.messages import Frame, decode_reply, decode_request, encode
from fednotes.core.types import SiteData
from fednotes.core.update import Tensors, Update
from fednotes.engines.inprocess import InProcess

pytestmark = pytest.mark.usefixtures("instant_disk")

SITES = 3
SETTINGS = {
    "rounds": 1,
    "cycles": 1,
    "classifier_cycles": 1,
    "epochs": 1,
    "distil_epochs": 0,  # after the last message
}  # where a method has one


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
    """One change. down: of what the server sends. sites: how many of the sites it
    concerns."""

    task: str
    kind: str
    down: bool = False
    sites: int = 1

    def of_tensors(self, tensors: Tensors) -> dict[str, Tensor]:
        """The tensors, of which the first one is wrong."""
        (first, value), *_ = tensors.items()
        wrong = WRONG_TENSORS[self.kind](value)
        changed = {name: own for name, own in tensors.items() if name != first}
        return changed if wrong is None else {**changed, first: wrong}

    def of_update(self, update: Update) -> Update:
        if self.kind in WRONG_COUNTS:
            return replace(update, metrics=WRONG_COUNTS[self.kind](update.metrics))
        return replace(update, tensors=self.of_tensors(update.tensors))


@dataclass
class Faulty(Net):
    """Changes the messages of one task. names: the wrong tensor, or the counts."""

    fault: Fault = field(default_factory=lambda: Fault("", ""))
    concerned: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    def exchange(
        self, frames: Mapping[str, Frame], **limits: Any
    ) -> Iterator[tuple[str, Frame]]:
        sent = {site: self._down(site, frame) for site, frame in frames.items()}
        for site, frame in super().exchange(sent, **limits):
            yield site, self._up(site, frame, decode_request(sent[site]).task)

    def _down(self, site: str, frame: Frame) -> Frame:
        request = decode_request(frame)
        if not self._is_wrong(site, request.task, down=True) or not request.tensors:
            return frame
        self.names = (next(iter(request.tensors)),)
        return encode(replace(request, tensors=self.fault.of_tensors(request.tensors)))

    def _up(self, site: str, frame: Frame, task: str) -> Frame:
        reply = decode_reply(frame)
        if not self._is_wrong(site, task, down=False) or reply.update is None:
            return frame
        has = (
            reply.update.metrics
            if self.fault.kind in WRONG_COUNTS
            else reply.update.tensors
        )
        if not has:
            return frame
        self.names = (
            tuple(has) if self.fault.kind in WRONG_COUNTS else (next(iter(has)),)
        )
        return encode(replace(reply, update=self.fault.of_update(reply.update)))

    def _is_wrong(self, site: str, task: str, *, down: bool) -> bool:
        return (self.fault.task, self.fault.down) == (
            task,
            down,
        ) and site in self.concerned


class Listening(InProcess):
    """Notes of each task whether tensors are sent, and whether tensors come back."""

    def __init__(self, sites: Any) -> None:
        super().__init__(sites)
        self.tasks: dict[str, tuple[bool, bool]] = {}

    def sum(self, task: str, tensors: Any = None, /, **options: Any) -> Any:
        total = super().sum(task, tensors, **options)
        down, up = self.tasks.get(task, (False, False))
        self.tasks[task] = (down or bool(tensors), up or bool(total.tensors))
        return total


def shortened(site: Any) -> Any:
    """Return a site of documents with few of them; other sites are small already."""
    if not isinstance(site, SiteData):
        return site
    return replace(site, train=site.train[:8], valid=site.valid[:4], test=site.test[:4])


def prepared(case: Case) -> tuple[list[Any], Any]:
    """The sites of a short job, and its settings."""
    sites = [shortened(site) for site in case.sites[:SITES]]
    settings = case.settings(sites)
    known = {name: value for name, value in SETTINGS.items() if hasattr(settings, name)}
    return sites, replace(settings, **known)


def outcome(case: Case, fault: Fault, folder: Path) -> tuple[str, Faulty]:
    """The error's text, "" where the run came to its end; and what was changed."""
    sites, settings = prepared(case)
    names = [site.id for site in sites]
    makes = {
        site.id: lambda site=site: case.method.make_site(
            site, settings, directory=folder / site.id
        )
        for site in sites
    }
    net = Faulty(
        makes, folder / "kept", fault=fault, concerned=tuple(names[: fault.sites])
    )
    try:
        case.method.train(net.engine(names), settings)
    except FednotesError as error:
        return str(error), net
    return "", net


def not_finite(folder: Path) -> list[str]:
    """What a run has kept that is not finite, by file and tensor."""
    return [
        f"{path.relative_to(folder)}: {name}"
        for path in sorted(folder.rglob("*.safetensors"))
        for name, value in load_file(path).items()
        if value.is_floating_point() and not bool(torch.isfinite(value).all())
    ]


def rows_case(bert: Path) -> Case:
    """FedNER with a word table that travels by rows."""
    case = fedner_case()

    def settings(sites: Any) -> Any:
        config = case.settings(sites)
        return replace(config, model=replace(config.model, hashed_words=1500))

    return replace(case, settings=settings)


ALL = {**CASES, "fedner, word rows": rows_case}


def faults(tasks: Mapping[str, tuple[bool, bool]]) -> Iterator[Fault]:
    """Yield the changes of a job's messages that no run can go on with."""
    for task, (down, up) in tasks.items():
        if down:
            for kind in WRONG_TENSORS:
                yield Fault(task, kind, down=True)
        if up:
            for kind in (
                "NaN",
                "missing",
            ):  # the engine compares sites, whatever the method is
                yield Fault(task, kind)
            for kind in (
                "one row more",
                "missing",
            ):  # sites agree, as those of another version do
                yield Fault(task, kind, sites=SITES)
        yield Fault(task, "counts that overflow")
        for kind in ("no counts", "counts below zero", "counts of zero"):
            yield Fault(task, kind, sites=SITES)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "step",
    [pytest.param(4, id="every fourth"), pytest.param(1, marks=pytest.mark.slow)],
)
def test_wrong_messages_end_in_one_error_that_names_them(
    step: int, name: str, bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Try every fault of every message (slow), or each fourth one.

    The fourths begin elsewhere for each method, so that together they hold all kinds.
    """
    monkeypatch.setenv("FEDNOTES_CACHE", str(tmp_path / "cache"))
    case = ALL[name](bert)
    sites, settings = prepared(case)
    engine = Listening([case.method.make_site(site, settings) for site in sites])
    case.method.train(engine, settings)
    tried = 0
    all_faults = list(faults(engine.tasks))
    first = list(ALL).index(name) % step
    for number, fault in enumerate(all_faults[first::step]):
        folder = tmp_path / str(number)
        said, net = outcome(case, fault, folder)
        tried += bool(net.names)
        assert not_finite(folder) == [], fault
        if not net.names or (fault.sites == SITES and fault.kind in WRONG_COUNTS):
            continue  # many a count may be missing or zero; what matters is that nothing else fails
        assert any(repr(wrong) in said for wrong in net.names), (fault, said)
        if fault.sites == 1:
            assert repr(net.concerned[0]) in said, (fault, said)
    assert tried
