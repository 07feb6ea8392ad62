"""Small jobs of the method "phenotype", for the tests of all methods."""

from __future__ import annotations

from typing import Any

import numpy as np
from method_runs import Case, MakeCase
from phenotype_patients import config_of, sites_of, without_stage_1

from fednotes.apps.phenotyping import two_stage as phenotype
from fednotes.apps.phenotyping.cohort import Cohort, FeatureSpace, SitePatients, Vectors


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


CASES: dict[str, MakeCase] = {
    "phenotype, codes": lambda bert: codes_case(),
    "phenotype, classifiers": lambda bert: phenotypes_case(),
}
CALIBRATED: dict[str, MakeCase] = {
    "phenotype, both stages": lambda bert: calibrated_case(
        config_of(calibrate=True, least_occurrences=2)
    ),
    "phenotype, TF-IDF": lambda bert: calibrated_case(without_stage_1(calibrate=True)),
}
PRIVATE = ("phenotype, codes", "phenotype, classifiers")
