"""Counting of msgpack's values before they are built.

In a list of empty lists, each byte becomes a value of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

# Number of bytes after the first one, by the first byte of a value of fixed size.
_FIXED = {
    **dict.fromkeys(range(0x80), 0),
    **{first: first - 0xA0 for first in range(0xA0, 0xC0)},  # a text
    **dict.fromkeys((0xC0, 0xC2, 0xC3), 0),
    **{0xCA: 4, 0xCB: 8},
    **{0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8},
    **{0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8},
    **{0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17},
    **dict.fromkeys(range(0xE0, 0x100), 0),
}

# Number of bytes of the length, and of bytes between the length and the content.
_MEASURED = {
    **{0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0)},  # bytes
    **{0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)},  # an extension, after its type
    **{0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)},  # a text
}

# Number of bytes of the item count, and of values per item.
_NESTED = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
_SHORT_NESTED = {
    **{0x80 + number: 2 * number for number in range(16)},
    **{0x90 + number: number for number in range(16)},
}


def has_more_msgpack_values(data: bytes, limit: int) -> bool:
    """Return whether msgpack data has more than `limit` values, nested ones included.

    Raises:
        ValueError: The bytes are not msgpack, or end too early.
    """
    count = 1
    for items in _read_items(data):
        count += items
        if count > limit:
            return True
    return False


def _read_items(data: bytes) -> Iterator[int]:
    """Yield the number of values of each list or mapping, before they are read."""
    position = 0
    pending = 1
    while pending:
        pending -= 1
        if position >= len(data):
            raise ValueError("the values end too early")
        first = data[position]
        position += 1
        items = _SHORT_NESTED.get(first, 0)
        if first in _NESTED:
            size, values = _NESTED[first]
            items = values * int.from_bytes(data[position : position + size])
            position += size
        elif first in _MEASURED:
            size, between = _MEASURED[first]
            length = int.from_bytes(data[position : position + size])
            position += size + between + length
        elif first in _FIXED:
            position += _FIXED[first]
        elif first not in _SHORT_NESTED:
            raise ValueError("a byte that no value begins with")
        if items:
            pending += items
            yield items
    if position > len(data):
        raise ValueError("the values end too early")
