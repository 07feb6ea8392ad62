"""Measurement of Arrow rows before they become Python values.

Rows of a column may share a value, and so may the parts of a row. A column of a few
bytes can therefore stand for more values than fit into any memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

OBJECT_SIZE = 32  # minimum bytes of a Python value
_SCALAR_SIZE = 16  # maximum bytes of an Arrow value other than text


def measure_value(value: Any) -> int:
    """Return the approximate number of bytes of a row's value in memory."""
    if isinstance(value, str | bytes):
        return OBJECT_SIZE + len(value)
    if isinstance(value, dict):
        return OBJECT_SIZE + sum(map(measure_value, value.values()))
    if isinstance(value, list):
        return OBJECT_SIZE + sum(map(measure_value, value))
    return OBJECT_SIZE


def slice_within(arrow: Any, batch: Any, limit: int) -> Iterator[tuple[Any, int]]:
    """Yield a batch of rows in pieces of limited size.

    Args:
        arrow: The package pyarrow.
        batch: The rows.
        limit: The limit in bytes.

    Yields:
        The pieces, and an approximate upper bound of the bytes of their values. A piece
        of one row may exceed the limit.
    """
    pending = [batch]
    while pending:
        piece = pending.pop()
        size = sum(measure_array(arrow, column) for column in piece.columns)
        if size <= limit or piece.num_rows <= 1:
            yield piece, size
            continue
        middle = piece.num_rows // 2
        pending += [piece.slice(middle), piece.slice(0, middle)]


def measure_array(arrow: Any, array: Any) -> int:
    """Return an approximate upper bound of the bytes of an array's values in memory."""
    if not len(array):
        return 0
    return OBJECT_SIZE * len(array) + _measure_content(arrow, array)


def _measure_content(arrow: Any, array: Any) -> int:
    """Return the bytes of an array's values without their objects."""
    kind = array.type
    types = arrow.types
    if _has_lengths(arrow, kind):
        return _sum_lengths(arrow, arrow.compute.binary_length(array))
    if types.is_dictionary(kind) and _has_lengths(arrow, kind.value_type):
        lengths = arrow.compute.binary_length(array.dictionary)
        return _sum_lengths(arrow, lengths.take(array.indices))
    # Each value may consist of all shared values.
    if types.is_dictionary(kind):
        return len(array) * measure_array(arrow, array.dictionary)
    if types.is_run_end_encoded(kind):
        return len(array) * measure_array(arrow, array.values)
    if is_view(kind):
        return len(array) * int(array.nbytes)
    return sum(
        measure_array(arrow, inner) for inner in _list_inner_arrays(arrow, array)
    )


def _list_inner_arrays(arrow: Any, array: Any) -> list[Any]:
    """Return the child arrays of a nested array."""
    kind = array.type
    types = arrow.types
    if isinstance(array, arrow.ExtensionArray):
        return [array.storage]
    if types.is_fixed_size_list(kind):
        return [array.flatten()]
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        start = array.offsets[0].as_py()
        end = array.offsets[-1].as_py()
        return [array.values.slice(start, end - start)]
    if types.is_struct(kind):
        return [array.field(index) for index in range(kind.num_fields)]
    return []


def _has_lengths(arrow: Any, kind: Any) -> bool:
    """Return whether Arrow can compute the lengths of a type's values."""
    types = arrow.types
    return bool(
        types.is_string(kind)
        or types.is_binary(kind)
        or types.is_large_string(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
    )


def _sum_lengths(arrow: Any, lengths: Any) -> int:
    """Return the sum of an array of lengths; 0 for an empty one."""
    return arrow.compute.sum(lengths).as_py() or 0


def is_view(kind: Any) -> bool:
    """Return whether the values of a type are views, which may share their text."""
    return str(kind) in ("string_view", "binary_view")


def has_shared_values(arrow: Any, kind: Any, depth: int = 0) -> bool:
    """Return whether the parts of one value of a type may be shared.

    Such a value may be arbitrarily large. A column of shared values is harmless: it has
    one per row, and rows are counted.

    Args:
        arrow: The package pyarrow.
        kind: The type.
        depth: How deep the type is nested.
    """
    types = arrow.types
    if isinstance(kind, arrow.BaseExtensionType):
        return has_shared_values(arrow, kind.storage_type, depth)
    is_shared = (
        types.is_dictionary(kind) or types.is_run_end_encoded(kind) or is_view(kind)
    )
    # The lists of such a column may overlap, and so may the values of a union.
    is_nested_view = types.is_list_view(kind) or types.is_large_list_view(kind)
    if is_nested_view or types.is_union(kind) or (depth > 0 and is_shared):
        return True
    if types.is_dictionary(kind):
        return has_shared_values(arrow, kind.value_type, depth + 1)
    inner = [kind.field(index).type for index in range(kind.num_fields)]
    return any(has_shared_values(arrow, each, depth + 1) for each in inner)


def find_stated_widths(arrow: Any, kind: Any) -> tuple[int, int]:
    """Return the bytes that a value takes by its type alone, even if it is null.

    Args:
        arrow: The package pyarrow.
        kind: The type of a column.

    Returns:
        The bytes of a row, and those of an item of a list in it.
    """
    types = arrow.types
    if isinstance(kind, arrow.BaseExtensionType):
        return find_stated_widths(arrow, kind.storage_type)
    if types.is_fixed_size_binary(kind):
        return kind.byte_width, 0
    widths = [
        find_stated_widths(arrow, kind.field(index).type)
        for index in range(kind.num_fields)
    ]
    row = sum(width for width, _ in widths)
    item = max((width for _, width in widths), default=0)
    if types.is_fixed_size_list(kind):
        return kind.list_size * max(_SCALAR_SIZE, row), item
    if types.is_struct(kind):
        return row, item
    return 0, max(row, item)
