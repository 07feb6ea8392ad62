"""A run between real sites as the admin has it: claim a folder, hand it in, watch it,
end it.

    OUT/run.json     which run, by which kit: `fednotes run --attach` goes on watching by it;
                     written before the job is handed in, so that no run is without one
    OUT/job.json     the declared job
    OUT/metrics.jsonl, OUT/summary.json, OUT/model/     fetched when it is done

The run does not need this process: it may end, and be attached again. A submission that
fails or is paused is handed in again by the server's watch, and this follows the
newest.
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
from typing import TYPE_CHECKING, Any, NoReturn

from fednotes.apps.deployment.nvflare.kit import (
    ADMIN,
    in_order,
    job_folder,
    loose_keys,
    read_kit,
)
from fednotes.apps.deployment.server import PROBLEM
from fednotes.core.errors import ConfigError, FednotesError, TrainingError, on_disk
from fednotes.core.parsing import read_json, read_json_table
from fednotes.core.store import make_private, open_private, private_folder, write_json
from fednotes.core.tables import table_fingerprint
from fednotes.engines.rounds import RoundResult
from fednotes.jobs.declaration import MIN_SECURE_SITES, table_to_approve
from fednotes.jobs.job import Job
from fednotes.jobs.results import SUMMARY, RunResult, read_result
from fednotes.jobs.simulate import Display, Part

if TYPE_CHECKING:
    from fednotes.apps.deployment.nvflare.server import Admin


POLL_SECONDS = 1.0
# NVFlare gives a job's processes ten to end, a busy server takes longer
ABORT_SECONDS = 120.0
PATIENCE_SECONDS = 900.0  # the watch waits up to 300 s before it hands a run in again
ABORTED = "FINISHED:ABORTED"
QUEUED = ("SUBMITTED", "APPROVED", "DISPATCHED")
_FACTS = frozenset(  # of a line; all else are metrics
    {"kind", "part", "condition", "round", "evaluated"}
    | {"took_part", "bytes_up", "bytes_down", "seconds"}
)


@dataclass(frozen=True)
class Run:
    """A run that was handed in. kit: the admin's. sites: in the job's order."""

    name: str
    kit: Path
    title: str
    sites: tuple[str, ...]
    fingerprint: str


def admin_kit(path: Path) -> tuple[Path, str]:
    """Return an admin's kit and the person whose it is.

    Raises:
        ConfigError: It is another participant's kit, or others can read its key.
    """
    facts = read_kit(path)
    if facts.role != ADMIN:
        raise ConfigError(
            f"{path}: is the kit of {facts.name} ({facts.role}); a run is handed in with the "
            "kit `admin`"
        )
    if loose := loose_keys(path):
        raise ConfigError(
            f"{loose[0]}: others can read it: chmod -R go-rwx {path}; if other people use this "
            "machine, ask for another kit"
        )
    return path.resolve(), facts.person


def prepare(
    job: Job, declared: Mapping[str, Any], kit: Path, out: Path, when: float
) -> tuple[Run, int]:
    """A new run that OUT is free for; it and the least number of sites.

    Raises ConfigError if OUT holds another run, or the job's numbers of sites cannot
        be.
    """
    if (out / "run.json").exists():
        raise ConfigError(
            f"{out} holds run {read_run(out).name} already: `fednotes run --attach --out {out}` "
            "goes on watching it; or give another --out"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not empty: give another --out")
    sites = tuple(job.sites)
    least = job.federation.min_sites or len(sites)
    if least > len(sites):
        raise ConfigError(
            f"[federation] min_sites = {least}: the job has {len(sites)} sites"
        )
    if job.federation.secure_sum and len(sites) < MIN_SECURE_SITES:
        raise ConfigError(
            f"[federation] secure_sum: takes 3 sites, the job has {len(sites)}"
        )
    stem = re.sub(r"[^A-Za-z0-9_.-]", "-", job.name).lstrip("-._")[:32] or "job"
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(when))
    key = table_fingerprint(table_to_approve(declared, sites, least))
    return Run(f"{stem}-{stamp}", kit.resolve(), job.title, sites, key), least


def claim(run: Run, declared: Mapping[str, Any], out: Path) -> None:
    """Make OUT this run's, before anything is handed in.

    Raises ConfigError if another run has it, or it cannot be written.
    """
    with on_disk(out, ConfigError, "; nothing was handed in"):
        private_folder(out)
        out.chmod(0o700)
        try:
            with open(
                out / "run.json", "x", encoding="utf-8", opener=open_private
            ) as file:
                json.dump(facts_of(run, submitting=True), file)
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError as error:
            told = "another run has just taken it: give another --out"
            raise ConfigError(f"{out}: {told}") from error
    write_json(out / "job.json", {**declared, "fingerprint": run.fingerprint})


def release(out: Path) -> None:
    """Undo `claim`: nothing was handed in."""
    with suppress(OSError):
        for name in ("job.json", "run.json"):
            (out / name).unlink(missing_ok=True)
        out.rmdir()


def hand_in(
    server: Admin, run: Run, declared: Mapping[str, Any], least: int, out: Path
) -> None:
    """Submit the job of a run that has claimed OUT.

    Raises TrainingError where nobody can say whether the server has it, RefusedError
        where not.
    """
    with tempfile.TemporaryDirectory() as folder:
        packed = job_folder(
            Path(folder), declared, run=run.name, sites=run.sites, min_sites=least
        )
        try:
            server.submit(packed)
        except TrainingError as error:
            raise TrainingError(
                f"{error}; whether it has run {run.name} is not known: "
                f"fednotes run --attach --out {out} tells"
            ) from error
    write_json(out / "run.json", facts_of(run))


def facts_of(run: Run, **more: Any) -> dict[str, Any]:
    """As run.json has it. submitting: whether the server may not have it yet."""
    return {
        **{"run": run.name, "kit": str(run.kit), "title": run.title},
        **{"sites": list(run.sites), "fingerprint": run.fingerprint, **more},
    }


def read_run(out: Path) -> Run:
    """The run that a folder is of. Raises ConfigError if it is of none."""
    try:
        kept = read_json(out / "run.json")
        name, title, key = (
            str(kept["run"]),
            str(kept["title"]),
            str(kept["fingerprint"]),
        )
        return Run(name, Path(kept["kit"]), title, tuple(kept["sites"]), key)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{out}: no run was handed in from here (no whole run.json)"
        ) from error


def _unknown(run: Run, out: Path) -> NoReturn:
    """Raises ConfigError: why the server does not know a run."""
    if read_json_table(out / "run.json").get("submitting"):
        raise ConfigError(
            f"run {run.name} was stopped before it reached the server: delete {out} and give the "
            "job again"
        )
    raise ConfigError(
        f"the server of {run.kit} does not know run {run.name}: it was deleted, or this is "
        "another server"
    )


# ---- the end, for good ---------------------------------------------------------------


def abort(
    server: Admin,
    run: Run,
    out: Path,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """End a run for good: no submission of it goes on, and the watch hands in no other.

    NVFlare's word for it is kept by the server, also over a restart. Raises ConfigError
    if the server does not know the run or has its result, TrainingError if it does not
    end.
    """
    end, told = now() + ABORT_SECONDS, dict[str, bool]()
    while now() < end:
        ours = [job for job in in_order(server.jobs()) if job.get("name") == run.name]
        if not ours:
            _unknown(run, out)
        _require_unfinished(server, ours[-1], out)
        going = [job for job in ours if not str(job["status"]).startswith("FINISHED")]
        for job in going:
            if job["status"] != "DISPATCHED" and job["job_id"] not in told:
                told[job["job_id"]] = _aborted(server, str(job["job_id"]))
        ending = any(told.get(job["job_id"], True) for job in going)
        if not ending and any(job["status"] == ABORTED for job in ours):
            return
        # between two submissions, or its server was killed: one that ends at once
        if not ending:
            server.abort(server.resubmit(str(ours[-1]["job_id"])))
        sleep(POLL_SECONDS)
    raise TrainingError(
        f"run {run.name} was told to end and has not yet: look again with "
        f"`fednotes run --attach --out {out}`"
    )


def _require_unfinished(server: Admin, newest: Mapping[str, Any], out: Path) -> None:
    done = (out / "summary.json").exists()
    if not done and newest["status"] == "FINISHED:COMPLETED":
        with tempfile.TemporaryDirectory() as folder, suppress(TrainingError):
            made = server.fetch(str(newest["job_id"]), Path(folder))
            done = (made / "fednotes" / "summary.json").exists()
    if done:
        raise ConfigError(
            f"run {newest['name']} is done, there is nothing to abort: "
            f"fednotes run --attach --out {out} fetches what it made"
        )


def _aborted(server: Admin, job_id: str) -> bool:
    """Tell a submission to end; False where the server has no process of it any more."""
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
    """Shows a run until it is done, and fetches what it made.

    say: one line for a person. fresh: it was handed in just now. now, sleep: for tests.
    """

    run: Run
    out: Path
    display: Display
    say: Callable[[str], None]
    fresh: bool = False
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _job_id: str = ""
    _since: int = 0
    _state: str = ""
    _changed: float = 0.0
    # finished submissions that were looked into
    _judged: set[str] = field(default_factory=set)
    _planned: tuple[int, int] | None = None
    _shown: int = 0  # rounds
    _again: bool = False  # another submission of a run that was shown
    _ahead: str = ""  # the run that this one waits behind

    def follow(self, server: Admin) -> RunResult:
        """Returns what the run left.

        Raises TrainingError if the connection is lost, FednotesError if the run stays
            stopped.
        """
        self._changed = self.now()
        while True:
            newest = {str(job["name"]): job for job in in_order(server.jobs())}
            job = newest.pop(self.run.name, None) or _unknown(self.run, self.out)
            if read_json_table(self.out / "run.json").get("submitting"):
                write_json(self.out / "run.json", facts_of(self.run))
            status = str(job["status"])
            if str(job["job_id"]) != self._job_id:
                self._job_id, self._since, self._state = str(job["job_id"]), 0, ""
                self._again = self._shown > 0
            if status != self._state:
                self._state, self._changed = status, self.now()
                if status in QUEUED:
                    self._starting(server)
            if status == "SUBMITTED":
                self._queued(server, newest)
            if status == "RUNNING":
                self._listen(server)
            elif status.startswith("FINISHED"):
                done = self._finished(server, job)
                if done is not None:
                    return done
            self.sleep(POLL_SECONDS)

    def _queued(self, server: Admin, others: Mapping[str, dict[str, Any]]) -> None:
        """The server runs one job at a time. others: run → its newest submission."""
        for ahead, job in others.items():
            if job["status"] in ("RUNNING", "DISPATCHED"):
                # one that does not answer was killed: the watch hands it in again
                if ahead != self._ahead and server.tell(str(job["job_id"])) is not None:
                    self._ahead = ahead
                    told = "fednotes run --abort --out its folder ends it"
                    self.say(f"waits behind run {ahead} ({told})")
                return

    def _starting(self, server: Admin) -> None:
        absent = [site for site in self.run.sites if site not in server.sites()]
        if absent:
            self.say(
                f"waiting for {', '.join(absent)}: not connected; there: fednotes site start KIT"
            )

    def _listen(self, server: Admin) -> None:
        if self.fresh:
            self.fresh = False
            self.say(
                "a site that has not approved it is asked to: there, fednotes site approve KIT"
            )
        reply = server.tell(self._job_id, since=self._since) or {}
        for line in reply.get("lines", ()):
            self._since += 1
            self._show(line)

    def _show(self, line: Mapping[str, Any]) -> None:
        kind = line.get("kind")
        if kind == "plan":
            plan = int(line["rounds"]), int(line["examples"])
            if self._again:
                self._again = False
                done = int(line.get("done", 0))
                self.say(
                    f"goes on from round {done}"
                    if done
                    else "begins anew: no checkpoint yet"
                )
            if plan != self._planned:
                self._planned = plan
                self.display.begin(Part("federated", self.run.sites, None), *plan)
        elif (
            kind == "round"
            and self._planned is not None
            and line["round"] >= self._shown
        ):
            self._shown = int(line["round"]) + 1
            metrics = {k: v for k, v in line.items() if k not in _FACTS}
            sites, up, down = (
                int(line[key]) for key in ("took_part", "bytes_up", "bytes_down")
            )
            seconds, judged = float(line["seconds"]), bool(line["evaluated"])
            self.display.round(
                RoundResult(self._shown - 1, metrics, sites, up, down, seconds, judged)
            )
        elif kind in ("event", "approvals"):
            self.say(str(line["text"]))

    def _finished(self, server: Admin, job: Mapping[str, Any]) -> RunResult | None:
        """What a finished submission means: the end, or that another one follows."""
        if self._state == ABORTED:
            raise FednotesError(f"run {self.run.name} was aborted by a person")
        if self._job_id not in self._judged:
            result = self._fetch(server, job)
            self._judged.add(self._job_id)
            if result is not None:
                self.display.end()
                return result
        if self.now() - self._changed > PATIENCE_SECONDS:
            raise FednotesError(
                f"run {self.run.name}: {self._state}, and the server's watch does not hand it in "
                "again: look at `fednotes server status KIT` and its log"
            )
        return None

    def _fetch(self, server: Admin, job: Mapping[str, Any]) -> RunResult | None:
        """Take over a submission's folder.

        Raises FednotesError if it failed for good.
        """
        with tempfile.TemporaryDirectory(dir=self.out) as folder:
            try:
                made = server.fetch(self._job_id, Path(folder)) / "fednotes"
            except TrainingError:
                details = "; ".join(map(str, job.get("job_deploy_detail") or ()))
                self.say(f"{self._state} ({details or 'nothing to fetch'})")
                return None
            problem = read_json_table(made / PROBLEM)
            if problem and not problem.get("again"):
                raise FednotesError(
                    f"run {self.run.name} stays stopped: {problem['problem']}"
                )
            if problem:
                self.say(f"stopped: {problem['problem']}; the server hands it in again")
            if not (made / SUMMARY).exists():
                return None
            make_private(made)
            for path in sorted(made.iterdir()):
                target = self.out / path.name
                if target.is_dir():
                    shutil.rmtree(target)
                shutil.move(path, target)
            return read_result(self.out)


def watched(follower: Follower, connected: Callable[[], Any]) -> RunResult:
    """`follow`, connected again whenever the server was away. connected: makes a
    session."""
    lost = False
    while True:
        try:
            with connected() as server:
                if lost:
                    follower.say("connected again")
                lost = False
                return follower.follow(server)
        except TrainingError as error:
            if not lost:
                follower.say(f"{error}; trying again (Ctrl-C ends this, not the run)")
            lost = True
            follower.sleep(5 * POLL_SECONDS)
