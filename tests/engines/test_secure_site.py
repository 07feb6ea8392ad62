"""A site's side of the secure sum against a server that repeats messages or lies."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
import torch
from fault_toy import JOB
from secure_net import ByHand

from fednotes.core.errors import RefusedError
from fednotes.core.messages import (
    Attached,
    Request,
    WireError,
    decode_request,
    encode_message,
    to_json_values,
)
from fednotes.core.update import Update
from fednotes.engines.secure import SecureSeal
from fednotes.privacy.secure_sum import messages as wire
from fednotes.privacy.secure_sum.messages import (
    KeysMessage,
    Masking,
    Stage,
    Terms,
    UnmaskRequest,
)

SITES = ("a", "b", "c", "d")
QUESTION = b"q"


def request(task: str, number: int, note: Any = None, **changes: Any) -> Request:
    attached = changes.pop("attached", None) or Attached(note or {})
    counted = dict.fromkeys(SITES, 9)
    return Request(JOB, 1, number, task, counted=counted, attached=attached, **changes)


def stage(number: int, keys: Any = None) -> Any:
    return to_json_values(Stage(number, keys or {}))


def exchanged(update: Update) -> tuple[dict[str, SecureSeal], Any, Any]:
    """Return three sites that have masked an update, and what would open the sum."""
    server = ByHand(SITES[:3])
    attached = server.terms()
    for seal in server.seals.values():
        reply = seal.seal(request("give", 9, attached=attached), update, QUESTION)
        server.chain.add_masked(
            wire.read_masked(wire.read_message(Masking, reply.facts), reply)
        )
    requests, following = server.chain.make_requests()
    return (
        server.seals,
        attached,
        wire.pack_requests(server.chain.number, following, requests),
    )


def test_a_repeated_message_gets_the_same_answer_and_an_update_is_opened_once() -> None:
    seals, attached, opening = exchanged(Update({"w": torch.ones(3)}))
    seal = seals["a"]
    assert seal.seal(request("give", 9, attached=attached), Update(), QUESTION).facts[
        "again"
    ]
    opened = seal.answer_stage(request("@unmask", 10, attached=opening))
    assert seal.answer_stage(request("@unmask", 10, attached=opening)) is opened
    assert opened.facts["next_shares"] is not None
    two = seal.answer_stage(request("@unmask", 11, attached=opening)).facts
    assert two["next_shares"] is None
    assert two["masks"] == opened.facts["masks"]
    with pytest.raises(
        RefusedError, match="no longer has an update for the secure sum"
    ):
        seal.answer_stage(request("@masked", 12, attached=attached))


def test_after_a_fresh_start_the_older_exchange_is_never_opened() -> None:
    seals, attached, opening = exchanged(Update({"w": torch.ones(3)}))
    seals["a"].answer_stage(request("@keys", 10, stage(7)))
    with pytest.raises(RefusedError, match="no keys for exchange"):
        seals["a"].answer_stage(request("@unmask", 11, attached=opening))
    with pytest.raises(RefusedError, match="was used before"):
        seals["b"].answer_stage(request("@keys", 10, stage(1)))
    later = replace(request("@keys", 10, stage(1)), server_start=2)
    seals["b"].answer_stage(later)  # a new run counts anew, with new keys
    with pytest.raises(RefusedError, match="run 1 of the secure sum has ended"):
        seals["b"].answer_stage(request("@unmask", 11, attached=opening))
    undone = replace(request("@masked", 12, attached=attached), counted={"c": 8})
    with pytest.raises(RefusedError, match="no longer has an update"):
        seals["c"].answer_stage(undone)


def test_bytes_that_are_not_a_message_of_the_secure_sum_are_refused() -> None:
    seals, attached, opening = exchanged(Update())
    seal = seals["c"]
    with pytest.raises(RefusedError, match="has no task '@open'"):
        seal.answer_stage(request("@open", 20, attached=opening))
    good = stage(1)
    for wrong in (
        None,
        {"number": "1"},
        {"keys": {"a": {}}},
        {"number": True},
        {"more": 1},
    ):
        wrong = wrong and {**good, **wrong}
        with pytest.raises(RefusedError, match=r"secure sum|KeysMessage"):
            seal.answer_stage(request("@shares", 20, wrong))
    terms = attached.facts
    for change in ({"limits": {"w": 999}}, {"limits": {"w": 1.5}}, {"limits": []}):
        broken = replace(attached, facts={**terms, **change})
        with pytest.raises(RefusedError, match="secure sum"):
            seal.seal(request("give", 21, attached=broken), Update(), QUESTION)
    broken = replace(attached, facts={**terms, "roster": [1, 2, 3]})
    with pytest.raises(RefusedError, match="secure sum"):
        seal.seal(request("give", 21, attached=broken), Update(), QUESTION)
    for change in ({"roster": ["a", "b"]}, {"roster": list(SITES)}):
        broken = replace(attached, facts={**terms, **change})
        assert seal.seal(
            request("give", 21, attached=broken), Update(), QUESTION
        ).facts["again"]


def test_a_new_run_and_a_task_without_terms_discard_the_older_update() -> None:
    """Each would otherwise be masked once more, in an exchange of the server's choice."""
    seals, attached, _ = exchanged(Update({"w": torch.ones(3)}))
    later = replace(request("@masked", 20, attached=attached), server_start=2)
    with pytest.raises(
        RefusedError, match="no longer has an update for the secure sum"
    ):
        seals["a"].answer_stage(later)
    with pytest.raises(
        RefusedError, match="task 'give' was requested outside the secure sum"
    ):
        seals["b"].seal(request("give", 9), Update({"w": torch.ones(3)}), QUESTION)
    late, (others, _, _) = request("give", 9, preparing=True), exchanged(Update())
    assert others["c"].seal(late, Update({"w": torch.ones(3)}), QUESTION) == Attached()
    with pytest.raises(
        RefusedError, match="no longer has an update for the secure sum"
    ):
        others["c"].answer_stage(request("@masked", 20, attached=attached))
    with pytest.raises(
        RefusedError, match="no longer has an update for the secure sum"
    ):
        seals["b"].answer_stage(request("@masked", 20, attached=attached))
    again = seals["c"].answer_stage(request("@masked", 20, attached=attached)).facts
    # only this exchange cannot take it twice
    assert "is at 'masked'" in again["again"]


def test_a_number_of_the_previous_run_is_not_a_repeated_message() -> None:
    seals, _, _ = exchanged(Update())
    first_keys = seals["a"].answer_stage(request("@keys", 30, stage(9)))
    assert seals["a"].answer_stage(request("@keys", 30, stage(9))) is first_keys
    two = seals["a"].answer_stage(
        replace(request("@keys", 30, stage(9)), server_start=2)
    )
    assert first_keys.facts["sharing"] != two.facts["sharing"]


MANY = tuple(f"hospital-{i:03d}" for i in range(250))


def test_a_message_that_is_too_large_to_read_is_not_sent() -> None:
    attached = wire.pack(Terms(0, (), tuple(f"n{i}" for i in range(70_000))))
    with pytest.raises(WireError, match="header is too large"):
        encode_message(Request("j", 1, 1, "t", attached=attached))


def asked_of_all() -> tuple[Attached, dict[str, UnmaskRequest]]:
    def raw(sender: str, to: str) -> bytes:
        return f"{sender}>{to}".encode().ljust(32, b".")

    confirming = MANY[:200]
    requests = {
        to: UnmaskRequest(
            b"x" * 32,
            MANY,
            (),
            {s: raw(s, to) for s in MANY if s != to},
            {s: raw(to, s) for s in confirming if s != to},
        )
        for to in MANY
    }
    keys = {
        s: KeysMessage(b"x" * 32, s, b"a" * 32, b"b" * 32, b"c" * 32, b"d" * 64)
        for s in MANY
    }
    return wire.pack_requests(3, keys, requests), requests


def test_receipts_of_250_sites_take_at_most_four_times_the_message() -> None:
    attached, requests = asked_of_all()
    frame = bytearray(encode_message(Request("j", 1, 1, "@unmask", attached=attached)))
    assert 4e6 < len(frame) < 4.4e6  # twice 250 x 250 x 32 bytes, and the keys
    tracemalloc.start()
    came = decode_request(frame).attached
    stage = wire.read_message(Stage, came.facts)
    decoded = wire.read_unmask_request(stage, came, MANY[7])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert decoded == requests[MANY[7]]
    assert stage.keys[MANY[249]].signature == b"d" * 64
    assert len(frame) + peak < 4 * len(frame)


@pytest.mark.parametrize("wrong", ["receipts", "confirmations"])
def test_malformed_tables_are_refused(wrong: str) -> None:
    attached, _ = asked_of_all()
    stage, table = wire.read_message(Stage, attached.facts), attached.tensors[wrong]
    for value in (None, table[1:], table.to(torch.int8)):
        broken = {k: v for k, v in attached.tensors.items() if k != wrong}
        if value is not None:
            broken[wrong] = value
        with pytest.raises(RefusedError, match=f"lacks {wrong} for its sites"):
            wire.read_unmask_request(stage, Attached(attached.facts, broken), MANY[0])
    with pytest.raises(RefusedError, match="'stranger' has no receipts"):
        wire.read_unmask_request(stage, attached, "stranger")
