"""What the corpora of several sites hold, in counts: Table 1 of Ge et al. 2020.

    stats = corpus_stats({"psytar": documents, "bc5cdr": others})
    stats.sites[0].entities, stats.overlapping, stats.pairwise[0][1]

A form is a mention's text without regard to case and white space.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fednotes.core.types import Document, Span
from fednotes.data.text import normalise, split_sentences, tokenize


@dataclass(frozen=True, slots=True)
class SiteStats:
    """One site's row of Table 1 and a little more.

    annotated_sentences: sentences with at least one mention. entities: mentions by type. forms:
    distinct normalised surface forms, over all types. discontinuous: mentions in pieces.
    """

    site: str
    documents: int
    sentences: int
    annotated_sentences: int
    tokens: int
    types: tuple[str, ...]
    mentions: int
    entities: Mapping[str, int]
    forms: int
    discontinuous: int


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
        return asdict(self)


def span_form(text: str, span: Span) -> str:
    """A mention's normalised surface form; the pieces of a discontinuous one with a space."""
    return normalise(" ".join(text[a:b] for a, b in span.pieces))


def _forms(documents: Iterable[Document]) -> set[str]:
    return {span_form(d.text, s) for d in documents for s in d.spans}


def overlapping_forms(sites: Iterable[Iterable[Document]]) -> set[str]:
    """The forms annotated at two sites or more, whatever their types."""
    count = Counter(form for documents in sites for form in _forms(documents))
    return {form for form, held in count.items() if held > 1}


def corpus_stats(sites: Mapping[str, Sequence[Document]]) -> CorpusStats:
    """Counts over each site's documents and over what the sites share."""
    forms = [_forms(documents) for documents in sites.values()]
    rows = zip(sites.items(), forms, strict=True)
    return CorpusStats(
        tuple(_site(name, documents, len(own)) for (name, documents), own in rows),
        len(overlapping_forms(sites.values())),
        tuple(tuple(len(a & b) for b in forms) for a in forms),
    )


def _site(name: str, documents: Sequence[Document], forms: int) -> SiteStats:
    sentences = annotated = 0
    for document in documents:
        bounds, starts = split_sentences(document), [s.start for s in document.spans]
        sentences += len(bounds)
        annotated += sum(any(a <= at < b for at in starts) for a, b in bounds) if starts else 0
    spans = [span for document in documents for span in document.spans]
    entities = dict(sorted(Counter(span.label for span in spans).items()))
    return SiteStats(
        name,
        documents=len(documents),
        sentences=sentences,
        annotated_sentences=annotated,
        tokens=sum(len(d.tokens) or len(tokenize(d.text)) for d in documents),
        types=tuple(entities),
        mentions=len(spans),
        entities=entities,
        forms=forms,
        discontinuous=sum(bool(span.fragments) for span in spans),
    )
