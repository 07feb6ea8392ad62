"""Callbacks that receive the batches that a model reads.

    model.batch_listeners.announce(model, corpus, indices)   # the model, before each
    batch
    with model.batch_listeners.listening(callback):          # whoever wants to know
        ...

By default there are no listeners, and an announcement costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Listener = Callable[..., None]


class BatchListeners:
    """The callbacks of one model, called in the order in which they were added."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def announce(self, model: Any, *batch: Any) -> None:
        """Call every listener with the model and the batch that it will read next."""
        for listener in self._listeners:
            listener(model, *batch)

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Call `listener(model, *batch)` for each batch while the context is open."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)
