"""JSON that a file or another party holds, read within the bounds of `core/bounds.py`.

Opening files that others may have put there: nobody is waited for.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

from fednotes.core import bounds

_STRINGS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


class NotAFile(OSError):
    """A FIFO, a socket or a device stands where a file should."""


def regular(name: str, flags: int) -> int:
    """The `opener` of `open` for a regular file, or a folder (whoever opens one has the
    words).

    What was opened is asked what it is: nobody can put another in its place in between.
    Raises OSError; NotAFile for a FIFO, a socket or a device.
    """
    number = os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        require_file(os.fstat(number).st_mode)
    except NotAFile:
        os.close(number)
        raise
    return number


def require_file(mode: int) -> None:
    """Pass the mode of a file or a folder. Raises NotAFile."""
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        kind = _KINDS.get(stat.S_IFMT(mode), "a device")
        raise NotAFile(
            errno.EINVAL, f"{kind}, and only files are read: put one in its place"
        )


def shipped(name: str) -> dict[str, Any]:
    """A TOML file of the package, such as "data/words.toml"."""
    return tomllib.loads(resources.files("fednotes").joinpath(name).read_text("utf-8"))


# Largest magnitude of a number that is shown or computed with; sums of these stay finite.
LARGEST = 1e100


class JsonError(ValueError):
    """Text that is not JSON or beyond the bounds; says why, and nothing of the text.

    line: where, counted from 1.
    """

    def __init__(self, reason: str, line: int = 1) -> None:
        super().__init__(reason)
        self.line = line


def read_json(path: Path, *, strict: bool = True) -> Any:
    """The value in a file. Raises OSError, and JsonError as `parse_json` does."""
    with open(path, "rb", opener=regular) as file:
        return parse_json(file.read(bounds.FILE + 1), strict=strict)


def kept_table(path: Path) -> dict[str, Any]:
    """The table in a file of ours; empty where there is none that can be read."""
    with suppress(OSError, JsonError):
        found = read_json(path)
        if isinstance(found, dict):
            return found
    return {}


def parse_json(
    raw: str | bytes | memoryview,
    *,
    most_values: int = bounds.JSON_VALUES,
    strict: bool = True,
) -> Any:
    """The value of a JSON text (bytes: UTF-8).

    most_values: more commas and brackets outside of strings than this are not read.
    strict: refuse what JSON leaves open: a name that comes twice in a table, and
    numbers that are not finite; off for what other programs, and this one for people,
    write so.
    Raises JsonError, and nothing else.
    """
    if len(raw) > bounds.FILE:
        raise JsonError(f"over {bounds.FILE:,} bytes")
    try:
        text = raw if isinstance(raw, str) else str(raw, "utf-8")
        if has_more_values(text, most_values):
            raise JsonError(f"more than {most_values:,} values")
        value = json.loads(text, **_STRICT) if strict else json.loads(text)
        if sum(map(text.count, "[{")) > bounds.JSON_DEPTH and _deeper(
            value, bounds.JSON_DEPTH
        ):
            raise RecursionError
    except JsonError:
        raise
    except json.JSONDecodeError as error:
        raise JsonError(error.msg, error.lineno) from None
    except UnicodeDecodeError:
        raise JsonError("not UTF-8 text") from None
    except RecursionError:
        raise JsonError(f"nested too deep: over {bounds.JSON_DEPTH} levels") from None
    except MemoryError:
        raise JsonError("more than there is memory for") from None
    except ValueError:  # an integer of thousands of digits
        raise JsonError("a number that is too long") from None
    return value


def count_values(text: str) -> int:
    """Return an upper bound of the number of values in a JSON text: its commas and
    brackets."""
    return sum(map(text.count, ",[{"))


def has_more_values(text: str, most: int) -> bool:
    """Return whether a JSON text may hold more values than `most`.

    Only where commas and brackets are too many are those within strings, which are
    text, left out; this takes time linear in the text, and memory for one copy of it.
    """
    return count_values(text) > most and count_values(_STRINGS.sub("", text)) > most


def _deeper(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        inside = (own.values() if isinstance(own, dict) else own for own in level)
        level = [
            value for own in inside for value in own if isinstance(value, dict | list)
        ]
        if not level:
            return False
    return True


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise JsonError("a name comes twice in a table")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise JsonError("NaN or Infinity, which is no number of JSON")
    return number


_STRICT: dict[str, Any] = {
    "object_pairs_hook": _distinct,
    "parse_float": _finite,
    "parse_constant": _finite,
}


def mapping(value: object) -> Mapping[str, Any]:
    """The value if it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def number(scores: object, *path: str) -> float | None:
    """Return the number at a path of keys; None if there is none, or none within
    ±`LARGEST`."""
    for key in path:
        scores = mapping(scores).get(key)
    if isinstance(scores, bool) or not isinstance(scores, int | float):
        return None
    # NaN and integers too long for a float compare safely, and fall outside.
    return float(scores) if -LARGEST <= scores <= LARGEST else None
