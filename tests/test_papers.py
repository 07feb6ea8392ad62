"""docs/papers.md, the markers in the source and the tests agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from papers import (
    FORM,
    LIKE_A_MARKER,
    MARKER,
    PAGE,
    ROOT,
    Row,
    definition,
    find_markers_outside,
    lines_of,
    markers,
    rows,
    source_of,
    without_deleted_apps,
)

TEXT = PAGE.read_text("utf-8")
ROWS = rows(TEXT)
CURRENT = without_deleted_apps(ROWS)
each_row = pytest.mark.parametrize("row", CURRENT, ids=[row.marker for row in CURRENT])


def test_every_marker_in_the_page_is_in_a_table() -> None:
    """So that a misspelt table line is not taken for prose."""
    in_lines = re.findall(rf"^\|.*?({MARKER.pattern})", TEXT, re.MULTILINE)
    listed = [row.marker for row in ROWS]
    assert in_lines
    misspelt = [marker for marker in in_lines if marker not in listed]
    assert not misspelt, (
        f"docs/papers.md: the lines of {misspelt} are no rows; a row has the form {FORM}"
    )
    assert listed == in_lines


def test_no_marker_is_listed_twice() -> None:
    listed = [row.marker for row in ROWS]
    assert len(listed) == len(set(listed))


@each_row
def test_functions_carry_their_marker(row: Row) -> None:
    assert row.functions, f"docs/papers.md: {row.marker} names no function"
    for function in row.functions:
        source = source_of(function)
        assert source, f"docs/papers.md: {row.marker}: no file in src holds {function}"
        path, names = source
        assert names, (
            f"docs/papers.md: {row.marker}: {function} is a module, not a function"
        )
        place = lines_of(function)
        assert place, (
            f"docs/papers.md: {row.marker}: {'.'.join(names)} is not in {path.name}"
        )
        _, lines = place
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
        for pattern in (MARKER, LIKE_A_MARKER)
        for marker, line in markers(path.read_text("utf-8"), pattern)
        if marker not in listed
    ]
    assert not missing, (
        f"docs/papers.md has no row for {missing}: add one of the form {FORM}"
    )


def test_every_marker_is_in_a_function_of_its_row() -> None:
    """`make mutate` changes a marked line only there."""
    outside = find_markers_outside(CURRENT)
    assert not outside, (
        f"not in a function that docs/papers.md names for the marker: {outside}"
    )


def test_a_marker_outside_the_functions_of_its_row_is_detected(tmp_path: Path) -> None:
    """Line 4 is in the function, lines 1, 8 and 12 are not; line 13 has no row."""
    lines = (
        "x = 1  # [fedner eq 2]",
        "",
        "def mean(total, weight):",
        "    return total / weight  # [fedner eq 2]",
        "",
        "class Server:",
        "    def mean(self, total):",
        "        return total  # [fedner eq 2]",
        "",
        "    def step(self, total):",
        "        # [fedner eq 3]",
        "        total = total + 1  # [fedner eq 2]",
        "        return total  # [fedner eq 9]",
    )
    source = tmp_path / "src" / "fednotes" / "toy.py"
    source.parent.mkdir(parents=True)
    source.write_text("\n".join(lines), "utf-8")
    table = [
        Row("[fedner eq 2]", ("fednotes.toy.mean",), ("tests/test_toy.py::test_mean",)),
        Row(
            "[fedner eq 3]",
            ("fednotes.toy.Server.step",),
            ("tests/test_toy.py::test_step",),
        ),
    ]
    problems = find_markers_outside(table, tmp_path)
    assert problems == [
        f"{Path('src/fednotes/toy.py')}:{line}: [fedner eq 2]" for line in (1, 8, 12)
    ]


def test_rows_of_a_deleted_application_are_left_out(tmp_path: Path) -> None:
    """Of "here", a row stays; of "gone", its functions and its tests go."""
    present_app = tmp_path / "src" / "fednotes" / "apps" / "here"
    present_app.mkdir(parents=True)
    (present_app / "__init__.py").touch()
    (present_app.parent / "gone" / "__pycache__").mkdir(parents=True)
    core, test = "fednotes.toy.mean", "tests/test_toy.py::test_mean"
    apps = "fednotes.apps"
    deleted, test_gone = f"{apps}.gone.f", "tests/apps/gone/test_a.py::test_f"
    remaining = Row("[fedner eq 2]", (core,), (test,))
    stays = Row("[fedner eq 3]", (f"{apps}.here.f",), ("tests/apps/here/a::b",))
    table = [
        Row("[fedner eq 2]", (core, deleted), (test, test_gone)),
        stays,
        Row("[fedner eq 4]", (deleted,), (test,)),
        Row("[fedner eq 5]", (core,), (test_gone,)),
    ]
    assert without_deleted_apps(table, tmp_path) == [remaining, stays]


def test_a_marker_of_a_paper_without_rows_is_detected() -> None:
    """Line 2 names an equation of a paper that no row has; line 1 is the shape of a
    tensor."""
    source = "x = y  # [batch steps]\nx = 1  # [fedprox eq 2]\n"
    assert markers(source) == ()
    assert markers(source, LIKE_A_MARKER) == (("[fedprox eq 2]", 2),)


def test_markers_are_read_from_comments_only() -> None:
    """By hand: line 2 holds two markers; the string and the tensor shape hold none."""
    source = (
        'text = "[fedner eq 9]"\n'
        "x = 1  # mean [fedner eq 2], and [tagsets eq 11]\n"
        "# [fedner, eq 2] (tags, tags) [from to]\n"
    )
    assert markers(source) == (("[fedner eq 2]", 2), ("[tagsets eq 11]", 2))
