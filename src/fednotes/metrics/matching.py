"""Matching of predicted and gold mentions, under three definitions of a hit.

    strict              same start and end
    relaxed             any overlap
    relaxed_one_to_one  pairs that overlap, no mention in two pairs, as many pairs as
                        possible

All definitions are applied within one type and one document. To process all documents
at once, they are laid out on one line of characters, once for each type. Mentions
overlap on this line only if document and type agree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fednotes.core.errors import DataError
from fednotes.core.types import Document

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


class LaidOutMentions(NamedTuple):
    """Distinct mentions, sorted by start and end on the line; arrays (mentions,).

    Attributes:
        document: Index of the document.
        type: Index of the entity type.
        offset: Start of the mention in the document, in characters.
        start: Start on the line.
        end: End on the line.
    """

    document: Ints
    type: Ints
    offset: Ints
    start: Ints
    end: Ints


class Hits(NamedTuple):
    """The mentions that are hits under one definition.

    Attributes:
        gold: (gold mentions,) whether the mention is found by a prediction.
        predicted: (predictions,) whether the prediction is correct.
    """

    gold: Flags
    predicted: Flags


class Matches(NamedTuple):
    """Gold mentions and predictions, and the hits among them.

    Attributes:
        types: The entity types, sorted.
        gold: The gold mentions.
        predicted: The predictions.
        hits: The hits by definition.
    """

    types: tuple[str, ...]
    gold: LaidOutMentions
    predicted: LaidOutMentions
    hits: dict[str, Hits]


def match_mentions(
    gold: Sequence[Document],
    predicted: Sequence[Document],
    types: Collection[str] | None,
) -> Matches:
    """Match the mentions of the same documents.

    Args:
        gold: Documents with gold mentions.
        predicted: The same documents with predictions.
        types: The types that count; None counts all that occur.

    Raises:
        DataError: The documents differ, or a mention is empty or outside its text.
    """
    _require_same_documents(gold, predicted)
    if types is None:
        types = {
            span.label
            for side in (gold, predicted)
            for document in side
            for span in document.spans
        }
    names = tuple(sorted(set(types)))
    left = _lay_out(gold, names)
    right = _lay_out(predicted, names)
    hits = {
        "strict": _match_strictly(left, right),
        "relaxed": Hits(_find_overlapping(left, right), _find_overlapping(right, left)),
        "relaxed_one_to_one": _match_one_to_one(left, right),
    }
    return Matches(names, left, right, hits)


def _require_same_documents(
    gold: Sequence[Document], predicted: Sequence[Document]
) -> None:
    """Raise DataError unless both sides have the same ids and texts in one order."""
    if len(gold) != len(predicted):
        raise DataError(
            f"{len(gold)} gold documents but {len(predicted)} predicted ones: predict "
            "on exactly the documents that you evaluate"
        )
    for number, (left, right) in enumerate(zip(gold, predicted, strict=True), 1):
        if left.id != right.id:
            raise DataError(
                f"document {number} is {left.id!r} in gold and {right.id!r} in the "
                "predictions: give both in the same order"
            )
        if left.text != right.text:
            raise DataError(
                f"document {left.id!r} has one text in gold and another in the "
                f"predictions ({len(left.text)} and {len(right.text)} characters): "
                "offsets cannot be compared"
            )


def _lay_out(documents: Sequence[Document], types: Sequence[str]) -> LaidOutMentions:
    """Return the distinct mentions of these types, laid out on the line."""
    type_index = {name: index for index, name in enumerate(types)}
    rows = [
        (index, type_index[span.label], span.start, span.end)
        for index, document in enumerate(documents)
        for span in document.spans
        if span.label in type_index
    ]
    document, type_, start, end = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    length = np.array([len(d.text) for d in documents], dtype=np.int64)
    wrong = np.flatnonzero((start < 0) | (end <= start) | (end > length[document]))
    if len(wrong):
        first = wrong[0]
        raise DataError(
            f"document {documents[document[first]].id!r}: span "
            f"{start[first]}:{end[first]} is empty or outside the text of "
            f"{length[document[first]]} characters"
        )

    document_starts = np.concatenate([[0], np.cumsum(length)])
    shift = type_ * document_starts[-1] + document_starts[document]
    order = np.lexsort((end, shift + start))
    line_start = (shift + start)[order]
    line_end = (shift + end)[order]
    is_new = np.ones(len(order), dtype=bool)
    is_new[1:] = (line_start[1:] != line_start[:-1]) | (line_end[1:] != line_end[:-1])
    distinct = order[is_new]
    return LaidOutMentions(
        document=document[distinct],
        type=type_[distinct],
        offset=start[distinct],
        start=line_start[is_new],
        end=line_end[is_new],
    )


def _match_strictly(gold: LaidOutMentions, predicted: LaidOutMentions) -> Hits:
    """Return which mentions have the same offsets as one on the other side."""
    longest = max(
        int((side.end - side.start).max(initial=0)) for side in (gold, predicted)
    )
    gold_keys, predicted_keys = (
        side.start * (longest + 1) + side.end - side.start for side in (gold, predicted)
    )
    return Hits(np.isin(gold_keys, predicted_keys), np.isin(predicted_keys, gold_keys))


def _find_overlapping(mentions: LaidOutMentions, others: LaidOutMentions) -> Flags:
    """Return which mentions overlap any of the others."""
    if not len(others.start):
        return np.zeros(len(mentions.start), dtype=bool)
    furthest_end = np.maximum.accumulate(others.end)
    # The number of others that begin before each mention ends.
    number_before = np.searchsorted(others.start, mentions.end)
    return (number_before > 0) & (furthest_end[number_before - 1] > mentions.start)


def _match_one_to_one(gold: LaidOutMentions, predicted: LaidOutMentions) -> Hits:
    """Return a maximum matching, computed per cluster of overlapping mentions."""
    start = np.concatenate([gold.start, predicted.start])
    end = np.concatenate([gold.end, predicted.end])
    order = np.argsort(start, kind="stable")
    begins_cluster = np.ones(len(order), dtype=bool)
    begins_cluster[1:] = start[order][1:] >= np.maximum.accumulate(end[order])[:-1]
    cluster = np.empty(len(order), dtype=np.int64)
    cluster[order] = np.cumsum(begins_cluster) - 1

    edges = np.arange(cluster.max(initial=-1) + 2)
    first_gold = np.searchsorted(cluster[: len(gold.start)], edges)
    first_predicted = np.searchsorted(cluster[len(gold.start) :], edges)
    smaller_side = np.minimum(np.diff(first_gold), np.diff(first_predicted))
    is_found = np.zeros(len(gold.start), dtype=bool)
    is_right = np.zeros(len(predicted.start), dtype=bool)

    # Most clusters have a single mention on one side and therefore exactly one pair. It
    # does not matter for counts which mention of the other side is marked.
    single = np.flatnonzero(smaller_side == 1)
    is_found[first_gold[single]] = True
    is_right[first_predicted[single]] = True
    list_partners = _make_partner_finder(gold, predicted)
    for index in np.flatnonzero(smaller_side > 1):
        cluster_gold = range(*first_gold[index : index + 2].tolist())
        for i, j in _find_largest_matching(cluster_gold, list_partners):
            is_found[i] = True
            is_right[j] = True
    return Hits(is_found, is_right)


def _make_partner_finder(
    gold: LaidOutMentions, predicted: LaidOutMentions
) -> Callable[[int], list[int]]:
    """Return a function that lists the predictions that overlap a gold mention.

    The pairs are not listed in advance: if most of 100,000 mentions of a note overlap
    each other, they would not fit in memory.
    """
    # A mention's partners lie between these two indices, but not all predictions that
    # lie there end late enough.
    furthest_end = np.maximum.accumulate(predicted.end)
    firsts = np.searchsorted(furthest_end, gold.start, side="right").tolist()
    stops = np.searchsorted(predicted.start, gold.end).tolist()

    def list_partners(i: int) -> list[int]:
        """Return the predictions that overlap the gold mention i, in order."""
        first = firsts[i]
        overlaps = predicted.end[first : stops[i]] > gold.start[i]
        partners: list[int] = (np.flatnonzero(overlaps) + first).tolist()
        return partners

    return list_partners


def _find_largest_matching(
    gold: Iterable[int], list_partners: Callable[[int], list[int]]
) -> list[tuple[int, int]]:
    """Return as many overlapping pairs as possible, with no mention in two pairs.

    Augmenting paths (Berge 1957) are found by breadth-first search. If a search finds
    no path, the predictions that it reached cannot be on a later path either, and are
    skipped from then on.

    Args:
        gold: The indices of the gold mentions of a cluster.
        list_partners: Returns the predictions that overlap a gold mention.

    Returns:
        Pairs (gold, prediction) of indices.
    """
    gold_of: dict[int, int] = {}  # prediction → its gold mention
    prediction_of: dict[int, int] = {}  # gold mention → its prediction
    exhausted: set[int] = set()  # predictions
    for root in gold:
        reached_from: dict[int, int] = {}  # prediction → gold mention before it
        queue = deque([root])
        free = -1
        while queue and free < 0:
            i = queue.popleft()
            for j in list_partners(i):
                if j in reached_from or j in exhausted:
                    continue
                reached_from[j] = i
                if j not in gold_of:
                    free = j
                    break
                queue.append(gold_of[j])
        if free < 0:
            exhausted.update(reached_from)
        while free >= 0:  # flip the path, from its free end back to the root
            i = reached_from[free]
            previous = prediction_of.get(i, -1)
            gold_of[free] = i
            prediction_of[i] = free
            free = previous
    return list(prediction_of.items())
