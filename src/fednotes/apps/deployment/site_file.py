"""A job as it is sent to sites, and a site's own file, which takes precedence.

A job is sent as the table that `simulate` runs, in JSON, without paths of notes and
without code. A site's own file says where its notes are and what its rules are:

    device = "cpu"            # device of the tensors
    threads = 2               # of this site's process; default: the job's number
    cache = "cache"           # frozen features and tokens; default: the user's cache
    [data]                    # keys of a job's [sites.NAME]; they override the job's
    path = "notes.jsonl"
    [files]                   # paths on this machine of the files that a job names:
    dictionary = "terms.obo"  # word_vectors, contextual, encoder, backbone, …
    [policy]                  # apps/deployment/rules/policy.py

Paths are relative to the file, and `$NAME` stands for an environment variable. Only
this file says which notes are read: a job that names a file of the site is refused.
[data] may hold tables for jobs of several kinds: [data.documents], [data.notes] and
[data.patients].
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fednotes.apps.deployment.rules.policy import Policy, build_policy
from fednotes.core.errors import ConfigError, ParameterError, suggest_name
from fednotes.core.numbers import NonNegativeInt
from fednotes.core.settings import (
    build,
    checked,
    expand_path,
    merge_tables,
    read_toml,
)
from fednotes.core.store import write_text
from fednotes.jobs import kinds
from fednotes.jobs.declaration import (
    SITE_TABLES,
    drop_places,
    load_declared,
    parse_declared,
    require_unmasked,
)
from fednotes.jobs.job import Job, Progress, Sites, load_sites
from fednotes.jobs.job_file import load_table, parse_job
from fednotes.jobs.local_files import list_file_keys_by_table, list_tables_with_files

SITE_FILE = "site.toml"  # in a kit
# Names that are not files; options may follow "minilm" (`encoders/features.py`).
_BUILT_IN = re.compile(
    r"|none|learn|attention|synthetic|minilm(#[a-z]+(=[0-9]+)?)*", re.ASCII
)


# ---- a site's own file ---------------------------------------------------------------


@checked(frozen=True)
class _Keys:
    """The keys of the file; see the module's docstring.

    Attributes:
        folder: In a copy of the file, the folder to which its paths are relative.
    """

    device: str = "cpu"
    threads: NonNegativeInt = 0
    cache: str = ""
    folder: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SiteFile:
    """The contents of a site's file.

    Attributes:
        path: The file.
        folder: The folder to which its paths are relative.
        policy: The site's rules.
        data: The table [data].
        files: Absolute paths of this machine's files that a job names.
        device: The device of the tensors, such as `"cpu"`.
        threads: Number of threads of the site's process; 0 for the job's.
        cache: Folder of computed features; None for the user's default.
    """

    path: Path
    folder: Path
    policy: Policy
    data: Mapping[str, Any]
    files: Mapping[str, str]
    device: str
    threads: int
    cache: Path | None


def _list_keys_by_kind() -> dict[str, list[str]]:
    """Return the keys of [sites.NAME] for each kind of data."""
    return {
        kind.name: [key.name for key in fields(kind.site_config)]
        for kind in kinds.list_kinds()
    }


def read_site_file(path: Path) -> SiteFile:
    """Read a site's file.

    Raises:
        ConfigError: The file has an unknown key, a wrong value or an invalid policy.
    """
    table = read_toml(path)
    _require_headers(table, path)
    keys = build(_Keys, table, str(path))
    folder = Path(keys.folder) if keys.folder else path.resolve().parent
    _check_data_keys(keys.data, path)
    file_keys = sorted(frozenset().union(*list_file_keys_by_table().values()))
    _require_known(keys.files, file_keys, f"{path} [files]")

    files = {
        key: _resolve_path(value, folder, f"[files] {key}")
        for key, value in keys.files.items()
    }
    cache = folder / expand_path(keys.cache, "cache") if keys.cache else None
    return SiteFile(
        path=path,
        folder=folder,
        policy=build_policy(keys.policy, f"[policy] of {path}"),
        data=keys.data,
        files=files,
        device=keys.device,
        threads=keys.threads,
        cache=cache,
    )


def _resolve_path(text: str, folder: Path, where: str) -> str:
    """Return the absolute path of a file or folder; return other names as they are.

    Other names, such as `"minilm#layer=5"`, are those of built-in encoders.

    Args:
        text: The value of a key in [files].
        folder: The folder to which paths are relative.
        where: How messages refer to the key.
    """
    name = expand_path(text, where)
    path = folder / name
    return str(path) if path.exists() else name


def _require_headers(table: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError if a key of [data], [files] or [policy] stands outside it."""
    own_keys = {key.name for key in fields(_Keys)}
    data_keys = {key for keys in _list_keys_by_kind().values() for key in keys}
    keys_by_header = {
        "data": data_keys,
        "policy": {key.name for key in fields(Policy)},
        "files": frozenset().union(*list_file_keys_by_table().values()),
    }
    for key in sorted(table.keys() - own_keys):
        for header, keys in keys_by_header.items():
            if key in keys:
                raise ConfigError(
                    f"{path}: the key {key!r} stands outside of a table: put it under "
                    f"[{header}]"
                )


def _check_data_keys(data: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError if [data] of a site's file has an unknown key."""
    keys_by_kind = _list_keys_by_kind()
    all_keys = sorted({key for keys in keys_by_kind.values() for key in keys})
    for key, value in data.items():
        if key in keys_by_kind and isinstance(value, Mapping):
            _require_known(value, keys_by_kind[key], f"{path} [data.{key}]")
        else:
            _require_known([key], all_keys, f"{path} [data]")


def _require_known(keys: Iterable[str], valid_keys: Sequence[str], where: str) -> None:
    """Raise ConfigError if one of the keys is not valid."""
    for key in keys:
        if key not in valid_keys:
            suggestion = suggest_name(key, valid_keys)
            raise ConfigError(f"{where}: unknown key {key!r}: {suggestion}")


def install_site_file(source: Path, kit: Path, name: str = SITE_FILE) -> SiteFile:
    """Check a site's file and copy it into its kit.

    The paths in the copy stay relative to the folder of the original.

    Args:
        source: The file.
        kit: The site's kit.
        name: The name of the copy.

    Raises:
        ConfigError: `source` is not a valid site file; the kit keeps its earlier file.
    """
    file = read_site_file(source)
    text = source.read_text(encoding="utf-8")
    target = kit / name
    if target.exists() and target.samefile(source):
        return file

    if "folder" not in read_toml(source):
        original = source.resolve()
        note = f"# A copy of {original}; paths below are relative to this folder.\n"
        text = f"{note}folder = {json.dumps(str(file.folder))}\n{text}"
    write_text(target, text)
    return read_site_file(target)


def read_kit_site_file(kit: Path) -> SiteFile:
    """Read the site file in a site's kit.

    Raises:
        ConfigError: There is no file, or it is invalid.
    """
    path = kit / SITE_FILE
    if not path.exists():
        raise ConfigError(
            f"{path}: no such file: `fednotes site start {kit} --site-file FILE` puts "
            "one there"
        )
    return read_site_file(path)


def read_policy(kit: Path) -> Policy:
    """Return a site's policy; the default policy if the kit has no site file yet."""
    if not (kit / SITE_FILE).exists():
        return Policy()
    return read_kit_site_file(kit).policy


def insert_local_paths(file: SiteFile, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job's table with this machine's paths for the files that it names.

    Args:
        file: The site's own file.
        table: The table of the job.
    """
    local_table: dict[str, Any] = dict(table)
    for names, settings, file_keys in list_tables_with_files(table):
        keys_with_path = file_keys & settings.keys() & file.files.keys()
        local_paths = {key: file.files[key] for key in keys_with_path}
        changed: dict[str, Any] = {**settings, **local_paths}
        for name in reversed(names):
            changed = {name: changed}
        local_table = merge_tables(local_table, changed)
    return local_table


# ---- a job as one site reads it -----------------------------------------------------


def parse_site_job(declared: Mapping[str, Any], site: str, file: SiteFile) -> Job:
    """Parse a job as one site runs it: with its own notes and without other sites.

    Args:
        declared: The job's declaration.
        site: The site's name.
        file: The site's own file, which takes precedence over the job.

    Raises:
        ConfigError: The job is not for this site, names files of this machine, or does
            not match the site's file.
    """
    where = f"job {declared.get('name')}"
    has_own_model = "model" in select_data(file, "documents")
    declared = _keep_model_of(declared, "" if has_own_model else site)
    require_no_places(declared.get("job"), file.files, file.path, where)
    job = parse_declared(declared, file.folder, where)
    if site not in job.sites:
        raise ConfigError(
            f"{where}: its sites are {', '.join(job.sites)}, not {site!r}"
        )

    data = select_data(file, job.data)
    if not job.module.site_keys:  # the method trains one model at all sites
        data = {key: value for key, value in data.items() if key not in SITE_TABLES}
    names_notes = any(data.get(key) for key in job.kind.source_keys)
    if not names_notes:
        raise ConfigError(
            f"{file.path} [data] names no notes: for sites that hold "
            f"{job.data}, give {' or '.join(job.kind.source_keys)}"
        )
    require_unmasked(data, f"{file.path} [data]")

    local_table = insert_local_paths(file, declared["job"])
    site_table = {**drop_places(local_table["sites"][site]), **data}
    table = {
        **local_table,
        "conditions": ["federated"],
        "sites": {site: site_table},
    }
    return parse_job(table, job.name, file.folder, f"{where}, with {file.path}")


def _keep_model_of(declared: Mapping[str, Any], site: str) -> dict[str, Any]:
    """Return a declaration in which only one site has a model of its own.

    This machine does not build the models of other sites, and need not have the files
    that they name.

    Args:
        declared: The job's declaration.
        site: The site; "" for none.
    """
    table = declared.get("job")
    sites = table.get("sites") if isinstance(table, Mapping) else None
    if not isinstance(table, Mapping) or not isinstance(sites, Mapping):
        return dict(declared)
    shown_sites = {
        name: {key: value for key, value in keys.items() if key != "model"}
        if name != site and isinstance(keys, Mapping)
        else keys
        for name, keys in sites.items()
    }
    return {**declared, "job": {**table, "sites": shown_sites}}


def select_data(file: SiteFile, kind: str) -> Mapping[str, Any]:
    """Return the table [data.KIND] of a file; without it, the keys directly in [data].

    Args:
        file: The site's own file.
        kind: The kind of data of a job.
    """
    kind_names = {each.name for each in kinds.list_kinds()}
    tables = {
        key: value
        for key, value in file.data.items()
        if key in kind_names and isinstance(value, Mapping)
    }
    shared_keys = {key: value for key, value in file.data.items() if key not in tables}
    return tables.get(kind) or shared_keys


def job_at_home(
    name: str | Path,
    settings: tuple[str, ...],
    site: str,
    site_file: Path,
    total: int,
) -> Job:
    """Return a job that one site can load without the other sites' notes.

    Stand-ins of equal size replace the other sites, so that settings that depend on all
    sites, such as a site's share of a mini-batch, equal those of the real run.

    Args:
        name: The job's file.
        settings: Assignments such as `"seed=2"`.
        site: The site whose notes are on this machine.
        site_file: That site's own file, which says where its notes are.
        total: Training examples of all sites together: sentences, notes or patients.

    Raises:
        ConfigError: The job has no such site, or `total` leaves no examples for the
            other sites.
    """
    table, path = load_table(name, settings)
    sites = table.get("sites")
    if not isinstance(sites, Mapping) or site not in sites or "silos" in table:
        raise ConfigError(
            f"site {site!r}: {path} has no [sites.{site}] with notes of its own"
        )
    declaration = load_declared(name, settings).declaration
    job = parse_site_job(declaration, site, read_site_file(site_file))
    kind = job.kind
    other_names = [other for other in sites if other != site]

    def load(_job: Job, _progress: Progress | None, cache: Path | None) -> Sites:
        """Load the site's notes, and make the stand-ins from them."""
        loaded = load_site_data(job, cache)
        (home_data,) = loaded.data
        home_size = kind.count_examples(home_data)
        size_each = (total - home_size) // max(1, len(other_names))
        if size_each < 1:
            raise ParameterError(
                f"`total` = {total}: site {site!r} alone has {home_size}: give "
                "the number of training examples of all sites together"
            )
        stand_ins = [
            kind.make_stand_in(home_data, other, size_each) for other in other_names
        ]
        return replace(loaded, data=(home_data, *stand_ins))

    return replace(job, kind=replace(kind, load=load))


def require_no_places(
    table: Any, files: Mapping[str, str], source: Path, where: str
) -> None:
    """Refuse a job that names a file or a variable of the machine that reads it.

    Opening the file would reveal to others whether the file exists, and an error might
    quote its beginning, or the value of the variable.

    Args:
        table: The table of the job, which may have any content.
        files: This machine's own files, by key.
        source: The file that lists them in [files], for messages.
        where: How messages refer to the job.

    Raises:
        ConfigError: The job names a file that `files` does not list, an environment
            variable or a home folder.
    """
    if not isinstance(table, Mapping):
        return
    for names, settings, file_keys in list_tables_with_files(table):
        name = ".".join(names)
        for key, value in settings.items():
            if not isinstance(value, str):
                continue
            is_file_key = key in file_keys
            if is_file_key and key in files:
                continue  # this machine's own path replaces the job's
            if is_file_key and not _BUILT_IN.fullmatch(value):
                raise ConfigError(
                    f"{where} [{name}]: {key} names a file: give its path on "
                    f"this machine as [files] {key} = … in {source}"
                )
            if "$" in value or value.startswith("~"):
                raise ConfigError(
                    f"{where} [{name}] {key}: a job may not name an environment "
                    "variable or a home folder: ask its author to remove it"
                )


def load_site_data(job: Job, cache: Path | None = None) -> Sites:
    """Load the data of a single-site job as a simulation of all sites would.

    Args:
        job: The job of one site (`parse_site_job`).
        cache: Folder of computed features; None for the user's default.

    Raises:
        ConfigError: The site's entity types do not match [tags] types of the job.
        DataError: The notes cannot be read.
    """
    if job.tags is None or not job.tags.types:
        return load_sites(job, cache=cache)

    ((name, site),) = job.sites.items()
    job_types = job.tags.types
    for label in (*site.types, *site.test_types):
        if label not in job_types:
            raise ConfigError(
                f"site {name!r} has the type {label!r}, which is not in the job's "
                f"[tags] types ({', '.join(job_types)}): map it in label_map, or "
                "correct types"
            )

    # The job's other types belong to other sites, so they are left out here.
    (data_with_all_labels,) = load_sites(replace(job, tags=None)).data
    annotated_types = data_with_all_labels.tags.types
    site_types = site.types + site.test_types or annotated_types
    types = tuple(label for label in job_types if label in site_types)
    if not types:
        raise ConfigError(
            f"site {name!r} annotates {', '.join(annotated_types)}; [tags] types of "
            f"the job has {', '.join(job_types)}: map its labels to these in label_map"
        )
    return load_sites(replace(job, tags=replace(job.tags, types=types)))
