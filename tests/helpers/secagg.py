"""An exchange of the secure sum, driven as an engine would, with sites that drop
out."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from unittest import mock

import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from fednotes.core.update import Total, Update
from fednotes.privacy.secure_sum import Parties
from fednotes.privacy.secure_sum.messages import (
    MaskedMessage,
    UnmaskMessage,
    UnmaskRequest,
)
from fednotes.privacy.secure_sum.server import SecureServer
from fednotes.privacy.secure_sum.site import SecureSite


def repeatable(seed: str) -> dict[str, Any]:
    """Return secrets that a test can draw again: SHAKE-256 of the seed and a
    counter."""
    numbers = count()

    def draw_bytes(size: int) -> bytes:
        return hashlib.shake_256(f"{seed}/{next(numbers)}".encode()).digest(size)

    draw_below = lambda bound: int.from_bytes(draw_bytes(64), "big") % bound  # noqa: E731
    return {"token_bytes": draw_bytes, "randbelow": draw_below}


@dataclass
class Exchange:
    """All sites and the server in one process. `seed` makes every secret repeatable."""

    names: Sequence[str]
    threshold: int | None = None
    context: bytes = b"job/run/0"
    seed: str = ""
    confirmed: bool = False
    sent: list[Any] = field(default_factory=list)  # the server's transcript
    requests: dict[str, UnmaskRequest] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parties = Parties(self.names, self.threshold, self.confirmed)
        self._secrets = repeatable(self.seed)
        with self._drawing():
            self.sites = {
                name: SecureSite(name, parties, self.context) for name in self.names
            }
        self.server = SecureServer(parties, self.context)

    def _drawing(self) -> AbstractContextManager[Any]:
        return (
            mock.patch.multiple(secrets, **self._secrets)
            if self.seed
            else nullcontext()
        )

    def set_up(self, without: Collection[str] = ()) -> dict[str, dict[str, bytes]]:
        """Exchange the keys of all sites and the shares of all but `without`.

        Returns the boxes of each site of the roster.
        """
        for site in self.sites.values():
            self.sent.append(site.make_keys())
            self.server.add_keys(site.make_keys())
        keys = self.server.collect_keys()
        for name, site in self.sites.items():
            if name not in without:
                with self._drawing():
                    self.sent.append(site.make_shares(keys))
                self.server.add_shares(self.sent[-1])
        return self.server.collect_boxes()

    def upload(
        self,
        updates: Mapping[str, Update],
        boxes: Mapping[str, Mapping[str, bytes]] | None = None,
        **options: Any,
    ) -> dict[str, MaskedMessage]:
        """Add the masked updates of the sites in `updates`, in that order.

        boxes: what each site received.
        """
        boxes, messages = self.set_up() if boxes is None else boxes, {}
        for name, update in updates.items():
            messages[name] = self.sites[name].mask_update(
                boxes[name], update, **options
            )
            self.sent.append(messages[name])
            self.server.add_masked(messages[name])
        return messages

    def answers(self, without: Collection[str] = ()) -> dict[str, UnmaskMessage]:
        """Return what the survivors open, without handing it to the server."""
        self.requests = self.server.make_requests()
        if self.confirmed:
            for name, request in self.requests.items():
                if name not in without:
                    self.server.add_confirm(self.sites[name].confirm(request))
            self.requests = self.server.make_requests()
        requests = {
            name: each for name, each in self.requests.items() if name not in without
        }
        return {
            name: self.sites[name].unmask(request) for name, request in requests.items()
        }

    def total(self, answers: Collection[UnmaskMessage] | None = None) -> Total:
        """Return the sum, opened by all survivors unless other answers are given."""
        for answer in self.answers().values() if answers is None else answers:
            self.sent.append(answer)
            self.server.add_unmask(answer)
        return self.server.open_total()

    def run(
        self,
        updates: Mapping[str, Update],
        *,
        no_shares: Collection[str] = (),
        no_update: Collection[str] = (),
        no_answer: Collection[str] = (),
        **options: Any,
    ) -> Total:
        """Run the whole exchange; each group of sites drops out at its own step."""
        boxes, dropped = self.set_up(no_shares), {*no_shares, *no_update}
        self.upload(
            {n: u for n, u in updates.items() if n not in dropped}, boxes, **options
        )
        return self.total(self.answers(no_answer).values())


def powers(sites: Sequence[str]) -> dict[str, Update]:
    """Return updates that are powers of two, so that a sum shows which sites are in
    it."""
    return {s: Update({"w": torch.full((4,), 2.0**i)}) for i, s in enumerate(sites)}


@dataclass(frozen=True)
class Ed25519Identity:
    """Signs with keys that were exchanged without the server.

    private: 32 bytes. known: site → its public key, 32 bytes.
    """

    private: bytes
    known: Mapping[str, bytes]

    def sign(self, text: bytes) -> bytes:
        return Ed25519PrivateKey.from_private_bytes(self.private).sign(text)

    def verify(self, site: str, text: bytes, signature: bytes) -> bool:
        try:
            Ed25519PublicKey.from_public_bytes(self.known[site]).verify(signature, text)
        except (InvalidSignature, KeyError):
            return False
        return True


def identities(sites: Sequence[str]) -> dict[str, Ed25519Identity]:
    """Return an identity for each site; all of them know each other."""
    private = {site: bytes([number]) * 32 for number, site in enumerate(sites, start=1)}
    keys = {
        site: Ed25519PrivateKey.from_private_bytes(raw) for site, raw in private.items()
    }
    known = {site: key.public_key().public_bytes_raw() for site, key in keys.items()}
    return {site: Ed25519Identity(raw, known) for site, raw in private.items()}
