"""What a site was asked, as one digest: under a secure sum only equal questions are added.

A server that lies could ask each site for something else under one name, so that the others'
parts of the sum are nothing or known, and the sum is one site's update. So the digest of the
question is part of what the masks are made for (`secure_site`), and sites show each other by
receipts that they were asked the same.

Which questions a site has helped to open a sum of, and over which sites.

One line a question, its digest in hexadecimal and the survivors' names as JSON, in a file that is
only appended to; on disk before the answer that opens a sum leaves. A line "lost" says that the
site's own files were damaged: what stands before it is forgotten.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fednotes.core.errors import FednotesError, RefusedError
from fednotes.core.parsing import parse_json
from fednotes.core.tensors import fingerprint
from fednotes.core.update import Tensors
from fednotes.engines.wire import Request
from fednotes.privacy.secure_sum.masks import digest


@dataclass(frozen=True)
class Asked:
    """What led to a site's newest update, as digests of 32 bytes; b"" for nothing.

    prepared: all tasks before the first round, in their order. history: all tasks that are in
    the site's state, in theirs. trained: whether one of a round is among them. told: the tensors
    that came last. given: those that the present round's tasks compute with. question: the
    newest task with all of these, its options and its round.
    """

    prepared: bytes = b""
    history: bytes = b""
    trained: bool = False
    told: bytes = b""
    given: bytes = b""
    question: bytes = b""

    def next(self, request: Request, tensors: Tensors, *, strict: bool) -> Asked:
        """With one task more. tensors: what the site's task is given, also from memory.

        A task before the first round is the same whenever a site does it; what it changes at
        the site stays, so it is part of every later question. strict: all sites are in every
        sum, so all have one history, and that is part of the question too: a server that has
        one site go back, or do what the others did not, gets no sum with it any more.
        """
        told = fingerprint(tensors) if tensors else self.told
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
        """From what was kept. Raises ValueError, KeyError, TypeError for anything else."""
        prepared, history = (bytes.fromhex(kept[name]) for name in ("prepared", "history"))
        return cls(prepared, history, bool(kept["trained"]))


def after(question: bytes) -> bytes:
    """The history that ends with a question."""
    return digest("history", question)


def of_call(task: str, tensors: Tensors, options: object) -> bytes:
    """The question of a call in this process, where all sites are told the same."""
    return digest("question", task, repr(options), fingerprint(tensors))


OPENED = "opened"  # in a site's folder of a job
LOST = "lost\n"


class Opened:
    """The questions of one job at one site. path: None keeps them in memory alone.

    Raises FednotesError where the file cannot be read.
    """

    def __init__(self, site: str, path: Path | None) -> None:
        self._site, self._path = site, path
        self._survivors: dict[bytes, tuple[str, ...]] = {}
        self.lost = False  # since then nothing was opened
        try:
            text = path.read_text(encoding="utf-8") if path is not None and path.exists() else ""
        except (OSError, ValueError) as error:
            raise self._unusable(error) from error
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
        """Pass the sum of a question that may be opened: of two over different sites, the
        difference is some sites' part. Raises RefusedError."""
        before = self._survivors.get(question)
        if before is not None and set(before) != set(survivors):
            raise RefusedError(
                f"site {self._site!r}: a sum of this very task was opened before, over the sites "
                f"{', '.join(before)}; it is not opened over others"
            )

    def add(self, question: bytes, survivors: Sequence[str]) -> None:
        """Note a sum that is being opened. Raises what `require` does, FednotesError of a disk."""
        self.require(question, survivors)
        if question in self._survivors:
            return
        names = json.dumps(list(survivors), separators=(",", ":"))
        self._append(f"{question.hex()} {names}\n")
        self._survivors[question], self.lost = tuple(survivors), False

    def lose(self) -> None:
        """Forget all: the site's own files were damaged. Raises FednotesError of a disk."""
        self._append(LOST)
        self._survivors, self.lost = {}, True

    def __len__(self) -> int:
        return len(self._survivors)

    def _append(self, line: str) -> None:
        if self._path is None:
            return
        try:
            made = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(made, "ab") as file:  # which begins at the end
                # Never behind the cut end of another line.
                file.write(("\n" * bool(file.tell()) + line).encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> FednotesError:
        reason = getattr(error, "strerror", None) or str(error)
        return FednotesError(f"{self._path}: the site cannot keep what it opened ({reason})")
