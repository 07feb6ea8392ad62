"""The folder of a run: which job owns it, whether it is free, and its contents.

OUT/job.json           the job's tables, digests of its notes and of the files of its
                       models, the versions and the machine
OUT/failure.json       why training ended early, if it failed
OUT/metrics.jsonl      a line for each evaluation
OUT/alone/SITE/ …      a folder for each part, with checkpoints/ (until the part is
                       done), done.json and sites/SITE/model; or a single model/ where
                       all sites end with the same model
OUT/left-out/SITE/     done.json, the scores at a left-out site, and a folder for each
                       of the parts that the other sites train
OUT/summary.json       the result
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import torch

import fednotes
from fednotes.core.errors import (
    ConfigError,
    DataError,
    DivergedError,
    FednotesError,
    ParameterError,
    RefusedError,
)
from fednotes.core.parsing import as_mapping, read_json
from fednotes.core.store import LOCK, create_private_folder, make_private, write_json
from fednotes.core.tables import compare_tables
from fednotes.core.types import POOLED
from fednotes.core.wording import list_names
from fednotes.jobs.job import Job, Sites
from fednotes.jobs.metrics_file import METRICS
from fednotes.jobs.results import SUMMARY, Outcome, RunResult, read_result

JOB_RECORD = "job.json"
FAILURE = "failure.json"
_MAX_CHANGES = 5  # differences between two jobs that a message shows
_MAX_CHANGE_LENGTH = 120  # characters of each
_MAX_COMMAND_LENGTH = 300  # characters of a command that a message shows
SEED_PREFIX = "seed-"  # of the folders of the runs of several seeds
_MAX_NEAR = 4  # number of runs that are named in place of a missing one
AnyOutcome = TypeVar("AnyOutcome", bound=Outcome)


# ---- before a run: may the job use the folder? ---------------------------------------


def require_run_folder(out: Path) -> None:
    """Raise ParameterError unless `out` is, or can become, the folder of a run."""
    if (out / JOB_RECORD).exists() or not out.exists():
        return
    if not out.is_dir() or any(path.name != LOCK for path in out.iterdir()):
        raise ParameterError(
            f"{out} is neither the folder of a run nor empty: give another `out`"
        )


def require_usable_folder(
    job: Job, out: Path, *, resume: bool, overwrite: bool
) -> None:
    """Raise ParameterError if `out` holds a run that this job may not touch.

    Args:
        job: The job.
        out: Folder of the run.
        resume: Whether the job resumes its own run.
        overwrite: Whether the job may replace an earlier run.
    """
    if overwrite:
        return
    if resume:
        # A run may be stopped before its first evaluation, so only its record counts.
        if has_record(out) or has_begun(out):
            require_resumable(out, job)
        return
    if has_begun(out):
        raise ParameterError(
            f"{out} holds a run already: give another `out`, `resume` to resume it, or "
            "`overwrite` to replace it"
        )


def require_resumable(run: Path, job: Job) -> None:
    """Raise ParameterError unless a job can resume a run.

    It can if the run is of the same job with the same settings. The job may have
    further conditions, which are then trained in addition to those of the run.
    """
    record = read_job_record(run)
    if record.get("fingerprint") == job.fingerprint or _adds_conditions(job, record):
        return
    raise ParameterError(
        f"{run} holds a run of another job, or of this job with different settings"
        f"{_describe_changes(record, job)}; nothing was changed: repeat the job and "
        "the settings of the first command (you may only add conditions), or give "
        f"another `out`{_show_command(record)}"
    )


def _show_command(record: Mapping[str, Any]) -> str:
    """Return the command of a run's record as the end of a message; "" without one."""
    command = str(record.get("command") or "")
    if not command:
        return ""
    return f"; the first command: {textwrap.shorten(command, _MAX_COMMAND_LENGTH)}"


def has_same_conditions(run: Path, job: Job) -> bool:
    """Return whether a run that a job can resume has no condition left to train."""
    return bool(read_job_record(run).get("fingerprint") == job.fingerprint)


def _adds_conditions(job: Job, record: Mapping[str, Any]) -> bool:
    """Return whether a job equals that of a record, but may have more conditions."""
    before = dict(as_mapping(record.get("table")))
    after = _to_recorded(job.table)
    conditions = before.pop("conditions", None)
    after.pop("conditions", None)
    if not isinstance(conditions, list):
        return False  # a run without this key has all conditions already
    has_all_conditions = all(condition in job.conditions for condition in conditions)
    return has_all_conditions and before == after


def _to_recorded(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job's table as it is read back from the record of a run.

    Values of TOML that JSON lacks, such as dates, become text.
    """
    recorded: dict[str, Any] = json.loads(json.dumps(table, default=str))
    return recorded


def _describe_changes(record: Mapping[str, Any], job: Job) -> str:
    """Return how the job of a run's record differs from a job, in parentheses."""
    try:
        before = as_mapping(record.get("table"))
        changes = compare_tables(before, _to_recorded(job.table))
    except (RefusedError, ValueError):
        return ""
    shown = [
        textwrap.shorten(change, _MAX_CHANGE_LENGTH, placeholder=" …")
        for change in changes[:_MAX_CHANGES]
    ]
    if len(changes) > _MAX_CHANGES:
        shown.append(f"{len(changes) - _MAX_CHANGES} more")
    return f" ({'; '.join(shown)})" if shown else ""


def has_record(out: Path) -> bool:
    """Return whether a folder holds the record of a job, so that it can be resumed."""
    return (out / JOB_RECORD).exists()


def describe_nothing_to_resume(out: Path) -> str:
    """Return the warning that a call with `resume` starts a new run.

    Such a call is not refused, so that a batch system can repeat one command until the
    run has ended, whenever it was stopped.
    """
    return (
        f"there is no run in {out} to resume, so training starts from the beginning; "
        "if you expected a run there, stop this one and check the name of the folder"
    )


def has_begun(out: Path) -> bool:
    """Return whether a run's folder holds evaluations, which took time to compute.

    A job that failed at its start leaves no evaluation, so its folder is free.
    """
    log = out / METRICS
    return log.exists() and log.stat().st_size > 0


def move_aside(out: Path) -> bool:
    """Move an earlier run to `OUT.previous`.

    If there is already a previous run, an unfinished run is deleted instead.

    Returns:
        Whether there was an earlier run.
    """
    previous = out.with_name(out.name + ".previous")
    if not has_begun(out):
        return False
    if previous.exists():
        is_finished = (out / SUMMARY).exists()
        if not is_finished:
            shutil.rmtree(out)
            return True
        # Only the folder of a run may be deleted; this raises for any other folder.
        read_job_record(previous)
        shutil.rmtree(previous)
    out.rename(previous)
    return True


def record_inputs(  # noqa: PLR0913 - each is a part of the record
    job: Job,
    out: Path,
    sites: Sites,
    facts: Mapping[str, Any] | None = None,
    *,
    files: Mapping[str, str] | None = None,
    resume: bool,
    command: str = "",
    workers: int = 1,
    processors: Sequence[str] = (),
) -> None:
    """Write the job, and digests of its notes and model files, into a run's folder.

    Only the owner can read the folder, because its files derive from notes.

    Args:
        job: The job.
        out: Folder of the run.
        sites: Data of the job's sites.
        facts: Counts of each site's data, for a diagnosis.
        files: Digests of the models' files (`digest_model_files`).
        resume: Whether the job resumes its own run.
        command: Command that repeats the run; "" if there is none.
        workers: Number of worker processes; 1 if there are none.
        processors: Names of their processors, on a cluster.

    Raises:
        ConfigError: The notes or the files of models have changed since the run that is
            to be resumed began.
    """
    notes = {site.id: job.kind.fingerprint(site) for site in sites.data}
    if resume and has_record(out):
        _require_same_inputs(out, notes, files or {})
    create_private_folder(out)
    make_private(out)
    record = {
        "fingerprint": job.fingerprint,
        "job": job.name,
        "folder": str(job.folder),
        "command": command,
        "table": job.table,
        "versions": list_versions(),
        "workers": workers,
        "processors": list(processors),
        "threads": job.threads,
        "notes": notes,
        "files": dict(files or {}),
        "data": dict(facts or {}),
    }
    write_json(out / JOB_RECORD, record)


def _require_same_inputs(
    out: Path, notes: Mapping[str, str], files: Mapping[str, str]
) -> None:
    """Raise ConfigError unless a run has read these notes and files of models.

    Args:
        out: Folder of the run.
        notes: Digest of each site's notes.
        files: Digest of the file or folder that each key of the job names.
    """
    record = read_job_record(out)
    notes_before = as_mapping(record.get("notes"))
    for site, digest in notes.items():
        if notes_before.get(site) != digest:
            raise ConfigError(
                f"the notes of site {site!r} have changed since the run in {out} "
                "began: restore them, or start a new run"
            )
    # Runs of earlier versions recorded no files.
    files_before = as_mapping(record.get("files", files))
    for key, digest in files.items():
        if files_before.get(key) != digest:
            raise ConfigError(
                f"the file or folder given as {key} in the job has changed since "
                f"the run in {out} began: restore it, or start a new run"
            )


def record_workers(out: Path, workers: int) -> None:
    """Record in a run's job.json how many workers compute for its sites."""
    record = read_job_record(out)
    write_json(out / JOB_RECORD, {**record, "workers": workers})


@contextmanager
def recording_failure(out: Path, part: str) -> Iterator[None]:
    """Write failure.json if training fails within the context.

    Args:
        out: Folder of the run.
        part: Name of the part that is trained.

    Raises:
        FednotesError: The training failed; the same error is raised again.
    """
    try:
        yield
    except FednotesError as error:
        failure = {
            "part": part,
            "problem": str(error),
            "diverged": isinstance(error, DivergedError),
        }
        write_json(out / FAILURE, failure)
        raise


def list_versions() -> dict[str, str]:
    """Return the machine and the software versions, which may affect results."""
    return {
        "fednotes": fednotes.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


# ---- after a run: what does the folder hold? -----------------------------------------


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a run, simulated or between real sites."""
    return any((folder / name).is_file() for name in (SUMMARY, JOB_RECORD))


def list_model_folders(folder: Path) -> list[Path]:
    """Return the folders of models in the folder of a run, federated models first."""
    models = {
        path
        for pattern in ("model", "*/model", "*/sites/*/model", "*/*/sites/*/model")
        for path in folder.glob(pattern)
        if path.is_dir()
    }
    return sorted(
        models,
        key=lambda path: (path.relative_to(folder).parts[0] != "federated", path),
    )


def list_runs_near(path: Path) -> list[Path]:
    """Return a few runs near a path that holds none, those with similar names first.

    Searches the nearest folder that exists, and the folders in it.
    """
    folder = next((each for each in (path, *path.parents) if each.is_dir()), Path())
    places = {
        file.parent
        for pattern in ("*", "*/*")
        for name in (SUMMARY, JOB_RECORD)
        for file in folder.glob(f"{pattern}/{name}")
    }
    # The runs of several seeds are examined together.
    runs = {
        place.parent if place.name.startswith(SEED_PREFIX) else place
        for place in places
        if not any(part.startswith(".") for part in place.relative_to(folder).parts)
    }
    by_name = {str(run): run for run in sorted(runs - {folder})}
    alike = []
    if not path.exists():
        alike = get_close_matches(str(path), by_name, n=_MAX_NEAR)
    return [by_name[name] for name in dict.fromkeys([*alike, *by_name])][:_MAX_NEAR]


def read_job_record(run: Path) -> dict[str, Any]:
    """Return the content of a run's job.json.

    Raises:
        ConfigError: There is no such run, or the file is missing or damaged.
    """
    if not run.is_dir():
        near = [str(each) for each in list_runs_near(run)]
        hint = f": runs near it are {list_names(near)}" if near else ""
        raise ConfigError(f"{run}: there is no such run{hint}")
    try:
        record = read_json(run / JOB_RECORD)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{run} is not the folder of a run: its {JOB_RECORD} is missing or damaged"
        ) from error
    if not isinstance(record, dict):
        raise ConfigError(f"{run / JOB_RECORD}: damaged")
    return record


def read_result_so_far(run: Path) -> RunResult:
    """Return the result of a run, or for an unfinished run the facts in job.json."""
    if (run / SUMMARY).is_file():
        return read_result(run)
    record = read_job_record(run)
    table = as_mapping(record.get("table") or record)
    known: dict[str, Any] = {
        key: str(table[key]) for key in ("title", "method") if key in table
    }
    if type(table.get("seed")) is int:
        known["seed"] = table["seed"]
    if isinstance(record.get("command"), str):
        known["command"] = record["command"]
    config = {str(key): value for key, value in table.items()}
    return RunResult.model_validate({**known, "config": config})


def read_part_outcome(done: Path, kind: type[AnyOutcome]) -> AnyOutcome | None:
    """Return the outcome of a finished part; None if it is missing or damaged.

    A part without an outcome is trained again.

    Args:
        done: The part's done.json.
        kind: Class of the outcome.
    """
    try:
        return kind.model_validate(read_json(done, strict=False))
    except (OSError, ValueError):
        return None


def require_same_data(run: Path, job: Job, sites: Sequence[Any]) -> None:
    """Raise DataError unless a run's sites still have its training data.

    Args:
        run: Folder of the run.
        job: The job that made the run.
        sites: Current data of the job's sites.
    """
    changed = find_changed_site(run, job, sites)
    if changed is not None:
        raise DataError(
            f"{run}: the data of site {changed!r}, or their split into parts, have "
            "changed since this run, so its test data may contain training data: "
            "restore the site's files (jobs without `split` were once split "
            'by sentence: add split = "sentence" to the run\'s job.json)'
        )


def find_changed_site(run: Path, job: Job, sites: Sequence[Any]) -> str | None:
    """Return the first site whose data differ from those of a run; None if none do.

    Args:
        run: Folder of the run.
        job: The job that made the run.
        sites: Current data of the job's sites.
    """
    digests = read_job_record(run).get("notes", {})
    for site in sites:
        # The oldest runs recorded no digests.
        if site.id in digests and digests[site.id] != job.kind.fingerprint(site):
            return str(site.id)
    return None


def find_model_folder(run: Path, condition: str, site: str) -> Path:
    """Return the folder of the model that a site has under a condition.

    Args:
        run: Folder of the run.
        condition: The condition, such as "federated".
        site: Name of the site.

    Raises:
        DataError: There is no such model.
    """
    part = run / condition / site if condition == "alone" else run / condition
    # A site has its own model, or one model serves all sites.
    places = (part / "sites" / site, part / "sites" / POOLED, part)
    for place in places:
        folder = place / "model"
        if folder.exists():
            return folder
    raise DataError(
        f"{run} has no {condition} model of site {site!r}: check that the run has "
        f"ended, and that {condition!r} is one of its conditions"
    )


def find_free_folder(path: Path) -> Path:
    """Return a path that does not exist: this one, or one with a number at its end."""
    free = path
    number = 2
    while os.path.lexists(free):
        free = path.with_name(f"{path.name}-{number}")
        number += 1
    return free
