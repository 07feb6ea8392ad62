"""The help of each command ends with examples that its parser accepts."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
from applications import loadable, needs_app
from typer.main import get_group
from typer.testing import CliRunner

from fednotes.cli.app import app
from fednotes.cli.options_page import list_commands
from fednotes.cli.plain_help import list_used_old_names
from fednotes.jobs.built_in_jobs import list_built_in_jobs

LISTED = dict(list_commands(get_group(app)))
# A word that names something built in, by the words of the command before it.
BUILT_IN = {"simulate": list_built_in_jobs, "job show": list_built_in_jobs}


def examples_of(command: Any) -> list[list[str]]:
    """Return the words after "fednotes" of each example of a command."""
    lines = "\n".join(command.examples).replace("\\\n", " ").splitlines()
    words = [shlex.split(re.split(" >>? ", line)[0]) for line in lines]
    assert all(each[0] == "fednotes" for each in words), command.examples
    return [each[1:] for each in words]


@pytest.mark.parametrize("words", LISTED)
def test_each_command_has_one_to_three_valid_examples(words: str) -> None:
    command = LISTED[words]
    examples = examples_of(command)
    assert 1 <= len(examples) <= 3
    assert len({*map(tuple, examples)}) == len(examples)
    for example in examples:
        name = words.split()
        assert example[: len(name)] == name
        # an unknown option, a bad value or a missing argument raises an error
        context = command.make_context(words, example[len(name) :])
        assert not list_used_old_names(context), example


@pytest.mark.parametrize("words", LISTED)
def test_the_help_shows_examples_in_80_columns(words: str) -> None:
    shown = CliRunner().invoke(app, [*words.split(), "--help"], env={"COLUMNS": "80"})
    _, heading, examples = shown.stdout.partition("\nExamples:\n")
    assert heading
    assert examples.splitlines() == [f"  {line}" for line in LISTED[words].examples]
    assert all(len(line) <= 80 for line in shown.stdout.splitlines()), shown.stdout
    assert all(len(line) <= 76 for line in LISTED[words].examples)


def test_examples_name_existing_built_in_jobs() -> None:
    for words, list_names in BUILT_IN.items():
        examples = examples_of(LISTED[words])
        places = [example[len(words.split())] for example in examples]
        named = {place for place in places if not place.endswith(".toml")}
        assert named <= {*loadable(list_names())}
        assert named


def test_the_example_of_reproduce_names_an_existing_experiment() -> None:
    needs_app("experiments")
    from fednotes.apps.experiments.grids import list_experiments

    named = {words[1] for words in examples_of(LISTED["reproduce"]) if words[1:]}
    assert named
    assert named <= {*list_experiments()}
