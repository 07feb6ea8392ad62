"""A run's folder: whose it is, whether it is free, and what a finished part left in it."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path
from typing import Any

import torch

import fednotes
from fednotes.core.errors import ConfigError
from fednotes.core.parsing import read_json
from fednotes.core.store import LOCK, make_private, private_folder, write_json
from fednotes.jobs.job import Job, Sites
from fednotes.jobs.results import METRICS, SUMMARY, Outcome


def require_place(out: Path) -> None:
    """Raises ConfigError unless `out` is the folder of a run, or could become one."""
    if (out / "job.json").exists() or not out.exists():
        return
    if not out.is_dir() or any(path.name != LOCK for path in out.iterdir()):
        raise ConfigError(f"{out} is not the folder of a run, nor empty: give another --out")


def refuse(job: Job, out: Path, resume: bool, overwrite: bool) -> None:
    """Raises ConfigError unless `out` is free for this job, or its own."""
    if overwrite or not begun(out):
        return
    if not resume:
        raise ConfigError(
            f"{out} holds a run already: give another --out, --resume to go on with it, "
            "or --overwrite to replace it"
        )
    if recorded(out).get("fingerprint") != job.fingerprint:
        raise ConfigError(f"{out} holds a run of another job (or other --set): nothing done")


def finished(done: Path) -> Outcome | None:
    """What a part that ran to its end left; None, to run it again, where that is damaged."""
    try:
        return Outcome.model_validate(read_json(done, strict=False))
    except (OSError, ValueError):
        return None


def begun(out: Path) -> bool:
    """Whether anything in a run's folder took time: a job that failed at once claims nothing."""
    log = out / METRICS
    return log.exists() and log.stat().st_size > 0


def set_aside(out: Path) -> bool:
    """Move an earlier run to `OUT.previous`, where an unfinished one replaces no other.

    False if there is none.
    """
    previous = out.with_name(out.name + ".previous")
    if not begun(out):
        return False
    if previous.exists() and not (out / SUMMARY).exists():
        shutil.rmtree(out)
        return True
    if previous.exists():
        recorded(previous)  # the folder of a run, not somebody's own
        shutil.rmtree(previous)
    out.rename(previous)
    return True


def recorded(run: Path) -> dict[str, Any]:
    """A run's job.json. Raises ConfigError if it is missing or damaged."""
    try:
        record = read_json(run / "job.json")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run} is not the folder of a run (no whole job.json)") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{run / 'job.json'}: damaged")
    return record


def claim(job: Job, out: Path, sites: Sites, resume: bool) -> None:
    """Write down whose folder `out` is, readable by its owner alone: it derives from notes.

    Raises ConfigError if the notes are not those that an unfinished run began with.
    """
    notes = {site.id: job.kind.fingerprint(site) for site in sites.data}
    if resume and begun(out):
        before = recorded(out).get("notes", {})
        for site, digest in notes.items():
            if before.get(site) != digest:
                raise ConfigError(f"the notes of site {site!r} changed since {out} began")
    private_folder(out)
    make_private(out)
    record = {
        "fingerprint": job.fingerprint,
        "job": job.name,
        "folder": str(job.folder),
        "table": job.table,
        "versions": versions(),
        "notes": notes,
    }
    write_json(out / "job.json", record)


def versions() -> dict[str, str]:
    """What a result may depend on."""
    return {
        "fednotes": fednotes.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
