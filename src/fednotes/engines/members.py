"""Who takes part in a run: which sites are there, and where each of them stands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fednotes.core.errors import TrainingError
from fednotes.engines.asking import Answers, Asker, Event
from fednotes.engines.host import BEGIN
from fednotes.engines.server_files import Asked, Progress
from fednotes.engines.wire import Request


class Members:
    """The sites of a run, in their fixed order.

    counted: by site, the number of its last request that counts. prologue: what was asked
    before the first round; prepared: how much of it each site has done. knows: by site, the
    last request with tensors that it did. away: who did not answer last.
    """

    def __init__(
        self, asker: Asker, job: str, run: int, progress: Progress, prologue: Iterable[Asked]
    ) -> None:
        self._asker, self._job, self._run = asker, job, run
        self.sites = tuple(progress.counted)
        self.number, self.round = progress.number, 0
        self.marks: tuple[int, ...] = ()
        self.counted, self.prepared = dict(progress.counted), dict(progress.prepared)
        self.prologue = list(prologue)
        self.knows: dict[str, int] = {}
        self.away = set(self.sites)
        self._started, self._knocked = False, 0.0

    @property
    def present(self) -> tuple[str, ...]:
        """Who is there."""
        return tuple(site for site in self.sites if site not in self.away)

    def next_number(self) -> int:
        """Each message to sites has its own."""
        self.number += 1
        return self.number

    def request(self, task: str, **fields: Any) -> Request:
        """The run's next request."""
        self.next_number()
        fields |= {"round": self.round, "counted": dict(self.counted), "marks": self.marks}
        return Request(self._job, self._run, self.number, task, **fields)

    def ask(
        self, requests: Mapping[str, Request], *, least: int, timeout: float | None = None
    ) -> Answers:
        """The sites' answers; who gives none is away, who has lost its state is noted."""
        answers = self._asker.ask(requests, least=least, timeout=timeout)
        for site in sorted(answers.missing):
            if site not in self.away:
                text = f"site {site!r} did not answer request {self.number}"
                self._asker.notify(Event("missing", self.number, text, site))
            self.away.add(site)
        for site, reply in answers.refused.items():
            if reply.has == requests[site].counted[site]:
                continue
            text = f"site {site!r} has lost its state and goes on from request {reply.has}"
            self._asker.notify(Event("behind", self.number, text, site))
            self.counted[site] = reply.has
            self.knows.pop(site, None)
            if not reply.has:
                self.prepared[site] = 0
            answers.moved.add(site)
        return answers

    def tell(
        self, sites: Sequence[str], task: str, *, least: int = 0, timeout: float | None = None
    ) -> Answers:
        """One of the engine's own messages. Those who stood elsewhere get it a second time."""
        if not sites:
            return Answers()
        answers = self.ask(dict.fromkeys(sites, self.request(task)), least=least, timeout=timeout)
        if answers.moved:
            again = dict.fromkeys(sorted(answers.moved), self.request(task))
            answers.merge(self.ask(again, least=0, timeout=timeout))
        return answers

    def gather(self, least: int, *, prepare: bool) -> tuple[str, ...]:
        """The sites for a round's first request; waits until there are so many.

        prepare: let those that were not there in the prologue do it now.
        Raises TrainingError where so many can never be.
        """
        policy, now = self._asker.policy, self._asker.clock()
        if not self._started:
            self._knock(least, policy.timeout)
        elif self.away and now - self._knocked >= policy.knock_every:
            self._knock(0, policy.knock)
        while True:
            if prepare:
                self.catch_up(self.present)
            if len(self.present) >= least:
                return self.present
            self._knock(least - len(self.present), policy.timeout)

    def _knock(self, least: int, timeout: float) -> None:
        """Ask those that were away whether they are there."""
        answers = self.tell(
            sorted(self.away, key=self.sites.index), BEGIN, least=least, timeout=timeout
        )
        self._knocked = self._asker.clock()
        for site in answers.replies:
            self.away.discard(site)
            text = f"site {site!r} is there"
            self._asker.notify(Event("joined", self.number, text, site))
        self._started = self._started or bool(answers.replies)
        if len(answers.replies) + len(answers.missing) < least:
            raise TrainingError(f"too few sites can take part: {answers.reasons}")

    def catch_up(self, sites: Sequence[str]) -> None:
        """Let sites do what they missed of the prologue; its sums are made, only they change."""
        for index, asked in enumerate(self.prologue):
            late = [s for s in sites if self.prepared[s] <= index and s not in self.away]
            if not late:
                continue
            again = self.request(
                asked.task,
                first=index == 0,
                preparing=True,
                tensors=asked.tensors,
                options=asked.options,
            )
            for site in self.ask(dict.fromkeys(late, again), least=0).replies:
                self.counted[site], self.prepared[site] = again.number, index + 1
            self.away |= {site for site in late if self.prepared[site] <= index}

    def count(self, request: Request, included: Mapping[str, int]) -> None:
        """These sites' answers to a request are in a sum; the number under which each did it."""
        self.counted |= included
        if request.tensors:
            self.knows |= {s: number for s, number in included.items() if number == request.number}
