"""What a saved model is used on: documents of files, tables of notes, stdin or a text,
streamed.

    inputs = inputs_of("NOTEEVENTS.csv.gz")
    inputs.require_readable()      # refuses what is wrong before anything is predicted
    for document in inputs: …      # one note at a time

Tables and JSON lines are never held as a whole. Annotated corpora (brat, CoNLL and the
like) are.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

from fednotes.core import bounds
from fednotes.core.errors import ConfigError, DataError, ParameterError, nearest
from fednotes.core.types import Document
from fednotes.data import encodings
from fednotes.data.encodings import AUTO, encoding_of, reading_as
from fednotes.data.formats import FORMATS, examine, guess_format, parquet
from fednotes.data.formats.files import read_first_line, read_text, unpacked_name
from fednotes.data.formats.folders import find_corpus_files, list_files
from fednotes.data.formats.json_files import parse_json_line
from fednotes.data.formats.jsonl import accepts as accepts_jsonl
from fednotes.data.formats.jsonl import stream_file
from fednotes.data.formats.problems import OnError, Problems, refuses
from fednotes.data.notes import FORMATS as NOTE_FORMATS
from fednotes.data.notes import Note, guess_notes, read_notes, with_standard_keys

_NAME = 100  # characters of a path that a message shows
_STREAMED = ("fhir", "omop")  # corpora that are tables of notes, too
_TEXT = (".txt", ".text")


class Inputs:
    """Documents of one source. Each iteration reads it from its beginning, one note at
    a time.

    Attributes:
        where: What messages call the source.
        problems: What could not be used in the last iteration.
        is_held: Whether all documents are in memory at once.
    """

    def __init__(
        self,
        where: str,
        read: Callable[[Problems], Iterable[Document]],
        on_error: OnError = "refuse",
        *,
        is_held: bool = False,
    ) -> None:
        self.where = where
        self.is_held = is_held
        self.problems = Problems()
        self._read = read
        self._refuses = refuses(on_error)

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents.

        Raises:
            DataError: Something is wrong with the source; with on_error = "skip", only
                where nothing is left of it.
        """
        self.problems = Problems()
        is_empty = True
        for document in self._read(self.problems):
            if self._refuses and self.problems.listed:
                break
            is_empty = False
            yield document
        if self.problems.listed and (self._refuses or is_empty):
            raise DataError.of(self.problems.listed, self.problems.number)

    def all(self) -> tuple[Document, ...]:
        """Return all documents at once.

        Raises DataError of everything that is wrong.
        """
        problems = self.problems = Problems()
        documents = tuple(self._read(problems))
        if problems.listed and (self._refuses or not documents):
            raise DataError.of(problems.listed, problems.number)
        return documents

    def require_readable(self) -> None:
        """Read the source once if anything wrong with it is refused, and raise all of
        it together.

        Predicting takes far longer than reading; so a file that ends in the middle of a
        row is refused before its first note is predicted.
        """
        if not self._refuses:
            return
        problems = Problems()
        for _ in self._read(problems):
            pass
        problems.refuse()


def inputs_of(
    name: str,
    text: str | None = None,
    on_error: OnError = "refuse",
    *,
    format: str | None = None,
    column: str | None = None,
    encoding: str = AUTO,
) -> Inputs:
    """Return the documents of a file or folder, of stdin, or of the text given.

    Args:
        name: A path, or `-` for stdin.
        text: A text in place of a path.
        on_error: "skip" leaves out, and counts, what cannot be used.
        format: A format of corpora or of notes; recognised if it is None.
        column: The column of a table, or the key of JSON lines, that holds the text.
        encoding: Of files without a byte-order mark that are not UTF-8.

    Raises:
        DataError: There is no such path, or its format is not known.
        ConfigError: A parameter is none of those that are possible.
    """
    named = encoding_of(encoding)
    if format is not None and format not in FORMATS and format not in NOTE_FORMATS:
        known = {*FORMATS, *NOTE_FORMATS}
        raise ConfigError(f"unknown format {format!r}: {nearest(format, known)}")
    path = source_of(name, text, named)
    if isinstance(path, Document):
        return Inputs(path.id, lambda problems: [path], on_error, is_held=True)
    corpus_format, reader = _reader(path, format, column, named)
    return Inputs(str(path), reader, on_error, is_held=bool(corpus_format))


def source_of(name: str, text: str | None, encoding: str = AUTO) -> Path | Document:
    """Return the text given, or that of stdin, as a document; else a path that exists."""
    if text is not None:
        if name != "-":
            raise ParameterError("give a path or `text`, not both")
        if not text.strip():
            raise ParameterError("`text`: there is no text")
        return Document("text", _decoded("the text", os.fsencode(text), AUTO))
    if name == "-":
        data = sys.stdin.buffer.read(bounds.NOTE * 4 + 1)
        if len(data) > bounds.NOTE * 4:
            raise DataError("stdin: this is more than one note: give a file")
        return Document("stdin", _decoded("stdin", data, encoding_of(encoding)))
    path = Path(name)
    try:
        exists = bool(name.strip()) and path.exists()
    except (OSError, ValueError):  # longer than a path may be
        exists = False
    if not exists:
        short = name if len(name) <= _NAME else f"{name[:_NAME]}…"
        raise ParameterError(
            f"{short}: no such file or folder; for text use `text` or -"
        )
    return path


def _decoded(source: str, data: bytes, encoding: str) -> str:
    try:
        return encodings.decode(data, encoding)[0]
    except DataError as error:
        raise DataError(f"{source}: {error}") from None


def require_notes(
    path: Path, format: str | None, column: str | None, encoding: str
) -> str | None:
    """Return the format of a table of notes, of JSON lines or of text files.

    Returns:
        One of the formats of `data.notes`, or None for a folder, whose reader
        recognises it.

    Raises:
        DataError: The file is of no known format. Text must end in .txt.
        ConfigError: The format is of annotated corpora alone.
    """
    if format is not None:
        if format not in NOTE_FORMATS:
            raise ConfigError(
                f"format {format!r} is none of notes: {nearest(format, NOTE_FORMATS)}"
            )
        return format
    if path.is_dir():
        return None
    kind = guess_notes(path, column, encoding_of(encoding))
    if kind == "text" and not _is_text_name(path):
        tables = ", ".join(name for name in NOTE_FORMATS if name != "text")
        raise DataError(
            f"{path}: cannot tell the format: let the name of a text end in .txt, or name the "
            f"format: one of {tables}, or of the annotated corpora {', '.join(sorted(FORMATS))}"
        )
    return kind


def _is_text_name(path: Path) -> bool:
    return unpacked_name(path).suffix.lower() in _TEXT


# ---- how a path is read --------------------------------------------------------------

Reader = Callable[[Problems], Iterable[Document]]


def _reader(
    path: Path, format: str | None, column: str | None, named: str
) -> tuple[str, Reader]:
    """The reader of a file or folder that exists; the format of a corpus that is held,
    or ""."""

    def read_table(problems: Problems) -> Iterator[Document]:
        kind = require_notes(
            path, format if format in NOTE_FORMATS else None, column, named
        )
        notes = read_notes(
            path, kind, column=column, encoding=named, problems=problems, exact=True
        )
        return map(document_of, notes)

    def read_lines(problems: Problems) -> Iterator[Document]:
        with reading_as(named):
            files = find_corpus_files(path, accepts_jsonl, "JSONL")
        return chain.from_iterable(
            _json_documents(file, named, problems) for file in files
        )

    if format == "jsonl" and column is None:
        return "", read_lines
    if column is not None or (format in NOTE_FORMATS and format not in FORMATS):
        return "", read_table
    found = format
    if found is None:
        try:
            with reading_as(named):
                found = guess_format(path)
        except DataError:
            if path.is_dir() and not _holds_notes_alone(path, named):
                raise
            require_notes(path, None, None, named)
            return "", read_table
    if found in _STREAMED or (found == "parquet" and _has_text(path)):
        return "", read_table
    if found == "jsonl":
        return "", read_lines if _has_key_text(path, named) else read_table
    return found, _held_corpus(path, found, named)


def _held_corpus(path: Path, format: str, named: str) -> Reader:
    """The reader of an annotated corpus, which is read once and held."""
    held: list[tuple[tuple[Document, ...], Problems]] = []

    def read(problems: Problems) -> Iterator[Document]:
        if not held:
            held.append(examine(path, format, named))
        documents, own = held[0]
        problems.listed += own.listed
        problems.counts.update(own.counts)
        yield from documents
        # A text without an annotation file is a note too, though no gold without
        # mentions.
        with reading_as(named):
            bare = [
                (text, read_text(text, empty=True, exact=True))
                for text in own.unannotated
            ]
        for file, text in bare:
            yield Document(file.relative_to(path).with_suffix("").as_posix(), text)

    return read


def _holds_notes_alone(folder: Path, named: str) -> bool:
    """Whether a folder, whose files are of no one annotated format, is one of notes.

    Beside a table there may be a licence or the like. Where there is none, all files
    must be texts: nothing is passed over in silence.
    """
    files = list_files(folder, recursive=True)
    if files and all(map(_is_text_name, files)):
        return True
    for file in files:
        try:
            if not _is_text_name(file) and guess_notes(file, None, named) != "text":
                return True
        except DataError:
            continue
    return False


def _has_text(path: Path) -> bool:
    """Whether the tables have a column of text, and not tokens alone."""
    files = (
        [path]
        if path.is_file()
        else list(filter(parquet.accepts, list_files(path, recursive=True)))
    )
    return all("text" in map(str.lower, parquet.column_names(file)) for file in files)


def _has_key_text(path: Path, named: str) -> bool:
    """Whether the first record calls its text "text", as this project's own JSON lines
    do."""
    file = path
    with reading_as(named):
        if path.is_dir():
            file = find_corpus_files(path, accepts_jsonl, "JSONL")[0]
        try:
            record = parse_json_line(read_first_line(file))
        except DataError:
            return True  # its reader says what is wrong
    return not isinstance(record, dict) or "text" in record


def document_of(note: Note) -> Document:
    """Return a note as a document: its own id, its patient, and visit and category in
    `meta`."""
    about = {"visit": note.visit, "category": note.category}
    meta = {name: value for name, value in about.items() if value is not None}
    return Document(note.own_id or note.id, note.text, (), note.patient, meta=meta)


def _json_documents(path: Path, named: str, problems: Problems) -> Iterator[Document]:
    """The documents of JSON lines, each as its line is read."""
    with problems.collect("file", path):
        for found in stream_file(path, problems, named, prepare=with_standard_keys):
            yield found.document
