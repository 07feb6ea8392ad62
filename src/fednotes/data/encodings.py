"""Detection of text encodings, and of files that are not text.

A byte-order mark determines the encoding. Without one, a file is UTF-8 unless the
caller names another encoding. Nothing else is guessed: a text decoded with the wrong
encoding may look right while its mentions are misplaced.

A named encoding applies to files that are not valid UTF-8. A folder may therefore mix
UTF-8 with, say, Windows-1252: Windows-1252 text with an accented letter is not valid
UTF-8. Encodings that do not contain ASCII, such as UTF-16 without a mark, apply to
every file without a mark.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import BinaryIO

from fednotes.core.errors import ConfigError, DataError

AUTO = "auto"
HEAD = 1 << 16  # bytes that suffice to recognise an encoding
_CHUNK = 1 << 20  # bytes that are checked at once
_ASCII = bytes(range(128))

# Python codecs that are not character encodings of files or depend on the machine.
_UNSUITABLE = frozenset(
    "idna punycode raw-unicode-escape unicode-escape undefined utf-7 mbcs oem".split()
)
# Byte orders of encodings that have one only after a mark, by which such files are
# recognised. For files without a mark, Python takes that of the machine, or refuses.
_BYTE_ORDERS = {"utf-16": "utf-16-le", "utf-32": "utf-32-le"}
_MAX_NAME = 100  # characters; Python keeps each name that it has looked up
# The marks of UTF-32 come first, because UTF-32-LE's begins with UTF-16-LE's.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_EXPORT = "export its text to a file that ends in .txt"
_UNPACK = "unpack it, and give the files in it"
# First bytes of files that are not text, their kind, and the remedy.
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
# The same for files that begin with letters; their head must contain a NUL byte.
_BINARY_WITH_NUL = (
    (b"PAR1", "a Parquet file", "name its format, parquet"),
    (b"ARROW1", "an Arrow file", "name its format, parquet"),
    (b"BZh", "data compressed by bzip2", _UNPACK),
    (b"GIF8", "an image", _EXPORT),
)
_DICOM = (128, b"DICM")

_SEVEN_BIT = ("iso2022", "hz")

_user_encoding: ContextVar[str] = ContextVar("encoding", default=AUTO)


@lru_cache(maxsize=256)
def resolve_encoding(name: str) -> str:
    """Return the canonical name of a user-specified encoding.

    Args:
        name: "auto", or any Python name of a character encoding, such as "cp1252".

    Raises:
        ConfigError: There is no such encoding.
    """
    if name == AUTO:
        return AUTO
    try:
        codec = codecs.lookup(name) if len(name) <= _MAX_NAME else None
    except (LookupError, ValueError, TypeError):
        codec = None
    if codec is None or not _is_file_encoding(codec):
        known = '"auto", "utf-8", "cp1252", "latin-1", "utf-16-le"'
        raise ConfigError(
            f"encoding = {name[:_MAX_NAME]!r}: no such encoding: expected one such as "
            f"{known}"
        )
    return _BYTE_ORDERS.get(codec.name, codec.name)


def _is_file_encoding(codec: codecs.CodecInfo) -> bool:
    """Return whether a codec of Python is a character encoding of files."""
    is_text: bool = codec._is_text_encoding
    return is_text and codec.name.replace("_", "-") not in _UNSUITABLE


@contextmanager
def reading_as(encoding: str) -> Iterator[None]:
    """Read all files in the context in a user-specified encoding.

    Readers open files in many places and do not depend on the encoding, so it is a
    context variable instead of an argument of each reader.
    """
    token = _user_encoding.set(resolve_encoding(encoding))
    try:
        yield
    finally:
        _user_encoding.reset(token)


def get_user_encoding() -> str:
    """Return the user-specified encoding of the files being read, or "auto"."""
    return _user_encoding.get()


def find_mark(head: bytes) -> tuple[str, int]:
    """Return the encoding and length of a byte-order mark; "" and 0 without a mark."""
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            return encoding, len(mark)
    return "", 0


def choose_codec(head: bytes, user_encoding: str = AUTO) -> tuple[str, int]:
    """Return the codec to try first on a file, and the length of its byte-order mark.

    Args:
        head: The file's first bytes, of which at most `HEAD` are used.
        user_encoding: The user-specified encoding, from `resolve_encoding`.

    Raises:
        DataError: The file is not text, or it is UTF-16 or UTF-32 without a mark and
            the user did not name this encoding.
    """
    encoding, length = find_mark(head)
    if encoding:
        return encoding, length
    require_text(head)
    if user_encoding != AUTO and not contains_ascii(user_encoding):
        return user_encoding, 0
    if wide := _guess_wide_encoding(head[:HEAD]):
        raise DataError(
            f"the text looks like {wide.upper()} without a byte-order mark: set "
            f'`encoding = "{wide}"`'
        )
    # UTF-8 first, even if the user named another encoding that contains ASCII: text in
    # such an encoding is rarely valid UTF-8.
    return "utf-8", 0


def require_text(head: bytes) -> None:
    """Raise DataError if the first bytes of a file show that it is not text.

    The error names the kind of file.
    """
    kinds = (*_BINARY, *_BINARY_WITH_NUL) if b"\0" in head[:HEAD] else _BINARY
    for start, what, remedy in kinds:
        if head.startswith(start):
            raise DataError(f"the file is {what}, not text: {remedy}")
    at, start = _DICOM
    if head[at : at + len(start)] == start:
        raise DataError(f"the file is a DICOM image, not text: {_EXPORT}")


def describe_undecodable(
    place: str, encoding: str, user_encoding: str, *, binary: bool
) -> str:
    """Return the message for a byte that cannot be decoded, with a safe remedy.

    Args:
        place: The name of the byte in the message, such as "byte 12".
        encoding: The codec that failed.
        user_encoding: The user-specified encoding, or "auto".
        binary: Whether there are NUL bytes near it.
    """
    if binary:
        return "the file holds binary data, not text: give a text file"
    fact = f"{place} is not {_format_name(encoding)}"
    if user_encoding not in (AUTO, "utf-8"):
        return f"{fact}: check whether the file has another encoding"
    if encoding == "utf-8":
        return (
            f"{fact}: give the encoding that the file has, such as "
            '`encoding = "cp1252"`'
        )
    return (
        f"{fact}, although its byte-order mark says that it is: check that the file is "
        "complete"
    )


def decode_text(data: bytes, user_encoding: str = AUTO) -> tuple[str, int]:
    """Decode a text.

    Args:
        data: The content of the file.
        user_encoding: The user-specified encoding, or "auto".

    Returns:
        The text without its byte-order mark, and the mark's length.

    Raises:
        DataError: The bytes are not text in a known or named encoding; the message does
            not name the file.
        UndecodableError: A byte is invalid; `line` is its line.
    """
    codec, length = choose_codec(data[:HEAD], user_encoding)
    try:
        return data[length:].decode(codec), length
    except UnicodeDecodeError as error:
        if codec != "utf-8" or length or user_encoding in (AUTO, "utf-8"):
            raise _make_undecodable_error(
                data, error, length, codec, user_encoding
            ) from None
    try:
        return data.decode(user_encoding), 0
    except UnicodeDecodeError as error:
        raise _make_undecodable_error(
            data, error, 0, user_encoding, user_encoding
        ) from None


class UndecodableError(DataError):
    """A byte is invalid in the encoding.

    Attributes:
        line: The line of the byte, from 1.
    """

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


def _make_undecodable_error(
    data: bytes, error: UnicodeDecodeError, skipped: int, codec: str, user_encoding: str
) -> UndecodableError:
    """Return the error for a byte that cannot be decoded, with its line.

    Args:
        data: The content of the file.
        error: Python's error, whose positions count from the end of the mark.
        skipped: The length of the mark.
        codec: The codec that failed.
        user_encoding: The user-specified encoding, or "auto".
    """
    position = error.start + skipped
    has_nul = b"\0" in data[max(0, position - HEAD) : position + HEAD]
    message = describe_undecodable(
        f"byte {position}",
        codec,
        user_encoding,
        binary=has_nul and contains_ascii(codec),
    )
    before = data[skipped:position].decode(codec, "replace")
    return UndecodableError(message, before.count("\n") + 1)


def choose_codec_of_stream(
    file: BinaryIO, head: bytes, user_encoding: str
) -> tuple[str, int]:
    """Return the codec of a file to be read in pieces, and its mark's length.

    If the user named an encoding that contains ASCII, the whole file is read to check
    whether it is UTF-8.

    Args:
        file: The file, positioned after `head`. It is read to its end only if the user
            named an encoding that contains ASCII.
        head: The file's first `HEAD` bytes, or all of them.
        user_encoding: The user-specified encoding, or "auto".

    Raises:
        DataError: As `choose_codec`.
    """
    codec, length = choose_codec(head, user_encoding)
    if codec != "utf-8" or length or user_encoding in (AUTO, "utf-8"):
        return codec, length
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        piece = head
        while piece:
            decoder.decode(piece)
            piece = file.read(_CHUNK)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return user_encoding, 0
    return "utf-8", 0


@cache
def contains_ascii(encoding: str) -> bool:
    """Return whether bytes below 128 are always ASCII in an encoding.

    This is not the case in UTF-16 or ISO-2022-JP.
    """
    if encoding.startswith(_SEVEN_BIT):  # ASCII until an escape sequence
        return False
    try:
        return _ASCII.decode(encoding) == _ASCII.decode("ascii")
    except UnicodeDecodeError:
        return False


def _guess_wide_encoding(head: bytes) -> str:
    """Return UTF-16 or UTF-32 if a text without a mark looks like it, else "".

    In Western text, every second byte is NUL in UTF-16, and three of four are NUL in
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


def _format_name(encoding: str) -> str:
    """Return the name of an encoding for messages."""
    return encoding.upper() if re.match("utf", encoding) else encoding
