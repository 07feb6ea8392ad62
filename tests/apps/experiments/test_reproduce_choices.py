"""Choose settings by validation data, test pairs of rows, and run on other jobs."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import IO, Any

import pytest
from applications import loadable, needs_app
from paper_corpora import PAPERS
from scipy import stats
from tiny_jobs import corpus
from typer.testing import CliRunner

from fednotes.apps.experiments import reproduce as module
from fednotes.apps.experiments import work
from fednotes.apps.experiments.grid_files import list_grid_files
from fednotes.apps.experiments.grid_runs import GridRun, has_key, is_set_by
from fednotes.apps.experiments.grids import (
    Row,
    list_experiments,
    load_grid,
)
from fednotes.apps.experiments.planning import Rehearsal
from fednotes.apps.experiments.reproduce import reproduce
from fednotes.cli.app import app
from fednotes.core.errors import ConfigError, DataError, FednotesError
from fednotes.core.store import write_json
from fednotes.jobs.job_file import load_job
from fednotes.jobs.workers import dealing
from fednotes.metrics.paired_tests import run_paired_t_test

GRID = """\
title = "Tiny"
base = "real"
pairs = [["searched/federated", "plain/federated"]]
[budget]
seeds = [1, 2, 3]
[full]
seeds = [1]
[[runs]]
label = "plain"
conditions = ["federated"]
set = ["preset=paper"]
seeds = [1, 2, 3, 4, 5]
[[runs]]
label = "searched"
conditions = ["alone", "federated"]
set = ["preset=paper"]
seeds = [1, 2, 3, 4, 5]
search = { "training.learning_rate" = [0.001, 0.003], "training.private" = [["crf"], []] }
"""
# what each seed adds to test scores
NOISE = {1: 0.0, 2: 0.011, 3: -0.004, 4: 0.02, 5: 0.007}
BEST = {"alone": (0.003, "crf"), "federated": (0.001, "")}  # by validation data


def choice_of(run: GridRun) -> tuple[float, str]:
    """Return the learning rate and the private module that a run tries."""
    rate, private = (text.partition("=")[2] for text in run.choice)
    return float(rate), private.strip("[]'")


def validation_and_test_f1(run: GridRun) -> tuple[float, float]:
    """Return scores that disagree: the best setting by one is the worst by the other."""
    if not run.choice:
        return 0.5, 0.5
    if choice_of(run) == BEST[run.condition]:
        return 0.6, 0.3 + NOISE[run.seed]
    return 0.4, 0.9


def summary_of(run: GridRun) -> dict[str, Any]:
    valid, test = validation_and_test_f1(run)
    condition_scores = {run.condition: {k: {"f1": test} for k in ("strict", "relaxed")}}
    of_validation = {run.condition: {"mean": valid, "sites": {"a": valid}}}
    return {
        "sites": {"a": condition_scores},
        "mean": condition_scores,
        "valid": of_validation,
    }


@pytest.fixture(autouse=True)
def _made_up_summaries(tiny: Any) -> None:
    tiny.summary = summary_of


def test_each_condition_uses_its_best_setting_by_validation(tiny: Any) -> None:
    """All settings run on the first seed, and only the best one on the others."""
    table = tiny.table(GRID)
    runs = [run for run in tiny.executed if run.row.label == "searched"]
    assert len(runs) == 2 * (4 + 4)
    assert {choice_of(r) for r in runs if r.seed == 1 and r.condition == "alone"} == {
        (rate, private) for rate in (0.001, 0.003) for private in ("crf", "")
    }
    for condition, best in BEST.items():
        assert {
            choice_of(r) for r in runs if r.seed > 1 and r.condition == condition
        } == {best}
    alone, federated = table["rows"][1:]
    assert alone["chosen"] == [
        "training.learning_rate=0.003",
        "training.private=['crf']",
    ]
    assert federated["chosen"] == [
        "training.learning_rate=0.001",
        "training.private=[]",
    ]
    assert sorted(each["validation"] for each in alone["tried"]) == [0.4, 0.4, 0.4, 0.6]
    mean = 0.3 + sum(NOISE.values()) / 5
    assert alone["scores"]["mean"]["strict"]["f1"]["mean"] == pytest.approx(
        mean, abs=1e-12
    )
    (line,) = (x for x in tiny.lines() if x.startswith("- searched, alone: "))
    assert "`training.learning_rate=0.003`, `training.private=['crf']` (" in line
    assert line.count(": 40.0") == 3


def test_losses_that_selected_a_setting_are_shown_with_their_sign(tiny: Any) -> None:
    """A run's validation score is minus the loss, so that more is better."""

    def summary(run: GridRun) -> dict[str, Any]:
        scores = summary_of(run)
        scores["valid"][run.condition]["mean"] = -10.3006
        return scores

    tiny.summary = summary
    tiny.table(GRID)
    (line,) = (x for x in tiny.lines() if x.startswith("- searched, alone: "))
    assert line.count(": loss 10.301") == 4


def test_finished_runs_of_an_experiment_are_not_repeated(tiny: Any) -> None:
    """Each time the state is said first: 5 plain runs, 2 x (4 + 4) searched ones."""
    tiny.write(GRID)
    lines: list[str] = []
    tiny.table(say=lines.append)
    assert lines[0] == "21 runs: 0 done, 0 started, 21 to start"
    assert "for 20 more runs" in lines[1]
    first, count = tiny.executed[-1].folder, len(tiny.executed)
    (first / "summary.json").unlink()
    (first / "job.json").write_text("{}")
    lines.clear()
    tiny.table(say=lines.append)
    assert lines == ["21 runs: 20 done, 1 started, 0 to start"]
    assert [run.folder for run in tiny.executed[count:]] == [first]


def test_pairs_are_tested_over_seeds(tiny: Any) -> None:
    """SciPy's paired test has the same numbers. Alone and federated are always a pair."""
    table = tiny.table(GRID)
    assert [(p["first"], p["second"]) for p in table["pairs"]] == [
        ("searched, federated", "searched, alone"),
        ("searched, federated", "plain, federated"),
    ]
    searched = [0.3 + NOISE[seed] for seed in (1, 2, 3, 4, 5)]
    test = stats.ttest_rel(searched, [0.5] * 5)
    difference = table["pairs"][1]["differences"]["mean"]
    low, high = test.confidence_interval(0.95)
    assert [difference[k] for k in ("low", "high")] == pytest.approx(
        [low, high], abs=1e-12
    )
    assert difference["p_value"] == pytest.approx(test.pvalue, rel=1e-9)
    (line,) = (x for x in tiny.lines() if x.startswith("| searched, federated − plain"))
    assert line.endswith(f"{100 * low:+.1f} to {100 * high:+.1f}; p < 0.001) |")
    assert "| searched, federated − plain, federated | 5 | " in line


def test_no_difference_is_claimed_with_few_seeds(tiny: Any) -> None:
    table = tiny.table(GRID, seed=(1, 2, 3, 4))
    assert all(pair["differences"] == {} for pair in table["pairs"])
    assert "4 seeds: no difference is claimed." in tiny.lines()
    assert not any("interval" in line for line in tiny.lines())


def test_paired_t_equals_a_computation_by_hand() -> None:
    """1, 2, 3, 4, 5 have mean 3 and s = sqrt(2.5), so t = 3 / sqrt(0.5).

    Tables give t(0.975, 4) = 2.776445.
    """
    test = run_paired_t_test([1.0, 2.0, 3.0, 4.0, 5.0])
    assert test.mean == 3
    assert test.high - 3 == pytest.approx(2.776445 * 0.5**0.5, rel=1e-6)
    assert 3 - test.low == pytest.approx(2.776445 * 0.5**0.5, rel=1e-6)
    assert test.p_value == pytest.approx(
        stats.ttest_1samp([1, 2, 3, 4, 5], 0).pvalue, rel=1e-9
    )
    assert run_paired_t_test([0.0] * 5).p_value == 1
    assert (run_paired_t_test([0.5] * 5).low, run_paired_t_test([0.5] * 5).p_value) == (
        0.5,
        0,
    )
    with pytest.raises(DataError, match="two differences or more, not 1"):
        run_paired_t_test([1.0])


def test_rounding_errors_are_not_a_difference() -> None:
    """Equal scores that were added in another order differ in their last bit only."""
    last_bit = (0.1 + 0.2) - 0.3
    assert last_bit != 0
    for differences in ([last_bit] * 5, [last_bit, 0.0, 0.0, 0.0, -last_bit, last_bit]):
        assert run_paired_t_test(differences).p_value == 1


def test_a_table_of_validation_scores_shows_no_test_scores(tiny: Any) -> None:
    table = tiny.table('score = "validation"\n' + GRID)
    assert tiny.cells()[1:] == [
        ["plain", "federated", "50.0 ± 0.0", "50.0 ± 0.0"],
        ["searched", "alone", "60.0 ± 0.0", "60.0 ± 0.0"],
        ["searched", "federated", "60.0 ± 0.0", "60.0 ± 0.0"],
    ]
    assert any(line.startswith("Validation F1") for line in tiny.lines())
    assert all(
        row["scores"]["mean"]["strict"]["f1"]["mean"] > 0.45 for row in table["rows"]
    )


def test_a_search_without_validation_scores_is_refused(tiny: Any) -> None:
    tiny.summary = lambda run: {
        "valid": {run.condition: {"mean": None, "sites": {"a": None}}}
    }
    with pytest.raises(
        ConfigError, match=r"'searched' is chosen by validation score, .*valid_fract"
    ):
        tiny.table(GRID)


# ---- jobs of the user ---------------------------------------------------------------

JOB = """\
method = "{method}"
{more}
[sites.north]
path = "north"
[sites.south]
path = "south"
"""


def own_job(folder: Path, method: str = "fedner", more: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "mine.toml"
    path.write_text(JOB.format(method=method, more=more), encoding="utf-8")
    return path


def test_an_experiment_runs_on_a_job_of_the_user(tiny: Any, tmp_path: Path) -> None:
    """All runs are of that job, and the results have a folder of their own.

    A job with the same text in another folder has other notes, so it has other runs.
    """
    tiny.write(GRID)
    path = own_job(tmp_path / "jobs")
    tiny.table(base=(str(path),), seed=(1,))
    assert {run.arguments[1] for run in tiny.executed} == {str(path)}
    assert (tmp_path / "out" / "fedner-tiny-mine" / "results.md").is_file()
    other_job = own_job(tmp_path / "elsewhere")
    folders = {run.folder for run in tiny.executed}
    tiny.table(base=(str(other_job),), seed=(1,))
    assert len({run.folder for run in tiny.executed}) == 2 * len(folders)


def test_a_finished_run_is_left_out_if_its_notes_have_changed(
    tiny: Any, tmp_path: Path
) -> None:
    """Otherwise a table would compare runs on different notes."""
    tiny.write(GRID)
    path = own_job(tmp_path / "jobs")
    tiny.table(base=(str(path),), seed=(1,))
    count = len(tiny.executed)
    for run in tiny.executed:
        write_json(run.folder / "job.json", {"notes": {"north": "of other notes"}})
    for site in ("north", "south"):
        (path.parent / site).mkdir()
    corpus(path.parent / "north" / "a.conll", "DRUG", "asp")
    corpus(path.parent / "south" / "a.conll", "DRUG", "ibu")
    with pytest.raises(ConfigError) as caught:
        tiny.table(base=(str(path),), seed=(1,))
    # The runs of all rows have the same reason, which is given once.
    assert str(caught.value).count("site 'north' has other data") == 1
    assert "restore the site's files, or give another `out`" in str(caught.value)
    (path.parent / "north" / "a.conll").unlink()  # a table needs no notes
    tiny.table(base=(str(path),), seed=(1,))
    assert len(tiny.executed) == count


def test_a_job_of_the_user_has_a_separate_note(tiny: Any, tmp_path: Path) -> None:
    """A note about the experiment's own corpora does not fit it."""
    tiny.write(
        GRID.replace(
            "[full]", 'note = "Of the corpora."\nown_note = "Of any job."\n[full]'
        )
    )
    tiny.table(seed=(1,))
    assert "Of the corpora." in tiny.lines()
    tiny.table(base=(str(own_job(tmp_path / "jobs")),), seed=(1,))
    page = tiny.lines("fedner-tiny-mine")
    assert "Of any job." in page
    assert "Of the corpora." not in page


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (
            ("{distill}",),
            "uses method 'distill', but .* needs a job of method 'fedner'",
        ),
        (("{fedner}.no",), "no such job file or built-in job"),
        (("other={fedner}",), "this experiment has no job 'other'"),
        (("{fedner}", "real={fedner}"), "mine.toml replaces 'real' already"),
    ],
)
def test_jobs_that_do_not_fit_the_experiment_are_refused(
    tiny: Any, tmp_path: Path, base: tuple[str, ...], message: str
) -> None:
    tiny.write(GRID)
    names = {m: str(own_job(tmp_path / m, m)) for m in ("fedner", "distill")}
    with pytest.raises(ConfigError, match=message):
        tiny.table(base=[text.format(**names) for text in base])


@pytest.mark.parametrize(
    ("setting", "job", "reason"),
    [
        (
            "sites.psytar.fraction=0.1",
            "",
            "sets .*, but .*mine.toml has no site 'psytar'",
        ),
        ("training.epoch=1", "", "mine.toml .*did you mean 'epochs'"),
        ("sites.*.fraction=0.1", "demo", r"but demo has no \[sites\.NAME\] tables"),
        ("model.project=8", "", "project = 8"),  # a key of contextual features
    ],
)
def test_a_row_whose_settings_do_not_fit_is_omitted_by_name(
    tiny: Any, tmp_path: Path, setting: str, job: str, reason: str
) -> None:
    """The other row runs. The output and the table say what is missing, and why."""
    grid = GRID.replace('set = ["preset=paper"]', f'set = ["{setting}"]', 1)
    lines: list[str] = []
    base = (job or str(own_job(tmp_path / "jobs")),)
    table = tiny.table(grid, base=base, seed=(1,), say=lines.append)
    assert re.search(f"^omitted: plain, federated: .*{reason}", lines[0])
    assert {row["label"] for row in table["rows"]} == {"searched"}
    assert {run.row.label for run in tiny.executed} == {"searched"}
    name = f"fedner-tiny-{table['base']['real'].rsplit('/')[-1].removesuffix('.toml')}"
    page = "\n".join(tiny.lines(name))
    assert re.search(f"(?m)^- plain, federated: .*{reason}", page)


def test_one_error_is_raised_if_nothing_can_run(tiny: Any, tmp_path: Path) -> None:
    """The job itself is wrong, so each row has the same reason."""
    tiny.write(GRID)
    path = own_job(tmp_path / "jobs")
    path.write_text(path.read_text(encoding="utf-8") + "pth = 'x'\n", encoding="utf-8")
    expected = (
        r"^no run of this experiment is possible: .*mine.toml \[sites.south\]: unknown key 'pth': "
        r"did you mean 'path'\?$"
    )
    with pytest.raises(ConfigError, match=expected):
        tiny.table(base=(str(path),))
    assert tiny.executed == []


def test_a_refused_run_is_omitted_with_the_runs_that_start_from_it(
    tiny: Any, tmp_path: Path
) -> None:
    """The run of a refused model is omitted too. Rows that do not need it run."""
    tiny.write(SEVERAL.replace('base = "bc5cdr"\n', ""), "bert")
    tiny.summary = of_finetuning
    task, notes = (
        own_job(tmp_path / "task", "finetune"),
        own_job(tmp_path / "notes", "pretrain"),
    )
    tiny.refusal = lambda job: (
        "site 'north': too few steps" if job.method == "pretrain" else ""
    )
    lines: list[str] = []
    table = tiny.table(base=(str(task), f"pretrain={notes}"), say=lines.append)
    assert lines[0] == (
        "omitted: mine, pre-trained, federated: it starts from the model 'central', which cannot "
        "be trained: site 'north': too few steps"
    )
    assert [run.arguments[1] for run in tiny.executed] == [str(task)]
    assert [row["label"] for row in table["rows"]] == ["mine, base"]

    tiny.refusal = lambda job: f"no {job.method}"
    with pytest.raises(
        ConfigError, match=r"is possible: \(1\) it starts .*; \(2\) no finetune$"
    ):
        tiny.table(base=(str(task), f"pretrain={notes}"), seed=(2,))


def test_a_search_without_validation_data_holds_out_training_data(
    tiny: Any, tmp_path: Path
) -> None:
    """Each condition has four trials on the first seed, for the search only.

    The runs of the table train on all data, on five seeds, and the table says so.
    """

    def summary(run: GridRun) -> dict[str, Any]:
        scores = summary_of(run)
        if run.choice and not run.is_trial:
            scores["valid"] = {run.condition: {"mean": None, "sites": {"a": None}}}
        return scores

    tiny.summary = summary
    path = own_job(tmp_path / "jobs")
    text = path.read_text(encoding="utf-8").replace(
        'path = "north"\n', 'path = "north"\nvalid_fraction = 0\n'
    )
    path.write_text(
        text.replace('path = "south"\n', 'path = "south"\nvalid_fraction = 0\n')
    )
    table = tiny.table(GRID, base=(str(path),))
    searched = [run for run in tiny.executed if run.row.label == "searched"]
    for condition in ("alone", "federated"):
        runs = [run for run in searched if run.condition == condition]
        trials = [run for run in runs if "sites.*.hold_out=0.15" in run.arguments]
        assert [run.seed for run in trials] == [1] * 4
        finals = [run for run in runs if run not in trials]
        assert [run.seed for run in finals] == [1, 2, 3, 4, 5]
        assert {choice_of(run) for run in finals} == {BEST[condition]}
    assert not any(
        "hold_out" in word
        for run in tiny.executed
        if run not in searched
        for word in run.arguments
    )
    page = "\n".join(tiny.lines(table["name"]))
    assert "For the search alone, 15% of the training sentences were held out" in page


def test_a_row_keeps_the_keys_that_it_sets(tiny: Any) -> None:
    """The user's settings reach the other rows, and the output says so.

    A key that a row searches is its own, too.
    """
    other_row = '[[runs]]\nlabel = "other"\nconditions = ["federated"]\n'
    lines: list[str] = []
    settings = ("preset=best", "training.learning_rate=0.01", "training.epochs=7")
    tiny.table(GRID + other_row, settings=settings, say=lines.append, seed=(1,))
    for run in tiny.executed:
        assert "training.epochs=7" in run.arguments
        assert ("preset=best" in run.arguments) == (run.row.label == "other")
        assert ("training.learning_rate=0.01" in run.arguments) == (
            run.row.label != "searched"
        )
    assert lines[:2] == [
        "`settings` preset=best does not apply to 'plain', 'searched': they set this key themselves",
        "`settings` training.learning_rate=0.01 does not apply to 'searched': they set this key themselves",
    ]
    page = "\n".join(tiny.lines())
    assert (
        "`preset=best` does not apply to 'plain', 'searched': they set this key themselves."
        in page
    )
    assert "Changed settings: `preset=best`, `training.learning_rate=0.01`" in page


def test_the_note_about_the_budget_says_if_settings_were_changed(tiny: Any) -> None:
    tiny.write(GRID.replace("[full]", 'note = "Budget: six epochs."\n[full]'))
    tiny.table(seed=(1,))
    assert "Budget: six epochs." in tiny.lines()
    tiny.table(seed=(1,), settings=("training.epochs=7",))
    assert "Budget, before the changed settings: six epochs." in tiny.lines()


@pytest.mark.parametrize(
    ("setting", "key", "expected"),
    [
        ("model.encoder={central}", "model.encoder", True),
        ("model={}", "model.encoder", True),
        ("model.classifier.C=1", "model.classifier", True),
        ("sites.*.fraction=0.1", "sites.cadec.fraction", True),
        ("sites.cadec.fraction=0.1", "sites.*.fraction", True),
        ("sites.cadec.fraction=0.1", "sites.ade.fraction", False),
        ("model.encoder={central}", "model.encoders", False),
        ("training.epochs=1", "training.epoch", False),
    ],
)
def test_a_setting_affects_its_key_the_tables_above_and_the_parts_below(
    setting: str, key: str, expected: bool
) -> None:
    assert is_set_by((setting,), key) is expected


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("seed", True),
        ("seed.number", False),
        ("training.epochs", True),
        ("training.epoch", False),
        ("training.tags", False),  # the job fills it in
        ("model.kind", True),
        ("model.kinds", False),
        ("sites.north.fraction", True),
        ("sites.*.fractions", False),
        ("privacy.epsilon", True),
        ("privacy.epsilons", False),
        ("federation.min_sites", True),
        ("federation.sites", False),
        ("silos.number", True),
        ("silos.numbers", False),
        ("tags.a", False),
        ("anything", False),
    ],
)
def test_every_part_of_a_key_must_be_known(key: str, expected: bool) -> None:
    assert has_key("fedner/real", key) is expected


def test_keys_below_a_table_of_free_names_are_known() -> None:
    needs_app("phenotyping")
    assert has_key("phenotype/demo", "phenotypes.anything")
    assert has_key("phenotype/demo", "concepts.vectors")
    assert not has_key("phenotype/demo", "concepts.vector")
    assert not has_key("fedner/real", "phenotypes.anything")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("privacy.epsilons=8", "did you mean 'epsilon'"),
        ("preset=best", "every row of this experiment sets preset itself"),
        ("seed=3", "give `seed` instead"),
        ("conditions=['alone']", "set their conditions"),
        ("training.epoch=1", "did you mean 'epochs'"),
        ("training.cycles=1", "unknown key 'cycles'"),
    ],
)
def test_a_setting_that_reaches_no_run_is_refused(
    tiny: Any, setting: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny.table(GRID, settings=(setting,))
    assert tiny.executed == []


def test_settings_reach_the_runs_that_train_models(tiny: Any, tmp_path: Path) -> None:
    """A key that only one of the two methods has reaches only its run.

    The device reaches every run.
    """
    tiny.write(SEVERAL, "bert")
    tiny.summary = of_finetuning
    task, notes = (
        own_job(tmp_path / "task", "finetune"),
        own_job(tmp_path / "notes", "pretrain"),
    )
    base = (str(task), f"pretrain={notes}")
    settings = ("training.cycles=5", "training.masked=0.2", "model.encoder=x")
    tiny.table(base=base, settings=settings, device="cpu:0")
    first, last = tiny.executed
    for run in tiny.executed:
        assert "training.cycles=5" in run.arguments
        assert run.arguments[-2:] == ("--device", "cpu:0")
    assert "training.masked=0.2" in first.arguments
    assert "training.masked=0.2" not in last.arguments
    assert "model.encoder=x" in first.arguments
    assert f"model.encoder={first.folder}/pooled/model" in last.arguments
    assert "model.encoder=x" not in last.arguments


def test_the_device_of_the_command_reaches_every_run(
    tiny: Any, tmp_path: Path, run_cli: Any
) -> None:
    tiny.write(GRID)
    words = ("--seeds", 1, "--workers", 1, "--device", "cpu:0", "--json")
    code, _, err = run_cli("reproduce", tiny.name, "--out", tmp_path / "out", *words)
    assert code == 0, err
    assert {run.arguments[-2:] for run in tiny.executed} == {("--device", "cpu:0")}


def of_finetuning(run: GridRun) -> dict[str, Any]:
    """Return a made-up summary with the only column of SEVERAL."""
    condition_scores = {run.condition: {"strict": {"f1": 0.5}}}
    return {
        "sites": {},
        "mean": condition_scores,
        "micro": condition_scores,
        "conditions": {run.condition: {}},
    }


def test_the_command_without_a_name_lists_all_experiments() -> None:
    titles = list_experiments()
    assert list(titles) == list(list_grid_files())
    assert all(title and "\n" not in title for title in titles.values())
    result = CliRunner().invoke(app, ["reproduce"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for name, title in titles.items():
        assert re.search(rf"(?m)^\s*{name} +{re.escape(title)}", result.output), name


def test_every_f1_has_its_precision_and_recall_beside_it() -> None:
    for name in list_grid_files():
        columns = load_grid(name)[0].columns
        for column in columns:
            if column.endswith(" f1"):
                stem = column.removesuffix("f1")
                assert {f"{stem}precision", f"{stem}recall"} <= {*columns}, name


def test_precision_and_recall_of_each_site_have_tables(tiny: Any) -> None:
    """Means and deviations over two seeds of made-up rates, by hand."""

    def rates(run: GridRun) -> dict[str, Any]:
        at = {1: 0.0, 2: 0.02}[run.seed]
        strict = {"precision": 0.5 + at, "recall": 0.4 + at, "f1": 0.44}
        relaxed = {"precision": 0.8, "recall": 0.7 + at, "f1": 0.75}
        condition_scores = {run.condition: {"strict": strict, "relaxed": relaxed}}
        return {"sites": {"a": condition_scores}, "mean": condition_scores}

    tiny.summary = rates
    tiny.table(
        GRID[: GRID.rindex("[[runs]]")].replace('pairs = [["', 'x = ""\n# [["'),
        seed=(1, 2),
    )
    rows = tiny.cells()
    cells = [row[2:] for row in rows if row[:2] == ["plain", "federated"]]
    strict, relaxed = "51.0 ± 1.4 / 41.0 ± 1.4", "80.0 ± 0.0 / 71.0 ± 1.4"
    assert cells[1:] == [[strict] * 2, [relaxed] * 2]
    page = "\n".join(tiny.lines())
    assert page.index("Precision / recall in percent, strict:") < page.index(
        "percent, relaxed:"
    )


def test_all_tables_of_a_page_use_the_same_name_for_a_condition(tiny: Any) -> None:
    """The tables of precision and recall name local fine-tuning, too."""

    def rates(run: GridRun) -> dict[str, Any]:
        score = dict.fromkeys(("precision", "recall", "f1"), 0.5)
        condition_scores = {run.condition: dict.fromkeys(("strict", "relaxed"), score)}
        return {"sites": {"a": condition_scores}, "mean": condition_scores}

    tiny.summary = rates
    tiny.table(GRID[: GRID.rindex("[[runs]]")].replace("paper", "best"), seed=(1,))
    conditions = [row[1] for row in tiny.cells() if row[0] == "plain"]
    assert conditions == ["federated + local fine-tuning"] * 3


run_command = work.run_command  # the fixture `tiny` replaces it within tests


def test_a_failed_run_reports_its_first_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not report a later error, nor what an earlier run wrote into the log."""
    run = GridRun(
        Row("a", ("alone",)),
        "alone",
        1,
        tmp_path / "runs" / "x",
        ("simulate", "job.toml"),
    )

    def call(command: object, stdout: IO[str], **others: object) -> int:
        stdout.write(next(outputs))
        return 2

    monkeypatch.setattr(work, "run_child_process", call)
    several = "a note\nerror: f:1: bad\nerror: f:2: bad\nerror: a hint\n"
    outputs = iter(("error: old\n", several, "x\n"))
    for expected in ("old", "f:1: bad", "x"):
        with pytest.raises(FednotesError) as failure:
            run_command(run)
        assert str(failure.value) == f"{expected} (in: fednotes simulate job.toml)"


def test_the_log_of_a_run_is_not_appended_to_the_target_of_a_link(
    tmp_path: Path,
) -> None:
    """Another user of the machine may have put it there."""
    target = tmp_path / "precious"
    target.write_text("text")
    (tmp_path / "x.log").symlink_to(target)
    with pytest.raises(OSError, match="symbolic link"):
        run_command(GridRun(Row("a", ("alone",)), "alone", 1, tmp_path / "x", ()))
    assert target.read_text() == "text"


def test_a_log_of_a_run_that_is_a_fifo_is_refused(tmp_path: Path) -> None:
    """Without a reader, it would keep the run waiting; with one, it would be read."""
    run = GridRun(Row("a", ("alone",)), "alone", 1, tmp_path / "x", ())
    os.mkfifo(tmp_path / "x.log")
    with pytest.raises(OSError, match="No such device"):
        run_command(run)
    reader = os.open(tmp_path / "x.log", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(OSError, match="not a regular file"):
            run_command(run)
    finally:
        os.close(reader)


def test_concurrent_runs_use_the_gpus_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs at a time on three GPUs use two of them; the device of others stays."""
    monkeypatch.setattr(dealing, "count_gpus", lambda: 3)
    devices: list[str] = []
    monkeypatch.setattr(
        work, "run_command", lambda run: devices.append(run.arguments[-1])
    )
    row = Row("a", ("alone",))
    runs = [
        GridRun(row, "alone", 1, tmp_path / name, ("simulate", "--device", "cuda:*"))
        for name in "abcd"
    ]
    several = work.Work(
        2,
        device="cuda:*",
        on_run=lambda *_: None,
        say=lambda _: None,
        confirm=None,
    )
    several.carry_out(runs)
    assert set(devices) <= {"cuda:0", "cuda:1"}
    assert len(devices) == 4
    one = replace(runs[0], arguments=("simulate", "--device", "cuda:1"))
    assert work.assign_device(one, "cuda:0") == one


SEVERAL = """\
title = "Several"
base = "maccrobat"
columns = ["micro strict f1"]
[budget]
seeds = [1]
[full]
seeds = [1]
[[before]]
name = "central"
base = "pretrain"
condition = "pooled"
budget = ["sites.codiesp.max_notes=4"]
own = ["sites.*.max_notes=9"]
[[runs]]
label = "{job}, pre-trained"
conditions = ["federated"]
set = ["model.encoder={central}"]
[[runs]]
label = "{job}, base"
base = "bc5cdr"
conditions = ["federated"]
"""


def test_rows_of_a_job_that_was_not_replaced_are_omitted(
    tiny: Any, tmp_path: Path
) -> None:
    """The job that trains a model from which rows start must be replaced, too."""
    tiny.summary = of_finetuning
    tiny.write(SEVERAL, "bert")
    task, notes = (
        own_job(tmp_path / "task", "finetune"),
        own_job(tmp_path / "notes", "pretrain"),
    )
    with pytest.raises(
        ConfigError, match=r"`base` as pretrain=JOB, or that one as pretrain=bert/pret"
    ):
        tiny.table(base=(str(task),))
    assert tiny.executed == []
    with pytest.raises(ConfigError, match="the experiment's own job is missing"):
        tiny.table(base=(f"pretrain={notes}",))
    lines: list[str] = []
    table = tiny.table(base=(str(task), f"pretrain={notes}"), say=lines.append)
    reason = "to run the rows of job 'bc5cdr', give your own job with `base` bc5cdr=JOB"
    assert lines[0] == f"omitted: bc5cdr, base: {reason}"
    assert f"- bc5cdr, base: {reason}" in tiny.lines(table["name"])
    assert [run.arguments[1] for run in tiny.executed] == [str(notes), str(task)]
    assert "sites.*.max_notes=9" in tiny.executed[0].arguments
    assert not any("codiesp" in word for word in tiny.executed[0].arguments)
    assert [row["label"] for row in table["rows"]] == ["mine, pre-trained"]


def test_the_page_of_the_command_names_options_in_place_of_parameters(
    tiny: Any, tmp_path: Path
) -> None:
    tiny.summary = of_finetuning
    tiny.write(SEVERAL, "bert")
    task = own_job(tmp_path / "task", "finetune")
    notes = own_job(tmp_path / "notes", "pretrain")
    options = ["--out", str(tmp_path / "out"), "--workers", "1"]
    options += ["--base", str(task), "--base", f"pretrain={notes}"]
    result = CliRunner().invoke(app, ["reproduce", tiny.name, *options])
    assert result.exit_code == 0, result.output
    page = "\n".join(tiny.lines("bert-tiny-mine"))
    for text in (result.output, page):
        assert "give your own job with --base bc5cdr=JOB" in " ".join(text.split())
        assert "`base`" not in text


def test_a_pair_of_rows_is_tested_for_each_job(tiny: Any) -> None:
    """Both rows of the pair have `{job}` in their labels."""
    rows = "".join(
        f'[[runs]]\nlabel = "{{job}}, {label}"\nbase = "{job}"\nconditions = ["federated"]\n'
        for job in ("real", "paper")
        for label in ("a", "b")
    )
    head = GRID[: GRID.index("[[runs]]")]
    old_pair, new_pair = (
        ("searched/federated", "{job}, a/federated"),
        ("plain/federated", "{job}, b/federated"),
    )
    table = tiny.table(head.replace(*old_pair).replace(*new_pair) + rows)
    assert [(pair["first"], pair["second"]) for pair in table["pairs"]] == [
        (f"{job}, a, federated", f"{job}, b, federated") for job in ("real", "paper")
    ]
    assert "3 seeds: no difference is claimed." in tiny.lines()


# What a job of each method with two sites needs besides them.
CORPORA = {
    "fedner": '[model]\nword_vectors = "glove.txt"\ncontextual = "minilm"',
    "distill": '[tags]\ndesign = "disjoint"\ntypes = ["A", "B"]',
    "finetune": "",
    "pretrain": "",
    "personal": "",
    "fedmd": "",
}


class Planned(Exception):
    """All runs were planned."""


@pytest.fixture
def no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first run raise Planned; no run is rehearsed."""

    def stop(run: GridRun) -> None:
        raise Planned

    folders = (
        "FEDNOTES_CORPORA",
        "FEDNOTES_BACKBONE",
        "I2B2_2010",
        "I2B2_2012",
        "MIMIC_III",
    )
    for name in (
        *folders,
        "BERT_BASE",
        "UMLS_RRF",
        "I2B2_OBESITY",
        "CLINIC",
        "ONTONOTES",
    ):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr(work, "run_command", stop)
    monkeypatch.setattr(Rehearsal, "try_job", lambda rehearsal, job: "")
    monkeypatch.setattr(module, "require_notes", lambda *args: None)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", loadable(list_grid_files()))
@pytest.mark.usefixtures("no_run")
def test_every_experiment_plans_on_the_papers_corpora(
    name: str, full: bool, tmp_path: Path
) -> None:
    grid, path = load_grid(name)
    jobs = PAPERS[path.parent.name]
    # experiments of no paper are run as they are
    replaced = grid.list_job_names() if grid.base in jobs else ()
    base = [f"{job}={jobs[job]}" for job in replaced if job in jobs]
    with pytest.raises(Planned):
        reproduce(name, tmp_path / "out", full=full, seed=(1,), base=base)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    "name", [n for n in list_grid_files() if not n.startswith("phenotype")]
)
@pytest.mark.usefixtures("no_run")
def test_every_experiment_plans_on_other_sites(
    name: str, full: bool, tmp_path: Path
) -> None:
    """The settings of all rows fit a job of the same method."""
    grid, path = load_grid(name)
    base = []
    for job in grid.list_job_names():
        method = load_job(f"{path.parent.name}/{job}").method
        job_file = own_job(tmp_path / job, method, CORPORA[method])
        base.append(f"{job}={job_file}")
    with pytest.raises(Planned):
        reproduce(name, tmp_path / "out", full=full, seed=(1,), base=base)


def test_a_user_can_stop_after_the_first_run(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run takes two hours, so the person is asked before the second begins."""
    tiny.write(GRID)
    clock = iter(range(0, 10**6, 7200))
    monkeypatch.setattr(work.time, "monotonic", lambda: float(next(clock)))
    questions: list[str] = []

    def no(line: str) -> None:
        questions.append(line)
        raise FednotesError("no")

    with pytest.raises(FednotesError, match="no"):
        tiny.table(workers=2, confirm=no)
    assert len(tiny.executed) == 1
    assert questions[0] == (
        "about 20 h 00 min for 20 more runs, if each takes as long as the first "
        "(2 h 00 min) and up to 2 run at a time"
    )


def test_a_single_remaining_run_takes_as_long_as_the_first(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second worker has nothing to do."""
    tiny.write(GRID)
    lines: list[str] = []
    questions: list[str] = []
    tiny.table()
    first, second = (run.folder for run in tiny.executed[:2])
    for folder in (first, second):
        (folder / "summary.json").unlink()
    clock = iter(range(0, 10**6, 7200))
    monkeypatch.setattr(work.time, "monotonic", lambda: float(next(clock)))
    tiny.table(workers=2, confirm=questions.append, say=lines.append)
    assert questions == lines[1:]
    assert lines[1] == (
        "about 2 h 00 min for 1 more run, if each takes as long as the first "
        "(2 h 00 min) and up to 2 run at a time"
    )


GAP = """\
title = "Tiny"
base = "real"
[budget]
seeds = [1, 2, 3]
[full]
seeds = [1]
[[runs]]
label = "silos"
conditions = ["alone", "federated"]
gap = ["silos/alone", "place/pooled"]
[[runs]]
label = "near"
conditions = ["federated"]
set = ["training.private=[]"]
gap = ["silos/alone", "silos/alone"]
[[runs]]
label = "place"
conditions = ["pooled"]
"""
ENDS = {"alone": 0.4, "federated": 0.55, "pooled": 0.6}


@pytest.mark.parametrize(
    "columns", [(), ("micro strict f1", "MB a site", "mean masked loss")]
)
def test_a_row_shows_how_much_of_the_gap_it_closes(
    tiny: Any, columns: tuple[str, ...]
) -> None:
    """Shares are computed seed by seed; for a loss less is better.

    There is no gap between equal ends.
    """

    def summary(run: GridRun) -> dict[str, Any]:
        f1 = ENDS[run.condition] + NOISE[run.seed] * (run.condition != "alone")
        scores = {k: {"f1": 0.5 if columns else f1} for k in ("strict", "relaxed")}
        condition_scores = {run.condition: {**scores, "masked": {"loss": 1 - f1}}}
        costs = {"seconds": 1, "rounds": 1, "bytes_up": 2_000_000}
        return {
            "sites": {"a": condition_scores},
            "mean": condition_scores,
            "micro": condition_scores,
            "conditions": {run.condition: costs},
        }

    tiny.summary = summary
    head = f"columns = {list(columns)}\n" if columns else ""
    table = tiny.table(head + GAP)
    rows = {(row["label"], row["condition"]): row["gap"] for row in table["rows"]}
    width = 0.2 + fmean(NOISE[seed] for seed in (1, 2, 3))
    shares = [(0.15 + NOISE[seed]) / width for seed in (1, 2, 3)]
    gap = rows["silos", "federated"]
    assert gap["mean"] == pytest.approx(fmean(shares))
    assert gap["std"] == pytest.approx(stdev(shares))
    assert rows["near", "federated"] == {"why": "pooled - alone is within noise"}
    assert rows["silos", "alone"] == rows["place", "pooled"] == {}
    cells = {(row[0], row[1].split(" ")[0]): row[-1] for row in tiny.cells()[1:]}
    assert cells["silos", "federated"] == f"{fmean(shares):.2f} ± {stdev(shares):.2f}"
    assert cells["near", "federated"] == "pooled - alone is within noise"
    assert cells["place", "pooled"] == ""


def test_a_run_without_the_score_shows_no_gap(tiny: Any) -> None:
    """A missing loss does not count as 0, which would be the best."""

    def summary(run: GridRun) -> dict[str, Any]:
        loss = (
            None
            if run.condition == "federated"
            else 1 - ENDS[run.condition] - NOISE[run.seed]
        )
        condition_scores = {run.condition: {"masked": {"loss": loss}}}
        costs = {"seconds": 1, "rounds": 1, "bytes_up": 2_000_000}
        return {
            "sites": {"a": condition_scores},
            "mean": condition_scores,
            "micro": condition_scores,
            "conditions": {run.condition: costs},
        }

    tiny.summary = summary
    table = tiny.table('columns = ["mean masked loss"]\n' + GAP)
    rows = {(row["label"], row["condition"]): row["gap"] for row in table["rows"]}
    assert rows["silos", "federated"] == {"why": "a run has no score"}
