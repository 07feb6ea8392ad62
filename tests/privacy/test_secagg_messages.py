"""Messages of the secure sum: round trips, and nothing else is accepted."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from secagg import Exchange

from fednotes.core.errors import RefusedError
from fednotes.core.messages import to_json_values
from fednotes.core.update import Update
from fednotes.privacy.secure_sum import Parties
from fednotes.privacy.secure_sum.messages import (
    ConfirmMessage,
    KeysMessage,
    MaskedMessage,
    Masking,
    SharesMessage,
    UnmaskMessage,
    UnmaskRequest,
    pack_masked,
    read_masked,
    read_message,
)
from fednotes.privacy.secure_sum.site import SiteChain

SITES = ("a", "b", "c")


def every_kind() -> list[Any]:
    """Return one message of each kind, also those that travel with others."""
    run = Exchange(SITES, confirmed=True)
    boxes = run.set_up()
    update = Update({"w": torch.ones(2, 3), "e": torch.zeros(0)}, 2.0, {"n": 1.0})
    masked = run.upload(dict.fromkeys(SITES, update), boxes, purpose="7/gradients")
    requests = run.server.make_requests()
    confirms = {
        name: run.sites[name].confirm(request) for name, request in requests.items()
    }
    for message in confirms.values():
        run.server.add_confirm(message)
    request = run.server.make_requests()["a"]
    following = SiteChain("a", Parties(SITES), b"")
    keys = {s: SiteChain(s, Parties(SITES), b"").make_keys(1) for s in SITES} | {
        "a": following.make_keys(1)
    }
    more = following.find_exchange(1).make_shares(keys)
    ahead = replace(masked["a"], next_keys=keys["a"])
    answer = run.sites["a"].unmask(request)
    last = replace(answer, next_shares=more)
    return [
        run.sites["a"].make_keys(),
        more,
        ahead,
        masked["b"],
        confirms["a"],
        request,
        answer,
        last,
    ]


def header(message: Any) -> tuple[Any, dict[str, Any]]:
    """Return the header as JSON text, and the tensors beside it."""
    apart = {"words": message.words} if isinstance(message, MaskedMessage) else {}
    return json.loads(json.dumps(to_json_values(message, *apart))), apart


def test_messages_survive_a_round_trip_through_json() -> None:
    """Through JSON text; fields compared one by one."""
    kinds = set()
    for message in every_kind():
        facts, apart = header(message)
        again = read_message(type(message), facts, **apart)
        kinds.add(type(message))
        for name in message.__dataclass_fields__:
            before, after = getattr(message, name), getattr(again, name)
            assert before is after if name == "words" else before == after
    assert kinds == {
        KeysMessage, SharesMessage, MaskedMessage, ConfirmMessage, UnmaskRequest, UnmaskMessage
    }  # fmt: skip


def test_masked_words_are_sent_without_a_copy() -> None:
    message = next(m for m in every_kind() if isinstance(m, MaskedMessage))
    sent = pack_masked(Masking(None, b"h"), message)
    words = read_masked(read_message(Masking, sent.facts), sent).words
    assert words.dtype == np.uint64
    assert words.tobytes() == message.words.tobytes()
    assert words.ctypes.data == message.words.ctypes.data  # no copy
    for wrong in (
        {},
        {"words": torch.zeros(9)},
        {"words": torch.zeros((3, 3), dtype=torch.int64)},
    ):
        with pytest.raises(RefusedError, match="has no words"):
            read_masked(read_message(Masking, sent.facts), replace(sent, tensors=wrong))


def places(table: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return every place in a JSON value."""
    inner = table.items() if isinstance(table, dict) else enumerate(table)
    key_paths = [path] if path else []
    if isinstance(table, dict | list):
        for key, value in inner:
            key_paths += (
                places(value, (*path, key))
                if isinstance(value, dict | list)
                else [(*path, key)]
            )
    return key_paths


def test_malformed_messages_are_refused_or_valid() -> None:
    """Each place of each message takes each of several wrong values: a RefusedError, or
    a message of the right kind (another name, say), never anything else."""
    draw = random.Random(0)
    wrong = [
        None,
        1,
        -1,
        2**70,
        1.5,
        True,
        "x",
        "zz",
        "",
        [],
        {},
        [1],
        {"a": 1},
        {"a": "zz"},
    ]
    refused = 0
    for message in every_kind():
        facts, apart = header(message)
        spots = places(facts)
        for spot in draw.sample(spots, min(40, len(spots))):
            for value in wrong:
                changed = copy.deepcopy(facts)
                target = changed
                for key in spot[:-1]:
                    target = target[key]
                target[spot[-1]] = value
                try:
                    again = read_message(type(message), changed, **apart)
                except RefusedError:
                    refused += 1
                else:
                    assert isinstance(again, type(message))
        for bad in (None, [], "x", {}, {**facts, "extra": 1}):
            with pytest.raises(RefusedError):
                read_message(type(message), bad, **apart)
    assert refused > 1000


def test_an_impossible_layout_is_refused() -> None:
    run = Exchange(SITES)
    update = Update({"w": torch.ones(2, 3)}, 2.0, {"n": 1.0})
    message = run.sites["a"].mask_update(run.set_up()["a"], update)
    facts, apart = header(message)
    for changes, why in [
        ({"shape": [2**40, 2**40]}, "update is not valid"),
        ({"shape": [1] * 17}, "update is not valid"),
        ({"shape": [2**50]}, "update is not valid"),
        ({"shape": [0, 2**50]}, "the wrong size"),
        ({"shape": [-1]}, "update is not valid"),
        ({"shape": [7]}, "the wrong size"),
        ({"kind": "weight"}, "update is not valid"),
        ({"name": "w\n"}, "'name' of a Field is wrong"),
        ({"exponent": 2**60}, "'exponent' of a Field is wrong"),
        ({"fine": None}, "'fine' of a Field is wrong"),
    ]:
        changed = copy.deepcopy(facts)
        changed["layout"]["fields"][0] |= changes
        with pytest.raises(RefusedError, match=why):
            run.server.add_masked(read_message(MaskedMessage, changed, **apart))
    run.server.add_masked(read_message(MaskedMessage, facts, **apart))
