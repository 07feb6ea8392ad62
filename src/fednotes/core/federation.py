"""What the server side of a method sees of its sites: a sum.

    total = federation.sum("gradients", shared, round=7)      # Σ over sites

A method never learns who added what, how the tensors travelled or whether the sum was
masked: the engine between method and sites (`engines/`) does. It may learn who is in a sum
(`Total.included`), so that a site can take its own part out of it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from fednotes.core.errors import ModelError
from fednotes.core.update import Tensors, Total, Update

Option = str | int | float | bool
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class State:
    """All that one side must keep to go on after a restart.

    tensors: by name. facts: JSON values (counters, histories, names). Raises TypeError for a
    round that is no number or facts that are no table.
    """

    round: int
    tensors: Tensors = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if type(self.round) is not int or self.round < 0 or not isinstance(self.facts, Mapping):
            raise TypeError("a state needs the number of a round and a table of facts")

    def fact(self, name: str, kind: type[T]) -> T:
        """One of the facts. Raises ModelError where it is missing or of another type."""
        value = self.facts.get(name)
        if type(value) is not kind:
            raise ModelError(f"the newest checkpoint has no {name!r} that can be: begin anew")
        return value


class Round(Protocol):
    """One turn of a method's loop."""

    @property
    def number(self) -> int:
        """The round's number, from 0."""

    def commit(
        self, state: State, metrics: Mapping[str, float], *, evaluated: bool = False
    ) -> None:
        """End the round: progress and ledger; after an evaluation a line of metrics.jsonl and
        a checkpoint of both sides too.

        state: what the server needs to start with round `number + 1`.
        metrics: summed or averaged numbers for people to read.
        """


class Federation(Protocol):
    """The sites, taken together."""

    def sum(self, task: str, tensors: Tensors | None = None, /, **options: Option) -> Total:
        """Send `tensors` to every site, run `task` there, and add what the sites return.

        Raises TrainingError if too few sites answer or their replies do not fit together.
        """

    def each(
        self, task: str, tensors: Tensors | None = None, /, **options: Option
    ) -> Mapping[str, Update]:
        """Every site's own reply, by site. For methods that truly need it.

        Raises RefusedError where a policy or the secure sum forbids it.
        """

    def rounds(self, start: int, stop: int) -> Iterator[Round]:
        """The rounds from `start` to `stop` - 1."""

    def resume(self) -> State | None:
        """The server's state at the last checkpoint, if this run goes on from one."""


class SiteTasks(Protocol):
    """The site side of a method: its public tasks, and what it must keep.

    A task is a method `task(tensors, **options) -> Update` whose name is in `tasks`; an
    engine calls no other.
    """

    tasks: ClassVar[frozenset[str]]

    @property
    def id(self) -> str:
        """The site's name in the job."""

    def state(self) -> State:
        """What is private to the site and changes while it trains."""

    def restore(self, state: State) -> None:
        """Go back to a kept state."""
