"""Repeats and the paired bootstrap against slow explicit programs."""

from __future__ import annotations

import statistics
import time

import numpy as np
import pytest

from fednotes.core.errors import ConfigError, DataError
from fednotes.core.types import Document, Span
from fednotes.metrics import classification
from fednotes.metrics.compare import paired_bootstrap, summarise
from fednotes.metrics.spans import SpanCounts


def systems(documents: int, errors: tuple[float, float], seed: int = 0) -> list[list[Document]]:
    """Gold, and two systems that shift or miss a mention with the given probability."""
    rng = np.random.default_rng(seed)
    sides: list[list[Document]] = [[], [], []]
    for i in range(documents):
        gold = [Span(s, s + 5, "T") for s in range(0, 40, 8) if rng.random() < 0.5]
        sides[0].append(Document(str(i), "x" * 50, tuple(gold)))
        for side, error in zip(sides[1:], errors, strict=True):
            kept = [
                Span(s.start + int(rng.random() < error), s.end, "T")
                for s in gold
                if rng.random() > error / 2
            ]
            side.append(Document(str(i), "x" * 50, tuple(kept)))
    return sides


def test_mean_and_deviation_over_seeds() -> None:
    """Expected: the standard library's `statistics`."""
    f1 = [0.5, 0.61, 0.58]
    runs = [
        {
            "method": "fedner",
            "done": True,
            "seconds": 10 + i,
            "sites": {"h1": {"strict": {"f1": x}}},
        }
        for i, x in enumerate(f1)
    ]
    del runs[2]["seconds"]
    summary = summarise(runs)
    assert summary["sites"]["h1"]["strict"]["f1"] == {
        "mean": pytest.approx(statistics.mean(f1)),
        "std": pytest.approx(statistics.stdev(f1)),
        "n": 3,
    }
    assert summary["seconds"] == {
        "mean": 10.5,
        "std": pytest.approx(statistics.stdev([10, 11])),
        "n": 2,
    }
    assert summary.keys() == {"seconds", "sites"}
    assert summarise([{"f1": 0.5}]) == {"f1": {"mean": 0.5, "std": None, "n": 1}}
    assert summarise([]) == {}
    with pytest.raises(DataError, match="'f1' is a number in one run"):
        summarise([{"f1": 0.5}, {"f1": {"micro": 0.5}}])


@pytest.mark.parametrize("metric", ["strict", "relaxed", "relaxed_one_to_one"])
def test_bootstrap_equals_explicit_resampling(metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that draws the same indices, builds each resampled corpus and scores it anew."""
    gold, a, b = systems(15, (0.1, 0.4))
    samples, seed = 200, 11

    def f1(indices: np.ndarray, system: list[Document]) -> float:
        left, right = [gold[i] for i in indices], [system[i] for i in indices]
        return SpanCounts.of(left, right).scores()[metric]["f1"]

    draws = np.random.default_rng(seed).integers(0, 15, (samples, 15))
    observed = f1(np.arange(15), a) - f1(np.arange(15), b)
    drawn = np.array([f1(row, a) - f1(row, b) for row in draws])
    expected_p = (1 + sum(abs(d - observed) >= abs(observed) - 1e-12 for d in drawn)) / 201
    for chunk in (classification._CHUNK, 15 * 7):  # all at once, and seven resamples at a time
        monkeypatch.setattr(classification, "_CHUNK", chunk)
        result = paired_bootstrap(gold, a, b, metric, samples, seed)
        assert result.difference == pytest.approx(observed)
        assert result.f1_a == pytest.approx(f1(np.arange(15), a))
        assert (result.low, result.high) == pytest.approx(tuple(np.quantile(drawn, (0.025, 0.975))))
        assert result.p_value == pytest.approx(expected_p)


def test_swapping_the_systems_mirrors_the_result() -> None:
    gold, a, b = systems(40, (0.2, 0.3))
    one, other = (paired_bootstrap(gold, *pair, samples=500, seed=2) for pair in ((a, b), (b, a)))
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low))
    assert one.p_value == other.p_value


def test_equal_systems_do_not_differ_and_unequal_ones_do() -> None:
    gold, a, b = systems(200, (0.1, 0.5))
    same = paired_bootstrap(gold, a, a, samples=300)
    assert (same.difference, same.low, same.high, same.p_value) == (0, 0, 0, 1)
    other = paired_bootstrap(gold, a, b, samples=300)
    assert other.low > 0
    assert other.p_value == pytest.approx(1 / 301)


def test_p_values_are_uniform_when_systems_are_alike() -> None:
    """Two systems of one error rate: about one in ten comparisons has p < 0.1.

    Of 100 comparisons, more than 24 or fewer than 2 has a probability below 1e-4 (binomial).
    """
    p = [
        paired_bootstrap(*systems(60, (0.3, 0.3), seed), samples=200, seed=seed).p_value
        for seed in range(100)
    ]
    assert 2 <= sum(x < 0.1 for x in p) <= 24


def test_large_corpus_is_fast() -> None:
    """10,000 resamples over 5,000 documents (about a second; the bound is for slow machines)."""
    gold, a, b = systems(5000, (0.2, 0.21))
    begin = time.perf_counter()
    paired_bootstrap(gold, a, b)
    assert time.perf_counter() - begin < 15


def test_bad_requests_are_refused() -> None:
    gold, a, b = systems(3, (0.1, 0.1))
    with pytest.raises(ConfigError, match="did you mean 'relaxed'"):
        paired_bootstrap(gold, a, b, "relaxd")
    with pytest.raises(ConfigError, match="at least one sample"):
        paired_bootstrap(gold, a, b, samples=0)
    with pytest.raises(DataError, match="at least one document"):
        paired_bootstrap([], [], [])
    with pytest.raises(DataError, match="3 gold documents but 2"):
        paired_bootstrap(gold, a, b[:2])
