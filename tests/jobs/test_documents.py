"""The tests, commands, options and files that documents name exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from applications import COMMANDS, is_deleted_command, loadable, needs_app
from papers import is_of_deleted_app
from typer.main import get_command

from fednotes.cli.app import app
from fednotes.core.errors import FednotesError
from fednotes.jobs.built_in_jobs import list_built_in_jobs
from fednotes.jobs.job_file import load_job
from fednotes.jobs.reference import list_tables

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
# by the tests they name
SHOWN = [ROOT / "docs" / name for name in ("privacy.md", "security.md")]
# also in a list
BLOCK = re.compile(r"^ *```\w*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^ *```sh\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
ASSIGNMENT = re.compile(r'(?P<name>[a-z]\w*)="(?P<text>[^"$]*)"')
PRINTED = re.compile(r"\$[a-z]")  # a variable with what a program printed
each_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)


def code(text: str) -> list[str]:
    """Yield code spans, and the lines of blocks without comments; a span may wrap."""
    lines = [
        line.split(" #")[0].strip()
        for block in BLOCK.findall(text)
        for line in block.splitlines()
    ]
    return lines + [
        " ".join(span.split()) for span in re.findall(r"`([^`]+)`", BLOCK.sub("", text))
    ]


@cache
def command_tree() -> Any:
    """Return all commands, which are imported and put together once."""
    return get_command(app)


def find_command(words: Sequence[str]) -> tuple[Any, list[str]]:
    """Return the command that words after "fednotes" begin with, and the other words."""
    command = command_tree()
    others = list(words)
    while others and (inside := getattr(command, "commands", {}).get(others[0])):
        command = inside
        others.pop(0)
    return command, others


def shell_commands(text: str) -> Iterator[list[str]]:
    """Yield the words after "fednotes" of each command in the shell blocks of a page.

    A variable that a block sets to a text is replaced by this text.
    """
    for block in SHELL.findall(text):
        texts: dict[str, str] = {}
        for line in block.replace("\\\n", " ").splitlines():
            if assigned := ASSIGNMENT.fullmatch(line):
                texts[assigned["name"]] = assigned["text"]
            for name, value in texts.items():
                line = re.sub(rf"\${name}\b", lambda match, value=value: value, line)
            words = shlex.split(line, comments=True)
            if words[:1] == ["fednotes"]:
                yield words[1:]


def incomplete_commands(text: str) -> list[str]:
    """Return the commands of shell blocks that lack an option they cannot do without."""
    wrong = []
    for words in shell_commands(text):
        command, others = find_command(words)
        options_set = {word.partition("=")[0] for word in others}
        for param in command.params:
            is_option = param.param_type_name == "option"
            if is_option and param.required and not options_set & {*param.opts}:
                wrong.append(f"fednotes {shlex.join(words)}: {param.opts[0]}")
    return wrong


def refused_settings(text: str) -> list[str]:
    """Return why built-in jobs refuse the settings of `simulate` in shell blocks."""
    wrong = []
    for words in shell_commands(text):
        if words[0] != "simulate" or words[1] not in loadable(list_built_in_jobs()):
            continue
        places = [at for at, word in enumerate(words) if word == "--set"]
        try:
            settings = [words[at + 1] for at in places]
            # what a program prints is known only when it runs
            known = [each for each in settings if not PRINTED.search(each)]
            load_job(words[1], tuple(known))
        except FednotesError as error:
            wrong.append(f"fednotes {shlex.join(words)}: {error}")
    return wrong


def unknown_commands(text: str) -> list[str]:
    """Return commands `fednotes …` that do not exist, and unknown options of
    commands."""
    wrong = []
    for piece in code(text):
        for words in re.findall(
            r"(?<![\w/=.-])(?<!import )fednotes +([a-z-][^|;&>]*)", piece
        ):
            if is_deleted_command(words.split()):
                continue
            command, arguments = find_command(words.split())
            params = command.params
            options = {
                n for p in params for n in (*p.opts, *p.secondary_opts, "--help")
            }
            if getattr(command, "commands", None) and not set(arguments[:1]) & options:
                wrong.append(f"fednotes {words}")
            named = {
                word.partition("=")[0].rstrip(")")
                for word in arguments
                if word[:2] == "--"
            }
            wrong += [f"fednotes {words}: {name}" for name in sorted(named - options)]
    return wrong


def unknown_tests(text: str) -> list[str]:
    """Return tests that do not exist, named by path, by `::name` after a path, or
    alone."""
    files = {
        path.name: path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py")
    }
    wrong, last, is_deleted = [], "", False
    for path, separator, name in re.findall(
        r"((?:tests/[\w/]*)?\btest_\w+\.py)?(::)?\b(test_\w+)?", text
    ):
        if path:
            last, is_deleted = Path(path).name, is_of_deleted_app(path)
            exists = (ROOT / path).is_file() or path in files
            wrong += [] if exists or is_deleted else [path]
        if separator and is_deleted:
            continue
        places = [files.get(last, "")] if separator else files.values()
        if name and not any(
            re.search(rf"^def {name}\(", p, re.MULTILINE) for p in places
        ):
            wrong.append(f"{last}::{name}" if separator else name)
    return wrong


def test_the_checks_of_pages_detect_planted_mistakes() -> None:
    """They would pass whatever they find nothing in."""
    text = "`fednotes job fly JOB`, `fednotes job\nshow JOB --hard`, `fednotes job show JOB`"
    problems = ["fednotes job fly JOB", "fednotes job show JOB --hard: --hard"]
    assert unknown_commands(text) == problems
    assert unknown_commands("```sh\nfednotes pay  # fednotes or not\n```") == [
        "fednotes pay"
    ]
    assert unknown_commands("`import fednotes as fn`") == []
    this_file = "tests/jobs/test_documents.py"
    text = f"`{this_file}::test_the_checks_of_pages_detect_planted_mistakes`, `::test_no`, `tests/test_no.py`, `test_documents.py`"
    assert unknown_tests(text) == ["test_documents.py::test_no", "tests/test_no.py"]
    assert unknown_tests(
        "`test_the_checks_of_pages_detect_planted_mistakes`, `test_nowhere`"
    ) == ["test_nowhere"]


def test_the_checks_of_pages_ignore_a_deleted_application(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(COMMANDS, "fly", "no_such_application")
    assert unknown_commands("`fednotes fly --high`") == []
    text = "`tests/apps/no_such_application/test_fly.py::test_high`, `::test_low`"
    assert unknown_tests(text) == []
    assert unknown_tests(f"{text}, `tests/jobs/test_fly.py::test_x`") == [
        "tests/jobs/test_fly.py",
        "test_fly.py::test_x",
    ]


@each_page
def test_commands_in_the_pages_exist(path: Path) -> None:
    assert unknown_commands(path.read_text("utf-8")) == []


def test_the_checks_of_shell_blocks_detect_planted_mistakes() -> None:
    block = """```sh
cd notes  # fednotes simulate demo
fednotes simulate demo --set training.epochs=3
fednotes simulate demo --out runs/a --set training.epoch=3 \\
  --set model.tagger=none
```"""
    assert incomplete_commands(block) == [
        "fednotes simulate demo --set training.epochs=3: --out"
    ]
    (refusal,) = refused_settings(block)
    assert "unknown key 'epoch'" in refusal
    (refusal,) = refused_settings(block.replace("epoch=3 ", "epochs=3 "))
    assert "tagger" in refusal


def test_the_checks_of_shell_blocks_know_the_variables_of_a_block() -> None:
    block = """```sh
short="--set training.epochs=3 --set training.epoch=3"
codes=$(cat codes.txt)
fednotes simulate demo --out runs/a --set "training.private=$codes" $short
```"""
    (refusal,) = refused_settings(block)
    assert "unknown key 'epoch'" in refusal
    assert refused_settings(block.replace("epoch=3", "epochs=3")) == []


@each_page
def test_commands_in_shell_blocks_have_the_options_they_need(path: Path) -> None:
    assert incomplete_commands(path.read_text("utf-8")) == []


@each_page
def test_built_in_jobs_accept_the_settings_in_shell_blocks(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("FEDNOTES_CORPORA", "FEDNOTES_BACKBONE"):
        monkeypatch.setenv(variable, "/no/such/folder")
    assert refused_settings(path.read_text("utf-8")) == []


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.stem)
def test_tests_that_a_page_names_exist(path: Path) -> None:
    text = path.read_text("utf-8")
    assert "tests/engines/" in text
    assert unknown_tests(text) == []


@each_page
def test_links_of_pages_lead_to_files_that_exist(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", path.read_text("utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_every_key_of_a_job_is_used_by_a_page_or_a_built_in_job() -> None:
    """The page of keys alone, docs/job.md, is no use."""
    needs_app("experiments")  # most built-in jobs are there
    texts = [path.read_text("utf-8") for path in PAGES if path.stem != "job"]
    texts += [path.read_text("utf-8") for path in list_built_in_jobs().values()]
    words = set(re.findall(r"\w+", "\n".join(texts)))
    keys = {key.name for table in list_tables() for key in table.keys}
    assert keys - words == set(), "say in a page when a user should set it"


def test_every_page_is_in_the_menu() -> None:
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    named = set(re.findall(r": (\S+\.md)$", nav, re.MULTILINE))
    docs = ROOT / "docs"
    pages = {
        path.relative_to(docs).as_posix().replace(".ipynb", "-notebook.md")
        for path in docs.rglob("*.[mi][dp]*")
    }
    outside = {"index.md", "CONTRIBUTING.md", "CHANGELOG.md", "security-policy.md"}
    assert named == pages | outside, "name the page in mkdocs.yml, nav"
