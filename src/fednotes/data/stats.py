"""What the corpora of several sites hold, in counts: Table 1 of Ge et al. 2020.

    stats = corpus_stats({"psytar": documents, "bc5cdr": others})
    stats.sites[0].entities, stats.overlapping, stats.pairwise[0][1]

A form is a mention's text without regard to case and white space.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fednotes.core.types import Document, Span
from fednotes.data.text import normalise, split_sentences, tokenize


@dataclass(frozen=True, slots=True)
class SiteStats:
    """One site's row of Table 1 and a little more.

    entities: mentions by type. forms: distinct normalised surface forms, over all types.
    annotated_sentences: sentences with at least one mention. discontinuous: mentions that
    are in pieces.
    """

    site: str
    documents: int
    sentences: int
    annotated_sentences: int
    tokens: int
    entities: Mapping[str, int]
    forms: int
    discontinuous: int

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(self.entities)

    @property
    def mentions(self) -> int:
        return sum(self.entities.values())


@dataclass(frozen=True, slots=True)
class CorpusStats:
    """All sites.

    overlapping: distinct forms annotated at two sites or more (the paper's "overlapping
    entities"). pairwise[i][j]: distinct forms annotated at both i and j; the diagonal is the
    number of forms at i.
    """

    sites: tuple[SiteStats, ...]
    overlapping: int
    pairwise: tuple[tuple[int, ...], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        rows = [
            {
                "site": s.site,
                "documents": s.documents,
                "sentences": s.sentences,
                "annotated_sentences": s.annotated_sentences,
                "tokens": s.tokens,
                "types": list(s.types),
                "mentions": s.mentions,
                "entities": dict(s.entities),
                "forms": s.forms,
                "discontinuous": s.discontinuous,
            }
            for s in self.sites
        ]
        pairwise = [list(row) for row in self.pairwise]
        return {"sites": rows, "overlapping": self.overlapping, "pairwise": pairwise}


def span_form(text: str, span: Span) -> str:
    """A mention's normalised surface form; the pieces of a discontinuous one with a space."""
    if not span.fragments:
        return normalise(text[span.start : span.end])
    return normalise(" ".join(text[a:b] for a, b in span.fragments))


def forms_of(documents: Iterable[Document]) -> set[str]:
    """The distinct normalised surface forms annotated in the documents, over all types."""
    return {span_form(d.text, s) for d in documents for s in d.spans}


def overlapping_forms(sites: Iterable[Iterable[Document]]) -> set[str]:
    """The forms annotated at two sites or more, whatever their types."""
    count = Counter(form for documents in sites for form in forms_of(documents))
    return {form for form, held in count.items() if held > 1}


def corpus_stats(sites: Mapping[str, Sequence[Document]]) -> CorpusStats:
    """Counts over each site's documents and over what the sites share."""
    forms = {name: forms_of(documents) for name, documents in sites.items()}
    held = Counter(form for own in forms.values() for form in own)
    return CorpusStats(
        sites=tuple(_site(name, documents, len(forms[name])) for name, documents in sites.items()),
        overlapping=sum(count > 1 for count in held.values()),
        pairwise=tuple(tuple(len(a & b) for b in forms.values()) for a in forms.values()),
    )


def _site(name: str, documents: Sequence[Document], forms: int) -> SiteStats:
    sentences = annotated = tokens = 0
    for document in documents:
        bounds = split_sentences(document)
        sentences += len(bounds)
        tokens += len(document.tokens) or len(tokenize(document.text))
        starts = [s.start for s in document.spans]
        if starts:
            annotated += sum(any(a <= at < b for at in starts) for a, b in bounds)
    spans = [s for d in documents for s in d.spans]
    entities = Counter(s.label for s in spans)
    return SiteStats(
        site=name,
        documents=len(documents),
        sentences=sentences,
        annotated_sentences=annotated,
        tokens=tokens,
        entities=dict(sorted(entities.items())),
        forms=forms,
        discontinuous=sum(bool(s.fragments) for s in spans),
    )
