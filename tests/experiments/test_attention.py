"""Entropies, divergences and rank correlations against loops over positions and SciPy."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from scipy.spatial.distance import jensenshannon
from scipy.stats import entropy as scipy_entropy
from scipy.stats import spearmanr

from fednotes.core.errors import DataError
from fednotes.experiments.attention import matrix_distance, measure, spearman

LENGTHS = np.array([7, 1, 9, 4])


def maps(seed: int = 0, tokens: int = 9, sharp: float = 3.0) -> np.ndarray:
    """(4 texts, 2 layers, 3 heads, tokens, tokens) as a model gives them: padding is noise.

    Keys behind a text's end get exactly nothing; rows behind it are anything at all.
    """
    rng = np.random.default_rng(seed)
    scores = rng.normal(0, sharp, (4, 2, 3, tokens, tokens))
    for text, length in enumerate(LENGTHS):
        scores[text, :, :, :, length:] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    for text, length in enumerate(LENGTHS):
        weights[text, :, :, length:] = rng.random((2, 3, tokens - length, tokens))
    return weights.astype(np.float32)


def rows(attention: np.ndarray) -> Iterator[np.ndarray]:
    """The distributions of all six heads at each position, one position at a time: (6, keys)."""
    for text, length in enumerate(LENGTHS):
        for query in range(length):
            yield attention[text, :, :, query, :length].reshape(6, length).astype(np.float64)


def brute_force(attention: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means over positions of SciPy's entropy and of the square of its JS distance."""
    entropies, divergences, count = np.zeros(6), np.zeros((6, 6)), 0
    for heads in rows(attention):
        count += 1
        for i in range(6):
            entropies[i] += scipy_entropy(heads[i])
            for j in range(6):
                if len(heads[i]) > 1:  # on one token both are all of it; SciPy divides 0 by 0
                    divergences[i, j] += jensenshannon(heads[i], heads[j]) ** 2
    return entropies.reshape(2, 3) / count, divergences / count


def test_against_a_loop_over_positions() -> None:
    """`brute_force` above: SciPy, position by position and head by head."""
    attention = maps()
    expected_entropy, expected_js = brute_force(attention)
    batch = [(attention, LENGTHS)]
    both = measure(batch)
    np.testing.assert_allclose(both.entropy, expected_entropy, atol=1e-6)
    np.testing.assert_allclose(both.divergence, expected_js, atol=1e-6)
    assert (both.positions, both.texts) == (21, 4)
    np.testing.assert_allclose(both.by_depth, expected_entropy.mean(1), atol=1e-6)


def test_long_texts_are_cut_in_blocks() -> None:
    """A text of 70 tokens is 4900 columns, more than two blocks: the loop in NumPy alone."""
    rng = np.random.default_rng(3)
    p = rng.dirichlet(np.full(70, 0.2), (1, 1, 4, 70)).astype(np.float32)
    found = measure([(p, np.array([70]))]).divergence
    heads = p[0, 0].astype(np.float64)  # (heads, queries, keys)
    for i in range(4):
        for j in range(4):
            m = (heads[i] + heads[j]) / 2
            with np.errstate(divide="ignore", invalid="ignore"):
                left = np.nansum(heads[i] * np.log(heads[i] / m), axis=-1)
                right = np.nansum(heads[j] * np.log(heads[j] / m), axis=-1)
            assert found[i, j] == pytest.approx((left + right).mean() / 2, abs=1e-6)


def test_padding_and_batches_do_not_count() -> None:
    """Each text alone and without padding, weighted by its tokens, gives the same means; so do
    batches of one."""
    attention = maps()
    whole = measure([(attention, LENGTHS)])
    split = measure((attention[i : i + 1], LENGTHS[i : i + 1]) for i in range(4))
    parts = [
        measure([(attention[i : i + 1, :, :, :n, :n], LENGTHS[i : i + 1])])
        for i, n in enumerate(LENGTHS)
    ]
    weights = LENGTHS / LENGTHS.sum()
    for name in ("entropy", "divergence"):
        mean = sum(w * getattr(part, name) for w, part in zip(weights, parts, strict=True))
        np.testing.assert_allclose(getattr(whole, name), mean, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(getattr(whole, name), getattr(split, name), rtol=1e-14)


def test_uniform_and_one_token() -> None:
    """By hand: log n, and 0; between heads on different tokens ln 2, between equal ones 0."""
    n = 50
    attention = np.zeros((1, 1, 4, n, n), np.float32)
    attention[0, 0, 0] = 1 / n
    attention[0, 0, 1, :, 0] = 1
    attention[0, 0, 2, :, 1] = 1
    attention[0, 0, 3] = attention[0, 0, 2]
    found = measure([(attention, np.array([n]))])
    np.testing.assert_allclose(found.entropy, [[math.log(n), 0, 0, 0]], atol=1e-6)
    assert found.divergence[1, 2] == pytest.approx(math.log(2), abs=1e-6)
    assert found.divergence[2, 3] == 0


def test_divergence_is_a_divergence() -> None:
    """0 on the diagonal, symmetric, from 0 to ln 2; and no head is its neighbour here."""
    for sharp in (0.01, 1.0, 30.0):
        found = measure([(maps(1, sharp=sharp), LENGTHS)]).divergence
        assert not found.diagonal().any()
        np.testing.assert_array_equal(found, found.T)
        assert found.min() >= 0
        assert found.max() <= math.log(2)
        assert (found[~np.eye(6, dtype=bool)] > 0).all()


@pytest.mark.parametrize("levels", [1000, 7, 2])
def test_spearman_against_scipy(levels: int) -> None:
    """`scipy.stats.spearmanr`; few levels make many ties."""
    rng = np.random.default_rng(levels)
    for _ in range(20):
        a, b = rng.integers(0, levels, (2, 6, 12)).astype(float)
        expected = spearmanr(a.ravel(), b.ravel()).statistic
        assert spearman(a, b) == pytest.approx(expected, abs=1e-12)


def test_spearman_by_hand() -> None:
    a = np.array([0.3, 0.1, 0.2])
    assert spearman(a, a) == 1
    assert spearman(a, np.exp(9 * a)) == 1
    assert spearman(a, -a) == -1
    assert math.isnan(spearman(a, np.ones(3)))
    with pytest.raises(DataError, match="3 and 2 values"):
        spearman(a, a[:2])


def test_distance_by_hand() -> None:
    """|1 − 4| + |2 − 0| + 0 + |3 − 2| = 6, over four entries."""
    assert matrix_distance([[1, 2], [0, 3]], [[4, 0], [0, 2]]) == (1.5, 6)
    with pytest.raises(DataError, match="heads differ"):
        matrix_distance(np.zeros((2, 2)), np.zeros((3, 3)))
    with pytest.raises(DataError, match="at least one text"):
        measure([])
