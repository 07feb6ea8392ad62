"""A saved model in forms that other programs read: a form is a file of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fednotes.core.errors import ConfigError
from fednotes.core.store import write_folder
from fednotes.patients.phenotyper import is_phenotyper


def into(out: Path, fill: Callable[[Path], None]) -> None:
    """Make a new folder, whole or not at all. Raises ConfigError where there is something."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: there is something already; name a folder that is new or empty")
    write_folder(out, fill, private=False)


def require_mentions(model: Path, form: str) -> None:
    """Raises ConfigError for a model of patients."""
    if is_phenotyper(model):
        raise ConfigError(
            f"{model}: is a model of patients, and {form} is for models that find mentions: "
            "`fednotes export sklearn` writes its classifiers"
        )
