"""Read job files, TOML files that say what is trained, on whose notes, and how.

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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fednotes import methods
from fednotes.core.databases import DatabaseAddress, is_address
from fednotes.core.errors import (
    ConfigError,
    ParameterError,
    naming_place,
    suggest_name,
)
from fednotes.core.settings import (
    Mark,
    assign,
    build,
    checked,
    expand_path,
    list_marked_fields,
    list_unset_variables,
    merge_tables,
    read_toml,
    require_path,
    require_variables,
)
from fednotes.core.types import RESERVED_SITE_NAMES
from fednotes.jobs import kinds
from fednotes.jobs.built_in_jobs import list_built_in_jobs
from fednotes.jobs.job import (
    FederationConfig,
    Job,
    LeftOutConfig,
    SilosConfig,
    SiteKind,
)
from fednotes.jobs.key_hints import hint_training_key
from fednotes.jobs.local_files import list_model_file_keys
from fednotes.jobs.results import CONDITIONS, LEFT_OUT, OWN_MIX
from fednotes.jobs.run_folder import JOB_RECORD, read_job_record
from fednotes.methods.base import Method
from fednotes.privacy.promise import Privacy
from fednotes.privacy.secure_sum import FEWEST_SITES
from fednotes.taggers.saving import DEFAULT as DEFAULT_KIND
from fednotes.training.site_sampling import count_drawn_sites

# A method with a control condition adds it to these.
DEFAULT_CONDITIONS = ("alone", "federated", "pooled")
DEFAULT_PRESET = "best"
# Tables that a job on any kind of data can have.
_COMMON_TABLES = frozenset(
    {
        "training",
        "model",
        "sites",
        "synthetic",
        "silos",
        "federation",
        "left_out",
        "privacy",
    }
)
_SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@checked(frozen=True)
class TopConfig:
    """The keys of a job file outside its tables.

    Attributes:
        method: Name of the method: a module of `fednotes.methods`.
        title: Title of the job in reports; the job's name if empty.
        notes: Remarks for people who read the job file; fednotes ignores them.
        preset: Preset whose settings the job starts from: "best", or "paper" where the
            method has published settings. The keys below override them.
        seed: Seed of all random numbers: the same job with the same seed gives the same
            run.
        conditions: What is trained: "alone" (each site by itself), "federated", and
            "pooled" (all notes in one place). Method "personal" adds "own-mix", in
            which each site mixes two models of its own, without partners. It is part of
            that method's default, and takes as long as "federated". "left-out" shows
            whether models work at a site that took no part in training: each site in
            turn is left out, the others train without it, and all models are scored on
            its test data (`docs/how-to/left-out.md`). It also trains "alone", needs at
            least three sites with annotated documents, and takes about as long as
            training "federated" and "pooled" once for each site.
        threads: Number of CPU threads. Results may differ in their last bits between
            numbers of threads.
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
                    f"conditions has {condition!r}: "
                    f"{suggest_name(condition, CONDITIONS)}"
                )
        max_threads = 4 * (os.cpu_count() or 1)
        if not 1 <= self.threads <= max_threads:
            raise ConfigError(
                f"threads = {self.threads}: expected 1 to {max_threads} on this machine"
            )


# ---- files and records ---------------------------------------------------------------


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
    path = require_path(name, "a job's file, name or table")
    # Unlike Path.is_file, this is False if the name is too long for a path.
    if not os.path.isfile(path):
        known = list_built_in_jobs()
        if str(name) not in known:
            remedy = "give the path of a job file, or a built-in job such as demo"
            raise ConfigError(
                f"{name}: no such job file or built-in job: "
                f"{suggest_name(str(name), known, remedy)}"
            )
        path = known[str(name)]
    table = read_toml(path)
    _require_known_sites(table, settings)
    for assignment in settings:
        assign(table, assignment)
    return table, path


def _require_known_sites(table: Mapping[str, Any], settings: Sequence[str]) -> None:
    """Raise ParameterError if an assignment sets a key of a site that the job lacks.

    Such a site would be a new one. A job without sites, or an assignment of a whole
    table such as "sites.new={path='notes'}", may add sites.
    """
    sites = table.get("sites")
    if not isinstance(sites, dict) or not sites:
        return
    for assignment in settings:
        parents = assignment.partition("=")[0].strip().split(".")[:-1]
        if len(parents) < 2 or parents[0] != "sites":
            continue
        name = parents[1]
        if name != "*" and name not in sites:
            raise ParameterError(
                f"`settings` {assignment}: the job has no site {name!r}: "
                f"{suggest_name(name, sites)}"
            )


def load_recorded_job(run: Path) -> Job:
    """Return the job that made a run, from the record in the run's folder.

    Raises:
        ConfigError: The folder is not the folder of a run, or its record is damaged.
    """
    record = read_job_record(run)
    try:
        table = dict(record["table"])
        name = str(record["job"])
        folder = Path(record["folder"])
        return parse_job(table, name, folder, str(run))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{run / JOB_RECORD}: damaged: copy the run's folder again"
        ) from error


# ---- the job -------------------------------------------------------------------------


def parse_job(table: Mapping[str, Any], name: str, folder: Path, where: str) -> Job:
    """Make a job from its tables.

    Args:
        table: Tables of the job file.
        name: Name of the job.
        folder: Folder against which relative paths are resolved.
        where: Name of the job in error messages.

    Raises:
        ConfigError: A table or key is invalid, or environment variables that [model]
            names are not set.
    """
    top = _read_top(table, where)
    with naming_place(where, ConfigError):
        method = methods.find_method(top.method)
        kind = kinds.find(method.holds)
    _require_tables_of_kind(table, kind, top.method, where)
    if top.preset not in method.presets:
        raise ConfigError(
            f"{where}: preset = {top.preset!r}: "
            f"{suggest_name(top.preset, method.presets)}"
        )

    reader = _TableReader(
        table=table,
        folder=folder,
        where=where,
        top=top,
        method=method,
        kind=kind,
        preset=method.presets[top.preset],
    )
    federation = reader.read_federation()
    privacy = reader.read_privacy()
    config = reader.read_config(federation, privacy)
    synthetic = reader.read_synthetic()
    sites = reader.read_sites()
    silos = reader.read_silos()
    _require_drawn_sites(config, federation, f"{where} [training]")
    conditions = reader.list_conditions(config)
    kind_tables = kind.read_tables(table, reader.preset, where)
    return Job(
        name=name,
        title=top.title or name,
        method=top.method,
        seed=top.seed,
        conditions=conditions,
        threads=top.threads,
        config=config,
        kind=kind,
        sites=sites,
        synthetic=synthetic,
        table=table,
        folder=folder,
        silos=silos,
        federation=federation,
        left_out=reader.read_left_out(),
        tags=kind_tables.tags,
        privacy=privacy,
        kind_tables=kind_tables.values,
    )


def _require_drawn_sites(config: Any, federation: FederationConfig, place: str) -> None:
    """Raise ConfigError if a job draws fewer sites for a round than must answer.

    Args:
        config: The method's settings.
        federation: The [federation] table.
        place: Name of the [training] table in error messages.
    """
    drawn = count_drawn_sites(config)
    if drawn is None:
        return
    setting = f"{place}: sites_per_round = {drawn}"
    if drawn < federation.min_sites:
        raise ConfigError(
            f"{setting}: [federation] min_sites = {federation.min_sites} sites must "
            "answer in each round: draw as many or more, or lower min_sites"
        )
    if federation.secure_sum and drawn < FEWEST_SITES:
        raise ConfigError(
            f"{setting}: the secure sum (on by default between real sites) needs "
            f"{FEWEST_SITES} sites in each round: draw as many or more, or set "
            "secure_sum = false in [federation], which sites must permit"
        )


def list_table_names() -> frozenset[str]:
    """Return the names of all tables that a job file may have."""
    return _COMMON_TABLES.union(*(kind.tables for kind in kinds.list_kinds()))


def _read_top(table: Mapping[str, Any], where: str) -> TopConfig:
    """Read the keys outside tables.

    Raises:
        ConfigError: A name or value is invalid, or a value stands in place of a table.
    """
    top_keys = {field.name for field in fields(TopConfig)}
    tables = list_table_names()
    for key, value in table.items():
        if key not in top_keys | tables:
            hint = suggest_name(key, top_keys | tables)
            if key in _list_training_keys(table.get("method")):
                hint = f"it belongs to [training], as in training.{key}"
            raise ConfigError(f"{where}: unknown key {key!r}: {hint}")
        if key in tables and not isinstance(value, Mapping):
            header = "[sites.NAME]" if key == "sites" else f"[{key}]"
            if isinstance(value, list):
                raise ConfigError(f"{where}: {key} is an array: write {header}")
            raise ConfigError(
                f"{where}: {key} must be a table {header}, not a single value"
            )
    values = {key: value for key, value in table.items() if key in top_keys}
    return build(TopConfig, values, where)


def _list_training_keys(method: object) -> set[str]:
    """Return the keys of [training] of a method; none if there is no such method."""
    if method not in methods.list_method_names():
        return set()
    config_class = methods.find_method(str(method)).config_class
    return {field.name for field in fields(config_class)}


def _require_tables_of_kind(
    table: Mapping[str, Any], kind: SiteKind, method: str, where: str
) -> None:
    """Raise ConfigError if a job has a table of another kind of data."""
    for other in kinds.list_kinds():
        foreign = (other.tables.keys() - kind.tables.keys()) & table.keys()
        if foreign:
            raise ConfigError(
                f"{where} [{min(foreign)}]: applies only to methods on {other.name}, "
                f"not to {method}: leave it out"
            )


@dataclass(frozen=True)
class _TableReader:
    """Reads the tables of a job.

    Attributes:
        table: Tables of the job file.
        folder: Folder against which relative paths are resolved.
        where: Name of the job in error messages.
        top: The keys outside tables.
        method: The job's method.
        kind: Kind of data that the method reads.
        preset: Tables of the method's preset.
    """

    table: Mapping[str, Any]
    folder: Path
    where: str
    top: TopConfig
    method: Method
    kind: SiteKind
    preset: Mapping[str, Any]

    def read_federation(self) -> FederationConfig:
        """Read the [federation] table."""
        values = self.table.get("federation", {})
        return build(FederationConfig, values, f"{self.where} [federation]")

    def read_privacy(self) -> Privacy | None:
        """Read the [privacy] table, if the job has one.

        Raises:
            ConfigError: The table is invalid, or the method does not support
                differential privacy.
        """
        if "privacy" not in self.table:
            return None
        if self.method.dp is None:
            able = [
                n
                for n in methods.list_method_names()
                if methods.find_method(n).dp is not None
            ]
            raise ConfigError(
                f"{self.where} [privacy]: method = {self.top.method!r} does not "
                f"support differential privacy: {self.method.no_dp_reason}; use one "
                f"of {', '.join(able)}"
            )
        return build(Privacy, self.table["privacy"], f"{self.where} [privacy]")

    def read_silos(self) -> SilosConfig | None:
        """Read the [silos] table, if the job has one."""
        if "silos" not in self.table:
            return None
        return build(SilosConfig, self.table["silos"], f"{self.where} [silos]")

    def read_left_out(self) -> LeftOutConfig:
        """Read the [left_out] table."""
        values = self.table.get("left_out", {})
        return build(LeftOutConfig, values, f"{self.where} [left_out]")

    def list_conditions(self, config: Any) -> tuple[str, ...]:
        """Return the job's conditions in their fixed order, with the method's control.

        Raises:
            ConfigError: The job names a condition that its method does not have.
        """
        conditions = set(self.top.conditions)
        has_control = self.method.configure_control(config) is not None
        if OWN_MIX in conditions and not has_control:
            raise ConfigError(
                f'{self.where}: conditions has "{OWN_MIX}", which is a control of '
                'method = "personal" without [privacy]: leave it out'
            )
        if LEFT_OUT in conditions and self.kind.name != "documents":
            raise ConfigError(
                f'{self.where}: conditions has "{LEFT_OUT}", which needs sites with '
                f"annotated documents, but sites of method = {self.top.method!r} have "
                f'{self.kind.name}: remove "{LEFT_OUT}" from conditions'
            )
        if "conditions" not in self.table and has_control:
            conditions.add(OWN_MIX)
        if LEFT_OUT in conditions:
            conditions.add("alone")  # the other sites' own models are scored there, too
        return tuple(name for name in CONDITIONS if name in conditions)

    # ---- [training] and [model]

    def read_config(self, federation: FederationConfig, privacy: Privacy | None) -> Any:
        """Build the method's config from the preset, [training] and [model].

        Fields marked `FilledIn` that are not known yet are filled in when the sites
        have been read.

        Args:
            federation: The [federation] table.
            privacy: The [privacy] table, or None.

        Raises:
            ConfigError: A value is invalid, or the tables contradict each other.
        """
        place = f"{self.where} [training]"
        self._require_training_keys(place)
        values = find_training_defaults(
            self.method, self.preset, private=privacy is not None
        ) | dict(self.table.get("training", {}))
        values["seed"] = self.top.seed
        if privacy is not None:
            values["privacy"] = privacy
            values["min_sites"] = federation.min_sites
        values["model"] = self._read_model(self.table.get("model", {}), "model")

        config: Any = build(self.method.config_class, values, place)
        site_configs = dict(self._read_settings_of_sites(values))
        if site_configs:
            config = replace(config, site_configs=site_configs)
        if privacy is not None and self.method.dp is not None:
            with naming_place(place, ConfigError):
                self.method.dp.require_settings(config)
        if federation.secure_sum and self.method.needs_each_update(config):
            raise ConfigError(
                f"{place}: the chosen aggregation needs each site's update, which "
                "the secure sum hides (on by default between real sites): set "
                "secure_sum = false in [federation], which sites must permit, or "
                'aggregation = "mean"'
            )
        return config

    def _require_training_keys(self, place: str) -> None:
        """Raise ConfigError if [training] has an unknown key."""
        config_class = self.method.config_class
        filled_in = list_marked_fields(config_class, Mark.FILLED_IN)
        known = {field.name for field in fields(config_class)} - filled_in
        for key in self.table.get("training", {}):
            if key in filled_in:
                raise ConfigError(
                    f"{place}: {key!r} does not belong here: leave it out, the job "
                    "fills it in"
                )
            if key not in known:
                hint = hint_training_key(key, known, self.top.method)
                raise ConfigError(f"{place}: unknown key {key!r}: {hint}")

    def _read_settings_of_sites(
        self, values: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any]]:
        """Yield each site with a model or settings of its own, and its config.

        Args:
            values: The values of the job's config.

        Raises:
            ConfigError: A value is invalid, or the method does not let a site set it.
        """
        sites = self.table.get("sites", {})
        for name, site in sites.items():
            tables = {
                key: site.get(key, {}) if isinstance(site, Mapping) else {}
                for key in ("model", "training")
            }
            # A value that is not a table is refused when the site's table is read.
            if not all(isinstance(table, Mapping) for table in tables.values()):
                continue
            model, training = tables["model"], tables["training"]
            if model or training:
                self._require_keys_of_site(name, model, training)
                own_values = {**values, **training}
                if model:
                    own_values["model"] = self._read_model(model, f"sites.{name}.model")
                place = f"{self.where} [sites.{name}.training]"
                yield name, build(self.method.config_class, own_values, place)

    def _require_keys_of_site(
        self, name: str, model: Mapping[str, Any], training: Mapping[str, Any]
    ) -> None:
        """Raise ConfigError if the method does not let a site set these keys.

        Args:
            name: The site's name.
            model: The site's own [model] table.
            training: The site's own [training] table.
        """
        able = self.method.site_keys
        if not able:
            table = "model" if model else "training"
            raise ConfigError(
                f"{self.where} [sites.{name}.{table}]: with method = "
                f"{self.top.method!r} all sites train the same model in the same way: "
                f'remove this table and set [{table}], or set method = "fedmd"'
            )
        if "silos" in self.table:
            raise ConfigError(
                f"{self.where} [sites.{name}]: [silos] distributes the notes of all "
                "sites anew, so no site can have its own model or training: remove "
                "these tables, or remove [silos]"
            )
        for key in training:
            if key not in able:
                raise ConfigError(
                    f"{self.where} [sites.{name}.training]: a site cannot set {key!r} "
                    f"for itself: {suggest_name(key, able)}"
                )

    def _read_model(self, table: Mapping[str, Any], name: str) -> Any:
        """Read a table of a model over the preset's settings of the model.

        Args:
            table: The table.
            name: Its name: "model", or "sites.NAME.model".
        """
        self._require_variables_of_model(table, name)
        settings = _locate_files(table, self.folder, list_model_file_keys(self.method))
        kinds_of_model = self.method.list_models()
        if kinds_of_model is not None and [*kinds_of_model] == [settings.get("kind")]:
            # The method has only this kind of model, so its table has no key `kind`.
            del settings["kind"]
        settings = merge_tables(find_model_defaults(self.preset, settings), settings)
        with naming_place(f"{self.where} [{name}]", ConfigError):
            return self.method.read_model_config(settings)

    def _require_variables_of_model(self, table: Mapping[str, Any], name: str) -> None:
        """Raise ConfigError if a model names environment variables that are not set.

        The message also lists those that other tables name. If only other tables name
        such variables, the job can be read, although its notes cannot.
        """
        paths = [
            (f"{name}.{key}", value)
            for key, value in table.items()
            if isinstance(value, str)
        ]
        if not any(list_unset_variables(text) for _, text in paths):
            return
        sites = {
            site_name: site
            for site_name, site in self.table.get("sites", {}).items()
            if isinstance(site, Mapping)
        }
        require_variables([*paths, *self.kind.list_paths(sites, self.table)])

    # ---- [sites.NAME] and [synthetic]

    def read_synthetic(self) -> Any:
        """Read the [synthetic] table; return None if the job has sites instead.

        Raises:
            ConfigError: The job has both or neither.
        """
        if ("sites" in self.table) == ("synthetic" in self.table):
            raise ConfigError(
                f"{self.where}: give either [sites.NAME] tables or a [synthetic] table"
            )
        if "synthetic" not in self.table:
            return None
        return build(
            self.kind.synthetic_config,
            self.table["synthetic"],
            f"{self.where} [synthetic]",
        )

    def read_sites(self) -> dict[str, Any]:
        """Read the [sites.NAME] tables; return {} if the job has generated sites.

        Raises:
            ConfigError: A name or table is invalid, or there is none.
        """
        if "sites" not in self.table:
            return {}
        if not self.table["sites"]:
            raise ConfigError(
                f"{self.where}: expected one table [sites.NAME] for each site"
            )
        sites: dict[str, Any] = {}
        # Each site has a folder, and some file systems ignore the case of names.
        used_names = {name: name for name in RESERVED_SITE_NAMES}
        for name, values in self.table["sites"].items():
            place = f"{self.where} [sites.{name}]"
            _require_site_name(name, used_names, place)
            used_names[name.lower()] = name
            if not isinstance(values, Mapping):
                raise ConfigError(
                    f"{self.where}: sites.{name} must be a table [sites.{name}], not a "
                    "single value"
                )
            self._require_valid_addresses(name, values)
            sites[name] = build(self.kind.site_config, values, place)
        return sites

    def _require_valid_addresses(self, name: str, values: Mapping[str, Any]) -> None:
        """Raise ConfigError for a site's database address that is no valid one.

        An address with a password is not valid (`DatabaseAddress`).
        """
        for key, text in self.kind.list_paths({name: values}, {}):
            if is_address(text):
                with naming_place(f"{self.where} {key}", ConfigError):
                    DatabaseAddress(text)


def _require_site_name(name: str, used_names: Mapping[str, str], place: str) -> None:
    """Raise ConfigError if a site's name is invalid or already in use.

    Args:
        name: The name.
        used_names: The names in use, by their form in lower case.
        place: Name of the site's table in error messages.
    """
    if not _SITE_NAME.fullmatch(name):
        raise ConfigError(f"{place}: a site's name has letters, digits, - and _ only")
    other = used_names.get(name.lower())
    if other is not None:
        raise ConfigError(
            f"{place}: this name is already used ({other!r}; case is ignored): choose "
            "another"
        )


def find_training_defaults(
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


def find_model_defaults(
    preset: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the preset's [model] values that apply to a job's [model] table.

    No values apply to a job whose `kind` of model or `tagger` differs from the
    preset's: such a job starts from the defaults of its own model.

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


def _locate_files(
    table: Mapping[str, Any], folder: Path, file_keys: Collection[str]
) -> dict[str, Any]:
    """Expand environment variables in [model], and resolve files beside the job.

    Args:
        table: The [model] table.
        folder: Folder of the job file.
        file_keys: Keys that name a file.
    """
    settings = {
        key: expand_path(value, f"model.{key}") if isinstance(value, str) else value
        for key, value in table.items()
    }
    for key in file_keys:
        value = settings.get(key)
        # Unlike Path.exists, this is False if the name is too long for a path.
        if isinstance(value, str) and value and os.path.exists(folder / value):
            settings[key] = str(folder / value)
    return settings
