"""Start, stop and look at the process of a kit: plain processes, no daemon.

NVFlare runs one process for a participant (`foreground.py`) and starts one more for each job. Both
bear the kit's folder on their command line, by which they are found: no file with a number that
another process may have come to bear.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from fednotes.core.errors import ConfigError, FednotesError
from fednotes.core.store import make_private, owned, write_json, write_text
from fednotes.engines.nvflare.certificates import check_kit, settle
from fednotes.engines.nvflare.kit import COMM, COMM_FILE, LOG_FILE, SERVER, SITE, read_kit
from fednotes.engines.nvflare.log import ECHO_VARIABLE, KIT_VARIABLE

JOB_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # NVFlare's folder of a job
KEPT_JOBS = 3  # such folders, the newest; a run's own state is elsewhere
OUTPUT_FILE = "console.log"  # what the processes print, of the last start only
PACKAGE = "nvflare.private.fed.app."  # of the processes of jobs
MODULE = "fednotes.engines.nvflare.foreground"
NO_WATCH = "--no-watch"  # its option
WATCH_MODULE = "fednotes.engines.nvflare.watch"
_OF_A_SERVER = {"GRPC_VERBOSITY": "ERROR"}  # or each stranger at its port lengthens OUTPUT_FILE
_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # no module is taken from the kit's own folder
    "MALLOC_ARENA_MAX": "4",  # less memory is lost to fragments of large frames
    "NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT": "20",  # it waits 900 s at the end for a site it lost
}
logger = logging.getLogger("fednotes.engines.nvflare.processes")
_started: list[subprocess.Popen[bytes]] = []  # by this process: they outlive it, or are asked for


@dataclass(frozen=True, slots=True)
class Status:
    """One participant's processes. jobs: ids of the jobs whose processes run here.

    watch: whether the server's watch runs.
    """

    name: str
    role: str
    pid: int | None
    jobs: tuple[str, ...]
    watch: bool
    log: Path

    @property
    def running(self) -> bool:
        return self.pid is not None


def start(kit: Path, variables: Mapping[str, str] | None = None, *, watch: bool = True) -> Status:
    """Start the server or the site of a kit, in the background; it outlives this process.

    variables: added to its environment, and to that of its job processes.
    watch: at a server, whether runs that stop go on by themselves (`engines/nvflare/watch.py`).
    Raises ConfigError if it runs already, the kit is an admin's, or its certificate cannot work
    (`check_kit`); one that ends soon is logged as a warning.
    """
    _warn(kit)
    return launch(kit, variables, watch=watch)


def run(kit: Path) -> NoReturn:
    """Become the process of a kit, which also prints its log (`foreground.py` has its exit codes).

    Raises what `start` raises.
    """
    _warn(kit)
    command, environment = _prepared(kit)
    os.chdir(command[3])
    os.execve(command[0], command, {**environment, ECHO_VARIABLE: "1"})


def _warn(kit: Path) -> None:
    for warning in check_kit(kit):
        logger.warning("%s", warning)


def launch(kit: Path, variables: Mapping[str, str] | None = None, *, watch: bool = True) -> Status:
    """`start` without a look at the kit's certificate."""
    command, environment = _prepared(kit)
    if not watch:
        command.append(NO_WATCH)
    kit = kit.resolve()
    _launch(command, kit, {**environment, **(variables or {})}, OUTPUT_FILE)
    return status(kit)


def _prepared(kit: Path) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a kit's process, for which the kit is made ready."""
    kit, facts = kit.resolve(), read_kit(kit)
    if facts["role"] not in (SERVER, SITE):
        raise ConfigError(f"{kit}: is the kit of {facts['role']!r}, which runs no process")
    before = status(kit)
    if before.running or before.jobs:
        raise ConfigError(f"{kit}: {facts['name']} runs already (process {before.pid})")
    if any(letter.isspace() for letter in str(kit)):
        raise ConfigError(f"{kit}: NVFlare cannot run in a folder with a space in its path")
    (kit / "transfer").mkdir(exist_ok=True)
    settle(kit)
    _settle(kit)
    _prune(kit)
    make_private(kit)  # also one that came out of an archive, or an earlier version's
    own = _OF_A_SERVER if facts["role"] == SERVER else {}
    environment = {**_ENVIRONMENT, **own, **os.environ, KIT_VARIABLE: str(kit)}
    return [sys.executable, "-m", MODULE, str(kit)], environment


def _launch(command: list[str], kit: Path, environment: Mapping[str, str], output: str) -> int:
    try:
        with open(kit / output, "wb", opener=owned) as printed:
            process = subprocess.Popen(
                command,
                cwd=kit,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=0o077,  # also for what NVFlare and torch write
            )
    except OSError as error:
        raise FednotesError(f"{kit}: cannot be started ({error.strerror})") from error
    _started.append(process)
    return process.pid


def _settle(kit: Path) -> None:
    """Tell NVFlare where the kit lies now, for it takes absolute paths only for its stores, and
    how the kit's processes are connected, also those of a kit that was made before it was so."""
    path = kit / "local" / "resources.json"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: the kit is not complete ({error.strerror})") from error
    settled = re.sub(r'"[^"]*/(store/(?:jobs|snapshots))"', rf'"{kit}/\1"', text)
    if settled != text:
        write_text(path, settled)
    write_json(kit / COMM_FILE, COMM)


def _prune(kit: Path) -> None:
    """Delete what NVFlare left of jobs that are over. Nothing runs here now."""
    for old in job_folders(kit)[:-KEPT_JOBS]:
        shutil.rmtree(old, ignore_errors=True)


def job_folders(kit: Path) -> list[Path]:
    """NVFlare's folders of jobs in a kit, oldest first."""
    jobs = [path for path in kit.iterdir() if path.is_dir() and JOB_ID.fullmatch(path.name)]
    return sorted(jobs, key=lambda path: path.stat().st_mtime)


def status(kit: Path) -> Status:
    """The processes of a kit that run now."""
    kit, facts = kit.resolve(), read_kit(kit)
    main, jobs, watch = None, [], False
    for pid, words in of_kit(kit):
        if WATCH_MODULE in words:
            watch = True
        elif MODULE in words:
            main = pid
        else:
            jobs.append(words[words.index("-n") + 1] if "-n" in words else str(pid))
    return Status(facts["name"], facts["role"], main, tuple(sorted(jobs)), watch, kit / LOG_FILE)


def stop(kit: Path, patience: float = 10.0) -> Status:
    """End a kit's processes; those that do not end within `patience` seconds are killed.

    Returns what still runs, which is nothing but the process that asks.
    """
    kit = kit.resolve()
    read_kit(kit)

    def others() -> list[int]:
        return [pid for pid, _ in of_kit(kit) if pid != os.getpid()]

    for sign, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 5.0)):
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
        modules = (PACKAGE, MODULE, WATCH_MODULE)
        ours = str(kit) in words and any(w.startswith(modules) for w in words)
        if ours and int(owner) in owners and not state.startswith("Z"):
            found.append((int(number), words))
    return found
