"""The embedded engine: every site in this process, for simulation, tests and papers.

A call of a site is a function call; what a deployment would send is counted in bytes.
Under the secure sum sites exchange the very messages that a deployment sends, without a
transport: nothing is hidden from whoever runs the process, but it shows what a job does
(its rounding, bytes, time).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fednotes.core.errors import TrainingError
from fednotes.core.federation import Option, SiteTasks, State
from fednotes.core.messages import Attached, Reply, Request
from fednotes.core.tensors import nbytes, tensor_fingerprint
from fednotes.core.update import Tensors, Total, Update
from fednotes.engines.rounds import Checkpoints, Observer, Parts, Rounds
from fednotes.engines.secure import SecureSeal, SecureSum
from fednotes.engines.summing import (
    Replies,
    Sites,
    check_received,
    check_update,
    hidden,
)
from fednotes.privacy.secure_sum.crypto import digest

NUMBER_BYTES = 8  # a weight, a metric or an option on the wire
JOB = "in this process"


class InProcess(Rounds):
    """A federation of sites that live in this process.

    sites: in a fixed order; sums add in that order.
    directory: where checkpoints go; None keeps none.
    resume: go on from the newest whole checkpoint in `directory`.
    observer: told of each committed round.
    secure: add under the secure sum, as a deployment would.

    Raises ModelError if `resume` finds only damaged checkpoints; ConfigError for a
    secure sum of fewer than 3 sites.
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
        super().__init__(observer, lambda: time.monotonic())
        self._sites, self.names = tuple(sites), tuple(site.id for site in sites)
        remedy = "start again without `resume`"
        self._files = Checkpoints(directory, self.names, remedy) if directory else None
        self.summing: SecureSum | None = None
        if secure:  # nothing is lost on the way; so it is in a job that needs all
            terms: dict[str, Any] = {"job": JOB, "threshold": len(self.names)}
            self.summing = SecureSum(self.names, **terms)
            self.seals = {
                name: SecureSeal(name, self.names, **terms) for name in self.names
            }
        self._replies: dict[str, dict[str, Mapping[str, float]]] = {}
        self._number = 0  # of messages under the secure sum
        if resume and self._files:
            kept = self._files.newest(
                lambda facts: list(dict(facts["sites"])), self._take
            )
            self._resumed = kept[0] if kept else None

    def sum(
        self, task: str, tensors: Tensors | None = None, /, **options: Option
    ) -> Total:
        """Run `task` at every site in turn and add the replies as they come."""
        sent = tensors or {}
        if self.summing is not None:
            return self.summing.total(_Exchange(self, task, sent, options))
        total = Total.of(
            self._counted(self.run(s, task, sent, options)) for s in self._sites
        )
        return replace(total, included=self.names)

    def each(
        self, task: str, tensors: Tensors | None = None, /, **options: Option
    ) -> dict[str, Update]:
        """Run `task` at every site in turn; what each returns."""
        if self.summing is not None:
            raise hidden(task)
        sent = tensors or {}
        return {
            s.id: self._counted(self.run(s, task, sent, options)) for s in self._sites
        }

    def next_number(self) -> int:
        """Each message has its own."""
        self._number += 1
        return self._number

    def _counted(self, update: Update) -> Update:
        self.bytes_up += nbytes(update.tensors) + NUMBER_BYTES * (
            1 + len(update.metrics)
        )
        return update

    def run(
        self, site: SiteTasks, task: str, sent: Tensors, options: Mapping[str, Option]
    ) -> Update:
        """One site's own part."""
        if task not in site.tasks:
            raise TrainingError(f"site {site.id!r} has no task {task!r}")
        check_received(sent, site.id, task)
        update: Update = getattr(site, task)(sent, **options)
        self.bytes_down += nbytes(sent) + NUMBER_BYTES * len(options)
        self._replies.setdefault(task, {})[site.id] = update.metrics
        return update

    def _commit(
        self, state: State, metrics: Mapping[str, float], evaluated: bool
    ) -> None:
        self._tell(state, metrics, evaluated, len(self._sites), self._replies)
        if not evaluated or self._files is None:
            return
        # so both sides are of one round
        kept = {site.id: site.state() for site in self._sites}
        parts = {
            f"site{index}": each.tensors for index, each in enumerate(kept.values())
        }
        facts: dict[str, Any] = {
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "seconds": self.seconds,
            "sites": {
                name: {"round": s.round, "facts": s.facts} for name, s in kept.items()
            },
        }
        if self.summing is not None:
            facts["summing"] = self.summing.state()
        self._files.save(state, parts, facts)

    def _take(self, parts: Parts, facts: Mapping[str, Any]) -> bool:
        sizes = int(facts["bytes_up"]), int(facts["bytes_down"])
        for index, site in enumerate(self._sites):
            own = facts["sites"][site.id]
            site.restore(
                State(own["round"], parts.get(f"site{index}", {}), own["facts"])
            )
        if self.summing is not None:
            self.summing.restore(facts.get("summing", {}))
        (self.bytes_up, self.bytes_down), self._before = sizes, float(facts["seconds"])
        return True


class _Exchange:
    """One sum under the secure sum (`summing.Exchange`); all sites are told the same."""

    reasons = ""

    def __init__(
        self, engine: InProcess, task: str, sent: Tensors, options: Mapping[str, Option]
    ) -> None:
        self._engine, self._sent, self._options = engine, sent, options
        self.sites, self.least = engine.names, len(engine.names)
        # each has its own
        self.request = Request(JOB, 1, 0, task, round=engine.next_number())
        asked = repr(sorted(options.items()))
        self._question = digest("question", task, asked, tensor_fingerprint(sent))
        self._counted: dict[str, int] = {}

    def task(self, attached: Attached | None = None, *, sites: Sites = None) -> Replies:
        """Call the sites in turn; an error of theirs passes."""
        request = self._next(self.request.task, attached or Attached())
        replies = {}
        for site in self._engine._sites:
            update = self._engine.run(site, request.task, self._sent, self._options)
            check_update(update, site.id)
            sealed = self._engine.seals[site.id].seal(request, update, self._question)
            replies[site.id] = self._reply(request, site.id, sealed)
        self._counted = dict.fromkeys(self.sites, request.number)
        return replies

    def stage(
        self, name: str, attached: Mapping[str, Attached], *, least: int | None = None
    ) -> Replies:
        """One of the protocol's messages."""
        blank, replies = self._next(name, Attached()), {}
        for site, own in attached.items():
            request = replace(blank, attached=own)
            answer = self._engine.seals[site].stage(request)
            replies[site] = self._reply(request, site, answer)
        return replies

    def refuse(self, site: str, reason: str) -> None:
        """Nobody is left out here."""
        raise TrainingError(reason)

    def again(self) -> None:
        """Nothing to forget."""

    def _next(self, task: str, attached: Attached) -> Request:
        number, counted = self._engine.next_number(), self._counted
        return replace(
            self.request, number=number, task=task, counted=counted, attached=attached
        )

    def _reply(self, request: Request, site: str, attached: Attached) -> Reply:
        self._engine.bytes_down += request.attached.nbytes()
        self._engine.bytes_up += attached.nbytes()
        return Reply(JOB, 1, request.number, site, Update(), attached=attached)
