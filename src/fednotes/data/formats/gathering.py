"""Collection of the documents of several files, with unique ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fednotes.core import bounds
from fednotes.core.errors import DataError
from fednotes.core.types import Document
from fednotes.core.work import working
from fednotes.data.formats.problems import Problems

DERIVED_ID = -1  # instead of a line: the id was made by the reader


class ReadDocument(NamedTuple):
    """A document and the place where it begins.

    Attributes:
        document: The document.
        path: Its file.
        line: The line of its id, from 1; 0 for a whole file, `DERIVED_ID` for an id
            made by the reader.
        at: The line for messages if `line` is not a line.
    """

    document: Document
    path: Path
    line: int = 0
    at: int = 0


ReadFile = Callable[[Path, Problems], Iterable[ReadDocument]]


def gather_documents(
    files: Iterable[Path],
    read_file: ReadFile,
    problems: Problems,
    kind: str = "file",
) -> tuple[Document, ...]:
    """Return the documents of several files.

    Args:
        files: The files.
        read_file: Returns the documents of a file.
        problems: Collects the problems.
        kind: The kind of item that is left out if a file cannot be read.
    """
    gathered: list[ReadDocument] = []
    types = set[str]()
    with working("reading documents") as count:
        for file in files:
            with problems.collecting(kind, file):
                documents = keep_within_bounds(
                    read_file(file, problems), problems, types
                )
                gathered += list(count.each(documents))
    return rename_repeated_ids(gathered, problems)


def stream_files(
    files: Iterable[Path],
    read_file: ReadFile,
    problems: Problems,
    kind: str = "file",
) -> Iterator[ReadDocument]:
    """Yield the documents of several files while they are read; ids may repeat.

    Args:
        files: The files.
        read_file: Yields the documents of a file.
        problems: Collects the problems.
        kind: The kind of item that is left out, from the error on, if a file cannot be
            read.
    """
    types = set[str]()
    with working("reading documents") as count:
        for file in files:
            with problems.collecting(kind, file):
                yield from count.each(
                    keep_within_bounds(read_file(file, problems), problems, types)
                )


def keep_within_bounds(
    read_documents: Iterable[ReadDocument], problems: Problems, types: set[str]
) -> Iterator[ReadDocument]:
    """Yield the documents of usable size.

    Args:
        read_documents: The documents.
        problems: Collects the documents that are too large.
        types: The entity types of the corpus so far; those of the documents are added.

    Raises:
        DataError: The corpus has more than `bounds.ENTITY_TYPES` entity types.
    """
    for item in read_documents:
        line = max(item.at, item.line, 0)
        message = _explain_size(item.document)
        if message:
            problems.note("document", item.path, line, message)
            continue
        types.update(span.label for span in item.document.spans)
        if len(types) > bounds.ENTITY_TYPES:
            raise DataError.at(
                item.path,
                line,
                f"more than {bounds.ENTITY_TYPES:,} entity types: check that this "
                "column or field holds types, not text",
            )
        yield item


def _explain_size(document: Document) -> str:
    """Return what a document has too many of, with a remedy; "" if it is usable."""
    amounts = (
        (len(document.text), bounds.NOTE, "characters", "split it into notes"),
        (len(document.spans), bounds.MENTIONS, "mentions", "check that it is one note"),
        (len(document.tokens), bounds.TOKENS, "tokens", "split it into notes"),
    )
    for amount, limit, what, remedy in amounts:
        if amount > limit:
            return f"the document has more than {limit:,} {what}: {remedy}"
    return ""


def make_ids_unique(documents: Iterable[Document]) -> tuple[Document, ...]:
    """Return documents with unique ids; a second `id` becomes `id~2`."""
    items = (ReadDocument(document, Path()) for document in documents)
    return rename_repeated_ids(items, Problems())


def rename_repeated_ids(
    read_documents: Iterable[ReadDocument], problems: Problems
) -> tuple[Document, ...]:
    """Return documents with unique ids; repeated ones become `id~2`, `id~3`.

    Args:
        read_documents: The documents.
        problems: Collects the repeated ids, except those that a reader made up
            (`DERIVED_ID`).
    """
    items = list(read_documents)
    # A new id must not be the id of any document, nor of a later one.
    used = {item.document.id for item in items}
    last_number: dict[str, int] = {}
    documents: list[Document] = []
    for document, path, line, _ in items:
        original = document.id
        if original not in last_number:
            last_number[original] = 1
            documents.append(document)
            continue
        if line != DERIVED_ID:
            problems.note_repeated_id(path, line)
        number = last_number[original] + 1
        while f"{original}~{number}" in used:
            number += 1
        renamed = replace(document, id=f"{original}~{number}")
        used.add(renamed.id)
        last_number[original] = number
        documents.append(renamed)
    return tuple(documents)
