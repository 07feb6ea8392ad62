"""Who is connected, in the main processes of NVFlare: a site knows whether the server answers,
and the server lets no second process of a site in.

A copy of a kit has the site's own key, and NVFlare would let it take the site's place silently:
two ledgers, two states, and the server's messages to whoever came last.
"""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path

from fednotes.core.errors import MissingExtra
from fednotes.core.store import write_json
from fednotes.engines import inside  # noqa: F401 - by which a kit's processes are connected
from fednotes.engines.contact import Contact, Members, place_of, watch
from fednotes.engines.nvflare_trust import Carrier, Doors, heed

try:
    from nvflare.apis.event_type import EventType
    from nvflare.apis.fl_component import FLComponent
    from nvflare.apis.fl_context import FLContext
    from nvflare.fuel.f3.cellnet import defs as cells
    from nvflare.fuel.f3.cellnet.core_cell import make_reply
    from nvflare.fuel.f3.message import Message
    from nvflare.fuel.sec.audit import AuditService
except ImportError as error:
    raise MissingExtra("nvflare", "deploy") from error

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
    """Keep what changes nothing out of NVFlare's audit: the watch alone looks every 5 s, and
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
        watch(self._contact.look)

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
            watch(self._members.look)
            watch(doors.look)
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
