"""A site's rules at work: approvals, policy and ledger around every message of a run.

Approvals and what waits for one lie in the kit's `rules` folder, the ledger is `ledger.jsonl`
there. All is asked anew with each message, so a decision of a person counts at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fednotes.core.cleaning import NAME, clean
from fednotes.core.errors import ConfigError, FednotesError, RefusedError
from fednotes.core.parsing import read_json
from fednotes.core.store import write_json
from fednotes.core.update import Update
from fednotes.engines.host import BEGIN, OURS
from fednotes.engines.wire import Frame, Reply, Request, decode_reply
from fednotes.rules.approval import Approvals, Quorum, Signer, fingerprint
from fednotes.rules.ledger import (
    Entry,
    Ledger,
    Past,
    TensorFacts,
    describe,
    hash_of,
    of_kit,
    plain,
    stamp,
    tensors_of,
)
from fednotes.rules.policy import (
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
REJECTED = "has rejected this job"  # in what the server is told
SHOWN = 12  # characters of a fingerprint, for people
SERVER = "server"  # the only receiver
WORDS = "words"  # in what is attached to a reply: a masked update
CLOCK = timedelta(minutes=5)  # that a clock may be behind the ledger
SPARE = 100  # more of a task that trains nothing: sums for a calibration come after the rounds
Covered = Callable[[str], Mapping[str, int]]  # task → tokens, steps, patients behind an update


class NotApproved(RefusedError):
    """Nobody at the site has approved the job; the server may ask again."""

    later = True


class Withheld(RefusedError):
    """Something at the site is not as it must be. public: all that the server is told of it."""

    def __init__(self, message: str, public: str, *, later: bool) -> None:
        super().__init__(message)
        self.public, self.later = public, later


def now() -> datetime:
    """The time, with its zone."""
    return datetime.now(UTC)


def approvals_of(kit: Path, quorum: Quorum | None = None) -> Approvals:
    """What was decided at this site. quorum: by whom it must be; by anyone if not given."""
    return Approvals(kit / RULES, quorum)


def ledger_of(kit: Path) -> Ledger:
    """What left this site."""
    return of_kit(kit)


def require_approved(kit: Path, site: str, table: Mapping[str, Any], policy: Policy) -> None:
    """Pass a job that as many have approved as `policy` asks; keep any other where `fednotes site
    approve` finds it.

    A rejected one is on file already. Raises NotApproved, which names no folder of the site's.
    """
    approvals = approvals_of(kit, policy.quorum(site))
    status = approvals.status(table)
    if status == "approved":
        return
    if status != "rejected":
        waiting = {"fingerprint": fingerprint(table), "when": now().isoformat(), "table": table}
        if (pending(kit) or {}).get("fingerprint") != waiting["fingerprint"]:
            write_json(kit / RULES / PENDING, waiting)
    key = fingerprint(table)[:SHOWN]
    if status == "rejected":
        raise NotApproved(
            f"site {site!r} {REJECTED} ({key}); to take that back, there: "
            f"fednotes site approve KIT {key}"
        )
    done = {"changed": "approved another form of"}.get(status, "not approved")
    some = f" ({len(approvals.standing(table).people)} of {policy.approvals} people have)"
    raise NotApproved(
        f"site {site!r} has {done} this job ({key}){some if status == 'waiting' else ''}; "
        "there: fednotes site approve KIT"
    )


def pending(kit: Path) -> dict[str, Any] | None:
    """The job that was asked for last and waits for a decision.

    Raises ConfigError where the file is damaged.
    """
    path = kit / RULES / PENDING
    try:
        found = read_json(path)
        if fingerprint(found["table"]) != found["fingerprint"]:
            raise ValueError("not its fingerprint")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RefusedError) as error:
        raise ConfigError(f"{path}: damaged; delete it, the server asks again") from error
    return dict(found)


def known_jobs(kit: Path) -> dict[str, dict[str, Any]]:
    """Fingerprint → table of the jobs that this site was asked about."""
    found = {past.fingerprint: dict(past.table) for past in approvals_of(kit).decisions()}
    if waiting := pending(kit):
        found[waiting["fingerprint"]] = waiting["table"]
    return found


def job_by(kit: Path, beginning: str) -> tuple[str, dict[str, Any]]:
    """The job whose fingerprint begins so, and the whole of that.

    Raises ConfigError where none does, or more than one.
    """
    known = known_jobs(kit)
    matching = [key for key in known if key.startswith(beginning.strip().lower())]
    if len(matching) == 1:
        return matching[0], known[matching[0]]
    what = "more than one fingerprint begins" if matching else "no fingerprint begins"
    jobs = [f"{named(known[key])} ({key[:SHOWN]})" for key in matching or known]
    raise ConfigError(
        f"{kit}: {what} with {beginning!r}; jobs that this site was asked about: "
        f"{', '.join(jobs) or 'none yet'}"
    )


def settle(
    kit: Path,
    table: Mapping[str, Any],
    *,
    approve: bool,
    by: str,
    quorum: Quorum | None = None,
    signer: Signer | None = None,
) -> str:
    """Decide on a job; returns its fingerprint. It waits on while too few have approved it."""
    approvals = approvals_of(kit, quorum)
    if approve:
        key = approvals.approve(table, by, now(), signer, ledger_of(kit).head().hash)
    else:
        key = approvals.reject(table, by, now())
    settled = approvals.standing(table).made is not None
    if settled and (pending(kit) or {}).get("fingerprint") == key:
        (kit / RULES / PENDING).unlink(missing_ok=True)
    return key


def named(table: Mapping[str, Any]) -> str:
    """A job's name, which whoever wrote the job chose."""
    return clean(table.get("name", ""), NAME)


@dataclass(frozen=True)
class _Behind:
    """The update that a message holds, plain or masked. number: of the request that asked for
    it. covered: tokens, steps and patients behind it, as far as known."""

    number: int
    task: str
    round: int
    tensors: tuple[TensorFacts, ...]
    covered: Mapping[str, int]


class SiteGuard:
    """The rules of one run at one site (`host.Guard`).

    policy: read anew by `policy()`. table: the job as it was approved. covered: of the site
    that runs now.

    What is said of an update when it is made is said of it again by the ledger when its reply is
    sent again, and kept in memory until a secure sum masks it.
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
        self._sites = frozenset(table.get("sites", ()))
        self._job = fingerprint(table)
        self._ledger = ledger_of(kit)
        self._past = Past(self._ledger.path, self._job)
        self._newest: _Behind | None = None  # of the newest task that was done
        self.covered: Covered = lambda task: {}

    def job(self, facts: JobFacts) -> None:
        """Before the site joins. Raises PolicyRefusal.

        Any job's evaluations count at each site; without a secure sum the server sees the counts.
        """
        check_job(self._rules(), replace(facts, scores=facts.scores or not facts.secure))

    def request(self, request: Request) -> None:
        """Raises NotApproved, PolicyRefusal."""
        policy = self._rules()
        require_approved(self._kit, self._site, self._table, policy)
        if request.task.startswith(OURS) and request.task != BEGIN:
            return  # of the engine: what they may hold was judged with the method's task
        named = set(request.counted) & self._sites if self._sites else request.counted
        facts = RequestFacts(
            request.task,
            request.round,
            len(named),
            now(),
            secure=self._secure,
            threshold=self._threshold,
            scores=not self._secure,
        )
        if policy.hours:
            self._require_clock(facts.now, policy)
        check_request(policy, facts)

    def leaving(
        self, request: Request, reply: Frame, update: Update | None, reason: str = ""
    ) -> None:
        """The reply by the policy, then the line in the ledger.

        Raises PolicyRefusal, RefusedError, Withheld.
        """
        sent, sha256 = decode_reply(reply, checked=True), hashlib.sha256(reply).hexdigest()
        behind = self._behind(request, sent, sha256, update)
        if sent.update is not None:
            self._check(request, len(reply), sent.update, behind)
        self._note(request, len(reply), sha256, sent, behind, reason)

    def _behind(
        self, request: Request, sent: Reply, sha256: str, update: Update | None
    ) -> _Behind | None:
        """The update that a reply is about. Raises RefusedError if that is not known any more."""
        if update is not None:
            covered = dict(self.covered(request.task))
            facts = describe(update.tensors)
            found = _Behind(request.number, request.task, request.round, facts, covered)
            self._newest = found
            return found
        if sent.update is None or (request.task.startswith(OURS) and WORDS not in sent.attached):
            return None
        if not request.task.startswith(OURS):
            return self._written(request, sent, sha256)
        newest = self._newest
        if newest is None or newest.number != request.counted.get(self._site):
            raise RefusedError(f"site {self._site!r}: it is not known what is behind these words")
        return newest

    def _written(self, request: Request, sent: Reply, sha256: str) -> _Behind:
        """What the ledger says of a reply that was sent before."""
        self._read_past(self._rules())
        line = self._past.answer(sha256)
        if line is None:
            raise RefusedError(
                f"site {self._site!r}: its ledger does not have the reply that is asked for again"
            )
        tensors = tensors_of(line)
        tensors = tensors[: len(tensors) - len(sent.attached)]
        known = {k: line[k] for k in ("tokens", "steps", "patients") if line[k] is not None}
        return _Behind(request.number, request.task, request.round, tensors, known)

    def _check(self, request: Request, size: int, sent: Update, behind: _Behind | None) -> None:
        """Raises PolicyRefusal. sent: as it is in the message."""
        policy, about = self._rules(), behind or _Behind(0, request.task, request.round, (), {})
        facts = UpdateFacts(
            about.task,
            about.round,
            {each.name: each.shape for each in about.tensors},
            secure=self._secure or behind is None,  # the engine's own replies are in no sum
            tokens=about.covered.get("tokens"),
            steps=about.covered.get("steps"),
            patients=about.covered.get("patients"),
            batch=about.covered.get("batch"),
            bytes=size,
            rounds=self._rounds(about, policy) if policy.max_rounds and about.tensors else None,
            scores=not self._secure and bool(sent.metrics),
        )
        check_update(policy, facts)

    def _rounds(self, behind: _Behind, policy: Policy) -> int:
        """How many different updates of its task left under the newest approval, this one too.

        The server's word on rounds is not asked: an update that is made again of the same
        parameters is the same, and any other counts.
        """
        self._read_past(policy)
        left = self._past.updates(behind.task)
        trains = "steps" in behind.covered or behind.task == "train"
        return len(left | {hash_of(behind.tensors)}) - (0 if trains else SPARE)

    def _require_clock(self, time: datetime, policy: Policy) -> None:
        """`hours` mean nothing by a clock that was set back. Raises Withheld."""
        self._read_past(policy)
        if self._past.newest and stamp(time + CLOCK) < self._past.newest:
            raise Withheld(
                f"the clock of this machine says {stamp(time)}, and its ledger's newest line is of "
                f"{self._past.newest}: set the clock; where the ledger is wrong, approve the job "
                "again",
                f"the clock of site {self._site!r} was set back",
                later=True,
            )

    def _note(
        self,
        request: Request,
        size: int,
        sha256: str,
        sent: Reply,
        behind: _Behind | None,
        reason: str,
    ) -> None:
        """The line in the ledger. Raises Withheld where it cannot be written."""
        masked = WORDS in sent.attached
        held = sent.update is not None and (masked or bool(sent.update.tensors))
        inside = behind if held else None
        about = inside or _Behind(0, request.task, request.round, (), {})
        entry = Entry(
            time=now(),
            run=plain(self._run),
            round=about.round,
            task=plain(about.task),
            receiver=SERVER,
            tensors=about.tensors + describe(sent.attached, norms=False),
            bytes=size,
            sha256=sha256,
            masked=masked,
            job=self._job,
            refusal=sent.update is None,
            reason=plain(reason) if reason else "",
            update=hash_of(about.tensors),
            tokens=about.covered.get("tokens"),
            steps=about.covered.get("steps"),
            patients=about.covered.get("patients"),
        )
        try:
            self._ledger.append(entry)
        except FednotesError as error:
            public = f"site {self._site!r} cannot note this message in its ledger"
            later = not isinstance(error, RefusedError)  # a full disk
            raise Withheld(str(error), public, later=later) from error

    def _read_past(self, policy: Policy) -> None:
        approvals = approvals_of(self._kit, policy.quorum(self._site))
        try:
            self._past.read(approvals.approved_after(self._table))
        except OSError as error:
            public = f"site {self._site!r} cannot read its ledger"
            raise Withheld(f"{self._ledger.path}: {error}", public, later=True) from error

    def _rules(self) -> Policy:
        """The policy as it is now. Raises Withheld where the site's file is no good."""
        try:
            return self._policy()
        except ConfigError as error:
            public = f"site {self._site!r} cannot read its own file"
            raise Withheld(str(error), public, later=True) from error


def require_share(policy: Policy) -> None:
    """Raises PolicyRefusal where the site's scores stay there."""
    if not policy.share_scores:
        raise PolicyRefusal(
            "share_scores",
            f"this site's scores stay here; only the site can change this: share_scores in "
            f"{policy.source}",
        )
