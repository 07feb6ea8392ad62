"""Everything that a grid will run, and what of it cannot run here, found before
anything trains.

A run is refused if its settings do not fit its job, if a file, a model's weights or an
extra is missing, or if its site or method refuses to take part. Most of this shows only
when the sites and their models are made, so the runs are rehearsed: they are made as
`simulate` makes them, and none is trained. What is refused is left out by name, and the
rest runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fednotes.apps.experiments.grids import (
    Before,
    Grid,
    GridRun,
    Models,
    Request,
    Row,
    befores_of,
    has_key,
    plan,
    plan_before,
    seeds_of,
    sets_itself,
)
from fednotes.core.errors import ConfigError, FednotesError
from fednotes.jobs.checking import rehearse
from fednotes.jobs.job import Job, Sites, load_sites
from fednotes.jobs.job_file import load_job
from fednotes.jobs.results import some_of
from fednotes.jobs.simulate import parts_of

_KEPT = 2  # jobs' data in memory, so that rows of one corpus read it once
_NOT_DATA = {
    "training",
    "model",
    "title",
    "notes",
    "conditions",
    "threads",
    "federation",
    "method",
}


@dataclass(frozen=True)
class LeftOut:
    """A row and condition that cannot run, and why."""

    label: str
    condition: str
    reason: str


@dataclass
class Planned:
    """The runs of a grid.

    first: the runs that make the models from which rows start. groups: the runs of each row and
    condition. models: seed → name → the folder of each such model. left_out: what cannot run.
    """

    first: list[GridRun] = field(default_factory=list)
    groups: list[list[GridRun]] = field(default_factory=list)
    models: Models = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)


class Rehearsal:
    """Makes the sites and models of runs without training them."""

    def __init__(self) -> None:
        self._sites: dict[str, Sites] = {}
        self._seen: dict[Path, str] = {}

    def refusal(self, runs: Iterable[GridRun]) -> str:
        """Return why these runs of one row and condition cannot run; empty if they can.

        Of runs that differ in the seed alone the first one stands for all.
        """
        runs = list(runs)
        if not runs:
            return ""
        first_seed = runs[0].seed
        for run in runs:
            if run.seed != first_seed or run.done or run.job is None:
                continue
            if run.folder not in self._seen:
                self._seen[run.folder] = self._why(run.job)
            if reason := self._seen[run.folder]:
                return reason
        return ""

    def _why(self, job: Job) -> str:
        try:
            sites = self._load(job)
            config = job.module.configure(job.config, sites.data)
            rehearse(job, parts_of(job, sites, config))
        except FednotesError as error:
            return str(error)
        return ""

    def _load(self, job: Job) -> Sites:
        """Return the job's data, read once for jobs that read the same."""
        table = {key: value for key, value in job.table.items() if key not in _NOT_DATA}
        key = json.dumps(
            [job.data, str(job.folder), table], sort_keys=True, default=str
        )
        if key not in self._sites:
            while len(self._sites) >= _KEPT:
                del self._sites[next(iter(self._sites))]
            self._sites[key] = load_sites(job)
        return self._sites[key]


def plan_grid(
    grid: Grid,
    rows: Sequence[Row],
    request: Request,
    rehearsal: Rehearsal,
    say: Callable[[str], None] = lambda line: None,
) -> Planned:
    """Plan a grid's runs and leave out those that cannot run.

    Args:
        grid: The grid.
        rows: Those of its rows that are asked for.
        request: Jobs, size, settings and device of all runs.
        rehearsal: Makes the sites and models of each run.
        say: Receives a line for each reason why rows or settings are left out.

    Raises:
        ConfigError: A setting fits no run at all, or nothing can run.
    """
    planned = Planned()
    refuse_settings(rows, grid, request)
    seeds = [seed for row in rows for seed in seeds_of(row, request.size, request.full)]
    seeds = list(dict.fromkeys((*request.size.seeds, *seeds)))
    befores = befores_of(grid, rows)
    before_runs, refused = _plan_befores(befores, request, seeds, rehearsal)
    models = {seed: _folders(before_runs, seed) for seed in seeds}
    stand_ins = {seed: _stand_ins(before_runs, seed) for seed in seeds}

    for row in rows:
        for condition in row.conditions:
            reason = _missing_model(row, refused)
            runs: list[GridRun] = []
            if not reason:
                try:
                    runs = plan(
                        row,
                        condition,
                        request,
                        models=models,
                        stand_ins=stand_ins,
                        needs_validation=grid.score == "validation",
                    )
                except ConfigError as error:
                    reason = str(error)
            reason = reason or rehearsal.refusal(runs)
            if reason:
                planned.left_out.append(LeftOut(row.label, condition, reason))
            else:
                planned.groups.append(runs)

    used = {
        name for runs in planned.groups for name in _named_models(runs[0].row, befores)
    }
    if grid.attention is not None:
        used = {each.name for each in befores}
        for name, reason in refused.items():
            planned.left_out.append(LeftOut(name, "", reason))
    planned.first = [
        run for name in before_runs if name in used for run in before_runs[name]
    ]
    planned.models = models
    _require_something(planned, grid)
    _say_left_out(planned.left_out, say)
    _say_settings(planned, request, say)
    return planned


def refuse_settings(rows: Sequence[Row], grid: Grid, request: Request) -> None:
    """Raise ConfigError for a setting of the user's that can reach no run of the grid."""
    befores = befores_of(grid, rows)
    for setting in request.settings:
        key = setting.partition("=")[0].strip()
        if key == "seed":
            raise ConfigError(
                f"--set {setting}: the rows say their seeds: give --seed instead"
            )
        if key == "conditions":
            raise ConfigError(
                f"--set {setting}: the rows of an experiment say their conditions"
            )
        jobs = {row.base for row in rows} | {each.base for each in befores}
        if not any(has_key(request.jobs[job], key) for job in jobs):
            load_job(request.jobs[grid.base], (setting,))  # raises with the nearest key
            raise ConfigError(
                f"--set {setting}: no job of this experiment has the key {key!r}"
            )
        takes = [
            has_key(request.jobs[row.base], key)
            and not sets_itself(request.own_settings(row), key)
            for row in rows
        ]
        takes += [
            has_key(request.jobs[each.base], key)
            and not sets_itself(request.settings_before(each), key)
            for each in befores
        ]
        if not any(takes):
            raise ConfigError(
                f"--set {setting}: every row of this experiment sets {key} itself, so the setting "
                "would reach no run: leave it out"
            )


def _plan_befores(
    befores: Sequence[Before],
    request: Request,
    seeds: Sequence[int],
    rehearsal: Rehearsal,
) -> tuple[dict[str, list[GridRun]], dict[str, str]]:
    """Return the runs by the name of their model, and the models that cannot be made,
    with why."""
    runs: dict[str, list[GridRun]] = {}
    refused: dict[str, str] = {}
    for before in befores:
        if request.jobs.own and before.base not in request.jobs.own:
            job = request.jobs[before.base]
            refused[before.name] = (
                f"it is of the job {job!r}: name yours with --base {before.base}=JOB, or take "
                f"that one: --base {before.base}={job}"
            )
            continue
        try:
            planned = plan_before(before, request, seeds)
        except ConfigError as error:
            refused[before.name] = str(error)
            continue
        if reason := rehearsal.refusal(planned):
            refused[before.name] = reason
        else:
            runs[before.name] = planned
    return runs, refused


def _folders(before_runs: Mapping[str, Sequence[GridRun]], seed: int) -> dict[str, str]:
    """Return the folder of the model that each run ends with, for the rows of a seed."""
    return {
        name: str(run.folder / run.condition / "model")
        for name, runs in before_runs.items()
        for run in runs
        if run.seed == seed or len(runs) == 1
    }


def _stand_ins(
    before_runs: Mapping[str, Sequence[GridRun]], seed: int
) -> dict[str, str]:
    """Return what stands for each model in a rehearsal: itself, or what its run starts
    from."""
    found = _folders(before_runs, seed)
    for name, folder in found.items():
        if Path(folder).is_dir():
            continue
        job = before_runs[name][0].job
        model = getattr(job.config, "model", None) if job is not None else None
        found[name] = getattr(model, "encoder", "") or "none"
    return found


def _named_models(row: Row, befores: Sequence[Before]) -> list[str]:
    text = " ".join((*row.set, *row.budget))
    return [each.name for each in befores if "{" + each.name + "}" in text]


def _missing_model(row: Row, refused: Mapping[str, str]) -> str:
    text = " ".join((*row.set, *row.budget))
    for name, reason in refused.items():
        if "{" + name + "}" in text:
            return f"it starts from the model {name!r}, which cannot be made: {reason}"
    return ""


def _require_something(planned: Planned, grid: Grid) -> None:
    """Raise one ConfigError if nothing, or not what an analysis needs, can run."""
    enough = planned.groups if grid.attention is None else not planned.left_out
    if enough:
        return
    reasons = list(dict.fromkeys(each.reason for each in planned.left_out))
    if len(reasons) > 1:
        reasons = [f"({number}) {reason}" for number, reason in enumerate(reasons, 1)]
    raise ConfigError(f"nothing of this experiment can run: {'; '.join(reasons)}")


def by_reason(left_out: Sequence[LeftOut]) -> list[tuple[str, list[str]]]:
    """Return each reason with the rows and conditions that it holds for."""
    found: dict[str, list[str]] = {}
    for each in left_out:
        name = f"{each.label}, {each.condition}" if each.condition else each.label
        found.setdefault(each.reason, []).append(name)
    return list(found.items())


def _say_left_out(left_out: Sequence[LeftOut], say: Callable[[str], None]) -> None:
    for reason, rows in by_reason(left_out):
        say(f"left out: {'; '.join(rows)}: {reason}")


def _say_settings(
    planned: Planned, request: Request, say: Callable[[str], None]
) -> None:
    for setting, reason in skipped_settings(planned, request):
        say(f"--set {setting} does not reach {reason}")


def skipped_settings(planned: Planned, request: Request) -> list[tuple[str, str]]:
    """Return each setting of the user's that some runs do not take, and which and why."""
    found: dict[tuple[str, str], list[str]] = {}
    one_of_each = [*planned.first, *(runs[0] for runs in planned.groups)]
    for run in one_of_each:
        for setting, reason in run.skipped.items():
            labels = found.setdefault((setting, reason), [])
            if run.row.label not in labels:
                labels.append(run.row.label)
    return [
        (setting, f"{some_of(list(map(repr, labels)))}: {reason}")
        for (setting, reason), labels in found.items()
    ]
