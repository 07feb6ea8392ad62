"""The papers' grids: that they can be run, share runs, and how their tables are made."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from pathlib import Path

import pytest

from fednotes.core.errors import ConfigError
from fednotes.core.store import write_json
from fednotes.experiments import reproduce as module
from fednotes.experiments.grids import GridRun, Jobs, plan, seeds_of
from fednotes.experiments.reproduce import grids, load_grid, reproduce
from fednotes.jobs.job_file import load_job

NAMES = ("fedner-fig3", "fedner-fig4", "fedner-fig5", "fedner-fig6", "fedner-table2")


@pytest.fixture(autouse=True)
def _folder_of_corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDNOTES_CORPORA", str(tmp_path / "corpora"))


def planned(name: str, full: bool, out: Path) -> list[GridRun]:
    grid, path = load_grid(name)
    size = grid.full if full else grid.budget
    jobs = Jobs(path.parent.name)
    rows = [row for row in grid.runs if full or not row.full]
    return [run for row in rows for run in plan(row, jobs, grid.base, size, full, out, ())]


def test_every_grid_is_known() -> None:
    assert set(NAMES) <= set(grids())
    with pytest.raises(ConfigError, match="did you mean 'fedner-fig3'"):
        load_grid("fedner-fig33")


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_grid_plans(name: str, full: bool, tmp_path: Path) -> None:
    """A run for each row, condition, seed and setting that is tried; each command, read again, is
    the job it names."""
    grid, _ = load_grid(name)
    size = grid.full if full else grid.budget
    rows = [row for row in grid.runs if full or not row.full]
    runs = planned(name, full, tmp_path)
    expected: Counter[tuple[str, str]] = Counter()
    for row in rows:
        tried = math.prod(len(values) for values in row.search.values())
        for condition in row.conditions:
            expected[row.label, condition] += tried * len(seeds_of(row, size, full))
    assert Counter((r.row.label, r.condition) for r in runs) == expected
    for run in [run for run in runs if run.seed == size.seeds[0]]:
        command, base, option, folder, *sets = run.arguments
        assert (command, option, folder) == ("simulate", "--out", str(run.folder))
        assert set(sets[::2]) == {"--set"}
        job = load_job(base, tuple(sets[1::2]))
        assert (job.seed, job.conditions) == (run.seed, (run.condition,))
        assert run.folder == tmp_path / "runs" / job.fingerprint[:16]
    if grid.paper:
        heads = {tuple(figures) for figures in grid.paper.values()}
        assert len(heads) == 1  # one heading fits every row


def test_seeds_and_conditions_have_folders_of_their_own(tmp_path: Path) -> None:
    runs = planned("fedner-table2", False, tmp_path)
    assert len({run.folder for run in runs}) == len(runs)


def test_grids_share_runs(tmp_path: Path) -> None:
    """Fig. 4's split of the paper and Fig. 3's tenth of the sentences are one run."""
    fig3, fig4 = (
        {
            (run.row.label, run.condition, run.seed): run.folder
            for run in planned(name, False, tmp_path)
        }
        for name in ("fedner-fig3", "fedner-fig4")
    )
    for seed in (1, 2, 3):
        here = fig3["10 %", "federated", seed]
        assert here == fig4["CNN too (the paper's split)", "federated", seed]
        assert here != fig4["LSTM too", "federated", seed]
        assert fig3["10 %", "alone", seed] == fig4["nothing shared", "alone", seed]


GRID = """\
title = "Tiny"
base = "real"
x = "share"
paper_note = "Percent."
[budget]
seeds = [1, 2, 3]
note = "Small."
[full]
seeds = [1, 2]
[[runs]]
label = "first"
conditions = ["alone", "federated"]
budget = ["training.epochs=2"]
[[runs]]
label = "again"
conditions = ["federated"]
budget = ["training.epochs=2"]
[[runs]]
label = "second"
conditions = ["federated"]
set = ["training.private=['crf']"]
[[runs]]
label = "large"
conditions = ["federated"]
full = true
[paper]
"FedNER" = { "A strict" = 12.25, "A relaxed" = 50.0 }
"""

SITES = ("psytar", "bc5cdr", "ncbi")


def score(run: GridRun, site: str, kind: str) -> float:
    """A made-up F1 that differs in everything."""
    order = (len(run.row.label), run.condition == "alone", (*SITES, "mean").index(site))
    base = 0.31 + 0.017 * order[0] + 0.04 * order[1] + 0.021 * order[2]
    return base + {1: 0.0, 2: 0.0123, 3: 0.0351}[run.seed] + (0.2 if kind == "relaxed" else 0)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[GridRun]:
    """The tiny grid in place of the real ones, its runs made up; returns those asked for."""
    path = tmp_path / "fedner" / "tiny.toml"
    path.parent.mkdir()
    path.write_text(GRID, encoding="utf-8")
    asked: list[GridRun] = []

    def fake(run: GridRun) -> str:
        asked.append(run)
        scores = {
            name: {
                run.condition: {
                    kind: {"precision": 0.0, "recall": 0.0, "f1": score(run, name, kind)}
                    for kind in ("strict", "relaxed")
                }
            }
            for name in (*SITES, "mean")
        }
        mean = scores.pop("mean")
        summary = {"seconds": 10.0 * run.seed, "sites": scores, "mean": mean}
        summary |= {"bytes_up": 1_000_000 * run.seed, "bytes_down": 2_000_000}
        write_json(run.folder / "summary.json", summary)
        return run.row.label

    monkeypatch.setattr(module, "grids", lambda: {"fedner-tiny": path})
    monkeypatch.setattr(module, "_run", fake)
    return asked


def test_a_grid_to_its_table(tiny: list[GridRun], tmp_path: Path) -> None:
    """Cells by statistics.fmean and stdev (n - 1) from the made-up scores."""
    out, told = tmp_path / "out", []
    table = reproduce("fedner-tiny", out, tell=lambda *line: told.append(line), workers=1)
    # "again" is "first, federated" under another name: run once, under either
    assert [(r.row.label, r.condition, r.seed) for r in tiny] == [
        *(("first", "alone", seed) for seed in (1, 2, 3)),
        *(("again", "federated", seed) for seed in (1, 2, 3)),
        *(("second", "federated", seed) for seed in (1, 2, 3)),
    ]
    assert [line[1:] for line in told] == [(n, 9) for n in range(1, 10)]
    kept = json.loads((out / "fedner-tiny" / "results.json").read_text(encoding="utf-8"))
    assert kept == json.loads(json.dumps(table))
    assert [row["seconds"] for row in kept["rows"]] == [20.0] * 4

    text = (out / "fedner-tiny" / "results.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    assert rows[0] == ["run", "condition", *SITES, "mean"]
    runs = {(r.row.label, r.condition, r.seed): r for r in tiny}
    names = [("first", "alone"), ("first", "federated"), ("again", "federated")]
    for row, (label, condition) in zip(rows[1:5], [*names, ("second", "federated")], strict=True):
        assert row[:2] == [label, f"{condition} + local fine-tuning"]  # preset best has it
        ran = "again" if condition == "federated" and label == "first" else label
        for site, cell in zip((*SITES, "mean"), row[2:], strict=True):
            halves = []
            for kind in ("strict", "relaxed"):
                f1 = [100 * score(runs[ran, condition, s], site, kind) for s in (1, 2, 3)]
                halves.append(f"{statistics.fmean(f1):.1f} ± {statistics.stdev(f1):.1f}")
            assert cell == " / ".join(halves)
    assert rows[5:] == [["run", "A strict", "A relaxed"], ["FedNER", "12.25", "50.00"]]
    assert "Small." in text
    assert "seeds 1, 2, 3" in text


def test_full_size_has_its_own_rows_and_seeds(tiny: list[GridRun], tmp_path: Path) -> None:
    table = reproduce("fedner-tiny", tmp_path / "out", full=True, workers=1)
    assert {row["label"] for row in table["rows"]} == {"first", "again", "second", "large"}
    assert {run.seed for run in tiny} == {1, 2}
    assert not any("training.epochs=2" in run.arguments for run in tiny)


def test_chosen_seeds_take_the_place_of_the_grids(tiny: list[GridRun], tmp_path: Path) -> None:
    table = reproduce("fedner-tiny", tmp_path / "out", seeds=(3,), workers=1)
    assert {run.seed for run in tiny} == {3}
    assert table["seeds"] == [3]


def test_one_seed_has_no_deviation(tiny: list[GridRun], tmp_path: Path) -> None:
    """A deviation of one number is unknown, not zero."""
    path = tmp_path / "fedner" / "tiny.toml"
    path.write_text(GRID.replace("seeds = [1, 2, 3]", "seeds = [2]"), encoding="utf-8")
    reproduce("fedner-tiny", tmp_path / "out", workers=1)
    text = (tmp_path / "out" / "fedner-tiny" / "results.md").read_text(encoding="utf-8")
    (row,) = (line for line in text.splitlines() if line.startswith("| second"))
    strict = 100 * score(tiny[-1], "psytar", "strict")
    assert "±" not in row
    assert f"| {strict:.1f} / {strict + 20:.1f} |" in row


def test_a_wrong_setting_shows_before_any_run(tiny: list[GridRun], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'epochs'"):
        reproduce("fedner-tiny", tmp_path / "out", settings=("training.epoch=1",))
    assert tiny == []


def test_f1_at_equal_bytes_and_seconds(tiny: list[GridRun], tmp_path: Path) -> None:
    """Three traced rounds of 1 MB up, 1 MB down and 10 s: at 4 MB the second, at 15 s the first."""
    path = tmp_path / "fedner" / "tiny.toml"
    path.write_text("megabytes = 4.0\nseconds = 15.0\n" + GRID, encoding="utf-8")
    out = tmp_path / "out"
    for run in planned_from(path, out):
        lines = [
            {
                "condition": run.condition,
                "bytes_up": round * 1_000_000,
                "bytes_down": round * 1_000_000,
                "seconds": 10.0 * round,
                "test_f1": 0.1 * round,
            }
            for round in (1, 2, 3)
        ]
        run.folder.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run.folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    reproduce("fedner-tiny", out, workers=1)
    text = (out / "fedner-tiny" / "results.md").read_text(encoding="utf-8")
    (row,) = (line for line in text.splitlines() if line.startswith("| second"))
    assert row.endswith("| 20.0 ± 0.0 | 10.0 ± 0.0 | 4.0 | 20 |")


def test_types_that_a_site_does_not_annotate_have_a_column(
    tiny: list[GridRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: psytar annotates A, is tested on A, B and C; the others annotate all they are
    tested on. (0.2 + 0.4) / 2 at psytar alone; D has no mention in the test data."""

    def fake(run: GridRun) -> str:
        by_type = {
            name: {"strict": {"f1": f1}, "support": support}
            for name, f1, support in (("A", 0.9, 3), ("B", 0.2, 1), ("C", 0.4, 5), ("D", 0.0, 0))
        }
        kinds = {kind: {"f1": 0.5} for kind in ("strict", "relaxed")}
        summary = {
            "seconds": 1.0,
            "bytes_up": 0,
            "bytes_down": 0,
            "annotated": {"psytar": ["A"], "bc5cdr": ["A", "B", "C"], "ncbi": ["A", "B", "C"]},
            "sites": {site: {run.condition: kinds | {"by_type": by_type}} for site in SITES},
            "mean": {run.condition: kinds},
        }
        write_json(run.folder / "summary.json", summary)
        return run.row.label

    monkeypatch.setattr(module, "_run", fake)
    reproduce("fedner-tiny", tmp_path / "out", workers=1)
    text = (tmp_path / "out" / "fedner-tiny" / "results.md").read_text(encoding="utf-8")
    assert "| mean | types not annotated |" in text
    (row,) = (line for line in text.splitlines() if line.startswith("| second"))
    assert row.endswith("| 30.0 ± 0.0 |")


def planned_from(path: Path, out: Path) -> list[GridRun]:
    grid, _ = module.load_grid("fedner-tiny")
    jobs, rows = Jobs(path.parent.name), [row for row in grid.runs if not row.full]
    return [r for row in rows for r in plan(row, jobs, grid.base, grid.budget, False, out, ())]
