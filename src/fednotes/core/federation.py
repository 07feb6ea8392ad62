"""What the two sides of a method see of each other: a sum over the sites.

    total = federation.sum("gradients", shared, round=7)      # Σ over sites

A method never learns who added what, how the tensors travelled or whether the sum was
masked: the engine between method and sites (`engines/`) does. It may learn who is in a
sum (`Total.included`), so that a site can take its own part out of it again. Only where
sites permit it and no sum is secure may it ask for each site's update
(`Federation.each`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fednotes.core.errors import ModelError
from fednotes.core.update import Tensors, Total, Update

Option = str | int | float | bool
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class State:
    """All that one side must keep to go on after a restart.

    tensors: by name. facts: JSON values (counters, histories, names). Raises TypeError
    for a round that is no number or facts that are no table.
    """

    round: int
    tensors: Tensors = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (
            type(self.round) is not int
            or self.round < 0
            or not isinstance(self.facts, Mapping)
        ):
            raise TypeError("a state needs the number of a round and a table of facts")

    def fact(self, name: str, kind: type[T]) -> T:
        """One of the facts.

        Raises ModelError where it is missing or of another type.
        """
        value = self.facts.get(name)
        if type(value) is not kind:
            raise ModelError(
                f"the newest checkpoint has no {name!r} that can be: begin anew"
            )
        return value


class Round(Protocol):
    """One turn of a method's loop."""

    @property
    def number(self) -> int:
        """The round's number, from 0."""

    def commit(
        self, state: State, metrics: Mapping[str, float], *, evaluated: bool = False
    ) -> None:
        """End the round: progress and ledger; after an evaluation a line of
        metrics.jsonl and a checkpoint of both sides too.

        state: what the server needs to start with round `number + 1`.
        metrics: summed or averaged numbers for people to read.
        """


class Federation(Protocol):
    """The sites, taken together."""

    def sum(
        self, task: str, tensors: Tensors | None = None, /, **options: Option
    ) -> Total:
        """Send `tensors` to every site, run `task` there, and add what the sites
        return.

        Raises TrainingError if too few sites answer or their replies do not fit
            together.
        """

    def each(
        self, task: str, tensors: Tensors | None = None, /, **options: Option
    ) -> Mapping[str, Update]:
        """As `sum`, but every site's own update by its name, in their fixed order.

        A method that asks for these says so by `needs_each_update`. Raises ConfigError under
        a secure sum, which hides them, and what `sum` raises.
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


class MethodSite(SiteTasks, Protocol):
    """What a job asks of a method's site besides; the last four have defaults.

    num_examples: it trains on. scores: on its own test data, once it has finished.
    rounds_counts: whether it takes the option `count_step`, a whole number of at least
    1, and then sends no weight and no count of its notes but multiples of it
    (`core/counts.py`). A subclass that sends further counts rounds these too, or sets
    it to False.
    """

    rounds_counts: ClassVar[bool] = False
    num_examples: int
    scores: Mapping[str, Any]

    def described(self) -> str:
        """What is shared and what stays, for people."""

    def scores_on(self, site: Any) -> dict[str, Any]:
        """The finished model's scores on another site's test data."""

    def covered(self, task: str) -> dict[str, int]:
        """The steps, tokens, patients and smallest batch behind an update of this task,
        as far as they bound what it tells; a site's policy asks."""
        return {}

    def subject(self, task: str) -> str:
        """Return a digest of the model that the latest update of this task is about.

        A site's policy counts different models in place of different updates, where a
        task asks several things about one model.

        Returns:
            A digest in hexadecimal digits; "" where the update itself is to be counted.
        """
        return ""

    def document_counts(self, site: str) -> NDArray[np.int64] | None:
        """Strict counts of the finished model on the test documents of a site, by
        document.

        Two conditions are compared by them document by document. They never leave the
        site.

        Returns:
            (documents, 4): right predictions, predictions, found gold mentions, gold
            mentions; None where the site was not judged, or not on documents.
        """
        return None

    @property
    def eta(self) -> float | None:
        """The trained and sent parameters' part of the whole model, where a method
        counts it."""
        return None

    @property
    def valid_score(self) -> float | None:
        """Of the model that is kept, on validation data: more is better; None: there is
        none."""
        return None


class MethodConfig(Protocol):
    """What the settings of every method have; a job gives both."""

    @property
    def seed(self) -> int: ...

    @property
    def model(self) -> Any: ...


@dataclass(frozen=True)
class Coverage:
    """How many patients an update will cover, as far as a site's data tell beforehand.

    Attributes:
        what: What messages call the update, such as "the calibration".
        patients: The number of patients that it covers.
        kind: What messages call these patients.
        remedy: What the job or the site can change if there are too few.
    """

    what: str
    patients: int
    kind: str
    remedy: str


# Tasks that methods have in common, for whoever must know them: one that trains, one
# that counts on validation data.
TRAIN, EVALUATE = "train", "evaluate"
