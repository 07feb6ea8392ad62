"""Export a token classifier for transformers' token-classification pipeline.

A saved token classifier is already a Hugging Face directory. The export adapts two
things to the pipeline. The pipeline starts spans only at "B-", so the export renames
BIOES tags to their BIO equivalents. It also writes the model's maximum input length to
the tokenizer's settings, where the pipeline reads it.

The tag of a word is the tag of its first sub-word, so users must call the pipeline with
`aggregation_strategy="first"`. The strategy "simple" would also use the predictions for
later sub-words, which the model was not trained on.

The pipeline recognises words only by the marks of WordPiece. With other tokenizers it
splits at white space; docs/use.md has a function that joins sub-words into the words of
this package.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from fednotes.core import bounds
from fednotes.core.errors import ConfigError, ModelError, raising_if_unreadable
from fednotes.core.parsing import read_json, read_regular
from fednotes.core.store import write_json
from fednotes.encoders.pretrained import count_positions
from fednotes.jobs.card import CARD, render_card
from fednotes.taggers.saving import load_model
from fednotes.taggers.token_classifier import TokenClassifier

# The pipeline treats these prefixes of BIOES like their equivalents in BIO.
_BIO_PREFIXES = {"S": "B", "E": "I"}


def make_writer(model: Path) -> Callable[[Path], None]:
    """Return a function that writes a saved token classifier to a folder.

    Args:
        model: The folder of the saved model.

    Raises:
        ConfigError: The model is not a token classifier.
        ModelError: The model cannot be read.
    """
    classifier = load_model(model)
    if not isinstance(classifier, TokenClassifier):
        raise ConfigError(
            f"{model}: transformers has no class for models of kind "
            f"{classifier.config.kind!r}; `fednotes export onnx` writes taggers that "
            "end with a CRF"
        )
    return partial(_write_export, classifier, model)


def _write_export(classifier: TokenClassifier, source: Path, folder: Path) -> None:
    """Write a token classifier for the pipeline.

    Args:
        classifier: The token classifier.
        source: The folder from which it was loaded.
        folder: The folder to fill.
    """
    classifier.save(folder)

    # The model's own card may have been edited, or written by a run that knew more.
    card_file = source / CARD
    has_card = card_file.is_file()
    card = _read_card(card_file) if has_card else render_card(source).encode()
    (folder / CARD).write_bytes(card)

    config_file = folder / "config.json"
    config = read_json(config_file, strict=False)
    config["id2label"] = {
        row: _to_bio_tag(tag) for row, tag in config["id2label"].items()
    }
    config["label2id"] = {
        _to_bio_tag(tag): row for tag, row in config["label2id"].items()
    }
    write_json(config_file, config, private=False)

    settings_file = folder / "tokenizer_config.json"
    settings = read_json(settings_file, strict=False)
    settings["model_max_length"] = classifier.config.window or count_positions(
        classifier.tokenizer, classifier.library
    )
    write_json(settings_file, settings, private=False)


def _read_card(file: Path) -> bytes:
    """Return the content of a model's card.

    Raises:
        ModelError: The card cannot be read, or has more than `bounds.FILE` bytes.
    """
    with raising_if_unreadable(file, ModelError):
        card = read_regular(file, bounds.FILE)
    if len(card) > bounds.FILE:
        raise ModelError(
            f"{file}: over {bounds.FILE:,} bytes: shorten the card, or delete it to "
            "have another one written"
        )
    return card


def _to_bio_tag(tag: str) -> str:
    """Return the BIO equivalent of a BIOES tag."""
    prefix, dash, name = tag.partition("-")
    return f"{_BIO_PREFIXES.get(prefix, prefix)}{dash}{name}"
