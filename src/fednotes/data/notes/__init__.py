"""Notes without annotations, streamed: what a language model is pre-trained on.

    mimic        MIMIC-III NOTEEVENTS.csv: rows marked ISERROR are dropped
    omop         the NOTE table of the OMOP common data model
    mts-dialog   MTS-Dialog: the section that a dialogue led to
    aci-bench    ACI-Bench: the note that an encounter led to
    csv          any other table with a header, whose text column is named or called "text"
    jsonl        one JSON object a line
    text         a file a note: one file, or every .txt file of a folder and below it

One note is in memory at a time. Files that end in .gz are read as they are.
"""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final, TextIO

from fednotes.core.errors import ConfigError, DataError, nearest
from fednotes.core.parsing import JsonError, parse_json, shipped
from fednotes.data.formats import files as corpus

Key = tuple[str, ...]
_HEAD = 1 << 16  # characters that hold any header
_LARGEST = corpus.LARGEST
_TEXT_SUFFIXES = (".txt", ".text")
_MANY_CATEGORIES = 1000  # remembered for a message
_FEW_CATEGORIES = 30  # more may be titles that say something of a patient

_TABLES: Final = shipped("data/notes/tables.toml")
_KEYS: Final = _TABLES["csv"]  # JSON has the same
FORMATS: Final = (*_TABLES, "jsonl", "text")
EMPTY, MISTAKEN, OTHER = "without text", "marked as errors", "of another category"
SHARED = "that share a sentence with an excluded corpus"


@dataclass(frozen=True, slots=True)
class Note:
    """One note.

    id: unique within its source where the file's own ids are. patient: whose note it is.
    category: "Discharge summary" and the like. source: where it came from, the name of the
    file or folder that was read unless the caller gave another.
    """

    id: str
    text: str = field(repr=False)
    patient: str | None = field(repr=False)
    category: str | None
    source: str


def patient_of(note: Note) -> Key:
    """Whose note it is. A note without a patient counts as a patient of its own."""
    if note.patient is not None:
        return ("patient", note.patient)
    return ("note", note.source, note.id)


class NoteStream(Iterator[Note]):
    """Notes one by one. counts: of "notes", and of records left out by why, at any time."""

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
) -> NoteStream:
    """The notes of a file or folder, or of several, read as they are asked for.

    format: one of `FORMATS`; None guesses it from the content.
    categories: keep only notes of these, compared without case and without blanks around them
        (MIMIC has "Nursing " and "Discharge summary"); empty keeps all.
    column: the table's column, or the JSON key, that holds the text; None takes the format's own.
    source: what every note's `source` says, of a second path with "/1" and so on, by which notes
        without a patient are told apart; None takes the name of the path.

    Notes without a visible character are left out and counted. Raises ConfigError for a
    setting that cannot be, DataError for a file that is missing, not UTF-8, broken off or
    without a needed column, with file and line, some of it only when the reader gets there.
    """
    if format and format not in FORMATS:
        raise ConfigError(f"unknown format {format!r} of notes: {nearest(format, FORMATS)}")
    if isinstance(categories, str):
        raise ConfigError(f"categories must be a list of names, not the text {categories!r}")
    wanted = frozenset(c.strip().casefold() for c in categories)
    counts, streams = Counter[str](), list[Iterator[Note]]()
    for number, path in enumerate([paths] if isinstance(paths, str | os.PathLike) else paths):
        place = present(Path(path))
        kind, files = _files(place, format, column)
        if wanted and kind == "text":
            told = "text files have no category: leave out the category filter"
            raise ConfigError(f"{place}: {told}")
        name = (source or place.resolve().name.split(".")[0]) + (f"/{number}" if number else "")
        records = _records(place, kind, files, column, bool(wanted), name)
        streams.append(_kept(records, place, wanted, counts))
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


def _records(
    root: Path, format: str, files: list[Path], column: str | None, categorised: bool, source: str
) -> Iterator[Note | None]:
    """The records of files of one format; None for one that is marked as a mistake."""
    for file in files:
        if format == "text":
            yield _text_note(file, root, source)
        elif format == "jsonl":
            yield from _json_notes(file, column, source)
        else:
            yield from _table_notes(file, _TABLES[format], column, categorised, source)


def _kept(
    records: Iterator[Note | None], path: Path, wanted: frozenset[str], counts: Counter[str]
) -> Iterator[Note]:
    """The notes with text, and of a wanted category where some are. counts: what became of each."""
    kept, others, seen = 0, 0, set[str]()
    for note in records:
        left = _left(note, wanted)
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


def _left(note: Note | None, wanted: frozenset[str]) -> str:
    """Why a record is left out; "" for a note."""
    if note is None:
        return MISTAKEN
    if not note.text.strip():
        return EMPTY
    return OTHER if wanted and (note.category or "").casefold() not in wanted else ""


def _files(path: Path, format: str | None, column: str | None) -> tuple[str, list[Path]]:
    """The format and the files of it, in a fixed order.

    A folder may hold other files beside its notes (a licence, a table of contents): those of
    no known format are passed over, and text files too where there is a table of notes.
    """
    if not path.is_dir():
        return format or guess_notes(path, column), [path]
    found: dict[str, list[Path]] = {}
    for file in corpus.visible(path, below=True):
        try:
            kind = guess_notes(file, column)
        except DataError:
            continue
        if kind != "text" or file.suffix.lower() in _TEXT_SUFFIXES:
            found.setdefault(kind, []).append(file)
    if format:
        found = {k: v for k, v in found.items() if k == format}
    elif len(found) > 1:
        found.pop("text", None)
    if len(found) > 1:
        raise corpus.mixed(path, {kind: len(files) for kind, files in found.items()})
    if not found:
        raise DataError(
            f"{path}: no file in this folder holds notes of {format or 'a known format'}; "
            "text files must end in .txt"
        )
    return next(iter(found.items()))


def guess_notes(path: Path, column: str | None = None) -> str:
    """The format of one file, from its first lines.

    Raises DataError for a table in which no column is known to hold text.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
    suffix = suffixes[-1] if suffixes else ""
    with _reading(path, errors="replace") as file:
        text = file.read(_HEAD).lstrip("\r\n")
    first = text.splitlines()[0] if text else ""
    if suffix in (".jsonl", ".ndjson") or _holds_json(first, column):
        return "jsonl"
    header = set(_header(first))
    for name, table in _TABLES.items():
        if table["known"] and header.issuperset(table["known"]):
            return name
    # The first line of a note may hold a comma and the word "text": here the name must say csv.
    wanted = {column.lower()} if column else set(_KEYS["text"])
    if (column is not None or {".csv", ".tsv"} & {*suffixes}) and wanted & header:
        return "csv"
    if suffix in (".csv", ".tsv") or (column is not None and suffix not in _TEXT_SUFFIXES):
        message = "no column of this table is known to hold notes: name it"
        raise DataError.at(path, 1, message if first else "the table is empty")
    return "text"


@contextmanager
def _reading(path: Path, newline: str = "\n", errors: str = "strict") -> Iterator[TextIO]:
    """A file as UTF-8 text without its byte-order mark, unpacked where its name ends in .gz.

    Raises DataError for bytes that are no UTF-8, with their line, and a file that is not whole.
    """
    with io.TextIOWrapper(corpus.open_bytes(path), "utf-8-sig", errors, newline) as file:
        try:
            yield file
        except UnicodeDecodeError:
            with io.TextIOWrapper(corpus.open_bytes(path), "utf-8", "surrogateescape") as again:
                escaped = (any("\udc80" <= c <= "\udcff" for c in text) for text in again)
                line = next((n for n, odd in enumerate(escaped, 1) if odd), 0)
            raise DataError.at(path, line, f"a byte is {corpus.NOT_UTF8}") from None
        except corpus.BROKEN as error:
            raise corpus.broken(path, error) from None


def _plain(text: str) -> str:
    """The text with `\\n` at the end of its lines."""
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _stem(path: Path) -> str:
    """The file's name without what tells its format."""
    return path.name.removesuffix(".gz").rpartition(".")[0] or path.name


def _text_note(path: Path, root: Path, source: str) -> Note:
    """A text file as a note; its id is its path below `root` without the suffix."""
    with _reading(path) as file:
        text = file.read(_LARGEST + 1)
    if len(text) > _LARGEST:
        raise DataError(f"{path}: over {_LARGEST:,} characters in one note: give one file a note")
    name = path.relative_to(root).parent / _stem(path) if path != root else Path(_stem(path))
    return Note(name.as_posix(), _plain(text), None, None, source)


def _json_notes(path: Path, column: str | None, source: str) -> Iterator[Note | None]:
    """The notes of a JSONL file: keys `text`, `id`, `patient`, `category` and what is like them.

    None for a record that an annotator rejected (Prodigy's "answer").
    """
    number = 0
    with _reading(path) as file:
        while line := file.readline(_LARGEST):
            number += 1
            if len(line) == _LARGEST:
                raise DataError.at(path, number, f"the line has {_LARGEST:,} characters or more")
            if not line.strip():
                continue
            try:
                record = corpus.json_value(line)
                key = corpus.json_text(record, *((column,) if column else _KEYS["text"]))
            except DataError as error:
                raise DataError.at(path, number, str(error)) from None
            if key is None:
                yield None
                continue
            name = _value(record, _KEYS["id"]) or f"{_stem(path)}:{number}"
            about = _value(record, _KEYS["patient"]), _value(record, _KEYS["category"])
            yield Note(name, _plain(record[key]), *about, source)


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


# ---- tables: csv or tab-separated, text over many lines in quotes, a header first ----------------


def _delimiter(header: str) -> str:
    return "\t" if header.count("\t") > header.count(",") else ","


def _header(line: str) -> list[str]:
    try:
        row = next(csv.reader([line], delimiter=_delimiter(line)), [])
    except csv.Error:
        return []
    return [name.strip().lower() for name in row]


def _table_notes(
    path: Path, table: Mapping[str, Any], column: str | None, categorised: bool, source: str
) -> Iterator[Note | None]:
    """The rows of a table, read one by one; None for one marked as an error.

    categorised: whether a category is needed.
    """
    with _reading(path, newline="") as file:
        first = file.readline()
        header = _header(first)
        at = _columns(path, header, table, column, categorised)
        prefix = "" if "own_ids" in table else f"{_stem(path)}:"
        for line, row in corpus.table_rows(file, path, 2, _delimiter(first)):
            if len(row) != len(header):
                told = f"the row has {len(row)} columns, the header {len(header)}: "
                raise DataError.at(path, line, f"{told}is the file broken off, or a quote?")
            mistake, name, patient, category = (
                next((row[i].strip() for i in at[what] if row[i].strip()), None)
                for what in ("error", "id", "patient", "category")
            )
            wrong = mistake in ("1", "1.0", "True", "true")
            about = _plain(row[at["text"][0]]), patient, category, source
            yield None if wrong else Note(f"{prefix}{name or line}", *about)


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
    names = {what: table[what] for what in ("text", "id", "patient", "category", "error")}
    if column:
        names["text"] = [column.lower()]
    at = {what: [header.index(n) for n in own if n in header] for what, own in names.items()}
    needed = [("text", "text", column or table["text"][0])]
    if table["known"] and table["patient"]:
        needed.append(("patient", "patients", table["patient"][0]))
    if categorised:
        needed.append(("category", "categories", "".join(table["category"][:1])))
    for what, called, name in needed:
        if not at[what]:
            none = f"the first line names {len(header)} columns, none like it"  # notes perhaps
            hint = nearest(name, header, none)
            raise DataError.at(path, 1, f"there is no column {name!r} for the {called}: {hint}")
    return {what: own if what == "category" else own[:1] for what, own in at.items()}
