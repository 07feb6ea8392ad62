"""What the server side of a method sees of its sites, a sum; and what a job asks of a
method.

    total = federation.sum("gradients", shared, round=7)      # Σ over sites

A method never learns who added what, how the tensors travelled or whether the sum was
masked: the engine between method and sites (`engines/`) does. It may learn who is in a
sum (`Total.included`), so that a site can take its own part out of it again. Only where
sites permit it and no sum is secure may it ask for each site's update
(`Federation.each`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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

        A method that asks for these says so by `Method.each`. Raises ConfigError under
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
Sizes = Sequence[int]  # training examples of each site
Pooled = tuple[tuple[Any, ...], Any]


@dataclass(frozen=True)
class Method:
    """What a job asks of a method. A module of `fednotes.methods` that has one as
    `METHOD` is a method, by the module's name.

    Config: the class of its settings. Site(data, config, *, directory, device, cache,
    progress): a MethodSite; directory is where it writes its model and scores, cache
    where it keeps what the next run can use again. train(federation, config): the
    server side. model_config(table): the [model] table as Config's `model`. presets:
    settings by name ("best", "paper"), tables as in a job.
    planned(config, sizes): the most rounds of a run, and the examples of each.
    holds: what its sites hold, "documents" (annotated), "notes" or "patients"; the
        job's `data`.
    trains: the tasks whose metrics are a "loss" summed over "examples".

    for_sites(config, sites): the configuration with what only the sites together can
        say.
    alone(config, sites): each site's configuration where it trains by itself.
    pooled(config, sites, complete): the sites and the configuration of one model of all
        data;
    complete: the same texts with every type annotated, if known.
    control(config): the configuration of sites that train as in the federation and
    share nothing, which the federation has to beat; None where the method has no such
    control.
    traffic(config, sizes): bytes that a site sends and is sent at most in a run; None:
        not known.
    judged(metrics): summed counts of "evaluate" as numbers for people, among them
    "held_out", of which more is better (-inf where nothing is held out).
    models(): the classes of [model] by its `kind`, "" where it has no such key; None:
        all taggers.
    warnings(config): what a person should know before training; size_warnings(config,
    sizes): what follows from the number of sites and their sizes. beyond(config): what
    a setting adds to the published method, in a word for tables. one_model(config):
    whether sites end with equal models, of which one copy is kept. save(config, final,
    folder): write the model that all sites end with, made of the last state; False
    where there is none, or not at the server.
    private: how it trains with differential privacy (`methods/private/`), or why it
        cannot.
    promise(config): what is promised then (`privacy/promise.py`); None: nothing is.
    each(config): whether the server looks at each site's update (`Federation.each`).
    covers(config, site): updates that cover few patients where the site's data have few;
    a site's policy checks them before the site joins.
    """

    Config: type[Any]
    Site: type[Any]
    train: Callable[[Federation, Any], State]
    model_config: Callable[[Mapping[str, Any]], Any]
    presets: Mapping[str, Mapping[str, Any]]
    planned: Callable[[Any, Sizes], tuple[int, int]]
    pooled: Callable[[Any, Any, Any], Pooled]
    judged: Callable[[Mapping[str, float]], dict[str, float]]
    holds: str = "documents"
    models: Callable[[], Mapping[str, type[Any]]] | None = None
    trains: tuple[str, ...] = (TRAIN,)
    for_sites: Callable[[Any, Any], Any] = lambda config, sites: config
    alone: Callable[[Any, Any], tuple[Any, ...]] = lambda config, sites: (
        (config,) * len(sites)
    )
    control: Callable[[Any], Any] = lambda config: None
    traffic: Callable[[Any, Sizes], tuple[int, int] | None] = lambda config, sizes: None
    warnings: Callable[[Any], tuple[str, ...]] = lambda config: ()
    size_warnings: Callable[[Any, Sizes], tuple[str, ...]] = lambda config, sizes: ()
    beyond: Callable[[Any], str] = lambda config: ""
    one_model: Callable[[Any], bool] = lambda config: False
    save: Callable[[Any, State, Path], bool] = lambda config, final, folder: False
    private: Any = "nobody has said how"
    promise: Callable[[Any], Any] = lambda config: None
    each: Callable[[Any], bool] = lambda config: False
    covers: Callable[[Any, Any], Sequence[Coverage]] = lambda config, site: ()
