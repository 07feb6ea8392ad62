"""The reference of job keys is whole: held against the tables, and the jobs that there are."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from fednotes import __version__
from fednotes.core.errors import ConfigError
from fednotes.core.settings import read_toml
from fednotes.jobs import job_file as job
from fednotes.jobs.job_file import markdown, reference, tables


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


def of_method(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """What the schema says of the tables of a method's jobs."""
    cases = {c["if"]["properties"]["method"]["const"]: c["then"] for c in schema["allOf"]}
    found: dict[str, Any] = cases[name]["properties"]
    return found


def test_the_page_is_of_these_tables() -> None:
    page = Path(__file__).parents[2] / "docs" / "job.md"
    assert page.read_text("utf-8") == markdown(), "fednotes job keys --markdown > docs/job.md"


@pytest.mark.parametrize("name", sorted(job.built_in_jobs()))
def test_the_schema_knows_the_jobs_that_there_are(name: str, schema: dict[str, Any]) -> None:
    """Every key of a job is one of the schema, for its method, and a value of its type."""
    table = read_toml(job.built_in_jobs()[name])
    assert set(table) <= set(schema["properties"])
    known = of_method(schema, table["method"])
    for site in table.get("sites", {}).values():
        assert set(site) <= set(known["sites"]["additionalProperties"]["properties"])
    for key in ("training", "synthetic"):
        assert set(table.get(key, {})) <= set(known[key]["properties"])
    models = [set(model["properties"]) for model in known["model"]["anyOf"]]
    assert any(set(table.get("model", {})) <= keys for keys in models)


def test_the_schema_has_bounds_and_choices(schema: dict[str, Any]) -> None:
    known = of_method(schema, "fedner")
    site = known["sites"]["additionalProperties"]
    assert site["properties"]["mask_overlap"]["minimum"] == 0
    assert site["additionalProperties"] is False
    assert site["properties"]["on_error"]["enum"] == ["refuse", "skip"]
    assert schema["required"] == ["method"]
    assert "seed" not in known["training"]["properties"]


@pytest.fixture
def schema(give: Any) -> dict[str, Any]:
    code, out, _ = give("job", "schema")
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    return found
