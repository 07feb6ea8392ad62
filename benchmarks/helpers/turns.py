"""Measurements of several programs in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


def measure_in_turns(
    programs: Mapping[str, Callable[[], object]],
    turns: int,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, list[float]]:
    """Return the seconds of each turn of each program.

    The programs run in turns, so that other work on the machine affects all of them.
    Each runs once before, without being measured.

    Args:
        programs: The programs by name.
        turns: Number of measured turns.
        clock: Returns the current time in seconds; by default CPU time.
    """
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(turns + 1):
        for name, run in programs.items():
            start = clock()
            run()
            if turn:
                seconds[name].append(clock() - start)
    return seconds
