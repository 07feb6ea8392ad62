"""Read docs/papers.md: its rows, and the comments of the source that they name."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "papers.md"
# An example of a row, for messages.
FORM = "| `[paper eq 1]` | `fednotes.module.function` | `tests/folder/test_file.py::test_name` |"
_NAME = r"[a-z0-9][a-z0-9 .-]*\]"
# The first word of the markers in the tables, which stands for the paper. It is read
# from any line that looks like a row, so that a misspelt row is noticed.
_FIRST_WORD = re.compile(rf"^\|\s*`?\[([a-z]+) {_NAME}", re.MULTILINE)
_PAPERS = "|".join(sorted(set(_FIRST_WORD.findall(PAGE.read_text("utf-8")))))
MARKER = re.compile(rf"\[(?:{_PAPERS}) {_NAME}")
# Comments that look like a marker, of any paper.
LIKE_A_MARKER = re.compile(
    r"\[[a-z]+ (?:eq|equation|alg|algorithm|table|section) [0-9][a-z0-9 .-]*\]"
)
_OF_APP = re.compile(r"^(?:src/|tests/)?(?:fednotes[./])?apps[./](\w+)")
_ROW = re.compile(r"^\|\s*`(\[[^`]+\])`\s*\|\s*(.+?)\s*\|\s*(.+?)\s*\|$", re.MULTILINE)


class Row(NamedTuple):
    """A row of a table in docs/papers.md.

    Attributes:
        marker: The marker, such as "[fedner eq 2]".
        functions: The dotted paths of functions, each of which has the marker.
        tests: The tests, as path::name.
    """

    marker: str
    functions: tuple[str, ...]
    tests: tuple[str, ...]


def rows(text: str) -> list[Row]:
    """Return the rows of all tables.

    A cell may name several functions or tests, each in backquotes.
    """
    quoted = re.compile(r"`([^`]+)`")
    return [
        Row(marker, tuple(quoted.findall(functions)), tuple(quoted.findall(tests)))
        for marker, functions, tests in _ROW.findall(text)
    ]


def is_of_deleted_app(place: str, root: Path = ROOT) -> bool:
    """Return whether an application was deleted from the project, and so this place.

    Args:
        place: A file, a test, or the dotted path of a function.
        root: The root of the project.
    """
    app = _OF_APP.match(place)
    if app is None:
        return False
    return not (root / "src" / "fednotes" / "apps" / app[1] / "__init__.py").is_file()


def without_deleted_apps(table: Sequence[Row], root: Path = ROOT) -> list[Row]:
    """Return the rows without functions and tests of applications that were deleted.

    Rows that are left without a function or without a test are left out.

    Args:
        table: The rows of docs/papers.md.
        root: The root of the project.
    """
    current = []
    for row in table:
        functions = [f for f in row.functions if not is_of_deleted_app(f, root)]
        tests = [test for test in row.tests if not is_of_deleted_app(test, root)]
        is_whole = len(functions) == len(row.functions) and len(tests) == len(row.tests)
        if is_whole or (functions and tests):
            current.append(Row(row.marker, tuple(functions), tuple(tests)))
    return current


@cache
def markers(
    source: str, pattern: re.Pattern[str] = MARKER
) -> tuple[tuple[str, int], ...]:
    """Return every marker in a comment, with its line.

    Args:
        source: The text of a Python file.
        pattern: What a marker looks like.
    """
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return tuple(
        (marker, token.start[0])
        for token in tokens
        if token.type == tokenize.COMMENT
        for marker in pattern.findall(token.string)
    )


def source_of(dotted: str, root: Path = ROOT) -> tuple[Path, list[str]] | None:
    """Return the file of a dotted path, and the names within the file.

    For example, a.b.C.f gives src/a/b.py and ["C", "f"].
    """
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        path = root.joinpath("src", *parts[:cut]).with_suffix(".py")
        if path.is_file():
            return path, parts[cut:]
    return None


@cache
def parsed(source: str) -> ast.Module:
    """Return the syntax tree of a source. It is shared, so do not change it."""
    return ast.parse(source)


def definition(path: Path, names: list[str]) -> ast.AST | None:
    """Return a class or function by its names from outside in; None if there is none."""
    node: ast.AST | None = parsed(path.read_text("utf-8"))
    for name in names:
        node = next(
            (
                child
                for child in getattr(node, "body", [])
                if isinstance(child, ast.FunctionDef | ast.ClassDef)
                and child.name == name
            ),
            None,
        )
    return node


def lines_of(function: str, root: Path = ROOT) -> tuple[Path, range] | None:
    """Return the file and the lines of a function or class; None if there is none.

    Args:
        function: The dotted path, as docs/papers.md names it.
        root: The root of the project.
    """
    source = source_of(function, root)
    if source is None:
        return None
    node = definition(*source)
    if not isinstance(node, ast.FunctionDef | ast.ClassDef):
        return None
    return source[0], range(node.lineno, (node.end_lineno or node.lineno) + 1)


def find_markers_outside(table: Sequence[Row], root: Path = ROOT) -> list[str]:
    """Return the markers that are in none of the functions that their row names.

    `tools/mutate.py` changes no such line. Markers without a row are not returned.

    Args:
        table: The rows of docs/papers.md.
        root: The root of the project.

    Returns:
        "file:line: marker" of each.
    """
    places: dict[str, list[tuple[Path, range]]] = {row.marker: [] for row in table}
    for row in table:
        for function in row.functions:
            place = lines_of(function, root)
            if place is not None:
                places[row.marker].append(place)

    outside: list[str] = []
    for path in sorted((root / "src").rglob("*.py")):
        for marker, line in markers(path.read_text("utf-8")):
            is_inside = any(
                path == file and line in lines for file, lines in places.get(marker, ())
            )
            if marker in places and not is_inside:
                outside.append(f"{path.relative_to(root)}:{line}: {marker}")
    return outside
