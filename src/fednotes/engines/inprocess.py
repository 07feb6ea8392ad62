"""The embedded engine: every site in this process, for simulation, tests and papers.

A call of a site is a function call; what a deployment would send is counted in bytes.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fednotes.core.errors import ModelError, RefusedError, TrainingError
from fednotes.core.federation import Option, SiteTasks, State
from fednotes.core.store import load_state, restoring, save_state
from fednotes.core.tensors import nbytes
from fednotes.core.update import Tensors, Total, Update
from fednotes.engines.secure_server import SecureCalls

NUMBER_BYTES = 8  # a weight, a metric or an option on the wire
KEPT_CHECKPOINTS = 2


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
    epsilon: float | None = None
    replies: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)


Observer = Callable[[RoundResult], None]


@dataclass(frozen=True, slots=True)
class CommittedRound:
    """A round of either engine (`federation.Round`), which knows how its engine ends it."""

    number: int
    _commit: Callable[[State, Mapping[str, float], bool], None]

    def commit(
        self, state: State, metrics: Mapping[str, float], *, evaluated: bool = False
    ) -> None:
        """See `federation.Round`."""
        self._commit(state, metrics, evaluated)


class InProcess:
    """A federation of sites that live in this process.

    sites: in a fixed order; sums add in that order.
    directory: where checkpoints go; None keeps none.
    resume: go on from the newest whole checkpoint in `directory`.
    observer: told of each committed round.
    secure: add under the secure sum, as a deployment would.

    Raises ModelError if `resume` finds only damaged checkpoints; ConfigError for a secure sum
    of fewer than 3 sites.
    """

    def __init__(
        self,
        sites: Sequence[SiteTasks],
        *,
        directory: Path | None = None,
        resume: bool = False,
        observer: Observer | None = None,
        secure: bool = False,
    ) -> None:
        if not sites:
            raise TrainingError("a federation needs at least one site")
        self._sites = tuple(sites)
        self._directory = directory
        self._observer = observer
        self._secure = SecureCalls([site.id for site in sites]) if secure else None
        self._replies: dict[str, dict[str, Mapping[str, float]]] = {}
        self._before = 0.0  # seconds spent before a restart
        self._started = time.monotonic()
        self.bytes_up = 0
        self.bytes_down = 0
        self._resumed = self._restore() if resume else None

    @property
    def seconds(self) -> float:
        """Time spent so far, over all restarts."""
        return self._before + time.monotonic() - self._started

    def sum(self, task: str, tensors: Tensors | None = None, /, **options: Option) -> Total:
        """Run `task` at every site in turn and add the replies as they come."""
        if self._secure is not None:
            return self._secure_sum(self._secure, task, tensors, options)
        total = Total.of(self._call(site, task, tensors, options) for site in self._sites)
        return replace(total, included=tuple(site.id for site in self._sites))

    def each(
        self, task: str, tensors: Tensors | None = None, /, **options: Option
    ) -> Mapping[str, Update]:
        """Every site's reply. Raises RefusedError under the secure sum."""
        if self._secure is not None:
            raise RefusedError(f"{task!r} asks for each site's own reply; the sum is secure")
        return {site.id: self._call(site, task, tensors, options) for site in self._sites}

    def rounds(self, start: int, stop: int) -> Iterator[CommittedRound]:
        """Rounds by number; each is committed by the method."""
        for number in range(start, stop):
            yield CommittedRound(number, self._commit)

    def resume(self) -> State | None:
        """The server's state from the checkpoint this run goes on from."""
        return self._resumed

    def _call(
        self, site: SiteTasks, task: str, tensors: Tensors | None, options: Mapping[str, Option]
    ) -> Update:
        update = self._run(site, task, tensors or {}, options)
        self.bytes_up += nbytes(update.tensors) + NUMBER_BYTES * (1 + len(update.metrics))
        return update

    def _run(
        self, site: SiteTasks, task: str, sent: Tensors, options: Mapping[str, Option]
    ) -> Update:
        if task not in site.tasks:
            raise TrainingError(f"site {site.id!r} has no task {task!r}")
        update: Update = getattr(site, task)(sent, **options)
        self.bytes_down += nbytes(sent) + NUMBER_BYTES * len(options)
        self._replies.setdefault(task, {})[site.id] = update.metrics
        return update

    def _secure_sum(
        self,
        secure: SecureCalls,
        task: str,
        tensors: Tensors | None,
        options: Mapping[str, Option],
    ) -> Total:
        by_name = {site.id: site for site in self._sites}
        up, down = secure.bytes_up, secure.bytes_down
        sent = tensors or {}
        total = secure.total(
            task, sent, options, lambda name: self._run(by_name[name], task, sent, options)
        )
        self.bytes_up += secure.bytes_up - up
        self.bytes_down += secure.bytes_down - down
        return total

    def _commit(self, state: State, metrics: Mapping[str, float], evaluated: bool) -> None:
        if self._observer is not None:  # before saving: what a restart repeats is told again
            self._observer(
                RoundResult(
                    round=state.round - 1,
                    metrics=metrics,
                    sites=len(self._sites),
                    bytes_up=self.bytes_up,
                    bytes_down=self.bytes_down,
                    seconds=self.seconds,
                    evaluated=evaluated,
                    replies=self._replies,
                )
            )
        if evaluated and self._directory is not None:
            self._save(state)

    def _save(self, state: State) -> None:
        """Both sides in one folder, so that they never come from different rounds."""
        assert self._directory is not None
        tensors = {f"server/{name}": value for name, value in state.tensors.items()}
        facts: dict[str, Any] = {
            "round": state.round,
            "server": state.facts,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "seconds": self.seconds,
            "sites": {},
        }
        if self._secure is not None:
            facts["summing"] = self._secure.summing.state()
        for index, site in enumerate(self._sites):
            kept = site.state()
            tensors |= {f"site{index}/{name}": value for name, value in kept.tensors.items()}
            facts["sites"][site.id] = {"round": kept.round, "facts": kept.facts}
        save_state(self._directory / f"round-{state.round:08d}", tensors, facts)
        for old in sorted(self._directory.glob("round-*"))[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(old)

    def _restore(self) -> State | None:
        """Read the newest whole checkpoint and put the sites back to it."""
        if self._directory is None:
            return None
        for cut in self._directory.glob(".round-*"):  # a killed run's, half-written
            shutil.rmtree(cut, ignore_errors=True)
        folders = sorted(self._directory.glob("round-*"), reverse=True)
        why = ""
        for folder in folders:
            try:
                tensors, facts = load_state(folder)
                with restoring(folder):
                    names = list(dict(facts["sites"]))
                    if names == [site.id for site in self._sites]:
                        return self._take(tensors, facts)
            except ModelError as error:
                why = why or str(error)
                continue
            raise ModelError(
                f"{self._directory}: the checkpoint is of sites {', '.join(names)}, "
                f"the job has {', '.join(site.id for site in self._sites)}: start again without "
                "--resume, or name those sites"
            )
        if folders:
            raise ModelError(
                f"{self._directory}: every checkpoint is damaged: start again without --resume "
                f"(the newest: {why})"
            )
        return None

    def _take(self, tensors: Tensors, facts: Mapping[str, Any]) -> State:
        parts = parted(tensors)
        state = State(facts["round"], parts.get("server", {}), facts["server"])
        sizes = int(facts["bytes_up"]), int(facts["bytes_down"])
        for index, site in enumerate(self._sites):
            own = facts["sites"][site.id]
            site.restore(State(own["round"], parts.get(f"site{index}", {}), own["facts"]))
        if self._secure is not None:
            self._secure.summing.restore(facts.get("summing", {}))
        (self.bytes_up, self.bytes_down), self._before = sizes, float(facts["seconds"])
        return state


def parted(tensors: Tensors) -> dict[str, dict[str, Tensor]]:
    """A checkpoint's tensors by whose they are: `server/w` → server → w."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        owner, _, rest = name.partition("/")
        parts.setdefault(owner, {})[rest] = value
    return parts
