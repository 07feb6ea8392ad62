"""A job file as it travels between sites: the same table that `simulate` runs, without places.

declared         what the server and every site get: JSON, no path of notes, no code
job_of_server    the job as the server reads it
job_of_site      the job with one site, its own, by its own file
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fednotes import methods
from fednotes.core.errors import ConfigError
from fednotes.jobs.deployed.site_file import FILES, PLACES, SiteFile, own_data, own_files
from fednotes.jobs.documents import load_sites
from fednotes.jobs.job import Job, Sites, load_table, parse_job
from fednotes.rules.approval import fingerprint

_SOMEWHERE: dict[str, dict[str, str]] = {  # of notes, for those who read none
    "documents": {"path": "notes"},
    "notes": {"path": "notes"},
    "patients": {"notes": "notes", "codes": "codes", "codes_format": "table"},
}
LEAST = 3  # sites of a secure sum
_BUILT_IN = ("", "none", "learn", "minilm", "synthetic")  # names that are of no file


def load_deployed(name: str | Path, settings: tuple[str, ...] = ()) -> tuple[Job, dict[str, Any]]:
    """A job file or built-in job that real sites can run: parsed, and as it is declared.

    Its sites need not say where their notes are. Three sites and more sum securely unless the
    job says otherwise. Raises ConfigError.
    """
    table, path = load_table(name, settings)
    table = without_places(table)
    asked = table.get("federation", {})
    sites = table.get("sites", {})
    if isinstance(asked, Mapping) and isinstance(sites, Mapping) and len(sites) >= LEAST:
        table = {**table, "federation": {"secure_sum": True, **asked}}
    declared = {"name": path.stem, "job": table}
    fingerprint(declared)  # raises RefusedError for what JSON does not have
    return parsed(declared, path.resolve().parent, str(path)), declared


def without_places(table: Mapping[str, Any]) -> dict[str, Any]:
    """A job's table without what says where notes are: that is for each site to say."""
    if not isinstance(sites := table.get("sites"), Mapping):
        return dict(table)
    kept = _each_site(sites, lambda site: {k: v for k, v in site.items() if k not in PLACES})
    return {**table, "sites": kept}


def whole_table(declared: Mapping[str, Any], sites: Sequence[str], least: int) -> dict[str, Any]:
    """What a site approves, and what the job's fingerprint is of."""
    return {**declared, "sites": list(sites), "min_sites": least}


def parsed(declared: Mapping[str, Any], folder: Path, where: str) -> Job:
    """The job that a declaration is of; nobody's notes can be read by it.

    Raises ConfigError where it needs all notes in one place, or is no job.
    """
    try:
        name, table = str(declared["name"]), declared["job"]
        kinds = dict(table.get("sites", {}))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{where}: not the declaration of a job") from error
    _require_apart(table, where)
    try:
        kind = methods.find(str(table.get("method"))).holds
    except ConfigError:
        kind = "documents"  # `parse_job` says what is wrong
    filled = _each_site(kinds, lambda site: {**site, **_SOMEWHERE[kind]})
    return parse_job({**table, "conditions": ["federated"], "sites": filled}, name, folder, where)


def _each_site(sites: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    return {k: change(site) if isinstance(site, Mapping) else site for k, site in sites.items()}


def _require_apart(table: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError for what only a simulation can do."""
    for key, what in (("silos", "deals all notes out anew"), ("synthetic", "generates notes")):
        if key in table:
            raise ConfigError(
                f"{where} [{key}]: {what}, which a simulation does; between real sites leave it "
                "out and give one [sites.NAME] table for each site"
            )
    tags = table.get("tags")
    if isinstance(tags, Mapping) and tags.get("design", "given") != "given":
        raise ConfigError(
            f"{where} [tags] design = {tags['design']!r}: draws the sites' types from "
            'all notes, which a simulation does; between real sites set design = "given"'
        )
    for name, site in table.get("sites", {}).items():
        _require_unmasked(site, f"{where} [sites.{name}]")


def _require_unmasked(site: Any, where: str) -> None:
    if isinstance(site, Mapping) and site.get("mask_overlap"):
        raise ConfigError(
            f"{where}: mask_overlap compares the sites' notes, which a simulation does; between "
            "real sites leave it out"
        )


def job_of_site(declared: Mapping[str, Any], site: str, file: SiteFile) -> Job:
    """The job as one site reads it: its own table alone, above it the site's file.

    Raises ConfigError.
    """
    where = f"job {declared.get('name')}"
    _require_no_places(declared.get("job"), file, where)
    job = parsed(declared, file.folder, where)
    if site not in job.sites:
        raise ConfigError(f"{where}: its sites are {', '.join(job.sites)}, not {site!r}")
    own = own_data(file, declared["job"]["sites"][site], job.data)
    _require_unmasked(own, f"{file.path} [data]")
    table = own_files(file, declared["job"]) | {"conditions": ["federated"], "sites": {site: own}}
    return parse_job(table, job.name, file.folder, f"{where}, with {file.path}")


def _require_no_places(table: Any, file: SiteFile, where: str) -> None:
    """Raises ConfigError where a job names a file of the machine that reads it, or a variable.

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
                raise ConfigError(f"{where} [{name}] {key}: is of a variable or a home folder")


def load_own(job: Job, progress: Any = None, cache: Path | None = None) -> Sites:
    """The data of a job with one site, read as a simulation of all sites would read them.

    Raises as `sites.load_sites`.
    """
    if job.tags is None or not job.tags.types:
        return load_sites(job, progress, cache)
    ((name, site),) = job.sites.items()
    complete = job.tags.types
    if odd := [t for t in (*site.types, *site.test_types) if t not in complete]:
        raise ConfigError(
            f"site {name!r} has the type {odd[0]!r}, [tags] types of the job has "
            f"{', '.join(complete)}: map it in label_map, or correct types"
        )
    # The other sites have the complete set's other types; here it is what this site annotates.
    found = load_sites(replace(job, tags=None)).data[0].tags.types
    kept = tuple(t for t in complete if t in (site.types + site.test_types or found))
    if not kept:
        raise ConfigError(
            f"site {name!r} annotates {', '.join(found)}; [tags] types of the job has "
            f"{', '.join(complete)}: map its labels to these in label_map"
        )
    return load_sites(replace(job, tags=replace(job.tags, types=kept)))
