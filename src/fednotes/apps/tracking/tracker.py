"""The events of a run, passed on to a tracking tool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from fednotes.apps.tracking.facts import (
    FinalScores,
    Point,
    RunFacts,
    list_final_scores,
    list_points,
    read_run_facts,
    write_artifacts,
)
from fednotes.engines.rounds import RoundResult
from fednotes.jobs.metrics_file import read_metrics
from fednotes.jobs.parts import Part
from fednotes.jobs.progress import ProgressListener
from fednotes.jobs.results import SUMMARY, read_result
from fednotes.jobs.simulate import describe_evaluation


class Tool(Protocol):
    """A tracking tool. A run is opened, written and closed."""

    def open(self, facts: RunFacts) -> None:
        """Begin a run."""

    def add_points(self, points: Sequence[Point]) -> None:
        """Add to the curves of the run."""

    def add_scores(self, scores: Sequence[FinalScores]) -> None:
        """Add the scores of the run that has ended."""

    def add_files(self, files: Sequence[Path]) -> None:
        """Add files, such as the report."""

    def close(self, *, is_finished: bool) -> None:
        """End the run; `is_finished` tells whether it came to its end."""


class Tracker(ProgressListener):
    """Writes a run to a tracking tool.

    Args:
        tool: The tool.
    """

    def __init__(self, tool: Tool) -> None:
        self._tool = tool
        self._part: Part | None = None
        self._is_open = False
        self._logged: set[tuple[str, int]] = set()  # part and round

    def start(self, folder: Path) -> None:
        """Begin a run, with the curves of a run that resumes."""
        self._logged.clear()
        self._tool.open(read_run_facts(folder))
        self._is_open = True
        for entry in read_metrics(folder):
            self._add_entry(entry)

    def begin(self, part: Part, rounds: int, examples: int) -> None:
        """Remember the part whose rounds follow."""
        del rounds, examples
        self._part = part

    def round(self, result: RoundResult) -> None:
        """Add an evaluation to the curves."""
        if not self._is_open or self._part is None or not self._part.is_logged:
            return
        if result.evaluated:
            self._add_entry(describe_evaluation(result, self._part))

    def finish(self, folder: Path) -> None:
        """Add scores and files, and end the run."""
        if not self._is_open:
            return
        is_finished = (folder / SUMMARY).is_file()
        if is_finished:
            self._tool.add_scores(list(list_final_scores(read_result(folder))))
        with TemporaryDirectory() as out:
            self._tool.add_files(write_artifacts(folder, Path(out)))
        self._close(is_finished=is_finished)

    def fail(self) -> None:
        """End the run, which did not come to its end."""
        if self._is_open:
            self._close(is_finished=False)

    def _close(self, *, is_finished: bool) -> None:
        """End the tool's run."""
        self._is_open = False
        self._tool.close(is_finished=is_finished)

    def _add_entry(self, entry: Mapping[str, Any]) -> None:
        """Add the points of an evaluation, unless the tool has them already."""
        points = list(list_points(entry))
        if not points:
            return
        key = (str(entry.get("part")), points[0].round)
        if key not in self._logged:
            self._logged.add(key)
            self._tool.add_points(points)
