"""Notes of a tiny BERT's few words with marked findings and drugs, and classifiers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fednotes.core.types import Document, Span, TagSet
from fednotes.taggers.saving import build_model, read_model_config
from fednotes.taggers.token_classifier import TokenClassifier

TAGS = TagSet(("ADR", "Drug"))
LABELS = {"nausea": "ADR", "pain": "ADR", "metoprolol": "Drug"}
WORDS = ["no", "pain", "took", "metoprolol", "nausea"]


def document(
    number: int, *sentences: list[str], types: tuple[str, ...] = TAGS.types
) -> Document:
    """Return a document with a sentence on each line; findings and drugs are
    mentions."""
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
    """Return documents of one sentence of 1 to `longest` words; the last is the
    longest.

    Up to six words are no longer than the encoder's positions.
    """
    rng = np.random.default_rng(0)
    words = ["no", "pain", "took", "and", "nausea", "metoprolol", ".", "unheard"]
    lengths = [*rng.integers(1, min(longest, 8), count - 1), longest]
    return tuple(
        document(i, rng.choice(words[: 5 if n > 4 else 8], n).tolist())
        for i, n in enumerate(lengths)
    )


def notes(count: int = 3) -> tuple[Document, ...]:
    """Return documents of 2 to 4 sentences of 1 to 5 words."""
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
    model = build_model(read_model_config(table), tags, seed)
    assert isinstance(model, TokenClassifier)
    return model


def loud(model: TokenClassifier) -> TokenClassifier:
    """Change a classifier so that it predicts many mentions."""
    with torch.no_grad():
        model.classifier.weight.mul_(20)
    return model


def library(model: TokenClassifier) -> Any:
    """Return the library's model with a copy of the same weights."""
    unfrozen = copy.deepcopy(model.library)
    return unfrozen.requires_grad_(True).eval()


def same_gradients(model: TokenClassifier, reference: Any) -> None:
    """Compare the gradients of every trained parameter with the library's BERT."""
    theirs = dict(reference.named_parameters())
    for name, parameter in model.trainable().items():
        grad = theirs[
            name.replace("encoder.", "bert.", 1) if name[0] == "e" else name
        ].grad
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-6, atol=1e-9)
