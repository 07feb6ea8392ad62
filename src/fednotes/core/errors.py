"""Every error that a user can cause.

    FednotesError            shown as one line, exit code 2
    ├── DataError            a file or a corpus is wrong (path and line in the message)
    ├── ConfigError          a job, site or command-line setting is wrong
    ├── ModelError           a saved model, vector file or backbone is wrong
    ├── MissingExtra         an optional dependency is not installed
    ├── BusyError            another process works in a folder
    ├── TrainingError        training cannot go on (a value is not finite, no site answers)
    └── RefusedError         a policy or a protocol forbids the request

Messages name both sides and the remedy. They never hold text of a note: a path, a line
number, a label or a count at most.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path


class FednotesError(Exception):
    """Base of all errors that are the user's to mend; the command line exits with code 2."""


class DataError(FednotesError):
    """A corpus file cannot be read as what it should be."""

    @classmethod
    def at(cls, path: str | Path, line: int, message: str) -> DataError:
        """An error at one line (counted from 1) of one file."""
        return cls(f"{path}:{line}: {message}")


class ConfigError(FednotesError):
    """A setting is unknown, missing or impossible."""


class ModelError(FednotesError):
    """A model directory, vector file or backbone cannot be used."""


class BusyError(FednotesError):
    """Another process works in a folder that takes one at a time."""


class TrainingError(FednotesError):
    """Training cannot go on."""


class LossError(TrainingError):
    """A site's loss is not finite. where: at which step; for the site's own people alone.

    public: all that the server may know, which could choose parameters that fail on one word: at
    which mini-batch would tell where that word is.
    """

    def __init__(self, site: str, value: float, where: str, remedy: str) -> None:
        super().__init__(f"site {site!r}: the loss is {value} {where}: {remedy}")
        self.public = f"site {site!r}: the loss is not finite: {remedy}"


class RefusedError(FednotesError):
    """A site's policy or the protocol forbids what was asked."""


class MissingExtra(FednotesError):
    """An optional dependency is missing; the message says which extra brings it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"this needs the package {package!r}: pip install 'fednotes[{extra}]'")


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name: `did you mean 'rounds'?`, or the list of what is known."""
    options = sorted(known)
    match = get_close_matches(name, options, n=1, cutoff=0.6)
    if match:
        return f"did you mean {match[0]!r}?"
    return f"known: {', '.join(options)}" if options else "none are known"
