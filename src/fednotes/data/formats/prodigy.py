"""Prodigy's JSONL: tokens, and mentions by characters and by tokens; `jsonl` reads it
too.

    {"text", "tokens": [{"text", "start", "end", "id", "ws"}], "spans": [{"start",
     "end", "label", "token_start", "token_end"}], "answer": "accept"}

A mention in pieces is written as one stretch. Where a mention does not fall on the
document's tokens, Prodigy could not show it: tokens are then made that it does fall on.
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


def accepts(path: Path) -> bool:
    """No: `jsonl` is asked."""
    return False


def write(documents: Iterable[Document], path: str | os.PathLike[str]) -> None:
    """Writes a line a document, to be shown by ner.manual or spans.manual."""
    jsonl.write_lines(documents, path, _record)


def _record(document: Document) -> dict[str, Any]:
    tokens = document.tokens
    edges = [{own[i] for own in tokens} for i in (0, 1)]
    if not tokens or not all(
        s.start in edges[0] and s.end in edges[1] for s in document.spans
    ):
        tokens = tuple((start, end) for start, end, _ in cut_into_words(document))
    starts, ends = ({own[i]: n for n, own in enumerate(tokens)} for i in (0, 1))
    made = jsonl.to_record(replace(document, tokens=tokens))
    for span in made["spans"]:
        span.pop("fragments", None)
        span |= {"token_start": starts[span["start"]], "token_end": ends[span["end"]]}
    return made | {"answer": "accept"}
