"""Sequence taggers put together from parts by a short specification.

From bottom to top: words, characters and context represent a word; cnn and lstm model its
surroundings; crf decodes (FedNER, section 3.1). A tagger knows its layers by these names and
every parameter's name begins with its layer's, so a method can say which are private.

What is frozen (word vectors, contextual features) is looked up in tables that all taggers of
a process share; it is no part of a tagger's state and never travels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednotes.core.errors import ConfigError
from fednotes.core.types import Document, TagSet
from fednotes.data.batches import encode_corpus, with_spans, without_gold
from fednotes.models.features import FrozenEncoder, cached_features, load_encoder
from fednotes.models.layers import (
    BiLSTM,
    Characters,
    Context,
    Output,
    WordCNN,
    Words,
    character_table,
    dropout,
    seeded,
)
from fednotes.models.model import Corpus, Losses
from fednotes.models.partial import (
    Soft,
    posterior,
    require_types,
    retag,
    split_loss,
    transfer_gradients,
)
from fednotes.models.tagger_config import LAYERS, PRESETS, TaggerConfig, tagger_config
from fednotes.models.tagger_corpus import (
    Batch,
    Prepared,
    by_length,
    evaluating,
    hash_forms,
    prepared_by_tagger,
)
from fednotes.models.vectors import WordVectors, load_vectors

__all__ = [
    "LAYERS",
    "PRESETS",
    "Prepared",
    "Tagger",
    "TaggerConfig",
    "build_tagger",
    "hash_forms",
    "tagger_config",
]


class Tagger(nn.Module):
    """A tagger for one tag set; see `build_tagger`.

    config, tagset: what it was built from. layers: the names of its layers, bottom to top,
    frozen ones included. vectors, encoder: the frozen tables it looks up in, or None.

    It fulfils `Model`. Its transfer parameter is the last layer's weight: small (as many
    columns as the BiLSTM has outputs), shared by all types, the one through which every
    loss reaches everything below, and its per-sentence gradients need no backward pass.
    """

    transfer: str = "crf.project.weight"
    softens: bool = True

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
            with seeded(seed, "cnn"):
                self.cnn = WordCNN(size, config.cnn_filters, config.cnn_widths)
            size = self.cnn.outputs
        if config.lstm_units:
            with seeded(seed, "lstm"):
                self.lstm = BiLSTM(size, config.lstm_units, config.lstm_layers)
            size = 2 * config.lstm_units
        with seeded(seed, "crf"):
            self.crf = Output(size, tagset)

    def _build_inputs(self, seed: int) -> int:
        """Make the layers that represent a word; return the columns of the representation."""
        config, size = self.config, 0
        trained = self.vectors.table if self.vectors and config.train_words else None
        if self.vectors is not None:
            size += self.vectors.dim
        if trained is not None or config.hashed_words:
            with seeded(seed, "words"):
                self.words = Words(trained, config.hashed_words, config.word_dim)
            size += config.word_dim if config.hashed_words else 0
        if config.characters:
            with seeded(seed, "characters"):
                self.characters = Characters(
                    config.char_dim, config.char_filters, config.char_width
                )
            size += config.char_filters
        if self.encoder is not None:
            with seeded(seed, "context"):
                self.context = Context(self.encoder.layers, self.encoder.dim, config.project)
            size += config.project or self.encoder.dim
        return size

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.crf.project.weight.device

    @property
    def frozen(self) -> int:
        """Numbers of the frozen word vectors; an encoder that only made features is not counted."""
        trained = self.config.train_words
        return 0 if self.vectors is None or trained else self.vectors.table.numel()

    @property
    def widths(self) -> tuple[int, ...]:
        """The columns of each layer of `Losses.hidden`: context (if it learns), cnn, lstm."""
        config = self.config
        widths = [config.project or self.encoder.dim] if self._mixes and self.encoder else []
        widths += [self.cnn.outputs] if config.cnn_filters else []
        return tuple(widths + ([2 * config.lstm_units] if config.lstm_units else []))

    @property
    def output_width(self) -> int:
        """The columns of `Losses.outputs`."""
        return self.crf.project.in_features

    @property
    def _mixes(self) -> bool:
        """Whether the contextual features go through a layer that learns."""
        return self.encoder is not None and (self.encoder.layers > 1 or self.config.project > 0)

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
        known = frozenset(self.tagset.types)
        tables = word, hashed, characters, lengths, context
        return Prepared(encoded, encoded.lengths, *tables, known)

    def word_rows(self, prepared: Prepared, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The rows of each trainable table of words that these sentences read, repeats too."""
        form = prepared.encoded.form[Batch.of(prepared, indices, self.device).tokens]
        found = {}
        if prepared.word is not None and self.config.train_words:
            found["words.weight"] = prepared.word.numpy()[form]
        if prepared.hashed is not None:
            found["words.hashed"] = prepared.hashed.numpy()[form]
        return found

    def annotate(
        self, corpus: Corpus, documents: Sequence[Document], known: Collection[str]
    ) -> Prepared:
        """The same texts with the spans of `documents` as the annotation; hard targets.

        Tokens, sentences and what was looked up stay. Raises DataError (other texts, an unknown
        label), ConfigError for a known type that the tag set lacks.
        """
        prepared, own = prepared_by_tagger(corpus), require_types(known, self.tagset)
        encoded = retag(prepared.encoded, documents, own)
        return replace(prepared, encoded=encoded, known=own, soft=None)

    @torch.no_grad()
    def soften(self, corpus: Corpus) -> Prepared:
        """The corpus with this tagger's posterior, given the known types' spans, as the target.

        Without dropout. Unchanged where every type is known: nothing is left to guess.
        """
        prepared, tags = prepared_by_tagger(corpus), len(self.tagset.tags)
        if prepared.complete(self.tagset):
            return replace(prepared, soft=None)
        unary = np.zeros((len(prepared.encoded.form), tags), np.float32)
        pairs = np.zeros((prepared.sentences, tags, tags), np.float32)
        with evaluating(self):
            for indices in by_length(prepared.lengths):
                batch = Batch.of(prepared, indices, self.device)
                emissions, allowed = batch.pad(self._emissions(batch)), batch.allowed(self.tagset)
                of_tags, of_pairs = posterior(self.crf.crf, emissions, allowed, batch.lengths)
                unary[batch.tokens] = of_tags.cpu().numpy()[batch.layout.row, batch.layout.step]
                pairs[batch.rows] = of_pairs.cpu().numpy()
        return replace(prepared, soft=Soft(unary, pairs))

    def losses(
        self, corpus: Corpus, indices: Sequence[int] | np.ndarray, *, states: bool = False
    ) -> Losses:
        """The losses of some sentences by the origin of their targets, in the order of `indices`.

        Where every type is known, source is the ordinary loss and target exactly 0 (without a
        gradient). Dropout as in `loss`. Raises TrainingError for no sentences.
        """
        batch = Batch.of(prepared_by_tagger(corpus), indices, self.device)
        hidden: list[Tensor] = []
        features = self._features(batch, hidden)
        emissions = batch.pad(self.crf.project(features))
        source, target = split_loss(self.crf.crf, emissions, *batch.targets(self.tagset))
        losses = Losses(source[batch.back], target[batch.back])
        if not states:
            return losses
        return replace(
            losses,
            hidden=batch.means(hidden),
            outputs=features[batch.tokens_back],  # (tokens, width)
            pseudo=batch.added(self.tagset),
            score=self.crf.project,
        )

    @torch.no_grad()
    def gradients(
        self, corpus: Corpus, indices: Sequence[int] | np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Gradients with respect to the projection's weight: (sentences, size) of each source
        loss, (size,) of the sum of the target losses; without dropout, `.grad` untouched."""
        prepared, chosen = prepared_by_tagger(corpus), np.asarray(indices, dtype=np.int64)
        project, size = self.crf.project, self.crf.project.weight.numel()
        each, total = project.weight.new_zeros(len(chosen), size), project.weight.new_zeros(size)
        with evaluating(self):
            for part in by_length(prepared.lengths[chosen]):
                batch = Batch.of(prepared, chosen[part], self.device)
                features, targets = self._features(batch), batch.targets(self.tagset)
                of_source, of_target = transfer_gradients(
                    self.crf.crf, project, batch.pad(features), *targets
                )
                each[part] = of_source[batch.back]
                total += of_target
        return each, total

    def loss(
        self, prepared: Prepared, indices: Sequence[int] | np.ndarray, reduction: str = "mean"
    ) -> Tensor:
        """Negative log likelihood of some sentences' tags, a scalar.

        reduction: "mean" over the sentences, or "sum". Dropout (in training
        mode) draws from torch's global generator alone, so a seed set before replays it.

        Raises TrainingError for no sentences.
        """
        batch = Batch.of(prepared, indices, self.device)
        emissions = batch.pad(self._emissions(batch))
        losses = self.crf.crf.loss(emissions, batch.tags, batch.lengths)  # (sentences,)
        return losses.sum() if reduction == "sum" else losses.mean()  # [fedner eq 1]

    @torch.no_grad()
    def predict(self, documents: Sequence[Document] | Corpus) -> tuple[Document, ...]:
        """The documents with predicted spans in place of their own.

        Given documents, what is annotated in them is not looked at. Dropout is off.
        """
        if isinstance(documents, Sequence):
            prepared = self.prepare(documents, gold=False)
        else:
            prepared = prepared_by_tagger(documents)
        with evaluating(self):
            return self._predict(prepared)

    def _predict(self, prepared: Prepared) -> tuple[Document, ...]:
        ids = np.zeros(len(prepared.encoded.form), np.int64)  # (tokens,)
        for indices in by_length(prepared.lengths):
            batch = Batch.of(prepared, indices, self.device)
            best = self.crf.crf.decode(batch.pad(self._emissions(batch)), batch.lengths)
            ids[batch.tokens] = best.cpu().numpy()[batch.layout.row, batch.layout.step]
        return with_spans(prepared.encoded, ids)

    def _emissions(self, batch: Batch) -> Tensor:
        """(tokens, tags) unnormalised scores, in the layout's order."""
        scores: Tensor = self.crf.project(self._features(batch))
        return scores

    def _features(self, batch: Batch, hidden: list[Tensor] | None = None) -> Tensor:
        """(tokens, width) what the projection reads, in the layout's order.

        hidden: receives the layers that `widths` counts, each (tokens, ·), before dropout.
        """
        rate, seen = self.config.dropout, [] if hidden is None else hidden
        raw = list(self._represent(batch.prepared, batch.tokens))
        seen += raw[-1:] if self._mixes else []
        parts = [dropout(part, rate, self.training) for part in raw]
        if self.config.cnn_filters:
            seen.append(self.cnn(parts, batch.layout))
            parts = [dropout(seen[-1], rate, self.training)]
        if self.config.lstm_units:
            seen.append(self.lstm(parts, batch.layout, rate))
            parts = [dropout(seen[-1], rate, self.training)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

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
