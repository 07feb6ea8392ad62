"""TOML tables → frozen dataclasses, with errors that name the key and the nearest right one."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fednotes.core.errors import ConfigError, nearest
from fednotes.core.parsing import regular

T = TypeVar("T")


MOST_BYTES, MOST_DOTS = 2**20, 10_000  # of a TOML file: a dotted key takes time by their square


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a table.

    Raises ConfigError with the line for a file that is missing or not TOML.
    """
    try:
        with open(path, "rb", opener=regular) as file:
            raw = file.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES or raw.count(b".") > MOST_DOTS:
            raise ConfigError(f"{path}: too large for a file that a person wrote")
        return tomllib.loads(raw.decode("utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path}: is a folder, a TOML file is needed") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise ConfigError(f"{path}: not a TOML file: {error}") from error


def build(cls: type[T], table: Mapping[str, Any], where: str) -> T:
    """An instance of a dataclass from a table whose keys are its fields.

    where: how messages call the table, such as `job.toml [training]`.
    Raises ConfigError for an unknown key, a missing one or a value of the wrong type.
    """
    hints = get_type_hints(cls)
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}; {nearest(key, known)}")
    for name, field in known.items():
        needed = field.default is MISSING and field.default_factory is MISSING
        if needed and name not in table:
            raise ConfigError(f"{where}: the key {name!r} is missing")
    values = {key: _convert(value, hints[key], f"{where} {key}") for key, value in table.items()}
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _convert(value: Any, hint: Any, where: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        if value not in arguments:
            options = ", ".join(repr(a) for a in arguments)
            raise ConfigError(f"{where} = {value!r}: expected one of {options}")
        return value
    if origin in (Union, UnionType):
        if value is None and type(None) in arguments:
            return None
        if any(is_dataclass(a) and isinstance(value, a) for a in arguments):  # type: ignore[arg-type]
            return value
        return _convert(value, next(a for a in arguments if a is not type(None)), where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} = {value!r}: expected a list")
        return tuple(_convert(item, arguments[0], where) for item in value)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} = {value!r}: expected a table")
        return {key: _convert(item, arguments[1], f"{where}.{key}") for key, item in value.items()}
    if is_dataclass(hint):
        if isinstance(value, hint):  # type: ignore[arg-type]
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} = {value!r}: expected a table")
        return build(hint, value, where)  # type: ignore[arg-type]
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (str, int, float, bool) and type(value) is not hint:
        raise ConfigError(f"{where} = {value!r}: expected {_NAMES[hint]}")
    return value


_NAMES = {str: "text in quotes", int: "a whole number", float: "a number", bool: "true or false"}


def assign(table: dict[str, Any], assignment: str) -> None:
    """Apply `--set training.epochs=3` to a table, in place. Values are written as in TOML;
    `sites.*.fraction=0.5` sets the key in every site's table.

    Raises ConfigError where there is no `=` or no such table can be.
    """
    dotted, sign, text = assignment.partition("=")
    if not sign or not dotted.strip():
        raise ConfigError(f"--set {assignment}: expected KEY=VALUE, such as training.epochs=3")
    try:
        (value,) = tomllib.loads(f"value = {text}").values()
    except ValueError:  # not TOML, or more than one line of it
        value = text  # bare words are text
    *parents, last = dotted.strip().split(".")
    tables = [table]
    for name in parents:
        tables = [inner for outer in tables for inner in _step_into(outer, name, assignment)]
    for inner in tables:
        inner[last] = value


def _step_into(table: dict[str, Any], name: str, assignment: str) -> list[dict[str, Any]]:
    """The table called `name`, or every table where it is `*`."""
    inner = list(table.values()) if name == "*" else [table.setdefault(name, {})]
    if not inner or not all(isinstance(value, dict) for value in inner):
        raise ConfigError(f"--set {assignment}: {name!r} is not a table of this job")
    return inner
