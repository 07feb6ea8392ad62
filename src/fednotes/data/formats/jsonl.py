"""JSONL of Prodigy, doccano and this project: one JSON object per line.

    Prodigy   {"text", "spans": [{"start", "end", "label"}],
               "tokens": [{"start", "end", …}]}
    doccano   {"text", "label" or "labels": [[start, end, "X"]]}
    doccano   {"text", "entities": [{"start_offset", "end_offset", "label"}]}

The project's own form is Prodigy's with every field of a `Document`, so nothing is
lost. Other keys of a record are stored in `meta`. `parse_record` converts the JSON of
all formats to checked documents; `list_other_fields` returns the fields that formats
store besides text and mentions.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from pathlib import Path
from sys import intern
from typing import Any

from fednotes.core import bounds
from fednotes.core.errors import DataError
from fednotes.core.store import write_out
from fednotes.core.types import Document, Offsets, Span
from fednotes.data.encodings import get_user_encoding
from fednotes.data.formats.files import open_text, read_bounded_lines, read_first_line
from fednotes.data.formats.folders import find_corpus_files
from fednotes.data.formats.gathering import (
    DERIVED_ID,
    ReadDocument,
    gather_documents,
    stream_files,
)
from fednotes.data.formats.json_files import find_text_key, parse_json_line
from fednotes.data.formats.mentions import has_form, require_in_text
from fednotes.data.formats.problems import Problems
from fednotes.data.text import merge_overlapping

# Keys of spans. Those of the second group have another meaning in a record that has a
# key of the first.
_SPAN_KEYS = (("spans", "entities"), ("labels", "label"))
_OTHER_FILES = {"state.json", "dataset_info.json", "dataset_dict.json"}  # of `datasets`
_OTHER_FIELDS = ("patient", "codes", "meta", "sentences", "tokens")
_DOCUMENT_KEYS = {"id", "text", *_OTHER_FIELDS}

# Opens a context in which a DataError means that a mention is left out.
MentionContext = Callable[[], AbstractContextManager[object]]


# ---- reading -------------------------------------------------------------------------


def accepts(path: Path) -> bool:
    """Return whether the first line begins a JSON object, or the suffix is .jsonl."""
    if path.name in _OTHER_FILES:
        return False
    return path.suffix == ".jsonl" or read_first_line(path).lstrip().startswith("{")


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """Return a document per line; its id is the record's, or `<file>:<line>`.

    Records that an annotator rejected or ignored (Prodigy's "answer") are left out.
    Invalid JSON, offsets outside the text and other invalid values are added to
    `problems` with their lines.
    """
    return gather_documents(_find_files(path), stream_file, problems)


def stream(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    """Yield the documents of `read` one by one."""
    return stream_files(_find_files(path), stream_file, problems)


def _find_files(path: Path) -> list[Path]:
    """Return the files of a corpus that have this format."""
    return find_corpus_files(path, accepts, "JSONL")


def stream_file(
    path: Path,
    problems: Problems,
    user_encoding: str | None = None,
    prepare: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> Iterator[ReadDocument]:
    """Yield the documents of a file while its lines are read.

    Args:
        path: The file.
        problems: Collects the problems, as in `read`.
        user_encoding: The user-specified encoding, or "auto"; None uses that of
            `encodings.reading_as`.
        prepare: Converts a record before it is parsed.

    Raises:
        DataError: The file is empty, or all its records are marked as rejected.
    """
    records = 0
    documents = 0
    problems_before = problems.number
    encoding = get_user_encoding() if user_encoding is None else user_encoding
    with open_text(path, encoding) as file:
        for number, line in enumerate(read_bounded_lines(file, path), 1):
            if not line.strip():
                continue
            records += 1
            parsed = _parse_line(line, number, path, problems, prepare)
            documents += len(parsed)
            while parsed:  # popped, so that only the caller has a reference to it
                yield parsed.pop()
    if not documents and problems.number == problems_before:
        message = "the file is empty"
        if records:
            message = "every record is marked as rejected or ignored"
        raise DataError.at(path, 0, message)


def _parse_line(
    line: str,
    number: int,
    path: Path,
    problems: Problems,
    prepare: Callable[[dict[str, Any]], dict[str, Any]],
) -> list[ReadDocument]:
    """Return the document of a line; [] if it is unusable or was rejected.

    Args:
        line: A record as JSON.
        number: The line's number in the file, from 1.
        path: The file.
        problems: Collects the problems.
        prepare: Converts the record before it is parsed.
    """
    documents: list[ReadDocument] = []
    with problems.collecting("line", path, number):
        value = parse_json_line(line)
        if isinstance(value, dict):
            value = prepare(value)
        with problems.collecting("document", path, number):
            document = parse_record(value, path, number, problems)
            if document is not None:
                has_id = value.get("id") is not None
                id_line = number if has_id else DERIVED_ID
                documents.append(ReadDocument(document, path, id_line, number))
    return documents


def parse_items(
    items: Iterable[Any],
    item_name: str,
    to_record: Callable[[Any, MentionContext], dict[str, Any] | None],
    path: Path,
    problems: Problems,
) -> Iterator[ReadDocument]:
    """Yield the documents of a file in another format, one per item.

    Args:
        items: The items.
        item_name: The name of an item in messages; its number from 1 follows.
        to_record: Returns the record of an item, or None to ignore it. Its second
            argument opens a context; if parsing in it fails, that mention is left out.
        path: The file.
        problems: Collects the problems.
    """
    for number, item in enumerate(items, 1):
        prefix = f"{item_name} {number}: "
        with problems.collecting("document", path, 0, prefix):
            context = partial(problems.collecting, "mention", path, 0, prefix)
            try:
                item_record = to_record(item, context)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError):
                raise DataError("its fields are not those of the format") from None
            if not item_record:
                continue
            document = parse_record(item_record, path, number, problems, item_name)
            if document:
                line = DERIVED_ID if item_record.get("id") is None else 0
                yield ReadDocument(document, path, line)


def parse_record(
    value: Any, path: Path, number: int, problems: Problems, item_name: str = ""
) -> Document | None:
    """Return the document of a record; None if an annotator rejected it.

    Invalid mentions are added to `problems` and left out.

    Args:
        value: The record.
        path: The file.
        number: The number of its line, or of the item if `item_name` is set.
        problems: Collects the problems of mentions.
        item_name: The name of an item in messages; "" if records are lines.

    Raises:
        DataError: Anything else is invalid.
    """
    line = 0 if item_name else number
    prefix = f"{item_name} {number}: " if item_name else ""
    if find_text_key(value, "text") is None:
        return None
    text: str = value["text"]
    span_key = _find_span_key(value)
    patient = value.get("patient")
    id = value.get("id")
    codes = tuple(map(str, _require_list(value, "codes")))
    meta = _parse_meta(value, span_key)
    sentences = _parse_stretches(value, "sentences", len(text))
    tokens = _parse_stretches(value, "tokens", len(text))
    spans = []
    for raw_span in value[span_key] if span_key else ():
        with problems.collecting("mention", path, line, prefix):
            spans.append(_parse_span(raw_span, len(text)))
    return Document(
        id=f"{path.stem}:{number}" if id is None else str(id),
        text=text,
        spans=tuple(spans),
        patient=None if patient is None else str(patient),
        codes=codes,
        meta=meta,
        sentences=sentences,
        tokens=tokens,
    )


def _find_span_key(value: Mapping[str, Any]) -> str | None:
    """Return the key of a record's spans; of several, one that is not empty.

    A key that is null counts as absent. Any value other than a list is an error, not a
    record without mentions: it may be a label of the whole document.
    """
    for keys in _SPAN_KEYS:
        present = [key for key in keys if value.get(key) is not None]
        for key in present:
            if not isinstance(value[key], list):
                raise DataError(f'the value of "{key}" is not a list of spans')
        if present:
            return next((key for key in present if value[key]), present[0])
    return None


def _require_list(value: Mapping[str, Any], key: str) -> list[Any]:
    """Return the list at a key of a record; [] without one. Other values are errors."""
    values = value.get(key) or []
    if not isinstance(values, list):
        raise DataError(f'the value of "{key}" is not a list')
    return values


def _parse_stretches(value: Mapping[str, Any], key: str, length: int) -> Offsets:
    """Return sentences or tokens, which must be sorted and must not overlap."""
    stretches = tuple(
        _parse_offsets(stretch, length) for stretch in _require_list(value, key)
    )
    if any(left[1] > right[0] for left, right in pairwise(stretches)):
        raise DataError(f'the offsets in "{key}" are unsorted or overlap')
    return stretches


def _parse_span(value: Any, length: int) -> Span:
    """Return the mention of an object or of [start, end, label]."""
    fields: Mapping[str, Any] = value if isinstance(value, dict) else {}
    label: Any = fields.get("label")
    if isinstance(value, list) and len(value) == 3:
        label = value[2]
    start, end = _parse_offsets(value, length)
    if not isinstance(label, str) or not label:
        raise DataError("a span has no label")
    fragments = _parse_fragments(fields, length)
    if fragments and (fragments[0][0], fragments[-1][1]) != (start, end):
        raise DataError(f"the fragments of a span do not reach from {start} to {end}")
    confidence = fields.get("confidence")
    if confidence is not None and not _is_probability(confidence):
        raise DataError("the confidence of a span is not a number from 0 to 1")
    return Span(start, end, intern(label), fragments, confidence)


def _parse_fragments(fields: Mapping[str, Any], length: int) -> Offsets:
    """Return the offsets of the pieces of a span; () without pieces."""
    pieces = fields.get("fragments", [])
    if not isinstance(pieces, list):
        raise DataError("the fragments of a span are not a list")
    if len(pieces) > bounds.PIECES:
        raise DataError(
            f"a span has more than {bounds.PIECES:,} fragments: check that it is one "
            "mention"
        )
    return tuple(_parse_offsets(piece, length) for piece in pieces)


def _is_probability(value: object) -> bool:
    """Return whether a value is a number from 0 to 1; booleans are not numbers."""
    return type(value) in (int, float) and 0 <= value <= 1  # type: ignore[operator]


def _parse_offsets(value: Any, length: int) -> tuple[int, int]:
    """Return the start and end of a stretch of a text with `length` characters."""
    start: Any = None
    end: Any = None
    if isinstance(value, dict):
        start = value.get("start", value.get("start_offset"))
        end = value.get("end", value.get("end_offset"))
    elif isinstance(value, list) and len(value) >= 2:
        start, end = value[:2]
    if type(start) is not int or type(end) is not int:
        raise DataError("a span, token or sentence has no start and end")
    return require_in_text(start, end, length)


def _parse_meta(value: Mapping[str, Any], span_key: str | None) -> dict[str, Any]:
    """Return a record's meta, with all keys that are not fields of a Document."""
    raw_meta = value.get("meta", {})
    meta = dict(raw_meta) if isinstance(raw_meta, dict) else {"meta": raw_meta}
    for key, other in value.items():
        if key not in _DOCUMENT_KEYS and key != span_key and key not in meta:
            meta[key] = other
    return {key: _freeze(item) for key, item in meta.items()}


def _freeze(value: Any) -> Any:
    """Return a value with tuples instead of lists, since a Document is immutable."""
    if isinstance(value, list):
        return tuple(_freeze(item) for item in value)
    if isinstance(value, dict):
        return {key: _freeze(item) for key, item in value.items()}
    return value


# ---- records of other formats --------------------------------------------------------


def make_mention(
    text: str,
    pieces: Iterable[Any],
    label: object,
    form: object = None,
    confidence: object = None,
) -> dict[str, Any]:
    """Return a mention of a record.

    Args:
        text: The document's text.
        pieces: The start and end of each piece.
        label: The entity type.
        form: The mention's text according to the file; None if it is missing.
        confidence: The confidence of a model.

    Raises:
        DataError: A piece is not in the text, the label is empty or not a string, or
            the form differs from the text.
    """
    offsets = sorted(_parse_offsets(list(piece), len(text)) for piece in pieces)
    if len(offsets) > bounds.PIECES:
        raise DataError(
            f"a mention has more than {bounds.PIECES:,} pieces: check that it is one "
            "mention"
        )
    if not isinstance(label, str) or not label:
        raise DataError("a mention has no type")
    if not offsets:
        raise DataError("a mention has no position in the text")
    merged = merge_overlapping(offsets)
    start = merged[0][0]
    end = merged[-1][1]
    if isinstance(form, str):
        is_there = has_form(text, offsets, form) or has_form(text, [(start, end)], form)
        if not is_there:
            raise DataError(
                f"the text of the mention differs from the document at {start}:{end}"
            )
    mention = {"start": start, "end": end, "label": label, "confidence": confidence}
    if len(merged) > 1:
        mention["fragments"] = [list(piece) for piece in merged]
    return mention


def make_row_finder(rows: Iterable[Any]) -> Callable[[Span], Mapping[str, Any]]:
    """Return a function that finds the row that was stored for a mention.

    Args:
        rows: The stored rows, each with a mention of a record in "span".

    Returns:
        A function of a span. It returns the row of an equal span, each row only once,
        and {} if none is left.
    """
    by_span: defaultdict[Span, list[Mapping[str, Any]]] = defaultdict(list)
    for row in reversed(tuple(rows)):
        raw = row["span"]
        pieces = tuple((start, end) for start, end in raw.get("fragments", ()))
        by_span[Span(raw["start"], raw["end"], raw["label"], pieces)].append(row)

    def take_stored_row(span: Span) -> Mapping[str, Any]:
        """Return the next row of a mention, and forget it."""
        return by_span[span].pop() if by_span[span] else {}

    return take_stored_row


# ---- writing -------------------------------------------------------------------------


def write(documents: Iterable[Document], path: str | os.PathLike[str]) -> None:
    """Write documents from which `read` returns equal ones.

    Sequences in `meta` come back as tuples.

    Raises:
        DataError: The meta of a document cannot be written as JSON.
    """
    write_lines(documents, path, to_record)


def write_lines(
    documents: Iterable[Document],
    path: str | os.PathLike[str],
    to_value: Callable[[Document], Any],
) -> None:
    """Write a JSON value for each document, each on its own line.

    Args:
        documents: The documents.
        path: The file.
        to_value: Returns the value of a document.

    Raises:
        DataError: As `write`.
    """
    lines = [f"{to_json(document, to_value(document))}\n" for document in documents]
    write_out(Path(path), "".join(lines))


def to_json(document: Document, value: Any, *, ascii: bool = False) -> str:
    """Return a document's value as JSON.

    Args:
        document: The document, for messages.
        value: The value.
        ascii: Whether to escape all characters outside ASCII.

    Raises:
        DataError: The meta of the document cannot be written as JSON.
    """
    try:
        return json.dumps(value, ensure_ascii=ascii)
    except (TypeError, ValueError):
        raise DataError(
            f"document {document.id}: its meta cannot be written as JSON"
        ) from None


def to_record(document: Document) -> dict[str, Any]:
    """Return a document in the project's own form, without keys that have no value."""
    spans = []
    for span in document.spans:
        mention: dict[str, Any] = {
            "start": span.start,
            "end": span.end,
            "label": span.label,
        }
        if span.fragments:
            mention["fragments"] = span.fragments
        if span.confidence is not None:
            mention["confidence"] = round(span.confidence, 6)
        spans.append(mention)
    fields = {"id": document.id, "text": document.text, "spans": spans}
    return fields | list_other_fields(document)


def list_other_fields(document: Document) -> dict[str, Any]:
    """Return the other fields of a document as JSON values, without empty ones.

    These are all but id, text and mentions. Tokens have Prodigy's form.
    """
    fields: dict[str, Any] = {name: getattr(document, name) for name in _OTHER_FIELDS}
    fields["meta"] = dict(document.meta)
    fields["tokens"] = [
        {
            "text": document.text[start:end],
            "start": start,
            "end": end,
            "id": number,
            "ws": document.text[end : end + 1] == " ",
        }
        for number, (start, end) in enumerate(document.tokens)
    ]
    return {
        name: value
        for name, value in fields.items()
        if value or (name == "patient" and value is not None)
    }
