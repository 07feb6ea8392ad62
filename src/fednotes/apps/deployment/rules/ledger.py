"""What left a site, in a file that shows when it was changed.

    <path>        one JSON line a message, each with the hash of the line before
    <path>.head   how many lines there are, their bytes, and the hash of the last one

A line says which message, its tensors' names, shapes, norms and hashes, how much
training is behind them, its size, its hash and its receiver: never a value, a metric or
text. Of a masked message the tensors are those behind the masks. It is on disk before
`append` returns, so call that first and send afterwards; what is not in the ledger has
not left.

The chain shows a line that was altered, inserted, removed or moved; the head shows a
tail that was cut off; `verify` names the line. Who may write both files can still write
a new history: note `Ledger.head()` elsewhere now and then, and give it to `verify`. The
whole file stays at the site: the hash of a message that holds a few counts can be
guessed.

An append writes the head twice, around the line: first what the next line's hash will
be, then that it is there. A process that is killed in between leaves a cut line, or a
whole one that the head announces; the next append mends both, and says so in its line
("mended").
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import torch

from fednotes.core.errors import (
    ConfigError,
    DataError,
    FednotesError,
    RefusedError,
    on_disk,
    readable,
)
from fednotes.core.parsing import JsonError, open_regular, parse_json
from fednotes.core.store import locked_file, sync_folder
from fednotes.core.update import Tensors

LEDGER = "ledger.jsonl"
FIRST = "0" * 64  # the hash before the first line
# a head is always as long, so that it is written in place, in one piece
_HEAD_BYTES = 320
# no blanks: a name, not a sentence
_NAME = re.compile(r"[\w.\-/:@\[\]=,+]{1,256}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TAIL = len(f',"hash":"{FIRST}"}}\n')
KEPT = 8  # the newest messages with an answer; a server repeats no older request
_LINE = re.compile(rb'(\{.*),"hash":"([0-9a-f]{64})"\}\n', re.DOTALL)


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A tensor that left. norm: its Euclidean norm, or None where it is noise or bytes
    (theirs says nothing), not finite, or of one number (it would be the value). sha256:
    of its bytes, before they were masked if they were."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    norm: float | None
    sha256: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A message that is about to leave. time: with a time zone. bytes, sha256: of the
    whole message. masked: whether it is a summand of a secure sum. job: the approved
    job's fingerprint. refusal: whether it says no; reason: why, in one word, or "".
    update: what `max_rounds` counts: `hash_of` the update's tensors, of its counts
    where it has no tensors, or the digest of the model that the update is about; "" if
    there is no update. tokens, steps, patients: of training behind it; None if not
    known."""

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
    update: str = ""
    tokens: int | None = None
    steps: int | None = None
    patients: int | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """Where a ledger ends. next: the hash of a line that is being written, or ""."""

    lines: int = 0
    bytes: int = 0
    hash: str = FIRST
    next: str = ""


def describe(tensors: Tensors, *, norms: bool = True) -> tuple[TensorFacts, ...]:
    """The facts of tensors, in their order. norms: False for noise and bytes."""
    found = []
    for name, value in tensors.items():
        flat, norm = value.detach().cpu().contiguous().flatten(), None
        if norms and flat.numel() != 1:
            norm = float(torch.linalg.vector_norm(flat.to(torch.float64)))
            norm = norm if math.isfinite(norm) else None
        digest = hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()
        dtype = str(value.dtype).removeprefix("torch.")
        found.append(TensorFacts(name, tuple(value.shape), dtype, norm, digest))
    return tuple(found)


def hash_of(tensors: Iterable[TensorFacts]) -> str:
    """One hash for several tensors; "" for none."""
    lines = [f"{t.name} {t.dtype} {list(t.shape)} {t.sha256}\n" for t in tensors]
    return hashlib.sha256("".join(lines).encode()).hexdigest() if lines else ""


def plain(name: str) -> str:
    """A name as the ledger takes it; "-" for one that could be text."""
    return name if _NAME.fullmatch(name) else "-"


def stamp(time: datetime) -> str:
    """A time as a line has it: of two, the later one is the greater text."""
    return (
        time.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


def ledger_of(kit: Path) -> Ledger:
    """The ledger of a site's kit."""
    return Ledger(kit / "rules" / LEDGER)


class Ledger:
    """The ledger of one site. Several processes may append; they wait for each other.

    An append costs the same however long the ledger is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, entry: Entry) -> Head:
        """Write one line, on disk when this returns; the ledger's new end.

        Raises RefusedError if the ledger does not end as its head says (it was edited)
        or a name of the entry could be text; FednotesError if the disk refuses. Then
        nothing was written, and the message must not leave.
        """
        facts = _checked(entry)
        refused = on_disk(self.path, FednotesError, "; the message did not leave")
        with refused, self._opened() as (file, head_file):
            before, mended = self._end(file, head_file)
            table = {"seq": before.lines + 1, **facts, **mended, "prev": before.hash}
            body = json.dumps(table, separators=(",", ":"), allow_nan=False)[
                :-1
            ].encode()
            line = body + f',"hash":"{hashlib.sha256(body).hexdigest()}"}}\n'.encode()
            after = Head(before.lines + 1, before.bytes + len(line), own_hash(line))
            _write(head_file, 0, encode_head(replace(before, next=after.hash)))
            try:
                file.truncate(before.bytes)
                _write(file, before.bytes, line)
                _write(head_file, 0, encode_head(after), wait=False)
            except OSError:
                with suppress(OSError):  # a full disk: back to what was there
                    file.truncate(before.bytes)
                    _write(head_file, 0, encode_head(before))
                raise
            return after

    def head(self) -> Head:
        """Where the ledger ends; to be noted elsewhere.

        Raises RefusedError as `append` does.
        """
        if not self.path.exists() and not head_path(self.path).exists():
            return Head()
        with _readable(self.path), self._opened() as (file, head_file):
            return self._end(file, head_file)[0]

    @contextmanager
    def _opened(self) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
        """Both files, nobody else's for the while; made, for their owner only, if
        absent."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (
            locked_file(head_path(self.path)) as head_file,
            locked_file(self.path) as file,
        ):
            yield file, head_file

    def _end(
        self, file: IO[bytes], head_file: IO[bytes]
    ) -> tuple[Head, dict[str, str]]:
        """Where the next line goes, and what that line says of what a killed process
        left there: "cut" a piece of a line, "whole" a line that its head had only
        announced."""
        raw = head_file.read(_HEAD_BYTES + 1)
        size = os.fstat(file.fileno()).st_size
        if not raw.strip(b"\0 \n") and not size:  # new, or killed while it was made
            # or a power cut may take both files and their names
            sync_folder(self.path.parent)
            return Head(), {}
        head = decode_head(raw)
        if head is None or size < head.bytes:
            raise self._edited()
        file.seek(max(0, head.bytes - _TAIL))
        end = file.read(min(head.bytes, _TAIL))
        if head.lines and end != f',"hash":"{head.hash}"}}\n'.encode():
            raise self._edited()
        rest = file.read() if head.next else file.read(1)
        if not rest:
            return replace(head, next=""), {}
        if not head.next or (rest.endswith(b"\n") and own_hash(rest) != head.next):
            raise self._edited()
        if not rest.endswith(b"\n"):
            return replace(head, next=""), {"mended": "cut"}
        return Head(head.lines + 1, head.bytes + len(rest), head.next), {
            "mended": "whole"
        }

    def _edited(self) -> RefusedError:
        return RefusedError(
            f"{self.path}: does not end as {head_path(self.path).name} says, so it was edited or "
            "damaged, and nothing may leave: `fednotes ledger verify` names the line; keep both "
            "files as evidence elsewhere, and a new ledger begins"
        )


def head_path(path: Path) -> Path:
    """The file that says where a ledger ends."""
    return path.with_name(f"{path.name}.head")


def encode_head(head: Head) -> bytes:
    """A head as it stands in its file."""
    text = json.dumps(asdict(head), separators=(",", ":"))
    return text.encode("ascii").ljust(_HEAD_BYTES - 1) + b"\n"


def decode_head(raw: bytes) -> Head | None:
    """The head in a file's bytes; None if they are no head, to the last byte."""
    try:
        head = Head(**parse_json(raw))
        numbers = type(head.lines) is int and type(head.bytes) is int
        hashes = _DIGEST.fullmatch(head.hash) and _DIGEST.fullmatch(head.next or FIRST)
        return head if numbers and hashes and encode_head(head) == raw else None
    except (ValueError, TypeError):
        return None


def show(
    path: Path, *, run: str | None = None, first: int = 0, last: int | None = None
) -> Iterator[dict[str, Any]]:
    """The ledger's lines as tables, oldest first; of one run, of rounds `first` to
    `last`.

    Raises DataError for a line that is none, with its number; hashes are `verify`'s to
        judge.
    """
    with _readable(path), open(path, "rb", opener=open_regular) as file:
        for number, raw in enumerate(file, start=1):
            found = parsed(raw)
            if found is None or type(found.get("round")) is not int:
                raise DataError.at(
                    path, number, "not a line of a ledger; verify the ledger"
                )
            highest = found["round"] if last is None else last
            if run in (None, found.get("run")) and first <= found["round"] <= highest:
                yield found


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """A ledger that cannot be read is a DataError."""
    with readable(path, DataError):
        try:
            yield
        except FileNotFoundError as error:
            raise DataError(
                f"{path}: no such file; nothing has left this site yet"
            ) from error


def parsed(raw: bytes) -> dict[str, Any] | None:
    """A line as a table, or None if it is none."""
    try:
        found = parse_json(raw) if _LINE.fullmatch(raw) else None
    except JsonError:
        return None
    return found if isinstance(found, dict) else None


def own_hash(raw: bytes) -> str:
    """The hash that a line must carry: of all that stands before it; "" of no line."""
    found = _LINE.fullmatch(raw)
    return hashlib.sha256(found[1]).hexdigest() if found else ""


def written_hash(raw: bytes) -> str:
    """The hash that a whole line carries."""
    return raw[-67:-3].decode("ascii", "replace")


class Past:
    """The lines of one job. `read` goes on from where it was; only whole lines are
    read.

    newest: the latest time stamp of those that are counted; "" for none. updates: task
    → `Entry.update` of the different updates that left. firsts: task → that together
    with the hash of the first tensor, which differs between answers about one model.
    answers: hash of a message → its line, of the newest messages. Whether a line is as
    it was written is for `verify` to judge.
    """

    def __init__(self, path: Path, job: str) -> None:
        self._path, self._mark = path, f'"job":"{job}"'.encode("ascii")
        self._offset, self._since, self.newest = 0, "", ""
        self.updates: dict[str, set[str]] = {}
        self.firsts: dict[str, set[tuple[str, str]]] = {}
        self.answers: dict[str, dict[str, Any]] = {}

    def read(self, since: str = "") -> None:
        """Take in what was appended. since: count from the line after the one of this
        hash on; all lines where there is none. Raises OSError."""
        begun = not self._path.exists() or self._path.stat().st_size < self._offset
        if begun or since != self._since:  # a new ledger, or a new approval
            self._offset, self._since, self.newest = 0, since, ""
            self.updates, self.firsts, self.answers = {}, {}, {}
        if not self._path.exists():
            return
        with open(self._path, "rb", opener=open_regular) as file:
            file.seek(self._offset)
            for raw in file:
                if not raw.endswith(b"\n"):
                    break
                self._offset += len(raw)
                if self._mark in raw and (line := parsed(raw)) is not None:
                    # edited by hand
                    with suppress(KeyError, TypeError, AttributeError):
                        self._take(line)
                if written_hash(raw) == self._since:
                    self.updates, self.firsts, self.newest = {}, {}, ""

    def _take(self, line: dict[str, Any]) -> None:
        self.newest = max(self.newest, line["time"])
        if line["refusal"] or line["task"].startswith("@"):
            return
        if line["update"]:
            self.updates.setdefault(line["task"], set()).add(line["update"])
            first = line["tensors"][0]["sha256"] if line["tensors"] else ""
            self.firsts.setdefault(line["task"], set()).add((line["update"], first))
        self.answers.pop(line["sha256"], None)
        self.answers[line["sha256"]] = line
        for old in list(self.answers)[:-KEPT]:
            del self.answers[old]


def tensors_of(line: dict[str, Any]) -> tuple[TensorFacts, ...]:
    """The facts of a line's tensors."""
    return tuple(
        TensorFacts(**{**t, "shape": tuple(t["shape"])}) for t in line["tensors"]
    )


def _checked(entry: Entry) -> dict[str, Any]:
    """An entry as JSON values.

    Raises RefusedError where a name could be something else.
    """
    names = [(key, getattr(entry, key)) for key in ("run", "task", "receiver", "job")]
    for number, facts in enumerate(entry.tensors, start=1):
        names += [
            (f"{key} of tensor {number}", getattr(facts, key))
            for key in ("name", "dtype")
        ]
    for what, name in names:
        if not _NAME.fullmatch(name):  # not shown: it may be text of a note
            raise RefusedError(
                f"the {what} is no plain name (ASCII letters, digits, . _ - / : @ [ ] = , +, at "
                "most 256): the ledger takes no text, and the message did not leave"
            )
    tensors = [asdict(t) | {"shape": list(t.shape)} for t in entry.tensors]
    table = asdict(replace(entry, tensors=())) | {"tensors": tensors}
    return table | {"time": stamp(entry.time)}


def _write(file: IO[bytes], place: int, raw: bytes, wait: bool = True) -> None:
    """Write all of `raw` at a place; `wait` until it is on disk."""
    file.seek(place)
    view = memoryview(raw)
    while view:
        written = file.write(view)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view = view[written:]
    if wait:
        os.fsync(file.fileno())


# ---- whether a ledger is as it was written: every line, the chain, and the end -------


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that no append wrote. line: from 1; 0 is the head file."""

    line: int
    what: str


@dataclass(frozen=True, slots=True)
class LedgerReport:
    """What `verify` found. lines: in the file. notes: what a killed process explains.
    head: the ledger's end, as its head file has it; None if that is missing or damaged.
    """

    path: Path
    lines: int
    faults: tuple[Fault, ...]
    notes: tuple[str, ...]
    head: Head | None

    @property
    def ok(self) -> bool:
        """Whether nothing was altered, removed, inserted, moved or cut off."""
        return not self.faults

    def __str__(self) -> str:
        """One line a fault and note; one that says all is well where it is."""
        found = [
            f"{self.path}:{f.line}: {f.what}"
            if f.line
            else f"{head_path(self.path)}: {f.what}"
            for f in self.faults
        ]
        if not found:
            end = (
                f", the last has hash {self.head.hash}"
                if self.head and self.head.lines
                else ""
            )
            found = [f"{self.path}: {self.lines:,} lines, unbroken{end}"]
        return "\n".join((*found, *self.notes))


def verify(path: Path, noted: Head | None = None) -> LedgerReport:
    """Read a whole ledger and judge it. noted: an end that was noted elsewhere, which
    shows a history that somebody wrote anew together with its head.

    A process that appends meanwhile may look like a cut line. Raises DataError if the
    file cannot be read.
    """
    with _readable(path):
        raw_head = b""
        if head_path(path).exists():
            with open(head_path(path), "rb", opener=open_regular) as file:
                raw_head = file.read(_HEAD_BYTES + 1)
        gone = raw_head or (noted is not None and noted.lines)
        if gone and not path.exists():
            return judge(path, (), raw_head, noted)
        with open(path, "rb", opener=open_regular) as file:
            return judge(path, file, raw_head, noted)


def noted_end(text: str) -> Head:
    """A ledger's end from what a person noted, LINES:HASH. Raises ConfigError."""
    lines, colon, noted = text.strip().partition(":")
    known = colon and lines.isascii() and lines.isdecimal() and int(lines) > 0
    if not known or not _DIGEST.fullmatch(noted):
        raise ConfigError(
            f"{text[:80]!r}: expected LINES:HASH, as `fednotes ledger verify` prints them "
            "(a number, and 64 hexadecimal digits)"
        )
    return Head(int(lines), hash=noted)


def judge(
    path: Path, lines: Iterable[bytes], raw_head: bytes, noted: Head | None
) -> LedgerReport:
    """`verify` of lines that were read already, each with its line end, and the head
    file's bytes; `path` is for messages."""
    reading = _Reading(noted.lines if noted else 0)
    for raw in lines:
        reading.take(raw)
    head = decode_head(raw_head)
    faults = [*reading.faults, *reading.misplaced()]
    note, fault = reading.end_by(head, bool(raw_head), bool(faults))
    faults += [fault] if fault else []
    if noted is not None and noted.lines and reading.noted != noted.hash:
        what = "is not the line whose hash was noted elsewhere"
        if reading.end < noted.lines:
            what = "was noted elsewhere, and the ledger ends before it"
        faults.append(Fault(noted.lines, what))
    faults.sort(key=lambda fault: fault.line)
    return LedgerReport(
        path, reading.lines, tuple(faults), (note,) if note else (), head
    )


class _Reading:
    """The lines so far. What is odd about their numbers is judged when all are known.

    asked: the number of the line whose hash is kept.
    """

    def __init__(self, asked: int) -> None:
        self.lines = self.size = 0  # whole ones, and their bytes
        self.rest = b""  # after the last whole one
        self.end, self.hash = 0, FIRST  # the highest number, and the hash of its line
        self.noted, self._asked = "", asked
        self.faults: list[Fault] = []
        # what the next line may name as the one before
        self._before: tuple[str, ...] = (FIRST,)
        self._due = 1  # the next line's number
        # line, number due there, number found
        self._jumps: list[tuple[int, int, int]] = []
        self._places: dict[int, int] = {}  # number → line

    def take(self, raw: bytes) -> None:
        """The next line of the file; the last one may be cut."""
        if not raw.endswith(b"\n"):
            self.rest = raw
            return
        self.lines, self.size = self.lines + 1, self.size + len(raw)
        own, table = own_hash(raw), parsed(raw)
        written = written_hash(raw)
        number = table.get("seq") if table else None
        if table is None or own != written or type(number) is not int:
            self.faults.append(
                Fault(self.lines, "altered: its hash does not fit what it says")
            )
            # one of the two was the right one
            self._before = (own, written) if own else ()
            number = self._due
        else:
            if number != self._due:
                self._jumps.append((self.lines, self._due, number))
            elif self._before and table.get("prev") not in self._before:
                what = "does not follow the line before: one of the two is not the one written"
                self.faults.append(Fault(self.lines, what))
            self._before = (own,)
            self._places.setdefault(number, self.lines)
        if number == self._asked:
            self.noted = own
        if number > self.end:
            self.end, self.hash = number, own
        self._due = number + 1

    def misplaced(self) -> Iterator[Fault]:
        """Lines whose numbers do not come one after the other, and why."""
        for line, due, number in self._jumps:
            if number < due and self._places[number] != line:
                what = f"has number {number}, as line {self._places[number]}: one was inserted"
            elif number < due or due in self._places:
                what = f"has number {number} where {due} is due: lines were moved"
            else:
                gone = f"{due}" if number == due + 1 else f"{due} to {number - 1}"
                what = f"has number {number}: what was before it, number {gone}, was removed"
            yield Fault(line, what)

    def end_by(
        self, head: Head | None, there: bool, faulty: bool
    ) -> tuple[str, Fault | None]:
        """What a killed process explains of the end, and what nothing does. there:
        whether there is a head file. faulty: lines are wrong already, so that bytes and
        the last hash say nothing new."""
        if head is None:
            what = "is damaged or edited" if there else "is missing"
            return "", Fault(0, what) if there or self.lines else None
        if self.rest and (self.end < head.lines or not head.next):
            return "", Fault(self.lines + 1, "is cut, and no process was writing it")
        if self.end < head.lines:
            cut = head.lines - self.end
            more = f"{cut} more {'was' if cut == 1 else 'were'} written"
            return "", Fault(self.lines, f"is the last, but {more}: cut off")
        announced = head.next and (self.end, self.hash) == (head.lines + 1, head.next)
        if announced and not self.rest:
            return (
                "the last line was written by a process that was killed before it was done",
                None,
            )
        if self.end > head.lines:
            what = f"goes beyond the {head.lines} lines that were written"
            return "", Fault(self.lines, what)
        if not faulty and (self.hash, self.size) != (head.hash, head.bytes):
            return "", Fault(self.lines, "is not the line that the head says is last")
        where = f"{len(self.rest)} bytes after line {self.lines}"
        killed = f"{where} are of a line whose writing was killed; that message did not leave"
        return killed if self.rest else "", None
