"""The engine of simulations: all sites live on this machine, and none is lost.

The sites run in this process or in others (`engines/site_programs.py`). The engine
counts the bytes that a deployment would send. Under the secure sum, the parts of all
sites in it are played here: they exchange the messages that a deployment sends, but
without a transport. Nothing is hidden from the person who runs the process, but the run
shows how the secure sum affects a job (its rounding, bytes and time).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fednotes.core.errors import TrainingError
from fednotes.core.federation import Option, State
from fednotes.core.messages import Attached, Reply, Request
from fednotes.core.tensors import fingerprint_tensors, nbytes
from fednotes.core.update import Tensors, Total, Update
from fednotes.engines.rounds import Checkpoints, Observer, Parts, Rounds
from fednotes.engines.sampling import RoundSampling
from fednotes.engines.secure import SecureSeal, SecureSum
from fednotes.engines.site_programs import SitePrograms, SiteUpdate
from fednotes.engines.summing import Replies, Sites, check_addable, make_hidden_error
from fednotes.privacy.secure_sum.crypto import hash_parts

NUMBER_BYTES = 8  # bytes of a weight, a metric or an option on the wire
JOB = "in this process"  # stands for the fingerprint of a job


class Simulation(Rounds):
    """A federation of sites on this machine.

    Args:
        programs: The sites. Sums add updates in their order.
        directory: Folder for checkpoints; None saves none.
        resume: Whether to resume from the newest undamaged checkpoint in `directory`.
        observer: Called with each committed round.
        secure: Whether to add updates under the secure sum, as a deployment would.
        sampling: How the sites of a round are drawn; None if all take part.

    Raises:
        TrainingError: There are no sites.
        ModelError: `resume` finds only damaged checkpoints.
        ConfigError: `secure` is set with fewer than 3 sites.
    """

    def __init__(
        self,
        programs: SitePrograms,
        *,
        directory: Path | None = None,
        resume: bool = False,
        observer: Observer | None = None,
        secure: bool = False,
        sampling: RoundSampling | None = None,
    ) -> None:
        if not programs.names:
            raise TrainingError("a federation needs at least one site")
        super().__init__(programs.names, observer, lambda: time.monotonic(), sampling)
        self._programs = programs
        self.names = programs.names
        remedy = "start again without `resume`"
        self._files = Checkpoints(directory, self.names, remedy) if directory else None
        self.summing: SecureSum | None = None
        if secure:
            # No message is lost, so all sites of a sum take part.
            threshold = len(self.names)
            threshold_of_drawn = None if sampling is None else _find_threshold_of_drawn
            self.summing = SecureSum(
                self.names,
                job=JOB,
                threshold=threshold,
                threshold_of_drawn=threshold_of_drawn,
            )
            # The sites' parts in the secure sum, which are played here.
            self.seals = {
                name: SecureSeal(
                    name,
                    self.names,
                    job=JOB,
                    threshold=threshold,
                    threshold_of_drawn=threshold_of_drawn,
                )
                for name in self.names
            }
        self._replies: dict[str, dict[str, Mapping[str, float]]] = {}
        self._number = 0  # number of the last message under the secure sum
        if resume and self._files:
            checkpoint = self._files.read_newest(
                lambda facts: list(dict(facts["sites"])), self._restore
            )
            if checkpoint is not None:
                self._resumed, _ = checkpoint

    def sum(
        self, task: str, tensors: Tensors | None = None, /, **options: Option
    ) -> Total:
        """Run `task` at its sites, adding each reply in the order of the sites."""
        sent_tensors = tensors or {}
        if self.summing is not None:
            return self.summing.sum_updates(
                _SimulatedExchange(self, task, sent_tensors, options)
            )
        # A generator, so that few updates are in memory at a time.
        updates = (
            self._count_bytes(update)
            for _, update in self.run_at_sites(task, sent_tensors, options)
        )
        return replace(Total.of(updates), included=self.list_sites_of(task))

    def each(
        self, task: str, tensors: Tensors | None = None, /, **options: Option
    ) -> dict[str, Update]:
        """Run `task` at its sites; return the updates by site."""
        if self.summing is not None:
            raise make_hidden_error(task)
        return {
            site: self._count_bytes(update)
            for site, update in self.run_at_sites(task, tensors or {}, options)
        }

    def take_next_number(self) -> int:
        """Return the number of the next message; count it as used."""
        self._number += 1
        return self._number

    def run_at_sites(
        self, task: str, tensors: Tensors, options: Mapping[str, Option]
    ) -> Iterator[SiteUpdate]:
        """Run a task at its sites, and count what was sent to each and its metrics.

        Args:
            task: The task.
            tensors: The tensors that the server sends.
            options: The task's options.

        Raises:
            TrainingError: A site has no such task.
        """
        sites = None if self._sampling is None else frozenset(self.list_sites_of(task))
        # Not with the replies of sites that were drawn for an earlier round.
        replies: dict[str, Mapping[str, float]] = {}
        self._replies[task] = replies
        for site, update in self._programs.run(task, tensors, options, sites):
            self.bytes_down += nbytes(tensors) + NUMBER_BYTES * len(options)
            replies[site] = update.metrics
            yield SiteUpdate(site, update)

    def _count_bytes(self, update: Update) -> Update:
        """Add the size of an update to `bytes_up`, and return the update."""
        num_numbers = 1 + len(update.metrics)  # with the weight
        self.bytes_up += nbytes(update.tensors) + NUMBER_BYTES * num_numbers
        return update

    def _commit(
        self,
        state: State,
        metrics: Mapping[str, float],
        evaluated: bool,  # noqa: FBT001 - as `CommittedRound` calls it
    ) -> None:
        """End a round; see `Rounds`. The checkpoint includes the sites' states."""
        self._report(
            state,
            metrics,
            evaluated=evaluated,
            sites=len(self._drawn or self.names),
            replies=dict(self._replies),
        )
        if not evaluated or self._files is None:
            return

        # The states of the server and the sites belong to the same round.
        states = self._programs.states()
        parts = {
            f"site{index}": site_state.tensors
            for index, site_state in enumerate(states.values())
        }
        facts: dict[str, Any] = {
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "seconds": self.seconds,
            "sites": {
                name: {"round": site_state.round, "facts": site_state.facts}
                for name, site_state in states.items()
            },
        }
        if self.summing is not None:
            facts["summing"] = self.summing.state()
        self._files.save(state, parts, facts)

    def _restore(self, parts: Parts, facts: Mapping[str, Any]) -> bool:
        """Restore the sites and the counters from a checkpoint."""
        bytes_up = int(facts["bytes_up"])
        bytes_down = int(facts["bytes_down"])
        states = {}
        for index, site in enumerate(self.names):
            site_facts = facts["sites"][site]
            tensors = parts.get(f"site{index}", {})
            states[site] = State(site_facts["round"], tensors, site_facts["facts"])
        self._programs.restore(states)
        if self.summing is not None:
            self.summing.restore(facts.get("summing", {}))
        self.bytes_up = bytes_up
        self.bytes_down = bytes_down
        self._before = float(facts["seconds"])
        return True


def _find_threshold_of_drawn(num_sites: int) -> int:
    """Return the threshold of a sum over this number of drawn sites."""
    return num_sites


class _SimulatedExchange:
    """One exchange of the secure sum (`summing.Exchange`).

    All sites of the task receive the same request.
    """

    reasons = ""

    def __init__(
        self,
        engine: Simulation,
        task: str,
        sent: Tensors,
        options: Mapping[str, Option],
    ) -> None:
        self._engine = engine
        self._sent = sent
        self._options = options
        self.sites = engine.list_sites_of(task)
        self.least = len(self.sites)
        # For each site, the number of its last request that counts.
        self._counted = dict.fromkeys(self.sites, 0)
        # Each exchange has a round of its own.
        self.request = Request(
            JOB, 1, 0, task, round=engine.take_next_number(), counted=self._counted
        )
        listed = repr(sorted(options.items()))
        self._question = hash_parts(
            "question", self.request.round, task, listed, fingerprint_tensors(sent)
        )

    def run_task(
        self,
        attached: Attached | None = None,
        *,
        sites: Sites = None,  # noqa: ARG002 - part of `Exchange`
    ) -> Replies:
        """Run the task at its sites, and return their masked updates.

        An error of a site is raised, because a simulation leaves no site out.
        """
        request = self._make_request(self.request.task, attached or Attached())
        replies = {}
        updates = self._engine.run_at_sites(request.task, self._sent, self._options)
        for site, update in updates:
            check_addable(update, site)
            sealed = self._engine.seals[site].seal(request, update, self._question)
            replies[site] = self._make_reply(request, site, sealed)
        self._counted = dict.fromkeys(self.sites, request.number)
        return replies

    def run_stage(
        self,
        name: str,
        attached: Mapping[str, Attached],
        *,
        least: int | None = None,  # noqa: ARG002 - part of `Exchange`
    ) -> Replies:
        """Send each site its message of a stage of the secure sum; return the replies.

        Args:
            name: The stage, which begins with "@".
            attached: What each site receives.
            least: Ignored, because every site answers.
        """
        # The messages of a stage differ only in what is attached, not in their number.
        common_request = self._make_request(name, Attached())
        replies = {}
        for site, site_attached in attached.items():
            request = replace(common_request, attached=site_attached)
            answer = self._engine.seals[site].answer_stage(request)
            replies[site] = self._make_reply(request, site, answer)
        return replies

    def refuse(self, site: str, reason: str) -> None:  # noqa: ARG002 - part of `Exchange`
        """Raise TrainingError: a simulation leaves no site out."""
        raise TrainingError(reason)

    def discard_replies(self) -> None:
        """Do nothing: the replies of a task are not stored."""

    def _make_request(self, task: str, attached: Attached) -> Request:
        """Return a message of this exchange, with a new number."""
        return replace(
            self.request,
            number=self._engine.take_next_number(),
            task=task,
            counted=self._counted,
            attached=attached,
        )

    def _make_reply(self, request: Request, site: str, attached: Attached) -> Reply:
        """Return a site's reply, and count the bytes of both messages."""
        self._engine.bytes_down += request.attached.nbytes()
        self._engine.bytes_up += attached.nbytes()
        return Reply(JOB, 1, request.number, site, Update(), attached=attached)
