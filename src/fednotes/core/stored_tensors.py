"""Tensors in a file without a name, of which only those in use are in memory.

The server keeps large replies and requests in such files (`docs/reliability.md`). The
operating system deletes a file without a name when the last process that uses it ends,
however it ends.
"""

from __future__ import annotations

import copy
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fednotes.core.errors import FednotesError, raising_os_errors_as
from fednotes.core.store import LARGE_BYTES
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


class StoredBytes:
    """Bytes in a file without a name, which are written from start to end.

    Args:
        folder: The folder on whose file system the bytes lie.

    Raises:
        FednotesError: Writing to disk failed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._start = 0
        self._size = 0
        with self._naming_disk_errors():
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        # Parts of these bytes share the file, which is closed with the last of them.
        self._closing = _Closing(self._file)

    def append(self, piece: bytes | bytearray | memoryview) -> None:
        """Write a piece behind the others.

        Raises:
            FednotesError: Writing to disk failed.
        """
        view = memoryview(piece).cast("B")
        with self._naming_disk_errors():
            while len(view):
                num_written = self._file.write(view)
                self._size += num_written
                view = view[num_written:]

    def __len__(self) -> int:
        """Return the number of bytes."""
        return self._size

    def __getitem__(self, part: slice) -> bytes:
        """Return a part of the bytes, which must be small."""
        start, stop, _ = part.indices(self._size)
        return os.pread(self._file.fileno(), max(0, stop - start), self._start + start)

    def __bytes__(self) -> bytes:
        return self[:]

    def cut(self, start: int, stop: int) -> StoredBytes:
        """Return a part of the bytes, without a copy; nothing can be appended to it."""
        start, stop, _ = slice(start, stop).indices(self._size)
        part = copy.copy(self)
        part._start = self._start + start
        part._size = max(0, stop - start)
        return part

    def map_tensor(self, place: Place) -> Tensor:
        """Return a tensor of the file, which is in memory as long as it is used."""
        if place.end == place.offset:
            return place.make_tensor(b"")
        offset = self._start + place.offset
        excess = offset % mmap.ALLOCATIONGRANULARITY  # windows begin at its multiples
        window = mmap.mmap(
            self._file.fileno(),
            excess + place.end - place.offset,
            offset=offset - excess,
            access=mmap.ACCESS_COPY,  # changes would not reach the file
        )
        return place._replace(offset=excess).make_tensor(window)

    def _naming_disk_errors(self) -> AbstractContextManager[None]:
        """Turn an error of the disk into one that names the folder."""
        return raising_os_errors_as(
            FednotesError,
            self._folder,
            action="hold a large message",
            ending=": make room on this disk, then resume the run",
        )


class _Closing:
    """Closes a file when nothing refers to this object any more."""

    def __init__(self, file: FileIO) -> None:
        weakref.finalize(self, file.close)


class StoredTensors(Mapping[str, Tensor]):
    """Tensors by name. Each access maps a tensor into memory anew.

    Args:
        stored: The bytes in which they lie.
        places: The place of each.
    """

    def __init__(self, stored: StoredBytes, places: Mapping[str, Place]) -> None:
        self._stored = stored
        self._places = places

    def __getitem__(self, name: str) -> Tensor:
        return self._stored.map_tensor(self._places[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def keep_tensors(tensors: Mapping[str, Tensor], folder: Path) -> Mapping[str, Tensor]:
    """Return copies that later training steps do not change, large ones in a file.

    Raises:
        FednotesError: Writing to disk failed.
    """
    if nbytes(tensors) < LARGE_BYTES:
        return copy_tensors(tensors)
    stored = StoredBytes(folder)
    places = {}
    for name, value in tensors.items():
        stored.append(bytes(-len(stored) % 64))
        places[name] = Place(value.dtype, list(value.shape), len(stored))
        if value.numel():
            flat = value.detach().cpu().contiguous().reshape(-1)
            stored.append(flat.view(torch.uint8).numpy().data)
    return StoredTensors(stored, places)
