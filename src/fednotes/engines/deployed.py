"""The engine of real sites: a federation at the far end of a transport that may fail.

A round's first request goes to every site that can be reached; its later ones only to those that
did all the earlier ones, for what a site keeps between them is nowhere else. Each request tells
every site its last request that counts, and a site undoes what it did beyond. So a site's state
depends on the requests that counted alone, whatever was lost, repeated or late, and a run with
faults has the bits of one without them in which the same sites took part.

A method that asks for a round's first task without tensors means those that were sent last; a
site that does not have them is sent them again.

What the server keeps of a run: two checkpoints, and how often it was started.

run.json             the number of starts, which sites know as the run
round-00000012/      core/store.py: the method's state, and where every site stood

Who takes part in a run: which sites are there, and where each of them stands.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fednotes.core.errors import ConfigError, ModelError, RefusedError, TrainingError
from fednotes.core.federation import Option, State
from fednotes.core.parsing import read_json
from fednotes.core.settings import build
from fednotes.core.store import load_state, restoring, save_state, write_json
from fednotes.core.tensors import snapshot
from fednotes.core.update import Tensors, Total, Update
from fednotes.engines.asking import POLICY, Answers, Asker, Event, Policy, Transport
from fednotes.engines.host import BEGIN, CHECKPOINT, END
from fednotes.engines.inprocess import (
    KEPT_CHECKPOINTS,
    CommittedRound,
    Observer,
    RoundResult,
    parted,
)
from fednotes.engines.summing import LIMITS, Limits, PlainSum, Replies, Sites, Summing
from fednotes.engines.wire import Request


@dataclass(frozen=True)
class Asked:
    """A request of the time before the first round, which a site that joins later is to do."""

    task: str
    tensors: Tensors
    options: Mapping[str, Option]


@dataclass(frozen=True)
class Progress:
    """Where a run stands. number: of the checkpoint's request. counted, prepared: by site, the
    last request that counts, and how many of `prologue` it has done."""

    number: int
    counted: Mapping[str, int]
    prepared: Mapping[str, int]
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    summing: Mapping[str, Any] = field(default_factory=dict)  # `Summing.state`

    @classmethod
    def start(cls, sites: Sequence[str]) -> Progress:
        """Before the first request."""
        return cls(0, dict.fromkeys(sites, 0), dict.fromkeys(sites, 0))


@dataclass(frozen=True)
class Kept:
    """A checkpoint."""

    state: State
    progress: Progress
    prologue: tuple[Asked, ...] = field(default_factory=tuple)


class ServerFiles:
    """The server's folder of one job.

    Raises ModelError if it holds another job, FednotesError where it cannot be written.
    """

    def __init__(self, directory: Path, job: str) -> None:
        self._directory, self._job = directory, job

    def start(self) -> int:
        """Count this start; the new run's number, on disk before any site hears of it."""
        path, run = self._directory / "run.json", 0
        if path.exists():
            try:
                kept = read_json(path)
                run, job = int(kept["run"]), str(kept["job"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ModelError(
                    f"{path}: damaged; write the number of this job's starts into it, or more: "
                    f'{{"job": "{self._job}", "run": 1000}}'
                ) from error
            if job != self._job:
                raise ModelError(
                    f"{self._directory}: holds job {job[:12]}, this is job {self._job[:12]}: "
                    "take another folder"
                )
        write_json(path, {"job": self._job, "run": run + 1})
        return run + 1

    def clear(self) -> None:
        """Forget the checkpoints; starts are counted on."""
        for folder in self._directory.glob("*round-*"):
            shutil.rmtree(folder)

    def save(self, kept: Kept) -> None:
        """Write a checkpoint, then delete all but the newest two."""
        tensors = {f"server/{name}": value for name, value in kept.state.tensors.items()}
        for index, asked in enumerate(kept.prologue):
            tensors |= {f"asked{index}/{name}": value for name, value in asked.tensors.items()}
        facts = {
            "round": kept.state.round,
            "server": dict(kept.state.facts),
            "progress": asdict(kept.progress),
            "prologue": [[asked.task, dict(asked.options)] for asked in kept.prologue],
        }
        save_state(self._directory / f"round-{kept.state.round:08d}", tensors, facts)
        for old in self._folders()[KEPT_CHECKPOINTS:]:
            shutil.rmtree(old)

    def newest(self) -> Kept | None:
        """The newest whole checkpoint; those after it are deleted.

        Raises ModelError if all are damaged.
        """
        for cut in self._directory.glob(".round-*"):  # a killed run's, half-written
            shutil.rmtree(cut, ignore_errors=True)
        folders, why = self._folders(), ""
        for folder in folders:
            try:
                tensors, facts = load_state(folder)
                with restoring(folder):
                    kept = _kept(tensors, facts)
            except ModelError as error:
                why = why or str(error)
                continue
            for damaged in folders[: folders.index(folder)]:
                shutil.rmtree(damaged)
            return kept
        if folders:
            raise ModelError(
                f"{self._directory}: every checkpoint is damaged: start a new run "
                f"(the newest: {why})"
            )
        return None

    def marks(self) -> Iterator[int]:
        """The request numbers of the checkpoints."""
        for folder in reversed(self._folders()):
            try:
                facts = read_json(folder / "facts.json", strict=False)
                yield int(facts["progress"]["number"])
            except (OSError, ValueError, KeyError, TypeError):
                continue

    def _folders(self) -> list[Path]:
        """From the newest."""
        return sorted(self._directory.glob("round-*"), reverse=True)


def _kept(tensors: Tensors, facts: Mapping[str, Any]) -> Kept:
    parts = parted(tensors)
    prologue = tuple(
        Asked(str(task), parts.get(f"asked{index}", {}), dict(options))
        for index, (task, options) in enumerate(facts["prologue"])
    )
    state = State(facts["round"], parts.get("server", {}), facts["server"])
    try:
        return Kept(state, build(Progress, facts["progress"], "progress"), prologue)
    except ConfigError as error:
        raise ModelError(str(error)) from error


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


class Paused(Exception):
    """A run was asked to stop, and can go on from the checkpoint that was just made."""


class Deployed:
    """A federation of sites behind a transport.

    sites: their names, in the order in which sums add. directory: the server's own, for
    checkpoints of this job. job: the declarative job's fingerprint. resume: go on from the
    newest whole checkpoint; False deletes what is there. summing: None adds in the clear.
    observer: told of each committed round. notify: of faults. stop: asked after each round; if
    true, a checkpoint is made and `Paused` raised. clock, sleep: for tests.

    Raises ModelError if every checkpoint is damaged or the folder is another job's.
    """

    def __init__(
        self,
        transport: Transport,
        sites: Sequence[str],
        directory: Path,
        *,
        job: str,
        policy: Policy = POLICY,
        limits: Limits = LIMITS,
        resume: bool = True,
        summing: Summing | None = None,
        observer: Observer | None = None,
        notify: Callable[[Event], None] = lambda event: None,
        stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not sites or len(set(sites)) < len(sites) or policy.min_sites > len(sites):
            raise TrainingError(
                f"the job has the sites {', '.join(sites) or '(none)'}; "
                f"{policy.min_sites or 1} or more with different names are needed"
            )
        self._policy = policy
        self._plain = PlainSum()
        self._summing = summing or self._plain
        self._least = max(policy.min_sites or len(sites), self._summing.least)
        self._observer, self._notify, self._clock = observer, notify, clock
        self._stop = stop
        self._files = ServerFiles(directory, job)
        run = self._files.start()
        if not resume:
            self._files.clear()
        kept = self._files.newest()
        progress = kept.progress if kept else Progress.start(sites)
        if tuple(progress.counted) != tuple(sites):
            raise ModelError(
                f"{directory}: the checkpoint is of sites {', '.join(progress.counted)}, "
                f"the job has {', '.join(sites)}"
            )
        self._asker = Asker(transport, policy, limits, notify, clock, sleep)
        self._asker.bytes_up, self._asker.bytes_down = progress.bytes_up, progress.bytes_down
        self._members = Members(self._asker, job, run, progress, kept.prologue if kept else ())
        self._members.marks = tuple(self._files.marks())
        self._summing.restore(progress.summing)
        self._resumed = kept.state if kept else None
        self._preparing = kept is None  # before the first round
        self._step: tuple[str, ...] | None = None  # who did all of this round; None: it is new
        self._took_part = 0
        self._told, self._tensors = 0, dict[str, Tensor]()
        self._before, self._started = progress.seconds, clock()
        self._saved = self._started

    # what a method sees

    def sum(self, task: str, tensors: Tensors | None = None, /, **options: Option) -> Total:
        """Run `task` at the sites, and add what those return that take part in this round."""
        exchange = self._exchange(task, tensors or {}, options)
        total = self._summing.total(exchange)
        self._close(exchange, total.included)
        return total

    def each(
        self, task: str, tensors: Tensors | None = None, /, **options: Option
    ) -> Mapping[str, Update]:
        """Every site's own reply. Raises RefusedError under a secure sum."""
        if self._summing.secure:
            raise RefusedError(f"{task!r} asks for each site's own reply; the sum is secure")
        exchange = self._exchange(task, tensors or {}, options)
        updates = self._plain.updates(exchange)
        self._close(exchange, tuple(updates))
        return updates

    def public(self, task: str, *, all_sites: bool = True) -> Mapping[str, Tensors]:
        """What sites tell of themselves to everybody, by site, under a secure sum too.

        task: one of `SiteHost`'s `public`. all_sites: wait for each of them.
        Raises TrainingError if one of them refuses.
        """
        members = self._members
        sites = members.sites if all_sites else members.present
        if all_sites:
            members.gather(len(sites), prepare=False)
        answers = members.tell(sites, task, least=len(sites) if all_sites else 0)
        if all_sites and len(answers.replies) < len(sites):
            raise TrainingError(f"{task!r}: {answers.reasons}")
        return {site: answers.replies[site].attached for site in sites if site in answers.replies}

    def rounds(self, start: int, stop: int) -> Iterator[CommittedRound]:
        """Rounds by number; each is committed by the method."""
        try:
            for number in range(start, stop):
                self._members.round, self._step, self._preparing = number, None, False
                yield CommittedRound(number, self._commit)
        finally:
            self._step, self._preparing = None, False

    def resume(self) -> State | None:
        """The server's state from the checkpoint this run goes on from."""
        return self._resumed

    @property
    def seconds(self) -> float:
        """Time spent so far, over all restarts."""
        return self._before + self._clock() - self._started

    @property
    def bytes_up(self) -> int:
        """Bytes that came from sites, framing included."""
        return self._asker.bytes_up

    @property
    def bytes_down(self) -> int:
        """Bytes that were sent to sites, repeats included."""
        return self._asker.bytes_down

    def end(self) -> None:
        """Tell the sites that the job is over; what they keep of it stays until they delete it."""
        self._members.tell(self._members.present, END, timeout=self._policy.knock)

    # one request

    def _exchange(self, task: str, tensors: Tensors, options: Mapping[str, Option]) -> _Exchange:
        """Who is sent what."""
        first, sites, members = self._step is None, self._step, self._members
        if sites is None:
            sites = members.gather(self._least, prepare=not self._preparing)
        asked = {"tensors": tensors, "options": options, "preparing": self._preparing}
        request = members.request(task, first=first, **asked)
        if not first or tensors or not self._told:
            return _Exchange(members, self._notify, request, None, sites, self._least)
        request = replace(request, told=self._told)
        return _Exchange(members, self._notify, request, self._tensors, sites, self._least)

    def _close(self, exchange: _Exchange, included: Collection[str]) -> None:
        """Note who took part, and go on without the others until the next round."""
        request, members = exchange.request, self._members
        if len(included) < self._least:
            reasons = exchange.reasons
            raise TrainingError(
                f"{request.task!r}: {len(included)} sites can be added, {self._least} are needed"
                + (f": {reasons}" if reasons else "")
            )
        members.count(request, {site: exchange.numbers[site] for site in included})
        if self._preparing:
            members.prologue.append(
                Asked(request.task, snapshot(request.tensors), dict(request.options))
            )
            members.prepared |= dict.fromkeys(included, len(members.prologue))
        if request.tensors:
            self._told, self._tensors = request.number, dict(snapshot(request.tensors))
        if self._step is None:
            self._took_part = len(included)
        self._step = tuple(site for site in members.sites if site in included)

    # the end of a round

    def _commit(self, state: State, metrics: Mapping[str, float], evaluated: bool) -> None:
        if self._observer is not None:  # before saving: what a restart repeats is told again
            self._observer(
                RoundResult(
                    round=state.round - 1,
                    metrics=metrics,
                    sites=self._took_part,
                    bytes_up=self.bytes_up,
                    bytes_down=self.bytes_down,
                    seconds=self.seconds,
                    evaluated=evaluated,
                )
            )
        self._step = None
        stop = self._stop()
        if evaluated or stop or self._clock() - self._saved >= self._policy.checkpoint_seconds:
            self._save(state)
        if stop:
            raise Paused

    def _save(self, state: State) -> None:
        """First the sites, then the server: a checkpoint that exists can be gone back to.

        A site that does not answer can do it too, from an older state and its journal.
        """
        members = self._members
        members.tell(members.present, CHECKPOINT)
        progress = Progress(
            members.number,
            dict(members.counted),
            dict(members.prepared),
            self.bytes_up,
            self.bytes_down,
            self.seconds,
            self._summing.state(),
        )
        self._files.save(Kept(state, progress, tuple(members.prologue)))
        members.marks = (*members.marks, members.number)[-KEPT_CHECKPOINTS:]
        self._saved = self._clock()


class _Exchange:
    """One request of a method on its way (`summing.Exchange`).

    tensors: what the request stands for without any, for sites that do not have them.
    """

    def __init__(
        self,
        members: Members,
        notify: Callable[[Event], None],
        request: Request,
        tensors: Tensors | None,
        sites: tuple[str, ...],
        least: int,
    ) -> None:
        self._members, self._notify, self._tensors = members, notify, tensors
        self._attached: Tensors = {}
        self.request, self.sites, self.least = request, sites, least
        self._answers, self._odd = Answers(), list[str]()
        self._moved = set[str]()  # who has lost the state that this request builds on

    @property
    def reasons(self) -> str:
        """Why sites are not in the sum."""
        return "; ".join(dict.fromkeys(filter(None, (self._answers.reasons, *self._odd))))

    @property
    def numbers(self) -> Mapping[str, int]:
        """By site, the number under which it did the task."""
        return {site: reply.number for site, reply in self._answers.replies.items()}

    def task(
        self, attached: Tensors | None = None, *, retry: bool = True, sites: Sites = None
    ) -> Replies:
        """The replies to the method's request."""
        self._attached = attached or {}
        asked = [site for site in self.sites if sites is None or site in sites]
        if self.request.number != self._members.number:  # a stage came before it
            self.request = replace(self.request, number=self._members.next_number())
        self._answers = self._members.ask(self._requests(asked), least=self.least)
        moved = sorted(self._answers.moved)
        if moved and self.request.first and retry:
            self._members.catch_up(moved)
            again = self._requests(moved, self._members.next_number())
            self._answers.merge(self._members.ask(again, least=0))
        return self._answers.replies

    def stage(
        self, name: str, attached: Mapping[str, Tensors], *, least: int | None = None
    ) -> Replies:
        """The replies to a message of the way of summing; one frame for what is one object.

        A site keeps the task that it did in this exchange. Before it, one that has lost its
        state may catch up.
        """
        answers = self._stage(name, attached, self.least if least is None else least)
        moved = {site: attached[site] for site in attached if site in answers.moved}
        if moved and self.request.first and not self._answers.replies:
            self._members.catch_up(tuple(moved))
            answers.merge(self._stage(name, moved, 0))
        self._moved |= answers.moved
        self._odd += [reply.refusal for reply in answers.refused.values()]
        return answers.replies

    def _stage(self, name: str, attached: Mapping[str, Tensors], least: int) -> Answers:
        counted = {**self._members.counted, **self.numbers}
        blank = replace(self._members.request(name), counted=counted)
        different = {id(own): replace(blank, attached=own) for own in attached.values()}
        requests = {site: different[id(own)] for site, own in attached.items()}
        return self._members.ask(requests, least=least)

    def again(self) -> None:
        """Forget what came of the task; who has lost its state catches up, or is left out."""
        lost = self._moved | self._answers.moved
        self._answers = Answers()
        if self.request.first:
            self._members.catch_up(self.sites)
        else:
            self.sites = tuple(site for site in self.sites if site not in lost)

    def refuse(self, site: str, reason: str) -> None:
        """Leave a site out of this round."""
        self._odd.append(reason)
        self._notify(Event("refused", self.request.number, reason, site))

    def _requests(self, sites: Sequence[str], number: int = 0) -> dict[str, Request]:
        """One object for all that are sent the same."""
        plain = replace(
            self.request,
            number=number or self.request.number,
            counted=dict(self._members.counted),
            attached=self._attached,
        )
        if self._tensors is None:
            return dict.fromkeys(sites, plain)
        full, knows = replace(plain, told=0, tensors=self._tensors), self._members.knows
        return {site: plain if knows.get(site) == plain.told else full for site in sites}
