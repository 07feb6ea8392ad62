"""Grids in place of the real ones, whose runs are made up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fednotes.apps.experiments import reproduce as module
from fednotes.apps.experiments.grids import GridRun
from fednotes.apps.experiments.planning import Rehearsal
from fednotes.core.store import write_json
from fednotes.jobs.job import Job


class Tiny:
    """The one grid "FOLDER-tiny"; `summary` makes a run's, `asked` are those that ran."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place, self._patch = place, monkeypatch
        self.asked: list[GridRun] = []
        self.summary: Callable[[GridRun], dict[str, Any]] = lambda run: {}
        # why a rehearsal refuses a job
        self.refused: Callable[[Job], str] = lambda job: ""
        monkeypatch.setattr(module, "_run", self._run)
        monkeypatch.setattr(Rehearsal, "_why", lambda rehearsal, job: self.refused(job))

    def _run(self, run: GridRun) -> str:
        if not run.done:
            self.asked.append(run)
        spent = {"seconds": 1.0, "bytes_up": 0, "bytes_down": 0}
        write_json(run.folder / "summary.json", spent | self.summary(run))
        return run.row.label

    def write(self, text: str, folder: str = "fedner") -> None:
        """Put a grid in place of the one before."""
        self.name, path = f"{folder}-tiny", self.place / folder / "tiny.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        self._patch.setattr(module, "grids", lambda: {self.name: path})

    def table(self, text: str = "", **options: Any) -> dict[str, Any]:
        """What `reproduce` makes of a grid."""
        if text:
            self.write(text)
        return module.reproduce(
            self.name, self.place / "out", **{"workers": 1} | options
        )

    def lines(self, name: str = "") -> list[str]:
        """The page of results."""
        path = self.place / "out" / (name or self.name) / "results.md"
        return path.read_text(encoding="utf-8").splitlines()

    def cells(self) -> list[list[str]]:
        """The rows of all its tables."""
        rows = [line[1:-1].split("|") for line in self.lines() if line.startswith("| ")]
        return [[cell.strip() for cell in row] for row in rows]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    monkeypatch.setenv("FEDNOTES_CORPORA", str(tmp_path / "corpora"))
    return Tiny(tmp_path, monkeypatch)
