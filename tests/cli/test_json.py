"""With --json, a command prints one JSON document to stdout and nothing else."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from applications import COMMANDS
from tiny_jobs import JOB, SITES, corpus
from typer.main import get_group

from fednotes.cli.app import app
from fednotes.cli.options_page import list_commands
from fednotes.cli.shared import print_json
from fednotes.data.formats import FORMATS, read_known_corpora
from fednotes.jobs.results import SUMMARY
from fednotes.jobs.seeds import SEEDS_FILE

ROOT = Path(__file__).parents[2]
Run = Callable[..., tuple[str, str]]

# Why a command has no --json.
ACTION = "it does something, and says what it did"
FILES = "it writes files"
PROCESS = "it runs until it is stopped"
WITHOUT = {
    "cache clear": ACTION,
    "completion": "it prints a script",
    "corpus synthesise": FILES,
    "export card": "it prints Markdown",
    "export hf": FILES,
    "export mlflow": FILES,
    "export onnx": FILES,
    "export sklearn": FILES,
    "export tensorboard": FILES,
    "job schema": "it prints JSON without the option",
    "kit renew": ACTION,
    "kit trust": ACTION,
    "predict": "it writes predictions in the format of --to",
    "provision": FILES,
    "report": FILES,
    "serve": PROCESS,
    "server run": PROCESS,
    "server start": ACTION,
    "server stop": ACTION,
    "site approve": "a person reads what they approve",
    "site forget": ACTION,
    "site key": ACTION,
    "site reject": ACTION,
    "site run": PROCESS,
    "site start": ACTION,
    "site stop": ACTION,
    "ui": PROCESS,
}


def commands_with_json() -> set[str]:
    """Return the words of the commands that have the option."""
    return {
        words
        for words, command in list_commands(get_group(app))
        if any("--json" in parameter.opts for parameter in command.params)
    }


def test_every_command_has_the_json_option_or_a_reason_not_to() -> None:
    commands = {words for words, _ in list_commands(get_group(app))}
    assert commands - commands_with_json() <= WITHOUT.keys()
    assert not commands_with_json() & WITHOUT.keys()


def test_the_page_of_json_has_a_row_for_each_command() -> None:
    page = (ROOT / "docs" / "json.md").read_text("utf-8")
    rows = re.findall(r"^\| `([a-z ]+)` \|", page, re.MULTILINE)
    assert rows == sorted(rows)
    of_core = {row for row in rows if row.split()[0] not in COMMANDS}
    here = commands_with_json()
    assert of_core == {words for words in here if words.split()[0] not in COMMANDS}
    assert here <= {*rows}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a job of two sites; tests add to it."""
    place = tmp_path_factory.mktemp("json")
    corpus(place / "north.conll", "Drug", "north")
    corpus(place / "south.conll", "Drug", "south")
    text = JOB.replace('["federated"]', '["alone", "federated"]') + SITES
    (place / "job.toml").write_text(text, encoding="utf-8")
    return place


@pytest.fixture
def read(run: Run) -> Callable[..., Any]:
    """Return a function that runs a command with --json and returns its document."""

    def read_document(*words: object, code: int = 0) -> Any:
        out, _ = run(*words, "--json", code=code)
        return json.loads(out)

    return read_document


def test_simulate_prints_its_summary(read: Any, run: Run, folder: Path) -> None:
    document = read("simulate", folder / "job.toml", "--out", folder / "run")
    summary = json.loads((folder / "run" / SUMMARY).read_text())
    assert summary.items() <= document.items()
    assert (folder / "run" / "report.html").exists()
    model = folder / "run" / "federated" / "sites" / "north" / "model"

    compared = read("compare", folder / "run", folder / "run", "--samples", 20)
    assert [*compared["sites"]] == ["north", "south"]
    north = compared["sites"]["north"]
    assert north["difference"] == pytest.approx(north["a"] - north["b"])
    assert (compared["condition"], compared["against"]) == ("federated", "alone")

    scores = read("evaluate", model, folder / "north.conll")
    assert {"strict", "relaxed", "not_scored"} <= {*scores}
    reliability = read("calibrate", model, folder / "north.conll", "--report-only")
    assert reliability
    assert read("calibrate", model, folder / "north.conll")


@pytest.mark.slow
def test_simulate_with_seeds_prints_their_scores(read: Any, folder: Path) -> None:
    words = ("--out", folder / "seeds", "--seeds", "1", "--seeds", "2")
    document = read("simulate", folder / "job.toml", *words)
    assert document["seeds"] == [1, 2]
    saved = json.loads((folder / "seeds" / SEEDS_FILE).read_text())
    assert saved.items() <= document.items()
    assert (folder / "seeds" / "seed-1" / "report.html").exists()


def test_check_and_init_describe_the_notes(
    read: Any, folder: Path, tmp_path: Path
) -> None:
    assert read("check", folder / "job.toml")["counts"]["problems"] == 0
    (tmp_path / "bad.conll").write_text("a\tO\tx\tO\nb\tO\n", encoding="utf-8")
    assert read("check", tmp_path / "bad.conll", code=1)["problems"]
    words = (folder / "north.conll", folder / "south.conll")
    assert read("init", *words, "--encoder", "none", "--out", tmp_path / "job.toml")


def test_the_commands_of_corpora_print_documents(
    read: Any, folder: Path, tmp_path: Path
) -> None:
    north, south = folder / "north.conll", folder / "south.conll"
    assert read("corpus", "stats", north, south)["sites"][0]["mentions"] == 40
    (tmp_path / "notes.txt").write_text("Case\nnothing\n", encoding="utf-8")
    (row,) = read(
        *("corpus", "overlap", "--notes", tmp_path / "notes.txt"),
        *("--documents", north),
    )
    assert row["documents"] == str(north)
    assert row["shared_sentences"] == 0
    assert {row["format"] for row in read("corpus", "formats")} == {*FORMATS}
    assert read("corpus", "list").keys() == read_known_corpora().keys()


def test_convert_lists_what_is_lost(read: Any, run: Run, tmp_path: Path) -> None:
    note = {"id": "1", "text": "A  b.", "meta": {"x": 1}, "spans": []}
    (tmp_path / "a.jsonl").write_text(json.dumps(note) + "\n", encoding="utf-8")
    words = ("convert", tmp_path / "a.jsonl", tmp_path / "b", "--to", "brat")
    out, err = run(*words, "--json", code=1)
    assert out == ""
    assert err.startswith("error: ")
    document = read(*words, "--allow-loss")
    assert document["documents"] == 1
    assert document["out"] == str(tmp_path / "b")
    assert document["lost"]
    assert document["left_out"] == {}


def test_the_commands_of_jobs_print_documents(read: Any, run: Run) -> None:
    (table,) = read("job", "keys", "privacy")
    assert table["table"] == "privacy"
    assert {"name", "type", "meaning"} <= {*table["keys"][0]}
    assert read("job", "show", "demo")
    assert json.loads(run("job", "schema")[0])["type"] == "object"


def test_a_document_has_no_infinite_numbers_and_no_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    value = {"x": [math.nan, (math.inf, 1.5)], "\x9b2J": "\x1b[2J\u202e", "path": ROOT}
    print_json(value)
    out = capsys.readouterr().out
    assert out.isascii()
    assert "\x1b" not in out
    assert json.loads(out) == {
        "x": [None, [None, 1.5]],
        "\x9b2J": "\x1b[2J\u202e",
        "path": str(ROOT),
    }
