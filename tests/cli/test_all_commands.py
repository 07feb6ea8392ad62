"""Commands of applications and packages are found by entry points, and imported when
needed."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.main import get_group
from typer.testing import CliRunner

from fednotes.cli.all_commands import OTHER, PANELS, AllCommands, in_panel
from fednotes.cli.app import app
from fednotes.core import plugins
from fednotes.core.errors import ConfigError

ROOT = Path(__file__).parents[2]
# The verbs in the imperative that the help of a command begins with.
VERBS = set(
    "Calibrate Check Compare Convert Count Create Delete Estimate Explain Export Find "
    "Generate Inspect Install List Manage Open Print Reject Renew Reproduce Request Run Score Serve "
    "Show Start Stop Train Verify Write".split()
)


@in_panel("Use")
def hello() -> None:
    """Say hello."""
    typer.echo("hello")


farewells = typer.Typer(rich_help_panel="Deploy", help="Say farewell.")


@farewells.callback()
def _group() -> None:
    """Say farewell."""


@farewells.command()
def bye() -> None:
    """Say bye."""
    typer.echo("bye")


def plain() -> None:
    """Say nothing."""


@pytest.fixture
def registering(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    """A program whose commands are registered by this module, and one by a module that
    fails."""
    module = "tests_of_commands"
    monkeypatch.setitem(sys.modules, module, sys.modules[__name__])
    values = {
        "hello": f"{module}:hello",
        "farewell": f"{module}:farewells",
        "plain": f"{module}:plain",
        "broken": "there_is_no_such_module:command",
    }
    entries = {
        name: EntryPoint(name, value, "fednotes.commands")
        for name, value in values.items()
    }
    monkeypatch.setattr(plugins, "list_added_entries", lambda group, built_in: entries)
    program = typer.Typer(cls=AllCommands, rich_markup_mode=None)

    @program.callback()
    def program_itself() -> None:
        """A program."""

    @program.command(rich_help_panel="Data")
    def bare() -> None:
        """Do a thing of our own."""

    return program


def test_the_help_lists_commands_in_panels(registering: typer.Typer) -> None:
    result = CliRunner().invoke(registering, ["--help"])
    assert result.exit_code == 0
    at = [
        result.stdout.index(line)
        for line in (
            *("Data:\n", "  bare      Do a thing of our own."),
            *("Use:\n", "  hello     Say hello."),
            *("Deploy:\n", "  farewell  Say farewell."),
            *(f"{OTHER}:\n", "  plain     Say nothing."),
        )
    ]
    assert at == sorted(at)
    assert "broken" not in result.stdout
    broken = "fednotes.commands: broken = there_is_no_such_module:command"
    assert f"cannot be loaded ({broken}" in result.stderr


def test_registered_commands_run(registering: typer.Typer) -> None:
    for words, output in ((["hello"], "hello\n"), (["farewell", "bye"], "bye\n")):
        assert CliRunner().invoke(registering, words).stdout == output


def test_a_command_runs_whatever_class_its_entry_point_has(
    registering: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a program has imported MLflow, entry points are of another class."""
    names = ("name", "value", "group", "dist", "load")
    foreign = {
        name: SimpleNamespace(**{each: getattr(entry, each) for each in names})
        for name, entry in plugins.list_added_entries("commands", ()).items()
    }
    monkeypatch.setattr(plugins, "list_added_entries", lambda group, built_in: foreign)
    assert CliRunner().invoke(registering, ["hello"]).stdout == "hello\n"


def test_a_command_that_cannot_be_imported_reports_the_reason(
    registering: typer.Typer,
) -> None:
    result = CliRunner().invoke(registering, ["broken"])
    assert isinstance(result.exception, ConfigError)
    assert "there_is_no_such_module" in str(result.exception)


def test_every_command_of_fednotes_names_a_panel_and_fits_80_columns() -> None:
    group = get_group(app)
    for name in group.commands:
        assert group.commands[name].rich_help_panel in PANELS, name
    help_text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).stdout
    listed = help_text[help_text.index("Start:") :]
    assert [each for each in PANELS if f"{each}:\n" in listed] == [*PANELS]
    assert "..." not in listed
    assert max(map(len, listed.splitlines())) <= 80


def all_commands(command: Any, path: str = "fednotes") -> Iterator[tuple[str, Any]]:
    """Yield a command and all commands below it, with their names."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from all_commands(inner, f"{path} {name}")


def test_every_command_has_the_short_option_of_its_help() -> None:
    for path, _ in all_commands(get_group(app)):
        short = CliRunner().invoke(app, [*path.split()[1:], "-h"])
        assert short.exit_code == 0, path
        assert "-h, --help" in short.stdout, path


def help_of(command: Any, path: str) -> str:
    """The help of a command at 80 columns."""
    context = command.context_class(command, info_name=path, terminal_width=80)
    return str(command.get_help(context))


def test_the_help_of_no_group_cuts_the_first_line_of_a_command() -> None:
    for path, command in all_commands(get_group(app)):
        if hasattr(command, "commands"):
            usage, _, shown = help_of(command, path).partition("\n")
            assert usage.endswith("COMMAND [ARGS]..."), path
            assert "..." not in shown, path


def test_the_help_shows_placeholders_in_capitals_and_no_types_of_python() -> None:
    for path, command in all_commands(get_group(app)):
        shown = help_of(command, path)
        assert not re.search(r"<[a-z\[]|[{}]", shown), path
        for parameter in command.params:
            if parameter.param_type_name == "argument":
                assert re.search(r"[A-Z]", parameter.metavar), path
                assert not re.search(r"[a-z]", parameter.metavar), path


def test_the_help_of_corpus_stats_shows_option_names_as_typed() -> None:
    command = dict(all_commands(get_group(app)))["fednotes corpus stats"]
    shown = help_of(command, "fednotes corpus stats")
    assert shown.startswith("Usage: fednotes corpus stats [OPTIONS] PATHS...\n")
    assert re.search(r"^  PATHS\.\.\.  One corpus file", shown, re.MULTILINE)
    assert re.search(r"^  --format TEXT +Format", shown, re.MULTILINE)
    assert re.search(r"^  --on-error refuse\|skip +How", shown, re.MULTILINE)


def test_the_help_of_each_command_begins_with_a_verb_and_each_option_has_one() -> None:
    for path, command in all_commands(get_group(app)):
        assert re.match(r"\w+", command.help)[0] in VERBS, path
        for parameter in command.params:
            assert re.fullmatch(r"[A-Za-z].*\.", parameter.help), (
                f"{path} {parameter.name}"
            )


def test_the_installed_entry_points_are_those_of_the_project() -> None:
    """Otherwise the package is to be installed anew: `pip install -e .`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for group, values in project["entry-points"].items():
        if group.startswith("fednotes."):
            registered = plugins.list_entries(group.removeprefix("fednotes."))
            own_entries = {
                name: entry.value
                for name, entry in registered.items()
                if entry.dist is not None and entry.dist.name == "fednotes"
            }
            assert own_entries == values, group


def last_line_of(*words: str) -> str:
    """Run a command in a process of its own; return what it imported.

    That is applications of fednotes, and large packages.
    """
    program = (
        "import sys\n"
        "from fednotes.cli.app import app\n"
        "app([*sys.argv[1:]], standalone_mode=False)\n"
        "parts = [name.split('.') for name in sys.modules]\n"
        "apps = {part[2] for part in parts if part[:2] == ['fednotes', 'apps'] and part[2:]}\n"
        "print(sorted(apps), sorted({'torch', 'numba', 'pydantic'} & {*sys.modules}))\n"
    )
    command = [sys.executable, "-c", program, *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()[-1]


def command_of_each_app() -> dict[str, str]:
    """Return the name of a command for each application that registers some."""
    return {
        entry.module.split(".")[2]: name
        for name, entry in plugins.list_entries("commands").items()
        if entry.module.startswith("fednotes.apps.")
    }


def test_a_command_of_the_core_imports_no_application() -> None:
    assert last_line_of("simulate", "--help").startswith("[] ")


@pytest.mark.parametrize(("application", "command"), command_of_each_app().items())
def test_a_command_imports_no_other_application(application: str, command: str) -> None:
    assert last_line_of(command, "--help").startswith(f"['{application}'] ")


def test_the_help_imports_no_large_package() -> None:
    assert last_line_of("--help").endswith(" []")
