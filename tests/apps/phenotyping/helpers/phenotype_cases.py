"""Small jobs of the method "phenotype", for the tests of all methods."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from method_runs import Case, MakeCase
from patients_of_words import (
    SMALL,
    attention_config,
    sites_of_words,
    without_labels,
)
from phenotype_patients import config_of, sites_of, without_stage_1

from fednotes.apps.phenotyping import two_stage as phenotype
from fednotes.apps.phenotyping.cohort import Cohort, FeatureSpace, SitePatients, Vectors
from fednotes.apps.phenotyping.phenotyper import PhenotypeConfig


def dense_patients() -> list[SitePatients]:
    """Return sites whose patients are vectors, for classifiers without a first
    stage."""
    rng = np.random.default_rng(5)
    space = FeatureSpace(12, True, {"fingerprint": "twelve"})

    def cohort(site: str, number: int) -> Cohort:
        values = rng.normal(size=(number, 12)).astype(np.float32)
        labels = (values[:, :2] + rng.normal(size=(number, 2)) > 0).astype(np.int8)
        ids = tuple(f"{site}-{rng.integers(2**40)}" for _ in range(number))
        return Cohort(site, ids, Vectors(values), labels, ("asthma", "gout"))

    return [
        SitePatients(
            name, space, cohort(name, 60), cohort(name, 9), cohort(name, 9), {}
        )
        for name in ("a", "b", "c", "d")
    ]


def phenotype_case(base: Any, data: Any, *, is_change: bool) -> Case:
    return Case(
        phenotype.METHOD,
        lambda sites: phenotype.METHOD.configure(base, sites),
        data,
        "train",
        is_change=is_change,
    )


def codes_case() -> Case:
    base = config_of(outputs=("icd9:401", "icd9:250", "icd9:428"))
    return phenotype_case(base, sites_of(4), is_change=True)


def phenotypes_case() -> Case:
    return phenotype_case(without_stage_1(), dense_patients(), is_change=False)


def calibrated_case(base: Any) -> Case:
    return phenotype_case(base, sites_of(3), is_change=False)


# How close runs of encoders end.
BY_BERT = (1e-4, 1e-5)


def attention_case(bert: Path) -> Case:
    case = phenotype_case(attention_config(), sites_of_words(bert), is_change=True)
    return replace(case, close=BY_BERT)


def code_attention_case(bert: Path) -> Case:
    sites = [without_labels(site) for site in sites_of_words(bert)]
    case = phenotype_case(attention_config(keep_cycle=-1), sites, is_change=True)
    return replace(case, close=BY_BERT)


def attention_alone_case(bert: Path) -> Case:
    """Return a job that trains attention without adapters."""
    attention = replace(SMALL, rank=0)
    model = PhenotypeConfig(representation="attention", attention=attention)
    base = attention_config(model=model)
    case = phenotype_case(base, sites_of_words(bert), is_change=True)
    # Every patient is read; only their order and dropout are drawn.
    return replace(case, close=BY_BERT, least_missed=0.5)


CASES: dict[str, MakeCase] = {
    "phenotype, codes": lambda bert: codes_case(),
    "phenotype, classifiers": lambda bert: phenotypes_case(),
    "phenotype, attention": attention_case,
}
FURTHER: dict[str, MakeCase] = {
    "phenotype, attention to codes": code_attention_case,
    "phenotype, attention without adapters": attention_alone_case,
    "phenotype, both stages": lambda bert: calibrated_case(
        config_of(calibrate=True, least_occurrences=2)
    ),
    "phenotype, TF-IDF": lambda bert: calibrated_case(without_stage_1(calibrate=True)),
}
PRIVATE = ("phenotype, codes", "phenotype, classifiers")
