"""Reading of notes in files and folders as a stream."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from fednotes.core.errors import ConfigError, DataError, ParameterError, suggest_name
from fednotes.core.work import count_items
from fednotes.data import encodings
from fednotes.data.formats import parquet
from fednotes.data.formats.problems import Problems
from fednotes.data.notes._database import NoteDatabase, NotePlace, make_note_place
from fednotes.data.notes._guessing import find_note_files
from fednotes.data.notes._note import EMPTY, MISTAKEN, OTHER, Note, NoteStream
from fednotes.data.notes._records import read_fhir, read_json_lines, read_text_file
from fednotes.data.notes._settings import FORMATS, ReadSettings
from fednotes.data.notes._tables import read_columns, read_table

_MAX_REMEMBERED = 1000  # categories stored for a message
# If there are more, they may be titles that reveal something about a patient.
_MAX_NAMED = 30


def read_notes(  # noqa: PLR0913 - the options of a public function
    paths: str | os.PathLike[str] | NoteDatabase | Sequence[NotePlace],
    format: str | None = None,
    categories: Collection[str] = (),
    *,
    column: str | None = None,
    id_column: str | None = None,
    source: str | None = None,
    encoding: str = encodings.AUTO,
    problems: Problems | None = None,
    exact: bool = False,
) -> NoteStream:
    r"""Return a stream of the notes in files, folders or databases, read on demand.

    Notes without visible characters are left out and counted.

    Args:
        paths: A file, a folder or a database, or several.
        format: One of `FORMATS`; None guesses it from the content. A database has none.
        categories: Only notes of these categories are kept, ignoring case and
            surrounding blanks (MIMIC has "Nursing " and "Discharge summary"). If empty,
            all are kept.
        column: The table column or JSON key of the text; None uses that of the format.
        id_column: The table column or JSON key of the notes' ids; None uses that of the
            format.
        source: The `source` of every note; for a second path it ends in "/1", and so
            on. It distinguishes notes without a patient. None uses the name of the
            path.
        encoding: The encoding of files that have no byte-order mark and are not UTF-8,
            such as "cp1252".
        problems: Collects invalid records and unreadable parts of files; the reader
            continues. If None, the first error is raised.
        exact: Whether to keep texts unchanged, with Windows line ends, and also empty
            texts. Otherwise line ends become `\n`.

    Raises:
        ConfigError: A setting is impossible.
        DataError: A file does not exist, is not text, is incomplete or lacks a column.
            The message names the file and the line. Some errors are raised only during
            iteration.
    """
    if format and format not in FORMATS:
        raise ConfigError(
            f"unknown format {format!r} of notes: {suggest_name(format, FORMATS)}"
        )
    if isinstance(categories, str):
        raise ConfigError(
            f"categories must be a list of names, not the text {categories!r}"
        )
    named_encoding = encodings.resolve_encoding(encoding)
    wanted = frozenset(category.strip().casefold() for category in categories)
    places: Sequence[str | os.PathLike[str] | NoteDatabase]
    if isinstance(paths, str | os.PathLike | NoteDatabase):
        places = [paths]
    else:
        places = paths
    counts = Counter[str]()
    streams: list[Iterator[Note]] = []
    for number, any_place in enumerate(places):
        place, path_format, files = _find_place(
            make_note_place(any_place), format, column, named_encoding
        )
        if wanted and path_format == "text":
            raise ConfigError(
                f"{place}: text files have no category: leave out the category filter"
            )
        if id_column and path_format in ("text", "fhir"):
            raise ParameterError(
                f"{place}: `id_column` is for tables and JSON lines, and this is "
                f"{path_format}: leave it out"
            )
        name = source or _name_place(place)
        settings = ReadSettings(
            root=place,
            format=path_format,
            source=f"{name}/{number}" if number else name,
            column=column,
            id_column=id_column,
            needs_category=bool(wanted),
            encoding=named_encoding,
            problems=problems,
            exact=exact,
        )
        records = _read_place(settings, files)
        streams.append(_select_notes(records, settings, wanted, counts))
    notes = count_items(chain.from_iterable(streams), "reading notes")
    return NoteStream(notes, counts)


class _FoundPlace(NamedTuple):
    """A place of notes.

    Attributes:
        place: The path, perhaps of the packed version of a file; or the database.
        format: The format of its files; "" for a database.
        files: Its files; none for a database.
    """

    place: NotePlace
    format: str
    files: list[Path]


def _find_place(
    path: NotePlace, format: str | None, column: str | None, encoding: str
) -> _FoundPlace:
    """Return a place of notes with its format and files.

    Raises:
        ConfigError: A format is named for a database.
        DataError: The path does not exist, or its format is not known.
    """
    if isinstance(path, NoteDatabase):
        if format:
            raise ConfigError(
                f"{path}: a format applies only to files, and this is a database: "
                "leave it out"
            )
        return _FoundPlace(path, "", [])
    place = find_packed_or_plain(path)
    path_format, files = find_note_files(place, format, column, encoding)
    return _FoundPlace(place, path_format, files)


def _name_place(place: NotePlace) -> str:
    """Return the name of the source of the notes at a place."""
    if isinstance(place, NoteDatabase):
        return "database"
    return place.resolve().name.split(".")[0]


def find_packed_or_plain(path: Path) -> Path:
    """Return the path, or its packed (.gz) or unpacked version, whichever exists.

    Raises:
        DataError: Neither exists.
    """
    if path.suffix.lower() == ".gz":
        other = path.with_suffix("")
    else:
        other = path.with_name(f"{path.name}.gz")
    for candidate in (path, other):
        if os.path.exists(candidate):
            return candidate
    raise DataError(f"{path}: no such file or folder, nor {other.name} beside it")


def _read_place(settings: ReadSettings, files: Sequence[Path]) -> Iterator[Note | None]:
    """Yield the records of files or a database; None for those marked as mistakes."""
    if isinstance(settings.root, NoteDatabase):
        yield from settings.root.read_notes(settings)
    for file in files:
        if settings.problems is None:
            yield from _read_file(settings, file)
        else:
            with settings.problems.collecting("file", file):
                yield from _read_file(settings, file)


def _read_file(settings: ReadSettings, file: Path) -> Iterator[Note | None]:
    """Yield the records of a file; None for those marked as mistakes."""
    if settings.format == "text":
        yield read_text_file(settings, file)
    elif settings.format == "jsonl":
        yield from read_json_lines(settings, file)
    elif settings.format == "fhir":
        yield from read_fhir(settings, file)
    elif parquet.accepts(file):
        yield from read_columns(settings, file)
    else:
        yield from read_table(settings, file)


def _select_notes(
    records: Iterator[Note | None],
    settings: ReadSettings,
    wanted: frozenset[str],
    counts: Counter[str],
) -> Iterator[Note]:
    """Yield notes with text and a wanted category, and count all records.

    Args:
        records: The records; None for those marked as mistakes.
        settings: How the files are read; if exact, notes without text are kept.
        wanted: The case-folded categories; if empty, all are wanted.
        counts: The counts of `NoteStream`.

    Raises:
        DataError: There are notes, but none of a wanted category.
    """
    selected = 0
    others = 0
    other_categories = set[str]()
    for note in records:
        reason = _find_reason_to_leave_out(note, wanted, keep_empty=settings.exact)
        counts[reason or "notes"] += 1
        if note is not None and not reason:
            selected += 1
            yield note
        elif note is not None and reason == OTHER:
            others += 1
            if note.category and len(other_categories) < _MAX_REMEMBERED:
                other_categories.add(note.category)
        del note  # so that one text is in memory at a time
    if others and not selected:
        names = sorted(wanted)
        fallback = None
        if len(other_categories) > _MAX_NAMED:
            fallback = f"there are {len(other_categories)} others"
        hint = suggest_name(names[0].capitalize(), other_categories, fallback)
        raise DataError(
            f"{settings.root}: no notes of category {', '.join(names)}: {hint}"
        )


def _find_reason_to_leave_out(
    note: Note | None, wanted: frozenset[str], *, keep_empty: bool
) -> str:
    """Return the reason for omitting a record; "" for a note that is kept."""
    if note is None:
        return MISTAKEN
    if not keep_empty and not note.text.strip():
        return EMPTY
    if wanted and (note.category or "").casefold() not in wanted:
        return OTHER
    return ""
