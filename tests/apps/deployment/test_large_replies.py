"""Large replies arrive in unnamed temporary files, and are what the sites sent."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("nvflare")

from nvflare.apis.shareable import Shareable
from nvflare.fuel.f3.cellnet import cell
from nvflare.fuel.f3.cellnet.defs import Encoding
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming import blob_streamer
from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey
from nvflare.fuel.utils import fobs
from nvflare.fuel.utils.fobs import lobs

from fednotes.apps.deployment.nvflare import server as flare
from fednotes.apps.deployment.nvflare.large_replies import Pieces, receive_into_files
from fednotes.core.errors import FednotesError
from fednotes.core.messages import Reply, decode_reply, encode_message
from fednotes.core.stored_bytes import ALIGN, StoredBytes
from fednotes.core.stored_tensors import StoredTensors
from fednotes.core.update import Update

PIECE_BYTES = 2**20
KEY = StreamHeaderKey.PAYLOAD_ENCODING


@pytest.fixture
def errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[FednotesError]:
    """Receive messages into files of a folder; return the errors of the disk."""
    monkeypatch.setattr(
        blob_streamer, "ConsumableBufferList", blob_streamer.ConsumableBufferList
    )
    monkeypatch.setattr(cell, "decode_payload", cell.decode_payload)
    reported: list[FednotesError] = []
    receive_into_files(tmp_path, reported.append)
    return reported


def receive(wire: bytes, first_piece_bytes: int = PIECE_BYTES) -> Any:
    """Return what a message is decoded to that arrives in pieces."""
    pieces = blob_streamer.ConsumableBufferList()
    assert isinstance(pieces, Pieces)
    ends = range(first_piece_bytes, len(wire) + PIECE_BYTES, PIECE_BYTES)
    for start, end in pairwise([0, *ends]):
        pieces.append(memoryview(wire)[start:end])
    message = Message({KEY: Encoding.FOBS}, pieces)
    cell.decode_payload(message, KEY, fobs_ctx={})
    assert message.get_header(KEY) is None
    return message.payload


def make_wire(frame: bytes, **values: Any) -> bytes:
    wire: bytes = fobs.dumps(Shareable({**values, flare.FRAME: frame}))
    return wire


@pytest.mark.parametrize("name", ["a", "ab", "abc" * 50])
def test_a_large_reply_arrives_in_a_file_without_a_name(
    errors: list[FednotesError], tmp_path: Path, name: str
) -> None:
    """Its tensors are aligned wherever its frame begins in NVFlare's message."""
    update = Update({"w": torch.rand(3_000_000), "n": torch.arange(9)}, 2.0)
    frame = encode_message(Reply("job", 1, 2, "a", update))
    received = receive(make_wire(frame, **{name: 1}))
    assert received[name] == 1
    stored = received[flare.FRAME]
    assert isinstance(stored, StoredBytes)
    assert bytes(stored) == frame
    assert not list(tmp_path.iterdir())
    reply = decode_reply(stored)
    assert reply.update is not None
    assert isinstance(reply.update.tensors, StoredTensors)
    for tensor, value in update.tensors.items():
        assert torch.equal(reply.update.tensors[tensor], value)
        assert reply.update.tensors[tensor].data_ptr() % ALIGN == 0
    assert not errors


def test_the_first_piece_of_a_large_reply_may_be_shorter_than_a_header(
    errors: list[FednotesError],
) -> None:
    frame = bytes(range(256)) * 2**16
    stored = receive(make_wire(frame), first_piece_bytes=3)[flare.FRAME]
    assert isinstance(stored, StoredBytes)
    assert bytes(stored) == frame
    assert not errors


def test_a_small_reply_stays_in_memory(errors: list[FednotesError]) -> None:
    frame = bytes(range(256)) * 1000
    assert receive(make_wire(frame))[flare.FRAME] == frame
    assert not errors


def test_a_reply_of_a_little_less_than_a_section_stays_in_the_first_one(
    errors: list[FednotesError],
) -> None:
    frame = bytes(lobs_threshold() - 100)
    assert receive(make_wire(frame))[flare.FRAME] == frame
    assert not errors


def lobs_threshold() -> int:
    """Return from how many bytes on NVFlare gives a value a section of its own."""
    from nvflare.fuel.utils.fobs.datum import TEN_MEGA

    return int(TEN_MEGA)


@pytest.mark.parametrize(
    "damage",
    [
        lambda wire: wire[:-1],
        lambda wire: b"\0" + wire[1:],
        lambda wire: wire[:2] + b"\1" + wire[3:],
        lambda wire: wire + bytes(lobs.HEADER_LEN),
        lambda wire: wire + b"x",
        lambda wire: bytes(len(wire)),
        lambda wire: b"\xff" * len(wire),
    ],
)
def test_a_message_with_other_sections_is_refused(
    errors: list[FednotesError], damage: Any
) -> None:
    wire = make_wire(bytes(2 * lobs_threshold()))
    with pytest.raises(ValueError):  # noqa: PT011 - NVFlare logs it, whatever it says
        receive(damage(wire))
    assert not errors


def test_a_message_of_very_many_sections_is_refused(
    errors: list[FednotesError],
) -> None:
    """Each would take hundreds of times its bytes."""
    section = lobs.HEADER_STRUCT.pack(lobs.MARKER_DATUM_BLOB, 0, lobs.DATUM_ID_LEN)
    sections = (
        section + number.to_bytes(lobs.DATUM_ID_LEN, "big") for number in range(17)
    )
    wire = make_wire(bytes(2 * lobs_threshold())) + b"".join(sections)
    with pytest.raises(ValueError, match="more long values than a run needs"):
        receive(wire)
    assert not errors


def test_a_full_disk_is_reported(errors: list[FednotesError], tmp_path: Path) -> None:
    receive_into_files(tmp_path / "missing", errors.append)
    with pytest.raises(FednotesError, match="cannot hold a large message"):
        receive(make_wire(bytes(2 * lobs_threshold())))
    assert len(errors) == 1
