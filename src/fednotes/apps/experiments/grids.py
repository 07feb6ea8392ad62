"""Grid files, which describe the tables and figures of the papers.

A grid is a TOML file beside the job files. `base` names its job. Each `[[runs]]` is a
row of the table with the settings that it changes, and `[budget]` and `[full]` are the
two sizes at which it can be run. Each `[[before]]` is a run that trains a model that
rows start from: `{name}` in a row's settings stands for the folder of that model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Len

from fednotes.apps.experiments.grid_files import list_grid_files
from fednotes.core.errors import ConfigError, ParameterError, suggest_name
from fednotes.core.settings import build, checked, read_toml
from fednotes.jobs.job_file import load_table

Settings = tuple[str, ...]  # assignments such as "training.epochs=3"


# ---- the contents of a grid file -----------------------------------------------------


@checked(frozen=True)
class Row:
    """One row of a table, or one point of a curve.

    Attributes:
        label: Its name in the table; "{job}" in it stands for the name of its job.
        conditions: The conditions that it runs.
        base: Its job, if not the grid's.
        set: Its settings.
        budget: Further settings at the budget size.
        seeds: Seeds that replace those of the budget size; for a row with `full`, those
            of the full size.
        full: Whether the row belongs only to the full size.
        x: Its x coordinate in a plot. If the grid's `x` begins with η, the coordinate
            is the runs' own η in percent.
        search: Values to try, by key, in all combinations. Each condition uses the
            combination with the best mean validation score over its sites on the first
            seed. Test scores are never used to choose.
        gap: "LABEL/alone" and "LABEL/pooled": a further column shows how much of the
            gap between these two the row closes (`metrics/gap.py`).
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
    gap: Annotated[tuple[str, ...], Len(0, 2)] = ()

    def list_choices(self) -> Iterator[Settings]:
        """Yield each combination to try; an empty one for a row without a search."""
        for values in product(*self.search.values()):
            yield tuple(
                f"{key}={_to_toml(value)}"
                for key, value in zip(self.search, values, strict=True)
            )

    def starts_from(self, model: str) -> bool:
        """Return whether the row starts from the model with this name."""
        settings = (*self.set, *self.budget)
        return any(make_placeholder(model) in setting for setting in settings)


def _to_toml(value: Any) -> str:
    """Return a value as written in TOML."""
    if isinstance(value, list):
        return f"[{', '.join(map(_to_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)  # numbers; text in single quotes


def make_placeholder(model: str) -> str:
    """Return the placeholder for a model's folder in a row's settings."""
    return "{" + model + "}"


@checked(frozen=True)
class Size:
    """One of the two sizes of a grid.

    Attributes:
        seeds: The seeds of its rows.
        set: Settings of every row.
        note: What the size is, shown above the table.
        own: Replaces `set` on a user's own job, if `set` names sites.
        own_note: Replaces `note` on a user's own job, if `note` describes the grid's
            corpora.
    """

    seeds: tuple[int, ...]
    set: Settings = ()
    note: str = ""
    own: Settings | None = None
    own_note: str = ""


@checked(frozen=True)
class ModelRun:
    """A run that trains a model that rows start from.

    Attributes:
        name: The name of the model in the rows' settings.
        base: Its job.
        condition: The condition that it runs.
        seed: The seed of its only run; 0 for one run for each seed of the rows.
        set: Its settings.
        budget: Further settings at the budget size.
        own: Replaces `budget` on a user's own job, if `budget` names sites.
    """

    name: str
    base: str
    condition: str
    seed: int = 1
    set: Settings = ()
    budget: Settings = ()
    own: Settings | None = None


@checked(frozen=True)
class Attention:
    """Models whose attention heads are compared, instead of a table of runs.

    Attributes:
        models: Each model as NAME=FOLDER.
        notes: Paths of the notes that the models read.
    """

    models: tuple[str, ...]
    notes: tuple[str, ...]


@checked(frozen=True)
class Grid:
    """A grid file.

    A column of `columns` is one of "micro strict f1" (the mentions of all sites
    together), "mean masked loss", "mean phenotypes f1", "mean ranking auroc" (means
    over sites) and similar names, "MB up" and "MB down" (all sites, per round), "MB a
    site" (sent by one site in a federated run) and "s" (seconds of a run).

    Attributes:
        title: Title of the table.
        base: Name of the job.
        budget: The size for two cores and about an hour.
        full: The size of the paper.
        runs: The rows.
        before: Runs that train the models that rows start from.
        attention: Models to compare, instead of a table of runs.
        columns: Columns instead of one for each site.
        by_output: Whether the table has a row for each disease, with the precision,
            recall and F1 of each run, and the paper's figures beside them.
        score: The data on which the columns of sites are scored. A "validation" table
            reveals nothing about the test data; settings are chosen by such tables.
        against: Label of a row. A further column shows how far each row's last score is
            below this row's.
        pairs: Pairs of "LABEL/CONDITION". The first minus the second is tested over
            seeds. The federated and alone conditions of one row are also a pair.
        x: Meaning of the plot's x axis; without it, the rows are the y axis.
        megabytes: If not 0, a further column has the micro F1 of the last model within
            this cost. The job must have training.trace = true.
        seconds: The same for time.
        paper: The paper's own figures in percent, by label and column.
        paper_note: A remark on these figures.
    """

    title: str
    base: str
    budget: Size
    full: Size
    runs: tuple[Row, ...] = ()
    before: tuple[ModelRun, ...] = ()
    attention: Attention | None = None
    columns: tuple[str, ...] = ()
    by_output: bool = False
    score: Literal["test", "validation"] = "test"
    against: str = ""
    pairs: tuple[tuple[str, ...], ...] = ()
    x: str = ""
    megabytes: float = 0.0
    seconds: float = 0.0
    paper: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    paper_note: str = ""

    def list_job_names(self) -> tuple[str, ...]:
        """Return the names of all its jobs, the grid's own first."""
        names = [self.base]
        names += [row.base for row in self.runs]
        names += [model.base for model in self.before]
        return tuple(dict.fromkeys(name for name in names if name))


# ---- the available grids -------------------------------------------------------------


def load_grid(name: str) -> tuple[Grid, Path]:
    """Return the grid of an experiment and its file.

    Raises:
        ConfigError: There is no such experiment.
    """
    files = list_grid_files()
    if name not in files:
        raise ConfigError(
            f"no experiment is called {name!r}: {suggest_name(name, files)}"
        )
    path = files[name]
    return build(Grid, read_toml(path), path.name), path


def list_experiments() -> dict[str, str]:
    """Return the title of each experiment by its name."""
    return {name: load_grid(name)[0].title for name in list_grid_files()}


# ---- the jobs and rows of a run of a grid --------------------------------------------


@dataclass(frozen=True)
class Jobs:
    """The job behind each job name of a grid.

    Attributes:
        folder: The folder of the grid's own jobs, such as "fedner".
        replacements: The user's jobs, by the name of the job that each replaces.
    """

    folder: str
    replacements: Mapping[str, str] = field(default_factory=dict)

    def find(self, name: str) -> str:
        """Return the path of a job file, or the name of a built-in job."""
        return self.replacements.get(name, f"{self.folder}/{name}")

    def shorten_name(self, name: str) -> str:
        """Return the job's name in tables."""
        return Path(self.find(name)).stem

    def has_replaced(self, name: str) -> bool:
        """Return whether the user has replaced this job."""
        return name in self.replacements

    def is_missing(self, name: str) -> bool:
        """Return whether the user has replaced other jobs, but not this one.

        A table over both the user's and the grid's jobs would mix corpora.
        """
        return bool(self.replacements) and name not in self.replacements


def choose_jobs(grid: Grid, folder: str, base: Sequence[str]) -> Jobs:
    """Return the jobs of a grid, replaced by the user's where given.

    Args:
        grid: The grid.
        folder: The folder of its own jobs.
        base: JOB replaces the grid's main job, NAME=JOB another job that it names.

    Raises:
        ParameterError: The grid has no job with a name, a job is replaced twice or by a
            job with another method, or the grid's main job is not replaced.
        ConfigError: There is no such job.
    """
    replacements: dict[str, str] = {}
    for text in base:
        name, job = _split_base(grid, text)
        if name not in grid.list_job_names():
            raise ParameterError(
                f"`base` {text}: this experiment has no job {name!r}: "
                f"{suggest_name(name, grid.list_job_names())}"
            )
        if name in replacements:
            raise ParameterError(
                f"`base` {text}: {replacements[name]} replaces {name!r} already: give "
                "one job for each name"
            )
        _require_same_method(f"{folder}/{name}", job)
        replacements[name] = job

    if replacements and grid.base not in replacements:
        raise ParameterError(
            f"`base` {base[0]}: the experiment's own job is missing: give `base` JOB, "
            "too"
        )
    return Jobs(folder, replacements)


def _split_base(grid: Grid, text: str) -> tuple[str, str]:
    """Return the name of the job that is replaced, and the job that replaces it."""
    name, sign, job = text.partition("=")
    # The name of a file may contain "=".
    is_path = name not in grid.list_job_names() and Path(text).is_file()
    if not sign or is_path:
        return grid.base, text
    return name, job


def _require_same_method(replaced: str, job: str) -> None:
    """Raise ParameterError unless a job has the method of the job that it replaces."""
    expected = load_table(replaced)[0].get("method")
    method = load_table(job)[0].get("method")
    if method != expected:
        raise ParameterError(
            f"`base` {job} uses method {method!r}, but the experiment needs a job of "
            f"method {expected!r}"
        )


def select_grid_rows(
    grid: Grid, jobs: Jobs, *, full: bool
) -> tuple[list[Row], dict[str, list[str]]]:
    """Return the rows to run, with their jobs, and the labels of the omitted rows.

    Args:
        grid: The grid.
        jobs: Its jobs. Rows of a missing job are omitted.
        full: Whether to run the full size.

    Returns:
        The rows to run, and missing job → labels of its rows.
    """
    rows = []
    missing: dict[str, list[str]] = {}
    for row in grid.runs:
        name = row.base or grid.base
        if row.full and not full:
            continue
        job = jobs.shorten_name(name)
        label = row.label.replace("{job}", job)
        if jobs.is_missing(name):
            missing.setdefault(name, []).append(label)
            continue
        gap = tuple(text.replace("{job}", job) for text in row.gap)
        rows.append(replace(row, base=name, label=label, gap=gap))
    return rows, missing


def select_models(grid: Grid, rows: Sequence[Row]) -> tuple[ModelRun, ...]:
    """Return the models that these rows start from, or whose attention is compared."""
    compared = grid.attention.models if grid.attention else ()
    return tuple(
        model
        for model in grid.before
        if any(row.starts_from(model.name) for row in rows)
        or any(make_placeholder(model.name) in text for text in compared)
    )
