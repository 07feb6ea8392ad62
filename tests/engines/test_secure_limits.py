"""What a server can find out of the size of a site's values by asking for narrower limits."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fault_toy import JOB
from secure_net import network, random_updates

from fednotes.core.errors import FednotesError, RefusedError
from fednotes.core.update import Tensors, Update
from fednotes.engines import secure_wire as wire
from fednotes.engines.secure_server import SecureSeal
from fednotes.engines.secure_site import MOST_LIMITS, context_of
from fednotes.engines.wire import Request
from fednotes.jobs.deployed import server, site
from fednotes.privacy.secure_sum.sums import (
    KeysMessage,
    ServerChain,
    SharesMessage,
    from_wire,
    least_in_sum,
    needs_confirmation,
)

SITES = ("a", "b", "c")
LARGEST = 37.0 * 0.02  # weight times value, in 2^-1 … 2^0


class Prober:
    """A server that asks for a task again and again, each time with limits of its choice."""

    def __init__(self) -> None:
        self.seals = {s: SecureSeal(s, SITES, job=JOB, threshold=3) for s in SITES}
        self.run, self.number = 1, 0
        self.chain = ServerChain(SITES, context_of(JOB, 1), 3)
        self.told: list[str] = []  # all that site a said of its values

    def request(self, task: str, attached: Tensors, **fields: Any) -> Request:
        self.number += 1
        counted = {"a": fields.pop("counted", 0)}
        return Request(JOB, self.run, self.number, task, counted=counted, attached=attached)

    def restart(self) -> None:
        self.run += 1
        self.chain = ServerChain(SITES, context_of(JOB, self.run), 3)

    def ask(self, limits: dict[str, int], scale: float = 1.0, **fields: Any) -> str:
        """ "fits", "beyond", or "over" (the last word), for one fresh exchange."""
        now = self.chain.start()
        note: dict[str, Any] = {"number": self.chain.number}
        for seal in self.seals.values():
            reply = seal.stage(self.request("@keys", wire.packed(note)))
            now.add_keys(from_wire(KeysMessage, wire.noted(reply)["message"]))
        note["keys"] = wire.keys_note(now.keys())
        for seal in self.seals.values():
            reply = seal.stage(self.request("@shares", wire.packed(note)))
            now.add_shares(from_wire(SharesMessage, wire.noted(reply)["message"]))
        terms = {"number": self.chain.number, "roster": list(SITES), "metrics": ["n"]}
        attached = wire.packed(
            {**terms, "limits": limits}, boxes=wire.packed_boxes(now.boxes(), SITES)
        )
        values = torch.tensor([0.001, 0.02]) * scale
        update = Update({"secret.w": values}, 37.0, {"n": 1.0})
        try:
            request = replace(self.request("give", attached), **fields)
            answer = wire.noted(self.seals["a"].seal(request, update, b"q"))
        except FednotesError as error:
            self.told.append(str(error))
            return "over"
        self.told.append(str(answer.get("again", "")))
        return "beyond" if answer.get("wide") else "fits"


def test_a_search_for_the_largest_value_ends_at_once() -> None:
    """By halves, from above and from below: without the bound each finds the power of two. What
    is known after the answers that are given is as many as these tell apart: a few bits."""
    prober, low, high = Prober(), -40, 40
    answers = []
    while low < high and "over" not in answers:
        middle = (low + high) // 2
        answers.append(prober.ask({"secret.w": middle}))
        low, high = (middle + 1, high) if answers[-1] == "beyond" else (low, middle)
    assert answers[-1] == "over"
    assert len(answers) <= MOST_LIMITS + 1
    assert high - low > 8
    from_above = Prober()
    answers = [from_above.ask({"secret.w": exponent}) for exponent in range(40, -40, -1)]
    assert answers == ["fits"] * MOST_LIMITS + ["over"] * (80 - MOST_LIMITS)
    from_below = Prober()
    answers = [from_below.ask({"secret.w": exponent}) for exponent in range(-40, 40)]
    assert answers == ["beyond"] + ["over"] * 79
    assert from_below.ask({}) == "over"
    wide_at_last = Prober()
    answers = [wide_at_last.ask(limits) for limits in ({"secret.w": -9}, {"secret.w": -8}, {})]
    assert answers == ["beyond", "over", "over"]
    for text in (*prober.told, *from_above.told, *from_below.told):
        assert "secret" not in text.replace("secure", "")
        assert not re.search(r"\d", text)


def test_a_redo_and_a_restart_of_the_server_do_not_begin_the_count_anew() -> None:
    """The same question has the same answer, so that an honest server can do a task again; other
    values under the same limits are another question."""
    prober = Prober()
    for _ in range(4):
        assert prober.ask({"secret.w": -9}) == "beyond"
        assert prober.ask({}) == "fits"
        prober.restart()
    assert prober.ask({"secret.w": -9}, scale=2.0) == "over"
    prober.restart()
    assert prober.ask({"secret.w": -8}) == "over"
    assert prober.ask({"secret.w": -9}, round=1) == "beyond"
    other = Prober()
    assert other.ask({"other": 3}) == "fits"  # no limit of any value: the widest grid
    assert [other.ask({"secret.w": e}) for e in (5, 6, 7)] == ["fits", "fits", "over"]


def test_the_bound_holds_for_updates_that_are_masked_again() -> None:
    """As `seal` has it, so has "@masked"; its last word is an answer, for it is final."""
    prober = Prober()
    assert prober.ask({"secret.w": -9}) == "beyond"
    seal = prober.seals["a"]
    number = prober.number
    terms = {"number": 99, "roster": list(SITES), "metrics": ["n"], "limits": {"secret.w": -8}}
    with pytest.raises(RefusedError, match="has no update"):
        seal.stage(prober.request("@masked", wire.packed(terms), counted=number - 1))
    told = []
    for exponent in (-8, -7):
        note = wire.packed({**terms, "limits": {"secret.w": exponent}})
        told.append(wire.noted(seal.stage(prober.request("@masked", note, counted=number))))
    assert [note["wide"] for note in told] == [False, False]  # no keys: nothing said of the size
    note = wire.packed({**terms, "limits": {"secret.w": -6}})
    last = wire.noted(seal.stage(prober.request("@masked", note, counted=number)))
    assert last["wide"] is True
    assert "too many limits were tried" in last["again"]
    with pytest.raises(RefusedError, match="has no update for the secure sum any more"):
        seal.stage(prober.request("@masked", note, counted=number))


# what else a site and the server hold each other to


@pytest.mark.parametrize("sites", range(3, 11))
def test_no_deployed_sum_is_of_fewer_sites_than_the_threshold(sites: int) -> None:
    """`least_in_sum` (brute force tells that it is right) for what a deployed job has at both
    ends, at every `min_sites`."""
    names = tuple(f"s{i}" for i in range(sites))
    for least in range(sites + 1):
        job: Any = SimpleNamespace(federation=SimpleNamespace(secure_sum=True, min_sites=least))
        setup: Any = SimpleNamespace(
            sites=names, site=names[0], identity=None, state=Path("nowhere"), min_sites=1
        )
        ends: list[Any] = [
            server._summing(job, setup, JOB),
            site._sealer(job, setup, JOB),
        ]
        threshold = max(least or sites, sites // 2 + 1)
        assert ends[0].least == ends[1]._threshold == threshold
        for end in ends:
            confirmed = end._confirmed
            assert least_in_sum(sites, threshold, confirmed=confirmed) == threshold
            assert confirmed == needs_confirmation(sites, threshold) == (threshold < sites)
    assert least_in_sum(5, 3, confirmed=False) == 2


def test_attachments_that_no_site_has_reason_to_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors beside the words, and words where there are none: of d alone."""
    updates = random_updates(1)
    seal, stage = SecureSeal.seal, SecureSeal.stage

    def more(self: SecureSeal, request: Request, update: Update, question: bytes) -> Tensors:
        more = {"more": torch.zeros(9)} if self._site == "d" else {}
        return {**seal(self, request, update, question), **more}

    def words(self: SecureSeal, request: Request) -> Tensors:
        more = {"words": torch.zeros(9)} if self._site == "d" else {}
        return {**stage(self, request), **more}

    for name, change in (("seal", more), ("stage", words)):
        _, engine, events, _ = network(tmp_path / name, updates)
        engine._least = 3
        with monkeypatch.context() as patch:
            patch.setattr(SecureSeal, name, change)
            assert engine.sum("give").included == ("a", "b", "c")
        refused = {event.text for event in events if event.kind == "refused"}
        assert refused == {"site 'd' sent more than a message of the secure sum"}
