"""The methods: each module here that defines `METHOD` is one, named after its file.

Other packages add methods through entry points (`core/plugins.py`).
"""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from fednotes.core import plugins
from fednotes.core.errors import ConfigError
from fednotes.methods.base import Method


def find_method(name: str) -> Method:
    """Return the method with this name.

    Raises:
        ConfigError: There is no such method; the message suggests the nearest name.
    """
    method = _find_built_in(name)
    if method is not None:
        return method
    entry = plugins.list_added_entries("methods", list_built_in_names()).get(name)
    if entry is None:
        hint = plugins.suggest_entry(name, "methods", list_method_names())
        raise ConfigError(f"unknown method {name!r}: {hint}")
    loaded: Method = plugins.load_entry(entry, Method)
    return loaded


def list_method_names() -> tuple[str, ...]:
    """Return the names of all methods, in alphabetical order."""
    built_in = list_built_in_names()
    return tuple(sorted((*built_in, *plugins.list_added_entries("methods", built_in))))


def list_built_in_names() -> tuple[str, ...]:
    """Return the names of the methods in this folder, in alphabetical order."""
    modules = plugins.list_modules(*__path__)
    return tuple(name for name in modules if _find_built_in(name) is not None)


def _find_built_in(name: str) -> Method | None:
    """Return the method that a module of this folder defines; None if there is none."""
    if name not in plugins.list_modules(*__path__):
        return None
    module = importlib.import_module(f"{__name__}.{name}")
    method = getattr(module, "METHOD", None)
    return method if isinstance(method, Method) else None


@cache
def read_presets(name: str) -> Mapping[str, Mapping[str, Any]]:
    """Return a method's presets by name, as tables of a job, from presets.toml."""
    text = resources.files(__name__).joinpath("presets.toml").read_text("utf-8")
    by_preset: Mapping[str, Mapping[str, Any]] = tomllib.loads(text)[name]
    return by_preset
