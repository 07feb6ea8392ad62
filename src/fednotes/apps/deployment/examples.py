"""A site's training examples as bytes, for the comparison with those of earlier jobs.

Whoever writes a job can say how labels are called. Compared with its labels alone, each example
would then look like another, though one sentence fewer is read. So examples are given in several
views, from the text alone to the text with all that is known of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fednotes.apps.phenotyping.cohort import Bags, Cohort, SitePatients
from fednotes.core.types import Document
from fednotes.data.notes.sites import SiteNotes
from fednotes.data.split import sentence_documents
from fednotes.privacy.secure_sum.crypto import joined


def training_examples(data: Any) -> dict[str, Iterator[bytes]]:
    """Return what a site trains on, example for example.

    Args:
        data: The site's `SiteData`, `SiteNotes` or `SitePatients`.

    Returns:
        The name of each view with its examples: the sentences of annotated documents, notes, or
        patients.
    """
    if isinstance(data, SitePatients):
        return {
            "patients": (joined(patient) for patient in data.train.patients),
            "patients with labels and codes": _outcomes(data),
            "patients with features": _features(data.train),
        }
    if isinstance(data, SiteNotes):
        return {"notes": (joined(note.text) for note in data.train())}
    sentences = sentence_documents(data.train)
    return {
        "sentences": (joined(sentence.text) for sentence in sentences),
        "sentences with mentions": (_annotated(s, labels=False) for s in sentences),
        "sentences with labels": (_annotated(s, labels=True) for s in sentences),
    }


def _annotated(sentence: Document, *, labels: bool) -> bytes:
    """Return a sentence with the places of its mentions, and with their labels on request."""
    parts: list[str | int] = [sentence.text]
    for span in sorted(sentence.spans):
        parts.append(str(span.pieces))
        if labels:
            parts.append(span.label)
    return joined(*parts)


def _outcomes(data: SitePatients) -> Iterator[bytes]:
    """Yield each training patient with their labels and codes."""
    for patient, labels in zip(data.train.patients, data.train.labels, strict=True):
        codes = data.codes.get(patient)
        coded = "not coded" if codes is None else "coded"
        yield joined(patient, labels.tobytes(), coded, *sorted(codes or ()))


def _features(cohort: Cohort) -> Iterator[bytes]:
    """Yield each patient of a cohort with the concepts of their notes, or with their vector."""
    bags = cohort.bags
    for row, patient in enumerate(cohort.patients):
        if isinstance(bags, Bags):
            values = bags.concepts[bags.offsets[row] : bags.offsets[row + 1]]
        else:
            values = bags.values[row]
        yield joined(patient, values.tobytes())
