"""The units and the container file under deploy/: what they run exists, and they are
closed."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from fednotes.cli.app import app

ROOT = Path(__file__).parents[1]
UNITS = sorted((ROOT / "deploy").glob("*.service"))
CONTAINER = (ROOT / "deploy" / "Containerfile").read_text("utf-8")
each_unit = pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)


def unit(path: Path) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(delimiters="=", interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text("utf-8"))
    return parser["Service"]


def instructions(name: str) -> list[str]:
    """The arguments of a container file's instruction, lines that go on joined."""
    joined = CONTAINER.replace("\\\n", " ")
    return re.findall(rf"^{name} (.*)$", joined, re.MULTILINE)


def is_command(*words: str) -> bool:
    """Whether our program has such a command."""
    found = get_command(app)
    for word in words:
        found = getattr(found, "commands", {}).get(word)
        if found is None:
            return False
    return True


def test_a_command_is_found() -> None:
    """The checks below would pass whatever is_command says yes to."""
    assert is_command("site", "run")
    assert not is_command("site", "fly")


def test_there_is_a_unit_for_each() -> None:
    assert [path.stem for path in UNITS] == [
        "fednotes-serve",
        "fednotes-server",
        "fednotes-site",
    ]


@each_unit
def test_a_unit_runs_what_there_is(path: Path) -> None:
    program, *words = shlex.split(unit(path)["ExecStart"])
    assert Path(program).name == "fednotes"
    name = path.stem.partition("-")[2]
    given = [name] if name == "serve" else [name, "run"]
    assert words[: len(given)] == given
    assert is_command(*given)
    if name != "serve":  # which writes nothing
        assert [words[2]] == unit(path)["ReadWritePaths"].split()
    assert ("ReadWritePaths" in unit(path)) == (name != "serve")
    for given in re.findall(r"bin/fednotes (\w+) (\w+)", path.read_text("utf-8")):
        assert is_command(*given)


@each_unit
def test_a_unit_is_closed_and_restarts_what_failed(path: Path) -> None:
    found = unit(path)
    assert found["User"] not in ("", "root")
    assert found["ProtectSystem"] == "strict"
    for name in ("NoNewPrivileges", "PrivateTmp", "ProtectHome", "RestrictSUIDSGID"):
        assert found[name] == "yes"
    assert found["CapabilityBoundingSet"] == ""
    assert found["UMask"] == "0077"
    assert found["Restart"] == "on-failure"
    assert found["RestartPreventExitStatus"] == "2"
    # the process ends its jobs itself; what is left is killed
    assert found["KillMode"] == "mixed"
    # a kit's processes speak by a socket
    assert "AF_UNIX" in found["RestrictAddressFamilies"]


@each_unit
@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd is not here"
)
def test_systemd_takes_a_unit(tmp_path: Path, path: Path) -> None:
    """With a program that is there in the place of ours."""
    text = path.read_text("utf-8").replace("/opt/fednotes/bin/fednotes", sys.executable)
    (tmp_path / path.name).write_text(text, "utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / path.name)],
        capture_output=True,
        text=True,
    )
    said = [line for line in done.stderr.splitlines() if path.name in line]
    assert (done.returncode, said) == (0, [])


def test_a_container_is_nobodys_root_and_runs_what_there_is() -> None:
    """Of a base with a version; with the torch that the Makefile names."""
    (base,) = instructions("FROM")
    assert re.fullmatch(r"\S+:3\.1\d\S*", base)
    assert instructions("USER") == ["10001:10001"]
    assert json.loads(instructions("ENTRYPOINT")[0]) == ["fednotes"]
    assert is_command(*json.loads(instructions("CMD")[0])[:2])
    for given in re.findall(
        r"fednotes ((?:site|server) \w+|serve) /(?:kit|model)", CONTAINER
    ):
        assert is_command(*given.split())
    torch = re.search(
        r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE
    )
    assert torch is not None
    assert torch[1] in CONTAINER
    assert "whl/cpu" in CONTAINER
    for source in instructions("COPY"):
        assert all((ROOT / name).exists() for name in source.split()[:-1])
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert {"deploy", "serve"} <= set(extras["optional-dependencies"])
    assert "'/build[deploy,serve]'" in CONTAINER
    # `ps`, by which a kit's processes are found
    assert "procps" in instructions("RUN")[0]
