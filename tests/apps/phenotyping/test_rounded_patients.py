"""With a `count_step`, Platt scaling counts patients in steps."""

from __future__ import annotations

import numpy as np
from method_runs import run
from phenotype_cases import calibrated_case
from phenotype_patients import without_stage_1

STEP = 10


def test_platt_scaling_rounds_counts_of_patients() -> None:
    """Oracle: the sums of NumPy over patients, each class of a classifier times reported /
    exact."""
    case = calibrated_case(without_stage_1(calibrate=True))
    engine, _ = run(case, count_step=STEP)
    exact, _ = run(case)
    rounded = next(update for _, task, update in engine.sent if task == "calibrate")
    plain = next(update for _, task, update in exact.sent if task == "calibrate")
    rounded_sums, plain_sums = (
        rounded.tensors["sums"].numpy(),
        plain.tensors["sums"].numpy(),
    )
    # At a = b = 0 each patient adds log 2, and a quarter of it is the slope of p.
    numbers = np.array(
        [[max(10, (n + 5) // 10 * 10) for n in row] for row in plain_sums[:, 6:8]]
    )
    np.testing.assert_array_equal(rounded_sums[:, 6:8], numbers)
    np.testing.assert_allclose(
        rounded_sums[:, 0], numbers.sum(1) * np.log(2), rtol=2**-23
    )
    np.testing.assert_allclose(rounded_sums[:, 5], numbers.sum(1) / 4, rtol=2**-23)
