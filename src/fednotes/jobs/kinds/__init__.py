"""What the sites of a job hold, a kind a file: a module here that has a `KIND` is one."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module

from fednotes.jobs.job import SiteKind


@cache
def find(name: str) -> SiteKind:
    """The kind of that name, one of `names()`."""
    found: SiteKind = import_module(f"{__name__}.{name}").KIND
    return found


def names() -> tuple[str, ...]:
    """The names of all kinds."""
    return tuple(module.name for module in pkgutil.iter_modules(__path__))
