"""One worker process, seen by the process that starts it.

A worker is a fresh interpreter, started like any program: not a fork, because torch's
threads and locks do not survive one, and not by `multiprocessing`, because that imports
the user's script again and pickles what it passes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from fednotes.core.errors import WorkerError
from fednotes.core.messages import Reply, decode
from fednotes.core.pipes import FramePipe, PipeClosedError
from fednotes.engines.carried import raise_failure, read_values
from fednotes.jobs.workers.events import FEATURES, RESULT
from fednotes.taggers.corpora import Progress

# Seconds in which a worker must end after its stdin was closed.
END_SECONDS = 5.0
PIPE_BYTES = 2**20  # capacity of a pipe; the system's default needs more exchanges
# What a worker does, the argument of its program.
SITES = "sites"
PREDICTIONS = "predictions"
_PROGRAM = "fednotes.jobs.workers.process"


class _Event(NamedTuple):
    """What a worker reports about a command.

    Attributes:
        name: One of the events in `jobs/workers/events.py`.
        values: Its JSON values.
    """

    name: str
    values: list[Any]


class WorkerProcess:
    """One worker process, a `Link` of `engines/remote_programs.py`.

    Args:
        work: What it does, `SITES` or `PREDICTIONS`.
        number: The worker's number, from 1.
        device: PyTorch device that it computes on.
        remedy: What to do if the process ends before its time.

    Attributes:
        duty: What it did, for messages, such as "computed for site 'a'".
    """

    def __init__(self, work: str, number: int, device: str, *, remedy: str) -> None:
        self.number = number
        self.device = device
        self.duty = "started"
        self._remedy = remedy
        # The folders from which this process imports; `-P` adds no other.
        folders = [os.path.abspath(folder) for folder in sys.path]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _PROGRAM, work],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pipesize=PIPE_BYTES,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
            # Ctrl-C in a terminal reaches only this process, which ends the workers.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pipe = FramePipe(
            self._process.stdout.fileno(), self._process.stdin.fileno()
        )

    @property
    def pid(self) -> int:
        """The process's number in the system."""
        return self._process.pid

    def fileno(self) -> int:
        """Return a descriptor that is readable when a reply comes."""
        return self._pipe.fileno()

    def send(self, frame: bytes) -> None:
        """Send an encoded request.

        Raises:
            WorkerError: The process has ended.
        """
        try:
            self._pipe.send(frame)
        except PipeClosedError:
            raise self._describe_end() from None

    def receive(self) -> Reply:
        """Wait for the next reply and return it.

        Raises:
            WorkerError: The process has ended.
        """
        try:
            frame = self._pipe.receive()
        except PipeClosedError:
            raise self._describe_end() from None
        reply = decode(frame, checked=True)
        assert isinstance(reply, Reply)
        return reply

    def wait_for_result(self, progress: Progress | None = None) -> Any:
        """Wait for the result of a command that was sent, and return it.

        Args:
            progress: Receives the progress of computing features.

        Raises:
            Exception: The worker raised it.
            WorkerError: The process has ended.
        """
        while True:
            event = self.receive_event()
            if event.name == RESULT:
                return event.values[0]
            if event.name == FEATURES and progress is not None:
                progress(*event.values)

    def receive_event(self) -> _Event:
        """Wait for the next event of a command that was sent, and return it.

        Raises:
            Exception: The worker raised it.
            WorkerError: The process has ended.
        """
        reply = self.receive()
        raise_failure(reply)
        message = read_values(reply)
        return _Event(message["event"], message["values"])

    def close(self) -> None:
        """Close the pipes; the process ends then."""
        for file in (self._process.stdin, self._process.stdout):
            if file is not None:
                with suppress(OSError):
                    file.close()

    def wait(self) -> None:
        """Wait until the process has ended; kill it if it does not end soon."""
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _describe_end(self) -> WorkerError:
        """Return the error for a process that has ended before its time."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        end = _describe_code(self._process)
        return WorkerError(self.number, self.duty, end, self._remedy)


def _describe_code(process: subprocess.Popen[bytes]) -> str:
    """Return how a process ended, to follow "the worker process"."""
    code = process.returncode
    if code is None:
        return "closed its pipe"
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    if -code == signal.SIGKILL:
        return f"was ended by {name} (the system does this when memory runs out)"
    return f"was ended by {name}"


def end_workers(workers: Sequence[WorkerProcess]) -> None:
    """Let processes end, and wait until all have ended."""
    for worker in workers:
        worker.close()
    for worker in workers:
        worker.wait()
