"""Guessing of the format of notes from the first lines of their files."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path

from fednotes.core.errors import DataError, NoTextColumnError
from fednotes.core.parsing import JsonError, parse_json
from fednotes.core.wording import format_count, list_names
from fednotes.data import encodings
from fednotes.data.formats import fhir, parquet
from fednotes.data.formats.files import (
    PACKED_SUFFIXES,
    open_text,
    read_bounded_lines,
    remove_packed_suffix,
)
from fednotes.data.formats.folders import list_files, make_mixed_formats_error
from fednotes.data.notes._settings import COMMON_KEYS, TABLES

_HEAD = 1 << 16  # characters, enough for any header
_TEXT_SUFFIXES = (".txt", ".text")
_JSON_SUFFIXES = (".jsonl", ".ndjson")
_CSV_SUFFIXES = (".csv", ".tsv")
# A header has several names, each one word, and one of them says that it is a header.
_COLUMN_NAME = re.compile(r"[A-Za-z_][\w.-]{0,39}")
_OF_HEADER = re.compile("id$|note|text|date|report|patient|subject|_", re.IGNORECASE)
_MAX_COLUMNS = 12


def find_note_files(
    path: Path, format: str | None, column: str | None, encoding: str
) -> tuple[str, list[Path]]:
    """Return the format of a path, and its files with that format in a fixed order.

    A folder may contain files other than notes (a licence, a table of contents). Files
    of unknown formats are ignored, and text files too if there is a table of notes.

    Args:
        path: A file or a folder.
        format: The format; None guesses it.
        column: As in `read_notes`.
        encoding: The user-specified encoding.

    Raises:
        DataError: There are no notes, or notes of several formats.
    """
    if not path.is_dir():
        return format or guess_notes(path, column, encoding), [path]
    by_format: dict[str, list[Path]] = {}
    for file in list_files(path, recursive=True):
        guess = _guess_file_of_folder(file, column, encoding)
        if guess:
            by_format.setdefault(guess, []).append(file)
    if format:
        by_format = {format: by_format[format]} if format in by_format else {}
    elif len(by_format) > 1:
        by_format.pop("text", None)
    if len(by_format) > 1:
        counts = {name: len(files) for name, files in by_format.items()}
        raise make_mixed_formats_error(path, counts)
    if not by_format:
        raise DataError(
            f"{path}: no file in this folder holds notes of "
            f"{format or 'a known format'}; text files must end in .txt"
        )
    return next(iter(by_format.items()))


def _guess_file_of_folder(file: Path, column: str | None, encoding: str) -> str:
    """Return the format of a file in a folder; "" if it is ignored."""
    is_text_file = remove_packed_suffix(file).suffix.lower() in _TEXT_SUFFIXES
    try:
        guess = guess_notes(file, column, encoding)
    except DataError:
        # A text in an unexpected encoding is not ignored; its reader reports the
        # problem.
        guess = "text" if is_text_file else ""
    if guess == "text" and not is_text_file:
        return ""
    return guess


def guess_notes(
    path: Path, column: str | None = None, encoding: str = encodings.AUTO
) -> str:
    """Guess the format of a file from its first lines.

    Args:
        path: The file.
        column: The user-specified column or key of the text, or None.
        encoding: The user-specified encoding, or "auto".

    Raises:
        DataError: The file is a table without a known text column, or it is not text.
    """
    if parquet.accepts(path):
        guess = guess_table(parquet.list_column_names(path), column)
        if not guess:
            raise _make_unknown_table_error(
                path, parquet.list_column_names(path), column
            )
        return guess
    with open_text(path, encoding, errors="replace") as file:
        head = file.read(_HEAD).lstrip("\r\n")
    first_line = head.splitlines()[0] if head else ""
    with encodings.reading_as(encoding):
        if head.startswith(("{", "[")) and fhir.accepts(path):
            return "fhir"
    suffixes = [suffix.lower() for suffix in path.suffixes]
    suffixes = [suffix for suffix in suffixes if suffix not in PACKED_SUFFIXES]
    suffix = suffixes[-1] if suffixes else ""
    if suffix in _JSON_SUFFIXES or _is_json_record(first_line, column):
        return "jsonl"

    guess = guess_table(normalise_header(first_line), column)
    # The first line of a note may contain a comma and the word "text", so an unknown
    # table needs a CSV suffix or a user-specified column.
    has_csv_name = any(suffix in _CSV_SUFFIXES for suffix in suffixes)
    if guess and (guess != "parquet" or column is not None or has_csv_name):
        return "csv" if guess == "parquet" else guess
    must_be_table = column is not None and suffix not in _TEXT_SUFFIXES
    if suffix in _CSV_SUFFIXES or must_be_table:
        raise _make_unknown_table_error(path, normalise_header(first_line), column)
    return "text"


def guess_table(header: Sequence[str], column: str | None) -> str:
    """Return the name of the known table with this header.

    Args:
        header: The names of the columns.
        column: The user-specified column of the text, or None.

    Returns:
        The name; "parquet" for any other table with a text column; "" for a table
        without one.
    """
    names = {name.strip().lower() for name in header}
    for name, table in TABLES.items():
        if table["known"] and names.issuperset(table["known"]):
            return name
    text_columns = {column.lower()} if column else set(COMMON_KEYS["text"])
    return "parquet" if text_columns & names else ""


def _make_unknown_table_error(
    path: Path, header: Sequence[str], column: str | None
) -> DataError:
    """Return the error for a table without a column of texts.

    Args:
        path: The table.
        header: The names of its columns; empty if the table is empty.
        column: The column that the user names, or None.
    """
    if not any(name.strip() for name in header):
        return DataError.at(path, 1, "the table is empty")
    columns = describe_columns(header)
    if column is not None:
        return DataError.at(path, 1, f"there is no column {column!r}: {columns}")
    return NoTextColumnError.at(
        path,
        1,
        "no column of this table is recognised as the text of notes: set `column` to "
        f"its name; {columns}",
    )


def describe_columns(header: Sequence[str]) -> str:
    """Return the names of a table's columns in words.

    The first line of a file without a header may be note text, so names are shown only
    if all of them look like names of columns.
    """
    names = [name.strip() for name in header]
    if _are_column_names(names):
        return f"the columns are {list_names(names, _MAX_COLUMNS)}"
    columns = format_count(len(names), "column")
    return f"the first line has {columns}, without names that look like a header's"


def _are_column_names(names: Sequence[str]) -> bool:
    """Return whether the cells of a first line look like the names of columns."""
    are_names = len(names) > 1 and all(map(_COLUMN_NAME.fullmatch, names))
    return are_names and any(map(_OF_HEADER.search, names))


def _is_json_record(line: str, column: str | None) -> bool:
    """Return whether a file's first line is a JSON object with a text."""
    if not line.startswith("{"):
        return False
    try:
        record = parse_json(line, strict=False)
    except JsonError:
        return False
    keys = (column,) if column else COMMON_KEYS["text"]
    return any(key in record for key in keys)


def guess_delimiter(header: str) -> str:
    """Return the column separator of a table: a tab, a semicolon or a comma.

    A header with semicolons is separated by them only if it has no other separator.
    """
    if ";" in header and "\t" not in header and "," not in header:
        return ";"
    return "\t" if header.count("\t") > header.count(",") else ","


def normalise_header(line: str) -> list[str]:
    """Return the column names in a table's first line, in lower case."""
    return [name.lower() for name in _split_header(line)]


def _split_header(line: str) -> list[str]:
    """Return the column names in a table's first line; [] if it is not CSV."""
    try:
        row = next(csv.reader([line], delimiter=guess_delimiter(line)), [])
    except csv.Error:
        return []
    return [name.strip() for name in row]


def explain_line_ids(
    path: Path, format: str | None, column: str | None, encoding: str
) -> str:
    """Return a remark that a table has no known column of ids, or "".

    It is "" for a table with such a column, and for notes that are not in a table.

    Args:
        path: A file or a folder.
        format: The format of notes; None guesses it.
        column: As in `read_notes`.
        encoding: The user-specified encoding.

    Raises:
        DataError: There are no notes, or notes of several formats.
    """
    kind, files = find_note_files(path, format, column, encoding)
    if kind in ("jsonl", "fhir", "text"):
        return ""
    known = TABLES.get(kind, COMMON_KEYS)["id"]
    for file in files:
        unit = "row" if parquet.accepts(file) else "line"
        names = _read_header(file, encoding)
        if not {name.strip().lower() for name in names}.intersection(known):
            return (
                f"no column of {file.name} is known as the note's id, so ids are "
                f"{unit} numbers: to use one, set `id_column`; "
                f"{describe_columns(names)}"
            )
    return ""


def find_unused_columns(
    path: Path, format: str | None, column: str | None, encoding: str
) -> tuple[str, ...]:
    """Return the columns of tables of notes that nothing reads, sorted.

    Tables of a known layout, such as those of MIMIC and OMOP, have none, because it is
    known which of their columns hold notes. A first line that may be the text of a note
    is left out.

    Args:
        path: A file or a folder.
        format: The format of notes; None guesses it.
        column: As in `read_notes`.
        encoding: The user-specified encoding.

    Raises:
        DataError: There are no notes, or notes of several formats.
    """
    kind, files = find_note_files(path, format, column, encoding)
    if kind not in ("csv", "parquet"):
        return ()
    unused = set[str]()
    for file in files:
        names = [name.strip() for name in _read_header(file, encoding)]
        if not _are_column_names(names):
            continue
        unused.update(names)
        lowered = {name.lower(): name for name in names}
        for field, candidates in COMMON_KEYS.items():
            keys = [column.lower()] if field == "text" and column else candidates
            known = [lowered[key] for key in keys if key in lowered]
            unused.difference_update(known if field == "category" else known[:1])
    return tuple(sorted(unused))


def _read_header(file: Path, encoding: str) -> list[str]:
    """Return the names of the columns of a table."""
    if parquet.accepts(file):
        return list(parquet.list_column_names(file))
    with open_text(file, encoding) as lines:
        return _split_header(next(read_bounded_lines(lines, file), ""))
