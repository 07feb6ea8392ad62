"""Encoded corpora, and the mini-batches drawn from them.

An `Encoded` corpus is flat arrays over all its tokens. It belongs to its site: its list
of word forms is an index into that site's own arrays and never sizes, orders or fills
anything that leaves the site.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from fednotes.core.types import Document, Span, TagSet
from fednotes.data.tags import decode, encode, flatten
from fednotes.data.text import Passage, split_sentences, tokenize

Unit = Literal["sentence", "document"]
_WINDOW = 50  # batches


@dataclass(frozen=True, eq=False)
class Encoded:
    """One corpus, flat; nothing of it leaves the site.

    A "sentence" is what is read together: a sentence, a piece of one, or with the unit
    "document" a whole document or a piece of it.

    documents: as given. tagset: what `tags` are ids of.
    sentence_document: (sentences,) index into documents.
    bounds: (sentences + 1,) tokens of sentence s are bounds[s]:bounds[s + 1].
    offsets: (tokens, 2) character offsets in the document.
    forms: the distinct token forms, by first appearance. form: (tokens,) index into
        forms.
    tags: (tokens,) tag ids.
    unit: what is read together.
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

    @property
    def sentences(self) -> int:
        """Number of sentences."""
        return len(self.sentence_document)

    @property
    def lengths(self) -> np.ndarray:
        """(sentences,) tokens in each sentence, at least 1."""
        return np.diff(self.bounds)

    def passages(self, start: int = 0, end: int | None = None) -> Iterator[Passage]:
        """Yield the text and the words of the sentences start:end (to the last one by
        default).

        A text runs from its first word to its last one. With the unit "document" the
        first piece of a document also has what stands before its first word, the last
        one what stands behind, so that an uncut document is read as it is.
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
            begin, stop = int(words[0, 0]), int(words[-1, 1])
            if self.unit == "document":
                begin = 0 if is_first[sentence] else begin
                stop = len(text) if is_last[sentence] else stop
            yield Passage(text[begin:stop], words - begin)


def encode_corpus(
    documents: Sequence[Document],
    tagset: TagSet,
    max_tokens: int | None = 256,
    unit: Unit = "sentence",
) -> Encoded:
    """Documents → flat arrays of tokens and tags; overlapping mentions flattened
    (outermost).

    unit: what is read together. Tokens and tags do not depend on it, nor do a
    document's sentences. A unit longer than max_tokens is cut into pieces of at most
    that many tokens (None: never), at the end of a sentence where there is one, and
    never inside an entity (a piece is longer where one entity is). Units without a
    token are left out. Gold spans outside every sentence are left out. Raises DataError
    for a label that the tag set has not.
    """
    index: dict[str, int] = {}
    form: list[int] = []
    owners: list[int] = []
    lengths: list[int] = []
    offsets = [np.zeros((0, 2), np.int32)]
    tags = [np.zeros(0, np.int64)]
    for number, document in enumerate(documents):
        spans, _ = flatten(document.spans, "outermost")
        sentences = split_sentences(document)
        shares = _share(spans, sentences)
        whole: list[np.ndarray] = []  # tokens of each sentence of the document
        for (start, end), share in zip(sentences, shares, strict=True):
            tokens = tokenize(document.text[start:end]) + np.int32(start)
            ids, _ = encode(share, tokens, tagset)
            if len(tokens) == 0:
                continue
            text = document.text
            form += [
                index.setdefault(text[a:b], len(index)) for a, b in tokens.tolist()
            ]
            if unit == "sentence":
                lengths += _pieces(tokens, share, max_tokens)
            whole.append(tokens)
            tags.append(ids)
        offsets += whole
        if unit == "document" and whole:
            ends = np.cumsum([len(tokens) for tokens in whole])
            lengths += _pieces(np.concatenate(whole), spans, max_tokens, ends)
        owners += [number] * (len(lengths) - len(owners))
    return Encoded(
        documents=tuple(documents),
        tagset=tagset,
        sentence_document=np.array(owners, dtype=np.int64),
        bounds=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        offsets=np.concatenate(offsets),
        forms=tuple(index),
        form=np.array(form, dtype=np.int64),
        tags=np.concatenate(tags),
        unit=unit,
    )


def without_gold(documents: Sequence[Document]) -> tuple[Document, ...]:
    """The same documents as a model may see them: no spans, so that nothing leaks from
    them."""
    return tuple(replace(document, spans=()) for document in documents)


def with_spans(
    encoded: Encoded, ids: np.ndarray, chances: np.ndarray | None = None
) -> tuple[Document, ...]:
    """The documents with what these tags (tokens,) say in place of their own spans.

    chances: (tokens,) at a span's first token, its confidence.
    """
    found: list[list[Span]] = [[] for _ in encoded.documents]
    for owner, (start, end) in zip(
        encoded.sentence_document, pairwise(encoded.bounds), strict=True
    ):
        if ids[start:end].any():
            part = slice(start, end)
            sure = None if chances is None else chances[part]
            found[owner] += decode(
                ids[part], encoded.offsets[part], encoded.tagset, sure
            )
    rows = zip(encoded.documents, found, strict=True)
    return tuple(replace(document, spans=tuple(spans)) for document, spans in rows)


def buckets(
    lengths: np.ndarray, batch_size: int, rng: np.random.Generator, least: int = 1
) -> list[np.ndarray]:
    """One epoch of mini-batches: every sentence exactly once, all batches full but at
    most one.

    Sentences are shuffled, sorted by length within windows of 50 batches, cut into
    batches, and the batches shuffled; so a batch holds sentences of like length while
    its make-up still changes from epoch to epoch.

    lengths: (sentences,). least: a batch of fewer goes with another one. Returns arrays
    of sentence indices.
    """
    lengths = np.asarray(lengths)
    order = rng.permutation(len(lengths))
    size = batch_size * _WINDOW
    batches: list[np.ndarray] = []
    for start in range(0, len(order), size):
        part = order[start : start + size]
        part = part[np.argsort(lengths[part], kind="stable")]
        # The one short batch is drawn from anywhere in its window, not always the
        # longest.
        short = len(part) % batch_size
        if short:
            where = batch_size * int(rng.integers(len(part) // batch_size + 1))
            batches.append(part[where : where + short])
            part = np.concatenate([part[:where], part[where + short :]])
        batches += [part[i : i + batch_size] for i in range(0, len(part), batch_size)]
    if least > 1 and len(batches) > 1 and 0 < len(order) % batch_size < least:
        odd = min(range(len(batches)), key=lambda i: len(batches[i]))
        left = batches.pop(odd)
        batches[odd - 1] = np.concatenate([batches[odd - 1], left])
    return [batches[i] for i in rng.permutation(len(batches))]


def _share(
    spans: Sequence[Span], sentences: Sequence[tuple[int, int]]
) -> list[list[Span]]:
    """Each sentence's spans; those that touch no sentence are left out."""
    shares: list[list[Span]] = [[] for _ in sentences]
    starts = [start for start, _ in sentences]
    for span in spans:
        at = bisect_right(starts, span.start) - 1
        if at < 0 or sentences[at][1] <= span.start:
            # the span starts before this sentence (white space); does it reach in?
            at += 1
        if at < len(sentences) and sentences[at][0] < span.end:
            shares[at].append(span)
    return shares


def _pieces(
    tokens: np.ndarray,
    spans: Sequence[Span],
    max_tokens: int | None,
    ends: np.ndarray | None = None,
) -> list[int]:
    """Lengths of the pieces of one unit, cut only where no entity is.

    ends: (sentences,) numbers of the tokens behind each sentence, where cuts are best.
    """
    if max_tokens is None or len(tokens) <= max_tokens:
        return [len(tokens)]
    # free[i]: the sentence may be cut before i
    free = np.ones(len(tokens) + 1, dtype=bool)
    for span in spans:
        first = int(np.searchsorted(tokens[:, 1], span.start, side="right"))
        last = int(np.searchsorted(tokens[:, 0], span.end, side="left"))
        free[first + 1 : last] = False
    allowed = np.flatnonzero(free)
    best = allowed[:0] if ends is None else ends[free[ends]]
    cuts = [0]
    while cuts[-1] < len(tokens):
        last = cuts[-1] + max_tokens
        near = best[(best > cuts[-1]) & (best <= last)]
        if not len(near):
            near = allowed[(allowed > cuts[-1]) & (allowed <= last)]
        # If one entity is longer than max_tokens, the cut is behind it.
        cuts.append(int(near[-1] if len(near) else allowed[allowed > last][0]))
    return [b - a for a, b in pairwise(cuts)]
