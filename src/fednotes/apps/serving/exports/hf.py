"""Export a token classifier for transformers' token-classification pipeline.

A saved token classifier is already a Hugging Face directory. The export adapts two
things to the pipeline. The pipeline starts spans at "B-" only, so the export renames
BIOES tags to their BIO equivalents. And it writes the model's maximum input length to
the tokenizer's settings, where the pipeline reads it.

The tag of a word is that of its first sub-word, so users must call the pipeline with
`aggregation_strategy="first"`. The strategy "simple" would also use the predictions for
later sub-words, which the model was not trained on.

The pipeline recognises words by the marks of WordPiece only. With other tokenizers it
splits at white space; docs/use.md has a function that joins sub-words into the words of
this package.
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
    """Return a function that writes a saved token classifier to a folder.

    Args:
        model: The folder of the saved model.

    Raises:
        ConfigError: The model is not a token classifier.
        ModelError: The model cannot be read.
    """
    loaded = load_model(model)
    if not isinstance(loaded, TokenClassifier):
        raise ConfigError(
            f"{model}: of the kind {loaded.config.kind!r}, for which transformers has no "
            "class: `fednotes export onnx` writes taggers that end with a CRF"
        )

    def fill(folder: Path) -> None:
        loaded.save(folder)
        # The model's own card may have been edited, or written by a run that knew more.
        kept = model / CARD
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
    """Return the BIO equivalent of a BIOES tag."""
    prefix, dash, name = tag.partition("-")
    return f"{_AS_BIO.get(prefix, prefix)}{dash}{name}"
