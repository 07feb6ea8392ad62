"""The secure sum of sites that live in this process: the same messages, without a transport.

Nothing is hidden here from whoever runs the process. It shows what a job does under the secure
sum (its rounding, its bytes, its time), with the code that a deployment runs.

The secure sum behind the engine: the server's end (`summing.Summing`).

    task, boxes, terms           →  masked update, keys of the next exchange     the method's task
    survivors, receipts, keys    →  what opens the sum, shares of the next one   "@unmask"

That is all while nothing fails. An exchange that begins afresh has "@keys" and "@shares" before
it. Where a site could not mask its update with the keys of this exchange (it was started
again), with the names of counts that were agreed, or within the limits, an exchange begins
afresh after the task, and sites mask what they have ("@masked"). Where a sum may leave sites
out, survivors first tell each other their list ("@confirm").

The terms, equal for all sites: names of the counts (those of the last sum of this task; None:
each site's own) and limits of the values (from the last total of this task). Both are public.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fednotes.core.errors import RefusedError, TrainingError
from fednotes.core.tensors import nbytes
from fednotes.core.update import Tensors, Total, Update
from fednotes.engines import secure_wire as wire
from fednotes.engines.pace import slowest, without
from fednotes.engines.question import of_call
from fednotes.engines.secure_site import SecureSeal, context_of
from fednotes.engines.summing import Exchange, Replies, Sites, check_update
from fednotes.engines.wire import Reply, Request
from fednotes.privacy.secure_sum.masks import need_cryptography
from fednotes.privacy.secure_sum.site import checked_threshold
from fednotes.privacy.secure_sum.sums import (
    ConfirmMessage,
    KeysMessage,
    Limits,
    ServerChain,
    SharesMessage,
    UnmaskMessage,
    from_wire,
    needs_confirmation,
)

__all__ = ["SecureSeal", "SecureSum"]

ATTEMPTS = 3  # at a sum, if sites are lost while it is opened
AGAIN = 2  # fresh exchanges of updates that sites could not mask at first
logger = logging.getLogger("fednotes.engines.secure_server")
M = TypeVar("M", KeysMessage, SharesMessage, ConfirmMessage, UnmaskMessage)


class _Spoilt(TrainingError):
    """An exchange that came to nothing, though it may succeed if it is begun afresh."""


@dataclass(frozen=True)
class _Terms:
    """How sites lay their updates out, and when they answer. limits: by tensor, the exponent
    of two. pace: the class of the slowest site (`pace.Pace`); None if it is not known."""

    metrics: tuple[str, ...] | None
    limits: Mapping[str, int]
    pace: int | None = None

    def suit(self, told: _Told) -> bool:
        """Whether all that answered can be added as they are."""
        differ = self.metrics is None and len(set(map(frozenset, told.names.values()))) > 1
        return not told.again and not differ and not told.others

    def for_all(self, told: _Told) -> _Terms:
        """Terms under which all that answered can be added."""
        union = sorted({name for names in told.names.values() for name in names})
        return _Terms(tuple(union), {} if told.wide else self.limits, self.pace)


@dataclass
class _Told:
    """What came with the masked updates. names: of each site's counts. again: who could not
    mask, and why; wide: for whom a limit was too narrow. history: what the updates lead to
    (`question.Asked`). before: the sites over which a sum of this very task was opened, before a
    fault: it can be opened for these alone."""

    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    again: dict[str, str] = field(default_factory=dict)
    wide: set[str] = field(default_factory=set)
    history: str = ""
    before: set[str] = field(default_factory=set)

    @property
    def others(self) -> set[str]:
        """Who sent an update though the task was opened without it before."""
        return self.names.keys() - self.before if self.before else set()


class SecureSum:
    """Σ over sites of which the server sees the sum alone. See `privacy.secagg`.

    sites: their names, in the fixed order. job: the declarative job's fingerprint. threshold:
    the fewest sites in a sum, over half of them; None: just over half. confirmed: one message
    more, after which sites open nothing unless `threshold` of them were shown the same list;
    None: wherever that is needed. All four must be equal at the sites' `SecureSeal`.

    Raises ConfigError for fewer than 3 sites or an impossible threshold, MissingExtra without
    `cryptography`.
    """

    secure = True

    def __init__(
        self,
        sites: Sequence[str],
        *,
        job: str,
        threshold: int | None = None,
        confirmed: bool | None = None,
    ) -> None:
        need_cryptography()
        self._sites, self._job = tuple(sites), job
        self.least = checked_threshold(self._sites, threshold)
        if confirmed is None:
            confirmed = needs_confirmation(len(sites), self.least)
        self._confirmed = confirmed
        self._run, self._chain = -1, self._new_chain(-1)
        self._whole = False  # the last exchange came to its end, so the next may be prepared
        self._metrics: dict[str, tuple[str, ...]] = {}  # by task
        self._limits: dict[str, dict[str, int]] = {}  # by task and tensor
        self._history = ""  # that all sites have (`question.Asked`), where all are in each sum
        self._paces: dict[str, int | None] = {}  # by task

    def state(self) -> dict[str, Any]:
        """What later sums depend on: limits, the sites' history. JSON values."""
        limits = {task: dict(own) for task, own in self._limits.items()}
        return {"limits": limits, "history": self._history}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a kept state, so that the next sums are rounded as they were."""
        self._limits = {
            task: {name: int(limit) for name, limit in own.items()}
            for task, own in state.get("limits", {}).items()
        }
        self._history = str(state.get("history", ""))

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
        if exchange.request.run != self._run:
            self._run, self._whole = exchange.request.run, False
            self._chain = self._new_chain(self._run)
        prepared = set(self._chain.prepared) if self._whole else set()
        self._whole = False
        if not set(sites) <= prepared:
            sites = self._begin(exchange, sites)
        terms = _Terms(self._metrics.get(task), self._limits.get(task, {}), self._paces.get(task))
        replies = exchange.task(self._asked(terms), sites=sites)
        self._enough(exchange, len(replies), TrainingError)
        told = self._take(exchange, replies, terms)
        for _ in range(AGAIN):
            if terms.suit(told):
                break
            terms = terms.for_all(told)
            for site in sorted(told.others):
                exchange.refuse(site, f"site {site!r} was not in the sum of this task before")
            sites = tuple(site for site in told.names if site not in told.others)
            sites = self._begin(exchange, sites)
            replies = exchange.stage(wire.MASKED, dict.fromkeys(sites, self._asked(terms)))
            told = self._take(exchange, replies, terms)
            self._leave_out(exchange, terms, told)
        for site, reason in told.again.items():
            exchange.refuse(site, f"site {site!r} could not mask its update: {reason}")
        if away := sorted(told.before - told.names.keys()):
            raise TrainingError(
                f"{task!r}: a sum of this very task was opened with {', '.join(away)} before the "
                "fault, and is not opened without: resume when that site is there"
            )
        total = self._opened(exchange)
        self._whole = True
        told_of = (name for site in total.included for name in told.names[site])
        metrics = {name: total.metrics[name] for name in told_of if name in total.metrics}
        self._metrics[task], self._paces[task] = tuple(metrics), slowest(metrics)
        if self.least == len(self._sites):
            self._history = told.history
        self._limits[task] = {
            name: round(math.log2(limit)) for name, limit in Limits.after(total).tensors.items()
        }
        return replace(total, metrics=without(metrics))

    # the stages

    def _begin(self, exchange: Exchange, sites: tuple[str, ...]) -> tuple[str, ...]:
        """A fresh exchange: keys, then shares; who is in it."""
        now = self._chain.start()
        note: dict[str, Any] = {"number": self._chain.number}
        replies = exchange.stage(wire.KEYS, dict.fromkeys(sites, wire.packed(note)))
        self._add(exchange, replies, KeysMessage, now.add_keys)
        keys = _closed(now.keys)
        note["keys"] = wire.keys_note(keys)
        replies = exchange.stage(wire.SHARES, dict.fromkeys(keys, wire.packed(note)))
        self._add(exchange, replies, SharesMessage, now.add_shares)
        _closed(now.boxes)
        self._enough(exchange, len(now.roster), _Spoilt)
        return now.roster

    def _asked(self, terms: _Terms) -> Tensors:
        """What goes to all sites with a task."""
        roster, boxes = self._chain.now.roster, self._chain.now.boxes()
        note = {
            "number": self._chain.number,
            "roster": list(roster),
            "metrics": None if terms.metrics is None else list(terms.metrics),
            "limits": dict(terms.limits),
            "pace": terms.pace,
            "history": self._history,
        }
        return wire.packed(note, boxes=wire.packed_boxes(boxes, roster))

    def _take(self, exchange: Exchange, replies: Mapping[str, Reply], terms: _Terms) -> _Told:
        """Add masked updates; who could not mask."""
        told = _Told()
        for site in (site for site in exchange.sites if site in replies):
            attached = replies[site].attached
            try:
                _require_only(site, attached, "note", "words")
                note = wire.noted(attached)
                given = note.get("names") is not None
                names = wire.names_in(note, "names") if given else terms.metrics or ()
                if "again" in note:
                    told.wide |= {site} if wire.part(note, "wide", bool) else set()
                    told.again[site] = wire.part(note, "again", str)
                else:
                    message = wire.masked_in(note, attached)
                    _require_own(site, message.site)
                    self._chain.add_masked(message)
                told.history = wire.part(note, "history", str) or told.history
                if "before" in note:
                    told.before |= set(wire.names_in(note, "before"))
                told.names[site] = names
            except RefusedError as error:
                exchange.refuse(site, str(error))
        return told

    def _leave_out(self, exchange: Exchange, terms: _Terms, told: _Told) -> None:
        """Give up those that the widest limits are too narrow for: so they would be again."""
        if terms.limits or not told.wide:
            return
        for site in sorted(told.wide, key=self._sites.index):
            exchange.refuse(site, told.again.pop(site))
            del told.names[site]
        told.wide.clear()
        self._enough(exchange, len(told.names), TrainingError)

    def _opened(self, exchange: Exchange) -> Total:
        """Close the updates, and open their sum."""
        chain = self._chain
        heard = chain.now.heard
        self._enough(exchange, len(heard), _Spoilt)
        requests, keys = chain.requests()  # below the threshold: sites differ, as they will again
        survivors = chain.now.survivors
        for site in heard:
            if site not in survivors:
                exchange.refuse(site, f"site {site!r} laid its update out as the others did not")
        self._enough(exchange, len(survivors), TrainingError)
        note: dict[str, Any] = {"number": chain.number}
        opening = survivors
        if self._confirmed:
            asked = dict.fromkeys(survivors, wire.packed_requests(note, requests))
            replies = exchange.stage(wire.CONFIRM, asked, least=self.least)
            self._add(exchange, replies, ConfirmMessage, chain.now.add_confirm)
            opening = tuple(filter(replies.__contains__, survivors))  # nobody waits for the others
            requests = chain.requests()[0]
        note["keys"] = wire.keys_note(keys)
        asked = dict.fromkeys(opening, wire.packed_requests(note, requests))
        replies = exchange.stage(wire.UNMASK, asked, least=self.least)
        self._add(exchange, replies, UnmaskMessage, chain.add_unmask)
        now = chain.now
        total = _closed(chain.total, exchange.reasons)
        for site, of in now.doubtful:
            logger.warning("site %r or %r: a wrong share of the secret of %r", site, of, of)
        return total

    def _add(
        self,
        exchange: Exchange,
        replies: Mapping[str, Reply],
        kind: type[M],
        add: Callable[[M], None],
    ) -> None:
        """Take the messages of a stage; one that is wrong costs its site the exchange."""
        for site in (site for site in exchange.sites if site in replies):
            try:
                _require_only(site, replies[site].attached, "note")
                note = wire.noted(replies[site].attached)
                message = from_wire(kind, wire.part(note, "message", dict))
                _require_own(site, message.site)
                add(message)
            except RefusedError as error:
                exchange.refuse(site, str(error))

    def _enough(self, exchange: Exchange, count: int, error: type[TrainingError]) -> None:
        if count < exchange.least:
            reasons = f": {exchange.reasons}" if exchange.reasons else ""
            raise error(
                f"{exchange.request.task!r}: {count} sites can be added under the secure sum, "
                f"{exchange.least} are needed{reasons}; nothing was opened"
            )

    def _new_chain(self, run: int) -> ServerChain:
        context = context_of(self._job, run)
        return ServerChain(self._sites, context, self.least, confirmed=self._confirmed)


R = TypeVar("R")


def _closed(close: Callable[[], R], reasons: str = "") -> R:
    """The end of a stage. Too few messages of it are reason to begin afresh."""
    try:
        return close()
    except TrainingError as error:
        raise _Spoilt(f"{error} ({reasons})" if reasons else str(error)) from error


def _require_own(site: str, named: str) -> None:
    if named != site:
        raise RefusedError(f"site {site!r} sent a message of the secure sum as {named!r}")


def _require_only(site: str, attached: Tensors, *names: str) -> None:
    """What the step needs; how long it may be is the engine's business."""
    if attached.keys() - set(names):
        raise RefusedError(f"site {site!r} sent more than a message of the secure sum")


JOB = "in this process"


class SecureCalls:
    """Sums over `sites`. bytes_up, bytes_down: of the protocol's messages so far.

    Raises ConfigError for fewer than 3 sites, MissingExtra without `cryptography`.
    """

    def __init__(self, sites: Sequence[str]) -> None:
        self.sites = tuple(sites)
        least = len(self.sites)  # nothing is lost on the way; so it is in a job that needs all
        self.summing = SecureSum(self.sites, job=JOB, threshold=least)
        self.seals = {
            site: SecureSeal(site, self.sites, job=JOB, threshold=least) for site in self.sites
        }
        self.number = self.bytes_up = self.bytes_down = 0

    def total(
        self, task: str, tensors: Tensors, options: Mapping[str, Any], call: Callable[[str], Update]
    ) -> Total:
        """Σ over the sites of what `call` returns for each; they are told the same."""
        request = Request(JOB, 1, 0, task, round=self.next_number())  # each sum has its own
        question = of_call(task, tensors, sorted(options.items()))
        return self.summing.total(_Exchange(self, request, call, question))

    def next_number(self) -> int:
        """Each message has its own."""
        self.number += 1
        return self.number


@dataclass
class _Exchange:
    """One task of a method (`summing.Exchange`)."""

    calls: SecureCalls
    request: Request
    call: Callable[[str], Update]
    question: bytes
    numbers: dict[str, int] = field(default_factory=dict)
    reasons: str = ""

    @property
    def sites(self) -> tuple[str, ...]:
        """All of them."""
        return self.calls.sites

    @property
    def least(self) -> int:
        """Nothing can be lost on the way."""
        return len(self.sites)

    def task(
        self, attached: Tensors | None = None, *, retry: bool = True, sites: Sites = None
    ) -> Replies:
        """Call the sites in turn; an error of theirs passes."""
        request = self._request(self.request.task, attached or {})
        replies = {}
        for site in self.sites:
            update = self.call(site)
            check_update(update, site)
            sealed = self.calls.seals[site].seal(request, update, self.question)
            replies[site] = self._reply(request, site, sealed)
        self.numbers = dict.fromkeys(self.sites, request.number)
        return replies

    def stage(
        self, name: str, attached: Mapping[str, Tensors], *, least: int | None = None
    ) -> Replies:
        """One of the protocol's messages."""
        blank, replies = self._request(name, {}), {}
        for site, own in attached.items():
            request = replace(blank, attached=own)
            replies[site] = self._reply(request, site, self.calls.seals[site].stage(request))
        return replies

    def refuse(self, site: str, reason: str) -> None:
        """Nobody is left out here."""
        raise TrainingError(reason)

    def again(self) -> None:
        """Nothing to forget."""

    def _request(self, task: str, attached: Tensors) -> Request:
        number = self.calls.next_number()
        return replace(
            self.request, number=number, task=task, counted=self.numbers, attached=attached
        )

    def _reply(self, request: Request, site: str, attached: Tensors) -> Reply:
        self.calls.bytes_down += nbytes(request.attached)
        self.calls.bytes_up += nbytes(attached)
        return Reply(JOB, 1, request.number, site, Update(), attached=attached)
