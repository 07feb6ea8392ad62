"""The table of `tools/joins.py`, computed from fabricated runs; no model is trained."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joins
import pytest

from fednotes.core.store import write_json
from fednotes.jobs.job_file import load_job

# recall, mentions, predictions of each site and type
COUNTS = {"problem": (0.5, 10, 10), "test": (0.25, 8, 0), "treatment": (1.0, 4, 6)}


def scores(types: Any, more: float) -> dict[str, Any]:
    counts = {name: COUNTS[name] for name in types}
    by_type = {
        name: {
            "strict": {"recall": recall * more},
            "support": support,
            "predicted": predicted,
        }
        for name, (recall, support, predicted) in counts.items()
    }
    return {"federated": {"by_type": by_type}}


@pytest.fixture
def commands_run(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands. A later run finds half as many mentions as the others."""
    commands: list[list[str]] = []

    def call(command: list[str], **options: Any) -> int:
        commands.append(command)
        started_job = load_job(command[4])
        more = 0.5 if "later" in command[4] else 1.0
        sites = {
            name: scores(site.types, more) for name, site in started_job.sites.items()
        }
        write_json(Path(command[6]) / "summary.json", {"sites": sites})
        return 0

    monkeypatch.setattr(joins, "run_child_process", call)
    monkeypatch.setenv("FEDNOTES_CORPORA", "corpora")
    return commands


def test_the_table_equals_counts_by_hand_and_finished_runs_are_skipped(
    commands_run: list[list[str]], tmp_path: Path, capsys: Any
) -> None:
    """By hand: of "problem" and "test" 5 + 2 of 18 mentions are right and 10 predicted,
    so F1 is 14 / 28; with "treatment" 11 of 22, 16 predicted, 22 / 38; "treatment"
    alone 8 / 10."""
    words = [
        str(tmp_path),
        "--seeds",
        "1",
        "2",
        "--set",
        "training.cycles=3",
        "--later",
        "seed=1",
    ]
    joins.main(words)
    output = capsys.readouterr().out
    rows = [
        re.findall(r"[\d.]+|–", line.partition("|")[2])
        for line in output.splitlines()[2:6]
    ]
    assert [[cell for cell in row if cell != "0.0"] for row in rows] == [
        ["57.9", "28.9", "57.9"],
        ["–", "28.9", "57.9"],
        ["50.0", "25.0", "50.0"],
        ["–", "40.0", "80.0"],
    ]
    assert "± 0.0" in output
    assert "Seeds 1, 2." in output
    assert len(commands_run) == 10
    joins.main(words)
    assert len(commands_run) == 10
    joins.main([*words, "--set", "training.cycles=4"])
    assert len(commands_run) == 20
    assert ["--resume" in command for command in commands_run] == [False] * 20


def test_runs_with_different_test_notes_are_not_compared(
    commands_run: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    f1_of: Callable[..., Any] = joins.f1
    counted = iter(range(100))
    monkeypatch.setattr(
        joins, "f1", lambda *arguments: (f1_of(*arguments)[0], next(counted))
    )
    with pytest.raises(SystemExit, match="have different test notes"):
        joins.main([str(tmp_path), "--seeds", "1"])
    monkeypatch.setattr(joins, "run_child_process", lambda command, **options: 1)
    with pytest.raises(SystemExit, match=r"failed: see the end of .*\.log"):
        joins.main([str(tmp_path), "--seeds", "7"])


def test_later_runs_start_from_the_saved_model_whatever_the_encoder(
    commands_run: list[list[str]], tmp_path: Path
) -> None:
    joins.main([str(tmp_path), "--seeds", "1", "--set", "model.encoder=other"])
    later = [command for command in commands_run if "later" in Path(command[4]).name]
    others = [command for command in commands_run if command not in later]
    assert len(later) == 2
    assert not any("model.encoder=other" in command for command in later)
    assert all("model.encoder=other" in command for command in others)
    encoders = {load_job(command[4]).config.model.encoder for command in later}
    folders = {str((Path(c[6]) / "federated/model").resolve()) for c in others}
    assert encoders < folders
