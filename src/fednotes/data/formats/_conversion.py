"""Conversion of corpora from one format to another."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from fednotes.core.errors import DataError, FednotesError, MissingExtra
from fednotes.core.settings import require_path
from fednotes.core.types import Document, Span
from fednotes.data.encodings import AUTO
from fednotes.data.formats import _registry
from fednotes.data.formats._reading import examine
from fednotes.data.formats._writing import count_losses, write
from fednotes.data.formats.problems import OnError, Problems


class Conversion(NamedTuple):
    """The result of a conversion.

    Attributes:
        documents: Number of documents that were written.
        lost: Counts of what the new format cannot represent, by kind.
        problems: The problems found while reading.
    """

    documents: int
    lost: Counter[str]
    problems: Problems


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    to: str,
    format: str | None = None,
    *,
    allow_loss: bool = False,
    on_error: OnError = "refuse",
    encoding: str = AUTO,
) -> Conversion:
    """Read a corpus and write it in another format.

    Args:
        source: The file or folder to read.
        out: The new file or folder.
        to: The format to write.
        format: The format of `source`; None guesses it from the content.
        allow_loss: Whether to write even if the format cannot represent everything.
        on_error: "skip" leaves out unreadable parts.
        encoding: Encoding of files without byte-order mark that are not UTF-8.

    Raises:
        DataError: The corpus cannot be read, or something would be lost (`LossyError`).
        ConfigError: There is no such format, or it cannot be written.
        FednotesError: `out` exists, cannot be written, or lies in `source`.
    """
    source = require_path(source, "a corpus")
    out = require_path(out, "a path to write")
    if Path(os.path.realpath(out)).is_relative_to(os.path.realpath(source)):
        raise FednotesError(
            f"{out} is inside {source}, the input: choose a place outside it"
        )
    documents, problems = examine(source, format, encoding)
    problems.raise_if_refused(on_error, documents)
    if not documents:
        raise DataError(f"{source} contains no documents: nothing was written")
    lost = write(documents, out, to, allow_loss=allow_loss, ignored=problems.ignored)
    return Conversion(len(documents), lost, problems)


_RASH = (Span(4, 8, "ADE"),)
# For each feature, a document with little else.
_PROBES = {
    "text as it is": Document("a", "Had rash,\r\n\tno fever 😀.\u0301", _RASH),
    "ids": Document("ward 7/a", "Had rash", _RASH),
    "overlapping": Document("a", "Had rash", (Span(0, 8, "X"), *_RASH)),
    "in pieces": Document("a", "Had a rash", (Span(0, 10, "ADE", ((0, 3), (6, 10))),)),
    "confidences": Document("a", "Had rash", (Span(4, 8, "ADE", (), 0.5),)),
    "patient": Document("a", "Had rash", _RASH, patient="P-7"),
    "codes, meta": Document("a", "Had rash", _RASH, codes=("E11",), meta={"b": 1}),
    "sentences, tokens": Document(
        "a", "Had rash", _RASH, sentences=((0, 8),), tokens=((0, 3), (4, 8))
    ),
}


def make_format_table() -> list[dict[str, str]]:
    """Return a row for each format, with the features that it preserves.

    Each feature is tested with a small document. "?" means that a package that the
    format needs is not installed.
    """
    writable = _registry.list_writable_formats()
    rows = []
    for name in sorted(_registry.FORMATS):
        if name not in writable:
            rows.append({"format": name, "written": "no"})
            continue
        row = {"format": name, "written": "yes"}
        for feature, document in _PROBES.items():
            try:
                row[feature] = "no" if count_losses([document], name) else "yes"
            except MissingExtra:
                row[feature] = "?"
        rows.append(row)
    return rows
