"""Classify every mention of a document as correct or by its kind of error."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from fednotes.core.types import Span

# The kinds of a `JudgedMention`.
KINDS = ("correct", "boundary", "type", "both", "missed", "spurious")


class JudgedMention(NamedTuple):
    """A gold mention with its matched prediction, or one of the two alone.

    Attributes:
        kind: "correct"; "boundary": correct type, wrong boundaries; "type": correct
            boundaries, wrong type; "both": both are wrong; "missed": there is no
            prediction; "spurious": there is no gold mention.
        gold: The gold mention, or None.
        predicted: The prediction, or None.
    """

    kind: str
    gold: Span | None
    predicted: Span | None


class _Pairing:
    """Pairs of gold mentions and predictions in one document, by index."""

    def __init__(self, gold: Sequence[Span], predicted: Sequence[Span]) -> None:
        self.gold = gold
        self.predicted = predicted
        self.judged: dict[int, JudgedMention] = {}  # by gold mention
        self.used: set[int] = set()  # predictions

    def add(self, i: int, j: int, kind: str) -> None:
        """Pair the gold mention i with the prediction j."""
        self.judged[i] = JudgedMention(kind, self.gold[i], self.predicted[j])
        self.used.add(j)

    def pair_equal_places(self, kind: str) -> None:
        """Pair mentions with equal offsets; for "correct", also with equal types.

        Hash lookups keep this fast for documents with many mentions.
        """
        unused = defaultdict[tuple[object, ...], list[int]](list)
        for j in reversed(range(len(self.predicted))):
            if j not in self.used:
                unused[self._make_key(self.predicted[j], kind)].append(j)
        for i, span in enumerate(self.gold):
            candidates = unused[self._make_key(span, kind)]
            if i not in self.judged and candidates:
                self.add(i, candidates.pop(), kind)

    def pair_overlapping(self) -> None:
        """Pair overlapping mentions, equal types first, then by longest overlap."""
        for is_other_type, _, i, j in sorted(self._list_overlapping_pairs()):
            if i not in self.judged and j not in self.used:
                self.add(i, j, "both" if is_other_type else "boundary")

    def _list_overlapping_pairs(self) -> list[tuple[bool, int, int, int]]:
        """Return pairs as (types differ, −overlap, gold index, prediction index)."""
        unused = [j for j in range(len(self.predicted)) if j not in self.used]
        starts = [self.predicted[j].start for j in unused]
        longest = max(
            (self.predicted[j].end - self.predicted[j].start for j in unused), default=0
        )
        pairs = []
        for i, g in enumerate(self.gold):
            if i in self.judged:
                continue
            first = bisect_left(starts, g.start - longest)
            stop = bisect_left(starts, g.end)
            for j in unused[first:stop]:
                p = self.predicted[j]
                common = min(g.end, p.end) - max(g.start, p.start)
                if common > 0:
                    pairs.append((g.label != p.label, -common, i, j))
        return pairs

    @staticmethod
    def _make_key(span: Span, kind: str) -> tuple[object, ...]:
        """Return what mentions must have in common to be paired as this kind."""
        if kind == "correct":
            return (span.start, span.end, span.label)
        return (span.start, span.end)


def judge_mentions(
    gold: Sequence[Span], predicted: Sequence[Span]
) -> list[JudgedMention]:
    """Pair gold mentions with predictions in a document; return each by its kind.

    Overlapping mentions are paired one to one, best matches first: equal offsets and
    type; equal offsets; equal type; then the longest overlap. A duplicate mention
    counts once.

    Returns:
        Every mention once, in the order of the text.
    """
    pairing = _Pairing(sorted(set(gold)), sorted(set(predicted)))
    pairing.pair_equal_places("correct")
    pairing.pair_equal_places("type")
    pairing.pair_overlapping()

    judged = [
        pairing.judged.get(i) or JudgedMention("missed", span, None)
        for i, span in enumerate(pairing.gold)
    ]
    judged += [
        JudgedMention("spurious", None, span)
        for j, span in enumerate(pairing.predicted)
        if j not in pairing.used
    ]
    return sorted(judged, key=lambda each: (each.gold or each.predicted, each.kind))
