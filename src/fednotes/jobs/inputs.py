"""Open the inputs of a saved model: files, tables of notes, stdin or a text.

    inputs = open_inputs("NOTEEVENTS.csv.gz")
    inputs.require_readable()      # raises an error before anything is predicted
    for document in inputs: …      # one note at a time

Tables and JSON lines are never completely in memory. Annotated corpora (such as brat
and CoNLL) are.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from fednotes.core import bounds
from fednotes.core.errors import DataError, ParameterError
from fednotes.core.types import Document
from fednotes.data import encodings
from fednotes.data.encodings import AUTO, resolve_encoding
from fednotes.data.formats import FORMATS, require_format
from fednotes.data.formats.problems import OnError, Problems, is_refused
from fednotes.data.notes import FORMATS as NOTE_FORMATS
from fednotes.data.notes import NoteDatabase, NotePlace, make_note_place
from fednotes.jobs.input_readers import Reader, choose_reader

_MAX_LENGTH = 100  # maximum length of a path in a message
_MAX_BYTES = 4 * bounds.NOTE  # a character has up to four bytes


class Inputs:
    """Documents of one source.

    Each iteration reads the source from its beginning, one note at a time.

    Attributes:
        where: Name of the source in messages; a database's has no password.
        problems: The unusable data of the last iteration.
        holds_all_documents: Whether all documents are in memory at once.
    """

    def __init__(
        self,
        where: str,
        read: Reader,
        on_error: OnError = "refuse",
        *,
        holds_all_documents: bool = False,
        database: NoteDatabase | None = None,
        column: str | None = None,
        id_column: str | None = None,
    ) -> None:
        self.where = where
        self.holds_all_documents = holds_all_documents
        self.problems = Problems()
        self._read = read
        self._refuses = is_refused(on_error)
        self._database = database
        self._column = column
        self._id_column = id_column
        self._number: int | None = None

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents.

        Raises:
            DataError: Some data are unusable; with on_error = "skip", all of them.
        """
        self.problems = Problems()
        is_empty = True
        for document in self._read(self.problems):
            if self._refuses and self.problems.listed:
                break
            is_empty = False
            yield document
        self._require_usable(self.problems, is_empty=is_empty)

    def read_all(self) -> tuple[Document, ...]:
        """Return all documents at once.

        Raises:
            DataError: Something cannot be used; the error lists all of it.
        """
        self.problems = Problems()
        documents = tuple(self._read(self.problems))
        self._require_usable(self.problems, is_empty=not documents)
        return documents

    def _require_usable(self, problems: Problems, *, is_empty: bool) -> None:
        """Raise DataError if data are unusable and must not be, or all are."""
        if problems.listed and (self._refuses or is_empty):
            raise DataError.of(problems.listed, problems.number)

    def require_readable(self) -> None:
        """Read the source once, unless unusable data are skipped.

        Prediction takes far longer than reading. A file that ends in the middle of a
        row is therefore refused before the first prediction. A database keeps its rows
        complete, so only its columns are checked.

        Raises:
            DataError: Something cannot be used; the error lists all of it.
        """
        if self._database is not None:
            self._database.require_readable(self._column, self._id_column)
            return
        if not self._refuses:
            return
        problems = Problems()
        number = 0
        for _ in self._read(problems):
            number += 1
        problems.raise_if_refused()
        self._number = number

    def count(self) -> int | None:
        """Return the number of documents, for showing how far work is.

        None if it is unknown: a file is not read once more for it.

        Raises:
            DataError: The database cannot be read.
        """
        if self._database is not None:
            return self._database.count_notes()
        return self._number


def open_inputs(
    name: str | NoteDatabase,
    text: str | None = None,
    on_error: OnError = "refuse",
    *,
    format: str | None = None,
    column: str | None = None,
    id_column: str | None = None,
    encoding: str = AUTO,
) -> Inputs:
    """Return the documents of a file, a folder or a database, of stdin, or of a text.

    Args:
        name: A path, the address of a database, or `-` for stdin.
        text: A text instead of a path.
        on_error: "skip" leaves out unusable data, and counts them.
        format: A format of corpora or of notes; recognised if it is None.
        column: The column of a table, or the key of JSON lines, that holds the text.
        id_column: The column of a table, or the key of JSON lines, with the notes' ids.
        encoding: Encoding of files without a byte-order mark that are not UTF-8.

    Raises:
        DataError: There is no such path, or its format is unknown.
        ConfigError: A parameter has an impossible value.
    """
    encoding = resolve_encoding(encoding)
    if format is not None:
        require_format(format, {*FORMATS, *NOTE_FORMATS})
    source = find_source(name, text, encoding)
    if isinstance(source, Document):
        read = partial(_yield_document, source)
        return Inputs(source.id, read, on_error, holds_all_documents=True)
    if isinstance(source, NoteDatabase) and format is not None:
        raise ParameterError(f"{source}: `format` is for files: leave it out")
    reader = choose_reader(source, format, column, encoding, id_column)
    return Inputs(
        str(source),
        reader.read,
        on_error,
        holds_all_documents=reader.holds_all_documents,
        database=source if isinstance(source, NoteDatabase) else None,
        column=column,
        id_column=id_column,
    )


def _yield_document(document: Document, _problems: Problems) -> Iterator[Document]:
    """Yield one document; a `Reader` once the document is bound."""
    yield document


# ---- where the source is -------------------------------------------------------------


def find_source(
    name: str | NoteDatabase, text: str | None, encoding: str = AUTO
) -> NotePlace | Document:
    """Return a text, or that of stdin, as a document; otherwise a place of notes.

    A returned path exists. A database is not opened.

    Args:
        name: A path, the address of a database, or `-` for stdin.
        text: A text instead of a path.
        encoding: Encoding of stdin, if it has no byte-order mark and is not UTF-8.

    Raises:
        ParameterError: Both a path and a text are given, the text is blank, or the path
            does not exist.
        DataError: The text is too long, or is not in this encoding.
    """
    if text is not None:
        if name != "-":
            raise ParameterError("give a path or `text`, not both")
        if not text.strip():
            raise ParameterError("`text` is empty: give the text of a note")
        return Document("text", _decode("the text", os.fsencode(text), AUTO))
    if name == "-":
        data = sys.stdin.buffer.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise DataError("stdin: too large for a single note: give a file")
        return Document("stdin", _decode("stdin", data, resolve_encoding(encoding)))
    path = make_note_place(name)
    if isinstance(path, NoteDatabase):
        return path
    name = str(name)
    if not name.strip() or not _is_existing(path):
        short = name if len(name) <= _MAX_LENGTH else f"{name[:_MAX_LENGTH]}…"
        raise ParameterError(
            f"{short}: no such file or folder: give the text itself in `text`, or - "
            "for stdin"
        )
    return path


def name_of_notes(value: object) -> str | NoteDatabase:
    """Return the name of a path of notes, or a database, for `open_inputs`.

    Raises:
        ConfigError: The value is neither.
    """
    place = make_note_place(value)
    return place if isinstance(place, NoteDatabase) else str(place)


def _is_existing(path: Path) -> bool:
    """Return whether there is a file or folder at a path."""
    try:
        return path.exists()
    except (OSError, ValueError):  # the name is too long for a path
        return False


def _decode(source: str, data: bytes, encoding: str) -> str:
    """Return bytes as text.

    Args:
        source: What the bytes are, for the message.
        data: The bytes.
        encoding: Their encoding, if they are not UTF-8 and have no byte-order mark.

    Raises:
        DataError: The bytes are not text in this encoding.
    """
    try:
        return encodings.decode_text(data, encoding)[0]
    except DataError as error:
        raise DataError(f"{source}: {error}") from None
