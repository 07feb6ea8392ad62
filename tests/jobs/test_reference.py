"""The documented keys and defaults of a job are the effective ones.

The expected values come from `parse_job`: a job of a method, a preset and a kind of
model that sets nothing else has the documented defaults, however they are documented
(`fednotes job keys`, docs/job.md and the JSON schema).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from applications import loadable, needs_app
from filled_in import FILLED_IN
from other_packages import hiding_other_packages, leave_out_others

from fednotes import methods
from fednotes.core.settings import read_toml
from fednotes.jobs import kinds
from fednotes.jobs.built_in_jobs import list_built_in_jobs
from fednotes.jobs.field_docs import read_docstring
from fednotes.jobs.job import Job
from fednotes.jobs.job_file import TopConfig, load_job, parse_job
from fednotes.jobs.reference import Key, Table, is_known_key, list_tables
from fednotes.jobs.reference_text import format_tables
from fednotes.jobs.schema import make_schema
from fednotes.taggers import saving
from fednotes.taggers.tagger import PRESETS as TAGGERS

PAGE = Path(__file__).parents[2] / "docs" / "job.md"


@cache
def all_tables() -> tuple[Table, ...]:
    """Return the tables of the reference, made once; tests only read them."""
    with hiding_other_packages():
        return list_tables()


@cache
def job_schema() -> dict[str, Any]:
    """Return the schema of a job, made once; tests only read it."""
    with hiding_other_packages():
        return make_schema()


def kinds_of_model(method: str) -> list[str]:
    """Return the kinds of [model] of a method; [""] if it has no such key."""
    models = methods.find_method(method).list_models()
    return list(models) if models else MODEL_KINDS


METHODS = leave_out_others("methods", methods.list_method_names())
MODEL_KINDS = leave_out_others("taggers", saving.list_model_kinds())
PRESETS = [
    (name, preset) for name in METHODS for preset in methods.find_method(name).presets
]
MODELS = [
    (name, preset, kind) for name, preset in PRESETS for kind in kinds_of_model(name)
]
PRIVATE_METHODS = [name for name in METHODS if methods.find_method(name).dp]


def minimal_job(method: str, preset: str, kind: str = "", **tables: Any) -> Job:
    """Return a job that sets as little as a job can."""
    sites = {name: {"path": "x"} for name in ("a", "b", "c")}
    generates = methods.find_method(method).holds == "patients"
    data = {"synthetic": {}} if generates else {"sites": sites}
    model = {"kind": kind} if kind else {}
    settings = {
        field.name for field in fields(methods.find_method(method).config_class)
    }
    is_soft = not kind or saving.find_config_class(kind).trains_on_posteriors
    if preset == "best" and "unannotated" in settings and not is_soft:
        # It has no posterior for what the preset needs.
        tables["training"] = {"unannotated": "pseudo"}
    table = {"method": method, "preset": preset, "model": model, **data, **tables}
    return parse_job(table, "j", Path(), "j.toml")


# ---- values as tables have them ------------------------------------------------------


def as_toml(value: Any) -> Any:
    """Return a value as TOML would have it."""
    return list(value) if isinstance(value, tuple) else value


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of a table and of the tables in it, by dotted keys."""
    values: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            values |= flatten(value, f"{prefix}{field.name}.")
        else:
            values[f"{prefix}{field.name}"] = as_toml(value)
    return values


def flatten_without_kind(config: Any) -> dict[str, Any]:
    return {key: value for key, value in flatten(config).items() if key != "kind"}


def training_values(job: Job) -> dict[str, Any]:
    config: Any = job.config
    return {
        field.name: as_toml(getattr(config, field.name))
        for field in fields(config)
        if field.name not in FILLED_IN
    }


# ---- what the reference says ---------------------------------------------------------


def find_table(heading: str) -> Table:
    (table,) = [table for table in all_tables() if table.heading == heading]
    return table


def documented_value(key: Key, *labels: str) -> Any:
    """Return a key's value in the first of these circumstances that it lists."""
    for label in labels:
        if label in key.elsewhere:
            return as_toml(key.elsewhere[label])
    return as_toml(key.default)


def documented_values(heading: str, *labels: str) -> dict[str, Any]:
    return {
        key.name: documented_value(key, *labels) for key in find_table(heading).keys
    }


def documented_model(method: str, preset: str, kind: str) -> dict[str, Any]:
    """Return the [model] defaults that the reference lists for a kind of model."""
    if preset == "best":
        label = method
    elif kind:
        label = f'{method}, preset "{preset}"'
    else:
        label = f'preset "{preset}"'
    heading = f'[model] with kind = "{kind}"' if kind else f"[model] for {method}"
    values = {}
    for table in all_tables():
        name, _, remainder = table.heading.partition("]")
        if f"[model]{remainder}" == heading and name.startswith("[model"):
            inner = name.removeprefix("[model").removeprefix(".")
            for key in table.keys:
                dotted = f"{inner}.{key.name}".removeprefix(".")
                values[dotted] = documented_value(key, label)
    values.pop("kind", None)
    return values


# ---- defaults ------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "preset"), PRESETS)
def test_training_defaults_are_the_effective_ones(method: str, preset: str) -> None:
    documented = documented_values(f"[training] for {method}", f'preset "{preset}"')
    assert documented == training_values(minimal_job(method, preset))


@pytest.mark.parametrize("method", PRIVATE_METHODS)
def test_training_defaults_with_differential_privacy_are_the_effective_ones(
    method: str,
) -> None:
    privacy = {"noise": 1.0, "counts": 1.0 if method == "phenotype" else 0.0}
    kind = "token-classifier" if method == "distill" else ""
    job = minimal_job(method, "best", kind, privacy=privacy)
    documented = documented_values(f"[training] for {method}", "with [privacy]")
    assert documented == training_values(job)


@pytest.mark.parametrize(("method", "preset", "kind"), MODELS)
def test_model_defaults_are_the_effective_ones(
    method: str, preset: str, kind: str
) -> None:
    config = minimal_job(method, preset, kind).config.model
    assert documented_model(method, preset, kind) == flatten_without_kind(config)


def preset_kind(method: str, preset: str) -> str:
    """Return the kind of model that a preset names."""
    model = methods.find_method(method).presets[preset].get("model", {})
    return str(model.get("kind", saving.DEFAULT))


@pytest.mark.parametrize(("method", "preset"), PRESETS)
def test_a_job_may_leave_out_the_kind_that_its_preset_names(
    method: str, preset: str
) -> None:
    kind = preset_kind(method, preset)
    if kind in kinds_of_model(method):
        config = minimal_job(method, preset, kind).config.model
        assert minimal_job(method, preset).config.model == config


@pytest.mark.parametrize("tagger", TAGGERS)
def test_the_defaults_of_each_tagger_are_the_effective_ones(tagger: str) -> None:
    model = {"tagger": tagger, "hashed_words": 8}
    table = {"method": "fedner", "model": model, "synthetic": {}}
    config = parse_job(table, "j", Path(), "j.toml").config.model
    documented = documented_values(
        '[model] with kind = "tagger"', f'tagger = "{tagger}"'
    )
    del documented["kind"]
    assert documented | model == flatten(config)


def test_a_job_without_a_preset_uses_the_preset_best() -> None:
    table = {"method": "finetune", "synthetic": {}}
    config: Any = parse_job(table, "j", Path(), "j.toml").config
    assert config == minimal_job("finetune", "best").config
    # as in docs/bert.md
    expected = (24, 1e-3, "shared")
    assert (config.cycles, config.learning_rate, config.batch) == expected


def test_defaults_of_the_federation_are_the_effective_ones() -> None:
    federation = minimal_job("finetune", "best").federation
    assert documented_values("[federation]") == flatten(federation)


def test_defaults_of_a_site_are_the_effective_ones() -> None:
    site = minimal_job("finetune", "best").sites["a"]
    documented = documented_values("[sites.NAME] for methods that read documents")
    assert documented | {"path": "x"} == flatten(site)


def test_defaults_outside_tables_are_the_effective_ones() -> None:
    job = minimal_job("finetune", "best")
    documented = documented_values("Keys before the first table")
    assert documented["preset"] == "best"
    assert (documented["seed"], documented["threads"]) == (job.seed, job.threads)
    assert documented["conditions"] == list(job.conditions)


@pytest.mark.parametrize("preset", ["best", "paper"])
def test_defaults_of_concepts_are_the_effective_ones(preset: str) -> None:
    needs_app("phenotyping")
    tables: Any = minimal_job("phenotype", preset).kind_tables
    documented = documented_values(
        "[concepts] for patients", f'preset "{preset}" of phenotype', "with [synthetic]"
    )
    assert documented == flatten(tables.features)


# ---- built-in jobs -------------------------------------------------------------------


@dataclass(frozen=True)
class BuiltIn:
    """A built-in job, and its tables as they are written."""

    job: Job
    table: Mapping[str, Any]

    @property
    def preset(self) -> str:
        return str(self.table.get("preset", "best"))


@pytest.fixture(params=loadable(list_built_in_jobs()))
def built_in(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> BuiltIn:
    """Each built-in job; its environment variables name an empty folder."""
    path = list_built_in_jobs()[request.param]
    for variable in re.findall(r"\$(\w+)", path.read_text("utf-8")):
        monkeypatch.setenv(variable, str(tmp_path))
    return BuiltIn(load_job(request.param), read_toml(path))


def test_a_built_in_job_has_the_documented_training_defaults(built_in: BuiltIn) -> None:
    labels = ["with [privacy]"] if "privacy" in built_in.table else []
    heading = f"[training] for {built_in.job.method}"
    documented = documented_values(heading, *labels, f'preset "{built_in.preset}"')
    values = training_values(built_in.job)
    job_values = built_in.table.get("training", {})
    assert documented.keys() == values.keys()
    for key in documented.keys() - job_values.keys():
        assert documented[key] == values[key], key


def test_a_built_in_job_has_the_documented_model_defaults(built_in: BuiltIn) -> None:
    job_values = built_in.table.get("model", {})
    config = built_in.job.config.model
    if "tagger" in job_values:
        # A light tagger of the job's own starts from its own defaults.
        heading = '[model] with kind = "tagger"'
        documented = documented_values(heading, f'tagger = "{job_values["tagger"]}"')
    else:
        kind = getattr(config, "kind", "")
        documented = documented_model(built_in.job.method, built_in.preset, kind)
    for key, value in flatten_without_kind(config).items():
        is_written = key.split(".")[0] in job_values
        trains_words = key == "train_words" and job_values.get("word_vectors")
        if not is_written and not trains_words:
            assert documented[key] == value, key


# ---- the JSON schema -----------------------------------------------------------------


def schema_tables(method: str, preset: str | None) -> dict[str, Any]:
    """Return the tables of all cases that hold for a job.

    Args:
        method: The job's method.
        preset: The job's preset; None if the job does not name one.
    """
    job = {"method": method} | ({"preset": preset} if preset else {})
    tables: dict[str, Any] = {}
    for case in job_schema()["allOf"]:
        properties = case["if"]["properties"]
        has_required = all(name in job for name in case["if"]["required"])
        matches = all(
            job[name] == value["const"]
            for name, value in properties.items()
            if name in job
        )
        if has_required and matches:
            assert not tables.keys() & case["then"]["properties"].keys()
            tables |= case["then"]["properties"]
    return tables


def schema_defaults(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the defaults of a table and of the tables in it, by dotted keys."""
    defaults: dict[str, Any] = {}
    for name, key in table["properties"].items():
        if "properties" in key:
            defaults |= schema_defaults(key, f"{prefix}{name}.")
        else:
            defaults[f"{prefix}{name}"] = key.get("default")
    return defaults


@pytest.mark.parametrize(("method", "preset"), PRESETS)
def test_the_schema_has_the_effective_training_defaults(
    method: str, preset: str
) -> None:
    defaults = schema_defaults(schema_tables(method, preset)["training"])
    assert defaults == training_values(minimal_job(method, preset))


@pytest.mark.parametrize(("method", "preset", "kind"), MODELS)
def test_the_schema_has_the_effective_model_defaults(
    method: str, preset: str, kind: str
) -> None:
    (model,) = [
        each
        for each in schema_tables(method, preset)["model"]["anyOf"]
        if each["properties"].get("kind", {"const": ""})["const"] == kind
    ]
    defaults = schema_defaults(model)
    defaults.pop("kind", None)
    config = minimal_job(method, preset, kind).config.model
    assert defaults == flatten_without_kind(config)


@pytest.mark.parametrize("method", METHODS)
def test_the_schema_of_a_job_without_a_preset_has_the_defaults_of_best(
    method: str,
) -> None:
    assert schema_tables(method, None) == schema_tables(method, "best")


# ---- keys and meanings ---------------------------------------------------------------


def test_the_reference_leaves_out_what_a_job_fills_in() -> None:
    for table in all_tables():
        if table.name == "training":
            assert not {key.name for key in table.keys} & FILLED_IN, table.heading


@pytest.mark.parametrize(("method", "preset"), PRESETS)
def test_the_schema_leaves_out_what_a_job_fills_in(method: str, preset: str) -> None:
    training = schema_tables(method, preset)["training"]["properties"]
    assert not training.keys() & FILLED_IN


def test_every_key_of_the_reference_has_a_meaning() -> None:
    for table in all_tables():
        for key in table.keys:
            assert re.fullmatch(r".{8,}[.]", key.meaning), (table.heading, key.name)


@pytest.mark.parametrize(("method", "preset"), PRESETS)
def test_every_training_key_of_the_schema_has_a_meaning(
    method: str, preset: str
) -> None:
    for key in schema_tables(method, preset)["training"]["properties"].values():
        assert key["description"]


def test_docstrings_describe_every_field_of_a_class() -> None:
    classes = [TopConfig]
    classes += [methods.find_method(name).config_class for name in METHODS]
    classes += [kind.site_config for kind in kinds.list_kinds()]
    for cls in classes:
        names = {field.name for field in fields(cls)}
        about, meanings = read_docstring(cls)
        assert set(meanings) >= names - {"model"}, cls
        assert "Attributes" not in about


@pytest.mark.parametrize(
    ("method", "key"),
    [
        ("fedner", "seed"),
        ("fedner", "training.epochs"),
        ("fedner", "model.lstm_units"),
        ("fedner", "model.kind"),
        ("fedner", "sites.mercy.label_map.ADR"),
        ("fedner", "tags.design"),
        ("fedner", "federation.secure_sum"),
    ],
)
def test_a_key_that_a_job_may_have_is_known(method: str, key: str) -> None:
    assert is_known_key(method, key)


@pytest.mark.parametrize(
    ("method", "key"),
    [
        ("fedner", "seed.x"),
        ("fedner", "training.epoch"),
        ("fedner", "training.seed"),
        ("fedner", "model.rank"),
        ("fedner", "sites.mercy.notes"),
        ("fedner", "concepts.dictionary"),
        ("fedner", "nothing"),
    ],
)
def test_a_key_that_no_job_of_the_method_may_have_is_unknown(
    method: str, key: str
) -> None:
    assert not is_known_key(method, key)


# ---- page and text -------------------------------------------------------------------


def page_section(heading: str) -> list[str]:
    page = PAGE.read_text("utf-8")
    return page.split(f"## {heading}\n")[1].split("\n## ")[0].splitlines()


def test_the_page_has_a_row_for_each_key() -> None:
    for table in all_tables():
        rows = [line for line in page_section(table.heading) if line.startswith("| `")]
        keys = [row.split("`")[1] for row in rows]
        assert keys == [key.name for key in table.keys]


def test_all_rows_of_a_table_of_the_page_have_the_same_columns() -> None:
    for table in all_tables():
        rows = [line for line in page_section(table.heading) if "|" in line]
        columns = {row.replace(r"\|", "").count("|") for row in rows}
        assert len(columns) == 1, table.heading


def test_a_row_of_the_page_has_type_default_and_other_defaults() -> None:
    (row,) = [
        line for line in page_section("[training] for finetune") if "| `cycles`" in line
    ]
    start = '| `cycles` | whole number, at least 1 | `24` | `6`: preset "paper" | '
    assert row.startswith(start)


def test_the_text_has_type_default_other_defaults_and_meaning() -> None:
    section = format_tables("training").split("[training] for finetune\n")[1]
    lines = section.splitlines()
    start = lines.index("  cycles = 24  (whole number, at least 1)")
    assert lines[start + 1] == '      6: preset "paper"'
    assert lines[start + 2].startswith("      T, the number of cycles.")


def test_the_text_has_the_values_of_each_architecture() -> None:
    section = format_tables("model").split('[model] with kind = "tagger"\n')[1]
    assert '  tagger = "elmoner"  (text)' in section
    widths = json.dumps(TAGGERS["gram-cnn"].cnn_widths)
    assert f'{widths}: tagger = "gram-cnn"' in section


def test_method_is_the_only_required_key() -> None:
    keys = find_table("Keys before the first table").keys
    assert [key.name for key in keys if key.default is MISSING] == ["method"]
    assert "  method = (required)  (text)" in format_tables("top")
