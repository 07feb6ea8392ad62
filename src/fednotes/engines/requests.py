"""Send requests until enough sites have answered, and track each site's position.

The transport may lose, repeat or damage messages.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple, Protocol

from annotated_types import Ge, Gt

from fednotes.core.errors import RefusedError, TrainingError
from fednotes.core.federation import Option
from fednotes.core.messages import (
    BEGIN,
    Attached,
    Frame,
    ReceivedFrame,
    Reply,
    Request,
    WireError,
    decode_reply,
    encode_message,
)
from fednotes.core.numbers import NonNegativeInt
from fednotes.core.settings import checked
from fednotes.core.tensors import nbytes
from fednotes.core.update import Tensors
from fednotes.engines.summing import MOST_BYTES, check_addable, require_example_counts


class Transport(Protocol):
    """Carries bytes between the server and its authenticated sites."""

    def exchange(
        self, frames: Mapping[str, Frame], *, timeout: float, grace: float, enough: int
    ) -> Iterable[tuple[str, ReceivedFrame]]:
        """Send each site its message, and yield (site, reply) as replies arrive.

        It ends when all sites have answered, or when no further reply can come. A busy
        site receives only the newest message once it is free; a reply to an earlier
        message may still arrive.

        Args:
            frames: The messages by site. Equal messages are one object.
            timeout: Seconds after which it ends.
            grace: Seconds after which it ends once `enough` sites have answered.
            enough: The number of sites after whose replies `grace` begins.

        Yields:
            The name in the certificate of the site's connection, and its reply.
        """


@checked(frozen=True)
class Patience:
    """How long a run waits for sites that do not answer. All times are in seconds.

    Attributes:
        min_sites: Number of sites whose answers a request waits for; 0 stands for all.
        timeout: A request ends after this time if enough sites have answered.
        grace: It also ends this long after enough sites have answered.
        give_up: The run ends when a request has waited this long.
        pause: Time between two attempts.
        knock: How long to wait for sites that were away to report that they are back.
        knock_every: Shortest time between two of these waits.
        checkpoint_seconds: Time after which a checkpoint is saved even without an
            evaluation.

    Raises:
        ConfigError: A value is impossible.
    """

    min_sites: NonNegativeInt = 0
    timeout: Annotated[float, Gt(0)] = 600.0
    grace: Annotated[float, Ge(0)] = math.inf
    give_up: Annotated[float, Gt(0)] = math.inf
    pause: Annotated[float, Ge(0)] = 0.5
    knock: Annotated[float, Gt(0)] = 5.0
    knock_every: Annotated[float, Ge(0)] = 30.0
    checkpoint_seconds: Annotated[float, Ge(0)] = 600.0


PATIENCE = Patience()
Kind = Literal[
    "late", "duplicate", "damaged", "refused", "missing", "waiting", "joined", "behind"
]


@dataclass(frozen=True, slots=True)
class Event:
    """An event that may interest a person at the server.

    Attributes:
        kind: What happened.
        number: Number of the request.
        text: A line for a person to read.
        site: The site; "" if it concerns the whole run.
    """

    kind: Kind
    number: int
    text: str
    site: str = ""


@dataclass(slots=True)
class CollectedReplies:
    """The replies to one request.

    Attributes:
        replies: Replies with an update, by site.
        refused: Replies without one, by site.
        missing: Sites that have not answered.
        moved: Sites whose state is not the one that the server expected.
    """

    replies: dict[str, Reply] = field(default_factory=dict)
    refused: dict[str, Reply] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    moved: set[str] = field(default_factory=set)

    def merge(self, again: CollectedReplies) -> None:
        """Replace the replies of the moved sites by their second replies."""
        for site in self.moved:
            self.refused.pop(site, None)
        self.replies |= again.replies
        self.refused |= again.refused
        self.missing |= again.missing
        self.moved = again.moved

    @property
    def reasons(self) -> str:
        """Why sites are not in `replies`, in one line that names each of them."""
        reasons = []
        for site, reply in sorted(self.refused.items()):
            names_site = repr(site) in reply.refusal
            reason = reply.refusal if names_site else f"site {site!r}: {reply.refusal}"
            reasons.append(reason)
        if self.missing:
            reasons.append(f"no answer from {', '.join(sorted(self.missing))}")
        return "; ".join(reasons)


@dataclass(frozen=True)
class Earlier:
    """A request before the first round, which sites that join later catch up on."""

    task: str
    tensors: Tensors
    options: Mapping[str, Option]


@checked(frozen=True)
class RunState:
    """The progress of a run at a checkpoint.

    Attributes:
        number: Number of the checkpoint's request.
        counted: For each site, the number of its last request that counts.
        prepared: For each site, how many requests of the prologue it has answered.
        bytes_up: Bytes from all sites so far.
        bytes_down: Bytes to all sites so far.
        seconds: Seconds so far.
        summing: The state of the summation (`Summing.state`).
    """

    number: int
    counted: Mapping[str, int]
    prepared: Mapping[str, int]
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    summing: Mapping[str, Any] = field(default_factory=dict)


class _Drop(NamedTuple):
    """The reason to drop a reply.

    Attributes:
        kind: The kind of the event that reports it.
        text: The reason in words.
    """

    kind: Kind
    text: str


class Participants:
    """The sites of a run, in their fixed order.

    This class sends requests and accepts the replies to them. All other messages are
    reported and dropped.

    Args:
        transport: Carries the messages.
        patience: What to do when sites do not answer.
        notify: Called for each dropped message, and repeatedly while a request waits.
        job: Fingerprint of the job's table.
        server_start: Which start of the server this is: 1 for the first.
        progress: The progress of the run so far.
        prologue: The requests before the first round.
        max_norm: Largest L2 norm of an update; 0 sets no limit.
        counting: The tasks whose updates have only numbers of examples.
        clock: Returns the time in seconds; tests replace it.
        sleep: Waits for a number of seconds; tests replace it.

    Attributes:
        counted: For each site, the number of its last request that counts.
        prologue: The requests before the first round.
        prepared: For each site, how many of these it has answered.
        newest_tensors_at: For each site, the number of the last request with tensors
            that it answered.
        away: The sites that did not answer their last request.
        checkpoint_numbers: Numbers of the server's checkpoints.
    """

    round = 0
    checkpoint_numbers: tuple[int, ...] = ()
    _started = False
    _knocked = 0.0

    def __init__(  # noqa: PLR0913 - each side of a run has many parts
        self,
        transport: Transport,
        patience: Patience,
        notify: Callable[[Event], None],
        *,
        job: str,
        server_start: int,
        progress: RunState,
        prologue: Iterable[Earlier] = (),
        max_norm: float = 0.0,
        counting: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._transport = transport
        self.patience = patience
        self._max_norm = max_norm
        self._counting = frozenset(counting)
        self.notify = notify
        self.clock = clock
        self._sleep = sleep
        self.job = job
        self.server_start = server_start
        self.number = progress.number
        self.sites = tuple(progress.counted)
        self.counted = dict(progress.counted)
        self.prepared = dict(progress.prepared)
        self.bytes_up = progress.bytes_up
        self.bytes_down = progress.bytes_down
        self.prologue = list(prologue)
        self.newest_tensors_at: dict[str, int] = {}
        self.away = set(self.sites)

    def _collect(
        self,
        requests: Mapping[str, Request],
        *,
        least: int,
        timeout: float | None = None,
    ) -> CollectedReplies:
        """Send requests; resend them to silent sites until all answer or time is up.

        The server waits beyond the timeout until `least` sites have answered, and stops
        waiting early if that many can no longer answer.

        Args:
            requests: Each site's request.
            least: Minimum number of sites that must answer.
            timeout: Seconds to wait; None for those of `patience`.
        """
        distinct_requests = {id(request): request for request in requests.values()}
        encoded = {
            identity: encode_message(request)
            for identity, request in distinct_requests.items()
        }
        frames = {site: encoded[id(request)] for site, request in requests.items()}
        collected = CollectedReplies(missing=set(requests))
        timeout = timeout or self.patience.timeout
        start_time = self.clock()
        deadline = start_time + timeout
        enough_time = math.inf  # when `least` sites had answered

        def compute_seconds_left() -> float:
            """Return the seconds until the server no longer waits."""
            return min(deadline, enough_time + self.patience.grace) - self.clock()

        while collected.missing:
            if len(collected.replies) + len(collected.missing) < least:
                break
            time_left = compute_seconds_left()
            if time_left <= 0:
                if len(collected.replies) >= least:
                    break
                self._report_waiting(requests, collected, start_time)
                time_left = timeout
                deadline = self.clock() + time_left

            silent_frames = {
                site: frame
                for site, frame in frames.items()
                if site in collected.missing
            }
            self.bytes_down += sum(len(frame) for frame in silent_frames.values())
            still_needed = least - len(collected.replies)
            replies = self._transport.exchange(
                silent_frames,
                timeout=time_left,
                grace=self.patience.grace,
                enough=still_needed if still_needed > 0 else len(silent_frames),
            )
            for site, frame in replies:
                self._receive(site, frame, requests, collected)
                if len(collected.replies) >= least:
                    enough_time = min(enough_time, self.clock())
            if collected.missing and compute_seconds_left() > 0:
                self._sleep(min(compute_seconds_left(), self.patience.pause))
        return collected

    def _report_waiting(
        self, requests: Mapping[str, Request], collected: CollectedReplies, begun: float
    ) -> None:
        """Report that too few sites have answered.

        Raises:
            TrainingError: The request has waited for `give_up` seconds.
        """
        request = next(iter(requests.values()))
        missing = ", ".join(sorted(collected.missing))
        seconds = self.clock() - begun
        if seconds >= self.patience.give_up:
            raise TrainingError(
                f"{missing} did not answer task {request.task!r} within "
                f"{seconds:.0f} seconds: resume the run to continue from the last "
                "checkpoint"
            )
        text = (
            f"{request.task!r}: waiting for {missing}; answers so far: "
            f"{len(collected.replies)}"
        )
        self.notify(Event("waiting", request.number, text))

    def _receive(
        self,
        site: str,
        frame: ReceivedFrame,
        requests: Mapping[str, Request],
        collected: CollectedReplies,
    ) -> None:
        """Add a reply to those collected, or report and drop it.

        A reply whose update is too large or cannot be added becomes a refusal.
        """
        self.bytes_up += len(frame)
        request = requests.get(site) or next(iter(requests.values()))
        try:
            reply = decode_reply(frame)
        except WireError as error:
            text = f"site {site!r}: its reply is damaged ({error}); asked again"
            self.notify(Event("damaged", request.number, text, site))
            return
        drop = self._find_reason_to_drop(site, reply, request, collected)
        if drop is not None:
            self.notify(Event(drop.kind, request.number, drop.text, site))
            return

        collected.missing.discard(site)
        if reply.update is not None:
            try:
                self._require_addable(reply, site, request.task)
                collected.replies[site] = reply
                return
            except RefusedError as error:
                # The site undoes the task: its state does not contain this request.
                last_counted = request.counted.get(site, 0)
                reply = replace(
                    reply, update=None, refusal=str(error), has=last_counted
                )
        collected.refused[site] = replace(reply, attached=Attached())
        self.notify(Event("refused", request.number, reply.refusal, site))

    def _require_addable(self, reply: Reply, site: str, task: str) -> None:
        """Raise RefusedError for an update that may not be summed."""
        assert reply.update is not None
        check_addable(reply.update, site, self._max_norm, quoting=True)
        if task in self._counting:
            require_example_counts(reply.update, site)
        size = nbytes(reply.attached.tensors)
        if size > MOST_BYTES:
            raise RefusedError(
                f"site {site!r} attached {size:,} bytes, but at most {MOST_BYTES:,} "
                "are accepted"
            )

    def _find_reason_to_drop(  # noqa: PLR0911 - one return for each reason
        self, site: str, reply: Reply, request: Request, collected: CollectedReplies
    ) -> _Drop | None:
        """Return the reason to drop a reply; None if it answers the request."""
        if reply.site != site:
            return _Drop(
                "refused", f"site {site!r} answered in the name of {reply.site!r}"
            )
        if reply.number == 0 and reply.later:
            return _Drop("damaged", f"site {site!r} got a damaged request; asked again")
        replied_to = (reply.job, reply.server_start, reply.number)
        if replied_to != (request.job, request.server_start, request.number):
            return _Drop(
                "late",
                f"site {site!r} answered an earlier request: {reply.number} of "
                f"run {reply.server_start}",
            )
        if site in collected.replies or site in collected.refused:
            return _Drop("duplicate", f"site {site!r} answered twice")
        if reply.update is None and reply.later:
            return _Drop("refused", f"{reply.refusal}; asked again")
        if site not in collected.missing:
            return _Drop("refused", f"site {site!r} sent an unsolicited reply")
        return None

    @property
    def present(self) -> tuple[str, ...]:
        """The sites that are currently reachable."""
        return tuple(site for site in self.sites if site not in self.away)

    def take_next_number(self) -> int:
        """Return the number of the next message to sites; count it as used."""
        self.number += 1
        return self.number

    def make_request(self, task: str, **fields: Any) -> Request:
        """Return the run's next request, with a number of its own.

        Args:
            task: The task.
            fields: Further fields of `Request`.
        """
        return Request(
            self.job,
            self.server_start,
            self.take_next_number(),
            task,
            round=self.round,
            counted=dict(self.counted),
            checkpoint_numbers=self.checkpoint_numbers,
            **fields,
        )

    def ask(
        self,
        requests: Mapping[str, Request],
        *,
        least: int,
        timeout: float | None = None,
    ) -> CollectedReplies:
        """Send one request to sites; return their replies.

        A site that does not answer counts as away. For a site that has lost its state,
        its new position is recorded.

        Args:
            requests: The request of each site; they may differ in content.
            least: How many sites must answer.
            timeout: Seconds to wait; by default those of the run.

        Raises:
            TrainingError: Fewer than `least` sites have answered within `give_up`
                seconds.
        """
        collected = self._collect(requests, least=least, timeout=timeout)
        for site in sorted(collected.missing):
            if site not in self.away:
                self._report("missing", site, f"did not answer request {self.number}")
            self.away.add(site)
        for site, reply in collected.refused.items():
            if reply.has == requests[site].counted[site]:
                continue
            self._report(
                "behind",
                site,
                f"has lost its state and continues from request {reply.has}",
            )
            self.counted[site] = reply.has
            self.newest_tensors_at.pop(site, None)
            if not reply.has:
                self.prepared[site] = 0
            collected.moved.add(site)
        return collected

    def ask_and_repeat(
        self,
        sites: Sequence[str],
        make_requests: Callable[[Sequence[str]], Mapping[str, Request]],
        *,
        least: int,
        timeout: float | None = None,
        catch_up: bool = False,
        may_repeat: bool = True,
    ) -> CollectedReplies:
        """Ask sites, and ask a second time those that had lost their state.

        Args:
            sites: The sites.
            make_requests: Makes new requests for the sites that it receives.
            least: How many sites must answer.
            timeout: As in `ask`.
            catch_up: Whether sites that had lost their state first catch up on the
                prologue.
            may_repeat: Whether such sites may be asked a second time at all.

        Returns:
            The newest answer of each site.
        """
        collected = self.ask(make_requests(sites), least=least, timeout=timeout)
        moved = [site for site in sites if site in collected.moved]
        if moved and may_repeat:
            if catch_up:
                self.catch_up(moved)
            collected.merge(self.ask(make_requests(moved), least=0, timeout=timeout))
        return collected

    def send(
        self,
        sites: Sequence[str],
        task: str,
        *,
        least: int = 0,
        timeout: float | None = None,
    ) -> CollectedReplies:
        """Send one of the engine's own messages and return the replies."""
        if not sites:
            return CollectedReplies()
        return self.ask_and_repeat(
            sites,
            lambda chosen: dict.fromkeys(chosen, self.make_request(task)),
            least=least,
            timeout=timeout,
        )

    def wait_for_sites(
        self, least: int, *, prepare: bool, among: Collection[str] | None = None
    ) -> tuple[str, ...]:
        """Wait for enough sites for the first request of a round; return them.

        Args:
            least: How many sites are needed.
            prepare: Whether sites that missed the requests before the first round (the
                prologue) catch up on them now.
            among: The sites for which the request is meant; None for all.

        Raises:
            TrainingError: This many sites can never take part.
        """
        sites = self.sites if among is None else among

        def list_present() -> tuple[str, ...]:
            return tuple(site for site in self.present if site in sites)

        if (
            self._started
            and self.away
            and self.clock() - self._knocked >= self.patience.knock_every
        ):
            # From time to time, let any site come back, but wait only briefly.
            self._ask_whether_back(self.sites, 0, self.patience.knock)
        # At the start, every site counts as away, so the loop begins with a question.
        while True:
            if prepare:
                self.catch_up(list_present())
            present = list_present()  # without sites that failed to catch up
            if len(present) >= least:
                return present
            self._ask_whether_back(sites, least - len(present), self.patience.timeout)

    def _ask_whether_back(
        self, sites: Collection[str], least: int, timeout: float
    ) -> None:
        """Ask those of some sites that were away whether they are back.

        Args:
            sites: The sites.
            least: How many of them must come back; with 0, no site is waited for longer
                than `timeout`.
            timeout: Seconds to wait.

        Raises:
            TrainingError: So many of them refuse that fewer than `least` can come back.
        """
        away = [site for site in self.sites if site in self.away and site in sites]
        collected = self.send(away, BEGIN, least=least, timeout=timeout)
        self._knocked = self.clock()
        for site in collected.replies:
            self.away.discard(site)
            self._report("joined", site, "is there")
        self._started = self._started or bool(collected.replies)
        if len(collected.replies) + len(collected.missing) < least:
            raise TrainingError(f"too few sites can take part: {collected.reasons}")

    def catch_up(self, sites: Sequence[str]) -> None:
        """Have sites answer the requests of the prologue that they missed.

        The sums of these requests are final; only the state of these sites changes.
        """
        for index, earlier in enumerate(self.prologue):
            late = [
                site
                for site in sites
                if self.prepared[site] <= index and site not in self.away
            ]
            if not late:
                continue
            request = self.make_request(
                earlier.task,
                first=index == 0,
                preparing=True,
                tensors=earlier.tensors,
                options=earlier.options,
            )
            for site in self.ask(dict.fromkeys(late, request), least=0).replies:
                self.counted[site] = request.number
                self.prepared[site] = index + 1
            self.away |= {site for site in late if self.prepared[site] <= index}

    def record_counted(self, request: Request, included: Mapping[str, int]) -> None:
        """Record the sites whose updates are in the sum of a request.

        Args:
            request: The request.
            included: The number under which each site ran it.
        """
        self.counted |= included
        if request.tensors:
            for site, number in included.items():
                if number == request.number:
                    self.newest_tensors_at[site] = number

    def _report(self, kind: Kind, site: str, what: str) -> None:
        """Notify of an event at a site.

        Args:
            kind: The kind of the event.
            site: The site.
            what: The predicate of the line for a person to read.
        """
        self.notify(Event(kind, self.number, f"site {site!r} {what}", site))
