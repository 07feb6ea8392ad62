"""Handling of Ctrl-C and SIGTERM: one line of status, and exit code 128 + signal.

A command that works in this process is stopped by the exception `Stopped` and leaves
nothing half-written. A command that only watches work elsewhere ends at once, because
libraries may swallow exceptions or wait for their threads.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import subprocess

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = "\x1b[?25h"
_children: set[subprocess.Popen[Any]] = set()


class Stopped(BaseException):
    """A signal requests this process to end.

    Attributes:
        code: The exit code: 128 + the signal's number, as in shells.
        line: The line to show to the user.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.code = 128 + number
        self.line = "stopped"

    def end_process(self) -> NoReturn:
        """End this process at once, without waiting for its threads."""
        _end_process(self.line, self.code)


class Interrupt:
    """End this process at once, with a line of status.

    Attributes:
        line: The line to show to the user.
        undo: Called before the process ends; errors in it are ignored.
    """

    def __init__(self, line: str) -> None:
        self.line = line
        self.undo: Callable[[], None] | None = None

    def end(
        self,
        number: int = signal.SIGINT,
        frame: object = None,  # noqa: ARG002 - signal handlers receive it
    ) -> None:
        """End this process now; usable as a signal handler."""
        with suppress(Exception):
            if self.undo is not None:
                self.undo()
        _end_process(self.line, 128 + number)


def _end_process(line: str, code: int) -> NoReturn:
    """Print a line of status, and end this process at once with an exit code."""
    cursor = _SHOW_CURSOR if os.isatty(2) else ""  # a progress bar hides it
    with suppress(OSError):
        os.write(2, f"{cursor}{line}\n".encode())
    os._exit(code)


@contextmanager
def ending_at_once(line: str) -> Iterator[Interrupt]:
    """Let either signal end the process at once within the context."""
    interrupt = Interrupt(line)
    with _handling(interrupt.end):
        yield interrupt


@contextmanager
def raising_stopped() -> Iterator[None]:
    """Let either signal raise Stopped within the context; a second one ends at once."""

    def stop(number: int, _: object) -> None:
        """Stop the child processes and raise Stopped; a second signal ends at once."""
        for each in SIGNALS:  # the terminal and the parent process may each send one
            end = Interrupt("stopped at once").end
            signal.signal(each, end if each == number else signal.SIG_IGN)
        for child in tuple(_children):
            child.terminate()
        raise Stopped(number)

    with _handling(stop):
        yield


@contextmanager
def _handling(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Use a handler for both signals, except those that this process ignores."""
    earlier = {number: signal.getsignal(number) for number in SIGNALS}
    handled = []
    if threading.current_thread() is threading.main_thread():  # others may not set any
        handled = [
            number
            for number in SIGNALS
            if earlier[number] not in (signal.SIG_IGN, None)
        ]
    for number in handled:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, earlier[number])


@contextmanager
def telling_how_to_resume(command: str) -> Iterator[None]:
    """Tell the user how to resume the work in the context, if a signal stops it.

    Args:
        command: The command that resumes it.
    """
    try:
        yield
    except Stopped as stopped:
        stopped.line = f"stopped; to resume: {command}"
        raise


def run_child_process(command: list[str], **options: Any) -> int:
    """Run a command like `subprocess.call`, and stop it if this process is stopped.

    Returns:
        The command's exit code.
    """
    import subprocess

    with subprocess.Popen(command, **options) as child:
        _children.add(child)
        try:
            return child.wait()
        finally:
            _children.discard(child)


def end_while_importing(words: list[str]) -> None:
    """Let SIGINT end the process without a traceback while a command is imported.

    Args:
        words: The command line, with the program's name first.
    """
    # Only `fednotes run` submits a job, which a user must know when stopping it.
    is_run = words[1:2] == ["run"]
    line = "stopped; nothing was submitted" if is_run else "stopped"
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, Interrupt(line).end)
