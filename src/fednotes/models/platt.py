"""Scores → probabilities by Platt scaling, fitted over sites from sums alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def platt_sums(platt: np.ndarray, scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """(machines, 10) what `fit_platt` needs of one site's held-out patients; it adds over sites.

    platt: (machines, 2) a and b. scores, targets: (patients, machines), as the classifiers'
    methods of these names give them. With z = a · score + b and p = sigmoid(z), sums over the
    labelled patients of log(1 + exp z), p · score, p, the three second derivatives by a and b,
    the numbers of positive and negative patients and the sums of their scores.
    """
    z = platt[:, 0] * scores + platt[:, 1]
    small = np.exp(-np.abs(z))
    p = np.where(z >= 0, 1, small) / (1 + small)
    curve, positive, negative = p * (1 - p), targets > 0, targets < 0
    moments = (np.logaddexp(0, z), p * scores, p, curve * scores**2, curve * scores, curve)
    parts = [moment * (targets != 0) for moment in moments]
    parts += [positive, negative, positive * scores, negative * scores]
    return np.stack([np.sum(each, axis=0, dtype=np.float64) for each in parts], axis=1)


def fit_platt(
    sums: Callable[[np.ndarray], np.ndarray], machines: int, rounds: int = 50
) -> np.ndarray:
    """(machines, 2) Platt scaling (Platt 1999) by Newton's method, from sums over sites alone.

    sums: (machines, 2) → the sum over sites of `platt_sums` there. It is called once a round,
    at most `rounds` times. A step after which a machine's cross-entropy is larger is halved
    (Lin, Lin and Weng 2007). A machine without held-out patients keeps (1, 0).
    """
    kept = np.zeros((machines, 2))
    at = _derivatives(kept, sums(kept))
    step = _newton(at)
    for _ in range(rounds - 1):
        if not (np.abs(step) > 1e-10).any():
            break
        there = _derivatives(kept + step, sums(kept + step))
        better = (there[:, 0] <= at[:, 0])[:, None]
        kept = np.where(better, kept + step, kept)
        at = np.where(better, there, at)
        step = np.where(better, _newton(at), step / 2)
    return np.where(at[:, 6:].any(axis=1, keepdims=True), kept, (1.0, 0.0))


def _derivatives(platt: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """(machines, 8) cross-entropy, its gradient (2) and second derivatives (3), class sizes (2).

    The targets are Platt's (n₊ + 1) / (n₊ + 2) and 1 / (n₋ + 2), which keep the fit finite
    where a score separates the classes.
    """
    positive, negative, positive_scores, negative_scores = sums[:, 6:].T
    high, low = (positive + 1) / (positive + 2), 1 / (negative + 2)
    a = high * positive_scores + low * negative_scores  # Σ target · score
    b = high * positive + low * negative
    found = sums[:, :8].copy()
    found[:, 0] -= platt[:, 0] * a + platt[:, 1] * b
    found[:, 1:3] -= np.stack([a, b], axis=1)
    return found


def _newton(derivatives: np.ndarray) -> np.ndarray:
    """(machines, 2) the step to where the second-order expansion is least."""
    _, ga, gb, aa, ab, bb, *_ = derivatives.T
    aa, bb = aa + 1e-12, bb + 1e-12
    determinant = np.maximum(aa * bb - ab * ab, 1e-24)
    return np.stack([ab * gb - bb * ga, ab * ga - aa * gb], axis=1) / determinant[:, None]
