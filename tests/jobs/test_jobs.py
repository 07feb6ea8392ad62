"""Job files: their content, messages about mistakes, and the reference of keys."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from applications import has_app, loadable
from filled_in import FILLED_IN
from other_packages import hiding_other_packages
from time_limits import processor_time_below

import fednotes as fn
from fednotes import __version__, methods
from fednotes.core.errors import ConfigError
from fednotes.core.settings import read_toml
from fednotes.core.types import SiteData, TagSet
from fednotes.jobs.declaration import PLACE_KEYS
from fednotes.jobs.job import (
    Job,
    SilosConfig,
    TagsConfig,
    load_sites,
)
from fednotes.jobs.job_file import (
    TopConfig,
    list_built_in_jobs,
    list_table_names,
    load_job,
    load_table,
    parse_job,
)
from fednotes.jobs.local_files import list_site_path_keys
from fednotes.jobs.reference import list_tables
from fednotes.jobs.reference_text import format_page, format_tables
from fednotes.methods import fedner, find_method, list_method_names
from fednotes.taggers.saving import find_config_class, list_model_kinds

BASE: dict[str, Any] = {"method": "fedner", "model": {"hashed_words": 8}}


def job(**changes: Any) -> Job:
    """Return a job of two generated sites with changed keys; None leaves a key out."""
    table = {**BASE, "synthetic": {"sites": 2}, **changes}
    table = {key: value for key, value in table.items() if value is not None}
    return parse_job(table, "j", Path("/x"), "j.toml")


def with_site(**site: Any) -> Job:
    return job(synthetic=None, sites={"a": site})


def test_a_job_has_the_values_of_its_file() -> None:
    parsed = job(
        title="T",
        seed=3,
        threads=2,
        conditions=["pooled", "alone"],
        training={"private": ["crf"], "epochs": 4},
        model={"tagger": "cnn-crf", "hashed_words": 8},
    )
    config: Any = parsed.config
    assert (parsed.title, parsed.seed, parsed.threads) == ("T", 3, 2)
    assert (config.private, config.epochs, config.seed) == (("crf",), 4, 3)
    assert config.model.tagger == "cnn-crf"
    assert parsed.module is fedner.METHOD


def test_conditions_are_listed_in_the_order_in_which_they_run() -> None:
    assert job(conditions=["pooled", "alone"]).conditions == ("alone", "pooled")


def test_the_title_of_a_job_defaults_to_its_name() -> None:
    assert job().title == "j"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sead": 1}, r"unknown key 'sead': did you mean 'seed'"),
        ({"method": None}, "the key 'method' is missing"),
        ({"method": "fednr"}, "unknown method 'fednr': did you mean 'fedner'"),
        ({"preset": "papr"}, "preset = 'papr': did you mean 'paper'"),
        ({"seed": "1"}, "seed = '1': expected a whole number"),
        ({"threads": 0}, "threads = 0: expected 1 to"),
        ({"conditions": []}, "conditions = .*: name some of alone, federated, pooled"),
        ({"conditions": ["alon"]}, "conditions has 'alon': did you mean 'alone'"),
        (
            {"training": {"epoch": 1}},
            r"\[training\]: unknown key 'epoch': did you mean 'epochs'",
        ),
        ({"training": {"epochs": 0}}, r"\[training\]: epochs = 0"),
        ({"training": {"learning_rate": float("nan")}}, "learning_rate = nan"),
        ({"training": {"private": ["lstn"]}}, "no layer is called 'lstn'"),
        ({"training": {"seed": 1}}, "'seed' does not belong here"),
        ({"training": 3}, r"training must be a table \[training\], not a single value"),
        ({"model": "x"}, r"model must be a table \[model\], not a single value"),
        ({"model": {"lstm": 3}}, r"\[model\]: unknown key 'lstm': known: "),
        (
            {"model": {"lstm_unit": 3}},
            r"\[model\]: unknown key .*: did you mean 'lstm_units'",
        ),
        (
            {"model": {"lstm_units": "3"}},
            r"\[model\]: lstm_units = '3': expected a whole number",
        ),
        (
            {"model": {"tagger": "elmonr"}},
            "unknown tagger 'elmonr': did you mean 'elmoner'",
        ),
        ({"model": {"characters": False}}, "has no input"),
        ({"synthetic": 3}, r"synthetic must be a table \[synthetic\]"),
        ({"synthetic": {"site": 3}}, "unknown key 'site': did you mean 'sites'"),
        ({"synthetic": {"sites": 0}}, "sites = 0: expected at least 1"),
        (
            {"synthetic": None},
            r"give either \[sites\.NAME\] tables or a \[synthetic\] table",
        ),
        ({"sites": {"a": {"path": "x"}}}, "give either"),
        ({"synthetic": None, "sites": {}}, r"expected one table \[sites\.NAME\]"),
        (
            {"synthetic": None, "sites": {"a": 1}},
            r"sites.a must be a table \[sites.a\]",
        ),
        (
            {"synthetic": None, "sites": [{"path": "x"}]},
            r"sites is an array: write \[sites\.NAME\]",
        ),
        ({"training": [{}]}, r"training is an array: write \[training\]"),
        ({"synthetic": None, "sites": {"a b": {"path": "x"}}}, "letters, digits"),
        ({"synthetic": None, "sites": {"../x": {"path": "x"}}}, "letters, digits"),
        (
            {"synthetic": None, "sites": {"pooled": {"path": "x"}}},
            "this name is already used",
        ),
        (
            {"synthetic": None, "sites": {"Pooled": {"path": "x"}}},
            r"already used \('pooled'",
        ),
        # It would replace the row of the means in tables.
        (
            {"synthetic": None, "sites": {"mean": {"path": "x"}}},
            r"already used \('mean'",
        ),
        (
            {
                "synthetic": None,
                "sites": {"mercy": {"path": "x"}, "Mercy": {"path": "y"}},
            },
            r"\[sites\.Mercy\]: this name is already used \('mercy'; case is ignored\): choose another",
        ),
        ({"tags": 3}, r"tags must be a table \[tags\], not a single value"),
        ({"tags": {"desing": "given"}}, "unknown key 'desing': did you mean 'design'"),
        (
            {"tags": {"design": "disjunct"}},
            "design = 'disjunct': expected one of 'given'",
        ),
        (
            {"tags": {"design": "disjoint", "types": ["A", "A"]}},
            "is listed twice: list each type once",
        ),
        ({"tags": {"design": "disjoint", "per_site": -1}}, "per_site = -1"),
        (
            {"tags": {"design": "appendix-d", "per_site": 1}},
            "per_site = 1 needs design",
        ),
        ({"tags": {"design": "disjoint", "runs_per_sampling": 0}}, "at least 1"),
        ({"tags": {"design": "given"}}, "generated sites already have types"),
        (
            {
                "tags": {"design": "disjoint"},
                "synthetic": None,
                "sites": {"a": {"path": "x", "test_types": ["A"]}},
            },
            r"\[sites\.a\]: test_types cannot be combined with design = 'disjoint'",
        ),
        ({"silos": 3}, r"silos must be a table \[silos\], not a single value"),
        (
            {"silos": {"numbr": 3}},
            r"\[silos\]: unknown key 'numbr': did you mean 'number'",
        ),
        ({"silos": {"number": 0}}, r"\[silos\]: number = 0: expected at least 1"),
        (
            {"silos": {"by": "ward"}},
            "by = 'ward': expected one of 'patient', 'document'",
        ),
        (
            {"silos": {}, "tags": {"design": "disjoint"}},
            r"\[silos\]: silos annotate the same types, but design = 'disjoint' samples other types",
        ),
    ],
)
def test_a_mistake_is_reported_with_its_table_and_key(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=r"j\.toml.*" + message):
        job(**changes)


def test_names_of_many_sites_are_compared_in_linear_time() -> None:
    """A job file of 1 MB has room for 70,000 sites."""
    sites = {f"s{number}": {"path": "x"} for number in range(20_000)}
    refusal = pytest.raises(ConfigError, match="already used")
    with processor_time_below(10), refusal:  # it was half a minute, for 70,000 six
        fn.job({"method": "fedner", "sites": {**sites, "S0": {"path": "x"}}})


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ({}, "give either `path`"),
        ({"path": "x", "train": "y", "test": "z"}, "give either `path`"),
        ({"train": "x"}, "`train` is given without `test`"),
        ({"path": "x", "fraction": 0}, "fraction = 0"),
        ({"path": "x", "fraction": 1.5}, r"fraction = 1\.5: expected at most 1"),
        ({"path": "x", "mask_overlap": -0.1}, "mask_overlap"),
        (
            {"path": "x", "valid_fraction": 0.5, "test_fraction": 0.5},
            "must be below 1, or no training data remain",
        ),
        ({"path": "x", "scheme": "BILOU"}, "scheme = 'BILOU': expected one of 'BIO'"),
        ({"path": "x", "flatten": "inner"}, "flatten = 'inner'"),
        ({"path": "x", "lable_map": {}}, "did you mean 'label_map'"),
        (
            {"path": "x", "label_map": {"ADR": "O"}},
            "maps 'ADR' to 'O', which is a tag.*drops a label",
        ),
        (
            {"path": "x", "label_map": {"a": "", "b": "I-Drug"}},
            "maps 'b' to 'I-Drug', which is a tag",
        ),
        ({"path": "x", "types": "Drug"}, "types = 'Drug': expected a list"),
        (
            {"path": "x", "test_types": ["A", "A"]},
            r"test_types = \['A', 'A'\]: 'A' is listed twice",
        ),
        (
            {"path": "x", "max_sentences": -1},
            "max_sentences = -1: expected at least 0",
        ),
        ({"path": "x", "where": "nw"}, "where = 'nw': expected KEY=VALUE"),
        ({"path": "x", "share": "4/3"}, "share = '4/3': expected a part and"),
        ({"path": "x", "share": "0/3"}, "share = '0/3': expected a part and"),
        ({"path": "x", "share": "a third"}, "share = 'a third': expected a part and"),
        (
            {"train": "x", "test": "y", "share": "1/3"},
            "'1/3' divides the documents of `path`, which is not",
        ),
    ],
)
def test_a_mistake_in_a_site_is_reported_with_the_site(
    site: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=r"j\.toml \[sites\.a\].*" + message):
        with_site(**site)


TAGS = {"design": "appendix-d", "types": ["A", "B"], "runs_per_sampling": 3}


def test_tags_and_silos_are_read_into_their_classes() -> None:
    tags = TagsConfig("appendix-d", ("A", "B"), runs_per_sampling=3)
    assert job(tags=TAGS).tags == tags
    assert job(silos={}).silos == SilosConfig(5, None)
    assert job(silos={"number": 2, "by": "patient"}).silos == SilosConfig(2, "patient")
    assert (job().tags, job().silos, job().kind.name) == (None, None, "documents")


def test_consecutive_seeds_share_a_sampling_of_types() -> None:
    tags = TagsConfig(**TAGS)
    assert tags.is_sampled
    samplings = [tags.find_sampling_number(seed) for seed in range(-3, 8)]
    assert samplings == [-1, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3]


def test_the_fingerprint_covers_every_table() -> None:
    changes: tuple[dict[str, Any], ...] = (
        {"seed": 2},
        {"training": {"epochs": 9}},
        {"synthetic": {"sites": 3}},
        {"tags": TAGS},
        {"silos": {}},
    )
    changed = [job(**change).fingerprint for change in changes]
    assert len({job().fingerprint, *changed}) == 6
    assert job().fingerprint == job().fingerprint


def test_settings_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(
        'method = "fedner"\n[model]\nhashed_words = 8\n[synthetic]\nsites = 2\n'
    )
    settings = ("seed=5", "training.private=['crf']", "training.epochs=2")
    changed: Any = load_job(path, settings)
    assert (changed.name, changed.seed, changed.config.private) == ("my", 5, ("crf",))
    assert changed.folder == tmp_path
    assert changed.fingerprint != load_job(path).fingerprint
    with pytest.raises(
        ConfigError, match=r"my\.toml \[training\]: unknown key 'epoch'"
    ):
        load_job(path, ("training.epoch=2",))


def test_built_in_jobs_are_listed_without_grids() -> None:
    assert "demo" in list_built_in_jobs()
    assert not [
        name for name in list_built_in_jobs() if "table" in name or "fig" in name
    ]


def test_settings_of_a_site_that_the_job_lacks_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('method = "fedner"\n[sites.north]\npath = "a"\n', "utf-8")
    message = "the job has no site 'nroth': did you mean 'north'?"
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_job(path, ("sites.nroth.path=b",))
    table, _ = load_table(path, ("sites.*.path=b", "sites.south={path='c'}"))
    assert table["sites"] == {"north": {"path": "b"}, "south": {"path": "c"}}


def test_a_built_in_job_takes_precedence_over_a_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_job("demo").synthetic is not None


def test_a_misspelt_job_gets_the_nearest_name_of_a_built_in_job() -> None:
    with pytest.raises(ConfigError, match="or built-in job: did you mean 'demo'"):
        load_job("dmo")


# ---- environment variables -----------------------------------------------------------


def test_an_unset_variable_of_the_model_is_reported_with_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("VECTORS", "NOTES", "HELD_OUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KNOWN", "/known")
    sites = {
        "north": {"path": "$NOTES/north.conll"},
        "south": {"train": "${NOTES}/south.conll", "test": "$HELD_OUT/south.conll"},
        "west": {"path": "$KNOWN/west.conll"},
    }
    with pytest.raises(ConfigError) as error:
        job(synthetic=None, sites=sites, model={"word_vectors": "$VECTORS/v.txt"})
    assert str(error.value) == (
        "environment variables are not set: VECTORS (model.word_vectors), NOTES "
        "(sites.north.path, sites.south.train), HELD_OUT (sites.south.test); for "
        "example: export VECTORS=/path/to/folder NOTES=/path/to/folder "
        "HELD_OUT=/path/to/folder"
    )


def test_unset_variables_of_sites_are_reported_together_when_notes_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NOTES", "HELD_OUT"):
        monkeypatch.delenv(name, raising=False)
    sites = {
        "north": {"path": "$NOTES/north.conll"},
        "south": {"train": "$NOTES/south.conll", "test": "$HELD_OUT/south.conll"},
    }
    parsed = job(synthetic=None, sites=sites)
    with pytest.raises(ConfigError) as error:
        load_sites(parsed)
    assert str(error.value) == (
        "environment variables are not set: NOTES (sites.north.path, "
        "sites.south.train), HELD_OUT (sites.south.test); for example: export "
        "NOTES=/path/to/folder HELD_OUT=/path/to/folder"
    )


def test_one_unset_variable_is_reported_with_every_key_that_uses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NOTES", raising=False)
    sites = {name: {"path": f"$NOTES/{name}.conll"} for name in ("north", "south")}
    with pytest.raises(ConfigError) as error:
        load_sites(job(synthetic=None, sites=sites))
    assert str(error.value) == (
        "sites.north.path, sites.south.path: the environment variable NOTES is not "
        "set; for example: export NOTES=/path/to/folder"
    )


def test_unset_variables_of_notes_and_of_excluded_corpora_are_reported_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NOTES", "MORE", "JUDGED"):
        monkeypatch.delenv(name, raising=False)
    site = {"paths": ["$NOTES/a.csv", "$MORE/b.csv"], "exclude": ["$JUDGED/corpus"]}
    table = {"method": "pretrain", "sites": {"north": site}}
    with pytest.raises(ConfigError) as error:
        load_sites(parse_job(table, "j", Path("/x"), "j.toml"))
    assert (
        "not set: JUDGED (sites.north.exclude), NOTES (sites.north.paths), MORE "
        "(sites.north.paths); for example: export JUDGED="
    ) in str(error.value)


@pytest.mark.parametrize(
    ("method", "key", "answer"),
    [
        ("finetune", "epochs", "the length of training is 'cycles' with"),
        ("finetune", "num_train_epochs", "the length of training is 'cycles' with"),
        ("finetune", "rounds", "the length of training is 'cycles' with"),
        ("fedner", "cycles", "the length of training is 'epochs' or 'rounds' with"),
        ("distill", "epochs", "the length of training is 'rounds' with"),
        ("finetune", "select", "the model that is kept is 'keep_cycle' with"),
        ("finetune", "personal_epochs", "what stays at each site is 'private' with"),
        ("fedner", "lr", "the learning rate is 'learning_rate' with"),
        ("finetune", "cycle", "did you mean 'cycles'?"),
        ("fedner", "epoch", "did you mean 'epochs'?"),
    ],
)
def test_an_error_about_an_unknown_key_suggests_the_key_of_the_method(
    method: str, key: str, answer: str
) -> None:
    table = {"method": method, "synthetic": {}, "training": {key: 3}}
    with pytest.raises(ConfigError, match=answer):
        fn.job(table)


def test_an_error_about_a_misplaced_key_names_its_table() -> None:
    with pytest.raises(
        ConfigError, match=r"belongs to \[training\], as in training.ep"
    ):
        fn.job({"method": "fedner", "synthetic": {}, "epochs": 3})


# ---- built-in jobs -------------------------------------------------------------------


BUILT_IN = sorted(loadable(list_built_in_jobs()))


@pytest.fixture
def corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that the variables of the built-in jobs name."""
    for variable in ("FEDNOTES_CORPORA", "BERT_BASE"):
        monkeypatch.setenv(variable, str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.usefixtures("corpora")
def test_a_built_in_job_has_the_values_of_its_file(name: str) -> None:
    parsed = load_job(name)
    table = tomllib.loads(list_built_in_jobs()[name].read_text("utf-8"))
    is_private = "privacy" in table
    assert parsed.module is methods.find_method(table["method"]) or is_private
    assert (parsed.title, parsed.seed) == (table["title"], table["seed"])
    assert list(parsed.sites) == list(table.get("sites", []))
    has_control = table["method"] == "personal" and not is_private
    control = ["own-mix"] if has_control else []
    default = ["alone", *control, "federated", "pooled"]
    assert list(parsed.conditions) == table.get("conditions", default)


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.usefixtures("corpora")
def test_settings_of_a_built_in_job_come_from_file_preset_or_method(name: str) -> None:
    """Check [training] and [privacy]: the file comes before the preset."""
    config: Any = load_job(name).config
    table = tomllib.loads(list_built_in_jobs()[name].read_text("utf-8"))
    for key, value in table.get("privacy", {}).items():
        assert is_written_as(value, getattr(config.privacy, key)), key
    preset = methods.find_method(table["method"]).presets[table.get("preset", "best")]
    defaults = type(config)()
    expected = {field.name: getattr(defaults, field.name) for field in fields(config)}
    expected |= preset.get("training", {})
    expected |= table.get("training", {})
    for key, value in expected.items():
        if key in table.get("training", {}) or key not in FILLED_IN:
            assert is_written_as(value, getattr(config, key)), key


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.usefixtures("corpora")
def test_the_model_of_a_built_in_job_comes_from_file_and_preset(name: str) -> None:
    """A job with a model of its own kind takes nothing from the preset's model."""
    model: Any = load_job(name).config.model
    table = tomllib.loads(list_built_in_jobs()[name].read_text("utf-8"))
    preset = methods.find_method(table["method"]).presets[table.get("preset", "best")]
    in_file = table.get("model", {})
    expected = dict(preset.get("model", {}))
    for key in ("kind", "tagger"):
        if key in in_file and expected.get(key) != in_file[key]:
            expected = {}
    if in_file.get("word_vectors"):
        expected |= preset.get("with_word_vectors", {})
    expected |= in_file
    for key, value in expected.items():
        assert is_written_as(value, getattr(model, key)), key


def is_written_as(table_value: Any, value: Any) -> bool:
    """Return whether a setting is what a TOML table says.

    Lists are tuples and tables are dataclasses; variables in paths are replaced.
    """
    if isinstance(table_value, dict) and not isinstance(value, Mapping):
        return all(
            is_written_as(each, getattr(value, key))
            for key, each in table_value.items()
        )
    if isinstance(table_value, str) and "$" in table_value:
        return str(value) == os.path.expandvars(table_value)
    expected = tuple(table_value) if isinstance(table_value, list) else table_value
    return bool(value == expected)


# ---- files beside the job ------------------------------------------------------------


def test_a_model_file_beside_the_job_is_resolved_from_any_folder(
    tmp_path: Path,
) -> None:
    (tmp_path / "vectors.txt").write_text("")
    table = {**BASE, "synthetic": {}, "model": {"word_vectors": "vectors.txt"}}
    parsed = parse_job(table, "j", tmp_path, "j.toml")
    assert parsed.config.model.word_vectors == str(tmp_path / "vectors.txt")


def test_the_record_of_a_job_keeps_paths_relative(tmp_path: Path) -> None:
    (tmp_path / "vectors.txt").write_text("")
    table = {**BASE, "synthetic": {}, "model": {"word_vectors": "vectors.txt"}}
    parsed = parse_job(table, "j", tmp_path, "j.toml")
    assert parsed.table["model"]["word_vectors"] == "vectors.txt"


def test_a_name_that_is_not_a_file_beside_the_job_is_kept(tmp_path: Path) -> None:
    table = {**BASE, "synthetic": {}, "model": {"contextual": "minilm"}}
    assert parse_job(table, "j", tmp_path, "j.toml").config.model.contextual == "minilm"


def test_a_job_for_real_sites_has_no_path_of_a_site() -> None:
    assert list_site_path_keys() <= PLACE_KEYS
    assert {"path", "paths", "exclude"} <= list_site_path_keys()
    if has_app("phenotyping"):
        assert {"notes", "test_labels"} <= list_site_path_keys()


def test_the_complete_tag_set_has_the_order_of_the_sites() -> None:
    sites = [
        SiteData("a", TagSet(("Z", "A"), "BIOES"), (), (), ()),
        SiteData("b", TagSet(("M", "A")), (), (), ()),
    ]
    complete = fedner.METHOD.configure(fedner.Config(), sites).tags
    assert complete == TagSet(("Z", "A", "M"), "BIOES")


# ---- the reference of the keys -------------------------------------------------------


@cache
def documented_keys(name: str) -> set[str]:
    """Return the keys and inner tables of the reference's tables with this name."""
    keys: set[str] = set()
    for table in list_tables():
        if table.name == name:
            keys |= {key.name for key in table.keys}
            keys |= set(re.findall(rf"^\[{name}\.(\w+)\]", table.heading))
    return keys


def test_the_reference_lists_every_key_in_the_section_of_its_table() -> None:
    text = format_tables()
    for table in list_tables():
        section = text.split(f"{table.heading}\n")[1].split("\n\n[")[0]
        for key in table.keys:
            assert f"  {key.name} = " in section, (table.heading, key.name)


def test_the_reference_has_every_field_that_a_job_may_set() -> None:
    assert documented_keys("top") == {field.name for field in fields(TopConfig)}
    for name in methods.list_method_names():
        heading = f"[training] for {name}"
        (of_method,) = (table for table in list_tables() if table.heading == heading)
        in_class = {
            field.name for field in fields(methods.find_method(name).config_class)
        }
        assert {key.name for key in of_method.keys} == in_class - FILLED_IN


def test_the_reference_has_every_table_that_a_job_may_have() -> None:
    for name in list_table_names():
        assert f"\n[{name}" in format_tables(), name


def test_a_misspelt_table_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="called 'site': did you mean 'sites'"):
        format_tables("site")


# The sections of docs/job.md that describe patients, by the line of their heading.
OF_PATIENTS = re.compile(
    r".* for (methods that read patients|patients|phenotype)$", re.MULTILINE
)


def test_the_page_of_the_keys_is_up_to_date() -> None:
    page = (Path(__file__).parents[2] / "docs" / "job.md").read_text("utf-8")
    if not has_app("phenotyping"):  # which describes patients
        page = "\n## ".join(
            section for section in page.split("\n## ") if not OF_PATIENTS.match(section)
        )
    with hiding_other_packages():
        current = format_page()
    assert page == current, "fednotes job keys --markdown > docs/job.md"


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("sites", "  split = "),
        ("sites", '  on_error = "refuse"  ("refuse" or "skip")'),
        (
            "sites",
            "      Maximum number of training sentences, chosen at random; 0 uses all.",
        ),
        ("training", "  learning_rate = 0.001  (number, more than 0)"),
        ("top", "  method = (required)  (text)"),
    ],
)
def test_the_reference_shows_defaults_types_and_meanings(key: str, line: str) -> None:
    assert any(row.startswith(line) for row in format_tables(key).splitlines())


def test_the_command_prints_the_keys_of_a_table(run_cli: Any) -> None:
    code, out, _ = run_cli("job", "keys", "tags")
    assert code == 0
    assert "min_mentions = 0" in out
    assert run_cli("--version")[1] == f"fednotes {__version__}\n"


# ---- the JSON schema -----------------------------------------------------------------


@pytest.fixture
def schema(run_cli: Any) -> dict[str, Any]:
    """Return the JSON schema of a job, as the command prints it."""
    code, out, _ = run_cli("job", "schema")
    assert code == 0
    printed: dict[str, Any] = json.loads(out)
    return printed


def tables_of_method(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the schema of a method's tables with the preset "best"."""
    properties: dict[str, Any] = {}
    for case in schema["allOf"]:
        conditions = {
            key: condition["const"]
            for key, condition in case["if"]["properties"].items()
        }
        if conditions["method"] == name and conditions.get("preset", "best") == "best":
            properties |= case["then"]["properties"]
    return properties


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_keys_of_a_built_in_job_are_documented(name: str) -> None:
    table = read_toml(list_built_in_jobs()[name])
    for site in table.get("sites", {}).values():
        assert set(site) <= documented_keys("sites")
    for key, value in table.items():
        if not isinstance(value, dict):
            assert key in documented_keys("top")
        elif key not in ("sites", "phenotypes"):  # their keys are free names
            assert set(value) <= documented_keys(key), key


def test_the_keys_of_built_in_jobs_are_in_the_schema(schema: dict[str, Any]) -> None:
    for name in BUILT_IN:
        table = read_toml(list_built_in_jobs()[name])
        assert set(table) <= set(schema["properties"]), name
        known = tables_of_method(schema, table["method"])
        of_site = known["sites"]["additionalProperties"]["properties"]
        for site in table.get("sites", {}).values():
            assert set(site) <= set(of_site), name
        for key in ("training", "synthetic"):
            assert set(table.get(key, {})) <= set(known[key]["properties"]), (name, key)
        models = [set(model["properties"]) for model in known["model"]["anyOf"]]
        assert any(set(table.get("model", {})) <= keys for keys in models), name


def test_the_schema_offers_only_the_models_that_a_method_supports(
    schema: dict[str, Any],
) -> None:
    def model_kinds(method: str) -> set[str | None]:
        models = tables_of_method(schema, method)["model"]["anyOf"]
        return {model["properties"].get("kind", {}).get("const") for model in models}

    assert (model_kinds("fedner"), model_kinds("pretrain")) == ({"tagger"}, {None})
    with_encoder = {
        kind for kind in list_model_kinds() if find_config_class(kind).encodes
    }
    assert {"token-classifier", "encoder-tagger"} <= with_encoder
    assert {"tagger", "prompt-bart"}.isdisjoint(with_encoder)
    assert model_kinds("finetune") == with_encoder
    assert model_kinds("distill") == set(list_model_kinds())


def test_a_job_may_name_the_only_kind_of_model_of_its_method(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    text = 'method = "fedner"\n[synthetic]\n[model]\n'
    path.write_text(text)
    without_kind = load_job(str(path)).config
    path.write_text(f'{text}kind = "tagger"\n')
    assert load_job(str(path)).config == without_kind
    path.write_text(f'{text}kind = "prompt-bart"\n')
    message = r'"fedner" does not support model kind "prompt-bart": use "tagger", or'
    with pytest.raises(ConfigError, match=message):
        load_job(str(path))
    path.write_text(f'{text}kind = "prompt-brat"\n')
    with pytest.raises(ConfigError, match="did you mean 'prompt-bart'"):
        load_job(str(path))


OF_DOCUMENTS = [
    name for name in list_method_names() if find_method(name).holds == "documents"
]


@pytest.mark.parametrize("kind", list_model_kinds())
@pytest.mark.parametrize("method", OF_DOCUMENTS)
def test_an_error_about_a_kind_names_only_methods_that_train_it(
    method: str, kind: str, tmp_path: Path
) -> None:
    def job_of(name: str) -> Job:
        tables: dict[str, Any] = {"method": name, "model": {"kind": kind}}
        settings = {field.name for field in fields(find_method(name).config_class)}
        if (
            "unannotated" in settings
            and not find_config_class(kind).trains_on_posteriors
        ):
            tables["training"] = {"unannotated": "pseudo"}
        return parse_job(tables | {"synthetic": {}}, "job", tmp_path, "job.toml")

    if kind in (find_method(method).list_models() or list_model_kinds()):
        assert job_of(method).method == method
        return
    with pytest.raises(ConfigError) as refusal:
        job_of(method)
    _, has_remedy, others = str(refusal.value).partition("that trains this kind: ")
    assert has_remedy
    for name in others.split(" or "):
        assert job_of(name).method == name
        assert not find_method(
            name
        ).reads_layers  # which another package's kind may lack


def test_the_schema_has_bounds_and_choices(schema: dict[str, Any]) -> None:
    known = tables_of_method(schema, "fedner")
    site = known["sites"]["additionalProperties"]
    assert site["properties"]["mask_overlap"]["minimum"] == 0
    assert site["additionalProperties"] is False
    assert site["properties"]["on_error"]["enum"] == ["refuse", "skip"]
    assert schema["required"] == ["method"]
    assert {"design", "per_site"} <= set(schema["properties"]["tags"]["properties"])
    assert "seed" not in known["training"]["properties"]
