"""What `fednotes job keys`, docs/job.md and the JSON schema say is what a job really
gets.

The expected values come from `parse_job`: a job of a method, a preset and a kind of
model that gives nothing else has the documented defaults, whatever route the documents
take to them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from filled_in import FILLED_IN

from fednotes import methods
from fednotes.core.settings import read_toml
from fednotes.jobs import kinds
from fednotes.jobs.job import Job
from fednotes.jobs.job_file import (
    TopConfig,
    built_in_jobs,
    load_job,
    parse_job,
)
from fednotes.jobs.reference import Key, Table, documented, reference, schema, tables
from fednotes.taggers import saving
from fednotes.taggers.tagger import PRESETS as TAGGERS

PAGE = Path(__file__).parents[2] / "docs" / "job.md"
CASES = [
    (name, preset) for name in methods.names() for preset in methods.find(name).presets
]


@cache
def all_tables() -> tuple[Table, ...]:
    """The tables of the reference, made once for all tests; tests only read them."""
    return tables()


@cache
def whole_schema() -> dict[str, Any]:
    """The schema of a job, made once for all tests; tests only read it."""
    return schema()


def kinds_of(method: str) -> list[str]:
    """The kinds of [model] that a method takes; [""] if it has no such key."""
    models = methods.find(method).list_models()
    return list(models) if models else list(saving.kinds())


MODELS = [(name, preset, kind) for name, preset in CASES for kind in kinds_of(name)]


def job(method: str, preset: str, kind: str = "", **more: Any) -> Job:
    """A job that gives as little as a job can."""
    holds = methods.find(method).holds
    sites = {name: {"path": "x"} for name in ("a", "b", "c")}
    data = {"synthetic": {}} if holds == "patients" else {"sites": sites}
    model = {"kind": kind} if kind else {}
    if kind == "prompt-bart" and preset == "best":
        # it has no CRF for what the preset asks
        more["training"] = {"unannotated": "pseudo"}
    table = {"method": method, "preset": preset, "model": model, **data, **more}
    return parse_job(table, "j", Path(), "j.toml")


def written(value: Any) -> Any:
    """A value as TOML would have it."""
    return list(value) if isinstance(value, tuple) else value


def flat(config: Any, before: str = "") -> dict[str, Any]:
    """The keys of a table and of the tables in it, with dots."""
    found: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            found |= flat(value, f"{before}{field.name}.")
        else:
            found[f"{before}{field.name}"] = written(value)
    return found


def training(made: Job) -> dict[str, Any]:
    config: Any = made.config
    return {
        field.name: written(getattr(config, field.name))
        for field in fields(config)
        if field.name not in FILLED_IN
    }


def table_of(heading: str) -> Table:
    (found,) = [table for table in all_tables() if table.heading == heading]
    return found


def value_of(key: Key, *labels: str) -> Any:
    """What a key's row says where these circumstances hold, the first of them that it
    names."""
    for label in labels:
        if label in key.elsewhere:
            return written(key.elsewhere[label])
    return written(key.default)


def model_heading(method: str, kind: str) -> str:
    return f'[model] kind = "{kind}"' if kind else f"[model] of {method}"


def documented_model(method: str, preset: str, kind: str) -> dict[str, Any]:
    """The [model] defaults that the reference gives a method, preset and kind."""
    alone = not kind
    label = f'preset "{preset}"' if alone else f'{method}, preset "{preset}"'
    labels = [method if preset == "best" else label]
    found = {}
    for table in all_tables():
        name, _, rest = table.heading.partition("]")
        if f"[model]{rest}" == model_heading(method, kind) and name.startswith(
            "[model"
        ):
            inner = name.removeprefix("[model").removeprefix(".")
            for key in table.keys:
                found[f"{inner}.{key.name}".removeprefix(".")] = value_of(key, *labels)
    return found


@pytest.mark.parametrize(("method", "preset"), CASES)
def test_training_defaults_are_the_effective_ones(method: str, preset: str) -> None:
    keys = table_of(f"[training] of {method}").keys
    shown = {key.name: value_of(key, f'preset "{preset}"') for key in keys}
    assert shown == training(job(method, preset))


@pytest.mark.parametrize("method", methods.names())
def test_training_defaults_with_differential_privacy_are_the_effective_ones(
    method: str,
) -> None:
    if methods.find(method).dp is None:
        pytest.skip("this method cannot train with differential privacy")
    more: dict[str, Any] = {
        "privacy": {"noise": 1.0, "counts": 1.0 if method == "phenotype" else 0.0}
    }
    made = job(
        method, "best", "token-classifier" if method == "distill" else "", **more
    )
    keys = table_of(f"[training] of {method}").keys
    assert {key.name: value_of(key, "with [privacy]") for key in keys} == training(made)


@pytest.mark.parametrize(("method", "preset", "kind"), MODELS)
def test_model_defaults_are_the_effective_ones(
    method: str, preset: str, kind: str
) -> None:
    """Also where the job leaves out the kind that the preset names."""
    shown = documented_model(method, preset, kind)
    shown.pop("kind", None)
    config = job(method, preset, kind).config.model
    made = flat(config)
    made.pop("kind", None)
    assert shown == made
    preset_model = methods.find(method).presets[preset].get("model", {})
    if kind and kind == preset_model.get("kind", saving.DEFAULT):
        assert job(method, preset).config.model == config


@pytest.mark.parametrize("tagger", TAGGERS)
def test_the_defaults_of_each_tagger_are_the_effective_ones(tagger: str) -> None:
    more = {"hashed_words": 8}
    table = {"method": "fedner", "model": {"tagger": tagger, **more}, "synthetic": {}}
    made = flat(parse_job(table, "j", Path(), "j.toml").config.model)
    keys = table_of('[model] kind = "tagger"').keys
    shown = {key.name: value_of(key, f'tagger = "{tagger}"') for key in keys}
    del shown["kind"]
    assert {**shown, **more, "tagger": tagger} == made


@pytest.mark.parametrize(("method", "preset"), CASES)
def test_the_schema_has_the_effective_defaults(method: str, preset: str) -> None:
    tables_of = schema_tables(method, preset)
    shown = {
        name: key.get("default")
        for name, key in tables_of["training"]["properties"].items()
    }
    assert shown == training(job(method, preset))
    for kind in kinds_of(method):
        (model,) = [
            each
            for each in tables_of["model"]["anyOf"]
            if each["properties"].get("kind", {"const": ""})["const"] == kind
        ]
        made = flat(job(method, preset, kind).config.model)
        made.pop("kind", None)
        shown = schema_defaults(model)
        shown.pop("kind", None)
        assert shown == made


def schema_defaults(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, key in table["properties"].items():
        if "properties" in key:
            found |= schema_defaults(key, f"{before}{name}.")
        else:
            found[f"{before}{name}"] = key.get("default")
    return found


def schema_tables(method: str, preset: str | None) -> dict[str, Any]:
    """The tables of all cases that hold for a job; `preset`: None where it names none."""
    given = {"method": method} | ({"preset": preset} if preset else {})
    found: dict[str, Any] = {}
    for case in whole_schema()["allOf"]:
        wanted, required = case["if"]["properties"], case["if"]["required"]
        holds = all(name in given for name in required) and all(
            given[name] == of["const"] for name, of in wanted.items() if name in given
        )
        if holds:
            assert not found.keys() & case["then"]["properties"].keys()
            found |= case["then"]["properties"]
    return found


def test_a_job_without_a_preset_has_the_preset_best() -> None:
    for method in methods.names():
        assert schema_tables(method, None) == schema_tables(method, "best")
    table = {"method": "finetune", "synthetic": {}}
    made: Any = parse_job(table, "j", Path(), "j.toml").config
    assert (made.cycles, made.learning_rate, made.batch) == (
        24,
        1e-3,
        "shared",
    )  # as in docs/bert.md
    assert made == job("finetune", "best").config


def test_other_tables_have_their_effective_defaults() -> None:
    made = job("finetune", "best")
    shown = {key.name: key.default for key in table_of("[federation]").keys}
    assert shown == {name: getattr(made.federation, name) for name in shown}
    site: Any = made.sites["a"]
    keys = table_of("[sites.NAME] of methods that read documents").keys
    for key in keys:
        if key.name != "path":
            assert key.default == getattr(site, key.name), key.name
    top = {
        key.name: key.default for key in table_of("at the top, before any table").keys
    }
    assert top["preset"] == "best"
    assert (top["seed"], top["threads"], top["conditions"]) == (
        made.seed,
        made.threads,
        made.conditions,
    )
    for preset in ("best", "paper"):
        patients: Any = job("phenotype", preset).kind_tables
        concepts = {
            key.name: value_of(
                key, f'preset "{preset}" of phenotype', "with [synthetic]"
            )
            for key in table_of("[concepts] of patients").keys
        }
        assert concepts == flat(patients.features)


def test_every_built_in_job_has_the_documented_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each [training] and [model] key that a job's file does not give."""
    for variable in (
        "FEDNOTES_CORPORA",
        "CLINIC",
        "ONTONOTES",
        "MIMIC_III",
        "I2B2_2010",
    ):
        monkeypatch.setenv(variable, str(tmp_path))
    for variable in ("I2B2_2012", "BERT_BASE"):
        monkeypatch.setenv(variable, str(tmp_path))
    for name, path in built_in_jobs().items():
        raw, made = read_toml(path), load_job(name)
        given = set(raw.get("training", {}))
        preset = raw.get("preset", "best")
        labels = ["with [privacy]"] if "privacy" in raw else []
        keys = table_of(f"[training] of {made.method}").keys
        found = training(made)
        for key in keys:
            if key.name not in given:
                expected = value_of(key, *labels, f'preset "{preset}"')
                assert expected == found[key.name], (name, key.name)
        model = raw.get("model", {})
        kind = getattr(made.config.model, "kind", "")
        # a light tagger of the job's own starts from its own defaults
        if "tagger" in model:
            rows = {key.name: key for key in table_of('[model] kind = "tagger"').keys}
            shown = {
                n: value_of(row, f'tagger = "{model["tagger"]}"')
                for n, row in rows.items()
            }
        else:
            shown = documented_model(made.method, preset, kind)
        for key_name, value in flat(made.config.model).items():
            if key_name.split(".")[0] not in {*model, "kind"} and not (
                key_name == "train_words" and model.get("word_vectors")
            ):
                assert shown[key_name] == value, (name, key_name)


def test_what_a_job_fills_in_is_no_key() -> None:
    for table in all_tables():
        if table.name == "training":
            assert not {key.name for key in table.keys} & FILLED_IN, table.heading
    for method, preset in CASES:
        assert (
            not schema_tables(method, preset)["training"]["properties"].keys()
            & FILLED_IN
        )


def test_every_key_says_what_it_does() -> None:
    """In one entry of its own, in the reference and in the schema."""
    for table in all_tables():
        for key in table.keys:
            assert re.fullmatch(r".{8,}[.]", key.meaning), (table.heading, key.name)
    for method, preset in CASES:
        for key in schema_tables(method, preset)["training"]["properties"].values():
            assert key["description"]


def test_no_field_is_described_that_a_class_does_not_have() -> None:
    classes = [
        TopConfig,
        *(methods.find(name).config_class for name in methods.names()),
    ]
    for cls in [*classes, *(kind.site_config for kind in kinds.all_kinds())]:
        names = {field.name for field in fields(cls)}
        about, meanings = documented(cls)
        assert set(meanings) >= names - {"model"}, cls
        assert "Attributes" not in about


def test_the_page_has_a_row_for_each_key() -> None:
    page = PAGE.read_text("utf-8")
    for table in all_tables():
        section = page.split(f"## {table.heading}\n")[1].split("\n## ")[0]
        rows = [line for line in section.splitlines() if line.startswith("| `")]
        assert [row.split("`")[1] for row in rows] == [key.name for key in table.keys]
        columns = {
            line.replace(r"\|", "").count("|")
            for line in section.splitlines()
            if "|" in line
        }
        assert len(columns) == 1, table.heading
    row = next(
        line
        for line in page.split("## [training] of finetune")[1].splitlines()
        if "`cycles`" in line
    )
    assert row.startswith(
        '| `cycles` | whole number, at least 1 | `24` | `6`: preset "paper" | '
    )


def test_the_text_has_every_default_and_where_it_differs() -> None:
    lines = reference("training").split("[training] of finetune\n")[1].splitlines()
    at = lines.index("  cycles = 24  (whole number, at least 1)")
    assert lines[at + 1] == '      6: preset "paper"'
    assert lines[at + 2].startswith("      T, the number of cycles.")
    head = '[model] kind = "tagger"\n'
    text = reference("model").split(head)[1]
    assert '  tagger = "elmoner"  (text)' in text
    assert json.dumps(TAGGERS["gram-cnn"].cnn_widths) + ': tagger = "gram-cnn"' in text
    required = [
        key.name
        for key in table_of("at the top, before any table").keys
        if key.default is MISSING
    ]
    assert required == ["method"]
    assert "  method = (required)  (text)" in reference("top")
