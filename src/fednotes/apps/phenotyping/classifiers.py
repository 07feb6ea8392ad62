"""Stage 2: linear classifiers of all diseases side by side, and TF-IDF features.

Liu, Dligach and Miller 2019, section 2.6: a linear SVM (hinge loss) for each phenotype,
trained by stochastic gradient descent without regularisation on the representations of
stage 1, or on "TF-IDF weighted sparse bag-of-CUIs vectors".

A classifier is one linear function of a patient's features, whose sign decides between
two classes. A disease whose classes are absent and present has one classifier. A
disease with a third class, questionable, has three, each of which separates one class
from the others.

An epoch takes the patients one by one, and all classifiers take their steps for a
patient together: the weights are one matrix (features, classifiers), so a feature of
the patient uses one contiguous row of it. Each classifier takes the same steps as
scikit-learn's `SGDClassifier(penalty=None, shuffle=False)` on only the patients
labelled for its disease. The order, the steps and the coefficients are the same,
and training is four to six times as fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal, NamedTuple

import numpy as np
import torch
from annotated_types import Ge, Gt
from numpy.typing import NDArray
from pydantic import FiniteFloat
from torch import Tensor

from fednotes.apps.phenotyping.cohort import (
    ABSENT,
    PRESENT,
    QUESTIONABLE,
    UNLABELLED,
    Bags,
    compute_offsets,
)
from fednotes.core.errors import ConfigError, DataError, needs
from fednotes.core.kernels import kernel
from fednotes.core.settings import checked
from fednotes.core.tensors import require_like

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Signs = NDArray[np.int8]

CLASSES: Final = (ABSENT, PRESENT, QUESTIONABLE)  # columns of scores and probabilities
INTERCEPT: Final = "svm.intercept"  # the name of a tensor: a number for each classifier
# With sparse features, scikit-learn scales down the steps of the intercept.
SPARSE_INTERCEPT: Final = 0.01
# Kernels take the learning rate's schedule as an index into this tuple.
_SCHEDULES: Final = ("constant", "optimal", "invscaling")


@checked(frozen=True)
class SvmConfig:
    """The classifiers; names and defaults are those of scikit-learn's SGDClassifier.

    Attributes:
        loss: Loss of the classifiers: "hinge" is the paper's SVM; "log" is logistic
            regression ("log_loss" in scikit-learn).
        learning_rate: Schedule of the learning rate: step t of a classifier has the
            rate eta0 ("constant"), eta0 / t^power_t ("invscaling"), or 1 / (alpha (t0 +
            t - 1)) with the t0 of Bottou ("optimal"). t counts the classifier's
            labelled patients and continues from epoch to epoch. The paper gives no
            schedule.
        eta0: Initial learning rate of "constant" and "invscaling"; see `learning_rate`.
        power_t: Exponent of "invscaling"; see `learning_rate`.
        alpha: Weight of the penalty on the size of the parameters. Raise it if the
            classifiers overfit.
        class_weights: Weights of a disease's classes: "balanced" weights a class by n /
            (number of classes · n of the class), which favours rare classes.
        solver: Training of the classifiers: "sgd" takes a step per patient and epoch,
            as the paper does; "converged" trains logistic regression with a penalty to
            convergence (`train_to_convergence`).
        C: Weight of the patients' loss relative to the penalty with solver =
            "converged"; 0 chooses the weight on held-out patients.
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
                'solver = "converged" is logistic regression: also set loss = "log"'
            )


# ---- features ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Features:
    """Features of patients without zeros, row by row (CSR).

    Attributes:
        values: (entries,) float64.
        columns: (entries,) int64 numbers of the features.
        offsets: (patients + 1,) int64 bounds of the patients in `values`.
        width: The number of features.
        sparse: Whether the features came as a sparse matrix; this determines the size
            of the intercept's steps.
    """

    values: Floats
    columns: Ints
    offsets: Ints
    width: int
    sparse: bool = True

    @classmethod
    def from_dense(cls, dense: np.ndarray) -> Features:
        """Return the features in a matrix; about half of a ReLU layer's are zero.

        Args:
            dense: (patients, features).

        Raises:
            DataError: The array is not two-dimensional, or a value is not finite.
        """
        matrix = np.ascontiguousarray(dense, np.float64)
        if matrix.ndim != 2 or not np.isfinite(matrix).all():
            raise DataError(
                "features must be a matrix of finite numbers, (patients, features)"
            )
        rows, columns = np.nonzero(matrix)
        sizes = np.bincount(rows, minlength=len(matrix))
        return cls(
            values=matrix[rows, columns],
            columns=np.ascontiguousarray(columns),
            offsets=compute_offsets(sizes),
            width=matrix.shape[1],
            sparse=False,
        )

    def __len__(self) -> int:
        """Return the number of patients."""
        return len(self.offsets) - 1


def count_document_frequencies(bags: Bags) -> Ints:
    """Return (vocabulary,) int64: how many patients have each concept.

    Frequencies of several sites add up.
    """
    _, columns, _ = bags.count_concepts()
    return np.bincount(columns, minlength=bags.vocabulary).astype(np.int64)


def compute_idf(frequencies: np.ndarray, patients: int) -> Floats:
    """Return (vocabulary,) ln((1 + patients) / (1 + df)) + 1, as scikit-learn has it.

    Args:
        frequencies: (vocabulary,) document frequencies, summed over sites. A sum shows
            no site's own frequencies.
        patients: The number of patients among whom they were counted.
    """
    # [phenotype idf]
    return np.asarray(np.log((1 + patients) / (1 + frequencies.astype(np.float64))) + 1)


def compute_tfidf(bags: Bags, idf: np.ndarray) -> Features:
    """Return each concept's count times its idf, scaled to length 1 per patient.

    The definitions are those of scikit-learn's TfidfTransformer. A patient without
    concepts has no entry.

    Args:
        bags: The patients' concepts.
        idf: (vocabulary,) `compute_idf`.

    Raises:
        DataError: The bags have a different vocabulary, or a weight is not finite.
    """
    if bags.vocabulary != len(idf):
        raise DataError(
            f"the patients' concepts come from a dictionary of {bags.vocabulary} "
            f"concepts, but the model was trained with one of {len(idf)}: use that "
            "dictionary"
        )
    rows, columns, counts = bags.count_concepts()
    weighted = counts * idf[columns]  # [phenotype tf-idf]
    lengths = np.sqrt(np.bincount(rows, weighted**2))  # [phenotype tf-idf]
    with np.errstate(invalid="ignore"):
        values = weighted / lengths[rows]
    if not np.isfinite(values).all():
        raise DataError(
            "a feature is not a finite number: check that the weight (idf) of each "
            "concept is finite"
        )

    offsets = compute_offsets(np.bincount(rows, minlength=len(bags)))
    return Features(values, columns, offsets=offsets, width=bags.vocabulary)


# ---- classifiers ---------------------------------------------------------------------


def agree_on_classes(
    counts: Mapping[str, np.ndarray], least_questionable: int = 20
) -> tuple[tuple[int, ...], ...]:
    """Return the classes of each disease.

    Absent and present are classes if any patient has them. Questionable is a class if
    enough patients have it, and at least one; the paper omits it if there are too few.

    Args:
        counts: For "absent", "present" and "questionable", (diseases,) numbers of
            patients as `Cohort.count_labels` has them, summed over sites.
        least_questionable: The minimum number of patients for which questionable is a
            class.
    """
    is_class = np.stack(
        [
            counts["absent"] > 0,
            counts["present"] > 0,
            counts["questionable"] >= max(least_questionable, 1),
        ],
        axis=1,
    )
    return tuple(tuple(np.flatnonzero(row).tolist()) for row in is_class)


class LinearSVMs:
    """The classifiers of all diseases, which start at zero.

    Args:
        classes: The classes of each disease. A disease with one class needs no
            classifier, because that class is always predicted; for a disease without
            classes, -1 is predicted. Labels of other classes count as unlabelled.
        features: The number of features.
        config: The settings; the defaults if None.

    Attributes:
        classes: The classes of each disease, in rising order.
        classifiers: The disease and the positive class of each classifier.
        weight: (features, classifiers) float64.
        intercept: (classifiers,) float64.
        steps: (classifiers,) int64 numbers of steps that each classifier has taken.

    Raises:
        ConfigError: A disease has an unknown class, or a class twice.
    """

    def __init__(
        self,
        classes: Sequence[Sequence[int]],
        features: int,
        config: SvmConfig | None = None,
    ) -> None:
        self.config = config or SvmConfig()
        self.classes = tuple(tuple(sorted(of_disease)) for of_disease in classes)
        for of_disease in self.classes:
            is_repeated = len(set(of_disease)) < len(of_disease)
            if is_repeated or not set(of_disease) <= set(CLASSES):
                raise ConfigError(
                    f"the classes of a disease must be some of {CLASSES}, each once"
                )
        self.classifiers = list_classifiers(self.classes)
        self.weight: Floats = np.zeros((features, len(self.classifiers)))
        self.intercept: Floats = np.zeros(len(self.classifiers))
        self.steps: Ints = np.zeros(len(self.classifiers), np.int64)

    # Tensors.

    def trainable(self) -> dict[str, Tensor]:
        """Return float64 tensors by name, which share memory with the classifiers."""
        return {
            INTERCEPT: torch.from_numpy(self.intercept),
            "svm.weight": torch.from_numpy(self.weight),
        }

    def to_float32(self) -> dict[str, Tensor]:
        """Return the tensors of `trainable` in float32, as they leave a site.

        A float32 number times a number of patients is exact in float64, so the mean
        over one site is bit-identical to that site's value; for a float64 number it is
        not. Pooled training gives the same bits if it also continues from these tensors
        in each cycle.
        """
        return {name: value.float() for name, value in self.trainable().items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from the tensors of `to_float32`, which may be among others.

        Raises:
            TrainingError: Tensors are missing, or have a different shape.
        """
        targets = self.trainable()
        sources = {name: value for name, value in tensors.items() if name in targets}
        require_like(self.to_float32(), sources)
        for name, target in targets.items():
            target.copy_(sources[name])

    # Labels.

    def make_targets(self, labels: np.ndarray) -> Signs:
        """Return (patients, classifiers) int8: whether a label is positive.

        Args:
            labels: (patients, diseases).

        Returns:
            1 for the classifier's positive class, -1 for another class of its disease,
            0 for patients who are not labelled.
        """
        targets = np.zeros((len(labels), len(self.classifiers)), np.int8)
        for column, (disease, positive) in enumerate(self.classifiers):
            of_disease = labels[:, disease]
            is_labelled = np.isin(of_disease, self.classes[disease])
            signs = np.where(of_disease == positive, 1, -1)
            targets[:, column] = np.where(is_labelled, signs, 0)
        return targets

    def compute_class_weights(self, counts: np.ndarray) -> Floats:
        """Return (classifiers, 2) weights of negative and of positive patients.

        The weight of a class is N / (K · n): N labelled patients in all, K classes, and
        n patients in this class. If a disease has three classes, the negative classes
        of a classifier have weight 1, as in scikit-learn.

        Args:
            counts: (diseases, 3) numbers of labelled patients of each of CLASSES,
                summed over all sites.
        """
        weights = np.ones((len(self.classifiers), 2))
        for column, (disease, positive) in enumerate(self.classifiers):
            classes = self.classes[disease]
            sizes = counts[disease][list(classes)]
            balanced = sizes.sum() / (len(classes) * np.maximum(sizes, 1))
            weights[column, 1] = balanced[classes.index(positive)]
            if len(classes) == 2:
                weights[column, 0] = balanced[0]
        return weights

    # Training and prediction.

    def train_epoch(
        self,
        features: Features,
        labels: np.ndarray,
        order: np.ndarray,
        weights: np.ndarray | None = None,
    ) -> tuple[float, int]:
        """Take a step for each patient: w ← w − η ∂ max(0, 1 − y (w·x + b)) / ∂w.

        Args:
            features: The patients' features.
            labels: (patients, diseases).
            order: (steps,) rows of the patients, in the order of the steps.
            weights: (classifiers, 2), see `compute_class_weights`; 1 if None.

        Returns:
            The sum of the losses before each step, and its number of pairs of patient
            and classifier.

        Raises:
            DataError: Features, labels and order contradict each other.
        """
        self._require_width(features)
        rows = np.asarray(order, np.int64)
        targets = self.make_targets(labels)
        is_within = not len(rows) or 0 <= rows.min() <= rows.max() < len(features)
        if len(targets) != len(features) or not is_within:
            raise DataError(
                f"{len(features)} patients have {len(targets)} rows of labels, or the "
                "order names rows beyond them"
            )
        if weights is None:
            weights = np.ones((len(self.classifiers), 2))
        loss = _train_epoch(
            features.values,
            features.columns,
            features.offsets,
            rows,
            targets,
            self.weight,
            self.intercept,
            self.steps,
            np.ascontiguousarray(weights, np.float64),
            self.config.loss == "log",
            _SCHEDULES.index(self.config.learning_rate),
            self.config.eta0,
            self.config.power_t,
            self.config.alpha,
            SPARSE_INTERCEPT if features.sparse else 1.0,
        )
        return float(loss), int(np.count_nonzero(targets[rows]))

    def score(self, features: Features) -> Floats:
        """Return the (patients, classifiers) scores w·x + b.

        Raises:
            DataError: The number of features is wrong.
        """
        self._require_width(features)
        scores = np.empty((len(features), len(self.classifiers)))
        _score_patients(
            features.values,
            features.columns,
            features.offsets,
            self.weight,
            self.intercept,
            scores,
        )
        return scores

    def score_classes(self, features: Features) -> Floats:
        """Return (patients, diseases, 3) scores of CLASSES.

        The score is -inf for a class that the disease lacks.
        """
        scores = self.score(features)
        return self._expand(scores, -scores, only_class=0.0, no_class=-np.inf)

    def score_for_ranking(self, features: Features) -> Floats:
        """Return (patients, diseases) scores of "present", useful only for ranking.

        The score is 0 if "present" is not a class of the disease.
        """
        scores = self.score_classes(features)[:, :, PRESENT]
        return np.where(np.isfinite(scores), scores, 0.0)

    def predict(self, features: Features) -> NDArray[np.int8]:
        """Return (patients, diseases) int8: the class with the highest score.

        It is -1 for a disease without classes.
        """
        scores = self.score_classes(features)
        best = scores.argmax(axis=2)
        has_class = np.isfinite(scores.max(axis=2, initial=-np.inf))
        return np.where(has_class, best, UNLABELLED).astype(np.int8)

    def predict_probabilities(
        self, features: Features, platt: np.ndarray | None = None
    ) -> Floats:
        """Return (patients, diseases, 3) probabilities of CLASSES.

        They are sigmoid(a · score + b), normalised over the classes of a disease, and
        all zero for a disease without classes.

        Args:
            features: The patients' features.
            platt: (classifiers, 2) a and b of `fit_platt`. If None, they are 1 and 0,
                which is exact for the loss "log"; under "hinge", the result then only
                ranks patients.
        """
        if platt is None:
            platt = np.tile((1.0, 0.0), (len(self.classifiers), 1))
        slopes, shifts = platt.T
        # exp overflows for a large negative score, whose sigmoid is zero.
        with np.errstate(over="ignore"):
            sigmoids = 1 / (1 + np.exp(-(slopes * self.score(features) + shifts)))
        chances = self._expand(sigmoids, 1 - sigmoids, only_class=1.0, no_class=0.0)
        totals = chances.sum(axis=2, keepdims=True)
        scaled = chances / np.where(totals > 0, totals, 1)
        # If all sigmoids of a disease underflow to zero, no class is preferred.
        return np.where(totals > 0, scaled, self._make_even_probabilities())

    def _make_even_probabilities(self) -> Floats:
        """Return (diseases, 3) equal probabilities of the classes of each disease."""
        even = np.zeros((len(self.classes), len(CLASSES)))
        for disease, classes in enumerate(self.classes):
            for each in classes:
                even[disease, each] = 1 / len(classes)
        return even

    def _expand(
        self,
        values: np.ndarray,
        opposites: np.ndarray,
        *,
        only_class: float,
        no_class: float,
    ) -> Floats:
        """Expand values per classifier to (patients, diseases, 3) values per class.

        A disease with one class has no classifier, one with two classes has one, and
        one with three classes has a classifier for each (`list_classifiers`).

        Args:
            values: (patients, classifiers) values of the positive classes.
            opposites: (patients, classifiers) values of "absent" (or the lower class)
                for diseases with two classes.
            only_class: The value of the only class of a disease.
            no_class: The value of a class that the disease lacks.
        """
        shape = (len(values), len(self.classes), len(CLASSES))
        expanded = np.full(shape, no_class)
        for disease, classes in enumerate(self.classes):
            if len(classes) == 1:
                expanded[:, disease, classes[0]] = only_class
        for column, (disease, positive) in enumerate(self.classifiers):
            expanded[:, disease, positive] = values[:, column]
            classes = self.classes[disease]
            if len(classes) == 2:  # one classifier decides between both classes
                expanded[:, disease, classes[0]] = opposites[:, column]
        return expanded

    def _require_width(self, features: Features) -> None:
        """Raise DataError if the number of features is wrong."""
        if features.width != len(self.weight):
            raise DataError(
                f"the patients have {features.width} features, but the classifiers "
                f"were trained on {len(self.weight)}: use the same features"
            )


def list_classifiers(classes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, int], ...]:
    """Return the disease and the positive class of each classifier."""
    classifiers: list[tuple[int, int]] = []
    for disease, of_disease in enumerate(classes):
        if len(of_disease) == 2:
            classifiers.append((disease, of_disease[1]))
        elif len(of_disease) > 2:
            classifiers += [(disease, positive) for positive in of_disease]
    return tuple(classifiers)


# ---- kernels: a patient's steps for all classifiers ----------------------------------
# They add in scikit-learn's order, without fused multiply-adds, so that the hinge loss
# is bit-identical to scikit-learn's.


@kernel("void(f8[::1], i8[::1], i8, i8, f8[:,::1], f8[::1], f8[::1])", fused=False)
def _score_patient(
    values: Floats,
    columns: Ints,
    start: int,
    stop: int,
    weight: Floats,
    intercept: Floats,
    scores: Floats,
) -> None:
    """Write a patient's (classifiers,) scores; the patient's entries are start:stop."""
    classifiers = scores.shape[0]
    for k in range(classifiers):
        scores[k] = 0.0
    for entry in range(start, stop):
        column = columns[entry]
        value = values[entry]
        for k in range(classifiers):
            scores[k] += value * weight[column, k]
    for k in range(classifiers):
        scores[k] += intercept[k]


@kernel("void(f8[::1], i8[::1], i8[::1], f8[:,::1], f8[::1], f8[:,::1])", fused=False)
def _score_patients(
    values: Floats,
    columns: Ints,
    offsets: Ints,
    weight: Floats,
    intercept: Floats,
    scores: Floats,
) -> None:
    """Write the (patients, classifiers) scores."""
    for row in range(scores.shape[0]):
        _score_patient(
            values,
            columns,
            offsets[row],
            offsets[row + 1],
            weight,
            intercept,
            scores[row],
        )


@kernel("UniTuple(f8, 2)(b1, f8, f8)", fused=False)
def _compute_loss_and_slope(
    is_log: bool,  # noqa: FBT001 - kernels take no keywords
    y: float,
    score: float,
) -> tuple[float, float]:
    """Return the loss of a score for the target y, and minus its derivative by y·score.

    The target is 1 or -1.
    """
    margin = y * score
    if not is_log:
        return max(0.0, 1.0 - margin), (1.0 if margin <= 1.0 else 0.0)
    loss = np.log1p(np.exp(-abs(margin))) + max(0.0, -margin)
    if score <= -37.0:  # adding 1 to exp(-score) makes no difference
        small = np.exp(score)
        return loss, (1.0 - small if y > 0.0 else small)
    odds = np.exp(-score)
    return loss, (odds if y > 0.0 else 1.0) / (1.0 + odds)


@kernel("f8(i8, i8, f8, f8, f8)", fused=False)
def _compute_learning_rate(
    schedule: int, step: int, eta0: float, power: float, alpha: float
) -> float:
    """Return the learning rate of a classifier's step, counted from 1.

    The schedule is an index into _SCHEDULES. "optimal" starts at alpha^-1/4.
    """
    if schedule == 0:
        return eta0
    if schedule == 1:
        first = np.sqrt(1.0 / np.sqrt(alpha))
        return 1.0 / (alpha * (1.0 / (first * alpha) + step - 1.0))
    return eta0 / step**power


@kernel(
    "f8(f8[::1], i8[::1], i8[::1], i8[::1], i1[:,::1], f8[:,::1], f8[::1], i8[::1], "
    "f8[:,::1], b1, i8, f8, f8, f8, f8)",
    fused=False,
)
def _train_epoch(  # noqa: PLR0913 - a kernel has no objects
    values: Floats,
    columns: Ints,
    offsets: Ints,
    order: Ints,
    targets: Signs,
    weight: Floats,
    intercept: Floats,
    steps: Ints,
    class_weights: Floats,
    is_log: bool,  # noqa: FBT001 - kernels take no keywords
    schedule: int,
    eta0: float,
    power: float,
    alpha: float,
    intercept_step: float,
) -> float:
    """Change weight, intercept and steps; return the sum of losses before each step."""
    classifiers = weight.shape[1]
    scores = np.empty(classifiers)
    update = np.empty(classifiers)
    total = 0.0
    for row in order:
        start = offsets[row]
        stop = offsets[row + 1]
        _score_patient(values, columns, start, stop, weight, intercept, scores)
        moves = False
        for k in range(classifiers):
            y = np.float64(targets[row, k])
            update[k] = 0.0
            if y == 0.0:
                continue
            steps[k] += 1
            loss, slope = _compute_loss_and_slope(is_log, y, scores[k])
            of_class = class_weights[k, 1] if y > 0.0 else class_weights[k, 0]
            total += of_class * loss
            rate = _compute_learning_rate(schedule, steps[k], eta0, power, alpha)
            update[k] = rate * (y * slope) * of_class  # [phenotype svm]
            moves |= update[k] != 0.0

        if moves:
            for entry in range(start, stop):
                column = columns[entry]
                value = values[entry]
                for k in range(classifiers):
                    weight[column, k] += value * update[k]  # [phenotype svm]
            for k in range(classifiers):
                intercept[k] += update[k] * intercept_step  # [phenotype svm]
    return total


# ---- training to convergence ---------------------------------------------------------
# Without a penalty, the result of stochastic gradient descent depends on the number of
# epochs. Comparing features with it therefore also compares how fast each is learned.
# The solution of scikit-learn's `LogisticRegression` does not depend on the order of
# patients and serves as the reference:
#
#     min_w  ½ ‖w‖² + C Σ_i s_i log(1 + exp(−y_i (w·x_i + b))),
#
# where s_i is the weight of i's class. A federation takes the mean of the sites' own
# solutions, and further cycles change nothing.

# The values of C from which held-out patients select.
C_CHOICES: Final = tuple(10.0**power for power in range(-2, 5))


class LabelledFeatures(NamedTuple):
    """The data for training classifiers.

    Attributes:
        features: The patients' features.
        labels: (patients, diseases).
    """

    features: Features
    labels: np.ndarray


def train_to_convergence(
    svms: LinearSVMs,
    train: LabelledFeatures,
    held_out: LabelledFeatures,
    *,
    weights: np.ndarray | None,
    C: float,
) -> tuple[float, int]:
    """Train every classifier to convergence.

    A classifier that lacks positive or negative patients stays at zero.

    Args:
        svms: The classifiers, which are changed.
        train: The patients to train on.
        held_out: The patients on whom C is chosen.
        weights: (classifiers, 2), see `LinearSVMs.compute_class_weights`; 1 if None.
        C: Weight of the patients against the penalty. If it is 0, the value of
            C_CHOICES with the smallest loss on held-out patients is used (the smaller
            value in a tie), and 1 if nobody is held out.

    Returns:
        The sum of the weighted losses, and the number of pairs of a patient and a
        classifier in it.

    Raises:
        MissingExtra: scikit-learn is not installed.
    """
    if not C and len(held_out.features):
        C = _choose_c(svms, train, held_out, weights)
    _solve(svms, train, weights, C=C or 1.0)
    return measure_logistic_loss(svms, train, weights)


def _choose_c(
    svms: LinearSVMs,
    train: LabelledFeatures,
    held_out: LabelledFeatures,
    weights: np.ndarray | None,
) -> float:
    """Return the value of C_CHOICES with the smallest held-out loss."""
    losses: list[float] = []
    for choice in C_CHOICES:
        _solve(svms, train, weights, C=choice)
        loss, _ = measure_logistic_loss(svms, held_out, weights)
        losses.append(loss)
    return C_CHOICES[int(np.argmin(losses))]


def _solve(
    svms: LinearSVMs,
    train: LabelledFeatures,
    weights: np.ndarray | None,
    *,
    C: float,
) -> None:
    """Set each classifier to the solution of its logistic regression.

    A classifier is set to zero if it lacks positive or negative patients.
    """
    with needs("scikit-learn", "phenotype"):
        from scipy.sparse import csr_matrix
        from sklearn.linear_model import LogisticRegression

    features, labels = train
    matrix = csr_matrix(
        (features.values, features.columns, features.offsets),
        shape=(len(features), features.width),
    )
    targets = svms.make_targets(labels)
    pair_weights = _weigh_pairs(targets, weights)
    svms.weight[:] = 0.0
    svms.intercept[:] = 0.0
    for k in range(len(svms.classifiers)):
        rows = np.flatnonzero(targets[:, k])
        has_both_kinds = len(np.unique(targets[rows, k])) == 2
        if not has_both_kinds:
            continue
        solver = LogisticRegression(C=C, tol=1e-6, max_iter=10_000)
        solver.fit(matrix[rows], targets[rows, k], sample_weight=pair_weights[rows, k])
        svms.weight[:, k] = solver.coef_[0]
        svms.intercept[k] = solver.intercept_[0]


def measure_logistic_loss(
    svms: LinearSVMs, patients: LabelledFeatures, weights: np.ndarray | None
) -> tuple[float, int]:
    """Return the weighted logistic loss of classifiers on some patients.

    Args:
        svms: The classifiers.
        patients: The patients to predict.
        weights: (classifiers, 2), see `LinearSVMs.compute_class_weights`; 1 if None.

    Returns:
        The sum of the losses, and the number of pairs of a patient and a classifier in
        it.
    """
    targets = svms.make_targets(patients.labels)
    scores = svms.score(patients.features)
    losses = np.logaddexp(0.0, -targets * scores) * _weigh_pairs(targets, weights)
    return float(losses.sum()), int(np.count_nonzero(targets))


def _weigh_pairs(targets: Signs, weights: np.ndarray | None) -> Floats:
    """Return (patients, classifiers) the weight of each patient; 0 if unlabelled."""
    if weights is None:
        return np.abs(targets).astype(np.float64)
    negative, positive = weights.T
    return np.where(targets > 0, positive, negative) * (targets != 0)
