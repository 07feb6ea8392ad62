"""Rounding of the counts that a site reports to the server.

A site's policy may require that no exact count leaves the site (`[policy] count_step`).
A count is then reported as the nearest multiple of the step. With a step of 1 all
functions in this module return their input.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray


def round_count(count: float, step: int, times: int = 1) -> int:
    """Round a count for reporting.

    Args:
        count: The exact count, a nonnegative whole number.
        step: The step, at least 1.
        times: How often the count includes each example, such as the number of epochs,
            or of the codes of each patient. The number of examples is rounded, and not
            its multiple: of 12 codes each, 37 patients have 444, and 440 would reveal
            the 37.

    Returns:
        The nearest multiple of the step, rounding half up, `times` times. A count above
        0 becomes at least one step, so that it does not disappear; 0 stays 0.
    """
    exact = int(count)
    if exact == 0 or step == 1:
        return exact
    examples = -(-exact // times)
    nearest = (2 * examples + step) // (2 * step) * step
    return times * max(step, nearest)


def round_counts(counts: Mapping[str, float], step: int) -> dict[str, float]:
    """Round counts by name for reporting; see `round_count`."""
    if step == 1:
        return dict(counts)
    return {name: float(round_count(count, step)) for name, count in counts.items()}


def round_array(counts: NDArray[np.float64], step: int) -> NDArray[np.float64]:
    """Round an array of counts for reporting; see `round_count`."""
    if step == 1:
        return counts
    nearest = np.floor((2 * counts + step) / (2 * step)) * step
    return np.where(counts > 0, np.maximum(step, nearest), 0.0)


def scale_sum(total: float, count: int, step: int, times: int = 1) -> float:
    """Scale a sum over examples to match their reported number.

    The mean over the examples is unchanged: the sum is multiplied by reported / exact.
    With a step above 1 the result is rounded to float32. With all its bits, a scaled
    sum of short numbers would reveal the exact count: only one of the possible divisors
    would leave a short number.

    Args:
        total: The sum over the examples, such as a loss.
        count: The exact number of examples.
        step: The step, at least 1.
        times: As in `round_count`.
    """
    if step == 1 or count == 0:
        return total
    return float(np.float32(total * (round_count(count, step, times) / count)))
