"""Run the toy job with a process for the server and each site, which can be killed.

A process kills itself once, at the place that the file `kill` in its folder names.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from fault_toy import JOB, SITES, Toy, toy_job
from forked import fork

from fednotes.core import store
from fednotes.core.messages import Frame, decode_request
from fednotes.engines.deployed import Deployed
from fednotes.engines.host import SiteHost
from fednotes.engines.requests import Patience

PATIENCE = Patience(timeout=20, knock=1, knock_every=0, pause=0.02, give_up=60)


def die_if_asked(folder: Path, place: str) -> None:
    """Kill this process by SIGKILL if the file says so, the n-th time for "place n"."""
    path = folder / "kill"
    try:
        chosen_place, count = path.read_text().rsplit(" ", 1)
    except (OSError, ValueError):
        return
    if chosen_place != place:
        return
    if int(count) > 1:
        path.write_text(f"{chosen_place} {int(count) - 1}")
        return
    path.unlink()
    os.kill(os.getpid(), signal.SIGKILL)


def _replacing(folder: Path) -> Any:
    """Return an `os.replace` that may die before a file is in its place."""
    real = os.replace

    def replace(source: Any, target: Any) -> None:
        die_if_asked(folder, "writing")
        real(source, target)

    return replace


def site(name: str, folder: Path) -> None:
    """Run a site's process, with one connection for each frame."""
    site_folder = folder / name
    site_folder.mkdir(exist_ok=True)
    os.chdir(folder)  # by which it is found where nobody is left to end it
    socket = folder / f"{name}.sock"
    socket.unlink(missing_ok=True)
    with (
        mock.patch.object(store.os, "replace", _replacing(site_folder)),
        Listener(str(socket), family="AF_UNIX") as listener,
    ):
        host = SiteHost(
            lambda: Toy(name, lambda: die_if_asked(site_folder, "training")),
            site_folder,
            job=JOB,
            name=name,
            keeping=1e9 if name == "a" else 0.0,
        )
        while True:
            with listener.accept() as connection:
                try:
                    frame = connection.recv_bytes()
                    task = decode_request(frame).task
                    die_if_asked(site_folder, f"receiving {task}")
                    reply = host.handle(frame)
                    die_if_asked(site_folder, f"sending {task}")
                    connection.send_bytes(reply)
                except (EOFError, OSError):
                    continue  # the server is gone


class Sockets:
    """Transports frames over the sites' sockets."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def exchange(
        self, frames: Mapping[str, Frame], **limits: Any
    ) -> Iterator[tuple[str, Frame]]:
        waiting: dict[Any, str] = {}
        for name, frame in frames.items():
            try:
                connection: Connection = Client(
                    str(self._folder / f"{name}.sock"), "AF_UNIX"
                )
                connection.send_bytes(frame)
                waiting[connection] = name
            except OSError:
                continue  # not there now
            die_if_asked(
                self._folder / "server", f"asking {decode_request(frame).task}"
            )
        while waiting:
            for ready in wait(list(waiting), limits["timeout"]):
                assert isinstance(ready, Connection)
                name = waiting.pop(ready)
                try:
                    yield name, ready.recv_bytes()
                except (EOFError, OSError):
                    continue
                finally:
                    ready.close()


def server(folder: Path) -> None:
    """Run the server's process, which writes its result into a file."""
    server_folder = folder / "server"
    server_folder.mkdir(exist_ok=True)
    os.chdir(folder)
    with mock.patch.object(store.os, "replace", _replacing(server_folder)):
        engine = Deployed(
            Sockets(folder), SITES, server_folder, job=JOB, patience=PATIENCE
        )
        result = toy_job(engine, {})
    store.write_json(folder / "result.json", [float(x) for x in result])


def run(folder: Path, kills: Mapping[str, str]) -> tuple[np.ndarray, int]:
    """Run the job with all processes, and start each one again that is killed.

    kills: who ("a" or "server") → where. Returns the result and the number of kills.
    """
    for who, place in kills.items():
        (folder / who).mkdir()
        (folder / who / "kill").write_text(place)

    def start(who: str) -> Any:
        target, arguments = (
            (server, (folder,)) if who == "server" else (site, (who, folder))
        )
        return fork(target, *arguments)

    running, killed = {who: start(who) for who in (*SITES, "server")}, 0
    end = time.monotonic() + 60
    try:
        while running["server"].exitcode != 0:
            assert time.monotonic() < end, "the job hangs"
            for who, process in running.items():
                if process.exitcode == -signal.SIGKILL:
                    killed += 1
                    running[who] = start(who)
                assert process.exitcode in (None, 0, -signal.SIGKILL)
            time.sleep(0.01)
    finally:
        for process in running.values():
            process.kill()
            process.join()
    return np.array(json.loads((folder / "result.json").read_text())), killed
