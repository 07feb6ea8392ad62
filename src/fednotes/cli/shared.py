"""Shared by all commands: the console and common options.

The commands of applications and other packages import this module too, so it imports
nothing large.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from fednotes.cli.completers import complete_format, complete_job
from fednotes.cli.plain_help import OldName
from fednotes.core.cleaning import clean
from fednotes.core.databases import is_address

if TYPE_CHECKING:
    from fednotes.data.notes import NoteDatabase

_SECONDS_BETWEEN_LINES = 60.0  # of the progress of work that is not shown as a bar
PIPED = 400  # columns of piped output, wide enough for the labels of all tables
_SCREEN = sys.stdout.isatty() or "COLUMNS" in os.environ


class CleanConsole(Console):
    """A console that escapes characters of other parties that control a terminal.

    Tables show names of files, sites and entity types, which may hold any character.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Yield the segments of a renderable, with escaped text."""
        for segment in super().render(renderable, options):
            is_plain = segment.control or segment.text.isprintable()
            text = segment.text if is_plain else _clean_lines(segment.text)
            yield segment._replace(text=text)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a string as text, escaped before its width is measured."""
        return super().render_str(_clean_lines(text), **options)


def _clean_lines(text: str) -> str:
    """Return text in which only line ends are not visible."""
    return "\n".join(clean(line, None) for line in text.split("\n"))


console = CleanConsole(width=None if _SCREEN else PIPED)


# ---- options -------------------------------------------------------------------------


Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a key of the job, e.g. seed=2."
    ),
]


class OnError(StrEnum):
    """How to handle unusable data in a corpus."""

    refuse = "refuse"
    skip = "skip"


OnErrorOption = Annotated[
    OnError,
    typer.Option(
        help="How to treat bad data: refuse stops with an error; skip leaves it out "
        "and counts it."
    ),
]
EncodingOption = Annotated[
    str,
    typer.Option(
        help="Encoding of files that are not UTF-8, such as cp1252; by default (auto), "
        "such files are refused.",
        show_default=False,
    ),
]
INPUT_FORMAT = "Format of the files to read; detected if omitted."
FormatOption = Annotated[
    str, typer.Option(help=INPUT_FORMAT, autocompletion=complete_format)
]
RenamedFormatOption = Annotated[
    str,
    typer.Option(
        "--format",
        OldName("--from"),
        help=INPUT_FORMAT,
        autocompletion=complete_format,
    ),
]
JobArgument = Annotated[
    str,
    typer.Argument(
        help="A job file, or the name of a built-in job such as `demo`.",
        autocompletion=complete_job,
    ),
]
OUTPUT_FORMAT = "Format to write."
ColumnOption = Annotated[
    str,
    typer.Option(help="Column of a table, or key of JSON lines, that holds the text."),
]
IdColumnOption = Annotated[
    str,
    typer.Option(help="Column of a table, or key of JSON lines, with the notes' ids."),
]
QueryOption = Annotated[
    str,
    typer.Option(help="SELECT that returns notes, if PATH is a database's address."),
]
OmopOption = Annotated[
    str,
    typer.Option(
        metavar="[SCHEMA.]TABLE",
        help="OMOP table of notes, if PATH is a database's address; `note` by default.",
    ),
]
Labels = Annotated[Path | None, typer.Option(help="Table of patient labels.")]
Backbone = Annotated[
    str | None,
    typer.Option(help="Path of the frozen encoder, if it has moved since training."),
]
Dictionary = Annotated[
    str | None,
    typer.Option(help="Path of a phenotyping model's dictionary, if it has moved."),
]
LabelMap = Annotated[
    list[str] | None,
    typer.Option(
        "--map", metavar="OLD=NEW", help="Rename a label of the file; may be repeated."
    ),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
AsPage = Annotated[
    bool, typer.Option("--markdown", help="Print the result as Markdown.")
]
Notes = Annotated[list[Path], typer.Option(help="Notes to read; may be repeated.")]
Seed = Annotated[int, typer.Option(help="Seed of the random choices.")]
SEEDS = "N|N-M"
SEEDS_HELP = "Run once with this seed, or with each seed of a range; may be repeated."
Port = Annotated[
    int,
    typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free port."),
]
Protect = Annotated[
    bool, typer.Option("--protect", help="Encrypt the key with a passphrase.")
]
Device = Annotated[
    str, typer.Option(help="Device to compute on, such as cpu, cuda or cuda:1.")
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TOOL=TARGET",
        help="Also write the run to mlflow=URI or tensorboard=FOLDER; may be repeated.",
    ),
]
SKIP_REMEDY = (
    '--on-error skip (in a job, on_error = "skip" of the site) leaves these out'
)


def read_place(path: str, query: str, omop: str) -> str | NoteDatabase:
    """Return a path as it is, or the database that it is the address of.

    Raises:
        ParameterError: The path is no address, and `query` or `omop` is given.
        ConfigError: The address is impossible.
    """
    (place,) = read_places([path], query, omop)
    return place


def read_places(
    paths: Sequence[str], query: str, omop: str
) -> list[str | NoteDatabase]:
    """Return paths as they are, and the databases of addresses; see `read_place`."""
    if not (query or omop or any(map(is_address, paths))):
        return [*paths]
    from fednotes.data.notes import NoteDatabase, require_database

    require_database(paths, query, omop)
    return [
        NoteDatabase(path, query, omop) if is_address(path) else path for path in paths
    ]


# ---- output --------------------------------------------------------------------------


def say(*lines: str, to: Console | None = None) -> None:
    """Print lines without colours, markup, wrapping or control characters.

    Args:
        lines: The lines.
        to: Where to print; None prints to stdout.
    """
    shown = to or console
    for line in lines:
        shown.print(clean(line, None), highlight=False, markup=False, soft_wrap=True)


def choose_console(*, as_json: bool) -> Console:
    """Return where a command prints what it does while it works.

    This is stderr if the result is a JSON document, because stdout then holds nothing
    else.
    """
    return CleanConsole(stderr=True) if as_json else console


@contextmanager
def showing_work(name: str, *, is_shown: bool = True) -> Iterator[None]:
    """Show the work within the context on stderr.

    In a terminal, this is a bar. Otherwise, long work prints a line each minute.

    Args:
        name: What to show while the work does not name itself, such as "loading".
        is_shown: Whether to show it at all.
    """
    shown = CleanConsole(stderr=True)
    if not is_shown:
        yield
        return
    from fednotes.core.work import reporting_to

    if not shown.is_terminal:
        with reporting_to(WorkLines()):
            yield
        return
    from fednotes.cli.display import WorkBar

    with WorkBar(shown, name) as bar, reporting_to(bar):
        yield


class WorkLines:
    """Prints how far long work is to stderr, at most once a minute.

    Args:
        now: Returns the current time, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._depth = 0  # of the newest work within other work
        self._name = ""
        self._total: int | None = None
        self._began = 0.0
        self._printed = now()

    def begin(self, name: str, total: int | None) -> None:
        """Note what is done, unless it is a part of other work."""
        self._depth += 1
        if self._depth == 1:
            self._name = name
            self._total = total
            self._began = self._now()

    def advance(self, done: int) -> None:
        """Print how many items are done, if a minute has passed."""
        now = self._now()
        if self._depth != 1 or now - self._printed < _SECONDS_BETWEEN_LINES:
            return
        self._printed = now
        of = "" if self._total is None else f" of {self._total:,}"
        rate = done / max(now - self._began, 1e-9)
        line = f"{self._name}: {done:,}{of}, {rate:,.1f}/s"
        print(clean(line, None), file=sys.stderr, flush=True)

    def end(self) -> None:
        """Note that the newest work has ended."""
        self._depth -= 1


def print_json(value: Any) -> None:
    """Print the result of a command as one JSON document.

    Numbers that are not finite become null. Other characters than those of ASCII are
    escaped, so that no text of another party can control the terminal.
    """
    console.print_json(
        data=_replace_infinite(value), ensure_ascii=True, allow_nan=False, default=str
    )


def _replace_infinite(value: Any) -> Any:
    """Return a value with NaN and infinities as None, and keys as text."""
    if isinstance(value, Mapping):
        return {str(key): _replace_infinite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_infinite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def tell(notes: Iterable[str]) -> None:
    """Print remarks, each as a note; warnings are printed unchanged."""
    for note in notes:
        say(note if note.startswith("warning: ") else f"note: {note}")


# Options whose names differ from the parameter of the underlying function.
_OPTIONS = {
    "settings": "--set",
    "label_map": "--map",
    "against": "--other-annotation",
    "key": "--certificate-key",
    "seed": "--seeds",
    "silos": "--sites",
    "types": "--type",
    "replace_root": "--new-root",
}
# A parameter such as `out`, or with a value as in `encoding = "cp1252"`.
_PARAMETER = re.compile('`([a-z_]+)(?: = "([^"`]*)")?`')


def name_options(message: str) -> str:
    """Return a message in which options replace the parameters in backticks."""

    def option(match: re.Match[str]) -> str:
        """Return the option of a parameter, with the value if there is one."""
        parameter, value = match.groups()
        name = _OPTIONS.get(parameter) or "--" + parameter.replace("_", "-")
        return name if value is None else f"{name} {value}"

    return _PARAMETER.sub(option, message)


def can_ask(yes: bool) -> bool:  # noqa: FBT001 - the value of an option
    """Return whether a person can be asked a question.

    Args:
        yes: The option `--yes`: the person prefers not to be asked.
    """
    return not yes and console.is_terminal and sys.stdin.isatty()
