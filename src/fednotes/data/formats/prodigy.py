"""Prodigy's JSONL, with mentions by characters and by tokens; `jsonl` reads it.

    {"text", "tokens": [{"text", "start", "end", "id", "ws"}], "spans": [{"start",
     "end", "label", "token_start", "token_end"}], "answer": "accept"}

A mention of several pieces is written as one stretch. Prodigy cannot display mentions
that begin or end within a token; a document with such a mention gets other tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fednotes.core.types import Document
from fednotes.data.formats import jsonl
from fednotes.data.formats.jsonl import read as read
from fednotes.data.formats.mentions import cut_into_words


def accepts(path: Path) -> bool:  # noqa: ARG001 - the form of a format
    """Return False, since `jsonl` reads these files."""
    return False


def write(documents: Iterable[Document], path: str | os.PathLike[str]) -> None:
    """Write a line per document, for ner.manual or spans.manual."""
    jsonl.write_lines(documents, path, _to_record)


def _to_record(document: Document) -> dict[str, Any]:
    """Return a document as a record of Prodigy."""
    tokens = document.tokens
    starts = {start for start, _ in tokens}
    ends = {end for _, end in tokens}
    if not tokens or not all(
        span.start in starts and span.end in ends for span in document.spans
    ):
        tokens = tuple((start, end) for start, end, _ in cut_into_words(document))
    token_at_start = {start: number for number, (start, _) in enumerate(tokens)}
    token_at_end = {end: number for number, (_, end) in enumerate(tokens)}
    record = jsonl.to_record(replace(document, tokens=tokens))
    for span in record["spans"]:
        span.pop("fragments", None)
        span["token_start"] = token_at_start[span["start"]]
        span["token_end"] = token_at_end[span["end"]]
    record["answer"] = "accept"
    return record
