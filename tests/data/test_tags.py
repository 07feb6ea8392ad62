"""Tags compared with seqeval and brute force; sampled tag sets; encoded corpora."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import combinations, pairwise, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seqeval.metrics.sequence_labeling import get_entities

from fednotes.core.errors import ConfigError, DataError
from fednotes.core.types import Document, Scheme, Span, TagSet
from fednotes.data import batches
from fednotes.data.batches import draw_epoch_batches, encode_corpus
from fednotes.data.tags import (
    Alignment,
    FlattenCounts,
    FlattenRule,
    TagSets,
    decode_tags,
    draw_appendix_d,
    draw_disjoint,
    encode_mentions,
    encode_tags,
    find_allowed_transitions,
    find_spans,
    flatten,
    list_types,
    relabel,
    split_label,
)

SCHEMES: tuple[Scheme, ...] = ("BIO", "BIOES", "IO")
TYPES = ("ADR", "Drug")


def _tokens(lengths: list[tuple[int, int]]) -> np.ndarray:
    """Return offsets of tokens, each given as (gap before it, its length)."""
    rows, position = [], 0
    for gap, length in lengths:
        rows.append((position + gap, position + gap + length))
        position = rows[-1][1]
    return np.array(rows, dtype=np.int32).reshape(-1, 2)


TOKENS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), max_size=12).map(
    _tokens
)


@st.composite
def _aligned(draw: st.DrawFn) -> tuple[np.ndarray, list[Span]]:
    """Draw tokens and flat spans on their boundaries."""
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
def test_decoding_inverts_encoding(
    scheme: Scheme, case: tuple[np.ndarray, list[Span]]
) -> None:
    """Identity; under IO adjacent spans of one type come back as one, which `merged`
    counts."""
    tokens, spans = case
    tagset = TagSet(TYPES, scheme)
    ids, alignment = encode_tags(spans, tokens, tagset)
    expected: list[Span] = []
    after = {int(a): int(b) for a, b in zip(tokens[:-1, 1], tokens[1:, 0], strict=True)}
    merged = 0
    for span in spans:
        last = expected[-1] if expected else None
        if (
            scheme == "IO"
            and last
            and last.label == span.label
            and after[last.end] == span.start
        ):
            expected[-1] = Span(last.start, span.end, span.label)
            merged += 1
        else:
            expected.append(span)
    assert decode_tags(ids, tokens, tagset) == expected
    assert alignment == Alignment(exact=len(spans) - merged, merged=merged)


@settings(max_examples=300, deadline=None)
@given(TOKENS, st.data())
def test_encoding_of_flat_spans_equals_brute_force(
    tokens: np.ndarray, data: st.DataObject
) -> None:
    """Brute force: each token belongs to the first span that overlaps it; counts add
    up.

    exact and snapped spans come back at the union of their tokens, shortened ones as
    what is left, merged and lost ones not at all.
    """
    edges = sorted(set(data.draw(st.lists(st.integers(0, 30), max_size=10))))
    pairs = zip(edges[::2], edges[1::2], strict=False)
    spans = [Span(a, b, data.draw(st.sampled_from(TYPES))) for a, b in pairs]
    owner = [
        next((k for k, s in enumerate(spans) if s.start < b and a < s.end), None)
        for a, b in tokens
    ]
    expected, counts = [], dict.fromkeys(("exact", "snapped", "shortened", "gone"), 0)
    for k, span in enumerate(spans):
        touched = [
            i for i, (a, b) in enumerate(tokens) if span.start < b and a < span.end
        ]
        owned = [i for i in touched if owner[i] == k]
        if owned:
            place = int(tokens[owned[0], 0]), int(tokens[owned[-1], 1])
            expected.append(Span(*place, span.label))
            exact = place == (span.start, span.end)
            counts[
                "shortened" if owned != touched else "exact" if exact else "snapped"
            ] += 1
        else:
            counts["gone"] += 1
    tagset = TagSet(TYPES, "BIOES")
    ids, actual = encode_tags(spans, tokens, tagset)
    assert decode_tags(ids, tokens, tagset) == expected
    assert actual.spans == len(spans)
    assert (actual.exact, actual.snapped, actual.shortened) == (
        counts["exact"],
        counts["snapped"],
        counts["shortened"],
    )
    assert actual.merged + actual.lost == counts["gone"]


def test_a_collision_in_a_token_is_counted_as_merged_shortened_or_lost() -> None:
    """Two mentions inside one token "60mg" become one (merged) or one is lost, by type."""
    tokens = np.array([[0, 4], [5, 8]])
    same = [Span(0, 2, "Drug"), Span(2, 4, "Drug")]
    colliding = [Span(0, 2, "Drug"), Span(2, 4, "ADR"), Span(3, 8, "ADR")]
    assert encode_tags(same, tokens, TagSet(TYPES))[1] == Alignment(snapped=1, merged=1)
    ids, counts = encode_tags(colliding[:2], tokens, TagSet(TYPES))
    assert counts == Alignment(snapped=1, lost=1)
    ids, counts = encode_tags([colliding[0], colliding[2]], tokens, TagSet(TYPES))
    assert counts == Alignment(snapped=1, shortened=1)
    assert [TagSet(TYPES).tags[i] for i in ids] == ["B-Drug", "B-ADR"]
    assert encode_tags([Span(4, 5, "ADR")], tokens, TagSet(TYPES))[1] == Alignment(
        lost=1
    )


def test_the_longer_of_two_mentions_with_one_start_gets_the_tokens() -> None:
    """In whatever order they are given, and whatever their types; by hand."""
    tokens, tagset = np.array([[0, 4], [5, 8]]), TagSet(TYPES)
    for short, long in (("ADR", "Drug"), ("Drug", "ADR")):
        for spans in (
            [Span(0, 4, short), Span(0, 8, long)],
            [Span(0, 8, long), Span(0, 4, short)],
        ):
            ids, counts = encode_tags(spans, tokens, tagset)
            assert [tagset.tags[i] for i in ids] == [f"B-{long}", f"I-{long}"]
            assert counts == Alignment(exact=1, lost=1)


def test_an_error_names_an_unknown_label() -> None:
    """The message names the label and the tag set."""
    with pytest.raises(DataError, match=r"'WD' is not in the tag set \{ADR, Drug\}"):
        encode_tags([Span(0, 1, "WD")], np.array([[0, 1]]), TagSet(TYPES))


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("Sign_symptom", "sign symptom"),
        ("AdverseDrugReaction", "adverse drug reaction"),
        ("ADR", "adr"),
        ("ADEDrug", "ade drug"),
        ("B12Level", "b 12 level"),
        ("Größe", "größe"),
    ],
)
def test_the_words_of_an_entity_type_come_from_its_name(label: str, words: str) -> None:
    assert split_label(label) == words


@pytest.mark.parametrize("scheme", ["BIO", "BIOES"])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_spans_of_any_tag_sequence_equal_seqeval(
    scheme: Scheme, data: st.DataObject
) -> None:
    """seqeval's `get_entities` ports conlleval: any tag sequence, legal or not."""
    tagset = TagSet(TYPES, scheme)
    tags = data.draw(st.lists(st.sampled_from(tagset.tags), max_size=14))
    actual = find_spans(
        np.array([tagset.tags.index(t) for t in tags], dtype=np.int64), tagset
    )
    rows = [
        (TYPES[k], a, b - 1)
        for a, b, k in zip(*map(np.ndarray.tolist, actual), strict=True)
    ]
    assert rows == get_entities(tags)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_allowed_transitions_are_those_that_encoding_produces(scheme: Scheme) -> None:
    """All sequences of up to 4 tags: allowed if and only if encode(decode(sequence)) is
    it."""
    tagset = TagSet(("X", "Y"), scheme)
    start, transition, end = find_allowed_transitions(tagset)
    T = len(tagset.tags)
    assert (start.shape, transition.shape, end.shape) == ((T,), (T, T), (T,))
    for length in range(1, 4 if scheme == "BIOES" else 5):
        tokens = np.array([(2 * i, 2 * i + 1) for i in range(length)])
        for ids in product(range(T), repeat=length):
            legal = start[ids[0]] and end[ids[-1]]
            legal = legal and all(transition[a, b] for a, b in pairwise(ids))
            again = encode_tags(
                decode_tags(np.array(ids), tokens, tagset), tokens, tagset
            )[0]
            assert bool(legal) == (tuple(again) == ids), ids


SPANS = st.lists(
    st.builds(
        lambda start, gap, last_gap, label, broken: Span(
            start,
            start + 2 + gap + last_gap,
            label,
            ((start, start + 1), (start + 1 + gap, start + 2 + gap + last_gap))
            if broken
            else (),
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
    """Flatten by comparing every pair of mentions."""
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
        flat_spans = [
            Span(s.start, s.end, s.label) for s in order if s not in touched | broken
        ]
    else:
        first = rule == "first_fragment"
        flat = [
            Span(*s.fragments[0], s.label) if first and s.fragments else s
            for s in order
        ]
        remaining = sorted(flat, key=lambda s: (-(s.end - s.start), s.start, s.label))
        flat_spans = []
        while remaining:
            best = remaining[0]
            flat_spans.append(Span(best.start, best.end, best.label))
            remaining = [s for s in remaining if not overlap(s, best)]
    counts = FlattenCounts(
        len(spans),
        len(flat_spans),
        len(spans) - len(unique),
        len(nested),
        len(crossing),
        len(broken),
    )
    return sorted(flat_spans), counts


@pytest.mark.parametrize("rule", ["outermost", "first_fragment", "drop"])
@settings(max_examples=300, deadline=None)
@given(spans=SPANS)
def test_flatten_equals_brute_force(rule: FlattenRule, spans: list[Span]) -> None:
    """See `_brute`; and what comes out is flat, continuous and in order."""
    actual, counts = flatten(spans, rule)
    assert (list(actual), counts) == _brute(spans, rule)
    assert all(a.end <= b.start for a, b in pairwise(actual))
    assert not any(span.fragments for span in actual)


@settings(max_examples=200, deadline=None)
@given(spans=SPANS)
def test_mentions_of_different_types_can_be_kept(spans: list[Span]) -> None:
    """Those of each type are flattened without the others."""
    expected: list[Span] = []
    total = FlattenCounts()
    for label in TYPES:
        flat, counts = _brute([s for s in spans if s.label == label], "outermost")
        expected += flat
        total += counts
    assert flatten(spans, "keep") == (tuple(sorted(expected)), total)


def test_overlapping_mentions_are_encoded_as_ranges_of_tokens() -> None:
    """The first two words, the second one alone, and half of the last one."""
    tokens = np.array([(0, 3), (4, 9), (10, 15)])
    spans = [Span(4, 9, "Y"), Span(11, 15, "X"), Span(0, 9, "X")]
    ranges = encode_mentions(spans, tokens, TagSet(("X", "Y"), overlaps=True))
    assert ranges.tolist() == [[0, 2, 0], [1, 2, 1], [2, 3, 0]]
    assert encode_mentions([], tokens, TagSet(("X",))).shape == (0, 3)


def test_relabelling_maps_drops_and_keeps_labels() -> None:
    """Mapped first, then kept; a document that does not change is the same object."""
    spans = (Span(0, 1, "ADR"), Span(1, 2, "Drug", ((1, 2),)), Span(2, 3, "WD"))
    documents = (Document("a", "xyz", spans), Document("b", "x", (Span(0, 1, "Drug"),)))
    first, second = relabel(documents, {"ADR": "ADE", "WD": ""}, None)
    assert first.spans == (Span(0, 1, "ADE"), Span(1, 2, "Drug", ((1, 2),)))
    assert second is documents[1]
    only_ade = relabel(documents, {"ADR": "ADE"}, {"ADE"})
    assert [d.spans for d in only_ade] == [(Span(0, 1, "ADE"),), ()]
    assert list_types(documents) == ("ADR", "Drug", "WD")


# ---- tag sets drawn at random: what always holds, and how often each outcome comes


Exact = dict[TagSets, Fraction]
NAMES = tuple("GECAFBDHJI")  # in no alphabetic order: the order given is the order kept


def misfit(draw: Callable[[int], TagSets], exact: Exact, draws: int) -> float:
    """How far the draws of seeds 0, 1, … are from the exact probabilities.

    Pearson's statistic, standardised by Wilson and Hilferty (1931): near a standard
    normal.
    """
    counts = Counter(draw(seed) for seed in range(draws))
    assert set(counts) <= set(exact)
    expected = {outcome: float(p) * draws for outcome, p in exact.items()}
    assert min(expected.values()) > 5
    statistic = sum((counts[o] - e) ** 2 / e for o, e in expected.items())
    freedom = len(exact) - 1
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5


def in_order(types: str, sets: list[set[str]]) -> TagSets:
    return tuple(tuple(t for t in types if t in site_types) for site_types in sets)


def deals(types: str, sizes: tuple[int, ...]) -> Iterator[TagSets]:
    """Yield every way to cut an order of the types into sets, with repeats."""
    for order in permutations(types):
        remaining = list(order)
        yield in_order(
            types, [{remaining.pop() for _ in range(size)} for size in sizes]
        )


def exact_disjoint(types: str, all_sizes: list[tuple[int, ...]]) -> Exact:
    actual = Counter(deal for sizes in all_sizes for deal in deals(types, sizes))
    return {deal: Fraction(n, actual.total()) for deal, n in actual.items()}


def exact_appendix_d(types: str, sites: int) -> Exact:
    """Return every path through Appendix D's text with its probability, as a tree."""
    unique_types = list(permutations(types, sites))
    paths = {
        (u, in_order(types, [{t} for t in u])): Fraction(1, len(unique_types))
        for u in unique_types
    }
    for label in types:
        grown: dict[tuple[tuple[str, ...], TagSets], Fraction] = {}
        for (unique, sets), p in paths.items():
            options = [(sets, Fraction(1))]
            if label not in unique:
                options = []
                for n in (1, 2):
                    places = list(combinations(range(sites), n))
                    for place in places:
                        more = [
                            {*s, label} if i in place else set(s)
                            for i, s in enumerate(sets)
                        ]
                        options.append(
                            (in_order(types, more), Fraction(1, 2 * len(places)))
                        )
            for after, q in options:
                grown[unique, after] = grown.get((unique, after), Fraction(0)) + p * q
        paths = grown
    outcomes: Exact = {}
    for (_, sets), p in paths.items():
        outcomes[sets] = outcomes.get(sets, Fraction(0)) + p
    assert sum(outcomes.values()) == 1
    return outcomes


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 10), st.integers(1, 6), st.integers(0, 3), st.integers(-5, 2**40))
def test_disjoint_sets_have_no_type_in_common(
    number: int, sites: int, per_site: int, seed: int
) -> None:
    types = NAMES[:number]
    if number < sites or sites * per_site > number:
        with pytest.raises(ConfigError, match=f"{sites} sites"):
            draw_disjoint(types, sites, per_site, seed)
        return
    sets = draw_disjoint(types, sites, per_site, seed)
    named = [t for site_types in sets for t in site_types]
    assert len(sets) == sites
    assert len(named) == len(set(named)) == (sites * per_site or number)
    sizes = {len(site_types) for site_types in sets}
    assert sizes == {per_site} if per_site else max(sizes) - min(sizes) <= 1
    assert all(
        list(site_types) == [t for t in types if t in site_types] for site_types in sets
    )
    assert sets == draw_disjoint(types, sites, per_site, seed)


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 10), st.integers(2, 6), st.integers(-5, 2**40))
def test_appendix_d_gives_each_site_a_distinct_type(
    number: int, sites: int, seed: int
) -> None:
    types = NAMES[:number]
    if number < sites:
        with pytest.raises(ConfigError, match="cannot each have a type that no other"):
            draw_appendix_d(types, sites, seed)
        return
    sets = draw_appendix_d(types, sites, seed)
    times = Counter(t for site_types in sets for t in site_types)
    assert set(times) == set(types)
    assert set(times.values()) <= {1, 2}
    assert all(any(times[t] == 1 for t in site_types) for site_types in sets)
    assert all(
        list(site_types) == [t for t in types if t in site_types] for site_types in sets
    )
    assert sets == draw_appendix_d(types, sites, seed)


def test_ten_types_are_dealt_evenly_over_six_sites() -> None:
    assert sorted(len(site_types) for site_types in draw_disjoint(NAMES, 6, 0, 3)) == [
        1,
        1,
        2,
        2,
        2,
        2,
    ]
    assert len({draw_disjoint(NAMES, 6, 0, seed) for seed in range(5)}) == 5


def test_disjoint_sets_are_equally_likely() -> None:
    """Against the enumeration of every order of the types."""
    assert (
        misfit(
            lambda s: draw_disjoint("abcd", 2, 1, s),
            exact_disjoint("abcd", [(1, 1)]),
            3000,
        )
        < 3
    )
    deals_of_types = exact_disjoint("abc", [(2, 1), (1, 2)])
    assert len(deals_of_types) == 6
    assert misfit(lambda s: draw_disjoint("abc", 2, 0, s), deals_of_types, 3000) < 3


@pytest.mark.parametrize(("types", "sites"), [("abc", 2), ("abcd", 3), ("ab", 2)])
def test_sets_of_appendix_d_have_the_probabilities_of_its_text(
    types: str, sites: int
) -> None:
    """Against the enumeration of every path through the paper's text, in fractions."""
    exact = exact_appendix_d(types, sites)
    assert misfit(lambda seed: draw_appendix_d(types, sites, seed), exact, 4000) < 3


def test_the_measure_detects_a_biased_draw() -> None:
    """The measure that the tests above rely on: outcomes of another design are told
    apart."""
    exact = exact_appendix_d("abc", 2)
    one_place = [deal for deal in exact if sum(map(len, deal)) == 3]
    assert misfit(lambda seed: one_place[seed % len(one_place)], exact, 4000) > 10


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (
            lambda: draw_disjoint("abc", 2, 2),
            "need 4 types, but there are 3: lower per_site",
        ),
        (
            lambda: draw_disjoint("abc", 4),
            r"4 sites cannot .* there are 3 types \(a, b, c\)",
        ),
        (lambda: draw_disjoint("abc", 2, -1), "lower per_site"),
        (lambda: draw_disjoint("aba", 2), "a type is named twice"),
        (lambda: draw_disjoint("abc", 0), "0 sites: expected at least one"),
        (lambda: draw_appendix_d("", 2), r"0 types \(none\)"),
        (lambda: draw_appendix_d("abc", 1), "2 sites or more"),
    ],
)
def test_impossible_numbers_of_types_and_sites_are_refused(
    draw: Callable[[], TagSets], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        draw()


# ---- encoded corpora and mini-batches


BIO = TagSet(("ADR", "Drug"))


def _document(
    text: str, *mentions: tuple[str, str], sentences: bool = False
) -> Document:
    """Return a document with spans at each mention's first occurrence."""
    spans = tuple(
        Span(text.index(form), text.index(form) + len(form), label)
        for form, label in mentions
    )
    bounds = ((0, len(text)),) if sentences else ()
    return Document("d", text, spans, sentences=bounds)


def test_arrays_describe_the_tokens() -> None:
    """By hand: two sentences over two documents, forms shared between them."""
    documents = [
        _document(
            "Aspirin causes severe headache.",
            ("Aspirin", "Drug"),
            ("severe headache", "ADR"),
        ),
        _document("No headache."),
    ]
    encoded = encode_corpus(documents, BIO)
    assert encoded.sentence_document.tolist() == [0, 1]
    assert encoded.bounds.tolist() == [0, 5, 8]
    assert encoded.lengths.tolist() == [5, 3]
    assert encoded.forms == ("Aspirin", "causes", "severe", "headache", ".", "No")
    assert encoded.form.tolist() == [0, 1, 2, 3, 4, 5, 3, 4]
    names = [BIO.tags[t] for t in encoded.tags]
    assert names == ["B-Drug", "O", "B-ADR", "I-ADR", "O", "O", "O", "O"]
    owner = np.repeat(encoded.sentence_document, encoded.lengths)
    for token, (start, end) in enumerate(encoded.offsets):
        text = documents[owner[token]].text
        assert text[start:end] == encoded.forms[encoded.form[token]]


def test_empty_documents_encode_to_no_sentences() -> None:
    empty = encode_corpus([], BIO)
    assert empty.sentences == 0
    assert empty.offsets.shape == (0, 2)
    blank = encode_corpus([Document("a", ""), Document("b", " \n\t\n")], BIO)
    assert blank.sentences == 0
    assert blank.bounds.tolist() == [0]


def test_a_gold_span_outside_every_sentence_is_left_out() -> None:
    text = "Nausea. Header line"
    spans = (Span(0, 6, "ADR"), Span(8, 14, "ADR"))
    encoded = encode_corpus([Document("d", text, spans, sentences=((0, 7),))], BIO)
    assert [BIO.tags[tag] for tag in encoded.tags] == ["B-ADR", "O"]


@pytest.mark.parametrize("scheme", ["BIO", "BIOES", "IO"])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_long_sentences_are_split_between_entities(
    scheme: str, data: st.DataObject
) -> None:
    """Brute force: the pieces joined are the sentence encoded without a limit, and no
    entity has tokens in two pieces; a piece is over the limit only by one entity that
    fills it."""
    words = data.draw(st.integers(1, 40))
    limit = data.draw(st.integers(1, 8))
    text = " ".join(f"w{i:02d}" for i in range(words))
    spans, token = [], 0
    while token < words:
        size = data.draw(st.integers(1, 6))
        last = min(token + size, words)
        if data.draw(st.booleans()):
            spans.append(Span(4 * token, 4 * last - 1, "ADR"))
        token = last
    document = Document("d", text, tuple(spans), sentences=((0, len(text)),))
    tagset = TagSet(("ADR",), scheme)  # type: ignore[arg-type]
    uncut = encode_corpus([document], tagset, max_tokens=1000)
    cut = encode_corpus([document], tagset, max_tokens=limit)
    assert cut.tags.tolist() == uncut.tags.tolist()
    assert cut.offsets.tolist() == uncut.offsets.tolist()
    assert uncut.sentences == 1
    pieces = list(zip(cut.bounds[:-1].tolist(), cut.bounds[1:].tolist(), strict=True))
    assert pieces[-1][1] == words
    for span in spans:
        first, last = span.start // 4, (span.end + 1) // 4
        assert sum(first < b and a < last for a, b in pieces) == 1
        holder = next((a, b) for a, b in pieces if a <= first < b)
        assert last <= holder[1]
    longest = max([0, *((s.end + 1) // 4 - s.start // 4 for s in spans)])
    assert max(b - a for a, b in pieces) <= max(limit, longest)


@given(
    lengths=st.lists(st.integers(1, 60), max_size=300),
    batch=st.integers(1, 17),
    window=st.integers(1, 9),
    seed=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_an_epoch_holds_every_sentence_once(
    lengths: list[int], batch: int, window: int, seed: int
) -> None:
    """Counting: the batches' indices together are 0..n-1, and all but one batch are
    full."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "_WINDOW", window)
        epoch, again = (
            draw_epoch_batches(
                np.array(lengths, dtype=np.int64), batch, np.random.default_rng(seed)
            )
            for _ in range(2)
        )
    together = sorted(int(i) for indices in epoch for i in indices)
    assert together == list(range(len(lengths)))
    assert sum(len(indices) != batch for indices in epoch) <= 1
    assert all(0 < len(indices) <= batch for indices in epoch)
    assert [a.tolist() for a in epoch] == [b.tolist() for b in again]


def test_batches_group_similar_lengths_and_vary() -> None:
    """Padding of 3,200 lengths from 1 to 60: random batches of 32 fill about half a
    padded matrix (mean 30 of a maximum near 60); bucketed ones nearly all of it."""
    lengths = np.random.default_rng(0).integers(1, 61, size=3200)
    first = draw_epoch_batches(lengths, 32, np.random.default_rng(1))
    second = draw_epoch_batches(lengths, 32, np.random.default_rng(2))
    padded = sum(lengths[b].max() * len(b) for b in first)
    assert lengths.sum() / padded > 0.95
    assert {frozenset(b.tolist()) for b in first} != {
        frozenset(b.tolist()) for b in second
    }
    means = [lengths[b].mean() for b in first]
    # not from short to long
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.4
