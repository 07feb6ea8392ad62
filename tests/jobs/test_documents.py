"""Test that the tests, commands, options and files that documents name exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from fednotes.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# by the tests they name
SHOWN = [ROOT / "docs" / name for name in ("privacy.md", "security.md")]
# also in a list
BLOCK = re.compile(r"^ *```\w*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
each_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)


def code(text: str) -> list[str]:
    """Code spans, and the lines of blocks without comments; a span may go on in a
    second line."""
    lines = [
        line.split(" #")[0].strip()
        for block in BLOCK.findall(text)
        for line in block.splitlines()
    ]
    return lines + [
        " ".join(span.split()) for span in re.findall(r"`([^`]+)`", BLOCK.sub("", text))
    ]


def unknown_commands(text: str) -> list[str]:
    """Commands `fednotes …` that our program has not, and options that a command has
    not."""
    wrong = []
    for piece in code(text):
        for words in re.findall(
            r"(?<![\w/=.-])(?<!import )fednotes +([a-z-][^|;&>]*)", piece
        ):
            found: Any = get_command(app)
            given = words.split()
            while given and (inside := getattr(found, "commands", {}).get(given[0])):
                found = inside
                given.pop(0)
            params = found.params
            options = {
                n for p in params for n in (*p.opts, *p.secondary_opts, "--help")
            }
            if getattr(found, "commands", None) and not set(given[:1]) & options:
                wrong.append(f"fednotes {words}")
            named = {
                word.partition("=")[0].rstrip(")") for word in given if word[:2] == "--"
            }
            wrong += [f"fednotes {words}: {name}" for name in sorted(named - options)]
    return wrong


def unknown_tests(text: str) -> list[str]:
    """Tests that there are none of: by path, by `::name` of the path before, by a name
    alone."""
    files = {
        path.name: path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py")
    }
    wrong, last = [], ""
    for path, of, name in re.findall(
        r"((?:tests/[\w/]*)?\btest_\w+\.py)?(::)?\b(test_\w+)?", text
    ):
        if path:
            last = Path(path).name
            wrong += [] if (ROOT / path).is_file() or path in files else [path]
        places = [files.get(last, "")] if of else files.values()
        if name and not any(
            re.search(rf"^def {name}\(", p, re.MULTILINE) for p in places
        ):
            wrong.append(f"{last}::{name}" if of else name)
    return wrong


def test_the_checks_of_pages_find_what_they_look_for() -> None:
    """They would pass whatever they find nothing in."""
    text = "`fednotes site fly KIT`, `fednotes site\nstop KIT --hard`, `fednotes site approve KIT`"
    said = ["fednotes site fly KIT", "fednotes site stop KIT --hard: --hard"]
    assert unknown_commands(text) == said
    assert unknown_commands("```sh\nfednotes pay  # fednotes or not\n```") == [
        "fednotes pay"
    ]
    assert unknown_commands("`import fednotes as fn`") == []
    here = "tests/jobs/test_documents.py"
    text = f"`{here}::test_the_checks_of_pages_find_what_they_look_for`, `::test_no`, `tests/test_no.py`, `test_documents.py`"
    assert unknown_tests(text) == ["test_documents.py::test_no", "tests/test_no.py"]
    assert unknown_tests(
        "`test_the_checks_of_pages_find_what_they_look_for`, `test_nowhere`"
    ) == ["test_nowhere"]


@each_page
def test_commands_in_the_pages_exist(path: Path) -> None:
    assert unknown_commands(path.read_text("utf-8")) == []


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.stem)
def test_tests_that_a_page_names_exist(path: Path) -> None:
    text = path.read_text("utf-8")
    assert "tests/engines/" in text
    assert unknown_tests(text) == []


@each_page
def test_links_of_pages_lead_to_files_that_exist(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", path.read_text("utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_every_page_is_in_the_menu() -> None:
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    named = set(re.findall(r": (\S+\.md)$", nav, re.MULTILINE))
    pages = {
        path.with_suffix(".md").name for path in (ROOT / "docs").glob("*.[mi][dp]*")
    }
    outside = {"index.md", "CONTRIBUTING.md", "CHANGELOG.md"}
    assert named == pages | outside, "name the page in mkdocs.yml, nav"
