"""The help of a command: what a person types, without types of Python.

Typer writes `{model}`, `<list[Path]>` and `<int range>`. Here these are `MODEL`, `PATH`
and `N`.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Set
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand

_TYPE = re.compile(r"<(?:list\[)?([^<>\]]+?)(?: range)?\]?>")  # of an option's value
_USED = "fednotes.used_old_names"  # key of a context's `meta`
_PLACEHOLDERS = {
    "path": "PATH",
    "file": "PATH",
    "str": "TEXT",
    "int": "N",
    "float": "X",
}


Command = TypeVar("Command", bound=Callable[..., Any])


def with_examples(*lines: str) -> Callable[[Command], Command]:
    """Mark a function as a command whose help ends with examples.

    Packages use this for the functions that they register.

    Args:
        lines: Lines that a person types, of at most 76 characters. A command that needs
            several ends each but its last with a backslash.
    """

    def mark(function: Command) -> Command:
        """Note the examples at a function."""
        vars(function)["examples"] = lines
        return function

    return mark


class OldName(str):
    """The name that an option had before; give it to `typer.Option` after the new one.

    It still works for one version, is not shown in the help, and prints the new name.
    """


class PlainCommand(TyperCommand):
    """A command whose help has arguments in capitals and plain placeholders.

    Attributes:
        examples: Lines of the examples in the help; see `with_examples`.
        old_names: The new name of each renamed option, by its old name.
    """

    def __init__(self, name: str | None, **options: Any) -> None:
        super().__init__(name, **options)
        # typer wraps the function and copies its attributes
        self.examples: tuple[str, ...] = getattr(self.callback, "examples", ())
        self.old_names: dict[str, str] = {}
        self._renamed: list[Any] = []  # a copy of each renamed option, under old names
        for parameter in self.params:
            if _is_argument(parameter):
                if parameter.metavar is None:
                    parameter.metavar = str(parameter.name).upper()
                continue
            new_names = [n for n in parameter.opts if not isinstance(n, OldName)]
            if len(new_names) < len(parameter.opts):
                renamed = copy.copy(parameter)
                renamed.opts = [n for n in parameter.opts if isinstance(n, OldName)]
                self._renamed.append(renamed)
                parameter.opts = new_names
                self.old_names |= dict.fromkeys(renamed.opts, new_names[0])

    def make_parser(self, ctx: Any) -> Any:
        """Return the parser of the command's words; it knows the old names too."""
        parser = super().make_parser(ctx)
        for option in self._renamed:
            option.add_to_parser(parser, ctx)
        return parser

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command's words; print the new name of each old one."""
        used = self.old_names.keys() & _find_option_names(args)
        ctx.meta[_USED] = used
        remaining = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:  # which completion uses
            for old in sorted(used):
                new = self.old_names[old]
                print(f"note: {old} is now {new}: use that name", file=sys.stderr)
        return remaining

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line after the command's name."""
        pieces = [self.options_metavar or ""]
        for parameter in filter(_is_argument, self.get_params(ctx)):
            name = _format_argument(parameter)
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
                arguments.append((_format_argument(parameter), record[1]))
            else:
                options.append((replace_types(record[0]), record[1]))
        for heading, rows in (("Arguments", arguments), ("Options", options)):
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples, each on a line of its own."""
        super().format_epilog(ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples:
                    formatter.write(f"  {line}\n")


def list_used_old_names(context: typer.Context) -> Set[str]:
    """Return the old names of options that a command was called with."""
    names: Set[str] = context.meta.get(_USED, frozenset())
    return names


def use_plain_help(program: typer.Typer) -> None:
    """Give all commands of a program and of its groups a plain help."""
    for command in program.registered_commands:
        command.cls = PlainCommand
    for group in program.registered_groups:
        if group.typer_instance is not None:
            use_plain_help(group.typer_instance)


def _find_option_names(words: list[str]) -> set[str]:
    """Return the names of the options in a command's words."""
    end = words.index("--") if "--" in words else len(words)
    return {word.partition("=")[0] for word in words[:end] if word.startswith("--")}


def _is_argument(parameter: Any) -> bool:
    """Return whether a parameter is an argument, not an option."""
    return bool(parameter.param_type_name == "argument")


def _format_argument(argument: Any) -> str:
    """Return an argument's name for the help; dots follow it if it may be repeated."""
    name = str(argument.metavar)
    if argument.nargs != 1 and "…" not in name:
        name += "..."
    return name


def replace_types(option: str) -> str:
    """Return an option as a person types it, such as "--seed N", not "--seed <int>"."""
    return _TYPE.sub(_replace_type, option)


def _replace_type(match: re.Match[str]) -> str:
    """Return the placeholder for a type that the help names."""
    return _PLACEHOLDERS.get(match[1].lower(), match[1])
