"""Job files: what they may say, how a mistake is told, and a reference that holds every
key."""

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
from filled_in import FILLED_IN

from fednotes import __version__, methods
from fednotes.core.errors import ConfigError
from fednotes.core.settings import read_toml
from fednotes.core.types import SiteData, TagSet
from fednotes.jobs.job import (
    Job,
    SilosConfig,
    TagsConfig,
)
from fednotes.jobs.job_file import (
    TopConfig,
    built_in_jobs,
    load_job,
    parse_job,
    table_names,
)
from fednotes.jobs.reference import markdown, reference, tables
from fednotes.methods import fedner

BASE: dict[str, Any] = {"method": "fedner", "model": {"hashed_words": 8}}


def job(**changes: Any) -> Job:
    table = {**BASE, "synthetic": {"sites": 2}, **changes}
    return parse_job(
        {k: v for k, v in table.items() if v is not None}, "j", Path("/x"), "j.toml"
    )


def with_site(**site: Any) -> Job:
    return job(synthetic=None, sites={"a": site})


def test_a_job_has_what_its_file_says() -> None:
    made = job(
        title="T", seed=3, threads=2, conditions=["pooled", "alone"],
        training={"private": ["crf"], "epochs": 4}, model={"tagger": "cnn-crf", "hashed_words": 8},
    )  # fmt: skip
    assert (made.title, made.seed, made.threads) == ("T", 3, 2)
    assert made.conditions == ("alone", "pooled")  # in the order in which they are run
    assert (made.config.private, made.config.epochs, made.config.seed) == (
        ("crf",),
        4,
        3,
    )
    assert made.config.model.tagger == "cnn-crf"
    assert made.module is fedner.METHOD
    assert job().title == "j"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sead": 1}, r"unknown key 'sead'; did you mean 'seed'"),
        ({"method": None}, "the key 'method' is missing"),
        ({"method": "fednr"}, "method = 'fednr'; did you mean 'fedner'"),
        ({"preset": "papr"}, "preset = 'papr'; did you mean 'paper'"),
        ({"seed": "1"}, "seed = '1': expected a whole number"),
        ({"threads": 0}, "threads = 0: expected 1 to"),
        ({"conditions": []}, "conditions = .*: name some of alone, federated, pooled"),
        ({"conditions": ["alon"]}, "conditions has 'alon'; did you mean 'alone'"),
        (
            {"training": {"epoch": 1}},
            r"\[training\]: unknown key 'epoch'; did you mean 'epochs'",
        ),
        ({"training": {"epochs": 0}}, r"\[training\]: epochs = 0"),
        ({"training": {"learning_rate": float("nan")}}, "learning_rate = nan"),
        ({"training": {"private": ["lstn"]}}, "no layer is called 'lstn'"),
        ({"training": {"seed": 1}}, "'seed' does not belong here"),
        ({"training": 3}, r"training is a value, expected a table \[training\]"),
        ({"model": "x"}, r"model is a value, expected a table \[model\]"),
        ({"model": {"lstm": 3}}, r"\[model\]: unknown key 'lstm'; known: "),
        (
            {"model": {"lstm_unit": 3}},
            r"\[model\]: unknown key .*; did you mean 'lstm_units'",
        ),
        (
            {"model": {"lstm_units": "3"}},
            r"\[model\]: lstm_units = '3': expected a whole number",
        ),
        (
            {"model": {"tagger": "elmonr"}},
            "unknown tagger 'elmonr'; did you mean 'elmoner'",
        ),
        ({"model": {"characters": False}}, "has no input"),
        ({"synthetic": 3}, "synthetic is a value"),
        ({"synthetic": {"site": 3}}, "unknown key 'site'; did you mean 'sites'"),
        ({"synthetic": {"sites": 0}}, "sites = 0: at least 1 is needed"),
        (
            {"synthetic": None},
            r"give either \[sites\.NAME\] tables or a \[synthetic\] table",
        ),
        ({"sites": {"a": {"path": "x"}}}, "give either"),
        ({"synthetic": None, "sites": {}}, r"expected one table \[sites\.NAME\]"),
        ({"synthetic": None, "sites": {"a": 1}}, "sites.a is a value"),
        ({"synthetic": None, "sites": {"a b": {"path": "x"}}}, "letters, digits"),
        ({"synthetic": None, "sites": {"../x": {"path": "x"}}}, "letters, digits"),
        ({"synthetic": None, "sites": {"pooled": {"path": "x"}}}, "this name is taken"),
        (
            {"synthetic": None, "sites": {"Pooled": {"path": "x"}}},
            r"taken, .* \(it is 'pooled'",
        ),
        (
            {
                "synthetic": None,
                "sites": {"mercy": {"path": "x"}, "Mercy": {"path": "y"}},
            },
            r"\[sites\.Mercy\]: this name is taken, .* \(it is 'mercy' where case does not count",
        ),
        ({"tags": 3}, r"tags is a value, expected a table \[tags\]"),
        ({"tags": {"desing": "given"}}, "unknown key 'desing'; did you mean 'design'"),
        (
            {"tags": {"design": "disjunct"}},
            "design = 'disjunct': expected one of 'given'",
        ),
        (
            {"tags": {"design": "disjoint", "types": ["A", "A"]}},
            "is named twice, name each type once",
        ),
        ({"tags": {"design": "disjoint", "per_site": -1}}, "per_site = -1"),
        (
            {"tags": {"design": "appendix-d", "per_site": 1}},
            "per_site = 1 needs design",
        ),
        ({"tags": {"design": "disjoint", "runs_per_sampling": 0}}, "at least 1"),
        ({"tags": {"design": "given"}}, "generated sites have types of their own"),
        (
            {
                "tags": {"design": "disjoint"},
                "synthetic": None,
                "sites": {"a": {"path": "x", "test_types": ["A"]}},
            },
            r"\[sites\.a\]: test_types does not go with design = 'disjoint'",
        ),
        ({"silos": 3}, r"silos is a value, expected a table \[silos\]"),
        (
            {"silos": {"numbr": 3}},
            r"\[silos\]: unknown key 'numbr'; did you mean 'number'",
        ),
        ({"silos": {"number": 0}}, r"\[silos\]: number = 0: at least 1 is needed"),
        (
            {"silos": {"by": "ward"}},
            "by = 'ward': expected one of 'patient', 'document'",
        ),
        (
            {"silos": {}, "tags": {"design": "disjoint"}},
            r"\[silos\]: silos annotate alike, design = 'disjoint' samples other types",
        ),
    ],
)
def test_a_mistake_names_its_place(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"j\.toml.*" + message):
        job(**changes)


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ({}, "give either `path`"),
        ({"path": "x", "train": "y", "test": "z"}, "give either `path`"),
        ({"train": "x"}, "`train` is given without `test`"),
        ({"path": "x", "fraction": 0}, "fraction = 0"),
        ({"path": "x", "fraction": 1.5}, r"fraction = 1\.5: at most 1 is needed"),
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
            r"test_types = \['A', 'A'\]: 'A' is named twice",
        ),
        (
            {"path": "x", "max_sentences": -1},
            "max_sentences = -1: at least 0 is needed",
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
def test_a_sites_mistake_names_the_site(site: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"j\.toml \[sites\.a\].*" + message):
        with_site(**site)


def test_tables_are_part_of_a_job_and_of_its_fingerprint() -> None:
    table = {"design": "appendix-d", "types": ["A", "B"], "runs_per_sampling": 3}
    tags = job(tags=table).tags
    assert tags == TagsConfig("appendix-d", ("A", "B"), runs_per_sampling=3)
    assert tags.is_sampled
    assert [tags.find_sampling(seed) for seed in range(-3, 8)] == [
        -1,
        0,
        0,
        0,
        1,
        1,
        1,
        2,
        2,
        2,
        3,
    ]
    assert job(silos={}).silos == SilosConfig(5, None)
    assert job(silos={"number": 2, "by": "patient"}).silos == SilosConfig(2, "patient")
    assert (job().tags, job().silos, job().kind.name) == (None, None, "documents")
    changes = (
        {},
        {"seed": 2},
        {"training": {"epochs": 9}},
        {"synthetic": {"sites": 3}},
    )
    made = [job(**change) for change in (*changes, {"tags": table}, {"silos": {}})]
    assert len({each.fingerprint for each in (job(), *made)}) == 6


def test_settings_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(
        'method = "fedner"\n[model]\nhashed_words = 8\n[synthetic]\nsites = 2\n'
    )
    made = load_job(path, ("seed=5", "training.private=['crf']", "training.epochs=2"))
    assert (made.name, made.seed, made.config.private) == ("my", 5, ("crf",))
    assert made.folder == tmp_path
    assert made.fingerprint != load_job(path).fingerprint
    with pytest.raises(
        ConfigError, match=r"my\.toml \[training\]: unknown key 'epoch'"
    ):
        load_job(path, ("training.epoch=2",))


def test_built_in_jobs_are_found_by_name(tmp_path: Path, monkeypatch) -> None:
    """Also where a folder of that name is in the way, such as an earlier run's."""
    assert {"demo", "fedner/paper", "fedner/real"} <= set(built_in_jobs())
    assert not [name for name in built_in_jobs() if "table" in name or "fig" in name]
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_job("demo").synthetic is not None
    with pytest.raises(ConfigError, match="nor a built-in job; did you mean 'demo'"):
        load_job("dmo")
    monkeypatch.delenv("FEDNOTES_CORPORA", raising=False)
    with pytest.raises(
        ConfigError, match=r"FEDNOTES_CORPORA is not set; for example: export"
    ):
        load_job("fedner/real")


def test_every_built_in_job_is_right(tmp_path: Path, monkeypatch) -> None:
    """Each setting is the file's, else the preset's that it names ("best" where it
    names none), else the method's default; read by tomllib. Nothing of a file is left
    unread."""
    for variable in ("FEDNOTES_CORPORA", "BERT_BASE"):
        monkeypatch.setenv(variable, str(tmp_path))
    for name, path in built_in_jobs().items():
        made, table = load_job(name), tomllib.loads(path.read_text("utf-8"))
        assert made.module is methods.find(table["method"]) or "privacy" in table
        for key, value in table.get("privacy", {}).items():
            assert says(value, getattr(made.config.privacy, key)), (
                f"{name}: privacy.{key}"
            )
        assert (made.title, made.seed) == (table["title"], table["seed"])
        control = (
            ["own-mix"]
            if table["method"] == "personal" and "privacy" not in table
            else []
        )
        default = ["alone", *control, "federated", "pooled"]
        assert list(made.conditions) == table.get("conditions", default)
        assert list(made.sites) == list(table.get("sites", []))
        preset = made.module.presets[table.get("preset", "best")]
        plain = {
            f.name: getattr(type(made.config)(), f.name) for f in fields(made.config)
        }
        told = table.get("training", {})
        for key, value in {**plain, **preset.get("training", {}), **told}.items():
            if key in told or key not in FILLED_IN:
                assert says(value, getattr(made.config, key)), f"{name}: {key}"
        own, given = preset.get("model", {}), table.get("model", {})
        if any(
            own.get(key) != given[key] for key in ("kind", "tagger") if key in given
        ):
            own = {}  # a model of the job's own
        chosen = {**own, **given}
        if table.get("model", {}).get("word_vectors"):
            chosen = {**chosen, **preset.get("with_word_vectors", {}), **table["model"]}
        for key, value in chosen.items():
            assert says(value, getattr(made.config.model, key)), f"{name}: model.{key}"


def says(written: Any, found: Any) -> bool:
    """Whether a setting is what a table says: lists are tuples, tables dataclasses; a
    path that a variable begins is longer."""
    if isinstance(written, dict) and not isinstance(found, Mapping):
        return all(says(value, getattr(found, key)) for key, value in written.items())
    if isinstance(written, str) and "$" in written:
        return str(found) == os.path.expandvars(written)
    return bool(found == (tuple(written) if isinstance(written, list) else written))


def test_model_files_beside_the_job_are_found_from_anywhere(tmp_path: Path) -> None:
    (tmp_path / "vectors.txt").write_text("")
    table = {**BASE, "synthetic": {}, "model": {"word_vectors": "vectors.txt"}}
    made = parse_job(table, "j", tmp_path, "j.toml")
    assert made.config.model.word_vectors == str(tmp_path / "vectors.txt")
    # the record moves with the job
    assert made.table["model"]["word_vectors"] == "vectors.txt"
    table["model"] = {"contextual": "minilm"}
    assert parse_job(table, "j", tmp_path, "j.toml").config.model.contextual == "minilm"


def test_the_complete_tag_set_keeps_the_order_of_the_sites() -> None:
    sites = [
        SiteData("a", TagSet(("Z", "A"), "BIOES"), (), (), ()),
        SiteData("b", TagSet(("M", "A")), (), (), ()),
    ]
    complete = fedner.METHOD.configure(fedner.Config(), sites).tags
    assert complete == TagSet(("Z", "A", "M"), "BIOES")


# the reference of the keys, and the schema


@cache
def listed(name: str) -> set[str]:
    """The keys of the tables with this name in the reference, and the tables inside
    them."""
    found = set()
    for table in tables():
        if table.name == name:
            found |= {key.name for key in table.keys}
            found |= set(re.findall(rf"^\[{name}\.(\w+)\]", table.heading))
    return found


def test_every_key_of_every_table() -> None:
    for table in tables():
        section = reference().split(f"{table.heading}\n")[1].split("\n\n[")[0]
        for key in table.keys:
            assert f"  {key.name} = " in section, (table.heading, key.name)
    for name in methods.names():
        (of_method,) = (t for t in tables() if t.heading == f"[training] of {name}")
        own = {field.name for field in fields(methods.find(name).config_class)}
        assert {key.name for key in of_method.keys} == own - FILLED_IN
    for name in table_names():
        assert f"\n[{name}" in reference(), name
    assert listed("top") == {f.name for f in fields(TopConfig)}
    with pytest.raises(ConfigError, match="called 'site'; did you mean 'sites'"):
        reference("site")
    page = Path(__file__).parents[2] / "docs" / "job.md"
    assert page.read_text("utf-8") == markdown(), (
        "fednotes job keys --markdown > docs/job.md"
    )


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("sites", "  split = "),
        ("sites", '  on_error = "refuse"  ("refuse" or "skip")'),
        (
            "sites",
            "      Largest number of training sentences, chosen at random; 0 uses all.",
        ),
        ("training", "  learning_rate = 0.001  (number, more than 0)"),
        ("top", "  method = (required)  (text)"),
    ],
)
def test_defaults_and_meanings(key: str, line: str) -> None:
    assert any(row.startswith(line) for row in reference(key).splitlines())


def test_the_command(give: Any) -> None:
    code, out, _ = give("job", "keys", "tags")
    assert code == 0
    assert "min_mentions = 0" in out
    assert give("--version")[1] == f"fednotes {__version__}\n"


def of_method(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """What the schema says of the tables of a method's jobs with the preset "best"."""
    found: dict[str, Any] = {}
    for case in schema["allOf"]:
        wanted = {key: of["const"] for key, of in case["if"]["properties"].items()}
        if wanted["method"] == name and wanted.get("preset", "best") == "best":
            found |= case["then"]["properties"]
    return found


def test_every_key_of_the_jobs_that_there_are(schema: dict[str, Any]) -> None:
    """It is in the reference; and in the schema, for the job's method."""
    for name, path in built_in_jobs().items():
        table = read_toml(path)
        assert set(table) <= set(schema["properties"]), name
        known = of_method(schema, table["method"])
        for site in table.get("sites", {}).values():
            assert set(site) <= listed("sites"), name
            assert set(site) <= set(
                known["sites"]["additionalProperties"]["properties"]
            ), name
        for key, value in table.items():
            if not isinstance(value, dict):
                assert key in listed("top"), name
            elif key not in ("sites", "phenotypes"):  # names of one's own
                assert set(value) <= listed(key), (name, key)
        for key in ("training", "synthetic"):
            assert set(table.get(key, {})) <= set(known[key]["properties"]), (name, key)
        models = [set(model["properties"]) for model in known["model"]["anyOf"]]
        assert any(set(table.get("model", {})) <= keys for keys in models), name


def test_a_method_says_which_models_it_takes(
    schema: dict[str, Any], tmp_path: Path
) -> None:
    """The schema offers no other, and the only kind of a method may be named."""

    def kinds(method: str) -> set[str | None]:
        models = of_method(schema, method)["model"]["anyOf"]
        return {model["properties"].get("kind", {}).get("const") for model in models}

    assert (kinds("fedner"), kinds("pretrain")) == ({"tagger"}, {None})
    assert kinds("finetune") == {"token-classifier", "encoder-tagger"}
    assert kinds("distill") == kinds("finetune") | {"tagger", "prompt-bart"}
    path, text = tmp_path / "job.toml", 'method = "fedner"\n[synthetic]\n[model]\n'
    path.write_text(text)
    plain = load_job(str(path)).config
    path.write_text(f'{text}kind = "tagger"\n')
    assert load_job(str(path)).config == plain
    path.write_text(f'{text}kind = "prompt-bart"\n')
    with pytest.raises(
        ConfigError, match=r'"fedner" does not support model kind .*; use "tagger"'
    ):
        load_job(str(path))


def test_the_schema_has_bounds_and_choices(schema: dict[str, Any]) -> None:
    known = of_method(schema, "fedner")
    site = known["sites"]["additionalProperties"]
    assert site["properties"]["mask_overlap"]["minimum"] == 0
    assert site["additionalProperties"] is False
    assert site["properties"]["on_error"]["enum"] == ["refuse", "skip"]
    assert schema["required"] == ["method"]
    assert {"design", "per_site"} <= set(schema["properties"]["tags"]["properties"])
    assert "seed" not in known["training"]["properties"]


@pytest.fixture
def schema(give: Any) -> dict[str, Any]:
    code, out, _ = give("job", "schema")
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    return found
