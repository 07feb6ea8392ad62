"""The server's watch: a run that stopped goes on from its checkpoint, and nobody has to come.

    looks every few seconds      a submission failed, was killed, or its server was restarted
                                 → hand the same signed job in again
                                 a site is connected that does not take part (it was lost)
                                 → ask the job to pause at its next checkpoint, then the same
                                 a person aborted a submission
                                 → the run is over, and its outcome says so

A run that has to wait says in its outcome for what; one that waits for nothing is a fault of the
server's, which is told. What systemd and containers start again is the server's process; which run
was stopped, and which site can take part again, only that process knows: the watch is in it
(`presence.py`). A job that is handed in again keeps the admin's signature, which each site checks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fednotes.core.errors import MissingExtra
from fednotes.core.store import write_json
from fednotes.engines.nvflare.contact import LOOK_SECONDS
from fednotes.engines.nvflare.server import PAUSE, PROGRESS, TELL_SECONDS
from fednotes.engines.pipe import OUTCOME_FILE, read_outcome

try:
    from nvflare.apis.fl_constant import ServerCommandKey
    from nvflare.apis.job_def import RunStatus
    from nvflare.private.fed.server.job_cmds import CLONED_META_KEYS
except ImportError as error:
    raise MissingExtra("nvflare", "deploy") from error

LONGEST_WAIT = 300.0  # seconds between two attempts; they begin at LOOK_SECONDS and double
RECENT_SECONDS = 15.0  # a site that is up tells the server so every 5 s
PATIENCE_SECONDS = 20.0  # for sites that are not there yet, before a run goes on without them
ATTEMPTS = 8  # submissions in a row that commit nothing
STUCK_SECONDS = 120.0  # a run that waits so long while nothing runs and its sites are there
ABORTED = "FINISHED:ABORTED"
logger = logging.getLogger("fednotes.engines.nvflare.watch")
Step = Literal["wait", "done", "resubmit", "pause", "give up"]


class Jobs:
    """What the watch asks of the server, in whose process it is. engine: NVFlare's."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._store = engine, engine.job_def_manager

    def jobs(self) -> list[dict[str, Any]]:
        """Every job that the server knows, with job_id, name, status, submit_time, deploy_map."""
        with self._engine.new_context() as context:
            return [dict(job.meta) for job in self._store.get_all_jobs(context)]

    def sites(self) -> frozenset[str]:
        """Those that the server heard of lately."""
        after = time.time() - RECENT_SECONDS
        clients = self._engine.get_clients()
        return frozenset(client.name for client in clients if client.last_connect_time > after)

    def tell(self, job_id: str, topic: str = PROGRESS) -> Mapping[str, Any] | None:
        """Ask a job for its sites, or to pause; None without a process of it, {} while it is
        slow to answer."""
        if job_id not in self._engine.run_processes:
            return None
        reply = self._engine.send_app_command(job_id, topic, {}, TELL_SECONDS)
        told = reply.get(ServerCommandKey.DATA) if reply is not None else None
        return told if isinstance(told, dict) else {}

    def resubmit(self, job: Mapping[str, Any]) -> None:
        """Run a job once more, under a new id and the first signature."""
        kept = {*CLONED_META_KEYS, "submitter_name", "submitter_org", "submitter_role"}
        meta = {key: job[key] for key in job.keys() & kept} | {"cloned_from": job["job_id"]}
        with self._engine.new_context() as context:
            self._store.clone(from_jid=job["job_id"], meta=meta, fl_ctx=context)

    def abort(self, job: Mapping[str, Any]) -> None:
        """End a job for good."""
        with self._engine.new_context() as context:
            if job["status"] == "RUNNING":
                self._engine.job_runner.stop_run(job["job_id"], context)
            else:
                self._store.set_status(job["job_id"], RunStatus.FINISHED_ABORTED, context)


def next_step(status: str, alive: bool, outcome: Mapping[str, Any], back: frozenset[str]) -> Step:
    """What a run needs.

    status: NVFlare's word for its newest submission. alive: the server has a process for it.
    outcome: what the submission itself kept last. back: sites that could take part and do not.
    """
    if status == ABORTED or outcome.get("status") == "done":
        return "done"  # somebody's decision, or the end (NVFlare may wait for a lost site yet)
    if status == "RUNNING":
        if not alive:
            return "resubmit"  # its server was killed: NVFlare goes on to call it running
        return "pause" if back else "wait"
    if not status.startswith("FINISHED"):
        return "wait"
    failed = outcome.get("status") == "failed"
    return "give up" if failed and not outcome.get("retry") else "resubmit"


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


@dataclass(slots=True)
class Watch:
    """Looks after every run of one server.

    state: the folder of the runs' states. now: a clock in seconds, for tests.
    """

    state: Path
    now: Callable[[], float] = time.monotonic
    runs: dict[str, Care] = field(default_factory=dict)

    def look(self, server: Jobs) -> dict[str, Step]:
        """One look at every run, and what it makes necessary. Returns run → step taken."""
        newest, aborted = dict[str, dict[str, Any]](), dict[str, str]()
        for job in sorted(server.jobs(), key=lambda job: float(job.get("submit_time") or 0)):
            newest[str(job["name"])] = job
            if job["status"] == ABORTED:
                aborted[str(job["name"])] = str(job["job_id"])
        connected = server.sites()
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

    def _over(self, server: Jobs, run: str, job: Mapping[str, Any], job_id: str) -> Step:
        """A person's decision stands, whatever was handed in at the same moment."""
        if not str(job["status"]).startswith("FINISHED"):
            server.abort(job)
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
        self, server: Jobs, run: str, job: Mapping[str, Any], connected: frozenset[str]
    ) -> Step:
        care = self.runs.setdefault(run, Care())
        job_id, status = str(job["job_id"]), str(job["status"])
        if care.job_id != job_id:
            care.step, care.job_id = "wait", job_id
        reply = server.tell(job_id) if status == "RUNNING" else None
        outcome, sites = read_outcome(self.state / run, job_id), _sites(job)
        present = frozenset((reply or {}).get("sites", ()))
        back = (sites & connected) - present if present else frozenset[str]()
        step, before = next_step(status, reply is not None, outcome, back), care.step
        care.step = step
        if step != before:
            care.stopped = self.now()
        later = care.no_pause_before if step == "pause" else care.no_submit_before
        if step in ("wait", "done") or step != before or self.now() < later:
            return "done" if step == "done" else "wait"
        if step == "pause":
            self._say(care, f"{run}: {', '.join(sorted(back))} can take part again: pausing")
            server.tell(job_id, PAUSE)
            care.pauses += 1
            care.no_pause_before = self.now() + 6 * _delay(care.pauses)
            return "pause"
        absent = sites - connected
        if step == "resubmit" and absent and self.now() < care.stopped + PATIENCE_SECONDS:
            return "wait"  # after a restart of the server the sites come back one by one
        care.attempts = 0 if outcome.get("lines") else care.attempts + 1
        if step == "give up" or care.attempts > ATTEMPTS:
            why = outcome.get("problem") or f"{ATTEMPTS} submissions in a row committed nothing"
            self._say(care, f"{run}: stays stopped: {why}")
            return "give up"
        server.resubmit(job)
        self._say(care, f"{run}: {status} ({outcome.get('status', 'not begun')}): handed in again")
        care.no_submit_before = self.now() + _delay(care.attempts)
        return "resubmit"

    def _say(self, care: Care, line: str) -> None:
        if line != care.said or "handed in" in line:
            logger.info("%s", line)
        care.said = line


def _sites(job: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(s for names in job["deploy_map"].values() for s in names) - {"server"}


def _delay(count: int) -> float:
    return float(min(LONGEST_WAIT, LOOK_SECONDS * 2**count))
