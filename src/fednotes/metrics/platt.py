"""Platt scaling of scores to calibrated probabilities, fitted to sums over sites.

J. Platt 1999, "Probabilistic outputs for support vector classifiers"; the algorithm of
Lin, Lin and Weng 2007.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

# Minimum increase in log-odds for an increase of the score by one standard deviation.
LEAST_SLOPE = 0.1
PLATT_SUMS = 10  # sums per classifier in `compute_platt_sums`
_ROUNDS = 50  # maximum number of sums in one pass of `fit_platt`
MOST_PLATT_SUMS = 2 * _ROUNDS  # maximum number of sums in the two passes together
_STEP_TOLERANCE = 1e-10
_Sums = Callable[[np.ndarray], np.ndarray]


def compute_platt_sums(
    platt: np.ndarray, scores: np.ndarray, targets: np.ndarray
) -> np.ndarray:
    """Return the sums over one site's held-out patients for `fit_platt`.

    With z = a · score + b and p = sigmoid(z), these are additive sums over the labelled
    patients: of log(1 + exp z), p · score, p, and the three second derivatives with
    respect to a and b; the numbers of positive and negative patients, and the sums of
    their scores.

    Args:
        platt: (classifiers, 2) a and b.
        scores: (patients, classifiers) their scores.
        targets: (patients, classifiers) above 0 positive, below 0 negative, 0
            unlabelled.

    Returns:
        (classifiers, 10) sums.
    """
    z = platt[:, 0] * scores + platt[:, 1]
    small = np.exp(-np.abs(z))  # does not overflow
    p = np.where(z >= 0, 1, small) / (1 + small)
    curvature = p * (1 - p)
    is_positive = targets > 0
    is_negative = targets < 0
    moments = (
        np.logaddexp(0, z),
        p * scores,
        p,
        curvature * scores**2,
        curvature * scores,
        curvature,
    )
    terms = [moment * (targets != 0) for moment in moments]
    terms += [is_positive, is_negative, is_positive * scores, is_negative * scores]
    return np.stack([np.sum(term, axis=0, dtype=np.float64) for term in terms], axis=1)


def fit_platt(sums: _Sums, classifiers: int, rounds: int = _ROUNDS) -> np.ndarray:
    """Fit Platt scaling by Newton's method, using only sums over sites.

    A step that increases a classifier's cross-entropy is halved. With few held-out
    patients, the fitted slope may be negative, so that the probability falls with the
    score. Therefore the slope is at least `LEAST_SLOPE` divided by the scores' standard
    deviation; if it would be less, only the intercept is fitted. A classifier without
    held-out patients keeps (1, 0).

    Args:
        sums: Returns the sum over sites of `compute_platt_sums` for (classifiers, 2)
            values. It is called once per round, at most `rounds` times in each of two
            passes.
        classifiers: Number of classifiers.
        rounds: Maximum number of steps in a pass.

    Returns:
        (classifiers, 2) slope and intercept.
    """
    zero = np.zeros((classifiers, 2))
    first = sums(zero)  # here p is 1/2 and its derivative 1/4 everywhere
    fitted = _descend(sums, zero, first, rounds)

    number = np.maximum(4 * first[:, 5], 1)
    variance = 4 * first[:, 3] / number - (2 * first[:, 1] / number) ** 2
    deviation = np.sqrt(np.maximum(variance, 0))
    has_spread = deviation > 0
    least = np.where(has_spread, LEAST_SLOPE / np.where(has_spread, deviation, 1), 1.0)
    is_weak = (fitted[:, 0] < least)[:, None]
    if is_weak.any():
        fixed_slope = np.stack([least, 0 * least], axis=1)
        start = np.where(is_weak, fixed_slope, fitted)
        shifted = _descend(sums, start, sums(start), rounds, moving="intercept")
        fitted = np.where(is_weak, shifted, fitted)
    has_patients = first[:, 6:].any(axis=1, keepdims=True)
    return np.where(has_patients, fitted, (1.0, 0.0))


_Moving = Literal["both", "intercept"]


def _descend(
    sums: _Sums,
    start: np.ndarray,
    start_sums: np.ndarray,
    rounds: int,
    moving: _Moving = "both",
) -> np.ndarray:
    """Return the values that minimise the cross-entropy, (classifiers, 2).

    Args:
        sums: As in `fit_platt`.
        start: (classifiers, 2) initial values.
        start_sums: The sums for the initial values.
        rounds: Maximum number of steps.
        moving: Whether both values change, or only the intercept.
    """
    best = start
    derivatives = _compute_derivatives(start, start_sums)
    step = _compute_newton_step(derivatives, moving)
    for _ in range(rounds - 1):
        if not (np.abs(step) > _STEP_TOLERANCE).any():
            break
        candidate = best + step
        candidate_derivatives = _compute_derivatives(candidate, sums(candidate))
        is_better = (candidate_derivatives[:, 0] <= derivatives[:, 0])[:, None]
        best = np.where(is_better, candidate, best)
        derivatives = np.where(is_better, candidate_derivatives, derivatives)
        step = np.where(is_better, _compute_newton_step(derivatives, moving), step / 2)
    return best


def _compute_derivatives(platt: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """Return cross-entropy, gradient (2) and second derivatives (3), (classifiers, 6).

    The targets are Platt's (n₊ + 1) / (n₊ + 2) and 1 / (n₋ + 2), which keep the fit
    finite if a score separates the classes.
    """
    positive, negative, positive_scores, negative_scores = sums[:, 6:].T
    positive_target = (positive + 1) / (positive + 2)
    negative_target = 1 / (negative + 2)
    # Σ target · score and Σ target
    target_scores = (
        positive_target * positive_scores + negative_target * negative_scores
    )
    target_sum = positive_target * positive + negative_target * negative
    derivatives = sums[:, :6].copy()
    derivatives[:, 0] -= platt[:, 0] * target_scores + platt[:, 1] * target_sum
    derivatives[:, 1:3] -= np.stack([target_scores, target_sum], axis=1)
    return derivatives


def _compute_newton_step(derivatives: np.ndarray, moving: _Moving) -> np.ndarray:
    """Return the step to the minimum of the quadratic expansion, (classifiers, 2).

    Column 0 of `derivatives`, the cross-entropy itself, is not used.
    """
    _, gradient_a, gradient_b, aa, ab, bb = derivatives.T
    aa = aa + 1e-12
    bb = bb + 1e-12
    if moving == "intercept":
        slope_step = 0 * gradient_b  # the slope stays as it is
        intercept_step = -gradient_b / bb
        return np.stack([slope_step, intercept_step], axis=1)
    determinant = np.maximum(aa * bb - ab * ab, 1e-24)
    numerators = [
        ab * gradient_b - bb * gradient_a,
        ab * gradient_a - aa * gradient_b,
    ]
    return np.stack(numerators, axis=1) / determinant[:, None]
