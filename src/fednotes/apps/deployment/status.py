"""The facts that `site status` and `server status` show, and `site forget`.

A site's process records whether the server answers, its ledger shows which run it
serves, and its log shows what went wrong. The server itself is queried, with the
certificate that it has for that.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from fednotes.apps.deployment.nvflare import processes
from fednotes.apps.deployment.nvflare.kit import WATCH, order_submissions, read_kit
from fednotes.apps.deployment.nvflare.processes import (
    OUTPUT_FILE,
    LastContact,
    Status,
    is_connected,
    read_contact,
)
from fednotes.apps.deployment.rules.ledger import ledger_of, parsed
from fednotes.apps.deployment.site import RESULTS
from fednotes.apps.deployment.site_file import SITE_FILE, read_kit_site_file
from fednotes.apps.deployment.waiting import waiting_text
from fednotes.core.errors import ConfigError, FednotesError, TrainingError
from fednotes.core.parsing import read_json, read_json_table
from fednotes.core.store import LOCK
from fednotes.encoders.features import default_cache
from fednotes.encoders.token_cache import clear_caches
from fednotes.engines.launch import hold_state, read_outcome

TAIL_BYTES = 200_000  # bytes to read at the end of a log or a ledger
RECENT = timedelta(minutes=2)
SEEN_SECONDS = 15.0  # a site that is up reports to the server every 5 s
MAX_FINISHED_RUNS = 5  # maximum number of finished runs to show
STATE = "state"  # folder in a kit: states of runs
_SECONDS_A_DAY = 86_400
_LINE = re.compile(
    r"(?P<time>\S+ \S+?)(?:,\d+)? (?P<level>INFO|WARNING|ERROR|CRITICAL) "
    r"fednotes\.\S+: (?P<text>.*)"
)

# The status shows the current state of these on a separate line. A site that does not
# share its scores is not a problem.
_SHOWN_ELSEWHERE = re.compile(
    r"fednotes site approve|the server has not answered|has not been heard of"
    r"|refused @scores"
)

# A kind of score, which score of it to show, and its label.
_SHOWN_SCORES = (
    ("strict", "f1", "strict F1"),
    ("phenotypes", "f1", "macro F1"),
    ("codes", "auroc", "AUROC of codes"),
    ("masked", "accuracy", "masked words guessed"),
)


@dataclass(frozen=True, slots=True)
class LoggedProblem:
    """The newest line of a log that reports a problem.

    Attributes:
        when: Time of the line, in local time.
        text: Its message.
    """

    when: datetime
    text: str

    @property
    def is_recent(self) -> bool:
        """Whether it was logged within the last minutes."""
        return datetime.now() - self.when < RECENT


def find_last_problem(log: Path) -> LoggedProblem | None:
    """Return the newest problem that fednotes itself wrote to the log of a kit."""
    for line in reversed(_read_tail(log)):
        match = _LINE.fullmatch(line)
        if match is None or _SHOWN_ELSEWHERE.search(line):
            continue
        if match["level"] == "INFO" and "refused " not in match["text"]:
            continue
        with suppress(ValueError):
            return LoggedProblem(datetime.fromisoformat(match["time"]), match["text"])
    return None


def read_last_words(kit: Path) -> str:
    """Return the last line that a process printed, which says why it ended."""
    lines = [line.strip() for line in _read_tail(kit / OUTPUT_FILE) if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


def _read_tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []


# ---- a site --------------------------------------------------------------------------


def describe_connection(kit: Path, process: Status) -> tuple[bool, str]:
    """Return whether the server answers a site's process, and a line about it.

    Args:
        kit: The site's kit.
        process: Its process.
    """
    facts = read_kit(kit)
    where = f"{facts.server}:{facts.port}"
    contact = read_contact(kit, process.pid)
    if not process.is_running:
        return False, f"not connected to {where}"
    if contact is not None and contact.refused:
        return False, f"not connected: {where} refuses this site: {contact.refused}"
    if contact is None or not contact.last:
        return False, f"not connected to {where}: it has not answered yet"
    if not is_connected(contact, time.time()):
        since = _format_time(contact.last)
        return False, f"not connected: {where} has not answered since {since}"
    return True, f"connected to {where} since {_format_time(contact.since)}"


def await_contact(kit: Path, pid: int | None, seconds: float) -> LastContact | None:
    """Wait until the server has answered or refused a site's new process.

    Args:
        kit: The site's kit.
        pid: The process.
        seconds: Maximum time to wait.

    Returns:
        What the process knows about the server; None if it has not answered in time.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        contact = read_contact(kit, pid)
        if contact is not None and (contact.last or contact.refused):
            return contact
        time.sleep(0.3)
    return None


def describe_served_runs(kit: Path, process: Status) -> list[str]:
    """Return a line for each run that a site serves, with its newest message."""
    runs = [read_run_name(kit, job) for job in process.jobs]
    states = dict.fromkeys(runs, "its process is running")
    newest = _newest_message(kit)
    if newest is not None:
        run = str(newest.get("run"))
        sent_at = datetime.fromisoformat(str(newest["time"])).timestamp()
        round_number = int(newest.get("round", 0)) + 1
        state = f"last message in round {round_number:,}, {_format_time(sent_at)}"
        if run in states:
            # Show this run last.
            state = f"{state}; {states.pop(run)}"
        states[run] = state
    return [f"run {run}: {state}" for run, state in states.items()]


def _newest_message(kit: Path) -> dict[str, Any] | None:
    """Return the newest readable line of a site's ledger."""
    for line in reversed(_read_tail(ledger_of(kit).path)):
        message = parsed(line.encode() + b"\n")
        if message:
            return message
    return None


def read_run_name(kit: Path, job: str) -> str:
    """Return the name of the run to which a job of NVFlare belongs."""
    declared = next((kit / job).glob("app*/config/job.json"), kit / job / "none")
    return str(read_json_table(declared).get("run", f"of job {job}"))


def _format_time(when: float) -> str:
    """Return a local time, with the date if that is not today."""
    local = datetime.fromtimestamp(when)
    if local.date() == datetime.now().date():
        return f"{local:%H:%M:%S}"
    return f"{local:%F %H:%M}"


def describe_scores(path: Path) -> str:
    """Return a site's scores in a few words."""
    try:
        scores = read_json(path, strict=False)
    except (OSError, ValueError):
        return f"{path} is not readable"
    parts = []
    for kind, name, label in _SHOWN_SCORES:
        value = scores.get(kind, {}).get(name)
        if value is not None:
            parts.append(f"{label} {value:.3f}")
    return "test " + ", ".join(parts) if parts else f"scores: {path}"


# ---- the server ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Network:
    """What a server reports about itself.

    Attributes:
        sites: The connected sites.
        lines: A line for each run.
        is_busy: Whether a run is in progress.
    """

    sites: tuple[str, ...]
    lines: tuple[str, ...]
    is_busy: bool


def ask_server(kit: Path) -> Network:
    """Ask the server of a kit for its sites and runs.

    Raises:
        FednotesError: The server does not answer.
    """
    from fednotes.apps.deployment.nvflare.server import connect

    with connect(kit / WATCH, read_kit(kit).person) as server:
        newest = {str(job["name"]): job for job in order_submissions(server.jobs())}
        sites = server.sites(within=SEEN_SECONDS)
        finished = [
            run
            for run, job in newest.items()
            if str(job["status"]).startswith("FINISHED")
        ]
        hidden = finished[:-MAX_FINISHED_RUNS]
        lines = []
        for run, job in newest.items():
            if run in hidden:
                continue
            status = str(job["status"])
            job_id = str(job["job_id"])
            if status == "RUNNING":
                state = describe_progress(server.tell(job_id) or {})
            else:
                otherwise = "starts"
                if run in finished:
                    otherwise = status.replace("FINISHED:ABORTED", "aborted")
                outcome = read_outcome(kit / STATE / run, job_id)
                state = _describe_outcome(outcome, otherwise)
            lines.append(f"run {run}: {state}")
    return Network(sites, tuple(lines), is_busy=len(finished) < len(newest))


def _describe_outcome(outcome: Mapping[str, Any], otherwise: str) -> str:
    """Return the state of a run that is not in progress, from its outcome file.

    Args:
        outcome: The outcome recorded by the run or the server's watch.
        otherwise: The state of a run without such a file.
    """
    status = str(outcome.get("status", otherwise))
    problem = outcome.get("problem")
    if not problem:
        return status
    separator = " " if status == "waits" else ": "  # "waits for h2", "failed: …"
    return f"{status}{separator}{problem}"


def describe_progress(reply: Mapping[str, Any]) -> str:
    """Describe the progress of a run.

    The text has the rounds, the participating sites, the sites whose approval is
    missing, and the newest event.

    Args:
        reply: The lines of progress and the names of the sites, as the run sends them.
    """
    planned = 0
    done = 0
    event = ""
    unapproved: Mapping[str, float] = {}
    for line in reply.get("lines", ()):
        kind = line.get("kind")
        if kind == "plan":
            planned = int(line.get("rounds") or 0)
        elif kind == "round":
            done = int(line["round"]) + 1
            event = ""
        elif kind == "event":
            event = str(line.get("text", ""))
        elif kind == "approvals":
            unapproved = line["since"]
            event = ""

    rounds = "before round 1"
    if done:
        rounds = f"round {done:,}/{planned:,}" if planned else f"round {done:,}"
    present = ", ".join(reply.get("sites", ())) or "no site yet"
    missing = waiting_text(unapproved, time.time())
    return "; ".join(filter(None, (f"{rounds}, with {present}", missing, event)))


def describe_saved_runs(kit: Path) -> list[str]:
    """Return one line per run: its status when the server last ran."""
    lines = []
    paths = sorted(
        (kit / STATE).glob("*/outcome.json"), key=lambda path: path.stat().st_mtime
    )
    for path in paths[-MAX_FINISHED_RUNS:]:
        state = _describe_outcome(read_json_table(path), "")
        if state.startswith("running"):
            state = f"{state}, resumes when the server is started"
        if state:
            lines.append(f"run {path.parent.name}: {state}")
    return lines


def describe_refused_copies(kit: Path) -> list[str]:
    """Return a line for each site whose second process was recently refused."""
    refused_at = read_json_table(kit / STATE / "second.json")
    return [
        f"site {site!r}: a second process in its name was refused at "
        f"{_format_time(when)}: check whether its kit was copied"
        for site, when in refused_at.items()
        if when > time.time() - _SECONDS_A_DAY
    ]


# ---- deleting ------------------------------------------------------------------------


def forget_run(kit: Path, run: str) -> dict[Path, int]:
    """Delete a run's journals, states, model and scores, and the site's cache.

    The cache holds features precomputed from the site's notes.

    Returns:
        Each deleted folder, with the freed bytes.

    Raises:
        ConfigError: The run is not known, or it is in progress.
        FednotesError: A file cannot be deleted; another call deletes the remainder.
    """
    known = _folders_of_runs(kit)
    if run not in known:
        names = ", ".join(sorted(known)) or "none"
        raise ConfigError(
            f"{kit}: has no files of a run {run!r}; its runs are: {names}"
        )
    in_progress = ConfigError(
        f"{kit}: run {run} is in progress, and nothing was deleted: its admin can end "
        f"it (fednotes run --abort), or stop this site (fednotes site stop {kit})"
    )
    if run in (read_run_name(kit, job) for job in processes.status(kit).jobs):
        raise in_progress
    try:
        with hold_state(kit / STATE / run):
            freed = {folder: _delete(folder) for folder in _folders_of_runs(kit)[run]}
    except TrainingError as error:
        raise in_progress from error

    cache = None
    if (kit / SITE_FILE).exists():
        cache = read_kit_site_file(kit).cache
    cache = cache or default_cache()
    return freed | {cache: clear_caches(cache)}


def _folders_of_runs(kit: Path) -> dict[str, list[Path]]:
    """Return a kit's folders for each run."""
    folders: dict[str, list[Path]] = {}
    for place in (kit / STATE, kit / RESULTS):
        for folder in sorted(place.iterdir()) if place.is_dir() else []:
            if folder.is_dir() and not folder.is_symlink():
                folders.setdefault(folder.name, []).append(folder)
    for folder in processes.job_folders(kit):
        folders.setdefault(read_run_name(kit, folder.name), []).append(folder)
    return folders


def _delete(folder: Path) -> int:
    """Delete a folder and return the size of its files, in bytes."""
    size = sum(
        path.lstat().st_size
        for path in folder.rglob("*")
        if not path.is_dir() and path.name != LOCK
    )
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise FednotesError(
            f"{error.filename or folder}: cannot be deleted ({error.strerror})"
        ) from error
    return size
