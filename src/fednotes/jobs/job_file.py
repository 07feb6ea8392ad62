"""Job files: one TOML table says what is trained, on whose notes, and how.

method = "fedner"                 # names a module of fednotes.methods
preset = "best"                   # or "paper": that method's settings, overridden below
seed = 1
[training]                        # the method's Config
[model]                           # its model's settings
[sites.mercy]                     # one table a site, see `jobs/job.py`
path = "mercy/notes.jsonl"
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fednotes import methods
from fednotes.core.errors import ConfigError, nearest, within
from fednotes.core.federation import Method
from fednotes.core.settings import adapter, assign, build, checked, expand, path_of, read_toml
from fednotes.jobs.job import (
    POOLED,
    FederationConfig,
    HoldOutConfig,
    Job,
    SilosConfig,
    SiteKind,
    TagsConfig,
)
from fednotes.jobs.kinds import documents, notes, patients
from fednotes.jobs.results import CONDITIONS
from fednotes.patients.features import ConceptsConfig, TextConfig
from fednotes.privacy.promise import Privacy

KINDS = {kind.name: kind for kind in (documents.KIND, notes.KIND, patients.KIND)}
# Of a Config, by the job itself.
FILLED_IN = {
    *("seed", "tags", "platforms", "model", "space", "phenotypes", "questionable", "vectors"),
    *("shared_tags", "sites", "privacy", "min_sites"),
}
_TABLES = {"training", "model", "sites", "synthetic", "silos", "federation", "privacy"}.union(
    *(kind.tables for kind in KINDS.values())
)
_FILES = (  # of [model]: they may stand beside the job
    *("word_vectors", "contextual", "encoder", "backbone", "representation", "concept_vectors"),
)


@checked(frozen=True)
class TopConfig:
    """The keys of a job file outside its tables.

    method: names a module of `fednotes.methods`. title, notes: for people. preset: the method's
    settings to begin with, "best" or "paper". seed: the same one, the same run. conditions: what
    is trained, of "alone" (each site by itself), "federated" and "pooled" (all notes in one place).
    threads: of this process.
    """

    method: str
    title: str = ""
    notes: str = ""
    preset: str = "best"
    seed: int = 1
    conditions: tuple[str, ...] = CONDITIONS
    threads: int = 1

    def __post_init__(self) -> None:
        if not self.conditions:
            raise ConfigError(f"conditions = []: name some of {', '.join(CONDITIONS)}")
        for condition in self.conditions:
            if condition not in CONDITIONS:
                raise ConfigError(f"conditions has {condition!r}; {nearest(condition, CONDITIONS)}")
        most = 4 * (os.cpu_count() or 1)
        if not 1 <= self.threads <= most:
            raise ConfigError(f"threads = {self.threads}: expected 1 to {most} on this machine")


@lru_cache(maxsize=1)
def built_in_jobs() -> Mapping[str, Path]:
    """The jobs that come with the package, by name: `demo`, `fedner/table2`, …"""
    root = Path(str(resources.files("fednotes") / "experiments"))
    found = {str(path.relative_to(root).with_suffix("")): path for path in root.rglob("*.toml")}
    return {name: path for name, path in sorted(found.items()) if "base" not in read_toml(path)}


def load_job(name: str | Path, settings: tuple[str, ...] = ()) -> Job:
    """Read a job file, or a built-in job by name, and apply `--set` assignments.

    Raises ConfigError naming file, table and key.
    """
    table, path = load_table(name, settings)
    return parse_job(table, path.stem, path.resolve().parent, str(path))


def load_table(name: str | Path, settings: tuple[str, ...] = ()) -> tuple[dict[str, Any], Path]:
    """The tables of a job file, or a built-in job, after `--set`; and its file.

    Raises ConfigError.
    """
    path = path_of(name, "a job's file, name or table")
    if not path.is_file():
        known = built_in_jobs()
        if str(name) not in known:
            raise ConfigError(
                f"{name}: no such job file, nor a built-in job; {nearest(str(name), known)}"
            )
        path = known[str(name)]
    table = read_toml(path)
    for assignment in settings:
        assign(table, assignment)
    return table, path


def parse_job(table: Mapping[str, Any], name: str, folder: Path, where: str) -> Job:
    """A job from its tables. Raises ConfigError."""
    top_keys = {f.name for f in fields(TopConfig)}
    for key in table:
        if key not in top_keys | _TABLES:
            raise ConfigError(f"{where}: unknown key {key!r}; {nearest(key, top_keys | _TABLES)}")
        if key in _TABLES and not isinstance(table[key], Mapping):
            raise ConfigError(f"{where}: {key} is a value, expected a table [{key}]")
    top = build(TopConfig, {k: v for k, v in table.items() if k in top_keys}, where)
    with within(where, ConfigError):
        method = methods.find(top.method)
    kind = KINDS[method.holds]
    for other in KINDS.values():
        if found := sorted((other.tables - kind.tables) & table.keys()):
            raise ConfigError(
                f"{where} [{found[0]}]: is for methods on {other.name}, not {top.method}"
            )
    if top.preset not in method.presets:
        raise ConfigError(
            f"{where}: preset = {top.preset!r}; {nearest(top.preset, method.presets)}"
        )
    federation = build(FederationConfig, table.get("federation", {}), f"{where} [federation]")
    privacy: Privacy | None = None
    filled: dict[str, Any] = {"seed": top.seed}
    if "privacy" in table:
        privacy = _privacy(method, top.method, table["privacy"], where)
        filled |= {"privacy": privacy, "min_sites": federation.min_sites}
    preset = method.presets[top.preset]
    config = _config(method, preset, table, folder, where, filled)
    if federation.secure_sum and method.each(config):
        raise ConfigError(
            f"{where} [training]: aggregation looks at each site's update, which the secure sum "
            "hides (between real sites it is the default): set secure_sum = false in "
            '[federation], which sites must permit, or aggregation = "mean"'
        )
    synthetic, sites = _sources(table, where, kind)
    silos = build(SilosConfig, table["silos"], f"{where} [silos]") if "silos" in table else None
    return Job(
        name=name,
        title=top.title or name,
        method=top.method,
        seed=top.seed,
        conditions=tuple(c for c in CONDITIONS if c in top.conditions),
        threads=top.threads,
        config=config,
        kind=kind,
        sites=sites,
        synthetic=synthetic,
        table=table,
        folder=folder,
        silos=silos,
        federation=federation,
        privacy=privacy,
        **kind.more(_with_concepts(table, preset), where),
    )


def _privacy(method: Method, name: str, table: Mapping[str, Any], where: str) -> Privacy:
    """The [privacy] table of a method that can keep it. Raises ConfigError."""
    if isinstance(why := method.private, str):
        able = [n for n in methods.names() if not isinstance(methods.find(n).private, str)]
        raise ConfigError(
            f"{where} [privacy]: method = {name!r} keeps no promise of differential privacy: "
            f"{why}; {', '.join(able)} can"
        )
    return build(Privacy, table, f"{where} [privacy]")


def _sources(table: Mapping[str, Any], where: str, kind: SiteKind) -> tuple[Any, dict[str, Any]]:
    if ("sites" in table) == ("synthetic" in table):
        raise ConfigError(f"{where}: give either [sites.NAME] tables or a [synthetic] table")
    if "synthetic" in table:
        return build(kind.synthetic, table["synthetic"], f"{where} [synthetic]"), {}
    if not table["sites"]:
        raise ConfigError(f"{where}: expected one table [sites.NAME] for each site")
    sites: dict[str, Any] = {}
    for site, values in table["sites"].items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", site):
            raise ConfigError(
                f"{where} [sites.{site}]: a site's name has letters, digits, - and _ only"
            )
        taken = {name.lower(): name for name in (POOLED, *sites)}
        if found := taken.get(site.lower()):  # a site is a folder; some systems ignore case
            raise ConfigError(
                f"{where} [sites.{site}]: this name is taken, choose another (it is {found!r} "
                "where case does not count)"
            )
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where}: sites.{site} is a value, expected a table [sites.{site}]")
        sites[site] = build(kind.sites, values, f"{where} [sites.{site}]")
    return None, sites


def _config(
    method: Method,
    preset: Mapping[str, Any],
    table: Mapping[str, Any],
    folder: Path,
    where: str,
    filled: Mapping[str, Any],
) -> Any:
    """The method's Config. filled: keys of FILLED_IN; others follow once sites are read."""
    given = table.get("training", {})
    training = {f.name for f in fields(method.Config)} - FILLED_IN
    for key in given:
        if key in FILLED_IN:
            raise ConfigError(f"{where} [training]: {key!r} does not belong here")
        if key not in training:
            raise ConfigError(f"{where} [training]: unknown key {key!r}; {nearest(key, training)}")
    kept = method.private.settings if "privacy" in filled else {}
    values = preset.get("training", {}) | dict(kept) | given | filled
    settings = _expand(table.get("model", {}), folder)
    if method.models and [*method.models()] == [settings.get("kind")]:
        del settings["kind"]  # of the only one that the method has
    own = preset.get("model", {})
    if all(own.get(key) == settings[key] for key in ("kind", "tagger") if key in settings):
        settings = over(own, settings)  # else the job starts from a model of its own
    if settings.get("word_vectors"):
        settings = preset.get("with_word_vectors", {}) | settings
    try:
        model = method.model_config(settings)
    except ConfigError as error:
        told = str(error).removeprefix("model: ").removeprefix("model ")  # [model] says so
        raise ConfigError(f"{where} [model]: {told}") from error
    made: Any = build(method.Config, values | {"model": model}, f"{where} [training]")
    if "privacy" in filled:
        with within(f"{where} [training]", ConfigError):
            method.private.require(made)
    return made


def _with_concepts(table: Mapping[str, Any], preset: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the preset says of [concepts], where the job reads notes so."""
    reads = isinstance(table.get("concepts"), Mapping) or "synthetic" in table
    if not reads or "text" in table or "concepts" not in preset:
        return table
    return {**table, "concepts": over(preset["concepts"], table.get("concepts", {}))}


def over(preset: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A preset's table with a job's values in place of its own; tables in it likewise."""
    both = {
        key: over(preset[key], value)
        if isinstance(value, Mapping) and isinstance(preset.get(key), Mapping)
        else value
        for key, value in given.items()
    }
    return {**preset, **both}


def _expand(table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Environment variables in text values; files beside the job are found by their names."""
    found = {k: expand(v, k) if isinstance(v, str) else v for k, v in table.items()}
    for key in _FILES:
        value = found.get(key)
        if value and isinstance(value, str) and (folder / value).exists():
            found[key] = str(folder / value)
    return found


# ---- the reference of the keys, and the JSON schema, made of the tables that read them -----------

_CODES = '  NAME = []  (codes such as "icd10:I10", any of which makes it present)'
_WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false"}
_SHARED: dict[str, type[Any]] = {
    "tags": TagsConfig,
    "silos": SilosConfig,
    "federation": FederationConfig,
    "privacy": Privacy,
    "concepts": ConceptsConfig,
    "text": TextConfig,
    "hold_out": HoldOutConfig,
}


def _models(method: str) -> dict[str, type[Any]]:
    """The classes that may read [model], by its `kind`; "" where there is one alone."""
    from fednotes.taggers import saving

    if (own := methods.find(method).models) is not None:
        return dict(own())
    return {kind: saving.model_class(kind) for kind in saving.kinds()}


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
    parts = _parts()
    chosen = [f"{head}\n{text}\n" for head, text in parts.items() if name in ("", _short(head))]
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
    for head, text in _parts().items():
        parts.append(f"## {head}\n\n```text\n{re.sub('^  ', '', text, flags=re.M)}\n```\n")
    return "\n".join(parts)


def _parts() -> dict[str, str]:
    """The lines of each table, by its heading."""
    parts = {head: "\n".join(_lines(head, made)) for head, made in tables()}
    return parts | {"[phenotypes] of patients": _CODES}


def schema() -> dict[str, Any]:
    """The JSON schema of a job file: what may stand in a table depends on the method."""
    top = _schema(TopConfig)
    shared = {name: _schema(made) for name, made in _SHARED.items()}
    codes = {"type": "array", "items": {"type": "string"}, "minItems": 1}
    shared["phenotypes"] = {"type": "object", "additionalProperties": codes}
    cases = []
    for name in methods.names():
        kind = KINDS[methods.find(name).holds]
        models = [_schema(made, kind=of) for of, made in _models(name).items()]
        own = {
            "training": _schema(methods.find(name).Config, FILLED_IN),
            "model": {"anyOf": models},
            "sites": {"type": "object", "additionalProperties": _schema(kind.sites)},
            "synthetic": _schema(kind.synthetic),
        }
        method = {"properties": {"method": {"const": name}}}
        cases.append({"if": method, "then": {"properties": own}})
    by_method = {k: {"type": "object"} for k in ("training", "model", "sites", "synthetic")}
    return {
        **top,
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A job of fednotes",
        "properties": {**top["properties"], **by_method, **shared},
        "allOf": cases,
    }


def _schema(made: Any, hidden: Collection[str] = (), kind: str = "") -> dict[str, Any]:
    """A table's own schema. hidden: what the job fills in. kind: of a model, if that is a key."""
    found = adapter(made).json_schema(ref_template="#/$defs/{model}")
    keys = {key: of for key, of in found["properties"].items() if key not in hidden}
    if kind:
        keys["kind"] = {"const": kind}
    own = {"properties": keys, "additionalProperties": False, "description": _documented(made)}
    return found | own


def _short(head: str) -> str:
    return head.removeprefix("[").split("]")[0].split(".")[0] if head[0] == "[" else "top"


def _lines(head: str, made: type[Any]) -> Iterator[str]:
    hints = get_type_hints(made)
    for field in fields(made):
        if not ("[training]" in head and field.name in FILLED_IN):
            yield f"  {field.name} = {_default(field)}{_kind(hints[field.name])}"
    for line in _documented(made).rstrip().split("\n")[1:]:
        yield f"    {line}".rstrip()


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
