"""The list of runs: those in a folder, and the facts about each in one row."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fednotes.core.errors import FednotesError
from fednotes.core.parsing import as_mapping, find_number
from fednotes.core.store import is_reserved
from fednotes.jobs.metrics_file import METRICS, read_metrics
from fednotes.jobs.results import SUMMARY, RunResult
from fednotes.jobs.run_folder import (
    JOB_RECORD,
    is_run,
    read_job_record,
    read_result_so_far,
)
from fednotes.jobs.score_layouts import CURVES, SCORES, format_score, is_percent

FINISHED = "finished"
IN_PROGRESS = "in progress"
NOT_FINISHED = "not finished"
UNREADABLE = "cannot be read"

_MAX_RUNS = 500  # runs of a folder that are shown
_MAX_DEPTH = 3  # a run of several seeds is two folders below a folder of runs
_POOLED = "pooled"  # stands for all sites in lines of the pooled condition
# The condition whose score represents a run is the first of these that it has.
_PREFERRED = ("federated", "pooled", "own-mix", "alone")


def find_runs(folder: Path) -> list[Path]:
    """Return the folders of the runs in a folder, sorted.

    The folders within a run, hidden folders and links to folders are left out.
    """
    runs: list[Path] = []
    for place, names, _ in os.walk(folder):
        path = Path(place)
        if is_run(path):
            runs.append(path)
        is_deepest = len(path.relative_to(folder).parts) >= _MAX_DEPTH
        if is_deepest or is_run(path):
            names.clear()
        names[:] = sorted(name for name in names if not name.startswith("."))
        if len(runs) >= _MAX_RUNS:
            break
    return runs


@dataclass(frozen=True)
class RunScore:
    """The score that represents a run.

    Attributes:
        text: The score, in percent unless it is a loss.
        meaning: What it measures, such as "strict F1, federated".
    """

    text: str
    meaning: str


@dataclass(frozen=True)
class RunRow:
    """The facts about a run in the list.

    Attributes:
        name: Its name on the pages.
        folder: Its folder.
        changed: When its results last changed, in local time; None if unknown.
        state: "finished", "in progress", "not finished" or "cannot be read".
        title: The title of its job.
        method: The name of its method.
        sites: The number of sites; None if unknown.
        score: Its main score; None if it has none yet.
        seconds: The duration of its training; None if unknown.
        use: What its verdict recommends; "" without a verdict.
        problem: Why it cannot be read; "" otherwise.
    """

    name: str
    folder: Path
    changed: datetime | None
    state: str
    title: str = ""
    method: str = ""
    sites: int | None = None
    score: RunScore | None = None
    seconds: float | None = None
    use: str = ""
    problem: str = ""

    @property
    def sort_key(self) -> float:
        """The time of the last change, in seconds; runs of unknown time come last."""
        return self.changed.timestamp() if self.changed else 0.0


def describe_run(name: str, folder: Path) -> RunRow:
    """Return the row of a run; the row of a damaged run says why it is unreadable."""
    try:
        return _describe_readable(name, folder)
    except FednotesError as error:
        return RunRow(
            name, folder, _find_last_change(folder), UNREADABLE, problem=str(error)
        )


def _describe_readable(name: str, folder: Path) -> RunRow:
    """Return the row of a run; raise FednotesError if the run is damaged."""
    result = read_result_so_far(folder)
    has_ended = has_finished(folder)
    if has_ended:
        sites = len(result.sites) or None
        score = _find_final_score(result)
        seconds = result.seconds
    else:
        lines = read_metrics(folder)
        sites = _count_sites(folder, lines)
        score = _find_latest_score(lines)
        seconds = _sum_time(lines)
    verdict = result.verdict()
    return RunRow(
        name,
        folder,
        _find_last_change(folder),
        find_state(folder),
        title=result.title,
        method=result.method,
        sites=sites,
        score=score,
        seconds=seconds,
        use=verdict.use if verdict else "",
    )


def has_finished(folder: Path) -> bool:
    """Return whether a run has ended with a result."""
    return (folder / SUMMARY).is_file()


def find_state(folder: Path) -> str:
    """Return the state of a run in words."""
    if has_finished(folder):
        return FINISHED
    return IN_PROGRESS if is_reserved(folder) else NOT_FINISHED


def _find_last_change(folder: Path) -> datetime | None:
    """Return when a run's newest result file was written, in local time."""
    for name in (SUMMARY, METRICS, JOB_RECORD):
        path = folder / name
        if path.is_file():
            return datetime.fromtimestamp(path.stat().st_mtime).astimezone()
    return None


def _find_final_score(result: RunResult) -> RunScore | None:
    """Return the mean over the sites of the first score that a result has."""
    for kind, layout in SCORES.items():
        if layout.dots is None or not layout.dots.tile:
            continue
        for condition in _PREFERRED:
            value = find_number(result.mean, condition, kind, layout.dots.measure)
            if value is not None:
                text = _format_value(value, layout.dots.measure)
                return RunScore(text, f"test {layout.dots.tile}, {condition}")
    return None


def _format_value(value: float, measure: str) -> str:
    """Return a score with its unit."""
    unit = " %" if is_percent(measure) else ""
    return f"{format_score(value, measure)}{unit}"


def _find_latest_score(lines: Sequence[Mapping[str, Any]]) -> RunScore | None:
    """Return the newest validation score of an unfinished run."""
    for line in reversed(lines):
        for key, curve in CURVES.items():
            value = find_number(line, key)
            if value is not None:
                condition = line.get("condition", "federated")
                short = curve.short.removesuffix(" in %")
                meaning = f"validation {short}, {condition}, in round"
                text = _format_value(value, key)
                # Pages count rounds from 1, and the lines from 0.
                place = (find_number(line, "round") or 0) + 1
                return RunScore(text, f"{meaning} {place:.0f}")
    return None


def _count_sites(folder: Path, lines: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the number of sites of an unfinished run, as far as it is known."""
    names = {*as_mapping(read_job_record(folder).get("notes"))}
    for line in lines:
        names.update(as_mapping(line.get("sites")))
    return len(names - {_POOLED}) or None


def _sum_time(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the seconds that the parts of an unfinished run have taken so far."""
    newest = {str(line.get("part", "")): find_number(line, "seconds") for line in lines}
    known = [seconds for seconds in newest.values() if seconds is not None]
    return sum(known) if known else None
