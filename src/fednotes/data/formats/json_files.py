"""Reading of JSON files and JSON lines, within bounds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fednotes.core.errors import DataError
from fednotes.core.parsing import JsonError, parse_json
from fednotes.data.formats.files import (
    locating_errors,
    read_head,
    read_nonblank_lines,
    read_text,
)

# An incomplete string must end the text; otherwise the pattern would be tried from each
# quote in it.
_TOKEN = re.compile(r'"((?:[^"\\]|\\.)*+)(?:"(\s*:)?|\\?\Z)|[\[{]|[\]}]', re.DOTALL)
_HALF_OF_PAIR = re.compile("[\ud800-\udfff]")  # of a surrogate pair


def parse_json_line(line: str) -> Any:
    """Return the value of a line of JSONL.

    Raises:
        DataError: It is not JSON.
    """
    try:
        return parse_json(line, strict=False)
    except JsonError as error:
        raise DataError(
            f"not JSON ({error}): expected one complete object per line"
        ) from None


def read_json(path: Path) -> Any:
    """Return the value of a JSON file.

    Raises:
        DataError: It is not JSON, or larger than `bounds.FILE`.
    """
    try:
        return parse_json(read_text(path), strict=False)
    except JsonError as error:
        raise DataError.at(
            path,
            error.line,
            f"not readable as JSON ({error}): check that the file is complete; split a "
            "large corpus into several files of one folder",
        ) from None


def read_json_rows(path: Path) -> Iterator[Any]:
    """Yield the values of JSON lines or of a JSON array, or a file's only value.

    JSON lines are read one by one.

    Raises:
        DataError: It is not JSON.
    """
    _, first_line = next(read_nonblank_lines(path))
    try:
        parse_json(first_line, strict=False)
    except JsonError:
        yield from _list_rows(read_json(path))  # one value over several lines
        return
    rows = _read_json_lines(path)
    first = next(rows)
    second = next(rows, None)
    if second is None:
        yield from _list_rows(first)
        return
    yield first
    yield second
    yield from rows


def _list_rows(value: Any) -> list[Any]:
    """Return the items of a list, or any other value as the only item."""
    return value if isinstance(value, list) else [value]


def _read_json_lines(path: Path) -> Iterator[Any]:
    """Yield the value of each line that is not blank."""
    for number, line in read_nonblank_lines(path):
        with locating_errors(path, number):
            value = parse_json_line(line)
        yield value


def read_json_keys(path: Path) -> frozenset[str]:
    """Return the keys of a JSON file's first object that its first bytes contain.

    For an array, the keys are those of its first object, and "[".
    """
    text = "\n".join(read_head(path)).lstrip()
    if text[:1] not in ("[", "{"):
        return frozenset()
    keys: set[str] = set()
    object_depth = 1
    if text[0] == "[":
        keys.add("[")
        object_depth = 2
    depth = 0
    for token in _TOKEN.finditer(text):
        sign = token[0][0]
        if sign in "[{":
            depth += 1
        elif sign in "]}":
            depth -= 1
            if depth < object_depth:
                break
        elif token[2] and depth == object_depth:
            keys.add(token[1])
    return frozenset(keys)


def find_text_key(record: Any, *keys: str) -> str | None:
    """Return the key of a record that contains its text.

    Args:
        record: A value of a JSON file.
        *keys: Possible keys; the first that the record has is used.

    Returns:
        The key, or None if an annotator rejected or ignored the record (Prodigy's
        "answer").

    Raises:
        DataError: The value is not an object, or it has no usable text.
    """
    if not isinstance(record, dict):
        raise DataError("the line is not a JSON object")
    if record.get("answer", "accept") != "accept":
        return None
    key = next((key for key in keys if key in record), keys[0])
    text = record.get(key)
    if not isinstance(text, str):
        raise DataError(f'the key "{key}" is missing or not a string')
    for name, value in record.items():
        if not isinstance(value, str) or value.isascii():
            continue
        if _HALF_OF_PAIR.search(value):  # UTF-8 cannot encode it, in an id either
            part = "the text" if name == key else f'the key "{name}"'
            raise DataError(f"{part} has half of a surrogate pair")
    return key
