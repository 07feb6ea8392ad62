"""What a server can learn about the size of values by narrower limits."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from secure_net import ByHand, network, random_updates

from fednotes.core.errors import FednotesError, RefusedError
from fednotes.core.messages import Attached
from fednotes.core.update import Update
from fednotes.engines.secure import MOST_LIMITS, SecureSeal
from fednotes.privacy.secure_sum import messages as wire
from fednotes.privacy.secure_sum.messages import Terms

SITES = ("a", "b", "c")
LARGEST = 37.0 * 0.02  # weight times value, in 2^-1 … 2^0


class Prober(ByHand):
    """A server that repeats a task, each time with limits of its choice.

    texts: all that site a said of its values.
    """

    def __init__(self) -> None:
        super().__init__(SITES)
        self.texts: list[str] = []

    def ask(
        self,
        exponent: int | None,
        scale: float = 1.0,
        name: str = "secret",
        round: int = 0,
    ) -> str:
        """Return "fits", "beyond", or "over" (the last answer), for one fresh
        exchange."""
        attached = self.terms(("n",), **({} if exponent is None else {name: exponent}))
        update = Update(
            {"secret": torch.tensor([0.001, 0.02]) * scale}, 37.0, {"n": 1.0}
        )
        try:
            request = replace(self.request("give", attached), round=round)
            answer = self.seals["a"].seal(request, update, b"q").facts
        except FednotesError as error:
            self.texts.append(str(error))
            return "over"
        self.texts.append(answer["again"])
        return "beyond" if answer["wide"] else "fits"


def test_a_search_for_the_largest_value_is_stopped_at_once() -> None:
    """By halves, from above and from below: without the bound each finds the power of
    two. What is known after the answers that are given is as many as these tell apart:
    a few bits."""
    prober, low, high = Prober(), -40, 40
    answers = []
    while low < high and "over" not in answers:
        middle = (low + high) // 2
        answers.append(prober.ask(middle))
        low, high = (middle + 1, high) if answers[-1] == "beyond" else (low, middle)
    assert answers[-1] == "over"
    assert len(answers) <= MOST_LIMITS + 1
    assert high - low > 8
    from_above = Prober()
    answers = [from_above.ask(exponent) for exponent in range(40, -40, -1)]
    assert answers == ["fits"] * MOST_LIMITS + ["over"] * (80 - MOST_LIMITS)
    from_below = Prober()
    answers = [from_below.ask(exponent) for exponent in range(-40, 40)]
    assert answers == ["beyond"] + ["over"] * 79
    assert from_below.ask(None) == "over"
    wide_at_last = Prober()
    answers = [wide_at_last.ask(exponent) for exponent in (-9, -8, None)]
    assert answers == ["beyond", "over", "over"]
    for text in (*prober.texts, *from_above.texts, *from_below.texts):
        assert "secret" not in text
        assert not re.search(r"\d", text)


def test_a_redo_and_a_restart_of_the_server_do_not_reset_the_count() -> None:
    """The same question has the same answer, so that an honest server can do a task
    again; other values under the same limits are another question."""
    prober = Prober()
    for _ in range(4):
        assert prober.ask(-9) == "beyond"
        assert prober.ask(None) == "fits"
        prober.restart()
    assert prober.ask(-9, scale=2.0) == "over"
    prober.restart()
    assert prober.ask(-8) == "over"
    assert prober.ask(-9, round=1) == "beyond"
    restarted = Prober()
    # no limit of any value: the widest grid
    assert restarted.ask(3, name="other") == "fits"
    assert [restarted.ask(e) for e in (5, 6, 7)] == ["fits", "fits", "over"]


def test_the_bound_also_holds_for_updates_that_are_masked_again() -> None:
    """As `seal` has it, so has "@masked"; its last word is an answer, for it is final."""
    prober = Prober()
    assert prober.ask(-9) == "beyond"
    seal = prober.seals["a"]
    number = prober.number
    terms = Terms(99, SITES, ("n",), {"secret": -8})
    with pytest.raises(RefusedError, match="no longer has an update"):
        seal.answer_stage(
            prober.request("@masked", wire.pack(terms), counted=number - 1)
        )
    notes = []
    for exponent in (-8, -7):
        note = wire.pack(replace(terms, limits={"secret": exponent}))
        notes.append(
            seal.answer_stage(prober.request("@masked", note, counted=number)).facts
        )
    # no keys: nothing said of the size
    assert [note["wide"] for note in notes] == [False, False]
    note = wire.pack(replace(terms, limits={"secret": -6}))
    last = seal.answer_stage(prober.request("@masked", note, counted=number)).facts
    assert last["wide"] is True
    assert "too many limits were tried" in last["again"]
    with pytest.raises(
        RefusedError, match="no longer has an update for the secure sum"
    ):
        seal.answer_stage(prober.request("@masked", note, counted=number))


# what else a site and the server hold each other to


@pytest.mark.parametrize(("end", "name"), [("seal", "more"), ("answer_stage", "words")])
def test_unexpected_attachments_are_refused(
    end: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors beside the words, and words where there are none: of d alone."""
    fair = getattr(SecureSeal, end)

    def changed(self: SecureSeal, *arguments: Any) -> Attached:
        reply, more = (
            fair(self, *arguments),
            {name: torch.zeros(9)} if self._site == "d" else {},
        )
        return replace(reply, tensors={**reply.tensors, **more})

    _, engine, events, _ = network(tmp_path, random_updates(1))
    engine._least = 3
    monkeypatch.setattr(SecureSeal, end, changed)
    assert engine.sum("give").included == ("a", "b", "c")
    refused = {event.text for event in events if event.kind == "refused"}
    assert refused == {"site 'd' sent more data than a message of the secure sum"}
