"""A kit that other users could read or change is refused, or made private."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

from intruders import PROJECT
from places import opened

from fednotes.apps.deployment.nvflare import processes
from fednotes.apps.deployment.nvflare.authority import provision
from fednotes.apps.deployment.preflight import list_problems_before_start
from fednotes.apps.deployment.runs import open_admin_kit
from fednotes.core.errors import ConfigError


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o602])
def test_an_admin_kit_whose_key_others_can_open_cannot_submit_a_job(
    mode: int, kits: dict[str, Path]
) -> None:
    key = kits["admin"] / "startup" / "client.key"
    key.chmod(mode)
    with pytest.raises(
        ConfigError,
        match=r"client\.key: other users can read this file: run chmod -R go-rwx",
    ):
        open_admin_kit(kits["admin"])
    key.chmod(0o600)
    assert open_admin_kit(kits["admin"])[0] == kits["admin"].resolve()


@pytest.mark.parametrize("who", ["a", "server"])
def test_a_kit_whose_key_others_can_read_is_not_started(
    who: str, kits: dict[str, Path]
) -> None:
    key = min((kits[who] / "startup").glob("*.key"))
    key.chmod(0o604)
    problems = [
        check.message
        for check in list_problems_before_start(kits[who])
        if check.subject == "key"
    ]
    assert problems == [f"{key}: other users can read this file: run chmod 600 {key}"]


@pytest.mark.parametrize(
    ("mode", "who"),
    [
        (0o777, "other users of this machine"),
        (0o707, "other users of this machine"),
        (0o770, "members of its group"),
        (0o720, "members of its group"),
    ],
)
def test_a_start_warns_if_others_could_change_a_kit(
    mode: int, who: str, kits: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    kit = kits["a"]
    changeable = kit / "local"
    changeable.chmod(mode)
    (kit / "kit.json").chmod(0o644)
    processes._prepare(kit)
    assert opened(kit) == []
    assert (
        f"{who} could change 1 files and folders, such as {changeable.resolve()}"
        in caplog.text
    )
    caplog.clear()
    processes._prepare(kit)
    assert "could change" not in caplog.text


def test_a_start_makes_a_kit_private_without_warning_if_others_could_only_read_it(
    kits: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    kit = kits["a"]
    (kit / "local").chmod(0o755)
    (kit / "kit.json").chmod(0o644)
    processes._prepare(kit)
    assert opened(kit) == []
    assert "could change" not in caplog.text


def test_an_authority_that_others_could_open_is_made_private_and_reported(
    kits: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    out = kits["server"].parent
    place = out / "authority"
    provision(PROJECT, out)
    assert "other users" not in caplog.text
    place.chmod(0o755)
    provision(PROJECT, out)
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert (
        f"{place}: other users of this machine could open 1 files and folders"
        in caplog.text
    )
