"""Sequence taggers put together from parts by a short specification.

From bottom to top: words, characters and context represent a word; cnn and lstm model its
surroundings; crf decodes (FedNER, section 3.1). A tagger knows its layers by these names and
every parameter's name begins with its layer's, so a method can say which are private.

What is frozen (word vectors, contextual features) is looked up in tables that all taggers of
a process share; it is no part of a tagger's state and never travels.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednotes.core.errors import ConfigError, TrainingError
from fednotes.core.seeds import seed_of
from fednotes.core.types import Document, Span, TagSet
from fednotes.data.batches import Encoded, encode_corpus, without_gold
from fednotes.data.tags import allowed_transitions, decode
from fednotes.models.crf import CRF
from fednotes.models.features import FrozenEncoder, cached_features, load_encoder
from fednotes.models.layers import (
    BiLSTM,
    Characters,
    Context,
    Layout,
    WordCNN,
    Words,
    character_table,
    dropout,
    with_zero,
)
from fednotes.models.tagger_config import LAYERS, PRESETS, TaggerConfig, tagger_config
from fednotes.models.vectors import WordVectors, load_vectors

__all__ = [
    "LAYERS",
    "PRESETS",
    "Prepared",
    "Tagger",
    "TaggerConfig",
    "build_tagger",
    "tagger_config",
]

PREDICT_TOKENS = 4096  # tokens in one batch of prediction, padding not counted


@dataclass(frozen=True, eq=False)
class Prepared:
    """A corpus as a tagger reads it. Belongs to its site, like the corpus.

    encoded: the flat corpus. lengths: (sentences,) tokens. word, hashed: (forms,) rows of the
    word tables. characters, character_lengths: (forms, size) and (forms,) uint8. context:
    (tokens, layers, dim) float16, frozen. What the tagger's configuration does not use is None.
    """

    encoded: Encoded
    lengths: np.ndarray
    word: Tensor | None
    hashed: Tensor | None
    characters: np.ndarray | None
    character_lengths: np.ndarray | None
    context: np.ndarray | None

    @property
    def sentences(self) -> int:
        """Number of sentences."""
        return len(self.lengths)


class Tagger(nn.Module):
    """A tagger for one tag set; see `build_tagger`.

    config, tagset: what it was built from. layers: the names of its layers, bottom to top,
    frozen ones included. vectors, encoder: the frozen tables it looks up in, or None.
    """

    def __init__(
        self,
        config: TaggerConfig,
        tagset: TagSet,
        seed: int,
        vectors: WordVectors | None,
        encoder: FrozenEncoder | None,
    ) -> None:
        super().__init__()
        self.config, self.tagset = config, tagset
        self.layers = config.layers
        self.vectors, self.encoder = vectors, encoder
        size = self._build_inputs(seed)
        if config.cnn_filters:
            with _seeded(seed, "cnn"):
                self.cnn = WordCNN(size, config.cnn_filters, config.cnn_widths)
            size = self.cnn.outputs
        if config.lstm_units:
            with _seeded(seed, "lstm"):
                self.lstm = BiLSTM(size, config.lstm_units, config.lstm_layers)
            size = 2 * config.lstm_units
        with _seeded(seed, "crf"):
            self.crf = _Output(size, tagset)

    def _build_inputs(self, seed: int) -> int:
        """Make the layers that represent a word; return the columns of the representation."""
        config, size = self.config, 0
        trained = self.vectors.table if self.vectors and config.train_words else None
        if self.vectors is not None:
            size += self.vectors.dim
        if trained is not None or config.hashed_words:
            with _seeded(seed, "words"):
                self.words = Words(trained, config.hashed_words, config.word_dim)
            size += config.word_dim if config.hashed_words else 0
        if config.characters:
            with _seeded(seed, "characters"):
                self.characters = Characters(
                    config.char_dim, config.char_filters, config.char_width
                )
            size += config.char_filters
        if self.encoder is not None:
            with _seeded(seed, "context"):
                self.context = Context(self.encoder.layers, self.encoder.dim, config.project)
            size += config.project or self.encoder.dim
        return size

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.crf.project.weight.device

    def trainable(self) -> dict[str, nn.Parameter]:
        """Name → parameter, sorted by name, of everything that training changes."""
        named = sorted(self.named_parameters(), key=lambda pair: pair[0])
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    def prepare(
        self,
        documents: Sequence[Document],
        cache: Path | None = None,
        progress: Callable[[int, int], None] | None = None,
        gold: bool = True,
    ) -> Prepared:
        """Encode a corpus and look up all that training does not change.

        cache: folder that keeps the contextual features (None: in memory). progress(done, all)
        is called while they are computed. gold=False strips the spans first, so that the
        sentence boundaries owe nothing to them either.

        Raises DataError for a label that the tag set does not have.
        """
        given = tuple(documents) if gold else without_gold(documents)
        config = self.config
        encoded = encode_corpus(given, self.tagset, max_tokens=config.max_tokens)
        forms = encoded.forms
        word = hashed = characters = lengths = context = None
        if self.vectors is not None:
            word = torch.from_numpy(self.vectors.rows(forms))
        if config.hashed_words:
            hashed = torch.from_numpy(hash_forms(forms, config.hashed_words))
        if config.characters:
            characters, lengths = character_table(forms, config.char_max)
        if self.encoder is not None and encoded.sentences:
            context = cached_features(
                self.encoder, forms, encoded.form, encoded.bounds, cache, progress
            )
        return Prepared(encoded, encoded.lengths, word, hashed, characters, lengths, context)

    def loss(
        self, prepared: Prepared, indices: Sequence[int] | np.ndarray, reduction: str = "mean"
    ) -> Tensor:
        """Negative log likelihood of some sentences' tags, a scalar.

        reduction: "mean" over the sentences, or "sum". Dropout (in training
        mode) draws from torch's global generator alone, so a seed set before replays it.

        Raises TrainingError for no sentences.
        """
        layout, tokens = self._place(prepared, indices)
        emissions = self._emissions(prepared, layout, tokens)
        lengths = torch.from_numpy(prepared.lengths[np.asarray(indices)[layout.order]])
        padded = layout.padded()  # (sentences, steps)
        gold = torch.from_numpy(prepared.encoded.tags[tokens]).to(self.device)
        losses = self.crf.crf.loss(
            with_zero(emissions)[padded], with_zero(gold)[padded], lengths.to(self.device)
        )  # (sentences,)
        return losses.sum() if reduction == "sum" else losses.mean()  # [fedner eq 1]

    @torch.no_grad()
    def predict(self, documents: Sequence[Document] | Prepared) -> tuple[Document, ...]:
        """The documents with predicted spans in place of their own.

        Given documents, what is annotated in them is not looked at. Dropout is off.
        """
        prepared = documents if isinstance(documents, Prepared) else None
        if prepared is None:
            prepared = self.prepare(documents, gold=False)  # type: ignore[arg-type]
        training = self.training
        self.eval()
        try:
            return self._predict(prepared)
        finally:
            self.train(training)

    def _predict(self, prepared: Prepared) -> tuple[Document, ...]:
        encoded = prepared.encoded
        found: list[list[Span]] = [[] for _ in encoded.documents]
        ids = np.zeros(len(encoded.form), np.int64)  # (tokens,)
        for indices in _by_length(prepared.lengths):
            layout, tokens = self._place(prepared, indices)
            emissions = self._emissions(prepared, layout, tokens)
            lengths = torch.from_numpy(prepared.lengths[indices[layout.order]]).to(self.device)
            best = self.crf.crf.decode(with_zero(emissions)[layout.padded()], lengths)
            ids[tokens] = best.cpu().numpy()[layout.row, layout.step]
        for sentence in range(prepared.sentences):
            part = slice(encoded.bounds[sentence], encoded.bounds[sentence + 1])
            if ids[part].any():
                spans = decode(ids[part], encoded.offsets[part], self.tagset)
                found[encoded.sentence_document[sentence]] += spans
        return tuple(
            replace(document, spans=tuple(spans))
            for document, spans in zip(encoded.documents, found, strict=True)
        )

    def _place(
        self, prepared: Prepared, indices: Sequence[int] | np.ndarray
    ) -> tuple[Layout, np.ndarray]:
        """The batch's layout, and (tokens,) its tokens' positions in the corpus."""
        chosen = np.asarray(indices, dtype=np.int64)
        if len(chosen) == 0:
            raise TrainingError("a mini-batch without sentences has no loss")
        layout = Layout.of(prepared.lengths[chosen], self.device)
        starts = prepared.encoded.bounds[chosen[layout.order]]
        return layout, starts[layout.row] + layout.step

    def _emissions(self, prepared: Prepared, layout: Layout, tokens: np.ndarray) -> Tensor:
        """(tokens, tags) unnormalised scores, in the layout's order."""
        rate = self.config.dropout
        parts = [dropout(p, rate, self.training) for p in self._represent(prepared, tokens)]
        if self.config.cnn_filters:
            parts = [dropout(self.cnn(parts, layout), rate, self.training)]
        if self.config.lstm_units:
            parts = [dropout(self.lstm(parts, layout, rate), rate, self.training)]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        scores: Tensor = self.crf.project(joined)
        return scores

    def _represent(self, prepared: Prepared, tokens: np.ndarray) -> Iterator[Tensor]:
        """The parts of each token's representation, (tokens, ·) each."""
        form = prepared.encoded.form[tokens]
        device = self.device
        if prepared.word is not None and self.vectors is not None:
            rows = prepared.word[torch.from_numpy(form)]
            if self.config.train_words:
                yield F.embedding(rows.to(device), self.words.weight)
            else:
                yield self.vectors.table.index_select(0, rows).to(device)
        if prepared.hashed is not None:
            yield F.embedding(prepared.hashed[torch.from_numpy(form)].to(device), self.words.hashed)
        if prepared.characters is not None and prepared.character_lengths is not None:
            unique, position = np.unique(form, return_inverse=True)
            pooled = self.characters(
                prepared.characters[unique], prepared.character_lengths[unique]
            )  # (unique words, filters)
            yield F.embedding(torch.from_numpy(position).to(device), pooled)
        if prepared.context is not None:
            features = torch.from_numpy(prepared.context.take(tokens, axis=0))
            yield self.context(features.to(device).float())


class _Output(nn.Module):
    """Projection to tags and CRF."""

    def __init__(self, inputs: int, tagset: TagSet) -> None:
        super().__init__()
        masks = (torch.from_numpy(mask) for mask in allowed_transitions(tagset))
        self.project = nn.Linear(inputs, len(tagset.tags))
        self.crf = CRF(len(tagset.tags), *masks)


def build_tagger(
    config: TaggerConfig, tagset: TagSet, seed: int, device: str | torch.device = "cpu"
) -> Tagger:
    """A new tagger.

    Each layer's initial values come from (seed, layer) alone: sites with other tag sets
    start from equal shared layers. The global random state is left as it was.

    Raises ConfigError (no input at all, no types), ModelError (word vectors, encoder),
    MissingExtra.
    """
    config.require_input()
    if not tagset.types:
        raise ConfigError("the tag set has no entity types: a tagger needs at least one")
    vectors = load_vectors(config.word_vectors, config.max_words) if config.word_vectors else None
    encoder = load_encoder(config.contextual) if config.contextual else None
    return Tagger(config, tagset, seed, vectors, encoder).to(device)


def hash_forms(forms: Sequence[str], buckets: int) -> np.ndarray:
    """(forms,) bucket of each lower-cased form: CRC-32, the same on every machine."""
    return np.fromiter(
        (zlib.crc32(form.lower().encode()) % buckets for form in forms), np.int64, len(forms)
    )


def _by_length(lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Sentence indices in batches of like length and about PREDICT_TOKENS tokens."""
    order = np.argsort(lengths, kind="stable")
    group = np.cumsum(lengths[order]) // PREDICT_TOKENS
    yield from np.split(order, np.flatnonzero(np.diff(group)) + 1) if len(order) else ()


@contextmanager
def _seeded(seed: int, layer: str) -> Iterator[Any]:
    """Torch's CPU generator seeded for one layer's initial values, then put back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(seed, "init", layer))
        yield
