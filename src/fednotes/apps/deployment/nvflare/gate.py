"""Who may speak, and say what, to a kit's processes: NVFlare itself is content with
less.

- It knows one root, and no certificate that counts no more: `check_certificates` makes
  it judge as `certificates.py` does, `Connections` keeps the server's port shut to who
  counts no more, also where he came in before, and `TrustCourier` brings what the
  authority says from one process to another.
- Its server takes whoever bears a token for its owner, hands on what one member sends
  another, and tests the network with as many messages as any member says: `ServerGate`.
- Its site obeys whoever asks. The server itself may read any file of a site, delete
  folders of its kit and silence its log, for rights are checked only where the server
  asks a site to: `SiteGate` refuses every request of other members, and of the server's
  those that no run needs.
- To it the signature of any certificate of the project is a submitter's, the server's
  and each site's too: `require_admins_signature`.
- The processes of a kit are connected by a port on loopback, in clear, at which every
  user of the machine may speak in whoever's name. Here it is `KIT/inside/socket`, in a
  folder that is closed to others; and who connects is judged by the account that the
  system tells of him. NVFlare finds the driver by its scheme, which `comm_config.json`
  in the kit names.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any

from fednotes.apps.deployment.nvflare.certificates import Trust, names_of, settle, take
from fednotes.apps.deployment.nvflare.kit import INSIDE
from fednotes.apps.deployment.nvflare.processes import JOB_ID, KIT_VARIABLE
from fednotes.core.errors import FednotesError, RefusedError, needs

with needs("nvflare", "deploy"):
    from cryptography.x509 import load_pem_x509_certificate
    from nvflare.apis.event_type import EventType
    from nvflare.apis.fl_component import FLComponent
    from nvflare.apis.fl_context import FLContext
    from nvflare.fuel.f3.cellnet import defs as cells
    from nvflare.fuel.f3.cellnet.core_cell import CoreCell, make_reply
    from nvflare.fuel.f3.communicator import driver_mgr
    from nvflare.fuel.f3.connection import Connection, ConnState
    from nvflare.fuel.f3.drivers.driver import ConnectorInfo
    from nvflare.fuel.f3.drivers.driver_params import DriverCap
    from nvflare.fuel.f3.drivers.socket_conn import ConnectionHandler, SocketConnection
    from nvflare.fuel.f3.drivers.tcp_driver import TcpDriver
    from nvflare.fuel.f3.message import Message
    from nvflare.fuel.utils.admin_name_utils import is_valid_admin_client_name
    from nvflare.lighter import utils
    from nvflare.private.admin_defs import Message as Order
    from nvflare.private.admin_defs import error_reply
    from nvflare.private.defs import RequestHeader, TrainingTopic
    from nvflare.private.fed.client.admin import RequestProcessor
    from nvflare.private.fed.client.admin_commands import AdminCommands
    from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
    from nvflare.private.fed.utils import identity_utils

NUMBER, SAID = "fednotes_trust_number", "fednotes_trust"  # headers
SUBMITTER = "project_admin"  # the role in a certificate whose signature a job needs
ORDERS = frozenset(  # of the server to a site's main process
    {
        *(
            TrainingTopic.CHECK_STATUS,
            TrainingTopic.CHECK_RESOURCE,
            TrainingTopic.CANCEL_RESOURCE,
        ),
        *(TrainingTopic.DEPLOY, TrainingTopic.START_JOB, TrainingTopic.ABORT),
        TrainingTopic.NOTIFY_JOB_STATUS,
    }
)
# to a job's process
JOB_ORDERS = frozenset({"check_status", "abort", "abort_task", "shutdown"})
NAMED = 100  # at most as many strangers are named in the log, each once
SOCKET = "socket"  # in the folder INSIDE of the kit
_LONGEST = 100  # bytes of a socket's path; some systems take no more
_BY_NVFLARE = utils.verify_cert_chain
# root → the folder that says which of its certificates count
_checked_roots: dict[Any, Path] = {}
logger = logging.getLogger("fednotes.gate")
_header = cells.MessageHeaderKey


def _refused(why: str) -> Message:
    """The reply that ends a message here."""
    return make_reply(cells.ReturnCode.UNAUTHENTICATED, error=why)


# ---- which certificates count --------------------------------------------------------


def check_certificates(startup: Path) -> None:
    """Let NVFlare, in this process, take a certificate of a kit's roots only while it
    counts.

    startup: the kit's folder. Roots that count no more are left out of it for good.
    """
    settle(startup.parent)
    for root in Trust.of(startup).roots:
        _checked_roots[root] = startup.resolve()
    utils.verify_cert_chain = identity_utils.verify_cert_chain = _verify


def _verify(
    leaf_cert: Any,
    intermediate_certs: Sequence[Any] | None,
    root_ca_cert: Any,
    now: Any = None,
) -> None:
    """In the place of NVFlare's function of the same arguments. Raises ValueError."""
    startup = _checked_roots.get(root_ca_cert)
    if startup is None:
        _BY_NVFLARE(leaf_cert, intermediate_certs, root_ca_cert, now)
    elif problem := Trust.of(startup).problem(leaf_cert, intermediate_certs or ()):
        logger.error(
            "the certificate of %s %s", ", ".join(names_of(leaf_cert)), problem
        )
        raise ValueError(f"the certificate {problem}")


_certificate = lru_cache(maxsize=256)(load_pem_x509_certificate)


class Connections:
    """The connections of the server's main process, less those whose certificates are
    over."""

    def __init__(self, startup: Path, core: CoreCell) -> None:
        self._startup, self._manager = startup, core.communicator.conn_manager
        self._hand_on = self._manager.state_change
        self._manager.state_change = self._changed
        core.add_incoming_filter("*", "*", self.judge)
        self.look()

    def look(self) -> None:
        """Close the connections of certificates that counted when they came in."""
        for name in list(self._manager.sfm_endpoints):
            # a connection that ends meanwhile; the looks go on
            with suppress(Exception):
                self._shut(name)

    def judge(self, message: Message) -> Message | None:
        """The reply that ends a message of a certificate that counts no more; None for
        others."""
        endpoint = message.get_prop(cells.MessagePropKey.ENDPOINT)
        if self._shut(getattr(endpoint, "name", "")):
            return _refused("counts no more")
        return None

    def _shut(self, name: str) -> bool:
        found = [
            c.conn
            for c in self._manager.get_connections(name) or ()
            if self._ended(c.conn)
        ]
        for connection in found:
            connection.close()
        return bool(found)

    def _changed(self, connection: Connection) -> None:
        """A connection came or went."""
        if connection.state == ConnState.CONNECTED and self._ended(connection):
            connection.close()
        else:
            self._hand_on(connection)

    def _ended(self, connection: Connection) -> bool:
        """Whether TLS took a certificate that counts no more; who has none is on this
        machine."""
        context = getattr(connection, "context", None)
        shown = (context.auth_context().get("x509_pem_cert") if context else None) or [
            b""
        ]
        if not shown[0]:
            return False
        certificate = _certificate(bytes(shown[0]))
        try:
            problem = Trust.of(self._startup).ended(certificate)
        except FednotesError as error:  # who counts is not known: nobody does
            problem = f"cannot be judged: {error}"
        if problem:
            logger.error(
                "a connection of %s was closed: its certificate %s",
                ", ".join(names_of(certificate)),
                problem,
            )
        return bool(problem)


class TrustCourier:
    """Tells another process which number this kit's trust has, and gives it what it
    lacks."""

    def __init__(self, kit: Path) -> None:
        self._kit, self._theirs = kit, dict[str, int]()

    def give(self, message: Message, to: str) -> None:
        """Add it to a message that leaves. to: a participant."""
        try:
            own = Trust.of(self._kit / "startup")
        except FednotesError:
            return
        message.set_header(NUMBER, own.number)
        if self._theirs.get(to, own.number) < own.number:
            root = own.roots[-1:]
            message.set_header(SAID, Trust(root, own.bridges, own.listed).pem())

    def hear(self, message: Message, of: str) -> None:
        """Read it from a message that came. of: a participant, by its certificate."""
        number, said = message.get_header(NUMBER), message.get_header(SAID)
        if not isinstance(number, int):
            return
        self._theirs[of] = number
        try:
            newer = number > Trust.of(self._kit / "startup").number
            if newer and isinstance(said, bytes) and take(self._kit, said):
                logger.info("what the authority says now was brought by %s", of)
        except Exception as error:
            logger.warning("what %s says of the authority was not taken: %s", of, error)


# ---- who says what -------------------------------------------------------------------


class ServerGate(FLComponent):
    """Makes the server's main process drop what a member sends in another's name, or
    tests with.

    NVFlare takes whoever bears a token for its owner, and the server's own token is in
    messages that every member gets. Its tests of the network send as many messages as
    any member says.
    """

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.SYSTEM_START:
            fl_ctx.get_engine().get_cell().core_cell.add_incoming_filter(
                "*", "*", self.judge
            )

    def judge(self, message: Message) -> Message | None:
        """The reply that ends a message here; None for one that may go on.

        A connection from outside has the name in its certificate, by TLS. An admin's
        session has a name of its own, which NVFlare lets no site take.
        """
        certified = message.get_prop(cells.MessagePropKey.COMMON_NAME)
        if certified in (None, "", "N/A"):
            # from a job's process, by the kit's own socket (`KitSocketDriver`)
            return None
        origin = str(message.get_header(_header.ORIGIN) or "")
        endpoint = message.get_prop(cells.MessagePropKey.ENDPOINT)
        own = is_valid_admin_client_name(origin) and origin == getattr(
            endpoint, "name", None
        )
        channel = str(message.get_header(_header.CHANNEL) or "")
        if (own or origin.partition(".")[0] == certified) and channel != "_net_manager":
            return None
        logger.error(
            "a message of %s in the name of %.80r was dropped", certified, origin
        )
        return _refused("not a member's to say")


def obey_the_server_only(fl_ctx: FLContext) -> None:
    """Let this process refuse every request that another member of the network sends
    it.

    The origin is the sender's own word, but the server has compared it with the
    sender's certificate before it hands a message on (`ServerGate`).
    """
    own, strangers = str(fl_ctx.get_identity_name()), set[str]()

    def judge(message: Message) -> Message | None:
        origin = str(message.get_header(_header.ORIGIN) or "")
        # they, and the processes of their jobs
        if origin.partition(".")[0] in ("server", own):
            return None
        if origin not in strangers and len(strangers) < NAMED:
            strangers.add(origin)
            logger.error(
                "a request of %.80r was refused: only the server gives orders", origin
            )
        return _refused("only the server gives orders")

    fl_ctx.get_engine().get_cell().core_cell.add_incoming_request_filter(
        "*", "*", judge
    )


class _OfAJob(RequestProcessor):
    """NVFlare's answer to an order, where that names a job as NVFlare does: its folder
    in the kit is deleted before a job comes, and so would be `rules`, `state` or
    `startup` by their names."""

    def __init__(self, inner: RequestProcessor) -> None:
        self._inner = inner

    def get_topics(self) -> list[str]:
        """Of what it is the answer to."""
        return list(self._inner.get_topics())

    def process(self, req: Order, app_ctx: Any) -> Order:
        """What is done, or why nothing is."""
        job = req.get_header(RequestHeader.JOB_ID)
        if job is not None and not JOB_ID.fullmatch(str(job)):
            logger.error(
                "an order of the server for %.80r was refused: no job's name", str(job)
            )
            return error_reply("no job's name")
        return self._inner.process(req, app_ctx)


def take_few_orders() -> None:
    """Let this process obey orders that a run needs, and no other, whoever gives them."""
    known = ClientRequestProcessors.request_processors
    kept = [each for each in known if ORDERS.issuperset(each.get_topics())]
    known[:] = [each if isinstance(each, _OfAJob) else _OfAJob(each) for each in kept]
    commands = AdminCommands.commands
    commands[:] = [each for each in commands if each.get_command_name() in JOB_ORDERS]


class SiteGate(FLComponent):
    """Makes a site's main process refuse other members' requests, and of the server's
    those that no run needs; of its local resources."""

    def __init__(self) -> None:
        super().__init__()
        take_few_orders()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.SYSTEM_START:
            obey_the_server_only(fl_ctx)


def require_admins_signature(app: Path, root: Path) -> None:
    """Raise RefusedError unless the project's admin signed every file of a job's
    folder.

    root: the certificate of the project's authority. A run that the watch hands in
    again keeps the signature of its first submission.
    """
    check_certificates(root.parent)
    verified, signers = utils.verify_folder_signature_and_get_signers(
        str(app), str(root)
    )
    if not verified or not signers:
        raise RefusedError(
            "the job's signature is not valid: it must be handed in again"
        )
    for name, _, role in signers:
        if role != SUBMITTER:
            raise RefusedError(
                f"the job was signed by {name!r}, who is no admin of the project"
            )


# ---- the connection inside a kit -----------------------------------------------------


@contextmanager
def address_in(folder: Path) -> Iterator[str]:
    """A path of the socket in a folder, short enough for the system however deep that
    lies."""
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

    def __init__(
        self, driver: KitSocketDriver, connector: ConnectorInfo, folder: Path
    ) -> None:
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
        told = request.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        _, user, _ = struct.unpack("3i", told)
        if user != os.getuid():
            logger.error(
                "user %d of this machine was refused at the inner socket", user
            )
        return bool(user == os.getuid())


class KitSocketDriver(TcpDriver):
    """NVFlare's driver for streams, over the kit's own socket."""

    @staticmethod
    def supported_transports() -> list[str]:
        """The scheme of its address."""
        return [INSIDE]

    @staticmethod
    def capabilities() -> dict[str, Any]:
        """As of any connection that is there until a process ends."""
        return {
            DriverCap.SEND_HEARTBEAT.value: True,
            DriverCap.SUPPORT_SSL.value: False,
        }

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


driver_mgr.register(KitSocketDriver)
