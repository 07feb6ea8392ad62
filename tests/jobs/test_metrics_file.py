"""The file of a run's evaluations: its bounds, and a run that was killed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fednotes.core.errors import DataError, TrainingError
from fednotes.jobs.metrics_file import (
    METRICS,
    append_entry,
    read_metrics,
    rewind_metrics,
)
from fednotes.jobs.results import read_result


def line(part: str, round: int) -> str:
    return json.dumps({"part": part, "round": round}) + "\n"


def test_an_incomplete_last_line_is_left_out(tmp_path: Path) -> None:
    """The run was killed while it wrote this line."""
    path = tmp_path / METRICS
    path.write_text(line("federated", 0) + "\n" + line("federated", 1)[:9])
    assert read_metrics(tmp_path) == [{"part": "federated", "round": 0}]
    path.write_text(line("federated", 0)[:9] + "\n" + line("federated", 1))
    with pytest.raises(DataError, match=r"metrics\.jsonl:1: not JSON"):
        read_metrics(tmp_path)


def test_an_entry_is_not_appended_to_the_target_of_a_link(tmp_path: Path) -> None:
    """Another user of the machine may have put it there."""
    target = tmp_path / "precious"
    target.write_text("text")
    (tmp_path / METRICS).symlink_to(target)
    with pytest.raises(TrainingError, match="cannot be written"):
        append_entry(tmp_path / METRICS, {"part": "federated", "round": 0})
    assert target.read_text() == "text"


def test_a_run_without_metrics_has_no_entries(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    assert rewind_metrics(tmp_path / METRICS, "federated", 1) == []
    assert (tmp_path / METRICS).read_text() == ""


def test_rewinding_removes_later_rounds_of_one_part_and_broken_lines(
    tmp_path: Path,
) -> None:
    path = tmp_path / METRICS
    lines = [line("alone/a", 3), line("federated", 0), line("federated", 1)]
    path.write_text("".join(lines) + "[]\n{}\n" + line("federated", 2)[:9])
    remaining = [{"part": "alone/a", "round": 3}, {"part": "federated", "round": 0}]
    assert rewind_metrics(path, "federated", 1) == remaining
    assert path.read_text() == "".join(lines[:2])


def test_a_huge_file_of_metrics_is_refused_before_it_is_read_whole(
    tmp_path: Path,
) -> None:
    (tmp_path / "summary.json").write_text("{}")
    with (tmp_path / "metrics.jsonl").open("wb") as file:
        file.truncate(2**33)  # sparse: takes no room on the disk
    with pytest.raises(DataError, match="over 67,108,864 bytes"):
        read_metrics(tmp_path)


@pytest.mark.parametrize(
    "line", ["{}", '{"round":1,"sites":{"a":{"f1":0.5}}}', "[" * 50]
)
def test_metrics_of_too_many_values_are_refused_before_they_are_parsed(
    line: str, tmp_path: Path
) -> None:
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n" * 2_200_000)
    with pytest.raises(
        DataError, match=r"over 67,108,864 bytes|more than 2,097,152 values"
    ):
        read_metrics(tmp_path)


def test_rewinding_refuses_a_huge_file_of_metrics(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        file.truncate(2**33)  # sparse: takes no room on the disk
    with pytest.raises(DataError, match="over 67,108,864 bytes"):
        rewind_metrics(path, "federated", 1)


def test_rewinding_metrics_does_not_wait_for_a_fifo(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    with pytest.raises(DataError, match="cannot be read"):
        rewind_metrics(path, "federated", 1)


def test_a_run_that_has_not_ended_is_told_from_another_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="give the folder of a run that has ended"):
        read_result(tmp_path)
    (tmp_path / METRICS).write_text(line("federated", 0))
    with pytest.raises(DataError, match="the run has not ended, so it has no summary"):
        read_result(tmp_path)
