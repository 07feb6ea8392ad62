"""Measures of attention heads: entropy, divergence, and distance between models.

They follow Clark et al. 2019, "What does BERT look at?", sections 3.3 (entropy) and 6
(clustering of heads). The attention of a query position is a distribution over the
tokens of its text. Each position of each text counts once, including special tokens;
padding does not count. All measures are sums over positions, so only one batch of maps
is in memory at a time. Entropies and divergences are in nats.

Head h of layer l has the number l * heads + h.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fednotes.apps.experiments.attention_maps import Batch
from fednotes.core.errors import DataError, needs

Floats = NDArray[np.float64]

# Columns of a block: heads * 2048 numbers and their logarithms fit into a core's cache.
_COLUMNS = 2048
_TINY = np.float32(1e-30)  # makes 0 log 0 zero without a branch


@dataclass(frozen=True, eq=False)
class Heads:
    """Measures of one model's heads on a sample of texts: means over positions.

    Attributes:
        entropy: (layers, heads) entropy of each head's attention.
        divergence: (layers * heads, layers * heads) Jensen–Shannon divergence of each
            pair of heads; symmetric, zero on the diagonal.
        positions: Number of positions, which are the tokens of all texts.
        texts: Number of texts.
    """

    entropy: Floats
    divergence: Floats
    positions: int
    texts: int

    def average_by_layer(self) -> Floats:
        """Return the (layers,) mean entropy of each layer's heads."""
        return self.entropy.mean(axis=1)

    def measure_depth_trend(self) -> float:
        """Return the rank correlation between a head's layer and its entropy.

        It is negative if entropy falls with depth.
        """
        layers = np.indices(self.entropy.shape)[0]
        return compute_rank_correlation(layers, self.entropy)  # [bert table 2 depth]


def measure_heads(batches: Iterable[Batch]) -> Heads:
    """Return the entropies and divergences of all heads, in one pass over the maps.

    Args:
        batches: Attention and lengths of each batch of texts.

    Raises:
        DataError: There are no positions.
    """
    entropies: Floats = np.zeros(1)
    divergences: Floats = np.zeros(1)
    positions = 0
    texts = 0
    for attention, lengths in batches:
        entropies = entropies + sum_entropies(attention, lengths)
        divergences = divergences + sum_divergences(attention, lengths)
        positions += int(np.sum(lengths))
        texts += len(lengths)
    if not positions:
        raise DataError("attention was measured on no tokens: give at least one text")
    return Heads(
        entropy=entropies / positions,
        divergence=divergences / positions,
        positions=positions,
        texts=texts,
    )


def _drop_padding(attention: np.ndarray, lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Yield each text's maps without padding: (layers * heads, tokens, tokens)."""
    for maps, length in zip(attention, lengths, strict=True):
        tokens = maps[:, :, :length, :length]
        yield np.ascontiguousarray(tokens, np.float32).reshape(-1, length, length)


def sum_entropies(attention: np.ndarray, lengths: np.ndarray) -> Floats:
    """Return the entropies of one batch, summed over its positions.

    Args:
        attention: (texts, layers, heads, tokens, tokens).
        lengths: (texts,) tokens before the padding.

    Returns:
        (layers, heads).
    """
    layers, heads = attention.shape[1:3]
    total = np.zeros(layers * heads)
    for maps in _drop_padding(attention, lengths):
        logarithms = np.log(maps + _TINY)
        rows = np.einsum("hqk,hqk->hq", maps, logarithms)  # [bert table 2 entropy]
        total -= rows.sum(axis=1, dtype=np.float64)
    # Rounding can make the entropy of a distribution on one token negative.
    return np.maximum(total, 0.0).reshape(layers, heads)


def sum_divergences(attention: np.ndarray, lengths: np.ndarray) -> Floats:
    """Return the Jensen–Shannon divergences of one batch, summed over its positions.

    JS(p, q) = H(m) − (H(p) + H(q)) / 2 with m = (p + q) / 2. Each pair of heads
    therefore only needs the entropy of m: one logarithm per pair and key. The program
    of Clark et al. first mixes 0.1 % of the uniform distribution into each head,
    because its formula divides by the attention. Here, 0 log 0 is 0.

    Args:
        attention: (texts, layers, heads, tokens, tokens).
        lengths: (texts,) tokens before the padding.

    Returns:
        (layers * heads, layers * heads).
    """
    count = attention.shape[1] * attention.shape[2]
    total = np.zeros((count, count))
    for maps in _drop_padding(attention, lengths):
        halves = maps.reshape(count, -1) * np.float32(0.5) + _TINY
        for start in range(0, halves.shape[1], _COLUMNS):
            block = halves[:, start : start + _COLUMNS]
            total += _sum_pairs(np.ascontiguousarray(block))
    # On the diagonal, m = p: minus the heads' own entropies, by the same additions.
    diagonal = total.diagonal()
    mean = (diagonal[:, None] + diagonal) / 2
    divergence = mean - total  # [bert table 2 divergence]
    upper = np.triu(np.maximum(divergence, 0.0), 1)
    return upper + upper.T


def _sum_pairs(halves: np.ndarray) -> Floats:
    """Return Σ m log m for the sum m of each pair of rows.

    Args:
        halves: (rows, columns) float32, half of the attention of each head.

    Returns:
        (rows, rows), in the upper triangle.
    """
    result = np.zeros((len(halves), len(halves)))
    sums = np.empty_like(halves)
    logarithms = np.empty_like(halves)
    for first in range(len(halves)):
        m = np.add(halves[first:], halves[first], out=sums[first:])
        log = np.log(m, out=logarithms[first:])
        result[first, first:] = np.einsum("hk,hk->h", m, log)
    return result


# ---- two models ----------------------------------------------------------------------


def compute_rank_correlation(a: ArrayLike, b: ArrayLike) -> float:
    """Return Spearman's rank correlation of two arrays of the same size.

    The result is NaN if all values of one array are equal.

    Args:
        a: An array of any shape.
        b: An array of any shape with the same number of elements.

    Raises:
        DataError: The sizes differ, or there are fewer than two numbers.
        MissingExtra: SciPy is not installed.
    """
    with needs("scipy", "plot"):
        from scipy.stats import spearmanr
    x = np.ravel(a)
    y = np.ravel(b)
    if len(x) != len(y) or len(x) < 2:
        raise DataError(
            f"a rank correlation of {len(x)} and {len(y)} values: give two lists of "
            "the same size, two values or more"
        )
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan  # SciPy would warn
    return float(spearmanr(x, y).statistic)  # [bert table 2 spearman]


def measure_divergence_distance(a: ArrayLike, b: ArrayLike) -> tuple[float, float]:
    """Return the mean and sum of absolute differences of two divergence matrices.

    The paper describes the mean. For mean divergences, it is at most ln 2.

    Args:
        a: (heads, heads) divergences.
        b: (heads, heads) divergences.

    Raises:
        DataError: The shapes differ.
    """
    x = np.asarray(a, np.float64)
    y = np.asarray(b, np.float64)
    if x.shape != y.shape or not x.size:
        raise DataError(
            f"JS matrices of {x.shape} and {y.shape}: the models' heads differ"
        )
    difference = np.abs(x - y)  # [bert table 2 distance]
    return float(difference.mean()), float(difference.sum())  # [bert table 2 distance]


def compare_models(heads: Mapping[str, Heads]) -> dict[str, Floats]:
    """Return the measures of all pairs of models, each (models, models).

    Args:
        heads: The measures of each model's heads by name.

    Returns:
        By name: "spearman", the rank correlation of the heads' entropies, NaN if
            undefined; "distance_mean" (at most ln 2) and "distance_sum" of the absolute
            differences of the divergence matrices; and "distance_over_tokens", the mean
            for divergences summed over tokens, as in Clark et al.
    """
    models = list(heads.values())
    pairs = [
        (
            compute_rank_correlation(a.entropy, b.entropy),
            *measure_divergence_distance(a.divergence, b.divergence),
        )
        for a, b in product(models, repeat=2)
    ]
    square = (3, len(models), len(models))
    correlation, mean, total = np.array(pairs).T.reshape(square)
    return {
        "spearman": correlation,
        "distance_mean": mean,
        "distance_sum": total,
        "distance_over_tokens": mean * models[0].positions,
    }
