"""Predictions for single patients, and the concepts that count most for a phenotype."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from fednotes.apps.phenotyping.cohort import (
    LABELS,
    PRESENT,
    UNLABELLED,
    Bags,
    Inputs,
    SitePatients,
)
from fednotes.apps.phenotyping.compare_patients import read_known_classes
from fednotes.apps.phenotyping.dictionary import Dictionary
from fednotes.apps.phenotyping.features import (
    ConceptFeatures,
    Features,
    load_features,
)
from fednotes.apps.phenotyping.phenotyper import Phenotyper, load_phenotyper
from fednotes.core.errors import DataError, ModelError
from fednotes.jobs.job import Side
from fednotes.jobs.patient_reviews import (
    FeatureWeight,
    ReviewedPatient,
    ReviewedPatients,
)
from fednotes.jobs.run_folder import find_model_folder

MAX_WEIGHTS: Final = 12  # features that are listed for and against a phenotype

_LABEL_NAMES = {value: name for name, value in LABELS.items()}


def review_run(side: Side) -> list[ReviewedPatients]:
    """Return the labelled test patients of each site with its model's predictions.

    Args:
        side: The run, and the condition whose models predict.

    Raises:
        DataError: A model is missing, predicts other phenotypes or reads other
            features, or no test patient is labelled.
    """
    reviewed = []
    for site in side.sites:
        rows = np.flatnonzero((site.test.labels != UNLABELLED).any(axis=1))
        if len(rows):
            folder = find_model_folder(side.run, side.condition, site.id)
            reviewed.append(_review_site(site, rows, folder))
    if not reviewed:
        raise DataError(f"{side.run}: no test patient is labelled")
    return reviewed


def _review_site(
    site: SitePatients, rows: np.ndarray, folder: Path
) -> ReviewedPatients:
    """Return some test patients of a site with the predictions of its model.

    Args:
        site: The site.
        rows: (patients,) indices of the patients.
        folder: The folder of the model.
    """
    model = load_phenotyper(folder)
    read_known_classes(model, site, folder)
    return review_patients(
        site.id,
        model,
        [site.test.patients[row] for row in rows],
        inputs=site.test.bags.take(rows),
        labels=site.test.labels[rows],
        features=_load_model_features(model),
    )


def _load_model_features(model: Phenotyper) -> Features | None:
    """Return a model's dictionary or encoder; None if it is not at its place."""
    if not has_feature_weights(model):
        return None
    try:
        return load_features(model.space.recipe)
    except ModelError:  # the weights are left out, the predictions need no names
        return None


def review_patients(
    name: str,
    model: Phenotyper,
    patients: Sequence[str],
    *,
    inputs: Inputs,
    labels: np.ndarray,
    features: Features | None,
) -> ReviewedPatients:
    """Return patients with a model's predictions.

    Args:
        name: Name of the site or file.
        model: The model.
        patients: Names of the patients.
        inputs: Their inputs.
        labels: (patients, phenotypes) labels.
        features: The model's dictionary or encoder; None if it is not available.
    """
    prediction = model.predict(inputs)
    present = prediction.probabilities[:, :, PRESENT].tolist()
    predicted = prediction.classes.tolist()
    sizes = inputs.sizes.tolist() if isinstance(inputs, Bags) else [None] * len(inputs)
    rows = zip(patients, labels.tolist(), predicted, present, sizes, strict=True)
    return ReviewedPatients(
        name,
        model.phenotypes,
        [
            _review_patient(model.phenotypes, patient, gold, classes, chances, size)
            for patient, gold, classes, chances, size in rows
        ],
        confidence=describe_probabilities(model),
        weights=weigh_features(model, features),
    )


def _review_patient(
    phenotypes: Sequence[str],
    patient: str,
    gold: Sequence[int],
    classes: Sequence[int],
    chances: Sequence[float],
    size: int | None,
) -> ReviewedPatient:
    """Return one patient with a model's predictions.

    Args:
        phenotypes: Names of the phenotypes.
        patient: Name of the patient.
        gold: The label of each phenotype.
        classes: The predicted label of each phenotype.
        chances: The probability that each phenotype is present.
        size: The number of concepts; None for a model of vectors.
    """
    labelled = {
        phenotype: _LABEL_NAMES[label]
        for phenotype, label in zip(phenotypes, gold, strict=True)
        if label != UNLABELLED
    }
    predicted = {
        phenotype: _LABEL_NAMES.get(label)
        for phenotype, label in zip(phenotypes, classes, strict=True)
    }
    probabilities = {
        phenotype: chance if predicted[phenotype] else None
        for phenotype, chance in zip(phenotypes, chances, strict=True)
    }
    return ReviewedPatient(patient, labelled, predicted, probabilities, concepts=size)


def describe_probabilities(model: Phenotyper) -> str:
    """Return what a model's probabilities are."""
    if not model.phenotypes:
        return "the network's probability of each billing code; not calibrated"
    if model.attention is not None:
        return "the network's probability of each phenotype; not calibrated"
    if model.platt is None:
        return (
            "the classifier's margin, which orders patients but is not a probability: "
            "not calibrated"
        )
    return (
        'the probability of "present", calibrated on the training sites\' patients '
        "(Platt)"
    )


# ---- the weights of concepts ---------------------------------------------------------


def has_feature_weights(model: Phenotyper) -> bool:
    """Return whether the classifiers of a model weigh single concepts.

    Those of a model with a network weigh what the network makes of all concepts.
    """
    return model.network is None and not model.space.dense and bool(model.phenotypes)


def weigh_features(
    model: Phenotyper, features: Features | None
) -> dict[str, list[FeatureWeight]]:
    """Return the concepts that count most for and against each phenotype.

    Args:
        model: The model.
        features: Its dictionary; None if it is not available.

    Returns:
        The largest weights of each phenotype, and the smallest; nothing for a model
        that does not weigh single concepts.
    """
    svms = model.svms
    if (
        svms is None
        or not has_feature_weights(model)
        or not isinstance(features, ConceptFeatures)
    ):
        return {}
    chosen: dict[str, list[tuple[int, float]]] = {}
    for column, (disease, positive) in enumerate(svms.classifiers):
        if positive == PRESENT:
            weights = svms.weight[:, column]
            chosen[model.phenotypes[disease]] = _select_extremes(weights)
    concepts = {index for weights in chosen.values() for index, _ in weights}
    names = _name_concepts(features.matcher.dictionary, concepts)
    return {
        phenotype: [FeatureWeight(names[index], weight) for index, weight in weights]
        for phenotype, weights in chosen.items()
    }


def _select_extremes(weights: np.ndarray) -> list[tuple[int, float]]:
    """Return the largest and smallest weights and their indices, largest first.

    Weights of 0 are left out.
    """
    order = np.argsort(-weights, kind="stable")
    ends = [*order[:MAX_WEIGHTS], *order[max(MAX_WEIGHTS, len(order) - MAX_WEIGHTS) :]]
    return [(int(index), float(weights[index])) for index in ends if weights[index]]


def _name_concepts(
    dictionary: Dictionary, concepts: Iterable[int]
) -> Mapping[int, str]:
    """Return the id and a term of each concept.

    The second half of a vocabulary of marked concepts has those that do not hold.

    Args:
        dictionary: The dictionary.
        concepts: Indices into the model's vocabulary.
    """
    number = len(dictionary)
    terms = _find_terms(dictionary, {index % number for index in concepts})
    names = {}
    for index in concepts:
        concept = index % number
        name = f"{terms.get(concept, '')} ({dictionary.concepts[concept]})".strip()
        names[index] = f"not: {name}" if index >= number else name
    return names


def _find_terms(dictionary: Dictionary, concepts: Iterable[int]) -> dict[int, str]:
    """Return the first term of each concept, by the index of the concept."""
    places = np.flatnonzero(np.isin(dictionary.members, list(concepts)))
    owners = np.searchsorted(dictionary.bounds, places, side="right") - 1
    terms: dict[int, str] = {}
    for place, owner in zip(places.tolist(), owners.tolist(), strict=True):
        terms.setdefault(int(dictionary.members[place]), dictionary.terms[owner])
    return terms
