"""Discrete Gaussian noise against its exact probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fednotes.privacy import noise
from fednotes.privacy.noise import SCALE, Stream, chosen, discrete_gaussian

KEY = bytes(range(32))


def exact(scale: int, values: np.ndarray) -> np.ndarray:
    """exp(-x² / 2 s²) over its sum, by math.fsum; beyond 40 s nothing is left in float64."""
    whole = math.fsum(math.exp(-x * x / (2 * scale**2)) for x in range(-40 * scale, 40 * scale + 1))
    return np.array([math.exp(-(int(x) ** 2) / (2 * scale**2)) / whole for x in values])


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_its_frequencies_are_the_exact_probabilities(bits: int) -> None:
    """χ² over all values that are expected five times and more, the rest as one; p > 1e-4."""
    count, scale = 200_000, 2**bits
    found = discrete_gaussian(Stream(KEY), count, bits)
    values = np.arange(-6 * scale, 6 * scale + 1)
    expected = count * exact(scale, values)
    seen = np.array([(found == value).sum() for value in values])
    often = expected >= 5
    rest = count - expected[often].sum(), count - seen[often].sum()
    test = stats.chisquare([*seen[often], rest[1]], [*expected[often], rest[0]])
    assert test.pvalue > 1e-4


def test_at_its_own_scale_it_is_a_gaussian() -> None:
    """Mean 0 and variance 1 within five standard errors (1 / √n, √(2 / n)); Kolmogorov-Smirnov."""
    found = discrete_gaussian(Stream(KEY), 200_000) / SCALE
    assert abs(found.mean()) < 5 / math.sqrt(len(found))
    assert abs(found.var() - 1) < 5 * math.sqrt(2 / len(found))
    assert stats.kstest(found, "norm").pvalue > 1e-4


@pytest.mark.parametrize("k", [2, 3, 7])
def test_one_of_k_is_one_of_k(k: int) -> None:
    held = noise._one_of(Stream(KEY), k, 100_000)
    assert stats.binomtest(int(held.sum()), len(held), 1 / k).pvalue > 1e-4


@pytest.mark.parametrize(("above", "bits"), [(0, 4), (5, 4), (15, 4), (16, 4), (50, 4), (300, 4)])
def test_a_power_of_e_is_tossed_with_its_own_probability(above: int, bits: int) -> None:
    held = noise._exponential(Stream(KEY), np.full(100_000, above), bits)
    wanted = math.exp(-above / 2**bits)
    assert stats.binomtest(int(held.sum()), len(held), wanted).pvalue > 1e-4


def test_a_stream_repeats_nothing_and_another_key_is_another_stream() -> None:
    stream = Stream(KEY)
    words = np.concatenate([stream.words(n) for n in (3, noise.LOT, 5, 3 * noise.LOT, 1)])
    assert len(np.unique(words)) == len(words)
    assert not np.isin(Stream(bytes(32)).words(1000), words).any()
    assert (Stream(KEY).words(3) == words[:3]).all()


@pytest.mark.parametrize("rate", [0.001, 0.05, 0.7, 1.0])
def test_units_are_drawn_at_their_rate(rate: float) -> None:
    held = chosen(Stream(KEY), 100_000, rate)
    assert stats.binomtest(int(held.sum()), len(held), rate).pvalue > 1e-4
    assert rate < 1 or held.all()
