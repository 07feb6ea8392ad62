"""A worker's program as a child of this process, and the pipes to it.

A worker is a fresh interpreter, started like any program: not a fork, because torch's
threads and locks do not survive one, and not by `multiprocessing`, because that imports
the user's script again and pickles what it passes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fednotes.core.pipes import FramePipe

# Seconds in which a worker must end after its stdin was closed.
END_SECONDS = 5.0
PIPE_BYTES = 2**20  # capacity of a pipe; the system's default needs more exchanges
# What a worker does, the argument of its program.
SITES = "sites"
PREDICTIONS = "predictions"
_PROGRAM = "fednotes.jobs.workers.process"
# Processes that were started before a worker needed them, by what they do.
_early: dict[str, list[subprocess.Popen[bytes]]] = {}


@contextmanager
def starting_early(work: str, number: int) -> Iterator[None]:
    """Start processes that the first workers in the context use.

    They import the program while this process imports it, too. Those that no worker has
    used end with the context.

    Args:
        work: What they do, `SITES` or `PREDICTIONS`.
        number: Number of processes. At most one per core is started early.
    """
    number = min(number, os.cpu_count() or 1)
    _early[work] = [_start_program(work) for _ in range(number)]
    try:
        yield
    finally:
        for process in _early.pop(work):
            with process:  # waits for its end
                process.kill()


def _start_program(work: str) -> subprocess.Popen[bytes]:
    """Start the program of a worker."""
    # The folders from which this process imports; `-P` adds no other.
    folders = [os.path.abspath(folder) for folder in sys.path]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", _PROGRAM, work],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pipesize=PIPE_BYTES,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        # Ctrl-C in a terminal reaches only this process, which ends the workers.
        start_new_session=True,
    )


class ChildProcess:
    """The process of a worker on this machine, a `Connection` of `worker_process.py`.

    Args:
        work: What it does, `SITES` or `PREDICTIONS`.
    """

    def __init__(self, work: str) -> None:
        early = _early.get(work)
        self._process = early.pop(0) if early else _start_program(work)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pipe = FramePipe(
            self._process.stdout.fileno(), self._process.stdin.fileno()
        )

    def fileno(self) -> int:
        """Return a descriptor that is readable when a frame comes."""
        return self._pipe.fileno()

    def send(self, frame: bytes) -> None:
        """Send a frame; see `Connection`."""
        self._pipe.send(frame)

    def receive(self) -> bytearray:
        """Wait for the next frame and return it; see `Connection`."""
        return self._pipe.receive()

    def close(self) -> None:
        """Close the process's stdin; it ends then."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def wait(self) -> None:
        """Wait until the process has ended; kill it if it does not end soon."""
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def describe_end(self) -> str:
        """Return how the process ended; see `Connection`."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        code = self._process.returncode
        if code is None:
            return "closed its pipe"
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name
        if -code == signal.SIGKILL:
            return f"was ended by {name} (the system does this when memory runs out)"
        return f"was ended by {name}"
