"""Every error that a user can cause.

Each is shown as one line, with exit code 2.
Messages name both sides and the remedy. They never hold text of a note: a path, a line
number, a label or a count at most.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any


class FednotesError(Exception):
    """Base of all errors that are the user's to mend; the command line exits with code
    2."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a corpus.

    file: empty where no file is to blame. line: counted from 1; 0 is the whole file.
    kind: what is lost with it, such as "line", "mention", "document" or "file".
    """

    file: str
    line: int
    kind: str
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.message}" if place else self.message


# problems alike from which on they are folded, and those still shown
_FOLDED, _EXAMPLES = 5, 3


def folded(problems: Iterable[Problem]) -> list[str]:
    """Return a line for each problem; of many that are alike, the first ones and their
    number.

    Problems are alike whose messages differ in numbers at most.
    """
    groups: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        kind = (problem.kind, re.sub("[0-9]+", "0", problem.message))
        groups.setdefault(kind, []).append(problem)
    lines: list[str] = []
    for group in groups.values():
        if len(group) <= _FOLDED:
            lines += map(str, group)
            continue
        lines += map(str, group[:_EXAMPLES])
        more = len(group) - _EXAMPLES
        lines.append(f"{more:,} more like it: {group[_EXAMPLES].message}")
    return lines


class DataError(FednotesError):
    """A corpus file cannot be read as what it should be.

    problems: each by file and line, where they are known; the message is of the first.
    """

    def __init__(self, message: str, problems: Sequence[Problem] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)

    @classmethod
    def at(cls, path: str | Path, line: int, message: str) -> DataError:
        """An error at one line (counted from 1) of one file; 0 is the whole file."""
        return cls.of([Problem(str(path), line, "line" if line else "file", message)])

    @classmethod
    def of(cls, problems: Sequence[Problem], number: int = 0) -> DataError:
        """One error of problems, at least one; number: how many there are, if not all
        are given."""
        more = max(number, len(problems)) - 1
        return cls(f"{problems[0]}{f' (and {more:,} more)' if more else ''}", problems)


class ConfigError(FednotesError):
    """A setting is unknown, missing or impossible."""


class ModelError(FednotesError):
    """A model directory, vector file or backbone cannot be used."""


class BusyError(FednotesError):
    """Another process works in a folder that takes one at a time."""


class TrainingError(FednotesError):
    """Training cannot go on."""


class LossError(TrainingError):
    """A site's loss is not finite. where: at which step; for the site's own people
    alone.

    public: all that the server may know, which could choose parameters that fail on one
    word: at which mini-batch would tell where that word is.
    """

    def __init__(self, site: str, value: float, where: str, remedy: str) -> None:
        super().__init__(f"site {site!r}: the loss is {value} {where}: {remedy}")
        self.public = f"site {site!r}: the loss is not finite: {remedy}"


class RefusedError(FednotesError):
    """A site's policy or the protocol forbids what was asked."""


class MissingExtra(FednotesError):
    """An optional dependency is missing; the message says which extra brings it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"this needs the package {package!r}: pip install 'fednotes[{extra}]'"
        )


@contextmanager
def needs(package: str, extra: str) -> Iterator[None]:
    """What is imported in the block is of a package that an extra brings. Raises
    MissingExtra.

    package: "" for one of several, which the import names.
    """
    try:
        yield
    except ImportError as error:
        raise MissingExtra(package or str(error.name), extra) from error


@contextmanager
def within(
    place: str,
    kind: type[FednotesError],
    *kinds: type[FednotesError],
    become: Any = None,
) -> Iterator[None]:
    """Errors of these kinds name the place that they are of. become: what they are
    then, if not what they were."""
    try:
        yield
    except (kind, *kinds) as error:
        raise (become or type(error))(f"{place}: {error}") from error


@contextmanager
def on_disk(
    path: object, kind: type[FednotesError], then: str = "", what: str = "be written"
) -> Iterator[None]:
    """What the disk refuses in the block is an error of this kind. then: ends its
    message."""
    try:
        yield
    except OSError as error:
        raise kind(
            f"{path}: cannot {what} ({error.strerror or error}){then}"
        ) from error


readable = partial(on_disk, what="be read")


def nearest(name: object, known: Iterable[str], none: str | None = None) -> str:
    """A hint for a misspelt name: `did you mean 'rounds'?`, or `none`, or what is
    known."""
    options = sorted(known)
    if match := get_close_matches(str(name), options, n=1, cutoff=0.6):
        return f"did you mean {match[0]!r}?"
    listed = f"known: {', '.join(options)}" if options else "none are known"
    return listed if none is None else none
