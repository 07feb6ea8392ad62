"""Choose how a path is read: as a table of notes, as JSON lines, or as a corpus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from fednotes.core.errors import (
    ConfigError,
    DataError,
    NoTextColumnError,
    UnknownFormatError,
    suggest_name,
)
from fednotes.core.types import Document
from fednotes.data.encodings import reading_as, resolve_encoding
from fednotes.data.formats import FORMATS, examine, guess_format, parquet
from fednotes.data.formats.files import read_first_line, read_text, remove_packed_suffix
from fednotes.data.formats.folders import find_corpus_files, list_files
from fednotes.data.formats.json_files import parse_json_line
from fednotes.data.formats.jsonl import accepts as accepts_jsonl
from fednotes.data.formats.jsonl import stream_file
from fednotes.data.formats.problems import Problems
from fednotes.data.notes import FORMATS as NOTE_FORMATS
from fednotes.data.notes import (
    Note,
    NoteDatabase,
    NotePlace,
    add_standard_keys,
    find_note_files,
    guess_notes,
    read_notes,
)

# Corpus formats that can also be read as tables of notes.
_STREAMED = ("fhir", "omop")
_TEXT_SUFFIXES = (".txt", ".text")

_NEEDS_ANNOTATIONS = (
    "`fednotes check`, `fednotes calibrate` and `fednotes evaluate` need annotated ones"
)

# Reads a source from its beginning, and collects problems with unusable data.
Reader = Callable[[Problems], Iterable[Document]]


class ChosenReader(NamedTuple):
    """How a path is read.

    Attributes:
        read: The reader.
        holds_all_documents: Whether the reader holds all documents in memory.
    """

    read: Reader
    holds_all_documents: bool


def choose_reader(
    path: NotePlace,
    format: str | None,
    column: str | None,
    encoding: str,
    id_column: str | None = None,
) -> ChosenReader:
    """Return the reader of a file, a folder or a database.

    A named format or column decides. Otherwise the files do: a corpus is read as such,
    unless it is a table with a column of texts.

    Args:
        path: A file or folder that exists, or a database.
        format: A format of corpora or of notes; detected if None.
        column: The column of a table, or the key of JSON lines, that holds the text.
        encoding: Encoding of files that have no byte-order mark and are not UTF-8.
        id_column: The column of a table, or the key of JSON lines, with the notes' ids.

    Raises:
        DataError: The format is unknown.
    """
    notes = _NotesReader(path, format, column, encoding, id_column)
    as_table = ChosenReader(notes.read_table, holds_all_documents=False)
    is_only_of_notes = format in NOTE_FORMATS and format not in FORMATS
    has_named_column = column is not None or id_column is not None
    if isinstance(path, NoteDatabase) or has_named_column or is_only_of_notes:
        return as_table
    json_lines = _JsonLinesReader(path, encoding)
    as_json_lines = ChosenReader(json_lines.read, holds_all_documents=False)
    if format == "jsonl":
        return as_json_lines

    corpus_format = format or guess_corpus_format(path, encoding)
    if corpus_format is None or corpus_format in _STREAMED:
        return as_table
    if corpus_format == "jsonl":
        return as_json_lines if _has_text_key(path, encoding) else as_table
    if corpus_format == "parquet" and _has_text_column(path):
        return as_table
    corpus = _CorpusReader(path, corpus_format, encoding)
    return ChosenReader(corpus.read, holds_all_documents=True)


# ---- readers -------------------------------------------------------------------------


@dataclass(frozen=True)
class _NotesReader:
    """Reads notes one by one; the attributes are those of `choose_reader`."""

    path: NotePlace
    format: str | None
    column: str | None
    encoding: str
    id_column: str | None

    def read_table(self, problems: Problems) -> Iterator[Document]:
        """Yield the notes of a table, of JSON lines, of text files or a database."""
        named = self.format if self.format in NOTE_FORMATS else None
        format = self.format
        if isinstance(self.path, Path):
            format = find_note_format(self.path, named, self.column, self.encoding)
        notes = read_notes(
            self.path,
            format,
            column=self.column,
            id_column=self.id_column,
            encoding=self.encoding,
            problems=problems,
            exact=True,
        )
        return map(_to_document, notes)


@dataclass(frozen=True)
class _JsonLinesReader:
    """Reads this project's own JSON lines; the attributes are as in `choose_reader`."""

    path: Path
    encoding: str

    def read(self, problems: Problems) -> Iterator[Document]:
        """Yield the documents of this project's own JSON lines."""
        with reading_as(self.encoding):
            files = find_corpus_files(self.path, accepts_jsonl, "JSONL")
        return chain.from_iterable(
            _read_json_file(file, self.encoding, problems) for file in files
        )


def _to_document(note: Note) -> Document:
    """Return a note as a document with its own id; visit and category are metadata."""
    meta = {}
    if note.visit is not None:
        meta["visit"] = note.visit
    if note.category is not None:
        meta["category"] = note.category
    return Document(note.own_id or note.id, note.text, (), note.patient, meta=meta)


def _read_json_file(
    path: Path, encoding: str, problems: Problems
) -> Iterator[Document]:
    """Yield the documents of a file, each as soon as its line has been read."""
    with problems.collecting("file", path):
        records = stream_file(path, problems, encoding, prepare=add_standard_keys)
        for record in records:
            yield record.document


class _CorpusReader:
    """Reads an annotated corpus once, and holds it in memory.

    Args:
        path: The corpus.
        format: Its format.
        encoding: Encoding of files that have no byte-order mark and are not UTF-8.
    """

    def __init__(self, path: Path, format: str, encoding: str) -> None:
        self._path = path
        self._format = format
        self._encoding = encoding
        self._corpus: tuple[tuple[Document, ...], Problems] | None = None

    def read(self, problems: Problems) -> Iterator[Document]:
        """Yield the documents of the corpus, then the texts without annotations."""
        if self._corpus is None:
            self._corpus = examine(self._path, self._format, self._encoding)
        documents, problems_of_corpus = self._corpus
        problems.listed += problems_of_corpus.listed
        problems.counts.update(problems_of_corpus.counts)
        yield from documents
        # A text without an annotation file is also a note, but not a gold document.
        with reading_as(self._encoding):
            texts = [
                (file, read_text(file, may_be_empty=True, exact=True))
                for file in problems_of_corpus.unannotated
            ]
        for file, text in texts:
            name = file.relative_to(self._path).with_suffix("").as_posix()
            yield Document(name, text)


# ---- formats -------------------------------------------------------------------------


def find_note_format(
    path: Path, format: str | None, column: str | None, encoding: str
) -> str | None:
    """Return the format of a table of notes, of JSON lines or of text files.

    Args:
        path: A file or folder of notes.
        format: The format, if the user names it.
        column: The column or key that holds the text, if the user names it.
        encoding: Encoding of files that have no byte-order mark and are not UTF-8.

    Returns:
        One of the formats of `data.notes`, or None for a folder, whose reader
        recognises it.

    Raises:
        DataError: The file's format is unknown. The name of a text must end in .txt.
        ConfigError: The format is only for annotated corpora.
    """
    if format is not None:
        if format not in NOTE_FORMATS:
            raise ConfigError(
                f"format {format!r} is not a format of notes: "
                f"{suggest_name(format, NOTE_FORMATS)}"
            )
        return format
    if path.is_dir():
        return None
    guessed = guess_notes(path, column, resolve_encoding(encoding))
    if guessed == "text" and not _has_text_name(path):
        tables = ", ".join(name for name in NOTE_FORMATS if name != "text")
        raise DataError(
            f"{path}: cannot recognise the format: name text files *.txt, or "
            f"give the format: one of {tables}, or of the annotated corpora "
            f"{', '.join(sorted(FORMATS))}"
        )
    return guessed


def explain_unknown_format(error: UnknownFormatError, encoding: str) -> DataError:
    """Return the error for a path that is no annotated corpus, but may hold notes.

    Args:
        error: The error of the search for a corpus format.
        encoding: Encoding of files that have no byte-order mark and are not UTF-8.
    """
    try:
        kind, _ = find_note_files(error.path, None, None, resolve_encoding(encoding))
    except NoTextColumnError:
        return DataError(
            f"{error.path}: this is a table of notes without annotations: `fednotes "
            "predict` finds mentions in them if its `column` names the column of the "
            f"text, and {_NEEDS_ANNOTATIONS}"
        )
    except DataError:
        return error
    if kind == "text" and not (error.path.is_dir() or _has_text_name(error.path)):
        return error
    what = "a table of notes" if kind not in ("text", "fhir") else "notes"
    return DataError(
        f"{error.path}: this is {what} without annotations: `fednotes predict` finds "
        f"mentions in them, {_NEEDS_ANNOTATIONS}, and `fednotes init` proposes a job "
        "that pre-trains on them"
    )


@contextmanager
def requiring_annotations(encoding: str) -> Iterator[None]:
    """Say in errors of the context that a path holds notes without annotations.

    Args:
        encoding: Encoding of files that have no byte-order mark and are not UTF-8.

    Raises:
        DataError: No format of annotated corpora matched a path.
    """
    try:
        yield
    except UnknownFormatError as error:
        raise explain_unknown_format(error, encoding) from error


def guess_corpus_format(path: Path, encoding: str) -> str | None:
    """Return the format of an annotated corpus, or None for a path of notes.

    Raises:
        DataError: The path has neither.
    """
    try:
        with reading_as(encoding):
            return guess_format(path)
    except DataError:
        if path.is_dir() and not _has_only_notes(path, encoding):
            raise
        find_note_format(path, None, None, encoding)
        return None


def _has_text_name(path: Path) -> bool:
    """Return whether a file is named as a text, such as note.txt or note.txt.gz."""
    return remove_packed_suffix(path).suffix.lower() in _TEXT_SUFFIXES


def _has_only_notes(folder: Path, encoding: str) -> bool:
    """Return whether a folder that is not an annotated corpus contains notes.

    Beside a table, there may be other files, such as a licence. Without a table, all
    files must be texts, so that none is skipped silently.
    """
    files = list_files(folder, recursive=True)
    if files and all(map(_has_text_name, files)):
        return True
    return any(_is_table(file, encoding) for file in files)


def _is_table(file: Path, encoding: str) -> bool:
    """Return whether a file is a table of notes."""
    if _has_text_name(file):
        return False
    try:
        return guess_notes(file, None, encoding) != "text"
    except DataError:
        return False


def _has_text_column(path: Path) -> bool:
    """Return whether Parquet files have a column of text, and not only of tokens."""
    files = [path]
    if not path.is_file():
        files = list(filter(parquet.accepts, list_files(path, recursive=True)))
    return all(
        "text" in map(str.lower, parquet.list_column_names(file)) for file in files
    )


def _has_text_key(path: Path, encoding: str) -> bool:
    """Return whether the first record has a key "text", as in this project's files.

    The result is also True if the record is no object: the reader reports that problem.
    """
    file = path
    with reading_as(encoding):
        if path.is_dir():
            file = find_corpus_files(path, accepts_jsonl, "JSONL")[0]
        try:
            record = parse_json_line(read_first_line(file))
        except DataError:
            return True  # the reader of these files reports the problem
    return not isinstance(record, dict) or "text" in record
