"""Grids whose rows start from models of other runs, and tables with columns of their own."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from fednotes.core.errors import ConfigError
from fednotes.core.store import write_json
from fednotes.experiments import reproduce as module
from fednotes.experiments.grids import GridRun
from fednotes.experiments.reproduce import grids, load_grid, reproduce
from fednotes.experiments.tables import column, plot

GRID = """\
title = "Tiny"
base = "maccrobat"
columns = ["micro strict precision", "micro strict f1", "MB up", "s"]
against = "one place"
[budget]
seeds = [1, 2]
set = ["sites.*.max_sentences=50"]
[full]
seeds = [1]
[[before]]
name = "central"
base = "pretrain"
condition = "pooled"
budget = ["training.cycles=2", "training.keep_cycle=0"]
[[runs]]
label = "one place"
conditions = ["pooled"]
[[runs]]
label = "from a model"
base = "bc5cdr"
conditions = ["federated"]
set = ["model.encoder={central}"]
"""


def score(run: GridRun, key: str) -> float:
    place = ("precision", "recall", "f1").index(key)
    return 0.4 + 0.1 * place + 0.03 * run.seed - (0.07 if run.condition == "federated" else 0)


def summary(run: GridRun) -> dict[str, Any]:
    scores = {key: score(run, key) for key in ("precision", "recall", "f1")}
    both = {run.condition: {"strict": scores, "relaxed": scores}}
    spent = {"seconds": 10.0, "bytes_up": 9_000_000, "bytes_down": 0, "rounds": 3}
    return {
        "seconds": 10.0, "sites": {"a": both}, "mean": both, "micro": both,
        "bytes_up": 0, "bytes_down": 0, "conditions": {run.condition: spent},
    }  # fmt: skip


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[GridRun]:
    """The grid in place of the real ones, its runs made up; returns those asked for."""
    path = tmp_path / "bert" / "tiny.toml"
    path.parent.mkdir()
    path.write_text(GRID, encoding="utf-8")
    asked: list[GridRun] = []

    def fake(run: GridRun) -> str:
        asked.append(run)
        write_json(run.folder / "summary.json", summary(run))
        return run.row.label

    monkeypatch.setenv("FEDNOTES_CORPORA", str(tmp_path / "corpora"))
    monkeypatch.setattr(module, "grids", lambda: {"bert-tiny": path})
    monkeypatch.setattr(module, "_run", fake)
    return asked


def test_models_come_first_and_once(tiny: list[GridRun], tmp_path: Path) -> None:
    reproduce("bert-tiny", tmp_path / "out", workers=1)
    assert [(r.row.label, r.condition, r.seed) for r in tiny] == [
        ("central", "pooled", 1),
        ("one place", "pooled", 1),
        ("one place", "pooled", 2),
        ("from a model", "federated", 1),
        ("from a model", "federated", 2),
    ]
    first, *_, last = tiny
    assert first.arguments[1] == "bert/pretrain"
    assert "training.cycles=2" in first.arguments
    assert "sites.*.max_sentences=50" not in first.arguments
    assert last.arguments[1] == "bert/bc5cdr"
    assert f"model.encoder={first.folder}/pooled/model" in last.arguments


def test_the_tables_own_columns(tiny: list[GridRun], tmp_path: Path) -> None:
    """Means and deviations by `statistics`; the last column against the named row."""
    reproduce("bert-tiny", tmp_path / "out", workers=1)
    text = (tmp_path / "out" / "bert-tiny" / "results.md").read_text("utf-8")
    rows = [
        [c.strip() for c in r.strip("|").split("|")] for r in text.splitlines() if r[:2] == "| "
    ]
    assert rows[0][2:] == [
        "micro strict precision",
        "micro strict f1",
        "MB up",
        "s",
        "behind one place",
    ]
    runs = [run for run in tiny if run.row.label == "from a model"]
    for cell, key in zip(rows[2][2:4], ("precision", "f1"), strict=True):
        values = [100 * score(run, key) for run in runs]
        assert cell == f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}"
    assert rows[2][4:6] == ["3.00 ± 0.00", "10 ± 0"]


def test_how_far_rows_fall_behind(tiny: list[GridRun], tmp_path: Path) -> None:
    changed = GRID.replace('"micro strict f1", "MB up", "s"', '"micro strict f1"')
    (tmp_path / "bert" / "tiny.toml").write_text(changed, encoding="utf-8")
    table = reproduce("bert-tiny", tmp_path / "out", workers=1)
    text = (tmp_path / "out" / "bert-tiny" / "results.md").read_text("utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| from a model")]
    assert lines[0].endswith("| 7.0 |")
    assert plot(table, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"


def test_a_column_that_is_not_there_is_named(tiny: list[GridRun], tmp_path: Path) -> None:
    reproduce("bert-tiny", tmp_path / "out", workers=1)
    run = tiny[1]
    with pytest.raises(ConfigError, match="'mean masked loss': this job has no such score"):
        column(summary(run), run.condition, "mean masked loss")


@pytest.mark.parametrize(
    "name", ["bert-table1", "bert-table2", "bert-silos", "bert-sent", "bert-steps"]
)
@pytest.mark.parametrize("full", [False, True])
def test_the_real_grids_plan(
    name: str, full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every run is asked for with settings that its job takes; attention gets real folders."""
    monkeypatch.setenv("FEDNOTES_CORPORA", str(tmp_path))
    asked: list[GridRun] = []

    def fake(run: GridRun) -> str:
        asked.append(run)
        made = summary(run) | {"valid": {run.condition: {"mean": 0.5, "sites": {"a": 0.5}}}}
        masked = {run.condition: {"masked": {"loss": 1.0, "accuracy": 0.5}}}
        made["mean"] = {run.condition: made["mean"][run.condition] | masked[run.condition]}
        write_json(run.folder / "summary.json", made)
        return run.row.label

    heads: list[Any] = []
    monkeypatch.setattr(module, "_run", fake)
    monkeypatch.setattr(
        module, "_attention", lambda *given: heads.append(given) or {"markdown": ""}
    )
    reproduce(name, tmp_path / "out", full=full, workers=1)
    grid, _ = load_grid(name)
    assert name in grids()
    size = grid.full if full else grid.budget
    numbers = [  # on the first seed every setting is tried, on the others the chosen one
        len(row.conditions) * (len(size.seeds) - 1 + len(list(row.choices()))) for row in grid.runs
    ]
    assert len(asked) == len(grid.before) + sum(numbers)
    assert bool(heads) == (grid.attention is not None)
    for row in grid.paper.values():
        assert row.keys() == next(iter(grid.paper.values())).keys()
