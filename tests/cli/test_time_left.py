"""The remaining time of a run, estimated from rounds of known length."""

from __future__ import annotations

import pytest

from fednotes.cli.time_left import TimeLeft
from fednotes.engines.rounds import RoundResult


class Clock:
    """A run whose rounds take the given time."""

    def __init__(self, **work: float) -> None:
        self.time_left = TimeLeft()
        if work:
            self.time_left.plan(work)
        self.now = 0.0
        self.number = 0

    def begin(self, part: str, rounds: int, *, start: float = 0.0) -> None:
        self.time_left.begin(part, rounds)
        self.now, self.number = start, 0

    def rounds(self, *seconds: float, evaluated: bool = False) -> None:
        for each in seconds:
            self.now += each
            self.time_left.round(
                RoundResult(self.number, {}, 3, 0, 0, self.now, evaluated)
            )
            self.number += 1


def test_no_time_is_shown_before_the_rounds_allow_an_estimate() -> None:
    """The first round has a start-up in it: it does not count, however long it is."""
    clock = Clock()
    clock.begin("federated", 20)
    clock.rounds(500.0, 2.0, 2.0)
    assert clock.time_left.estimate_seconds() is None  # two rounds
    clock.rounds(2.0)
    assert clock.time_left.estimate_seconds() == pytest.approx(2.0 * 16)


def test_too_few_short_rounds_give_no_estimate() -> None:
    """Of 1,000 rounds four of 2 s are 8 s: too few for either rule. 31 of them are a
    minute."""
    clock = Clock()
    clock.begin("alone/a", 1000)
    clock.rounds(*[2.0] * 5)
    assert clock.time_left.estimate_seconds() is None
    clock.rounds(*[2.0] * 26)
    assert clock.time_left.estimate_seconds() == pytest.approx(2.0 * 969)
    quick = Clock()
    quick.begin("alone/a", 20)
    quick.rounds(*[0.1] * 19)
    assert quick.time_left.estimate_seconds() is None  # less than five seconds in all


def test_evaluations_are_estimated_separately_from_rounds() -> None:
    """Nine rounds of 1 s and an evaluation of 11 s are 20 s of ten rounds, 2 s each."""
    clock = Clock()
    clock.begin("federated", 41)
    clock.rounds(7.0)
    for _ in range(2):
        clock.rounds(*[1.0] * 9)
        clock.rounds(11.0, evaluated=True)
    assert clock.time_left.estimate_seconds() == pytest.approx(2.0 * 20)


def test_waiting_time_is_not_counted() -> None:
    """An hour for approvals before the first round; a site away for half an hour in the
    sixth.

    That round counts like the other nine, which take 2 s.
    """
    clock = Clock()
    clock.begin("federated", 20, start=3600.0)
    clock.rounds(2.0, *[2.0] * 5, 1800.0, *[2.0] * 4)
    assert clock.time_left.estimate_seconds() == pytest.approx(2.0 * 9)


def test_the_estimate_covers_all_parts() -> None:
    """Part `a`: 2 s a round, 10 rounds, 100 examples, so 0.2 s an example. After its
    fifth round 10 s of its own, and 30 s and 60 s of the parts that have not begun."""
    clock = Clock(a=100.0, b=150.0, c=300.0)
    clock.begin("a", 10)
    clock.rounds(*[2.0] * 5)
    assert clock.time_left.estimate_seconds() == pytest.approx(10.0 + 30.0 + 60.0)
    clock.rounds(*[2.0] * 5)
    clock.time_left.end()
    clock.begin("b", 15)
    clock.rounds(2.0)  # its own pace is not known yet: that of `a` is
    assert clock.time_left.estimate_seconds() == pytest.approx(
        0.2 * 150 * 14 / 15 + 60.0
    )
    # twice as slow as `a`: 0.4 s an example, 0.3 s for both parts' mean
    clock.rounds(*[4.0] * 4)
    assert clock.time_left.estimate_seconds() == pytest.approx(4.0 * 10 + 0.3 * 300)


def test_parts_that_end_early_shorten_the_estimate_of_the_others() -> None:
    """`a` ended after 5 of 10 rounds: half of the work of `c` is expected."""
    clock = Clock(a=100.0, b=100.0, c=100.0)
    clock.begin("a", 10)
    clock.rounds(*[2.0] * 5)
    clock.time_left.end()
    clock.begin("b", 10)
    clock.rounds(*[2.0] * 5)
    assert clock.time_left.estimate_seconds() == pytest.approx(2.0 * 5 + 0.5 * 20.0)


def test_no_time_is_shown_if_the_work_is_unknown() -> None:
    clock = Clock(a=100.0, b=0.0)
    clock.begin("a", 10)
    clock.rounds(*[2.0] * 8)
    assert clock.time_left.estimate_seconds() is None
    unknown = Clock()
    unknown.begin("federated", 0)
    unknown.rounds(*[20.0] * 8)
    assert unknown.time_left.estimate_seconds() is None


def test_the_estimate_of_a_resumed_run_starts_at_its_round() -> None:
    """Six rounds are left after round 13 of 20, whose rounds take 3 s since it goes on."""
    clock = Clock()
    clock.begin("federated", 20, start=900.0)
    clock.number = 10
    clock.rounds(30.0, 3.0, 3.0, 3.0)
    assert clock.time_left.estimate_seconds() == pytest.approx(3.0 * 6)
