"""Invented patients whose concepts say something of their codes and diseases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fednotes.data.cohort import Bags, Cohort
from fednotes.data.patient_sites import FeatureSpace, SitePatients
from fednotes.methods.phenotype import Config
from fednotes.models.dan import DanConfig
from fednotes.models.phenotyper import PhenotypeConfig

VOCABULARY = 60
DISEASES = ("asthma", "diabetes", "gout")
CODES = ("4019", "25000", "4280", "49390", "2749", "5849", "2720", "V5861")
SPACE = FeatureSpace(VOCABULARY, recipe={"fingerprint": "sixty"})


def patients(site: str, number: int, seed: int, concepts: int = 12) -> Cohort:
    """Disease d shows itself in the concepts 10 d to 10 d + 9; a tenth is not labelled."""
    rng = np.random.default_rng(seed)
    ill = rng.random((number, len(DISEASES))) < 0.4
    lists = []
    for row in range(number):
        own = [10 * d + int(rng.integers(10)) for d in np.flatnonzero(ill[row]) for _ in range(2)]
        lists.append([] if not concepts else [*own, *rng.integers(VOCABULARY, size=concepts)])
    labels = ill.astype(np.int8)
    labels[rng.random(number) < 0.1] = -1
    ids = tuple(f"{site}-{seed}-{row}" for row in range(number))
    return Cohort(site, ids, Bags.of(lists, VOCABULARY), labels, DISEASES)


def codes_of(cohort: Cohort, seed: int) -> dict[str, frozenset[str]]:
    """Codes after concepts; one patient in eight was never coded."""
    rng = np.random.default_rng(seed)
    found = {}
    for row, patient in enumerate(cohort.patients):
        start, stop = cohort.bags.offsets[row : row + 2]
        most = np.bincount(cohort.bags.concepts[start:stop] // 10, minlength=6).argmax()
        own = {CODES[most], CODES[most if rng.random() < 0.7 else int(rng.integers(len(CODES)))]}
        if rng.random() > 0.125:
            found[patient] = frozenset(f"icd9:{code}" for code in own)
    return found


def sites_of(number: int) -> tuple[SitePatients, ...]:
    """Sites of different sizes."""
    made = []
    for at in range(number):
        name = f"s{at}"
        parts = [patients(name, n, 10 * at + k) for k, n in enumerate((90 + 25 * at, 40, 60))]
        codes: dict[str, frozenset[str]] = {}
        for k, part in enumerate(parts):
            codes |= codes_of(part, 10 * at + k)
        made.append(SitePatients(name, SPACE, *parts, codes))
    return tuple(made)


def config_of(**settings: Any) -> Config:
    """Small networks and few cycles."""
    small = PhenotypeConfig(network=DanConfig(embedding=8, hidden=12))
    base = Config(
        *(),
        cycles=2,
        classifier_cycles=3,
        batch_size=16,
        learning_rate=0.02,
        minimum=10,
        systems=("icd9",),
        min_patients=10,
        model=small,
        seed=5,
    )
    return replace(base, **settings)
