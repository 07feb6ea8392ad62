"""What a site keeps of a job on its disk: states, and the requests since.

    run.json                the job, and the server's run that the site is in
    states/00000012/        the site after request 12 (core/store.py); 00000000 is a new site
    journal/00000013.request, 00000013.reply

A task that was done is on disk before its reply leaves. The site after any request is then a
state and the requests after it, done again; so a killed site is at most one task behind, and a
task that the server did not count can be undone. A request names the one before it that
counts, so a gap is found and never replayed over. Another job does not begin here, and a stored
reply leaves for the very request that it answers alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from fednotes.core.errors import FednotesError, ModelError, RefusedError
from fednotes.core.federation import State
from fednotes.core.parsing import read_json
from fednotes.core.store import (
    load_state,
    private_folder,
    replace_file,
    restoring,
    save_state,
    sync_folder,
    write_json,
)
from fednotes.engines.wire import HEAD, Frame, Request, WireError, decode_reply, decode_request

KEPT_REPLIES = 2
MOST_BYTES = 2**35  # of requests since the newest state: a server must let a round begin by then
REQUEST, REPLY = ".request", ".reply"


class Journal:
    """One site's folder of one job, whose fingerprint is `job`.

    Raises RefusedError if it holds another job, ModelError if it does not say which,
    FednotesError where it cannot be written.
    """

    def __init__(self, directory: Path, site: str, job: str) -> None:
        self._site, self._job = site, job
        self._states, self._entries = directory / "states", directory / "journal"
        self._run_file = directory / "run.json"
        try:
            for folder in (self._states, self._entries):
                private_folder(folder)
                for cut in folder.glob(".*"):  # a killed process's, half-written
                    shutil.rmtree(cut) if cut.is_dir() else cut.unlink()
        except OSError as error:
            raise _disk_error(directory, error) from error
        self._own(f"{directory.parent.name}/{directory.name}")
        if not self.states:
            self._begin()
        for number in _numbers(self._entries, REPLY) - _numbers(self._entries, REQUEST):
            self._reply(number).unlink()  # killed before the task was complete on disk

    def _begin(self) -> None:
        save_state(self._states / _name(0), {}, {"new": True})

    def _own(self, place: str) -> None:
        """Take an empty folder for this job; refuse what is not this job's."""
        if not self.states and not self._run_file.exists():
            self.run = 0
            return
        try:
            kept = read_json(self._run_file)
            self._run, job = int(kept["run"]), str(kept["job"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"site {self._site!r}: {place}/run.json does not say which job is kept there: "
                f"delete {place}, and the site begins anew"
            ) from error
        if job != self._job:
            raise RefusedError(
                f"site {self._site!r}: {place} holds job {job[:12]}, this is job "
                f"{self._job[:12]}: run it under another name, or delete {place} at the site"
            )

    @property
    def run(self) -> int:
        """The run of the server that the site is in; 0 for none."""
        return self._run

    @run.setter
    def run(self, number: int) -> None:
        write_json(self._run_file, {"job": self._job, "run": number})
        self._run = number

    @property
    def states(self) -> list[int]:
        """Request numbers of the kept states, from the oldest."""
        return sorted(int(p.name) for p in self._states.iterdir() if p.name.isdecimal())

    @property
    def last(self) -> int:
        """The number of the last request that is done and not undone."""
        return max({self.states[-1]} | _numbers(self._entries, REQUEST))

    def nbytes(self) -> int:
        """Of the requests since the newest state."""
        newest = self.states[-1]
        numbers = _numbers(self._entries, REQUEST)
        return sum(self._request(n).stat().st_size for n in numbers if n > newest)

    def add(self, number: int, request: Frame, reply: Frame) -> None:
        """A task that is done. The request is written last: it completes the entry.

        Raises RefusedError where too much would be kept since the newest state.
        """
        if self.nbytes() + len(request) > MOST_BYTES:
            raise RefusedError(
                f"site {self._site!r} keeps {MOST_BYTES:,} bytes of requests of one round at most"
            )
        _write(self._reply(number), reply)
        _write(self._request(number), request)
        for old in sorted(_numbers(self._entries, REPLY))[:-KEPT_REPLIES]:
            self._reply(old).unlink(missing_ok=True)

    def reply(self, request: Request, frame: Frame) -> bytes | None:
        """The stored answer to this request, which is `frame`, if it is whole.

        Raises RefusedError where the run has used the request's number for another one.
        """
        try:
            with self._request(request.number).open("rb") as file:
                head = file.read(HEAD.size)
        except OSError:
            return None
        if head != memoryview(frame)[: HEAD.size]:  # lengths, and SHA-256 of all that follows
            self._require_other_run(request)
            return None
        try:
            stored = self._reply(request.number).read_bytes()
            kept = decode_reply(stored)
        except (OSError, WireError):
            return None
        same = (kept.run, kept.number) == (request.run, request.number)
        return stored if same else None

    def _require_other_run(self, request: Request) -> None:
        number, run = request.number, request.run
        try:
            before = self.request(number)
        except ModelError:
            return  # nothing can be told of it; it is undone, or the site has lost its state
        if before.run == run:
            raise RefusedError(
                f"site {self._site!r}: request {number} of run {run} has come before, and was "
                "another: the server must go on with a new run"
            )

    def request(self, number: int) -> Request:
        """A stored request. Raises ModelError if it is missing or damaged."""
        path = self._request(number)
        try:
            frame = bytearray(path.stat().st_size)  # tensors lie in it, without a copy
            with path.open("rb") as file:
                file.readinto(frame)
            return decode_request(frame)
        except (OSError, WireError) as error:
            raise ModelError(f"{path}: not a readable request ({error})") from error

    def save(
        self, number: int, state: State, told: int, asked: Mapping[str, Any] | None = None
    ) -> None:
        """Keep the site's state after a request. told: the last request that had tensors.
        asked: what led to this state (`question.Asked.kept`)."""
        facts = {"new": False, "round": state.round, "told": told, "facts": dict(state.facts)}
        facts["asked"] = dict(asked or {})
        save_state(self._states / _name(number), state.tensors, facts)

    def load(self, number: int) -> tuple[State | None, int, Mapping[str, Any]]:
        """A kept state (None is a new site's), and `told` and `asked` as they were saved.

        Raises ModelError if it is damaged.
        """
        path = self._states / _name(number)
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
        steps = sorted(n for n in _numbers(self._entries, REQUEST) if start < n <= target)
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
        """The newest kept state that is not after `target`; a new site where there is none."""
        if self.states[0] > target:
            self.damaged(0)
        return max(number for number in self.states if number <= target)

    def undo_to(self, target: int) -> None:
        """Forget all after a request, the newest first, so that a kill leaves no gap."""
        undone = [number for number in self.states if number > target]
        for number in reversed(undone):
            shutil.rmtree(self._states / _name(number), ignore_errors=True)
        if undone:
            sync_folder(self._states)  # before a request that goes on from here is kept
        for number in sorted(_numbers(self._entries, REQUEST), reverse=True):
            if number > target:
                self._request(number).unlink(missing_ok=True)
                self._reply(number).unlink(missing_ok=True)

    def damaged(self, number: int) -> None:
        """Forget what cannot be read at this number, and all after it."""
        self.undo_to(number - 1)
        if not self.states:
            self.undo_to(-1)
            self._begin()

    def forget(self, marks: Collection[int]) -> None:
        """Delete what leads neither to the present nor to a checkpoint of the server's."""
        states, entries = self.states, _numbers(self._entries, REQUEST)
        kept_states, kept = {states[-1]}, {n for n in entries if n > states[-1]}
        for mark in marks:
            start = max((n for n in states if n <= mark), default=None)
            if start is not None:
                kept_states.add(start)
                kept |= {n for n in entries if start < n <= mark}
        kept |= {self._told(number) for number in kept_states}
        for number in entries - kept - {max(entries, default=0)}:
            self._request(number).unlink(missing_ok=True)
            self._reply(number).unlink(missing_ok=True)
        for number in set(states) - kept_states:
            shutil.rmtree(self._states / _name(number), ignore_errors=True)

    def _told(self, number: int) -> int:
        """Of a kept state, without its tensors."""
        try:
            return int(read_json(self._states / _name(number) / "facts.json", strict=False)["told"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def _request(self, number: int) -> Path:
        return self._entries / (_name(number) + REQUEST)

    def _reply(self, number: int) -> Path:
        return self._entries / (_name(number) + REPLY)


def _name(number: int) -> str:
    return f"{number:08d}"


def _numbers(folder: Path, ending: str) -> set[int]:
    return set(_listed(folder, ending))


def _listed(folder: Path, ending: str) -> Iterator[int]:
    for path in folder.iterdir():
        if path.suffix == ending and path.stem.isdecimal():
            yield int(path.stem)


def _write(path: Path, frame: Frame) -> None:
    """The whole frame or nothing, on disk when this returns."""
    try:
        replace_file(path, frame)
    except OSError as error:
        raise _disk_error(path, error) from error


def _disk_error(path: Path, error: OSError) -> FednotesError:
    reason = error.strerror or str(error)
    return FednotesError(f"{path.name}: the site cannot keep what it did ({reason})")
