"""Tables of JSON values: their fingerprints and differences.

A job is sent only as such a table. A table that contains anything except tables, lists,
text, numbers, booleans and null has no fingerprint, so nothing else can be approved.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fednotes.core.cleaning import clean
from fednotes.core.errors import RefusedError

Table = Mapping[str, Any]

_MAX_DEPTH = 32  # of tables within tables
# Characters of a dotted key. Each value is shown with its dotted key, so one long key
# above many values would take memory that grows with the square of the job's size.
_MAX_KEY = 1000
INTEGER_LIMIT = 2**63  # TOML's integers have 64 bits
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SURROGATE = re.compile("[\ud800-\udfff]")


def fingerprint_table(table: Table) -> str:
    """Return the SHA-256 of a table as canonical JSON, in hexadecimal.

    The order of keys does not matter; the types of values do (1 differs from 1.0).

    Raises:
        RefusedError: The table contains something that is not a JSON value.
    """
    text = json.dumps(
        copy_json_value(table), sort_keys=True, separators=(",", ":"), allow_nan=False
    )
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def compare_tables(old: Table, new: Table) -> tuple[str, ...]:
    """Return the differences between two tables, one line per dotted key.

    Returns:
        Lines sorted by key: "+ key = value" is added, "- key = value" is removed,
        "~ key: old → new" changes. Tables with equal fingerprints have no lines; others
        have at least one. Values are JSON; invisible characters are escaped, so that
        different lines cannot look the same.

    Raises:
        RefusedError: A table contains something that is not a JSON value.
    """
    before = dict(_list_leaves(copy_json_value(old), ""))
    after = dict(_list_leaves(copy_json_value(new), ""))

    lines = []
    for key in sorted(before.keys() | after.keys()):
        if key not in before:
            lines.append(f"+ {key} = {after[key]}")
        elif key not in after:
            lines.append(f"- {key} = {before[key]}")
        elif before[key] != after[key]:
            lines.append(f"~ {key}: {before[key]} → {after[key]}")
    return tuple(lines)


def copy_json_value(value: Any, depth: int = 0, where: str = "") -> Any:
    """Return a copy of a JSON value that consists of plain dicts and lists.

    Args:
        value: The value.
        depth: Number of enclosing tables and lists.
        where: The value's dotted key, for messages.

    Raises:
        RefusedError: The value is not JSON, or is nested too deeply.
    """
    if depth > _MAX_DEPTH:
        raise RefusedError(
            f"the job's tables are nested more than {_MAX_DEPTH} deep; no job needs "
            "that"
        )
    if isinstance(value, Mapping):
        for key in value:
            if not _is_text(key):
                raise RefusedError(
                    f"{where or 'the job'}: a key is {type(key).__name__}, not text"
                )
            if len(where) + len(key) > _MAX_KEY:
                raise RefusedError(
                    f"{where or 'the job'}: a key, with the names of its tables, has "
                    f"more than {_MAX_KEY:,} characters; no job needs that"
                )
        return {
            key: copy_json_value(inner, depth + 1, _join_key(where, key))
            for key, inner in value.items()
        }
    if type(value) in (list, tuple):
        return [
            copy_json_value(item, depth + 1, f"{where}[{index}]")
            for index, item in enumerate(value)
        ]
    if not _is_scalar(value):
        raise RefusedError(
            f"{where or 'the job'}: a {type(value).__name__} is not a JSON "
            "value: a job contains text, numbers, true or false, lists and "
            "tables, and never code"
        )
    return value


def _is_scalar(value: Any) -> bool:
    """Return whether a value is null, a boolean, text or a valid JSON number."""
    if type(value) is int:
        return -INTEGER_LIMIT <= value < INTEGER_LIMIT
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) is bool or _is_text(value)


def _is_text(value: Any) -> bool:
    """Return whether a value is text that UTF-8 can encode.

    Half of a surrogate pair would be ambiguous.
    """
    return type(value) is str and not _SURROGATE.search(value)


def _list_leaves(value: Any, where: str) -> Iterator[tuple[str, str]]:
    """Yield dotted keys and their values as JSON.

    A list is one value unless it contains tables or lists.
    """
    if isinstance(value, dict) and (value or not where):
        for key, inner in value.items():
            yield from _list_leaves(inner, _join_key(where, key))
    elif isinstance(value, list) and any(
        isinstance(item, dict | list) for item in value
    ):
        for index, inner in enumerate(value):
            yield from _list_leaves(inner, f"{where}[{index}]")
    else:
        yield where, _to_json(value)


def _join_key(where: str, key: str) -> str:
    """Return the dotted key of a key inside a table, quoted where TOML quotes it."""
    name = key if _BARE_KEY.fullmatch(key) else _to_json(key)
    return f"{where}.{name}" if where else name


def _to_json(value: Any) -> str:
    """Return a value as one line of JSON in which every character is visible."""
    return clean(json.dumps(value, sort_keys=True, ensure_ascii=False), None)
