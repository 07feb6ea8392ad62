"""Recover neighbouring words from a light tagger's convolutions, in closed form.

The gradients at the offsets k of a convolution are linear in the gradients of its
outputs, so the order of the words can be computed without the search of DLG (Zhu et al.
2019) and LAMP (Balunović et al. 2022). This derivation is our own:

    G_k = Σ_t δ_t x_{t+k}ᵀ    gradient at offset k; δ_t that of the output at token t
    A_k = G_k X⁺              X (words, width); column v is Σ δ_t over the t where
                              token t + k is v
    A_{k+1} = A_k T           where u stands before v, the same δ_t is in column u of
                              A_k and in column v of A_{k+1}

    score of u before v = T[u, v], plus the same backwards

T is a ridge regression towards the expectation of an adversary who knows only how often
each word occurs. Columns of contextual features depend on the sentence and are left
out. Dropout zeroes parts of the rows, which X⁺ takes into account:

    X⁺ = (Xᵀ X + r diag(Xᵀ X))⁻¹ Xᵀ    r the odds of dropout
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fednotes.apps.audit.attack import Attack, Trial
from fednotes.apps.audit.attacks.gradient_span import find_layer_update
from fednotes.apps.audit.attacks.tagger_words import (
    CLOSES,
    compute_word_rows,
    find_observed_layers,
    get_layer_weights,
    list_read_sentences,
)
from fednotes.apps.audit.scene import Scene

MAX_WORDS = 1500  # number of the most frequent words, whose neighbours are sought
RIDGE = 0.1  # of the columns' mean square, when T is solved for
RIDGE_OF_INVERSE = 1e-9  # the same, in X⁺


def infer_neighbours(scene: Scene) -> Trial:
    """Infer which words were neighbours, given which were read and how often."""
    update = find_layer_update(
        scene,
        observed_updates=find_observed_layers(scene, only_convolutions=True),
        get_weights=get_layer_weights,
        layer_name="convolution that reads words",
    )
    dropout = 0.0 if scene.is_control else update.site.config.model.dropout
    read = [corpus for record in update.records for corpus, _ in record.batches]
    rows, word_ids = compute_word_rows(update.site.model, read)
    sentences = [list_read_sentences(record, word_ids) for record in update.records]
    tokens = np.concatenate([words for site in sentences for words in site])
    frequency = np.bincount(tokens, minlength=len(rows))
    frequent = np.argsort(-frequency, kind="stable")
    chosen = frequent[: min(MAX_WORDS, int((frequency > 0).sum()))]

    counts = _count_pairs(sentences, chosen, vocabulary=len(rows))
    scores = score_order(
        update.gradients,
        rows[torch.from_numpy(chosen)],
        torch.from_numpy(frequency[chosen]).double(),
        dropout,
    ).numpy()
    in_pairs = np.flatnonzero(counts[0].sum(0) + counts[0].sum(1))
    return Trial.from_pair_scores(
        scores[in_pairs][:, in_pairs],
        counts[:, in_pairs][:, :, in_pairs],
        words=float(len(in_pairs)),
    )


def score_order(
    gradients: Sequence[Tensor], rows: Tensor, frequency: Tensor, dropout: float
) -> Tensor:
    """Return (words, words) roughly twice how often one word precedes the other.

    Args:
        gradients: (offsets, outputs, width) of each convolution.
        rows: (words, width) inputs of the convolutions for each word.
        frequency: (words,) how often each word occurs.
        dropout: Rate of the dropout on the rows.
    """
    squares = rows.T @ rows
    penalty = squares.diagonal() * dropout / (1 - dropout)
    penalty = penalty + RIDGE_OF_INVERSE * squares.diagonal().mean()
    inverse = torch.linalg.solve(squares + penalty.diag(), rows.T)  # [audit order] X⁺
    by_word = [step[..., : rows.shape[1]].double() @ inverse for step in gradients]
    # (offsets · outputs, words): A_k and A_{k+1} of all k and convolutions.
    earlier = torch.cat([columns[:-1].flatten(0, 1) for columns in by_word])
    later = torch.cat([columns[1:].flatten(0, 1) for columns in by_word])
    forwards = _solve_transitions(earlier, later, frequency)
    backwards = _solve_transitions(later, earlier, frequency)
    return forwards + backwards.T  # [audit order]


def _solve_transitions(x: Tensor, y: Tensor, frequency: Tensor) -> Tensor:
    """Solve x T = y by ridge regression towards the expectation by frequency alone.

    Returns:
        (words, words) T, its rows multiplied by the frequencies of their words.

    Args:
        x: (equations, words).
        y: (equations, words).
        frequency: (words,) how often each word occurs; alone it predicts `expected`.
    """
    squares = x.T @ x
    expected = (frequency / frequency.sum()).expand(len(frequency), -1)
    ridge = RIDGE * squares.diagonal().mean() * torch.eye(len(squares))
    transition: Tensor = expected + torch.linalg.solve(
        squares + ridge, x.T @ y - squares @ expected
    )
    return transition * frequency[:, None]


def _count_pairs(
    sentences: Sequence[Sequence[np.ndarray]], chosen: np.ndarray, *, vocabulary: int
) -> np.ndarray:
    """Return (sites, words, words) how often one word precedes the other.

    Args:
        sentences: For each site, the (tokens,) words of each sentence.
        chosen: (words,) the words to count.
        vocabulary: Number of all words.
    """
    column = np.full(vocabulary, -1)
    column[chosen] = np.arange(len(chosen))
    counts = np.zeros((len(sentences), len(chosen), len(chosen)))
    for at_site, texts in zip(counts, sentences, strict=True):
        for words in texts:
            pairs = column[np.stack((words[:-1], words[1:]))]
            is_counted = (pairs >= 0).all(0)
            np.add.at(at_site, tuple(pairs[:, is_counted]), 1)
    return counts


ATTACKS = (
    Attack(
        "neighbours from convolutions",
        sees="an update of a convolution that reads words",
        closes=CLOSES,
        trial=infer_neighbours,
    ),
)
