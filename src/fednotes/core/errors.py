"""All errors that a user can cause.

    FednotesError
    ├── DataError        a corpus file cannot be read
    │   ├── LabelError        the data and the model have no label in common
    │   ├── UnknownFormatError  no format of annotated corpora matches
    │   └── NoTextColumnError  no column of a table is known as the notes' text
    ├── ConfigError      a setting is unknown, missing or impossible
    │   └── ParameterError    invalid parameters of a function
    ├── ModelError       a model, vector file or encoder cannot be used
    │   └── MovedError        a file that a saved model needs has moved
    ├── BusyError        another process works in the same folder
    ├── TrainingError    training cannot continue
    │   ├── WorkerError       a worker process has ended before its time
    │   └── DivergedError     a parameter or a loss is no longer finite
    │       └── LossError     a site's loss is not finite
    ├── RefusedError     a site's policy or the protocol forbids a request
    └── MissingExtra     an optional dependency is not installed

The command line shows each as one line and exits with code 2. A message states what
happened, what was expected and the remedy. It never contains note text, only paths,
line numbers, labels and counts.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any


class FednotesError(Exception):
    """Base class of all errors that a user can fix."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of a corpus.

    Attributes:
        file: The file; "" if the problem is not in a file.
        line: The line, counted from 1; 0 stands for the whole file.
        kind: The kind of item that is lost, such as "line", "mention", "document" or
            "file".
        message: A description of the problem.
    """

    file: str
    line: int
    kind: str
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.message}" if place else self.message


@dataclass(frozen=True)
class JobProblem(Problem):
    """A reason why a job is refused, whose message names no parameters."""


_MAX_ALIKE = 5  # up to this many similar problems are all shown
_EXAMPLES = 3  # of more similar problems, this many are shown


def fold_problems(problems: Iterable[Problem]) -> list[str]:
    """Return one line per problem, but only a few lines for many similar ones.

    Problems are similar if their messages differ only in numbers.
    """
    groups: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        kind = (problem.kind, re.sub("[0-9]+", "0", problem.message))
        groups.setdefault(kind, []).append(problem)
    lines: list[str] = []
    for group in groups.values():
        if len(group) <= _MAX_ALIKE:
            lines += map(str, group)
            continue
        lines += map(str, group[:_EXAMPLES])
        more = len(group) - _EXAMPLES
        lines.append(f"{more:,} more like it: {group[_EXAMPLES].message}")
    return lines


# Kind of problem for a path that cannot be read, even if problems are skipped.
UNREADABLE = "unreadable"


class DataError(FednotesError):
    """A corpus file cannot be read in its format.

    A message may name a parameter in backticks, which the command line shows as its
    option, and a job as its key.

    Attributes:
        problems: The problems by file and line, if known. The message shows the first
            one.
    """

    def __init__(self, message: str, problems: Sequence[Problem] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)

    @classmethod
    def at(cls, path: str | Path, line: int, message: str, kind: str = "") -> DataError:
        """Return an error at a line of a file.

        Args:
            path: The file.
            line: The line, counted from 1; 0 is the whole file.
            message: A description of the problem.
            kind: The kind of problem; by default a line or a file that is lost.
        """
        kind = kind or ("line" if line else "file")
        return cls.of([Problem(str(path), line, kind, message)])

    @classmethod
    def of(cls, problems: Sequence[Problem], number: int = 0) -> DataError:
        """Return one error for several problems.

        Args:
            problems: The problems, at least one.
            number: Total number of problems, if `problems` lists only some.
        """
        message = str(problems[0])
        others = max(number, len(problems)) - 1
        if others:
            message += f" (and {others:,} more)"
        return cls(message, problems)


class UnknownFormatError(DataError):
    """No format of annotated corpora matches a file or a folder.

    Attributes:
        path: The file or folder.
    """

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path


class NoTextColumnError(DataError):
    """No column of a table is recognised as the text of notes."""


@contextmanager
def naming_keys_for_parameters() -> Iterator[None]:
    """Turn errors about data in the context into ones that name keys, not parameters.

    Messages name a parameter in backticks; the key of a job has the same name.

    Raises:
        DataError: A DataError was raised in the context.
    """
    try:
        yield
    except DataError as error:
        messages = [str(error), *(problem.message for problem in error.problems)]
        if not any("`" in message for message in messages):
            raise
        problems = [
            replace(problem, message=problem.message.replace("`", ""))
            for problem in error.problems
        ]
        raise DataError(str(error).replace("`", ""), problems) from error


class NamesParameters:
    """Marker of errors that name parameters in backticks: "choose another `out`".

    The command line shows them as its options: "choose another --out".
    """


class LabelError(DataError, NamesParameters):
    """The data and the model have no label in common."""


class ConfigError(FednotesError):
    """A setting is unknown, missing or impossible."""


class ParameterError(ConfigError, NamesParameters):
    """The parameters of a function are wrong or conflict."""


class ModelError(FednotesError):
    """A model directory, vector file or encoder cannot be used."""


class MovedError(ModelError, NamesParameters):
    """A file that a saved model needs has moved or was replaced by another one."""


class BusyError(FednotesError):
    """Another process is using a folder that only one process may use at a time."""


class TrainingError(FednotesError):
    """Training cannot continue."""


class DivergedError(TrainingError):
    """Training diverged: a parameter or a loss is no longer finite."""


class LossError(DivergedError):
    """A site's loss is not finite.

    The server must not learn at which mini-batch it happened: it could choose
    parameters that fail on one word, and the batch would reveal where that word is.

    Attributes:
        public: The message for the server, without the mini-batch.
    """

    def __init__(self, site: str, value: float, where: str, remedy: str) -> None:
        super().__init__(f"site {site!r}: the loss is {value} {where}: {remedy}")
        self.public = f"site {site!r}: the loss is not finite: {remedy}"


class WorkerError(TrainingError, NamesParameters):
    """A worker process has ended before its work was done.

    Attributes:
        number: The worker's number, from 1.
    """

    def __init__(self, number: int, duty: str, end: str, remedy: str) -> None:
        """Make the error.

        Args:
            number: The worker's number, from 1.
            duty: What it did, in words, such as "computed for site 'a'".
            end: How it ended, in words, such as "was ended by SIGKILL".
            remedy: What to do.
        """
        super().__init__(f"worker process {number}, which {duty}, {end}: {remedy}")
        self.number = number


class RefusedError(FednotesError):
    """A site's policy or the protocol forbids a request.

    Attributes:
        reason: The name of the rule that forbids it, as a site's ledger records it; ""
            if the refusal names no rule.
    """

    reason = ""


class MissingExtra(FednotesError):
    """An optional dependency is not installed; the message names the extra."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"the package {package!r} of fednotes[{extra}] is not installed: "
            f"{write_install_command(extra)}"
        )


def write_install_command(extra: str) -> str:
    """Return the shell command that installs an extra of fednotes.

    If fednotes was installed from a folder or a file that is still there, such as a
    clone, the command installs from it.

    Args:
        extra: The name of the extra.
    """
    options = ""
    source = "fednotes"
    record = _read_install_record()
    if record is not None and os.path.exists(record.path):
        source = record.path
        options = "-e " if record.is_editable else ""
    return f"pip install {options}{shlex.quote(f'{source}[{extra}]')}"


@dataclass(frozen=True)
class _InstallRecord:
    """What pip recorded about the place from which fednotes was installed."""

    path: str
    is_editable: bool


def _read_install_record() -> _InstallRecord | None:
    """Return the record of an installation from a local path; None if there is none."""
    # Imported here, because every module imports this one.
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote, urlsplit

    try:
        record = json.loads(distribution("fednotes").read_text("direct_url.json") or "")
        url = urlsplit(record["url"])
        is_editable = bool(record.get("dir_info", {}).get("editable"))
    except (PackageNotFoundError, ValueError, LookupError, TypeError, AttributeError):
        return None  # pip writes no such record for a package of an index
    if url.scheme != "file":
        return None
    return _InstallRecord(unquote(url.path), is_editable)


@contextmanager
def needs(package: str, extra: str) -> Iterator[None]:
    """Import optional packages within the context.

    Args:
        package: The package; "" if the context imports several.
        extra: The extra of fednotes that installs the package.

    Raises:
        MissingExtra: An import fails.
    """
    try:
        yield
    except ImportError as error:
        raise MissingExtra(package or str(error.name), extra) from error


@contextmanager
def naming_place(
    place: str,
    kind: type[FednotesError],
    *kinds: type[FednotesError],
    become: Any = None,
) -> Iterator[None]:
    """Add a place to the message of errors that are raised in the context.

    Args:
        place: The place of the error, such as a path.
        kind: A class of errors to which the place is added.
        kinds: Further classes.
        become: The class of the new error; by default the class of the original error.
    """
    try:
        yield
    except (kind, *kinds) as error:
        raise (become or type(error))(f"{place}: {error}") from error


@contextmanager
def raising_os_errors_as(
    kind: type[FednotesError],
    path: object,
    *,
    ending: str = "",
    action: str = "be written",
) -> Iterator[None]:
    """Turn an OSError within the context into an error of class `kind`.

    Args:
        kind: The class of the new error.
        path: The file, for the message.
        ending: The end of the message.
        action: The action that failed, such as "be read".
    """
    try:
        yield
    except OSError as error:
        raise kind(
            f"{path}: cannot {action} ({error.strerror or error}){ending}"
        ) from error


def raising_if_unreadable(
    path: object, kind: type[FednotesError]
) -> AbstractContextManager[None]:
    """Turn an OSError of reading a file into an error of class `kind`."""
    return raising_os_errors_as(kind, path, action="be read")


def describe_place(error: BaseException) -> str:
    """Return an error's type and place, without its message, which may quote data."""
    name = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return name
    return f"{name} at {Path(frames[-1].filename).name}:{frames[-1].lineno}"


def suggest_name(
    name: object, known: Iterable[str], fallback: str | None = None
) -> str:
    """Return a hint for a misspelt name, such as "did you mean 'rounds'?".

    Args:
        name: The misspelt name.
        known: The names that exist.
        fallback: The hint if no name is similar; by default the list of known names.
    """
    options = sorted(known)
    matches = get_close_matches(str(name), options, n=1, cutoff=0.6)
    if matches:
        return f"did you mean {matches[0]!r}?"
    if fallback is not None:
        return fallback
    return f"known: {', '.join(options)}" if options else "none are known"
