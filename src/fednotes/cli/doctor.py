"""The command `fednotes doctor`: why a run learned little, and what to try."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from fednotes.cli.completers import complete_job
from fednotes.cli.plain_help import with_examples
from fednotes.cli.shared import Json, Settings, console, print_json, say, showing_work
from fednotes.core.cleaning import clean_to_one_line

if TYPE_CHECKING:
    from fednotes.jobs.causes import Cause
    from fednotes.jobs.diagnosis import Diagnosis

_STYLES = {"high": "bold red", "medium": "yellow", "low": "dim"}
_INDENT = 3  # columns before the lines of a cause
_MAX_EVIDENCE = 6  # lines of evidence of a cause; --json has all


@with_examples(
    "fednotes doctor runs/first",
    "fednotes doctor job.toml --set seed=2",
)
def doctor(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|JOB",
            autocompletion=complete_job,
            help="The folder of a run, or a job.",
        ),
    ],
    settings: Settings = None,
    json_output: Json = False,
) -> None:
    """Explain why a run learned little or federation did not help.

    List likely causes by importance, each with its evidence and settings to try. For a
    job that has not run yet, read its data and show the problems to expect. Show only
    counts and scores, never text. The key that sets the length of training depends on
    the method: training.cycles for finetune, personal and pretrain; training.epochs for
    fedner; training.rounds for distill.
    """
    from fednotes.jobs.diagnosis import diagnose

    with showing_work("examining"):
        diagnosis = diagnose(target, settings or ())
    if json_output:
        print_json(diagnosis.to_dict())
    else:
        _show(diagnosis)


def _show(diagnosis: Diagnosis) -> None:
    """Print the causes, what was checked, and how to try a setting."""
    for place, cause in enumerate(diagnosis.causes, 1):
        _show_cause(place, cause)
    if not diagnosis.causes:
        say("nothing found")
    _print(Text.assemble(("checked: ", "bold"), ", ".join(diagnosis.checked)))
    for text in diagnosis.unchecked:
        _print(Text.assemble(("not checked: ", "bold"), clean_to_one_line(text)))
    if diagnosis.command:
        say(
            "try the settings of one cause at a time, from the top:",
            f"  {diagnosis.command}",
        )
    elif any(cause.settings for cause in diagnosis.causes):
        say(
            "try the settings of one cause at a time, from the top: change them in the "
            "job file, and run the job again"
        )


def _show_cause(place: int, cause: Cause) -> None:
    """Print a cause: what was seen and where, the evidence, and what to try."""
    where = f"{cause.where}: " if cause.where else ""
    _print(
        Text.assemble(
            f"{place}. ",
            (cause.importance, _STYLES[cause.importance]),
            "  ",
            (clean_to_one_line(f"{where}{cause.message}"), "bold"),
        )
    )
    for evidence in cause.evidence[:_MAX_EVIDENCE]:
        source = f" ({evidence.file})" if evidence.file else ""
        _print(Text(clean_to_one_line(f"{evidence.text}{source}")), indent=_INDENT)
    unshown = len(cause.evidence) - _MAX_EVIDENCE
    if unshown > 0:
        _print(Text(f"and {unshown} more; --json shows all"), indent=_INDENT)
    if cause.advice:
        text = Text.assemble(("advice: ", "bold"), clean_to_one_line(cause.advice))
        _print(text, indent=_INDENT)
    for setting in cause.settings:
        current = "" if setting.current is None else f"  (now {setting.current})"
        option = f"--set {shlex.quote(setting.assignment)}"
        text = Text.assemble(
            " " * _INDENT,
            ("try: ", "bold green"),
            clean_to_one_line(f"{option}{current}", None),
        )
        # Neither cut nor broken into lines, so that the option can be pasted.
        console.print(text, highlight=False, soft_wrap=True)
    console.print()


def _print(text: Text, indent: int = 0) -> None:
    """Print a text, indented and wrapped to the terminal."""
    console.print(Padding(text, (0, 0, 0, indent), expand=False), highlight=False)
