"""doccano's JSONL, as it imports and exports mentions; `jsonl` reads it too.

    {"text": "Had a rash.", "label": [[6, 10, "ADE"]], "id": "n1"}

A mention in pieces is written as one stretch; what a document has besides stands in
keys of its own, which doccano keeps with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from fednotes.core.types import Document
from fednotes.data.formats import jsonl
from fednotes.data.formats.jsonl import read as read
from fednotes.data.formats.prodigy import accepts as accepts


def write(documents: Iterable[Document], path: str | os.PathLike[str]) -> None:
    """Writes a line a document."""
    jsonl.write_lines(documents, path, _record)


def _record(document: Document) -> dict[str, Any]:
    labels = [[span.start, span.end, span.label] for span in document.spans]
    return {
        "text": document.text,
        "label": labels,
        "id": document.id,
    } | jsonl.other_fields(document)
