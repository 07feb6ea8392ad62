"""Tables that people write (TOML) → typed values, with errors that name key and remedy.

`@checked(frozen=True)` in place of `@dataclass(frozen=True)` makes a class whose values
are held against their types whenever one is made, in code or from a file: bounds stand
in the type (`Annotated[int, Ge(1)]`), what several keys must have in common in
`__post_init__`.
"""

from __future__ import annotations

import functools
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic_core import PydanticCustomError, core_schema

from fednotes.core.errors import ConfigError, nearest
from fednotes.core.parsing import regular

if TYPE_CHECKING:
    from dataclasses import dataclass as checked

__all__ = ["adapter", "assign", "build", "checked", "expand", "path_of", "read_toml"]

T = TypeVar("T")
_CONFIG = ConfigDict(arbitrary_types_allowed=True, extra="forbid")
# of a TOML file: a dotted key takes time by their square
MOST_BYTES, MOST_DOTS = 2**20, 10_000


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
    except (ValueError, RecursionError) as error:
        # also a number of thousands of digits
        raise ConfigError(f"{path}: not a TOML file: {error}") from error


if not TYPE_CHECKING:

    def checked(**options: Any) -> Any:
        """A dataclass whose values are checked: unknown keys refused, no value made
        another type.

        Wrong values raise ConfigError, whether the class is called or built from a
        table.
        """

        def decorate(cls: type) -> type:
            if own := vars(cls).get("__post_init__"):
                cls.__post_init__ = _placed(own)
            cls.__get_pydantic_core_schema__ = classmethod(_schema)
            made = pydantic_dataclass(cls, config=_CONFIG, **options)
            init, names = (
                made.__init__,
                [field.name for field in fields(made) if field.init],
            )

            @functools.wraps(init)
            def checking(self: Any, *given: Any, **named: Any) -> None:
                try:
                    init(self, *given, **named)
                except ValidationError as error:
                    raise ConfigError(_told(error, "", names)) from None

            made.__init__ = checking
            return made

        return decorate


def _placed(check: Any) -> Any:
    """A `__post_init__` whose ConfigError keeps the place where the value stands in its
    table."""

    @functools.wraps(check)
    def run(self: Any) -> None:
        try:
            check(self)
        except ConfigError as error:
            raise PydanticCustomError(
                "refused", "{told}", {"told": str(error)}
            ) from error

    return run


def _schema(cls: type, source: Any, handler: Any) -> Any:
    """pydantic's own schema, with plain values as strict as TOML is, and keys by their
    names."""

    def keys(given: Any) -> Any:
        if isinstance(given, Mapping):
            known = {field.name: field for field in fields(cls) if field.init}
            for key in given:
                if key not in known:
                    told = f"unknown key {key!r}; {nearest(str(key), known)}"
                    raise PydanticCustomError("refused", "{told}", {"told": told})
        return given

    return core_schema.no_info_before_validator_function(keys, _strict(handler(source)))


def _strict(schema: Any) -> Any:
    """A schema whose text, numbers and truth values are taken as they are, in place."""
    if isinstance(schema, list):
        for part in schema:
            _strict(part)
    elif isinstance(schema, dict):
        for name, part in schema.items():
            if name not in ("default", "metadata"):
                _strict(part)
        if schema.get("type") in ("str", "int", "float", "bool"):
            schema["strict"] = True
    return schema


@functools.cache
def adapter(cls: Any) -> TypeAdapter[Any]:
    """pydantic's adapter of a `checked` class, of a plain dataclass or of a model."""
    # a plain one
    if is_dataclass(cls) and "__get_pydantic_core_schema__" not in vars(cls):
        plain: Any = cls
        plain.__get_pydantic_core_schema__ = classmethod(_schema)
        plain.__pydantic_config__ = _CONFIG
    return TypeAdapter(cls)


def build(cls: type[T], table: Mapping[str, Any], where: str) -> T:
    """An instance of a `checked` class, or a pydantic model, from a table of its
    fields.

    where: how messages call the table, such as `job.toml [training]`.
    Raises ConfigError for an unknown key, a missing one or a value that cannot be.
    """
    try:
        made: T = adapter(cls).validate_python(table)  # type: ignore[arg-type]
        return made
    except ValidationError as error:
        raise ConfigError(_told(error, where)) from error
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _told(error: ValidationError, where: str, names: Sequence[str] = ()) -> str:
    """The first thing that is wrong, with its place. names: of values given by
    position."""
    first = error.errors(include_url=False)[0]
    kind, value, limits = first["type"], first["input"], first.get("ctx", {})
    place = first["loc"]
    if place and isinstance(place[0], int) and place[0] < len(names):
        place = (names[place[0]], *place[1:])
    *tables, key = [part for part in place if isinstance(part, str)] or [""]
    if kind in ("missing", "missing_argument"):
        return f"{_at(where, *tables)}the key {key!r} is missing"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{_at(where, *tables)}unknown key {key!r}"
    if kind == "refused":
        return f"{_at(where, *tables, key)}{first['msg']}"
    value_of = f"{'.'.join([*tables, key])} = {value!r}"
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        return f"{_at(where)}{value_of}: {words} {limits[name]:g} is needed"
    if kind == "literal_error":
        needed = f"expected one of {limits['expected'].replace(' or ', ', ')}"
    else:
        needed = _EXPECTED.get(kind.removesuffix("_type"), first["msg"])
    return f"{where}{' ' if where else ''}{value_of}: {needed}"


def _at(*names: str) -> str:
    """A place and a colon, where there is any."""
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
    **dict.fromkeys(("int", "int_from_float"), "expected a whole number"),
    **dict.fromkeys(("float", "finite_number"), "expected a number"),
    "bool": "expected true or false",
    **dict.fromkeys(("tuple", "list", "frozen_set"), "expected a list"),
    **dict.fromkeys(("dict", "mapping", "dataclass", "model"), "expected a table"),
}


def assign(table: dict[str, Any], assignment: str) -> None:
    """Apply `--set training.epochs=3` to a table, in place. Values are written as in
    TOML; `sites.*.fraction=0.5` sets the key in every site's table.

    Raises ConfigError where there is no `=` or no such table can be.
    """
    dotted, sign, text = assignment.partition("=")
    if not sign or not dotted.strip():
        raise ConfigError(
            f"--set {assignment}: expected KEY=VALUE, such as training.epochs=3"
        )
    try:
        (value,) = tomllib.loads(f"value = {text}").values()
    except ValueError:  # not TOML, or more than one line of it
        value = text  # bare words are text
    *parents, last = dotted.strip().split(".")
    tables = [table]
    for name in parents:
        tables = [
            inner for outer in tables for inner in _step_into(outer, name, assignment)
        ]
    for inner in tables:
        inner[last] = value


def _step_into(
    table: dict[str, Any], name: str, assignment: str
) -> list[dict[str, Any]]:
    """The table called `name`, or every table where it is `*`."""
    inner = list(table.values()) if name == "*" else [table.setdefault(name, {})]
    if not inner or not all(isinstance(value, dict) for value in inner):
        raise ConfigError(f"--set {assignment}: {name!r} is not a table of this job")
    return inner


def path_of(given: object, expected: str) -> Path:
    """A path that a person gave. expected: what of.

    Raises ConfigError for what is none.
    """
    if not isinstance(given, str | os.PathLike):
        raise ConfigError(f"expected {expected}, not {type(given).__name__}")
    return Path(given)


# environment variables that had another name before
_FORMER_NAMES = {"MIMIC_III": "MIMIC3"}


def expand(text: str, where: str) -> str:
    """Return a path with `$NAME` and `~` replaced.

    Raises:
        ConfigError: A variable is not set.
    """
    missing = [n for n in re.findall(r"\$\{?(\w+)\}?", text) if n not in os.environ]
    if missing:
        name = missing[0]
        former = _FORMER_NAMES.get(name, "")
        if former in os.environ:
            remedy = f"{former}, its former name, is set: export {name}=${former}"
        else:
            remedy = f"for example: export {name}=/path/to/folder"
        raise ConfigError(
            f"{where} = {text!r}: the environment variable {name} is not set; {remedy}"
        )
    return os.path.expanduser(os.path.expandvars(text))


def over(preset: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a preset's table with given values in place of its own, also in tables
    inside it."""
    both = {
        key: over(preset[key], value)
        if isinstance(value, Mapping) and isinstance(preset.get(key), Mapping)
        else value
        for key, value in given.items()
    }
    return {**preset, **both}
