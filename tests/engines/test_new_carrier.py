"""A carrier is one object: frames through a shared folder give the sum of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fault_toy import JOB, SITES, Toy

from fednotes.core.messages import Frame
from fednotes.engines.deployed import Deployed
from fednotes.engines.host import SiteHost
from fednotes.engines.inprocess import InProcess


class SharedFolder:
    """The server's side: `SITE.frame` goes to a site, `SITE.reply` comes back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def exchange(self, frames: Mapping[str, Frame], **limits: Any) -> Iterator[tuple[str, Frame]]:
        for site, frame in frames.items():
            put(self.folder / f"{site}.frame", bytes(frame))
        waiting, end = set(frames), time.monotonic() + limits["timeout"]
        while waiting and time.monotonic() < end:
            for site in sorted(waiting):
                if (reply := take(self.folder / f"{site}.reply")) is not None:
                    waiting.remove(site)
                    yield site, reply
            time.sleep(0.001)


def serve(folder: Path, site: str, host: SiteHost, stopped: Callable[[], bool]) -> None:
    """A site's side."""
    while not stopped():
        if (frame := take(folder / f"{site}.frame")) is not None:
            put(folder / f"{site}.reply", bytes(host.handle(frame)))
        time.sleep(0.001)


def put(path: Path, data: bytes) -> None:
    """Whole or not there: others read a frame when it has its name."""
    path.with_suffix(path.suffix + ".part").write_bytes(data)
    path.with_suffix(path.suffix + ".part").replace(path)


def take(path: Path) -> bytes | None:
    if not path.exists():
        return None
    data = path.read_bytes()
    path.unlink()
    return data


def test_a_carrier_of_its_own_gives_the_same_sum(tmp_path: Path, instant_disk: None) -> None:
    pipe, stop = tmp_path / "pipe", threading.Event()
    pipe.mkdir()
    hosts = {
        name: SiteHost(partial(Toy, name), tmp_path / name, job=JOB, name=name) for name in SITES
    }
    threads = [
        threading.Thread(target=serve, args=(pipe, name, host, stop.is_set))
        for name, host in hosts.items()
    ]
    for thread in threads:
        thread.start()
    try:
        engine = Deployed(SharedFolder(pipe), SITES, tmp_path / "server", job=JOB)
        x = {"x": torch.arange(4.0)}
        found, expected = (
            federation.sum("train", x, round=0)
            for federation in (engine, InProcess([Toy(name) for name in SITES]))
        )
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert found.metrics == expected.metrics
    assert set(found.tensors) == set(expected.tensors)
    assert all(torch.equal(found.tensors[name], value) for name, value in expected.tensors.items())
