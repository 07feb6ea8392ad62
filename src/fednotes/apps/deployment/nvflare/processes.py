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

import importlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any, NoReturn

from fednotes.apps.deployment.nvflare.certificates import check_kit
from fednotes.apps.deployment.nvflare.kit import (
    ADMIN,
    HEARTBEAT_SECONDS,
    LOG_FILE,
    REWRITTEN_FILES,
    SERVER,
    SITE,
    build_kit_files,
    read_kit,
)
from fednotes.apps.deployment.nvflare.trust import drop_expired_roots
from fednotes.core.cleaning import one_line
from fednotes.core.errors import ConfigError, FednotesError, needs, os_errors_as
from fednotes.core.parsing import read_json_table
from fednotes.core.settings import build, checked
from fednotes.core.store import lock, make_private, open_private, write_json

# Names the kit's folder in the environment of its processes.
KIT_VARIABLE = "FEDNOTES_KIT"
# If this is set, stopped runs are not resubmitted, as tests and benchmarks need.
UNWATCHED = "FEDNOTES_UNWATCHED"
# If this is set, the log is also printed.
ECHO_VARIABLE = "FEDNOTES_ECHO"

# The parts in which log lines of one kind may differ: ids and numbers.
_CHANGING = re.compile(
    r"[0-9a-f]{4,}(-[0-9a-f]{4,})+|(?<![a-z_-])[0-9]+", re.IGNORECASE
)
_MAX_KINDS = 256  # maximum number of kinds of log lines to remember
_REPEAT_SECONDS = 60.0  # after which a line of the same kind is logged again
# NVFlare logs these lines at each start and whenever a peer is away; `presence.py` logs
# an absence once.
_AWAY = re.compile(r"no connection to |target_unreachable|no path\b")
_CELLS = "nvflare.fuel.f3.cellnet."
# The id of a job, as NVFlare forms it; also the name of the job's folder in a kit.
JOB_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
MAX_JOB_FOLDERS = 3  # the newest ones, which a start keeps; states are elsewhere
OUTPUT_FILE = "console.log"  # the processes' output since the last start
MODULE = "fednotes.apps.deployment.nvflare.processes"
# Beginnings of the modules that a kit's main process and its job processes run.
FEDNOTES_MODULES = "fednotes.apps.deployment."
JOB_MODULES = "nvflare.private.fed.app."
INTERRUPTED = 130  # as shells report a program that SIGINT ended
FAILED = 1  # NVFlare ended without being asked to
# Seconds in which job processes must end. A container is killed ten seconds after
# SIGTERM.
PATIENCE = 5.0
_PROGRAMS = {
    SERVER: (f"{JOB_MODULES}server.server_train", "fed_server.json"),
    SITE: (f"{JOB_MODULES}client.client_train", "fed_client.json"),
}
# Without this, each connection of a stranger to the server adds lines to OUTPUT_FILE.
_SERVER_ENVIRONMENT = {"GRPC_VERBOSITY": "ERROR"}
_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # no module is imported from the kit's own folder
    "MALLOC_ARENA_MAX": "4",  # reduces fragmentation by large frames
    # By default, NVFlare waits 900 s at the end for a lost site.
    "NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT": "20",
}
logger = logging.getLogger("fednotes.apps.deployment.nvflare.processes")
CONTACT_FILE = Path("state") / "contact.json"
LOST_SECONDS = 20.0  # a site contacts the server every 5 s
# Processes that this one started. They may outlive it; ended ones are reaped.
_started: list[subprocess.Popen[bytes]] = []


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
    command, environment = _prepare(kit, check=check)
    kit = kit.resolve()
    disk_errors = os_errors_as(FednotesError, kit, action="be started")
    with disk_errors, open(kit / OUTPUT_FILE, "wb", opener=open_private) as output:
        process = subprocess.Popen(
            command,
            cwd=kit,
            env={**environment, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            umask=0o077,  # applies to files of NVFlare and torch too
        )
    _started.append(process)
    return status(kit)


def run(kit: Path) -> NoReturn:
    """Become the process of a kit, which also prints its log.

    Raises:
        ConfigError: As for `start`.
    """
    command, environment = _prepare(kit)
    os.chdir(kit.resolve())
    os.execve(command[0], command, {**environment, ECHO_VARIABLE: "1"})


def _prepare(kit: Path, *, check: bool = True) -> tuple[list[str], dict[str, str]]:
    """Prepare a kit for its process; return the command and the environment.

    Some of NVFlare's files are rewritten with the kit's current folder and the current
    names of our classes. Kits that were moved, or that an earlier version created,
    therefore still work.
    """
    if check:
        for warning in check_kit(kit):
            logger.warning("%s", warning)
    kit = kit.resolve()
    facts = read_kit(kit)
    if facts.role == ADMIN:
        raise ConfigError(f"{kit} is the kit of {facts.role!r}, which runs no process")
    before = status(kit)
    if before.is_running or before.jobs:
        raise ConfigError(
            f"{kit}: {facts.name} is already running (process {before.pid})"
        )
    if any(letter.isspace() for letter in str(kit)):
        raise ConfigError(
            f"{kit}: NVFlare cannot run in a folder with a space in its path; move the "
            "kit"
        )

    (kit / "transfer").mkdir(exist_ok=True)
    drop_expired_roots(kit)
    files = build_kit_files(facts, kit)
    for name in REWRITTEN_FILES:
        write_json(kit / name, files[name])
    # No job is running, so the folders of earlier jobs can be deleted.
    for folder in job_folders(kit)[:-MAX_JOB_FOLDERS]:
        shutil.rmtree(folder, ignore_errors=True)
    _make_kit_private(kit)
    environment = {**_ENVIRONMENT, **os.environ, KIT_VARIABLE: str(kit)}
    if facts.role == SERVER:
        environment = {**_SERVER_ENVIRONMENT, **environment}
    return [sys.executable, "-m", MODULE, str(kit)], environment


def _make_kit_private(kit: Path) -> None:
    """Remove the permissions of other users from a kit.

    A kit that came from an archive or an earlier version may have such permissions.
    Others may have changed files that they could write to, so a warning gives the
    number of these files.
    """
    earlier_modes = make_private(kit)
    changeable = [path for path, mode in earlier_modes.items() if mode & 0o022]
    if not changeable:
        return

    can_all_change = any(mode & 0o002 for mode in earlier_modes.values())
    who = "other users of this machine" if can_all_change else "members of its group"
    logger.warning(
        "%s: %s could change %d files and folders, such as %s, until now; look at the "
        "site's file and its decisions, or ask for another kit",
        kit,
        who,
        len(changeable),
        changeable[-1],
    )


def job_folders(kit: Path) -> list[Path]:
    """Return NVFlare's folders of jobs in a kit, oldest first."""
    jobs = [
        path for path in kit.iterdir() if path.is_dir() and JOB_ID.fullmatch(path.name)
    ]
    return sorted(jobs, key=lambda path: path.stat().st_mtime)


def status(kit: Path) -> Status:
    """Return the running processes of a kit."""
    kit = kit.resolve()
    facts = read_kit(kit)
    main_pid = None
    jobs = []
    for pid, words in list_processes(kit):
        if any(word.startswith(FEDNOTES_MODULES) for word in words):
            main_pid = pid
        elif "-n" in words:  # NVFlare's option that names the job
            jobs.append(words[words.index("-n") + 1])
        else:
            jobs.append(str(pid))
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

    def other_processes() -> list[int]:
        return [pid for pid, _ in list_processes(kit) if pid != os.getpid()]

    steps = [(signal.SIGTERM, patience), (signal.SIGKILL, 5.0)]
    if kill:
        steps = steps[1:]
    for sign, seconds in steps:
        end = time.monotonic() + seconds
        for pid in other_processes():
            with suppress(ProcessLookupError):
                os.kill(pid, sign)
        while time.monotonic() < end:
            if not other_processes():
                return status(kit)
            time.sleep(0.1)
    raise FednotesError(
        f"{kit}: process {other_processes()[0]} does not end: stop it with kill -9"
    )


def list_processes(kit: Path) -> list[tuple[int, list[str]]]:
    """Return the id and the command-line words of each process of a kit.

    Only processes of the kit's owner and of this account count, because every user can
    start a process with any command line.

    Args:
        kit: The kit's absolute path.
    """
    # Reap the processes that this one started and that have ended.
    _started[:] = [process for process in _started if process.poll() is None]
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
        is_of_kit = str(kit) in words and any(
            word.startswith((FEDNOTES_MODULES, JOB_MODULES)) for word in words
        )
        is_zombie = state.startswith("Z")
        if is_of_kit and int(owner) in owners and not is_zombie:
            processes.append((int(pid), words))
    return processes


# ---- what a site's process knows about the server ------------------------------------


@checked(frozen=True)
class LastContact:
    """What a site's process knows about the server; times in seconds since the epoch.

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
    """Return what a site's running process knows about the server.

    Args:
        kit: The site's kit.
        pid: Id of the process.

    Returns:
        What the process wrote; None if it has not written anything yet.
    """
    try:
        contact = build(
            LastContact, read_json_table(kit / CONTACT_FILE), CONTACT_FILE.name
        )
    except ConfigError:
        return None
    return contact if contact.pid == pid else None


def is_connected(contact: LastContact | None, now: float) -> bool:
    """Return whether the server has answered within the last seconds.

    An answer in the future does not count, because the clock was set back since then.
    """
    return contact is not None and abs(now - contact.last) <= LOST_SECONDS


# ---- the log -------------------------------------------------------------------------


class KitLog(WatchedFileHandler):
    """The log of a kit, to which its process and those of its jobs append.

    The process that notices that the file is too long renames it, and the others open
    the new one. If $FEDNOTES_ECHO is set, the lines are printed too.

    Args:
        file: The name of the file in the kit. `local/log_config.json` of each kit names
            the three arguments.
        most: Approximate maximum size in bytes; a longer file becomes `file.1`.
        kept: Maximum number of older files.
    """

    def __init__(self, file: str, most: int, kept: int) -> None:
        self.max_bytes = most
        self.max_older_files = kept
        folder = Path(os.environ.get(KIT_VARIABLE) or ".").resolve()
        super().__init__(folder / file, encoding="utf-8", delay=True)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        with suppress(OSError):
            if os.stat(self.baseFilename).st_size > self.max_bytes:
                self._rotate()
        super().emit(record)
        if os.environ.get(ECHO_VARIABLE):
            with suppress(OSError):
                print(self.format(record), file=sys.stderr, flush=True)

    def _rotate(self) -> None:
        folder = os.open(Path(self.baseFilename).parent, os.O_RDONLY)
        try:
            lock(folder)
            if os.stat(self.baseFilename).st_size <= self.max_bytes:
                return  # another process has already done so
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


class RateLimit(logging.Filter):
    """Lets one line of each kind pass per minute.

    The next line that passes says how many were left out. Without this filter, NVFlare
    would log 13 KB a second while a server is down: it asks every 50 ms and logs two
    warnings each time.

    Lines are of one kind if they differ only in numbers and ids. Lines of fednotes must
    be equal, because the names of sites may differ only in digits. Each record becomes
    a single line of plain characters, so that another party's text cannot imitate a
    second line.

    Args:
        now: Returns the current time, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.now = now
        # kind -> (when a line passed, how many were left out since)
        self._kinds: OrderedDict[tuple[str, int, str], tuple[float, int]] = (
            OrderedDict()
        )

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is written; called under the handler's lock."""
        text = one_line(record.getMessage(), 4000)
        if record.name.startswith(_CELLS) and _AWAY.search(text):
            return False
        is_of_fednotes = record.name.split(".", 1)[0] == "fednotes"
        pattern = text if is_of_fednotes else _CHANGING.sub("#", text)
        kind = (record.name, record.levelno, pattern)
        now = self.now()
        passed_at, left_out = self._kinds.get(kind, (-float("inf"), 0))
        if now - passed_at < _REPEAT_SECONDS:
            self._kinds[kind] = (passed_at, left_out + 1)
            return False
        self._kinds[kind] = (now, 0)
        self._kinds.move_to_end(kind)
        if len(self._kinds) > _MAX_KINDS:
            self._kinds.popitem(last=False)
        more = f" ({left_out} more like this left out)" if left_out else ""
        record.msg = text + more
        record.args = None
        return True


# ---- the process itself --------------------------------------------------------------


def main(kit: Path) -> NoReturn:
    """Run as the process of a kit until it ends or a signal stops it.

    Args:
        kit: The kit's absolute path.
    """

    def end(number: int, _frame: object) -> None:
        for sign in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sign, signal.SIG_IGN)
        # Processes that do not end now are left to systemd or the container.
        with suppress(Exception):
            stop(kit, PATIENCE)
        os.write(2, b"stopped; its runs resume when it is started again\n")
        os._exit(0 if number == signal.SIGTERM else INTERRUPTED)

    signal.signal(signal.SIGTERM, end)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, end)
    os.umask(0o077)  # applies to files of NVFlare and torch too
    facts = read_kit(kit)
    module, settings = _PROGRAMS[facts.role]
    options = ["secure_train=true", "config_folder=config", f"org={facts.org}"]
    if facts.role == SITE:
        options += [f"uid={facts.name}", f"heart_beat_interval={HEARTBEAT_SECONDS}"]
    sys.argv = [module, "-m", str(kit), "-s", settings, "--set", *options]
    sys.exit(_run(module))


def _run(module: str) -> int:
    """Run a program of NVFlare as its `__main__` does; return the exit status.

    A program that ends on its own counts as failed.
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
