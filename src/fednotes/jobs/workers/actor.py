"""A Ray actor that holds a worker process on a node of a cluster.

The actor only carries frames between Ray and the pipes of the process. Ray finds this
class by its name, and its methods take and return bytes.
"""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import fednotes
from fednotes.core.pipes import PipeClosedError
from fednotes.jobs.workers.child_process import SITES, ChildProcess

# Packages whose versions may change the last bits of results, or the words of texts.
_PACKAGES = ("torch", "numpy", "numba", "tokenizers", "transformers")


class WorkerActor:
    """Holds a worker process for the sites of a simulation.

    Ray calls `send` and `receive` in a thread each, and the other methods in a third.
    """

    def __init__(self) -> None:
        self._child = ChildProcess(SITES)

    def describe(self, paths: bytes) -> bytes:
        """Return the description of this node (`describe_node`) as JSON.

        Args:
            paths: A JSON list of files and folders that the node must have.
        """
        return json.dumps(describe_node(json.loads(paths))).encode()

    def send(self, frame: bytes) -> None:
        """Pass a frame on to the process; `receive` says whether it has ended."""
        try:
            self._child.send(frame)
        except PipeClosedError:
            return

    def receive(self) -> bytes:
        """Wait for the next frame of the process; b"" says that it has ended."""
        try:
            return bytes(self._child.receive())
        except (PipeClosedError, OSError):
            return b""

    def describe_end(self) -> bytes:
        """Return how the process ended, in words."""
        return self._child.describe_end().encode()

    def end(self) -> None:
        """Let the process end, and wait until it has ended."""
        self._child.close()
        self._child.wait()


def describe_node(paths: list[str]) -> dict[str, Any]:
    """Return what must be equal on the nodes of a cluster, as JSON values.

    Args:
        paths: Files and folders that the node must have.

    Returns:
        "versions": the version of each package; "has_token": whether this node accepts
        only requests with the cluster's token; "processor": the processor's name;
        "missing": the paths that do not exist here.
    """
    return {
        "versions": list_package_versions(),
        "has_token": os.environ.get("RAY_AUTH_MODE", "").lower() == "token",
        "processor": read_processor(),
        "missing": [path for path in paths if not os.path.exists(path)],
    }


def list_package_versions() -> dict[str, str]:
    """Return the versions that may change results; "" for a package that is absent."""
    versions = {"fednotes": fednotes.__version__, "Python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = ""
    return versions


def read_processor(path: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name; its architecture if the system names no other."""
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
