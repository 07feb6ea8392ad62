"""Whether a ledger is as it was written: every line, the chain, and the end."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fednotes.core.errors import ConfigError, DataError
from fednotes.rules.ledger import (
    FIRST,
    Head,
    decode_head,
    head_path,
    own_hash,
    parsed,
    written_hash,
)


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that no append wrote. line: from 1; 0 is the head file."""

    line: int
    what: str


@dataclass(frozen=True, slots=True)
class Report:
    """What `verify` found. lines: in the file. notes: what a killed process explains.
    head: the ledger's end, as its head file has it; None if that is missing or damaged."""

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
            f"{self.path}:{f.line}: {f.what}" if f.line else f"{head_path(self.path)}: {f.what}"
            for f in self.faults
        ]
        if not found:
            end = f", the last has hash {self.head.hash}" if self.head and self.head.lines else ""
            found = [f"{self.path}: {self.lines:,} lines, unbroken{end}"]
        return "\n".join((*found, *self.notes))


def verify(path: Path, noted: Head | None = None) -> Report:
    """Read a whole ledger and judge it. noted: an end that was noted elsewhere, which shows a
    history that somebody wrote anew together with its head.

    A process that appends meanwhile may look like a cut line. Raises DataError if the file
    cannot be read.
    """
    try:
        raw_head = head_path(path).read_bytes() if head_path(path).exists() else b""
        gone = raw_head or (noted is not None and noted.lines)
        if gone and not path.exists():
            return judge(path, (), raw_head, noted)
        with path.open("rb") as file:
            return judge(path, file, raw_head, noted)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; nothing has left this site yet") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def noted_end(text: str) -> Head:
    """A ledger's end from what a person noted, LINES:HASH. Raises ConfigError."""
    lines, colon, noted = text.strip().partition(":")
    known = colon and lines.isascii() and lines.isdecimal() and int(lines) > 0
    if not known or not re.fullmatch(r"[0-9a-f]{64}", noted):
        raise ConfigError(
            f"{text[:80]!r}: expected LINES:HASH, as `fednotes ledger verify` prints them "
            "(a number, and 64 hexadecimal digits)"
        )
    return Head(int(lines), hash=noted)


def judge(path: Path, lines: Iterable[bytes], raw_head: bytes, noted: Head | None) -> Report:
    """`verify` of lines that were read already, each with its line end, and the head file's
    bytes; `path` is for messages."""
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
    return Report(path, reading.lines, tuple(faults), (note,) if note else (), head)


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
        self._before: tuple[str, ...] = (FIRST,)  # what the next line may name as the one before
        self._due = 1  # the next line's number
        self._jumps: list[tuple[int, int, int]] = []  # line, number due there, number found
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
            self.faults.append(Fault(self.lines, "altered: its hash does not fit what it says"))
            self._before = (own, written) if own else ()  # one of the two was the right one
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

    def end_by(self, head: Head | None, there: bool, faulty: bool) -> tuple[str, Fault | None]:
        """What a killed process explains of the end, and what nothing does. there: whether there
        is a head file. faulty: lines are wrong already, so that bytes and the last hash say
        nothing new."""
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
            return "the last line was written by a process that was killed before it was done", None
        if self.end > head.lines:
            what = f"goes beyond the {head.lines} lines that were written"
            return "", Fault(self.lines, what)
        if not faulty and (self.hash, self.size) != (head.hash, head.bytes):
            return "", Fault(self.lines, "is not the line that the head says is last")
        where = f"{len(self.rest)} bytes after line {self.lines}"
        killed = f"{where} are of a line whose writing was killed; that message did not leave"
        return killed if self.rest else "", None
