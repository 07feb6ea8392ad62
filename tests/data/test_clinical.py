"""Clinical preprocessing: invented notes worked by hand, and what must hold for any text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fednotes.data.clinical import blocks, is_header, sentences
from fednotes.data.notes import read_notes

NOTE = """Admission Date:  [**2130-1-1**]     Discharge Date:   [**2130-1-5**]

Date of Birth:  [**2061-3-4**]             Sex:   M

Service: MEDICINE

Allergies:
Penicillins

Attending:[**First Name3 (LF) 12**]
Chief Complaint:
fever

History of Present Illness:
The patient is a 68 y.o. man seen by Dr. [**Last Name (STitle) 7**] at
[**Hospital1 18**] for fever of 101.5. He was given 5 mg. of warfarin
p.o. b.i.d. and sent home vs. observed. Denies chest pain.

Medications on Admission:
1. Aspirin 81 mg daily.
2. Lisinopril 10 mg
   daily
- Lasix 20 mg
_____________________
Labs:
WBC-8.8 RBC-4.4
Hgb-12
"""


def test_a_note_by_hand() -> None:
    assert sentences(NOTE) == [
        "Admission Date: [**2130-1-1**]",
        "Discharge Date: [**2130-1-5**]",
        "Date of Birth: [**2061-3-4**]",
        "Sex: M",
        "Service: MEDICINE",
        "Allergies: Penicillins",
        "Attending:[**First Name3 (LF) 12**]",
        "Chief Complaint: fever",
        "History of Present Illness:",
        "The patient is a 68 y.o. man seen by Dr. [**Last Name (STitle) 7**] at "
        "[**Hospital1 18**] for fever of 101.5.",
        "He was given 5 mg. of warfarin p.o. b.i.d. and sent home vs. observed.",
        "Denies chest pain.",
        "Medications on Admission:",
        "1. Aspirin 81 mg daily.",
        "2. Lisinopril 10 mg daily",
        "- Lasix 20 mg",
        "Labs:",
        "WBC-8.8 RBC-4.4",
        "Hgb-12",
    ]


def test_a_note_of_mimic_iv_by_hand() -> None:
    """An answer that is hidden whole goes as a rule does."""
    text = (
        "Name:  ___                     Unit No:   ___\n \nAllergies: \nPenicillins\n \n"
        "Attending: ___.\n \nHistory of Present Illness:\n___ year old man seen at ___ on ___.\n"
        " \nFollowup Instructions:\n___\n"
    )
    assert sentences(text) == [
        "Name: ___",
        "Unit No: ___",
        "Allergies: Penicillins",
        "Attending: ___.",
        "History of Present Illness: ___ year old man seen at ___ on ___.",
        "Followup Instructions:",
    ]


def test_the_first_item_under_a_header_is_kept() -> None:
    """The published program drops it (its own authors' note says so)."""
    assert sentences("Discharge Medications:\n\nAspirin\n\nLasix\n") == [
        "Discharge Medications:",
        "Aspirin",
        "Lasix",
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("History of Present Illness:", True),
        ("Neuro (on admission):", True),
        ("CHIEF COMPLAINT", True),
        ("ASSESSMENT AND PLAN", True),
        ("She said:", False),
        ("He was seen today", False),
        ("WBC 8.8", False),
        ("CT", False),
        ("", False),
        (":", False),
    ],
)
def test_headers(line: str, expected: bool) -> None:
    assert is_header(line) is expected


def test_wrapped_lines_are_joined_even_before_a_capital() -> None:
    """At a width of 60, "Lasix" did not fit; in the list below, the lines are the writer's own."""
    prose = (
        "He was transferred to the unit overnight and was started on\n"
        "Lasix with good effect. In the morning his weight was lower\n"
        "and he felt better.\n"
    )
    assert sentences(prose) == [
        "He was transferred to the unit overnight and was started on Lasix with good effect.",
        "In the morning his weight was lower and he felt better.",
    ]
    listed = "Allopurinol 100 mg DAILY\nAspirin 250 mg DAILY\nPrilosec OTC 20 mg once a day\n"
    assert blocks(listed) == listed.splitlines()


def _visible(text: str) -> str:
    return "".join(text.split())


_MARKUP = re.compile(r"[-_=*~#]{3,}")
_WORDS = st.sampled_from(
    [
        *"Dr. Smith 5 mg. p.o. Plan: 1. 2) PMH b.i.d. pain Pain? a.b (n.v.) é".split(),
        *("\n", "\n\n", "- ", "  ", "\t", "\r\n", "\u2028", "x" * 70, "Sex:   M", '"', "\x0c"),
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
def test_nothing_visible_is_lost(text: str) -> None:
    """All characters but white space stay, in order; runs of rule signs may go, no others."""
    found = sentences(text)
    assert all(s and s == s.strip() and s == " ".join(s.split()) for s in found)
    if not _MARKUP.search(text):
        assert _visible("".join(found)) == _visible(text)
    else:
        keep = re.compile(r"[-_=*~#]")
        assert keep.sub("", _visible("".join(found))) == keep.sub("", _visible(text))


@pytest.mark.parametrize(
    "text",
    [
        "Seen by Dr. [**Last Name (STitle) 7**] at [**Hospital1 18**] on [**2130-1-1**].",
        "[**Known firstname**][**Known lastname**] took [**Month (only) 12**] 3 doses",
        "open [**never closed",
        "a ___ y/o man, Dr.___said ___",
    ],
)
def test_placeholders_are_text(text: str) -> None:
    """As in clinicalBERT's program; a model that is fine-tuned on such notes reads the same."""
    assert sentences(text) == [text]


def test_a_placeholder_is_not_cut_by_a_line_end() -> None:
    text = "Plan:\n\n- call [**Hospital\n Ward Name 3**] today\n- rest\n"
    assert sentences(text) == ["Plan:", "- call [**Hospital Ward Name 3**] today", "- rest"]


def test_a_very_long_note_in_linear_time() -> None:
    """200,000 characters with stops, and without one; also runs that could make `re` go back."""
    text = "The patient was stable overnight. " * 6000
    assert len(sentences(text)) == 6000
    dots = "Well. So " + "." * 200_000 + "x"  # each stop could begin the end of a sentence
    assert _visible("".join(sentences(dots))) == _visible(dots)
    for unit in ("x", "x ", "[**", "[**a ", "- ", "A", "\n", "1. ", "....", "A: ", "  A"):
        long = unit * (200_000 // len(unit))
        assert _visible("".join(sentences(long))) == _visible(long)


@pytest.mark.corpora
def test_real_notes_lose_nothing(corpora: Path) -> None:
    """ACI-Bench and every tenth CodiEsp case: same visible characters; sane sentence lengths."""
    notes = list(read_notes(corpora / "aci_bench"))
    notes += list(read_notes(corpora / "codiesp/background"))[::10]
    total = words = 0
    for note in notes:
        found = sentences(note.text)
        if not _MARKUP.search(note.text):
            assert _visible("".join(found)) == _visible(note.text)
        total += len(found)
        words += sum(len(s.split()) for s in found)
    assert 8 < words / total < 25
    found = sentences(next(read_notes(corpora / "aci_bench/train.csv")).text)
    assert found[:3] == [
        "CHIEF COMPLAINT",
        "Annual exam.",
        "HISTORY OF PRESENT ILLNESS",
    ]
