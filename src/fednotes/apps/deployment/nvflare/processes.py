"""Start, stop and look at the processes of a kit: plain processes, no daemon.

    python -m fednotes.apps.deployment.nvflare.processes KIT

is a site's or the server's process: NVFlare's own program in the foreground, which
`run` becomes and `start` begins in the background. It takes every process of the kit
with it, and ends with

    0        SIGTERM: as it was told to
    130      Ctrl-C
    others   it failed: whoever looks after it (systemd, a container) may start it again

NVFlare starts one process more for each job. All bear the kit's folder on their command
line, by which they are found: no file with a number that another process may have come
to bear.
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

from fednotes.apps.deployment.nvflare.certificates import check_kit, settle
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
from fednotes.core.cleaning import one_line
from fednotes.core.errors import ConfigError, FednotesError, needs, on_disk
from fednotes.core.parsing import read_json_table
from fednotes.core.settings import build, checked
from fednotes.core.store import lock, make_private, open_private, write_json

# the folder of the kit whose process this is, or whose job's
KIT_VARIABLE = "FEDNOTES_KIT"
# set: runs that stop stay so, as tests and benchmarks need
UNWATCHED = "FEDNOTES_UNWATCHED"
# set: what goes to the log is also printed, for who looks on
ECHO_VARIABLE = "FEDNOTES_ECHO"

_CHANGING = re.compile(
    r"[0-9a-f]{4,}(-[0-9a-f]{4,})+|(?<![a-z_-])[0-9]+", re.IGNORECASE
)
_KINDS, _SELDOM = 256, 60.0  # kinds of lines that are remembered; seconds
# NVFlare says it at each start and whenever a side is away; `presence.py` says it once.
_AWAY = re.compile(r"no connection to |target_unreachable|no path\b")
_CELLS = "nvflare.fuel.f3.cellnet."
# NVFlare's folder of a job
JOB_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
KEPT_JOBS = 3  # such folders, the newest; a run's own state is elsewhere
OUTPUT_FILE = "console.log"  # what the processes print, of the last start only
MODULE = "fednotes.apps.deployment.nvflare.processes"
OURS, OF_JOBS = (
    "fednotes.apps.deployment.",
    "nvflare.private.fed.app.",
)  # modules of a kit's processes
INTERRUPTED = 130  # as shells count a program that SIGINT ended
FAILED = 1  # NVFlare came to its end and nobody had told it to
# seconds for the other processes; a container's end may be violent after ten
PATIENCE = 5.0
_PROGRAMS = {
    SERVER: (f"{OF_JOBS}server.server_train", "fed_server.json"),
    SITE: (f"{OF_JOBS}client.client_train", "fed_client.json"),
}
# or each stranger at its port lengthens OUTPUT_FILE
_OF_A_SERVER = {"GRPC_VERBOSITY": "ERROR"}
_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # no module is taken from the kit's own folder
    "MALLOC_ARENA_MAX": "4",  # less memory is lost to fragments of large frames
    # it waits 900 s at the end for a site it lost
    "NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT": "20",
}
logger = logging.getLogger("fednotes.apps.deployment.nvflare.processes")
CONTACT_FILE = Path("state") / "contact.json"
LOST_SECONDS = 20.0  # a site asks the server every 5 s
# by this process: they outlive it, or are asked for
_started: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True, slots=True)
class Status:
    """One participant's processes. jobs: ids of the jobs whose processes run here."""

    name: str
    role: str
    pid: int | None
    jobs: tuple[str, ...]
    log: Path

    @property
    def running(self) -> bool:
        return self.pid is not None


def start(
    kit: Path, variables: Mapping[str, str] | None = None, *, check: bool = True
) -> Status:
    """Start the server or the site of a kit, in the background; it outlives this
    process.

    variables: added to its environment, and to that of its job processes. check: its
        certificates.
    Raises ConfigError if it runs already, the kit is an admin's, or its certificate
    cannot work (`check_kit`); one that ends soon is logged as a warning.
    """
    command, environment = _prepared(kit, check)
    kit = kit.resolve()
    refused = on_disk(kit, FednotesError, what="be started")
    with refused, open(kit / OUTPUT_FILE, "wb", opener=open_private) as printed:
        process = subprocess.Popen(
            command,
            cwd=kit,
            env={**environment, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            umask=0o077,  # also for what NVFlare and torch write
        )
    _started.append(process)
    return status(kit)


def run(kit: Path) -> NoReturn:
    """Become the process of a kit, which also prints its log.

    Raises what `start` raises.
    """
    command, environment = _prepared(kit)
    os.chdir(command[3])
    os.execve(command[0], command, {**environment, ECHO_VARIABLE: "1"})


def _prepared(kit: Path, check: bool = True) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a kit's process, for which the kit is made
    ready.

    NVFlare is told anew where the kit lies, and which of our classes are its parts: so
    a kit that was moved, or made by an earlier version, goes on working.
    """
    for warning in check_kit(kit) if check else ():
        logger.warning("%s", warning)
    kit, facts = kit.resolve(), read_kit(kit)
    if facts.role == ADMIN:
        raise ConfigError(f"{kit}: is the kit of {facts.role!r}, which runs no process")
    before = status(kit)
    if before.running or before.jobs:
        raise ConfigError(f"{kit}: {facts.name} runs already (process {before.pid})")
    if any(letter.isspace() for letter in str(kit)):
        raise ConfigError(
            f"{kit}: NVFlare cannot run in a folder with a space in its path"
        )
    (kit / "transfer").mkdir(exist_ok=True)
    settle(kit)
    files = build_kit_files(facts, kit)
    for name in REWRITTEN_FILES:
        write_json(kit / name, files[name])
    # what NVFlare left of jobs; nothing runs here now
    for old in job_folders(kit)[:-KEPT_JOBS]:
        shutil.rmtree(old, ignore_errors=True)
    _close(kit)
    own = _OF_A_SERVER if facts.role == SERVER else {}
    environment = {**_ENVIRONMENT, **own, **os.environ, KIT_VARIABLE: str(kit)}
    return [sys.executable, "-m", MODULE, str(kit)], environment


def _close(kit: Path) -> None:
    """Close a kit to other users, as one that came out of an archive or of an earlier
    version.

    What others could change may no longer be what its owner put there, so a warning
    says so.
    """
    closed = make_private(kit)
    changeable = [path for path, mode in closed.items() if mode & 0o002]
    if changeable:
        logger.warning(
            "%s: other users of this machine could change %d files and folders, such as %s, until "
            "now; look at the site's file and its decisions, or ask for another kit",
            kit,
            len(changeable),
            changeable[-1],
        )


def job_folders(kit: Path) -> list[Path]:
    """NVFlare's folders of jobs in a kit, oldest first."""
    jobs = [
        path for path in kit.iterdir() if path.is_dir() and JOB_ID.fullmatch(path.name)
    ]
    return sorted(jobs, key=lambda path: path.stat().st_mtime)


def status(kit: Path) -> Status:
    """The processes of a kit that run now."""
    kit, facts = kit.resolve(), read_kit(kit)
    main, jobs = None, []
    for pid, words in of_kit(kit):
        if any(word.startswith(OURS) for word in words):
            main = pid
        else:
            jobs.append(words[words.index("-n") + 1] if "-n" in words else str(pid))
    return Status(facts.name, facts.role, main, tuple(sorted(jobs)), kit / LOG_FILE)


def stop(kit: Path, patience: float = 10.0, *, kill: bool = False) -> Status:
    """End a kit's processes; those that do not end within `patience` seconds are
    killed.

    Args:
        kit: The kit's folder.
        patience: Seconds.
        kill: Kill them at once, as a power cut would.

    Returns:
        What still runs, which is nothing but the process that asks.
    """
    kit = kit.resolve()
    read_kit(kit)

    def others() -> list[int]:
        return [pid for pid, _ in of_kit(kit) if pid != os.getpid()]

    steps = ((signal.SIGTERM, patience), (signal.SIGKILL, 5.0))
    for sign, seconds in steps[1:] if kill else steps:
        end = time.monotonic() + seconds
        for pid in others():
            with suppress(ProcessLookupError):
                os.kill(pid, sign)
        while time.monotonic() < end:
            if not others():
                return status(kit)
            time.sleep(0.1)
    raise FednotesError(f"{kit}: process {others()[0]} does not end")


def of_kit(kit: Path) -> list[tuple[int, list[str]]]:
    """A kit's processes: number and words of the command line. kit: absolute.

    Those of its owner and of this account alone: anybody can give a process any words.
    """
    _started[:] = [process for process in _started if process.poll() is None]
    listing = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ruid=,stat=,command="],
        capture_output=True,
        text=True,
        errors="replace",
        check=True,
    )
    found, owners = [], {os.getuid(), kit.stat().st_uid}
    for line in listing.stdout.splitlines():
        number, owner, state, *words = line.split()
        ours = str(kit) in words and any(w.startswith((OURS, OF_JOBS)) for w in words)
        if ours and int(owner) in owners and not state.startswith("Z"):
            found.append((int(number), words))
    return found


# ---- what a site's process knows of the server ---------------------------------------


@checked(frozen=True)
class LastContact:
    """What a process knows. since: of the server's first answer without a pause, last:
    of its newest. refused: why the server does not let it in, or empty."""

    pid: int = 0
    since: float = 0.0
    last: float = 0.0
    refused: str = ""


def contact_of(kit: Path, pid: int | None) -> LastContact | None:
    """What a running process keeps of itself; None if that is nothing yet."""
    try:
        known = build(
            LastContact, read_json_table(kit / CONTACT_FILE), CONTACT_FILE.name
        )
    except ConfigError:
        return None
    return known if known.pid == pid else None


def connected(known: LastContact | None, now: float) -> bool:
    """Return whether the server answered lately; a clock that was set back does not say
    so."""
    return known is not None and abs(now - known.last) <= LOST_SECONDS


# ---- the log -------------------------------------------------------------------------


class KitLog(WatchedFileHandler):
    """The log of a kit: its process and those of its jobs append to one file.

    file: its name. most: bytes of one file, more or less; then it becomes `file.1`, and
    `kept` of these stay. Whoever finds it too long moves it away; the others open the
    new one. Where $FEDNOTES_ECHO is set the lines are printed too.
    """

    def __init__(self, file: str, most: int, kept: int) -> None:
        self.most, self.kept = most, kept
        folder = Path(os.environ.get(KIT_VARIABLE) or ".").resolve()
        super().__init__(folder / file, encoding="utf-8", delay=True)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        with suppress(OSError):
            if os.stat(self.baseFilename).st_size > self.most:
                self._move()
        super().emit(record)
        if os.environ.get(ECHO_VARIABLE):
            with suppress(OSError):
                print(self.format(record), file=sys.stderr, flush=True)

    def _move(self) -> None:
        folder = os.open(Path(self.baseFilename).parent, os.O_RDONLY)
        try:
            lock(folder)
            if os.stat(self.baseFilename).st_size <= self.most:
                return  # another process was first
            names = [
                self.baseFilename,
                *(f"{self.baseFilename}.{n + 1}" for n in range(self.kept)),
            ]
            for newer, older in reversed(list(pairwise(names))):
                with suppress(FileNotFoundError):
                    os.replace(newer, older)
        finally:
            os.close(folder)


class RateLimit(logging.Filter):
    """Lines of one kind pass once a minute; the next that passes says how many were
    left out.

    What passes is one line of plain characters: another party's words can forge no
    second one.

    A kind is equal but for numbers and ids (a site may be h1); under our loggers,
    equal. NVFlare asks a dead server every 50 ms and writes two warnings each time: 13
    KB a second.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.now = now
        self._kinds: OrderedDict[tuple[str, int, str], tuple[float, int]] = (
            OrderedDict()
        )

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is written; called under the handler's lock."""
        text, ours = (
            one_line(record.getMessage(), 4000),
            record.name.split(".", 1)[0] == "fednotes",
        )
        if record.name.startswith(_CELLS) and _AWAY.search(text):
            return False
        kind = (record.name, record.levelno, text if ours else _CHANGING.sub("#", text))
        now = self.now()
        passed, left_out = self._kinds.get(kind, (-float("inf"), 0))
        if now - passed < _SELDOM:
            self._kinds[kind] = (passed, left_out + 1)
            return False
        self._kinds[kind] = (now, 0)
        self._kinds.move_to_end(kind)
        if len(self._kinds) > _KINDS:
            self._kinds.popitem(last=False)
        more = f" ({left_out} more like this left out)" if left_out else ""
        record.msg, record.args = text + more, None
        return True


# ---- the process itself --------------------------------------------------------------


def main(kit: Path) -> NoReturn:
    """Be the process of a kit until it ends or a signal says so. kit: absolute."""

    def end(number: int, _frame: object) -> None:
        for sign in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sign, signal.SIG_IGN)
        with suppress(Exception):  # what does not end is the platform's
            stop(kit, PATIENCE)
        os.write(2, b"stopped; its runs go on when it is started again\n")
        os._exit(0 if number == signal.SIGTERM else INTERRUPTED)

    signal.signal(signal.SIGTERM, end)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, end)
    os.umask(0o077)  # what NVFlare and torch write is for the kit's owner alone too
    facts = read_kit(kit)
    module, settings = _PROGRAMS[facts.role]
    options = ["secure_train=true", "config_folder=config", f"org={facts.org}"]
    if facts.role == SITE:
        options += [f"uid={facts.name}", f"heart_beat_interval={HEARTBEAT_SECONDS}"]
    sys.argv = [module, "-m", str(kit), "-s", settings, "--set", *options]
    sys.exit(_run(module))


def _run(module: str) -> int:
    """NVFlare's program as its own `__main__` runs it, but that its end is a failure."""
    with needs("nvflare", "deploy"):
        from nvflare.fuel.f3.mpm import MainProcessMonitor
    program = importlib.import_module(module)

    def until_it_ends(args: Any) -> int:
        program.main(args)
        return FAILED

    program.version_check()
    args = program.parse_arguments()
    code = MainProcessMonitor.run(
        main_func=until_it_ends, run_dir=args.workspace, args=args
    )
    return int(code or FAILED)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
