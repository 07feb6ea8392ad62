"""Every experiment runs to its table, on stand-ins of the papers' corpora.

All rows of the full size train on one seed, with the smallest possible training. Each
`simulate` command is carried out in this process, because starting Python takes longer
than such a run. Only `test_runs_execute_in_separate_processes` starts processes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest
from applications import loadable
from paper_corpora import PAPERS, write_all

from fednotes.apps.experiments import reproduce as module
from fednotes.apps.experiments import work
from fednotes.apps.experiments.grid_files import list_grid_files
from fednotes.apps.experiments.grid_runs import GridRequest
from fednotes.apps.experiments.grids import (
    Grid,
    choose_jobs,
    load_grid,
    select_grid_rows,
)
from fednotes.apps.experiments.planning import require_applicable_settings
from fednotes.apps.experiments.reproduce import reproduce
from fednotes.core.errors import ConfigError, FednotesError
from fednotes.encoders import pretrained
from fednotes.jobs.job_file import load_job
from fednotes.jobs.results import read_result
from fednotes.jobs.simulate import simulate

pytestmark = pytest.mark.slow

# The smallest possible training. A key that a job's method does not have, or that a row
# sets itself, does not reach it.
TINY = (
    "training.epochs=1",
    "training.rounds=2",
    "training.warmup=0",
    "training.cycles=1",
    "training.keep_cycle=0",
    "training.long_cycles=0",
    "training.min_tokens=0",
    "training.min_steps=0",
    "training.classifier_cycles=1",
    "training.local_epochs=1",
    "training.minimum=1",
    "training.least_occurrences=1",
    "training.min_patients=0",
)
# Keys that rows about the length of training or the number of patients set themselves.
LENGTHS = re.compile(r"(training\.(?:cycles|rounds|epochs|classifier_cycles))=\d+")
WARMUP = re.compile(r"(training\.warmup)=\d+")
PATIENTS = re.compile(r"(synthetic\.patients)=\d+")


@pytest.fixture(scope="session")
def papers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment variables that name the stand-ins."""
    pytest.importorskip("h5py")
    pytest.importorskip("transformers")
    return write_all(tmp_path_factory.mktemp("papers"))


@pytest.fixture(autouse=True)
def _environment(
    papers: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in papers.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # a tiny encoder stands for "minilm", that of experiments on public corpora
    monkeypatch.setattr(pretrained, "MINILM", "tiny_minilm")
    monkeypatch.syspath_prepend(papers["TINY_MINILM"])


def in_this_process(command: Sequence[str], stdout: IO[str], **others: Any) -> int:
    """Do what `fednotes simulate` would do, and return its exit code."""
    *_, action, job = command[:5]
    options = list(command[5:])
    assert action == "simulate"
    settings = [options[at + 1] for at, word in enumerate(options) if word == "--set"]
    out = Path(options[options.index("--out") + 1])
    try:
        simulate(load_job(job, tuple(settings)), out, resume="--resume" in options)
    except FednotesError as error:
        stdout.write(f"error: {error}\n")
        return 2
    return 0


@pytest.mark.parametrize("name", loadable(list_grid_files()))
def test_every_experiment_runs_to_its_table(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "run_child_process", in_this_process)
    grid, path = load_grid(name)
    monkeypatch.setattr(module, "load_grid", lambda name: (shrunk(grid), path))
    jobs = PAPERS[path.parent.name]
    base = [
        f"{job}={jobs[job]}"
        for job in grid.list_job_names()
        if grid.base in jobs and job in jobs
    ]
    lines: list[str] = []
    table = reproduce(
        name,
        tmp_path / "out",
        full=True,
        seed=(1,),
        base=base,
        settings=settings_of(name, base),
        workers=1,
        say=lines.append,
    )
    missing = set(grid.list_job_names()) - set(jobs) if base else set()
    omitted = [line for line in lines if line.startswith("omitted")]
    assert len(omitted) == len(missing)
    for job in missing:
        assert any(f"give your own job with `base` {job}=JOB" in x for x in omitted)
    page = (tmp_path / "out" / table["name"] / "results.md").read_text(encoding="utf-8")
    assert page.count("\n|") >= 3


def shrunk(grid: Grid) -> Grid:
    """Return the grid with short training, 200 generated patients a site and one
    search."""
    rows = []
    searched = False
    for row in grid.runs:
        settings = tuple(map(shorter, row.set))
        search = {}
        for key, values in row.search.items():
            tried = [1, 2] if LENGTHS.fullmatch(f"{key}=1") else list(values)
            search[key] = tried[: 1 if searched else 2]
            searched = True
        rows.append(replace(row, set=settings, search=search))
    return replace(grid, runs=tuple(rows))


def shorter(setting: str) -> str:
    """Return a row's setting with a smaller number, if it is about length or size."""
    setting = LENGTHS.sub(r"\1=2", setting)
    setting = WARMUP.sub(r"\1=1", setting)
    return PATIENTS.sub(r"\1=200", setting)


def settings_of(name: str, base: Sequence[str]) -> tuple[str, ...]:
    """Return the settings of TINY that reach a run of this experiment."""
    grid, path = load_grid(name)
    jobs = choose_jobs(grid, path.parent.name, base)
    rows, _ = select_grid_rows(grid, jobs, full=True)
    accepted = []
    for setting in TINY:
        request = GridRequest(
            jobs=jobs, size=grid.full, full=True, out=Path(), settings=(setting,)
        )
        with suppress(ConfigError):
            require_applicable_settings(rows, grid, request)
            accepted.append(setting)
    return tuple(accepted)


def test_a_search_on_the_split_of_the_paper_reports_what_was_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paper's split has no validation data, so the search holds out training data.

    Each trial has validation scores, and no run of the table has any.
    """
    monkeypatch.setattr(work, "run_child_process", in_this_process)
    grid, path = load_grid("fedner-table2")
    few = replace(grid, runs=tuple(row for row in grid.runs if row.search))
    monkeypatch.setattr(module, "load_grid", lambda name: (few, path))
    settings = ("training.epochs=1", "training.rounds=2", "model.lstm_units=8")
    out = tmp_path / "out"
    name = "fedner-table2"
    table = reproduce(
        name,
        out,
        full=True,
        seed=(1,),
        base=["fedner/paper"],
        settings=settings,
        workers=1,
    )
    page = (out / table["name"] / "results.md").read_text(encoding="utf-8")
    assert "For the search alone, 15% of the training sentences were held out" in page
    assert "Precision / recall in percent, strict:" in page
    trials = finals = 0
    for folder in sorted((out / "runs").iterdir()):
        if not folder.is_dir():
            continue
        result = read_result(folder)
        judged = [scores["mean"] is not None for scores in result.valid.values()]
        if "hold_out" in str(result.config["sites"]):
            trials += 1
            assert all(judged)
        else:
            finals += 1
            assert not any(judged)
    # two rates for each of two conditions, then the chosen one
    assert (trials, finals) == (4, 2)


def test_pretraining_within_the_budget_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the budget size a site has few steps, which a job would refuse otherwise."""
    monkeypatch.setattr(work, "run_child_process", in_this_process)
    base = ["bert/i2b2-2010", "bc5cdr=bert/i2b2-2012", "pretrain=bert/mimic"]
    settings = ("training.cycles=1", "training.long_cycles=0")
    out = tmp_path / "out"
    table = reproduce(
        "bert-table1", out, seed=(1,), base=base, settings=settings, workers=1
    )
    assert table["omitted"] == []
    assert len(table["rows"]) == 12


def test_runs_execute_in_separate_processes(tmp_path: Path) -> None:
    """Two processes pre-train models, whose attention is then compared."""
    out = tmp_path / "out"
    table = reproduce(
        "bert-table2",
        out,
        base=["bert/mimic"],
        settings=("training.cycles=1", "training.long_cycles=0"),
        workers=2,
    )
    assert "federated" in table["markdown"]
    assert len(list((out / "runs").glob("*/summary.json"))) == 2
