"""The methods, each a file: a module here that has a `METHOD` is one, by its own name.

Other packages add methods by entry points (`core/plugins.py`).
"""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from fednotes.core import plugins
from fednotes.core.errors import ConfigError, nearest
from fednotes.methods.base import Method


def find(name: str) -> Method:
    """Return the method of that name.

    Raises:
        ConfigError: There is no such method; the message has the nearest name.
    """
    method = _built_in(name)
    if method is not None:
        return method
    entry = plugins.added("methods", built_in_names()).get(name)
    if entry is None:
        raise ConfigError(f"method = {name!r}; {nearest(name, names())}")
    loaded: Method = plugins.load(entry, Method)
    return loaded


def names() -> tuple[str, ...]:
    """Return the names of all methods, in alphabetical order."""
    built_in = built_in_names()
    return tuple(sorted((*built_in, *plugins.added("methods", built_in))))


def built_in_names() -> tuple[str, ...]:
    """Return the names of the methods in this folder, in alphabetical order."""
    modules = plugins.modules_in(*__path__)
    return tuple(name for name in modules if _built_in(name) is not None)


def _built_in(name: str) -> Method | None:
    """Return the method that a module of this folder holds, if it holds one."""
    if name not in plugins.modules_in(*__path__):
        return None
    module = importlib.import_module(f"{__name__}.{name}")
    method = getattr(module, "METHOD", None)
    return method if isinstance(method, Method) else None


@cache
def presets(name: str) -> Mapping[str, Mapping[str, Any]]:
    """Return a method's settings by name, from presets.toml: tables as in a job."""
    text = resources.files(__name__).joinpath("presets.toml").read_text("utf-8")
    of_method: Mapping[str, Mapping[str, Any]] = tomllib.loads(text)[name]
    return of_method
