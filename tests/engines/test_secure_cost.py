"""What a note of the secure sum may cost, and what 250 sites send each other."""

from __future__ import annotations

import time
import tracemalloc

import pytest
import torch

from fednotes.core.errors import RefusedError
from fednotes.core.update import Tensors
from fednotes.engines import secure_wire as wire
from fednotes.engines.wire import Request, decode_request, encode
from fednotes.privacy.secure_sum.sums import KeysMessage, UnmaskRequest

SITES = tuple(f"hospital-{i:03d}" for i in range(250))


def frame_of(text: bytes) -> bytearray:
    note = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return bytearray(encode(Request("j", 1, 1, "@unmask", attached={"note": note})))


def heavy(items: str, separators: int) -> bytes:
    """A note of the greatest length with as many things in it as it may name."""
    inside = ",".join(items.replace("N", f"{n:05d}") for n in range(65_000 // separators))
    ends = "{}" if items.startswith("'") else "[]"
    text = f"{{'x':{ends[0]}{inside}{ends[1]},'y':'".replace("'", '"')
    return (text + "t" * (wire.MOST_NOTE - len(text) - 2) + '"}').encode()


@pytest.mark.parametrize(
    ("items", "separators"),
    [
        ("[]", 2),
        ("1N", 1),
        ('[{"a":0.5}]', 4),
        ("[[[[[]]]]]", 6),
        ("'N':0.5", 1),
        ('["metric","N",[],12345,6]', 7),
        ("'\\ud83d\\ude00N':0.5", 1),
    ],
)
def test_what_a_note_may_cost(items: str, separators: int) -> None:
    """32 MB from frame to table, whatever it says; 562 MB before there was a bound."""
    text = heavy(items, separators)
    assert len(text) == wire.MOST_NOTE
    frame = frame_of(text)
    tracemalloc.start()
    note = wire.noted(decode_request(frame).attached)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert note.keys() == {"x", "y"}
    assert most + len(frame) < 32e6


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"a":[' + b"[]," * 5_600_000 + b"[]]}", "too long a one"),
        (b'{"a":[' + b"[]," * 600_000 + b"[]]}", "more than 65,536 values"),
        (b"[" * 60_000, "nested too deep"),
        (b'{"a":1,"a":2}', "a name comes twice"),
        (b'{"a":NaN}', "NaN"),
        (b'"\xc3\xa4"', "not JSON"),
        (b"[1]", "no table"),
    ],
)
def test_a_note_that_may_cost_more_is_not_read(text: bytes, reason: str) -> None:
    attached = {"note": torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    began = time.process_time()
    tracemalloc.start()
    with pytest.raises(RefusedError, match=reason):
        wire.noted(attached)
    assert tracemalloc.get_traced_memory()[1] < 5e6
    tracemalloc.stop()
    assert time.process_time() - began < 1.0  # eight seconds were usual


def test_a_note_that_nobody_would_read_is_not_sent() -> None:
    with pytest.raises(RefusedError, match="names too many things"):
        wire.packed({"names": [f"n{i}" for i in range(70_000)]})


def asked_of_all() -> tuple[Tensors, dict[str, UnmaskRequest]]:
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
    note = {"number": 3, "keys": wire.keys_note(keys)}
    return wire.packed_requests(note, requests), requests


def test_the_receipts_of_250_sites_are_bytes_and_cost_four_times_the_message_at_most() -> None:
    attached, requests = asked_of_all()
    frame = bytearray(encode(Request("j", 1, 1, "@unmask", attached=attached)))
    assert 4e6 < len(frame) < 4.4e6  # twice 250 x 250 x 32 bytes, and the keys
    tracemalloc.start()
    came = decode_request(frame).attached
    note = wire.noted(came)
    asked, keys = wire.request_in(note, came, SITES[7]), wire.keys_in(note)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert asked == requests[SITES[7]]
    assert keys[SITES[249]].signature == b"d" * 64
    assert len(frame) + most < 4 * len(frame)


@pytest.mark.parametrize("wrong", ["receipts", "confirmations"])
def test_tables_of_another_form_are_refused(wrong: str) -> None:
    attached, _ = asked_of_all()
    note = wire.noted(attached)
    for value in (None, attached[wrong][1:], attached[wrong].to(torch.int8)):
        broken = {k: v for k, v in attached.items() if k != wrong}
        if value is not None:
            broken[wrong] = value
        with pytest.raises(RefusedError, match=f"no {wrong} for its sites"):
            wire.request_in(note, broken, SITES[0])
    with pytest.raises(RefusedError, match="'stranger' has no receipts"):
        wire.request_in(note, attached, "stranger")
