"""Masking and infilling: exact numbers, binomial shares, special tokens untouched."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fednotes.core.errors import ConfigError
from fednotes.encoders.packing import IGNORED, Specials, denoise, mask

SPECIALS = Specials(cls=1, sep=2, mask=3, pad=0, others=(4,))
VOCABULARY = 1000


def _batch(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """Return rows of [CLS] words [SEP] words [SEP] padding, of several lengths."""
    ids = rng.integers(5, VOCABULARY, (rows, length))
    for row in ids:
        end = int(rng.integers(4, length + 1))
        row[0], row[end - 1], row[end // 2], row[end:] = 1, 2, 2, 0
    return ids


def _within(count: int, n: int, p: float) -> None:
    """Check that a binomial number is within four standard deviations."""
    assert abs(count - n * p) < 4 * (n * p * (1 - p)) ** 0.5, (count, n, p)


def test_masked_tokens_have_the_documented_numbers_and_shares() -> None:
    """Per row round(0.15 n); of these 80/10/10, each within four binomial deviations."""
    rng = np.random.default_rng(0)
    ids = _batch(rng, 1000, 128)
    masked_batch = mask(ids, SPECIALS, VOCABULARY, rng, max_predictions=20)
    chosen = masked_batch.labels != IGNORED
    for row, n in zip(chosen, (ids != 0).sum(1).tolist(), strict=True):
        assert row.sum() == min(20, max(1, round(0.15 * n)), max(0, n - 3))
    assert (masked_batch.labels[chosen] == ids[chosen]).all()
    assert (masked_batch.inputs[~chosen] == ids[~chosen]).all()
    assert not np.isin(masked_batch.labels[chosen], SPECIALS.all).any()
    assert not chosen[ids < 5].any()
    n = int(chosen.sum())
    masked = masked_batch.inputs[chosen] == SPECIALS.mask
    unchanged = masked_batch.inputs[chosen] == ids[chosen]
    replaced = ~masked & ~unchanged
    _within(int(masked.sum()), n, 0.8)
    _within(int(unchanged.sum()), n, 0.1 + 0.1 / (VOCABULARY - 5))
    _within(int(replaced.sum()), n, 0.1 * (1 - 1 / (VOCABULARY - 5)))
    assert not np.isin(masked_batch.inputs[chosen][replaced], SPECIALS.all).any()
    assert (masked_batch.positions == np.flatnonzero(chosen)).all()


@pytest.mark.parametrize("whole_words", [False, True])
def test_every_place_is_masked_equally_often(whole_words: bool) -> None:
    """4000 equal rows of 20 words, 3 chosen: each place within 4.5 deviations of 3/20."""
    ids = np.tile(np.array([1, *range(10, 30), 2]), (4000, 1))
    continues = np.zeros(VOCABULARY, bool) if whole_words else None
    masked_batch = mask(
        ids, SPECIALS, VOCABULARY, np.random.default_rng(1), continues=continues
    )
    counts = (masked_batch.labels != IGNORED).sum(0)
    assert counts[[0, -1]].tolist() == [0, 0]
    assert counts.sum() == 4000 * 3
    deviation = (4000 * 0.15 * 0.85) ** 0.5
    assert np.abs(counts[1:-1] - 600).max() < 4.5 * deviation


def test_whole_words_are_masked_completely_or_not_at_all() -> None:
    """Brute force over every row: a word's tokens share their fate, numbers never
    exceed."""
    rng = np.random.default_rng(2)
    ids = _batch(rng, 300, 96)
    continues = np.arange(VOCABULARY) % 3 == 0
    continues[:5] = False
    masked_batch = mask(
        ids, SPECIALS, VOCABULARY, rng, max_predictions=12, continues=continues
    )
    full = 0
    for row, labels in zip(ids.tolist(), masked_batch.labels.tolist(), strict=True):
        words: list[list[int]] = []
        for place, token in enumerate(row):
            if token < 5:
                words.append([])
            elif continues[token] and words[-1]:
                words[-1].append(place)
            else:
                words.append([place])
        for word in words:
            assert len({labels[place] != IGNORED for place in word}) <= 1
        target = min(12, max(1, round(0.15 * sum(t != 0 for t in row))))
        count = sum(label != IGNORED for label in labels)
        # It falls short only where no word is left that fits.
        sizes = [len(w) for w in words if w and labels[w[0]] == IGNORED]
        assert count <= target
        assert count == target or min(sizes, default=99) > target - count
        full += count == target
    assert full > 250


def test_masking_depends_on_the_seed_and_leaves_its_input_unchanged() -> None:
    ids = _batch(np.random.default_rng(3), 8, 64)
    before = ids.copy()
    first, again, reseeded = (
        mask(ids, SPECIALS, VOCABULARY, np.random.default_rng(s)) for s in (9, 9, 10)
    )
    assert (ids == before).all()
    assert (first.inputs == again.inputs).all()
    assert (first.labels == again.labels).all()
    assert (first.labels != reseeded.labels).any()


def test_rows_without_words_are_not_masked() -> None:
    ids = np.array([[1, 2, 0, 0], [1, 2, 2, 0], [1, 9, 2, 0]])
    for continues in (None, np.zeros(VOCABULARY, bool)):
        masked_batch = mask(
            ids, SPECIALS, VOCABULARY, np.random.default_rng(0), continues=continues
        )
        assert (masked_batch.labels != IGNORED).sum(1).tolist() == [0, 0, 1]
    with pytest.raises(ConfigError, match="rate of masked tokens"):
        mask(ids, SPECIALS, VOCABULARY, np.random.default_rng(0), rate=0)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 10_000), st.integers(4, 40), st.sampled_from([0.1, 0.3, 0.9, 1.0])
)
def test_infilling_keeps_unmasked_tokens(seed: int, length: int, rate: float) -> None:
    """Unique ids: what is left stands in order, the number gone is exact, none is
    longer."""
    rng = np.random.default_rng(seed)
    ids = np.arange(10, 10 + length)
    ids[0], ids[-1], ids[length // 2] = 1, 2, 2
    batch = np.stack([ids, np.where(np.arange(length) < length - 1, ids, 0)])
    noised = denoise(batch, SPECIALS, rng, rate=rate)
    assert noised.inputs.shape[1] <= length
    assert (noised.labels == np.where(batch == 0, IGNORED, batch)).all()
    for row, given_row in zip(noised.inputs, batch, strict=True):
        words = given_row[given_row >= 10]
        remaining = row[row >= 10]
        removed = max(1, round(rate * len(words)))
        assert len(remaining) == len(words) - removed
        assert (np.diff(remaining) > 0).all()
        assert np.isin(remaining, words).all()
        assert (row[row > 0][0], (row == 2).sum()) == (1, (given_row == 2).sum())
        # Between two words that stand side by side nothing is missing but where a
        # [MASK] is.
        body = row[row > 0].tolist()
        for a, b in pairwise(body):
            if a >= 10 and b >= 10:
                assert b == a + 1


def test_span_lengths_follow_a_poisson_distribution() -> None:
    """One [MASK] a span: their number against words / mean, as NumPy's Poisson numbers
    say.

    Runs of missing words need not tell spans apart, so spans are counted by their
    [MASK]s.
    """
    rng = np.random.default_rng(5)
    ids = np.tile(np.concatenate([[1], np.arange(10, 410), [2]]), (200, 1))
    noised = denoise(ids, SPECIALS, rng, rate=0.3, mean=3.0)
    masks = int((noised.inputs == SPECIALS.mask).sum())
    # 120 words a row in spans of Poisson(3) (zeros among them): about 120 / 3 spans,
    # the last one cut; simulated independently here.
    check = np.random.default_rng(6)
    spans = 0
    for _ in range(200):
        total = 0
        while total < 120:
            total += int(check.poisson(3.0))
            spans += 1
    # Spans that touch are two [MASK]s in a row; none merge.
    assert masks == pytest.approx(spans, rel=0.03)
    again = denoise(ids, SPECIALS, np.random.default_rng(7))
    assert (
        again.inputs == denoise(ids, SPECIALS, np.random.default_rng(7)).inputs
    ).all()
    with pytest.raises(ConfigError, match="infilling needs"):
        denoise(ids, SPECIALS, rng, mean=0)
    nothing = np.array([[1, 2, 0]])
    assert denoise(nothing, SPECIALS, rng).inputs.tolist() == [[1, 2]]
