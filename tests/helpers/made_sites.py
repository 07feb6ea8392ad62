"""Small sites of notes, with mentions and without, made of a few words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fednotes.core.types import Document, SiteData, Span, TagSet
from fednotes.data.notes import Note
from fednotes.data.notes.sites import SiteNotes

WORDS = "patient has pain in the chest was given aspirin daily denies fever and nausea".split()


def made_notes(seed: int, count: int) -> list[Note]:
    rng = np.random.default_rng(seed)
    lines = [
        ". ".join(" ".join(rng.choice(WORDS, 9)) for _ in range(3))
        for _ in range(count)
    ]
    return [
        Note(f"{seed}-{i}", t, f"{seed}-p{i}", None, "made")
        for i, t in enumerate(lines)
    ]


def read_patient_notes(name: str, notes: Sequence[Note]) -> SiteNotes:
    n = len(notes)
    return SiteNotes(
        name, lambda: iter(notes), lambda: iter(notes[:2]), n, 2, n, 2, 1, 1, 1
    )


def mentions(name: str, seed: int, count: int) -> SiteData:
    rng = np.random.default_rng(seed)
    documents = []
    for i in range(count + 6):
        before = " ".join(rng.choice(WORDS[:6], int(rng.integers(1, 6))))
        at = len(before) + 1
        text = f"{before} aspirin daily."
        documents.append(Document(f"{name}-{i}", text, (Span(at, at + 7, "drug"),)))
    parts = (
        tuple(documents[:count]),
        tuple(documents[count:-3]),
        tuple(documents[-3:]),
    )
    return SiteData(name, TagSet(("drug",)), *parts)
