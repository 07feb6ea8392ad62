"""The engine of real sites: a federation at the far end of a transport that may fail.

A round's first request goes to every site that can be reached; its later ones only to
those that did all the earlier ones, for what a site keeps between them is nowhere else.
Each request tells every site its last request that counts, and a site undoes what it
did beyond. So a site's state depends on the requests that counted alone, whatever was
lost, repeated or late, and a run with faults has the bits of one without them in which
the same sites took part.

A method that asks for a round's first task without tensors means those that were sent
last; a site that does not have them is sent them again.

What the server keeps: checkpoints (`rounds.Checkpoints`) with where every site stood,
and in `run.json` how often it was started, which sites know as the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from fednotes.core.errors import ConfigError, ModelError, TrainingError
from fednotes.core.federation import Option, State
from fednotes.core.messages import CHECKPOINT, END, Attached, Request
from fednotes.core.parsing import read_json
from fednotes.core.settings import build
from fednotes.core.store import write_json
from fednotes.core.tensors import restoring, snapshot
from fednotes.core.update import Tensors, Total, Update
from fednotes.engines.requests import (
    PATIENCE,
    Answers,
    Earlier,
    Event,
    Participants,
    Patience,
    RunState,
    Transport,
)
from fednotes.engines.rounds import (
    KEPT_CHECKPOINTS,
    Checkpoints,
    CommittedRound,
    Observer,
    Parts,
    Rounds,
)
from fednotes.engines.summing import PlainSum, Replies, Sites, Summing


class Paused(Exception):
    """A run was asked to stop, and can go on from the checkpoint that was just made."""


class Deployed(Rounds):
    """A federation of sites behind a transport.

    sites: their names, in the order in which sums add. directory: the server's own, for
    checkpoints of this job: it goes on from the newest whole one. job: the declarative
    job's fingerprint. summing: None adds in the clear. observer: told of each committed
    round. notify: of faults. stop: asked after each round; if true, a checkpoint is
    made and `Paused` raised.
    clock, sleep: for tests.

    Raises ModelError if every checkpoint is damaged or the folder is another job's.
    """

    def __init__(
        self,
        transport: Transport,
        sites: Sequence[str],
        directory: Path,
        *,
        job: str,
        patience: Patience = PATIENCE,
        max_norm: float = 0.0,
        summing: Summing | None = None,
        observer: Observer | None = None,
        notify: Callable[[Event], None] = lambda event: None,
        stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not sites or len(set(sites)) < len(sites) or patience.min_sites > len(sites):
            raise TrainingError(
                f"the job has the sites {', '.join(sites) or '(none)'}; "
                f"{patience.min_sites or 1} or more with different names are needed"
            )
        self._summing = summing or PlainSum()
        self._least = max(patience.min_sites or len(sites), self._summing.least)
        self._patience, self._stop = patience, stop
        self._files = Checkpoints(directory, sites, "start a new run")
        run = _next_run(directory, job)
        kept = self._files.newest(
            lambda facts: list(facts["progress"]["counted"]), _kept
        )
        zero = dict.fromkeys(sites, 0)
        state, (progress, prologue) = kept or (
            None,
            (RunState(0, zero, dict(zero)), ()),
        )
        here: dict[str, Any] = {
            "job": job,
            "run": run,
            "progress": progress,
            "prologue": prologue,
        }
        here |= {"max_norm": max_norm, "clock": clock, "sleep": sleep}
        self._members = Participants(transport, patience, notify, **here)
        marks = self._files.facts(lambda facts: int(facts["progress"]["number"]))
        self._members.marks = tuple(marks)
        with restoring(directory):
            self._summing.restore(progress.summing)
        super().__init__(observer, clock)
        self._before, self._resumed = progress.seconds, state
        self._preparing = kept is None  # before the first round
        # who did all of this round; None: it is new
        self._step: tuple[str, ...] | None = None
        self._took_part = 0
        self._told, self._tensors = 0, dict[str, Tensor]()
        self._saved = self._started

    # what a method sees

    def sum(
        self, task: str, tensors: Tensors | None = None, /, **options: Option
    ) -> Total:
        """Run `task` at the sites, and add what those return that take part in this
        round."""
        exchange = _Exchange(self, task, tensors or {}, options)
        total = self._summing.total(exchange)
        self._close(exchange, total.included)
        return total

    def each(
        self, task: str, tensors: Tensors | None = None, /, **options: Option
    ) -> dict[str, Update]:
        """As `sum`, without adding: sites are told so, and may refuse by their policy."""
        exchange = _Exchange(self, task, tensors or {}, options)
        exchange.request = replace(exchange.request, each=True)
        updates = self._summing.each(exchange)
        self._close(exchange, updates)
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
        replies = answers.replies
        return {
            site: replies[site].attached.tensors for site in sites if site in replies
        }

    def rounds(self, start: int, stop: int) -> Iterator[CommittedRound]:
        """Rounds by number; each is committed by the method."""
        try:
            for turn in super().rounds(start, stop):
                self._members.round, self._step, self._preparing = (
                    turn.number,
                    None,
                    False,
                )
                yield turn
        finally:
            self._step, self._preparing = None, False

    @property
    def bytes_up(self) -> int:  # type: ignore[override]
        """Bytes that came from sites, framing included."""
        return self._members.bytes_up

    @property
    def bytes_down(self) -> int:  # type: ignore[override]
        """Bytes that were sent to sites, repeats included."""
        return self._members.bytes_down

    def end(self) -> None:
        """Tell the sites that the job is over; what they keep of it stays until they
        delete it."""
        self._members.tell(self._members.present, END, timeout=self._patience.knock)

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
            sent = snapshot(request.tensors)
            members.prologue.append(Earlier(request.task, sent, dict(request.options)))
            members.prepared |= dict.fromkeys(included, len(members.prologue))
        if request.tensors:
            self._told, self._tensors = request.number, dict(snapshot(request.tensors))
        if self._step is None:
            self._took_part = len(included)
        self._step = tuple(site for site in members.sites if site in included)

    # the end of a round

    def _commit(
        self, state: State, metrics: Mapping[str, float], evaluated: bool
    ) -> None:
        self._tell(state, metrics, evaluated, self._took_part)
        self._step = None
        stop = self._stop()
        if (
            evaluated
            or stop
            or self._clock() - self._saved >= self._patience.checkpoint_seconds
        ):
            self._save(state)
        if stop:
            raise Paused

    def _save(self, state: State) -> None:
        """First the sites, then the server: a checkpoint that exists can be gone back
        to.

        A site that does not answer can do it too, from an older state and its journal.
        """
        members = self._members
        members.tell(members.present, CHECKPOINT)
        stand = members.number, dict(members.counted), dict(members.prepared)
        spent = self.bytes_up, self.bytes_down, self.seconds
        progress = RunState(*stand, *spent, self._summing.state())
        parts = {
            f"asked{index}": each.tensors for index, each in enumerate(members.prologue)
        }
        prologue = [[each.task, dict(each.options)] for each in members.prologue]
        self._files.save(
            state, parts, {"progress": asdict(progress), "prologue": prologue}
        )
        members.marks = (*members.marks, members.number)[-KEPT_CHECKPOINTS:]
        self._saved = self._clock()


def _kept(
    parts: Parts, facts: Mapping[str, Any]
) -> tuple[RunState, tuple[Earlier, ...]]:
    """Where the sites stood at a checkpoint, and the prologue."""
    prologue = tuple(
        Earlier(str(task), parts.get(f"asked{index}", {}), dict(options))
        for index, (task, options) in enumerate(facts["prologue"])
    )
    try:
        return build(RunState, facts["progress"], "progress"), prologue
    except ConfigError as error:
        raise ModelError(str(error)) from error


def _next_run(directory: Path, job: str) -> int:
    """Count this start; the new run's number, on disk before any site hears of it.

    Raises ModelError if the folder holds another job, FednotesError where it cannot be
        written.
    """
    path, run = directory / "run.json", 0
    if path.exists():
        try:
            kept = read_json(path)
            run, held = int(kept["run"]), str(kept["job"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"{path}: damaged; write the number of this job's starts into it, or more: "
                f'{{"job": "{job}", "run": 1000}}'
            ) from error
        if held != job:
            raise ModelError(
                f"{directory}: holds job {held[:12]}, this is job {job[:12]}: take another folder"
            )
    write_json(path, {"job": job, "run": run + 1})
    return run + 1


class _Exchange:
    """One request of a method on its way (`summing.Exchange`)."""

    def __init__(
        self,
        engine: Deployed,
        task: str,
        tensors: Tensors,
        options: Mapping[str, Option],
    ) -> None:
        self._members, self.least = engine._members, engine._least
        sites, preparing = engine._step, engine._preparing
        first, self.sites = sites is None, sites or ()
        if first:
            self.sites = self._members.gather(self.least, prepare=not preparing)
        told = engine._told if first and not tensors else 0
        # What the request stands for without any, for sites that do not have them.
        self._tensors: Tensors | None = engine._tensors if told else None
        asked: dict[str, Any] = {
            "tensors": tensors,
            "options": options,
            "preparing": preparing,
        }
        self.request = self._members.request(task, first=first, told=told, **asked)
        self._attached = Attached()
        self._answers, self._odd = Answers(), list[str]()
        self._moved = set[str]()  # who has lost the state that this request builds on

    @property
    def reasons(self) -> str:
        """Why sites are not in the sum."""
        return "; ".join(
            dict.fromkeys(filter(None, (self._answers.reasons, *self._odd)))
        )

    @property
    def numbers(self) -> Mapping[str, int]:
        """By site, the number under which it did the task."""
        return {site: reply.number for site, reply in self._answers.replies.items()}

    def task(self, attached: Attached | None = None, *, sites: Sites = None) -> Replies:
        """The replies to the method's request."""
        self._attached = attached or Attached()
        asked = [site for site in self.sites if sites is None or site in sites]
        if self.request.number != self._members.number:  # a stage came before it
            self.request = replace(self.request, number=self._members.next_number())
        numbers = chain((self.request.number,), iter(self._members.next_number, None))
        self._answers = self._members.ask_again(
            asked,
            lambda sites: self._requests(sites, next(numbers)),
            least=self.least,
            catch_up=True,
            again=self.request.first,
        )
        return self._answers.replies

    def stage(
        self, name: str, attached: Mapping[str, Attached], *, least: int | None = None
    ) -> Replies:
        """The replies to a message of the way of summing; one frame for what is one
        object.

        A site keeps the task that it did in this exchange. Before it, one that has lost
        its state may catch up.
        """

        def make(sites: Sequence[str]) -> dict[str, Request]:
            counted = {**self._members.counted, **self.numbers}
            blank = replace(self._members.request(name), counted=counted)
            own = {id(attached[site]): attached[site] for site in sites}
            different = {
                key: replace(blank, attached=each) for key, each in own.items()
            }
            return {site: different[id(attached[site])] for site in sites}

        again = self.request.first and not self._answers.replies
        answers = self._members.ask_again(
            tuple(attached),
            make,
            least=self.least if least is None else least,
            catch_up=True,
            again=again,
        )
        self._moved |= answers.moved
        self._odd += [reply.refusal for reply in answers.refused.values()]
        return answers.replies

    def again(self) -> None:
        """Forget what came of the task; who has lost its state catches up, or is left
        out."""
        lost = self._moved | self._answers.moved
        self._answers = Answers()
        if self.request.first:
            self._members.catch_up(self.sites)
        else:
            self.sites = tuple(site for site in self.sites if site not in lost)

    def refuse(self, site: str, reason: str) -> None:
        """Leave a site out of this round."""
        self._odd.append(reason)
        self._members.notify(Event("refused", self.request.number, reason, site))

    def _requests(self, sites: Sequence[str], number: int) -> dict[str, Request]:
        """The method's request; one object for all that get the same."""
        counted, attached = dict(self._members.counted), self._attached
        plain = replace(self.request, number=number, counted=counted, attached=attached)
        if self._tensors is None:
            return dict.fromkeys(sites, plain)
        full, knows = replace(plain, told=0, tensors=self._tensors), self._members.knows
        return {
            site: plain if knows.get(site) == plain.told else full for site in sites
        }
