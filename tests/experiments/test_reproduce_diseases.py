"""Grids with a row a disease, and columns whose number may not exist."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from fednotes.core.errors import ConfigError
from fednotes.core.store import write_json
from fednotes.experiments import reproduce as module
from fednotes.experiments.grids import GridRun
from fednotes.experiments.reproduce import reproduce
from fednotes.experiments.tables import plot

HEAD = """\
title = "Tiny"
base = "real"
[budget]
seeds = [1, 2, 3]
[full]
seeds = [1]
"""
RUNS = """\
[[runs]]
label = "stages"
conditions = ["federated"]
[[runs]]
label = "alone"
conditions = ["alone"]
"""
PAPER = """\
[paper]
"Asthma" = { precision = 93.9, recall = 91.0, F1 = 92.4 }
"Gout" = { precision = 97.5, recall = 90.0, F1 = 93.4 }
"average" = { precision = 80.0, recall = 70.0, F1 = 72.6 }
"""
KEYS = ("precision", "recall", "f1")


def f1(run: GridRun, place: int) -> float:
    return 0.4 + 0.11 * place + 0.03 * run.seed**2 - (0.07 if run.condition == "alone" else 0)


def made(run: GridRun) -> dict[str, Any]:
    """Asthma, and Zoster, which seed 2 does not have."""
    by_output = {
        name: {key: f1(run, place + k) for k, key in enumerate(KEYS)} | {"auroc": None, "sites": 1}
        for place, name in enumerate(("Asthma", "Zoster"))
        if not (name == "Zoster" and run.seed == 2)
    }
    scores = {
        "phenotypes": dict(zip(KEYS, (0.5, 0.6, 0.55), strict=True)),
        "ranking": {"auroc": None if run.condition == "alone" or run.seed == 2 else 0.8},
        "calibration": {"brier": 0.1234},
        "by_output": by_output,
    }
    spent = {"seconds": 1.0, "bytes_up": 0, "bytes_down": 0, "rounds": 1}
    return {
        "seconds": 1.0, "sites": {"a": {run.condition: {"phenotypes": scores["phenotypes"]}}},
        "mean": {run.condition: scores}, "micro": {}, "bytes_up": 0, "bytes_down": 0,
        "conditions": {run.condition: spent},
    }  # fmt: skip


@pytest.fixture
def grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for a grid whose runs are made up."""
    monkeypatch.setenv("FEDNOTES_CORPORA", str(tmp_path / "corpora"))
    path = tmp_path / "fedner" / "tiny.toml"
    path.parent.mkdir()

    def fake(run: GridRun) -> str:
        write_json(run.folder / "summary.json", made(run))
        return run.row.label

    monkeypatch.setattr(module, "grids", lambda: {"fedner-tiny": path})
    monkeypatch.setattr(module, "_run", fake)
    return path


def rows_of(path: Path, text: str, out: Path) -> tuple[dict[str, Any], list[list[str]]]:
    path.write_text(text, encoding="utf-8")
    table = reproduce("fedner-tiny", out, workers=1)
    shown = (out / "fedner-tiny" / "results.md").read_text(encoding="utf-8")
    rows = [
        [c.strip() for c in line[1:-1].split("|")] for line in shown.splitlines() if "|" in line
    ]
    return table, [row for row in rows if "---" not in row[0]]


def cell(place: int, alone: bool, seeds: tuple[int, ...]) -> str:
    values = [100 * (0.4 + 0.11 * place + 0.03 * s**2 - 0.07 * alone) for s in seeds]
    return f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}"


def test_a_row_a_disease_with_the_paper_beside(grid: Path, tmp_path: Path) -> None:
    """Cells by statistics.fmean and stdev; a disease of the paper alone has dashes."""
    table, rows = rows_of(grid, "by_output = true\n" + HEAD + RUNS + PAPER, tmp_path / "out")
    figures = ("precision", "recall", "F1")
    assert rows[0] == [
        "disease",
        *(f"{run}: {h}" for run in ("stages, federated", "alone, alone") for h in "P R F1".split()),
        *(f"paper: {name}" for name in figures),
    ]
    assert rows[1][0] == "Asthma"
    assert rows[1][1:7] == [cell(k, alone, (1, 2, 3)) for alone in (False, True) for k in range(3)]
    assert rows[1][7:] == ["93.9", "91.0", "92.4"]
    assert rows[2] == [
        "Zoster", *(cell(1 + k, a, (1, 3)) for a in (False, True) for k in range(3)), "", "", ""
    ]  # fmt: skip
    assert rows[3] == ["Gout", *["–"] * 6, "97.5", "90.0", "93.4"]
    each = [statistics.fmean(0.4 + 0.11 * p + 0.03 * s**2 for s in seeds)
            for p, seeds in ((2, (1, 2, 3)), (3, (1, 3)))]  # fmt: skip
    assert rows[4][0] == "average"
    assert rows[4][3] == f"{100 * statistics.fmean(each):.1f}"
    assert rows[4][7:] == ["80.0", "70.0", "72.6"]
    assert len(rows) == 5
    assert not plot(table, tmp_path / "figure.png")


def test_one_run_needs_no_name_and_other_diseases_no_columns(grid: Path, tmp_path: Path) -> None:
    """Where the paper's diseases are others, its figures are a table of their own."""
    runs, paper = RUNS[: RUNS.rindex("[[runs]]")], PAPER.replace("Asthma", "CAD")
    _, rows = rows_of(grid, "by_output = true\n" + HEAD + runs + paper, tmp_path / "out")
    assert rows[0] == ["disease", "P", "R", "F1"]
    assert [row[0] for row in rows[1:4]] == ["Asthma", "Zoster", "average"]
    assert rows[4] == ["run", "precision", "recall", "F1"]
    assert rows[5] == ["CAD", "93.90", "91.00", "92.40"]


def test_a_number_that_does_not_exist_is_a_dash(grid: Path, tmp_path: Path) -> None:
    """Alone has no AUROC at all; federated has it in two of three seeds. A Brier is no percent."""
    columns = '["mean phenotypes f1", "mean calibration brier", "mean ranking auroc"]'
    head = f'columns = {columns}\nagainst = "stages"\n'
    table, rows = rows_of(grid, head + HEAD + RUNS, tmp_path / "out")
    assert rows[1:] == [
        ["stages", "federated", "55.0 ± 0.0", "0.123 ± 0.000", "80.0 ± 0.0", ""],
        ["alone", "alone", "55.0 ± 0.0", "0.123 ± 0.000", "–", ""],
    ]
    assert table["rows"][0]["columns"]["mean ranking auroc"]["n"] == 2
    assert plot(table, tmp_path / "figure.png") == (tmp_path / "figure.png").exists()


def test_other_jobs_have_no_diseases(
    grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake(run: GridRun) -> str:
        summary = made(run)
        del summary["mean"][run.condition]["by_output"]
        write_json(run.folder / "summary.json", summary)
        return run.row.label

    monkeypatch.setattr(module, "_run", fake)
    with pytest.raises(ConfigError, match="no scores of diseases"):
        rows_of(grid, "by_output = true\n" + HEAD + RUNS, tmp_path / "out")
