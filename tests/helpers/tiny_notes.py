"""Sites of a few short documents, written by hand."""

from __future__ import annotations

from fednotes.core.types import Document, SiteData, Span, TagSet

TEXTS = (
    ("Took aspirin daily.", (Span(5, 12, "Drug"),)),
    ("No pain today.", ()),
    ("Metformin was stopped.", (Span(0, 9, "Drug"),)),
    ("She felt well.", ()),
)
DRUGS = TagSet(("Drug",))
# A mention in pieces, a confidence, a character of two code units, a line end of
# Windows.
NOTE = Document(
    "n1",
    "Upper 😀 belly pain.\r\nTook aspirin.",
    (Span(0, 13, "ADE", ((0, 5), (8, 13))), Span(26, 33, "Drug", (), 0.75)),
    patient="7",
)


def tiny_site(number: int, size: int = 4) -> SiteData:
    """Return site s`number`, whose three parts are the same few documents.

    The documents begin at another one of four for each number.
    """
    documents = tuple(
        Document(f"{number}-{i}", *TEXTS[(i + number) % len(TEXTS)])
        for i in range(size)
    )
    return SiteData(f"s{number}", DRUGS, documents, documents, documents)
