"""The secure sum of sites that live in this process: the same messages, without a transport.

Nothing is hidden here from whoever runs the process. It shows what a job does under the secure
sum (its rounding, its bytes, its time), with the code that a deployment runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fednotes.core.errors import TrainingError
from fednotes.core.tensors import nbytes
from fednotes.core.update import Tensors, Total, Update
from fednotes.engines.question import of_call
from fednotes.engines.secure import SecureSeal, SecureSum
from fednotes.engines.summing import Replies, Sites
from fednotes.engines.validation import check_update
from fednotes.engines.wire import Reply, Request

JOB = "in this process"


class SecureCalls:
    """Sums over `sites`. bytes_up, bytes_down: of the protocol's messages so far.

    Raises ConfigError for fewer than 3 sites, MissingExtra without `cryptography`.
    """

    def __init__(self, sites: Sequence[str]) -> None:
        self.sites = tuple(sites)
        least = len(self.sites)  # nothing is lost on the way; so it is in a job that needs all
        self.summing = SecureSum(self.sites, job=JOB, threshold=least)
        self.seals = {
            site: SecureSeal(site, self.sites, job=JOB, threshold=least) for site in self.sites
        }
        self.number = self.bytes_up = self.bytes_down = 0

    def total(
        self, task: str, tensors: Tensors, options: Mapping[str, Any], call: Callable[[str], Update]
    ) -> Total:
        """Σ over the sites of what `call` returns for each; they are told the same."""
        request = Request(JOB, 1, 0, task, round=self.next_number())  # each sum has its own
        question = of_call(task, tensors, sorted(options.items()))
        return self.summing.total(_Exchange(self, request, call, question))

    def next_number(self) -> int:
        """Each message has its own."""
        self.number += 1
        return self.number


@dataclass
class _Exchange:
    """One task of a method (`summing.Exchange`)."""

    calls: SecureCalls
    request: Request
    call: Callable[[str], Update]
    question: bytes
    numbers: dict[str, int] = field(default_factory=dict)
    reasons: str = ""

    @property
    def sites(self) -> tuple[str, ...]:
        """All of them."""
        return self.calls.sites

    @property
    def least(self) -> int:
        """Nothing can be lost on the way."""
        return len(self.sites)

    def task(
        self, attached: Tensors | None = None, *, retry: bool = True, sites: Sites = None
    ) -> Replies:
        """Call the sites in turn; an error of theirs passes."""
        request = self._request(self.request.task, attached or {})
        replies = {}
        for site in self.sites:
            update = self.call(site)
            check_update(update, site)
            sealed = self.calls.seals[site].seal(request, update, self.question)
            replies[site] = self._reply(request, site, sealed)
        self.numbers = dict.fromkeys(self.sites, request.number)
        return replies

    def stage(
        self, name: str, attached: Mapping[str, Tensors], *, least: int | None = None
    ) -> Replies:
        """One of the protocol's messages."""
        blank, replies = self._request(name, {}), {}
        for site, own in attached.items():
            request = replace(blank, attached=own)
            replies[site] = self._reply(request, site, self.calls.seals[site].stage(request))
        return replies

    def refuse(self, site: str, reason: str) -> None:
        """Nobody is left out here."""
        raise TrainingError(reason)

    def again(self) -> None:
        """Nothing to forget."""

    def _request(self, task: str, attached: Tensors) -> Request:
        number = self.calls.next_number()
        return replace(
            self.request, number=number, task=task, counted=self.numbers, attached=attached
        )

    def _reply(self, request: Request, site: str, attached: Tensors) -> Reply:
        self.calls.bytes_down += nbytes(request.attached)
        self.calls.bytes_up += nbytes(attached)
        return Reply(JOB, 1, request.number, site, Update(), attached=attached)
