"""Share of the gap that is closed, compared with simulations and SciPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from fednotes.metrics.classification import ClassCounts
from fednotes.metrics.gap import (
    BELOW,
    WITHIN,
    Gap,
    compute_gap,
    compute_gap_by_seed,
    compute_gap_of_sites,
    estimate_f1_error,
    find_main_score,
    judge_gain,
)
from fednotes.metrics.spans import SpanCounts, TypeCounts


def mentions(right: int, predicted: int, gold: int) -> dict[str, Any]:
    """Return the scores of one type with these counts."""
    return SpanCounts(
        {"Drug": TypeCounts(gold=gold, predicted=predicted, strict=right)}
    ).scores()


@pytest.mark.parametrize(
    ("right", "predicted", "gold"),
    [(60, 100, 120), (300, 400, 330), (5, 30, 40), (700, 1000, 800)],
)
def test_the_standard_error_of_f1_equals_that_of_simulated_counts(
    right: int, predicted: int, gold: int
) -> None:
    """Counts of right, false and missed mentions are drawn 200,000 times.

    The draws are accurate to half a percent of the error, the delta method to a few
    percent.
    """
    rng = np.random.default_rng(1)
    parts = np.array([right, predicted - right, gold - right])
    tp, fp, fn = rng.multinomial(parts.sum(), parts / parts.sum(), 200_000).T
    deviation = (2 * tp / (2 * tp + fp + fn)).std()
    assert estimate_f1_error(right, predicted, gold) == pytest.approx(
        deviation, rel=0.04
    )


def test_f1_without_mentions_has_no_standard_error() -> None:
    assert estimate_f1_error(0, 0, 0) == 0.0


def test_the_standard_error_for_few_mentions_is_never_zero() -> None:
    """The share of right ones is then (n + 1) / (n + 2), after Agresti and Coull."""
    for right, gold, share in ((2, 2, 3 / 4), (0, 2, 1 / 4), (10, 10, 11 / 12)):
        expected = 2 / (1 + share) ** 2 * (share * (1 - share) / (gold + 2)) ** 0.5
        assert estimate_f1_error(right, right, gold) == pytest.approx(expected)


def test_the_share_is_1_for_the_full_gain_and_missing_within_noise() -> None:
    assert compute_gap(0.4, 0.6, 0.6, 0.05) == Gap(1.0)
    assert compute_gap(0.4, 0.45, 0.6, 0.05).closed == pytest.approx(0.25)
    assert compute_gap(0.4, 0.3, 0.6, 0.05).closed == pytest.approx(-0.5)
    assert compute_gap(0.4, 0.5, 0.44, 0.05) == Gap(None, WITHIN)
    assert compute_gap(0.44, 0.5, 0.4, 0.05) == Gap(None, WITHIN)
    assert compute_gap(0.6, 0.5, 0.4, 0.05) == Gap(None, BELOW)


def test_a_site_needs_many_mentions_for_a_share() -> None:
    rights = dict(zip(("alone", "federated", "pooled"), (8, 10, 12), strict=True))
    few = {c: mentions(k, 20, 20) for c, k in rights.items()}
    many = {c: mentions(100 * k, 2000, 2000) for c, k in rights.items()}
    assert compute_gap_of_sites([few]) == Gap(None, WITHIN)
    actual = compute_gap_of_sites([many])
    assert actual is not None
    assert actual.closed == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("federated", "use"),
    [(600, "federated"), (400, "its own"), (505, "no difference shown")],
)
def test_a_model_is_recommended_only_if_it_is_better_by_more_than_chance(
    federated: int, use: str
) -> None:
    """Two F1 scores of 1,000 mentions each are drawn 20,000 times.

    95 % of their differences lie in an interval as wide as the verdict's.
    """
    alone_f1, federated_f1 = (right / 1000 for right in (500, federated))
    actual = judge_gain(
        [
            {
                "alone": mentions(500, 1000, 1000),
                "federated": mentions(federated, 1000, 1000),
            }
        ]
    )
    assert actual is not None
    assert (actual.use, actual.gap) == (use, None)
    assert actual.gain == pytest.approx(federated_f1 - alone_f1)
    rng = np.random.default_rng(1)
    unions = [round(1000 * (2 - f1)) for f1 in (alone_f1, federated_f1)]
    shares = [
        rng.binomial(u, f1 / (2 - f1), 20_000) / u
        for u, f1 in zip(unions, (alone_f1, federated_f1), strict=True)
    ]
    f1_drawn = [2 * share / (1 + share) for share in shares]
    assert (actual.high - actual.low) / 3.92 == pytest.approx(
        (f1_drawn[1] - f1_drawn[0]).std(), rel=0.05
    )


def test_sites_without_a_condition_are_left_out() -> None:
    complete_site = {
        c: mentions(k, 2000, 2000)
        for c, k in zip(
            ("alone", "federated", "pooled"), (1000, 1300, 1400), strict=True
        )
    }
    part = {"alone": mentions(1, 9, 9), "federated": mentions(2, 9, 9)}
    assert compute_gap_of_sites([part]) is None
    assert compute_gap_of_sites([{}]) is None
    assert compute_gap_of_sites([complete_site, part, {}]) == compute_gap_of_sites(
        [complete_site]
    )


def test_the_score_of_a_disease_is_the_mean_over_its_classes() -> None:
    """F1 of one disease is the mean over its two classes.

    Its error is that of the mean of two independent scores.
    """
    table = np.array([[50, 10, 0, 0], [20, 40, 0, 0], [0, 0, 0, 0]], np.float64)
    counts = ClassCounts({"Asthma": table})
    scores = {
        "phenotypes": counts.scores()["macro"],
        "by_output": counts.scores()["by_output"],
    }
    actual = find_main_score(scores)
    assert actual is not None
    absent, present = estimate_f1_error(50, 70, 60), estimate_f1_error(40, 50, 60)
    assert actual[1] == pytest.approx(np.hypot(absent, present) / 2)
    f1s = [2 * 50 / 130, 2 * 40 / 110]
    assert actual[0] == pytest.approx(np.mean(f1s))


def test_a_lower_loss_of_masked_words_counts_as_better() -> None:
    each = {
        c: {"masked": {"loss": loss, "tokens": 10_000}}
        for c, loss in {"alone": 3.0, "federated": 2.2, "pooled": 2.0}.items()
    }
    actual = compute_gap_of_sites([each])
    assert actual is not None
    assert actual.closed == pytest.approx(0.8)
    # two errors are 0.084
    each["pooled"] = {"masked": {"loss": 2.95, "tokens": 10_000}}
    assert compute_gap_of_sites([each]) == Gap(None, WITHIN)


def test_the_verdict_follows_the_interval_over_seeds() -> None:
    rng = np.random.default_rng(2)
    alone = list(0.46 + 0.01 * rng.standard_normal(5))
    pooled = list(0.57 + 0.01 * rng.standard_normal(5))
    federated = list(0.56 + 0.01 * rng.standard_normal(5))
    shares, why = compute_gap_by_seed(alone, federated, pooled)
    gain_pooled = np.mean(pooled) - np.mean(alone)
    assert why == ""
    assert np.mean(shares) == pytest.approx(
        (np.mean(federated) - np.mean(alone)) / gain_pooled
    )
    near = [a + d for a, d in zip(alone, (0.02, -0.01, 0.01, 0.0, 0.005), strict=True)]
    interval = stats.ttest_rel(near, alone).confidence_interval()
    assert interval.low < 0 < interval.high
    assert compute_gap_by_seed(alone, federated, near) == ([], WITHIN)
    assert compute_gap_by_seed(pooled, federated, alone) == ([], BELOW)
    assert compute_gap_by_seed([0.1], [0.2], [0.3]) == ([], "one seed")


def test_a_run_without_a_score_has_no_share() -> None:
    """A missing score counts neither as a loss of 0, the best, nor as NaN."""
    ends: Any = [1.0, 1.1, 0.9], [3.0, 2.9, 3.1]
    assert compute_gap_by_seed(ends[0], [2.0, float("nan"), 2.0], ends[1]) == (
        [],
        "a run has no score",
    )
