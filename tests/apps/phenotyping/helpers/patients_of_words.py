"""Invented patients whose notes name their diseases, as sub-words of a tiny BERT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tiny_models import WORDS

from fednotes.apps.phenotyping.cohort import Cohort, SitePatients, SubWords
from fednotes.apps.phenotyping.config import Config
from fednotes.apps.phenotyping.features import (
    SubWordFeatures,
    TextConfig,
    build_features,
)
from fednotes.apps.phenotyping.label_attention import AttentionConfig
from fednotes.apps.phenotyping.phenotyper import PhenotypeConfig

ILLNESSES = ("asthma", "hypertension")
CODES = ("icd9:401", "icd9:250")
SMALL = AttentionConfig(length=8, chunks=5, rank=2, width=6, dropout=0.1)


def features_of(bert: Path) -> SubWordFeatures:
    """Return what reads notes for the tiny BERT."""
    features = build_features(TextConfig(str(bert)), Path(), tunes_encoder=True)
    assert isinstance(features, SubWordFeatures)
    return features


def sub_words(bert: Path, notes: Mapping[str, Sequence[str]]) -> SubWords:
    """Return the sub-words of each patient's notes."""
    values = features_of(bert).make(notes).values
    assert isinstance(values, SubWords)
    return values


def write_notes(
    site: str, number: int, seed: int, longest: int = 19
) -> dict[str, list[str]]:
    """Return up to three notes of each patient; a few patients have none.

    Args:
        site: Name of the site.
        number: Number of patients.
        seed: Seed of the words.
        longest: Most words of a note.
    """
    rng = np.random.default_rng(seed)
    return {
        f"{site}-{seed}-{row}": [
            " ".join(rng.choice(WORDS, int(rng.integers(1, longest + 1))))
            for _ in range(int(rng.integers(4)))
        ]
        for row in range(number)
    }


def make_cohort(
    bert: Path, site: str, number: int, seed: int, longest: int = 19
) -> Cohort:
    """Return patients with the diseases that their notes name; some are unlabelled."""
    notes = write_notes(site, number, seed, longest)
    labels = np.array(
        [[word in " ".join(texts) for word in ILLNESSES] for texts in notes.values()],
        np.int8,
    )
    labels[np.random.default_rng(seed).random(number) < 0.1] = -1
    labels[3] = -1
    return Cohort(site, tuple(notes), sub_words(bert, notes), labels, ILLNESSES)


def sites_of_words(bert: Path, number: int = 4) -> list[SitePatients]:
    """Return sites of different sizes, whose patients are coded with their diseases."""
    space = features_of(bert).space
    sites = []
    for at in range(number):
        name = f"w{at}"
        parts = [
            make_cohort(bert, name, size, 10 * at + k)
            for k, size in enumerate((14 + 3 * at, 8, 8))
        ]
        codes = {
            patient: frozenset(
                code for code, label in zip(CODES, row, strict=True) if label == 1
            )
            for part in parts
            for patient, row in zip(part.patients, part.labels.tolist(), strict=True)
        }
        sites.append(SitePatients(name, space, *parts, codes))
    return sites


def without_labels(site: SitePatients) -> SitePatients:
    """Return a site without phenotypes."""

    def strip(cohort: Cohort) -> Cohort:
        return replace(cohort, labels=cohort.labels[:, :0], outputs=())

    return replace(
        site, train=strip(site.train), valid=strip(site.valid), test=strip(site.test)
    )


def attention_config(**settings: Any) -> Config:
    """Return settings of few cycles."""
    base = Config(
        cycles=2,
        batch_size=4,
        learning_rate=0.01,
        outputs=CODES,
        minimum=1,
        model=PhenotypeConfig(representation="attention", attention=SMALL),
        seed=5,
    )
    return replace(base, **settings)
