"""Enforce a site's rules: approvals, policy and ledger for every message of a run.

The kit's folder `rules` holds the approvals, the jobs that wait for one (`pending`),
and the ledger (`ledger.jsonl`). All of them are read again for each message, so a
person's decision takes effect immediately.

`rules/privacy.json`, the spending record, holds what each job has spent of the site's
privacy budget. An answer is recorded there before it leaves, so no answer leaves
without a record. The ledger holds the same amounts, so that an older copy of the
spending record can be brought up to date from the ledger. An answer that is sent again,
or recomputed with the same noise, is the same answer and costs nothing. Any other
answer counts, whatever round the server claims. ε and δ of different jobs add up (basic
composition).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import time_ns
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict

from fednotes.apps.deployment.rules.approval import (
    Approvals,
    Decision,
    Quorum,
    Signer,
)
from fednotes.apps.deployment.rules.differences import ExampleRecord, JoinedRun, Views
from fednotes.apps.deployment.rules.ledger import (
    LEDGER,
    AnsweredQuestion,
    Entry,
    JobLines,
    Ledger,
    RunLines,
    SpentBudget,
    SpentLines,
    TensorFacts,
    clean_name,
    describe_tensors,
    encode_time,
    hash_tensors,
    hash_update,
    parse_line,
    read_answered_question,
    read_tensors,
)
from fednotes.apps.deployment.rules.policy import (
    Policy,
    PolicyRefusal,
    check_coverage,
    check_participation,
    check_request,
    check_rounds,
    check_storage,
    check_update,
)
from fednotes.apps.deployment.site_agreement import SCORES
from fednotes.core.cleaning import NAME, clean
from fednotes.core.errors import ConfigError, FednotesError, RefusedError
from fednotes.core.federation import TRAIN, Coverage
from fednotes.core.messages import BEGIN, OURS, Frame, Reply, Request, decode_reply
from fednotes.core.numbers import NonNegativeFloat
from fednotes.core.parsing import count_values, open_regular, read_json
from fednotes.core.store import locking_file, measure_disk_usage, write_json
from fednotes.core.tables import fingerprint_table
from fednotes.core.update import Update
from fednotes.privacy.promise import COUNTS, Promise, Unit
from fednotes.privacy.secure_sum.crypto import hash_parts

RULES = "rules"  # folder in a kit

# Texts that the server looks for in refusals (`server.RunProgress`).
REJECTED = "has rejected this job"
NOT_APPROVED = "has not approved this job"
APPROVED_OTHER_FORM = "has approved another form of this job"
UNAPPROVED = (NOT_APPROVED, APPROVED_OTHER_FORM)

SHOWN_DIGITS = 12  # number of a fingerprint's characters that messages show
SERVER = "server"  # the only receiver
WORDS = "words"  # name of the tensor that holds a masked update in a reply
MAX_CLOCK_LAG = timedelta(minutes=5)  # how far a clock may lag behind the ledger
# A task that does not train may send this many updates more than `max_rounds`: after
# the last round, a calibration asks up to 100 questions about one model.
SPARE = 100
# The part of `max_stored_bytes` that is reserved for the ledger, so that a site can
# still say why it refuses; and the part of it that one line may take.
LEDGER_BYTES = 2**20
LINE_BYTES = 2**16
# Bounds of a job's table. A site stores every table on which its people decide, and
# reads all of them again for each message.
TABLE_BYTES = 2**21  # as JSON
TABLE_VALUES = 100_000
MAX_PENDING = 8  # jobs that wait for a decision; older ones are removed
# A job no longer waits if the server has not asked for it for this long. A run asks
# every few seconds; while other sites are silent, once in the job's `timeout`, which is
# ten minutes by default.
PENDING_SECONDS = 3600
SHORT = 16  # number of characters of an answer's hash in the spending record
NOISY = "noisy"  # prefix of the names of tasks whose answers have noise
# The keys of a ledger line that say how much training is behind an update.
COVERED = ("tokens", "steps", "patients")
logger = logging.getLogger(__name__)
# Takes a task; returns the tokens, steps and patients behind an update of it.
Covered = Callable[[str], Mapping[str, int]]
# Takes a task; returns the digest of the model that its latest update is about, or "".
FindModelDigest = Callable[[str], str]


class RequestedJob(NamedTuple):
    """A job that a server asked a site to run.

    Attributes:
        fingerprint: The job's complete fingerprint.
        table: The job.
        when: When the server first asked, as ISO text, if the job waits for a decision.
    """

    fingerprint: str
    table: dict[str, Any]
    when: str = ""


class NotApproved(RefusedError):
    """The job has not been approved at the site; the server may ask again."""

    later = True


class Withheld(RefusedError):
    """A file or the clock of the site is damaged or wrong, so nothing may leave.

    Attributes:
        public: The message for the server.
        later: Whether the server may ask again.
    """

    def __init__(self, message: str, public: str, *, later: bool) -> None:
        super().__init__(message)
        self.public = public
        self.later = later


class NoRoom(RefusedError):
    """A run's storage is used up, so not even a refusal can be recorded and sent."""


def read_clock() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)


def open_approvals(kit: Path, quorum: Quorum | None = None) -> Approvals:
    """Return the decisions of a site.

    Args:
        kit: The site's kit.
        quorum: Who must approve; anyone by default.
    """
    return Approvals(kit / RULES, quorum)


def require_approved(
    kit: Path, site: str, table: Mapping[str, Any], policy: Policy
) -> None:
    """Raise NotApproved unless enough people have approved a job.

    A job without a decision is stored where `fednotes site approve` finds it. The
    message names no folder of the site.

    Raises:
        NotApproved: Too few people have approved the job.
        RefusedError: The table is too large for people to read.
    """
    approvals = open_approvals(kit, policy.make_quorum(site))
    fingerprint = fingerprint_table(table)
    short_fingerprint = fingerprint[:SHOWN_DIGITS]
    status = approvals.read_status(table)
    if status == "approved":
        return
    if status == "rejected":
        raise NotApproved(
            f"site {site!r} {REJECTED} ({short_fingerprint}); to undo this, run at "
            f"the site: fednotes site approve KIT {short_fingerprint}"
        )

    text = json.dumps(table)
    if len(text) > TABLE_BYTES or count_values(text) > TABLE_VALUES:
        raise RefusedError(
            f"site {site!r}: the job's table has more than {TABLE_VALUES:,} values or "
            f"{TABLE_BYTES:,} bytes, which no person could read before approving it"
        )
    _store_pending(kit, fingerprint, table)
    if approvals.read_standing(table).settled is not None:  # people decided meanwhile
        _get_pending_path(kit, fingerprint).unlink(missing_ok=True)
    problem = APPROVED_OTHER_FORM if status == "changed" else NOT_APPROVED
    progress = ""
    if status == "waiting":
        people = approvals.read_standing(table).people
        progress = f" ({len(people)} of {policy.approvals} people have)"
    raise NotApproved(
        f"site {site!r} {problem} ({short_fingerprint}){progress}; there: fednotes "
        "site approve KIT"
    )


def _get_pending_path(kit: Path, fingerprint: str) -> Path:
    """Return the file of a job that waits for a decision."""
    return kit / RULES / "pending" / f"{fingerprint}.json"


def _read_request_times(kit: Path) -> dict[Path, int]:
    """Return when the server last asked for each job, in nanoseconds, by its file."""
    times = {}
    for path in (kit / RULES / "pending").glob("*.json"):
        with suppress(FileNotFoundError):  # another process may remove it
            times[path] = path.stat().st_mtime_ns
    return times


def _is_expired(request_time: int) -> bool:
    """Return whether the server no longer asks for a job, by its last request."""
    return time_ns() - request_time > PENDING_SECONDS * 10**9


def _store_pending(kit: Path, fingerprint: str, table: Mapping[str, Any]) -> None:
    """Store a job that waits for a decision, as the newest one.

    At most `MAX_PENDING` jobs are kept, so that a server cannot fill the disk. A server
    that alternates a few jobs cannot replace one of them; a server that asks for more
    jobs can. Jobs for which the server no longer asks are removed.
    """
    path = _get_pending_path(kit, fingerprint)
    if not path.exists():
        pending = {
            "fingerprint": fingerprint,
            "when": read_clock().isoformat(),
            "table": table,
        }
        write_json(path, pending)
    now = time_ns()
    with suppress(FileNotFoundError):  # people may decide on the job now
        os.utime(path, ns=(now, now))
    times = _read_request_times(kit)
    times.pop(path, None)
    newest_first = sorted(times, key=times.__getitem__, reverse=True)
    for place, other in enumerate(newest_first, start=1):
        if place >= MAX_PENDING or _is_expired(times[other]):
            other.unlink(missing_ok=True)


def read_pending_jobs(kit: Path) -> list[RequestedJob]:
    """Return the jobs that wait for a decision, the newest first.

    They are sorted by the time of the first request for each, so that the order stays
    the same while the server asks again.

    Raises:
        ConfigError: A file is damaged.
    """
    jobs = []
    for path, request_time in _read_request_times(kit).items():
        if _is_expired(request_time):
            continue
        try:
            pending = dict(read_json(path))
            fingerprint = fingerprint_table(pending["table"])
            if {fingerprint} != {pending["fingerprint"], path.stem}:
                raise ValueError("the fingerprint does not match")
            when = str(pending.get("when", ""))
            jobs.append(RequestedJob(fingerprint, dict(pending["table"]), when))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError, RefusedError) as error:
            raise ConfigError(
                f"{path}: damaged: delete it, and the server will ask again"
            ) from error
    return sorted(jobs, key=lambda job: job.when, reverse=True)


def find_job(kit: Path, prefix: str) -> RequestedJob:
    """Return a job that this site was asked to run, by a prefix of its fingerprint.

    Raises:
        ConfigError: No job has this prefix, or more than one has it.
    """
    decisions = open_approvals(kit).read_decisions()
    jobs_by_fingerprint = {
        decision.fingerprint: RequestedJob(decision.fingerprint, decision.table)
        for decision in decisions
    }
    jobs_by_fingerprint |= {job.fingerprint: job for job in read_pending_jobs(kit)}
    jobs = list(jobs_by_fingerprint.values())
    begin = prefix.strip().lower()
    matches = [job for job in jobs if job.fingerprint.startswith(begin)]
    if len(matches) == 1:
        (match,) = matches
        return match

    problem = "no fingerprint begins"
    if matches:
        problem = "more than one fingerprint begins"
    labels = [
        f"{clean_job_name(job.table)} ({job.fingerprint[:SHOWN_DIGITS]})"
        for job in matches or jobs
    ]
    raise ConfigError(
        f"{kit}: {problem} with {prefix!r}; jobs that this site was asked about: "
        f"{', '.join(labels) or 'none yet'}"
    )


def settle_job(
    kit: Path,
    table: Mapping[str, Any],
    *,
    approve: bool,
    by: str,
    quorum: Quorum | None = None,
    signer: Signer | None = None,
) -> str:
    """Record a decision on a job. A job with too few approvals keeps waiting.

    Args:
        kit: The site's kit.
        table: The job.
        approve: Whether to approve it; False rejects it.
        by: The account that makes the decision.
        quorum: Who must approve.
        signer: The person who signs the decision with a key.

    Returns:
        The job's fingerprint.
    """
    approvals = open_approvals(kit, quorum)
    decision: Decision = "approved" if approve else "rejected"
    ledger_end = Ledger.in_kit(kit).read_head().hash if approve else ""
    fingerprint = approvals.decide(
        decision, table, by=by, when=read_clock(), signer=signer, ledger_hash=ledger_end
    )
    if approvals.read_standing(table).settled is not None:
        _get_pending_path(kit, fingerprint).unlink(missing_ok=True)
    return fingerprint


def clean_job_name(table: Mapping[str, Any]) -> str:
    """Return a job's name, sanitised because the job's author chose it."""
    return clean(table.get("name", ""), NAME)


@dataclass(frozen=True)
class _UpdateFacts:
    """The facts of the update that a message holds, plain or masked.

    Attributes:
        number: Number of the request that asked for the update.
        task: The task.
        round: The round, as the server numbers it.
        tensors: Facts of the update's tensors, before masking.
        covered: Tokens, steps and patients behind the update, as far as they are known.
        answered: The pair that `max_rounds` counts; None for an empty update, and for a
            message without an update.
    """

    number: int
    task: str
    round: int
    tensors: tuple[TensorFacts, ...] = ()
    covered: Mapping[str, int] = field(default_factory=dict)
    answered: AnsweredQuestion | None = None

    @property
    def is_of_training(self) -> bool:
        """Whether the task trains, so that each of its updates counts as a round."""
        return "steps" in self.covered or self.task == TRAIN


def _choose_recorded_facts(
    facts: _UpdateFacts, message: Reply, question: str
) -> _UpdateFacts:
    """Return those facts of a message's update that the ledger's line records.

    - A message with tensors, plain or masked: all facts.
    - A message with counts alone: question and answer, but no tensors or training.
    - A message with an empty update: none of these.
    - A refusal: the question that it leaves unanswered.

    Args:
        facts: The facts of the message's update; those of its request for a refusal.
        message: The decoded message.
        question: The question that a refusal leaves unanswered, as the ledger names it,
            or "".
    """
    request = _UpdateFacts(facts.number, facts.task, facts.round)
    if message.update is None:
        answered = AnsweredQuestion(question, "")
        return replace(request, answered=answered)
    is_masked = WORDS in message.attached.tensors
    if is_masked or message.update.tensors:
        return facts
    if message.update.is_empty:
        return request
    return replace(request, answered=facts.answered)


# ---- the privacy budget --------------------------------------------------------------


class JobSpending(BaseModel):
    """One job's entry in the spending record; it includes the job's answers.

    Attributes:
        epsilon: The ε of the answers that left.
        delta: Their δ.
        answers: Short hashes of the distinct answers to all tasks but `COUNTS`.
        counts: Short hashes of the distinct answers to the task `COUNTS`.
    """

    model_config = ConfigDict(extra="forbid")

    epsilon: NonNegativeFloat = 0.0
    delta: NonNegativeFloat = 0.0
    answers: list[str] = []
    counts: list[str] = []


@dataclass(frozen=True)
class Budget:
    """One job's share of a site's privacy budget.

    Attributes:
        path: The spending record.
        job: The job's fingerprint.
        promise: The job's privacy guarantee; None if it has none.
    """

    path: Path
    job: str
    promise: Promise | None

    def spend(
        self,
        answer: str,
        policy: Policy,
        *,
        task: str = "",
        ledger_answers: Collection[str] = (),
        ledger_spending: Mapping[str, SpentBudget] | None = None,
    ) -> SpentBudget | None:
        """Record that an answer to a task is about to leave.

        Args:
            answer: The answer's hash.
            policy: The site's rules.
            task: The task.
            ledger_answers: Hashes of the job's earlier answers to this task, as the
                ledger records them.
            ledger_spending: What each job has spent, as the ledger records it.

        Returns:
            What the job has spent including this answer; None if the job has no privacy
            guarantee.

        Raises:
            PolicyRefusal: The job's guarantee or the site's budget does not cover the
                answer.
            ConfigError: The spending record is damaged.
        """
        if self.promise is None:
            self.require_enough(policy)
            return None
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locking_file(self.path.with_suffix(".lock")):
            spending = read_spending(self.path)
            old_spending = {
                job: spent.model_copy(deep=True) for job, spent in spending.items()
            }
            _catch_up_with_ledger(spending, ledger_spending or {})
            spent = spending.setdefault(self.job, JobSpending())
            is_new = _add_answer(
                spent,
                answer,
                task=task,
                promise=self.promise,
                ledger_answers=ledger_answers,
            )
            epsilon = self.promise.compute_epsilon(max(1, len(spent.answers)))
            spent.epsilon = max(epsilon, spent.epsilon)
            spent.delta = self.promise.privacy.delta
            if is_new:
                _require_budget(policy, spending.values())
            if spending != old_spending:
                table = {job: spent.model_dump() for job, spent in spending.items()}
                write_json(self.path, table)
            return SpentBudget(spent.epsilon, spent.delta)

    def require_enough(
        self,
        policy: Policy,
        ledger_spending: Mapping[str, SpentBudget] | None = None,
    ) -> None:
        """Check, before the site joins, that the budget suffices for the complete job.

        Args:
            policy: The site's rules.
            ledger_spending: What each job has spent, as the ledger records it.

        Raises:
            PolicyRefusal: The budget does not suffice, or the job guarantees less than
                the policy requires.
            ConfigError: The spending record is damaged.
        """
        if self.promise is not None and policy.epsilon_unit:
            units = get_args(Unit)  # the strongest guarantee first
            unit = self.promise.privacy.unit
            smallest_unit = policy.epsilon_unit
            policy.require(
                units.index(unit) <= units.index(smallest_unit),
                "epsilon_unit",
                f"the job guarantees ε for each {unit}",
                f"each {smallest_unit}",
            )
        for rule, symbol in (("max_epsilon", "ε"), ("max_delta", "δ")):
            limit = getattr(policy, rule)
            policy.require(
                not limit or self.promise is not None,
                rule,
                f"the job guarantees no {symbol} ([privacy])",
                f"{limit:g}",
            )
        if self.promise is None:
            return
        spending = read_spending(self.path)
        _catch_up_with_ledger(spending, ledger_spending or {})
        delta = self.promise.privacy.delta
        spending[self.job] = JobSpending(
            epsilon=self.promise.compute_epsilon(), delta=delta
        )
        _require_budget(policy, spending.values())


def _add_answer(
    spent: JobSpending,
    answer: str,
    *,
    task: str,
    promise: Promise,
    ledger_answers: Collection[str],
) -> bool:
    """Add an answer to those of its job, and return whether it is new.

    Args:
        spent: What the job has spent; it is changed.
        answer: The answer's hash.
        task: The task.
        promise: The job's privacy guarantee.
        ledger_answers: Hashes of the job's earlier answers to this task, as the ledger
            records them.

    Raises:
        PolicyRefusal: The guarantee does not cover another answer.
    """
    hashes = spent.answers
    limit = promise.rounds
    if task == COUNTS:
        hashes = spent.counts
        limit = int(promise.privacy.counts > 0)
    hashes[:] = sorted({*hashes, *(earlier[:SHORT] for earlier in ledger_answers)})
    if answer[:SHORT] in hashes:
        return False

    number = len(hashes) + 1
    if number > limit:
        raise PolicyRefusal(
            "max_epsilon",
            f"refused: the job's privacy guarantee covers at most {limit:,} answers "
            f"from this site, and this would be number {number:,}; a new job can be "
            "approved, and its ε is added to this job's",
        )
    hashes.append(answer[:SHORT])
    return True


def _catch_up_with_ledger(
    spending: dict[str, JobSpending], ledger_spending: Mapping[str, SpentBudget]
) -> None:
    """Replace each job's recorded ε and δ by the ledger's values, if these are higher.

    They are higher if someone restored an older copy of the spending record.

    Args:
        spending: What each job has spent, as the spending record says; it is changed.
        ledger_spending: What each job has spent, as the ledger records it.
    """
    for job, by_ledger in ledger_spending.items():
        spent = spending.setdefault(job, JobSpending())
        if spent.epsilon < by_ledger.epsilon:
            logger.warning(
                "the record of the privacy budget is older than the ledger: job %s has "
                "spent ε = %.4g",
                job[:SHOWN_DIGITS],
                by_ledger.epsilon,
            )
            spent.epsilon = by_ledger.epsilon
            spent.delta = max(spent.delta, by_ledger.delta)


def _require_budget(policy: Policy, spending: Collection[JobSpending]) -> None:
    """Raise PolicyRefusal if the ε or the δ of all jobs exceeds the site's budget."""
    totals = (
        ("max_epsilon", "ε", sum(spent.epsilon for spent in spending)),
        ("max_delta", "δ", sum(spent.delta for spent in spending)),
    )
    for rule, symbol, total in totals:
        limit = getattr(policy, rule)
        policy.require(
            not limit or total <= limit * (1 + 1e-9),
            rule,
            f"{symbol} of all jobs at this site would be {total:.3g}",
            f"{limit:g} in all",
        )


def read_spending(path: Path) -> dict[str, JobSpending]:
    """Return what each job has spent of the privacy budget, by fingerprint.

    Raises:
        ConfigError: The spending record is damaged, or it is missing although the
            ledger beside it has noisy answers. In this case, nothing may leave.
    """
    try:
        table: Mapping[str, Any] = read_json(path)
        return {key: JobSpending.model_validate(value) for key, value in table.items()}
    except (OSError, ValueError, AttributeError) as error:
        is_missing = isinstance(error, FileNotFoundError)
        if is_missing and not _has_noisy_answers(path.with_name(LEDGER)):
            return {}
        raise ConfigError(
            f"{path}: damaged or deleted, so the ε that was spent is unknown and "
            "nothing may leave: restore a copy; the ledger lists what left"
        ) from error


def _has_noisy_answers(ledger: Path) -> bool:
    """Return whether the ledger records answers with noise."""
    with suppress(FileNotFoundError), open(ledger, "rb", opener=open_regular) as file:
        for raw in file:
            line = parse_line(raw) or {}
            is_answer = line.get("refusal") is False
            if is_answer and str(line.get("task")).startswith(NOISY):
                return True
    return False


# ---- the guard of a run --------------------------------------------------------------


class SiteGuard:
    """Enforces the rules of one run at one site; the site's host consults it.

    The facts of an update are determined when it is computed. They are kept in memory
    until a secure sum masks the update. If a reply is sent again, the facts of its
    update are read from the ledger.

    Attributes:
        count_covered: Returns the tokens, steps and patients behind a task's update.
        find_model_digest: Returns the digest of the model that a task's latest update
            is about.

    Args:
        kit: The site's kit.
        site: The site's name.
        run: The run's name.
        table: The job as it was approved.
        policy: Reads the current policy.
        secure: Whether sums are masked.
        threshold: Minimum number of sites with which a sum of a round is opened.
        drawn: Number of sites that are drawn for a round; None if all take part.
        promise: The job's guarantee of differential privacy; None if it has none.
        folders: The folders in which the site stores the run's files.
    """

    def __init__(  # noqa: PLR0913 - a run, its job, and the sources of its rules
        self,
        kit: Path,
        site: str,
        run: str,
        table: Mapping[str, Any],
        policy: Callable[[], Policy],
        *,
        secure: bool,
        threshold: int,
        drawn: int | None = None,
        promise: Promise | None = None,
        folders: Collection[Path] = (),
    ) -> None:
        self.count_covered: Covered = lambda _task: {}
        self.find_model_digest: FindModelDigest = lambda _task: ""
        self._kit = kit
        self._site = site
        self._run = run
        self._table = table
        self._policy = policy
        self._secure = secure
        self._threshold = threshold
        self._drawn = drawn
        self._sites = frozenset(table.get("sites", ()))
        self._job = fingerprint_table(table)
        self._ledger = Ledger.in_kit(kit)
        self._budget = Budget(kit / RULES / "privacy.json", self._job, promise)
        self._folders = tuple(folders)
        self._job_lines = JobLines(self._ledger.path, self._job)
        self._spent_lines = SpentLines(self._ledger.path, self._job)
        self._run_lines = RunLines(self._ledger.path, run)
        self._newest_policy = Policy()  # until the site's own policy is read
        self._newest_update: _UpdateFacts | None = None  # that this process computed

    def check_job(
        self,
        method: str,
        sites: int,
        rounds: int | None,
        *,
        inspects_each: bool = False,
    ) -> None:
        """Check a job against the policy and the budget, before the site joins.

        Args:
            method: The job's method.
            sites: Number of sites of a round.
            rounds: Number of its rounds; None if unknown.
            inspects_each: Whether the server inspects each site's update.

        Raises:
            PolicyRefusal: A rule forbids the job.
            Withheld: A file of the site is damaged.
        """
        policy = self._read_policy()
        check_participation(
            policy,
            method,
            sites,
            self._threshold,
            rounds=rounds,
            secure=self._secure,
            inspects_each=inspects_each,
        )
        self._read_spent_lines()
        with self._withholding():
            self._budget.require_enough(policy, self._spent_lines.jobs)

    def check_coverage(self, planned: Iterable[Coverage]) -> None:
        """Check how many patients later updates will cover, before the site joins.

        Args:
            planned: The coverage of each later update, computed from the site's data.

        Raises:
            PolicyRefusal: One of them would cover fewer patients than `min_patients`.
        """
        policy = self._read_policy()
        for update in planned:
            check_coverage(policy, update)

    def check_examples(self, read_examples: Callable[[], Views]) -> None:
        """Compare the site's training examples with earlier jobs, before it joins.

        Call this after all other checks: it also records the examples, with which later
        jobs are compared.

        Args:
            read_examples: Returns the site's training examples in the form that
                `ExampleRecord.compare_and_record` takes; it is not called if no rule
                needs them.

        Raises:
            PolicyRefusal: Too few examples differ from those of an earlier job.
            Withheld: The record of earlier jobs is missing, damaged or full.
            FednotesError: The record cannot be written.
        """
        policy = self._read_policy()
        joining = JoinedRun(self._run, self._job, tuple(self._sites))
        with self._withholding():
            record = ExampleRecord(self._kit / RULES)
            record.compare_and_record(joining, read_examples, policy)

    def check_request(self, request: Request) -> None:
        """Check whether a request may be served.

        Raises:
            NotApproved: The job is no longer approved.
            PolicyRefusal: A rule forbids the request.
            RefusedError: The request names sites that the job does not permit.
        """
        policy = self._read_policy()
        time = read_clock()
        require_approved(self._kit, self._site, self._table, policy)
        is_of_engine = request.task.startswith(OURS) and request.task != BEGIN
        if is_of_engine:
            # The values that it opens were checked with the method's own task.
            return
        sites_in_sum = set(request.counted)
        if self._sites:
            sites_in_sum &= self._sites
        if policy.hours:
            self._require_clock(time, policy)
        check_request(
            policy,
            request,
            len(sites_in_sum),
            self._threshold,
            secure=self._secure,
            now=time,
        )
        self._require_drawn_sites(request, len(sites_in_sum))

    def _require_drawn_sites(self, request: Request, num_sites: int) -> None:
        """Raise RefusedError unless a request is for as many sites as the job draws.

        Args:
            request: The request.
            num_sites: Number of the job's sites that it names.
        """
        if self._drawn is not None and num_sites not in (self._drawn, len(self._sites)):
            raise RefusedError(
                f"site {self._site!r}: task '{clean(request.task, NAME)}' is for a sum "
                f"over {num_sites} sites, but the approved job draws {self._drawn} of "
                f"{len(self._sites)} sites for a round"
            )

    def _name_question(self, request: Request, question: bytes) -> str:
        """Return the name under which a question is counted and recorded.

        If the sums of a job can be over different sites, an answer in the sum over
        other sites, or in another run, counts again even if it is the same: the
        difference of two such sums reveals single sites.

        Args:
            request: The request that asks the question.
            question: Digest of the question, or b"".
        """
        is_always_of_all = self._drawn is None and self._threshold >= len(self._sites)
        if not question or not self._secure or is_always_of_all:
            return question.hex()
        sites = sorted(self._sites.intersection(request.counted))
        return hash_parts("question of a sum", question, self._run, *sites).hex()

    def require_room(self, more: int) -> None:
        """Check whether the site may store more data for the run, before it does.

        Args:
            more: Number of further bytes.

        Raises:
            PolicyRefusal: The site would store more than `max_stored_bytes`.
            Withheld: A file of the site cannot be read.
        """
        policy = self._read_policy()
        if policy.max_stored_bytes:
            check_storage(policy, self._measure_stored_bytes() + more + LEDGER_BYTES)

    def _require_room_for_line(self) -> None:
        """Raise NoRoom if the policy leaves no room for a line of the ledger."""
        try:
            policy = self._read_policy()
        except RefusedError:
            # The line may be about to record just this: that the policy cannot be read.
            # So it is not refused, but the last policy that could be read limits it.
            policy = self._newest_policy
        if not policy.max_stored_bytes:
            return
        try:
            check_storage(policy, self._measure_stored_bytes() + LINE_BYTES)
        except PolicyRefusal as error:
            raise NoRoom(str(error)) from error

    def _measure_stored_bytes(self) -> int:
        """Return the size of everything that the site stores for the run, in bytes."""
        with self._reading_ledger():
            lines = self._run_lines.measure_size()
        return lines + sum(map(measure_disk_usage, self._folders))

    def check_refusal(
        self, request: Request, question: bytes, error: Exception
    ) -> None:
        """Check that the site may still refuse a task that has read its notes.

        A server can choose parameters under which a task fails for some notes and not
        for others. Each question that is refused in this way therefore counts as a
        round.

        Args:
            request: The request.
            question: Digest of the question that goes unanswered.
            error: Why the task is refused.

        Raises:
            PolicyRefusal: All rounds are used up. An answer would be refused as well.
            Withheld: A file of the site cannot be read.
        """
        if isinstance(error, PolicyRefusal) and error.rule == "max_rounds":
            raise error
        self._require_round_for_refusal(request, self._name_question(request, question))

    def _require_round_for_refusal(self, request: Request, question: str) -> None:
        """Raise PolicyRefusal unless a round is left for a question that is refused.

        Args:
            request: The request.
            question: The question, as the ledger names it.
        """
        policy = self._read_policy()
        if not policy.max_rounds:
            return
        facts = _UpdateFacts(
            request.number,
            request.task,
            round=request.round,
            covered=dict(self.count_covered(request.task)),
        )
        num_sent = self._count_refusal(facts, question, policy)
        what = f"the reply to task '{clean(facts.task, NAME)}' of round {facts.round}"
        check_rounds(policy, what, num_sent)

    def check_reply(
        self,
        request: Request,
        reply: Frame,
        update: Update | None,
        reason: str = "",
        *,
        question: bytes = b"",
    ) -> None:
        """Check a reply against the policy, then write its line in the ledger.

        Args:
            request: The request that the reply answers.
            reply: The encoded reply.
            update: The reply's update before masking, if it was just computed; None for
                a reply that is sent again, a refusal, and a reply of the engine itself.
            reason: Why the reply is a refusal, in one word.
            question: Digest of the question that the update answers. For a refusal, the
                question of a task that had already read notes; for the site's own
                scores, the tasks that led to its state.

        Raises:
            NotApproved: The approval was withdrawn since the request was checked.
            PolicyRefusal: A rule forbids the reply.
            NoRoom: The ledger's line would exceed `max_stored_bytes`.
            RefusedError: It is unknown which update the reply contains.
            Withheld: The ledger or another file of the site cannot be read or written.
        """
        with self._holding_replies():
            self._check_and_record(request, reply, update, reason, question)

    @contextmanager
    def _holding_replies(self) -> Iterator[None]:
        """Keep other processes of the kit from checking a reply at the same time.

        A reply is counted and then written to the ledger. Two processes that count at
        the same time would both find that one more round is within `max_rounds`.

        Raises:
            Withheld: The lock file cannot be opened.
        """
        path = self._kit / RULES / "replies.lock"
        with ExitStack() as stack:
            try:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                stack.enter_context(locking_file(path))
            except OSError as error:
                public = f"site {self._site!r} cannot lock its ledger"
                raise Withheld(f"{path}: {error}", public, later=True) from error
            yield

    def _check_and_record(
        self,
        request: Request,
        reply: Frame,
        update: Update | None,
        reason: str,
        question: bytes,
    ) -> None:
        """Check a reply and write its line; see `check_reply`.

        First the facts of its update are found, then approval, policy and budget are
        checked, and last the line is written, so that no reply leaves without one.
        """
        if update is None:  # for a new update, the host has called `require_room`
            self._require_room_for_line()
        message = decode_reply(reply, checked=True)
        is_refusal = message.update is None
        is_of_engine = request.task.startswith(OURS)
        ledger_question = self._name_question(request, question)
        if is_refusal and question and not is_of_engine:
            # A refusal after reading notes uses up a round too. Another process may
            # have used the last one since `check_refusal`.
            self._require_round_for_refusal(request, ledger_question)

        method_facts = self._find_update_facts(
            request, reply, message, update, ledger_question
        )
        # A refusal, and a reply of the engine without a masked update, have only the
        # facts of their request. The latter is still checked for approval and size.
        facts = method_facts or _UpdateFacts(
            request.number, request.task, request.round
        )
        spent = None
        if message.update is not None:
            spent = self._check_contents(
                facts,
                has_metrics=bool(message.update.metrics),
                has_method_update=method_facts is not None,
                size=len(reply),
            )

        scores_state = ""
        if request.task == SCORES and not is_refusal:
            # A site's own scores are attached to an empty update, which nothing above
            # counts. `max_rounds` limits the number of models whose scores leave, so
            # the line identifies the model: here, `question` is the digest of the tasks
            # that led to the site's state, among them the one that sent the model.
            scores_state = question.hex()
            self._check_scores(scores_state)

        recorded = _choose_recorded_facts(facts, message, ledger_question)
        entry = self._make_entry(reply, message, recorded, reason, scores_state, spent)
        self._append_to_ledger(entry)

    def _find_update_facts(
        self,
        request: Request,
        reply: Frame,
        message: Reply,
        update: Update | None,
        question: str,
    ) -> _UpdateFacts | None:
        """Return the facts of the method's update in a reply.

        Args:
            request: The request that the reply answers.
            reply: The encoded reply.
            message: The decoded reply.
            update: The update, if it was just computed; see `check_reply`.
            question: The question that it answers, as the ledger names it.

        Returns:
            The facts; None for a refusal, and for a reply of the engine itself without
            a masked update.

        Raises:
            RefusedError: The reply contains an earlier update that is no longer known.
        """
        if update is not None:
            return self._describe_update(request, update, question)
        if message.update is None:
            return None
        is_of_engine = request.task.startswith(OURS)
        if not is_of_engine:
            return self._look_up_update(request, hashlib.sha256(reply).hexdigest())
        is_masked = WORDS in message.attached.tensors
        return self._recall_masked_update(request) if is_masked else None

    def _check_contents(
        self,
        facts: _UpdateFacts,
        *,
        has_metrics: bool,
        has_method_update: bool,
        size: int,
    ) -> SpentBudget | None:
        """Check a reply that is not a refusal against the approval and the policy.

        Args:
            facts: The facts of its update.
            has_metrics: Whether it has counts that the server can read.
            has_method_update: Whether it contains an update of the method, plain or
                masked. Other replies show no values of notes, so the rules for updates
                that the server can read do not apply to them.
            size: Size of the message in bytes.

        Returns:
            What the job has spent of the privacy budget; None as in `_check_update`.
        """
        # A task may take hours, in which people may withdraw the approval.
        require_approved(self._kit, self._site, self._table, policy=self._read_policy())
        return self._check_update(
            facts,
            size=size,
            secure=self._secure or not has_method_update,
            scores=has_metrics and not self._secure,
        )

    def _make_entry(
        self,
        reply: Frame,
        message: Reply,
        recorded: _UpdateFacts,
        reason: str,
        scores_state: str,
        spent: SpentBudget | None,
    ) -> Entry:
        """Return the ledger's line about a reply.

        Args:
            reply: The encoded reply.
            message: The decoded reply.
            recorded: The facts of its update that the line records.
            reason: Why the reply is a refusal, in one word.
            scores_state: For the site's own scores, the state of the site in which
                they leave, otherwise "".
            spent: What the job has spent of the privacy budget; None if nothing.
        """
        answered = recorded.answered or AnsweredQuestion("", "")
        attached = describe_tensors(message.attached.tensors, norms=False)
        return Entry(
            time=read_clock(),
            run=clean_name(self._run),
            round=recorded.round,
            task=clean_name(recorded.task),
            receiver=SERVER,
            tensors=recorded.tensors + attached,
            bytes=len(reply),
            sha256=hashlib.sha256(reply).hexdigest(),
            masked=WORDS in message.attached.tensors,
            job=self._job,
            refusal=message.update is None,
            reason=clean_name(reason) if reason else "",
            question=answered.question or scores_state,
            update=answered.update_hash,
            model=answered.model_digest,
            tokens=recorded.covered.get("tokens"),
            steps=recorded.covered.get("steps"),
            patients=recorded.covered.get("patients"),
            spent=spent,
        )

    def _check_scores(self, state: str) -> None:
        """Check whether the site's own scores may leave.

        They are about the model that the task `finish` was sent. A server could send
        any number of models, so each counts as a round, even if its scores are those of
        an earlier one.

        Args:
            state: Digest of the tasks that led to the site's state.

        Raises:
            PolicyRefusal: The scores of `max_rounds` models have left.
        """
        policy = self._read_policy()
        if policy.max_rounds:
            self._read_job_lines(policy)
            num_models = len(self._job_lines.scored_states | {state})
            check_rounds(policy, "this site's own scores", num_models)

    def _append_to_ledger(self, entry: Entry) -> None:
        """Write a line of the ledger.

        Raises:
            Withheld: It cannot be written.
        """
        try:
            self._ledger.append(entry)
        except FednotesError as error:
            public = f"site {self._site!r} cannot record this message in its ledger"
            # A full disk can be fixed; an edited ledger or a bad name cannot.
            may_retry = not isinstance(error, RefusedError)
            raise Withheld(str(error), public, later=may_retry) from error

    def _check_update(
        self, facts: _UpdateFacts, *, size: int, secure: bool, scores: bool
    ) -> SpentBudget | None:
        """Check an update against the policy, and spend the privacy budget.

        Args:
            facts: The facts of the update.
            size: Size of the message in bytes.
            secure: Whether the update is masked, or in no sum.
            scores: Whether the server will see the counts behind this site's scores.

        Returns:
            What the job has spent of the budget including this update; None if the
            update has no tensors, or the job no privacy guarantee.
        """
        policy = self._read_policy()
        num_sent = None
        if policy.max_rounds and facts.answered is not None:
            num_sent = self._count_updates(facts, facts.answered, policy)
        check_update(
            policy,
            facts.task,
            facts.round,
            [tensor.name for tensor in facts.tensors],
            facts.covered,
            size=size,
            secure=secure,
            scores=scores,
            num_sent=num_sent,
        )
        if not facts.tensors:
            return None
        self._read_spent_lines()
        with self._withholding():
            return self._budget.spend(
                hash_tensors(facts.tensors),
                policy,
                task=facts.task,
                ledger_answers=self._spent_lines.answers.get(facts.task, ()),
                ledger_spending=self._spent_lines.jobs,
            )

    def _describe_update(
        self, request: Request, update: Update, question: str
    ) -> _UpdateFacts:
        """Return the facts of an update that was just computed, and remember them."""
        tensors = describe_tensors(update.tensors)
        digest = hash_update(update, tensors)
        answered = None
        if digest:
            model_digest = self.find_model_digest(request.task)
            answered = AnsweredQuestion(question, digest, model_digest)
        self._newest_update = _UpdateFacts(
            request.number,
            request.task,
            round=request.round,
            tensors=tensors,
            covered=dict(self.count_covered(request.task)),
            answered=answered,
        )
        return self._newest_update

    def _recall_masked_update(self, request: Request) -> _UpdateFacts:
        """Return the facts of the update that a masked message contains.

        The method's request computed the update, and a later request of the engine asks
        for it in masked form. So it is the newest update of this process, if any.

        Raises:
            RefusedError: The update is no longer known.
        """
        newest = self._newest_update
        if newest is None or newest.number != request.counted.get(self._site):
            raise RefusedError(
                f"site {self._site!r}: cannot tell which update this masked message "
                "contains: start a new run"
            )
        return newest

    def _look_up_update(self, request: Request, sha256: str) -> _UpdateFacts:
        """Return what the ledger says about the update in a repeated reply."""
        self._read_job_lines(self._read_policy())
        line = self._job_lines.lines_by_message.get(sha256)
        if line is None:
            raise RefusedError(
                f"site {self._site!r}: its ledger has no record of the requested "
                "reply: start a new run"
            )
        return _UpdateFacts(
            request.number,
            request.task,
            round=request.round,
            tensors=read_tensors(line),
            covered={key: line[key] for key in COVERED if line[key] is not None},
            answered=read_answered_question(line) if line["update"] else None,
        )

    def _count_updates(
        self, update: _UpdateFacts, answered: AnsweredQuestion, policy: Policy
    ) -> int:
        """Return the number of updates of a task that `max_rounds` limits.

        These are the updates that left under the newest approval, and the one that is
        about to leave. The round that the server claims does not matter: the same
        answer to the same question counts once, and a different question counts even if
        its answer is the same (`AnsweredQuestion`). A task that does not train may send
        `SPARE` further updates, so these are subtracted. If its updates are about
        models, the number is at least that of the distinct models.

        Args:
            update: The update that is about to leave.
            answered: Its question and answer.
            policy: The site's rules.
        """
        self._read_job_lines(policy)
        updates = self._job_lines.updates.get(update.task, set()) | {answered}
        refused = self._find_unanswered_questions(update.task, updates)
        number = len(updates) + len(refused)
        if update.tensors and update.is_of_training:
            return number
        model = answered.model_digest
        if not model:
            return number - SPARE
        models = self._job_lines.models.get(update.task, set()) | {model}
        return max(len(models) + len(refused), number - SPARE)

    def _count_refusal(self, facts: _UpdateFacts, question: str, policy: Policy) -> int:
        """Return what `_count_updates` would return if a question were answered.

        Args:
            facts: The task.
            question: The question, which is about to be refused.
            policy: The site's rules.
        """
        self._read_job_lines(policy)
        updates = self._job_lines.updates.get(facts.task, set())
        refused = self._find_unanswered_questions(
            facts.task, updates, about_to_refuse=question
        )
        number = len(updates) + len(refused)
        if facts.is_of_training:
            return number
        models = self._job_lines.models.get(facts.task, set())
        if not models and not self.find_model_digest(facts.task):
            return number - SPARE
        return max(len(models) + len(refused), number - SPARE)

    def _find_unanswered_questions(
        self,
        task: str,
        answers: Collection[AnsweredQuestion],
        *,
        about_to_refuse: str | None = None,
    ) -> set[str]:
        """Return the questions of a task that were refused and never answered.

        Args:
            task: The task.
            answers: The questions of the task that were answered, with the answers.
            about_to_refuse: A further question, which is about to be refused.
        """
        refused = set(self._job_lines.refused_questions.get(task, ()))
        if about_to_refuse is not None:
            refused.add(about_to_refuse)
        return refused - {answer.question for answer in answers}

    def _require_clock(self, time: datetime, policy: Policy) -> None:
        """Raise Withheld if the clock was set back, which makes `hours` meaningless."""
        self._read_job_lines(policy)
        if (
            self._job_lines.newest_time
            and encode_time(time + MAX_CLOCK_LAG) < self._job_lines.newest_time
        ):
            raise Withheld(
                f"the clock of this machine says {encode_time(time)}, but its ledger's "
                f"newest line is dated {self._job_lines.newest_time}: set the clock; "
                "if the ledger is wrong, approve the job again",
                f"the clock of site {self._site!r} was set back",
                later=True,
            )

    def _read_job_lines(self, policy: Policy) -> None:
        """Read the ledger's new lines about this job."""
        approvals = open_approvals(self._kit, policy.make_quorum(self._site))
        with self._reading_ledger():
            self._job_lines.read(approvals.find_ledger_hash_at_approval(self._table))

    def _read_spent_lines(self) -> None:
        """Read the ledger's new lines about the privacy budget."""
        if self._budget.promise:
            with self._reading_ledger():
                self._spent_lines.read()

    @contextmanager
    def _reading_ledger(self) -> Iterator[None]:
        """While the context is open, raise Withheld if the ledger cannot be read."""
        try:
            yield
        except OSError as error:
            public = f"site {self._site!r} cannot read its ledger"
            raise Withheld(
                f"{self._ledger.path}: {error}", public, later=True
            ) from error

    def _read_policy(self) -> Policy:
        """Read the current policy, remember and return it.

        Raises:
            Withheld: The site's file cannot be read.
        """
        with self._withholding():
            self._newest_policy = self._policy()
        return self._newest_policy

    @contextmanager
    def _withholding(self) -> Iterator[None]:
        """Replace ConfigError, which may name files of the site, by Withheld."""
        try:
            yield
        except ConfigError as error:
            public = f"site {self._site!r} cannot read its own file"
            raise Withheld(str(error), public, later=True) from error
