"""Bytes in an unnamed temporary file instead of memory.

The operating system deletes an unnamed file when the last process that uses it ends,
however it ends.
"""

from __future__ import annotations

import copy
import mmap
import os
import tempfile
import weakref
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from fednotes.core.errors import FednotesError, raising_os_errors_as

# Tensors begin at multiples of this many bytes, in files and in messages, as torch
# allocates them in memory.
ALIGN = 64


class Window(NamedTuple):
    """A part of a file in memory.

    Attributes:
        buffer: The memory.
        offset: The start of the part in it.
    """

    buffer: mmap.mmap
    offset: int


class StoredBytes:
    """Bytes in an unnamed temporary file, which are written from start to end.

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
        """Append a piece.

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

    def map_window(self, start: int, stop: int) -> Window:
        """Map a part of the bytes into memory for as long as it is used."""
        offset = self._start + start
        excess = offset % mmap.ALLOCATIONGRANULARITY  # windows begin at its multiples
        buffer = mmap.mmap(
            self._file.fileno(),
            excess + stop - start,
            offset=offset - excess,
            access=mmap.ACCESS_COPY,  # changes would not reach the file
        )
        return Window(buffer, excess)

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
