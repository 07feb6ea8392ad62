"""An exchange of the secure sum as an engine would drive it, with sites that drop out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from fednotes.core.update import Total, Update
from fednotes.privacy.secure_sum import Parties
from fednotes.privacy.secure_sum.messages import MaskedMessage, UnmaskMessage, UnmaskRequest
from fednotes.privacy.secure_sum.server import SecureServer
from fednotes.privacy.secure_sum.site import SecureSite


def repeatable(seed: str) -> Callable[[int], bytes]:
    """Bytes that a test can draw again: SHAKE-256 of the seed and a counter."""
    drawn = 0

    def random(size: int) -> bytes:
        nonlocal drawn
        drawn += 1
        return hashlib.shake_256(f"{seed}/{drawn}".encode()).digest(size)

    return random


@dataclass
class Exchange:
    """All sites and the server in one place. `seed` makes every secret repeatable."""

    names: tuple[str, ...]
    threshold: int | None = None
    context: bytes = b"job/run/0"
    seed: str = ""
    confirmed: bool = False
    sites: dict[str, SecureSite] = field(default_factory=dict)
    sent: list[Any] = field(default_factory=list)  # the server's transcript
    requests: dict[str, UnmaskRequest] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parties = Parties(self.names, self.threshold, self.confirmed)
        for name in self.names:
            source = {"random": repeatable(f"{self.seed}/{name}")} if self.seed else {}
            self.sites[name] = SecureSite(
                name,
                parties,
                self.context,
                **source,
            )
        self.server = SecureServer(parties, self.context)

    def set_up(self, without: Collection[str] = ()) -> dict[str, dict[str, bytes]]:
        """Keys of all, shares of all but `without`; what each site of the roster gets."""
        for site in self.sites.values():
            self.sent.append(site.keys())
            self.server.add_keys(site.keys())
        keys = self.server.keys()
        for name, site in self.sites.items():
            if name not in without:
                self.sent.append(site.shares(keys))
                self.server.add_shares(self.sent[-1])
        return self.server.boxes()

    def upload(
        self, updates: Mapping[str, Update], boxes: Mapping[str, Mapping[str, bytes]], **how: Any
    ) -> dict[str, MaskedMessage]:
        """Masked updates of the sites in `updates`, in that order."""
        messages = {}
        for name, update in updates.items():
            messages[name] = self.sites[name].masked(boxes[name], update, **how)
            self.sent.append(messages[name])
            self.server.add_masked(messages[name])
        return messages

    def answers(self, without: Collection[str] = ()) -> dict[str, UnmaskMessage]:
        """What survivors open; none is put to the server."""
        self.requests = self.server.requests()
        if self.confirmed:
            for name, request in self.requests.items():
                if name not in without:
                    self.server.add_confirm(self.sites[name].confirm(request))
            self.requests = self.server.requests()
        return {
            name: self.sites[name].unmask(request)
            for name, request in self.requests.items()
            if name not in without
        }

    def run(
        self,
        updates: Mapping[str, Update],
        *,
        no_shares: Collection[str] = (),
        no_update: Collection[str] = (),
        no_answer: Collection[str] = (),
        **how: Any,
    ) -> Total:
        """The whole exchange; each group of sites is gone from its step on."""
        boxes = self.set_up(no_shares)
        gone = {*no_shares, *no_update}
        self.upload({n: u for n, u in updates.items() if n not in gone}, boxes, **how)
        for answer in self.answers(no_answer).values():
            self.sent.append(answer)
            self.server.add_unmask(answer)
        return self.server.total()


@pytest.fixture
def exchange() -> type[Exchange]:
    return Exchange
