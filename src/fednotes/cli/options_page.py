"""The page of option names: each option of the command line, with its one meaning.

`python -m fednotes.cli.options_page > docs/options.md` writes it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import typer

from fednotes.cli.app import app
from fednotes.cli.plain_help import PlainCommand, replace_types

# What the option means in all commands, where their help texts say more.
MEANINGS = {
    "--out": "File or folder to write; a command's help says which, and its default.",
    "--site-file": "The site's file; a command's help says what is used without it.",
    "--workers": "Number of processes that compute at the same time; a command's help "
    "says what each computes.",
    "--sites": "Number of sites to generate or to simulate.",
}
_HEAD = """\
# Option names

An option means the same in every command that has it. An option that may be repeated
takes one value each time: `--type Drug --type ADE`. `fednotes COMMAND --help` describes
a command's options in more detail, and `-h` is short for `--help`.

`convert`, `corpus synthesise` and `export` have no `--out`: their last argument names
the file or folder to write.

"""
_BEFORE_OLD_NAMES = """
## Renamed options

The old names work for one version. They are not in the help, and a command that is
called with one prints the new name to stderr.

"""
_AFTER_OLD_NAMES = """
`--format` of `predict` now names the format to read. Without `--to`, `predict` refuses
a `--format` that it can also write, because the option may be meant in its old sense.
"""


@dataclass
class OptionName:
    """An option, in all commands that have it.

    Attributes:
        name: The option, such as "--seeds".
        shown: It as a person types it, such as "--seeds N|N-M", without repetitions.
        meanings: The help texts of the commands, without repetitions.
        commands: The commands.
    """

    name: str
    shown: list[str] = field(default_factory=list)
    meanings: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)


def list_commands(group: Any, *words: str) -> Iterator[tuple[str, Any]]:
    """Yield each visible command with its words, such as "corpus stats".

    Args:
        group: A group of commands.
        words: The words of the group.

    Raises:
        ConfigError: The package that registers a command cannot be imported.
    """
    for name in sorted(group.commands):
        command = group.commands[name]
        if hasattr(command, "commands"):
            yield from list_commands(command, *words, name)
        elif not command.hidden:
            yield " ".join([*words, name]), command


def list_options(group: Any) -> list[OptionName]:
    """Return all options of a group's commands, sorted by name."""
    options: dict[str, OptionName] = {}
    for words, command in list_commands(group):
        context = typer.Context(command)
        for parameter in command.params:
            record = parameter.get_help_record(context)
            if parameter.param_type_name != "option" or record is None:
                continue
            name = parameter.opts[0]
            option = options.setdefault(name, OptionName(name))
            option.commands.append(words)
            _add_new(option.shown, replace_types(record[0]))
            _add_new(option.meanings, parameter.help)
    return [options[name] for name in sorted(options)]


def _add_new(values: list[str], value: str) -> None:
    """Append a value to a list that does not contain it."""
    if value not in values:
        values.append(value)


def format_page() -> str:
    """Return the page of option names, in Markdown."""
    group = typer.main.get_group(app)
    options = []
    for option in list_options(group):
        # Commands may take different values; the page then shows the name alone.
        shown = option.shown[0] if len(option.shown) == 1 else option.name
        # If the commands' help texts differ, `MEANINGS` has what they have in common.
        meaning = MEANINGS.get(option.name) or option.meanings[0]
        options.append((f"`{shown}`", meaning, _format_names(option.commands)))
    old_names = [
        (f"`{old}`", f"`{new}`", _format_names(commands))
        for (old, new), commands in sorted(_find_old_names(group).items())
    ]

    sections = [
        _HEAD,
        _format_table(("option", "meaning", "commands"), options),
        _BEFORE_OLD_NAMES,
        _format_table(("old name", "new name", "commands"), old_names),
        _AFTER_OLD_NAMES,
    ]
    return "".join(sections)


def _format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, with a line break at its end."""
    lines = [_format_row(*head), "|" + "---|" * len(head)]
    lines.extend(_format_row(*row) for row in rows)
    return "\n".join(lines) + "\n"


def _format_names(names: Sequence[str]) -> str:
    """Return names as code, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


def _find_old_names(group: Any) -> dict[tuple[str, str], list[str]]:
    """Return the commands of each renamed option, by its old and its new name."""
    renamed: dict[tuple[str, str], list[str]] = {}
    for words, command in list_commands(group):
        if isinstance(command, PlainCommand):
            for names in command.old_names.items():
                renamed.setdefault(names, []).append(words)
    return renamed


def _format_row(*cells: str) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    sys.stdout.write(format_page())
