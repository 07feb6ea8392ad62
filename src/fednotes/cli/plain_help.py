"""The help of a command: what a person types, without types of Python.

Typer writes `{model}`, `<list[Path]>` and `<int range>`. Here these are `MODEL`, `PATH`
and `N`.
"""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.core import TyperCommand

_TYPE = re.compile(r"<(?:list\[)?([^<>\]]+?)(?: range)?\]?>")  # of an option's value
_PLACEHOLDERS = {
    "path": "PATH",
    "file": "PATH",
    "str": "TEXT",
    "int": "N",
    "float": "X",
}


class PlainCommand(TyperCommand):
    """A command whose help has arguments in capitals and plain placeholders."""

    def __init__(self, name: str | None, **options: Any) -> None:
        super().__init__(name, **options)
        for parameter in self.params:
            if _is_argument(parameter) and parameter.metavar is None:
                parameter.metavar = str(parameter.name).upper()

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line after the command's name."""
        pieces = [self.options_metavar or ""]
        for parameter in filter(_is_argument, self.get_params(ctx)):
            name = _display_name(parameter)
            pieces.append(name if parameter.required else f"[{name}]")
        return pieces

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the help of the arguments and of the options."""
        arguments = []
        options = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if _is_argument(parameter):
                arguments.append((_display_name(parameter), record[1]))
            else:
                options.append((_TYPE.sub(_replace_type, record[0]), record[1]))
        for heading, rows in (("Arguments", arguments), ("Options", options)):
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


def use_plain_help(program: typer.Typer) -> None:
    """Give all commands of a program and of its groups a plain help."""
    for command in program.registered_commands:
        command.cls = PlainCommand
    for group in program.registered_groups:
        if group.typer_instance is not None:
            use_plain_help(group.typer_instance)


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def _display_name(argument: Any) -> str:
    """Return an argument's name; dots follow it if it may be repeated."""
    name = str(argument.metavar)
    if argument.nargs != 1 and "…" not in name:
        name += "..."
    return name


def _replace_type(match: re.Match[str]) -> str:
    return _PLACEHOLDERS.get(match[1].lower(), match[1])
