"""Light sequence taggers put together from parts by a short specification.

From bottom to top: words, characters and context represent a word; cnn and lstm model
its surroundings; crf decodes (FedNER, section 3.1). A tagger knows its layers by these
names and every parameter's name begins with its layer's, so a method can say which are
private.

What is frozen (word vectors, contextual features) is looked up in tables that all
taggers of a process share; it is no part of a tagger's state and never travels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Ge, Le, Lt
from torch import Tensor

from fednotes.core.errors import ConfigError, nearest
from fednotes.core.kernels import dropout
from fednotes.core.settings import build, checked
from fednotes.core.tensors import seeded
from fednotes.core.types import Document, TagSet
from fednotes.data.batches import encode_corpus
from fednotes.encoders.features import FrozenEncoder, cached_features, load_encoder
from fednotes.encoders.vectors import WordVectors, load_vectors
from fednotes.taggers.corpora import (
    Batch,
    PreparedCorpus,
    TaggerCorpus,
    by_length,
    chosen_of,
    hash_forms,
)
from fednotes.taggers.layers import (
    BiLSTM,
    Characters,
    ContextMix,
    CrfOutput,
    PackedLayout,
    WordCNN,
    Words,
    character_table,
)
from fednotes.taggers.model import (
    CrfReading,
    Kind,
    Model,
    ModelConfig,
    Preparing,
)

LAYERS = ("words", "characters", "context", "cnn", "lstm", "crf")  # bottom to top


@checked(frozen=True)
class TaggerConfig(ModelConfig):
    """A light tagger on frozen features, with a CRF on top.

    Attributes:
        kind: The light tagger.
        tagger: Name of the architecture that the other keys start from.
        word_vectors: Path of a GloVe or word2vec text file; "" for none.
        train_words: Whether the word vectors are trained too, as in the paper; they
            then travel.
        max_words: Largest number of word vectors that are read; 0 reads all.
        hashed_words: Number of rows of a trainable word table that is addressed by a
            hash of the lower-cased word; 0 for none.
        word_dim: Number of columns of the hashed word table.
        characters: Whether the tagger has a character CNN.
        char_dim: Width of a character's vector.
        char_filters: Number of filters of the character CNN.
        char_width: Width of these filters, in characters.
        char_max: Number of characters of a word that are read, with the markers of
            begin and end.
        contextual: A frozen encoder: "minilm" or a directory; "" for none.
        project: Number of columns to which a trainable projection takes the encoder's
            features; 0 leaves them as they are.
        cnn_filters: Number of filters of the word CNN for each of `cnn_widths`; 0 for
            no CNN.
        cnn_widths: Widths of the word CNN's filters, in words.
        lstm_units: Number of BiLSTM units in each direction; 0 for no LSTM.
        lstm_layers: Number of BiLSTM layers.
        dropout: Dropout rate of the word representation, and after the CNN and each
            LSTM.
        max_tokens: Longer sentences are cut.
    """

    tagger: str = "elmoner"
    word_vectors: str = ""
    train_words: bool = False
    max_words: Annotated[int, Ge(0)] = 0
    hashed_words: Annotated[int, Ge(0)] = 0
    word_dim: Annotated[int, Ge(1)] = 100
    characters: bool = True
    char_dim: Annotated[int, Ge(1)] = 100
    char_filters: Annotated[int, Ge(1)] = 200
    char_width: Annotated[int, Ge(1)] = 3
    char_max: Annotated[int, Ge(3), Le(255)] = 25
    contextual: str = ""
    project: Annotated[int, Ge(0)] = 0
    cnn_filters: Annotated[int, Ge(0)] = 200
    cnn_widths: tuple[int, ...] = (3,)
    lstm_units: Annotated[int, Ge(0)] = 200
    lstm_layers: Annotated[int, Ge(1), Le(100)] = 1
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.2
    max_tokens: Annotated[int, Ge(1)] = 256

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that no tagger can have."""
        widths = self.cnn_widths
        if not widths or min(widths) < 1 or len(set(widths)) < len(widths):
            raise ConfigError(
                f"cnn_widths = {list(widths)}: distinct widths of at least 1"
            )
        if self.train_words and not self.word_vectors:
            raise ConfigError("train_words = true needs word_vectors = PATH")
        if self.project and not self.contextual:
            raise ConfigError(
                f'project = {self.project} needs contextual = "minilm" or a path'
            )

    @property
    def kind(self) -> str:
        """Its name in a job's [model] table."""
        return "tagger"

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that a tagger of this specification has, bottom to top."""
        has = {
            "words": bool(self.word_vectors or self.hashed_words),
            "characters": self.characters,
            "context": bool(self.contextual),
            "cnn": self.cnn_filters > 0,
            "lstm": self.lstm_units > 0,
            "crf": True,
        }
        return tuple(layer for layer in LAYERS if has[layer])

    def require_input(self) -> None:
        """Raises ConfigError if nothing represents a word."""
        if not {"words", "characters", "context"} & set(self.layers):
            raise ConfigError(
                f"tagger {self.tagger!r} has no input: set word_vectors = PATH, hashed_words = N, "
                "characters = true or contextual"
            )


# The taggers of FedNER's Table 2. None of them names a file: a job adds word_vectors
# and, for elmoner, contextual.
PRESETS: dict[str, TaggerConfig] = {
    # Collobert et al. 2011
    "cnn-crf": TaggerConfig("cnn-crf", characters=False, lstm_units=0),
    # Habibi et al. 2017
    "lstm-crf": TaggerConfig("lstm-crf", characters=False, cnn_filters=0),
    # Zhu et al. 2017: n-grams of words and characters by parallel convolutions
    "gram-cnn": TaggerConfig("gram-cnn", cnn_widths=(2, 3, 4), lstm_units=0),
    # Ma and Hovy 2016
    "cnn-lstm-crf": TaggerConfig("cnn-lstm-crf", cnn_filters=0),
    # Lample et al. 2016, as the paper describes it: a stacked BiLSTM
    "s-lstm-crf": TaggerConfig(
        "s-lstm-crf", characters=False, cnn_filters=0, lstm_layers=2
    ),
    # Shen et al. 2017: convolutions, then the LSTM
    "cnn-clstm-crf": TaggerConfig("cnn-clstm-crf"),
    # FedNER, section 3.1
    "elmoner": TaggerConfig("elmoner"),
}


def tagger_config(table: Mapping[str, Any], where: str = "model") -> TaggerConfig:
    """A specification from a TOML table: the preset that `tagger` names, then the other
    keys.

    where: how messages call the table. Raises ConfigError for an unknown key or preset
    (with the nearest name), a value of the wrong type, or an impossible one.
    """
    name = table.get("tagger", "elmoner")
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(
            f"{where}: unknown tagger {name!r}; {nearest(str(name), PRESETS)}"
        )
    return build(TaggerConfig, asdict(PRESETS[name]) | dict(table), where)


class Tagger(Model):
    """A tagger for one tag set; see `build_tagger`.

    layers: the names of its layers, bottom to top, frozen ones included. vectors,
    encoder: the frozen tables it looks up in, or None.

    Its transfer parameter is the last layer's weight: small (as many columns as the
    BiLSTM has outputs), shared by all types, the one through which every loss reaches
    everything below, and its per-sentence gradients need no backward pass.
    """

    transfer = "crf.project.weight"
    reads = TaggerCorpus
    place = "contextual"

    def __init__(
        self,
        config: TaggerConfig,
        tagset: TagSet,
        seed: int,
        vectors: WordVectors | None,
        encoder: FrozenEncoder | None,
    ) -> None:
        super().__init__(config, tagset)
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
            self.crf = CrfOutput(size, tagset)

    def _build_inputs(self, seed: int) -> int:
        """Make the layers that represent a word; return the columns of the
        representation."""
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
                self.context = ContextMix(
                    self.encoder.layers, self.encoder.dim, config.project
                )
            size += config.project or self.encoder.dim
        return size

    @property
    def frozen(self) -> int:
        """Numbers of the frozen word vectors; an encoder that only made features is not
        counted."""
        trained = self.config.train_words
        return 0 if self.vectors is None or trained else self.vectors.table.numel()

    @property
    def widths(self) -> tuple[int, ...]:
        """The columns of each layer of `Losses.hidden`: context (if it learns), cnn,
        lstm."""
        config = self.config
        widths = (
            [config.project or self.encoder.dim] if self._mixes and self.encoder else []
        )
        widths += [self.cnn.outputs] if config.cnn_filters else []
        return tuple(widths + ([2 * config.lstm_units] if config.lstm_units else []))

    @property
    def backbone_fingerprint(self) -> str:
        """Of the encoder that made the features."""
        return "" if self.encoder is None else self.encoder.fingerprint

    @property
    def _mixes(self) -> bool:
        """Whether the contextual features go through a layer that learns."""
        return self.encoder is not None and (
            self.encoder.layers > 1 or self.config.project > 0
        )

    def _encode(self, documents: tuple[Document, ...], how: Preparing) -> TaggerCorpus:
        config = self.config
        encoded = encode_corpus(documents, self.tagset, max_tokens=config.max_tokens)
        forms = encoded.forms
        word = hashed = characters = lengths = context = None
        if self.vectors is not None:
            word = torch.from_numpy(self.vectors.rows(forms))
        if config.hashed_words:
            hashed = torch.from_numpy(hash_forms(forms, config.hashed_words))
        if config.characters:
            characters, lengths = character_table(forms, config.char_max)
        if self.encoder is not None and encoded.sentences:
            sentences = list(encoded.passages())
            context = cached_features(self.encoder, sentences, how.cache, how.progress)
        return TaggerCorpus(
            encoded=encoded,
            known=frozenset(self.tagset.types),
            lengths=encoded.lengths,
            word=word,
            hashed=hashed,
            characters=characters,
            character_lengths=lengths,
            context=context,
        )

    def word_rows(
        self, corpus: PreparedCorpus, indices: np.ndarray
    ) -> dict[str, np.ndarray]:
        """The rows of each trainable table of words that these sentences read, repeats
        too."""
        prepared: TaggerCorpus = self.own(corpus)
        form = prepared.encoded.form[self._laid_out(prepared, chosen_of(indices))[2]]
        found = {}
        if prepared.word is not None and self.config.train_words:
            found["words.weight"] = prepared.word.numpy()[form]
        if prepared.hashed is not None:
            found["words.hashed"] = prepared.hashed.numpy()[form]
        return found

    def loss(
        self, corpus: PreparedCorpus, indices: Sequence[int] | np.ndarray
    ) -> Tensor:
        """Mean over some sentences of the negative log likelihood of their tags, a
        scalar.

        Dropout and errors as of `losses`.
        """
        read = self._read_batch(self.own(corpus), chosen_of(indices))
        losses = self.crf.crf.loss(
            read.emissions(), read.batch.tags, read.batch.lengths
        )
        return losses.mean()  # [fedner eq 1]

    def _parts(self, lengths: np.ndarray) -> Iterable[np.ndarray]:
        return by_length(lengths)

    def _laid_out(
        self, prepared: TaggerCorpus, chosen: np.ndarray
    ) -> tuple[PackedLayout, Batch, np.ndarray]:
        """Some sentences in the order of a layout, and the tokens of the corpus
        (tokens,)."""
        layout = PackedLayout.of(prepared.lengths[chosen], self.device)
        batch = Batch.of(prepared, chosen, self.device, layout.order)
        return layout, batch, batch.tokens[layout.row, layout.step]

    def _read(
        self, corpus: TaggerCorpus, chosen: np.ndarray, every: bool = False
    ) -> CrfReading:
        """The layers that `widths` counts are taken before dropout."""
        layout, batch, tokens = self._laid_out(corpus, chosen)
        rate, layers = self.config.dropout, list[Tensor]()
        raw = list(self._represent(corpus, tokens))
        layers += raw[-1:] if self._mixes else []
        parts = [dropout(part, rate, self.training) for part in raw]
        if self.config.cnn_filters:
            layers.append(self.cnn(parts, layout))
            parts = [dropout(layers[-1], rate, self.training)]
        if self.config.lstm_units:
            layers.append(self.lstm(parts, layout, rate))
            parts = [dropout(layers[-1], rate, self.training)]
        # (tokens, width)
        features = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return CrfReading(self.crf, batch, features, layers, layout.padded())

    def _represent(
        self, prepared: TaggerCorpus, tokens: np.ndarray
    ) -> Iterator[Tensor]:
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
            yield F.embedding(
                prepared.hashed[torch.from_numpy(form)].to(device), self.words.hashed
            )
        if prepared.characters is not None and prepared.character_lengths is not None:
            unique, first, position = np.unique(
                form, return_index=True, return_inverse=True
            )
            # by these tokens: by the corpus others would be in rounding
            order = np.argsort(first)
            unique, position = unique[order], np.argsort(order)[position]
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
    """A new tagger, each layer's initial values from (seed, layer) alone. Raises as
    `build_model`; ConfigError also where nothing represents a word."""
    config.require_input()
    vectors = (
        load_vectors(config.word_vectors, config.max_words)
        if config.word_vectors
        else None
    )
    encoder = load_encoder(config.contextual) if config.contextual else None
    return Tagger(config, tagset, seed, vectors, encoder).to(device)


KIND = Kind(TaggerConfig, build_tagger, tagger_config)
