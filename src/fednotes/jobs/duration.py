"""Estimate how long a run will take on this machine, before it starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch

from fednotes.core.errors import FednotesError
from fednotes.engines.rounds import RoundResult
from fednotes.engines.simulation import Simulation
from fednotes.engines.site_programs import ProgramsHere, run_task
from fednotes.jobs.job import Job
from fednotes.jobs.parts import (
    Part,
    count_examples_of_few_sentences,
    find_sampling,
    is_summed_securely,
    make_method_sites,
    plan_rounds,
)
from fednotes.training.sites import calling_after_steps

SAMPLE_EXAMPLES = 64  # of all sites together
TRIAL_SECONDS = 4.0
MAX_SECONDS = 120.0  # of a whole trial, however long its first round takes
_MOST_SITES = 8  # with more sites, the models alone would take long to make


class _TrialOverError(Exception):
    """Ends a trial from within: the rounds so far suffice."""


@dataclass
class _Trial:
    """The pace of a few rounds.

    Attributes:
        clock: Returns the time in seconds.
        first: When the first round ended, and how many were done then.
        last: The same for the latest round.
    """

    clock: Callable[[], float]
    first: tuple[float, int] | None = None
    last: tuple[float, int] = (0.0, 0)

    def observe(self, result: RoundResult) -> None:
        """Record a round; end the trial once it has taken long enough.

        The first round does not count: models are warmed up and kernels compiled in it.

        Raises:
            _TrialOverError: The trial has taken long enough.
        """
        self.last = (self.clock(), result.round + 1)
        if self.first is None:
            self.first = self.last
        elif self.last[0] - self.first[0] > TRIAL_SECONDS:
            raise _TrialOverError

    def compute_seconds_per_round(self) -> float | None:
        """Return the mean time of a round; None after fewer than two rounds."""
        if self.first is None or self.last[1] == self.first[1]:
            return None
        return (self.last[0] - self.first[0]) / (self.last[1] - self.first[1])


def estimate_seconds(job: Job, parts: Sequence[Part]) -> dict[str, float]:
    """Estimate the seconds of each condition of a run, in one process on the CPU.

    A model is trained on a few of the job's own examples for some seconds. Parts may
    stop early, so a run may be shorter.

    Args:
        job: The job.
        parts: The parts of its run.

    Returns:
        The seconds by condition; empty if there is no sample of the examples, or
        nothing can be trained on it.
    """
    part = _choose_part(parts)
    sample = _draw_sample(job, part)
    if sample is None:
        return {}

    try:
        pace = _time_round(job, sample)
        work = _count_examples_read(job, sample, rounds=1)
    except (FednotesError, RuntimeError, MemoryError):  # torch raises RuntimeError
        return {}
    if pace is None or not work:
        return {}

    seconds: dict[str, float] = {}
    for part in parts:
        expected = pace / work * _count_examples_read(job, part)
        seconds[part.condition] = seconds.get(part.condition, 0.0) + expected
        if part.training == "federated":
            few = pace / work * count_examples_of_few_sentences(job)
            seconds[part.condition] += few
    return seconds


def _choose_part(parts: Sequence[Part]) -> Part:
    """Return the part to try: the federated one, unless it has many sites."""
    federated = [part for part in parts if part.condition == "federated"]
    candidates = [part for part in federated if len(part.sites) <= _MOST_SITES]
    return (candidates or sorted(parts, key=lambda part: len(part.sites)))[0]


def _draw_sample(job: Job, part: Part) -> Part | None:
    """Return a part with a few examples of each site; None if there is no such part."""
    shrink = job.kind.shrink
    if shrink is None or len(part.sites) > _MOST_SITES:
        return None
    examples = max(1, SAMPLE_EXAMPLES // len(part.sites))
    sites = tuple(shrink(site, examples) for site in part.sites)
    return replace(part, sites=sites)


def _time_round(job: Job, part: Part) -> float | None:
    """Return the seconds of a round of a part; None if they do not show."""
    folders = [None] * len(part.sites)
    torch.set_num_threads(job.threads)
    trial = _Trial(time.process_time)  # unlike a clock, not slowed by other work
    engine = Simulation(
        ProgramsHere(make_method_sites(job, part, folders), run_task),
        observer=trial.observe,
        secure=is_summed_securely(job, part),
        sampling=find_sampling(job, part),
    )
    with suppress(_TrialOverError), _limit_seconds(MAX_SECONDS):
        job.module.train(engine, part.config)
    return trial.compute_seconds_per_round()


@contextmanager
def _limit_seconds(limit: float) -> Iterator[None]:
    """Raise _TrialOverError at the first optimizer step after some seconds.

    A round of many local epochs would otherwise never end.

    Args:
        limit: The seconds.
    """
    end = time.monotonic() + limit

    def check() -> None:
        if time.monotonic() > end:
            raise _TrialOverError

    with calling_after_steps(check):
        yield


def _count_examples_read(job: Job, part: Part, rounds: int | None = None) -> float:
    """Return how many examples a part reads in all rounds, or in some.

    Args:
        job: The job.
        part: The part.
        rounds: Number of rounds; None for all.
    """
    sizes = [job.kind.count_examples(site) for site in part.sites]
    all_rounds, examples = plan_rounds(job.module, part.config, sizes, len(sizes))
    return float((all_rounds if rounds is None else rounds) * examples)
