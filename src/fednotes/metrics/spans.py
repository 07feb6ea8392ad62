"""Precision, recall and F1 of mentions, from counts that add over documents and sites.

Libraries disagree on "relaxed". Here, within one type and one document:

    strict              a prediction is correct if a gold mention has the same start and
                        end
    relaxed             any overlap: a prediction is correct if it shares a character
                        with a gold mention; a gold mention is found if it shares one
                        with a prediction. Precision and recall have separate counts,
                        because one long prediction may find three gold mentions.
    relaxed_one_to_one  the maximum number of overlapping pairs (gold, prediction), no
                        mention in two pairs: maximum bipartite matching
    unseen              strict, for mentions whose surface form is not in a given set
                        (the forms of the training mentions, `collect_forms`): recall
                        over such gold mentions, precision over such predictions

A mention is its start, end and type. Fragments are not compared, so first flatten both
sides by the same rule. A duplicate mention counts once. Scores are fractions; a score
whose denominator is zero is 0.0, as in seqeval.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from fednotes.core.errors import ConfigError, suggest_name
from fednotes.core.parsing import find_number
from fednotes.core.types import Counts, Document, TagSet
from fednotes.data.tags import encode_tags, keep_outermost, list_types
from fednotes.data.text import normalise, tokenize
from fednotes.metrics.matching import Flags, Ints, LaidOutMentions, match_mentions

Scores = dict[str, float]

# If F1 by any overlap differs more than this from one-to-one F1, both are shown.
OVERLAP_POINTS = 0.1
DEFINITIONS = ("strict", "relaxed", "relaxed_one_to_one")
_MEASURES = ("precision", "recall", "f1")

# The field of each count in the flat metrics that a site sends: "<head>/<type>/<tail>".
_FIELDS = {
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
    """The additive counts of one entity type.

    Attributes:
        gold: Gold mentions.
        predicted: Predictions.
        strict: Pairs of equal start and end.
        relaxed_gold: Gold mentions that a prediction overlaps.
        relaxed_predicted: Predictions that a gold mention overlaps.
        one_to_one: Overlapping pairs, no mention in two pairs.
        unseen_gold: Gold mentions whose form is new.
        unseen_predicted: Predictions whose form is new.
        unseen: Strict pairs whose form is new.
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
        """Return precision, recall and F1 by one of DEFINITIONS, or for "unseen"."""
        if definition == "strict":
            return _compute_score(self.strict, self.predicted, self.strict, self.gold)
        if definition == "relaxed":
            return _compute_score(
                self.relaxed_predicted, self.predicted, self.relaxed_gold, self.gold
            )
        if definition == "relaxed_one_to_one":
            return _compute_score(
                self.one_to_one, self.predicted, self.one_to_one, self.gold
            )
        if definition == "unseen":
            return _compute_score(
                self.unseen, self.unseen_predicted, self.unseen, self.unseen_gold
            )
        raise KeyError(definition)


def _compute_score(right: int, predicted: int, hits: int, gold: int) -> Scores:
    """Return precision, recall and F1.

    Args:
        right: Correct predictions.
        predicted: All predictions.
        hits: Gold mentions found.
        gold: All gold mentions.
    """
    precision = right / predicted if predicted else 0.0
    recall = hits / gold if gold else 0.0
    both = precision + recall
    f1 = 2 * precision * recall / both if both else 0.0
    return {"precision": precision, "recall": recall, "f1": f1}


@dataclass(frozen=True, slots=True)
class SpanCounts:
    """Additive counts of a tagger's correct and wrong predictions, by type.

    Attributes:
        by_type: The counts of each entity type. `SpanCounts()` is zero.
    """

    by_type: Mapping[str, TypeCounts] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        gold: Sequence[Document],
        predicted: Sequence[Document],
        seen: Collection[str] = frozenset(),
        types: Collection[str] | None = None,
    ) -> SpanCounts:
        """Compare predictions with gold mentions, document by document.

        Args:
            gold: Documents with gold mentions.
            predicted: The same documents in the same order, with predictions.
            seen: Surface forms of the training mentions (`collect_forms`). If empty,
                all forms count as new.
            types: The types that count (a site's tag set); None counts all that occur.

        Raises:
            DataError: The documents differ, or a mention is empty or outside its text.
        """
        matches = match_mentions(gold, predicted, types)
        gold_type = matches.gold.type
        predicted_type = matches.predicted.type
        is_new_gold = _find_new_forms(gold, matches.gold, seen)
        is_new_predicted = _find_new_forms(predicted, matches.predicted, seen)
        strict, relaxed, one_to_one = (matches.hits[name] for name in DEFINITIONS)
        counted_types = {
            "gold": gold_type,
            "predicted": predicted_type,
            "strict": gold_type[strict.gold],
            "relaxed_gold": gold_type[relaxed.gold],
            "relaxed_predicted": predicted_type[relaxed.predicted],
            "one_to_one": gold_type[one_to_one.gold],
            "unseen_gold": gold_type[is_new_gold],
            "unseen_predicted": predicted_type[is_new_predicted],
            "unseen": gold_type[strict.gold & is_new_gold],
        }
        columns = {
            name: np.bincount(indices, minlength=len(matches.types)).tolist()
            for name, indices in counted_types.items()
        }
        return cls(
            {
                type_: TypeCounts(**{name: columns[name][index] for name in columns})
                for index, type_ in enumerate(matches.types)
            }
        )

    def __add__(self, other: SpanCounts) -> SpanCounts:
        zero = TypeCounts()
        names = sorted({*self.by_type, *other.by_type})
        return SpanCounts(
            {
                name: self.by_type.get(name, zero) + other.by_type.get(name, zero)
                for name in names
            }
        )

    @property
    def total(self) -> TypeCounts:
        """The summed counts of all types (for micro averages)."""
        return sum(self.by_type.values(), TypeCounts())

    @property
    def strict_f1(self) -> float | None:
        """Strict micro F1; None if there are no gold mentions."""
        return float(self.scores()["strict"]["f1"]) if self.total.gold else None

    def to_metrics(self) -> dict[str, float]:
        """Return flat counts that `Total` can sum: {"strict/ADR/tp": 12.0, ...}."""
        return {
            f"{head}/{name}/{tail}": float(getattr(counts, attribute))
            for name, counts in self.by_type.items()
            for (head, tail), attribute in _FIELDS.items()
        }

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, float]) -> SpanCounts:
        """Return the counts in flat metrics, ignoring other keys.

        This is the inverse of `to_metrics`.
        """
        by_type: dict[str, dict[str, int]] = {}
        for key, value in metrics.items():
            head, _, remainder = key.partition("/")
            # A type's name may also contain a slash.
            name, slash, tail = remainder.rpartition("/")
            attribute = _FIELDS.get((head, tail))
            if slash and attribute:
                by_type.setdefault(name, {})[attribute] = round(value)
        return cls({name: TypeCounts(**by_type[name]) for name in sorted(by_type)})

    def scores(self) -> dict[str, Any]:
        """Return micro, macro and per-type scores, and scores of new forms.

        Returns:
            "strict", "relaxed", "relaxed_one_to_one": {precision, recall, f1}.
            "support": the number of gold mentions.
            "by_type": the same scores by type, with "support" and "predicted", the
            number of predictions. "macro": for each definition, the mean over the types
            that occur in gold mentions or predictions. "unseen": {precision, recall,
            f1, "support"}. "counts": the summed counts of all types, from which
            `score_all_mentions` scores several sites together.
        """
        total = self.total
        by_type: dict[str, dict[str, object]] = {}
        for name, counts in self.by_type.items():
            by_type[name] = {
                **{definition: counts.score(definition) for definition in DEFINITIONS},
                "support": counts.gold,
                "predicted": counts.predicted,
            }
        occurring = [c for c in self.by_type.values() if c.gold or c.predicted]
        return {
            **{definition: total.score(definition) for definition in DEFINITIONS},
            "support": total.gold,
            "by_type": by_type,
            "macro": {
                definition: _average([counts.score(definition) for counts in occurring])
                for definition in DEFINITIONS
            },
            "unseen": {**total.score("unseen"), "support": total.unseen_gold},
            "counts": asdict(total),
        }


def _average(scores: Sequence[Scores]) -> Scores:
    """Return the mean of each measure; 0.0 if there are no scores."""
    if not scores:
        return dict.fromkeys(_MEASURES, 0.0)
    return {
        name: sum(each[name] for each in scores) / len(scores) for name in _MEASURES
    }


def _find_new_forms(
    documents: Sequence[Document], mentions: LaidOutMentions, seen: Collection[str]
) -> Flags:
    """Return which mentions have a surface form that is not in `seen`."""
    if not seen:
        return np.ones(len(mentions.start), dtype=bool)
    seen_forms = frozenset(seen)
    ends = mentions.offset + mentions.end - mentions.start
    columns = (mentions.document.tolist(), mentions.offset.tolist(), ends.tolist())
    is_new = (
        normalise(documents[index].text[start:end]) not in seen_forms
        for index, start, end in zip(*columns, strict=True)
    )
    return np.fromiter(is_new, dtype=bool)


def score_all_mentions(scores: Sequence[Mapping[str, Any]]) -> dict[str, Scores]:
    """Return precision, recall and F1 over the mentions of several sites together.

    Args:
        scores: The results of `SpanCounts.scores` at each site.
    """
    total = TypeCounts()
    for each in scores:
        counts = {name: round(value) for name, value in each["counts"].items()}
        total += TypeCounts(**counts)
    return {definition: total.score(definition) for definition in DEFINITIONS}


def overlap_differs(scores: Mapping[str, Any]) -> bool:
    """Return whether F1 by any overlap is more than ten points from one-to-one F1.

    With any overlap, one long mention can match several short ones; one to one it
    cannot.

    Args:
        scores: The result of `SpanCounts.scores`. If one of the two is missing, the
            result is False.
    """
    any_overlap = find_number(scores, "relaxed", "f1")
    one_to_one = find_number(scores, "relaxed_one_to_one", "f1")
    if any_overlap is None or one_to_one is None:
        return False
    return abs(any_overlap - one_to_one) > OVERLAP_POINTS


def compute_token_kappa(
    one: Sequence[Document], other: Sequence[Document]
) -> tuple[int, float | None]:
    """Compute Cohen's kappa of two annotations of the same tokens.

    A token's category is the type of the outermost mention that covers it, or none.
    Kappa is (p_o − p_e) / (1 − p_e): J. Cohen, Educational and Psychological
    Measurement 20 (1960).

    Args:
        one: Documents with one annotation.
        other: The same documents with the other annotation.

    Returns:
        The number of tokens, and kappa, which is None if both have the same single
        category.
    """
    tagset = TagSet(list_types([*one, *other]), "IO")
    # Tokens by category. A table of both would have billions of cells for a corpus that
    # names thousands of types.
    left_counts, right_counts = np.zeros((2, len(tagset.tags)))
    agreed = 0
    for left, right in zip(one, other, strict=True):
        tokens = tokenize(left.text)
        left_ids, _ = encode_tags(keep_outermost(left.spans), tokens, tagset)
        right_ids, _ = encode_tags(keep_outermost(right.spans), tokens, tagset)
        np.add.at(left_counts, left_ids, 1)
        np.add.at(right_counts, right_ids, 1)
        agreed += int(np.count_nonzero(np.equal(left_ids, right_ids)))
    tokens_in_all = left_counts.sum()
    by_chance = (left_counts * right_counts).sum() / max(tokens_in_all, 1)
    # Equal with a single category or without tokens; rounding may make it greater.
    if by_chance >= tokens_in_all:
        return int(tokens_in_all), None
    kappa = (agreed - by_chance) / (tokens_in_all - by_chance)
    return int(tokens_in_all), float(kappa)


def collect_forms(documents: Sequence[Document]) -> frozenset[str]:
    """Return the normalised surface forms of all mentions, for `SpanCounts.of`."""
    return frozenset(
        normalise(document.text[span.start : span.end])
        for document in documents
        for span in document.spans
    )


def count_by_document(
    gold: Sequence[Document],
    predicted: Sequence[Document],
    definition: str = "strict",
    types: Collection[str] | None = None,
) -> Ints:
    """Count hits and mentions in each document, for resampling.

    Args:
        gold: As in `SpanCounts.of`.
        predicted: As in `SpanCounts.of`.
        definition: One of DEFINITIONS.
        types: As in `SpanCounts.of`.

    Returns:
        (documents, 4): correct predictions, predictions, found gold mentions, gold
        mentions.

    Raises:
        DataError: As `SpanCounts.of`.
        ConfigError: There is no such definition.
    """
    if definition not in DEFINITIONS:
        raise ConfigError(
            f"unknown metric {definition!r}: {suggest_name(definition, DEFINITIONS)}"
        )
    matches = match_mentions(gold, predicted, types)
    hits = matches.hits[definition]
    columns = (
        matches.predicted.document[hits.predicted],
        matches.predicted.document,
        matches.gold.document[hits.gold],
        matches.gold.document,
    )
    return np.stack(
        [np.bincount(column, minlength=len(gold)) for column in columns], axis=1
    )
