"""Sites behind their rules and their ledger, with updates given in advance; and who asks them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from fednotes.core.federation import State
from fednotes.core.messages import Attached, Reply, Request, decode_reply, encode
from fednotes.core.update import Tensors, Update
from fednotes.engines.host import SiteHost
from fednotes.engines.secure import SecureSeal
from fednotes.rules.guard import SiteGuard, settle
from fednotes.rules.ledger import ledger_of, show
from fednotes.rules.policy import Policy

SITES, JOB = ("a", "b", "c", "d"), "job-1"
TABLE = {"name": "job", "sites": list(SITES), "min_sites": 3}


class Giver:
    """Gives one update after the other, the last one for ever."""

    tasks: ClassVar[frozenset[str]] = frozenset({"train", "evaluate", "calibrate"})

    def __init__(self, name: str, updates: list[Update]) -> None:
        self.id, self._updates, self.at = name, updates, 0

    def train(self, tensors: Tensors) -> Update:
        self.at += 1
        return self._updates[min(self.at, len(self._updates)) - 1]

    evaluate = calibrate = train

    def state(self) -> State:
        return State(self.at)

    def restore(self, state: State) -> None:
        self.at = state.round


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
        self.kit, self.policy, self.updates, self.site, self.run = kit, policy, updates, site, run
        self.secure, self.threshold, self.table, self.options = secure, threshold, table, options
        self.covered: Mapping[str, int] = {"steps": 9, "tokens": 5_000, "patients": 60}
        self.told: list[str] = []
        self.approve()
        self.restart()

    def approve(self) -> None:
        settle(self.kit, self.table, approve=True, by="tester")

    def restart(self) -> None:
        self.guard = SiteGuard(
            self.kit,
            self.site,
            self.run,
            self.table,
            lambda: self.policy,
            secure=self.secure,
            threshold=self.threshold,
        )

        def make() -> Giver:
            self.guard.covered = lambda task: self.covered
            return Giver(self.site, self.updates)

        seal = SecureSeal(self.site, SITES, job=JOB, threshold=3) if self.secure else None
        self.host = SiteHost(
            make,
            self.kit / "state" / self.run,
            job=JOB,
            name=self.site,
            guard=self.guard,
            sealer=seal,
            tell=self.told.append,
            **self.options,
        )

    def ask(
        self, task: str, number: int, counted: int | Mapping[str, int] = 0, **fields: Any
    ) -> Reply:
        if isinstance(counted, int):
            counted = dict.fromkeys(SITES, counted)
        return self.send(Request(JOB, 1, number, task, counted=counted, first=True, **fields))

    def send(self, request: Request) -> Reply:
        return decode_reply(self.host.handle(encode(request)))

    @property
    def ledger(self) -> list[dict[str, Any]]:
        path = ledger_of(self.kit).path
        return list(show(path)) if path.exists() else []


class Exchange:
    """One task of a secure sum over guarded sites (`engines.summing.Exchange`)."""

    reasons = ""

    def __init__(self, sites: Mapping[str, Guarded], number: int = 0) -> None:
        self._at, self.sites, self.least, self._number = sites, tuple(sites), 3, number
        self.request = Request(JOB, 1, number, "train", round=4, first=True)
        self._counted, self._done = dict.fromkeys(sites, 0), dict[str, int]()
        self.refusals: list[str] = []
        self.before: Any = lambda task: None

    def _ask(self, task: str, attached: Mapping[str, Attached], round: int) -> dict[str, Reply]:
        self.before(task)
        self._number += 1
        replies = {
            site: self._at[site].ask(
                task,
                self._number,
                counted={**self._counted, **self._done},
                attached=own,
                round=round,
            )
            for site, own in attached.items()
        }
        self.refusals += [reply.refusal for reply in replies.values() if reply.refusal]
        return {site: reply for site, reply in replies.items() if reply.update is not None}

    def task(
        self, attached: Attached | None = None, *, retry: bool = True, sites: Any = None
    ) -> Any:
        asked = [site for site in self.sites if sites is None or site in sites]
        found = self._ask("train", dict.fromkeys(asked, attached or Attached()), 4)
        self._done = dict.fromkeys(found, self._number)
        return found

    def stage(self, name: str, attached: Any, *, least: int | None = None) -> Any:
        return self._ask(name, attached, 4)

    def again(self) -> None:
        self._done = {}

    def refuse(self, site: str, reason: str) -> None:
        self.refusals.append(reason)
