"""Tables and figures of the papers: a grid of runs over one job.

A grid is a TOML file beside its job: `base` names the job, each `[[runs]]` a row with
the settings that it changes, `[budget]` and `[full]` the seeds and settings of either
size. Every run is one `fednotes simulate` command in a process of its own. `[[before]]`
are runs whose models rows start from: `{name}` in a row's settings is the folder of
that model. Rows may search settings, by validation scores. Jobs of the user's own can
stand for those that a grid names. `planning.py` finds what cannot run before anything
trains.
"""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import lru_cache
from importlib import resources
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from fednotes.apps.experiments.grids import (
    Attention,
    Grid,
    GridRun,
    Jobs,
    Request,
    Row,
    Settings,
    Size,
    own_jobs,
    rows_of,
)
from fednotes.apps.experiments.planning import (
    Rehearsal,
    by_reason,
    plan_grid,
    skipped_settings,
)
from fednotes.apps.experiments.tables import KINDS, MISSING, RATES, is_plain, markdown
from fednotes.core.errors import (
    ConfigError,
    DataError,
    FednotesError,
    MissingExtra,
    nearest,
)
from fednotes.core.settings import build, expand, read_toml
from fednotes.core.stopping import call
from fednotes.core.store import write_json, write_text
from fednotes.core.tensors import device_of
from fednotes.data.notes import find_packed_or_plain
from fednotes.jobs.job_file import load_job
from fednotes.jobs.results import duration, read_lines, read_result
from fednotes.jobs.simulate import LONG
from fednotes.metrics.gap import gap_by_seed
from fednotes.metrics.paired_tests import FEWEST_SEEDS, paired_t
from fednotes.metrics.summaries import summarise

# the run that has ended, how many have, of how many
Told = Callable[[str, int, int], None]
# of a row and condition; what else was tried
Cell = tuple[list[GridRun], list[dict[str, Any]]]


@lru_cache(maxsize=1)
def grids() -> Mapping[str, Path]:
    """Grid files by name, such as `fedner-table2`."""
    root = Path(str(resources.files("fednotes") / "apps" / "experiments"))
    found = {
        f"{path.parent.name}-{path.stem}": path
        for path in sorted(root.glob("*/*.toml"))
    }
    return {name: path for name, path in found.items() if "base" in read_toml(path)}


def load_grid(name: str) -> tuple[Grid, Path]:
    """A grid by name. Raises ConfigError."""
    known = grids()
    if name not in known:
        raise ConfigError(f"no experiment is called {name!r}; {nearest(name, known)}")
    path = known[name]
    return build(Grid, read_toml(path), path.name), path


def experiments() -> dict[str, str]:
    """Return every experiment's name and title."""
    return {name: load_grid(name)[0].title for name in grids()}


def reproduce(
    name: str,
    out: Path,
    *,
    full: bool = False,
    settings: Settings = (),
    seeds: tuple[int, ...] = (),
    base: Sequence[str] = (),
    workers: int = 2,
    device: str = "cpu",
    tell: Told = lambda run, done, all: None,
    say: Callable[[str], None] = lambda line: None,
    agree: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Run a grid and gather its table; finished runs in `out` are kept, unfinished
    resumed.

    All runs are planned and rehearsed first. What cannot run is left out by name, with
    its reason, before anything trains.

    Args:
        name: The experiment, one of `experiments()`.
        out: Holds runs/, which all grids share, and a folder NAME (NAME-JOB on another
            job) with the results.
        full: The full size in place of the budget's.
        settings: Further `--set` assignments for every run, those of the models that
            rows start from included. A row keeps what it sets itself.
        seeds: In place of the grid's.
        base: Jobs of the user's own, see `own_jobs`.
        workers: Runs at a time.
        device: Where each run trains, as `simulate` takes it.
        tell: Called after each run.
        say: Receives lines about what is left out, state and cost.
        agree: Asked once the first run has told how long all may take, where that is
            long; raises to stop.

    Raises:
        ConfigError: Nothing can run, or a setting reaches no run.
        FednotesError: A run failed; the message is its own.
    """
    device_of(device)
    grid, path = load_grid(name)
    jobs = own_jobs(grid, path.parent.name, base)
    size = grid.full if full else grid.budget
    size = replace(size, seeds=seeds or size.seeds)
    if jobs.own and size.own_note:
        size = replace(size, note=size.own_note)
    rows, other_jobs = rows_of(grid, jobs, full)
    rows = [replace(row, seeds=()) for row in rows] if seeds else rows
    for job in other_jobs:
        say(f"rows of the job {job!r} are left out: give yours with --base {job}=JOB")
    if grid.attention is not None:
        require_notes(grid.attention, jobs, grid.base)
    request = Request(jobs, size, full, out, tuple(settings), device)
    planned = plan_grid(grid, rows, request, Rehearsal(), say)

    work = _Work(workers, tell, say, agree)
    work.expect(planned.first, planned.groups)
    work.do(planned.first)
    work.do([run for runs in planned.groups for run in _trials(runs)])
    cells = [_chosen(runs) for runs in planned.groups]
    work.do([run for runs, _ in cells for run in runs])

    called = f"{name}-{jobs.named(grid.base)}" if jobs.own else name
    folder = out / called
    if grid.attention is not None:
        models = planned.models[size.seeds[0]]
        table = _attention(grid.attention, models, folder, size, jobs, grid.base)
    else:
        names = list(dict.fromkeys(jobs.named(row.base) for row in rows))
        table = gather(grid, size, cells, names)
    table |= {
        "experiment": name,
        "full": full,
        "settings": list(settings),
        "skipped_settings": skipped_settings(planned, request),
        "left_out": by_reason(planned.left_out),
        "base": dict(jobs.own),
        "name": called,
    }
    write_json(folder / "results.json", table, private=False)
    write_text(folder / "results.md", markdown(table), private=False)
    return table


def _chosen(runs: Sequence[GridRun]) -> Cell:
    """Return the runs of the setting that validation data choose, and all that were
    tried."""
    trials = _trials(runs)
    choice, tried = choose(trials) if trials else (runs[0].choice, [])
    return [run for run in runs if run.choice == choice and not run.is_trial], tried


def _trials(runs: Sequence[GridRun]) -> list[GridRun]:
    """Return the runs of one row and condition that its choice depends on; none without
    one."""
    if trials := [run for run in runs if run.is_trial]:
        return trials
    several = len({run.choice for run in runs}) > 1
    return [run for run in runs if several and run.seed == runs[0].seed]


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
        self, first: Sequence[GridRun], groups: Sequence[Sequence[GridRun]]
    ) -> None:
        """Say how things stand before anything runs."""
        needed = [*first]
        for group in groups:  # whichever setting is chosen runs on the other seeds
            needed += _trials(group)
            needed += [
                r for r in group if r.choice == group[0].choice and not r.is_trial
            ]
        self._all = len({run.folder for run in needed})
        every = [*first, *(run for group in groups for run in group)]
        states = {run.folder: (run.done, run.begun) for run in every}.values()
        done, begun = sum(d for d, _ in states), sum(b and not d for d, b in states)
        self._left = max(0, self._all - done)
        self._say(
            f"{self._all} runs: {done} done, {begun} begun, {max(0, self._left - begun)} to begin"
        )

    def do(self, runs: Sequence[GridRun]) -> None:
        """Run what was not run before. Raises FednotesError."""
        new = [
            run
            for run in {r.folder: r for r in runs}.values()
            if run.folder not in self._seen
        ]
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
    return next(
        (line for line in lines if line.startswith("error: ")), lines[-1]
    ).removeprefix("error: ")


def require_notes(asked: Attention, jobs: Jobs, base: str) -> None:
    """Raise DataError unless the notes that attention is compared on are there."""
    for path in _notes_of(asked, jobs, base)[0]:
        if not path.exists():
            raise DataError(
                f"{path}: no such file or folder of notes to compare attention on"
            )


def _notes_of(asked: Attention, jobs: Jobs, base: str) -> tuple[list[Path], list[str]]:
    """Return the notes' paths and categories, those of the user's job if there is one."""
    if not jobs.own:
        return [Path(expand(path, "notes")) for path in asked.notes], []
    job = load_job(jobs[base])
    sites = job.sites.values()
    notes = [
        find_packed_or_plain(job.locate(path, "path"))
        for site in sites
        for path in site.files
    ]
    return notes, [name for site in sites for name in site.categories]


def _attention(
    asked: Attention,
    models: Mapping[str, str],
    out: Path,
    size: Size,
    jobs: Jobs,
    base: str,
) -> dict[str, Any]:
    """Compare attention heads; the table of the paper's section 4.3.

    On a job of the user's own the notes are its sites', and `base` is the encoder that
    it names.
    """
    from fednotes.apps.experiments.attention import markdown as shown
    from fednotes.apps.experiments.attention import run_attention

    named = [model.format(**models) for model in asked.models]
    notes, categories = _notes_of(asked, jobs, base)
    if jobs.own:
        named[0] = f"base={load_job(jobs[base]).config.model.encoder}"
    found = run_attention(named, notes, out, seed=size.seeds[0], categories=categories)
    return {"markdown": shown(found)}


# the numbers

Summaries = Mapping[int, Mapping[str, Any]]  # seed → a run's summary


def gather(
    grid: Grid, size: Size, cells: Sequence[Cell], names: Sequence[str]
) -> dict[str, Any]:
    """Mean and standard deviation over seeds for every row, condition and site.

    names: of the jobs, for pairs of rows whose labels have one.
    """
    found, read = [], {}
    for runs, tried in cells:
        summaries = [read_result(run.folder).model_dump() for run in runs]
        one = runs[0]
        seeds = (run.seed for run in runs)
        read[one.row.label, one.condition] = dict(zip(seeds, summaries, strict=True))
        row = _row(grid, one.row, runs, summaries)
        row |= {"chosen": list(one.choice), "tried": tried, "of": one.row}
        found.append(row)
    for row in found:
        row["gap"] = _gap(grid, row.pop("of"), row["condition"], read)
    told = (
        "title",
        "x",
        "score",
        "columns",
        "by_output",
        "against",
        "megabytes",
        "seconds",
    )
    return {
        **{name: getattr(grid, name) for name in (*told, "paper", "paper_note")},
        "note": size.note,
        "seeds": sorted({run.seed for runs, _ in cells for run in runs}),
        "set": list(size.set),
        "rows": found,
        **_tested(grid, read, names),
    }


def _gap(
    grid: Grid, row: Row, condition: str, read: Mapping[tuple[str, str], Summaries]
) -> dict[str, Any]:
    """Mean and deviation of the share of pooled - alone that a row closes, or why it
    has none."""
    ends = [_end(text) for text in row.gap]
    if condition != "federated" or not ends or not all(end in read for end in ends):
        return {}
    rows = [read[ends[0]], read[row.label, condition], read[ends[1]]]
    seeds = sorted(set.intersection(*map(set, rows)))
    names = (ends[0][1], condition, ends[1][1])
    scores = [
        [_lead(grid, of[seed], c) for seed in seeds]
        for of, c in zip(rows, names, strict=True)
    ]
    try:
        shares, why = gap_by_seed(*scores)
    except MissingExtra as missing:
        return {"why": str(missing)}
    return (
        {"why": why}
        if why
        else summarise([{"closed": share} for share in shares])["closed"]
    )


def _lead(grid: Grid, run: Mapping[str, Any], condition: str) -> float:
    """The score that a gap is measured in, more being better: the grid's last column of
    scores, or the mean strict F1; NaN where the run has none."""
    names = [
        name for name in grid.columns if name != "s" and not name.startswith("MB ")
    ]
    if not names:
        return float(_picked(run, condition, grid.score)["mean"]["strict"]["f1"])
    found = column(run, condition, names[-1])
    score = math.nan if found is None else found
    return -score if is_plain(names[-1]) else score


def _row(
    grid: Grid, row: Row, own: Sequence[GridRun], read: list[dict[str, Any]]
) -> dict[str, Any]:
    """One row and condition; read: the summaries of its runs, one a seed."""
    condition = own[0].condition
    columns = [{c: column(run, condition, c) for c in grid.columns} for run in read]
    return {
        "label": row.label,
        "condition": condition,
        "beyond": own[0].beyond,
        "seeds": [run.seed for run in own],
        "x": _place(grid, row, read),
        "set": list(row.set),
        "scores": summarise([_picked(run, condition, grid.score) for run in read]),
        "columns": dict.fromkeys(grid.columns, MISSING) | summarise(columns),
        **({"by_output": _diseases(read, condition)} if grid.by_output else {}),
        "not_annotated": summarise(
            [_not_annotated(run, condition) for run in read if grid.score == "test"]
        ),
        "seconds": sum(run["seconds"] for run in read) / len(read),
        "megabytes": sum(r["bytes_up"] + r["bytes_down"] for r in read)
        / len(read)
        / 1e6,
        "within": summarise([_within(r.folder, condition, grid) for r in own]),
    }


def choose(runs: Sequence[GridRun]) -> tuple[Settings, list[dict[str, Any]]]:
    """The setting with the best validation score, and all that were tried with theirs.

    runs: of one row and condition, each setting with the same seeds. A setting's score
    is the mean over its seeds of the mean over sites; of equal ones the first is taken.
    Raises ConfigError where runs have no validation score.
    """
    tried: dict[Settings, list[float]] = {}
    for run in runs:
        score = read_result(run.folder).valid.get(run.condition, {}).get("mean")
        if score is None:
            raise ConfigError(
                f"row {run.row.label!r} chooses by validation data, but {run.folder} has no "
                "score of any: give the job's sites valid or a valid_fraction"
            )
        tried.setdefault(run.choice, []).append(float(score))
    means = {choice: fmean(scores) for choice, scores in tried.items()}
    best = max(means, key=lambda choice: means[choice])
    held_out = any(run.is_trial for run in runs)
    return best, [
        {"set": list(choice), "validation": mean, "held_out": held_out}
        for choice, mean in means.items()
    ]


def _tested(
    grid: Grid, read: Mapping[tuple[str, str], Summaries], names: Sequence[str]
) -> dict[str, Any]:
    """Pairs of rows: the mean difference over the seeds that both have, tested where
    these are enough; or why that cannot be. Nothing is claimed of validation scores."""
    both = [
        (name, "federated")
        for name, c in read
        if c == "alone" and (name, "federated") in read
    ]
    asked = [((name, c), (name, "alone")) for name, c in both]
    for pair, name in product(grid.pairs, names or ("",)):
        first, second = (_end(text.replace("{job}", name)) for text in pair)
        if first in read and second in read:  # a row may be of the full size alone
            asked.append((first, second))
    found: list[dict[str, Any]] = []
    for ends in dict.fromkeys(asked if grid.score == "test" else ()):
        seeds = sorted(set(read[ends[0]]) & set(read[ends[1]]))
        scores = [
            [_measures(grid, read[end][seed], end[1]) for seed in seeds] for end in ends
        ]
        try:
            tested = dict(_differences(*scores)) if len(seeds) >= FEWEST_SEEDS else {}
        except MissingExtra as missing:
            return {"pairs": [], "untested": str(missing)}
        names_of = {"first": ", ".join(ends[0]), "second": ", ".join(ends[1])}
        found.append({**names_of, "seeds": seeds, "differences": tested})
    return {"pairs": found}


def _end(text: str) -> tuple[str, str]:
    """Label and condition; a label may have a slash."""
    label, _, condition = text.rpartition("/")
    return label, condition


def _differences(
    a: list[dict[str, float | None]], b: list[dict[str, float | None]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in dict.fromkeys(name for scores in a for name in scores):
        found = [
            x - y
            for one, other in zip(a, b, strict=True)
            if (x := one.get(name)) is not None and (y := other.get(name)) is not None
        ]
        if len(found) >= FEWEST_SEEDS:
            yield name, asdict(paired_t(found))


def _measures(
    grid: Grid, run: Mapping[str, Any], condition: str
) -> dict[str, float | None]:
    """The shares of a run that pairs are compared by."""
    if grid.by_output:
        diseases = _diseases([dict(run)], condition).values()
        return {"average f1": fmean(scores["f1"]["mean"] for scores in diseases)}
    if grid.columns:
        return {c: column(run, condition, c) for c in grid.columns if not is_plain(c)}
    picked = _picked(run, condition, grid.score)
    return {
        name: score["strict"]["f1"]
        for name, score in picked.items()
        if "strict" in score
    }


def _picked(run: Mapping[str, Any], condition: str, of: str) -> dict[str, Any]:
    """{"site": {"strict": {"f1": …}, "relaxed": …}, …, "mean": …} of one run."""
    if of == "validation":
        valid = run["valid"][condition]
        held_out = {site: f1 for site, f1 in valid["sites"].items() if f1 is not None}
        return {
            n: {"strict": {"f1": f1}}
            for n, f1 in {**held_out, "mean": valid["mean"]}.items()
        }
    scores = {site: by[condition] for site, by in run["sites"].items()}
    scores["mean"] = run["mean"][condition]
    return {
        name: {
            kind: {key: score[kind][key] for key in RATES if key in score[kind]}
            for kind in KINDS
            if kind in score
        }
        for name, score in scores.items()
    }


def _diseases(runs: list[dict[str, Any]], condition: str) -> dict[str, Any]:
    """Each disease's scores, means over sites, then over seeds.

    Raises ConfigError without any.
    """
    if not all("by_output" in run["mean"][condition] for run in runs):
        raise ConfigError("by_output: this job's runs have no scores of diseases")
    return summarise([run["mean"][condition]["by_output"] for run in runs])


def column(run: Mapping[str, Any], condition: str, name: str) -> float | None:
    """One number of a run; see `Grid.columns`. None where it does not exist (an AUROC).

    Raises ConfigError for a score that the job does not have.
    """
    spent = run["conditions"][condition]
    if name == "s":
        return float(spent["seconds"])
    if name == "MB a site":
        sites = len(run["sites"])
        return spent["bytes_up"] / sites / 1e6 if condition == "federated" else None
    if name in ("MB up", "MB down"):
        sent = spent["bytes_" + name.removeprefix("MB ")]
        return float(sent / spent["rounds"] / 1e6)
    found: Any = run
    over, *path = name.split(" ")
    for key in (over, condition, *path):
        if not isinstance(found, Mapping) or key not in found:
            raise ConfigError(f"the grid's column {name!r}: this job has no such score")
        found = found[key]
    return None if found is None else float(found)


def _place(grid: Grid, row: Row, runs: list[dict[str, Any]]) -> float:
    """Where a row stands on the x axis."""
    if not grid.x.startswith("η"):
        return row.x
    return round(100 * sum(run["eta"] for run in runs) / len(runs), 2)


def _not_annotated(run: Mapping[str, Any], condition: str) -> dict[str, float]:
    """{"f1": …}, strict, of the types that a site is tested on but does not annotate.

    The plain mean over types, then over sites; empty where there are none.
    """
    means = []
    for site, known in run.get("annotated", {}).items():
        types = run["sites"][site][condition].get("by_type", {})
        scores = [
            score["strict"]["f1"]
            for name, score in types.items()
            if name not in known and score["support"]
        ]
        means += [sum(scores) / len(scores)] if scores else []
    return {"f1": sum(means) / len(means)} if means else {}


def _within(folder: Path, condition: str, grid: Grid) -> dict[str, float]:
    """Micro F1 on the test data of the last traced model within the grid's bytes and
    seconds.

    0 where the budget ends before the first evaluation.
    """
    limits = {"megabytes": grid.megabytes, "seconds": grid.seconds}
    if condition != "federated" or not any(limits.values()):
        return {}
    found = dict.fromkeys((name for name, limit in limits.items() if limit), 0.0)
    for line in read_lines(folder):
        spent = {
            "megabytes": (line["bytes_up"] + line["bytes_down"]) / 1e6,
            "seconds": line["seconds"],
        }
        for name in found:
            if line["condition"] == condition and spent[name] <= limits[name]:
                found[name] = line.get("test_f1", 0.0)
    return found
