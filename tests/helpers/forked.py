"""Processes in which fednotes is imported already.

One process imports fednotes and forks each of these, so that none of them imports
torch or compiles kernels, which takes longer than most commands do. It has a single thread, because a
fork copies only the thread that forks.

What such a process shares with its siblings is the interpreter's hash seed and what
has been imported. Tests of start-up, of memory or of imports need `subprocess`.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

_CONTEXT = multiprocessing.get_context("forkserver")
_IMPORTED = (
    "fednotes.cli.app",
    "fednotes.jobs.simulate",
    "fednotes.report.html",
    "fednotes.engines.deployed",
    "fednotes.engines.host",
    "compiled_kernels",
)


def fork(target: Callable[..., None], *arguments: Any) -> Any:
    """Start a function of a module in a process of its own, and return the process.

    The process has the environment of this one, except that the libraries that compute
    use one thread. It may have no processes of its own, and ends with this one.

    Args:
        target: The function; its module is imported in the process.
        arguments: What it is called with; they are pickled.

    Returns:
        The process, with the methods of a `multiprocessing.Process`.
    """
    _start_server()
    process = _CONTEXT.Process(
        target=_run, args=(dict(os.environ), target, arguments), daemon=True
    )
    process.start()
    return process


def _start_server() -> None:
    """Start the process that forks, if it does not run.

    The libraries start their threads when they are imported. Without the path the
    process cannot import fednotes.
    """
    _CONTEXT.set_forkserver_preload([*_IMPORTED])
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    with mock.patch.dict(os.environ, environment):
        forkserver.ensure_running()


def _run(
    environment: Mapping[str, str],
    target: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with mock.patch("os.fsync"):  # as in the tests' own process
        target(*arguments)


class Command:
    """A command of fednotes in a process of its own, whose stdout nobody reads.

    It begins as a shell starts a command in the foreground: SIGINT interrupts it.

    Args:
        folder: Its working directory.
        words: Its words after "fednotes".
        largest_file: The most bytes that a file of it can have; 0 is no limit.
    """

    def __init__(self, folder: Path, *words: str, largest_file: int = 0) -> None:
        descriptor, path = tempfile.mkstemp()
        os.close(descriptor)
        self._stderr = Path(path)
        self._process = fork(_run_command, folder, words, path, largest_file)

    @property
    def pid(self) -> int:
        """The number of its process."""
        pid: int = self._process.pid
        return pid

    def is_alive(self) -> bool:
        """Return whether it has not ended."""
        alive: bool = self._process.is_alive()
        return alive

    def send(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def wait(self, seconds: float = 120) -> tuple[int, str]:
        """Wait for its end; return the exit code, or -number of a signal, and stderr."""
        self._process.join(seconds)
        if self.is_alive():
            self.end()
            raise TimeoutError(f"a command took longer than {seconds} s")
        printed = self._stderr.read_text("utf-8")
        self._stderr.unlink()
        return self._process.exitcode, printed

    def end(self) -> None:
        """Kill it if it is alive."""
        self._process.kill()
        self._process.join()
        self._stderr.unlink(missing_ok=True)


def _run_command(
    folder: Path, words: tuple[str, ...], stderr: str, largest_file: int
) -> None:
    """Run a command in this process."""
    from fednotes.cli import app

    # A limit would cut the bytecode of what the command imports.
    sys.dont_write_bytecode = True
    if largest_file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    os.chdir(folder)
    for path, descriptor in ((os.devnull, 1), (stderr, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["fednotes", *words]
    app.main()
