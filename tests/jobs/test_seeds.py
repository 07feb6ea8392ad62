"""Runs of one job with several seeds: their summary, and resuming after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
from rich.console import Console
from scipy import stats
from tiny_jobs import TABLE
from typer.testing import CliRunner

import fednotes as fn
from fednotes.cli.app import app
from fednotes.cli.display import make_seeds_table
from fednotes.core.errors import ConfigError, DataError
from fednotes.jobs.results import read_result
from fednotes.jobs.seeds import (
    SEEDS_FILE,
    SeedsResult,
    parse_seeds,
    read_seeds,
    simulate_seeds,
    summarise_runs,
)

pytestmark = pytest.mark.usefixtures("few_sentences")
SITES = ("discharge", "reports", "posts")
JOB = """
method = "fedner"
conditions = ["alone", "federated"]
[synthetic]
sites = 2
sentences = 30
[training]
epochs = 6
batch_size = 24
[model]
tagger = "cnn-clstm-crf"
hashed_words = 64
word_dim = 4
char_dim = 4
char_filters = 6
cnn_filters = 8
lstm_units = 4
"""


def job(**changes: Any) -> fn.Job:
    return fn.job({**TABLE, "conditions": ["alone", "federated"], **changes})


@pytest.fixture(scope="module")
def finished_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SeedsResult]:
    out = tmp_path_factory.mktemp("seeds") / "runs"
    return out, fn.simulate(job(), out, seeds=(1, 2, 7))


@pytest.mark.parametrize(
    ("text", "seeds"),
    [
        ("1-5", (1, 2, 3, 4, 5)),
        ("1,2,7", (1, 2, 7)),
        ("3", (3,)),
        ("5-6, 0", (5, 6, 0)),
    ],
)
def test_seeds_can_be_numbers_and_ranges(text: str, seeds: tuple[int, ...]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected numbers or ranges, such as 1-5 or 1,2,7"),
        ("one", "expected numbers or ranges"),
        ("1-", "has no end"),
        ("-1", "expected numbers or ranges"),
        ("1-x", "expected numbers or ranges"),
        ("5-1", "the range '5-1' is empty"),
        ("1,2,1-3", "occurs twice"),
        ("1-100000", "at most 1,000 seeds"),
    ],
)
def test_a_text_without_seeds_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_seeds(text)


@pytest.mark.slow
def test_each_seed_gives_the_run_of_that_seed_alone(
    finished_runs, tmp_path: Path
) -> None:
    out, _ = finished_runs
    alone = fn.simulate(job(seed=7), tmp_path / "run")
    same = read_result(out / "seed-7")
    assert (same.sites, same.seed) == (alone.sites, 7)
    assert (
        out / "seed-7" / "federated" / "sites" / "posts" / "model" / "README.md"
    ).is_file()


@pytest.mark.slow
def test_means_and_deviations_are_over_the_seeds(finished_runs) -> None:
    """Oracles: `statistics` for the table, SciPy's test of two related samples for the
    pairs."""
    out, result = finished_runs
    runs = [read_result(out / f"seed-{seed}") for seed in (1, 2, 7)]
    assert result.seeds == [1, 2, 7]
    assert {*result.sites} == {*SITES}
    for site in SITES:
        for condition in ("alone", "federated"):
            for measure in ("precision", "recall", "f1"):
                values = [run.sites[site][condition]["strict"][measure] for run in runs]
                statistics = result.sites[site][condition]["strict"][measure]
                expected = {"mean": mean(values), "std": stdev(values), "n": 3}
                assert statistics == pytest.approx(expected)
    f1s = [run.micro["federated"]["strict"]["f1"] for run in runs]
    expected = {"mean": mean(f1s), "std": stdev(f1s), "n": 3}
    assert result.micro["federated"]["strict"]["f1"] == pytest.approx(expected)
    sent = [run.bytes_up for run in runs]
    expected = {"mean": mean(sent), "std": stdev(sent), "n": 3}
    assert result.bytes_up == pytest.approx(expected)
    tests = {each.site: each for each in result.differences}
    assert [*tests] == [*SITES, ""]
    for site, test in tests.items():
        f1s = [
            [(run.sites[site] if site else run.mean)[c]["strict"]["f1"] for run in runs]
            for c in ("federated", "alone")
        ]
        assert test.mean == pytest.approx(mean(f1s[0]) - mean(f1s[1]), abs=1e-12)
        expected = stats.ttest_rel(*f1s)
        if stdev(a - b for a, b in zip(*f1s, strict=True)) > 1e-9:
            low, high = expected.confidence_interval()
            assert (test.p_value, test.low, test.high) == pytest.approx(
                (expected.pvalue, low, high)
            )
    assert result.notes == ["3 seeds: no difference is claimed with fewer than 5"]
    assert read_seeds(out) == result
    row = result.table()[0]
    assert (row["site"], row["condition"]) == ("discharge", "alone")
    assert (
        row["strict_f1_mean"]
        == result.sites["discharge"]["alone"]["strict"]["f1"]["mean"]
    )


def test_two_seeds_have_no_paired_test(finished_runs) -> None:
    out, _ = finished_runs
    result = summarise_runs([read_result(out / f"seed-{seed}") for seed in (1, 2)])
    assert result.differences == []
    assert "no paired test: it needs 3 seeds or more" in result.notes[0]


def test_a_difference_is_claimed_only_with_five_seeds(finished_runs) -> None:
    out, _ = finished_runs
    results = [read_result(out / f"seed-{seed}") for seed in (1, 2, 7, 1, 2)]
    assert "4 seeds: no difference is claimed" in summarise_runs(results[:4]).notes[0]
    assert summarise_runs(results).notes == []
    assert summarise_runs(results).differences[0].n == 5


def test_finished_seeds_are_not_run_again(
    finished_runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, result = finished_runs
    monkeypatch.setattr("fednotes.jobs.seeds.simulate", None)  # a call would fail
    assert fn.simulate(job(), out, seeds=[1, 2, 7], resume=True) == result
    fewer = fn.simulate(job(), out, seeds=[1, 2], resume=True)
    assert fewer.seeds == [1, 2]
    assert fn.simulate(job(), out, seeds=[1, 2, 7], resume=True) == result


def test_a_folder_of_another_job_or_of_other_files_is_refused(
    finished_runs, tmp_path: Path
) -> None:
    out, _ = finished_runs
    with pytest.raises(ConfigError, match="holds runs of several seeds already"):
        simulate_seeds(job(), out, [1])
    shorter_job = job(training={"epochs": 1})
    refusal = (
        "seed-1 holds a run of another job, or of this job with different settings "
    )
    with pytest.raises(ConfigError, match=refusal):
        simulate_seeds(shorter_job, out, [1], resume=True)
    with pytest.raises(ConfigError, match=r"seed-1 holds a run of another job"):
        simulate_seeds(shorter_job, out, [3], resume=True)
    assert not (out / "seed-3").exists()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("")
    with pytest.raises(
        ConfigError, match="is neither a folder of runs of several seeds nor empty"
    ):
        simulate_seeds(job(), tmp_path / "notes", [1], overwrite=True)
    with pytest.raises(DataError, match=r"contains no seeds\.json"):
        read_seeds(tmp_path)
    for wrong in ([], [1, 1], [-1], [True], ["1"]):
        with pytest.raises(ConfigError, match=r"^seeds"):
            simulate_seeds(job(), tmp_path / "new", wrong)


@pytest.mark.slow
def test_conditions_can_be_added_to_the_runs_of_seeds(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    small = {"synthetic": {"sites": 2, "sentences": 12}, "training": {"epochs": 1}}
    fn.simulate(job(**small, conditions=["federated"]), out, seeds=[1, 2])
    both = job(**small, conditions=["alone", "federated"])
    result = fn.simulate(both, out, seeds=[1, 2], resume=True)
    assert [*result.mean] == ["alone", "federated"]
    assert result.mean["alone"]["strict"]["f1"]["n"] == 2


def test_resuming_warns_only_if_no_seed_was_run(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    small = {"synthetic": {"sites": 1, "sentences": 12}, "conditions": ["alone"]}
    result = fn.simulate(job(**small), out, seeds=[1], resume=True)
    assert result.notes[0].startswith(f"there is no run in {out} to resume")
    more = fn.simulate(job(**small), out, seeds=[1, 2], resume=True)
    assert not [note for note in more.notes if "resume" in note]
    assert not [note for note in read_result(out / "seed-2").notes if "resume" in note]


def test_models_of_every_seed_have_cards(finished_runs) -> None:
    out, _ = finished_runs
    for seed in (1, 2, 7):
        models = list((out / f"seed-{seed}").rglob("model"))
        assert models
        assert all((model / "README.md").is_file() for model in models)


def test_overwriting_keeps_the_earlier_runs(tmp_path: Path) -> None:
    short = job(conditions=["federated"], training={"rounds": 1, "batch_size": 24})
    simulate_seeds(short, tmp_path / "runs", [1])
    simulate_seeds(short, tmp_path / "runs", [2], overwrite=True)
    assert read_seeds(tmp_path / "runs").seeds == [2]
    assert read_seeds(tmp_path / "runs.previous").seeds == [1]
    assert not (tmp_path / "runs" / "seed-1").exists()


def test_progress_shows_the_seed(tmp_path: Path) -> None:
    short = job(conditions=["federated"], training={"rounds": 1, "batch_size": 24})
    parts: list[str] = []
    fn.simulate(
        short,
        tmp_path / "runs",
        seeds=[3, 4],
        progress=lambda part, _: parts.append(part),
    )
    assert list(dict.fromkeys(parts)) == ["seed-3/federated", "seed-4/federated"]


def test_the_command_shows_the_scores_on_all_test_data_and_the_traffic(
    finished_runs,
) -> None:
    _, result = finished_runs
    console = Console(width=80, file=StringIO(), record=True)
    console.print(make_seeds_table(result))
    text = console.export_text()
    f1 = result.micro["federated"]["strict"]["f1"]
    row = text[text.index("micro") :].partition("micro: ")[0]
    assert f"{100 * f1['mean']:.1f} ± {100 * f1['std']:.1f}" in row
    up = result.bytes_up["mean"] / 1e6 / len(SITES)
    assert f"federated training, a site: {up:.2f} ± " in text


def test_the_page_of_several_seeds_shows_the_means(finished_runs) -> None:
    out, result = finished_runs
    page = fn.write_report(out).read_text("utf-8")
    f1 = result.mean["federated"]["strict"]["f1"]
    assert f"<td>{100 * f1['mean']:.1f} ± {100 * f1['std']:.1f}</td>" in page
    assert 'href="seed-7/report.html"' in page
    test = result.differences[-1]
    assert (
        f"<td>{100 * test.low:+.1f} to {100 * test.high:+.1f}</td>"
        f"<td>{test.p_value:.4f}</td>" in page
    )


def test_a_result_of_a_later_fednotes_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / SEEDS_FILE).write_text('{"version": 99}')
    with pytest.raises(DataError, match="its version is 99"):
        read_seeds(tmp_path)


def test_the_command_refuses_two_kinds_of_seeds(tmp_path: Path) -> None:
    words = [
        "simulate",
        "demo",
        "--out",
        str(tmp_path / "x"),
        "--seeds",
        "1-2",
        "--set",
        "seed=3",
    ]
    with pytest.raises(ConfigError, match="--seeds and --set seed"):
        CliRunner().invoke(app, words, catch_exceptions=False)


def command(folder: Path, out: str, *words: str) -> subprocess.Popen[str]:
    """Start `fednotes simulate` with three seeds."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "fednotes", "simulate", "job.toml", "--out", out),
            *("--seeds", "1-3", *words),
        ],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "80",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_a_killed_run_of_several_seeds_resumes_to_the_same_result(
    tmp_path: Path,
) -> None:
    """Killed in the middle of the second seed; the first one is not run again."""
    (tmp_path / "job.toml").write_text(JOB)
    killed = command(tmp_path, "killed")
    end = time.monotonic() + 200
    while not list((tmp_path / "killed/seed-2").glob("*/**/checkpoints/round-*")):
        assert killed.poll() is None, killed.communicate()
        assert time.monotonic() < end
        time.sleep(0.002)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    first = tmp_path / "killed/seed-1/summary.json"
    modified = first.stat().st_mtime_ns
    assert not (tmp_path / "killed/seed-2/summary.json").exists()
    assert not (tmp_path / "killed" / SEEDS_FILE).exists()

    resumed = command(tmp_path, "killed", "--resume")
    output, _ = resumed.communicate(timeout=400)
    assert resumed.returncode == 0, output
    assert first.stat().st_mtime_ns == modified
    assert "seed 1 (1 of 3)" not in output
    assert "seed 2 (2 of 3)" in output
    assert "mean ± SD of 3 seeds" in output
    assert all(
        len(line) <= 80 for line in output.partition("report: ")[2].splitlines()[1:]
    )
    assert (tmp_path / "killed/seed-3/report.html").is_file()

    uninterrupted = command(tmp_path, "whole")
    output, _ = uninterrupted.communicate(timeout=400)
    assert uninterrupted.returncode == 0, output
    results = [
        json.loads((tmp_path / out / SEEDS_FILE).read_text())
        for out in ("killed", "whole")
    ]
    commands = [result.pop("command") for result in results]
    assert results[0] == results[1]
    assert commands == [
        f"fednotes simulate job.toml --out {out} --seeds 1-3"
        for out in ("killed", "whole")
    ]
