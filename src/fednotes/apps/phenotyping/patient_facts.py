"""The public facts of a site of patients, and its training patients as bytes.

Sites compare the facts before round 1; the bytes are compared with those of earlier
jobs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fednotes.apps.phenotyping.cohort import (
    Bags,
    Cohort,
    ConceptVectors,
    FeatureSpace,
    SitePatients,
    SubWords,
    Vectors,
)
from fednotes.jobs.job import Job
from fednotes.privacy.secure_sum.crypto import join_parts


def describe_patients(
    job: Job,  # noqa: ARG001 - part of the interface of SiteKind
    data: SitePatients,
) -> dict[str, Any]:
    """Return the public facts of a site of patients, by field of the description."""
    return {
        "width": data.space.width,
        "dense": data.space.dense,
        "features": data.space.fingerprint,
        "phenotypes": tuple(data.phenotypes),
        "coded": bool(data.codes),
        "vectors": data.vectors.digest if data.vectors else "",
    }


def make_patient_stub(site: str, description: Any) -> SitePatients:
    """Return a site without patients that matches a description.

    Args:
        site: Name of the site.
        description: An object with the facts that `describe_patients` returns, as
            attributes.
    """
    no_vectors = Vectors(np.zeros((0, description.width), np.float32))
    labels = np.zeros((0, len(description.phenotypes)), np.int8)
    no_patients = Cohort(
        site, (), bags=no_vectors, labels=labels, outputs=description.phenotypes
    )
    space = FeatureSpace(
        description.width,
        dense=description.dense,
        recipe={"fingerprint": description.features},
    )
    vectors = None
    if description.vectors:
        empty_array = np.zeros((0, 0))
        vectors = ConceptVectors(empty_array, empty_array, description.vectors)
    codes: dict[str, frozenset[str]] = {"": frozenset()} if description.coded else {}
    return SitePatients(
        site,
        space,
        train=no_patients,
        valid=no_patients,
        test=no_patients,
        codes=codes,
        vectors=vectors,
    )


def encode_training_examples(data: SitePatients) -> dict[str, Iterator[bytes]]:
    """Return the training patients of a site as bytes, in several views.

    Returns:
        The patients by the name of the view: the patients alone, with their labels and
            codes, and with the features of their notes.
    """
    return {
        "patients": (join_parts(patient) for patient in data.train.patients),
        "patients with labels and codes": _encode_outcomes(data),
        "patients with features": _encode_features(data.train),
    }


def _encode_outcomes(data: SitePatients) -> Iterator[bytes]:
    """Yield each training patient with their labels and codes, as bytes."""
    for patient, labels in zip(data.train.patients, data.train.labels, strict=True):
        codes = data.codes.get(patient)
        coded = "not coded" if codes is None else "coded"
        yield join_parts(patient, labels.tobytes(), coded, *sorted(codes or ()))


def _encode_features(cohort: Cohort) -> Iterator[bytes]:
    """Yield each patient with what is known of the notes, as bytes.

    This is their concepts, their vector or their sub-words.
    """
    bags = cohort.bags
    for row, patient in enumerate(cohort.patients):
        if isinstance(bags, Bags):
            values = bags.concepts[bags.offsets[row] : bags.offsets[row + 1]]
        elif isinstance(bags, SubWords):
            values = bags.get_ids(row)
        else:
            values = bags.values[row]
        yield join_parts(patient, values.tobytes())
