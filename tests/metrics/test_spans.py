"""Span counts, compared with seqeval, nervaluate, SciPy's matching and brute force."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nervaluate import Evaluator
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching
from seqeval.metrics.sequence_labeling import precision_recall_fscore_support
from time_limits import processor_time_below

from fednotes.core.errors import ConfigError, DataError
from fednotes.core.types import Document, Span
from fednotes.metrics.judging import KINDS, judge_mentions
from fednotes.metrics.spans import (
    DEFINITIONS,
    SpanCounts,
    collect_forms,
    compute_token_kappa,
    count_by_document,
    overlap_differs,
)

LENGTH = 14
TYPES = ("ADR", "Drug", "a/b")


def corpus(
    sides: Sequence[tuple[list[Span], list[Span]]],
) -> tuple[list[Document], ...]:
    """Return gold and predicted documents over a text of LENGTH different letters."""
    text = "abcdefghijklmnopqrstuvwxyz"[:LENGTH]
    return tuple(
        [Document(f"d{i}", text, tuple(pair[side])) for i, pair in enumerate(sides)]
        for side in (0, 1)
    )


@st.composite
def spans(draw: st.DrawFn) -> Span:
    start = draw(st.integers(0, LENGTH - 1))
    end = draw(st.integers(start + 1, LENGTH))
    return Span(start, end, draw(st.sampled_from(TYPES)))


sides = st.lists(
    st.tuples(*[st.lists(spans(), max_size=7)] * 2), min_size=1, max_size=4
)


def overlap(a: Span, b: Span) -> bool:
    """Return whether two mentions of one type share a character."""
    return a.label == b.label and bool(
        set(range(a.start, a.end)) & set(range(b.start, b.end))
    )


def largest(gold: Sequence[Span], predicted: Sequence[Span]) -> int:
    """Return the size of a maximum matching of overlapping pairs, by SciPy."""
    if not gold or not predicted:
        return 0
    edges = csr_matrix([[overlap(g, p) for p in predicted] for g in gold])
    return int((maximum_bipartite_matching(edges, perm_type="column") >= 0).sum())


def brute_force(
    gold: list[Document], predicted: list[Document], label: str
) -> dict[str, int]:
    """Apply every definition by a double loop over the distinct mentions of one
    type."""
    counts = dict.fromkeys(
        (
            "gold",
            "predicted",
            "strict",
            "relaxed_gold",
            "relaxed_predicted",
            "one_to_one",
        ),
        0,
    )
    for gold_document, predicted_document in zip(gold, predicted, strict=True):
        g = sorted({s for s in gold_document.spans if s.label == label})
        p = sorted({s for s in predicted_document.spans if s.label == label})
        counts["gold"] += len(g)
        counts["predicted"] += len(p)
        counts["strict"] += sum(s in p for s in g)
        counts["relaxed_gold"] += sum(any(overlap(s, o) for o in p) for s in g)
        counts["relaxed_predicted"] += sum(any(overlap(s, o) for o in g) for s in p)
        counts["one_to_one"] += largest(g, p)
    return counts


NESTED = [
    [Span(0, 9, "ADR"), Span(0, 3, "ADR")],
    [Span(0, 2, "ADR"), Span(5, 7, "ADR")],
]


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(sides)
# (0,9) must leave (0,2) to (0,3): no choice from left to right
@example([(NESTED[0], NESTED[1])])
def test_all_matching_definitions_equal_a_double_loop(
    pairs: list[tuple[list[Span], list[Span]]],
) -> None:
    """Expected counts: `brute_force` above (sets of characters, scipy's matching)."""
    gold, predicted = corpus(pairs)
    counts = SpanCounts.of(gold, predicted, types=TYPES)
    assert (
        SpanCounts.of(gold, gold).total.strict == SpanCounts.of(gold, gold).total.gold
    )
    for label in TYPES:
        for name, expected in brute_force(gold, predicted, label).items():
            assert getattr(counts.by_type[label], name) == expected, name


@settings(deadline=None)
@given(sides, st.randoms(use_true_random=False))
def test_counts_of_shards_add_up_in_any_order(
    pairs: list[tuple[list[Span], list[Span]]], rng: random.Random
) -> None:
    """The counts of the whole are the sum of its parts, in any order, over the wire or
    not."""
    gold, predicted = corpus(pairs)
    seen_forms = {"abc", "d"}
    together = SpanCounts.of(gold, predicted, seen_forms, TYPES)
    order = rng.sample(range(len(gold)), len(gold))
    parts = [SpanCounts.of([gold[i]], [predicted[i]], seen_forms) for i in order]
    sent: dict[str, float] = {}
    for part in parts:
        for key, value in part.to_metrics().items():
            sent[key] = sent.get(key, 0.0) + value
    assert sum(parts, SpanCounts()).total == together.total
    assert SpanCounts.from_metrics(sent).total == together.total
    assert sum(parts, SpanCounts(dict.fromkeys(TYPES, SpanCounts().total))) == together
    assert (
        SpanCounts.from_metrics({**together.to_metrics(), "loss": 1.0, "strict/x": 2.0})
        == together
    )


def tags_to_spans(tags: Sequence[str]) -> list[Span]:
    """Token i is the characters 2i:2i+1; an I- that continues nothing begins a mention."""
    actual: list[Span] = []
    start, kind = 0, "O"
    for i, tag in enumerate([*tags, "O"]):
        prefix, _, label = tag.partition("-")
        if kind != "O" and (prefix != "I" or label != kind):
            actual.append(Span(2 * start, 2 * i - 1, kind))
            kind = "O"
        if kind == "O" and prefix != "O":
            start, kind = i, label
    return actual


def tagged(sequences: Sequence[Sequence[str]]) -> list[Document]:
    return [
        Document(f"s{i}", "x " * len(tags), tuple(tags_to_spans(tags)))
        for i, tags in enumerate(sequences)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_strict_equals_seqeval(seed: int) -> None:
    """seqeval 1.2.2 on the same random tags (malformed ones too), micro and by type."""
    rng = np.random.default_rng(seed)
    tags = ["O", "O", "B-ADR", "I-ADR", "B-Drug", "I-Drug", "B-SSI", "I-SSI"]
    gold = [list(rng.choice(tags, rng.integers(1, 30))) for _ in range(200)]
    pred = [
        [t if rng.random() < 0.8 else str(rng.choice(tags)) for t in row]
        for row in gold
    ]
    scores = SpanCounts.of(tagged(gold), tagged(pred)).scores()
    names = ("precision", "recall", "f1")
    micro = precision_recall_fscore_support(gold, pred, average="micro")
    assert [scores["strict"][n] for n in names] == pytest.approx(micro[:3])
    macro = precision_recall_fscore_support(gold, pred, average="macro")
    assert [scores["macro"]["strict"][n] for n in names] == pytest.approx(macro[:3])
    *by_type, support = precision_recall_fscore_support(gold, pred, average=None)
    for i, label in enumerate(("ADR", "Drug", "SSI")):
        ours = scores["by_type"][label]
        assert [ours["strict"][n] for n in names] == pytest.approx(
            [row[i] for row in by_type]
        )
        assert ours["support"] == support[i]


def slots() -> tuple[list[Document], list[Document]]:
    """Draw documents of five slots of ten characters with at most one mention a side in
    each."""
    rng = np.random.default_rng(5)
    sides: list[list[list[Span]]] = [[], []]
    for _ in range(60):
        for side in sides:
            side.append([])
            for slot in range(0, 50, 10):
                if rng.random() < 0.7:
                    start = slot + int(rng.integers(0, 6))
                    end = start + int(rng.integers(1, 5))
                    side[-1].append(Span(start, end, str(rng.choice(["ADR", "Drug"]))))
    gold, predicted = (
        [Document(str(i), "x" * 50, tuple(s)) for i, s in enumerate(side)]
        for side in sides
    )
    return gold, predicted


def nervaluated(
    gold: Sequence[Document], predicted: Sequence[Document]
) -> dict[str, Any]:
    """Return what nervaluate 1.2.1 counts."""
    sides = [
        [
            [{"label": s.label, "start": s.start, "end": s.end - 1} for s in d.spans]
            for d in side
        ]
        for side in (gold, predicted)  # its ends are inclusive
    ]
    counted: dict[str, Any] = Evaluator(
        *sides, tags=["ADR", "Drug"], loader="dict"
    ).evaluate()
    return counted


def test_error_kinds_equal_nervaluate_where_the_definitions_coincide() -> None:
    """nervaluate 1.2.1: "exact" looks at the place alone, "ent_type" at the type of an
    overlap."""
    sides = slots()
    theirs = nervaluated(*sides)["overall"]
    ours = Counter(
        each.kind
        for gold, predicted in zip(*sides, strict=True)
        for each in judge_mentions(gold.spans, predicted.spans)
    )
    assert set(ours) == set(KINDS)
    for schema in theirs.values():
        assert (ours["missed"], ours["spurious"]) == (schema.missed, schema.spurious)
    assert ours["correct"] == theirs["strict"].correct
    assert ours["correct"] + ours["type"] == theirs["exact"].correct
    assert ours["correct"] + ours["boundary"] == theirs["ent_type"].correct
    assert ours["type"] + ours["both"] == theirs["ent_type"].incorrect


def test_overlapping_mentions_are_paired_by_the_largest_overlap() -> None:
    """By hand: a prediction that equals a mention is not taken for one beside it."""
    gold = [Span(0, 9, "D"), Span(2, 4, "D"), Span(20, 25, "E")]
    predicted = [
        Span(2, 4, "D"),
        Span(8, 12, "D"),
        Span(20, 25, "D"),
        Span(21, 25, "E"),
    ]
    assert judge_mentions(gold, predicted) == [
        ("boundary", gold[0], predicted[1]),
        ("correct", gold[1], predicted[0]),
        ("type", gold[2], predicted[2]),
        ("spurious", None, predicted[3]),
    ]


def test_thousands_of_nested_mentions_are_judged_quickly() -> None:
    """Each overlaps all 3,000 of the other side: no pair is tried that need not be
    (else 15 s)."""
    gold = [Span(place, 9000 - place, "D") for place in range(3000)]
    with processor_time_below(3):
        for kind, label in (("correct", "D"), ("type", "E")):
            predictions = [replace(span, label=label) for span in gold]
            assert judge_mentions(gold, predictions) == [
                (kind, gold_document, predicted_document)
                for gold_document, predicted_document in zip(
                    gold, predictions, strict=True
                )
            ]


@given(sides)
@settings(max_examples=60, deadline=None)
def test_every_mention_is_judged_exactly_once(
    pairs: list[tuple[list[Span], list[Span]]],
) -> None:
    for gold, predicted in pairs:
        actual = judge_mentions(gold, predicted)
        assert sorted(e.gold for e in actual if e.gold) == sorted(set(gold))
        assert sorted(e.predicted for e in actual if e.predicted) == sorted(
            set(predicted)
        )
        assert sum(e.kind == "correct" for e in actual) == len({*gold} & {*predicted})


def test_relaxed_scores_equal_nervaluate_where_the_definitions_coincide() -> None:
    """nervaluate 1.2.1 "ent_type" and "strict", by type.

    They coincide where no mention overlaps two of the other side. Elsewhere nervaluate
    pairs predictions from left to right with the nearest free gold mention, even if
    that leaves a possible pair unused, and its strict pass lets an overlap use up a
    gold mention that a later prediction equals. So each slot of ten tokens here holds
    at most one mention a side.
    """
    gold, predicted = slots()
    theirs = nervaluated(gold, predicted)["entities"]
    counts = SpanCounts.of(gold, predicted)
    for label in ("ADR", "Drug"):
        ours = counts.by_type[label]
        assert ours.strict == theirs[label]["strict"].correct
        right = theirs[label]["ent_type"].correct
        assert ours.one_to_one == ours.relaxed_gold == ours.relaxed_predicted == right
        assert 0 < ours.strict < right < ours.gold


def test_one_long_prediction_can_match_two_mentions_only_when_relaxed() -> None:
    """By hand: one prediction covers two of three gold mentions."""
    mentions = [Span(0, 2, "D"), Span(3, 5, "D"), Span(8, 9, "D")]
    gold, predicted = corpus([(mentions, [Span(1, 6, "D")])])
    scores = SpanCounts.of(gold, predicted).scores()
    assert scores["strict"]["f1"] == 0.0
    assert scores["relaxed"] == pytest.approx(
        {"precision": 1, "recall": 2 / 3, "f1": 0.8}
    )
    assert scores["relaxed_one_to_one"] == pytest.approx(
        {"precision": 1, "recall": 1 / 3, "f1": 0.5}
    )


def test_recall_of_unseen_forms_is_counted_separately() -> None:
    """By hand: "Aspirin" was seen in train in another spelling, "ibuprofen" was not."""
    train = [
        Document("t", "took ASPIRIN  plus", (Span(5, 12, "Drug"), Span(5, 18, "Drug")))
    ]
    assert collect_forms(train) == {"aspirin", "aspirin plus"}
    text = "aspirin ibuprofen rash aspirin\nplus"
    gold = Document(
        "a", text, tuple(Span(*s, "Drug") for s in [(0, 7), (8, 17), (18, 22)])
    )
    predicted = replace(
        gold,
        spans=tuple(Span(*s, "Drug") for s in [(0, 7), (8, 17), (8, 22), (23, 35)]),
    )
    counts = SpanCounts.of([gold], [predicted], collect_forms(train)).by_type["Drug"]
    assert (counts.unseen_gold, counts.unseen_predicted, counts.unseen) == (2, 2, 1)
    assert SpanCounts.of([gold], [predicted], collect_forms(train)).scores()[
        "unseen"
    ] == {
        "precision": 0.5,
        "recall": 0.5,
        "f1": 0.5,
        "support": 2,
    }


def test_counts_of_documents_add_up_to_those_of_the_corpus() -> None:
    """Counts by document, summed, equal the counts of the corpus."""
    rng = random.Random(3)
    pairs = [
        tuple(
            [Span(s, s + rng.randint(1, 3), rng.choice(TYPES)) for s in range(0, 11, 3)]
            for _ in range(2)
        )
        for _ in range(30)
    ]
    gold, predicted = corpus(pairs)
    total = SpanCounts.of(gold, predicted).total
    expected = {
        "strict": [total.strict, total.predicted, total.strict, total.gold],
        "relaxed": [
            total.relaxed_predicted,
            total.predicted,
            total.relaxed_gold,
            total.gold,
        ],
        "relaxed_one_to_one": [
            total.one_to_one,
            total.predicted,
            total.one_to_one,
            total.gold,
        ],
    }
    for definition in DEFINITIONS:
        counts = count_by_document(gold, predicted, definition)
        assert counts.shape == (30, 4)
        assert counts.sum(axis=0).tolist() == expected[definition]
        one_document = SpanCounts.of(gold[4:5], predicted[4:5]).total
        assert counts[4, [1, 3]].tolist() == [one_document.predicted, one_document.gold]


def test_only_the_requested_entity_types_are_scored() -> None:
    gold, predicted = corpus(
        [([Span(0, 2, "ADR"), Span(3, 5, "Drug")], [Span(3, 5, "Drug")])]
    )
    counts = SpanCounts.of(gold, predicted, types=("Drug", "Route"))
    assert set(counts.by_type) == {"Drug", "Route"}
    assert counts.scores()["strict"]["f1"] == 1.0
    assert counts.scores()["by_type"]["Route"]["strict"]["f1"] == 0.0
    assert counts.scores()["macro"]["strict"]["f1"] == 1.0, (
        "a type that never occurs is no zero"
    )


def test_empty_inputs_score_0() -> None:
    for gold, predicted in (
        ([], []),
        corpus([([], [])]),
        corpus([([Span(0, 1, "D")], [])]),
    ):
        scores = SpanCounts.of(gold, predicted).scores()["strict"]
        assert scores == {"precision": 0.0, "recall": 0.0, "f1": 0.0}
    assert SpanCounts().scores()["macro"]["relaxed"]["f1"] == 0.0


def test_notes_without_annotations_have_no_f1() -> None:
    """A wrong mention among notes without any is no F1 of 0; one that is missed is."""
    spurious = SpanCounts.of(*corpus([([], [Span(0, 1, "D")])]))
    assert spurious.strict_f1 is None
    assert SpanCounts.of(*corpus([([Span(0, 1, "D")], [])])).strict_f1 == 0.0
    # One of two mentions is found, and nothing else: precision 1, recall 1/2.
    half = SpanCounts.of(
        *corpus([([Span(0, 1, "D"), Span(2, 3, "D")], [Span(0, 1, "D")])])
    )
    assert half.strict_f1 == pytest.approx(2 / 3)


def test_documents_that_do_not_match_are_refused() -> None:
    """Errors name the document and the numbers, never its text."""
    gold, predicted = corpus([([Span(0, 1, "D")], []), ([], [])])
    with pytest.raises(DataError, match="2 gold documents but 1"):
        SpanCounts.of(gold, predicted[:1])
    with pytest.raises(DataError, match="document 1 is 'd0' in gold and 'd1'"):
        SpanCounts.of(gold, predicted[::-1])
    with pytest.raises(DataError, match="another in the predictions") as caught:
        SpanCounts.of(gold, [replace(d, text="note text") for d in predicted])
    assert "note text" not in str(caught.value)
    for start, end in ((3, 3), (-1, 2), (0, LENGTH + 1)):
        bad = [replace(predicted[0], spans=(Span(start, end, "D"),)), predicted[1]]
        with pytest.raises(DataError, match=f"'d0': span {start}:{end}"):
            SpanCounts.of(gold, bad)
    with pytest.raises(ConfigError, match="did you mean 'strict'"):
        count_by_document(gold, predicted, "strickt")


def test_the_macro_mean_includes_a_type_that_is_only_predicted() -> None:
    """By hand: ADR is right, Drug is only predicted, and nobody has Dose, which has no
    score."""
    gold = [Document("1", "a b c", (Span(0, 1, "ADR"),))]
    actual = [Document("1", "a b c", (Span(0, 1, "ADR"), Span(2, 3, "Drug")))]
    macro = SpanCounts.of(gold, actual, types=("ADR", "Drug", "Dose")).scores()["macro"]
    for definition in ("strict", "relaxed", "relaxed_one_to_one"):
        assert macro[definition] == {"precision": 0.5, "recall": 0.5, "f1": 0.5}


def test_a_mention_is_paired_with_the_one_it_overlaps_most() -> None:
    """By hand: 0-10 shares one character with 9-20 and four with 2-6, so it is paired
    with 2-6."""
    gold = [Span(0, 10, "ADR")]
    actual = [Span(2, 6, "ADR"), Span(9, 20, "ADR")]
    kinds = {
        (each.kind, each.gold, each.predicted) for each in judge_mentions(gold, actual)
    }
    assert kinds == {("boundary", gold[0], actual[0]), ("spurious", None, actual[1])}


def test_the_kappa_of_tokens_equals_scikit_learn() -> None:
    """Of two annotations that use the types at different rates."""
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(2)
    text = " ".join("abcdefghij" * 6)
    first = rng.choice(["", "ADR", "Drug"], 60, p=[0.5, 0.4, 0.1])
    second = np.where(rng.random(60) < 0.6, first, rng.choice(["", "Drug"], 60))
    documents = [
        [
            Document(
                "1",
                text,
                tuple(
                    Span(2 * i, 2 * i + 1, label)
                    for i, label in enumerate(row)
                    if label
                ),
            )
        ]
        for row in (first.tolist(), second.tolist())
    ]
    number, kappa = compute_token_kappa(*documents)
    assert number == 60
    assert kappa == pytest.approx(metrics.cohen_kappa_score(first, second), rel=1e-12)


def test_the_kappa_of_thousands_of_types_takes_little_memory() -> None:
    """A table of all pairs of types would take 450 MB."""
    text = "a " * 3750
    documents = [
        [
            Document(
                "1",
                text,
                tuple(Span(2 * i, 2 * i + 1, f"{side}{i}") for i in range(3750)),
            )
        ]
        for side in ("one ", "other ")
    ]
    tracemalloc.start()
    assert compute_token_kappa(*documents) == (3750, 0.0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50_000_000


def test_a_chain_of_overlapping_mentions_takes_little_time_and_memory() -> None:
    """Every second gold mention overlaps two predictions, and all others one of these.

    A table of all pairs would take 200 MB, and a search from each gold mention back to
    the first one half a minute.
    """
    number = 10_000
    text = "a" * (10 * number + 10)
    gold = [Span(10 * i + 4, 10 * i + 6, "A") for i in range(number)]
    gold += [Span(10 * i + 8, 10 * i + 12, "A") for i in range(number)]
    predicted = [Span(10 * i, 10 * i + 10, "A") for i in range(number)]
    documents = [[Document("1", text, tuple(spans))] for spans in (gold, predicted)]
    with processor_time_below(8):
        tracemalloc.start()
        counts = SpanCounts.of(*documents)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert counts.by_type["A"].one_to_one == number
        assert peak < 50_000_000


@pytest.mark.parametrize(("points", "expected"), [(9, False), (11, True)])
def test_a_difference_of_more_than_ten_points_between_overlap_scores_is_shown(
    points: int, expected: bool
) -> None:
    scores = {
        "relaxed": {"f1": 0.6},
        "relaxed_one_to_one": {"f1": 0.6 - points / 100},
    }
    assert overlap_differs(scores) is expected
