"""A corpus as sub-words, and its mini-batches: what a tuned encoder reads.

Everything is flat arrays, made once; a mini-batch is put together by indexing alone. A
sentence longer than the encoder's positions is several overlapping windows, and each
sub-word is used from the one where it lies deepest, so nothing is lost.

A corpus as a tagger reads it, and the mini-batches of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fednotes.core.errors import ModelError, TrainingError
from fednotes.core.types import Document, TagSet
from fednotes.data.batches import Encoded
from fednotes.encoders.encoder import ACCELERATOR_BATCH, CPU_BATCH, Pieces, sub_words, windows
from fednotes.encoders.frozen import length_batches
from fednotes.taggers.crf import Counts
from fednotes.taggers.layers import Layout, with_zero
from fednotes.taggers.model import Corpus
from fednotes.taggers.partial import Soft, added_tags, allowed_tags

PREDICT_TOKENS = 4096  # tokens in one batch of prediction, padding not counted


@dataclass(frozen=True, eq=False)
class Prepared:
    """A corpus as a tagger reads it. Belongs to its site, like the corpus.

    encoded: the flat corpus. lengths: (sentences,) tokens. word, hashed: (forms,) rows of the
    word tables. characters, character_lengths: (forms, size) and (forms,) uint8. context:
    (tokens, layers, dim) float16, frozen. What the tagger's configuration does not use is None.
    known: the types whose annotation is the site's own. soft: what a teacher expects of the
    others; None: the spans of the other types are the target.
    """

    encoded: Encoded
    lengths: np.ndarray
    word: Tensor | None
    hashed: Tensor | None
    characters: np.ndarray | None
    character_lengths: np.ndarray | None
    context: np.ndarray | None
    known: frozenset[str]
    soft: Soft | None = None

    @property
    def sentences(self) -> int:
        """Number of sentences."""
        return len(self.lengths)

    @property
    def documents(self) -> tuple[Document, ...]:
        """The documents, in their order."""
        return self.encoded.documents

    def complete(self, tagset: TagSet) -> bool:
        """Whether every type of the tag set is known: no token has a choice."""
        return self.known.issuperset(tagset.types)


def prepared_by_tagger(corpus: Corpus) -> Prepared:
    """The corpus, if a tagger prepared it. Raises ModelError for another model's."""
    if not isinstance(corpus, Prepared):
        raise ModelError("this corpus was prepared by another kind of model, not by a tagger")
    return corpus


@dataclass(frozen=True, eq=False)
class Batch:
    """Some sentences of a corpus in the order of a layout, flat and padded.

    rows: (sentences,) their numbers in the corpus. tokens: (tokens,) positions in the corpus.
    padded: (sentences, steps) rows of the flat layout. tags: (sentences, steps), 0 at padding.
    lengths: (sentences,).
    """

    prepared: Prepared
    layout: Layout
    rows: np.ndarray
    tokens: np.ndarray
    padded: Tensor
    tags: Tensor
    lengths: Tensor

    @classmethod
    def of(
        cls, prepared: Prepared, indices: Sequence[int] | np.ndarray, device: torch.device
    ) -> Batch:
        """The batch of these sentences. Raises TrainingError for none."""
        chosen = np.asarray(indices, dtype=np.int64)
        if len(chosen) == 0:
            raise TrainingError("a mini-batch without sentences has no loss")
        layout = Layout.of(prepared.lengths[chosen], device)
        rows = chosen[layout.order]
        tokens = prepared.encoded.bounds[rows][layout.row] + layout.step
        padded = layout.padded()
        gold = torch.from_numpy(prepared.encoded.tags[tokens]).to(device)
        lengths = torch.from_numpy(prepared.lengths[rows]).to(device)
        return cls(prepared, layout, rows, tokens, padded, with_zero(gold)[padded], lengths)

    def pad(self, values: Tensor) -> Tensor:
        """values (tokens, …) → (sentences, steps, …), zeros at padding."""
        return with_zero(values)[self.padded]

    @cached_property
    def back(self) -> np.ndarray:
        """(sentences,) the rows that put sentences into the order in which they were asked."""
        return np.argsort(self.layout.order)

    @cached_property
    def tokens_back(self) -> np.ndarray:
        """(tokens,) likewise: the first asked sentence's tokens, the second's, …"""
        return np.lexsort((self.layout.step, self.layout.order[self.layout.row]))

    def allowed(self, tagset: TagSet) -> Tensor:
        """(sentences, steps, tags) bool, see `partial.allowed_tags`."""
        return allowed_tags(self.tags, tagset, self.prepared.known)

    def targets(self, tagset: TagSet) -> tuple[Tensor, Tensor | None, Tensor, Counts | None]:
        """Tags, allowed tags, lengths and posterior, as `partial.split_loss` takes them."""
        if self.prepared.complete(tagset):
            return self.tags, None, self.lengths, None
        soft, device = self.prepared.soft, self.tags.device
        if soft is None:
            return self.tags, self.allowed(tagset), self.lengths, None
        unary = torch.from_numpy(soft.unary[self.tokens]).to(device)
        pairs = torch.from_numpy(soft.pairs[self.rows]).to(device)
        return self.tags, self.allowed(tagset), self.lengths, (self.pad(unary), pairs)

    def means(self, layers: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Each (tokens, width) → mean over the sentence (sentences, width), as asked."""
        sizes = self.lengths[:, None]
        return tuple((self.pad(layer).sum(1) / sizes)[self.back] for layer in layers)

    def added(self, tagset: TagSet) -> Tensor:
        """(tokens,) bool: those whose tag is of a type that is not known, as asked."""
        tags = torch.from_numpy(self.prepared.encoded.tags[self.tokens[self.tokens_back]])
        return added_tags(tags, tagset, self.prepared.known).to(self.tags.device)


def by_length(lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Sentence indices in batches of like length and about PREDICT_TOKENS tokens."""
    order = np.argsort(lengths, kind="stable")
    group = np.cumsum(lengths[order]) // PREDICT_TOKENS
    yield from np.split(order, np.flatnonzero(np.diff(group)) + 1) if len(order) else ()


def hash_forms(forms: Sequence[str], buckets: int) -> np.ndarray:
    """(forms,) bucket of each lower-cased form: CRC-32, the same on every machine."""
    return np.fromiter(
        (zlib.crc32(form.lower().encode()) % buckets for form in forms), np.int64, len(forms)
    )


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Dropout is off within, and then as it was."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)


TOKENISED = (131072, 512)  # most words and sentences in one call of the tokeniser
Progress = Callable[[int, int], None]
Rows = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class EncoderCorpus:
    """A corpus as sub-words, flat. Belongs to its site.

    known: the types whose annotation is the site's own. lengths: (sentences,) sub-words.
    ids, word, share: (sub-words,) id, token of the corpus it is part of, and its weight in
    that token's vector. first, size: (windows,) sub-words that are read together; keep:
    (windows, 2) those that are used. window_bounds: (sentences + 1,). soft: a teacher's
    posterior, to be learnt in place of the added mentions.
    """

    encoded: Encoded
    known: frozenset[str]
    lengths: np.ndarray
    ids: np.ndarray
    word: np.ndarray
    share: np.ndarray
    first: np.ndarray
    size: np.ndarray
    keep: np.ndarray
    window_bounds: np.ndarray
    soft: Soft | None = None

    @property
    def sentences(self) -> int:
        """Number of sentences."""
        return len(self.lengths)

    @property
    def documents(self) -> tuple[Document, ...]:
        """The documents, in their order."""
        return self.encoded.documents

    @cached_property
    def words(self) -> np.ndarray:
        """(sentences,) words that have sub-words; of control characters nothing is left."""
        read = np.unique(self.word[self.share > 0])  # tokens of the corpus
        return np.diff(np.searchsorted(read, self.encoded.bounds))

    def complete(self, tagset: TagSet) -> bool:
        """Whether the site annotates every type."""
        return self.known == frozenset(tagset.types)


def by_encoder(corpus: Corpus, kind: str = "encoder-tagger") -> EncoderCorpus:
    """The corpus, if a model that reads sub-words prepared it; else ModelError. kind: of it."""
    if not isinstance(corpus, EncoderCorpus):
        raise ModelError(
            f"a corpus of the kind {type(corpus).__name__} was given to {_article(kind)}: "
            "prepare it with the model that reads it"
        )
    return corpus


def _article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def chosen_of(indices: Sequence[int] | np.ndarray) -> np.ndarray:
    """Numbers of the sentences of a mini-batch. Raises TrainingError for none."""
    chosen = np.asarray(indices, np.int64)
    if len(chosen) == 0:
        raise TrainingError("a mini-batch without sentences has no loss")
    return chosen


def read_pieces(
    encoded: Encoded, tokenizer: Any, pooling: str = "mean", progress: Progress | None = None
) -> list[Pieces]:
    """The sub-words of every sentence; progress(done, all) is called in between."""
    pieces: list[Pieces] = []
    bounds, start = encoded.bounds, 0
    while start < encoded.sentences:
        if progress is not None:
            progress(start, encoded.sentences)
        fits = int(np.searchsorted(bounds, bounds[start] + TOKENISED[0], side="right")) - 1
        end = min(max(fits, start + 1), start + TOKENISED[1])
        cuts = bounds[start : end + 1].tolist()
        words = [[encoded.forms[i] for i in encoded.form[a:b].tolist()] for a, b in pairwise(cuts)]
        found = sub_words(tokenizer, words, pooling)
        pieces += [Pieces(p.ids, p.words + cuts[0], p.shares) for p in found]
        start = end
    if progress is not None:
        progress(encoded.sentences, encoded.sentences)
    return pieces


def flat_corpus(encoded: Encoded, pieces: Sequence[Pieces], capacity: int) -> EncoderCorpus:
    """The corpus's sub-words and windows, one after the other."""
    lengths = np.array([len(p.ids) for p in pieces], np.int64)
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    cuts = [windows(len(p.ids), capacity) if p.ids else [] for p in pieces]
    counts = [len(each) for each in cuts]
    rows = (
        np.array(
            [(w.start, w.end, w.keep_start, w.keep_end) for each in cuts for w in each], np.int64
        ).reshape(-1, 4)
        + np.repeat(bounds[:-1], counts)[:, None]
    )
    word = np.concatenate([np.zeros(0, np.int64), *(p.words for p in pieces)])
    share = np.concatenate([np.zeros(0, np.float32), *(p.shares for p in pieces)])
    # A sub-word of no word counts nothing; let it do so for its sentence's first token.
    start = np.repeat(encoded.bounds[:-1], lengths)
    return EncoderCorpus(
        encoded=encoded,
        known=frozenset(encoded.tagset.types),
        lengths=lengths,
        ids=np.array([i for p in pieces for i in p.ids], np.int32),
        word=np.where(share > 0, word, start),
        share=share,
        first=rows[:, 0],
        size=rows[:, 1] - rows[:, 0],
        keep=rows[:, 2:],
        window_bounds=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
    )


@dataclass(frozen=True, eq=False)
class EncoderBatch:
    """Some sentences, padded.

    sentences: (batch,). tokens: (batch, steps) of the corpus; inside: where there is one.
    tags: (batch, steps). allowed: (batch, steps, tags), None where every type is known.
    """

    sentences: np.ndarray
    tokens: np.ndarray
    inside: np.ndarray
    lengths: Tensor
    tags: Tensor
    allowed: Tensor | None
    soft: Counts | None

    @classmethod
    def of(
        cls,
        corpus: EncoderCorpus,
        indices: Sequence[int] | np.ndarray,
        tagset: TagSet,
        device: torch.device,
    ) -> EncoderBatch:
        chosen = chosen_of(indices)
        encoded = corpus.encoded
        start = encoded.bounds[chosen]
        lengths = encoded.bounds[chosen + 1] - start
        step = np.arange(lengths.max())
        inside = step < lengths[:, None]
        tokens = np.where(inside, start[:, None] + step, start[:, None])
        tags = torch.from_numpy(np.where(inside, encoded.tags[tokens], 0)).to(device)
        allowed = None
        if not corpus.complete(tagset):
            allowed = allowed_tags(tags, tagset, corpus.known)
        soft = None
        if corpus.soft is not None:
            unary = np.where(inside[..., None], corpus.soft.unary[tokens], 0)
            pairs = corpus.soft.pairs[chosen]
            soft = (torch.from_numpy(unary).to(device), torch.from_numpy(pairs).to(device))
        return cls(
            sentences=chosen,
            tokens=tokens,
            inside=inside,
            lengths=torch.from_numpy(lengths).to(device),
            tags=tags,
            allowed=allowed,
            soft=soft,
        )


@dataclass(frozen=True, eq=False)
class WindowGroup:
    """Some windows of a mini-batch that go through the encoder together.

    ids, mask: (windows, longest), on the model's device. at: (sub-words,) where those that
    are used stand in `ids` taken flat. token: (sub-words,) the word of the corpus that each
    is part of; share: its weight in that; sentence: the number of its sentence in the batch.
    """

    ids: Tensor
    mask: Tensor
    at: np.ndarray
    token: np.ndarray
    share: np.ndarray
    sentence: np.ndarray


def window_groups(
    corpus: EncoderCorpus, chosen: np.ndarray, rows: Rows, before: int, device: torch.device
) -> Iterator[WindowGroup]:
    """The windows of some sentences, in groups of like length.

    rows: (ids, starts, lengths) → padded ids and mask. before: marks in front of each window.
    Every sub-word that is part of a word is used in exactly one group.
    """
    start = corpus.window_bounds[chosen]
    counts = corpus.window_bounds[chosen + 1] - start
    of_batch = ranges(start, counts)  # (windows,)
    owner = np.repeat(np.arange(len(chosen)), counts)
    limits = CPU_BATCH if device.type == "cpu" else ACCELERATOR_BATCH
    for group in length_batches(corpus.size[of_batch].tolist(), *limits):
        windows = of_batch[group]
        ids, mask = rows(corpus.ids, corpus.first[windows], corpus.size[windows])
        kept = corpus.keep[windows, 1] - corpus.keep[windows, 0]
        used = ranges(corpus.keep[windows, 0], kept)  # (sub-words,) of the corpus
        row = np.repeat(np.arange(len(windows)), kept)
        counted = corpus.share[used] > 0
        used, row = used[counted], row[counted]
        column = used - corpus.first[windows][row] + before
        yield WindowGroup(
            ids=ids,
            mask=mask,
            at=row * ids.shape[1] + column,
            token=corpus.word[used],
            share=corpus.share[used],
            sentence=owner[group][row],
        )


def padded_windows(
    ids: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    marks: tuple[tuple[int, ...], tuple[int, ...]],
    pad: int,
) -> tuple[Tensor, Tensor]:
    """An encoder's input for windows of a flat text: ids and mask, both (windows, longest).

    ids: (sub-words,) of the whole text. starts, lengths: (windows,), at least one. marks: ids
    that stand before and after every window.
    """
    prefix, suffix = marks
    before = len(prefix)
    longest = int(lengths.max()) + before + len(suffix)
    step = np.arange(longest) - before
    text = (step >= 0) & (step < lengths[:, None])  # (windows, longest)
    at = np.where(text, starts[:, None] + step, 0)
    out = np.where(text, ids[at] if len(ids) else 0, pad).astype(np.int64)
    out[:, :before] = prefix
    for k, mark in enumerate(suffix):
        out[np.arange(len(starts)), before + lengths + k] = mark
    mask = np.arange(longest) < lengths[:, None] + before + len(suffix)
    return torch.from_numpy(out), torch.from_numpy(mask)


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """arange(start, start + length) of each, one after the other."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
