"""What a tagger is made of: one frozen specification, and the seven of the FedNER paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fednotes.core.errors import ConfigError, nearest
from fednotes.core.settings import build

LAYERS = ("words", "characters", "context", "cnn", "lstm", "crf")  # bottom to top


@dataclass(frozen=True, slots=True)
class TaggerConfig:
    """Field names are TOML keys of a job's [model] table.

    tagger: name of the preset it came from.
    word_vectors: path of a GloVe or word2vec text file; "" for none. train_words: also train
        them (the paper's setting; then they travel). max_words: read that many (0 = all).
    hashed_words: buckets of a trainable word table addressed by a hash of the lower-cased
        form (0 = none). word_dim: its columns.
    characters: character CNN with char_dim, char_filters, char_width; words are read up to
        char_max characters (with begin and end markers).
    contextual: frozen encoder, "minilm" or a directory; "" for none. project: columns to
        which a trainable projection takes its features (0 = as they are).
    cnn_filters: word CNN, filters for each of cnn_widths (0 = none).
    lstm_units: BiLSTM units a direction (0 = none), lstm_layers of them.
    dropout: on the word representation and after the CNN and each LSTM.
    max_tokens: longer sentences are cut.
    """

    tagger: str = "elmoner"
    word_vectors: str = ""
    train_words: bool = False
    max_words: int = 0
    hashed_words: int = 0
    word_dim: int = 100
    characters: bool = True
    char_dim: int = 100
    char_filters: int = 200
    char_width: int = 3
    char_max: int = 25
    contextual: str = ""
    project: int = 0
    cnn_filters: int = 200
    cnn_widths: tuple[int, ...] = (3,)
    lstm_units: int = 200
    lstm_layers: int = 1
    dropout: float = 0.2
    max_tokens: int = 256

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that no tagger can have."""
        for name in ("max_words", "hashed_words", "project", "cnn_filters", "lstm_units"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: it cannot be negative")
        sizes = ("word_dim", "char_dim", "char_filters", "char_width", "lstm_layers", "max_tokens")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: it must be at least 1")
        if not 3 <= self.char_max <= 255:
            raise ConfigError(f"char_max = {self.char_max}: it must be from 3 to 255")
        if self.lstm_layers > 100:
            raise ConfigError(f"lstm_layers = {self.lstm_layers}: it must be at most 100")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout = {self.dropout}: it must be at least 0 and below 1")
        widths = self.cnn_widths
        if not widths or min(widths) < 1 or len(set(widths)) < len(widths):
            raise ConfigError(f"cnn_widths = {list(widths)}: distinct widths of at least 1")
        if self.train_words and not self.word_vectors:
            raise ConfigError("train_words = true needs word_vectors = PATH")
        if self.project and not self.contextual:
            raise ConfigError(f'project = {self.project} needs contextual = "minilm" or a path')

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
        if not (self.word_vectors or self.hashed_words or self.characters or self.contextual):
            raise ConfigError(
                f"tagger {self.tagger!r} has no input: set word_vectors = PATH, hashed_words = N, "
                "characters = true or contextual"
            )


# The taggers of FedNER's Table 2. None of them names a file: a job adds word_vectors and,
# for elmoner, contextual.
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
    "s-lstm-crf": TaggerConfig("s-lstm-crf", characters=False, cnn_filters=0, lstm_layers=2),
    # Shen et al. 2017: convolutions, then the LSTM
    "cnn-clstm-crf": TaggerConfig("cnn-clstm-crf"),
    # FedNER, section 3.1
    "elmoner": TaggerConfig("elmoner"),
}


def tagger_config(table: Mapping[str, Any], where: str = "model") -> TaggerConfig:
    """A specification from a TOML table: the preset that `tagger` names, then the other keys.

    where: how messages call the table. Raises ConfigError for an unknown key or preset (with
    the nearest name), a value of the wrong type, or an impossible one.
    """
    name = table.get("tagger", "elmoner")
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(f"{where}: unknown tagger {name!r}; {nearest(str(name), PRESETS)}")
    return build(TaggerConfig, asdict(PRESETS[name]) | dict(table), where)
