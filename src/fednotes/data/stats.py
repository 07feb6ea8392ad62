"""What the corpora of several sites hold, in counts: Table 1 of Ge et al. 2020.

A form is a mention's text without regard to case and white space.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fednotes.core.types import Document, Span
from fednotes.data.text import normalise, split_sentences, tokenize


def span_form(text: str, span: Span) -> str:
    """A mention's normalised surface form; the pieces of a discontinuous one with a
    space."""
    return normalise(" ".join(text[a:b] for a, b in span.pieces))


def _forms(documents: Iterable[Document]) -> set[str]:
    return {span_form(d.text, s) for d in documents for s in d.spans}


def overlapping_forms(sites: Iterable[Iterable[Document]]) -> set[str]:
    """The forms annotated at two sites or more, whatever their types."""
    count = Counter(form for documents in sites for form in _forms(documents))
    return {form for form, held in count.items() if held > 1}


def corpus_stats(sites: Mapping[str, Sequence[Document]]) -> dict[str, Any]:
    """Counts over each site's documents and over what the sites share, as plain values.

    {"sites": [a row of Table 1 and a little more], "overlapping": distinct forms
    annotated at two sites or more (the paper's "overlapping entities"), "pairwise":
    [i][j] distinct forms annotated at both i and j; the diagonal is the number of forms
    at i}. In a row: "annotated_sentences" have at least one mention, "entities" are
    mentions by type, "forms" the distinct ones over all types, "discontinuous" mentions
    in pieces.
    """
    forms = [_forms(documents) for documents in sites.values()]
    rows = zip(sites.items(), forms, strict=True)
    return {
        "sites": [_site(name, documents, len(own)) for (name, documents), own in rows],
        "overlapping": len(overlapping_forms(sites.values())),
        "pairwise": [[len(a & b) for b in forms] for a in forms],
    }


def _site(name: str, documents: Sequence[Document], forms: int) -> dict[str, Any]:
    sentences = annotated = 0
    for document in documents:
        bounds, starts = split_sentences(document), [s.start for s in document.spans]
        sentences += len(bounds)
        annotated += (
            sum(any(a <= at < b for at in starts) for a, b in bounds) if starts else 0
        )
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
