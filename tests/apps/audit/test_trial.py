"""How the success of an attack is measured."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fednotes.apps.audit import Trial
from fednotes.core.errors import ConfigError

CHANCE = 0.01


def test_success_is_the_true_positive_rate_at_one_percent_false_positives() -> None:
    """By hand: each of 200 decoys is half a percent, so two of them may be named."""
    decoys = [*range(200)]
    assert Trial.from_scores([250.0, 198.5, 197.5, -1.0], decoys).success == 0.75
    assert Trial.from_scores([250.0, 198.5, 196.5, -1.0], decoys).success == 0.5
    # Each of ten decoys is 10 %, so lots are drawn for a tenth of it: half of the
    # targets are above all decoys, and of those beside the first decoy a tenth is
    # named.
    trial = Trial.from_scores([20.0, 8.5], [*range(10)])
    assert trial.success == pytest.approx(0.5)
    assert Trial.from_scores([20.0, 9.0], [*range(10)]).success == pytest.approx(
        0.5 + 0.1 * 0.5
    )
    assert trial.details["auc"] == pytest.approx((1 + 0.9) / 2)


def test_an_adversary_who_sees_nothing_succeeds_by_chance() -> None:
    assert Trial.from_scores([0.0] * 30, [0.0] * 70).success == pytest.approx(CHANCE)
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(2, 20_000, generator=generator)
    trial = Trial.from_scores(noise[0], noise[1])
    assert trial.low < CHANCE < trial.high
    with pytest.raises(ConfigError, match="no decoys to compare"):
        Trial.from_scores([1.0], [])
    for wrong in ([math.nan, 1.0], [math.inf]):  # would rank above all others
        with pytest.raises(ConfigError, match="not a finite number"):
            Trial.from_scores(wrong, [0.0])


def test_the_interval_equals_that_of_wilson() -> None:
    """Newcombe 1998, table I: 0.2553–0.3662 for 81 of 263, 0–0.1611 for 0 of 20."""
    trial = Trial.from_fraction(81 / 263, 263, 0.0)
    assert (trial.low, trial.high) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    none = Trial.from_fraction(0.0, 20, 0.0)
    assert (none.low, none.high) == pytest.approx((0.0, 0.1611), abs=5e-5)


def test_the_chance_level_for_pairs_is_that_of_knowing_only_frequencies() -> None:
    """By hand: first, both pairs have the largest product of frequencies.

    Then one of three pairs has it, and three absent pairs rank above the other two.
    """
    pairs = np.zeros((1, 4, 4))
    pairs[0, 0, 1] = pairs[0, 0, 2] = 1.0
    scores = np.where(pairs[0] > 0, 1.0, 0.0)
    assert (trial := Trial.from_pair_scores(scores, pairs)).success == 1.0
    assert trial.chance == 1.0
    pairs[0, 3, 3] = 9.0
    assert Trial.from_pair_scores(scores, pairs).chance == pytest.approx(1 / 3)


def test_the_chance_level_accounts_for_few_decoys() -> None:
    """Compare the chance with the mean success of random scores over many trials."""
    rng = np.random.default_rng(1)
    for decoys in (1, 2, 30, 250):
        trials = [
            Trial.from_scores(rng.random(8), rng.random(decoys)) for _ in range(1500)
        ]
        mean = np.mean([trial.success for trial in trials])
        spread = np.std([trial.success for trial in trials]) / 1500**0.5
        assert mean == pytest.approx(trials[0].chance, abs=4 * spread)
