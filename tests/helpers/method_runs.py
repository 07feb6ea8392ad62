"""Small jobs of methods, runs of them in one process, and what a run leaves."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from fednotes.core.errors import FednotesError
from fednotes.core.federation import State
from fednotes.core.types import SiteData
from fednotes.core.update import Tensors, Total, Update
from fednotes.engines.inprocess import InProcess
from fednotes.methods.base import Method
from fednotes.methods.private import DPMethod
from fednotes.privacy.promise import Privacy, Unit

LEAST_MISSED = 0.85  # where most of an update is drawn


@dataclass(frozen=True)
class Case:
    """A small job of a method, for the tests that every method must pass.

    Attributes:
        method: The method.
        settings: Returns the settings of a job of the given sites.
        sites: What four or more sites hold; three where no site may be left out.
        task: The first task whose sum trains: sites send in it what training makes of
            their notes. The attack that subtracts two jobs reads its first sum.
        is_change: Whether sites send parameters in it (True), and not gradients
            (False). The attack then takes off the parameters that the server sent.
        close: How close a run under the secure sum ends: relatively, and absolutely.
        least_missed: How much of a site's part the attack misses at least where draws
            are secret; 1 is what somebody misses who knows the mean of the others.
    """

    method: Method
    settings: Callable[[Sequence[Any]], Any]
    sites: Sequence[Any]
    task: str
    is_change: bool
    close: tuple[float, float] = (1e-5, 1e-6)
    least_missed: float = LEAST_MISSED


MakeCase = Callable[[Path], Case]  # given the folder of a tiny BERT


class Recording(InProcess):
    """Keeps all that leaves each site, and all that is sent to sites."""

    def __init__(self, sites: Sequence[Any], **options: Any) -> None:
        super().__init__(sites, **options)
        self.members: tuple[Any, ...] = tuple(sites)
        self.sent: list[tuple[str, str, Update]] = []
        self.received: list[tuple[str, Tensors]] = []
        self.totals: list[tuple[str, Total]] = []

    def sum(self, task: str, tensors: Any = None, /, **options: Any) -> Total:
        self.received.append((task, copied(tensors or {})))
        total = super().sum(task, tensors, **options)
        self.totals.append((task, total))
        return total

    def run(self, site: Any, task: str, *arguments: Any) -> Update:
        update = super().run(site, task, *arguments)
        self.sent.append(
            (site.id, task, replace(update, tensors=copied(update.tensors)))
        )
        return update


class Call(NamedTuple):
    """A task that a site ran in a round."""

    round: int
    task: str
    tensors: Tensors
    options: Mapping[str, Any]


class CallsOfOneSite(InProcess):
    """Keeps the calls of the first site, in order."""

    def __init__(self, sites: Sequence[Any]) -> None:
        super().__init__(sites)
        self.calls: list[Call] = []
        self._round = -1  # outside of all rounds
        self._first_site = sites[0]

    def rounds(self, start: int, stop: int) -> Iterator[Any]:
        for turn in super().rounds(start, stop):
            self._round = turn.number
            yield turn
        self._round = -1

    def run(self, site: Any, task: str, tensors: Any, options: Any) -> Update:
        if site is self._first_site:
            call = Call(self._round, task, copied(tensors or {}), dict(options))
            self.calls.append(call)
        return super().run(site, task, tensors, options)


def find_uses_of_earlier_tasks(job: Job) -> set[tuple[str, str]]:
    """Return pairs of a task and an earlier one of its round whose result it uses.

    The calls of a site are repeated at a new one, with other tensors in one call. The
    answers to later calls of the round, which receive the same as before, then show
    whether they use its result.
    """
    with fixed_marks():
        engine = CallsOfOneSite(job.make_all())
        job.train(engine)
        expected = _repeat(job, engine.calls)
        pairs = set[tuple[str, str]]()
        for number, call in enumerate(engine.calls):
            if call.round < 0 or not call.tensors:
                continue
            tensors = {name: _change(value) for name, value in call.tensors.items()}
            end_of_round = number + 1
            while end_of_round < len(engine.calls) and (
                engine.calls[end_of_round].round == call.round
            ):
                end_of_round += 1
            calls = engine.calls[:end_of_round]
            calls[number] = call._replace(tensors=tensors)
            answers = _repeat(job, calls)
            for later in range(number + 1, end_of_round):
                is_refused = later >= len(answers)
                if is_refused or answers[later] != expected[later]:
                    pairs.add((calls[later].task, call.task))
    return pairs


def _change(value: torch.Tensor) -> torch.Tensor:
    """Return other floating-point values; integers are names of rows and codes."""
    return value * 0.5 if value.is_floating_point() else value


def _repeat(job: Job, calls: Sequence[Call]) -> list[tuple[Any, ...]]:
    """Return the numbers of a new site's answers, up to one that it refuses."""
    site = job.make(0)
    answers: list[tuple[Any, ...]] = []
    for call in calls:
        try:
            update = getattr(site, call.task)(copied(call.tensors), **call.options)
        except FednotesError:
            break
        answers.append((bits(copied(update.tensors)), update.weight, update.metrics))
    return answers


def copied(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in tensors.items()}


def run(case: Case, **options: Any) -> tuple[Recording, State]:
    """Train a case to its end; return what left its sites, and the last state.

    Args:
        case: The job.
        **options: Options of the sites.
    """
    settings = case.settings(case.sites)
    engine = Recording(
        [case.method.make_site(site, settings, **options) for site in case.sites]
    )
    return engine, case.method.train(engine, settings)


def bits(tensors: Tensors) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in tensors.items()}


def read_files(folder: Path) -> dict[str, bytes]:
    """Return what sites have written, by its place."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def assert_close_facts(facts: Any, expected: Any, tolerance: float) -> None:
    """Assert that JSON values are equal but for the last digits of numbers."""
    if isinstance(expected, Mapping):
        assert facts.keys() == expected.keys()
        for name, value in expected.items():
            assert_close_facts(facts[name], value, tolerance)
    elif isinstance(expected, float):
        assert facts == pytest.approx(expected, rel=tolerance)
    else:
        assert facts == expected


def fixed_marks() -> AbstractContextManager[Any]:
    """Draw the marks of tensors, which are part of a site's state, as 5."""
    return mock.patch.object(secrets, "randbits", return_value=5)


# ---- jobs of three sites ---------------------------------------------------------------

SITES = 3  # as instance weights need
SIZES = (14, 11, 8)  # the most documents of each, none a multiple of a step of counts
# Where a method has such a setting.
SETTINGS = {"epochs": 2, "calibrate": True}
SHORT = {"epochs": 1, "cycles": 1, "rounds": 1, "classifier_cycles": 1}
# What makes a short job with differential privacy long enough.
LONGER = {"epochs": 2, "local_epochs": 2, "classifier_cycles": 2}
LEAST_ANSWERS = 4  # of a site with differential privacy, for faults between them


@dataclass(frozen=True)
class Job:
    """A job of three sites, all of which are in each sum."""

    method: Method
    settings: Any
    sites: list[Any]

    @classmethod
    def of(cls, case: Case, **changes: Any) -> Job:
        """Return the job of a case; a change of a setting that it lacks has no effect."""
        sites = [
            shortened(site, size) for site, size in zip(case.sites, SIZES, strict=False)
        ]
        settings = case.settings(sites)
        return cls(case.method, with_known(settings, SETTINGS | changes), sites)

    @classmethod
    def short(cls, case: Case, **changes: Any) -> Job:
        """Return a job of one round of few examples."""
        sites = [shortened(site, 6) for site in case.sites]
        return cls.of(replace(case, sites=sites), **SHORT | changes)

    @classmethod
    def with_privacy(cls, case: Case, **privacy: Any) -> Job:
        """Return a short one with differential privacy, of four answers or more."""
        dp = case.method.dp
        assert dp is not None
        plain = cls.short(case, **LONGER)
        names = {each.name for each in fields(plain.settings)}
        if "epochs" in names:  # `rounds` are single steps then
            plain = replace(plain, settings=with_known(plain.settings, {"rounds": 0}))
        elif not names & LONGER.keys():  # only `rounds` say how long it trains
            plain = replace(plain, settings=with_known(plain.settings, {"rounds": 2}))
        unit: Unit = "document" if case.method.holds == "documents" else "patient"
        table: dict[str, Any] = {"noise": 1.5, "rate": 0.5, "clip": 0.25, "unit": unit}
        promised = Privacy(**table | privacy)
        changes = {"sites": SITES, "privacy": promised, **dp.required_settings}
        settings = with_known(plain.settings, changes)
        answers = dp.make_promise(settings).rounds
        assert answers >= LEAST_ANSWERS, (
            f"the job with differential privacy has {answers} answers of a site, and "
            f"its tests need {LEAST_ANSWERS}: name the setting of the method that makes "
            "it longer in LONGER of tests/helpers/method_runs.py"
        )
        return cls(DPMethod(case.method), settings, plain.sites)

    def make(self, number: int, folder: Path | None = None, **options: Any) -> Any:
        """Return a new site, which writes its model below `folder`."""
        site = self.sites[number]
        if folder is not None:
            options["directory"] = folder / site.id
        if isinstance(self.method, DPMethod):
            options["secret"] = bytes([number]) * 32
        return self.method.make_site(site, self.settings, **options)

    def make_all(self, folder: Path | None = None, **options: Any) -> list[Any]:
        return [self.make(number, folder, **options) for number in range(SITES)]

    def makes(self, folder: Path) -> dict[str, Callable[[], Any]]:
        """Return a function for each site that makes it anew, as hosts need."""
        return {
            site.id: lambda number=number: self.make(number, folder)
            for number, site in enumerate(self.sites)
        }

    def train(self, federation: Any) -> State:
        return self.method.train(federation, self.settings)


def shortened(site: Any, size: int) -> Any:
    """Return a site of documents with few of them; other sites are small already."""
    if not isinstance(site, SiteData):
        return site
    parts = {"valid": site.valid[:4], "test": site.test[:4]}
    return replace(site, train=site.train[:size], **parts)


def with_known(settings: Any, changes: Mapping[str, Any]) -> Any:
    """Return settings with those changes that concern a setting they have."""
    names = {each.name for each in fields(settings)}
    return replace(settings, **{k: v for k, v in changes.items() if k in names})


@dataclass
class Reference:
    """A job's run in one process, without a fault; many tests compare with it.

    Attributes:
        name: The name of its case.
        case: The case.
        job: The job of its first three sites.
        folder: What its sites have written.
        engine: What was sent.
        ended: The server's last state.
        evaluated: The evaluated rounds, in order, and the last one.
    """

    name: str
    case: Case
    job: Job
    folder: Path
    engine: Recording = field(init=False)
    ended: State = field(init=False)
    evaluated: list[int] = field(default_factory=list)
    rounds: int = 0

    def __post_init__(self) -> None:
        with fixed_marks():
            self.engine = Recording(
                self.job.make_all(self.folder), observer=self._observe
            )
            self.ended = self.job.train(self.engine)

    def _observe(self, result: Any) -> None:
        self.rounds = result.round + 1
        if result.evaluated:
            self.evaluated.append(result.round)

    @property
    def members(self) -> tuple[Any, ...]:
        return self.engine.members

    @property
    def tasks(self) -> list[str]:
        """The tasks, each once, in the order in which sites were asked."""
        return list(dict.fromkeys(task for task, _ in self.engine.received))

    def check(self, ended: State, members: Sequence[Any], folder: Path) -> None:
        """Assert that another run ended alike, to the bit: server, sites and files."""
        assert bits(ended.tensors) == bits(self.ended.tensors)
        assert ended.facts == self.ended.facts
        for restored, member in zip(members, self.members, strict=True):
            assert bits(restored.state().tensors) == bits(member.state().tensors)
            assert restored.state().facts == member.state().facts
        files = read_files(self.folder)
        assert files
        assert read_files(folder) == files
