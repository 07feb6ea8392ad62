"""What `site status` and `server status` know of processes, connection and runs; and
`site forget`.

A site's own process writes whether the server answers, its ledger says which run it
serves, its log what went wrong. The server is asked itself, by the identity that it has
for that.
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
from fednotes.apps.deployment.nvflare.kit import WATCH, in_order, read_kit
from fednotes.apps.deployment.nvflare.processes import (
    OUTPUT_FILE,
    LastContact,
    Status,
    connected,
    contact_of,
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

TAIL = 200_000  # bytes of a log or a ledger that are looked at
RECENT = timedelta(minutes=2)
SEEN_SECONDS = 15.0  # a site that is up tells the server so every 5 s
SHOWN_RUNS = 5
STATE = "state"  # of a kit: what it keeps of runs
_LINE = re.compile(
    r"(\S+ \S+?)(?:,\d+)? (INFO|WARNING|ERROR|CRITICAL) (fednotes\.\S+): (.*)"
)

# Of these a line of their own tells how it stands now; that scores stay here is no
# problem.
_KNOWN = re.compile(
    r"fednotes site approve|the server has not answered|has not been heard of|refused @scores"
)


@dataclass(frozen=True, slots=True)
class LoggedProblem:
    """The newest line of a log that says that something went wrong. when: local time."""

    when: datetime
    text: str

    @property
    def recent(self) -> bool:
        return datetime.now() - self.when < RECENT


def last_problem(log: Path) -> LoggedProblem | None:
    """What our own part of a kit's processes complained of last."""
    for line in reversed(_tail(log)):
        found = _LINE.fullmatch(line)
        if (
            found
            and not _KNOWN.search(line)
            and (found[2] != "INFO" or "refused " in found[4])
        ):
            with suppress(ValueError):
                return LoggedProblem(datetime.fromisoformat(found[1]), found[4])
    return None


def last_words(kit: Path) -> str:
    """The last line that a process printed, which is why it ended."""
    lines = [line.strip() for line in _tail(kit / OUTPUT_FILE) if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []


# ---- a site --------------------------------------------------------------------------


def connection(kit: Path, found: Status) -> tuple[bool, str]:
    """Whether a site's process hears of the server, and a line for a person."""
    facts = read_kit(kit)
    where = f"{facts.server}:{facts.port}"
    known = contact_of(kit, found.pid)
    if not found.running:
        return False, f"not connected to {where}"
    if known is not None and known.refused:
        return False, f"not connected: {where} refuses this site: {known.refused}"
    if known is None or not known.last:
        return False, f"not connected to {where}: it has not answered yet"
    if not connected(known, time.time()):
        return (
            False,
            f"not connected: {where} has not answered since {_clock(known.last)}",
        )
    return True, f"connected to {where} since {_clock(known.since)}"


def await_contact(kit: Path, pid: int | None, seconds: float) -> LastContact | None:
    """What a site's new process knows, once the server has answered or refused it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        known = contact_of(kit, pid)
        if known is not None and (known.last or known.refused):
            return known
        time.sleep(0.3)
    return None


def serving(kit: Path, found: Status) -> list[str]:
    """The runs whose processes are here, and how far the newest message was."""
    runs = [run_of(kit, job) for job in found.jobs]
    lines = dict.fromkeys(runs, "its process is here")
    newest = (line.encode() + b"\n" for line in reversed(_tail(ledger_of(kit).path)))
    last = next(filter(None, map(parsed, newest)), None)
    if last is not None:
        when = datetime.fromisoformat(str(last["time"])).timestamp()
        told = (
            f"last message in round {int(last.get('round', 0)) + 1:,}, {_clock(when)}"
        )
        here = (
            f"; {lines.pop(str(last.get('run')))}" if last.get("run") in lines else ""
        )
        lines[str(last.get("run"))] = told + here
    return [f"run {run}: {told}" for run, told in lines.items()]


def run_of(kit: Path, job: str) -> str:
    """The run that a job of NVFlare's is a submission of, as far as its folder says."""
    declared = next((kit / job).glob("app*/config/job.json"), kit / job / "none")
    return str(read_json_table(declared).get("run", f"of job {job}"))


def _clock(when: float) -> str:
    """A time of this machine's clock, with the day where it is not today."""
    there = datetime.fromtimestamp(when)
    return (
        f"{there:%H:%M:%S}"
        if there.date() == datetime.now().date()
        else f"{there:%F %H:%M}"
    )


def headline(path: Path) -> str:
    """A site's scores in a few words."""
    try:
        scores = read_json(path, strict=False)
    except (OSError, ValueError):
        return f"{path} is not readable"
    shown = (
        *(("strict", "f1", "strict F1"), ("phenotypes", "f1", "macro F1")),
        *(
            ("codes", "auroc", "AUROC of codes"),
            ("masked", "accuracy", "masked words guessed"),
        ),
    )
    found = [(label, scores.get(kind, {}).get(name)) for kind, name, label in shown]
    parts = [f"{label} {value:.3f}" for label, value in found if value is not None]
    return "test " + ", ".join(parts) if parts else f"scores: {path}"


# ---- the server ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Network:
    """What a server tells of itself. lines: of runs. busy: whether a run is under way."""

    sites: tuple[str, ...]
    lines: tuple[str, ...]
    busy: bool


def network(kit: Path) -> Network:
    """Ask the server of a kit. Raises FednotesError if it does not answer."""
    from fednotes.apps.deployment.nvflare.server import connect

    with connect(kit / WATCH, read_kit(kit).person) as server:
        newest = {str(job["name"]): job for job in in_order(server.jobs())}
        sites = server.sites(within=SEEN_SECONDS)
        over = [
            run
            for run, job in newest.items()
            if str(job["status"]).startswith("FINISHED")
        ]
        lines = []
        for run in (run for run in newest if run not in over[:-SHOWN_RUNS]):
            status, job_id = str(newest[run]["status"]), str(newest[run]["job_id"])
            if status == "RUNNING":
                state = progress_text(server.tell(job_id) or {})
            else:
                known = (
                    status.replace("FINISHED:ABORTED", "aborted")
                    if run in over
                    else "starts"
                )
                state = _stands(read_outcome(kit / STATE / run, job_id), known)
            lines.append(f"run {run}: {state}")
    return Network(sites, tuple(lines), len(over) < len(newest))


def _stands(outcome: Mapping[str, Any], otherwise: str) -> str:
    """How a run stands that is not under way, as the server's watch or the run itself
    kept it."""
    status, problem = str(outcome.get("status", otherwise)), outcome.get("problem")
    between = " " if status == "waits" else ": "  # "waits for h2", "failed: …"
    return f"{status}{between}{problem}" if problem else status


def progress_text(reply: Mapping[str, Any]) -> str:
    """Return the rounds, who takes part, whose approval is missing, and what was said
    last of a run that is under way."""
    plan, done, said = 0, 0, ""
    unapproved: Mapping[str, float] = {}
    for line in reply.get("lines", ()):
        if line.get("kind") == "plan":
            plan = int(line.get("rounds") or 0)
        elif line.get("kind") == "round":
            done, said = int(line["round"]) + 1, ""
        elif line.get("kind") == "event":
            said = str(line.get("text", ""))
        elif line.get("kind") == "approvals":
            unapproved, said = line["since"], ""
    rounds = (
        f"round {done:,}" + (f"/{plan:,}" if plan else "") if done else "before round 1"
    )
    present = ", ".join(reply.get("sites", ())) or "no site yet"
    missing = waiting_text(unapproved, time.time())
    return "; ".join(filter(None, (f"{rounds}, with {present}", missing, said)))


def from_files(kit: Path) -> list[str]:
    """How runs stood when the server ran last."""
    lines = []
    paths = sorted(
        (kit / STATE).glob("*/outcome.json"), key=lambda path: path.stat().st_mtime
    )
    for path in paths[-SHOWN_RUNS:]:
        if told := _stands(read_json_table(path), ""):
            again = (
                ", goes on when the server is started"
                if told.startswith("running")
                else ""
            )
            lines.append(f"run {path.parent.name}: {told}{again}")
    return lines


def second_processes(kit: Path) -> list[str]:
    """Sites of which a second process was turned away today or lately."""
    return [
        f"site {site!r}: a second process in its name was refused at {_clock(when)}: is there "
        "a copy of its kit?"
        for site, when in read_json_table(kit / STATE / "second.json").items()
        if when > time.time() - 86_400
    ]


def forget(kit: Path, run: str) -> dict[Path, int]:
    """Delete a run's journals and states, its model and scores, and what was computed
    from the site's notes beforehand (its cache). Folder → bytes freed.

    Raises ConfigError for a run that is not known or is alive, FednotesError where
    something cannot be deleted: what is left is deleted when this is called again.
    """
    known = _folders(kit)
    if run not in known:
        names = ", ".join(sorted(known)) or "none"
        raise ConfigError(f"{kit}: keeps nothing of a run {run!r}; it does of: {names}")
    alive = ConfigError(
        f"{kit}: run {run} is alive, and nothing was deleted: end it (fednotes run --abort, by "
        f"its admin), or fednotes site stop {kit}"
    )
    if run in (run_of(kit, job) for job in processes.status(kit).jobs):
        raise alive
    try:
        with hold_state(kit / STATE / run):
            freed = {folder: _delete(folder) for folder in _folders(kit)[run]}
    except TrainingError as error:
        raise alive from error
    cache = (
        read_kit_site_file(kit).cache if (kit / SITE_FILE).exists() else None
    ) or default_cache()
    return freed | {cache: clear_caches(cache)}


def _folders(kit: Path) -> dict[str, list[Path]]:
    """Run → what there is of it."""
    found: dict[str, list[Path]] = {}
    for place in (kit / STATE, kit / RESULTS):
        for folder in sorted(place.iterdir()) if place.is_dir() else []:
            if folder.is_dir() and not folder.is_symlink():
                found.setdefault(folder.name, []).append(folder)
    for folder in processes.job_folders(kit):
        found.setdefault(run_of(kit, folder.name), []).append(folder)
    return found


def _delete(folder: Path) -> int:
    files = (
        path for path in folder.rglob("*") if not path.is_dir() and path.name != LOCK
    )
    size = sum(path.lstat().st_size for path in files)
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise FednotesError(
            f"{error.filename or folder}: cannot be deleted ({error.strerror})"
        ) from error
    return size
