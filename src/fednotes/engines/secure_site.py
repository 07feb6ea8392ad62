"""A site's end of the secure sum: what the engine's host asks of a `Sealer`.

The checked update is masked before it leaves. Where that cannot be done with the keys of this
exchange (the process was started again, a count's name is new, a limit is too narrow), the
site says so, keeps the update in memory, and masks it when the server has begun an exchange
afresh; the task is not done again.

The masks are made for the question (`question.Asked`), so only updates of sites that were asked
the same add up. An update is opened in one exchange at most: this site answers for the newest,
and forgets the update with that. A task that is done again, as after a fault, is opened for the
same sites as before alone (`opened.Opened`). As an exchange takes over half of the sites to
open, no two can be opened over different sites that hold the same update.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fednotes.core.errors import RefusedError, TrainingError
from fednotes.core.tensors import fingerprint
from fednotes.core.update import Tensors, Update
from fednotes.engines import secure_wire as wire
from fednotes.engines.pace import CLASSES
from fednotes.engines.question import Asked, Opened, after
from fednotes.engines.wire import Request
from fednotes.privacy.secure_sum.fixed_point import Layout
from fednotes.privacy.secure_sum.masks import Identity, digest, joined, need_cryptography
from fednotes.privacy.secure_sum.site import REFUSALS, checked_threshold
from fednotes.privacy.secure_sum.sums import Limits, SiteChain, needs_confirmation

Answer = Callable[[Request, Mapping[str, Any]], Tensors]
MOST_LIMITS = 3  # that are tried for one round and task: the last total's, the widest, one more
logger = logging.getLogger("fednotes.engines.secure_site")


def context_of(job: str, run: int) -> bytes:
    """Names all exchanges of one start of the server: numbers begin again in each."""
    return joined("fednotes secure sum", job, run)


@dataclass
class _Kept:
    """The update of the newest task, until it is opened. question: a digest of what was asked."""

    run: int
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

    Whether they are within a limit is told by a refusal and by an answer, so both are counted,
    each of its kind once: the same question again has the same answer. `limits`: digests of
    those that were tried; `refused`: of limits together with the values that were beyond them.
    """

    limits: set[bytes] = field(default_factory=set)
    refused: set[bytes] = field(default_factory=set)


class SecureSeal:
    """One site's part in the secure sum, for the life of its process (`host.Sealer`).

    sites, job, threshold, confirmed: the same at the server and all sites (see `SecureSum`).
    identity: signs this site's keys and checks the others'; None trusts the server to relay them.
    kept: file of the questions that were opened; without one they are forgotten with the process.

    Raises ConfigError for fewer than 3 sites or an impossible threshold, MissingExtra without
    `cryptography`.
    """

    def __init__(
        self,
        site: str,
        sites: Sequence[str],
        *,
        job: str,
        threshold: int | None = None,
        identity: Identity | None = None,
        confirmed: bool | None = None,
        kept: Path | None = None,
    ) -> None:
        need_cryptography()
        self._site, self._sites, self._job = site, tuple(sites), job
        self._threshold = checked_threshold(self._sites, threshold)
        if confirmed is None:
            confirmed = needs_confirmation(len(sites), self._threshold)
        self._identity, self._confirmed = identity, confirmed
        self._opened = Opened(site, kept)
        self._run, self._chain = -1, self._new_chain(-1)
        self._kept: _Kept | None = None
        self._masked_in: tuple[int, bytes] = (-1, b"")  # the newest masked exchange, its question
        self._tried: dict[tuple[int, str], _Tried] = {}  # by round and task, whatever was sent
        self._answered: tuple[int, Tensors] = (-1, {})  # the last stage's number and reply

    @property
    def strict(self) -> bool:
        """Whether every sum is over all sites. Else their histories differ, and each trusts the
        server which of its tasks count (docs/privacy.md says what that is worth)."""
        return self._threshold == len(self._sites)

    def adopted(self, request: Request, asked: Asked) -> bytes | None:
        """The history that this site goes on with in place of its own, which it has lost: that of
        the others, from the terms. None where it has its own.

        Only what happened at this site makes it so: nothing was ever opened here and it has
        trained nothing (a new disk), or its own files were damaged. A server that sends it back
        changes neither.
        """
        lost = self._opened.lost or not (asked.trained or len(self._opened))
        if not self.strict or not lost or not request.attached:
            return None
        told = wire.noted(request.attached).get("history")
        if not isinstance(told, str) or told == asked.history.hex():
            return None
        try:
            return bytes.fromhex(told) or None
        except ValueError as error:
            raise RefusedError("a request of the secure sum has a history that is none") from error

    def lost(self) -> None:
        """What this site kept of the job on its disk was damaged."""
        self._opened.lose()

    def pace(self, request: Request) -> int | None:
        """The class of times that all sites answer in (`pace.Pace`), from the terms."""
        told = None
        with suppress(RefusedError):  # terms that are none
            told = wire.noted(request.attached).get("pace")
        return min(told, CLASSES - 1) if type(told) is int else None

    def stage(self, request: Request) -> Tensors:
        """Answer one of the protocol's own messages; a repeated one gets the same answer.

        Raises RefusedError for what the protocol forbids.
        """
        self._enter(request.run)
        if self._answered[0] == request.number:
            return self._answered[1]
        answers: dict[str, Answer] = {
            wire.KEYS: self._keys,
            wire.SHARES: self._shares,
            wire.MASKED: self._masked,
            wire.CONFIRM: self._confirm,
            wire.UNMASK: self._unmask,
        }
        if request.task not in answers:
            raise RefusedError(f"site {self._site!r} has no task {request.task!r}")
        reply = answers[request.task](request, wire.noted(request.attached))
        self._answered = (request.number, reply)
        return reply

    def seal(self, request: Request, update: Update, question: bytes) -> Tensors:
        """The update under its masks, or why it cannot be masked yet.

        question: a digest of what the site was asked, at other sites too. A request without the
        terms of an exchange (a task that a late site makes up for) gets nothing.
        Raises RefusedError for any other without them, TrainingError for values that no exchange
        can sum.
        """
        self._enter(request.run)
        self._answered = (-1, {})
        self._kept = None
        if not request.attached:
            if not request.preparing:
                raise RefusedError(
                    f"site {self._site!r}: {request.task!r} is asked for outside the secure sum"
                )
            return {}
        note = wire.noted(request.attached)
        round = 0 if request.preparing else request.round
        self._kept = _Kept(request.run, request.number, round, request.task, question, update)
        return self._sealed(self._kept, note, request.attached)

    # the stages

    def _keys(self, request: Request, note: Mapping[str, Any]) -> Tensors:
        message = self._chain.keys(wire.part(note, "number", int))
        return wire.packed({"message": wire.header(message)})

    def _shares(self, request: Request, note: Mapping[str, Any]) -> Tensors:
        message = self._chain.shares(wire.part(note, "number", int), wire.keys_in(note))
        return wire.packed({"message": wire.header(message)})

    def _masked(self, request: Request, note: Mapping[str, Any]) -> Tensors:
        kept = self._kept
        if kept is None or request.counted.get(self._site) != kept.number:
            raise RefusedError(f"site {self._site!r} has no update for the secure sum any more")
        try:
            return self._sealed(kept, note, request.attached)
        except TrainingError as error:  # no limit is wide enough; an answer, for it is final
            return wire.packed({"names": [], "history": "", "again": str(error), "wide": True})

    def _confirm(self, request: Request, note: Mapping[str, Any]) -> Tensors:
        number = wire.part(note, "number", int)
        asked = wire.request_in(note, request.attached, self._site)
        self._opened.require(self._question(number), asked.survivors)
        message = self._chain.confirm(number, asked)
        return wire.packed({"message": wire.header(message)})

    def _unmask(self, request: Request, note: Mapping[str, Any]) -> Tensors:
        number = wire.part(note, "number", int)
        asked = wire.request_in(note, request.attached, self._site)
        question = self._question(number)
        message = self._chain.unmask(number, asked, wire.keys_in(note))
        self._opened.add(question, asked.survivors)
        self._kept = None
        return wire.packed({"message": wire.header(message)})

    def _question(self, number: int) -> bytes:
        """What the update was for that was masked in an exchange. Raises RefusedError."""
        if self._masked_in[0] != number:
            raise RefusedError(
                f"site {self._site!r} has no keys for exchange {number} of the secure sum, or "
                "masked nothing in it: start afresh"
            )
        return self._masked_in[1]

    def _sealed(self, kept: _Kept, note: Mapping[str, Any], attached: Tensors) -> Tensors:
        """The masked update, or `again` with the reason: it can be masked in a fresh exchange."""
        number, names = wire.part(note, "number", int), list(kept.update.metrics)
        metrics = None if note.get("metrics") is None else wire.names_in(note, "metrics")
        told: dict[str, Any] = {"names": None if names == list(metrics or ()) else names}
        told["history"] = after(kept.question).hex()
        if before := self._opened.survivors(kept.question):
            told["before"] = list(before)  # it can be opened for these alone
        if metrics is not None and not set(names) <= set(metrics):
            reason = "counts that the sites did not agree on"
            return wire.packed({**told, "again": reason, "wide": False})
        limits = _limits(note)
        tried, grid = self._try(kept, limits)
        try:
            roster = wire.names_in(note, "roster")
            boxes = wire.boxes_in(attached, roster, self._site)
            message = self._chain.masked(
                number, boxes, kept.update, purpose=kept.purpose, limits=limits, metrics=metrics
            )
        except RefusedError as error:
            return wire.packed({**told, "again": str(error), "wide": False})
        except TrainingError as error:
            logger.warning("%s", error)  # which tensor and what limit: for this site's people alone
            tried.refused.add(digest(grid, _digest(kept.update)))
            if not limits.tensors or len(tried.refused) >= REFUSALS:
                raise self._beyond(kept) from error
            return wire.packed({**told, "again": "values beyond the limits", "wide": True})
        self._masked_in = number, kept.question
        return wire.packed_masked(message, told)

    def _try(self, kept: _Kept, limits: Limits) -> tuple[_Tried, bytes]:
        """Count what is asked of the values' size: what was tried so far, a digest of these limits.

        A limit counts by the grid that comes of it; numbers of 8 bytes have one grid always.
        Raises TrainingError if this says more of the values than the server may know.
        """
        tried = self._tried.setdefault((kept.round, kept.task), _Tried())
        fields = Layout.of(kept.update, len(self._sites), limits=limits).fields
        grid = digest(*(part for item in fields for part in (item.name, item.exponent)))
        if grid not in tried.limits and len(tried.limits) >= MOST_LIMITS:
            raise self._beyond(kept)
        if len(tried.refused) >= REFUSALS:
            raise self._beyond(kept)
        tried.limits.add(grid)
        return tried, grid

    def _beyond(self, kept: _Kept) -> TrainingError:
        """The last word on an update. It names no tensor and no number: the server reads it."""
        self._kept = None
        return TrainingError(
            f"site {self._site!r}: {kept.task!r} has values beyond the limits "
            "of the secure sum, or too many limits were tried; the site's own log names the "
            "tensor: lower the learning rate"
        )

    # runs

    def _enter(self, run: int) -> None:
        """A server that was started again begins afresh; nothing of before is opened any more."""
        if run < self._run:
            raise RefusedError(f"site {self._site!r}: run {run} of the secure sum is over")
        if run > self._run:
            self._run, self._chain = run, self._new_chain(run)
            self._kept, self._answered, self._masked_in = None, (-1, {}), (-1, b"")

    def _new_chain(self, run: int) -> SiteChain:
        return SiteChain(
            self._site,
            self._sites,
            context_of(self._job, run),
            self._threshold,
            identity=self._identity,
            confirmed=self._confirmed,
        )


def _limits(note: Mapping[str, Any]) -> Limits:
    """Powers of two, as their exponents."""
    exponents = wire.part(note, "limits", dict)
    if not all(type(e) is int and abs(e) <= 300 for e in exponents.values()):
        raise RefusedError("a request of the secure sum has limits that are none")
    return Limits(tensors={name: 2.0**exponent for name, exponent in exponents.items()})


def _digest(update: Update) -> bytes:
    """SHA-256 of an update's numbers."""
    counts = repr((float(update.weight), sorted(update.metrics.items())))
    return digest(counts, fingerprint(update.tensors))
