"""Leave out what needs an application that was deleted from `src/fednotes/apps`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence

import pytest

# The application of each command that is not the core's. Pages of the documents may
# still name the commands of an application that was deleted.
COMMANDS = {
    "attention": "experiments",
    "audit": "audit",
    "export": "serving",
    "export mlflow": "tracking",
    "export sklearn": "phenotyping",
    "export tensorboard": "tracking",
    "kit": "deployment",
    "ledger": "deployment",
    "preflight": "deployment",
    "provision": "deployment",
    "reproduce": "experiments",
    "run": "deployment",
    "serve": "serving",
    "server": "deployment",
    "site": "deployment",
    "ui": "ui",
}

# The application of each function of the Python API that is not the core's.
FUNCTIONS = {
    "export": "serving",
    "export_mlflow": "tracking",
    "export_tensorboard": "tracking",
    "open_ui": "ui",
    "serve": "serving",
}


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


def is_deleted_command(words: Sequence[str]) -> bool:
    """Return whether words after "fednotes" name a command of a deleted application."""
    owners = [COMMANDS.get(" ".join(words[:length])) for length in (1, 2)]
    return any(owner is not None and not has_app(owner) for owner in owners)


def loadable(names: Iterable[str]) -> list[str]:
    """Return the built-in jobs or experiments whose method is there, in their order.

    Those of the experiments on patients need the method of phenotyping.
    """
    has_patients = has_app("phenotyping")
    return [name for name in names if has_patients or not name.startswith("phenotype")]
