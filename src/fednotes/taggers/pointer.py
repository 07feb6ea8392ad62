"""Entities as sequences of ids, the grammar of these sequences, and their repair.

Wang et al. 2023, section 3.1: the entities of a sentence are written one after the
other as [start, end, type] (Eq. 2), followed by an end token. A sentence without
entities is only the end token, in training and in prediction. For T types and a
sentence of n sub-words, the ids are:

    0            BEGIN   the decoder's first input; never written
    1            END     after the last entity
    2            PAD     after END in a batch; never written
    3 ... 2+T    the types, in the tag set's order
    3+T + p      the sentence's sub-word p = 0 ... n-1

A span's end is its last sub-word, inclusive: [0, 1, Drug] is the drug that the first
two sub-words name ("Clozapine", Figure 2). Positions count the text's sub-words,
without the start mark that a tokenizer adds (LightNER counts it, so its p is one
higher).

Entities have a fixed order: by start, then longer ones first, then by type as in the
tag set. Eq. 5 writes a site's own annotation first and the pseudo-annotation after it.
With that rule, the same annotation would be a different sequence at each site, because
sites annotate different types, and the sites would train the shared decoder against
each other. A fixed order also makes the grammar strict: entities only increase, so
decoding ends and never repeats an entity.
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
from fednotes.data.batches import Encoded, encode_corpus
from fednotes.data.text import Passage
from fednotes.encoders.reading import Pieces, concatenate_ranges
from fednotes.taggers.corpora import PreparedCorpus
from fednotes.taggers.partial import require_same_texts, require_types

# Maps texts with their words to their sub-words.
SplitPassages = Callable[[Sequence[Passage]], Pieces]

BEGIN, END, PAD = 0, 1, 2
FIRST_LABEL = 3


def find_first_position(types: int) -> int:
    """Return the id of a sentence's first sub-word."""
    return FIRST_LABEL + types


def sort_entities(entities: np.ndarray) -> np.ndarray:
    """Return the distinct entities in the order of the target.

    Args:
        entities: (entities, 3) start, end (inclusive), type.
    """
    rows = np.asarray(entities, dtype=np.int64).reshape(-1, 3)
    # `unique` sorts by start, then by -end, then by type.
    keys = np.unique(rows * [1, -1, 1], axis=0)
    return np.asarray(keys * [1, -1, 1])


def encode_entities(entities: np.ndarray, types: int) -> np.ndarray:
    """Return the (3 * entities + 1,) ids of a sentence's entities, with END.

    Args:
        entities: (entities, 3) start, end (inclusive), index of the type.
        types: Number of types.
    """
    shift = find_first_position(types)
    ids = sort_entities(entities) + np.array([shift, shift, FIRST_LABEL])
    return np.append(ids.reshape(-1), END)


def repair(ids: Iterable[int], types: int, length: int) -> np.ndarray:
    """Return the valid entities in an arbitrary sequence of ids.

    As in the paper's example "Drug, Drug" (Figure 2), a type without a preceding span
    is discarded. So are a type after one position or more than two, a span that ends
    before it starts or outside the sentence, and an unfinished entity. Everything after
    END is ignored.

    Args:
        ids: The decoded ids.
        types: Number of types.
        length: Number of sub-words in the sentence.

    Returns:
        (entities, 3) start, end (inclusive), type, in the order of the target.
    """
    shift = find_first_position(types)
    entities: list[tuple[int, int, int]] = []
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
            entities.append((span[0], span[1], value - FIRST_LABEL))
        span = []
    return sort_entities(np.array(entities, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class Grammar:
    """The ids that may come next, for a batch of sentences decoded in lockstep.

    A sentence is decoded as start → end ≥ start → type → start or END, and entities
    follow each other in the target's order. All sentences of a batch are at the same
    one of the three stages, so no step loops over sentences or sub-words.

    Attributes:
        types: Number of types.
        starts: (batch, sub-words) bool, True where a word begins; spans start only
            there.
        ends: (batch, sub-words) bool, True where a word ends; spans end only there.
        max_entities: (batch,) the maximum number of entities of each sentence.
        last: (batch, 3) the previous entity; -1 if there is none.
        span: (batch, 0 to 2) the positions chosen so far for the current entity.
        count: The number of complete entities of each sentence.
    """

    types: int
    starts: Tensor
    ends: Tensor
    max_entities: Tensor
    last: Tensor
    span: Tensor
    count: int = 0

    @classmethod
    def begin(
        cls, types: int, starts: Tensor, ends: Tensor, max_entities: int
    ) -> Grammar:
        """Return the grammar at the start of decoding.

        A sentence gets at most `max_entities` entities and at most as many as it has
        words. Without this bound, an untrained model would fill all available
        positions.
        """
        last = torch.full((len(starts), 3), -1, device=starts.device)
        return cls(
            types=types,
            starts=starts,
            ends=ends,
            max_entities=starts.sum(dim=1).clamp(max=max_entities),
            last=last,
            span=last[:, :0],
        )

    def find_allowed(self) -> Tensor:
        """Return whether each id may come next, (batch, 3 + types + sub-words) bool.

        At least one is allowed for each sentence.
        """
        size, length = self.starts.shape
        out = self.starts.new_zeros(size, find_first_position(self.types) + length)
        labels, positions = out.split([out.shape[1] - length, length], dim=1)
        chosen = self.span.shape[1]
        if chosen == 0:
            labels[:, END] = True
            positions.copy_(self._find_allowed_starts())
        elif chosen == 1:
            positions.copy_(self._find_allowed_ends())
        else:
            labels[:, FIRST_LABEL:] = self._find_allowed_types()
        return out

    def _find_allowed_starts(self) -> Tensor:
        """Return where the next entity may start, (batch, sub-words) bool."""
        position = torch.arange(self.starts.shape[1], device=self.starts.device)
        last_start = self.last[:, :1]
        # Entities with the same start follow each other from the longest to the
        # shortest, and those with the same span in the order of their types.
        starts_again = (position == last_start) & self._has_room()[:, None]
        is_within_limit = (self.max_entities > self.count)[:, None]
        follows = (position > last_start) | starts_again
        return self.starts & follows & is_within_limit

    def _find_allowed_ends(self) -> Tensor:
        """Return where the current entity may end, (batch, sub-words) bool."""
        position = torch.arange(self.starts.shape[1], device=self.starts.device)
        last_start, last_end, last_type = self.last.unsqueeze(-1).unbind(1)
        start = self.span[:, :1]
        # With the same start as the previous entity, it must be shorter or of a later
        # type.
        has_later_type = last_type < self.types - 1
        follows = (position < last_end) | ((position == last_end) & has_later_type)
        return self.ends & (position >= start) & ((start > last_start) | follows)

    def _find_allowed_types(self) -> Tensor:
        """Return which types the current entity may have, (batch, types) bool."""
        # An entity with the span of the previous one must be of a later type.
        is_same_span = (self.span == self.last[:, :2]).all(dim=1, keepdim=True)
        every_type = torch.arange(self.types, device=self.span.device)
        return ~is_same_span | (every_type > self.last[:, 2:])

    def _has_room(self) -> Tensor:
        """Return whether another entity can start where the last one did, (batch,)."""
        start, end, kind = self.last.unbind(1)
        position = torch.arange(self.starts.shape[1], device=self.starts.device)
        ends_before = (
            (position >= start[:, None]) & (position < end[:, None]) & self.ends
        )
        return ends_before.any(dim=1) | (kind < self.types - 1)

    def advance(self, chosen: Tensor) -> Grammar:
        """Return the grammar after (batch,) allowed ids, none of which is END."""
        if self.span.shape[1] == 2:
            kind = (chosen - FIRST_LABEL)[:, None]
            last = torch.cat([self.span, kind], dim=1)
            return replace(self, last=last, span=self.span[:, :0], count=self.count + 1)
        position = (chosen - find_first_position(self.types))[:, None]
        return replace(self, span=torch.cat([self.span, position], dim=1))

    def select_rows(self, index: Tensor) -> Grammar:
        """Return the grammar of some sentences."""
        return replace(
            self,
            starts=self.starts[index],
            ends=self.ends[index],
            max_entities=self.max_entities[index],
            last=self.last[index],
            span=self.span[index],
        )


# ---- corpora -------------------------------------------------------------------------


@dataclass(frozen=True)
class PointerLimits:
    """The maximum numbers of sub-words and entities in a sentence, at least 1."""

    subwords: int
    entities: int


@dataclass(frozen=True, eq=False, kw_only=True)
class PointerCorpus(PreparedCorpus):
    """A corpus as sub-words, words and entities.

    Sentences that are too long for the model are cut into pieces, between words and
    never inside an annotated entity; `encoded` counts pieces as sentences. Words
    without sub-words are left out. The tags of `encoded` are unused. Nested and
    adjacent entities are kept; a discontinuous one becomes its whole stretch.

    Attributes:
        limits: The model's limits.
        ids: (sub-words,) flat over the corpus.
        bounds: (sentences + 1,) sentence s has the sub-words bounds[s]:bounds[s + 1].
        first: (words,) a word's first sub-word, relative to its sentence. Neighbouring
            words may share a sub-word (`encoders/reading.py`); an entity that begins
            there includes all of them.
        last: (words,) a word's last sub-word, relative to its sentence.
        entities: (entities, 3) first and last sub-word, and type.
        entity_bounds: (sentences + 1,) sentence s has the entities
            entity_bounds[s]:entity_bounds[s + 1], in the target's order.
    """

    limits: PointerLimits
    ids: np.ndarray
    bounds: np.ndarray
    first: np.ndarray
    last: np.ndarray
    entities: np.ndarray
    entity_bounds: np.ndarray

    def make_spans(self, sentence: int, entities: np.ndarray) -> list[Span]:
        """Return one sentence's entities, (n, 3), as spans of whole words."""
        encoded = self.encoded
        words = slice(encoded.bounds[sentence], encoded.bounds[sentence + 1])
        first = self.first[words]
        last = self.last[words]
        offsets = encoded.offsets[words]
        # Find the word that contains a position. Words that begin or end with the same
        # sub-word cannot be distinguished, so an entity includes all of them.
        begin = np.searchsorted(first, entities[:, 0], side="right") - 1
        start = np.searchsorted(first, first[np.maximum(begin, 0)], side="left")
        stop = np.searchsorted(last, entities[:, 1], side="left")
        stop = np.minimum(stop, len(last) - 1)
        end = np.searchsorted(last, last[stop], side="right") - 1
        rows = zip(offsets[start, 0], offsets[end, 1], entities[:, 2], strict=True)
        return [Span(int(a), int(b), encoded.tagset.types[t]) for a, b, t in rows]

    def annotate(
        self, documents: Sequence[Document], known: Collection[str]
    ) -> PointerCorpus:
        """Return the same texts with other spans; see `PreparedCorpus.annotate`.

        Sentences stay cut at the same places. A span that crosses such a cut keeps its
        first part.
        """
        annotated = tuple(documents)
        encoded = self.encoded
        require_same_texts(encoded, annotated)
        types = require_types(known, encoded.tagset)
        _check_labels(annotated, encoded.tagset)
        document_bounds = _find_document_bounds(
            len(annotated), encoded.sentence_document, encoded.bounds
        )
        entities = _find_entities_on_words(
            annotated, encoded.tagset, encoded.offsets, document_bounds
        )
        corpus = replace(
            self, encoded=replace(encoded, documents=annotated), known=types
        )
        return _replace_entities(corpus, entities)


def encode_pointers(
    documents: Sequence[Document],
    tagset: TagSet,
    split: SplitPassages,
    limits: PointerLimits,
) -> PointerCorpus:
    """Encode documents as sub-words and entities.

    All types of the tag set count as types that the site annotates (`known`).
    Sentences are cut into pieces within the limits, and the pieces are the sentences of
    the corpus. If a single entity exceeds a limit, its first piece is kept; if a single
    word does, its first sub-words are kept.

    Args:
        documents: Texts with their annotation.
        tagset: The tag set.
        split: Maps texts with their words to their sub-words.
        limits: The model's limits.

    Raises:
        DataError: A label is not in the tag set.
    """
    _check_labels(documents, tagset)
    all_words = encode_corpus(documents, tagset, max_tokens=sys.maxsize)
    subwords = split(list(all_words.cut_passages()))
    words = _select_words_with_subwords(all_words, subwords)
    entities = _find_entities_on_words(
        documents,
        tagset,
        words.offsets,
        _find_document_bounds(len(documents), words.document, words.bounds),
    )
    # (pieces + 1,) piece p has the words cuts[p]:cuts[p + 1]
    cuts = _cut_into_pieces(words.bounds, words.begin, words.end, entities, limits)
    # (pieces,) each piece's first sub-word, over all documents, and its number of
    # sub-words; a word that is too long is cut off.
    piece_begin = words.begin[cuts[:-1]]
    piece_lengths = np.minimum(words.end[cuts[1:]] - piece_begin, limits.subwords)
    first, last = _find_places_in_pieces(words, piece_begin, piece_lengths, cuts)

    sentence_of_piece = np.searchsorted(words.bounds, cuts[:-1], side="right") - 1
    encoded = replace(
        all_words,
        sentence_document=words.document[sentence_of_piece],
        bounds=cuts,
        offsets=words.offsets,
        form=words.form,
        # A pointer model reads entities instead.
        tags=np.zeros(len(words.offsets), np.int64),
    )
    subwords_in_pieces = concatenate_ranges(piece_begin, piece_lengths)
    corpus = PointerCorpus(
        encoded=encoded,
        known=frozenset(tagset.types),
        lengths=piece_lengths,
        limits=limits,
        ids=subwords.ids[subwords_in_pieces].astype(np.int64),
        bounds=np.concatenate([[0], np.cumsum(piece_lengths)]).astype(np.int64),
        first=first,
        last=last,
        # `_replace_entities` adds the entities.
        entities=np.zeros((0, 3), np.int64),
        entity_bounds=np.zeros(len(cuts), np.int64),
    )
    return _replace_entities(corpus, entities)


def _find_places_in_pieces(
    words: _WordsWithSubwords,
    piece_begin: np.ndarray,
    piece_lengths: np.ndarray,
    cuts: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the places of each word's first and last sub-word in its piece.

    A sub-word beyond the end of a piece has the place of the piece's last one.

    Args:
        words: The words.
        piece_begin: (pieces,) index of each piece's first sub-word.
        piece_lengths: (pieces,) number of each piece's sub-words.
        cuts: (pieces + 1,) piece p has the words cuts[p]:cuts[p + 1].

    Returns:
        Two arrays (words,).
    """
    words_in_piece = np.diff(cuts)
    begin = np.repeat(piece_begin, words_in_piece)
    last_place = np.repeat(piece_lengths, words_in_piece) - 1
    first = np.minimum(words.first - begin, last_place)
    last = np.minimum(words.last - begin, last_place)
    return first, last


@dataclass(frozen=True, eq=False)
class _WordsWithSubwords:
    """The words that have sub-words, and the sentences that have such words.

    Attributes:
        offsets: (words, 2) characters of each word, in its document.
        form: (words,) as in `Encoded`.
        first: (words,) index of each word's first sub-word, over all documents.
        last: (words,) index of each word's last sub-word.
        begin: (words,) index of the first sub-word of a piece that begins with the
            word. It is before `first` if the word's sentence begins with sub-words that
            belong to no word.
        end: (words + 1,) index after the last sub-word of a piece that ends before the
            word; 0 for the first word, before which no piece ends.
        bounds: (sentences + 1,) sentence s has the words bounds[s]:bounds[s + 1].
        document: (sentences,) document of each sentence.
    """

    offsets: np.ndarray
    form: np.ndarray
    first: np.ndarray
    last: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    bounds: np.ndarray
    document: np.ndarray


def _select_words_with_subwords(
    all_words: Encoded, subwords: Pieces
) -> _WordsWithSubwords:
    """Return the words that have sub-words, and the sentences that have such words.

    Args:
        all_words: All words of the documents.
        subwords: The sub-words of all sentences.
    """
    has_subwords = subwords.first <= subwords.last  # (all words,)
    first = subwords.first[has_subwords]
    last = subwords.last[has_subwords]

    selected_before = np.concatenate([[0], np.cumsum(has_subwords)])
    bounds = selected_before[all_words.bounds]
    is_filled = np.diff(bounds) > 0  # (all sentences,)
    # An empty sentence has the bounds of its neighbour.
    bounds = np.unique(bounds)

    subword_bounds = np.concatenate([[0], np.cumsum(subwords.lengths)])
    begin = first.copy()
    begin[bounds[:-1]] = subword_bounds[:-1][is_filled]
    return _WordsWithSubwords(
        offsets=all_words.offsets[has_subwords].astype(np.int64),
        form=all_words.form[has_subwords],
        first=first,
        last=last,
        begin=begin,
        end=np.concatenate([[0], last + 1]),
        bounds=bounds,
        document=all_words.sentence_document[is_filled],
    )


def _check_labels(documents: Sequence[Document], tagset: TagSet) -> None:
    """Raise DataError for an unknown label, also in spans that flattening removes."""
    labels = {span.label for document in documents for span in document.spans}
    unknown = labels - set(tagset.types)
    if unknown:
        label = min(unknown)
        raise DataError(
            f"label {label!r} is not in the tag set {{{', '.join(tagset.types)}}}: "
            "map it with a label map or leave it out"
        )


def _find_document_bounds(
    documents: int, owner: np.ndarray, bounds: np.ndarray
) -> np.ndarray:
    """Return the index of each document's first word, (documents + 1,).

    Args:
        documents: Number of documents.
        owner: (sentences,) the document of each sentence.
        bounds: (sentences + 1,) in words.
    """
    return np.asarray(bounds[np.searchsorted(owner, np.arange(documents + 1))])


def _find_entities_on_words(
    documents: Sequence[Document],
    tagset: TagSet,
    offsets: np.ndarray,
    bounds: np.ndarray,
) -> np.ndarray:
    """Return spans as first word, last word and type, (entities, 3).

    Spans that cover no word are left out.

    Args:
        documents: The documents.
        tagset: The tag set.
        offsets: (words, 2) characters of each word, in its document.
        bounds: (documents + 1,) in words.
    """
    index = {name: i for i, name in enumerate(tagset.types)}
    rows: list[tuple[int, int, int]] = []
    for document, (low, high) in zip(documents, pairwise(bounds.tolist()), strict=True):
        starts = offsets[low:high, 0]
        ends = offsets[low:high, 1]
        for span in document.spans:
            first = int(np.searchsorted(ends, span.start, side="right"))
            last = int(np.searchsorted(starts, span.end, side="left")) - 1
            if first <= last:
                rows.append((low + first, low + last, index[span.label]))
    return np.array(rows, np.int64).reshape(-1, 3)


def _replace_entities(corpus: PointerCorpus, entities: np.ndarray) -> PointerCorpus:
    """Return the corpus with these entities, in order and within the limit.

    Args:
        corpus: The corpus.
        entities: (entities, 3) first word, last word and type.
    """
    first_word, last_word, type = entities.T
    bounds = corpus.encoded.bounds
    sentence = np.searchsorted(bounds, first_word, side="right") - 1
    # An entity that crosses the end of its sentence keeps its first part.
    last_word = np.minimum(last_word, bounds[sentence + 1] - 1)
    start = corpus.first[first_word]
    end = corpus.last[last_word]

    # The order of `sort_entities`, by sentence.
    rows = np.stack([sentence, start, -end, type], axis=1)
    rows = np.unique(rows, axis=0)
    first_row_of_sentence = np.searchsorted(rows[:, 0], rows[:, 0])  # (rows,)
    place_in_sentence = np.arange(len(rows)) - first_row_of_sentence
    rows = rows[place_in_sentence < corpus.limits.entities]
    counts = np.bincount(rows[:, 0], minlength=corpus.sentences)
    return replace(
        corpus,
        entities=rows[:, 1:] * np.array([1, -1, 1]),
        entity_bounds=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
    )


def _cut_into_pieces(
    bounds: np.ndarray,
    begin: np.ndarray,
    end: np.ndarray,
    entities: np.ndarray,
    limits: PointerLimits,
) -> np.ndarray:
    """Return the first words of pieces that respect the limits, (pieces + 1,).

    A sub-word that two words share is read on both sides of a cut between them.

    Args:
        bounds: (sentences + 1,) in words.
        begin: As in `_WordsWithSubwords`.
        end: As in `_WordsWithSubwords`.
        entities: (entities, 3) first word, last word and type.
        limits: The limits.
    """
    begun = np.bincount(entities[:, 0], minlength=len(begin))
    cutter = _Cutter(
        begin=begin,
        end=end,
        entities_before=np.concatenate([[0], np.cumsum(begun)]),
        may_cut=np.ones(len(end), dtype=bool),
        limits=limits,
    )
    sizes = end[bounds[1:]] - begin[bounds[:-1]]
    entity_counts = np.diff(cutter.entities_before[bounds])
    is_long = (sizes > limits.subwords) | (entity_counts > limits.entities)
    if not is_long.any():
        return bounds

    for first, last, _ in entities.tolist():
        cutter.may_cut[first + 1 : last + 1] = False
    cuts: list[int] = [0]
    for (low, high), long in zip(pairwise(bounds.tolist()), is_long, strict=True):
        if long:
            cuts += cutter.find_piece_ends(low, high)
        else:
            cuts.append(high)
    return np.array(cuts, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class _Cutter:
    """Cuts long sentences into pieces.

    Attributes:
        begin: As in `_WordsWithSubwords`.
        end: As in `_WordsWithSubwords`.
        entities_before: (words + 1,) number of entities that begin before the word.
        may_cut: (words + 1,) bool, whether a piece may end before the word.
        limits: The limits.
    """

    begin: np.ndarray
    end: np.ndarray
    entities_before: np.ndarray
    may_cut: np.ndarray
    limits: PointerLimits

    def find_piece_ends(self, start: int, end: int) -> Iterator[int]:
        """Yield the ends of one sentence's pieces, each as late as the limits allow.

        Args:
            start: The sentence's first word.
            end: The word after its last one.
        """
        while start < end:
            start = self._find_piece_end(start, end)
            yield start

    def _find_piece_end(self, start: int, end: int) -> int:
        """Return the word before which the piece that begins at `start` ends."""
        # The last word before which the sub-words of a piece are few enough.
        max_subword = self.begin[start] + self.limits.subwords
        last_by_subwords = int(np.searchsorted(self.end, max_subword, side="right")) - 1
        last = max(start + 1, min(last_by_subwords, end))
        cuts = np.flatnonzero(self.may_cut[start + 1 : last + 1]) + start + 1
        if not len(cuts):
            # A single entity is longer than a piece may be.
            return last

        # The last word before which the entities of a piece are few enough.
        max_entities = self.entities_before[start] + self.limits.entities
        last_by_entities = (
            np.searchsorted(self.entities_before, max_entities, side="right") - 1
        )
        allowed_cuts = cuts[cuts <= last_by_entities]
        # If too many entities are nested, no cut is within the limit.
        return int(allowed_cuts[-1] if len(allowed_cuts) else cuts[0])
