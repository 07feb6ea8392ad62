"""Tables and figures of the papers: a grid of runs over one job.

A grid is a TOML file beside its job: `base` names the job, each `[[runs]]` a row with the
settings that it changes, `[budget]` and `[full]` the seeds and settings of either size. Every
run is one `fednotes simulate` command in a process of its own. `[[before]]` are runs whose
models rows start from: `{name}` in a row's settings is the folder of that model.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from fednotes.core.errors import ConfigError, FednotesError, nearest
from fednotes.core.parsing import parse_json, read_json
from fednotes.core.settings import build, read_toml
from fednotes.core.store import write_json, write_text
from fednotes.experiments.tables import KINDS, MISSING, markdown
from fednotes.jobs import expand, load_job
from fednotes.metrics.compare import summarise
from fednotes.stopping import call


@dataclass(frozen=True)
class Row:
    """One row of a table or point of a curve.

    label: in the table. conditions: which of them this row runs. base: its job, if not the
    grid's. set: `--set` assignments; budget: further ones at the budget's size. full: only at
    the full size. x places it in a plot; where the grid's x begins with η, the run's own η in
    percent does.
    """

    label: str
    conditions: tuple[str, ...]
    base: str = ""
    set: tuple[str, ...] = ()
    budget: tuple[str, ...] = ()
    full: bool = False
    x: float = 0.0


@dataclass(frozen=True)
class Size:
    """How much of the grid is run; note: what was left out, for the output."""

    seeds: tuple[int, ...]
    set: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Before:
    """A run whose model others start from: once for all seeds, or, where seed is 0, for each."""

    name: str
    base: str
    condition: str
    seed: int = 1
    set: tuple[str, ...] = ()
    budget: tuple[str, ...] = ()


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
    against: the label of a row; a further column has by how much others fall behind its last
    score. attention: compared in place of runs.
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
    against: str = ""
    x: str = ""
    megabytes: float = 0.0
    seconds: float = 0.0
    paper: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    paper_note: str = ""


def grids() -> dict[str, Path]:
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
    settings: tuple[str, ...] = (),
    seeds: tuple[int, ...] = (),
    workers: int = 2,
    tell: Callable[[str, int, int], None] = lambda run, done, all: None,
) -> dict[str, Any]:
    """Run a grid and gather its table; finished runs in `out` are kept, unfinished resumed.

    settings: further `--set` for every run. seeds: in place of the grid's.
    tell: called after each run.
    out: holds runs/ (shared by all grids) and a folder NAME with the results.
    Raises FednotesError with a failed run's own message.
    """
    grid, path = load_grid(name)
    size = grid.full if full else grid.budget
    size = replace(size, seeds=seeds or size.seeds)
    rows = [row for row in grid.runs if full or not row.full]
    first = [
        run for each in grid.before for run in plan_before(each, path.parent.name, size, full, out)
    ]
    models = {
        seed: {r.row.label: _model(r) for r in first if r.seed == seed or _once(grid, r.row.label)}
        for seed in size.seeds
    }
    runs = [
        run
        for row in rows
        for base in [f"{path.parent.name}/{row.base or grid.base}"]
        for run in plan(row, base, size, full, out, settings, models)
    ]
    left = list({run.folder: run for run in runs}.values())
    with ThreadPoolExecutor(max_workers=workers) as pool:
        done = 0
        for stage in (first, left):
            for label in pool.map(_run, stage):
                done += 1
                tell(label, done, len(first) + len(left))
    if grid.attention is not None:
        table = _attention(grid.attention, models[size.seeds[0]], out / name, size)
    else:
        table = gather(grid, rows, size, runs)
    table |= {"experiment": name, "full": full, "settings": list(settings)}
    write_json(out / name / "results.json", table, private=False)
    write_text(out / name / "results.md", markdown(table), private=False)
    return table


@dataclass(frozen=True)
class Run:
    """One row, condition and seed; its folder is named by what it runs, so grids share runs."""

    row: Row
    condition: str
    seed: int
    folder: Path
    arguments: tuple[str, ...]


def _model(run: Run) -> str:
    """The folder of the model that a run ends with."""
    return str(run.folder / run.condition / "model")


def _once(grid: Grid, name: str) -> bool:
    """Whether a model that others start from is trained once for all seeds."""
    return any(each.name == name and each.seed for each in grid.before)


def plan_before(before: Before, folder: str, size: Size, full: bool, out: Path) -> Iterator[Run]:
    """The runs of a model that others start from; the grid's own settings are not for them."""
    sets = (*before.set, *(() if full else before.budget))
    row = Row(before.name, (before.condition,), set=sets)
    size = replace(size, seeds=(before.seed,) if before.seed else size.seeds, set=())
    return plan(row, f"{folder}/{before.base}", size, True, out, ())


def plan(
    row: Row,
    base: str,
    size: Size,
    full: bool,
    out: Path,
    settings: tuple[str, ...],
    models: Mapping[int, Mapping[str, str]] | None = None,
) -> Iterator[Run]:
    """The runs of one row. A wrong setting shows now, not in an hour: ConfigError.

    models: seed → the folder that stands for each `{name}` in the row's settings.
    """
    common = (*size.set, *row.set, *(() if full else row.budget), *settings)
    for condition in row.conditions:
        for seed in size.seeds:
            chosen = (*common, f"seed={seed}", f"conditions=['{condition}']")
            for name, model in (models or {}).get(seed, {}).items():
                chosen = tuple(each.replace("{" + name + "}", model) for each in chosen)
            folder = out / "runs" / load_job(base, chosen).fingerprint[:16]
            sets = [word for setting in chosen for word in ("--set", setting)]
            command = ("simulate", base, "--out", str(folder), *sets)
            yield Run(row, condition, seed, folder, command)


def _run(run: Run) -> str:
    """One simulate command; its output goes into a log beside its folder."""
    if not (run.folder / "summary.json").exists():
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        resume = ["--resume"] if (run.folder / "job.json").exists() else []
        log = run.folder.with_suffix(".log")
        with log.open("a", encoding="utf-8") as file:
            code = call(
                [sys.executable, "-m", "fednotes.cli", *run.arguments, *resume],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        if code:
            lines = log.read_text(encoding="utf-8").strip().splitlines() or ["no output"]
            raise FednotesError(
                f"{lines[-1].removeprefix('error: ')} (in: fednotes {shlex.join(run.arguments)})"
            )
    return f"{run.row.label}, {run.condition}, seed {run.seed}"


def gather(grid: Grid, chosen: list[Row], size: Size, runs: list[Run]) -> dict[str, Any]:
    """Mean and standard deviation over seeds for every row, condition and site."""
    rows = []
    for row in chosen:
        for condition in row.conditions:
            own = [r for r in runs if r.row is row and r.condition == condition]
            read = [read_json(r.folder / "summary.json", strict=False) for r in own]
            rows.append(
                {
                    "label": row.label,
                    "condition": condition,
                    "x": _place(grid, row, read),
                    "set": list(row.set),
                    "scores": summarise([_picked(run, condition) for run in read]),
                    "columns": dict.fromkeys(grid.columns, MISSING)
                    | summarise(
                        [{c: column(run, condition, c) for c in grid.columns} for run in read]
                    ),
                    **({"by_output": _diseases(read, condition)} if grid.by_output else {}),
                    "not_annotated": summarise([_not_annotated(run, condition) for run in read]),
                    "seconds": sum(run["seconds"] for run in read) / len(read),
                    "megabytes": sum(r["bytes_up"] + r["bytes_down"] for r in read)
                    / len(read)
                    / 1e6,
                    "within": summarise([_within(r.folder, condition, grid) for r in own]),
                }
            )
    return {
        "title": grid.title,
        "note": size.note,
        "seeds": list(size.seeds),
        "set": list(size.set),
        "x": grid.x,
        "columns": list(grid.columns),
        "by_output": grid.by_output,
        "against": grid.against,
        "megabytes": grid.megabytes,
        "seconds": grid.seconds,
        "rows": rows,
        "paper": grid.paper,
        "paper_note": grid.paper_note,
    }


def _picked(run: Mapping[str, Any], condition: str) -> dict[str, Any]:
    """{"site": {"strict": {"f1": …}, "relaxed": …}, …, "mean": …} of one run."""
    scores = {site: by[condition] for site, by in run["sites"].items()}
    scores["mean"] = run["mean"][condition]
    return {
        name: {kind: {"f1": score[kind]["f1"]} for kind in KINDS if kind in score}
        for name, score in scores.items()
    }


def _diseases(runs: list[dict[str, Any]], condition: str) -> dict[str, Any]:
    """Each disease's scores, means over sites, then over seeds. Raises ConfigError without any."""
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


def _attention(
    asked: Attention, models: Mapping[str, str], out: Path, size: Size
) -> dict[str, Any]:
    """Compare attention heads; the table of the paper's section 4.3."""
    from fednotes.experiments.attention import markdown as shown
    from fednotes.experiments.attention import run_attention

    named = [model.format(**models) for model in asked.models]
    notes = [Path(expand(path, "notes")) for path in asked.notes]
    found = run_attention(
        named, notes, out, sample=asked.sample, length=asked.length, seed=size.seeds[0]
    )
    return {"markdown": shown(found)}


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
    """Micro F1 on the test data of the last traced model within the grid's bytes and seconds.

    0 where the budget ends before the first evaluation.
    """
    limits = {"megabytes": grid.megabytes, "seconds": grid.seconds}
    if condition != "federated" or not any(limits.values()):
        return {}
    found = dict.fromkeys((name for name, limit in limits.items() if limit), 0.0)
    for text in (folder / "metrics.jsonl").read_text("utf-8").splitlines():
        line = parse_json(text, strict=False)
        spent = {
            "megabytes": (line["bytes_up"] + line["bytes_down"]) / 1e6,
            "seconds": line["seconds"],
        }
        for name in found:
            if line["condition"] == condition and spent[name] <= limits[name]:
                found[name] = line.get("test_f1", 0.0)
    return found
