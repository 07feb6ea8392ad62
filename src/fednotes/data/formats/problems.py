"""What is wrong with the files of a corpus: all of it, refused together or left out and counted.

A reader goes on behind what it cannot use:

    with problems.passing("mention", path, number):
        spans.append(parse(line))      # a DataError is noted, and this mention left out
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from fednotes.core.errors import DataError, Problem
from fednotes.core.types import Document

OnError = Literal["refuse", "skip"]
_KEPT = 10_000  # problems that are kept one by one; more are counted alone
DERIVED = -1  # the line of an id that the reader made


class Problems:
    """What a reader could not use, in the order of the files.

    found: each problem, the first 10,000. counts: all, by what was left out. repeated: documents
    whose id an earlier one has; they are read. without: texts that have no annotation file.
    """

    def __init__(self) -> None:
        self.found: list[Problem] = []
        self.repeated: list[Problem] = []
        self.counts: Counter[str] = Counter()
        self.without = 0

    @property
    def number(self) -> int:
        """How many there are."""
        return self.counts.total()

    def add(self, error: DataError, kind: str) -> None:
        """Note what is wrong. kind: what is left out for it."""
        known = error.problems or (Problem("", 0, kind, str(error)),)
        self.counts[kind] += len(known)
        room = max(0, _KEPT - len(self.found))
        self.found += [replace(problem, kind=kind) for problem in known[:room]]

    def note(self, kind: str, path: Path, line: int, message: str) -> None:
        """Note what is wrong at a line of a file."""
        self.add(DataError.at(path, line, message), kind)

    @contextmanager
    def passing(self, kind: str, path: Path, line: int = 0) -> Iterator[None]:
        """Note a DataError of the block, at this place if it names none, and go on behind it."""
        try:
            yield
        except DataError as error:
            self.add(error if error.problems else DataError.at(path, line, str(error)), kind)

    def refuse(self) -> None:
        """Raises DataError of all problems, if there is one."""
        if self.found:
            raise DataError.of(self.found, self.number)

    def __str__(self) -> str:
        """What was left out, such as "2 lines, 1 mention"."""
        return ", ".join(f"{n:,} {kind}{'s' if n > 1 else ''}" for kind, n in self.counts.items())


class Found(NamedTuple):
    """A document and where it begins. line: 0 is a whole file, DERIVED an id that no file gave."""

    document: Document
    path: Path
    line: int = 0


def gather(
    files: Iterable[Path],
    read_file: Callable[[Path, Problems], Iterable[Found]],
    problems: Problems,
    kind: str = "file",
) -> tuple[Document, ...]:
    """The documents of several files. kind: what is left out where one cannot be read."""
    found: list[Found] = []
    for file in files:
        with problems.passing(kind, file):
            found += read_file(file, problems)
    return unique(found, problems)


def unique(found: Iterable[Found], problems: Problems) -> tuple[Document, ...]:
    """The documents, later ones of the same id renamed `id~2`, `id~3` …, which is noted."""
    given = list(found)
    taken = {document.id for document, _, _ in given}
    seen: set[str] = set()
    result: list[Document] = []
    for document, path, line in given:
        if document.id in seen:
            if line != DERIVED and len(problems.repeated) < _KEPT:
                problems.repeated.append(
                    Problem(str(path), line, "repeated_id", "an earlier document has the same id")
                )
            number = 2
            while f"{document.id}~{number}" in taken:
                number += 1
            document = replace(document, id=f"{document.id}~{number}")
            taken.add(document.id)
        seen.add(document.id)
        result.append(document)
    return tuple(result)
