"""The server side's view of the sites: a sum of their updates.

    total = federation.sum("gradients", shared, round=7)      # Σ over sites

A method never sees the update of a single site, how tensors are sent, or whether the
sum was masked; only the engine between method and sites (`engines/`) does. A method may
know which sites are in a sum (`Total.included`), so that a site can subtract its own
update. It may request each site's update (`Federation.each`) only if sites permit it
and no sum is secure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fednotes.core.errors import ModelError
from fednotes.core.update import Tensors, Total, Update

Option = str | int | float | bool
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class State:
    """The state from which one side can continue after a restart.

    Attributes:
        round: Number of the next round.
        tensors: Tensors by name.
        facts: JSON values such as counters, histories and names.

    Raises:
        TypeError: The round is not a number, or the facts are not a table.
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
        """Return one of the facts.

        Raises:
            ModelError: The fact is missing or has another type.
        """
        value = self.facts.get(name)
        if type(value) is not kind:
            raise ModelError(
                f"the newest checkpoint has no usable {name!r}: start a new run"
            )
        return value


class Round(Protocol):
    """One round of a method's loop."""

    @property
    def number(self) -> int:
        """The round's number, from 0."""

    def commit(
        self, state: State, metrics: Mapping[str, float], *, evaluated: bool = False
    ) -> None:
        """End the round: report progress and write the ledger.

        After an evaluation, also write a line of metrics.jsonl and a checkpoint of both
        sides.

        Args:
            state: The server's state for beginning round `number + 1`.
            metrics: Sums or means for reports.
            evaluated: Whether the models were evaluated in this round.
        """


class Federation(Protocol):
    """All sites, as seen by the server side of a method."""

    def sum(
        self, task: str, tensors: Tensors | None = None, /, **options: Option
    ) -> Total:
        """Run a task at the sites and return the sum of the sites' updates.

        If the sites of each round are drawn, the sites of a round's task are those that
        were drawn, unless it is one of `MethodSite.for_all_sites`.

        Args:
            task: The task.
            tensors: Tensors to send to every site.
            options: Options of the task.

        Raises:
            TrainingError: Too few sites answer, or their replies do not match.
        """

    def each(
        self, task: str, tensors: Tensors | None = None, /, **options: Option
    ) -> Mapping[str, Update]:
        """Run a task at every site and return each site's update, in the fixed order.

        A method that uses this must declare it with `needs_each_update`.

        Raises:
            ConfigError: The secure sum hides the sites' updates.
            TrainingError: As in `sum`.
        """

    def rounds(self, start: int, stop: int) -> Iterator[Round]:
        """Yield the rounds from `start` to `stop` - 1."""

    def resume(self) -> State | None:
        """Return the server's state at the checkpoint from which this run resumes."""


class SiteTasks(Protocol):
    """The site side of a method: its tasks and its state.

    A task is a Python method `task(tensors, **options) -> Update` whose name is in
    `tasks`. An engine calls no other method. A task must not change the tensors that it
    receives: in one process, all sites receive the same ones.
    """

    tasks: ClassVar[frozenset[str]]

    @property
    def id(self) -> str:
        """The site's name in the job."""

    def state(self) -> State:
        """Return the site's private state that changes during training."""

    def restore(self, state: State) -> None:
        """Restore an earlier `state`."""


class MethodSite(SiteTasks, Protocol):
    """The site's further interface to jobs. The last members have defaults.

    Attributes:
        num_examples: Number of training examples.
        scores: Scores on the site's test data, after training.
        rounds_counts: Whether it supports the option `count_step`, an integer of at
            least 1: every weight and count that it sends is then a multiple of the step
            (`core/counts.py`). A subclass that sends further counts must also round
            these, or set this to False.
        read_only: The tasks after which all later answers stay the same. A site's
            policy counts different questions, and a question includes all earlier tasks
            of the site except these. A restarted server may repeat them at no cost.
        builds_on: For each task, the earlier ones whose results it uses. Under a secure
            sum, their questions are part of its own (`engines/history.py`). Results
            that a site keeps from earlier rounds, such as private parameters, do not
            count, because a site may have missed one of these rounds.
        counting: The tasks whose updates have only numbers of examples. A server that
            sees a site's numbers refuses others than whole ones from zero.
        for_all_sites: The tasks of a round that all sites run, even if the sites of the
            round are drawn. They judge or keep a model, and do not change what is
            shared.
    """

    rounds_counts: ClassVar[bool] = False
    read_only: ClassVar[frozenset[str]] = frozenset()
    builds_on: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    counting: ClassVar[frozenset[str]] = frozenset()
    for_all_sites: ClassVar[frozenset[str]] = frozenset({"evaluate"})
    num_examples: int
    scores: Mapping[str, Any]

    def describe_parameters(self) -> str:
        """Describe for users what is shared and what stays at the site."""

    def score_on(self, site: Any) -> dict[str, Any]:
        """Return the finished model's scores on another site's test data."""

    def count_covered(self, task: str) -> dict[str, int]:  # noqa: ARG002 - subclasses use it
        """Return an update's coverage: steps, tokens, patients, smallest batch.

        A site's policy checks these numbers, because they limit what an update reveals.
        """
        return {}

    def find_model_digest(self, task: str) -> str:  # noqa: ARG002 - subclasses use it
        """Return a digest of the model to which this task's latest update refers.

        If a task asks several questions about one model, a site's policy counts
        different models instead of different updates.

        Returns:
            A digest in hexadecimal digits; "" if the update itself is to be counted.
        """
        return ""

    def measure_reading(self) -> Mapping[str, int]:
        """Return counts of how the model reads the training data, for a diagnosis.

        Returns:
            "words" and "pieces", the sub-words of an encoder; empty without sub-words.
        """
        return {}

    def find_document_counts(
        self,
        site: str,  # noqa: ARG002 - subclasses use it
    ) -> NDArray[np.int64] | None:
        """Return strict counts of the finished model for each test document of a site.

        They are used to compare two conditions document by document, and never leave
        the site.

        Returns:
            (documents, 4): correct predictions, predictions, gold mentions found, gold
                mentions. None if the site was not scored on documents.
        """
        return None

    @property
    def eta(self) -> float | None:
        """The share of parameters that is trained and sent; None if unknown."""
        return None

    @property
    def valid_score(self) -> float | None:
        """The saved model's score on validation data (higher is better), or None."""
        return None


class MethodConfig(Protocol):
    """Settings that every method has."""

    @property
    def seed(self) -> int:
        """The seed of the job."""

    @property
    def model(self) -> Any:
        """The settings of the model."""


@dataclass(frozen=True)
class Coverage:
    """The number of patients that an update will cover, if known in advance.

    Attributes:
        what: The name of the update in messages, such as "the calibration".
        patients: The number of patients that it covers.
        kind: The name of these patients in messages.
        remedy: Changes to the job or site that help if there are too few.
    """

    what: str
    patients: int
    kind: str
    remedy: str


# Names of tasks that several methods have.
TRAIN = "train"
EVALUATE = "evaluate"  # counts on validation data
