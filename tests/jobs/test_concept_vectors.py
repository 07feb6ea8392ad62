"""Public vectors of concepts: from a file to the sites of a job, and to what sites agree on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fednotes.core.errors import ConfigError, DataError
from fednotes.jobs.deployed.agreement import Description, agreed_config, describe
from fednotes.jobs.job import Job, load_sites
from fednotes.jobs.job_file import parse_job

TERMS = ("asthma", "gout", "cough", "fever")  # concepts C0000000 …, in this order
LINES = ["C0000002 1 2", "C0000000 3 4", "C9999999 7 7"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    rows = [f"C{at:07d}\t{term}" for at, term in enumerate(TERMS)]
    (tmp_path / "terms.tsv").write_text("\n".join(rows) + "\n")
    notes = [f"{i},has {TERMS[i % 4]}" for i in range(30)]
    (tmp_path / "notes.csv").write_text("\n".join(["patient,text", *notes]) + "\n")
    codes = [f"{i},4019" for i in range(30)]
    (tmp_path / "codes.csv").write_text("\n".join(["patient,code", *codes]) + "\n")
    (tmp_path / "cuis.txt").write_text("\n".join(LINES) + "\n")
    return tmp_path


def job(folder: Path, **concepts: Any) -> Job:
    site = {"notes": "notes.csv", "codes": "codes.csv", "codes_format": "table", "system": "icd9"}
    table = {
        **{"method": "phenotype", "preset": "paper", "silos": {"number": 2}},
        "concepts": {"dictionary": "terms.tsv", "vectors": "cuis.txt", **concepts},
        "sites": {"a": site},
        "training": {"minimum": 1, "least_occurrences": 1, "cycles": 1, "systems": ["icd9"]},
        "model": {"network": {"embedding": 2, "hidden": 3, "length": 0}},
    }
    return parse_job(table, "j", folder, "j.toml")


def test_vectors_reach_every_silo(place: Path) -> None:
    """Indices and numbers as they were written, the dictionary's order; other words left out."""
    made = load_sites(job(place), cache=place / "cache")
    assert len(made.data) == 2
    for site in made.data:
        assert site.vectors.concepts.tolist() == [0, 2]
        assert site.vectors.values.tolist() == [[3, 4], [1, 2]]
    assert any("2 of the dictionary's concepts have a vector" in line for line in made.notes)
    config = job(place).module.for_sites(job(place).config, made.data)
    assert config.vectors
    without = load_sites(job(place, vectors=""), cache=place / "cache")
    assert all(site.vectors is None for site in without.data)
    assert not job(place).module.for_sites(job(place).config, without.data).vectors


def test_the_recipe_of_a_model_does_not_name_them(place: Path) -> None:
    """Notes are read alike whatever training starts from."""
    one, two = (load_sites(job(place, vectors=v), cache=place / "c").data for v in ("cuis.txt", ""))
    assert one[0].space == two[0].space


def test_a_file_of_another_dictionary_is_refused(place: Path) -> None:
    (place / "cuis.txt").write_text("aspirin 1 2\n")
    with pytest.raises(DataError, match=r"no word in it is the id of a concept, such as C0000000"):
        load_sites(job(place), cache=place / "cache")
    with pytest.raises(ConfigError, match="NOWHERE is not set"):
        load_sites(job(place, vectors="$NOWHERE"), cache=place / "cache")


def test_real_sites_must_have_the_same_file(place: Path) -> None:
    """By the digest that each describes itself with, before round 1."""
    (site, _) = load_sites(job(place), cache=place / "cache").data
    own = describe(job(place), site)
    assert own.vectors == site.vectors.digest
    assert len(own.vectors) == 64
    agreed = agreed_config(job(place), {"a": own, "b": own})
    assert agreed.vectors
    (place / "cuis.txt").write_text("\n".join([*LINES[:2], "C0000003 5 5"]) + "\n")
    (other, _) = load_sites(job(place), cache=place / "cache").data
    assert other.vectors.digest != site.vectors.digest
    for theirs in (describe(job(place), other), Description(**{**vars(own), "vectors": ""})):
        with pytest.raises(DataError, match=r"different \[concepts\] vectors"):
            agreed_config(job(place), {"a": own, "b": theirs})
    assert np.isfinite(site.vectors.values).all()
