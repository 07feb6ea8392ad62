"""Tokens and sentences against a character loop and against hand-cut text."""

from __future__ import annotations

import time
import unicodedata
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fednotes.core.types import Document, Span
from fednotes.data.formats import read
from fednotes.data.text import join_cut, normalise, split_sentences, tokenize

TEXTS = st.text(
    st.one_of(
        st.sampled_from("ab1_ .-,\n\té\u0301\u0940"), st.characters(exclude_categories=["Cs"])
    ),
    max_size=60,
)


def _is_mark(c: str) -> bool:
    return unicodedata.category(c)[0] == "M" and ord(c) < 0x10000


def _tokens(text: str) -> list[tuple[int, int]]:
    """The rule character by character: letters and digits run on, marks stay with what they mark.

    Independent of `re`: Unicode categories from `unicodedata` decide.
    """
    found: list[tuple[int, int]] = []
    word = False
    for i, c in enumerate(text):
        if c.isspace():
            word = False
        elif found and found[-1][1] == i and (_is_mark(c) or (word and c.isalnum())):
            found[-1] = (found[-1][0], i + 1)
        else:
            found.append((i, i + 1))
            word = c.isalnum()
    return found


@settings(max_examples=400, deadline=None)
@given(TEXTS)
def test_tokens_equal_a_character_loop(text: str) -> None:
    """See `_tokens`."""
    tokens = tokenize(text)
    assert tokens.dtype == "int32"
    assert tokens.shape == (len(tokens), 2)
    assert list(map(tuple, tokens.tolist())) == _tokens(text)


def test_tokens_of_clinical_text() -> None:
    """Cut by hand."""
    text = "Naïve pt_2: 60mg B12 q.d.; cafe\u0301 (2.5%)"
    forms = [text[a:b] for a, b in tokenize(text)]
    expected = "Naïve pt _ 2 : 60mg B12 q . d . ; cafe\u0301 ( 2 . 5 % )"
    assert forms == expected.split()


def test_no_text_has_no_tokens() -> None:
    """The shape holds without tokens too."""
    assert tokenize(" \n").shape == (0, 2)


def test_normalise() -> None:
    """Case folding, not lowering: ß is ss."""
    assert normalise(" Straße\n  PAIN\t") == "strasse pain"


# Each line is a sentence; joined by a space the rule must find them again.
SENTENCES = (
    "He was seen by Dr. Smith at 2.5 mg q.d. with food.",
    "Patient denies pain vs. pressure.",
    "Was it b.i.d. or t.i.d.?",
    "Yes!",
    "See Fig. 2 and No. 5 for approx. values (e.g. the M. tuberculosis cultures).",
    "He has hepatitis C.",
    "The dose was 5.",
    "Then it stopped...",
    "Wt. 80 kg, temp. 38.5, BP 120/80.",
    '"I feel bad."',
    "It ended.",
)


def test_sentences_of_clinical_text() -> None:
    """Abbreviations, decimals, initials and quotations, cut by hand."""
    text = " ".join(SENTENCES)
    assert tuple(text[a:b] for a, b in split_sentences(Document("x", text))) == SENTENCES


def test_lines_lists_headers_and_wrapped_lines() -> None:
    """Lines part; a long line that goes on in lower case does not; a list number stays."""
    wrapped = "The patient was admitted to the hospital because of severe chest"
    text = f"PLAN:\n1. Aspirin 81 mg\n2. rest at home. Call us.\n\n  \n{wrapped}\npain. Fine.\r\n"
    expected = ["PLAN:", "1. Aspirin 81 mg", "2. rest at home.", "Call us."]
    expected += [f"{wrapped}\npain.", "Fine."]
    assert [text[a:b] for a, b in split_sentences(Document("x", text))] == expected


def test_a_gold_span_is_never_cut() -> None:
    """Without the span there are two sentences, with it one."""
    text = "He took Drug. Then more."
    assert len(split_sentences(Document("x", text))) == 2
    span = Span(8, 18, "Drug", ((8, 12), (14, 18)))
    assert split_sentences(Document("x", text, (span,))) == [(0, 24)]


def test_a_span_that_takes_in_space_widens_its_sentence() -> None:
    """It is in one sentence whole, and no other sentence is joined to it."""
    text = "Took Drug. Then more."
    after, before = Span(5, 11, "Drug"), Span(10, 15, "X")
    assert split_sentences(Document("x", text, (after,))) == [(0, 11), (11, 21)]
    assert split_sentences(Document("x", text, (before,))) == [(0, 10), (10, 21)]
    assert split_sentences(Document("x", text, (after, before))) == [(0, 21)]


def test_sentences_of_the_source_are_kept() -> None:
    """Given sentences come back, joined only where a span reaches across."""
    given_bounds = ((0, 3), (4, 7), (8, 11))
    document = Document("x", "a b c d e f", sentences=given_bounds)
    assert split_sentences(document) == list(given_bounds)
    across = Document("x", "a b c d e f", (Span(6, 9, "X"),), sentences=given_bounds)
    assert split_sentences(across) == [(0, 3), (4, 11)]


@st.composite
def _annotated(draw: st.DrawFn) -> Document:
    words = st.sampled_from(
        ["He", "felt", "bad.", "Dr.", "\n", "2.5", "Next", "ok!", "A.", "x " * 30]
    )
    text = " ".join(draw(st.lists(words, max_size=25)))
    places = draw(st.lists(st.tuples(st.integers(0, 80), st.integers(1, 20)), max_size=4))
    spans = tuple(Span(s, s + n, "X") for s, n in places if s + n <= len(text))
    return Document("x", text, spans)


@settings(max_examples=200, deadline=None)
@given(_annotated())
def test_sentences_hold_all_text_and_cut_no_span(document: Document) -> None:
    """In order, apart, every visible character in one, each span in one, trimmed otherwise."""
    bounds = split_sentences(document)
    text = document.text
    assert all(b <= c for (_, b), (c, _) in pairwise(bounds))
    covered = {i for a, b in bounds for i in range(a, b)}
    assert covered >= {i for i, c in enumerate(text) if not c.isspace()}
    for span in document.spans:
        if text[span.start : span.end].strip():
            assert any(a <= span.start and span.end <= b for a, b in bounds)
    edges = {s.start for s in document.spans}, {s.end for s in document.spans}
    for a, b in bounds:
        assert text[a:b].strip()
        assert not text[a].isspace() or a in edges[0]
        assert not text[b - 1].isspace() or b in edges[1]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.data())
def test_join_cut_equals_brute_force(lengths: list[int], data: st.DataObject) -> None:
    """Brute force: a boundary stays if no span has it strictly inside."""
    edges = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    place = st.tuples(st.integers(0, edges[-1] - 1), st.integers(1, 6))
    places = data.draw(st.lists(place, max_size=4))
    spans = [Span(s, min(s + n, edges[-1]), "X") for s, n in places]
    kept = [e for e in edges if not any(s.start < e < s.end for s in spans)]
    bounds = list(pairwise(edges))
    assert join_cut(bounds, spans) == list(pairwise(kept))


@pytest.mark.corpora
@pytest.mark.parametrize(
    ("folder", "pieces", "most"), [("maccrobat", 25_237, 35), ("bc5cdr/pubtator", 28_785, 15)]
)
def test_gold_spans_fall_on_tokens(corpora: Path, folder: str, pieces: int, most: int) -> None:
    """At most 0.14 % of the pieces of gold mentions are off the boundaries (sets of offsets)."""
    off = total = 0
    for document in read(corpora / folder):
        tokens = tokenize(document.text)
        starts, ends = set(tokens[:, 0].tolist()), set(tokens[:, 1].tolist())
        for span in document.spans:
            for start, end in span.fragments or ((span.start, span.end),):
                off += start not in starts or end not in ends
                total += 1
    assert total == pieces
    assert off <= most


def test_a_long_row_of_dots_takes_no_time() -> None:
    """From each dot to the end of the row would be 2e10 steps."""
    text = "Well. So " + "." * 200_000 + "x then. Next."
    begun = time.perf_counter()
    found = split_sentences(Document("dots", text))
    assert time.perf_counter() - begun < 5
    assert found[-1][1] == len(text)
