"""Write Parquet files byte by byte, also such that no writer would write.

A file is a column of texts, or of lists of texts. What its footer and its page headers
state is free. Thrift structs are lists of their fields: number, type and value.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import pyarrow

Fields = list[tuple[int, str, Any]]

_TYPES = {"i32": 5, "i64": 6, "binary": 8, "list": 9, "struct": 12}

# Physical types, encodings and codecs of Parquet.
INT32, BYTE_ARRAY, FIXED = 1, 6, 7
PLAIN, RLE, DELTA_LENGTH, DELTA_TEXT, DICTIONARY = 0, 3, 6, 7, 8
UNCOMPRESSED, ZSTD = 0, 6
_REQUIRED, _OPTIONAL, _REPEATED = 0, 1, 2
_LIST = 3


# ---- Thrift's compact protocol -------------------------------------------------------


def varint(number: int) -> bytes:
    """Return a number in groups of seven bits."""
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


def zigzag(number: int) -> bytes:
    """Return a number that may be negative."""
    return varint(number * 2 if number >= 0 else -number * 2 - 1)


def struct(fields: Fields) -> bytes:
    """Return a struct."""
    data = b""
    last = 0
    for number, kind, value in fields:
        data += bytes([(number - last) << 4 | _TYPES[kind]]) + _value(kind, value)
        last = number
    return data + b"\0"


def _value(kind: str, value: Any) -> bytes:
    if kind in ("i32", "i64"):
        return zigzag(value)
    if kind == "binary":
        return varint(len(value)) + value
    if kind == "struct":
        return struct(value)
    inner, items = value
    head = bytes([0xF0 | _TYPES[inner]]) + varint(len(items))
    return head + b"".join(_value(inner, item) for item in items)


# ---- pages ---------------------------------------------------------------------------


def run(value: int, count: int) -> bytes:
    """Return a run of equal values of at most eight bits."""
    return varint(count << 1) + bytes([value])


def levels(data: bytes) -> bytes:
    """Return levels with their length before them."""
    return len(data).to_bytes(4, "little") + data


def text(length: int) -> bytes:
    """Return a text in plain encoding."""
    return length.to_bytes(4, "little") + b"a" * length


def deltas(first: int, count: int, *, smallest: int = 0, block: int = 128) -> bytes:
    """Return `count` numbers whose differences are all `smallest`."""
    head = varint(block) + varint(4) + varint(count) + zigzag(first)
    blocks = -(-(count - 1) // block)
    return head + (zigzag(smallest) + bytes(4)) * blocks


def dictionary(content: bytes, values: int, *, codec: int = UNCOMPRESSED) -> bytes:
    """Return the page of a dictionary."""
    header: Fields = [(1, "i32", values), (2, "i32", PLAIN)]
    return _page(2, content, codec, (7, "struct", header))


def page(
    content: bytes, values: int, encoding: int, *, codec: int = UNCOMPRESSED
) -> bytes:
    """Return a page of data."""
    header: Fields = [
        (1, "i32", values),
        (2, "i32", encoding),
        (3, "i32", RLE),
        (4, "i32", RLE),
    ]
    return _page(0, content, codec, (5, "struct", header))


def _page(
    kind: int, content: bytes, codec: int, header: tuple[int, str, Fields]
) -> bytes:
    packed = pyarrow.compress(content, "zstd", asbytes=True) if codec else content
    sizes: Fields = [(2, "i32", len(content)), (3, "i32", len(packed))]
    return struct([(1, "i32", kind), *sizes, header]) + packed


# ---- files ---------------------------------------------------------------------------


def column_file(
    pages: Sequence[bytes],
    values: int,
    *,
    rows: int | None = None,
    kind: int = BYTE_ARRAY,
    codec: int = UNCOMPRESSED,
    length: int | None = None,
    is_list: bool = False,
    is_optional: bool = False,
    schema: pyarrow.Schema | None = None,
) -> bytes:
    """Return a file of one column "text".

    Args:
        pages: The pages; the first is that of the dictionary if there are two.
        values: The number of values that the footer states.
        rows: The number of rows; by default that of values.
        kind: The physical type.
        codec: How the pages are packed.
        length: The bytes of each value of a fixed length.
        is_list: Whether each row is a list.
        is_optional: Whether a row may be null.
        schema: The schema of Arrow that the footer holds.
    """
    body = b"".join(pages)
    count = values if rows is None else rows
    leaf = [*([(2, "i32", length)] if length else [])]
    need = _OPTIONAL if is_optional else _REQUIRED
    elements: list[Fields] = [[(4, "binary", b"schema"), (5, "i32", 1)]]
    path = [b"text"]
    if is_list:
        path += [b"list", b"element"]
        elements += [
            [
                (3, "i32", need),
                (4, "binary", b"text"),
                (5, "i32", 1),
                (6, "i32", _LIST),
            ],
            [(3, "i32", _REPEATED), (4, "binary", b"list"), (5, "i32", 1)],
        ]
        need = _REQUIRED
    as_text = [(6, "i32", 0)] if kind == BYTE_ARRAY else []
    elements.append(
        [
            (1, "i32", kind),
            *leaf,
            (3, "i32", need),
            (4, "binary", path[-1]),
            *as_text,
        ]
    )
    column: Fields = [
        (1, "i32", kind),
        (2, "list", ("i32", [PLAIN, RLE, DICTIONARY])),
        (3, "list", ("binary", path)),
        (4, "i32", codec),
        (5, "i64", values),
        (6, "i64", 1),
        (7, "i64", len(body)),
        (9, "i64", 4 + len(pages[0]) if len(pages) > 1 else 4),
    ]
    if len(pages) > 1:
        column.append((11, "i64", 4))
    group: Fields = [
        (1, "list", ("struct", [[(2, "i64", 0), (3, "struct", column)]])),
        (2, "i64", 1),
        (3, "i64", count),
    ]
    footer: Fields = [
        (1, "i32", 2),
        (2, "list", ("struct", elements)),
        (3, "i64", count),
        (4, "list", ("struct", [group])),
    ]
    if schema is not None:
        encoded = base64.b64encode(schema.serialize().to_pybytes())
        entry: Fields = [(1, "binary", b"ARROW:schema"), (2, "binary", encoded)]
        footer.append((5, "list", ("struct", [entry])))
    return with_footer(body, struct(footer))


def with_footer(body: bytes, footer: bytes) -> bytes:
    """Return a file of pages and a footer."""
    return b"PAR1" + body + footer + len(footer).to_bytes(4, "little") + b"PAR1"
