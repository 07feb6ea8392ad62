"""How much of what a site would gain from everybody's notes a federation gives it.

    gap closed = (federated - alone) / (pooled - alone)

1 is as good as one model trained in one place on all notes, 0 no better than each site
alone. It is a number only where pooled - alone is more than chance: of one run, more
than two standard errors of test data of that size; over seeds, an interval of a paired
t test that is above zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import hypot, isfinite, sqrt
from statistics import fmean
from typing import Any, NamedTuple, Protocol

from fednotes.core.parsing import mapping, number
from fednotes.metrics.compare import paired_t

ALPHA = 0.05  # of a paired test, below which a difference is claimed
WITHIN = "pooled - alone is within noise"
BELOW = "pooled is below alone"


class Gap(NamedTuple):
    """closed: the share, None where there is none; why: what is said then, for people."""

    closed: float | None
    why: str = ""


def of_difference(alone: float, federated: float, pooled: float, noise: float) -> Gap:
    """noise: how much pooled - alone may be by chance; more is better in all three
    scores."""
    whole = pooled - alone
    if abs(whole) <= noise:
        return Gap(None, WITHIN)
    return Gap((federated - alone) / whole) if whole > 0 else Gap(None, BELOW)


Site = Mapping[str, Mapping[str, Any]]  # its scores by condition


def of_sites(sites: Iterable[Site]) -> Gap | None:
    """Of sites' scores; the means over the sites that have all three.

    None where none has.
    """
    found = _means(sites, "alone", "federated", "pooled")
    if not found:
        return None
    (alone, first), (federated, _), (pooled, last) = found
    return of_difference(alone, federated, pooled, 2 * hypot(first, last))


class Difference(Protocol):
    """A difference of two models on the same test documents, by a paired bootstrap."""

    @property
    def difference(self) -> float: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...
    @property
    def p_value(self) -> float: ...


class Verdict(NamedTuple):
    """What a federation gave: federated − another condition, with its 95 % interval.

    gap: the share of pooled − alone that it closes; None without pooled. p_value: the
    two-sided bootstrap p of a paired test; None where the interval is unpaired, because
    the two models' predictions on the same test documents were not at hand. against:
    the other condition.
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
        winner = claimed(self.low, self.high, self.p_value)
        if winner == 0:
            return "no difference shown"
        if winner > 0:
            return "federated"
        return "its own" if self.against == "alone" else self.against


def claimed(low: float, high: float, p_value: float | None = None) -> int:
    """Return the sign of a difference that is shown, 0 where none is.

    A difference is shown where its 95 % interval excludes zero and, of a paired test, p
    < 0.05 too.
    """
    if p_value is not None and p_value >= ALPHA:
        return 0
    if low > 0:
        return 1
    return -1 if high < 0 else 0


def verdict(
    sites: Sequence[Site], paired: Difference | None = None, against: str = "alone"
) -> Verdict | None:
    """Return what a federation gave over another condition; None where no site has both
    scores.

    Args:
        sites: Scores of each site by condition; the means over the sites that have both
            count.
        paired: The paired test of the same difference, if there is one. Without it the
            interval is an unpaired one: wider than where both models are judged
            document by document.
        against: The condition that the federation is compared with.
    """
    found = _means(sites, against, "federated")
    if not found:
        return None
    gap = of_sites(sites) if against == "alone" else None
    if paired is not None:
        test = (paired.difference, paired.low, paired.high)
        return Verdict(*test, gap, paired.p_value, against)
    (other_score, other_error), (federated, error) = found
    gain, by = federated - other_score, 1.96 * hypot(other_error, error)
    return Verdict(gain, gain - by, gain + by, gap, against=against)


def _means(sites: Iterable[Site], *conditions: str) -> list[tuple[float, float]]:
    """Of each condition score and error, over the sites that have all; none where none
    has. Errors of the sites' test data add up as if they were the same data."""
    each = [[judged(of.get(c, {})) for c in conditions] for of in sites]
    whole = [
        [found for found in of if found is not None] for of in each if None not in of
    ]
    return [
        (fmean(score for score, _ in of), fmean(error for _, error in of))
        for of in zip(*whole, strict=True)
    ]


def over_seeds(
    alone: Sequence[float], federated: Sequence[float], pooled: Sequence[float]
) -> tuple[list[float], str]:
    """The share of each seed, of the same seeds' scores (more is better); or none, and
    why.

    Every seed's own difference is divided by the mean of pooled - alone, so that one
    seed with a small one does not make the mean.
    """
    if not all(map(isfinite, (*alone, *federated, *pooled))):
        return [], "a run has no score"
    differences = [p - a for a, p in zip(alone, pooled, strict=True)]
    if len(differences) < 2:
        return [], "one seed"
    test = paired_t(differences)
    if test.low <= 0:
        return [], BELOW if test.high < 0 else WITHIN
    return [(f - a) / test.mean for a, f in zip(alone, federated, strict=True)], ""


def judged(scores: Mapping[str, Any]) -> tuple[float, float] | None:
    """The score that a site's models are compared by, more being better, and its
    standard error.

    Strict F1 of mentions; macro F1 of diseases; minus the loss of masked words. None
    without any, or where what the error follows from is missing: another site may have
    written the scores.
    """
    f1, tokens = number(scores, "strict", "f1"), number(scores, "masked", "tokens")
    if (
        f1 is not None
        and (error := _error(mapping(scores.get("counts")), "strict")) is not None
    ):
        return f1, error
    if (f1 := number(scores, "phenotypes", "f1")) is not None:
        found = [
            _disease_error(mapping(of))
            for of in mapping(scores.get("by_output")).values()
        ]
        return f1, sqrt(sum(e * e for e in found)) / max(1, len(found))
    if (loss := number(scores, "masked", "loss")) is not None and tokens:
        # a token's loss deviates about as much as its mean
        return -loss, loss / sqrt(tokens)
    return None


def f1_error(right: float, predicted: float, gold: float) -> float:
    """The standard error of F1, by the delta method: F1 = 2 J / (1 + J) of J = right /
    union, the share of all that either side names, which is binomial; with one more on
    both sides of what is right and what is not, so that a few mentions all right are
    not certain (Agresti and Coull)."""
    union = gold + predicted - right
    if union <= 0:
        return 0.0
    share = (right + 1) / (union + 2)
    return 2 / (1 + share) ** 2 * sqrt(share * (1 - share) / (union + 2))


def _disease_error(of: Mapping[str, Any]) -> float:
    """Of a disease's F1, the mean over its classes."""
    tables = [mapping(each) for each in of.values()]
    rights = [
        (number(t, "recall") or 0.0) * (number(t, "support") or 0.0) for t in tables
    ]
    counted = [
        {**table, "right": right, "gold": table.get("support")}
        for table, right in zip(tables, rights, strict=True)
    ]
    errors = [
        error for table in counted if (error := _error(table, "right")) is not None
    ]
    return sqrt(sum(e * e for e in errors)) / max(1, len(errors))


def _error(counts: Mapping[str, Any], right: str) -> float | None:
    """Of counts that may lack some, or be none."""
    found = [number(counts, name) for name in (right, "predicted", "gold")]
    numbers = [value for value in found if value is not None and value >= 0]
    known = len(numbers) == 3 and numbers[0] <= min(numbers[1:])
    return f1_error(*numbers) if known else None
