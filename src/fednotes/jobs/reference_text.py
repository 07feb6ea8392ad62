"""Format the keys of a job file as text, and as a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING
from typing import Any

from fednotes.core.errors import ConfigError, suggest_name
from fednotes.jobs.reference import Key, Table, list_tables, to_toml_value

_TITLE = "# The keys of a job file"
_INTRODUCTION = """\
This page is the output of `fednotes job keys --markdown`.

**Default** is the value that applies if a job does not set the key. A job without
`preset` has `preset = "best"`, so the defaults of [training] and [model] are those of
that preset. **Elsewhere** lists the defaults of other presets, methods or tables.
`fednotes job show JOB` prints one job with all of its values, and says where each comes
from. `fednotes job schema` prints a JSON schema, with which editors complete and check
job files. Relative paths are relative to the job file, and `$NAME` in a path stands for
an environment variable.
"""
_HEADS = ("key", "type", "default", "elsewhere", "meaning")


def format_default(value: Any) -> str:
    """Return a default as TOML would write it, or a phrase that says there is none."""
    if value is MISSING:
        return "(required)"
    if value is None:
        return "(none)"
    return json.dumps(to_toml_value(value), ensure_ascii=False, default=str)


def _format_elsewhere(key: Key) -> list[str]:
    """Return a line for each other default, with all cases in which it applies."""
    labels_by_value: dict[str, list[str]] = {}
    for label, value in key.elsewhere.items():
        labels_by_value.setdefault(format_default(value), []).append(label)
    return [
        f"{value}: {'; '.join(labels)}" for value, labels in labels_by_value.items()
    ]


# ---- text ----------------------------------------------------------------------------


def format_tables(name: str = "") -> str:
    """Return the keys of every table as text, or of the tables with one name.

    Args:
        name: Name of the tables, such as "sites"; "" for all.

    Raises:
        ConfigError: No table of a job has this name.
    """
    return "\n".join(map(_format_table, _find_tables(name)))


def describe_tables(name: str = "") -> list[dict[str, Any]]:
    """Return the keys of every table as JSON, or of the tables with one name.

    A key that a job must set has no default.

    Args:
        name: As in `format_tables`.

    Raises:
        ConfigError: No table of a job has this name.
    """
    return [
        {
            "table": table.name,
            "heading": table.heading,
            "about": table.about,
            "keys": [_describe_key(key) for key in table.keys],
        }
        for table in _find_tables(name)
    ]


def _describe_key(key: Key) -> dict[str, Any]:
    """Return a key as JSON."""
    described = {"name": key.name, "type": key.type, "meaning": key.meaning}
    if key.default is MISSING:
        return described
    return described | {"default": key.default, "elsewhere": dict(key.elsewhere)}


def _find_tables(name: str) -> list[Table]:
    """Return the tables with a name; all for ""; see `format_tables`."""
    tables = list_tables()
    chosen = [table for table in tables if name in ("", table.name)]
    if not chosen:
        known = {table.name for table in tables}
        raise ConfigError(
            f"no table of a job is called {name!r}: {suggest_name(name, known)}"
        )
    return chosen


def _format_table(table: Table) -> str:
    """Return a table as text: its heading, what it is for, and its keys."""
    lines = [table.heading]
    lines += [f"    {line}".rstrip() for line in table.about.split("\n")]
    for key in table.keys:
        lines.append(f"  {key.name} = {format_default(key.default)}  ({key.type})")
        lines += [f"      {text}" for text in _format_elsewhere(key)]
        if key.meaning:
            lines.append(f"      {key.meaning}")
    return "\n".join(lines) + "\n"


# ---- the page ------------------------------------------------------------------------


def format_page() -> str:
    """Return all tables as a Markdown page (`docs/job.md`)."""
    sections = [f"{_TITLE}\n", _INTRODUCTION, *map(_format_section, list_tables())]
    return "\n".join(sections)


def _format_section(table: Table) -> str:
    """Return a table as a section of the Markdown page."""
    has_elsewhere = any(key.elsewhere for key in table.keys)
    heads = [head for head in _HEADS if head != "elsewhere" or has_elsewhere]
    lines = [_format_row(heads), _format_row(["---"] * len(heads))]
    for key in table.keys:
        cells = _format_cells(key)
        lines.append(_format_row([cells[head] for head in heads]))
    about = f"{table.about}\n\n" if table.about else ""
    return f"## {table.heading}\n\n{about}" + "\n".join(lines) + "\n"


def _format_cells(key: Key) -> dict[str, str]:
    """Return the cells of a key's row, by the headings of their columns."""
    return {
        "key": f"`{key.name}`",
        "type": key.type,
        "default": _format_code(format_default(key.default)),
        "elsewhere": "<br>".join(map(_format_code_first, _format_elsewhere(key))),
        "meaning": key.meaning,
    }


def _format_row(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    escaped = [cell.replace("|", r"\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def _format_code(value: str) -> str:
    """Return a default as Markdown code; a phrase in brackets stays as it is."""
    return value if value.startswith("(") else f"`{value}`"


def _format_code_first(line: str) -> str:
    """Return a line of `_format_elsewhere` with its value as Markdown code."""
    value, _, labels = line.partition(": ")
    return f"{_format_code(value)}: {labels}"
