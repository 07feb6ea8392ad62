"""A folder whose processes end with the process that used it, however that one ends.

A second process waits for the end of its standard input, which also comes after `kill
-9`. Then it ends every process that works in the folder: one whose working directory,
or a word of whose command line, is the folder or lies in it. This works only on Linux,
because it reads /proc.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a new folder, which is deleted at the end as well."""
    with _watched(
        Path(tempfile.mkdtemp(prefix="fednotes-")).resolve(), "delete"
    ) as folder:
        yield folder


@contextmanager
def ended_with_us(folder: Path) -> Iterator[Path]:
    """Yield an existing folder, which remains at the end."""
    with _watched(folder.resolve(), "keep") as folder:
        yield folder


@contextmanager
def _watched(folder: Path, then: str) -> Iterator[Path]:
    watch = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(folder), then],
        stdin=subprocess.PIPE,
        start_new_session=True,  # what ends a group of processes leaves it alone
    )
    try:
        yield folder
    finally:
        watch.communicate()


def working_in(folder: Path) -> list[int]:
    """Return the ids of the processes that work in a folder, without this process."""
    folder_name, inside = os.fsencode(folder), os.fsencode(folder) + b"/"
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            words = (process / "cmdline").read_bytes().split(b"\0")
            words.append(os.fsencode(os.readlink(process / "cwd")))
            if any(word == folder_name or inside in word for word in words):
                processes.append(int(process.name))
    return [number for number in processes if number != os.getpid()]


def end_all(folder: Path) -> None:
    """End the processes of a folder by SIGTERM, and then by SIGKILL."""
    for sign, seconds in ((signal.SIGTERM, 2), (signal.SIGKILL, 10)):
        end, signalled = time.monotonic() + seconds, set[int]()
        while (running := working_in(folder)) and time.monotonic() < end:
            for number in set(running) - signalled:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(number, sign)
            signalled |= set(running)
            time.sleep(0.05)


def main(folder: Path, then: str) -> None:
    """Wait until standard input ends, and then end the processes of a folder."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_all(folder)
    if then == "delete":
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
