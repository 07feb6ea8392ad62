"""The repr of values that hold notes."""

from __future__ import annotations

from fednotes.core.types import Document, SiteData, Span, TagSet
from fednotes.data.batches import encode_corpus
from fednotes.data.notes import Note
from fednotes.jobs.parts import Part


def test_the_repr_of_objects_with_notes_shows_neither_text_nor_patient() -> None:
    """In a log, a traceback's locals or a notebook."""
    note = Document(
        "n1", "Took Xylozan.", (Span(5, 12, "Drug"),), "Erika", ("F32",), {"a": "Hugo"}
    )
    site = SiteData("mercy", TagSet(("Drug",)), (note,), (note,), (note,))
    space = encode_corpus((note,), site.tags)
    secrets = (note, site, Part("alone", (site,), None), space)
    for value in (
        *secrets,
        Note("n1", "Took Xylozan.", "Erika", None, "x"),
        {"of": secrets},
    ):
        assert not [
            t for t in ("Took", "Xylozan", "Erika", "F32", "Hugo") if t in repr(value)
        ]
    assert repr(note) == (
        "Document(id='n1', spans=(Span(start=5, end=12, label='Drug', fragments=(), "
        "confidence=None),), sentences=(), tokens=())"
    )
    assert "mercy" in repr(site)
