"""The site's end of the wire: requests in, replies out, and nothing lost in between.

A request is done at most once as far as the site's state is concerned: a repeated one
gets the stored reply, an older one a refusal, and one that the server did not count is
undone before the next. What goes wrong in a task becomes a refusal in one line; the
host itself fails only where the guard does not let even that leave.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Protocol

from fednotes.core.cleaning import one_line
from fednotes.core.errors import FednotesError, ModelError, RefusedError
from fednotes.core.federation import SiteTasks
from fednotes.core.messages import (
    BEGIN,
    CHECKPOINT,
    END,
    OURS,
    Attached,
    Frame,
    Reply,
    Request,
    WireError,
    decode_request,
    encode,
)
from fednotes.core.tensors import restoring
from fednotes.core.update import Tensors, Update
from fednotes.engines.history import Asked, Journal
from fednotes.engines.launch import place_of
from fednotes.engines.secure import AnswerTimes, SecureSeal
from fednotes.engines.summing import check_received, check_update

KEEP_BYTES = 2**29  # of requests that would have to be done again without a newer state
ROUND_LINE_SECONDS = 60.0  # between two lines of a site's log that say how far it is
_FOLDERS = re.compile(r"""(?<![^\s'"(=:,\[])/(?:[^/\s:'"]+/)+(?=[^/\s:'"])""")


class Guard(Protocol):
    """A site's rules and its record, as far as the host needs them."""

    def request(self, request: Request) -> None:
        """Check a request before it is answered.

        Raises:
            RefusedError: A rule of the site does not permit it.
        """

    def leaving(
        self, request: Request, reply: Frame, update: Update | None, reason: str = ""
    ) -> None:
        """Check and record a reply before it leaves.

        Args:
            request: The request that it answers.
            reply: The reply, encoded.
            update: What the reply holds, before it is masked; None where there is none.
            reason: The rule by which the request is refused.

        Raises:
            Exception: The reply must not leave.
        """


class SiteHost:
    """One site of one job, behind `handle`, which one thread calls at a time.

    make: builds the site anew, as it is before its first task. directory: the site's
    own, for this job alone. job: the fingerprint of the job that was approved here.
    name: the site's.
    guard: its rules and ledger; what it cannot note does not leave. sealer: its part in
    a secure sum.
    public: further tasks "@…" that tell facts which are nobody's secret; no sum hides
        them.
    keeping: a state is written at the start of a round, and not only at checkpoints,
    where so many seconds of tasks would have to be done again without it.
    tell: is given one line for each thing that a person at the site may want to know.
    pace: when tasks are answered under a secure sum; None is at once.
    outward: what the server is told of an error, given the site's name; all of it by
        default.

    Raises RefusedError if the directory holds another job, ModelError if it does not
    say which, FednotesError where it cannot be written.
    """

    def __init__(
        self,
        make: Callable[[], SiteTasks],
        directory: Path,
        *,
        job: str,
        name: str,
        guard: Guard | None = None,
        sealer: SecureSeal | None = None,
        public: Mapping[str, Callable[[SiteTasks], Tensors]] | None = None,
        max_norm: float = 0.0,
        keeping: float = 20.0,
        pace: AnswerTimes | None = None,
        tell: Callable[[str], None] = lambda line: None,
        outward: Callable[[Exception, str], str] | None = None,
    ) -> None:
        self._make, self._job, self._name = make, job, name
        self._guard, self._sealer, self._max_norm = guard, sealer, max_norm
        self._leaving = guard.leaving if guard is not None else lambda *message: None
        self._keeping, self._tell = keeping, tell
        self._pace = pace if sealer is not None else None
        self._line_at = -ROUND_LINE_SECONDS  # when a round was told last
        self._outward = outward or explained
        self._public = dict(public or {})
        self._journal, self._directory = Journal(directory, name, job), directory
        self._run = self._journal.run
        self._newest = self._journal.last  # of the requests seen in this run
        self._site: SiteTasks | None = None
        # whether the present answer took time that goes by its data
        self._worked = False
        self._told = 0  # the last request with tensors
        self._remembers = False  # whether this site object was given them
        self._asked = Asked()
        self._spent = 0.0  # seconds of tasks since the newest state
        self.ended = False

    def handle(self, frame: Frame) -> bytes:
        """The reply to a request.

        Raises what the guard raises of a refusal that may not leave.
        """
        begun = self._pace.clock() if self._pace else 0.0
        try:
            request = decode_request(frame)
        except WireError as error:
            blank = Request(self._job, 0, 0, "")
            return self._refusal(blank, error, later=True)
        self._worked = False
        try:
            return self._answer(request, frame)
        except Exception as error:
            return self._refusal(request, error, later=passing(error))
        finally:
            # refused after it was done, too
            if self._pace and self._sealer and self._worked:
                self._pace.wait(request.task, begun, self._sealer.pace(request))

    @property
    def question(self) -> bytes:
        """What a secure sum knows the task by that runs now; b"" without one."""
        return self._asked.question

    def close(self) -> None:
        """The job is over; what it kept stays until a person deletes it."""

    def _answer(self, request: Request, frame: Frame) -> bytes:
        self._require_current(request)
        if self._guard is not None:
            self._guard.request(request)
        stored = self._journal.reply(request, frame)
        if stored is not None:
            self._leaving(request, stored, None)
            return stored
        self._synchronise(request)
        if request.task.startswith(OURS):
            return self._own(request)
        return self._do(request, frame)

    def _require_current(self, request: Request) -> None:
        """Raises RefusedError for another job's request or an old one."""
        if request.job != self._job:
            raise RefusedError(
                f"site {self._name!r} has approved job {self._job[:12]}, "
                f"the request is of job {request.job[:12]}: approve that job here first"
            )
        if (request.run, request.number) < (self._run, self._newest):
            raise RefusedError(
                f"site {self._name!r}: request {request.number} of run {request.run} is old, "
                f"request {self._newest} of run {self._run} has come"
            )
        if self._name not in request.counted:
            raise RefusedError(f"the request does not name site {self._name!r}")

    def _synchronise(self, request: Request) -> None:
        """Be as after the last request that counts.

        Raises RefusedError if the site was never there; the reply says where it is.
        """
        target = request.counted[self._name]
        if request.run > self._run:
            self._journal.run = self._run = request.run
        self._newest = request.number
        last = self._journal.last
        if last == target:
            return
        reached = target
        if last < target or self._journal.path_to(target) is None:
            reached = last if last < target else self._journal.state_before(target)
        if reached != last:
            self._tell(f"back to the state after request {reached}")
            self._site = None
            self._journal.undo_to(reached)
        if reached != target:
            raise RefusedError(
                f"site {self._name!r} has no state after request {target}: "
                f"it has the one after request {reached}"
            )

    def _own(self, request: Request) -> bytes:
        """The engine's tasks: answered anew each time, for they change nothing twice."""
        attached = Attached()
        if request.task == BEGIN:
            self._ready()
        elif request.task == CHECKPOINT:
            self._save(self._ready(), request)
        elif request.task == END:
            self.ended = True
        elif request.task in self._public:
            attached = Attached(tensors=self._public[request.task](self._ready()))
        else:
            if self._sealer is None:
                raise RefusedError(f"site {self._name!r} takes part in no secure sum")
            attached = self._sealer.stage(request)
        reply = encode(replace(self._reply(request, Update()), attached=attached))
        self._leaving(request, reply, None)
        return reply

    def _do(self, request: Request, frame: Frame) -> bytes:
        """Run a task of the method; what goes wrong leaves no trace in the site's
        state."""
        if request.number <= (counted := request.counted[self._name]):
            raise RefusedError(
                f"site {self._name!r}: request {request.number} claims to follow request "
                f"{counted}: what a site keeps is ordered by these numbers"
            )
        site = self._ready()
        if request.task not in site.tasks:
            raise RefusedError(f"site {self._name!r} has no task {request.task!r}")
        if request.first and not request.preparing and self._sealer is not None:
            adopted = self._sealer.adopted(request, self._asked)
            # the others' history in place of one that this site has lost
            if adopted is not None:
                asked = replace(self._asked, history=adopted)
                self._journal.save(
                    self._journal.last, site.state(), self._told, asked.kept()
                )
                self._asked = asked  # once it is on disk: a state made anew has it too
        due = self._spent > self._keeping or self._journal.nbytes() > KEEP_BYTES
        if request.first and due:
            self._save(site, request)
        try:
            started = time.monotonic()
            update = self._run_task(site, request)
            check_update(update, self._name, self._max_norm)
            done = replace(self._reply(request, update), has=request.number)
            if self._sealer is not None:
                given = update
                if self._pace:
                    spent = self._pace.counts(request.task, time.monotonic() - started)
                    given = replace(update, metrics={**update.metrics, **spent})
                sealed = self._sealer.seal(request, given, self._asked.question)
                done = replace(done, update=Update(), attached=sealed)
            reply = encode(done)
            self._leaving(request, reply, update)
            self._journal.add(request.number, frame, reply)
            self._spent += time.monotonic() - started
            if time.monotonic() - self._line_at >= ROUND_LINE_SECONDS:
                self._line_at = time.monotonic()
                self._tell(f"round {request.round + 1}: {request.task} is done")
        except BaseException:
            self._site = None  # it may have changed; build it from what is kept
            raise
        return reply

    def _run_task(self, site: SiteTasks, request: Request) -> Update:
        tensors: Tensors = request.tensors
        check_received(tensors, self._name, request.task)
        if (
            request.first
            and request.told
            and not tensors
            and request.told != self._told
        ):
            raise RefusedError(
                f"site {self._name!r}: the request means the tensors of request {request.told}, "
                f"the last that came are of request {self._told}"
            )
        if tensors:
            self._told, self._remembers = request.number, True
        elif request.first and request.told and not self._remembers:
            tensors = self._journal.request(request.told).tensors
        task = getattr(site, request.task)
        try:
            signature(task).bind(tensors, **request.options)
        except TypeError as error:
            named = ", ".join(request.options) or "none"
            raise RefusedError(
                f"site {self._name!r}: task {request.task!r} of the approved job takes other "
                f"options than {named}"
            ) from error
        if self._sealer is not None:
            self._asked = self._asked.next(request, tensors, strict=self._sealer.strict)
        self._worked = True
        update: Update = task(tensors, **request.options)
        return update

    # the site's state

    def _ready(self) -> SiteTasks:
        """The site as after the last request."""
        if self._site is not None:
            return self._site
        last = self._journal.last
        path = self._journal.path_to(last)
        try:
            if path is None:
                newest = self._journal.states[-1]
                self._journal.undo_to(newest)
                raise ModelError(f"the requests from {newest} to {last} are not whole")
            try:
                self._site = self._rebuilt(*path)
            except ModelError:
                self._journal.damaged(path[0])
                raise
        except ModelError as error:
            if self._sealer is not None:
                self._sealer.lost()
            self._tell(f"damaged, going back further: {error}")
            raise RefusedError(
                f"site {self._name!r} has lost its state after request {last}"
            ) from error
        return self._site

    def _rebuilt(self, start: int, steps: list[int]) -> SiteTasks:
        state, self._told, asked = self._journal.load(start)
        self._remembers = False
        with restoring(
            f"what led to the state of site {self._name!r} after request {start}"
        ):
            self._asked = Asked.of(asked) if asked else Asked()
        self._spent, self._worked = 0.0, True
        site = self._make()
        if state is not None:
            with restoring(f"the state of site {self._name!r} after request {start}"):
                site.restore(state)
        began = time.monotonic()
        for number in steps:
            self._run_task(site, self._journal.request(number))
        self._spent = time.monotonic() - began
        return site

    def _save(self, site: SiteTasks, request: Request) -> None:
        """Keep the state before this request, which the server counts."""
        last = self._journal.last
        if last not in self._journal.states:
            self._journal.save(last, site.state(), self._told, self._asked.kept())
        self._spent = 0.0
        self._journal.forget(
            (*request.marks, *([request.number] * (request.task == CHECKPOINT)))
        )

    # replies

    def _reply(self, request: Request, update: Update | None = None) -> Reply:
        number, run = request.number, request.run
        return Reply(
            request.job, run, number, self._name, update, has=self._journal.last
        )

    def _refusal(self, request: Request, error: Exception, *, later: bool) -> bytes:
        """Raises what the guard raises: what it cannot note does not leave."""
        whole, told = whole_line(error, self._name), self._outward(error, self._name)
        self._tell(f"refused {request.task or 'a message'} ({request.number}): {whole}")
        told = placeless(told.replace(f"{self._directory}/", ""))
        reply = encode(replace(self._reply(request), refusal=told, later=later))
        self._leaving(request, reply, None, getattr(error, "reason", ""))
        return reply


def passing(error: Exception) -> bool:
    """Whether the same request may succeed later: a full disk, or a rule that says so."""
    disk = type(error) is FednotesError or isinstance(error, OSError)
    return disk or bool(getattr(error, "later", False))


def explained(error: Exception, site: str) -> str:
    """One line for an error, as it may leave the site: no note text, no rule's numbers.

    Errors of ours are made so, or say in `public` what they may tell. Of any other only
    its type and place are told: its message may hold a token, as that of a KeyError
    does.
    """
    if isinstance(error, FednotesError) and (public := getattr(error, "public", "")):
        return one_line(public) or "refused"
    return whole_line(error, site)


def whole_line(error: Exception, site: str) -> str:
    """One line for an error, for the site's own people; without note text too."""
    if isinstance(error, FednotesError):
        return one_line(error) or "refused"
    return f"site {site!r}: the task failed ({place_of(error)})"


def placeless(text: str) -> str:
    """Text without the folders of absolute paths: where a site keeps its files is its
    business."""
    return _FOLDERS.sub("", text)
