"""Read JSON and files that another party may have written.

Everything is bounded by `core/bounds.py` before it is parsed, and no read waits for a
FIFO or device that somebody put in the place of a file.
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

# A string that is cut off must end the text; otherwise the pattern would be tried from
# each quote in it.
_STRINGS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


class NotAFile(OSError):
    """A FIFO, a socket or a device stands where a file should."""


def open_regular(name: str, flags: int) -> int:
    """Open a regular file or a folder; use it as the `opener` of `open`.

    The type is checked on the open file, so nobody can replace it in between.

    Raises:
        NotAFile: It is a FIFO, a socket or a device.
        OSError: It cannot be opened.
    """
    descriptor = os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        require_file(os.fstat(descriptor).st_mode)
    except NotAFile:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: Path) -> bytes:
    """Return the content of a file.

    Raises:
        NotAFile: It is a FIFO, a socket or a device.
        OSError: It cannot be read.
    """
    with open(path, "rb", opener=open_regular) as file:
        return file.read()


def read_at_most(file: BinaryIO, limit: int) -> bytes:
    """Return the content of an open file, and no more than one byte over `limit` of it.

    Python reserves as many bytes as it is to read, so no more than the file has.
    """
    size = os.fstat(file.fileno()).st_size
    return file.read(min(size, limit) + 1)


def require_regular_files(paths: Iterable[Path]) -> None:
    """Check files that a library will open, which would wait for a FIFO.

    Raises:
        NotAFile: One is a FIFO, a socket or a device; `filename` is its path.
        OSError: One cannot be examined.
    """
    for path in paths:
        with suppress(FileNotFoundError):
            require_file(path.stat().st_mode, path)


def require_file(mode: int, path: Path | None = None) -> None:
    """Raise NotAFile unless a mode is that of a regular file or a folder.

    Args:
        mode: The mode, as `os.stat` returns it.
        path: The path for the error's `filename`, if it is known.
    """
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        kind = _KINDS.get(stat.S_IFMT(mode), "a device")
        raise NotAFile(
            errno.EINVAL,
            f"{kind}, but only files are read: put a file in its place",
            None if path is None else str(path),
        )


def shipped(name: str) -> dict[str, Any]:
    """Read a TOML file of the package, such as "data/words.toml"."""
    path = resources.files("fednotes").joinpath(name)
    return tomllib.loads(path.read_text("utf-8"))


# The largest magnitude of numbers from outside; sums of such numbers stay finite.
LARGEST = 1e100


class JsonError(ValueError):
    """Text that is not JSON, or exceeds a bound. The message quotes none of the text.

    Attributes:
        line: The line, counted from 1.
    """

    def __init__(self, reason: str, line: int = 1) -> None:
        super().__init__(reason)
        self.line = line


def read_json(
    path: Path, *, most_values: int = bounds.JSON_VALUES, strict: bool = True
) -> Any:
    """Return the JSON value in a file; arguments are those of `parse_json`.

    Raises:
        OSError: The file cannot be read.
        JsonError: As `parse_json`.
    """
    with open(path, "rb", opener=open_regular) as file:
        raw = read_at_most(file, bounds.FILE)
    return parse_json(raw, most_values=most_values, strict=strict)


def read_json_table(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is none to be read."""
    with suppress(OSError, JsonError):
        value = read_json(path)
        if isinstance(value, dict):
            return value
    return {}


def parse_json(
    raw: str | bytes | memoryview,
    *,
    most_values: int = bounds.JSON_VALUES,
    most_depth: int = bounds.JSON_DEPTH,
    strict: bool = True,
) -> Any:
    """Return the value of a JSON text.

    Args:
        raw: The text, or its bytes in UTF-8.
        most_values: The text may have at most this many commas and brackets outside of
            strings.
        most_depth: Objects and lists may be nested at most this deep.
        strict: Whether to refuse names that occur twice in an object and numbers that
            are not finite. Some programs write these.

    Raises:
        JsonError: The text is not JSON or exceeds a bound. No other error is raised.
    """
    if len(raw) > bounds.FILE:
        raise JsonError(f"over {bounds.FILE:,} bytes")
    try:
        text = raw if isinstance(raw, str) else str(raw, "utf-8")
        if has_more_values(text, most_values):
            raise JsonError(f"more than {most_values:,} values")
        value = json.loads(text, **_STRICT) if strict else json.loads(text)
        may_be_deep = text.count("[") + text.count("{") > most_depth
        if may_be_deep and _is_deeper(value, most_depth):
            raise RecursionError
    except JsonError:
        raise
    except json.JSONDecodeError as error:
        raise JsonError(error.msg, error.lineno) from None
    except UnicodeDecodeError:
        raise JsonError("not UTF-8 text") from None
    except RecursionError:
        raise JsonError(f"nested too deeply: more than {most_depth} levels") from None
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


def has_more_values(text: str, most: int) -> bool:
    """Return whether a JSON text may hold more values than `most`.

    Commas and brackets within strings are left out only if the text has too many in
    all. This takes time linear in the text and memory for one copy of it.
    """
    return count_values(text) > most and count_values(_STRINGS.sub("", text)) > most


def _is_deeper(value: Any, most: int) -> bool:
    """Return whether objects and lists are nested more than `most` deep."""
    level = [value]
    for _ in range(most):
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


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise JsonError("a name occurs twice in an object")
    return table


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise JsonError("NaN or Infinity, which JSON does not allow")
    return number


_STRICT: dict[str, Any] = {
    "object_pairs_hook": _distinct,
    "parse_float": _finite,
    "parse_constant": _finite,
}


def mapping(value: object) -> Mapping[str, Any]:
    """Return the value if it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def number(scores: object, *path: str) -> float | None:
    """Return the number at a path of keys.

    Returns:
        None if there is no number, or it is NaN or beyond ±`LARGEST`.
    """
    for key in path:
        scores = mapping(scores).get(key)
    if isinstance(scores, bool) or not isinstance(scores, int | float):
        return None
    # NaN and integers too long for a float compare safely, and fall outside.
    return float(scores) if -LARGEST <= scores <= LARGEST else None
