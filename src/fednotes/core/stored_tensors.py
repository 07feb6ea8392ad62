"""Tensors in an unnamed temporary file; only those in use are in memory.

The server keeps large replies and requests in such files (`docs/reliability.md`).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fednotes.core.store import LARGE_BYTES
from fednotes.core.stored_bytes import ALIGN, StoredBytes
from fednotes.core.tensors import copy_tensors, nbytes


class Place(NamedTuple):
    """The position of a tensor's elements in a buffer or file."""

    dtype: torch.dtype
    shape: list[int]
    offset: int

    @property
    def end(self) -> int:
        """The offset after the last element."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize

    def make_tensor(self, buffer: bytes | bytearray | memoryview | mmap.mmap) -> Tensor:
        """Return the tensor at this place of a buffer, as a view of it."""
        count = math.prod(self.shape)
        if not count:
            return torch.empty(self.shape, dtype=self.dtype)
        is_boolean = self.dtype is torch.bool
        raw_type = torch.uint8 if is_boolean else self.dtype
        flat = torch.frombuffer(buffer, dtype=raw_type, count=count, offset=self.offset)
        return flat.view(self.dtype).reshape(self.shape)


class StoredTensors(Mapping[str, Tensor]):
    """Tensors by name. Each access maps a tensor into memory anew.

    Args:
        stored: The bytes in which they lie.
        places: The place of each tensor.
    """

    def __init__(self, stored: StoredBytes, places: Mapping[str, Place]) -> None:
        self._stored = stored
        self._places = places

    def __getitem__(self, name: str) -> Tensor:
        place = self._places[name]
        if place.end == place.offset:
            return place.make_tensor(b"")
        window = self._stored.map_window(place.offset, place.end)
        return place._replace(offset=window.offset).make_tensor(window.buffer)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def copy_or_store_tensors(
    tensors: Mapping[str, Tensor], folder: Path
) -> Mapping[str, Tensor]:
    """Return copies that later training steps do not change, large ones in a file.

    Raises:
        FednotesError: Writing to disk failed.
    """
    if nbytes(tensors) < LARGE_BYTES:
        return copy_tensors(tensors)
    stored = StoredBytes(folder)
    places = {}
    for name, value in tensors.items():
        stored.append(bytes(-len(stored) % ALIGN))
        places[name] = Place(value.dtype, list(value.shape), len(stored))
        if value.numel():
            flat = value.detach().cpu().contiguous().reshape(-1)
            stored.append(flat.view(torch.uint8).numpy().data)
    return StoredTensors(stored, places)
