"""Messages as bytes: round trips, sizes, one encoding each, and only WireErrors."""

from __future__ import annotations

import hashlib
import json
import random
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednotes.core.messages import (
    DTYPES,
    HEAD,
    Attached,
    Reply,
    Request,
    WireError,
    decode_message,
    decode_reply,
    decode_request,
    encode_message,
)
from fednotes.core.update import Update


def tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return random bytes as numbers of a type; truth values are 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    count = int(np.prod(shape)) * dtype.itemsize
    top = 2 if dtype is torch.bool else 256
    raw = torch.randint(top, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


EVERY = {name: tensor(dtype, (3, 5)) for name, dtype in DTYPES.items()}
ODD = {
    "scalar": torch.tensor(2.5),
    "none": torch.empty(0, 3),
    "ü/λ.weight": torch.ones(1),
}
REQUEST = Request(
    job="f" * 64,
    server_start=3,
    number=17,
    task="train",
    round=4,
    first=True,
    preparing=True,
    tensors_of_request=16,
    counted={"mercy": 16, "st. ann": 0},
    checkpoint_numbers=(3, 9),
    tensors=EVERY | ODD,
    options={"round": 4, "rate": 0.1, "warm": False, "names": "a,b", "low": -3},
    attached=Attached(
        {"names": ["a"], "keys": {"a": "00ff"}}, {"keys": torch.arange(5)}
    ),
)
UPDATE = Update(EVERY | ODD, 12.0, {"loss": 1 / 3, "n": 7.0})
ATTACHED = Attached({"more": {"x": [1.5, None]}}, {"x": torch.ones(2)})
REPLY = Reply("f" * 64, 3, 17, "mercy", UPDATE, has=17, attached=ATTACHED)
REFUSAL = Reply(
    "f" * 64, 3, 17, "mercy", refusal="site 'mercy' says no", later=True, has=12
)


def same(first: Any, second: Any) -> bool:
    """Return whether all fields are equal; tensors by type, shape and bytes (with
    NaN)."""
    if isinstance(first, torch.Tensor):
        numbers = (
            first.reshape(-1).view(torch.uint8),
            second.reshape(-1).view(torch.uint8),
        )
        return (
            first.dtype == second.dtype
            and first.shape == second.shape
            and torch.equal(*numbers)
        )
    if isinstance(first, dict):
        return list(first) == list(second) and all(
            same(first[key], second[key]) for key in first
        )
    if hasattr(first, "__slots__"):
        return all(same(getattr(first, n), getattr(second, n)) for n in first.__slots__)
    return bool(first == second) and type(first) is type(second)


@pytest.mark.parametrize(
    "message",
    [REQUEST, REPLY, REFUSAL, Request("j", 0, 0, "t")],
    ids=["request", "reply", "refusal", "least"],
)
def test_every_message_survives_a_round_trip_and_has_one_encoding(
    message: Request | Reply,
) -> None:
    frame = encode_message(message)
    again = decode_message(frame)
    # names of options and sites are sorted on the wire
    if isinstance(message, Request):
        assert again.counted == message.counted  # type: ignore[union-attr]
        assert again.options == message.options  # type: ignore[union-attr]
        assert same(again.tensors, message.tensors)  # type: ignore[union-attr]
    else:
        assert same(again, message)
    assert encode_message(again) == frame
    assert same(decode_message(bytearray(frame)), again)
    assert same(decode_message(memoryview(frame)), again)


def test_the_layout_of_a_reply_is_as_documented() -> None:
    """By hand with struct, json and hashlib, for one small reply."""
    reply = Reply(
        "j", 1, 2, "s", Update({"w": torch.tensor([1.0, -2.0])}, 3.0, {"n": 4.0}), has=2
    )
    header = {
        **{
            "job": "j",
            "run": 1,
            "number": 2,
            "site": "s",
            "refusal": "",
            "later": False,
        },
        **{"has": 2, "weight": 3.0, "metrics": {"n": 4.0}, "facts": {}},
        **{"tensors": [["w", "float32", [2]]], "attached": []},
    }
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)
    body = struct.pack("<2f", 1.0, -2.0) + bytes(56)
    head = struct.pack("<4sHBBIQ", b"fedn", 3, 2, 0, len(text), len(body))
    digest = hashlib.sha256(text + body).digest()
    assert encode_message(reply) == head + digest + bytes(12) + text + body


def test_framing_adds_at_most_one_percent_to_a_message_of_5_mb() -> None:
    """1.3 million float32 in 60 tensors, as a tagger has them."""
    tensors = {f"layer.{i}.weight": torch.zeros(150, 145) for i in range(60)}
    size = sum(value.nbytes for value in tensors.values())
    frames = (
        encode_message(
            Request("f" * 64, 1, 1, "train", tensors=tensors, counted={"a": 1, "b": 2})
        ),
        encode_message(Reply("f" * 64, 1, 1, "a", Update(tensors, 1.0))),
    )
    assert size > 5_000_000
    assert all(len(frame) < 1.002 * size for frame in frames)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_decoded_tensors_are_aligned_views_of_the_frame(kind: Any) -> None:
    frame = kind(encode_message(REPLY))
    reply = decode_reply(frame)
    assert reply.update is not None
    start = np.frombuffer(frame, np.uint8).ctypes.data
    for value in reply.update.tensors.values():
        if value.numel():
            offset = value.data_ptr() - start
            assert 0 <= offset < len(frame)
            assert offset % 64 == 0


def test_the_checksum_of_a_checked_frame_is_not_computed_again() -> None:
    frame = bytearray(encode_message(REPLY))
    frame[20] ^= 1
    assert same(decode_reply(frame, checked=True), REPLY)
    with pytest.raises(WireError, match="damaged in transit"):
        decode_reply(frame)


def test_tensors_that_are_not_contiguous_or_need_a_gradient_are_sent_by_value() -> None:
    value = torch.arange(12.0).reshape(3, 4).requires_grad_()
    sent_value = decode_request(
        encode_message(Request("j", 1, 1, "t", tensors={"w": value.T[1:]}))
    ).tensors["w"]
    assert sent_value.tolist() == value.T[1:].tolist()
    assert not sent_value.requires_grad


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Request("j", 1, 1, "t", options={"x": float("nan")}), "not JSON compliant"),
        (Request("j", 1, 1, "t", options={"x": [1]}), "options"),  # type: ignore[dict-item]
        (Request("j", 1, 1, "t\n"), "'task'"),
        (Request("j", -1, 1, "t"), "'run'"),
        (
            Request(
                "j", 1, 1, "t", tensors={"w": torch.zeros(1, dtype=torch.complex64)}
            ),
            "complex",
        ),
        (Request("j", 1, 1, "t", tensors={"": torch.zeros(1)}), "name of a tensor"),
        (Reply("j", 1, 1, "s", Update({}, float("inf"))), "not JSON compliant"),
        (Reply("j", 1, 1, "s"), "neither an update nor a refusal"),
    ],
)
def test_a_message_that_cannot_be_encoded_is_refused_with_the_reason(
    message: Request | Reply, reason: str
) -> None:
    with pytest.raises(WireError, match=reason):
        encode_message(message)


def forged(header: bytes | dict[str, Any], body: bytes = b"", kind: int = 2) -> bytes:
    """Return a frame whose lengths and checksum are right, whatever its content."""
    text = header if isinstance(header, bytes) else canonical(header)
    text += b" " * (-len(text) % 64)
    body += bytes(-len(body) % 64)
    digest = hashlib.sha256(text + body).digest()
    return HEAD.pack(b"fedn", 3, kind, 0, len(text), len(body), digest) + text + body


def canonical(header: Any) -> bytes:
    return json.dumps(header, sort_keys=True, separators=(",", ":")).encode()


GOOD: dict[str, Any] = {
    **{
        "job": "j",
        "run": 1,
        "number": 2,
        "site": "s",
        "refusal": "",
        "later": False,
        "has": 0,
    },
    **{"weight": 1.0, "metrics": {}, "facts": {}, "tensors": [], "attached": []},
}


def listed(*entry: Any) -> dict[str, Any]:
    return GOOD | {"tensors": [list(entry)]}


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"", "0 bytes are too few"),
        (b"GET / HTTP/1.1\r\n" + bytes(64), "not a message of fednotes"),
        (
            HEAD.pack(b"fedn", 1, 1, 0, 0, 0, b""),
            "wire format 1, but this version reads 3",
        ),
        (HEAD.pack(b"fedn", 3, 3, 0, 0, 0, b""), "unknown kind"),
        (HEAD.pack(b"fedn", 3, 1, 0, 2**32 - 1, 0, b""), "header is too long"),
        (HEAD.pack(b"fedn", 3, 1, 0, 0, 2**64 - 1, b""), "received 64"),
        (encode_message(REPLY)[:-1], "received"),
        (encode_message(REPLY) + b"\0", "received"),
        (forged(b"[" * 10_000), "nested too deep"),
        (forged(b"[" * 100_000), "header has too many values"),
        (forged(GOOD | {"refusal": "," * 100_000}), "too many values"),
        (forged(b'{"a":1,"a":1}'), "a name occurs twice"),
        (forged(canonical(GOOD).replace(b"1.0", b"NaN")), "NaN or Infinity"),
        (forged(canonical(GOOD).replace(b"1.0", b"1e999")), "NaN or Infinity"),
        (forged(canonical(GOOD).replace(b"1.0", b"1.00")), "not canonical"),
        (forged(b"\xff\xfe"), "cannot be read"),
        (forged(b"[]"), "not canonical JSON"),
        (forged(GOOD | {"more": 1}), "missing or unknown"),
        (forged(GOOD | {"has": True}), "'has'"),
        (forged(GOOD | {"run": 2**60}), "'run'"),
        (forged(GOOD | {"site": "\ud800"}), "'site'"),
        (forged(GOOD | {"refusal": "no"}), "neither an update nor a refusal"),
        (forged(GOOD | {"weight": 1}), "'weight'"),
        (
            forged(GOOD | {"weight": None, "refusal": "n", "metrics": {"n": 1.0}}),
            "a refusal with",
        ),
        (forged(GOOD | {"metrics": {"": 1.0}}), "'metrics'"),
        (forged(GOOD | {"metrics": [1.0]}), "'metrics'"),
        (forged(GOOD | {"facts": []}), "the facts are not a table"),
        (forged(listed("w", "float32", [2**40])), "longer than the message"),
        (forged(listed("w", "float32", [0, 2**50, 2**50])), "the shape of 'w'"),
        (forged(listed("w", "float32", [-1])), "the shape of 'w'"),
        (forged(listed("w", "float32", [True])), "the shape of 'w'"),
        (forged(listed("w", "object", [1])), "type that cannot be sent"),
        (forged(listed("w", "float32")), "lacks its name, type or shape"),
        (forged(listed("w", "float32", [1]), b"abcdX"), "bytes between tensors"),
        (forged(listed("w", "bool", [1]), b"\2"), "neither 0 nor 1"),
        (forged(listed("w", "int8", [1]), bytes(128)), "after the last tensor"),
        (
            forged(GOOD | {"tensors": [["w", "int8", [1]]] * 2}, bytes(128)),
            "tensor 'w' occurs twice",
        ),
        (
            forged(
                GOOD
                | {"weight": None, "refusal": "n", "tensors": [["w", "int8", [1]]]},
                b"a",
            ),
            "a refusal with tensors",
        ),
    ],
)
def test_a_malformed_frame_is_refused_with_the_reason(
    frame: bytes, reason: str
) -> None:
    with pytest.raises(WireError, match=reason):
        decode_message(frame)


def test_a_message_of_another_kind_is_refused() -> None:
    with pytest.raises(WireError, match="received a reply, expected a request"):
        decode_request(encode_message(REPLY))
    with pytest.raises(WireError, match="received a request, expected a reply"):
        decode_reply(encode_message(REQUEST))


@given(st.binary(max_size=300))
def test_arbitrary_bytes_and_headers_raise_only_wire_error(noise: bytes) -> None:
    for frame in (noise, forged(noise), forged(canonical(GOOD), noise)):
        try:
            decode_message(frame)
        except WireError:
            continue
        assert not noise.strip(b"\0")


# fuzzing

SEEDS = [
    encode_message(message)
    for message in (
        REPLY,
        REFUSAL,
        REQUEST,
        Reply("j", 1, 2, "s", Update({"w": torch.ones(9)}, 3.0, {"n": 4.0})),
    )
]


def resealed(frame: bytearray) -> bytearray:
    """Correct the checksum, so that the checks behind it are reached."""
    if len(frame) >= HEAD.size:
        frame[20:52] = hashlib.sha256(memoryview(frame)[HEAD.size :]).digest()
    return frame


def flip(rng: random.Random, frame: bytearray) -> bytearray:
    for _ in range(rng.randint(1, 4)):
        frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
    return frame


def cut(rng: random.Random, frame: bytearray) -> bytearray:
    return frame[: rng.randrange(len(frame))]


def splice(rng: random.Random, frame: bytearray) -> bytearray:
    donor = rng.choice(SEEDS)
    at = rng.randrange(len(frame))
    return frame[:at] + donor[rng.randrange(len(donor)) :]


def huge(rng: random.Random, frame: bytearray) -> bytearray:
    """Replace a length in the head, or a number in the header."""
    if rng.random() < 0.3:
        struct.pack_into("<IQ", frame, 8, rng.getrandbits(32), rng.getrandbits(64))
        return frame
    length = int.from_bytes(frame[8:12], "little")
    digits = [
        i for i in range(HEAD.size, HEAD.size + length) if chr(frame[i]).isdigit()
    ]
    text = bytes(frame[HEAD.size : HEAD.size + length])
    at = rng.choice(digits) - HEAD.size
    number = str(10 ** rng.randint(1, 30)).encode()
    text = (text[:at] + number + text[at + 1 :]).rstrip(b" ")
    text += b" " * (-len(text) % 64)
    frame[HEAD.size : HEAD.size + length] = text
    frame[8:12] = len(text).to_bytes(4, "little")
    return frame


def swap(rng: random.Random, frame: bytearray) -> bytearray:
    """Exchange a piece of the header with another one of the same length."""
    length, size = int.from_bytes(frame[8:12], "little"), rng.randint(1, 8)
    first, second = (HEAD.size + rng.randrange(max(1, length - size)) for _ in range(2))
    frame[first : first + size] = frame[second : second + size]
    return frame


KINDS: tuple[Callable[[random.Random, bytearray], bytearray], ...] = (
    flip,
    cut,
    splice,
    huge,
    swap,
)


def fuzz(count: int, seed: int) -> tuple[int, int]:
    """Return the number of refused frames, and the peak memory of decoding one."""
    rng, refused, peak = random.Random(seed), 0, 0
    for number in range(count):
        frame = rng.choice(KINDS)(rng, bytearray(rng.choice(SEEDS)))
        frame = resealed(frame) if rng.random() < 0.7 else frame
        if number % 20 == 0:
            tracemalloc.start()
        try:
            message = decode_message(frame)
        except WireError:
            refused += 1
        else:
            assert (
                encode_message(message) == frame
            )  # what is read has this one encoding
        if number % 20 == 0:
            peak = max(peak, tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    return refused, peak


@pytest.mark.parametrize(
    "count",
    [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)],
    ids="{:,}".format,
)
def test_random_malformed_frames_are_refused_within_little_memory(count: int) -> None:
    refused, peak = fuzz(count, count)
    assert 0.75 * count < refused < count
    assert peak < 1_000_000  # frames have at most 4 KB


def heavy(part: str, items: str, separators: int) -> bytes:
    """Return a header of the greatest length, with as many items as it may name."""
    count = 65_000 // separators
    table = {
        "job": "j",
        "run": 1,
        "number": 1,
        "task": "",
        "round": 0,
        "first": False,
        "told": 0,
    }
    table |= {"options": {}, "counted": {}, "marks": [], "tensors": [], "attached": []}
    table |= {"facts": {}, "preparing": False}
    empty = json.dumps(table[part])
    inside = ",".join(items.replace("N", f"{n:05d}") for n in range(count))
    full = (
        json.dumps(table, sort_keys=True, separators=(",", ":"))
        .encode()
        .replace(
            f'"{part}":{empty}'.encode(),
            f'"{part}":{empty[0]}{inside}{empty[1]}'.encode(),
        )
    )
    filler = b"t" * (2**21 - len(full) - 64)
    return forged(full.replace(b'"task":""', b'"task":"' + filler + b'"'), kind=1)


@pytest.mark.parametrize(
    ("part", "items", "separators"),
    [
        ("marks", "[]", 2),
        ("marks", "1N", 1),
        ("marks", '{"a":0.5}', 2),
        ("marks", "[[[[[]]]]]", 6),
        ("options", '"N":0.5', 1),
        ("facts", '"N":["metric",[],12345,6]', 7),
        ("facts", '"N":[[[[[]]]]]', 6),
        ("tensors", '["N","float32",[0]]', 5),
        ("options", '"\\ud83d\\ude00______N":0.5', 1),
    ],
)
def test_decoding_a_header_takes_bounded_memory(
    part: str, items: str, separators: int
) -> None:
    """32 MB whatever it says, and four times the message where that has 8 MB or more;
    before there was a bound, 350 MB and five seconds for 8 MB of brackets."""
    frame = heavy(part, items, separators)
    assert 2_090_000 < len(frame) < 2_100_000
    tracemalloc.start()
    with suppress(WireError):
        decode_message(frame)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # a body of 6 MB is copied once; that is four times the whole
    assert peak + 6e6 < 32e6


def test_a_header_that_could_exceed_the_bound_is_not_parsed() -> None:
    for frame, reason in (
        (heavy("marks", "[],[]", 2), "header has too many values"),
        (forged(b" " * (2**21 + 64), kind=1), "header is too long"),
    ):
        tracemalloc.start()
        with pytest.raises(WireError, match=reason):
            decode_message(frame)
        assert tracemalloc.get_traced_memory()[1] < 2.1 * 2**20
        tracemalloc.stop()
    with pytest.raises(WireError, match="header is too large"):
        encode_message(Request("j", 1, 1, "t", checkpoint_numbers=tuple(range(2**16))))


def test_large_models_and_many_metrics_fit_into_a_message() -> None:
    """Five times the tensors of the largest BERT, and as many metrics as are accepted."""
    tensors = {
        f"encoder.layer.{i}.attention.self.query.weight": torch.ones(1)
        for i in range(2000)
    }
    metrics = {f"relaxed/entity_type_{i}/predicted": 1.0 for i in range(10_000)}
    frame = encode_message(Reply("j", 1, 1, "s", Update(tensors, 1.0, metrics)))
    assert len(decode_reply(frame).update.metrics) == 10_000  # type: ignore[union-attr]
