"""One site's side of one exchange of the secure sum. Threats and names: `secagg`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict, Unpack

from fednotes.core.errors import ConfigError, RefusedError, TrainingError
from fednotes.core.update import Update
from fednotes.privacy.secure_sum import masks
from fednotes.privacy.secure_sum.fixed_point import Layout, Limits, encode
from fednotes.privacy.secure_sum.messages import (
    ConfirmMessage,
    KeysMessage,
    MaskedMessage,
    SharesMessage,
    UnmaskMessage,
    UnmaskRequest,
)
from fednotes.privacy.secure_sum.shamir import PRIME, SHARE_BYTES, share_bytes

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

FEWEST_SITES, MOST_SITES = 3, 250
REFUSALS = 2  # updates out of range: each tells the server something of their size
KEYS_SIZES = ("sharing", "masking", "commitment")
Random = Callable[[int], bytes]


class AskedOtherwise(RefusedError):
    """The server asked two sites for different things, or shows them different lists of sites.
    reason: as a site's ledger has it."""

    reason = "asked-otherwise"


def default_threshold(sites: int) -> int:
    """The least that a lying server cannot get around: more than half."""
    return sites // 2 + 1


def checked_threshold(sites: Sequence[str], threshold: int | None) -> int:
    """The threshold, the default one for None.

    Raises ConfigError for a list of sites or a threshold that protect nobody.
    """
    if threshold is None:
        threshold = default_threshold(len(sites))
    if len(set(sites)) != len(sites):
        raise ConfigError("secure sum: a site is listed twice")
    if not FEWEST_SITES <= len(sites) <= MOST_SITES:
        raise ConfigError(
            f"secure sum: {len(sites)} sites; it takes {FEWEST_SITES} to {MOST_SITES} "
            "(of two sites, each could take its own part out of the sum)"
        )
    if not default_threshold(len(sites)) <= threshold <= len(sites):
        raise ConfigError(
            f"secure sum: a threshold of {threshold} of {len(sites)} sites; it must be from "
            f"{default_threshold(len(sites))} (over half, or a lying server learns single sites' "
            f"numbers) to {len(sites)}"
        )
    return threshold


def exchange_id(context: bytes, sites: Sequence[str], threshold: int, confirmed: bool) -> bytes:
    """What all messages of an exchange carry; sites that differ in any of it do not meet."""
    return masks.digest(context, threshold, int(confirmed), len(sites), *sites)


def session_id(exchange: bytes, keys: Sequence[KeysMessage]) -> bytes:
    """Digest of all public keys, in the order of the sites."""
    rows = (part for k in keys for part in (k.site, k.sharing, k.masking, k.commitment))
    return masks.digest(exchange, *rows)


def self_stream(seed: bytes, session: bytes, layout: bytes) -> bytes:
    """The key of a site's self mask."""
    return masks.derived(seed, session, "self mask", layout)


def pair_stream(secret: bytes, session: bytes, one: str, other: str, layout: bytes) -> bytes:
    """The key of a pair's mask, from their X25519 secret: one-way, and for this use alone."""
    return masks.derived(secret, session, "pair mask", *sorted((one, other)), layout)


def commitment(seed: bytes, exchange: bytes) -> bytes:
    """Binds a site to its seed, so that wrong shares are noticed; says nothing about it."""
    return masks.derived(seed, exchange, "commitment")


def check_keys(message: KeysMessage, exchange: bytes) -> None:
    """Raises RefusedError for a message of another exchange or of wrong sizes."""
    if message.exchange != exchange:
        raise RefusedError(
            f"the keys of site {message.site!r} are of another exchange, list of sites or threshold"
        )
    if any(len(getattr(message, name)) != masks.KEY_BYTES for name in KEYS_SIZES):
        raise RefusedError(f"the keys of site {message.site!r} have a wrong length")


class LaidOut(TypedDict, total=False):
    """How an update becomes words, equal at all sites: see `Layout.of`."""

    purpose: str
    limits: Limits | None
    metrics: Sequence[str] | None


class Party:
    """What a site and the server of one exchange have in common: the terms of it.

    Raises ConfigError for impossible parameters, MissingExtra without `cryptography`.
    """

    def __init__(
        self, sites: Sequence[str], context: bytes, threshold: int | None, confirmed: bool
    ) -> None:
        masks.need_cryptography()
        self._sites = tuple(sites)
        self.threshold = checked_threshold(self._sites, threshold)
        self.exchange = exchange_id(context, self._sites, self.threshold, confirmed)
        self._confirmed = confirmed

    def _in_order(self, sites: Iterable[str]) -> tuple[str, ...]:
        wanted = set(sites)
        return tuple(site for site in self._sites if site in wanted)

    def _point(self, site: str) -> int:
        """Where the polynomials of secrets are evaluated for a site's share."""
        return self._sites.index(site) + 1


def _signed(keys: KeysMessage) -> bytes:
    parts = (keys.exchange, keys.site, keys.sharing, keys.masking, keys.commitment)
    return masks.joined("fednotes secure sum keys", *parts)


class SecureSite(Party):
    """One site in one exchange: keys, shares, masked, unmask, each once and in this order.

    site: its name, one of `sites` (the same list and order everywhere).
    context: names this exchange, `joined(job, run, number)`; it need not be unpredictable.
    threshold: how many survivors a sum must have; over half of the sites.
    identity: signs this site's keys and checks the others'; None trusts the server to relay.
    confirmed: open nothing before `threshold` sites confirmed the same list of survivors.
    random: makes secret bytes; another source is for tests only.

    Secrets live in this object only: a process that ends takes its part of the exchange with
    it, and is one more site that dropped out. They are forgotten after `unmask`.

    Raises ConfigError for impossible parameters, MissingExtra without `cryptography`;
    every method RefusedError for what the protocol forbids.
    """

    def __init__(
        self,
        site: str,
        sites: Sequence[str],
        context: bytes,
        threshold: int | None = None,
        *,
        identity: masks.Identity | None = None,
        confirmed: bool = False,
        random: Random = secrets.token_bytes,
    ) -> None:
        super().__init__(sites, context, threshold, confirmed)
        if site not in self._sites:
            raise ConfigError(f"secure sum: site {site!r} is not one of its sites")
        self.site = site
        self._identity, self._random = identity, random
        self._sharing: X25519PrivateKey = masks.private_key(random(masks.KEY_BYTES))
        self._masking_bytes, self._seed = random(masks.KEY_BYTES), random(masks.KEY_BYTES)
        self._masking: X25519PrivateKey = masks.private_key(self._masking_bytes)
        self._own_keys = self._make_keys()
        self._stage = "keys"
        self._refusals = 0
        self._peers: dict[str, KeysMessage] = {}  # U1 without this site
        self._secrets: dict[str, bytes] = {}  # of the sharing keys, by peer
        self._held: dict[str, bytes] = {}  # site → its two shares that this site holds
        self._agreement = b""  # digest of roster and layout
        self._listed: tuple[str, ...] = ()  # the one list of survivors that this site goes by
        self._answer: UnmaskMessage | None = None

    def keys(self) -> KeysMessage:
        """This site's public keys."""
        return self._own_keys

    def shares(self, keys: Mapping[str, KeysMessage]) -> SharesMessage:
        """Shares of this site's two secrets, sealed for each other site in `keys`.

        keys: of all sites that take part, this one too; at least the threshold.
        """
        self._at("keys", "shares")
        self._check_list(keys, "keys")
        if keys[self.site] != self._own_keys:
            raise RefusedError("the list of keys has other keys for this site than it sent")
        for site, message in keys.items():
            if message.site != site:
                raise RefusedError(f"the keys of site {message.site!r} are listed as {site!r}'s")
            check_keys(message, self.exchange)
            if self._identity and not self._identity.verify(
                site, _signed(message), message.signature
            ):
                raise RefusedError(f"the keys of site {site!r} are not signed by it")
        order = self._in_order(keys)
        public = [raw for site in order for raw in (keys[site].sharing, keys[site].masking)]
        if len(set(public)) != len(public):
            raise RefusedError("the list of keys has the same key twice")
        self._session = session_id(self.exchange, [keys[site] for site in order])
        self._peers = {site: keys[site] for site in order if site != self.site}
        points = [self._point(site) for site in order]
        halves = [
            share_bytes(secret, self.threshold, points, self._below)
            for secret in (self._seed, self._masking_bytes)
        ]
        both = {s: halves[0][p] + halves[1][p] for s, p in zip(order, points, strict=True)}
        self._held = {self.site: both.pop(self.site)}
        boxes = {
            to: masks.sealed(self._key("shares", self.site, to), text, self._session)
            for to, text in both.items()
        }
        self._stage = "shares"
        return SharesMessage(self.exchange, self.site, self._session, boxes)

    def masked(
        self, boxes: Mapping[str, bytes], update: Update, **how: Unpack[LaidOut]
    ) -> MaskedMessage:
        """This site's update under its masks.

        boxes: sender → what it sealed for this site; with this site they are the roster.
        how: equal at all sites, see `Layout.of`.
        Raises TrainingError before anything is masked for values that are not finite or out of
        range; the exchange may then be asked again, once, with wider limits (a server that tries
        one limit after the other would find out how large the values are).
        """
        self._at("shares", "masked")
        self._check_list({*boxes, self.site}, "shares")
        if unknown := sorted(boxes.keys() - self._peers.keys()):
            raise RefusedError(f"shares of site {unknown[0]!r}, which sent no keys")
        layout = Layout.of(update, len(self._sites), **how)
        words = self._encoded(update, layout)
        held = {site: self._opened(site, box) for site, box in boxes.items()}
        self._held |= held
        roster = self._in_order(self._held)
        where = layout.digest()
        self._agreement = masks.digest("agreement", self._session, where, *roster)
        streams = [(self_stream(self._seed, self._session, where), 1)]
        for site in held:
            secret = masks.agreed(self._masking, self._peers[site].masking, site)
            key = pair_stream(secret, self._session, self.site, site, where)
            streams.append((key, 1 if self.site < site else -1))
        masks.add_streams(words, streams)
        receipts = {to: self._receipt(self.site, to, "masked") for to in held}
        self._stage = "masked"
        return MaskedMessage(self.exchange, self.site, layout, receipts, words)

    def confirm(self, request: UnmaskRequest) -> ConfirmMessage:
        """Receipts of the list of survivors for the other survivors; for one list only."""
        self._at("masked", "confirm")
        self._check_request(request)
        others = [site for site in request.survivors if site != self.site]
        return ConfirmMessage(
            self.exchange,
            self.site,
            {to: self._receipt(self.site, to, "survivors", *self._listed) for to in others},
        )

    def unmask(self, request: UnmaskRequest) -> UnmaskMessage:
        """For each survivor the share of its self mask, for each dropped site that of its key.

        The same request again gets the same answer; another one is refused.
        """
        if self._answer is not None and self._in_order(request.survivors) == self._listed:
            return self._answer
        self._at("masked", "unmask")
        self._check_request(request)
        if self._confirmed:
            self._check_confirmations(request)
        self._answer = UnmaskMessage(
            self.exchange,
            self.site,
            {site: self._held[site][:SHARE_BYTES] for site in request.survivors},
            {site: self._held[site][SHARE_BYTES:] for site in request.dropped},
        )
        self.forget()
        return self._answer

    def forget(self) -> None:
        """Drop all secrets; nothing but a repeated answer can come from this object any more."""
        self._stage = "closed"
        self._held, self._secrets = {}, {}
        self._seed = self._masking_bytes = b""
        self._sharing = self._masking = masks.private_key(bytes(masks.KEY_BYTES))

    def _make_keys(self) -> KeysMessage:
        message = KeysMessage(
            self.exchange,
            self.site,
            masks.public_bytes(self._sharing),
            masks.public_bytes(self._masking),
            commitment(self._seed, self.exchange),
        )
        if self._identity is None:
            return message
        return replace(message, signature=self._identity.sign(_signed(message)))

    def _encoded(self, update: Update, layout: Layout) -> masks.Words:
        try:
            return encode(update, layout)
        except TrainingError:
            self._refusals += 1
            if self._refusals == REFUSALS:
                self.forget()
            raise

    def _at(self, stage: str, action: str) -> None:
        if self._stage != stage:
            raise RefusedError(
                f"secure sum at site {self.site!r}: {action!r} is refused: each step is taken "
                f"once and in order (the exchange stands at {self._stage!r})"
            )

    def _check_list(self, listed: Collection[str], what: str) -> None:
        if self.site not in listed:
            raise RefusedError(f"the list of {what} leaves out this site, {self.site!r}")
        if unknown := sorted(set(listed) - set(self._sites)):
            raise RefusedError(f"site {unknown[0]!r} in the list of {what} is not in the job")
        if len(listed) < self.threshold:
            raise RefusedError(
                f"{len(listed)} sites in the list of {what}: a sum takes {self.threshold}"
            )

    def _check_request(self, request: UnmaskRequest) -> None:
        survivors, dropped = set(request.survivors), set(request.dropped)
        if request.exchange != self.exchange:
            raise RefusedError("the survivors are of another exchange")
        if len(survivors) + len(dropped) != len(request.survivors) + len(request.dropped):
            raise RefusedError("a site is listed twice among survivors and dropped")
        if both := sorted(survivors & dropped):
            raise RefusedError(
                f"site {both[0]!r} is called a survivor and dropped: its self mask and its key "
                "together would open its update"
            )
        if survivors | dropped != self._held.keys():
            odd = sorted((survivors | dropped) ^ self._held.keys())
            raise RefusedError(f"site {odd[0]!r} is not in both the sum and the lists")
        self._check_list(request.survivors, "survivors")
        listed = self._in_order(request.survivors)
        if self._listed and listed != self._listed:
            raise AskedOtherwise("another list of survivors was asked for before: one is answered")
        for site in survivors - {self.site}:
            own = self._receipt(site, self.site, "masked")
            if not masks.same(request.receipts.get(site, b""), own):
                raise AskedOtherwise(
                    f"site {site!r} was asked something else than site {self.site!r} (another "
                    "task, option, tensor or list of sites), or its receipt is missing: nothing "
                    "is opened"
                )
        self._listed = listed

    def _check_confirmations(self, request: UnmaskRequest) -> None:
        good = 1  # this site itself
        for site, given in request.confirmations.items():
            if site == self.site or site not in request.survivors:
                continue
            if not masks.same(given, self._receipt(site, self.site, "survivors", *self._listed)):
                raise AskedOtherwise(f"site {site!r} was shown another list of survivors")
            good += 1
        if good < self.threshold:
            raise RefusedError(f"{good} sites confirmed the survivors, {self.threshold} are needed")

    def _key(self, use: str, sender: str, receiver: str) -> bytes:
        """A key that this site shares with one other, for one use in one direction."""
        other = receiver if sender == self.site else sender
        if other not in self._secrets:
            self._secrets[other] = masks.agreed(self._sharing, self._peers[other].sharing, other)
        return masks.derived(self._secrets[other], self._session, use, sender, receiver)

    def _receipt(self, sender: str, receiver: str, *what: str) -> bytes:
        return masks.receipt(self._key("receipts", sender, receiver), self._agreement, *what)

    def _opened(self, sender: str, box: bytes) -> bytes:
        text = masks.opened(self._key("shares", sender, self.site), box, self._session)
        if text is None or len(text) != 2 * SHARE_BYTES:
            raise RefusedError(
                f"the shares of site {sender!r} cannot be opened: the two sites were shown "
                "different keys, or the shares were changed on the way"
            )
        return text

    def _below(self, bound: int) -> int:
        """Uniform below `bound` (at most the field's prime), by rejection."""
        size = PRIME.bit_length()
        while True:
            drawn = int.from_bytes(self._random(SHARE_BYTES), "big") >> (8 * SHARE_BYTES - size)
            if drawn < bound:
                return drawn
