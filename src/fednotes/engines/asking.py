"""Asking sites until enough have answered, over a transport that may lose, repeat or damage."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from fednotes.core.errors import ConfigError, RefusedError, TrainingError
from fednotes.core.tensors import nbytes
from fednotes.engines.summing import Limits, check_update
from fednotes.engines.wire import Frame, Reply, Request, WireError, decode_reply, encode


class Transport(Protocol):
    """A pipe for bytes between the server and its sites, which knows who is who."""

    def exchange(
        self, frames: Mapping[str, Frame], *, timeout: float, grace: float, enough: int
    ) -> Iterable[tuple[str, Frame]]:
        """Send each site its frame, and give (site, reply) as replies come.

        Sites that are sent the same have the same object. Ends when all have answered, after
        `timeout` seconds, `grace` seconds after `enough` sites answered, or earlier if nothing
        more can come. A site that is busy gets the newest frame alone when it is free; a reply
        to an earlier one may come or not. The name is that of the connection's certificate.
        """


class Broadcast(Protocol):
    """A transport that sends one frame to several sites."""

    def exchange(
        self, frame: bytes, sites: Sequence[str], *, timeout: float, enough: int, grace: float
    ) -> Mapping[str, Frame]:
        """As in `Transport`."""


class Grouped:
    """A `Transport` of a `Broadcast`: sites that are sent the same are asked together."""

    def __init__(self, broadcast: Broadcast) -> None:
        self._broadcast = broadcast

    def exchange(
        self, frames: Mapping[str, Frame], *, timeout: float, grace: float, enough: int
    ) -> Iterator[tuple[str, Frame]]:
        """One group after the other, within the time for all; `enough` counts over all."""
        groups: dict[int, list[str]] = {}
        for site, frame in frames.items():
            groups.setdefault(id(frame), []).append(site)
        end, came = time.monotonic() + timeout, 0
        for sites in groups.values():
            replies = self._broadcast.exchange(
                bytes(frames[sites[0]]),
                sites,
                timeout=max(0.0, end - time.monotonic()),
                enough=max(1, min(len(sites), enough - came)),
                grace=grace,
            )
            came += len(replies)
            yield from replies.items()


@dataclass(frozen=True)
class Policy:
    """What a run does when sites do not answer. Times are in seconds.

    min_sites: with fewer a request waits; 0 means all. timeout: a request closes then with the
    sites that answered, if they are enough; grace: or so long after enough have. give_up: the
    run ends when a request waited so long. pause: between two tries. knock: how long a site
    that was away may take to say that it is back; knock_every: it is asked no more often.
    checkpoint_seconds: a checkpoint is made so long after the last even without an evaluation.
    """

    min_sites: int = 0
    timeout: float = 600.0
    grace: float = math.inf
    give_up: float = math.inf
    pause: float = 0.5
    knock: float = 5.0
    knock_every: float = 30.0
    checkpoint_seconds: float = 600.0

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that no run can have."""
        for name in ("min_sites", "grace", "pause", "knock_every", "checkpoint_seconds"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: at least 0 is needed")
        for name in ("timeout", "give_up", "knock"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: a number above 0 is needed")


POLICY = Policy()
Kind = Literal["late", "duplicate", "damaged", "refused", "missing", "waiting", "joined", "behind"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a person at the server may want to know. site: "" for the whole run."""

    kind: Kind
    number: int
    text: str
    site: str = ""


@dataclass(slots=True)
class Answers:
    """What came of one request.

    replies: with an update each. refused: without one. moved: those of them that stand
    elsewhere than the server thought.
    """

    replies: dict[str, Reply] = field(default_factory=dict)
    refused: dict[str, Reply] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    moved: set[str] = field(default_factory=set)

    def merge(self, again: Answers) -> None:
        """Take over what the moved sites answered the second time."""
        for site in self.moved:
            self.refused.pop(site, None)
        self.replies |= again.replies
        self.refused |= again.refused
        self.missing |= again.missing
        self.moved = again.moved

    @property
    def reasons(self) -> str:
        """Why sites are not in `replies`, in one line."""
        said = [reply.refusal for _, reply in sorted(self.refused.items())]
        if self.missing:
            said.append(f"no answer from {', '.join(sorted(self.missing))}")
        return "; ".join(said)


class Asker:
    """Sends requests and takes the replies that answer them; all else is told and dropped.

    notify: told of what is dropped, and of waiting. clock, sleep: in seconds; tests have
    their own.
    """

    def __init__(
        self,
        transport: Transport,
        policy: Policy,
        limits: Limits,
        notify: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._transport, self.policy, self._limits = transport, policy, limits
        self.notify, self.clock, self._sleep = notify, clock, sleep
        self.bytes_up = self.bytes_down = 0

    def ask(
        self, requests: Mapping[str, Request], *, least: int, timeout: float | None = None
    ) -> Answers:
        """The sites' answers to one request (which may differ between sites in what it holds).

        Repeats it to silent sites until all have answered, or the time is over and at least
        `least` have. Ends early where that many can no longer do so.
        Raises TrainingError after `give_up` seconds.
        """
        encoded = {id(request): encode(request) for request in requests.values()}
        frames = {site: encoded[id(request)] for site, request in requests.items()}
        found = Answers(missing=set(requests))
        begun = self.clock()
        deadline = begun + (timeout or self.policy.timeout)
        enough_at = math.inf
        while found.missing and len(found.replies) + len(found.missing) >= least:
            now = self.clock()
            if now >= min(deadline, enough_at + self.policy.grace):
                if len(found.replies) >= least:
                    break
                self._wait(next(iter(requests.values())), found, now - begun)
                deadline = now + (timeout or self.policy.timeout)
            until = min(deadline, enough_at + self.policy.grace)
            for site, frame in self._sent(frames, found, until - now, least):
                self._take(site, frame, requests, found)
                if len(found.replies) >= least:
                    enough_at = min(enough_at, self.clock())
            left = min(deadline, enough_at + self.policy.grace) - self.clock()
            if found.missing and left > 0:
                self._sleep(min(left, self.policy.pause))
        return found

    def _sent(
        self, frames: Mapping[str, Frame], found: Answers, timeout: float, least: int
    ) -> Iterator[tuple[str, Frame]]:
        asked = {site: frame for site, frame in frames.items() if site in found.missing}
        self.bytes_down += sum(len(frame) for frame in asked.values())
        wanted = least - len(found.replies)
        yield from self._transport.exchange(
            asked,
            timeout=timeout,
            grace=self.policy.grace,
            enough=wanted if wanted > 0 else len(asked),
        )

    def _take(
        self, site: str, frame: Frame, requests: Mapping[str, Request], found: Answers
    ) -> None:
        self.bytes_up += len(frame)
        request = requests.get(site) or next(iter(requests.values()))

        def drop(kind: Kind, text: str) -> None:
            self.notify(Event(kind, request.number, text, site))

        try:
            reply = decode_reply(frame)
        except WireError as error:
            return drop("damaged", f"site {site!r}: its reply is damaged ({error}); asked again")
        if reply.site != site:
            return drop("refused", f"site {site!r} answered in the name of {reply.site!r}")
        if reply.number == 0 and reply.later:
            return drop("damaged", f"site {site!r} got a damaged request; asked again")
        if (reply.job, reply.run, reply.number) != (request.job, request.run, request.number):
            text = f"site {site!r} answered request {reply.number} of run {reply.run}, which is old"
            return drop("late", text)
        if site in found.replies or site in found.refused:
            return drop("duplicate", f"site {site!r} answered twice")
        if reply.update is None and reply.later:
            return drop("refused", f"{reply.refusal}; asked again")
        if site not in found.missing:
            return drop("refused", f"site {site!r} answered unasked")
        found.missing.discard(site)
        self._sort(site, reply, request.counted.get(site, 0), found)

    def _sort(self, site: str, reply: Reply, counted: int, found: Answers) -> None:
        """Among the replies, or among the refusals where it is too long or cannot be added.

        counted: where the site is to go back to then.
        """
        if reply.update is not None:
            try:
                check_update(reply.update, site, limits=self._limits, quoting=True)
                self._require_short(reply)
            except RefusedError as error:
                reply = replace(reply, update=None, refusal=str(error), has=counted)
        if reply.update is not None:
            found.replies[site] = reply
            return
        found.refused[site] = replace(reply, attached={})
        self.notify(Event("refused", reply.number, reply.refusal, site))

    def _require_short(self, reply: Reply) -> None:
        if (size := nbytes(reply.attached)) > self._limits.nbytes:
            raise RefusedError(
                f"site {reply.site!r} attached {size:,} bytes, {self._limits.nbytes:,} are accepted"
            )

    def _wait(self, request: Request, found: Answers, waited: float) -> None:
        missing = ", ".join(sorted(found.missing))
        if waited >= self.policy.give_up:
            raise TrainingError(
                f"no answer from {missing} to {request.task!r} in {waited:.0f} seconds; "
                "resume goes on from the last checkpoint"
            )
        text = f"{request.task!r}: waiting for {missing}, {len(found.replies)} have answered"
        self.notify(Event("waiting", request.number, text))
