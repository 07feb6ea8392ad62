"""Estimates of the remaining time of a run, over all of its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from fednotes.engines.rounds import RoundResult

FEWEST_ROUNDS = 3  # after the first round, which includes the start-up
FEWEST_SECONDS = 5.0
# A pace is settled after this time, or after SETTLED_SHARE of a part's rounds.
SETTLED_SECONDS = 60.0
SETTLED_SHARE = 0.05
MOST_MEDIANS = 5.0  # a longer round has waited for a site or the machine


@dataclass
class _Part:
    """The rounds of a part so far.

    Attributes:
        name: The part's name.
        rounds: Maximum number of its rounds; 0 if it is not known.
        done: Number of completed rounds.
        times: Seconds of each round after the first, and whether it was evaluated.
    """

    name: str
    rounds: int
    done: int = 0
    times: list[tuple[float, bool]] = field(default_factory=list)

    def compute_seconds_per_round(self) -> float:
        """Return the mean time of a round.

        A round that has waited, and so took far longer, counts as a median one.
        """
        total = 0.0
        for evaluated in (False, True):
            times = [seconds for seconds, judged in self.times if judged == evaluated]
            if times:
                typical = median(times)
                longest = MOST_MEDIANS * typical
                total += sum(
                    seconds if seconds <= longest else typical for seconds in times
                )
        return total / len(self.times)

    def is_settled(self) -> bool:
        """Return whether the rounds so far suffice to predict the others."""
        if not self.rounds or len(self.times) < FEWEST_ROUNDS:
            return False
        seconds = self.compute_seconds_per_round() * len(self.times)
        share = len(self.times) / self.rounds
        settled = seconds >= SETTLED_SECONDS or share >= SETTLED_SHARE
        return seconds >= FEWEST_SECONDS and settled


class TimeLeft:
    """Estimates the remaining time of a run from the rounds completed so far.

    It gives no estimate until the rounds so far suffice for one. The first round of a
    part, which includes the start-up, does not count, nor does the time for which a
    round waits.
    """

    def __init__(self) -> None:
        self._work: dict[str, float] = {}
        self._finished: list[_Part] = []
        self._part = _Part("", 0)
        self._last: RoundResult | None = None

    def plan(self, work: Mapping[str, float]) -> None:
        """Record the plan of the run.

        Args:
            work: The work of each part that is still to be trained, in any unit common
                to all parts; 0 where it is not known. A run without a plan has one
                part.
        """
        self._work = dict(work)

    def begin(self, part: str, rounds: int) -> None:
        """Begin or resume a part of at most this many rounds; 0 if not known."""
        self._part = _Part(part, rounds)
        self._last = None

    def round(self, result: RoundResult) -> None:
        """Record a round of the part."""
        part, last = self._part, self._last
        if last is not None and result.round > last.round:
            rounds = result.round - last.round
            seconds = max(0.0, result.seconds - last.seconds) / rounds
            part.times += [(seconds, result.evaluated)] * rounds
        part.done = result.round + 1
        self._last = result

    def end(self) -> None:
        """End the part."""
        if self._part.name:
            self._finished.append(self._part)
        self._part = _Part("", 0)
        self._last = None

    def estimate_seconds(self) -> float | None:
        """Return the seconds until the run ends; None while they are not known.

        It is an estimate: rounds become faster or slower, and parts may stop early.
        """
        part = self._part
        paces = [
            pace
            for pace in map(self._compute_pace, [*self._finished, part])
            if pace is not None
        ]
        unstarted_work = self._list_unstarted_work()
        if not part.rounds or (not part.is_settled() and not paces):
            return None
        if unstarted_work and (not paces or 0 in unstarted_work):
            return None
        if part.is_settled():
            current = part.compute_seconds_per_round() * (part.rounds - part.done)
        elif part.name in self._work:
            undone = 1 - part.done / part.rounds
            current = fmean(paces) * self._work[part.name] * undone
        else:
            return None
        unstarted_seconds = (
            sum(unstarted_work) * fmean(paces) * self._compute_share_run()
            if unstarted_work
            else 0.0
        )
        return current + unstarted_seconds

    def _compute_pace(self, part: _Part) -> float | None:
        """Return the seconds per unit of work; None if the part does not show it."""
        work = self._work.get(part.name, 0.0)
        if not work or not part.is_settled():
            return None
        return part.compute_seconds_per_round() * part.rounds / work

    def _list_unstarted_work(self) -> Sequence[float]:
        """Return the work of each part that has not begun."""
        begun = {part.name for part in (*self._finished, self._part)}
        return [work for name, work in self._work.items() if name not in begun]

    def _compute_share_run(self) -> float:
        """Return the share of their rounds that the finished parts ran."""
        shares = [
            part.done / part.rounds
            for part in self._finished
            if part.rounds and part.done
        ]
        return min(1.0, fmean(shares)) if shares else 1.0
