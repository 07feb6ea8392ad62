"""Reading of the documents of a file or folder in any format."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from fednotes.core.types import Document
from fednotes.data.encodings import AUTO, reading_as
from fednotes.data.formats import _registry
from fednotes.data.formats.choices import choosing, extract_format_name
from fednotes.data.formats.gathering import DERIVED_ID, ReadDocument
from fednotes.data.formats.problems import MAX_LISTED, OnError, Problems
from fednotes.data.repeats import Repeats


def read(
    path: str | os.PathLike[str],
    format: str | None = None,
    on_error: OnError = "refuse",
    encoding: str = AUTO,
) -> tuple[Document, ...]:
    """Return the documents of a file or folder, with unique ids.

    Args:
        path: The file or folder.
        format: A key of `FORMATS`, perhaps with a colon and a choice (`choices.py`);
            None guesses it from the content.
        on_error: "skip" leaves out unusable parts; `examine` also counts them.
        encoding: Encoding of files without byte-order mark that are not UTF-8, such as
            "cp1252".

    Raises:
        DataError: The files have problems, or nothing in them is usable; the error
            lists each problem with its line.
        ConfigError: There is no such format.
    """
    documents, problems = examine(path, format, encoding)
    problems.raise_if_refused(on_error, documents)
    return documents


def examine(
    path: str | os.PathLike[str], format: str | None = None, encoding: str = AUTO
) -> tuple[tuple[Document, ...], Problems]:
    """Return the usable documents of a file or folder, and all problems.

    Args:
        path: The file or folder.
        format: As in `read`.
        encoding: As in `read`.

    Raises:
        DataError: There is no such path, or no format matches.
        ConfigError: There is no such format.
    """
    if format is not None:
        _registry.require_format(format, _registry.FORMATS)
    problems = Problems()
    with reading_as(encoding):
        name = format or _registry.guess_format(path)
        with choosing(name):
            documents = _registry.find_format(name).read(Path(path), problems)
    return documents, problems


def stream(
    path: str | os.PathLike[str],
    problems: Problems,
    format: str | None = None,
    encoding: str = AUTO,
) -> Iterator[Document]:
    """Yield the documents of a file or folder, one by one if the format permits it.

    A document keeps its id even if an earlier document has the same id. Repeated ids
    are added to `problems` after the last document.

    Args:
        path: The file or folder.
        problems: Collects the problems.
        format: As in `read`.
        encoding: As in `read`.

    Raises:
        DataError: There is no such path, or no format matches.
        ConfigError: There is no such format.
        FednotesError: The temporary folder is full.
    """
    with reading_as(encoding):
        name = format or _registry.guess_format(path)
    module = _registry.FORMATS.get(extract_format_name(name))
    if module is None or not hasattr(module, "stream"):
        documents, problems_of_all = examine(path, name, encoding)
        problems.include(problems_of_all)
        yield from documents
        return
    with choosing(name):
        stream_of_format = module.stream(Path(path), problems)
    files: dict[Path, int] = {}
    with Repeats() as ids:
        for document, file, line, _ in _read_with_encoding(stream_of_format, encoding):
            if line != DERIVED_ID:
                file_number = files.setdefault(file, len(files))
                ids.add_at(document.id, file_number, line)
            yield document
        files_by_number = list(files)
        for file_number, line in ids.list_places(MAX_LISTED):
            problems.note_repeated_id(files_by_number[file_number], line)


def _read_with_encoding(
    read_documents: Iterator[ReadDocument], encoding: str
) -> Iterator[ReadDocument]:
    """Yield documents; set the encoding while the reader runs, not between them.

    Between two documents, the caller may read other files.
    """
    while True:
        with reading_as(encoding):
            item = next(read_documents, None)
        if item is None:
            return
        yield item
