"""Tokens and sentences, compared with a character loop and hand-cut text."""

from __future__ import annotations

import re
import tomllib
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from time_limits import processor_time_below

from fednotes.core.types import Document, Span
from fednotes.data.clinical import is_header, list_note_sentences
from fednotes.data.formats import read
from fednotes.data.notes import read_notes
from fednotes.data.text import (
    TOKEN,
    join_cut_sentences,
    normalise,
    split_sentences,
    tokenize,
)

TEXTS = st.text(
    st.one_of(
        st.sampled_from("ab1_ .-,\n\té\u0301\u0940"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=60,
)


def _is_mark(c: str) -> bool:
    return unicodedata.category(c)[0] == "M" and ord(c) < 0x10000


def _tokens(text: str) -> list[tuple[int, int]]:
    """The rule character by character: letters and digits run on, marks stay with what
    they mark.

    Independent of `re`: Unicode categories from `unicodedata` decide.
    """
    actual: list[tuple[int, int]] = []
    word = False
    for i, c in enumerate(text):
        if c.isspace():
            word = False
        elif actual and actual[-1][1] == i and (_is_mark(c) or (word and c.isalnum())):
            actual[-1] = (actual[-1][0], i + 1)
        else:
            actual.append((i, i + 1))
            word = c.isalnum()
    return actual


@settings(max_examples=400, deadline=None)
@given(TEXTS)
def test_tokens_equal_a_character_loop(text: str) -> None:
    """See `_tokens`."""
    tokens = tokenize(text)
    assert tokens.dtype == "int32"
    assert tokens.shape == (len(tokens), 2)
    assert list(map(tuple, tokens.tolist())) == _tokens(text)


def test_clinical_text_is_tokenised_as_cut_by_hand() -> None:
    """Cut by hand."""
    text = "Naïve pt_2: 60mg B12 q.d.; cafe\u0301 (2.5%)"
    forms = [text[a:b] for a, b in tokenize(text)]
    expected = "Naïve pt _ 2 : 60mg B12 q . d . ; cafe\u0301 ( 2 . 5 % )"
    assert forms == expected.split()


def test_normalisation_ignores_case() -> None:
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


def test_clinical_text_is_split_into_sentences_as_cut_by_hand() -> None:
    """Abbreviations, decimals, initials and quotations, cut by hand."""
    text = " ".join(SENTENCES)
    assert (
        tuple(text[a:b] for a, b in split_sentences(Document("x", text))) == SENTENCES
    )


def test_lines_lists_headers_and_wrapped_lines_are_split_as_expected() -> None:
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


def test_a_span_with_outer_white_space_widens_its_sentence() -> None:
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
    places = draw(
        st.lists(st.tuples(st.integers(0, 80), st.integers(1, 20)), max_size=4)
    )
    spans = tuple(Span(s, s + n, "X") for s, n in places if s + n <= len(text))
    return Document("x", text, spans)


@settings(max_examples=200, deadline=None)
@given(_annotated())
def test_sentences_cover_all_text_and_cut_no_span(document: Document) -> None:
    """In order, apart, every visible character in one, each span in one, trimmed
    otherwise."""
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
def test_joining_cut_sentences_equals_brute_force(
    lengths: list[int], data: st.DataObject
) -> None:
    """Brute force: a boundary stays if no span has it strictly inside."""
    edges = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    place = st.tuples(st.integers(0, edges[-1] - 1), st.integers(1, 6))
    places = data.draw(st.lists(place, max_size=4))
    spans = [Span(s, min(s + n, edges[-1]), "X") for s, n in places]
    uncut_edges = [e for e in edges if not any(s.start < e < s.end for s in spans)]
    bounds = list(pairwise(edges))
    assert join_cut_sentences(bounds, spans) == list(pairwise(uncut_edges))


@pytest.mark.corpora
@pytest.mark.parametrize(
    ("folder", "pieces", "limit"),
    [("maccrobat", 25_237, 35), ("bc5cdr/pubtator", 28_785, 15)],
)
def test_gold_spans_fall_on_token_boundaries(
    corpora: Path, folder: str, pieces: int, limit: int
) -> None:
    """At most 0.14 % of the pieces of gold mentions are off the boundaries (sets of
    offsets)."""
    misaligned = total = 0
    for document in read(corpora / folder):
        tokens = tokenize(document.text)
        starts, ends = set(tokens[:, 0].tolist()), set(tokens[:, 1].tolist())
        for span in document.spans:
            for start, end in span.fragments or ((span.start, span.end),):
                misaligned += start not in starts or end not in ends
                total += 1
    assert total == pieces
    assert misaligned <= limit


def test_a_long_row_of_dots_is_split_quickly() -> None:
    """From each dot to the end of the row would be 2e10 steps."""
    text = "Well. So " + "." * 200_000 + "x then. Next."
    with processor_time_below(5):
        actual = split_sentences(Document("dots", text))
    assert actual[-1][1] == len(text)


# ---- clinical preprocessing: invented notes worked by hand, and what must hold for any


NOTES = tomllib.loads(
    (Path(__file__).parent / "samples" / "notes.toml").read_text("utf-8")
)["note"]


@pytest.mark.parametrize("note", NOTES)
def test_notes_are_split_into_sentences_as_by_hand(note: dict[str, Any]) -> None:
    assert list_note_sentences(note["text"]) == note["sentences"]


def test_section_headers_are_recognised() -> None:
    titles = ("History of Present Illness:", "Neuro (on admission):", "CHIEF COMPLAINT")
    assert all(map(is_header, (*titles, "ASSESSMENT AND PLAN")))
    assert not any(
        map(is_header, ("She said:", "He was seen today", "WBC 8.8", "CT", "", ":"))
    )


def _visible(text: str) -> str:
    return "".join(text.split())


_MARKUP = re.compile(r"[-_=*~#]{3,}")
_WORDS = st.sampled_from(
    [
        *"Dr. Smith 5 mg. p.o. Plan: 1. 2) PMH b.i.d. pain Pain? a.b (n.v.) é".split(),
        *(
            "\n",
            "\n\n",
            "- ",
            "  ",
            "\t",
            "\r\n",
            "\u2028",
            "x" * 70,
            "Sex:   M",
            '"',
            "\x0c",
        ),
    ]
)
_TEXTS = st.one_of(
    st.lists(_WORDS, max_size=40).map(" ".join),
    st.text(st.characters(codec="utf-8"), max_size=200),
)


@settings(max_examples=300, deadline=None)
@given(_TEXTS)
@example("")
@example("----")
@example("a\n---\nb")
@example(" Plan:  x")
def test_sentences_lose_no_visible_character(text: str) -> None:
    """All characters but white space stay, in order; runs of rule signs may go, no
    others."""
    actual = list_note_sentences(text)
    assert all(s and s == s.strip() and s == " ".join(s.split()) for s in actual)
    if not _MARKUP.search(text):
        assert _visible("".join(actual)) == _visible(text)
    else:
        keep = re.compile(r"[-_=*~#]")
        assert keep.sub("", _visible("".join(actual))) == keep.sub("", _visible(text))


def test_a_very_long_note_is_split_in_linear_time() -> None:
    """200,000 characters with stops, and without one; also runs that could make `re` go
    back."""
    text = "The patient was stable overnight. " * 6000
    assert len(list_note_sentences(text)) == 6000
    # each stop could begin the end of a sentence
    dots = "Well. So " + "." * 200_000 + "x"
    assert _visible("".join(list_note_sentences(dots))) == _visible(dots)
    for unit in (
        "x",
        "x ",
        "[**",
        "[**a ",
        "- ",
        "A",
        "\n",
        "1. ",
        "....",
        "A: ",
        "  A",
    ):
        long = unit * (200_000 // len(unit))
        assert _visible("".join(list_note_sentences(long))) == _visible(long)


@pytest.mark.corpora
def test_real_notes_lose_no_visible_character(corpora: Path) -> None:
    """ACI-Bench and every tenth CodiEsp case: same visible characters; sane sentence
    lengths."""
    notes = list(read_notes(corpora / "aci_bench"))
    notes += list(read_notes(corpora / "codiesp/background"))[::10]
    total = words = 0
    for note in notes:
        actual = list_note_sentences(note.text)
        if not _MARKUP.search(note.text):
            assert _visible("".join(actual)) == _visible(note.text)
        total += len(actual)
        words += sum(len(s.split()) for s in actual)
    assert 8 < words / total < 25
    actual = list_note_sentences(next(read_notes(corpora / "aci_bench/train.csv")).text)
    assert actual[:3] == [
        "CHIEF COMPLAINT",
        "Annual exam.",
        "HISTORY OF PRESENT ILLNESS",
    ]


# ---- long texts ----------------------------------------------------------------------


@given(
    st.text(
        st.one_of(
            st.characters(max_codepoint=0x7F),
            st.characters(max_codepoint=0x2FF),
            st.characters(min_codepoint=0x2000, max_codepoint=0x20FF),
        ),
        max_size=60,
    ),
    st.sampled_from(["", "e\u0301", "\u4e00", "\ud800", "\U0001f600"]),
)
def test_the_fast_tokenizer_equals_the_pattern(piece: str, rare: str) -> None:
    """Long texts are cut by arrays, short ones by the pattern."""
    text = (piece + " a1_b." + rare) * 60
    expected = [match.span() for match in TOKEN.finditer(text)]
    tokens = tokenize(text)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [list(bounds) for bounds in expected]


def test_each_character_has_one_kind_in_short_and_long_texts() -> None:
    for code in range(0x2200):
        text = f"a{chr(code)}b "
        short = tokenize(text)
        long = tokenize(text * 100)
        assert len(long) == 100 * len(short), hex(code)
        assert long[-1].tolist() == (short[-1] + 99 * len(text)).tolist(), hex(code)


def test_long_forms_are_compared_completely_but_kept_short() -> None:
    """Nested mentions of a note of 100 KB would otherwise take a gigabyte."""
    text = "Chest Pain  " * 1000
    assert normalise(text) == normalise(text.lower())
    assert normalise(text + "x") != normalise(text + "y")
    assert len(normalise(text)) < 1100
    assert normalise("\ud800" * 2000) != normalise("\ud800" * 2001)
