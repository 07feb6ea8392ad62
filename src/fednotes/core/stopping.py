"""Ctrl-C and SIGTERM: one line that says how things stand, and 128 + the signal as exit
code.

A command that works here stops where it is (`Stopped`), and leaves nothing
half-written. One that watches what goes on without it ends at once: libraries swallow
exceptions, in an `except` of their own or by waiting for their threads at the end.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_children: set[subprocess.Popen[Any]] = set()


class Stopped(BaseException):
    """A signal asks this process to end. code: its exit code. line: what a person is
    told."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.code, self.line = 128 + number, "stopped"  # as shells count


class Interrupt:
    """What a person is told who stops a command. undo: what is done before."""

    def __init__(self, line: str) -> None:
        self.line = line
        self.undo: Callable[[], None] | None = None

    def end(self, number: int = signal.SIGINT, frame: object = None) -> None:
        """End this process now."""
        with suppress(Exception):
            if self.undo is not None:
                self.undo()
        cursor = "\x1b[?25h" if os.isatty(2) else ""  # a progress bar hides it
        with suppress(OSError):
            os.write(2, f"{cursor}{self.line}\n".encode())
        os._exit(128 + number)


@contextmanager
def ends_at_once(line: str) -> Iterator[Interrupt]:
    """Within it either signal ends the process."""
    farewell = Interrupt(line)
    with _heard(farewell.end):
        yield farewell


@contextmanager
def stops() -> Iterator[None]:
    """Within it either signal raises Stopped; the same once more ends the process."""

    def stop(number: int, frame: object) -> None:
        for each in SIGNALS:  # a terminal and whoever started us may each send one
            again = Interrupt("stopped at once").end
            signal.signal(each, again if each == number else signal.SIG_IGN)
        for child in tuple(_children):
            child.terminate()
        raise Stopped(number)

    with _heard(stop):
        yield


@contextmanager
def _heard(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Within it the signals are the handler's, but those that are to be ignored here."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    # signals are the main thread's
    mine = threading.current_thread() is threading.main_thread()
    heard = [n for n in SIGNALS if mine and before[n] not in (signal.SIG_IGN, None)]
    for number in heard:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])


@contextmanager
def goes_on(command: str) -> Iterator[None]:
    """Who stops what happens within it is told the command that goes on from there."""
    try:
        yield
    except Stopped as stopped:
        stopped.line = f"stopped; to go on: {command}"
        raise


def call(command: list[str], **options: Any) -> int:
    """`subprocess.call`, in any thread, of a command that is stopped when this process
    is."""
    import subprocess

    with subprocess.Popen(command, **options) as child:
        _children.add(child)
        try:
            return child.wait()
        finally:
            _children.discard(child)


def until_it_begins(words: list[str]) -> None:
    """SIGINT while a command is still being read in: no traceback of an import."""
    line = "stopped; nothing was handed in" if words[1:2] == ["run"] else "stopped"
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, Interrupt(line).end)
