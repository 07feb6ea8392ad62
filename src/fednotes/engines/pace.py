"""When a site answers: at a time that does not depend on how many notes it has.

Under a secure sum nobody sees a site's weight, but who answers first has the fewest notes. So a
site holds an answer back until the end of a class of times, 2^(k/2) / 16 seconds, that all sites
keep to: the class of the slowest, which is known from the last sum of the task. Each site adds
a 1 under its class to that sum; nobody learns which site it was.

Where no class is told (the first time), one below its own (a server that lies), or the answer
is late for it, a site waits for the next 4^k / 16 seconds: what is seen then is no more than
that. A server that tries one class after the other gets such answers for long after the first.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping

NAME = "@time "  # begins the names of the counts that tell classes
CLASSES = 36  # the last one ends after three hours
WINDOW = 8  # answers of a task by which its class goes: an odd pause is forgotten after these
MARGIN = 1.25  # for the next answer, which may take a little longer
SETTLED = 3  # answers after which an honest server's class is never below a site's own
WARY = 64  # answers for which one that is below is not forgotten


def seconds_of(level: int) -> float:
    """The end of a class."""
    return float(2.0 ** (level / 2) / 16)


def class_of(seconds: float) -> int:
    """The first class that ends no earlier."""
    return min(CLASSES - 1, max(0, math.ceil(2 * math.log2(max(seconds, 1e-9) * 16) - 1e-9)))


def _coarse(level: int) -> int:
    """The next class whose end is a power of four, over 16."""
    return 4 * math.ceil(level / 4)


def slowest(metrics: Mapping[str, float]) -> int | None:
    """The highest class that any site told, from a sum; None if none did."""
    told = [int(name[len(NAME) :]) for name, n in metrics.items() if name.startswith(NAME) and n]
    return max(told, default=None)


def without(metrics: Mapping[str, float]) -> dict[str, float]:
    """A method's own counts."""
    return {name: n for name, n in metrics.items() if not name.startswith(NAME)}


class Pace:
    """One site's answers. clock, sleep: in seconds; tests have their own."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.clock, self._sleep = clock, sleep
        self._lasted: dict[str, deque[float]] = {}  # by task
        self._wary: dict[str, int] = {}  # by task: answers that keep to powers of four

    def counts(self, task: str, seconds: float) -> dict[str, float]:
        """What the site tells in the sum: 1 under its class, 0 under the others.

        seconds: that the task has taken so far.
        """
        own = self._class(task, seconds)
        if self._wary.get(task):
            own = _coarse(own)
        return {f"{NAME}{level:02}": float(level == own) for level in range(CLASSES)}

    def wait(self, task: str, begun: float, told: int | None) -> None:
        """Hold the answer to a task back. begun: when its request came, by `clock`. told: the
        class of the slowest site."""
        lasted, own = self.clock() - begun, self._class(task)
        before = self._lasted.setdefault(task, deque(maxlen=WINDOW))
        if told is not None and told < own and len(before) >= SETTLED:
            self._wary[task] = WARY
        before.append(lasted)
        level, wary = -1 if told is None else told, self._wary.get(task, 0)
        if level < own or lasted > seconds_of(level) or wary:
            level = max(level, _coarse(max(own, class_of(lasted))))
        self._wary[task] = max(0, wary - 1)
        while (left := begun + seconds_of(level) - self.clock()) > 0:
            self._sleep(left)

    def _class(self, task: str, seconds: float = 0.0) -> int:
        """By the slowest of the last answers, with a margin."""
        return class_of(MARGIN * max(seconds, *self._lasted.get(task, ()), 0.0))
