"""Collection of a corpus's problems, so that reading continues after an error.

At the end, the reader refuses the corpus because of them, or leaves the affected items
out and counts them:

    with problems.collecting("mention", path, number):
        spans.append(parse(line))  # a DataError leaves out this mention
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from fednotes.core.errors import ConfigError, DataError, Problem, suggest_name
from fednotes.core.types import Document

OnError = Literal["refuse", "skip"]

# Kinds of valid content that a reader ignores.
UNANNOTATED = "texts without annotations"
WINDOWS = "texts with Windows line endings"  # which are converted

MAX_LISTED = 10_000  # problems listed individually; all are counted


def is_refused(on_error: str) -> bool:
    """Return whether a corpus with problems is refused.

    Raises:
        ConfigError: `on_error` is not an `OnError`.
    """
    known = get_args(OnError)
    if on_error not in known:
        raise ConfigError(f"on_error = {on_error!r}: {suggest_name(on_error, known)}")
    return on_error == "refuse"


class Problems:
    """The problems of a corpus, in the order of the files.

    Attributes:
        listed: The first 10,000 problems.
        counts: The number of all problems, by the kind of item that was left out.
        repeated_ids: Documents with the id of an earlier one; they are read
            nevertheless.
        unannotated: Texts without annotation file.
        ignored: Counts of valid content that was ignored, by kind.
    """

    def __init__(self) -> None:
        self.listed: list[Problem] = []
        self.counts: Counter[str] = Counter()
        self.repeated_ids: list[Problem] = []
        self.unannotated: list[Path] = []
        self.ignored: Counter[str] = Counter()

    @property
    def number(self) -> int:
        """The total number of problems."""
        return self.counts.total()

    def add(self, error: DataError, kind: str) -> None:
        """Add an error.

        Args:
            error: The error.
            kind: The kind of item that is left out because of it: a line, a mention, a
                file.
        """
        problems = error.problems or (Problem("", 0, kind, str(error)),)
        self.counts[kind] += len(problems)
        room = max(0, MAX_LISTED - len(self.listed))
        self.listed += [replace(problem, kind=kind) for problem in problems[:room]]

    def note(self, kind: str, path: Path, line: int, message: str) -> None:
        """Add a problem at a line of a file."""
        self.add(DataError.at(path, line, message), kind)

    def note_repeated_id(self, path: Path, line: int) -> None:
        """Add a document that has the id of an earlier one."""
        if len(self.repeated_ids) < MAX_LISTED:
            message = "an earlier document has the same id"
            self.repeated_ids.append(Problem(str(path), line, "repeated_id", message))

    def include(self, other: Problems) -> None:
        """Add the problems of another reader."""
        self.listed += other.listed[: max(0, MAX_LISTED - len(self.listed))]
        room = max(0, MAX_LISTED - len(self.repeated_ids))
        self.repeated_ids += other.repeated_ids[:room]
        self.counts.update(other.counts)
        self.ignored.update(other.ignored)
        self.unannotated += other.unannotated

    @contextmanager
    def collecting(
        self, kind: str, path: Path | str, line: int = 0, prefix: str = ""
    ) -> Iterator[list[DataError]]:
        """Catch and add a DataError that is raised in the context.

        Args:
            kind: The kind of item that is left out because of the error.
            path: The file or database, if the error names none.
            line: The line, if the error names none.
            prefix: Prefix of the message of an error that names no file.

        Yields:
            A list that contains the error after the context, if there was one.
        """
        errors: list[DataError] = []
        try:
            yield errors
        except DataError as error:
            errors.append(error)
            if not error.problems:
                error = DataError.at(path, line, f"{prefix}{error}")
            self.add(error, kind)

    def raise_if_refused(
        self, on_error: OnError = "refuse", documents: Sequence[Document] = ()
    ) -> None:
        """Raise DataError with all problems, if there are any and they are not skipped.

        Args:
            on_error: "skip" raises the error only if no document could be read.
            documents: The documents that could be read.
        """
        if (is_refused(on_error) or not documents) and self.listed:
            raise DataError.of(self.listed, self.number)

    def __str__(self) -> str:
        """Return the counts of what was left out, such as "2 lines, 1 mention"."""
        return ", ".join(
            f"{number:,} {kind}{'s' if number > 1 else ''}"
            for kind, number in self.counts.items()
        )
