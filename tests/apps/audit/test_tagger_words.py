"""Words and their order, recovered from the convolutions of a light tagger."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from audit_jobs import PRIVATE, attack_tagger

from fednotes.apps.audit.attacks.word_order import score_order

WIDE = {
    "hashed_words": 0,
    "char_filters": 64,
    "char_dim": 16,
    "cnn_filters": 32,
    "dropout": 0.0,
}


def test_the_order_of_words_follows_from_the_gradients_of_a_convolution() -> None:
    """Compute the gradients by the definition, token by token.

    Without repeated words, each pair scores 1 forwards and 1 backwards. In general, the
    scores are those of NumPy's least squares, with additional rows for the penalties.
    """
    rng = np.random.default_rng(3)
    for texts, rate in (
        ([[0, 1, 2], [3, 4, 5]], 0.0),
        ([[0, 1, 0, 2], [1, 0, 3]], 0.2),
    ):
        rows = rng.normal(size=(max(map(max, texts)) + 1, 12))
        gradients = np.zeros((3, 20, 12))
        for text in texts:
            for at in range(len(text)):
                projections = rng.normal(size=20)
                for k in range(3):
                    if 0 <= at + k - 1 < len(text):
                        gradients[k] += np.outer(projections, rows[text[at + k - 1]])
        often = np.bincount(np.concatenate(texts)).astype(float)
        tensors = [torch.from_numpy(x) for x in (gradients, rows, often)]
        scores = score_order([tensors[0]], *tensors[1:], rate).numpy()
        if not rate:
            pairs = [(a, b) for text in texts for a, b in pairwise(text)]
            assert sorted(pairs) == sorted(zip(*np.nonzero(scores > 1.5), strict=True))
            assert scores[scores <= 1.5].max() < 0.5
        spread = (rows**2).sum(0)
        least = np.diag((spread * rate / (1 - rate) + 1e-9 * spread.mean()) ** 0.5)
        inverse = np.linalg.pinv(np.vstack((rows, least)))[:, : len(rows)]
        projections = gradients @ inverse
        expected = np.zeros_like(scores)
        for turn in (1, -1):
            x, y = (
                np.concatenate(part)
                for part in (projections[:-1], projections[1:])[::turn]
            )
            ridge = (0.1 * (x**2).sum(0).mean()) ** 0.5 * np.eye(len(rows))
            blind = np.tile(often / often.sum(), (len(rows), 1))
            t = np.linalg.lstsq(np.vstack((x, ridge)), np.vstack((y, ridge @ blind)))[0]
            expected += t * often[:, None] if turn == 1 else (t * often[:, None]).T
        np.testing.assert_allclose(scores, expected, rtol=1e-6, atol=1e-8)


def test_convolutions_reveal_words_and_neighbours_of_frozen_tables() -> None:
    """With a small mini-batch; noise hides them, and private layers send nothing."""
    few = {"batch_size": 6}
    for name in ("words from conv", "neighbours"):
        leak = attack_tagger(name, model=WIDE, training=few)
        assert leak.control is not None
        assert leak.control >= 0.95
        assert leak.success is not None
        assert leak.success > leak.chance + 0.5
        with_noise = attack_tagger(name, model=WIDE, training=few, privacy=PRIVATE)
        assert (with_noise.success or 0) < with_noise.chance + 0.3
        with_private = {"private": ["cnn", "lstm", "crf"]}
        assert attack_tagger(name, model=WIDE, training=with_private).why.endswith(
            "leaves a site"
        )


def test_columns_of_contextual_features_are_left_out(bert: Path) -> None:
    """The control allows for them; without other columns the attack does not apply."""
    model = {"contextual": str(bert), **WIDE}
    leak = attack_tagger("words from conv", model=model, training={"batch_size": 6})
    assert leak.control is not None
    assert leak.control >= 0.95
    assert attack_tagger("words from conv", model=model | {"characters": False}).why
