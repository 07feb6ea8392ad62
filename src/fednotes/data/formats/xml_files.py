"""Read XML files element by element, safely."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple
from xml.sax import ContentHandler, SAXParseException

from defusedxml import DefusedXmlException, DTDForbidden
from defusedxml.sax import make_parser

from fednotes.core import bounds
from fednotes.core.errors import DataError
from fednotes.data.formats.files import READ_ERRORS, make_incomplete_error, open_bytes

_PIECE: Final = 1 << 16  # bytes per read
# Expat parses an unfinished tag anew with each piece, so long tags need large pieces.
_LARGE_PIECE: Final = 1 << 20
_MAX_ATTRIBUTES: Final = 100_000  # in one tag that is longer than a piece
# The start of an attribute's value, in UTF-8 and in UTF-16.
_VALUE_START: Final = re.compile(rb"=\0?[\"']")
# Characters that XML 1.0 cannot hold.
FORBIDDEN: Final = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ENTITIES: Final = (
    "the file declares or uses its own entities: replace them by their text"
)


class Element(NamedTuple):
    """The start or the end of an element.

    Attributes:
        line: The line, counted from 1.
        name: Name of the element.
        attributes: Its attributes at its start; None at its end.
        text: Its text at its end, if requested.
    """

    line: int
    name: str
    attributes: Mapping[str, str] | None
    text: str


class _Handler(ContentHandler):
    """Collects elements while a file is parsed.

    Args:
        path: The file.
        text_of: Names of the elements whose text is collected.
        parser: The parser, which knows the current line.

    Attributes:
        elements: Elements read since the caller last emptied the list.
        events: Number of events so far, including runs of characters.
    """

    def __init__(self, path: Path, text_of: Collection[str], parser: Any) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self.events = 0
        self._path = path
        self._text_of = text_of
        self._parser = parser
        self._pieces: list[str] | None = None  # pieces of the current text
        self._length = 0

    def make_error(self, message: str) -> DataError:
        """Return an error at the current line."""
        return DataError.at(self._path, self._get_line(), message)

    def _get_line(self) -> int:
        """Return the current line."""
        return int(self._parser.getLineNumber() or 1)

    def startElement(self, name: str, attrs: Any) -> None:  # noqa: N802 - name of sax
        """Collect the start of an element."""
        self.events += 1
        self.elements.append(Element(self._get_line(), name, dict(attrs), ""))
        if name in self._text_of:
            self._pieces = []
            self._length = 0

    def characters(self, content: str) -> None:
        """Collect text, if the element's text was requested."""
        self.events += 1
        if self._pieces is None:
            return
        self._length += len(content)
        if self._length > bounds.NOTE:
            raise self.make_error(
                f"a text has more than {bounds.NOTE:,} characters: split it, or check "
                "that this is the right file"
            )
        self._pieces.append(content)

    def endElement(self, name: str) -> None:  # noqa: N802 - name of sax
        """Collect the end of an element, with its text."""
        self.events += 1
        text = ""
        if name in self._text_of and self._pieces is not None:
            text = "".join(self._pieces)
            self._pieces = None
        self.elements.append(Element(self._get_line(), name, None, text))

    def skippedEntity(self, name: str) -> None:  # noqa: ARG002, N802 - name of sax
        """Refuse an entity."""
        raise self.make_error(_ENTITIES)


def read_elements(
    path: Path, text_of: Collection[str] = (), *, can_have_doctype: bool = True
) -> Iterator[Element]:
    """Yield the starts and ends of the elements of an XML file while it is read.

    No other file is fetched, and declared entities are refused, so the content can
    neither expand in memory nor include another file.

    Args:
        path: The file.
        text_of: Names of the elements whose text is returned.
        can_have_doctype: Whether a DOCTYPE is permitted.

    Raises:
        DataError: The file is not XML, or is truncated or unsafe; the message has the
            line.
    """
    with open_bytes(path) as file:
        yield from parse_elements(
            file, path, text_of, can_have_doctype=can_have_doctype
        )


def parse_elements(
    file: BinaryIO,
    path: Path,
    text_of: Collection[str] = (),
    *,
    can_have_doctype: bool = True,
    max_tag: int | None = None,
) -> Iterator[Element]:
    """Yield the starts and ends of the elements of open XML; see `read_elements`.

    Args:
        file: The XML.
        path: Its file, for messages.
        text_of: Names of the elements whose text is returned.
        can_have_doctype: Whether a DOCTYPE is permitted.
        max_tag: Maximum number of bytes of a tag or a comment; None is
            `bounds.MARKUP`.

    Raises:
        DataError: As `read_elements`.
    """
    limit = bounds.MARKUP if max_tag is None else max_tag
    piece = _PIECE if limit <= bounds.MARKUP else _LARGE_PIECE
    parser = make_parser()
    handler = _Handler(path, text_of, parser)
    parser.forbid_dtd = not can_have_doctype
    parser.forbid_external = False
    parser.setContentHandler(handler)
    parser.reset()
    unread = 0  # bytes since the last element or character
    attributes = 0  # in these bytes
    is_at_end = False
    while not is_at_end:
        events = handler.events
        data = _read_piece(file, piece, path)
        is_at_end = not data
        # A value has no "<", so the bytes before the first one belong to this tag.
        attributes += len(_VALUE_START.findall(data.partition(b"<")[0]))
        if attributes > _MAX_ATTRIBUTES:
            raise handler.make_error(
                f"a tag has more than {_MAX_ATTRIBUTES:,} attributes: check that this "
                "is the right file"
            )
        _feed(parser, handler, data, path)
        if handler.events > events:
            unread = 0
            attributes = len(_VALUE_START.findall(data.rpartition(b"<")[2]))
        else:
            unread += len(data)
        if unread > limit:
            raise handler.make_error(
                f"a tag or a comment has more than {limit:,} bytes: check that this "
                "is the right file"
            )
        yield from handler.elements
        handler.elements.clear()


def _read_piece(file: BinaryIO, size: int, path: Path) -> bytes:
    """Return the next bytes of a file; raise DataError if it is damaged."""
    try:
        return file.read(size)
    except READ_ERRORS as error:
        raise make_incomplete_error(path, error) from None


def _feed(parser: Any, handler: _Handler, data: bytes, path: Path) -> None:
    """Parse a piece of XML; no data is the end of the file."""
    try:
        if data:
            parser.feed(data)
        else:
            parser.close()
    except SAXParseException as error:
        message = f"the file is not XML ({error.getMessage()})"
        raise DataError.at(path, error.getLineNumber() or 1, message) from None
    except DTDForbidden:
        raise handler.make_error(
            "the file has a DOCTYPE, which its program never writes"
        ) from None
    except DefusedXmlException:
        raise handler.make_error(_ENTITIES) from None
    except (LookupError, ValueError):
        message = "the file's encoding is not known: write it as UTF-8"
        raise DataError.at(path, 1, message) from None
