"""BigBIO's schema for knowledge bases, `bigbio_kb`: JSON, JSONL or table rows.

    {"id": "1", "document_id": "n1", "passages": [{"type", "text": ["…"], "offsets":
     [[0, 11]]}], "entities": [{"id", "type", "text": ["rash"], "offsets": [[6, 10]],
     "normalized": []}], …}

Tables are read by `parquet`. Events, coreferences, relations, the entities' concepts,
and any passages other than a single one of type "note" are stored in `meta["bigbio"]`.
They are written back as long as mentions and text are unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from fednotes.core.parsing import as_mapping
from fednotes.core.types import Document
from fednotes.data.formats import bioc, jsonl
from fednotes.data.formats.folders import find_corpus_files
from fednotes.data.formats.gathering import ReadDocument, gather_documents, stream_files
from fednotes.data.formats.json_files import read_json_keys, read_json_rows
from fednotes.data.formats.mentions import require_short_mentions
from fednotes.data.formats.problems import Problems

LOOSE = 0
_LINKED = ("events", "coreferences", "relations")


# ---- reading -------------------------------------------------------------------------


def accepts(path: Path) -> bool:
    """Return whether the first object has the keys of a document with passages."""
    return {"document_id", "passages"} <= read_json_keys(path)


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """Return a document per row; passages are placed at their offsets."""
    return gather_documents(
        find_corpus_files(path, accepts, "BigBIO"), _read_file, problems
    )


def stream(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    """Yield the documents of `read` one by one."""
    files = find_corpus_files(path, accepts, "BigBIO")
    return stream_files(files, _read_file, problems)


def _read_file(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    """Yield the documents of a file."""
    return jsonl.parse_items(read_json_rows(path), "row", to_record, path, problems)


def to_record(row: Any, context: jsonl.MentionContext) -> dict[str, Any]:
    """Return a row of BigBIO as a record of JSONL.

    Args:
        row: The row.
        context: Opens a context that leaves out a mention whose reading fails in it.
    """
    passages = bioc.require_objects(row, "passages")
    text = _join_passages(passages)
    entities = bioc.require_objects(row, "entities")
    spans = []
    for entity in entities:
        with context():
            spans.append(
                jsonl.make_mention(
                    text,
                    entity.get("offsets") or (),
                    entity.get("type"),
                    " ".join(entity.get("text") or ()),
                )
            )
    record: dict[str, Any] = {
        "id": row.get("document_id"),
        "text": text,
        "spans": spans,
    }
    details: dict[str, Any] = {name: row[name] for name in _LINKED if row.get(name)}
    if details or any(entity.get("normalized") for entity in entities):
        details["entities"] = entities
    if len(passages) > 1 or any(not _is_plain_note(passage) for passage in passages):
        details["passages"] = [
            {key: value for key, value in passage.items() if key != "text"}
            for passage in passages
        ]
    if details:
        record["meta"] = {"bigbio": details}
    return record


def _is_plain_note(passage: Mapping[str, Any]) -> bool:
    """Return whether a passage is a note in one piece, as `write` makes it."""
    return passage.get("type") == "note" and len(passage["text"]) <= 1


def _join_passages(passages: Iterable[Mapping[str, Any]]) -> str:
    """Return the text of a document; see `bioc.join_passages`."""
    return bioc.join_passages(
        {"offset": offsets[0], "text": text}
        for passage in passages
        for text, offsets in zip(passage["text"], passage["offsets"], strict=True)
    )


# ---- writing -------------------------------------------------------------------------


def write(documents: Iterable[Document], path: str | os.PathLike[str]) -> None:
    """Write each document as a row on its own line."""
    numbers = count()
    jsonl.write_lines(
        documents, path, lambda document: _to_row(document, next(numbers))
    )


def _to_row(document: Document, number: int) -> dict[str, Any]:
    """Return a document as a row of BigBIO.

    Args:
        document: The document.
        number: Its number, for ids of entities and passages.
    """
    require_short_mentions(document)
    text = document.text
    details = as_mapping(document.meta.get("bigbio"))
    entities = [
        {
            "id": f"{number}_T{n}",
            "type": span.label,
            "text": [text[start:end] for start, end in span.pieces],
            "offsets": [list(piece) for piece in span.pieces],
            "normalized": [],
        }
        for n, span in enumerate(document.spans)
    ]
    linked: dict[str, Any] = {name: [] for name in _LINKED}
    if details:
        read_entities = list(details.get("entities", ()))
        if [_describe_place(e) for e in entities] == [
            _describe_place(e) for e in read_entities
        ]:
            entities = read_entities
            linked = {name: details.get(name, []) for name in _LINKED}
    passages = [
        {**passage, "text": [text[start:end] for start, end in passage["offsets"]]}
        for passage in details.get("passages", ())
    ]
    if not passages or _join_passages(passages) != text:
        passages = [
            {
                "id": f"{number}_P",
                "type": "note",
                "text": [text],
                "offsets": [[0, len(text)]],
            }
        ]
    return {
        "id": str(number),
        "document_id": document.id,
        "passages": passages,
        "entities": entities,
        **linked,
    }


def _describe_place(entity: object) -> tuple[Any, ...]:
    """Return the type and the pieces of an entity, to compare entities by."""
    fields: Mapping[str, Any] = as_mapping(entity)
    pieces = sorted(tuple(piece) for piece in fields.get("offsets", ()))
    return fields.get("type"), pieces
