"""Finished runs → the numbers of a grid's table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from fednotes.core.errors import ConfigError, MissingExtra
from fednotes.core.parsing import parse_json, read_json
from fednotes.experiments.grid import Grid, Row, Settings, Size
from fednotes.experiments.plan import Run
from fednotes.experiments.tables import KINDS, MISSING, is_plain
from fednotes.metrics.compare import FEWEST_SEEDS, paired_t, summarise


def gather(
    grid: Grid,
    rows: Sequence[Row],
    size: Size,
    runs: Sequence[Run],
    tried: Tried,
    names: Sequence[str] = (),
) -> dict[str, Any]:
    """Mean and standard deviation over seeds for every row, condition and site.

    runs: one for each row, condition and seed. tried: what `choose` found on the way. names: of
    the jobs, for pairs of rows whose labels have one.
    """
    found, read = [], {}
    for row in rows:
        for condition in row.conditions:
            own = [r for r in runs if r.row is row and r.condition == condition]
            summaries = [read_json(r.folder / "summary.json", strict=False) for r in own]
            of_seeds = zip(own, summaries, strict=True)
            read[row.label, condition] = {r.seed: summary for r, summary in of_seeds}
            found.append(
                _row(grid, row, own, summaries)
                | {"chosen": list(own[0].choice), "tried": tried.get((row.label, condition), [])}
            )
    return {
        "title": grid.title,
        "note": size.note,
        "seeds": sorted({run.seed for run in runs}),
        "set": list(size.set),
        "x": grid.x,
        "score": grid.score,
        "columns": list(grid.columns),
        "by_output": grid.by_output,
        "against": grid.against,
        "megabytes": grid.megabytes,
        "seconds": grid.seconds,
        "rows": found,
        **_tested(grid, read, names),
        "paper": grid.paper,
        "paper_note": grid.paper_note,
    }


def _row(grid: Grid, row: Row, own: Sequence[Run], read: list[dict[str, Any]]) -> dict[str, Any]:
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
        "megabytes": sum(r["bytes_up"] + r["bytes_down"] for r in read) / len(read) / 1e6,
        "within": summarise([_within(r.folder, condition, grid) for r in own]),
    }


Summaries = Mapping[int, Mapping[str, Any]]  # seed → a run's summary
Tried = Mapping[tuple[str, str], list[dict[str, Any]]]  # label, condition → `choose`'s list


def choose(runs: Sequence[Run]) -> tuple[Settings, list[dict[str, Any]]]:
    """The setting with the best validation score, and all that were tried with theirs.

    runs: of one row and condition, each setting with the same seeds. A setting's score is the
    mean over its seeds of the mean over sites; of equal ones the first is taken.
    Raises ConfigError where runs have no validation score.
    """
    tried: dict[Settings, list[float]] = {}
    for run in runs:
        summary = read_json(run.folder / "summary.json", strict=False)
        score = summary.get("valid", {}).get(run.condition, {}).get("mean")
        if score is None:
            raise ConfigError(
                f"row {run.row.label!r} chooses by validation data, but {run.folder} has no "
                "score of any: give the job's sites valid or a valid_fraction"
            )
        tried.setdefault(run.choice, []).append(float(score))
    means = {choice: fmean(scores) for choice, scores in tried.items()}
    best = max(means, key=lambda choice: means[choice])
    return best, [{"set": list(choice), "validation": mean} for choice, mean in means.items()]


def _tested(
    grid: Grid, read: Mapping[tuple[str, str], Summaries], names: Sequence[str]
) -> dict[str, Any]:
    """The pairs, or why they could not be tested. Nothing is claimed of validation scores."""
    try:
        return {"pairs": [] if grid.score == "validation" else list(_pairs(grid, read, names))}
    except MissingExtra as missing:
        return {"pairs": [], "untested": str(missing)}


def _pairs(
    grid: Grid, read: Mapping[tuple[str, str], Summaries], names: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Pairs of rows: the mean difference over the seeds that both have, tested where these are
    enough."""
    both = [(name, "federated") for name, c in read if c == "alone" and (name, "federated") in read]
    asked = [((name, c), (name, "alone")) for name, c in both]
    for pair, name in product(grid.pairs, names or ("",)):
        first, second = (_end(text.replace("{job}", name)) for text in pair)
        if first in read and second in read:  # a row may be of the full size alone
            asked.append((first, second))
    for ends in dict.fromkeys(asked):
        seeds = sorted(set(read[ends[0]]) & set(read[ends[1]]))
        scores = [[_measures(grid, read[end][seed], end[1]) for seed in seeds] for end in ends]
        yield {
            "first": ", ".join(ends[0]),
            "second": ", ".join(ends[1]),
            "seeds": seeds,
            "differences": dict(_differences(*scores)) if len(seeds) >= FEWEST_SEEDS else {},
        }


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


def _measures(grid: Grid, run: Mapping[str, Any], condition: str) -> dict[str, float | None]:
    """The shares of a run that pairs are compared by."""
    if grid.by_output:
        diseases = _diseases([dict(run)], condition).values()
        return {"average f1": fmean(scores["f1"]["mean"] for scores in diseases)}
    if grid.columns:
        return {c: column(run, condition, c) for c in grid.columns if not is_plain(c)}
    picked = _picked(run, condition, grid.score)
    return {name: score["strict"]["f1"] for name, score in picked.items() if "strict" in score}


def _picked(run: Mapping[str, Any], condition: str, of: str) -> dict[str, Any]:
    """{"site": {"strict": {"f1": …}, "relaxed": …}, …, "mean": …} of one run."""
    if of == "validation":
        valid = run["valid"][condition]
        held_out = {site: f1 for site, f1 in valid["sites"].items() if f1 is not None}
        return {n: {"strict": {"f1": f1}} for n, f1 in {**held_out, "mean": valid["mean"]}.items()}
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
