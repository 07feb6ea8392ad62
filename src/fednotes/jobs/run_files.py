"""Read the files of a run, which may be damaged or written by another party.

Each read is bounded (`core/bounds.py`). No read waits for a FIFO or device in the place
of a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

from annotated_types import Interval
from pydantic import BaseModel, FiniteFloat, ValidationError

from fednotes.core import bounds
from fednotes.core.errors import DataError
from fednotes.core.parsing import (
    LARGEST,
    JsonError,
    open_regular,
    parse_json,
    read_at_most,
)

# Version of the result files; the oldest ones have none.
VERSION = 1

OptionalNumber = Annotated[int | FiniteFloat, Interval(ge=-LARGEST, le=LARGEST)] | None

_Content = TypeVar("_Content", bound=BaseModel)


def read_versioned(path: Path, content: type[_Content]) -> _Content:
    """Read a JSON file that has a version.

    Args:
        path: The file.
        content: Class of its content.

    Raises:
        DataError: The file is damaged, or of a later version.
    """
    table = parse_object(path, 1, read_run_text(path))
    version = table.get("version", 0)
    if not isinstance(version, int):
        raise DataError(
            f"{path}: its version is not an integer: copy the run's folder again"
        )
    if version > VERSION:
        raise DataError(
            f"{path}: its version is {version!r}, but this fednotes reads {VERSION}: "
            "update fednotes"
        )
    try:
        return content.model_validate(table)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise DataError(f"{path}: {place}: {first['msg']}") from error


def read_run_text(path: Path) -> str:
    """Return the text of a file; read at most one byte more than `bounds.FILE`.

    Raises:
        DataError: The file cannot be read or is not UTF-8.
    """
    try:
        with open(path, "rb", opener=open_regular) as file:
            return read_at_most(file, bounds.FILE).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({type(error).__name__})") from error


def parse_object(path: Path, line: int, text: str) -> dict[str, Any]:
    """Return the JSON object in a text.

    Args:
        path: The file, for messages.
        line: Line of the file at which the text begins, counted from 1.
        text: The text.

    Raises:
        DataError: The text is not a JSON object, or exceeds a bound.
    """
    try:
        value = parse_json(text, strict=False)
    except JsonError as error:
        place = line + error.line - 1
        raise DataError.at(path, place, f"not JSON ({error})") from error
    if not isinstance(value, dict):
        raise DataError.at(path, line, "expected a JSON object")
    return value
