"""Which questions a site has helped to open a sum of, and over which sites.

One line a question, its digest in hexadecimal and the survivors' names as JSON, in a file that is
only appended to; on disk before the answer that opens a sum leaves. A line "lost" says that the
site's own files were damaged: what stands before it is forgotten.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from fednotes.core.errors import FednotesError, RefusedError
from fednotes.core.parsing import parse_json

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
