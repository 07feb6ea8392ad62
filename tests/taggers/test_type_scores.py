"""Targets, losses and mentions of scores for types, compared with plain loops."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from time_limits import processor_time_below

from fednotes.core.types import Scheme, Span, TagSet
from fednotes.data.tags import encode_tags
from fednotes.taggers import type_scores
from fednotes.taggers.type_scores import (
    END,
    MAX_ENDS,
    MAX_TYPES,
    START,
    choose_spans,
    compute_place_losses,
    find_best_candidates,
    find_best_spans,
    find_candidates,
    mark_mentions,
    mark_places,
    score_spans,
)

TYPES = ("ADR", "Drug", "Sign")
# The mentions of three sentences of up to five words: first word, the word after the
# last one, and type. Some are next to each other, also over the end of a sentence.
MENTIONS = (((0, 2, 1), (2, 3, 1), (4, 5, 0)), ((0, 1, 0),), ())
LENGTHS = (5, 2, 3)


def make_tags(scheme: Scheme) -> np.ndarray:
    """Return the tags of the sentences, (sentences, steps)."""
    tags = np.zeros((len(LENGTHS), max(LENGTHS)), np.int64)
    for row, (mentions, length) in enumerate(zip(MENTIONS, LENGTHS, strict=True)):
        offsets = np.array([(2 * word, 2 * word + 1) for word in range(length)])
        spans = [
            Span(2 * first, 2 * stop - 1, TYPES[kind]) for first, stop, kind in mentions
        ]
        tags[row, :length], _ = encode_tags(spans, offsets, TagSet(TYPES, scheme))
    return tags


@pytest.mark.parametrize("scheme", ["BIO", "BIOES"])
def test_words_start_continue_and_end_the_mentions_of_their_sentence(
    scheme: Scheme,
) -> None:
    expected = np.zeros((len(LENGTHS), max(LENGTHS), len(TYPES), 3), bool)
    for row, mentions in enumerate(MENTIONS):
        for first, stop, kind in mentions:
            expected[row, first, kind, 0] = True
            for word in range(first, stop):
                expected[row, word, kind, 1] = True
            expected[row, stop - 1, kind, 2] = True
    marks = mark_places(make_tags(scheme), TagSet(TYPES, scheme))
    np.testing.assert_array_equal(marks, expected)


def test_a_word_can_start_and_end_mentions_of_several_types() -> None:
    """The first two words are a mention of type 2, and the second one of type 0."""
    marks = mark_mentions(np.array([(1, 0, 2, 2), (1, 1, 2, 0)]), (2, 3, 3))
    expected = np.zeros((2, 3, 3, 3), bool)
    expected[1, 0, 2] = [True, True, False]
    expected[1, 1, 2] = [False, True, True]
    expected[1, 1, 0] = True
    np.testing.assert_array_equal(marks, expected)


def test_the_loss_of_a_type_is_the_cross_entropy_of_its_three_places() -> None:
    """-a y log p - (1 - y) log(1 - p), summed over start, inside and end, by NumPy."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(4, 2, 3))
    targets = rng.uniform(size=(4, 2, 3))
    targets[0] = targets[0] > 0.5
    p = 1 / (1 + np.exp(-scores))
    expected = -2.5 * targets * np.log(p) - (1 - targets) * np.log(1 - p)
    losses = compute_place_losses(
        torch.from_numpy(scores), torch.from_numpy(targets), positive_weight=2.5
    )
    np.testing.assert_allclose(losses.numpy(), expected.sum(-1), rtol=1e-12)


def random_probabilities(seed: int, threshold: float) -> np.ndarray:
    """Return probabilities of two sentences of seven words, most above a threshold."""
    rng = np.random.default_rng(seed)
    probabilities = rng.uniform(size=(2, 7, len(TYPES), 3))
    probabilities[rng.uniform(size=probabilities.shape) < 0.5] = threshold + 0.01
    probabilities[1, 5:] = 0
    return probabilities


@pytest.mark.parametrize("seed", range(5))
def test_candidates_are_all_stretches_from_a_start_to_an_end(seed: int) -> None:
    threshold = 0.6
    probabilities = random_probabilities(seed, threshold)
    expected = []
    for row, kind in np.ndindex(2, len(TYPES)):
        start, inside, end = (probabilities[row, :, kind] > threshold).T
        for first in range(7):
            for last in range(first, 7):
                if start[first] and end[last] and inside[first : last + 1].all():
                    expected.append((row, first, last + 1, kind))
    found = find_candidates(probabilities, threshold)
    assert len(expected) > 5
    assert sorted(map(tuple, found.tolist())) == sorted(expected)


def test_a_start_has_a_limited_number_of_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type_scores, "MAX_ENDS", 2)
    found = find_candidates(np.ones((1, 4, 1, 3)), 0.5)
    assert [(first, stop) for _, first, stop, _ in found.tolist()] == [
        (0, 1),
        (0, 2),
        (1, 2),
        (1, 3),
        (2, 3),
        (2, 4),
        (3, 4),
    ]


@pytest.mark.parametrize("largest_block", [1, 30, 2**20])
@pytest.mark.parametrize("seed", range(5))
def test_the_best_candidates_give_the_mentions_of_all_candidates(
    seed: int, largest_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many scores are equal, so that the order of types matters."""
    monkeypatch.setattr(type_scores, "_MAX_CANDIDATES", largest_block)
    probabilities = np.round(4 * random_probabilities(seed, 0.6)) / 4
    candidates = find_candidates(probabilities, 0.4)
    scores = score_spans(probabilities, candidates)
    best, best_scores = find_best_candidates(probabilities, 0.4)
    assert len(best) < len(candidates)
    np.testing.assert_array_equal(best_scores, score_spans(probabilities, best))
    np.testing.assert_array_equal(
        choose_spans(best, best_scores, 2),
        choose_spans(candidates, scores, 2),
    )


def test_candidates_of_many_types_take_little_memory() -> None:
    """Each word may start, continue and end a mention of each of 400 types."""
    probabilities = np.full((4, 100, 400, 3), 0.1)
    tracemalloc.start()
    best, _ = find_best_candidates(probabilities, 0.01)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(best) == 4 * sum(min(100 - first, MAX_ENDS) for first in range(100))
    assert peak < 300e6  # all candidates at once take 2 GB


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_word_starts_mentions_of_a_limited_number_of_types(
    overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the two most probable starts of each word count; the first of equal ones."""
    monkeypatch.setattr(type_scores, "MAX_TYPES", 2)
    probabilities = np.full((1, 2, 4, 3), 0.9)
    probabilities[0, 0, :, START] = [0.6, 0.7, 0.6, 0.8]  # types 1 and 3
    probabilities[0, 1, :, START] = [0.6, 0.8, 0.8, 0.8]  # types 1 and 2
    probabilities[0, 0, :, END] = 0  # no mention of the first word alone
    before = probabilities.copy()
    mentions = find_best_spans(probabilities, 0.5, overlaps=overlaps)
    expected = [(0, 0, 2, 3)]
    if overlaps:
        expected += [(0, 1, 2, 1), (0, 1, 2, 2)]
    assert sorted(map(tuple, mentions.tolist())) == expected
    np.testing.assert_array_equal(probabilities, before)


def test_thousands_of_types_that_start_everywhere_take_seconds() -> None:
    """A model of a stranger may find each of 4,000 types at each word."""
    probabilities = np.full((1, 500, 4000, 3), 0.5)
    with processor_time_below(30):  # about 3 s; without the limit, minutes
        mentions = find_best_spans(probabilities, 1e-9, overlaps=True)
    assert len(np.unique(mentions[:, 3])) == MAX_TYPES


def test_the_score_of_a_span_is_the_mean_of_its_start_words_and_end() -> None:
    probabilities = np.random.default_rng(1).uniform(size=(2, 6, len(TYPES), 3))
    spans = np.array([(0, 0, 1, 0), (1, 2, 6, 2), (0, 1, 4, 1)])
    expected = [
        np.mean(
            [
                probabilities[row, first, kind, 0],
                np.mean([probabilities[row, w, kind, 1] for w in range(first, stop)]),
                probabilities[row, stop - 1, kind, 2],
            ]
        )
        for row, first, stop, kind in spans.tolist()
    ]
    np.testing.assert_allclose(score_spans(probabilities, spans), expected, rtol=1e-12)


def test_a_span_is_chosen_unless_it_overlaps_a_better_one() -> None:
    """The best one displaces both that overlap it. Of equal scores, the longest wins,
    then the leftmost."""
    candidates = np.array(
        [(0, 0, 2, 0), (0, 1, 4, 1), (0, 3, 5, 0), (0, 5, 6, 0), (1, 0, 2, 0)]
        + [(1, 1, 4, 0), (1, 3, 5, 1)]
    )
    scores = np.array([0.6, 0.9, 0.7, 0.5, 0.8, 0.8, 0.8])
    chosen = choose_spans(candidates, scores, 2)
    expected = [(0, 1, 4, 1), (1, 1, 4, 0), (0, 5, 6, 0)]
    assert list(map(tuple, chosen.tolist())) == expected
    assert choose_spans(candidates[:0], scores[:0], 2).shape == (0, 4)
    left, right = (0, 0, 2, 1), (0, 1, 3, 0)
    tied = choose_spans(np.array([right, left]), np.ones(2), 1)
    assert tied.tolist() == [list(left)]


@pytest.mark.parametrize("seed", range(3))
def test_spans_of_different_types_can_be_kept(seed: int) -> None:
    """Each type's spans are those of a model of this type alone; two types can have the
    same words."""
    probabilities = random_probabilities(seed, 0.6)
    probabilities[0, :2, 1:] = 0.9
    found = find_best_spans(probabilities, 0.6, overlaps=True)
    expected = []
    for kind in range(len(TYPES)):
        alone = find_best_spans(
            probabilities[:, :, kind : kind + 1], 0.6, overlaps=False
        )
        expected += [(*span[:3], kind) for span in alone.tolist()]
    assert sorted(map(tuple, found.tolist())) == sorted(expected)
    flat = find_best_spans(probabilities, 0.6, overlaps=False)
    assert len(flat) < len(found)
