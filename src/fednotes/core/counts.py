"""Round the counts that a site reports to the server.

A site's policy may ask that no exact count leaves (`[policy] count_step`). A count is
then reported as the nearest multiple of the step. With a step of 1 every function here
returns its input.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray


def round_count(count: float, step: int) -> int:
    """Return a count as it is reported.

    Args:
        count: The exact count, a whole number of at least 0.
        step: The step, at least 1.

    Returns:
        The nearest multiple of the step, the larger one of two that are equally near. A
        count above 0 is at least one step, so that nothing that was counted disappears;
        0 stays 0.
    """
    exact = int(count)
    if exact == 0:
        return 0
    nearest = (2 * exact + step) // (2 * step) * step
    return max(step, nearest)


def round_counts(counts: Mapping[str, float], step: int) -> dict[str, float]:
    """Return counts by name as they are reported; see `round_count`."""
    if step == 1:
        return dict(counts)
    return {name: float(round_count(count, step)) for name, count in counts.items()}


def round_array(counts: NDArray[np.float64], step: int) -> NDArray[np.float64]:
    """Return an array of counts as they are reported; see `round_count`."""
    if step == 1:
        return counts
    nearest = np.floor((2 * counts + step) / (2 * step)) * step
    return np.where(counts > 0, np.maximum(step, nearest), 0.0)


def scale_sum(total: float, count: int, step: int) -> float:
    """Return a sum over examples so that it goes with their reported number.

    The mean over the examples stays as it is: the sum is multiplied by reported /
    exact. Above a step of 1 the result has the precision of float32. In all its bits a
    sum of short numbers would tell the exact count: of all n that could have divided
    it, one leaves a short number.

    Args:
        total: The sum over the examples, such as a loss.
        count: The exact number of examples.
        step: The step, at least 1.
    """
    if step == 1 or count == 0:
        return total
    return float(np.float32(total * (round_count(count, step) / count)))
