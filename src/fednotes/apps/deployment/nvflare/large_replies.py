"""Receive large replies into unnamed temporary files, in the server's job process.

NVFlare keeps the pieces of a message in memory until the last one has arrived, and then
joins them. If several sites answer at the same time, each reply takes up to twice
its size in memory. `receive_into_files` makes NVFlare append the pieces of a large
message to a file and return a long value of the message as a part of this file
(`StoredBytes`).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from typing import Any

from fednotes.apps.deployment.nvflare.gate import MAX_FIRST_SECTION
from fednotes.core.errors import FednotesError, needs
from fednotes.core.store import LARGE_BYTES
from fednotes.core.stored_bytes import ALIGN, StoredBytes

with needs("nvflare", "deploy"):
    from nvflare.fuel.f3.cellnet import cell
    from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
    from nvflare.fuel.f3.message import Message
    from nvflare.fuel.f3.streaming import blob_streamer
    from nvflare.fuel.utils import fobs
    from nvflare.fuel.utils.buffer_list import ConsumableBufferList
    from nvflare.fuel.utils.fobs import lobs
    from nvflare.fuel.utils.fobs.datum import Datum, DatumManager
    from nvflare.fuel.utils.fobs.decomposer import Internalizer

# Sections after the first one; a reply has one long value. Each takes much more time
# and memory than its bytes.
MAX_LONG_VALUES = 16
# Read before `receive_into_files` replaces it.
_decode_by_nvflare = cell.decode_payload


class Pieces(ConsumableBufferList):
    """The pieces of a message, as NVFlare receives them.

    Args:
        folder: The pieces of a large message are written to an unnamed file on the
            file system of this folder.
        report: Called with the error if they cannot be written there.
    """

    def __init__(self, folder: Path, report: Callable[[FednotesError], None]) -> None:
        super().__init__()
        self._folder = folder
        self._report = report
        self._size = 0
        self._stored: StoredBytes | None = None
        self._padding = 0

    def append(self, piece: Any) -> None:
        """Add a piece.

        Raises:
            FednotesError: Writing to disk failed.
        """
        super().append(piece)
        self._size += len(piece)
        if self._size < LARGE_BYTES:
            return
        try:
            if self._stored is None:
                self._stored = StoredBytes(self._folder)
                # The first piece may be shorter than a header.
                header = bytes(islice(chain.from_iterable(self), lobs.HEADER_LEN))
                self._padding = _compute_padding(header)
                self._stored.append(bytes(self._padding))
            for each in self:
                self._stored.append(each)
            self.clear()
        except FednotesError as error:
            self._report(error)
            raise

    @property
    def stored(self) -> StoredBytes | None:
        """The message in a file; None if it is small, so that the list contains it."""
        if self._stored is None:
            return None
        return self._stored.cut(self._padding, len(self._stored))


def _compute_padding(header: bytes) -> int:
    """Return the number of bytes to insert before a message.

    They align the value of its second section. A message is: header, first section,
    header, id of the value, value.

    Args:
        header: The first bytes of the message.
    """
    _, _, first_section_bytes = lobs.HEADER_STRUCT.unpack(header)
    second_header = lobs.HEADER_LEN + first_section_bytes
    value_start = second_header + lobs.HEADER_LEN + lobs.DATUM_ID_LEN
    return int(-value_start % ALIGN)


def receive_into_files(folder: Path, report: Callable[[FednotesError], None]) -> None:
    """Make this process receive large messages into unnamed temporary files.

    Args:
        folder: The folder on whose file system these files are.
        report: Called with the error if they cannot be written there.
    """
    blob_streamer.ConsumableBufferList = lambda: Pieces(folder, report)
    cell.decode_payload = _decode_payload


def _decode_payload(
    message: Message,
    encoding_key: str = MessageHeaderKey.PAYLOAD_ENCODING,
    fobs_ctx: dict[str, Any] | None = None,
) -> None:
    """Decode a message, in place of NVFlare's function with the same arguments."""
    stored = getattr(message.payload, "stored", None)
    if stored is None:
        _decode_by_nvflare(message, encoding_key, fobs_ctx)
        return
    message.set_header(MessageHeaderKey.PAYLOAD_LEN, len(stored))
    message.payload = load_stored(stored, fobs_ctx)
    message.remove_header(encoding_key)


def load_stored(stored: StoredBytes, fobs_ctx: dict[str, Any] | None = None) -> Any:
    """Return the object in a large message, as `lobs.load_from_stream` of NVFlare does.

    A long value is a part of the stored bytes.

    Raises:
        ValueError: The bytes are not such a message.
    """
    manager = DatumManager(fobs_ctx=fobs_ctx)
    first_section = b""
    offset = 0
    num_values = 0
    while offset < len(stored):
        is_first = offset == 0
        start = offset + lobs.HEADER_LEN
        header = lobs._Header.from_bytes(stored[offset:start])
        offset = start + header.size
        section = stored.cut(start, offset)
        if len(section) != header.size:
            raise ValueError("a section is longer than its message")
        if is_first:
            if (
                header.marker != lobs.MARKER_MAIN
                or not 0 < header.size < MAX_FIRST_SECTION
            ):
                raise ValueError("the first section has an unexpected kind or size")
            first_section = section[:]
            continue
        if header.marker != lobs.MARKER_DATUM_BLOB or header.dot:
            raise ValueError("a section has a kind that no run needs")
        num_values += 1
        if num_values > MAX_LONG_VALUES:
            raise ValueError("the message has more long values than a run needs")
        value = section.cut(lobs.DATUM_ID_LEN, len(section))
        datum = Datum.blob_datum(value)
        datum.datum_id = str(uuid.UUID(bytes=section[: lobs.DATUM_ID_LEN]))
        manager.add_datum(datum)
    return Internalizer(manager).internalize(fobs.deserialize(first_section, manager))
