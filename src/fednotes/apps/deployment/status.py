"""The facts that `site status` and `server status` show, and `site forget`.

A site's process records whether the server answers (`presence.py`) and what went wrong
(`problems.py`), and its ledger shows which run the site serves. The server itself is
queried with a certificate that its kit has for this purpose.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from fednotes.apps.deployment.absence import describe_unknown_sites, read_known_sites
from fednotes.apps.deployment.nvflare import processes
from fednotes.apps.deployment.nvflare.kit import (
    ABORTED,
    WATCH,
    list_job_sites,
    order_submissions,
    read_kit,
    read_submission,
)
from fednotes.apps.deployment.nvflare.processes import (
    OUTPUT_FILE,
    LastContact,
    Status,
    is_connected,
    read_contact,
)
from fednotes.apps.deployment.rules.ledger import Ledger, parse_line
from fednotes.apps.deployment.site import RESULTS
from fednotes.apps.deployment.site_file import SITE_FILE, read_kit_site_file
from fednotes.apps.deployment.waiting import describe_waiting, list_with_times
from fednotes.core.errors import ConfigError, FednotesError, TrainingError
from fednotes.core.parsing import as_mapping, read_json, read_json_table
from fednotes.core.store import LOCK
from fednotes.encoders.features import find_default_cache
from fednotes.encoders.token_cache import clear_caches
from fednotes.engines.launch import holding_state, read_submission_outcome

TAIL_BYTES = 200_000  # bytes to read at the end of a log or a ledger
# A site counts as connected if it has reported to the server within this time; it
# reports every 5 s.
SEEN_SECONDS = 15.0
MAX_FINISHED_RUNS = 5  # maximum number of finished runs to show
STATE = "state"  # folder in a kit: states of runs
_SECONDS_PER_DAY = 86_400

# A kind of score, which score of it to show, and its label.
_SHOWN_SCORES = (
    ("strict", "f1", "strict F1"),
    ("phenotypes", "f1", "macro F1"),
    ("codes", "auroc", "AUROC of codes"),
    ("masked", "accuracy", "masked words guessed"),
)


def read_last_words(kit: Path) -> str:
    """Return the last line that a process printed, which says why it ended."""
    lines = [line.strip() for line in _read_tail(kit / OUTPUT_FILE) if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


def _read_tail(path: Path) -> list[str]:
    """Return the last lines of a file; the first of them may be incomplete."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []


# ---- a site --------------------------------------------------------------------------


class SiteConnection(NamedTuple):
    """The connection of a site's process to the server.

    Attributes:
        is_up: Whether the server answers.
        text: A line about the connection.
    """

    is_up: bool
    text: str


def describe_connection(kit: Path, process: Status) -> SiteConnection:
    """Return whether the server answers a site's process, and a line about it.

    Args:
        kit: The site's kit.
        process: The site's process.
    """
    facts = read_kit(kit)
    where = f"{facts.server}:{facts.port}"
    contact = read_contact(kit, process.pid)
    problem = ""
    if not process.is_running:
        problem = f"not connected to {where}"
    elif contact is not None and contact.refused:
        problem = f"not connected: {where} refuses this site: {contact.refused}"
    elif contact is None or not contact.last:
        problem = f"not connected to {where}: it has not answered yet"
    elif not is_connected(contact, time.time()):
        since = _format_time(contact.last)
        problem = f"not connected: {where} has not answered since {since}"
    else:
        since = _format_time(contact.since)
        return SiteConnection(is_up=True, text=f"connected to {where} since {since}")
    return SiteConnection(is_up=False, text=problem)


def await_contact(kit: Path, pid: int | None, seconds: float) -> LastContact | None:
    """Wait until the server has answered or refused a site's new process.

    Args:
        kit: The site's kit.
        pid: The number of the process.
        seconds: Maximum time to wait.

    Returns:
        The process's record of the server's answers; None if the server has neither
        answered nor refused in time.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        contact = read_contact(kit, pid)
        if contact is not None and (contact.last or contact.refused):
            return contact
        time.sleep(0.3)
    return None


def describe_served_runs(kit: Path, process: Status) -> list[str]:
    """Return a line for each run that a site serves.

    The last line is about the run of the site's newest message, which may have ended.
    """
    runs = [read_run_name(kit, job) for job in process.jobs]
    states = dict.fromkeys(runs, "its process is running")
    message = _read_newest_message(kit)
    if message is not None:
        run = str(message.get("run"))
        sent_at = datetime.fromisoformat(str(message["time"])).timestamp()
        round_number = int(message.get("round", 0)) + 1
        state = f"last message in round {round_number:,}, {_format_time(sent_at)}"
        if run in states:
            # Removing the run first moves it to the end.
            state = f"{state}; {states.pop(run)}"
        states[run] = state
    return [f"run {run}: {state}" for run, state in states.items()]


def _read_newest_message(kit: Path) -> dict[str, Any] | None:
    """Return the newest readable line of a site's ledger; None if there is none."""
    for line in reversed(_read_tail(Ledger.in_kit(kit).path)):
        message = parse_line(line.encode() + b"\n")
        if message:
            return message
    return None


def read_run_name(kit: Path, job: str) -> str:
    """Return the name of the run to which a job of NVFlare belongs."""
    return str(read_submission(kit, job).get("run", f"of job {job}"))


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
            parts.append(f"{label} {value:.1%}")
    return "test " + ", ".join(parts) if parts else f"scores: {path}"


# ---- the server ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Action:
    """An action for which a run waits.

    Attributes:
        who: Who must act: "admin", "server" for the person at the server, or a site.
        text: What to do, with the command.
    """

    who: str
    text: str


@dataclass(frozen=True, slots=True)
class Network:
    """What a server reports about itself.

    Attributes:
        sites: The connected sites.
        lines: A line for each run.
        is_busy: Whether a run is in progress.
        actions: The actions for which runs wait.
    """

    sites: tuple[str, ...]
    lines: tuple[str, ...]
    is_busy: bool
    actions: tuple[Action, ...] = ()


def ask_server(kit: Path) -> Network:
    """Ask the server of a kit for its sites and runs.

    Raises:
        FednotesError: The server does not answer.
    """
    processes.silence_grpc()
    from fednotes.apps.deployment.nvflare.server import connecting_to_server

    with connecting_to_server(kit / WATCH, read_kit(kit).person) as server:
        sites = server.list_sites(within=SEEN_SECONDS)
        # Each run is shown by its newest submission.
        submissions = {
            str(submission["name"]): submission
            for submission in order_submissions(server.list_jobs())
        }
        outcomes = {
            run: read_submission_outcome(kit / STATE / run, str(submission["job_id"]))
            for run, submission in submissions.items()
        }
        finished_runs = [
            run
            for run, submission in submissions.items()
            if _is_over(submission, outcomes[run])
        ]
        hidden_runs = finished_runs[:-MAX_FINISHED_RUNS]
        lines = []
        actions: list[Action] = []
        for run, submission in submissions.items():
            if run in hidden_runs:
                continue
            progress = _Progress()
            if submission["status"] == "RUNNING":
                reply = server.read_progress(str(submission["job_id"])) or {}
                state = describe_progress(reply)
                progress = _collect_progress(reply)
            elif run in finished_runs:
                state = _describe_end(submission, outcomes[run])
            else:
                state = _describe_waiting_run(submission, outcomes[run])
            lines.append(f"run {run}: {state}")
            if run not in finished_runs:
                actions += _list_actions(
                    kit, submission, outcomes[run], progress=progress, connected=sites
                )
    is_busy = len(finished_runs) < len(submissions)
    unique_actions = tuple(dict.fromkeys(actions))
    return Network(sites, tuple(lines), is_busy=is_busy, actions=unique_actions)


def _is_over(submission: Mapping[str, Any], outcome: Mapping[str, Any]) -> bool:
    """Return whether a run is over, so that the watch does not resubmit it.

    Args:
        submission: What NVFlare says about the run's newest submission.
        outcome: The submission's outcome file.
    """
    from fednotes.apps.deployment.nvflare.watch import choose_step

    status = str(submission["status"])
    if not status.startswith("FINISHED"):
        return False
    step = choose_step(status, outcome, is_alive=False, returned_sites=frozenset())
    return step != "resubmit" or bool(outcome.get("is_given_up"))


def _describe_end(submission: Mapping[str, Any], outcome: Mapping[str, Any]) -> str:
    """Return how a run ended.

    Args:
        submission: What NVFlare says about the run's newest submission.
        outcome: The submission's outcome file.
    """
    status = str(submission["status"])
    if status == ABORTED:  # the watch writes it into the outcome seconds later
        return "aborted"
    return _describe_outcome(outcome, status)


def _list_actions(
    kit: Path,
    submission: Mapping[str, Any],
    outcome: Mapping[str, Any],
    *,
    progress: _Progress,
    connected: Collection[str],
) -> list[Action]:
    """Return the actions for which an unfinished run waits.

    Args:
        kit: The server's kit.
        submission: What NVFlare says about the run's newest submission.
        outcome: The submission's outcome file.
        progress: The progress of the run.
        connected: The connected sites.
    """
    if outcome.get("is_stuck"):
        text = f"fednotes server stop {kit}; fednotes server start {kit}"
        return [Action("server", text)]
    known_sites = read_known_sites(kit / STATE)
    sites = list_job_sites(submission)
    unknown_sites = describe_unknown_sites(sites, known_sites, connected)
    actions = []
    if unknown_sites:
        actions.append(
            Action(
                "admin",
                f"{unknown_sites}: if the job misspells a name, run fednotes run "
                f"--abort {submission['name']} --on KIT, and submit the corrected "
                "job; otherwise have the site started",
            )
        )
    for site in sites:
        if site not in connected:
            if site in known_sites:
                actions.append(Action(site, "fednotes site start KIT"))
        elif site in progress.waiting_since:
            actions.append(Action(site, "fednotes site approve KIT"))
        elif site in progress.problems:
            actions.append(
                Action(
                    site,
                    f"look at what it reports ({progress.problems[site]}); its log "
                    "has the details: fednotes site status KIT",
                )
            )
    return actions


def describe_actions(actions: Iterable[Action]) -> list[str]:
    """Return a line for each action; sites with the same action share one."""
    participants: dict[str, list[str]] = {}
    for action in actions:
        participants.setdefault(action.text, []).append(action.who)
    lines = []
    for text, names in participants.items():
        where = f"at {', '.join(names)}: "
        if names == ["admin"]:
            where = "the admin: "
        elif names == ["server"]:
            where = ""
        lines.append(f"{where}{text}")
    return lines


def _describe_waiting_run(
    submission: Mapping[str, Any], outcome: Mapping[str, Any]
) -> str:
    """Return the state of a run that is not in progress and not over.

    Args:
        submission: What NVFlare says about the run's newest submission.
        outcome: The submission's outcome file.
    """
    if not str(submission["status"]).startswith("FINISHED"):
        return _describe_outcome(outcome, "starting")
    problem = outcome.get("problem")
    reason = f" ({problem})" if problem else ""
    return f"paused{reason}; the server resumes it automatically"


def _describe_outcome(outcome: Mapping[str, Any], default_state: str) -> str:
    """Return the state of a run that is not in progress, from its outcome file.

    Args:
        outcome: The outcome recorded by the run or the server's watch.
        default_state: The state of a run without an outcome file.
    """
    status = str(outcome.get("status", default_state))
    problem = outcome.get("problem")
    absent_since = as_mapping(outcome.get("absent"))
    if absent_since:
        return f"{status} for {list_with_times(absent_since, time.time())}"
    if not problem:
        return status
    separator = " " if status == "waiting" else ": "  # "waiting for h2", "failed: …"
    return f"{status}{separator}{problem}"


@dataclass(slots=True)
class _Progress:
    """How far a run is, by its lines of progress.

    Attributes:
        num_rounds: Number of planned rounds; 0 if unknown.
        num_done: Number of rounds that have ended.
        event: The newest event since the last round; "" for none.
        waiting_since: Each site whose approval is missing, and since when.
        problems: Each site that reported a problem since the last round, and its words.
    """

    num_rounds: int = 0
    num_done: int = 0
    event: str = ""
    waiting_since: Mapping[str, float] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line of progress, as the run sends it."""
        kind = line.get("kind")
        if kind == "plan":
            self.num_rounds = int(line.get("rounds") or 0)
        elif kind == "round":
            self.num_done = int(line["round"]) + 1
            self.event = ""
            self.problems.clear()
        elif kind == "event":
            self.event = str(line.get("text", ""))
            site = str(line.get("site", ""))
            self.problems.pop(site, None)
            if line.get("is_problem"):
                self.problems[site] = self.event
        elif kind == "approvals":
            self.waiting_since = line["since"]
            self.event = ""

    def describe_rounds(self) -> str:
        """Return the number of the newest round in words."""
        if not self.num_done:
            return "before round 1"
        if not self.num_rounds:
            return f"round {self.num_done:,}"
        return f"round {self.num_done:,}/{self.num_rounds:,}"


def _collect_progress(reply: Mapping[str, Any]) -> _Progress:
    """Return how far a run is, from the lines in its answer."""
    progress = _Progress()
    for line in reply.get("lines", ()):
        progress.add(line)
    return progress


def describe_progress(reply: Mapping[str, Any]) -> str:
    """Describe the progress of a run.

    The text has the rounds, the participating sites, the sites whose approval is
    missing, and the newest event.

    Args:
        reply: The lines of progress and the names of the sites, as the run sends them.
    """
    progress = _collect_progress(reply)
    sites = ", ".join(reply.get("sites", ())) or "no site yet"
    parts = (
        f"{progress.describe_rounds()}, with {sites}",
        describe_waiting(progress.waiting_since, time.time()),
        progress.event,
    )
    return "; ".join(part for part in parts if part)


def describe_saved_runs(kit: Path) -> list[str]:
    """Return a line for each run with its status when the server last ran."""
    lines = []
    paths = sorted(
        (kit / STATE).glob("*/outcome.json"), key=lambda path: path.stat().st_mtime
    )
    for path in paths[-MAX_FINISHED_RUNS:]:
        state = _describe_outcome(read_json_table(path), default_state="")
        if state.startswith("running"):
            state = f"{state}, resumes when the server is started"
        if state:
            lines.append(f"run {path.parent.name}: {state}")
    return lines


def list_resumable_runs(kit: Path) -> list[str]:
    """Return the runs that a server continues when it is started, by their names."""
    runs = []
    for path in sorted((kit / STATE).glob("*/outcome.json")):
        outcome = read_json_table(path)
        has_failed = outcome.get("status") == "failed" and not outcome.get("retry")
        if outcome.get("status") not in ("done", "aborted") and not has_failed:
            runs.append(path.parent.name)
    return runs


def describe_refused_copies(kit: Path) -> list[str]:
    """Return a line for each site whose second process was recently refused."""
    refused_at = read_json_table(kit / STATE / "second.json")
    return [
        f"site {site!r}: a second process in its name was refused at "
        f"{_format_time(when)}: check whether its kit was copied"
        for site, when in refused_at.items()
        if when > time.time() - _SECONDS_PER_DAY
    ]


# ---- deleting ------------------------------------------------------------------------


def forget_run(kit: Path, run: str) -> dict[Path, int]:
    """Delete a run's journals, states, model and scores, and the site's cache.

    The cache holds features that were computed from the site's notes.

    Returns:
        The number of bytes freed in each deleted folder.

    Raises:
        ConfigError: The kit has no files of the run, or the run is in progress.
        FednotesError: A file cannot be deleted; another call deletes the remainder.
    """
    runs = _find_folders_by_run(kit)
    if run not in runs:
        names = ", ".join(sorted(runs)) or "none"
        raise ConfigError(
            f"{kit}: has no files of a run {run!r}; its runs are: {names}"
        )
    in_progress_error = ConfigError(
        f"{kit}: run {run} is in progress, and nothing was deleted: its admin can end "
        f"it (fednotes run --abort), or stop this site (fednotes site stop {kit})"
    )
    served_runs = [read_run_name(kit, job) for job in processes.read_status(kit).jobs]
    if run in served_runs:
        raise in_progress_error
    try:
        with holding_state(kit / STATE / run):
            # Looked up again, because the run may just have ended.
            folders = _find_folders_by_run(kit)[run]
            freed_bytes = {folder: _delete(folder) for folder in folders}
    except TrainingError as error:
        raise in_progress_error from error

    cache = find_default_cache()
    if (kit / SITE_FILE).exists():
        cache = read_kit_site_file(kit).cache or cache
    return freed_bytes | {cache: clear_caches(cache)}


def _find_folders_by_run(kit: Path) -> dict[str, list[Path]]:
    """Return the folders in a kit that belong to each run."""
    folders: dict[str, list[Path]] = {}
    for parent in (kit / STATE, kit / RESULTS):
        if not parent.is_dir():
            continue
        for folder in sorted(parent.iterdir()):
            if folder.is_dir() and not folder.is_symlink():
                folders.setdefault(folder.name, []).append(folder)
    for folder in processes.list_job_folders(kit):
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
