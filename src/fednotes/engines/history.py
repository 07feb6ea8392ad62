"""What a site did and was asked: its states and requests on disk, and the digest of a
question.

    run.json                the job, the format, and the server's run that the site is in
    states/00000012/        the site after request 12 (core/store.py); 00000000 is a new site
    journal/00000013.request, 00000013.reply
    opened                  the questions whose sums the site has helped to open

A task that was done is on disk before its reply leaves. The site after any request is
then a state and the requests after it, done again; so a killed site is at most one task
behind, and a task that the server did not count can be undone. A request names the one
before it that counts, so a gap is found and never replayed over. Another job does not
begin here, and a stored reply leaves for the very request that it answers alone.

Under a secure sum only equal questions are added, or a server that lies could make the
others' parts nothing or known. So masks are made for the digest of the question
(`secure`), and sites show each other by receipts that they were asked the same.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    open_private,
    private_folder,
    replace_file,
    sync_folder,
    write_json,
)
from fednotes.core.tensors import load_state, restoring, save_state, tensor_fingerprint
from fednotes.core.update import Tensors
from fednotes.privacy.secure_sum.crypto import digest

KEPT_REPLIES = 2
# of requests since the newest state: a server must let a round begin by then
MOST_BYTES = 2**35
REQUEST, REPLY = ".request", ".reply"
OPENED = "opened"  # in a site's folder of a job
LOST = "lost\n"


class Journal:
    """One site's folder of one job, whose fingerprint is `job`.

    Raises RefusedError if it holds another job, ModelError if it does not say which or
    another version of fednotes wrote it, FednotesError where it cannot be written.
    """

    def __init__(self, directory: Path, site: str, job: str) -> None:
        self._site, self._job = site, job
        self._states, self._entries = directory / "states", directory / "journal"
        self._run_file = directory / "run.json"
        with _disk(directory.name, "what it did"):
            for folder in (self._states, self._entries):
                private_folder(folder)
                for cut in folder.glob(".*"):  # a killed process's, half-written
                    shutil.rmtree(cut) if cut.is_dir() else cut.unlink()
        self._own(f"{directory.parent.name}/{directory.name}")
        if not self.states:
            self._begin()
        for number in self._numbers(REPLY) - self._numbers(REQUEST):
            # killed before the task was complete on disk
            self._entry(number, REPLY).unlink()

    def _begin(self) -> None:
        save_state(self._state(0), {}, {"new": True})

    def _own(self, place: str) -> None:
        """Take an empty folder for this job; refuse what is not this job's."""
        if not self.states and not self._run_file.exists():
            self.run = 0
            return
        try:
            kept = read_json(self._run_file)
            self._run, job, version = (
                int(kept["run"]),
                str(kept["job"]),
                kept.get("format", 2),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(
                f"site {self._site!r}: {place}/run.json does not say which job is kept there: "
                f"delete {place}, and the site begins anew"
            ) from error
        if job != self._job:
            raise RefusedError(
                f"site {self._site!r}: {place} holds job {job[:12]}, this is job "
                f"{self._job[:12]}: run it under another name, or delete {place} at the site"
            )
        if version != VERSION:
            raise ModelError(
                f"site {self._site!r}: another version of fednotes keeps this job in {place}: "
                f"end it with that version, or delete {place}, and the site begins anew"
            )

    @property
    def run(self) -> int:
        """The run of the server that the site is in; 0 for none."""
        return self._run

    @run.setter
    def run(self, number: int) -> None:
        write_json(self._run_file, {"job": self._job, "format": VERSION, "run": number})
        self._run = number

    @property
    def states(self) -> list[int]:
        """Request numbers of the kept states, from the oldest."""
        return sorted(int(p.name) for p in self._states.iterdir() if p.name.isdecimal())

    @property
    def last(self) -> int:
        """The number of the last request that is done and not undone."""
        return max({self.states[-1]} | self._numbers(REQUEST))

    def nbytes(self) -> int:
        """Of the requests since the newest state."""
        newest = self.states[-1]
        since = (number for number in self._numbers(REQUEST) if number > newest)
        return sum(self._entry(number, REQUEST).stat().st_size for number in since)

    def add(self, number: int, request: Frame, reply: Frame) -> None:
        """A task that is done. The request is written last: it completes the entry.

        Raises RefusedError where too much would be kept since the newest state.
        """
        if self.nbytes() + len(request) > MOST_BYTES:
            raise RefusedError(
                f"site {self._site!r} keeps {MOST_BYTES:,} bytes of requests of one round at most"
            )
        for ending, frame in ((REPLY, reply), (REQUEST, request)):
            path = self._entry(number, ending)
            with _disk(path.name, "what it did"):
                replace_file(path, frame)
        for old in sorted(self._numbers(REPLY))[:-KEPT_REPLIES]:
            self._entry(old, REPLY).unlink(missing_ok=True)

    def reply(self, request: Request, frame: Frame) -> bytes | None:
        """The stored answer to this request, which is `frame`, if it is whole.

        Raises RefusedError where the run has used the request's number for another one.
        """
        number, run = request.number, request.run
        try:
            with self._entry(number, REQUEST).open("rb") as file:
                head = file.read(HEAD.size)
        except OSError:
            return None
        # lengths, and SHA-256 of all that follows
        if head == memoryview(frame)[: HEAD.size]:
            try:
                stored = self._entry(number, REPLY).read_bytes()
                kept = decode_reply(stored)
            except (OSError, WireError):
                return None
            return stored if (kept.run, kept.number) == (run, number) else None
        try:
            before = self.request(number)
        except ModelError:
            # nothing can be told of it; it is undone, or the site lost its state
            return None
        if before.run == run:
            raise RefusedError(
                f"site {self._site!r}: request {number} of run {run} has come before, and was "
                "another: the server must go on with a new run"
            )
        return None

    def request(self, number: int) -> Request:
        """A stored request. Raises ModelError if it is missing or damaged."""
        path = self._entry(number, REQUEST)
        try:
            frame = bytearray(path.stat().st_size)  # tensors lie in it, without a copy
            with path.open("rb") as file:
                file.readinto(frame)
            return decode_request(frame)
        except (OSError, WireError) as error:
            raise ModelError(f"{path}: not a readable request ({error})") from error

    def save(
        self,
        number: int,
        state: State,
        told: int,
        asked: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep the site's state after a request. told: the last request that had
        tensors. asked: what led to this state (`Asked.kept`)."""
        facts = {
            "new": False,
            "round": state.round,
            "told": told,
            "facts": dict(state.facts),
        }
        save_state(
            self._state(number), state.tensors, {**facts, "asked": dict(asked or {})}
        )

    def load(self, number: int) -> tuple[State | None, int, Mapping[str, Any]]:
        """A kept state (None is a new site's), and `told` and `asked` as they were
        saved.

        Raises ModelError if it is damaged.
        """
        path = self._state(number)
        tensors, facts = load_state(path)
        with restoring(path):
            if facts["new"]:
                return None, 0, {}
            state = State(facts["round"], tensors, facts["facts"])
            return state, int(facts["told"]), facts.get("asked", {})

    def path_to(self, target: int) -> tuple[int, list[int]] | None:
        """The state to start from and the requests to do again to be as after `target`."""
        start = max((n for n in self.states if n <= target), default=None)
        if start is None:
            return None
        steps = sorted(n for n in self._numbers(REQUEST) if start < n <= target)
        before = start
        for number in steps:
            try:
                if self.request(number).counted.get(self._site) != before:
                    return None
            except ModelError:
                return None
            before = number
        return (start, steps) if before == target else None

    def state_before(self, target: int) -> int:
        """The newest kept state that is not after `target`; a new site where there is
        none."""
        if self.states[0] > target:
            self.damaged(0)
        return max(number for number in self.states if number <= target)

    def undo_to(self, target: int) -> None:
        """Forget all after a request, the newest first, so that a kill leaves no gap."""
        undone = [number for number in self.states if number > target]
        for number in reversed(undone):
            shutil.rmtree(self._state(number), ignore_errors=True)
        if undone:
            sync_folder(self._states)  # before a request that goes on from here is kept
        for number in sorted(self._numbers(REQUEST), reverse=True):
            if number > target:
                self._forget(number)

    def damaged(self, number: int) -> None:
        """Forget what cannot be read at this number, and all after it."""
        self.undo_to(number - 1)
        if not self.states:
            self.undo_to(-1)
            self._begin()

    def forget(self, marks: Collection[int]) -> None:
        """Delete what leads neither to the present nor to a checkpoint of the server's."""
        states, entries = self.states, self._numbers(REQUEST)
        kept_states, kept = {states[-1]}, {n for n in entries if n > states[-1]}
        for mark in marks:
            start = max((n for n in states if n <= mark), default=None)
            if start is not None:
                kept_states.add(start)
                kept |= {n for n in entries if start < n <= mark}
        kept |= {self._told(number) for number in kept_states}
        for number in entries - kept - {max(entries, default=0)}:
            self._forget(number)
        for number in set(states) - kept_states:
            shutil.rmtree(self._state(number), ignore_errors=True)

    def _told(self, number: int) -> int:
        """Of a kept state, without its tensors."""
        try:
            return int(
                read_json(self._state(number) / "facts.json", strict=False)["told"]
            )
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def _forget(self, number: int) -> None:
        for ending in (REQUEST, REPLY):
            self._entry(number, ending).unlink(missing_ok=True)

    def _state(self, number: int) -> Path:
        return self._states / f"{number:08d}"

    def _entry(self, number: int, ending: str) -> Path:
        return self._entries / f"{number:08d}{ending}"

    def _numbers(self, ending: str) -> set[int]:
        paths = self._entries.iterdir()
        return {int(p.stem) for p in paths if p.suffix == ending and p.stem.isdecimal()}


@dataclass(frozen=True)
class Asked:
    """What led to a site's newest update, as digests of 32 bytes; b"" for nothing.

    prepared: all tasks before the first round, in their order. history: all tasks that
    are in the site's state, in theirs. trained: whether one of a round is among them.
    told: the tensors that came last. given: those that the present round's tasks
    compute with. question: the newest task with all of these, its options and its
    round.
    """

    prepared: bytes = b""
    history: bytes = b""
    trained: bool = False
    told: bytes = b""
    given: bytes = b""
    question: bytes = b""

    def next(self, request: Request, tensors: Tensors, *, strict: bool) -> Asked:
        """With one task more. tensors: what the site's task is given, also from memory.

        A task before the first round is the same whenever a site does it; what it
        changes at the site stays, so it is part of every later question. strict: all
        sites are in every sum, so all have one history, and that is part of the
        question too: a server that has one site go back, or do what the others did not,
        gets no sum with it any more.
        """
        told = tensor_fingerprint(tensors) if tensors else self.told
        if tensors or not request.first:
            given = told if tensors else self.given
        else:
            given = told if request.told else b""
        options = json.dumps(dict(request.options), sort_keys=True)
        round = -1 if request.preparing else request.round
        before = self.history if strict else b""
        asked = (request.task, round, options, given)
        question = digest("question", self.prepared, before, *asked)
        prepared = digest("prepared", question) if request.preparing else self.prepared
        trained = self.trained or not request.preparing
        return Asked(prepared, after(question), trained, told, given, question)

    def kept(self) -> dict[str, Any]:
        """What a state of the site is kept with, as JSON values."""
        digests = {"prepared": self.prepared.hex(), "history": self.history.hex()}
        return {**digests, "trained": self.trained}

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Asked:
        """From what was kept.

        Raises ValueError, KeyError, TypeError for anything else.
        """
        prepared, history = (
            bytes.fromhex(kept[name]) for name in ("prepared", "history")
        )
        return cls(prepared, history, bool(kept["trained"]))


def after(question: bytes) -> bytes:
    """The history that ends with a question."""
    return digest("history", question)


class Opened:
    """The questions of one job whose sums a site has helped to open, and over which
    sites.

    One line a question, its digest in hexadecimal and the survivors' names as JSON, in
    a file that is only appended to; on disk before the answer that opens a sum leaves.
    A line "lost" says that the site's own files were damaged: what stands before it is
    forgotten.

    path: None keeps them in memory alone. Raises FednotesError where the file cannot be
        read.
    """

    def __init__(self, site: str, path: Path | None) -> None:
        self._site, self._path = site, path
        self._survivors: dict[bytes, tuple[str, ...]] = {}
        self.lost = False  # since then nothing was opened
        with _disk(path, "what it opened"):
            text = (
                path.read_text(encoding="utf-8")
                if path is not None and path.exists()
                else ""
            )
        for line in text.splitlines(keepends=True):
            question, _, names = line.partition(" ")
            if line == LOST:
                self._survivors, self.lost = {}, True
                continue
            try:
                self._survivors[bytes.fromhex(question)] = tuple(parse_json(names))
                self.lost = False
            except (ValueError, TypeError):
                continue  # cut by a kill: its answer did not leave

    def survivors(self, question: bytes) -> tuple[str, ...]:
        """The sites in the sum of this question that was opened; empty if none was."""
        return self._survivors.get(question, ())

    def require(self, question: bytes, survivors: Sequence[str]) -> None:
        """Pass the sum of a question that may be opened: of two over different sites,
        the difference is some sites' part. Raises RefusedError."""
        before = self._survivors.get(question)
        if before is not None and set(before) != set(survivors):
            raise RefusedError(
                f"site {self._site!r}: a sum of this very task was opened before, over the sites "
                f"{', '.join(before)}; it is not opened over others"
            )

    def add(self, question: bytes, survivors: Sequence[str]) -> None:
        """Note a sum that is being opened.

        Raises what `require` does, FednotesError of a disk.
        """
        self.require(question, survivors)
        if question in self._survivors:
            return
        names = json.dumps(list(survivors), separators=(",", ":"))
        _append(self._path, f"{question.hex()} {names}\n", "what it opened")
        self._survivors[question], self.lost = tuple(survivors), False

    def lose(self) -> None:
        """Forget all: the site's own files were damaged.

        Raises FednotesError of a disk.
        """
        _append(self._path, LOST, "what it opened")
        self._survivors, self.lost = {}, True

    def __len__(self) -> int:
        return len(self._survivors)


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
        with _disk(path, "what was opened"):
            text = (
                path.read_text(encoding="utf-8")
                if path is not None and path.exists()
                else ""
            )
        for line in text.splitlines():
            # a line that a kill has cut
            with suppress(ValueError, TypeError, KeyError):
                entry = parse_json(line)
                self._note(str(entry["sum"]), entry["sites"])

    def has(self, request: Request, sites: Collection[str]) -> bool:
        """Return whether this sum was to be opened over exactly these sites."""
        return frozenset(sites) in self._lists.get(_name_of(request), ())

    def add(self, request: Request, sites: Collection[str]) -> None:
        """Note a sum that is about to be opened.

        Raises:
            FednotesError: The disk refuses.
        """
        if self.has(request, sites):
            return
        name = _name_of(request)
        line = json.dumps({"sum": name, "sites": sorted(sites)}, separators=(",", ":"))
        _append(self._path, line + "\n", "what was opened")
        self._note(name, sites)

    def _note(self, name: str, sites: Collection[str]) -> None:
        self._lists.setdefault(name, set()).add(frozenset(sites))


def _name_of(request: Request) -> str:
    """Return the name of a method's sum in the record: its round and its task."""
    return f"{-1 if request.preparing else request.round} {request.task}"


def _append(path: Path | None, line: str, what: str) -> None:
    """Append a line to a file, and put it on the disk; without a path, do nothing."""
    if path is None:
        return
    with _disk(path, what), open(path, "ab", opener=open_private) as file:
        if file.tell():
            line = "\n" + line  # never behind the cut end of another line
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _disk(place: Path | str | None, what: str) -> Iterator[None]:
    """A disk that refuses is a FednotesError that says what cannot be kept."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FednotesError(
            f"{place}: the site cannot keep {what} ({reason})"
        ) from error
