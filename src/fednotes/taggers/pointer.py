"""Entities as a sequence of pointers: ids, their grammar, and the repair of what breaks
it.

Wang et al. 2023, section 3.1: the entities of a sentence are written one after the
other as [start, end, type] (Eq. 2), then an end token; a sentence without entities is
the end token alone, in training as in use. The layout of the ids, for T types and a
sentence of n sub-words:

    0            BEGIN   what the decoder reads first; never written
    1            END     behind the last entity
    2            PAD     behind END in a batch; never written
    3 ... 2+T    the types, in the tag set's order
    3+T + p      the sentence's sub-word p = 0 ... n-1

A span's end is its last sub-word, inclusive: [0, 1, Drug] is the drug that the first
two sub-words name ("Clozapine", Figure 2). Positions count sub-words of the text alone,
without the begin mark that a tokeniser puts before them (LightNER counts it: its p is
ours + 1).

Entities come in one order: by start, the longer first, then by type as in the tag set.
Eq. 5 writes a site's own annotation first and the pseudo-annotation behind it; by that
rule one and the same annotation would be another sequence at each site, since which
types are a site's own differs, and the sites would train the shared decoder against
each other. The order also makes the grammar strict: entities only increase, so decoding
ends and repeats nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fednotes.core.errors import DataError
from fednotes.core.types import Document, Span, TagSet
from fednotes.data.batches import encode_corpus
from fednotes.data.text import Passage
from fednotes.encoders.reading import Pieces, ranges
from fednotes.taggers.corpora import PreparedCorpus
from fednotes.taggers.partial import require_same_texts, require_types

# texts with their words → their sub-words
Subwords = Callable[[Sequence[Passage]], Pieces]

BEGIN, END, PAD = 0, 1, 2
FIRST_LABEL = 3


def first_position(types: int) -> int:
    """The id of the sentence's first sub-word."""
    return FIRST_LABEL + types


def in_order(entities: np.ndarray) -> np.ndarray:
    """(entities, 3) start, end (inclusive), type: each once, in the order of the
    target."""
    rows = np.asarray(entities, dtype=np.int64).reshape(-1, 3)
    # sorted by start, then -end, then type
    keyed = np.unique(rows * [1, -1, 1], axis=0)
    return np.asarray(keyed * [1, -1, 1])


def encode_entities(entities: np.ndarray, types: int) -> np.ndarray:
    """(entities, 3) start, end (inclusive), type index → (3 * entities + 1,) ids with
    END."""
    shift = first_position(types)
    ids = in_order(entities) + np.array([shift, shift, FIRST_LABEL])
    return np.append(ids.reshape(-1), END)


def repair(ids: Iterable[int], types: int, length: int) -> np.ndarray:
    """What can be read of any output: (entities, 3) start, end (inclusive), type, in
    order.

    As the paper says of "Drug, Drug" (Figure 2), a type that no span precedes is
    discarded; so is one behind one position or more than two, a span that ends before
    it starts or outside the sentence, and what is unfinished. Nothing is read behind
    END. length: sub-words.
    """
    shift = first_position(types)
    found: list[tuple[int, int, int]] = []
    span: list[int] = []
    for value in ids:
        if value == END:
            break
        if value in (BEGIN, PAD):
            continue
        if value >= shift:
            span.append(value - shift)
            continue
        if len(span) == 2 and span[0] <= span[1] < length:
            found.append((span[0], span[1], value - FIRST_LABEL))
        span = []
    return in_order(np.array(found, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class Grammar:
    """Which ids may come next, for a batch of sentences that are decoded in step.

    A sentence is decoded as start → end ≥ start → type → start or END, and each entity comes
    after the one before it in the target's order. All sentences of a batch are at the same of
    the three, so no step loops over sentences or sub-words.

    types: how many. starts, ends: (batch, sub-words) bool, where a word begins and
    where one ends; others cannot be chosen. most: (batch,) entities that a sentence may
    have. last: (batch, 3) the entity before. span: (batch, 0 to 2) what is chosen of
    the one now. count: entities that each sentence has.
    """

    types: int
    starts: Tensor
    ends: Tensor
    most: Tensor
    last: Tensor
    span: Tensor
    count: int = 0

    @classmethod
    def begin(cls, types: int, starts: Tensor, ends: Tensor, most: int) -> Grammar:
        """Before anything is decoded. No sentence gets more than `most` entities, nor
        more than it has words: without that, a model that has learnt nothing yet would
        write all there is room for."""
        last = torch.full((len(starts), 3), -1, device=starts.device)
        return cls(
            types, starts, ends, starts.sum(dim=1).clamp(max=most), last, last[:, :0]
        )

    def allowed(self) -> Tensor:
        """(batch, 3 + types + sub-words) bool: what may come next; never empty."""
        size, length = self.starts.shape
        out = self.starts.new_zeros(size, first_position(self.types) + length)
        labels, positions = out.split([out.shape[1] - length, length], dim=1)
        at = torch.arange(length, device=out.device)
        start, end, kind = self.last.unsqueeze(-1).unbind(1)  # (batch, 1) each
        if self.span.shape[1] == 0:
            labels[:, END] = True
            again = (at == start) & self._room()[:, None]
            room = (self.most > self.count)[:, None]
            positions.copy_(self.starts & ((at > start) | again) & room)
            return out
        now = self.span[:, :1]
        if self.span.shape[1] == 1:
            shorter = (at < end) | ((at == end) & (kind < self.types - 1))
            positions.copy_(self.ends & (at >= now) & ((now > start) | shorter))
            return out
        same = (self.span == self.last[:, :2]).all(dim=1, keepdim=True)
        every = torch.arange(self.types, device=out.device)
        labels[:, FIRST_LABEL:] = ~same | (every > kind)
        return out

    def after(self, chosen: Tensor) -> Grammar:
        """With (batch,) ids chosen among the allowed; none of them END."""
        if self.span.shape[1] == 2:
            kind = (chosen - FIRST_LABEL)[:, None]
            last = torch.cat([self.span, kind], dim=1)
            return replace(self, last=last, span=self.span[:, :0], count=self.count + 1)
        position = (chosen - first_position(self.types))[:, None]
        return replace(self, span=torch.cat([self.span, position], dim=1))

    def rows(self, index: Tensor) -> Grammar:
        """The sentences of these rows alone."""
        parts = (self.starts, self.ends, self.most, self.last, self.span)
        starts, ends, most, last, span = (part[index] for part in parts)
        return Grammar(self.types, starts, ends, most, last, span, self.count)

    def _room(self) -> Tensor:
        """(batch,) whether another entity can begin where the last one did."""
        start, end, kind = self.last.unbind(1)
        at = torch.arange(self.starts.shape[1], device=self.starts.device)
        between = (at >= start[:, None]) & (at < end[:, None]) & self.ends
        return between.any(dim=1) | (kind < self.types - 1)


# ---- corpora -------------------------------------------------------------------------


@dataclass(frozen=True)
class PointerLimits:
    """What a model can read and write: sub-words and entities of one sentence, at least
    1."""

    subwords: int
    entities: int


@dataclass(frozen=True, eq=False, kw_only=True)
class PointerCorpus(PreparedCorpus):
    """A corpus as sub-words, words on them, and entities on those.

    encoded: sentences, or pieces of those that are too long for the model, cut between
    words and never inside an annotated entity; words of which the tokenizer leaves
    nothing are not here; its tags mean nothing. ids: (sub-words,); sentence s has
    bounds[s]:bounds[s + 1] of them. first, last: (words,) a word's first and last
    sub-word, counted in its sentence; neighbours may share one (`encoders/reading.py`),
    and an entity that begins or ends there has all words that do. entities: (entities,
    3) first and last sub-word, type; sentence s has entity_bounds[s]:entity_bounds[s +
    1], in the target's order. Nested and adjacent ones are all there; of a
    discontinuous one, the whole stretch.
    """

    limits: PointerLimits
    ids: np.ndarray
    bounds: np.ndarray
    first: np.ndarray
    last: np.ndarray
    entities: np.ndarray
    entity_bounds: np.ndarray

    def spans(self, sentence: int, entities: np.ndarray) -> list[Span]:
        """Entities (n, 3) of one sentence → whole words' characters in its document."""
        encoded = self.encoded
        words = slice(encoded.bounds[sentence], encoded.bounds[sentence + 1])
        first, last, offsets = (
            self.first[words],
            self.last[words],
            encoded.offsets[words],
        )
        # The word that a position lies in. Words that begin with one sub-word, or end
        # with one, cannot be told apart: an entity has all of them.
        begins = np.searchsorted(first, entities[:, 0], side="right") - 1
        start = np.searchsorted(first, first[np.maximum(begins, 0)], side="left")
        ends = np.searchsorted(last, entities[:, 1], side="left")
        end = (
            np.searchsorted(last, last[np.minimum(ends, len(last) - 1)], side="right")
            - 1
        )
        rows = zip(offsets[start, 0], offsets[end, 1], entities[:, 2], strict=True)
        return [Span(int(a), int(b), encoded.tagset.types[t]) for a, b, t in rows]

    def annotated(
        self, documents: Sequence[Document], known: Collection[str]
    ) -> PointerCorpus:
        """Sentences stay cut where they were: a span over such a cut keeps its first
        part."""
        given, old = tuple(documents), self.encoded
        require_same_texts(old, given)
        types = require_types(known, old.tagset)
        _check_labels(given, old.tagset)
        limits = _document_bounds(len(given), old.sentence_document, old.bounds)
        found = _on_words(given, old.tagset, old.offsets, limits)
        own = replace(self, encoded=replace(old, documents=given), known=types)
        return _with_entities(own, found)


def encode_pointers(
    documents: Sequence[Document],
    tagset: TagSet,
    subwords: Subwords,
    limits: PointerLimits,
) -> PointerCorpus:
    """Documents → sub-words and entities, every type known.

    An entity that alone exceeds a limit keeps its first piece, one word that does its
    first sub-words. Raises DataError for a label that the tag set does not have.
    """
    _check_labels(documents, tagset)
    whole = encode_corpus(documents, tagset, max_tokens=sys.maxsize)
    pieces = subwords(list(whole.passages()))
    # (sentences + 1,) in sub-words
    texts = np.concatenate([[0], np.cumsum(pieces.lengths)])
    kept = pieces.first <= pieces.last
    # (sentences + 1,) kept words
    before = np.concatenate([[0], np.cumsum(kept)])[whole.bounds]
    filled = np.diff(before) > 0  # sentences of which something is left
    bounds = np.unique(before)
    owner, texts = whole.sentence_document[filled], texts[:-1][filled]
    first, last = pieces.first[kept], pieces.last[kept]
    offsets, form = whole.offsets[kept].astype(np.int64), whole.form[kept]
    found = _on_words(
        documents, tagset, offsets, _document_bounds(len(documents), owner, bounds)
    )

    # What a piece reads: a sentence from its beginning, what is cut from its first word
    # on.
    begin, end = first.copy(), np.concatenate([[0], last + 1])
    begin[bounds[:-1]] = texts
    cuts = _cut(bounds, begin, end, found, limits)
    owner = owner[np.searchsorted(bounds, cuts[:-1], side="right") - 1]
    low = begin[cuts[:-1]]
    lengths = np.minimum(end[cuts[1:]] - low, limits.subwords)
    low_of_word = np.repeat(low, np.diff(cuts))
    # (words,) the last place of the word's piece
    most = np.repeat(lengths, np.diff(cuts)) - 1
    encoded = replace(
        whole,
        sentence_document=owner,
        bounds=cuts,
        offsets=offsets,
        form=form,
        tags=np.zeros(len(offsets), np.int64),
    )
    empty = PointerCorpus(
        encoded=encoded,
        known=frozenset(tagset.types),
        lengths=lengths,
        limits=limits,
        ids=pieces.ids[ranges(low, lengths)].astype(np.int64),
        bounds=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        first=np.minimum(first - low_of_word, most),
        last=np.minimum(last - low_of_word, most),
        entities=np.zeros((0, 3), np.int64),
        entity_bounds=np.zeros(len(cuts), np.int64),
    )
    return _with_entities(empty, found)


def _check_labels(documents: Sequence[Document], tagset: TagSet) -> None:
    """`data.tags.encode` sees only what flattening leaves; here nested spans count too."""
    for label in sorted(
        {s.label for d in documents for s in d.spans} - set(tagset.types)
    ):
        raise DataError(
            f"label {label!r} is not in the tag set {{{', '.join(tagset.types)}}}: "
            "map it with a label map or leave it out"
        )


def _document_bounds(
    documents: int, owner: np.ndarray, bounds: np.ndarray
) -> np.ndarray:
    """(documents + 1,) the words of each document."""
    return np.asarray(bounds[np.searchsorted(owner, np.arange(documents + 1))])


def _on_words(
    documents: Sequence[Document],
    tagset: TagSet,
    offsets: np.ndarray,
    bounds: np.ndarray,
) -> np.ndarray:
    """Documents' spans on words, (found, 3) first word, last word, type; those on no
    word are left out. bounds: (documents + 1,) a document's words."""
    index = {name: i for i, name in enumerate(tagset.types)}
    rows: list[tuple[int, int, int]] = []
    for document, (low, high) in zip(documents, pairwise(bounds.tolist()), strict=True):
        starts, ends = offsets[low:high, 0], offsets[low:high, 1]
        for span in document.spans:
            first = int(np.searchsorted(ends, span.start, side="right"))
            last = int(np.searchsorted(starts, span.end, side="left")) - 1
            if first <= last:
                rows.append((low + first, low + last, index[span.label]))
    return np.array(rows, np.int64).reshape(-1, 3)


def _with_entities(corpus: PointerCorpus, words: np.ndarray) -> PointerCorpus:
    """The corpus with these entities on words: each once, in order, no more than the
    limit."""
    bounds = corpus.encoded.bounds
    sentence = np.searchsorted(bounds, words[:, 0], side="right") - 1
    final = bounds[sentence + 1] - 1  # (found,) last word of the sentence
    start = corpus.first[words[:, 0]]
    end = corpus.last[np.minimum(words[:, 1], final)]
    rows = np.stack([sentence, start, -end, words[:, 2]], axis=1)
    rows = np.unique(rows, axis=0)
    # (found,) first row of the sentence
    opening = np.searchsorted(rows[:, 0], rows[:, 0])
    rows = rows[np.arange(len(rows)) - opening < corpus.limits.entities]
    counts = np.bincount(rows[:, 0], minlength=corpus.sentences)
    return replace(
        corpus,
        entities=rows[:, 1:] * np.array([1, -1, 1]),
        entity_bounds=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
    )


def _cut(
    bounds: np.ndarray,
    begin: np.ndarray,
    end: np.ndarray,
    spans: np.ndarray,
    limits: PointerLimits,
) -> np.ndarray:
    """(pieces + 1,) words at which pieces begin, no piece over the limits.

    bounds: (sentences + 1,) in words. begin: (words,) the first sub-word of a piece
    that begins with a word. end: (words + 1,) the sub-word behind a piece that ends
    before a word. A sub-word that two words share is read on both sides of a cut
    between them. spans: entities on words.
    """
    begun = np.concatenate(
        [[0], np.cumsum(np.bincount(spans[:, 0], minlength=len(begin)))]
    )
    free = np.ones(len(end), dtype=bool)  # free[w]: may be cut before word w
    sizes = end[bounds[1:]] - begin[bounds[:-1]]
    long = (sizes > limits.subwords) | (np.diff(begun[bounds]) > limits.entities)
    if not long.any():
        return bounds
    for first, last, _ in spans.tolist():
        free[first + 1 : last + 1] = False
    cuts: list[int] = [0]
    for low, high, over in zip(
        bounds[:-1].tolist(), bounds[1:].tolist(), long, strict=True
    ):
        cuts += (
            _greedy(low, high, (begin, end), begun, free, limits) if over else [high]
        )
    return np.array(cuts, dtype=np.int64)


def _greedy(
    start: int,
    end: int,
    edges: tuple[np.ndarray, np.ndarray],
    begun: np.ndarray,
    free: np.ndarray,
    limits: PointerLimits,
) -> Iterator[int]:
    """Ends of one sentence's pieces, each as far as the limits let it; edges: see
    `_cut`."""
    begins, ends = edges
    while start < end:
        fits = (
            int(np.searchsorted(ends, begins[start] + limits.subwords, side="right"))
            - 1
        )
        few = (
            int(np.searchsorted(begun, begun[start] + limits.entities, side="right"))
            - 1
        )
        reach = max(start + 1, min(fits, end))
        options = np.flatnonzero(free[start + 1 : reach + 1]) + start + 1
        if not len(options):  # one entity is longer than a sentence may be
            options = np.array([reach])
        # none where more entities lie in each other than fit
        within = options[options <= few]
        start = int(within[-1] if len(within) else options[0])
        yield start
