"""Findings of checks, counts of corpora and shared text, planted or counted by hand."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from time_limits import processor_time_below

from fednotes.core.types import Document, SiteData, Span, TagSet
from fednotes.data.checks import Finding, check_documents, check_sites
from fednotes.data.formats import FORMATS, read, read_known_corpora
from fednotes.data.notes import read_notes
from fednotes.data.overlap import (
    MIN_WORDS,
    NGRAM,
    SharedText,
    index_documents,
    measure_shared_text,
    shares_sentence,
)
from fednotes.data.stats import (
    compute_corpus_stats,
    find_overlapping_forms,
    normalise_span,
)

SECRET = "Zyxwolan"


def note(name: str, text: str, *spans: Span, **more: object) -> Document:
    return Document(name, text, spans, **more)  # type: ignore[arg-type]


def findings_of(report: list[Finding], code: str) -> list[Finding]:
    return [finding for finding in report if finding.code == code]


def counts(report: list[Finding], code: str) -> dict[str, int]:
    (finding,) = findings_of(report, code)
    return dict(finding.counts)


def levels(report: list[Finding]) -> set[str]:
    return {finding.level for finding in report}


def test_a_clean_corpus_has_no_warning() -> None:
    documents = [
        note(
            str(i),
            f"{SECRET}{i} helped number {i}",
            Span(0, len(f"{SECRET}{i}"), "Drug"),
        )
        for i in range(25)
    ]
    report = check_documents(documents, TagSet(("Drug",)))
    assert levels(report) == {"info"}
    assert counts(report, "types") == {"Drug": 25}
    # 25 sentences of 4 tokens
    lengths = dict.fromkeys(("p5", "median", "p95", "longest"), 4)
    assert counts(report, "lengths") == {"sentences": 25, "tokens": 100, **lengths}
    assert not any(SECRET in str(f) for f in report)


def test_each_planted_flaw_is_counted() -> None:
    """One flaw at a time, planted by hand: the expected numbers are what was planted."""
    documents = [
        note("a", f"{SECRET} helped", Span(0, 4, "Drug")),  # off the token boundary
        # nested
        note("b", f"{SECRET} and {SECRET}", Span(0, 21, "Drug"), Span(0, 8, "Drug")),
        # in pieces
        note("c", "arm and leg pain", Span(0, 16, "Sign", ((0, 3), (12, 16)))),
        # A bell, a byte-order mark and a joiner, which is seen as one where it joins
        # two pictures. no mention
        note("d", "Odd\u0007 text \ufeff here a\u200db \U0001f468\u200d\U0001f469"),
        note("d", "   "),  # blank; repeats an id
        note("e", "same thing here twice .\nand more"),
        note("f", "Same thing  here twice .\nand more"),
        note("g", "many words in one line"),
    ]
    report = check_documents(documents, TagSet(("Drug", "Dose")), "x", max_tokens=4)
    assert levels(report) == {"info", "warning", "error"}
    planted = {
        "unknown_labels": {"Sign": 1},
        "rare_types": {"Drug": 3, "Dose": 0},
        "bare_documents": {"documents": 5, "of": 8},
        "unprintable": {"characters": 3, "documents": 1},
        "blank_documents": {"documents": 1},
        "repeated_ids": {"documents": 1},
        "repeated_documents": {"documents": 1},
    }
    assert {code: counts(report, code) for code in planted} == planted
    assert counts(report, "repeated_sentences")["sentences"] == 2
    assert counts(report, "snapped")["snapped"] == 1
    assert counts(report, "not_flat") == {"nested": 1}
    # longer than 4 tokens: "same … twice ." (5, two times), "many …" (5), "Odd^G text
    # BOM here" (5)
    assert counts(report, "long_sentences") == {"sentences": 4}
    assert not any(SECRET in str(f) or "Odd" in str(f) for f in report)
    without = check_documents(documents, None, "x")
    assert counts(without, "not_flat") == {"discontinuous": 1, "nested": 1}


def test_a_repeated_note_of_one_sentence_counts_as_a_repeated_sentence() -> None:
    report = check_documents(
        [note("a", "Seen ."), note("b", "Seen ."), note("c", "Not seen .")]
    )
    assert findings_of(report, "repeated_documents") == []
    assert counts(report, "repeated_sentences") == {"sentences": 1, "of": 3}


def test_bad_offsets_and_empty_corpora_are_errors() -> None:
    report = check_documents([note("a", "short", Span(0, 99, "X"), Span(3, 3, "X"))])
    assert counts(report, "offsets") == {"mentions": 2}
    assert levels(check_documents([])) == {"error"}
    assert (
        findings_of(check_documents([note("a", "no mention")]), "no_mentions")[0].level
        == "error"
    )
    assert levels(check_sites([])) == {"error"}


def site(
    name: str, types: tuple[str, ...], train: list[str], test: list[str]
) -> SiteData:
    def documents(part: str, texts: list[str]) -> tuple[Document, ...]:
        return tuple(
            note(f"{part}{i}", t, Span(0, len(t.split()[0]), types[0]), patient=f"p{i}")
            for i, t in enumerate(texts)
        )

    return SiteData(
        name, TagSet(types), documents("tr", train), (), documents("te", test)
    )


def test_leaks_within_and_between_sites_are_counted() -> None:
    """Site a: two of three test sentences are in train, one of them with five words or
    more. Site b's test holds one sentence of a's train."""
    five = "one two three four five"
    test = [five.capitalize(), "short  one", "new"]
    a = site("a", ("Drug",), [five, "short one", "other"], test)
    b = site("b", ("Drug", "ADE"), ["b one"], ["other"])
    report = check_sites([a, b])
    leak, between = (
        findings_of(report, "leakage"),
        findings_of(report, "leakage_between_sites"),
    )
    assert [(f.where, f.level, dict(f.counts)) for f in leak] == [
        ("a", "warning", {"sentences": 2, "of": 3, "long": 1})
    ]
    assert [(f.where, f.level, f.counts["sentences"]) for f in between] == [
        ("b", "info", 1)
    ]
    assert {f.where for f in findings_of(report, "shared_patients")} == {"a", "b"}
    assert {f.where for f in findings_of(report, "empty_part")} == {
        "a/valid",
        "b/valid",
    }
    assert findings_of(report, "no_shared_types") == []
    # first words "one", "short", "other" at a and "b" at b: nothing in common
    assert counts(report, "overlapping_forms") == {"forms": 0}


def test_disjoint_tag_sets_and_empty_sites_are_reported() -> None:
    a = site("a", ("Drug",), ["one two"], ["x y"])
    b = site("b", ("Problem",), ["one three"], ["z"])
    empty = SiteData("c", TagSet(("Drug",)), (), (), ())
    bare = SiteData("c", TagSet(("Drug",)), (note("n", "nothing"),), (), ())
    report = check_sites([a, b, empty, bare])
    assert [f.where for f in findings_of(report, "no_shared_types")] == ["b"]
    assert [f.where for f in findings_of(report, "empty")] == ["c/train"]
    assert [f.where for f in findings_of(report, "no_mentions")] == ["c/train"]
    assert counts(report, "site_ids") == {"sites": 2}
    assert counts(report, "overlapping_forms") == {"forms": 1}


@pytest.mark.parametrize("bare", ["valid", "test", None])
def test_a_held_out_part_without_mentions_is_a_warning(bare: str | None) -> None:
    """A warning for that part only; a part without documents is `empty_part`."""
    parts = {
        part: (
            Document(
                part, f"{part} {SECRET}", () if part == bare else (Span(0, 4, "X"),)
            ),
        )
        for part in ("train", "valid", "test")
    }
    report = check_sites([SiteData("s", TagSet(("X",)), **parts)])
    for part in ("valid", "test"):
        findings = [
            (f.level, f.where) for f in findings_of(report, f"no_{part}_mentions")
        ]
        assert findings == ([("warning", f"s/{part}")] if part == bare else [])
    assert not any(SECRET in str(f) for f in report)
    without = check_sites([SiteData("s", TagSet(("X",)), parts["train"], (), ())])
    assert len(findings_of(without, "empty_part")) == 2
    assert not findings_of(without, "no_valid_mentions") + findings_of(
        without, "no_test_mentions"
    )


@pytest.mark.corpora
def test_maccrobat_has_its_44_discontinuous_mentions(corpora: Path) -> None:
    report = check_documents(read(corpora / "maccrobat", "brat"))
    assert counts(report, "not_flat")["discontinuous"] == 44


# ---- counts of small corpora, counted by hand, and of the real ones, as published


#      0123456789012345678901234567
ONE = "Aspirin gave me a  bad Rash."
SITES = {
    "posts": [
        Document("1", ONE, (Span(0, 7, "Drug"), Span(18, 27, "ADE"))),
        Document(
            "2",
            "Took aspirin.\nOK now.",
            (Span(5, 12, "Drug"),),
            sentences=((0, 13), (14, 21)),
        ),
    ],
    "wards": [
        Document(
            "3",
            "No bad  rash, arm and leg pain",
            (Span(3, 12, "Sign"), Span(14, 30, "Sign", ((14, 17), (26, 30)))),
        )
    ],
    "labs": [
        Document("4", "ASPIRIN", (Span(0, 7, "Test"),)),
        Document("5", "Nothing ."),
    ],
}


def test_statistics_of_a_corpus_equal_counts_by_hand() -> None:
    """Every number below was counted on the texts above; they are plain values for
    JSON."""
    stats = compute_corpus_stats(SITES)
    posts, wards, labs = stats["sites"]
    assert posts == {
        **{"site": "posts", "documents": 2, "sentences": 3, "annotated_sentences": 2},
        **{
            "tokens": 7 + 3 + 3,
            "entities": {"ADE": 1, "Drug": 2},
            "types": ["ADE", "Drug"],
        },
        **{"mentions": 3, "forms": 2, "discontinuous": 0},
    }
    assert (wards["entities"], wards["discontinuous"], wards["forms"]) == (
        {"Sign": 2},
        1,
        2,
    )
    assert (labs["sentences"], labs["annotated_sentences"], labs["documents"]) == (
        2,
        1,
        2,
    )
    # "aspirin" at posts and labs, "bad rash" at posts and wards
    assert stats["overlapping"] == 2
    assert stats["pairwise"] == [[2, 1, 1], [1, 2, 0], [1, 0, 1]]
    assert json.loads(json.dumps(stats)) == stats
    assert compute_corpus_stats({})["overlapping"] == 0


def test_forms_of_mentions_are_normalised_and_overlapping_forms_listed() -> None:
    wards = SITES["wards"][0]
    assert [normalise_span(wards.text, s) for s in wards.spans] == [
        "bad rash",
        "arm pain",
    ]
    assert find_overlapping_forms(SITES.values()) == {"aspirin", "bad rash"}


def test_forms_of_long_mentions_are_their_first_characters() -> None:
    text = "Ab" * 800 + " end"
    whole_text = Span(0, len(text), "Sign")
    first_characters = Span(0, 1000, "Sign")
    assert normalise_span(text, whole_text) == "ab" * 500
    assert normalise_span(text, first_characters) == "ab" * 500


@pytest.mark.parametrize("nested", [False, True])
def test_statistics_of_many_mentions_take_seconds(nested: bool) -> None:
    """Forty thousand sentences, and a mention of each one, or from each to the end."""
    sentence = "No pain.\n\n"
    length = len(sentence)
    repeats = 40_000
    text = sentence * repeats
    bounds = tuple((at, at + 8) for at in range(0, len(text), length))
    spans = tuple(Span(at, bounds[-1][1] if nested else end, "X") for at, end in bounds)
    with processor_time_below(15):  # 2 s; in squared time, 30 s or more
        stats = compute_corpus_stats(
            {"site": [Document("1", text, spans, sentences=bounds)]}
        )
    (site,) = stats["sites"]
    assert (
        site["sentences"] == site["annotated_sentences"] == (1 if nested else repeats)
    )


def test_the_catalogue_names_existing_readers() -> None:
    known = read_known_corpora()
    assert {
        item["format"] for item in known.values() if "format" in item
    } <= FORMATS.keys()
    fields = {"what", "size", "licence", "source", "reference"}
    assert all(fields <= item.keys() for item in known.values())
    assert len(known) == 21
    assert known["psytar"]["licence"] == "CC BY 4.0"


@pytest.mark.corpora
def test_psytar_has_the_published_counts(corpora: Path) -> None:
    """Mentions and sentences of the data's own description (ADR 3,543, DI 716, ...)."""
    documents = [
        d
        for f in ("train", "dev", "test")
        for d in read(corpora / "psytar" / f"{f}.txt", "conll")
    ]
    (site,) = compute_corpus_stats({"psytar": documents})["sites"]
    assert site["entities"] == {"ADR": 3543, "DI": 716, "SSI": 340, "WD": 444}
    assert site["sentences"] == 5591


@pytest.mark.corpora
def test_maccrobat_has_the_published_counts(corpora: Path) -> None:
    (site,) = compute_corpus_stats({"m": read(corpora / "maccrobat", "brat")})["sites"]
    assert (site["documents"], site["mentions"], len(site["types"])) == (200, 25189, 41)
    assert site["entities"]["Sign_symptom"] == 3382
    assert site["entities"]["Medication"] == 1080


# ---- text in common, against sets of words that are held in memory


Text = list[list[str]]  # sentences of words
sentence = st.lists(st.sampled_from("abc"), min_size=1, max_size=11)
texts = st.lists(st.lists(sentence, max_size=4), max_size=5)


def _written(text: Text) -> str:
    """Write each sentence as a paragraph, so that its end is certain."""
    return "\n\n".join(" ".join(words).capitalize() + "." for words in text)


def _document(text: Text) -> Document:
    return Document("d", _written(text))


def _long(text: Text) -> list[tuple[str, ...]]:
    return [tuple(words) for words in text if len(words) >= MIN_WORDS]


def _grams(text: Text) -> list[tuple[str, ...]]:
    words = [word for words in text for word in words]
    return [tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)]


@settings(max_examples=200, deadline=None)
@given(texts, texts)
def test_counts_of_shared_text_equal_brute_force(
    notes: list[Text], documents: list[Text]
) -> None:
    """Brute force: sentences and n-grams as tuples of words, looked up in Python sets."""
    known = {s for d in documents for s in _long(d)}
    grams = {g for d in documents for g in _grams(d)}
    shared = [sum(s in known for s in _long(note)) for note in notes]
    expected = SharedText(
        sum(len(_long(note)) for note in notes),
        sum(shared),
        sum(number > 0 for number in shared),
        sum(len(_grams(note)) for note in notes),
        sum(g in grams for note in notes for g in _grams(note)),
    )
    index = index_documents(map(_document, documents))
    assert measure_shared_text(map(_written, notes), [index]) == (expected,)
    assert [shares_sentence(_written(n), index) for n in notes] == [
        n > 0 for n in shared
    ]


def test_shared_text_is_counted_per_collection() -> None:
    words = "one two three four five six seven eight".split()
    a, b = (
        index_documents([_document([words])]),
        index_documents([_document([words[::-1]])]),
    )
    overlaps = measure_shared_text([_written([words]), _written([["x"] * 20])], [a, b])
    assert overlaps == (SharedText(2, 1, 1, 8, 0), SharedText(2, 0, 0, 8, 0))
    assert overlaps[0] + overlaps[1] == SharedText(4, 1, 1, 16, 0)
    assert measure_shared_text([_written([words])], []) == ()


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        ("He was given 5 mg of warfarin on day two.", True),
        ("HE WAS  given 5 mg\tof warfarin (on day two)", True),
        # compatibility forms are one digit
        ("He was given ５ mg of warfarin, on day two!", True),
        (
            "Plan:\n1. Rest.\n\nHe was given 5 mg of warfarin on day two. Then home.",
            True,
        ),
        ("He was given 6 mg of warfarin on day two.", False),
        ("He was given 5 mg of warfarin.", False),  # 7 words
        ("", False),
    ],
)
def test_case_white_space_and_punctuation_are_ignored_in_a_comparison(
    text: str, shared: bool
) -> None:
    """Judged by hand."""
    index = index_documents(
        [Document("d", "He was given 5 mg of warfarin on day two .")]
    )
    assert shares_sentence(text, index) is shared


def test_a_document_is_indexed_by_its_own_and_by_split_sentences() -> None:
    """The source cuts after "Seen by", which no rule does; both cuts are found."""
    tail = "the surgeon of the third ward on day four"
    text = f"Seen by {tail}"
    document = Document("d", text, sentences=((0, 7), (8, len(text))))
    index = index_documents([document])
    assert shares_sentence(text, index)
    assert shares_sentence(tail, index)
    assert not shares_sentence(tail, index_documents([Document("d", text)]))


def test_shared_text_that_is_split_differently_is_detected_by_its_ngrams() -> None:
    """20 words in a row, of which the other text has 16: 16 - 13 + 1 n-grams in common."""
    words = [f"w{number}" for number in range(20)]
    index = index_documents([_document([words])])
    (overlap,) = measure_shared_text(
        [_written([["x", *words[2:10]], [*words[10:18], "y"]])], [index]
    )
    assert (overlap.shared_sentences, overlap.ngrams, overlap.shared_ngrams) == (
        0,
        18 - 12,
        4,
    )


def test_very_long_and_odd_texts_are_indexed() -> None:
    """200,000 characters, without a stop and with many; marks only; half a million
    words."""
    rng = random.Random(1)
    words = [str(rng.randrange(10**6)) for _ in range(30_000)]
    index = index_documents([Document("d", " ".join(words))])
    assert len(index.ngrams) == len(words) - NGRAM + 1
    assert np.all(np.diff(index.ngrams.astype(object)) > 0)
    (overlap,) = measure_shared_text(
        [" ".join(words), "…" * 200_000, "\n" * 1000], [index]
    )
    assert overlap.shared_ngrams == overlap.ngrams == len(words) - NGRAM + 1
    empty = index_documents([])
    assert measure_shared_text(["a b c"], [empty]) == (SharedText(),)


@pytest.mark.corpora
def test_a_corpus_shares_all_its_text_with_itself(corpora: Path) -> None:
    """Every n-gram of MACCROBAT's text files is in its documents; its sentences, by a
    plain scan.

    The scan takes whole lines that end in a full stop and hold no other one.
    """
    documents = read(corpora / "maccrobat")
    index = index_documents(documents)
    notes = [note.text for note in read_notes(corpora / "maccrobat", "text")][:40]
    (overlap,) = measure_shared_text(notes, [index])
    assert overlap.shared_ngrams == overlap.ngrams > 10_000
    assert overlap.shared_sentences == overlap.sentences > 500
    assert overlap.notes_with_shared == 40
    lines = {
        line
        for document in documents
        for line in document.text.splitlines()
        if re.fullmatch(r"[A-Z][^.]+[a-z]{2}\.", line)
        and sum(map(str.isalpha, line.split())) >= MIN_WORDS
    }
    assert len(lines) > 100
    assert all(shares_sentence(line, index) for line in lines)


# ---- identifiers ---------------------------------------------------------------------

IDENTIFIED = """Patient: Jane Roe, MRN: 00123456, seen by Dr. Okafor on 03/14/2021 and
March 3rd, 2021. Mary Q. Contrary lives at 12 Old Mill Road, Springfield, IL 62704-1234.
Call (555) 010-9999 or 555-010-8888 or +49 30 1234 5678, or write to j.roe+x@mail.example.org.
SSN 078-05-1120."""
CLEAN = """BP 120/80 on 10 mg; 1/2 tablet; grade 3-4; IL-6; 2-5-10 mg. Seen by Dr.
[**Last Name 12**] on [**2130-1-1**] and ___, [NAME], <DATE>, XXXX. Parkinson disease.
May 5 to 10 mg. Call 911. T 36.6."""


def test_identifiers_are_counted_by_kind() -> None:
    """Counted by hand, in an invented note; placeholders and figures of clinical notes
    are none."""
    findings = check_documents([Document("a", IDENTIFIED), Document("b", CLEAN)])
    (finding,) = [f for f in findings if f.code == "identifiers"]
    assert finding.counts == {
        **{
            "e-mail addresses": 1,
            "record numbers": 2,
            "dates": 2,
            "telephone numbers": 3,
        },
        **{"addresses": 2, "names": 3, "documents": 1},
    }
    assert finding.level == "warning"
    assert not any(word in finding.message for word in ("Roe", "Okafor", "0012"))


def test_identifiers_of_a_long_text_are_counted_quickly() -> None:
    """Texts made to be searched in vain: a second for each million characters at most."""
    begin = time.monotonic()
    starts = ("a.", "1-", "Mary ", "[**", "1 A a ", "+1 22 ", "name: ", "_")
    for start in starts:
        findings = check_documents([Document("a", start * 15_000)])
        assert len([f for f in findings if f.code == "identifiers"]) <= 1
    assert time.monotonic() - begin < 10
