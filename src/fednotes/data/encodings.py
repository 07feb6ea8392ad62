"""Find the encoding of text files, and recognise files that are not text.

A byte-order mark decides. Without one, a file is UTF-8 unless the caller names another
encoding. Nothing else is guessed: a text that is decoded with the wrong encoding looks
fine, but its mentions are not where the annotations say.

A named encoding applies to the files that are not UTF-8. A folder may therefore mix
UTF-8 with, say, Windows-1252: text in Windows-1252 that has an accented letter is not
valid UTF-8. Encodings that do not contain ASCII, such as UTF-16 without a mark, apply
to every file without a mark.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import BinaryIO

from fednotes.core.errors import ConfigError, DataError

AUTO = "auto"
HEAD = 1 << 16  # bytes that are enough to recognise an encoding
_CHUNK = 1 << 20  # bytes that are checked at a time
_ASCII = bytes(range(128))

# Codecs of Python that are not character encodings of files, or depend on the machine.
_UNSUITABLE = frozenset(
    "idna punycode raw-unicode-escape unicode-escape undefined utf-7 mbcs oem".split()
)
# The marks of UTF-32 come first: that of UTF-32-LE begins with that of UTF-16-LE.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_EXPORT = "export its text to a file that ends in .txt"
_UNPACK = "unpack it, and give the files in it"
# How files begin that are not text, what they are, and what to do.
_BINARY = (
    (b"%PDF-", "a PDF document", _EXPORT),
    (b"{\\rtf", "a document in Rich Text Format", "save it as plain text"),
    (
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",
        "a Microsoft Office document (.doc, .xls)",
        _EXPORT,
    ),
    (
        b"PK\x03\x04",
        "a ZIP archive, or a document of an office program (.docx, .xlsx)",
        _UNPACK,
    ),
    (b"PK\x05\x06", "an empty ZIP archive", _UNPACK),
    (b"\x1f\x8b", "data compressed by gzip", "give it a name that ends in .gz"),
    (
        b"\x28\xb5\x2f\xfd",
        "data compressed by Zstandard",
        ("give it a name that ends in .zst"),
    ),
    (b"\xfd7zXZ\x00", "data compressed by xz", _UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", _UNPACK),
    (b"SQLite format 3\x00", "an SQLite database", "export its table of notes as CSV"),
    (b"\x89PNG", "an image", _EXPORT),
    (b"\xff\xd8\xff", "an image", _EXPORT),
    (b"II*\x00", "an image", _EXPORT),
    (b"MM\x00*", "an image", _EXPORT),
)
# The same for files that begin with letters; there must be a NUL byte in the head.
_BINARY_WITH_NUL = (
    (b"PAR1", "a Parquet file", "name its format, parquet"),
    (b"ARROW1", "an Arrow file", "name its format, parquet"),
    (b"BZh", "data compressed by bzip2", _UNPACK),
    (b"GIF8", "an image", _EXPORT),
)
_DICOM = (128, b"DICM")

_SEVEN_BIT = ("iso2022", "hz")

_named: ContextVar[str] = ContextVar("encoding", default=AUTO)


@cache
def encoding_of(name: str) -> str:
    """Return the canonical name of an encoding that a user named.

    Args:
        name: "auto", or any of Python's names of a character encoding, such as
            "cp1252".

    Raises:
        ConfigError: There is no such encoding.
    """
    if name == AUTO:
        return AUTO
    try:
        codec = codecs.lookup(name)
    except (LookupError, ValueError, TypeError):
        codec = None
    if codec is None or not _is_file_encoding(codec):
        known = '"auto", "utf-8", "cp1252", "latin-1", "utf-16-le"'
        raise ConfigError(
            f"encoding = {name!r}: no such encoding; expected one such as {known}"
        )
    return codec.name


def _is_file_encoding(codec: codecs.CodecInfo) -> bool:
    is_text: bool = codec._is_text_encoding
    return is_text and codec.name.replace("_", "-") not in _UNSUITABLE


@contextmanager
def reading_as(encoding: str) -> Iterator[None]:
    """Read all files of the block in an encoding that the user named.

    The formats' readers open files at many places, and none of them depends on the
    encoding; so it is a context variable and not an argument of each of them.
    """
    token = _named.set(encoding_of(encoding))
    try:
        yield
    finally:
        _named.reset(token)


def named_encoding() -> str:
    """Return the encoding that the user named for the files being read, or "auto"."""
    return _named.get()


def marked(head: bytes) -> tuple[str, int]:
    """Return the encoding of a byte-order mark, and its length; "" without a mark."""
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            return encoding, len(mark)
    return "", 0


def codec_of(head: bytes, named: str = AUTO) -> tuple[str, int]:
    """Return the codec to try first on a file, and the length of its mark.

    Args:
        head: The file's first bytes; at most `HEAD` are used.
        named: The encoding that the user named, as `encoding_of` returns it.

    Raises:
        DataError: The file is not text, or it is UTF-16 or UTF-32 without a mark, and
            the user did not name this encoding.
    """
    encoding, length = marked(head)
    if encoding:
        return encoding, length
    require_text(head)
    if named != AUTO and not contains_ascii(named):
        return named, 0
    if wide := _wide(head[:HEAD]):
        raise DataError(
            f"the text looks like {wide.upper()} without a byte-order mark: set "
            f'encoding = "{wide}"'
        )
    return "utf-8", 0


def require_text(head: bytes) -> None:
    """Raise DataError if the first bytes of a file are not those of a text.

    The error says what the file is.
    """
    kinds = (*_BINARY, *_BINARY_WITH_NUL) if b"\0" in head[:HEAD] else _BINARY
    for start, what, remedy in kinds:
        if head.startswith(start):
            raise DataError(f"the file is {what}, not text: {remedy}")
    at, start = _DICOM
    if head[at : at + len(start)] == start:
        raise DataError(f"the file is a DICOM image, not text: {_EXPORT}")


def undecodable(place: str, encoding: str, named: str, *, binary: bool) -> str:
    """Return the message for a byte that cannot be decoded.

    Its remedy harms no file.

    Args:
        place: What the message calls the byte, such as "byte 12".
        encoding: The codec that failed.
        named: The encoding that the user named, or "auto".
        binary: Whether there are NUL bytes around it.
    """
    if binary:
        return "the file holds binary data, not text: give a text file"
    fact = f"{place} is not {_display_name(encoding)}"
    if named not in (AUTO, "utf-8"):
        return f"{fact}: is the file in another encoding?"
    if encoding == "utf-8":
        return (
            f'{fact}: name the encoding that the file has, such as encoding = "cp1252"'
        )
    return f"{fact}, although its byte-order mark says so: is the file complete?"


def decode(data: bytes, named: str = AUTO) -> tuple[str, int]:
    """Decode a text.

    Args:
        data: The content of the file.
        named: The encoding that the user named, or "auto".

    Returns:
        The text without its byte-order mark, and the mark's length.

    Raises:
        DataError: The bytes are not text in a known or named encoding; the message
            names no file.
        UndecodableError: A byte is not valid; `line` says where.
    """
    codec, length = codec_of(data[:HEAD], named)
    try:
        return data[length:].decode(codec), length
    except UnicodeDecodeError as error:
        if codec != "utf-8" or length or named in (AUTO, "utf-8"):
            raise _at(data, error, length, codec, named) from None
    try:
        return data.decode(named), 0
    except UnicodeDecodeError as error:
        raise _at(data, error, 0, named, named) from None


class UndecodableError(DataError):
    """A byte is not valid in the encoding.

    Attributes:
        line: The line of the byte, from 1.
    """

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


def _at(
    data: bytes, error: UnicodeDecodeError, skipped: int, codec: str, named: str
) -> UndecodableError:
    position = error.start + skipped
    has_nul = b"\0" in data[max(0, position - HEAD) : position + HEAD]
    message = undecodable(
        f"byte {position}", codec, named, binary=has_nul and contains_ascii(codec)
    )
    before = data[skipped:position].decode(codec, "replace")
    return UndecodableError(message, before.count("\n") + 1)


def codec_of_stream(file: BinaryIO, head: bytes, named: str) -> tuple[str, int]:
    """Return the codec of a file that is read in pieces, and the length of its mark.

    If the user named an encoding that contains ASCII, the whole file is read, to find
    out whether it is UTF-8 nevertheless.

    Args:
        file: The file after its `head`; it is read to its end in that case.
        head: The file's first `HEAD` bytes, or all of them.
        named: The encoding that the user named, or "auto".

    Raises:
        DataError: As `codec_of`.
    """
    codec, length = codec_of(head, named)
    if codec != "utf-8" or length or named in (AUTO, "utf-8"):
        return codec, length
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        piece = head
        while piece:
            decoder.decode(piece)
            piece = file.read(_CHUNK)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return named, 0
    return "utf-8", 0


@cache
def contains_ascii(encoding: str) -> bool:
    """Return whether bytes below 128 are ASCII in an encoding.

    They are not in UTF-16 or ISO-2022-JP.
    """
    if encoding.startswith(_SEVEN_BIT):  # ASCII until an escape sequence comes
        return False
    try:
        return _ASCII.decode(encoding) == _ASCII.decode("ascii")
    except UnicodeDecodeError:
        return False


def _wide(head: bytes) -> str:
    """Return the encoding that the NUL bytes of a text without a mark suggest, or "".

    Western text has a NUL in every second byte in UTF-16, and in three of four in
    UTF-32.
    """
    if b"\0" not in head or len(head) < 4:
        return ""
    units = len(head) // 4
    nul = [head[at : 4 * units : 4].count(0) > 0.9 * units for at in range(4)]
    if nul == [False, True, True, True]:
        return "utf-32-le"
    if nul == [True, True, True, False]:
        return "utf-32-be"
    pairs = len(head) // 2
    even, odd = (head[at : 2 * pairs : 2].count(0) / pairs for at in (0, 1))
    if odd > 0.5 and even < 0.05:
        return "utf-16-le"
    if even > 0.5 and odd < 0.05:
        return "utf-16-be"
    return ""


def _display_name(encoding: str) -> str:
    return encoding.upper() if re.match("utf", encoding) else encoding
