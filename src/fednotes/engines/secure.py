"""The secure sum behind the engine: the server's end (`summing.Summing`) and a site's.

    task, boxes, terms           →  masked update, keys of the next exchange     the method's task
    survivors, receipts, keys    →  what opens the sum, shares of the next one   "@unmask"

That is all while nothing fails. An exchange that begins afresh has "@keys" and
"@shares" before it. Where a site could not mask its update with the keys of this
exchange (it was started again), with the names of counts that were agreed, or within
the limits, it keeps the update in memory; an exchange begins afresh after the task, and
sites mask what they have ("@masked"). Where a sum may leave sites out, survivors first
tell each other their list ("@confirm").

The terms, equal for all sites: names of the counts (those of the last sum of this task;
None: each site's own) and limits of the values (from the last total of this task). Both
are public.

The masks are made for the question (`history.Asked`), so only updates of sites that
were asked the same add up. An update is opened in one exchange at most: a site answers
for the newest, and forgets the update with that. A task that is done again, as after a
fault, is opened for the same sites as before alone (`history.Opened`). As an exchange
takes over half of the sites to open, no two can be opened over different sites that
hold the same update.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fednotes.core.errors import RefusedError, TrainingError
from fednotes.core.messages import OURS, Attached, Reply, Request
from fednotes.core.tensors import tensor_fingerprint
from fednotes.core.update import Total, Update
from fednotes.engines.history import Asked, Opened, OpeningRecord, history_after
from fednotes.engines.summing import MOST_METRICS, Exchange, Summing
from fednotes.privacy.secure_sum import Parties
from fednotes.privacy.secure_sum import messages as wire
from fednotes.privacy.secure_sum.crypto import Identity, digest, joined
from fednotes.privacy.secure_sum.fixed_point import BITS, SumLayout, limits_after
from fednotes.privacy.secure_sum.server import ServerChain
from fednotes.privacy.secure_sum.site import REFUSALS, LaidOut, SiteChain

PACE = "@time "  # begins the names of the counts that tell classes
CLASSES = 36  # the last one ends after three hours
# names of the counts, by class
PACES = tuple(f"{PACE}{level:02}" for level in range(CLASSES))
# answers of a task by which its class goes: an odd pause is forgotten after these
WINDOW = 8
MARGIN = 1.25  # for the next answer, which may take a little longer
SETTLED = 3  # answers after which an honest server's class is never below a site's own
WARY = 64  # answers for which one that is below is not forgotten
MOST_NAMES = MOST_METRICS + CLASSES  # of one site's counts
MOST_LETTERS = (
    2**19
)  # of all their names: what sites agree on has to fit into one header
MOST_LIMITS = (
    3  # that are tried for one round and task: the last total's, the widest, one more
)
ATTEMPTS = 3  # at a sum, if sites are lost while it is opened
AGAIN = 2  # fresh exchanges of updates that sites could not mask at first
_NO: frozenset[str] = frozenset()
R = TypeVar("R")
logger = logging.getLogger("fednotes.engines.secure")


# a site's end


def context_of(job: str, run: int) -> bytes:
    """Names all exchanges of one start of the server."""
    return joined("fednotes secure sum", job, run)


@dataclass
class _Kept:
    """The update of the newest task, until it is opened. question: a digest of what was
    asked."""

    number: int
    round: int
    task: str
    question: bytes
    update: Update

    @property
    def purpose(self) -> str:
        """What the masks are made for."""
        return f"{self.round} {self.task} {self.question.hex()}"


@dataclass
class _Tried:
    """What the server asked of the size of the values of one round and task.

    Whether they are within a limit is told by a refusal and by an answer, so both are
    counted, each of its kind once: the same question again has the same answer.
    `limits`: digests of those that were tried; `refused`: of limits together with the
    values that were beyond them.
    """

    limits: set[bytes] = field(default_factory=set)
    refused: set[bytes] = field(default_factory=set)


class SecureSeal:
    """One site's part in the secure sum of one job, for the life of its process.

    sites, threshold: see `Parties`. job: the declarative job's fingerprint. identity:
    signs this site's keys and checks the others'; None trusts the server to relay them.
    kept: file of the questions that were opened; without one they are forgotten with
        the process.
    """

    def __init__(
        self,
        site: str,
        sites: Sequence[str],
        *,
        job: str,
        threshold: int | None = None,
        identity: Identity | None = None,
        kept: Path | None = None,
    ) -> None:
        self._site, self._identity = site, identity
        self._parties, self._job, self._opened = (
            Parties(sites, threshold),
            job,
            Opened(site, kept),
        )
        self._run = -1
        self._chain: SiteChain  # of that run
        self._kept: _Kept | None = None
        # the newest masked exchange, its question
        self._masked_in: tuple[int, bytes] = (-1, b"")
        # by round and task, whatever was sent
        self._tried: dict[tuple[int, str], _Tried] = {}
        # the last stage's number, reply
        self._answered: tuple[int, Attached] = (-1, Attached())

    @property
    def strict(self) -> bool:
        """Whether every sum is over all sites. Else their histories differ, and each
        trusts the server which of its tasks count (docs/privacy.md says what that is
        worth)."""
        return self._parties.threshold == len(self._parties.sites)

    def adopted(self, request: Request, asked: Asked) -> bytes | None:
        """The history that this site goes on with in place of its own, which it has
        lost: that of the others, from the terms. None where it has its own.

        Only what happened at this site makes it so: nothing was ever opened here and it
        has trained nothing (a new disk), or its own files were damaged. A server that
        sends it back changes neither.
        """
        lost = self._opened.lost or not (asked.trained or len(self._opened))
        if not self.strict or not lost or not request.attached.facts:
            return None
        told = wire.read(wire.Terms, request.attached.facts).history
        return None if told in (b"", asked.history) else told

    def lost(self) -> None:
        """What this site kept of the job on its disk was damaged."""
        self._opened.lose()

    def pace(self, request: Request) -> int | None:
        """The class of times that all sites answer in (`AnswerTimes`), from the terms."""
        with suppress(RefusedError):  # terms that are none
            told = wire.read(wire.Terms, request.attached.facts).pace
            return None if told is None else min(told, CLASSES - 1)
        return None

    def stage(self, request: Request) -> Attached:
        """Answer one of the protocol's own messages; a repeated one gets the same
        answer.

        Raises RefusedError for what the protocol forbids.
        """
        self._begin(request.run)
        if self._answered[0] != request.number:
            self._answered = request.number, self._answer(request)
        return self._answered[1]

    def seal(self, request: Request, update: Update, question: bytes) -> Attached:
        """The update under its masks, or why it cannot be masked yet.

        question: a digest of what the site was asked, at other sites too. A request
        without the terms of an exchange (a task that a late site makes up for) gets
        nothing.
        Raises RefusedError for any other without them, TrainingError for values that no
        exchange can sum.
        """
        self._begin(request.run)
        self._answered = (-1, Attached())
        self._kept = None
        if not request.attached.facts:
            if not request.preparing:
                raise RefusedError(
                    f"site {self._site!r}: {request.task!r} is asked for outside the secure sum"
                )
            return Attached()
        terms = wire.read(wire.Terms, request.attached.facts)
        round = 0 if request.preparing else request.round
        self._kept = _Kept(request.number, round, request.task, question, update)
        return self._sealed(self._kept, terms, request.attached)

    def _answer(self, request: Request) -> Attached:
        attached = request.attached
        if request.task == wire.MASKED:
            return self._masked(request)
        if request.task not in wire.ANSWERS:
            raise RefusedError(f"site {self._site!r} has no task {request.task!r}")
        stage = wire.read(wire.Stage, attached.facts)
        if request.task == wire.KEYS:
            return wire.packed(self._chain.keys(stage.number))
        if request.task == wire.SHARES:
            return wire.packed(self._chain.at(stage.number).shares(stage.keys))
        asked, question = (
            wire.request_in(stage, attached, self._site),
            self._question(stage.number),
        )
        if request.task == wire.CONFIRM:
            self._opened.require(question, asked.survivors)
            return wire.packed(self._chain.at(stage.number).confirm(asked))
        message = self._chain.unmask(stage.number, asked, stage.keys)
        self._opened.add(question, asked.survivors)
        self._kept = None
        return wire.packed(message)

    def _masked(self, request: Request) -> Attached:
        kept = self._kept
        if kept is None or request.counted.get(self._site) != kept.number:
            raise RefusedError(
                f"site {self._site!r} has no update for the secure sum any more"
            )
        terms = wire.read(wire.Terms, request.attached.facts)
        try:
            return self._sealed(kept, terms, request.attached)
        except TrainingError as error:
            # no limit is wide enough; an answer, for it is final
            return wire.packed(wire.Masking((), b"", again=str(error), wide=True))

    def _question(self, number: int) -> bytes:
        """What the update was for that was masked in an exchange.

        Raises RefusedError.
        """
        if self._masked_in[0] != number:
            raise RefusedError(
                f"site {self._site!r} has no keys for exchange {number} of the secure sum, or "
                "masked nothing in it: start afresh"
            )
        return self._masked_in[1]

    def _sealed(self, kept: _Kept, terms: wire.Terms, attached: Attached) -> Attached:
        """The masked update, or `again` with the reason: it can be masked in a fresh
        exchange."""
        names, metrics = tuple(kept.update.metrics), terms.metrics
        told = wire.Masking(
            None if names == (metrics or ()) else names,
            history_after(kept.question),
            self._opened.survivors(kept.question),  # it can be opened for these alone
        )
        if metrics is not None and not set(names) <= set(metrics):
            return wire.packed(
                replace(told, again="counts that the sites did not agree on")
            )
        limits = terms.limits
        if not all(abs(exponent) <= BITS for exponent in limits.values()):
            raise RefusedError("a request of the secure sum has limits that are none")
        tried, grid = self._try(kept, limits)
        try:
            boxes = wire.boxes_in(attached, terms.roster, self._site)
            how = LaidOut(purpose=kept.purpose, limits=limits, metrics=metrics)
            message = self._chain.masked(terms.number, boxes, kept.update, **how)
        except RefusedError as error:
            return wire.packed(replace(told, again=str(error)))
        except TrainingError as error:
            # which tensor and what limit: for this site's people alone
            logger.warning("%s", error)
            tried.refused.add(digest(grid, _digest(kept.update)))
            if not limits or len(tried.refused) >= REFUSALS:
                raise self._beyond(kept) from error
            return wire.packed(
                replace(told, again="values beyond the limits", wide=True)
            )
        self._masked_in = terms.number, kept.question
        return wire.packed_masked(told, message)

    def _try(self, kept: _Kept, limits: Mapping[str, int]) -> tuple[_Tried, bytes]:
        """Count what is asked of the values' size: what was tried so far, a digest of
        these limits.

        A limit counts by the grid that comes of it; numbers of 8 bytes have one grid
        always.
        Raises TrainingError if this says more of the values than the server may know.
        """
        tried = self._tried.setdefault((kept.round, kept.task), _Tried())
        fields = SumLayout.of(
            kept.update, len(self._parties.sites), limits=limits
        ).fields
        grid = digest(*(part for item in fields for part in (item.name, item.exponent)))
        new = grid not in tried.limits
        if (new and len(tried.limits) >= MOST_LIMITS) or len(tried.refused) >= REFUSALS:
            raise self._beyond(kept)
        tried.limits.add(grid)
        return tried, grid

    def _beyond(self, kept: _Kept) -> TrainingError:
        """The last word on an update.

        It names no tensor and no number: the server reads it.
        """
        self._kept = None
        return TrainingError(
            f"site {self._site!r}: {kept.task!r} has values beyond the limits "
            "of the secure sum, or too many limits were tried; the site's own log names the "
            "tensor: lower the learning rate"
        )

    def _begin(self, run: int) -> None:
        """A server that was started again begins afresh: numbers begin again, with new
        keys, and nothing of a run before is opened any more."""
        if run < self._run:
            raise RefusedError(
                f"site {self._site!r}: run {run} of the secure sum is over"
            )
        if run > self._run:
            self._run, context = run, context_of(self._job, run)
            self._chain = SiteChain(self._site, self._parties, context, self._identity)
            self._kept, self._answered, self._masked_in = (
                None,
                (-1, Attached()),
                (-1, b""),
            )


def _digest(update: Update) -> bytes:
    """SHA-256 of an update's numbers."""
    counts = repr((float(update.weight), sorted(update.metrics.items())))
    return digest(counts, tensor_fingerprint(update.tensors))


def seconds_of(level: int) -> float:
    """The end of a class."""
    return float(2.0 ** (level / 2) / 16)


def class_of(seconds: float) -> int:
    """The first class that ends no earlier."""
    return min(
        CLASSES - 1, max(0, math.ceil(2 * math.log2(max(seconds, 1e-9) * 16) - 1e-9))
    )


def last_class_within(seconds: float) -> int:
    """Return the last class that ends no later; the first class if all end later."""
    return max(
        (level for level in range(CLASSES) if seconds_of(level) <= seconds), default=0
    )


def _coarse(level: int) -> int:
    """The next class whose end is a power of four, over 16."""
    return 4 * math.ceil(level / 4)


def slowest(metrics: Mapping[str, float]) -> int | None:
    """The highest class that any site told, from a sum; None if none did."""
    return max((PACES.index(name) for name in PACES if metrics.get(name)), default=None)


def without(metrics: Mapping[str, float]) -> dict[str, float]:
    """A method's own counts."""
    return {name: n for name, n in metrics.items() if not name.startswith(PACE)}


class AnswerTimes:
    """When one site answers: who answers first would have the fewest notes.

    A site holds an answer back until the end of a class of times, 2^(k/2) / 16 seconds,
    that all sites keep to: the class of the slowest, from the last sum of the task, to
    which each site adds a 1 under its class. Where no class is told (the first time),
    one below its own (a server that lies), or the answer is late for it, it waits for
    the next 4^k / 16 seconds; a server that tries one class after the other gets such
    answers for long after the first.

    Args:
        clock: The time in seconds; tests have their own.
        sleep: Waits for so many seconds.
        longest: Seconds after which no answer is held back for the sake of slower
            sites. A site that reports a class of hours can thus delay the others by no
            more than by answering late itself.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        longest: float = math.inf,
    ) -> None:
        self.clock, self._sleep = clock, sleep
        self._most = last_class_within(longest)
        self._lasted: dict[str, deque[float]] = {}  # by task
        self._wary: dict[str, int] = {}  # by task: answers that keep to powers of four

    def counts(self, task: str, seconds: float) -> dict[str, float]:
        """What the site tells in the sum: 1 under its class, 0 under the others.

        seconds: that the task has taken so far.
        """
        own = self._class(task, seconds)
        if self._wary.get(task):
            own = _coarse(own)
        return {name: float(level == own) for level, name in enumerate(PACES)}

    def wait(self, task: str, begun: float, told: int | None) -> None:
        """Hold the answer to a task back. begun: when its request came, by `clock`.
        told: the class of the slowest site."""
        lasted, own = self.clock() - begun, self._class(task)
        before = self._lasted.setdefault(task, deque(maxlen=WINDOW))
        if told is not None and told < own and len(before) >= SETTLED:
            self._wary[task] = WARY
        before.append(lasted)
        level = -1 if told is None else min(told, self._most)
        wary = self._wary.get(task, 0)
        if level < own or lasted > seconds_of(level) or wary:
            level = max(level, _coarse(max(own, class_of(lasted))))
        self._wary[task] = max(0, wary - 1)
        while (left := begun + seconds_of(level) - self.clock()) > 0:
            self._sleep(left)

    def _class(self, task: str, seconds: float = 0.0) -> int:
        """By the slowest of the last answers, with a margin."""
        return class_of(MARGIN * max(seconds, *self._lasted.get(task, ()), 0.0))


# the server's end


class _Spoilt(TrainingError):
    """An exchange that came to nothing, though it may succeed if it is begun afresh."""


@dataclass
class _Told:
    """What sites said of their updates under some terms.

    threshold: how many sites it takes to open a sum. is_recorded: whether the server
    has asked to open this sum over such sites.
    """

    terms: wire.Terms
    threshold: int
    is_recorded: Callable[[frozenset[str]], bool]
    answers: dict[str, wire.Masking] = field(default_factory=dict)

    def names(self, site: str) -> tuple[str, ...]:
        """Of a site's counts."""
        own = self.answers[site].names
        return (self.terms.metrics or ()) if own is None else own

    @property
    def again(self) -> dict[str, str]:
        """Who could not mask, and why."""
        return {site: told.again for site, told in self.answers.items() if told.again}

    @property
    def wide(self) -> list[str]:
        """For whom a limit was too narrow."""
        return [site for site in self.again if self.answers[site].wide]

    @property
    def before(self) -> frozenset[str]:
        """The sites over which a sum of this very task was opened before a fault; {} if
        none was.

        A site's word is not enough (`_is_confirmed`).
        """
        confirmed = filter(self._is_confirmed, self._claims.values())
        return max(
            confirmed,
            key=lambda sites: (self._support(sites), sorted(sites)),
            default=_NO,
        )

    @property
    def excluded(self) -> dict[str, str]:
        """The sites whose updates cannot be in this sum, each with the reason."""
        before, reasons = self.before, dict[str, str]()
        for site in sorted(self.answers):
            claim = self._claims.get(site)
            if claim not in (None, before, self.answers.keys()):
                reasons[site] = (
                    f"site {site!r} reports that a sum of this task was opened before over "
                    f"{', '.join(sorted(claim))}, which neither the server's record nor these "
                    "sites confirm"
                )
            elif before and site not in before:
                reasons[site] = f"site {site!r} was not in the sum of this task before"
        return reasons

    @property
    def _claims(self) -> dict[str, frozenset[str]]:
        """By site, over which sites it says that a sum of this task was opened."""
        return {
            site: frozenset(told.before)
            for site, told in self.answers.items()
            if told.before
        }

    def _support(self, sites: frozenset[str]) -> int:
        """How many sites say that a sum over these sites was opened."""
        return sum(claim == sites for claim in self._claims.values())

    def _is_confirmed(self, sites: frozenset[str]) -> bool:
        """Whether a sum over these sites may have been opened before.

        The server must have asked for it. It takes `threshold` of its sites to open a
        sum, and each notes it before it answers. So of the sites in the list that are
        here, no more than the rest may know nothing of it.
        """
        if not self.is_recorded(sites):
            return False
        silent = len(sites & self.answers.keys()) - self._support(sites)
        return len(sites) >= self.threshold and silent <= len(sites) - self.threshold

    def fits(self) -> bool:
        """Whether all that answered can be added as they are."""
        names = set(map(frozenset, map(self.names, self.answers)))
        differ = self.terms.metrics is None and len(names) > 1
        return not (self.again or differ or self.excluded)

    def for_all(self) -> wire.Terms:
        """wire.Terms under which all that answered can be added."""
        union = sorted({name for site in self.answers for name in self.names(site)})
        limits = {} if self.wide else self.terms.limits
        return replace(self.terms, metrics=tuple(union), limits=limits)


class SecureSum(Summing):
    """Σ over sites of which the server sees the sum alone. See `privacy.secure_sum`.

    Its parameters must be equal at the sites' `SecureSeal`. Where a sum may leave sites
    out, there is one message more, in which they confirm their list to each other.

    Args:
        sites: The sites' names, in the fixed order.
        job: The declarative job's fingerprint.
        threshold: How many sites a sum must have; see `Parties`.
        record: The file in which the server notes the sums that it opens, for after a
            restart. None keeps them in memory.
    """

    _whole = False  # the last exchange came to its end, so the next may be prepared

    def __init__(
        self,
        sites: Sequence[str],
        *,
        job: str,
        threshold: int | None = None,
        record: Path | None = None,
    ) -> None:
        self._parties, self._job, self._run = Parties(sites, threshold), job, -1
        self._chain: ServerChain  # of that run
        self._record = OpeningRecord(record)
        self.least = self._parties.threshold
        self._metrics: dict[str, tuple[str, ...]] = {}  # by task
        self._limits: dict[str, dict[str, int]] = {}  # by task and tensor
        # that all sites have (`history.Asked`), where all are in each sum
        self._history = b""
        self._paces: dict[str, int | None] = {}  # by task

    def state(self) -> dict[str, Any]:
        """What later sums depend on: limits, the sites' history. JSON values."""
        limits = {task: dict(own) for task, own in self._limits.items()}
        return {"limits": limits, "history": self._history.hex()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a kept state, so that the next sums are rounded as they were."""
        self._limits = {
            task: {name: int(limit) for name, limit in own.items()}
            for task, own in state.get("limits", {}).items()
        }
        self._history = bytes.fromhex(state.get("history", ""))

    def total(self, exchange: Exchange) -> Total:
        """Σ over the sites that took part.

        Raises TrainingError where too few can be added; nothing is opened then.
        """
        for left in reversed(range(ATTEMPTS)):
            try:
                return self._total(exchange)
            except _Spoilt as error:
                if not left:
                    raise TrainingError(str(error)) from error
                exchange.again()
        raise AssertionError("unreachable")

    def _total(self, exchange: Exchange) -> Total:
        task, sites = exchange.request.task, exchange.sites
        self._enough(exchange, len(sites), TrainingError)
        if (run := exchange.request.run) != self._run:
            self._run, self._whole = run, False
            self._chain = ServerChain(self._parties, context_of(self._job, run))
        prepared = set(self._chain.prepared) if self._whole else set()
        self._whole = False
        if not set(sites) <= prepared:
            sites = self._begin(exchange, sites)
        agreed = (
            self._metrics.get(task),
            self._limits.get(task, {}),
            self._paces.get(task),
        )
        terms = wire.Terms(0, (), *agreed, self._history)
        replies = exchange.task(self._asked(terms), sites=sites)
        self._enough(exchange, len(replies), TrainingError)
        told = self._take(exchange, replies, terms)
        for _ in range(AGAIN):
            if told.fits():
                break
            excluded = told.excluded
            for site, reason in excluded.items():
                exchange.refuse(site, reason)
            terms = told.for_all()
            sites = tuple(site for site in told.answers if site not in excluded)
            self._enough(exchange, len(sites), TrainingError)
            sites = self._begin(exchange, sites)
            replies = exchange.stage(
                wire.MASKED, dict.fromkeys(sites, self._asked(terms))
            )
            told = self._take(exchange, replies, terms)
            # the widest are too narrow: so they would be again
            if told.wide and not terms.limits:
                for site in sorted(told.wide, key=self._parties.sites.index):
                    exchange.refuse(site, told.answers.pop(site).again)
                self._enough(exchange, len(told.answers), TrainingError)
        for site, reason in told.again.items():
            exchange.refuse(site, f"site {site!r} could not mask its update: {reason}")
        if away := sorted(told.before - told.answers.keys()):
            raise TrainingError(
                f"{task!r}: a sum of this very task was opened with {', '.join(away)} before the "
                "fault, and is not opened without: resume when that site is there"
            )
        total = self._opened(exchange)
        self._whole = True
        told_of = (name for site in total.included for name in told.names(site))
        metrics = {
            name: total.metrics[name] for name in told_of if name in total.metrics
        }
        self._metrics[task], self._paces[task] = tuple(metrics), slowest(metrics)
        if self.least == len(self._parties.sites):
            self._history = _agreed_history(told.answers, self._history)
        self._limits[task] = limits_after(total)
        return replace(total, metrics=without(metrics))

    # the stages

    def _begin(self, exchange: Exchange, sites: tuple[str, ...]) -> tuple[str, ...]:
        """A fresh exchange: keys, then shares; who is in it."""
        now, number = self._chain.start(), self._chain.number
        asked = wire.packed(wire.Stage(number))
        self._ask(exchange, sites, asked, wire.KEYS, now.add_keys)
        keys = _closed(now.keys)
        asked = wire.packed(wire.Stage(number, keys))
        self._ask(exchange, tuple(keys), asked, wire.SHARES, now.add_shares)
        _closed(now.boxes)
        self._enough(exchange, len(now.roster), _Spoilt)
        return now.roster

    def _asked(self, terms: wire.Terms) -> Attached:
        """What goes to all sites with a task."""
        now = self._chain.now
        terms = replace(terms, number=self._chain.number, roster=now.roster)
        return wire.packed_boxes(terms, now.boxes())

    def _take(
        self, exchange: Exchange, replies: Mapping[str, Reply], terms: wire.Terms
    ) -> _Told:
        """Add masked updates; what each site says of its own."""
        is_recorded = partial(self._record.has, exchange.request)
        told = _Told(terms, self._parties.threshold, is_recorded)
        for site, attached in _given(exchange, replies):
            try:
                _require_only(site, attached, "words")
                answer = wire.read(wire.Masking, attached.facts)
                _require_known_names(site, answer)
                if not answer.again:
                    message = wire.masked_in(answer, attached)
                    _require_own(site, message.site)
                    self._chain.add_masked(message)
                told.answers[site] = answer
            except RefusedError as error:
                exchange.refuse(site, str(error))
        return told

    def _opened(self, exchange: Exchange) -> Total:
        """Close the updates, and open their sum."""
        chain, number = self._chain, self._chain.number
        heard = chain.now.heard
        self._enough(exchange, len(heard), _Spoilt)
        # below the threshold: sites differ, as they will again
        requests, keys = chain.requests()
        opening = survivors = chain.now.survivors
        for site in heard:
            if site not in survivors:
                exchange.refuse(
                    site, f"site {site!r} laid its update out as the others did not"
                )
        self._enough(exchange, len(survivors), TrainingError)
        if self._parties.confirmed:
            asked, add = (
                wire.packed_requests(number, {}, requests),
                chain.now.add_confirm,
            )
            heard = self._ask(exchange, survivors, asked, wire.CONFIRM, add)
            # nobody waits for the others
            opening = tuple(filter(heard.__contains__, survivors))
            requests = chain.requests()[0]
        asked = wire.packed_requests(number, keys, requests)
        self._record.add(exchange.request, survivors)
        self._ask(exchange, opening, asked, wire.UNMASK, chain.add_unmask)
        now = chain.now
        total = _closed(chain.total, exchange.reasons)
        for site, of in now.doubtful:
            logger.warning(
                "site %r or %r: a wrong share of the secret of %r", site, of, of
            )
        return total

    def _ask(
        self,
        exchange: Exchange,
        sites: tuple[str, ...],
        asked: Attached,
        stage: str,
        add: Callable[[Any], None],
    ) -> tuple[str, ...]:
        """One stage; one message that is wrong costs its site the exchange.

        Who answered.
        """
        least = self.least if stage in (wire.CONFIRM, wire.UNMASK) else None
        replies = exchange.stage(stage, dict.fromkeys(sites, asked), least=least)
        for site, attached in _given(exchange, replies):
            try:
                _require_only(site, attached)
                message = wire.read(wire.ANSWERS[stage], attached.facts)
                _require_own(site, message.site)
                add(message)
            except RefusedError as error:
                exchange.refuse(site, str(error))
        return tuple(replies)

    def _enough(
        self, exchange: Exchange, count: int, error: type[TrainingError]
    ) -> None:
        if count < exchange.least:
            reasons = f": {exchange.reasons}" if exchange.reasons else ""
            raise error(
                f"{exchange.request.task!r}: {count} sites can be added under the secure sum, "
                f"{exchange.least} are needed{reasons}; nothing was opened"
            )


def _given(
    exchange: Exchange, replies: Mapping[str, Reply]
) -> Iterator[tuple[str, Attached]]:
    """What the sites that answered attached, in the fixed order."""
    return (
        (site, replies[site].attached) for site in exchange.sites if site in replies
    )


def _closed(close: Callable[[], R], reasons: str = "") -> R:
    """The end of a stage. Too few messages of it are reason to begin afresh."""
    try:
        return close()
    except TrainingError as error:
        raise _Spoilt(f"{error} ({reasons})" if reasons else str(error)) from error


def _agreed_history(answers: Mapping[str, wire.Masking], before: bytes) -> bytes:
    """Return the history that more than half of the sites report after an opened sum.

    All sites that masked for one question have one history, but its masks do not cover
    what a site says of it here. A single site's word would give a site that lost its
    disk a history that fits nobody, and the next sum would fail.

    Args:
        answers: What each site of the sum reported.
        before: The history that is kept where no majority reports one.
    """
    if not answers:
        return before
    counts = Counter(answer.history for answer in answers.values())
    history, number = counts.most_common(1)[0]
    if not history or 2 * number <= len(answers):
        return before
    for site, answer in answers.items():
        if answer.history != history:
            logger.warning(
                "site %r reports another history than most sites of the sum", site
            )
    return history


def _require_known_names(site: str, answer: wire.Masking) -> None:
    """Refuse counts that are too many, or that are named like the engine's own and are
    not."""
    names = answer.names or ()
    if len(names) > MOST_NAMES or sum(map(len, names)) > MOST_LETTERS:
        raise RefusedError(
            f"site {site!r} sent more than {MOST_NAMES:,} counts, or {MOST_LETTERS:,} characters "
            "of their names"
        )
    for name in names:
        if name.startswith(PACE) and name not in PACES:
            raise RefusedError(
                f"site {site!r} sent a count of times with an impossible name"
            )
        if name.startswith(OURS) and name not in PACES:
            raise RefusedError(
                f"site {site!r} sent a count with a name that methods cannot use"
            )


def _require_own(site: str, named: str) -> None:
    if named != site:
        raise RefusedError(
            f"site {site!r} sent a message of the secure sum as {named!r}"
        )


def _require_only(site: str, attached: Attached, *names: str) -> None:
    """What the step needs; how long it may be is the engine's business."""
    if attached.tensors.keys() - set(names):
        raise RefusedError(f"site {site!r} sent more than a message of the secure sum")
