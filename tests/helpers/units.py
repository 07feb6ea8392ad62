"""Read the systemd units and the container file under deploy/."""

from __future__ import annotations

import configparser
import re
import shlex
import tomllib
from pathlib import Path

from typer.main import get_command

from fednotes.cli.app import app

ROOT = Path(__file__).parents[2]
CONTAINER = (ROOT / "deploy" / "Containerfile").read_text("utf-8")


def unit_of(name: str) -> Path:
    """Return the file of a unit."""
    return ROOT / "deploy" / f"{name}.service"


def service(path: Path) -> configparser.SectionProxy:
    """Return the section of a unit that describes its service."""
    parser = configparser.ConfigParser(delimiters="=", interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text("utf-8"))
    return parser["Service"]


def is_command(*words: str) -> bool:
    """Return whether fednotes has a command."""
    command = get_command(app)
    for word in words:
        command = getattr(command, "commands", {}).get(word)
        if command is None:
            return False
    return True


def words_of(path: Path) -> list[str]:
    """Return the arguments with which a unit starts fednotes.

    Raises:
        AssertionError: A comment of the unit names a command that does not exist.
    """
    program, *words = shlex.split(service(path)["ExecStart"])
    assert Path(program).name == "fednotes"
    for command in re.findall(r"bin/fednotes (\w+) (\w+)", path.read_text("utf-8")):
        assert is_command(*command)
    return words


def instructions(name: str) -> list[str]:
    """Return the arguments of an instruction of the container file."""
    joined = CONTAINER.replace("\\\n", " ")
    return re.findall(rf"^{name} (.*)$", joined, re.MULTILINE)


def installed_extras() -> set[str]:
    """Return the extras of fednotes that the container installs."""
    (named,) = re.findall(r"'/build\[([\w,]+)\]'", CONTAINER)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return set(named.split(",")) & set(project["optional-dependencies"])
