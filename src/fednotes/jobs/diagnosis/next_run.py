"""The command that runs a job again with settings to try."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from fednotes.core.errors import FednotesError
from fednotes.jobs.causes import Cause, Setting
from fednotes.jobs.diagnosis.evidence import RunEvidence
from fednotes.jobs.job_file import load_table
from fednotes.jobs.run_folder import find_free_folder

_OUT = "--out"
_SET = "--set"
_FOLDER = "next"  # name of the folder of the next run


def suggest_command(
    words: Sequence[str], causes: Iterable[Cause], run_folder: Path | None = None
) -> str:
    """Return the command that tries the first settings of the first cause with some.

    Args:
        words: The command of the run, or of the job that was examined; empty if it is
            not known.
        causes: The causes, the most important first.
        run_folder: The folder of the run; None before training.

    Returns:
        The command, quoted for a shell, with the settings that it had and those to try;
        "" if no cause has settings, or if the command is not known.
    """
    settings = next((cause.first_settings for cause in causes if cause.settings), ())
    if not settings or not words:
        return ""
    folder = Path("runs") if run_folder is None else run_folder.parent
    return shlex.join(
        [
            *_drop_replaced_options(words, settings),
            _OUT,
            str(find_free_folder(folder / _FOLDER)),
            *_list_assignments(settings),
        ]
    )


def find_command(run: RunEvidence) -> list[str]:
    """Return the words of the command that simulates a run's job; [] if not known.

    Runs of the command line record it. The job of another run may still be in its file.
    """
    if run.is_deployed:
        return []
    if run.command:
        return _split_command(run.command)
    file = run.job.folder / f"{run.job.name}.toml"
    try:
        table, _ = load_table(file)
    except FednotesError:
        return []
    if table != run.job.table:
        return []
    return ["fednotes", "simulate", _shorten_path(file)]


def _split_command(command: str) -> list[str]:
    """Return the words of a run's command; [] if it does not simulate a job.

    A run of somebody else may name any command, and a person repeats what is shown.
    """
    try:
        words = shlex.split(command)
    except ValueError:  # a quotation has no end
        return []
    return words if words[:2] == ["fednotes", "simulate"] else []


def _shorten_path(file: Path) -> str:
    """Return a path relative to the current folder, if it is within it."""
    current = Path.cwd()
    return str(file.relative_to(current) if file.is_relative_to(current) else file)


def _drop_replaced_options(
    words: Sequence[str], settings: Sequence[Setting]
) -> Iterator[str]:
    """Yield a command's words without `--out` and the settings that get new values."""
    replaced = {".".join(setting.place) for setting in settings}
    options = iter(words)
    for word in options:
        if word == _OUT:
            next(options, None)
        elif word == _SET:
            assignment = next(options, "")
            key, _, _ = assignment.partition("=")
            if key.strip() not in replaced:
                yield from (_SET, assignment)
        else:
            yield word


def _list_assignments(settings: Sequence[Setting]) -> Iterator[str]:
    """Yield the options of a command that set these values."""
    for setting in settings:
        yield from (_SET, setting.assignment)
