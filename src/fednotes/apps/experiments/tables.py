"""The numbers of a grid as Markdown and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fednotes.apps.experiments.grids import HELD_OUT
from fednotes.metrics.paired_tests import FEWEST_SEEDS

KINDS = ("strict", "relaxed")
RATES = ("precision", "recall", "f1")
MISSING = {"mean": None, "std": None, "n": 0}  # of a number that exists in no run
_OF_A_DISEASE = (("precision", "P"), ("recall", "R"), ("f1", "F1"))


def markdown(table: Mapping[str, Any]) -> str:
    """The table as Markdown: F1 in percent, mean ± standard deviation over seeds."""
    return table["markdown"] if "markdown" in table else page(_parts(table))


def page(parts: Iterable[str]) -> str:
    """Markdown of paragraphs and tables."""
    return "\n\n".join(parts) + "\n"


def grid_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1
) -> str:
    """A table of Markdown; `left` columns are names, the others numbers."""
    ruler = "---|" * left + "---:|" * (len(heads) - left)
    lines = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join((f"| {' | '.join(heads)} |", f"|{ruler}", *lines))


def _parts(table: Mapping[str, Any]) -> Iterator[str]:
    yield f"### {table['title']}"
    if changed := table.get("settings"):
        yield f"Changed by `--set`: {_settings(changed)}."
    for setting, rows in table.get("skipped_settings", ()):
        yield f"`{setting}` does not reach {rows}."
    yield from _of_left_out(table)
    yield from _of_diseases(table) if table.get("by_output") else _of_runs(table)
    searched = [row for row in table["rows"] if row["tried"]]
    if searched:
        yield "Chosen by the mean of the sites' validation scores:"
        yield "\n".join(map(_choice, searched))
    if any(each["held_out"] for row in searched for each in row["tried"]):
        yield (
            f"The job holds no validation data out. For the search alone, {HELD_OUT:.0%} of the "
            "training sentences were held out; the runs of the table train on all of them. Test "
            "data choose nothing."
        )
    yield from _of_pairs(table)
    if table["paper"] and not table.get("by_output"):
        yield from _of_paper(table)


def _of_left_out(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rows that could not run, with the reason."""
    left_out = table.get("left_out", ())
    if left_out:
        yield "Left out, because it cannot run here:"
        yield "\n".join(f"- {'; '.join(rows)}: {reason}" for reason, rows in left_out)


def _choice(row: Mapping[str, Any]) -> str:
    """The settings that validation data chose, among which."""
    tried = "; ".join(
        f"{_settings(each['set'])}: {100 * each['validation']:.1f}"
        for each in row["tried"]
    )
    return f"- {row['label']}, {row['condition']}: {_settings(row['chosen'])} ({tried})"


def _settings(chosen: list[str]) -> str:
    return ", ".join(f"`{each}`" for each in chosen)


def _of_pairs(table: Mapping[str, Any]) -> Iterator[str]:
    """Paired tests over seeds; where seeds are few, that nothing is claimed."""
    tested = [pair for pair in table["pairs"] if pair["differences"]]
    if tested:
        columns = list(
            dict.fromkeys(name for pair in tested for name in pair["differences"])
        )
        yield (
            "Differences in points, with 95 % intervals and p of a paired t test over seeds "
            "(each p is of a single test):"
        )
        rows = (
            (
                f"{pair['first']} − {pair['second']}",
                str(len(pair["seeds"])),
                *(_difference(pair["differences"].get(name)) for name in columns),
            )
            for pair in tested
        )
        yield grid_table(("first minus second", "seeds", *columns), rows)
    few = {
        len(row["seeds"]) for row in table["rows"] if len(row["seeds"]) < FEWEST_SEEDS
    }
    if few and table["score"] == "test":
        yield (
            f"{' or '.join(map(str, sorted(few)))} seed{'s' * (few != {1})}: no difference is "
            + ("claimed between the other rows." if tested else "claimed.")
        )
    if "untested" in table:
        yield f"No test over seeds: {table['untested']}."


def _difference(test: Mapping[str, float] | None) -> str:
    if test is None:
        return ""
    mean, low, high = (100 * test[key] for key in ("mean", "low", "high"))
    p = "p < 0.001" if test["p_value"] < 0.001 else f"p = {test['p_value']:.3f}"
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f}; {p})"


def _seeds(table: Mapping[str, Any]) -> str:
    """Those of all rows, or of each number of them."""
    by_row = {tuple(row["seeds"]) for row in table["rows"]}
    if len(by_row) == 1:
        return f"seeds {', '.join(map(str, table['seeds']))}"
    return "seeds " + " or ".join(
        ", ".join(map(str, seeds)) for seeds in sorted(by_row, key=len)
    )


def _of_runs(table: Mapping[str, Any]) -> Iterator[str]:
    """A row a run: the grid's own columns, or strict and relaxed F1 of each site."""
    of = {"test": "Test F1 in percent, strict / relaxed"}
    if table["columns"]:
        yield f"Shares in percent; {_seeds(table)}. {table['note']}"
    else:
        shown = of.get(table["score"], "Validation F1 in percent, strict")
        yield f"{shown}; {_seeds(table)}.\n{table['note']}".rstrip()
    sites = not table["columns"]
    cells = _site_cells if sites else _own_cells
    found = [cells(table, row) for row in table["rows"]]
    uneven = len({tuple(row["seeds"]) for row in table["rows"]}) > 1 and sites
    rows = [
        (
            row["label"],
            _condition(row) if sites else row["condition"],
            *([str(len(row["seeds"]))] if uneven else []),
            *each.values(),
        )
        for row, each in zip(table["rows"], found, strict=True)
    ]
    heads = ("run", "condition", *(["seeds"] if uneven else []), *found[0])
    yield grid_table(heads, rows, left=2)
    if sites:
        yield from _of_rates(table)


def _condition(row: Mapping[str, Any]) -> str:
    """Return how a row's model was trained, with what the run adds to the method."""
    if not row["beyond"]:
        return row["condition"]
    return f"{row['condition']} + {row['beyond']}"


def _of_rates(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield precision and recall of each site, a table for strict and one for relaxed
    mentions."""
    for kind in KINDS:
        places = [
            name
            for name, score in table["rows"][0]["scores"].items()
            if "precision" in score.get(kind, {})
        ]
        if not places:
            continue
        rows = [
            (
                row["label"],
                _condition(row),
                *(
                    _precision_recall(row["scores"].get(name, {}).get(kind, {}))
                    for name in places
                ),
            )
            for row in table["rows"]
        ]
        yield f"Precision / recall in percent, {kind}:"
        yield grid_table(("run", "condition", *places), rows, left=2)


def _precision_recall(score: Mapping[str, Any]) -> str:
    return " / ".join(
        _cell(score.get(rate, MISSING)) for rate in ("precision", "recall")
    )


def _own_cells(table: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, str]:
    """By heading, where the grid says what its columns are."""
    cells = {name: _number(name, row["columns"][name]) for name in table["columns"]}
    if table["against"]:
        best = next((r for r in table["rows"] if r["label"] == table["against"]), row)
        ends = [each["columns"][table["columns"][-1]]["mean"] for each in (best, row)]
        known = row is not best and None not in ends
        cells[f"behind {table['against']}"] = (
            f"{100 * (ends[0] - ends[1]):.1f}" if known else ""
        )
    return cells | _foreign_cells(table, row) | _gap_cells(table, row)


def _foreign_cells(table: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, str]:
    """F1 of types that a site does not annotate, where any row has it."""
    if not any(each["not_annotated"] for each in table["rows"]):
        return {}
    foreign = row["not_annotated"]
    return {"types not annotated": _cell(foreign["f1"]) if foreign else ""}


def _gap_cells(table: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, str]:
    """The share of pooled - alone that a row closes, where any row says so."""
    if not any(each.get("gap") for each in table["rows"]):
        return {}
    gap = row.get("gap") or {"why": ""}
    return {"gap closed": gap["why"] if "why" in gap else _cell(gap, 2, 1)}


def _site_cells(table: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, str]:
    """By heading: each site's scores, those of types it does not annotate, and within a
    cost."""
    cells = {
        name: " / ".join(_cell(f1["f1"]) for kind in KINDS if (f1 := score.get(kind)))
        for name, score in row["scores"].items()
    }
    cells |= _foreign_cells(table, row)
    spent = row["within"]
    for name, unit in (("megabytes", "MB"), ("seconds", "s")):
        if table[name]:
            head = f"micro strict within {table[name]:g} {unit}"
            cells[head] = _cell(spent[name]) if spent else ""
    if table["megabytes"] or table["seconds"]:
        cells["MB"] = f"{row['megabytes']:.1f}" if spent else ""
        cells["s"] = f"{row['seconds']:.0f}"
    return cells | _gap_cells(table, row)


def _number(name: str, score: Mapping[str, float | None]) -> str:
    """A share in percent, another number as it is."""
    if not is_plain(name):
        return _cell(score)
    return _cell(
        score, 3 if name.endswith(("loss", "brier")) else 0 if name == "s" else 2, 1
    )


def is_plain(column: str) -> bool:
    """Whether a column's numbers are shown as they are: bytes, seconds, errors; not
    shares."""
    kind = column.rsplit(" ", 1)[-1]
    return kind in ("up", "down", "site", "s", "loss", "perplexity", "brier")


def _of_diseases(table: Mapping[str, Any]) -> Iterator[str]:
    """A row a disease, then the average; three columns a run, and the paper's figures
    beside."""
    rows, paper = table["rows"], table["paper"]
    yield f"Percent; {_seeds(table)}. {table['note']}".rstrip()
    diseases = list(dict.fromkeys(name for row in rows for name in row["by_output"]))
    beside = any(name in paper for name in diseases)
    figures = list(next(iter(paper.values()))) if beside else []
    named = [
        f"{row['label']}, {row['condition']}: " if len(rows) > 1 else "" for row in rows
    ]
    heads = [f"{name}{head}" for name in named for _, head in _OF_A_DISEASE]
    heads += [f"paper: {head}" for head in figures]
    shown = {}
    for name in [
        *diseases,
        *(p for p in paper if beside and p not in {*diseases, "average"}),
    ]:
        shown[name] = [
            _cell(row["by_output"].get(name, {}).get(key, MISSING))
            for row in rows
            for key, _ in _OF_A_DISEASE
        ]
    shown["average"] = [_average(row, key) for row in rows for key, _ in _OF_A_DISEASE]
    for name, cells in shown.items():
        given = paper.get(name, {})
        cells += [f"{given[head]:.1f}" if head in given else "" for head in figures]
    yield grid_table(
        ("disease", *heads), ([name, *cells] for name, cells in shown.items())
    )
    if paper and not beside:
        yield from _of_paper(table)
    elif table["paper_note"]:
        yield table["paper_note"]


def _average(row: Mapping[str, Any], key: str) -> str:
    """The plain mean over diseases of their means over seeds."""
    means = [s[key]["mean"] for s in row["by_output"].values() if key in s]
    return f"{100 * sum(means) / len(means):.1f}" if means else "–"


def _of_paper(table: Mapping[str, Any]) -> Iterator[str]:
    heads = list(next(iter(table["paper"].values())))
    yield f"The paper's own figures. {table['paper_note']}"
    rows = (
        [name, *(f"{of[h]:.2f}" for h in heads)] for name, of in table["paper"].items()
    )
    yield grid_table(("run", *heads), rows)


def _cell(
    score: Mapping[str, float | None], digits: int = 1, factor: float = 100
) -> str:
    mean, std = score["mean"], score["std"]
    if mean is None:
        return "–"
    found = f"{factor * mean:.{digits}f}"
    return found if std is None else f"{found} ± {factor * std:.{digits}f}"


def plot(table: Mapping[str, Any], path: Path) -> bool:
    """Strict F1 of each site, or the table's own columns, with standard deviations: a
    panel each.

    False where matplotlib (the extra "plot") is not installed, or the table has no rows
    or has one a disease.
    """
    if not table.get("rows") or table.get("by_output"):
        return False
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    columns = table["columns"] or list(table["rows"][0]["scores"])
    labels = list(dict.fromkeys(row["label"] for row in table["rows"]))
    height = 3.0 if table["x"] else 1.2 + 0.32 * len(labels)
    figure = Figure(figsize=(2.9 * len(columns), height), layout="constrained")
    panels = figure.subplots(1, len(columns), sharey=not table["x"], squeeze=False)
    for panel, column in zip(panels[0], columns, strict=True):
        for condition in dict.fromkeys(row["condition"] for row in table["rows"]):
            rows = [row for row in table["rows"] if row["condition"] == condition]
            scores = [
                row["columns"][column]
                if table["columns"]
                else row["scores"][column]["strict"]["f1"]
                for row in rows
            ]
            factor = 1 if is_plain(column) else 100
            means = [
                float("nan") if s["mean"] is None else factor * s["mean"]
                for s in scores
            ]
            spread = [factor * (score["std"] or 0) for score in scores]
            if table["x"]:
                places = [row["x"] for row in rows]
                panel.errorbar(
                    places, means, spread, marker="o", capsize=3, label=condition
                )
            else:
                heights = [-labels.index(row["label"]) for row in rows]
                panel.errorbar(
                    means, heights, xerr=spread, fmt="o", capsize=3, label=condition
                )
        panel.set_title(column)
        panel.set_xlabel(table["x"] or ("" if table["columns"] else "strict F1 (%)"))
        if not table["x"]:
            panel.set_yticks([-i for i in range(len(labels))], labels)
    if table["x"] and not table["columns"]:
        panels[0][0].set_ylabel("strict F1 (%)")
    panels[0][-1].legend()
    figure.savefig(path, dpi=110)
    return True
