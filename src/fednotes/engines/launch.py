"""Start-up data of one side of a deployed job, whatever carries its messages."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fednotes.core.errors import BusyError, ConfigError, TrainingError
from fednotes.core.parsing import read_json, read_json_table
from fednotes.core.store import create_private_folder, reserving_folder, write_json
from fednotes.privacy.secure_sum.crypto import Identity

JOB_FILE = "job.json"  # the declaration, in the app's config folder
OUTCOME_FILE = "outcome.json"  # in the run's state folder
# A kit's own files beside the state folders of runs, whose names no run can have.
STATE_FILES = frozenset(
    {"contact.json", "place", "problem.json", "second.json", "sites.json"}
)
# Environment variables that name the main functions, as "module:function".
SERVER_MAIN = "FEDNOTES_SERVER_MAIN"
SITE_MAIN = "FEDNOTES_SITE_MAIN"


class MessageHandler(Protocol):
    """What a site's process runs during a job."""

    def handle(self, frame: bytes) -> bytes:
        """Return the reply to one message of the server."""

    def close(self) -> None:
        """End the job."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Start-up data of one side of a job.

    Attributes:
        kit: This participant's folder.
        site: The site's name; "" at the server.
        job: The job's declaration.
        job_id: Id of this submission; a resubmitted job has a new one.
        run: Id of the run, the same for all its submissions.
        sites: The sites, in the order in which their replies are added.
        min_sites: The fewest sites that a round needs.
        folder: Folder of this submission; the admin fetches that of the server.
        state: Folder of the run, kept from one submission to the next.
        identity: The key by which this site signs its messages to other sites.
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
    """Read the declaration in the folder of a deployed app.

    Raises:
        ConfigError: The folder does not contain the declaration of a job.
    """
    try:
        table = read_json(app / "config" / JOB_FILE)
        run = str(table["run"])
        min_sites = int(table["min_sites"])
        job = dict(table["job"])
        sites = tuple(str(name) for name in table["sites"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{JOB_FILE} of job {job_id}: not the declaration of a job"
        ) from error
    if run != Path(run).name or run in ("", ".", "..") or run.lower() in STATE_FILES:
        raise ConfigError(f"{JOB_FILE} of job {job_id}: {run!r} cannot name a run")
    folder = app.parent / "fednotes"
    create_private_folder(folder)
    return Setup(
        kit=kit,
        site=site,
        job=job,
        job_id=job_id,
        run=run,
        sites=sites,
        min_sites=min_sites,
        folder=folder,
        state=kit / "state" / run,
    )


def load_main(variable: str, default: str) -> Callable[..., Any]:
    """Return the main function that the operator of this machine chose.

    A job cannot choose it, because naming a function amounts to sending code.

    Args:
        variable: The environment variable that names the function.
        default: The function if the variable is not set, as "module:function".

    Raises:
        ConfigError: There is no such function.
    """
    where = os.environ.get(variable) or default
    module, _, name = where.partition(":")
    try:
        main: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{variable}={where}: no such function: expected MODULE:FUNCTION"
        ) from error
    return main


@contextmanager
def holding_state(state: Path) -> Iterator[None]:
    """Lock a run's state against other processes within the context.

    The process of an earlier submission may not have ended yet.

    Raises:
        TrainingError: Another process uses it.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(reserving_folder(state))
        except BusyError as error:
            raise TrainingError(
                f"{state.name}: an earlier submission is still ending"
            ) from error
        yield


def write_submission_outcome(
    setup: Setup, status: str, lines: int, problem: str = "", *, retry: bool = False
) -> None:
    """Write the status of this submission, which the server's watch reads.

    Args:
        setup: The submission.
        status: "running", "done", "paused" or "failed".
        lines: Number of lines of progress so far.
        problem: Why it failed.
        retry: Whether another submission may succeed.
    """
    outcome = {
        "job_id": setup.job_id,
        "status": status,
        "lines": lines,
        "problem": problem,
        "retry": retry,
    }
    write_json(setup.state / OUTCOME_FILE, outcome)


def read_submission_outcome(state: Path, job_id: str) -> dict[str, Any]:
    """Return the last status that a submission recorded; empty if it never started."""
    outcome = read_json_table(state / OUTCOME_FILE)
    return outcome if outcome.get("job_id") == job_id else {}
