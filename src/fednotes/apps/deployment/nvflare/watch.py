"""The server's watch resumes runs that stopped, and pauses runs for sites that return.

The watch looks every few seconds, in the server's main process:

    a submission failed or was killed, or its server   resubmit the same signed job
    was restarted
    a lost site has reconnected but does not take      tell the job to pause at its next
    part                                               checkpoint, then resubmit it
    a person aborted a submission                      the run is over, and its outcome
                                                       says so

A resubmitted run resumes from its checkpoint, without any action by a person. The job
keeps the admin's signature, which each site checks. The watch is a part of the server's
process because only this process knows which run stopped and which site can take part
again; systemd and containers only restart the process itself.

The outcome of a waiting run states what it is waiting for. If nothing blocks a run that
waits, the server itself has a fault, and the outcome and the log say so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nvflare.apis.fl_constant import ServerCommandKey
from nvflare.apis.job_def import RunStatus
from nvflare.private.fed.server.job_cmds import CLONED_META_KEYS

from fednotes.apps.deployment.absence import (
    describe_unknown_sites,
    read_known_sites,
    record_known_sites,
)
from fednotes.apps.deployment.nvflare.kit import (
    ABORTED,
    list_job_sites,
    order_submissions,
)
from fednotes.apps.deployment.nvflare.server import (
    PAUSE,
    PROGRESS,
    TELL_SECONDS,
    describe_pause,
)
from fednotes.core.parsing import as_mapping
from fednotes.core.store import write_json
from fednotes.engines.launch import OUTCOME_FILE, read_submission_outcome

LOOK_SECONDS = 5.0  # between two looks
# Maximum seconds between two submissions. The first wait is LOOK_SECONDS, and each
# further wait is twice as long as the one before.
LONGEST_WAIT = 300.0
# A site counts as connected if its last heartbeat is this recent; sites send one every
# 5 s.
RECENT_SECONDS = 15.0
PATIENCE_SECONDS = 20.0  # how long a run waits for absent sites before it resumes
ATTEMPTS = 8  # consecutive submissions that may end without a committed round
# How long a run may wait although no run is in progress and its sites are connected.
STUCK_SECONDS = 120.0
Step = Literal["wait", "done", "resubmit", "pause", "give up"]
logger = logging.getLogger("fednotes.watch")


class ServerJobs:
    """The server's jobs and sites, as seen by the watch in the server's process.

    Args:
        engine: The server's NVFlare engine.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._store = engine.job_def_manager

    def list_jobs(self) -> list[dict[str, Any]]:
        """Return all jobs of the server.

        Returns:
            NVFlare's facts about each job: `job_id`, `name`, `status`, `submit_time`,
            `deploy_map` and others.
        """
        with self._engine.new_context() as context:
            return [dict(job.meta) for job in self._store.get_all_jobs(context)]

    def list_sites(self) -> frozenset[str]:
        """Return the sites that recently sent the server a heartbeat."""
        after = time.time() - RECENT_SECONDS
        clients = self._engine.get_clients()
        return frozenset(
            client.name for client in clients if client.last_connect_time > after
        )

    def read_progress(self, job_id: str) -> Mapping[str, Any] | None:
        """Return a job's lines of progress, and the sites that take part.

        Returns:
            The job's answer, which is empty if it does not come in time; None if the
            job has no process.
        """
        return self._send_command(job_id, PROGRESS)

    def pause_job(self, job_id: str, sites: Iterable[str]) -> None:
        """Tell a job to pause at its next checkpoint.

        Args:
            job_id: The job.
            sites: The sites for which it pauses.
        """
        self._send_command(job_id, PAUSE, sites)

    def _send_command(
        self, job_id: str, topic: str, sites: Iterable[str] = ()
    ) -> Mapping[str, Any] | None:
        """Send a command to a job's process; return the answer as `read_progress` does.

        Args:
            job_id: The job.
            topic: The command, `PROGRESS` or `PAUSE`.
            sites: The sites for which the job is told to pause.
        """
        if job_id not in self._engine.run_processes:
            return None
        data = {"sites": sorted(sites)}
        reply = self._engine.send_app_command(job_id, topic, data, TELL_SECONDS)
        answer = reply.get(ServerCommandKey.DATA) if reply is not None else None
        return answer if isinstance(answer, dict) else {}

    def resubmit(self, job: Mapping[str, Any]) -> None:
        """Run a job again, with a new id and its original signature."""
        submitter_keys = ("submitter_name", "submitter_org", "submitter_role")
        copied_keys = {*CLONED_META_KEYS, *submitter_keys}
        meta = {key: value for key, value in job.items() if key in copied_keys}
        meta["cloned_from"] = job["job_id"]
        with self._engine.new_context() as context:
            self._store.clone(from_jid=job["job_id"], meta=meta, fl_ctx=context)

    def abort(self, job: Mapping[str, Any]) -> None:
        """Abort a job permanently."""
        with self._engine.new_context() as context:
            if job["status"] == "RUNNING":
                self._engine.job_runner.stop_run(job["job_id"], context)
            else:
                self._store.set_status(
                    job["job_id"], RunStatus.FINISHED_ABORTED, context
                )


def choose_step(
    status: str,
    outcome: Mapping[str, Any],
    *,
    is_alive: bool,
    returned_sites: frozenset[str],
) -> Step:
    """Return the next step for a run.

    Args:
        status: NVFlare's status of the run's newest submission.
        outcome: The last outcome that the submission recorded.
        is_alive: Whether the submission has a process.
        returned_sites: Sites that were lost and have reconnected, but do not take part
            in the submission.
    """
    if status == ABORTED or outcome.get("status") == "done":
        # NVFlare may still report RUNNING for a run that is done.
        return "done"
    if status == "RUNNING":
        if not is_alive:
            # The server was killed; NVFlare still reports RUNNING for the job.
            return "resubmit"
        return "pause" if returned_sites else "wait"
    if not status.startswith("FINISHED"):
        return "wait"
    has_failed = outcome.get("status") == "failed"
    may_retry = bool(outcome.get("retry"))
    return "give up" if has_failed and not may_retry else "resubmit"


@dataclass(slots=True)
class WatchedRun:
    """The watch's memory of one run.

    Attributes:
        step: The step that the last examination chose. A step is taken only if two
            consecutive examinations choose it.
        attempts: Number of consecutive submissions that committed no round.
        pauses: How often the run was told to pause.
        step_time: When the chosen step changed, in seconds.
        next_pause: The earliest time of the next pause, in seconds.
        next_submission: The earliest time of the next submission, in seconds.
        job_id: Id of the newest submission.
        last_line: The last line about the run in the log.
        unblocked_since: When the run began to wait although nothing blocks it, in
            seconds; None while another run or an absent site blocks it.
        last_warning: The last warning in the log about sites that have never connected.
    """

    step: Step = "wait"
    attempts: int = 0
    pauses: int = 0
    step_time: float = 0.0
    next_pause: float = 0.0
    next_submission: float = 0.0
    job_id: str = ""
    last_line: str = ""
    unblocked_since: float | None = None
    last_warning: str = ""


@dataclass(slots=True)
class Watch:
    """Watches every run of one server.

    Attributes:
        state: The folder of the runs' states.
        now: Returns a time in seconds; tests replace it.
        clock: Returns the seconds since the epoch; tests replace it.
        runs: Name of each run to the watch's memory of it.
    """

    state: Path
    now: Callable[[], float] = time.monotonic
    clock: Callable[[], float] = time.time
    runs: dict[str, WatchedRun] = field(default_factory=dict)

    def examine_runs(self, server: ServerJobs) -> dict[str, Step]:
        """Examine every run once, and take the steps that are due.

        Args:
            server: The server's jobs and sites.

        Returns:
            Name of each run to the step that was taken for it.
        """
        newest_jobs: dict[str, dict[str, Any]] = {}
        aborted_job_ids: dict[str, str] = {}
        for job in order_submissions(server.list_jobs()):
            run = str(job["name"])
            newest_jobs[run] = job
            if job["status"] == ABORTED:
                aborted_job_ids[run] = str(job["job_id"])
        connected_sites = server.list_sites()
        record_known_sites(self.state, connected_sites, self.clock())
        active_runs = [
            run
            for run, job in newest_jobs.items()
            if job["status"] in ("RUNNING", "DISPATCHED")
        ]
        steps: dict[str, Step] = {}
        for run, job in newest_jobs.items():
            if run in aborted_job_ids:
                self._end_aborted(
                    server, run, newest_job=job, aborted_job_id=aborted_job_ids[run]
                )
                steps[run] = "done"
                continue
            if not str(job["status"]).startswith("FINISHED"):
                self._report_unknown_sites(run, job, connected_sites)
            if job["status"] == "SUBMITTED":
                self._explain_wait(
                    run, job, active_runs=active_runs, connected_sites=connected_sites
                )
            steps[run] = self._advance(
                server, run, job=job, connected_sites=connected_sites
            )
        return steps

    def _end_aborted(
        self,
        server: ServerJobs,
        run: str,
        *,
        newest_job: Mapping[str, Any],
        aborted_job_id: str,
    ) -> None:
        """End a run of which a person aborted a submission.

        The run may have been submitted again after that one; its newest submission is
        aborted, too.

        Args:
            server: The server's jobs and sites.
            run: The run's name.
            newest_job: The newest submission.
            aborted_job_id: The submission that the person aborted.
        """
        has_ended = str(newest_job["status"]).startswith("FINISHED")
        if not has_ended:
            server.abort(newest_job)

        folder = self.state / run
        outcome = read_submission_outcome(folder, aborted_job_id)
        if outcome.get("status") == "aborted":
            return  # an earlier examination has recorded and logged it
        write_json(
            folder / OUTCOME_FILE,
            {"job_id": aborted_job_id, "status": "aborted", "lines": 0},
        )
        watched = self.runs.setdefault(run, WatchedRun())
        _log_once(watched, f"{run}: aborted")

    def _report_unknown_sites(
        self, run: str, job: Mapping[str, Any], connected_sites: frozenset[str]
    ) -> None:
        """Log the sites of an unfinished run that have never connected.

        Args:
            run: The run's name.
            job: Its newest submission.
            connected_sites: The sites that are connected to the server.
        """
        watched = self.runs.setdefault(run, WatchedRun())
        warning = describe_unknown_sites(
            list_job_sites(job), read_known_sites(self.state), connected_sites
        )
        if warning and warning != watched.last_warning:
            logger.warning(
                "%s: %s: start the site, or abort the run and correct the name in the "
                "job",
                run,
                warning,
            )
        watched.last_warning = warning

    def _explain_wait(
        self,
        run: str,
        job: Mapping[str, Any],
        *,
        active_runs: Sequence[str],
        connected_sites: frozenset[str],
    ) -> None:
        """Write into a pending run's outcome what the run is waiting for.

        Args:
            run: The run's name.
            job: Its newest submission.
            active_runs: The runs that are in progress.
            connected_sites: The sites that are connected to the server.
        """
        watched = self.runs.setdefault(run, WatchedRun())
        job_id = str(job["job_id"])
        outcome = read_submission_outcome(self.state / run, job_id)
        earlier_times = as_mapping(outcome.get("absent"))
        absent_since: dict[str, float] = {}
        reason = ""
        if active_runs:
            first_run, *_ = active_runs
            reason = f"behind run {first_run}"
        else:
            absent_since = {
                site: earlier_times.get(site, self.clock())
                for site in sorted(list_job_sites(job))
                if site not in connected_sites
            }
        if absent_since:
            reason = f"for {', '.join(absent_since)}"

        is_stuck = False
        if reason:
            watched.unblocked_since = None
        elif watched.unblocked_since is None:
            # The run is stuck if it still waits after STUCK_SECONDS.
            watched.unblocked_since = self.now()
        elif self.now() > watched.unblocked_since + STUCK_SECONDS:
            is_stuck = True
            reason = (
                "although nothing blocks it: the server no longer starts jobs; "
                "restart it: fednotes server stop KIT, then start"
            )
            _log_once(watched, f"{run}: waiting {reason}")
        if reason != outcome.get("problem", ""):
            new_outcome = {
                "job_id": job_id,
                "status": "waiting",
                "lines": 0,
                "problem": reason,
                "absent": absent_since,
                "is_stuck": is_stuck,
            }
            write_json(self.state / run / OUTCOME_FILE, new_outcome)

    def _advance(
        self,
        server: ServerJobs,
        run: str,
        *,
        job: Mapping[str, Any],
        connected_sites: frozenset[str],
    ) -> Step:
        """Take the next step for a run, if the last examination chose the same step.

        Args:
            server: The server's jobs and sites.
            run: The run's name.
            job: Its newest submission.
            connected_sites: The sites that are connected to the server.

        Returns:
            The step that was taken, or "wait" if the chosen step is not due yet.
        """
        watched = self.runs.setdefault(run, WatchedRun())
        job_id = str(job["job_id"])
        status = str(job["status"])
        if watched.job_id != job_id:
            watched.job_id = job_id
            watched.step = "wait"
        reply = server.read_progress(job_id) if status == "RUNNING" else None
        outcome = read_submission_outcome(self.state / run, job_id)
        sites = frozenset(list_job_sites(job))
        participants = frozenset((reply or {}).get("sites", ()))
        returned_sites: frozenset[str] = frozenset()
        if participants:
            returned_sites = (sites & connected_sites) - participants

        step = choose_step(
            status, outcome, is_alive=reply is not None, returned_sites=returned_sites
        )
        is_confirmed = step == watched.step
        if not is_confirmed:
            watched.step = step
            watched.step_time = self.now()
        if step in ("wait", "done"):
            return step
        if not is_confirmed:
            return "wait"
        if step == "pause":
            return self._pause(server, run, job_id=job_id, sites=returned_sites)
        if self.now() < watched.next_submission:
            return "wait"
        # After a server restart, the sites reconnect one by one.
        waits_for_sites = bool(sites - connected_sites) and step == "resubmit"
        if waits_for_sites and self.now() < watched.step_time + PATIENCE_SECONDS:
            return "wait"
        return self._resubmit(server, run, job=job, step=step, outcome=outcome)

    def _pause(
        self, server: ServerJobs, run: str, *, job_id: str, sites: frozenset[str]
    ) -> Step:
        """Tell a job to pause, so that sites that have returned can take part.

        Args:
            server: The server's jobs and sites.
            run: The run's name.
            job_id: Its newest submission.
            sites: The sites that have returned.

        Returns:
            "pause", or "wait" if the last pause was too recent.
        """
        watched = self.runs[run]
        if self.now() < watched.next_pause:
            return "wait"
        _log_once(watched, f"{run}: {describe_pause(sorted(sites))}")
        server.pause_job(job_id, sites)
        watched.pauses += 1
        watched.next_pause = self.now() + 6 * _compute_delay(watched.pauses)
        return "pause"

    def _resubmit(
        self,
        server: ServerJobs,
        run: str,
        *,
        job: Mapping[str, Any],
        step: Step,
        outcome: Mapping[str, Any],
    ) -> Step:
        """Resubmit a job, unless it has failed permanently or too often.

        Args:
            server: The server's jobs and sites.
            run: The run's name.
            job: Its newest submission.
            step: The step that was chosen, "resubmit" or "give up".
            outcome: The last outcome that the submission recorded.

        Returns:
            The step that was taken, "resubmit" or "give up".
        """
        watched = self.runs[run]
        has_committed_rounds = bool(outcome.get("lines"))
        watched.attempts = 0 if has_committed_rounds else watched.attempts + 1
        if step == "give up" or watched.attempts > ATTEMPTS:
            problem = (
                outcome.get("problem")
                or f"{ATTEMPTS} submissions in a row committed no round"
            )
            _log_once(watched, f"{run}: will not be resumed: {problem}")
            if not outcome.get("is_given_up"):
                given_up = {
                    "job_id": job["job_id"],
                    "status": "failed",
                    "lines": outcome.get("lines", 0),
                    "problem": problem,
                    # A restarted server tries again unless the run failed for good.
                    "retry": step == "resubmit",
                    "is_given_up": True,
                }
                write_json(self.state / run / OUTCOME_FILE, given_up)
            return "give up"
        server.resubmit(job)
        state = outcome.get("status", "not begun")
        line = f"{run}: {job['status']} ({state}): resubmitted"
        logger.info("%s", line)  # unlike `_log_once`, even if it repeats the last line
        watched.last_line = line
        watched.next_submission = self.now() + _compute_delay(watched.attempts)
        return "resubmit"


def _log_once(watched: WatchedRun, line: str) -> None:
    """Log a line about a run unless it repeats the last one."""
    if line != watched.last_line:
        logger.info("%s", line)
    watched.last_line = line


def _compute_delay(count: int) -> float:
    """Return the seconds to wait after an action was taken `count` times."""
    return float(min(LONGEST_WAIT, LOOK_SECONDS * 2**count))
