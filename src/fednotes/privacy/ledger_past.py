"""What left a site under one job, read from its ledger while it grows."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from fednotes.privacy.ledger import TensorFacts, parsed

KEPT = 8  # the newest messages with an answer; a server repeats no older request


class Past:
    """The lines of one job. `read` goes on from where it was; only whole lines are read.

    Whether a line is as it was written is for `ledger_check.verify` to judge.
    """

    def __init__(self, path: Path, job: str) -> None:
        self._path, self._mark = path, f'"job":"{job}"'.encode("ascii")
        self._offset = 0
        self._updates: dict[str, dict[str, str]] = {}  # task → an update's hash → when last
        self._answers: dict[str, dict[str, Any]] = {}  # a message's hash → its line

    def read(self) -> None:
        """Take in what was appended. Raises OSError."""
        if not self._path.exists() or self._path.stat().st_size < self._offset:
            self._offset = 0  # a new ledger was begun
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

    def _take(self, line: dict[str, Any]) -> None:
        if line["refusal"] or line["task"].startswith("@"):
            return
        if line["update"]:
            self._updates.setdefault(line["task"], {})[line["update"]] = line["time"]
        self._answers.pop(line["sha256"], None)
        self._answers[line["sha256"]] = line
        for old in list(self._answers)[:-KEPT]:
            del self._answers[old]

    def updates(self, task: str, since: str = "") -> frozenset[str]:
        """Hashes of the different updates of a task that left. since: a `stamp`."""
        own = self._updates.get(task, {})
        return frozenset(update for update, when in own.items() if when >= since)

    def answer(self, sha256: str) -> dict[str, Any] | None:
        """The line of one of the newest messages, by the message's hash."""
        return self._answers.get(sha256)


def tensors_of(line: dict[str, Any]) -> tuple[TensorFacts, ...]:
    """The facts of a line's tensors."""
    return tuple(TensorFacts(**{**t, "shape": tuple(t["shape"])}) for t in line["tensors"])
