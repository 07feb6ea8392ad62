"""A log filter that lets a line which comes again and again through once a minute."""

from __future__ import annotations

import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable

_CHANGING = re.compile(r"[0-9a-f]{4,}(-[0-9a-f]{4,})+|(?<![a-z_-])[0-9]+", re.IGNORECASE)
_KINDS = 256


class Seldom(logging.Filter):
    """Lines of one kind pass once in `seconds`; the next that passes says how many were left out.

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
        text, ours = record.getMessage(), record.name.split(".", 1)[0] == self.ours
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
        if left_out:
            record.msg, record.args = f"{text} ({left_out} more like this left out)", None
        return True
