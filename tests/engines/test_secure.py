"""The secure sum behind the engine: its messages, its terms, and what the server
sees."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from fault_net import Net
from fault_toy import JOB
from secagg import Ed25519Identity, identities
from secure_net import SITES, Giver, check, network, random_updates, tasks

from fednotes.core.errors import ConfigError, ModelError, TrainingError
from fednotes.core.federation import State
from fednotes.core.messages import BEGIN, HEAD, Attached, Request, decode_reply
from fednotes.core.update import Update
from fednotes.engines.inprocess import InProcess
from fednotes.engines.secure import SecureSeal, SecureSum
from fednotes.privacy.secure_sum import messages as wire
from fednotes.privacy.secure_sum.fixed_point import encode_update
from fednotes.privacy.secure_sum.messages import Masking

# messages


def test_a_sum_takes_two_messages_and_a_fresh_start_two_more(tmp_path: Path) -> None:
    updates = random_updates(1)
    net, engine, _, _ = network(tmp_path, updates, threshold=len(SITES))
    for turn in range(3):
        next(engine.rounds(turn, 3))
        total = engine.sum("give")
        check(total, [updates[s][turn] for s in SITES])
        assert total.included == SITES
    assert tasks(net) == [BEGIN, "@keys", "@shares", *["give", "@unmask"] * 3]
    frames = Counter(request.number for _, request, _ in net.sent)
    assert set(frames.values()) == {4}
    # one frame for all sites
    assert len({id(frame) for _, _, frame in net.sent}) == len(frames)


def test_a_sum_that_may_leave_sites_out_takes_one_more_message(tmp_path: Path) -> None:
    """Survivors confirm their list; a drop-out costs no message."""
    net, engine, _, _ = network(tmp_path, random_updates(1, rounds=5))
    opened = ["give", "@confirm", "@unmask"]
    engine.sum("give")
    assert tasks(net) == [BEGIN, "@keys", "@shares", *opened]
    net.down = {"c"}
    engine._least = 3
    for turn in range(2):
        next(engine.rounds(turn, 9))
        net.sent.clear()
        assert engine.sum("give").included == ("a", "b", "d")
        assert [task for task in tasks(net) if task != BEGIN] == opened
    net.down = set()
    next(engine.rounds(2, 9))
    net.sent.clear()
    assert engine.sum("give").included == SITES
    assert tasks(net)[-5:] == ["@keys", "@shares", *opened]


def test_the_traffic_is_about_twice_that_of_plain_sums(tmp_path: Path) -> None:
    """Eight bytes a number in place of four."""
    updates = {s: [Update({"w": torch.randn(200_000)})] * 2 for s in SITES}
    _, engine, _, _ = network(tmp_path, updates)
    engine.sum("give")
    up, down = engine.bytes_up, engine.bytes_down
    engine.sum("give")
    assert 2.0 < (engine.bytes_up - up) / (4 * 4 * 200_000) < 2.02
    assert engine.bytes_down - down < 60_000
    inside = InProcess([Giver(s, updates[s]) for s in SITES], secure=True)
    inside.sum("give")
    up = inside.bytes_up
    inside.sum("give")
    assert 2.0 < (inside.bytes_up - up) / (4 * 4 * 200_000) < 2.02


def test_keys_are_signed_and_survivor_lists_confirmed(tmp_path: Path) -> None:
    keys, updates = identities(SITES), random_updates(2)
    net, engine, _, _ = network(tmp_path, updates, identities=keys)
    for turn in range(2):
        check(engine.sum("give"), [updates[s][turn] for s in SITES])
    assert tasks(net)[3:] == ["give", "@confirm", "@unmask"] * 2
    # not the key that the others know
    keys["b"] = Ed25519Identity(b"B" * 32, keys["b"].known)
    net, engine, events, _ = network(tmp_path / "2", updates, identities=keys)
    with pytest.raises(TrainingError, match="nothing was opened"):
        engine.sum("give")
    assert any(
        "the keys of site 'b' are not signed by it" in event.text for event in events
    )


# what the server sees


def test_no_frame_at_the_server_holds_numbers_of_a_site(
    tmp_path: Path,
) -> None:
    """The bytes of every value of every site (as sent in the clear, and times the
    weight in float64) and the text of every count and weight, searched in all replies.
    In the clear they are found, so the search can find them; and the server's own sum
    is right."""
    updates = {
        site: [
            replace(u, weight=1234.5 + i, metrics={"loss": 0.123456 + i})
            for u in site_updates
        ]
        for i, (site, site_updates) in enumerate(random_updates(3).items())
    }
    plain = Net(
        {s: lambda s=s: Giver(s, updates[s]) for s in SITES}, tmp_path / "plain"
    )
    net, engine, _, _ = network(tmp_path / "secure", updates)
    for turn in range(3):
        check(engine.sum("give"), [updates[s][turn] for s in SITES])
    in_the_clear = plain.engine(SITES)
    in_the_clear.sum("give")
    forms = [
        form
        for site_updates in updates.values()
        for update in site_updates
        for value in update.tensors.values()
        for form in (value, value.double() * update.weight, value.double())
    ]
    needles = [piece for form in forms for piece in pieces(form)]
    numbers = [
        n
        for site_updates in updates.values()
        for u in site_updates
        for n in (u.weight, u.metrics["loss"])
    ]
    needles += [str(number).encode() for number in numbers]
    needles += [np.float64(number).tobytes() for number in numbers]
    # Without the heads: a length and a checksum look like a short number once in some
    # dozen runs.
    received = b"".join(bytes(frame)[HEAD.size :] for _, frame in net.came)
    assert len(needles) > 300
    assert not [needle for needle in needles if needle in received]
    clear = b"".join(bytes(frame) for _, frame in plain.came)
    assert sum(needle in clear for needle in needles) > 80
    turns = Counter[str]()
    for site, frame in net.came:  # nor any of the integers that the values become
        attached = decode_reply(frame).attached
        if "words" in attached.tensors:
            message = wire.read_masked(
                wire.read_message(Masking, attached.facts), attached
            )
            bare = encode_update(updates[site][turns[site]], message.layout)
            assert bare.shape == message.words.shape
            assert not np.isin(bare[bare != 0], message.words).any()
            turns[site] += 1
    assert turns == dict.fromkeys(SITES, 3)


def pieces(value: torch.Tensor) -> list[bytes]:
    """Return every eight adjacent bytes of a tensor."""
    raw = (
        value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    )
    return [raw[i : i + 8] for i in range(0, len(raw) - 7, 8)]


def test_a_site_that_catches_up_on_a_task_reveals_nothing(tmp_path: Path) -> None:
    """A late site does the tasks of before the first round without an exchange."""
    updates = random_updates(4)
    net, engine, _, calls = network(tmp_path, updates)
    engine._least, net.down = 3, {"d"}
    engine.sum("give")
    net.down = set()
    next(engine.rounds(0, 1))
    net.came.clear()
    total = engine.sum("give")
    assert calls["d"] == 2
    check(total, [updates[s][1] for s in SITES])
    for site, frame in net.came:
        reply = decode_reply(frame)
        assert reply.update == Update()
        assert set(reply.attached.tensors) <= {"words"}, site


# terms


def test_counts_that_only_some_sites_have_are_summed(tmp_path: Path) -> None:
    """The first sum finds the names; afterwards they are agreed. A name that comes
    later is agreed anew; one that is in no update is in no total. No site does its task
    twice."""
    metrics = {
        "a": [{"n": 1, "x": 2}, {"x": 5}, {"n": 3, "x": 1}, {"n": 4}],
        "b": [{"n": 2}, {"n": 7}, {"y": 5, "n": 1}, {"n": 6}],
        "c": [{"x": 1, "n": 4}, {}, {"n": 1}, {"n": 1}],
    }
    updates = {s: [Update({}, 2.0, m) for m in rounds] for s, rounds in metrics.items()}
    net, engine, _, calls = network(tmp_path, updates, threshold=3)
    for turn in range(4):
        check(engine.sum("give"), [rounds[turn] for rounds in updates.values()])
    again = ["give", "@keys", "@shares", "@masked", "@unmask"]
    assert tasks(net)[3:] == [*again, "give", "@unmask", *again, "give", "@unmask"]
    assert set(calls.values()) == {4}


def test_values_beyond_the_limits_of_the_last_total_are_summed_with_wider_limits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """4,096 times the last largest sum is the limit; then the widest, and then none."""
    small, large, huge = 1e-3, 1e3, 2.0**33
    updates = {
        s: [Update({"w": torch.full((3,), v)}) for v in (small, small)]
        for s in SITES[:3]
    }
    updates["b"] += [Update({"w": torch.full((3,), v)}) for v in (large, huge)]
    net, engine, events, calls = network(tmp_path, updates, threshold=3)
    for turn in range(3):
        next(engine.rounds(turn, 9))
        total = engine.sum("give")
    np.testing.assert_allclose(total.tensors["w"].numpy(), large + 2 * small, rtol=1e-9)
    assert tasks(net)[7:] == ["give", "@keys", "@shares", "@masked", "@unmask"]
    assert calls == dict.fromkeys(SITES[:3], 3)
    next(engine.rounds(3, 9))
    with pytest.raises(
        TrainingError, match="'give' has values beyond the limits of the secure"
    ):
        engine.sum("give")
    assert [event.site for event in events if event.kind == "refused"] == ["b"]
    assert "lower the learning rate" in events[-1].text
    # which tensor, and how large, is in the site's own log
    assert "'w'" not in events[-1].text
    assert not [frame for _, frame in net.came if b"2^31" in bytes(frame)]
    assert (
        "tensor 'w': weight times value exceeds the secure sum's limit 2^31"
        in caplog.text
    )
    assert calls == dict.fromkeys(SITES[:3], 4)  # it is no use to do the task once more


def test_the_limits_are_saved_in_the_checkpoint(tmp_path: Path) -> None:
    """So the sums after a restart have the same grid, and the run the same bits."""
    updates = {
        s: [Update({"w": torch.rand(50) / 3}) for _ in range(4)] for s in SITES[:3]
    }

    def job(engine: Any) -> bytes:
        last_state = engine.resume()
        for turn in engine.rounds(last_state.round if last_state else 0, 4):
            total = engine.sum("give")
            state = State(turn.number + 1)
            turn.commit(state, {}, evaluated=True)
        return total.tensors["w"].numpy().tobytes()

    uninterrupted = job(network(tmp_path / "whole", updates)[1])
    net, engine, _, _ = network(tmp_path, updates)
    for turn in engine.rounds(0, 3):
        engine.sum("give")
        turn.commit(State(turn.number + 1), {}, evaluated=True)
    again = net.engine(SITES[:3], summing=SecureSum(SITES[:3], job=JOB))
    assert job(again) == uninterrupted
    facts = json.loads(
        (tmp_path / "server" / "round-00000004" / "facts.json").read_text()
    )
    assert set(facts["progress"]["summing"]["limits"]["give"]) == {"w"}

    def members() -> list[Giver]:
        return [Giver(s, updates[s]) for s in SITES[:3]]

    assert job(InProcess(members(), secure=True)) == uninterrupted
    first = InProcess(members(), secure=True, directory=tmp_path / "inside")
    for turn in first.rounds(0, 3):
        first.sum("give")
        turn.commit(State(turn.number + 1), {}, evaluated=True)
    resumed = InProcess(
        members(), secure=True, directory=tmp_path / "inside", resume=True
    )
    assert job(resumed) == uninterrupted


def test_a_stored_history_that_is_invalid_is_reported(tmp_path: Path) -> None:
    updates = {s: [Update({"w": torch.ones(2)})] for s in SITES[:3]}
    net, engine, _, _ = network(tmp_path, updates)
    with mock.patch.object(SecureSum, "state", return_value={"history": "no digits"}):
        for turn in engine.rounds(0, 1):
            engine.sum("give")
            turn.commit(State(1), {}, evaluated=True)
    with pytest.raises(ModelError, match="move this folder away and start again"):
        net.engine(SITES[:3], summing=SecureSum(SITES[:3], job=JOB))


def test_a_site_with_another_model_is_left_out_and_reported(tmp_path: Path) -> None:
    updates = {s: [Update({"w": torch.ones(3)})] for s in SITES}
    updates["c"] = [Update({"w": torch.ones(4)})]
    net, engine, events, calls = network(tmp_path, updates)
    engine._least = 3
    total = engine.sum("give")
    assert total.included == ("a", "b", "d")
    assert torch.equal(total.tensors["w"], torch.full((3,), 3.0).double())
    assert [e.text for e in events if e.site == "c" and e.kind == "refused"] == [
        "site 'c' arranged its update differently from the others"
    ]
    engine._least = 4
    net.came.clear()
    next(engine.rounds(0, 1))
    with pytest.raises(
        TrainingError, match="3 sites can be added under the secure sum, 4 are"
    ):
        engine.sum("give")
    assert calls["a"] == 2  # it is no use to do the task once more


# restarts


def test_a_restarted_site_masks_its_update_in_a_fresh_exchange(tmp_path: Path) -> None:
    """It has no keys for the prepared exchange.

    All sites mask again; none does its task again.
    """
    updates = random_updates(5)
    net, engine, _, calls = network(tmp_path, updates, threshold=4)
    engine.sum("give")
    del net.hosts["b"]
    net.sent.clear()
    total = engine.sum("give")
    check(total, [updates[s][1] for s in SITES])
    assert total.included == SITES
    assert tasks(net) == ["give", "@keys", "@shares", "@masked", "@unmask"]
    # b's first was done again from its journal
    assert calls == {"a": 2, "b": 3, "c": 2, "d": 2}


def test_a_message_in_another_sites_name_is_refused(tmp_path: Path) -> None:
    updates = random_updates(6)
    _, engine, events, _ = network(tmp_path, updates)
    engine._least = 3
    stage = SecureSeal.answer_stage

    def lying(self: SecureSeal, request: Request) -> Attached:
        reply = stage(self, request)
        if self._site == "d" and request.task == "@keys":
            return Attached({**reply.facts, "site": "a"})
        return reply

    with mock.patch.object(SecureSeal, "answer_stage", lying):
        assert engine.sum("give").included == ("a", "b", "c")
    assert "site 'd' sent a message of the secure sum as 'a'" in {
        event.text for event in events
    }


@pytest.mark.parametrize(
    "damage", ["nothing", "more", "no message", "no words", "short", "names"]
)
def test_a_site_with_malformed_answers_is_left_out_of_the_sum(
    damage: str, tmp_path: Path
) -> None:
    updates = random_updates(7)
    _, engine, events, _ = network(tmp_path, updates)
    engine._least = 3
    seal = SecureSeal.seal

    def broken(
        self: SecureSeal, request: Request, update: Update, question: bytes
    ) -> Attached:
        reply = seal(self, request, update, question)
        if self._site != "d":
            return reply
        if damage == "short":
            return replace(reply, tensors={"words": reply.tensors["words"][1:]})
        if damage == "no words":
            return replace(reply, tensors={})
        changes = (
            {"names": [1]} if damage == "names" else {damage.removeprefix("no "): None}
        )
        return replace(
            reply, facts={} if damage == "nothing" else {**reply.facts, **changes}
        )

    with mock.patch.object(SecureSeal, "seal", broken):
        total = engine.sum("give")
    left_out = total.included == ("a", "b", "c")
    assert left_out
    assert [event.site for event in events if event.kind == "refused"] == ["d"]
    check(total, [updates[s][0] for s in "abc"])


def test_wrong_parameters_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="it needs 3 to"):
        SecureSeal("a", ("a", "b"), job=JOB)
    with pytest.raises(ConfigError, match="a threshold of 2 of 4 sites"):
        SecureSum(SITES, job=JOB, threshold=2)
    assert SecureSum(SITES, job=JOB).least == 3
    with pytest.raises(ConfigError, match="it needs 3 to"):
        InProcess([Giver(s, []) for s in "ab"], secure=True)
    inside = InProcess([Giver(s, [Update()]) for s in SITES], secure=True)
    with pytest.raises(TrainingError, match="site 'a' has no task 'take'"):
        inside.sum("take")
    wrong = InProcess(
        [Giver(s, [Update({"w": torch.ones(1 + (s == "d"))})]) for s in SITES],
        secure=True,
    )
    with pytest.raises(
        TrainingError, match="sites 'a' and 'd' prepared different sums"
    ):
        wrong.sum("give")
