"""A tagger that trains in a moment, an encoder of hashes, plain training, equal
bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fednotes.core.types import SiteData, TagSet
from fednotes.data.synthetic import generate
from fednotes.data.text import Passage
from fednotes.taggers.corpora import hash_forms
from fednotes.taggers.saving import build_model, save_model
from fednotes.taggers.tagger import TaggerConfig

MODEL = TaggerConfig(
    char_dim=6,
    char_filters=8,
    cnn_filters=10,
    lstm_units=5,
    hashed_words=50,
    word_dim=4,
)
NO_DROPOUT = replace(MODEL, dropout=0.0)


def assert_same(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Check that two mappings have the same names, and each value to the bit."""
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def values(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the present values."""
    return {name: value.detach().clone() for name, value in parameters.items()}


def generated(sentences: int, sites: int = 3) -> list[SiteData]:
    """Return sites of the synthetic corpus."""
    generated_sites = generate(num_sites=sites, sentences_per_site=sentences, seed=5)
    return [site.data for site in generated_sites]


def resumed(run: Callable[..., Any], folder: Path, kill: int) -> Any:
    """Return the result of a run that is killed in round `kill` and then resumed."""

    def stop(result: Any) -> None:
        if result.round == kill:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(directory=folder, observer=stop)
    return run(directory=folder, resume=True)


def plain_adamw(
    parameters: Mapping[str, Tensor],
    config: Any,
    losses: Sequence[Callable[[], Tensor]],
) -> None:
    """Train with torch's AdamW in two groups, a linear rise and fall, and clipping.

    config: an `Averaging`. losses: filled in with the mean loss of each step.
    """
    weights = [p for p in parameters.values() if p.dim() > 1]
    others = [p for p in parameters.values() if p.dim() == 1]
    groups = [
        {"params": weights, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)
    total = len(losses)
    rise = config.warmup * total
    for step, loss in enumerate(losses):
        up, down = (step + 1) / (rise + 1), (total - step) / (total - rise)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * (up if step < rise else min(1.0, down))
        optimizer.zero_grad()
        loss().backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), config.clip)
        optimizer.step()


@dataclass(frozen=True)
class HashEncoder:
    """A frozen encoder for tests: a word's features follow from its letters and
    place."""

    layers: int = 1
    dim: int = 6
    fingerprint: str = "hash-1"

    def encode(self, sentences: Sequence[Passage]) -> np.ndarray:
        rows = [
            np.random.default_rng([place, *word.encode()]).standard_normal(
                (self.layers, self.dim)
            )
            for sentence in sentences
            for place, word in enumerate(sentence.forms)
        ]
        return np.array(rows).reshape(-1, self.layers, self.dim).astype(np.float16)


def save_three_words(path: Path) -> Path:
    """Save a tagger with weights set by hand: it marks three words, one less surely."""
    flat = TaggerConfig(
        hashed_words=997,
        word_dim=2,
        characters=False,
        cnn_filters=0,
        lstm_units=0,
        dropout=0.0,
    )
    model = build_model(flat, TagSet(("ADR", "Drug")), seed=4)
    rows = hash_forms(("pain", "nausea", "metoprolol"), 997)[:, 0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        table, tags = model.get_parameter("words.hashed"), model.tagset.tags
        table[rows] = torch.tensor([[8.0, 0.0], [5.0, 0.0], [0.0, 8.0]])
        weight = model.get_parameter("crf.project.weight")
        weight[tags.index("B-ADR"), 0] = weight[tags.index("B-Drug"), 1] = 1.0
        model.get_parameter("crf.project.bias")[0] = 3.0
    save_model(model, path)
    return path
