"""Read the tables of a hospital, one row per line, and report damaged rows.

Cells are separated by commas, tabs or semicolons, as the header shows; .gz files are
decompressed. None of these tables has cells that span several lines, so a damaged row
(wrong number of columns, no patient, no text, an unclosed quote) does not affect later
rows: it is left out, counted, and reported with its line. No message quotes a cell, and
messages quote from the header only the name of a requested column.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from fednotes.core.errors import DataError, suggest_name
from fednotes.data.encodings import get_user_encoding
from fednotes.data.formats.files import (
    READ_ERRORS,
    find_encoding,
    make_incomplete_error,
    open_bytes,
    open_text,
)

EXAMPLES: Final = 10  # maximum number of damaged rows that a report names
PATIENT_COLUMNS: Final = (
    "patient",
    "patient_id",
    "patientid",
    "subject_id",
    "person_id",
    "pat_id",
)
# If this many first rows are all damaged, reading stops.
_FIRST_ROWS: Final = 100
_LONGEST_LINE: Final = 1 << 20  # bytes; longer lines are not rows
T = TypeVar("T")


# ---- reports -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Damaged:
    """A row that is left out: its line, counted from 1, and the reason."""

    line: int
    reason: str


class NumberedRow(NamedTuple):
    """A row of a table: its line, counted from 1, and its cells."""

    line: int
    cells: list[str]


@dataclass
class TableReport:
    """Counts of the used and unused rows of a table.

    Attributes:
        path: The table.
        rows: Number of all rows.
        kept: Number of rows that were used.
        empty: Number of rows without a value.
        damaged: Number of rows that were left out.
        unknown: Number of kept rows whose code is missing in the dictionary beside the
            table (D_ICD_DIAGNOSES and D_ICD_PROCEDURES), for example because a
            spreadsheet removed a leading zero.
        examples: The first damaged rows.
    """

    path: Path
    rows: int = 0
    kept: int = 0
    empty: int = 0
    damaged: int = 0
    unknown: int = 0
    examples: list[Damaged] = field(default_factory=list)

    def select_sound(self, rows: Iterable[T | Damaged]) -> Iterator[T]:
        """Yield the undamaged rows, and count all rows."""
        for row in rows:
            self.rows += 1
            if isinstance(row, Damaged):
                self.add_damaged(row)
            else:
                yield row

    def add_damaged(self, row: Damaged) -> None:
        """Count a row that is left out.

        Raises:
            DataError: All of the first hundred rows are damaged.
        """
        self.damaged += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(row)
        if self.damaged == self.rows == _FIRST_ROWS:
            self.require_sound(self.rows)

    def require_sound(self, rows: int) -> None:
        """Raise DataError if more than half of the rows are damaged.

        Such a file is probably a different table.
        """
        if 2 * self.damaged <= rows:
            return
        first = self.examples[0]
        raise DataError.at(
            self.path,
            first.line,
            f"{first.reason}; {self.damaged} of {rows} rows are damaged: check that "
            "this is the right table",
        )

    def list_messages(self) -> tuple[str, ...]:
        """Return messages about damaged rows, at most about the first few."""
        messages = [f"{self.path}:{row.line}: {row.reason}" for row in self.examples]
        more = self.damaged - len(messages)
        if more:
            messages.append(f"{self.path}: {more} more damaged rows")
        return tuple(messages)


# ---- lines and cells -----------------------------------------------------------------


def read_numbered_lines(path: Path) -> Iterator[tuple[int, str | None]]:
    """Yield the lines of a file with their numbers, without line ends.

    A line is None if it is not in the file's encoding, or too long. The encoding is
    that of the byte-order mark, otherwise UTF-8 or the one named by the user
    (`encodings.reading_as`). An invalid byte affects only its own line.

    Raises:
        DataError: The file is missing, truncated or not text.
    """
    codec, mark = find_encoding(path, get_user_encoding())
    pieces = (
        _read_utf8_pieces(path, mark) if codec == "utf-8" else _read_text_pieces(path)
    )
    number = 0
    is_inside = False  # whether the position is within a line that is too long
    for text, ends_line in pieces:
        if not is_inside:
            number += 1
            yield number, None if text is None else text.rstrip("\r\n")
        is_inside = not ends_line


def _read_utf8_pieces(path: Path, mark: int) -> Iterator[tuple[str | None, bool]]:
    """Yield (text, ends_line) for each piece of a UTF-8 file.

    A line of up to `_LONGEST_LINE` bytes is one piece. A longer line is no row of a
    table: it comes in several pieces, so that it is never in memory as a whole, and the
    caller uses none of them.

    Args:
        path: The file.
        mark: Length of the byte-order mark in bytes.

    Yields:
        The text, None if it is not UTF-8 or if the line goes on after the piece; and
        whether the piece ends a line.
    """
    with open_bytes(path) as file:
        try:
            file.read(mark)
            while data := file.readline(_LONGEST_LINE):
                ends_line = len(data) < _LONGEST_LINE or data.endswith(b"\n")
                text = _decode(data) if ends_line else None
                yield text, ends_line
        except READ_ERRORS as error:
            raise make_incomplete_error(path, error) from None


def _read_text_pieces(path: Path) -> Iterator[tuple[str | None, bool]]:
    """Yield a file in another encoding as `_read_utf8_pieces` does."""
    with open_text(path, get_user_encoding(), errors="replace") as file:
        while line := file.readline(_LONGEST_LINE):
            ends_line = len(line) < _LONGEST_LINE or line.endswith("\n")
            is_whole = ends_line and "\ufffd" not in line
            yield line if is_whole else None, ends_line


def _decode(data: bytes) -> str | None:
    """Return bytes as text; None if they are not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def split_lines(
    lines: Iterable[tuple[int, str | None]],
    width: int,
    delimiter: str,
    *,
    has_quotes: bool = True,
) -> Iterator[NumberedRow | Damaged]:
    """Yield the rows of a table, without empty lines.

    Args:
        lines: Numbered lines, as `read_numbered_lines` yields them.
        width: Number of cells in a row.
        delimiter: The character between cells.
        has_quotes: Whether a cell may be quoted.
    """
    for number, line in lines:
        if line is None:
            yield Damaged(
                number,
                "a byte is not valid in the file's encoding, or the row is too long",
            )
            continue
        if not line.strip():
            continue
        try:
            is_quoted = has_quotes and '"' in line
            cells = split_cells(line, delimiter) if is_quoted else line.split(delimiter)
        except csv.Error:
            yield Damaged(number, "a closing quote is missing")
            continue
        if len(cells) == width:
            yield NumberedRow(number, cells)
        else:
            yield Damaged(number, f"{len(cells)} columns instead of {width}")


def split_cells(line: str, delimiter: str) -> list[str]:
    """Return the cells of one line.

    Raises:
        csv.Error: A quote is not closed.
    """
    return next(csv.reader([line], delimiter=delimiter, strict=True))


# ---- tables with a header ------------------------------------------------------------


class HeaderTable:
    """A table with a header, whose rows are read one by one.

    Args:
        path: The file.
        what: Content of the table, for messages.

    Attributes:
        path: The file.
        line: Line of the header.
        titles: The columns' titles as written.
        names: The normalised titles: "Patient ID" becomes "patient_id".

    Raises:
        DataError: The file is a folder, or has no header.
    """

    def __init__(self, path: Path, what: str = "codes") -> None:
        if path.is_dir():
            raise DataError(f"{path} is a folder: give the table of {what} in it")
        self.path = path
        self._lines = read_numbered_lines(path)
        self.line, header = next(self._lines, (1, ""))
        if header is None or not header.strip():
            raise self.make_error(
                "the table has no header: expected the columns' names"
            )
        self._delimiter = max(",\t;", key=header.count)
        try:
            titles = next(csv.reader([header], delimiter=self._delimiter))
        except csv.Error as error:
            raise self.make_error(
                f"the columns' names cannot be read ({error})"
            ) from error
        self.titles = tuple(title.strip() for title in titles)
        self.names = tuple(map(_normalise_name, self.titles))

    def has_column(self, *names: str) -> bool:
        """Return whether there is a column with one of these names."""
        return any(_normalise_name(name) in self.names for name in names if name)

    def find_column(
        self, name: str, usual: Sequence[str] = (), parameter: str = ""
    ) -> int:
        """Return the index of a column.

        Args:
            name: Name of the column. If empty, the only column with a usual name is
                returned.
            usual: The usual names, normalised.
            parameter: The parameter that names the column, for messages.

        Raises:
            DataError: No column has the name, or it is ambiguous.
        """
        accepted_names = [_normalise_name(name)] if name else usual
        matches = [
            index for index, title in enumerate(self.names) if title in accepted_names
        ]
        if len(matches) == 1:
            return matches[0]

        # The parameter is a remedy only for a user who has not set it yet.
        can_set_parameter = bool(parameter) and not name
        if not matches:
            hint = f" ({parameter} = names it)" if can_set_parameter else ""
            raise self._make_column_error(name or usual[0], hint)
        remedy = f"choose one with {parameter} =" if can_set_parameter else "rename one"
        first, second = matches[:2]
        raise self.make_error(
            f"columns {first + 1} ({self.titles[first]!r}) and {second + 1} "
            f"({self.titles[second]!r}) both match: {remedy}"
        )

    def _make_column_error(self, name: str, remedy: str) -> DataError:
        """Return the error for a missing column.

        Args:
            name: Name of the column.
            remedy: The end of the message; may be empty.
        """
        # The first line of a table without a header is a row, which messages must not
        # show.
        otherwise = (
            f"the first line has {len(self.names)} columns, none with a similar name"
        )
        hint = suggest_name(_normalise_name(name), self.names, otherwise)
        return self.make_error(f"there is no column {name!r}: {hint}{remedy}")

    def read_rows(self) -> Iterator[NumberedRow | Damaged]:
        """Yield the rows after the header. They can be read only once."""
        return split_lines(self._lines, len(self.names), self._delimiter)

    def make_error(self, message: str) -> DataError:
        """Return an error that points to the table's header."""
        return DataError.at(self.path, self.line, message)


def _normalise_name(title: str) -> str:
    """Return a title in lower case, with underscores for spaces and hyphens."""
    return "_".join(title.lower().replace("-", " ").split())
