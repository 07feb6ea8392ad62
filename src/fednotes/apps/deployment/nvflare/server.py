"""NVIDIA FLARE as the pipe between real sites: one frame of bytes out, one back.

The server's job process runs a function that gets a `FlareTransport`; each site's job
process holds one host, an object with `handle(frame) -> bytes`, for as long as the job
lives. Which function and which host is the local operator's choice
(`launch.load_main`), never the job's: a job is a declaration and carries no code. Here
is the server's end and the admin's, the sites' is in `site.py`, and `gate.py` closes
what NVFlare, version 2.9, leaves open.
"""

from __future__ import annotations

import io
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fednotes.apps.deployment.nvflare.gate import check_certificates
from fednotes.core.errors import FednotesError, RefusedError, TrainingError, needs
from fednotes.engines import launch
from fednotes.engines.launch import Setup

with needs("nvflare", "deploy"):
    from nvflare.apis.client import Client
    from nvflare.apis.controller_spec import ClientTask, Task
    from nvflare.apis.fl_constant import ReturnCode
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.impl.controller import Controller
    from nvflare.apis.shareable import Shareable
    from nvflare.apis.signal import Signal
    from nvflare.apis.wf_comm_spec import WFCommSpec
    from nvflare.fuel.sec.audit import AuditService

T = TypeVar("T")
Frame = bytes | bytearray | memoryview
TASK = "exchange"
FRAME = "frame"  # the key of the bytes in a Shareable
REASON = "fednotes_reason"  # header: why a site has no reply
# what an admin may ask a running job
PROGRESS, PAUSE = "fednotes.progress", "fednotes.pause"
LOST_SECONDS = 30.0  # a site's job process tells every 5 s that it lives
# NVFlare's codes for a site without a reply, where the site has no words of its own
FAILED = {
    ReturnCode.EXECUTION_EXCEPTION: "its process failed: see its log (a full disk?)",
    ReturnCode.TASK_UNKNOWN: "it does not know this task: does it run this version?",
    ReturnCode.TASK_ABORTED: "its process was told to stop",
}
COMMAND_SECONDS = 60.0  # a server that moves large frames is slow to answer an admin
# while NVFlare's server waits for a job's process it does nothing else
TELL_SECONDS = 5.0
CHECK_PERIOD = 0.02  # seconds between two looks at a standing task
logger = logging.getLogger("fednotes.apps.deployment.nvflare.server")


@dataclass(slots=True)
class FlareExchange:
    """The replies of one exchange as they come in; NVFlare calls `receive` in its
    threads."""

    sites: tuple[str, ...]
    new: list[tuple[str, bytes]] = field(default_factory=list)  # not yet handed on
    answered: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)  # site → why it has no reply
    changed: threading.Condition = field(default_factory=threading.Condition)

    def receive(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        result, site = client_task.result, client_task.client.name
        frame = result.get(FRAME)
        with self.changed:
            if result.get_return_code() == ReturnCode.OK and isinstance(frame, bytes):
                self.new.append((site, frame))
                self.answered.add(site)
            else:
                code = str(result.get_return_code())
                self.failed[site] = str(
                    result.get_header(REASON) or FAILED.get(code, code)
                )
            client_task.result = None  # the frame is kept once
            self.changed.notify_all()

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(
            s for s in self.sites if s not in self.answered and s not in self.failed
        )

    def take(self) -> list[tuple[str, bytes]]:
        """What came since the last call."""
        taken, self.new = self.new, []
        return taken


class FlareTransport:
    """Frames to several sites, and their replies, over a job of NVFlare (a
    `Transport`)."""

    def __init__(
        self,
        controller: FednotesController,
        fl_ctx: FLContext,
        stop: Signal,
        setup: Setup,
    ) -> None:
        self._controller, self._fl_ctx, self._stop, self._setup = (
            controller,
            fl_ctx,
            stop,
            setup,
        )
        # of the last exchange: site → why it has no reply
        self.failed: Mapping[str, str] = {}
        # set: end the run at the next checkpoint, it goes on later
        self.pause = threading.Event()
        self.lines: list[Mapping[str, Any]] = []

    def exchange(
        self,
        frames: Mapping[str, Frame],
        *,
        timeout: float,
        grace: float,
        enough: int,
    ) -> Iterator[tuple[str, bytes]]:
        """Send each site its frame, and give (site, reply) as replies come.

        Sites that are sent the same have the same object. Ends when every site has
        answered or failed or is lost, `grace` seconds after `enough` replies came, or
        after `timeout` seconds, whichever is first: the caller judges whether those
        that answered are enough. A later reply is dropped. Raises TrainingError if the
        job is stopped meanwhile.
        """
        exchange = FlareExchange(tuple(frames))
        tasks = self._send(exchange, frames, math.ceil(timeout) + 5)
        try:
            yield from self._replies(exchange, timeout, grace, enough)
        finally:
            for task in tasks:
                self._controller.cancel_task(task)
            self._controller.communicator.check_tasks()  # frees the tasks' frames now
            self.failed = dict(exchange.failed)

    def _send(
        self, exchange: FlareExchange, frames: Mapping[str, Frame], guard: int
    ) -> list[Task]:
        """One task for each distinct frame. guard: seconds after which NVFlare drops
        it."""
        groups: dict[int, list[str]] = {}
        for site, frame in frames.items():
            groups.setdefault(id(frame), []).append(site)
        tasks = []
        for sites in groups.values():
            # NVFlare copies a task's data deeply for the first site; immutable bytes
            # are shared.
            data = Shareable({FRAME: bytes(frames[sites[0]])})
            task = Task(TASK, data, timeout=guard, result_received_cb=exchange.receive)
            self._controller.broadcast(
                task, self._fl_ctx, sites, min_responses=len(sites)
            )
            tasks.append(task)
        return tasks

    def _replies(
        self, exchange: FlareExchange, timeout: float, grace: float, enough: int
    ) -> Iterator[tuple[str, bytes]]:
        end, closing = time.monotonic() + timeout, math.inf
        while True:
            with exchange.changed:
                if len(exchange.answered) >= enough:
                    closing = min(closing, time.monotonic() + grace)
                left = min(end, closing) - time.monotonic()
                over = left <= 0 or all(self.lost(site) for site in exchange.missing)
                if not exchange.new and not over:
                    exchange.changed.wait(min(left, 0.5))
                taken = exchange.take()
            if self._stop.triggered:
                raise TrainingError("the job was stopped")
            yield from taken
            if over:
                return

    def lost(self, site: str) -> bool:
        """Whether a site is not in this submission, or silent for too long to be alive.

        A site that comes back has to wait for the next submission.
        """
        return self._controller.silence(site) > LOST_SECONDS

    def present(self) -> tuple[str, ...]:
        """The sites that take part in this submission, in the job's order."""
        return tuple(site for site in self._setup.sites if not self.lost(site))

    def publish(self, line: Mapping[str, Any]) -> None:
        """A line of progress (JSON values, no note text) for whoever watches the job."""
        self.lines.append(dict(line))
        if len(self.lines) == 1:
            # this submission gets somewhere
            launch.write_outcome(self._setup, "running", 1)

    def tell(self, topic: str, data: Any, fl_ctx: FLContext) -> dict[str, Any]:
        """Answer an admin: the lines from number `since` on, and who takes part."""
        if topic == PAUSE:
            self.pause.set()
        since = int((data or {}).get("since", 0)) if isinstance(data, dict) else 0
        return {"lines": self.lines[since:], "sites": list(self.present())}


class FednotesController(Controller):
    """The server's job process: runs the operator's server function over a transport."""

    def __init__(self, task_check_period: float = CHECK_PERIOD) -> None:
        super().__init__(task_check_period=task_check_period)
        self._contacts: dict[str, float] = {}  # site → when it was last heard of

    def set_communicator(self, communicator: WFCommSpec) -> None:
        """2.9.0 sets `task_check_period`, its communicator reads `_task_check_period`."""
        super().set_communicator(communicator)
        communicator._task_check_period = self._task_check_period
        told = communicator.client_is_active

        def active(client_name: str, reason: str, fl_ctx: FLContext) -> None:
            # Every request and heartbeat; NVFlare's own judgement takes more than a
            # minute.
            self._contacts[client_name] = time.monotonic()
            told(client_name, reason, fl_ctx)

        communicator.client_is_active = active

    def silence(self, site: str) -> float:
        """Seconds since a site was heard of; infinite for one that is not in this
        submission."""
        return time.monotonic() - self._contacts.get(site, -math.inf)

    def start_controller(self, fl_ctx: FLContext) -> None:
        """The run starts and ends with control_flow."""
        # of this job's process: two lines for each frame, without end
        AuditService.close()

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Nothing."""

    def process_result_of_unknown_task(
        self,
        client: Client,
        task_name: str,
        client_task_id: str,
        result: Shareable,
        fl_ctx: FLContext,
    ) -> None:
        """A reply to an exchange that is over."""
        logger.info("a late reply of %s was dropped", client.name)

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Run the job; its outcome is told to NVFlare and kept with the run's state."""
        workspace = self._engine.get_workspace()
        job_id, kit = fl_ctx.get_job_id(), Path(workspace.get_root_dir())
        try:
            setup = launch.read_setup(
                Path(workspace.get_app_dir(job_id)), kit, "", job_id
            )
        except FednotesError as error:
            self.system_panic(str(error), fl_ctx)
            return
        transport = FlareTransport(self, fl_ctx, abort_signal, setup)
        for topic in (PROGRESS, PAUSE):
            self._engine.register_app_command(topic, transport.tell)
        now = time.monotonic()  # those that were deployed have some time to begin
        self._contacts.update(
            {client.name: now for client in self._engine.get_clients()}
        )
        launch.write_outcome(setup, "running", 0)
        problem, retry = "", False
        try:
            with launch.hold_state(setup.state):
                launch.load_main(launch.SERVER_MAIN)(setup, transport)
        except FednotesError as error:
            problem, retry = str(error), isinstance(error, TrainingError)
        except Exception as error:
            problem, retry = f"an error in this program: {launch.place_of(error)}", True
            logger.exception("the server's part of the job failed")
        if abort_signal.triggered:
            # told to stop, or NVFlare lost too many sites: what was kept last stands
            return
        done = "paused" if transport.pause.is_set() else "done"
        status = "failed" if problem else done
        launch.write_outcome(setup, status, len(transport.lines), problem, retry=retry)
        if problem:
            logger.error("%s", problem)
            self.system_panic(problem, fl_ctx)


class Admin:
    """What an admin's kit may ask of the server, and the server's own in part."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def submit(self, folder: Path) -> str:
        """Sign a job folder and hand it in; its id."""
        return self._ask(lambda s: str(s.submit_job(str(folder.resolve()))))

    def resubmit(self, job_id: str) -> str:
        """Run a job once more, under a new id and the first signature."""
        return self._ask(lambda s: str(s.clone_job(job_id)))

    def status(self, job_id: str) -> str:
        """SUBMITTED, DISPATCHED, RUNNING or FINISHED:…"""
        return self._ask(lambda s: str(s.get_job_status(job_id)))

    def jobs(self) -> list[dict[str, Any]]:
        """Every job that the server knows, with job_id, name, status, submit_time, …"""
        return self._ask(lambda s: list(s.list_jobs(detailed=True)))

    def sites(self, within: float = math.inf) -> tuple[str, ...]:
        """The sites that the server heard of in the last `within` seconds (by its own
        clock).

        NVFlare itself calls a site connected for a minute after its last sign of life.
        """
        after = time.time() - within
        clients = self._ask(lambda s: s.get_connected_client_list())
        return tuple(
            sorted(c.name for c in clients if float(c.last_connect_time) > after)
        )

    def tell(
        self, job_id: str, topic: str = PROGRESS, since: int = 0
    ) -> dict[str, Any] | None:
        """Ask a running job for its lines and sites, or to pause.

        None if the server has no process of this job; an empty reply while it starts or
        ends.
        """
        self._session.set_timeout(TELL_SECONDS)
        try:
            return self._ask(
                lambda s: dict(s.do_app_command(job_id, topic, {"since": since}))
            )
        except TrainingError as error:
            reason = type(error.__cause__).__name__
            if reason == "JobNotRunning":
                return None
            # NoConnection is also NVFlare's word for a late reply; other questions tell
            # which.
            if reason not in (
                "NoReply",
                "NoConnection",
            ) and "no app command" not in str(error):
                raise
            return {"lines": [], "sites": []}
        finally:
            self._session.set_timeout(COMMAND_SECONDS)

    def abort(self, job_id: str) -> None:
        self._ask(lambda s: s.abort_job(job_id))

    def fetch(self, job_id: str, out: Path) -> Path:
        """The server's folder of a finished job."""
        return (
            Path(self._ask(lambda s: s.download_job_result(job_id, str(out))))
            / "workspace"
        )

    def _ask(self, command: Callable[[Any], T]) -> T:
        from nvflare.fuel.flare_api import api_spec

        try:
            return command(self._session)
        except (api_spec.NoConnection, api_spec.SessionClosed) as error:
            raise TrainingError("the connection to the server is lost") from error
        except api_spec.AuthorizationError as error:
            raise RefusedError(f"the server refuses this: {error}") from error
        except Exception as error:  # the API raises whatever the server sends
            raise TrainingError(f"the server answers: {error}") from error


@contextmanager
def connect(kit: Path, person: str, timeout: float = 10.0) -> Iterator[Admin]:
    """A session with the server by the certificate of a kit; no password, no prompt,
    and none of NVFlare's words about the connection: what matters is raised.

    Raises TrainingError if the server does not answer or does not know the certificate.
    """
    from nvflare.fuel.flare_api.api_spec import AuthenticationError, NoConnection
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    check_certificates(kit / "startup")
    words = logging.getLogger("nvflare")
    words.addHandler(logging.NullHandler())
    words.propagate = False
    try:
        with redirect_stdout(io.StringIO()):
            session = new_secure_session(
                person,
                str(kit.resolve()),
                timeout=timeout,
                command_timeout=COMMAND_SECONDS,
            )
    except NoConnection as error:
        raise TrainingError(
            f"{kit}: the server does not answer: is it started?"
        ) from error
    except AuthenticationError as error:
        raise TrainingError(
            f"{kit}: the server does not know this certificate"
        ) from error
    try:
        yield Admin(session)
    finally:
        with suppress(Exception), redirect_stdout(io.StringIO()):
            session.close()
