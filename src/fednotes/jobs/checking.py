"""Check a corpus before training: `fednotes check` of files and folders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fednotes.core.errors import (
    UNREADABLE,
    ConfigError,
    DataError,
    Problem,
    UnknownFormatError,
)
from fednotes.core.types import Document
from fednotes.data.checks import (
    CorpusCheck,
    Finding,
    find_leaks,
    find_shared_notes,
    report_agreement,
    report_problems,
)
from fednotes.data.encodings import AUTO
from fednotes.data.formats import read, stream
from fednotes.data.formats.folders import name_paths
from fednotes.data.formats.gathering import make_ids_unique
from fednotes.data.formats.problems import OnError, Problems, is_refused
from fednotes.data.notes import NotePlace
from fednotes.jobs.input_readers import choose_reader, explain_unknown_format
from fednotes.jobs.job import Job, Sites
from fednotes.metrics.agreement import measure_agreement

# Findings that say that a corpus has no annotations.
_ABOUT_MENTIONS = ("no_mentions", "types", "bare_documents")


@dataclass(frozen=True)
class Checked:
    """The result of a check.

    Attributes:
        problems: The problems, with file and line where these are known.
        number: The number of problems, if not all are in `problems`.
        findings: Further findings.
        job: The job, if it was checked and could be read.
        sites: The sites of the job, if they could be read.
        agreement: The agreement with another annotation, as `measure_agreement`
            returns it.
        seconds: Condition → the estimated seconds of its training in one process;
            empty if they were not estimated.
    """

    problems: tuple[Problem, ...] = ()
    number: int = 0
    findings: tuple[Finding, ...] = ()
    job: Job | None = None
    sites: Sites | None = None
    agreement: Mapping[str, Any] | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def wrong(self) -> tuple[Problem, ...]:
        """`problems`, and the findings that are errors."""
        errors = [finding for finding in self.findings if finding.level == "error"]
        with_places = [problem for error in errors for problem in error.problems]
        without_places = [
            Problem("", 0, error.code, f"{error.where}: {error.message}")
            for error in errors
            if not error.problems
        ]
        return (*self.problems, *with_places, *without_places)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON.

        The file and the line of a problem are null if it concerns none.
        """
        wrong = self.wrong
        unlisted = max(0, self.number - len(self.problems))
        values: dict[str, Any] = {
            "problems": [_describe_problem(problem) for problem in wrong],
            "findings": [finding.to_dict() for finding in self.findings],
            "counts": {
                "problems": len(wrong) + unlisted,
                "kinds": dict(Counter(problem.kind for problem in wrong)),
            },
        }
        if self.agreement is not None:
            values["agreement"] = dict(self.agreement)
        if self.seconds:
            values["seconds"] = dict(self.seconds)
        return values


def _describe_problem(problem: Problem) -> dict[str, Any]:
    """Return a problem as JSON values."""
    return {
        **asdict(problem),
        "file": problem.file or None,
        "line": problem.line or None,
    }


def check_files(
    paths: Sequence[NotePlace],
    format: str | None = None,
    on_error: OnError = "refuse",
    encoding: str = AUTO,
) -> Checked:
    """Check a corpus, or several files, folders or databases: the parts of one.

    A single corpus in JSON lines is read document by document, not held in memory.

    Args:
        paths: The files, folders and databases.
        format: Format of the corpus; recognised if it is None.
        on_error: With "skip", unusable data are counted instead of reported as
            problems.
        encoding: Encoding of files without a byte-order mark that are not UTF-8.

    Raises:
        DataError: A path does not exist.
        ConfigError: There is no such format.
    """
    for path in paths:
        if isinstance(path, Path):
            _require_path(path)
    has_parts = len(paths) > 1
    path_by_name = _name_places(paths) if has_parts else {"corpus": paths[0]}
    # The documents of a single corpus need not be in memory at the same time.
    reader = _PartReader(
        format, encoding, refuses=is_refused(on_error), holds_documents=has_parts
    )
    parts = [reader.check(name, path) for name, path in path_by_name.items()]
    problems = [problem for part in parts for problem in part.problems]
    findings = [finding for part in parts for finding in part.findings]
    documents = {
        part.name: part.documents for part in parts if part.documents is not None
    }
    findings += find_shared_notes(documents, "corpus")
    findings += find_leaks(documents, "corpus")
    return Checked(
        problems=tuple(problems),
        number=sum(part.num_problems for part in parts),
        findings=tuple(findings),
    )


def _name_places(places: Sequence[NotePlace]) -> dict[str, NotePlace]:
    """Return the parts of a corpus by their names.

    Raises:
        ConfigError: A place is given twice.
    """
    paths = [place for place in places if isinstance(place, Path)]
    databases = [place for place in places if not isinstance(place, Path)]
    if len(set(databases)) < len(databases):
        raise ConfigError("a database is given twice: give each place once")
    by_name: dict[str, NotePlace] = dict(name_paths(paths))
    for number, database in enumerate(databases, 1):
        by_name["database" if len(databases) == 1 else f"database {number}"] = database
    return by_name


@dataclass(frozen=True)
class _CheckedPart:
    """The result of a check of one path.

    Attributes:
        name: Name of the part.
        problems: The unusable data.
        num_problems: The number of problems, if not all are in `problems`.
        findings: Further findings.
        documents: The documents, if the reader holds them; None if the path cannot be
            read.
    """

    name: str
    problems: tuple[Problem, ...] = ()
    num_problems: int = 0
    findings: tuple[Finding, ...] = ()
    documents: tuple[Document, ...] | None = None


class _ReadCorpus(NamedTuple):
    """The content of one path.

    Attributes:
        documents: The documents, if the reader holds them; otherwise empty.
        num_documents: The number of documents.
        findings: The findings about them.
    """

    documents: list[Document]
    num_documents: int
    findings: list[Finding]


@dataclass(frozen=True)
class _PartReader:
    """Checks the paths of a corpus one by one.

    Attributes:
        format: Format of the corpus; recognised if it is None.
        encoding: As in `check_files`.
        refuses: Whether unusable data are a problem.
        holds_documents: Whether the documents are held in memory, to compare them.
    """

    format: str | None
    encoding: str
    refuses: bool
    holds_documents: bool

    def check(self, name: str, path: NotePlace) -> _CheckedPart:
        """Check one path; if it cannot be read, the result says so as a problem."""
        try:
            return self.check_readable(name, path)
        except UnknownFormatError as error:
            explained = explain_unknown_format(error, self.encoding)
            return _CheckedPart(name, (_describe_unreadable(path, explained),), 1)
        except DataError as error:
            reasons = error.problems or (_describe_unreadable(path, error),)
            return _CheckedPart(name, reasons, len(reasons))

    def check_readable(self, name: str, path: NotePlace) -> _CheckedPart:
        """Check one path.

        Raises:
            DataError: The path cannot be read.
        """
        problems = Problems()
        corpus = self._read_and_check(name, path, problems)
        refused: tuple[Problem, ...] = ()
        num_refused = 0
        if self.refuses:
            refused = tuple(problems.listed)
            num_refused = problems.number
            problems.counts.clear()  # what is refused is no finding too
        findings = list(report_problems(problems, name, _shorten_place(path)))
        # That nothing was read is a finding only if no problem explains it.
        if corpus.num_documents or not problems.listed:
            findings += _keep_applicable_findings(path, corpus.findings)
        return _CheckedPart(
            name, refused, num_refused, tuple(findings), tuple(corpus.documents)
        )

    def _read_and_check(
        self, name: str, path: NotePlace, problems: Problems
    ) -> _ReadCorpus:
        """Read a path and check its documents in one pass.

        Args:
            name: Name of the part.
            path: The path.
            problems: Collects what cannot be used.

        Raises:
            DataError: The path cannot be read.
        """
        documents: list[Document] = []
        num_documents = 0
        with CorpusCheck(name) as check:
            for document in self._stream_documents(path, problems):
                check.add(document)
                num_documents += 1
                if self.holds_documents:
                    documents.append(document)
            return _ReadCorpus(documents, num_documents, check.list_findings())

    def _stream_documents(
        self, place: NotePlace, problems: Problems
    ) -> Iterable[Document]:
        """Return the documents of a corpus, or the notes of a database."""
        if isinstance(place, Path):
            return stream(place, problems, self.format, self.encoding)
        return choose_reader(place, self.format, None, self.encoding).read(problems)


def _keep_applicable_findings(
    place: NotePlace, findings: Iterable[Finding]
) -> list[Finding]:
    """Return the findings; of a database, leave out those about its mentions.

    A database has no annotations, so it is no finding that it lacks mentions.
    """
    if isinstance(place, Path):
        return [*findings]
    return [finding for finding in findings if finding.code not in _ABOUT_MENTIONS]


def _shorten_place(place: NotePlace) -> str:
    """Return the last part of a path, or the address of a database."""
    return place.name if isinstance(place, Path) else str(place)


def _describe_unreadable(path: NotePlace, error: DataError) -> Problem:
    """Return the problem of a path that cannot be read."""
    # The problem already names the file.
    message = str(error).removeprefix(f"{path}: ")
    return Problem(str(path), 0, UNREADABLE, message)


def check_against(
    path: Path,
    other: Path,
    format: str | None,
    on_error: OnError,
    encoding: str = AUTO,
) -> Checked:
    """Check a corpus, and its agreement with another annotation of the same documents.

    Args:
        path: The corpus.
        other: The other annotation.
        format: As in `check_files`.
        on_error: As in `check_files`.
        encoding: As in `check_files`.

    Raises:
        DataError: A path cannot be read, or the corpora have no document in common.
        ConfigError: There is no such format.
    """
    _require_path(path)
    reader = _PartReader(
        format, encoding, refuses=is_refused(on_error), holds_documents=True
    )
    part = reader.check_readable("corpus", path)
    documents = make_ids_unique(part.documents or ())
    scores = measure_agreement(documents, read(other, None, on_error, encoding))
    if not scores["documents"]:
        raise DataError(
            f"{other}: no document has the same id and text as one in {path}"
        )
    return Checked(
        problems=part.problems,
        number=part.num_problems,
        findings=(*part.findings, *report_agreement(scores, path.name)),
        agreement=scores,
    )


def _require_path(path: Path) -> None:
    """Raise DataError unless there is a file or folder."""
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
