"""Listeners of batches are called in order and only while they are registered."""

from __future__ import annotations

import copy
from typing import Any

from fednotes.core.listeners import BatchListeners


def test_listeners_see_each_batch_while_they_listen() -> None:
    batches = BatchListeners()
    calls: list[tuple[Any, ...]] = []
    batches.announce("model", 1)
    with batches.listening(lambda *call: calls.append(("first", *call))):
        with batches.listening(lambda *call: calls.append(("second", *call))):
            batches.announce("model", 2, 3)
        batches.announce("model", 4)
    batches.announce("model", 5)
    assert calls == [
        ("first", "model", 2, 3),
        ("second", "model", 2, 3),
        ("first", "model", 4),
    ]


def test_a_copy_of_a_model_keeps_its_listeners() -> None:
    """A method that copies a model while an audit listens must not escape it."""
    batches = BatchListeners()
    calls: list[Any] = []

    def note(model: Any, batch: Any) -> None:
        calls.append((model, batch))

    with batches.listening(note):
        copy.deepcopy(batches).announce("copy", 1)
    assert calls == [("copy", 1)]
