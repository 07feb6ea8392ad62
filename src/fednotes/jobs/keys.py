"""The reference of a job file's keys, and its JSON schema, made of the tables that read it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pydantic

from fednotes import methods
from fednotes.core.errors import ConfigError, nearest
from fednotes.encoders.language_model import LanguageModelConfig
from fednotes.jobs.job import FederationConfig, SilosConfig, TagsConfig
from fednotes.jobs.job_file import FILLED_IN, KINDS, TopConfig
from fednotes.jobs.patient_tables import ConceptsConfig, HoldOutConfig, TextConfig
from fednotes.patients.phenotyper import PhenotypeConfig
from fednotes.taggers.saving import kinds, model_class

_PHENOTYPES = "[phenotypes] of patients"
_CODES = '  NAME = []  (codes such as "icd10:I10", any of which makes it present)'
_WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false"}
_SHARED: dict[str, type[Any]] = {
    "tags": TagsConfig,
    "silos": SilosConfig,
    "federation": FederationConfig,
    "concepts": ConceptsConfig,
    "text": TextConfig,
    "hold_out": HoldOutConfig,
}


def _models(method: str) -> dict[str, type[Any]]:
    """The classes that may read [model], by its `kind`; "" where there is one alone."""
    own_model = {"notes": LanguageModelConfig, "patients": PhenotypeConfig}
    own = own_model.get(methods.find(method).holds)
    if own is not None:
        return {"": own}
    return {kind: model_class(kind) for kind in kinds()}


def tables() -> Iterator[tuple[str, type[Any]]]:
    """Every table of a job file, with its heading and the class that reads it."""
    yield "at the top, before any table", TopConfig
    for each in KINDS.values():
        yield f"[sites.NAME] of methods that read {each.name}", each.sites
    yield "[synthetic] in place of sites", KINDS["documents"].synthetic
    yield "[synthetic] of patients", KINDS["patients"].synthetic
    for name, made in _SHARED.items():
        of = " of patients" if name in KINDS["patients"].tables else ""
        yield f"[{name}]{of}", made
    for name in methods.names():
        yield f"[training] of {name}", methods.find(name).Config
    models: dict[str, type[Any]] = {}
    for name in methods.names():
        for kind, made in _models(name).items():
            models[f'[model] kind = "{kind}"' if kind else f"[model] of {name}"] = made
    yield from sorted(models.items(), key=lambda item: "kind" not in item[0])


def reference(name: str = "") -> str:
    """Each table's keys with their defaults and what they mean; `name`: such as "sites".

    Raises ConfigError for a table that no job has.
    """
    parts = {head: "\n".join([head, *_lines(head, made)]) for head, made in tables()}
    parts[_PHENOTYPES] = f"{_PHENOTYPES}\n{_CODES}"
    chosen = [text for head, text in parts.items() if name in ("", _short(head))]
    if not chosen:
        raise ConfigError(
            f"no table of a job is called {name!r}; {nearest(name, set(map(_short, parts)))}"
        )
    return "\n".join(chosen)


def markdown() -> str:
    """The reference as a page (`docs/job.md`)."""
    parts = [
        "# The keys of a job file\n",
        "Made by `fednotes job keys --markdown`; `fednotes job schema` prints a JSON schema that "
        "editors complete and check job files by. `$NAME` in a path is an environment variable.\n",
    ]
    for head, made in tables():
        lines = "\n".join(line.removeprefix("  ") for line in _lines(head, made))
        parts.append(f"## {head}\n\n```text\n{lines.strip()}\n```\n")
    parts.append(f"## {_PHENOTYPES}\n\n```text\n{_CODES.strip()}\n```\n")
    return "\n".join(parts)


def schema() -> dict[str, Any]:
    """The JSON schema of a job file: what may stand in a table depends on the method."""
    top = _schema(TopConfig)
    shared = {name: _schema(made) for name, made in _SHARED.items()}
    codes = {"type": "array", "items": {"type": "string"}, "minItems": 1}
    shared["phenotypes"] = {"type": "object", "additionalProperties": codes}
    cases = []
    for name in methods.names():
        kind = KINDS[methods.find(name).holds]
        models = [
            _schema(made, **({"kind": Literal[of]} if of else {}))
            for of, made in _models(name).items()
        ]
        own = {
            "training": _schema(methods.find(name).Config),
            "model": {"anyOf": models},
            "sites": {"type": "object", "additionalProperties": _schema(kind.sites)},
            "synthetic": _schema(kind.synthetic),
        }
        method = {"properties": {"method": {"const": name}}}
        cases.append({"if": method, "then": {"properties": own}})
    by_method = {k: {"type": "object"} for k in ("training", "model", "sites", "synthetic")}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A job of fednotes",
        **top,
        "properties": {**top["properties"], **by_method, **shared},
        "allOf": cases,
    }


def _schema(made: type[Any], **more: Any) -> dict[str, Any]:
    """A table's own schema, without what the job fills in. more: further keys and their types."""
    hints = get_type_hints(made, include_extras=True)
    keys: dict[str, Any] = {name: (hint, None) for name, hint in more.items()}
    for field in fields(made):
        if field.name in FILLED_IN - ({"seed"} if made is TopConfig else set()):
            continue
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        keys[field.name] = (hints[field.name], ... if default is MISSING else default)
    config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    model = pydantic.create_model(made.__name__, __config__=config, **keys)
    found = model.model_json_schema(ref_template="#/$defs/{model}")
    return found | {"description": _documented(made)}


def _short(head: str) -> str:
    return head.removeprefix("[").split("]")[0].split(".")[0] if head[0] == "[" else "top"


def _lines(head: str, made: type[Any]) -> Iterator[str]:
    hints = get_type_hints(made)
    for field in fields(made):
        if not ("[training]" in head and field.name in FILLED_IN):
            yield f"  {field.name} = {_default(field)}{_kind(hints[field.name])}"
    for line in _documented(made).split("\n")[1:]:
        yield f"    {line}".rstrip()
    yield ""


def _documented(made: type[Any]) -> str:
    """A class's text, and that of a class it extends."""
    own = inspect.cleandoc(made.__doc__ or "")
    above = [base for base in made.__mro__[1:] if is_dataclass(base)]
    more = [inspect.cleandoc(base.__doc__ or "").partition("\n")[2] for base in above]
    return "\n".join([own, *(text.strip("\n") for text in more)])


def _default(field: Field[Any]) -> str:
    made = field.default_factory() if field.default_factory is not MISSING else field.default
    if made is MISSING:
        return "…"
    if made is None:
        return "(none)"
    if isinstance(made, tuple):
        made = list(made)
    return "(a table)" if is_dataclass(made) else json.dumps(made, default=str)


def _kind(hint: Any) -> str:
    """What a value may be, in brackets."""
    if get_origin(hint) is Literal:
        return f"  (one of {', '.join(json.dumps(a) for a in get_args(hint))})"
    return f"  ({_WORDS[hint]})" if hint in _WORDS else ""
