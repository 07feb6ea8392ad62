"""How well labels are predicted: scores of classes from counts that add, and of
rankings.

Labels are 1 present, 0 absent, 2 questionable and -1 unlabelled; an unlabelled pair of
patient and output counts nowhere. With an output's precision, recall and F1 of each
class:

    macro    the mean over the output's classes, then over outputs (Liu, Dligach and Miller
             2019, Tables 2 and 3). F1 is a mean of F1s. A class counts where it occurs in labels
             or predictions, as in scikit-learn; an output without a labelled patient is left out.
    micro    all classes and outputs together.
    present  of the class "present" alone: micro over outputs, and macro over the outputs where
             it occurs in labels or predictions.

A score whose denominator is zero is 0.0 (scikit-learn's zero_division=0). AUROC and
AUPRC rank the patients who are present against those who are absent; where an output
lacks one of the two they do not exist (None).
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
_PREDICTED: Final = (*CLASSES, "none")  # "none": the prediction was -1
_SCORES: Final = ("precision", "recall", "f1")
_HEAD: Final = "classes"  # of the keys in `to_metrics`
_CHUNK = 4_000_000  # drawn indices held at once: 32 MB


@dataclass(frozen=True, slots=True, eq=False)
class ClassCounts:
    """How often which label was predicted as which. `ClassCounts()` is zero; counts
    add.

    by_output: name → (3, 4) int64 [label, prediction]; the last column is "no
        prediction".
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
        """Compare predictions with labels, each (patients, outputs).

        classes: of each output; a pair whose label is none of them does not count (the
        paper leaves questionable patients out of the test where there are too few).
        Raises DataError where shapes do not agree or a value is no label.
        """
        cells = _cells(labels, predicted, len(outputs), classes)
        counted = (np.bincount(column[column >= 0], minlength=12) for column in cells.T)
        tables = (np.asarray(each, np.int64).reshape(3, 4) for each in counted)
        return cls(dict(zip(outputs, tables, strict=True)))

    def __add__(self, other: ClassCounts) -> ClassCounts:
        zero = np.zeros((3, 4), np.int64)
        names = dict.fromkeys((*self.by_output, *other.by_output))
        both = (self.by_output, other.by_output)
        return ClassCounts(
            {n: both[0].get(n, zero) + both[1].get(n, zero) for n in names}
        )

    def to_metrics(self) -> dict[str, float]:
        """Flat counts that add under `Total`: {"classes/Gout/present/absent": 3.0,
        ...}.

        The keys depend on the outputs alone, so they do not show what a site lacks.
        """
        return {
            f"{_HEAD}/{name}/{label}/{prediction}": float(table[i, j])
            for name, table in self.by_output.items()
            for i, label in enumerate(CLASSES)
            for j, prediction in enumerate(_PREDICTED)
        }

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, float]) -> ClassCounts:
        """The inverse of `to_metrics`; keys of other origin are left alone."""
        found: dict[str, NDArray[np.int64]] = {}
        for key, value in metrics.items():
            head, _, rest = key.partition("/")
            # an output's name may hold a slash itself
            name, *ends = rest.rsplit("/", 2)
            if head != _HEAD or len(ends) != 2:
                continue
            if ends[0] in CLASSES and ends[1] in _PREDICTED:
                table = found.setdefault(name, np.zeros((3, 4), np.int64))
                table[CLASSES.index(ends[0]), _PREDICTED.index(ends[1])] = round(value)
        return cls(found)

    def scores(self) -> dict[str, Any]:
        """Scores as the module's head defines them, all of them fractions.

        {"macro" | "micro": {precision, recall, f1, support}, "present": {"macro" |
        "micro": {...}}, "outputs": how many count in "macro", "by_output": {name:
        {"macro": {...}, "absent" | "present" | "questionable": {precision, recall, f1,
        support, predicted}}}}. A class that does not occur is not in `by_output`, nor
        is an output without labels.
        """
        tables = [np.asarray(table, np.float64) for table in self.by_output.values()]
        table = np.stack(tables) if tables else np.zeros((0, 3, 4))
        right, predicted, gold = sums = _sums(table)  # (outputs, 3 classes) each
        by_class = _scores(*sums)  # (outputs, 3 classes, 3 scores)
        occurs = _occurs(table)
        by_output: dict[str, Any] = {}
        for row, name in enumerate(self.by_output):
            if occurs[row].any():
                macro = _mean(by_class[row], occurs[row], 0)
                by_output[name] = {"macro": _named(macro, gold[row].sum())}
                for c in np.flatnonzero(occurs[row]):
                    own = _named(by_class[row, c], gold[row, c])
                    by_output[name][CLASSES[c]] = own | {
                        "predicted": int(predicted[row, c])
                    }
        of_present = _mean(by_class[:, PRESENT], occurs[:, PRESENT], 0)
        present = [each[:, PRESENT].sum() for each in sums]
        return {
            "macro": _named(_macro(table), gold.sum()),
            "micro": _named(
                _scores(right.sum(), predicted.sum(), gold.sum()), gold.sum()
            ),
            "present": {
                "macro": _named(of_present, present[2]),
                "micro": _named(_scores(*present), present[2]),
            },
            "outputs": len(by_output),
            "by_output": by_output,
        }


# ---- scores of drawn patients: (draws, patients), how often each counts → (draws,) ---


def weights(units: int, samples: int, seed: int) -> Iterator[Floats]:
    """How often each unit is drawn: (some resamples, units), all resamples in turn.

    The draws are `rng.integers(0, n, (samples, n))` of
    `numpy.random.default_rng(seed)`.
    """
    rng = np.random.default_rng(seed)
    rows = max(1, _CHUNK // units)
    for begin in range(0, samples, rows):
        size = min(rows, samples - begin)
        draws = rng.integers(0, units, (size, units))
        # each resample has its own range of bins
        draws += np.arange(size)[:, None] * units
        counts = np.bincount(draws.ravel(), minlength=size * units)
        yield counts.reshape(size, units).astype(np.float64)


def macro_f1(
    labels: NDArray[Any],
    classes: Sequence[Sequence[int]] | None,
    predicted: NDArray[Any],
    drawn: Floats,
) -> Floats:
    """Macro F1 of predictions, each (patients, outputs). classes: as `ClassCounts.of`."""
    outputs = labels.shape[1]
    cells = _cells(labels, predicted, outputs, classes)
    ones = (
        (cells[:, :, None] == np.arange(12)).reshape(len(cells), -1).astype(np.float64)
    )
    return _macro((drawn @ ones).reshape(len(drawn), outputs, 3, 4))[..., 2]


def macro_measures(
    labels: NDArray[Any],
    classes: Sequence[Sequence[int]] | None,
    predicted: NDArray[Any],
) -> dict[str, float]:
    """Return macro precision, recall and F1 of predictions, each (patients, outputs).

    Args:
        labels: (patients, outputs).
        classes: As of `ClassCounts.of`.
        predicted: (patients, outputs).
    """
    outputs = labels.shape[1]
    cells = _cells(labels, predicted, outputs, classes)  # (patients, outputs)
    ones = (cells[:, :, None] == np.arange(12)).sum(axis=0).astype(np.float64)
    measures = _macro(ones.reshape(1, outputs, 3, 4))[0]
    return dict(zip(("precision", "recall", "f1"), measures.tolist(), strict=True))


def macro_auroc(labels: NDArray[Any], scores: NDArray[Any], drawn: Floats) -> Floats:
    """Macro AUROC of scores (patients, outputs), over the outputs to which a draw
    leaves both classes."""
    found = _ranked(labels, scores, drawn)[..., :1]  # (draws, outputs, 1)
    return _mean(np.nan_to_num(found), ~np.isnan(found[..., 0]), -2)[..., 0]


# ---- rankings ------------------------------------------------------------------------


def rankings(
    labels: NDArray[Any],
    scores: NDArray[Any],
    outputs: Sequence[str],
    samples: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """AUROC and AUPRC with 95 % bootstrap intervals over patients.

    labels, scores: (patients, outputs); scores only rank. {"macro": {"auroc" | "auprc":
    {value, low, high}, "outputs": n}, "by_output": {name: {"auroc" | "auprc": {...},
    "present": n, "absent": n}}}. Macro: the mean over the outputs that have both
    classes. Draws are the same for all outputs; one that lacks a class of an output
    does not count for that output. Numbers that do not exist are None. samples = 0: no
    intervals.
    Raises DataError where shapes do not agree or a score is not finite.
    """
    labels, scores = np.asarray(labels), np.asarray(scores, np.float64)
    _require_like(labels, scores, "scores", len(outputs))
    if not np.isfinite(scores).all():
        raise DataError("a score is not a finite number, it has no place in a ranking")
    patients = len(labels)
    draws = weights(patients, samples, seed) if samples and patients else ()
    # (1 + samples, outputs, 2): as observed, then drawn
    found = np.concatenate(
        [_ranked(labels, scores, w) for w in (np.ones((1, patients)), *draws)]
    )
    by_output = {
        name: _intervals(found[:, c])
        | {
            "present": int((labels[:, c] == 1).sum()),
            "absent": int((labels[:, c] == 0).sum()),
        }
        for c, name in enumerate(outputs)
    }
    exists = ~np.isnan(found[..., 0])
    counting = exists & exists[0]  # the outputs that count, in every draw
    macro = _mean(np.nan_to_num(found), counting, 1)
    macro[~counting.any(axis=1)] = np.nan
    return {
        "macro": {**_intervals(macro), "outputs": int(exists[0].sum())},
        "by_output": by_output,
    }


def _ranked(labels: NDArray[Any], scores: NDArray[Any], drawn: Floats) -> Floats:
    """(draws, outputs, 2) AUROC and AUPRC; drawn: (draws, patients), how often each
    counts.

    AUROC: the chance that a present patient scores higher than an absent one; a tie
    counts half. AUPRC, average precision: Σ (recall_i - recall_{i-1}) · precision_i
    over the distinct scores. Both nan without present or without absent patients.
    """
    found = np.full((len(drawn), labels.shape[1], 2), np.nan)
    for output, (own, score) in enumerate(zip(labels.T, scores.T, strict=True)):
        kept = np.flatnonzero((own == 0) | (own == 1))
        if not len(kept):
            continue
        order = kept[np.argsort(-np.asarray(score, np.float64)[kept], kind="stable")]
        falling = score[order]
        # of each tie
        first = np.flatnonzero(np.append(True, falling[1:] != falling[:-1]))
        counts, present = drawn[:, order], own[order] == 1
        # (draws, distinct scores)
        positive = np.add.reduceat(counts * present, first, axis=1)
        negative = np.add.reduceat(counts * ~present, first, axis=1)
        above, all_above = positive.cumsum(1), (positive + negative).cumsum(1)
        pairs = above[:, -1] * negative.sum(1)
        beaten = (negative * (above - positive / 2)).sum(1)
        area = ratio((positive * ratio(above, all_above)).sum(1), above[:, -1])
        both = np.stack([ratio(beaten, pairs), area], axis=1)
        found[:, output] = np.where(pairs[:, None] > 0, both, np.nan)
    return found


def _intervals(values: Floats) -> dict[str, Any]:
    """(1 + draws, 2), the observed ones first → value, low and high of both areas."""
    found = {}
    for name, (observed, *drawn) in zip(
        ("auroc", "auprc"), values.T.tolist(), strict=True
    ):
        known = [value for value in drawn if not np.isnan(value)]
        exists = not np.isnan(observed)
        low, high = (
            np.quantile(known, (0.025, 0.975)).tolist()
            if exists and known
            else (None, None)
        )
        found[name] = {"value": observed if exists else None, "low": low, "high": high}
    return found


# ---- sums → scores -------------------------------------------------------------------


def _require_like(
    labels: NDArray[Any], said: NDArray[Any], what: str, outputs: int
) -> None:
    if labels.shape != said.shape or labels.ndim != 2 or labels.shape[1] != outputs:
        told = f"labels {labels.shape} and {what} {said.shape} for {outputs} outputs"
        raise DataError(f"{told}: both must be (patients, outputs)")


def _cells(
    labels: NDArray[Any],
    predicted: NDArray[Any],
    outputs: int,
    classes: Sequence[Sequence[int]] | None,
) -> NDArray[np.int64]:
    """(patients, outputs) 4 · label + prediction, -1 where the pair does not count."""
    given, said = (
        np.asarray(labels).astype(np.int64),
        np.asarray(predicted).astype(np.int64),
    )
    _require_like(given, said, "predictions", outputs)
    for what, values in (("label", given), ("prediction", said)):
        if values.size and not -1 <= values.min() <= values.max() <= 2:
            raise DataError(f"a {what} is none of -1, 0, 1, 2")
    counts = given >= 0
    if classes is not None:
        if len(classes) != outputs:
            raise DataError(f"classes of {len(classes)} outputs for {outputs}")
        table = np.array(
            [[c in each for c in range(3)] for each in classes], bool
        ).reshape(-1, 3)
        counts &= table[np.arange(outputs), np.maximum(given, 0)]
    return np.where(counts, 4 * given + np.where(said < 0, 3, said), -1)


def _sums(table: Floats) -> tuple[Floats, Floats, Floats]:
    """(…, 3, 4) → (…, 3 classes) each: rightly predicted, predicted, labelled."""
    right = np.diagonal(table[..., :3], axis1=-2, axis2=-1)
    return right, table[..., :3].sum(-2), table.sum(-1)


def _scores(right: Any, predicted: Any, gold: Any) -> Floats:
    """(…) each → (…, precision and recall and F1)."""
    f1 = ratio(2 * right, predicted + gold)
    return np.stack([ratio(right, predicted), ratio(right, gold), f1], axis=-1)


def _occurs(table: Floats) -> NDArray[np.bool_]:
    """(…, 3, 4) → (…, 3): which classes are in labels or predictions."""
    return np.asarray((table.sum(-1) > 0) | (table[..., :3].sum(-2) > 0))


def _macro(table: Floats) -> Floats:
    """(…, outputs, 3, 4) → (…, 3): mean over classes that occur, then over labelled
    outputs."""
    occurs = _occurs(table)
    right, predicted, gold = _sums(table)
    # [phenotype macro]
    by_output = _mean(_scores(right, predicted, gold), occurs, -2)
    return _mean(by_output, np.asarray(occurs.any(-1)), -2)  # [phenotype macro]


def _mean(values: Floats, counts: NDArray[np.bool_], axis: int) -> Floats:
    """Mean of values (…, n, scores) over the n that count (…, n); 0 where none does."""
    axis = axis if axis < 0 else axis - values.ndim
    total = (values * counts[..., None]).sum(axis)
    return ratio(total, np.broadcast_to(counts[..., None].sum(axis), total.shape))


def ratio(top: Any, bottom: Any) -> Floats:
    """top / bottom, 0 where the bottom is."""
    top, bottom = np.asarray(top, np.float64), np.asarray(bottom, np.float64)
    out: Floats = np.zeros(np.broadcast(top, bottom).shape)
    return np.divide(top, bottom, out=out, where=bottom > 0)


def _named(scores: Floats, support: float) -> dict[str, float | int]:
    return {**dict(zip(_SCORES, scores.tolist(), strict=True)), "support": int(support)}
