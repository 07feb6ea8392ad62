"""BigBIO's schema for knowledge bases, `bigbio_kb`: JSON, JSONL or (`parquet`) rows of
a table.

    {"id": "1", "document_id": "n1", "passages": [{"type", "text": ["…"], "offsets":
     [[0, 11]]}], "entities": [{"id", "type", "text": ["rash"], "offsets": [[6, 10]],
     "normalized": []}], …}

Its events, coreferences and relations, its entities' concepts, and passages other than
one of the type "note" are kept in `meta["bigbio"]`; they come out again while mentions
and text are the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from fednotes.core.parsing import mapping
from fednotes.core.types import Document
from fednotes.data.formats import bioc, jsonl
from fednotes.data.formats.folders import find_corpus_files
from fednotes.data.formats.gathering import ReadDocument, gather, stream_files
from fednotes.data.formats.json_files import read_json_keys, read_json_rows
from fednotes.data.formats.problems import Problems

LOOSE = 0
_LINKED = ("events", "coreferences", "relations")


def accepts(path: Path) -> bool:
    """Whether the file's first lines name an entity's document and its passages."""
    return {"document_id", "passages"} <= read_json_keys(path)


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """A document a row; passages lie where their offsets say."""
    return gather(find_corpus_files(path, accepts, "BigBIO"), _read_file, problems)


def stream(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    """Yield what `read` returns, a document at a time."""
    return stream_files(
        find_corpus_files(path, accepts, "BigBIO"), _read_file, problems
    )


def _read_file(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    return jsonl.parse_items(read_json_rows(path), "row", of_row, path, problems)


def of_row(row: Any, noting: jsonl.MentionContext) -> dict[str, Any]:
    """A row as a record of JSONL."""
    given = bioc.objects(row, "passages")
    text, spans = _laid(given), []
    entities = bioc.objects(row, "entities")
    for entity in entities:
        with noting():
            form = " ".join(entity.get("text") or ())
            spans.append(
                jsonl.make_mention(
                    text, entity.get("offsets") or (), entity.get("type"), form
                )
            )
    kept: dict[str, Any] = {name: row[name] for name in _LINKED if row.get(name)}
    if kept or any(entity.get("normalized") for entity in entities):
        kept["entities"] = entities
    if len(given) > 1 or any(
        p.get("type") != "note" or len(p["text"]) > 1 for p in given
    ):
        kept["passages"] = [
            {k: v for k, v in own.items() if k != "text"} for own in given
        ]
    meta = {"meta": {"bigbio": kept}} if kept else {}
    return {"id": row.get("document_id"), "text": text, "spans": spans, **meta}


def _laid(passages: Iterable[Mapping[str, Any]]) -> str:
    return bioc.laid(
        {"offset": offsets[0], "text": text}
        for passage in passages
        for text, offsets in zip(passage["text"], passage["offsets"], strict=True)
    )


def write(documents: Iterable[Document], path: str | os.PathLike[str]) -> None:
    """Writes a row a document, on a line of its own."""
    numbers = count()
    jsonl.write_lines(documents, path, lambda document: _row(document, next(numbers)))


def _row(document: Document, number: int) -> dict[str, Any]:
    text, kept = document.text, mapping(document.meta.get("bigbio"))
    entities = [
        {
            "id": f"{number}_T{n}",
            "type": span.label,
            "text": [text[a:b] for a, b in span.pieces],
            "offsets": [list(piece) for piece in span.pieces],
            "normalized": [],
        }
        for n, span in enumerate(document.spans)
    ]
    if kept and list(map(_place, entities)) == list(
        map(_place, kept.get("entities", ()))
    ):
        entities = list(kept["entities"])
        linked = {name: kept.get(name, []) for name in _LINKED}
    else:
        linked = {name: [] for name in _LINKED}
    passages = [
        {**p, "text": [text[a:b] for a, b in p["offsets"]]}
        for p in kept.get("passages", ())
    ]
    if not passages or _laid(passages) != text:
        whole = {
            "id": f"{number}_P",
            "type": "note",
            "text": [text],
            "offsets": [[0, len(text)]],
        }
        passages = [whole]
    head = {"id": str(number), "document_id": document.id, "passages": passages}
    return {**head, "entities": entities, **linked}


def _place(entity: object) -> tuple[Any, ...]:
    held: Mapping[str, Any] = mapping(entity)
    return held.get("type"), sorted(tuple(piece) for piece in held.get("offsets", ()))
