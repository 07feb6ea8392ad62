"""What a grid file says: rows of runs over jobs, at two sizes, and how their table looks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from fednotes.core.errors import ConfigError

Settings = tuple[str, ...]  # `--set` assignments
MOST_CHOICES = 64  # of one row


@dataclass(frozen=True)
class Row:
    """One row of a table or point of a curve.

    label: in the table; `{job}` in it is the job's name. conditions: which of them this row
    runs. base: its job, if not the grid's. set: `--set` assignments; budget: further ones at
    the budget's size. seeds: in place of the budget's. full: only at the full size. x places
    it in a plot; where the grid's x begins with η, the run's own η in percent does.
    search: key → values to try, all combinations; each condition keeps the one with the best
    mean validation score of its sites, never a test score (see `Grid.search_seeds`).
    """

    label: str
    conditions: tuple[str, ...]
    base: str = ""
    set: Settings = ()
    budget: Settings = ()
    seeds: tuple[int, ...] = ()
    full: bool = False
    x: float = 0.0
    search: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ConfigError for a search without values or with too many."""
        for key, values in self.search.items():
            if not isinstance(values, list) or not values:
                raise ConfigError(f"{self.label}: search.{key} = {values!r}: a list of values")
        if math.prod(len(values) for values in self.search.values()) > MOST_CHOICES:
            raise ConfigError(f"{self.label}: search tries more than {MOST_CHOICES} settings")

    def choices(self) -> Iterator[Settings]:
        """The settings that are tried; the empty one alone where nothing is searched."""
        for values in product(*self.search.values()):
            yield tuple(f"{k}={_toml(v)}" for k, v in zip(self.search, values, strict=True))


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)  # numbers; text in single quotes


@dataclass(frozen=True)
class Size:
    """How much of the grid is run; note: what was left out, for the output.

    own: in place of `set` on a job of the user's own, where `set` names sites.
    """

    seeds: tuple[int, ...]
    set: Settings = ()
    note: str = ""
    own: Settings | None = None


@dataclass(frozen=True)
class Before:
    """A run whose model others start from: once for all seeds, or, where seed is 0, for each.

    own: in place of `budget` on a job of the user's own, where `budget` names sites.
    """

    name: str
    base: str
    condition: str
    seed: int = 1
    set: Settings = ()
    budget: Settings = ()
    own: Settings | None = None


@dataclass(frozen=True)
class Attention:
    """Models whose attention heads are compared (NAME=FOLDER), on notes of these paths."""

    models: tuple[str, ...]
    notes: tuple[str, ...]
    sample: int = 200
    length: int = 128


@dataclass(frozen=True)
class Grid:
    """A grid file.

    columns: in place of one for each site: "micro strict f1" (all sites' mentions together),
    "mean masked loss", "mean phenotypes f1", "mean ranking auroc" (over sites), "MB up", "MB
    down" (all sites, a cycle), "s" (a run). by_output: a row a disease in place of one a run,
    with precision, recall and F1 of each run, and the paper's figures (disease → column) beside.
    score: of which data the sites' columns are; "validation" shows nothing of test data, for
    grids by which settings are chosen.
    against: the label of a row; a further column has by how much others fall behind its last
    score. pairs: "LABEL/CONDITION" twice, first minus second, tested over seeds; a row's
    federated and alone, where it has both, are a pair by themselves.
    search_seeds: settings that rows search are chosen on so many of the first seeds.
    attention: compared in place of runs.
    paper: the paper's own figures, label → column → percent. megabytes, seconds: where they
    are not 0, a further column each: the micro F1 of the last model within that cost, for jobs
    whose training has trace = true.
    """

    title: str
    base: str
    budget: Size
    full: Size
    runs: tuple[Row, ...] = ()
    before: tuple[Before, ...] = ()
    attention: Attention | None = None
    columns: tuple[str, ...] = ()
    by_output: bool = False
    score: Literal["test", "validation"] = "test"
    against: str = ""
    pairs: tuple[tuple[str, ...], ...] = ()
    search_seeds: int = 1
    x: str = ""
    megabytes: float = 0.0
    seconds: float = 0.0
    paper: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    paper_note: str = ""

    def __post_init__(self) -> None:
        """Raises ConfigError for pairs of rows that are not there, and what excludes another."""
        if self.search_seeds < 1:
            raise ConfigError(f"search_seeds = {self.search_seeds}: at least 1 is needed")
        if self.score == "validation" and (self.columns or self.by_output):
            raise ConfigError('score = "validation" is for tables with a column a site')
        known = {f"{row.label}/{name}" for row in self.runs for name in row.conditions}
        for pair in self.pairs:
            if len(pair) != 2 or not set(pair) <= known:
                raise ConfigError(f"pairs: {list(pair)}: two of {', '.join(sorted(known))}")

    @property
    def jobs(self) -> tuple[str, ...]:
        """The jobs that it names, its own first."""
        others = (*(row.base for row in self.runs), *(each.base for each in self.before))
        return tuple(dict.fromkeys(name for name in (self.base, *others) if name))
