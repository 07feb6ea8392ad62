"""The command that the message about a missing extra shows."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from fednotes.core.errors import MissingExtra, needs, write_install_command


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installed metadata of fednotes that precede the real ones."""
    metadata = tmp_path / "fednotes-9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: fednotes\nVersion: 9\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return metadata


def record(place: Path, content: object) -> None:
    (place / "direct_url.json").write_text(json.dumps(content), encoding="utf-8")


def test_an_extra_is_installed_from_the_folder_that_fednotes_came_from(
    place: Path, tmp_path: Path
) -> None:
    clone = tmp_path / "it's a clone"
    clone.mkdir()
    record(place, {"url": clone.as_uri(), "dir_info": {}})
    command = write_install_command("arrow")
    assert shlex.split(command) == ["pip", "install", f"{clone}[arrow]"]
    with pytest.raises(MissingExtra) as caught, needs("no_package", "arrow"):
        raise ImportError
    assert str(caught.value) == (
        f"the package 'no_package' of fednotes[arrow] is not installed: {command}"
    )

    record(place, {"url": clone.as_uri(), "dir_info": {"editable": True}})
    words = shlex.split(write_install_command("arrow"))
    assert words == ["pip", "install", "-e", f"{clone}[arrow]"]


@pytest.mark.parametrize(
    "content",
    [
        {"url": "https://example.org/fednotes.git", "vcs_info": {}},
        {"url": "file:///no/such/folder", "dir_info": {}},
        {"dir_info": {}},
        [],
        {"url": 3, "dir_info": 3},
    ],
)
def test_without_such_a_folder_an_extra_is_installed_by_name(
    place: Path, content: object
) -> None:
    assert write_install_command("arrow") == "pip install 'fednotes[arrow]'"
    record(place, content)
    assert write_install_command("arrow") == "pip install 'fednotes[arrow]'"
