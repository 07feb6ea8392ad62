"""The job to audit: from a job file, from a run, or from a real site."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

from fednotes.core import plugins
from fednotes.core.errors import ConfigError, ParameterError
from fednotes.core.parsing import as_mapping
from fednotes.core.tables import fingerprint_table
from fednotes.jobs.declaration import load_declared
from fednotes.jobs.job import Job
from fednotes.jobs.job_file import load_job, parse_job
from fednotes.jobs.run_folder import is_run, read_job_record


class Target(NamedTuple):
    """A job to audit.

    Attributes:
        job: The job.
        fingerprint: Fingerprint of the job's table, in the form in which real sites
            see it.
        folder: Folder for the results.
    """

    job: Job
    fingerprint: str
    folder: Path


def open_target(
    target: str,
    settings: tuple[str, ...],
    site: str,
    site_file: Path | None,
    total: int,
    out: Path | None,
) -> Target:
    """Read the job to audit.

    Args:
        target: A run's folder, or a job.
        settings: Changes to the job's keys, as "section.key=value".
        site: Name of the audited site.
        site_file: A real site's own file, whose notes represent those of all sites.
        total: Training sentences (patients) of all sites; needed with `site_file`.
        out: Folder for the results; by default the run's.

    Raises:
        ConfigError: The job cannot be read, the arguments exclude each other, or `out`
            is a run of another job.
    """
    if (site_file is not None or total) and not (site and site_file and total):
        raise ParameterError(
            "`site_file`, `site` and `total` go together: give all three"
        )

    place = Path(target)
    if is_run(place):
        if settings or total:
            raise ConfigError(
                f"{target} is a run, whose settings cannot be changed: audit its job "
                "instead"
            )
        job, table = _read_run_job(place)
        out = out or place
    elif site_file is not None:
        job = _load_home_job(target, settings, site, site_file, total)
        job, table = _build_deployed_job(job, target, settings)
    else:
        job, table = _build_deployed_job(load_job(target, settings), target, settings)

    if out is None:
        raise ParameterError(
            f"{target} is a job: give a folder for the results with `out`"
        )
    key = fingerprint_table(table)
    _require_same_job(out, key)
    return Target(job, key, out)


def _load_home_job(
    target: str, settings: tuple[str, ...], site: str, site_file: Path, total: int
) -> Job:
    """Return the job with the notes that a real site's own file names.

    Raises:
        ConfigError: The deployment between real sites is not installed, or the file or
            the job cannot be read.
    """
    loaders = plugins.load_all("jobs_at_home", FunctionType)
    if not loaders:
        raise ConfigError(
            "site files need the deployment application, which is not installed: audit "
            "a job whose [sites] say where the notes are"
        )
    (load_job_at_home, *_) = loaders.values()
    job: Job = load_job_at_home(target, settings, site, site_file, total)
    return job


def _read_run_job(run: Path) -> tuple[Job, Mapping[str, Any]]:
    """Return the job of a run and the job's table, as the run's folder records them."""
    record = read_job_record(run)
    table = as_mapping(record.get("table"))
    # The paths in the table are relative to the folder of the job file.
    job_folder = Path(str(record.get("folder")))
    job = parse_job(table, run.name, folder=job_folder, where=str(run))
    return job, table


def _build_deployed_job(
    job: Job, target: str, settings: tuple[str, ...]
) -> tuple[Job, Mapping[str, Any]]:
    """Return a job and its table as real sites would run it, if possible."""
    with suppress(ConfigError):  # real sites run no job that generates its notes
        deployed = load_declared(target, settings)
        job_as_deployed = replace(job, federation=deployed.job.federation)
        return job_as_deployed, deployed.declaration["job"]
    return job, job.table


def _require_same_job(out: Path, key: str) -> None:
    """Raise ConfigError if `out` is a run of a job with another fingerprint."""
    if not is_run(out):
        return
    other = fingerprint_table(as_mapping(read_job_record(out).get("table")))
    if other != key:
        raise ParameterError(
            f"`out` {out} is a run of another job ({other[:12]}, not {key[:12]}); that "
            "run's model card would then show this audit: choose another `out`, or "
            "audit that run"
        )
