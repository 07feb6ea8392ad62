r"""Scores of words for entity types: targets, losses and mentions.

For a word w and an entity type t, a model gives three scores s_{w,t,k}: whether a
mention of t starts at w (k = start), whether w is inside one (k = inside; the first and
the last word are inside, too), and whether one ends at w (k = end). Each score is the
logit of a probability of its own, p = σ(s). Types do not compete: a word may be in
mentions of several types, and a site that does not annotate a type has no target for
it.

    y_{w,t,k}   1 if the annotation has such a mention, else 0
    a           the weight of positive targets, which are rare
    source      Σ over w, k and the types t that the site annotates
    target      Σ over w, k and all other types, whose mentions a model added

                -a y log p - (1 - y) log(1 - p)

source + target is thus the loss of complete annotation. With soft targets, a teacher's
probabilities q replace y for the other types, without the weight a, so that the
gradient of the target is p - q, which is zero for a student that equals its teacher.

A candidate for a mention of t is a stretch from a start to an end, both above the
threshold, all of whose words are inside. Its score is the mean of three numbers: the
probability of its start, the mean of its words' probabilities of being inside, and the
probability of its end. At each word, only the types with the highest probabilities of a
start (`MAX_TYPES` of them) have candidates. Candidates are taken from the highest score
to the lowest, unless they overlap one that was taken before; if mentions of different
types may overlap, only those of the same type count.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fednotes.core.kernels import kernel
from fednotes.core.types import TagSet
from fednotes.data.tags import find_spans
from fednotes.encoders.reading import concatenate_ranges

START, INSIDE, END = range(3)
PLACES = 3
# The maximum number of types that are tried at one word, and of ends that are tried for
# one start, so that the candidates grow only linearly with the words of a text, however
# many types a model has.
MAX_TYPES = 64
MAX_ENDS = 64
# The maximum number of candidates that are compared at once, unless one type has more.
_MAX_CANDIDATES = 2**20


def mark_places(tags: np.ndarray, tagset: TagSet) -> np.ndarray:
    """Return whether a mention of each type starts at, contains or ends at each word.

    Args:
        tags: (sentences, steps) tag ids, 0 at padding.
        tagset: The tag set.

    Returns:
        (sentences, steps, types, places) bool; places are `START`, `INSIDE`, `END`.
    """
    # All sentences are read as one sequence of words. A word outside mentions (tag 0)
    # after each sentence keeps the mentions of two sentences apart.
    separated = np.pad(tags, ((0, 0), (0, 1)))
    first, stop, kind = find_spans(separated.ravel(), tagset)

    # From places in the sequence to sentences, and words of these.
    sentence_steps = separated.shape[1]
    sentence, first_word = np.divmod(first, sentence_steps)
    stop_word = stop - sentence * sentence_steps
    mentions = np.stack([sentence, first_word, stop_word, kind], 1)
    return mark_mentions(mentions, (*tags.shape, len(tagset.types)))


def mark_mentions(mentions: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """Return whether one of these mentions starts at, contains or ends at each word.

    Args:
        mentions: (mentions, 4) sentence, first word, the word after the last one, type.
        shape: Sentences, steps and types.

    Returns:
        (sentences, steps, types, places) bool.
    """
    sentence, first, stop, kind = mentions.T
    length = stop - first
    words = concatenate_ranges(first, length)

    marks = np.zeros((*shape, PLACES), bool)
    marks[sentence, first, kind, START] = True  # [scorer target]
    rows = np.repeat(sentence, length)
    marks[rows, words, np.repeat(kind, length), INSIDE] = True  # [scorer target]
    marks[sentence, stop - 1, kind, END] = True  # [scorer target]
    return marks


def compute_place_losses(
    scores: Tensor, targets: Tensor, positive_weight: float = 1.0
) -> Tensor:
    """Return the loss of each word and type, (…, types), summed over the places.

    Args:
        scores: (…, types, places) s.
        targets: (…, types, places) y, or a teacher's probabilities q.
        positive_weight: a.
    """
    weight = scores.new_tensor(positive_weight)
    each = F.binary_cross_entropy_with_logits(
        scores, targets.to(scores), reduction="none", pos_weight=weight
    )  # [scorer loss]
    return each.sum(-1)  # [scorer loss]


def score_spans(probabilities: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """Return the score of each span, (spans,), between 0 and 1.

    Args:
        probabilities: (sentences, steps, types, places).
        spans: (spans, 4) sentence, first word, the word after the last one, type.
    """
    sentence, first, stop, kind = spans.T
    inside = np.pad(probabilities[..., INSIDE].cumsum(1), ((0, 0), (1, 0), (0, 0)))
    total = inside[sentence, stop, kind] - inside[sentence, first, kind]
    start = probabilities[sentence, first, kind, START]
    end = probabilities[sentence, stop - 1, kind, END]
    scores: np.ndarray = (start + total / (stop - first) + end) / 3  # [scorer span]
    return scores


def find_candidates(probabilities: np.ndarray, threshold: float) -> np.ndarray:
    """Return all candidates for mentions, (candidates, 4) as in `score_spans`.

    Args:
        probabilities: (sentences, steps, types, places), 0 at padding.
        threshold: The probability that each place of a candidate exceeds.
    """
    _, steps, types, _ = probabilities.shape
    is_above = probabilities > threshold
    # A lane holds the words of one sentence for one type, and then a word that is not
    # inside, so that no candidate leaves its lane.
    lanes = np.pad(is_above.transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, 1), (0, 0)))
    start, inside, end = lanes.reshape(-1, PLACES).T
    starts = np.flatnonzero(start & inside)  # [scorer candidates]
    ends = np.flatnonzero(inside & end)  # [scorer candidates]

    # Words of one uninterrupted stretch follow the same number of outside words.
    stretch = np.cumsum(~inside)
    low = np.searchsorted(ends, starts)
    high = np.searchsorted(stretch[ends], stretch[starts], side="right")
    counts = np.clip(high - low, 0, MAX_ENDS)
    first = np.repeat(starts, counts)
    last = ends[concatenate_ranges(low, counts)]
    lane, word = np.divmod(first, steps + 1)
    return np.stack([lane // types, word, word + last - first + 1, lane % types], 1)


def keep_best_starts(probabilities: np.ndarray) -> np.ndarray:
    """Return the probabilities without those of improbable starts.

    At each word, the probabilities of a start are set to 0, except for the `MAX_TYPES`
    most probable types. If probabilities are equal, the first types are kept.

    Args:
        probabilities: (sentences, steps, types, places); not changed.
    """
    if probabilities.shape[2] <= MAX_TYPES:
        return probabilities
    start = probabilities[..., START]
    best = np.argsort(-start, axis=-1, kind="stable")[..., :MAX_TYPES]
    limited = probabilities.copy()
    limited[..., START] = 0
    np.put_along_axis(
        limited[..., START], best, np.take_along_axis(start, best, -1), -1
    )
    return limited


def find_best_candidates(
    probabilities: np.ndarray, threshold: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the best candidate of each stretch of words, and the scores.

    Of the candidates for one stretch, `choose_spans` takes at most the best one; if
    scores are equal, it takes the one of the first type. With many types, a model that
    has just begun to train may have far more candidates than stretches, so the types
    are read in blocks.

    Args:
        probabilities: (sentences, steps, types, places), 0 at padding.
        threshold: As in `find_candidates`.

    Returns:
        (candidates, 4) as in `score_spans`, and (candidates,) scores.
    """
    sentences, steps, types, _ = probabilities.shape
    max_per_type = sentences * steps * min(steps, MAX_ENDS)
    types_in_block = max(1, _MAX_CANDIDATES // max_per_type)
    best = np.zeros((0, 4), np.int64)
    best_scores = np.zeros(0)
    for start in range(0, types, types_in_block):
        block = probabilities[:, :, start : start + types_in_block]
        candidates = find_candidates(block, threshold)
        scores = score_spans(block, candidates)
        candidates[:, 3] += start
        best = np.concatenate([best, candidates])
        best_scores = np.concatenate([best_scores, scores])

        sentence, first, stop, _ = best.T
        stretch = (sentence * steps + first) * (steps + 1) + stop
        # The sort is stable, and the candidates of a stretch are in the order of types.
        order = np.lexsort((-best_scores, stretch))
        is_best = np.diff(stretch[order], prepend=-1) > 0
        best = best[order][is_best]
        best_scores = best_scores[order][is_best]
    return best, best_scores


def find_best_spans(
    probabilities: np.ndarray, threshold: float, *, overlaps: bool
) -> np.ndarray:
    """Return the predicted mentions, (mentions, 4) as in `score_spans`.

    Args:
        probabilities: (sentences, steps, types, places), 0 at padding.
        threshold: As in `find_candidates`.
        overlaps: Whether mentions of different types may overlap.
    """
    sentences, _, types, _ = probabilities.shape
    probabilities = keep_best_starts(probabilities)
    if not overlaps:
        candidates, scores = find_best_candidates(probabilities, threshold)
        return choose_spans(candidates, scores, sentences)
    chosen = [np.zeros((0, 4), np.int64)]
    for kind in range(types):
        of_type = probabilities[:, :, kind : kind + 1]
        candidates = find_candidates(of_type, threshold)
        scores = score_spans(of_type, candidates)
        best = choose_spans(candidates, scores, sentences)
        best[:, 3] = kind
        chosen.append(best)
    return np.concatenate(chosen)


def choose_spans(
    candidates: np.ndarray, scores: np.ndarray, sentences: int
) -> np.ndarray:
    """Choose candidates without overlaps, best first, and return them, (spans, 4).

    If scores are equal, the longest candidate comes first, then the leftmost one, then
    that of the first type.

    Args:
        candidates: (candidates, 4) as in `score_spans`.
        scores: (candidates,).
        sentences: Number of sentences.
    """
    _, first, stop, kind = candidates.T
    order = np.lexsort((kind, first, first - stop, -scores))
    ordered = candidates[order]
    is_taken = np.zeros((sentences, stop.max(initial=0)), bool)
    is_chosen = np.zeros(len(ordered), bool)
    _take_free_spans(ordered, is_taken, is_chosen)
    return ordered[is_chosen]


@kernel("void(i8[:,::1], b1[:,::1], b1[::1])")
def _take_free_spans(
    spans: Any, is_taken: Any, is_chosen: Any
) -> None:  # pragma: no cover
    """Choose each span whose words are free, and take its words.

    Args:
        spans: (spans, 4) as in `score_spans`, in the order in which they are tried.
        is_taken: (sentences, steps) bool; set for the words of chosen spans.
        is_chosen: (spans,) bool; set for chosen spans.
    """
    for index in range(len(spans)):
        words = is_taken[spans[index, 0], spans[index, 1] : spans[index, 2]]
        if not words.any():
            words[:] = True
            is_chosen[index] = True


def to_probabilities(scores: Tensor) -> np.ndarray:
    """Return the probabilities of scores as float64."""
    probabilities: np.ndarray = torch.sigmoid(scores.double()).cpu().numpy()
    return probabilities
