"""A site's examples as bytes: equal in a view that leaves out their difference.

How many examples differ is counted by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from fednotes.core.types import Document, SiteData, Span, TagSet
from fednotes.data.notes import Note
from fednotes.data.notes.sites import SiteNotes
from fednotes.jobs import kinds

NOTE = Document(
    "n1", "No fever.\nMild cough.\n", (Span(3, 8, "Sign"), Span(15, 20, "Sign"))
)
TAGS = TagSet(("Sign",))


def differing(first: Any, second: Any) -> dict[str, int]:
    """Return in how many examples two sites' data differ, in each view."""
    kind = kinds.find("notes" if isinstance(first, SiteNotes) else "documents")
    views, others = kind.encode_examples(first), kind.encode_examples(second)
    assert views.keys() == others.keys()
    return {name: len(set(views[name]) ^ set(others[name])) for name in views}


def documents(*train: Document) -> SiteData:
    return SiteData("a", TAGS, train, (), ())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"id": "n2", "patient": "p"}, (0, 0, 0)),
        ({"text": "No fever.\nMild fever.\n"}, (2, 2, 2)),
        ({"spans": (Span(3, 8, "Sign"), Span(15, 20, "Symptom"))}, (0, 0, 2)),
        ({"spans": (Span(3, 8, "Finding"), Span(15, 20, "Finding"))}, (0, 0, 4)),
        ({"spans": (Span(3, 8, "Sign"),)}, (0, 2, 2)),
        ({"spans": (Span(3, 8, "Finding"),)}, (0, 2, 4)),
    ],
)
def test_examples_of_documents_are_sentences(
    change: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    """One sentence fewer is one example; another sentence, or other labels, are two."""
    names = ("sentences", "sentences with mentions", "sentences with labels")
    difference = differing(documents(NOTE), documents(replace(NOTE, **change)))
    assert difference == dict(zip(names, expected, strict=True))
    more = documents(NOTE, Document("n3", "Seen again.\n"))
    assert differing(documents(NOTE), more) == dict.fromkeys(names, 1)


def notes(*texts: str) -> SiteNotes:
    def read_notes() -> Iterator[Note]:
        return (
            Note(str(number), text, None, None, "s")
            for number, text in enumerate(texts)
        )

    return SiteNotes("a", read_notes, read_notes, len(texts), 0, 0, 0, 0, 0, 0)


def test_a_note_is_an_example_of_pretraining() -> None:
    assert differing(notes("one", "two"), notes("two", "one")) == {"notes": 0}
    assert differing(notes("one", "two"), notes("one")) == {"notes": 1}
    assert differing(notes("one", "two"), notes("one", "three")) == {"notes": 2}
