"""Pass on the events of parts that train at the same time, one part after another.

A listener shows one part at a time: its events come between `begin` and `end`. The
events of the part whose turn it is are passed on at once. Those of the others wait
until the parts before them have ended.
"""

from __future__ import annotations

from collections.abc import Callable

from fednotes.engines.rounds import RoundResult
from fednotes.jobs.parts import Part
from fednotes.jobs.progress import ProgressListener

Event = Callable[[], None]


class Turns:
    """The parts that are being trained, in the order in which a listener sees them.

    Args:
        listener: The listener.
    """

    def __init__(self, listener: ProgressListener) -> None:
        self._listener = listener
        self._waiting: dict[str, list[Event]] = {}
        self._ended: set[str] = set()

    def listen(self, part: Part) -> ProgressListener:
        """Return the listener of a part that begins, whose turn comes last."""
        self._waiting[part.name] = []
        return _InTurn(self._listener, part.name, self)

    def add(self, part: str, event: Event) -> None:
        """Pass an event of a part on, or keep it until the part's turn comes."""
        if part == next(iter(self._waiting)):
            event()
        else:
            self._waiting[part].append(event)

    def end(self, part: str) -> None:
        """Record that a part has ended; pass on what waited for its end."""
        self._ended.add(part)
        while self._waiting:
            current = next(iter(self._waiting))
            events = self._waiting[current]
            while events:
                events.pop(0)()
            if current not in self._ended:
                return
            del self._waiting[current]


class _InTurn(ProgressListener):
    """Passes the events of one part on in its turn.

    Args:
        listener: Receives the events.
        name: The part's name.
        turns: The turns of all parts.
    """

    def __init__(self, listener: ProgressListener, name: str, turns: Turns) -> None:
        self._listener = listener
        self._name = name
        self._turns = turns

    def begin(self, part: Part, rounds: int, examples: int) -> None:
        """Pass the event on in its turn."""
        self._turns.add(
            self._name, lambda: self._listener.begin(part, rounds, examples)
        )

    def round(self, result: RoundResult) -> None:
        """Pass the event on in its turn."""
        self._turns.add(self._name, lambda: self._listener.round(result))

    def end(self) -> None:
        """Pass the event on in its turn."""
        self._turns.add(self._name, self._listener.end)

    def features(self, done: int, total: int) -> None:
        """Pass the event on in its turn."""
        self._turns.add(self._name, lambda: self._listener.features(done, total))
