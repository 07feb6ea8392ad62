"""What a kit trusts, inside NVFlare: it knows one root, and no certificate that counts no more.

`heed` makes NVFlare judge certificates as `certificates.py` does: who registers, who logs in, whose
job it is, and whom a site takes for the server. `Doors` keeps the server's port shut to those that
count no more, also where they came in before. `Carrier` brings what the authority says from one
process to another.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from fednotes.core.errors import FednotesError, MissingExtra
from fednotes.engines.nvflare.certificates import Trust, names_of, settle, take

try:
    from nvflare.fuel.f3.cellnet import defs as cells
    from nvflare.fuel.f3.cellnet.core_cell import CoreCell
    from nvflare.fuel.f3.cellnet.core_cell import make_reply as cell_reply
    from nvflare.fuel.f3.connection import Connection, ConnState
    from nvflare.fuel.f3.message import Message
    from nvflare.lighter import utils
    from nvflare.private.fed.utils import identity_utils
except ImportError as error:
    raise MissingExtra("nvflare", "deploy") from error

NUMBER, SAID = "fednotes_trust_number", "fednotes_trust"  # headers
_BY_NVFLARE = utils.verify_cert_chain
_heeded: dict[Any, Path] = {}  # root → the folder that says which of its certificates count
logger = logging.getLogger("fednotes.trust")


def heed(startup: Path) -> None:
    """Let NVFlare, in this process, take a certificate of a kit's roots only while it counts.

    startup: the kit's folder. Roots that count no more are left out of it for good.
    """
    settle(startup.parent)
    for root in Trust.of(startup).roots:
        _heeded[root] = startup.resolve()
    utils.verify_cert_chain = identity_utils.verify_cert_chain = _verify


def _verify(
    leaf_cert: Any, intermediate_certs: Sequence[Any] | None, root_ca_cert: Any, now: Any = None
) -> None:
    """In the place of NVFlare's function of the same arguments. Raises ValueError."""
    startup = _heeded.get(root_ca_cert)
    if startup is None:
        _BY_NVFLARE(leaf_cert, intermediate_certs, root_ca_cert, now)
    elif problem := Trust.of(startup).problem(leaf_cert, intermediate_certs or ()):
        logger.error("the certificate of %s %s", ", ".join(names_of(leaf_cert)), problem)
        raise ValueError(f"the certificate {problem}")


class Doors:
    """The connections of the server's main process, less those whose certificates are over."""

    def __init__(self, startup: Path, core: CoreCell) -> None:
        self._startup, self._manager = startup, core.communicator.conn_manager
        self._hand_on = self._manager.state_change
        self._manager.state_change = self._changed
        core.add_incoming_filter("*", "*", self.judge)
        self.look()

    def look(self) -> None:
        """Close the connections of certificates that counted when they came in."""
        for name in list(self._manager.sfm_endpoints):
            with suppress(Exception):  # a connection that ends meanwhile; the looks go on
                self._shut(name)

    def judge(self, message: Message) -> Message | None:
        """The reply that ends a message of a certificate that counts no more; None for others."""
        endpoint = message.get_prop(cells.MessagePropKey.ENDPOINT)
        if self._shut(getattr(endpoint, "name", "")):
            return cell_reply(cells.ReturnCode.UNAUTHENTICATED, error="counts no more")
        return None

    def _shut(self, name: str) -> bool:
        found = [c.conn for c in self._manager.get_connections(name) or () if self._ended(c.conn)]
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
        """Whether TLS took a certificate that counts no more; who has none is on this machine."""
        context = getattr(connection, "context", None)
        shown = (context.auth_context().get("x509_pem_cert") if context else None) or [b""]
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


@lru_cache(maxsize=256)
def _certificate(pem: bytes) -> Any:
    from cryptography.x509 import load_pem_x509_certificate

    return load_pem_x509_certificate(pem)


class Carrier:
    """Tells another process which number this kit's trust has, and gives it what it lacks."""

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
