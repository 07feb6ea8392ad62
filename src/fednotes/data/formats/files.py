"""Reading of a corpus's files and of their text.

A file whose name ends in .gz or .zst is unpacked while it is read. Reading never blocks
on a FIFO, a socket or a device, and never uses more memory than the bounds in
`fednotes.core.bounds` permit.
"""

from __future__ import annotations

import codecs
import errno
import gzip
import io
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO, cast

from fednotes.core import bounds
from fednotes.core.errors import UNREADABLE, DataError, MissingExtra, needs
from fednotes.core.parsing import NotAFile, open_regular, read_at_most
from fednotes.data import encodings

PACKED_SUFFIXES = (".gz", ".zst")
READ_ERRORS = (OSError, EOFError, zlib.error)  # raised by reading a damaged file
_HEAD = 1 << 16  # bytes that suffice to recognise a format
_SIGNATURE = 6  # bytes at the start of a file that identify a binary format
_BLANK = "\ufeff \t\r\n"


# ---- opening -------------------------------------------------------------------------


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading, without blocking on a FIFO, a socket or a device.

    Raises:
        DataError: It does not exist, is not a file, or may not be read.
    """
    try:
        return io.BufferedReader(_File(path, opener=open_regular))
    except FileNotFoundError:
        raise DataError.at(path, 0, "no such file") from None
    except NotAFile as error:
        raise DataError.at(path, 0, str(error.strerror)) from None
    except OSError as error:
        raise DataError.at(path, 0, f"cannot read: {error.strerror or error}") from None


class _File(io.FileIO):
    """A file that raises an error where reading would have to wait.

    Files of the kernel, such as /proc/kmsg, pass for regular files.
    """

    def readinto(self, buffer: Any) -> int:
        """Read bytes into a buffer.

        Raises:
            BlockingIOError: There are none yet.
        """
        count: int | None = super().readinto(buffer)
        if count is None:
            raise BlockingIOError(
                errno.EAGAIN, "its content is not available yet, so it cannot be read"
            )
        return count


def open_bytes(path: Path) -> BinaryIO:
    """Open a file for reading, unpacked if its name ends in .gz or .zst.

    Raises:
        DataError: As `open_file`.
        MissingExtra: It is a .zst file, and the extra "arrow" is not installed.
    """
    suffix = path.suffix.lower()
    if suffix == ".zst":
        return _open_zstandard(path)
    file = open_file(path)
    if suffix != ".gz":
        return file
    return io.BufferedReader(_UnpackedFile(gzip.GzipFile(fileobj=file), file, path))


def _open_zstandard(path: Path) -> BinaryIO:
    """Open a file whose name ends in .zst, unpacked."""
    with needs("pyarrow", "arrow"):
        import pyarrow
    file = open_file(path)
    stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd")
    return io.BufferedReader(_UnpackedFile(stream, file, path))


class _UnpackedFile(io.RawIOBase):
    """The unpacked bytes of a packed file; closing it closes the packed file.

    Reading raises DataError if the file unpacks to far more bytes than packed text
    does. Such a bomb is detected while it is unpacked, after `bounds.PACKED_FREE`
    bytes.

    Args:
        stream: The stream of unpacked bytes.
        file: The packed file.
        path: Its path, for messages.
    """

    def __init__(self, stream: Any, file: BinaryIO, path: Path) -> None:
        self._stream = stream
        self._file = file
        self._path = path
        self._size = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read bytes into a buffer; see `io.RawIOBase.readinto`."""
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self._size += len(data)
        if self._size > bounds.PACKED_FREE:
            self._require_growth_of_text()
        return len(data)

    def _require_growth_of_text(self) -> None:
        """Raise DataError if more was unpacked than packed text would give."""
        packed_size = self._file.tell()
        if self._size > bounds.PACKED_RATIO * packed_size:
            raise DataError.at(
                self._path,
                0,
                f"it grows more than {bounds.PACKED_RATIO}-fold when unpacked, which "
                "no text does: unpack the file yourself if you trust it",
            )

    def close(self) -> None:
        """Close the stream and the packed file."""
        if not self.closed:
            self._stream.close()
            self._file.close()
        super().close()


@contextmanager
def open_seekable(path: Path) -> Iterator[BinaryIO]:
    """Open a file as a seekable stream; a packed file is first unpacked to disk.

    Raises:
        DataError: As `open_file`, or a packed file is incomplete.
    """
    if path.suffix.lower() not in PACKED_SUFFIXES:
        with open_file(path) as file:
            yield file
        return
    # This file has no name, so it disappears when the process ends.
    with tempfile.TemporaryFile() as unpacked:
        try:
            with open_bytes(path) as packed:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
        except READ_ERRORS as error:
            raise make_incomplete_error(path, error) from None
        unpacked.seek(0)
        yield cast(BinaryIO, unpacked)


def remove_packed_suffix(path: Path) -> Path:
    """Return a path without its .gz or .zst suffix."""
    is_packed = path.suffix.lower() in PACKED_SUFFIXES
    return path.with_suffix("") if is_packed else path


# ---- errors --------------------------------------------------------------------------


@contextmanager
def locating_errors(path: Path, line: int = 0) -> Iterator[None]:
    """Add a place to a DataError that is raised in the context without one.

    Args:
        path: The file.
        line: The line, from 1; 0 means the whole file.
    """
    try:
        yield
    except DataError as error:
        if error.problems:
            raise error from None
        raise DataError.at(path, line, str(error)) from None


def make_incomplete_error(path: Path, error: Exception) -> DataError:
    """Return the error for a file that cannot be read to its end."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return DataError(
        f"{path}: cannot be read to its end ({reason}): check that the file is complete"
    )


# ---- text ----------------------------------------------------------------------------


def read_text(path: Path, *, may_be_empty: bool = False, exact: bool = False) -> str:
    r"""Return a file's text, without byte-order mark and with `\n` as line ending.

    The byte-order mark determines the encoding. Without one it is UTF-8 or the
    user-specified encoding (`encodings.reading_as`).

    Args:
        path: The file.
        may_be_empty: Whether a file without text is accepted.
        exact: Whether to return all characters unchanged, including the mark.

    Raises:
        DataError: The file does not exist, is empty, is larger than `bounds.FILE`, or
            is not text in that encoding.
    """
    data = _read_bytes(path)
    try:
        text, mark_length = encodings.decode_text(data, encodings.get_user_encoding())
    except encodings.UndecodableError as error:
        raise DataError.at(path, error.line, str(error), UNREADABLE) from None
    except DataError as error:
        raise DataError.at(path, 0, str(error), UNREADABLE) from None
    if not may_be_empty and not text.strip(_BLANK):
        raise DataError.at(path, 0, "the file is empty")
    if exact:
        return f"\ufeff{text}" if mark_length else text
    return text.replace("\r\n", "\n")


def _read_bytes(path: Path) -> bytes:
    """Return the bytes of a file of at most `bounds.FILE` bytes, unpacked."""
    is_packed = path.suffix.lower() in PACKED_SUFFIXES
    try:
        with open_bytes(path) as file:
            if is_packed:
                data = file.read(bounds.FILE + 1)
            else:
                data = read_at_most(file, bounds.FILE)
    except READ_ERRORS as error:
        if is_packed:
            raise make_incomplete_error(path, error) from None
        reason = getattr(error, "strerror", None) or error
        raise DataError.at(path, 0, f"cannot read: {reason}") from None
    if len(data) > bounds.FILE:
        subject = "unpacked it has" if is_packed else "it has"
        raise DataError.at(
            path,
            0,
            f"{subject} more than {bounds.FILE:,} bytes: split it into several files",
        )
    return data


def find_encoding(path: Path, user_encoding: str) -> tuple[str, int]:
    """Return the codec of a text file, and the length of its byte-order mark.

    Args:
        path: The file. It is read to its end only if the user specified an encoding
            that contains ASCII.
        user_encoding: The user-specified encoding, or "auto".

    Raises:
        DataError: The file does not exist, is incomplete or is not text.
    """
    try:
        with locating_errors(path), open_bytes(path) as file:
            head = file.read(encodings.HEAD)
            return encodings.choose_codec_of_stream(file, head, user_encoding)
    except READ_ERRORS as error:
        raise make_incomplete_error(path, error) from None


@contextmanager
def open_text(
    path: Path, user_encoding: str, newline: str = "\n", errors: str = "strict"
) -> Iterator[io.TextIOWrapper]:
    """Open a file as text, without byte-order mark and unpacked if it is packed.

    Args:
        path: The file.
        user_encoding: The user-specified encoding, or "auto".
        newline: As in Python's `open`.
        errors: As in Python's `open`.

    Raises:
        DataError: The file does not exist, is incomplete or is not text, or a byte is
            invalid in its encoding; the error then names the line of that byte.
    """
    codec, mark_length = find_encoding(path, user_encoding)
    binary = _open_after_mark(path, mark_length)
    with io.TextIOWrapper(binary, codec, errors, newline) as file:
        try:
            yield file
        except UnicodeDecodeError:
            byte = _find_undecodable(path, codec, mark_length)
            message = encodings.describe_undecodable(
                f"byte {byte.position}", codec, user_encoding, binary=byte.is_binary
            )
            raise DataError.at(path, byte.line, message, UNREADABLE) from None
        except READ_ERRORS as error:
            raise make_incomplete_error(path, error) from None


def _open_after_mark(path: Path, mark_length: int) -> BinaryIO:
    """Open a file after its byte-order mark."""
    file = open_bytes(path)
    try:
        file.read(mark_length)
    except READ_ERRORS as error:
        file.close()
        raise make_incomplete_error(path, error) from None
    return file


class _UndecodableByte(NamedTuple):
    """A byte that a codec cannot decode.

    Attributes:
        line: Its line, from 1.
        position: Its position in the file, from 0.
        is_binary: Whether the file seems binary.
    """

    line: int
    position: int
    is_binary: bool


def _find_undecodable(path: Path, codec: str, mark_length: int) -> _UndecodableByte:
    """Return the first byte that a codec cannot decode.

    Args:
        path: The file.
        codec: The codec.
        mark_length: The length of the file's byte-order mark.
    """
    decoder = codecs.getincrementaldecoder(codec)()
    line = 1
    position = mark_length
    with _open_after_mark(path, mark_length) as file:
        has_more = True
        while has_more:
            data = file.read(_HEAD)
            has_more = bool(data)
            try:
                line += decoder.decode(data, final=not has_more).count("\n")
            except UnicodeDecodeError as error:
                before = error.object[: error.start]
                line += before.decode(codec, "replace").count("\n")
                pending = len(error.object) - len(data)  # bytes of the previous piece
                is_binary = b"\0" in data and encodings.contains_ascii(codec)
                position += len(before) - pending
                return _UndecodableByte(line, position, is_binary)
            position += len(data)
    # The file has changed meanwhile, so no byte of it can be named.
    return _UndecodableByte(0, 0, is_binary=False)


# ---- lines ---------------------------------------------------------------------------


def read_bounded_lines(
    file: TextIO, path: Path, max_length: int | None = None, expected: str = ""
) -> Iterator[str]:
    """Yield the lines of a text with their line endings.

    Args:
        file: The text.
        path: Its file, for messages.
        max_length: Maximum number of characters in a line; None is `bounds.LINE`.
        expected: Description of a valid line, for the message.

    Raises:
        DataError: A line is too long; the rest of it is not read.
    """
    limit = bounds.LINE if max_length is None else max_length
    number = 0
    while line := file.readline(limit + 1):
        number += 1
        if len(line) > limit:
            raise DataError.at(
                path,
                number,
                f"the line has more than {limit:,} characters: expected "
                f"{expected or 'one record per line'}: check that the file has this "
                "format",
            )
        yield line


def read_lines(
    path: Path,
    *,
    may_be_empty: bool = False,
    max_length: int | None = None,
    expected: str = "",
) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text without line endings, and their numbers from 1.

    One line at a time is in memory. The encoding is determined as in `read_text`.

    Args:
        path: The file.
        may_be_empty: Whether a file without text is accepted.
        max_length: As in `read_bounded_lines`.
        expected: As in `read_bounded_lines`.

    Raises:
        DataError: The file does not exist, is empty, is not text, or has a line that is
            too long.
    """
    is_empty = True
    with open_text(path, encodings.get_user_encoding()) as file:
        lines = read_bounded_lines(file, path, max_length, expected)
        for number, line in enumerate(lines, 1):
            is_empty = is_empty and not line.strip(_BLANK)
            yield number, line.removesuffix("\n").removesuffix("\r")
    if is_empty and not may_be_empty:
        raise DataError.at(path, 0, "the file is empty")


def read_nonblank_lines(
    path: Path, *, may_be_empty: bool = False
) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, and their numbers; see `read_lines`."""
    lines = read_lines(path, may_be_empty=may_be_empty)
    return ((number, line) for number, line in lines if line.strip())


# ---- the start of a file -------------------------------------------------------------


def read_start(path: Path) -> str:
    """Return the first 64 KiB of a text; "" if the file cannot be read."""
    text, _ = _read_first_bytes(path)
    return text


def _read_first_bytes(path: Path) -> tuple[str, bool]:
    """Return the first 64 KiB of a text, and whether there may be more."""
    try:
        with open_bytes(path) as file:
            data = file.read(_HEAD)
        codec, mark_length = encodings.choose_codec(data, encodings.get_user_encoding())
    except (DataError, MissingExtra, *READ_ERRORS):
        return "", False
    return data[mark_length:].decode(codec, errors="replace"), len(data) == _HEAD


def read_head(path: Path) -> list[str]:
    """Return the first lines that are not blank; [] if the file cannot be read."""
    text, has_more = _read_first_bytes(path)
    lines = text.split("\n")
    if has_more and len(lines) > 1:
        lines.pop()  # it may be incomplete
    return [line.rstrip("\r") for line in lines if line.strip()]


def read_first_line(path: Path) -> str:
    """Return the first line of a file that is not blank, or ""."""
    return next(iter(read_head(path)), "")


def starts_with(path: Path, signatures: tuple[bytes, ...]) -> bool:
    """Return whether a file starts with one of some signatures of at most 6 bytes.

    False if the file cannot be read.
    """
    with suppress(DataError, MissingExtra, *READ_ERRORS), open_bytes(path) as file:
        return file.read(_SIGNATURE).startswith(signatures)
    return False
