"""A tamper-evident record of what left a site.

    <path>        one line of JSON for each message, with the hash of the previous line
    <path>.head   the number of lines, their bytes, and the hash of the last one

A line describes a message that left: the names, shapes, norms and hashes of its
tensors, the amount of training behind them, its size, its hash and its receiver. It
never contains a value, a metric or text. For a masked message, the tensors are those
before masking. The line is on disk before `append` returns. Call `append` before
sending, so that nothing leaves the site that is not in the ledger.

The chain of hashes reveals a line that was altered, inserted, removed or moved. The
head reveals a tail that was cut off. `verify_ledger` names the line. Anyone with write
access to both files can still forge a complete history: record `Ledger.read_head()`
elsewhere from time to time, and pass it to `verify_ledger`. The file stays at the site,
because a message with a few counts can be guessed from its hash. A refusal that a job's
process repeats verbatim has at most 20 lines.

An append writes the head twice: first with the hash of the line that follows ("next"),
and, once the line is written, with the line counted. A process that is killed in
between leaves a partial line, or a complete line that the head only announces. The next
append repairs either, and its line says so ("mended").
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from fednotes.apps.deployment.site_agreement import SCORES
from fednotes.core.errors import (
    ConfigError,
    DataError,
    FednotesError,
    RefusedError,
    raising_if_unreadable,
    raising_os_errors_as,
)
from fednotes.core.messages import OURS
from fednotes.core.parsing import JsonError, open_regular, parse_json
from fednotes.core.store import locking_file, sync_folder
from fednotes.core.update import Tensors, Update

LEDGER = "ledger.jsonl"
FIRST = "0" * 64  # the hash before the first line
# All heads have the same length, so one can be overwritten in place by a single write.
_HEAD_BYTES = 320
# No spaces are allowed, so a name cannot be a sentence.
_NAME = re.compile(r"[\w.\-/:@\[\]=,+]{1,256}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TAIL_BYTES = len(f',"hash":"{FIRST}"}}\n')
# Number of newest messages to remember; a server repeats no older request.
MAX_REMEMBERED = 8
_LINE = re.compile(rb'(\{.*),"hash":"([0-9a-f]{64})"\}\n', re.DOTALL)


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A tensor that left.

    Attributes:
        name: Its name.
        shape: Its shape.
        dtype: Its type.
        norm: Its Euclidean norm; None for noise or bytes (the norm is meaningless), for
            a non-finite norm, and for a single number (the norm would be the
            value).
        sha256: Hash of its bytes, before they were masked.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    norm: float | None
    sha256: str


@dataclass(frozen=True, slots=True)
class SpentBudget:
    """What a job has spent of a site's privacy budget.

    Attributes:
        epsilon: Its ε.
        delta: Its δ.
    """

    epsilon: float = 0.0
    delta: float = 0.0


@dataclass(frozen=True, slots=True)
class Entry:
    """A message that is about to leave.

    Attributes:
        time: The time, with a time zone.
        run: The run.
        round: The round, as the server numbers it.
        task: The task that the message answers.
        receiver: The participant that receives it.
        tensors: The tensors in it.
        bytes: Size of the complete message.
        sha256: Hash of the complete message.
        masked: Whether it is a summand of a secure sum.
        job: The approved job's fingerprint.
        refusal: Whether it refuses the request.
        reason: The reason for the refusal, in one word; "" if not known.
        question: Digest of the question (`engines.history.Trail`); "" if the message
            has no update. A refusal has a question if its task had read notes, and
            the site's own scores have the digest of the tasks that led to its state.
        update: Hash of the update: its tensors, its weight and its counts; "" if there
            is none. `max_rounds` counts distinct pairs of question and update.
        model: Digest of the model that the update is about, if `max_rounds` counts such
            models; otherwise "".
        tokens: Tokens of training behind the update; None if not known.
        steps: Steps of training behind it; None if not known.
        patients: Patients behind it; None if not known.
        spent: What the job has spent of the site's privacy budget with this message;
            None without differential privacy. The line then lacks it.
    """

    time: datetime
    run: str
    round: int
    task: str
    receiver: str
    tensors: tuple[TensorFacts, ...]
    bytes: int
    sha256: str
    masked: bool = False
    job: str = "-"
    refusal: bool = False
    reason: str = ""
    question: str = ""
    update: str = ""
    model: str = ""
    tokens: int | None = None
    steps: int | None = None
    patients: int | None = None
    spent: SpentBudget | None = None


class _ShownLine(BaseModel):
    """The fields of a line that readers need; see `Entry`. The file may be edited."""

    model_config = ConfigDict(strict=True, extra="ignore")

    seq: int
    time: Annotated[str, StringConstraints(pattern=r"^[0-9T:.Z+-]+$")]
    run: str
    round: int
    task: str
    tensors: list[dict[str, Any]]
    bytes: int
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]*$")]
    masked: bool
    refusal: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Head:
    """The end of a ledger.

    Attributes:
        lines: Number of lines.
        bytes: Their total size.
        hash: Hash of the last line.
        next: Hash of a line that is being written; "" if there is none.
    """

    lines: int = 0
    bytes: int = 0
    hash: str = FIRST
    next: str = ""


class _End(NamedTuple):
    """The end of a ledger at the start of an append.

    Attributes:
        head: The head that the ledger should have now.
        remark: The remark that the next line gets if an append was interrupted: for a
            partial line `{"mended": "cut"}`, for a complete line that the head only
            announces `{"mended": "whole"}`.
    """

    head: Head
    remark: dict[str, str]


def describe_tensors(
    tensors: Tensors, *, norms: bool = True
) -> tuple[TensorFacts, ...]:
    """Return the facts of tensors, in their order.

    Args:
        tensors: The tensors.
        norms: Whether to compute norms; False for noise and bytes.
    """
    facts = []
    for name, value in tensors.items():
        flat = value.detach().cpu().contiguous().flatten()
        norm = None
        if norms and flat.numel() != 1:
            euclidean_norm = float(torch.linalg.vector_norm(flat.to(torch.float64)))
            if math.isfinite(euclidean_norm):
                norm = euclidean_norm
        digest = hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()
        dtype = str(value.dtype).removeprefix("torch.")
        facts.append(
            TensorFacts(name, tuple(value.shape), dtype=dtype, norm=norm, sha256=digest)
        )
    return tuple(facts)


def hash_tensors(tensors: Iterable[TensorFacts]) -> str:
    """Return one hash for several tensors; "" for none."""
    lines = [
        f"{facts.name} {facts.dtype} {list(facts.shape)} {facts.sha256}\n"
        for facts in tensors
    ]
    if not lines:
        return ""
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def hash_update(update: Update, tensors: Iterable[TensorFacts]) -> str:
    """Return one hash for all numbers of an update; "" for an empty one.

    Args:
        update: The update.
        tensors: The facts of its tensors.
    """
    if update.is_empty:
        return ""
    counts = [
        [name, float(number).hex()] for name, number in sorted(update.metrics.items())
    ]
    text = json.dumps([hash_tensors(tensors), float(update.weight).hex(), counts])
    return hashlib.sha256(text.encode()).hexdigest()


def clean_name(name: str) -> str:
    """Return a name as the ledger accepts it; "-" for a name that could be text."""
    return name if _NAME.fullmatch(name) else "-"


def encode_time(time: datetime) -> str:
    """Return a time as in a line; texts sort like their times."""
    text = time.astimezone(UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


class Ledger:
    """The ledger of one site.

    Several processes may append; they wait for each other. The cost of an append does
    not depend on the length of the ledger.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def in_kit(cls, kit: Path) -> Ledger:
        """Return the ledger of a site's kit."""
        return cls(kit / "rules" / LEDGER)

    def append(self, entry: Entry) -> Head:
        """Write one line, which is on disk when this returns.

        Returns:
            The new end of the ledger.

        Raises:
            RefusedError: The ledger was edited, so that its end does not match its
                head, or a name in the entry could be text. Nothing was written, and the
                message must not leave.
            FednotesError: Writing to disk failed. The message must not leave.
        """
        facts = _encode_entry(entry)
        disk_errors = raising_os_errors_as(
            FednotesError, self.path, ending="; the message was not sent"
        )
        with disk_errors, self._locking_files() as (file, head_file):
            old_head, remark = self._find_end(file, head_file)
            number = old_head.lines + 1
            table = {"seq": number, **facts, **remark, "prev": old_head.hash}
            text = json.dumps(table, separators=(",", ":"), allow_nan=False)
            body = text.removesuffix("}").encode()
            # The chain of hashes: each covers a line with the hash before it ("prev").
            digest = hashlib.sha256(body).hexdigest()
            line = body + f',"hash":"{digest}"}}\n'.encode()
            new_head = Head(number, old_head.bytes + len(line), hash=digest)

            _write_at(head_file, 0, encode_head(replace(old_head, next=new_head.hash)))
            try:
                file.truncate(old_head.bytes)
                _write_at(file, old_head.bytes, line)
                _write_at(head_file, 0, encode_head(new_head), wait=False)
            except OSError:
                with suppress(OSError):  # on a full disk, restore the previous content
                    file.truncate(old_head.bytes)
                    _write_at(head_file, 0, encode_head(old_head))
                raise
            return new_head

    def read_head(self) -> Head:
        """Return the end of the ledger, to be noted elsewhere.

        Raises:
            RefusedError: The ledger was edited.
        """
        if not self.path.exists() and not get_head_path(self.path).exists():
            return Head()
        with _reading_ledger(self.path), self._locking_files() as (file, head_file):
            return self._find_end(file, head_file).head

    @contextmanager
    def _locking_files(self) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
        """Lock both files and yield them; create missing ones for their owner only."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (
            locking_file(get_head_path(self.path)) as head_file,
            locking_file(self.path) as file,
        ):
            yield file, head_file

    def _find_end(self, file: IO[bytes], head_file: IO[bytes]) -> _End:
        """Return the end of the ledger, without a partial line.

        Raises:
            RefusedError: The end of the ledger does not match its head.
        """
        raw_head = head_file.read(_HEAD_BYTES + 1)
        size = os.fstat(file.fileno()).st_size
        is_new = not raw_head.strip(b"\0 \n") and not size
        if is_new:  # or a process was killed while it created the files
            # Otherwise a power cut may take both files and their names.
            sync_folder(self.path.parent)
            return _End(Head(), {})

        head = decode_head(raw_head)
        if head is None or size < head.bytes:
            raise self._make_edited_error()
        file.seek(max(0, head.bytes - _TAIL_BYTES))
        tail = file.read(min(head.bytes, _TAIL_BYTES))
        if head.lines and tail != f',"hash":"{head.hash}"}}\n'.encode():
            raise self._make_edited_error()

        # One byte is enough to see that more follows than the head announces.
        remainder = file.read() if head.next else file.read(1)
        if not remainder:
            return _End(replace(head, next=""), {})
        if not head.next:
            raise self._make_edited_error()
        is_complete_line = remainder.endswith(b"\n")
        if not is_complete_line:
            return _End(replace(head, next=""), {"mended": "cut"})
        if compute_hash(remainder) != head.next:
            raise self._make_edited_error()
        new_head = Head(head.lines + 1, head.bytes + len(remainder), hash=head.next)
        return _End(new_head, {"mended": "whole"})

    def _make_edited_error(self) -> RefusedError:
        """Return the error for a ledger whose end does not match its head."""
        return RefusedError(
            f"{self.path}: its end does not match {get_head_path(self.path).name}, so "
            "it was edited or damaged, and the site sends nothing: find the line with "
            "`fednotes ledger verify`; then move both files elsewhere and keep them as "
            "evidence, so that the site starts a new ledger"
        )


def get_head_path(path: Path) -> Path:
    """Return the path of a ledger's head file."""
    return path.with_name(f"{path.name}.head")


def encode_head(head: Head) -> bytes:
    """Return the content of a head file."""
    text = json.dumps(asdict(head), separators=(",", ":"))
    return text.encode("ascii").ljust(_HEAD_BYTES - 1) + b"\n"


def decode_head(raw: bytes) -> Head | None:
    """Parse a head file's bytes and return the head; None if any byte is wrong."""
    try:
        head = Head(**parse_json(raw))
        has_numbers = type(head.lines) is int and type(head.bytes) is int
        has_hashes = all(
            _DIGEST.fullmatch(digest) for digest in (head.hash, head.next or FIRST)
        )
        is_valid = has_numbers and has_hashes and encode_head(head) == raw
    except (ValueError, TypeError):
        return None
    return head if is_valid else None


def read_ledger_lines(
    path: Path, *, run: str | None = None, first: int = 0, last: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the ledger's lines as tables, oldest first.

    Hashes are not checked here; `verify_ledger` does that.

    Args:
        path: The ledger.
        run: Only lines of this run.
        first: First round to yield.
        last: Last round to yield.

    Raises:
        DataError: A line is invalid; the message has its number.
    """
    with _reading_ledger(path), open(path, "rb", opener=open_regular) as file:
        for number, raw in enumerate(file, start=1):
            line = parse_line(raw) or {}
            try:
                _ShownLine.model_validate(line)
            except ValidationError:
                raise DataError.at(
                    path, number, "not a line of a ledger: verify the ledger"
                ) from None
            is_of_run = run is None or line.get("run") == run
            is_before_end = last is None or line["round"] <= last
            if is_of_run and first <= line["round"] and is_before_end:
                yield line


@contextmanager
def _reading_ledger(path: Path) -> Iterator[None]:
    """While the context is open, raise DataError if the ledger cannot be read."""
    with raising_if_unreadable(path, DataError):
        try:
            yield
        except FileNotFoundError as error:
            raise DataError(
                f"{path}: no such file; nothing has left this site yet"
            ) from error


def parse_line(raw: bytes) -> dict[str, Any] | None:
    """Return a line as a table; None if it is not a line of a ledger."""
    try:
        table = parse_json(raw) if _LINE.fullmatch(raw) else None
    except JsonError:
        return None
    return table if isinstance(table, dict) else None


def compute_hash(raw: bytes) -> str:
    """Return the hash that a line must carry; "" if it is not a line.

    It is the hash of everything before it.
    """
    match = _LINE.fullmatch(raw)
    return hashlib.sha256(match[1]).hexdigest() if match else ""


def read_hash(raw: bytes) -> str:
    """Return the hash that a complete line carries."""
    return raw[-67:-3].decode("ascii", "replace")


class AnsweredQuestion(NamedTuple):
    """A question to a site with its answer, which `max_rounds` counts as one.

    Two pairs with the same answer differ if their questions do: a server may ask about
    any number of models that have the same answer, and learns something about each. Two
    pairs with the same question differ if their answers do: in another run, random
    draws lead to another answer.

    Attributes:
        question: Digest of the question; "" if an earlier version answered it.
        update_hash: Hash of the answer.
        model_digest: Digest of the model that the answer is about; "" for none.
    """

    question: str
    update_hash: str
    model_digest: str = ""


class _NewLines:
    """Reads the complete lines that were appended to a ledger since the last call.

    Args:
        path: The ledger.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def is_of_new_ledger(self) -> bool:
        """Return whether the lines that were read are no longer there."""
        return not self._path.exists() or self._path.stat().st_size < self._offset

    def restart(self) -> None:
        """Begin again at the first line."""
        self._offset = 0

    def read(self) -> Iterator[bytes]:
        """Yield the new lines; none if there is no ledger.

        Raises:
            OSError: The ledger cannot be read.
        """
        if self._path.exists():
            for raw in _read_lines_after(self._path, self._offset):
                self._offset += len(raw)
                yield raw


class JobLines:
    """The lines of a ledger about one job.

    `verify_ledger` checks whether the lines are unchanged; this class does not.

    Attributes:
        newest_time: The latest timestamp of the lines that count; "" for none.
        updates: Task to the distinct updates that left, each as
            `read_answered_question` returns it.
        refused_questions: Task to the questions that were refused after the task had
            read notes.
        models: Task to the distinct models that the updates are about.
        lines_by_message: Hash of each of the newest messages to its line.
        scored_states: The distinct states of the site in which its own scores left.

    Args:
        path: The ledger.
        job: The job's fingerprint.
    """

    def __init__(self, path: Path, job: str) -> None:
        self.newest_time = ""
        self.updates: dict[str, set[AnsweredQuestion]] = {}
        self.refused_questions: dict[str, set[str]] = {}
        self.models: dict[str, set[str]] = {}
        self.lines_by_message: dict[str, dict[str, Any]] = {}
        self.scored_states: set[str] = set()
        self._lines = _NewLines(path)
        self._mark = f'"job":"{job}"'.encode("ascii")
        self._since = ""

    def read(self, since: str = "") -> None:
        """Read the complete lines that were appended since the last call.

        Args:
            since: Hash of a line; only lines after it count. All lines count if there
                is no such line.

        Raises:
            OSError: The ledger cannot be read.
        """
        is_new_approval = since != self._since
        if self._lines.is_of_new_ledger() or is_new_approval:
            self._lines.restart()
            self._since = since
            self._forget_updates()
            self.lines_by_message = {}
        for raw in self._lines.read():
            self._read_line(raw)

    def _read_line(self, raw: bytes) -> None:
        """Add a line of this job; start counting after the line `since`."""
        line = parse_line(raw) if self._mark in raw else None
        if line is not None:
            # Keys may be missing in a line that was edited by hand.
            with suppress(KeyError, TypeError, AttributeError):
                self._add(line)
        if read_hash(raw) == self._since:
            self._forget_updates()

    def _forget_updates(self) -> None:
        """Start counting updates again; the newest messages can still be repeated."""
        self.newest_time = ""
        self.updates = {}
        self.refused_questions = {}
        self.models = {}
        self.scored_states = set()

    def _add(self, line: dict[str, Any]) -> None:
        """Add a line about a task of the method, or about the site's own scores.

        All other tasks of the engine are ignored.
        """
        self.newest_time = max(self.newest_time, line["time"])
        task = line["task"]
        if task == SCORES and not line["refusal"]:
            self.scored_states.add(line["question"])
        if task.startswith(OURS):
            return
        if line["refusal"]:
            if line["question"]:
                self.refused_questions.setdefault(task, set()).add(line["question"])
            return
        if line["update"]:
            answered = read_answered_question(line)
            self.updates.setdefault(task, set()).add(answered)
            if answered.model_digest:
                self.models.setdefault(task, set()).add(answered.model_digest)
        # Removing the line first moves a repeated message to the end.
        self.lines_by_message.pop(line["sha256"], None)
        self.lines_by_message[line["sha256"]] = line
        for old_hash in list(self.lines_by_message)[:-MAX_REMEMBERED]:
            del self.lines_by_message[old_hash]


class SpentLines:
    """What jobs have spent of a site's privacy budget, by the lines of its ledger.

    No approval resets this, so restoring an older copy of the budget's record regains
    no budget.

    Attributes:
        jobs: Job to the highest spending that a line records for it. Lines of earlier
            versions record none.
        answers: For one job: task to the hashes of the tensors that left
            (`hash_tensors`).

    Args:
        path: The ledger.
        job: The fingerprint of that job.
    """

    def __init__(self, path: Path, job: str) -> None:
        self.jobs: dict[str, SpentBudget] = {}
        self.answers: dict[str, set[str]] = {}
        self._lines = _NewLines(path)
        self._job = job
        self._marks = (f'"job":"{job}"'.encode("ascii"), b'"spent":{')

    def read(self) -> None:
        """Read the complete lines that were appended since the last call.

        Raises:
            OSError: The ledger cannot be read.
        """
        if self._lines.is_of_new_ledger():
            self._lines.restart()
        for raw in self._lines.read():
            line = parse_line(raw) if any(mark in raw for mark in self._marks) else None
            if line is not None:
                # Keys may be missing in a line that was edited by hand.
                with suppress(KeyError, TypeError, AttributeError, ValueError):
                    self._add(line)

    def _add(self, line: dict[str, Any]) -> None:
        """Add what a line records of a job's spending, and its answer to a task."""
        job = line["job"]
        if "spent" in line:
            line_budget = SpentBudget(**line["spent"])
            known_budget = self.jobs.get(job, SpentBudget())
            self.jobs[job] = SpentBudget(
                max(known_budget.epsilon, float(line_budget.epsilon)),
                max(known_budget.delta, float(line_budget.delta)),
            )
        is_answer = job == self._job and not line["refusal"] and line["update"]
        if is_answer and not line["task"].startswith(OURS):
            tensors = hash_tensors(read_tensors(line))
            if tensors:
                self.answers.setdefault(line["task"], set()).add(tensors)


class RunLines:
    """The size of the lines of one run.

    Args:
        path: The ledger.
        run: The run.
    """

    def __init__(self, path: Path, run: str) -> None:
        self._lines = _NewLines(path)
        self._mark = f'"run":"{clean_name(run)}"'.encode("ascii")
        self._size = 0

    def measure_size(self) -> int:
        """Return the total size in bytes of the run's lines.

        Raises:
            OSError: The ledger cannot be read.
        """
        if self._lines.is_of_new_ledger():
            self._lines.restart()
            self._size = 0
        for raw in self._lines.read():
            if self._mark in raw:
                self._size += len(raw)
        return self._size


def _read_lines_after(path: Path, offset: int) -> Iterator[bytes]:
    """Yield the complete lines of a ledger, starting at an offset."""
    with open(path, "rb", opener=open_regular) as file:
        file.seek(offset)
        for raw in file:
            if not raw.endswith(b"\n"):
                return
            yield raw


def read_tensors(line: Mapping[str, Any]) -> tuple[TensorFacts, ...]:
    """Return the facts of the tensors behind a line's update, in the method's order.

    A masked message has an additional last tensor with the masked words.
    """
    tensors = tuple(
        TensorFacts(**{**tensor, "shape": tuple(tensor["shape"])})
        for tensor in line["tensors"]
    )
    return tensors[:-1] if line["masked"] else tensors


def read_answered_question(line: Mapping[str, Any]) -> AnsweredQuestion:
    """Return the question and answer that `max_rounds` counts for a line's update.

    Lines of earlier versions have no "question". Their "update" is the hash of the
    update's tensors or, if the update is about a model, the digest of that model. In
    the second case, the hash of the first tensor stands for the update.
    """
    update = line["update"]
    if "question" in line:
        return AnsweredQuestion(
            question=line["question"], update_hash=update, model_digest=line["model"]
        )

    tensors = read_tensors(line)
    is_hash_of_update = not tensors or update == hash_tensors(tensors)
    if is_hash_of_update:
        return AnsweredQuestion(question="", update_hash=update)
    return AnsweredQuestion(
        question="", update_hash=tensors[0].sha256, model_digest=update
    )


def _encode_entry(entry: Entry) -> dict[str, Any]:
    """Return an entry as JSON values.

    Raises:
        RefusedError: A name could be text.
    """
    names = [(key, getattr(entry, key)) for key in ("run", "task", "receiver", "job")]
    for number, facts in enumerate(entry.tensors, start=1):
        names.append((f"name of tensor {number}", facts.name))
        names.append((f"dtype of tensor {number}", facts.dtype))
    for what, name in names:
        if not _NAME.fullmatch(name):  # not shown, because it may be note text
            raise RefusedError(
                f"the {what} is not a plain name (ASCII letters, digits, . _ - / "
                ": @ [ ] = , +, at most 256): the ledger records no free text, so "
                "the message was not sent"
            )
    tensors = [asdict(facts) | {"shape": list(facts.shape)} for facts in entry.tensors]
    table = asdict(replace(entry, tensors=())) | {"tensors": tensors}
    if entry.spent is None:
        del table["spent"]
    return table | {"time": encode_time(entry.time)}


def _write_at(file: IO[bytes], offset: int, raw: bytes, *, wait: bool = True) -> None:
    """Write bytes at an offset.

    Args:
        file: The file.
        offset: The offset.
        raw: The bytes.
        wait: Whether to wait until they are on disk.
    """
    file.seek(offset)
    view = memoryview(raw)
    while view:
        written = file.write(view)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view = view[written:]
    if wait:
        os.fsync(file.fileno())


# ---- verification: every line, the chain, and the end --------------------------------


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that no append could have caused.

    Attributes:
        line: The line's number, from 1; 0 is the head file.
        problem: What is wrong.
    """

    line: int
    problem: str


@dataclass(frozen=True, slots=True)
class LedgerReport:
    """The result of `verify_ledger`.

    Attributes:
        path: The ledger.
        lines: Number of lines in the file.
        faults: What is wrong.
        notes: Irregularities that a killed process explains.
        head: The ledger's end according to its head file; None if the file is missing
            or damaged.
    """

    path: Path
    lines: int
    faults: tuple[Fault, ...]
    notes: tuple[str, ...]
    head: Head | None

    @property
    def is_intact(self) -> bool:
        """Whether nothing was altered, removed, inserted, moved or cut off."""
        return not self.faults

    def __str__(self) -> str:
        """Return a line for each fault and note, or one line if all is well."""
        lines = []
        for fault in self.faults:
            if fault.line:
                lines.append(f"{self.path}:{fault.line}: {fault.problem}")
            else:
                lines.append(f"{get_head_path(self.path)}: {fault.problem}")
        if not lines:
            end = ""
            if self.head and self.head.lines:
                end = f", the last has hash {self.head.hash}"
            lines.append(f"{self.path}: {self.lines:,} lines, unbroken{end}")
        return "\n".join((*lines, *self.notes))


def verify_ledger(path: Path, noted: Head | None = None) -> LedgerReport:
    """Read and check a complete ledger.

    If a process appends at the same time, its line may look truncated.

    Args:
        path: The ledger.
        noted: An end that was noted elsewhere. It reveals a history that was forged
            together with its head.

    Raises:
        DataError: The file cannot be read.
    """
    with _reading_ledger(path):
        raw_head = b""
        if get_head_path(path).exists():
            with open(get_head_path(path), "rb", opener=open_regular) as file:
                raw_head = file.read(_HEAD_BYTES + 1)
        must_exist = raw_head or (noted is not None and noted.lines)
        if must_exist and not path.exists():
            return check_lines(path, (), raw_head, noted)
        with open(path, "rb", opener=open_regular) as file:
            return check_lines(path, file, raw_head, noted)


def parse_noted_end(text: str) -> Head:
    """Return a ledger's end from a person's note, LINES:HASH.

    Raises:
        ConfigError: The text does not have this form.
    """
    lines, colon, digest = text.strip().partition(":")
    has_number = lines.isascii() and lines.isdecimal() and int(lines) > 0
    if not colon or not has_number or not _DIGEST.fullmatch(digest):
        raise ConfigError(
            f"{text[:80]!r}: expected LINES:HASH, as `fednotes ledger verify` prints "
            "them (a number, and 64 hexadecimal digits)"
        )
    return Head(int(lines), hash=digest)


def check_lines(
    path: Path, lines: Iterable[bytes], raw_head: bytes, noted: Head | None
) -> LedgerReport:
    """Check lines that are already in memory, as `verify_ledger` does.

    Args:
        path: The ledger, for messages.
        lines: Its lines, each with its line end.
        raw_head: The bytes of the head file; empty if there is none.
        noted: An end that was noted elsewhere.
    """
    checker = _LineChecker(noted.lines if noted else 0)
    for raw in lines:
        checker.add(raw)
    head = decode_head(raw_head)
    faults = [*checker.faults, *checker.find_misplaced_lines()]
    if head is None:
        end = _EndCheck(fault=checker.find_head_fault(is_damaged=bool(raw_head)))
    else:
        end = checker.compare_end(head, has_faults=bool(faults))
    if end.fault is not None:
        faults.append(end.fault)
    if noted is not None and noted.lines and checker.noted_hash != noted.hash:
        problem = "is not the line whose hash was noted elsewhere"
        if checker.end < noted.lines:
            problem = "was noted elsewhere, and the ledger ends before it"
        faults.append(Fault(noted.lines, problem))
    faults.sort(key=lambda fault: fault.line)
    return LedgerReport(
        path,
        checker.lines,
        faults=tuple(faults),
        notes=(end.note,) if end.note else (),
        head=head,
    )


class _EndCheck(NamedTuple):
    """The result of comparing the end of a ledger with its head.

    Attributes:
        note: An irregularity that a killed process explains; "" for none.
        fault: A fault that it does not explain; None for none.
    """

    note: str = ""
    fault: Fault | None = None


class _Jump(NamedTuple):
    """A line whose number is not that of the line before plus one.

    Attributes:
        line: Its position in the file, from 1.
        due: The number that was due.
        number: The number that the line has.
    """

    line: int
    due: int
    number: int


class _LineChecker:
    """Checks the lines of a ledger one by one, and its end after the last one.

    Faults in the lines' numbers can only be determined once all lines are known.

    Attributes:
        lines: Number of complete lines.
        size: Their total size, in bytes.
        remainder: The bytes after the last complete line.
        end: The highest number of a line.
        hash: The hash of this line.
        noted_hash: The hash of the line whose number was noted.
        faults: What is wrong with single lines.

    Args:
        noted_number: The number of the line whose hash is kept.
    """

    def __init__(self, noted_number: int) -> None:
        self.lines = 0
        self.size = 0
        self.remainder = b""
        self.end = 0
        self.hash = FIRST
        self.noted_hash = ""
        self.faults: list[Fault] = []
        self._noted_number = noted_number
        # The hashes that the next line may name as the previous line's.
        self._previous_hashes: tuple[str, ...] = (FIRST,)
        self._expected_number = 1  # of the next line
        self._jumps: list[_Jump] = []
        self._positions: dict[int, int] = {}  # a line's number -> its position

    def add(self, raw: bytes) -> None:
        """Add the next line of the file; the last one may be truncated."""
        if not raw.endswith(b"\n"):
            self.remainder = raw
            return
        self.lines += 1
        self.size += len(raw)
        digest = compute_hash(raw)
        hash_in_line = read_hash(raw)
        table = parse_line(raw)
        number = table.get("seq") if table else None
        # `Ledger.append` numbers every line, so one without a number was altered too.
        if table is None or digest != hash_in_line or type(number) is not int:
            self.faults.append(
                Fault(self.lines, "altered: its hash does not match its content")
            )
            # The content or the hash was altered, so the next line may name either.
            self._previous_hashes = (digest, hash_in_line) if digest else ()
            number = self._expected_number
        else:
            self._check_place(number, table.get("prev"))
            self._previous_hashes = (digest,)
            self._positions.setdefault(number, self.lines)
        if number == self._noted_number:
            self.noted_hash = digest
        if number > self.end:
            self.end = number
            self.hash = digest
        self._expected_number = number + 1

    def _check_place(self, number: int, previous_hash: object) -> None:
        """Record a jump or a fault if the newest line does not follow the one before.

        Args:
            number: The line's number.
            previous_hash: The hash that it names as the previous line's.
        """
        if number != self._expected_number:
            self._jumps.append(_Jump(self.lines, self._expected_number, number))
        elif self._previous_hashes and previous_hash not in self._previous_hashes:
            self.faults.append(
                Fault(
                    self.lines,
                    "does not follow the line before: one of the two is not the one "
                    "that was written",
                )
            )

    def find_misplaced_lines(self) -> Iterator[Fault]:
        """Yield a fault for each line that was moved or inserted, or follows a gap.

        Call it after all lines were added, because a number that seems to be missing
        may come later.
        """
        for line, due, number in self._jumps:
            first_line = self._positions[number]
            # A number below the due one is that of an earlier line (a duplicate), or
            # its line was moved down.
            is_duplicate = number < due and first_line != line
            is_due_number_elsewhere = due in self._positions
            if is_duplicate:
                problem = (
                    f"has number {number}, as line {first_line}: one of them was "
                    "inserted"
                )
            elif number < due or is_due_number_elsewhere:
                problem = f"has number {number} where {due} is due: lines were moved"
            elif number == due + 1:
                problem = (
                    f"has number {number}: the line with number {due}, which came "
                    "before it, was removed"
                )
            else:
                problem = (
                    f"has number {number}: the lines with numbers {due} to "
                    f"{number - 1}, which came before it, were removed"
                )
            yield Fault(line, problem)

    def find_head_fault(self, *, is_damaged: bool) -> Fault | None:
        """Return the fault of a head file that is damaged or missing.

        An empty ledger needs no head file, so None is returned for it.

        Args:
            is_damaged: Whether there is a head file, which must then be damaged.
        """
        if is_damaged:
            return Fault(0, "is damaged or edited")
        return Fault(0, "is missing") if self.lines else None

    def _find_cut_fault(self, head: Head) -> Fault | None:
        """Return the fault of a file that ends before its head says; None for none."""
        num_missing = head.lines - self.end
        if num_missing > 0 and not self.remainder:
            verb = "was" if num_missing == 1 else "were"
            return Fault(
                self.lines,
                f"is the last line, but {num_missing} more {verb} written: the end is "
                "missing",
            )
        if self.remainder and (num_missing > 0 or not head.next):
            return Fault(self.lines + 1, "is cut, but no process was writing it")
        return None

    def compare_end(self, head: Head, *, has_faults: bool) -> _EndCheck:
        """Compare the end of the file with its head.

        Args:
            head: The head.
            has_faults: Whether lines have faults. If so, a wrong number of bytes or
                last hash adds nothing.
        """
        cut_fault = self._find_cut_fault(head)
        if cut_fault is not None:
            return _EndCheck(fault=cut_fault)
        is_next = self.end == head.lines + 1 and self.hash == head.next
        is_announced = bool(head.next) and is_next
        if is_announced and not self.remainder:
            return _EndCheck(
                "the last line was written by a process that was killed before it "
                "finished"
            )
        if self.end > head.lines:
            problem = f"goes beyond the {head.lines} lines that were written"
            return _EndCheck(fault=Fault(self.lines, problem))
        is_last = self.hash == head.hash and self.size == head.bytes
        if not has_faults and not is_last:
            problem = "is not the line that the head says is last"
            return _EndCheck(fault=Fault(self.lines, problem))
        if not self.remainder:
            return _EndCheck()
        return _EndCheck(
            f"{len(self.remainder)} bytes after line {self.lines} belong to a line "
            "whose writer was killed; its message was not sent"
        )
