"""A run between real sites, from the admin's kit: hand it in, watch it, fetch what it made.

    OUT/run.json        which run, by which kit: `fednotes run --attach` goes on watching by it
    OUT/job.json        the declared job
    OUT/metrics.jsonl, OUT/summary.json, OUT/model/     when it is done

The run does not need this process: it may end, and be attached again. A submission that fails or
is paused is handed in again by the server's watch, and this follows the newest.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fednotes.core.errors import ConfigError, FednotesError, TrainingError
from fednotes.core.store import write_json
from fednotes.deployed_jobs import whole_table
from fednotes.deployment import PROBLEM
from fednotes.engines.inprocess import RoundResult
from fednotes.engines.provision import ADMIN, job_folder, read_kit
from fednotes.jobs import Job
from fednotes.privacy.approval import fingerprint
from fednotes.simulate import Display, Part

S = TypeVar("S")
POLL_SECONDS = 1.0
PATIENCE_SECONDS = 900.0  # the watch waits up to 300 s before it hands a run in again
_FACTS = frozenset(
    {"kind", "evaluated", "part", "condition", "round", "took_part"}
    | {"bytes_up", "bytes_down", "seconds"}
)


class Server(Protocol):
    """What is asked of the server (`engines.nvflare.Admin`)."""

    def submit(self, folder: Path) -> str: ...
    def jobs(self) -> list[dict[str, Any]]: ...
    def tell(self, job_id: str, topic: str = ..., since: int = ...) -> dict[str, Any] | None: ...
    def fetch(self, job_id: str, out: Path) -> Path: ...
    def abort(self, job_id: str) -> None: ...
    def sites(self, within: float = ...) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Run:
    """A run that was handed in. kit: the admin's. sites: in the job's order."""

    name: str
    kit: Path
    title: str
    sites: tuple[str, ...]
    fingerprint: str


def admin_kit(path: Path) -> tuple[Path, str]:
    """An admin's kit, and the person it is of. Raises ConfigError for another's."""
    facts = read_kit(path)
    if facts["role"] != ADMIN:
        raise ConfigError(
            f"{path}: is the kit of {facts['name']} ({facts['role']}); a run is handed in with the "
            "kit `admin`"
        )
    return path.resolve(), str(facts["person"])


def prepare(
    job: Job, declared: Mapping[str, Any], kit: Path, out: Path, when: float
) -> tuple[Run, int]:
    """Claim OUT for a new run; it and the least number of sites.

    Raises ConfigError if OUT holds another run, or the job's numbers of sites cannot be.
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
        raise ConfigError(f"[federation] min_sites = {least}: the job has {len(sites)} sites")
    if job.federation.secure_sum and len(sites) < 3:
        raise ConfigError(f"[federation] secure_sum: takes 3 sites, the job has {len(sites)}")
    stem = re.sub(r"[^A-Za-z0-9_.-]", "-", job.name).lstrip("-._")[:32] or "job"
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(when))
    key = fingerprint(whole_table(declared, sites, least))
    run = Run(f"{stem}-{stamp}", kit.resolve(), job.title, sites, key)
    return run, least


def hand_in(server: Server, run: Run, declared: Mapping[str, Any], least: int, out: Path) -> str:
    """Submit a run's job; OUT then knows it. Returns the submission's id."""
    with tempfile.TemporaryDirectory() as folder:
        packed = job_folder(Path(folder), declared, run=run.name, sites=run.sites, min_sites=least)
        job_id = server.submit(packed)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "job.json", {**declared, "fingerprint": run.fingerprint})
    write_json(
        out / "run.json",
        {
            **{"run": run.name, "kit": str(run.kit), "title": run.title},
            **{"sites": list(run.sites), "fingerprint": run.fingerprint},
        },
    )
    return job_id


def read_run(out: Path) -> Run:
    """The run that a folder is of. Raises ConfigError if it is of none."""
    try:
        kept = json.loads((out / "run.json").read_text(encoding="utf-8"))
        return Run(
            str(kept["run"]),
            Path(kept["kit"]),
            str(kept["title"]),
            tuple(kept["sites"]),
            str(kept["fingerprint"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{out}: no run was handed in from here (no whole run.json)") from error


@dataclass
class Follower:
    """Shows a run until it is done, and fetches what it made.

    say: one line for a person. now, sleep: for tests.
    """

    run: Run
    out: Path
    display: Display
    say: Callable[[str], None]
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _job_id: str = ""
    _since: int = 0
    _state: str = ""
    _changed: float = 0.0
    _judged: set[str] = field(default_factory=set)  # finished submissions that were looked into
    _planned: tuple[int, int] | None = None

    def follow(self, server: Server) -> dict[str, Any]:
        """Returns summary.json of the run.

        Raises TrainingError if the connection is lost, FednotesError if the run stays stopped.
        """
        self._changed = self.now()
        while True:
            job = self._newest(server)
            status = str(job["status"])
            if str(job["job_id"]) != self._job_id:
                self._job_id, self._since, self._state = str(job["job_id"]), 0, ""
            if status != self._state:
                self._state, self._changed = status, self.now()
                if status in ("SUBMITTED", "APPROVED", "DISPATCHED"):
                    self._starting(server)
            if status == "RUNNING":
                self._listen(server)
            elif status.startswith("FINISHED"):
                done = self._finished(server, job)
                if done is not None:
                    return done
            self.sleep(POLL_SECONDS)

    def _newest(self, server: Server) -> dict[str, Any]:
        ours = [job for job in server.jobs() if job.get("name") == self.run.name]
        if not ours:
            raise ConfigError(
                f"the server of {self.run.kit} does not know run {self.run.name}: it was deleted, "
                "or this is another server"
            )
        return max(ours, key=lambda job: float(job.get("submit_time") or 0))

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
            if plan != self._planned:
                self._planned = plan
                self.display.begin(Part("federated", self.run.sites, None), *plan)
        elif kind == "round" and self._planned is not None:
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
        if self._state == "FINISHED:ABORTED":
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
            problem = _json(made / PROBLEM)
            if problem and not problem.get("again"):
                raise FednotesError(f"run {self.run.name} stays stopped: {problem['problem']}")
            if problem:
                self.say(f"stopped: {problem['problem']}; the server hands it in again")
            summary = _json(made / "summary.json")
            if summary:
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


def _json(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}
