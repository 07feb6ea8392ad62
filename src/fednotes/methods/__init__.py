"""The methods, each a file: a module here that has a `METHOD` is one, by its own name."""

from __future__ import annotations

import importlib
import pkgutil
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from fednotes.core.errors import ConfigError, nearest
from fednotes.core.federation import Method


def find(name: str) -> Method:
    """The method of that name. Raises ConfigError with the nearest one."""
    known = [module.name for module in pkgutil.iter_modules(__path__)]
    module = importlib.import_module(f"{__name__}.{name}") if name in known else None
    found = getattr(module, "METHOD", None)
    if not isinstance(found, Method):
        raise ConfigError(f"method = {name!r}; {nearest(name, names())}")
    return found


def names() -> tuple[str, ...]:
    """The names of all methods."""
    modules = [module.name for module in pkgutil.iter_modules(__path__)]
    return tuple(
        name for name in modules if hasattr(importlib.import_module(f"{__name__}.{name}"), "METHOD")
    )


@cache
def presets(name: str) -> Mapping[str, Mapping[str, Any]]:
    """A method's settings by name, of presets.toml: tables as in a job."""
    text = resources.files(__name__).joinpath("presets.toml").read_text("utf-8")
    found: Mapping[str, Mapping[str, Any]] = tomllib.loads(text)[name]
    return found
