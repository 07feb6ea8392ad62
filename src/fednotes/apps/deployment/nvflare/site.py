"""A site's end of NVIDIA FLARE: its job process, which starts no host for a job that
anyone but the project's admin signed, and obeys the server alone (`gate.py`)."""

from __future__ import annotations

import hashlib
import logging
import time
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

from fednotes.apps.deployment.nvflare.certificates import ROOTS, CertificateIdentity
from fednotes.apps.deployment.nvflare.gate import (
    obey_the_server_only,
    require_admins_signature,
    take_few_orders,
)
from fednotes.apps.deployment.nvflare.server import FRAME, REASON, TASK
from fednotes.apps.deployment.rules.ledger import Entry, ledger_of, plain
from fednotes.core.errors import FednotesError
from fednotes.engines import launch
from fednotes.engines.host import explained, whole_line, without_folders
from fednotes.engines.launch import Host

# a site that refused a job is asked again: it may have been approved since
RETRY_SECONDS = 10.0
logger = logging.getLogger("fednotes.apps.deployment.nvflare.site")


class FednotesExecutor(Executor):
    """A site's job process: one host, from the first frame to the end of the job."""

    def __init__(self) -> None:
        super().__init__()
        take_few_orders()
        self._host: Host | None = None
        self._held = ExitStack()
        # why the host did not start; when to try again
        self._refused, self._again = "", 0.0
        self._kit: Path | None = None  # whose ledger has what leaves
        self._site = self._run = "-"

    def execute(
        self,
        task_name: str,
        shareable: Shareable,
        fl_ctx: FLContext,
        abort_signal: Signal,
    ) -> Shareable:
        """Hand a frame to the host.

        What goes wrong here is told without the data it met.
        """
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
            reason = without_folders(explained(error, self._site))
        except Exception as error:
            reason = f"an error in the site's program: {launch.place_of(error)}"
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
        app, kit = (
            Path(workspace.get_app_dir(fl_ctx.get_job_id())),
            Path(workspace.get_root_dir()),
        )
        self._kit, self._site = kit, str(fl_ctx.get_identity_name())
        self._run = str(fl_ctx.get_job_id())
        require_admins_signature(app, kit / "startup" / ROOTS)
        setup = launch.read_setup(
            app, kit, fl_ctx.get_identity_name(), fl_ctx.get_job_id()
        )
        self._run = setup.run
        setup = replace(setup, identity=CertificateIdentity.of_kit(kit))
        self._held.enter_context(launch.hold_state(setup.state))
        try:
            host: Host = launch.load_main(launch.SITE_MAIN)(setup)
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
