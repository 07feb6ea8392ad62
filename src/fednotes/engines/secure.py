"""The engine's interface to the secure sum: the server's side and a site's side.

Without failures, an exchange takes two messages to each site:

    request                                    reply
    task, boxes, terms                         masked update, keys of the next exchange
    "@unmask": survivors, receipts, keys       what opens the sum, the next shares

In a new exchange, "@keys" and "@shares" precede these. A site may be unable to mask its
update with the keys of this exchange (because it was restarted), with the agreed names
of counts, or within the limits. It then keeps the update in memory. A new exchange
begins after the task, and sites mask the updates that they have kept ("@masked"). If a
sum may leave sites out, the survivors first confirm their list to each other
("@confirm").

The terms are public and equal for all sites: the names of the counts (from the last sum
of this task; None stands for each site's own names) and the limits of the values
(from the last total of this task).

The masks are derived from the question (`history.QuestionHistory`), so only updates for
the same question can be added. An update is opened in at most one exchange: a site
answers for its newest exchange and then deletes the update. A task that is repeated
after a fault is opened only for the same sites as before (`history.OpenedSums`).
Opening an exchange takes more than half of the sites, so no two exchanges over
different sites that hold the same update can be opened.

If the sites of each round are drawn, an exchange is among the sites that its request
names, and takes more than half of these. A site masks its update for a question for
one such list only (`history.NamedSites`). Otherwise a server could name another list
for the same question and open both sums, whose difference would be the updates of the
few sites in one list alone.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fednotes.core.cleaning import LINE
from fednotes.core.errors import ConfigError, RefusedError, TrainingError
from fednotes.core.messages import OURS, Attached, Reply, Request
from fednotes.core.tensors import fingerprint_tensors
from fednotes.core.update import Total, Update
from fednotes.engines.answer_times import (
    CLASSES,
    PACE,
    PACES,
    find_slowest_class,
    remove_classes,
)
from fednotes.engines.history import (
    NamedSites,
    OpenedSums,
    OpeningRecord,
    QuestionHistory,
    compute_history,
)
from fednotes.engines.summing import MOST_METRICS, Exchange, Summing
from fednotes.privacy.secure_sum import Parties
from fednotes.privacy.secure_sum import messages as wire
from fednotes.privacy.secure_sum.crypto import Identity, hash_parts, join_parts
from fednotes.privacy.secure_sum.fixed_point import BITS, SumLayout, compute_limits
from fednotes.privacy.secure_sum.server import ServerChain
from fednotes.privacy.secure_sum.site import REFUSALS, LayoutOptions, SiteChain

MOST_NAMES = MOST_METRICS + CLASSES  # maximum number of one site's counts
# Maximum length of all their names: the names that sites agree on must fit into one
# header.
MOST_LETTERS = 2**19
# Maximum number of limits tried for one round and task: the limit from the last total,
# the widest one, and one more.
MOST_LIMITS = 3
ATTEMPTS = 3  # attempts at a sum, if sites are lost while it is opened
AGAIN = 2  # new exchanges for updates that sites could not mask at first
NAMED_SITES = "named-sites"  # file beside the record of opened sums
_NO: frozenset[str] = frozenset()
R = TypeVar("R")
logger = logging.getLogger(__name__)


# ---- a site's side -------------------------------------------------------------------


def make_context(job: str, server_start: int) -> bytes:
    """Return the context of all exchanges of one start of the server."""
    return join_parts("fednotes secure sum", job, server_start)


class _PartiesOfRequests:
    """Finds the parties of a request's sum.

    Args:
        sites: The names of all sites; see `Parties`.
        threshold: Minimum number of sites in a sum over all sites; see `Parties`.
        threshold_of_drawn: Returns the threshold of a sum over some number of sites, if
            the sites of each round are drawn. A request then names the sites of its
            sum. None if every sum is over all sites.
    """

    def __init__(
        self,
        sites: Sequence[str],
        threshold: int | None,
        threshold_of_drawn: Callable[[int], int] | None,
    ) -> None:
        self.of_all = Parties(sites, threshold)
        self._threshold_of_drawn = threshold_of_drawn

    @property
    def are_drawn(self) -> bool:
        """Whether the sites of each round are drawn."""
        return self._threshold_of_drawn is not None

    @property
    def strict(self) -> bool:
        """Whether every sum is over all sites."""
        needs_all = self.of_all.threshold == len(self.of_all.sites)
        return needs_all and not self.are_drawn

    def find_threshold(self, num_sites: int) -> int:
        """Return the threshold of a sum over this number of sites."""
        if self._threshold_of_drawn is None:
            return self.of_all.threshold
        return self._threshold_of_drawn(num_sites)

    def find(self, request: Request) -> Parties:
        """Return the parties of the sum of a request.

        Raises:
            RefusedError: The request names too few sites for a secure sum.
        """
        if self._threshold_of_drawn is None:
            return self.of_all
        all_sites = self.of_all.sites
        named_sites = [site for site in all_sites if site in request.counted]
        try:
            return Parties(named_sites, self.find_threshold(len(named_sites)))
        except ConfigError as error:
            raise RefusedError(str(error)) from error


@dataclass
class _Pending:
    """The update of the newest task, until it is opened.

    Attributes:
        number: Number of its request.
        round: Its round.
        task: Its task.
        question: Digest of the question that it answers.
        update: The update.
        parties: The sites in whose sum the update may be.
    """

    number: int
    round: int
    task: str
    question: bytes
    update: Update
    parties: Parties

    @property
    def purpose(self) -> str:
        """The purpose that its masks are derived from."""
        return f"{self.round} {self.task} {self.question.hex()}"


@dataclass
class _Tried:
    """The server's knowledge of the magnitude of values in one round and task.

    Refusals and answers both reveal whether values are within a limit, so both are
    counted. Repeated ones count once, since they reveal nothing new.

    Attributes:
        limits: Digests of the limits that were tried.
        refused: Digests of limits together with the values that exceeded them.
    """

    limits: set[bytes] = field(default_factory=set)
    refused: set[bytes] = field(default_factory=set)


class _MaskedQuestion(NamedTuple):
    """The newest exchange with a masked update.

    Attributes:
        exchange: Its number; -1 for none.
        question: The question of the update.
    """

    exchange: int
    question: bytes


class _StageAnswer(NamedTuple):
    """The answer to the last message of the protocol.

    Attributes:
        number: Number of the request; -1 for none.
        attached: The answer.
    """

    number: int
    attached: Attached


class SecureSeal:
    """One site's part in the secure sum of one job, for the lifetime of its process.

    Args:
        site: The site's name.
        sites: The names of all sites; see `Parties`.
        job: Fingerprint of the job's table.
        threshold: Minimum number of sites in a sum; see `Parties`.
        threshold_of_drawn: Returns the minimum number of sites in a sum over the sites
            that a request names, from their number, if the sites of each round are
            drawn; None if every sum is over all sites.
        identity: Signs this site's keys and checks those of the other sites; with None,
            the server is trusted to relay them.
        record: File of the questions whose sums were opened; None keeps them only as
            long as the process runs.
    """

    def __init__(
        self,
        site: str,
        sites: Sequence[str],
        *,
        job: str,
        threshold: int | None = None,
        threshold_of_drawn: Callable[[int], int] | None = None,
        identity: Identity | None = None,
        record: Path | None = None,
    ) -> None:
        self._site = site
        self._identity = identity
        self._requests = _PartiesOfRequests(sites, threshold, threshold_of_drawn)
        self._parties = self._requests.of_all
        self._job = job
        self._opened = OpenedSums(site, record)
        self._named_sites = NamedSites(site, record and record.with_name(NAMED_SITES))
        self._server_start = -1
        self._chain: SiteChain  # the chain that belongs to `_server_start`
        self._pending: _Pending | None = None
        # The question that was masked last: in its exchange, only its sum is opened.
        self._newest_mask = _MaskedQuestion(-1, b"")
        self._tried: dict[tuple[int, str], _Tried] = {}  # by round and task
        self._last_answer = _StageAnswer(-1, Attached())

    @property
    def strict(self) -> bool:
        """Whether every sum is over all sites.

        Otherwise the sites' histories differ, and each site trusts the server as to
        which of its tasks count; docs/privacy.md explains the consequences.
        """
        return self._requests.strict

    def find_history_to_adopt(
        self, request: Request, asked: QuestionHistory
    ) -> bytes | None:
        """Return the other sites' history, if this site lost its own and must adopt it.

        Only events at this site count as a loss: it has opened and trained nothing (a
        new disk), or its own files were damaged. A server that sends the site back
        causes neither.

        Returns:
            The history in the terms of the request; None if the site has its own.
        """
        has_done_nothing = not asked.trained and not len(self._opened)
        has_lost_history = self._opened.has_lost_files or has_done_nothing
        if not self.strict or not has_lost_history or not request.attached.facts:
            return None
        history = wire.read_message(wire.Terms, request.attached.facts).history
        is_new = history not in (b"", asked.history)
        return history if is_new else None

    def record_loss(self) -> None:
        """Record that this site's stored files for the job were damaged."""
        self._opened.record_loss()

    def read_pace(self, request: Request) -> int | None:
        """Read the class of times in which all sites answer from a request's terms."""
        with suppress(RefusedError):  # the terms cannot be read
            pace = wire.read_message(wire.Terms, request.attached.facts).pace
            return None if pace is None else min(pace, CLASSES - 1)
        return None

    def answer_stage(self, request: Request) -> Attached:
        """Answer one of the protocol's own messages.

        A repeated message gets the same answer.

        Raises:
            RefusedError: The protocol forbids it.
        """
        self._begin(request.server_start)
        if self._last_answer.number != request.number:
            attached = self._answer(request)
            self._last_answer = _StageAnswer(request.number, attached)
        return self._last_answer.attached

    def seal(self, request: Request, update: Update, question: bytes) -> Attached:
        """Return the masked update, or the reason why it cannot be masked yet.

        A task that a late site catches up on has no terms; its update is not sent.

        Args:
            request: The request of the task.
            update: The update.
            question: Digest of the question, equal at all sites.

        Raises:
            RefusedError: The request has no terms, and no late site catches up with it.
            TrainingError: No exchange can sum these values.
        """
        self._begin(request.server_start)
        self._last_answer = _StageAnswer(-1, Attached())
        self._pending = None
        if not request.attached.facts:
            if not request.preparing:
                raise RefusedError(
                    f"site {self._site!r}: task {request.task!r} was requested "
                    "outside the secure sum"
                )
            return Attached()
        terms = wire.read_message(wire.Terms, request.attached.facts)
        round = 0 if request.preparing else request.round
        parties = self._requests.find(request)
        if self._requests.are_drawn:
            self._named_sites.add(question, parties.sites)
        self._pending = _Pending(
            number=request.number,
            round=round,
            task=request.task,
            question=question,
            update=update,
            parties=parties,
        )
        return self._mask(self._pending, terms, request.attached)

    def _answer(self, request: Request) -> Attached:
        """Return a new answer to one of the protocol's messages; see `answer_stage`."""
        attached = request.attached
        if request.task == wire.MASKED:
            return self._mask_again(request)
        if request.task not in wire.ANSWERS:
            raise RefusedError(f"site {self._site!r} has no task {request.task!r}")
        stage = wire.read_message(wire.Stage, attached.facts)
        if request.task == wire.KEYS:
            parties = self._requests.find(request)
            return wire.pack(self._chain.make_keys(stage.number, parties))
        if request.task == wire.SHARES:
            return wire.pack(
                self._chain.find_exchange(stage.number).make_shares(stage.keys)
            )
        opening = wire.read_unmask_request(stage, attached, self._site)
        question = self._find_question(stage.number)
        if request.task == wire.CONFIRM:
            self._opened.require(question, opening.survivors)
            return wire.pack(self._chain.find_exchange(stage.number).confirm(opening))

        # The remaining message, `wire.UNMASK`: the server opens the sum.
        message = self._chain.unmask(stage.number, opening, stage.keys)
        # The sum is recorded before the shares leave: another sum of the same
        # question may be opened only over the same sites.
        self._opened.add(question, opening.survivors)
        self._pending = None
        return wire.pack(message)

    def _mask_again(self, request: Request) -> Attached:
        """Mask the pending update in a new exchange.

        Raises:
            RefusedError: The site no longer has the update.
        """
        pending = self._pending
        if pending is None or request.counted.get(self._site) != pending.number:
            raise RefusedError(
                f"site {self._site!r} no longer has an update for the secure sum"
            )
        terms = wire.read_message(wire.Terms, request.attached.facts)
        try:
            return self._mask(pending, terms, request.attached)
        except TrainingError as error:
            # No limit is wide enough. This is an answer, because it is final.
            return wire.pack(wire.Masking((), b"", again=str(error), wide=True))

    def _find_question(self, number: int) -> bytes:
        """Return the question of the update that was masked in an exchange.

        Raises:
            RefusedError: No update was masked in it.
        """
        if self._newest_mask.exchange != number:
            raise RefusedError(
                f"site {self._site!r} has no keys for exchange {number} of the secure "
                "sum, or sent no masked update in it: start a new exchange"
            )
        return self._newest_mask.question

    def _mask(
        self, pending: _Pending, terms: wire.Terms, attached: Attached
    ) -> Attached:
        """Return the masked update, or a request for a new exchange.

        The answer asks for a new exchange if the site's counts are not those agreed on,
        if this exchange cannot be used (`again`), or if values exceed the limits
        (`wide`).

        Raises:
            RefusedError: The terms have impossible limits.
            TrainingError: The values are beyond the widest limits, or too many limits
                were tried; the update is dropped (`_give_up`).
        """
        masking = self._start_masking(pending, terms)
        names = pending.update.metrics.keys()
        if terms.metrics is not None and not names <= set(terms.metrics):
            return wire.pack(
                replace(masking, again="counts that the sites did not agree on")
            )
        # The server chose the limits; each is the exponent of a power of two.
        if not all(abs(exponent) <= BITS for exponent in terms.limits.values()):
            raise RefusedError("a request of the secure sum has impossible limits")

        has_widest_limits = not terms.limits  # terms without limits have the widest
        grid = self._digest_grid(pending, terms.limits)
        tries = self._count_try(pending, grid)
        try:
            message = self._mask_within_limits(pending, terms, attached)
        except RefusedError as error:
            # This exchange cannot be used, but a new one can.
            return wire.pack(replace(masking, again=str(error)))
        except TrainingError as error:
            # The tensor and the limit are only for the staff of this site.
            logger.warning("%s", error)
            # The same values beyond the same limits count once, because another
            # refusal of them reveals nothing new.
            tries.refused.add(hash_parts(grid, _hash_update(pending.update)))
            if has_widest_limits or len(tries.refused) >= REFUSALS:
                raise self._give_up(pending) from error
            return wire.pack(
                replace(masking, again="values beyond the limits", wide=True)
            )
        self._newest_mask = _MaskedQuestion(terms.number, pending.question)
        return wire.pack_masked(masking, message)

    def _start_masking(self, pending: _Pending, terms: wire.Terms) -> wire.Masking:
        """Return the fields that an answer has with or without a masked update.

        These are the names of the update's counts (None if they are those of the
        terms), the history that ends with its question, and the sites over whose
        updates this question's sum was opened before.
        """
        names = tuple(pending.update.metrics)
        has_names_of_terms = names == (terms.metrics or ())
        return wire.Masking(
            names=None if has_names_of_terms else names,
            history=compute_history(pending.question),
            before=self._opened.find_survivors(pending.question),
        )

    def _mask_within_limits(
        self, pending: _Pending, terms: wire.Terms, attached: Attached
    ) -> wire.MaskedMessage:
        """Return the update, masked with the keys of the exchange.

        Raises:
            RefusedError: This site cannot mask it in this exchange.
            TrainingError: Its values are beyond the limits of the terms.
        """
        self._chain.find_exchange(terms.number).require_parties(pending.parties)
        boxes = wire.read_boxes(attached, terms.roster, self._site)
        layout = LayoutOptions(
            purpose=pending.purpose, limits=terms.limits, metrics=terms.metrics
        )
        return self._chain.mask_update(terms.number, boxes, pending.update, **layout)

    def _digest_grid(self, pending: _Pending, limits: Mapping[str, int]) -> bytes:
        """Return a digest of an update's fixed-point grid, the exponent of each part.

        Limits with the same grid ask the same question about the values. For example,
        the exponent of integers does not depend on the limit.
        """
        num_sites = len(pending.parties.sites)
        layout = SumLayout.of(pending.update, num_sites, limits=limits)
        parts: list[str | int] = []
        for item in layout.fields:
            parts += [item.name, item.exponent]
        return hash_parts(*parts)

    def _count_try(self, pending: _Pending, grid: bytes) -> _Tried:
        """Count a question about the magnitude of the values.

        Args:
            pending: The update.
            grid: Digest of the grid; limits with the same grid count as one question.

        Returns:
            The questions so far, including this one.

        Raises:
            TrainingError: The answer would reveal too much about the values to the
                server.
        """
        tried = self._tried.setdefault((pending.round, pending.task), _Tried())
        is_new = grid not in tried.limits
        has_too_many = is_new and len(tried.limits) >= MOST_LIMITS
        if has_too_many or len(tried.refused) >= REFUSALS:
            raise self._give_up(pending)
        tried.limits.add(grid)
        return tried

    def _give_up(self, pending: _Pending) -> TrainingError:
        """Drop an update and return the error for the server.

        It names no tensor and no number, because the server reads it.
        """
        self._pending = None
        return TrainingError(
            f"site {self._site!r}: {pending.task!r} has values beyond the limits of "
            "the secure sum, or too many limits were tried; the site's own log names "
            "the tensor: lower the learning rate"
        )

    def _begin(self, server_start: int) -> None:
        """Begin a new chain if the server was restarted.

        Each start has new numbers and keys, and no sum of an earlier one is opened.

        Raises:
            RefusedError: The server has been restarted since the start in the request.
        """
        if server_start < self._server_start:
            raise RefusedError(
                f"site {self._site!r}: run {server_start} of the secure sum has ended"
            )
        if server_start > self._server_start:
            self._server_start = server_start
            context = make_context(self._job, server_start)
            self._chain = SiteChain(self._site, self._parties, context, self._identity)
            self._pending = None
            self._last_answer = _StageAnswer(-1, Attached())
            self._newest_mask = _MaskedQuestion(-1, b"")


def _hash_update(update: Update) -> bytes:
    """Return the SHA-256 of an update's values."""
    counts = repr((float(update.weight), sorted(update.metrics.items())))
    return hash_parts(counts, fingerprint_tensors(update.tensors))


# ---- the server's side ---------------------------------------------------------------


class _ExchangeFailed(TrainingError):
    """An exchange failed; a new one may succeed."""


@dataclass
class _MaskingReplies:
    """The sites' replies about their updates under one set of terms.

    Attributes:
        terms: The terms.
        threshold: Number of sites that it takes to open a sum.
        is_recorded: Returns whether the server has asked to open this sum over these
            sites.
        by_site: The masked update of each site, or the reason why it has none.
    """

    terms: wire.Terms
    threshold: int
    is_recorded: Callable[[frozenset[str]], bool]
    by_site: dict[str, wire.Masking] = field(default_factory=dict)

    def list_names(self, site: str) -> tuple[str, ...]:
        """Return the names of a site's counts."""
        names = self.by_site[site].names
        if names is None:  # those of the terms
            return self.terms.metrics or ()
        return names

    @property
    def mask_failures(self) -> dict[str, str]:
        """The sites that could not mask their update, each with the reason."""
        return {
            site: masking.again
            for site, masking in self.by_site.items()
            if masking.again
        }

    @property
    def sites_beyond_limits(self) -> list[str]:
        """The sites that could not mask their update because a limit was too narrow."""
        return [site for site in self.mask_failures if self.by_site[site].wide]

    @property
    def opened_sites(self) -> frozenset[str]:
        """The sites over which this same sum was opened before a fault; {} if none.

        One site's claim is not enough; see `_is_confirmed`.
        """
        confirmed = [
            sites for sites in self._claims.values() if self._is_confirmed(sites)
        ]
        return max(
            confirmed,
            key=lambda sites: (self._count_claims(sites), sorted(sites)),
            default=_NO,
        )

    @property
    def exclusions(self) -> dict[str, str]:
        """The sites whose updates cannot be in this sum, each with the reason."""
        opened_sites = self.opened_sites
        reasons: dict[str, str] = {}
        for site in sorted(self.by_site):
            claim = self._claims.get(site)
            if claim not in (None, opened_sites, self.by_site.keys()):
                reasons[site] = (
                    f"site {site!r} reports that a sum of this task was opened before "
                    f"over {', '.join(sorted(claim))}, which neither the server's "
                    "record nor these sites confirm"
                )
            elif opened_sites and site not in opened_sites:
                reasons[site] = f"site {site!r} was not in the sum of this task before"
        return reasons

    @property
    def _claims(self) -> dict[str, frozenset[str]]:
        """The sites over which this sum was opened, as each site claims."""
        return {
            site: frozenset(masking.before)
            for site, masking in self.by_site.items()
            if masking.before
        }

    def _count_claims(self, sites: frozenset[str]) -> int:
        """Return how many sites claim that a sum over these sites was opened."""
        return sum(claim == sites for claim in self._claims.values())

    def _is_confirmed(self, sites: frozenset[str]) -> bool:
        """Return whether a sum over these sites may have been opened before.

        The server must have asked for it. Opening a sum takes `threshold` of its sites,
        and each of them records it before it answers. So only the other sites of the
        sum may have no record of it.
        """
        if not self.is_recorded(sites) or len(sites) < self.threshold:
            return False
        num_replies = len(sites & self.by_site.keys())
        without_record = num_replies - self._count_claims(sites)
        return without_record <= len(sites) - self.threshold

    def can_be_added(self) -> bool:
        """Return whether all updates can be added as the sites masked them."""
        if self.mask_failures or self.exclusions:
            return False
        if self.terms.metrics is not None:  # the sites agreed on the names of counts
            return True
        names = {frozenset(self.list_names(site)) for site in self.by_site}
        return len(names) <= 1

    def widen_terms(self) -> wire.Terms:
        """Return terms that allow adding the updates of all sites that answered."""
        names = {name for site in self.by_site for name in self.list_names(site)}
        limits = {} if self.sites_beyond_limits else self.terms.limits
        return replace(self.terms, metrics=tuple(sorted(names)), limits=limits)


class SecureSum(Summing):
    """A sum of which the server sees only the total; see `privacy.secure_sum`.

    The parameters must equal those of the sites' `SecureSeal`. If a sum may leave sites
    out, the sites confirm their list to each other in one further message.

    Args:
        sites: The sites' names, in the fixed order.
        job: Fingerprint of the job's table.
        threshold: Minimum number of sites in a sum; see `Parties`.
        threshold_of_drawn: As in `SecureSeal`.
        record: The file in which the server records the sums that it opens, for use
            after a restart. None keeps them in memory.
    """

    def __init__(
        self,
        sites: Sequence[str],
        *,
        job: str,
        threshold: int | None = None,
        threshold_of_drawn: Callable[[int], int] | None = None,
        record: Path | None = None,
    ) -> None:
        self._requests = _PartiesOfRequests(sites, threshold, threshold_of_drawn)
        self._parties = self._requests.of_all  # of the current sum
        self._job = job
        self._server_start = -1
        self._chain: ServerChain  # the chain that belongs to `_server_start`
        # Whether the last exchange was completed, which prepares the next one.
        self._is_prepared = False
        self._record = OpeningRecord(record)
        self.least = self._parties.threshold
        self._metrics: dict[str, tuple[str, ...]] = {}  # by task
        self._limits: dict[str, dict[str, int]] = {}  # by task and tensor
        # The history of all sites (`history.QuestionHistory`), if all are in each sum.
        self._history = b""
        self._paces: dict[str, int | None] = {}  # by task

    def find_threshold(self, num_sites: int) -> int:
        """Return the minimum number of sites in a sum over this number of sites."""
        return self._requests.find_threshold(num_sites)

    def state(self) -> dict[str, Any]:
        """Return the state that later sums depend on: limits and the sites' history."""
        limits = {task: dict(by_tensor) for task, by_tensor in self._limits.items()}
        return {"limits": limits, "history": self._history.hex()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Return to an earlier state, so that later sums are rounded as before."""
        self._limits = {
            task: {name: int(limit) for name, limit in by_tensor.items()}
            for task, by_tensor in state.get("limits", {}).items()
        }
        self._history = bytes.fromhex(state.get("history", ""))

    def sum_updates(self, exchange: Exchange) -> Total:
        """Run a request and return the sum over the sites that took part.

        Raises:
            TrainingError: Too few updates can be added; nothing is opened.
        """
        self._parties = self._requests.find(exchange.request)
        failed_attempts = 0
        while True:
            try:
                return self._attempt(exchange)
            except _ExchangeFailed as error:
                failed_attempts += 1
                if failed_attempts == ATTEMPTS:
                    raise TrainingError(str(error)) from error
                exchange.discard_replies()

    def _attempt(self, exchange: Exchange) -> Total:
        """Run the method's task, have the updates masked, and open their sum.

        Raises:
            _ExchangeFailed: Another attempt may succeed.
            TrainingError: Too few updates can be added.
        """
        collected = self._run_task(exchange)
        for _ in range(AGAIN):
            if collected.can_be_added():
                break
            collected = self._mask_again(exchange, collected)

        for site, reason in collected.mask_failures.items():
            exchange.refuse(site, f"site {site!r} could not mask its update: {reason}")
        absent_sites = sorted(collected.opened_sites - collected.by_site.keys())
        if absent_sites:
            raise TrainingError(
                f"{exchange.request.task!r}: a sum of this task was opened with "
                f"{', '.join(absent_sites)} before the fault, and cannot be opened "
                "without them: resume when all of these sites are connected"
            )

        total = self._open(exchange)
        self._is_prepared = True
        return self._finish(exchange, collected, total)

    def _run_task(self, exchange: Exchange) -> _MaskingReplies:
        """Run the method's task at the sites; return their answers, with the updates.

        The terms are those of the last sum of this task.
        """
        task = exchange.request.task
        sites = self._find_ready_sites(exchange)
        terms = wire.Terms(
            number=0,  # `_attach` puts in the number and the roster of the exchange
            roster=(),
            metrics=self._metrics.get(task),
            limits=self._limits.get(task, {}),
            pace=self._paces.get(task),
            history=self._history,
        )
        replies = exchange.run_task(self._attach(terms), sites=sites)
        self._require_enough(exchange, len(replies), TrainingError)
        return self._receive(exchange, replies, terms)

    def _find_ready_sites(self, exchange: Exchange) -> tuple[str, ...]:
        """Return the sites that have keys for this exchange; begin it if necessary."""
        sites = exchange.sites
        self._require_enough(exchange, len(sites), TrainingError)
        server_start = exchange.request.server_start
        if server_start != self._server_start:
            self._server_start = server_start
            self._is_prepared = False
            self._chain = ServerChain(
                self._parties, make_context(self._job, server_start)
            )
        are_same_parties = self._chain.parties.sites == self._parties.sites
        have_keys = (
            self._is_prepared
            and are_same_parties
            and set(sites) <= set(self._chain.prepared)
        )
        self._is_prepared = False
        return sites if have_keys else self._begin(exchange, sites)

    def _mask_again(
        self, exchange: Exchange, collected: _MaskingReplies
    ) -> _MaskingReplies:
        """Have the sites mask their updates in a new exchange under wider terms."""
        exclusions = collected.exclusions
        for site, reason in exclusions.items():
            exchange.refuse(site, reason)
        terms = collected.widen_terms()
        candidates = tuple(site for site in collected.by_site if site not in exclusions)
        self._require_enough(exchange, len(candidates), TrainingError)
        sites = self._begin(exchange, candidates)
        attached = dict.fromkeys(sites, self._attach(terms))
        replies = exchange.run_stage(wire.MASKED, attached)
        new_replies = self._receive(exchange, replies, terms)
        beyond_limits = new_replies.sites_beyond_limits
        # Terms without limits are the widest.
        if beyond_limits and not terms.limits:
            for site in sorted(beyond_limits, key=self._parties.sites.index):
                exchange.refuse(site, new_replies.by_site.pop(site).again)
            self._require_enough(exchange, len(new_replies.by_site), TrainingError)
        return new_replies

    def _finish(
        self, exchange: Exchange, collected: _MaskingReplies, total: Total
    ) -> Total:
        """Record the state for later sums.

        Returns:
            The total without the counts of classes of times.
        """
        task = exchange.request.task
        metrics = {}  # in the order in which the sites name them
        for site in total.included:
            for name in collected.list_names(site):
                if name in total.metrics:
                    metrics[name] = total.metrics[name]
        self._metrics[task] = tuple(metrics)
        self._paces[task] = find_slowest_class(metrics)
        if self._requests.strict:
            self._history = _choose_history(collected.by_site, self._history)
        self._limits[task] = compute_limits(total)
        return replace(total, metrics=remove_classes(metrics))

    # ---- the stages

    def _begin(self, exchange: Exchange, sites: tuple[str, ...]) -> tuple[str, ...]:
        """Begin an exchange with keys and shares. Return the sites that take part."""
        current = self._chain.start(self._parties)
        number = self._chain.number
        attached = wire.pack(wire.Stage(number))
        self._ask(exchange, sites, attached, wire.KEYS, current.add_keys)
        keys = _close_stage(current.collect_keys)
        attached = wire.pack(wire.Stage(number, keys))
        self._ask(exchange, tuple(keys), attached, wire.SHARES, current.add_shares)
        _close_stage(current.collect_boxes)
        self._require_enough(exchange, len(current.roster), _ExchangeFailed)
        return current.roster

    def _attach(self, terms: wire.Terms) -> Attached:
        """Return the attachment of a task, which is the same for all sites.

        It holds the terms, with the number and the roster of this exchange, and the
        sealed shares.
        """
        current = self._chain.current
        terms = replace(terms, number=self._chain.number, roster=current.roster)
        return wire.pack_boxes(terms, current.collect_boxes())

    def _receive(
        self, exchange: Exchange, replies: Mapping[str, Reply], terms: wire.Terms
    ) -> _MaskingReplies:
        """Add the masked updates; return each site's answer about its update."""
        is_recorded = partial(self._record.has, exchange.request)
        collected = _MaskingReplies(terms, self._parties.threshold, is_recorded)
        for site, attached in _iterate_in_order(exchange, replies):
            try:
                _require_only(site, attached, "words")
                masking = wire.read_message(wire.Masking, attached.facts)
                _require_known_names(site, masking)
                _require_short(site, masking, self._parties.sites)
                if not masking.again:
                    message = wire.read_masked(masking, attached)
                    _require_own(site, message.site)
                    self._chain.add_masked(message)
                collected.by_site[site] = masking
            except RefusedError as error:
                exchange.refuse(site, str(error))
        return collected

    def _open(self, exchange: Exchange) -> Total:
        """Close the exchange to further updates, and open their sum."""
        chain = self._chain
        answering_sites = chain.current.sites_heard
        self._require_enough(exchange, len(answering_sites), _ExchangeFailed)
        unmask_requests, keys = chain.make_requests()
        survivors = chain.current.survivors
        _refuse_other_layouts(exchange, answering_sites, survivors)
        # Too few survivors means that the updates' layouts differ, so a new exchange
        # would fail as well.
        self._require_enough(exchange, len(survivors), TrainingError)

        opening_sites = survivors
        if self._parties.confirmed:
            opening_sites = self._confirm_survivors(exchange, unmask_requests)
            unmask_requests, _ = chain.make_requests()  # with the confirmations
        attached = wire.pack_requests(chain.number, keys, unmask_requests)
        self._record.add(exchange.request, survivors)
        self._ask(exchange, opening_sites, attached, wire.UNMASK, chain.add_unmask)
        current = chain.current  # `open_total` makes the next exchange the current one
        total = _close_stage(chain.open_total, exchange.reasons)
        for site, owner in current.doubtful:
            logger.warning(
                "site %r or %r: a wrong share of the secret of %r", site, owner, owner
            )
        return total

    def _confirm_survivors(
        self, exchange: Exchange, unmask_requests: Mapping[str, wire.UnmaskRequest]
    ) -> tuple[str, ...]:
        """Have the survivors confirm their list to each other.

        Returns:
            The sites that confirmed it. The server does not wait for the others again.
        """
        current = self._chain.current
        attached = wire.pack_requests(self._chain.number, {}, unmask_requests)
        confirmed_sites = self._ask(
            exchange, current.survivors, attached, wire.CONFIRM, current.add_confirm
        )
        return tuple(site for site in current.survivors if site in confirmed_sites)

    def _ask(
        self,
        exchange: Exchange,
        sites: tuple[str, ...],
        attached: Attached,
        stage: str,
        add: Callable[[Any], None],
    ) -> tuple[str, ...]:
        """Run one stage; a site with a wrong message is left out of the exchange.

        Args:
            exchange: The exchange.
            sites: The sites to ask.
            attached: The attachment of the request, equal for all sites.
            stage: Name of the stage, such as "@keys".
            add: Called with each site's message.

        Returns:
            The sites that answered.
        """
        is_after_masking = stage in (wire.CONFIRM, wire.UNMASK)
        least = self._parties.threshold if is_after_masking else None
        replies = exchange.run_stage(stage, dict.fromkeys(sites, attached), least=least)
        for site, attached in _iterate_in_order(exchange, replies):
            try:
                _require_only(site, attached)
                message = wire.read_message(wire.ANSWERS[stage], attached.facts)
                _require_own(site, message.site)
                add(message)
            except RefusedError as error:
                exchange.refuse(site, str(error))
        return tuple(replies)

    def _require_enough(
        self, exchange: Exchange, count: int, error: type[TrainingError]
    ) -> None:
        """Raise `error` if too few updates can be added."""
        if count < exchange.least:
            reasons = f": {exchange.reasons}" if exchange.reasons else ""
            raise error(
                f"{exchange.request.task!r}: {count} sites can be added under the "
                f"secure sum, {exchange.least} are needed{reasons}; nothing was opened"
            )


def _refuse_other_layouts(
    exchange: Exchange, answering_sites: Iterable[str], survivors: Container[str]
) -> None:
    """Refuse the sites whose updates' layout differs from that of the survivors."""
    for site in answering_sites:
        if site not in survivors:
            exchange.refuse(
                site, f"site {site!r} arranged its update differently from the others"
            )


def _iterate_in_order(
    exchange: Exchange, replies: Mapping[str, Reply]
) -> Iterator[tuple[str, Attached]]:
    """Yield the attachments of the sites that answered, in the fixed order."""
    for site in exchange.sites:
        if site in replies:
            yield site, replies[site].attached


def _close_stage(close: Callable[[], R], reasons: str = "") -> R:
    """Return the result of a stage.

    Args:
        close: Returns the result; raises TrainingError if messages are missing.
        reasons: Why sites are missing, for the message.

    Raises:
        _ExchangeFailed: There are too few messages; a new exchange may succeed.
    """
    try:
        return close()
    except TrainingError as error:
        message = f"{error} ({reasons})" if reasons else str(error)
        raise _ExchangeFailed(message) from error


def _choose_history(maskings: Mapping[str, wire.Masking], before: bytes) -> bytes:
    """Choose the history that more than half of the sites report after a sum.

    All sites that masked for one question have the same history, but the masks do not
    authenticate the history that a site reports here. If one site's report sufficed, a
    site that lost its disk could adopt a history that no other site has, and the next
    sum would fail.

    Args:
        maskings: The replies of the sites in the sum, which have their reports.
        before: The history to return if no majority reports one.
    """
    if not maskings:
        return before
    counts = Counter(masking.history for masking in maskings.values())
    history, num_reports = counts.most_common(1)[0]
    has_majority = 2 * num_reports > len(maskings)
    if not history or not has_majority:
        return before
    for site, masking in maskings.items():
        if masking.history != history:
            logger.warning(
                "site %r reports a different history from most sites of the sum", site
            )
    return history


def _require_known_names(site: str, masking: wire.Masking) -> None:
    """Refuse too many counts, and counts with names reserved for the engine."""
    names = masking.names or ()
    num_letters = sum(len(name) for name in names)
    if len(names) > MOST_NAMES or num_letters > MOST_LETTERS:
        raise RefusedError(
            f"site {site!r} sent more than {MOST_NAMES:,} counts, or {MOST_LETTERS:,} "
            "characters of their names"
        )
    for name in names:
        if name.startswith(PACE) and name not in PACES:
            raise RefusedError(f"site {site!r} sent a count with an invalid name")
        if name.startswith(OURS) and name not in PACES:
            raise RefusedError(
                f"site {site!r} sent a count with a name that methods cannot use"
            )


def _require_short(site: str, masking: wire.Masking, sites: Sequence[str]) -> None:
    """Refuse unknown sites, and a reason of more than one line: people read both."""
    if not set(masking.before) <= set(sites) or len(masking.again) > LINE:
        raise RefusedError(
            f"site {site!r} sent names of unknown sites or too long a reason with its "
            "masked update"
        )


def _require_own(site: str, sender: str) -> None:
    """Refuse a message that names another site as its sender."""
    if sender != site:
        raise RefusedError(
            f"site {site!r} sent a message of the secure sum as {sender!r}"
        )


def _require_only(site: str, attached: Attached, *names: str) -> None:
    """Refuse attached tensors that the stage does not need."""
    if attached.tensors.keys() - set(names):
        raise RefusedError(
            f"site {site!r} sent more data than a message of the secure sum"
        )
