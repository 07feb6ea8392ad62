"""Declare a job to real sites: its table without the locations of notes.

`simulate` runs the table of a job file. Real sites receive the same table without any
path; each site's own file says where its notes are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fednotes import methods
from fednotes.core.errors import ConfigError, naming_place
from fednotes.core.tables import fingerprint_table
from fednotes.jobs import kinds
from fednotes.jobs.job import Job
from fednotes.jobs.job_file import load_table, parse_job
from fednotes.training.site_sampling import require_fewer_drawn_sites

# A secure sum of two sites would reveal each site's update to the other.
MIN_SECURE_SITES = 3

# Keys of [sites.NAME] that say where a site's notes are, how its files are read, and
# which of the notes belong to the site.
PLACE_KEYS = frozenset(
    {
        # documents and notes
        "path",
        "paths",
        "train",
        "valid",
        "test",
        "format",
        "where",
        "share",
        "column",
        "encoding",
        "public",
        # in a database: no other party may write a site's query
        "query",
        "omop",
        # patients
        "notes",
        "concepts",
        "codes",
        "codes_format",
        "labels",
        "test_codes",
        "test_labels",
        "exclude",
        "patient_column",
        "code_column",
        "tables",
    }
)
# Keys of [sites.NAME] that describe a site's training, not its notes.
SITE_TABLES = ("model", "training")
# Keys of a job file that only a simulation uses, and that real sites do not receive.
_NOT_DECLARED = frozenset({"conditions", "left_out"})
# Tables of a job file that only a simulation supports, with the reasons.
_SIMULATION_ONLY = {
    "silos": "redistributes all notes",
    "synthetic": "generates notes",
}


class DeclaredJob(NamedTuple):
    """A job that real sites are to run.

    Attributes:
        job: The job, without the locations of notes.
        declaration: Its declaration, a table with "name" and "job".
    """

    job: Job
    declaration: dict[str, Any]


def load_declared(name: str | Path, settings: tuple[str, ...] = ()) -> DeclaredJob:
    """Read a job file or built-in job that real sites are to run.

    Its sites need not say where their notes are. A job of three or more sites uses the
    secure sum unless it says otherwise. The declaration has neither `conditions` nor
    [left_out]: real sites only train together, and whoever approves the job must not
    read "pooled" in it.

    Args:
        name: The path of a job file, or the name of a built-in job.
        settings: Assignments such as "seed=2".

    Raises:
        ConfigError: There is no such job, it is invalid, or real sites cannot run it.
        RefusedError: The job has a value that is not JSON.
    """
    table, path = load_table(name, settings)
    table = {key: value for key, value in table.items() if key not in _NOT_DECLARED}
    sites = table.get("sites")
    if isinstance(sites, Mapping):
        table = {**table, "sites": _change_sites(sites, drop_places)}
        federation = table.get("federation", {})
        if isinstance(federation, Mapping) and len(sites) >= MIN_SECURE_SITES:
            table = {**table, "federation": {"secure_sum": True, **federation}}

    declaration = {"name": path.stem, "job": table}
    fingerprint_table(declaration)  # raises RefusedError for values that are not JSON
    job = parse_declared(declaration, path.resolve().parent, str(path))
    return DeclaredJob(job, declaration)


def parse_declared(declared: Mapping[str, Any], folder: Path, where: str) -> Job:
    """Return the job of a declaration, which can read no site's notes.

    Args:
        declared: A table with "name" and "job".
        folder: Folder against which relative paths are resolved.
        where: Name of the declaration in error messages.

    Raises:
        ConfigError: `declared` is not the declaration of a job, or the job needs all
            notes in one place.
    """
    try:
        name = str(declared["name"])
        table = declared["job"]
        sites = dict(table.get("sites", {}))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{where}: not a valid job declaration: submit the job again with "
            "`fednotes run`"
        ) from error
    _require_no_simulation(table, sites, where)

    placeholder = _find_placeholder(table)
    sites = _change_sites(sites, lambda site: {**site, **placeholder})
    table = {**table, "conditions": ["federated"], "sites": sites}
    job = parse_job(table, name, folder, where)
    with naming_place(where, ConfigError):
        require_fewer_drawn_sites(job.config, len(sites))

    if job.privacy and job.privacy.where == "sum" and not job.federation.secure_sum:
        raise ConfigError(
            f'{where} [privacy] where = "sum": each site adds only a part of the '
            "noise, which protects it only in a secure sum: set secure_sum = true in "
            '[federation], with three sites or more, or where = "site"'
        )
    return job


def make_table_to_approve(
    declared: Mapping[str, Any], sites: Sequence[str], min_sites: int
) -> dict[str, Any]:
    """Return the table that a site approves: the declaration with this run's sites.

    The fingerprint of a deployed job is the fingerprint of this table.
    """
    return {**declared, "sites": list(sites), "min_sites": min_sites}


def lacks_places(table: Mapping[str, Any]) -> bool:
    """Return whether a job has sites, and none of them says where its notes are."""
    sites = table.get("sites")
    if not isinstance(sites, Mapping) or not sites:
        return False
    return all(
        isinstance(site, Mapping) and not PLACE_KEYS & site.keys()
        for site in sites.values()
    )


def add_placeholders(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add placeholders to a job's tables if no site says where its notes are.

    `parse_job` accepts these tables; the notes of their job cannot be read.
    """
    if not lacks_places(table):
        return table
    try:
        method = methods.find_method(str(table.get("method")))
    except ConfigError:
        return table  # `parse_job` reports the problem
    placeholder = kinds.find(method.holds).source_placeholder
    sites = {name: {**site, **placeholder} for name, site in table["sites"].items()}
    return {**table, "sites": sites}


def drop_places(site: Mapping[str, Any]) -> dict[str, Any]:
    """Return a site's table without the keys that say where its notes are."""
    return {key: value for key, value in site.items() if key not in PLACE_KEYS}


def require_unmasked(site: Any, where: str) -> None:
    """Raise ConfigError if a site's table compares its notes with other sites'."""
    if isinstance(site, Mapping) and site.get("mask_overlap"):
        raise ConfigError(
            f"{where}: mask_overlap compares the sites' notes, which only a simulation "
            "can do: leave it out between real sites"
        )


def _require_no_simulation(table: Any, sites: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if a job needs something that only a simulation can do."""
    for key, effect in _SIMULATION_ONLY.items():
        if key in table:
            raise ConfigError(
                f"{where} [{key}]: {effect}, which only a simulation can do; between "
                "real sites leave it out and give one [sites.NAME] table for each site"
            )
    tags = table.get("tags")
    if isinstance(tags, Mapping) and tags.get("design", "given") != "given":
        raise ConfigError(
            f"{where} [tags] design = {tags['design']!r}: draws the sites' types from "
            "all notes, which only a simulation can do; between real sites set "
            'design = "given"'
        )
    for name, site in sites.items():
        require_unmasked(site, f"{where} [sites.{name}]")


def _find_placeholder(table: Any) -> Mapping[str, Any]:
    """Return keys that let `parse_job` accept a site's table without places."""
    try:
        holds = methods.find_method(str(table.get("method"))).holds
    except ConfigError:
        holds = "documents"  # `parse_job` reports the problem
    return kinds.find(holds).source_placeholder


def _change_sites(
    sites: Mapping[str, Any], change: Callable[[Any], Any]
) -> dict[str, Any]:
    """Return the changed tables of all sites; values that are not tables stay."""
    return {
        name: change(site) if isinstance(site, Mapping) else site
        for name, site in sites.items()
    }
