"""The tool deletes one application, and all other tests still load."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from bench import read_goals
from delete_application import delete_application, find_mentions

ROOT = Path(__file__).parents[2]
APPS = sorted(path.parent.name for path in ROOT.glob("src/fednotes/apps/*/__init__.py"))
FOLDERS = ("src", "tests", "docs", "tools", "benchmarks", "deploy")
FILES = ("pyproject.toml", "Makefile", "README.md", "CHANGELOG.md", "CONTRIBUTING.md")
# What is in fednotes-0.1.0.dist-info but the entry points.
METADATA = "Metadata-Version: 2.4\nName: fednotes\nVersion: 0.1.0\n"


def read_project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text("utf-8"))


def copy_project(root: Path) -> Path:
    """Copy this project into a folder and return the folder."""
    compiled = shutil.ignore_patterns("__pycache__", "runs")
    for folder in (*FOLDERS, ".ci"):
        shutil.copytree(ROOT / folder, root / folder, ignore=compiled)
    for file in (*FILES, "mkdocs.yml"):
        shutil.copy(ROOT / file, root / file)
    return root


def register(root: Path) -> None:
    """Write the entry points of a copied project beside its package.

    Python finds them there before those of the installed project.
    """
    entries = configparser.ConfigParser(delimiters="=", interpolation=None)
    entries.optionxform = str  # type: ignore[assignment,method-assign]
    entries.read_dict(read_project(root)["project"]["entry-points"])
    folder = root / "src" / "fednotes-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(METADATA)
    with (folder / "entry_points.txt").open("w") as file:
        entries.write(file)


@pytest.mark.parametrize("name", APPS)
def test_only_prose_still_names_a_deleted_application(
    name: str, tmp_path: Path
) -> None:
    root = copy_project(tmp_path)
    delete_application(name, root)
    assert not (root / "src" / "fednotes" / "apps" / name).exists()
    assert not (root / "tests" / "apps" / name).exists()
    assert f"apps.{name}" not in (root / "pyproject.toml").read_text("utf-8")
    before, after = read_project(ROOT)["project"], read_project(root)["project"]
    entries = {
        (group, entry): value
        for group, values in before["entry-points"].items()
        for entry, value in values.items()
    }
    others = {
        (group, entry): value
        for group, values in after["entry-points"].items()
        for entry, value in values.items()
    }
    assert others == {
        key: value
        for key, value in entries.items()
        if not re.match(rf"fednotes\.apps\.{name}[.:]|fednotes\.apps\.{name}$", value)
    }
    extras = {**before["optional-dependencies"]}
    remaining = {**after["optional-dependencies"]}
    page = (root / "docs" / "install.md").read_text("utf-8")
    for extra in extras.keys() - remaining.keys():
        assert f"`{extra}` |" not in page
        assert extra not in re.split(r"[\[\],]", remaining["dev"][0])
    for extra in remaining.keys() - {"dev"}:
        assert remaining[extra] == extras[extra]
    assert any(place.startswith("docs/") for place in find_mentions(name, root))
    benchmarks = read_goals(root / "benchmarks" / "goals.toml")
    assert sorted(benchmark.path for benchmark in benchmarks) == sorted(
        (root / "benchmarks").glob("*.py")
    )


def test_an_application_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    for name in ("nothing", "../core", ""):
        with pytest.raises(ValueError, match="is no application: name a folder of"):
            delete_application(name, tmp_path)


# Prints where fednotes is, and what is registered.
PROGRAM = """
import fednotes
from importlib.metadata import distribution
print(fednotes.__file__, *(entry.value for entry in distribution("fednotes").entry_points))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", APPS)
def test_all_tests_load_without_an_application(name: str, tmp_path: Path) -> None:
    root = copy_project(tmp_path)
    delete_application(name, root)
    register(root)
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}

    def run(*words: str) -> str:
        completed = subprocess.run(
            [sys.executable, *words],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert completed.returncode == 0, (
            completed.stdout[-4000:] + completed.stderr[-4000:]
        )
        return completed.stdout

    place, *values = run("-c", PROGRAM).split()
    assert Path(place).is_relative_to(root)
    assert values
    assert not [value for value in values if f".apps.{name}" in value]
    words = ("-p", "no:cacheprovider", "--collect-only", "-m", "not medspacy", "tests")
    run("-m", "pytest", *words)
