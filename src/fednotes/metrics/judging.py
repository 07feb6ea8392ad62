"""Say of every mention of a document whether it is right, and if not, what is wrong."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from fednotes.core.types import Span

# The kinds of a `JudgedMention`.
KINDS = ("correct", "boundary", "type", "both", "missed", "spurious")


class JudgedMention(NamedTuple):
    """A gold mention with the prediction that stands for it, or one of them alone.

    Attributes:
        kind: "correct"; "boundary": the type is right and the place is not; "type": the
            place is right and the type is not; "both": both are wrong; "missed": there
            is no prediction; "spurious": there is no gold mention.
        gold: The gold mention, if there is one.
        predicted: The prediction, if there is one.
    """

    kind: str
    gold: Span | None
    predicted: Span | None


class _Pairing:
    """Pairs of gold mentions and predictions of one document; indices of both lists."""

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
        """Pair mentions with equal offsets; for the kind "correct", also of one type.

        Each mention is looked up, because a document may have many mentions.
        """
        unused = defaultdict[tuple[object, ...], list[int]](list)
        for j in reversed(range(len(self.predicted))):
            if j not in self.used:
                unused[self._key(self.predicted[j], kind)].append(j)
        for i, span in enumerate(self.gold):
            candidates = unused[self._key(span, kind)]
            if i not in self.judged and candidates:
                self.add(i, candidates.pop(), kind)

    def pair_overlapping(self) -> None:
        """Pair mentions that overlap: of equal type first, then the longer overlap."""
        for is_other_type, _, i, j in sorted(self._overlapping_pairs()):
            if i not in self.judged and j not in self.used:
                self.add(i, j, "both" if is_other_type else "boundary")

    def _overlapping_pairs(self) -> list[tuple[bool, int, int, int]]:
        """Return all pairs as: types differ, −overlap, gold mention, prediction."""
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
    def _key(span: Span, kind: str) -> tuple[object, ...]:
        if kind == "correct":
            return (span.start, span.end, span.label)
        return (span.start, span.end)


def judge_mentions(
    gold: Sequence[Span], predicted: Sequence[Span]
) -> list[JudgedMention]:
    """Judge every mention of one document once, in the order of the text.

    Overlapping mentions are paired one to one, those that agree most first: in place
    and type; in place; in type; then the longer overlap. A mention that is given twice
    counts once.
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
