"""Encoding of corpora as arrays, and mini-batches from them.

An `Encoded` corpus consists of flat arrays over all its tokens. It stays at its site:
its list of word forms only indexes that site's arrays, and never determines the size,
order or content of anything that leaves the site.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from fednotes.core.types import Document, Span, TagSet
from fednotes.data.tags import (
    decode_tags,
    encode_mentions,
    encode_tags,
    flatten_for,
    keep_outermost,
)
from fednotes.data.text import Bounds, Passage, split_sentences, tokenize

Unit = Literal["sentence", "document"]
_WINDOW = 50  # batches per window in which sentences are sorted by length


@dataclass(frozen=True, eq=False)
class Encoded:
    """A corpus as flat arrays, which never leave the site.

    A "sentence" is the unit that is read at once: a sentence or a piece of one; with
    the unit "document", a whole document or a piece of one.

    Attributes:
        documents: The documents.
        tagset: The tag set whose ids are in `tags`.
        sentence_document: (sentences,) index into `documents`.
        bounds: (sentences + 1,) sentence s has the tokens bounds[s]:bounds[s + 1].
        offsets: (tokens, 2) character offsets in the document.
        forms: The distinct token forms, in order of first appearance.
        form: (tokens,) index into `forms`.
        tags: (tokens,) tag ids.
        unit: The unit that is read at once.
        mentions: (mentions, 3) first token, token after the last, and type index of
            each mention, in the order of the first tokens; None unless the mentions of
            the tag set may overlap (`TagSet.overlaps`).
    """

    documents: tuple[Document, ...]
    tagset: TagSet
    sentence_document: np.ndarray
    bounds: np.ndarray
    offsets: np.ndarray
    forms: tuple[str, ...] = field(repr=False)
    form: np.ndarray
    tags: np.ndarray
    unit: Unit = "sentence"
    mentions: np.ndarray | None = None

    @property
    def sentences(self) -> int:
        """The number of sentences."""
        return len(self.sentence_document)

    @property
    def lengths(self) -> np.ndarray:
        """(sentences,) number of tokens in each sentence, at least 1."""
        return np.diff(self.bounds)

    def cut_passages(self, start: int = 0, end: int | None = None) -> Iterator[Passage]:
        """Yield the text and words of sentences start:end (by default, all).

        A text extends from its first word to its last. With the unit "document", the
        first piece of a document also includes the text before its first word, and the
        last piece the text after its last word, so an uncut document is read unchanged.
        """
        end = self.sentences if end is None else end
        owners = np.concatenate([[-1], self.sentence_document, [-1]])
        is_first = (owners[1:-1] != owners[:-2]).tolist()
        is_last = (owners[1:-1] != owners[2:]).tolist()
        bounds = self.bounds[start : end + 1].tolist()
        for sentence, (low, high) in zip(
            range(start, end), pairwise(bounds), strict=True
        ):
            text = self.documents[self.sentence_document[sentence]].text
            words = self.offsets[low:high].astype(np.int64)
            text_start = int(words[0, 0])
            text_end = int(words[-1, 1])
            if self.unit == "document" and is_first[sentence]:
                text_start = 0
            if self.unit == "document" and is_last[sentence]:
                text_end = len(text)
            yield Passage(text[text_start:text_end], words - text_start)


def encode_corpus(
    documents: Sequence[Document],
    tagset: TagSet,
    max_tokens: int | None = 256,
    unit: Unit = "sentence",
) -> Encoded:
    """Encode documents.

    Overlapping mentions are flattened ("outermost"), except for `Encoded.mentions`.
    Tokens, tags and a document's sentences do not depend on the unit. Units without
    tokens and gold spans outside all sentences are left out.

    Args:
        documents: The documents.
        tagset: Types and scheme of the tags.
        max_tokens: Longer units are cut into pieces of at most this many tokens, at
            sentence ends if possible and never inside an entity, so a piece is longer
            if a single entity is. None disables cutting.
        unit: The unit that is read at once.

    Raises:
        DataError: The tag set lacks the label of a mention.
    """
    forms: dict[str, int] = {}
    form: list[int] = []
    owners: list[int] = []
    lengths: list[int] = []
    offsets = [np.zeros((0, 2), np.int32)]
    tags = [np.zeros(0, np.int64)]
    mentions = [np.zeros((0, 3), np.int64)]
    for number, document in enumerate(documents):
        spans, _ = flatten_for(tagset, document.spans)
        sentence_tokens: list[np.ndarray] = []
        sentences = split_sentences(document)
        by_sentence = _group_spans_by_sentence(spans, sentences)
        for (start, end), sentence_spans in zip(sentences, by_sentence, strict=True):
            tokens = tokenize(document.text[start:end]) + np.int32(start)
            flat_spans: Sequence[Span] = sentence_spans
            if tagset.overlaps:
                flat_spans = keep_outermost(sentence_spans)
                ranges = encode_mentions(sentence_spans, tokens, tagset)
                mentions.append(ranges + [len(form), len(form), 0])
            ids, _ = encode_tags(flat_spans, tokens, tagset)
            if len(tokens) == 0:
                continue
            for token_start, token_end in tokens.tolist():
                word = document.text[token_start:token_end]
                form.append(forms.setdefault(word, len(forms)))
            if unit == "sentence":
                lengths += _measure_pieces(tokens, sentence_spans, max_tokens)
            sentence_tokens.append(tokens)
            tags.append(ids)
        offsets += sentence_tokens
        if unit == "document" and sentence_tokens:
            sentence_ends = np.cumsum([len(tokens) for tokens in sentence_tokens])
            lengths += _measure_pieces(
                np.concatenate(sentence_tokens), spans, max_tokens, sentence_ends
            )
        # All pieces that were added belong to this document.
        owners += [number] * (len(lengths) - len(owners))
    return Encoded(
        documents=tuple(documents),
        tagset=tagset,
        sentence_document=np.array(owners, dtype=np.int64),
        bounds=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        offsets=np.concatenate(offsets),
        forms=tuple(forms),
        form=np.array(form, dtype=np.int64),
        tags=np.concatenate(tags),
        unit=unit,
        mentions=np.concatenate(mentions) if tagset.overlaps else None,
    )


def remove_mentions(documents: Sequence[Document]) -> tuple[Document, ...]:
    """Return documents without mentions, so that no annotation can leak to a model."""
    return tuple(replace(document, spans=()) for document in documents)


def decode_documents(
    encoded: Encoded, ids: np.ndarray, confidences: np.ndarray | None = None
) -> tuple[Document, ...]:
    """Return the documents with the mentions that other tags describe.

    Args:
        encoded: The encoded documents.
        ids: (tokens,) tag ids.
        confidences: (tokens,) the confidence of a mention, at its first token.
    """
    spans: list[list[Span]] = [[] for _ in encoded.documents]
    for owner, (start, end) in zip(
        encoded.sentence_document, pairwise(encoded.bounds), strict=True
    ):
        if ids[start:end].any():
            spans[owner] += decode_tags(
                ids[start:end],
                encoded.offsets[start:end],
                encoded.tagset,
                None if confidences is None else confidences[start:end],
            )
    return tuple(
        replace(document, spans=tuple(document_spans))
        for document, document_spans in zip(encoded.documents, spans, strict=True)
    )


def decode_mentions(
    encoded: Encoded, mentions: np.ndarray, confidences: np.ndarray | None = None
) -> tuple[Document, ...]:
    """Return the documents with other mentions, which may overlap.

    Args:
        encoded: The encoded documents.
        mentions: (mentions, 3) as in `Encoded.mentions`, in any order.
        confidences: (mentions,) the confidence of each mention.
    """
    first, stop, kind = mentions.T
    sentence = np.searchsorted(encoded.bounds, first, side="right") - 1
    columns = (
        encoded.sentence_document[sentence],
        encoded.offsets[first, 0],
        encoded.offsets[stop - 1, 1],
        kind,
    )
    values = [None] * len(mentions) if confidences is None else confidences.tolist()
    spans: list[list[Span]] = [[] for _ in encoded.documents]
    rows = zip(*(column.tolist() for column in columns), values, strict=True)
    for owner, start, end, type_index, value in rows:
        label = encoded.tagset.types[type_index]
        spans[owner].append(Span(start, end, label, confidence=value))
    return tuple(
        replace(document, spans=tuple(sorted(document_spans)))
        for document, document_spans in zip(encoded.documents, spans, strict=True)
    )


def draw_epoch_batches(
    lengths: np.ndarray, batch_size: int, rng: np.random.Generator, min_size: int = 1
) -> list[np.ndarray]:
    """Draw the mini-batches of one epoch, with every sentence exactly once.

    Sentences are shuffled, sorted by length within windows of 50 batches and cut into
    batches; then the batches are shuffled. A batch therefore has sentences of similar
    length, but its composition changes from epoch to epoch. At most one batch is not
    full.

    Args:
        lengths: (sentences,) tokens in each sentence.
        batch_size: Sentences in a batch.
        rng: Source of randomness.
        min_size: A batch with fewer sentences is merged into another one.

    Returns:
        Arrays of sentence indices.
    """
    lengths = np.asarray(lengths)
    order = rng.permutation(len(lengths))
    window_size = batch_size * _WINDOW
    batches: list[np.ndarray] = []
    for start in range(0, len(order), window_size):
        window = order[start : start + window_size]
        window = window[np.argsort(lengths[window], kind="stable")]
        # The short batch is drawn from a random position in its window; otherwise it
        # would always have the longest sentences.
        short = len(window) % batch_size
        if short:
            full_batches = len(window) // batch_size
            at = batch_size * int(rng.integers(full_batches + 1))
            batches.append(window[at : at + short])
            window = np.concatenate([window[:at], window[at + short :]])
        batches += [
            window[i : i + batch_size] for i in range(0, len(window), batch_size)
        ]
    if min_size > 1 and len(batches) > 1 and 0 < len(order) % batch_size < min_size:
        shortest = min(range(len(batches)), key=lambda i: len(batches[i]))
        short_batch = batches.pop(shortest)
        # The batch before it, or the last one, gets its sentences.
        batches[shortest - 1] = np.concatenate([batches[shortest - 1], short_batch])
    return [batches[i] for i in rng.permutation(len(batches))]


def _group_spans_by_sentence(
    spans: Sequence[Span], sentences: Sequence[Bounds]
) -> list[list[Span]]:
    """Return the spans of each sentence; those outside all sentences are left out."""
    by_sentence: list[list[Span]] = [[] for _ in sentences]
    starts = [start for start, _ in sentences]
    for span in spans:
        at = bisect_right(starts, span.start) - 1
        starts_before_next = at < 0 or sentences[at][1] <= span.start
        if starts_before_next:  # it starts in white space; does it reach the sentence?
            at += 1
        if at < len(sentences) and sentences[at][0] < span.end:
            by_sentence[at].append(span)
    return by_sentence


def _measure_pieces(
    tokens: np.ndarray,
    spans: Sequence[Span],
    max_tokens: int | None,
    sentence_ends: np.ndarray | None = None,
) -> list[int]:
    """Return the number of tokens in each piece of a unit.

    Args:
        tokens: (tokens, 2) character offsets.
        spans: The mentions, which are never cut.
        max_tokens: As in `encode_corpus`.
        sentence_ends: (sentences,) number of tokens up to the end of each sentence, the
            preferred places for cuts.
    """
    if max_tokens is None or len(tokens) <= max_tokens:
        return [len(tokens)]
    may_cut_before = np.ones(len(tokens) + 1, dtype=bool)
    for span in spans:
        first = int(np.searchsorted(tokens[:, 1], span.start, side="right"))
        stop = int(np.searchsorted(tokens[:, 0], span.end, side="left"))
        may_cut_before[first + 1 : stop] = False
    allowed = np.flatnonzero(may_cut_before)
    preferred = allowed[:0]
    if sentence_ends is not None:
        preferred = sentence_ends[may_cut_before[sentence_ends]]

    cuts = [0]
    while cuts[-1] < len(tokens):
        limit = cuts[-1] + max_tokens
        cut = _find_furthest_cut(preferred, cuts[-1], limit)
        if cut is None:
            cut = _find_furthest_cut(allowed, cuts[-1], limit)
        if cut is None:  # one entity is longer than max_tokens: cut after it
            cut = int(allowed[np.searchsorted(allowed, limit, side="right")])
        cuts.append(cut)
    return [end - start for start, end in pairwise(cuts)]


def _find_furthest_cut(places: np.ndarray, after: int, limit: int) -> int | None:
    """Return the furthest place after `after` and not beyond `limit`, or None.

    Args:
        places: (places,) in ascending order.
        after: The place of the previous cut.
        limit: The largest possible place.
    """
    number = int(np.searchsorted(places, limit, side="right"))
    if not number or places[number - 1] <= after:
        return None
    return int(places[number - 1])
