"""Tables of notes: csv or tab-separated, text over many lines in quotes, a header first."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fednotes.core.errors import DataError, nearest
from fednotes.data.notes.records import (
    BROKEN,
    CATEGORY,
    LARGEST,
    PATIENT,
    TEXT,
    Record,
    Skipped,
    broken,
    lines_end,
    not_utf8,
    open_bytes,
    open_text,
    stem,
)

_HEAD = 1 << 16  # bytes that hold any header


@dataclass(frozen=True, slots=True)
class Table:
    """Which columns hold what, in lower case; of several names the first that is there.

    known: columns that tell this table from others. own_ids: whether ids are unique beyond
    the file; otherwise the file's name goes before them. error: a column that is 1 where
    the row is a mistake.
    """

    known: frozenset[str]
    text: tuple[str, ...]
    id: tuple[str, ...]
    patient: tuple[str, ...] = ()
    category: tuple[str, ...] = ()
    error: str | None = None
    own_ids: bool = False


# The order in which a header is tried; the last takes any table with a column of text.
TABLES: Final[dict[str, Table]] = {
    "mimic": Table(
        frozenset({"subject_id", "category", "text"}),
        ("text",),
        ("row_id", "note_id"),
        ("subject_id",),
        ("category",),
        "iserror",
        own_ids=True,
    ),
    "omop": Table(
        frozenset({"note_id", "person_id", "note_text"}),
        ("note_text",),
        ("note_id",),
        ("person_id",),
        ("note_title", "note_type", "note_class_concept_id", "note_type_concept_id"),
        own_ids=True,
    ),
    "mts-dialog": Table(
        frozenset({"section_header", "section_text", "dialogue"}),
        ("section_text",),
        ("id",),
        category=("section_header",),
    ),
    "aci-bench": Table(
        frozenset({"encounter_id", "dialogue", "note"}),
        ("note",),
        ("encounter_id",),
        category=("dataset",),
    ),
    "csv": Table(frozenset(), TEXT, ("id", "note_id", "row_id"), PATIENT, CATEGORY),
}


def guess_table(path: Path, column: str | None) -> tuple[str | None, str]:
    """The kind of table that a file's header tells, if any; and the file's first line."""
    with open_bytes(path) as file:
        try:
            data = file.read(_HEAD)
        except BROKEN as error:
            raise broken(path, error) from None
    text = data.decode("utf-8", errors="replace").removeprefix("\ufeff").lstrip("\r\n")
    first = text.splitlines()[0] if text else ""
    header = _header(first)
    for name, table in TABLES.items():
        if table.known and table.known <= set(header):
            return name, first
    wanted = (column.lower(),) if column else TEXT
    # The first line of a note may hold a comma and the word "text": here the name must say csv.
    named = column is not None or {".csv", ".tsv"} & {s.lower() for s in path.suffixes}
    return ("csv" if named and set(wanted) & set(header) else None), first


def _delimiter(header: str) -> str:
    return "\t" if header.count("\t") > header.count(",") else ","


def _header(line: str) -> list[str]:
    try:
        row = next(csv.reader([line], delimiter=_delimiter(line)), [])
    except csv.Error:
        return []
    return [name.strip().lower() for name in row]


@dataclass(frozen=True, slots=True)
class _Columns:
    """Positions of a table's columns."""

    width: int
    text: int
    id: int | None
    patient: int | None
    category: tuple[int, ...]
    error: int | None

    def record(self, row: Sequence[str], name: str) -> Record | Skipped:
        """A row as a record; `name` is its id where the table gives none."""
        if self.error is not None and row[self.error].strip() in ("1", "1.0", "True", "true"):
            return Skipped.ERROR
        text = row[self.text]
        if not text or text.isspace():
            return Skipped.EMPTY
        category = next((row[i].strip() for i in self.category if row[i].strip()), None)
        patient = row[self.patient].strip() if self.patient is not None else ""
        return Record(name, lines_end(text), patient or None, category)


def table_records(
    path: Path, table: Table, column: str | None, categorised: bool
) -> Iterator[Record | Skipped]:
    """The rows of a table, read one by one. `categorised`: whether a category is needed."""
    if csv.field_size_limit() < LARGEST:
        csv.field_size_limit(LARGEST)  # the default, 131,072, is less than a long stay's summary
    with open_text(path) as file:
        try:
            header = file.readline()
            reader = csv.reader(file, delimiter=_delimiter(header), strict=True)
            columns = _columns(path, _header(header), table, column, categorised)
            prefix = "" if table.own_ids else f"{stem(path)}:"
            line = 2
            for row in reader:
                if row:
                    if len(row) != columns.width:
                        raise DataError.at(path, line, _wrong_width(len(row), columns.width))
                    given = row[columns.id].strip() if columns.id is not None else ""
                    yield columns.record(row, f"{prefix}{given or line}")
                line = reader.line_num + 2
        except UnicodeDecodeError:
            raise not_utf8(path) from None
        except csv.Error as error:
            raise DataError.at(path, line, _csv_message(error)) from None
        except BROKEN as error:
            raise broken(path, error) from None


def _wrong_width(found: int, wanted: int) -> str:
    return f"the row has {found} columns, the header {wanted}: is the file broken off, or a quote?"


def _csv_message(error: csv.Error) -> str:
    if "field larger" in str(error):
        return f"a field has more than {LARGEST:,} characters: is a quote not closed?"
    if "unexpected end" in str(error):
        return "the file ends inside a quoted field that begins in this row: it is broken off"
    return f"the row is no csv ({error})"


def _columns(
    path: Path, header: list[str], table: Table, column: str | None, categorised: bool
) -> _Columns:
    """Where the table's columns are. Raises DataError for one that is needed and missing."""

    def first(names: Sequence[str]) -> int | None:
        return next((header.index(name) for name in names if name in header), None)

    text = first((column.lower(),) if column else table.text)
    category = tuple(header.index(name) for name in table.category if name in header)
    needed = [("text", column or table.text[0], text is None)]
    if table.known:
        needed.append(("patients", "".join(table.patient[:1]), _lacks(header, table.patient)))
    if categorised:
        needed.append(("categories", "".join(table.category[:1]), not category))
    for what, name, lacking in needed:
        if lacking:
            hint = nearest(name, header)
            if not hint.startswith("did"):  # a table without a header has notes there
                hint = f"the first line names {len(header)} columns, none like it"
            raise DataError.at(path, 1, f"there is no column {name!r} for the {what}: {hint}")
    assert text is not None
    error = first((table.error,)) if table.error else None
    return _Columns(len(header), text, first(table.id), first(table.patient), category, error)


def _lacks(header: Sequence[str], names: Sequence[str]) -> bool:
    return bool(names) and not set(names) & set(header)
