"""Stage 2: one linear classifier per disease, all of them one matrix; TF-IDF;
calibration.

Liu, Dligach and Miller 2019, section 2.6: a linear SVM (hinge loss) per phenotype,
trained by stochastic gradient descent without regularisation on stage 1's
representations, or on "TF-IDF weighted sparse bag-of-CUIs vectors".

A disease whose classes are absent and present has one machine, the sign of its score
decides; one with questionable as well has three, one against the rest. An epoch takes
the patients one by one; each patient's step is taken by all machines at once, because a
patient's feature meets one contiguous row of (features, machines). Every machine does
what scikit-learn's `SGDClassifier(penalty=None, shuffle=False)` would do alone on the
patients that are labelled for its disease: the same order, the same steps, the same
coefficients, four to six times as fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt
from pydantic import FiniteFloat
from torch import Tensor

from fednotes.apps.phenotyping.cohort import (
    ABSENT,
    PRESENT,
    QUESTIONABLE,
    UNLABELLED,
    Bags,
    offsets_of,
)
from fednotes.core.errors import ConfigError, DataError, needs
from fednotes.core.kernels import kernel
from fednotes.core.settings import checked
from fednotes.core.tensors import require_like

# columns of scores, in the order of their labels
CLASSES = (ABSENT, PRESENT, QUESTIONABLE)
# scikit-learn's smaller step of the intercept with sparse features
SPARSE_INTERCEPT = 0.01


@checked(frozen=True)
class SvmConfig:
    """The classifiers; names and defaults are those of scikit-learn's SGDClassifier.

    Attributes:
        loss: "hinge" is the paper's SVM; "log" is logistic regression ("log_loss" in
            scikit-learn).
        learning_rate: Step t of a machine is eta0 ("constant"), eta0 / t^power_t
            ("invscaling"), or 1 / (alpha (t0 + t - 1)) with the t0 of Bottou
            ("optimal"). t counts the machine's own labelled patients and continues from
            epoch to epoch. The paper names none.
        eta0: See `learning_rate`.
        power_t: See `learning_rate`.
        alpha: Weight of the penalty.
        class_weights: "balanced" weighs a class of a disease by n / (classes · its n).
        solver: "sgd" takes the steps of the epochs, as the paper does; "converged"
            trains logistic regression with a penalty to convergence (`fit`).
        C: Weight of the patients against the penalty in solver = "converged"; 0 lets
            held-out patients choose.
    """

    loss: Literal["hinge", "log"] = "hinge"
    learning_rate: Literal["constant", "optimal", "invscaling"] = "optimal"
    eta0: Annotated[FiniteFloat, Gt(0)] = 0.01
    power_t: Annotated[FiniteFloat, Ge(0)] = 0.5
    alpha: Annotated[FiniteFloat, Gt(0)] = 1e-4
    class_weights: Literal["none", "balanced"] = "none"
    solver: Literal["sgd", "converged"] = "sgd"
    C: Annotated[FiniteFloat, Ge(0)] = 1.0

    def __post_init__(self) -> None:
        if self.solver == "converged" and self.loss != "log":
            raise ConfigError(
                'solver = "converged" is logistic regression: set loss = "log" beside it'
            )


# ---- features ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Features:
    """Patients' features without the zeros, row by row (CSR).

    values: (entries,) float64. columns: (entries,) int64. offsets: (patients + 1,)
        int64.
    width: the number of features. sparse: how they were given; it sets the intercept's
        step.
    """

    values: np.ndarray
    columns: np.ndarray
    offsets: np.ndarray
    width: int
    sparse: bool = True

    @classmethod
    def of(cls, dense: np.ndarray) -> Features:
        """From (patients, features); about half of a ReLU layer's values are zero.

        Raises DataError for a value that is not finite.
        """
        matrix = np.ascontiguousarray(dense, np.float64)
        if matrix.ndim != 2 or not np.isfinite(matrix).all():
            raise DataError(
                "features must be a matrix of finite numbers, (patients, features)"
            )
        row, column = map(np.ascontiguousarray, np.nonzero(matrix))
        offsets = offsets_of(np.bincount(row, minlength=len(matrix)))
        return cls(matrix[row, column], column, offsets, matrix.shape[1], sparse=False)

    def __len__(self) -> int:
        """The number of patients."""
        return len(self.offsets) - 1


def document_frequencies(bags: Bags) -> np.ndarray:
    """(vocabulary,) int64: at how many patients each concept occurs.

    It adds over sites.
    """
    _, column, _ = bags.counts()
    return np.bincount(column, minlength=bags.vocabulary).astype(np.int64)


def inverse_document_frequencies(frequencies: np.ndarray, patients: int) -> np.ndarray:
    """(vocabulary,) float64 ln((1 + patients) / (1 + df)) + 1, as scikit-learn's, from
    the frequencies of that many patients in all: sums over sites, so none shows its
    own."""
    # [phenotype idf]
    return np.asarray(np.log((1 + patients) / (1 + frequencies.astype(np.float64))) + 1)


def tfidf(bags: Bags, idf: np.ndarray) -> Features:
    """Each patient's concepts, how often they occur times their idf, scaled to length
    1.

    These are the definitions of scikit-learn's TfidfTransformer. A patient without
    concepts has no entry. Raises DataError for bags of another vocabulary, and for
    weights that are not finite.
    """
    if bags.vocabulary != len(idf):
        raise DataError(
            f"bags over {bags.vocabulary} concepts for frequencies of {len(idf)}: use the "
            "dictionary that the model was trained with"
        )
    row, column, count = bags.counts()
    value = count * idf[column]  # [phenotype tf-idf]
    length = np.sqrt(np.bincount(row, value**2))  # [phenotype tf-idf]
    with np.errstate(invalid="ignore"):
        value = value / length[row]
    if not np.isfinite(value).all():
        raise DataError(
            "a feature is not a finite number: a concept's weight (idf) must be one"
        )
    offsets = offsets_of(np.bincount(row, minlength=len(bags)))
    return Features(value, column, offsets, bags.vocabulary)


# ---- machines ------------------------------------------------------------------------


def classes_of(
    counts: Mapping[str, np.ndarray], least: int = 20
) -> tuple[tuple[int, ...], ...]:
    """The classes of each disease, from label counts summed over sites.

    counts: "absent", "present", "questionable" → (diseases,), as `Cohort.label_counts`.
    Questionable is a class where at least `least` patients are; the paper leaves it out
    where there are too few. Absent and present are classes where there is anyone.
    """
    enough = (
        counts["absent"] > 0,
        counts["present"] > 0,
        counts["questionable"] >= max(least, 1),
    )
    return tuple(
        tuple(np.flatnonzero(row).tolist()) for row in np.stack(enough, axis=1)
    )


class LinearSVMs:
    """The classifiers of all diseases, which start as zero.

    classes: of each disease, in rising order of labels. One class needs no machine (it
    is always predicted), none predicts -1. Labels of another class count as unlabelled.

    weight: (features, machines), intercept: (machines,), float64. steps: (machines,)
    patients seen. machines: (disease, class that is positive) of each.
    """

    def __init__(
        self,
        classes: Sequence[Sequence[int]],
        features: int,
        config: SvmConfig | None = None,
    ) -> None:
        self.config = config or SvmConfig()
        self.classes = tuple(tuple(sorted(each)) for each in classes)
        if any(
            c not in CLASSES or each.count(c) > 1 for each in self.classes for c in each
        ):
            raise ConfigError(f"classes of a disease are some of {CLASSES}, each once")
        self.machines = tuple(
            (disease, positive)
            for disease, each in enumerate(self.classes)
            for positive in (
                each[1:] if len(each) == 2 else each if len(each) > 2 else ()
            )
        )
        self.weight = np.zeros((features, len(self.machines)))
        self.intercept = np.zeros(len(self.machines))
        self.steps = np.zeros(len(self.machines), np.int64)

    def trainable(self) -> dict[str, Tensor]:
        """Name → float64 tensor that shares memory with the classifiers: read or copy
        into."""
        arrays = {"svm.intercept": self.intercept, "svm.weight": self.weight}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def sent(self) -> dict[str, Tensor]:
        """The same names in float32: what leaves a site.

        A float32 number times a number of patients is exact in float64, so the mean
        over one site is that site's value to the last bit; of float64 numbers it is
        not. Training in one place gives the same bits where it too goes on, cycle by
        cycle, from these.
        """
        return {name: value.float() for name, value in self.trainable().items()}

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `sent` gave, which may lie among others.

        Raises TrainingError where it is missing or does not fit.
        """
        given = {
            name: value for name, value in tensors.items() if name in self.trainable()
        }
        require_like(self.sent(), given)
        for name, value in self.trainable().items():
            value.copy_(given[name])

    def targets(self, labels: np.ndarray) -> np.ndarray:
        """(patients, machines) int8: 1 the machine's class, -1 another one, 0
        unlabelled."""
        found = np.zeros((len(labels), len(self.machines)), np.int8)
        for column, (disease, positive) in enumerate(self.machines):
            given = labels[:, disease]
            known = np.isin(given, self.classes[disease])
            found[:, column] = np.where(known, np.where(given == positive, 1, -1), 0)
        return found

    def balanced(self, counts: np.ndarray) -> np.ndarray:
        """(machines, 2) weights of negative and positive patients, n / (classes · its
        n).

        counts: (diseases, 3) labelled patients of each of CLASSES, summed over all
        sites. With three classes the rest weighs 1, as in scikit-learn.
        """
        weights = np.ones((len(self.machines), 2))
        for row, (disease, positive) in enumerate(self.machines):
            each = self.classes[disease]
            numbers = counts[disease][list(each)]
            share = numbers.sum() / (len(each) * np.maximum(numbers, 1))
            weights[row, 1] = share[each.index(positive)]
            if len(each) == 2:
                weights[row, 0] = share[0]
        return weights

    def epoch(
        self,
        features: Features,
        labels: np.ndarray,
        order: np.ndarray,
        weights: np.ndarray | None = None,
    ) -> tuple[float, int]:
        """One pass over the patients in this order (rows).

        weights: (machines, 2), see `balanced`. Returns the sum of losses before each
        step and how many pairs of patient and machine it is over.
        """
        x, rows, config = (
            self._fitting(features),
            np.asarray(order, np.int64),
            self.config,
        )
        targets = self.targets(labels)
        if len(targets) != len(x) or (
            len(rows) and not 0 <= rows.min() <= rows.max() < len(x)
        ):
            raise DataError(
                f"{len(x)} patients have {len(targets)} rows of labels, or rows beyond"
            )
        both = np.ones((len(self.machines), 2)) if weights is None else weights
        schedule = ("constant", "optimal", "invscaling").index(config.learning_rate)
        # w ← w − η ∂ max(0, 1 − y (w·x + b)) / ∂w, patient by patient
        loss = _epoch(
            *(x.values, x.columns, x.offsets, rows, targets),
            *(
                self.weight,
                self.intercept,
                self.steps,
                np.ascontiguousarray(both, np.float64),
            ),
            *(
                config.loss == "log",
                schedule,
                config.eta0,
                config.power_t,
                config.alpha,
            ),
            SPARSE_INTERCEPT if x.sparse else 1.0,
        )
        return float(loss), int(np.count_nonzero(targets[rows]))

    def scores(self, features: Features) -> np.ndarray:
        """(patients, machines) w·x + b."""
        x = self._fitting(features)
        out = np.empty((len(x), len(self.machines)))
        _scores(x.values, x.columns, x.offsets, self.weight, self.intercept, out)
        return out

    def decision(self, features: Features) -> np.ndarray:
        """(patients, diseases, 3) scores of CLASSES; -inf for what is no class of a
        disease."""
        scores = self.scores(features)
        return self._spread(scores, -scores, lone=0.0, other=-np.inf)

    def ranking(self, features: Features) -> np.ndarray:
        """(patients, diseases) scores of "present", which only rank; 0 where it is no
        class."""
        scores = self.decision(features)[:, :, PRESENT]
        return np.where(np.isfinite(scores), scores, 0.0)

    def predict(self, features: Features) -> np.ndarray:
        """(patients, diseases) int8: the class with the highest score; -1 without
        classes."""
        decision = self.decision(features)
        best = decision.argmax(axis=2)
        known = np.isfinite(decision.max(axis=2, initial=-np.inf))
        return np.where(known, best, UNLABELLED).astype(np.int8)

    def probabilities(
        self, features: Features, platt: np.ndarray | None = None
    ) -> np.ndarray:
        """(patients, diseases, 3) sigmoid(a · score + b), scaled to sum to 1 over the
        classes.

        platt: (machines, 2) a and b of `fit_platt`. Without it 1 and 0, which is what
        the loss "log" means and for "hinge" says no more than the order. Zeros without
        classes.
        """
        a, b = np.broadcast_to(
            (1.0, 0.0) if platt is None else platt, (len(self.machines), 2)
        ).T
        # exp of a large negative score: the sigmoid is zero
        with np.errstate(over="ignore"):
            sigmoids = 1 / (1 + np.exp(-(a * self.scores(features) + b)))
        spread = self._spread(sigmoids, 1 - sigmoids, lone=1.0, other=0.0)
        total = spread.sum(axis=2, keepdims=True)
        # Where all sigmoids of a disease underflow to zero, no class is preferred.
        even = [
            [(c in each) / max(1, len(each)) for c in CLASSES] for each in self.classes
        ]
        share = spread / np.where(total > 0, total, 1)
        return np.where(total > 0, share, np.reshape(even, (-1, 3)))

    def _spread(
        self, values: np.ndarray, opposites: np.ndarray, lone: float, other: float
    ) -> np.ndarray:
        """(patients, machines) → (patients, diseases, 3)."""
        out = np.full((len(values), len(self.classes), len(CLASSES)), other)
        for disease, each in enumerate(self.classes):
            if len(each) == 1:
                out[:, disease, each[0]] = lone
        for column, (disease, positive) in enumerate(self.machines):
            out[:, disease, positive] = values[:, column]
            if len(self.classes[disease]) == 2:
                out[:, disease, self.classes[disease][0]] = opposites[:, column]
        return out

    def _fitting(self, features: Features) -> Features:
        if features.width != len(self.weight):
            raise DataError(
                f"{features.width} features for classifiers of {len(self.weight)}"
            )
        return features


# ---- kernels: all machines side by side ------------------------------------------------------
# Not fused, and sums in scikit-learn's order: the hinge loss gives its very bits.


@kernel("void(f8[::1], i8[::1], i8, i8, f8[:,::1], f8[::1], f8[::1])", fused=False)
def _score(values, columns, start, stop, weight, intercept, out):
    """out (machines,) ← the scores of one patient, whose entries are start:stop."""
    machines = out.shape[0]
    for k in range(machines):
        out[k] = 0.0
    for e in range(start, stop):
        column, value = columns[e], values[e]
        for k in range(machines):
            out[k] += value * weight[column, k]
    for k in range(machines):
        out[k] += intercept[k]


@kernel("UniTuple(f8, 2)(b1, f8, f8)", fused=False)
def _loss(log, y, score):
    """The loss of a score for the target y (1 or -1), and minus its derivative by the
    margin."""
    margin = y * score
    if not log:
        return max(0.0, 1.0 - margin), (1.0 if margin <= 1.0 else 0.0)
    loss = np.log1p(np.exp(-abs(margin))) + max(0.0, -margin)
    if score <= -37.0:  # exp(-score) is so large that 1 more makes no difference
        small = np.exp(score)
        return loss, (1.0 - small if y > 0.0 else small)
    odds = np.exp(-score)
    return loss, (odds if y > 0.0 else 1.0) / (1.0 + odds)


@kernel("f8(i8, i8, f8, f8, f8)", fused=False)
def _size(schedule, t, eta0, power, alpha):
    """The learning rate of a machine's step t (from 1). "optimal" starts at alpha^-1/4."""
    if schedule == 0:
        return eta0
    if schedule == 1:
        first = np.sqrt(1.0 / np.sqrt(alpha))
        return 1.0 / (alpha * (1.0 / (first * alpha) + t - 1.0))
    return eta0 / t**power


@kernel("void(f8[::1], i8[::1], i8[::1], f8[:,::1], f8[::1], f8[:,::1])", fused=False)
def _scores(values, columns, offsets, weight, intercept, out):
    for row in range(out.shape[0]):
        _score(
            values, columns, offsets[row], offsets[row + 1], weight, intercept, out[row]
        )


@kernel(
    "f8(f8[::1], i8[::1], i8[::1], i8[::1], i1[:,::1], f8[:,::1], f8[::1], i8[::1], f8[:,::1],"
    " b1, i8, f8, f8, f8, f8)",
    fused=False,
)
def _epoch(
    values, columns, offsets, order, targets, weight, intercept, steps, weights,
    log, schedule, eta0, power, alpha, intercept_step,
):  # fmt: skip
    machines, total = weight.shape[1], 0.0
    score, update = np.empty(machines), np.empty(machines)
    for row in order:
        start, stop, moves = offsets[row], offsets[row + 1], False
        _score(values, columns, start, stop, weight, intercept, score)
        for k in range(machines):
            y = np.float64(targets[row, k])
            update[k] = 0.0
            if y == 0.0:
                continue
            steps[k] += 1
            loss, slope = _loss(log, y, score[k])
            side = weights[k, 1] if y > 0.0 else weights[k, 0]
            total += side * loss
            # [phenotype svm]
            update[k] = (
                _size(schedule, steps[k], eta0, power, alpha) * (y * slope) * side
            )
            moves |= update[k] != 0.0
        if moves:
            for e in range(start, stop):
                column, value = columns[e], values[e]
                for k in range(machines):
                    weight[column, k] += value * update[k]  # [phenotype svm]
            for k in range(machines):
                intercept[k] += update[k] * intercept_step  # [phenotype svm]
    return total


# ---- fitted to the end -----------------------------------------------------------------------
# Stochastic gradient descent without a penalty stops where its epochs do, so that a comparison of
# features by it is also one of how fast each of them is learnt. scikit-learn's
# `LogisticRegression` has one solution, whatever the order of patients, and here is the reference:
#     min_w  ½ ‖w‖² + C Σ_i s_i log(1 + exp(−y_i (w·x_i + b))),  s_i the weight of i's class
# In a federation each site's own solutions are averaged, and further cycles change nothing.

# of C, where held-out patients choose it
CHOICES = tuple(10.0**power for power in range(-2, 5))
Labelled = tuple[Features, np.ndarray]  # features and (patients, diseases) labels


def fit(
    machines: LinearSVMs,
    train: Labelled,
    held_out: Labelled,
    weights: np.ndarray | None,
    C: float,
) -> tuple[float, int]:
    """Put every machine at its solution; one without patients of both kinds stays at
    zero.

    weights: (machines, 2), see `LinearSVMs.balanced`. C: 0 takes the one of CHOICES
    whose solutions have the least loss on held-out patients, the smaller of two that
    are alike; 1 where nobody is held out. Returns the sum of weighted losses and over
    how many pairs of patient and machine it is. Raises MissingExtra without
    scikit-learn.
    """
    with needs("scikit-learn", "phenotype"):
        from scipy.sparse import csr_matrix
        from sklearn.linear_model import LogisticRegression
    if not C and len(held_out[0]):
        losses = []
        for choice in CHOICES:
            fit(machines, train, held_out, weights, choice)
            losses.append(loss_of(machines, *held_out, weights)[0])
        C = CHOICES[int(np.argmin(losses))]
    features, labels = train
    shape = (len(features), features.width)
    x = csr_matrix((features.values, features.columns, features.offsets), shape=shape)
    targets = machines.targets(labels)
    side = _sides(targets, weights)
    machines.weight[:], machines.intercept[:] = 0.0, 0.0
    for k in range(len(machines.machines)):
        rows = np.flatnonzero(targets[:, k])
        if len(np.unique(targets[rows, k])) == 2:
            solver = LogisticRegression(C=C or 1.0, tol=1e-6, max_iter=10_000)
            found = solver.fit(x[rows], targets[rows, k], sample_weight=side[rows, k])
            machines.weight[:, k], machines.intercept[k] = (
                found.coef_[0],
                found.intercept_[0],
            )
    return loss_of(machines, features, labels, weights)


def loss_of(
    machines: LinearSVMs,
    features: Features,
    labels: np.ndarray,
    weights: np.ndarray | None,
) -> tuple[float, int]:
    """The sum of weighted logistic losses, and over how many pairs of patient and
    machine."""
    targets = machines.targets(labels)
    losses = np.logaddexp(0.0, -targets * machines.scores(features)) * _sides(
        targets, weights
    )
    return float(losses.sum()), int(np.count_nonzero(targets))


def _sides(targets: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """(patients, machines) the weight of each one's class for each machine; 0 if
    unlabelled."""
    negative, positive = (1.0, 1.0) if weights is None else weights.T
    return np.where(targets > 0, positive, negative) * (targets != 0)
