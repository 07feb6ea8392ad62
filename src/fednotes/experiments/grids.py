"""What a grid file says (rows of runs over jobs, at two sizes), and the runs that it stands for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Len

from fednotes.core.errors import ConfigError, nearest
from fednotes.core.settings import checked
from fednotes.jobs.job import POOLED, Job
from fednotes.jobs.job_file import built_in_jobs, load_job, load_table

Settings = tuple[str, ...]  # `--set` assignments


@checked(frozen=True)
class Row:
    """One row of a table or point of a curve.

    label: in the table; `{job}` in it is the job's name. conditions: which of them this row
    runs. base: its job, if not the grid's. set: `--set` assignments; budget: further ones at
    the budget's size. full: only at the full size. seeds: in place of the budget's, or with full of
    the full size's. x places it in a plot; where the grid's x begins with η, the run's own η in
    percent does.
    search: key → values to try, all combinations; each condition keeps the one with the best
    mean validation score of its sites, never a test score, on the first seed. gap: "LABEL/alone"
    and "LABEL/pooled", between which a further column places this row (`metrics/gap.py`).
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


@checked(frozen=True)
class Size:
    """How much of the grid is run; note: what was left out, for the output.

    own: in place of `set` on a job of the user's own, where `set` names sites.
    """

    seeds: tuple[int, ...]
    set: Settings = ()
    note: str = ""
    own: Settings | None = None


@checked(frozen=True)
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


@checked(frozen=True)
class Attention:
    """Models whose attention heads are compared (NAME=FOLDER), on notes of these paths."""

    models: tuple[str, ...]
    notes: tuple[str, ...]


@checked(frozen=True)
class Grid:
    """A grid file.

    columns: in place of one for each site: "micro strict f1" (all sites' mentions together),
    "mean masked loss", "mean phenotypes f1", "mean ranking auroc" (over sites), "MB up", "MB
    down" (all sites, a cycle), "MB a site" (up, a federated run), "s" (a run). by_output: a row
    a disease in place of one a run, with precision, recall and F1 of each run, and the paper's
    figures (disease → column) beside.
    score: of which data the sites' columns are; "validation" shows nothing of test data, for
    grids by which settings are chosen.
    against: the label of a row; a further column has by how much others fall behind its last
    score. pairs: "LABEL/CONDITION" twice, first minus second, tested over seeds; a row's
    federated and alone, where it has both, are a pair by themselves.
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
    x: str = ""
    megabytes: float = 0.0
    seconds: float = 0.0
    paper: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    paper_note: str = ""

    @property
    def jobs(self) -> tuple[str, ...]:
        """The jobs that it names, its own first."""
        others = (*(row.base for row in self.runs), *(each.base for each in self.before))
        return tuple(dict.fromkeys(name for name in (self.base, *others) if name))


Models = Mapping[int, Mapping[str, str]]  # seed → name → folder


@dataclass(frozen=True)
class Jobs:
    """Which job stands for each that a grid names.

    folder: of the grid's own jobs, such as fedner. own: the grid's name → the user's job.
    """

    folder: str
    own: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> str:
        """A job file, or the name of a built-in job."""
        return self.own.get(name, f"{self.folder}/{name}")

    def named(self, name: str) -> str:
        """How tables call it."""
        return Path(self[name]).stem


@dataclass(frozen=True)
class GridRun:
    """One row, condition and seed; its folder is named by what it runs, so grids share runs.

    choice: the settings that it tries, where its row searches. beyond: what the run adds to
    the published method.
    """

    row: Row
    condition: str
    seed: int
    folder: Path
    arguments: tuple[str, ...]
    choice: Settings = ()
    beyond: str = ""

    @property
    def done(self) -> bool:
        """Whether it ran to its end."""
        return (self.folder / "summary.json").exists()

    @property
    def begun(self) -> bool:
        """Whether something is there to go on with."""
        return (self.folder / "job.json").exists()


def own_jobs(grid: Grid, folder: str, given: Sequence[str]) -> Jobs:
    """`--base JOB` in place of the grid's own job, `--base NAME=JOB` of another that it names.

    Raises ConfigError for a name that the grid has not, a job that there is none of, a job of
    another method, and where the grid's own job is missing.
    """
    own: dict[str, str] = {}
    for text in given:
        name, equals, job = text.partition("=")
        if not equals or (name not in grid.jobs and Path(text).is_file()):
            name, job = grid.base, text
        if name not in grid.jobs:
            raise ConfigError(
                f"--base {text}: this experiment has no job {name!r}; {nearest(name, grid.jobs)}"
            )
        if name in own:
            raise ConfigError(f"--base {text}: {name!r} has {own[name]} already")
        asked, found = (load_table(each)[0].get("method") for each in (f"{folder}/{name}", job))
        if asked != found:
            raise ConfigError(f"--base {job}: is of method {found!r}, the experiment of {asked!r}")
        own[name] = job
    if own and grid.base not in own:
        raise ConfigError(f"--base {given[0]}: the experiment's own job is missing: --base JOB")
    return Jobs(folder, own)


def rows_of(grid: Grid, jobs: Jobs, full: bool) -> tuple[list[Row], list[str]]:
    """The rows that are run, with their jobs; and the jobs whose rows are left out.

    On jobs of the user's own, rows of a job that was not given would mix corpora.
    """
    rows = [replace(row, base=row.base or grid.base) for row in grid.runs if full or not row.full]
    kept = [row for row in rows if not jobs.own or row.base in jobs.own]
    left = dict.fromkeys(row.base for row in rows if row not in kept)
    named = []
    for row in kept:
        job = jobs.named(row.base)
        label, *gap = (text.replace("{job}", job) for text in (row.label, *row.gap))
        named.append(replace(row, label=label, gap=tuple(gap)))
    return named, list(left)


def befores_of(grid: Grid, rows: Sequence[Row], jobs: Jobs) -> tuple[Before, ...]:
    """The models that these rows, or the attention analysis, start from.

    Raises ConfigError where such a model is of a job that the user did not name.
    """
    read = " ".join(setting for row in rows for setting in (*row.set, *row.budget))
    read += " ".join(grid.attention.models if grid.attention else ())
    found = tuple(each for each in grid.before if "{" + each.name + "}" in read)
    for each in found:
        if jobs.own and each.base not in jobs.own:
            raise ConfigError(
                f"rows start from a model of the job {jobs[each.base]!r}: name yours with "
                f"--base {each.base}=JOB, or take that one: --base {each.base}={jobs[each.base]}"
            )
    return found


def plan_before(before: Before, jobs: Jobs, size: Size, full: bool, out: Path) -> Iterator[GridRun]:
    """The runs of a model that others start from; the grid's own settings are not for them."""
    own = before.own if before.base in jobs.own else None
    budget = before.budget if own is None else own
    row = Row(
        before.name, (before.condition,), before.base, (*before.set, *(() if full else budget))
    )
    size = replace(size, seeds=(before.seed,) if before.seed else size.seeds, set=(), own=None)
    for runs in plan(row, jobs, size, True, out, ()):
        yield from runs


def plan(
    row: Row,
    jobs: Jobs,
    size: Size,
    full: bool,
    out: Path,
    settings: Settings,
    models: Models | None = None,
) -> Iterator[list[GridRun]]:
    """The runs of one row, a list for each condition.

    A wrong setting shows now, not in an hour: ConfigError.
    models: seed → the folder that stands for each `{name}` in the
    row's settings.
    """
    job, own = jobs[row.base], row.base in jobs.own
    common = size.own if own and size.own is not None else size.set
    common = (*common, *row.set, *(() if full else row.budget), *settings)
    path = built_in_jobs().get(job)
    _require_sites(row, job, common)
    for condition in row.conditions:
        runs = []
        for choice in row.choices():
            for seed in seeds_of(row, size, full):
                chosen = (*common, *choice, f"seed={seed}", f"conditions=['{condition}']")
                for model, folder in (models or {}).get(seed, {}).items():
                    chosen = tuple(each.replace("{" + model + "}", folder) for each in chosen)
                made = _checked(row, path or job, chosen, settings if own else None)
                place = out / "runs" / _digest(made, path is not None)
                sets = [word for setting in chosen for word in ("--set", setting)]
                command = ("simulate", job, "--out", str(place), *sets)
                # nothing to one model for all
                beyond = "" if condition == POOLED else made.module.beyond(made.config)
                runs.append(GridRun(row, condition, seed, place, command, choice, beyond))
        yield runs


def seeds_of(row: Row, size: Size, full: bool) -> tuple[int, ...]:
    """A row's own, if it has some: at the budget's size, and where it is of the full size alone."""
    return row.seeds if row.seeds and (row.full or not full) else size.seeds


def _checked(row: Row, job: Path | str, settings: Settings, given: Settings | None) -> Job:
    """The job with its settings. Raises ConfigError, which names the row, where they do not fit.

    given: what the user set, on a job of the user's own.
    """
    try:
        return load_job(job, settings)
    except ConfigError as error:
        remedy = ""
        if given is not None:
            load_job(job, given)  # whose error would be the job's own
            remedy = "; --set KEY=VALUE changes what the row sets, --full leaves the budget's out"
        raise ConfigError(f"row {row.label!r}: {error}{remedy}") from error


def _require_sites(row: Row, job: str, settings: Settings) -> None:
    """A setting of a site that is not there would make one."""
    sites = load_table(job)[0].get("sites", {})
    for setting in settings:
        top, *rest = setting.partition("=")[0].strip().split(".")
        if top == "sites" and len(rest) > 1 and (not sites or rest[0] not in {"*", *sites}):
            raise ConfigError(
                f"row {row.label!r} sets {setting}, but {job} has "
                + (f"no site {rest[0]!r}" if sites else "no [sites.NAME] tables")
            )


def _digest(job: Job, built_in: bool) -> str:
    """Of what is run; paths in a file of the user's own are relative to its folder."""
    if built_in:
        return job.fingerprint[:16]
    return hashlib.sha256(f"{job.folder}\n{job.fingerprint}".encode()).hexdigest()[:16]
