"""Count which types a model confuses with each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fednotes.apps.ui.review import Item

_MAX_FREQUENT = 5  # most frequent confusions that are listed
_SHADES = 5  # number of shades in the style sheet


class ConfusionCell(NamedTuple):
    """A cell of the matrix.

    Attributes:
        annotated: The annotated type; None where nothing is annotated.
        predicted: The predicted type; None where nothing is predicted.
        number: The number of mentions.
        share: Their share of all mentions of the row; 0 for an empty row.
    """

    annotated: str | None
    predicted: str | None
    number: int
    share: float

    @property
    def is_agreement(self) -> bool:
        """Whether annotation and prediction have the same type."""
        return self.annotated == self.predicted

    @property
    def shade(self) -> int:
        """The shade of the cell, from 0 (none) to 5 (the whole row)."""
        return 0 if not self.number else max(1, round(self.share * _SHADES))


@dataclass(frozen=True)
class Confusion:
    """A matrix of annotated against predicted types.

    Boundaries do not matter: a mention counts as confused only if its type is wrong.

    Attributes:
        labels: The types, sorted; rows and columns follow this order.
        counts: Annotated type and predicted type → number of mentions; None stands for
            no mention.
    """

    labels: tuple[str, ...]
    counts: Counter[tuple[str | None, str | None]]

    def list_cells(self, annotated: str | None) -> list[ConfusionCell]:
        """Return the cells of a row: each predicted type, then "missed".

        The row of None, predictions where nothing is annotated, has no such last cell.
        """
        predicted: list[str | None] = [*self.labels]
        if annotated is not None:
            predicted.append(None)
        total = sum(self.counts[annotated, label] for label in predicted)
        return [
            ConfusionCell(
                annotated,
                label,
                self.counts[annotated, label],
                self.counts[annotated, label] / max(1, total),
            )
            for label in predicted
        ]

    def list_most_frequent(self) -> list[ConfusionCell]:
        """Return the most frequent confusions of one type with another."""
        cells = [
            cell
            for label in self.labels
            for cell in self.list_cells(label)
            if cell.number and cell.predicted is not None and not cell.is_agreement
        ]
        return sorted(cells, key=lambda cell: -cell.number)[:_MAX_FREQUENT]


def count_confusions(items: Iterable[Item], labels: Sequence[str]) -> Confusion:
    """Return the matrix of some mentions.

    Args:
        items: The mentions.
        labels: The types, sorted.
    """
    counts = Counter(
        (
            None if item.gold is None else item.gold.label,
            None if item.predicted is None else item.predicted.label,
        )
        for item in items
    )
    return Confusion(tuple(labels), counts)
