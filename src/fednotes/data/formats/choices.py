"""What a user chooses in a format, after its name and a colon.

A format that offers a choice describes it in its constant `CHOICE`:

    uima-xmi:webanno.custom.Finding/kind     the layer and the feature that are read

Formats are named in many places (`format` of a site, `--format`, `--to`), and each of
them takes a choice in this way. Readers and writers ask `get_choice()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_SEPARATOR = ":"
_chosen: ContextVar[str] = ContextVar("choice", default="")


def extract_format_name(format: str) -> str:
    """Return the name of a format without the choice after it."""
    return str(format).partition(_SEPARATOR)[0]


def extract_choice(format: str) -> str:
    """Return the choice after the name of a format; "" if there is none."""
    return str(format).partition(_SEPARATOR)[2]


@contextmanager
def choosing(format: str) -> Iterator[None]:
    """Read and write in the context with the choice after a format's name."""
    token = _chosen.set(extract_choice(format))
    try:
        yield
    finally:
        _chosen.reset(token)


def get_choice() -> str:
    """Return the choice of the enclosing `choosing`; "" if there is none."""
    return _chosen.get()
