"""Corpus files ⇄ Documents. One module a format; the format is guessed from the content.

A module of this folder is a format if it has `read(path, problems)` for a file or a folder, which
notes what it cannot use and goes on, and `accepts(path)`, whether one file looks like the format;
its name is the module's. `conll`, `brat` and `jsonl` also have `write(documents, path)`.
"""

from __future__ import annotations

import os
import pkgutil
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from fednotes.core.errors import ConfigError, DataError, nearest
from fednotes.core.parsing import shipped
from fednotes.core.types import Document
from fednotes.data.formats.files import OnError, Problems, mixed, read_text, visible


def discover() -> dict[str, ModuleType]:
    """The formats of this folder, in the order in which a file is tried.

    A module's `LOOSE` says how easily it takes a file for its own: 0 not at all, 1 (if it says
    nothing) by its first line, 2 by guessing.
    """
    found = [
        import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)
    ]
    offered = [module for module in found if hasattr(module, "accepts") and hasattr(module, "read")]
    offered.sort(key=lambda module: (getattr(module, "LOOSE", 1), module.__name__))
    return {module.__name__.rpartition(".")[2].replace("_", "-"): module for module in offered}


FORMATS = discover()


def read(
    path: str | os.PathLike[str], format: str | None = None, on_error: OnError = "refuse"
) -> tuple[Document, ...]:
    """The documents of a file or folder; ids are unique within one call.

    format: a key of `FORMATS`; None guesses it. on_error: "skip" leaves out what cannot be used
    (`examine` counts it). Raises DataError for anything wrong with the files (each by its line),
    or where nothing is left of them, ConfigError for a format that does not exist.
    """
    documents, problems = examine(path, format)
    if on_error == "refuse" or not documents:
        problems.refuse()
    return documents


def examine(
    path: str | os.PathLike[str], format: str | None = None
) -> tuple[tuple[Document, ...], Problems]:
    """What can be used of a file or folder, and all that is wrong with the rest.

    Raises DataError where there is no such file or no format fits, ConfigError as `read`.
    """
    if format is not None and format not in FORMATS:
        raise ConfigError(f"unknown format {format!r}: {nearest(format, FORMATS)}")
    problems = Problems()
    documents = FORMATS[format or guess_format(path)].read(Path(path), problems)
    return documents, problems


def guess_format(path: str | os.PathLike[str]) -> str:
    """The format of a file, or the one format of a folder's files, from what they hold.

    Raises DataError where no format fits or a folder mixes formats.
    """
    path = Path(path)
    if not os.path.exists(path):
        raise DataError(f"{path}: no such file or folder")
    known = ", ".join(sorted(FORMATS))
    if not path.is_dir():
        if found := _guess_file(path):
            return found
        read_text(path)  # an empty or wrongly encoded file says so itself
        raise DataError(f"{path}: cannot tell the format: name one of {known}")
    for below in (False, True):
        counts = Counter(f for f in map(_guess_file, visible(path, below)) if f)
        if len(counts) == 1:
            return next(iter(counts))
        if counts:
            raise mixed(path, counts)
    raise DataError(f"{path}: no file in this folder is of a known format: {known}")


def _guess_file(path: Path) -> str | None:
    return next((name for name, module in FORMATS.items() if module.accepts(path)), None)


def corpora() -> dict[str, dict[str, Any]]:
    """The corpora of `catalogue.toml`, which jobs know, by name; its head says what is told."""
    return shipped("data/formats/catalogue.toml")
