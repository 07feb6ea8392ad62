"""Notes of a tiny BERT's few words with findings and drugs marked, and classifiers on
it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fednotes.core.types import Document, Span, TagSet
from fednotes.taggers.saving import build_model, model_config
from fednotes.taggers.token_classifier import TokenClassifier

TAGS = TagSet(("ADR", "Drug"))
LABELS = {"nausea": "ADR", "pain": "ADR", "metoprolol": "Drug"}
WORDS = ["no", "pain", "took", "metoprolol", "nausea"]


def document(
    number: int, *sentences: list[str], types: tuple[str, ...] = TAGS.types
) -> Document:
    """Sentences on lines of their own; each finding and drug is a mention."""
    spans, bounds, at = [], [], 0
    for words in sentences:
        bounds.append((at, at + len(" ".join(words))))
        for word in words:
            if LABELS.get(word) in types:
                spans.append(Span(at, at + len(word), LABELS[word]))
            at += len(word) + 1
    text = "\n".join(" ".join(words) for words in sentences)
    return Document(str(number), text, tuple(spans), sentences=tuple(bounds))


def lines(count: int = 7, longest: int = 6) -> tuple[Document, ...]:
    """Documents of one sentence of 1 to `longest` words, the last the longest; of up to
    six words none is longer than the encoder's positions."""
    rng = np.random.default_rng(0)
    words = ["no", "pain", "took", "and", "nausea", "metoprolol", ".", "unheard"]
    lengths = [*rng.integers(1, min(longest, 8), count - 1), longest]
    return tuple(
        document(i, rng.choice(words[: 5 if n > 4 else 8], n).tolist())
        for i, n in enumerate(lengths)
    )


def notes(count: int = 3) -> tuple[Document, ...]:
    """Documents of 2 to 4 sentences of 1 to 5 words."""
    rng = np.random.default_rng(0)
    shapes = [rng.integers(1, 6, rng.integers(2, 5)) for _ in range(count)]
    return tuple(
        document(i, *(rng.choice(WORDS, n).tolist() for n in shape))
        for i, shape in enumerate(shapes)
    )


def build(
    directory: Path, tags: TagSet = TAGS, seed: int = 1, **settings: Any
) -> TokenClassifier:
    table = {
        "kind": "token-classifier",
        "encoder": str(directory),
        "dropout": 0.0,
        **settings,
    }
    model = build_model(model_config(table), tags, seed)
    assert isinstance(model, TokenClassifier)
    return model


def loud(model: TokenClassifier) -> TokenClassifier:
    """Predicts a lot."""
    with torch.no_grad():
        model.classifier.weight.mul_(20)
    return model


def library(model: TokenClassifier) -> Any:
    """The library's model with the same weights, but a copy."""
    unfrozen = copy.deepcopy(model.library)
    return unfrozen.requires_grad_(True).eval()


def same_gradients(model: TokenClassifier, reference: Any) -> None:
    """Of every trained parameter, against the library's BERT after a backward pass."""
    theirs = dict(reference.named_parameters())
    for name, parameter in model.trainable().items():
        grad = theirs[
            name.replace("encoder.", "bert.", 1) if name[0] == "e" else name
        ].grad
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-6, atol=1e-9)
