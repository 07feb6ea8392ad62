"""Invented patients whose concepts say something of their codes and diseases."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fednotes.apps.phenotyping import two_stage as phenotype
from fednotes.apps.phenotyping.cohort import Bags, Cohort, FeatureSpace, SitePatients
from fednotes.apps.phenotyping.dan import DanConfig
from fednotes.apps.phenotyping.phenotyper import PhenotypeConfig
from fednotes.apps.phenotyping.stages import Classifiers
from fednotes.apps.phenotyping.two_stage import Config, Site, train
from fednotes.core.federation import State
from fednotes.engines.inprocess import InProcess
from fednotes.engines.rounds import RoundResult

VOCABULARY = 60
DISEASES = ("asthma", "diabetes", "gout")
CODES = ("4019", "25000", "4280", "49390", "2749", "5849", "2720", "V5861")
SPACE = FeatureSpace(VOCABULARY, recipe={"fingerprint": "sixty"})


def patients(site: str, number: int, seed: int, concepts: int = 12) -> Cohort:
    """Return patients with disease d in concepts 10 d to 10 d + 9; a tenth has no
    label."""
    rng = np.random.default_rng(seed)
    ill = rng.random((number, len(DISEASES))) < 0.4
    lists = []
    for row in range(number):
        disease_concepts = [
            10 * d + int(rng.integers(10))
            for d in np.flatnonzero(ill[row])
            for _ in range(2)
        ]
        lists.append(
            []
            if not concepts
            else [*disease_concepts, *rng.integers(VOCABULARY, size=concepts)]
        )
    labels = ill.astype(np.int8)
    labels[rng.random(number) < 0.1] = -1
    ids = tuple(f"{site}-{seed}-{row}" for row in range(number))
    return Cohort(site, ids, Bags.from_lists(lists, VOCABULARY), labels, DISEASES)


def codes_of(cohort: Cohort, seed: int) -> dict[str, frozenset[str]]:
    """Return codes that follow the concepts; one patient in eight was never coded."""
    rng = np.random.default_rng(seed)
    codes_by_patient = {}
    for row, patient in enumerate(cohort.patients):
        start, stop = cohort.bags.offsets[row : row + 2]
        commonest = np.bincount(
            cohort.bags.concepts[start:stop] // 10, minlength=6
        ).argmax()
        patient_codes = {
            CODES[commonest],
            CODES[commonest if rng.random() < 0.7 else int(rng.integers(len(CODES)))],
        }
        if rng.random() > 0.125:
            codes_by_patient[patient] = frozenset(
                f"icd9:{code}" for code in patient_codes
            )
    return codes_by_patient


def sites_of(number: int) -> tuple[SitePatients, ...]:
    """Return sites of different sizes."""
    hospitals = []
    for at in range(number):
        name = f"s{at}"
        parts = [
            patients(name, n, 10 * at + k) for k, n in enumerate((90 + 25 * at, 40, 60))
        ]
        codes: dict[str, frozenset[str]] = {}
        for k, part in enumerate(parts):
            codes |= codes_of(part, 10 * at + k)
        hospitals.append(SitePatients(name, SPACE, *parts, codes))
    return tuple(hospitals)


def config_of(**settings: Any) -> Config:
    """Return settings of small networks and few cycles."""
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


def without_stage_1(**settings: Any) -> Config:
    """Return settings of classifiers of TF-IDF."""
    return config_of(model=PhenotypeConfig(representation="none"), **settings)


def trained(
    sites: Sequence[SitePatients],
    config: Config,
    folder: Path | None = None,
    **options: Any,
) -> tuple[State, list[Site]]:
    """Train at these sites; the first writes its model to `folder`. options: of the
    engine.

    `config` is taken as it is where it knows the phenotypes already.
    """
    if not config.phenotypes:
        config = phenotype.METHOD.configure(config, sites)
    members = [
        Site(site, config, directory=folder if place == 0 else None)
        for place, site in enumerate(sites)
    ]
    return train(InProcess(members, **options), config), members


class Killed(Exception):
    """The run ended here."""


def cut(
    sites: Sequence[SitePatients],
    config: Config,
    last: int,
    folder: Path | None = None,
    **options: Any,
) -> None:
    """Train until this round is done, as `trained` does, and be killed then."""

    def kill(result: RoundResult) -> None:
        if result.round == last:
            raise Killed

    with pytest.raises(Killed):
        trained(sites, config, folder, observer=kill, **options)


def classifiers_of(member: Site) -> Classifiers:
    """Return stage 2 of a site that was trained."""
    assert member.classifiers is not None
    return member.classifiers


def relabelled(
    site: SitePatients,
    value: Any,
    rows: Any = slice(None),
    column: Any = slice(None),
    part: str = "train",
) -> SitePatients:
    """Return a site some of whose labels are another value."""
    cohort = getattr(site, part)
    labels = cohort.labels.copy()
    labels[rows, column] = value
    return replace(site, **{part: replace(cohort, labels=labels)})


def labelled(cohort: Cohort) -> Cohort:
    """Return the patients with a label."""
    return cohort.take((cohort.labels >= 0).any(axis=1))


def counted(bags: Bags) -> np.ndarray:
    """Return (patients, vocabulary) how often each concept occurs."""
    row = np.repeat(np.arange(len(bags)), np.diff(bags.offsets))
    table = np.zeros((len(bags), bags.vocabulary))
    np.add.at(table, (row, bags.concepts), 1)
    return table


# ---- the same numbers by NumPy alone -------------------------------------------------


def network_of(state: State) -> dict[str, np.ndarray]:
    """Return the network that a run ended with, in float64."""
    return {
        name.removeprefix("network."): value.double().numpy()
        for name, value in state.tensors.items()
        if name.startswith("network.")
    }


def dense_of(
    network: dict[str, np.ndarray], cohort: Cohort, scale: str = "none"
) -> np.ndarray:
    """Return (patients, hidden): mean of the vectors, linear layer, ReLU; l2: of length
    1."""
    means = np.zeros((len(cohort), network["embedding"].shape[1]))
    for row, (start, stop) in enumerate(itertools.pairwise(cohort.bags.offsets)):
        if stop > start:
            means[row] = network["embedding"][cohort.bags.concepts[start:stop]].mean(
                axis=0
            )
    dense = np.maximum(means @ network["hidden_weight"].T + network["hidden_bias"], 0)
    length = np.sqrt((dense**2).sum(axis=1, keepdims=True))
    return dense if scale == "none" else dense / np.where(length > 0, length, 1)


def code_chances(network: dict[str, np.ndarray], cohort: Cohort) -> np.ndarray:
    """Return the network's (patients, outputs) probabilities."""
    odds = (
        dense_of(network, cohort) @ network["output_weight"].T + network["output_bias"]
    )
    return 1 / (1 + np.exp(-odds))


def code_labels(
    cohort: Cohort, codes: Mapping[str, frozenset[str]], outputs: Sequence[str]
) -> np.ndarray:
    """Return (patients, outputs) whether a code begins so; -1 for an uncoded
    patient."""
    return np.array(
        [
            [
                any(c.startswith(o) for c in codes[p]) if p in codes else -1
                for o in outputs
            ]
            for p in cohort.patients
        ]
    )


def disease_scores(state: State, cohort: Cohort, scale: str = "l2") -> np.ndarray:
    """Return (patients, classifiers) scores by the final stages 1 and 2."""
    weight, intercept = (
        state.tensors[f"svm.{n}"].double().numpy() for n in ("weight", "intercept")
    )
    return dense_of(network_of(state), cohort, scale) @ weight + intercept
