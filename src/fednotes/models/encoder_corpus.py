"""A corpus as sub-words, and its mini-batches: what a tuned encoder reads.

Everything is flat arrays, made once; a mini-batch is put together by indexing alone. A
sentence longer than the encoder's positions is several overlapping windows, and each
sub-word is used from the one where it lies deepest, so nothing is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fednotes.core.errors import ModelError, TrainingError
from fednotes.core.types import Document, TagSet
from fednotes.data.batches import Encoded
from fednotes.models.crf import Counts
from fednotes.models.encoder import Pieces, windows
from fednotes.models.model import Corpus
from fednotes.models.partial import Soft, allowed_tags


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

    def complete(self, tagset: TagSet) -> bool:
        """Whether the site annotates every type."""
        return self.known == frozenset(tagset.types)


def by_encoder(corpus: Corpus) -> EncoderCorpus:
    """The corpus, if `EncoderTagger.prepare` made it; else ModelError."""
    if not isinstance(corpus, EncoderCorpus):
        raise ModelError(
            f"a corpus of the kind {type(corpus).__name__} was given to an encoder-tagger: "
            "prepare it with the model that reads it"
        )
    return corpus


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
        chosen = np.asarray(indices, np.int64)
        if len(chosen) == 0:
            raise TrainingError("a mini-batch without sentences has no loss")
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


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """arange(start, start + length) of each, one after the other."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
