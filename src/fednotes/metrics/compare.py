"""Comparing runs: mean and deviation over seeds, and a paired bootstrap between two systems."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fednotes.core.errors import ConfigError, DataError, MissingExtra
from fednotes.core.types import Document
from fednotes.metrics.spans import document_counts

Floats = NDArray[np.float64]

_CHUNK = 4_000_000  # drawn indices held at once: 32 MB
FEWEST_SEEDS = 5  # with fewer no difference is claimed


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
        kinds = (int, float, np.number)
        numbers = [float(v) for v in values if isinstance(v, kinds) and not isinstance(v, bool)]
        if nested and numbers:
            raise DataError(f"score {key!r} is a number in one run and a dictionary in another")
        if nested:
            summary[key] = summarise(nested)
        elif numbers:
            summary[key] = _spread(numbers)
    return summary


def _spread(numbers: Sequence[float]) -> dict[str, float | int | None]:
    n = len(numbers)
    mean = math.fsum(numbers) / n
    variance = math.fsum((x - mean) ** 2 for x in numbers) / (n - 1) if n > 1 else None
    return {"mean": mean, "std": None if variance is None else math.sqrt(variance), "n": n}


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
    """The difference of a score of two systems on the same documents or patients, `a` minus `b`.

    low, high: 95 % percentile interval. p_value: two-sided, see `bootstrap`.
    """

    f1_a: float
    f1_b: float
    difference: float
    low: float
    high: float
    p_value: float
    samples: int


def bootstrap(
    score: Callable[[Floats], Floats], units: int, samples: int, seed: int, what: str
) -> Bootstrap:
    """Do two systems differ by more than the choice of documents, or patients?

    These are drawn with replacement, the same ones for both systems. The p value is the share of
    resamples whose difference lies as far from the observed one as that lies from zero, the
    observed one counted among them (Berg-Kirkpatrick et al. 2012, two-sided).

    score: how often each is drawn, (draws, units) → both systems' scores, (draws, 2). what: what
    they are, for messages. Raises ConfigError for samples < 1, DataError for no units.
    """
    if samples < 1:
        raise ConfigError(f"a bootstrap needs at least one sample, not {samples}")
    if not units:
        raise DataError(f"a bootstrap needs at least one {what}, and none was given")
    a, b = score(np.ones((1, units)))[0].tolist()
    drawn = np.concatenate([score(each) for each in weights(units, samples, seed)])
    differences = drawn[:, 0] - drawn[:, 1]
    low, high = np.quantile(differences, (0.025, 0.975)).tolist()
    # The tolerance makes a tie a tie whatever the last bit of the divisions.
    extreme = int((np.abs(differences - (a - b)) >= abs(a - b) - 1e-12).sum())
    return Bootstrap(a, b, a - b, low, high, (1 + extreme) / (1 + samples), samples)


def weights(units: int, samples: int, seed: int) -> Iterator[Floats]:
    """How often each unit is drawn: (some resamples, units), all resamples in turn.

    The draws are `rng.integers(0, n, (samples, n))` of `numpy.random.default_rng(seed)`.
    """
    rng = np.random.default_rng(seed)
    rows = max(1, _CHUNK // units)
    for begin in range(0, samples, rows):
        size = min(rows, samples - begin)
        draws = rng.integers(0, units, (size, units))
        draws += np.arange(size)[:, None] * units  # each resample has its own range of bins
        counts = np.bincount(draws.ravel(), minlength=size * units)
        yield counts.reshape(size, units).astype(np.float64)


def paired_bootstrap(
    gold: Sequence[Document],
    a: Sequence[Document],
    b: Sequence[Document],
    metric: str = "strict",
    samples: int = 10_000,
    seed: int = 0,
    types: Collection[str] | None = None,
) -> Bootstrap:
    """Does micro F1 of system `a` differ from that of `b`? Documents are drawn (`bootstrap`).

    metric: "strict", "relaxed" or "relaxed_one_to_one". Raises ConfigError for an unknown
    metric or samples < 1, DataError if documents do not agree or there are none.
    """
    counts = np.concatenate(  # (documents, 8): four counts of a, four of b
        [document_counts(gold, system, metric, types) for system in (a, b)], axis=1
    ).astype(np.float64)

    def f1(drawn: Floats) -> Floats:
        sums = (drawn @ counts).reshape(len(drawn), 2, 4)
        right, predicted, found, annotated = np.moveaxis(sums, -1, 0)
        precision, recall = ratio(right, predicted), ratio(found, annotated)
        return ratio(2 * precision * recall, precision + recall)

    return bootstrap(f1, len(gold), samples, seed, "document")


def ratio(top: Any, bottom: Any) -> Floats:
    """top / bottom, 0 where the bottom is."""
    top, bottom = np.asarray(top, np.float64), np.asarray(bottom, np.float64)
    return np.divide(top, bottom, out=np.zeros(np.broadcast(top, bottom).shape), where=bottom > 0)
