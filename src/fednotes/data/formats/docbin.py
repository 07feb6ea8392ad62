"""spaCy's DocBin (`.spacy`), which `spacy train` reads. Needs the extra "spacy".

Words are cut so that every mention falls on them. All mentions are in the span group
"sc"; those that do not overlap are in `doc.ents`, too. What spaCy has no place for is
JSON in the user data "fednotes". A DocBin is compressed msgpack; nothing in it is
unpickled.
"""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fednotes.core import bounds
from fednotes.core.errors import DataError, needs
from fednotes.core.store import write_out
from fednotes.core.types import Document, Span
from fednotes.data.formats import jsonl
from fednotes.data.formats.files import open_file, starts_with
from fednotes.data.formats.folders import find_corpus_files
from fednotes.data.formats.gathering import ReadDocument, gather
from fednotes.data.formats.json_files import parse_json_line
from fednotes.data.formats.mentions import cut_into_words
from fednotes.data.formats.problems import Problems
from fednotes.data.tags import flatten

LOOSE = 0
_SPAN_GROUP = "sc"
_USER_DATA = "fednotes"
_ALWAYS_PERMITTED = 1 << 22  # bytes to which any small file may unpack
_CHUNK = 1 << 20
_UNREADABLE = "not a DocBin that spaCy can read: is the file complete?"


def _import_spacy() -> tuple[Any, Any, Any, Any]:
    with needs("spacy", "spacy"):
        from spacy.tokens import Doc, DocBin
        from spacy.tokens import Span as SpacySpan
        from spacy.vocab import Vocab
    return Doc, DocBin, SpacySpan, Vocab


# ---- reading -------------------------------------------------------------------------


def accepts(path: Path) -> bool:
    """Return whether the file's name ends in .spacy, or it begins as zlib's data."""
    return path.suffix == ".spacy" or starts_with(path, (b"x\x9c",))


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """Return the documents; their mentions are the group "sc", or else the entities."""
    return gather(find_corpus_files(path, accepts, "a DocBin"), _read_file, problems)


def _read_file(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    with open_file(path) as file:
        data = file.read(bounds.DOCBIN_BYTES + 1)
    _require_plausible_size(data)
    return jsonl.parse_items(_unpack(data), "document", _to_record, path, problems)


def _unpack(data: bytes) -> Iterator[Any]:
    """Yield spaCy's documents one by one; each takes several times its packed size."""
    _, DocBin, _, Vocab = _import_spacy()
    try:
        yield from DocBin().from_bytes(data).get_docs(Vocab())
    except Exception:  # whatever spaCy raises for a file that it did not write
        raise DataError(_UNREADABLE) from None


def _require_plausible_size(data: bytes) -> None:
    """Refuse a file that unpacks to far more than notes do.

    Raises:
        DataError: It is too large when it is unpacked, or zlib did not pack it.
    """
    limit = max(_ALWAYS_PERMITTED, bounds.PACKED_RATIO * len(data))
    limit = min(bounds.DOCBIN_BYTES, limit)
    if len(data) > limit:
        raise DataError(
            f"it has more than {limit:,} bytes: split it into several files"
        )
    decompressor = zlib.decompressobj()
    size = 0
    try:
        chunk = decompressor.decompress(data, _CHUNK)
        while chunk:
            size += len(chunk)
            if size > limit:
                raise DataError(
                    f"it has more than {limit:,} bytes when it is unpacked, far more "
                    "than notes have; if it is a DocBin of notes, split it into "
                    "several files"
                )
            chunk = decompressor.decompress(decompressor.unconsumed_tail, _CHUNK)
    except zlib.error:
        raise DataError(_UNREADABLE) from None


def _to_record(doc: Any, context: jsonl.MentionContext) -> dict[str, Any]:  # noqa: ARG001 - the form of `parse_items`
    """Return one of spaCy's documents as a record of JSONL."""
    user_data = doc.user_data.get(_USER_DATA)
    fields: Any = parse_json_line(user_data) if isinstance(user_data, str) else {}
    # Our own mentions also have pieces and confidences.
    own_spans: defaultdict[tuple[int, int, str], list[Any]] = defaultdict(list)
    for raw in reversed(fields.pop("spans", ())):
        own_spans[raw["start"], raw["end"], raw["label"]].append(raw)
    spans = []
    for span in doc.spans.get(_SPAN_GROUP, doc.ents):
        same = own_spans[span.start_char, span.end_char, span.label_]
        if same:
            spans.append(same.pop())
        else:
            spans.append(
                {"start": span.start_char, "end": span.end_char, "label": span.label_}
            )
    return {**fields, "text": doc.text, "spans": spans}


# ---- writing -------------------------------------------------------------------------


def write(documents: Iterable[Document], path: str | os.PathLike[str]) -> None:
    """Write a DocBin, whose documents have a blank vocabulary."""
    _, DocBin, _, Vocab = _import_spacy()
    vocab = Vocab()
    doc_bin = DocBin(store_user_data=True)
    for document in documents:
        doc_bin.add(_to_doc(document, vocab))
    write_out(Path(path), doc_bin.to_bytes())


def _to_doc(document: Document, vocab: Any) -> Any:
    """Return a document as spaCy's."""
    Doc, _, SpacySpan, _ = _import_spacy()
    words = cut_into_words(document)
    doc = Doc(
        vocab,
        words=[document.text[start:end] for start, end, _ in words],
        spaces=[has_space for _, _, has_space in words],
    )
    first_word = {start: number for number, (start, _, _) in enumerate(words)}
    last_word = {end: number for number, (_, end, _) in enumerate(words)}

    def to_spacy(span: Span) -> Any:
        stop = last_word[span.end] + 1
        return SpacySpan(doc, first_word[span.start], stop, span.label)

    flat, _ = flatten(document.spans, "outermost")
    doc.spans[_SPAN_GROUP] = [to_spacy(span) for span in document.spans]
    doc.ents = [to_spacy(span) for span in flat]
    record = jsonl.to_record(document)
    del record["text"]
    doc.user_data[_USER_DATA] = jsonl.to_json(document, record)
    return doc
