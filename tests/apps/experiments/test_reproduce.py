"""The papers' grids: they can be planned, share runs, and have correct tables."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fednotes.apps.experiments import planning
from fednotes.apps.experiments import reproduce as module
from fednotes.apps.experiments.figures import plot_results
from fednotes.apps.experiments.grid_files import list_grid_files
from fednotes.apps.experiments.grid_runs import GridRequest, GridRun, plan_row
from fednotes.apps.experiments.grids import (
    Jobs,
    load_grid,
    select_grid_rows,
)
from fednotes.apps.experiments.reproduce import reproduce
from fednotes.apps.experiments.scores import read_column
from fednotes.cli.app import app
from fednotes.core.errors import ConfigError
from fednotes.jobs.job_file import load_job

NAMES = ("fedner-fig3", "fedner-fig4", "fedner-fig5", "fedner-fig6", "fedner-table2")
BERT = ("bert-table1", "bert-table2", "bert-silos", "bert-sent", "bert-steps")


def request_of(name: str, full: bool, out: Path) -> GridRequest:
    grid, path = load_grid(name)
    size = grid.full if full else grid.budget
    return GridRequest(jobs=Jobs(path.parent.name), size=size, full=full, out=out)


def plan_runs(name: str, full: bool, out: Path) -> list[GridRun]:
    """Return all runs of an experiment on its own jobs."""
    grid, _ = load_grid(name)
    request = request_of(name, full, out)
    rows, _ = select_grid_rows(grid, request.jobs, full=full)
    return [
        run
        for row in rows
        for condition in row.conditions
        for run in plan_row(row, condition, request)
    ]


def test_a_misspelt_grid_is_refused_in_one_line(run_cli: Any, tmp_path: Path) -> None:
    code, _, err = run_cli("reproduce", "fedner-tabel2", "--out", tmp_path / "r")
    assert code == 2
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert "did you mean 'fedner-table2'?" in err
    assert not (tmp_path / "r").exists()


def test_every_grid_is_listed_and_consistent() -> None:
    assert {*NAMES, *BERT} <= set(list_grid_files())
    with pytest.raises(ConfigError, match="did you mean 'fedner-fig3'"):
        load_grid("fedner-fig33")
    for name in list_grid_files():
        grid, _ = load_grid(name)  # one heading fits every row of the paper's
        assert len({tuple(figures) for figures in grid.paper.values()}) <= 1
        known = {
            f"{row.label}/{condition}"
            for row in grid.runs
            for condition in row.conditions
        }
        assert all(len(pair) == 2 and known.issuperset(pair) for pair in grid.pairs)
        assert grid.score == "test" or not (grid.columns or grid.by_output)
        for row in grid.runs:
            assert all(
                isinstance(tried, list) and tried for tried in row.search.values()
            )
            assert math.prod(map(len, row.search.values())) <= 64


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("tiny")
def test_each_planned_command_parses_to_its_job(
    name: str, full: bool, tmp_path: Path
) -> None:
    """There is a run for each row, condition, seed and setting to try.

    The settings of its command give the job after which its folder is named.
    """
    grid, _ = load_grid(name)
    size = grid.full if full else grid.budget
    rows = [row for row in grid.runs if full or not row.full]
    request = request_of(name, full, tmp_path)
    runs = plan_runs(name, full, tmp_path)
    expected: Counter[tuple[str, str]] = Counter()
    for row in rows:
        tried = math.prod(len(values) for values in row.search.values())
        for condition in row.conditions:
            expected[row.label, condition] += tried * len(request.choose_seeds(row))
    assert Counter((r.row.label, r.condition) for r in runs) == expected
    if name == "fedner-table2" and not full:
        assert len({run.folder for run in runs}) == len(runs)
    for run in [run for run in runs if run.seed == size.seeds[0]]:
        command, base, option, folder, *sets = run.arguments
        assert (command, option, folder) == ("simulate", "--out", str(run.folder))
        assert set(sets[::2]) == {"--set"}
        job = load_job(base, tuple(sets[1::2]))
        assert (job.seed, job.conditions) == (run.seed, (run.condition,))
        assert run.folder == tmp_path / "runs" / job.fingerprint[:16]


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", BERT)
def test_grids_that_train_models_plan_every_run(
    name: str, full: bool, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the first seed all settings are tried, on the others the chosen one runs."""

    def summary(run: GridRun) -> dict[str, Any]:
        scores = of_a_model(run)
        scores["mean"][run.condition] |= {"masked": {"loss": 1.0, "accuracy": 0.5}}
        scores["valid"] = {run.condition: {"mean": 0.5, "sites": {"a": 0.5}}}
        return scores

    heads: list[Any] = []
    tiny.summary = summary
    monkeypatch.setattr(
        module,
        "compare_attention",
        lambda *args, **options: heads.append(args) or {"markdown": ""},
    )
    # there are no corpora
    monkeypatch.setattr(module, "require_notes", lambda *args: None)
    reproduce(name, tmp_path / "out", full=full, workers=1)
    grid, _ = load_grid(name)
    size = grid.full if full else grid.budget
    # on the first seed every setting is tried, on the others the chosen one
    numbers = [
        len(row.conditions) * (len(size.seeds) - 1 + len(list(row.list_choices())))
        for row in grid.runs
    ]
    assert len(tiny.executed) == len(grid.before) + sum(numbers)
    assert bool(heads) == (grid.attention is not None)


@pytest.mark.usefixtures("tiny")
def test_two_figures_share_a_run_with_equal_settings(tmp_path: Path) -> None:
    """They are the paper's split in Fig. 4 and a tenth of the sentences in Fig. 3."""
    fig3, fig4 = (
        {
            (r.row.label, r.condition, r.seed): r.folder
            for r in plan_runs(name, False, tmp_path)
        }
        for name in ("fedner-fig3", "fedner-fig4")
    )
    for seed in (1, 2, 3):
        folder = fig3["10 %", "federated", seed]
        assert folder == fig4["CNN too (the paper's split)", "federated", seed]
        assert folder != fig4["LSTM too", "federated", seed]
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
PLACES = (*SITES, "mean")


def score(run: GridRun, site: str, kind: str) -> float:
    """Return a made-up F1 that differs between rows, conditions, sites and seeds."""
    order = (len(run.row.label), run.condition == "alone", PLACES.index(site))
    base = 0.31 + 0.017 * order[0] + 0.04 * order[1] + 0.021 * order[2]
    return (
        base
        + {1: 0.0, 2: 0.0123, 3: 0.0351}[run.seed]
        + (0.2 if kind == "relaxed" else 0)
    )


def of_sites(run: GridRun) -> dict[str, Any]:
    scores: dict[str, Any] = {
        site: {
            run.condition: {
                k: {"f1": score(run, site, k)} for k in ("strict", "relaxed")
            }
        }
        for site in PLACES
    }
    mean = scores.pop("mean")
    spent = {
        "seconds": 10.0 * run.seed,
        "bytes_up": 1_000_000 * run.seed,
        "bytes_down": 2_000_000,
    }
    return {"sites": scores, "mean": mean, **spent}


def cell(values: list[float]) -> str:
    """Return mean ± deviation (n - 1) in percent."""
    values = [100 * value for value in values]
    return f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}"


def test_a_table_has_means_and_deviations_over_seeds(tiny: Any) -> None:
    """A row with the settings of another one has the same runs, which run once."""
    progress: list[Any] = []
    tiny.summary = of_sites
    table = tiny.table(GRID, on_run=lambda *line: progress.append(line))
    # "again" is "first, federated" under another name
    ran = [("first", "alone"), ("again", "federated"), ("second", "federated")]
    assert [(r.row.label, r.condition, r.seed) for r in tiny.executed] == [
        (*each, seed) for each in ran for seed in (1, 2, 3)
    ]
    assert [line[1:] for line in progress] == [(n, 9) for n in range(1, 10)]
    text = (tiny.place / "out" / "fedner-tiny" / "results.json").read_text(
        encoding="utf-8"
    )
    assert json.loads(text) == json.loads(json.dumps(table))
    assert [row["seconds"] for row in table["rows"]] == [20.0] * 4

    rows = tiny.cells()
    assert rows[0] == ["run", "condition", *PLACES]
    runs = {(r.row.label, r.condition, r.seed): r for r in tiny.executed}
    labels = [ran[0], ("first", "federated"), *ran[1:]]
    known_as = [ran[0], ran[1], ran[1], ran[2]]
    for row, (label, condition), known in zip(rows[1:5], labels, known_as, strict=True):
        # preset best has it
        assert row[:2] == [label, f"{condition} + local fine-tuning"]
        for site, text in zip(PLACES, row[2:], strict=True):
            each = (
                cell([score(runs[*known, seed], site, kind) for seed in (1, 2, 3)])
                for kind in ("strict", "relaxed")
            )
            assert text == " / ".join(each)
    assert rows[5:] == [["run", "A strict", "A relaxed"], ["FedNER", "12.25", "50.00"]]
    page = "\n".join(tiny.lines())
    assert "Small." in page
    assert "seeds 1, 2, 3" in page


LEFT_OUT = """\
title = "Tiny"
base = "real"
[budget]
seeds = [1, 2]
[full]
seeds = [1]
[[runs]]
label = "first"
conditions = ["left-out"]
"""


def of_left_out(run: GridRun) -> dict[str, Any]:
    """Return scores of two sites that were left out; the third one was not."""
    f1 = {"psytar": 0.5 + 0.1 * run.seed, "bc5cdr": 0.25}
    sites: dict[str, Any] = {
        site: {"left-out": {"strict": {"f1": value}}} for site, value in f1.items()
    }
    return {
        **of_sites(run),
        "sites": {**sites, "ncbi": {}},
        "mean": {"left-out": {"strict": {"f1": 0.4}}},
        "left_out": {
            site: {
                "alone, mean": {"types": 1, "strict": {"f1": value / 2}},
                "federated": {"types": 2, "strict": {"f1": value}},
            }
            for site, value in f1.items()
        },
        "left_out_mean": {"federated": {"strict": {"f1": 0.4}}},
        "left_out_types": {"psytar": ["ADR", "WD"], "bc5cdr": ["Disease"]},
    }


def test_models_at_left_out_sites_have_a_table(tiny: Any) -> None:
    tiny.summary = of_left_out
    tiny.table(LEFT_OUT)
    rows = tiny.cells()
    at = rows.index(["model", "psytar", "bc5cdr", "mean"])
    assert rows[at + 1 :] == [
        ["alone, mean", "32.5 ± 3.5 \\*", "12.5 ± 0.0", "–"],
        ["federated", "65.0 ± 7.1", "25.0 ± 0.0", "40.0 ± 0.0"],
    ]
    page = "\n".join(tiny.lines())
    assert "types that are scored: psytar: ADR, WD; bc5cdr: Disease." in page


def test_the_full_size_has_its_own_rows_and_seeds(tiny: Any) -> None:
    """The user's seeds replace the grid's. The deviation of one number is unknown."""
    tiny.summary = of_sites
    few = GRID.replace('label = "large"', 'label = "large"\nseeds = [2]')
    table = tiny.table(few, full=True)
    assert {run.seed for run in tiny.executed if run.row.label == "large"} == {2}
    assert {row["label"] for row in table["rows"]} == {
        "first",
        "again",
        "second",
        "large",
    }
    assert {run.seed for run in tiny.executed} == {1, 2}
    assert not any("training.epochs=2" in run.arguments for run in tiny.executed)
    tiny.executed.clear()
    assert tiny.table(seed=(3,))["seeds"] == [3]
    assert {run.seed for run in tiny.executed} == {3}
    row = next(line for line in tiny.lines() if line.startswith("| second"))
    strict = 100 * score(tiny.executed[-1], "psytar", "strict")
    assert "±" not in row
    assert f"| {strict:.1f} / {strict + 20:.1f} |" in row


def test_a_misspelt_setting_is_refused_before_any_run(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="did you mean 'epochs'"):
        tiny.table(GRID, settings=("training.epoch=1",))
    assert tiny.executed == []


def test_a_table_can_show_f1_within_a_traffic_or_time_budget(tiny: Any) -> None:
    """Three rounds take 1 MB up, 1 MB down and 10 s each.

    Within 4 MB the second is the last one, and within 15 s the first.
    """

    def traced(run: GridRun) -> dict[str, Any]:
        spent = {
            "bytes_up": 1_000_000,
            "bytes_down": 1_000_000,
            "seconds": 10.0,
            "test_f1": 0.1,
        }
        lines = [{name: n * value for name, value in spent.items()} for n in (1, 2, 3)]
        text = "".join(
            json.dumps({"condition": run.condition, **line}) + "\n" for line in lines
        )
        run.folder.mkdir(parents=True)
        (run.folder / "metrics.jsonl").write_text(text, encoding="utf-8")
        return of_sites(run)

    tiny.summary = traced
    tiny.table("megabytes = 4.0\nseconds = 15.0\n" + GRID)
    row = next(line for line in tiny.lines() if line.startswith("| second"))
    assert row.endswith("| 20.0 ± 0.0 | 10.0 ± 0.0 | 4.0 | 20 |")


def test_unannotated_types_have_a_column(tiny: Any) -> None:
    """psytar annotates A and is tested on A, B and C: (0.2 + 0.4) / 2.

    D has no mention in the test data. The other sites annotate all three types.
    """
    by_type = {
        name: {"strict": {"f1": f1}, "support": support}
        for name, f1, support in (
            ("A", 0.9, 3),
            ("B", 0.2, 1),
            ("C", 0.4, 5),
            ("D", 0.0, 0),
        )
    }
    kinds = {kind: {"f1": 0.5} for kind in ("strict", "relaxed")}
    tiny.summary = lambda run: {
        "annotated": {
            "psytar": ["A"],
            "bc5cdr": ["A", "B", "C"],
            "ncbi": ["A", "B", "C"],
        },
        "sites": {
            site: {run.condition: kinds | {"by_type": by_type}} for site in SITES
        },
        "mean": {run.condition: kinds},
    }
    tiny.table(GRID)
    assert tiny.cells()[0][-2:] == ["mean", "types not annotated"]
    (row,) = (line for line in tiny.lines() if line.startswith("| second"))
    assert row.endswith("| 30.0 ± 0.0 |")


# ---- rows that start from models of other runs, and columns of the grid's own -------

MODELS = """\
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
KEYS = ("precision", "recall", "f1")


def of_a_model(run: GridRun) -> dict[str, Any]:
    lower = 0.07 * (run.condition == "federated")
    scores = {
        key: 0.4 + 0.1 * k + 0.03 * run.seed - lower for k, key in enumerate(KEYS)
    }
    condition_scores = {run.condition: {"strict": scores, "relaxed": scores}}
    spent = {"seconds": 10.0, "bytes_up": 9_000_000, "bytes_down": 0, "rounds": 3}
    return {
        "sites": {"a": condition_scores}, "mean": condition_scores, "micro": condition_scores, "conditions": {run.condition: spent}
    }  # fmt: skip


def test_models_are_trained_once_before_the_rows_that_start_from_them(
    tiny: Any,
) -> None:
    """The table has the grid's own columns, with means and deviations."""
    tiny.summary = of_a_model
    tiny.write(MODELS, "bert")
    tiny.table()
    assert [(r.row.label, r.condition, r.seed) for r in tiny.executed] == [
        ("central", "pooled", 1),
        ("one place", "pooled", 1),
        ("one place", "pooled", 2),
        ("from a model", "federated", 1),
        ("from a model", "federated", 2),
    ]
    first, *_, last = tiny.executed
    assert first.arguments[1] == "bert/pretrain"
    assert "training.cycles=2" in first.arguments
    assert "sites.*.max_sentences=50" not in first.arguments
    assert last.arguments[1] == "bert/bc5cdr"
    assert f"model.encoder={first.folder}/pooled/model" in last.arguments
    heads = [
        "micro strict precision",
        "micro strict f1",
        "MB up",
        "s",
        "behind one place",
    ]
    rows = tiny.cells()
    assert rows[0][2:] == heads
    for text, start in zip(rows[2][2:4], (0.33, 0.53), strict=True):
        assert text == cell([start + 0.03 * seed for seed in (1, 2)])
    assert rows[2][4:6] == ["3.00 ± 0.00", "10 ± 0"]
    with pytest.raises(
        ConfigError, match="'mean masked loss': this job has no such score"
    ):
        read_column(of_a_model(last), last.condition, "mean masked loss")


def test_a_column_shows_how_far_rows_fall_behind_another(
    tiny: Any, tmp_path: Path
) -> None:
    tiny.summary = of_a_model
    tiny.write(
        MODELS.replace('"micro strict f1", "MB up", "s"', '"micro strict f1"'), "bert"
    )
    table = tiny.table()
    lines = [line for line in tiny.lines() if line.startswith("| from a model")]
    assert lines[0].endswith("| 7.0 |")
    assert plot_results(table, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"


# ---- a row for each disease, and columns whose number may not exist -----------------

DISEASES = """\
title = "Tiny"
base = "real"
[budget]
seeds = [1, 2, 3]
[full]
seeds = [1]
[[runs]]
label = "stages"
conditions = ["federated"]
"""
ALONE = """\
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


def made_up(place: int, alone: bool, seed: int) -> float:
    return 0.4 + 0.11 * place + 0.03 * seed**2 - 0.07 * alone


def of_diseases(run: GridRun) -> dict[str, Any]:
    """Return made-up scores of Asthma, and of Zoster, which seed 2 does not have."""
    alone = run.condition == "alone"
    by_output = {
        name: {key: made_up(place + k, alone, run.seed) for k, key in enumerate(KEYS)}
        | {"auroc": None, "sites": 1}
        for place, name in enumerate(("Asthma", "Zoster"))
        if not (name == "Zoster" and run.seed == 2)
    }
    scores = {
        "phenotypes": dict(zip(KEYS, (0.5, 0.6, 0.55), strict=True)),
        "ranking": {"auroc": None if alone or run.seed == 2 else 0.8},
        "calibration": {"brier": 0.1234},
        "by_output": by_output,
    }
    spent = {"seconds": 1.0, "bytes_up": 0, "bytes_down": 0, "rounds": 1}
    return {
        "sites": {"a": {run.condition: {"phenotypes": scores["phenotypes"]}}},
        "mean": {run.condition: scores}, "micro": {}, "conditions": {run.condition: spent},
    }  # fmt: skip


def test_diseases_are_rows_beside_the_figures_of_the_paper(
    tiny: Any, tmp_path: Path
) -> None:
    """A disease that only the paper has has dashes. Jobs without diseases are refused."""
    tiny.summary = of_diseases
    table = tiny.table("by_output = true\n" + DISEASES + ALONE + PAPER)
    rows = tiny.cells()

    def cells(place: int, *seeds: int) -> list[str]:
        return [
            cell([made_up(place + k, alone, s) for s in seeds])
            for alone in (False, True)
            for k in range(3)
        ]

    figures = ("precision", "recall", "F1")
    assert rows[0] == [
        "disease",
        *(
            f"{run}: {h}"
            for run in ("stages, federated", "alone, alone")
            for h in "P R F1".split()
        ),
        *(f"paper: {name}" for name in figures),
    ]
    assert rows[1] == ["Asthma", *cells(0, 1, 2, 3), "93.9", "91.0", "92.4"]
    assert rows[2] == ["Zoster", *cells(1, 1, 3), "", "", ""]
    assert rows[3] == ["Gout", *["–"] * 6, "97.5", "90.0", "93.4"]
    each = [
        statistics.fmean(made_up(place, False, seed) for seed in seeds)
        for place, seeds in ((2, (1, 2, 3)), (3, (1, 3)))
    ]
    assert rows[4][0] == "average"
    assert rows[4][3] == f"{100 * statistics.fmean(each):.1f}"
    assert rows[4][7:] == ["80.0", "70.0", "72.6"]
    assert len(rows) == 5
    assert not plot_results(table, tmp_path / "figure.png")
    tiny.summary = lambda run: of_diseases(run) | {"mean": {run.condition: {}}}
    with pytest.raises(ConfigError, match="no scores of diseases"):
        tiny.table()


def test_figures_of_other_diseases_are_shown_in_a_separate_table(tiny: Any) -> None:
    """A single run needs no name in the headings."""
    tiny.summary = of_diseases
    tiny.table("by_output = true\n" + DISEASES + PAPER.replace("Asthma", "CAD"))
    rows = tiny.cells()
    assert rows[0] == ["disease", "P", "R", "F1"]
    assert [row[0] for row in rows[1:4]] == ["Asthma", "Zoster", "average"]
    assert rows[4] == ["run", "precision", "recall", "F1"]
    assert rows[5] == ["CAD", "93.90", "91.00", "92.40"]


def test_a_figure_shows_percent_also_at_a_site_that_is_named_like_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    drawn: list[list[float]] = []
    monkeypatch.setattr(
        Axes, "errorbar", lambda self, means, *_, **__: drawn.append(means)
    )
    monkeypatch.setattr(Axes, "legend", lambda self: None)
    f1 = {"strict": {"f1": {"mean": 0.6, "std": 0.1, "n": 3}}}
    row = {"label": "x", "condition": "federated", "scores": {"a": f1, "loss": f1}}
    table = {"columns": [], "x": "", "rows": [row]}
    plot_results(table, tmp_path / "figure.png")
    assert drawn == [[60.0], [60.0]]


def test_a_missing_number_is_shown_as_a_dash(tiny: Any, tmp_path: Path) -> None:
    """Alone has no AUROC on any seed, and federated on two of three.

    A Brier score is no percentage.
    """
    tiny.summary = of_diseases
    columns = '["mean phenotypes f1", "mean calibration brier", "mean ranking auroc"]'
    table = tiny.table(f'columns = {columns}\nagainst = "stages"\n' + DISEASES + ALONE)
    assert tiny.cells()[1:] == [
        ["stages", "federated", "55.0 ± 0.0", "0.123 ± 0.000", "80.0 ± 0.0", ""],
        ["alone", "alone", "55.0 ± 0.0", "0.123 ± 0.000", "–", ""],
    ]
    assert table["rows"][0]["columns"]["mean ranking auroc"]["n"] == 2
    assert (
        plot_results(table, tmp_path / "figure.png")
        == (tmp_path / "figure.png").exists()
    )


def test_progress_covers_every_row_that_is_planned(tiny: Any) -> None:
    """Three rows of GRID belong to the budget size, the first with two conditions."""
    events: list[tuple[str, int, int]] = []
    tiny.summary = of_sites
    tiny.table(GRID, on_plan=lambda *event: events.append(event))
    assert events == [
        ("first, alone", 0, 4),
        ("first, federated", 1, 4),
        ("again, federated", 2, 4),
        ("second, federated", 3, 4),
        ("", 4, 4),
    ]


def test_the_command_reports_the_planning_once(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output that is no terminal has one line for all of the planning."""
    tiny.write(GRID)
    tiny.summary = of_sites
    options = ["--out", str(tiny.place / "out"), "--workers", "1", "--seeds", "1"]
    result = CliRunner().invoke(app, ["reproduce", tiny.name, *options])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert [line for line in lines if "plan" in line] == [
        "fedner-tiny: planning the runs"
    ]
    assert lines[1] == "3 runs: 0 done, 0 started, 3 to start"


def test_the_command_prints_its_table_as_json(tiny: Any) -> None:
    tiny.write(GRID)
    tiny.summary = of_sites
    options = ["--out", str(tiny.place / "out"), "--workers", "1", "--seeds", "1"]
    result = CliRunner().invoke(app, ["reproduce", tiny.name, *options, "--json"])
    assert result.exit_code == 0, result.output
    (saved,) = (tiny.place / "out").glob("*/results.json")
    assert json.loads(result.stdout) == json.loads(saved.read_text())
    assert "fedner-tiny: planning the runs" in result.stderr

    result = CliRunner().invoke(app, ["reproduce", "--json"])
    assert tiny.name in json.loads(result.stdout)


def test_the_command_names_options_in_place_of_parameters(tiny: Any) -> None:
    tiny.write(GRID)
    tiny.summary = of_sites
    options = ["--out", str(tiny.place / "out"), "--set", "training.epochs=3"]
    result = CliRunner().invoke(app, ["reproduce", tiny.name, *options])
    assert "--set training.epochs=3 does not apply to 'first', 'again'" in result.output
    assert "`settings`" not in result.output


def test_a_key_in_the_error_of_a_job_is_not_shown_as_an_option(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_second_row(row: Any, *arguments: Any, **options: Any) -> Any:
        if row.label == "second":
            raise ConfigError("its sites have no `valid_fraction`")
        return plan_row(row, *arguments, **options)

    tiny.write(GRID)
    tiny.summary = of_sites
    monkeypatch.setattr(planning, "plan_row", refuse_second_row)
    options = ["--out", str(tiny.place / "out"), "--workers", "1", "--seeds", "1"]
    result = CliRunner().invoke(app, ["reproduce", tiny.name, *options])
    assert "its sites have no 'valid_fraction'" in result.output
    assert "--valid-fraction" not in result.output


def test_the_command_names_the_plot_of_a_comparison_of_attention(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tiny.place / "notes"
    notes.mkdir()
    tiny.write(
        'title = "Heads"\nbase = "pretrain"\n[budget]\nseeds = [1]\n[full]\n'
        'seeds = [1]\n[[before]]\nname = "central"\nbase = "pretrain"\n'
        'condition = "pooled"\n[attention]\nmodels = ["central={central}"]\n'
        f"notes = ['{notes}']\n",
        folder="bert",
    )

    def compare(grid: Any, models: Any, out: Path, **options: Any) -> dict[str, Any]:
        out.mkdir(parents=True)
        (out / "entropy_by_depth.png").touch()
        return {"markdown": "a table"}

    monkeypatch.setattr(module, "compare_attention", compare)
    options = ["--out", str(tiny.place / "out"), "--workers", "1"]
    result = CliRunner().invoke(app, ["reproduce", tiny.name, *options])
    assert result.exit_code == 0, result.output
    assert "entropy_by_depth.png" in result.output
