"""The tables of jobs on patients, and the messages about mistakes in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fednotes.apps.phenotyping.features import ConceptsConfig
from fednotes.apps.phenotyping.job_tables import (
    PatientsConfig,
    SyntheticPatientsConfig,
)
from fednotes.core.errors import ConfigError
from fednotes.jobs.job import Job
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.reference import is_known_key
from fednotes.jobs.schema import make_schema

CONCEPTS = {"dictionary": "terms.tsv"}
PHENOTYPES = {"hypertension": ["icd9:401"], "gout": ["icd9:274", "icd9proc:81"]}


def of_patients(**tables: Any) -> Job:
    return parse_job({"method": "phenotype", **tables}, "j", Path("/x"), "j.toml")


def test_tables_of_patients_become_configs() -> None:
    site = {"notes": ["x", "y"], "codes": "z", "codes_format": "omop"}
    parsed = of_patients(
        sites={"a": site, "b": {**site, "notes": "w"}},
        concepts={**CONCEPTS, "scopes": ["EXACT"], "most": 5},
        phenotypes=PHENOTYPES,
        hold_out={"codes": ["icd9:401", "icd9:250"]},
    )
    assert parsed.data == "patients"
    assert parsed.sites["a"] == PatientsConfig(
        ("x", "y"), codes="z", codes_format="omop"
    )
    assert parsed.sites["b"].notes == ("w",)
    assert parsed.kind_tables.features == ConceptsConfig(
        "terms.tsv", scopes=("EXACT",), most=5
    )
    assert parsed.kind_tables.features.options == {"scopes": ("EXACT",)}
    assert parsed.kind_tables.held_out == (
        "icd9:401",
        "icd9:274",
        "icd9proc:81",
        "icd9:250",
    )
    generated = of_patients(synthetic={"patients": 50}, concepts={"context": "mark"})
    assert generated.synthetic == SyntheticPatientsConfig(3, 50)
    assert generated.kind_tables.features == ConceptsConfig("synthetic", context="mark")


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"sites": {"a": {}}}, r"\[sites\.a\]: the site has no notes"),
        (
            {"sites": {"a": {"notes": "x", "concepts": "y"}}},
            "either `notes` or `concepts`",
        ),
        ({"sites": {"a": {"notes": ["x", "x"]}}}, "notes: a path is listed twice"),
        ({"sites": {"a": {"notes": 3}}}, "notes = 3: expected a path or a list"),
        ({"sites": {"a": {"notes": "x", "types": ["A"]}}}, "unknown key 'types'"),
        ({"sites": {"a": {"notes": "x", "codes": "y"}}}, "codes and codes_format"),
        ({"sites": {"a": {"notes": "x", "codes_format": "omop"}}}, "give both"),
        ({"sites": {"a": {"notes": "x", "codes_format": "mimik"}}}, "expected one of"),
        (
            {"sites": {"a": {"notes": "x", "test_codes": "y"}}},
            "test_codes needs `test` and `codes`",
        ),
        ({"sites": {"a": {"notes": "x", "labelled": 0.0}}}, "labelled = 0.0"),
        (
            {"sites": {"a": {"notes": "x", "test_fraction": 0.95}}},
            "no training data remain",
        ),
        (
            {"sites": {"a": {"notes": "x"}}, "tags": {}},
            r"\[tags\]: applies only to methods on documents",
        ),
        (
            {"sites": {"a": {"notes": "x"}}, "silos": {"by": "document"}},
            "divided by patient",
        ),
        (
            {"sites": {"a": {"notes": "x"}}, "text": {}},
            r"either \[concepts\] or \[text\]",
        ),
        (
            {"sites": {"a": {"notes": "x"}}, "concepts": {}},
            r"\[concepts\]: dictionary is empty",
        ),
        (
            {"sites": {"a": {"notes": "x"}}, "concepts": {"dictionry": "x"}},
            "'dictionary'",
        ),
        (
            {"sites": {"a": {"notes": "x"}}, "phenotypes": {"p": ["I10"]}},
            r"p: 'I10' is not a code",
        ),
        (
            {"sites": {"a": {"notes": "x"}}, "phenotypes": {"p": []}},
            "p = .*a list of codes",
        ),
        (
            {"sites": {"a": {"notes": "x"}}, "phenotypes": PHENOTYPES},
            "are derived from codes",
        ),
        (
            {"sites": {"a": {"labels": "x"}}, "phenotypes": PHENOTYPES},
            "labels cannot be combined with",
        ),
        (
            {"sites": {"a": {"notes": "x"}}, "hold_out": {"codes": ["x:1"]}},
            "unknown coding",
        ),
        ({"synthetic": {"sentences": 3}}, r"\[synthetic\]: unknown key 'sentences'"),
        ({"synthetic": {"patients": 3}}, "patients = 3: expected at least 30"),
        (
            {"synthetic": {}, "phenotypes": PHENOTYPES},
            "generated patients already have phenotypes",
        ),
    ],
)
def test_a_mistake_about_patients_names_its_place(
    tables: dict[str, Any], message: str
) -> None:
    if "synthetic" not in tables:
        tables = {"concepts": CONCEPTS, **tables}
    with pytest.raises(ConfigError, match=r"j\.toml.*" + message):
        of_patients(**tables)
    with pytest.raises(
        ConfigError,
        match=r"\[concepts\]: applies only to methods on patients, not to fedner",
    ):
        parse_job(
            {"method": "fedner", "synthetic": {}, "concepts": CONCEPTS},
            "j",
            Path("/x"),
            "j.toml",
        )
    with pytest.raises(ConfigError, match=r"j\.toml: say how notes are read"):
        of_patients(sites={"a": {"notes": "x"}})


@pytest.mark.parametrize("key", ["phenotypes.asthma", "concepts.dictionary"])
def test_a_key_that_a_job_on_patients_may_have_is_known(key: str) -> None:
    assert is_known_key("phenotype", key)


def test_the_schema_has_the_tables_of_patients() -> None:
    known = make_schema()["properties"]
    assert {"dictionary", "vectors"} <= set(known["concepts"]["properties"])
    assert known["phenotypes"]["additionalProperties"]["items"] == {"type": "string"}
