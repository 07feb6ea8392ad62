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

import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from fednotes.core.errors import ConfigError, DataError, nearest
from fednotes.data.formats.files import visible
from fednotes.data.notes.records import Record, Skipped, holds_json, json_records, text_record
from fednotes.data.notes.tables import TABLES, guess_table, table_records

FORMATS: Final = (*TABLES, "jsonl", "text")
_TEXT_SUFFIXES = (".txt", ".text")
_JSON_SUFFIXES = (".jsonl", ".ndjson")
_MANY_CATEGORIES = 1000  # remembered for a message
_FEW_CATEGORIES = 30  # more may be titles that say something of a patient


@dataclass(frozen=True, slots=True)
class Note:
    """One note.

    id: unique within its source where the file's own ids are. patient: whose note it is.
    category: "Discharge summary" and the like. source: where it came from, the name of the
    file or folder that was read unless the caller gave another.
    """

    id: str
    text: str
    patient: str | None
    category: str | None
    source: str


@dataclass(frozen=True, slots=True)
class NoteCounts:
    """What became of the records so far: read, empty, marked as errors, of another category."""

    notes: int = 0
    empty: int = 0
    errors: int = 0
    other_category: int = 0


class NoteStream(Iterator[Note]):
    """Notes one by one; `counts` says at any time what was read and what was left out."""

    def __init__(
        self, records: Iterator[Record | Skipped], source: str, path: Path, wanted: frozenset[str]
    ) -> None:
        self.counts = NoteCounts()
        self._records, self._source = records, source
        self._path, self._wanted = path, wanted
        self._seen: set[str] = set()

    def __next__(self) -> Note:
        for record in self._records:
            counts = self.counts
            if record is Skipped.ERROR:
                self.counts = replace(counts, errors=counts.errors + 1)
            elif record is Skipped.EMPTY or not record.text.strip():
                self.counts = replace(counts, empty=counts.empty + 1)
            elif self._wanted and (record.category or "").casefold() not in self._wanted:
                self.counts = replace(counts, other_category=counts.other_category + 1)
                if record.category and len(self._seen) < _MANY_CATEGORIES:
                    self._seen.add(record.category)
            else:
                self.counts = replace(counts, notes=counts.notes + 1)
                return Note(record.id, record.text, record.patient, record.category, self._source)
        if self.counts.other_category and not self.counts.notes:
            asked = sorted(self._wanted)
            hint = nearest(asked[0].capitalize(), self._seen)
            if len(self._seen) > _FEW_CATEGORIES and not hint.startswith("did"):
                hint = f"there are {len(self._seen)} others"
            raise DataError(f"{self._path}: no note of category {', '.join(asked)}: {hint}")
        raise StopIteration


def read_notes(
    path: str | os.PathLike[str],
    format: str | None = None,
    categories: Collection[str] = (),
    *,
    column: str | None = None,
    source: str | None = None,
) -> NoteStream:
    """The notes of a file or folder, read as they are asked for.

    format: one of `FORMATS`; None guesses it from the content.
    categories: keep only notes of these, compared without case and without blanks around them
        (MIMIC has "Nursing " and "Discharge summary"); empty keeps all.
    column: the table's column, or the JSON key, that holds the text; None takes the format's own.
    source: what every note's `source` says; None takes the name of `path`.

    Notes without a visible character are left out and counted. Raises ConfigError for a
    setting that cannot be, DataError for a file that is missing, not UTF-8, broken off or
    without a needed column, with file and line, some of it only when the reader gets there.
    """
    path = Path(path)
    if format is not None and format not in FORMATS:
        raise ConfigError(f"unknown format {format!r} of notes: {nearest(format, FORMATS)}")
    if isinstance(categories, str):
        raise ConfigError(f"categories must be a list of names, not the text {categories!r}")
    if not os.path.exists(path):
        raise DataError(f"{path}: no such file or folder")
    wanted = frozenset(c.strip().casefold() for c in categories)
    format, files = _files(path, format, column)
    if wanted and format == "text":
        raise ConfigError(f"{path}: text files have no category: leave out the category filter")
    read = _reader(path, format, column, bool(wanted))
    records = (record for file in files for record in read(file))
    return NoteStream(records, source or path.resolve().name.split(".")[0], path, wanted)


def _reader(
    path: Path, format: str, column: str | None, categorised: bool
) -> Callable[[Path], Iterator[Record | Skipped]]:
    """How one file is read."""
    if format == "text":
        return lambda file: iter((text_record(file, path),))
    if format == "jsonl":
        return lambda file: json_records(file, column)
    return lambda file: table_records(file, TABLES[format], column, categorised)


def _files(path: Path, format: str | None, column: str | None) -> tuple[str, list[Path]]:
    """The format and the files of it, in a fixed order.

    A folder may hold other files beside its notes (a licence, a table of contents): those of
    no known format are passed over, and text files too where there is a table of notes.
    """
    if not path.is_dir():
        return format or guess_notes(path, column), [path]
    found: dict[str, list[Path]] = {}
    for file in visible(path, below=True):
        try:
            kind = guess_notes(file, column)
        except DataError:
            continue
        if kind != "text" or file.suffix.lower() in _TEXT_SUFFIXES:
            found.setdefault(kind, []).append(file)
    if format is not None:
        found = {k: v for k, v in found.items() if k == format}
    elif len(found) > 1:
        found.pop("text", None)
    if len(found) > 1:
        mixed = ", ".join(f"{kind} ({len(files)} files)" for kind, files in sorted(found.items()))
        raise DataError(f"{path}: the folder mixes formats: {mixed}; name one of them")
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
    names = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
    suffix = names[-1] if names else ""
    table, first = guess_table(path, column)
    if suffix in _JSON_SUFFIXES or holds_json(first, column):
        return "jsonl"
    if table is not None:
        return table
    if suffix in (".csv", ".tsv") or (column is not None and suffix not in _TEXT_SUFFIXES):
        message = "no column of this table is known to hold notes: name it"
        raise DataError.at(path, 1, message if first else "the table is empty")
    return "text"
