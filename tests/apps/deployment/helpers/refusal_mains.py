"""A small job over a real network, as its processes run it: its frames are kept for the
test.

SIZES    how much each site counts
total    what the server's x is after each round, for the sites that took part
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from dishonest import (
    ask_as_others,
    order_the_server,
    report_failure,
    send_unreadable,
)

from fednotes.core.federation import State
from fednotes.core.messages import Frame
from fednotes.core.update import Tensors, Update
from fednotes.engines.deployed import Deployed
from fednotes.engines.host import SiteHost
from fednotes.engines.launch import Setup
from fednotes.engines.requests import Patience

JOB = "refusals"
SIZES = {"h1": 1.0, "h2": 2.0, "h3": 4.0, "h4": 8.0}


class Ward:
    """A site whose private numbers grow with each task that it does."""

    tasks: ClassVar[frozenset[str]] = frozenset({"add"})

    def __init__(self, name: str) -> None:
        self._id, self.local_state, self.steps = name, torch.zeros(1), 0

    @property
    def id(self) -> str:
        return self._id

    def add(self, tensors: Tensors, *, round: int) -> Update:
        self.local_state = self.local_state * 0.5 + tensors["x"] + SIZES[self._id]
        self.steps += 1
        return Update(
            {"x": self.local_state.clone()}, SIZES[self._id], {"steps": self.steps}
        )

    def state(self) -> State:
        return State(self.steps, {"own": self.local_state}, {})

    def restore(self, state: State) -> None:
        self.local_state, self.steps = state.tensors["own"], state.round


def total(sites: Sequence[str], rounds: int) -> list[float]:
    """Compute the same job with plain numbers: x after each round."""
    x, site_states, values = 1.0, dict.fromkeys(sites, 0.0), []
    for _ in range(rounds):
        site_states = {
            site: site_states[site] * 0.5 + x + SIZES[site] for site in sites
        }
        x = sum(site_states[s] * SIZES[s] for s in sites) / sum(SIZES[s] for s in sites)
        values.append(x)
    return values


class Recorder:
    """A transport that keeps every frame, and who sent it by the pipe's own word."""

    def __init__(self, transport: Any, folder: Path) -> None:
        self._transport, self._folder, self._count = transport, folder, 0
        folder.mkdir(parents=True, exist_ok=True)

    def _keep(self, direction: str, site: str, frame: Frame) -> None:
        self._count += 1
        (self._folder / f"{self._count:04}-{direction}-{site}").write_bytes(
            bytes(frame)
        )

    def exchange(
        self, frames: Mapping[str, Frame], *, timeout: float, grace: float, enough: int
    ) -> Iterator[tuple[str, Frame]]:
        for site, frame in frames.items():
            self._keep("down", site, frame)
        for site, frame in self._transport.exchange(
            frames, timeout=timeout, grace=grace, enough=enough
        ):
            self._keep("up", site, frame)
            yield site, frame


def server_main(setup: Setup, transport: Any) -> None:
    """Some rounds with the sites that are there; what each was made of is the result.

    A job may say how many `numbers` x has, and after which round the process is to
    `die`, once.
    """
    recorder = Recorder(transport, setup.state / "frames")
    often = {"checkpoint_seconds": 0.0} if "die" in setup.job else {}
    patience = Patience(
        min_sites=setup.min_sites,
        timeout=9,
        grace=2,
        pause=0.1,
        give_up=9,
        knock=2,
        **often,
    )
    engine = Deployed(
        recorder, setup.sites, setup.state / "server", job=JOB, patience=patience
    )
    resumed, rows = engine.resume(), []
    x = resumed.tensors["x"] if resumed else torch.ones(setup.job.get("numbers", 4))
    for turn in engine.rounds(resumed.round if resumed else 0, setup.job["rounds"]):
        start = time.monotonic()
        added = engine.sum("add", {"x": x}, round=turn.number)
        x = added.mean()["x"]
        row = {
            "included": list(added.included),
            "x": x[:4].tolist(),
            **dict(added.metrics),
        }
        rows.append(row | {"seconds": time.monotonic() - start})
        turn.commit(State(turn.number + 1, {"x": x}, {}), {})
        transport.publish({"round": turn.number})
        if not resumed and setup.job.get("die") == turn.number:
            os.kill(os.getpid(), signal.SIGKILL)
    engine.end()
    for folder in (setup.state, setup.folder):
        (folder / "result.json").write_text(json.dumps(rows))


class RecordingHost:
    """A site's host that also says in which kit it runs."""

    def __init__(self, setup: Setup) -> None:
        self._host = host(setup.state / "site", setup.site)
        self._path = setup.kit / "frames.txt"

    def handle(self, frame: bytes) -> bytes:
        with self._path.open("a") as process_ids:
            process_ids.write(f"{os.getpid()}\n")
        return self._host.handle(frame)

    def close(self) -> None:
        pass


class Dishonest(RecordingHost):
    """A site that does its task, and asks for what is not its own."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._setup, self._answers = setup, setup.kit / "answers.json"

    def handle(self, frame: bytes) -> bytes:
        if not self._answers.exists():
            answers = ask_as_others(self._setup.site, "h1", self._setup.job_id)
            self._answers.write_text(json.dumps(answers))
        return super().handle(frame)


def host(directory: Path, site: str) -> SiteHost:
    return SiteHost(lambda: Ward(site), directory, job=JOB, name=site)


def site_main(setup: Setup) -> RecordingHost:
    return RecordingHost(setup)


def dishonest_main(setup: Setup) -> RecordingHost:
    return Dishonest(setup)


class Unreadable(RecordingHost):
    """A site that sends what is no result, and then does its task."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._setup = setup

    def handle(self, frame: bytes) -> bytes:
        send_unreadable(self._setup.site, self._setup.job_id)
        return super().handle(frame)


class Commander(RecordingHost):
    """A site that gives the server orders, and then does its task."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._setup, self._answers = setup, setup.kit / "orders.json"

    def handle(self, frame: bytes) -> bytes:
        if not self._answers.exists():
            answers = order_the_server(self._setup.site, "h1", self._setup.job_id)
            self._answers.write_text(json.dumps(answers))
        return super().handle(frame)


class Quitter(RecordingHost):
    """A site that says that its process failed, and then does its task."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._setup = setup

    def handle(self, frame: bytes) -> bytes:
        report_failure(self._setup.site, self._setup.job_id)
        return super().handle(frame)


def quitter_main(setup: Setup) -> RecordingHost:
    return Quitter(setup)


def unreadable_main(setup: Setup) -> RecordingHost:
    return Unreadable(setup)


def commander_main(setup: Setup) -> RecordingHost:
    return Commander(setup)
