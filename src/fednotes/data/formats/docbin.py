"""spaCy's DocBin (`.spacy`), which `spacy train` reads. Needs the extra "spacy".

The text is split so that every mention consists of whole words. All mentions are in the
span group "sc"; non-overlapping ones are also in `doc.ents`. Fields without a
counterpart in spaCy are JSON in the user data "fednotes". A DocBin is compressed
msgpack; nothing in it is unpickled.
"""

from __future__ import annotations

import gc
import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fednotes.core import bounds
from fednotes.core.errors import DataError, needs
from fednotes.core.parsing import read_at_most
from fednotes.core.store import write_out
from fednotes.core.types import Document, Span
from fednotes.data.formats import jsonl
from fednotes.data.formats.files import open_file, starts_with
from fednotes.data.formats.folders import find_corpus_files
from fednotes.data.formats.gathering import ReadDocument, gather_documents
from fednotes.data.formats.json_files import parse_json_line
from fednotes.data.formats.mentions import cut_into_words
from fednotes.data.formats.msgpack_values import has_more_msgpack_values
from fednotes.data.formats.problems import Problems
from fednotes.data.tags import flatten

LOOSE = 0
_SPAN_GROUP = "sc"
_USER_DATA = "fednotes"
_ALWAYS_PERMITTED = 1 << 22  # bytes that any file may unpack to
_VALUE_SIZE = 64  # approximate bytes of a msgpack value in memory
_TOKEN_SIZE = 256  # approximate bytes of spaCy's token or span in memory
_SPAN_BYTES = 42  # minimum bytes of a span in a group
_LENGTH_BYTES = 4  # bytes of a document's length
_UNREADABLE = "not a DocBin that spaCy can read: check that the file is complete"


class _Spacy(NamedTuple):
    """Classes of spaCy: `Doc`, `DocBin`, `Span` and `Vocab`."""

    make_doc: Any
    make_doc_bin: Any
    make_span: Any
    make_vocab: Any


def _import_spacy() -> _Spacy:
    """Import spaCy, and return the classes that this module uses."""
    with needs("spacy", "spacy"):
        from spacy.tokens import Doc, DocBin
        from spacy.tokens import Span as SpacySpan
        from spacy.vocab import Vocab
    return _Spacy(Doc, DocBin, SpacySpan, Vocab)


# ---- reading -------------------------------------------------------------------------


def accepts(path: Path) -> bool:
    """Return whether the suffix is .spacy or the content starts like zlib data."""
    return path.suffix == ".spacy" or starts_with(path, (b"x\x9c",))


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """Return the documents, with the span group "sc" or the entities as mentions."""
    return gather_documents(
        find_corpus_files(path, accepts, "a DocBin"), _read_file, problems
    )


def _read_file(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    """Yield the documents of a file."""
    with open_file(path) as file:
        data = read_at_most(file, bounds.DOCBIN_BYTES)
    return jsonl.parse_items(_unpack(data), "document", _to_record, path, problems)


def _unpack(data: bytes) -> Iterator[Any]:
    """Yield spaCy's documents one by one, since each is far larger than when packed.

    None stands for a document that is too large for a note. Values, words and texts may
    be a thousand times larger than when packed, so they are counted before they are
    built.

    Raises:
        DataError: The file is damaged, or contains more than notes of its size would.
    """
    spacy = _import_spacy()
    budget = _Budget.for_file(data)
    was_collecting = gc.isenabled()
    try:
        _require_lists(_decompress(data), budget)
        doc_bin = spacy.make_doc_bin().from_bytes(data)
        del data
        vocab = spacy.make_vocab()
        for string in doc_bin.strings:
            vocab.strings.add(string)
        doc_bin.strings.clear()
        for index in range(len(doc_bin)):
            yield _build_doc(doc_bin, index, vocab, budget)
    except DataError:
        raise
    except Exception:  # spaCy raises various errors for damaged files
        raise DataError(_UNREADABLE) from None
    finally:
        # srsly disables the garbage collector and leaves it disabled on failure.
        if was_collecting:
            gc.enable()


@dataclass
class _Budget:
    """Memory that the parts of a file may take.

    Attributes:
        memory: Maximum bytes of all values, of a document's words, and of all texts.
        characters: The number of characters of the texts built so far.
    """

    memory: int
    characters: int = 0

    @classmethod
    def for_file(cls, data: bytes) -> _Budget:
        """Return the budget of a file."""
        memory = max(bounds.PACKED_FREE, bounds.PACKED_RATIO * len(data))
        return cls(min(bounds.DOCBIN_BYTES, memory))

    def require_values(self, part: bytes, copies: int = 1) -> None:
        """Raise DataError if msgpack has more values than the budget.

        Args:
            part: The msgpack.
            copies: The number of times that its values are built.

        Raises:
            ValueError: It is not msgpack.
        """
        max_values = self.memory // _VALUE_SIZE // max(1, copies)
        if has_more_msgpack_values(part, max_values):
            raise self.make_error()

    def take_text(self, characters: int) -> None:
        """Count a text, and raise DataError if all texts exceed the budget."""
        self.characters += characters
        if self.characters > self.memory:
            raise self.make_error()

    def make_error(self) -> DataError:
        """Return the error for a file that exceeds the budget."""
        return DataError(
            f"its documents take more than {self.memory:,} bytes of memory, far more "
            "than notes have: if it is a DocBin of notes, split it into several files"
        )


def _build_doc(doc_bin: Any, index: int, vocab: Any, budget: _Budget) -> Any:
    """Return a document of a DocBin; None if it is too long for a note.

    Only words, entities, span groups and user data are built.
    """
    from spacy.attrs import ENT_IOB, ENT_TYPE, ORTH

    columns = [
        column
        for column, attribute in enumerate(doc_bin.attrs)
        if attribute in (ORTH, ENT_IOB, ENT_TYPE)
    ]
    tokens = doc_bin.tokens[index][:, columns]
    if len(tokens) * _TOKEN_SIZE > budget.memory:
        return None
    # Documents may share tokens, so those of refused documents are counted as well.
    budget.take_text(len(tokens))
    words, counts = np.unique(
        doc_bin.tokens[index][:, doc_bin.attrs.index(ORTH)], return_counts=True
    )
    characters = sum(
        count * len(vocab.strings[word])
        for word, count in zip(words.tolist(), counts.tolist(), strict=True)
    )
    if len(tokens) + characters > bounds.NOTE:
        return None
    budget.take_text(characters)
    groups = doc_bin.span_groups[index]
    user_data = doc_bin.user_data[index] if index < len(doc_bin.user_data) else None
    _require_groups(groups, budget)
    if user_data is not None:
        budget.require_values(user_data)
    one = type(doc_bin)(store_user_data=True)
    one.attrs = [doc_bin.attrs[column] for column in columns]
    one.tokens = [tokens]
    one.spaces = [doc_bin.spaces[index]]
    one.cats = [{}]
    one.flags = [doc_bin.flags[index]]
    one.span_groups = [groups]
    one.user_data = [user_data]
    (doc,) = one.get_docs(vocab)
    return doc


def _require_lists(unpacked: bytes, budget: _Budget) -> None:
    """Check the lists in a DocBin's msgpack before spaCy builds them.

    Raises:
        DataError: The file has more values than the budget.
        ValueError: The numbers of its parts are inconsistent.
    """
    with needs("spacy", "spacy"):
        from srsly import msgpack_loads
    budget.require_values(unpacked)
    parts = msgpack_loads(unpacked)
    # spaCy makes a list of each of these, and two arrays for each length.
    lists = (parts["strings"], parts["cats"], parts.get("user_data", []))
    if not all(isinstance(part, list) for part in lists):
        raise ValueError("not lists")
    if memoryview(parts["lengths"]).nbytes // _LENGTH_BYTES != len(parts["cats"]):
        raise ValueError("the lists have different lengths")


def _require_groups(groups: bytes, budget: _Budget) -> None:
    """Raise DataError if the span groups of a document have too many spans."""
    if not groups:
        return
    with needs("spacy", "spacy"):
        from srsly import msgpack_loads
    budget.require_values(groups)
    parts = msgpack_loads(groups)
    names = parts.values() if isinstance(parts, dict) else [[""]] * len(parts)
    spans = 0
    for part, part_names in zip(parts, names, strict=True):
        # spaCy copies a group for each of its names.
        budget.require_values(part, len(part_names))
        spans += len(part) // _SPAN_BYTES * len(part_names)
    if spans * _TOKEN_SIZE > budget.memory:
        raise budget.make_error()


def _decompress(data: bytes) -> bytes:
    """Return the unpacked content of a file.

    Raises:
        DataError: It is far larger than that of notes, or it was not packed by zlib.
    """
    limit = max(_ALWAYS_PERMITTED, bounds.PACKED_RATIO * len(data))
    limit = min(bounds.DOCBIN_BYTES, limit)
    if len(data) > limit:
        raise DataError(
            f"it has more than {limit:,} bytes: split it into several files"
        )
    decompressor = zlib.decompressobj()
    try:
        unpacked = decompressor.decompress(data, limit + 1)
    except zlib.error:
        raise DataError(_UNREADABLE) from None
    if len(unpacked) > limit:
        raise DataError(
            f"it unpacks to more than {limit:,} bytes, far more than notes need: if it "
            "is a DocBin of notes, split it into several files"
        )
    return unpacked


def _to_record(doc: Any, context: jsonl.MentionContext) -> dict[str, Any]:  # noqa: ARG001 - the form of `parse_items`
    """Return one of spaCy's documents as a record of JSONL."""
    if doc is None:
        raise DataError(
            f"the document has more than {bounds.NOTE:,} characters, or too many words "
            "for a file of its size: split it into notes"
        )
    user_data = doc.user_data.get(_USER_DATA)
    fields: Any = parse_json_line(user_data) if isinstance(user_data, str) else {}
    # Mentions written by this module also have pieces and confidences.
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
    """Write a DocBin with a blank vocabulary."""
    spacy = _import_spacy()
    vocab = spacy.make_vocab()
    doc_bin = spacy.make_doc_bin(store_user_data=True)
    for document in documents:
        doc_bin.add(_to_doc(document, vocab))
    write_out(Path(path), doc_bin.to_bytes())


def _to_doc(document: Document, vocab: Any) -> Any:
    """Return a document as one of spaCy's."""
    spacy = _import_spacy()
    words = cut_into_words(document)
    doc = spacy.make_doc(
        vocab,
        words=[document.text[start:end] for start, end, _ in words],
        spaces=[has_space for _, _, has_space in words],
    )
    first_word = {start: number for number, (start, _, _) in enumerate(words)}
    last_word = {end: number for number, (_, end, _) in enumerate(words)}

    def to_spacy(span: Span) -> Any:
        """Return a mention as one of spaCy's spans."""
        stop = last_word[span.end] + 1
        return spacy.make_span(doc, first_word[span.start], stop, span.label)

    flat, _ = flatten(document.spans, "outermost")
    doc.spans[_SPAN_GROUP] = [to_spacy(span) for span in document.spans]
    doc.ents = [to_spacy(span) for span in flat]
    record = jsonl.to_record(document)
    del record["text"]
    doc.user_data[_USER_DATA] = jsonl.to_json(document, record)
    return doc
