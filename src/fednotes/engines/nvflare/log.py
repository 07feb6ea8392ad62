"""A kit's one log, and the filter that lets a line which comes again and again through seldom."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from logging.handlers import WatchedFileHandler
from pathlib import Path

from fednotes.core.cleaning import one_line

try:
    import fcntl
except ImportError:  # not on Windows, where NVFlare does not run either
    fcntl = None  # type: ignore[assignment]

KIT_VARIABLE = "FEDNOTES_KIT"  # the folder of the kit whose process this is, or whose job's
UNWATCHED = "FEDNOTES_UNWATCHED"  # set: runs that stop stay so, as tests and benchmarks need
ECHO_VARIABLE = "FEDNOTES_ECHO"  # set: what goes to the log is also printed, for who looks on

_CHANGING = re.compile(r"[0-9a-f]{4,}(-[0-9a-f]{4,})+|(?<![a-z_-])[0-9]+", re.IGNORECASE)
_KINDS = 256
# NVFlare says it at each start and whenever a side is away; `contact.py` says it once.
_AWAY = re.compile(r"no connection to |target_unreachable|no path\b")
_CELLS = "nvflare.fuel.f3.cellnet."


class KitLog(WatchedFileHandler):
    """The log of a kit: its process and those of its jobs append to one file.

    file: its name. most: bytes of one file, more or less; then it becomes `file.1`, and `kept`
    of these stay. Whoever finds it too long moves it away; the others open the new one. Where
    $FEDNOTES_ECHO is set the lines are printed too.
    """

    def __init__(self, file: str, most: int, kept: int) -> None:
        self.most, self.kept = most, kept
        folder = Path(os.environ.get(KIT_VARIABLE) or ".").resolve()
        super().__init__(folder / file, encoding="utf-8", delay=True)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        with suppress(OSError):
            if os.stat(self.baseFilename).st_size > self.most:
                self._move()
        super().emit(record)
        if os.environ.get(ECHO_VARIABLE):
            with suppress(OSError):
                print(self.format(record), file=sys.stderr, flush=True)

    def _move(self) -> None:
        folder = os.open(Path(self.baseFilename).parent, os.O_RDONLY)
        try:
            if fcntl is not None:
                fcntl.flock(folder, fcntl.LOCK_EX)
            if os.stat(self.baseFilename).st_size <= self.most:
                return  # another process was first
            names = [self.baseFilename, *(f"{self.baseFilename}.{n + 1}" for n in range(self.kept))]
            for newer, older in reversed(list(pairwise(names))):
                with suppress(FileNotFoundError):
                    os.replace(newer, older)
        finally:
            os.close(folder)


class Seldom(logging.Filter):
    """Lines of one kind pass once in `seconds`; the next that passes says how many were left out.

    What passes is one line of plain characters: another party's words can forge no second one.

    A kind is equal but for numbers and ids (a site may be h1); under the logger `ours`, equal.
    NVFlare asks a dead server every 50 ms and writes two warnings each time: 13 KB a second.
    """

    def __init__(
        self,
        seconds: float = 60.0,
        ours: str = "fednotes",
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.seconds, self.ours, self.now = seconds, ours, now
        self._kinds: OrderedDict[tuple[str, int, str], tuple[float, int]] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is written; called under the handler's lock."""
        text, ours = one_line(record.getMessage(), 4000), record.name.split(".", 1)[0] == self.ours
        if record.name.startswith(_CELLS) and _AWAY.search(text):
            return False
        kind = (record.name, record.levelno, text if ours else _CHANGING.sub("#", text))
        now = self.now()
        passed, left_out = self._kinds.get(kind, (-float("inf"), 0))
        if now - passed < self.seconds:
            self._kinds[kind] = (passed, left_out + 1)
            return False
        self._kinds[kind] = (now, 0)
        self._kinds.move_to_end(kind)
        if len(self._kinds) > _KINDS:
            self._kinds.popitem(last=False)
        more = f" ({left_out} more like this left out)" if left_out else ""
        record.msg, record.args = text + more, None
        return True
