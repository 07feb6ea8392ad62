"""Packing of tokens into sequences, and sentence pairs as in the original BERT."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokens import tokens_of

from fednotes.core.errors import ConfigError, DataError
from fednotes.encoders.packing import (
    SequencePlan,
    Specials,
    _pick_elsewhere,
    _shorten,
    gather_sequences,
    plan_full,
    plan_pairs,
)
from fednotes.encoders.token_cache import Tokens
from fednotes.methods import read_presets

SPECIALS = Specials(cls=1, sep=2, mask=3, pad=0)


def _corpus(lengths: list[list[int]]) -> Tokens:
    """Return documents of sentences of these lengths; all ids are different."""
    at = 10
    documents = []
    for document in lengths:
        sentences = []
        for length in document:
            sentences.append(list(range(at, at + length)))
            at += length
        documents.append(sentences)
    return tokens_of(documents)


shapes = st.lists(
    st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=6
)


@settings(max_examples=200, deadline=None)
@given(shapes, st.integers(3, 30), st.integers(0, 3))
def test_full_sequences_hold_every_token_once(
    lengths: list[list[int]], length: int, epoch: int
) -> None:
    """Brute force over the gathered batch: ids are unique, so a sorted list says it
    all."""
    tokens = _corpus(lengths)
    plan = plan_full(tokens, length, 7, epoch)
    batch = gather_sequences(tokens, plan, np.arange(len(plan)), SPECIALS)
    assert batch.ids.shape[1] <= length
    assert sorted(batch.ids[batch.ids >= 10].tolist()) == sorted(tokens.ids.tolist())
    assert batch.random_next is None
    assert not batch.segments.any()
    starts = [0, *np.cumsum([sum(d) for d in lengths])]
    home = {
        10 + i: d for d in range(len(lengths)) for i in range(starts[d], starts[d + 1])
    }
    for row, count in zip(batch.ids.tolist(), batch.lengths.tolist(), strict=True):
        body = row[:count]
        assert (body[0], body[-1], set(row[count:]) <= {0}) == (1, 2, True)
        for first, second in pairwise(body):
            if first >= 10 and second >= 10:  # no seam inside a stretch
                assert second == first + 1
                assert home[first] == home[second]
            assert (first, second) != (2, 2)


def test_sentences_that_fit_are_not_split() -> None:
    tokens = _corpus([[6, 6, 6, 25, 3]])
    plan = plan_full(tokens, 16, 0, 0)
    # By hand: 25 tokens do not fit 14, so 14 of them, then 11 with the 3 that follow.
    assert plan.stretches.tolist() == [[0, 12], [12, 18], [18, 32], [32, 46]]


@pytest.mark.parametrize("plan", [plan_full, plan_pairs])
def test_plans_depend_on_the_seed_and_epoch(plan: object) -> None:
    tokens = _corpus(
        [[random.Random(i).randint(2, 9) for _ in range(20)] for i in range(12)]
    )

    def plan_of(seed: int, epoch: int) -> tuple[list[list[int]], list[int]]:
        result: SequencePlan = plan(tokens, 32, seed, epoch)  # type: ignore[operator]
        return result.stretches.tolist(), result.bounds.tolist()

    assert plan_of(1, 0) == plan_of(1, 0)
    assert plan_of(1, 0) != plan_of(1, 1)
    assert plan_of(1, 0) != plan_of(2, 0)


def test_pairs_agree_with_their_labels() -> None:
    """B follows A at once where it is next; where random it is from another document."""
    tokens = _corpus([[5, 6, 7, 8] * 60 for _ in range(5)])
    plan = plan_pairs(tokens, 64, 3, 0)
    size = 26 * 60
    assert plan.random_next is not None
    for (a0, a1), (b0, b1), random_next in zip(
        plan.stretches[::2], plan.stretches[1::2], plan.random_next, strict=True
    ):
        assert a0 < a1
        assert b0 < b1
        assert (a1 - a0) + (b1 - b0) + 3 <= 64
        assert a0 // size == (a1 - 1) // size
        assert b0 // size == (b1 - 1) // size
        # What was cut at the front of B, or the end of A, may lie between the two.
        assert (a0 // size != b0 // size) == random_next
        assert random_next or a1 <= b0 < a1 + 2 * 64
    batch = gather_sequences(tokens, plan, np.arange(8), SPECIALS)
    for row, segments, length in zip(
        batch.ids, batch.segments, batch.lengths, strict=True
    ):
        first, second = np.flatnonzero(row == SPECIALS.sep)
        assert (row[0], second) == (SPECIALS.cls, length - 1)
        assert segments.tolist() == [0] * (first + 1) + [1] * (second - first) + [0] * (
            len(row) - length
        )
    assert batch.random_next is not None
    assert batch.random_next.tolist() == plan.random_next[:8].astype(int).tolist()


@pytest.mark.parametrize("plan_sequences", [plan_full, plan_pairs])
@settings(max_examples=100, deadline=None)
@given(lengths=shapes, length=st.integers(5, 30), seed=st.integers(0, 3))
def test_counted_tokens_are_not_counted_twice(
    plan_sequences: Callable[[Tokens, int, int, int], SequencePlan],
    lengths: list[list[int]],
    length: int,
    seed: int,
) -> None:
    """Brute force over the gathered batch, whose ids are unique in the corpus: of any
    sequences, here every second one and all, as many different ones are read."""
    tokens = _corpus(lengths)
    plan = plan_sequences(tokens, length, seed, 0)
    counted = plan.count_tokens()
    assert len(counted) == len(plan)
    for rows in (np.arange(0, len(plan), 2), np.arange(len(plan))):
        ids = gather_sequences(tokens, plan, rows, SPECIALS).ids
        read = np.unique(ids[ids >= 10])
        assert counted[rows].sum() <= len(read)
        if plan_sequences is plan_full:
            assert counted[rows].sum() == len(read)


def test_half_of_the_pairs_are_random_pairs() -> None:
    """Long documents: all but the last chunk of each have two sentences, so a coin
    decides.

    Binomial: the count lies within four standard deviations, plus one forced pair a
        document.
    """
    tokens = _corpus([[4] * 2000 for _ in range(10)])
    labels = plan_pairs(tokens, 64, 5, 0).random_next
    assert labels is not None
    n = len(labels)
    assert n > 1500
    assert abs(int(labels.sum()) - n / 2) < 4 * (n / 4) ** 0.5 + 10
    single = plan_pairs(_corpus([[4]] * 30), 64, 5, 0).random_next
    assert single is not None
    assert single.all()


def _google_truncate(a: list[int], b: list[int], room: int, rng: random.Random) -> None:
    """Truncate as `truncate_seq_pair` of the original does, token by token."""
    while len(a) + len(b) > room:
        longer = a if len(a) > len(b) else b
        if rng.random() < 0.5:
            del longer[0]
        else:
            longer.pop()


@pytest.mark.parametrize("room", [2, 3, 8, 13])
def test_shortening_equals_the_original(room: int) -> None:
    """Lengths equal the original's loop for all sizes; the ends that go are a fair
    coin's."""
    rng = np.random.default_rng(0)
    for na in range(1, 18):
        for nb in range(1, 18):
            a, b = list(range(na)), list(range(nb))
            _google_truncate(a, b, room, random.Random(1))
            a0, a1, b0, b1 = _shorten((0, na), (100, 100 + nb), room, rng)
            assert (a1 - a0, b1 - b0) == (len(a), len(b))
            assert a0 >= 0
            assert a1 <= na
            assert b0 >= 100
            assert b1 <= 100 + nb
    fronts = [_shorten((0, 20), (0, 4), 8, rng)[0] for _ in range(2000)]
    theirs = []
    coin = random.Random(2)
    for _ in range(2000):
        a = list(range(20))
        _google_truncate(a, [0] * 4, 8, coin)
        theirs.append(a[0])
    second = [
        _shorten((0, 4), (0, 20), 8, rng)[2] for _ in range(2000)
    ]  # B is the longer half
    for lengths in (fronts, second):
        assert abs(np.mean(lengths) - np.mean(theirs)) < 0.25  # standard error 0.06
        assert abs(np.std(lengths) - np.std(theirs)) < 0.25


def _google_pairs(
    docs: list[list[int]], room: int, rng: random.Random
) -> list[tuple[int, bool]]:
    """`create_instances_from_document` of the original: tokens used and label of each
    pair.

    The target length is drawn once, before the loop over a document's sentences.
    """
    pairs = []
    for index, document in enumerate(docs):
        target = room
        if rng.random() < 0.1:
            target = rng.randint(2, room)
        chunk: list[int] = []
        i = 0
        while i < len(document):
            chunk.append(document[i])
            if i == len(document) - 1 or sum(chunk) >= target:
                a_end = rng.randint(1, len(chunk) - 1) if len(chunk) >= 2 else 1
                a = sum(chunk[:a_end])
                if len(chunk) == 1 or rng.random() < 0.5:
                    other_index = rng.choice(
                        [d for d in range(len(docs)) if d != index]
                    )
                    start = rng.randint(0, len(docs[other_index]) - 1)
                    b = 0
                    for n in docs[other_index][start:]:
                        b += n
                        if b >= target - a:
                            break
                    i -= len(chunk) - a_end
                    pairs.append((min(room, a + b), True))
                else:
                    pairs.append((min(room, a + sum(chunk[a_end:])), False))
                chunk = []
            i += 1
    return pairs


def test_statistics_of_pairs_equal_those_of_the_original() -> None:
    """Number of pairs, mean length and share of random ones, against its loop; 2 %
    apart."""
    draw = random.Random(8)
    shape = [
        [draw.randint(3, 25) for _ in range(draw.randint(1, 60))] for _ in range(300)
    ]
    tokens, room = _corpus(shape), 61
    mine = [plan_pairs(tokens, 64, 0, epoch) for epoch in range(4)]
    theirs = [pair for _ in range(4) for pair in _google_pairs(shape, room, draw)]
    count = sum(map(len, mine))
    sizes = np.concatenate([np.diff(p.stretches).reshape(-1, 2).sum(1) for p in mine])
    labels = np.concatenate([p.random_next for p in mine if p.random_next is not None])
    assert count == pytest.approx(len(theirs), rel=0.02)
    assert sizes.mean() == pytest.approx(np.mean([n for n, _ in theirs]), rel=0.02)
    assert labels.mean() == pytest.approx(np.mean([r for _, r in theirs]), rel=0.04)


@pytest.mark.parametrize("room", [pytest.param(48, marks=pytest.mark.slow), 3])
def test_a_tenth_of_the_documents_have_short_pairs(room: int) -> None:
    """Sentences of one token fill a pair to its target, so the pairs show each
    document's own.

    A pair holds exactly `target` tokens, except the last one of a document, which holds
    what is left, and random pairs whose B reaches the end of its document. So a
    document is short if and only if no pair of it is full, and a short one with target
    t gives pairs of at most t tokens. The draw of a short target from 2 to `room`
    includes the full length, so P(short) = 1/10 · (room - 2) / (room - 1). Four
    standard deviations.
    """
    documents, length = 2000, 10 * room
    tokens = _corpus([[1] * length] * documents)
    plan = plan_pairs(tokens, room + 3, 3, 0)
    sizes = np.diff(plan.stretches).reshape(-1, 2).sum(1)
    document = (
        (plan.stretches[::2, 0]) // length
    )  # the stretches are positions in the ids
    longest = np.zeros(documents, np.int64)
    np.maximum.at(longest, document, sizes)
    short = longest < room
    share = 0.1 * (room - 2) / (room - 1)
    assert abs(short.mean() - share) < 4 * (share * (1 - share) / documents) ** 0.5


def test_a_pair_takes_no_sentence_beyond_its_target() -> None:
    """Sentences of one token reach each target exactly, so no pair has to be shortened.

    A continuation therefore begins where A ends, and a pair is no longer than its
    target allows.
    """
    tokens = _corpus([[1] * 480] * 50)
    plan = plan_pairs(tokens, 48 + 3, 3, 0)
    assert plan.random_next is not None
    follows = ~plan.random_next
    assert follows.sum() > 100
    assert np.array_equal(
        plan.stretches[::2, 1][follows], plan.stretches[1::2, 0][follows]
    )
    cuts, docs = list(range(961)), [0, 480, 960]
    rng = np.random.default_rng(1)
    for _ in range(50):
        start, end = _pick_elsewhere(0, cuts, docs, 5, rng)
        assert end == min(start + 5, 960)


def test_a_random_second_sentence_starts_anywhere_in_its_document() -> None:
    """The original draws the first sentence of B uniformly over the other document.

    Of 100 sentences numbered from 0 the mean is 49.5 and the deviation 28.87.
    """
    tokens = _corpus([[1] * 100] * 100)
    plan = plan_pairs(tokens, 20 + 3, 5, 0)
    assert plan.random_next is not None
    begins = plan.stretches[1::2, 0][plan.random_next] % 100
    assert len(begins) > 300
    assert abs(begins.mean() - 49.5) < 4 * 28.87 / len(begins) ** 0.5
    assert abs(begins.std() - 28.87) < 3


def test_the_paper_preset_takes_a_tenth_of_its_steps_on_long_sequences() -> None:
    """BERT: nine tenths of the steps on 128 tokens, the last tenth on 512; counted in
    pairs.

    A cycle is an epoch, so a cycle of 512 tokens has about a quarter of the steps of
    one of 128.
    """
    settings = read_presets("pretrain")["paper"]["training"]
    draw = random.Random(4)
    notes = _corpus([[draw.randint(5, 25) for _ in range(120)] for _ in range(60)])
    short, long = (
        len(plan_pairs(notes, settings[name], 0, 0))
        for name in ("length", "long_length")
    )
    long_steps = settings["long_cycles"] * long
    steps = long_steps + (settings["keep_cycle"] - settings["long_cycles"]) * short
    assert 0.08 < long_steps / steps < 0.12


def test_a_note_of_one_endless_sentence_is_not_dropped() -> None:
    """50,000 tokens without a full stop: all in the full plan, nearly all in the pairs."""
    tokens = _corpus([[50_000], [10]])
    full = plan_full(tokens, 512, 0, 0)
    assert int(np.diff(full.stretches).sum()) == 50_010
    pairs = plan_pairs(tokens, 512, 0, 0)
    covered = np.zeros(50_010, bool)
    for start, end in pairs.stretches:
        covered[start:end] = True
    assert covered.mean() > 0.95


def test_impossible_lengths_and_corpora_are_refused() -> None:
    empty = Tokens(np.zeros(0, np.uint16), np.zeros(1, np.int64), np.zeros(1, np.int64))
    tokens = _corpus([[3]])
    for plan in (plan_full, plan_pairs):
        with pytest.raises(DataError, match="has no token"):
            plan(empty, 128, 0, 0)
        with pytest.raises(ConfigError, match="have no room for text"):
            plan(tokens, 2, 0, 0)
    # one document: B can only be its own
    assert len(plan_pairs(tokens, 128, 0, 0)) == 1
