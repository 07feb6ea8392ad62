"""Discovery of formats, and guessing of a file's format from its content."""

from __future__ import annotations

import os
import pkgutil
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

from fednotes.core import plugins
from fednotes.core.errors import (
    ConfigError,
    DataError,
    UnknownFormatError,
)
from fednotes.core.parsing import read_shipped_table
from fednotes.data import formats
from fednotes.data.formats import published
from fednotes.data.formats.choices import extract_choice, extract_format_name
from fednotes.data.formats.files import read_text
from fednotes.data.formats.folders import list_files, make_mixed_formats_error

_REQUIRED_FUNCTIONS = ("accepts", "read")  # of a format's module


class Formats(Mapping[str, ModuleType]):
    """The modules of the formats by name; one of another package is imported when used.

    So a package that cannot be loaded prevents only the use of its own format, and
    the guessing of a file's format.

    Args:
        built_in: The modules of fednotes.
        entries: The entry points of other packages.
    """

    def __init__(
        self, built_in: Mapping[str, ModuleType], entries: Mapping[str, EntryPoint]
    ) -> None:
        self._modules = dict(built_in)
        self._entries = dict(entries)
        self._names = (*built_in, *entries)

    def __getitem__(self, name: str) -> ModuleType:
        if name not in self._modules:
            entry = self._entries[name]
            self._modules[name] = plugins.load_module(entry, _REQUIRED_FUNCTIONS)
        return self._modules[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def list_in_order_of_trial(self) -> list[tuple[str, ModuleType]]:
        """Return the names and modules of all formats in the order to try them.

        A module's `LOOSE` tells how easily it accepts a file: 0 almost never by
        mistake, 1 (the default) because of its first line, 2 by guessing. Modules that
        rarely err come first.

        Raises:
            ConfigError: The package of a format cannot be loaded.
        """
        return sorted(self.items(), key=_rank_for_trial)


def discover() -> Formats:
    """Return all formats, of other packages as well."""
    modules: dict[str, ModuleType] = {}
    for package in (formats, published):
        for info in pkgutil.iter_modules(package.__path__):
            if info.name.startswith("_"):
                continue
            module = import_module(f"{package.__name__}.{info.name}")
            if all(hasattr(module, name) for name in _REQUIRED_FUNCTIONS):
                modules[info.name.replace("_", "-")] = module
    return Formats(modules, plugins.list_added_entries("formats", modules))


def _rank_for_trial(item: tuple[str, ModuleType]) -> tuple[int, str]:
    """Return the key by which formats are sorted for trial: looseness, then name."""
    _, module = item
    return getattr(module, "LOOSE", 1), module.__name__


FORMATS = discover()


def find_format(format: str) -> ModuleType:
    """Return the module of a format, whose name may be followed by a choice.

    Raises:
        ConfigError: There is no such format, or it offers no choice.
    """
    require_format(format, FORMATS)
    return FORMATS[extract_format_name(format)]


def require_format(format: str, known: Collection[str]) -> None:
    """Check the name of a format and the choice after it.

    Args:
        format: The format.
        known: The names that are accepted.

    Raises:
        ConfigError: There is no such format, or it offers no choice.
    """
    name = extract_format_name(format)
    if name not in known:
        hint = plugins.suggest_entry(name, "formats", known)
        raise ConfigError(f"unknown format {format!r}: {hint}")
    if extract_choice(format) and not hasattr(FORMATS.get(name), "CHOICE"):
        raise ConfigError(
            f"format {format!r}: {name} offers no choice: give the name alone"
        )


def list_writable_formats() -> tuple[str, ...]:
    """Return the formats that documents can be written in, sorted."""
    return tuple(
        sorted(name for name, module in FORMATS.items() if hasattr(module, "write"))
    )


def guess_format(path: str | os.PathLike[str]) -> str:
    """Return the format of a file, or the one format of the files in a folder.

    Raises:
        DataError: There is no such path, no format matches, or the folder mixes
            formats.
    """
    path = Path(path)
    if not os.path.exists(path):
        raise DataError(f"{path}: no such file or folder")
    listed = "`fednotes corpus formats` lists the formats"
    if not path.is_dir():
        guess = _guess_file(path)
        if guess is None:
            read_text(path)  # raises a more specific error
            raise UnknownFormatError(
                path, f"cannot recognise the format: give `format`; {listed}"
            )
        return guess
    for recursive in (False, True):
        guesses = map(_guess_file, list_files(path, recursive=recursive))
        counts = Counter(guess for guess in guesses if guess)
        if len(counts) > 1:
            raise make_mixed_formats_error(path, counts)
        if counts:
            return next(iter(counts))
    if not any(path.iterdir()):
        raise UnknownFormatError(path, "the folder is empty: give one with notes")
    raise UnknownFormatError(
        path, f"no file in this folder is of a known format; {listed}"
    )


def _guess_file(path: Path) -> str | None:
    """Return the first format that accepts a file; None if none does."""
    for name, module in FORMATS.list_in_order_of_trial():
        if module.accepts(path):
            return name
    return None


def read_known_corpora() -> dict[str, dict[str, Any]]:
    """Return the corpora that built-in jobs use, by name, from `catalogue.toml`.

    The comment at the top of that file describes the fields.
    """
    return read_shipped_table("data/formats/catalogue.toml")
