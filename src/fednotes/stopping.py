"""Ctrl-C of a command that watches something which goes on without it.

Libraries swallow a KeyboardInterrupt, in an `except` of their own or by waiting for their threads
at the end. So the signal ends the process itself, after one line that says how things stand.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

INTERRUPTED = 130  # the exit code of a program that SIGINT ended, as shells count


class Farewell:
    """What a person is told who stops a command. undo: what is done before."""

    def __init__(self, line: str) -> None:
        self.line = line
        self.undo: Callable[[], None] | None = None

    def end(self, *signal_and_frame: object) -> None:
        """End this process now."""
        with suppress(Exception):
            if self.undo is not None:
                self.undo()
        cursor = "\x1b[?25h" if os.isatty(2) else ""  # a progress bar hides it
        with suppress(OSError):
            os.write(2, f"{cursor}{self.line}\n".encode())
        os._exit(INTERRUPTED)


@contextmanager
def ends_at_once(line: str) -> Iterator[Farewell]:
    """Within it SIGINT ends the process, unless whoever started it wants the signal ignored."""
    farewell = Farewell(line)
    if threading.current_thread() is not threading.main_thread():
        yield farewell  # signals are the main thread's
        return
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, farewell.end)
    try:
        yield farewell
    finally:
        signal.signal(signal.SIGINT, before)


def until_it_begins(command: str, words: list[str]) -> None:
    """SIGINT while a command of ours is still being read in: no traceback of an import."""
    if words[1:2] == [command] and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, Farewell("stopped; nothing was handed in").end)
