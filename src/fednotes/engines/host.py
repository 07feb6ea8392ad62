"""The site's side of a deployed run: it answers requests and loses no state.

A request changes the site's state at most once: a repeated request gets the stored
reply, an older one is refused, and one that the server did not count is undone before
the next. An error in a task becomes a refusal of one line. The host itself fails only
if the guard does not allow even that line to leave.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from fednotes.core.cleaning import clean_to_one_line
from fednotes.core.errors import FednotesError, ModelError, RefusedError, describe_place
from fednotes.core.federation import Option, SiteTasks, State
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
    encode_message,
)
from fednotes.core.tensors import fingerprint_tensors, nbytes, restoring
from fednotes.core.update import Tensors, Update
from fednotes.engines.answer_times import AnswerTimes
from fednotes.engines.history import Journal, QuestionHistory, StatePath, Trail
from fednotes.engines.rounds import KEPT_CHECKPOINTS
from fednotes.engines.secure import SecureSeal
from fednotes.engines.summing import check_addable, check_received

KEEP_BYTES = 2**29  # size of the requests since the newest state that saves a new one
ROUND_LINE_SECONDS = 60.0  # between two progress lines in a site's log
# The types of the values of a task's option, by the name of its annotation.
_OPTION_TYPES = {"str": (str,), "int": (int,), "float": (float, int), "bool": (bool,)}
_FOLDERS = re.compile(r"""(?<![^\s'"(=:,\[])/(?:[^/\s:'"]+/)+(?=[^/\s:'"])""")


class Guard(Protocol):
    """The host's interface to a site's policy and ledger."""

    def check_request(self, request: Request) -> None:
        """Check a request before it is answered.

        Raises:
            RefusedError: A rule of the site forbids it.
        """

    def require_room(self, more: int) -> None:
        """Check whether the site may store more data for the run, before it does.

        Args:
            more: Number of further bytes.

        Raises:
            RefusedError: A rule of the site forbids it.
        """

    def check_refusal(
        self, request: Request, question: bytes, error: Exception
    ) -> None:
        """Check that the site may still refuse a task that has read its notes.

        Such a refusal reveals something about the notes, just as an answer does.

        Args:
            request: The request.
            question: Digest of the question that goes unanswered (`Trail`).
            error: Why the task is refused.

        Raises:
            RefusedError: A rule of the site forbids it; this is the reason to give.
        """

    def check_reply(
        self,
        request: Request,
        reply: Frame,
        update: Update | None,
        reason: str = "",
        *,
        question: bytes = b"",
    ) -> None:
        """Check and record a reply before it leaves.

        Args:
            request: The request that it answers.
            reply: The encoded reply.
            update: The reply's update before masking, if it was just computed.
            reason: Name of the rule that refuses the request.
            question: Digest of the question that the update answers, or that is refused
                after its task has read notes (`Trail`); of the tasks that led to the
                site's state if a public task replies; b"" if there is none.

        Raises:
            Exception: The reply must not leave.
        """


class SiteHost:
    """One site of one job. One thread at a time calls `handle`.

    Args:
        make_site: Builds the site in its state before the first task.
        directory: The site's folder for this job.
        job: Fingerprint of the job that was approved at this site.
        name: The site's name.
        guard: The site's policy and ledger. A reply that the ledger cannot record does
            not leave.
        sealer: The site's part in a secure sum.
        public: Further tasks, named "@…", which return facts that are not secret and
            that no sum hides.
        read_only: The tasks of the method after which all later answers stay the
            same.
        builds_on: For each task, the earlier ones whose results it uses.
        max_norm: Largest L2 norm of an update; 0 sets no limit.
        keeping: Seconds of tasks that would have to be repeated after a restart before
            a further state is saved at the start of a round.
        pace: Delays answers under a secure sum; None sends them immediately.
        tell: Called with each line that may interest a person at the site.
        tell_refusal: Called instead of `tell` for a refusal, with the line, the task
            and the error.
        explain_to_server: Returns what the server learns about an error, from the error
            and the site's name; by default the complete message.

    Raises:
        RefusedError: The directory belongs to another job.
        ModelError: The directory does not say to which job it belongs.
        FednotesError: The directory cannot be written.
    """

    def __init__(  # noqa: PLR0913 - each side of a run has many parts
        self,
        make_site: Callable[[], SiteTasks],
        directory: Path,
        *,
        job: str,
        name: str,
        guard: Guard | None = None,
        sealer: SecureSeal | None = None,
        public: Mapping[str, Callable[[SiteTasks], Tensors]] | None = None,
        read_only: Collection[str] = (),
        builds_on: Mapping[str, Sequence[str]] = MappingProxyType({}),
        max_norm: float = 0.0,
        keeping: float = 20.0,
        pace: AnswerTimes | None = None,
        tell: Callable[[str], None] = lambda _: None,
        tell_refusal: Callable[[str, str, Exception], None] | None = None,
        explain_to_server: Callable[[Exception, str], str] | None = None,
    ) -> None:
        self._make_site = make_site
        self._job = job
        self._name = name
        self._guard = guard
        self._sealer = sealer
        self._max_norm = max_norm
        self._keeping = keeping
        self._tell = tell
        self._tell_refusal = tell_refusal or (lambda line, _task, _error: tell(line))
        self._pace = pace if sealer is not None else None
        self._line_at = -ROUND_LINE_SECONDS  # time of the last line of progress
        self._explain_to_server = explain_to_server or explain_error
        self._public = dict(public or {})
        self._read_only = frozenset(read_only)
        self._builds_on = builds_on
        self._directory = directory
        self._journal = Journal(directory, name, job)
        self._server_start = self._journal.server_start
        self._newest = self._journal.last  # number of the newest request of this run
        self._site: SiteTasks | None = None
        # Whether the time of the current answer depends on the site's data.
        self._worked = False
        # Digest of the question whose task has begun, until it is answered.
        self._open_question = b""
        self._newest_with_tensors = 0  # number of the last request with tensors
        self._remembers = False  # whether `_site` has received these tensors
        self._asked = QuestionHistory()
        self._trail = Trail()
        self._spent = 0.0  # seconds of tasks since the newest state
        self.ended = False

    def handle(self, frame: Frame) -> bytes:
        """Return the reply to a request.

        Raises:
            Exception: The guard does not allow even a refusal to leave the site.
        """
        begun = self._pace.clock() if self._pace else 0.0
        try:
            request = decode_request(frame)
        except WireError as error:
            blank = Request(self._job, 0, 0, "")
            return self._make_refusal(blank, error, later=True)
        self._worked = False
        self._open_question = b""
        try:
            return self._answer(request, frame)
        except Exception as error:
            return self._make_refusal(request, error, later=may_pass(error))
        finally:
            # A request that is refused after its task ran is delayed too.
            if self._pace and self._sealer and self._worked:
                self._pace.wait(request.task, begun, self._sealer.read_pace(request))

    @property
    def question(self) -> bytes:
        """Digest of the question that the current task answers; b"" without a task."""
        return self._asked.question

    def close(self) -> None:
        """End the job. Its stored files remain until a person deletes them."""

    def _answer(self, request: Request, frame: Frame) -> bytes:
        """Return the stored reply to a request, or run its task first."""
        self._require_current(request)
        if self._guard is not None:
            self._guard.check_request(request)
        stored = self._journal.find_reply(request, frame)
        if stored is not None:
            self._record(request, stored, None)
            return stored
        self._synchronise(request)
        if request.task.startswith(OURS):
            return self._run_own_task(request)
        return self._run_and_store(request, frame)

    def _record(
        self, request: Request, reply: Frame, update: Update | None, reason: str = ""
    ) -> None:
        """Have the guard check and record a reply before it leaves."""
        if self._guard is not None:
            question = self._open_question
            if update is not None:
                question = self._trail.question
            elif request.task in self._public:
                # Public facts, such as the site's scores, depend on its whole state.
                question = self._trail.state
            self._guard.check_reply(request, reply, update, reason, question=question)

    def _count_refusal(self, request: Request, error: Exception) -> None:
        """Have the guard count a task that failed after reading notes.

        Otherwise a server could choose parameters under which a task fails for some
        notes and not for others, and ask any number of times. Temporary failures, such
        as a full disk, do not depend on notes.
        """
        question = self._open_question
        self._open_question = b""
        if question and not may_pass(error) and self._guard is not None:
            # An error raised here reveals nothing about the notes and is not counted.
            self._guard.check_refusal(request, question, error)
            self._open_question = question

    def _require_room(self, more: int) -> None:
        """Have the guard check whether this many further bytes may be stored."""
        if self._guard is not None:
            self._guard.require_room(more)

    def _require_current(self, request: Request) -> None:
        """Refuse a request that this site must not answer.

        Raises:
            RefusedError: The request is of another job, it is old, or it does not name
                this site.
        """
        if request.job != self._job:
            raise RefusedError(
                f"site {self._name!r} has approved job {self._job[:12]}, but the "
                f"request is for job {request.job[:12]}: approve that job here first"
            )
        if (request.server_start, request.number) < (self._server_start, self._newest):
            raise RefusedError(
                f"site {self._name!r}: request {request.number} of run "
                f"{request.server_start} is old: request {self._newest} of run "
                f"{self._server_start} has come since"
            )
        if self._name not in request.counted:
            raise RefusedError(f"the request does not name site {self._name!r}")

    def _synchronise(self, request: Request) -> None:
        """Roll back to the state after the last request whose reply the server counted.

        Raises:
            RefusedError: The site does not have that state; the reply says which state
                it has.
        """
        target = request.counted[self._name]
        if request.server_start > self._server_start:
            self._journal.set_server_start(request.server_start)
            self._server_start = request.server_start
        self._newest = request.number
        last = self._journal.last
        if last == target:
            return
        reachable = target
        if last < target:
            reachable = last
        elif self._journal.find_path(target) is None:
            reachable = self._journal.find_state_before(target)
        if reachable != last:
            self._tell(f"back to the state after request {reachable}")
            self._site = None
            self._journal.undo_to(reachable)
        if reachable != target:
            raise RefusedError(
                f"site {self._name!r} cannot return to its state after request "
                f"{target}; it has the state after request {reachable}"
            )

    def _run_own_task(self, request: Request) -> bytes:
        """Answer one of the engine's own tasks, which can be repeated safely."""
        attached = Attached()
        if request.task == BEGIN:
            self._prepare_site()
        elif request.task == CHECKPOINT:
            self._save(self._prepare_site(), request)
        elif request.task == END:
            self.ended = True
        elif request.task in self._public:
            attached = Attached(
                tensors=self._public[request.task](self._prepare_site())
            )
        else:
            if self._sealer is None:
                raise RefusedError(
                    f"site {self._name!r} does not take part in secure sums"
                )
            attached = self._sealer.answer_stage(request)
        reply = encode_message(
            replace(self._make_reply(request, Update()), attached=attached)
        )
        self._record(request, reply, None)
        return reply

    def _run_and_store(self, request: Request, frame: Frame) -> bytes:
        """Run a task of the method, store its reply, and return the encoded reply.

        An error leaves no trace in the site's state.

        Args:
            request: The request of the task.
            frame: The encoded request.

        Raises:
            RefusedError: A rule of the site or of the protocol forbids the task.
        """
        last_counted = request.counted[self._name]
        if request.number <= last_counted:
            raise RefusedError(
                f"site {self._name!r}: request {request.number} claims to follow "
                f"request {last_counted}, but a request's number must be higher than "
                "all before it: start a new run"
            )
        self._require_room(len(frame))  # before the task, which may take long
        site = self._prepare_site()
        if request.task not in site.tasks:
            raise RefusedError(f"site {self._name!r} has no task {request.task!r}")
        self._adopt_history(site, request)
        if request.first and self._is_due():
            self._save(site, request)

        try:
            start_time = time.monotonic()
            update = self._run_task(site, request)
            check_addable(update, self._name, self._max_norm)
            message = replace(self._make_reply(request, update), has=request.number)
            if self._sealer is not None:
                seconds = time.monotonic() - start_time
                masked_update = self._seal(request, update, seconds)
                message = replace(message, update=Update(), attached=masked_update)
            reply = encode_message(message)
            self._require_room(len(frame) + len(reply))
            self._record(request, reply, update)
            self._journal.add(request.number, frame, reply)
            self._spent += time.monotonic() - start_time
            self._log_progress(request)
        except BaseException as error:
            self._site = None  # it may have changed, so rebuild it from its files
            if isinstance(error, Exception):
                self._count_refusal(request, error)
            raise
        self._open_question = b""
        return reply

    def _log_progress(self, request: Request) -> None:
        """Log that a task is done, at most once in `ROUND_LINE_SECONDS`."""
        now = time.monotonic()
        if now - self._line_at >= ROUND_LINE_SECONDS:
            self._line_at = now
            self._tell(f"round {request.round + 1}: {request.task} is done")

    def _adopt_history(self, site: SiteTasks, request: Request) -> None:
        """Adopt the other sites' history if this site has lost its own."""
        if self._sealer is None or not request.first or request.preparing:
            return
        history = self._sealer.find_history_to_adopt(request, self._asked)
        if history is None:
            return
        asked = replace(self._asked, history=history)
        self._store_state(site, asked)
        self._asked = asked  # only once it is on disk, so that a rebuilt site has it
        self._forget(request)

    def _seal(self, request: Request, update: Update, seconds: float) -> Attached:
        """Return the masked update with the counts for the time that the task took."""
        assert self._sealer is not None
        if self._pace:
            times = self._pace.make_counts(request.task, seconds)
            update = replace(update, metrics={**update.metrics, **times})
        return self._sealer.seal(request, update, self._asked.question)

    def _run_task(self, site: SiteTasks, request: Request) -> Update:
        """Run a task of the method with the tensors that the request refers to."""
        tensors = self._find_tensors(request)
        task = getattr(site, request.task)
        if not _accepts_options(task, tensors, request.options):
            names = ", ".join(request.options) or "none"
            raise RefusedError(
                f"site {self._name!r}: task {request.task!r} of the approved job does "
                f"not accept the options {names}"
            )
        fingerprint = fingerprint_tensors(tensors) if tensors else b""
        if self._sealer is not None:
            strict = self._sealer.strict
            self._asked = self._asked.add_request(
                request, fingerprint, builds_on=self._builds_on, strict=strict
            )
        self._trail = self._trail.add_request(request, fingerprint)
        self._worked = True
        self._open_question = self._trail.question
        update: Update = task(tensors, **request.options)
        is_read_only = request.task in self._read_only
        self._trail = self._trail.add_answer(update, is_read_only=is_read_only)
        return update

    def _find_tensors(self, request: Request) -> Tensors:
        """Return the tensors that a task receives.

        A request without tensors may refer to those of an earlier request. The method's
        site still has them, unless it was rebuilt since; then they are read from the
        journal.

        Raises:
            RefusedError: The request refers to tensors other than the last ones, or a
                tensor is not valid.
        """
        tensors: Tensors = request.tensors
        check_received(tensors, self._name, request.task)
        if tensors:
            self._newest_with_tensors = request.number
            self._remembers = True
            return tensors
        if not (request.first and request.tensors_of_request):
            return tensors
        number = request.tensors_of_request
        if number != self._newest_with_tensors:
            raise RefusedError(
                f"site {self._name!r}: the request refers to the tensors of "
                f"request {number}, but the last ones received are those "
                f"of request {self._newest_with_tensors}"
            )
        if not self._remembers:
            tensors = self._journal.read_request(number).tensors
        return tensors

    # ---- the site's state

    def _prepare_site(self) -> SiteTasks:
        """Return the site in the state after the last request; rebuild it if needed.

        Raises:
            RefusedError: The state cannot be read; the site returns to an earlier one.
        """
        if self._site is not None:
            return self._site
        last = self._journal.last
        path = self._journal.find_path(last)
        try:
            if path is None:
                newest_state = self._journal.states[-1]
                self._journal.undo_to(newest_state)
                raise ModelError(
                    f"the requests from {newest_state} to {last} are incomplete"
                )
            try:
                self._site = self._rebuild(path)
            except ModelError:
                self._journal.forget_damaged(path.start)
                raise
        except ModelError as error:
            if self._sealer is not None:
                self._sealer.record_loss()
            self._tell(f"damaged, going back further: {error}")
            raise RefusedError(
                f"site {self._name!r} has lost its state after request {last}"
            ) from error
        return self._site

    def _rebuild(self, path: StatePath) -> SiteTasks:
        """Build the site from a state and the requests after it.

        Raises:
            ModelError: The state or a request is damaged.
        """
        saved = self._journal.load(path.start)
        self._newest_with_tensors = saved.newest_with_tensors
        self._remembers = False
        self._asked = saved.asked
        self._trail = saved.trail
        self._worked = True
        site = self._make_site()
        if saved.state is not None:
            with restoring(
                f"the state of site {self._name!r} after request {path.start}"
            ):
                site.restore(saved.state)
        start_time = time.monotonic()
        for number in path.steps:
            self._run_task(site, self._journal.read_request(number))
        self._open_question = b""  # these requests were answered before
        self._spent = time.monotonic() - start_time
        return site

    def _is_due(self) -> bool:
        """Return whether too much would have to be repeated if no state were saved."""
        return self._spent > self._keeping or self._journal.count_bytes() > KEEP_BYTES

    def _save(self, site: SiteTasks, request: Request) -> None:
        """Save the state before this request.

        The server has counted every reply that led to this state.
        """
        if self._journal.last not in self._journal.states:
            self._store_state(site, self._asked)
        self._spent = 0.0
        self._forget(request)

    def _store_state(self, site: SiteTasks, asked: QuestionHistory) -> None:
        """Save the state after the last request."""
        state = site.state()
        self._require_room(_count_state_bytes(state))
        self._journal.save(
            self._journal.last, state, self._newest_with_tensors, asked, self._trail
        )

    def _forget(self, request: Request) -> None:
        """Delete states and requests that no later restart can need.

        An honest server has two checkpoints and may be writing a third. A site stores
        states for no more than these. Otherwise a dishonest server could fill its disk.
        """
        numbers = sorted(set(request.checkpoint_numbers))[-KEPT_CHECKPOINTS:]
        if request.task == CHECKPOINT:
            numbers.append(request.number)
        self._journal.forget(numbers)

    # ---- replies

    def _make_reply(self, request: Request, update: Update | None = None) -> Reply:
        """Return the reply to a request, with an update or without one."""
        return Reply(
            job=request.job,
            server_start=request.server_start,
            number=request.number,
            site=self._name,
            update=update,
            has=self._journal.last,
        )

    def _make_refusal(
        self, request: Request, error: Exception, *, later: bool
    ) -> bytes:
        """Return the reply that refuses a request.

        Raises:
            Exception: The guard does not allow the reply to leave, because it cannot
                record it.
        """
        task = request.task or "a message"
        line = describe_error_to_staff(error, self._name)
        self._tell_refusal(
            f"refused {task} ({request.number}): {line}", request.task, error
        )
        public = self._explain_to_server(error, self._name)
        public = remove_folders(public.replace(f"{self._directory}/", ""))
        reply = encode_message(
            replace(self._make_reply(request), refusal=public, later=later)
        )
        try:
            self._record(request, reply, None, _find_broken_rule(error))
        except RefusedError as refusal:
            if not self._open_question:
                raise
            # The guard does not let this refusal leave, because it would answer one
            # question too many. The guard's own refusal answers none.
            self._open_question = b""
            return self._make_refusal(request, refusal, later=may_pass(refusal))
        return reply


def _accepts_options(
    task: Callable[..., Update], tensors: Tensors, options: Mapping[str, Option]
) -> bool:
    """Return whether a task has these options, with values of their declared types.

    Otherwise, a server could send text where a task expects the number of a round,
    which may be part of a file's name.
    """
    task_signature = signature(task)
    try:
        task_signature.bind(tensors, **options)
    except TypeError:
        return False
    for name, value in options.items():
        parameter = task_signature.parameters.get(name)  # None for one of **options
        declared = getattr(parameter, "annotation", None)
        # The annotation is a type, or its name if annotations are not evaluated.
        types = _OPTION_TYPES.get(str(getattr(declared, "__name__", declared)))
        if types is not None and type(value) not in types:
            return False
    return True


def _count_state_bytes(state: State) -> int:
    """Return the size of a state in bytes, without what the host saves with it."""
    return nbytes(state.tensors) + len(json.dumps(dict(state.facts)))


def may_pass(error: Exception) -> bool:
    """Return whether the same request may succeed later.

    It may succeed after a file error, such as a full disk, and after a refusal whose
    `later` is true.
    """
    # A file that cannot be read or written raises OSError or FednotesError itself.
    is_disk_error = type(error) is FednotesError or isinstance(error, OSError)
    return is_disk_error or bool(getattr(error, "later", False))


def _find_broken_rule(error: Exception) -> str:
    """Return the name of the rule that a refusal names; "" for any other error.

    Some exceptions of Python have a `reason`, too. It is free text, which must not get
    into the ledger.
    """
    return error.reason if isinstance(error, RefusedError) else ""


def explain_error(error: Exception, site: str) -> str:
    """Return a one-line description of an error that may leave the site.

    It contains no note text and no number from a rule. Errors of fednotes are written
    so, or have the public wording in `public`. Any other error is reduced to its type
    and place, because its message may contain a token, as that of a KeyError does.
    """
    public = getattr(error, "public", "") if isinstance(error, FednotesError) else ""
    if public:
        return clean_to_one_line(public) or "refused"
    return describe_error_to_staff(error, site)


def describe_error_to_staff(error: Exception, site: str) -> str:
    """Describe an error in one line for the site's staff, without note text."""
    if isinstance(error, FednotesError):
        return clean_to_one_line(error) or "refused"
    return f"site {site!r}: the task failed ({describe_place(error)})"


def remove_folders(text: str) -> str:
    """Return text without the folders of absolute paths, which others must not see."""
    return _FOLDERS.sub("", text)
