"""How the replies of a request become a sum; the place where a secure one goes in."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol

from fednotes.core.errors import RefusedError
from fednotes.core.update import Tensors, Total, Update
from fednotes.engines.validation import Expected, agreed, check_like
from fednotes.engines.wire import Reply, Request

Replies = Mapping[str, Reply]  # by site
Sites = Collection[str] | None  # None: all that the exchange is with


class Exchange(Protocol):
    """What a way of summing may do: the method's task, and messages of its own around it."""

    @property
    def sites(self) -> tuple[str, ...]:
        """Who is asked, in the fixed order."""

    @property
    def least(self) -> int:
        """How many must be in the sum."""

    @property
    def request(self) -> Request:
        """The method's request; `task` gives it a later number where a stage comes before it."""

    @property
    def reasons(self) -> str:
        """Why sites are left out, in one line."""

    def task(
        self, attached: Tensors | None = None, *, retry: bool = True, sites: Sites = None
    ) -> Replies:
        """Run the method's task; the replies of those that answered in time.

        retry: ask sites that have lost their state once more, under another number. sites: ask
        only these.
        """

    def stage(
        self, name: str, attached: Mapping[str, Tensors], *, least: int | None = None
    ) -> Replies:
        """One message of the protocol's own, `name` beginning with "@", to the sites named.

        least: how many must answer; None: as many as for the task.
        """

    def again(self) -> None:
        """Forget what came of the task: it is to be done once more."""

    def refuse(self, site: str, reason: str) -> None:
        """Leave a site out of this round, and say why."""


class Summing(Protocol):
    """How the sites' updates become a sum.

    secure: nobody sees a summand. least: the fewest sites that it can add.
    """

    secure: bool
    least: int

    def total(self, exchange: Exchange) -> Total:
        """The sum, with `included` in the fixed order."""

    def state(self) -> dict[str, Any]:
        """What later sums depend on, as JSON values."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a kept state."""


class PlainSum:
    """Updates added as they are, in the fixed order."""

    secure = False
    least = 1

    def __init__(self) -> None:
        self._known: dict[str, Expected] = {}

    def total(self, exchange: Exchange) -> Total:
        """Σ over the sites that answered."""
        fitting = self.updates(exchange)
        return replace(Total.of(fitting.values()), included=tuple(fitting))

    def state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing to go back to."""

    def updates(self, exchange: Exchange) -> dict[str, Update]:
        """The updates that fit together; each alone was checked when it came."""
        replies, task = exchange.task(), exchange.request.task
        given = {s: replies[s].update for s in exchange.sites if s in replies}
        updates = {site: update for site, update in given.items() if update is not None}
        like = agreed(updates.values(), self._known.get(task))
        self._known[task] = like
        for site in list(updates):
            try:
                check_like(updates[site], site, like)
            except RefusedError as error:
                del updates[site]
                exchange.refuse(site, str(error))
        return updates
