"""Read job files, which are TOML: what is trained, on whose notes, and how.

method = "fedner"                 # a module of fednotes.methods
preset = "best"                   # or "paper": the method's settings to start from
seed = 1
[training]                        # the method's config
[model]                           # the settings of its model
[sites.mercy]                     # one table for each site, see `jobs/job.py`
path = "mercy/notes.jsonl"
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import fields
from functools import lru_cache
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

from fednotes import methods
from fednotes.core import plugins
from fednotes.core.errors import ConfigError, nearest, within
from fednotes.core.settings import (
    Mark,
    assign,
    build,
    checked,
    expand,
    marked_fields,
    over,
    path_of,
    read_toml,
)
from fednotes.core.types import POOLED
from fednotes.jobs import kinds
from fednotes.jobs.job import (
    FederationConfig,
    Job,
    SilosConfig,
    SiteKind,
)
from fednotes.jobs.local_files import model_file_keys
from fednotes.jobs.results import CONDITIONS, OWN_MIX
from fednotes.jobs.run_folder import JOB_RECORD, read_job_record
from fednotes.methods.base import Method
from fednotes.privacy.promise import Privacy
from fednotes.taggers.saving import DEFAULT as DEFAULT_KIND

# A method that has a control adds it to these.
DEFAULT_CONDITIONS = ("alone", "federated", "pooled")
DEFAULT_PRESET = "best"
# Tables that a job on any kind of data can have.
_COMMON_TABLES = frozenset(
    {"training", "model", "sites", "synthetic", "silos", "federation", "privacy"}
)


@checked(frozen=True)
class TopConfig:
    """The keys of a job file outside its tables.

    Attributes:
        method: Name of the method: a module of `fednotes.methods`.
        title: Title of the job in reports; the job's name if empty.
        notes: Remarks for readers of the job file; nothing reads them.
        preset: Name of the settings that the job starts from: "best", or "paper" where
            the method has published settings. The keys below override them.
        seed: Seed of all random numbers: the same job with the same seed gives the same
            run.
        conditions: What is trained: "alone" (each site by itself), "federated", and
            "pooled" (all notes in one place). With method "personal", "own-mix" too:
            each site mixes two models of its own, without partners. It is part of the
            default there, and takes as long as "federated".
        threads: Number of threads that this process computes with.
    """

    method: str
    title: str = ""
    notes: str = ""
    preset: str = DEFAULT_PRESET
    seed: int = 1
    conditions: tuple[str, ...] = DEFAULT_CONDITIONS
    threads: int = 1

    def __post_init__(self) -> None:
        if not self.conditions:
            raise ConfigError(
                f"conditions = []: name some of {', '.join(DEFAULT_CONDITIONS)}"
            )
        for condition in self.conditions:
            if condition not in CONDITIONS:
                raise ConfigError(
                    f"conditions has {condition!r}; {nearest(condition, CONDITIONS)}"
                )
        most = 4 * (os.cpu_count() or 1)
        if not 1 <= self.threads <= most:
            raise ConfigError(
                f"threads = {self.threads}: expected 1 to {most} on this machine"
            )


@lru_cache(maxsize=1)
def built_in_jobs() -> Mapping[str, Path]:
    """Return the built-in job files by name: `demo`, `fedner/table2`, …

    `demo` belongs to the core. Applications and other packages add jobs by entry points
    of the group `fednotes.jobs`. An entry point names a package whose folder holds job
    files, and a job's name is its path in that folder without the suffix.

    Raises:
        ConfigError: A package cannot be imported, or two packages have jobs of the same
            name.
    """
    jobs = {"demo": Path(str(resources.files("fednotes") / "jobs" / "demo.toml"))}
    for entry in plugins.registered("jobs").values():
        folder = Path(str(resources.files(plugins.load(entry, ModuleType))))
        for path in folder.rglob("*.toml"):
            # a file with "base" is a grid over another job, not a job
            if "base" in read_toml(path):
                continue
            name = path.relative_to(folder).with_suffix("").as_posix()
            if name in jobs:
                raise ConfigError(
                    f"{path}: the job {name!r} is there already, {jobs[name]}: uninstall one of "
                    "the packages"
                )
            jobs[name] = path
    return dict(sorted(jobs.items()))


def load_job(name: str | Path, settings: tuple[str, ...] = ()) -> Job:
    """Read a job file, or a built-in job by name, and apply `--set` assignments.

    Args:
        name: Path of the file, or name of the built-in job.
        settings: Assignments such as "training.epochs=3".

    Raises:
        ConfigError: The job is invalid; the message names the file, table and key.
    """
    table, path = load_table(name, settings)
    return parse_job(table, path.stem, path.resolve().parent, str(path))


def load_table(
    name: str | Path, settings: tuple[str, ...] = ()
) -> tuple[dict[str, Any], Path]:
    """Return the tables of a job after `--set` assignments, and the path of its file.

    Args:
        name: Path of the file, or name of the built-in job.
        settings: Assignments such as "training.epochs=3".

    Raises:
        ConfigError: There is no such job, or its file cannot be read.
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


def _conditions(
    top: TopConfig, method: Method, config: Any, table: Mapping[str, Any], where: str
) -> tuple[str, ...]:
    """Return a job's conditions in their fixed order, with the control of its method."""
    asked = set(top.conditions)
    has_control = method.configure_control(config) is not None
    if OWN_MIX in asked and not has_control:
        raise ConfigError(
            f'{where}: conditions has "{OWN_MIX}", which is a control of method = "personal" '
            "without [privacy]: leave it out"
        )
    if "conditions" not in table and has_control:
        asked.add(OWN_MIX)
    return tuple(condition for condition in CONDITIONS if condition in asked)


def table_names() -> frozenset[str]:
    """Return the names of all tables that a job file may have."""
    return _COMMON_TABLES.union(*(kind.tables for kind in kinds.all_kinds()))


def load_recorded_job(run: Path) -> Job:
    """Return the job that made a run, from the record in the run's folder.

    Raises:
        ConfigError: The folder is not that of a run, or its record is damaged.
    """
    record = read_job_record(run)
    try:
        table, name, folder = record["table"], record["job"], Path(record["folder"])
        return parse_job(table, name, folder, str(run))
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{run / JOB_RECORD}: damaged") from error


def parse_job(table: Mapping[str, Any], name: str, folder: Path, where: str) -> Job:
    """Make a job from its tables.

    Args:
        table: Tables of the job file.
        name: Name of the job.
        folder: Folder against which relative paths are resolved.
        where: Name of the job in error messages.

    Raises:
        ConfigError: A table or key is invalid.
    """
    top_keys = {f.name for f in fields(TopConfig)}
    tables = table_names()
    for key in table:
        if key not in top_keys | tables:
            raise ConfigError(
                f"{where}: unknown key {key!r}; {nearest(key, top_keys | tables)}"
            )
        if key in tables and not isinstance(table[key], Mapping):
            raise ConfigError(f"{where}: {key} is a value, expected a table [{key}]")
    top = build(TopConfig, {k: v for k, v in table.items() if k in top_keys}, where)
    with within(where, ConfigError):
        method = methods.find(top.method)
        kind = kinds.find(method.holds)
    for other in kinds.all_kinds():
        if found := sorted((other.tables.keys() - kind.tables.keys()) & table.keys()):
            raise ConfigError(
                f"{where} [{found[0]}]: is for methods on {other.name}, not {top.method}"
            )
    if top.preset not in method.presets:
        raise ConfigError(
            f"{where}: preset = {top.preset!r}; {nearest(top.preset, method.presets)}"
        )
    federation = build(
        FederationConfig, table.get("federation", {}), f"{where} [federation]"
    )
    privacy: Privacy | None = None
    filled: dict[str, Any] = {"seed": top.seed}
    if "privacy" in table:
        privacy = _privacy(method, top.method, table["privacy"], where)
        filled |= {"privacy": privacy, "min_sites": federation.min_sites}
    preset = method.presets[top.preset]
    config = _config(method, preset, table, folder, where, filled)
    if federation.secure_sum and method.needs_each_update(config):
        raise ConfigError(
            f"{where} [training]: aggregation looks at each site's update, which the secure sum "
            "hides (between real sites it is the default): set secure_sum = false in "
            '[federation], which sites must permit, or aggregation = "mean"'
        )
    synthetic, sites = _sources(table, where, kind)
    silos = (
        build(SilosConfig, table["silos"], f"{where} [silos]")
        if "silos" in table
        else None
    )
    return Job(
        name=name,
        title=top.title or name,
        method=top.method,
        seed=top.seed,
        conditions=_conditions(top, method, config, table, where),
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
        **kind.read_tables(table, preset, where),
    )


def _privacy(
    method: Method, name: str, table: Mapping[str, Any], where: str
) -> Privacy:
    """Read the [privacy] table.

    Raises:
        ConfigError: The table is invalid, or the method cannot guarantee differential
            privacy.
    """
    if method.dp is None:
        able = [n for n in methods.names() if methods.find(n).dp is not None]
        raise ConfigError(
            f"{where} [privacy]: method = {name!r} keeps no promise of differential privacy: "
            f"{method.no_dp_reason}; {', '.join(able)} can"
        )
    return build(Privacy, table, f"{where} [privacy]")


def _sources(
    table: Mapping[str, Any], where: str, kind: SiteKind
) -> tuple[Any, dict[str, Any]]:
    if ("sites" in table) == ("synthetic" in table):
        raise ConfigError(
            f"{where}: give either [sites.NAME] tables or a [synthetic] table"
        )
    if "synthetic" in table:
        return build(
            kind.synthetic_config, table["synthetic"], f"{where} [synthetic]"
        ), {}
    if not table["sites"]:
        raise ConfigError(f"{where}: expected one table [sites.NAME] for each site")
    sites: dict[str, Any] = {}
    for site, values in table["sites"].items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", site):
            raise ConfigError(
                f"{where} [sites.{site}]: a site's name has letters, digits, - and _ only"
            )
        taken = {name.lower(): name for name in (POOLED, *sites)}
        # Each site has a folder, and some file systems ignore case in names.
        if found := taken.get(site.lower()):
            raise ConfigError(
                f"{where} [sites.{site}]: this name is taken, choose another (it is {found!r} "
                "where case does not count)"
            )
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"{where}: sites.{site} is a value, expected a table [sites.{site}]"
            )
        sites[site] = build(kind.site_config, values, f"{where} [sites.{site}]")
    return None, sites


def _config(
    method: Method,
    preset: Mapping[str, Any],
    table: Mapping[str, Any],
    folder: Path,
    where: str,
    filled: Mapping[str, Any],
) -> Any:
    """Build the method's config from the preset, [training] and [model].

    Args:
        method: The job's method.
        preset: The tables of the preset.
        table: Tables of the job file.
        folder: Folder against which relative paths are resolved.
        where: Name of the job in error messages.
        filled: Values of the fields marked `FilledIn` that are known already; the
            others are filled in when the sites have been read.
    """
    given = table.get("training", {})
    filled_in = marked_fields(method.config_class, Mark.FILLED_IN)
    training = {f.name for f in fields(method.config_class)} - filled_in
    for key in given:
        if key in filled_in:
            raise ConfigError(f"{where} [training]: {key!r} does not belong here")
        if key not in training:
            raise ConfigError(
                f"{where} [training]: unknown key {key!r}; {nearest(key, training)}"
            )
    values = {
        **training_preset(method, preset, private="privacy" in filled),
        **given,
        **filled,
    }
    settings = _expand(table.get("model", {}), folder, model_file_keys(method))
    kinds_of_model = method.list_models()
    if kinds_of_model is not None and [*kinds_of_model] == [settings.get("kind")]:
        # the method has only this kind of model, so its table has no key `kind`
        del settings["kind"]
    settings = over(model_preset(preset, settings), settings)
    try:
        model = method.read_model_config(settings)
    except ConfigError as error:
        # The message names [model] already, so drop the prefix.
        told = str(error).removeprefix("model: ").removeprefix("model ")
        raise ConfigError(f"{where} [model]: {told}") from error
    made: Any = build(
        method.config_class, values | {"model": model}, f"{where} [training]"
    )
    if "privacy" in filled and method.dp is not None:
        with within(f"{where} [training]", ConfigError):
            method.dp.require(made)
    return made


def training_preset(
    method: Method, preset: Mapping[str, Any], *, private: bool
) -> dict[str, Any]:
    """Return the [training] values that apply where a job does not set its own.

    Args:
        method: The job's method.
        preset: One of the method's presets.
        private: Whether the job has a [privacy] table. Training with differential
            privacy fixes some settings, whatever the preset says.
    """
    values = dict(preset.get("training", {}))
    if private and method.dp is not None:
        values.update(method.dp.required_settings)
    return values


def model_preset(
    preset: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the preset's [model] values that apply to a job's [model] table.

    No values apply to a job with another `kind` of model or another `tagger` than the
    preset has: it starts from the defaults of its own model.

    Args:
        preset: One of the method's presets.
        settings: The job's [model] table.
    """
    values = dict(preset.get("model", {}))
    starts_from = {"kind": DEFAULT_KIND, **values}
    for key in ("kind", "tagger"):
        if key in settings and settings[key] != starts_from.get(key):
            values = {}
            break
    if settings.get("word_vectors"):
        values.update(preset.get("with_word_vectors", {}))
    return values


def _expand(
    table: Mapping[str, Any], folder: Path, file_keys: Collection[str]
) -> dict[str, Any]:
    """Expand environment variables in [model], and resolve files beside the job."""
    found = {k: expand(v, k) if isinstance(v, str) else v for k, v in table.items()}
    for key in file_keys:
        value = found.get(key)
        if value and isinstance(value, str) and (folder / value).exists():
            found[key] = str(folder / value)
    return found
