"""The connection between the processes of one kit: a socket that only their owner can open.

NVFlare's own is a port on loopback, in clear, at which every user of the machine may speak in
whoever's name. Here it is `KIT/inside/socket`, in a folder that is closed to others; and who
connects is judged by the account that the system tells of him. Nothing listens inside a machine
any more: the server's one port is the only one.

NVFlare finds the driver by its scheme, which `comm_config.json` in the kit names; without it a
process does not start. `presence.py` imports this module, so that each of a kit's processes has it.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any

from fednotes.core.errors import MissingExtra
from fednotes.engines.kit_files import INSIDE
from fednotes.engines.seldom import KIT_VARIABLE

try:
    from nvflare.fuel.f3.communicator import driver_mgr
    from nvflare.fuel.f3.drivers.driver import ConnectorInfo
    from nvflare.fuel.f3.drivers.driver_params import DriverCap
    from nvflare.fuel.f3.drivers.socket_conn import ConnectionHandler, SocketConnection
    from nvflare.fuel.f3.drivers.tcp_driver import TcpDriver
except ImportError as error:
    raise MissingExtra("nvflare", "deploy") from error

SOCKET = "socket"  # in the folder INSIDE of the kit
_LONGEST = 100  # bytes of a socket's path; some systems take no more
logger = logging.getLogger("fednotes.engines.inside")


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
