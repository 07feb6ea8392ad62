"""Sites that answer encoded requests, as in a worker process, but in this one."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from typing import Any

from fednotes.core.messages import Reply, Request, decode_message
from fednotes.engines.remote_programs import RemotePrograms, SiteHolder


class HeldSites:
    """A `Link` to sites in this process, which compute when a request is sent.

    All that goes between the engine and the sites is encoded and decoded.
    """

    def __init__(self, sites: Sequence[Any]) -> None:
        self._holder = SiteHolder(sites)
        self._replies: deque[bytes] = deque()
        self._readable, self._writable = os.pipe()  # holds a byte for each reply
        self.requests: list[Request] = []

    def __del__(self) -> None:
        os.close(self._readable)
        os.close(self._writable)

    def fileno(self) -> int:
        return self._readable

    def send(self, frame: bytes) -> None:
        request = decode_message(bytearray(frame), checked=True)
        assert isinstance(request, Request)
        self.requests.append(request)
        for reply in self._holder.answer(request):
            self._replies.append(reply)
            os.write(self._writable, b"x")

    def receive(self) -> Reply:
        os.read(self._readable, 1)
        reply = decode_message(bytearray(self._replies.popleft()), checked=True)
        assert isinstance(reply, Reply)
        return reply


def held_in_two(sites: Sequence[Any]) -> RemotePrograms:
    """Return the programs of sites of which one link has every second one."""
    links = [HeldSites(sites[::2]), HeldSites(sites[1::2])]
    return RemotePrograms(
        {site.id: links[place % 2] for place, site in enumerate(sites)}
    )
