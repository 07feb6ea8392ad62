"""`fednotes doctor` as a user runs it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_jobs import JOB, SITES, corpus

import fednotes as fn

Run = Callable[..., tuple[str, str]]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a job of two sites that name the same type differently."""
    monkeypatch.chdir(tmp_path)
    corpus(tmp_path / "north.conll", "Drug", "Zebul")
    corpus(tmp_path / "south.conll", "DRUGS", "Zebul")
    (tmp_path / "job.toml").write_text(JOB + SITES, encoding="utf-8")
    return tmp_path / "job.toml"


def test_a_job_is_examined_and_the_setting_can_be_copied(job: Path, run: Run) -> None:
    out, _ = run("doctor", "job.toml")
    assert "low  south: sites write the same entity type differently" in out
    assert 'try: sites.south.label_map = { DRUGS = "Drug" }' in out
    assert "checked: learning rate, number of steps" in out
    assert "fednotes simulate job.toml --out runs/next --set KEY=VALUE" in out
    assert "Zebul" not in out
    setting = 'sites.south.label_map={ DRUGS = "Drug" }'
    renamed, _ = run("doctor", "job.toml", "--set", setting)
    assert "differently" not in renamed


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


def test_every_proposed_setting_is_toml(job: Path, run: Run) -> None:
    fn.simulate("job.toml", "run")
    for cause in fn.doctor("run").causes:
        for setting in cause.settings:
            assert tomllib.loads(str(setting))


def test_a_folder_that_is_no_run_is_refused_in_one_line(job: Path, run: Run) -> None:
    (job.parent / "empty").mkdir()
    _, err = run("doctor", "empty", code=2)
    assert err.startswith("error: empty is not the folder of a run: give the folder")
    assert err.count("\n") == 1


def test_lines_of_a_terminal_fit_80_columns(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    from fednotes.cli import doctor as command

    console = Console(width=80)
    monkeypatch.setattr(command, "console", console)
    command.doctor("job.toml")
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
