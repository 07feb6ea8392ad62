"""The server's watch: a run that stopped goes on from its checkpoint, and nobody has to come.

    looks every few seconds      a submission failed, was killed, or its server was restarted
                                 → hand the same signed job in again
                                 a site is connected that does not take part (it was lost)
                                 → ask the job to pause at its next checkpoint, then the same
                                 a person aborted a submission
                                 → the run is over, and its outcome says so

A run that has to wait says in its outcome for what; one that waits for nothing is a fault of the
server's, which is told.

The server lets the watch's certificate clone a job and no more. What else the server's machine
might hand out in its name is refused by the sites: they start a job only if the admin's own key
signed it, and a clone keeps that signature (`engines/nvflare/site.py`). The server's process keeps
one beside it (`foreground.py`): what systemd and containers start again is that process; what a run
needs after it they cannot know.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Literal, Protocol

from fednotes.core.errors import FednotesError
from fednotes.core.store import write_json
from fednotes.engines.nvflare.kit import LOG_BYTES, LOG_FILES, WATCH, read_kit
from fednotes.engines.nvflare.log import ECHO_VARIABLE, Seldom
from fednotes.engines.pipe import OUTCOME_FILE, read_outcome

LOOK_SECONDS = 5.0
LONGEST_WAIT = 300.0  # seconds between two attempts; they begin at LOOK_SECONDS and double
RECENT_SECONDS = 15.0  # a site that is up tells the server so every 5 s
PATIENCE_SECONDS = 20.0  # for sites that are not there yet, before a run goes on without them
ATTEMPTS = 8  # submissions in a row that commit nothing
STUCK_SECONDS = 120.0  # a run that waits so long while nothing runs and its sites are there
ABORTED = "FINISHED:ABORTED"
logger = logging.getLogger("fednotes.engines.nvflare.watch")
Step = Literal["wait", "done", "resubmit", "pause", "give up"]


@dataclass(frozen=True, slots=True)
class Seen:
    """What one look tells of a run.

    status: NVFlare's word for its newest submission. alive: the server has a process for it.
    outcome: what the submission itself kept last. sites: those of the job. present: those that
    take part. connected: those that could.
    """

    status: str
    alive: bool
    outcome: Mapping[str, Any]
    sites: frozenset[str]
    present: frozenset[str]
    connected: frozenset[str]

    @property
    def back(self) -> frozenset[str]:
        """Sites that could take part and do not."""
        return (self.sites & self.connected) - self.present if self.present else frozenset()


def next_step(seen: Seen) -> Step:
    """What a run needs."""
    if seen.status == ABORTED or seen.outcome.get("status") == "done":
        return "done"  # somebody's decision, or the end (NVFlare may wait for a lost site yet)
    if seen.status == "RUNNING":
        if not seen.alive:
            return "resubmit"  # its server was killed: NVFlare goes on to call it running
        return "pause" if seen.back else "wait"
    if not seen.status.startswith("FINISHED"):
        return "wait"
    failed = seen.outcome.get("status") == "failed"
    return "give up" if failed and not seen.outcome.get("retry") else "resubmit"


@dataclass(slots=True)
class Care:
    """What the watch remembers of one run."""

    step: Step = "wait"  # of the last look: one look alone decides nothing
    attempts: int = 0
    pauses: int = 0
    stopped: float = 0.0
    no_pause_before: float = 0.0
    no_submit_before: float = 0.0
    job_id: str = ""
    said: str = ""
    waits_since: float | None = None  # with nothing in the way

    def delay(self, count: int) -> float:
        return float(min(LONGEST_WAIT, LOOK_SECONDS * 2**count))


class Asked(Protocol):
    """What the watch asks of the server (`engines.nvflare.Admin`)."""

    def jobs(self) -> list[dict[str, Any]]: ...
    def sites(self, within: float = ...) -> tuple[str, ...]: ...
    def tell(self, job_id: str, topic: str = ..., since: int = ...) -> dict[str, Any] | None: ...
    def resubmit(self, job_id: str) -> str: ...
    def abort(self, job_id: str) -> None: ...


@dataclass(slots=True)
class Watch:
    """Looks after every run of one server.

    state: the folder of the runs' states. now: a clock in seconds, for tests.
    """

    state: Path
    now: Callable[[], float] = time.monotonic
    runs: dict[str, Care] = field(default_factory=dict)

    def look(self, server: Asked) -> dict[str, Step]:
        """One look at every run, and what it makes necessary. Returns run → step taken."""
        newest: dict[str, dict[str, Any]] = {}
        aborted: dict[str, str] = {}
        for job in sorted(server.jobs(), key=lambda job: float(job.get("submit_time") or 0)):
            newest[str(job["name"])] = job
            if job["status"] == ABORTED:
                aborted[str(job["name"])] = str(job["job_id"])
        connected = frozenset(server.sites(within=RECENT_SECONDS))
        going = [run for run, job in newest.items() if job["status"] in ("RUNNING", "DISPATCHED")]
        steps: dict[str, Step] = {}
        for run, job in newest.items():
            if run in aborted:
                steps[run] = self._over(server, run, job, aborted[run])
                continue
            if job["status"] == "SUBMITTED":
                self._waiting(run, job, going, connected)
            steps[run] = self._tend(server, run, job, connected)
        return steps

    def _over(self, server: Asked, run: str, job: Mapping[str, Any], job_id: str) -> Step:
        """A person's decision stands, whatever was handed in at the same moment."""
        if not str(job["status"]).startswith("FINISHED"):
            with suppress(FednotesError):
                server.abort(str(job["job_id"]))
        path = self.state / run / OUTCOME_FILE
        if read_outcome(path.parent, job_id).get("status") != "aborted":
            write_json(path, {"job_id": job_id, "status": "aborted", "lines": 0})
            self._say(self.runs.setdefault(run, Care()), f"{run}: aborted")
        return "done"

    def _waiting(
        self, run: str, job: Mapping[str, Any], going: Sequence[str], connected: frozenset[str]
    ) -> None:
        """Keep for what a run waits that has not begun."""
        care, job_id = self.runs.setdefault(run, Care()), str(job["job_id"])
        absent = ", ".join(sorted(_sites(job) - connected))
        reason = f"behind run {going[0]}" if going else f"for {absent}" if absent else ""
        if reason:
            care.waits_since = None
        elif care.waits_since is None:
            care.waits_since = self.now()
        elif self.now() > care.waits_since + STUCK_SECONDS:
            reason = (
                "though nothing is in its way: the server does not begin jobs any more; "
                "fednotes server stop KIT, then start"
            )
            self._say(care, f"{run}: waits {reason}")
        if reason != read_outcome(self.state / run, job_id).get("problem", ""):
            waits = {"job_id": job_id, "status": "waits", "lines": 0, "problem": reason}
            write_json(self.state / run / OUTCOME_FILE, waits)

    def _tend(
        self, server: Asked, run: str, job: Mapping[str, Any], connected: frozenset[str]
    ) -> Step:
        care = self.runs.setdefault(run, Care())
        job_id, status = str(job["job_id"]), str(job["status"])
        if care.job_id != job_id:
            care.step, care.job_id = "wait", job_id
        reply = server.tell(job_id) if status == "RUNNING" else None
        outcome = read_outcome(self.state / run, job_id)
        sites = _sites(job)
        present = frozenset((reply or {}).get("sites", ()))
        seen = Seen(status, reply is not None, outcome, sites, present, connected)
        step, before = next_step(seen), care.step
        care.step = step
        if step != before:
            care.stopped = self.now()
        later = care.no_pause_before if step == "pause" else care.no_submit_before
        if step in ("wait", "done") or step != before or self.now() < later:
            return "done" if step == "done" else "wait"
        if step == "pause":
            self._say(care, f"{run}: {', '.join(sorted(seen.back))} can take part again: pausing")
            server.tell(job_id, topic="fednotes.pause")
            care.pauses += 1
            care.no_pause_before = self.now() + 6 * care.delay(care.pauses)
            return "pause"
        absent = sites - connected
        if step == "resubmit" and absent and self.now() < care.stopped + PATIENCE_SECONDS:
            return "wait"  # after a restart of the server the sites come back one by one
        care.attempts = 0 if outcome.get("lines") else care.attempts + 1
        if step == "give up" or care.attempts > ATTEMPTS:
            why = outcome.get("problem") or f"{ATTEMPTS} submissions in a row committed nothing"
            self._say(care, f"{run}: stays stopped: {why}")
            return "give up"
        server.resubmit(job_id)
        self._say(care, f"{run}: {status} ({outcome.get('status', 'not begun')}): handed in again")
        care.no_submit_before = self.now() + care.delay(care.attempts)
        return "resubmit"

    def _say(self, care: Care, line: str) -> None:
        if line != care.said or "handed in" in line:
            logger.info("%s", line)
        care.said = line


def _sites(job: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(s for names in job["deploy_map"].values() for s in names) - {"server"}


def main(kit: Path) -> None:
    """Watch the server of a kit until this process is ended, or the one that began it has."""
    from fednotes.engines.nvflare.server import connect

    person, parent = read_kit(kit)["person"], os.getppid()
    handlers: list[logging.Handler] = [
        RotatingFileHandler(
            kit / "watch.log", maxBytes=LOG_BYTES, backupCount=LOG_FILES - 1, encoding="utf-8"
        )
    ]
    if os.environ.get(ECHO_VARIABLE):
        handlers.append(logging.StreamHandler())
    for handler in handlers:
        handler.addFilter(Seldom(0.0))  # for its plain lines
    shape = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.WARNING, handlers=handlers, format=shape)
    logger.setLevel(logging.INFO)
    watch = Watch(kit / "state")
    while os.getppid() == parent:
        try:
            with connect(kit / WATCH, person) as server:
                logger.info("watching")
                while os.getppid() == parent:
                    watch.look(server)
                    time.sleep(LOOK_SECONDS)
        except FednotesError as error:
            logger.info("%s", error)
        except Exception as error:  # whatever it was, the watch is still needed
            logger.warning("%s: %s", type(error).__name__, error)
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
