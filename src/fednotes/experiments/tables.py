"""A gathered grid as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

KINDS = ("strict", "relaxed")


def markdown(table: Mapping[str, Any]) -> str:
    """The table as Markdown: F1 in percent, mean ± standard deviation over seeds."""
    return "".join(line + "\n" for line in _lines(table))


def _lines(table: Mapping[str, Any]) -> Iterator[str]:
    if "markdown" in table:
        yield from table["markdown"].splitlines()
        return
    yield f"### {table['title']}"
    yield ""
    if table["columns"]:
        yield from _column_lines(table)
    else:
        yield from _site_lines(table)
    if table["paper"]:
        yield from _paper_lines(table)


def _column_lines(table: Mapping[str, Any]) -> Iterator[str]:
    """The rows of a grid that says what its columns are."""
    yield f"Shares in percent; seeds {', '.join(map(str, table['seeds']))}. {table['note']}"
    yield ""
    columns = table["columns"]
    heads = [*columns, *((f"behind {table['against']}",) if table["against"] else ())]
    yield "| run | condition | " + " | ".join(heads) + " |"
    yield "|---|---|" + "---:|" * len(heads)
    best = next((r for r in table["rows"] if r["label"] == table["against"]), None)
    for row in table["rows"]:
        cells = [_number(name, row["columns"][name]) for name in columns]
        if best is not None:
            behind = best["columns"][columns[-1]]["mean"] - row["columns"][columns[-1]]["mean"]
            cells.append(f"{100 * behind:.1f}" if row is not best else "")
        yield f"| {row['label']} | {row['condition']} | " + " | ".join(cells) + " |"


def _number(name: str, score: Mapping[str, float | None]) -> str:
    """A share in percent, another number as it is."""
    if not is_plain(name):
        return _cell(score)
    mean, std = score["mean"], score["std"]
    assert mean is not None
    digits = 3 if name.endswith("loss") else 0 if name == "s" else 2
    return f"{mean:.{digits}f}" + (f" ± {std:.{digits}f}" if std is not None else "")


def is_plain(column: str) -> bool:
    """Whether a column's numbers are shown as they are: bytes, seconds, losses; not shares."""
    kind = column.rsplit(" ", 1)[-1]
    return kind in ("up", "down", "s", "loss", "perplexity")


def _site_lines(table: Mapping[str, Any]) -> Iterator[str]:
    """The rows of a grid with strict and relaxed F1 of each site."""
    columns = list(table["rows"][0]["scores"])
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
    assert mean is not None
    return f"{100 * mean:.1f}" + (f" ± {100 * std:.1f}" if std is not None else "")
