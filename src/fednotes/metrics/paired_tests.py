"""Paired tests of whether two runs or two models differ by more than chance.

`run_paired_t_test` tests differences between runs over several seeds. The bootstrap
tests two models on the same test documents (`bootstrap_documents`, `bootstrap_sites`)
or patients (`bootstrap_patients`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fednotes.core.errors import ConfigError, DataError, needs
from fednotes.core.types import Document
from fednotes.metrics.classification import (
    Floats,
    compute_macro_auroc,
    compute_macro_f1,
    draw_weights,
    ratio,
)
from fednotes.metrics.spans import count_by_document

# Returns a system's scores on resampled units, (draws,), from how often each unit is
# drawn, (draws, units).
Score = Callable[[Floats], Floats]

BOOTSTRAP_SAMPLES = 10_000  # default of every comparison
FEWEST_SEEDS = 5  # with fewer, no difference is claimed
ROUNDING = 1e-12  # smaller differences are rounding errors


# ---- over seeds ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PairedTest:
    """The result of Student's paired t test.

    Attributes:
        mean: The mean difference.
        low: Lower end of the 95 % interval of the mean.
        high: Upper end of the 95 % interval of the mean.
        p_value: The two-sided p value.
        n: The number of differences.
    """

    mean: float
    low: float
    high: float
    p_value: float
    n: int


def run_paired_t_test(differences: Sequence[float]) -> PairedTest:
    """Test by Student's paired t test whether a mean difference is nonzero.

    The interval is mean ± t(0.975, n − 1) · s / √n, where s is the sample standard
    deviation. Differences without spread have an interval of zero width, and p = 0
    unless they are zero. Differences and spreads below `ROUNDING` count as zero,
    because summing scores in a different order can cause them.

    Args:
        differences: One difference for each seed.

    Raises:
        DataError: There are fewer than two.
        MissingExtra: scipy is not installed.
    """
    n = len(differences)
    if n < 2:
        raise DataError(f"a paired test needs two differences or more, not {n}")
    with needs("scipy", "plot"):
        from scipy import stats
    mean = fmean(differences)
    if max(differences) - min(differences) < ROUNDING:
        p_value = 1.0 if abs(mean) < ROUNDING else 0.0
        return PairedTest(mean, mean, mean, p_value, n)

    result = stats.ttest_1samp(differences, 0.0)
    low, high = result.confidence_interval()
    return PairedTest(mean, float(low), float(high), float(result.pvalue), n)


# ---- paired bootstrap ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """The difference between two systems' scores on the same documents or patients.

    Attributes:
        f1_a: The score of the first system.
        f1_b: The score of the second system.
        difference: The first minus the second.
        low: Lower end of the 95 % percentile interval.
        high: Upper end of the 95 % percentile interval.
        p_value: The two-sided p value (see `bootstrap`).
        samples: The number of resamples.
    """

    f1_a: float
    f1_b: float
    difference: float
    low: float
    high: float
    p_value: float
    samples: int


def bootstrap(
    systems: tuple[Score, Score],
    units: int,
    samples: int,
    seed: int,
    unit_name: str = "patient",
) -> Bootstrap:
    """Test whether two systems differ by more than the sampling of units explains.

    Units are drawn with replacement, the same ones for both systems. With d for the
    observed difference and d* for that of a resample, the two-sided p value is
    p = (1 + #{|d* − d| ≥ |d|}) / (1 + samples) (Berg-Kirkpatrick et al. 2012, with
    the observed sample as one of the resamples).

    Args:
        systems: The scores of both systems.
        units: Number of documents or patients.
        samples: Number of resamples.
        seed: Seed of the draws.
        unit_name: The name of a unit in messages.

    Raises:
        ConfigError: `samples` is less than 1.
        DataError: There are no units.
    """
    resampled = _resample(systems, units, samples, seed, unit_name)
    return _summarise(resampled)


@dataclass(frozen=True)
class _Resampled:
    """The scores of two systems, and the differences of all resamples (samples,)."""

    first: float
    second: float
    differences: Floats


def _resample(
    systems: tuple[Score, Score], units: int, samples: int, seed: int, unit_name: str
) -> _Resampled:
    """Return the scores of two systems on the observed units and on resamples of them.

    The arguments are those of `bootstrap`.
    """
    if samples < 1:
        raise ConfigError(f"a bootstrap needs at least one sample, not {samples}")
    if not units:
        raise DataError(
            f"a bootstrap needs at least one {unit_name}, and none was given"
        )
    first, second = systems
    all_once = np.ones((1, units))
    differences = [
        first(weights) - second(weights)
        for weights in draw_weights(units, samples, seed)
    ]
    return _Resampled(
        float(first(all_once)[0]),
        float(second(all_once)[0]),
        np.concatenate(differences),
    )


def _summarise(resampled: _Resampled) -> Bootstrap:
    """Return the interval and p value of resampled differences."""
    difference = resampled.first - resampled.second
    samples = len(resampled.differences)
    low, high = np.quantile(resampled.differences, (0.025, 0.975)).tolist()
    distances = np.abs(resampled.differences - difference)
    # The tolerance makes ties independent of the last bit of the divisions.
    extreme = int((distances >= abs(difference) - ROUNDING).sum())
    return Bootstrap(
        f1_a=resampled.first,
        f1_b=resampled.second,
        difference=difference,
        low=low,
        high=high,
        p_value=(1 + extreme) / (1 + samples),
        samples=samples,
    )


def bootstrap_documents(
    gold: Sequence[Document],
    a: Sequence[Document],
    b: Sequence[Document],
    metric: str = "strict",
    samples: int = BOOTSTRAP_SAMPLES,
    seed: int = 0,
    types: Collection[str] | None = None,
) -> Bootstrap:
    """Test whether two systems differ in micro F1, by `bootstrap` over documents.

    Args:
        gold: Documents with gold mentions.
        a: The same documents with the predictions of the first system.
        b: The same documents with the predictions of the second system.
        metric: "strict", "relaxed" or "relaxed_one_to_one".
        samples: Number of resamples.
        seed: Seed of the draws.
        types: The types that count; None counts all that occur.

    Raises:
        ConfigError: The metric is unknown, or `samples` is less than 1.
        DataError: The documents differ, or there are none.
    """
    systems = (
        _make_f1_score(count_by_document(gold, a, metric, types)),
        _make_f1_score(count_by_document(gold, b, metric, types)),
    )
    return bootstrap(systems, len(gold), samples, seed, "document")


def _make_f1_score(counts: NDArray[Any]) -> Score:
    """Return a function that computes micro F1 on resampled documents.

    Args:
        counts: (documents, 4), from `count_by_document`.
    """
    as_floats = counts.astype(np.float64)

    def f1(weights: Floats) -> Floats:
        """Return the micro F1 of each draw, (draws,)."""
        right, predicted, hits, gold = (weights @ as_floats).T
        precision = ratio(right, predicted)
        recall = ratio(hits, gold)
        return ratio(2 * precision * recall, precision + recall)

    return f1


def bootstrap_sites(
    counts: Mapping[str, tuple[NDArray[Any], NDArray[Any]]],
    samples: int = BOOTSTRAP_SAMPLES,
    seed: int = 0,
) -> tuple[dict[str, Bootstrap], Bootstrap | None]:
    """Compare two models on each site's test documents and by means over sites.

    Each site's result equals that of `bootstrap_documents`. For the means, the
    documents of every site are drawn independently.

    Args:
        counts: By site, the `count_by_document` of both models, (documents, 4) each.
        samples: Number of resamples.
        seed: Seed of the draws.

    Returns:
        The difference at each site that has a test document, first model minus second;
        and the difference of the means over all sites, None if no site has a test
        document.
    """
    by_site: dict[str, Bootstrap] = {}
    differences: list[Floats] = []
    for place, (site, (first, second)) in enumerate(counts.items()):
        if not len(first):
            differences.append(np.zeros(samples))  # here both models score 0
            continue
        systems = (_make_f1_score(first), _make_f1_score(second))
        resampled = _resample(systems, len(first), samples, seed, "document")
        by_site[site] = _summarise(resampled)
        # Sites with equal numbers of documents drew the same indices. Permuting the
        # resamples makes them independent.
        drawn = resampled.differences
        differences.append(np.random.default_rng((seed, place)).permutation(drawn))
    if not by_site:
        return {}, None
    means = _Resampled(
        sum(each.f1_a for each in by_site.values()) / len(counts),
        sum(each.f1_b for each in by_site.values()) / len(counts),
        np.mean(differences, axis=0),
    )
    return by_site, _summarise(means)


def bootstrap_patients(
    labels: NDArray[Any],
    a: NDArray[Any],
    b: NDArray[Any],
    metric: str = "f1",
    classes: Sequence[Sequence[int]] | None = None,
    samples: int = BOOTSTRAP_SAMPLES,
    seed: int = 0,
) -> Bootstrap:
    """Test whether two systems' macro scores differ, resampling patients (`bootstrap`).

    Args:
        labels: (patients, outputs).
        a: (patients, outputs) predictions of the first system; for "auroc", its scores.
        b: (patients, outputs) predictions or scores of the second system.
        metric: "f1" or "auroc". For "auroc", an output without present or absent
            patients is ignored, also within a draw.
        classes: As in `ClassCounts.of`.
        samples: Number of resamples.
        seed: Seed of the draws.

    Raises:
        ConfigError: `samples` is less than 1.
        DataError: Shapes differ, or there are no patients.
    """
    if not labels.shape == a.shape == b.shape:
        raise DataError(
            f"labels {labels.shape}, scores {a.shape} and {b.shape} must be alike"
        )
    systems: tuple[Score, Score]
    if metric == "auroc":
        systems = (
            partial(compute_macro_auroc, labels, a),
            partial(compute_macro_auroc, labels, b),
        )
    else:
        systems = (
            partial(compute_macro_f1, labels, classes, a),
            partial(compute_macro_f1, labels, classes, b),
        )
    return bootstrap(systems, len(labels), samples, seed)
