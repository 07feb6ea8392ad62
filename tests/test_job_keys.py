"""The reference of job keys is whole: held against the tables, and the jobs that there are."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from fednotes import __version__
from fednotes.core.errors import ConfigError
from fednotes.core.settings import read_toml
from fednotes.jobs import job_file as job
from fednotes.jobs.keys import reference, tables


def listed(name: str = "") -> set[str]:
    """Keys that stand at the beginning of a line of the reference."""
    lines = reference(name).splitlines()
    return {line.split(" = ")[0].strip() for line in lines if line.startswith("  ") and "=" in line}


def test_every_key_of_every_table() -> None:
    for head, made in tables():
        section = reference().split(f"{head}\n")[1].split("\n\n")[0]
        for field in fields(made):
            hidden = "[training]" in head and field.name in job.FILLED_IN
            assert (f"  {field.name} = " in section) != hidden, (head, field.name)


def test_every_table_of_a_job() -> None:
    heads = reference()
    for table in job._TABLES:
        assert f"\n[{table}" in heads, table
    assert listed("top") == {f.name for f in fields(job.TopConfig)}


@pytest.mark.parametrize("name", sorted(job.built_in_jobs()))
def test_every_key_of_the_jobs_that_there_are(name: str) -> None:
    table = read_toml(job.built_in_jobs()[name])
    for key, value in table.items():
        if not isinstance(value, dict):
            assert key in listed("top")
        elif key == "sites":
            for site in value.values():
                assert set(site) <= listed("sites")
        elif key != "phenotypes":  # names of one's own
            assert set(value) <= listed(key), key


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("sites", "  split = "),
        ("sites", '  on_error = "refuse"  (one of "refuse", "skip")'),
        ("sites", "    max_sentences, max_valid_sentences, max_test_sentences: at most so many"),
        ("training", "  learning_rate = 0.001  (number)"),
        ("top", "  method = …  (text)"),
    ],
)
def test_defaults_and_meanings(key: str, line: str) -> None:
    assert any(row.startswith(line) for row in reference(key).splitlines())


def test_a_table_that_is_none() -> None:
    with pytest.raises(ConfigError, match="called 'site'; did you mean 'sites'"):
        reference("site")


def test_the_command(give: Any) -> None:
    code, out, _ = give("job", "keys", "tags")
    assert code == 0
    assert "min_mentions = 0" in out
    assert give("--version")[1] == f"fednotes {__version__}\n"
