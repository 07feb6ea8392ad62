"""The server's side of one exchange of the secure sum. Threats and names: `secagg`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from fednotes.core.errors import RefusedError, TrainingError
from fednotes.core.update import Total
from fednotes.privacy.secure_sum import masks
from fednotes.privacy.secure_sum.fixed_point import Layout, check_layout, decode
from fednotes.privacy.secure_sum.messages import (
    ConfirmMessage,
    KeysMessage,
    MaskedMessage,
    SharesMessage,
    UnmaskMessage,
    UnmaskRequest,
)
from fednotes.privacy.secure_sum.shamir import SHARE_BYTES, combine_bytes
from fednotes.privacy.secure_sum.site import (
    Party,
    check_keys,
    commitment,
    pair_stream,
    self_stream,
    session_id,
)

BOX_BYTES = 2 * SHARE_BYTES + 16  # two shares and a tag
RECEIPT_BYTES = 32
SPARED = 2  # answers left out at once, where shares do not fit


@dataclass(slots=True)
class _Sum:
    """Words added so far, of updates of one layout."""

    layout: Layout
    words: masks.Words
    sites: set[str] = field(default_factory=set)


class SecureServer(Party):
    """Collects one exchange's messages phase by phase, and makes the total.

    Each phase is closed by asking for what goes out next (`keys`, `boxes`, `requests`);
    whoever was not heard by then has dropped out, and a later message of that phase is refused.
    Masked updates are added as they come (in any order: integers), and not kept.
    `add_…` raise RefusedError for a message that is wrong, late or doubled: the exchange goes
    on without it. What closes a phase raises TrainingError below the threshold; nothing can be
    opened then.
    """

    def __init__(
        self,
        sites: Sequence[str],
        context: bytes,
        threshold: int | None = None,
        *,
        confirmed: bool = False,
    ) -> None:
        super().__init__(sites, context, threshold, confirmed)
        self._phase = "keys"
        self._keys: dict[str, KeysMessage] = {}
        self._session = b""
        self._boxes: dict[str, SharesMessage] = {}
        self._sums: dict[bytes, _Sum] = {}
        self._receipts: dict[str, dict[str, bytes]] = {}  # sender → receiver → receipt
        self._confirmations: dict[str, dict[str, bytes]] = {}
        self._answers: dict[str, UnmaskMessage] = {}
        self._survivors: tuple[str, ...] = ()
        self._doubtful: list[tuple[str, str]] = []

    @property
    def phase(self) -> str:
        """What the server takes now: keys, shares, masked, unmask, or closed."""
        return self._phase

    @property
    def heard(self) -> tuple[str, ...]:
        """Sites whose message of the present phase is here."""
        if self._phase == "masked":
            return self._in_order({site for part in self._sums.values() for site in part.sites})
        at: dict[str, Collection[str]] = {
            "keys": self._keys,
            "shares": self._boxes,
            "unmask": self._answers,
        }
        return self._in_order(at.get(self._phase, ()))

    @property
    def roster(self) -> tuple[str, ...]:
        """Sites that this exchange began with: they sent keys and shares."""
        return self._in_order(self._boxes)

    @property
    def survivors(self) -> tuple[str, ...]:
        """Sites in the sum, once the updates are closed."""
        return self._survivors

    @property
    def doubtful(self) -> tuple[tuple[str, str], ...]:
        """(who opened it, whose secret) of shares that were wrong, though the sum was made.

        One of the two sites did not do as the protocol says; a site that is in most pairs did it.
        """
        return tuple(self._doubtful)

    def add_keys(self, message: KeysMessage) -> None:
        """A site's public keys."""
        self._expect("keys", message.site, message.exchange, set(self._sites), self._keys)
        check_keys(message, self.exchange)
        self._keys[message.site] = message

    def keys(self) -> dict[str, KeysMessage]:
        """All keys, the same for every site that sent its own."""
        if self._phase == "keys":
            self._enough(len(self._keys), "keys")
            self._keys = {site: self._keys[site] for site in self._in_order(self._keys)}
            self._session = session_id(self.exchange, list(self._keys.values()))
            self._phase = "shares"
        return dict(self._keys)

    def add_shares(self, message: SharesMessage) -> None:
        """A site's sealed shares."""
        self._expect("shares", message.site, message.exchange, set(self._keys), self._boxes)
        if message.session != self._session:
            raise RefusedError(f"the shares of site {message.site!r} are for other keys")
        if message.boxes.keys() != self._keys.keys() - {message.site}:
            raise RefusedError(f"the shares of site {message.site!r} are not for all sites")
        if any(len(box) != BOX_BYTES for box in message.boxes.values()):
            raise RefusedError(f"the shares of site {message.site!r} have a wrong length")
        self._boxes[message.site] = message

    def boxes(self) -> dict[str, dict[str, bytes]]:
        """For each site of the roster: sender → box."""
        if self._phase == "shares":
            self._enough(len(self._boxes), "shares")
            self._phase = "masked"
        return {
            to: {sender: self._boxes[sender].boxes[to] for sender in self.roster if sender != to}
            for to in self.roster
        }

    def add_masked(self, message: MaskedMessage) -> None:
        """A site's masked update. Of several layouts the one that most sites sent counts."""
        site = message.site
        self._expect("masked", site, message.exchange, set(self._boxes), set(self.heard))
        check_layout(message.layout)
        if message.layout.sites != len(self._sites):
            raise RefusedError(f"site {site!r} laid its update out for another number of sites")
        words = message.words
        if words.dtype != np.uint64 or words.shape != (message.layout.words,):
            raise RefusedError(f"the masked update of site {site!r} has a wrong size")
        if message.receipts.keys() != set(self.roster) - {site} or any(
            len(receipt) != RECEIPT_BYTES for receipt in message.receipts.values()
        ):
            raise RefusedError(f"the receipts of site {site!r} are not one for each other site")
        where = message.layout.digest()
        if where not in self._sums:
            self._sums[where] = _Sum(message.layout, words.copy())
        else:
            np.add(self._sums[where].words, words, out=self._sums[where].words)
        self._sums[where].sites.add(site)
        self._receipts[site] = dict(message.receipts)

    def requests(self) -> dict[str, UnmaskRequest]:
        """What each survivor is asked, with the confirmations that are here by now."""
        if self._phase == "masked":
            if not self._sums:
                self._enough(0, "updates")
            layouts = sorted(self._sums.values(), key=lambda part: -len(part.sites))
            if len(layouts[0].sites) < self.threshold and len(layouts) > 1:
                raise TrainingError(_difference(layouts[0], layouts[1]))
            self._enough(len(layouts[0].sites), "updates")
            self._survivors = self._in_order(layouts[0].sites)
            self._sums = {b"": layouts[0]}
            self._phase = "unmask"
        dropped = tuple(site for site in self.roster if site not in self._survivors)
        return {
            to: UnmaskRequest(
                self.exchange,
                self._survivors,
                dropped,
                {s: self._receipts[s][to] for s in self._survivors if s != to},
                {s: given[to] for s, given in self._confirmations.items() if s != to},
            )
            for to in self._survivors
        }

    def add_confirm(self, message: ConfirmMessage) -> None:
        """A survivor's receipts of the list of survivors; then ask for `requests` again."""
        survivors = set(self._survivors)
        self._expect("unmask", message.site, message.exchange, survivors, self._confirmations)
        if message.confirmations.keys() != survivors - {message.site} or any(
            len(receipt) != RECEIPT_BYTES for receipt in message.confirmations.values()
        ):
            raise RefusedError(f"the confirmations of site {message.site!r} are not for all")
        self._confirmations[message.site] = dict(message.confirmations)

    def add_unmask(self, message: UnmaskMessage) -> None:
        """A survivor's shares. `threshold` of these are enough."""
        survivors = set(self._survivors)
        self._expect("unmask", message.site, message.exchange, survivors, self._answers)
        shares = [*message.masks.values(), *message.keys.values()]
        if (
            message.masks.keys() != survivors
            or message.keys.keys() != set(self.roster) - survivors
            or any(len(share) != SHARE_BYTES for share in shares)
        ):
            raise RefusedError(f"the opened shares of site {message.site!r} are not what was asked")
        self._answers[message.site] = message

    def total(self) -> Total:
        """Σ over the survivors.

        Wrong shares of up to two sites are passed over while `threshold` others are there.
        Raises TrainingError below the threshold, for shares that do not fit the keys, and for
        masks that do not cancel.
        """
        if self._phase != "unmask":
            raise TrainingError("the secure sum has no updates to open yet")
        self._enough(len(self._answers), "opened shares")
        part = self._sums[b""]
        where = part.layout.digest()
        streams = [(self_stream(self._seed(s), self._session, where), -1) for s in self._survivors]
        for site in self.roster:
            if site not in self._survivors:
                streams += self._left_over(site, where)
        self._phase = "closed"
        masks.add_streams(part.words, streams)
        return decode(part.words, part.layout, self._survivors)

    def _seed(self, site: str) -> bytes:
        def fits(seed: bytes) -> bool:
            return masks.same(commitment(seed, self.exchange), self._keys[site].commitment)

        shares = {s: answer.masks[site] for s, answer in self._answers.items()}
        return self._rebuilt(site, shares, fits, "mask")

    def _left_over(self, dropped: str, where: bytes) -> list[tuple[bytes, int]]:
        """The streams that survivors put on for one that dropped out, to be taken off."""

        def fits(raw: bytes) -> bool:
            return masks.public_bytes(masks.private_key(raw)) == self._keys[dropped].masking

        shares = {s: answer.keys[dropped] for s, answer in self._answers.items()}
        key = masks.private_key(self._rebuilt(dropped, shares, fits, "key"))
        streams = []
        for site in self._survivors:
            secret = masks.agreed(key, self._keys[site].masking, site)
            stream = pair_stream(secret, self._session, site, dropped, where)
            streams.append((stream, -1 if site < dropped else 1))
        return streams

    def _rebuilt(
        self, of: str, shares: dict[str, bytes], fits: Callable[[bytes], bool], what: str
    ) -> bytes:
        """The secret of a site, from `threshold` of its shares that fit together."""

        def secret(chosen: Collection[str]) -> bytes:
            try:
                return combine_bytes({self._point(site): shares[site] for site in chosen})
            except TrainingError:
                return b""

        for chosen in self._choices(shares):
            found = secret(chosen)
            if not found or not fits(found):
                continue
            if chosen != self._in_order(shares)[: self.threshold]:
                for site in shares.keys() - set(chosen):  # in place of one that is right
                    if secret((*chosen[1:], site)) != found:
                        self._doubtful.append((site, of))
            return found
        raise TrainingError(
            f"the shares of the {what} of site {of!r} do not fit what it sent: "
            "it or one of the sites that opened them sent wrong ones"
        )

    def _choices(self, shares: Collection[str]) -> Iterator[tuple[str, ...]]:
        """`threshold` of the sites, those first whose shares were right so far; then others."""
        known = {site for site, _ in self._doubtful}
        order = sorted(self._in_order(shares), key=known.__contains__)
        seen = set()
        for left in range(min(SPARED, len(order) - self.threshold) + 1):
            for out in combinations(order, left):
                chosen = self._in_order([s for s in order if s not in out][: self.threshold])
                if chosen not in seen:
                    seen.add(chosen)
                    yield chosen

    def _expect(
        self, phase: str, site: str, exchange: bytes, allowed: set[str], seen: Collection[str]
    ) -> None:
        if site not in allowed:
            raise RefusedError(f"site {site!r} takes no part in this step of the secure sum")
        if exchange != self.exchange:
            raise RefusedError(f"site {site!r} answers for another exchange")
        if self._phase != phase:
            raise RefusedError(f"site {site!r} is late: the secure sum is at {self._phase!r}")
        if site in seen:
            raise RefusedError(f"site {site!r} answered twice")

    def _enough(self, count: int, what: str) -> None:
        if count < self.threshold:
            raise TrainingError(
                f"secure sum: {what} of {count} of {len(self._sites)} sites, and the threshold is "
                f"{self.threshold}: nothing was opened"
            )


def _difference(one: _Sum, other: _Sum) -> str:
    """What two groups of sites did not agree on."""
    left, right = min(one.sites), min(other.sites)
    rows = [{(f.kind, f.name): f for f in part.layout.fields} for part in (one, other)]
    odd = sorted(rows[0].keys() ^ rows[1].keys())
    if odd:
        what = f"{odd[0][0]} {odd[0][1]!r} is not at both"
    elif one.layout.purpose != other.layout.purpose:
        what = "they were asked different things: task, round, options or tensors"
    else:
        unequal = [key for key in rows[0] if rows[0][key] != rows[1][key]]
        what = f"the shape, dtype or limit of {unequal[0][1]!r} differs" if unequal else "order"
    return (
        f"sites {left!r} and {right!r} laid out different sums ({what}): "
        "they must run the same model and agree on the metrics' names"
    )
