"""Delays of a site's answers under a secure sum, so that timing reveals nothing.

Otherwise the site that answers first would be the one with the fewest notes. Sites
therefore hold their answers back until the end of a class of times, 2^(k/2) / 16
seconds, which all sites share: the class of the slowest site in the last sum of the
task. Each site adds a 1 under its own class to that sum.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping

PACE = "@time "  # prefix of the names of the counts that stand for classes
CLASSES = 36  # the last class ends after three hours
# The name of the count for each class.
PACES = tuple(f"{PACE}{level:02}" for level in range(CLASSES))
WINDOW = 8  # number of most recent answers that decide a task's class
MARGIN = 1.25  # safety factor, because the next answer may take a little longer
SETTLED = 3  # answers after which an honest server's class is at least the site's own
COARSE = 4  # classes in a coarse class, which ends after 4^k / 16 seconds
WARY = 64  # answers for which a site distrusts a server that sent an implausible class


def compute_class_end(level: int) -> float:
    """Return the upper bound of an answer-time class, in seconds."""
    return float(2.0 ** (level / 2) / 16)


def find_class(seconds: float) -> int:
    """Return the first class that ends no earlier than a time."""
    level = math.ceil(2 * math.log2(max(seconds, 1e-9) * 16) - 1e-9)
    return min(CLASSES - 1, max(0, level))


def find_last_class(seconds: float) -> int:
    """Return the last class that ends by a time; the first class if none does."""
    return max(
        (level for level in range(CLASSES) if compute_class_end(level) <= seconds),
        default=0,
    )


def find_slowest_class(metrics: Mapping[str, float]) -> int | None:
    """Return the highest class that any site reported in a sum; None if none did."""
    reported = [PACES.index(name) for name in PACES if metrics.get(name)]
    return max(reported, default=None)


def remove_classes(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics without the counts that stand for classes."""
    return {name: count for name, count in metrics.items() if not name.startswith(PACE)}


class AnswerTimes:
    """Delays the answers of one site.

    Some answers wait longer, until the end of a coarse class of 4^k / 16 seconds:

    - The first three answers of a task. An honest server's class may be too low for
      them, so a site cannot tell yet whether a server lies. All sites wait for the end
      of the coarse class that contains the server's class. Whatever a server sends, it
      thus learns only a site's coarse class.
    - An answer for which the server sent a class below the site's own, as a dishonest
      server may do. The site then uses coarse classes for a while, so that a server
      gains little by trying further classes.
    - An answer that is too late for its class.

    Args:
        clock: Returns the time in seconds; tests replace it.
        sleep: Waits for a number of seconds; tests replace it.
        longest: Maximum number of seconds for which an answer waits for slower sites. A
            site that reports a class of hours thus delays the others no more than if it
            answered late itself.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        longest: float = math.inf,
    ) -> None:
        self.clock = clock
        self._sleep = sleep
        self._max_class = find_last_class(longest)
        self._durations: dict[str, deque[float]] = {}  # newest durations by task
        # Task to the number of further answers that are delayed to a coarse class.
        self._num_coarse: dict[str, int] = {}

    def make_counts(self, task: str, seconds: float) -> dict[str, float]:
        """Return what the site adds to the sum: 1 under its class, 0 under the others.

        Args:
            task: The task.
            seconds: The time that the task has taken so far.
        """
        site_class = self._estimate_class(task, seconds)
        if self._num_coarse.get(task):
            site_class = _round_up_to_coarse(site_class)
        return {name: float(level == site_class) for level, name in enumerate(PACES)}

    def wait(self, task: str, start_time: float, slowest_class: int | None) -> None:
        """Delay the answer to a task.

        Args:
            task: The task.
            start_time: When its request arrived, by `clock`.
            slowest_class: The class of the slowest site, as the server reports it; None
                if it is not known.
        """
        duration = self.clock() - start_time
        site_class = self._estimate_class(task)
        durations = self._durations.setdefault(task, deque(maxlen=WINDOW))
        is_settled = len(durations) >= SETTLED
        durations.append(duration)
        if slowest_class is not None and slowest_class < site_class and is_settled:
            # The reported class is wrong, because this site is slower.
            self._num_coarse[task] = WARY
        num_coarse = self._num_coarse.get(task, 0)
        self._num_coarse[task] = max(0, num_coarse - 1)

        level = -1 if slowest_class is None else min(slowest_class, self._max_class)
        is_too_short = level < site_class or duration > compute_class_end(level)
        if not is_settled:
            level = max(
                _round_up_to_coarse(level), _round_up_to_coarse(find_class(duration))
            )
        elif is_too_short or num_coarse:
            level = max(
                level, _round_up_to_coarse(max(site_class, find_class(duration)))
            )
        # A coarse class may end after the request's timeout, which makes the site late.
        if duration <= compute_class_end(self._max_class):
            level = min(level, self._max_class)
        answer_time = start_time + compute_class_end(level)
        seconds_left = answer_time - self.clock()
        while seconds_left > 0:
            self._sleep(seconds_left)
            seconds_left = answer_time - self.clock()

    def _estimate_class(self, task: str, seconds: float = 0.0) -> int:
        """Return the class of the slowest recent answer, with a margin."""
        return find_class(MARGIN * max(seconds, *self._durations.get(task, ()), 0.0))


def _round_up_to_coarse(level: int) -> int:
    """Return the last class of the coarse class that contains a class.

    A coarse class has `COARSE` classes.
    """
    return COARSE * math.ceil(level / COARSE)
