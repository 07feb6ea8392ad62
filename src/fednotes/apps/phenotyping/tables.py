"""Read the tables of a hospital, one row per line, and report damaged rows.

Cells are separated by commas, tabs or semicolons, as the header shows; .gz files are
unpacked. None of these tables has a cell over several lines, so a damaged row (wrong
number of columns, no patient, no text, a quote that is not closed) harms no row after
it: the row is left out, counted, and named by its line. No message contains what a cell
contains, and of the header only the name of a column that was meant.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from fednotes.core.errors import DataError, nearest
from fednotes.data.encodings import named_encoding
from fednotes.data.formats.files import (
    READ_ERRORS,
    encoding_for,
    incomplete_file,
    open_bytes,
    open_text,
)

EXAMPLES: Final = 10  # damaged rows that a report names
PATIENT_COLUMNS: Final = (
    "patient",
    "patient_id",
    "patientid",
    "subject_id",
    "person_id",
    "pat_id",
)
# If so many rows are all damaged, the rest of the file is not read.
_FIRST_ROWS: Final = 100
_LONGEST_LINE: Final = 1 << 20  # bytes; a longer line is not a row
T = TypeVar("T")


# ---- reports -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Damaged:
    """A row that was left out: its line, counted from 1, and the reason."""

    line: int
    reason: str


class Row(NamedTuple):
    """A row of a table: its line, counted from 1, and its cells."""

    line: int
    cells: list[str]


@dataclass
class TableReport:
    """What became of the rows of a table.

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

    def sound(self, rows: Iterable[T | Damaged]) -> Iterator[T]:
        """Yield the rows that are not damaged, and count all rows."""
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
        """Raise DataError if more than half of so many rows are damaged.

        The file is another table then.
        """
        if 2 * self.damaged <= rows:
            return
        first = self.examples[0]
        raise DataError.at(
            self.path,
            first.line,
            f"{first.reason}; {self.damaged} of {rows} rows are damaged: is this the "
            "right table?",
        )

    def messages(self) -> tuple[str, ...]:
        """Return a message about each damaged row; of many, only of the first ones."""
        messages = [f"{self.path}:{row.line}: {row.reason}" for row in self.examples]
        more = self.damaged - len(messages)
        if more:
            messages.append(f"{self.path}: {more} more damaged rows")
        return tuple(messages)


# ---- lines and cells -----------------------------------------------------------------


def read_lines(path: Path) -> Iterator[tuple[int, str | None]]:
    """Yield the lines of a file with their numbers, without line ends.

    A line is None if it is not in the file's encoding, or too long. The encoding is
    that of the byte-order mark, else UTF-8 or the one that the user named
    (`encodings.reading_as`). A byte that is not UTF-8 harms no other line.

    Raises:
        DataError: The file is missing, truncated or no text.
    """
    codec, mark = encoding_for(path, named_encoding())
    pieces = _pieces_of_utf8(path, mark) if codec == "utf-8" else _pieces_of_text(path)
    number = 0
    is_inside = False  # within a line that is too long
    for text, ends_line in pieces:
        if not is_inside:
            number += 1
            if text is None or not ends_line:
                yield number, None
            else:
                yield number, text.rstrip("\r\n")
        is_inside = not ends_line


def _pieces_of_utf8(path: Path, mark: int) -> Iterator[tuple[str | None, bool]]:
    """Yield a UTF-8 file in lines, and in pieces of lines that are too long.

    Args:
        path: The file.
        mark: Bytes of the byte-order mark.

    Yields:
        The piece, or None if it is not UTF-8; and whether it ends a line.
    """
    with open_bytes(path) as file:
        try:
            file.read(mark)
            while data := file.readline(_LONGEST_LINE):
                ends_line = len(data) < _LONGEST_LINE or data.endswith(b"\n")
                yield _decode(data) if ends_line else None, ends_line
        except READ_ERRORS as error:
            raise incomplete_file(path, error) from None


def _pieces_of_text(path: Path) -> Iterator[tuple[str | None, bool]]:
    """Yield a file in another encoding as `_pieces_of_utf8` does."""
    with open_text(path, named_encoding(), errors="replace") as file:
        while line := file.readline(_LONGEST_LINE):
            ends_line = len(line) < _LONGEST_LINE or line.endswith("\n")
            yield None if "\ufffd" in line else line, ends_line


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
) -> Iterator[Row | Damaged]:
    """Yield the rows of a table, without empty lines.

    Args:
        lines: Numbered lines, as `read_lines` yields them.
        width: Number of cells in a row.
        delimiter: What separates cells.
        has_quotes: Whether a cell may stand in quotes.
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
            cells = cells_of(line, delimiter) if is_quoted else line.split(delimiter)
        except csv.Error:
            yield Damaged(number, "a closing quote is missing")
            continue
        if len(cells) == width:
            yield Row(number, cells)
        else:
            yield Damaged(number, f"{len(cells)} columns instead of {width}")


def cells_of(line: str, delimiter: str) -> list[str]:
    """Return the cells of one line.

    Raises:
        csv.Error: A quote is not closed.
    """
    return next(csv.reader([line], delimiter=delimiter, strict=True))


# ---- tables with a header ------------------------------------------------------------


class Table:
    """A table with a header.

    Args:
        path: The file.
        what: What the table contains, as messages call it.

    Attributes:
        path: The file.
        line: Line of the header.
        titles: The columns' titles as they are written.
        names: The same to compare with: "Patient ID" is "patient_id".

    Raises:
        DataError: The file is a folder, or has no header.
    """

    def __init__(self, path: Path, what: str = "codes") -> None:
        if path.is_dir():
            raise DataError(f"{path} is a folder: name the table of {what} in it")
        self.path = path
        self._lines = read_lines(path)
        self.line, header = next(self._lines, (1, ""))
        if header is None or not header.strip():
            raise self.error("the table has no header: expected the columns' names")
        self._delimiter = max(",\t;", key=header.count)
        try:
            titles = next(csv.reader([header], delimiter=self._delimiter))
        except csv.Error as error:
            raise self.error(f"the columns' names cannot be read ({error})") from error
        self.titles = tuple(title.strip() for title in titles)
        self.names = tuple(map(_plain_name, self.titles))

    def has(self, *columns: str) -> bool:
        """Return whether there is a column of one of these names."""
        return any(_plain_name(column) in self.names for column in columns if column)

    def column(self, name: str, usual: Sequence[str] = (), parameter: str = "") -> int:
        """Return the index of a column.

        Args:
            name: Name of the column. If it is empty, the only column with one of the
                usual names is meant.
            usual: The usual names, in their plain form.
            parameter: The parameter that names the column, for messages.

        Raises:
            DataError: No column has the name, or two columns could be meant.
        """
        wanted = [_plain_name(name)] if name else usual
        candidates = [at for at, other in enumerate(self.names) if other in wanted]
        if len(candidates) == 1:
            return candidates[0]
        can_be_named = bool(parameter) and not name
        if not candidates:
            raise self._no_column(
                name or usual[0], f" ({parameter} = names it)" if can_be_named else ""
            )
        first, second = candidates[:2]
        remedy = f"name one with {parameter} =" if can_be_named else "rename one"
        raise self.error(
            f"columns {first + 1} and {second + 1}, {self.titles[first]!r} and "
            f"{self.titles[second]!r}, could both be meant: {remedy}"
        )

    def _no_column(self, name: str, remedy: str) -> DataError:
        """Return the error for a missing column."""
        # The first line of a table without a header is a row, which no message shows.
        otherwise = (
            f"the first line has {len(self.names)} columns, none with a similar name"
        )
        hint = nearest(_plain_name(name), self.names, otherwise)
        return self.error(f"there is no column {name!r}: {hint}{remedy}")

    def rows(self) -> Iterator[Row | Damaged]:
        """Yield the rows after the header. They can be read only once."""
        return split_lines(self._lines, len(self.names), self._delimiter)

    def error(self, message: str) -> DataError:
        """Return an error in the header."""
        return DataError.at(self.path, self.line, message)


def _plain_name(title: str) -> str:
    """Return a title in lower case, with underscores for blanks and hyphens."""
    return "_".join(title.lower().replace("-", " ").split())
