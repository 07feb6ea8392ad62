"""Restarts at any question leave the bits of every method's run as they are.

Each job runs once in one process, and then over the engine of real sites, where all
sites, the server or both are restarted before each question. A restarted part has what
is on its disk and nothing else.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
from fault_net import Net, ServerKilled
from method_cases import CASES

from fednotes.core.federation import State
from fednotes.core.messages import Frame
from fednotes.engines.inprocess import InProcess
from fednotes.methods.base import Method
from fednotes.methods.private import DPMethod
from fednotes.privacy.promise import Privacy, Unit

pytestmark = pytest.mark.usefixtures("instant_disk")

SITES = 3  # as instance weights need
# Where a method has such a setting.
SETTINGS = {"epochs": 2, "calibrate": True}
SHORT = {"epochs": 1, "cycles": 1, "rounds": 1, "classifier_cycles": 1}

PRIVATE = ", with differential privacy"
NEVER_PRIVATE = ("adversarial", "pretrain, pairs")
ALIKE_IF_PRIVATE = ("fedner, weights", "distill, target gradient")  # as the case before
PRIVATE_CASES = [
    name + PRIVATE for name in CASES if name not in NEVER_PRIVATE + ALIKE_IF_PRIVATE
]


@dataclass(frozen=True)
class Way:
    """How a run is disturbed.

    sites: whether all sites are restarted before each question. server: whether the
    server is, each time after one question more. keeping: seconds of work after which a
    site saves a state of its own at the start of a round.
    """

    sites: bool = False
    server: bool = False
    keeping: float = 1e9


WAYS = {
    "sites with a state for each round": Way(sites=True, keeping=0.0),
    "sites with a state for each checkpoint": Way(sites=True),
    "server": Way(server=True),
    "sites and server": Way(sites=True, server=True, keeping=0.0),
}
QUICK = ("sites with a state for each round", "server")


def each_way() -> Iterator[Any]:
    """Yield each case with each way."""
    for name in (*CASES, *PRIVATE_CASES):
        is_private = name in PRIVATE_CASES
        for way in QUICK[:1] if is_private else WAYS:
            is_quick = way in QUICK and not is_private
            marks = () if is_quick else pytest.mark.slow
            yield pytest.param(name, WAYS[way], id=f"{name}: {way}", marks=marks)


@dataclass
class Job:
    """A job of three sites, all of which are in each sum."""

    method: Method
    settings: Any
    sites: list[Any]

    @classmethod
    def of_case(cls, name: str, bert: Path) -> Job:
        case = CASES[name.removesuffix(PRIVATE)](bert)
        sites = list(case.sites[:SITES])
        settings = case.settings(sites)
        names = {each.name for each in fields(settings)}
        changes: dict[str, Any] = dict(SETTINGS)
        method = case.method
        if name.endswith(PRIVATE):
            assert method.dp is not None
            unit: Unit = "document" if method.holds == "documents" else "patient"
            privacy = Privacy(noise=1.5, rate=0.5, clip=0.25, unit=unit)
            changes |= {**SHORT, "sites": SITES, "privacy": privacy}
            changes |= method.dp.required_settings
            method = DPMethod(method)
        known = {key: value for key, value in changes.items() if key in names}
        return cls(method, replace(settings, **known), sites)

    def make(self, number: int, folder: Path) -> Any:
        """Return a new site that writes its model below `folder`."""
        site = self.sites[number]
        options: dict[str, Any] = {"directory": folder / site.id}
        if self.settings.privacy is not None:
            options["secret"] = bytes([number]) * 32
        return self.method.make_site(site, self.settings, **options)

    def train(self, federation: Any) -> State:
        return self.method.train(federation, self.settings)


class Restarts(Net):
    """Hosts that are restarted in one way."""

    way = Way()
    lives = 0  # of the server
    questions = 0  # in its present life

    def keeping(self, site: str) -> float:
        return self.way.keeping

    def exchange(
        self, frames: Mapping[str, Frame], **limits: Any
    ) -> Iterator[tuple[str, Frame]]:
        if self.way.sites:
            self.hosts.clear()
        if self.way.server and self.questions == self.lives:
            raise ServerKilled
        self.questions += 1
        yield from super().exchange(frames, **limits)

    def run(self, job: Job) -> State:
        """Run the job, again and again if the server is killed."""
        names = [site.id for site in job.sites]
        while True:
            self.questions = 0
            self.lives += 1
            try:
                return job.train(self.engine(names))
            except ServerKilled:
                assert self.lives < 200


def bits(state: State) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in state.tensors.items()}


def files(folder: Path) -> dict[str, bytes]:
    """Return what sites have written, by its place."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(("name", "way"), [*each_way()])
def test_a_run_with_restarts_has_the_bits_of_one_without(
    name: str, way: Way, bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the server ends with, and each site's state, scores and saved model."""
    # of marks, part of a site's state
    monkeypatch.setattr(secrets, "randbits", lambda bits: 5)
    job = Job.of_case(name, bert)
    members = [job.make(number, tmp_path / "whole") for number in range(SITES)]
    expected = job.train(InProcess(members))

    makes = {
        site.id: lambda number=number: job.make(number, tmp_path / "restarted")
        for number, site in enumerate(job.sites)
    }
    net = Restarts(makes, tmp_path / "net")
    net.way = way
    ended = net.run(job)

    assert bits(ended) == bits(expected)
    assert ended.facts == expected.facts
    for member in members:
        site = net.host(member.id)._ready()
        assert bits(site.state()) == bits(member.state())
        assert site.state().facts == member.state().facts
    assert files(tmp_path / "whole")
    assert files(tmp_path / "restarted") == files(tmp_path / "whole")
