"""Plan all runs of a grid, and determine which of them cannot run on this machine.

A run is refused if its settings do not match its job, if a file, a model's weights or a
package is missing, or if a site or the method refuses to take part. Most of this shows
only when the sites and their models are built. The runs are therefore rehearsed before
the first one trains: they are built as in `simulate`, but not trained. Refused runs are
omitted and named, and the others run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from fednotes.apps.experiments.grid_runs import (
    GridRequest,
    GridRun,
    Models,
    has_key,
    is_set_by,
    plan_model,
    plan_row,
    read_setting_key,
)
from fednotes.apps.experiments.grids import (
    Grid,
    ModelRun,
    Row,
    Settings,
    select_models,
)
from fednotes.core.errors import ConfigError, FednotesError, ParameterError
from fednotes.core.wording import list_names
from fednotes.jobs.job import Job, Sites, load_sites
from fednotes.jobs.job_check import rehearse
from fednotes.jobs.job_file import load_job
from fednotes.jobs.parts import list_parts
from fednotes.jobs.run_folder import find_changed_site, has_record

_JOBS_IN_MEMORY = 2  # so that rows over one corpus read it only once
# Keys of a job that do not change the data of its sites, apart from the `model_keys` of
# their kind.
_NOT_DATA = {
    "training",
    "model",
    "title",
    "notes",
    "conditions",
    "threads",
    "federation",
    "left_out",
    "method",
}

# Receives the next item to plan, the number of planned items, and the total. The last
# call has no name and reports that everything is planned.
PlanProgress = Callable[[str, int, int], None]


def ignore_progress(name: str, done: int, total: int) -> None:
    """Do nothing."""


def ignore_line(line: str) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Omission:
    """A row and condition, a whole row, or a model, that cannot run.

    Attributes:
        label: Label of the row, or name of the model.
        condition: The condition; "" for a whole row or a model.
        reason: Why it cannot run.
    """

    label: str
    condition: str
    reason: str

    def describe(self) -> str:
        """Return the label and condition as readable text."""
        return f"{self.label}, {self.condition}" if self.condition else self.label


@dataclass
class GridPlan:
    """The runs of a grid.

    Attributes:
        first: The runs that train the models that rows start from.
        groups: The runs of each row and condition.
        models: The folders of these models by seed and name.
        omitted: The rows and models that cannot run.
    """

    first: list[GridRun] = field(default_factory=list)
    groups: list[list[GridRun]] = field(default_factory=list)
    models: Models = field(default_factory=dict)
    omitted: list[Omission] = field(default_factory=list)


@runtime_checkable
class _StartsFromEncoder(Protocol):
    """The specification of a model whose training starts from an encoder."""

    encoder: str


class Rehearsal:
    """Builds the sites and models of runs without training them."""

    def __init__(self) -> None:
        self._sites: dict[str, Sites] = {}
        self._reasons: dict[Path, str] = {}

    def find_reason_against(self, runs: Sequence[GridRun]) -> str:
        """Return why the runs of one row and condition cannot run; "" if they can.

        The first of several runs that differ only in the seed represents all of them.
        """
        for run in runs:
            if run.seed != runs[0].seed or run.job is None:
                continue
            if run.folder not in self._reasons:
                self._reasons[run.folder] = (
                    self._find_changed_data(run.folder, run.job)
                    if run.is_done()
                    else self.try_job(run.job)
                )
            reason = self._reasons[run.folder]
            if reason:
                return reason
        return ""

    def try_job(self, job: Job) -> str:
        """Return why a job cannot run; "" if it can."""
        try:
            sites = self.load(job)
            config = job.module.configure(job.config, sites.data)
            rehearse(job, list_parts(job, sites, config))
        except FednotesError as error:
            return _explain(error)
        return ""

    def _find_changed_data(self, folder: Path, job: Job) -> str:
        """Return why a run that is done cannot be reused; "" if it can.

        Its data may be absent, because a table can be made of the runs of another
        machine.
        """
        if not has_record(folder):
            return ""
        try:
            sites = self.load(job)
        except FednotesError:
            return ""
        changed = find_changed_site(folder, job, sites.data)
        if changed is None:
            return ""
        # Without the run's folder, so that all rows have the same reason.
        return (
            f"site {changed!r} has other data, or another division of them, than when "
            "the finished runs were made: restore the site's files, or give another "
            "`out`"
        )

    def load(self, job: Job) -> Sites:
        """Return a job's data, which is read once for jobs with the same data."""
        table = {key: value for key, value in job.table.items() if key not in _NOT_DATA}
        all_model_keys = job.table.get("model", {})
        model = {key: all_model_keys.get(key) for key in job.kind.model_keys}
        key = json.dumps(
            [job.data, str(job.folder), table, model], sort_keys=True, default=str
        )
        if key not in self._sites:
            while len(self._sites) >= _JOBS_IN_MEMORY:
                oldest = next(iter(self._sites))
                del self._sites[oldest]
            self._sites[key] = load_sites(job)
        return self._sites[key]


def _explain(error: FednotesError) -> str:
    """Return the message of an error about a job, with the job's keys in quotes.

    Such an error has the keys in backticks. In the lines of a plan, backticks mark
    parameters of `reproduce`, which the command line shows as its options.
    """
    return str(error).replace("`", "'")


def plan_grid(
    grid: Grid,
    rows: Sequence[Row],
    request: GridRequest,
    rehearsal: Rehearsal,
    *,
    on_plan: PlanProgress = ignore_progress,
    say: Callable[[str], None] = ignore_line,
) -> GridPlan:
    """Plan the runs of a grid, and leave out those that cannot run.

    Args:
        grid: The grid.
        rows: The rows to run.
        request: The jobs, size, settings and device of all runs.
        rehearsal: Builds the sites and models of each run.
        on_plan: Called before each row and condition is planned, and at the end.
        say: Receives a line for each reason why rows are omitted or settings are
            skipped.

    Raises:
        ParameterError: A setting applies to no run, or nothing can run.
    """
    require_applicable_settings(rows, grid, request)
    models = select_models(grid, rows)
    cells = [(row, condition) for row in rows for condition in row.conditions]
    total = len(models) + len(cells)

    planner = _Planner(grid, request, rehearsal, _list_seeds(rows, request))
    for done, model in enumerate(models):
        on_plan(model.name, done, total)
        planner.add_model(model)
    for done, (row, condition) in enumerate(cells, len(models)):
        on_plan(f"{row.label}, {condition}", done, total)
        planner.add_row(row, condition)
    on_plan("", total, total)

    plan = planner.finish()
    _require_runs(plan, grid)
    for reason, names in group_by_reason(plan.omitted):
        say(describe_omitted(reason, names))
    for setting, place in list_skipped_settings(plan):
        say(f"`settings` {setting} does not apply to {place}")
    return plan


def _list_seeds(rows: Sequence[Row], request: GridRequest) -> list[int]:
    """Return all seeds: those of the size first, then the further seeds of rows."""
    seeds = list(request.size.seeds)
    for row in rows:
        seeds += request.choose_seeds(row)
    return list(dict.fromkeys(seeds))


class _Planner:
    """Plans the runs of models, then those of rows.

    Args:
        grid: The grid.
        request: The settings common to all runs.
        rehearsal: Builds the sites and models of each run.
        seeds: The seeds of all rows.
    """

    def __init__(
        self,
        grid: Grid,
        request: GridRequest,
        rehearsal: Rehearsal,
        seeds: Sequence[int],
    ) -> None:
        self._grid = grid
        self._request = request
        self._rehearsal = rehearsal
        self._seeds = seeds
        self._model_runs: dict[str, list[GridRun]] = {}
        self._refused_models: dict[str, str] = {}
        self._groups: list[list[GridRun]] = []
        self._omitted: list[Omission] = []

    def add_model(self, model: ModelRun) -> None:
        """Plan the runs that train a model, or record why they cannot run."""
        reason, runs = self._plan_model(model)
        if reason:
            self._refused_models[model.name] = reason
        else:
            self._model_runs[model.name] = runs

    def _plan_model(self, model: ModelRun) -> tuple[str, list[GridRun]]:
        """Return why a model cannot be trained, "" if it can, and its runs."""
        jobs = self._request.jobs
        if jobs.is_missing(model.base):
            job = jobs.find(model.base)
            reason = (
                f"it is trained by the job {job!r}: add yours to `base` as "
                f"{model.base}=JOB, or that one as {model.base}={job}"
            )
            return reason, []
        try:
            runs = plan_model(model, self._request, self._seeds)
        except ConfigError as error:
            return _explain(error), []
        return self._rehearsal.find_reason_against(runs), runs

    def add_row(self, row: Row, condition: str) -> None:
        """Plan the runs of a row and condition, or record why they cannot run."""
        reason, runs = self._plan_row(row, condition)
        if reason:
            self._omitted.append(Omission(row.label, condition, reason))
        else:
            self._groups.append(runs)

    def _plan_row(self, row: Row, condition: str) -> tuple[str, list[GridRun]]:
        """Return why a row and condition cannot run, "" if it can, and its runs."""
        for name, reason in self._refused_models.items():
            if row.starts_from(name):
                return (
                    f"it starts from the model {name!r}, which cannot be trained: "
                    f"{reason}",
                    [],
                )
        try:
            runs = plan_row(
                row,
                condition,
                self._request,
                models=self._find_folders_by_seed(),
                stand_ins=self._find_stand_ins_by_seed(),
                needs_validation=self._grid.score == "validation",
            )
        except ConfigError as error:
            return _explain(error), []
        return self._rehearsal.find_reason_against(runs), runs

    def finish(self) -> GridPlan:
        """Return the plan, without the models that no planned row starts from."""
        planned_rows = [runs[0].row for runs in self._groups]
        first = []
        for name, runs in self._model_runs.items():
            is_compared = self._grid.attention is not None
            if is_compared or any(row.starts_from(name) for row in planned_rows):
                first += runs
        omitted = list(self._omitted)
        if self._grid.attention is not None:
            for name, reason in self._refused_models.items():
                omitted.append(Omission(name, "", reason))
        return GridPlan(first, self._groups, self._find_folders_by_seed(), omitted)

    def _find_folders_by_seed(self) -> dict[int, dict[str, str]]:
        """Return the folders of the models by seed and name."""
        return {
            seed: _find_model_folders(self._model_runs, seed) for seed in self._seeds
        }

    def _find_stand_ins_by_seed(self) -> dict[int, dict[str, str]]:
        """Return the stand-ins for the models in a rehearsal, by seed and name."""
        return {seed: _find_stand_ins(self._model_runs, seed) for seed in self._seeds}


def _find_model_folders(
    model_runs: Mapping[str, Sequence[GridRun]], seed: int
) -> dict[str, str]:
    """Return the folder of each model that the rows of a seed start from."""
    return {
        name: str(run.folder / run.condition / "model")
        for name, runs in model_runs.items()
        for run in runs
        if run.seed == seed or len(runs) == 1
    }


def _find_stand_ins(
    model_runs: Mapping[str, Sequence[GridRun]], seed: int
) -> dict[str, str]:
    """Return the stand-in for each model in a rehearsal.

    It is the model itself if it has been trained, otherwise the encoder that its
    training starts from.
    """
    folders = _find_model_folders(model_runs, seed)
    for name, folder in folders.items():
        if Path(folder).is_dir():
            continue
        first_run = model_runs[name][0]
        model = None if first_run.job is None else first_run.job.config.model
        encoder = model.encoder if isinstance(model, _StartsFromEncoder) else ""
        folders[name] = encoder or "none"
    return folders


def _require_runs(plan: GridPlan, grid: Grid) -> None:
    """Raise ParameterError if nothing can run, or if a compared model is missing."""
    if grid.attention is None:
        is_enough = bool(plan.groups)
    else:
        is_enough = not plan.omitted
    if is_enough:
        return
    reasons = [reason for reason, _ in group_by_reason(plan.omitted)]
    if len(reasons) > 1:
        reasons = [f"({number}) {reason}" for number, reason in enumerate(reasons, 1)]
    raise ParameterError(f"no run of this experiment is possible: {'; '.join(reasons)}")


def group_by_reason(omitted: Sequence[Omission]) -> list[tuple[str, list[str]]]:
    """Return each reason with the names of the rows and models omitted for it."""
    names: dict[str, list[str]] = {}
    for each in omitted:
        names.setdefault(each.reason, []).append(each.describe())
    return list(names.items())


def describe_omitted(reason: str, names: Sequence[str]) -> str:
    """Return a line about the rows and models omitted for one reason."""
    return f"omitted: {'; '.join(names)}: {reason}"


# ---- the user's settings -------------------------------------------------------------


def require_applicable_settings(
    rows: Sequence[Row], grid: Grid, request: GridRequest
) -> None:
    """Raise an error for a user setting that cannot apply to any run of the grid.

    Args:
        rows: The rows to run.
        grid: The grid.
        request: The jobs, size and settings of all runs.

    Raises:
        ConfigError: No job of the grid has a key; the message names the nearest key.
        ParameterError: The rows set a key themselves.
    """
    # The job of each row and model with the settings that the user may not change.
    fixed = [
        (request.jobs.find(row.base), request.list_fixed_settings(row)) for row in rows
    ]
    fixed += [
        (request.jobs.find(model.base), model.set)
        for model in select_models(grid, rows)
    ]
    for setting in request.settings:
        _require_applicable_setting(setting, fixed, request.jobs.find(grid.base))


def _require_applicable_setting(
    setting: str, fixed: Sequence[tuple[str, Settings]], grid_job: str
) -> None:
    """Raise an error if a setting cannot apply to any run.

    Args:
        setting: The assignment, such as "training.epochs=3".
        fixed: The job of each row and model, with the settings that stay as they are.
        grid_job: The grid's own job.

    Raises:
        ConfigError: No job of the grid has the key.
        ParameterError: Seeds and conditions are set otherwise, or the rows set the key.
    """
    key = read_setting_key(setting)
    if key == "seed":
        raise ParameterError(
            f"`settings` {setting}: the rows of an experiment set their seeds: give "
            "`seed` instead"
        )
    if key == "conditions":
        raise ParameterError(
            f"`settings` {setting}: the rows of an experiment set their conditions: "
            "leave it out"
        )
    with_key = [(job, settings) for job, settings in fixed if has_key(job, key)]
    if not with_key:
        # This raises ConfigError, which names the nearest key, unless the job takes it.
        load_job(grid_job, (setting,))
        raise ParameterError(
            f"`settings` {setting}: no job of this experiment has the key {key!r}"
        )
    if all(is_set_by(settings, key) for _, settings in with_key):
        raise ParameterError(
            f"`settings` {setting}: every row of this experiment sets {key} itself, so "
            "the setting would reach no run: leave it out"
        )


def list_skipped_settings(plan: GridPlan) -> list[tuple[str, str]]:
    """Return each user setting that some rows skip, with these rows and the reason."""
    labels: dict[tuple[str, str], list[str]] = {}
    one_of_each = [*plan.first, *(runs[0] for runs in plan.groups)]
    for run in one_of_each:
        for setting, reason in run.skipped.items():
            group = labels.setdefault((setting, reason), [])
            if run.row.label not in group:
                group.append(run.row.label)
    return [
        (setting, f"{list_names(list(map(repr, group)))}: {reason}")
        for (setting, reason), group in labels.items()
    ]
