"""What reading a message may cost, whatever it says."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from contextlib import suppress

import pytest
import torch

from fednotes.core.update import Update
from fednotes.engines.wire import HEAD, Reply, Request, WireError, decode, decode_reply, encode


def sealed(text: bytes) -> bytes:
    """A request of this header and no body, whose lengths and checksum are right."""
    text += b" " * (-len(text) % 64)
    return HEAD.pack(b"fedn", 2, 1, 0, len(text), 0, hashlib.sha256(text).digest()) + text


def heavy(part: str, items: str, separators: int) -> bytes:
    """A header of the greatest length, with as many things in one of its parts as it may name."""
    count = 65_000 // separators
    table = {"job": "j", "run": 1, "number": 1, "task": "", "round": 0, "first": False, "told": 0}
    table |= {"options": {}, "counted": {}, "marks": [], "tensors": [], "attached": []}
    empty = json.dumps(table[part])
    inside = ",".join(items.replace("N", f"{n:05d}") for n in range(count))
    full = (
        json.dumps(table, sort_keys=True, separators=(",", ":"))
        .encode()
        .replace(f'"{part}":{empty}'.encode(), f'"{part}":{empty[0]}{inside}{empty[1]}'.encode())
    )
    filler = b"t" * (2**21 - len(full) - 64)
    return sealed(full.replace(b'"task":""', b'"task":"' + filler + b'"'))


@pytest.mark.parametrize(
    ("part", "items", "separators"),
    [
        ("marks", "[]", 2),
        ("marks", "1N", 1),
        ("marks", '{"a":0.5}', 2),
        ("marks", "[[[[[]]]]]", 6),
        ("options", '"N":0.5', 1),
        ("tensors", '["N","float32",[0]]', 5),
        ("options", '"\\ud83d\\ude00______N":0.5', 1),
    ],
)
def test_what_a_header_may_cost(part: str, items: str, separators: int) -> None:
    """32 MB whatever it says, and four times the message where that has 8 MB or more; before
    there was a bound, 350 MB and five seconds for 8 MB of brackets."""
    frame = heavy(part, items, separators)
    assert 2_090_000 < len(frame) < 2_100_000
    tracemalloc.start()
    with suppress(WireError):
        decode(frame)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most + 6e6 < 32e6  # a body of 6 MB is copied once; that is four times the whole


def test_a_header_that_may_cost_more_is_not_read() -> None:
    for frame, reason in (
        (heavy("marks", "[],[]", 2), "names too many things"),
        (sealed(b" " * (2**21 + 64)), "header is too long"),
    ):
        tracemalloc.start()
        with pytest.raises(WireError, match=reason):
            decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 2.1 * 2**20
        tracemalloc.stop()
    with pytest.raises(WireError, match="names too many things"):
        encode(Request("j", 1, 1, "t", marks=tuple(range(2**16))))


def test_large_models_and_many_counts_fit() -> None:
    """Five times the tensors of the largest BERT, and as many metrics as are accepted."""
    tensors = {f"encoder.layer.{i}.attention.self.query.weight": torch.ones(1) for i in range(2000)}
    metrics = {f"relaxed/entity_type_{i}/predicted": 1.0 for i in range(10_000)}
    frame = encode(Reply("j", 1, 1, "s", Update(tensors, 1.0, metrics)))
    assert len(decode_reply(frame).update.metrics) == 10_000  # type: ignore[union-attr]
