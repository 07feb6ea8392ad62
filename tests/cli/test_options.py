"""Each option means the same in every command, and old names work for one version."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from applications import COMMANDS, has_app
from syntax_trees import SRC
from tiny_jobs import corpus
from typer.main import get_group
from typer.testing import CliRunner

from fednotes.cli.app import app
from fednotes.cli.options_page import (
    MEANINGS,
    format_page,
    list_commands,
    list_options,
)
from fednotes.cli.plain_help import OldName, use_plain_help

ROOT = Path(__file__).parents[2]
Run = Callable[..., tuple[str, str]]
Quiet = Annotated[bool, typer.Option("--quiet", OldName("--silent"))]


def renamed() -> Iterator[tuple[str, Any, str, str]]:
    """Yield the command, and the old and new name, of each renamed option."""
    for words, command in list_commands(get_group(app)):
        for old, new in command.old_names.items():
            yield words, command, old, new


def test_each_option_name_has_one_meaning_in_all_commands() -> None:
    """All commands have the same help text, or texts that MEANINGS groups."""
    several = {
        option.name
        for option in list_options(get_group(app))
        if len(option.meanings) > 1
    }
    assert several == {*MEANINGS}


def test_each_meaning_has_one_option_name_in_all_commands() -> None:
    names: dict[str, str] = {}
    for option in list_options(get_group(app)):
        for meaning in option.meanings:
            assert names.setdefault(meaning, option.name) == option.name


def test_the_format_to_read_and_the_format_to_write_have_one_name_each() -> None:
    meanings = {each.name: each.meanings for each in list_options(get_group(app))}
    assert meanings["--format"] == ["Format of the files to read; detected if omitted."]
    assert meanings["--to"] == ["Format to write."]


def test_the_help_marks_repeatable_options_except_assignments() -> None:
    for words, command in list_commands(get_group(app)):
        for parameter in command.params:
            if parameter.param_type_name == "option" and parameter.multiple:
                is_clear = "may be repeated" in parameter.help
                assert is_clear or parameter.metavar in (
                    "KEY=VALUE",
                    "NAME",
                    "[NAME=]JOB",
                ), f"{words} {parameter.name}"


def test_the_page_of_option_names_is_up_to_date() -> None:
    if not all(map(has_app, COMMANDS.values())):
        pytest.skip("the page has the commands of all applications")
    page = (ROOT / "docs" / "options.md").read_text("utf-8")
    assert page == format_page(), (
        "python -m fednotes.cli.options_page > docs/options.md"
    )


def test_an_old_name_is_parsed_as_the_new_one() -> None:
    for words, command, old, new in renamed():
        context = typer.Context(command)
        parsed = []
        for name in (old, new):
            values, rest, _ = command.make_parser(context).parse_args([name, "value"])
            parsed.append((values, rest))
        assert parsed[0] == parsed[1], f"{words} {old}"


def test_the_help_hides_old_names() -> None:
    for words, _, old, new in renamed():
        shown = CliRunner().invoke(app, [*words.split(), "--help"]).stdout
        assert re.search(rf"^  {new}\b", shown, re.MULTILINE), words
        assert not re.search(rf"^  {old} ", shown, re.MULTILINE), words


def test_an_old_name_works_and_prints_the_new_one(run: Run, tmp_path: Path) -> None:
    corpus(tmp_path / "a.conll", "Drug", "north")
    words = ("convert", tmp_path / "a.conll", tmp_path / "b.jsonl", "--to", "jsonl")
    out, err = run(*words, "--from=conll")
    assert out.endswith(f"documents in {tmp_path / 'b.jsonl'}\n")
    assert err == "note: --from is now --format: use that name\n"


def test_a_command_with_only_new_names_prints_no_deprecation_note(
    run: Run, tmp_path: Path
) -> None:
    corpus(tmp_path / "a.conll", "Drug", "north")
    words = ("convert", tmp_path / "a.conll", tmp_path / "b.jsonl", "--to", "jsonl")
    assert run(*words, "--format", "conll")[1] == ""


@pytest.mark.parametrize("format", ["jsonl", "brat", "conll", "csv"])
def test_predict_refuses_an_ambiguous_format(
    run: Run, tmp_path: Path, format: str
) -> None:
    words = ("predict", tmp_path, "--text", "x")
    _, err = run(*words, "--format", format, code=2)
    assert err.startswith(f"error: --format {format}: this option now names the format")
    for clear in (("--format", format, "--to", "jsonl"), ("--from", format)):
        _, err = run(*words, *clear, code=2)
        assert "no model here" in err


@pytest.mark.parametrize("format", ["parquet", "omop"])
def test_predict_accepts_read_only_formats_under_format(
    run: Run, tmp_path: Path, format: str
) -> None:
    words = ("predict", tmp_path, "--text", "x", "--format", format)
    assert "no model here" in run(*words, code=2)[1]


def test_old_names_of_lists_and_flags_are_parsed() -> None:
    program = typer.Typer(rich_markup_mode=None)

    @program.command()
    def count(
        name: Annotated[list[str], typer.Option("--name", OldName("--names"))],
        quiet: Quiet = False,
    ) -> None:
        typer.echo(f"{name} {quiet}")

    use_plain_help(program)
    result = CliRunner().invoke(
        program, ["--names", "a", "--name", "b", "--silent", "--names", "c"]
    )
    assert result.stdout == "['a', 'b', 'c'] True\n"
    assert result.stderr.splitlines() == [
        "note: --names is now --name: use that name",
        "note: --silent is now --quiet: use that name",
    ]


def test_words_after_two_dashes_are_not_options() -> None:
    program = typer.Typer(rich_markup_mode=None)

    @program.command()
    def show(
        words: list[str],
        quiet: Quiet = False,
    ) -> None:
        typer.echo(f"{words} {quiet}")

    use_plain_help(program)
    result = CliRunner().invoke(program, ["--", "--silent"])
    assert (result.stdout, result.stderr) == ("['--silent'] False\n", "")


def texts_of(path: Path) -> Iterator[str]:
    """Yield the strings in a module that are not docstrings."""
    tree = ast.parse(path.read_text("utf-8"))
    docstrings = {
        statement.value
        for statement in ast.walk(tree)
        if isinstance(statement, ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node not in docstrings:
            yield str(node.value)


def test_messages_name_existing_options() -> None:
    names = {"--help", "--version"}
    for _, command in list_commands(get_group(app)):
        for parameter in command.params:
            names |= {*parameter.opts, *parameter.secondary_opts}
    old_names = {old for _, _, old, _ in renamed()}
    for path in sorted((SRC / "fednotes").rglob("*.py")):
        if path.name == "options_page.py":  # which lists the old names
            continue
        for text in texts_of(path):
            if text in old_names:  # a name by itself is no message
                continue
            named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text))
            assert named <= names, f"{path}: {sorted(named - names)}"
