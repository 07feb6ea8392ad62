"""JSONL: one JSON object a line, as Prodigy, doccano and this project write it.

    {"text", "spans": [{"start", "end", "label"}], "tokens": [{"start", "end", …}]}   Prodigy
    {"text", "label" or "labels": [[start, end, "X"]]}                                doccano
    {"text", "entities": [{"start_offset", "end_offset", "label"}]}                   doccano

The project's own form is Prodigy's with every field of a `Document`; it loses nothing.
Other keys of a record are kept in `meta`. `of_record` is where all JSON, and what other
formats hold of a document besides text and mentions (`rest`), becomes a checked
Document.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from fednotes.data.encodings import named_encoding
from fednotes.data.formats.files import bounded_lines, open_text, read_first_line
from fednotes.data.formats.folders import find_corpus_files
from fednotes.data.formats.gathering import (
    DERIVED_ID,
    ReadDocument,
    gather,
    stream_files,
)
from fednotes.data.formats.json_files import parse_json_line, text_key
from fednotes.data.formats.mentions import is_far_longer, is_same_text, require_in_text
from fednotes.data.formats.problems import Problems
from fednotes.data.text import merge_overlapping

# Keys that hold spans; those of the second pair mean something else beside one of the
# first.
_SPAN_KEYS = (("spans", "entities"), ("labels", "label"))
# of a `datasets` folder
_NO_CORPUS = {"state.json", "dataset_info.json", "dataset_dict.json"}
_REST = ("patient", "codes", "meta", "sentences", "tokens")
_OWN_KEYS = {"id", "text", *_REST}


def accepts(path: Path) -> bool:
    """Whether the first line begins a JSON object, or the file's name says so."""
    if path.name in _NO_CORPUS:
        return False
    return path.suffix == ".jsonl" or read_first_line(path).lstrip().startswith("{")


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """A document per line; id: the record's, else `<file>:<line>`.

    Records that an annotator rejected or ignored (Prodigy's "answer") are left out.
    Noted, with the line, are bad JSON, offsets outside the text and other wrong values.
    """
    return gather(_files(path), stream_file, problems)


def stream(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    """Yield what `read` returns, a document at a time."""
    return stream_files(_files(path), stream_file, problems)


def _files(path: Path) -> list[Path]:
    return find_corpus_files(path, accepts, "JSONL")


def _of_line(
    line: str,
    number: int,
    path: Path,
    problems: Problems,
    prepare: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> list[ReadDocument]:
    """Return the document of a line; nothing where the line cannot be used or is left
    out.

    Args:
        line: A record of JSON.
        number: The line's number in the file, from 1.
        path: The file.
        problems: Takes note of what is wrong.
        prepare: What is done to a record before it is read.
    """
    found: list[ReadDocument] = []
    with problems.collect("line", path, number):
        record = parse_json_line(line)
        record = prepare(record) if isinstance(record, dict) else record
        with problems.collect("document", path, number):
            document = of_record(record, path, number, problems)
            if document is not None:
                has_id = record.get("id") is not None
                line_of_id = number if has_id else DERIVED_ID
                found.append(ReadDocument(document, path, line_of_id, number))
    return found


def stream_file(
    path: Path,
    problems: Problems,
    named: str | None = None,
    prepare: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> Iterator[ReadDocument]:
    """Yield the documents of a file, each as its line is read.

    Args:
        path: The file.
        problems: Takes note of what is wrong, as in `read`.
        named: The encoding that the user named, or "auto"; None takes that of
            `encodings.reading_as`.
        prepare: What is done to a record before it is read.
    """
    lines = kept = 0
    before = problems.number
    named = named_encoding() if named is None else named
    with open_text(path, named) as file:
        for number, line in enumerate(bounded_lines(file, path), 1):
            if not line.strip():
                continue
            lines += 1
            found = _of_line(line, number, path, problems, prepare)
            kept += len(found)
            while found:  # the caller alone holds the document then
                yield found.pop()
    if not kept and problems.number == before:
        told = (
            "every record is marked as rejected or ignored"
            if lines
            else "the file is empty"
        )
        raise DataError.at(path, 0, told)


def of_record(
    record: Any, path: Path, number: int, problems: Problems, item: str = ""
) -> Document | None:
    """The document of a record, None if it was rejected.

    number: of its line; or its place among the file's items, of which one is called
    `item`. Mentions that are wrong are noted. Raises DataError for what else is wrong.
    """
    line, what = (0, f"{item} {number}: ") if item else (number, "")
    if text_key(record, "text") is None:
        return None
    text: str = record["text"]
    key = _span_key(record)
    patient, given = record.get("patient"), record.get("id")
    rest = (
        None if patient is None else str(patient),
        tuple(map(str, _list(record, "codes"))),
        _meta(record, key),
        _ordered(record, "sentences", len(text)),
        _ordered(record, "tokens", len(text)),
    )
    spans = []
    for value in record[key] if key else ():
        with problems.collect("mention", path, line, what):
            spans.append(_span(value, len(text)))
    return Document(
        f"{path.stem}:{number}" if given is None else str(given),
        text,
        tuple(spans),
        *rest,
    )


Noting = Callable[[], AbstractContextManager[object]]


def of_items(
    items: Iterable[Any],
    item: str,
    parse: Callable[[Any, Noting], dict[str, Any] | None],
    path: Path,
    problems: Problems,
) -> Iterator[ReadDocument]:
    """Yield the documents of a file's items, each called `item` and its number.

    parse: the record of an item, or None for one to pass over; what it does within its
    second argument may fail, and is a mention that is left out then.
    """
    for number, value in enumerate(items, 1):
        told = f"{item} {number}: "
        with problems.collect("document", path, 0, told):
            try:
                record = parse(
                    value, partial(problems.collect, "mention", path, 0, told)
                )
            except (AttributeError, IndexError, KeyError, TypeError, ValueError):
                raise DataError("its parts are not those of the format") from None
            document = record and of_record(record, path, number, problems, item)
            if record and document:
                line = DERIVED_ID if record.get("id") is None else 0
                yield ReadDocument(document, path, line)


def mention(
    text: str,
    pieces: Iterable[Any],
    label: object,
    form: object = None,
    sure: object = None,
) -> dict[str, Any]:
    """A mention of a record. form: its text as another file has it. Raises DataError
    where that is not what the text holds, or the pieces (start, end) or the label are
    none."""
    found = sorted(_offsets(list(piece), len(text)) for piece in pieces)
    if len(found) > bounds.PIECES:
        raise DataError(
            f"a mention has more than {bounds.PIECES:,} pieces: is it one mention?"
        )
    if not found or not isinstance(label, str) or not label:
        raise DataError(
            "a mention has no place in the text" if label else "a mention has no type"
        )
    whole = merge_overlapping(found)
    start, end = whole[0][0], whole[-1][1]
    is_there = not isinstance(form, str) or (
        _holds(text, found, form) or _holds(text, [(start, end)], form)
    )
    if not is_there:
        raise DataError(f"{start}:{end} is not what the text holds there")
    made = {"start": start, "end": end, "label": label, "confidence": sure}
    return made | (
        {"fragments": [list(piece) for piece in whole]} if len(whole) > 1 else {}
    )


def _holds(text: str, pieces: Sequence[tuple[int, int]], form: str) -> bool:
    """Return whether the pieces of a text are a mention's text but for white space."""
    if is_far_longer(pieces, form):
        return False
    return is_same_text(" ".join(text[start:end] for start, end in pieces), form)


def beside(rows: Iterable[Any]) -> Callable[[Span], Mapping[str, Any]]:
    """What was kept beside mentions, as rows with a mention of a record in "span":
    gives the row of an equal span, each once, and {} where there is none."""
    kept: defaultdict[Span, list[Mapping[str, Any]]] = defaultdict(list)
    for row in reversed(tuple(rows)):
        own = row["span"]
        pieces = tuple((start, end) for start, end in own.get("fragments", ()))
        kept[Span(own["start"], own["end"], own["label"], pieces)].append(row)
    return lambda span: kept[span].pop() if kept[span] else {}


def _span_key(record: Mapping[str, Any]) -> str | None:
    """The key that holds the record's spans: of two, the one that is not empty.

    A key that is null counts as absent. One that holds something else is an error, not
    a record without mentions: a document classification is no corpus of mentions.
    """
    for keys in _SPAN_KEYS:
        present = [k for k in keys if record.get(k) is not None]
        wrong = next((k for k in present if not isinstance(record[k], list)), None)
        if wrong:
            raise DataError(f'the key "{wrong}" is no list of spans')
        if present:
            return next((k for k in present if record[k]), present[0])
    return None


def _list(record: Mapping[str, Any], key: str) -> list[Any]:
    value = record.get(key) or []
    if not isinstance(value, list):
        raise DataError(f'the key "{key}" is no list')
    return value


def _ordered(record: Mapping[str, Any], key: str, length: int) -> Offsets:
    """Sentences or tokens, which must come in order and apart."""
    found = tuple(_offsets(value, length) for value in _list(record, key))
    if any(left[1] > right[0] for left, right in pairwise(found)):
        raise DataError(f'the key "{key}" is not in order')
    return found


def _span(value: Any, length: int) -> Span:
    """A mention, as an object or as [start, end, label]."""
    label: Any = None
    if isinstance(value, dict):
        label = value.get("label")
    elif isinstance(value, list) and len(value) == 3:
        label = value[2]
    start, end = _offsets(value, length)
    if not isinstance(label, str) or not label:
        raise DataError("a span has no label")
    pieces = value.get("fragments", []) if isinstance(value, dict) else []
    if not isinstance(pieces, list):
        raise DataError("the fragments of a span are no list")
    if len(pieces) > bounds.PIECES:
        raise DataError(
            f"a span has more than {bounds.PIECES:,} fragments: is it one mention?"
        )
    fragments = tuple(_offsets(piece, length) for piece in pieces)
    if fragments and (fragments[0][0], fragments[-1][1]) != (start, end):
        raise DataError(f"the fragments of a span do not reach from {start} to {end}")
    sure = value.get("confidence") if isinstance(value, dict) else None
    if sure is not None and (type(sure) not in (int, float) or not 0 <= sure <= 1):
        raise DataError("the confidence of a span is no number from 0 to 1")
    return Span(start, end, intern(label), fragments, sure)


def _offsets(value: Any, length: int) -> tuple[int, int]:
    """Start and end of a span, token or sentence, checked against the text's length."""
    if isinstance(value, dict):
        start = value.get("start", value.get("start_offset"))
        end = value.get("end", value.get("end_offset"))
    else:
        start, end = (
            value[:2] if isinstance(value, list) and len(value) >= 2 else (None, None)
        )
    if type(start) is not int or type(end) is not int:
        raise DataError("a span, token or sentence has no start and end")
    return require_in_text(start, end, length)


def _meta(record: Mapping[str, Any], key: str | None) -> dict[str, Any]:
    """The record's meta and all that a Document has no field for."""
    given = record.get("meta", {})
    own = given if isinstance(given, dict) else {"meta": given}
    other = {
        k: v
        for k, v in record.items()
        if k not in _OWN_KEYS and k != key and k not in own
    }
    return {k: _frozen(v) for k, v in {**own, **other}.items()}


def _frozen(value: Any) -> Any:
    """Lists made tuples: what a Document holds does not change."""
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return {k: _frozen(v) for k, v in value.items()}
    return value


def write(documents: Iterable[Document], path: str | os.PathLike[str]) -> None:
    """Writes documents so that `read` gives the same ones.

    (Sequences in `meta` come back as tuples.) Raises DataError for meta that is not
    JSON.
    """
    write_lines(documents, path, record)


def write_lines(
    documents: Iterable[Document],
    path: str | os.PathLike[str],
    value: Callable[[Document], Any],
) -> None:
    """Writes what `value` makes of each document, on a line of its own.

    Raises as `write`.
    """
    write_out(Path(path), "".join(f"{dumped(own, value(own))}\n" for own in documents))


def dumped(document: Document, value: Any, *, ascii: bool = False) -> str:
    """A document's value as JSON. Raises DataError for meta that is not JSON."""
    try:
        return json.dumps(value, ensure_ascii=ascii)
    except (TypeError, ValueError):
        raise DataError(
            f"document {document.id}: its meta cannot be written as JSON"
        ) from None


def record(document: Document) -> dict[str, Any]:
    """A document in the project's own form; keys without a value are left out."""
    spans = [
        {"start": span.start, "end": span.end, "label": span.label}
        | ({"fragments": span.fragments} if span.fragments else {})
        | ({} if span.confidence is None else {"confidence": round(span.confidence, 6)})
        for span in document.spans
    ]
    return {"id": document.id, "text": document.text, "spans": spans} | rest(document)


def rest(document: Document) -> dict[str, Any]:
    """What a document has besides id, text and mentions; tokens as Prodigy wants them."""
    text = document.text
    optional = {name: getattr(document, name) for name in _REST} | {
        "meta": dict(document.meta),
        "tokens": [
            {
                "text": text[a:b],
                "start": a,
                "end": b,
                "id": i,
                "ws": text[b : b + 1] == " ",
            }
            for i, (a, b) in enumerate(document.tokens)
        ],
    }
    return {
        k: v for k, v in optional.items() if v or (k == "patient" and v is not None)
    }
