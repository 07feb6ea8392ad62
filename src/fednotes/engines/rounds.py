"""The rounds of both engines: they are reported, and checkpoints are saved."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fednotes.core.errors import DivergedError, ModelError
from fednotes.core.federation import State
from fednotes.core.parsing import read_json
from fednotes.core.tensors import is_finite, load_state, restoring, save_state
from fednotes.core.update import Tensors
from fednotes.engines.sampling import RoundSampling

KEPT_CHECKPOINTS = 2
Parts = Mapping[str, Tensors]  # the tensors of a checkpoint, by their owner
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RoundResult:
    """One committed round as the server sees it.

    Attributes:
        round: The round's number, from 0.
        metrics: The metrics that the method reports.
        sites: Number of sites that answered.
        bytes_up: Bytes from all sites since the run began.
        bytes_down: Bytes to all sites since the run began.
        seconds: Seconds since the run began, without the time between restarts.
        evaluated: Whether the models were evaluated in this round.
        absent: The sites that should have taken part and did not.
        replies: The counts of each site, by task and site. Only simulations have them.
        drawn: The sites that were drawn for the round; empty if all should take part.
    """

    round: int
    metrics: Mapping[str, float]
    sites: int
    bytes_up: int
    bytes_down: int
    seconds: float
    evaluated: bool
    absent: tuple[str, ...] = ()
    replies: Mapping[str, Mapping[str, Mapping[str, float]]] = field(
        default_factory=dict
    )
    drawn: tuple[str, ...] = ()


Observer = Callable[[RoundResult], None]


@dataclass(frozen=True, slots=True)
class CommittedRound:
    """A round of either engine; see `federation.Round`."""

    number: int
    _commit: Callable[[State, Mapping[str, float], bool], None]

    def commit(
        self, state: State, metrics: Mapping[str, float], *, evaluated: bool = False
    ) -> None:
        """End the round; see `federation.Round`.

        Raises:
            DivergedError: The state contains a number that is not finite. The round is
                then neither reported nor saved.
        """
        _require_finite(state)
        self._commit(state, metrics, evaluated)


def _require_finite(state: State) -> None:
    """Raise DivergedError for a state from which no round can continue."""
    for name, value in state.tensors.items():
        if not is_finite(value):
            raise DivergedError(
                f"round {state.round}: {name!r} of the server's state is not finite "
                "(NaN or infinity), so it was not saved: resume from the last "
                "checkpoint with a lower learning_rate; max_norm in [federation] "
                "bounds what a site may send"
            )


class Checkpoints:
    """The newest checkpoints of a run, each a state folder `round-00000012/`.

    Args:
        directory: The folder that holds them.
        sites: The sites of the job.
        remedy: What a person can do if no checkpoint is usable, for messages.
    """

    def __init__(self, directory: Path, sites: Sequence[str], remedy: str) -> None:
        self.directory = directory
        self._sites = tuple(sites)
        self._remedy = remedy

    def save(self, state: State, parts: Parts, facts: Mapping[str, Any]) -> None:
        """Save a checkpoint, then delete all but the newest two.

        Args:
            state: The server's state.
            parts: Further tensors, by their owner.
            facts: Further facts, as JSON values.
        """
        tensors = {}
        for owner, owned in {"server": state.tensors, **parts}.items():
            for name, value in owned.items():
                tensors[f"{owner}/{name}"] = value
        facts = {"round": state.round, "server": dict(state.facts), **facts}
        save_state(self.directory / f"round-{state.round:08d}", tensors, facts)
        for old in self._list_folders()[KEPT_CHECKPOINTS:]:
            shutil.rmtree(old)

    def read_newest(
        self,
        sites_of: Callable[[Mapping[str, Any]], Sequence[str]],
        restore: Callable[[Parts, Mapping[str, Any]], T],
    ) -> tuple[State, T] | None:
        """Read the newest undamaged checkpoint, and delete the damaged ones after it.

        Args:
            sites_of: Returns the sites in the facts of a checkpoint.
            restore: Restores the rest of a checkpoint from its parts and facts.

        Returns:
            The server's state and what `restore` returned; None if there is no
            checkpoint.

        Raises:
            ModelError: All checkpoints are damaged, or the newest undamaged one has
                other sites.
        """
        for partial in self.directory.glob(".round-*"):  # written by a killed run
            shutil.rmtree(partial, ignore_errors=True)

        damaged_folders: list[Path] = []
        newest_problem = ""
        for folder in self._list_folders():
            try:
                tensors, facts = load_state(folder)
                parts = _group_by_owner(tensors)
                with restoring(folder):
                    state = State(facts["round"], parts["server"], facts["server"])
                    sites = tuple(sites_of(facts))
                    if not all(isinstance(name, str) for name in sites):
                        raise TypeError("its sites have no names")
                    restored = restore(parts, facts) if sites == self._sites else None
            except ModelError as error:
                newest_problem = newest_problem or str(error)
                damaged_folders.append(folder)
                continue
            if restored is None:
                raise ModelError(
                    f"{self.directory}: the checkpoint has the sites "
                    f"{', '.join(sites)}, but the job has {', '.join(self._sites)}: "
                    f"{self._remedy}, or name those sites"
                )
            for damaged_folder in damaged_folders:
                shutil.rmtree(damaged_folder)
            return state, restored

        if damaged_folders:
            raise ModelError(
                f"{self.directory}: every checkpoint is damaged: {self._remedy} "
                f"(the newest: {newest_problem})"
            )
        return None

    def read_facts(self, fact: Callable[[Any], T]) -> Iterator[T]:
        """Yield a fact of each readable checkpoint, from the oldest to the newest."""
        for folder in reversed(self._list_folders()):
            with suppress(ModelError), restoring(folder):
                yield fact(read_json(folder / "facts.json", strict=False))

    def _list_folders(self) -> list[Path]:
        """Return the folders of all checkpoints, from the newest to the oldest."""
        return sorted(self.directory.glob("round-*"), reverse=True)


def _group_by_owner(tensors: Tensors) -> dict[str, dict[str, Any]]:
    """Group the tensors of a checkpoint by their owner."""
    parts: dict[str, dict[str, Any]] = {"server": {}}
    for name, value in tensors.items():
        owner, _, own_name = name.partition("/")
        parts.setdefault(owner, {})[own_name] = value
    return parts


class Rounds(ABC):
    """The base of both engines.

    Args:
        sites: The names of all sites, in the fixed order.
        observer: Called with each committed round.
        clock: Returns the time in seconds.
        sampling: How the sites of a round are drawn; None if all take part.
    """

    bytes_up = bytes_down = 0

    def __init__(
        self,
        sites: Sequence[str],
        observer: Observer | None,
        clock: Callable[[], float],
        sampling: RoundSampling | None,
    ) -> None:
        self._all_sites = tuple(sites)
        self._observer = observer
        self._clock = clock
        self._sampling = sampling
        self._drawn: tuple[str, ...] = ()  # for the current round, if sites are drawn
        self._before = 0.0  # seconds of the run before the last restart
        self._started = clock()
        self._resumed: State | None = None

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken so far, over all restarts."""
        return self._before + self._clock() - self._started

    def rounds(self, start: int, stop: int) -> Iterator[CommittedRound]:
        """Yield the rounds from `start` to `stop` - 1; the method commits each."""
        try:
            for number in range(start, stop):
                if self._sampling is not None:
                    self._drawn = self._sampling.draw_sites(number, self._all_sites)
                yield CommittedRound(number, self._commit)
        finally:
            self._drawn = ()

    def list_sites_of(self, task: str) -> tuple[str, ...]:
        """Return the sites that a task is meant for now, in the fixed order.

        These are the sites that were drawn for the round, or all sites: if none are
        drawn, outside rounds, and for the tasks that all sites run.
        """
        if self._sampling is None or task in self._sampling.for_all_sites:
            return self._all_sites
        return self._drawn or self._all_sites

    def resume(self) -> State | None:
        """Return the server's state at the checkpoint from which this run resumes."""
        return self._resumed

    @abstractmethod
    def _commit(
        self,
        state: State,
        metrics: Mapping[str, float],
        evaluated: bool,  # noqa: FBT001 - as `CommittedRound` calls it
    ) -> None:
        """End a round: report it and, after an evaluation, save a checkpoint."""

    def _report(
        self,
        state: State,
        metrics: Mapping[str, float],
        *,
        evaluated: bool,
        sites: int,
        absent: tuple[str, ...] = (),
        replies: Mapping[str, Mapping[str, Mapping[str, float]]] | None = None,
    ) -> None:
        """Report a round before it is saved; a restart reports it again."""
        if self._observer is None:
            return
        result = RoundResult(
            round=state.round - 1,
            metrics=metrics,
            sites=sites,
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            seconds=self.seconds,
            evaluated=evaluated,
            absent=absent,
            replies=replies or {},
            drawn=self._drawn,
        )
        self._observer(result)
