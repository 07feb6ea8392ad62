"""What both engines do around a method's rounds: they tell of each, and keep
checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fednotes.core.errors import ModelError, TrainingError
from fednotes.core.federation import State
from fednotes.core.parsing import read_json
from fednotes.core.tensors import is_finite, load_state, restoring, save_state
from fednotes.core.update import Tensors

KEPT_CHECKPOINTS = 2
Parts = Mapping[str, Tensors]  # a checkpoint's tensors, by whose they are
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What one committed round looked like from the server.

    metrics: what the method reported. sites: how many answered. bytes_up, bytes_down: since
    the run began, all sites together. seconds: since the run began, restarts left out.
    replies: task → site → that site's own counts; simulation only, never in a deployment.
    """

    round: int
    metrics: Mapping[str, float]
    sites: int
    bytes_up: int
    bytes_down: int
    seconds: float
    evaluated: bool
    replies: Mapping[str, Mapping[str, Mapping[str, float]]] = field(
        default_factory=dict
    )


Observer = Callable[[RoundResult], None]


@dataclass(frozen=True, slots=True)
class CommittedRound:
    """A round of either engine (`federation.Round`), which knows how its engine ends
    it."""

    number: int
    _commit: Callable[[State, Mapping[str, float], bool], None]

    def commit(
        self, state: State, metrics: Mapping[str, float], *, evaluated: bool = False
    ) -> None:
        """See `federation.Round`.

        Raises:
            TrainingError: The state has a number that is not finite. It is neither told
                nor kept.
        """
        _require_finite(state)
        self._commit(state, metrics, evaluated)


def _require_finite(state: State) -> None:
    """Raise TrainingError for a state of the server that no round can go on from."""
    for name, value in state.tensors.items():
        if not is_finite(value):
            raise TrainingError(
                f"round {state.round}: {name!r} of the server's state is not finite (NaN or "
                "infinity), so it was not kept: resume from the last checkpoint with a lower "
                "learning_rate; max_norm in [federation] bounds what a site may send"
            )


class Checkpoints:
    """The newest states of a run, `round-00000012/` each (core/store.py), in a folder.

    sites: of the job. remedy: what a person can do where none can be used.
    """

    def __init__(self, directory: Path, sites: Sequence[str], remedy: str) -> None:
        self.directory, self._sites, self._remedy = directory, tuple(sites), remedy

    def save(self, state: State, parts: Parts, facts: Mapping[str, Any]) -> None:
        """Keep the server's state and more, then delete all but the newest two."""
        whole = {"server": state.tensors, **parts}
        tensors = {
            f"{of}/{name}": v for of, own in whole.items() for name, v in own.items()
        }
        facts = {"round": state.round, "server": dict(state.facts), **facts}
        save_state(self.directory / f"round-{state.round:08d}", tensors, facts)
        for old in self._folders()[KEPT_CHECKPOINTS:]:
            shutil.rmtree(old)

    def newest(
        self,
        names: Callable[[Mapping[str, Any]], Sequence[str]],
        take: Callable[[Parts, Mapping[str, Any]], T],
    ) -> tuple[State, T] | None:
        """The newest whole checkpoint, of which `take` makes the rest; those after it
        are deleted.

        names: the sites that a checkpoint is of.
        Raises ModelError if all are damaged, or it is of other sites.
        """
        for cut in self.directory.glob(".round-*"):  # a killed run's, half-written
            shutil.rmtree(cut, ignore_errors=True)
        folders, why = self._folders(), ""
        for folder in folders:
            try:
                tensors, facts = load_state(folder)
                parts: dict[str, dict[str, Any]] = {"server": {}}
                for name, value in tensors.items():
                    of, _, rest = name.partition("/")
                    parts.setdefault(of, {})[rest] = value
                with restoring(folder):
                    state = State(facts["round"], parts["server"], facts["server"])
                    found = tuple(names(facts))
                    if not all(isinstance(name, str) for name in found):
                        raise TypeError("its sites have no names")
                    taken = take(parts, facts) if found == self._sites else None
            except ModelError as error:
                why = why or str(error)
                continue
            if taken is None:
                raise ModelError(
                    f"{self.directory}: the checkpoint is of sites {', '.join(found)}, the job has "
                    f"{', '.join(self._sites)}: {self._remedy}, or name those sites"
                )
            for damaged in folders[: folders.index(folder)]:
                shutil.rmtree(damaged)
            return state, taken
        if folders:
            raise ModelError(
                f"{self.directory}: every checkpoint is damaged: {self._remedy} (the newest: {why})"
            )
        return None

    def facts(self, fact: Callable[[Any], T]) -> Iterator[T]:
        """One of each, from the oldest, where it can be read."""
        for folder in reversed(self._folders()):
            with suppress(ModelError), restoring(folder):
                yield fact(read_json(folder / "facts.json", strict=False))

    def _folders(self) -> list[Path]:
        """From the newest."""
        return sorted(self.directory.glob("round-*"), reverse=True)


class Rounds:
    """What both engines have in common. clock: in seconds. before: those before a
    restart."""

    bytes_up = bytes_down = 0

    def __init__(self, observer: Observer | None, clock: Callable[[], float]) -> None:
        self._observer, self._clock = observer, clock
        self._before, self._started = 0.0, clock()
        self._resumed: State | None = None

    @property
    def seconds(self) -> float:
        """Time spent so far, over all restarts."""
        return self._before + self._clock() - self._started

    def rounds(self, start: int, stop: int) -> Iterator[CommittedRound]:
        """Rounds by number; each is committed by the method."""
        for number in range(start, stop):
            yield CommittedRound(number, self._commit)

    def resume(self) -> State | None:
        """The server's state from the checkpoint this run goes on from."""
        return self._resumed

    def _commit(
        self, state: State, metrics: Mapping[str, float], evaluated: bool
    ) -> None:
        raise NotImplementedError

    def _tell(
        self,
        state: State,
        metrics: Mapping[str, float],
        evaluated: bool,
        sites: int,
        replies: Mapping[str, Mapping[str, Mapping[str, float]]] | None = None,
    ) -> None:
        """Tell of a round, before it is saved: what a restart repeats is told again."""
        if self._observer is not None:
            so_far = self.bytes_up, self.bytes_down, self.seconds
            done = RoundResult(
                state.round - 1, metrics, sites, *so_far, evaluated, replies or {}
            )
            self._observer(done)
