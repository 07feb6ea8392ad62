"""The runs of a grid: one for each row, condition, seed and setting."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fednotes.apps.experiments.grids import (
    Jobs,
    ModelRun,
    Row,
    Settings,
    Size,
    make_placeholder,
)
from fednotes.core.errors import ConfigError
from fednotes.core.types import POOLED
from fednotes.jobs.built_in_jobs import list_built_in_jobs
from fednotes.jobs.job import Job, SiteConfig
from fednotes.jobs.job_file import load_job, load_table
from fednotes.jobs.reference import is_known_key

# Share of the training sentences that a search holds out if the job holds out none.
HELD_OUT = 0.15

Models = Mapping[int, Mapping[str, str]]  # folders of models by seed and name


@dataclass(frozen=True)
class GridRun:
    """One run: a row, a condition, a seed and a setting.

    The name of its folder is derived from its content, so that grids share runs.

    Attributes:
        row: The row.
        condition: The condition.
        seed: The seed.
        folder: The folder of the run.
        arguments: The command line of the run, without the program's name.
        choice: The settings that it tries, if its row searches.
        beyond: What the run adds to the published method; "" for nothing.
        is_trial: Whether it serves only the search, because it holds out training data
            that the row's other runs train on.
        job: The job to rehearse; None if there is nothing to rehearse.
        skipped: The user's settings that do not apply to it, with the reasons.
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

    def is_done(self) -> bool:
        """Return whether the run has ended."""
        return (self.folder / "summary.json").exists()

    def is_begun(self) -> bool:
        """Return whether there is a run to resume."""
        return (self.folder / "job.json").exists()

    def describe(self) -> str:
        """Return the row, condition and seed as readable text."""
        return f"{self.row.label}, {self.condition}, seed {self.seed}"


@dataclass(frozen=True)
class GridRequest:
    """The settings common to all runs of a grid.

    Attributes:
        jobs: The jobs of the grid.
        size: The size, with the seeds to run.
        full: Whether that is the full size.
        out: The folder of all runs and results.
        settings: The user's settings.
        device: The device of each run.
    """

    jobs: Jobs
    size: Size
    full: bool
    out: Path
    settings: Settings = ()
    device: str = "cpu"

    def choose_seeds(self, row: Row) -> tuple[int, ...]:
        """Return the seeds of a row."""
        has_own_seeds = bool(row.seeds) and (row.full or not self.full)
        return row.seeds if has_own_seeds else self.size.seeds

    def list_size_settings(self, row: Row) -> Settings:
        """Return the size's settings for a row, which the user may change."""
        if self.jobs.has_replaced(row.base) and self.size.own is not None:
            return self.size.own
        return self.size.set

    def list_row_settings(self, row: Row) -> Settings:
        """Return a row's settings, which the user may not change."""
        if self.full:
            return row.set
        return (*row.set, *row.budget)

    def list_fixed_settings(self, row: Row) -> Settings:
        """Return the settings of a row, and an assignment for each key it searches."""
        return (*self.list_row_settings(row), *(f"{key}=" for key in row.search))

    def list_model_size_settings(self, model: ModelRun) -> Settings:
        """Return the settings that only make the run of a model small."""
        if self.full:
            return ()
        if self.jobs.has_replaced(model.base) and model.own is not None:
            return model.own
        return model.budget


# ---- planning ------------------------------------------------------------------------


def plan_model(
    model: ModelRun, request: GridRequest, seeds: Sequence[int]
) -> list[GridRun]:
    """Return the runs that train a model that rows start from.

    Args:
        model: The model.
        request: The settings common to all runs. The settings of the grid's size do not
            apply to the runs of models, which have their own.
        seeds: The seeds of the rows.

    Raises:
        ConfigError: A setting does not apply to the job.
    """
    row = Row(
        label=model.name,
        conditions=(model.condition,),
        base=model.base,
        set=model.set,
    )
    size = replace(
        request.size,
        seeds=(model.seed,) if model.seed else tuple(seeds),
        set=request.list_model_size_settings(model),
        own=None,
    )
    return plan_row(row, model.condition, replace(request, size=size, full=True))


def plan_row(
    row: Row,
    condition: str,
    request: GridRequest,
    *,
    models: Models | None = None,
    stand_ins: Models | None = None,
    needs_validation: bool = False,
) -> list[GridRun]:
    """Return the runs of one row and condition: one for each seed and setting.

    If a row searches settings and its job has no validation data, it gets further runs
    for the search, which use the fraction HELD_OUT of the training sentences as
    validation data. The test data stay the same.

    Args:
        row: The row.
        condition: One of its conditions.
        request: The settings common to all runs.
        models: The folders of the models that `{name}` in the row's settings stands
            for.
        stand_ins: The folders that replace them in a rehearsal.
        needs_validation: Whether all runs are judged by validation data.

    Raises:
        ConfigError: A setting does not apply to the row's job.
    """
    job = request.jobs.find(row.base)
    fixed = request.list_fixed_settings(row)
    accepted, skipped = split_settings(job, fixed, request.settings)
    common = (
        *request.list_size_settings(row),
        *accepted,
        *request.list_row_settings(row),
    )
    _require_known_sites(row, job, common)
    maker = _RunMaker(
        row=row,
        condition=condition,
        request=request,
        skipped=skipped,
        models=models or {},
        stand_ins=stand_ins or {},
    )
    seeds = request.choose_seeds(row)
    choices = list(row.list_choices())
    is_search = len(choices) > 1

    held_out: Settings = ()
    if is_search or needs_validation:
        first = maker.read_rehearsed_job((*common, *choices[0]), seeds[0])
        held_out = _find_hold_out_setting(row, first)

    runs = []
    for choice in choices:
        settings = (*common, *choice)
        if is_search and held_out:
            trial = maker.make_run(
                (*settings, *held_out), seeds[0], choice=choice, is_trial=True
            )
            runs.append(trial)
        if needs_validation:
            settings = (*settings, *held_out)
        runs += [maker.make_run(settings, seed, choice=choice) for seed in seeds]
    return runs


@dataclass(frozen=True)
class _RunMaker:
    """Creates the runs of one row and condition."""

    row: Row
    condition: str
    request: GridRequest
    skipped: Mapping[str, str]
    models: Models
    stand_ins: Models

    def make_run(
        self,
        settings: Settings,
        seed: int,
        *,
        choice: Settings,
        is_trial: bool = False,
    ) -> GridRun:
        """Return the run with these settings.

        Args:
            settings: The settings, without seed and condition.
            seed: The seed.
            choice: The settings among them that the row searches.
            is_trial: Whether the run only serves to choose settings.

        Raises:
            ConfigError: A setting does not apply to the row's job.
        """
        name = self.request.jobs.find(self.row.base)
        complete = self._complete_settings(settings, seed, self.models)
        job = self._read_job(complete)
        rehearsed_job = self.read_rehearsed_job(settings, seed)
        is_built_in = name in list_built_in_jobs()
        folder = self.request.out / "runs" / _digest_job(job, is_built_in=is_built_in)

        arguments = ["simulate", name, "--out", str(folder)]
        for setting in complete:
            arguments += ["--set", setting]
        if self.request.device != "cpu":
            arguments += ["--device", self.request.device]

        # A pooled model adds nothing to the published method.
        beyond = ""
        if self.condition != POOLED:
            beyond = job.module.name_extension(job.config)

        return GridRun(
            row=self.row,
            condition=self.condition,
            seed=seed,
            folder=folder,
            arguments=tuple(arguments),
            choice=choice,
            beyond=beyond,
            is_trial=is_trial,
            job=rehearsed_job,
            skipped=self.skipped,
        )

    def read_rehearsed_job(self, settings: Settings, seed: int) -> Job:
        """Return the job with these settings, on the stand-ins of models.

        Raises:
            ConfigError: A setting does not apply to the row's job.
        """
        return self._read_job(self._complete_settings(settings, seed, self.stand_ins))

    def _complete_settings(
        self, settings: Settings, seed: int, models: Models
    ) -> Settings:
        """Return the settings with seed, condition and the folders of models."""
        complete = (*settings, f"seed={seed}", f"conditions=['{self.condition}']")
        for model, folder in models.get(seed, {}).items():
            placeholder = make_placeholder(model)
            complete = tuple(
                setting.replace(placeholder, folder) for setting in complete
            )
        return complete

    def _read_job(self, settings: Settings) -> Job:
        """Return the row's job with complete settings."""
        name = self.request.jobs.find(self.row.base)
        return load_job(list_built_in_jobs().get(name) or name, settings)


def _digest_job(job: Job, *, is_built_in: bool) -> str:
    """Return 16 hexadecimal digits that name the folder of a job's run."""
    if is_built_in:
        return job.fingerprint[:16]
    # Paths in a user's own file are relative to its folder.
    text = f"{job.folder}\n{job.fingerprint}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _find_hold_out_setting(row: Row, job: Job) -> Settings:
    """Return the setting that holds out validation data; none if the job has some.

    Raises:
        ConfigError: The job has none, and none can be held out of its training data.
    """
    if job.synthetic is not None:
        return ()
    for site in job.sites.values():
        if site.valid_fraction:
            return ()
        if isinstance(site, SiteConfig) and (site.valid or site.hold_out):
            return ()
    if job.data != "documents":
        raise ConfigError(
            f"row {row.label!r} is chosen by validation score, but no site of "
            f"{job.name} holds out validation data: give its sites a `valid_fraction`"
        )
    return (f"sites.*.hold_out={HELD_OUT}",)


# ---- settings ------------------------------------------------------------------------


def split_settings(
    job: str, fixed: Settings, settings: Settings
) -> tuple[Settings, dict[str, str]]:
    """Split the user's settings into those that apply to a row, and the others.

    Args:
        job: The row's job.
        fixed: The settings of the row, which the user may not change.
        settings: The user's settings.

    Returns:
        The settings that apply to the row; and the others with the reason, phrased to
        follow the names of rows in a sentence.
    """
    method = _find_method(fixed)
    accepted = []
    skipped = {}
    for setting in settings:
        key = read_setting_key(setting)
        if is_set_by(fixed, key):
            skipped[setting] = "they set this key themselves"
        elif not has_key(job, key, method):
            skipped[setting] = "their method has no such key"
        else:
            accepted.append(setting)
    return tuple(accepted), skipped


def read_setting_key(setting: str) -> str:
    """Return the key of an assignment such as "training.epochs=3"."""
    return setting.partition("=")[0].strip()


def _find_method(settings: Settings) -> str:
    """Return the method that these settings choose; "" if they choose none."""
    for setting in settings:
        if setting.startswith("method="):
            return setting.partition("=")[2].strip(" '\"")
    return ""


def is_set_by(settings: Settings, key: str) -> bool:
    """Return whether a setting sets this key, a table around it, or a part of it.

    "*" in either key stands for every site and matches any part.
    """
    parts = key.split(".")
    for setting in settings:
        # If one key is shorter, it is a table that contains the other.
        pairs = zip(read_setting_key(setting).split("."), parts, strict=False)
        if all(a == b or "*" in (a, b) for a, b in pairs):
            return True
    return False


def has_key(job: str, key: str, method: str = "") -> bool:
    """Return whether a job may have a key such as "training.epochs".

    Args:
        job: A job file or the name of a built-in job.
        key: The key.
        method: A method that replaces the job's own.
    """
    if not method:
        method = str(load_table(job)[0].get("method", ""))
    return is_known_key(method, key)


def _require_known_sites(row: Row, job: str, settings: Settings) -> None:
    """Raise ConfigError for a setting of a site that the job does not have.

    Otherwise the setting would add the site.

    Raises:
        ConfigError: A setting names an unknown site.
    """
    sites = load_table(job)[0].get("sites", {})
    for setting in settings:
        parts = read_setting_key(setting).split(".")
        if parts[0] != "sites" or len(parts) < 3:
            continue
        if not sites:
            raise ConfigError(
                f"row {row.label!r} sets {setting}, but {job} has no [sites.NAME] "
                "tables"
            )
        site = parts[1]
        if site != "*" and site not in sites:
            raise ConfigError(
                f"row {row.label!r} sets {setting}, but {job} has no site {site!r}"
            )
