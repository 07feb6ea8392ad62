"""With a `count_step`, sites count patients in steps, whatever they sum over them."""

from __future__ import annotations

import numpy as np
from method_runs import run
from phenotype_cases import calibrated_case
from phenotype_patients import config_of, without_stage_1

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


def test_numbers_of_pairs_follow_from_rounded_numbers_of_patients() -> None:
    """Patients are rounded, and then multiplied by epochs, codes and classifiers. A
    multiple of the exact number, in steps, would reveal the exact number."""
    settings = config_of(local_epochs=3, classifier_epochs=4)
    engine, _ = run(calibrated_case(settings), count_step=STEP)
    for site in engine.members:
        updates = [(task, sent) for id, task, sent in engine.sent if id == site.id]
        trained = [sent for task, sent in updates if task == "train"]
        of_codes = [
            sent.metrics["examples"]
            for sent in trained
            if "patients" not in sent.tensors
        ]
        of_classifiers = [
            sent.metrics["examples"] for sent in trained if "patients" in sent.tensors
        ]
        held_out = [
            sent.metrics["pairs"] for _, sent in updates if "pairs" in sent.metrics
        ]
        assert of_codes
        assert of_classifiers
        assert held_out
        assert {number % (3 * STEP) for number in of_codes} == {0}
        times = 4 * len(site.classifiers.svms.classifiers)
        assert {number % (times * STEP) for number in of_classifiers} == {0}
        outputs = len(site.code_learner.outputs)
        assert {number % (outputs * STEP) for number in held_out} == {0}


def test_a_part_of_an_epoch_counts_as_another_epoch() -> None:
    """In steps, 1.5 times the exact number would be finer than the number in steps."""
    settings = config_of(local_epochs=1.5)
    engine, _ = run(calibrated_case(settings), count_step=STEP)
    numbers = {
        sent.metrics["examples"]
        for _, task, sent in engine.sent
        if task == "train" and "patients" not in sent.tensors
    }
    assert numbers
    assert {number % (2 * STEP) for number in numbers} == {0}
