"""The units and the container of a server and a site run existing commands."""

from __future__ import annotations

import json
import re

import pytest
from units import (
    CONTAINER,
    installed_extras,
    instructions,
    is_command,
    service,
    unit_of,
    words_of,
)


@pytest.mark.parametrize("name", ["server", "site"])
def test_each_unit_runs_an_existing_command(name: str) -> None:
    path = unit_of(f"fednotes-{name}")
    command, verb, kit, *_ = words_of(path)
    assert [command, verb] == [name, "run"]
    assert is_command(name, "run")
    assert service(path)["ReadWritePaths"].split() == [kit]


def test_the_container_runs_existing_commands() -> None:
    assert "deploy" in installed_extras()
    assert is_command(*json.loads(instructions("CMD")[0])[:2])
    commands = re.findall(r"fednotes ((?:site|server) \w+) /kit", CONTAINER)
    assert commands
    for command in commands:
        assert is_command(*command.split())
    # `ps`, by which a kit's processes are found
    assert "procps" in instructions("RUN")[0]
