"""A corpus as a pointer network reads it: sub-words, words on them, and entities on those.

Sentences and words are the project's own (`data/batches.py`). A sentence too long for the
model is cut between words, never inside an annotated entity; its pieces are sentences to the
model, and what is found in them lies in the document where it was.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from fednotes.core.errors import ConfigError, DataError, nearest
from fednotes.core.types import Document, Span, TagSet
from fednotes.data.batches import encode_corpus
from fednotes.data.tags import Alignment

Subwords = Callable[[Sequence[str]], list[list[int]]]  # word forms → the sub-words of each


@dataclass(frozen=True)
class Limits:
    """What a model can read and write: sub-words and entities of one sentence, at least 1."""

    subwords: int
    entities: int


@dataclass(frozen=True, eq=False)
class PointerCorpus:
    """One corpus, flat. Belongs to its site, like the documents.

    known: types that the site annotates itself. sentence_document: (sentences,) index into
    documents. ids: (sub-words,); sentence s has bounds[s]:bounds[s + 1] of them.
    offsets: (words, 2) characters in the document; first, last: (words,) a word's first and
    last sub-word, counted in its sentence; sentence s has the words
    word_bounds[s]:word_bounds[s + 1]. Words of which the tokeniser leaves nothing are not here.
    entities: (entities, 3) first and last sub-word, type; sentence s has
    entity_bounds[s]:entity_bounds[s + 1], in the target's order. Nested and adjacent ones are
    all there; of a discontinuous one, the whole stretch. alignment: how the spans fell.
    """

    documents: tuple[Document, ...]
    tagset: TagSet
    known: frozenset[str]
    limits: Limits
    sentence_document: np.ndarray
    ids: np.ndarray
    bounds: np.ndarray
    offsets: np.ndarray
    first: np.ndarray
    last: np.ndarray
    word_bounds: np.ndarray
    entities: np.ndarray
    entity_bounds: np.ndarray
    alignment: Alignment

    @property
    def sentences(self) -> int:
        """Number of sentences and pieces of sentences."""
        return len(self.sentence_document)

    @property
    def lengths(self) -> np.ndarray:
        """(sentences,) sub-words, at least 1 and at most the limit."""
        return np.diff(self.bounds)

    def spans(self, sentence: int, entities: np.ndarray) -> list[Span]:
        """Entities (n, 3) of one sentence → whole words' characters in its document."""
        words = slice(self.word_bounds[sentence], self.word_bounds[sentence + 1])
        first, offsets = self.first[words], self.offsets[words]
        start = np.searchsorted(first, entities[:, 0], side="right") - 1
        end = np.searchsorted(first, entities[:, 1], side="right") - 1
        rows = zip(offsets[start, 0], offsets[end, 1], entities[:, 2], strict=True)
        return [Span(int(a), int(b), self.tagset.types[t]) for a, b, t in rows]


def encode_pointers(
    documents: Sequence[Document], tagset: TagSet, subwords: Subwords, limits: Limits
) -> PointerCorpus:
    """Documents → sub-words and entities, every type known.

    An entity that alone exceeds a limit is cut with its sentence and keeps its first piece; one
    word that does keeps its first sub-words; both stay where they are in the document.
    Raises DataError for a label that the tag set does not have.
    """
    _check_labels(documents, tagset)
    whole = encode_corpus(documents, tagset, max_tokens=sys.maxsize)
    table = [ids[: limits.subwords] for ids in subwords(whole.forms)]
    size = np.array([len(ids) for ids in table], dtype=np.int64)[whole.form]  # (words,)
    kept = size > 0
    counts = (
        np.add.reduceat(kept.astype(np.int64), whole.bounds[:-1])
        if whole.sentences
        else np.zeros(0, int)
    )
    bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    owner = whole.sentence_document[counts > 0]
    bounds = np.unique(bounds)  # sentences of which nothing is left are left out
    size, offsets = size[kept], whole.offsets[kept].astype(np.int64)
    found = _on_words(documents, tagset, offsets, _document_bounds(len(documents), owner, bounds))
    pieces = _cut(bounds, size, found.words, limits)
    owner = owner[np.searchsorted(bounds, pieces[:-1], side="right") - 1]
    ids = [table[form] for form in whole.form[kept].tolist()]
    total = np.concatenate([[0], np.cumsum(size)])
    before = np.repeat(total[pieces[:-1]], np.diff(pieces))  # sub-words before a word's sentence
    empty = PointerCorpus(
        documents=tuple(documents),
        tagset=tagset,
        known=frozenset(tagset.types),
        limits=limits,
        sentence_document=owner,
        ids=np.fromiter((i for word in ids for i in word), np.int64, int(total[-1])),
        bounds=total[pieces],
        offsets=offsets,
        first=total[:-1] - before,
        last=total[1:] - 1 - before,
        word_bounds=pieces,
        entities=np.zeros((0, 3), np.int64),
        entity_bounds=np.zeros(len(pieces), np.int64),
        alignment=Alignment(),
    )
    return _with_entities(empty, found)


def annotate_pointers(
    corpus: PointerCorpus, documents: Sequence[Document], known: Collection[str]
) -> PointerCorpus:
    """The same sentences with the spans of `documents`; see `Model.annotate`.

    Sentences stay cut where they were: a span that goes over such a cut keeps its first part.
    Raises DataError for other texts or an unknown label, ConfigError for an unknown type.
    """
    given, old = tuple(documents), corpus.documents
    same = len(given) == len(old) and all(a.text == b.text for a, b in zip(given, old, strict=True))
    if not same:
        raise DataError(
            f"an annotation of {len(given)} documents was given for a corpus of {len(old)} "
            "whose texts are other ones: give the same documents in the same order"
        )
    for label in sorted(set(known) - set(corpus.tagset.types)):
        hint = nearest(label, corpus.tagset.types)
        raise ConfigError(f"known type {label!r} is not in the tag set: {hint}")
    _check_labels(given, corpus.tagset)
    limits = _document_bounds(len(given), corpus.sentence_document, corpus.word_bounds)
    found = _on_words(given, corpus.tagset, corpus.offsets, limits)
    return _with_entities(replace(corpus, documents=given, known=frozenset(known)), found)


def _check_labels(documents: Sequence[Document], tagset: TagSet) -> None:
    """`data.tags.encode` sees only what flattening leaves; here nested spans count too."""
    for label in sorted({s.label for d in documents for s in d.spans} - set(tagset.types)):
        raise DataError(
            f"label {label!r} is not in the tag set {{{', '.join(tagset.types)}}}: "
            "map it with a label map or leave it out"
        )


def _document_bounds(documents: int, owner: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """(documents + 1,) the words of each document."""
    return np.asarray(bounds[np.searchsorted(owner, np.arange(documents + 1))])


@dataclass(frozen=True, eq=False)
class _Found:
    """Annotated spans on the words of a corpus.

    words: (found, 3) first word, last word, type. exact: (found,) bool, on words' boundaries.
    lost: how many fell on no word.
    """

    words: np.ndarray
    exact: np.ndarray
    lost: int


def _on_words(
    documents: Sequence[Document], tagset: TagSet, offsets: np.ndarray, bounds: np.ndarray
) -> _Found:
    """Each document's spans; bounds: (documents + 1,) its words."""
    index = {name: i for i, name in enumerate(tagset.types)}
    rows: list[tuple[int, int, int]] = []
    exact: list[bool] = []
    for document, (low, high) in zip(documents, pairwise(bounds.tolist()), strict=True):
        starts, ends = offsets[low:high, 0], offsets[low:high, 1]
        for span in document.spans:
            first = int(np.searchsorted(ends, span.start, side="right"))
            last = int(np.searchsorted(starts, span.end, side="left")) - 1
            if first <= last:
                rows.append((low + first, low + last, index[span.label]))
                exact.append(bool(starts[first] == span.start and ends[last] == span.end))
    lost = sum(len(document.spans) for document in documents) - len(rows)
    return _Found(np.array(rows, np.int64).reshape(-1, 3), np.array(exact, bool), lost)


def _with_entities(corpus: PointerCorpus, found: _Found) -> PointerCorpus:
    """The corpus with these entities: each once, in order, no more than the limit."""
    sentence = np.searchsorted(corpus.word_bounds, found.words[:, 0], side="right") - 1
    final = corpus.word_bounds[sentence + 1] - 1  # (found,) last word of the sentence
    cut = found.words[:, 1] > final
    start = corpus.first[found.words[:, 0]]
    end = corpus.last[np.minimum(found.words[:, 1], final)]
    rows = np.stack([sentence, start, -end, found.words[:, 2]], axis=1)
    order = np.lexsort(rows.T[::-1])
    rows, cut, exact = rows[order], cut[order], found.exact[order]
    repeated = np.zeros(len(rows), bool)
    repeated[1:] = (rows[1:] == rows[:-1]).all(axis=1)
    rank = np.cumsum(~repeated) - 1
    opening = np.searchsorted(rows[:, 0], rows[:, 0])  # (found,) first row of the sentence
    kept = ~repeated & (rank - rank[opening] < corpus.limits.entities)
    counts = np.bincount(rows[kept, 0], minlength=corpus.sentences)
    return replace(
        corpus,
        entities=rows[kept, 1:] * np.array([1, -1, 1]),
        entity_bounds=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        alignment=Alignment(
            exact=int((kept & exact & ~cut).sum()),
            snapped=int((kept & ~exact & ~cut).sum()),
            shortened=int((kept & cut).sum()),
            merged=int(repeated.sum()),
            lost=found.lost + int((~kept & ~repeated).sum()),
        ),
    )


def _cut(bounds: np.ndarray, size: np.ndarray, spans: np.ndarray, limits: Limits) -> np.ndarray:
    """(pieces + 1,) words at which pieces begin, no piece over the limits.

    bounds: (sentences + 1,) in words. size: (words,) sub-words. spans: entities on words.
    """
    total = np.concatenate([[0], np.cumsum(size)])
    begun = np.concatenate([[0], np.cumsum(np.bincount(spans[:, 0], minlength=len(size)))])
    free = np.ones(len(total), dtype=bool)  # free[w]: may be cut before word w
    long = (np.diff(total[bounds]) > limits.subwords) | (np.diff(begun[bounds]) > limits.entities)
    if not long.any():
        return bounds
    for first, last, _ in spans.tolist():
        free[first + 1 : last + 1] = False
    cuts: list[int] = [0]
    for start, end, over in zip(bounds[:-1].tolist(), bounds[1:].tolist(), long, strict=True):
        cuts += _greedy(start, end, total, begun, free, limits) if over else [end]
    return np.array(cuts, dtype=np.int64)


def _greedy(
    start: int, end: int, total: np.ndarray, begun: np.ndarray, free: np.ndarray, limits: Limits
) -> Iterator[int]:
    """Ends of one sentence's pieces, each as far as the limits let it."""
    while start < end:
        fits = int(np.searchsorted(total, total[start] + limits.subwords, side="right")) - 1
        few = int(np.searchsorted(begun, begun[start] + limits.entities, side="right")) - 1
        reach = max(start + 1, min(fits, end))
        options = np.flatnonzero(free[start + 1 : reach + 1]) + start + 1
        if not len(options):  # one entity is longer than a sentence may be
            options = np.array([reach])
        within = options[options <= few]  # none where more entities lie in each other than fit
        start = int(within[-1] if len(within) else options[0])
        yield start
