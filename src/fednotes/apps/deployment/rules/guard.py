"""A site's rules at work: approvals, policy and ledger around every message of a run.

Approvals and what waits for one lie in the kit's `rules` folder, the ledger is
`ledger.jsonl` there. All is asked anew with each message, so a decision of a person
counts at once.

`rules/privacy.json` has what all jobs together have spent of the site's ε. An answer is
written there before it leaves, so what is not there has not left. One that is sent
again, or made again with the same noise, is the same answer and costs nothing; any
other counts, whatever round the server says it is of. ε and δ of different jobs add
(basic composition).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, get_args

import torch
from pydantic import BaseModel, ConfigDict, FiniteFloat

from fednotes.apps.deployment.rules.approval import (
    Approvals,
    Decision,
    Quorum,
    Signer,
)
from fednotes.apps.deployment.rules.differences import ExampleRecord, JoinedRun, Views
from fednotes.apps.deployment.rules.ledger import (
    LEDGER,
    Entry,
    Past,
    TensorFacts,
    describe,
    hash_of,
    ledger_of,
    parsed,
    plain,
    stamp,
    tensors_of,
)
from fednotes.apps.deployment.rules.policy import (
    Policy,
    PolicyRefusal,
    check_coverage,
    check_job,
    check_request,
    check_update,
)
from fednotes.core.cleaning import NAME, clean
from fednotes.core.errors import ConfigError, FednotesError, RefusedError
from fednotes.core.federation import TRAIN, Coverage
from fednotes.core.messages import BEGIN, OURS, Frame, Reply, Request, decode_reply
from fednotes.core.parsing import open_regular, read_json
from fednotes.core.store import locked_file, write_json
from fednotes.core.tables import table_fingerprint
from fednotes.core.update import Update
from fednotes.privacy.promise import COUNTS, Promise, Unit

RULES = "rules"  # in a kit
REJECTED = "has rejected this job"  # in what the server is told
# likewise
UNAPPROVED = ("has not approved this job", "has approved another form of this job")
SHOWN = 12  # characters of a fingerprint, for people
SERVER = "server"  # the only receiver
WORDS = "words"  # in what is attached to a reply: a masked update
CLOCK = timedelta(minutes=5)  # that a clock may be behind the ledger
# updates above `max_rounds` of a task that trains nothing: a calibration asks up to 100
# questions about one model, after the last round
SPARE = 100
SHORT = 16  # characters of an answer's hash in what was spent
NOISY = "noisy"  # begins the names of tasks whose answers have noise
# of training behind an update, as a line has them
COVERED = ("tokens", "steps", "patients")
# task → tokens, steps, patients behind an update
Covered = Callable[[str], Mapping[str, int]]
# task → digest of the model that its latest update is about, or ""
Subject = Callable[[str], str]


class NotApproved(RefusedError):
    """Nobody at the site has approved the job; the server may ask again."""

    later = True


class Withheld(RefusedError):
    """Something at the site is not as it must be. public: all that the server is told
    of it."""

    def __init__(self, message: str, public: str, *, later: bool) -> None:
        super().__init__(message)
        self.public, self.later = public, later


def now() -> datetime:
    """The time, with its zone."""
    return datetime.now(UTC)


def approvals_of(kit: Path, quorum: Quorum | None = None) -> Approvals:
    """What was decided at this site. quorum: by whom it must be; by anyone if not
    given."""
    return Approvals(kit / RULES, quorum)


def require_approved(
    kit: Path, site: str, table: Mapping[str, Any], policy: Policy
) -> None:
    """Pass a job that as many have approved as `policy` asks; keep any other where
    `fednotes site approve` finds it.

    A rejected one is on file already. Raises NotApproved, which names no folder of the
    site's.
    """
    approvals, key = approvals_of(kit, policy.quorum(site)), table_fingerprint(table)
    status, short = approvals.status(table), key[:SHOWN]
    if status == "approved":
        return
    if status == "rejected":
        raise NotApproved(
            f"site {site!r} {REJECTED} ({short}); to take that back, there: "
            f"fednotes site approve KIT {short}"
        )
    if (pending(kit) or {}).get("fingerprint") != key:
        waiting = {"fingerprint": key, "when": now().isoformat(), "table": table}
        write_json(_pending(kit), waiting)
    done = UNAPPROVED[1] if status == "changed" else UNAPPROVED[0]
    some = (
        f" ({len(approvals.standing(table).people)} of {policy.approvals} people have)"
    )
    raise NotApproved(
        f"site {site!r} {done} ({short}){some if status == 'waiting' else ''}; "
        "there: fednotes site approve KIT"
    )


def _pending(kit: Path) -> Path:
    return kit / RULES / "pending.json"


def pending(kit: Path) -> dict[str, Any] | None:
    """The job that was asked for last and waits for a decision.

    Raises ConfigError where the file is damaged.
    """
    path = _pending(kit)
    try:
        found = dict(read_json(path))
        if table_fingerprint(found["table"]) != found["fingerprint"]:
            raise ValueError("not its fingerprint")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RefusedError) as error:
        raise ConfigError(
            f"{path}: damaged; delete it, the server asks again"
        ) from error
    return found


def job_by(kit: Path, beginning: str) -> tuple[str, dict[str, Any]]:
    """The job that this site was asked about whose fingerprint begins so, and the whole
    of that.

    Raises ConfigError where none does, or more than one.
    """
    known = {past.fingerprint: past.table for past in approvals_of(kit).decisions()}
    if waiting := pending(kit):
        known[waiting["fingerprint"]] = waiting["table"]
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
    """Decide on a job; returns its fingerprint.

    It waits on while too few have approved it.
    """
    approvals, end = (
        approvals_of(kit, quorum),
        ledger_of(kit).head().hash if approve else "",
    )
    decision: Decision = "approved" if approve else "rejected"
    key = approvals.decide(decision, table, by, now(), signer, end)
    settled = approvals.standing(table).settled is not None
    if settled and (pending(kit) or {}).get("fingerprint") == key:
        _pending(kit).unlink(missing_ok=True)
    return key


def named(table: Mapping[str, Any]) -> str:
    """A job's name, which whoever wrote the job chose."""
    return clean(table.get("name", ""), NAME)


@dataclass(frozen=True)
class _Behind:
    """The update that a message holds, plain or masked. number: of the request that
    asked for it. covered: tokens, steps and patients behind it, as far as known.
    identity: what `max_rounds` counts, as `Entry.update` has it; "" for no update."""

    number: int
    task: str
    round: int
    tensors: tuple[TensorFacts, ...]
    covered: Mapping[str, int]
    identity: str = ""

    @property
    def is_about_a_model(self) -> bool:
        """Whether models are counted in place of updates."""
        return bool(self.tensors) and self.identity != hash_of(self.tensors)


# ---- what jobs have spent of a site's ε ----------------------------------------------


class Spent(BaseModel):
    """Of one job. answers: short hashes of the different ones that left; counts: of
    counts."""

    model_config = ConfigDict(extra="forbid")

    epsilon: FiniteFloat = 0.0
    delta: FiniteFloat = 0.0
    answers: list[str] = []
    counts: list[str] = []


@dataclass(frozen=True)
class Budget:
    """One job's part in it. kit: the site's. job: its fingerprint. promise: None: it
    has none."""

    path: Path
    job: str
    promise: Promise | None

    def spend(
        self, answer: str, policy: Policy, before: Collection[str] = (), task: str = ""
    ) -> None:
        """Note that an answer to a task is about to leave. answer: its hash. before: of
        those that the ledger has, which count where an older copy of the file was put
        back.

        Raises PolicyRefusal where the promise does not cover it, or the site's budget;
        ConfigError where the file is damaged.
        """
        if self.promise is None:
            self.require(policy)
            return
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked_file(self.path.with_suffix(".lock")):
            spent = read_spent(self.path)
            own = spent.setdefault(self.job, Spent())
            known, most = own.answers, self.promise.rounds
            if task == COUNTS:
                known, most = own.counts, int(self.promise.privacy.counts > 0)
            known[:] = sorted({*known, *(earlier[:SHORT] for earlier in before)})
            if answer[:SHORT] in known:
                return
            if (number := len(known) + 1) > most:
                raise PolicyRefusal(
                    "max_epsilon",
                    f"refused: the job's promise is of {most:,} answers of this site, and this "
                    f"would be number {number:,}; a new job can be approved, whose ε adds to it",
                )
            known.append(answer[:SHORT])
            own.epsilon = self.promise.epsilon(max(1, len(own.answers)))
            own.delta = self.promise.privacy.delta
            self._require(policy, sum(job.epsilon for job in spent.values()))
            write_json(self.path, {key: job.model_dump() for key, job in spent.items()})

    def require(self, policy: Policy) -> None:
        """Before the site joins. Raises PolicyRefusal, ConfigError."""
        if self.promise and (least := policy.epsilon_unit):
            unit, units = self.promise.privacy.unit, get_args(Unit)
            enough = units.index(unit) <= units.index(least)
            policy.require(
                enough, "epsilon_unit", f"ε is promised of each {unit}", f"each {least}"
            )
        if not policy.max_epsilon:
            return
        if self.promise is None:
            policy.require(
                False,
                "max_epsilon",
                "the job promises no ε ([privacy])",
                f"{policy.max_epsilon:g}",
            )
            return
        others = [
            job.epsilon for key, job in read_spent(self.path).items() if key != self.job
        ]
        self._require(policy, sum(others) + self.promise.epsilon())

    @staticmethod
    def _require(policy: Policy, epsilon: float) -> None:
        asked = f"ε of all jobs at this site would be {epsilon:.3g}"
        within = not policy.max_epsilon or epsilon <= policy.max_epsilon * (1 + 1e-9)
        policy.require(within, "max_epsilon", asked, f"{policy.max_epsilon:g} in all")


def read_spent(path: Path) -> dict[str, Spent]:
    """Job → what it spent. Raises ConfigError for a damaged file, or one that is gone
    though the ledger beside it has answers: nothing may leave then."""
    try:
        table: Mapping[str, Any] = read_json(path)
        return {key: Spent.model_validate(of) for key, of in table.items()}
    except (OSError, ValueError, AttributeError) as error:
        if isinstance(error, FileNotFoundError) and not _noisy(path.with_name(LEDGER)):
            return {}
        raise ConfigError(
            f"{path}: damaged or deleted, so it is not known what was spent of ε and nothing may "
            "leave: put back a copy; its ledger has what left"
        ) from error


def _noisy(ledger: Path) -> bool:
    """Whether answers with noise have left."""
    with suppress(FileNotFoundError), open(ledger, "rb", opener=open_regular) as lines:
        left = (
            line for line in map(parsed, lines) if line and line.get("refusal") is False
        )
        return any(str(line.get("task")).startswith(NOISY) for line in left)
    return False


def _hash_of_update(update: Update) -> str:
    """Return a hash of an update's tensors, or of its counts if it has no tensors; ""
    for an empty update."""
    if update.tensors:
        return hash_of(describe(update.tensors))
    counts = {
        name: torch.tensor(value, dtype=torch.float64)
        for name, value in update.metrics.items()
    }
    return hash_of(describe(counts))


class SiteGuard:
    """The rules of one run at one site, which its host asks.

    policy: read anew by `policy()`. table: the job as it was approved. covered,
    subject: of the site that runs now.

    What is said of an update when it is made is said of it again by the ledger when its
    reply is sent again, and kept in memory until a secure sum masks it.
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
        promise: Promise | None = None,
    ) -> None:
        """promise: of differential privacy, if the job makes one."""
        self._kit, self._site, self._run, self._table = kit, site, run, table
        self._policy, self._secure, self._threshold = policy, secure, threshold
        self._sites = frozenset(table.get("sites", ()))
        self._job, self._ledger = table_fingerprint(table), ledger_of(kit)
        self._budget = Budget(kit / RULES / "privacy.json", self._job, promise)
        self._past = Past(self._ledger.path, self._job)
        self._newest: _Behind | None = None  # of the newest task that was done
        self.covered: Covered = lambda task: {}
        self.subject: Subject = lambda task: ""

    def job(
        self, method: str, sites: int, rounds: int | None, each: bool = False
    ) -> None:
        """Before the site joins; any job's evaluations count at each site. each:
        whether the server looks at single updates. Raises PolicyRefusal."""
        policy, asked = self._rules(), {"secure": self._secure, "each": each}
        check_job(policy, method, sites, self._threshold, rounds=rounds, **asked)
        with self._withheld():
            self._budget.require(policy)

    def coverage(self, planned: Iterable[Coverage]) -> None:
        """Check how many patients later updates will cover, before the site joins.

        Args:
            planned: What the site's own data tell of these updates.

        Raises:
            PolicyRefusal: One of them would cover fewer patients than `min_patients`.
        """
        policy = self._rules()
        for update in planned:
            check_coverage(policy, update)

    def examples(self, read: Callable[[], Views]) -> None:
        """Compare what the site would train on with earlier jobs, before the site
        joins.

        The examples are remembered for the comparison with later jobs, so this comes
        last.

        Args:
            read: Returns the site's training examples, as `ExampleRecord.join` takes
                them.

        Raises:
            PolicyRefusal: They differ from those of an earlier job by too few.
            Withheld: The record of earlier jobs is missing, damaged or full.
            FednotesError: The record cannot be written.
        """
        policy = self._rules()
        joining = JoinedRun(self._run, self._job, tuple(self._sites))
        with self._withheld():
            ExampleRecord(self._kit / RULES).join(joining, read, policy)

    def request(self, request: Request) -> None:
        """Raises NotApproved, PolicyRefusal."""
        policy, time = self._rules(), now()
        require_approved(self._kit, self._site, self._table, policy)
        if request.task.startswith(OURS) and request.task != BEGIN:
            # of the engine: what they may hold was judged with the method's task
            return
        named = set(request.counted) & self._sites if self._sites else request.counted
        if policy.hours:
            self._require_clock(time, policy)
        least, secure = self._threshold, self._secure
        check_request(policy, request, len(named), least, secure=secure, now=time)

    def leaving(
        self, request: Request, reply: Frame, update: Update | None, reason: str = ""
    ) -> None:
        """The reply by the policy, then the line in the ledger.

        Raises PolicyRefusal, RefusedError, Withheld.
        """
        sent, sha256 = (
            decode_reply(reply, checked=True),
            hashlib.sha256(reply).hexdigest(),
        )
        nothing = _Behind(request.number, request.task, request.round, (), {})
        known = self._behind(request, sent, sha256, update)
        about, masked = known or nothing, WORDS in sent.attached.tensors
        if sent.update is not None:
            policy = self._rules()
            check_update(
                policy,
                about.task,
                about.round,
                [tensor.name for tensor in about.tensors],
                about.covered,
                size=len(reply),
                # the engine's own replies are in no sum
                secure=self._secure or known is None,
                scores=not self._secure and bool(sent.update.metrics),
                left=self._left(about, policy)
                if policy.max_rounds and about.identity
                else None,
            )
            if about.tensors:
                if self._budget.promise:
                    self._read_past(policy)
                with self._withheld():
                    left = self._past.updates.get(about.task, ())
                    self._budget.spend(hash_of(about.tensors), policy, left, about.task)
        if sent.update is None:
            about = nothing
        elif not (masked or sent.update.tensors):
            counts = about.identity if sent.update.metrics else ""
            about = replace(nothing, identity=counts)
        entry = Entry(
            time=now(),
            run=plain(self._run),
            round=about.round,
            task=plain(about.task),
            receiver=SERVER,
            tensors=about.tensors + describe(sent.attached.tensors, norms=False),
            bytes=len(reply),
            sha256=sha256,
            masked=masked,
            job=self._job,
            refusal=sent.update is None,
            reason=plain(reason) if reason else "",
            update=about.identity,
            **{key: about.covered.get(key) for key in COVERED},
        )
        try:
            self._ledger.append(entry)
        except FednotesError as error:
            public = f"site {self._site!r} cannot note this message in its ledger"
            later = not isinstance(error, RefusedError)  # a full disk
            raise Withheld(str(error), public, later=later) from error

    def _behind(
        self, request: Request, sent: Reply, sha256: str, update: Update | None
    ) -> _Behind | None:
        """The update that a reply is about.

        Raises RefusedError if that is not known any more.
        """
        if update is not None:
            covered, facts = dict(self.covered(request.task)), describe(update.tensors)
            self._newest = _Behind(
                request.number,
                request.task,
                request.round,
                facts,
                covered,
                self.subject(request.task) or _hash_of_update(update),
            )
            return self._newest
        ours = request.task.startswith(OURS)
        if sent.update is None or (ours and WORDS not in sent.attached.tensors):
            return None
        if not ours:
            return self._written(request, sent, sha256)
        newest = self._newest
        if newest is None or newest.number != request.counted.get(self._site):
            raise RefusedError(
                f"site {self._site!r}: it is not known what is behind these words"
            )
        return newest

    def _written(self, request: Request, sent: Reply, sha256: str) -> _Behind:
        """What the ledger says of a reply that was sent before."""
        self._read_past(self._rules())
        line = self._past.answers.get(sha256)
        if line is None:
            raise RefusedError(
                f"site {self._site!r}: its ledger does not have the reply that is asked for again"
            )
        tensors = tensors_of(line)
        tensors = tensors[: len(tensors) - len(sent.attached.tensors)]
        known = {key: line[key] for key in COVERED if line[key] is not None}
        return _Behind(
            request.number, request.task, request.round, tensors, known, line["update"]
        )

    def _left(self, behind: _Behind, policy: Policy) -> int:
        """Return how many rounds' worth of updates of its task have left under the
        newest approval, including this one.

        The server's claim about the round does not matter: an update that is made again
        from the same parameters is the same, and any other counts. A task that trains
        nothing has `SPARE` updates more. If its updates are about models, each
        different model counts as a round as well.
        """
        self._read_past(policy)
        updates = self._past.updates.get(behind.task, set()) | {behind.identity}
        trains = "steps" in behind.covered or behind.task == TRAIN
        if behind.tensors and trains:
            return len(updates)
        if not behind.is_about_a_model:
            return len(updates) - SPARE
        answer = (behind.identity, behind.tensors[0].sha256)
        answers = self._past.firsts.get(behind.task, set()) | {answer}
        return max(len(updates), len(answers) - SPARE)

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

    def _read_past(self, policy: Policy) -> None:
        approvals = approvals_of(self._kit, policy.quorum(self._site))
        try:
            self._past.read(approvals.approved_after(self._table))
        except OSError as error:
            public = f"site {self._site!r} cannot read its ledger"
            raise Withheld(
                f"{self._ledger.path}: {error}", public, later=True
            ) from error

    def _rules(self) -> Policy:
        """The policy as it is now."""
        with self._withheld():
            return self._policy()

    @contextmanager
    def _withheld(self) -> Iterator[None]:
        """Raises Withheld where a file of the site's is no good."""
        try:
            yield
        except ConfigError as error:
            public = f"site {self._site!r} cannot read its own file"
            raise Withheld(str(error), public, later=True) from error
