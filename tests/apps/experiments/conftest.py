"""An experiment in place of the real ones, whose runs are made up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fednotes.apps.experiments import grids, work
from fednotes.apps.experiments.grid_runs import GridRun
from fednotes.apps.experiments.planning import Rehearsal
from fednotes.apps.experiments.reproduce import reproduce
from fednotes.core.store import write_json
from fednotes.jobs.job import Job


class Tiny:
    """The only experiment, "FOLDER-tiny".

    Args:
        place: The folder of its files.
        monkeypatch: Replaces what carries out and rehearses runs.
        rehearses: Whether its runs are rehearsed as those of real experiments; if not,
            `refusal` decides.

    Attributes:
        place: The folder of its files.
        executed: The runs that were carried out.
        summary: Makes the summary of a run.
        refusal: Returns why a rehearsal refuses a job; "" if it does not.
    """

    def __init__(
        self, place: Path, monkeypatch: pytest.MonkeyPatch, *, rehearses: bool = False
    ) -> None:
        self.place = place
        self._patch = monkeypatch
        self.executed: list[GridRun] = []
        self.summary: Callable[[GridRun], dict[str, Any]] = lambda run: {}
        self.refusal: Callable[[Job], str] = lambda job: ""
        monkeypatch.setattr(work, "run_command", self._execute)
        if not rehearses:
            monkeypatch.setattr(
                Rehearsal, "try_job", lambda rehearsal, job: self.refusal(job)
            )

    def _execute(self, run: GridRun) -> None:
        if not run.is_done():
            self.executed.append(run)
        costs = {"seconds": 1.0, "bytes_up": 0, "bytes_down": 0}
        write_json(run.folder / "summary.json", costs | self.summary(run))

    def write(self, text: str, folder: str = "fedner") -> None:
        """Put a grid in place of the one before."""
        self.name = f"{folder}-tiny"
        path = self.place / folder / "tiny.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        self._patch.setattr(grids, "list_grid_files", lambda: {self.name: path})

    def table(self, text: str = "", **options: Any) -> dict[str, Any]:
        """Return the table that `reproduce` makes of a grid, or of the one before."""
        if text:
            self.write(text)
        return reproduce(self.name, self.place / "out", **{"workers": 1} | options)

    def lines(self, name: str = "") -> list[str]:
        """Return the lines of the page of results."""
        path = self.place / "out" / (name or self.name) / "results.md"
        return path.read_text(encoding="utf-8").splitlines()

    def cells(self) -> list[list[str]]:
        """Return the rows of all tables of the page."""
        rows = [line[1:-1].split("|") for line in self.lines() if line.startswith("| ")]
        return [[cell.strip() for cell in row] for row in rows]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    monkeypatch.setenv("FEDNOTES_CORPORA", str(tmp_path / "corpora"))
    return Tiny(tmp_path, monkeypatch)


@pytest.fixture
def rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """Return the experiment whose runs are rehearsed before the first one starts."""
    return Tiny(tmp_path, monkeypatch, rehearses=True)
