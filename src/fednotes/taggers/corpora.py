"""Corpora as models read them, and the mini-batches of those whose output is a CRF."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from fednotes.core.errors import TrainingError
from fednotes.core.types import Document
from fednotes.data.batches import Encoded
from fednotes.encoders.encoder import SubWords
from fednotes.encoders.reading import Pieces, split_passages
from fednotes.taggers.crf import Counts
from fednotes.taggers.partial import Soft, allowed_tags, require_types, retag

TOKENISED = (131072, 512)  # most words and sentences in one call of the tokeniser
# tokens in one batch of a light tagger's prediction, without padding
PREDICT_TOKENS = 4096
Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedCorpus:
    """A corpus as a model reads it. Belongs to its site, like the documents.

    encoded: the flat corpus. known: the types whose annotation is the site's own; a
    span of another type is pseudo. lengths: (sentences,) tokens or sub-words, for
    batches of like length. soft: what a teacher expects of the other types; None: their
    spans are the target.
    """

    encoded: Encoded
    known: frozenset[str]
    lengths: np.ndarray
    soft: Soft | None = None

    @property
    def sentences(self) -> int:
        """Number of sentences (or pieces of sentences too long for the model)."""
        return len(self.lengths)

    @property
    def documents(self) -> tuple[Document, ...]:
        """The documents, in their order."""
        return self.encoded.documents

    @property
    def complete(self) -> bool:
        """Whether every type of the tag set is known: no token has a choice."""
        return self.known.issuperset(self.encoded.tagset.types)

    def annotated(self, documents: Sequence[Document], known: Collection[str]) -> Self:
        """The same texts with the spans of `documents` as the annotation; hard targets.

        Raises ConfigError for a known type that the tag set lacks, DataError for other
        texts or an unknown label.
        """
        types = require_types(known, self.encoded.tagset)
        encoded = retag(self.encoded, documents, types)
        return replace(self, encoded=encoded, known=types, soft=None)


@dataclass(frozen=True, eq=False, kw_only=True)
class TaggerCorpus(PreparedCorpus):
    """A corpus as a light tagger reads it.

    word, hashed: (forms,) rows of the word tables. characters, character_lengths:
    (forms, size) and (forms,) uint8. context: (tokens, layers, dim) float16, frozen.
    What the tagger's configuration does not use is None.
    """

    word: Tensor | None
    hashed: Tensor | None
    characters: np.ndarray | None
    character_lengths: np.ndarray | None
    context: np.ndarray | None


@dataclass(frozen=True, eq=False, kw_only=True)
class EncoderCorpus(PreparedCorpus):
    """A corpus as sub-words, whose words are the corpus's tokens."""

    pieces: SubWords

    @cached_property
    def words(self) -> np.ndarray:
        """(sentences,) words that have sub-words; of control characters nothing is
        left."""
        read = np.unique(self.pieces.word)  # tokens of the corpus
        return np.diff(np.searchsorted(read, self.encoded.bounds))

    @classmethod
    def of(
        cls,
        encoded: Encoded,
        tokenizer: Any,
        capacity: int,
        pooling: str = "mean",
        progress: Progress | None = None,
    ) -> EncoderCorpus:
        """Every type known. capacity: sub-words of a window. progress(done, all) counts
        units."""
        pieces: list[Pieces] = []
        bounds, start = encoded.bounds, 0
        while start < encoded.sentences:
            if progress is not None:
                progress(start, encoded.sentences)
            fits = (
                int(np.searchsorted(bounds, bounds[start] + TOKENISED[0], side="right"))
                - 1
            )
            end = min(max(fits, start + 1), start + TOKENISED[1])
            pieces.append(split_passages(tokenizer, list(encoded.passages(start, end))))
            start = end
        if progress is not None:
            progress(encoded.sentences, encoded.sentences)
        flat, known = (
            SubWords.of(Pieces.join(pieces), capacity, pooling),
            frozenset(encoded.tagset.types),
        )
        return cls(encoded=encoded, known=known, lengths=flat.lengths, pieces=flat)


def chosen_of(indices: Sequence[int] | np.ndarray) -> np.ndarray:
    """Numbers of the sentences of a mini-batch. Raises TrainingError for none."""
    chosen = np.asarray(indices, np.int64)
    if len(chosen) == 0:
        raise TrainingError("a mini-batch without sentences has no loss")
    return chosen


@dataclass(frozen=True, eq=False)
class Batch:
    """Some sentences of a corpus, padded.

    corpus: which. back: (batch,) the rows that put sentences into the order in which
    they were asked. rows: (batch,) their numbers in the corpus. tokens: (batch, steps)
    of the corpus, the sentence's first one at padding; inside: where there is one.
    lengths: (batch,). tags: (batch, steps), 0 at padding.
    """

    corpus: PreparedCorpus
    back: np.ndarray
    rows: np.ndarray
    tokens: np.ndarray
    inside: np.ndarray
    lengths: Tensor
    tags: Tensor

    @classmethod
    def of(
        cls,
        corpus: PreparedCorpus,
        chosen: np.ndarray,
        device: torch.device,
        order: np.ndarray | None = None,
    ) -> Batch:
        """order: (batch,) in which these sentences shall stand; as they are, if not
        given."""
        order = np.arange(len(chosen)) if order is None else order
        encoded, rows = corpus.encoded, chosen[order]
        start = encoded.bounds[rows]
        lengths = encoded.bounds[rows + 1] - start
        step = np.arange(lengths.max())
        inside = step < lengths[:, None]
        tokens = np.where(inside, start[:, None] + step, start[:, None])
        tags = torch.from_numpy(np.where(inside, encoded.tags[tokens], 0)).to(device)
        on_device = torch.from_numpy(lengths).to(device)
        return cls(corpus, np.argsort(order), rows, tokens, inside, on_device, tags)

    @property
    def allowed(self) -> Tensor:
        """(batch, steps, tags) bool, see `partial.allowed_tags`."""
        return allowed_tags(self.tags, self.corpus.encoded.tagset, self.corpus.known)

    def targets(self) -> tuple[Tensor, Tensor | None, Tensor, Counts | None]:
        """Tags, allowed tags, lengths and posterior, as `partial.split_loss` takes
        them."""
        if self.corpus.complete:
            return self.tags, None, self.lengths, None
        soft, device = self.corpus.soft, self.tags.device
        if soft is None:
            return self.tags, self.allowed, self.lengths, None
        unary = np.where(self.inside[..., None], soft.unary[self.tokens], 0)
        counts = (
            torch.from_numpy(unary).to(device),
            torch.from_numpy(soft.pairs[self.rows]),
        )
        return self.tags, self.allowed, self.lengths, (counts[0], counts[1].to(device))


def by_length(lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Sentence indices in batches of like length and about PREDICT_TOKENS tokens."""
    order = np.argsort(lengths, kind="stable")
    group = np.cumsum(lengths[order]) // PREDICT_TOKENS
    yield from np.split(order, np.flatnonzero(np.diff(group)) + 1) if len(order) else ()


def hash_forms(forms: Sequence[str], buckets: int) -> np.ndarray:
    """(forms,) bucket of each lower-cased form: CRC-32, the same on every machine."""
    return np.fromiter(
        (zlib.crc32(form.lower().encode()) % buckets for form in forms),
        np.int64,
        len(forms),
    )
