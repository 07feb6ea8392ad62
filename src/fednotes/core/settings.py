"""Reading of user-written tables (TOML) into typed values.

`@checked(frozen=True)` replaces `@dataclass(frozen=True)` for settings. The values of
such a class are checked against their types whenever an instance is created, in code or
from a file. Bounds are part of the types (`core/numbers.py`); conditions on several
keys are in `__post_init__`. Errors name the key and the remedy.
"""

from __future__ import annotations

import functools
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic_core import PydanticCustomError, core_schema

from fednotes.core.errors import ConfigError, ParameterError, suggest_name
from fednotes.core.parsing import open_regular
from fednotes.core.tables import INTEGER_LIMIT

if TYPE_CHECKING:
    # For type checkers a checked class is a dataclass, so that `replace` and `fields`
    # accept it, which `typing.dataclass_transform` does not achieve.
    from dataclasses import dataclass as checked

__all__ = [
    "FilledIn",
    "LocalFile",
    "Mark",
    "assign",
    "build",
    "checked",
    "expand_home",
    "expand_path",
    "get_adapter",
    "list_marked_fields",
    "list_unset_variables",
    "make_place_prefix",
    "read_toml",
    "require_path",
    "require_variables",
]

T = TypeVar("T")
_CONFIG = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

# Bounds of a TOML file; the time for a dotted key is quadratic in its dots.
MAX_BYTES = 2**20
MAX_DOTS = 10_000

_REFUSED = "refused"  # type of the errors that this module raises within pydantic


def read_toml(path: Path) -> dict[str, Any]:
    """Return a TOML file as a table.

    Raises:
        ConfigError: The file is missing, too large or not TOML; in the last case the
            message names the line.
    """
    try:
        with open(path, "rb", opener=open_regular) as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES or raw.count(b".") > MAX_DOTS:
            raise ConfigError(
                f"{path}: too large for a TOML settings file: check that this is the "
                "right file"
            )
        return tomllib.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{path}: not a TOML file: line {line} is not UTF-8: save the file as UTF-8"
        ) from error
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path} is a folder: give a TOML file") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        # ValueError is also raised for a number with thousands of digits
        message = str(error)
        if "at end of document" in message:
            last_line = raw.count(b"\n") + 1
            message += f": line {last_line} is the last one, so look at its end"
        raise ConfigError(f"{path}: not a TOML file: {message}") from error


# ---- marks of fields ----------------------------------------------------------------


class Mark(Enum):
    """A mark in the type of a field, which determines how its key is treated."""

    LOCAL_FILE = "names a file or folder of the machine that reads it"
    FILLED_IN = "the job fills it in, so no job file may set it"


LocalFile = Annotated[str, Mark.LOCAL_FILE]
FilledIn = Annotated[T, Mark.FILLED_IN]


def list_marked_fields(cls: Any, mark: Mark) -> frozenset[str]:
    """Return the names of a checked class's fields whose types have a mark."""
    hints = _evaluate_hints(cls)
    return frozenset(
        field.name
        for field in fields(cls)
        if mark in getattr(hints[field.name], "__metadata__", ())
    )


@functools.cache
def _evaluate_hints(cls: Any) -> dict[str, Any]:
    """Return the types of a class's fields with their marks.

    The result is cached, because evaluation is slow and sites need it at every request.
    """
    return get_type_hints(cls, include_extras=True)


# ---- checked classes -----------------------------------------------------------------


if not TYPE_CHECKING:

    def checked(**options: Any) -> Any:
        """Return a decorator that makes a class a dataclass with checked values.

        Unknown keys are refused, and values are not converted to other types. A wrong
        value raises ConfigError, whether the class is called or built from a table.

        Args:
            options: Options of `dataclasses.dataclass`, such as `frozen`.
        """

        def decorate(cls: type) -> type:
            """Return the dataclass with checked values."""
            post_init = vars(cls).get("__post_init__")
            if post_init is not None:
                cls.__post_init__ = _make_checking_post_init(post_init)
            cls.__get_pydantic_core_schema__ = classmethod(_make_schema)
            checked_class = pydantic_dataclass(cls, config=_CONFIG, **options)
            checked_class.__init__ = _make_checking_init(checked_class)
            return checked_class

        return decorate


def _make_checking_init(cls: Any) -> Any:
    """Return the `__init__` of a pydantic dataclass that raises ConfigError."""
    init = cls.__init__
    names = [field.name for field in fields(cls) if field.init]

    @functools.wraps(init)
    def checking_init(self: Any, *args: Any, **kwargs: Any) -> None:
        """Call the dataclass's `__init__`; turn errors of pydantic into ConfigError."""
        try:
            init(self, *args, **kwargs)
        except ValidationError as error:
            raise ConfigError(_describe_error(error, "", names)) from None

    return checking_init


def _make_checking_post_init(post_init: Any) -> Any:
    """Return a `__post_init__` whose ConfigError becomes an error of pydantic.

    pydantic then adds the value's place in its table.
    """

    @functools.wraps(post_init)
    def check(self: Any) -> None:
        """Call the `__post_init__`; turn ConfigError into an error of pydantic."""
        try:
            post_init(self)
        except ConfigError as error:
            raise _make_refusal(str(error)) from error

    return check


def _make_refusal(message: str) -> PydanticCustomError:
    """Return the error of pydantic's own kind that carries a message of this module."""
    return PydanticCustomError(_REFUSED, "{message}", {"message": message})


def _make_schema(cls: type, source: Any, handler: Any) -> Any:
    """Return pydantic's schema of a class, with strict scalars and only known keys.

    It replaces the class's `__get_pydantic_core_schema__`. pydantic's own strict mode
    would refuse a list where a tuple is declared, and TOML has no tuples.
    """

    def require_known_keys(table: Any) -> Any:
        """Refuse keys that are no fields of the class; return the table."""
        if isinstance(table, Mapping):
            known = {field.name: field for field in fields(cls) if field.init}
            for key in table:
                if key not in known:
                    hint = suggest_name(str(key), known)
                    raise _make_refusal(f"unknown key {key!r}: {hint}")
        return table

    return core_schema.no_info_before_validator_function(
        require_known_keys, _make_scalars_strict(handler(source))
    )


def _make_scalars_strict(schema: Any) -> Any:
    """Make text, numbers and booleans in a schema strict, in place; return it.

    A strict value is not converted: "3" is not a number, and 1 is not true. Whole
    numbers must have at most 64 bits, as in TOML, so that arithmetic does not overflow.
    """
    if isinstance(schema, list):
        for part in schema:
            _make_scalars_strict(part)
    elif isinstance(schema, dict):
        for name, part in schema.items():
            if name not in ("default", "metadata"):
                _make_scalars_strict(part)
        if schema.get("type") in ("str", "int", "float", "bool"):
            schema["strict"] = True
        if schema.get("type") == "int":
            schema.setdefault("ge", -INTEGER_LIMIT)
            schema.setdefault("le", INTEGER_LIMIT - 1)
    return schema


@functools.cache
def get_adapter(cls: Any) -> TypeAdapter[Any]:
    """Return pydantic's adapter for a checked class, a plain dataclass or a model.

    A plain dataclass first gets the strict schema of `_make_schema`.
    """
    is_plain = is_dataclass(cls) and "__get_pydantic_core_schema__" not in vars(cls)
    if is_plain:
        _install_schema(cls)
    return TypeAdapter(cls)


def _install_schema(cls: Any) -> None:
    """Give a plain dataclass the strict schema of `_make_schema`."""
    cls.__get_pydantic_core_schema__ = classmethod(_make_schema)
    cls.__pydantic_config__ = _CONFIG


def build(cls: type[T], table: Mapping[str, Any], where: str) -> T:
    """Build an instance of a checked class or pydantic model from a table.

    Args:
        cls: The class.
        table: The fields.
        where: The name of the table in messages, such as "job.toml [training]"; "" if
            the caller adds it.

    Raises:
        ConfigError: A key is unknown or missing, or a value is impossible.
    """
    try:
        instance: T = get_adapter(cls).validate_python(table)  # type: ignore[arg-type]
        return instance
    except ValidationError as error:
        raise ConfigError(_describe_error(error, where)) from error
    except ConfigError as error:
        raise ConfigError(f"{make_place_prefix(where)}{error}") from error


# ---- messages ------------------------------------------------------------------------


def _describe_error(
    error: ValidationError, where: str, names: Sequence[str] = ()
) -> str:
    """Return a message about the first of pydantic's errors and its place.

    Args:
        error: pydantic's error.
        where: The name of the table in the message; "" for none.
        names: Names of the positional values.
    """
    first = error.errors(include_url=False)[0]
    kind = first["type"]
    place = first["loc"]
    if place and isinstance(place[0], int) and place[0] < len(names):
        place = (names[place[0]], *place[1:])
    *tables, key = [part for part in place if isinstance(part, str)] or [""]

    if kind in ("missing", "missing_argument"):
        return f"{make_place_prefix(where, *tables)}the key {key!r} is missing"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{make_place_prefix(where, *tables)}unknown key {key!r}"
    if kind == _REFUSED:
        return f"{make_place_prefix(where, *tables, key)}{first['msg']}"

    dotted = ".".join([*tables, key])
    assignment = f"{dotted} = {first['input']!r}"
    limits = first.get("ctx", {})
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        prefix = make_place_prefix(where)
        return f"{prefix}{assignment}: expected {words} {_format_limit(limits[name])}"
    if kind == "literal_error":
        expected = f"expected one of {limits['expected'].replace(' or ', ', ')}"
    else:
        expected = _EXPECTED.get(kind.removesuffix("_type"), first["msg"])
    return f"{where} {assignment}: {expected}".lstrip()


def _format_limit(limit: float) -> str:
    """Return a bound of a number as text."""
    return f"{limit:,}" if isinstance(limit, int) else f"{limit:,.10g}"


def make_place_prefix(*names: str) -> str:
    """Return a message's prefix, the names and a colon; "" if all names are empty."""
    place = " ".join(name for name in names if name)
    return f"{place}: " if place else ""


_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}
_EXPECTED = {
    "string": "expected text in quotes",
    "int": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float": "expected a number",
    "finite_number": "expected a number",
    "bool": "expected true or false",
    "tuple": "expected a list",
    "list": "expected a list",
    "frozen_set": "expected a list",
    "dict": "expected a table",
    "mapping": "expected a table",
    "dataclass": "expected a table",
    "model": "expected a table",
}


# ---- assignments and paths -----------------------------------------------------------


def assign(table: dict[str, Any], assignment: str) -> None:
    """Apply an assignment such as "training.epochs=3" to a table, in place.

    Values are written as in TOML; text needs no quotes. "sites.*.fraction=0.5" sets the
    key in the table of every site.

    Raises:
        ParameterError: There is no "=", the table does not exist and cannot be created,
            or a list or table is not written as in TOML.
    """
    dotted, sign, text = assignment.partition("=")
    if not sign or not dotted.strip():
        raise ParameterError(
            f"`settings` {assignment}: expected KEY=VALUE, such as training.epochs=3"
        )
    try:
        (value,) = tomllib.loads(f"value = {text}").values()
    except ValueError:  # not TOML, or more than one line of it
        if text.lstrip().startswith(("[", "{")):
            raise ParameterError(
                f"`settings` {assignment}: expected a list or table as in TOML, with "
                'texts in quotes, such as ["a", "b"]; in a shell, put the whole '
                "argument in single quotes"
            ) from None
        value = text

    *parents, key = dotted.strip().split(".")
    tables = [table]
    for name in parents:
        tables = [
            inner
            for outer in tables
            for inner in _inner_tables(outer, name, assignment)
        ]
    for inner in tables:
        inner[key] = value


def _inner_tables(
    table: dict[str, Any], name: str, assignment: str
) -> list[dict[str, Any]]:
    """Return the table called `name`, or every inner table if it is "*"."""
    inner = list(table.values()) if name == "*" else [table.setdefault(name, {})]
    if not inner or not all(isinstance(value, dict) for value in inner):
        raise ParameterError(
            f"`settings` {assignment}: {name!r} is not a table of this job"
        )
    return inner


def require_path(value: object, expected: str) -> Path:
    """Return a value from a user as a path, or raise ConfigError.

    Args:
        value: The path.
        expected: What the path should name, for the message.

    Raises:
        ConfigError: The value is not a path.
    """
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"expected {expected}, not {type(value).__name__}")
    return Path(value)


# Former names of environment variables.
_FORMER_NAMES = {"MIMIC_III": "MIMIC3"}


def expand_path(text: str, where: str) -> str:
    """Return a path with "$NAME" and "~" replaced.

    Args:
        text: The path.
        where: The key with this path, for the message.

    Raises:
        ConfigError: A variable is not set, or the path has a NUL character.
    """
    if "\0" in text:
        raise ConfigError(
            f"{where}: the path has a NUL character, which no file name can contain: "
            "give another path"
        )
    require_variables([(where, text)])
    return os.path.expanduser(os.path.expandvars(text))


def expand_home(path: str | os.PathLike[str]) -> Path:
    """Return a path with "~" replaced.

    Unlike `Path.expanduser`, this leaves "~NAME" as it is if there is no such user.
    """
    return Path(os.path.expanduser(path))


def list_unset_variables(text: str) -> list[str]:
    """Return the environment variables in a path that are not set."""
    names = re.findall(r"\$\{?(\w+)\}?", text)
    return [name for name in names if name not in os.environ]


def require_variables(paths: Iterable[tuple[str, str]]) -> None:
    """Raise one error for all environment variables that are not set.

    Args:
        paths: Pairs of a key, as in messages, and its path.

    Raises:
        ConfigError: At least one variable is not set. The message lists each with the
            keys that use it.
    """
    texts_by_variable: dict[str, dict[str, str]] = {}
    for key, text in paths:
        for name in list_unset_variables(text):
            texts_by_variable.setdefault(name, {})[key] = text
    if not texts_by_variable:
        return
    if len(texts_by_variable) > 1:
        uses = ", ".join(
            f"{name} ({', '.join(texts)})" for name, texts in texts_by_variable.items()
        )
        assignments = " ".join(map(_make_example_assignment, texts_by_variable))
        raise ConfigError(
            f"environment variables are not set: {uses}; for example: export "
            f"{assignments}"
        )

    ((name, texts),) = texts_by_variable.items()
    keys = ", ".join(texts)
    if len(texts) == 1:
        keys += f" = {texts[keys]!r}"
    former = _FORMER_NAMES.get(name, "")
    start = (
        f"{former}, its former name, is set" if former in os.environ else "for example"
    )
    raise ConfigError(
        f"{keys}: the environment variable {name} is not set; {start}: export "
        f"{_make_example_assignment(name)}"
    )


def _make_example_assignment(name: str) -> str:
    """Return an example of an assignment to a variable, for the shell's `export`."""
    former = _FORMER_NAMES.get(name, "")
    return f"{name}=${former}" if former in os.environ else f"{name}=/path/to/folder"


def merge_tables(preset: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a preset's table in which a job's values replace those of the preset.

    Nested tables are merged in the same way.
    """
    merged = dict(preset)
    for key, value in table.items():
        inner = preset.get(key)
        if isinstance(value, Mapping) and isinstance(inner, Mapping):
            merged[key] = merge_tables(inner, value)
        else:
            merged[key] = value
    return merged
