"""Light sequence taggers, composed of layers according to a specification.

From bottom to top: words, characters and context represent a word; cnn and lstm model
its surroundings; crf decodes (FedNER, section 3.1). Every parameter's name begins with
the name of its layer, so a method can name the layers that are private.

Frozen tables (word vectors, contextual features) are shared by all taggers of a
process. They are not part of a tagger's state, and they never leave the site.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from torch import Tensor

from fednotes.core.errors import ConfigError, suggest_name
from fednotes.core.kernels import dropout
from fednotes.core.numbers import FractionBelowOne, NonNegativeInt, PositiveInt
from fednotes.core.settings import LocalFile, build, checked, make_place_prefix
from fednotes.core.tensors import seeding_layer
from fednotes.core.types import Document, TagSet
from fednotes.data.batches import encode_corpus
from fednotes.encoders.features import (
    FrozenEncoder,
    compute_features_with_cache,
    load_encoder,
)
from fednotes.encoders.vectors import WordVectors, load_vectors
from fednotes.taggers.corpora import (
    Batch,
    PreparedCorpus,
    TaggerCorpus,
    batch_by_length,
    hash_forms,
    require_sentences,
)
from fednotes.taggers.layers import (
    BiLSTM,
    Characters,
    ContextMix,
    CrfOutput,
    PackedLayout,
    WordCNN,
    Words,
    make_character_table,
)
from fednotes.taggers.model import (
    CrfReading,
    Kind,
    ModelConfig,
    PrepareOptions,
    TaggingModel,
)

LAYERS = ("words", "characters", "context", "cnn", "lstm", "crf")  # bottom to top


@checked(frozen=True)
class TaggerConfig(ModelConfig):
    """A light tagger on frozen features, with a CRF on top.

    Attributes:
        kind: The light tagger.
        tagger: Name of the architecture that the other keys start from.
        word_vectors: Path of a GloVe or word2vec text file; "" for none.
        train_words: Whether the word vectors are trained too, as in the paper. The
            sites then send updates of them.
        max_words: Maximum number of word vectors to read; 0 reads all.
        hashed_words: Number of rows of a trainable word table that is addressed by a
            hash of the lower-cased word; 0 for none.
        hashed_prefixes: Number of rows of a trainable table that is addressed by a hash
            of a word's first three characters; 0 for none.
        hashed_suffixes: Number of rows of a trainable table that is addressed by a hash
            of a word's last three characters; 0 for none.
        hashed_shapes: Number of rows of a trainable table that is addressed by a hash
            of a word's shape, such as Xxxx-ddd of "Factor-123"; 0 for none.
        hashes: Number of rows of a hashed table that each word reads; their sum
            represents it.
        word_dim: Number of columns of each hashed table.
        characters: Whether the tagger has a character CNN.
        char_dim: Width of a character's vector.
        char_filters: Number of filters of the character CNN.
        char_width: Width of the character CNN's filters, in characters.
        char_max: Maximum number of characters read from a word, including the markers
            of its start and end.
        contextual: A frozen encoder: "minilm" or a directory; "" for none.
        project: Number of columns of a trainable projection of the encoder's features;
            0 uses the features without a projection.
        cnn_filters: Number of filters of the word CNN for each of `cnn_widths`; 0 for
            no CNN.
        cnn_widths: Widths of the word CNN's filters, in words.
        cnn_layers: Number of layers of the word CNN; those above the first are
            residual.
        cnn_pieces: Number of pieces of the word CNN's maxout, with a layer norm; 1 for
            ReLU.
        lstm_units: Number of BiLSTM units in each direction; 0 for no LSTM.
        lstm_layers: Number of BiLSTM layers.
        dropout: Dropout rate of the word representation, and after the CNN and each
            LSTM.
        max_tokens: Maximum number of tokens in a sentence; longer sentences are cut.
    """

    tagger: str = "elmoner"
    word_vectors: LocalFile = ""
    train_words: bool = False
    max_words: NonNegativeInt = 0
    hashed_words: NonNegativeInt = 0
    hashed_prefixes: NonNegativeInt = 0
    hashed_suffixes: NonNegativeInt = 0
    hashed_shapes: NonNegativeInt = 0
    hashes: Annotated[int, Ge(1), Le(16)] = 1
    word_dim: PositiveInt = 100
    characters: bool = True
    char_dim: PositiveInt = 100
    char_filters: PositiveInt = 200
    char_width: PositiveInt = 3
    char_max: Annotated[int, Ge(3), Le(255)] = 25
    contextual: LocalFile = ""
    project: NonNegativeInt = 0
    cnn_filters: NonNegativeInt = 200
    cnn_widths: tuple[int, ...] = (3,)
    cnn_layers: Annotated[int, Ge(1), Le(100)] = 1
    cnn_pieces: Annotated[int, Ge(1), Le(16)] = 1
    lstm_units: NonNegativeInt = 200
    lstm_layers: Annotated[int, Ge(1), Le(100)] = 1
    dropout: FractionBelowOne = 0.2
    max_tokens: PositiveInt = 256

    def __post_init__(self) -> None:
        """Raise ConfigError for a value that no tagger can have."""
        widths = self.cnn_widths
        if not widths or min(widths) < 1 or len(set(widths)) < len(widths):
            raise ConfigError(
                f"cnn_widths = {list(widths)}: give distinct widths of at least 1"
            )
        if self.train_words and not self.word_vectors:
            raise ConfigError("train_words = true needs word_vectors = PATH")
        if self.project and not self.contextual:
            raise ConfigError(
                f'project = {self.project} needs contextual = "minilm" or a path'
            )

    @property
    def kind(self) -> str:
        """The name of the kind in a job's [model] table."""
        return "tagger"

    @property
    def has_frozen_encoder(self) -> bool:
        """Whether the tagger reads contextual features."""
        return bool(self.contextual)

    @property
    def prefers_one_thread(self) -> bool:
        """Whether prediction is slower with several threads: without an encoder."""
        return not self.has_frozen_encoder

    @property
    def hashed_tables(self) -> dict[str, int]:
        """The number of rows of each hashed table, by its name in `ATTRIBUTES`."""
        rows = {
            "hashed": self.hashed_words,
            "prefixes": self.hashed_prefixes,
            "suffixes": self.hashed_suffixes,
            "shapes": self.hashed_shapes,
        }
        return {name: count for name, count in rows.items() if count}

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers of a tagger of this specification, bottom to top."""
        has_layer = {
            "words": bool(self.word_vectors or self.hashed_tables),
            "characters": self.characters,
            "context": bool(self.contextual),
            "cnn": self.cnn_filters > 0,
            "lstm": self.lstm_units > 0,
            "crf": True,
        }
        return tuple(layer for layer in LAYERS if has_layer[layer])

    def require_input(self) -> None:
        """Raise ConfigError if no layer represents a word."""
        if not {"words", "characters", "context"} & set(self.layers):
            raise ConfigError(
                f"tagger {self.tagger!r} has no input: set word_vectors = PATH, "
                "hashed_words = N, characters = true or contextual"
            )


# The first seven are the taggers of FedNER's Table 2. They name no files: a job adds
# word_vectors and, for elmoner, contextual.
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
    # Not in the paper: the features and the encoder of spaCy's recogniser (Honnibal and
    # Montani), with a CRF. It needs no file.
    "hash-cnn": TaggerConfig(
        "hash-cnn",
        hashed_words=2000,
        hashed_prefixes=1000,
        hashed_suffixes=1000,
        hashed_shapes=1000,
        hashes=4,
        word_dim=64,
        characters=False,
        cnn_filters=96,
        cnn_layers=4,
        cnn_pieces=3,
        lstm_units=0,
        dropout=0.5,
    ),
}


def read_tagger_config(table: Mapping[str, Any], where: str = "model") -> TaggerConfig:
    """Read a light tagger's specification from a TOML table.

    The key `tagger` names the preset to start from; other keys override it.

    Args:
        table: The table.
        where: The name of the table in messages; "" if the caller adds it.

    Raises:
        ConfigError: A key or the preset is unknown (the message suggests the nearest
            name), or a value has the wrong type or is impossible.
    """
    name = table.get("tagger", "elmoner")
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(
            f"{make_place_prefix(where)}unknown tagger {name!r}: "
            f"{suggest_name(str(name), PRESETS)}"
        )
    return build(TaggerConfig, asdict(PRESETS[name]) | dict(table), where)


class Tagger(TaggingModel):
    """A light tagger for one tag set; see `build_tagger`.

    Its transfer parameter is the last layer's weight. It is small (with one column per
    output of the BiLSTM), all types share it, every loss reaches the lower layers
    through it, and its per-sentence gradients need no backward pass.

    Attributes:
        layers: Names of its layers, bottom to top, including frozen ones.
        vectors: The word vectors, or None.
        encoder: The encoder of the contextual features, or None.
    """

    transfer = "crf.project.weight"
    confidence_meaning = CrfReading.confidence_meaning
    reads = TaggerCorpus
    encoder_key = "contextual"

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
        self.vectors = vectors
        self.encoder = encoder

        size = self._build_inputs(seed)
        if config.cnn_filters:
            with seeding_layer(seed, "cnn"):
                self.cnn = WordCNN(
                    size,
                    config.cnn_filters,
                    config.cnn_widths,
                    layers=config.cnn_layers,
                    pieces=config.cnn_pieces,
                )
            size = self.cnn.outputs
        if config.lstm_units:
            with seeding_layer(seed, "lstm"):
                self.lstm = BiLSTM(size, config.lstm_units, config.lstm_layers)
            size = 2 * config.lstm_units
        with seeding_layer(seed, "crf"):
            self.crf = CrfOutput(size, tagset)

    def _build_inputs(self, seed: int) -> int:
        """Build the layers that represent a word; return the representation's width."""
        config = self.config
        size = 0
        trained_table = None
        if self.vectors is not None:
            size += self.vectors.dim
            if config.train_words:
                trained_table = self.vectors.table

        tables = config.hashed_tables
        if trained_table is not None or tables:
            with seeding_layer(seed, "words"):
                self.words = Words(
                    trained_table, tables, config.word_dim, config.hashes
                )
        size += len(tables) * config.word_dim

        if config.characters:
            with seeding_layer(seed, "characters"):
                self.characters = Characters(
                    config.char_dim, config.char_filters, config.char_width
                )
            size += config.char_filters

        if self.encoder is not None:
            with seeding_layer(seed, "context"):
                self.context = ContextMix(
                    self.encoder.layers, self.encoder.dim, config.project
                )
            size += config.project or self.encoder.dim
        return size

    def count_frozen(self) -> int:
        """Return how many frozen values the word vectors have.

        The encoder is not counted, because only its features are used.
        """
        if self.vectors is None or self.config.train_words:
            return 0
        return self.vectors.table.numel()

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of columns of each layer of `Losses.hidden`.

        The layers are context (if it is trained), cnn and lstm.
        """
        config = self.config
        widths: list[int] = []
        if self._mixes_context and self.encoder is not None:
            widths.append(config.project or self.encoder.dim)
        if config.cnn_filters:
            widths.append(self.cnn.outputs)
        if config.lstm_units:
            widths.append(2 * config.lstm_units)
        return tuple(widths)

    @property
    def backbone_fingerprint(self) -> str:
        """The fingerprint of the encoder of the features; "" without one."""
        return "" if self.encoder is None else self.encoder.fingerprint

    @property
    def _mixes_context(self) -> bool:
        """Whether a trained layer transforms the contextual features."""
        return self.encoder is not None and (
            self.encoder.layers > 1 or self.config.project > 0
        )

    def _encode(
        self, documents: tuple[Document, ...], options: PrepareOptions
    ) -> TaggerCorpus:
        """Encode documents with the features of the layers that the tagger has."""
        config = self.config
        encoded = encode_corpus(documents, self.tagset, max_tokens=config.max_tokens)
        forms = encoded.forms
        word = characters = lengths = context = None
        if self.vectors is not None:
            word = torch.from_numpy(self.vectors.find_rows(forms))
        hashed = {
            name: torch.from_numpy(
                hash_forms(forms, rows, attribute=name, hashes=config.hashes)
            )
            for name, rows in config.hashed_tables.items()
        }
        if config.characters:
            characters, lengths = make_character_table(forms, config.char_max)
        if self.encoder is not None and encoded.sentences:
            sentences = list(encoded.cut_passages())
            context = compute_features_with_cache(
                self.encoder, sentences, options.cache, options.progress
            )
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

    def find_word_rows(
        self, corpus: PreparedCorpus, indices: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return the rows of trainable word tables that some sentences read.

        Returns:
            (tokens,) rows with repetitions, by the name of the table's parameter.
        """
        prepared: TaggerCorpus = self.require_corpus(corpus)
        _, _, tokens = self._lay_out(prepared, require_sentences(indices))
        form = prepared.encoded.form[tokens]
        rows = {}
        if prepared.word is not None and self.config.train_words:
            rows["words.weight"] = prepared.word.numpy()[form]
        for name, hashed in prepared.hashed.items():
            rows[f"words.{name}"] = hashed.numpy()[form].ravel()
        return rows

    def loss(
        self, corpus: PreparedCorpus, indices: Sequence[int] | np.ndarray
    ) -> Tensor:
        """Return the mean negative log likelihood of some sentences' tags, a scalar.

        Dropout and errors are as in `losses`.
        """
        prepared = self.require_corpus(corpus)
        reading = self._read_batch(prepared, require_sentences(indices))
        losses = self.crf.crf.loss(
            reading.compute_emissions(), reading.batch.tags, reading.batch.lengths
        )
        return losses.mean()  # [fedner eq 1]

    def _batch_by_length(self, lengths: np.ndarray) -> Iterable[np.ndarray]:
        """Group sentences of similar length; see `TaggingModel._batch_by_length`."""
        return batch_by_length(lengths)

    def _lay_out(
        self, prepared: TaggerCorpus, chosen: np.ndarray
    ) -> tuple[PackedLayout, Batch, np.ndarray]:
        """Pack some sentences.

        Returns:
            The layout, the batch in the order of the layout, and (tokens,) the packed
            tokens' numbers in the corpus.
        """
        layout = PackedLayout.of(prepared.lengths[chosen], self.device)
        batch = Batch.of(prepared, chosen, self.device, layout.order)
        return layout, batch, batch.tokens[layout.row, layout.step]

    def _read(
        self,
        corpus: TaggerCorpus,
        chosen: np.ndarray,
        *,
        all_layers: bool = False,  # noqa: ARG002 - the layers cost nothing to keep
    ) -> CrfReading:
        """Run the model on some sentences; see `TaggingModel._read`.

        `Losses.hidden` has the layers before dropout.
        """
        layout, batch, tokens = self._lay_out(corpus, chosen)
        rate = self.config.dropout
        layers: list[Tensor] = []

        inputs = list(self._represent(corpus, tokens))
        if self._mixes_context:
            layers.append(inputs[-1])
        parts = [dropout(part, rate, self.training) for part in inputs]
        if self.config.cnn_filters:
            layers.append(self.cnn(parts, layout, rate))
            parts = [dropout(layers[-1], rate, self.training)]
        if self.config.lstm_units:
            layers.append(self.lstm(parts, layout, rate))
            parts = [dropout(layers[-1], rate, self.training)]

        # (tokens, width)
        features = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return CrfReading(self.crf, batch, features, layers, layout.find_padded_rows())

    def _represent(
        self, prepared: TaggerCorpus, tokens: np.ndarray
    ) -> Iterator[Tensor]:
        """Yield the parts of the tokens' representation, each (tokens, width)."""
        form = prepared.encoded.form[tokens]
        device = self.device
        if prepared.word is not None and self.vectors is not None:
            rows = prepared.word[torch.from_numpy(form)]
            if self.config.train_words:
                yield F.embedding(rows.to(device), self.words.weight)
            else:
                yield self.vectors.table.index_select(0, rows).to(device)
        for name, hashed in prepared.hashed.items():
            buckets = hashed[torch.from_numpy(form)].to(device)
            yield self.words.look_up(name, buckets)
        if prepared.characters is not None and prepared.character_lengths is not None:
            yield self._spell(form, prepared.characters, prepared.character_lengths)
        if prepared.context is not None:
            features = torch.from_numpy(prepared.context.take(tokens, axis=0))
            yield self.context(features.to(device).float())

    def _spell(
        self, form: np.ndarray, characters: np.ndarray, lengths: np.ndarray
    ) -> Tensor:
        """Return the character features of each token, (tokens, filters).

        Args:
            form: (tokens,) indices of the tokens' forms.
            characters: (forms, size) character ids.
            lengths: (forms,) number of characters.
        """
        unique, first, position = np.unique(
            form, return_index=True, return_inverse=True
        )
        # Keep the order of these tokens: the corpus's order of forms depends on the
        # site's other notes, so sums would round differently.
        order = np.argsort(first)
        unique = unique[order]
        position = np.argsort(order)[position]
        # (unique forms, filters)
        pooled = self.characters(characters[unique], lengths[unique])
        return F.embedding(torch.from_numpy(position).to(self.device), pooled)


def build_tagger(
    config: TaggerConfig, tagset: TagSet, seed: int, device: str | torch.device = "cpu"
) -> Tagger:
    """Return a new tagger; a layer's initial values depend only on (seed, layer).

    Raises:
        ConfigError: No layer represents a word; or as `build_model`.
        ModelError: As `build_model`.
        MissingExtra: As `build_model`.
    """
    config.require_input()
    vectors = None
    if config.word_vectors:
        vectors = load_vectors(config.word_vectors, config.max_words)
    encoder = load_encoder(config.contextual) if config.contextual else None
    return Tagger(config, tagset, seed, vectors, encoder).to(device)


KIND = Kind(TaggerConfig, build_tagger, read_tagger_config)
