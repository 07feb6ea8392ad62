"""docs/papers.md, the source's markers and the tests agree."""

from __future__ import annotations

import ast
import re

import pytest
from papers import MARKER, PAGE, ROOT, Row, definition, markers, rows, source_of

TEXT = PAGE.read_text("utf-8")
ROWS = rows(TEXT)
each_row = pytest.mark.parametrize("row", ROWS, ids=[row.marker for row in ROWS])


def test_every_marker_in_the_page_is_in_a_table() -> None:
    """So that a misspelt table line is not taken for prose."""
    in_lines = re.findall(rf"^\|.*?({MARKER.pattern})", TEXT, re.MULTILINE)
    assert in_lines
    assert [row.marker for row in ROWS] == in_lines


def test_no_marker_is_listed_twice() -> None:
    listed = [row.marker for row in ROWS]
    assert len(listed) == len(set(listed))


@each_row
def test_functions_carry_their_marker(row: Row) -> None:
    assert row.functions, f"docs/papers.md: {row.marker} names no function"
    for function in row.functions:
        found = source_of(function)
        assert found, f"docs/papers.md: {row.marker}: no file in src holds {function}"
        path, names = found
        node = definition(path, names)
        assert names, (
            f"docs/papers.md: {row.marker}: {function} is a module, not a function"
        )
        assert node, (
            f"docs/papers.md: {row.marker}: {'.'.join(names)} is not in {path.name}"
        )
        assert isinstance(node, ast.FunctionDef | ast.ClassDef)
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        inside = [m for m, line in markers(path.read_text("utf-8")) if line in lines]
        assert row.marker in inside, (
            f"{function} has no comment `# {row.marker}`: put it at the line that computes it"
        )


@each_row
def test_named_tests_exist(row: Row) -> None:
    assert row.tests, f"docs/papers.md: {row.marker} names no test"
    for test in row.tests:
        file, *names = test.split("::")
        path = ROOT / file
        assert path.is_file(), f"docs/papers.md: {row.marker}: no file {file}"
        assert names, f"docs/papers.md: {row.marker}: {test} names a file, not a test"
        assert names[-1].startswith("test_"), (
            f"docs/papers.md: {row.marker}: {test} is not a test"
        )
        assert definition(path, names), (
            f"docs/papers.md: {row.marker}: no {names[-1]} in {file}"
        )


def test_every_marker_in_the_source_is_in_the_page() -> None:
    listed = {row.marker for row in ROWS}
    missing = [
        f"{path.relative_to(ROOT)}:{line}: {marker}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for marker, line in markers(path.read_text("utf-8"))
        if marker not in listed
    ]
    assert not missing, f"not in docs/papers.md: {missing}"


def test_markers_are_read_from_comments_only() -> None:
    """By hand: line 2 holds two markers; the string and the tensor shape hold none."""
    source = (
        'text = "[fedner eq 9]"\n'
        "x = 1  # mean [fedner eq 2], and [tagsets eq 11]\n"
        "# [fedner, eq 2] (tags, tags) [from to]\n"
    )
    assert markers(source) == (("[fedner eq 2]", 2), ("[tagsets eq 11]", 2))
