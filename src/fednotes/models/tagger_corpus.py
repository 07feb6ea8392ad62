"""A corpus as a tagger reads it, and the mini-batches of it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from fednotes.core.errors import ModelError, TrainingError
from fednotes.core.types import Document, TagSet
from fednotes.data.batches import Encoded
from fednotes.models.crf import Counts
from fednotes.models.layers import Layout, with_zero
from fednotes.models.model import Corpus
from fednotes.models.partial import Soft, added_tags, allowed_tags

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
