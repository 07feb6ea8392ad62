"""Asking sites until enough have answered, over a transport that may lose, repeat or
damage, and where each of them stands."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Protocol

from annotated_types import Ge, Gt

from fednotes.core.errors import RefusedError, TrainingError
from fednotes.core.federation import Option
from fednotes.core.messages import (
    BEGIN,
    Attached,
    Frame,
    Reply,
    Request,
    WireError,
    decode_reply,
    encode,
)
from fednotes.core.settings import checked
from fednotes.core.tensors import nbytes
from fednotes.core.update import Tensors
from fednotes.engines.summing import MOST_BYTES, check_update


class Transport(Protocol):
    """A pipe for bytes between the server and its sites, which knows who is who."""

    def exchange(
        self, frames: Mapping[str, Frame], *, timeout: float, grace: float, enough: int
    ) -> Iterable[tuple[str, Frame]]:
        """Send each site its frame, and give (site, reply) as replies come.

        Sites that are sent the same have the same object. Ends when all have answered,
        after `timeout` seconds, `grace` seconds after `enough` sites answered, or
        earlier if nothing more can come. A site that is busy gets the newest frame
        alone when it is free; a reply to an earlier one may come or not. The name is
        that of the connection's certificate.
        """


@checked(frozen=True)
class Patience:
    """What a run does when sites do not answer. Times are in seconds.

    min_sites: with fewer a request waits; 0 means all. timeout: a request closes then
    with the sites that answered, if they are enough; grace: or so long after enough
    have. give_up: the run ends when a request waited so long. pause: between two tries.
    knock: how long a site that was away may take to say that it is back; knock_every:
    it is asked no more often.
    checkpoint_seconds: a checkpoint is made so long after the last even without an
        evaluation.

    Raises ConfigError for a value that no run can have.
    """

    min_sites: Annotated[int, Ge(0)] = 0
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
    """Something that a person at the server may want to know. site: "" for the whole
    run."""

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
        """Why sites are not in `replies`, in one line that names each of them."""
        said = [
            reply.refusal
            if repr(site) in reply.refusal
            else f"site {site!r}: {reply.refusal}"
            for site, reply in sorted(self.refused.items())
        ]
        if self.missing:
            said.append(f"no answer from {', '.join(sorted(self.missing))}")
        return "; ".join(said)


@dataclass(frozen=True)
class Earlier:
    """A request of the time before the first round, which a site that joins later is to
    do."""

    task: str
    tensors: Tensors
    options: Mapping[str, Option]


@checked(frozen=True)
class RunState:
    """Where a run stands. number: of the checkpoint's request. counted, prepared: by
    site, the last request that counts, and how much of the prologue it has done."""

    number: int
    counted: Mapping[str, int]
    prepared: Mapping[str, int]
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    summing: Mapping[str, Any] = field(default_factory=dict)  # `Summing.state`


class Participants:
    """The sites of a run, in their fixed order. Sends them requests and takes the
    replies that answer them; all else is told and dropped.

    job, run, progress, prologue: where the run stands. notify: told of what is dropped,
    and of waiting. clock, sleep: in seconds; tests have their own.

    counted: by site, the number of its last request that counts. prologue: what was
    asked before the first round; prepared: how much of it each site has done. knows: by
    site, the last request with tensors that it did. away: who did not answer last.
    """

    round = 0
    marks: tuple[int, ...] = ()
    _started, _knocked = False, 0.0

    def __init__(
        self,
        transport: Transport,
        patience: Patience,
        notify: Callable[[Event], None],
        *,
        job: str,
        run: int,
        progress: RunState,
        prologue: Iterable[Earlier] = (),
        max_norm: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._transport, self.patience, self._max_norm = transport, patience, max_norm
        self.notify, self.clock, self._sleep = notify, clock, sleep
        self.job, self.run, self.number = job, run, progress.number
        self.sites = tuple(progress.counted)
        self.counted, self.prepared = dict(progress.counted), dict(progress.prepared)
        self.bytes_up, self.bytes_down = progress.bytes_up, progress.bytes_down
        self.prologue, self.knows, self.away = (
            list(prologue),
            dict[str, int](),
            set(self.sites),
        )

    def _answers(
        self,
        requests: Mapping[str, Request],
        *,
        least: int,
        timeout: float | None = None,
    ) -> Answers:
        """Repeats a request to silent sites until all have answered, or the time is
        over and at least `least` have. Ends early where that many can no longer do so.
        """
        encoded = {id(request): encode(request) for request in requests.values()}
        frames = {site: encoded[id(request)] for site, request in requests.items()}
        found, enough_at, begun = Answers(missing=set(requests)), math.inf, self.clock()
        deadline = begun + (timeout or self.patience.timeout)

        def left() -> float:
            return min(deadline, enough_at + self.patience.grace) - self.clock()

        while found.missing and len(found.replies) + len(found.missing) >= least:
            if (time_left := left()) <= 0:
                if len(found.replies) >= least:
                    break
                now, time_left = self.clock(), timeout or self.patience.timeout
                first, missing = (
                    next(iter(requests.values())),
                    ", ".join(sorted(found.missing)),
                )
                if now - begun >= self.patience.give_up:
                    raise TrainingError(
                        f"no answer from {missing} to {first.task!r} in {now - begun:.0f} seconds; "
                        "resume goes on from the last checkpoint"
                    )
                text = f"{first.task!r}: waiting for {missing}, {len(found.replies)} have answered"
                self.notify(Event("waiting", first.number, text))
                deadline = now + time_left
            asked = {
                site: frame for site, frame in frames.items() if site in found.missing
            }
            self.bytes_down += sum(len(frame) for frame in asked.values())
            wanted, grace = least - len(found.replies), self.patience.grace
            enough = wanted if wanted > 0 else len(asked)
            limits = {"timeout": time_left, "grace": grace}
            for site, frame in self._transport.exchange(asked, **limits, enough=enough):
                self._take(site, frame, requests, found)
                if len(found.replies) >= least:
                    enough_at = min(enough_at, self.clock())
            if found.missing and left() > 0:
                self._sleep(min(left(), self.patience.pause))
        return found

    def _take(
        self, site: str, frame: Frame, requests: Mapping[str, Request], found: Answers
    ) -> None:
        """Among the replies, or among the refusals where it is too long or cannot be
        added."""
        self.bytes_up += len(frame)
        request = requests.get(site) or next(iter(requests.values()))

        def drop(kind: Kind, text: str) -> None:
            self.notify(Event(kind, request.number, text, site))

        try:
            reply = decode_reply(frame)
        except WireError as error:
            return drop(
                "damaged", f"site {site!r}: its reply is damaged ({error}); asked again"
            )
        if reply.site != site:
            return drop(
                "refused", f"site {site!r} answered in the name of {reply.site!r}"
            )
        if reply.number == 0 and reply.later:
            return drop("damaged", f"site {site!r} got a damaged request; asked again")
        if (reply.job, reply.run, reply.number) != (
            request.job,
            request.run,
            request.number,
        ):
            text = f"site {site!r} answered request {reply.number} of run {reply.run}, which is old"
            return drop("late", text)
        if site in found.replies or site in found.refused:
            return drop("duplicate", f"site {site!r} answered twice")
        if reply.update is None and reply.later:
            return drop("refused", f"{reply.refusal}; asked again")
        if site not in found.missing:
            return drop("refused", f"site {site!r} answered unasked")
        found.missing.discard(site)
        if reply.update is not None:
            try:
                check_update(reply.update, site, self._max_norm, quoting=True)
                if (size := nbytes(reply.attached.tensors)) > MOST_BYTES:
                    raise RefusedError(
                        f"site {site!r} attached {size:,} bytes, {MOST_BYTES:,} are accepted"
                    )
                found.replies[site] = reply
                return
            except RefusedError as error:  # it is to go back to where it was
                has = request.counted.get(site, 0)
                reply = replace(reply, update=None, refusal=str(error), has=has)
        found.refused[site] = replace(reply, attached=Attached())
        drop("refused", reply.refusal)

    @property
    def present(self) -> tuple[str, ...]:
        """Who is there."""
        return tuple(site for site in self.sites if site not in self.away)

    def next_number(self) -> int:
        """Each message to sites has its own."""
        self.number += 1
        return self.number

    def request(self, task: str, **fields: Any) -> Request:
        """The run's next request."""
        self.next_number()
        fields |= {
            "round": self.round,
            "counted": dict(self.counted),
            "marks": self.marks,
        }
        return Request(self.job, self.run, self.number, task, **fields)

    def ask(
        self,
        requests: Mapping[str, Request],
        *,
        least: int,
        timeout: float | None = None,
    ) -> Answers:
        """The sites' answers to one request (which may differ between sites in what it
        holds); who gives none is away, who has lost its state is noted.

        Raises TrainingError after `give_up` seconds in which fewer than `least` have
            answered.
        """
        answers = self._answers(requests, least=least, timeout=timeout)
        for site in sorted(answers.missing):
            if site not in self.away:
                self._say("missing", site, f"did not answer request {self.number}")
            self.away.add(site)
        for site, reply in answers.refused.items():
            if reply.has == requests[site].counted[site]:
                continue
            self._say(
                "behind",
                site,
                f"has lost its state and goes on from request {reply.has}",
            )
            self.counted[site] = reply.has
            self.knows.pop(site, None)
            if not reply.has:
                self.prepared[site] = 0
            answers.moved.add(site)
        return answers

    def ask_again(
        self,
        sites: Sequence[str],
        make: Callable[[Sequence[str]], Mapping[str, Request]],
        *,
        least: int,
        timeout: float | None = None,
        catch_up: bool = False,
        again: bool = True,
    ) -> Answers:
        """The answers of sites; those that stood elsewhere are asked a second time.

        make: a new request. catch_up: they make up for what they missed before that.
        again: whether they may be asked once more.
        """
        answers = self.ask(make(sites), least=least, timeout=timeout)
        moved = [site for site in sites if site in answers.moved]
        if moved and again:
            if catch_up:
                self.catch_up(moved)
            answers.merge(self.ask(make(moved), least=0, timeout=timeout))
        return answers

    def tell(
        self,
        sites: Sequence[str],
        task: str,
        *,
        least: int = 0,
        timeout: float | None = None,
    ) -> Answers:
        """One of the engine's own messages."""
        if not sites:
            return Answers()
        return self.ask_again(
            sites,
            lambda asked: dict.fromkeys(asked, self.request(task)),
            least=least,
            timeout=timeout,
        )

    def gather(self, least: int, *, prepare: bool) -> tuple[str, ...]:
        """The sites for a round's first request; waits until there are so many.

        prepare: let those that were not there in the prologue do it now.
        Raises TrainingError where so many can never be.
        """
        if not self._started:
            self._knock(least, self.patience.timeout)
        elif self.away and self.clock() - self._knocked >= self.patience.knock_every:
            self._knock(0, self.patience.knock)
        while True:
            if prepare:
                self.catch_up(self.present)
            if len(self.present) >= least:
                return self.present
            self._knock(least - len(self.present), self.patience.timeout)

    def _knock(self, least: int, timeout: float) -> None:
        """Ask those that were away whether they are there."""
        away = [site for site in self.sites if site in self.away]
        answers = self.tell(away, BEGIN, least=least, timeout=timeout)
        self._knocked = self.clock()
        for site in answers.replies:
            self.away.discard(site)
            self._say("joined", site, "is there")
        self._started = self._started or bool(answers.replies)
        if len(answers.replies) + len(answers.missing) < least:
            raise TrainingError(f"too few sites can take part: {answers.reasons}")

    def catch_up(self, sites: Sequence[str]) -> None:
        """Let sites do what they missed of the prologue; its sums are made, only they
        change."""
        for index, earlier in enumerate(self.prologue):
            late = [
                s for s in sites if self.prepared[s] <= index and s not in self.away
            ]
            if not late:
                continue
            asked = {"tensors": earlier.tensors, "options": earlier.options}
            again = self.request(
                earlier.task, first=index == 0, preparing=True, **asked
            )
            for site in self.ask(dict.fromkeys(late, again), least=0).replies:
                self.counted[site], self.prepared[site] = again.number, index + 1
            self.away |= {site for site in late if self.prepared[site] <= index}

    def count(self, request: Request, included: Mapping[str, int]) -> None:
        """These sites' answers to a request are in a sum; the number under which each
        did it."""
        self.counted |= included
        if request.tensors:
            self.knows |= {
                s: number for s, number in included.items() if number == request.number
            }

    def _say(self, kind: Kind, site: str, what: str) -> None:
        self.notify(Event(kind, self.number, f"site {site!r} {what}", site))
