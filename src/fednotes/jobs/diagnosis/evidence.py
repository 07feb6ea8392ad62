"""Read from the folder of a run what a diagnosis needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fednotes.core.parsing import as_mapping, find_number, read_json_table
from fednotes.jobs.declaration import add_placeholders, parse_declared
from fednotes.jobs.job import Job
from fednotes.jobs.job_file import load_recorded_job, parse_job
from fednotes.jobs.metrics_file import read_metrics
from fednotes.jobs.results import SUMMARY, Outcome, RunResult, read_result
from fednotes.jobs.run_folder import (
    FAILURE,
    JOB_RECORD,
    read_job_record,
    read_part_outcome,
)

State = Literal["finished", "failed", "unfinished"]
Entry = Mapping[str, Any]
# Measures by which models are chosen, and the sign with which larger is better.
_MEASURES = {"valid_f1": 1, "valid_loss": -1}


@dataclass(frozen=True)
class Curve:
    """The evaluations of one part of a run that report the same measure.

    A method that trains in stages has a curve for each stage.

    Attributes:
        part: Name of the part, such as "alone/mercy".
        condition: Its condition.
        measure: What sites evaluate, such as "valid_f1"; "" if they evaluate nothing.
        entries: The lines of metrics.jsonl, in order.
    """

    part: str
    condition: str
    measure: str
    entries: tuple[Entry, ...]

    @property
    def scores(self) -> list[float]:
        """The values of the measure; larger is better."""
        sign = _MEASURES.get(self.measure, 1)
        return [sign * value for value in self._read_values(self.measure)]

    @property
    def losses(self) -> list[float]:
        """The training loss of the last round before each evaluation."""
        return self._read_values("loss")

    def _read_values(self, name: str) -> list[float]:
        """Return the numbers that the entries have under a name, in order."""
        values = (find_number(entry, name) for entry in self.entries)
        return [value for value in values if value is not None]


@dataclass(frozen=True)
class RunEvidence:
    """What the folder of a run holds.

    Attributes:
        folder: The folder.
        state: Whether the run has ended, failed or may be resumed.
        is_deployed: Whether it was a run between real sites, which record less.
        job: Its job, whose notes are not read.
        result: Its summary, as far as there is one.
        scores: Site → condition → scores on the site's test data.
        facts: Counts of each site's data; empty for runs that did not record them.
        entries: The lines of metrics.jsonl.
        failure: Why training ended early; empty if it did not.
        command: The command that made a simulation; "" if it is not known.
    """

    folder: Path
    state: State
    is_deployed: bool
    job: Job
    result: RunResult
    scores: Mapping[str, Mapping[str, Any]]
    facts: Mapping[str, Mapping[str, Any]]
    entries: Sequence[Entry]
    failure: Mapping[str, Any]
    command: str

    @property
    def curves(self) -> list[Curve]:
        """The learning curves of all parts, the federated ones first."""
        by_part: dict[str, list[Entry]] = {}
        for entry in self.entries:
            by_part.setdefault(str(entry.get("part", "")), []).append(entry)
        curves = [
            curve
            for part, entries in by_part.items()
            for curve in _split_stages(part, entries)
        ]
        return sorted(curves, key=lambda curve: curve.condition != "federated")


def read_run_evidence(folder: Path) -> RunEvidence:
    """Return what the folder of a run holds.

    Args:
        folder: Folder of a simulated run, or of a run between real sites.

    Raises:
        ConfigError: The folder is not that of a run, or its job cannot be read.
        DataError: A file of the run is damaged.
    """
    has_summary = (folder / SUMMARY).is_file()
    has_record = (folder / JOB_RECORD).is_file()
    result = read_result(folder) if has_summary else RunResult()
    record = read_job_record(folder) if has_record or not has_summary else {}
    failure = read_json_table(folder / FAILURE)
    state: State = "finished"
    if not has_summary:
        state = "failed" if failure else "unfinished"
    return RunEvidence(
        folder=folder,
        state=state,
        is_deployed=bool(result.run) or (bool(record) and "table" not in record),
        job=_read_job(folder, record, result),
        result=result,
        scores=result.sites if has_summary else _read_scores(folder),
        facts={
            site: as_mapping(each)
            for site, each in as_mapping(record.get("data")).items()
        },
        entries=read_metrics(folder),
        failure=failure,
        command=result.command or str(record.get("command") or ""),
    )


def _read_job(folder: Path, record: Mapping[str, Any], result: RunResult) -> Job:
    """Return the job of a run from its record, or from its summary."""
    if "table" in record:
        return load_recorded_job(folder)
    if record:  # a declaration, as real sites receive it
        return parse_declared(record, folder, str(folder / JOB_RECORD))
    table = add_placeholders(result.config)
    return parse_job(table, result.title or "job", folder, str(folder / SUMMARY))


def _read_scores(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the scores of the finished parts of a run that has not ended."""
    scores: dict[str, dict[str, Any]] = {}
    for done in sorted((*folder.glob("*/done.json"), *folder.glob("*/*/done.json"))):
        outcome = read_part_outcome(done, Outcome)
        if outcome is not None:
            condition = done.relative_to(folder).parts[0]
            for site, of_site in outcome.scores.items():
                scores.setdefault(site, {})[condition] = of_site
    return scores


def _split_stages(part: str, entries: Sequence[Entry]) -> Iterator[Curve]:
    """Yield a curve for each group of consecutive entries with the same measure."""
    stage: list[Entry] = []
    measure = ""
    for entry in entries:
        of_entry = next((name for name in _MEASURES if name in entry), "")
        if stage and of_entry != measure:
            yield _make_curve(part, measure, stage)
            stage = []
        measure = of_entry
        stage.append(entry)
    if stage:
        yield _make_curve(part, measure, stage)


def _make_curve(part: str, measure: str, entries: Sequence[Entry]) -> Curve:
    """Return the curve of entries that belong to one condition."""
    condition = str(entries[0].get("condition", part))
    return Curve(part, condition, measure, tuple(entries))
