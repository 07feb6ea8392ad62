"""docs/papers.md read: its rows, and the comments of the source that they name."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "papers.md"
PAPERS = "fedner|tagsets|bert|phenotype|robust|abadi|canonne|mironov|kairouz|audit"
MARKER = re.compile(rf"\[(?:{PAPERS}) [a-z0-9][a-z0-9 .-]*\]")
_ROW = re.compile(r"^\|\s*`(\[[^`]+\])`\s*\|\s*(.+?)\s*\|\s*(.+?)\s*\|$", re.MULTILINE)


class Row(NamedTuple):
    """One line of a table in docs/papers.md."""

    marker: str
    functions: tuple[str, ...]  # dotted paths; each carries the marker
    tests: tuple[str, ...]  # path::name


def rows(text: str) -> list[Row]:
    """The tables' lines; a cell may name several functions or tests, each in
    backquotes."""
    quoted = re.compile(r"`([^`]+)`")
    return [
        Row(marker, tuple(quoted.findall(functions)), tuple(quoted.findall(tests)))
        for marker, functions, tests in _ROW.findall(text)
    ]


@cache
def markers(source: str) -> tuple[tuple[str, int], ...]:
    """Every marker in a comment, with its line."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return tuple(
        (marker, token.start[0])
        for token in tokens
        if token.type == tokenize.COMMENT
        for marker in MARKER.findall(token.string)
    )


def source_of(dotted: str, root: Path = ROOT) -> tuple[Path, list[str]] | None:
    """a.b.C.f → (src/a/b.py, [C, f]), by the longest path that is a file."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        path = root.joinpath("src", *parts[:cut]).with_suffix(".py")
        if path.is_file():
            return path, parts[cut:]
    return None


@cache
def parsed(source: str) -> ast.Module:
    """The tree of a file, which nobody changes."""
    return ast.parse(source)


def definition(path: Path, names: list[str]) -> ast.AST | None:
    """The class or function that `names` leads to, from outside in."""
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
