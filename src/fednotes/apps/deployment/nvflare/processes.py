"""Start, stop and list the processes of a kit, without a daemon.

    python -m fednotes.apps.deployment.nvflare.processes KIT

is the process of a site or the server: NVFlare's own program in the foreground. `run`
becomes this process, and `start` starts it in the background. When it ends, it stops
every process of the kit. Its exit status is

    0        after SIGTERM: it was asked to stop
    130      after Ctrl-C
    others   it failed; systemd or a container may start it again

NVFlare starts a further process for each job. Each command line names the kit's folder,
which identifies the processes. No file holds their process ids, because an id may later
belong to another process.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from fednotes.apps.deployment.nvflare.certificates import check_kit
from fednotes.apps.deployment.nvflare.kit import (
    ADMIN,
    HEARTBEAT_SECONDS,
    LOG_FILE,
    SERVER,
    SITE,
    Kit,
    read_kit,
    restore_kit_files,
)
from fednotes.apps.deployment.nvflare.trust import drop_expired_roots
from fednotes.apps.deployment.problems import (
    forget_problem,
    record_line,
    record_problem,
)
from fednotes.core.cleaning import clean_to_one_line
from fednotes.core.errors import ConfigError, FednotesError, needs, raising_os_errors_as
from fednotes.core.parsing import read_json_table
from fednotes.core.settings import build, checked
from fednotes.core.store import (
    LARGE_BYTES,
    lock,
    locking_file,
    make_private,
    open_private,
)

# Names the kit's folder in the environment of its processes.
KIT_VARIABLE = "FEDNOTES_KIT"
# If this is set, stopped runs are not resubmitted, as tests and benchmarks need.
NO_WATCH_VARIABLE = "FEDNOTES_UNWATCHED"
# If this is set, the log is also printed.
ECHO_VARIABLE = "FEDNOTES_ECHO"

# Log lines of one kind may differ in ids and numbers.
_IDS_AND_NUMBERS = re.compile(
    r"[0-9a-f]{4,}(-[0-9a-f]{4,})+|(?<![a-z_-])[0-9]+", re.IGNORECASE
)
_MAX_KINDS = 256  # maximum number of kinds of log lines to remember
_REPEAT_SECONDS = 60.0  # minimum time between two logged lines of one kind
# NVFlare logs these lines at each start and whenever a peer is absent. They are not
# needed, because `presence.py` logs each absence once.
_ABSENCE = re.compile(r"no connection to |target_unreachable|no path\b")
_CELLS = "nvflare.fuel.f3.cellnet."
# NVFlare's answer to a question about a run that starts or ends, which is no error.
_NO_COMMAND = "no app command func for topic fednotes."
# The id of a job, as NVFlare forms it; also the name of the job's folder in a kit.
JOB_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# Number of NVFlare's newest job folders that a start keeps; states are elsewhere.
MAX_JOB_FOLDERS = 3
OUTPUT_FILE = "console.log"  # the processes' output since the last start
MODULE = "fednotes.apps.deployment.nvflare.processes"
# Beginnings of the modules that a kit's main process and its job processes run.
FEDNOTES_MODULES = "fednotes.apps.deployment."
JOB_MODULES = "nvflare.private.fed.app."
INTERRUPTED = 130  # as shells report a program that SIGINT ended
FAILED = 1  # exit status if NVFlare ends on its own
# Seconds that job processes have to end. A container is killed ten seconds after
# SIGTERM.
PATIENCE = 5.0
_PROGRAMS = {
    SERVER: (f"{JOB_MODULES}server.server_train", "fed_server.json"),
    SITE: (f"{JOB_MODULES}client.client_train", "fed_client.json"),
}
# Without this, gRPC prints lines for each handshake that fails, such as that of a
# stranger at the server.
_QUIET_GRPC = {"GRPC_VERBOSITY": "ERROR"}
_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # no module is imported from the kit's own folder
    "MALLOC_ARENA_MAX": "4",  # reduces fragmentation by large frames
    # By default, NVFlare waits 900 s at the end for a lost site.
    "NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT": "20",
}
logger = logging.getLogger("fednotes.apps.deployment.nvflare.processes")
START_LOCK_FILE = ".start.lock"  # in a kit; held while its process is started
CONTACT_FILE = Path("state") / "contact.json"
LOST_SECONDS = 20.0  # a site contacts the server every 5 s
# Processes that this process started; they may outlive it.
_children: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True, slots=True)
class Status:
    """The processes of one participant.

    Attributes:
        name: The participant's name.
        role: Its role.
        pid: Id of its main process; None if it does not run.
        jobs: Ids of the jobs whose processes run here.
        log: Its log.
    """

    name: str
    role: str
    pid: int | None
    jobs: tuple[str, ...]
    log: Path

    @property
    def is_running(self) -> bool:
        """Whether the main process runs."""
        return self.pid is not None


def free_pieces_of(frame: bytes) -> None:
    """Return the memory in which a large frame arrived to the operating system.

    NVFlare receives a frame in pieces and joins them. The C library would keep the
    memory of the pieces, which is as much as the frame, for later use.
    """
    if len(frame) >= LARGE_BYTES:  # otherwise, this takes longer than it helps
        return_free_memory()


def return_free_memory() -> None:
    """Give memory that this process no longer uses back to the operating system."""
    with suppress(AttributeError):  # only glibc has this function
        ctypes.CDLL(None).malloc_trim(0)


def silence_grpc() -> None:
    """Keep gRPC from printing lines in this process; call it before gRPC is imported.

    A person who sets the variable sees them.
    """
    for name, value in _QUIET_GRPC.items():
        os.environ.setdefault(name, value)


def start(
    kit: Path, variables: Mapping[str, str] | None = None, *, check: bool = True
) -> Status:
    """Start the server or the site of a kit in the background.

    The new process outlives this one. A certificate that expires soon is logged as a
    warning.

    Args:
        kit: The kit's folder.
        variables: Added to the environment of the process and of its job processes.
        check: Whether to check the kit's certificates first.

    Returns:
        The running processes.

    Raises:
        ConfigError: The process is already running, the kit is an admin's, or its
            certificates are not valid (`check_kit`).
        FednotesError: A file of the kit cannot be written.
    """
    with _locking_start(kit):
        program = _prepare(kit, check=check)
        kit = kit.resolve()
        with open(kit / OUTPUT_FILE, "wb", opener=open_private) as output:
            process = subprocess.Popen(
                program.command,
                cwd=kit,
                env={**program.environment, **(variables or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=0o077,  # applies to files of NVFlare and torch too
            )
    _children.append(process)
    return read_status(kit)


def run(kit: Path) -> NoReturn:
    """Replace this process by the process of a kit, which also prints its log.

    Raises:
        ConfigError: As for `start`.
    """
    with _locking_start(kit):  # until the new program replaces this one
        program = _prepare(kit)
        os.chdir(kit.resolve())
        environment = {**program.environment, ECHO_VARIABLE: "1"}
        os.execve(sys.executable, program.command, environment)


@contextmanager
def _locking_start(kit: Path) -> Iterator[None]:
    """Keep other processes from starting a kit while the context is open.

    Of two starts at the same time, the second then finds the process of the first.

    Args:
        kit: The kit's folder.

    Raises:
        ConfigError: The folder is no kit.
        FednotesError: A file of the kit cannot be written.
    """
    read_kit(kit)
    disk_errors = raising_os_errors_as(FednotesError, kit, action="be started")
    with disk_errors, locking_file(kit / START_LOCK_FILE):
        yield


class _Program(NamedTuple):
    """The program of a kit's process.

    Attributes:
        command: The words of its command line.
        environment: Its environment variables.
    """

    command: list[str]
    environment: dict[str, str]


def _prepare(kit: Path, *, check: bool = True) -> _Program:
    """Check and prepare a kit for its process, and return the program to run.

    Args:
        kit: The kit's folder.
        check: Whether to check the kit's certificates.

    Raises:
        ConfigError: As for `start`.
    """
    if check:
        for warning in check_kit(kit):
            logger.warning("%s", warning)
    kit = kit.resolve()
    facts = read_kit(kit)
    _require_can_run(kit, facts)

    (kit / "transfer").mkdir(exist_ok=True)
    drop_expired_roots(kit)
    restore_kit_files(kit, facts)
    # No job is running, so the folders of earlier jobs can be deleted.
    for folder in list_job_folders(kit)[:-MAX_JOB_FOLDERS]:
        shutil.rmtree(folder, ignore_errors=True)
    _make_kit_private(kit)
    environment = {**_ENVIRONMENT, **os.environ, KIT_VARIABLE: str(kit)}
    if facts.role == SERVER:
        environment = {**_QUIET_GRPC, **environment}
    return _Program([sys.executable, "-m", MODULE, str(kit)], environment)


def _require_can_run(kit: Path, facts: Kit) -> None:
    """Raise ConfigError if a kit has no process, or its process cannot start now."""
    if facts.role == ADMIN:
        raise ConfigError(f"{kit} is the kit of {facts.role!r}, which runs no process")
    current = read_status(kit)
    if current.is_running or current.jobs:
        raise ConfigError(
            f"{kit}: {facts.name} is already running (process {current.pid})"
        )
    if any(letter.isspace() for letter in str(kit)):
        raise ConfigError(
            f"{kit}: NVFlare cannot run in a folder with a space in its path: move the "
            "kit"
        )


def _make_kit_private(kit: Path) -> None:
    """Remove the permissions of other users from a kit.

    A kit from an archive or an earlier version may have such permissions. Other users
    may then have changed files, so a warning gives the number of files that they could
    write to.
    """
    earlier_modes = make_private(kit)
    writable_paths = [path for path, mode in earlier_modes.items() if mode & 0o022]
    if not writable_paths:
        return

    users = "members of its group"
    if any(mode & 0o002 for mode in earlier_modes.values()):
        users = "other users of this machine"
    logger.warning(
        "%s: %s could change %d files and folders, such as %s, until now: look at the "
        "site's file and its decisions, or ask for another kit",
        kit,
        users,
        len(writable_paths),
        writable_paths[-1],
    )


def list_job_folders(kit: Path) -> list[Path]:
    """Return NVFlare's folders of jobs in a kit, oldest first."""
    jobs = [
        path for path in kit.iterdir() if path.is_dir() and JOB_ID.fullmatch(path.name)
    ]
    return sorted(jobs, key=lambda path: path.stat().st_mtime)


def read_status(kit: Path) -> Status:
    """Return the running processes of a kit."""
    kit = kit.resolve()
    facts = read_kit(kit)
    main_pid = None
    jobs = []
    for process in list_processes(kit):
        words = process.words
        if any(word.startswith(FEDNOTES_MODULES) for word in words):
            main_pid = process.pid
        elif "-n" in words:  # NVFlare's option that names the job
            jobs.append(words[words.index("-n") + 1])
        else:
            jobs.append(str(process.pid))
    return Status(
        name=facts.name,
        role=facts.role,
        pid=main_pid,
        jobs=tuple(sorted(jobs)),
        log=kit / LOG_FILE,
    )


def stop(kit: Path, patience: float = 10.0, *, kill: bool = False) -> Status:
    """End a kit's processes.

    Args:
        kit: The kit's folder.
        patience: Seconds after which processes that have not ended are killed.
        kill: Whether to kill them immediately, as in a power cut.

    Returns:
        The status afterwards; only the calling process can still run.

    Raises:
        FednotesError: A process does not end.
    """
    kit = kit.resolve()
    read_kit(kit)

    def list_other_pids() -> list[int]:
        """Return the ids of the kit's processes without the calling one."""
        pids = [process.pid for process in list_processes(kit)]
        return [pid for pid in pids if pid != os.getpid()]

    # Signals to send, each with the seconds to wait until the processes have ended.
    steps = [(signal.SIGTERM, patience), (signal.SIGKILL, 5.0)]
    if kill:
        steps = [(signal.SIGKILL, 5.0)]
    for signal_number, seconds in steps:
        end = time.monotonic() + seconds
        for pid in list_other_pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal_number)
        while time.monotonic() < end:
            if not list_other_pids():
                return read_status(kit)
            time.sleep(0.1)
    pid = list_other_pids()[0]
    raise FednotesError(f"{kit}: process {pid} did not exit: end it with kill -9 {pid}")


class RunningProcess(NamedTuple):
    """A running process.

    Attributes:
        pid: Its id.
        words: The words of its command line.
    """

    pid: int
    words: list[str]


def list_processes(kit: Path) -> list[RunningProcess]:
    """Return the running processes of a kit.

    Processes of accounts other than this one and the kit's owner are ignored, because
    every user can start a process with any command line.

    Args:
        kit: The kit's absolute path.
    """
    # `poll` also reaps children that have ended.
    _children[:] = [child for child in _children if child.poll() is None]
    listing = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ruid=,stat=,command="],
        capture_output=True,
        text=True,
        errors="replace",
        check=True,
    )
    owners = {os.getuid(), kit.stat().st_uid}
    processes = []
    for line in listing.stdout.splitlines():
        pid, owner, state, *words = line.split()
        if str(kit) not in words or int(owner) not in owners:
            continue
        runs_kit = any(
            word.startswith((FEDNOTES_MODULES, JOB_MODULES)) for word in words
        )
        is_zombie = state.startswith("Z")
        if runs_kit and not is_zombie:
            processes.append(RunningProcess(int(pid), words))
    return processes


# ---- a site's record of the server's answers -----------------------------------------


@checked(frozen=True)
class LastContact:
    """A site's record of the server's answers; times in seconds since the epoch.

    Attributes:
        pid: Id of the process.
        since: When the current uninterrupted series of answers began.
        last: When the latest answer arrived.
        refused: Why the server does not admit the site; "" if it does.
    """

    pid: int = 0
    since: float = 0.0
    last: float = 0.0
    refused: str = ""


def read_contact(kit: Path, pid: int | None) -> LastContact | None:
    """Return the record of the server's answers by a site's running process.

    Args:
        kit: The site's kit.
        pid: Id of the process.

    Returns:
        The record; None if this process has not written one yet.
    """
    table = read_json_table(kit / CONTACT_FILE)
    try:
        contact = build(LastContact, table, CONTACT_FILE.name)
    except ConfigError:
        return None
    return contact if contact.pid == pid else None


def read_last_refusal(kit: Path) -> str:
    """Return why the server refused a site's newest process; "" if it did not.

    The process need not run any more.
    """
    return str(read_json_table(kit / CONTACT_FILE).get("refused", ""))


def is_connected(contact: LastContact | None, now: float) -> bool:
    """Return whether the server has answered within the last `LOST_SECONDS`.

    An answer whose time is further than that in the future does not count either,
    because the clock must have been set back since.

    Args:
        contact: The site's record of the server's answers.
        now: The time, in seconds since the epoch.
    """
    return contact is not None and abs(now - contact.last) <= LOST_SECONDS


# ---- the log -------------------------------------------------------------------------


class KitLog(WatchedFileHandler):
    """The log of a kit, to which its process and those of its jobs append.

    The first process that notices that the file is too long renames it, and the others
    continue with the new file. If $FEDNOTES_ECHO is set, the lines are printed too.

    Args:
        file: The name of the file in the kit. `local/log_config.json` of each kit names
            the three arguments.
        most: Approximate maximum size in bytes; a longer file becomes `file.1`.
        kept: Maximum number of older files.
    """

    def __init__(self, file: str, most: int, kept: int) -> None:
        self.max_bytes = most
        self.max_older_files = kept
        self._kit = Path(os.environ.get(KIT_VARIABLE) or ".").resolve()
        super().__init__(self._kit / file, encoding="utf-8", delay=True)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, and record the problem that it reports."""
        with suppress(OSError):
            if os.stat(self.baseFilename).st_size > self.max_bytes:
                self._rotate()
        super().emit(record)
        record_line(self._kit, record)
        if os.environ.get(ECHO_VARIABLE):
            with suppress(OSError):
                print(self.format(record), file=sys.stderr, flush=True)

    def _rotate(self) -> None:
        """Rename the file and the older ones, and delete the oldest."""
        folder = os.open(Path(self.baseFilename).parent, os.O_RDONLY)
        try:
            lock(folder)
            if os.stat(self.baseFilename).st_size <= self.max_bytes:
                return  # another process has already renamed the files
            older_names = [
                f"{self.baseFilename}.{number}"
                for number in range(1, self.max_older_files + 1)
            ]
            names = [self.baseFilename, *older_names]
            for newer, older in reversed(list(pairwise(names))):
                with suppress(FileNotFoundError):
                    os.replace(newer, older)
        finally:
            os.close(folder)


@dataclass(slots=True)
class _KindOfLines:
    """Log lines of one kind.

    Attributes:
        last_time: When a line of this kind was last logged.
        num_left_out: Number of lines that were left out since.
    """

    last_time: float
    num_left_out: int = 0


class RateLimit(logging.Filter):
    """Lets one line of each kind pass per minute.

    The next line that passes gives the number of lines that were left out. Without this
    filter, NVFlare would log 13 KB a second while a server is down: it tries to connect
    every 50 ms and logs two warnings each time.

    Lines of NVFlare are of one kind if they differ only in numbers and ids. Lines of
    fednotes are of one kind only if they are equal, because the names of sites may
    differ only in digits. Each record becomes a single line of plain characters, so
    that another party's text cannot imitate a second line.

    Args:
        now: Returns the current time, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.now = now
        # Logger, level and pattern of each kind of lines; the newest kind is last.
        self._kinds: OrderedDict[tuple[str, int, str], _KindOfLines] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is written; called under the handler's lock."""
        text = clean_to_one_line(record.getMessage(), 4000)
        if record.name.startswith(_CELLS) and _ABSENCE.search(text):
            return False
        if record.name.startswith("nvflare.") and text.startswith(_NO_COMMAND):
            return False
        pattern = text
        is_of_fednotes = record.name.split(".", 1)[0] == "fednotes"
        if not is_of_fednotes:
            pattern = _IDS_AND_NUMBERS.sub("#", text)
        kind = (record.name, record.levelno, pattern)
        now = self.now()
        last = self._kinds.get(kind, _KindOfLines(last_time=-math.inf))
        if now - last.last_time < _REPEAT_SECONDS:
            last.num_left_out += 1
            return False

        self._kinds[kind] = _KindOfLines(last_time=now)
        self._kinds.move_to_end(kind)
        if len(self._kinds) > _MAX_KINDS:
            self._kinds.popitem(last=False)
        record.msg = text
        if last.num_left_out:
            record.msg = f"{text} ({last.num_left_out} more like this left out)"
        record.args = None
        return True


def append_to_log(kit: Path, text: str, level: str = "INFO") -> None:
    """Append a line to a kit's log, and print it if $FEDNOTES_ECHO is set.

    The line does not pass through `logging`. So it can be written before NVFlare
    configures the log, and by the handler of a signal, which may have interrupted the
    writing of another line.

    Args:
        kit: The kit's folder.
        text: The text of the line, without control characters.
        level: Its level, as `logging` names it.
    """
    now = time.time()
    when = f"{time.strftime('%F %T', time.localtime(now))},{int(now % 1 * 1000):03d}"
    line = f"{when} {level} {logger.name}: {text}\n".encode()
    with suppress(OSError):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        descriptor = open_private(str(kit / LOG_FILE), flags)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
    if os.environ.get(ECHO_VARIABLE):
        with suppress(OSError):
            os.write(2, line)


# ---- the process itself --------------------------------------------------------------


def main(kit: Path) -> NoReturn:
    """Run as the process of a kit until it ends or a signal stops it.

    Args:
        kit: The kit's absolute path.
    """

    def end(signal_number: int, _frame: object) -> None:
        """Stop the kit's processes and exit."""
        for ignored_signal in (signal.SIGTERM, signal.SIGINT):
            signal.signal(ignored_signal, signal.SIG_IGN)
        append_to_log(kit, f"stopped by {signal.Signals(signal_number).name}")
        # Processes that do not end now are left to systemd or the container.
        with suppress(Exception):
            stop(kit, PATIENCE)
        os.write(2, b"stopped; its runs resume when it is started again\n")
        os._exit(0 if signal_number == signal.SIGTERM else INTERRUPTED)

    signal.signal(signal.SIGTERM, end)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, end)
    os.umask(0o077)  # applies to files of NVFlare and torch too
    facts = read_kit(kit)
    address = f"{facts.server}:{facts.port}"
    work = "serves" if facts.role == SERVER else "connects to"
    append_to_log(kit, f"started as process {os.getpid()}, which {work} {address}")
    forget_problem(kit)
    module, settings = _PROGRAMS[facts.role]
    options = ["secure_train=true", "config_folder=config", f"org={facts.org}"]
    if facts.role == SITE:
        options += [f"uid={facts.name}", f"heart_beat_interval={HEARTBEAT_SECONDS}"]
    sys.argv = [module, "-m", str(kit), "-s", settings, "--set", *options]
    status = _run_program(module)
    text = f"ended on its own (status {status}); {OUTPUT_FILE} may say why"
    if read_last_refusal(kit):  # the server's refusal says more
        append_to_log(kit, text)
    else:
        append_to_log(kit, text, "ERROR")
        record_problem(kit, text)
    sys.exit(status)


def _run_program(module: str) -> int:
    """Run a program of NVFlare as its `__main__` does, and return the exit status.

    A program that ends on its own counts as failed.

    Args:
        module: The name of the program's module.
    """
    with needs("nvflare", "deploy"):
        from nvflare.fuel.f3.mpm import MainProcessMonitor
    program = importlib.import_module(module)

    def run_until_it_ends(args: Any) -> int:
        program.main(args)
        return FAILED

    program.version_check()
    args = program.parse_arguments()
    code = MainProcessMonitor.run(
        main_func=run_until_it_ends, run_dir=args.workspace, args=args
    )
    return int(code or FAILED)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
