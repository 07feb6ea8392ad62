"""Enforce a site's rules: approvals, policy and ledger for every message of a run.

The kit's folder `rules` holds the approvals, the job that waits for one, and the ledger
(`ledger.jsonl`). All of them are read again for each message, so a person's decision
takes effect immediately.

`rules/privacy.json` records how much of the site's privacy budget all jobs have spent.
An answer is recorded there before it leaves, so no answer has left without a record.
The answer's line in the ledger records the same facts, so if an older copy of the
record is restored, it is completed from the ledger. An answer that is sent again, or
recomputed with the same noise, is the same answer and costs nothing. Any other answer
counts, whatever round the server claims. ε and δ of different jobs add up (basic
composition).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, get_args

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
    AnsweredQuestion,
    Entry,
    Past,
    RunLines,
    SpentBudget,
    SpentLines,
    TensorFacts,
    describe,
    hash_of,
    hash_of_update,
    ledger_of,
    parsed,
    plain,
    stamp,
    tensors_of,
    update_of,
)
from fednotes.apps.deployment.rules.policy import (
    Policy,
    PolicyRefusal,
    check_coverage,
    check_job,
    check_request,
    check_rounds,
    check_storage,
    check_update,
)
from fednotes.core.cleaning import NAME, clean
from fednotes.core.errors import ConfigError, FednotesError, RefusedError
from fednotes.core.federation import TRAIN, Coverage
from fednotes.core.messages import BEGIN, OURS, Frame, Reply, Request, decode_reply
from fednotes.core.parsing import open_regular, read_json
from fednotes.core.store import disk_usage, locked_file, write_json
from fednotes.core.tables import table_fingerprint
from fednotes.core.update import Update
from fednotes.privacy.promise import COUNTS, Promise, Unit

RULES = "rules"  # folder in a kit

# Texts that the server looks for in refusals (`server.Progress`).
REJECTED = "has rejected this job"
NOT_APPROVED = "has not approved this job"
APPROVED_OTHER_FORM = "has approved another form of this job"
UNAPPROVED = (NOT_APPROVED, APPROVED_OTHER_FORM)

SHOWN = 12  # characters of a fingerprint to display
SERVER = "server"  # the only receiver
WORDS = "words"  # name of a masked update among the tensors of a reply
MAX_CLOCK_LAG = timedelta(minutes=5)  # how far a clock may lag behind the ledger
# Number of updates above `max_rounds` for a task that trains nothing: after the last
# round, a calibration asks up to 100 questions about one model.
SPARE = 100
# The part of `max_stored_bytes` that is reserved for the ledger, so that a site can
# still say why it refuses; and the part of it that one line may take.
LEDGER_BYTES = 2**20
LINE_BYTES = 2**16
SHORT = 16  # characters of an answer's hash in the record of the privacy budget
NOISY = "noisy"  # prefix of the names of tasks whose answers have noise
# Names of the counts of training behind an update, in a line of the ledger.
COVERED = ("tokens", "steps", "patients")
logger = logging.getLogger(__name__)
# Returns the tokens, steps and patients behind an update of a task.
Covered = Callable[[str], Mapping[str, int]]
# Returns a digest of the model that a task's latest update is about, or "".
Subject = Callable[[str], str]


class NotApproved(RefusedError):
    """The job has not been approved at the site; the server may ask again."""

    later = True


class Withheld(RefusedError):
    """Something at the site is damaged or wrong, so nothing may leave.

    Attributes:
        public: The message for the server.
        later: Whether the server may ask again.
    """

    def __init__(self, message: str, public: str, *, later: bool) -> None:
        super().__init__(message)
        self.public = public
        self.later = later


class NoRoom(RefusedError):
    """A run's space is used up, so not even a refusal can be recorded and sent."""


def now() -> datetime:
    """Return the time, with a time zone."""
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
    """
    approvals = open_approvals(kit, policy.quorum(site))
    key = table_fingerprint(table)
    short_key = key[:SHOWN]
    status = approvals.status(table)
    if status == "approved":
        return
    if status == "rejected":
        raise NotApproved(
            f"site {site!r} {REJECTED} ({short_key}); to take that back, there: "
            f"fednotes site approve KIT {short_key}"
        )

    if (read_pending_job(kit) or {}).get("fingerprint") != key:
        pending = {"fingerprint": key, "when": now().isoformat(), "table": table}
        write_json(_pending_path(kit), pending)
    state = APPROVED_OTHER_FORM if status == "changed" else NOT_APPROVED
    progress = ""
    if status == "waiting":
        people = approvals.standing(table).people
        progress = f" ({len(people)} of {policy.approvals} people have)"
    raise NotApproved(
        f"site {site!r} {state} ({short_key}){progress}; there: fednotes site approve "
        "KIT"
    )


def _pending_path(kit: Path) -> Path:
    return kit / RULES / "pending.json"


def read_pending_job(kit: Path) -> dict[str, Any] | None:
    """Return the job that was requested last and waits for a decision.

    Returns:
        A table with `fingerprint`, `when` and `table`; None if no job waits.

    Raises:
        ConfigError: The file is damaged.
    """
    path = _pending_path(kit)
    try:
        pending = dict(read_json(path))
        if table_fingerprint(pending["table"]) != pending["fingerprint"]:
            raise ValueError("not its fingerprint")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RefusedError) as error:
        raise ConfigError(
            f"{path}: damaged; delete it, the server asks again"
        ) from error
    return pending


def find_job(kit: Path, prefix: str) -> tuple[str, dict[str, Any]]:
    """Return a job that this site was asked to run, by a prefix of its fingerprint.

    Returns:
        The complete fingerprint, and the job.

    Raises:
        ConfigError: No job has this prefix, or more than one has it.
    """
    decisions = open_approvals(kit).decisions()
    known = {decision.fingerprint: decision.table for decision in decisions}
    pending = read_pending_job(kit)
    if pending:
        known[pending["fingerprint"]] = pending["table"]
    matching = [key for key in known if key.startswith(prefix.strip().lower())]
    if len(matching) == 1:
        return matching[0], known[matching[0]]
    problem = "no fingerprint begins"
    if matching:
        problem = "more than one fingerprint begins"
    jobs = [f"{job_name(known[key])} ({key[:SHOWN]})" for key in matching or known]
    raise ConfigError(
        f"{kit}: {problem} with {prefix!r}; jobs that this site was asked about: "
        f"{', '.join(jobs) or 'none yet'}"
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
    """Decide on a job; it keeps waiting while too few people have approved it.

    Args:
        kit: The site's kit.
        table: The job.
        approve: Whether to approve it; False rejects it.
        by: The account that decides.
        quorum: Who must approve.
        signer: The person who approves with a key.

    Returns:
        The job's fingerprint.
    """
    approvals = open_approvals(kit, quorum)
    decision: Decision = "approved" if approve else "rejected"
    ledger_end = ledger_of(kit).head().hash if approve else ""
    key = approvals.decide(
        decision, table, by=by, when=now(), signer=signer, ledger=ledger_end
    )
    is_settled = approvals.standing(table).settled is not None
    if is_settled and (read_pending_job(kit) or {}).get("fingerprint") == key:
        _pending_path(kit).unlink(missing_ok=True)
    return key


def job_name(table: Mapping[str, Any]) -> str:
    """Return a job's name, sanitised because the job's author chose it."""
    return clean(table.get("name", ""), NAME)


@dataclass(frozen=True)
class _SentUpdate:
    """The update that a message holds, plain or masked.

    Attributes:
        number: Number of the request that asked for it.
        task: The task.
        round: The round, as the server numbers it.
        tensors: Facts of its tensors.
        covered: Known counts of training behind it.
        answered: The pair that `max_rounds` counts; None without an update, or for an
            empty one.
    """

    number: int
    task: str
    round: int
    tensors: tuple[TensorFacts, ...]
    covered: Mapping[str, int]
    answered: AnsweredQuestion | None = None


def _trains(about: _SentUpdate) -> bool:
    """Return whether a task trains, so that each update of it is a round."""
    return "steps" in about.covered or about.task == TRAIN


# ---- the privacy budget --------------------------------------------------------------


class Spent(BaseModel):
    """What one job has spent of a site's privacy budget.

    Attributes:
        epsilon: Its ε.
        delta: Its δ.
        answers: Short hashes of the distinct answers that left.
        counts: Short hashes of the distinct answers with counts.
    """

    model_config = ConfigDict(extra="forbid")

    epsilon: FiniteFloat = 0.0
    delta: FiniteFloat = 0.0
    answers: list[str] = []
    counts: list[str] = []


@dataclass(frozen=True)
class Budget:
    """One job's share of a site's privacy budget.

    Attributes:
        path: The file that records what jobs have spent.
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
        before: Collection[str] = (),
        noted: Mapping[str, SpentBudget] | None = None,
    ) -> SpentBudget | None:
        """Record that an answer to a task is about to leave.

        Args:
            answer: The answer's hash.
            policy: The site's rules.
            task: The task.
            before: Hashes of the job's answers in the ledger.
            noted: What jobs have spent by the ledger.

        Returns:
            What the job has spent with this answer; None if it promises nothing.

        Raises:
            PolicyRefusal: The job's promise or the site's budget does not cover it.
            ConfigError: The record is damaged.
        """
        if self.promise is None:
            self.require(policy)
            return None
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked_file(self.path.with_suffix(".lock")):
            spent = read_spent(self.path)
            stored = {key: each.model_copy(deep=True) for key, each in spent.items()}
            _make_whole(spent, noted or {})
            job = spent.setdefault(self.job, Spent())
            known = job.answers
            limit = self.promise.rounds
            if task == COUNTS:
                known = job.counts
                limit = int(self.promise.privacy.counts > 0)
            known[:] = sorted({*known, *(earlier[:SHORT] for earlier in before)})
            is_new = answer[:SHORT] not in known
            number = len(known) + is_new
            if is_new and number > limit:
                raise PolicyRefusal(
                    "max_epsilon",
                    f"refused: the job promises at most {limit:,} answers of this "
                    f"site, and this would be number {number:,}; a new job can be "
                    "approved, and its ε is added to this job's",
                )
            if is_new:
                known.append(answer[:SHORT])
            epsilon = self.promise.epsilon(max(1, len(job.answers)))
            job.epsilon = max(epsilon, job.epsilon)
            job.delta = self.promise.privacy.delta
            if is_new:
                _require_epsilon(policy, sum(each.epsilon for each in spent.values()))
            if spent != stored:
                write_json(
                    self.path, {key: each.model_dump() for key, each in spent.items()}
                )
            return SpentBudget(job.epsilon, job.delta)

    def require(
        self, policy: Policy, noted: Mapping[str, SpentBudget] | None = None
    ) -> None:
        """Check that the budget suffices for a whole job, before the site joins.

        Args:
            policy: The site's rules.
            noted: What jobs have spent by the ledger.

        Raises:
            PolicyRefusal: It does not, or the job promises less than the policy
                requires.
            ConfigError: The record is damaged.
        """
        if self.promise and policy.epsilon_unit:
            least = policy.epsilon_unit
            unit = self.promise.privacy.unit
            units = get_args(Unit)
            policy.require(
                units.index(unit) <= units.index(least),
                "epsilon_unit",
                f"the job promises ε for each {unit}",
                f"each {least}",
            )
        if not policy.max_epsilon:
            return
        policy.require(
            self.promise is not None,
            "max_epsilon",
            "the job promises no ε ([privacy])",
            f"{policy.max_epsilon:g}",
        )
        if self.promise is None:
            return  # unreachable: the line above raises
        spent = read_spent(self.path)
        _make_whole(spent, noted or {})
        others = sum(job.epsilon for key, job in spent.items() if key != self.job)
        _require_epsilon(policy, others + self.promise.epsilon())


def _make_whole(spent: dict[str, Spent], noted: Mapping[str, SpentBudget]) -> None:
    """Raise what jobs have spent to what the ledger says.

    It says more if an older copy of the record was put back.

    Args:
        spent: What each job has spent by the record; it is changed.
        noted: What jobs have spent by the ledger.
    """
    for key, least in noted.items():
        job = spent.setdefault(key, Spent())
        if job.epsilon < least.epsilon:
            logger.warning(
                "the record of the privacy budget is older than the ledger: job %s has "
                "spent ε = %.4g",
                key[:SHOWN],
                least.epsilon,
            )
            job.epsilon = least.epsilon
            job.delta = max(job.delta, least.delta)


def _require_epsilon(policy: Policy, epsilon: float) -> None:
    """Raise PolicyRefusal if the ε of all jobs together exceeds the budget."""
    policy.require(
        not policy.max_epsilon or epsilon <= policy.max_epsilon * (1 + 1e-9),
        "max_epsilon",
        f"ε of all jobs at this site would be {epsilon:.3g}",
        f"{policy.max_epsilon:g} in all",
    )


def read_spent(path: Path) -> dict[str, Spent]:
    """Return what each job has spent of the privacy budget.

    Raises:
        ConfigError: The file is damaged, or it is missing although noisy answers are in
            the ledger beside it. In this case, nothing may leave.
    """
    try:
        table: Mapping[str, Any] = read_json(path)
        return {key: Spent.model_validate(value) for key, value in table.items()}
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
        updates = (
            line for line in map(parsed, file) if line and line.get("refusal") is False
        )
        return any(str(line.get("task")).startswith(NOISY) for line in updates)
    return False


# ---- the guard of a run --------------------------------------------------------------


class SiteGuard:
    """The rules of one run at one site, which the site's host consults.

    The facts of an update are known when it is made. They are kept in memory until a
    secure sum masks it; if its reply is sent again, they come from the ledger.

    Attributes:
        covered: Returns counts of training behind an update of the running site.
        subject: Returns the model that an update of the running site is about.

    Args:
        kit: The site's kit.
        site: The site's name.
        run: The run's name.
        table: The job as it was approved.
        policy: Reads the current policy.
        secure: Whether sums are masked.
        threshold: Minimum number of sites with which a sum is opened.
        promise: The job's guarantee of differential privacy, if it has one.
        folders: The folders in which the site stores the run's files.
    """

    def __init__(  # noqa: PLR0913 - a run, its job and the ways to ask for its rules
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
        folders: Collection[Path] = (),
    ) -> None:
        self.covered: Covered = lambda _task: {}
        self.subject: Subject = lambda _task: ""
        self._kit = kit
        self._site = site
        self._run = run
        self._table = table
        self._policy = policy
        self._secure = secure
        self._threshold = threshold
        self._sites = frozenset(table.get("sites", ()))
        self._job = table_fingerprint(table)
        self._ledger = ledger_of(kit)
        self._budget = Budget(kit / RULES / "privacy.json", self._job, promise)
        self._folders = tuple(folders)
        self._past = Past(self._ledger.path, self._job)
        self._spent = SpentLines(self._ledger.path, self._job)
        self._lines = RunLines(self._ledger.path, run)
        self._newest_policy = Policy()  # until the site's own is read
        self._newest: _SentUpdate | None = None  # of the newest task that was done

    def check_job(
        self, method: str, sites: int, rounds: int | None, *, each: bool = False
    ) -> None:
        """Check a job against the policy and the budget, before the site joins.

        Args:
            method: The job's method.
            sites: Number of its sites.
            rounds: Number of its rounds; None if that is not known.
            each: Whether the server looks at single updates.

        Raises:
            PolicyRefusal: A rule forbids the job.
            Withheld: A file of the site is damaged.
        """
        policy = self._read_policy()
        check_job(
            policy,
            method,
            sites,
            self._threshold,
            rounds=rounds,
            secure=self._secure,
            each=each,
        )
        self._read_spent_lines()
        with self._withheld():
            self._budget.require(policy, self._spent.jobs)

    def check_coverage(self, planned: Iterable[Coverage]) -> None:
        """Check how many patients later updates will cover, before the site joins.

        Args:
            planned: The updates' coverage as computed from the site's own data.

        Raises:
            PolicyRefusal: One of them would cover fewer patients than `min_patients`.
        """
        policy = self._read_policy()
        for update in planned:
            check_coverage(policy, update)

    def check_examples(self, read: Callable[[], Views]) -> None:
        """Compare the site's training examples with earlier jobs, before it joins.

        The examples are remembered for the comparison with later jobs, so this check
        comes last.

        Args:
            read: Returns the site's training examples, as `ExampleRecord.join` takes
                them.

        Raises:
            PolicyRefusal: Too few examples differ from those of an earlier job.
            Withheld: The record of earlier jobs is missing, damaged or full.
            FednotesError: The record cannot be written.
        """
        policy = self._read_policy()
        joining = JoinedRun(self._run, self._job, tuple(self._sites))
        with self._withheld():
            ExampleRecord(self._kit / RULES).join(joining, read, policy)

    def request(self, request: Request) -> None:
        """Check whether a request may be served.

        Raises:
            NotApproved: The job is no longer approved.
            PolicyRefusal: A rule forbids the request.
        """
        policy = self._read_policy()
        time = now()
        require_approved(self._kit, self._site, self._table, policy)
        is_of_engine = request.task.startswith(OURS) and request.task != BEGIN
        if is_of_engine:
            # Its contents were checked together with the method's task.
            return
        sites = set(request.counted)
        if self._sites:
            sites &= self._sites
        if policy.hours:
            self._require_clock(time, policy)
        check_request(
            policy,
            request,
            len(sites),
            self._threshold,
            secure=self._secure,
            now=time,
        )

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
            check_storage(policy, self._stored_bytes() + more + LEDGER_BYTES)

    def _require_room_for_line(self) -> None:
        """Raise NoRoom unless a line of the ledger may be written."""
        with suppress(RefusedError):  # the line will record why it cannot be read
            self._read_policy()
        policy = self._newest_policy
        if not policy.max_stored_bytes:
            return
        try:
            check_storage(policy, self._stored_bytes() + LINE_BYTES)
        except PolicyRefusal as error:
            raise NoRoom(str(error)) from error

    def _stored_bytes(self) -> int:
        """Return the bytes that the site stores for the run."""
        with self._readable_ledger():
            lines = self._lines.size()
        return lines + sum(map(disk_usage, self._folders))

    def refusing(self, request: Request, question: bytes, error: Exception) -> None:
        """Check that the site may still refuse a task that has read its notes.

        A server can choose parameters under which a task fails for some notes, so each
        such question counts as a round.

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
        policy = self._read_policy()
        if not policy.max_rounds:
            return
        about = _SentUpdate(
            request.number,
            request.task,
            round=request.round,
            tensors=(),
            covered=dict(self.covered(request.task)),
        )
        num_sent = self._count_refusal(about, question.hex(), policy)
        what = f"the reply to task '{clean(about.task, NAME)}' of round {about.round}"
        check_rounds(policy, what, num_sent)

    def leaving(
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
            request: The request that it answers.
            reply: The message.
            update: The update, if it was just computed.
            reason: Why the reply is a refusal, in one word.
            question: Digest of the question that this reply answers, or refuses after
                the task has already read notes.

        Raises:
            PolicyRefusal: A rule forbids the reply.
            NoRoom: The ledger's line would exceed `max_stored_bytes`.
            RefusedError: The content of the reply is not known.
            Withheld: The ledger or another file of the site cannot be read or written.
        """
        if update is None:  # otherwise `require_room` was asked about the task
            self._require_room_for_line()
        sent = decode_reply(reply, checked=True)
        sha256 = hashlib.sha256(reply).hexdigest()
        nothing = _SentUpdate(request.number, request.task, request.round, (), {})
        known: _SentUpdate | None
        if update is not None:
            known = self._note_update(request, update, question)
        else:
            known = self._recall_update(request, sent, sha256)
        about = known or nothing
        is_masked = WORDS in sent.attached.tensors
        spent = None
        if sent.update is not None:
            # A reply of the engine itself is in no sum, so nothing needs to hide it.
            secure = self._secure or known is None
            scores = not self._secure and bool(sent.update.metrics)
            spent = self._check_update(
                about, size=len(reply), secure=secure, scores=scores
            )

        if sent.update is None or (sent.update.is_empty and not is_masked):
            about = nothing
        elif not is_masked and not sent.update.tensors:
            about = replace(nothing, answered=about.answered)
        answered = about.answered or AnsweredQuestion("", "")
        if sent.update is None:
            answered = AnsweredQuestion(question.hex(), "")
        entry = Entry(
            time=now(),
            run=plain(self._run),
            round=about.round,
            task=plain(about.task),
            receiver=SERVER,
            tensors=about.tensors + describe(sent.attached.tensors, norms=False),
            bytes=len(reply),
            sha256=sha256,
            masked=is_masked,
            job=self._job,
            refusal=sent.update is None,
            reason=plain(reason) if reason else "",
            question=answered.question,
            update=answered.update,
            model=answered.model,
            tokens=about.covered.get("tokens"),
            steps=about.covered.get("steps"),
            patients=about.covered.get("patients"),
            spent=spent,
        )
        try:
            self._ledger.append(entry)
        except FednotesError as error:
            public = f"site {self._site!r} cannot note this message in its ledger"
            # A full disk can be fixed; an edited ledger or a bad name cannot.
            may_retry = not isinstance(error, RefusedError)
            raise Withheld(str(error), public, later=may_retry) from error

    def _check_update(
        self, about: _SentUpdate, *, size: int, secure: bool, scores: bool
    ) -> SpentBudget | None:
        """Check an update against the policy, and spend the privacy budget.

        Returns:
            What the job has spent of it with this update; None for nothing.
        """
        policy = self._read_policy()
        num_sent = None
        if policy.max_rounds and about.answered:
            num_sent = self._count_updates(about, about.answered, policy)
        check_update(
            policy,
            about.task,
            about.round,
            [tensor.name for tensor in about.tensors],
            about.covered,
            size=size,
            secure=secure,
            scores=scores,
            left=num_sent,
        )
        if not about.tensors:
            return None
        self._read_spent_lines()
        with self._withheld():
            return self._budget.spend(
                hash_of(about.tensors),
                policy,
                task=about.task,
                before=self._spent.answers.get(about.task, ()),
                noted=self._spent.jobs,
            )

    def _note_update(
        self, request: Request, update: Update, question: bytes
    ) -> _SentUpdate:
        """Return the facts of an update that was just computed, and keep them."""
        tensors = describe(update.tensors)
        digest = hash_of_update(update, tensors)
        answered = None
        if digest:
            model = self.subject(request.task)
            answered = AnsweredQuestion(question.hex(), digest, model)
        self._newest = _SentUpdate(
            request.number,
            request.task,
            round=request.round,
            tensors=tensors,
            covered=dict(self.covered(request.task)),
            answered=answered,
        )
        return self._newest

    def _recall_update(
        self, request: Request, sent: Reply, sha256: str
    ) -> _SentUpdate | None:
        """Return the earlier update that a reply contains; None if it contains none.

        Raises:
            RefusedError: The update is no longer known.
        """
        is_of_engine = request.task.startswith(OURS)
        is_masked = WORDS in sent.attached.tensors
        if sent.update is None or (is_of_engine and not is_masked):
            return None
        if not is_of_engine:
            return self._look_up_update(request, sha256)
        newest = self._newest
        if newest is None or newest.number != request.counted.get(self._site):
            raise RefusedError(
                f"site {self._site!r}: cannot tell which update this masked message "
                "contains; start a new run"
            )
        return newest

    def _look_up_update(self, request: Request, sha256: str) -> _SentUpdate:
        """Return what the ledger says about a reply that was sent before."""
        self._read_past(self._read_policy())
        line = self._past.answers.get(sha256)
        if line is None:
            raise RefusedError(
                f"site {self._site!r}: its ledger has no record of the requested "
                "reply; start a new run"
            )
        return _SentUpdate(
            request.number,
            request.task,
            round=request.round,
            tensors=tensors_of(line),
            covered={key: line[key] for key in COVERED if line[key] is not None},
            answered=update_of(line) if line["update"] else None,
        )

    def _count_updates(
        self, update: _SentUpdate, answered: AnsweredQuestion, policy: Policy
    ) -> int:
        """Return how many updates of a task have left under the newest approval.

        The number is comparable with `max_rounds` and includes this update. The round
        that the server claims does not matter: the same answer to the same question
        counts once, and a different question counts even if its answer is the same
        (`AnsweredQuestion`). A task that trains nothing has `SPARE` further updates. If
        its updates are about models, each distinct model counts as a round as well.

        Args:
            update: The update that is about to leave.
            answered: Its question and answer.
            policy: The site's rules.
        """
        self._read_past(policy)
        updates = self._past.updates.get(update.task, set()) | {answered}
        refused = self._refused_questions(update.task, updates)
        number = len(updates) + len(refused)
        if update.tensors and _trains(update):
            return number
        if not answered.model:
            return number - SPARE
        models = self._past.models.get(update.task, set()) | {answered.model}
        return max(len(models) + len(refused), number - SPARE)

    def _count_refusal(self, about: _SentUpdate, question: str, policy: Policy) -> int:
        """Return what `_count_updates` would if a refused question had been answered.

        Args:
            about: The task.
            question: The question.
            policy: The site's rules.
        """
        self._read_past(policy)
        updates = self._past.updates.get(about.task, set())
        refused = self._refused_questions(about.task, updates, question)
        number = len(updates) + len(refused)
        if _trains(about):
            return number
        models = self._past.models.get(about.task, set())
        if not models and not self.subject(about.task):
            return number - SPARE
        return max(len(models) + len(refused), number - SPARE)

    def _refused_questions(
        self, task: str, updates: Collection[AnsweredQuestion], *more: str
    ) -> set[str]:
        """Return the questions of a task that were refused and never answered."""
        refused = self._past.refused.get(task, set()).union(more)
        return refused.difference(update.question for update in updates)

    def _require_clock(self, time: datetime, policy: Policy) -> None:
        """Raise Withheld if the clock was set back, which makes `hours` meaningless."""
        self._read_past(policy)
        if self._past.newest and stamp(time + MAX_CLOCK_LAG) < self._past.newest:
            raise Withheld(
                f"the clock of this machine says {stamp(time)}, but its ledger's "
                f"newest line is of {self._past.newest}: set the clock; if the ledger "
                "is wrong, approve the job again",
                f"the clock of site {self._site!r} was set back",
                later=True,
            )

    def _read_past(self, policy: Policy) -> None:
        """Read the new lines of the ledger."""
        approvals = open_approvals(self._kit, policy.quorum(self._site))
        with self._readable_ledger():
            self._past.read(approvals.approved_after(self._table))

    def _read_spent_lines(self) -> None:
        """Read what the ledger's new lines say of the privacy budget."""
        if self._budget.promise:
            with self._readable_ledger():
                self._spent.read()

    @contextmanager
    def _readable_ledger(self) -> Iterator[None]:
        """Raise Withheld if the ledger cannot be read."""
        try:
            yield
        except OSError as error:
            public = f"site {self._site!r} cannot read its ledger"
            raise Withheld(
                f"{self._ledger.path}: {error}", public, later=True
            ) from error

    def _read_policy(self) -> Policy:
        """Return the current policy."""
        with self._withheld():
            self._newest_policy = self._policy()
        return self._newest_policy

    @contextmanager
    def _withheld(self) -> Iterator[None]:
        """Raise Withheld in place of ConfigError, which may name files of the site."""
        try:
            yield
        except ConfigError as error:
            public = f"site {self._site!r} cannot read its own file"
            raise Withheld(str(error), public, later=True) from error
