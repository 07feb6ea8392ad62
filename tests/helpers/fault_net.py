"""A transport of hosts in this process that loses, repeats and kills at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fault_toy import JOB, SITES, Toy

from fednotes.core.messages import Frame, Request, decode_request
from fednotes.engines.deployed import Deployed
from fednotes.engines.history import OPENED
from fednotes.engines.host import SiteHost
from fednotes.engines.requests import Patience
from fednotes.engines.secure import SecureSeal

STRICT = Patience(timeout=10, knock=1, knock_every=0, pause=1, give_up=300)


class ServerKilled(BaseException):
    pass


def seal_of(folder: Path, site: str, threshold: int | None = None) -> SecureSeal:
    """Return a site's part in a secure sum of the toy job, kept with its host's
    files."""
    record = folder / site / OPENED
    return SecureSeal(site, SITES, job=JOB, threshold=threshold, record=record)


@dataclass
class Net:
    """Hosts in this process and a simulated clock. `chaos` loses, repeats and kills at
    random.

    down: sites that cannot be reached. failures_left: kills of the server that are to
        come.
    seal: makes a site's part in a secure sum. came: every reply. before: called with
    each task that is asked. after: by task, what happens once when it was asked the
    first time.
    """

    makes: Mapping[str, Any]
    folder: Path
    chaos: random.Random | None = None
    failures_left: int = 0
    now: float = 0.0
    down: set[str] = field(default_factory=set)
    hosts: dict[str, SiteHost] = field(default_factory=dict)
    sent: list[tuple[str, Request, Frame]] = field(default_factory=list)
    seal: Callable[[str], Any] | None = None
    max_norm: float = 0.0
    came: list[tuple[str, Frame]] = field(default_factory=list)
    before: Callable[[str], None] = lambda task: None
    after: dict[str, Callable[[], None]] = field(default_factory=dict)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def host(self, site: str) -> SiteHost:
        if site not in self.hosts:
            self.hosts[site] = SiteHost(
                self.makes[site],
                self.folder / site,
                job=JOB,
                name=site,
                sealer=self.seal and self.seal(site),
                builds_on=Toy.builds_on,
                max_norm=self.max_norm,
                keeping=self.keeping(site),
            )
        return self.hosts[site]

    def keeping(self, site: str) -> float:
        return self.chaos.choice((0.0, 1e9)) if self.chaos else 1e9

    def exchange(
        self, frames: Mapping[str, Frame], **limits: Any
    ) -> Iterator[tuple[str, Frame]]:
        came, task = 0, decode_request(next(iter(frames.values()))).task
        self.before(task)
        for site, frame in frames.items():
            self.now += 0.01
            self.sent.append((site, decode_request(frame), frame))
            luck = self.chaos.random() if self.chaos else 1.0
            if site in self.down or luck < 0.03:
                continue
            reply = self.host(site).handle(frame)
            self.came.append((site, reply))
            if luck < 0.10:  # killed after it, its reply is lost or not
                self.hosts.pop(site)
            if luck < 0.07:
                continue
            if luck < 0.12 and self.failures_left:
                self.failures_left -= 1
                raise ServerKilled
            came += 1
            yield site, reply
            if luck < 0.15:
                yield site, self.host(site).handle(frame)
        self.now += limits["timeout"] if came < len(frames) else 0.0
        self.after.pop(task, lambda: None)()

    def engine(
        self, sites: Sequence[str], patience: Patience = STRICT, **options: Any
    ) -> Deployed:
        options = {"clock": self.clock, "sleep": self.sleep, "job": JOB} | options
        return Deployed(
            self, sites, self.folder / "server", patience=patience, **options
        )


def toys(folder: Path, *chances: random.Random | None, **options: Any) -> Net:
    """Return the sites of the toy job."""
    return Net(
        {site: lambda site=site: Toy(site) for site in SITES},
        folder,
        *chances,
        **options,
    )
