"""The units that differential privacy protects: patients, documents or sentences.

All data of one unit at a site are drawn and clipped together, so the presence of the
whole unit is hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fednotes.core.errors import ConfigError
from fednotes.core.types import Document
from fednotes.data.text import normalise
from fednotes.privacy.promise import Unit


def require_patients(site: str, unit: Unit, patients: Iterable[str | None]) -> None:
    """Check that every document names its patient if the unit is a patient.

    Args:
        site: The site's name, for the message.
        unit: The protected unit.
        patients: The patient of each training document.

    Raises:
        ConfigError: The unit is a patient, and some document names none.
    """
    if unit != "patient":
        return

    is_known = [bool(normalise(patient or "")) for patient in patients]
    unknown = is_known.count(False)
    if unknown:
        raise ConfigError(
            f'[privacy] unit = "patient": {unknown:,} of {len(is_known):,} training '
            f"documents of site {site!r} name no patient, so a document is the largest "
            'unit that is known: set unit = "document", or add the patients to '
            "the files"
        )


def make_unit_key(patient: str | None, note: str, unit: Unit) -> tuple[str, ...]:
    """Return a key that is equal for texts of the same unit.

    Patients whose names differ only in case or blanks are the same patient.
    """
    name = normalise(patient or "")
    return (name,) if unit == "patient" else (name, note)


def group_documents(
    site: str, documents: Sequence[Document], unit: Unit
) -> list[list[Document]]:
    """Group documents by their unit, in the order of the units' first occurrence.

    If documents are single sentences, a group of a "document" contains its sentences.

    Raises:
        ConfigError: The unit is a patient, and some document names none.
    """
    require_patients(site, unit, (document.patient for document in documents))
    groups: dict[tuple[str, ...], list[Document]] = {}
    for document in documents:
        note = document.meta.get("document", document.id)
        key = make_unit_key(document.patient, note, unit)  # [abadi units]
        groups.setdefault(key, []).append(document)
    return list(groups.values())


def group_sentences(site: Any, unit: Unit) -> list[np.ndarray]:
    """Return the sentences of each unit of a site's training corpus.

    Args:
        site: A site that finds mentions, with `train_set`, `model` and `id`.
        unit: The protected unit.

    Returns:
        An array of sentence indices for each unit.

    Raises:
        ConfigError: The unit is a patient and some document names none, or the unit is
            a sentence and the model reads several sentences together.
    """
    corpus = site.train_set
    document_of_sentence = corpus.encoded.sentence_document
    if unit == "sentence":
        # Leaving out a sentence must not change how the others are read.
        what_model_reads = site.model.config.unit
        if what_model_reads != "sentence":
            raise ConfigError(
                '[privacy] unit = "sentence": this model reads whole documents: set '
                'unit = "document" or "patient", or [model] context = "sentence"'
            )
        return [np.array([sentence]) for sentence in range(len(document_of_sentence))]

    # By identity: two documents may be equal.
    unit_numbers = {}
    for number, group in enumerate(group_documents(site.id, corpus.documents, unit)):
        for document in group:
            unit_numbers[id(document)] = number
    unit_of_document = np.array(
        [unit_numbers[id(document)] for document in corpus.documents]
    )
    unit_of_sentence = unit_of_document[document_of_sentence]
    # The sentences of a unit become neighbours, and each unit ends where the next
    # sentence has another number.
    order = np.argsort(unit_of_sentence, kind="stable")
    # [abadi units]
    boundaries = np.flatnonzero(np.diff(unit_of_sentence[order])) + 1
    return np.split(order, boundaries)
