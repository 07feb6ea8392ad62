"""Which mentions of two sides match: mentions laid out on one line of characters.

All documents stand one after the other, and so once more for each entity type. Two mentions
overlap on this line only if document and type agree, so every question of `metrics/spans.py`
is a sort or a `searchsorted` over the whole corpus.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fednotes.core.errors import DataError
from fednotes.core.types import Document

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Intervals = Sequence[tuple[int, int]]

DEFINITIONS = ("strict", "relaxed", "relaxed_one_to_one")


@dataclass(frozen=True, slots=True)
class Mentions:
    """Distinct mentions, all arrays (mentions,), sorted by place on the line, then by end.

    document, type: indices. offset: where the mention begins in its document (characters).
    start, end: place on the line.
    """

    document: Ints
    type: Ints
    offset: Ints
    start: Ints
    end: Ints

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, slots=True)
class Matched:
    """Both sides, and for each definition which (gold mentions, predictions) are hits."""

    types: tuple[str, ...]
    gold: Mentions
    predicted: Mentions
    hits: Mapping[str, tuple[Flags, Flags]]


def match(
    gold: Sequence[Document], predicted: Sequence[Document], types: Collection[str] | None
) -> Matched:
    """Match gold and predicted mentions of the same documents under every definition.

    Raises DataError if the documents disagree or a span is empty or outside its text.
    """
    _same_documents(gold, predicted)
    if types is None:
        types = {s.label for side in (gold, predicted) for d in side for s in d.spans}
    names = tuple(sorted(set(types)))
    left, right = _on_line(gold, names), _on_line(predicted, names)
    return Matched(
        names,
        left,
        right,
        {
            "strict": _equal(left, right),
            "relaxed": (_touched(left, right), _touched(right, left)),
            "relaxed_one_to_one": _one_to_one(left, right),
        },
    )


def _same_documents(gold: Sequence[Document], predicted: Sequence[Document]) -> None:
    if len(gold) != len(predicted):
        raise DataError(
            f"{len(gold)} gold documents but {len(predicted)} predicted ones: "
            "predict on exactly the documents that you evaluate"
        )
    for place, (left, right) in enumerate(zip(gold, predicted, strict=True)):
        if left.id != right.id:
            raise DataError(
                f"document {place + 1} is {left.id!r} in gold and {right.id!r} in the "
                "predictions: give both in the same order"
            )
        if left.text != right.text:
            raise DataError(
                f"document {left.id!r} has one text in gold and another in the predictions "
                f"({len(left.text)} and {len(right.text)} characters): offsets cannot be compared"
            )


def _on_line(documents: Sequence[Document], names: Sequence[str]) -> Mentions:
    index = {name: i for i, name in enumerate(names)}
    rows = [
        (place, index[s.label], s.start, s.end)
        for place, document in enumerate(documents)
        for s in document.spans
        if s.label in index
    ]
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    document, kind, start, end = table.T
    length = np.array([len(d.text) for d in documents], dtype=np.int64)
    wrong = np.flatnonzero((start < 0) | (end <= start) | (end > length[document]))
    if len(wrong):
        first = wrong[0]
        raise DataError(
            f"document {documents[document[first]].id!r}: span {start[first]}:{end[first]} is "
            f"empty or outside the text of {length[document[first]]} characters"
        )
    bounds = np.concatenate([[0], np.cumsum(length)])
    shift = kind * bounds[-1] + bounds[document]  # (mentions,) where the document begins
    order = np.lexsort((end, shift + start))
    begin, finish = (shift + start)[order], (shift + end)[order]
    new = np.ones(len(order), dtype=bool)
    new[1:] = (begin[1:] != begin[:-1]) | (finish[1:] != finish[:-1])
    keep = order[new]
    return Mentions(document[keep], kind[keep], start[keep], begin[new], finish[new])


# --- the three definitions; each returns flags (gold,), (predicted,) ------------------------


def _equal(gold: Mentions, predicted: Mentions) -> tuple[Flags, Flags]:
    # Both are sorted and distinct: number the distinct (start, end) of the two together.
    start = np.concatenate([gold.start, predicted.start])
    end = np.concatenate([gold.end, predicted.end])
    order = np.lexsort((end, start))
    same = (np.diff(start[order]) == 0) & (np.diff(end[order]) == 0)
    twin = np.zeros(len(order), dtype=bool)
    twin[order[:-1][same]] = True
    twin[order[1:][same]] = True
    return twin[: len(gold)], twin[len(gold) :]


def _touched(mentions: Mentions, others: Mentions) -> Flags:
    """Which mentions overlap any of the others."""
    if not len(others):
        return np.zeros(len(mentions), dtype=bool)
    reach = np.maximum.accumulate(others.end)  # the furthest end so far
    before = np.searchsorted(others.start, mentions.end)  # how many others begin before the end
    return (before > 0) & (reach[before - 1] > mentions.start)


def _one_to_one(gold: Mentions, predicted: Mentions) -> tuple[Flags, Flags]:
    """A maximum matching, cluster by cluster of overlapping mentions of both sides."""
    start = np.concatenate([gold.start, predicted.start])
    end = np.concatenate([gold.end, predicted.end])
    order = np.argsort(start, kind="stable")
    apart = np.ones(len(order), dtype=bool)
    apart[1:] = start[order][1:] >= np.maximum.accumulate(end[order])[:-1]
    cluster = np.empty(len(order), dtype=np.int64)
    cluster[order] = np.cumsum(apart) - 1
    edges = np.arange(cluster.max(initial=-1) + 2)
    of_gold = np.searchsorted(cluster[: len(gold)], edges)  # first gold mention of each cluster
    of_predicted = np.searchsorted(cluster[len(gold) :], edges)
    fewer = np.minimum(np.diff(of_gold), np.diff(of_predicted))
    gold_hit = np.zeros(len(gold), dtype=bool)
    predicted_hit = np.zeros(len(predicted), dtype=bool)
    # A cluster with a single mention on one side holds exactly one pair, and this is most of
    # them; which mention of the other side is marked does not change any count.
    single = np.flatnonzero(fewer == 1)
    gold_hit[of_gold[single]] = True
    predicted_hit[of_predicted[single]] = True
    for c in np.flatnonzero(fewer > 1):
        left, right = slice(*of_gold[c : c + 2]), slice(*of_predicted[c : c + 2])
        pairs = _largest_matching(
            list(zip(gold.start[left].tolist(), gold.end[left].tolist(), strict=True)),
            list(zip(predicted.start[right].tolist(), predicted.end[right].tolist(), strict=True)),
        )
        gold_hit[[left.start + i for i, _ in pairs]] = True
        predicted_hit[[right.start + j for _, j in pairs]] = True
    return gold_hit, predicted_hit


def _largest_matching(gold: Intervals, predicted: Intervals) -> list[tuple[int, int]]:
    """A largest set of overlapping pairs (index of gold, index of prediction).

    Both sorted by start. Where neither side nests, the left-to-right sweep is largest: take
    the first overlapping g, p. If a largest matching has (g, p'), (g', p) instead, then g' ends
    no earlier than g and p' no earlier than p, so (g, p), (g', p') overlap too. Nested
    mentions go to augmenting paths.
    """
    flat = all(a[1] <= b[1] for side in (gold, predicted) for a, b in pairwise(side))
    return _sweep(gold, predicted) if flat else _augment(gold, predicted)


def _sweep(gold: Intervals, predicted: Intervals) -> list[tuple[int, int]]:
    pairs, i, j = [], 0, 0
    while i < len(gold) and j < len(predicted):
        if gold[i][1] <= predicted[j][0]:
            i += 1
        elif predicted[j][1] <= gold[i][0]:
            j += 1
        else:
            pairs.append((i, j))
            i, j = i + 1, j + 1
    return pairs


def _augment(gold: Intervals, predicted: Intervals) -> list[tuple[int, int]]:
    """Maximum bipartite matching by augmenting paths (Berge 1957), breadth first."""
    overlaps = [[j for j, p in enumerate(predicted) if p[0] < g[1] and g[0] < p[1]] for g in gold]
    mate: list[int] = [-1] * len(gold)
    owner: list[int] = [-1] * len(predicted)
    for root in range(len(gold)):
        reached: dict[int, int] = {}  # prediction -> the gold mention it was reached from
        queue, free = deque([root]), -1
        while queue and free < 0:
            i = queue.popleft()
            for j in overlaps[i]:
                if j not in reached:
                    reached[j] = i
                    if owner[j] < 0:
                        free = j
                        break
                    queue.append(owner[j])
        while free >= 0:  # flip the path, from its free end back to the root
            i = reached[free]
            owner[free], mate[i], free = i, free, mate[i]
    return [(i, j) for i, j in enumerate(mate) if j >= 0]
