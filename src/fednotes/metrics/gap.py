"""The share of the gain from pooling all notes that a federation achieves.

    gap closed = (federated − alone) / (pooled − alone)

1 means as good as one model trained in one place on all notes; 0 means no better than
each site alone. The share is defined only if pooled − alone exceeds chance: for one
run, two standard errors for test data of that size; over seeds, an interval of a paired
t test above zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import hypot, isfinite, sqrt
from statistics import fmean
from typing import Any, NamedTuple, Protocol

from fednotes.core.parsing import as_mapping, find_number
from fednotes.metrics.paired_tests import run_paired_t_test

ALPHA = 0.05  # p value of a paired test below which a difference is claimed
WITHIN = "pooled - alone is within noise"
BELOW = "pooled is below alone"

SiteScores = Mapping[str, Mapping[str, Any]]  # the scores of a site, by condition


class Gap(NamedTuple):
    """The share of the gap that a federation closes.

    Attributes:
        closed: The share; None if undefined.
        why: The reason why it is undefined, for reports.
    """

    closed: float | None
    why: str = ""


class ScoreWithError(NamedTuple):
    """A score (larger is better) and its standard error."""

    score: float
    error: float


class Difference(Protocol):
    """A difference of two models on the same test documents, by paired bootstrap."""

    @property
    def difference(self) -> float:
        """The first model's score minus the second's."""

    @property
    def low(self) -> float:
        """Lower end of the 95 % interval."""

    @property
    def high(self) -> float:
        """Upper end of the 95 % interval."""

    @property
    def p_value(self) -> float:
        """The two-sided p value."""


class Verdict(NamedTuple):
    """The gain of a federation over another condition.

    Attributes:
        gain: The federated score minus that of the other condition.
        low: Lower end of the gain's 95 % interval.
        high: Upper end of the gain's 95 % interval.
        gap: The share of pooled − alone that the federation closes; None without
            pooled.
        p_value: The two-sided bootstrap p of a paired test. None if the interval is
            unpaired, because the two models' predictions on the same test documents
            were not available.
        against: The other condition.
    """

    gain: float
    low: float
    high: float
    gap: Gap | None
    p_value: float | None = None
    against: str = "alone"

    @property
    def paired(self) -> bool:
        """Whether both models were compared document by document."""
        return self.p_value is not None

    @property
    def use(self) -> str:
        """The model that the site should use."""
        sign = find_proven_sign(self.low, self.high, self.p_value)
        if sign == 0:
            return "no difference shown"
        if sign > 0:
            return "federated"
        return "its own" if self.against == "alone" else self.against


def find_proven_sign(low: float, high: float, p_value: float | None = None) -> int:
    """Return the sign of a significant difference; 0 if it is not significant.

    A difference is significant if its 95 % interval excludes zero and, in a paired
    test, p < 0.05.
    """
    if p_value is not None and p_value >= ALPHA:
        return 0
    if low > 0:
        return 1
    return -1 if high < 0 else 0


def compute_gap(alone: float, federated: float, pooled: float, noise: float) -> Gap:
    """Return the share of the gap that is closed.

    Args:
        alone: Score of the site alone; for all scores, larger is better.
        federated: Score of the federation.
        pooled: Score of one model trained on all notes.
        noise: The largest pooled − alone that chance can explain.
    """
    width = pooled - alone
    if abs(width) <= noise:
        return Gap(None, WITHIN)
    if width > 0:
        return Gap((federated - alone) / width)
    return Gap(None, BELOW)


def compute_gap_of_sites(sites: Iterable[SiteScores]) -> Gap | None:
    """Return the mean share of the gap that is closed, over sites with all scores.

    It is None if no site has all three scores.
    """
    means = _average_scores(sites, "alone", "federated", "pooled")
    if not means:
        return None
    alone, federated, pooled = means
    noise = 2 * hypot(alone.error, pooled.error)
    return compute_gap(alone.score, federated.score, pooled.score, noise)


def compute_gap_by_seed(
    alone: Sequence[float], federated: Sequence[float], pooled: Sequence[float]
) -> tuple[list[float], str]:
    """Return the share of the gap that is closed, for each seed.

    Each seed's gain is divided by the mean of pooled − alone, so that one seed with a
    small difference does not dominate the mean.

    Args:
        alone: Scores by seed, in the same order; larger is better.
        federated: As `alone`.
        pooled: As `alone`.

    Returns:
        The shares and ""; or [] and the reason why they are undefined.
    """
    if not all(map(isfinite, (*alone, *federated, *pooled))):
        return [], "a run has no score"
    differences = [p - a for a, p in zip(alone, pooled, strict=True)]
    if len(differences) < 2:
        return [], "one seed"
    test = run_paired_t_test(differences)
    if test.low <= 0:
        return [], BELOW if test.high < 0 else WITHIN
    shares = [(f - a) / test.mean for a, f in zip(alone, federated, strict=True)]
    return shares, ""


def judge_gain(
    sites: Sequence[SiteScores],
    paired: Difference | None = None,
    against: str = "alone",
) -> Verdict | None:
    """Return the gain of a federation over another condition.

    Args:
        sites: Scores of each site by condition. Means over the sites with both
            conditions are compared.
        paired: The paired test of the same difference. If None, the interval is
            unpaired and wider.
        against: The condition with which the federation is compared.

    Returns:
        The verdict; None if no site has both scores.
    """
    means = _average_scores(sites, against, "federated")
    if not means:
        return None
    gap = compute_gap_of_sites(sites) if against == "alone" else None
    if paired is not None:
        return Verdict(
            gain=paired.difference,
            low=paired.low,
            high=paired.high,
            gap=gap,
            p_value=paired.p_value,
            against=against,
        )
    other, federated = means
    gain = federated.score - other.score
    margin = 1.96 * hypot(other.error, federated.error)
    return Verdict(gain, gain - margin, gain + margin, gap, against=against)


def _average_scores(
    sites: Iterable[SiteScores], *conditions: str
) -> list[ScoreWithError]:
    """Return the mean over sites of each condition's score and error.

    Sites without all conditions are left out; it is [] if none has all. The sites'
    errors are averaged as if all sites had the same test data.
    """
    complete: list[list[ScoreWithError]] = []
    for site in sites:
        scores = [find_main_score(site.get(condition, {})) for condition in conditions]
        present = [score for score in scores if score is not None]
        if len(present) == len(conditions):
            complete.append(present)
    return [
        ScoreWithError(
            fmean(each.score for each in of_condition),
            fmean(each.error for each in of_condition),
        )
        for of_condition in zip(*complete, strict=True)
    ]


# ---- the score of a site, and its standard error -------------------------------------


def find_main_score(scores: Mapping[str, Any]) -> ScoreWithError | None:
    """Return the score for comparing a site's models; larger is better.

    It is the strict F1 of mentions, the macro F1 of diseases, or the negative loss of
    masked words.

    Args:
        scores: The scores of a site. Another site may have written them, so any value
            may be missing.

    Returns:
        The score, or None if there is none or its error cannot be computed.
    """
    strict_f1 = find_number(scores, "strict", "f1")
    if strict_f1 is not None:
        error = _estimate_f1_error_of_counts(as_mapping(scores.get("counts")), "strict")
        if error is not None:
            return ScoreWithError(strict_f1, error)
    macro_f1 = find_number(scores, "phenotypes", "f1")
    if macro_f1 is not None:
        diseases = as_mapping(scores.get("by_output")).values()
        errors = [_estimate_disease_error(as_mapping(disease)) for disease in diseases]
        return ScoreWithError(macro_f1, _estimate_error_of_mean(errors))
    loss = find_number(scores, "masked", "loss")
    tokens = find_number(scores, "masked", "tokens")
    if loss is not None and tokens:
        # The standard deviation of a token's loss is about its mean.
        return ScoreWithError(-loss, loss / sqrt(tokens))
    return None


def estimate_f1_error(right: float, predicted: float, gold: float) -> float:
    """Return the standard error of F1, by the delta method.

    F1 = 2 J / (1 + J) with J = right / union, the share of correct mentions among all
    of both sides, which is binomial. One success and one failure are added, so that a
    few mentions that are all correct do not have an error of 0 (Agresti and Coull).

    Args:
        right: Number of correct predictions.
        predicted: Number of predictions.
        gold: Number of gold mentions.
    """
    union = gold + predicted - right
    if union <= 0:
        return 0.0
    share = (right + 1) / (union + 2)
    return 2 / (1 + share) ** 2 * sqrt(share * (1 - share) / (union + 2))


def _estimate_error_of_mean(errors: Sequence[float]) -> float:
    """Return the standard error of the mean of independent scores."""
    return sqrt(sum(error * error for error in errors)) / max(1, len(errors))


def _estimate_disease_error(disease: Mapping[str, Any]) -> float:
    """Return the standard error of a disease's F1, the mean over its classes."""
    errors = []
    for scores in disease.values():
        table = as_mapping(scores)
        recall = find_number(table, "recall") or 0.0
        support = find_number(table, "support") or 0.0
        counts = {**table, "right": recall * support, "gold": table.get("support")}
        error = _estimate_f1_error_of_counts(counts, "right")
        if error is not None:
            errors.append(error)
    return _estimate_error_of_mean(errors)


def _estimate_f1_error_of_counts(
    counts: Mapping[str, Any], right_key: str
) -> float | None:
    """Return the standard error of F1 from counts; None if they are implausible."""
    right = find_number(counts, right_key)
    predicted = find_number(counts, "predicted")
    gold = find_number(counts, "gold")
    if right is None or predicted is None or gold is None:
        return None
    if right < 0 or right > min(predicted, gold):
        return None
    return estimate_f1_error(right, predicted, gold)
