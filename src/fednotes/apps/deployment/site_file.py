"""A job as it travels between sites, and a site's own file, which stands above it.

A job travels as the table that `simulate` runs, without places: JSON, no path of notes,
no code. A site's own file says where its notes are, and its rules:

    device = "cpu"            # where tensors live
    threads = 2               # of this site's process; the job's number if not given
    cache = "cache"           # frozen features and tokens; the user's default cache if empty
    [data]                    # the keys of a job's [sites.NAME], above those of the job
    path = "notes.jsonl"
    [files]                   # where this machine keeps what the job names: word_vectors,
    dictionary = "terms.obo"  # contextual, encoder, backbone, representation, dictionary
    [policy]                  # apps/deployment/rules/policy.py

Paths are relative to the file, `$NAME` stands for an environment variable. Only this
file says which notes are read: a job that names a file of the site's is not listened
to. [data] may hold tables for jobs of several kinds, [data.documents], [data.notes] and
[data.patients].
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fednotes.apps.deployment.rules.policy import Policy, policy_from
from fednotes.core.errors import ConfigError, nearest
from fednotes.core.settings import build, checked, expand, read_toml
from fednotes.core.store import write_text
from fednotes.jobs import kinds
from fednotes.jobs.declaration import (
    load_declared,
    parse_declared,
    require_unmasked,
    without_places,
)
from fednotes.jobs.job import Job, Number, Progress, Sites, load_sites
from fednotes.jobs.job_file import load_table, parse_job

SITE_FILE = "site.toml"  # in a kit
FILES = (
    "word_vectors",
    "contextual",
    "encoder",
    "backbone",
    "representation",
    "dictionary",
)
_BUILT_IN = ("", "none", "learn", "minilm", "synthetic")  # names that are of no file


# ---- a site's own file ---------------------------------------------------------------


@checked(frozen=True)
class _Keys:
    """The file's keys. folder: what paths are relative to, in a copy of the file."""

    device: str = "cpu"
    threads: Number = 0
    cache: str = ""
    folder: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SiteFile:
    """What a site's file says. folder: what its paths are relative to. cache: None is
    the user's default one. files: absolute."""

    path: Path
    folder: Path
    policy: Policy
    data: Mapping[str, Any]
    files: Mapping[str, str]
    device: str
    threads: int
    cache: Path | None


def _keys_by_kind() -> dict[str, list[str]]:
    """Return the keys of [sites.NAME] for each kind of data."""
    return {
        kind.name: [key.name for key in fields(kind.sites)]
        for kind in kinds.all_kinds()
    }


def read_site_file(path: Path) -> SiteFile:
    """A site's file.

    Raises ConfigError for an unknown key, a wrong value or a policy that is none.
    """
    keys = build(_Keys, read_toml(path), str(path))
    folder = Path(keys.folder) if keys.folder else path.resolve().parent
    keys_of = _keys_by_kind()
    every = sorted({key for known in keys_of.values() for key in known})
    for key, value in keys.data.items():
        if key in keys_of and isinstance(value, Mapping):
            _require_known(value, keys_of[key], f"{path} [data.{key}]")
        else:
            _require_known([key], every, f"{path} [data]")
    _require_known(keys.files, FILES, f"{path} [files]")

    # what is no file, as "minilm#layer=5", stays
    def absolute(text: str, where: str) -> str:
        place = expand(text, where)
        beside = folder / place
        return str(beside) if beside.exists() or where == "cache" else place

    return SiteFile(
        path,
        folder,
        policy_from(keys.policy, f"[policy] of {path}"),
        keys.data,
        {key: absolute(value, f"[files] {key}") for key, value in keys.files.items()},
        keys.device,
        keys.threads,
        Path(absolute(keys.cache, "cache")) if keys.cache else None,
    )


def _require_known(keys: Any, known: Sequence[str], where: str) -> None:
    for key in keys:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}; {nearest(key, known)}")


def install(source: Path, kit: Path, name: str = SITE_FILE) -> SiteFile:
    """Copy a site's file into its kit, after a check; its paths stay relative to where
    it was.

    Raises ConfigError as `read_site_file`; then the kit's earlier file stays.
    """
    found = read_site_file(source)
    text = source.read_text(encoding="utf-8")
    target = kit / name
    if target.exists() and target.samefile(source):
        return found
    if "folder" not in read_toml(source):
        note = f"# A copy of {source.resolve()}; paths below are relative to this folder.\n"
        text = f"{note}folder = {json.dumps(str(found.folder))}\n{text}"
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


def own_files(file: SiteFile, table: Mapping[str, Any]) -> dict[str, Any]:
    """A job's table with this machine's places of the files that it names."""
    changed: dict[str, Any] = dict(table)
    for key, place in file.files.items():
        name = "concepts" if key == "dictionary" else "model"
        name = "text" if key == "encoder" and "text" in table else name
        if key in changed.get(name, {}):
            changed[name] = {**changed[name], key: place}
    return changed


# ---- a job as one site reads it -------------------------------------------------------


def job_of_site(declared: Mapping[str, Any], site: str, file: SiteFile) -> Job:
    """The job as one site reads it: its own table alone, without places, below the
    site's file.

    Raises ConfigError.
    """
    where = f"job {declared.get('name')}"
    _require_no_places(declared.get("job"), file, where)
    job = parse_declared(declared, file.folder, where)
    if site not in job.sites:
        raise ConfigError(
            f"{where}: its sites are {', '.join(job.sites)}, not {site!r}"
        )
    known_kinds = {kind.name for kind in kinds.all_kinds()}
    tables = {
        k: v
        for k, v in file.data.items()
        if k in known_kinds and isinstance(v, Mapping)
    }
    data = tables.get(job.data) or {
        k: v for k, v in file.data.items() if k not in tables
    }
    if not any(data.get(key) for key in job.kind.needed):
        raise ConfigError(
            f"{file.path} [data]: names no notes; this job's sites hold {job.data}: give "
            f"{' or '.join(job.kind.needed)}"
        )
    require_unmasked(data, f"{file.path} [data]")
    own = {site: {**without_places(declared["job"]["sites"][site]), **data}}
    table = {
        **own_files(file, declared["job"]),
        "conditions": ["federated"],
        "sites": own,
    }
    return parse_job(table, job.name, file.folder, f"{where}, with {file.path}")


def job_at_home(
    name: str | Path,
    settings: tuple[str, ...],
    site: str,
    site_file: Path,
    total: int,
) -> Job:
    """Return a job that one site can load without the other sites' notes.

    Stand-ins of equal size take the other sites' places, so that settings which depend
    on the whole federation, such as a site's part of a mini-batch, are those of the
    real run.

    Args:
        name: The job's file.
        settings: Assignments such as `"seed=2"`.
        site: The site whose notes are here.
        site_file: That site's own file, which says where its notes are.
        total: Training examples of all sites together: sentences, notes or patients.

    Raises:
        ConfigError: The job has no such site, or `total` leaves nothing for the others.
    """
    table, path = load_table(name, settings)
    sites = table.get("sites")
    if not isinstance(sites, Mapping) or site not in sites or "silos" in table:
        raise ConfigError(
            f"site {site!r}: {path} has no [sites.{site}] with notes of its own"
        )
    job = job_of_site(load_declared(name, settings)[1], site, read_site_file(site_file))
    kind = job.kind
    other_names = [other for other in sites if other != site]

    def load(_: Job, progress: Progress | None, cache: Path | None) -> Sites:
        loaded = load_own(job, cache)
        home = loaded.data[0]
        home_size = kind.size(home)
        size_each = (total - home_size) // max(1, len(other_names))
        if size_each < 1:
            raise ConfigError(
                f"total = {total}: site {site!r} alone has {home_size}; "
                "give the number of training examples of all sites together"
            )
        others = [kind.stand_in(home, other, size_each) for other in other_names]
        return replace(loaded, data=(home, *others))

    return replace(job, kind=replace(kind, load=load))


def _require_no_places(table: Any, file: SiteFile, where: str) -> None:
    """Raises ConfigError where a job names a file of the machine that reads it, or a
    variable.

    Opening it would tell the server whether it is there, and the error how it begins.
    """
    for name in ("model", "text", "concepts"):
        given = table.get(name) if isinstance(table, Mapping) else None
        for key, value in (given if isinstance(given, Mapping) else {}).items():
            if not isinstance(value, str) or (key in FILES and key in file.files):
                continue
            if key in FILES and value.partition("#")[0] not in _BUILT_IN:
                raise ConfigError(
                    f"{where} [{name}]: names a file, {key}: say where this machine keeps it, "
                    f"[files] {key} = … in {file.path}"
                )
            if "$" in value or value.startswith("~"):
                raise ConfigError(
                    f"{where} [{name}] {key}: is of a variable or a home folder"
                )


def load_own(job: Job, cache: Path | None = None) -> Sites:
    """The data of a job with one site, read as a simulation of all sites would read
    them.

    Raises as `load_sites`.
    """
    if job.tags is None or not job.tags.types:
        return load_sites(job, cache=cache)
    ((name, site),) = job.sites.items()
    complete = job.tags.types
    if odd := [t for t in (*site.types, *site.test_types) if t not in complete]:
        raise ConfigError(
            f"site {name!r} has the type {odd[0]!r}, [tags] types of the job has "
            f"{', '.join(complete)}: map it in label_map, or correct types"
        )
    # The other sites have the complete set's other types; here it is what this site
    # annotates.
    found = load_sites(replace(job, tags=None)).data[0].tags.types
    kept = tuple(t for t in complete if t in (site.types + site.test_types or found))
    if not kept:
        raise ConfigError(
            f"site {name!r} annotates {', '.join(found)}; [tags] types of the job has "
            f"{', '.join(complete)}: map its labels to these in label_map"
        )
    return load_sites(replace(job, tags=replace(job.tags, types=kept)))
