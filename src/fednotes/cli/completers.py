"""What a shell offers after Tab for the values of arguments and options.

Each function receives the beginning of a value and returns the values that begin so; if
there are none, the shell offers files. Completion starts a process at each Tab, so the
functions import what they need when they are called.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from fednotes.core.errors import FednotesError

Completer = Callable[[str], list[str]]
# Values that every shell reads as one word. Bash inserts values as they are, and zsh
# evaluates them, so the name of a stranger's file could be run as a command.
_PLAIN_WORD = re.compile(r"[\w./][\w./+@%,-]*")


def complete_from(list_values: Callable[[], Iterable[str]]) -> Completer:
    """Return a function that completes the values which another function lists."""

    def complete(incomplete: str) -> list[str]:
        """Return the values that begin with the incomplete one."""
        try:
            values = list_values()
        except FednotesError:  # of a package that cannot be imported
            return []
        return [
            value
            for value in values
            if value.startswith(incomplete) and _PLAIN_WORD.fullmatch(value)
        ]

    return complete


def complete_one_of(values: str) -> Completer:
    """Return a function that completes values that are separated by "|"."""
    return complete_from(lambda: values.split("|"))


def _list_jobs() -> list[str]:
    """Return the job files in the working folder, and the built-in jobs."""
    from fednotes.jobs.built_in_jobs import list_built_in_jobs

    return [*sorted(str(path) for path in Path().glob("*.toml")), *list_built_in_jobs()]


def _list_formats() -> list[str]:
    """Return the formats of corpora and of notes that can be read."""
    from fednotes.data.formats import FORMATS
    from fednotes.data.notes import FORMATS as NOTE_FORMATS

    return sorted({*FORMATS, *NOTE_FORMATS})


def _list_output_formats() -> Iterable[str]:
    """Return the formats that can be written."""
    from fednotes.data.formats import list_writable_formats

    return list_writable_formats()


complete_job = complete_from(_list_jobs)
complete_format = complete_from(_list_formats)
complete_output_format = complete_from(_list_output_formats)
