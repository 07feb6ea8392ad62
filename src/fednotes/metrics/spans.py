"""Precision, recall and F1 of mentions, from counts that add over documents and sites.

Libraries disagree on "relaxed"; here every definition has a name. With mentions of one type
in one document:

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

A mention is its start, end and type: fragments of a discontinuous mention are not compared
(flatten both sides by the same rule first), and a mention given twice counts once. All scores
are fractions; a score whose denominator is zero is 0.0, as in seqeval.

The matching itself is in `metrics/overlap.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from fednotes.core.errors import ConfigError, nearest
from fednotes.core.types import Document
from fednotes.metrics.overlap import DEFINITIONS, Flags, Ints, Mentions, match

Scores = dict[str, float]

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
class TypeCounts:
    """The counts of one entity type; they add.

    gold, predicted: mentions. strict, one_to_one: pairs. relaxed_gold: gold mentions found;
    relaxed_predicted: predictions that are right. unseen*: the same for mentions whose surface
    form is new.
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

    def __add__(self, other: TypeCounts) -> TypeCounts:
        names = (f.name for f in fields(self))
        return TypeCounts(*(getattr(self, n) + getattr(other, n) for n in names))

    def score(self, definition: str) -> Scores:
        """precision, recall, f1 under one of DEFINITIONS, or "unseen"."""
        right, predicted, found, gold = {
            "strict": (self.strict, self.predicted, self.strict, self.gold),
            "relaxed": (self.relaxed_predicted, self.predicted, self.relaxed_gold, self.gold),
            "relaxed_one_to_one": (self.one_to_one, self.predicted, self.one_to_one, self.gold),
            "unseen": (self.unseen, self.unseen_predicted, self.unseen, self.unseen_gold),
        }[definition]
        precision = right / predicted if predicted else 0.0
        recall = found / gold if gold else 0.0
        both = precision + recall
        return {
            "precision": precision,
            "recall": recall,
            "f1": 2 * precision * recall / both if both else 0.0,
        }


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

        seen: surface forms of the training mentions (`forms_of`); empty: all forms are new.
        types: the types that count (a site's tag set); without it, all that occur.
        Raises DataError if the two sequences do not hold the same documents in the same
        order, or if a span is empty or outside its text.
        """
        found = match(gold, predicted, types)
        new_gold = _unseen(gold, found.gold, seen)
        new_predicted = _unseen(predicted, found.predicted, seen)

        def count(mentions: Mentions, flags: Flags | None = None) -> list[int]:
            kinds = mentions.type if flags is None else mentions.type[flags]
            numbers: list[int] = np.bincount(kinds, minlength=len(found.types)).tolist()
            return numbers

        strict, any_overlap, pairs = (found.hits[name] for name in DEFINITIONS)
        columns = (
            count(found.gold),
            count(found.predicted),
            count(found.gold, strict[0]),
            count(found.gold, any_overlap[0]),
            count(found.predicted, any_overlap[1]),
            count(found.gold, pairs[0]),
            count(found.gold, new_gold),
            count(found.predicted, new_predicted),
            count(found.gold, strict[0] & new_gold),
        )
        rows = zip(*columns, strict=True)
        return cls({name: TypeCounts(*row) for name, row in zip(found.types, rows, strict=True)})

    def __add__(self, other: SpanCounts) -> SpanCounts:
        names = sorted({*self.by_type, *other.by_type})
        zero = TypeCounts()
        return SpanCounts(
            {n: self.by_type.get(n, zero) + other.by_type.get(n, zero) for n in names}
        )

    @property
    def total(self) -> TypeCounts:
        """The counts of all types together (micro averaging)."""
        return sum(self.by_type.values(), TypeCounts())

    @property
    def strict_f1(self) -> float | None:
        """Micro F1, strict; None where nothing is annotated, so that nothing can be judged."""
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

        {"strict" | "relaxed" | "relaxed_one_to_one": {precision, recall, f1}, "support": n,
        "by_type": {type: {the same, "support": n, "predicted": m}}, "macro": {definition: {...}},
        "unseen": {precision, recall, f1, "support": n}, "counts": {...}}. Support is the number
        of gold mentions. Macro: the mean over the types that occur in gold or predictions.
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
    """Precision, recall and F1 of several sites' mentions together, from what `scores` gave."""
    counts = [TypeCounts(**{k: round(v) for k, v in each["counts"].items()}) for each in scores]
    total = sum(counts, TypeCounts())
    return {definition: total.score(definition) for definition in DEFINITIONS}


def forms_of(documents: Sequence[Document]) -> frozenset[str]:
    """The normalised surface forms of all mentions: what `seen` of `SpanCounts.of` takes."""
    return frozenset(_form(d.text[s.start : s.end]) for d in documents for s in d.spans)


def document_counts(
    gold: Sequence[Document],
    predicted: Sequence[Document],
    definition: str = "strict",
    types: Collection[str] | None = None,
) -> Ints:
    """Counts by document, for resampling.

    Returns (documents, 4): right predictions, predictions, found gold mentions, gold mentions.
    Raises DataError as `SpanCounts.of`, ConfigError for an unknown definition.
    """
    if definition not in DEFINITIONS:
        raise ConfigError(f"unknown metric {definition!r}: {nearest(definition, DEFINITIONS)}")
    found = match(gold, predicted, types)
    gold_hit, predicted_hit = found.hits[definition]
    columns = (
        found.predicted.document[predicted_hit],
        found.predicted.document,
        found.gold.document[gold_hit],
        found.gold.document,
    )
    return np.stack([np.bincount(c, minlength=len(gold)) for c in columns], axis=1)


def _form(text: str) -> str:
    # The same rule as `data.text.normalise`, which this layer may not import.
    return " ".join(text.casefold().split())


def _unseen(documents: Sequence[Document], mentions: Mentions, seen: Collection[str]) -> Flags:
    if not seen:
        return np.ones(len(mentions), dtype=bool)
    known = frozenset(seen)
    ends = mentions.offset + mentions.end - mentions.start
    columns = (mentions.document.tolist(), mentions.offset.tolist(), ends.tolist())
    forms = (documents[d].text[start:end] for d, start, end in zip(*columns, strict=True))
    return np.fromiter((_form(f) not in known for f in forms), dtype=bool, count=len(mentions))


def _mean(scores: Sequence[Scores]) -> Scores:
    return {
        name: sum(s[name] for s in scores) / len(scores) if scores else 0.0
        for name in ("precision", "recall", "f1")
    }
