"""The table of the models that were scored at left-out sites.

Runs and seeds have the same scores, except that those of seeds are a mean and a
standard deviation: see `RunResult.left_out` and `SeedsResult.left_out`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from fednotes.core.parsing import find_number

ScoresOfSite = Mapping[str, Mapping[str, Any]]  # by model
# Largest number of cells in a table: a report shows each of them.
MAX_CELLS = 100_000


def _require_few_cells(
    left_out: dict[str, dict[str, dict[str, Any]]],
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the scores at left-out sites.

    Raises:
        PydanticCustomError: Their table has more cells than a report can show.
    """
    models = {name for scores in left_out.values() for name in scores}
    if len(left_out) * len(models) > MAX_CELLS:
        message = (
            f"{len(left_out):,} sites and {len(models):,} models make a table of more "
            f"than {MAX_CELLS:,} cells, which fednotes never writes, so the file is "
            "damaged: copy the run's folder again"
        )
        raise PydanticCustomError("too_large", "{message}", {"message": message})
    return left_out


# Left-out site → model → scores, as in summary.json and seeds.json.
LeftOutScores = Annotated[
    dict[str, dict[str, dict[str, Any]]], AfterValidator(_require_few_cells)
]


@dataclass(frozen=True)
class LeftOutCell:
    """The strict F1 of a model at a left-out site.

    Attributes:
        f1: The F1, as a fraction.
        std: Its standard deviation over seeds; None for a single run.
        counts_all: Whether the model has learned all types that are scored there.
    """

    f1: float
    std: float | None = None
    counts_all: bool = True


@dataclass(frozen=True)
class LeftOutTable:
    """Strict F1 of all models at all left-out sites.

    Attributes:
        sites: The left-out sites.
        rows: Each model, and its cell for each site and then for their mean; None if it
            has no score.
        types: The types that are scored at each site.
    """

    sites: tuple[str, ...]
    rows: tuple[tuple[str, tuple[LeftOutCell | None, ...]], ...]
    types: Mapping[str, list[str]]

    @property
    def types_in_words(self) -> str:
        """The types that are scored at each site, in words."""
        return "; ".join(
            f"{site}: {', '.join(types)}" for site, types in self.types.items()
        )

    @property
    def is_of_seeds(self) -> bool:
        """Whether the scores are means over several seeds."""
        return any(
            cell is not None and cell.std is not None
            for _, cells in self.rows
            for cell in cells
        )

    @property
    def has_partial_scores(self) -> bool:
        """Whether a model has learned only some of the types that are scored."""
        return any(
            cell is not None and not cell.counts_all
            for _, cells in self.rows
            for cell in cells
        )


def make_left_out_table(
    left_out: Mapping[str, ScoresOfSite],
    mean: ScoresOfSite,
    types: Mapping[str, list[str]],
) -> LeftOutTable:
    """Return the table of a run, or of several seeds.

    Args:
        left_out: Left-out site → model → scores.
        mean: Model → the means of these scores over the sites.
        types: Left-out site → the types that are scored there.
    """
    names = dict.fromkeys(name for models in left_out.values() for name in models)
    rows = []
    for name in names:
        cells = [
            _make_cell(models.get(name, {}), len(types.get(site, ())))
            for site, models in left_out.items()
        ]
        rows.append((name, (*cells, _make_cell(mean.get(name, {}), None))))
    return LeftOutTable(tuple(left_out), tuple(rows), types)


def _make_cell(scores: Mapping[str, Any], types: int | None) -> LeftOutCell | None:
    """Return the cell of a model at a site; None if it has no score.

    Args:
        scores: Its scores, of a run or of several seeds.
        types: The number of types that are scored at the site; None for a mean over
            sites, which is not marked as partial.
    """
    counted = _find_value(scores, "types")
    f1 = _find_value(scores, "strict", "f1")
    if f1 is None:
        return None
    return LeftOutCell(
        f1,
        find_number(scores, "strict", "f1", "std"),
        counts_all=types is None or counted is None or counted >= types,
    )


def _find_value(scores: Mapping[str, Any], *path: str) -> float | None:
    """Return a number of a run, or its mean over seeds; None if there is none."""
    value = find_number(scores, *path)
    return find_number(scores, *path, "mean") if value is None else value
