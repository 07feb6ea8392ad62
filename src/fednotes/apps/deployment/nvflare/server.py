"""NVIDIA FLARE as a pipe between real sites: one frame of bytes each way.

The server's job process runs a function that gets a `FlareTransport`. Each site's job
process holds one host, an object with `handle(frame) -> bytes`, for as long as the job
lives. The local operator chooses the function and the host (`launch.load_main`), never
the job: a job is a declaration and carries no code.

This module has the server's end and the admin's. The sites' end is in `site.py`.
`gate.py` adds the checks that NVFlare 2.9 lacks.
"""

from __future__ import annotations

import gc
import io
import logging
import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fednotes.apps.deployment.nvflare.gate import (
    install_certificate_check,
    limit_transfers,
    limit_unfinished_messages,
    outlive_unreadable_results,
    permitting_download,
    permitting_upload,
    shorten_debug_texts,
)
from fednotes.apps.deployment.nvflare.large_replies import receive_into_files
from fednotes.apps.deployment.nvflare.processes import return_free_memory
from fednotes.core.cleaning import clean
from fednotes.core.errors import (
    FednotesError,
    RefusedError,
    TrainingError,
    describe_place,
    needs,
)
from fednotes.core.store import LARGE_BYTES
from fednotes.core.stored_bytes import StoredBytes
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
# As in `core/messages.py`, without torch, which a kit's main process does not need.
Frame = bytes | bytearray | memoryview
ReceivedFrame = Frame | StoredBytes
# The default main function; the machine's operator may name another.
MAIN = "fednotes.apps.deployment.server:server_main"
TASK = "exchange"
FRAME = "frame"  # key of the bytes in a Shareable
REASON = "fednotes_reason"  # header of a site's reply: why it contains no frame
# The commands that an admin may send to a running job.
PROGRESS = "fednotes.progress"
PAUSE = "fednotes.pause"
JOB_LOST_SECONDS = 30.0  # a site's job process sends a heartbeat every 5 s
# Meanings of NVFlare's return codes, for sites that give no reason themselves.
REASONS = {
    ReturnCode.EXECUTION_EXCEPTION: "its process failed: see its log (a full disk?)",
    ReturnCode.TASK_UNKNOWN: "it does not know this task: check that it runs this "
    "version",
    ReturnCode.TASK_ABORTED: "its process was told to stop",
}
COMMAND_SECONDS = 60.0  # a server that transfers large frames answers slowly
# NVFlare's server does nothing else while it waits for a job's process.
TELL_SECONDS = 5.0
CHECK_PERIOD = 0.02  # seconds between NVFlare's checks of its tasks
logger = logging.getLogger("fednotes.apps.deployment.nvflare.server")


@dataclass(slots=True)
class FlareExchange:
    """The replies of one exchange as they arrive; NVFlare calls `receive` in threads.

    Attributes:
        sites: The sites that received the request.
        new: Replies not yet returned by `take`.
        answered: The sites that have replied.
        failed: The sites that cannot reply, each with the reason.
        changed: Guards the attributes and is notified of each reply.
    """

    sites: tuple[str, ...]
    new: list[tuple[str, ReceivedFrame]] = field(default_factory=list)
    answered: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def receive(
        self,
        client_task: ClientTask,
        fl_ctx: FLContext,  # noqa: ARG002 - NVFlare's signature
    ) -> None:
        """Receive the reply of one site, or the reason why it has none."""
        result = client_task.result
        site = client_task.client.name
        frame = result.get(FRAME)
        is_ok = result.get_return_code() == ReturnCode.OK
        has_frame = is_ok and isinstance(frame, bytes | StoredBytes)
        with self.changed:
            if has_frame:
                self.new.append((site, frame))
                self.answered.add(site)
            else:
                code = str(result.get_return_code())
                reason = result.get_header(REASON) or REASONS.get(code, code)
                self.failed[site] = clean(reason)  # the site may send anything
            # NVFlare would otherwise keep the frame until the exchange ends.
            client_task.result = None
            self.changed.notify_all()

    def list_missing(self) -> tuple[str, ...]:
        """Return the sites that have neither answered nor failed."""
        return tuple(
            site
            for site in self.sites
            if site not in self.answered and site not in self.failed
        )

    def take(self) -> list[tuple[str, ReceivedFrame]]:
        """Return the replies that arrived since the last call."""
        replies = self.new
        self.new = []
        return replies


class FlareTransport:
    """Carries frames and replies over an NVFlare job (a `Transport`).

    Args:
        controller: The controller of the job.
        fl_ctx: NVFlare's context of the job.
        stop: NVFlare's signal that the job should end.
        setup: Start-up data of the server's side of the job.

    Attributes:
        failed: The sites that could not reply in the last exchange, each with the
            reason.
        pause: An event that is set when the run should stop at its next checkpoint. It
            resumes later.
        lines: The lines of progress.
    """

    def __init__(
        self,
        controller: FednotesController,
        fl_ctx: FLContext,
        stop: Signal,
        setup: Setup,
    ) -> None:
        self.failed: Mapping[str, str] = {}
        self.pause = threading.Event()
        self.lines: list[Mapping[str, Any]] = []
        self._error: FednotesError | None = None  # why this process cannot go on
        self._controller = controller
        self._fl_ctx = fl_ctx
        self._stop = stop
        self._setup = setup

    def exchange(
        self,
        frames: Mapping[str, Frame],
        *,
        timeout: float,
        grace: float,
        enough: int,
    ) -> Iterator[tuple[str, ReceivedFrame]]:
        """Send each site its frame, and yield (site, reply) as replies arrive.

        The exchange ends when each site has answered, has failed or is lost, or when
        `timeout` or `grace` has elapsed. Later replies are dropped. The caller decides
        whether enough sites have answered.

        Args:
            frames: The frame for each site. If sites receive equal frames, pass the
                same object, so that memory holds only one.
            timeout: Maximum duration of the exchange, in seconds.
            grace: Seconds that the other sites get once `enough` sites have answered.
            enough: Number of replies that suffice.

        Raises:
            TrainingError: The job was stopped.
            FednotesError: The disk has no room for a large reply.
        """
        exchange = FlareExchange(tuple(frames))
        tasks = self._send(exchange, frames, math.ceil(timeout) + 5)
        try:
            yield from self._collect_replies(
                exchange, timeout=timeout, grace=grace, enough=enough
            )
        finally:
            while tasks:
                self._controller.cancel_task(tasks.pop())
            self._controller.communicator.check_tasks()  # removes the tasks now
            if max(map(len, frames.values()), default=0) >= LARGE_BYTES:
                # NVFlare's tasks and streams refer to themselves in cycles, and would
                # keep the frames of several exchanges until Python looks for cycles.
                gc.collect()
                return_free_memory()
            self.failed = dict(exchange.failed)

    def _send(
        self, exchange: FlareExchange, frames: Mapping[str, Frame], timeout: int
    ) -> list[Task]:
        """Broadcast one task for each distinct frame.

        Args:
            exchange: Receives the replies.
            frames: The frame for each site.
            timeout: Seconds after which NVFlare drops the tasks.

        Returns:
            The tasks.
        """
        sites_by_frame: dict[int, list[str]] = {}
        for site, frame in frames.items():
            sites_by_frame.setdefault(id(frame), []).append(site)
        tasks = []
        for sites in sites_by_frame.values():
            first_site, *_ = sites
            # NVFlare deep-copies a task's data for the first site; immutable bytes are
            # shared.
            data = Shareable({FRAME: bytes(frames[first_site])})
            task = Task(
                TASK, data, timeout=timeout, result_received_cb=exchange.receive
            )
            self._controller.broadcast(
                task, self._fl_ctx, sites, min_responses=len(sites)
            )
            tasks.append(task)
        return tasks

    def _collect_replies(
        self, exchange: FlareExchange, *, timeout: float, grace: float, enough: int
    ) -> Iterator[tuple[str, ReceivedFrame]]:
        """Yield (site, reply) as replies arrive, until the exchange is over.

        It is over when every site has answered or is lost.

        Args:
            exchange: The exchange, whose requests have been sent.
            timeout: Seconds after which it is over in any case.
            grace: Seconds that the other sites have once enough sites have answered.
            enough: Number of answers from which `grace` counts.
        """
        end = time.monotonic() + timeout
        grace_end = math.inf
        while True:
            with exchange.changed:
                if len(exchange.answered) >= enough:
                    grace_end = min(grace_end, time.monotonic() + grace)
                seconds = min(end, grace_end) - time.monotonic()
                is_over = seconds <= 0 or all(
                    map(self.is_lost, exchange.list_missing())
                )
                if not exchange.new and not is_over:
                    # No reply announces that a site is lost, the submission stopped or
                    # the disk is full, so these are checked twice a second.
                    exchange.changed.wait(min(seconds, 0.5))
                replies = exchange.take()
            if self._error is not None:
                raise self._error
            if self._stop.triggered:
                raise TrainingError(
                    "NVFlare ended this submission, as it does if a site is lost"
                )
            yield from replies
            if is_over:
                return

    def end_with(self, error: FednotesError) -> None:
        """End the exchange under way, and all later ones, with an error."""
        self._error = error

    def is_lost(self, site: str) -> bool:
        """Return whether a site takes no part in this submission.

        Such a site has never taken part, or has been silent for too long. A site that
        returns must wait for the next submission.
        """
        return self._controller.measure_silence(site) > JOB_LOST_SECONDS

    def list_present_sites(self) -> tuple[str, ...]:
        """Return the sites that take part in this submission, in the job's order."""
        return tuple(site for site in self._setup.sites if not self.is_lost(site))

    def publish(self, line: Mapping[str, Any]) -> None:
        """Publish a line of progress.

        Args:
            line: JSON values, without any note text.
        """
        self.lines.append(dict(line))
        if len(self.lines) == 1:
            # Record early that this submission makes progress, because the server's
            # watch counts the submissions that make none.
            launch.write_submission_outcome(self._setup, "running", 1)

    def answer_command(
        self,
        topic: str,
        data: Any,
        fl_ctx: FLContext,  # noqa: ARG002 - NVFlare's signature
    ) -> dict[str, Any]:
        """Answer a command of an admin.

        Args:
            topic: `PROGRESS` or `PAUSE`.
            data: A table that may hold `since`, the number of the first line to return,
                and `sites`, the sites for which the run pauses.
            fl_ctx: NVFlare's context.

        Returns:
            The lines of progress, and the sites that take part.
        """
        table = data if isinstance(data, dict) else {}
        if topic == PAUSE and not self.pause.is_set():
            self._announce_pause(table.get("sites"))
            self.pause.set()
        since = int(table.get("since", 0))
        return {"lines": self.lines[since:], "sites": list(self.list_present_sites())}

    def _announce_pause(self, returned_sites: Any) -> None:
        """Publish why the run pauses, unless it has published nothing yet.

        A submission that has published a line counts as one that makes progress.

        Args:
            returned_sites: The sites for which the run pauses, as the command names
                them.
        """
        if not self.lines:
            return
        named_sites = returned_sites if isinstance(returned_sites, list) else []
        sites = [site for site in self._setup.sites if site in named_sites]
        self.publish({"kind": "event", "text": describe_pause(sites)})


def describe_pause(sites: Sequence[str]) -> str:
    """Return why a run pauses, and when, in words.

    Args:
        sites: The sites that are back and do not take part yet; empty if a person told
            the run to pause.
    """
    reason = ""
    if sites:
        verb = "is" if len(sites) == 1 else "are"
        reason = f"{', '.join(map(repr, sites))} {verb} back: "
    return (
        f"{reason}the run pauses when the other sites have finished their step, and "
        "then resumes with all sites"
    )


class FednotesController(Controller):
    """The server's job process: runs the server function that its operator chose.

    Args:
        task_check_period: Seconds between NVFlare's checks of its tasks.
    """

    def __init__(self, task_check_period: float = CHECK_PERIOD) -> None:
        super().__init__(task_check_period=task_check_period)
        outlive_unreadable_results()
        shorten_debug_texts()
        limit_unfinished_messages()
        # Site -> when its last heartbeat arrived.
        self._contacts: dict[str, float] = {}

    def set_communicator(self, communicator: WFCommSpec) -> None:
        """Set the communicator, and record each heartbeat that it receives."""
        super().set_communicator(communicator)
        # NVFlare 2.9.0 sets `task_check_period`, but its communicator reads this name.
        communicator._task_check_period = self._task_check_period
        original = communicator.client_is_active

        def record_contact(client_name: str, reason: str, fl_ctx: FLContext) -> None:
            """Record a site's request or heartbeat, then call NVFlare's function."""
            # Recorded here, because NVFlare considers a site dead only after more than
            # a minute.
            self._contacts[client_name] = time.monotonic()
            original(client_name, reason, fl_ctx)

        communicator.client_is_active = record_contact

    def measure_silence(self, site: str) -> float:
        """Return how many seconds have passed since a site's last heartbeat.

        The result is infinite for a site that is not in this submission.
        """
        return time.monotonic() - self._contacts.get(site, -math.inf)

    def start_controller(
        self,
        fl_ctx: FLContext,  # noqa: ARG002 - NVFlare's signature
    ) -> None:
        """Close NVFlare's audit; `control_flow` does everything else."""
        # The audit writes two lines for each frame, and its file has no size limit.
        AuditService.close()

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """No-op."""

    def process_result_of_unknown_task(
        self,
        client: Client,
        task_name: str,  # noqa: ARG002 - NVFlare's signature
        client_task_id: str,  # noqa: ARG002 - NVFlare's signature
        result: Shareable,  # noqa: ARG002 - NVFlare's signature
        fl_ctx: FLContext,  # noqa: ARG002 - NVFlare's signature
    ) -> None:
        """Log a reply to an exchange that is over."""
        logger.info("dropped a late reply from %s", client.name)

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Run the job; write its outcome to the run's state, and report a failure."""
        workspace = self._engine.get_workspace()
        job_id = fl_ctx.get_job_id()
        kit = Path(workspace.get_root_dir())
        app = Path(workspace.get_app_dir(job_id))
        try:
            setup = launch.read_setup(app, kit, "", job_id)
        except FednotesError as error:
            self.system_panic(str(error), fl_ctx)
            return

        transport = FlareTransport(self, fl_ctx, abort_signal, setup)
        receive_into_files(setup.state, transport.end_with)
        for topic in (PROGRESS, PAUSE):
            self._engine.register_app_command(topic, transport.answer_command)
        # Give the sites to which the job was deployed some time to begin.
        now = time.monotonic()
        for client in self._engine.get_clients():
            self._contacts[client.name] = now

        launch.write_submission_outcome(setup, "running", 0)
        failure = _run_server_main(setup, transport)
        if abort_signal.triggered:
            # A person aborted the run, or NVFlare lost too many sites. The outcome
            # that was written last remains.
            return
        num_lines = len(transport.lines)
        if failure is None:
            status = "paused" if transport.pause.is_set() else "done"
            launch.write_submission_outcome(setup, status, num_lines)
            return
        launch.write_submission_outcome(
            setup, "failed", num_lines, failure.problem, retry=failure.may_retry
        )
        logger.error("%s", failure.problem)
        self.system_panic(failure.problem, fl_ctx)


class _Failure(NamedTuple):
    """The failure of a run.

    Attributes:
        problem: What happened.
        may_retry: Whether another submission may help.
    """

    problem: str
    may_retry: bool


def _run_server_main(setup: Setup, transport: FlareTransport) -> _Failure | None:
    """Run the server function that the operator chose.

    Returns:
        The failure that ended the function; None if it succeeded.
    """
    try:
        with launch.holding_state(setup.state):
            launch.load_main(launch.SERVER_MAIN, MAIN)(setup, transport)
    except FednotesError as error:
        return _Failure(str(error), may_retry=isinstance(error, TrainingError))
    except Exception as error:
        logger.exception("the server's part of the job failed")
        problem = f"an error in this program: {describe_place(error)}"
        return _Failure(problem, may_retry=True)
    return None


class Admin:
    """A session with the server, opened with an admin's kit or that of the watch.

    The server refuses any command from the watch that changes something. All methods
    raise TrainingError if the connection is lost or the server reports an error, and
    RefusedError if the server refuses the command.

    Args:
        session: NVFlare's session.
    """

    def __init__(self, session: Any) -> None:
        self._session = session

    def submit(self, folder: Path) -> str:
        """Sign a job folder and submit it; return the job's id."""
        path = str(folder.resolve())
        with permitting_upload(path):
            return self._ask(lambda session: str(session.submit_job(path)))

    def resubmit(self, job_id: str) -> str:
        """Run a job again, with a new id and its original signature; return the id."""
        return self._ask(lambda session: str(session.clone_job(job_id)))

    def read_status(self, job_id: str) -> str:
        """Return a job's status: SUBMITTED, DISPATCHED, RUNNING or FINISHED:REASON."""
        return self._ask(lambda session: str(session.get_job_status(job_id)))

    def list_jobs(self) -> list[dict[str, Any]]:
        """Return all jobs of the server.

        Returns:
            NVFlare's facts about each job: `job_id`, `name`, `status`, `submit_time`
            and others.
        """
        return self._ask(lambda session: list(session.list_jobs(detailed=True)))

    def list_sites(self, within: float = math.inf) -> tuple[str, ...]:
        """Return the sites that recently sent the server a heartbeat.

        NVFlare itself considers a site connected for a minute after its last heartbeat.

        Args:
            within: Maximum age of the last heartbeat, in seconds, by this machine's
                clock.
        """
        after = time.time() - within
        clients = self._ask(lambda session: session.get_connected_client_list())
        return tuple(
            sorted(
                client.name
                for client in clients
                if float(client.last_connect_time) > after
            )
        )

    def read_progress(self, job_id: str, since: int = 0) -> dict[str, Any] | None:
        """Return the progress of a running job.

        Args:
            job_id: The job.
            since: Number of the first line to return.

        Returns:
            The lines of progress and the sites that take part, both empty while the job
            starts or ends; None if the server has no process of this job.
        """
        options = {"since": since}
        self._session.set_timeout(TELL_SECONDS)
        try:
            return self._ask(
                lambda session: dict(session.do_app_command(job_id, PROGRESS, options))
            )
        except TrainingError as error:
            cause = type(error.__cause__).__name__
            if cause == "JobNotRunning":
                return None
            # NVFlare raises NoConnection for a late reply too. If the connection is
            # actually lost, the next command will fail.
            is_late = cause in ("NoReply", "NoConnection")
            if not is_late and "no app command" not in str(error):
                raise
            return {"lines": [], "sites": []}
        finally:
            self._session.set_timeout(COMMAND_SECONDS)

    def abort(self, job_id: str) -> None:
        """Abort a job."""
        self._ask(lambda session: session.abort_job(job_id))

    def fetch(self, job_id: str, out: Path) -> Path:
        """Download the server's folder of a finished job and return its new path.

        Args:
            job_id: The job.
            out: Parent of the new folder.
        """
        with permitting_download():
            folder = self._ask(
                lambda session: session.download_job_result(job_id, str(out))
            )
        return Path(folder) / "workspace"

    def _ask(self, command: Callable[[Any], T]) -> T:
        """Send the server a command; convert errors to those of this package."""
        from nvflare.fuel.flare_api import api_spec

        try:
            return command(self._session)
        except (api_spec.NoConnection, api_spec.SessionClosed) as error:
            raise TrainingError("the connection to the server is lost") from error
        except api_spec.AuthorizationError as error:
            raise RefusedError(f"the server refuses this command: {error}") from error
        except Exception as error:  # the API raises whatever the server sends
            raise TrainingError(f"the server reports: {error}") from error


@contextmanager
def connecting_to_server(
    kit: Path, person: str, timeout: float = 10.0
) -> Iterator[Admin]:
    """Open a session with the server, with the certificate of a kit.

    There is no password and no prompt. NVFlare's output about the connection is
    discarded; problems are raised as errors.

    Args:
        kit: The kit's folder.
        person: The person in its certificate.
        timeout: Seconds to wait for the server.

    Yields:
        The session.

    Raises:
        TrainingError: The server does not answer, or does not know the certificate.
    """
    from nvflare.fuel.flare_api.api_spec import AuthenticationError, NoConnection
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    install_certificate_check(kit / "startup")
    limit_transfers()
    nvflare_logger = logging.getLogger("nvflare")
    nvflare_logger.addHandler(logging.NullHandler())
    nvflare_logger.propagate = False
    with using_private_temporary_files():
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
                f"{kit}: the server does not answer: check that it is started"
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


@contextmanager
def using_private_temporary_files() -> Iterator[None]:
    """Keep temporary files in a folder closed to other users during the context.

    NVFlare writes what it sends and fetches to the system's folder of temporary files,
    with the permissions of the umask.
    """
    previous = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="fednotes-") as folder:
        tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = previous
