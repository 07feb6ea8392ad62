"""The systemd units and the container file under deploy/."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path

from typer.main import get_command

from fednotes.cli.app import app

ROOT = Path(__file__).parents[2]
CONTAINER = (ROOT / "deploy" / "Containerfile").read_text("utf-8")


def unit_of(name: str) -> Path:
    """The file of a unit."""
    return ROOT / "deploy" / f"{name}.service"


def service(path: Path) -> configparser.SectionProxy:
    """What a unit says of its service."""
    parser = configparser.ConfigParser(delimiters="=", interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text("utf-8"))
    return parser["Service"]


def is_command(*words: str) -> bool:
    """Whether our program has such a command."""
    found = get_command(app)
    for word in words:
        found = getattr(found, "commands", {}).get(word)
        if found is None:
            return False
    return True


def words_of(path: Path) -> list[str]:
    """The words that a unit gives to fednotes, of which all commands must be there,
    and those that its comments give."""
    program, *words = shlex.split(service(path)["ExecStart"])
    assert Path(program).name == "fednotes"
    for command in re.findall(r"bin/fednotes (\w+) (\w+)", path.read_text("utf-8")):
        assert is_command(*command)
    return words


def instructions(name: str) -> list[str]:
    """The arguments of a container file's instruction, lines that go on joined."""
    joined = CONTAINER.replace("\\\n", " ")
    return re.findall(rf"^{name} (.*)$", joined, re.MULTILINE)
