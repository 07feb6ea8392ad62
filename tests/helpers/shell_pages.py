"""Run the shell blocks of a page, as a reader would paste them into a terminal."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
# A comment on the line before a block says why its commands are not run.
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?```sh\n(?P<commands>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def list_commands(text: str) -> list[str]:
    """Return the shell blocks of a page that are run, in their order."""
    return [
        match["commands"] for match in BLOCK.finditer(text) if match["reason"] is None
    ]


def run_page(
    page: Path,
    folder: Path,
    *,
    replaced: Mapping[str, str] | None = None,
    timeout: float,
) -> str:
    """Run the shell blocks of a page in one shell; return what they print.

    The shell stops at the first command that fails, and with it the test.

    Args:
        page: The page, a Markdown file.
        folder: Folder in which the commands run.
        replaced: Texts of the page that a test replaces, such as a port.
        timeout: Seconds after which the commands are killed.
    """
    text = page.read_text("utf-8")
    for old, new in (replaced or {}).items():
        assert old in text
        text = text.replace(old, new)
    blocks = list_commands(text)
    assert blocks, f"{page.name} has no shell block that is run"

    programs = folder / ".programs"
    programs.mkdir()
    fednotes = programs / "fednotes"
    python = shlex.quote(sys.executable)
    fednotes.write_text(f'#!/bin/sh\nexec {python} -m fednotes "$@"\n')
    fednotes.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
    }
    script = "set -euo pipefail\n" + "\n".join(blocks)
    printed = folder / ".printed.txt"
    with printed.open("wb") as log:
        shell = subprocess.Popen(
            ["bash", "-c", script],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = shell.wait(timeout)
        finally:
            # Also what the page started in the background.
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
    output = printed.read_text("utf-8", errors="replace")
    assert code == 0, output[-3000:]
    return output
