"""Measurement of a Parquet file's content before Arrow unpacks it.

Arrow trusts the footer and the page headers of a file: a few bytes can declare a list
of a million columns, a run of a billion equal values or a page of 2 GB, and Arrow
allocates the memory for it. The totals in the footer may be forged. The page headers
can be relied on, because Arrow never unpacks more than they declare; this module
therefore reads them first. They are structs of Thrift's compact protocol.

The footer is read here as well: a damaged one makes Arrow's Python objects for columns
end the process. The functions of Arrow that read rows raise an error instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

_TAIL = 8  # bytes at the end of a file: the length of its footer, and its signature
_MIN_ITEMS = 1000  # items that a list may have in any footer
_ITEM_BYTES = 8  # minimum bytes of a list item in a footer
_FREE_FOOTER = 2**20  # bytes that a footer may have in any file, however small
_FOOTER_SHARE = 4  # a longer footer may be up to a quarter of the file
_HEADER_STEPS = (2**8, 2**12, 2**16, 2**24)  # bytes read for a page header
_OLD_PADDING = 100  # bytes after a column that Arrow reads for old writers
_MAX_DEPTH = 16  # nesting of structs in a page header

# Kinds of a page.
_DATA_PAGE = 0
_DICTIONARY_PAGE = 2
_DATA_PAGE_V2 = 3

# Encodings whose own headers declare the number of values.
_DELTA_LENGTH_BYTE_ARRAY = 6
_DELTA_BYTE_ARRAY = 7

_RLE = 3  # the encoding of levels that declare their length
_SIZE_BYTES = 4  # bytes of this length, which stands before the levels

# Types of Thrift's compact protocol.
_TRUE = 1
_FALSE = 2
_BYTE = 3
_I16 = 4
_I32 = 5
_I64 = 6
_DOUBLE = 7
_BINARY = 8
_LIST = 9
_SET = 10
_STRUCT = 12
# Bytes of values of a fixed size; a truth value in a list takes a byte.
_FIXED_SIZES = {_TRUE: 1, _FALSE: 1, _BYTE: 1, _DOUBLE: 8}

# Names of the codecs by their numbers in a footer.
_CODECS = {
    0: "UNCOMPRESSED",
    1: "SNAPPY",
    2: "GZIP",
    4: "BROTLI",
    6: "ZSTD",
    7: "LZ4",
}


@dataclass(frozen=True)
class ColumnChunk:
    """A column in a row group, according to the footer.

    Attributes:
        values: The number of values.
        data_offset: The position of the first data page.
        dictionary_offset: The position of the dictionary; 0 without one.
        size: The bytes of its pages as they are in the file.
        codec: The name of the compression.
    """

    values: int
    data_offset: int
    dictionary_offset: int
    size: int
    codec: str


@dataclass(frozen=True)
class ColumnSize:
    """The size of a column in a row group, according to its pages.

    Attributes:
        values: The number of values, including nulls and empty lists.
        unpacked: The bytes of all pages when unpacked.
        largest_page: The bytes of the largest page when unpacked.
        shared: Maximum bytes of a value that takes only a few bytes in a row, because
            it is in a dictionary or shares a prefix with the previous value.
        has_deltas: Whether a page of texts has a delta encoding, which Arrow cannot
            read as a dictionary.
    """

    values: int
    unpacked: int
    largest_page: int
    shared: int
    has_deltas: bool


# ---- the footer ----------------------------------------------------------------------


def compute_footer_limits(file: BinaryIO) -> dict[str, int]:
    """Return limits on lists and texts in a file's footer, as options of `ParquetFile`.

    Arrow allocates a list as soon as it has read the length. A column takes 230 times
    as much memory as its bytes in the footer.

    Raises:
        ValueError: The footer is too long.
    """
    file_size = file.seek(0, os.SEEK_END)
    file.seek(max(0, file_size - _TAIL))
    tail = file.read(_TAIL)
    file.seek(0)
    length = int.from_bytes(tail[:4], "little")
    if length > max(_FREE_FOOTER, file_size // _FOOTER_SHARE):
        raise ValueError("the footer is too long")
    return {
        "thrift_container_size_limit": max(_MIN_ITEMS, length // _ITEM_BYTES),
        "thrift_string_size_limit": file_size,
    }


def read_column_chunks(file: BinaryIO) -> list[list[ColumnChunk]]:
    """Return the columns of each row group, from a file's footer.

    Raises:
        ValueError: The footer is damaged.
    """
    file_size = file.seek(0, os.SEEK_END)
    file.seek(max(0, file_size - _TAIL))
    length = int.from_bytes(file.read(_TAIL)[:4], "little")
    file.seek(max(0, file_size - _TAIL - length))
    reader = _CompactReader(file.read(length))
    file.seek(0)
    try:
        footer = reader.read_struct(shape=_FOOTER)
    except IndexError:
        raise ValueError("the footer ends too early") from None
    return [
        [_make_chunk(chunk) for chunk in group.get((1, _LIST), ())]
        for group in footer.get((4, _LIST), ())
    ]


def _make_chunk(chunk: _Fields) -> ColumnChunk:
    """Return a column of a row group; raise ValueError if it lacks a number."""
    column = _get_struct(chunk, 3)
    column.setdefault((11, _I64), 0)
    return ColumnChunk(
        values=_get_long(column, 5),
        data_offset=_get_long(column, 9),
        dictionary_offset=_get_long(column, 11),
        size=_get_long(column, 7),
        codec=_CODECS.get(_get_integer(column, 4), "unknown"),
    )


# ---- pages ---------------------------------------------------------------------------


def measure_column(
    arrow: Any, file: BinaryIO, chunk: ColumnChunk, levels: Any, max_page: int
) -> ColumnSize:
    """Return the size of a column, from the headers of its pages.

    Args:
        arrow: The package pyarrow.
        file: The file.
        chunk: The column in a row group.
        levels: The column in the schema.
        max_page: Maximum unpacked bytes of a page whose content is examined.

    Raises:
        ValueError: A page header is damaged.
    """
    values = 0
    unpacked = 0
    largest_page = 0
    dictionary = 0
    has_deltas = False
    has_prefixes = False
    for page in _read_pages(file, chunk):
        values += page.values
        unpacked += page.unpacked
        largest_page = max(largest_page, page.unpacked)
        if page.kind == _DICTIONARY_PAGE:
            dictionary = max(dictionary, page.unpacked)
        if page.encoding in (_DELTA_LENGTH_BYTE_ARRAY, _DELTA_BYTE_ARRAY):
            has_deltas = True
            has_prefixes = has_prefixes or page.encoding == _DELTA_BYTE_ARRAY
            if page.unpacked <= max_page:
                _check_deltas(arrow, file, page, chunk, levels)
    return ColumnSize(
        values=values,
        unpacked=unpacked,
        largest_page=largest_page,
        shared=unpacked if has_prefixes else dictionary,
        has_deltas=has_deltas,
    )


@dataclass(frozen=True)
class _Page:
    """A page, as its header describes it.

    Attributes:
        kind: The kind of the page.
        position: The position of its content in the file.
        packed: The bytes of its content.
        unpacked: The bytes of its content when unpacked.
        values: The number of values of a data page, including nulls.
        encoding: The encoding of these values.
        level_encodings: The encodings of the repetition and the definition levels.
        levels: The bytes of unpacked levels before the values; None if the levels are
            packed with the values.
        is_packed: Whether the content is packed, provided that the column is.
    """

    kind: int
    position: int
    packed: int
    unpacked: int
    values: int = 0
    encoding: int = -1
    level_encodings: tuple[int, int] = (_RLE, _RLE)
    levels: int | None = None
    is_packed: bool = True


def _read_pages(file: BinaryIO, chunk: ColumnChunk) -> Iterator[_Page]:
    """Yield the pages of a column that Arrow would read, in its order."""
    file_size = file.seek(0, os.SEEK_END)
    position = chunk.data_offset
    if chunk.dictionary_offset:
        position = min(position, chunk.dictionary_offset)
    end = min(file_size, position + chunk.size + _OLD_PADDING)
    values = 0
    while values < chunk.values and position < end:
        page = _read_page(file, position)
        if page.packed < 0 or page.unpacked < 0 or page.values < 0:
            raise ValueError("a size is negative")
        position = page.position + page.packed
        if position > file_size:
            raise ValueError("a page extends past the end of the file")
        values += page.values
        yield page


def _read_page(file: BinaryIO, position: int) -> _Page:
    """Return the page whose header begins at a position."""
    if position < 0:
        raise ValueError("a page begins before the file")
    for step in _HEADER_STEPS:
        file.seek(position)
        reader = _CompactReader(file.read(step))
        try:
            header = reader.read_struct()
            break
        except IndexError:  # the header is longer
            continue
    else:
        raise ValueError("a page header has no end")
    kind = _get_integer(header, 1)
    start = position + reader.position
    unpacked = _get_integer(header, 2)
    packed = _get_integer(header, 3)
    if kind == _DATA_PAGE:
        content = _get_struct(header, 5)
        return _Page(
            kind,
            start,
            packed,
            unpacked,
            values=_get_integer(content, 1),
            encoding=_get_integer(content, 2),
            level_encodings=(_get_integer(content, 4), _get_integer(content, 3)),
        )
    if kind == _DATA_PAGE_V2:
        content = _get_struct(header, 8)
        return _Page(
            kind,
            start,
            packed,
            unpacked,
            values=_get_integer(content, 1),
            encoding=_get_integer(content, 4),
            levels=_get_integer(content, 5) + _get_integer(content, 6),
            is_packed=content.get((7, _TRUE), True),
        )
    if kind == _DICTIONARY_PAGE and _get_integer(_get_struct(header, 7), 1) > unpacked:
        raise ValueError("a dictionary has more values than bytes")
    return _Page(kind, start, packed, unpacked)


# ---- delta encodings -----------------------------------------------------------------


def _check_deltas(
    arrow: Any, file: BinaryIO, page: _Page, chunk: ColumnChunk, levels: Any
) -> None:
    """Raise ValueError if a page declares more text lengths than values.

    Arrow unpacks all lengths of a page at once, and a few bytes can declare a billion
    lengths.

    Args:
        arrow: The package pyarrow.
        file: The file.
        page: The page.
        chunk: Its column in the row group.
        levels: The column in the schema.
    """
    file.seek(page.position)
    data = file.read(page.packed)
    position = 0
    if page.levels is None:  # version 1: levels and values are packed together
        data = _unpack(arrow, data, page.unpacked, chunk.codec)
        max_levels = (levels.max_repetition_level, levels.max_definition_level)
        for max_level, encoding in zip(max_levels, page.level_encodings, strict=True):
            if max_level == 0:
                continue
            if encoding != _RLE:
                raise ValueError("levels whose length is not stated")
            size_of_levels = int.from_bytes(
                data[position : position + _SIZE_BYTES], "little"
            )
            position += _SIZE_BYTES + size_of_levels
    else:  # version 2: the levels come first, never packed
        if not 0 <= page.levels <= min(len(data), page.unpacked):
            raise ValueError("the levels are longer than their page")
        data = data[page.levels :]
        if page.is_packed:
            size = page.unpacked - page.levels
            data = _unpack(arrow, data, size, chunk.codec)
    reader = _CompactReader(data, position)
    # _DELTA_BYTE_ARRAY has one run of prefix lengths and one of suffix lengths.
    runs = 2 if page.encoding == _DELTA_BYTE_ARRAY else 1
    try:
        for _ in range(runs):
            if reader.skip_deltas() > page.values:
                raise ValueError("a page has more lengths than values")
    except IndexError:
        raise ValueError("a page ends within its lengths") from None


def _unpack(arrow: Any, data: bytes, size: int, compression: str) -> bytes:
    """Return the content of a page, unpacked.

    Args:
        arrow: The package pyarrow.
        data: The packed content.
        size: Its bytes when unpacked.
        compression: How it was packed, as `ColumnChunk.codec` names it.
    """
    if compression == "UNCOMPRESSED" or not data:
        return data
    codec = {"LZ4": "lz4_raw"}.get(compression, compression.lower())
    unpacked: bytes = arrow.decompress(data, size, codec=codec, asbytes=True)
    return unpacked


# ---- Thrift --------------------------------------------------------------------------

# The fields of a struct by number and type. As in Arrow's reader, a field of an
# unexpected type counts as missing, and the last of several fields is used.
_Fields = dict[tuple[int, int], Any]


@dataclass(frozen=True)
class _Shape:
    """The lists in a kind of struct of a footer.

    Thrift reads the items of a list that it knows by their own type, whatever the list
    says, and skips other values by the type that they state. To read the same values, a
    list must state the right type here.

    Attributes:
        lists: Number of a field to the type of the list's items.
        items: Number of such a field to the shape of structs in it that are read.
        structs: Number of a field to the shape of the struct in it.
    """

    lists: Mapping[int, int] = field(default_factory=dict)
    items: Mapping[int, _Shape] = field(default_factory=dict)
    structs: Mapping[int, _Shape] = field(default_factory=dict)


_NO_LISTS = _Shape()
_SIZE_STATISTICS = _Shape({2: _I64, 3: _I64})
_GEOSPATIAL_STATISTICS = _Shape({2: _I32})
_COLUMN_KEY = _Shape(structs={2: _Shape({1: _BINARY})})
_COLUMN = _Shape(
    {2: _I32, 3: _BINARY, 8: _STRUCT, 13: _STRUCT},
    structs={16: _SIZE_STATISTICS, 17: _GEOSPATIAL_STATISTICS},
)
_CHUNK = _Shape(structs={3: _COLUMN, 8: _COLUMN_KEY})
_GROUP = _Shape({1: _STRUCT, 4: _STRUCT}, items={1: _CHUNK})
_FOOTER = _Shape({2: _STRUCT, 4: _STRUCT, 5: _STRUCT, 7: _STRUCT}, items={4: _GROUP})


def _get_integer(fields: _Fields, number: int) -> int:
    """Return a 32-bit integer field; raise ValueError if it is missing."""
    value = fields.get((number, _I32))
    if value is None or not -(2**31) <= value < 2**31:
        raise ValueError("a page header lacks a number")
    return int(value)


def _get_long(fields: _Fields, number: int) -> int:
    """Return a 64-bit integer field; raise ValueError if it is missing."""
    value = fields.get((number, _I64))
    if value is None or not -(2**63) <= value < 2**63:
        raise ValueError("the footer lacks a number")
    return int(value)


def _get_struct(fields: _Fields, number: int) -> _Fields:
    """Return a field that is a struct; raise ValueError if it is missing."""
    value = fields.get((number, _STRUCT))
    if value is None:
        raise ValueError("a page header lacks a struct")
    struct: _Fields = value
    return struct


class _CompactReader:
    """Reads Thrift's compact protocol, and Parquet's runs of deltas.

    An IndexError means that the bytes end too early.

    Args:
        data: The bytes.
        position: The start of the first value.

    Attributes:
        position: The start of the next value.
    """

    def __init__(self, data: bytes, position: int = 0) -> None:
        self._data = data
        self.position = position

    def read_struct(self, depth: int = 0, shape: _Shape | None = None) -> _Fields:
        """Return the numbers and structs in a struct, and skip other values.

        Args:
            depth: How deep the struct is nested.
            shape: The lists in it, if it is part of a footer. A page header has none.
        """
        if depth > _MAX_DEPTH:
            raise ValueError("structs are nested too deep")
        fields: _Fields = {}
        number = 0
        while head := self._read_byte():
            kind = head & 15
            step = head >> 4
            number = number + step if step else self._read_zigzag()
            if not 0 <= number < 2**15:  # Thrift would take a part of its bits
                raise ValueError("a field has an impossible number")
            key = (number, _TRUE if kind == _FALSE else kind)
            value: Any
            if kind in (_TRUE, _FALSE):
                value = kind == _TRUE
            elif kind in (_LIST, _SET) and shape is not None:
                value = self._read_list(number, shape, depth)
            else:
                inner = None if shape is None else shape.structs.get(number, _NO_LISTS)
                value = self._read_value(kind, depth, inner)
            # Thrift merges a struct that occurs twice with the earlier one.
            if shape is not None and key in fields:
                raise ValueError("a field of the footer occurs twice")
            fields[key] = value
        return fields

    def _read_list(self, number: int, shape: _Shape, depth: int) -> list[_Fields]:
        """Return the structs in a list of a footer if they are read; else skip it.

        Args:
            number: The number of the field.
            shape: The shape of the struct that the list is in.
            depth: How deep this struct is nested.
        """
        head = self._read_byte()
        kind = head & 15
        size = head >> 4
        if size == 15:
            size = self._read_varint()
        if kind != shape.lists.get(number, kind) or size > len(self._data):
            raise ValueError("a list of the footer is damaged")
        item_shape = shape.items.get(number)
        if item_shape is not None:
            return [self.read_struct(depth + 1, item_shape) for _ in range(size)]
        if kind in _FIXED_SIZES:
            self._skip_bytes(size * _FIXED_SIZES[kind])
        else:
            for _ in range(size):
                self._read_value(kind, depth, _NO_LISTS)
        return []

    def _read_value(self, kind: int, depth: int, shape: _Shape | None = None) -> Any:
        """Return a number or a struct; skip a value of another type.

        Args:
            kind: The type of the value.
            depth: How deep the struct around it is nested.
            shape: The shape of a struct; None in a page header.
        """
        if kind in (_I16, _I32, _I64):
            return self._read_zigzag()
        if kind == _STRUCT:
            return self.read_struct(depth + 1, shape)
        if kind in (_BYTE, _DOUBLE):
            self._skip_bytes(_FIXED_SIZES[kind])
        elif kind == _BINARY:
            self._skip_bytes(self._read_varint())
        else:
            raise ValueError("a type that no page header or footer has")
        return None

    def skip_deltas(self) -> int:
        """Skip a run of DELTA_BINARY_PACKED; return its declared number of values."""
        block = self._read_varint()
        parts = self._read_varint()
        count = self._read_varint()
        self._read_varint()  # the first value
        if parts == 0 or block % parts or block // parts % 32:
            raise ValueError("the blocks of a page are damaged")
        part = block // parts
        left = count - 1
        while left > 0:
            self._read_varint()  # the smallest difference
            widths = self._data[self.position : self.position + parts]
            self._skip_bytes(parts)
            for width in widths:
                if left > 0:
                    self._skip_bytes(width * part // 8)
                left -= part
        return count

    def _skip_bytes(self, number: int) -> None:
        """Skip bytes; raise IndexError if there are fewer."""
        if number > len(self._data) - self.position:
            raise IndexError
        self.position += number

    def _read_byte(self) -> int:
        """Return the next byte."""
        value = self._data[self.position]
        self.position += 1
        return value

    def _read_varint(self) -> int:
        """Return the next number, which has seven bits in each of its bytes."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self._read_byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("a number with too many bytes")

    def _read_zigzag(self) -> int:
        """Return the next signed number, whose lowest bit is its sign."""
        value = self._read_varint()
        return (value >> 1) ^ -(value & 1)
