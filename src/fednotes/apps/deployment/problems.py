"""The last problem of a kit's processes, as `site status` shows it.

    KIT/state/problem.json    the problem's time and text, until it is over

Each log line of fednotes at level WARNING or above is a problem. A call of a logger
that means something else says so with `mark_line`.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal

from fednotes.core.parsing import find_number, read_json_table
from fednotes.core.store import write_json

PROBLEM_FILE = Path("state") / "problem.json"  # in a kit
RECENT = timedelta(minutes=2)  # age up to which a problem is recent
# "state": another line of the status shows this state, such as a silent server or a
# missing approval; "solution": earlier problems are over.
LineKind = Literal["problem", "state", "solution"]
_ATTRIBUTE = "fednotes_line_kind"  # of a log record


@dataclass(frozen=True, slots=True)
class LastProblem:
    """The last problem of a kit's processes.

    Attributes:
        when: When it was logged, in local time.
        text: Its message.
    """

    when: datetime
    text: str

    @property
    def is_recent(self) -> bool:
        """Whether it was logged within the last minutes."""
        return datetime.now() - self.when < RECENT


def mark_line(kind: LineKind) -> dict[str, LineKind]:
    """Return the `extra` of a logger's call, which says what kind of line it writes."""
    return {_ATTRIBUTE: kind}


def record_line(kit: Path, record: logging.LogRecord) -> None:
    """Record the problem in a log line, or that earlier problems are over.

    Args:
        kit: The kit whose process writes the line.
        record: The line.
    """
    if record.name.partition(".")[0] != "fednotes":
        return
    is_warning = record.levelno >= logging.WARNING
    kind = getattr(record, _ATTRIBUTE, "problem" if is_warning else "")
    if kind == "problem":
        record_problem(kit, record.getMessage())
    elif kind == "solution":
        forget_problem(kit)


def record_problem(kit: Path, text: str) -> None:
    """Record a problem of a kit's process."""
    with suppress(Exception):  # a full disk must not end the process
        write_json(kit / PROBLEM_FILE, {"when": time.time(), "text": text})


def forget_problem(kit: Path) -> None:
    """Forget the last problem of a kit's processes, which is over."""
    with suppress(OSError):
        (kit / PROBLEM_FILE).unlink(missing_ok=True)


def read_last_problem(kit: Path) -> LastProblem | None:
    """Return the last problem of a kit's processes; None if there is none."""
    table = read_json_table(kit / PROBLEM_FILE)
    when = find_number(table, "when")
    if when is None:
        return None
    with suppress(OverflowError, OSError, ValueError):
        return LastProblem(datetime.fromtimestamp(when), str(table.get("text", "")))
    return None
