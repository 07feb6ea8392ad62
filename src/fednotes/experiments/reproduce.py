"""Tables and figures of the papers: a grid of runs over one job.

A grid is a TOML file beside its job: `base` names the job, each `[[runs]]` a row with the
settings that it changes, `[budget]` and `[full]` the seeds and settings of either size. Every
run is one `fednotes simulate` command in a process of its own.
"""

from __future__ import annotations

import json
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
from fednotes.core.settings import build, read_toml
from fednotes.core.store import write_json, write_text
from fednotes.jobs import load_job
from fednotes.metrics.compare import summarise

KINDS = ("strict", "relaxed")


@dataclass(frozen=True)
class Row:
    """One row of a table or point of a curve.

    label: in the table. conditions: which of them this row runs. set: `--set` assignments;
    budget: further ones at the budget's size. full: only at the full size. x places it in a
    plot; where the grid's x begins with η, the run's own η in percent does.
    """

    label: str
    conditions: tuple[str, ...]
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
class Grid:
    """A grid file.

    paper: the paper's own figures, label → column → percent. megabytes, seconds: where they
    are not 0, a further column each: the micro F1 of the last model within that cost, for jobs
    whose training has trace = true.
    """

    title: str
    base: str
    runs: tuple[Row, ...]
    budget: Size
    full: Size
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
    base = f"{path.parent.name}/{grid.base}"
    rows = [row for row in grid.runs if full or not row.full]
    runs = [run for row in rows for run in plan(row, base, size, full, out, settings)]
    left = list({run.folder: run for run in runs}.values())
    with ThreadPoolExecutor(max_workers=workers) as pool:
        for done, label in enumerate(pool.map(_run, left), start=1):
            tell(label, done, len(left))
    table = gather(grid, rows, size, runs)
    table |= {"experiment": name, "full": full, "settings": list(settings)}
    write_json(out / name / "results.json", table)
    write_text(out / name / "results.md", markdown(table))
    return table


@dataclass(frozen=True)
class Run:
    """One row, condition and seed; its folder is named by what it runs, so grids share runs."""

    row: Row
    condition: str
    seed: int
    folder: Path
    arguments: tuple[str, ...]


def plan(
    row: Row, base: str, size: Size, full: bool, out: Path, settings: tuple[str, ...]
) -> Iterator[Run]:
    """The runs of one row. A wrong setting shows now, not in an hour: ConfigError."""
    common = (*size.set, *row.set, *(() if full else row.budget), *settings)
    for condition in row.conditions:
        for seed in size.seeds:
            chosen = (*common, f"seed={seed}", f"conditions=['{condition}']")
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
            code = subprocess.call(
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
            read = [json.loads((r.folder / "summary.json").read_text("utf-8")) for r in own]
            rows.append(
                {
                    "label": row.label,
                    "condition": condition,
                    "x": _place(grid, row, read),
                    "set": list(row.set),
                    "scores": summarise([_picked(run, condition) for run in read]),
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
        name: {kind: {"f1": score[kind]["f1"]} for kind in KINDS} for name, score in scores.items()
    }


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
        line = json.loads(text)
        spent = {
            "megabytes": (line["bytes_up"] + line["bytes_down"]) / 1e6,
            "seconds": line["seconds"],
        }
        for name in found:
            if line["condition"] == condition and spent[name] <= limits[name]:
                found[name] = line.get("test_f1", 0.0)
    return found


def markdown(table: Mapping[str, Any]) -> str:
    """The table as Markdown: F1 in percent, mean ± standard deviation over seeds."""
    return "".join(line + "\n" for line in _lines(table))


def _lines(table: Mapping[str, Any]) -> Iterator[str]:
    columns = list(table["rows"][0]["scores"])
    yield f"### {table['title']}"
    yield ""
    yield f"Test F1 in percent, strict / relaxed; seeds {', '.join(map(str, table['seeds']))}."
    if table["note"]:
        yield table["note"]
    yield ""
    within = {
        name: f"micro strict within {table[name]:g} {unit}"
        for name, unit in (("megabytes", "MB"), ("seconds", "s"))
        if table[name]
    }
    foreign = any(row["not_annotated"] for row in table["rows"])
    heads = [
        *columns,
        *(("types not annotated",) if foreign else ()),
        *within.values(),
        *(("MB", "s") if within else ()),
    ]
    yield "| run | condition | " + " | ".join(heads) + " |"
    yield "|---|---|" + "---:|" * len(heads)
    for row in table["rows"]:
        cells = [
            " / ".join(_cell(row["scores"][column][kind]["f1"]) for kind in KINDS)
            for column in columns
        ]
        if foreign:
            cells.append(_cell(row["not_annotated"]["f1"]) if row["not_annotated"] else "")
        if within:
            spent = row["within"]
            cells += [_cell(spent[name]) if spent else "" for name in within]
            cells += [f"{row['megabytes']:.1f}" if spent else "", f"{row['seconds']:.0f}"]
        yield f"| {row['label']} | {row['condition']} | " + " | ".join(cells) + " |"
    if table["paper"]:
        heads = list(next(iter(table["paper"].values())))
        yield ""
        yield f"The paper's own figures. {table['paper_note']}"
        yield ""
        yield "| run | " + " | ".join(heads) + " |"
        yield "|---|" + "---:|" * len(heads)
        for label, figures in table["paper"].items():
            yield f"| {label} | " + " | ".join(f"{figures[h]:.2f}" for h in heads) + " |"


def _cell(score: Mapping[str, float | None]) -> str:
    mean, std = score["mean"], score["std"]
    assert mean is not None
    return f"{100 * mean:.1f}" + (f" ± {100 * std:.1f}" if std is not None else "")
