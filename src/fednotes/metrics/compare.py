"""Comparing runs: mean and deviation over seeds, a paired bootstrap between two
systems, and what the sites' scores make together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fednotes.core.errors import ConfigError, DataError, needs
from fednotes.core.types import Document
from fednotes.metrics.classification import (
    ClassCounts,
    Floats,
    macro_auroc,
    macro_f1,
    ratio,
    weights,
)  # fmt: skip
from fednotes.metrics.spans import document_counts, micro_scores

Score = Callable[[Floats], Floats]
# of every comparison, unless a person asks for another number
BOOTSTRAP_SAMPLES = 10_000
FEWEST_SEEDS = 5  # with fewer no difference is claimed
ROUNDING = 1e-12  # a difference below this comes from rounding


def summarise(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation of every number of nested score dictionaries.

    Each number becomes {"mean": m, "std": s, "n": number of runs that have it}. The
    deviation is the sample's (ddof = 1) and None for a single run, which has none. What
    is not a number (names, None, booleans) is left out. Raises DataError if a key is a
    number in one run and a dictionary in another.
    """
    summary: dict[str, Any] = {}
    for key in dict.fromkeys(key for run in runs for key in run):
        values = [run[key] for run in runs if key in run]
        nested = [v for v in values if isinstance(v, Mapping)]
        kinds = (int, float, np.number)
        numbers = [
            float(v) for v in values if isinstance(v, kinds) and not isinstance(v, bool)
        ]
        if nested and numbers:
            raise DataError(
                f"score {key!r} is a number in one run and a dictionary in another"
            )
        if nested:
            summary[key] = summarise(nested)
        elif numbers:
            std = stdev(numbers) if len(numbers) > 1 else None
            summary[key] = {"mean": fmean(numbers), "std": std, "n": len(numbers)}
    return summary


@dataclass(frozen=True, slots=True)
class PairedTest:
    """The mean of n differences, its 95 % interval and the two-sided p value, by
    Student's t."""

    mean: float
    low: float
    high: float
    p_value: float
    n: int


def paired_t(differences: Sequence[float]) -> PairedTest:
    """Student's paired t test: is the mean difference over seeds other than zero?

    mean ± t(0.975, n − 1) · s / √n, s the sample's deviation. Differences without a
    spread have an interval of no width, and p = 0 unless they are zero. What `ROUNDING`
    can explain is no difference and no spread: scores that are added in another order
    differ by as much.
    Raises DataError for fewer than two, MissingExtra without scipy.
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

    found = stats.ttest_1samp(differences, 0.0)
    low, high = found.confidence_interval()
    return PairedTest(mean, float(low), float(high), float(found.pvalue), n)


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """The difference of a score of two systems on the same documents or patients, `a`
    minus `b`.

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
    systems: Sequence[Score], units: int, samples: int, seed: int, what: str = "patient"
) -> Bootstrap:
    """Do two systems differ by more than the choice of documents, or patients?

    These are drawn with replacement, the same ones for both systems. The p value is the
    two-sided bootstrap p: the share of resamples whose difference is at least as far
    from the observed one as that is from zero, the observed one counted among them
    (Berg-Kirkpatrick et al. 2012).

    systems: two; how often each unit is drawn, (draws, units) → the system's score,
    (draws,). what: what units are, for messages. Raises ConfigError for samples < 1,
    DataError for no units.
    """
    scores, drawn = _resampled(systems, units, samples, seed, what)
    return _bootstrap_of(scores, drawn)


def _resampled(
    systems: Sequence[Score], units: int, samples: int, seed: int, what: str
) -> tuple[tuple[float, float], Floats]:
    """Return both systems' scores, and the differences of all resamples, (samples,)."""
    if samples < 1:
        raise ConfigError(f"a bootstrap needs at least one sample, not {samples}")
    if not units:
        raise DataError(f"a bootstrap needs at least one {what}, and none was given")
    a, b = systems
    of_a, of_b = (float(score(np.ones((1, units)))[0]) for score in systems)
    drawn = np.concatenate(
        [a(each) - b(each) for each in weights(units, samples, seed)]
    )
    return (of_a, of_b), drawn


def _bootstrap_of(scores: tuple[float, float], drawn: Floats) -> Bootstrap:
    """Return the interval and the p value that resampled differences give."""
    of_a, of_b = scores
    difference, samples = of_a - of_b, len(drawn)
    low, high = np.quantile(drawn, (0.025, 0.975)).tolist()
    # The tolerance makes a tie a tie whatever the last bit of the divisions.
    extreme = int((np.abs(drawn - difference) >= abs(difference) - ROUNDING).sum())
    return Bootstrap(
        of_a, of_b, difference, low, high, (1 + extreme) / (1 + samples), samples
    )


def paired_bootstrap(
    gold: Sequence[Document],
    a: Sequence[Document],
    b: Sequence[Document],
    metric: str = "strict",
    samples: int = BOOTSTRAP_SAMPLES,
    seed: int = 0,
    types: Collection[str] | None = None,
) -> Bootstrap:
    """Does micro F1 of system `a` differ from that of `b`? Documents are drawn
    (`bootstrap`).

    metric: "strict", "relaxed" or "relaxed_one_to_one". Raises ConfigError for an
    unknown metric or samples < 1, DataError if documents do not agree or there are
    none.
    """
    counts = [document_counts(gold, said, metric, types) for said in (a, b)]
    return bootstrap(_f1_scores(counts), len(gold), samples, seed, "document")


def _f1_scores(counts: Sequence[NDArray[Any]]) -> list[Score]:
    """Return micro F1 of resampled documents, for each system's `document_counts`."""

    def f1(counts: Floats, drawn: Floats) -> Floats:
        right, predicted, found, annotated = (drawn @ counts).T
        precision, recall = ratio(right, predicted), ratio(found, annotated)
        return ratio(2 * precision * recall, precision + recall)

    return [partial(f1, each.astype(np.float64)) for each in counts]


def paired_sites(
    counts: Mapping[str, tuple[NDArray[Any], NDArray[Any]]],
    samples: int = BOOTSTRAP_SAMPLES,
    seed: int = 0,
) -> tuple[dict[str, Bootstrap], Bootstrap | None]:
    """Compare two models of each site on the site's test documents, and the means over
    the sites.

    Each site's result equals that of `paired_bootstrap`. For the means, every site's
    documents are drawn by themselves.

    Args:
        counts: Site to the `document_counts` of both models, (documents, 4) each.
        samples: Number of resamples.
        seed: Seed of the draws.

    Returns:
        The difference at each site that has a test document, first model minus second,
        and the difference of the means over all sites; None where no site has a test
        document.
    """
    found: dict[str, Bootstrap] = {}
    drawn_of: list[Floats] = []
    for place, (site, pair) in enumerate(counts.items()):
        if not len(pair[0]):
            # both models score 0 there, also in the means
            drawn_of.append(np.zeros(samples))
            continue
        scores, drawn = _resampled(
            _f1_scores(pair), len(pair[0]), samples, seed, "document"
        )
        found[site] = _bootstrap_of(scores, drawn)
        # Sites with equally many documents drew the same places: the order makes them
        # independent.
        drawn_of.append(np.random.default_rng((seed, place)).permutation(drawn))
    if not found:
        return {}, None
    first = sum(each.f1_a for each in found.values()) / len(counts)
    second = sum(each.f1_b for each in found.values()) / len(counts)
    return found, _bootstrap_of((first, second), np.mean(drawn_of, axis=0))


def paired_patients(
    labels: NDArray[Any],
    a: NDArray[Any],
    b: NDArray[Any],
    metric: str = "f1",
    classes: Sequence[Sequence[int]] | None = None,
    samples: int = BOOTSTRAP_SAMPLES,
    seed: int = 0,
) -> Bootstrap:
    """Does the macro F1 of predictions, or the macro AUROC of scores, differ? Patients
    are drawn.

    labels, a, b: (patients, outputs). metric: "f1" or "auroc": of that an output
    without present or without absent patients does not count, and one that a draw
    leaves without either not in it.
    Raises as `bootstrap`, DataError where shapes differ.
    """
    if not labels.shape == a.shape == b.shape:
        raise DataError(
            f"labels {labels.shape}, scores {a.shape} and {b.shape} must be alike"
        )
    score = (
        partial(macro_auroc, labels)
        if metric == "auroc"
        else partial(macro_f1, labels, classes)
    )
    return bootstrap(
        [partial(score, said) for said in (a, b)], len(labels), samples, seed
    )


# ---- sites' scores → those of a run --------------------------------------------------


MEASURES = {
    "strict": ("precision", "recall", "f1"),
    "relaxed": ("precision", "recall", "f1"),
    "relaxed_one_to_one": ("precision", "recall", "f1"),
    "masked": ("loss", "perplexity", "accuracy"),
    "next_sentence": ("accuracy",),
    "phenotypes": ("precision", "recall", "f1"),
    "present": ("precision", "recall", "f1"),
    "ranking": ("auroc", "auprc"),
    "calibration": ("brier",),
    "codes": ("loss", "auroc"),
}
_OF_A_DISEASE = {
    **{key: ("macro", key) for key in ("precision", "recall", "f1")},
    **{key: (key, "value") for key in ("auroc", "auprc")},
}


def mean_scores(scores: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The plain mean of each measure, over the sites that have it (those with held-out
    data).

    A number that exists at no site is None. "by_output": disease → its own scores
    likewise, if any site judges diseases.
    """
    means: dict[str, dict[str, Any]] = {
        kind: {key: _mean(judged, kind, key) for key in keys}
        for kind, keys in MEASURES.items()
        if (judged := [score for score in scores if kind in score])
    }
    tables = [score["by_output"] for score in scores if "by_output" in score]
    if diseases := dict.fromkeys(name for table in tables for name in table):
        means["by_output"] = {
            name: _disease([table[name] for table in tables if name in table])
            for name in diseases
        }
    return means


def _disease(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One disease's means over sites; its intervals where all sites have the same one."""
    means: dict[str, Any] = {
        key: _mean(found, *path) for key, path in _OF_A_DISEASE.items()
    }
    for key in ("auroc", "auprc"):
        bounds = {
            tuple((at.get(key) or {}).get(end) for end in ("low", "high"))
            for at in found
        }
        if len(bounds) == 1 and None not in (only := bounds.pop()):
            means[f"{key}_interval"] = list(only)
    return means | {"sites": len(found)}


def _mean(scores: Sequence[Mapping[str, Any]], kind: str, key: str) -> float | None:
    """The mean over the sites where this number exists."""
    values = [v for s in scores if (v := (s.get(kind) or {}).get(key)) is not None]
    return fmean(values) if values else None


def summed_scores(scores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Scores of all sites' test data together, from their counts; empty where one has
    none.

    Of diseases: sites that are judged on codes alone are left out, and a patient whom
    several sites judge counts at each.
    """
    if all("counts" in score for score in scores):
        return dict(micro_scores(scores))
    judged = [score for score in scores if score.get("by_output")]
    if not judged or not all("class_counts" in score for score in judged):
        return {}
    each = (ClassCounts.from_metrics(score["class_counts"]) for score in judged)
    found = sum(each, ClassCounts()).scores()
    return {
        "phenotypes": found["macro"],
        "present": found["present"]["macro"],
        "by_output": found["by_output"],
    }
