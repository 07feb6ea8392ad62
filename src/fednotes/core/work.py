"""Long work, such as reading or predicting, and whoever shows how far it is.

    for note in count_items(notes, "reading notes"):   # where the work is done
        ...
    with reporting_to(listener):                       # where somebody waits for it
        ...

Without a listener, counting costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

INTERVAL = 0.1  # seconds between two reports
Item = TypeVar("Item")


class WorkListener(Protocol):
    """Receives how far work is; work that begins during other work is a part of it."""

    def begin(self, name: str, total: int | None) -> None:
        """Be notified that work begins.

        Args:
            name: What is done, such as "reading notes".
            total: The number of items; None if it is unknown.
        """

    def advance(self, done: int) -> None:
        """Receive how many items of the newest work are done."""

    def end(self) -> None:
        """Be notified that the newest work has ended."""


_listener: ContextVar[WorkListener | None] = ContextVar("listener", default=None)


@contextmanager
def reporting_to(listener: WorkListener) -> Iterator[None]:
    """Report the work that is done within the context to a listener."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class Count:
    """Counts the items of some work, and reports them from time to time."""

    def __init__(self, listener: WorkListener | None) -> None:
        self._listener = listener
        self._done = 0
        self._next_report = 0.0

    def add(self, number: int = 1) -> None:
        """Count items that are done."""
        if self._listener is None:
            return
        self._done += number
        now = time.monotonic()
        if now >= self._next_report:
            self._listener.advance(self._done)
            self._next_report = now + INTERVAL

    def each(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield items; count each one when the next one is requested."""
        for item in items:
            yield item
            self.add()


@contextmanager
def working(name: str, total: int | None = None) -> Iterator[Count]:
    """Announce work for the context; yield the count that reports its items.

    Args:
        name: What is done, such as "reading notes".
        total: The number of items; None if it is unknown.
    """
    listener = _listener.get()
    if listener is None:
        yield Count(None)
        return
    listener.begin(name, total)
    try:
        yield Count(listener)
    finally:
        listener.end()


def count_items(
    items: Iterable[Item], name: str, total: int | None = None
) -> Iterator[Item]:
    """Yield items, and report to the listener how many are done.

    Args:
        items: The items.
        name: What is done with them, such as "reading notes".
        total: Their number; None if it is unknown.
    """
    with working(name, total) as count:
        yield from count.each(items)
