"""Tags against seqeval, brute force, and each other."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seqeval.metrics.sequence_labeling import get_entities

from fednotes.core.errors import DataError
from fednotes.core.types import Document, Scheme, Span, TagSet
from fednotes.data.tags import (
    Alignment,
    FlattenCounts,
    FlattenRule,
    allowed_transitions,
    decode,
    encode,
    flatten,
    relabel,
    runs,
    types_of,
)

SCHEMES: tuple[Scheme, ...] = ("BIO", "BIOES", "IO")
TYPES = ("ADR", "Drug")


def _tokens(lengths: list[tuple[int, int]]) -> np.ndarray:
    """Offsets of tokens, each given as (gap before it, its length)."""
    rows, position = [], 0
    for gap, length in lengths:
        rows.append((position + gap, position + gap + length))
        position = rows[-1][1]
    return np.array(rows, dtype=np.int32).reshape(-1, 2)


TOKENS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), max_size=12).map(_tokens)


@st.composite
def _aligned(draw: st.DrawFn) -> tuple[np.ndarray, list[Span]]:
    """Tokens and flat spans on their boundaries."""
    tokens = draw(TOKENS)
    spans, i = [], 0
    while i < len(tokens):
        length = draw(st.integers(0, 3))
        last = min(i + max(length, 1), len(tokens))
        if length:
            label = draw(st.sampled_from(TYPES))
            spans.append(Span(int(tokens[i, 0]), int(tokens[last - 1, 1]), label))
        i = last
    return tokens, spans


@pytest.mark.parametrize("scheme", SCHEMES)
@settings(max_examples=200, deadline=None)
@given(case=_aligned())
def test_decode_undoes_encode(scheme: Scheme, case: tuple[np.ndarray, list[Span]]) -> None:
    """Identity; under IO adjacent spans of one type come back as one, which `merged` counts."""
    tokens, spans = case
    tagset = TagSet(TYPES, scheme)
    ids, alignment = encode(spans, tokens, tagset)
    expected: list[Span] = []
    after = {int(a): int(b) for a, b in zip(tokens[:-1, 1], tokens[1:, 0], strict=True)}
    merged = 0
    for span in spans:
        last = expected[-1] if expected else None
        if scheme == "IO" and last and last.label == span.label and after[last.end] == span.start:
            expected[-1] = Span(last.start, span.end, span.label)
            merged += 1
        else:
            expected.append(span)
    assert decode(ids, tokens, tagset) == expected
    assert alignment == Alignment(exact=len(spans) - merged, merged=merged)


@settings(max_examples=300, deadline=None)
@given(TOKENS, st.data())
def test_encode_of_any_flat_spans(tokens: np.ndarray, data: st.DataObject) -> None:
    """Brute force: each token belongs to the first span that overlaps it; counts add up.

    exact and snapped spans come back at the union of their tokens, shortened ones as what is
    left, merged and lost ones not at all.
    """
    edges = sorted(set(data.draw(st.lists(st.integers(0, 30), max_size=10))))
    pairs = zip(edges[::2], edges[1::2], strict=False)
    spans = [Span(a, b, data.draw(st.sampled_from(TYPES))) for a, b in pairs]
    owner = [
        next((k for k, s in enumerate(spans) if s.start < b and a < s.end), None) for a, b in tokens
    ]
    expected, counts = [], dict.fromkeys(("exact", "snapped", "shortened", "gone"), 0)
    for k, span in enumerate(spans):
        touched = [i for i, (a, b) in enumerate(tokens) if span.start < b and a < span.end]
        own = [i for i in touched if owner[i] == k]
        if own:
            place = int(tokens[own[0], 0]), int(tokens[own[-1], 1])
            expected.append(Span(*place, span.label))
            exact = place == (span.start, span.end)
            counts["shortened" if own != touched else "exact" if exact else "snapped"] += 1
        else:
            counts["gone"] += 1
    tagset = TagSet(TYPES, "BIOES")
    ids, found = encode(spans, tokens, tagset)
    assert decode(ids, tokens, tagset) == expected
    assert found.spans == len(spans)
    assert (found.exact, found.snapped, found.shortened) == (
        counts["exact"],
        counts["snapped"],
        counts["shortened"],
    )
    assert found.merged + found.lost == counts["gone"]


def test_a_collision_is_counted_as_what_it_is() -> None:
    """Two mentions inside one token "60mg" become one (merged) or one is lost, by type."""
    tokens = np.array([[0, 4], [5, 8]])
    same = [Span(0, 2, "Drug"), Span(2, 4, "Drug")]
    other = [Span(0, 2, "Drug"), Span(2, 4, "ADR"), Span(3, 8, "ADR")]
    assert encode(same, tokens, TagSet(TYPES))[1] == Alignment(snapped=1, merged=1)
    ids, counts = encode(other[:2], tokens, TagSet(TYPES))
    assert counts == Alignment(snapped=1, lost=1)
    ids, counts = encode([other[0], other[2]], tokens, TagSet(TYPES))
    assert counts == Alignment(snapped=1, shortened=1)
    assert [TagSet(TYPES).tags[i] for i in ids] == ["B-Drug", "B-ADR"]
    assert encode([Span(4, 5, "ADR")], tokens, TagSet(TYPES))[1] == Alignment(lost=1)


def test_an_unknown_label_is_named() -> None:
    """The message names the label and the tag set."""
    with pytest.raises(DataError, match=r"'WD' is not in the tag set \{ADR, Drug\}"):
        encode([Span(0, 1, "WD")], np.array([[0, 1]]), TagSet(TYPES))


@pytest.mark.parametrize("scheme", ["BIO", "BIOES"])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_runs_equal_seqeval(scheme: Scheme, data: st.DataObject) -> None:
    """seqeval's `get_entities` ports conlleval: any tag sequence, legal or not."""
    tagset = TagSet(TYPES, scheme)
    tags = data.draw(st.lists(st.sampled_from(tagset.tags), max_size=14))
    found = runs(np.array([tagset.tags.index(t) for t in tags], dtype=np.int64), tagset)
    rows = [(TYPES[k], a, b - 1) for a, b, k in zip(*map(np.ndarray.tolist, found), strict=True)]
    assert rows == get_entities(tags)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_allowed_transitions_are_what_encode_writes(scheme: Scheme) -> None:
    """All sequences of up to 4 tags: allowed if and only if encode(decode(sequence)) is it."""
    tagset = TagSet(("X", "Y"), scheme)
    start, transition, end = allowed_transitions(tagset)
    T = len(tagset.tags)
    assert (start.shape, transition.shape, end.shape) == ((T,), (T, T), (T,))
    for length in range(1, 4 if scheme == "BIOES" else 5):
        tokens = np.array([(2 * i, 2 * i + 1) for i in range(length)])
        for ids in product(range(T), repeat=length):
            legal = start[ids[0]] and end[ids[-1]]
            legal = legal and all(transition[a, b] for a, b in pairwise(ids))
            again = encode(decode(np.array(ids), tokens, tagset), tokens, tagset)[0]
            assert bool(legal) == (tuple(again) == ids), ids


SPANS = st.lists(
    st.builds(
        lambda start, gap, rest, label, broken: Span(
            start,
            start + 2 + gap + rest,
            label,
            ((start, start + 1), (start + 1 + gap, start + 2 + gap + rest)) if broken else (),
        ),
        st.integers(0, 20),
        st.integers(0, 4),
        st.integers(0, 4),
        st.sampled_from(TYPES),
        st.booleans(),
    ),
    max_size=7,
)


def _brute(spans: list[Span], rule: FlattenRule) -> tuple[list[Span], FlattenCounts]:
    """`flatten` by comparing every pair of mentions."""
    unique = list(dict.fromkeys(spans))

    def inside(a: Span, b: Span) -> bool:
        return b.start <= a.start and a.end <= b.end

    def overlap(a: Span, b: Span) -> bool:
        return a.start < b.end and b.start < a.end

    nested, crossing, broken, touched = set(), set(), set(), set()
    order = sorted(unique, key=lambda s: (s.start, -s.end, s.label, s.fragments))
    for i, a in enumerate(order):
        if a.fragments:
            broken.add(a)
        for j, b in enumerate(order):
            if i == j or not overlap(a, b):
                continue
            touched.add(a)
            # Of two mentions in one place, the later in the order is the nested one.
            if inside(a, b) and not (inside(b, a) and i < j):
                nested.add(a)
            elif not inside(a, b) and not inside(b, a):
                crossing.add(a)
    if rule == "drop":
        kept = [Span(s.start, s.end, s.label) for s in order if s not in touched | broken]
    else:
        first = rule == "first_fragment"
        flat = [Span(*s.fragments[0], s.label) if first and s.fragments else s for s in order]
        left = sorted(flat, key=lambda s: (-(s.end - s.start), s.start, s.label))
        kept = []
        while left:
            best = left[0]
            kept.append(Span(best.start, best.end, best.label))
            left = [s for s in left if not overlap(s, best)]
    counts = FlattenCounts(
        len(spans), len(kept), len(spans) - len(unique), len(nested), len(crossing), len(broken)
    )
    return sorted(kept), counts


@pytest.mark.parametrize("rule", ["outermost", "first_fragment", "drop"])
@settings(max_examples=300, deadline=None)
@given(spans=SPANS)
def test_flatten_equals_brute_force(rule: FlattenRule, spans: list[Span]) -> None:
    """See `_brute`; and what comes out is flat, continuous and in order."""
    found, counts = flatten(spans, rule)
    assert (list(found), counts) == _brute(spans, rule)
    assert all(a.end <= b.start for a, b in pairwise(found))
    assert not any(span.fragments for span in found)


def test_counts_add() -> None:
    """Field by field."""
    assert Alignment(1, 2, 3, 4, 5) + Alignment(1, 1, 1, 1, 1) == Alignment(2, 3, 4, 5, 6)
    assert Alignment(1, 2, 3, 4, 5).spans == 15
    total = FlattenCounts(1, 2, 3, 4, 5, 6) + FlattenCounts(6, 5, 4, 3, 2, 1)
    assert total == FlattenCounts(7, 7, 7, 7, 7, 7)


def test_relabel_maps_drops_and_keeps() -> None:
    """Mapped first, then kept; a document that does not change is the same object."""
    spans = (Span(0, 1, "ADR"), Span(1, 2, "Drug", ((1, 2),)), Span(2, 3, "WD"))
    documents = (Document("a", "xyz", spans), Document("b", "x", (Span(0, 1, "Drug"),)))
    first, second = relabel(documents, {"ADR": "ADE", "WD": ""}, None)
    assert first.spans == (Span(0, 1, "ADE"), Span(1, 2, "Drug", ((1, 2),)))
    assert second is documents[1]
    kept = relabel(documents, {"ADR": "ADE"}, {"ADE"})
    assert [d.spans for d in kept] == [(Span(0, 1, "ADE"),), ()]
    assert types_of(documents) == ("ADR", "Drug", "WD")
