"""SIGINT ends a command at once with a readable message."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from fednotes.cli import app
from fednotes.core.stopping import ending_at_once

HEARD = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
STUBBORN = """
import threading, time
from pathlib import Path
from fednotes.core.stopping import ending_at_once
threading.Thread(target=time.sleep, args=(60,)).start()
with ending_at_once("first") as farewell:
    farewell.line = "the run goes on"
    farewell.undo = lambda: Path("undone").touch()
    print("ready", flush=True)
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass
"""


def interrupted(program: str, folder: Path) -> tuple[float, str]:
    """Return the seconds from SIGINT to the end, and the output after "ready"."""
    process = subprocess.Popen(
        # else ignored where the tests' own process does
        [sys.executable, "-c", HEARD + program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, output = process.communicate(timeout=20)
    assert process.returncode == 130
    return time.monotonic() - start, output


def test_an_interrupt_ends_a_command_despite_threads_and_broad_excepts(
    tmp_path: Path,
) -> None:
    seconds, output = interrupted(STUBBORN, tmp_path)
    assert seconds < 2
    assert output == "the run goes on\n"
    assert (tmp_path / "undone").exists()


STARTS = """
import sys, time
from fednotes.core.stopping import end_while_importing
end_while_importing(["fednotes", "run", "job.toml"])
assert not {"torch", "typer", "nvflare", "dataclasses"} & set(sys.modules)
print("ready", flush=True)
while True:
    try:
        time.sleep(60)
    except BaseException:
        pass
"""


def test_an_interrupt_during_imports_ends_without_a_traceback(
    tmp_path: Path,
) -> None:
    _, output = interrupted(STARTS, tmp_path)
    assert output == "stopped; nothing was submitted\n"
    source = Path(app.__file__).read_text()
    assert source.index("end_while_importing(sys") < source.index("import typer")


def test_signal_handlers_are_restored_afterwards() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ending_at_once("x"):
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_ignored_interrupt_remains_ignored() -> None:
    """A shell gives a command in the background SIG_IGN."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ending_at_once("x"):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
