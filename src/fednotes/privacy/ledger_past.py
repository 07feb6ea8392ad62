"""What left a site under one job, read from its ledger while it grows."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from fednotes.privacy.ledger import TensorFacts, parsed

KEPT = 8  # the newest messages with an answer; a server repeats no older request


class Past:
    """The lines of one job. `read` goes on from where it was; only whole lines are read.

    newest: the latest time stamp of those that are counted; "" for none. Whether a line is as it
    was written is for `ledger_check.verify` to judge.
    """

    def __init__(self, path: Path, job: str) -> None:
        self._path, self._mark = path, f'"job":"{job}"'.encode("ascii")
        self._offset, self._since, self.newest = 0, "", ""
        self._updates: dict[str, set[str]] = {}  # task → hashes of updates
        self._answers: dict[str, dict[str, Any]] = {}  # a message's hash → its line

    def read(self, since: str = "") -> None:
        """Take in what was appended. since: count from the line after the one of this hash on;
        all lines where there is none. Raises OSError."""
        begun = not self._path.exists() or self._path.stat().st_size < self._offset
        if begun or since != self._since:  # a new ledger, or a new approval
            self._offset, self._since, self.newest = 0, since, ""
            self._updates, self._answers = {}, {}
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for raw in file:
                if not raw.endswith(b"\n"):
                    break
                self._offset += len(raw)
                if self._mark in raw and (line := parsed(raw)) is not None:
                    with suppress(KeyError, TypeError, AttributeError):  # edited by hand
                        self._take(line)
                if raw[-67:-3] == self._since.encode():
                    self._updates, self.newest = {}, ""

    def _take(self, line: dict[str, Any]) -> None:
        self.newest = max(self.newest, line["time"])
        if line["refusal"] or line["task"].startswith("@"):
            return
        if line["update"]:
            self._updates.setdefault(line["task"], set()).add(line["update"])
        self._answers.pop(line["sha256"], None)
        self._answers[line["sha256"]] = line
        for old in list(self._answers)[:-KEPT]:
            del self._answers[old]

    def updates(self, task: str) -> frozenset[str]:
        """Hashes of the different updates of a task that left."""
        return frozenset(self._updates.get(task, ()))

    def answer(self, sha256: str) -> dict[str, Any] | None:
        """The line of one of the newest messages, by the message's hash."""
        return self._answers.get(sha256)


def tensors_of(line: dict[str, Any]) -> tuple[TensorFacts, ...]:
    """The facts of a line's tensors."""
    return tuple(TensorFacts(**{**t, "shape": tuple(t["shape"])}) for t in line["tensors"])
