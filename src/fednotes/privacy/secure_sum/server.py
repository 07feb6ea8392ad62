"""The server's side of the secure sum: a single exchange, and a series of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hmac import compare_digest
from itertools import combinations

import numpy as np

from fednotes.core.errors import RefusedError, TrainingError
from fednotes.core.update import Total
from fednotes.privacy.secure_sum import Parties, crypto
from fednotes.privacy.secure_sum.crypto import SHARE_BYTES
from fednotes.privacy.secure_sum.fixed_point import SumLayout, check_layout, decode
from fednotes.privacy.secure_sum.messages import (
    BOX_BYTES,
    RECEIPT_BYTES,
    ConfirmMessage,
    KeysMessage,
    MaskedMessage,
    SharesMessage,
    UnmaskMessage,
    UnmaskRequest,
)
from fednotes.privacy.secure_sum.site import (
    check_keys,
    commitment,
    pair_stream,
    self_stream,
    session_id,
)

SPARED = 2  # maximum number of answers left out if shares do not match


@dataclass(slots=True)
class _Sum:
    """The running sum of the updates with one layout."""

    layout: SumLayout
    words: crypto.Words
    sites: set[str] = field(default_factory=set)


class SecureServer:
    """Collect the messages of one exchange phase by phase, and open the total.

    A phase ends when the caller requests the next messages to sites (`keys`, `boxes`,
    `requests`). Sites that have not answered by then have dropped out, and their later
    messages of that phase are refused. Masked updates are summed on arrival and not
    stored; integers can be summed in any order. The methods `add_…` raise RefusedError
    for a message that is wrong, late or repeated; the exchange continues without it. A
    method that ends a phase raises TrainingError below the threshold; then nothing can
    be opened.

    Attributes:
        phase: The messages that are accepted now: "keys", "shares", "masked", "unmask"
            or "closed".
        survivors: The sites in the sum, once no more updates are accepted.
        doubtful: Pairs of sites (the one that opened a share, the owner of the secret)
            with a wrong share, although the sum was opened. One of the two broke the
            protocol, probably the site that is in most pairs.
    """

    def __init__(self, parties: Parties, context: bytes) -> None:
        self._parties = parties
        self.exchange = parties.exchange_digest(context)
        self.phase = "keys"
        self._keys: dict[str, KeysMessage] = {}
        self._session = b""
        self._boxes: dict[str, SharesMessage] = {}
        self._sums: dict[bytes, _Sum] = {}
        self._receipts: dict[str, dict[str, bytes]] = {}  # sender → receiver → receipt
        self._confirmations: dict[str, dict[str, bytes]] = {}
        self._answers: dict[str, UnmaskMessage] = {}
        self.survivors: tuple[str, ...] = ()
        self.doubtful: list[tuple[str, str]] = []

    @property
    def heard(self) -> tuple[str, ...]:
        """The sites whose masked update has arrived."""
        return self._parties.in_order(
            {site for part in self._sums.values() for site in part.sites}
        )

    @property
    def roster(self) -> tuple[str, ...]:
        """The sites that sent keys and shares."""
        return self._parties.in_order(self._boxes)

    def add_keys(self, message: KeysMessage) -> None:
        """Accept a site's public keys."""
        self._expect(
            "keys", message.site, message.exchange, set(self._parties.sites), self._keys
        )
        check_keys(message, self.exchange)
        self._keys[message.site] = message

    def keys(self) -> dict[str, KeysMessage]:
        """Return all keys, for every site that sent its own."""
        if self.phase == "keys":
            self._enough(len(self._keys), "keys")
            self._keys = {
                site: self._keys[site] for site in self._parties.in_order(self._keys)
            }
            self._session = session_id(self.exchange, list(self._keys.values()))
            self.phase = "shares"
        return dict(self._keys)

    def add_shares(self, message: SharesMessage) -> None:
        """Accept a site's sealed shares."""
        self._expect(
            "shares", message.site, message.exchange, set(self._keys), self._boxes
        )
        if message.session != self._session:
            raise RefusedError(
                f"the shares of site {message.site!r} were made for other keys"
            )
        if not _one_each(message.boxes, self._keys.keys() - {message.site}, BOX_BYTES):
            raise RefusedError(
                f"the shares of site {message.site!r} do not cover all sites"
            )
        self._boxes[message.site] = message

    def boxes(self) -> dict[str, dict[str, bytes]]:
        """Return the boxes by receiver and sender."""
        if self.phase == "shares":
            self._enough(len(self._boxes), "shares")
            self.phase = "masked"
        return {
            to: {
                sender: self._boxes[sender].boxes[to]
                for sender in self.roster
                if sender != to
            }
            for to in self.roster
        }

    def add_masked(self, message: MaskedMessage) -> None:
        """Accept a site's masked update.

        If sites send several layouts, the most frequent one is used.
        """
        site = message.site
        self._expect(
            "masked", site, message.exchange, set(self._boxes), set(self.heard)
        )
        check_layout(message.layout)
        if message.layout.sites != len(self._parties.sites):
            raise RefusedError(
                f"site {site!r} prepared its update for another number of sites"
            )
        words = message.words
        if words.dtype != np.uint64 or words.shape != (message.layout.words,):
            raise RefusedError(f"the masked update of site {site!r} has the wrong size")
        if not _one_each(message.receipts, set(self.roster) - {site}, RECEIPT_BYTES):
            raise RefusedError(
                f"site {site!r} did not send one receipt for each other site"
            )
        where = message.layout.digest()
        if where not in self._sums:
            self._sums[where] = _Sum(message.layout, words.copy())
        else:
            np.add(self._sums[where].words, words, out=self._sums[where].words)
        self._sums[where].sites.add(site)
        self._receipts[site] = dict(message.receipts)

    def requests(self) -> dict[str, UnmaskRequest]:
        """Return the request to each survivor, with the confirmations so far."""
        if self.phase == "masked":
            if not self._sums:
                self._enough(0, "updates")
            layouts = sorted(self._sums.values(), key=lambda part: -len(part.sites))
            if len(layouts[0].sites) < self._parties.threshold and len(layouts) > 1:
                raise TrainingError(_difference(layouts[0], layouts[1]))
            self._enough(len(layouts[0].sites), "updates")
            self.survivors = self._parties.in_order(layouts[0].sites)
            self._sums = {b"": layouts[0]}
            self.phase = "unmask"
        dropped = tuple(site for site in self.roster if site not in self.survivors)
        return {
            to: UnmaskRequest(
                self.exchange,
                self.survivors,
                dropped,
                {s: self._receipts[s][to] for s in self.survivors if s != to},
                {s: given[to] for s, given in self._confirmations.items() if s != to},
            )
            for to in self.survivors
        }

    def add_confirm(self, message: ConfirmMessage) -> None:
        """Accept a survivor's proofs of the list; call `requests` again afterwards."""
        survivors = set(self.survivors)
        self._expect(
            "unmask", message.site, message.exchange, survivors, self._confirmations
        )
        if not _one_each(
            message.confirmations, survivors - {message.site}, RECEIPT_BYTES
        ):
            raise RefusedError(
                f"the confirmations of site {message.site!r} do not cover all sites"
            )
        self._confirmations[message.site] = dict(message.confirmations)

    def add_unmask(self, message: UnmaskMessage) -> None:
        """Accept a survivor's shares; those of `threshold` sites suffice."""
        survivors = set(self.survivors)
        self._expect("unmask", message.site, message.exchange, survivors, self._answers)
        dropped = set(self.roster) - survivors
        asked = (message.masks, survivors), (message.keys, dropped)
        if not all(_one_each(given, sites, SHARE_BYTES) for given, sites in asked):
            raise RefusedError(
                f"site {message.site!r} opened other shares than the server requested"
            )
        self._answers[message.site] = message

    def total(self) -> Total:
        """Return the sum over the survivors.

        Wrong shares of up to two sites are left out if `threshold` others remain.

        Raises:
            TrainingError: Too few sites sent shares, the shares do not match the keys,
                or the masks do not cancel.
        """
        if self.phase != "unmask":
            raise TrainingError("the secure sum has no updates to open yet")
        self._enough(len(self._answers), "opened shares")
        part = self._sums[b""]
        where = part.layout.digest()
        streams = [
            (self_stream(self._seed(s), self._session, where), -1)
            for s in self.survivors
        ]
        for site in self.roster:
            if site not in self.survivors:
                streams += self._left_over(site, where)
        self.phase = "closed"
        crypto.add_streams(part.words, streams)
        return decode(part.words, part.layout, self.survivors)

    def _seed(self, site: str) -> bytes:
        def fits(seed: bytes) -> bool:
            return compare_digest(
                commitment(seed, self.exchange), self._keys[site].commitment
            )

        shares = {s: answer.masks[site] for s, answer in self._answers.items()}
        return self._rebuilt(site, shares, fits, "mask")

    def _left_over(self, dropped: str, where: bytes) -> list[tuple[bytes, int]]:
        """Return the streams that survivors added for a dropped site."""

        def fits(raw: bytes) -> bool:
            return (
                crypto.public_bytes(crypto.private_key(raw))
                == self._keys[dropped].masking
            )

        shares = {s: answer.keys[dropped] for s, answer in self._answers.items()}
        key = crypto.private_key(self._rebuilt(dropped, shares, fits, "key"))
        streams = []
        for site in self.survivors:
            secret = crypto.shared_secret(key, self._keys[site].masking, site)
            stream = pair_stream(secret, self._session, site, dropped, where)
            streams.append((stream, -1 if site < dropped else 1))
        return streams

    def _rebuilt(
        self,
        of: str,
        shares: dict[str, bytes],
        fits: Callable[[bytes], bool],
        what: str,
    ) -> bytes:
        """Return a site's secret from `threshold` consistent shares of it."""

        def secret(chosen: Collection[str]) -> bytes:
            try:
                return crypto.combine(
                    {self._parties.point(site): shares[site] for site in chosen}
                )
            except TrainingError:
                return b""

        for chosen in self._choices(shares):
            found = secret(chosen)
            if not found or not fits(found):
                continue
            if chosen != self._parties.in_order(shares)[: self._parties.threshold]:
                # Try the share in place of a correct one.
                for site in shares.keys() - set(chosen):
                    if secret((*chosen[1:], site)) != found:
                        self.doubtful.append((site, of))
            return found
        raise TrainingError(
            f"the shares of the {what} of site {of!r} do not match what it sent: it or "
            "one of the sites that opened them sent wrong shares"
        )

    def _choices(self, shares: Collection[str]) -> Iterator[tuple[str, ...]]:
        """Yield choices of `threshold` sites, first those not in doubt."""
        known = {site for site, _ in self.doubtful}
        order = sorted(self._parties.in_order(shares), key=known.__contains__)
        seen = set()
        for left in range(min(SPARED, len(order) - self._parties.threshold) + 1):
            for out in combinations(order, left):
                chosen = self._parties.in_order(
                    [s for s in order if s not in out][: self._parties.threshold]
                )
                if chosen not in seen:
                    seen.add(chosen)
                    yield chosen

    def _expect(
        self,
        phase: str,
        site: str,
        exchange: bytes,
        allowed: set[str],
        seen: Collection[str],
    ) -> None:
        if site not in allowed:
            raise RefusedError(
                f"site {site!r} takes no part in this step of the secure sum"
            )
        if exchange != self.exchange:
            raise RefusedError(f"site {site!r} answers for another exchange")
        if self.phase != phase:
            raise RefusedError(
                f"site {site!r} is late: the secure sum is at {self.phase!r}"
            )
        if site in seen:
            raise RefusedError(f"site {site!r} answered twice")

    def _enough(self, count: int, what: str) -> None:
        if count < self._parties.threshold:
            raise TrainingError(
                f"secure sum: {what} of {count} of {len(self._parties.sites)} sites, "
                f"and the threshold is {self._parties.threshold}: nothing was opened"
            )


def _one_each(given: Mapping[str, bytes], sites: Collection[str], size: int) -> bool:
    """Return whether there is a value of the right size for exactly these sites."""
    return given.keys() == set(sites) and all(
        len(raw) == size for raw in given.values()
    )


def _difference(one: _Sum, other: _Sum) -> str:
    """Describe how the layouts of two groups of sites differ."""
    left = min(one.sites)
    right = min(other.sites)
    rows = [{(f.kind, f.name): f for f in part.layout.fields} for part in (one, other)]
    odd = sorted(rows[0].keys() ^ rows[1].keys())
    if odd:
        what = f"{odd[0][0]} {odd[0][1]!r} is not at both"
    elif one.layout.purpose != other.layout.purpose:
        what = "they received different tasks, rounds, options or tensors"
    else:
        unequal = [key for key in rows[0] if rows[0][key] != rows[1][key]]
        what = (
            f"the shape, dtype or limit of {unequal[0][1]!r} differs"
            if unequal
            else "order"
        )
    return (
        f"sites {left!r} and {right!r} prepared different sums ({what}): they must run "
        "the same model and agree on the metrics' names"
    )


class ServerChain:
    """The server in a series of exchanges.

    `now` is the current exchange. If `prepared` names enough sites, these can send
    their updates at once. Otherwise `start` a new exchange and first collect keys and
    shares. Do the same after a failed exchange, because its messages are not reused.
    """

    def __init__(self, parties: Parties, context: bytes) -> None:
        self._parties = parties
        self._context = context
        self.number = -1
        self._now: SecureServer | None = None
        self._next: SecureServer | None = None

    @property
    def now(self) -> SecureServer:
        """The current exchange.

        Raises:
            TrainingError: There is no current exchange.
        """
        if self._now is None:
            raise TrainingError("the secure sum has no exchange under way: start one")
        return self._now

    @property
    def prepared(self) -> tuple[str, ...]:
        """The sites that can send updates at once; empty if the server must `start`."""
        ready = self._now is not None and self._now.phase == "masked"
        return self.now.roster if ready else ()

    def start(self) -> SecureServer:
        """Begin an exchange for which keys and shares must be collected."""
        self.number += 2  # the sites may have used the next number already
        self._now = self._server(self.number)
        self._next = None
        return self._now

    def add_masked(self, message: MaskedMessage) -> None:
        """Accept a masked update and the next keys in it."""
        self.now.add_masked(message)
        if self._next is None:
            self._next = self._server(self.number + 1)
        if message.next_keys is not None and message.next_keys.site == message.site:
            with suppress(RefusedError):  # the update still counts
                self._next.add_keys(message.next_keys)

    def requests(self) -> tuple[dict[str, UnmaskRequest], dict[str, KeysMessage]]:
        """Return the request to each survivor, and the keys of the next exchange."""
        requests = self.now.requests()
        try:
            return requests, self._next.keys() if self._next else {}
        except TrainingError:  # too few sites; the next exchange must be started
            return requests, {}

    def add_unmask(self, message: UnmaskMessage) -> None:
        """Accept a survivor's shares, and those for the next exchange."""
        self.now.add_unmask(message)
        shares = message.next_shares
        if (
            self._next is not None
            and shares is not None
            and shares.site == message.site
        ):
            with suppress(RefusedError):
                self._next.add_shares(shares)

    def total(self) -> Total:
        """Return the sum over the survivors.

        If the next exchange is prepared, it becomes the current one.
        """
        total = self.now.total()
        following = self._next
        self._now = None
        self._next = None
        if following is not None and following.phase == "shares":
            with suppress(TrainingError):
                following.boxes()
                self._now = following
                self.number += 1
        return total

    def _server(self, number: int) -> SecureServer:
        return SecureServer(self._parties, crypto.joined(self._context, number))
