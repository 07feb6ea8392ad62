"""Commands that a user runs in a folder, and the processes and files that remain."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


class Place:
    """A folder in which commands run. environment: further variables."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "FEDNOTES_CACHE": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
            **environment,
        }

    def begin(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "fednotes.cli.app", *words],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A shell's background job ignores SIGINT, and so would all that it starts.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def give(self, *words: str, code: int = 0) -> str:
        process = self.begin(*words)
        out, _ = process.communicate(timeout=300)
        assert process.returncode == code, out
        return out


def until(condition: object, seconds: float = 300) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.3)


def alive(folder: Path) -> list[str]:
    """Return the processes whose command lines name a folder, as `ps` lists them."""
    command = ["ps", "-A", "-ww", "-o", "stat=,command="]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [row for row in listing.splitlines() if str(folder) in row and row[0] != "Z"]


def opened(folder: Path) -> list[Path]:
    """Return the folder and the files in it that users other than the owner may
    access."""
    paths = [path for path in (folder, *folder.rglob("*")) if not path.is_symlink()]
    return [path for path in paths if path.stat().st_mode & 0o077]


def files_of(folder: Path) -> dict[Path, bytes]:
    """Return the content of every file below a folder, by its path from there."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder): path.read_bytes() for path in files}
