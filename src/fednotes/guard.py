"""A site's rules at work: approvals, policy and ledger around every message of a run.

Approvals and what waits for one lie in the kit's `rules` folder, the ledger is `ledger.jsonl`
there. All is asked anew with each message, so a decision of a person counts at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fednotes.core.errors import ConfigError, FednotesError, RefusedError
from fednotes.core.store import write_json
from fednotes.core.update import Update
from fednotes.engines.host import BEGIN, OURS
from fednotes.engines.wire import Frame, Reply, Request, decode_reply
from fednotes.privacy.approval import Approvals, fingerprint
from fednotes.privacy.ledger import Entry, Ledger, describe
from fednotes.privacy.policy import (
    JobFacts,
    Policy,
    PolicyRefusal,
    RequestFacts,
    UpdateFacts,
    check_job,
    check_request,
    check_update,
)

RULES, LEDGER, PENDING = "rules", "ledger.jsonl", "pending.json"
SERVER = "server"  # the only receiver
Covered = Callable[[str], Mapping[str, int]]  # task → tokens, steps, patients behind an update


class NotApproved(RefusedError):
    """Nobody at the site has approved the job; the server may ask again."""

    later = True


class NotNow(RefusedError):
    """A rule that forbids now what it will allow later."""

    later = True


def now() -> datetime:
    """The time, with its zone."""
    return datetime.now(UTC)


def approvals_of(kit: Path) -> Approvals:
    """What was decided at this site."""
    return Approvals(kit / RULES)


def ledger_of(kit: Path) -> Ledger:
    """What left this site."""
    return Ledger(kit / RULES / LEDGER)


def require_approved(kit: Path, site: str, table: Mapping[str, Any]) -> None:
    """Pass an approved job; keep any other where `fednotes site approve` finds it.

    Raises NotApproved.
    """
    status = approvals_of(kit).status(table)
    if status == "approved":
        return
    if status != "rejected":
        waiting = {"fingerprint": fingerprint(table), "when": now().isoformat(), "table": table}
        if (pending(kit) or {}).get("fingerprint") != waiting["fingerprint"]:
            write_json(kit / RULES / PENDING, waiting)
    why = {"rejected": "has rejected this job", "changed": "has approved another form of this job"}
    raise NotApproved(
        f"site {site!r} {why.get(status, 'has not approved this job')} "
        f"({fingerprint(table)[:12]}); there: fednotes site approve {kit.name}"
    )


def pending(kit: Path) -> dict[str, Any] | None:
    """The job that was asked for last and waits for a decision.

    Raises ConfigError where the file is damaged.
    """
    path = kit / RULES / PENDING
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if fingerprint(found["table"]) != found["fingerprint"]:
            raise ValueError("not its fingerprint")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RefusedError) as error:
        raise ConfigError(f"{path}: damaged; delete it, the server asks again") from error
    return dict(found)


def settle(kit: Path, table: Mapping[str, Any], *, approve: bool, by: str) -> str:
    """Decide on a job; returns its fingerprint."""
    approvals = approvals_of(kit)
    key = (approvals.approve if approve else approvals.reject)(table, by, now())
    if (pending(kit) or {}).get("fingerprint") == key:
        (kit / RULES / PENDING).unlink(missing_ok=True)
    return key


class SiteGuard:
    """The rules of one run at one site (`host.Guard`).

    policy: read anew by `policy()`. table: the job as it was approved. covered: of the site
    that runs now.
    """

    def __init__(
        self,
        kit: Path,
        site: str,
        run: str,
        table: Mapping[str, Any],
        policy: Callable[[], Policy],
        *,
        secure: bool,
        threshold: int,
    ) -> None:
        self._kit, self._site, self._run, self._table = kit, site, run, table
        self._policy, self._secure, self._threshold = policy, secure, threshold
        self._ledger = ledger_of(kit)
        self.covered: Covered = lambda task: {}

    def job(self, facts: JobFacts) -> None:
        """Before the site joins. Raises PolicyRefusal."""
        check_job(self._policy(), facts)

    def request(self, request: Request) -> None:
        """Raises NotApproved, NotNow, PolicyRefusal."""
        require_approved(self._kit, self._site, self._table)
        if request.task.startswith(OURS) and request.task != BEGIN:
            return  # of the engine: what they may hold was judged with the method's task
        facts = RequestFacts(
            request.task,
            request.round,
            len(request.counted),
            now(),
            secure=self._secure,
            threshold=self._threshold,
        )
        try:
            check_request(self._policy(), facts)
        except PolicyRefusal as error:
            if error.rule == "hours":
                raise NotNow(str(error)) from error
            raise

    def leaving(self, request: Request, reply: Frame, update: Update | None) -> None:
        """The update by the policy, then the line in the ledger. Raises PolicyRefusal."""
        if update is not None:
            self._check(request, reply, update)
        sent = decode_reply(bytes(reply))
        self._ledger.append(self._entry(request, reply, sent))

    def _check(self, request: Request, reply: Frame, update: Update) -> None:
        behind = self.covered(request.task)
        facts = UpdateFacts(
            request.task,
            request.round,
            {name: tuple(value.shape) for name, value in update.tensors.items()},
            secure=self._secure,
            tokens=behind.get("tokens"),
            steps=behind.get("steps"),
            patients=behind.get("patients"),
            bytes=len(reply),
        )
        check_update(self._policy(), facts)

    def _entry(self, request: Request, reply: Frame, sent: Reply) -> Entry:
        tensors = dict(sent.update.tensors) if sent.update else {}
        masked = self._secure and bool(sent.attached)
        return Entry(
            time=now(),
            run=self._run,
            round=request.round,
            task=request.task or "-",  # a message that could not be read
            receiver=SERVER,
            tensors=describe({**tensors, **sent.attached}, masked=masked),
            bytes=len(reply),
            sha256=hashlib.sha256(reply).hexdigest(),
            masked=masked,
        )


def require_share(policy: Policy) -> None:
    """Raises RefusedError where the site's scores stay there."""
    if not policy.share_scores:
        raise RefusedError(
            f"this site's scores stay here; only the site can change this: share_scores in "
            f"{policy.source}"
        )


def shown(error: FednotesError) -> str:
    """An error on one line."""
    return " ".join(str(error).split())
