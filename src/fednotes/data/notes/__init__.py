"""Notes without annotations, streamed: what models are pre-trained on, and what they
predict on.

    mimic        MIMIC-III NOTEEVENTS.csv: rows marked ISERROR are dropped
    mimic-iv     MIMIC-IV-Note: discharge.csv, radiology.csv
    omop         the NOTE table of the OMOP common data model
    mts-dialog   MTS-Dialog: the section that a dialogue led to
    aci-bench    ACI-Bench: the note that an encounter led to
    csv          any other table with a header, whose text column is named or called "text"
    jsonl        one JSON object a line
    fhir         FHIR R4: a resource a line, a Bundle or one resource
    parquet      any other table in Parquet or Arrow, with the columns of "csv"
    text         a file a note: one file, or every .txt file of a folder and below it

The tables of MIMIC and OMOP are read in Parquet, too. Files whose names end in .gz or
.zst are unpacked while they are read. One note is in memory at a time; of Parquet, one
batch of rows; of a FHIR file that is no JSON lines, the file, which may have 64 MiB.
"""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final

from fednotes.core import bounds
from fednotes.core.errors import ConfigError, DataError, nearest
from fednotes.core.parsing import JsonError, parse_json, shipped
from fednotes.data import encodings
from fednotes.data.formats import fhir, parquet
from fednotes.data.formats.csv_rows import read_csv_rows
from fednotes.data.formats.files import (
    PACKED_SUFFIXES,
    bounded_lines,
    locate_errors,
    open_text,
    unpacked_name,
)
from fednotes.data.formats.folders import list_files, mixed_formats
from fednotes.data.formats.json_files import parse_json_line, read_json, text_key
from fednotes.data.formats.problems import Problems

Key = tuple[str, ...]
_HEAD = 1 << 16  # characters that hold any header
_TEXT_SUFFIXES = (".txt", ".text")
_MANY_CATEGORIES = 1000  # remembered for a message
_FEW_CATEGORIES = 30  # more may be titles that say something of a patient

_TABLES: Final = shipped("data/notes/tables.toml")
_KEYS: Final = _TABLES["csv"]  # JSON has the same
FORMATS: Final = (*_TABLES, "jsonl", "fhir", "parquet", "text")
_FIELDS = ("text", "id", "patient", "visit", "category", "error")
EMPTY, MISTAKEN, OTHER = "without text", "marked as errors", "of another category"
SHARED = "that share a sentence with an excluded corpus"


@dataclass(frozen=True, slots=True)
class Note:
    """One note.

    id: unique within its source where the file's own ids are. patient: whose note it
        is.
    category: "Discharge summary" and the like. source: where it came from, the name of
    the file or folder that was read unless the caller gave another. visit: the stay or
    encounter that it belongs to. own_id: the id that the file itself gives the note,
    None without one.
    """

    id: str
    text: str = field(repr=False)
    patient: str | None = field(repr=False)
    category: str | None
    source: str
    visit: str | None = field(default=None, repr=False)
    own_id: str | None = None


def patient_of(note: Note) -> Key:
    """Whose note it is. A note without a patient counts as a patient of its own."""
    if note.patient is not None:
        return ("patient", note.patient)
    return ("note", note.source, note.id)


class NoteStream(Iterator[Note]):
    """Notes one by one. counts: of "notes", and of records left out by why, at any
    time."""

    def __init__(self, notes: Iterator[Note], counts: Counter[str]) -> None:
        self._notes, self.counts = notes, counts

    def __next__(self) -> Note:
        return next(self._notes)


def left_out(counts: Mapping[str, int]) -> str:
    """What was left out and why, for people; "" for nothing."""
    numbers = ((counts.get(why, 0), why) for why in (EMPTY, MISTAKEN, OTHER, SHARED))
    return ", ".join(f"{number:,} {why}" for number, why in numbers if number)


def read_notes(
    paths: str | os.PathLike[str] | Sequence[Path],
    format: str | None = None,
    categories: Collection[str] = (),
    *,
    column: str | None = None,
    source: str | None = None,
    encoding: str = encodings.AUTO,
    problems: Problems | None = None,
    exact: bool = False,
) -> NoteStream:
    """The notes of a file or folder, or of several, read as they are asked for.

    format: one of `FORMATS`; None guesses it from the content.
    categories: keep only notes of these, compared without case and without blanks
        around them (MIMIC has "Nursing " and "Discharge summary"); empty keeps all.
    column: the table's column, or the JSON key, that holds the text; None takes the
        format's own.
    source: what every note's `source` says, of a second path with "/1" and so on, by
        which notes without a patient are told apart; None takes the name of the path.
    encoding: of files without a byte-order mark that are not UTF-8, such as "cp1252".
    problems: takes note of each record that is wrong, and of what of a file cannot be
        read, and the reader goes on; without it the first one is raised.
    exact: give texts as they are, with line ends of Windows where these are, and empty
        ones too; else lines end in `\\n`.

    Notes without a visible character are left out and counted. Raises ConfigError for a
    setting that cannot be, DataError for a file that is missing, no text, broken off or
    without a needed column, with file and line, some of it only when the reader gets
    there.
    """
    if format and format not in FORMATS:
        raise ConfigError(
            f"unknown format {format!r} of notes: {nearest(format, FORMATS)}"
        )
    if isinstance(categories, str):
        raise ConfigError(
            f"categories must be a list of names, not the text {categories!r}"
        )
    named = encodings.encoding_of(encoding)
    wanted = frozenset(c.strip().casefold() for c in categories)
    counts, streams = Counter[str](), list[Iterator[Note]]()
    for number, path in enumerate(
        [paths] if isinstance(paths, str | os.PathLike) else paths
    ):
        place = present(Path(path))
        kind, files = _files(place, format, column, named)
        if wanted and kind == "text":
            told = "text files have no category: leave out the category filter"
            raise ConfigError(f"{place}: {told}")
        name = (source or place.resolve().name.split(".")[0]) + (
            f"/{number}" if number else ""
        )
        reading = _Reading(
            place, kind, name, column, bool(wanted), named, problems, exact
        )
        records = _records(reading, files)
        streams.append(_kept(records, place, wanted, counts, exact))
    return NoteStream(chain.from_iterable(streams), counts)


def present(path: Path) -> Path:
    """Return the path, or the same file packed (.gz) or unpacked, whichever exists.

    Raises:
        DataError: None of them exists.
    """
    if path.suffix.lower() == ".gz":
        other = path.with_suffix("")
    else:
        other = path.with_name(f"{path.name}.gz")
    for candidate in (path, other):
        if os.path.exists(candidate):
            return candidate
    raise DataError(f"{path}: no such file or folder, nor {other.name} beside it")


@dataclass(frozen=True)
class _Reading:
    """How the files of one path are read.

    root: the path. kind: one of `FORMATS`. source: as of `Note`. column: as of
        `read_notes`.
    categorised: whether a category is needed. named: the encoding that the user named.
    problems: as of `read_notes`. exact: whether line ends stay as they are.
    """

    root: Path
    kind: str
    source: str
    column: str | None = None
    categorised: bool = False
    named: str = encodings.AUTO
    problems: Problems | None = None
    exact: bool = False

    def text(self, raw: str) -> str:
        """Return a note's text with the line ends that were asked for.

        Raises DataError for a text of more than `bounds.NOTE` characters.
        """
        if len(raw) > bounds.NOTE:
            raise DataError(
                f"the note has more than {bounds.NOTE:,} characters: divide it"
            )
        return raw if self.exact or "\r" not in raw else _plain(raw)

    @contextmanager
    def noting(
        self, kind: str, path: Path, line: int = 0, item: str = ""
    ) -> Iterator[None]:
        """Note a DataError of the block where problems are noted; else raise it with
        its place."""
        if self.problems is not None:
            with self.problems.collect(kind, path, line, item):
                yield
            return
        try:
            yield
        except DataError as error:
            raise (
                error if error.problems else DataError.at(path, line, f"{item}{error}")
            ) from None

    @property
    def text_keys(self) -> Sequence[str]:
        """The keys that may hold the text, of records without a known table."""
        return (self.column,) if self.column else _KEYS["text"]


def _records(reading: _Reading, files: Sequence[Path]) -> Iterator[Note | None]:
    """The records of files of one format; None for one that is marked as a mistake."""
    for file in files:
        if reading.problems is None:
            yield from _records_of_file(reading, file)
        else:
            with reading.problems.collect("file", file):
                yield from _records_of_file(reading, file)


def _records_of_file(reading: _Reading, file: Path) -> Iterator[Note | None]:
    if reading.kind == "text":
        yield _text_note(reading, file)
    elif reading.kind == "jsonl":
        yield from _json_notes(reading, file)
    elif reading.kind == "fhir":
        yield from _fhir_notes(reading, file)
    elif parquet.accepts(file):
        yield from _column_notes(reading, file)
    else:
        yield from _table_notes(reading, file)


def _kept(
    records: Iterator[Note | None],
    path: Path,
    wanted: frozenset[str],
    counts: Counter[str],
    empty: bool,
) -> Iterator[Note]:
    """The notes with text (or `empty` ones too), and of a wanted category where some
    are.

    counts: what became of each.
    """
    kept, others, seen = 0, 0, set[str]()
    for note in records:
        left = _left(note, wanted, empty)
        counts[left or "notes"] += 1
        if note is not None and not left:
            kept += 1
            yield note
        elif note is not None and left == OTHER:
            others += 1
            if note.category and len(seen) < _MANY_CATEGORIES:
                seen.add(note.category)
        del note  # one text is in memory at a time
    if others and not kept:
        asked = sorted(wanted)
        many = f"there are {len(seen)} others" if len(seen) > _FEW_CATEGORIES else None
        hint = nearest(asked[0].capitalize(), seen, many)
        raise DataError(f"{path}: no note of category {', '.join(asked)}: {hint}")


def _left(note: Note | None, wanted: frozenset[str], empty: bool) -> str:
    """Why a record is left out; "" for a note."""
    if note is None:
        return MISTAKEN
    if not empty and not note.text.strip():
        return EMPTY
    return OTHER if wanted and (note.category or "").casefold() not in wanted else ""


def _files(
    path: Path, format: str | None, column: str | None, named: str
) -> tuple[str, list[Path]]:
    """The format and the files of it, in a fixed order.

    A folder may hold other files beside its notes (a licence, a table of contents):
    those of no known format are passed over, and text files too where there is a table
    of notes.
    """
    if not path.is_dir():
        return format or guess_notes(path, column, named), [path]
    found: dict[str, list[Path]] = {}
    for file in list_files(path, recursive=True):
        try:
            kind = guess_notes(file, column, named)
        except DataError:
            # A text in an odd encoding is not passed over: its reader says what is
            # wrong with it.
            kind = "text" if _is_text_name(file) else ""
        if kind and (kind != "text" or _is_text_name(file)):
            found.setdefault(kind, []).append(file)
    if format:
        found = {k: v for k, v in found.items() if k == format}
    elif len(found) > 1:
        found.pop("text", None)
    if len(found) > 1:
        raise mixed_formats(path, {kind: len(files) for kind, files in found.items()})
    if not found:
        raise DataError(
            f"{path}: no file in this folder holds notes of {format or 'a known format'}; "
            "text files must end in .txt"
        )
    return next(iter(found.items()))


def guess_notes(
    path: Path, column: str | None = None, named: str = encodings.AUTO
) -> str:
    """The format of one file, from its first lines.

    Raises DataError for a table in which no column is known to hold text, and for a
    file that holds no text at all.
    """
    if parquet.accepts(path):
        return _guess_table(parquet.column_names(path), column) or _refuse_columns(
            path, True
        )
    suffixes = [
        suffix.lower()
        for suffix in path.suffixes
        if suffix.lower() not in PACKED_SUFFIXES
    ]
    suffix = suffixes[-1] if suffixes else ""
    with open_text(path, named, errors="replace") as file:
        text = file.read(_HEAD).lstrip("\r\n")
    first = text.splitlines()[0] if text else ""
    with encodings.reading_as(named):
        if text.startswith(("{", "[")) and fhir.accepts(path):
            return "fhir"
    if suffix in (".jsonl", ".ndjson") or _holds_json(first, column):
        return "jsonl"
    # The first line of a note may hold a comma and the word "text": here the name must
    # say csv.
    is_table = bool({".csv", ".tsv"} & {*suffixes})
    kind = _guess_table(_header(first), column)
    if kind and (kind != "parquet" or column is not None or is_table):
        return "csv" if kind == "parquet" else kind
    if suffix in (".csv", ".tsv") or (
        column is not None and suffix not in _TEXT_SUFFIXES
    ):
        _refuse_columns(path, bool(first))
    return "text"


def _guess_table(header: Sequence[str], column: str | None) -> str:
    """The known table that has this header, "parquet" for another one with a column of
    text, or "" for none."""
    names = {name.strip().lower() for name in header}
    for name, table in _TABLES.items():
        if table["known"] and names.issuperset(table["known"]):
            return name
    wanted = {column.lower()} if column else set(_KEYS["text"])
    return "parquet" if wanted & names else ""


def _refuse_columns(path: Path, has_header: bool) -> str:
    told = "no column of this table is known to hold notes: name it"
    raise DataError.at(path, 1, told if has_header else "the table is empty")


def _is_text_name(path: Path) -> bool:
    return unpacked_name(path).suffix.lower() in _TEXT_SUFFIXES


def _plain(text: str) -> str:
    """The text with `\\n` at the end of its lines."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _stem(path: Path) -> str:
    """The file's name without what tells its format."""
    name = unpacked_name(path).name
    return name.rpartition(".")[0] or path.name


def _text_note(reading: _Reading, path: Path) -> Note:
    """A text file as a note; its id is its path below the folder without the suffix."""
    with open_text(path, reading.named, newline="") as file:
        text = file.read(bounds.NOTE + 1)
    name, root = Path(_stem(path)), reading.root
    if path != root:
        name = path.relative_to(root).parent / name
    with locate_errors(path):
        text = reading.text(text)
    return Note(name.as_posix(), text, None, None, reading.source)


def _json_notes(reading: _Reading, path: Path) -> Iterator[Note | None]:
    """The notes of a JSONL file: keys `text`, `id`, `patient`, `category` and what is
    like them.

    None for a record that an annotator rejected (Prodigy's "answer").
    """
    with open_text(path, reading.named) as file:
        for number, line in enumerate(bounded_lines(file, path), 1):
            if not line.strip():
                continue
            notes: list[Note | None] = []
            with reading.noting("note", path, number):
                record = parse_json_line(line)
                key = text_key(record, *reading.text_keys)
                if key is None:
                    notes.append(None)
                else:
                    notes.append(
                        _json_note(reading, record, key, f"{_stem(path)}:{number}")
                    )
            while notes:
                yield notes.pop()


def _json_note(
    reading: _Reading, record: Mapping[str, Any], key: str, otherwise: str
) -> Note:
    """The note of a record. key: of its text; otherwise: its id where it has none."""
    own = _value(record, _KEYS["id"])
    return Note(
        own or otherwise,
        reading.text(record[key]),
        _value(record, _KEYS["patient"]),
        _value(record, _KEYS["category"]),
        reading.source,
        visit=_value(record, _KEYS["visit"]),
        own_id=own,
    )


def record_ids(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON record with "id", "patient" and "visit", where it has these by
    other names."""
    found = dict(record)
    for name in ("id", "patient", "visit"):
        if found.get(name) is None and (value := _value(record, _KEYS[name])):
            found[name] = value
    return found


def _fhir_notes(reading: _Reading, path: Path) -> Iterator[Note | None]:
    """The notes of FHIR resources; those of types that hold none are passed over."""
    number = 0
    for line, value in _fhir_values(reading, path):
        for resource in fhir.resources(value):
            number += 1
            found: list[Note] = []
            with reading.noting(
                "note", path, line, "" if line else f"resource {number}: "
            ):
                text = fhir.text_of(resource)
                if text is not None:
                    own, patient, visit, category = fhir.about(resource)
                    name = own or f"{_stem(path)}:{number}"
                    about = (patient, category, reading.source)
                    found.append(
                        Note(name, reading.text(text), *about, visit=visit, own_id=own)
                    )
            while found:
                yield found.pop()


def _fhir_values(reading: _Reading, path: Path) -> Iterator[tuple[int, Any]]:
    """The values of JSON lines with their lines; of a file that is one value, it with
    0."""
    with open_text(path, reading.named) as file:
        first = next((line for line in bounded_lines(file, path) if line.strip()), "")
    try:
        parse_json(first, strict=False)
    except JsonError:
        with encodings.reading_as(reading.named):
            whole = read_json(path)
        for value in whole if isinstance(whole, list) else [whole]:
            yield 0, value
        return
    with open_text(path, reading.named) as file:
        for number, line in enumerate(bounded_lines(file, path), 1):
            values: list[Any] = []
            if line.strip():
                with reading.noting("note", path, number):
                    values.append(parse_json_line(line))
            yield from ((number, value) for value in values)


def _holds_json(line: str, column: str | None) -> bool:
    """Whether a file's first line is a JSON object with a text."""
    try:
        record = parse_json(line, strict=False) if line.startswith("{") else {}
    except JsonError:
        return False
    return any(key in record for key in ((column,) if column else _KEYS["text"]))


def _value(record: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    """The first of the keys whose value says something."""
    values = (record.get(key) for key in keys)
    said = (str(value).strip() for value in values if isinstance(value, str | int))
    return next(filter(None, said), None)


# ---- tables: csv or tab-separated, text over many lines in quotes, a header first ----


def _delimiter(header: str) -> str:
    return "\t" if header.count("\t") > header.count(",") else ","


def _header(line: str) -> list[str]:
    try:
        row = next(csv.reader([line], delimiter=_delimiter(line)), [])
    except csv.Error:
        return []
    return [name.strip().lower() for name in row]


def _table_notes(reading: _Reading, path: Path) -> Iterator[Note | None]:
    """The rows of a table, read one by one; None for one marked as an error."""
    table = _TABLES[reading.kind]
    with open_text(path, reading.named, newline="") as file:
        lines = bounded_lines(file, path)
        first = next(lines, "")
        header = _header(first)
        at = _columns(path, header, table, reading.column, reading.categorised)
        for line, row in read_csv_rows(lines, path, 2, _delimiter(first)):
            notes: list[Note | None] = []
            with reading.noting("note", path, line):
                if len(row) != len(header):
                    told = f"the row has {len(row)} columns, the header {len(header)}: "
                    raise DataError(f"{told}is the file broken off, or a quote?")
                notes.append(_row_note(row, at, path, line, reading))
            del row  # one text is in memory at a time
            while notes:
                yield notes.pop()


def _row_note(
    row: Sequence[str],
    at: Mapping[str, list[int]],
    path: Path,
    number: int,
    reading: _Reading,
) -> Note | None:
    """The note of a table's row; None where it is marked as an error. at: as of
    `_columns`."""
    about = {
        what: next((row[i].strip() for i in columns if row[i].strip()), None)
        for what, columns in at.items()
        if what != "text"
    }
    if about["error"] in ("1", "1.0", "True", "true"):
        return None
    own = about["id"]
    prefix = (
        "" if _TABLES.get(reading.kind, _KEYS).get("own_ids") else f"{_stem(path)}:"
    )
    return Note(
        f"{prefix}{own or number}",
        reading.text(row[at["text"][0]]),
        about["patient"],
        about["category"],
        reading.source,
        visit=about["visit"],
        own_id=own,
    )


def _column_notes(reading: _Reading, path: Path) -> Iterator[Note | None]:
    """The rows of a table in Parquet or Arrow, batch by batch."""
    table = _TABLES.get(reading.kind, _KEYS)
    names = parquet.column_names(path)
    header = [name.strip().lower() for name in names]
    at = _columns(path, header, table, reading.column, reading.categorised)
    needed = sorted({i for columns in at.values() for i in columns})
    places = {column: place for place, column in enumerate(needed)}
    at = {what: [places[i] for i in columns] for what, columns in at.items()}
    for number, values in enumerate(parquet.rows(path, [names[i] for i in needed]), 1):
        notes: list[Note | None] = []
        with reading.noting("note", path, 0, f"row {number}: "):
            if any(isinstance(value, bytes | list | dict) for value in values):
                raise DataError("a value is no text and no number")
            row = ["" if value is None else str(value) for value in values]
            notes.append(_row_note(row, at, path, number, reading))
        while notes:
            yield notes.pop()


def _columns(
    path: Path,
    header: Sequence[str],
    table: Mapping[str, Any],
    column: str | None,
    categorised: bool,
) -> dict[str, list[int]]:
    """Where a table's columns are: one of each, but of category all that are there.

    Raises DataError for one that is needed and missing.
    """
    names = {what: table[what] for what in _FIELDS}
    if column:
        names["text"] = [column.lower()]
    at = {
        what: [header.index(n) for n in own if n in header]
        for what, own in names.items()
    }
    needed = [("text", "text", column or table["text"][0])]
    if table["known"] and table["patient"]:
        needed.append(("patient", "patients", table["patient"][0]))
    if categorised:
        needed.append(("category", "categories", "".join(table["category"][:1])))
    for what, called, name in needed:
        if not at[what]:
            # notes perhaps
            none = f"the first line names {len(header)} columns, none like it"
            hint = nearest(name, header, none)
            raise DataError.at(
                path, 1, f"there is no column {name!r} for the {called}: {hint}"
            )
    return {what: own if what == "category" else own[:1] for what, own in at.items()}
