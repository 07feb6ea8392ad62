"""Runs between real sites from the admin's side: submit, watch and abort them.

    OUT/run.json        the run that this folder belongs to, and the admin's kit; it is
                        written before submission, so that every submitted run has one
    OUT/job.json        the job's declaration
    OUT/metrics.jsonl, OUT/summary.json, OUT/model/     fetched when the run is done

The run continues without the admin's process, which may exit and reattach. The server's
watch resubmits a job that failed or was paused; this module follows the newest
submission.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from fednotes.apps.deployment.nvflare.kit import (
    ADMIN,
    find_loose_keys,
    order_submissions,
    read_kit,
    write_job_folder,
)
from fednotes.apps.deployment.server import PROBLEM
from fednotes.core.errors import (
    ConfigError,
    FednotesError,
    ParameterError,
    TrainingError,
    os_errors_as,
)
from fednotes.core.parsing import read_json, read_json_table
from fednotes.core.store import make_private, open_private, private_folder, write_json
from fednotes.core.tables import table_fingerprint
from fednotes.engines.rounds import RoundResult
from fednotes.jobs.declaration import MIN_SECURE_SITES, table_to_approve
from fednotes.jobs.job import Job
from fednotes.jobs.metrics_file import METRICS
from fednotes.jobs.parts import Part
from fednotes.jobs.progress import ProgressListener
from fednotes.jobs.results import SUMMARY, RunResult, read_result

if TYPE_CHECKING:
    from fednotes.apps.deployment.nvflare.server import Admin

POLL_SECONDS = 1.0  # between two queries of the server
# Time limit for aborting a run. NVFlare gives the processes of a job ten seconds to
# end, but a busy server takes longer.
ABORT_SECONDS = 120.0
# Time after which a stopped run counts as not resubmitted; the watch waits up to 300 s.
PATIENCE_SECONDS = 900.0
ABORTED = "FINISHED:ABORTED"
QUEUED = ("SUBMITTED", "APPROVED", "DISPATCHED")
_RESULTS = (SUMMARY, METRICS, "model")  # what a run leaves at the server
# Keys of a round's line that are not metrics.
_NOT_METRICS = frozenset(
    {
        "kind",
        "part",
        "condition",
        "round",
        "evaluated",
        "took_part",
        "absent",
        "bytes_up",
        "bytes_down",
        "seconds",
    }
)


@dataclass(frozen=True)
class Run:
    """A run that was submitted, or is about to be.

    Attributes:
        name: The run's name, which all its submissions share.
        kit: The admin's kit.
        title: The job's title.
        sites: The names of its sites, in the job's order.
        fingerprint: The fingerprint of the job that sites approve.
    """

    name: str
    kit: Path
    title: str
    sites: tuple[str, ...]
    fingerprint: str


class AdminKit(NamedTuple):
    """An admin's kit.

    Attributes:
        path: Its absolute path.
        person: The person to whom it belongs.
    """

    path: Path
    person: str


class PreparedRun(NamedTuple):
    """A run that can be submitted.

    Attributes:
        run: The run.
        min_sites: Minimum number of sites that it needs.
    """

    run: Run
    min_sites: int


def open_admin_kit(path: Path) -> AdminKit:
    """Return an admin's kit after checking that it is safe to use.

    Raises:
        ConfigError: The kit is another participant's, or other users can read its key.
    """
    facts = read_kit(path)
    if facts.role != ADMIN:
        raise ConfigError(
            f"{path} is the kit of {facts.name} ({facts.role}): use the kit "
            "`admin` to submit a run"
        )
    for key in find_loose_keys(path):
        raise ConfigError(
            f"{key}: other users can read this file; run: chmod -R go-rwx {path}; if "
            "other people use this machine, ask for another kit"
        )
    return AdminKit(path.resolve(), facts.person)


def prepare_run(
    job: Job, declared: Mapping[str, Any], kit: Path, *, out: Path, when: float
) -> PreparedRun:
    """Name a new run and check that it can be submitted.

    Args:
        job: The job.
        declared: The job's declaration.
        kit: The admin's kit.
        out: The folder for the run's files; it must be empty or not exist.
        when: The current time, in seconds since the epoch.

    Raises:
        ConfigError: `out` is not empty, or the job has too few sites.
    """
    if (out / "run.json").exists():
        raise ParameterError(
            f"{out} already holds run {read_run(out).name}: watch it with "
            f"`fednotes run --attach --out {out}`, or choose another `out`"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ParameterError(f"{out} is not empty: choose another `out`")

    sites = tuple(job.sites)
    min_sites = job.federation.min_sites or len(sites)
    if min_sites > len(sites):
        raise ConfigError(
            f"[federation] min_sites = {min_sites}, but the job has only {len(sites)} "
            "sites: lower min_sites, or leave it out"
        )
    if job.federation.secure_sum and len(sites) < MIN_SECURE_SITES:
        raise ConfigError(
            f"[federation] secure_sum needs {MIN_SECURE_SITES} or more sites, but the "
            f"job has only {len(sites)}: add sites, or leave secure_sum out"
        )

    plain_name = re.sub(r"[^A-Za-z0-9_.-]", "-", job.name).lstrip("-._")[:32] or "job"
    timestamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(when))
    table = table_to_approve(declared, sites, min_sites)
    run = Run(
        name=f"{plain_name}-{timestamp}",
        kit=kit.resolve(),
        title=job.title,
        sites=sites,
        fingerprint=table_fingerprint(table),
    )
    return PreparedRun(run, min_sites)


def claim_folder(run: Run, declared: Mapping[str, Any], out: Path) -> None:
    """Reserve a folder for a run, before its job is submitted.

    Args:
        run: The run.
        declared: The job's declaration.
        out: The folder.

    Raises:
        ParameterError: Another run has reserved the folder.
        ConfigError: The folder cannot be written to.
    """
    with os_errors_as(ConfigError, out, ending="; nothing was submitted"):
        private_folder(out)
        out.chmod(0o700)
        try:
            with open(
                out / "run.json", "x", encoding="utf-8", opener=open_private
            ) as file:
                json.dump(run_facts(run, submitting=True), file)
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError as error:
            raise ParameterError(
                f"{out}: another run has just taken it: choose another `out`"
            ) from error
    write_json(out / "job.json", {**declared, "fingerprint": run.fingerprint})


def release_folder(out: Path) -> None:
    """Undo `claim_folder`, for a run that was not submitted."""
    with suppress(OSError):
        for name in ("job.json", "run.json"):
            (out / name).unlink(missing_ok=True)
        out.rmdir()


def submit_run(
    server: Admin, run: Run, declared: Mapping[str, Any], *, min_sites: int, out: Path
) -> None:
    """Submit the job of a run that has claimed its folder.

    Args:
        server: A session with the server.
        run: The run.
        declared: The job's declaration.
        min_sites: Minimum number of sites that the run needs.
        out: The folder that the run has claimed.

    Raises:
        TrainingError: The connection was lost, so it is unknown whether the server has
            the job.
        RefusedError: The server refused the job.
    """
    with tempfile.TemporaryDirectory() as folder:
        job_folder = write_job_folder(
            Path(folder), declared, run=run.name, sites=run.sites, min_sites=min_sites
        )
        try:
            server.submit(job_folder)
        except TrainingError as error:
            raise TrainingError(
                f"{error}; it is unknown whether the server received run "
                f"{run.name}; to find out: fednotes run --attach --out {out}"
            ) from error
    write_json(out / "run.json", run_facts(run))


def run_facts(run: Run, *, submitting: bool = False) -> dict[str, Any]:
    """Return the contents of run.json.

    Args:
        run: The run.
        submitting: Whether it is unknown if the server has received the run.
    """
    facts: dict[str, Any] = {
        "run": run.name,
        "kit": str(run.kit),
        "title": run.title,
        "sites": list(run.sites),
        "fingerprint": run.fingerprint,
    }
    if submitting:
        facts["submitting"] = True
    return facts


def read_run(out: Path) -> Run:
    """Return the run to which a folder belongs.

    Raises:
        ConfigError: The folder is not the folder of a run.
    """
    try:
        facts = read_json(out / "run.json")
        return Run(
            name=str(facts["run"]),
            kit=Path(facts["kit"]),
            title=str(facts["title"]),
            sites=tuple(facts["sites"]),
            fingerprint=str(facts["fingerprint"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{out}: no run was submitted from here (run.json is missing or incomplete)"
        ) from error


def _raise_unknown(run: Run, out: Path) -> NoReturn:
    """Raise ConfigError that says why the server does not know a run."""
    if read_json_table(out / "run.json").get("submitting"):
        raise ConfigError(
            f"run {run.name} was stopped before it reached the server: delete {out} "
            "and submit the job again"
        )
    raise ConfigError(
        f"the server of {run.kit} does not know run {run.name}: it was deleted, or "
        "this is another server"
    )


# ---- aborting ------------------------------------------------------------------------


def abort_run(
    server: Admin,
    run: Run,
    out: Path,
    *,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Abort a run permanently: end its submissions, and prevent further ones.

    NVFlare records at the server that a submission was aborted. The record survives
    restarts, and the server's watch does not resubmit a run that has one.

    Args:
        server: A session with the server.
        run: The run.
        out: The run's folder.
        now: Returns the current time, in seconds.
        sleep: Waits for a number of seconds.

    Raises:
        ConfigError: The server does not know the run, or already has its result.
        TrainingError: The run did not end in time.
    """
    deadline = now() + ABORT_SECONDS
    # Each submission that was aborted, and whether it had a process that must end.
    had_process: dict[str, bool] = {}
    while now() < deadline:
        submissions = [
            submission
            for submission in order_submissions(server.jobs())
            if submission.get("name") == run.name
        ]
        if not submissions:
            _raise_unknown(run, out)
        newest = submissions[-1]
        _require_unfinished(server, newest, out)

        unfinished = [
            submission
            for submission in submissions
            if not str(submission["status"]).startswith("FINISHED")
        ]
        for submission in unfinished:
            job_id = str(submission["job_id"])
            # A submission that is being dispatched has no process to abort yet.
            if submission["status"] != "DISPATCHED" and job_id not in had_process:
                had_process[job_id] = _abort_submission(server, job_id)
        is_ending = any(
            had_process.get(str(submission["job_id"]), True)
            for submission in unfinished
        )
        if not is_ending:
            if any(submission["status"] == ABORTED for submission in submissions):
                return
            # The run is between two submissions, or its process was killed. Only a
            # submission can be marked as aborted, so submit the run once more.
            server.abort(server.resubmit(str(newest["job_id"])))
        sleep(POLL_SECONDS)
    raise TrainingError(
        f"run {run.name} has been told to end and has not ended yet: look "
        f"again with `fednotes run --attach --out {out}`"
    )


def _require_unfinished(server: Admin, newest: Mapping[str, Any], out: Path) -> None:
    """Raise ConfigError if a run is done.

    Args:
        server: A session with the server.
        newest: The newest submission of the run.
        out: The run's folder.
    """
    is_done = (out / "summary.json").exists()
    if not is_done and newest["status"] == "FINISHED:COMPLETED":
        with tempfile.TemporaryDirectory() as folder, suppress(TrainingError):
            files = server.fetch(str(newest["job_id"]), Path(folder))
            is_done = (files / "fednotes" / "summary.json").exists()
    if is_done:
        raise ConfigError(
            f"run {newest['name']} is done, so there is nothing to abort; to "
            f"fetch its results: fednotes run --attach --out {out}"
        )


def _abort_submission(server: Admin, job_id: str) -> bool:
    """Abort a submission; return False if the server no longer has a process for it."""
    try:
        server.abort(job_id)
    except TrainingError as error:
        if "not running" in str(error):
            return False
        raise
    return True


# ---- watching ------------------------------------------------------------------------


@dataclass
class Follower:
    """Shows a run until it is done, and fetches its results.

    Attributes:
        run: The run.
        out: The run's folder.
        display: Shows rounds and their metrics.
        say: Prints one line.
        just_submitted: Whether the run was just submitted.
        now: Returns the current time, in seconds; tests replace it.
        sleep: Waits for a number of seconds; tests replace it.
    """

    run: Run
    out: Path
    display: ProgressListener
    say: Callable[[str], None]
    just_submitted: bool = False
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _job_id: str = ""  # of the newest submission
    _num_lines: int = 0  # number of lines read from the newest submission
    _status: str = ""  # of the newest submission
    _status_time: float = 0.0  # when the status last changed
    _fetched_jobs: set[str] = field(default_factory=set)  # finished submissions
    _plan: tuple[int, int] | None = None  # rounds and examples
    _rounds_shown: int = 0
    _is_resumed: bool = False  # a new submission of a run whose rounds were shown
    _run_ahead: str = ""  # the run that this one waits for

    def follow(self, server: Admin) -> RunResult:
        """Show the run until it is done, and return its results.

        Raises:
            TrainingError: The connection was lost.
            FednotesError: The run was aborted or stays stopped.
        """
        self._status_time = self.now()
        while True:
            newest_submissions = {
                str(submission["name"]): submission
                for submission in order_submissions(server.jobs())
            }
            submission = newest_submissions.pop(self.run.name, None)
            if submission is None:
                _raise_unknown(self.run, self.out)
            if read_json_table(self.out / "run.json").get("submitting"):
                # The server has received the run.
                write_json(self.out / "run.json", run_facts(self.run))

            status = str(submission["status"])
            self._update_status(server, str(submission["job_id"]), status)
            if status == "SUBMITTED":
                self._say_who_is_ahead(server, newest_submissions)
            if status == "RUNNING":
                self._show_progress(server)
            elif status.startswith("FINISHED"):
                result = self._examine_finished(server, submission)
                if result is not None:
                    return result
            self.sleep(POLL_SECONDS)

    def _update_status(self, server: Admin, job_id: str, status: str) -> None:
        """Record the newest submission's status; name absent sites if it waits."""
        if job_id != self._job_id:
            self._job_id = job_id
            self._num_lines = 0
            self._status = ""
            self._is_resumed = self._rounds_shown > 0
        if status != self._status:
            self._status = status
            self._status_time = self.now()
            if status in QUEUED:
                self._say_who_is_absent(server)

    def _say_who_is_ahead(
        self, server: Admin, others: Mapping[str, dict[str, Any]]
    ) -> None:
        """Name the run that is ahead of this one; the server runs one job at a time.

        Args:
            server: A session with the server.
            others: Name of each other run to its newest submission.
        """
        for name, submission in others.items():
            if submission["status"] not in ("RUNNING", "DISPATCHED"):
                continue
            if name == self._run_ahead:
                return
            # A job that does not answer was killed. The watch resubmits it later, so
            # for now it blocks no other run.
            is_alive = server.tell(str(submission["job_id"])) is not None
            if is_alive:
                self._run_ahead = name
                self.say(
                    f"waits until run {name} has ended (to abort that run: fednotes "
                    "run --abort --out its folder)"
                )
            return

    def _say_who_is_absent(self, server: Admin) -> None:
        """Name the sites of the run that are not connected."""
        absent_sites = [site for site in self.run.sites if site not in server.sites()]
        if absent_sites:
            self.say(
                f"waiting for {', '.join(absent_sites)}: not connected; at each of "
                "these sites, run: fednotes site start KIT"
            )

    def _show_progress(self, server: Admin) -> None:
        """Show new lines of progress; right after submission, how a site approves."""
        if self.just_submitted:
            self.just_submitted = False
            self.say(
                "a site that has not approved the job must do so first; run there: "
                "fednotes site approve KIT"
            )
        reply = server.tell(self._job_id, since=self._num_lines) or {}
        for line in reply.get("lines", ()):
            self._num_lines += 1
            self._show(line)

    def _show(self, line: Mapping[str, Any]) -> None:
        """Show one line of progress."""
        kind = line.get("kind")
        if kind == "plan":
            self._show_plan(line)
        elif kind == "round":
            self._show_round(line)
        elif kind in ("event", "approvals"):
            self.say(str(line["text"]))

    def _show_plan(self, line: Mapping[str, Any]) -> None:
        """Show how many rounds a submission will take, and where it resumes."""
        if self._is_resumed:
            self._is_resumed = False
            num_done = int(line.get("done", 0))
            if num_done:
                self.say(f"resumes from round {num_done}")
            else:
                self.say("starts again from the beginning: there is no checkpoint yet")
        rounds = int(line["rounds"])
        examples = int(line["examples"])
        if (rounds, examples) != self._plan:
            self._plan = (rounds, examples)
            part = Part("federated", self.run.sites, None)
            self.display.begin(part, rounds, examples)

    def _show_round(self, line: Mapping[str, Any]) -> None:
        """Show a round, unless an earlier submission has already shown it."""
        number = int(line["round"])
        if self._plan is None or number < self._rounds_shown:
            return
        self._rounds_shown = number + 1
        metrics = {key: value for key, value in line.items() if key not in _NOT_METRICS}
        self.display.round(
            RoundResult(
                number,
                metrics,
                sites=int(line["took_part"]),
                bytes_up=int(line["bytes_up"]),
                bytes_down=int(line["bytes_down"]),
                seconds=float(line["seconds"]),
                evaluated=bool(line["evaluated"]),
            )
        )

    def _examine_finished(
        self, server: Admin, submission: Mapping[str, Any]
    ) -> RunResult | None:
        """Return the results of a finished submission; None if another one follows.

        Raises:
            FednotesError: The run was aborted, failed permanently, or is not
                resubmitted.
        """
        if self._status == ABORTED:
            raise FednotesError(f"run {self.run.name} was aborted by a person")
        if self._job_id not in self._fetched_jobs:
            result = self._fetch(server, submission)
            self._fetched_jobs.add(self._job_id)
            if result is not None:
                self.display.end()
                return result
        if self.now() - self._status_time > PATIENCE_SECONDS:
            raise FednotesError(
                f"run {self.run.name}: {self._status}, but the server does not "
                "resubmit it: look at `fednotes server status KIT` and its log"
            )
        return None

    def _fetch(self, server: Admin, submission: Mapping[str, Any]) -> RunResult | None:
        """Fetch a submission's files; return the run's results if it has any.

        Raises:
            FednotesError: The run failed, and another submission will not help.
        """
        with tempfile.TemporaryDirectory(dir=self.out) as folder:
            try:
                files = server.fetch(self._job_id, Path(folder)) / "fednotes"
            except TrainingError:
                details = "; ".join(map(str, submission.get("job_deploy_detail") or ()))
                self.say(f"{self._status} ({details or 'nothing to fetch'})")
                return None
            problem = read_json_table(files / PROBLEM)
            if problem and not problem.get("again"):
                raise FednotesError(
                    f"run {self.run.name} stays stopped: {problem['problem']}"
                )
            if problem:
                self.say(f"stopped: {problem['problem']}; the server resubmits it")
            if not (files / SUMMARY).exists():
                return None
            self._move_into_folder(files)
            return read_result(self.out)

    def _move_into_folder(self, files: Path) -> None:
        """Move fetched files into the run's folder, in place of earlier ones.

        Only results are moved. The folder also has files of this machine, such as
        run.json, which names a kit: the server must not replace them.
        """
        make_private(files)
        for name in _RESULTS:
            path = files / name
            target = self.out / name
            if not path.exists():
                continue
            if target.is_dir():
                shutil.rmtree(target)
            shutil.move(path, target)


def follow_with_reconnects(follower: Follower, connect: Callable[[], Any]) -> RunResult:
    """Follow a run until it is done; reconnect whenever the connection is lost.

    Args:
        follower: Shows the run.
        connect: Opens a session with the server, as a context manager.
    """
    is_disconnected = False
    while True:
        try:
            with connect() as server:
                if is_disconnected:
                    follower.say("connected again")
                is_disconnected = False
                return follower.follow(server)
        except TrainingError as error:
            if not is_disconnected:
                follower.say(
                    f"{error}; trying again (Ctrl-C stops watching, not the run)"
                )
            is_disconnected = True
            follower.sleep(5 * POLL_SECONDS)
