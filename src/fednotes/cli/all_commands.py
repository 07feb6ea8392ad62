"""The group of all commands: those of the core and those that packages register.

A registered command is imported when it is run or listed in the help, so other commands
do not slow down its start.
"""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from types import FunctionType
from typing import Any, ClassVar, NamedTuple, TypeVar

import typer
from typer.core import TyperGroup

from fednotes.cli.plain_help import use_plain_help
from fednotes.core import plugins
from fednotes.core.cleaning import clean_message
from fednotes.core.errors import ConfigError

START, DATA, TRAIN, USE = "Start", "Data", "Train", "Use"
DEPLOY, INSPECT = "Deploy", "Inspect"
PANELS = (START, DATA, TRAIN, USE, DEPLOY, INSPECT)
OTHER = "More"  # the panel of commands that name none
_GAP = 4  # columns of a help line besides the name and the text: two before each

Command = TypeVar("Command", bound=Callable[..., Any])


def in_panel(panel: str) -> Callable[[Command], Command]:
    """Mark a function as a command that `fednotes --help` lists in a panel.

    Packages use this for the functions that they register. A `typer.Typer` names its
    panel in `rich_help_panel`.

    Args:
        panel: One of `PANELS`, or another heading.
    """

    def mark(function: Command) -> Command:
        """Note the panel at a function."""
        vars(function)["help_panel"] = panel
        return function

    return mark


class RegisteredCommand(NamedTuple):
    """A command that is not imported yet.

    The class of an entry point tells nothing: other packages, such as the
    importlib_metadata that MLflow imports, bring a class of their own.

    Attributes:
        entry: The entry point.
    """

    entry: EntryPoint


class CommandTable(UserDict[str, Any]):
    """Commands by name. Registered ones are imported when they are first looked up."""

    def __getitem__(self, name: str) -> Any:
        """Return a command.

        Raises:
            KeyError: There is no such command.
            ConfigError: The package that registers it cannot be imported.
        """
        command = self.data[name]
        if isinstance(command, RegisteredCommand):
            command = _load(name, command.entry)
            self.data[name] = command
        return command


class RegisteredCommands(TyperGroup):
    """A group of commands, to which packages add by entry points.

    Attributes:
        entry_points: The group of the entry points.
    """

    entry_points: ClassVar[plugins.Group]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        registered = plugins.list_added_entries(self.entry_points, self.commands)
        table = CommandTable(self.commands)
        for name, entry in registered.items():
            table[name] = RegisteredCommand(entry)
        self.commands = table

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - of typer
        """Return the names of all commands, without importing any."""
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; None if there is none.

        Raises:
            ConfigError: The package that registers it cannot be imported.
        """
        try:
            return super().get_command(ctx, cmd_name)
        except ConfigError:
            if ctx.resilient_parsing:  # completion in a shell cannot show an error
                return None
            raise


class AllCommands(RegisteredCommands):
    """The group of all commands, in panels."""

    entry_points = "commands"

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - of typer
        """Write the help of all commands, panel by panel."""
        panels = self._list_panels()
        width = max(len(name) for panel in panels.values() for name in panel)
        limit = formatter.width - _GAP - width
        order = [*PANELS, *sorted(panels.keys() - {*PANELS})]
        for panel in order:
            if commands := panels.get(panel):
                rows = [
                    (name.ljust(width), command.get_short_help_str(limit))
                    for name, command in sorted(commands.items())
                ]
                with formatter.section(panel):
                    formatter.write_dl(rows)

    def _list_panels(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the commands by panel and name; warn about broken ones."""
        panels: dict[str, dict[str, Any]] = {}
        for name in self.commands:
            try:
                command = self.commands[name]
            except ConfigError as error:
                print(f"warning: {clean_message(error)}", file=sys.stderr)
                continue
            if not command.hidden:
                panel = getattr(command, "rich_help_panel", None) or OTHER
                panels.setdefault(panel, {})[name] = command
        return panels


def _load(name: str, entry: EntryPoint) -> Any:
    """Import a registered command and give it a plain help.

    Raises:
        ConfigError: The package cannot be imported, or the object is of another type.
    """
    loaded = plugins.load_entry(entry, (typer.Typer, FunctionType))
    parent = typer.Typer(rich_markup_mode=None)
    if isinstance(loaded, typer.Typer):
        panel = loaded.rich_help_panel
        parent.add_typer(loaded, name=name, rich_help_panel=panel)
    else:
        panel = getattr(loaded, "help_panel", None)
        parent.command(name, rich_help_panel=panel)(loaded)
    use_plain_help(parent)
    return typer.main.get_group(parent).commands[name]
