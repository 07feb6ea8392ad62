"""Gather the numbers of a grid's table from the results of its runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from fednotes.apps.experiments.grids import Grid, Row, Size
from fednotes.apps.experiments.search import Cell
from fednotes.apps.experiments.tables import KINDS, MISSING, RATES, is_plain
from fednotes.core.errors import ConfigError, MissingExtra
from fednotes.jobs.metrics_file import read_metrics
from fednotes.jobs.results import read_result
from fednotes.metrics.gap import compute_gap_by_seed
from fednotes.metrics.paired_tests import FEWEST_SEEDS, run_paired_t_test
from fednotes.metrics.summaries import summarise

Summary = Mapping[str, Any]  # the content of a run's summary.json
End = tuple[str, str]  # label and condition
# The summaries of each row and condition by seed.
Summaries = Mapping[End, Mapping[int, Summary]]

_MEGABYTE = 1e6  # bytes
# The fields of the grid itself in results.json.
_GRID_FIELDS = (
    "title",
    "x",
    "score",
    "columns",
    "by_output",
    "against",
    "megabytes",
    "seconds",
    "paper",
    "paper_note",
)


def gather_table(
    grid: Grid, size: Size, cells: Sequence[Cell], job_names: Sequence[str]
) -> dict[str, Any]:
    """Return the table of a grid: means and standard deviations over seeds.

    Args:
        grid: The grid.
        size: The size that was run.
        cells: The runs of each row and condition.
        job_names: The jobs' names in tables, for pairs of rows whose labels name a job.

    Raises:
        ConfigError: The jobs lack the scores of a column.
    """
    summaries: dict[End, Mapping[int, Summary]] = {}
    rows = []
    for cell in cells:
        first = cell.runs[0]
        by_seed = {run.seed: read_result(run.folder).model_dump() for run in cell.runs}
        summaries[first.row.label, first.condition] = by_seed
        rows.append(_summarise_cell(grid, cell, list(by_seed.values())))
    for row, cell in zip(rows, cells, strict=True):
        first = cell.runs[0]
        row["gap"] = _summarise_gap(grid, first.row, first.condition, summaries)

    table = {name: getattr(grid, name) for name in _GRID_FIELDS}
    table["note"] = size.note
    table["seeds"] = sorted({run.seed for cell in cells for run in cell.runs})
    table["set"] = list(size.set)
    table["rows"] = rows
    table |= _test_pairs(grid, summaries, job_names)
    return table


def _summarise_cell(
    grid: Grid, cell: Cell, summaries: Sequence[Summary]
) -> dict[str, Any]:
    """Return the numbers of one row and condition.

    Args:
        grid: The experiment.
        cell: The row and condition, with their runs.
        summaries: The summary of each run, one per seed.
    """
    first = cell.runs[0]
    row = first.row
    condition = first.condition
    columns = [
        {name: read_column(summary, condition, name) for name in grid.columns}
        for summary in summaries
    ]
    not_annotated = []
    if grid.score == "test":
        not_annotated = [_score_not_annotated(each, condition) for each in summaries]

    numbers = {
        "label": row.label,
        "condition": condition,
        "beyond": first.beyond,
        "seeds": [run.seed for run in cell.runs],
        "x": _find_x(grid, row, summaries),
        "set": list(row.set),
        "scores": summarise(
            [_read_site_scores(each, condition, grid.score) for each in summaries]
        ),
        "columns": dict.fromkeys(grid.columns, MISSING) | summarise(columns),
    }
    if all(each["left_out"] for each in summaries):
        numbers["left_out_sites"] = _summarise_left_out(summaries)
    if grid.by_output:
        numbers["by_output"] = _summarise_diseases(summaries, condition)
    numbers["not_annotated"] = summarise(not_annotated)
    numbers["seconds"] = sum(each["seconds"] for each in summaries) / len(summaries)
    sent = sum(each["bytes_up"] + each["bytes_down"] for each in summaries)
    numbers["megabytes"] = sent / len(summaries) / _MEGABYTE
    numbers["within"] = summarise(
        [_read_scores_within_cost(run.folder, condition, grid) for run in cell.runs]
    )
    numbers["chosen"] = list(first.choice)
    numbers["tried"] = cell.tried
    return numbers


# ---- the scores of one run -----------------------------------------------------------


def _read_site_scores(run: Summary, condition: str, score: str) -> dict[str, Any]:
    """Return the scores of each site, and their mean: site → kind → rate.

    Args:
        run: The run's summary.
        condition: The condition.
        score: The data to score on, "test" or "validation".
    """
    if score == "validation":
        valid = run["valid"][condition]
        f1_by_site = {site: f1 for site, f1 in valid["sites"].items() if f1 is not None}
        f1_by_site["mean"] = valid["mean"]
        return {site: {"strict": {"f1": f1}} for site, f1 in f1_by_site.items()}

    scores = {
        site: by_condition[condition]
        for site, by_condition in run["sites"].items()
        if condition in by_condition  # not every site can be left out
    }
    scores["mean"] = run["mean"][condition]
    return {site: _choose_rates(of_site) for site, of_site in scores.items()}


def _choose_rates(scores: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the scores of a site that tables show, by kind and rate."""
    shown = {}
    for kind in KINDS:
        if kind in scores:
            of_kind = scores[kind]
            shown[kind] = {rate: of_kind[rate] for rate in RATES if rate in of_kind}
    return shown


def _summarise_left_out(runs: Sequence[Summary]) -> dict[str, Any]:
    """Return the scores of all models at left-out sites, summarised over seeds."""
    return {
        "scores": summarise([run["left_out"] for run in runs]),
        "mean": summarise([run["left_out_mean"] for run in runs]),
        "types": runs[0]["left_out_types"],
    }


def _summarise_diseases(runs: Sequence[Summary], condition: str) -> dict[str, Any]:
    """Return each disease's scores: means over sites, summarised over seeds.

    Raises:
        ConfigError: A run has no scores of diseases.
    """
    means = [run["mean"][condition] for run in runs]
    if not all("by_output" in mean for mean in means):
        raise ConfigError("by_output: this job's runs have no scores of diseases")
    return summarise([mean["by_output"] for mean in means])


def read_column(run: Summary, condition: str, name: str) -> float | None:
    """Return a run's number for a column; None if it does not exist.

    Args:
        run: The run's summary.
        condition: The condition.
        name: The column; see `Grid.columns`.

    Raises:
        ConfigError: The job does not have this score.
    """
    costs = run["conditions"][condition]
    if name == "s":
        return float(costs["seconds"])
    if name == "MB a site":
        if condition != "federated":
            return None
        return float(costs["bytes_up"] / len(run["sites"]) / _MEGABYTE)
    if name in ("MB up", "MB down"):
        sent = costs["bytes_" + name.removeprefix("MB ")]
        return float(sent / costs["rounds"] / _MEGABYTE)

    over, *path = name.split(" ")
    value: Any = run
    for key in (over, condition, *path):
        if not isinstance(value, Mapping) or key not in value:
            raise ConfigError(f"the grid's column {name!r}: this job has no such score")
        value = value[key]
    return None if value is None else float(value)


def _find_x(grid: Grid, row: Row, runs: Sequence[Summary]) -> float:
    """Return a row's position on the x axis."""
    if not grid.x.startswith("η"):
        return row.x
    return round(100 * sum(run["eta"] for run in runs) / len(runs), 2)


def _score_not_annotated(run: Summary, condition: str) -> dict[str, float]:
    """Return the strict F1 of tested types that a site does not annotate.

    It is the mean over types, then over sites; {} without such types.
    """
    means = []
    for site, annotated in run.get("annotated", {}).items():
        by_type = run["sites"][site][condition].get("by_type", {})
        scores = [
            score["strict"]["f1"]
            for name, score in by_type.items()
            if name not in annotated and score["support"]
        ]
        if scores:
            means.append(sum(scores) / len(scores))
    if not means:
        return {}
    return {"f1": sum(means) / len(means)}


def _read_scores_within_cost(
    folder: Path, condition: str, grid: Grid
) -> dict[str, float]:
    """Return the micro F1 of the last model within the grid's bytes and seconds.

    The score is 0 if the limit is reached before the first evaluation.
    """
    limits = {"megabytes": grid.megabytes, "seconds": grid.seconds}
    limits = {name: limit for name, limit in limits.items() if limit}
    if condition != "federated" or not limits:
        return {}
    scores = dict.fromkeys(limits, 0.0)
    for line in read_metrics(folder):
        if line["condition"] != condition:
            continue
        sent = line["bytes_up"] + line["bytes_down"]
        cost = {"megabytes": sent / _MEGABYTE, "seconds": line["seconds"]}
        for name, limit in limits.items():
            if cost[name] <= limit:
                scores[name] = line.get("test_f1", 0.0)
    return scores


# ---- the gap that a row closes -------------------------------------------------------


def _summarise_gap(
    grid: Grid, row: Row, condition: str, summaries: Summaries
) -> dict[str, Any]:
    """Return the share of pooled - alone that a row closes, or why there is none.

    A row or condition that has no such column gets {}.
    """
    ends = [_split_end(text) for text in row.gap]
    if condition != "federated" or not ends:
        return {}
    if not all(end in summaries for end in ends):
        return {}
    alone, pooled = ends
    # in the argument order of `compute_gap_by_seed`
    compared = [alone, (row.label, condition), pooled]
    seeds = _find_shared_seeds(compared, summaries)
    scores = [
        [_read_lead_score(grid, summaries[end][seed], end[1]) for seed in seeds]
        for end in compared
    ]
    try:
        shares, reason = compute_gap_by_seed(*scores)
    except MissingExtra as missing:
        return {"why": str(missing)}
    if reason:
        return {"why": reason}
    return summarise([{"closed": share} for share in shares])["closed"]


def _split_end(text: str) -> End:
    """Return the label and condition of "LABEL/CONDITION". A label may have a slash."""
    label, _, condition = text.rpartition("/")
    return label, condition


def _find_shared_seeds(ends: Sequence[End], summaries: Summaries) -> list[int]:
    """Return the seeds on which all these rows and conditions were run."""
    return sorted(set.intersection(*(set(summaries[end]) for end in ends)))


def _read_lead_score(grid: Grid, run: Summary, condition: str) -> float:
    """Return the score for measuring a gap; NaN if the run has none.

    It is the grid's last column of scores, or the mean strict F1. Higher is better.
    """
    columns = [
        name for name in grid.columns if name != "s" and not name.startswith("MB ")
    ]
    if not columns:
        scores = _read_site_scores(run, condition, grid.score)
        return float(scores["mean"]["strict"]["f1"])
    name = columns[-1]
    value = read_column(run, condition, name)
    score = math.nan if value is None else value
    return -score if is_plain(name) else score  # a plain score is a loss


# ---- tests over seeds ----------------------------------------------------------------


def _test_pairs(
    grid: Grid, summaries: Summaries, job_names: Sequence[str]
) -> dict[str, Any]:
    """Return the differences of pairs of rows, or why they cannot be tested.

    A pair is tested on the seeds that both have, if these are enough. Validation scores
    are not tested.
    """
    if grid.score != "test":
        return {"pairs": []}
    pairs = []
    for first, second in _list_pairs(grid, summaries, job_names):
        seeds = _find_shared_seeds([first, second], summaries)
        differences = {}
        if len(seeds) >= FEWEST_SEEDS:
            of_first = [
                _read_measures(grid, summaries[first][s], first[1]) for s in seeds
            ]
            of_second = [
                _read_measures(grid, summaries[second][s], second[1]) for s in seeds
            ]
            try:
                differences = _test_differences(of_first, of_second)
            except MissingExtra as missing:
                return {"pairs": [], "untested": str(missing)}
        pairs.append(
            {
                "first": ", ".join(first),
                "second": ", ".join(second),
                "seeds": seeds,
                "differences": differences,
            }
        )
    return {"pairs": pairs}


def _list_pairs(
    grid: Grid, summaries: Summaries, job_names: Sequence[str]
) -> list[tuple[End, End]]:
    """Return the pairs of rows to test, each once.

    These are each row's federated and alone conditions, and the pairs that the grid
    names.
    """
    pairs = []
    for label, condition in summaries:
        federated = (label, "federated")
        if condition == "alone" and federated in summaries:
            pairs.append((federated, (label, "alone")))
    for (first_text, second_text), job in product(grid.pairs, job_names or ("",)):
        first = _split_end(first_text.replace("{job}", job))
        second = _split_end(second_text.replace("{job}", job))
        # some rows exist only at full size
        if first in summaries and second in summaries:
            pairs.append((first, second))
    return list(dict.fromkeys(pairs))


def _test_differences(
    first: Sequence[Mapping[str, float | None]],
    second: Sequence[Mapping[str, float | None]],
) -> dict[str, dict[str, Any]]:
    """Return a paired t test of each measure that enough seeds have.

    Args:
        first: The measures of a row by name, for each seed.
        second: The measures of another row, for the same seeds.
    """
    names = dict.fromkeys(name for measures in first for name in measures)
    tests = {}
    for name in names:
        differences = []
        for one, other in zip(first, second, strict=True):
            a = one.get(name)
            b = other.get(name)
            if a is not None and b is not None:
                differences.append(a - b)
        if len(differences) >= FEWEST_SEEDS:
            tests[name] = asdict(run_paired_t_test(differences))
    return tests


def _read_measures(grid: Grid, run: Summary, condition: str) -> dict[str, float | None]:
    """Return the fractions of a run that are compared within pairs."""
    if grid.by_output:
        diseases = _summarise_diseases([run], condition).values()
        return {"average f1": fmean(scores["f1"]["mean"] for scores in diseases)}
    if grid.columns:
        return {
            name: read_column(run, condition, name)
            for name in grid.columns
            if not is_plain(name)
        }
    return {
        site: scores["strict"]["f1"]
        for site, scores in _read_site_scores(run, condition, grid.score).items()
        if "strict" in scores
    }
