"""Who is connected: what a site and the server know about each other.

    KIT/state/contact.json      what a site's process knows about the server: `pid`,
                                `since`, `last` and `refused` (times in seconds since
                                the epoch)

A site's process records whether the server answers. The server admits no second process
of a site. A copy of a kit has the site's key, and NVFlare would silently let it
impersonate the site: there would be two ledgers and two states, and the server's
messages would go to whichever process connected last.

The server's process also watches its runs (`watch.py`).
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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.cellnet import defs as cells
from nvflare.fuel.f3.cellnet.core_cell import make_reply
from nvflare.fuel.f3.message import Message
from nvflare.fuel.sec.audit import AuditService

from fednotes.apps.deployment.nvflare.gate import (
    Connections,
    TrustCourier,
    install_certificate_check,
)
from fednotes.apps.deployment.nvflare.processes import (
    CONTACT_FILE,
    LOST_SECONDS,
    NO_WATCH_VARIABLE,
    LastContact,
)
from fednotes.apps.deployment.nvflare.watch import LOOK_SECONDS, ServerJobs, Watch
from fednotes.apps.deployment.problems import mark_line
from fednotes.core.store import write_json, write_text

# Hashed with the kit's folder. Without it, the server could guess the folder.
SALT_FILE = Path("state") / "place"
_MACHINE = Path("/etc/machine-id")
KIT_LOCATION = "fednotes_place"  # header: hash of the location of the sender's kit
# In the server's kit: the sites whose second process was refused, with the time.
SECOND_FILE = Path("state") / "second.json"
_SECOND_PROCESS = (
    "another process of this site is connected, from another folder or machine: is "
    "there a copy of its kit? Stop one of the two (one that has just ended is "
    "forgotten after 20 s)"
)
_TOPICS = cells.CellChannelTopic
# Commands that change nothing, as NVFlare's audit names them.
_QUERIES = re.compile(
    r"(list_jobs|check_status|get_job_meta)\b|app_command \S+ fednotes\.progress"
)
logger = logging.getLogger("fednotes.presence")


# ---- contact -------------------------------------------------------------------------


@dataclass
class Contact:
    """Keeps a site's record of the server's answers, in memory and on disk.

    Attributes:
        kit: The site's kit.
        now: Returns the time in seconds since the epoch; tests replace it.
        known: The record.
        is_away: Whether the server does not answer.
        unanswered_since: When this process began to wait for the first answer; None
            once the server has answered or refused, or its silence was logged.
    """

    kit: Path
    now: Callable[[], float] = time.time
    known: LastContact = field(default_factory=lambda: LastContact(os.getpid()))
    is_away: bool = True
    unanswered_since: float | None = None

    def __post_init__(self) -> None:
        self.unanswered_since = self.now()

    def note_answer(self) -> None:
        """Record that the server answered."""
        now = self.now()
        was_away = self.is_away
        since = now if was_away else self.known.since
        self.known = LastContact(self.known.pid, since=since, last=now)
        self.is_away = False
        self.unanswered_since = None
        if was_away:
            logger.info("connected to the server")
            self._write()

    def note_refusal(self, reason: str) -> None:
        """Record that the server does not admit this process."""
        self.known = LastContact(self.known.pid, refused=reason)
        self.unanswered_since = None
        logger.error("the server refuses this site: %s", reason)
        self._write()

    def check_silence(self) -> None:
        """Write the record, and warn once if the server no longer answers."""
        silence = self.now() - self.known.last
        start = self.unanswered_since
        if start is not None and self.now() - start > LOST_SECONDS:
            self.unanswered_since = None
            logger.warning(
                "the server has not answered since this process was started, %.0f s "
                "ago; still trying (fednotes preflight KIT may say why)",
                self.now() - start,
                extra=mark_line("state"),
            )
        if not self.is_away and silence > LOST_SECONDS:
            logger.warning(
                "the server has not answered for %.0f s; still trying",
                silence,
                extra=mark_line("state"),
            )
        self.is_away = silence > LOST_SECONDS
        self._write()

    def _write(self) -> None:
        """Write the record to the kit."""
        with suppress(Exception):  # a full disk must not end the connection
            write_json(self.kit / CONTACT_FILE, asdict(self.known))


def call_repeatedly(function: Callable[[], object]) -> None:
    """Call a function every few seconds, in a thread, until the process ends.

    An error is logged, and the calls continue.
    """

    def loop() -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            try:
                function()
            except Exception as error:
                logger.warning("%s: %s", type(error).__name__, error)

    threading.Thread(target=loop, name="look", daemon=True).start()


def hash_kit_location(kit: Path) -> str:
    """Return a hash of the machine and the folder of a kit.

    A copy of the kit in another location has a different hash. The kit keeps its hash
    when it is started again or renewed. The hash reveals nothing else.
    """
    machine = _MACHINE.read_text(encoding="ascii") if _MACHINE.exists() else ""
    if not (kit / SALT_FILE).exists():
        write_text(kit / SALT_FILE, secrets.token_hex(16))
    salt = (kit / SALT_FILE).read_text(encoding="ascii")
    location = json.dumps([salt, os.uname().nodename, machine, str(kit.resolve())])
    return hashlib.sha256(location.encode()).hexdigest()[:32]


class Heartbeat(NamedTuple):
    """The last heartbeat of a site.

    Attributes:
        kit_location: Hash of the location of the kit that it came from.
        time: When it arrived, in seconds.
    """

    kit_location: str
    time: float


@dataclass
class Liveness:
    """Records which of a server's sites send heartbeats, and from where.

    Attributes:
        now: Returns a time in seconds; tests replace it.
        contacts: Site to its last heartbeat.
        silent: The sites whose silence was logged.
    """

    now: Callable[[], float] = time.monotonic
    contacts: dict[str, Heartbeat] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)

    def note_alive(self, site: str, kit_location: str) -> None:
        """Record a heartbeat of a site that the server admitted."""
        if site not in self.contacts or site in self.silent:
            logger.info("site %r is connected", site)
        self.silent.discard(site)
        self.contacts[site] = Heartbeat(kit_location, self.now())

    def note_left(self, site: str) -> None:
        """Record that a site has left."""
        if self.contacts.pop(site, None):
            logger.info("site %r has left", site)

    def check_silence(self) -> None:
        """Log each site that has become silent, once."""
        for site, heartbeat in list(self.contacts.items()):
            is_silent = self.now() - heartbeat.time > LOST_SECONDS
            if is_silent and site not in self.silent:
                self.silent.add(site)
                logger.warning(
                    "site %r has not been heard from for %.0f s",
                    site,
                    LOST_SECONDS,
                    extra=mark_line("state"),
                )

    def is_elsewhere(self, site: str, kit_location: str) -> bool:
        """Return whether a process of a site at another location sent a heartbeat.

        Such a process runs from a copy of the kit. Only recent heartbeats count.

        Args:
            site: The site.
            kit_location: Hash of the location of the kit that the message comes from.
        """
        heartbeat = self.contacts.get(site)
        if heartbeat is None or heartbeat.kit_location == kit_location:
            return False
        return self.now() - heartbeat.time < LOST_SECONDS


def _get_main_topic(message: Message) -> str:
    """Return the topic of a message between a site's and the server's main processes.

    For other messages, such as those of a job's processes, return "".
    """
    channel = message.get_header(cells.MessageHeaderKey.CHANNEL)
    if channel != cells.CellChannel.SERVER_MAIN:
        return ""
    return str(message.get_header(cells.MessageHeaderKey.TOPIC) or "")


def skip_queries_in_audit() -> None:
    """Keep commands that change nothing out of NVFlare's audit.

    A command that follows a run sends a query every second, and `audit.log` has no size
    limit.
    """
    auditor = AuditService.get_auditor()
    if auditor is None:
        return
    write = auditor.add_event

    def add_event(user: str, action: str, ref: str = "", msg: str = "") -> str:
        return "" if _QUERIES.match(action) else str(write(user, action, ref, msg))

    auditor.add_event = add_event


class SitePresence(FLComponent):
    """Records, in a site's main process, whether the server answers.

    It also sends the server a hash of the machine and folder of this process's kit, so
    that the server can refuse a second process.
    """

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Begin to record the server's answers when the process has started.

        This also installs the check of certificates.
        """
        if event_type != EventType.SYSTEM_BOOTSTRAP:
            return
        engine = fl_ctx.get_engine()
        kit = Path(engine.args.workspace)
        self._contact = Contact(kit)
        self._kit_location = hash_kit_location(kit)
        self._courier = TrustCourier(kit)
        install_certificate_check(kit / "startup")
        self._install_filters(engine.get_cell().core_cell)
        call_repeatedly(self._contact.check_silence)

    def _install_filters(self, core: Any) -> None:
        """Make NVFlare pass each request to the server, and each reply, to this object.

        Args:
            core: The core cell of NVFlare, which sends and receives messages.
        """
        # These filters are for all channels, because a filter for one channel would
        # replace NVFlare's own.
        core.add_outgoing_request_filter("*", "*", self.add_kit_location)
        core.add_incoming_reply_filter("*", "*", self.read_reply)

    def add_kit_location(self, message: Message) -> None:
        """Add the hash of the kit's location to a request to the server."""
        if _get_main_topic(message):
            message.set_header(KIT_LOCATION, self._kit_location)
            self._courier.attach(message, "server")

    def read_reply(self, message: Message) -> None:
        """Record from a reply of the server whether it admits this process."""
        topic = _get_main_topic(message)
        if topic:
            self._courier.receive(message, "server")
        code = message.get_header(cells.MessageHeaderKey.RETURN_CODE)
        if topic == _TOPICS.Register and code == cells.ReturnCode.UNAUTHENTICATED:
            reason = message.get_header(cells.MessageHeaderKey.ERROR)
            self._contact.note_refusal(str(reason or ""))
        elif topic == _TOPICS.HEART_BEAT and code == cells.ReturnCode.OK:
            self._contact.note_answer()


class ServerPresence(FLComponent):
    """Admits sites in the server's main process, and starts the watch of its runs."""

    def __init__(self) -> None:
        super().__init__()
        self._liveness = Liveness()
        self._kit = Path()
        # Site to the time when its second process was refused.
        self._refusal_times: dict[str, float] = {}

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Begin to check sites and to watch runs when the process has started.

        This also installs the check of certificates, and shortens NVFlare's audit.
        """
        if event_type != EventType.SYSTEM_START:
            return
        engine = fl_ctx.get_engine()
        core = engine.get_cell().core_cell
        self._kit = Path(engine.args.workspace)
        install_certificate_check(self._kit / "startup")
        self._courier = TrustCourier(self._kit)
        connections = Connections(self._kit / "startup", core)
        self._install_filters(core)
        self._start_checks(engine, connections)
        skip_queries_in_audit()

    def _install_filters(self, core: Any) -> None:
        """Make NVFlare pass each request of a site, and each reply, to this object.

        Args:
            core: The core cell of NVFlare, which sends and receives messages.
        """
        core.add_incoming_request_filter("*", "*", self.refuse_second_process)
        core.add_outgoing_reply_filter("*", "*", self.add_trust)

    def _start_checks(self, engine: Any, connections: Connections) -> None:
        """Start the checks that run every few seconds, and the watch of the runs.

        Args:
            engine: The server's NVFlare engine.
            connections: The connections of the server's process.
        """
        watch = Watch(self._kit / "state")
        call_repeatedly(self._liveness.check_silence)
        call_repeatedly(connections.close_withdrawn)
        if not os.environ.get(NO_WATCH_VARIABLE):
            call_repeatedly(lambda: watch.examine_runs(ServerJobs(engine)))

    def refuse_second_process(self, message: Message) -> Message | None:
        """Return a refusal for a second process of a site; None for other messages.

        Also record heartbeats and departures of sites.
        """
        site = str(message.get_prop(cells.MessagePropKey.COMMON_NAME) or "")
        kit_location = str(message.get_header(KIT_LOCATION) or "")
        topic = _get_main_topic(message)
        if not kit_location:
            # The message comes from a local process or an earlier version.
            return None
        self._courier.receive(message, site)
        is_elsewhere = self._liveness.is_elsewhere(site, kit_location)
        if topic == _TOPICS.Register:
            if is_elsewhere:
                self._record_second_process(site)
                return make_reply(
                    cells.ReturnCode.UNAUTHENTICATED, error=_SECOND_PROCESS
                )
            self._liveness.note_alive(site, kit_location)
        elif topic == _TOPICS.HEART_BEAT and not is_elsewhere:
            self._liveness.note_alive(site, kit_location)
        elif topic == _TOPICS.Quit:
            self._liveness.note_left(site)
        return None

    def add_trust(self, message: Message) -> None:
        """Add the newest trust list to a reply if the site lacks it."""
        if _get_main_topic(message) == _TOPICS.HEART_BEAT:
            receiver = message.get_header(cells.MessageHeaderKey.DESTINATION)
            site, _, _ = str(receiver or "").partition(".")
            self._courier.attach(message, site)

    def _record_second_process(self, site: str) -> None:
        """Log and store that a second process of a site was refused."""
        logger.warning(
            "a second process of site %r was refused: check whether its kit was copied",
            site,
        )
        self._refusal_times[site] = time.time()
        try:
            write_json(self._kit / SECOND_FILE, self._refusal_times)
        except Exception as error:
            logger.warning("%s", error)
