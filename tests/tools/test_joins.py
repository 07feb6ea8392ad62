"""The table of `tools/joins.py`, of runs that are made up; no model is trained."""

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
    told = {name: COUNTS[name] for name in types}
    by_type = {
        name: {
            "strict": {"recall": recall * more},
            "support": support,
            "predicted": predicted,
        }
        for name, (recall, support, predicted) in told.items()
    }
    return {"federated": {"by_type": by_type}}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands. A later run finds half as many mentions as the others."""
    found: list[list[str]] = []

    def call(command: list[str], **options: Any) -> int:
        found.append(command)
        made = load_job(command[4])
        more = 0.5 if "later" in command[4] else 1.0
        sites = {name: scores(site.types, more) for name, site in made.sites.items()}
        write_json(Path(command[6]) / "summary.json", {"sites": sites})
        return 0

    monkeypatch.setattr(joins, "call", call)
    monkeypatch.setenv("FEDNOTES_CORPORA", "corpora")
    return found


def test_the_table_and_what_is_not_run_again(
    asked: list[list[str]], tmp_path: Path, capsys: Any
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
    shown = capsys.readouterr().out
    rows = [
        re.findall(r"[\d.]+|–", line.partition("|")[2])
        for line in shown.splitlines()[2:6]
    ]
    assert [[cell for cell in row if cell != "0.0"] for row in rows] == [
        ["57.9", "28.9", "57.9"],
        ["–", "28.9", "57.9"],
        ["50.0", "25.0", "50.0"],
        ["–", "40.0", "80.0"],
    ]
    assert "± 0.0" in shown
    assert "Seeds 1, 2." in shown
    assert len(asked) == 10
    joins.main(words)
    assert len(asked) == 10
    joins.main([*words, "--set", "training.cycles=4"])
    assert len(asked) == 20
    assert ["--resume" in command for command in asked] == [False] * 20


def test_other_test_notes_are_no_comparison(
    asked: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: Callable[..., Any] = joins.f1
    counted = iter(range(100))
    monkeypatch.setattr(joins, "f1", lambda *given: (told(*given)[0], next(counted)))
    with pytest.raises(SystemExit, match="judged by different test notes"):
        joins.main([str(tmp_path), "--seeds", "1"])
    monkeypatch.setattr(joins, "call", lambda command, **options: 1)
    with pytest.raises(SystemExit, match=r"failed; its last words are in .*\.log"):
        joins.main([str(tmp_path), "--seeds", "7"])


def test_later_runs_start_from_what_was_saved_with_any_encoder(
    asked: list[list[str]], tmp_path: Path
) -> None:
    joins.main([str(tmp_path), "--seeds", "1", "--set", "model.encoder=other"])
    later = [command for command in asked if "later" in Path(command[4]).name]
    others = [command for command in asked if command not in later]
    assert len(later) == 2
    assert not any("model.encoder=other" in command for command in later)
    assert all("model.encoder=other" in command for command in others)
    encoders = {load_job(command[4]).config.model.encoder for command in later}
    folders = {str((Path(c[6]) / "federated/model").resolve()) for c in others}
    assert encoders < folders
