"""Rows of a site's tables, a line each, and what was damaged in them.

Comma, tab or semicolon, as the header tells; .gz is unpacked. A row is a line: none of these
tables has a field over several lines, so a damaged row harms no row after it. What a cell holds
is in no message, and no more of the header than a column that was meant.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fednotes.core.errors import DataError, nearest
from fednotes.data.notes.records import BROKEN, broken, open_bytes

EXAMPLES: Final = 10  # damaged rows that a report names
PATIENT_COLUMNS: Final = ("patient", "patient_id", "patientid", "subject_id", "person_id", "pat_id")
_LONGEST = 1 << 20  # bytes of a row; more is no row


@dataclass(frozen=True, slots=True)
class Damaged:
    """A row that was left out: its line, counted from 1, and why."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class TableReport:
    """What became of a table's rows: kept, empty (nothing given) and damaged ones are all.

    unknown: kept rows whose code the dictionary beside the table (D_ICD_DIAGNOSES and
    D_ICD_PROCEDURES) does not know, for example because a spreadsheet ate a leading zero; None
    without a dictionary. examples: the first damaged rows.
    """

    path: str
    rows: int
    kept: int
    empty: int
    damaged: int
    examples: tuple[Damaged, ...]
    unknown: int | None = None

    def lines(self) -> tuple[str, ...]:
        """The damaged rows, a line each, as in an error message."""
        named = tuple(f"{self.path}:{d.line}: {d.reason}" for d in self.examples)
        more = self.damaged - len(named)
        return (*named, f"{self.path}: {more} more damaged rows") if more else named


def mostly_sound(path: Path, total: int, damaged: int, examples: Sequence[Damaged]) -> None:
    """Raises DataError where more than half of the rows are damaged: it is another table."""
    if 2 * damaged > total:
        first = examples[0]
        message = f"{first.reason}; so are {damaged} of {total} rows: is this the right table?"
        raise DataError.at(path, first.line, message)


Lines = Iterator[tuple[int, str | None]]
Row = tuple[int, list[str]] | Damaged  # line and cells


@dataclass(frozen=True, slots=True)
class Header:
    """A table's first line: titles as they stand, names to compare, what parts them, its line."""

    titles: tuple[str, ...]
    names: tuple[str, ...]
    delimiter: str
    line: int

    def has(self, *columns: str) -> bool:
        """Whether there is a column of one of these names."""
        return any(plain(column) in self.names for column in columns if column)


def plain(title: str) -> str:
    """A column's name as names are compared: "Patient ID" is patient_id."""
    return "_".join(title.lower().replace("-", " ").split())


def open_table(path: Path) -> tuple[Header, Lines]:
    """A table's header, and its lines after it. Raises DataError where there is none."""
    given = lines(path)
    number, first = next(given, (1, ""))
    if first is None or not first.strip():
        raise DataError.at(path, number, "the table has no header: expected the columns' names")
    delimiter = max(",\t;", key=first.count)
    titles = tuple(name.strip() for name in next(csv.reader([first], delimiter=delimiter)))
    return Header(titles, tuple(map(plain, titles)), delimiter, number), given


def find_column(
    path: Path, header: Header, given: str, usual: Sequence[str] = (), key: str = ""
) -> int:
    """Where a column is: the one of the `given` name, else the only one of the usual names.

    key: the setting that names the column, for a message. Raises DataError for a column that
    is missing, or that two could be.
    """
    wanted = [plain(given)] if given else usual
    found = [at for at, name in enumerate(header.names) if name in wanted]
    if not found:
        shown = given or usual[0]
        hint = nearest(plain(shown), header.names)
        if not hint.startswith("did"):  # the first line of a table without a header is a row
            hint = f"the first line names {len(header.names)} columns, none like it"
        remedy = f" ({key} = names it)" if key and not given else ""
        raise DataError.at(path, header.line, f"there is no column {shown!r}: {hint}{remedy}")
    if len(found) > 1:
        both = " and ".join(repr(header.titles[at]) for at in found[:2])
        remedy = f": name one with {key} =" if key and not given else ": rename one"
        message = f"columns {found[0] + 1} and {found[1] + 1}, {both}, could both be meant{remedy}"
        raise DataError.at(path, header.line, message)
    return found[0]


def rows(lines: Iterable[tuple[int, str | None]], width: int, delimiter: str) -> Iterator[Row]:
    """Each line's cells, `width` of them; empty lines are passed over."""
    for number, line in lines:
        if line is None:
            yield Damaged(number, "a byte is not UTF-8, or the row is too long")
            continue
        if not line.strip():
            continue
        if '"' not in line:
            row = line.split(delimiter)
        else:
            try:
                row = next(csv.reader([line], delimiter=delimiter, strict=True))
            except csv.Error:
                yield Damaged(number, "a quote is not closed")
                continue
        if len(row) != width:
            yield Damaged(number, f"{len(row)} columns instead of {width}")
            continue
        yield number, row


def lines(path: Path) -> Lines:
    """Numbered lines without their ends; None for one that is no text or too long for a row."""
    with open_bytes(path) as file:
        number, inside = 0, False  # inside: within a line that is too long
        while True:
            try:
                data = file.readline(_LONGEST)
            except BROKEN as error:
                raise broken(path, error) from None
            if not data:
                return
            goes_on = len(data) == _LONGEST and not data.endswith(b"\n")
            if not inside:
                number += 1
                yield number, None if goes_on else _decoded(data, number)
            inside = goes_on


def _decoded(data: bytes, number: int) -> str | None:
    try:
        return data.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError:
        return None
