"""spaCy's DocBin (`.spacy`): what `spacy train` reads. Needs the extra "spacy".

Words are cut so that every mention falls on them. All mentions are in the span group
"sc", those that do not overlap in `doc.ents` too. What spaCy has no place for is JSON
in the user data "fednotes". A DocBin is compressed msgpack, of which nothing is
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
from fednotes.core.types import Document, Offsets, Span
from fednotes.data.formats import jsonl
from fednotes.data.formats.files import open_file, starts_with
from fednotes.data.formats.folders import find_corpus_files
from fednotes.data.formats.gathering import ReadDocument, gather
from fednotes.data.formats.json_files import parse_json_line
from fednotes.data.formats.mentions import cut_into_words
from fednotes.data.formats.problems import Problems
from fednotes.data.tags import flatten

LOOSE = 0
_GROUP, _OWN = "sc", "fednotes"
_SMALL = 1 << 22  # a small file may unpack to 4 MiB


def _spacy() -> tuple[Any, Any, Any, Any]:
    with needs("spacy", "spacy"):
        from spacy.tokens import Doc, DocBin
        from spacy.tokens import Span as SpacySpan
        from spacy.vocab import Vocab
    return Doc, DocBin, SpacySpan, Vocab


def accepts(path: Path) -> bool:
    """Whether the file's name ends in .spacy, or it begins as what zlib packs."""
    return path.suffix == ".spacy" or starts_with(path, (b"x\x9c",))


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """A document each; mentions are the group "sc", or the entities where there is
    none."""
    return gather(find_corpus_files(path, accepts, "a DocBin"), _read_file, problems)


def _read_file(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    _, DocBin, _, Vocab = _spacy()
    with open_file(path) as file:
        data = file.read(bounds.DOCBIN_BYTES + 1)
    _require_small(data)

    def documents() -> Iterator[Any]:
        """Yield one document after the other: each takes several times its size in the
        file."""
        try:
            yield from DocBin().from_bytes(data).get_docs(Vocab())
        except Exception:  # whatever spaCy meets in a file that it did not write
            raise DataError(
                "no DocBin that spaCy can read: is the file complete?"
            ) from None

    return jsonl.parse_items(documents(), "document", _record, path, problems)


def _require_small(data: bytes) -> None:
    """Refuse a file that unpacks to far more than notes do.

    Raises:
        DataError: It is too large when it is unpacked, or it is not packed by zlib.
    """
    most = min(bounds.DOCBIN_BYTES, max(_SMALL, bounds.PACKED_RATIO * len(data)))
    if len(data) > most:
        raise DataError(f"it has more than {most:,} bytes: cut it into several files")
    unpacking = zlib.decompressobj()
    size = 0
    try:
        part = unpacking.decompress(data, 1 << 20)
        while part:
            size += len(part)
            if size > most:
                raise DataError(
                    f"more than {most:,} bytes when it is unpacked, which is no DocBin of notes; "
                    "if it is one, cut it into several"
                )
            part = unpacking.decompress(unpacking.unconsumed_tail, 1 << 20)
    except zlib.error:
        raise DataError(
            "no DocBin that spaCy can read: is the file complete?"
        ) from None


def _record(doc: Any, noting: jsonl.MentionContext) -> dict[str, Any]:
    own = doc.user_data.get(_OWN)
    rest: Any = parse_json_line(own) if isinstance(own, str) else {}
    kept: defaultdict[tuple[int, int, str], list[Any]] = defaultdict(list)
    for own in reversed(rest.pop("spans", ())):
        kept[own["start"], own["end"], own["label"]].append(own)
    given = doc.spans.get(_GROUP, doc.ents)
    places = ((span.start_char, span.end_char, span.label_) for span in given)
    names = ("start", "end", "label")
    spans = [
        kept[place].pop() if kept[place] else dict(zip(names, place, strict=True))
        for place in places
    ]
    return {**rest, "text": doc.text, "spans": spans}


def write(documents: Iterable[Document], path: str | os.PathLike[str]) -> None:
    """Writes a DocBin, whose Docs have a blank vocabulary."""
    Doc, DocBin, SpacySpan, Vocab = _spacy()
    vocab, found = Vocab(), DocBin(store_user_data=True)
    for document in documents:
        words = cut_into_words(document)
        text = document.text
        doc = Doc(
            vocab, [text[a:b] for a, b, _ in words], [blank for _, _, blank in words]
        )
        at: Offsets = tuple((a, b) for a, b, _ in words)
        first, last = ({own[i]: n for n, own in enumerate(at)} for i in (0, 1))

        def placed(
            span: Span, doc: Any = doc, first: Any = first, last: Any = last
        ) -> Any:
            return SpacySpan(doc, first[span.start], last[span.end] + 1, span.label)

        doc.spans[_GROUP] = [placed(span) for span in document.spans]
        doc.ents = [placed(span) for span in flatten(document.spans, "outermost")[0]]
        record = jsonl.to_record(document)
        del record["text"]
        doc.user_data[_OWN] = jsonl.to_json(document, record)
        found.add(doc)
    write_out(Path(path), found.to_bytes())
