"""Prodigy's JSONL: tokens, and mentions by characters and by tokens; `jsonl` reads it too.

    {"text", "tokens": [{"text", "start", "end", "id", "ws"}],
     "spans": [{"start", "end", "label", "token_start", "token_end"}], "answer": "accept"}

A mention in pieces is written as one stretch. Where a mention does not fall on the document's
tokens, Prodigy could not show it: tokens are then made that it does fall on.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from fednotes.core.store import write_out
from fednotes.core.types import Document
from fednotes.data.formats import files as corpus
from fednotes.data.formats import jsonl
from fednotes.data.formats.jsonl import read as read


def accepts(path: Path) -> bool:
    """No: `jsonl` is asked."""
    return False


def write(documents: Iterable[Document], path: str | os.PathLike[str]) -> None:
    """Writes a line a document, to be shown by ner.manual or spans.manual."""
    write_out(Path(path), "".join(map(_line, documents)))


def _line(document: Document) -> str:
    starts, ends = ({own[i]: n for n, own in enumerate(document.tokens)} for i in (0, 1))
    tokens = document.tokens
    if not all(s.start in starts and s.end in ends for s in document.spans) or not tokens:
        tokens = tuple((start, end) for start, end, _ in corpus.cut(document))
        starts, ends = ({own[i]: n for n, own in enumerate(tokens)} for i in (0, 1))
    made = jsonl.record(replace(document, tokens=tokens))
    for span in made["spans"]:
        span.pop("fragments", None)
        span |= {"token_start": starts[span["start"]], "token_end": ends[span["end"]]}
    return jsonl.dumped(document, made | {"answer": "accept"}) + "\n"
