"""DocBins that are small on disk and become a thousand times as large in memory."""

from __future__ import annotations

import gc
import random
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fednotes.core.errors import DataError
from fednotes.core.types import Document, Span
from fednotes.data.formats import read, write
from fednotes.data.formats.msgpack_values import has_more_msgpack_values

pytest.importorskip("spacy")

import srsly
from spacy.attrs import ORTH
from spacy.strings import hash_string

PEAK = 60 * 2**20  # bytes that reading a hostile file may take
PADDING = random.Random(0).randbytes(100_000)  # does not pack, so more may unpack
EMPTY_LISTS = 3_000_000
EMPTY: dict[str, Any] = {
    "cats": {},
    "flags": {},
    "span_groups": b"",
    "user_data": None,
}


def packed(words: int = 1, text: str = "rash", **parts: Any) -> bytes:
    """Return a DocBin of one document, whose words are all the same text."""
    message = {
        "version": 0.1,
        "attrs": [ORTH],
        "tokens": np.full(words, hash_string(text), np.uint64).tobytes(),
        "spaces": bytes(words),
        "lengths": np.array([words], np.int32).tobytes(),
        "strings": [text],
        **{name: [value] for name, value in EMPTY.items()},
        "padding": PADDING,
        **parts,
    }
    return zlib.compress(srsly.msgpack_dumps(message))


def with_value(value: bytes) -> bytes:
    """Return a DocBin whose mapping has one more value, of any bytes."""
    message = zlib.decompress(packed())
    number = message[0] - 0x80
    return zlib.compress(bytes([0x80 + number + 1]) + message[1:] + b"\xa1x" + value)


def empty_lists(number: int) -> bytes:
    return b"\xdd" + number.to_bytes(4) + b"\x90" * number


def nested(depth: int, items: int) -> bytes:
    """Return lists that begin with empty lists and end with the next of them."""
    head = b"\xdd" + (items + 1).to_bytes(4) + b"\x90" * items
    return head * depth + b"\x90"


def span_group(spans: int, names: int) -> bytes:
    span = struct.pack(">QQQllll", 0, 0, hash_string("rash"), 0, 1, 0, 4)
    group = {"name": "sc", "attrs": {}, "spans": [span] * spans}
    data: bytes = srsly.msgpack_dumps(
        {srsly.msgpack_dumps(group): [f"n{number}" for number in range(names)]}
    )
    return data


BOMBS: dict[str, Callable[[], bytes]] = {
    "values": lambda: with_value(empty_lists(EMPTY_LISTS)),
    "values in lists in lists": lambda: with_value(nested(100, EMPTY_LISTS // 100)),
    "values of a document": lambda: packed(user_data=[empty_lists(EMPTY_LISTS)]),
    "values of a group": lambda: packed(span_groups=[empty_lists(EMPTY_LISTS)]),
    "copies of a group": lambda: packed(span_groups=[span_group(500, 3000)]),
    "words": lambda: packed(words=900_000),
    "documents without words": lambda: packed(lengths=bytes(4_000_000)),
    "words that documents share": lambda: packed(
        words=10_000,
        text="rash" * 100,
        lengths=np.array([10_000, -10_000] * 2000, np.int32).tobytes(),
        **{name: [value] * 4000 for name, value in EMPTY.items()},
    ),
    "bytes as lists": lambda: packed(user_data=bytes(8_000_000)),
    "a text that words share": lambda: packed(words=2000, text="rash" * 25_000),
}


@pytest.mark.parametrize("name", BOMBS)
def test_the_size_of_a_docbin_is_estimated_before_it_is_built(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / "a.spacy"
    path.write_bytes(BOMBS[name]())
    assert path.stat().st_size < 150_000
    tracemalloc.start()
    try:
        with pytest.raises(
            DataError, match=r"DocBin of notes|too many words|spaCy can read"
        ):
            read(path, "docbin")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < PEAK


@pytest.mark.parametrize("number", [15, 17])
def test_the_bound_on_texts_covers_all_documents(tmp_path: Path, number: int) -> None:
    """Each document has a million characters; so many would be a bomb of any size."""
    path = tmp_path / "a.spacy"
    path.write_bytes(
        packed(
            words=100 * number,
            text="rash" * 2500,
            lengths=np.full(number, 100, np.int32).tobytes(),
            **{name: [value] * number for name, value in EMPTY.items()},
        )
    )
    if number == 15:
        assert len(read(path, "docbin")) == number
        return
    with pytest.raises(DataError, match="its documents take more than 16,777,216"):
        read(path, "docbin")


def test_other_span_groups_of_a_docbin_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "a.spacy"
    path.write_bytes(packed(span_groups=[span_group(2, 3)]))
    (document,) = read(path, "docbin")
    assert (document.text, document.spans) == ("rash", ())


def test_a_docbin_of_many_small_documents_is_read(tmp_path: Path) -> None:
    """They pack better than others, and have more values for their size."""
    documents = [
        Document(str(number), "a rash", (Span(2, 6, "ADE"),)) for number in range(100)
    ]
    write(documents, tmp_path / "a.spacy", "docbin")
    assert read(tmp_path / "a.spacy") == tuple(documents)


def test_values_of_msgpack_are_counted_while_they_are_built() -> None:
    values: list[Any] = [
        None, True, -1, -100, -(10**4), -(10**9), -(10**18), 1, 200, 10**4, 10**9,
        10**18, 0.5, "", "a" * 31, "a" * 200, "a" * 10**5, b"", b"a" * 300,
        b"a" * 10**5, [], {}, {"a": [1, {"b": 2}]}, list(range(20)), [0] * 70_000,
        {str(number): number for number in range(20)},
    ]  # fmt: skip
    inner = 2 + 2 + 2 + 20 + 70_000 + 40
    data = srsly.msgpack_dumps(values)
    number = 1 + len(values) + inner
    assert not has_more_msgpack_values(data, number)
    assert has_more_msgpack_values(data, number - 1)
    for end in (0, 1, 40, len(data) - 1):
        with pytest.raises(ValueError, match="end too early"):
            has_more_msgpack_values(data[:end], number)
    with pytest.raises(ValueError, match="no value begins with"):
        has_more_msgpack_values(b"\xc1", 9)


def test_a_broken_docbin_does_not_change_the_garbage_collector(tmp_path: Path) -> None:
    """srsly turns it off before it unpacks, and not on again where text is no UTF-8."""
    path = tmp_path / "a.spacy"
    path.write_bytes(zlib.compress(b"\x81\xa7strings\x91\xa1\xff"))
    for was_enabled in (True, False):
        if not was_enabled:
            gc.disable()
        try:
            with pytest.raises(DataError, match="not a DocBin that spaCy can read"):
                read(path, "docbin")
            assert gc.isenabled() == was_enabled
        finally:
            gc.enable()
