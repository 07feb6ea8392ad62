"""The reference of a job's keys, and its JSON schema, made from the classes that read a
job.

Every default that stands here is the effective one: what a job gets that does not give
the key. A method's presets change many defaults of its classes, and a job without
`preset` has the preset "best", so that one's values are the defaults. Where another
preset, a [privacy] table or another method gives another value, the key names it beside
the default.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import BaseMetadata, Ge, Gt, Interval, Le, Lt

from fednotes import methods
from fednotes.core.errors import ConfigError, nearest
from fednotes.core.settings import Mark, adapter, marked_fields
from fednotes.jobs import kinds
from fednotes.jobs.job import (
    ConfigTable,
    FederationConfig,
    ListsTable,
    SilosConfig,
    SiteKind,
)
from fednotes.jobs.job_file import (
    DEFAULT_PRESET,
    TopConfig,
    model_preset,
    training_preset,
)
from fednotes.jobs.local_files import model_classes
from fednotes.methods.base import Method
from fednotes.privacy.promise import Privacy
from fednotes.taggers.tagger import PRESETS as TAGGERS
from fednotes.taggers.tagger import TaggerConfig

# Tables that jobs on every kind of data may have, and the class that reads each.
SHARED: Mapping[str, type[Any]] = {
    "silos": SilosConfig,
    "federation": FederationConfig,
    "privacy": Privacy,
}
_TITLE = "# The keys of a job file"
_INTRODUCTION = """\
This page is generated: `fednotes job keys --markdown`.

**Default** is what a job gets that does not give the key. A job without `preset` has
`preset = "best"`, so the defaults of [training] and [model] are those of that preset.
**Elsewhere** lists the values that other presets, methods or tables give instead.
`fednotes job show JOB` prints one job with all of its values and says where each comes from.
`fednotes job schema` prints a JSON schema, by which editors complete and check job files.
`$NAME` in a path stands for an environment variable.
"""
_HEADS = ("key", "type", "default", "elsewhere", "meaning")


@dataclass(frozen=True)
class Key:
    """One key of a table.

    Attributes:
        name: The key.
        type: What its value may be, in words.
        default: The value of a job that does not give the key; `dataclasses.MISSING` if
            it must.
        elsewhere: Other defaults, by the circumstance in which a job gets them.
        meaning: What the key does.
    """

    name: str
    type: str
    default: Any
    elsewhere: Mapping[str, Any]
    meaning: str


@dataclass(frozen=True)
class Table:
    """One table of a job file.

    Attributes:
        heading: Its name and for which jobs it is, such as "[training] of fedner".
        about: What holds for the table as a whole.
        keys: Its keys in the order of the class that reads it.
    """

    heading: str
    about: str
    keys: tuple[Key, ...]

    @property
    def name(self) -> str:
        """The name of the outermost table, or "top"."""
        if not self.heading.startswith("["):
            return "top"
        return re.split(r"[.\]]", self.heading[1:])[0]


# ---- defaults ------------------------------------------------------------------------

# values that stand in place of a class's own defaults, by key
Values = Mapping[str, Any]


def class_defaults(cls: type[Any]) -> dict[str, Any]:
    """Return the defaults that a class itself has; a field without one is left out."""
    found = {}
    for field in fields(cls):
        default = _default_of(field)
        if default is not MISSING:
            found[field.name] = default
    return found


def _default_of(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def known_key(method: str, key: str) -> bool:
    """Return whether a job of a method may have a key such as "training.epochs".

    Raises:
        ConfigError: There is no such method.
    """
    top, *parts = key.split(".")
    kind = kinds.find(methods.find(method).holds)
    if top in {field.name for field in fields(TopConfig)}:
        return not parts
    if top == "sites":
        parts = parts[1:]  # without the site's name
    table = kind.tables.get(top)
    if isinstance(table, ListsTable):
        return True  # its keys are free names
    if top == "model" and parts == ["kind"]:
        return True
    return any(_has_key(cls, parts) for cls in _classes_of(top, method, kind))


def _classes_of(table: str, method: str, kind: SiteKind) -> Sequence[type[Any]]:
    """Return the classes that may read a table of a job; none if it is unknown."""
    if table == "training":
        return [methods.find(method).config_class]
    if table == "model":
        return list(model_classes(methods.find(method)).values())
    if table == "sites":
        return [kind.site_config]
    if table == "synthetic":
        return [kind.synthetic_config]
    if table in SHARED:
        return [SHARED[table]]
    of_kind = kind.tables.get(table)
    return [of_kind.config] if isinstance(of_kind, ConfigTable) else []


def _has_key(cls: type[Any], parts: Sequence[str]) -> bool:
    """Return whether a table has a key, such as ["lora", "rank"] for one inside a key.

    Below a key whose value is no table of settings, such as a mapping, all keys are
    free.

    cls: the class that reads the table.
    """
    if not parts:
        return True
    first, *inner = parts
    keys = {field.name for field in fields(cls)} - marked_fields(cls, Mark.FILLED_IN)
    if first not in keys:
        return False
    hints = get_type_hints(cls)
    if not is_dataclass(hints[first]):
        return True
    return _has_key(hints[first], inner)


def _model_values(method: Method, preset: str, kind: str) -> Values:
    """Return the [model] values of a preset in a job with this kind of model."""
    models = method.list_models()
    only_kind = models is not None and len(models) == 1
    settings = {} if only_kind else {"kind": kind}
    return model_preset(method.presets[preset], settings)


def _training_elsewhere(method: Method) -> Iterator[tuple[str, Values]]:
    for preset, tables in method.presets.items():
        if preset != DEFAULT_PRESET:
            yield f'preset "{preset}"', training_preset(method, tables, private=False)
    if method.dp is not None:
        best = method.presets[DEFAULT_PRESET]
        yield "with [privacy]", training_preset(method, best, private=True)


def _shared_elsewhere(table: str) -> Iterator[tuple[str, Values]]:
    for name in methods.names():
        for preset, tables in methods.find(name).presets.items():
            if table in tables:
                yield f'preset "{preset}" of {name}', tables[table]
    if table == "federation":
        yield "between three or more real sites", {"secure_sum": True}


# ---- tables --------------------------------------------------------------------------


def tables() -> tuple[Table, ...]:
    """Return every table that a job file may have, with the effective defaults of its
    keys."""
    return tuple(_tables())


def _tables() -> Iterator[Table]:
    yield from _table("at the top, before any table", TopConfig)
    all_kinds = kinds.all_kinds()
    for kind in all_kinds:
        yield from _table(
            f"[sites.NAME] of methods that read {kind.name}", kind.site_config
        )
    yield from _synthetic_tables(all_kinds)
    for name, cls in SHARED.items():
        yield from _table(f"[{name}]", cls, elsewhere=tuple(_shared_elsewhere(name)))
    for kind in all_kinds:
        yield from _kind_tables(kind)
    for name in methods.names():
        method = methods.find(name)
        yield from _table(
            f"[training] of {name}",
            method.config_class,
            values=training_preset(
                method, method.presets[DEFAULT_PRESET], private=False
            ),
            elsewhere=tuple(_training_elsewhere(method)),
            hidden=marked_fields(method.config_class, Mark.FILLED_IN),
        )
    yield from _model_tables()


def _synthetic_tables(all_kinds: Sequence[SiteKind]) -> Iterator[Table]:
    """Yield a table for each class that reads [synthetic]."""
    heading = "[synthetic] in place of sites"
    seen: set[type[Any]] = set()
    for kind in all_kinds:
        if kind.synthetic_config not in seen:
            yield from _table(
                heading if not seen else f"[synthetic] of {kind.name}",
                kind.synthetic_config,
            )
        seen.add(kind.synthetic_config)


def _kind_tables(kind: SiteKind) -> Iterator[Table]:
    """Yield the tables that only jobs on one kind of data have."""
    for name, table in kind.tables.items():
        if isinstance(table, ConfigTable):
            elsewhere = (*_shared_elsewhere(name), *table.elsewhere.items())
            yield from _table(table.heading, table.config, elsewhere=elsewhere)
        else:
            key = Key("NAME", "list of texts", MISSING, {}, table.meaning)
            yield Table(table.heading, table.about, (key,))


def _model_tables() -> Iterator[Table]:
    """Yield a table for each kind of model, then those of the methods with one model
    alone."""
    users: dict[str, list[str]] = {}
    for name in methods.names():
        for kind in model_classes(methods.find(name)):
            users.setdefault(kind or f"of {name}", []).append(name)
    for kind in sorted(users, key=lambda kind: kind.startswith("of ")):
        names = users[kind]
        if kind.startswith("of "):
            heading, cls, kind_key = (
                f"[model] {kind}",
                model_classes(methods.find(names[0]))[""],
                "",
            )
        else:
            heading, cls, kind_key = (
                f'[model] kind = "{kind}"',
                model_classes(methods.find(names[0]))[kind],
                kind,
            )
        by_preset = [
            (name, preset, _model_values(methods.find(name), preset, kind_key))
            for name in names
            for preset in methods.find(name).presets
        ]
        yield from _model_table(heading, cls, by_preset, kind_key)


def _model_table(
    heading: str,
    cls: type[Any],
    by_preset: Sequence[tuple[str, str, Values]],
    kind: str,
) -> Iterator[Table]:
    """Yield a model's table. Its defaults are the class's if any method gives these,
    else those of the first method; what other methods and presets give stands beside
    them.

    by_preset: method, preset and the preset's values of the model.
    """
    usual: list[Values] = [
        values for _, preset, values in by_preset if preset == DEFAULT_PRESET
    ]
    default = {} if {} in usual else usual[0]
    elsewhere = []
    alone = len({name for name, _, _ in by_preset}) == 1
    for name, preset, values in by_preset:
        if preset == DEFAULT_PRESET:
            label = name
        else:
            label = f'preset "{preset}"' if alone else f'{name}, preset "{preset}"'
        elsewhere.append((label, values))
    if cls is TaggerConfig:
        for name, tagger in TAGGERS.items():
            own = {field.name: getattr(tagger, field.name) for field in fields(tagger)}
            elsewhere.append(
                (f'tagger = "{name}"', {**own, "tagger": default.get("tagger")})
            )
    yield from _table(heading, cls, values=default, elsewhere=elsewhere, kind=kind)


def _table(
    heading: str,
    cls: type[Any],
    *,
    values: Values = types.MappingProxyType({}),
    elsewhere: Sequence[tuple[str, Values]] = (),
    hidden: Collection[str] = (),
    kind: str = "",
) -> Iterator[Table]:
    """Yield the table that a class reads, then the tables inside it."""
    about, meanings = documented(cls)
    defaults = class_defaults(cls)
    hints = get_type_hints(cls, include_extras=True)
    keys, inner = [], []
    if kind and "kind" not in hints:
        keys.append(Key("kind", json.dumps(kind), kind, {}, meanings.get("kind", "")))
    for field in fields(cls):
        name = field.name
        if name in hidden:
            continue
        if is_dataclass(hints[name]):
            inner.append(name)
            continue
        default = values.get(name, defaults.get(name, MISSING))
        others = {}
        for label, other in elsewhere:
            value = other.get(name, defaults.get(name, MISSING))
            if plain(value) != plain(default):
                others[label] = value
        if name == "tagger":
            others = {
                label: value for label, value in others.items() if value is not None
            }
        meaning = meanings.get(name, "")
        keys.append(Key(name, type_in_words(hints[name]), default, others, meaning))
    yield Table(heading, about, tuple(keys))
    for name in inner:
        yield from _table(
            heading.replace("[model]", f"[model.{name}]"),
            hints[name],
            values=values.get(name, {}),
            elsewhere=[(label, other.get(name, {})) for label, other in elsewhere],
        )


def plain(value: Any) -> Any:
    """Return a value as TOML would have it: tuples as lists."""
    return list(value) if isinstance(value, tuple) else value


# ---- what stands in docstrings -------------------------------------------------------


_SECTION = "Attributes:\n"


def documented(cls: type[Any]) -> tuple[str, dict[str, str]]:
    """Return what a class's docstring says of the class, and of each of its fields.

    The docstring's `Attributes:` section has an entry for each field, such as `rounds:
    …` or `rank, alpha: …`. A field that a class does not describe is taken from the
    classes that it extends.
    """
    names = {field.name for field in fields(cls)} | {"kind"}
    about: list[str] = []
    meanings: dict[str, str] = {}
    for base in cls.__mro__:
        if not is_dataclass(base):
            continue
        paragraphs = inspect.cleandoc(base.__doc__ or "").split("\n\n")
        for paragraph in paragraphs[1:]:
            for name, text in _entries(paragraph, names).items():
                meanings.setdefault(name, text)
        if base is cls:
            prose = (each for each in paragraphs if not _entries(each, names))
            about += [
                _one_line(each) for each in prose if not each.startswith(_SECTION)
            ]
    return "\n\n".join(about), meanings


def _entries(paragraph: str, names: Collection[str]) -> dict[str, str]:
    """Return the entries of a paragraph by name; {} for one that does not begin with an
    entry."""
    text = inspect.cleandoc(paragraph.removeprefix(_SECTION))
    marks = [
        mark
        for mark in re.finditer(r"^((?:\w+, )*\w+): ", text, re.MULTILINE)
        if set(mark[1].split(", ")) <= set(names)
    ]
    if not marks or marks[0].start() > 0:
        return {}
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    found = {}
    for mark, end in zip(marks, ends, strict=True):
        for name in mark[1].split(", "):
            found[name] = _one_line(text[mark.end() : end])
    return found


def _one_line(text: str) -> str:
    return " ".join(text.split())


_WORDS = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    Any: "text or list of texts",
}


def type_in_words(hint: Any) -> str:
    """Return what a value of this type may be, such as "whole number, at least 1"."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return ", ".join([type_in_words(inner[0]), *_bounds(inner[1:])])
    if origin is Literal:
        return " or ".join(json.dumps(choice) for choice in inner)
    if origin in (Union, types.UnionType):
        return type_in_words(next(each for each in inner if each is not type(None)))
    if origin is tuple:
        element = type_in_words(inner[0]).partition(",")[0]
        return f"list of {element}s"
    if origin is not None and issubclass(origin, Mapping):
        return "table of texts"
    return _WORDS.get(hint, "table")


def _bounds(metadata: Sequence[Any]) -> Iterator[str]:
    for each in metadata:
        parts = each if isinstance(each, Interval) else (each,)
        for part in parts:
            if not isinstance(part, BaseMetadata):
                continue
            if isinstance(part, Ge):
                yield f"at least {part.ge:g}"
            elif isinstance(part, Gt):
                yield f"more than {part.gt:g}"
            elif isinstance(part, Le):
                yield f"at most {part.le:g}"
            elif isinstance(part, Lt):
                yield f"less than {part.lt:g}"


# ---- as text and as a page -----------------------------------------------------------


def reference(name: str = "") -> str:
    """Return the keys of every table as text, or of the tables called `name`, such as
    "sites".

    Raises:
        ConfigError: No table of a job has this name.
    """
    every = tables()
    chosen = [table for table in every if name in ("", table.name)]
    if not chosen:
        known = {table.name for table in every}
        raise ConfigError(
            f"no table of a job is called {name!r}; {nearest(name, known)}"
        )
    return "\n".join(_text(table) for table in chosen)


def _text(table: Table) -> str:
    lines = [
        table.heading,
        *(f"    {line}".rstrip() for line in table.about.split("\n")),
    ]
    for key in table.keys:
        lines.append(f"  {key.name} = {shown(key.default)}  ({key.type})")
        lines += [f"      {text}" for text in _elsewhere(key)]
        if key.meaning:
            lines.append(f"      {key.meaning}")
    return "\n".join(lines) + "\n"


def shown(value: Any) -> str:
    """Return a default for people: as in TOML, or what stands for no value."""
    if value is MISSING:
        return "(required)"
    if value is None:
        return "(none)"
    return json.dumps(plain(value), ensure_ascii=False, default=str)


def _elsewhere(key: Key) -> list[str]:
    """Return a line for each other default, with all the circumstances that give it."""
    by_value: dict[str, list[str]] = {}
    for label, value in key.elsewhere.items():
        by_value.setdefault(shown(value), []).append(label)
    return [f"{value}: {'; '.join(labels)}" for value, labels in by_value.items()]


def markdown() -> str:
    """Return the reference as a page (`docs/job.md`)."""
    parts = [f"{_TITLE}\n", _INTRODUCTION]
    for table in tables():
        heads = [
            head for head in _HEADS if head != "elsewhere" or _has_elsewhere(table)
        ]
        lines = [_row(heads), _row(["---"] * len(heads))]
        for key in table.keys:
            cells = {
                "key": f"`{key.name}`",
                "type": key.type,
                "default": _code(shown(key.default)),
                "elsewhere": "<br>".join(map(_code_first, _elsewhere(key))),
                "meaning": key.meaning,
            }
            lines.append(_row([cells[head] for head in heads]))
        about = f"{table.about}\n\n" if table.about else ""
        parts.append(f"## {table.heading}\n\n{about}" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _has_elsewhere(table: Table) -> bool:
    return any(key.elsewhere for key in table.keys)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _code(value: str) -> str:
    return value if value.startswith("(") else f"`{value}`"


def _code_first(line: str) -> str:
    value, _, labels = line.partition(": ")
    return f"{_code(value)}: {labels}"


# ---- the JSON schema -----------------------------------------------------------------


def schema() -> dict[str, Any]:
    """Return the JSON schema of a job file.

    What may stand in a table depends on the job's method, and its defaults on the
    preset too: the schema has a case for each method, and one for each of its presets.
    """
    top = _schema(TopConfig)
    shared = {name: _schema(cls) for name, cls in SHARED.items()}
    for kind in kinds.all_kinds():
        for name, table in kind.tables.items():
            if isinstance(table, ConfigTable):
                shared[name] = _schema(table.config)
            else:
                texts = {"type": "array", "items": {"type": "string"}, "minItems": 1}
                shared[name] = {"type": "object", "additionalProperties": texts}
    cases = []
    for name in methods.names():
        kind = kinds.find(methods.find(name).holds)
        of_method = {
            "sites": {
                "type": "object",
                "additionalProperties": _schema(kind.site_config),
            },
            "synthetic": _schema(kind.synthetic_config),
        }
        only_method = {
            "properties": {"method": {"const": name}},
            "required": ["method"],
        }
        cases.append({"if": only_method, "then": {"properties": of_method}})
        for preset in methods.find(name).presets:
            of_preset = _settings(name, preset)
            cases.append(
                {"if": _condition(name, preset), "then": {"properties": of_preset}}
            )
    by_method = {
        key: {"type": "object"} for key in ("training", "model", "sites", "synthetic")
    }
    return {
        **top,
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A job of fednotes",
        "properties": {**top["properties"], **by_method, **shared},
        "allOf": cases,
    }


def _condition(method: str, preset: str) -> dict[str, Any]:
    """Return when a case holds. A job without `preset` has the default one."""
    required = ["method"] if preset == DEFAULT_PRESET else ["method", "preset"]
    properties = {"method": {"const": method}, "preset": {"const": preset}}
    return {"properties": properties, "required": required}


def _settings(name: str, preset: str) -> dict[str, Any]:
    """Return the tables whose defaults depend on the preset."""
    method = methods.find(name)
    tables = method.presets[preset]
    models = []
    for kind, cls in model_classes(methods.find(name)).items():
        models.append(_schema(cls, _model_values(method, preset, kind), kind=kind))
    training = training_preset(method, tables, private=False)
    found = {
        "training": _schema(
            method.config_class,
            training,
            hidden=marked_fields(method.config_class, Mark.FILLED_IN),
        ),
        "model": {"anyOf": models},
    }
    if method.dp is not None:
        for key, value in method.dp.required_settings.items():
            described = found["training"]["properties"][key]
            text = described.get("description", "")
            described["description"] = f"{text} With [privacy]: {shown(value)}.".strip()
    for key, table in kinds.find(method.holds).tables.items():
        if key in tables and isinstance(table, ConfigTable):
            found[key] = _schema(table.config, tables[key])
    return found


def _schema(
    cls: Any,
    values: Values = types.MappingProxyType({}),
    *,
    hidden: Collection[str] = (),
    kind: str = "",
) -> dict[str, Any]:
    """Return a table's schema.

    Args:
        cls: The class that reads the table.
        values: What stands in place of the class's own defaults.
        hidden: Fields that are no keys, because a job fills them in.
        kind: The model's kind, if that is a key.
    """
    whole = adapter(cls).json_schema(ref_template="#/$defs/{model}")
    about, meanings = documented(cls)
    defaults = {**class_defaults(cls), **values}
    hints = get_type_hints(cls)
    keys = {}
    for name, key in whole["properties"].items():
        if name in hidden:
            continue
        if is_dataclass(hints.get(name)):
            keys[name] = _schema(hints[name], values.get(name, {}))
            continue
        keys[name] = dict(key)
        if name in defaults:
            keys[name]["default"] = plain(defaults[name])
        if meanings.get(name):
            keys[name]["description"] = meanings[name]
    if kind:
        keys["kind"] = {"const": kind, "default": kind}
    found = {key: value for key, value in whole.items() if key != "$defs"}
    return found | {
        "properties": keys,
        "additionalProperties": False,
        "description": about,
    }
