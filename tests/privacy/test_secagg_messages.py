"""Messages of the secure sum on a wire: there and back, and nothing else gets in."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from fednotes.core.errors import RefusedError
from fednotes.core.update import Update
from fednotes.privacy.secure_sum.chain import SiteChain
from fednotes.privacy.secure_sum.sums import (
    ConfirmMessage,
    KeysMessage,
    MaskedMessage,
    SharesMessage,
    UnmaskMessage,
    UnmaskRequest,
    from_wire,
    to_wire,
)

SITES = ("a", "b", "c")


def every_kind(exchange: type) -> list[Any]:
    """One message of each kind, the piggyback ones too."""
    run = exchange(SITES, confirmed=True)
    boxes = run.set_up()
    update = Update({"w": torch.ones(2, 3), "e": torch.zeros(0)}, 2.0, {"n": 1.0})
    masked = run.upload(dict.fromkeys(SITES, update), boxes, purpose="7/gradients")
    requests = run.server.requests()
    confirms = {name: run.sites[name].confirm(request) for name, request in requests.items()}
    for message in confirms.values():
        run.server.add_confirm(message)
    request = run.server.requests()["a"]
    following = SiteChain("a", SITES, b"")
    keys = {s: SiteChain(s, SITES, b"").keys(1) for s in SITES} | {"a": following.keys(1)}
    more = following.shares(1, keys)
    ahead = MaskedMessage(
        **{
            n: getattr(masked["a"], n) for n in masked["a"].__dataclass_fields__ if n != "next_keys"
        },
        next_keys=keys["a"],
    )
    answer = run.sites["a"].unmask(request)
    last = UnmaskMessage(answer.exchange, answer.site, answer.masks, answer.keys, more)
    return [run.sites["a"].keys(), more, ahead, masked["b"], confirms["a"], request, answer, last]


def test_there_and_back(exchange: type) -> None:
    """Through JSON text; fields compared one by one."""
    kinds = set()
    for message in every_kind(exchange):
        header, body = to_wire(message)
        again = from_wire(type(message), json.loads(json.dumps(header)), body)
        kinds.add(type(message))
        for name in message.__dataclass_fields__:
            one, other = getattr(message, name), getattr(again, name)
            if name == "words":
                assert one.tobytes() == other.tobytes() == body
            else:
                assert one == other
    assert kinds == {
        KeysMessage, SharesMessage, MaskedMessage, ConfirmMessage, UnmaskRequest, UnmaskMessage
    }  # fmt: skip


def test_words_are_little_endian(exchange: type) -> None:
    message = next(m for m in every_kind(exchange) if isinstance(m, MaskedMessage))
    header, body = to_wire(message)
    assert body == b"".join(int(word).to_bytes(8, "little") for word in message.words)
    assert from_wire(MaskedMessage, header, body).words.dtype == np.uint64


def places(table: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inner = table.items() if isinstance(table, dict) else enumerate(table)
    found = [path] if path else []
    if isinstance(table, dict | list):
        for key, value in inner:
            found += (
                places(value, (*path, key)) if isinstance(value, dict | list) else [(*path, key)]
            )
    return found


def test_malformed_messages_are_refused_or_harmless(exchange: type) -> None:
    """Each place of each message takes each of several wrong values: a RefusedError, or a
    message of the right kind (another name, say), never anything else."""
    draw = random.Random(0)
    wrong = [None, 1, -1, 2**70, 1.5, True, "x", "zz", "", [], {}, [1], {"a": 1}, {"a": "zz"}]
    refused = 0
    for message in every_kind(exchange):
        header, body = to_wire(message)
        spots = places(header)
        for spot in draw.sample(spots, min(40, len(spots))):
            for value in wrong:
                changed = copy.deepcopy(header)
                target = changed
                for key in spot[:-1]:
                    target = target[key]
                target[spot[-1]] = value
                try:
                    again = from_wire(type(message), changed, body)
                except RefusedError:
                    refused += 1
                else:
                    assert isinstance(again, type(message))
        for bad in (None, [], "x", {}, {**header, "extra": 1}):
            with pytest.raises(RefusedError):
                from_wire(type(message), bad, body)
        with pytest.raises(RefusedError, match=r"bytes, not|has no body"):
            from_wire(type(message), header, body + b"x")
    assert refused > 1000


def test_sizes_are_bounded_before_anything_is_made(exchange: type) -> None:
    message = next(m for m in every_kind(exchange) if isinstance(m, MaskedMessage))
    header, body = to_wire(message)
    for field, why in [
        (["tensor", "w", [2**40, 2**40], 28, 0], "impossible shape"),
        (["tensor", "w", [1] * 17, 28, 0], "impossible shape"),
        (["tensor", "w", [2**50], 28, 0], r"beyond 2\^48"),
        (["tensor", "w" * 2000, [6], 28, 0], "1000 characters"),
        (["tensor", "w", [7], 28, 0], "bytes, not"),
        (["tensor", "w", [-1], 28, 0], "is not a layout"),
        (["tensor", "w", [6]], "5 entries"),
    ]:
        changed = copy.deepcopy(header)
        changed["layout"]["fields"][0] = field
        with pytest.raises(RefusedError, match=why):
            from_wire(MaskedMessage, changed, body)
