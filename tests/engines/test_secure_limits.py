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
from fednotes.core.messages import Attached, Request
from fednotes.core.update import Update
from fednotes.engines.secure import MOST_LIMITS, SecureSeal, context_of
from fednotes.jobs.deployed import server, site
from fednotes.privacy.secure_sum import Parties
from fednotes.privacy.secure_sum import messages as wire
from fednotes.privacy.secure_sum.messages import KeysMessage, SharesMessage, Stage, Terms
from fednotes.privacy.secure_sum.server import ServerChain

SITES = ("a", "b", "c")
LARGEST = 37.0 * 0.02  # weight times value, in 2^-1 … 2^0


class Prober:
    """A server that asks for a task again and again, each time with limits of its choice."""

    def __init__(self) -> None:
        self.seals = {s: SecureSeal(s, SITES, job=JOB, threshold=3) for s in SITES}
        self.run, self.number = 1, 0
        self.chain = ServerChain(Parties(SITES, 3), context_of(JOB, 1))
        self.told: list[str] = []  # all that site a said of its values

    def request(self, task: str, attached: Attached, **fields: Any) -> Request:
        self.number += 1
        counted = {"a": fields.pop("counted", 0)}
        return Request(JOB, self.run, self.number, task, counted=counted, attached=attached)

    def restart(self) -> None:
        self.run += 1
        self.chain = ServerChain(Parties(SITES, 3), context_of(JOB, self.run))

    def ask(self, limits: dict[str, int], scale: float = 1.0, **fields: Any) -> str:
        """ "fits", "beyond", or "over" (the last word), for one fresh exchange."""
        now = self.chain.start()
        number = self.chain.number
        for seal in self.seals.values():
            reply = seal.stage(self.request("@keys", wire.packed(Stage(number))))
            now.add_keys(wire.read(KeysMessage, reply.facts))
        asked = wire.packed(Stage(number, now.keys()))
        for seal in self.seals.values():
            reply = seal.stage(self.request("@shares", asked))
            now.add_shares(wire.read(SharesMessage, reply.facts))
        attached = wire.packed_boxes(Terms(number, SITES, ("n",), limits), now.boxes())
        values = torch.tensor([0.001, 0.02]) * scale
        update = Update({"secret.w": values}, 37.0, {"n": 1.0})
        try:
            request = replace(self.request("give", attached), **fields)
            answer = self.seals["a"].seal(request, update, b"q").facts
        except FednotesError as error:
            self.told.append(str(error))
            return "over"
        self.told.append(answer["again"])
        return "beyond" if answer["wide"] else "fits"


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
    terms = Terms(99, SITES, ("n",), {"secret.w": -8})
    with pytest.raises(RefusedError, match="has no update"):
        seal.stage(prober.request("@masked", wire.packed(terms), counted=number - 1))
    told = []
    for exponent in (-8, -7):
        note = wire.packed(replace(terms, limits={"secret.w": exponent}))
        told.append(seal.stage(prober.request("@masked", note, counted=number)).facts)
    assert [note["wide"] for note in told] == [False, False]  # no keys: nothing said of the size
    note = wire.packed(replace(terms, limits={"secret.w": -6}))
    last = seal.stage(prober.request("@masked", note, counted=number)).facts
    assert last["wide"] is True
    assert "too many limits were tried" in last["again"]
    with pytest.raises(RefusedError, match="has no update for the secure sum any more"):
        seal.stage(prober.request("@masked", note, counted=number))


# what else a site and the server hold each other to


@pytest.mark.parametrize("sites", range(3, 11))
def test_no_deployed_sum_is_of_fewer_sites_than_the_threshold(sites: int) -> None:
    """At both ends of a deployed job, at every `min_sites`: lists are confirmed wherever a lying
    server could open a sum of fewer (`test_least_sum_of_a_lying_server`)."""
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
        assert ends[0].least == ends[1]._parties.threshold == threshold
        assert [end._parties.confirmed for end in ends] == [threshold < sites] * 2


def test_attachments_that_no_site_has_reason_to_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors beside the words, and words where there are none: of d alone."""
    updates = random_updates(1)
    seal, stage = SecureSeal.seal, SecureSeal.stage

    def with_more(name: str, self: SecureSeal, reply: Attached) -> Attached:
        more = {name: torch.zeros(9)} if self._site == "d" else {}
        return replace(reply, tensors={**reply.tensors, **more})

    def more(self: SecureSeal, *arguments: Any) -> Attached:
        return with_more("more", self, seal(self, *arguments))

    def words(self: SecureSeal, request: Request) -> Attached:
        return with_more("words", self, stage(self, request))

    for name, change in (("seal", more), ("stage", words)):
        _, engine, events, _ = network(tmp_path / name, updates)
        engine._least = 3
        with monkeypatch.context() as patch:
            patch.setattr(SecureSeal, name, change)
            assert engine.sum("give").included == ("a", "b", "c")
        refused = {event.text for event in events if event.kind == "refused"}
        assert refused == {"site 'd' sent more than a message of the secure sum"}
