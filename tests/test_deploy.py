"""The units and the container file under deploy/ have few rights.

The tests of the applications check what they run.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from units import CONTAINER, ROOT, instructions, is_command, service

UNITS = sorted((ROOT / "deploy").glob("*.service"))
each_unit = pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)


def test_existing_commands_are_recognised() -> None:
    """Tests of units would pass whatever is_command says yes to."""
    assert is_command("job", "show")
    assert not is_command("job", "fly")


@each_unit
def test_a_unit_is_sandboxed_and_restarts_after_failures(path: Path) -> None:
    settings = service(path)
    assert settings["User"] not in ("", "root")
    assert settings["ProtectSystem"] == "strict"
    for name in ("NoNewPrivileges", "PrivateTmp", "ProtectHome", "RestrictSUIDSGID"):
        assert settings[name] == "yes"
    assert settings["CapabilityBoundingSet"] == ""
    assert settings["UMask"] == "0077"
    assert settings["Restart"] == "on-failure"
    assert settings["RestartPreventExitStatus"] == "2"
    # the process ends its jobs itself; what is left is killed
    assert settings["KillMode"] == "mixed"
    # a kit's processes speak by a socket
    assert "AF_UNIX" in settings["RestrictAddressFamilies"]


@each_unit
@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd is not here"
)
def test_systemd_accepts_each_unit(tmp_path: Path, path: Path) -> None:
    """With a program that is there in the place of ours."""
    text = path.read_text("utf-8").replace("/opt/fednotes/bin/fednotes", sys.executable)
    (tmp_path / path.name).write_text(text, "utf-8")
    completed = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / path.name)],
        capture_output=True,
        text=True,
    )
    complaints = [line for line in completed.stderr.splitlines() if path.name in line]
    assert (completed.returncode, complaints) == (0, [])


def test_a_container_does_not_run_as_root_and_copies_existing_files() -> None:
    """Of a base with a version; with the torch that the Makefile names."""
    (base,) = instructions("FROM")
    assert re.fullmatch(r"\S+:3\.1\d\S*", base)
    assert instructions("USER") == ["10001:10001"]
    assert json.loads(instructions("ENTRYPOINT")[0]) == ["fednotes"]
    torch = re.search(
        r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE
    )
    assert torch is not None
    assert torch[1] in CONTAINER
    assert "whl/cpu" in CONTAINER
    for source in instructions("COPY"):
        assert all((ROOT / name).exists() for name in source.split()[:-1])
