"""A package of a third party, which lies in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
JOB = """\
method = "fedner"
title = "A small job of Acme"
[synthetic]
sites = 3
"""


def _wheel(folder: Path, entry_points: str, modules: dict[str, str]) -> Path:
    """Write the wheel of a package `acme_notes` by hand: no build tool is needed."""
    path = folder / "acme_notes-1.0-py3-none-any.whl"
    info = "acme_notes-1.0.dist-info"
    files = {f"acme_notes/{name}.py": source for name, source in modules.items()}
    files["acme_notes/__init__.py"] = ""
    files["acme_notes/acme/small.toml"] = JOB
    files[f"{info}/METADATA"] = (
        "Metadata-Version: 2.1\nName: acme-notes\nVersion: 1.0\n"
    )
    files[f"{info}/WHEEL"] = (
        "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    files[f"{info}/entry_points.txt"] = entry_points
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(name, text)
    return path


def unpack_acme(
    folder: Path, entry_points: str, modules: dict[str, str]
) -> dict[str, str]:
    """Put the package below a folder; return the environment in which it is found.

    Its wheel is unpacked as pip would do it, without the second that pip takes.
    """
    folder.mkdir(exist_ok=True)
    target = folder / "packages"
    with zipfile.ZipFile(_wheel(folder, entry_points, modules)) as wheel:
        wheel.extractall(target)
    return _environment(target)


def install_acme(
    folder: Path, entry_points: str, modules: dict[str, str]
) -> dict[str, str]:
    """Install the package by pip; return the environment in which it is found."""
    folder.mkdir(exist_ok=True)
    wheel = _wheel(folder, entry_points, modules)
    target = folder / "packages"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    subprocess.run(
        [*pip, "--no-index", "--no-deps", "--target", target, wheel], check=True
    )
    return _environment(target)


def _environment(target: Path) -> dict[str, str]:
    paths = [str(target), str(ROOT / "src")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def run_python(environment: dict[str, str], *arguments: str | Path) -> str:
    """Run Python in this environment; return what it prints."""
    completed = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout
