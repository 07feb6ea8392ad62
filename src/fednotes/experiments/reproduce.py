"""Tables and figures of the papers: a grid of runs over one job.

A grid is a TOML file beside its job: `base` names the job, each `[[runs]]` a row with the
settings that it changes, `[budget]` and `[full]` the seeds and settings of either size. Every
run is one `fednotes simulate` command in a process of its own. `[[before]]` are runs whose
models rows start from: `{name}` in a row's settings is the folder of that model. Rows may search
settings, by validation scores. Jobs of the user's own can stand for those that a grid names.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from fednotes.core.errors import ConfigError, FednotesError, nearest
from fednotes.core.settings import build, expand, read_toml
from fednotes.core.stopping import call
from fednotes.core.store import write_json, write_text
from fednotes.experiments.grids import (
    Attention,
    Before,
    Grid,
    GridRun,
    Jobs,
    Models,
    Row,
    Settings,
    Size,
    befores_of,
    own_jobs,
    plan,
    plan_before,
    rows_of,
    seeds_of,
)
from fednotes.experiments.tables import choose, gather, markdown
from fednotes.jobs.job_file import load_job
from fednotes.jobs.results import duration
from fednotes.jobs.simulate import LONG

Told = Callable[[str, int, int], None]  # the run that has ended, how many have, of how many


@lru_cache(maxsize=1)
def grids() -> Mapping[str, Path]:
    """Grid files by name, such as `fedner-table2`."""
    root = Path(str(resources.files("fednotes") / "experiments"))
    found = {f"{path.parent.name}-{path.stem}": path for path in sorted(root.glob("*/*.toml"))}
    return {name: path for name, path in found.items() if "base" in read_toml(path)}


def load_grid(name: str) -> tuple[Grid, Path]:
    """A grid by name. Raises ConfigError."""
    known = grids()
    if name not in known:
        raise ConfigError(f"no experiment is called {name!r}; {nearest(name, known)}")
    path = known[name]
    return build(Grid, read_toml(path), path.name), path


def reproduce(
    name: str,
    out: Path,
    *,
    full: bool = False,
    settings: Settings = (),
    seeds: tuple[int, ...] = (),
    base: Sequence[str] = (),
    workers: int = 2,
    tell: Told = lambda run, done, all: None,
    say: Callable[[str], None] = lambda line: None,
    agree: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Run a grid and gather its table; finished runs in `out` are kept, unfinished resumed.

    settings: further `--set` for every run. seeds: in place of the grid's. base: jobs of the
    user's own, see `own_jobs`. tell: called after each run. say: lines about state and cost.
    agree: asked once the first run has told how long all may take, where that is long; raises
    to stop.
    out: holds runs/ (shared by all grids) and a folder NAME (NAME-JOB on another job) with the
    results.
    Raises FednotesError with a failed run's own message.
    """
    grid, path = load_grid(name)
    jobs = own_jobs(grid, path.parent.name, base)
    size = grid.full if full else grid.budget
    size = replace(size, seeds=seeds or size.seeds)
    rows, left_out = rows_of(grid, jobs, full)
    rows = [replace(row, seeds=()) for row in rows] if seeds else rows
    for job in left_out:
        say(f"rows of the job {job!r} are left out: give yours with --base {job}=JOB")
    befores = befores_of(grid, rows, jobs)
    every = replace(size, seeds=_seeds(rows, size, full))
    first = [run for each in befores for run in plan_before(each, jobs, every, full, out)]
    models = _models(befores, first, every.seeds)
    planned = [
        run for row in rows for run in plan(row, jobs, grid.base, size, full, out, settings, models)
    ]
    groups = _groups(planned)
    trials = [run for runs in groups for run in _trials(runs, grid.search_seeds)]
    work = _Work(workers, tell, say, agree)
    work.expect(first, planned, grid.search_seeds)
    work.do(first)
    work.do(trials)
    runs, tried = _chosen(groups, grid.search_seeds)
    work.do(runs)
    called = f"{name}-{jobs.named(grid.base)}" if jobs.own else name
    folder = out / called
    if grid.attention is not None:
        table = _attention(grid.attention, models[size.seeds[0]], folder, size, jobs, grid.base)
    else:
        names = list(dict.fromkeys(jobs.named(row.base or grid.base) for row in rows))
        table = gather(grid, rows, size, runs, tried, names)
    table |= {"experiment": name, "full": full, "settings": list(settings)}
    table |= {"base": dict(jobs.own), "name": called}
    write_json(folder / "results.json", table, private=False)
    write_text(folder / "results.md", markdown(table), private=False)
    return table


def _seeds(rows: Sequence[Row], size: Size, full: bool) -> tuple[int, ...]:
    """All that any row has."""
    found = [seed for row in rows for seed in seeds_of(row, size, full)]
    return tuple(dict.fromkeys((*size.seeds, *found)))


def _models(befores: Sequence[Before], first: Sequence[GridRun], seeds: tuple[int, ...]) -> Models:
    """Seed → name → the folder of the model that the run ends with."""
    once = {each.name for each in befores if each.seed}
    return {
        seed: {
            run.row.label: str(run.folder / run.condition / "model")
            for run in first
            if run.seed == seed or run.row.label in once
        }
        for seed in seeds
    }


def _groups(planned: Sequence[GridRun]) -> list[list[GridRun]]:
    """The runs of each row and condition."""
    found: dict[tuple[int, str], list[GridRun]] = {}
    for run in planned:
        found.setdefault((id(run.row), run.condition), []).append(run)
    return list(found.values())


def _chosen(
    groups: Sequence[Sequence[GridRun]], search_seeds: int
) -> tuple[list[GridRun], dict[tuple[str, str], list[dict[str, Any]]]]:
    """The runs of the settings that validation data choose; and what was tried."""
    kept: list[GridRun] = []
    tried = {}
    for runs in groups:
        choice = runs[0].choice
        if trials := list(_trials(runs, search_seeds)):
            choice, tried[runs[0].row.label, runs[0].condition] = choose(trials)
        kept += [run for run in runs if run.choice == choice]
    return kept, tried


def _trials(runs: Sequence[GridRun], search_seeds: int) -> Iterator[GridRun]:
    """Of one row and condition, what its choice depends on; nothing where there is none."""
    if len({run.choice for run in runs}) > 1:
        seeds = list(dict.fromkeys(run.seed for run in runs))[:search_seeds]
        yield from (run for run in runs if run.seed in seeds)


class _Work:
    """Runs that are done some at a time, each once; and what is told of them."""

    def __init__(
        self,
        workers: int,
        tell: Told,
        say: Callable[[str], None],
        agree: Callable[[str], None] | None,
    ) -> None:
        self._workers, self._tell, self._say, self._agree = workers, tell, say, agree
        self._seen: set[Path] = set()
        self._all = self._left = self._done = 0
        self._timed = False

    def expect(
        self, first: Sequence[GridRun], planned: Sequence[GridRun], search_seeds: int
    ) -> None:
        """Say how things stand before anything runs."""
        needed = [*first]
        for group in _groups(planned):  # whichever setting is chosen runs on the other seeds
            trials = list(_trials(group, search_seeds))
            rest = [run for run in group if run.choice == group[0].choice]
            needed += [*trials, *(r for r in rest if r.seed not in {t.seed for t in trials})]
        self._all = len({run.folder for run in needed})
        states = {run.folder: (run.done, run.begun) for run in (*first, *planned)}.values()
        done, begun = sum(d for d, _ in states), sum(b and not d for d, b in states)
        self._left = max(0, self._all - done)
        self._say(
            f"{self._all} runs: {done} done, {begun} begun, {max(0, self._left - begun)} to begin"
        )

    def do(self, runs: Sequence[GridRun]) -> None:
        """Run what was not run before. Raises FednotesError."""
        new = [run for run in {r.folder: r for r in runs}.values() if run.folder not in self._seen]
        self._seen |= {run.folder for run in new}
        if self._agree is not None and not self._timed:
            waiting = next((run for run in new if not run.done), None)
            if waiting is not None:  # it alone, so that the others can be asked about
                self._note(*_timed_run(waiting))
                new.remove(waiting)
        with ThreadPoolExecutor(max_workers=self._workers) as pool:
            for label, seconds in pool.map(_timed_run, new):
                self._note(label, seconds)

    def _note(self, label: str, seconds: float) -> None:
        self._done += 1
        self._tell(label, self._done, self._all)
        if not seconds:
            return
        self._left -= 1
        if not self._timed and self._left:
            self._timed = True
            most = seconds * self._left / self._workers
            line = (
                f"about {duration(most)} at most for {self._left} more runs, if each takes as "
                f"long as the first ({duration(seconds)}) and {self._workers} go on at a time"
            )
            self._say(line)
            if self._agree is not None and most > LONG:
                self._agree(line)


def _timed_run(run: GridRun) -> tuple[str, float]:
    """Its label, and the seconds that it took; 0 if it was done before."""
    done, started = run.done, time.monotonic()
    label = _run(run)
    return label, 0.0 if done else time.monotonic() - started


def _run(run: GridRun) -> str:
    """One simulate command; its output goes into a log beside its folder."""
    if not run.done:
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        resume = ["--resume"] if run.begun else []
        log = run.folder.with_suffix(".log")
        with log.open("a", encoding="utf-8") as file:
            before = file.tell()
            code = call(
                [sys.executable, "-m", "fednotes", *run.arguments, *resume],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        if code:
            said = _said(log.read_bytes()[before:].decode("utf-8", "replace"))
            raise FednotesError(f"{said} (in: fednotes {shlex.join(run.arguments)})")
    return f"{run.row.label}, {run.condition}, seed {run.seed}"


def _said(output: str) -> str:
    """The first error that a command told, else its last line."""
    lines = output.strip().splitlines() or ["no output"]
    return next((line for line in lines if line.startswith("error: ")), lines[-1]).removeprefix(
        "error: "
    )


def _attention(
    asked: Attention, models: Mapping[str, str], out: Path, size: Size, jobs: Jobs, base: str
) -> dict[str, Any]:
    """Compare attention heads; the table of the paper's section 4.3.

    On a job of the user's own the notes are its sites', and `base` is the encoder that it names.
    """
    from fednotes.experiments.attention import markdown as shown
    from fednotes.experiments.attention import run_attention

    named = [model.format(**models) for model in asked.models]
    notes = [Path(expand(path, "notes")) for path in asked.notes]
    categories: list[str] = []
    if jobs.own:
        job = load_job(jobs[base])
        named[0] = f"base={job.config.model.encoder}"
        notes = [job.located(p, "path") for site in job.sites.values() for p in site.files]
        categories = [name for site in job.sites.values() for name in site.categories]
    found = run_attention(
        named,
        notes,
        out,
        sample=asked.sample,
        length=asked.length,
        seed=size.seeds[0],
        categories=categories,
    )
    return {"markdown": shown(found)}
