"""Attention heads compared: entropies, and Jensen–Shannon divergences between heads.

After Clark et al. 2019, "What does BERT look at?", sections 3.3 (entropy) and 6 (clustering of
heads), as Liu and Miller 2020, section 4.3 and table 2, use them. A query position's attention
is a distribution over the text's tokens; every position of every text counts the same, the
special tokens too, padding never. Everything is a sum over positions, so batches of maps come
and go: no more than one is in memory. Entropies and divergences are in nats.

A batch: attention (texts, layers, heads, tokens, tokens), each row over the last axis a
distribution, and lengths (texts,), tokens before the padding. Head h of layer l is number
l * heads + h.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fednotes.core.errors import DataError

Floats = NDArray[np.float64]
Batch = tuple[np.ndarray, np.ndarray]

# Columns of a block: heads * 2048 floats and their logarithms stay in a core's own cache.
_COLUMNS = 2048
_TINY = np.float32(1e-30)  # makes 0 log 0 zero, without a branch


@dataclass(frozen=True, eq=False)
class Heads:
    """What is known of one model's heads on a sample.

    entropy: (layers, heads). divergence: (layers * heads, layers * heads), symmetric, zero on
    the diagonal. Both are means over `positions`, the tokens of `texts` texts.
    """

    entropy: Floats
    divergence: Floats
    positions: int
    texts: int

    @property
    def by_depth(self) -> Floats:
        """(layers,): the mean entropy of each layer's heads."""
        return self.entropy.mean(axis=1)


def measure(batches: Iterable[Batch]) -> Heads:
    """Entropies and divergences of all heads in one pass. Raises DataError (no position)."""
    entropies, divergences, positions, texts = np.zeros(1), np.zeros(1), 0, 0
    for attention, lengths in batches:
        entropies = entropies + entropy_sum(attention, lengths)
        divergences = divergences + divergence_sum(attention, lengths)
        positions += int(np.sum(lengths))
        texts += len(lengths)
    _require(positions)
    return Heads(entropies / positions, divergences / positions, positions, texts)


def _require(positions: int) -> None:
    if not positions:
        raise DataError("attention was measured on no token: give at least one text")


def _texts(attention: np.ndarray, lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Each text's maps without padding: (heads in all, tokens, tokens) float32."""
    for maps, length in zip(attention, lengths, strict=True):
        kept = maps[:, :, :length, :length]
        yield np.ascontiguousarray(kept, np.float32).reshape(-1, length, length)


def entropy_sum(attention: np.ndarray, lengths: np.ndarray) -> Floats:
    """(layers, heads): the entropies of one batch, summed over its positions."""
    layers, heads = attention.shape[1:3]
    total = np.zeros(layers * heads)
    for maps in _texts(attention, lengths):
        rows = np.einsum("hqk,hqk->hq", maps, np.log(maps + _TINY))  # [bert table 2 entropy]
        total -= rows.sum(axis=1, dtype=np.float64)
    # A distribution on one token may come out a rounding error below zero.
    return np.maximum(total, 0.0).reshape(layers, heads)


def divergence_sum(attention: np.ndarray, lengths: np.ndarray) -> Floats:
    """(heads in all, heads in all): JS of one batch, summed over its positions.

    Clark et al.'s program first mixes 0.1 % of the uniform distribution into each head, because
    its formula divides by it; here 0 log 0 is 0.

    JS(p, q) = H(m) − (H(p) + H(q)) / 2 with m = (p + q) / 2: of each pair of heads only m's
    entropy is new, one logarithm a pair and key.
    """
    count = attention.shape[1] * attention.shape[2]
    total = np.zeros((count, count))
    for maps in _texts(attention, lengths):
        halves = maps.reshape(count, -1) * np.float32(0.5) + _TINY
        for start in range(0, halves.shape[1], _COLUMNS):
            total += _pairs(np.ascontiguousarray(halves[:, start : start + _COLUMNS]))
    own = total.diagonal()  # m = p: minus the heads' own entropies, by the same additions
    found = (own[:, None] + own) / 2 - total  # [bert table 2 divergence]
    upper = np.triu(np.maximum(found, 0.0), 1)
    return upper + upper.T


def _pairs(halves: np.ndarray) -> Floats:
    """Σ m log m for each two rows' sum m, in the upper triangle: (rows, rows)."""
    found = np.zeros((len(halves), len(halves)))
    sums, logs = np.empty_like(halves), np.empty_like(halves)
    for first in range(len(halves)):
        m = np.add(halves[first:], halves[first], out=sums[first:])
        log = np.log(m, out=logs[first:])
        found[first, first:] = np.einsum("hk,hk->h", m, log)
    return found


def spearman(a: ArrayLike, b: ArrayLike) -> float:
    """Spearman's rank correlation of two lists of numbers, of any shape but the same size.

    Ties get the mean of their ranks. NaN where all values of one are equal. Raises DataError
    (sizes differ, fewer than two values).
    """
    x, y = np.ravel(a), np.ravel(b)
    if len(x) != len(y) or len(x) < 2:
        raise DataError(
            f"a rank correlation of {len(x)} and {len(y)} values: "
            "give two lists of the same size, two values or more"
        )
    x, y = _ranks(x), _ranks(y)
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x @ x) * (y @ y)))  # [bert table 2 spearman]
    # Pearson's correlation of the ranks. [bert table 2 spearman]
    return float((x @ y) / scale) if scale else float("nan")


def _ranks(values: np.ndarray) -> Floats:
    """Ranks from 1; equal values share the mean of theirs."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[which]


def matrix_distance(a: ArrayLike, b: ArrayLike) -> tuple[float, float]:
    """Mean and sum over all entries of the absolute differences of two JS matrices.

    The paper names the mean, which of matrices of mean divergences is ln 2 at most. Raises
    DataError where the shapes differ.
    """
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if x.shape != y.shape or not x.size:
        raise DataError(f"JS matrices of {x.shape} and {y.shape}: the models' heads differ")
    difference = np.abs(x - y)  # [bert table 2 distance]
    return float(difference.mean()), float(difference.sum())  # [bert table 2 distance]
