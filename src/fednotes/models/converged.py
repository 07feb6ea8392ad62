"""Linear classifiers fitted to their end: what the steps of `LinearSVMs.epoch` are judged by.

Stochastic gradient descent without a penalty stops where its epochs do, so that a comparison of
features by it is also one of how fast each of them is learnt. scikit-learn's
`LogisticRegression` has one solution, whatever the order of patients:

    min_w  ½ ‖w‖² + C Σ_i s_i log(1 + exp(−y_i (w·x_i + b)))

with s_i the weight of a patient's class. At one place it is a reference that is not federated;
in a federation each site's own solutions are averaged, and further cycles change nothing.
"""

from __future__ import annotations

import numpy as np

from fednotes.core.errors import MissingExtra
from fednotes.models.svm import Features, LinearSVMs

CHOICES = tuple(10.0**power for power in range(-2, 5))  # of C, where held-out patients choose it
_STEPS = 10_000  # of the solver, at most
_TOLERANCE = 1e-6  # of the gradient's largest part


def fit(
    machines: LinearSVMs,
    features: Features,
    labels: np.ndarray,
    weights: np.ndarray | None,
    C: float,
) -> tuple[float, int]:
    """Put every machine at its solution; one without patients of both kinds stays at zero.

    labels: (patients, diseases). weights: (machines, 2) of negative and positive patients, see
    `LinearSVMs.balanced`. Returns the sum of weighted losses and over how many pairs of patient
    and machine it is. Raises MissingExtra without scikit-learn.
    """
    try:
        from scipy.sparse import csr_matrix
        from sklearn.linear_model import LogisticRegression
    except ImportError:
        raise MissingExtra("scikit-learn", "phenotype") from None
    shape = (len(features), features.width)
    x = csr_matrix((features.values, features.columns, features.offsets), shape=shape)
    targets = machines.targets(labels)
    machines.weight[:], machines.intercept[:] = 0.0, 0.0
    for k in range(len(machines.machines)):
        rows = np.flatnonzero(targets[:, k])
        y = targets[rows, k]
        if len(np.unique(y)) < 2:
            continue
        solver = LogisticRegression(C=C, tol=_TOLERANCE, max_iter=_STEPS)
        found = solver.fit(x[rows], y, sample_weight=_weights_of(y, weights, k))
        machines.weight[:, k], machines.intercept[k] = found.coef_[0], found.intercept_[0]
    return loss_of(machines, features, labels, weights)


def loss_of(
    machines: LinearSVMs, features: Features, labels: np.ndarray, weights: np.ndarray | None
) -> tuple[float, int]:
    """The sum of weighted logistic losses, and over how many pairs of patient and machine."""
    targets, scores = machines.targets(labels), machines.scores(features)
    total = 0.0
    for k in range(len(machines.machines)):
        rows = np.flatnonzero(targets[:, k])
        y = targets[rows, k]
        losses = np.logaddexp(0.0, -y * scores[rows, k])
        total += float((_weights_of(y, weights, k) * losses).sum())
    return total, int(np.count_nonzero(targets))


def fit_best(
    machines: LinearSVMs,
    train: tuple[Features, np.ndarray],
    held_out: tuple[Features, np.ndarray],
    weights: np.ndarray | None,
) -> tuple[float, int]:
    """As `fit`, with the C of `CHOICES` whose solutions have the least loss on held-out patients.

    The smaller one of two that are alike, and where nobody is held out 1. train, held_out:
    features and labels.
    """
    best = 1.0
    if len(held_out[0]):
        losses = []
        for C in CHOICES:
            fit(machines, *train, weights, C)
            losses.append(loss_of(machines, *held_out, weights)[0])
        best = CHOICES[int(np.argmin(losses))]
    return fit(machines, *train, weights, best)


def _weights_of(targets: np.ndarray, weights: np.ndarray | None, machine: int) -> np.ndarray:
    """(patients,) the weight of each one's class for this machine."""
    negative, positive = (1.0, 1.0) if weights is None else weights[machine]
    return np.where(targets > 0, positive, negative)
