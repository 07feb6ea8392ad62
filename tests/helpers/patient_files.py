"""Small files of patients, and the sites of a job that reads them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fednotes.apps.phenotyping.classifiers import LinearSVMs
from fednotes.apps.phenotyping.cohort import Bags, Cohort, SitePatients
from fednotes.apps.phenotyping.features import (
    ConceptFeatures,
    ConceptsConfig,
    features_for,
)
from fednotes.apps.phenotyping.phenotyper import Phenotyper
from fednotes.jobs.job import Job, Sites, load_sites
from fednotes.jobs.job_file import parse_job

SECRET = "Wilhelmina"  # stands in every note; no message may hold it


def write(path: Path, header: str, rows: Iterable[str]) -> Path:
    """A table; without a header where it is empty."""
    path.write_text("\n".join([*([header] if header else []), *rows]) + "\n")
    return path


def write_terms(folder: Path, *terms: str) -> None:
    """A dictionary of concepts C0000000 …, in this order."""
    write(
        folder / "terms.tsv",
        "",
        [f"C{at:07d}\t{term}" for at, term in enumerate(terms)],
    )


def job(folder: Path, seed: int = 1, **tables: Any) -> Job:
    """Of phenotyping; of the terms unless it says another source."""
    table = {"method": "phenotype", "seed": seed, **tables}
    if "text" not in tables and "synthetic" not in tables:
        table.setdefault("concepts", {"dictionary": "terms.tsv"})
    return parse_job(table, "j", folder, "j.toml")


def load(folder: Path, seed: int = 1, **tables: Any) -> Sites:
    """Its patients."""
    return load_sites(job(folder, seed, **tables), cache=folder / "cache")


def parts(site: SitePatients) -> tuple[Cohort, Cohort, Cohort]:
    """Train, valid and test patients."""
    return site.train, site.valid, site.test


def everyone(site: SitePatients) -> list[str]:
    """All their ids."""
    return [patient for part in parts(site) for patient in part.patients]


def labels_of(site: SitePatients) -> dict[str, list[int]]:
    """Patient → labels, of all parts."""
    return {
        p: c.labels[row].tolist()
        for c in parts(site)
        for row, p in enumerate(c.patients)
    }


def save_model(folder: Path, dictionary: str, beside: Path, *terms: str) -> Path:
    """A model whose diseases are present where the notes name them.

    Score = 10 · (the concept's TF-IDF) - 1, so any mention decides.
    """
    features = features_for(ConceptsConfig(dictionary=dictionary), beside)
    assert isinstance(features, ConceptFeatures)
    machines = LinearSVMs([(0, 1)] * len(terms), features.space.width)
    for column, term in enumerate(terms):
        bags = features.make({"x": [f"Known {term}."]}).values
        assert isinstance(bags, Bags)
        (concept,) = bags.concepts.tolist()
        machines.weight[concept, column] = 10
    machines.intercept[:] = -1
    idf = np.ones(features.space.width)
    Phenotyper(features.space, idf=idf, phenotypes=terms, machines=machines).save(
        folder
    )
    return folder
