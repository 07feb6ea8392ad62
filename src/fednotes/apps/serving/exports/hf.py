"""A directory for transformers' token-classification pipeline.

A saved token classifier is a Hugging Face directory already. What the pipeline does not
know is made plain for it: its spans begin with "B-" alone, so tags of BIOES are named
by what they do in BIO; and how much text the model reads at once stands in the
tokeniser's settings.

A word's tag is that of its first sub-word, so the pipeline has to be asked for just
that: `aggregation_strategy="first"`. With "simple" it also listens to sub-words that
were never trained.

The pipeline tells words by WordPiece's marks alone. With other tokenizers it takes what
stands between blanks for a word; docs/use.md has a function that puts sub-words
together by our words.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fednotes.core.errors import ConfigError
from fednotes.core.parsing import read_json
from fednotes.core.store import write_json
from fednotes.encoders.pretrained import positions_of
from fednotes.jobs.card import CARD, card
from fednotes.taggers.saving import load_model
from fednotes.taggers.token_classifier import TokenClassifier

_AS_BIO = {"S": "B", "E": "I"}


def writer(model: Path) -> Callable[[Path], None]:
    """What fills a folder with a saved token classifier. Raises ConfigError for another
    kind of model, ModelError."""
    loaded = load_model(model)
    if not isinstance(loaded, TokenClassifier):
        raise ConfigError(
            f"{model}: of the kind {loaded.config.kind!r}, for which transformers has no "
            "class: `fednotes export onnx` writes taggers that end with a CRF"
        )

    def fill(folder: Path) -> None:
        loaded.save(folder)
        kept = model / CARD  # a person, or the run, knew more
        text = kept.read_bytes() if kept.is_file() else card(model).encode()
        (folder / CARD).write_bytes(text)
        config = folder / "config.json"
        facts = read_json(config, strict=False)
        facts["id2label"] = {
            row: _as_bio(tag) for row, tag in facts["id2label"].items()
        }
        facts["label2id"] = {
            _as_bio(tag): row for tag, row in facts["label2id"].items()
        }
        write_json(config, facts, private=False)
        settings = folder / "tokenizer_config.json"
        window = loaded.config.window or positions_of(loaded.tokenizer, loaded.library)
        facts = read_json(settings, strict=False) | {"model_max_length": window}
        write_json(settings, facts, private=False)

    return fill


def _as_bio(tag: str) -> str:
    prefix, dash, name = tag.partition("-")
    return f"{_AS_BIO.get(prefix, prefix)}{dash}{name}"
