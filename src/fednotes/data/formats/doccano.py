"""doccano's JSONL, as it imports and exports mentions; `jsonl` reads it too.

    {"text": "Had a rash.", "label": [[6, 10, "ADE"]], "id": "n1"}

A mention in pieces is written as one stretch; what a document has besides stands in keys of its
own, which doccano keeps with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from fednotes.core.store import write_out
from fednotes.core.types import Document
from fednotes.data.formats import jsonl
from fednotes.data.formats.jsonl import read as read
from fednotes.data.formats.prodigy import accepts as accepts


def write(documents: Iterable[Document], path: str | os.PathLike[str]) -> None:
    """Writes a line a document."""
    write_out(Path(path), "".join(map(_line, documents)))


def _line(document: Document) -> str:
    labels = [[span.start, span.end, span.label] for span in document.spans]
    made = {"text": document.text, "label": labels, "id": document.id, **jsonl.rest(document)}
    return jsonl.dumped(document, made) + "\n"
