"""Platt scaling (Platt 1999): scores → calibrated probabilities, fitted to sums over
sites."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

LEAST_SLOPE = (
    0.1  # of a calibrated probability's log-odds, for a standard deviation of the score
)
PLATT_SUMS = 10  # numbers of each classifier in `platt_sums`
_ROUNDS = 50  # most sums of one pass of `fit_platt`
MOST_PLATT_SUMS = 2 * _ROUNDS  # of its two passes
_Sums = Callable[[np.ndarray], np.ndarray]


def platt_sums(
    platt: np.ndarray, scores: np.ndarray, targets: np.ndarray
) -> np.ndarray:
    """(machines, 10) what `fit_platt` needs of one site's held-out patients; it adds
    over sites.

    platt: (machines, 2) a and b. scores, targets: (patients, machines), as the
    classifiers' methods of these names give them. With z = a · score + b and p =
    sigmoid(z), sums over the labelled patients of log(1 + exp z), p · score, p, the
    three second derivatives by a and b, the numbers of positive and negative patients
    and the sums of their scores.
    """
    z = platt[:, 0] * scores + platt[:, 1]
    small = np.exp(-np.abs(z))
    p = np.where(z >= 0, 1, small) / (1 + small)
    curve, positive, negative = p * (1 - p), targets > 0, targets < 0
    moments = (
        np.logaddexp(0, z),
        p * scores,
        p,
        curve * scores**2,
        curve * scores,
        curve,
    )
    parts = [moment * (targets != 0) for moment in moments]
    parts += [positive, negative, positive * scores, negative * scores]
    return np.stack([np.sum(each, axis=0, dtype=np.float64) for each in parts], axis=1)


def fit_platt(sums: _Sums, machines: int, rounds: int = _ROUNDS) -> np.ndarray:
    """(machines, 2) Platt scaling (Platt 1999) by Newton's method, from sums over sites
    alone.

    sums: (machines, 2) → the sum over sites of `platt_sums` there. It is called once a
    round, at most `rounds` times in either of two passes. A step after which a
    machine's cross-entropy is larger is halved (Lin, Lin and Weng 2007).

    Few held-out patients may give a slope that is negative, and a probability that
    falls with the score. No slope is less than `LEAST_SLOPE` over the scores' standard
    deviation: then the intercept alone is fitted to it. A machine without held-out
    patients keeps (1, 0).
    """
    zero = np.zeros((machines, 2))
    first = sums(zero)  # p is 1/2 and its slope 1/4 everywhere
    kept = _descend(sums, zero, first, rounds)
    number = np.maximum(4 * first[:, 5], 1)
    variance = 4 * first[:, 3] / number - (2 * first[:, 1] / number) ** 2
    deviation = np.sqrt(np.maximum(variance, 0))
    least = np.where(
        deviation > 0, LEAST_SLOPE / np.where(deviation > 0, deviation, 1), 1.0
    )
    weak = (kept[:, 0] < least)[:, None]
    if weak.any():
        start = np.where(weak, np.stack([least, 0 * least], axis=1), kept)
        shifted = _descend(sums, start, sums(start), rounds, slope=False)
        kept = np.where(weak, shifted, kept)
    return np.where(first[:, 6:].any(axis=1, keepdims=True), kept, (1.0, 0.0))


def _descend(
    sums: _Sums, start: np.ndarray, there: np.ndarray, rounds: int, slope: bool = True
) -> np.ndarray:
    """(machines, 2) where the cross-entropy is least, from `start`, whose sums are
    `there`.

    slope: whether a moves too.
    """
    kept, at = start, _derivatives(start, there)
    step = _newton(at, slope)
    for _ in range(rounds - 1):
        if not (np.abs(step) > 1e-10).any():
            break
        found = _derivatives(kept + step, sums(kept + step))
        better = (found[:, 0] <= at[:, 0])[:, None]
        kept = np.where(better, kept + step, kept)
        at = np.where(better, found, at)
        step = np.where(better, _newton(at, slope), step / 2)
    return kept


def _derivatives(platt: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """(machines, 6) cross-entropy, its gradient (2) and second derivatives (3).

    The targets are Platt's (n₊ + 1) / (n₊ + 2) and 1 / (n₋ + 2), which keep the fit
    finite where a score separates the classes.
    """
    positive, negative, positive_scores, negative_scores = sums[:, 6:].T
    high, low = (positive + 1) / (positive + 2), 1 / (negative + 2)
    a = high * positive_scores + low * negative_scores  # Σ target · score
    b = high * positive + low * negative
    found = sums[:, :6].copy()
    found[:, 0] -= platt[:, 0] * a + platt[:, 1] * b
    found[:, 1:3] -= np.stack([a, b], axis=1)
    return found


def _newton(derivatives: np.ndarray, slope: bool) -> np.ndarray:
    """(machines, 2) the step to where the second-order expansion is least."""
    _, ga, gb, aa, ab, bb = derivatives.T
    aa, bb = aa + 1e-12, bb + 1e-12
    if not slope:
        return np.stack([0 * gb, -gb / bb], axis=1)
    determinant = np.maximum(aa * bb - ab * ab, 1e-24)
    return (
        np.stack([ab * gb - bb * ga, ab * ga - aa * gb], axis=1) / determinant[:, None]
    )
