"""The history of a site on disk: its states and the requests that it received.

    run.json              the job, the format, and the number of the server's run
    states/00000012/      the site's state after request 12; 00000000 is a new site
    journal/00000013.request, 00000013.reply
    opened                the questions whose sums the site has helped to open
    named-sites           the sites that were named for each question, if a job draws
                          the sites of each round

A task is on disk before its reply leaves. The site's state after any request can be
rebuilt from a saved state by running the requests after it again. A killed site is
therefore at most one task behind, and a task that the server did not count can be
undone. A request names the previous one that counts, so gaps are noticed and never
skipped. A folder belongs to one job, and a stored reply answers only the exact request
for which it was made.

Under a secure sum, only updates for equal questions are added. Otherwise a dishonest
server could ask the other sites a question whose answer is zero or known. The masks are
therefore derived from a digest of the question (`secure`), and receipts show the sites
that all of them received the same question.

A site also identifies its own questions (`Trail`), so that its policy can count them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from fednotes.core.errors import FednotesError, ModelError, RefusedError
from fednotes.core.federation import State
from fednotes.core.messages import (
    HEAD,
    VERSION,
    Frame,
    Request,
    WireError,
    decode_reply,
    decode_request,
)
from fednotes.core.parsing import parse_json, read_json
from fednotes.core.store import (
    create_private_folder,
    open_private,
    replace_file,
    sync_folder,
    write_json,
)
from fednotes.core.tensors import load_state, restoring, save_state
from fednotes.core.update import Update
from fednotes.privacy.secure_sum.crypto import hash_parts

KEPT_REPLIES = 2
# Limit of the requests since the newest state. A server must begin a round before it is
# reached.
MOST_BYTES = 2**35
REQUEST = ".request"
REPLY = ".reply"
OPENED = "opened"  # file in a site's folder for a job
LOST = "lost\n"


class StatePath(NamedTuple):
    """The way to a state of a site.

    Attributes:
        start: The request number of a saved state.
        steps: The numbers of the requests to run again after it, in order.
    """

    start: int
    steps: list[int]


class Journal:
    """The folder of one site for one job.

    Args:
        directory: The folder.
        site: The site's name.
        job: Fingerprint of the job's table.

    Raises:
        RefusedError: The folder belongs to another job.
        ModelError: The folder does not say to which job it belongs, or another version
            of fednotes wrote it.
        FednotesError: The folder cannot be written to.
    """

    def __init__(self, directory: Path, site: str, job: str) -> None:
        self._site = site
        self._job = job
        self._states = directory / "states"
        self._entries = directory / "journal"
        self._run_file = directory / "run.json"
        with _naming_disk_errors(directory.name, "what it did"):
            for folder in (self._states, self._entries):
                create_private_folder(folder)
                for partial in folder.glob(".*"):  # written by a killed process
                    if partial.is_dir():
                        shutil.rmtree(partial)
                    else:
                        partial.unlink()
        self._claim(f"{directory.parent.name}/{directory.name}")
        if not self.states:
            self._begin()
        for number in self._list_numbers(REPLY) - self._list_numbers(REQUEST):
            # The process was killed before the task was complete on disk.
            self._name_entry(number, REPLY).unlink()

    def _begin(self) -> None:
        """Save the state before the first request."""
        save_state(self._name_state_folder(0), {}, {"new": True})

    def _claim(self, place: str) -> None:
        """Claim an empty folder for this job; reject the folder of another job.

        Args:
            place: How messages refer to the folder.
        """
        if not self.states and not self._run_file.exists():
            self.set_server_start(0)
            return
        try:
            stored = read_json(self._run_file)
            self._server_start = int(stored["run"])
            job = str(stored["job"])
            version = stored.get("format", 2)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(
                f"site {self._site!r}: {place}/run.json does not say which job is "
                f"stored there: delete {place}, and the site starts again"
            ) from error
        if job != self._job:
            raise RefusedError(
                f"site {self._site!r}: {place} holds job {job[:12]}, but this is job "
                f"{self._job[:12]}: run it under another name, or delete {place} at "
                "the site"
            )
        if version != VERSION:
            raise ModelError(
                f"site {self._site!r}: another version of fednotes wrote the "
                f"files of this job in {place}: finish the job with that version, or "
                f"delete {place}; the site then starts the job again"
            )

    @property
    def server_start(self) -> int:
        """The start of the server in which the site takes part; 0 for none."""
        return self._server_start

    def set_server_start(self, number: int) -> None:
        """Store the start of the server in which the site takes part."""
        write_json(self._run_file, {"job": self._job, "format": VERSION, "run": number})
        self._server_start = number

    @property
    def states(self) -> list[int]:
        """The request numbers of the saved states, in ascending order."""
        return sorted(int(p.name) for p in self._states.iterdir() if p.name.isdecimal())

    @property
    def last(self) -> int:
        """The number of the last request that was run and not undone."""
        return max({self.states[-1]} | self._list_numbers(REQUEST))

    def count_bytes(self) -> int:
        """Return the total size in bytes of the requests since the newest state."""
        newest_state = self.states[-1]
        return sum(
            self._name_entry(number, REQUEST).stat().st_size
            for number in self._list_numbers(REQUEST)
            if number > newest_state
        )

    def add(self, number: int, request: Frame, reply: Frame) -> None:
        """Store a task that was run. The request is written last, as a commit mark.

        Raises:
            RefusedError: The requests since the newest state would take too much space.
        """
        if self.count_bytes() + len(request) > MOST_BYTES:
            raise RefusedError(
                f"site {self._site!r} stores at most {MOST_BYTES:,} bytes of requests "
                "of one round"
            )
        for ending, frame in ((REPLY, reply), (REQUEST, request)):
            path = self._name_entry(number, ending)
            with _naming_disk_errors(path.name, "what it did"):
                replace_file(path, frame)
        for old in sorted(self._list_numbers(REPLY))[:-KEPT_REPLIES]:
            self._name_entry(old, REPLY).unlink(missing_ok=True)

    def find_reply(self, request: Request, frame: Frame) -> bytes | None:
        """Return the stored reply to a request.

        Args:
            request: The request.
            frame: Its bytes.

        Returns:
            The reply; None if there is none, or if it is damaged.

        Raises:
            RefusedError: Another request of this run had the same number.
        """
        number = request.number
        server_start = request.server_start
        try:
            with self._name_entry(number, REQUEST).open("rb") as file:
                head = file.read(HEAD.size)
        except OSError:
            return None
        # The head contains the lengths and the SHA-256 of everything that follows.
        is_same_request = head == memoryview(frame)[: HEAD.size]
        if is_same_request:
            try:
                stored_frame = self._name_entry(number, REPLY).read_bytes()
                reply = decode_reply(stored_frame)
            except (OSError, WireError):
                return None
            is_its_reply = (reply.server_start, reply.number) == (server_start, number)
            return stored_frame if is_its_reply else None

        try:
            earlier_request = self.read_request(number)
        except ModelError:
            # It cannot be read: it will be undone, or the site has lost its state.
            return None
        if earlier_request.server_start == server_start:
            raise RefusedError(
                f"site {self._site!r}: request {number} of run {server_start} was "
                "received before with different content: the server must start a new "
                "run"
            )
        return None

    def read_request(self, number: int) -> Request:
        """Return a stored request.

        Raises:
            ModelError: The request is missing or damaged.
        """
        path = self._name_entry(number, REQUEST)
        try:
            frame = bytearray(path.stat().st_size)  # the tensors will be views of it
            with path.open("rb") as file:
                file.readinto(frame)
            return decode_request(frame)
        except (OSError, WireError) as error:
            raise ModelError(f"{path}: not a readable request ({error})") from error

    def save(
        self,
        number: int,
        state: State,
        newest_with_tensors: int,
        asked: QuestionHistory | None = None,
        trail: Trail | None = None,
    ) -> None:
        """Save the site's state after a request.

        Args:
            number: The request's number.
            state: The state.
            newest_with_tensors: Number of the last request with tensors.
            asked: The history that led to this state, for the secure sum.
            trail: The history that led to this state, for the site's policy.
        """
        facts = {
            "new": False,
            "round": state.round,
            "told": newest_with_tensors,
            "facts": dict(state.facts),
            "asked": asked.to_json() if asked else {},
            "trail": (trail or Trail()).to_json(),
        }
        save_state(self._name_state_folder(number), state.tensors, facts)

    def load(self, number: int) -> SavedState:
        """Return a saved state and the facts saved with it.

        Raises:
            ModelError: The state is damaged.
        """
        path = self._name_state_folder(number)
        tensors, facts = load_state(path)
        with restoring(path):
            if facts["new"]:
                return SavedState()
            trail = Trail(hash_parts("a state without a trail", number))
            if "trail" in facts:  # states of earlier versions have none
                trail = Trail.from_json(facts["trail"])
            asked = QuestionHistory()
            if facts.get("asked"):  # empty for a job without a secure sum
                asked = QuestionHistory.from_json(facts["asked"])
            return SavedState(
                State(facts["round"], tensors, facts["facts"]),
                newest_with_tensors=int(facts["told"]),
                asked=asked,
                trail=trail,
            )

    def find_path(self, target: int) -> StatePath | None:
        """Find how to reach the state after a request.

        Returns:
            None if the stored requests do not lead there.
        """
        start = self._find_newest_state(target)
        if start is None:
            return None
        steps = sorted(
            number for number in self._list_numbers(REQUEST) if start < number <= target
        )
        last = start
        for number in steps:
            try:
                counted = self.read_request(number).counted.get(self._site)
            except ModelError:
                return None
            if counted != last:  # a request between the two is missing
                return None
            last = number
        return StatePath(start, steps) if last == target else None

    def _find_newest_state(self, target: int) -> int | None:
        """Return the number of the newest saved state up to a request, if any."""
        return max((number for number in self.states if number <= target), default=None)

    def find_state_before(self, target: int) -> int:
        """Return the number of the newest state up to a request; start over without."""
        if self.states[0] > target:
            self.forget_damaged(0)
        return max(number for number in self.states if number <= target)

    def undo_to(self, target: int) -> None:
        """Delete states and requests after a request.

        The newest are deleted first, so that a killed process leaves no gap.
        """
        later_states = [number for number in self.states if number > target]
        for number in reversed(later_states):
            shutil.rmtree(self._name_state_folder(number), ignore_errors=True)
        if later_states:
            sync_folder(self._states)  # before a request that follows is stored
        for number in sorted(self._list_numbers(REQUEST), reverse=True):
            if number > target:
                self._forget(number)

    def forget_damaged(self, number: int) -> None:
        """Delete the damaged state with this number and everything after it."""
        self.undo_to(number - 1)
        if not self.states:
            self.undo_to(-1)
            self._begin()

    def forget(self, checkpoint_numbers: Collection[int]) -> None:
        """Delete states and requests that no later restart can need.

        The site needs them for its present state, and for each checkpoint to which the
        server may return.

        Args:
            checkpoint_numbers: The request numbers of the server's checkpoints.
        """
        states = self.states
        requests = self._list_numbers(REQUEST)
        newest_state = states[-1]
        needed_states = {newest_state}
        needed_requests = {number for number in requests if number > newest_state}
        for checkpoint in checkpoint_numbers:
            start = self._find_newest_state(checkpoint)
            if start is not None:
                needed_states.add(start)
                needed_requests |= {
                    number for number in requests if start < number <= checkpoint
                }
        needed_requests |= {
            self._find_newest_with_tensors(number) for number in needed_states
        }
        needed_requests.add(max(requests, default=0))

        for number in requests - needed_requests:
            self._forget(number)
        for number in set(states) - needed_states:
            shutil.rmtree(self._name_state_folder(number), ignore_errors=True)

    def _find_newest_with_tensors(self, number: int) -> int:
        """Return the last request before a saved state that carried tensors.

        Only the facts of the state are read, not its tensors.

        Args:
            number: The request number of the saved state.

        Returns:
            The number of the request; 0 if the facts cannot be read.
        """
        try:
            facts = read_json(
                self._name_state_folder(number) / "facts.json", strict=False
            )
            return int(facts["told"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def _forget(self, number: int) -> None:
        """Delete a request and its reply."""
        for ending in (REQUEST, REPLY):
            self._name_entry(number, ending).unlink(missing_ok=True)

    def _name_state_folder(self, number: int) -> Path:
        """Return the folder of the state after a request."""
        return self._states / f"{number:08d}"

    def _name_entry(self, number: int, ending: str) -> Path:
        """Return the file of a request or its reply."""
        return self._entries / f"{number:08d}{ending}"

    def _list_numbers(self, ending: str) -> set[int]:
        """Return the numbers of the stored requests or replies."""
        return {
            int(path.stem)
            for path in self._entries.iterdir()
            if path.suffix == ending and path.stem.isdecimal()
        }


@dataclass(frozen=True)
class QuestionHistory:
    """The history behind a site's newest update, as digests of 32 bytes; b"" for none.

    Attributes:
        prepared: Digest of all tasks before the first round, in order.
        history: Digest of all tasks in the site's state, in order.
        trained: Whether `history` includes a task of a round.
        newest_tensors: Digest of the tensors received last.
        round_tensors: Digest of the tensors that the tasks of this round compute with.
        task_questions: The newest question of each task that others build on.
        question: Digest of the newest task, its options and round, the questions of the
            tasks that it builds on, and all of the above.
    """

    prepared: bytes = b""
    history: bytes = b""
    trained: bool = False
    newest_tensors: bytes = b""
    round_tensors: bytes = b""
    task_questions: Mapping[str, bytes] = field(default_factory=dict)
    question: bytes = b""

    def add_request(
        self,
        request: Request,
        received: bytes,
        *,
        builds_on: Mapping[str, Sequence[str]],
        strict: bool,
    ) -> QuestionHistory:
        """Return the history extended by one task.

        A task before the first round is the same whenever a site runs it. It affects
        the site's state for good, so it is part of every later question.

        Args:
            request: The request of the task.
            received: Digest of the tensors that the task receives, also of those from
                the journal; b"" for none.
            builds_on: For each task, the earlier ones whose results it uses. Their
                questions are part of its own, whatever a server claims about rounds.
                Otherwise, a server could ask the earlier task with other tensors at
                each site, and then the same question at all of them.
            strict: Whether all sites are in every sum. If so, all have the same
                history, and it is part of the question: a server that makes one site go
                back, or run a task that the others did not, gets no further sum with
                that site.
        """
        newest_tensors = received or self.newest_tensors
        # The tensors on which the answer depends: those of this request, of an earlier
        # request of the round, or of an earlier round if this request refers to them.
        if received:
            round_tensors = newest_tensors
        elif not request.first:
            round_tensors = self.round_tensors
        else:
            round_tensors = newest_tensors if request.tensors_of_request else b""
        round_number = -1 if request.preparing else request.round
        earlier_questions = [
            self.task_questions.get(task, b"")
            for task in builds_on.get(request.task, ())
        ]
        question = hash_parts(
            "question",
            self.prepared,
            self.history if strict else b"",
            request.task,
            round_number,
            json.dumps(dict(request.options), sort_keys=True),
            round_tensors,
            *earlier_questions,
        )
        prepared = (
            hash_parts("prepared", question) if request.preparing else self.prepared
        )
        task_questions = dict(self.task_questions)
        if any(request.task in earlier_tasks for earlier_tasks in builds_on.values()):
            task_questions[request.task] = question
        return QuestionHistory(
            prepared=prepared,
            history=compute_history(question),
            trained=self.trained or not request.preparing,
            newest_tensors=newest_tensors,
            round_tensors=round_tensors,
            task_questions=task_questions,
            question=question,
        )

    def to_json(self) -> dict[str, Any]:
        """Return what is saved with a state of the site, as JSON values."""
        return {
            "prepared": self.prepared.hex(),
            "history": self.history.hex(),
            "trained": self.trained,
            "task_questions": {
                task: question.hex() for task, question in self.task_questions.items()
            },
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> QuestionHistory:
        """Return what `to_json` saved.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: The values are not such.
        """
        task_questions = {
            task: bytes.fromhex(question)
            # States of earlier versions have none.
            for task, question in saved.get("task_questions", {}).items()
        }
        return cls(
            prepared=bytes.fromhex(saved["prepared"]),
            history=bytes.fromhex(saved["history"]),
            trained=bool(saved["trained"]),
            task_questions=task_questions,
        )


def compute_history(question: bytes) -> bytes:
    """Return the history that ends with a question."""
    return hash_parts("history", question)


@dataclass(frozen=True)
class Trail:
    """The requests of a job to a site, as far as its next answer depends on them.

    A question consists of the task, its options, the tensors that the task computes
    with, and all earlier tasks of the site in the same form. The same question comes
    again if a server is restarted, or sends the site back and then asks for the same
    as before; numbers of requests, rounds and runs do not matter. Any other request is
    another question, even if its answer is the same.

    Two kinds of tasks may be repeated without making later questions different, because
    servers do so when they resume a run: tasks after which all later answers stay the
    same, and tasks that answer nothing and are the same as the last task of this name.
    The latter only set something at the site.

    Attributes:
        state: Digest of the tasks that led to the site's state; b"" for a new site.
        settings: Task to a digest of its last request, for tasks that answer nothing.
        newest_tensors: Digest of the tensors that came last; b"" if they are not known.
        task: The newest task.
        contents: Digest of the newest task, its options and its tensors.
        question: Digest of these and of `state` before the task.
    """

    state: bytes = b""
    settings: Mapping[str, bytes] = field(default_factory=dict)
    newest_tensors: bytes = b""
    task: str = ""
    contents: bytes = b""
    question: bytes = b""

    def add_request(self, request: Request, received: bytes) -> Trail:
        """Return the trail with the question of a request whose task is to be run.

        Args:
            request: The request.
            received: Digest of the tensors that the task receives, also of those from
                the journal; b"" for none.
        """
        refers_to_earlier = request.first and bool(request.tensors_of_request)
        tensors = received or (self.newest_tensors if refers_to_earlier else b"")
        options = json.dumps(dict(request.options), sort_keys=True)
        contents = hash_parts("task", request.task, options, tensors)
        return replace(
            self,
            newest_tensors=received or self.newest_tensors,
            task=request.task,
            contents=contents,
            question=hash_parts("question of a site", self.state, contents),
        )

    def add_answer(self, update: Update, *, is_read_only: bool) -> Trail:
        """Return the trail after the newest task has answered.

        Args:
            update: The task's update.
            is_read_only: Whether all later answers stay the same after the task.
        """
        if is_read_only:
            return self
        settings = self.settings
        if update.is_empty:
            if settings.get(self.task) == self.contents:
                return self
            settings = {**settings, self.task: self.contents}
        return replace(
            self, state=hash_parts("state", self.question), settings=settings
        )

    def to_json(self) -> dict[str, Any]:
        """Return what is saved with a state of the site, as JSON values."""
        settings = {task: contents.hex() for task, contents in self.settings.items()}
        return {"state": self.state.hex(), "settings": settings}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Trail:
        """Return what `to_json` saved.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: The values are not such.
        """
        settings = {
            task: bytes.fromhex(contents)
            for task, contents in saved["settings"].items()
        }
        return cls(bytes.fromhex(saved["state"]), settings)


@dataclass(frozen=True)
class SavedState:
    """A state of a site as it lies on disk.

    Attributes:
        state: The state; None if the site was new.
        newest_with_tensors: Number of the last request with tensors.
        asked: What led to the state, for the secure sum.
        trail: What led to the state, for the site's policy.
    """

    state: State | None = None
    newest_with_tensors: int = 0
    asked: QuestionHistory = QuestionHistory()
    trail: Trail = field(default_factory=Trail)


class OpenedSums:
    """The questions of one job whose sums a site has helped to open.

    Each line of the file has a question's digest in hexadecimal and the names of the
    sites in its sum as JSON. The file is only appended to, and a line is on disk before
    the answer that opens a sum leaves. A line "lost" says that the site's own files
    were damaged; earlier lines do not count.

    Args:
        site: The site's name.
        path: The file; None keeps the questions in memory alone.

    Raises:
        FednotesError: The file cannot be read.

    Attributes:
        has_lost_files: Whether nothing was opened since the site's files were damaged.
    """

    _content = "what it opened"  # of the file, for messages

    def __init__(self, site: str, path: Path | None) -> None:
        self._site = site
        self._path = path
        self._survivors: dict[bytes, tuple[str, ...]] = {}
        self.has_lost_files = False
        for line in _read_lines(path, self._content, keep_ends=True):
            question, _, names = line.partition(" ")
            if line == LOST:
                self._survivors = {}
                self.has_lost_files = True
                continue
            try:
                self._survivors[bytes.fromhex(question)] = tuple(parse_json(names))
                self.has_lost_files = False
            except (ValueError, TypeError):
                continue  # truncated by a kill, so its answer did not leave

    def find_survivors(self, question: bytes) -> tuple[str, ...]:
        """Return the sites whose sum of this question was opened; () if none was."""
        return self._survivors.get(question, ())

    def require(self, question: bytes, survivors: Sequence[str]) -> None:
        """Check that the sum of a question may be opened over these sites.

        Otherwise the server could subtract two sums over different sites and obtain the
        part of a few sites.

        Raises:
            RefusedError: The sum was opened over other sites before.
        """
        earlier = self._survivors.get(question)
        if earlier is not None and set(earlier) != set(survivors):
            raise RefusedError(
                f"site {self._site!r}: a sum of this task has been opened for the "
                f"sites {', '.join(earlier)}; it is not opened again for other sites"
            )

    def add(self, question: bytes, survivors: Sequence[str]) -> None:
        """Record a sum that is about to be opened.

        Raises:
            RefusedError: The sum was opened over other sites before.
            FednotesError: Writing to disk failed.
        """
        self.require(question, survivors)
        if question in self._survivors:
            return
        names = json.dumps(list(survivors), separators=(",", ":"))
        _append(self._path, f"{question.hex()} {names}\n", self._content)
        self._survivors[question] = tuple(survivors)
        self.has_lost_files = False

    def record_loss(self) -> None:
        """Forget all questions, because the site's own files were damaged.

        Raises:
            FednotesError: Writing to disk failed.
        """
        _append(self._path, LOST, "what it opened")
        self._survivors = {}
        self.has_lost_files = True

    def __len__(self) -> int:
        """Return the number of questions."""
        return len(self._survivors)


class NamedSites(OpenedSums):
    """The sites that a server named for each question of one job, as `OpenedSums`.

    Where the sites of each round are drawn, a site masks its answer to a question for
    one list of sites only. Sums of the same answers over two lists would reveal those
    of the few sites that are in one of them alone.
    """

    _content = "which sites were named to it"

    def require(self, question: bytes, survivors: Sequence[str]) -> None:
        """Check that these sites may be named for a question.

        Raises:
            RefusedError: Other sites were named for it before.
        """
        earlier = self._survivors.get(question)
        if earlier is not None and set(earlier) != set(survivors):
            raise RefusedError(
                f"site {self._site!r}: this task was requested before for a sum over "
                f"the sites {', '.join(earlier)}; it is not masked for others: if the "
                "server lost the secret from which it draws the sites of a round, "
                "start a new run"
            )


class OpeningRecord:
    """The sums that a server has asked its sites to open, and over which of them.

    A site that has helped to open a sum says so when the same sum is asked for again.
    The server believes this only of a sum in its own record, or a single site could
    claim any list and shut others out. A line is on disk before the sites are asked.

    Args:
        path: The file that is appended to. None keeps the record in memory.

    Raises:
        FednotesError: The file cannot be read.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lists: dict[str, set[frozenset[str]]] = {}
        for line in _read_lines(path, "what was opened"):
            # A killed process may have left a truncated line.
            with suppress(ValueError, TypeError, KeyError):
                entry = parse_json(line)
                self._note(str(entry["sum"]), entry["sites"])

    def has(self, request: Request, sites: Collection[str]) -> bool:
        """Return whether this sum was to be opened over exactly these sites."""
        return frozenset(sites) in self._lists.get(_name_sum(request), ())

    def add(self, request: Request, sites: Collection[str]) -> None:
        """Record a sum that is about to be opened.

        Raises:
            FednotesError: Writing to disk failed.
        """
        if self.has(request, sites):
            return
        name = _name_sum(request)
        line = json.dumps({"sum": name, "sites": sorted(sites)}, separators=(",", ":"))
        _append(self._path, line + "\n", "what was opened")
        self._note(name, sites)

    def _note(self, name: str, sites: Collection[str]) -> None:
        """Store in memory that a sum was to be opened over these sites."""
        self._lists.setdefault(name, set()).add(frozenset(sites))


def _name_sum(request: Request) -> str:
    """Return the name of a method's sum in the record: its round and its task."""
    return f"{-1 if request.preparing else request.round} {request.task}"


def _read_lines(path: Path | None, what: str, *, keep_ends: bool = False) -> list[str]:
    """Return the lines of a file; none if there is no file."""
    if path is None:
        return []
    with _naming_disk_errors(path, what):
        if not path.exists():
            return []
        return path.read_text(encoding="utf-8").splitlines(keepends=keep_ends)


def _append(path: Path | None, line: str, what: str) -> None:
    """Append a line to a file and put it on disk; do nothing without a path."""
    if path is None:
        return
    with _naming_disk_errors(path, what), open(path, "ab", opener=open_private) as file:
        if file.tell():
            line = "\n" + line  # a kill may have truncated the previous line
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _naming_disk_errors(place: Path | str | None, what: str) -> Iterator[None]:
    """Turn an error of the disk into a FednotesError that says what is not stored."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FednotesError(
            f"{place}: the site cannot save {what} ({reason})"
        ) from error
