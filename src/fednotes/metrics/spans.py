"""Precision, recall and F1 of mentions, from counts that add over documents and sites.

Libraries disagree on "relaxed"; here, of one type in one document:

    strict              a prediction is right if a gold mention has the same start and end.
    relaxed             any overlap. A prediction is right if it shares a character with a gold
                        mention; a gold mention is found if it shares one with a prediction.
                        Precision and recall have their own counts (one long prediction may
                        find three gold mentions).
    relaxed_one_to_one  the largest number of pairs (gold, prediction) that overlap, no mention
                        in two pairs: maximum bipartite matching.
    unseen              strict, on mentions whose surface form is not in a given set (the forms
                        of the training mentions, `forms_of`). Recall over such gold mentions,
                        precision over such predictions.

A mention is its start, end and type: fragments are not compared (flatten both sides by
the same rule first), and a mention given twice counts once. Scores are fractions; one
whose denominator is zero is 0.0, as in seqeval. To match, all documents stand on one
line of characters, once for each type, so that mentions overlap there only if document
and type agree.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fednotes.core.errors import ConfigError, DataError, nearest
from fednotes.core.parsing import number
from fednotes.core.types import Counts, Document, Span, TagSet
from fednotes.data.tags import encode, flatten, types_of
from fednotes.data.text import normalise, tokenize

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Scores = dict[str, float]

# by which F1 by any overlap may differ before one-to-one F1 is shown too
OVERLAP_POINTS = 0.1
DEFINITIONS = ("strict", "relaxed", "relaxed_one_to_one")
# of a `JudgedMention`
KINDS = ("correct", "boundary", "type", "both", "missed", "spurious")

# How each count is named in the flat metrics that a site sends: "<head>/<type>/<tail>".
_KEYS = {
    ("support", "gold"): "gold",
    ("support", "predicted"): "predicted",
    ("strict", "tp"): "strict",
    ("relaxed", "gold_found"): "relaxed_gold",
    ("relaxed", "predicted_right"): "relaxed_predicted",
    ("relaxed_one_to_one", "tp"): "one_to_one",
    ("unseen", "gold"): "unseen_gold",
    ("unseen", "predicted"): "unseen_predicted",
    ("unseen", "tp"): "unseen",
}


@dataclass(frozen=True, slots=True)
class TypeCounts(Counts):
    """The counts of one entity type; they add.

    gold, predicted: mentions. strict, one_to_one: pairs. relaxed_gold: gold mentions
        found;
    relaxed_predicted: predictions that are right. unseen*: the same for mentions whose
    surface form is new.
    """

    gold: int = 0
    predicted: int = 0
    strict: int = 0
    relaxed_gold: int = 0
    relaxed_predicted: int = 0
    one_to_one: int = 0
    unseen_gold: int = 0
    unseen_predicted: int = 0
    unseen: int = 0

    def score(self, definition: str) -> Scores:
        """precision, recall, f1 under one of DEFINITIONS, or "unseen"."""
        right, predicted, found, gold = {
            "strict": (self.strict, self.predicted, self.strict, self.gold),
            "relaxed": (
                self.relaxed_predicted,
                self.predicted,
                self.relaxed_gold,
                self.gold,
            ),
            "relaxed_one_to_one": (
                self.one_to_one,
                self.predicted,
                self.one_to_one,
                self.gold,
            ),
            "unseen": (
                self.unseen,
                self.unseen_predicted,
                self.unseen,
                self.unseen_gold,
            ),
        }[definition]
        precision = right / predicted if predicted else 0.0
        recall = found / gold if gold else 0.0
        both = precision + recall
        f1 = 2 * precision * recall / both if both else 0.0
        return {"precision": precision, "recall": recall, "f1": f1}


@dataclass(frozen=True, slots=True)
class SpanCounts:
    """What a tagger got right, counted by type. `SpanCounts()` is zero; counts add."""

    by_type: Mapping[str, TypeCounts] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        gold: Sequence[Document],
        predicted: Sequence[Document],
        seen: Collection[str] = frozenset(),
        types: Collection[str] | None = None,
    ) -> SpanCounts:
        """Compare predictions with gold, document by document.

        seen: surface forms of the training mentions (`forms_of`); empty: all forms are
            new.
        types: the types that count (a site's tag set); without it, all that occur.
        Raises DataError if the two sequences do not hold the same documents in the same
        order, or if a span is empty or outside its text.
        """
        names, left, right, hits = _match(gold, predicted, types)
        new_left, new_right = _unseen(gold, left, seen), _unseen(predicted, right, seen)
        strict, overlap, pairs = (hits[name] for name in DEFINITIONS)
        counted = {
            "gold": left.type,
            "predicted": right.type,
            "strict": left.type[strict[0]],
            "relaxed_gold": left.type[overlap[0]],
            "relaxed_predicted": right.type[overlap[1]],
            "one_to_one": left.type[pairs[0]],
            "unseen_gold": left.type[new_left],
            "unseen_predicted": right.type[new_right],
            "unseen": left.type[strict[0] & new_left],
        }
        columns = (
            np.bincount(types, minlength=len(names)).tolist()
            for types in counted.values()
        )
        rows = (
            dict(zip(counted, row, strict=True)) for row in zip(*columns, strict=True)
        )
        return cls(
            {name: TypeCounts(**row) for name, row in zip(names, rows, strict=True)}
        )

    def __add__(self, other: SpanCounts) -> SpanCounts:
        one, two, zero = self.by_type, other.by_type, TypeCounts()
        names = sorted({*one, *two})
        return SpanCounts(
            {name: one.get(name, zero) + two.get(name, zero) for name in names}
        )

    @property
    def total(self) -> TypeCounts:
        """The counts of all types together (micro averaging)."""
        return sum(self.by_type.values(), TypeCounts())

    @property
    def strict_f1(self) -> float | None:
        """Micro F1, strict; None where nothing is annotated, so that nothing can be
        judged."""
        return float(self.scores()["strict"]["f1"]) if self.total.gold else None

    def to_metrics(self) -> dict[str, float]:
        """Flat counts that add under `Total`: {"strict/ADR/tp": 12.0, ...}."""
        return {
            f"{head}/{name}/{tail}": float(getattr(counts, attribute))
            for name, counts in self.by_type.items()
            for (head, tail), attribute in _KEYS.items()
        }

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, float]) -> SpanCounts:
        """The inverse of `to_metrics`; keys of other origin are left alone."""
        found: dict[str, dict[str, int]] = {}
        for key, value in metrics.items():
            head, _, rest = key.partition("/")
            name, slash, tail = rest.rpartition("/")  # a type may hold a slash itself
            attribute = _KEYS.get((head, tail))
            if slash and attribute:
                found.setdefault(name, {})[attribute] = round(value)
        return cls({name: TypeCounts(**found[name]) for name in sorted(found)})

    def scores(self) -> dict[str, Any]:
        """Micro scores by definition, macro means, scores by type, and unseen forms.

        {"strict" | "relaxed" | "relaxed_one_to_one": {precision, recall, f1},
        "support": n, "by_type": {type: {the same, "support": n, "predicted": m}},
        "macro": {definition: {...}}, "unseen": {precision, recall, f1, "support": n},
        "counts": {...}}. Support is the number of gold mentions. Macro: the mean over
        the types that occur in gold or predictions.
        Counts: of all types together, so that scores of several sites can be pooled.
        """
        total = self.total
        by_type: dict[str, dict[str, object]] = {}
        for name, counts in self.by_type.items():
            by_type[name] = {d: counts.score(d) for d in DEFINITIONS}
            by_type[name] |= {"support": counts.gold, "predicted": counts.predicted}
        occur = [c for c in self.by_type.values() if c.gold or c.predicted]
        return {
            **{d: total.score(d) for d in DEFINITIONS},
            "support": total.gold,
            "by_type": by_type,
            "macro": {d: _mean([c.score(d) for c in occur]) for d in DEFINITIONS},
            "unseen": {**total.score("unseen"), "support": total.unseen_gold},
            "counts": asdict(total),
        }


def micro_scores(scores: Sequence[Mapping[str, Any]]) -> dict[str, Scores]:
    """Precision, recall and F1 of several sites' mentions together, from what `scores`
    gave."""
    counts = [
        TypeCounts(**{k: round(v) for k, v in each["counts"].items()})
        for each in scores
    ]
    total = sum(counts, TypeCounts())
    return {definition: total.score(definition) for definition in DEFINITIONS}


def overlap_differs(scores: Mapping[str, Any]) -> bool:
    """Return whether F1 by any overlap is more than ten points away from one-to-one F1.

    Any overlap lets one long mention match several short ones; one to one does not.

    Args:
        scores: As `SpanCounts.scores` gives them; what lacks one of the two does not
            differ.
    """
    pair = [number(scores, kind, "f1") for kind in ("relaxed", "relaxed_one_to_one")]
    any_overlap, one_to_one = pair
    if any_overlap is None or one_to_one is None:
        return False
    return abs(any_overlap - one_to_one) > OVERLAP_POINTS


def token_kappa(
    one: Sequence[Document], other: Sequence[Document]
) -> tuple[int, float | None]:
    """The number of tokens of two annotations of the same documents, and Cohen's kappa
    of their types (the outermost mention's, or none); None where both have one type
    throughout.

    J. Cohen, Educational and Psychological Measurement 20 (1960): (p_o - p_e) / (1 -
    p_e).
    """
    tagset = TagSet(types_of([*one, *other]), "IO")
    table = np.zeros((len(tagset.tags),) * 2)  # tokens by their type in both
    for documents in zip(one, other, strict=True):
        tokens = tokenize(documents[0].text)
        pair = (
            encode(flatten(d.spans, "outermost")[0], tokens, tagset)[0]
            for d in documents
        )
        np.add.at(table, tuple(pair), 1)
    number = table.sum()
    same, chance = np.trace(table), (table.sum(0) * table.sum(1)).sum() / max(number, 1)
    return int(number), float(
        (same - chance) / (number - chance)
    ) if number > chance else None


def forms_of(documents: Sequence[Document]) -> frozenset[str]:
    """The normalised surface forms of all mentions: what `seen` of `SpanCounts.of`
    takes."""
    return frozenset(
        normalise(d.text[s.start : s.end]) for d in documents for s in d.spans
    )


def document_counts(
    gold: Sequence[Document],
    predicted: Sequence[Document],
    definition: str = "strict",
    types: Collection[str] | None = None,
) -> Ints:
    """Counts by document, for resampling.

    Returns (documents, 4): right predictions, predictions, found gold mentions, gold
        mentions.
    Raises DataError as `SpanCounts.of`, ConfigError for an unknown definition.
    """
    if definition not in DEFINITIONS:
        raise ConfigError(
            f"unknown metric {definition!r}: {nearest(definition, DEFINITIONS)}"
        )
    _, left, right, hits = _match(gold, predicted, types)
    found, said = hits[definition]
    columns = (
        right.document[said],
        right.document,
        left.document[found],
        left.document,
    )
    return np.stack([np.bincount(c, minlength=len(gold)) for c in columns], axis=1)


# ---- what is wrong with a mention ----------------------------------------------------


class JudgedMention(NamedTuple):
    """A gold mention, the prediction that is taken for it, or one of them alone.

    kind: "correct"; "boundary", another stretch of the same type; "type", the same
    stretch of another; "both" wrong; "missed", no prediction; "spurious", no gold
    mention.
    """

    kind: str
    gold: Span | None
    predicted: Span | None


def judged_mentions(
    gold: Sequence[Span], predicted: Sequence[Span]
) -> list[JudgedMention]:
    """Every mention of one document once, in the order of the text.

    Overlapping mentions are paired one to one, what has most in common first: place and
    type, the place, the type, then the longer overlap. A mention given twice counts
    once.
    """
    left, right = sorted(set(gold)), sorted(set(predicted))
    mate, taken = dict[int, JudgedMention](), set[int]()
    for kind in ("correct", "type"):  # at one place, at once: many may overlap
        free = defaultdict[tuple[object, ...], list[int]](list)
        for j in reversed([j for j in range(len(right)) if j not in taken]):
            free[_place(right[j], kind)].append(j)
        for i, g in enumerate(left):
            if i not in mate and (there := free[_place(g, kind)]):
                mate[i] = JudgedMention(kind, g, right[j := there.pop()])
                taken.add(j)
    others = [j for j in range(len(right)) if j not in taken]
    starts = [right[j].start for j in others]
    longest = max((right[j].end - right[j].start for j in others), default=0)
    pairs = []
    for i, g in enumerate(left):
        if i in mate:
            continue
        for j in others[
            bisect_left(starts, g.start - longest) : bisect_left(starts, g.end)
        ]:
            p = right[j]
            if (common := min(g.end, p.end) - max(g.start, p.start)) > 0:
                pairs.append((g.label != p.label, -common, i, j))
    for renamed, _, i, j in sorted(pairs):
        if i not in mate and j not in taken:
            mate[i] = JudgedMention(
                "both" if renamed else "boundary", left[i], right[j]
            )
            taken.add(j)
    found = [
        mate.get(i) or JudgedMention("missed", g, None) for i, g in enumerate(left)
    ]
    found += [
        JudgedMention("spurious", None, p)
        for j, p in enumerate(right)
        if j not in taken
    ]
    return sorted(found, key=lambda each: (each.gold or each.predicted, each.kind))


def _place(span: Span, kind: str) -> tuple[object, ...]:
    """What two mentions have in common that are alike, or differ in their type alone."""
    return (span.start, span.end, *([span.label] if kind == "correct" else []))


# ---- matching ------------------------------------------------------------------------


class _Mentions(NamedTuple):
    """Distinct mentions, all arrays (mentions,), sorted by place on the line, then by
    end.

    document, type: indices. offset: where the mention begins in its document
        (characters).
    start, end: place on the line.
    """

    document: Ints
    type: Ints
    offset: Ints
    start: Ints
    end: Ints


def _match(
    gold: Sequence[Document],
    predicted: Sequence[Document],
    types: Collection[str] | None,
) -> tuple[tuple[str, ...], _Mentions, _Mentions, dict[str, tuple[Flags, Flags]]]:
    """The types, both sides' mentions, and by definition which of each side are hits.

    Raises DataError if the documents disagree or a span is empty or outside its text.
    """
    _same_documents(gold, predicted)
    if types is None:
        types = {s.label for side in (gold, predicted) for d in side for s in d.spans}
    names = tuple(sorted(set(types)))
    left, right = _on_line(gold, names), _on_line(predicted, names)
    longest = max(int((side.end - side.start).max(initial=0)) for side in (left, right))
    keys = [
        side.start * (longest + 1) + side.end - side.start for side in (left, right)
    ]
    hits = {
        "strict": (np.isin(keys[0], keys[1]), np.isin(keys[1], keys[0])),
        "relaxed": (_touched(left, right), _touched(right, left)),
        "relaxed_one_to_one": _one_to_one(left, right),
    }
    return names, left, right, hits


def _same_documents(gold: Sequence[Document], predicted: Sequence[Document]) -> None:
    if len(gold) != len(predicted):
        told = f"{len(gold)} gold documents but {len(predicted)} predicted ones"
        raise DataError(f"{told}: predict on exactly the documents that you evaluate")
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


def _on_line(documents: Sequence[Document], names: Sequence[str]) -> _Mentions:
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
    # (mentions,) where the document begins
    shift = kind * bounds[-1] + bounds[document]
    order = np.lexsort((end, shift + start))
    begin, finish = (shift + start)[order], (shift + end)[order]
    new = np.ones(len(order), dtype=bool)
    new[1:] = (begin[1:] != begin[:-1]) | (finish[1:] != finish[:-1])
    keep = order[new]
    return _Mentions(document[keep], kind[keep], start[keep], begin[new], finish[new])


def _touched(mentions: _Mentions, others: _Mentions) -> Flags:
    """Which mentions overlap any of the others."""
    if not len(others.start):
        return np.zeros(len(mentions.start), dtype=bool)
    reach = np.maximum.accumulate(others.end)  # the furthest end so far
    # how many others begin before the end
    before = np.searchsorted(others.start, mentions.end)
    return (before > 0) & (reach[before - 1] > mentions.start)


def _one_to_one(gold: _Mentions, predicted: _Mentions) -> tuple[Flags, Flags]:
    """A maximum matching, cluster by cluster of overlapping mentions of both sides."""
    start = np.concatenate([gold.start, predicted.start])
    end = np.concatenate([gold.end, predicted.end])
    order = np.argsort(start, kind="stable")
    apart = np.ones(len(order), dtype=bool)
    apart[1:] = start[order][1:] >= np.maximum.accumulate(end[order])[:-1]
    cluster = np.empty(len(order), dtype=np.int64)
    cluster[order] = np.cumsum(apart) - 1
    edges = np.arange(cluster.max(initial=-1) + 2)
    # The first mention of each cluster, of gold and of predictions.
    of_gold = np.searchsorted(cluster[: len(gold.start)], edges)
    of_predicted = np.searchsorted(cluster[len(gold.start) :], edges)
    fewer = np.minimum(np.diff(of_gold), np.diff(of_predicted))
    gold_hit, predicted_hit = (
        np.zeros(len(side.start), bool) for side in (gold, predicted)
    )
    # A cluster with a single mention on one side holds exactly one pair, and this is
    # most of them; which mention of the other side is marked does not change any count.
    single = np.flatnonzero(fewer == 1)
    gold_hit[of_gold[single]] = True
    predicted_hit[of_predicted[single]] = True
    for c in np.flatnonzero(fewer > 1):
        left, right = slice(*of_gold[c : c + 2]), slice(*of_predicted[c : c + 2])
        begun = gold.start[left, None] < predicted.end[right]
        pairs = _largest_matching(
            begun & (predicted.start[right] < gold.end[left, None])
        )
        gold_hit[[left.start + i for i, _ in pairs]] = True
        predicted_hit[[right.start + j for _, j in pairs]] = True
    return gold_hit, predicted_hit


def _largest_matching(overlap: Flags) -> list[tuple[int, int]]:
    """A largest set of pairs, none in two of them, of (gold, prediction) that overlap.

    By augmenting paths (Berge 1957), breadth first. overlap: (gold, predictions).
    """
    overlaps = [np.flatnonzero(row).tolist() for row in overlap]
    owner = [-1] * overlap.shape[1]
    mate = [-1] * len(overlap)
    for root in range(len(overlaps)):
        # prediction -> the gold mention it was reached from
        reached: dict[int, int] = {}
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


def _unseen(
    documents: Sequence[Document], mentions: _Mentions, seen: Collection[str]
) -> Flags:
    if not seen:
        return np.ones(len(mentions.start), dtype=bool)
    known = frozenset(seen)
    ends = mentions.offset + mentions.end - mentions.start
    columns = (mentions.document.tolist(), mentions.offset.tolist(), ends.tolist())
    forms = (
        documents[d].text[start:end] for d, start, end in zip(*columns, strict=True)
    )
    return np.fromiter((normalise(form) not in known for form in forms), dtype=bool)


def _mean(scores: Sequence[Scores]) -> Scores:
    names = ("precision", "recall", "f1")
    return {
        n: sum(s[n] for s in scores) / len(scores) if scores else 0.0 for n in names
    }
