"""A kit's main process and the server: who is connected, and which run goes on.

    KIT/state/contact.json      pid, since, last, refused (times in seconds since 1970), of a site's
                                process, written by itself, of what reached it

A site knows whether the server answers, and the server lets no second process of a site
in. A copy of a kit has the site's own key, and NVFlare would let it take the site's
place silently: two ledgers, two states, and the server's messages to whoever came last.

The server also watches its runs: one that stopped goes on from its checkpoint, and
nobody has to come. It looks every few seconds:

    a submission failed, was killed, or its server      hand the same signed job in again
    was restarted
    a site is connected that does not take part         ask the job to pause at its next checkpoint,
    (it was lost)                                       then the same
    a person aborted a submission                       the run is over, and its outcome says so

A run that has to wait says in its outcome for what; one that waits for nothing is a
fault of the server's, which is told. What systemd and containers start again is the
server's process; which run was stopped, and which site can take part again, only that
process knows. A job that is handed in again keeps the admin's signature, which each
site checks.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import ServerCommandKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import RunStatus
from nvflare.fuel.f3.cellnet import defs as cells
from nvflare.fuel.f3.cellnet.core_cell import make_reply
from nvflare.fuel.f3.message import Message
from nvflare.fuel.sec.audit import AuditService
from nvflare.private.fed.server.job_cmds import CLONED_META_KEYS

from fednotes.apps.deployment.nvflare.gate import (
    Connections,
    TrustCourier,
    check_certificates,
)
from fednotes.apps.deployment.nvflare.kit import order_submissions
from fednotes.apps.deployment.nvflare.processes import (
    CONTACT_FILE,
    LOST_SECONDS,
    UNWATCHED,
    LastContact,
)
from fednotes.apps.deployment.nvflare.server import PAUSE, PROGRESS, TELL_SECONDS
from fednotes.core.store import write_json, write_text
from fednotes.engines.launch import OUTCOME_FILE, read_outcome

LOOK_SECONDS = 5.0
# or a server could find out where the kit lies by trying
SALT_FILE = Path("state") / "place"
_MACHINE = Path("/etc/machine-id")
PLACE = "fednotes_place"  # header: where the sender's kit lies
# at the server: site → when a second was refused
SECOND_FILE = Path("state") / "second.json"
SECOND = (
    "another process of this site is connected, from another folder or machine: is there a copy "
    "of its kit? Stop one of the two (one that has just ended is forgotten after 20 s)"
)
# seconds between two attempts; they begin at LOOK_SECONDS and double
LONGEST_WAIT = 300.0
RECENT_SECONDS = 15.0  # a site that is up tells the server so every 5 s
# for sites that are not there yet, before a run goes on without them
PATIENCE_SECONDS = 20.0
ATTEMPTS = 8  # submissions in a row that commit nothing
# a run that waits so long while nothing runs and its sites are there
STUCK_SECONDS = 120.0
ABORTED = "FINISHED:ABORTED"
Step = Literal["wait", "done", "resubmit", "pause", "give up"]
_TOPICS = cells.CellChannelTopic
_LOOKS = re.compile(
    r"(list_jobs|check_status|get_job_meta)\b|app_command \S+ fednotes\.progress"
)
logger = logging.getLogger("fednotes.presence")


# ---- contact -------------------------------------------------------------------------


@dataclass
class Contact:
    """Keeps what a site's process knows. now: the time, for tests."""

    kit: Path
    now: Callable[[], float] = time.time
    known: LastContact = field(default_factory=lambda: LastContact(os.getpid()))
    away: bool = True

    def heard(self) -> None:
        """The server answered."""
        now, first = self.now(), self.away
        self.known = LastContact(
            self.known.pid, now if first else self.known.since, now
        )
        self.away = False
        if first:
            logger.info("connected to the server")
            self._write()

    def refused(self, reason: str) -> None:
        """The server does not let this process in."""
        self.known = LastContact(self.known.pid, 0.0, 0.0, reason)
        logger.error("the server refuses this site: %s", reason)
        self._write()

    def look(self) -> None:
        """What changed since the last look."""
        silent = self.now() - self.known.last
        if not self.away and silent > LOST_SECONDS:
            logger.warning("the server has not answered for %.0f s; trying on", silent)
        self.away = silent > LOST_SECONDS
        self._write()

    def _write(self) -> None:
        with suppress(Exception):  # a full disk does not end the connection
            write_json(self.kit / CONTACT_FILE, asdict(self.known))


def every_look(look: Callable[[], object]) -> None:
    """Call `look` every few seconds, in a thread of its own, until the process ends."""

    def go_on() -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            try:
                look()
            except Exception as error:  # whatever it was, the next look is still needed
                logger.warning("%s: %s", type(error).__name__, error)

    threading.Thread(target=go_on, name="look", daemon=True).start()


def place_of(kit: Path) -> str:
    """Which folder of which machine a kit lies in, as a hash that says nothing else.

    A copy of a kit has another place; the same kit, started again or renewed, has the
    same.
    """
    machine = _MACHINE.read_text(encoding="ascii") if _MACHINE.exists() else ""
    if not (kit / SALT_FILE).exists():
        write_text(kit / SALT_FILE, secrets.token_hex(16))
    salt = (kit / SALT_FILE).read_text(encoding="ascii")
    where = json.dumps([salt, os.uname().nodename, machine, str(kit.resolve())])
    return hashlib.sha256(where.encode()).hexdigest()[:32]


@dataclass
class Liveness:
    """Where the processes of each site are, as the server hears of them. now: in
    seconds."""

    now: Callable[[], float] = time.monotonic
    # site → place, when
    heard: dict[str, tuple[str, float]] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)

    def alive(self, site: str, place: str) -> None:
        """A sign of life of a site that was let in."""
        if site not in self.heard or site in self.silent:
            logger.info("site %r is connected", site)
        self.silent.discard(site)
        self.heard[site] = place, self.now()

    def left(self, site: str) -> None:
        """A site said goodbye."""
        if self.heard.pop(site, None):
            logger.info("site %r has left", site)

    def look(self) -> None:
        """Say once of each site that it is silent."""
        for site, (_, when) in list(self.heard.items()):
            if site not in self.silent and self.now() - when > LOST_SECONDS:
                self.silent.add(site)
                logger.warning(
                    "site %r has not been heard of for %.0f s", site, LOST_SECONDS
                )

    def elsewhere(self, site: str, place: str) -> bool:
        """Whether a process of this site is alive in another place than this."""
        there, when = self.heard.get(site, ("", -LOST_SECONDS))
        return there not in ("", place) and self.now() - when < LOST_SECONDS


def _topic(message: Message) -> str:
    """The topic between a site's main process and the server's; "" of all other
    messages."""
    of_them = (
        message.get_header(cells.MessageHeaderKey.CHANNEL)
        == cells.CellChannel.SERVER_MAIN
    )
    return (
        str(message.get_header(cells.MessageHeaderKey.TOPIC) or "") if of_them else ""
    )


def audit_no_looks() -> None:
    """Keep what changes nothing out of NVFlare's audit: who watches a run looks every
    second, and `audit.log` has no end."""
    auditor = AuditService.get_auditor()
    if auditor is None:
        return
    write = auditor.add_event

    def add(user: str, action: str, ref: str = "", msg: str = "") -> str:
        return "" if _LOOKS.match(action) else str(write(user, action, ref, msg))

    auditor.add_event = add


class SitePresence(FLComponent):
    """Of a site's main process."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type != EventType.SYSTEM_BOOTSTRAP:
            return
        kit = Path(fl_ctx.get_engine().args.workspace)
        self._contact, self._place = Contact(kit), place_of(kit)
        self._carrier = TrustCourier(kit)
        check_certificates(kit / "startup")
        core = fl_ctx.get_engine().get_cell().core_cell
        # Of everything: a filter of one channel would stand in the place of NVFlare's
        # own.
        core.add_outgoing_request_filter("*", "*", self.tell)
        core.add_incoming_reply_filter("*", "*", self.heard)
        every_look(self._contact.look)

    def tell(self, message: Message) -> None:
        """Say to the server where this process is."""
        if _topic(message):
            message.set_header(PLACE, self._place)
            self._carrier.give(message, "server")

    def heard(self, message: Message) -> None:
        """A reply of the server to this process."""
        topic = _topic(message)
        if topic:
            self._carrier.hear(message, "server")
        code = message.get_header(cells.MessageHeaderKey.RETURN_CODE)
        if topic == _TOPICS.Register and code == cells.ReturnCode.UNAUTHENTICATED:
            self._contact.refused(
                str(message.get_header(cells.MessageHeaderKey.ERROR) or "")
            )
        elif topic == _TOPICS.HEART_BEAT and code == cells.ReturnCode.OK:
            self._contact.heard()


class ServerPresence(FLComponent):
    """Of the server's main process."""

    def __init__(self) -> None:
        super().__init__()
        self._members = Liveness()
        self._kit = Path()
        self._seconds: dict[str, float] = {}

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.SYSTEM_START:
            self._kit = Path(fl_ctx.get_engine().args.workspace)
            core = fl_ctx.get_engine().get_cell().core_cell
            check_certificates(self._kit / "startup")
            self._carrier, doors = (
                TrustCourier(self._kit),
                Connections(self._kit / "startup", core),
            )
            core.add_incoming_request_filter("*", "*", self.judge)
            core.add_outgoing_reply_filter("*", "*", self.tell)
            runs, engine = Watch(self._kit / "state"), fl_ctx.get_engine()
            every_look(self._members.look)
            every_look(doors.look)
            if not os.environ.get(UNWATCHED):
                every_look(lambda: runs.look(ServerJobs(engine)))
            audit_no_looks()

    def judge(self, message: Message) -> Message | None:
        """The reply that keeps a second process of a site out; None for all else."""
        site = str(message.get_prop(cells.MessagePropKey.COMMON_NAME) or "")
        place = str(message.get_header(PLACE) or "")
        topic = _topic(message)
        if not place:
            return None  # of this machine, or of another version
        self._carrier.hear(message, site)
        if topic == _TOPICS.Register:
            if self._members.elsewhere(site, place):
                self._refused(site)
                return make_reply(cells.ReturnCode.UNAUTHENTICATED, error=SECOND)
            self._members.alive(site, place)
        elif topic == _TOPICS.HEART_BEAT and not self._members.elsewhere(site, place):
            self._members.alive(site, place)
        elif topic == _TOPICS.Quit:
            self._members.left(site)
        return None

    def tell(self, message: Message) -> None:
        """Give a site with the reply what it lacks of the authority's words."""
        if _topic(message) == _TOPICS.HEART_BEAT:
            to = str(message.get_header(cells.MessageHeaderKey.DESTINATION) or "")
            self._carrier.give(message, to.partition(".")[0])

    def _refused(self, site: str) -> None:
        logger.warning(
            "a second process of site %r was refused: is there a copy of its kit?", site
        )
        self._seconds[site] = time.time()
        try:
            write_json(self._kit / SECOND_FILE, self._seconds)
        except Exception as error:
            logger.warning("%s", error)


# ---- the watch -----------------------------------------------------------------------


class ServerJobs:
    """What the watch asks of the server, in whose process it is. engine: NVFlare's."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._store = engine, engine.job_def_manager

    def jobs(self) -> list[dict[str, Any]]:
        """Every job that the server knows, with job_id, name, status, submit_time,
        deploy_map."""
        with self._engine.new_context() as context:
            return [dict(job.meta) for job in self._store.get_all_jobs(context)]

    def sites(self) -> frozenset[str]:
        """Those that the server heard of lately."""
        after = time.time() - RECENT_SECONDS
        clients = self._engine.get_clients()
        return frozenset(
            client.name for client in clients if client.last_connect_time > after
        )

    def tell(self, job_id: str, topic: str = PROGRESS) -> Mapping[str, Any] | None:
        """Ask a job for its sites, or to pause; None without a process of it, {} while
        it is slow to answer."""
        if job_id not in self._engine.run_processes:
            return None
        reply = self._engine.send_app_command(job_id, topic, {}, TELL_SECONDS)
        told = reply.get(ServerCommandKey.DATA) if reply is not None else None
        return told if isinstance(told, dict) else {}

    def resubmit(self, job: Mapping[str, Any]) -> None:
        """Run a job once more, under a new id and the first signature."""
        kept = {*CLONED_META_KEYS, "submitter_name", "submitter_org", "submitter_role"}
        meta = {key: job[key] for key in job.keys() & kept} | {
            "cloned_from": job["job_id"]
        }
        with self._engine.new_context() as context:
            self._store.clone(from_jid=job["job_id"], meta=meta, fl_ctx=context)

    def abort(self, job: Mapping[str, Any]) -> None:
        """End a job for good."""
        with self._engine.new_context() as context:
            if job["status"] == "RUNNING":
                self._engine.job_runner.stop_run(job["job_id"], context)
            else:
                self._store.set_status(
                    job["job_id"], RunStatus.FINISHED_ABORTED, context
                )


def next_step(
    status: str, alive: bool, outcome: Mapping[str, Any], back: frozenset[str]
) -> Step:
    """What a run needs.

    status: NVFlare's word for its newest submission. alive: the server has a process
        for it.
    outcome: what the submission itself kept last. back: sites that could take part and
        do not.
    """
    if status == ABORTED or outcome.get("status") == "done":
        # somebody's decision, or the end (NVFlare may wait for a lost site yet)
        return "done"
    if status == "RUNNING":
        if not alive:
            # its server was killed: NVFlare goes on to call it running
            return "resubmit"
        return "pause" if back else "wait"
    if not status.startswith("FINISHED"):
        return "wait"
    failed = outcome.get("status") == "failed"
    return "give up" if failed and not outcome.get("retry") else "resubmit"


@dataclass(slots=True)
class WatchedRun:
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
    runs: dict[str, WatchedRun] = field(default_factory=dict)

    def look(self, server: ServerJobs) -> dict[str, Step]:
        """One look at every run, and what it makes necessary.

        Returns run → step taken.
        """
        newest, aborted = dict[str, dict[str, Any]](), dict[str, str]()
        for job in order_submissions(server.jobs()):
            newest[str(job["name"])] = job
            if job["status"] == ABORTED:
                aborted[str(job["name"])] = str(job["job_id"])
        connected = server.sites()
        going = [
            run
            for run, job in newest.items()
            if job["status"] in ("RUNNING", "DISPATCHED")
        ]
        steps: dict[str, Step] = {}
        for run, job in newest.items():
            if run in aborted:
                steps[run] = self._over(server, run, job, aborted[run])
                continue
            if job["status"] == "SUBMITTED":
                self._waiting(run, job, going, connected)
            steps[run] = self._tend(server, run, job, connected)
        return steps

    def _over(
        self, server: ServerJobs, run: str, job: Mapping[str, Any], job_id: str
    ) -> Step:
        """A person's decision stands, whatever was handed in at the same moment."""
        if not str(job["status"]).startswith("FINISHED"):
            server.abort(job)
        path = self.state / run / OUTCOME_FILE
        if read_outcome(path.parent, job_id).get("status") != "aborted":
            write_json(path, {"job_id": job_id, "status": "aborted", "lines": 0})
            self._say(self.runs.setdefault(run, WatchedRun()), f"{run}: aborted")
        return "done"

    def _waiting(
        self,
        run: str,
        job: Mapping[str, Any],
        going: Sequence[str],
        connected: frozenset[str],
    ) -> None:
        """Keep for what a run waits that has not begun."""
        care, job_id = self.runs.setdefault(run, WatchedRun()), str(job["job_id"])
        absent = ", ".join(sorted(_sites(job) - connected))
        reason = (
            f"behind run {going[0]}" if going else f"for {absent}" if absent else ""
        )
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
        self,
        server: ServerJobs,
        run: str,
        job: Mapping[str, Any],
        connected: frozenset[str],
    ) -> Step:
        care = self.runs.setdefault(run, WatchedRun())
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
            self._say(
                care, f"{run}: {', '.join(sorted(back))} can take part again: pausing"
            )
            server.tell(job_id, PAUSE)
            care.pauses += 1
            care.no_pause_before = self.now() + 6 * _delay(care.pauses)
            return "pause"
        absent = sites - connected
        if (
            step == "resubmit"
            and absent
            and self.now() < care.stopped + PATIENCE_SECONDS
        ):
            # after a restart of the server the sites come back one by one
            return "wait"
        care.attempts = 0 if outcome.get("lines") else care.attempts + 1
        if step == "give up" or care.attempts > ATTEMPTS:
            why = (
                outcome.get("problem")
                or f"{ATTEMPTS} submissions in a row committed nothing"
            )
            self._say(care, f"{run}: stays stopped: {why}")
            return "give up"
        server.resubmit(job)
        self._say(
            care,
            f"{run}: {status} ({outcome.get('status', 'not begun')}): handed in again",
        )
        care.no_submit_before = self.now() + _delay(care.attempts)
        return "resubmit"

    def _say(self, care: WatchedRun, line: str) -> None:
        if line != care.said or "handed in" in line:
            logger.info("%s", line)
        care.said = line


def _sites(job: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(s for names in job["deploy_map"].values() for s in names) - {
        "server"
    }


def _delay(count: int) -> float:
    return float(min(LONGEST_WAIT, LOOK_SECONDS * 2**count))
