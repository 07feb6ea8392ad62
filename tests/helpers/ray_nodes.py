"""A Ray cluster of several nodes on this machine, which ends with its context."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from scratch import scratch
from worker_runs import PROGRAM

RAY = (sys.executable, "-m", "ray.scripts.scripts")
_STORE_BYTES = 100_000_000
_STARTED = "Ray runtime started."


class RayNodes:
    """The nodes of a cluster, with one core each.

    Args:
        folder: Folder of Ray's logs and sockets; its processes work in it.
        number: Number of nodes.

    Attributes:
        address: Address of the head node.
        environment: The environment of a process that may use the cluster.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self._folder = folder
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, map(os.path.abspath, sys.path))),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        port = _find_free_port()
        self.address = f"127.0.0.1:{port}"
        self._log = folder / "start.log"
        head = ("--head", f"--port={port}", "--include-dashboard=false")
        self._nodes = [
            self._start(*head, f"--temp-dir={folder / 'ray'}"),
            *(self._start(f"--address={self.address}") for _ in range(1, number)),
        ]

    def wait(self, seconds: float = 60) -> None:
        """Wait until all nodes have started."""
        deadline = time.monotonic() + seconds
        while self._log.read_text().count(_STARTED) < len(self._nodes):
            if time.monotonic() > deadline:
                raise TimeoutError(self._log.read_text())
            time.sleep(0.05)

    def end(self) -> None:
        """Kill the processes of all nodes."""
        for number in range(len(self._nodes)):
            self.kill(number)

    def find_workers(self) -> list[int]:
        """Return the ids of the worker processes on all nodes."""
        token = f"RAY_AUTH_TOKEN={self.environment['RAY_AUTH_TOKEN']}".encode()
        workers = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                settings = (process / "environ").read_bytes().split(b"\0")
                if PROGRAM in words and token in settings:
                    workers.append(int(process.name))
        return workers

    def kill(self, number: int) -> None:
        """Kill all processes of a node, as a power cut would."""
        if self._nodes[number].poll() is not None:
            return
        processes = [self._nodes[number].pid]
        for parent in processes:
            processes += find_children(parent)
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._nodes[number].wait()

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        with open(self._log, "ab") as log:
            return subprocess.Popen(
                [
                    *RAY, "start", *words, "--block", "--num-cpus=1",
                    "--disable-usage-stats", f"--object-store-memory={_STORE_BYTES}",
                ],
                cwd=self._folder, env=self.environment, stdout=log, stderr=log,
            )  # fmt: skip


@contextmanager
def ray_nodes(number: int) -> Iterator[RayNodes]:
    """Yield a cluster; its processes end with the context, or with this process."""
    with scratch() as folder:
        nodes = RayNodes(folder, number)
        try:
            nodes.wait()
            yield nodes
        finally:
            nodes.end()


def find_children(parent: int) -> list[int]:
    """Return the ids of the processes that a process has started."""
    children = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            status = (process / "stat").read_text().rpartition(")")[2].split()
            if int(status[1]) == parent:
                children.append(int(process.name))
    return children


def _find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
