"""A site's end of NVIDIA FLARE: its job process, whose orders it takes, and whose jobs.

NVFlare itself is content with less than a site should be. Its server hands on what one member
sends another, and its client obeys whoever asks: `Gate` and the executor refuse every request
that comes from neither the server nor the site's own processes. The server itself may read any
file of a site, delete folders of its kit and silence its log, for NVFlare's site checks rights
only where the server asks it to: `take_few_orders` leaves what a run needs. And to it the
signature of any certificate of the project is a submitter's, the server's and each site's too: the
executor starts no host for a job that anyone but the project's admin signed.
"""

from __future__ import annotations

import hashlib
import logging
import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fednotes.core.errors import FednotesError, MissingExtra, RefusedError
from fednotes.engines import pipe
from fednotes.engines.host import explained, placeless, whole_line
from fednotes.engines.nvflare.certificates import CertificateIdentity
from fednotes.engines.nvflare.gate import heed
from fednotes.engines.nvflare.processes import JOB_ID
from fednotes.engines.nvflare.server import FRAME, REASON, TASK
from fednotes.engines.pipe import Host
from fednotes.rules.ledger import Entry, ledger_of, plain

try:
    from nvflare.apis.event_type import EventType
    from nvflare.apis.executor import Executor
    from nvflare.apis.fl_component import FLComponent
    from nvflare.apis.fl_constant import ReturnCode
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.shareable import Shareable, make_reply
    from nvflare.apis.signal import Signal
    from nvflare.fuel.f3.cellnet import defs as cells
    from nvflare.fuel.f3.cellnet.core_cell import make_reply as cell_reply
    from nvflare.fuel.f3.message import Message
    from nvflare.fuel.sec.audit import AuditService
    from nvflare.lighter.utils import verify_folder_signature_and_get_signers
    from nvflare.private.admin_defs import Message as Order
    from nvflare.private.admin_defs import error_reply
    from nvflare.private.defs import RequestHeader, TrainingTopic
    from nvflare.private.fed.client.admin import RequestProcessor
    from nvflare.private.fed.client.admin_commands import AdminCommands
    from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
except ImportError as error:
    raise MissingExtra("nvflare", "deploy") from error

RETRY_SECONDS = 10.0  # a site that refused a job is asked again: it may have been approved since
ROOT = Path("startup") / "rootCA.pem"
SUBMITTER = "project_admin"  # the role in a certificate whose signature a job needs
ORDERS = frozenset(  # of the server to a site's main process
    {
        *(TrainingTopic.CHECK_STATUS, TrainingTopic.CHECK_RESOURCE, TrainingTopic.CANCEL_RESOURCE),
        *(TrainingTopic.DEPLOY, TrainingTopic.START_JOB, TrainingTopic.ABORT),
        TrainingTopic.NOTIFY_JOB_STATUS,
    }
)
JOB_ORDERS = frozenset({"check_status", "abort", "abort_task", "shutdown"})  # to a job's process
NAMED = 100  # at most as many strangers are named in the log, each once
logger = logging.getLogger("fednotes.engines.nvflare.site")


def obey_the_server_only(fl_ctx: FLContext) -> None:
    """Let this process refuse every request that another member of the network sends it.

    The origin is the sender's own word, but the server has compared it with the sender's
    certificate before it hands a message on (`nvflare.Gate`).
    """
    own, strangers = str(fl_ctx.get_identity_name()), set[str]()

    def judge(message: Message) -> Message | None:
        origin = str(message.get_header(cells.MessageHeaderKey.ORIGIN) or "")
        if origin.partition(".")[0] in ("server", own):  # they, and the processes of their jobs
            return None
        if origin not in strangers and len(strangers) < NAMED:
            strangers.add(origin)
            logger.error("a request of %.80r was refused: only the server gives orders", origin)
        return cell_reply(cells.ReturnCode.UNAUTHENTICATED, error="only the server gives orders")

    fl_ctx.get_engine().get_cell().core_cell.add_incoming_request_filter("*", "*", judge)


class _OfAJob(RequestProcessor):
    """NVFlare's answer to an order, where that names a job as NVFlare does: its folder in the kit
    is deleted before a job comes, and so would be `rules`, `state` or `startup` by their names."""

    def __init__(self, inner: RequestProcessor) -> None:
        self._inner = inner

    def get_topics(self) -> list[str]:
        """Of what it is the answer to."""
        return list(self._inner.get_topics())

    def process(self, req: Order, app_ctx: Any) -> Order:
        """What is done, or why nothing is."""
        job = req.get_header(RequestHeader.JOB_ID)
        if job is not None and not JOB_ID.fullmatch(str(job)):
            logger.error("an order of the server for %.80r was refused: no job's name", str(job))
            return error_reply("no job's name")
        return self._inner.process(req, app_ctx)


def take_few_orders() -> None:
    """Let this process obey orders that a run needs, and no other, whoever gives them."""
    known = ClientRequestProcessors.request_processors
    kept = [each for each in known if ORDERS.issuperset(each.get_topics())]
    known[:] = [each if isinstance(each, _OfAJob) else _OfAJob(each) for each in kept]
    commands = AdminCommands.commands
    commands[:] = [each for each in commands if each.get_command_name() in JOB_ORDERS]


class Gate(FLComponent):
    """Makes a site's main process refuse other members' requests, and of the server's those that
    no run needs; of its local resources."""

    def __init__(self) -> None:
        super().__init__()
        take_few_orders()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.SYSTEM_START:
            obey_the_server_only(fl_ctx)


def require_admins_signature(app: Path, root: Path) -> None:
    """Raise RefusedError unless the project's admin signed every file of a job's folder.

    root: the certificate of the project's authority. A run that the watch hands in again keeps
    the signature of its first submission.
    """
    heed(root.parent)
    verified, signers = verify_folder_signature_and_get_signers(str(app), str(root))
    if not verified or not signers:
        raise RefusedError("the job's signature is not valid: it must be handed in again")
    for name, _, role in signers:
        if role != SUBMITTER:
            raise RefusedError(f"the job was signed by {name!r}, who is no admin of the project")


class FednotesExecutor(Executor):
    """A site's job process: one host, from the first frame to the end of the job."""

    def __init__(self) -> None:
        super().__init__()
        take_few_orders()
        self._host: Host | None = None
        self._held = ExitStack()
        self._refused, self._again = "", 0.0  # why the host did not start; when to try again
        self._kit: Path | None = None  # whose ledger has what leaves
        self._site = self._run = "-"

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        """Hand a frame to the host. What goes wrong here is told without the data it met."""
        frame = shareable.get(FRAME)
        if task_name != TASK or not isinstance(frame, bytes):
            return make_reply(ReturnCode.TASK_UNKNOWN)
        try:
            if self._host is None and time.monotonic() >= self._again:
                self._host = self._start(fl_ctx)
            if self._host is not None:
                return Shareable({FRAME: self._host.handle(frame)})
            reason = self._refused
        except FednotesError as error:
            logger.error("%s", whole_line(error, self._site))
            reason = placeless(explained(error, self._site))
        except Exception as error:
            reason = f"an error in the site's program: {pipe.place_of(error)}"
            logger.error("%s", reason)
        if self._host is None and reason is not self._refused:
            self._refused, self._again = reason, time.monotonic() + RETRY_SECONDS
        return make_reply(ReturnCode.EXECUTION_EXCEPTION, headers=self._noted(reason))

    def _noted(self, reason: str) -> dict[str, str]:
        """A reason as it leaves: once the ledger has it, and not at all if it cannot."""
        raw = reason.encode()
        digest, run = hashlib.sha256(raw).hexdigest(), plain(self._run)
        now = datetime.now(UTC)
        entry = Entry(now, run, 0, "-", "server", (), len(raw), digest, refusal=True)
        try:
            if self._kit is None:
                return {}
            ledger_of(self._kit).append(entry)
        except Exception as error:
            logger.error("%s", whole_line(error, self._site))
            return {}
        return {REASON: reason}

    def _start(self, fl_ctx: FLContext) -> Host:
        workspace = fl_ctx.get_workspace()
        app, kit = Path(workspace.get_app_dir(fl_ctx.get_job_id())), Path(workspace.get_root_dir())
        self._kit, self._site = kit, str(fl_ctx.get_identity_name())
        self._run = str(fl_ctx.get_job_id())
        require_admins_signature(app, kit / ROOT)
        setup = pipe.read_setup(app, kit, fl_ctx.get_identity_name(), fl_ctx.get_job_id())
        self._run = setup.run
        setup = replace(setup, identity=CertificateIdentity.of_kit(kit))
        self._held.enter_context(pipe.only_one(setup.state))
        try:
            host: Host = pipe.load_main(pipe.SITE_MAIN)(setup)
        except BaseException:
            self._held.close()
            raise
        logger.info("takes part in run %s", setup.run)
        return host

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN:
            obey_the_server_only(fl_ctx)
            AuditService.close()  # of this job's process: the ledger tells what left
        if event_type == EventType.END_RUN and self._host is not None:
            host, self._host = self._host, None
            with self._held:
                host.close()
            logger.info("run %s: its process here has ended", self._run)
