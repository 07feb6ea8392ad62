"""Finished runs of a grid → its numbers, as Markdown and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from fednotes.core.errors import ConfigError, MissingExtra
from fednotes.core.parsing import parse_json
from fednotes.experiments.grids import Grid, GridRun, Row, Settings, Size
from fednotes.jobs.results import read_result
from fednotes.metrics.compare import FEWEST_SEEDS, paired_t, summarise

KINDS = ("strict", "relaxed")
MISSING = {"mean": None, "std": None, "n": 0}  # of a number that exists in no run
_OF_A_DISEASE = (("precision", "P"), ("recall", "R"), ("f1", "F1"))


Summaries = Mapping[int, Mapping[str, Any]]  # seed → a run's summary
Tried = Mapping[tuple[str, str], list[dict[str, Any]]]  # label, condition → `choose`'s list


def gather(
    grid: Grid,
    rows: Sequence[Row],
    size: Size,
    runs: Sequence[GridRun],
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
            summaries = [read_result(r.folder).model_dump() for r in own]
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
        "megabytes": sum(r["bytes_up"] + r["bytes_down"] for r in read) / len(read) / 1e6,
        "within": summarise([_within(r.folder, condition, grid) for r in own]),
    }


def choose(runs: Sequence[GridRun]) -> tuple[Settings, list[dict[str, Any]]]:
    """The setting with the best validation score, and all that were tried with theirs.

    runs: of one row and condition, each setting with the same seeds. A setting's score is the
    mean over its seeds of the mean over sites; of equal ones the first is taken.
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


def markdown(table: Mapping[str, Any]) -> str:
    """The table as Markdown: F1 in percent, mean ± standard deviation over seeds."""
    return table["markdown"] if "markdown" in table else "\n".join((*_lines(table), ""))


def grid_lines(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Iterator[str]:
    """A table of Markdown; `left` columns are names, the others numbers."""
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * left + "---:|" * (len(heads) - left)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _lines(table: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"### {table['title']}", "")
    if changed := table.get("settings"):
        yield from (f"Changed in every run: {_settings(changed)}.", "")
    if table.get("by_output"):
        yield from _disease_lines(table)
    else:
        yield from _column_lines(table) if table["columns"] else _site_lines(table)
    yield from _choice_lines(table)
    yield from _pair_lines(table)
    if table["paper"] and not table.get("by_output"):
        yield from _paper_lines(table)


def _choice_lines(table: Mapping[str, Any]) -> Iterator[str]:
    """Settings that validation data chose, among which."""
    searched = [row for row in table["rows"] if row["tried"]]
    if searched:
        yield from ("", "Chosen by the mean of the sites' validation scores:", "")
    for row in searched:
        tried = "; ".join(
            f"{_settings(each['set'])}: {100 * each['validation']:.1f}" for each in row["tried"]
        )
        yield f"- {row['label']}, {row['condition']}: {_settings(row['chosen'])} ({tried})"


def _settings(chosen: list[str]) -> str:
    return ", ".join(f"`{each}`" for each in chosen)


def _pair_lines(table: Mapping[str, Any]) -> Iterator[str]:
    """Paired tests over seeds; where seeds are few, that nothing is claimed."""
    tested = [pair for pair in table["pairs"] if pair["differences"]]
    if tested:
        columns = list(dict.fromkeys(name for pair in tested for name in pair["differences"]))
        yield ""
        yield (
            "Differences in points, with 95 % intervals and p of a paired t test over seeds "
            "(each p is of a single test):"
        )
        yield ""
        rows = (
            (
                f"{pair['first']} − {pair['second']}",
                str(len(pair["seeds"])),
                *(_difference(pair["differences"].get(name)) for name in columns),
            )
            for pair in tested
        )
        yield from grid_lines(("first minus second", "seeds", *columns), rows)
    few = {len(row["seeds"]) for row in table["rows"] if len(row["seeds"]) < FEWEST_SEEDS}
    if few and table["score"] == "test":
        yield ""
        yield (
            f"{' or '.join(map(str, sorted(few)))} seed{'s' * (few != {1})}: no difference is "
            + ("claimed between the other rows." if tested else "claimed.")
        )
    if "untested" in table:
        yield ""
        yield f"No test over seeds: {table['untested']}."


def _difference(test: Mapping[str, float] | None) -> str:
    if test is None:
        return ""
    mean, low, high = (100 * test[key] for key in ("mean", "low", "high"))
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f}; {_p(test['p_value'])})"


def _p(value: float) -> str:
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def _seeds(table: Mapping[str, Any]) -> str:
    """Those of all rows, or of each number of them."""
    by_row = {tuple(row["seeds"]) for row in table["rows"]}
    if len(by_row) == 1:
        return f"seeds {', '.join(map(str, table['seeds']))}"
    return "seeds " + " or ".join(", ".join(map(str, seeds)) for seeds in sorted(by_row, key=len))


def _column_lines(table: Mapping[str, Any]) -> Iterator[str]:
    """The rows of a grid that says what its columns are."""
    yield from (f"Shares in percent; {_seeds(table)}. {table['note']}", "")
    columns = table["columns"]
    behind = (f"behind {table['against']}",) if table["against"] else ()
    best = next((r for r in table["rows"] if r["label"] == table["against"]), None)
    rows = []
    for row in table["rows"]:
        cells = [_number(name, row["columns"][name]) for name in columns]
        if best is not None:
            ends = [each["columns"][columns[-1]]["mean"] for each in (best, row)]
            known = row is not best and None not in ends
            cells.append(f"{100 * (ends[0] - ends[1]):.1f}" if known else "")
        rows.append((row["label"], row["condition"], *cells))
    yield from grid_lines(("run", "condition", *columns, *behind), rows, left=2)


def _number(name: str, score: Mapping[str, float | None]) -> str:
    """A share in percent, another number as it is."""
    if not is_plain(name):
        return _cell(score)
    mean, std = score["mean"], score["std"]
    if mean is None:
        return "–"
    digits = 3 if name.endswith(("loss", "brier")) else 0 if name == "s" else 2
    return f"{mean:.{digits}f}" + (f" ± {std:.{digits}f}" if std is not None else "")


def is_plain(column: str) -> bool:
    """Whether a column's numbers are shown as they are: bytes, seconds, errors; not shares."""
    kind = column.rsplit(" ", 1)[-1]
    return kind in ("up", "down", "s", "loss", "perplexity", "brier")


def _site_lines(table: Mapping[str, Any]) -> Iterator[str]:
    """The rows of a grid with strict and relaxed F1 of each site."""
    columns = list(table["rows"][0]["scores"])
    of = (
        "Validation F1 in percent, strict"
        if table["score"] == "validation"
        else ("Test F1 in percent, strict / relaxed")
    )
    yield f"{of}; {_seeds(table)}."
    if table["note"]:
        yield table["note"]
    yield ""
    within = {
        name: f"micro strict within {table[name]:g} {unit}"
        for name, unit in (("megabytes", "MB"), ("seconds", "s"))
        if table[name]
    }
    foreign = any(row["not_annotated"] for row in table["rows"])
    uneven = len({tuple(row["seeds"]) for row in table["rows"]}) > 1
    heads = [
        *("run", "condition"),
        *(("seeds",) if uneven else ()),
        *columns,
        *(("types not annotated",) if foreign else ()),
        *within.values(),
        *(("MB", "s") if within else ()),
    ]
    rows = []
    for row in table["rows"]:
        cells = [
            " / ".join(_cell(f1["f1"]) for kind in KINDS if (f1 := row["scores"][column].get(kind)))
            for column in columns
        ]
        if foreign:
            cells.append(_cell(row["not_annotated"]["f1"]) if row["not_annotated"] else "")
        if within:
            spent = row["within"]
            cells += [_cell(spent[name]) if spent else "" for name in within]
            cells += [f"{row['megabytes']:.1f}" if spent else "", f"{row['seconds']:.0f}"]
        several = [str(len(row["seeds"]))] if uneven else []
        named = [row["label"], " + ".join(filter(None, (row["condition"], row["beyond"])))]
        rows.append([*named, *several, *cells])
    yield from grid_lines(heads, rows, left=2)


def _disease_lines(table: Mapping[str, Any]) -> Iterator[str]:
    """A row a disease, then the average; three columns a run, and the paper's figures beside."""
    rows, paper = table["rows"], table["paper"]
    yield f"Percent; {_seeds(table)}. {table['note']}".rstrip()
    yield ""
    diseases = list(dict.fromkeys(name for row in rows for name in row["by_output"]))
    beside = any(name in paper for name in diseases)
    figures = list(next(iter(paper.values()))) if beside else []
    named = [f"{row['label']}, {row['condition']}: " if len(rows) > 1 else "" for row in rows]
    heads = [f"{name}{head}" for name in named for _, head in _OF_A_DISEASE]
    heads += [f"paper: {head}" for head in figures]
    shown = {}
    for name in [*diseases, *(p for p in paper if beside and p not in {*diseases, "average"})]:
        shown[name] = [
            _cell(row["by_output"].get(name, {}).get(key, MISSING))
            for row in rows
            for key, _ in _OF_A_DISEASE
        ]
    shown["average"] = [_average(row, key) for row in rows for key, _ in _OF_A_DISEASE]
    for name, cells in shown.items():
        given = paper.get(name, {})
        cells += [f"{given[head]:.1f}" if head in given else "" for head in figures]
    yield from grid_lines(("disease", *heads), ([name, *cells] for name, cells in shown.items()))
    if paper and not beside:
        yield from _paper_lines(table)
    elif table["paper_note"]:
        yield ""
        yield table["paper_note"]


def _average(row: Mapping[str, Any], key: str) -> str:
    """The plain mean over diseases of their means over seeds."""
    means = [s[key]["mean"] for s in row["by_output"].values() if key in s]
    return f"{100 * sum(means) / len(means):.1f}" if means else "–"


def _paper_lines(table: Mapping[str, Any]) -> Iterator[str]:
    heads = list(next(iter(table["paper"].values())))
    yield from ("", f"The paper's own figures. {table['paper_note']}", "")
    paper = table["paper"].items()
    yield from grid_lines(
        ("run", *heads), ((name, *(f"{figures[h]:.2f}" for h in heads)) for name, figures in paper)
    )


def _cell(score: Mapping[str, float | None]) -> str:
    mean, std = score["mean"], score["std"]
    if mean is None:
        return "–"
    return f"{100 * mean:.1f}" + (f" ± {100 * std:.1f}" if std is not None else "")


def plot(table: Mapping[str, Any], path: Path) -> bool:
    """Strict F1 of each site, or the table's own columns, with standard deviations: a panel each.

    False where matplotlib (the extra "plot") is not installed, or the table has no rows or has
    one a disease.
    """
    if not table.get("rows") or table.get("by_output"):
        return False
    try:
        import matplotlib
    except ModuleNotFoundError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = table["columns"] or list(table["rows"][0]["scores"])
    labels = list(dict.fromkeys(row["label"] for row in table["rows"]))
    height = 3.0 if table["x"] else 1.2 + 0.32 * len(labels)
    figure, panels = pyplot.subplots(
        1, len(columns), figsize=(2.9 * len(columns), height), sharey=not table["x"], squeeze=False
    )
    figure.set_layout_engine("constrained")
    for panel, column in zip(panels[0], columns, strict=True):
        for condition, rows in _by_condition(table).items():
            scores = [_score(table, row, column) for row in rows]
            factor = 1 if is_plain(column) else 100
            means = [float("nan") if s["mean"] is None else factor * s["mean"] for s in scores]
            spread = [factor * (score["std"] or 0) for score in scores]
            if table["x"]:
                places = [row["x"] for row in rows]
                panel.errorbar(places, means, spread, marker="o", capsize=3, label=condition)
            else:
                heights = [-labels.index(row["label"]) for row in rows]
                panel.errorbar(means, heights, xerr=spread, fmt="o", capsize=3, label=condition)
        panel.set_title(column)
        panel.set_xlabel(table["x"] or ("" if table["columns"] else "strict F1 (%)"))
        if not table["x"]:
            panel.set_yticks([-i for i in range(len(labels))], labels)
    if table["x"] and not table["columns"]:
        panels[0][0].set_ylabel("strict F1 (%)")
    panels[0][-1].legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _score(table: Mapping[str, Any], row: Mapping[str, Any], column: str) -> Mapping[str, Any]:
    found = row["columns"][column] if table["columns"] else row["scores"][column]["strict"]["f1"]
    assert isinstance(found, Mapping)
    return found


def _by_condition(table: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in table["rows"]:
        found.setdefault(row["condition"], []).append(row)
    return found
