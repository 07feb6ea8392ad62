"""Leave out what needs an application that was deleted from `src/fednotes/apps`."""

from __future__ import annotations

import importlib.util

import pytest


def has_app(name: str) -> bool:
    """Return whether an application is in this tree.

    Git leaves the folder of a deleted application behind if it holds compiled files.
    Python would import it as a package without a file.
    """
    spec = importlib.util.find_spec(f"fednotes.apps.{name}")
    return spec is not None and spec.origin is not None


def needs_app(name: str) -> None:
    """Skip the test, or the module at its import, if an application was deleted."""
    if not has_app(name):
        pytest.skip(f"needs the application {name}", allow_module_level=True)
