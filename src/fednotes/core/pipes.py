"""Whole frames of bytes over a pipe between two processes of this machine.

Each frame follows its length, an unsigned number of eight bytes, little-endian.
"""

from __future__ import annotations

import os
import struct

LENGTH = struct.Struct("<Q")


class PipeClosedError(Exception):
    """The process at the other end of a pipe has closed it or has ended."""


class FramePipe:
    """One direction in each of two pipes.

    Args:
        reading: File descriptor from which frames are read.
        writing: File descriptor to which frames are written.
    """

    def __init__(self, reading: int, writing: int) -> None:
        self._reading = reading
        self._writing = writing

    def fileno(self) -> int:
        """Return the descriptor that is readable when a frame comes."""
        return self._reading

    def send(self, frame: bytes | bytearray) -> None:
        """Write a frame, and wait until the pipe has taken all of it.

        Raises:
            PipeClosedError: The other end of the pipe has been closed.
        """
        view = memoryview(frame).cast("B")
        try:
            self._write(memoryview(LENGTH.pack(len(view))))
            self._write(view)
        except BrokenPipeError:
            raise PipeClosedError from None

    def receive(self) -> bytearray:
        """Wait for a frame and return it; its memory may be written to.

        Raises:
            PipeClosedError: The other end closed before the frame was complete.
        """
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        return self._read(length)

    def _write(self, view: memoryview) -> None:
        """Write all bytes; the pipe may take only some of them at a time."""
        while view:
            view = view[os.write(self._writing, view) :]

    def _read(self, length: int) -> bytearray:
        """Read exactly `length` bytes, which the pipe may give in several parts."""
        content = bytearray(length)
        with memoryview(content) as view:
            done = 0
            while done < length:
                count = os.readv(self._reading, [view[done:]])
                if count == 0:
                    raise PipeClosedError
                done += count
        return content
