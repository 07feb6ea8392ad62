"""Measure what the batches of an Arrow file hold before Arrow unpacks them.

A packed buffer begins with its length when it is unpacked, and Arrow allocates as much.
Where the buffers are is in the metadata of each message, which are FlatBuffers.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

_MAGIC = b"ARROW1"
_CONTINUATION = 0xFFFFFFFF  # before the length of each message, from version 0.15 on
_NOT_PACKED = -1  # in place of the length of a buffer that packing makes no smaller
_BLOCK = "<qi4xq"  # a message in the footer: its place, the bytes of metadata and body

# The version of metadata that may have packed buffers without a table that says so.
_VERSION_4 = 3

# Kinds of a message.
_DICTIONARY = 2
_BATCH = 3


def check_unpacked_sizes(file: BinaryIO, check: Callable[[int], None]) -> None:
    """Check how much memory an Arrow file or stream takes when it is unpacked.

    Args:
        file: The file; afterwards it is at its beginning.
        check: Called at each batch and dictionary, with the bytes that are in memory
            then: those of the batch and of all dictionaries so far. Raises an error if
            they are too many.

    Raises:
        ValueError: The file is damaged.
    """
    dictionaries = 0
    try:
        for message in _read_messages(file):
            size = _measure_unpacked(file, message)
            if message.kind == _DICTIONARY:
                dictionaries += size
                size = 0
            check(dictionaries + size)
    except struct.error:
        raise ValueError("the metadata are damaged") from None
    file.seek(0)


# ---- messages ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Message:
    """A message, and where its buffers are.

    Attributes:
        table: The metadata.
        kind: What kind of message it is.
        body: Where the buffers begin in the file.
        length: The bytes of all buffers in the file.
    """

    table: _Table
    kind: int
    body: int
    length: int


def _read_messages(file: BinaryIO) -> Iterator[_Message]:
    """Yield the messages of a stream, or those that the footer of a file lists."""
    file_size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if file.read(len(_MAGIC)) == _MAGIC:
        for position in _read_footer(file, file_size):
            message = _read_message(file, position, file_size)
            if message is None:
                raise ValueError("a batch is missing")
            yield message
        return
    position = 0
    while position < file_size:
        message = _read_message(file, position, file_size)
        if message is None:
            return
        yield message
        position = message.body + message.length


def _read_footer(file: BinaryIO, file_size: int) -> Iterator[int]:
    """Yield the positions of the dictionaries and batches that a footer lists."""
    tail = 4 + len(_MAGIC)
    (length,) = struct.unpack("<i", _read_at(file, file_size - tail, 4))
    footer = _Table.open_root(_read_at(file, file_size - tail - length, length))
    for blocks in (footer.read_structs(2, _BLOCK), footer.read_structs(3, _BLOCK)):
        for position, _, _ in blocks:
            yield position


def _read_message(file: BinaryIO, position: int, file_size: int) -> _Message | None:
    """Return the message at a position; None if it is the end of the stream."""
    head = 4
    (length,) = struct.unpack("<I", _read_at(file, position, head))
    if length == _CONTINUATION:
        (length,) = struct.unpack("<I", _read_at(file, position + head, 4))
        head += 4
    if length == 0:
        return None
    body = position + head + length
    if body > file_size:
        raise ValueError("a message extends past the end of the file")
    table = _Table.open_root(_read_at(file, position + head, length))
    body_length = table.read_number(3, "<q")
    if not 0 <= body_length <= file_size - body:
        raise ValueError("the buffers of a message extend past the end of the file")
    return _Message(table, table.read_number(1, "<B"), body, body_length)


def _measure_unpacked(file: BinaryIO, message: _Message) -> int:
    """Return the bytes that a message's buffers take when they are unpacked."""
    if message.kind not in (_DICTIONARY, _BATCH):
        return 0
    batch = message.table.read_table(2)
    if message.kind == _DICTIONARY and batch is not None:
        batch = batch.read_table(1)
    if batch is None:
        raise ValueError("a message lacks its batch")
    if batch.read_table(3) is None:
        version = message.table.read_number(0, "<h")
        if version == _VERSION_4 and message.table.read_table(4) is not None:
            raise ValueError("the buffers may be packed as before version 1.0")
        return message.length
    size = 0
    for offset, length in batch.read_structs(2, "<qq"):
        if length == 0:
            continue
        if not 0 <= offset <= message.length - length:
            raise ValueError("a buffer is not within its message")
        (unpacked,) = struct.unpack("<q", _read_at(file, message.body + offset, 8))
        size += length if unpacked == _NOT_PACKED else unpacked
        if unpacked < _NOT_PACKED:
            raise ValueError("the length of a buffer is negative")
    return size


def _read_at(file: BinaryIO, position: int, length: int) -> bytes:
    """Return the bytes of a file from a position; ValueError if it is negative."""
    if position < 0 or length < 0:
        raise ValueError("a position is negative")
    file.seek(position)
    return file.read(length)


# ---- FlatBuffers ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Table:
    """A table of FlatBuffers, whose fields have numbers.

    A struct.error says that something lies outside of the bytes.

    Attributes:
        data: The bytes of all tables.
        position: Where this table begins.
    """

    data: bytes
    position: int

    @classmethod
    def open_root(cls, data: bytes) -> _Table:
        """Return the table that contains the others."""
        return cls(data, struct.unpack_from("<I", data)[0])

    def read_number(self, field: int, form: str) -> int:
        """Return the number in a field; 0 if the field is missing.

        Args:
            field: The number of the field.
            form: The number's form, as in the module `struct`.
        """
        place = self._find_field(field)
        return 0 if place is None else int(self._unpack(form, place)[0])

    def read_table(self, field: int) -> _Table | None:
        """Return a field that is a table, or the place of a list; None if missing."""
        place = self._find_field(field)
        if place is None:
            return None
        return _Table(self.data, place + self._unpack("<I", place)[0])

    def read_structs(self, field: int, form: str) -> Iterator[tuple[Any, ...]]:
        """Yield the structs of the list in a field.

        Args:
            field: The number of the field.
            form: The form of a struct, as in the module `struct`.
        """
        start = self.read_table(field)
        if start is None:
            return
        (count,) = self._unpack("<I", start.position)
        size = struct.calcsize(form)
        for index in range(count):
            yield self._unpack(form, start.position + 4 + index * size)

    def _find_field(self, field: int) -> int | None:
        """Return the position of a field; None if it is missing.

        A table begins with its distance from its layout (FlatBuffers' "vtable"). The
        layout has two sizes of 2 bytes, and then the offset of each field in the table,
        0 for a missing one. It can end before the last fields.
        """
        (distance,) = self._unpack("<i", self.position)
        layout = self.position - distance
        (size,) = self._unpack("<H", layout)
        entry = 4 + 2 * field
        if entry + 2 > size:
            return None
        (offset,) = self._unpack("<H", layout + entry)
        return self.position + offset if offset else None

    def _unpack(self, form: str, position: int) -> tuple[Any, ...]:
        """Return the values at a position, in a form of the module `struct`."""
        if position < 0:
            raise struct.error("before the beginning")
        return struct.unpack_from(form, self.data, position)
