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
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hmac import compare_digest
from typing import TypedDict, Unpack

from fednotes.core.errors import ConfigError, RefusedError, TrainingError
from fednotes.core.update import Update
from fednotes.privacy.secure_sum import Parties, crypto
from fednotes.privacy.secure_sum.crypto import KEY_BYTES, SHARE_BYTES
from fednotes.privacy.secure_sum.fixed_point import SumLayout, encode_update
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


def compute_session_id(exchange: bytes, keys: Sequence[KeysMessage]) -> bytes:
    """Return the digest of all public keys, in the order of the sites."""
    parts: list[str | bytes] = []
    for message in keys:
        parts += [message.site, message.sharing, message.masking, message.commitment]
    return crypto.hash_parts(exchange, *parts)


def derive_self_mask_key(seed: bytes, session: bytes, layout: bytes) -> bytes:
    """Return the key of a site's self mask."""
    return crypto.derive_key(seed, session, "self mask", layout)


def derive_pair_mask_key(
    secret: bytes, session: bytes, one: str, other: str, layout: bytes
) -> bytes:
    """Return the key of a pair's mask, derived one-way from their X25519 secret."""
    return crypto.derive_key(
        secret, session, "pair mask", *sorted((one, other)), layout
    )


def compute_commitment(seed: bytes, exchange: bytes) -> bytes:
    """Return a commitment to a seed, which detects wrong shares and hides the seed."""
    return crypto.derive_key(seed, exchange, "commitment")


def check_keys(message: KeysMessage, exchange: bytes) -> None:
    """Raise RefusedError for a message of another exchange or with wrong sizes."""
    if message.exchange != exchange:
        raise RefusedError(
            f"the keys of site {message.site!r} belong to another exchange, list of "
            "sites or threshold"
        )
    if any(len(getattr(message, name)) != crypto.KEY_BYTES for name in KEYS_SIZES):
        raise RefusedError(f"the keys of site {message.site!r} have the wrong length")


class LayoutOptions(TypedDict, total=False):
    """Options of the layout, which are equal at all sites; see `SumLayout.of`."""

    purpose: str
    limits: Mapping[str, int] | None
    metrics: Sequence[str] | None


def _make_signed_text(keys: KeysMessage) -> bytes:
    """Return the bytes that a site's identity signs."""
    return crypto.join_parts(
        "fednotes secure sum keys",
        keys.exchange,
        keys.site,
        keys.sharing,
        keys.masking,
        keys.commitment,
    )


class SecureSite:
    """One site in one exchange.

    The steps are `make_keys`, `make_shares`, `mask_update` and `unmask`. Call each once
    and in this order. Every method raises RefusedError for a call that the protocol
    forbids.

    Secrets exist only in this object and are erased after `unmask`. If the process
    ends, the site has dropped out.

    Args:
        site: The site's name.
        parties: The sites of the sum.
        context: Identifies this exchange, such as `join_parts(job, run, number)`. It
            need not be secret.
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
        self.exchange = parties.compute_exchange_digest(context)
        self.site = site
        self._identity = identity
        self._sharing = crypto.load_private_key(secrets.token_bytes(KEY_BYTES))
        self._masking_bytes = secrets.token_bytes(KEY_BYTES)
        self._masking = crypto.load_private_key(self._masking_bytes)
        self._seed = secrets.token_bytes(KEY_BYTES)  # of the self mask
        keys = KeysMessage(
            self.exchange,
            site,
            sharing=crypto.derive_public_key(self._sharing),
            masking=crypto.derive_public_key(self._masking),
            commitment=compute_commitment(self._seed, self.exchange),
        )
        if identity is not None:
            keys = replace(keys, signature=identity.sign(_make_signed_text(keys)))
        self._own_keys = keys
        self._stage = "keys"
        self._refusals = 0
        self._peers: dict[str, KeysMessage] = {}  # U1 without this site
        # Peer to the X25519 secret of the two sharing keys.
        self._secrets: dict[str, bytes] = {}
        # Site to the shares of its two secrets that this site holds.
        self._held: dict[str, bytes] = {}
        self._agreement = b""  # digest of roster and layout
        # The only list of survivors that this site answers; empty before the first.
        self._survivors: tuple[str, ...] = ()
        self._answer: UnmaskMessage | None = None

    def require_parties(self, parties: Parties) -> None:
        """Raise RefusedError if the exchange is not among these sites."""
        if self._parties.sites != parties.sites:
            raise RefusedError(
                f"site {self.site!r}: the exchange of keys is not among the sites that "
                "the request names"
            )

    def make_keys(self) -> KeysMessage:
        """Return this site's public keys."""
        return self._own_keys

    def make_shares(self, keys: Mapping[str, KeysMessage]) -> SharesMessage:
        """Return shares of this site's two secrets, sealed for each other site.

        Args:
            keys: The keys of all participating sites, including this one.
        """
        self._require_stage("keys", "shares")
        self._check_list(keys, "keys")
        self._check_keys(keys)
        sites = self._parties.sort_sites(keys)
        self._session = compute_session_id(
            self.exchange, [keys[site] for site in sites]
        )
        self._peers = {site: keys[site] for site in sites if site != self.site}

        points = [self._parties.find_point(site) for site in sites]
        threshold = self._parties.threshold
        seed_shares = crypto.split_secret(self._seed, threshold, points)
        key_shares = crypto.split_secret(self._masking_bytes, threshold, points)
        shares = {}
        for site, point in zip(sites, points, strict=True):
            shares[site] = seed_shares[point] + key_shares[point]
        self._held = {self.site: shares.pop(self.site)}
        boxes = {
            peer: crypto.seal(
                self._derive_key("shares", self.site, peer), text, self._session
            )
            for peer, text in shares.items()
        }
        self._stage = "shares"
        return SharesMessage(self.exchange, self.site, self._session, boxes)

    def _check_keys(self, keys: Mapping[str, KeysMessage]) -> None:
        """Raise RefusedError unless all keys are of their sites and this exchange.

        Args:
            keys: The keys of all participating sites, including this one.
        """
        if keys[self.site] != self._own_keys:
            raise RefusedError(
                "the list of keys has keys for this site that it did not send"
            )
        public_keys = []
        for site, message in keys.items():
            if message.site != site:
                raise RefusedError(
                    f"the keys of site {message.site!r} are listed as {site!r}'s"
                )
            check_keys(message, self.exchange)
            if self._identity is not None and not self._identity.verify(
                site, _make_signed_text(message), message.signature
            ):
                raise RefusedError(
                    f"the keys of site {site!r} are not signed by it, or its "
                    "certificate is not valid according to this site's trust list and "
                    "clock"
                )
            public_keys += [message.sharing, message.masking]
        if len(set(public_keys)) != len(public_keys):
            raise RefusedError("the list of keys has the same key twice")

    def mask_update(
        self,
        boxes: Mapping[str, bytes],
        update: Update,
        **layout_options: Unpack[LayoutOptions],
    ) -> MaskedMessage:
        """Return this site's update under its masks.

        Args:
            boxes: Each sender's sealed shares for this site. The roster is the senders
                and this site.
            update: The update.
            layout_options: The layout, equal at all sites; see `SumLayout.of`.

        Raises:
            TrainingError: A value is not finite or out of range; nothing was masked.
                The server may repeat the request once with wider limits. With more
                attempts it could find out how large the values are.
        """
        self._require_stage("shares", "masked")
        self._check_list({*boxes, self.site}, "shares")
        for site in sorted(boxes.keys() - self._peers.keys()):
            raise RefusedError(f"shares of site {site!r}, which sent no keys")
        layout = SumLayout.of(update, len(self._parties.sites), **layout_options)
        try:
            words = encode_update(update, layout)
        except TrainingError:
            self._refusals += 1
            if self._refusals == REFUSALS:
                self.forget()
            raise
        peer_shares = {site: self._open_box(site, box) for site, box in boxes.items()}
        self._held |= peer_shares
        roster = self._parties.sort_sites(self._held)
        layout_digest = layout.compute_digest()
        self._agreement = crypto.hash_parts(
            "agreement", self._session, layout_digest, *roster
        )
        crypto.add_streams(words, self._derive_mask_keys(peer_shares, layout_digest))
        receipts = {
            peer: self._compute_receipt(self.site, peer, "masked")
            for peer in peer_shares
        }
        self._stage = "masked"
        return MaskedMessage(self.exchange, self.site, layout, receipts, words)

    def _derive_mask_keys(
        self, peers: Iterable[str], layout_digest: bytes
    ) -> list[tuple[bytes, int]]:
        """Return the keys of the self mask and the pair masks, each with its sign.

        Args:
            peers: The other sites of the roster.
            layout_digest: Digest of the layout.
        """
        self_key = derive_self_mask_key(self._seed, self._session, layout_digest)
        keys = [(self_key, 1)]
        for peer in peers:
            secret = crypto.compute_shared_secret(
                self._masking, self._peers[peer].masking, peer
            )
            pair_key = derive_pair_mask_key(
                secret, self._session, self.site, peer, layout_digest
            )
            # The two sites of a pair use opposite signs, so their masks cancel.
            sign = 1 if self.site < peer else -1
            keys.append((pair_key, sign))
        return keys

    def confirm(self, request: UnmaskRequest) -> ConfirmMessage:
        """Return, for each other survivor, a proof of which list this site received.

        A site confirms only one list.
        """
        self._require_stage("masked", "confirm")
        self._check_request(request)
        confirmations = {
            peer: self._compute_receipt(self.site, peer, "survivors", self._survivors)
            for peer in request.survivors
            if peer != self.site
        }
        return ConfirmMessage(self.exchange, self.site, confirmations)

    def unmask(self, request: UnmaskRequest) -> UnmaskMessage:
        """Return shares of the survivors' self masks and of the dropped sites' keys.

        A repeated request gets the same answer; a different one is refused.
        """
        survivors = self._parties.sort_sites(request.survivors)
        if self._answer is not None and survivors == self._survivors:
            return self._answer
        self._require_stage("masked", "unmask")
        self._check_request(request)
        if self._parties.confirmed:
            self._check_confirmations(request)
        seeds = {site: self._held[site][:SHARE_BYTES] for site in request.survivors}
        keys = {site: self._held[site][SHARE_BYTES:] for site in request.dropped}
        self._answer = UnmaskMessage(self.exchange, self.site, seeds, keys)
        self.forget()
        return self._answer

    def forget(self) -> None:
        """Erase all secrets; after that, only the earlier answer can be repeated."""
        self._stage = "closed"
        self._held = {}
        self._secrets = {}
        self._seed = b""
        self._masking_bytes = b""
        self._sharing = crypto.load_private_key(bytes(KEY_BYTES))
        self._masking = crypto.load_private_key(bytes(KEY_BYTES))

    def _require_stage(self, stage: str, action: str) -> None:
        """Raise RefusedError unless the exchange is at a stage."""
        if self._stage != stage:
            raise RefusedError(
                f"secure sum at site {self.site!r}: {action!r} is refused: each step "
                f"is taken once and in order (the exchange is at {self._stage!r})"
            )

    def _check_list(self, sites: Collection[str], what: str) -> None:
        """Raise RefusedError unless a list of sites has this site and enough others.

        Args:
            sites: The list.
            what: What the sites of the list sent, for messages.
        """
        if self.site not in sites:
            raise RefusedError(
                f"the list of {what} leaves out this site, {self.site!r}"
            )
        for site in sorted(set(sites) - set(self._parties.sites)):
            raise RefusedError(f"site {site!r} in the list of {what} is not in the job")
        if len(sites) < self._parties.threshold:
            raise RefusedError(
                f"{len(sites)} sites in the list of {what}: a sum needs at "
                f"least {self._parties.threshold}"
            )

    def _check_request(self, request: UnmaskRequest) -> None:
        """Raise RefusedError unless a list of survivors is consistent and the only one.

        From then on, this site accepts no other list.
        """
        survivors = set(request.survivors)
        dropped = set(request.dropped)
        if request.exchange != self.exchange:
            raise RefusedError("the list of survivors belongs to another exchange")
        num_listed = len(request.survivors) + len(request.dropped)
        if len(survivors) + len(dropped) != num_listed:
            raise RefusedError(
                "the lists of survivors and dropped sites contain a site twice"
            )
        for site in sorted(survivors & dropped):
            raise RefusedError(
                f"site {site!r} is listed as a survivor and as dropped: its self "
                "mask and its key together would open its update"
            )
        for site in sorted((survivors | dropped) ^ self._held.keys()):
            raise RefusedError(
                f"site {site!r} is either in the sum or in the lists of survivors "
                "and dropped sites, but not in both"
            )
        self._check_list(request.survivors, "survivors")
        survivors_in_order = self._parties.sort_sites(request.survivors)
        if self._survivors and survivors_in_order != self._survivors:
            raise AskedOtherwise(
                "this site already answered another list of survivors, and it answers "
                "only one"
            )
        for peer in survivors - {self.site}:
            expected_receipt = self._compute_receipt(peer, self.site, "masked")
            if not compare_digest(request.receipts.get(peer, b""), expected_receipt):
                raise AskedOtherwise(
                    f"sites {peer!r} and {self.site!r} received different requests "
                    "(another task, option, tensor or list of sites), or a receipt is "
                    "missing: nothing is opened"
                )
        self._survivors = survivors_in_order

    def _check_confirmations(self, request: UnmaskRequest) -> None:
        """Raise RefusedError unless enough survivors confirmed the same list."""
        num_confirmed = 1  # this site itself
        for peer, confirmation in request.confirmations.items():
            if peer == self.site or peer not in request.survivors:
                continue
            expected = self._compute_receipt(
                peer, self.site, "survivors", self._survivors
            )
            if not compare_digest(confirmation, expected):
                raise AskedOtherwise(
                    f"site {peer!r} received another list of survivors"
                )
            num_confirmed += 1
        if num_confirmed < self._parties.threshold:
            raise RefusedError(
                f"{num_confirmed} sites confirmed the survivors, "
                f"{self._parties.threshold} are needed"
            )

    def _derive_key(self, use: str, sender: str, receiver: str) -> bytes:
        """Return the key shared with another site, for one use in one direction."""
        peer = receiver if sender == self.site else sender
        if peer not in self._secrets:
            self._secrets[peer] = crypto.compute_shared_secret(
                self._sharing, self._peers[peer].sharing, peer
            )
        return crypto.derive_key(
            self._secrets[peer], self._session, use, sender, receiver
        )

    def _compute_receipt(
        self, sender: str, receiver: str, purpose: str, sites: Sequence[str] = ()
    ) -> bytes:
        """Return a proof that the sender agrees on the roster, the layout and more.

        Args:
            sender: The site that proves it.
            receiver: The site to which it proves it.
            purpose: The purpose of the proof.
            sites: The sites of a list that it covers.
        """
        key = self._derive_key("receipts", sender, receiver)
        return crypto.compute_receipt(key, self._agreement, purpose, *sites)

    def _open_box(self, sender: str, box: bytes) -> bytes:
        """Return the two shares in a box for this site.

        Raises:
            RefusedError: The box cannot be opened, or does not hold two shares.
        """
        key = self._derive_key("shares", sender, self.site)
        shares = crypto.unseal(key, box, self._session)
        if shares is None or len(shares) != 2 * SHARE_BYTES:
            raise RefusedError(
                f"the shares of site {sender!r} cannot be opened: the two sites "
                "received different keys, or the shares were changed on the way"
            )
        return shares


class SiteChain:
    """One site in a series of exchanges with increasing numbers.

    Args:
        site: As in `SecureSite`.
        parties: As in `SecureSite`.
        context: Identifies the series, as `crypto.join_parts(job, run)`.
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

    def make_keys(self, number: int, parties: Parties | None = None) -> KeysMessage:
        """Begin an exchange, abandoning all others, and return this site's keys.

        Args:
            number: The number of the exchange.
            parties: The sites of this exchange and of those after it; None keeps them.
        """
        if number <= self._newest:
            raise RefusedError(
                f"exchange {number} of the secure sum was used before (the newest is "
                f"{self._newest}): the server must start with a higher number"
            )
        for earlier in self._open.values():
            earlier.forget()
        self._open = {}
        self._parties = parties or self._parties
        return self._begin(number)

    def mask_update(
        self,
        number: int,
        boxes: Mapping[str, bytes],
        update: Update,
        **layout_options: Unpack[LayoutOptions],
    ) -> MaskedMessage:
        """Return the masked update, with the keys of the next exchange.

        See `SecureSite.mask_update`.
        """
        message = self.find_exchange(number).mask_update(
            boxes, update, **layout_options
        )
        earlier_numbers = [
            open_number for open_number in self._open if open_number < number
        ]
        for earlier_number in earlier_numbers:
            self._open.pop(earlier_number).forget()
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
        message = self.find_exchange(number).unmask(request)
        if next_keys and number + 1 in self._open:
            with suppress(RefusedError):
                shares = self._open[number + 1].make_shares(next_keys)
                message = replace(message, next_shares=shares)
        return message

    def _begin(self, number: int) -> KeysMessage:
        """Begin an exchange, and return this site's keys."""
        context = crypto.join_parts(self._context, number)
        self._newest = number
        self._open[number] = SecureSite(
            self._site, self._parties, context, self._identity
        )
        return self._open[number].make_keys()

    def find_exchange(self, number: int) -> SecureSite:
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
