"""Reading JSON and other files that another party may have written.

Everything is bounded by `core/bounds.py` before it is parsed, and no read blocks on a
FIFO or device in place of a file.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO

from fednotes.core import bounds

# An unterminated string must reach the end of the text; otherwise the pattern would be
# tried from each quote in it.
_STRINGS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


class NotAFile(OSError):
    """A FIFO, a socket or a device is in the place of a file."""


def open_regular(name: str, flags: int) -> int:
    """Open a regular file or a folder; use it as the `opener` of `open`.

    The type is checked on the open file, so it cannot be replaced in between.

    Raises:
        NotAFile: The path is a FIFO, a socket or a device.
        OSError: The file cannot be opened.
    """
    descriptor = os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        require_file(os.fstat(descriptor).st_mode)
    except NotAFile:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: Path, limit: int | None = None) -> bytes:
    """Return the content of a file.

    With a limit, at most one byte more is read, so the caller sees that it is exceeded.

    Raises:
        NotAFile: The path is a FIFO, a socket or a device.
        OSError: The file cannot be read.
    """
    with open(path, "rb", opener=open_regular) as file:
        return file.read() if limit is None else read_at_most(file, limit)


def read_at_most(file: BinaryIO, limit: int) -> bytes:
    """Return the content of an open file, up to one byte more than `limit`.

    Python allocates the requested number of bytes, so the file's size is requested at
    most.
    """
    size = os.fstat(file.fileno()).st_size
    return file.read(min(size, limit) + 1)


def require_regular_files(paths: Iterable[Path]) -> None:
    """Check files before a library opens them, which would block on a FIFO.

    Raises:
        NotAFile: A path is a FIFO, a socket or a device; `filename` is the path.
        OSError: A path cannot be examined.
    """
    for path in paths:
        with suppress(FileNotFoundError):
            require_file(path.stat().st_mode, path)


def is_within(path: Path, folders: Iterable[Path]) -> bool:
    """Return whether a path is in one of some folders, with all links resolved."""
    target = Path(os.path.realpath(path))
    return any(target.is_relative_to(os.path.realpath(folder)) for folder in folders)


def require_file(mode: int, path: Path | None = None) -> None:
    """Raise NotAFile unless a mode is that of a regular file or folder.

    Args:
        mode: The mode, as `os.stat` returns it.
        path: The path for the error's `filename`; None if unknown.
    """
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        kind = _KINDS.get(stat.S_IFMT(mode), "a device")
        raise NotAFile(
            errno.EINVAL,
            f"{kind}, but only files are read: put a file in its place",
            None if path is None else str(path),
        )


def read_shipped_table(name: str) -> dict[str, Any]:
    """Read a TOML file of the package, such as "data/words.toml"."""
    path = resources.files("fednotes").joinpath(name)
    return tomllib.loads(path.read_text("utf-8"))


# The largest magnitude of numbers from other parties; their sums stay finite.
LARGEST = 1e100


class JsonError(ValueError):
    """Text that is not JSON or exceeds a bound. The message does not quote the text.

    Attributes:
        line: The line, counted from 1.
    """

    def __init__(self, reason: str, line: int = 1) -> None:
        super().__init__(reason)
        self.line = line


def read_json(
    path: Path, *, max_values: int = bounds.JSON_VALUES, strict: bool = True
) -> Any:
    """Return the JSON value in a file; arguments are those of `parse_json`.

    Raises:
        OSError: The file cannot be read.
        JsonError: As `parse_json`.
    """
    raw = read_regular(path, bounds.FILE)
    return parse_json(raw, max_values=max_values, strict=strict)


def read_json_table(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty one if it cannot be read."""
    with suppress(OSError, JsonError):
        value = read_json(path)
        if isinstance(value, dict):
            return value
    return {}


def parse_json(
    raw: str | bytes | memoryview,
    *,
    max_values: int = bounds.JSON_VALUES,
    max_depth: int = bounds.JSON_DEPTH,
    strict: bool = True,
) -> Any:
    """Return the value of a JSON text.

    Args:
        raw: The text, or its bytes in UTF-8.
        max_values: Maximum number of commas and brackets outside of strings.
        max_depth: Maximum nesting depth of objects and lists.
        strict: Whether to refuse duplicate names in an object and numbers that are not
            finite, which some programs write.

    Raises:
        JsonError: The text is not JSON or exceeds a bound. No other error is raised.
    """
    if len(raw) > bounds.FILE:
        raise JsonError(f"over {bounds.FILE:,} bytes")
    try:
        text = raw if isinstance(raw, str) else str(raw, "utf-8")
        if has_more_values(text, max_values):
            raise JsonError(f"more than {max_values:,} values")
        value = json.loads(text, **_STRICT) if strict else json.loads(text)
        may_be_deep = text.count("[") + text.count("{") > max_depth
        if may_be_deep and _is_deeper(value, max_depth):
            raise RecursionError
    except JsonError:
        raise
    except json.JSONDecodeError as error:
        raise JsonError(error.msg, error.lineno) from None
    except UnicodeDecodeError:
        raise JsonError("not UTF-8 text") from None
    except RecursionError:
        raise JsonError(f"nested too deeply: more than {max_depth} levels") from None
    except MemoryError:
        raise JsonError("too large for the memory of this machine") from None
    except ValueError:  # an integer of thousands of digits
        raise JsonError("a number with too many digits") from None
    return value


def count_values(text: str) -> int:
    """Return an upper bound of the number of values in a JSON text.

    These are its commas and opening brackets.
    """
    return sum(map(text.count, ",[{"))


def has_more_values(text: str, limit: int) -> bool:
    """Return whether a JSON text may contain more than `limit` values.

    Commas and brackets within strings are subtracted only if the total is too large.
    This takes linear time and memory for one copy of the text.
    """
    return count_values(text) > limit and count_values(_STRINGS.sub("", text)) > limit


def _is_deeper(value: Any, limit: int) -> bool:
    """Return whether objects and lists are nested more than `limit` deep."""
    level = [value]
    for _ in range(limit):
        inner_values = (
            outer.values() if isinstance(outer, dict) else outer for outer in level
        )
        level = [
            inner
            for values in inner_values
            for inner in values
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _require_distinct_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object's pairs as a table.

    Raises:
        JsonError: A name occurs twice.
    """
    table = dict(pairs)
    if len(table) != len(pairs):
        raise JsonError("a name occurs twice in an object")
    return table


def _parse_finite(text: str) -> float:
    """Return the number that a JSON text names.

    Raises:
        JsonError: It is NaN or infinite.
    """
    number = float(text)
    if not math.isfinite(number):
        raise JsonError("NaN or Infinity, which JSON does not allow")
    return number


_STRICT: dict[str, Any] = {
    "object_pairs_hook": _require_distinct_names,
    "parse_float": _parse_finite,
    "parse_constant": _parse_finite,
}


def as_mapping(value: object) -> Mapping[str, Any]:
    """Return a JSON value if it is an object, else an empty object."""
    return value if isinstance(value, Mapping) else {}


def find_number(scores: object, *path: str) -> float | None:
    """Return the number at a path of keys in nested objects.

    Args:
        scores: The outermost object, or any other value, which contains no number.
        path: The keys, the outermost first. Without keys, `scores` is the number.

    Returns:
        None if there is no number, or it is NaN or beyond ±`LARGEST`.
    """
    for key in path:
        scores = as_mapping(scores).get(key)
    if isinstance(scores, bool) or not isinstance(scores, int | float):
        return None
    # NaN and integers too long for a float compare safely as out of range.
    return float(scores) if -LARGEST <= scores <= LARGEST else None
