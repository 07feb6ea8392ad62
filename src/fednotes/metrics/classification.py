"""Scores of predicted labels, from additive counts, and of rankings of patients.

Labels are 1 present, 0 absent, 2 questionable and -1 unlabelled. An unlabelled pair of
patient and output is ignored. From precision, recall and F1 of each class of an output:

    macro    the mean over an output's classes, then over outputs (Liu, Dligach and
             Miller 2019, Tables 2 and 3). F1 is a mean of F1s. A class is included if
             it occurs in labels or predictions, as in scikit-learn; an output without
             a labelled patient is left out.
    micro    all classes and outputs together
    present  only the class "present": micro over outputs, and macro over the outputs
             where it occurs in labels or predictions

A score whose denominator is zero is 0.0 (scikit-learn's zero_division=0). AUROC and
AUPRC rank the patients who are present against those who are absent. If an output lacks
one of the two, they are undefined (None).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fednotes.core.errors import DataError

Floats = NDArray[np.float64]

# The labels of a patient for a phenotype, or for another output.
UNLABELLED: Final = -1
ABSENT: Final = 0
PRESENT: Final = 1
QUESTIONABLE: Final = 2
CLASSES: Final = ("absent", "present", "questionable")  # names of the labels 0, 1, 2
_PREDICTIONS: Final = (*CLASSES, "none")  # "none": the prediction was -1
_MEASURES: Final = ("precision", "recall", "f1")
_AREAS: Final = ("auroc", "auprc")
_METRICS_PREFIX: Final = "classes"
_CELLS: Final = len(CLASSES) * len(_PREDICTIONS)
_CHUNK = 4_000_000  # drawn indices in memory at once: 32 MB


@dataclass(frozen=True, slots=True, eq=False)
class ClassCounts:
    """Additive confusion counts of labels and predictions.

    Attributes:
        by_output: (3, 4) int64 [label, prediction] by output; the last column is "no
            prediction". `ClassCounts()` is zero.
    """

    by_output: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        labels: NDArray[Any],
        predicted: NDArray[Any],
        outputs: Sequence[str],
        classes: Sequence[Sequence[int]] | None = None,
    ) -> ClassCounts:
        """Compare predictions with labels.

        Args:
            labels: (patients, outputs).
            predicted: (patients, outputs).
            outputs: The names of the outputs.
            classes: The classes of each output. Pairs with other labels are ignored:
                the paper leaves questionable patients out of the test if there are too
                few. None includes all classes.

        Raises:
            DataError: Shapes do not agree, or a value is not a label.
        """
        cells = _number_cells(labels, predicted, len(outputs), classes)
        by_output = {}
        for name, column in zip(outputs, cells.T, strict=True):
            counts = np.bincount(column[column >= 0], minlength=_CELLS)
            by_output[name] = np.asarray(counts, np.int64).reshape(3, 4)
        return cls(by_output)

    def __add__(self, other: ClassCounts) -> ClassCounts:
        zero = np.zeros((3, 4), np.int64)
        names = dict.fromkeys((*self.by_output, *other.by_output))
        return ClassCounts(
            {
                name: self.by_output.get(name, zero) + other.by_output.get(name, zero)
                for name in names
            }
        )

    def to_metrics(self) -> dict[str, float]:
        """Return flat additive counts: {"classes/Gout/present/absent": 3.0, ...}.

        The keys depend only on the outputs, so they do not reveal what a site lacks.
        """
        return {
            f"{_METRICS_PREFIX}/{name}/{label}/{prediction}": float(table[i, j])
            for name, table in self.by_output.items()
            for i, label in enumerate(CLASSES)
            for j, prediction in enumerate(_PREDICTIONS)
        }

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, float]) -> ClassCounts:
        """Return the counts in flat metrics, ignoring other keys.

        This is the inverse of `to_metrics`.
        """
        by_output: dict[str, NDArray[np.int64]] = {}
        for key, value in metrics.items():
            prefix, _, remainder = key.partition("/")
            # An output's name may also contain a slash.
            parts = remainder.rsplit("/", 2)
            if prefix != _METRICS_PREFIX or len(parts) != 3:
                continue
            name, label, prediction = parts
            if label in CLASSES and prediction in _PREDICTIONS:
                table = by_output.setdefault(name, np.zeros((3, 4), np.int64))
                cell = CLASSES.index(label), _PREDICTIONS.index(prediction)
                table[cell] = round(value)
        return cls(by_output)

    def scores(self) -> dict[str, Any]:
        """Return the scores defined in the module's docstring, all as fractions.

        Returns:
            "macro", "micro": {precision, recall, f1, support}.
            "present": {"macro", "micro"}, each with the same measures.
            "outputs": the number of outputs in "macro". "by_output": by output, "macro"
            and each class that occurs: {precision, recall, f1, support, predicted}. An
            output without labels and predictions is left out.
        """
        tables = [np.asarray(table, np.float64) for table in self.by_output.values()]
        table = np.stack(tables) if tables else np.zeros((0, 3, 4))
        right, predicted, gold = _sum_table(table)  # (outputs, 3 classes) each
        by_class = _compute_scores(
            right, predicted, gold
        )  # (outputs, 3 classes, 3 measures)
        occurs = _find_occurring(table)
        by_output: dict[str, Any] = {}
        for row, name in enumerate(self.by_output):
            if not occurs[row].any():
                continue
            macro = _average(by_class[row], occurs[row], 0)
            scores: dict[str, Any] = {"macro": _name_measures(macro, gold[row].sum())}
            for label in np.flatnonzero(occurs[row]):
                scores[CLASSES[label]] = {
                    **_name_measures(by_class[row, label], gold[row, label]),
                    "predicted": int(predicted[row, label]),
                }
            by_output[name] = scores

        present_macro = _average(by_class[:, PRESENT], occurs[:, PRESENT], 0)
        present_gold = gold[:, PRESENT].sum()
        present_micro = _compute_scores(
            right[:, PRESENT].sum(), predicted[:, PRESENT].sum(), present_gold
        )
        micro = _compute_scores(right.sum(), predicted.sum(), gold.sum())
        return {
            "macro": _name_measures(_average_macro(table), gold.sum()),
            "micro": _name_measures(micro, gold.sum()),
            "present": {
                "macro": _name_measures(present_macro, present_gold),
                "micro": _name_measures(present_micro, present_gold),
            },
            "outputs": len(by_output),
            "by_output": by_output,
        }


# ---- scores of resampled patients ----------------------------------------------------


def draw_weights(units: int, samples: int, seed: int) -> Iterator[Floats]:
    """Draw units with replacement; yield how often each one is drawn.

    The draws are `rng.integers(0, units, (samples, units))` of
    `numpy.random.default_rng(seed)`.

    Args:
        units: Number of units.
        samples: Number of resamples.
        seed: Seed of the draws.

    Yields:
        (resamples, units) for some resamples at a time, until all have been drawn.
    """
    rng = np.random.default_rng(seed)
    rows = max(1, _CHUNK // units)
    for start in range(0, samples, rows):
        size = min(rows, samples - start)
        draws = rng.integers(0, units, (size, units))
        draws += np.arange(size)[:, None] * units  # each resample has its own bins
        counts = np.bincount(draws.ravel(), minlength=size * units)
        yield counts.reshape(size, units).astype(np.float64)


def compute_macro_f1(
    labels: NDArray[Any],
    classes: Sequence[Sequence[int]] | None,
    predicted: NDArray[Any],
    weights: Floats,
) -> Floats:
    """Return macro F1 of predictions, (draws,).

    Args:
        labels: (patients, outputs).
        classes: As in `ClassCounts.of`.
        predicted: (patients, outputs).
        weights: (draws, patients) how often each patient counts.
    """
    outputs = labels.shape[1]
    cells = _number_cells(labels, predicted, outputs, classes)
    is_in_cell = cells[:, :, None] == np.arange(_CELLS)
    ones = is_in_cell.reshape(len(cells), -1).astype(np.float64)
    tables = (weights @ ones).reshape(len(weights), outputs, 3, 4)
    return _average_macro(tables)[..., _MEASURES.index("f1")]


def compute_macro_measures(
    labels: NDArray[Any],
    classes: Sequence[Sequence[int]] | None,
    predicted: NDArray[Any],
) -> dict[str, float]:
    """Return macro precision, recall and F1 of predictions.

    Args:
        labels: (patients, outputs).
        classes: As in `ClassCounts.of`.
        predicted: (patients, outputs).
    """
    outputs = labels.shape[1]
    cells = _number_cells(labels, predicted, outputs, classes)  # (patients, outputs)
    counts = (cells[:, :, None] == np.arange(_CELLS)).sum(axis=0).astype(np.float64)
    measures = _average_macro(counts.reshape(1, outputs, 3, 4))[0]
    return dict(zip(_MEASURES, measures.tolist(), strict=True))


def compute_macro_auroc(
    labels: NDArray[Any], scores: NDArray[Any], weights: Floats
) -> Floats:
    """Return macro AUROC over the outputs with both classes in a draw, (draws,).

    Args:
        labels: (patients, outputs).
        scores: (patients, outputs).
        weights: (draws, patients) how often each patient counts.
    """
    auroc = _compute_areas(labels, scores, weights)[..., :1]  # (draws, outputs, 1)
    return _average(np.nan_to_num(auroc), ~np.isnan(auroc[..., 0]), -2)[..., 0]


# ---- rankings ------------------------------------------------------------------------


def measure_rankings(
    labels: NDArray[Any],
    scores: NDArray[Any],
    outputs: Sequence[str],
    samples: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """Compute AUROC and AUPRC with 95 % bootstrap intervals over patients.

    The draws are the same for all outputs. A draw without both classes of an output is
    ignored for that output.

    Args:
        labels: (patients, outputs).
        scores: (patients, outputs); only their order matters.
        outputs: The names of the outputs.
        samples: Number of resamples; 0 computes no intervals.
        seed: Seed of the draws.

    Returns:
        "macro": "auroc" and "auprc" as {value, low, high}: the mean over the "outputs"
        that have both classes.
        "by_output": by output, the same, with the numbers of patients "present" and
        "absent". Undefined numbers are None.

    Raises:
        DataError: Shapes do not agree, or a score is not finite.
    """
    labels = np.asarray(labels)
    scores = np.asarray(scores, np.float64)
    _require_same_shape(labels, scores, "scores", len(outputs))
    if not np.isfinite(scores).all():
        raise DataError("a score is not a finite number, so it cannot be ranked")
    patients = len(labels)
    weights = [np.ones((1, patients))]  # first, the observed patients
    if samples and patients:
        weights += draw_weights(patients, samples, seed)
    # (1 + samples, outputs, 2)
    areas = np.concatenate([_compute_areas(labels, scores, each) for each in weights])
    by_output = {
        name: {
            **_compute_intervals(areas[:, column]),
            "present": int((labels[:, column] == PRESENT).sum()),
            "absent": int((labels[:, column] == ABSENT).sum()),
        }
        for column, name in enumerate(outputs)
    }
    exists = ~np.isnan(areas[..., 0])
    counts = exists & exists[0]  # outputs included in each draw
    macro = _average(np.nan_to_num(areas), counts, 1)
    macro[~counts.any(axis=1)] = np.nan
    return {
        "macro": {**_compute_intervals(macro), "outputs": int(exists[0].sum())},
        "by_output": by_output,
    }


def _compute_areas(
    labels: NDArray[Any], scores: NDArray[Any], weights: Floats
) -> Floats:
    """Return AUROC and AUPRC, (draws, outputs, 2).

    AUROC is the probability that a present patient scores higher than an absent one; a
    tie counts half. AUPRC is average precision: Σ (recall_i − recall_{i−1}) ·
    precision_i over the distinct scores. Without present or absent patients, both are
    nan.

    Args:
        labels: (patients, outputs).
        scores: (patients, outputs).
        weights: (draws, patients) how often each patient counts.
    """
    areas = np.full((len(weights), labels.shape[1], 2), np.nan)
    for output in range(labels.shape[1]):
        label = labels[:, output]
        score = np.asarray(scores[:, output], np.float64)
        ranked = np.flatnonzero((label == ABSENT) | (label == PRESENT))
        if not len(ranked):
            continue
        order = ranked[np.argsort(-score[ranked], kind="stable")]
        falling = score[order]
        is_new_score = np.append(True, falling[1:] != falling[:-1])
        ties = np.flatnonzero(is_new_score)  # where each group of equal scores begins
        counts = weights[:, order]
        is_present = label[order] == PRESENT
        # (draws, distinct scores)
        positive = np.add.reduceat(counts * is_present, ties, axis=1)
        negative = np.add.reduceat(counts * ~is_present, ties, axis=1)
        positive_so_far = positive.cumsum(1)
        all_so_far = (positive + negative).cumsum(1)
        all_positive = positive_so_far[:, -1]
        pairs = all_positive * negative.sum(1)
        pairs_in_order = (negative * (positive_so_far - positive / 2)).sum(1)
        auroc = ratio(pairs_in_order, pairs)
        precision = ratio(positive_so_far, all_so_far)
        auprc = ratio((positive * precision).sum(1), all_positive)
        both = np.stack([auroc, auprc], axis=1)
        areas[:, output] = np.where(pairs[:, None] > 0, both, np.nan)
    return areas


def _compute_intervals(areas: Floats) -> dict[str, Any]:
    """Return value, low and high of both areas.

    Args:
        areas: (1 + draws, 2), with those of the observed patients first.
    """
    intervals: dict[str, Any] = {}
    for name, values in zip(_AREAS, areas.T.tolist(), strict=True):
        observed = values[0]
        drawn = [value for value in values[1:] if not np.isnan(value)]
        if np.isnan(observed):
            intervals[name] = {"value": None, "low": None, "high": None}
            continue
        low = None
        high = None
        if drawn:
            low, high = np.quantile(drawn, (0.025, 0.975)).tolist()
        intervals[name] = {"value": observed, "low": low, "high": high}
    return intervals


# ---- from counts to scores -----------------------------------------------------------


def _require_same_shape(
    labels: NDArray[Any], values: NDArray[Any], name: str, outputs: int
) -> None:
    """Raise DataError unless labels and values are (patients, outputs).

    Args:
        labels: The labels.
        values: The predictions or scores.
        name: The name of the values in the message.
        outputs: The number of outputs.
    """
    if labels.shape != values.shape or labels.ndim != 2 or labels.shape[1] != outputs:
        raise DataError(
            f"labels {labels.shape} and {name} {values.shape} for {outputs} outputs: "
            "both must be (patients, outputs)"
        )


def _number_cells(
    labels: NDArray[Any],
    predicted: NDArray[Any],
    outputs: int,
    classes: Sequence[Sequence[int]] | None,
) -> NDArray[np.int64]:
    """Return the cell of each pair of patient and output in a confusion table.

    Args:
        labels: (patients, outputs).
        predicted: (patients, outputs).
        outputs: The number of outputs.
        classes: As in `ClassCounts.of`.

    Returns:
        (patients, outputs) 4 · label + prediction; -1 for ignored pairs.

    Raises:
        DataError: Shapes do not agree, or a value is not a label.
    """
    label = np.asarray(labels).astype(np.int64)
    prediction = np.asarray(predicted).astype(np.int64)
    _require_same_shape(label, prediction, "predictions", outputs)
    for what, values in (("label", label), ("prediction", prediction)):
        is_valid = not values.size or -1 <= values.min() <= values.max() <= 2
        if not is_valid:
            raise DataError(f"a {what} is not one of -1, 0, 1, 2")
    counts = label >= 0
    if classes is not None:
        if len(classes) != outputs:
            raise DataError(f"classes of {len(classes)} outputs for {outputs}")
        has_class = np.array(
            [[value in each for value in range(3)] for each in classes], bool
        ).reshape(-1, 3)
        counts &= has_class[np.arange(outputs), np.maximum(label, 0)]
    column = np.where(prediction < 0, 3, prediction)
    return np.where(counts, 4 * label + column, -1)


def _sum_table(table: Floats) -> tuple[Floats, Floats, Floats]:
    """Return correct, predicted and labelled counts; (…, 3, 4) → (…, 3 classes)."""
    right = np.diagonal(table[..., :3], axis1=-2, axis2=-1)
    return right, table[..., :3].sum(-2), table.sum(-1)


def _compute_scores(right: Any, predicted: Any, gold: Any) -> Floats:
    """Return precision, recall and F1 along a new last axis."""
    f1 = ratio(2 * right, predicted + gold)
    return np.stack([ratio(right, predicted), ratio(right, gold), f1], axis=-1)


def _find_occurring(table: Floats) -> NDArray[np.bool_]:
    """Return which classes are in labels or predictions; (…, 3, 4) → (…, 3)."""
    return np.asarray((table.sum(-1) > 0) | (table[..., :3].sum(-2) > 0))


def _average_macro(table: Floats) -> Floats:
    """Return macro scores: the mean over occurring classes, then over labelled outputs.

    Args:
        table: (…, outputs, 3, 4) counts.

    Returns:
        (…, 3) precision, recall and F1.
    """
    occurs = _find_occurring(table)
    right, predicted, gold = _sum_table(table)
    by_class = _compute_scores(right, predicted, gold)
    by_output = _average(by_class, occurs, -2)  # [phenotype macro]
    return _average(by_output, np.asarray(occurs.any(-1)), -2)  # [phenotype macro]


def _average(values: Floats, counts: NDArray[np.bool_], axis: int) -> Floats:
    """Return the mean over the included entries; 0 if there are none.

    Args:
        values: (…, n, measures).
        counts: (…, n) whether to include each entry.
        axis: The axis of n in `values`.
    """
    axis = axis if axis < 0 else axis - values.ndim
    total = (values * counts[..., None]).sum(axis)
    number = counts[..., None].sum(axis)
    return ratio(total, np.broadcast_to(number, total.shape))


def ratio(top: Any, bottom: Any) -> Floats:
    """Return top / bottom; 0 where the bottom is 0."""
    top = np.asarray(top, np.float64)
    bottom = np.asarray(bottom, np.float64)
    out: Floats = np.zeros(np.broadcast(top, bottom).shape)
    return np.divide(top, bottom, out=out, where=bottom > 0)


def _name_measures(scores: Floats, support: float) -> dict[str, float | int]:
    """Return precision, recall and F1 by name, with the support."""
    named: dict[str, float | int] = dict(zip(_MEASURES, scores.tolist(), strict=True))
    named["support"] = int(support)
    return named
