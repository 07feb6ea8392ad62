"""`fednotes doctor`, as users run it."""

from __future__ import annotations

import json
import shlex
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_jobs import JOB, SITES, corpus

import fednotes as fn
from fednotes.cli.doctor import _show_cause
from fednotes.jobs.causes import Cause, Setting

Run = Callable[..., tuple[str, str]]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a job of two sites that name the same type differently."""
    monkeypatch.chdir(tmp_path)
    corpus(tmp_path / "north.conll", "Drug", "Zebul")
    corpus(tmp_path / "south.conll", "DRUGS", "Zebul")
    (tmp_path / "job.toml").write_text(JOB + SITES, encoding="utf-8")
    return tmp_path / "job.toml"


def test_a_job_is_examined_and_the_proposed_setting_can_be_copied(
    job: Path, run: Run
) -> None:
    out, _ = run("doctor", "job.toml")
    assert "low  south: sites write the same entity type differently" in out
    option = """--set 'sites.south.label_map={ DRUGS = "Drug" }'"""
    assert f"try: {option}" in out
    assert "checked: learning rate, number of steps" in out
    assert out.splitlines()[-1] == (
        "  fednotes simulate job.toml --out runs/next --set training.epochs=20"
    )
    assert "Zebul" not in out
    setting = 'sites.south.label_map={ DRUGS = "Drug" }'
    renamed, _ = run("doctor", "job.toml", "--set", setting)
    assert "differently" not in renamed


def test_a_long_setting_is_shown_on_one_line(capsys: Capture) -> None:
    types = [f"Type {number}" for number in range(60)]
    setting = Setting.of("tags", "types", value=types)
    _show_cause(1, Cause("types_rare", "low", "", "rare types", settings=(setting,)))
    (line,) = [row for row in capsys.readouterr().out.splitlines() if "try:" in row]
    _, _, assignment = shlex.split(line)[-3:]
    assert tomllib.loads(assignment) == {"tags": {"types": types}}


def test_a_run_is_examined_as_text_and_as_json(
    job: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fn.simulate("job.toml", "run")
    out, _ = run("doctor", "run", "--json")
    printed = json.loads(out)
    assert printed["state"] == "finished"
    by_code = {cause["code"]: cause for cause in printed["causes"]}
    alike = by_code["names_alike"]
    assert alike["settings"] == [
        {
            "key": "sites.south.label_map",
            "value": {"DRUGS": "Drug"},
            "current": {},
        }
    ]
    assert alike["evidence"][0]["file"] == "job.json"
    assert "few_steps" in by_code
    assert "Zebul" not in out
    text, _ = run("doctor", "run")
    for cause in printed["causes"]:
        assert cause["message"][:40] in text
        for setting in cause["settings"]:
            assert setting["key"] in text


def read_last_command(out: str) -> list[str]:
    """Return the words after `fednotes` of the command in the last line."""
    program, *words = shlex.split(out.splitlines()[-1])
    assert program == "fednotes"
    return words


def test_the_last_line_is_a_command_with_the_settings_of_the_run_and_the_advice(
    job: Path, run: Run
) -> None:
    """The run's settings hold lists, and a value that the advice replaces."""
    run(
        "simulate", "job.toml", "--out", "runs/first", "--set", "training.epochs=2",
        "--set", 'training.private=["crf"]', "--set", "title=a b",
    )  # fmt: skip
    out, _ = run("doctor", "runs/first")
    words = read_last_command(out)
    assert words == [
        "simulate", "job.toml", "--set", 'training.private=["crf"]',
        "--set", "title=a b", "--out", "runs/next", "--set", "training.epochs=8",
    ]  # fmt: skip
    run(*words)
    table = json.loads(Path("runs/next/job.json").read_text("utf-8"))["table"]
    assert table["training"]["epochs"] == 8
    assert table["training"]["private"] == ["crf"]
    again, _ = run("doctor", "runs/first")
    assert "--out runs/next-2" in again


def test_the_last_line_for_a_job_repeats_the_given_settings(
    job: Path, run: Run
) -> None:
    settings = ["--set", 'training.private=["crf"]', "--set", "training.epochs=3"]
    out, _ = run("doctor", "job.toml", *settings)
    assert read_last_command(out) == [
        "simulate", "job.toml", "--set", 'training.private=["crf"]',
        "--out", "runs/next", "--set", "training.epochs=51",
    ]  # fmt: skip


def test_label_maps_of_several_sites_are_proposed_together(job: Path, run: Run) -> None:
    corpus(job.parent / "west.conll", "Drug", "Zebul")
    corpus(job.parent / "south.conll", "drugs", "Zebul")
    job.write_text(
        JOB + SITES + '[sites.west]\npath = "west.conll"\n', encoding="utf-8"
    )
    corpus(job.parent / "north.conll", "DRUGS", "Zebul")
    shared = "training.private=[]"
    out, _ = run("doctor", "job.toml", "--set", shared, "--set", "training.epochs=90")
    words = read_last_command(out)
    maps = [word for word in words if "label_map" in word]
    assert len(maps) == 2
    first, second = maps
    renamed, _ = run(
        "doctor", "job.toml", "--set", shared, "--set", first, "--set", second
    )
    assert "differently" not in renamed


def test_a_run_from_python_is_repeated_by_its_job_file(job: Path, run: Run) -> None:
    """A job that is not as in a file has no command, so its settings alone are shown."""
    fn.simulate("job.toml", "runs/first")
    out, _ = run("doctor", "runs/first")
    assert read_last_command(out)[:2] == ["simulate", "job.toml"]
    fn.simulate(fn.job("job.toml", seed=9), "runs/second")
    out, _ = run("doctor", "runs/second")
    assert "fednotes simulate" not in out
    assert out.splitlines()[-1].endswith(
        "change them in the job file, and run the job again"
    )


def test_the_command_of_a_stopped_run_is_shown_too(job: Path, run: Run) -> None:
    run("simulate", "job.toml", "--out", "runs/first", "--set", "title=a")
    (job.parent / "runs/first/summary.json").unlink()
    out, _ = run("doctor", "runs/first")
    assert read_last_command(out)[:4] == ["simulate", "job.toml", "--set", "title=a"]


@pytest.mark.parametrize("place", ["runs/nothing", "runs", "elsewhere/nothing"])
def test_an_error_about_a_missing_run_lists_nearby_runs(
    job: Path, run: Run, place: str
) -> None:
    run("simulate", "job.toml", "--out", "runs/r0")
    for number in range(1, 6):
        shutil.copytree("runs/r0", f"runs/r{number}")
    _, err = run("doctor", place, code=2)
    assert err.startswith("error: ")
    assert place in err
    assert "nearby: runs/r0, runs/r1, runs/r2, runs/r3\n" in err


def test_an_error_about_a_missing_job_does_not_list_all_built_in_jobs(run: Run) -> None:
    _, err = run("doctor", "nothing.toml", code=2)
    assert err.endswith("give the path of a job file, or a built-in job such as demo\n")


def test_every_proposed_setting_is_toml(job: Path, run: Run) -> None:
    fn.simulate("job.toml", "run")
    for cause in fn.doctor("run").causes:
        for setting in cause.settings:
            assert tomllib.loads(str(setting))


def test_a_folder_that_is_not_a_run_is_refused_in_one_line(job: Path, run: Run) -> None:
    (job.parent / "empty").mkdir()
    _, err = run("doctor", "empty", code=2)
    assert err.startswith("error: empty is not the folder of a run: give the folder")
    assert err.count("\n") == 1


def test_lines_in_a_terminal_fit_80_columns(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    from fednotes.cli import doctor as command

    console = Console(width=80)
    monkeypatch.setattr(command, "console", console)
    command.doctor("job.toml")
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
