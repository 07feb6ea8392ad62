"""What a grid file says (rows of runs over jobs, at two sizes), and the runs that it
stands for."""

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
from fednotes.core.types import POOLED
from fednotes.jobs.job import Job
from fednotes.jobs.job_file import built_in_jobs, load_job, load_table
from fednotes.jobs.reference import known_key

HELD_OUT = 0.15  # of the training sentences, where a search needs validation data

Settings = tuple[str, ...]  # `--set` assignments


@checked(frozen=True)
class Row:
    """One row of a table or point of a curve.

    label: in the table; `{job}` in it is the job's name. conditions: which of them this
    row runs. base: its job, if not the grid's. set: `--set` assignments; budget:
    further ones at the budget's size. full: only at the full size. seeds: in place of
    the budget's, or with full of the full size's. x places it in a plot; where the
    grid's x begins with η, the run's own η in percent does.
    search: key → values to try, all combinations; each condition keeps the one with the
    best mean validation score of its sites, never a test score, on the first seed. gap:
    "LABEL/alone" and "LABEL/pooled", between which a further column places this row
    (`metrics/gap.py`).
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
            yield tuple(
                f"{k}={_toml(v)}" for k, v in zip(self.search, values, strict=True)
            )


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)  # numbers; text in single quotes


@checked(frozen=True)
class Size:
    """How much of the grid is run.

    note: Describes the size above the table.
    own: Replaces `set` on a job of the user's own, where `set` names sites.
    own_note: Replaces `note` on a job of the user's own, where `note` describes the
        grid's own corpora.
    """

    seeds: tuple[int, ...]
    set: Settings = ()
    note: str = ""
    own: Settings | None = None
    own_note: str = ""


@checked(frozen=True)
class Before:
    """A run whose model others start from: once for all seeds, or, where seed is 0, for
    each.

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
        others = (
            *(row.base for row in self.runs),
            *(each.base for each in self.before),
        )
        return tuple(dict.fromkeys(name for name in (self.base, *others) if name))


Models = Mapping[int, Mapping[str, str]]  # seed → name → folder


@dataclass(frozen=True)
class Jobs:
    """Which job stands for each that a grid names.

    folder: of the grid's own jobs, such as fedner. own: the grid's name → the user's
        job.
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
    """One row, condition and seed; its folder is named by what it runs, so grids share
    runs.

    choice: the settings that it tries, where its row searches. beyond: what the run
    adds to the published method. is_trial: whether it serves the search alone, because
    it holds out training data that the row's other runs train on. job: what a rehearsal
    makes. skipped: the user's settings that it does not take, with the reason.
    """

    row: Row
    condition: str
    seed: int
    folder: Path
    arguments: tuple[str, ...]
    choice: Settings = ()
    beyond: str = ""
    is_trial: bool = False
    job: Job | None = field(default=None, repr=False, compare=False)
    skipped: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def done(self) -> bool:
        """Whether it ran to its end."""
        return (self.folder / "summary.json").exists()

    @property
    def begun(self) -> bool:
        """Whether something is there to go on with."""
        return (self.folder / "job.json").exists()


def own_jobs(grid: Grid, folder: str, given: Sequence[str]) -> Jobs:
    """`--base JOB` in place of the grid's own job, `--base NAME=JOB` of another that it
    names.

    Raises ConfigError for a name that the grid has not, a job that there is none of, a
    job of another method, and where the grid's own job is missing.
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
        asked, found = (
            load_table(each)[0].get("method") for each in (f"{folder}/{name}", job)
        )
        if asked != found:
            raise ConfigError(
                f"--base {job}: is of method {found!r}, the experiment of {asked!r}"
            )
        own[name] = job
    if own and grid.base not in own:
        raise ConfigError(
            f"--base {given[0]}: the experiment's own job is missing: --base JOB"
        )
    return Jobs(folder, own)


def rows_of(grid: Grid, jobs: Jobs, full: bool) -> tuple[list[Row], list[str]]:
    """The rows that are run, with their jobs; and the jobs whose rows are left out.

    On jobs of the user's own, rows of a job that was not given would mix corpora.
    """
    rows = [
        replace(row, base=row.base or grid.base)
        for row in grid.runs
        if full or not row.full
    ]
    kept = [row for row in rows if not jobs.own or row.base in jobs.own]
    left = dict.fromkeys(row.base for row in rows if row not in kept)
    named = []
    for row in kept:
        job = jobs.named(row.base)
        label, *gap = (text.replace("{job}", job) for text in (row.label, *row.gap))
        named.append(replace(row, label=label, gap=tuple(gap)))
    return named, list(left)


def befores_of(grid: Grid, rows: Sequence[Row]) -> tuple[Before, ...]:
    """Return the models that these rows, or the attention analysis, start from."""
    read = " ".join(setting for row in rows for setting in (*row.set, *row.budget))
    read += " ".join(grid.attention.models if grid.attention else ())
    return tuple(each for each in grid.before if "{" + each.name + "}" in read)


@dataclass(frozen=True)
class Request:
    """What holds for all runs of a grid.

    size: the grid's, with the seeds that are asked for. settings: the user's `--set`.
    device: of each run.
    """

    jobs: Jobs
    size: Size
    full: bool
    out: Path
    settings: Settings = ()
    device: str = "cpu"

    def size_settings(self, row: Row) -> Settings:
        """Return the settings of the grid's size for a row's job; the user may change
        them."""
        if row.base in self.jobs.own and self.size.own is not None:
            return self.size.own
        return self.size.set

    def own_settings(self, row: Row) -> Settings:
        """Return what makes a row what it is, with the keys that it searches."""
        searched = tuple(f"{key}=" for key in row.search)
        return (*row.set, *(() if self.full else row.budget), *searched)

    def settings_before(self, before: Before) -> Settings:
        """Return what makes the run of a model what it is."""
        return before.set

    def budget_before(self, before: Before) -> Settings:
        """Return the settings of a model's run that only make it small."""
        if self.full:
            return ()
        if before.base in self.jobs.own and before.own is not None:
            return before.own
        return before.budget


def plan_before(
    before: Before, request: Request, seeds: Sequence[int]
) -> list[GridRun]:
    """Return the runs of a model that others start from; the grid's own size is not for
    them.

    Raises:
        ConfigError: A setting does not fit the job.
    """
    row = Row(before.name, (before.condition,), before.base, before.set)
    size = replace(
        request.size,
        seeds=(before.seed,) if before.seed else tuple(seeds),
        set=request.budget_before(before),
        own=None,
    )
    return plan(row, before.condition, replace(request, size=size, full=True))


def plan(
    row: Row,
    condition: str,
    request: Request,
    *,
    models: Models | None = None,
    stand_ins: Models | None = None,
    needs_validation: bool = False,
) -> list[GridRun]:
    """Return the runs of one row and condition, for each seed and each setting that is
    tried.

    A row that searches settings on a job that holds nothing out gets further runs for
    the search, in which HELD_OUT of the training sentences are validation data. The
    test data stay the same.

    Args:
        row: The row.
        condition: One of the row's.
        request: What holds for all runs.
        models: Seed → name → folder of the models that `{name}` in the row's settings stands for.
        stand_ins: The same, of what stands for them in a rehearsal.
        needs_validation: Whether all runs are judged by validation data.

    Raises:
        ConfigError: A setting does not fit the row's job.
    """
    job = request.jobs[row.base]
    size_settings = request.size_settings(row)
    taken, skipped = settings_for(job, request.own_settings(row), request.settings)
    of_row = (*row.set, *(() if request.full else row.budget))
    common = (*size_settings, *taken, *of_row)
    _require_sites(row, job, common)
    maker = _Maker(row, condition, request, skipped, models or {}, stand_ins or {})
    seeds = seeds_of(row, request.size, request.full)

    holding_out: Settings = ()
    searches = len(list(row.choices())) > 1
    if searches or needs_validation:
        first = next(iter(row.choices()))
        holding_out = _holding_out(row, maker.parsed((*common, *first), seeds[0]))

    runs = []
    for choice in row.choices():
        if searches and holding_out:
            runs.append(
                maker.run(
                    (*common, *choice, *holding_out), seeds[0], choice, trial=True
                )
            )
        extra = holding_out if needs_validation else ()
        runs += [maker.run((*common, *choice, *extra), seed, choice) for seed in seeds]
    return runs


@dataclass(frozen=True)
class _Maker:
    """Makes the runs of one row and condition."""

    row: Row
    condition: str
    request: Request
    skipped: Mapping[str, str]
    models: Models
    stand_ins: Models

    def parsed(self, settings: Settings, seed: int) -> Job:
        """Return the job with these settings.

        Raises ConfigError, which names the row's job.
        """
        return self._job(self._complete(settings, seed, self.stand_ins))

    def run(
        self, settings: Settings, seed: int, choice: Settings, trial: bool = False
    ) -> GridRun:
        """Return one run."""
        name = self.request.jobs[self.row.base]
        chosen = self._complete(settings, seed, self.models)
        job = self._job(chosen)
        is_built_in = name in built_in_jobs()
        folder = self.request.out / "runs" / _digest(job, is_built_in)
        sets = [word for setting in chosen for word in ("--set", setting)]
        device = self.request.device
        on_device = () if device == "cpu" else ("--device", device)
        # one model for all has nothing beyond the published method
        beyond = (
            "" if self.condition == POOLED else job.module.name_extension(job.config)
        )
        return GridRun(
            self.row,
            self.condition,
            seed,
            folder,
            ("simulate", name, "--out", str(folder), *sets, *on_device),
            choice=choice,
            beyond=beyond,
            is_trial=trial,
            job=self.parsed(settings, seed),
            skipped=self.skipped,
        )

    def _complete(self, settings: Settings, seed: int, models: Models) -> Settings:
        chosen = (*settings, f"seed={seed}", f"conditions=['{self.condition}']")
        for model, folder in models.get(seed, {}).items():
            chosen = tuple(each.replace("{" + model + "}", folder) for each in chosen)
        return chosen

    def _job(self, settings: Settings) -> Job:
        name = self.request.jobs[self.row.base]
        return load_job(built_in_jobs().get(name) or name, settings)


def seeds_of(row: Row, size: Size, full: bool) -> tuple[int, ...]:
    """A row's own, if it has some: at the budget's size, and where it is of the full
    size alone."""
    return row.seeds if row.seeds and (row.full or not full) else size.seeds


def settings_for(
    job: str, own: Settings, settings: Settings
) -> tuple[Settings, dict[str, str]]:
    """Divide the user's settings into those that a run takes and the others, with the
    reason.

    Args:
        job: The run's job.
        own: What the row sets itself, which the user does not change.
        settings: The user's.
    """
    method = next(
        (
            text.partition("=")[2].strip(" '\"")
            for text in own
            if text.startswith("method=")
        ),
        "",
    )
    taken = []
    skipped = {}
    for setting in settings:
        key = setting.partition("=")[0].strip()
        if sets_itself(own, key):
            skipped[setting] = "they set it themselves"
        elif not has_key(job, key, method):
            skipped[setting] = "their method has no such key"
        else:
            taken.append(setting)
    return tuple(taken), skipped


def sets_itself(own: Settings, key: str) -> bool:
    """Return whether one of these settings sets the key, a table that holds it or a
    part of it."""
    asked = key.split(".")
    for setting in own:
        parts = setting.partition("=")[0].strip().split(".")
        if all(a == b or "*" in (a, b) for a, b in zip(parts, asked, strict=False)):
            return True
    return False


def has_key(job: str, key: str, method: str = "") -> bool:
    """Return whether a job's tables know a key such as "training.epochs".

    Args:
        job: A job file or the name of a built-in job.
        key: As before the equals sign of `--set`.
        method: In place of the job's own method.
    """
    return known_key(method or str(load_table(job)[0].get("method", "")), key)


def _holding_out(row: Row, job: Job) -> Settings:
    """Return the setting that makes validation data, empty where the job has some.

    Raises:
        ConfigError: The job has none, and none can be taken from its training data.
    """
    if job.synthetic is not None:
        return ()
    for site in job.sites.values():
        if (
            getattr(site, "valid", "")
            or site.valid_fraction
            or getattr(site, "hold_out", 0)
        ):
            return ()
    if job.data != "documents":
        raise ConfigError(
            f"row {row.label!r} chooses by validation data, but no site of {job.name} holds any "
            "out: give its sites a valid_fraction"
        )
    return (f"sites.*.hold_out={HELD_OUT}",)


def _require_sites(row: Row, job: str, settings: Settings) -> None:
    """Refuse a setting of a site that is not there, since it would make one."""
    sites = load_table(job)[0].get("sites", {})
    for setting in settings:
        top, *rest = setting.partition("=")[0].strip().split(".")
        if (
            top == "sites"
            and len(rest) > 1
            and (not sites or rest[0] not in {"*", *sites})
        ):
            raise ConfigError(
                f"row {row.label!r} sets {setting}, but {job} has "
                + (f"no site {rest[0]!r}" if sites else "no [sites.NAME] tables")
            )


def _digest(job: Job, built_in: bool) -> str:
    """Of what is run; paths in a file of the user's own are relative to its folder."""
    if built_in:
        return job.fingerprint[:16]
    return hashlib.sha256(f"{job.folder}\n{job.fingerprint}".encode()).hexdigest()[:16]
