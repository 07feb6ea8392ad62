"""The server's side of the secure sum: a single exchange, and a series of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hmac import compare_digest
from itertools import combinations
from math import comb
from random import SystemRandom

import numpy as np

from fednotes.core.errors import RefusedError, TrainingError
from fednotes.core.update import Total
from fednotes.privacy.secure_sum import Parties, crypto
from fednotes.privacy.secure_sum.crypto import SHARE_BYTES
from fednotes.privacy.secure_sum.fixed_point import SumLayout, check_layout, decode_sum
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
    compute_commitment,
    compute_session_id,
    derive_pair_mask_key,
    derive_self_mask_key,
)

SPARED = 2  # maximum number of answers left out if shares do not match
# Maximum number of combinations of left-out sites that are tried in turn. If there are
# more, this many random choices are tried.
MAX_CHOICES = 1000
_RANDOM = SystemRandom()


@dataclass(slots=True)
class _Sum:
    """The running sum of the updates with one layout.

    Attributes:
        layout: The layout.
        words: The sum modulo 2^64.
        sites: The sites whose updates are in the sum.
    """

    layout: SumLayout
    words: crypto.Words
    sites: set[str] = field(default_factory=set)


class SecureServer:
    """Collect the messages of one exchange phase by phase, and open the total.

    A phase ends when the caller collects the next messages to sites (`collect_keys`,
    `collect_boxes`, `make_requests`). Sites that have not answered by then have dropped
    out, and their later messages of that phase are refused. Masked updates are summed
    on arrival and not stored; integers can be summed in any order. The methods `add_…`
    raise RefusedError for a message that is wrong, late or repeated; the exchange
    continues without it. A method that ends a phase raises TrainingError below the
    threshold; then nothing can be opened.

    Attributes:
        phase: The messages that are accepted now: "keys", "shares", "masked", "unmask"
            or "closed".
        survivors: The sites in the sum, once no more updates are accepted.
        doubtful: Pairs of sites (the one that opened a share, the owner of the secret)
            whose share was wrong, although the sum could be opened. One of the two
            sites broke the protocol, probably the one that is in most pairs.
    """

    def __init__(self, parties: Parties, context: bytes) -> None:
        self._parties = parties
        self.exchange = parties.compute_exchange_digest(context)
        self.phase = "keys"
        self._keys: dict[str, KeysMessage] = {}
        self._session = b""
        self._boxes: dict[str, SharesMessage] = {}
        self._sums: dict[bytes, _Sum] = {}  # by the digest of their layout
        self._sum: _Sum | None = None  # the sum to open
        self._receipts: dict[str, dict[str, bytes]] = {}  # sender → receiver → receipt
        # Sender → receiver → confirmation of the list of survivors.
        self._confirmations: dict[str, dict[str, bytes]] = {}
        self._answers: dict[str, UnmaskMessage] = {}
        self.survivors: tuple[str, ...] = ()
        self.doubtful: list[tuple[str, str]] = []

    @property
    def sites_heard(self) -> tuple[str, ...]:
        """The sites whose masked update has arrived."""
        return self._parties.sort_sites(
            {site for part in self._sums.values() for site in part.sites}
        )

    @property
    def roster(self) -> tuple[str, ...]:
        """The sites that sent keys and shares."""
        return self._parties.sort_sites(self._boxes)

    def add_keys(self, message: KeysMessage) -> None:
        """Accept a site's public keys."""
        self._expect(
            "keys", message.site, message.exchange, set(self._parties.sites), self._keys
        )
        check_keys(message, self.exchange)
        self._keys[message.site] = message

    def collect_keys(self) -> dict[str, KeysMessage]:
        """End the phase of keys; return all keys, for every site that sent its own."""
        if self.phase == "keys":
            self._require_enough(len(self._keys), "keys")
            self._keys = {
                site: self._keys[site] for site in self._parties.sort_sites(self._keys)
            }
            self._session = compute_session_id(self.exchange, list(self._keys.values()))
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
        peers = self._keys.keys() - {message.site}
        if not _covers(message.boxes, peers, BOX_BYTES):
            raise RefusedError(
                f"the shares of site {message.site!r} do not cover all sites"
            )
        self._boxes[message.site] = message

    def collect_boxes(self) -> dict[str, dict[str, bytes]]:
        """End the phase of shares; return each receiver's boxes, by their sender."""
        if self.phase == "shares":
            self._require_enough(len(self._boxes), "shares")
            self.phase = "masked"
        return {
            receiver: {
                sender: self._boxes[sender].boxes[receiver]
                for sender in self.roster
                if sender != receiver
            }
            for receiver in self.roster
        }

    def add_masked(self, message: MaskedMessage) -> None:
        """Check a site's masked update, and add it to the sum of its layout.

        If sites send different layouts, there is a sum for each layout. `make_requests`
        chooses the sum with the most sites.
        """
        self._check_masked(message)
        layout_digest = message.layout.compute_digest()
        running_sum = self._sums.get(layout_digest)
        if running_sum is None:
            running_sum = _Sum(message.layout, message.words.copy())
            self._sums[layout_digest] = running_sum
        else:
            np.add(running_sum.words, message.words, out=running_sum.words)
        running_sum.sites.add(message.site)
        self._receipts[message.site] = dict(message.receipts)

    def _check_masked(self, message: MaskedMessage) -> None:
        """Raise RefusedError unless a masked update can be added to a sum."""
        site = message.site
        self._expect(
            "masked", site, message.exchange, set(self._boxes), set(self.sites_heard)
        )

        check_layout(message.layout)
        if message.layout.sites != len(self._parties.sites):
            raise RefusedError(
                f"site {site!r} prepared its update for a different number of sites"
            )

        words = message.words
        if words.dtype != np.uint64 or words.shape != (message.layout.words,):
            raise RefusedError(f"the masked update of site {site!r} has the wrong size")

        if not _covers(message.receipts, set(self.roster) - {site}, RECEIPT_BYTES):
            raise RefusedError(
                f"site {site!r} did not send one receipt for each other site"
            )

    def make_requests(self) -> dict[str, UnmaskRequest]:
        """End the phase of updates; return the request to each survivor.

        A request has the confirmations so far.
        """
        if self.phase == "masked":
            self._choose_sum()
            self.phase = "unmask"
        dropped = tuple(site for site in self.roster if site not in self.survivors)
        requests = {}
        for receiver in self.survivors:
            receipts = {
                sender: self._receipts[sender][receiver]
                for sender in self.survivors
                if sender != receiver
            }
            confirmations = {
                sender: by_receiver[receiver]
                for sender, by_receiver in self._confirmations.items()
                if sender != receiver
            }
            requests[receiver] = UnmaskRequest(
                self.exchange,
                self.survivors,
                dropped,
                receipts=receipts,
                confirmations=confirmations,
            )
        return requests

    def _choose_sum(self) -> None:
        """Choose the sum of most sites; these are the survivors.

        Raises:
            TrainingError: The sum has fewer sites than the threshold.
        """
        if not self._sums:
            self._require_enough(0, "updates")
        largest, *others = sorted(
            self._sums.values(), key=lambda part: len(part.sites), reverse=True
        )
        if len(largest.sites) < self._parties.threshold and others:
            raise TrainingError(_explain_difference(largest, others[0]))
        self._require_enough(len(largest.sites), "updates")
        self.survivors = self._parties.sort_sites(largest.sites)
        self._sum = largest
        self._sums = {largest.layout.compute_digest(): largest}

    def add_confirm(self, message: ConfirmMessage) -> None:
        """Accept a survivor's proofs of its list; then call `make_requests` again."""
        survivors = set(self.survivors)
        self._expect(
            "unmask", message.site, message.exchange, survivors, self._confirmations
        )
        peers = survivors - {message.site}
        if not _covers(message.confirmations, peers, RECEIPT_BYTES):
            raise RefusedError(
                f"the confirmations of site {message.site!r} do not cover all sites"
            )
        self._confirmations[message.site] = dict(message.confirmations)

    def add_unmask(self, message: UnmaskMessage) -> None:
        """Accept a survivor's shares; those of `threshold` sites suffice."""
        survivors = set(self.survivors)
        self._expect("unmask", message.site, message.exchange, survivors, self._answers)
        dropped = set(self.roster) - survivors
        has_masks = _covers(message.masks, survivors, SHARE_BYTES)
        has_keys = _covers(message.keys, dropped, SHARE_BYTES)
        if not has_masks or not has_keys:
            raise RefusedError(
                f"site {message.site!r} opened shares that the server did not request"
            )
        self._answers[message.site] = message

    def open_total(self) -> Total:
        """Remove all masks from the sum over the survivors, and return it.

        Wrong shares of up to two sites are left out if `threshold` others remain.

        Raises:
            TrainingError: Too few sites sent shares, the shares do not match the keys,
                or the masks do not cancel.
        """
        if self.phase != "unmask" or self._sum is None:
            raise TrainingError("the secure sum has no updates to open yet")
        self._require_enough(len(self._answers), "opened shares")
        layout = self._sum.layout
        layout_digest = layout.compute_digest()

        # Two kinds of masks are still in the sum: the survivors' self masks, and their
        # pair masks with sites that dropped out. Pair masks of two survivors cancel.
        cancelling_keys = []
        for site in self.survivors:
            self_key = derive_self_mask_key(
                self._rebuild_seed(site), self._session, layout_digest
            )
            cancelling_keys.append((self_key, -1))
        for site in self.roster:
            if site not in self.survivors:
                cancelling_keys += self._derive_cancelling_keys(site, layout_digest)

        # The sum is changed in place, so it cannot be opened a second time.
        self.phase = "closed"
        crypto.add_streams(self._sum.words, cancelling_keys)
        return decode_sum(self._sum.words, layout, self.survivors)

    def _rebuild_seed(self, site: str) -> bytes:
        """Return the seed of a survivor's self mask from the opened shares."""

        def matches_commitment(seed: bytes) -> bool:
            """Return whether the site has committed itself to this seed."""
            expected = self._keys[site].commitment
            return compare_digest(compute_commitment(seed, self.exchange), expected)

        shares = {
            opener: answer.masks[site] for opener, answer in self._answers.items()
        }
        return self._rebuild_secret(site, shares, matches_commitment, "mask")

    def _derive_cancelling_keys(
        self, dropped: str, layout_digest: bytes
    ) -> list[tuple[bytes, int]]:
        """Return the keys that cancel the survivors' pair masks with a dropped site.

        The two sites of a pair add the same mask with opposite signs, so that it
        cancels in the sum. The dropped site did not add its mask, so the server adds it
        instead. It derives the mask from the dropped site's private key, which it
        rebuilds from the opened shares.

        Args:
            dropped: The dropped site.
            layout_digest: Digest of the layout.

        Returns:
            For each survivor, the key of the pair's mask, and the sign that the dropped
            site would have used.
        """

        def matches_public_key(raw: bytes) -> bool:
            """Return whether this private key belongs to the site's public key."""
            public_key = crypto.derive_public_key(crypto.load_private_key(raw))
            return public_key == self._keys[dropped].masking

        shares = {
            opener: answer.keys[dropped] for opener, answer in self._answers.items()
        }
        raw_key = self._rebuild_secret(dropped, shares, matches_public_key, "key")
        private_key = crypto.load_private_key(raw_key)
        keys = []
        for site in self.survivors:
            secret = crypto.compute_shared_secret(
                private_key, self._keys[site].masking, site
            )
            pair_key = derive_pair_mask_key(
                secret, self._session, site, dropped, layout_digest
            )
            # In a pair, the site whose name comes first adds the mask, and the other
            # one subtracts it.
            sign = 1 if dropped < site else -1
            keys.append((pair_key, sign))
        return keys

    def _rebuild_secret(
        self,
        owner: str,
        shares: dict[str, bytes],
        is_correct: Callable[[bytes], bool],
        what: str,
    ) -> bytes:
        """Return a site's secret from `threshold` shares of it that are correct.

        Sites whose shares turn out to be wrong are recorded in `doubtful`.

        Args:
            owner: The site whose secret it is.
            shares: Site that opened a share to the share.
            is_correct: Returns whether a secret is the site's.
            what: The secret, for messages.

        Raises:
            TrainingError: Too many shares are wrong.
        """

        def combine_shares_of(sites: Collection[str]) -> bytes:
            """Return the secret from these sites' shares; b"" if there is none."""
            try:
                return crypto.combine_shares(
                    {self._parties.find_point(site): shares[site] for site in sites}
                )
            except TrainingError:
                return b""

        default_sites = self._parties.sort_sites(shares)[: self._parties.threshold]
        for sites in self._choose_sites(shares):
            secret = combine_shares_of(sites)
            if not secret or not is_correct(secret):
                continue
            if sites != default_sites:
                # Some share is wrong: try each other share in place of a correct one.
                correct_sites = sites[1:]
                for site in shares.keys() - set(sites):
                    if combine_shares_of((*correct_sites, site)) != secret:
                        self.doubtful.append((site, owner))
            return secret
        raise TrainingError(
            f"the shares of the {what} of site {owner!r} do not match what it sent: it "
            "or one of the sites that opened them sent wrong shares"
        )

    def _choose_sites(self, sites: Collection[str]) -> Iterator[tuple[str, ...]]:
        """Yield choices of `threshold` sites, preferring sites that are not in doubt.

        At most `SPARED` sites are left out. With many sites, there are too many pairs
        to try them all, so random choices follow. With a threshold of half of the
        sites, about one in four of these contains neither of two sites that lie.
        """
        threshold = self._parties.threshold
        sites_in_doubt = {site for site, _ in self.doubtful}
        by_trust = sorted(
            self._parties.sort_sites(sites), key=lambda site: site in sites_in_doubt
        )
        max_left_out = min(SPARED, len(by_trust) - threshold)
        yielded = set()
        for num_left_out in range(max_left_out + 1):
            if comb(len(by_trust), num_left_out) > MAX_CHOICES:
                for _ in range(MAX_CHOICES):
                    random_sites = _RANDOM.sample(by_trust, threshold)
                    yield self._parties.sort_sites(random_sites)
                return
            for left_out in combinations(by_trust, num_left_out):
                remaining = [site for site in by_trust if site not in left_out]
                choice = self._parties.sort_sites(remaining[:threshold])
                if choice not in yielded:
                    yielded.add(choice)
                    yield choice

    def _expect(
        self,
        phase: str,
        site: str,
        exchange: bytes,
        senders: set[str],
        answered: Collection[str],
    ) -> None:
        """Raise RefusedError for a message that is not expected.

        Args:
            phase: The phase to which the message belongs.
            site: The site that sent it.
            exchange: The exchange that it names.
            senders: The sites that take part in the phase.
            answered: The sites whose message has arrived.
        """
        if site not in senders:
            raise RefusedError(
                f"site {site!r} takes no part in this step of the secure sum"
            )
        if exchange != self.exchange:
            raise RefusedError(f"site {site!r} answers for another exchange")
        if self.phase != phase:
            raise RefusedError(
                f"site {site!r} is late: the secure sum is already at {self.phase!r}"
            )
        if site in answered:
            raise RefusedError(f"site {site!r} answered twice")

    def _require_enough(self, count: int, what: str) -> None:
        """Raise TrainingError if fewer sites than the threshold sent something."""
        if count < self._parties.threshold:
            raise TrainingError(
                f"secure sum: {what} of {count} of {len(self._parties.sites)} sites, "
                f"and the threshold is {self._parties.threshold}: nothing was opened"
            )


def _covers(values: Mapping[str, bytes], sites: Collection[str], size: int) -> bool:
    """Return whether there is a value of this size for exactly these sites."""
    has_sizes = all(len(value) == size for value in values.values())
    return has_sizes and values.keys() == set(sites)


def _explain_difference(one: _Sum, other: _Sum) -> str:
    """Describe how the layouts of two groups of sites differ."""
    difference = _compare_layouts(one.layout, other.layout)
    return (
        f"sites {min(one.sites)!r} and {min(other.sites)!r} prepared different sums "
        f"({difference}): they must run the same model and agree on the metrics' names"
    )


def _compare_layouts(one: SumLayout, other: SumLayout) -> str:
    """Return the first difference of two layouts, in words."""
    fields_of_one = {(field.kind, field.name): field for field in one.fields}
    fields_of_other = {(field.kind, field.name): field for field in other.fields}
    for kind, name in sorted(fields_of_one.keys() ^ fields_of_other.keys()):
        return f"only one of them has {kind} {name!r}"
    if one.purpose != other.purpose:
        return "they received different tasks, rounds, options or tensors"
    for key, field_of_one in fields_of_one.items():
        if field_of_one != fields_of_other[key]:
            return f"the shape, dtype or limit of {field_of_one.name!r} differs"
    return "order"


class ServerChain:
    """The server in a series of exchanges.

    `current` is the current exchange. If `prepared` names enough sites, these can send
    their updates immediately. Otherwise, `start` a new exchange, and first collect keys
    and shares. Do the same after a failed exchange, because its messages are not
    reused.

    Attributes:
        number: The number of the current exchange.
        parties: The sites of the current exchange.
    """

    def __init__(self, parties: Parties, context: bytes) -> None:
        self.parties = parties
        self._context = context
        self.number = -1
        self._current: SecureServer | None = None
        self._next: SecureServer | None = None

    @property
    def current(self) -> SecureServer:
        """The current exchange.

        Raises:
            TrainingError: There is no current exchange.
        """
        if self._current is None:
            raise TrainingError("the secure sum has no exchange under way: start one")
        return self._current

    @property
    def prepared(self) -> tuple[str, ...]:
        """The sites that can send updates now; empty if the server must `start`."""
        if self._current is None or self._current.phase != "masked":
            return ()
        return self._current.roster

    def start(self, parties: Parties | None = None) -> SecureServer:
        """Begin an exchange for which keys and shares must be collected.

        Args:
            parties: The sites of this exchange and of those after it; None keeps them.
        """
        self.parties = parties or self.parties
        self.number += 2  # the sites may have used the next number for their keys
        self._current = self._make_server(self.number)
        self._next = None
        return self._current

    def add_masked(self, message: MaskedMessage) -> None:
        """Accept a masked update with the site's keys for the next exchange.

        A site whose keys cannot be used takes no part in the next exchange; its update
        counts in this one.

        Raises:
            RefusedError: The update is wrong, late or repeated.
        """
        self.current.add_masked(message)
        if self._next is None:
            self._next = self._make_server(self.number + 1)
        keys = message.next_keys
        # A site may not send keys in the name of another one.
        if keys is not None and keys.site == message.site:
            with suppress(RefusedError):
                self._next.add_keys(keys)

    def make_requests(self) -> tuple[dict[str, UnmaskRequest], dict[str, KeysMessage]]:
        """Return the request to each survivor, and the keys of the next exchange."""
        requests = self.current.make_requests()
        next_keys: dict[str, KeysMessage] = {}
        if self._next is not None:
            with suppress(TrainingError):  # too few sites; `start` the next exchange
                next_keys = self._next.collect_keys()
        return requests, next_keys

    def add_unmask(self, message: UnmaskMessage) -> None:
        """Accept a survivor's shares, and those for the next exchange."""
        self.current.add_unmask(message)
        shares = message.next_shares
        if self._next is None or shares is None:
            return
        if shares.site == message.site:
            with suppress(RefusedError):
                self._next.add_shares(shares)

    def open_total(self) -> Total:
        """Open the sum over the survivors, and return it.

        If enough sites sent keys and shares for the next exchange, it becomes the
        current one. Otherwise there is no current exchange, and the server must `start`
        one.

        Raises:
            TrainingError: As `SecureServer.open_total`.
        """
        total = self.current.open_total()
        next_exchange = self._next
        self._current = None
        self._next = None
        # `make_requests` began the phase "shares" only if enough sites had sent keys.
        if next_exchange is not None and next_exchange.phase == "shares":
            with suppress(TrainingError):  # too few sites sent shares
                # This call only ends the phase. The encrypted shares that it returns
                # travel with the next task, for which the caller collects them again.
                next_exchange.collect_boxes()
                self._current = next_exchange
                self.number += 1
        return total

    def _make_server(self, number: int) -> SecureServer:
        """Return the server of an exchange."""
        return SecureServer(self.parties, crypto.join_parts(self._context, number))
