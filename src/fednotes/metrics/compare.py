"""Comparing runs: mean and deviation over seeds, and a paired bootstrap between two systems."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fednotes.core.errors import ConfigError, DataError, MissingExtra
from fednotes.core.types import Document
from fednotes.metrics.spans import document_counts

Floats = NDArray[np.float64]

_CHUNK = 4_000_000  # drawn indices held at once: 32 MB


def summarise(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation of every number of nested score dictionaries.

    Each number becomes {"mean": m, "std": s, "n": number of runs that have it}. The deviation
    is the sample's (ddof = 1) and None for a single run, which has none. What is not a number
    (names, None, booleans) is left out. Raises DataError if a key is a number in one run and a
    dictionary in another.
    """
    summary: dict[str, Any] = {}
    for key in dict.fromkeys(key for run in runs for key in run):
        values = [run[key] for run in runs if key in run]
        nested = [v for v in values if isinstance(v, Mapping)]
        numbers = [float(v) for v in values if _is_number(v)]
        if nested and numbers:
            raise DataError(f"score {key!r} is a number in one run and a dictionary in another")
        if nested:
            summary[key] = summarise(nested)
        elif numbers:
            summary[key] = _spread(numbers)
    return summary


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def _spread(numbers: Sequence[float]) -> dict[str, float | int | None]:
    n = len(numbers)
    mean = math.fsum(numbers) / n
    variance = math.fsum((x - mean) ** 2 for x in numbers) / (n - 1) if n > 1 else None
    return {"mean": mean, "std": None if variance is None else math.sqrt(variance), "n": n}


FEWEST_SEEDS = 5  # with fewer no difference is claimed


@dataclass(frozen=True, slots=True)
class PairedTest:
    """The mean of n differences, its 95 % interval and the two-sided p value, by Student's t."""

    mean: float
    low: float
    high: float
    p_value: float
    n: int


def paired_t(differences: Sequence[float]) -> PairedTest:
    """Student's paired t test: is the mean difference over seeds other than zero?

    mean ± t(0.975, n − 1) · s / √n, s the sample's deviation. Differences without any spread
    have an interval of no width, and p = 0 unless they are zero.
    Raises DataError for fewer than two, MissingExtra without scipy.
    """
    n = len(differences)
    if n < 2:
        raise DataError(f"a paired test needs two differences or more, not {n}")
    try:
        from scipy import stats
    except ModuleNotFoundError as error:
        raise MissingExtra("scipy", "plot") from error
    spread = _spread(differences)
    mean, std = float(spread["mean"] or 0), float(spread["std"] or 0)
    half = std / math.sqrt(n)
    if half == 0:
        return PairedTest(mean, mean, mean, float(mean == 0), n)
    reach = float(stats.t.ppf(0.975, n - 1)) * half
    p_value = float(2 * stats.t.sf(abs(mean) / half, n - 1))
    return PairedTest(mean, mean - reach, mean + reach, p_value, n)


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """The difference of micro F1 of two systems on the same documents, `a` minus `b`.

    low, high: 95 % percentile interval. p_value: two-sided, see `paired_bootstrap`.
    """

    f1_a: float
    f1_b: float
    difference: float
    low: float
    high: float
    p_value: float
    samples: int


def paired_bootstrap(
    gold: Sequence[Document],
    a: Sequence[Document],
    b: Sequence[Document],
    metric: str = "strict",
    samples: int = 10_000,
    seed: int = 0,
    types: Collection[str] | None = None,
) -> Bootstrap:
    """Does system `a` differ from system `b` by more than the choice of documents?

    Documents (or sentences, given as one document each) are drawn with replacement, the same
    ones for both systems. The p value is the share of resamples whose difference lies as far
    from the observed one as that lies from zero, the observed one counted among them (Berg-
    Kirkpatrick et al. 2012, two-sided). The draws are `rng.integers(0, n, (samples, n))` of
    `numpy.random.default_rng(seed)`.

    metric: "strict", "relaxed" or "relaxed_one_to_one". Raises ConfigError for an unknown
    metric or samples < 1, DataError if documents do not agree or there are none.
    """
    if samples < 1:
        raise ConfigError(f"a bootstrap needs at least one sample, not {samples}")
    if not gold:
        raise DataError("a bootstrap needs at least one document, and none was given")
    counts = np.concatenate(  # (documents, 8): four counts of a, four of b
        [document_counts(gold, system, metric, types) for system in (a, b)], axis=1
    ).astype(np.float64)
    observed = _f1(counts.sum(axis=0))
    difference = float(observed[0] - observed[1])
    sums = np.concatenate([w @ counts for w in _weights(len(gold), samples, seed)])
    f1 = _f1(sums)  # (samples, 2)
    drawn = f1[:, 0] - f1[:, 1]
    low, high = np.quantile(drawn, (0.025, 0.975))
    # The tolerance makes a tie a tie whatever the last bit of the two divisions.
    extreme = int((np.abs(drawn - difference) >= abs(difference) - 1e-12).sum())
    return Bootstrap(
        f1_a=float(observed[0]),
        f1_b=float(observed[1]),
        difference=difference,
        low=float(low),
        high=float(high),
        p_value=(1 + extreme) / (1 + samples),
        samples=samples,
    )


def _weights(n: int, samples: int, seed: int) -> Iterator[Floats]:
    """How often each document is drawn: (some resamples, documents), all resamples in turn."""
    rng = np.random.default_rng(seed)
    rows = max(1, _CHUNK // n)
    for begin in range(0, samples, rows):
        size = min(rows, samples - begin)
        draws = rng.integers(0, n, (size, n))
        draws += np.arange(size)[:, None] * n  # each resample has its own range of bins
        yield np.bincount(draws.ravel(), minlength=size * n).reshape(size, n).astype(np.float64)


def _f1(counts: Floats) -> Floats:
    """Micro F1 from (..., 8) counts: returns (..., 2), 0 where undefined."""
    right, predicted, found, gold = np.moveaxis(counts.reshape(*counts.shape[:-1], 2, 4), -1, 0)
    precision = _ratio(right, predicted)
    recall = _ratio(found, gold)
    return _ratio(2 * precision * recall, precision + recall)


def _ratio(top: Floats, bottom: Floats) -> Floats:
    return np.divide(top, bottom, out=np.zeros_like(top), where=bottom > 0)
