"""Statistics of the corpora of several sites: Table 1 of Ge et al. 2020.

A form is a mention's text, ignoring case and white space. Only the first 1,000
characters of each piece count, so that many long mentions of the same text cost little.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fednotes.core.types import Document, Span
from fednotes.data.text import normalise, split_sentences, tokenize

# Maximum number of characters of each piece of a mention that count towards its form.
_MAX_PIECE = 1000


def normalise_span(text: str, span: Span) -> str:
    """Return the form of a mention: its normalised pieces, joined by spaces.

    Args:
        text: The document's text.
        span: The mention.
    """
    pieces = (text[start : min(end, start + _MAX_PIECE)] for start, end in span.pieces)
    return normalise(" ".join(pieces))


def _collect_forms(documents: Iterable[Document]) -> set[str]:
    """Return the forms of all mentions in documents."""
    return {
        normalise_span(document.text, span)
        for document in documents
        for span in document.spans
    }


def find_overlapping_forms(sites: Iterable[Iterable[Document]]) -> set[str]:
    """Return the forms annotated at two or more sites, with any types."""
    sites_with = Counter(
        form for documents in sites for form in _collect_forms(documents)
    )
    return {form for form, number in sites_with.items() if number > 1}


def compute_corpus_stats(sites: Mapping[str, Sequence[Document]]) -> dict[str, Any]:
    """Compute each site's statistics, and the overlap between sites.

    Args:
        sites: The documents of each site.

    Returns:
        "sites": a row of Table 1 for each site, with a few more columns. Its
        "annotated_sentences" have at least one mention, "entities" are mentions by
        type, "forms" the distinct forms over all types, and "discontinuous" counts
        mentions of several pieces. "overlapping": distinct forms annotated at two or
        more sites (the paper's "overlapping entities"). "pairwise": [i][j] distinct
        forms annotated at both i and j; on the diagonal, the number of forms at i.
    """
    forms = [_collect_forms(documents) for documents in sites.values()]
    return {
        "sites": [
            _make_site_row(name, documents, forms=len(site_forms))
            for (name, documents), site_forms in zip(sites.items(), forms, strict=True)
        ],
        "overlapping": len(find_overlapping_forms(sites.values())),
        "pairwise": [[len(a & b) for b in forms] for a in forms],
    }


def _make_site_row(
    name: str, documents: Sequence[Document], *, forms: int
) -> dict[str, Any]:
    """Return the row of Table 1 for a site with this many distinct forms."""
    sentences = 0
    annotated = 0
    for document in documents:
        bounds = split_sentences(document)
        sentences += len(bounds)
        starts = sorted(span.start for span in document.spans)
        for start, end in bounds:
            annotated += bisect_left(starts, start) < bisect_left(starts, end)
    spans = [span for document in documents for span in document.spans]
    entities = dict(sorted(Counter(span.label for span in spans).items()))
    return {
        "site": name,
        "documents": len(documents),
        "sentences": sentences,
        "annotated_sentences": annotated,
        "tokens": sum(len(d.tokens) or len(tokenize(d.text)) for d in documents),
        "types": [*entities],
        "mentions": len(spans),
        "entities": entities,
        "forms": forms,
        "discontinuous": sum(bool(span.fragments) for span in spans),
    }
