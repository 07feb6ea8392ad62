"""Sites behind their rules and their ledger, with updates given in advance; and who
asks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from fault_net import STRICT, Net
from secure_net import Giver

from fednotes.apps.deployment.rules.guard import SiteGuard, settle_job
from fednotes.apps.deployment.rules.ledger import Ledger, read_ledger_lines
from fednotes.apps.deployment.rules.policy import Policy
from fednotes.core.federation import Option
from fednotes.core.messages import Reply, Request, decode_reply, encode_message
from fednotes.core.update import Tensors, Total, Update
from fednotes.engines.host import SiteHost
from fednotes.engines.secure import SecureSeal, SecureSum

SITES, JOB = ("a", "b", "c", "d"), "job-1"
TABLE = {"name": "job", "sites": list(SITES), "min_sites": 3}


class Trainer(Giver):
    """Gives one update after the other, the last one for ever, whatever it is asked
    for."""

    tasks: ClassVar[frozenset[str]] = frozenset(
        {"prepare", "train", "evaluate", "calibrate", "noisy_gradients"}
    )

    def prepare(self, tensors: Tensors) -> Update:
        """Answer nothing, as tasks do that only set something at the site."""
        return Update()

    def train(self, tensors: Tensors, **options: Option) -> Update:
        return self.give(tensors)

    evaluate = calibrate = noisy_gradients = train


class Guarded:
    """One site. policy, covered: may be changed at any time; `restart` is after a kill."""

    def __init__(
        self,
        kit: Path,
        policy: Policy,
        updates: list[Update],
        *,
        secure: bool = False,
        site: str = "b",
        run: str = "run1",
        threshold: int = 3,
        table: Mapping[str, Any] = TABLE,
        **options: Any,
    ) -> None:
        self.kit, self.policy, self.updates, self.site, self.run = (
            kit,
            policy,
            updates,
            site,
            run,
        )
        self.secure, self.threshold, self.table, self.options = (
            secure,
            threshold,
            table,
            options,
        )
        self.covered: Mapping[str, int] = {"steps": 9, "tokens": 5_000, "patients": 60}
        self.messages: list[str] = []
        self.approve()
        self.restart()

    def approve(self) -> None:
        settle_job(self.kit, self.table, approve=True, by="tester")

    def in_another_run(self, run: str, updates: list[Update]) -> Guarded:
        """Return the same site in another run of the job, under the same approval."""
        second = copy(self)
        second.run = run
        second.updates = updates
        second.messages = []
        second.restart()
        return second

    def restart(self) -> None:
        self.guard = SiteGuard(
            self.kit,
            self.site,
            self.run,
            self.table,
            lambda: self.policy,
            secure=self.secure,
            threshold=self.threshold,
            folders=[self.kit / "state" / self.run],
        )

        def make() -> Trainer:
            self.guard.count_covered = lambda task: self.covered
            return Trainer(self.site, self.updates)

        seal = (
            SecureSeal(self.site, SITES, job=JOB, threshold=3) if self.secure else None
        )
        self.host = SiteHost(
            make,
            self.kit / "state" / self.run,
            job=JOB,
            name=self.site,
            guard=self.guard,
            sealer=seal,
            tell=self.messages.append,
            **self.options,
        )

    def ask(
        self,
        task: str,
        number: int,
        counted: int | Mapping[str, int] = 0,
        **fields: Any,
    ) -> Reply:
        if isinstance(counted, int):
            counted = dict.fromkeys(SITES, counted)
        return self.send(
            Request(JOB, 1, number, task, counted=counted, first=True, **fields)
        )

    def send(self, request: Request) -> Reply:
        return decode_reply(self.host.handle(encode_message(request)))

    @property
    def ledger(self) -> list[dict[str, Any]]:
        path = Ledger.in_kit(self.kit).path
        return list(read_ledger_lines(path)) if path.exists() else []


class Network(Net):
    """One server over guarded sites, under the secure sum of three or more of them.

    refusals: what was told of any.
    """

    def __init__(self, folder: Path, sites: Mapping[str, Guarded]) -> None:
        super().__init__(
            {}, folder, hosts={name: site.host for name, site in sites.items()}
        )
        self.refusals: list[str] = []

    def sum(self, round: int, metrics: Sequence[str]) -> Total:
        """Of "train" in a round, where these counts were agreed before."""
        summing = SecureSum(SITES, job=JOB, threshold=3)
        summing._metrics["train"] = tuple(metrics)
        listeners = {"notify": lambda event: self.refusals.append(event.text)}
        engine = self.engine(
            SITES, replace(STRICT, min_sites=3), summing=summing, **listeners
        )
        next(engine.rounds(round, round + 1))
        return engine.sum("train")
