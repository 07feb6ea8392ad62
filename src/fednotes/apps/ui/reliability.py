"""The reliability of a model's confidences, as a diagram and in words."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from fednotes.apps.ui.review import ReviewedNotes
from fednotes.core.errors import DataError
from fednotes.metrics.calibration import (
    Reliability,
    compute_wilson_interval,
    judge_spans,
)

# A mean confidence that differs less from the share of correct mentions is accurate.
_ACCURATE = 0.02

# Size of the diagram, and the edges of its plot.
_WIDTH, _HEIGHT = 460, 430
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 436, 28, 384


class JudgedMentions(NamedTuple):
    """Confidences and whether the predictions were right, (mentions,) each."""

    confidences: np.ndarray
    is_right: np.ndarray


class BinRow(NamedTuple):
    """One bin of the diagram.

    Attributes:
        low: Lower edge, as a fraction.
        high: Upper edge.
        mentions: The number of mentions.
        confidence: Their mean confidence.
        right: The share of correct ones.
        interval: The 95 % interval of that share.
    """

    low: float
    high: float
    mentions: int
    confidence: float
    right: float
    interval: tuple[float, float]


class TypeRow(NamedTuple):
    """The reliability of the confidences of one type.

    Attributes:
        label: The type.
        mentions: The number of predicted mentions.
        confidence: Their mean confidence.
        right: The share of correct ones.
        ece: The expected calibration error.
    """

    label: str
    mentions: int
    confidence: float
    right: float
    ece: float


def judge_confidences(
    sources: Sequence[ReviewedNotes], labels: Collection[str]
) -> JudgedMentions | None:
    """Return the confidences of predicted mentions, as `fednotes calibrate` does.

    Args:
        sources: The notes.
        labels: The types to include.

    Returns:
        None if the notes have no annotation or the model predicts nothing.
    """
    gold = list(chain.from_iterable(source.gold for source in sources))
    predicted = list(chain.from_iterable(source.predicted for source in sources))
    if not any(document.spans for document in gold):
        return None
    try:
        confidences, is_right, _ = judge_spans(gold, predicted, labels)
    except DataError:  # nothing is predicted
        return None
    return JudgedMentions(confidences, is_right)


def measure_types(
    sources: Sequence[ReviewedNotes], labels: Sequence[str]
) -> list[TypeRow]:
    """Return the reliability of each type that the model predicts."""
    rows = []
    for label in labels:
        judged = judge_confidences(sources, {label})
        if judged is not None:
            measured = Reliability.of(*judged, documents=0)
            rows.append(
                TypeRow(
                    label,
                    measured.spans,
                    float(judged.confidences.mean()),
                    float(judged.is_right.mean()),
                    measured.ece,
                )
            )
    return rows


def list_bins(reliability: Reliability) -> list[BinRow]:
    """Return the bins that are not empty, with intervals."""
    return [
        BinRow(
            each.low,
            each.high,
            each.spans,
            each.confidence,
            each.right,
            compute_wilson_interval(each.right, each.spans),
        )
        for each in reliability.bins
    ]


def describe_confidence(judged: JudgedMentions) -> str:
    """Return in words whether a model is too confident."""
    confidence = float(judged.confidences.mean())
    right = float(judged.is_right.mean())
    facts = (
        f"The mean confidence is {_format_percent(confidence)}, and "
        f"{_format_percent(right)} of the predictions are correct"
    )
    difference = confidence - right
    if abs(difference) < _ACCURATE:
        return f"{facts}: on average, the model’s confidences are accurate."
    if difference > 0:
        return f"{facts}: the model is too confident."
    return f"{facts}: the model is not confident enough."


def _format_percent(share: float) -> str:
    """Return a fraction as text, in percent."""
    return f"{100 * share:.0f} %"


class DiagramMark(NamedTuple):
    """A bin on the diagram, in its coordinates.

    Attributes:
        x: The mean confidence.
        y: The share of correct mentions.
        low: The lower end of the interval.
        high: The upper end.
        radius: The radius of the circle; its area grows with the number of mentions.
        text: What the bin says, for a tooltip.
    """

    x: float
    y: float
    low: float
    high: float
    radius: float
    text: str


@dataclass(frozen=True)
class Diagram:
    """A reliability diagram in coordinates.

    Attributes:
        marks: The bins.
        ticks: Coordinates and text of each tick, the same on both axes.
        things: What a bin contains, such as "mentions".
        x_label: The meaning of the horizontal axis.
        y_label: The meaning of the vertical axis.
        description: What it shows, for people who cannot see it.
    """

    marks: list[DiagramMark]
    ticks: list[tuple[float, float, str]]
    things: str
    x_label: str
    y_label: str
    description: str
    width: int = _WIDTH
    height: int = _HEIGHT
    left: int = _LEFT
    right: int = _RIGHT
    top: int = _TOP
    bottom: int = _BOTTOM

    @property
    def title(self) -> str:
        """The title of the diagram."""
        return f"Share of {self.things} that are {self.y_label}, by {self.x_label}"


def draw_mention_bins(bins: Sequence[BinRow]) -> Diagram:
    """Return the diagram of confidences in mentions."""
    return _draw_bins(bins, "mentions", "mean confidence", "correct")


def draw_patient_bins(bins: Sequence[BinRow]) -> Diagram:
    """Return the diagram of the probabilities that phenotypes are present."""
    return _draw_bins(bins, "labels", "mean probability", "present")


def _draw_bins(
    bins: Sequence[BinRow], things: str, x_label: str, y_label: str
) -> Diagram:
    """Return the diagram of some bins.

    Args:
        bins: The bins.
        things: What a bin contains.
        x_label: The meaning of the horizontal axis.
        y_label: The meaning of the vertical axis.
    """
    largest = max(each.mentions for each in bins)
    texts = [
        f"{each.mentions:,} {things}: {x_label} {_format_percent(each.confidence)}, "
        f"{_format_percent(each.right)} {y_label}"
        for each in bins
    ]
    marks = [
        _make_mark(each, largest, text) for each, text in zip(bins, texts, strict=True)
    ]
    shares = [step / 5 for step in range(6)]
    ticks = [(_to_x(share), _to_y(share), _format_percent(share)) for share in shares]
    return Diagram(marks, ticks, things, x_label, y_label, "; ".join(texts))


def _make_mark(row: BinRow, largest: int, text: str) -> DiagramMark:
    """Return the mark of a bin.

    Args:
        row: The bin.
        largest: The number of things in the largest bin.
        text: What the bin says.
    """
    low, high = row.interval
    return DiagramMark(
        _to_x(row.confidence),
        _to_y(row.right),
        _to_y(low),
        _to_y(high),
        round(3 + 5 * (row.mentions / largest) ** 0.5, 1),
        text,
    )


def _to_x(share: float) -> float:
    """Return the horizontal coordinate of a fraction."""
    return round(_LEFT + share * (_RIGHT - _LEFT), 1)


def _to_y(share: float) -> float:
    """Return the vertical coordinate of a fraction."""
    return round(_BOTTOM - share * (_BOTTOM - _TOP), 1)
