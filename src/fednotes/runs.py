"""A run between real sites, watched from the admin's kit, and what it made fetched.

    OUT/run.json, OUT/job.json                          `submissions.py`
    OUT/metrics.jsonl, OUT/summary.json, OUT/model/     when it is done

The run does not need this process: it may end, and be attached again. A submission that fails or
is paused is handed in again by the server's watch, and this follows the newest.
"""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fednotes.core.errors import FednotesError, TrainingError
from fednotes.core.store import make_private, write_json
from fednotes.deployment import PROBLEM
from fednotes.engines.inprocess import RoundResult
from fednotes.simulate import Display, Part
from fednotes.submissions import (
    ABORTED,
    POLL_SECONDS,
    Run,
    Server,
    facts_of,
    newest_of,
    read_table,
    unknown,
)

S = TypeVar("S")
PATIENCE_SECONDS = 900.0  # the watch waits up to 300 s before it hands a run in again
QUEUED = ("SUBMITTED", "APPROVED", "DISPATCHED")
_FACTS = frozenset(
    {"kind", "evaluated", "part", "condition", "round", "took_part"}
    | {"bytes_up", "bytes_down", "seconds"}
)


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
    _judged: set[str] = field(default_factory=set)  # finished submissions that were looked into
    _planned: tuple[int, int] | None = None
    _shown: int = 0  # rounds
    _again: bool = False  # another submission of a run that was shown
    _ahead: str = ""  # the run that this one waits behind

    def follow(self, server: Server) -> dict[str, Any]:
        """Returns summary.json of the run.

        Raises TrainingError if the connection is lost, FednotesError if the run stays stopped.
        """
        self._changed = self.now()
        while True:
            jobs = server.jobs()
            job = self._newest(jobs)
            status = str(job["status"])
            if str(job["job_id"]) != self._job_id:
                self._job_id, self._since, self._state = str(job["job_id"]), 0, ""
                self._again = self._shown > 0
            if status != self._state:
                self._state, self._changed = status, self.now()
                if status in QUEUED:
                    self._starting(server)
            if status == "SUBMITTED":
                self._queued(server, jobs)
            if status == "RUNNING":
                self._asked()
                self._listen(server)
            elif status.startswith("FINISHED"):
                done = self._finished(server, job)
                if done is not None:
                    return done
            self.sleep(POLL_SECONDS)

    def _newest(self, jobs: list[dict[str, Any]]) -> dict[str, Any]:
        newest = newest_of(jobs).get(self.run.name)
        if newest is None:
            unknown(self.run, self.out)
        elif read_table(self.out / "run.json").get("submitting"):
            write_json(self.out / "run.json", facts_of(self.run))
        return newest or {}

    def _asked(self) -> None:
        if self.fresh:
            self.say(
                "a site that has not approved it is asked to: there, fednotes site approve KIT"
            )
        self.fresh = False

    def _queued(self, server: Server, jobs: list[dict[str, Any]]) -> None:
        """The server runs one job at a time."""
        found = newest_of(jobs)
        others = [job for name, job in found.items() if name != self.run.name]
        going = [job for job in others if job["status"] in ("RUNNING", "DISPATCHED")]
        ahead = str(going[0]["name"]) if going else ""
        if not ahead or ahead == self._ahead:
            return
        if server.tell(str(going[0]["job_id"])) is None:
            return  # it was killed: the watch hands it in again
        self._ahead = ahead
        self.say(f"waits behind run {ahead} (fednotes run --abort --out its folder ends it)")

    def _starting(self, server: Server) -> None:
        absent = [site for site in self.run.sites if site not in server.sites()]
        if absent:
            self.say(
                f"waiting for {', '.join(absent)}: not connected; there: fednotes site start KIT"
            )

    def _listen(self, server: Server) -> None:
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
                self.say(f"goes on from round {done}" if done else "begins anew: no checkpoint yet")
            if plan != self._planned:
                self._planned = plan
                self.display.begin(Part("federated", self.run.sites, None), *plan)
        elif kind == "round" and self._planned is not None and line["round"] >= self._shown:
            self._shown = int(line["round"]) + 1
            metrics = {k: v for k, v in line.items() if k not in _FACTS}
            self.display.round(
                RoundResult(
                    round=int(line["round"]),
                    metrics=metrics,
                    sites=int(line["took_part"]),
                    bytes_up=int(line["bytes_up"]),
                    bytes_down=int(line["bytes_down"]),
                    seconds=float(line["seconds"]),
                    evaluated=bool(line["evaluated"]),
                )
            )
        elif kind == "event":
            self.say(str(line["text"]))

    def _finished(self, server: Server, job: Mapping[str, Any]) -> dict[str, Any] | None:
        """What a finished submission means: the end, or that another one follows."""
        if self._state == ABORTED:
            raise FednotesError(f"run {self.run.name} was aborted by a person")
        if self._job_id not in self._judged:
            summary = self._fetch(server, job)
            self._judged.add(self._job_id)
            if summary is not None:
                self.display.end()
                return summary
        if self.now() - self._changed > PATIENCE_SECONDS:
            raise FednotesError(
                f"run {self.run.name}: {self._state}, and the server's watch does not hand it in "
                "again: look at `fednotes server status KIT` and its watch.log"
            )
        return None

    def _fetch(self, server: Server, job: Mapping[str, Any]) -> dict[str, Any] | None:
        """Take over a submission's folder. Raises FednotesError if it failed for good."""
        with tempfile.TemporaryDirectory(dir=self.out) as folder:
            try:
                made = server.fetch(self._job_id, Path(folder)) / "fednotes"
            except TrainingError:
                details = "; ".join(map(str, job.get("job_deploy_detail") or ()))
                self.say(f"{self._state} ({details or 'nothing to fetch'})")
                return None
            problem = read_table(made / PROBLEM)
            if problem and not problem.get("again"):
                raise FednotesError(f"run {self.run.name} stays stopped: {problem['problem']}")
            if problem:
                self.say(f"stopped: {problem['problem']}; the server hands it in again")
            summary = read_table(made / "summary.json")
            if summary:
                make_private(made)
                for path in sorted(made.iterdir()):
                    target = self.out / path.name
                    if target.is_dir():
                        shutil.rmtree(target)
                    shutil.move(path, target)
            return summary or None


@contextmanager
def quietly(
    connect: Callable[[Path, str], AbstractContextManager[S]], run: Run, person: str
) -> Iterator[S]:
    """A session, without NVFlare's words about it: what matters is raised."""
    logger = logging.getLogger("nvflare")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    with ExitStack() as stack:
        with contextlib.redirect_stdout(io.StringIO()):
            session = stack.enter_context(connect(run.kit, person))
        yield session


def watched(follower: Follower, connected: Callable[[], Any]) -> dict[str, Any]:
    """`follow`, connected again whenever the server was away. connected: makes a session."""
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
