"""Answer times that do not reveal the size of a site."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import permutations, product
from math import comb
from pathlib import Path

import numpy as np
import pytest
import torch
from fault_net import Net
from fault_toy import JOB
from secure_net import Giver

from fednotes.core.messages import Request, decode_reply, encode_message
from fednotes.core.update import Update
from fednotes.engines.answer_times import (
    CLASSES,
    PACE,
    SETTLED,
    AnswerTimes,
    compute_class_end,
    find_class,
    find_slowest_class,
)
from fednotes.engines.host import SiteHost
from fednotes.engines.secure import SecureSeal, SecureSum

# Seconds of the task "train" at sites of 20, 60 and 100 sentences, as an attacker
# measured them.
TOOK = {"a": 0.094, "b": 0.140, "c": 0.163}
SITES, ROUNDS = tuple(TOOK), 30


class Clock:
    """A site's own clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def pace(self) -> AnswerTimes:
        return AnswerTimes(lambda: self.now, self.sleep)

    def answered(
        self, pace: AnswerTimes, took: float, counted_class: int | None
    ) -> float:
        """Return after how many seconds an answer leaves."""
        start = self.now
        self.now += took
        pace.wait("train", start, counted_class)
        return self.now - start


def host(
    folder: Path, site: str, make: Callable[[], Worker], clock: Clock | None
) -> SiteHost:
    """Return the host of one of three sites. clock: the clock by which it delays
    answers."""
    seal, pace = SecureSeal(site, SITES, job=JOB, threshold=3), clock and clock.pace()
    return SiteHost(make, folder / site, job=JOB, name=site, sealer=seal, pace=pace)


class Worker(Giver):
    """A site whose training takes its time by its own clock."""

    def __init__(
        self, name: str, clock: Clock, rng: np.random.Generator, jitter: float
    ) -> None:
        super().__init__(name, [Update({"w": torch.ones(3)}, 1.0, {"n": 1.0})])
        self.clock, self.rng, self.jitter = clock, rng, jitter

    def give(self, tensors: dict[str, torch.Tensor]) -> Update:
        self.clock.now += TOOK[self.id] * float(
            np.exp(self.jitter * self.rng.standard_normal())
        )
        return super().give(tensors)


def seen_by_the_server(
    folder: Path, seed: int, *, steady: bool, jitter: float = 0.04
) -> dict[str, np.ndarray]:
    """Return the seconds from each request to its answer, by site, under the secure
    sum."""
    net, rng = Net({}, folder), np.random.default_rng(seed)
    clocks = {site: Clock() for site in SITES}
    for site, clock in clocks.items():
        worker = Worker(site, clock, rng, jitter)
        make_site = partial(lambda worker: worker, worker)
        net.hosts[site] = host(folder, site, make_site, clock if steady else None)
    engine = net.engine(SITES, summing=SecureSum(SITES, job=JOB, threshold=3))
    durations = {site: np.zeros(ROUNDS) for site in SITES}
    engine._members.wait_for_sites(len(SITES), prepare=False)
    for turn in range(ROUNDS):
        next(engine.rounds(turn, ROUNDS))
        before = {site: clock.now for site, clock in clocks.items()}
        total = engine.sum("give")
        assert total.metrics == {"n": 3.0}  # a method does not see the classes
        for site in SITES:
            durations[site][turn] = clocks[site].now - before[site]
    return durations


def right_guesses(durations: dict[str, np.ndarray], rng: np.random.Generator) -> bool:
    """Return whether the mean times reveal the order of sizes; ties are guessed."""
    means = {site: round(float(times.mean()), 9) for site, times in durations.items()}
    order = sorted(SITES, key=lambda site: (means[site], rng.random()))
    return tuple(order) == SITES


@pytest.mark.slow
def test_thirty_rounds_do_not_rank_three_sites_better_than_chance(
    tmp_path: Path,
) -> None:
    """One order of six is right. Of 8 runs a coin gives 6 or more right ones in 0.05 %
    of all tests (the binomial tail below); without the pace every run is ranked right.
    """
    rng, runs, limit = np.random.default_rng(7), 8, 6
    chance = 1 / len(list(permutations(SITES)))
    tail = sum(
        comb(runs, k) * chance**k * (1 - chance) ** (runs - k)
        for k in range(limit, runs + 1)
    )
    assert tail < 1e-3
    right = sum(
        right_guesses(seen_by_the_server(tmp_path / f"{seed}", seed, steady=True), rng)
        for seed in range(runs)
    )
    assert right < limit
    plain = [
        seen_by_the_server(tmp_path / f"plain{seed}", seed, steady=False)
        for seed in (1, 2)
    ]
    assert all(right_guesses(durations, rng) for durations in plain)


def test_all_sites_answer_in_the_time_class_of_the_slowest(tmp_path: Path) -> None:
    """0.163 s and a quarter more is 0.204 s: the class that ends at 2^(4/2) / 16 = 0.25
    s."""
    durations = seen_by_the_server(tmp_path, 1, steady=True, jitter=0.0)
    assert find_class(0.163 * 1.25) == 4
    for site in SITES:
        np.testing.assert_allclose(durations[site], 0.25, rtol=1e-9)


@pytest.mark.parametrize("task", ["give", "@begin"])
def test_refusals_and_rebuilt_states_take_a_power_of_four(
    task: str, tmp_path: Path
) -> None:
    """A task without the terms of a sum is refused after it was done, and "@begin"
    makes the site anew where it was just undone: the time of either goes by the site's
    size."""
    took = {}
    for site, number in (("a", 1), ("b", 2), ("c", 3)):
        clock = Clock()
        worker = Worker(site, clock, np.random.default_rng(1), 0.0)

        def make_site(
            worker: Worker = worker, clock: Clock = clock, site: str = site
        ) -> Worker:
            clock.now += TOOK[site]
            return worker

        request = Request(JOB, 1, number, task, first=True, counted={site: 0})
        reply = decode_reply(
            host(tmp_path, site, make_site, clock).handle(encode_message(request))
        )
        assert ("outside the secure sum" in reply.refusal) == (task == "give")
        took[site] = clock.now
    assert set(took.values()) <= {4.0**k / 16 for k in range(4)}


def test_time_classes_are_powers_of_the_square_root_of_two() -> None:
    assert [compute_class_end(k) for k in (0, 2, 4, 8)] == [0.0625, 0.125, 0.25, 1.0]
    assert [find_class(s) for s in (0.0, 0.0625, 0.0626, 0.25, 0.2501, 1e9)] == [
        *(0, 0, 1),
        *(4, 5, CLASSES - 1),
    ]
    assert all(find_class(compute_class_end(k)) == k for k in range(CLASSES))


def test_a_server_that_reports_too_low_a_class_sees_only_a_power_of_four() -> None:
    clock = Clock()
    pace = clock.pace()
    for took, answered in (
        (0.30, 1.0),
        (0.30, 1.0),
        (0.9, 1.0),
        (1.1, 4.0),
        (0.1, 4.0),
    ):
        assert clock.answered(pace, took, 0) == pytest.approx(answered)
    # 0.125 seconds, though it has taken longer before
    assert clock.answered(pace, 0.0, 2) == pytest.approx(4.0)


def test_a_server_that_tries_each_class_learns_only_a_power_of_four() -> None:
    """The site takes 0.3 seconds, its own class ends at 0.5: from below, no answer ends
    there, and neither does one of the first three."""
    clock = Clock()
    pace = clock.pace()
    answered = [
        clock.answered(pace, 0.3, reported) for reported in (*([6] * 4), *range(12))
    ]
    assert answered[:3] == [pytest.approx(1.0)] * 3
    assert answered[3] == pytest.approx(0.5)
    assert answered[4:] == [
        pytest.approx(max(1.0, compute_class_end(reported))) for reported in range(12)
    ]
    assert find_slowest_class(pace.make_counts("train", 0.3)) == 8


def test_the_first_three_answers_reveal_only_a_power_of_four() -> None:
    """All of these times are above 4^1 / 16 and at most 4^2 / 16 seconds, in four
    classes. A lying server may send any class with each of the three requests."""
    for sent in product((None, 4, 5, 6, 7, 8, 9), repeat=SETTLED):
        answers = set()
        for took in (0.26, 0.4, 0.6, 0.9):
            clock = Clock()
            pace = clock.pace()
            durations = [clock.answered(pace, took, level) for level in sent]
            answers.add(tuple(round(seconds, 9) for seconds in durations))

        assert answers == {tuple(4.0 if level == 9 else 1.0 for level in sent)}, sent


def test_a_coarse_class_ends_within_the_timeout() -> None:
    """The coarse class of 300 seconds ends at 1024, after the timeout of 600."""
    clock = Clock()
    pace = AnswerTimes(lambda: clock.now, clock.sleep, longest=600.0)

    durations = [clock.answered(pace, 300.0, level) for level in (None, 24, 24, 24)]

    assert durations == pytest.approx([512.0] * 4)


def test_a_long_pause_is_forgotten_after_eight_answers() -> None:
    clock, levels = Clock(), []
    pace = clock.pace()
    for took in (9.0, *[0.1] * 9):
        clock.answered(pace, took, CLASSES - 1)
        levels.append(find_slowest_class(pace.make_counts("train", 0.1)))
    assert levels == [find_class(9 * 1.25)] * 8 + [find_class(0.125)] * 2


def test_a_site_reports_a_one_under_its_class() -> None:
    counts = AnswerTimes().make_counts("train", 0.2)
    assert sum(counts.values()) == counts[f"{PACE}04"] == 1.0
    assert len(counts) == CLASSES
    assert find_slowest_class(counts | {"n": 3.0}) == 4
    assert find_slowest_class({"n": 3.0}) is None


@pytest.mark.parametrize(
    ("timeout", "expected"), [(600.0, 512.0), (1.0, 1.0), (0.01, 0.0625)]
)
def test_a_reported_class_of_hours_does_not_delay_an_answer_beyond_the_timeout(
    timeout: float, expected: float
) -> None:
    """Class k ends after 2^(k/2) / 16 seconds; the last one of the 36 after three
    hours."""
    clock = Clock()
    pace = AnswerTimes(lambda: clock.now, clock.sleep, longest=timeout)

    durations = [clock.answered(pace, 0.02, CLASSES - 1) for _ in range(5)]

    assert durations == pytest.approx([expected] * 5)


def test_a_site_that_is_slower_than_the_timeout_answers_by_powers_of_four() -> None:
    clock = Clock()
    pace = AnswerTimes(lambda: clock.now, clock.sleep, longest=600.0)

    durations = [clock.answered(pace, 700.0, CLASSES - 1) for _ in range(3)]

    assert durations == pytest.approx([4**7 / 16] * 3)
