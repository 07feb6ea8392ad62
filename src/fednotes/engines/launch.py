"""What one side of a deployed job starts from, whatever carries its frames."""

from __future__ import annotations

import importlib
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fednotes.core.errors import BusyError, ConfigError, TrainingError
from fednotes.core.parsing import read_json, read_json_table
from fednotes.core.store import hold_folder, private_folder, write_json
from fednotes.privacy.secure_sum.crypto import Identity

JOB_FILE = "job.json"  # the declaration, in the app's config folder
# how the newest submission of a run stands, in the run's state
OUTCOME_FILE = "outcome.json"
# "module:function"
SERVER_MAIN, SITE_MAIN = "FEDNOTES_SERVER_MAIN", "FEDNOTES_SITE_MAIN"
MAINS = {
    SERVER_MAIN: "fednotes.apps.deployment.server:server_main",
    SITE_MAIN: "fednotes.apps.deployment.site:site_main",
}


class Host(Protocol):
    """What a site's process holds for the life of a job."""

    def handle(self, frame: bytes) -> bytes:
        """The reply to one frame of the server."""

    def close(self) -> None:
        """The job is over."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What one side of a job starts from.

    kit: this participant's folder. site: its name, "" at the server. job: the
        declaration.
    job_id: of this submission; a resubmitted job has a new one. run: the same for every
    submission of one run. sites: in the order in which their replies are added.
    folder: of this submission; at the server it is what the admin fetches.
    state: of the run, kept from one submission to the next.
    identity: by which this site signs what other sites must know to be its own.
    """

    kit: Path
    site: str
    job: Mapping[str, Any]
    job_id: str
    run: str
    sites: tuple[str, ...]
    min_sites: int
    folder: Path
    state: Path
    identity: Identity | None = field(default=None, repr=False)


def read_setup(app: Path, kit: Path, site: str, job_id: str) -> Setup:
    """What a deployed app folder declares.

    Raises ConfigError if its declaration is not one.
    """
    try:
        table = read_json(app / "config" / JOB_FILE)
        run, least, job = str(table["run"]), int(table["min_sites"]), dict(table["job"])
        sites = tuple(str(name) for name in table["sites"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{JOB_FILE} of job {job_id}: not the declaration of a job"
        ) from error
    if run != Path(run).name or run in ("", ".", ".."):
        raise ConfigError(f"{JOB_FILE} of job {job_id}: {run!r} cannot name a run")
    folder = app.parent / "fednotes"
    private_folder(folder)
    return Setup(kit, site, job, job_id, run, sites, least, folder, kit / "state" / run)


def load_main(variable: str) -> Callable[..., Any]:
    """The function that the operator of this machine chose, by an environment variable.

    Never the job: naming a function is a way to send code.
    """
    where = os.environ.get(variable) or MAINS[variable]
    module, _, name = where.partition(":")
    try:
        main: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{variable}={where}: there is no such function") from error
    return main


@contextmanager
def only_one(state: Path) -> Iterator[None]:
    """Hold a run's state: the process of an earlier submission may not have ended yet.

    Raises TrainingError if another process holds it.
    """
    with ExitStack() as mine:
        try:
            mine.enter_context(hold_folder(state))
        except BusyError as error:
            raise TrainingError(
                f"{state.name}: an earlier submission is still ending"
            ) from error
        yield


def keep_outcome(
    setup: Setup, status: str, lines: int, problem: str = "", retry: bool = False
) -> None:
    """Keep how this submission stands, for the server's watch.

    status: running, done, paused or failed. lines: of progress. retry: may another one
        help?
    """
    outcome = {"job_id": setup.job_id, "status": status, "lines": lines}
    write_json(
        setup.state / OUTCOME_FILE, {**outcome, "problem": problem, "retry": retry}
    )


def read_outcome(state: Path, job_id: str) -> dict[str, Any]:
    """What a submission kept of itself last; empty if it never began."""
    outcome = read_json_table(state / OUTCOME_FILE)
    return outcome if outcome.get("job_id") == job_id else {}


def place_of(error: BaseException) -> str:
    """An error without its message, which may quote data: its type and where it arose."""
    frames = traceback.extract_tb(error.__traceback__)
    where = (
        f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    )
    return f"{type(error).__name__}{where}"
