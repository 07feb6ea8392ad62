"""A run between real sites as the admin has it: claim a folder, hand it in, end it.

OUT/run.json        which run, by which kit: `fednotes run --attach` goes on watching by it;
                    written before the job is handed in, so that no run is without one
OUT/job.json        the declared job
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from fednotes.core.errors import ConfigError, TrainingError
from fednotes.core.parsing import read_json
from fednotes.core.store import owned, private_folder, write_json
from fednotes.deployed_jobs import whole_table
from fednotes.engines.kit_files import ADMIN, read_kit
from fednotes.engines.provision import job_folder
from fednotes.jobs import Job
from fednotes.privacy.approval import fingerprint

POLL_SECONDS = 1.0
ABORT_SECONDS = 120.0  # NVFlare gives a job's processes ten to end, a busy server takes longer
ABORTED = "FINISHED:ABORTED"


class Server(Protocol):
    """What is asked of the server (`engines.nvflare.Admin`)."""

    def submit(self, folder: Path) -> str: ...
    def resubmit(self, job_id: str) -> str: ...
    def jobs(self) -> list[dict[str, Any]]: ...
    def tell(self, job_id: str, topic: str = ..., since: int = ...) -> dict[str, Any] | None: ...
    def fetch(self, job_id: str, out: Path) -> Path: ...
    def abort(self, job_id: str) -> None: ...
    def sites(self, within: float = ...) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Run:
    """A run that was handed in. kit: the admin's. sites: in the job's order."""

    name: str
    kit: Path
    title: str
    sites: tuple[str, ...]
    fingerprint: str


def admin_kit(path: Path) -> tuple[Path, str]:
    """An admin's kit, and the person it is of. Raises ConfigError for another's."""
    facts = read_kit(path)
    if facts["role"] != ADMIN:
        raise ConfigError(
            f"{path}: is the kit of {facts['name']} ({facts['role']}); a run is handed in with the "
            "kit `admin`"
        )
    return path.resolve(), str(facts["person"])


def prepare(
    job: Job, declared: Mapping[str, Any], kit: Path, out: Path, when: float
) -> tuple[Run, int]:
    """Claim OUT for a new run; it and the least number of sites.

    Raises ConfigError if OUT holds another run, or the job's numbers of sites cannot be.
    """
    if (out / "run.json").exists():
        raise ConfigError(
            f"{out} holds run {read_run(out).name} already: `fednotes run --attach --out {out}` "
            "goes on watching it; or give another --out"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not empty: give another --out")
    sites = tuple(job.sites)
    least = job.federation.min_sites or len(sites)
    if least > len(sites):
        raise ConfigError(f"[federation] min_sites = {least}: the job has {len(sites)} sites")
    if job.federation.secure_sum and len(sites) < 3:
        raise ConfigError(f"[federation] secure_sum: takes 3 sites, the job has {len(sites)}")
    stem = re.sub(r"[^A-Za-z0-9_.-]", "-", job.name).lstrip("-._")[:32] or "job"
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(when))
    key = fingerprint(whole_table(declared, sites, least))
    run = Run(f"{stem}-{stamp}", kit.resolve(), job.title, sites, key)
    return run, least


def claim(run: Run, declared: Mapping[str, Any], out: Path) -> None:
    """Make OUT this run's, before anything is handed in.

    Raises ConfigError if another run has it, or it cannot be written.
    """
    try:
        private_folder(out)
        out.chmod(0o700)
        with open(out / "run.json", "x", encoding="utf-8", opener=owned) as file:
            json.dump(facts_of(run, submitting=True), file)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError as error:
        raise ConfigError(f"{out}: another run has just taken it: give another --out") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{out}: cannot be written ({reason}); nothing was handed in") from error
    write_json(out / "job.json", {**declared, "fingerprint": run.fingerprint})


def release(out: Path) -> None:
    """Undo `claim`: nothing was handed in."""
    with suppress(OSError):
        for name in ("job.json", "run.json"):
            (out / name).unlink(missing_ok=True)
        out.rmdir()


def hand_in(server: Server, run: Run, declared: Mapping[str, Any], least: int, out: Path) -> str:
    """Submit the job of a run that has claimed OUT. Returns the submission's id.

    Raises TrainingError where nobody can say whether the server has it, RefusedError where not.
    """
    with tempfile.TemporaryDirectory() as folder:
        packed = job_folder(Path(folder), declared, run=run.name, sites=run.sites, min_sites=least)
        try:
            job_id = server.submit(packed)
        except TrainingError as error:
            raise TrainingError(
                f"{error}; whether it has run {run.name} is not known: "
                f"fednotes run --attach --out {out} tells"
            ) from error
    write_json(out / "run.json", facts_of(run))
    return job_id


def facts_of(run: Run, **more: Any) -> dict[str, Any]:
    return {
        **{"run": run.name, "kit": str(run.kit), "title": run.title},
        **{"sites": list(run.sites), "fingerprint": run.fingerprint, **more},
    }


def newest_of(jobs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Run → its newest submission."""
    return {str(job["name"]): job for job in sorted(jobs, key=_when)}


def _when(job: Mapping[str, Any]) -> float:
    return float(job.get("submit_time") or 0)


def submissions(server: Server, run: str) -> list[dict[str, Any]]:
    """Those of a run, oldest first."""
    return sorted((job for job in server.jobs() if job.get("name") == run), key=_when)


def abort(
    server: Server,
    run: Run,
    out: Path,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """End a run for good: no submission of it goes on, and the watch hands in no other.

    NVFlare's word for it is kept by the server, also over a restart. Raises ConfigError if the
    server does not know the run or has its result, TrainingError if it does not end.
    """
    end, told = now() + ABORT_SECONDS, dict[str, bool]()
    while now() < end:
        ours = submissions(server, run.name) or unknown(run, out)
        _require_unfinished(server, ours[-1], out)
        going = [job for job in ours if not str(job["status"]).startswith("FINISHED")]
        for job in going:
            if job["status"] != "DISPATCHED" and job["job_id"] not in told:
                told[job["job_id"]] = _aborted(server, job)
        ending = any(told.get(job["job_id"], True) for job in going)
        if not ending and any(job["status"] == ABORTED for job in ours):
            return
        if not ending:  # between two submissions, or its server was killed: one that ends at once
            server.abort(server.resubmit(str(ours[-1]["job_id"])))
        sleep(POLL_SECONDS)
    raise TrainingError(
        f"run {run.name} was told to end and has not yet: look again with "
        f"`fednotes run --attach --out {out}`"
    )


def _require_unfinished(server: Server, newest: Mapping[str, Any], out: Path) -> None:
    done = (out / "summary.json").exists()
    if not done and newest["status"] == "FINISHED:COMPLETED":
        with tempfile.TemporaryDirectory() as folder, suppress(TrainingError):
            made = server.fetch(str(newest["job_id"]), Path(folder))
            done = (made / "fednotes" / "summary.json").exists()
    if done:
        raise ConfigError(
            f"run {newest['name']} is done, there is nothing to abort: "
            f"fednotes run --attach --out {out} fetches what it made"
        )


def _aborted(server: Server, job: Mapping[str, Any]) -> bool:
    """Tell a submission to end; False where the server has no process of it any more."""
    try:
        server.abort(str(job["job_id"]))
    except TrainingError as error:
        if "not running" in str(error):
            return False
        raise
    return True


def unknown(run: Run, out: Path) -> NoReturn:
    """Raises ConfigError: why the server does not know a run."""
    if read_table(out / "run.json").get("submitting"):
        raise ConfigError(
            f"run {run.name} was stopped before it reached the server: delete {out} and give the "
            "job again"
        )
    raise ConfigError(
        f"the server of {run.kit} does not know run {run.name}: it was deleted, or this is "
        "another server"
    )


def read_run(out: Path) -> Run:
    """The run that a folder is of. Raises ConfigError if it is of none."""
    try:
        kept = read_json(out / "run.json")
        return Run(
            str(kept["run"]),
            Path(kept["kit"]),
            str(kept["title"]),
            tuple(kept["sites"]),
            str(kept["fingerprint"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{out}: no run was handed in from here (no whole run.json)") from error


def read_table(path: Path) -> dict[str, Any]:
    """A file's table; empty if it has none."""
    with suppress(OSError, ValueError):
        found = read_json(path, strict=False)
        if isinstance(found, dict):
            return found
    return {}
