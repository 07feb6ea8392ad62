"""The reference of a job file's keys, made of the tables that read it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fednotes import methods
from fednotes.core.errors import ConfigError, nearest
from fednotes.encoders.language_model import LanguageModelConfig
from fednotes.jobs.job import (
    FILLED_IN,
    SITE_TABLES,
    FederationConfig,
    SilosConfig,
    SyntheticConfig,
    TagsConfig,
    TopConfig,
)
from fednotes.jobs.patient_tables import (
    ConceptsConfig,
    HoldOutConfig,
    SyntheticPatientsConfig,
    TextConfig,
)
from fednotes.patients.phenotyper import PhenotypeConfig
from fednotes.taggers.saving import model_class
from fednotes.taggers.tagger import TaggerConfig

_PHENOTYPES = "[phenotypes] of patients"
_WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false"}


def tables() -> Iterator[tuple[str, type[Any]]]:
    """Every table of a job file, with its heading and the class that reads it."""
    yield "at the top, before any table", TopConfig
    for kind, table in SITE_TABLES.items():
        yield f"[sites.NAME] of methods that read {kind}", table
    yield "[synthetic] in place of sites", SyntheticConfig
    yield "[synthetic] of patients", SyntheticPatientsConfig
    yield "[tags]", TagsConfig
    yield "[silos]", SilosConfig
    yield "[federation]", FederationConfig
    yield "[concepts] of patients", ConceptsConfig
    yield "[text] of patients", TextConfig
    yield "[hold_out] of patients", HoldOutConfig
    for name in methods.names():
        yield f"[training] of {name}", methods.find(name).Config
    yield '[model] kind = "tagger"', TaggerConfig
    for kind in ("encoder-tagger", "prompt-bart", "token-classifier"):
        yield f'[model] kind = "{kind}"', model_class(kind)
    for name in methods.names():
        holds = methods.find(name).holds
        model = {"notes": LanguageModelConfig, "patients": PhenotypeConfig}.get(holds)
        if model is not None:
            yield f"[model] of {name}", model


def reference(name: str = "") -> str:
    """Each table's keys with their defaults and what they mean; `name`: such as "sites".

    Raises ConfigError for a table that no job has.
    """
    parts = {head: "\n".join(_lines(head, made)) for head, made in tables()}
    parts[_PHENOTYPES] = (
        f'{_PHENOTYPES}\n  NAME = []  (codes such as "icd10:I10", any of which makes it present)'
    )
    chosen = [text for head, text in parts.items() if name in ("", _short(head))]
    if not chosen:
        raise ConfigError(
            f"no table of a job is called {name!r}; {nearest(name, set(map(_short, parts)))}"
        )
    return "\n".join(chosen)


def _short(head: str) -> str:
    return head.removeprefix("[").split("]")[0].split(".")[0] if head[0] == "[" else "top"


def _lines(head: str, made: type[Any]) -> Iterator[str]:
    yield head
    hints = get_type_hints(made)
    for field in fields(made):
        if not ("[training]" in head and field.name in FILLED_IN):
            yield f"  {field.name} = {_default(field)}{_kind(hints[field.name])}"
    for line in inspect.cleandoc(_documented(made)).split("\n")[1:]:
        yield f"    {line}".rstrip()
    yield ""


def _documented(made: type[Any]) -> str:
    """A class's text, and that of a class it extends."""
    own = made.__doc__ or ""
    above = [base for base in made.__mro__[1:] if is_dataclass(base)]
    more = [inspect.cleandoc(base.__doc__ or "").partition("\n")[2] for base in above]
    return "\n".join([inspect.cleandoc(own), *(text.strip("\n") for text in more)])


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
