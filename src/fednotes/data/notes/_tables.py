"""Reading of notes from tables: CSV, tab-separated text, Parquet and Arrow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fednotes.core.errors import DataError, suggest_name
from fednotes.data.formats import parquet
from fednotes.data.formats.csv_rows import read_csv_rows
from fednotes.data.formats.files import open_text, read_bounded_lines
from fednotes.data.notes._guessing import (
    describe_columns,
    guess_delimiter,
    normalise_header,
)
from fednotes.data.notes._note import Note
from fednotes.data.notes._settings import (
    COMMON_KEYS,
    TABLES,
    ReadSettings,
    remove_suffixes,
)

_FIELDS = ("text", "id", "patient", "visit", "category", "error")
_TRUE = ("1", "1.0", "True", "true")

# The possible columns of each field, the best one first.
Columns = Mapping[str, Sequence[int]]


def read_table(settings: ReadSettings, path: Path) -> Iterator[Note | None]:
    """Yield the notes of a CSV file row by row; None for notes marked as errors."""
    table = TABLES[settings.format]
    with open_text(path, settings.encoding, newline="") as file:
        lines = read_bounded_lines(file, path)
        first_line = next(lines, "")
        header = normalise_header(first_line)
        columns = find_columns(settings, path, header, table)
        rows = read_csv_rows(lines, path, 2, guess_delimiter(first_line))
        for line, row in rows:
            notes: list[Note | None] = []
            with settings.handling_errors("note", path, line):
                if len(row) != len(header):
                    raise DataError(
                        f"the row has {len(row)} columns, but the header has "
                        f"{len(header)}: check that the file is complete and that no "
                        "closing quote is missing"
                    )
                notes.append(_parse_row(settings, row, columns, path, line))
            del row  # so that one text is in memory at a time
            while notes:
                yield notes.pop()


def read_columns(settings: ReadSettings, path: Path) -> Iterator[Note | None]:
    """Yield the notes of a Parquet or Arrow file, read batch by batch."""
    table = TABLES.get(settings.format, COMMON_KEYS)
    names = parquet.list_column_names(path)
    header = [name.strip().lower() for name in names]
    columns = find_columns(settings, path, header, table)
    # Read only the columns that are needed.
    needed = sorted({column for each in columns.values() for column in each})
    place_of = {column: place for place, column in enumerate(needed)}
    places = {
        name: [place_of[column] for column in each] for name, each in columns.items()
    }
    rows = parquet.read_rows(path, [names[column] for column in needed])
    for number, values in enumerate(rows, 1):
        notes: list[Note | None] = []
        with settings.handling_errors("note", path, 0, f"row {number}: "):
            if any(isinstance(value, bytes | list | dict) for value in values):
                raise DataError(
                    "a cell contains bytes, a list or a table: expected text or a "
                    "number"
                )
            row = ["" if value is None else str(value) for value in values]
            notes.append(_parse_row(settings, row, places, path, number))
        while notes:
            yield notes.pop()


def _parse_row(
    settings: ReadSettings,
    row: Sequence[str],
    columns: Columns,
    path: Path,
    number: int,
) -> Note | None:
    """Return the note of a table's row; None if it is marked as an error.

    Args:
        settings: How the file is read.
        row: The values.
        columns: The columns of the fields.
        path: The file.
        number: The number of the row.
    """
    if is_marked_as_error(row, columns):
        return None
    own_id = find_first_filled(row, columns["id"])
    id = own_id or str(number)
    has_unique_ids = TABLES.get(settings.format, COMMON_KEYS).get("own_ids")
    return Note(
        id=id if has_unique_ids else f"{remove_suffixes(path)}:{id}",
        text=settings.finish_text(row[columns["text"][0]]),
        patient=find_first_filled(row, columns["patient"]),
        category=find_first_filled(row, columns["category"]),
        source=settings.source,
        visit=find_first_filled(row, columns["visit"]),
        own_id=own_id,
    )


def is_marked_as_error(row: Sequence[str], columns: Columns) -> bool:
    """Return whether a row says that its note is a mistake."""
    return find_first_filled(row, columns["error"]) in _TRUE


def find_first_filled(row: Sequence[str], columns: Sequence[int]) -> str | None:
    """Return the first value of some columns that is not blank; else None."""
    for column in columns:
        value = row[column].strip()
        if value:
            return value
    return None


def find_columns(
    settings: ReadSettings,
    path: Path | str,
    header: Sequence[str],
    table: Mapping[str, Any],
    *,
    line: int = 1,
) -> dict[str, list[int]]:
    """Return the columns of a note's fields in a table.

    Args:
        settings: How the file is read.
        path: The file or database, for messages.
        header: The names of the columns, in lower case.
        table: The possible column names of each field.
        line: The line of the header, for messages; 0 if there are no lines.

    Raises:
        DataError: A required column is missing.
    """
    names = {field: list(table[field]) for field in _FIELDS}
    if settings.column:
        names["text"] = [settings.column.lower()]
    if settings.id_column:
        names["id"] = [settings.id_column.lower()]
    columns = {
        field: [header.index(name) for name in candidates if name in header]
        for field, candidates in names.items()
    }
    needed = [("text", "text", settings.column or table["text"][0])]
    if settings.id_column:
        needed.append(("id", "notes' ids", settings.id_column))
    if table["known"] and table["patient"]:
        needed.append(("patient", "patients", table["patient"][0]))
    if settings.needs_category:
        needed.append(("category", "categories", "".join(table["category"][:1])))
    for field, content, name in needed:
        if not columns[field]:
            hint = suggest_name(name, header, describe_columns(header))
            raise DataError.at(
                path, line, f"there is no column {name!r} for the {content}: {hint}"
            )
    return {
        field: places if field == "category" else places[:1]
        for field, places in columns.items()
    }
