"""Read the documents of a file or folder in any format."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from fednotes.core.errors import ConfigError, nearest
from fednotes.core.types import Document
from fednotes.data.encodings import AUTO, reading_as
from fednotes.data.formats import _registry
from fednotes.data.formats.gathering import DERIVED_ID, ReadDocument
from fednotes.data.formats.problems import OnError, Problems


def read(
    path: str | os.PathLike[str],
    format: str | None = None,
    on_error: OnError = "refuse",
    encoding: str = AUTO,
) -> tuple[Document, ...]:
    """Return the documents of a file or folder, with unique ids.

    Args:
        path: The file or folder.
        format: A key of `FORMATS`; None guesses it from the content.
        on_error: "skip" leaves out what cannot be used; `examine` also counts it.
        encoding: The encoding of files that have no byte-order mark and are not UTF-8,
            such as "cp1252".

    Raises:
        DataError: Something is wrong with the files, or nothing usable is left of them;
            the error names each problem by its line.
        ConfigError: There is no such format.
    """
    documents, problems = examine(path, format, encoding)
    problems.refuse(on_error, documents)
    return documents


def examine(
    path: str | os.PathLike[str], format: str | None = None, encoding: str = AUTO
) -> tuple[tuple[Document, ...], Problems]:
    """Return what can be used of a file or folder, and what is wrong with the rest.

    Args:
        path: The file or folder.
        format: As in `read`.
        encoding: As in `read`.

    Raises:
        DataError: There is no such path, or no format fits.
        ConfigError: There is no such format.
    """
    known = _registry.FORMATS
    if format is not None and format not in known:
        raise ConfigError(f"unknown format {format!r}: {nearest(format, known)}")
    problems = Problems()
    with reading_as(encoding):
        name = format or _registry.guess_format(path)
        documents = known[name].read(Path(path), problems)
    return documents, problems


def stream(
    path: str | os.PathLike[str],
    problems: Problems,
    format: str | None = None,
    encoding: str = AUTO,
) -> Iterator[Document]:
    """Yield the documents of a file or folder, one by one if the format permits it.

    A document keeps its id even if an earlier one has the same; this is noted.

    Args:
        path: The file or folder.
        problems: Collects what is wrong.
        format: As in `read`.
        encoding: As in `read`.

    Raises:
        DataError: There is no such path, or no format fits.
        ConfigError: There is no such format.
    """
    with reading_as(encoding):
        name = format or _registry.guess_format(path)
    module = _registry.FORMATS.get(name)
    if module is None or not hasattr(module, "stream"):
        documents, problems_of_all = examine(path, name, encoding)
        problems.include(problems_of_all)
        yield from documents
        return
    seen = set[int]()
    stream_of_format = module.stream(Path(path), problems)
    for document, file, line, _ in _with_encoding(stream_of_format, encoding):
        if line != DERIVED_ID:
            key = hash(document.id)
            if key in seen:
                problems.note_repeated_id(file, line)
            seen.add(key)
        yield document


def _with_encoding(
    read_documents: Iterator[ReadDocument], encoding: str
) -> Iterator[ReadDocument]:
    """Yield documents; the encoding is set while the reader reads, and not in between."""
    while True:
        with reading_as(encoding):
            item = next(read_documents, None)
        if item is None:
            return
        yield item
