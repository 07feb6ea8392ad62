"""Runs between real sites from the admin's side: submit, watch and abort them.

    OUT/run.json        the run that this folder belongs to, and the admin's kit; it is
                        written before submission, so that every submitted run has one
    OUT/job.json        the job's declaration
    OUT/metrics.jsonl, OUT/summary.json, OUT/model/     fetched when the run is done

The run continues without the admin's process, which may exit and reattach. Without its
folder, a run is known by its name, which the server has (`find_run`). The server's
watch resubmits a job that failed or was paused; this module follows the newest
submission.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from fednotes.apps.deployment.absence import AbsentSites, describe_strangers
from fednotes.apps.deployment.nvflare.kit import (
    ABORTED,
    ADMIN,
    build_kit_files,
    find_loose_keys,
    list_job_sites,
    order_submissions,
    read_kit,
    restore_kit_files,
    write_job_folder,
)
from fednotes.apps.deployment.server import PROBLEM
from fednotes.apps.deployment.waiting import list_with_times
from fednotes.core.errors import (
    ConfigError,
    FednotesError,
    ParameterError,
    TrainingError,
    raising_os_errors_as,
)
from fednotes.core.parsing import as_mapping, read_json, read_json_table
from fednotes.core.store import (
    create_private_folder,
    make_private,
    open_private,
    write_json,
)
from fednotes.core.tables import fingerprint_table
from fednotes.engines.launch import JOB_FILE
from fednotes.engines.rounds import RoundResult
from fednotes.jobs.declaration import MIN_SECURE_SITES, make_table_to_approve
from fednotes.jobs.job import Job
from fednotes.jobs.metrics_file import METRICS
from fednotes.jobs.parts import Part
from fednotes.jobs.progress import ProgressListener
from fednotes.jobs.results import SUMMARY, RunResult, read_result

if TYPE_CHECKING:
    from fednotes.apps.deployment.nvflare.server import Admin

POLL_SECONDS = 1.0  # between two queries of the server
SITES_SECONDS = 5.0  # between two queries for the connected sites
# Time limit for aborting a run. NVFlare gives the processes of a job ten seconds to
# end, but a busy server takes longer.
ABORT_SECONDS = 120.0
# Time after which a stopped run counts as not resubmitted; the watch waits up to 300 s.
PATIENCE_SECONDS = 900.0
MAX_LISTED_RUNS = 10  # maximum number of runs that a message lists
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
        "drawn",
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
        fingerprint: The fingerprint of the job that sites approve; "" for a run that
            was found by its name.
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
        warnings: Warnings about certificates that expire soon.
    """

    path: Path
    person: str
    warnings: tuple[str, ...] = ()


class PreparedRun(NamedTuple):
    """A run that can be submitted.

    Attributes:
        run: The run.
        min_sites: Minimum number of sites that it needs.
    """

    run: Run
    min_sites: int


def open_admin_kit(path: Path) -> AdminKit:
    """Return an admin's kit after checking that it is safe to use and can connect.

    Raises:
        ConfigError: The kit is another participant's, other users can read its key, a
            file is missing, NVFlare could run code from another one, or a certificate
            is not valid.
    """
    from fednotes.apps.deployment.nvflare.certificates import check_kit

    facts = read_kit(path)
    if facts.role != ADMIN:
        raise ConfigError(
            f"{path} is the kit of {facts.name} ({facts.role}): use the kit "
            "`admin` to submit a run"
        )
    for key in find_loose_keys(path):
        raise ConfigError(
            f"{key}: other users can read this file: run chmod -R go-rwx {path}; if "
            "other people use this machine, ask for another kit"
        )
    for name in build_kit_files(facts, path):
        if not (path / name).is_file():
            raise ConfigError(f"{path / name} is missing: ask for a new kit")
    restore_kit_files(path.resolve(), facts)
    return AdminKit(path.resolve(), facts.person, tuple(check_kit(path)))


@contextmanager
def opening_session(kit: AdminKit) -> Iterator[Admin]:
    """Open a session with the server of an admin's kit.

    Yields:
        The session.

    Raises:
        TrainingError: No session was opened; the message names the server's address and
            what `fednotes preflight` finds there.
    """
    from fednotes.apps.deployment.nvflare.processes import silence_grpc

    silence_grpc()
    from fednotes.apps.deployment.nvflare.server import connecting_to_server
    from fednotes.apps.deployment.preflight import check_server

    with ExitStack() as stack:
        try:
            session = stack.enter_context(connecting_to_server(kit.path, kit.person))
        except TrainingError as error:
            check = check_server(kit.path)
            if check.ok:
                raise TrainingError(
                    f"{check.message}, but no session can be opened ({error}): if this "
                    "persists, ask the coordinator whether this kit was revoked"
                ) from error
            raise TrainingError(check.message) from error
        yield session


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
    _require_free_folder(out)
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
    table = make_table_to_approve(declared, sites, min_sites)
    run = Run(
        name=f"{plain_name}-{timestamp}",
        kit=kit.resolve(),
        title=job.title,
        sites=sites,
        fingerprint=fingerprint_table(table),
    )
    return PreparedRun(run, min_sites)


def _require_free_folder(out: Path) -> None:
    """Raise ParameterError unless a folder is empty or does not exist."""
    if (out / "run.json").exists():
        raise ParameterError(
            f"{out} already holds run {read_run(out).name}: watch it with "
            f"`fednotes run --attach --out {out}`, or choose another `out`"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ParameterError(f"{out} is not empty: choose another `out`")


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
    with raising_os_errors_as(ConfigError, out, ending="; nothing was submitted"):
        _reserve_folder(run, out, submitting=True)
    write_json(out / "job.json", {**declared, "fingerprint": run.fingerprint})


def _reserve_folder(run: Run, out: Path, *, submitting: bool) -> None:
    """Create the folder of a run, with run.json.

    Args:
        run: The run.
        out: The folder.
        submitting: Whether it is unknown if the server has received the run.

    Raises:
        ParameterError: Another run has reserved the folder.
        OSError: The folder cannot be written to.
    """
    create_private_folder(out)
    out.chmod(0o700)
    try:
        with open(out / "run.json", "x", encoding="utf-8", opener=open_private) as file:
            json.dump(build_run_facts(run, submitting=submitting), file)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError as error:
        raise ParameterError(
            f"{out}: another run has just taken it: choose another `out`"
        ) from error


def adopt_folder(run: Run, out: Path) -> Run:
    """Return the run that a folder holds, or reserve an empty folder for a run.

    Args:
        run: A run that was found by its name.
        out: The folder.

    Raises:
        ParameterError: The folder holds another run or other files.
        ConfigError: The folder cannot be written to.
    """
    if (out / "run.json").exists():
        run_of_folder = read_run(out)
        if run_of_folder.name == run.name:
            return replace(run_of_folder, kit=run.kit)
    _require_free_folder(out)
    with raising_os_errors_as(ConfigError, out):
        _reserve_folder(run, out, submitting=False)
    return run


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
    write_json(out / "run.json", build_run_facts(run))


def build_run_facts(run: Run, *, submitting: bool = False) -> dict[str, Any]:
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
            f"{out}: no run was submitted from here (run.json is missing or "
            "incomplete): give the run's folder with --out, or its name: fednotes run "
            "--attach RUN --on KIT"
        ) from error


def find_run(server: Admin, kit: Path, name: str) -> Run:
    """Return a run that the server knows, by its name.

    Args:
        server: A session with the server.
        kit: The admin's kit.
        name: The name of the run.

    Raises:
        ConfigError: The server does not know the run; the message lists its runs.
    """
    submissions = {
        str(submission["name"]): submission
        for submission in order_submissions(server.list_jobs())
    }
    if name not in submissions:
        raise ConfigError(
            f"the server of {kit} does not know run {name!r}; its newest runs: "
            f"{_describe_runs(submissions.values())}"
        )
    sites = list_job_sites(submissions[name])
    return Run(name, kit.resolve(), title=name, sites=sites, fingerprint="")


def _describe_runs(submissions: Iterable[Mapping[str, Any]]) -> str:
    """Return the names and states of the newest runs, in words.

    Args:
        submissions: The newest submission of each run, in order.
    """
    runs = [
        f"{submission['name']} ({str(submission['status']).lower()})"
        for submission in submissions
    ]
    return ", ".join(runs[-MAX_LISTED_RUNS:]) or "none"


def _raise_unknown(run: Run, out: Path | None) -> NoReturn:
    """Raise ConfigError that says why the server does not know a run."""
    if out is not None and read_json_table(out / "run.json").get("submitting"):
        raise ConfigError(
            f"run {run.name} was stopped before it reached the server: delete {out} "
            "and submit the job again"
        )
    raise ConfigError(
        f"the server of {run.kit} does not know run {run.name}: it was deleted, or "
        "this is another server"
    )


def format_attach_command(run: Run, out: Path | None) -> str:
    """Return the command that watches a run again.

    Args:
        run: The run.
        out: The run's folder; None if it is not known.
    """
    if out is None:
        return f"fednotes run --attach {run.name} --on {run.kit}"
    return f"fednotes run --attach --out {out}"


# ---- aborting ------------------------------------------------------------------------


def abort_run(
    server: Admin,
    run: Run,
    out: Path | None,
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
        out: The run's folder; None if it is not known.
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
            for submission in order_submissions(server.list_jobs())
            if submission.get("name") == run.name
        ]
        if not submissions:
            _raise_unknown(run, out)
        newest = submissions[-1]
        _require_unfinished(server, run, newest, out)

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
        f"run {run.name} was asked to end but has not ended yet: check "
        f"again with `{format_attach_command(run, out)}`"
    )


def _require_unfinished(
    server: Admin, run: Run, newest: Mapping[str, Any], out: Path | None
) -> None:
    """Raise ConfigError if a run is done.

    Args:
        server: A session with the server.
        run: The run.
        newest: The newest submission of the run.
        out: The run's folder; None if it is not known.
    """
    is_done = out is not None and (out / "summary.json").exists()
    if not is_done and newest["status"] == "FINISHED:COMPLETED":
        with tempfile.TemporaryDirectory() as folder, suppress(TrainingError):
            files = server.fetch(str(newest["job_id"]), Path(folder))
            is_done = (files / "fednotes" / "summary.json").exists()
    if is_done:
        raise ConfigError(
            f"run {run.name} is done, so there is nothing to abort; to fetch its "
            f"results: {format_attach_command(run, out)}"
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
    _sites_time: float = -math.inf  # when the server was last asked for its sites
    _absent_sites: AbsentSites = field(default_factory=AbsentSites)

    def follow(self, server: Admin) -> RunResult:
        """Show the run until it is done, and return its results.

        Raises:
            TrainingError: The connection was lost.
            FednotesError: The run was aborted or will not be resumed.
        """
        self._status_time = self.now()
        while True:
            newest_submissions = {
                str(submission["name"]): submission
                for submission in order_submissions(server.list_jobs())
            }
            submission = newest_submissions.pop(self.run.name, None)
            if submission is None:
                _raise_unknown(self.run, self.out)
            if read_json_table(self.out / "run.json").get("submitting"):
                # The server has received the run.
                write_json(self.out / "run.json", build_run_facts(self.run))

            status = str(submission["status"])
            self._update_status(str(submission["job_id"]), status)
            if status == "RUNNING" or status in QUEUED:
                self._say_who_is_absent(server)
            if status == "SUBMITTED":
                self._say_who_is_ahead(server, newest_submissions)
            if status == "RUNNING":
                self._show_progress(server)
            elif status.startswith("FINISHED"):
                result = self._examine_finished(server, submission)
                if result is not None:
                    return result
            self.sleep(POLL_SECONDS)

    def _update_status(self, job_id: str, status: str) -> None:
        """Record the newest submission and its status."""
        if job_id != self._job_id:
            self._job_id = job_id
            self._num_lines = 0
            self._status = ""
            self._is_resumed = self._rounds_shown > 0
        if status != self._status:
            self._status = status
            self._status_time = self.now()

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
            is_alive = server.read_progress(str(submission["job_id"])) is not None
            if is_alive:
                self._run_ahead = name
                self.say(
                    f"waiting until run {name} has ended (to abort that run: fednotes "
                    f"run --abort {name} --on {self.run.kit})"
                )
            return

    def _say_who_is_absent(self, server: Admin) -> None:
        """Name the sites of the run that are not connected, and since when."""
        now = self.now()
        if now - self._sites_time < SITES_SECONDS:
            return
        self._sites_time = now
        connected = server.list_sites()
        if not self._absent_sites.update(self.run.sites, connected, now):
            return
        since = self._absent_sites.since
        text = f"not connected: {list_with_times(since, now)}"
        strangers = describe_strangers(since, self.run.sites, connected)
        if strangers:
            end = "" if strangers.endswith("?") else "."
            text += (
                f"; {strangers}{end} If the job misspells a name, run fednotes run "
                f"--abort --out {self.out}, and submit the corrected job. Otherwise, "
                "at each of these sites, run: fednotes site start KIT"
            )
        else:
            text += "; at each of these sites, run: fednotes site start KIT"
        self.say(text)

    def _show_progress(self, server: Admin) -> None:
        """Show the newest submission's lines that were not shown yet.

        Right after submission, first say how a site approves the job.
        """
        if self.just_submitted:
            self.just_submitted = False
            self.say(
                "a site that has not approved the job must do so first; run there: "
                "fednotes site approve KIT"
            )
        # The reply is None while the server has no process of the job.
        reply = server.read_progress(self._job_id, since=self._num_lines) or {}
        lines = reply.get("lines")
        for line in lines if isinstance(lines, list) else ():
            self._num_lines += 1
            # A lying server can send anything; the run goes on all the same.
            with suppress(KeyError, TypeError, ValueError, OverflowError):
                self._show(as_mapping(line))

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
            text = problem.get("problem", "the server gave no reason")
            if problem and not problem.get("again"):
                raise FednotesError(f"run {self.run.name} will not be resumed: {text}")
            if problem:
                self.say(f"paused: {text}; the server resumes the run automatically")
            if not (files / SUMMARY).is_file():
                return None
            self._move_into_folder(files)
            self._restore_declaration(files.parent)
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
            # A malicious server can send a folder in place of a file, or the reverse.
            is_expected = path.is_dir() if name == "model" else path.is_file()
            if not is_expected:
                continue
            if target.is_dir():
                shutil.rmtree(target)
            shutil.move(path, target)

    def _restore_declaration(self, workspace: Path) -> None:
        """Write the job's declaration, unless the admin submitted it from this folder.

        Args:
            workspace: The folder that the server sent.
        """
        path = self.out / "job.json"
        table = read_json_table(workspace / "app_server" / "config" / JOB_FILE)
        declared = table.get("job")
        if path.exists() or not isinstance(declared, dict):
            return
        with suppress(FednotesError, KeyError, TypeError, ValueError):
            to_approve = make_table_to_approve(
                declared, self.run.sites, int(table["min_sites"])
            )
            fingerprint = fingerprint_table(to_approve)
            write_json(path, {**declared, "fingerprint": fingerprint})


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
