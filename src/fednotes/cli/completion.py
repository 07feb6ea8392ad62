"""The command `fednotes completion`: scripts with which shells complete commands."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from typing import Annotated

import typer
from typer.completion import (  # type: ignore[attr-defined]  # no __all__ there
    get_completion_inspect_parameters,
    get_completion_script,
)

from fednotes.cli.plain_help import with_examples

PROGRAM = "fednotes"
# The variable in which a shell's script says what it asks for, as typer names it.
VARIABLE = "_FEDNOTES_COMPLETE"


class Shell(StrEnum):
    """Shells for which there is a script."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


@with_examples(
    "fednotes completion bash >> ~/.bashrc",
    "fednotes completion zsh > ~/.zfunc/_fednotes",
    "fednotes completion fish > ~/.config/fish/completions/fednotes.fish",
)
def completion(
    shell: Annotated[Shell, typer.Argument(help="Shell: bash, zsh or fish.")],
) -> None:
    """Print a script that lets a shell complete commands with Tab.

    It completes commands, options, formats and the names of built-in jobs.
    """
    script = get_completion_script(
        prog_name=PROGRAM, complete_var=VARIABLE, shell=shell.value
    )
    sys.stdout.write(f"{script}\n")


def answer_shell() -> None:
    """Prepare to answer a shell that asks what it may complete, if one does.

    Typer registers its shells only for programs that have its own options.
    """
    if VARIABLE in os.environ:
        get_completion_inspect_parameters()
