"""Whether a ledger is as it was written: every line, the chain, and the end."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fednotes.core.errors import ConfigError, DataError
from fednotes.rules.ledger import FIRST, Head, decode_head, head_path, own_hash, parsed


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
    reading = _Reading()
    for raw in lines:
        reading.take(raw, noted.lines if noted else 0)
    head = decode_head(raw_head)
    faults = [*reading.faults, *reading.misplaced()]
    end = _judge_end(reading, head, bool(raw_head), bool(faults))
    notes = tuple(what for what in end if isinstance(what, str))
    faults += [what for what in end if isinstance(what, Fault)]
    if noted is not None and noted.lines and reading.noted != noted.hash:
        what = "is not the line whose hash was noted elsewhere"
        if reading.end < noted.lines:
            what = "was noted elsewhere, and the ledger ends before it"
        faults.append(Fault(noted.lines, what))
    return Report(path, reading.lines, tuple(sorted(faults, key=_by_line)), notes, head)


class _Reading:
    """The lines so far. What is odd about their numbers is judged when all are known."""

    def __init__(self) -> None:
        self.lines = self.size = 0  # whole ones, and their bytes
        self.rest = b""  # after the last whole one
        self.end, self.hash = 0, FIRST  # the highest number, and the hash of its line
        self.noted = ""  # the hash of the line that was asked for
        self.faults: list[Fault] = []
        self._before: tuple[str, ...] = (FIRST,)  # what the next line may name as the one before
        self._due = 1  # the next line's number
        self._jumps: list[tuple[int, int, int]] = []  # line, number due there, number found
        self._places: dict[int, int] = {}  # number → line

    def take(self, raw: bytes, noted: int) -> None:
        """The next line of the file; the last one may be cut. noted: keep that one's hash."""
        if not raw.endswith(b"\n"):
            self.rest = raw
            return
        self.lines, self.size = self.lines + 1, self.size + len(raw)
        own, table = own_hash(raw), parsed(raw)
        written = raw[-67:-3].decode("ascii", "replace")
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
        if number == noted:
            self.noted = own
        if number > self.end:
            self.end, self.hash = number, own
        self._due = number + 1

    def misplaced(self) -> list[Fault]:
        """Lines whose numbers do not come one after the other, and why."""
        found = []
        for line, due, number in self._jumps:
            if number < due and self._places[number] != line:
                what = f"has number {number}, as line {self._places[number]}: one was inserted"
            elif number < due or due in self._places:
                what = f"has number {number} where {due} is due: lines were moved"
            else:
                gone = f"{due}" if number == due + 1 else f"{due} to {number - 1}"
                what = f"has number {number}: what was before it, number {gone}, was removed"
            found.append(Fault(line, what))
        return found


def _judge_end(
    reading: _Reading, head: Head | None, there: bool, faulty: bool
) -> list[Fault | str]:
    """Faults of the end, and notes (text). there: whether there is a head file. faulty: lines
    are wrong already, so that bytes and the last hash say nothing new."""
    if head is None:
        if not there and not reading.lines:
            return []
        return [Fault(0, "is damaged or edited" if there else "is missing")]
    if reading.rest and (reading.end < head.lines or not head.next):
        return [Fault(reading.lines + 1, "is cut, and no process was writing it")]
    if reading.end < head.lines:
        cut = head.lines - reading.end
        what = f"is the last, but {cut} more {'was' if cut == 1 else 'were'} written: cut off"
        return [Fault(reading.lines, what)]
    announced = head.next and (reading.end, reading.hash) == (head.lines + 1, head.next)
    if announced and not reading.rest:
        return ["the last line was written by a process that was killed before it was done"]
    if reading.end > head.lines:
        return [Fault(reading.lines, f"goes beyond the {head.lines} lines that were written")]
    if not faulty and (reading.hash, reading.size) != (head.hash, head.bytes):
        return [Fault(reading.lines, "is not the line that the head says is last")]
    if reading.rest:
        where = f"{len(reading.rest)} bytes after line {reading.lines}"
        return [f"{where} are of a line whose writing was killed; that message did not leave"]
    return []


def _by_line(fault: Fault) -> int:
    return fault.line
