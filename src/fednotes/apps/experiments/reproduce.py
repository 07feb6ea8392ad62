"""Run a grid: plan and rehearse its runs, carry them out, and write its table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fednotes.apps.experiments.attention import format_attention_page, run_attention
from fednotes.apps.experiments.grid_runs import GridRequest
from fednotes.apps.experiments.grids import (
    Attention,
    Grid,
    Jobs,
    Row,
    Settings,
    Size,
    choose_jobs,
    load_grid,
    select_grid_rows,
)
from fednotes.apps.experiments.planning import (
    GridPlan,
    Omission,
    PlanProgress,
    Rehearsal,
    describe_omitted,
    group_by_reason,
    ignore_line,
    ignore_progress,
    list_skipped_settings,
    plan_grid,
)
from fednotes.apps.experiments.scores import gather_table
from fednotes.apps.experiments.search import Cell, choose_runs, list_search_runs
from fednotes.apps.experiments.tables import format_results_page
from fednotes.apps.experiments.work import RunProgress, Work
from fednotes.core.errors import DataError
from fednotes.core.settings import expand_path
from fednotes.core.store import write_json, write_text
from fednotes.core.tensors import find_device
from fednotes.data.notes import NotePlace, find_packed_or_plain
from fednotes.jobs.job_file import load_job


def reproduce(  # noqa: PLR0913 - the options of a command
    name: str,
    out: Path,
    *,
    full: bool = False,
    settings: Settings = (),
    seed: Sequence[int] = (),
    base: Sequence[str] = (),
    workers: int = 2,
    device: str = "cpu",
    on_plan: PlanProgress = ignore_progress,
    on_run: RunProgress = ignore_progress,
    say: Callable[[str], None] = ignore_line,
    confirm: Callable[[str], None] | None = None,
    name_parameters: Callable[[str], str] = str,
) -> dict[str, Any]:
    """Run an experiment and write its table.

    All runs are planned and rehearsed first. Rows that cannot run are omitted and
    named, with the reason, before anything trains. Finished runs in `out` are kept, and
    unfinished ones are resumed.

    Args:
        name: The experiment, one of `list_experiments()`.
        out: The folder that holds runs/, which all experiments share, and a folder NAME
            (NAME-JOB on another job) with the results.
        full: Whether to run the full size instead of the budget size.
        settings: Further settings of every run, and of the runs that train the models
            from which rows start. A row keeps its own settings.
        seed: Seeds instead of the experiment's own.
        base: The user's own jobs, as in `choose_jobs`.
        workers: Number of concurrent runs.
        device: Device on which each run trains, as in `simulate`.
        on_plan: Called before each row is planned; see `plan_grid`.
        on_run: Called after each run with its name, the number of ended runs, and the
            total.
        say: Receives lines about omitted rows, the state and the time.
        confirm: Called with an estimate once the first run has ended, if the others
            will take long; raises an exception to stop.
        name_parameters: Rewrites the parameters of this function, which are in
            backticks, in the reasons that the table gives for omitted rows.

    Returns:
        The table, which is also in results.json.

    Raises:
        ParameterError: Nothing can run, or a setting applies to no run.
        FednotesError: A run failed; the message is the run's own.
    """
    find_device(device)
    grid, path = load_grid(name)
    jobs = choose_jobs(grid, path.parent.name, base)
    grid_size = _choose_size(grid, jobs, seed, full=full)
    if settings:
        grid_size = replace(grid_size, note=_mark_changed_budget(grid_size.note))
    rows, omitted = _choose_rows(grid, jobs, full=full)
    for reason, names in group_by_reason(omitted):
        say(describe_omitted(reason, names))
    if seed:
        # A row's own seeds would take precedence over those of the size.
        rows = [replace(row, seeds=()) for row in rows]
    if grid.attention is not None:
        require_notes(grid.attention, jobs, grid.base)
    request = GridRequest(
        jobs=jobs,
        size=grid_size,
        full=full,
        out=out,
        settings=tuple(settings),
        device=device,
    )
    plan = plan_grid(grid, rows, request, Rehearsal(), on_plan=on_plan, say=say)

    work = Work(workers, device=device, on_run=on_run, say=say, confirm=confirm)
    cells = _carry_out(plan, work)

    label = f"{name}-{jobs.shorten_name(grid.base)}" if jobs.replacements else name
    folder = out / label
    if grid.attention is not None:
        first_seed = grid_size.seeds[0]
        models = plan.models[first_seed]
        table = compare_attention(grid, models, folder, jobs=jobs, seed=first_seed)
    else:
        job_names = list(dict.fromkeys(jobs.shorten_name(row.base) for row in rows))
        table = gather_table(grid, grid_size, cells, job_names)
    table |= {
        "experiment": name,
        "full": full,
        "settings": list(settings),
        "skipped_settings": list_skipped_settings(plan),
        "omitted": [
            (name_parameters(reason), names)
            for reason, names in group_by_reason([*omitted, *plan.omitted])
        ],
        "base": dict(jobs.replacements),
        "name": label,
    }
    _write_results(table, folder)
    return table


def _write_results(table: Mapping[str, Any], folder: Path) -> None:
    """Write results.json, the table, and results.md, its page, into a folder."""
    write_json(folder / "results.json", table, private=False)
    write_text(folder / "results.md", format_results_page(table), private=False)


def _choose_size(grid: Grid, jobs: Jobs, seeds: Sequence[int], *, full: bool) -> Size:
    """Return the size to run, with the seeds and the note that the user's job needs.

    Args:
        grid: The grid.
        jobs: Its jobs, some of which the user may have replaced.
        seeds: The user's seeds; empty for those of the grid.
        full: Whether to run the full size.
    """
    size = grid.full if full else grid.budget
    if seeds:
        size = replace(size, seeds=tuple(seeds))
    if jobs.replacements and size.own_note:
        size = replace(size, note=size.own_note)
    return size


def _mark_changed_budget(note: str) -> str:
    """Return a note that says that its budget does not include the user's settings."""
    start = "Budget: "
    if note.startswith(start):
        return f"Budget, before the changed settings: {note.removeprefix(start)}"
    return note


def _choose_rows(
    grid: Grid, jobs: Jobs, *, full: bool
) -> tuple[list[Row], list[Omission]]:
    """Return the rows to run, and those omitted because their job is missing."""
    rows, missing = select_grid_rows(grid, jobs, full=full)
    omitted = [
        Omission(
            label,
            "",
            f"to run the rows of job {job!r}, give your own job with `base` {job}=JOB",
        )
        for job, labels in missing.items()
        for label in labels
    ]
    return rows, omitted


def _carry_out(plan: GridPlan, work: Work) -> list[Cell]:
    """Carry out all runs of a plan; return those to show in the table."""
    work.announce(plan.first, plan.groups)
    # Rows start from the models of these runs, and searches choose the rows' settings.
    work.carry_out(plan.first)
    work.carry_out([run for runs in plan.groups for run in list_search_runs(runs)])
    cells = [choose_runs(runs) for runs in plan.groups]
    work.carry_out([run for cell in cells for run in cell.runs])
    return cells


# ---- attention -----------------------------------------------------------------------


def require_notes(attention: Attention, jobs: Jobs, base: str) -> None:
    """Raise DataError unless the notes for comparing attention exist."""
    paths, _ = _find_notes(attention, jobs, base)
    for path in paths:
        if isinstance(path, Path) and not path.exists():
            raise DataError(
                f"{path}: no such file or folder of notes to compare attention on"
            )


def _find_notes(
    attention: Attention, jobs: Jobs, base: str
) -> tuple[list[NotePlace], list[str]]:
    """Return the paths and categories of the notes for comparing attention.

    For a user's own job, they are the notes of its sites.
    """
    if not jobs.replacements:
        return [Path(expand_path(path, "notes")) for path in attention.notes], []
    job = load_job(jobs.find(base))
    paths: list[NotePlace] = []
    categories: list[str] = []
    for site in job.sites.values():
        for text in site.files:
            place = job.locate_notes(text, "path", site.query, site.omop)
            if isinstance(place, Path):
                place = find_packed_or_plain(place)
            paths.append(place)
        categories += site.categories
    return paths, categories


def compare_attention(
    grid: Grid, models: Mapping[str, str], out: Path, *, jobs: Jobs, seed: int
) -> dict[str, Any]:
    """Compare the attention heads of a grid's models, and return the page about it.

    Args:
        grid: A grid with `attention`.
        models: The folders of its models by name.
        out: The folder for the results.
        jobs: The jobs of the grid.
        seed: Seed of the drawn passages.

    Returns:
        A table with one key, "markdown": the finished page. Other grids return scores,
        which this one does not have.
    """
    assert grid.attention is not None
    model_specs = _list_model_specs(grid.attention, models, jobs, grid.base)
    notes, categories = _find_notes(grid.attention, jobs, grid.base)
    facts = run_attention(model_specs, notes, out, seed=seed, categories=categories)
    return {"markdown": format_attention_page(facts)}


def _list_model_specs(
    attention: Attention, models: Mapping[str, str], jobs: Jobs, base: str
) -> list[str]:
    """Return the models to compare, each as NAME=FOLDER.

    The first one is the encoder "base", from which the grid's models were trained. For
    a user's own job, that is the encoder which the job names.
    """
    specs = [model.format(**models) for model in attention.models]
    if jobs.replacements:
        specs[0] = f"base={load_job(jobs.find(base)).config.model.encoder}"
    return specs
