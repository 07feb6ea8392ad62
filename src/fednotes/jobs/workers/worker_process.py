"""One worker process, seen by the process that it works for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from fednotes.core.errors import WorkerError
from fednotes.core.messages import Reply, decode_message
from fednotes.core.pipes import PipeClosedError
from fednotes.engines.carried import raise_failure, read_values
from fednotes.jobs.workers.events import FEATURES, RESULT
from fednotes.taggers.corpora import Progress


class Connection(Protocol):
    """The way to a worker process, on this machine or on another one."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when a frame comes."""

    def send(self, frame: bytes) -> None:
        """Send a frame.

        Raises:
            PipeClosedError: The process has ended.
        """

    def receive(self) -> bytearray:
        """Wait for the next frame and return it; its memory may be written to.

        Raises:
            PipeClosedError: The process has ended.
        """

    def close(self) -> None:
        """Let the process end."""

    def wait(self) -> None:
        """Wait until the process has ended; kill it if it does not end soon."""

    def describe_end(self) -> str:
        """Return how the process ended, to follow "the worker process"."""


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
        connection: The way to the process, which has been started.
        number: The worker's number, from 1.
        device: PyTorch device that it computes on.
        remedy: What to do if the process ends before its time.

    Attributes:
        duty: What it did, for messages, such as "computed for site 'a'".
    """

    def __init__(
        self, connection: Connection, number: int, device: str, *, remedy: str
    ) -> None:
        self.number = number
        self.device = device
        self.duty = "started"
        self._connection = connection
        self._remedy = remedy

    def fileno(self) -> int:
        """Return a descriptor that is readable when a reply comes."""
        return self._connection.fileno()

    def send(self, frame: bytes) -> None:
        """Send an encoded request.

        Raises:
            WorkerError: The process has ended.
        """
        try:
            self._connection.send(frame)
        except PipeClosedError:
            raise self._make_end_error() from None

    def receive(self) -> Reply:
        """Wait for the next reply and return it.

        Raises:
            WorkerError: The process has ended.
        """
        try:
            frame = self._connection.receive()
        except PipeClosedError:
            raise self._make_end_error() from None
        reply = decode_message(frame, checked=True)
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
        """Let the process end."""
        self._connection.close()

    def wait(self) -> None:
        """Wait until the process has ended; kill it if it does not end soon."""
        self._connection.wait()

    def _make_end_error(self) -> WorkerError:
        """Return the error for a process that has ended before its time."""
        end = self._connection.describe_end()
        return WorkerError(self.number, self.duty, end, self._remedy)


def end_workers(workers: Sequence[WorkerProcess]) -> None:
    """Let processes end, and wait until all have ended."""
    for worker in workers:
        worker.close()
    for worker in workers:
        worker.wait()
