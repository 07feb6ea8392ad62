"""Discrete Gaussian noise, compared with its exact probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from fednotes.privacy import noise
from fednotes.privacy.noise import SCALE, Stream, draw_discrete_gaussian, draw_units

KEY = bytes(range(32))


def exact(scale: int, values: np.ndarray) -> np.ndarray:
    """Return exp(-x² / 2 s²) over its sum by math.fsum; beyond 40 s it is 0 in
    float64."""
    normalizer = math.fsum(
        math.exp(-x * x / (2 * scale**2)) for x in range(-40 * scale, 40 * scale + 1)
    )
    return np.array(
        [math.exp(-(int(x) ** 2) / (2 * scale**2)) / normalizer for x in values]
    )


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_frequencies_of_the_noise_equal_the_exact_probabilities(bits: int) -> None:
    """χ² over all values that are expected five times and more, the rest as one; p >
    1e-4."""
    count, scale = 200_000, 2**bits
    sample = draw_discrete_gaussian(Stream(KEY), count, bits)
    values = np.arange(-6 * scale, 6 * scale + 1)
    expected = count * exact(scale, values)
    frequencies = np.array([(sample == value).sum() for value in values])
    often = expected >= 5
    tails = count - expected[often].sum(), count - frequencies[often].sum()
    test = stats.chisquare(
        [*frequencies[often], tails[1]], [*expected[often], tails[0]]
    )
    assert test.pvalue > 1e-4


def test_noise_in_units_of_its_scale_is_gaussian() -> None:
    """Mean 0 and variance 1 within five standard errors (1 / √n, √(2 / n));
    Kolmogorov-Smirnov."""
    sample = draw_discrete_gaussian(Stream(KEY), 200_000) / SCALE
    assert abs(sample.mean()) < 5 / math.sqrt(len(sample))
    assert abs(sample.var() - 1) < 5 * math.sqrt(2 / len(sample))
    assert stats.kstest(sample, "norm").pvalue > 1e-4


@pytest.mark.parametrize("k", [2, 3, 7])
def test_one_of_k_is_drawn_with_probability_one_in_k(k: int) -> None:
    hits = noise._draw_one_in(Stream(KEY), k, 100_000)
    assert stats.binomtest(int(hits.sum()), len(hits), 1 / k).pvalue > 1e-4


@pytest.mark.parametrize(
    ("above", "bits"), [(0, 4), (5, 4), (15, 4), (16, 4), (50, 4), (300, 4)]
)
def test_a_power_of_e_is_drawn_with_its_probability(above: int, bits: int) -> None:
    hits = noise._draw_exponential(Stream(KEY), np.full(100_000, above), bits)
    expected = math.exp(-above / 2**bits)
    assert stats.binomtest(int(hits.sum()), len(hits), expected).pvalue > 1e-4


def test_streams_do_not_repeat_and_depend_on_the_key() -> None:
    stream = Stream(KEY)
    words = np.concatenate(
        [stream.draw_words(n) for n in (3, noise.LOT, 5, 3 * noise.LOT, 1)]
    )
    assert len(np.unique(words)) == len(words)
    assert not np.isin(Stream(bytes(32)).draw_words(1000), words).any()
    assert (Stream(KEY).draw_words(3) == words[:3]).all()


@pytest.mark.parametrize("rate", [0.001, 0.05, 0.7, 1.0])
def test_units_are_sampled_at_their_rate(rate: float) -> None:
    selected = draw_units(Stream(KEY), 100_000, rate)
    assert stats.binomtest(int(selected.sum()), len(selected), rate).pvalue > 1e-4
    assert rate < 1 or selected.all()


@pytest.mark.parametrize("bits", [1, 3])
def test_candidates_have_the_discrete_laplace_distribution(bits: int) -> None:
    """P(y) ∝ exp(-|y| / s): with r = exp(-1 / s) it is (1 - r) / (1 + r) · r^|y|. χ², p
    > 1e-4."""
    count, ratio = 100_000, math.exp(-1 / 2**bits)
    sample = noise._draw_laplace(Stream(KEY), count, bits)
    values = np.arange(-5 * 2**bits, 5 * 2**bits + 1)
    expected = count * (1 - ratio) / (1 + ratio) * ratio ** np.abs(values)
    frequencies = np.array([(sample == value).sum() for value in values])
    test = stats.chisquare(
        [*frequencies, count - frequencies.sum()], [*expected, count - expected.sum()]
    )
    assert test.pvalue > 1e-4


class FixedStream(Stream):
    """Words that are known."""

    def __init__(self, *words: int) -> None:
        self._known = np.array(words, np.uint64)

    def draw_words(self, count: int) -> noise.Words:
        return self._known[:count]


def test_a_unit_is_sampled_if_its_word_is_below_the_rate() -> None:
    """By hand: 1/4 of 2^64 words are those below 2^62, in steps of 2^11."""
    stream = FixedStream(0, 2**62 - 1, 2**62, 2**62 + 2**11, 2**64 - 1)
    assert draw_units(stream, 5, 0.25).tolist() == [True, True, False, False, False]


def test_each_toss_of_a_fraction_uses_fresh_words() -> None:
    """By hand, γ = 8/16: with k = 1 a nibble below 8 goes on; then one of k = 2 (a word
    that 2 divides) and a nibble below 8 goes on to k = 3. It ends at an odd k as True:
    8 at once, 7 and then no 2 as False, 7, 2, 7 and then no 3 as True."""

    def toss(*words: int) -> bool:
        words_left = list(words)

        class Queue(Stream):
            def __init__(self) -> None: ...

            def draw_words(self, count: int) -> noise.Words:
                assert count == 1
                return np.array([words_left.pop(0)], np.uint64)

        tossed = noise._draw_fraction(Queue(), np.array([8]), 4)
        assert not words_left
        return bool(tossed[0])

    low, high = 7 << 60, 8 << 60
    assert toss(high)
    assert not toss(low, 1, low)
    assert not toss(low, 2, high)
    assert toss(low, 2, low, 4, low)


def test_a_clipped_update_has_the_largest_permitted_length() -> None:
    """By hand, in fractions: (3, -4) of length 5 to the length 2, less the margin of
    1e-9, is (1.2, -1.6) less it: in steps of 2^-30 and 2^-31 1288490187.51 and
    -3435973833.36, towards zero. What is shorter stays, what is zero too; what is not
    finite is nothing."""
    grids = {"a": 2.0**-30, "b": 2.0**-31}

    def gradient(a: float, b: float) -> dict[str, torch.Tensor]:
        return {"a": torch.tensor([a]), "b": torch.tensor([b])}

    clipped = noise.clip_to_grid(gradient(3, -4), 2.0, grids)
    assert {n: (v.tolist(), v.dtype) for n, v in clipped.items()} == {
        "a": ([1288490187], torch.int64),
        "b": ([-3435973833], torch.int64),
    }
    short = noise.clip_to_grid(gradient(0.5, 0), 2.0, grids)
    assert [short["a"].item(), short["b"].item()] == [2**29, 0]
    zero = noise.clip_to_grid(gradient(0, 0), 2.0, grids)
    assert [zero["a"].item(), zero["b"].item()] == [0, 0]
    assert noise.clip_to_grid(gradient(math.inf, 1), 2.0, grids) == {}
