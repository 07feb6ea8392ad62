"""Make the JSON schema of a job file, which lets editors complete and check jobs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import is_dataclass
from typing import Any, get_type_hints

from fednotes import methods
from fednotes.core.settings import Mark, get_adapter, list_marked_fields
from fednotes.jobs import kinds
from fednotes.jobs.field_docs import read_docstring
from fednotes.jobs.job import ConfigTable
from fednotes.jobs.job_file import DEFAULT_PRESET, TopConfig, find_training_defaults
from fednotes.jobs.local_files import list_model_classes
from fednotes.jobs.reference import (
    SHARED_TABLES,
    Values,
    list_class_defaults,
    list_model_values,
    to_toml_value,
)
from fednotes.jobs.reference_text import format_default
from fednotes.methods.base import Method

Schema = dict[str, Any]


def make_schema() -> Schema:
    """Return the JSON schema of a job file.

    The permitted keys of a table depend on the job's method, and its defaults on the
    preset too, so the schema has a case for each method and for each of its presets.
    """
    top = _make_table(TopConfig)
    by_method = {
        key: {"type": "object"} for key in ("training", "model", "sites", "synthetic")
    }
    cases = []
    for name in methods.list_method_names():
        cases.append(_make_method_case(name))
        cases += [
            _make_preset_case(name, preset)
            for preset in methods.find_method(name).presets
        ]
    return {
        **top,
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A job of fednotes",
        "properties": {**top["properties"], **by_method, **_make_shared_tables()},
        "allOf": cases,
    }


def _make_shared_tables() -> dict[str, Schema]:
    """Return the tables that do not depend on the method."""
    tables = {name: _make_table(cls) for name, cls in SHARED_TABLES.items()}
    for kind in kinds.list_kinds():
        for name, table in kind.tables.items():
            if isinstance(table, ConfigTable):
                tables[name] = _make_table(table.config)
            else:
                texts = {"type": "array", "items": {"type": "string"}, "minItems": 1}
                tables[name] = {"type": "object", "additionalProperties": texts}
    return tables


def _make_method_case(name: str) -> Schema:
    """Return the case of a method: the tables that depend on its kind of data."""
    kind = kinds.find(methods.find_method(name).holds)
    sites = {"type": "object", "additionalProperties": _make_table(kind.site_config)}
    tables = {"sites": sites, "synthetic": _make_table(kind.synthetic_config)}
    condition = {"properties": {"method": {"const": name}}, "required": ["method"]}
    return {"if": condition, "then": {"properties": tables}}


def _make_preset_case(name: str, preset: str) -> Schema:
    """Return the case of a method's preset: the tables whose defaults it changes."""
    # A job without `preset` has the default one.
    required = ["method"] if preset == DEFAULT_PRESET else ["method", "preset"]
    properties = {"method": {"const": name}, "preset": {"const": preset}}
    condition = {"properties": properties, "required": required}
    tables = _make_preset_tables(methods.find_method(name), preset)
    return {"if": condition, "then": {"properties": tables}}


def _make_preset_tables(method: Method, preset: str) -> dict[str, Schema]:
    """Return the tables whose defaults depend on the preset."""
    models = [
        _make_table(cls, list_model_values(method, preset, kind), kind=kind)
        for kind, cls in list_model_classes(method).items()
    ]
    tables = {
        "training": _make_training_table(method, preset),
        "model": {"anyOf": models},
    }
    values = method.presets[preset]
    for key, table in kinds.find(method.holds).tables.items():
        if key in values and isinstance(table, ConfigTable):
            tables[key] = _make_table(table.config, values[key])
    return tables


def _make_training_table(method: Method, preset: str) -> Schema:
    """Return the [training] table; its text says what differential privacy fixes."""
    table = _make_table(
        method.config_class,
        find_training_defaults(method, method.presets[preset], private=False),
        hidden=list_marked_fields(method.config_class, Mark.FILLED_IN),
    )
    if method.dp is not None:
        for key, value in method.dp.required_settings.items():
            described = table["properties"][key]
            text = described.get("description", "")
            fixed = f"With [privacy]: {format_default(value)}."
            described["description"] = f"{text} {fixed}".strip()
    return table


def _make_table(
    cls: Any,
    values: Values | None = None,
    *,
    hidden: Collection[str] = (),
    kind: str = "",
) -> Schema:
    """Return a table's schema.

    Args:
        cls: The class that reads the table.
        values: Values that replace the class's own defaults.
        hidden: Fields that are not keys, because a job fills them in.
        kind: The model's kind, if that is a key.
    """
    values = values or {}
    schema: Schema = get_adapter(cls).json_schema(ref_template="#/$defs/{model}")
    description, key_descriptions = read_docstring(cls)
    defaults = list_class_defaults(cls) | dict(values)
    hints = get_type_hints(cls)
    keys: dict[str, Schema] = {}
    for name, type_schema in schema["properties"].items():
        if name in hidden:
            continue
        if is_dataclass(hints.get(name)):
            keys[name] = _make_table(hints[name], values.get(name, {}))
            continue
        key = dict(type_schema)
        if name in defaults:
            key["default"] = to_toml_value(defaults[name])
        if key_descriptions.get(name):
            key["description"] = key_descriptions[name]
        keys[name] = key
    if kind:
        keys["kind"] = {"const": kind, "default": kind}
    schema.pop("$defs", None)  # tables within this one are written out above
    return {
        **schema,
        "properties": keys,
        "additionalProperties": False,
        "description": description,
    }
