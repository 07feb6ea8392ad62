"""Reading of delimited text, with the number of each row's first line."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path

from fednotes.core import bounds
from fednotes.core.errors import DataError


def read_csv_rows(
    lines: Iterable[str], path: Path, first: int = 1, delimiter: str = ","
) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows that are not empty, each with the number of its first line.

    Args:
        lines: The lines, with their line endings.
        path: The file, for messages.
        first: The number of the first line.
        delimiter: The separator of the columns.

    Raises:
        DataError: A row cannot be read, and therefore none after it.
    """
    # The default of 131,072 characters is too small for the summary of a long stay.
    csv.field_size_limit(max(bounds.LINE, csv.field_size_limit()))
    bounded = _BoundedRows(lines, path, first)
    reader = csv.reader(bounded, delimiter=delimiter, strict=True)
    line = first
    try:
        for row in reader:
            if row:
                yield line, row
            line = first + reader.line_num
            bounded.begin_row(line)
    except csv.Error as error:
        raise DataError.at(path, line, _explain_error(error)) from None


def _explain_error(error: csv.Error) -> str:
    """Return the message for an error of Python's csv module."""
    if "field larger" in str(error):
        return (
            f"a field has more than {bounds.LINE:,} characters: check whether a "
            "closing quote is missing"
        )
    if "unexpected end" in str(error):
        return (
            "the file ends inside a quoted field that begins in this row: check that "
            "the file is complete"
        )
    return f"the row is not valid CSV ({error})"


class _BoundedRows(Iterator[str]):
    """Lines of a table whose rows have at most `bounds.LINE` characters.

    Args:
        lines: The lines.
        path: The file, for messages.
        first: The number of the first line.
    """

    def __init__(self, lines: Iterable[str], path: Path, first: int) -> None:
        self._lines = iter(lines)
        self._path = path
        self.begin_row(first)

    def begin_row(self, line: int) -> None:
        """Start counting the characters of the row that begins on this line."""
        self._row_line = line
        self._row_length = 0

    def __next__(self) -> str:
        line = next(self._lines)
        self._row_length += len(line)
        if self._row_length > bounds.LINE:
            raise DataError.at(
                self._path,
                self._row_line,
                f"the row has more than {bounds.LINE:,} characters: check whether a "
                "closing quote is missing",
            )
        return line
