"""A site's end of NVIDIA FLARE: the process of one job at a site.

It starts no host for a job that anyone but the project's admin signed, and it obeys
only the server (`gate.py`).
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.fuel.sec.audit import AuditService

from fednotes.apps.deployment.nvflare.certificates import CertificateIdentity
from fednotes.apps.deployment.nvflare.gate import (
    limit_orders,
    obey_only_the_server,
    require_admins_signature,
)
from fednotes.apps.deployment.nvflare.processes import free_pieces_of
from fednotes.apps.deployment.nvflare.server import FRAME, REASON, TASK
from fednotes.apps.deployment.nvflare.trust import ROOTS_FILE
from fednotes.apps.deployment.problems import LineKind, mark_line
from fednotes.apps.deployment.rules.guard import NoRoom, NotApproved
from fednotes.apps.deployment.rules.ledger import Entry, Ledger, clean_name
from fednotes.core.errors import FednotesError, describe_place
from fednotes.engines import launch
from fednotes.engines.host import describe_error_to_staff, explain_error, remove_folders
from fednotes.engines.launch import MessageHandler

# The main function, unless the operator of the machine names another.
MAIN = "fednotes.apps.deployment.site:site_main"
# A site that refused a job is asked again, because it may have been approved since.
RETRY_SECONDS = 10.0
# Maximum number of ledger lines that a process writes without a host: for one reason,
# and in total. Otherwise a server that keeps asking would fill the disk. A repeated
# reason reveals nothing more.
SAME_REASON_LINES = 20
REASON_LINES = 1000
logger = logging.getLogger("fednotes.apps.deployment.nvflare.site")


class FednotesExecutor(Executor):
    """A site's job process: one host, from the first frame to the end of the job."""

    def __init__(self) -> None:
        super().__init__()
        limit_orders()
        self._host: MessageHandler | None = None
        self._held = ExitStack()  # holds the run's state as long as the host lives
        self._refusal = ""  # why the host did not start
        self._retry_at = 0.0
        self._kit: Path | None = None  # the kit whose ledger records what leaves
        self._site = "-"
        self._run = "-"
        self._reasons: Counter[str] = Counter()  # hashes of recorded reasons

    def execute(
        self,
        task_name: str,
        shareable: Shareable,
        fl_ctx: FLContext,
        abort_signal: Signal,  # noqa: ARG002 - NVFlare's signature
    ) -> Shareable:
        """Pass a frame to the host and return its reply.

        If a frame fails, the reply says why, without quoting data. After a failed
        start, the same reason is repeated until RETRY_SECONDS have passed.
        """
        frame = shareable.get(FRAME)
        if task_name != TASK or not isinstance(frame, bytes):
            return make_reply(ReturnCode.TASK_UNKNOWN)
        free_pieces_of(frame)
        try:
            host = self._get_or_start_host(fl_ctx)
            if host is not None:
                return Shareable({FRAME: host.handle(frame)})
            reason = self._refusal
        except NoRoom as error:
            logger.error("%s", describe_error_to_staff(error, self._site))
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        except Exception as error:
            reason = self._log_failure(error)
        return make_reply(
            ReturnCode.EXECUTION_EXCEPTION, headers=self._record_reason(reason)
        )

    def _get_or_start_host(self, fl_ctx: FLContext) -> MessageHandler | None:
        """Return the job's host after starting it if necessary.

        Returns:
            None after a failed start. `_refusal` then gives the reason, and the next
            start is tried after RETRY_SECONDS.

        Raises:
            NoRoom: The disk has no room. The next frame starts the host again.
        """
        if self._host is None and time.monotonic() >= self._retry_at:
            try:
                self._host = self._start_host(fl_ctx)
            except NoRoom:
                raise
            except Exception as error:
                self._refusal = self._log_failure(error)
                self._retry_at = time.monotonic() + RETRY_SECONDS
        return self._host

    def _log_failure(self, error: Exception) -> str:
        """Log why a frame failed, and return a reason that may leave the site."""
        if isinstance(error, FednotesError):
            kind: LineKind = "problem"
            level = logging.ERROR
            if isinstance(error, NotApproved):  # the site waits for a person
                kind = "state"
                level = logging.INFO
            logger.log(
                level,
                "%s",
                describe_error_to_staff(error, self._site),
                extra=mark_line(kind),
            )
            return remove_folders(explain_error(error, self._site))
        reason = f"an error in the site's program: {describe_place(error)}"
        logger.error("%s", reason)
        return reason

    def _record_reason(self, reason: str) -> dict[str, str]:
        """Record in the ledger why there is no reply, and return headers that say so.

        The reason may be sent only if the ledger can record it, or has already recorded
        it. After SAME_REASON_LINES lines, a repeated reason gets no further line.

        Args:
            reason: The reason, in words that may leave the site.

        Returns:
            The headers with which the reason is sent; {} if it may not be sent.
        """
        if self._kit is None:
            return {}
        raw = reason.encode()
        digest = hashlib.sha256(raw).hexdigest()
        is_full = self._reasons.total() >= REASON_LINES
        if is_full and digest not in self._reasons:
            logger.error(
                "the ledger already has %d refusals of this job; further ones are not "
                "recorded",
                REASON_LINES,
            )
            return {}
        entry = Entry(
            time=datetime.now(UTC),
            run=clean_name(self._run),
            round=0,
            task="-",
            receiver="server",
            tensors=(),
            bytes=len(raw),
            sha256=digest,
            refusal=True,
        )
        try:
            ledger = Ledger.in_kit(self._kit)
            needs_no_line = is_full or self._reasons[digest] >= SAME_REASON_LINES
            if needs_no_line:
                # This raises for an edited ledger, whose content is unknown.
                ledger.read_head()
            else:
                ledger.append(entry)
                self._reasons[digest] += 1
        except Exception as error:
            logger.error("%s", describe_error_to_staff(error, self._site))
            return {}
        return {REASON: reason}

    def _start_host(self, fl_ctx: FLContext) -> MessageHandler:
        """Check the signature of the job, hold the run's state, and start the host.

        Raises:
            FednotesError: The job is not signed, not approved, or cannot run here.
        """
        workspace = fl_ctx.get_workspace()
        app = Path(workspace.get_app_dir(fl_ctx.get_job_id()))
        kit = Path(workspace.get_root_dir())
        self._kit = kit
        self._site = str(fl_ctx.get_identity_name())
        self._run = str(fl_ctx.get_job_id())
        require_admins_signature(app, kit / "startup" / ROOTS_FILE)
        setup = launch.read_setup(
            app, kit, fl_ctx.get_identity_name(), fl_ctx.get_job_id()
        )
        self._run = setup.run
        setup = replace(setup, identity=CertificateIdentity.read(kit))
        self._held.enter_context(launch.holding_state(setup.state))
        try:
            host: MessageHandler = launch.load_main(launch.SITE_MAIN, MAIN)(setup)
        except BaseException:
            self._held.close()
            raise
        logger.info("takes part in run %s", setup.run, extra=mark_line("solution"))
        return host

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Prepare the process when a run starts; close the host when the run ends."""
        if event_type == EventType.START_RUN:
            obey_only_the_server(fl_ctx)
            AuditService.close()  # NVFlare's audit file; the ledger records what left
        if event_type == EventType.END_RUN and self._host is not None:
            host = self._host
            self._host = None
            with self._held:
                host.close()
            logger.info("run %s: its process here has ended", self._run)
