"""A site's side of the secure sum: a single exchange, and a series of them.

Threats and symbols are explained in the package's docstring. Without faults, each
exchange takes two messages. The masked update of exchange r also carries the site's
keys for exchange r + 1, and the answer that opens r carries its shares:

    server → site    the task of r, boxes of r
    site → server    masked update of r, own keys of r + 1
    server → site    survivors of r, keys of r + 1
    site → server    shares that open r, boxes of r + 1

Every exchange has new keys, seeds and shares, so opening r reveals nothing about r + 1.
A site that dropped out of r is not prepared for r + 1. To let it rejoin, the server
starts a new exchange (`ServerChain.start`), which takes two more small messages.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hmac import compare_digest
from typing import TypedDict, Unpack

from fednotes.core.errors import ConfigError, RefusedError, TrainingError
from fednotes.core.update import Update
from fednotes.privacy.secure_sum import Parties, crypto
from fednotes.privacy.secure_sum.crypto import KEY_BYTES, SHARE_BYTES
from fednotes.privacy.secure_sum.fixed_point import SumLayout, encode
from fednotes.privacy.secure_sum.messages import (
    ConfirmMessage,
    KeysMessage,
    MaskedMessage,
    SharesMessage,
    UnmaskMessage,
    UnmaskRequest,
)

REFUSALS = 2  # of updates out of range; each reveals something about their size
KEYS_SIZES = ("sharing", "masking", "commitment")


class AskedOtherwise(RefusedError):
    """The server sent two sites different requests or different lists.

    Attributes:
        reason: The reason as a site's ledger records it.
    """

    reason = "asked-otherwise"


def session_id(exchange: bytes, keys: Sequence[KeysMessage]) -> bytes:
    """Return the digest of all public keys, in the order of the sites."""
    rows = (part for k in keys for part in (k.site, k.sharing, k.masking, k.commitment))
    return crypto.digest(exchange, *rows)


def self_stream(seed: bytes, session: bytes, layout: bytes) -> bytes:
    """Return the key of a site's self mask."""
    return crypto.derived(seed, session, "self mask", layout)


def pair_stream(
    secret: bytes, session: bytes, one: str, other: str, layout: bytes
) -> bytes:
    """Return the key of a pair's mask, derived one-way from their X25519 secret."""
    return crypto.derived(secret, session, "pair mask", *sorted((one, other)), layout)


def commitment(seed: bytes, exchange: bytes) -> bytes:
    """Return a commitment to a seed, which detects wrong shares and hides the seed."""
    return crypto.derived(seed, exchange, "commitment")


def check_keys(message: KeysMessage, exchange: bytes) -> None:
    """Raise RefusedError for a message of another exchange or with wrong sizes."""
    if message.exchange != exchange:
        raise RefusedError(
            f"the keys of site {message.site!r} belong to another exchange, list of "
            "sites or threshold"
        )
    if any(len(getattr(message, name)) != crypto.KEY_BYTES for name in KEYS_SIZES):
        raise RefusedError(f"the keys of site {message.site!r} have the wrong length")


class LaidOut(TypedDict, total=False):
    """Options of the layout, which are equal at all sites; see `SumLayout.of`."""

    purpose: str
    limits: Mapping[str, int] | None
    metrics: Sequence[str] | None


def _signed(keys: KeysMessage) -> bytes:
    parts = (keys.exchange, keys.site, keys.sharing, keys.masking, keys.commitment)
    return crypto.joined("fednotes secure sum keys", *parts)


class SecureSite:
    """One site in one exchange.

    The steps are `keys`, `shares`, `masked` and `unmask`, each once and in this order.
    Every method raises RefusedError for a call that the protocol forbids.

    Secrets exist only in this object and are forgotten after `unmask`. If the process
    ends, the site has dropped out.

    Args:
        site: The site's name.
        parties: The sites of the sum.
        context: Identifies this exchange, as `joined(job, run, number)`. It may be
            predictable.
        identity: Signs this site's keys and checks those of the others; None trusts the
            server to relay them.

    Raises:
        ConfigError: The site is not one of the parties.
    """

    def __init__(
        self,
        site: str,
        parties: Parties,
        context: bytes,
        identity: crypto.Identity | None = None,
    ) -> None:
        if site not in parties.sites:
            raise ConfigError(f"secure sum: site {site!r} is not one of its sites")
        self._parties = parties
        self.exchange = parties.exchange_digest(context)
        self.site = site
        self._identity = identity
        drawn = (secrets.token_bytes(KEY_BYTES) for _ in range(3))
        sharing, self._masking_bytes, self._seed = drawn
        self._sharing, self._masking = map(
            crypto.private_key, (sharing, self._masking_bytes)
        )
        sharing_key, masking_key = map(
            crypto.public_bytes, (self._sharing, self._masking)
        )
        bound = commitment(self._seed, self.exchange)
        own = KeysMessage(self.exchange, site, sharing_key, masking_key, bound)
        self._own_keys = (
            replace(own, signature=identity.sign(_signed(own))) if identity else own
        )
        self._stage = "keys"
        self._refusals = 0
        self._peers: dict[str, KeysMessage] = {}  # U1 without this site
        self._secrets: dict[
            str, bytes
        ] = {}  # X25519 secrets of the sharing keys, by peer
        self._held: dict[str, bytes] = {}  # site → its two shares held by this site
        self._agreement = b""  # digest of roster and layout
        # the only list of survivors that this site accepts
        self._listed: tuple[str, ...] = ()
        self._answer: UnmaskMessage | None = None

    def keys(self) -> KeysMessage:
        """Return this site's public keys."""
        return self._own_keys

    def shares(self, keys: Mapping[str, KeysMessage]) -> SharesMessage:
        """Return shares of this site's two secrets, sealed for each other site.

        Args:
            keys: The keys of all participating sites, including this one.
        """
        self._at("keys", "shares")
        self._check_list(keys, "keys")
        if keys[self.site] != self._own_keys:
            raise RefusedError(
                "the list of keys has other keys for this site than it sent"
            )
        for site, message in keys.items():
            if message.site != site:
                raise RefusedError(
                    f"the keys of site {message.site!r} are listed as {site!r}'s"
                )
            check_keys(message, self.exchange)
            who, signed = self._identity, _signed(message)
            if who and not who.verify(site, signed, message.signature):
                raise RefusedError(
                    f"the keys of site {site!r} are not signed by it, or its "
                    "certificate is not valid by this site's list and clock"
                )
        order = self._parties.in_order(keys)
        public = [
            raw for site in order for raw in (keys[site].sharing, keys[site].masking)
        ]
        if len(set(public)) != len(public):
            raise RefusedError("the list of keys has the same key twice")
        self._session = session_id(self.exchange, [keys[site] for site in order])
        self._peers = {site: keys[site] for site in order if site != self.site}
        points = [self._parties.point(site) for site in order]
        halves = [
            crypto.split(secret, self._parties.threshold, points)
            for secret in (self._seed, self._masking_bytes)
        ]
        both = {
            s: halves[0][p] + halves[1][p] for s, p in zip(order, points, strict=True)
        }
        self._held = {self.site: both.pop(self.site)}
        boxes = {
            to: crypto.seal(self._key("shares", self.site, to), text, self._session)
            for to, text in both.items()
        }
        self._stage = "shares"
        return SharesMessage(self.exchange, self.site, self._session, boxes)

    def masked(
        self, boxes: Mapping[str, bytes], update: Update, **how: Unpack[LaidOut]
    ) -> MaskedMessage:
        """Return this site's update under its masks.

        Args:
            boxes: Each sender's sealed shares for this site. The roster is the senders
                and this site.
            update: The update.
            how: The layout, equal at all sites; see `SumLayout.of`.

        Raises:
            TrainingError: A value is not finite or out of range; nothing was masked.
                The server may repeat the request once with wider limits. With more
                attempts it could find out how large the values are.
        """
        self._at("shares", "masked")
        self._check_list({*boxes, self.site}, "shares")
        if unknown := sorted(boxes.keys() - self._peers.keys()):
            raise RefusedError(f"shares of site {unknown[0]!r}, which sent no keys")
        layout = SumLayout.of(update, len(self._parties.sites), **how)
        try:
            words = encode(update, layout)
        except TrainingError:
            self._refusals += 1
            if self._refusals == REFUSALS:
                self.forget()
            raise
        held = {site: self._opened(site, box) for site, box in boxes.items()}
        self._held |= held
        roster = self._parties.in_order(self._held)
        where = layout.digest()
        self._agreement = crypto.digest("agreement", self._session, where, *roster)
        streams = [(self_stream(self._seed, self._session, where), 1)]
        for site in held:
            secret = crypto.shared_secret(
                self._masking, self._peers[site].masking, site
            )
            key = pair_stream(secret, self._session, self.site, site, where)
            streams.append((key, 1 if self.site < site else -1))
        crypto.add_streams(words, streams)
        receipts = {to: self._receipt(self.site, to, "masked") for to in held}
        self._stage = "masked"
        return MaskedMessage(self.exchange, self.site, layout, receipts, words)

    def confirm(self, request: UnmaskRequest) -> ConfirmMessage:
        """Return proofs of the list of survivors for the others, for only one list."""
        self._at("masked", "confirm")
        self._check_request(request)
        others = (site for site in request.survivors if site != self.site)
        told = {
            to: self._receipt(self.site, to, "survivors", *self._listed)
            for to in others
        }
        return ConfirmMessage(self.exchange, self.site, told)

    def unmask(self, request: UnmaskRequest) -> UnmaskMessage:
        """Return shares of the survivors' self masks and of the dropped sites' keys.

        A repeated request gets the same answer; a different one is refused.
        """
        if (
            self._answer is not None
            and self._parties.in_order(request.survivors) == self._listed
        ):
            return self._answer
        self._at("masked", "unmask")
        self._check_request(request)
        if self._parties.confirmed:
            self._check_confirmations(request)
        seeds = {site: self._held[site][:SHARE_BYTES] for site in request.survivors}
        keys = {site: self._held[site][SHARE_BYTES:] for site in request.dropped}
        self._answer = UnmaskMessage(self.exchange, self.site, seeds, keys)
        self.forget()
        return self._answer

    def forget(self) -> None:
        """Forget all secrets; after that, only the earlier answer can be repeated."""
        self._stage = "closed"
        self._held, self._secrets = {}, {}
        self._seed = self._masking_bytes = b""
        self._sharing = self._masking = crypto.private_key(bytes(KEY_BYTES))

    def _at(self, stage: str, action: str) -> None:
        if self._stage != stage:
            raise RefusedError(
                f"secure sum at site {self.site!r}: {action!r} is refused: each step "
                f"is taken once and in order (the exchange is at {self._stage!r})"
            )

    def _check_list(self, listed: Collection[str], what: str) -> None:
        if self.site not in listed:
            raise RefusedError(
                f"the list of {what} leaves out this site, {self.site!r}"
            )
        if unknown := sorted(set(listed) - set(self._parties.sites)):
            raise RefusedError(
                f"site {unknown[0]!r} in the list of {what} is not in the job"
            )
        if len(listed) < self._parties.threshold:
            raise RefusedError(
                f"{len(listed)} sites in the list of {what}: a sum takes "
                f"{self._parties.threshold}"
            )

    def _check_request(self, request: UnmaskRequest) -> None:
        survivors, dropped = set(request.survivors), set(request.dropped)
        if request.exchange != self.exchange:
            raise RefusedError("the list of survivors belongs to another exchange")
        if len(survivors) + len(dropped) != len(request.survivors) + len(
            request.dropped
        ):
            raise RefusedError(
                "the lists of survivors and dropped sites contain a site twice"
            )
        if both := sorted(survivors & dropped):
            raise RefusedError(
                f"site {both[0]!r} is listed as a survivor and as dropped: its self "
                "mask and its key together would open its update"
            )
        if survivors | dropped != self._held.keys():
            odd = sorted((survivors | dropped) ^ self._held.keys())
            raise RefusedError(
                f"site {odd[0]!r} is either in the sum or in the lists of survivors "
                "and dropped sites, but not in both"
            )
        self._check_list(request.survivors, "survivors")
        listed = self._parties.in_order(request.survivors)
        if self._listed and listed != self._listed:
            raise AskedOtherwise(
                "another list of survivors was answered before, and only one is "
                "answered"
            )
        for site in survivors - {self.site}:
            own = self._receipt(site, self.site, "masked")
            if not compare_digest(request.receipts.get(site, b""), own):
                raise AskedOtherwise(
                    f"sites {site!r} and {self.site!r} received different requests "
                    "(another task, option, tensor or list of sites), or a receipt is "
                    "missing: nothing is opened"
                )
        self._listed = listed

    def _check_confirmations(self, request: UnmaskRequest) -> None:
        good = 1  # this site itself
        for site, given in request.confirmations.items():
            if site == self.site or site not in request.survivors:
                continue
            own = self._receipt(site, self.site, "survivors", *self._listed)
            if not compare_digest(given, own):
                raise AskedOtherwise(
                    f"site {site!r} received another list of survivors"
                )
            good += 1
        if good < self._parties.threshold:
            raise RefusedError(
                f"{good} sites confirmed the survivors, {self._parties.threshold} are "
                "needed"
            )

    def _key(self, use: str, sender: str, receiver: str) -> bytes:
        """Return the key shared with another site, for one use in one direction."""
        other = receiver if sender == self.site else sender
        if other not in self._secrets:
            self._secrets[other] = crypto.shared_secret(
                self._sharing, self._peers[other].sharing, other
            )
        return crypto.derived(
            self._secrets[other], self._session, use, sender, receiver
        )

    def _receipt(self, sender: str, receiver: str, *what: str) -> bytes:
        return crypto.receipt(
            self._key("receipts", sender, receiver), self._agreement, *what
        )

    def _opened(self, sender: str, box: bytes) -> bytes:
        text = crypto.unseal(self._key("shares", sender, self.site), box, self._session)
        if text is None or len(text) != 2 * SHARE_BYTES:
            raise RefusedError(
                f"the shares of site {sender!r} cannot be opened: the two sites "
                "received different keys, or the shares were changed on the way"
            )
        return text


class SiteChain:
    """One site in a series of exchanges with increasing numbers.

    Args:
        site: As in `SecureSite`.
        parties: As in `SecureSite`.
        context: Identifies the series, as `crypto.joined(job, run)`.
        identity: As in `SecureSite`.
    """

    def __init__(
        self,
        site: str,
        parties: Parties,
        context: bytes,
        identity: crypto.Identity | None = None,
    ) -> None:
        self._site = site
        self._parties = parties
        self._context = context
        self._identity = identity
        self._open: dict[int, SecureSite] = {}
        self._newest = -1

    def keys(self, number: int) -> KeysMessage:
        """Begin an exchange, abandoning all others, and return this site's keys."""
        if number <= self._newest:
            raise RefusedError(
                f"exchange {number} of the secure sum was used before (the newest is "
                f"{self._newest}): the server must start with a higher number"
            )
        for old in self._open.values():
            old.forget()
        self._open = {}
        return self._begin(number)

    def masked(
        self,
        number: int,
        boxes: Mapping[str, bytes],
        update: Update,
        **how: Unpack[LaidOut],
    ) -> MaskedMessage:
        """Return the masked update, with the keys of the next exchange.

        See `SecureSite.masked`.
        """
        message = self.at(number).masked(boxes, update, **how)
        for old in [at for at in self._open if at < number]:
            self._open.pop(old).forget()
        return replace(message, next_keys=self._begin(number + 1))

    def unmask(
        self,
        number: int,
        request: UnmaskRequest,
        next_keys: Mapping[str, KeysMessage] | None = None,
    ) -> UnmaskMessage:
        """Return the shares that open the sum, and those for the next exchange.

        See `SecureSite.unmask`. If the list of next keys is wrong, only the shares for
        the next exchange are omitted.
        """
        message = self.at(number).unmask(request)
        if next_keys and number + 1 in self._open:
            with suppress(RefusedError):
                shares = self._open[number + 1].shares(next_keys)
                message = replace(message, next_shares=shares)
        return message

    def _begin(self, number: int) -> KeysMessage:
        context = crypto.joined(self._context, number)
        self._newest = number
        self._open[number] = SecureSite(
            self._site, self._parties, context, self._identity
        )
        return self._open[number].keys()

    def at(self, number: int) -> SecureSite:
        """Return this site in an exchange.

        Raises:
            RefusedError: The exchange is not in progress.
        """
        if number not in self._open:
            raise RefusedError(
                f"site {self._site!r} has no keys for exchange {number} of the secure "
                "sum: start a new exchange"
            )
        return self._open[number]
