"""Small files of patients, and the sites of a job that reads them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fednotes.apps.phenotyping.classifiers import LinearSVMs
from fednotes.apps.phenotyping.cohort import Bags, Cohort, SitePatients
from fednotes.apps.phenotyping.concepts import MAX_CONCEPTS
from fednotes.apps.phenotyping.features import (
    ConceptFeatures,
    ConceptsConfig,
    build_features,
)
from fednotes.apps.phenotyping.phenotyper import Phenotyper
from fednotes.jobs.job import Job, Sites, load_sites
from fednotes.jobs.job_file import parse_job

SECRET = "Wilhelmina"  # stands in every note; no message may hold it


def write(path: Path, header: str, rows: Iterable[str]) -> Path:
    """Write a table; without a header if it is empty."""
    path.write_text("\n".join([*([header] if header else []), *rows]) + "\n")
    return path


def write_terms(folder: Path, *terms: str) -> None:
    """Write a dictionary with the concepts C0000000 and on, one per term."""
    write(
        folder / "terms.tsv",
        "",
        [f"C{at:07d}\t{term}" for at, term in enumerate(terms)],
    )


def job(folder: Path, seed: int = 1, **tables: Any) -> Job:
    """Return a job of phenotyping, which reads terms.tsv unless a table says otherwise."""
    table = {"method": "phenotype", "seed": seed, **tables}
    if "text" not in tables and "synthetic" not in tables:
        table.setdefault("concepts", {"dictionary": "terms.tsv"})
    return parse_job(table, "j", folder, "j.toml")


def load(folder: Path, seed: int = 1, **tables: Any) -> Sites:
    """Return the sites of such a job."""
    return load_sites(job(folder, seed, **tables), cache=folder / "cache")


def parts(site: SitePatients) -> tuple[Cohort, Cohort, Cohort]:
    """Return the train, valid and test patients of a site."""
    return site.train, site.valid, site.test


def everyone(site: SitePatients) -> list[str]:
    """Return the ids of all patients of a site."""
    return [patient for part in parts(site) for patient in part.patients]


def labels_of(site: SitePatients) -> dict[str, list[int]]:
    """Return the labels of all patients of a site."""
    return {
        p: c.labels[row].tolist()
        for c in parts(site)
        for row, p in enumerate(c.patients)
    }


def save_model(
    folder: Path, dictionary: str, beside: Path, *terms: str, most: int = MAX_CONCEPTS
) -> Path:
    """Save a model that predicts the diseases that the notes name.

    Score = 10 · (the concept's TF-IDF) - 1, so any mention decides.
    """
    config = ConceptsConfig(dictionary=dictionary, most=most)
    features = build_features(config, beside)
    assert isinstance(features, ConceptFeatures)
    svms = LinearSVMs([(0, 1)] * len(terms), features.space.width)
    for column, term in enumerate(terms):
        bags = features.make({"x": [f"Known {term}."]}).values
        assert isinstance(bags, Bags)
        (concept,) = bags.concepts.tolist()
        svms.weight[concept, column] = 10
    svms.intercept[:] = -1
    idf = np.ones(features.space.width)
    Phenotyper(features.space, idf=idf, phenotypes=terms, svms=svms).save(folder)
    return folder
