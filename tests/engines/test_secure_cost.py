"""What 250 sites send each other under the secure sum, and what a header of it may name."""

from __future__ import annotations

import tracemalloc

import pytest
import torch

from fednotes.core.errors import RefusedError
from fednotes.core.messages import Attached, Request, WireError, decode_request, encode
from fednotes.privacy.secure_sum import messages as wire
from fednotes.privacy.secure_sum.messages import KeysMessage, Stage, Terms, UnmaskRequest

SITES = tuple(f"hospital-{i:03d}" for i in range(250))


def test_what_nobody_would_read_is_not_sent() -> None:
    attached = wire.packed(Terms(0, (), tuple(f"n{i}" for i in range(70_000))))
    with pytest.raises(WireError, match="names too many things"):
        encode(Request("j", 1, 1, "t", attached=attached))


def asked_of_all() -> tuple[Attached, dict[str, UnmaskRequest]]:
    def raw(sender: str, to: str) -> bytes:
        return f"{sender}>{to}".encode().ljust(32, b".")

    confirming = SITES[:200]
    requests = {
        to: UnmaskRequest(
            b"x" * 32,
            SITES,
            (),
            {s: raw(s, to) for s in SITES if s != to},
            {s: raw(to, s) for s in confirming if s != to},
        )
        for to in SITES
    }
    keys = {s: KeysMessage(b"x" * 32, s, b"a" * 32, b"b" * 32, b"c" * 32, b"d" * 64) for s in SITES}
    return wire.packed_requests(3, keys, requests), requests


def test_the_receipts_of_250_sites_are_bytes_and_cost_four_times_the_message_at_most() -> None:
    attached, requests = asked_of_all()
    frame = bytearray(encode(Request("j", 1, 1, "@unmask", attached=attached)))
    assert 4e6 < len(frame) < 4.4e6  # twice 250 x 250 x 32 bytes, and the keys
    tracemalloc.start()
    came = decode_request(frame).attached
    stage = wire.read(Stage, came.facts)
    asked = wire.request_in(stage, came, SITES[7])
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert asked == requests[SITES[7]]
    assert stage.keys[SITES[249]].signature == b"d" * 64
    assert len(frame) + most < 4 * len(frame)


@pytest.mark.parametrize("wrong", ["receipts", "confirmations"])
def test_tables_of_another_form_are_refused(wrong: str) -> None:
    attached, _ = asked_of_all()
    stage, table = wire.read(Stage, attached.facts), attached.tensors[wrong]
    for value in (None, table[1:], table.to(torch.int8)):
        broken = {k: v for k, v in attached.tensors.items() if k != wrong}
        if value is not None:
            broken[wrong] = value
        with pytest.raises(RefusedError, match=f"no {wrong} for its sites"):
            wire.request_in(stage, Attached(attached.facts, broken), SITES[0])
    with pytest.raises(RefusedError, match="'stranger' has no receipts"):
        wire.request_in(stage, attached, "stranger")
