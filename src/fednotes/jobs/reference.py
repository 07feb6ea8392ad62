"""List the keys of a job file, derived from the classes that read a job.

Every default in the list is the effective one: the value of a job that does not set the
key. A method's presets change many defaults of its classes, and a job without `preset`
has the preset "best", so the values of that preset are the defaults. If another preset,
a [privacy] table or another method has a different value, the key lists it beside the
default.

`jobs/reference_text.py` formats the list as text, and `jobs/schema.py` makes the JSON
schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, is_dataclass
from typing import Any, get_type_hints

from fednotes import methods
from fednotes.core.settings import Mark, list_marked_fields
from fednotes.jobs import kinds
from fednotes.jobs.field_docs import describe_type, read_docstring
from fednotes.jobs.job import (
    ConfigTable,
    FederationConfig,
    LeftOutConfig,
    ListsTable,
    SilosConfig,
    SiteKind,
)
from fednotes.jobs.job_file import (
    DEFAULT_PRESET,
    TopConfig,
    find_model_defaults,
    find_training_defaults,
)
from fednotes.jobs.local_files import list_model_classes
from fednotes.methods.base import Method
from fednotes.privacy.promise import Privacy
from fednotes.taggers.tagger import PRESETS as TAGGERS
from fednotes.taggers.tagger import TaggerConfig

# Tables that jobs on every kind of data may have, each with the class that reads it.
SHARED_TABLES: Mapping[str, type[Any]] = {
    "silos": SilosConfig,
    "federation": FederationConfig,
    "left_out": LeftOutConfig,
    "privacy": Privacy,
}

# Values that replace a class's own defaults, by key.
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Key:
    """One key of a table.

    Attributes:
        name: The key.
        type: Description of its permitted values.
        default: The value in a job that does not set the key; `dataclasses.MISSING` if
            a job must set it.
        elsewhere: Other defaults, by the case in which they apply.
        meaning: Meaning of the key.
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
        heading: Its name and the jobs that it is for, such as "[training] for fedner".
        about: Description of the table as a whole.
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


def list_class_defaults(cls: type[Any]) -> dict[str, Any]:
    """Return the defaults of a class by field, omitting fields without a default."""
    defaults = {each.name: _find_default(each) for each in fields(cls)}
    return {name: value for name, value in defaults.items() if value is not MISSING}


def _find_default(field: Field[Any]) -> Any:
    """Return the default of a field; `MISSING` if it has none."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def list_model_values(method: Method, preset: str, kind: str) -> Values:
    """Return the [model] values of a preset in a job with this kind of model."""
    models = method.list_models()
    only_kind = models is not None and len(models) == 1
    settings = {} if only_kind else {"kind": kind}
    return find_model_defaults(method.presets[preset], settings)


def to_toml_value(value: Any) -> Any:
    """Return a value as TOML represents it: a tuple as a list."""
    return list(value) if isinstance(value, tuple) else value


# ---- which keys exist ----------------------------------------------------------------


def is_known_key(method: str, key: str) -> bool:
    """Return whether a job of a method may have a key such as "training.epochs".

    Raises:
        ConfigError: There is no such method.
    """
    top, *parts = key.split(".")
    kind = kinds.find(methods.find_method(method).holds)
    if top in {each.name for each in fields(TopConfig)}:
        return not parts
    if top == "sites":
        parts = parts[1:]  # without the site's name
    if isinstance(kind.tables.get(top), ListsTable):
        return True  # its keys are free names
    if top == "model" and parts == ["kind"]:
        return True
    return any(_has_key(cls, parts) for cls in _list_classes(top, method, kind))


def _list_classes(table: str, method: str, kind: SiteKind) -> Sequence[type[Any]]:
    """Return the classes that may read a table of a job; none if it is unknown."""
    if table == "training":
        return [methods.find_method(method).config_class]
    if table == "model":
        return list(list_model_classes(methods.find_method(method)).values())
    if table == "sites":
        return [kind.site_config]
    if table == "synthetic":
        return [kind.synthetic_config]
    if table in SHARED_TABLES:
        return [SHARED_TABLES[table]]
    of_kind = kind.tables.get(table)
    return [of_kind.config] if isinstance(of_kind, ConfigTable) else []


def _has_key(cls: type[Any], parts: Sequence[str]) -> bool:
    """Return whether a table has a key, such as ["lora", "rank"] for a nested key.

    Below a key whose value is not a table of settings, such as a mapping, any key is
    allowed.

    Args:
        cls: The class that reads the table.
        parts: The key and the keys below it.
    """
    if not parts:
        return True
    first, *inner = parts
    keys = {each.name for each in fields(cls)} - list_marked_fields(cls, Mark.FILLED_IN)
    if first not in keys:
        return False
    hints = get_type_hints(cls)
    if not is_dataclass(hints[first]):
        return True
    return _has_key(hints[first], inner)


# ---- tables --------------------------------------------------------------------------


def list_tables() -> tuple[Table, ...]:
    """Return every table of a job file, with the effective defaults of its keys."""
    return tuple(_make_tables())


def _make_tables() -> Iterator[Table]:
    """Yield every table of a job file, in the order of the page."""
    all_kinds = kinds.list_kinds()
    yield from _TableClass("Keys before the first table", TopConfig).make_tables()
    for kind in all_kinds:
        heading = f"[sites.NAME] for methods that read {kind.name}"
        yield from _TableClass(heading, kind.site_config).make_tables()
    yield from _make_synthetic_tables(all_kinds)
    for name, cls in SHARED_TABLES.items():
        elsewhere = tuple(_list_shared_elsewhere(name))
        yield from _TableClass(f"[{name}]", cls, elsewhere=elsewhere).make_tables()
    for kind in all_kinds:
        yield from _make_kind_tables(kind)
    for name in methods.list_method_names():
        yield from _make_training_tables(name)
    yield from _make_model_tables()


@dataclass(frozen=True)
class _TableClass:
    """A table, and the class that reads it.

    Attributes:
        heading: Heading of the table.
        cls: The class.
        values: Values that replace the class's own defaults.
        elsewhere: Other such values, each with the case in which they apply.
        hidden: Fields that are not keys, because a job fills them in.
        kind: The model's kind; "" if the table has no such key.
    """

    heading: str
    cls: type[Any]
    values: Values = field(default_factory=dict)
    elsewhere: Sequence[tuple[str, Values]] = ()
    hidden: Collection[str] = ()
    kind: str = ""

    def make_tables(self) -> Iterator[Table]:
        """Yield the table, then the tables inside it."""
        about, meanings = read_docstring(self.cls)
        hints = get_type_hints(self.cls, include_extras=True)
        names = [each.name for each in fields(self.cls) if each.name not in self.hidden]
        inner = [name for name in names if is_dataclass(hints[name])]
        keys = [
            self._make_key(name, hints[name], meanings.get(name, ""))
            for name in names
            if name not in inner
        ]
        if self.kind and "kind" not in hints:
            meaning = meanings.get("kind", "")
            kind_key = Key("kind", json.dumps(self.kind), self.kind, {}, meaning)
            keys.insert(0, kind_key)
        yield Table(self.heading, about, tuple(keys))
        for name in inner:
            yield from self._make_inner(name, hints[name]).make_tables()

    def _make_key(self, name: str, hint: Any, meaning: str) -> Key:
        """Return a key with its default, and its other defaults by case."""
        class_default = list_class_defaults(self.cls).get(name, MISSING)
        default = self.values.get(name, class_default)
        values = {
            label: other.get(name, class_default) for label, other in self.elsewhere
        }
        elsewhere = {
            label: value
            for label, value in values.items()
            if to_toml_value(value) != to_toml_value(default)
        }
        return Key(name, describe_type(hint), default, elsewhere, meaning)

    def _make_inner(self, name: str, cls: type[Any]) -> _TableClass:
        """Return the table that is the value of a key. Only [model] has such keys.

        Args:
            name: The key.
            cls: The class of its value.
        """
        return _TableClass(
            self.heading.replace("[model]", f"[model.{name}]"),
            cls,
            values=self.values.get(name, {}),
            elsewhere=[(label, other.get(name, {})) for label, other in self.elsewhere],
        )


def _make_synthetic_tables(all_kinds: Sequence[SiteKind]) -> Iterator[Table]:
    """Yield a table for each class that reads [synthetic]."""
    headings: dict[type[Any], str] = {}
    for kind in all_kinds:
        is_first = not headings
        heading = "instead of sites" if is_first else f"for {kind.name}"
        headings.setdefault(kind.synthetic_config, f"[synthetic] {heading}")
    for cls, heading in headings.items():
        yield from _TableClass(heading, cls).make_tables()


def _list_shared_elsewhere(table: str) -> Iterator[tuple[str, Values]]:
    """Yield the values of a table that presets and real sites have instead of defaults.

    Each value comes after the case in which it applies.
    """
    for name in methods.list_method_names():
        for preset, tables in methods.find_method(name).presets.items():
            if table in tables:
                yield f'preset "{preset}" of {name}', tables[table]
    if table == "federation":
        yield "between three or more real sites", {"secure_sum": True}


def _make_kind_tables(kind: SiteKind) -> Iterator[Table]:
    """Yield the tables that only jobs on one kind of data have."""
    for name, table in kind.tables.items():
        if isinstance(table, ConfigTable):
            elsewhere = (*_list_shared_elsewhere(name), *table.elsewhere.items())
            source = _TableClass(table.heading, table.config, elsewhere=elsewhere)
            yield from source.make_tables()
        else:
            key = Key("NAME", "list of texts", MISSING, {}, table.meaning)
            yield Table(table.heading, table.about, (key,))


def _make_training_tables(name: str) -> Iterator[Table]:
    """Yield the [training] table of a method."""
    method = methods.find_method(name)
    best = method.presets[DEFAULT_PRESET]
    source = _TableClass(
        f"[training] for {name}",
        method.config_class,
        values=find_training_defaults(method, best, private=False),
        elsewhere=tuple(_list_training_elsewhere(method)),
        hidden=list_marked_fields(method.config_class, Mark.FILLED_IN),
    )
    yield from source.make_tables()


def _list_training_elsewhere(method: Method) -> Iterator[tuple[str, Values]]:
    """Yield the [training] values of other presets, and with differential privacy.

    Each value comes after the case in which it applies.
    """
    for preset, tables in method.presets.items():
        if preset != DEFAULT_PRESET:
            yield (
                f'preset "{preset}"',
                find_training_defaults(method, tables, private=False),
            )
    if method.dp is not None:
        best = method.presets[DEFAULT_PRESET]
        yield "with [privacy]", find_training_defaults(method, best, private=True)


def _make_model_tables() -> Iterator[Table]:
    """Yield a table for each kind of model, then those of methods with one model."""
    methods_by_kind: dict[str, list[str]] = {}
    with_one_model = []
    for name in methods.list_method_names():
        for kind in list_model_classes(methods.find_method(name)):
            if kind:
                methods_by_kind.setdefault(kind, []).append(name)
            else:
                with_one_model.append(name)
    for kind, names in methods_by_kind.items():
        yield from _make_model_table(f'[model] with kind = "{kind}"', kind, names)
    for name in with_one_model:
        yield from _make_model_table(f"[model] for {name}", "", [name])


def _make_model_table(heading: str, kind: str, names: Sequence[str]) -> Iterator[Table]:
    """Yield the table of a kind of model.

    The defaults are those of the class if any method has them, otherwise those of the
    first method. The values of other methods and presets are listed beside them.

    Args:
        heading: Heading of the table.
        kind: The kind; "" if the table has no such key.
        names: Names of the methods that support it.
    """
    cls = list_model_classes(methods.find_method(names[0]))[kind]
    of_best = [
        list_model_values(methods.find_method(name), DEFAULT_PRESET, kind)
        for name in names
    ]
    default = {} if {} in of_best else of_best[0]
    elsewhere = [
        (
            _label_preset(name, preset, only_method=len(names) == 1),
            list_model_values(methods.find_method(name), preset, kind),
        )
        for name in names
        for preset in methods.find_method(name).presets
    ]
    if cls is TaggerConfig:
        elsewhere += _list_architectures_elsewhere(default)
    source = _TableClass(heading, cls, values=default, elsewhere=elsewhere, kind=kind)
    yield from source.make_tables()


def _label_preset(method: str, preset: str, *, only_method: bool) -> str:
    """Return the name of a method's preset in the list."""
    if preset == DEFAULT_PRESET:
        return method
    return f'preset "{preset}"' if only_method else f'{method}, preset "{preset}"'


def _list_architectures_elsewhere(default: Values) -> list[tuple[str, Values]]:
    """Return the values of the light tagger's architectures.

    Args:
        default: The default values of the table.
    """
    # The key `tagger` names the architecture, so it is not one of the differences.
    name = default.get("tagger", TaggerConfig().tagger)
    return [
        (f'tagger = "{architecture}"', {**asdict(config), "tagger": name})
        for architecture, config in TAGGERS.items()
    ]
