"""What each of a kit's processes has: the connection between them, and who else is connected.

A site knows whether the server answers, and the server lets no second process of a site in. A copy
of a kit has the site's own key, and NVFlare would let it take the site's place silently: two
ledgers, two states, and the server's messages to whoever came last.

NVFlare's own connection between the processes of a kit is a port on loopback, in clear, at which
every user of the machine may speak in whoever's name. Here it is `KIT/inside/socket`, in a folder
that is closed to others; and who connects is judged by the account that the system tells of him.
Nothing listens inside a machine: the server's one port is the only one. NVFlare finds the driver by
its scheme, which `comm_config.json` in the kit names; without it a process does not start.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any

from fednotes.core.errors import MissingExtra
from fednotes.core.store import write_json
from fednotes.engines.nvflare.contact import Contact, Members, every_look, place_of
from fednotes.engines.nvflare.gate import Carrier, Doors, heed
from fednotes.engines.nvflare.kit import INSIDE
from fednotes.engines.nvflare.log import KIT_VARIABLE, UNWATCHED
from fednotes.engines.nvflare.watch import Jobs, Watch

try:
    from nvflare.apis.event_type import EventType
    from nvflare.apis.fl_component import FLComponent
    from nvflare.apis.fl_context import FLContext
    from nvflare.fuel.f3.cellnet import defs as cells
    from nvflare.fuel.f3.cellnet.core_cell import make_reply
    from nvflare.fuel.f3.communicator import driver_mgr
    from nvflare.fuel.f3.drivers.driver import ConnectorInfo
    from nvflare.fuel.f3.drivers.driver_params import DriverCap
    from nvflare.fuel.f3.drivers.socket_conn import ConnectionHandler, SocketConnection
    from nvflare.fuel.f3.drivers.tcp_driver import TcpDriver
    from nvflare.fuel.f3.message import Message
    from nvflare.fuel.sec.audit import AuditService
except ImportError as error:
    raise MissingExtra("nvflare", "deploy") from error

SOCKET = "socket"  # in the folder INSIDE of the kit
_LONGEST = 100  # bytes of a socket's path; some systems take no more
PLACE = "fednotes_place"  # header: where the sender's kit lies
SECOND_FILE = Path("state") / "second.json"  # at the server: site → when a second was refused
SECOND = (
    "another process of this site is connected, from another folder or machine: is there a copy "
    "of its kit? Stop one of the two (one that has just ended is forgotten after 20 s)"
)
_TOPICS = cells.CellChannelTopic
_LOOKS = re.compile(r"(list_jobs|check_status|get_job_meta)\b|app_command \S+ fednotes\.progress")
logger = logging.getLogger("fednotes.presence")


def _topic(message: Message) -> str:
    """The topic between a site's main process and the server's; "" of all other messages."""
    of_them = message.get_header(cells.MessageHeaderKey.CHANNEL) == cells.CellChannel.SERVER_MAIN
    return str(message.get_header(cells.MessageHeaderKey.TOPIC) or "") if of_them else ""


def audit_no_looks() -> None:
    """Keep what changes nothing out of NVFlare's audit: who watches a run looks every second, and
    `audit.log` has no end."""
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
        self._carrier = Carrier(kit)
        heed(kit / "startup")
        core = fl_ctx.get_engine().get_cell().core_cell
        # Of everything: a filter of one channel would stand in the place of NVFlare's own.
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
            self._contact.refused(str(message.get_header(cells.MessageHeaderKey.ERROR) or ""))
        elif topic == _TOPICS.HEART_BEAT and code == cells.ReturnCode.OK:
            self._contact.heard()


class ServerPresence(FLComponent):
    """Of the server's main process."""

    def __init__(self) -> None:
        super().__init__()
        self._members = Members()
        self._kit = Path()
        self._seconds: dict[str, float] = {}

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.SYSTEM_START:
            self._kit = Path(fl_ctx.get_engine().args.workspace)
            core = fl_ctx.get_engine().get_cell().core_cell
            heed(self._kit / "startup")
            self._carrier, doors = Carrier(self._kit), Doors(self._kit / "startup", core)
            core.add_incoming_request_filter("*", "*", self.judge)
            core.add_outgoing_reply_filter("*", "*", self.tell)
            runs, engine = Watch(self._kit / "state"), fl_ctx.get_engine()
            every_look(self._members.look)
            every_look(doors.look)
            if not os.environ.get(UNWATCHED):
                every_look(lambda: runs.look(Jobs(engine)))
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
        logger.warning("a second process of site %r was refused: is there a copy of its kit?", site)
        self._seconds[site] = time.time()
        try:
            write_json(self._kit / SECOND_FILE, self._seconds)
        except Exception as error:
            logger.warning("%s", error)


# ---- the connection inside a kit ------------------------------------------------------------


@contextmanager
def address_in(folder: Path) -> Iterator[str]:
    """A path of the socket in a folder, short enough for the system however deep that lies."""
    path = str(folder / SOCKET)
    if len(os.fsencode(path)) <= _LONGEST:
        yield path
        return
    held = os.open(folder, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{held}/{SOCKET}"
    finally:
        os.close(held)


class _Listener(ThreadingUnixStreamServer):
    """The main process's end. ssl_context: none, which NVFlare's handler asks for."""

    ssl_context = None

    def __init__(self, driver: InsideDriver, connector: ConnectorInfo, folder: Path) -> None:
        self.driver, self.connector = driver, connector
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        (folder / SOCKET).unlink(missing_ok=True)  # of a process that was killed
        with address_in(folder) as address:
            super().__init__(address, ConnectionHandler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether the peer is of this process's own account, where the system tells."""
        if not hasattr(socket, "SO_PEERCRED"):
            return True
        told = request.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, user, _ = struct.unpack("3i", told)
        if user != os.getuid():
            logger.error("user %d of this machine was refused at the inner socket", user)
        return bool(user == os.getuid())


class InsideDriver(TcpDriver):
    """NVFlare's driver for streams, over the kit's own socket."""

    @staticmethod
    def supported_transports() -> list[str]:
        """The scheme of its address."""
        return [INSIDE]

    @staticmethod
    def capabilities() -> dict[str, Any]:
        """As of any connection that is there until a process ends."""
        return {DriverCap.SEND_HEARTBEAT.value: True, DriverCap.SUPPORT_SSL.value: False}

    @staticmethod
    def get_urls(scheme: str, resources: dict[str, Any]) -> tuple[str, str]:
        """One address for both ends: a kit's processes know which kit is theirs."""
        return f"{scheme}://kit", f"{scheme}://kit"

    def listen(self, connector: ConnectorInfo) -> None:
        """Serve the kit's socket until `shutdown`."""
        self.connector = connector
        self.server = _Listener(self, connector, _folder())
        self.server.serve_forever()

    def connect(self, connector: ConnectorInfo) -> None:
        """One connection to the kit's main process, until it ends."""
        self.connector = connector
        plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with address_in(_folder()) as address:
            plain.connect(address)
        connection = SocketConnection(plain, connector)
        self.add_connection(connection)
        connection.read_loop()
        self.close_connection(connection)


def _folder() -> Path:
    return Path(os.environ[KIT_VARIABLE]) / INSIDE


driver_mgr.register(InsideDriver)
