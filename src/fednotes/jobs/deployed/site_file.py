"""A site's own file: where its notes are, and its rules. It stands above what a job says.

    device = "cpu"            # where tensors live
    threads = 2               # of this site's process; the job's number if not given
    cache = "cache"           # frozen features and tokens; the user's default cache if empty
    [data]                    # the keys of a job's [sites.NAME], above those of the job
    path = "notes.jsonl"
    [files]                   # where this machine keeps what the job names: word_vectors,
    dictionary = "terms.obo"  # contextual, encoder, backbone, representation, dictionary
    [policy]                  # rules/policy.py

Paths are relative to the file, `$NAME` stands for an environment variable. Only this file says
which notes are read: a job that names a file of the site's is not listened to. [data] may hold
tables for jobs of several kinds, [data.documents], [data.notes] and [data.patients].
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fednotes.core.errors import ConfigError, nearest
from fednotes.core.settings import build, read_toml
from fednotes.core.store import write_text
from fednotes.jobs.job import NotesConfig, SiteConfig, expand
from fednotes.jobs.patient_tables import PatientsConfig
from fednotes.rules.policy import Policy, policy_from

SITE_FILE = "site.toml"  # in a kit
KINDS = ("documents", "notes", "patients")
# Keys of [sites.NAME] that say where notes are, and which of a file's are a site's own.
PLACES = frozenset(
    {
        *("path", "paths", "train", "valid", "test", "format", "where", "share", "column"),
        *("notes", "concepts", "codes", "codes_format", "labels", "test_codes", "exclude"),
        *("test_labels", "patient_column", "code_column", "tables"),
    }
)
_NEEDED = {
    "documents": ("path", "train"),
    "notes": ("path", "paths"),
    "patients": ("notes", "concepts", "labels"),
}
_TABLES_OF = {"documents": SiteConfig, "notes": NotesConfig, "patients": PatientsConfig}
_KEYS = {kind: [f.name for f in fields(table)] for kind, table in _TABLES_OF.items()}
_TABLES = {"dictionary": ("concepts",)}  # else [model]; which table of a job a file belongs to
FILES = ("word_vectors", "contextual", "encoder", "backbone", "representation", "dictionary")


@dataclass(frozen=True)
class _Top:
    """The keys outside tables. folder: what paths are relative to, in a copy of the file."""

    device: str = "cpu"
    threads: int = 0
    cache: str = ""
    folder: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SiteFile:
    """What a site's file says. folder: what its paths are relative to. cache: None is the
    user's default one. files: absolute."""

    path: Path
    folder: Path
    policy: Policy
    data: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"
    threads: int = 0
    cache: Path | None = None


def read_site_file(path: Path) -> SiteFile:
    """A site's file.

    Raises ConfigError for an unknown key, a wrong value or a policy that is none.
    """
    table = read_toml(path)
    if "data" in table and not isinstance(table["data"], Mapping):
        raise ConfigError(f"{path}: data = …: expected a table, [data]")
    top = _top(table, path)
    folder = Path(top.folder) if top.folder else path.resolve().parent
    for key in top.files:
        if key not in FILES:
            raise ConfigError(f"{path} [files]: unknown key {key!r}; {nearest(key, FILES)}")
    _require_known(top.data, path)
    if top.threads < 0:
        raise ConfigError(f"{path}: threads = {top.threads}: 0 leaves it to the job")
    return SiteFile(
        path,
        folder,
        policy_from(table.get("policy", {}), f"[policy] of {path}"),
        top.data,
        {key: _absolute(value, folder, f"[files] {key}") for key, value in top.files.items()},
        top.device,
        top.threads,
        Path(_absolute(top.cache, folder, "cache")) if top.cache else None,
    )


def _top(table: Mapping[str, Any], path: Path) -> _Top:
    for key in ("policy", "files"):
        if not isinstance(table.get(key, {}), Mapping):
            raise ConfigError(f"{path}: {key} = …: expected a table, [{key}]")
    plain = {k: v for k, v in table.items() if k not in ("data", "policy")}
    made = build(_Top, plain, str(path))
    return _Top(
        made.device, made.threads, made.cache, made.folder, table.get("data", {}), made.files
    )


def _require_known(data: Mapping[str, Any], path: Path) -> None:
    """Raises ConfigError for a key of [data] that no kind of notes has."""
    every = sorted({key for keys in _KEYS.values() for key in keys})
    for key, value in data.items():
        if key in KINDS and isinstance(value, Mapping):
            for inner in value:
                if inner not in _KEYS[key]:
                    raise ConfigError(
                        f"{path} [data.{key}]: unknown key {inner!r}; {nearest(inner, _KEYS[key])}"
                    )
        elif key not in every:
            raise ConfigError(f"{path} [data]: unknown key {key!r}; {nearest(key, every)}")


def _absolute(text: str, folder: Path, where: str) -> str:
    """A path as this machine has it; what is no file, such as "minilm#layer=5", stays."""
    place = expand(text, where)
    beside = folder / place
    return str(beside) if beside.exists() or where == "cache" else place


def install(source: Path, kit: Path, name: str = SITE_FILE) -> SiteFile:
    """Copy a site's file into its kit, after a check; its paths stay relative to where it was.

    Raises ConfigError as `read_site_file`; then the kit's earlier file stays.
    """
    checked = read_site_file(source)
    text = source.read_text(encoding="utf-8")
    target = kit / name
    if target.exists() and target.samefile(source):
        return checked
    if "folder" not in read_toml(source):
        note = f"# A copy of {source.resolve()}; paths below are relative to this folder.\n"
        text = f"{note}folder = {json.dumps(str(checked.folder))}\n{text}"
    write_text(target, text)
    return read_site_file(target)


def of_kit(kit: Path) -> SiteFile:
    """The file in a site's kit. Raises ConfigError if there is none."""
    path = kit / SITE_FILE
    if not path.exists():
        raise ConfigError(
            f"{path}: no such file: `fednotes site start {kit} --site FILE` puts one there"
        )
    return read_site_file(path)


def policy_of(kit: Path) -> Policy:
    """The rules of a site; those by default where it has no file yet."""
    return of_kit(kit).policy if (kit / SITE_FILE).exists() else Policy()


def own_data(file: SiteFile, declared: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """A site's [sites.NAME] table: the job's, without places, below the site's own.

    declared: the job's table of this site. kind: of data, as the method reads it.
    Raises ConfigError if the site's file names no notes.
    """
    tables = {k: v for k, v in file.data.items() if k in KINDS and isinstance(v, Mapping)}
    own = dict(tables.get(kind) or {k: v for k, v in file.data.items() if k not in tables})
    if not any(own.get(key) for key in _NEEDED[kind]):
        raise ConfigError(
            f"{file.path} [data]: names no notes; this job's sites hold {kind}: give "
            f"{' or '.join(_NEEDED[kind])}"
        )
    return {k: v for k, v in declared.items() if k not in PLACES} | own


def own_files(file: SiteFile, table: Mapping[str, Any]) -> dict[str, Any]:
    """A job's table with this machine's places of the files that it names."""
    changed: dict[str, Any] = dict(table)
    for key, place in file.files.items():
        names = _TABLES.get(key, ("model",))
        if key == "encoder" and "text" in table:
            names = ("text",)
        for name in names:
            if key in changed.get(name, {}):
                changed[name] = {**changed[name], key: place}
    return changed
