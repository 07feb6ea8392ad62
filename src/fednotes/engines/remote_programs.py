"""Site programs that run in other processes of this machine.

`RemotePrograms` is the side of the engine; `SiteHolder` is that of a process that holds
sites. Whole frames go between them (`core/pipes.py`, `engines/carried.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from selectors import EVENT_READ, DefaultSelector
from typing import Protocol, TypeVar

from fednotes.core.federation import Option, SiteTasks, State
from fednotes.core.messages import Reply, Request
from fednotes.core.update import Tensors
from fednotes.engines.carried import (
    RESTORE,
    STATES,
    NumberedFrame,
    make_failure,
    make_reply,
    make_request,
    raise_failure,
    read_state,
    read_update,
    read_values,
    reply_with_state,
    reply_with_update,
    request_restore,
)
from fednotes.engines.site_programs import SiteUpdate, run_task


class Link(Protocol):
    """The engine's end of the connection to a process that holds sites."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when a reply comes."""

    def send(self, frame: bytes) -> None:
        """Send an encoded request.

        Raises:
            TrainingError: The process has ended.
        """

    def receive(self) -> Reply:
        """Wait for the next reply and return it.

        Raises:
            TrainingError: The process has ended.
        """


AnyLink = TypeVar("AnyLink", bound=Link)


class RemotePrograms:
    """The site programs of a federation, in processes that each hold some sites.

    The processes compute at the same time; each computes for one of its sites after
    another.

    Args:
        links: The link to the process of each site, in the fixed order of the sites.
    """

    def __init__(self, links: Mapping[str, Link]) -> None:
        self.names = tuple(links)
        self._links = dict(links)

    def run(
        self,
        task: str,
        tensors: Tensors,
        options: Mapping[str, Option],
        sites: Collection[str] | None = None,
    ) -> Iterator[SiteUpdate]:
        """Run a task at all sites at the same time; see `SitePrograms`."""
        chosen = [name for name in self.names if sites is None or name in sites]
        request = make_request(task, chosen, tensors=tensors, options=options)
        for reply in self._exchange(request, chosen):
            yield SiteUpdate(reply.site, read_update(reply))

    def states(self) -> dict[str, State]:
        """Return the state of each site; see `SitePrograms`."""
        replies = self._exchange(make_request(STATES), self.names)
        return {reply.site: read_state(reply) for reply in replies}

    def restore(self, states: Mapping[str, State]) -> None:
        """Return the sites to earlier states; see `SitePrograms`."""
        for site in self.names:
            for _ in self._exchange(request_restore(site, states[site]), [site]):
                pass

    def _exchange(
        self, request: NumberedFrame, sites: Sequence[str]
    ) -> Iterator[Reply]:
        return exchange(request, {site: self._links[site] for site in sites})


def exchange(request: NumberedFrame, owners: Mapping[str, Link]) -> Iterator[Reply]:
    """Send a request to processes, and yield the reply of each of their sites.

    Replies are read as they arrive, so that a process can go on with its next site. But
    of each process only one reply waits here for its turn, because updates may be
    large.

    Args:
        request: The request.
        owners: The link to the process of each site that replies, in the order in which
            the replies are yielded. This is the order in which each process replies.

    Raises:
        Exception: A site raised it; of several sites, the first one in the order.
        TrainingError: A process has ended.
    """
    links = dict.fromkeys(owners.values())
    for link in links:
        link.send(request.frame)
    missing = Counter(owners.values())
    arrived: dict[str, tuple[Link, Reply]] = {}
    for site, owner in owners.items():
        while site not in arrived:
            full = {link for link, _ in arrived.values()}
            awaited = [
                link
                for link in links
                if link is owner or (missing[link] and link not in full)
            ]
            for link in wait_for_links(awaited):
                reply = link.receive()
                if reply.number == request.number:  # or an exchange ended early
                    arrived[reply.site] = (link, reply)
                    missing[link] -= 1
        _, reply = arrived.pop(site)
        raise_failure(reply)
        yield reply


def wait_for_links(links: Sequence[AnyLink]) -> list[AnyLink]:
    """Wait until replies can be read, and return the links that have one."""
    with DefaultSelector() as selector:
        for link in links:
            selector.register(link, EVENT_READ, data=link)
        return [key.data for key, _ in selector.select()]


class SiteHolder:
    """Answers the requests of `RemotePrograms` about the sites of this process.

    Args:
        sites: The sites, in the fixed order.
    """

    def __init__(self, sites: Sequence[SiteTasks]) -> None:
        self._sites = tuple(sites)

    def answer(self, request: Request) -> Iterator[bytes]:
        """Yield the encoded replies to a request, one for each site that it concerns.

        An error of a site is its reply; the sites after it do not reply.
        """
        if request.task == STATES:
            for site in self._sites:
                yield reply_with_state(request, site.id, site.state())
        elif request.task == RESTORE:
            yield self._restore(request)
        else:
            yield from self._run(request)

    def _restore(self, request: Request) -> bytes:
        name = read_values(request)["site"]
        (site,) = (site for site in self._sites if site.id == name)
        try:
            site.restore(read_state(request))
        except Exception as error:
            return make_failure(request, name, error)
        return make_reply(request, name)

    def _run(self, request: Request) -> Iterator[bytes]:
        names = frozenset(read_values(request))
        for site in self._sites:
            if site.id not in names:
                continue
            try:
                update = run_task(site, request.task, request.tensors, request.options)
                reply = reply_with_update(request, site.id, update)
            except Exception as error:
                yield make_failure(request, site.id, error)
                return
            yield reply
