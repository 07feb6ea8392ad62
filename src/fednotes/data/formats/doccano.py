"""doccano's JSONL for import and export of mentions; `jsonl` reads it.

    {"text": "Had a rash.", "label": [[6, 10, "ADE"]], "id": "n1"}

A mention of several pieces is written as one stretch. The document's other fields are
in additional keys, which doccano preserves.
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
    """Write a line per document."""
    jsonl.write_lines(documents, path, _to_record)


def _to_record(document: Document) -> dict[str, Any]:
    """Return a document as a record of doccano."""
    return {
        "text": document.text,
        "label": [[span.start, span.end, span.label] for span in document.spans],
        "id": document.id,
        **jsonl.list_other_fields(document),
    }
