"""A gathered grid as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fednotes.metrics.compare import FEWEST_SEEDS

KINDS = ("strict", "relaxed")
MISSING = {"mean": None, "std": None, "n": 0}  # of a number that exists in no run
_OF_A_DISEASE = (("precision", "P"), ("recall", "R"), ("f1", "F1"))


def markdown(table: Mapping[str, Any]) -> str:
    """The table as Markdown: F1 in percent, mean ± standard deviation over seeds."""
    return "".join(line + "\n" for line in _lines(table))


def _lines(table: Mapping[str, Any]) -> Iterator[str]:
    if "markdown" in table:
        yield from table["markdown"].splitlines()
        return
    yield f"### {table['title']}"
    yield ""
    if changed := table.get("settings"):
        yield f"Changed in every run: {_settings(changed)}."
        yield ""
    if table.get("by_output"):
        yield from _disease_lines(table)
        yield from _choice_lines(table)
        yield from _pair_lines(table)
        return
    if table["columns"]:
        yield from _column_lines(table)
    else:
        yield from _site_lines(table)
    yield from _choice_lines(table)
    yield from _pair_lines(table)
    if table["paper"]:
        yield from _paper_lines(table)


def _choice_lines(table: Mapping[str, Any]) -> Iterator[str]:
    """Settings that validation data chose, among which."""
    searched = [row for row in table["rows"] if row["tried"]]
    if searched:
        yield ""
        yield "Chosen by the mean of the sites' validation scores:"
        yield ""
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
        yield "| first minus second | seeds | " + " | ".join(columns) + " |"
        yield "|---|---:|" + "---:|" * len(columns)
        for pair in tested:
            cells = [_difference(pair["differences"].get(name)) for name in columns]
            names = f"{pair['first']} − {pair['second']}"
            yield f"| {names} | {len(pair['seeds'])} | " + " | ".join(cells) + " |"
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
    yield f"Shares in percent; {_seeds(table)}. {table['note']}"
    yield ""
    columns = table["columns"]
    heads = [*columns, *((f"behind {table['against']}",) if table["against"] else ())]
    yield "| run | condition | " + " | ".join(heads) + " |"
    yield "|---|---|" + "---:|" * len(heads)
    best = next((r for r in table["rows"] if r["label"] == table["against"]), None)
    for row in table["rows"]:
        cells = [_number(name, row["columns"][name]) for name in columns]
        if best is not None:
            ends = [each["columns"][columns[-1]]["mean"] for each in (best, row)]
            known = row is not best and None not in ends
            cells.append(f"{100 * (ends[0] - ends[1]):.1f}" if known else "")
        yield f"| {row['label']} | {row['condition']} | " + " | ".join(cells) + " |"


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
        *(("seeds",) if uneven else ()),
        *columns,
        *(("types not annotated",) if foreign else ()),
        *within.values(),
        *(("MB", "s") if within else ()),
    ]
    yield "| run | condition | " + " | ".join(heads) + " |"
    yield "|---|---|" + "---:|" * len(heads)
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
        yield "| " + " | ".join([*named, *several, *cells]) + " |"


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
    yield "| disease | " + " | ".join(heads) + " |"
    yield "|---|" + "---:|" * len(heads)
    for name in [*diseases, *(p for p in paper if beside and p not in {*diseases, "average"})]:
        cells = [
            _cell(row["by_output"].get(name, {}).get(key, MISSING))
            for row in rows
            for key, _ in _OF_A_DISEASE
        ]
        yield _row(name, cells, paper.get(name, {}), figures)
    averages = [_average(row, key) for row in rows for key, _ in _OF_A_DISEASE]
    yield _row("average", averages, paper.get("average", {}), figures)
    if paper and not beside:
        yield from _paper_lines(table)
    elif table["paper_note"]:
        yield ""
        yield table["paper_note"]


def _row(name: str, cells: list[str], paper: Mapping[str, float], figures: list[str]) -> str:
    beside = [f"{paper[head]:.1f}" if head in paper else "" for head in figures]
    return f"| {name} | " + " | ".join([*cells, *beside]) + " |"


def _average(row: Mapping[str, Any], key: str) -> str:
    """The plain mean over diseases of their means over seeds."""
    means = [s[key]["mean"] for s in row["by_output"].values() if key in s]
    return f"{100 * sum(means) / len(means):.1f}" if means else "–"


def _paper_lines(table: Mapping[str, Any]) -> Iterator[str]:
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
    if mean is None:
        return "–"
    return f"{100 * mean:.1f}" + (f" ± {100 * std:.1f}" if std is not None else "")
