"""The engine of real sites, which are reached over a transport that may fail.

The first request of a round goes to every reachable site. Later requests of the round
go only to the sites that answered all earlier ones, because only these have the state
that the requests build on. Each request says for every site which of its requests
counted last, and the site undoes any later ones. A site's state therefore depends only
on the requests that counted, whatever was lost, repeated or late: a run with faults is
bit-identical to a run without faults in which the same sites took part.

If the first request of a round has no tensors, it refers to the tensors that were sent
last; a site that does not have them receives them again.

If the sites of each round are drawn (`sampling.RoundSampling`), the requests of a round
go to the drawn sites only, and those for all sites begin anew with everyone who is
reachable. A request names the sites for which it is meant in `Request.counted`.

The server stores checkpoints (`rounds.Checkpoints`) with the position of every site,
and in `run.json` the number of its starts, which each request names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from fednotes.core.errors import ConfigError, ModelError, TrainingError
from fednotes.core.federation import Option, State
from fednotes.core.messages import CHECKPOINT, END, Attached, Request
from fednotes.core.parsing import read_json
from fednotes.core.settings import build
from fednotes.core.store import write_json
from fednotes.core.stored_tensors import copy_or_store_tensors
from fednotes.core.tensors import restoring
from fednotes.core.update import Tensors, Total, Update
from fednotes.engines.requests import (
    PATIENCE,
    CollectedReplies,
    Earlier,
    Event,
    Participants,
    Patience,
    RunState,
    Transport,
)
from fednotes.engines.rounds import (
    KEPT_CHECKPOINTS,
    Checkpoints,
    CommittedRound,
    Observer,
    Parts,
    Rounds,
)
from fednotes.engines.sampling import RoundSampling
from fednotes.engines.summing import PlainSum, Replies, Sites, Summing


class Paused(Exception):
    """A run was asked to stop; it can resume from the checkpoint just saved."""


class Deployed(Rounds):
    """A federation of sites behind a transport.

    Args:
        transport: Carries messages to and from the sites.
        sites: The sites' names. Sums add updates in this order.
        directory: The server's folder for checkpoints of this job. The run resumes from
            the newest undamaged one.
        job: Fingerprint of the job's table.
        patience: What to do when sites do not answer.
        max_norm: Largest L2 norm of an update; 0 sets no limit.
        counting: The tasks whose updates have only numbers of examples.
        summing: How updates are added; None adds them in the clear.
        sampling: How the sites of a round are drawn; None if all take part.
        observer: Called with each committed round.
        notify: Called with each fault.
        stop: Called after each round; if it returns True, a checkpoint is saved and
            `Paused` is raised.
        clock: Returns the time in seconds; tests replace it.
        sleep: Waits for a number of seconds; tests replace it.

    Raises:
        ModelError: Every checkpoint is damaged, or the folder belongs to another job.
    """

    def __init__(  # noqa: PLR0913 - each side of a run has many parts
        self,
        transport: Transport,
        sites: Sequence[str],
        directory: Path,
        *,
        job: str,
        patience: Patience = PATIENCE,
        max_norm: float = 0.0,
        counting: Collection[str] = (),
        summing: Summing | None = None,
        sampling: RoundSampling | None = None,
        observer: Observer | None = None,
        notify: Callable[[Event], None] = lambda _: None,
        stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        _check_sites(sites, patience.min_sites)
        super().__init__(sites, observer, clock, sampling)
        self._directory = directory
        self._patience = patience
        self._stop = stop
        self._summing = summing or PlainSum()
        self._least = patience.min_sites or len(sites)  # sites in a sum over all

        self._files = Checkpoints(directory, sites, "start a new run")
        server_start = _record_start(directory, job)
        position = _find_position(self._files, sites)
        progress = position.progress
        self._resumed = position.state
        self._before = progress.seconds
        with restoring(directory):
            self._summing.restore(progress.summing)
        self._members = Participants(
            transport,
            patience,
            notify,
            job=job,
            server_start=server_start,
            progress=progress,
            prologue=position.prologue,
            max_norm=max_norm,
            counting=counting,
            clock=clock,
            sleep=sleep,
        )
        self._members.checkpoint_numbers = tuple(
            self._files.read_facts(_read_request_number)
        )

        # Whether the first round is still to come.
        self._is_preparing = position.state is None
        # The sites that answered all requests of this round, by the sites for which
        # these were meant; empty before the first request.
        self._active_sites: dict[tuple[str, ...], tuple[str, ...]] = {}
        # The number of sites that answered the round's first request; the other sites
        # for which it was meant.
        self._num_participants = 0
        self._absent_sites: tuple[str, ...] = ()
        # The last request with tensors: its number and its tensors.
        self._sent_number = 0
        self._sent_tensors: Tensors = {}
        self._save_time = self._started  # of the last checkpoint

    # ---- the interface for methods

    def sum(
        self, task: str, tensors: Tensors | None = None, /, **options: Option
    ) -> Total:
        """Run `task` at the sites of this round and add their updates."""
        exchange = _DeployedExchange(self, task, tensors or {}, options)
        total = self._summing.sum_updates(exchange)
        self._close(exchange, total.included)
        return total

    def each(
        self, task: str, tensors: Tensors | None = None, /, **options: Option
    ) -> dict[str, Update]:
        """Run `task` at the sites and return the updates by site.

        The request says that updates will not be summed; a site's policy may refuse it.
        """
        exchange = _DeployedExchange(self, task, tensors or {}, options)
        exchange.request = replace(exchange.request, each=True)
        updates = self._summing.collect_updates(exchange)
        self._close(exchange, updates)
        return updates

    def collect_public_facts(
        self, task: str, *, all_sites: bool = True
    ) -> Mapping[str, Tensors]:
        """Return the public facts of each site, which a secure sum does not hide.

        Args:
            task: One of the tasks in `SiteHost`'s `public`.
            all_sites: Whether to wait for every site.

        Raises:
            TrainingError: `all_sites` is set and a site refuses.
        """
        members = self._members
        sites = members.sites if all_sites else members.present
        if all_sites:
            members.wait_for_sites(len(sites), prepare=False)
        collected = members.send(sites, task, least=len(sites) if all_sites else 0)
        replies = collected.replies
        is_incomplete = len(replies) < len(sites)
        if all_sites and is_incomplete:
            raise TrainingError(f"{task!r}: {collected.reasons}")
        return {
            site: replies[site].attached.tensors for site in sites if site in replies
        }

    def rounds(self, start: int, stop: int) -> Iterator[CommittedRound]:
        """Yield the rounds from `start` to `stop` - 1; the method must commit each."""
        try:
            for turn in super().rounds(start, stop):
                self._members.round = turn.number
                self._active_sites = {}
                self._is_preparing = False
                yield turn
        finally:
            self._active_sites = {}
            self._is_preparing = False

    @property
    def bytes_up(self) -> int:  # type: ignore[override]
        """Bytes received from sites, framing included."""
        return self._members.bytes_up

    @property
    def bytes_down(self) -> int:  # type: ignore[override]
        """Bytes sent to sites, repeats included."""
        return self._members.bytes_down

    def end(self) -> None:
        """Tell the sites that the job is over; they keep what they have stored."""
        self._members.send(self._members.present, END, timeout=self._patience.knock)

    def _forget_sent_tensors(self) -> None:
        """Free the tensors that were sent last, because others are about to be sent."""
        self._sent_number = 0
        self._sent_tensors = {}

    def _count_needed(self, sites: Collection[str]) -> int:
        """Return how many of the sites for which a request is meant must answer."""
        wanted = min(self._least, len(sites))
        return max(wanted, self._summing.find_threshold(len(sites)))

    def _close(self, exchange: _DeployedExchange, included: Collection[str]) -> None:
        """Record which sites took part; the others miss the rest of the round.

        Raises:
            TrainingError: Too few sites took part.
        """
        request = exchange.request
        members = self._members
        if len(included) < exchange.least:
            message = (
                f"{request.task!r}: {len(included)} sites can be added, "
                f"{exchange.least} are needed"
            )
            if exchange.reasons:
                message += f": {exchange.reasons}"
            raise TrainingError(message)

        members.record_counted(
            request, {site: exchange.numbers[site] for site in included}
        )
        sent_tensors = copy_or_store_tensors(request.tensors, self._directory)
        if self._is_preparing:
            earlier = Earlier(request.task, sent_tensors, dict(request.options))
            members.prologue.append(earlier)
            members.prepared |= dict.fromkeys(included, len(members.prologue))
        if request.tensors:
            self._sent_number = request.number
            self._sent_tensors = sent_tensors
        if not self._active_sites:
            self._num_participants = len(included)
            self._absent_sites = tuple(
                site for site in exchange.meant_sites if site not in included
            )
        self._active_sites[exchange.meant_sites] = tuple(
            site for site in exchange.meant_sites if site in included
        )

    # ---- the end of a round

    def _commit(
        self,
        state: State,
        metrics: Mapping[str, float],
        evaluated: bool,  # noqa: FBT001 - as `CommittedRound` calls it
    ) -> None:
        """End a round; see `Rounds`. Stop the run if a person has asked for it."""
        self._report(
            state,
            metrics,
            evaluated=evaluated,
            sites=self._num_participants,
            absent=self._absent_sites,
        )
        self._active_sites = {}
        must_stop = self._stop()
        seconds = self._clock() - self._save_time
        is_due = seconds >= self._patience.checkpoint_seconds
        if evaluated or must_stop or is_due:
            self._save(state)
        if must_stop:
            raise Paused

    def _save(self, state: State) -> None:
        """Save a checkpoint, first at the sites and then at the server.

        Every site can then return to any checkpoint of the server. A site that does not
        answer reaches it from an older state and its journal.
        """
        members = self._members
        members.send(members.present, CHECKPOINT)
        progress = RunState(
            number=members.number,
            counted=dict(members.counted),
            prepared=dict(members.prepared),
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            seconds=self.seconds,
            summing=self._summing.state(),
        )
        parts = {}
        prologue = []
        for index, request in enumerate(members.prologue):
            parts[f"asked{index}"] = request.tensors
            prologue.append([request.task, dict(request.options)])
        facts = {"progress": asdict(progress), "prologue": prologue}
        self._files.save(state, parts, facts)
        members.checkpoint_numbers = (*members.checkpoint_numbers, members.number)[
            -KEPT_CHECKPOINTS:
        ]
        self._save_time = self._clock()


class _Position(NamedTuple):
    """The position of a run in its training.

    Attributes:
        state: The server's state; None at the beginning.
        progress: The progress of the run, with the position of every site.
        prologue: The requests before the first round.
    """

    state: State | None
    progress: RunState
    prologue: tuple[Earlier, ...]


def _check_sites(sites: Sequence[str], min_sites: int) -> None:
    """Refuse sites that share a name, or fewer sites than a round needs."""
    has_repeats = len(set(sites)) < len(sites)
    if not sites or has_repeats or min_sites > len(sites):
        raise TrainingError(
            f"the job has the sites {', '.join(sites) or '(none)'}; "
            f"{min_sites or 1} or more with different names are needed"
        )


def _find_position(files: Checkpoints, sites: Sequence[str]) -> _Position:
    """Return the position at the newest checkpoint, or at the beginning without one.

    Raises:
        ModelError: Every checkpoint is damaged.
    """
    checkpoint = files.read_newest(_read_sites, _read_progress)
    if checkpoint is None:
        zeros = dict.fromkeys(sites, 0)
        return _Position(None, RunState(0, counted=zeros, prepared=dict(zeros)), ())
    state, (progress, prologue) = checkpoint
    return _Position(state, progress, prologue)


def _read_sites(facts: Mapping[str, Any]) -> list[str]:
    """Return the sites in the facts of a checkpoint."""
    return list(facts["progress"]["counted"])


def _read_request_number(facts: Mapping[str, Any]) -> int:
    """Return the number of the request after which a checkpoint was saved."""
    return int(facts["progress"]["number"])


def _read_progress(
    parts: Parts, facts: Mapping[str, Any]
) -> tuple[RunState, tuple[Earlier, ...]]:
    """Return the progress of a run at a checkpoint, and the prologue."""
    prologue = tuple(
        Earlier(str(task), parts.get(f"asked{index}", {}), dict(options))
        for index, (task, options) in enumerate(facts["prologue"])
    )
    try:
        return build(RunState, facts["progress"], "progress"), prologue
    except ConfigError as error:
        raise ModelError(str(error)) from error


def _record_start(directory: Path, job: str) -> int:
    """Record this start of the server.

    Returns:
        Which start this is: 1 for the first. The number is on disk before any site
        receives it.

    Raises:
        ModelError: The folder belongs to another job, or its `run.json` is damaged.
        FednotesError: The folder cannot be written to.
    """
    path = directory / "run.json"
    earlier_starts = 0
    if path.exists():
        try:
            stored = read_json(path)
            earlier_starts = int(stored["run"])
            stored_job = str(stored["job"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"{path}: damaged: replace its content with "
                f'{{"job": "{job}", "run": 1000}}, where "run" is at least the '
                "number of times this job was started"
            ) from error
        if stored_job != job:
            raise ModelError(
                f"{directory}: holds job {stored_job[:12]}, but this is job "
                f"{job[:12]}: use another folder"
            )
    server_start = earlier_starts + 1
    write_json(path, {"job": job, "run": server_start})
    return server_start


class _DeployedExchange:
    """One request of a method and its replies (`summing.Exchange`).

    Attributes:
        meant_sites: The sites for which the request is meant, reachable or not.
        numbers: The number under which each site ran the task.
    """

    def __init__(
        self,
        engine: Deployed,
        task: str,
        tensors: Tensors,
        options: Mapping[str, Option],
    ) -> None:
        self._members = engine._members
        self.meant_sites = engine.list_sites_of(task)
        self.least = engine._count_needed(self.meant_sites)
        is_preparing = engine._is_preparing
        is_first = self.meant_sites not in engine._active_sites
        self.sites = engine._active_sites.get(self.meant_sites, ())
        if is_first:
            self.sites = self._members.wait_for_sites(
                self.least, prepare=not is_preparing, among=self.meant_sites
            )
        if tensors:
            engine._forget_sent_tensors()
        # A first request without tensors refers to those of an earlier request, which
        # sites that do not have them receive with it.
        tensors_of_request = engine._sent_number if is_first and not tensors else 0
        self._earlier_tensors: Tensors | None = None
        if tensors_of_request:
            self._earlier_tensors = engine._sent_tensors
        request = self._members.make_request(
            task,
            first=is_first,
            tensors_of_request=tensors_of_request,
            tensors=tensors,
            options=options,
            preparing=is_preparing,
        )
        self.request = replace(request, counted=self._counted)
        self._attached = Attached()
        # The replies to the task, without those with an update, which are large.
        self._collected = CollectedReplies()
        self.numbers: dict[str, int] = {}
        self._refusals: list[str] = []
        self._moved: set[str] = set()  # sites without the state this request builds on

    @property
    def reasons(self) -> str:
        """The reasons why sites are not in the sum."""
        reasons = filter(None, (self._collected.reasons, *self._refusals))
        return "; ".join(dict.fromkeys(reasons))

    @property
    def _counted(self) -> dict[str, int]:
        """The number of the last request that counts, of each site that is meant."""
        return {site: self._members.counted[site] for site in self.meant_sites}

    def run_task(
        self, attached: Attached | None = None, *, sites: Sites = None
    ) -> Replies:
        """Return the replies to the method's request; see `summing.Exchange`."""
        self._attached = attached or Attached()
        chosen_sites = [site for site in self.sites if sites is None or site in sites]
        if self.request.number != self._members.number:  # a stage came before it
            self.request = replace(
                self.request, number=self._members.take_next_number()
            )
        # The first attempt has the request's own number, each later one a new number.
        numbers = chain(
            (self.request.number,), iter(self._members.take_next_number, None)
        )
        self._collected = self._members.ask_and_repeat(
            chosen_sites,
            lambda sites: self._make_requests(sites, next(numbers)),
            least=self.least,
            catch_up=True,
            may_repeat=self.request.first,
        )
        replies = self._collected.replies
        self._collected.replies = {}
        self.numbers = {site: reply.number for site, reply in replies.items()}
        return replies

    def run_stage(
        self, name: str, attached: Mapping[str, Attached], *, least: int | None = None
    ) -> Replies:
        """Send a message of the summation protocol and return the replies.

        Sites whose attachment is the same object receive the same encoded message. A
        site does not undo the task that it ran in this exchange.

        Args:
            name: The message's name.
            attached: What each site receives.
            least: How many sites must answer; by default, as many as in the exchange.
        """

        def make_requests(sites: Sequence[str]) -> dict[str, Request]:
            """Return each site's request; equal ones are one object."""
            counted = {**self._counted, **self.numbers}
            template = replace(self._members.make_request(name), counted=counted)
            requests: dict[int, Request] = {}  # by the identity of the attachment
            for site in sites:
                attachment = attached[site]
                if id(attachment) not in requests:
                    requests[id(attachment)] = replace(template, attached=attachment)
            return {site: requests[id(attached[site])] for site in sites}

        # Once a site has run the task, catching up would undo it.
        may_repeat = self.request.first and not self.numbers
        collected = self._members.ask_and_repeat(
            tuple(attached),
            make_requests,
            least=self.least if least is None else least,
            catch_up=True,
            may_repeat=may_repeat,
        )
        self._moved |= collected.moved
        self._refusals += [reply.refusal for reply in collected.refused.values()]
        return collected.replies

    def discard_replies(self) -> None:
        """Discard the replies to the task.

        A site that has lost its state catches up in the first request of a round and is
        left out of later ones.
        """
        lost = self._moved | self._collected.moved
        self._collected = CollectedReplies()
        self.numbers = {}
        if self.request.first:
            self._members.catch_up(self.sites)
        else:
            self.sites = tuple(site for site in self.sites if site not in lost)

    def refuse(self, site: str, reason: str) -> None:
        """Leave a site out of this round."""
        self._refusals.append(reason)
        self._members.notify(Event("refused", self.request.number, reason, site))

    def _make_requests(self, sites: Sequence[str], number: int) -> dict[str, Request]:
        """Return the method's request for each site.

        The request may refer to the tensors of an earlier one. A site that does not
        have these receives them in full. Sites with equal requests share one object,
        so that it is encoded only once.
        """
        request = replace(
            self.request,
            number=number,
            counted=self._counted,
            attached=self._attached,
        )
        if self._earlier_tensors is None:
            return dict.fromkeys(sites, request)
        request_with_tensors = replace(
            request,
            tensors_of_request=0,  # it refers to no earlier request
            tensors=self._earlier_tensors,
        )
        requests = {}
        for site in sites:
            newest = self._members.newest_tensors_at.get(site)
            has_tensors = newest == request.tensors_of_request
            requests[site] = request if has_tensors else request_with_tensors
        return requests
