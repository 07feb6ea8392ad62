"""Exchange after exchange of the secure sum, at two messages each while nothing fails.

Keys of exchange r + 1 ride on the masked update of r, its shares on the answer that opens r:

    server → site   the task of r, boxes of r        site → server   masked r, own keys of r + 1
    server → site   survivors of r, keys of r + 1    site → server   what opens r, boxes of r + 1

Every exchange has fresh keys, seeds and shares: what opens r says nothing of r + 1. A site
that dropped out of r is not prepared for r + 1; where it should take part again, the server
starts afresh (`ServerChain.start`), which costs two small messages more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Unpack

from fednotes.core.errors import RefusedError, TrainingError
from fednotes.core.update import Total, Update
from fednotes.privacy.secure_sum.masks import Identity, joined
from fednotes.privacy.secure_sum.messages import (
    ConfirmMessage,
    KeysMessage,
    MaskedMessage,
    SharesMessage,
    UnmaskMessage,
    UnmaskRequest,
)
from fednotes.privacy.secure_sum.server import SecureServer
from fednotes.privacy.secure_sum.site import LaidOut, SecureSite


class SiteChain:
    """One site in a run of exchanges. Numbers rise; a number is never used twice.

    context: `joined(job, run)`. Other parameters: see `SecureSite`.
    """

    def __init__(
        self,
        site: str,
        sites: Sequence[str],
        context: bytes,
        threshold: int | None = None,
        *,
        identity: Identity | None = None,
        confirmed: bool = False,
    ) -> None:
        self._site, self._context = site, context
        self._made = partial(
            SecureSite,
            site,
            tuple(sites),
            threshold=threshold,
            identity=identity,
            confirmed=confirmed,
        )
        self._open: dict[int, SecureSite] = {}
        self._newest = -1

    def keys(self, number: int) -> KeysMessage:
        """Start afresh with exchange `number`; whatever was under way is given up."""
        if number <= self._newest:
            raise RefusedError(
                f"exchange {number} of the secure sum was used before (the newest is "
                f"{self._newest}): the server must start with a higher number"
            )
        for old in self._open.values():
            old.forget()
        self._open = {}
        return self._begin(number).keys()

    def shares(self, number: int, keys: Mapping[str, KeysMessage]) -> SharesMessage:
        """See `SecureSite.shares`."""
        return self._exchange(number).shares(keys)

    def masked(
        self, number: int, boxes: Mapping[str, bytes], update: Update, **how: Unpack[LaidOut]
    ) -> MaskedMessage:
        """See `SecureSite.masked`; the keys of exchange `number` + 1 are in it."""
        message = self._exchange(number).masked(boxes, update, **how)
        for old in [at for at in self._open if at < number]:
            self._open.pop(old).forget()
        return replace(message, next_keys=self._begin(number + 1).keys())

    def confirm(self, number: int, request: UnmaskRequest) -> ConfirmMessage:
        """See `SecureSite.confirm`."""
        return self._exchange(number).confirm(request)

    def unmask(
        self,
        number: int,
        request: UnmaskRequest,
        next_keys: Mapping[str, KeysMessage] | None = None,
    ) -> UnmaskMessage:
        """See `SecureSite.unmask`; with `next_keys` the shares of exchange `number` + 1 are in it.

        A wrong list of next keys costs the next exchange its head start, not this one its sum.
        """
        message = self._exchange(number).unmask(request)
        if next_keys and number + 1 in self._open:
            with suppress(RefusedError):
                shares = self._open[number + 1].shares(next_keys)
                message = replace(message, next_shares=shares)
        return message

    def _begin(self, number: int) -> SecureSite:
        self._newest = number
        self._open[number] = self._made(joined(self._context, number))
        return self._open[number]

    def _exchange(self, number: int) -> SecureSite:
        if number not in self._open:
            raise RefusedError(
                f"site {self._site!r} has no keys for exchange {number} of the secure sum: "
                "start afresh"
            )
        return self._open[number]


class ServerChain:
    """The server in a run of exchanges.

    `now` is the exchange under way. While `prepared` says which sites are ready for the next
    one, ask these for their updates at once; otherwise `start`, collect keys and shares first.
    After an exchange that came to nothing, `start`: what sites sent for it is not used again.
    A restarted server starts with a number above any it used before.
    """

    def __init__(
        self,
        sites: Sequence[str],
        context: bytes,
        threshold: int | None = None,
        *,
        confirmed: bool = False,
    ) -> None:
        self._context = context
        self._made = partial(SecureServer, tuple(sites), threshold=threshold, confirmed=confirmed)
        self.number = -1
        self._now: SecureServer | None = None
        self._next: SecureServer | None = None

    @property
    def now(self) -> SecureServer:
        """The exchange under way. Raises TrainingError where there is none."""
        if self._now is None:
            raise TrainingError("the secure sum has no exchange under way: start one")
        return self._now

    @property
    def prepared(self) -> tuple[str, ...]:
        """Sites that can send their updates at once; empty if the server must `start`."""
        ready = self._now is not None and self._now.phase == "masked"
        return self.now.roster if ready else ()

    def start(self, number: int | None = None) -> SecureServer:
        """A fresh exchange, for which keys and shares must be collected."""
        wanted = self.number + 2 if number is None else number  # + 1 is used by the sites
        if wanted <= self.number:
            raise TrainingError(f"exchange {wanted} of the secure sum was used before")
        self.number = wanted
        self._now, self._next = self._server(wanted), None
        return self._now

    def add_masked(self, message: MaskedMessage) -> None:
        """A masked update, and the keys on it."""
        self.now.add_masked(message)
        if self._next is None:
            self._next = self._server(self.number + 1)
        if message.next_keys is not None and message.next_keys.site == message.site:
            with suppress(RefusedError):  # the update counts all the same
                self._next.add_keys(message.next_keys)

    def requests(self) -> tuple[dict[str, UnmaskRequest], dict[str, KeysMessage]]:
        """What each survivor is asked, and the keys of the next exchange for all of them."""
        requests = self.now.requests()
        try:
            return requests, self._next.keys() if self._next else {}
        except TrainingError:  # too few for a next exchange without a fresh start
            return requests, {}

    def add_unmask(self, message: UnmaskMessage) -> None:
        """A survivor's shares, and those for the next exchange on it."""
        self.now.add_unmask(message)
        shares = message.next_shares
        if self._next is not None and shares is not None and shares.site == message.site:
            with suppress(RefusedError):
                self._next.add_shares(shares)

    def total(self) -> Total:
        """Σ over the survivors; the next exchange is then under way if it is prepared."""
        total = self.now.total()
        following, self._now, self._next = self._next, None, None
        if following is not None and following.phase == "shares":
            with suppress(TrainingError):
                following.boxes()
                self._now, self.number = following, self.number + 1
        return total

    def _server(self, number: int) -> SecureServer:
        return self._made(joined(self._context, number))
