"""A release's tag, its version, its changelog and its citation agree."""

from __future__ import annotations

import shutil
from pathlib import Path

import check_release
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the files that a release is compared with, at version 1.2.0."""
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    (tmp_path / "CITATION.cff").write_text("title: x\nversion: 1.2.0\nlicense: y\n")
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## 1.2.0 (2027-01-01)\n\n### Data\n\n- New.\n\n## 1.1.0\n\n- Old.\n"
    )
    return tmp_path


def test_a_tag_that_agrees_with_the_project_is_released(project: Path) -> None:
    assert check_release.list_problems("v1.2.0", project) == []
    assert check_release.read_notes("1.2.0", project) == "### Data\n\n- New."
    assert check_release.read_notes("1.1.0", project) == "- Old."


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        ("pyproject.toml", "1.2.0", "1.3.0", "the tag is v1.2.0"),
        ("CHANGELOG.md", "1.2.0", "Unreleased", "CHANGELOG.md has no section 1.2.0"),
        ("CITATION.cff", "1.2.0", "1.1.0", "CITATION.cff has another version"),
    ],
)
def test_a_tag_that_differs_is_refused(
    project: Path, file: str, old: str, new: str, problem: str
) -> None:
    path = project / file
    path.write_text(path.read_text().replace(old, new, 1))
    assert check_release.list_problems("v1.2.0", project)[0].startswith(problem)


def test_the_command_refuses_a_tag_of_another_version(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["check_release.py", "v99.0.0"])
    assert check_release.main() == 1
    assert "the tag is v99.0.0" in capfd.readouterr().err


def test_the_files_of_this_project_can_be_read(tmp_path: Path) -> None:
    """Only the changelog's section is missing until the version is released."""
    for name in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    changelog = tmp_path / "CHANGELOG.md"
    version = check_release.tomllib.loads((tmp_path / "pyproject.toml").read_text())[
        "project"
    ]["version"]
    changelog.write_text(changelog.read_text().replace("Unreleased", version, 1))
    assert check_release.list_problems(f"v{version}", tmp_path) == []
