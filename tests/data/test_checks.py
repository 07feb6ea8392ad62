"""Each check finds what was put into a small corpus, and says no word of its text."""

from __future__ import annotations

from pathlib import Path

import pytest

from fednotes.core.types import Document, SiteData, Span, TagSet
from fednotes.data.checks import Finding, Report, check_documents, check_sites
from fednotes.data.formats import read

SECRET = "Zyxwolan"


def note(name: str, text: str, *spans: Span, **more: object) -> Document:
    return Document(name, text, spans, **more)  # type: ignore[arg-type]


def of(report: Report, code: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.code == code]


def counts(report: Report, code: str) -> dict[str, int]:
    (found,) = of(report, code)
    return dict(found.counts)


def levels(report: Report) -> set[str]:
    return {finding.level for finding in report.findings}


def test_clean_corpus_has_no_warning() -> None:
    documents = [
        note(str(i), f"{SECRET}{i} helped number {i}", Span(0, len(f"{SECRET}{i}"), "Drug"))
        for i in range(25)
    ]
    report = check_documents(documents, TagSet(("Drug",)))
    assert levels(report) == {"info"}
    assert counts(report, "types") == {"Drug": 25}
    # 25 sentences of 4 tokens
    assert counts(report, "lengths") == {
        "sentences": 25,
        "tokens": 100,
        "p5": 4,
        "median": 4,
        "p95": 4,
        "longest": 4,
    }
    assert not any(SECRET in str(f) for f in report.findings)


def test_everything_that_is_wrong_is_counted() -> None:
    """One flaw at a time, planted by hand: the expected numbers are what was planted."""
    documents = [
        note("a", f"{SECRET} helped", Span(0, 4, "Drug")),  # off the token boundary
        note("b", f"{SECRET} and {SECRET}", Span(0, 21, "Drug"), Span(0, 8, "Drug")),  # nested
        note("c", "arm and leg pain", Span(0, 16, "Sign", ((0, 3), (12, 16)))),  # in pieces
        # A bell, a byte-order mark and a joiner, which is seen as one where it joins two pictures.
        note("d", "Odd\u0007 text \ufeff here a\u200db \U0001f468\u200d\U0001f469"),  # no mention
        note("d", "   "),  # blank; repeats an id
        note("e", "same thing here twice .\nand more"),
        note("f", "Same thing  here twice .\nand more"),
        note("g", "many words in one line"),
    ]
    report = check_documents(documents, TagSet(("Drug", "Dose")), "x", max_tokens=4)
    assert levels(report) == {"info", "warning", "error"}
    assert counts(report, "unknown_labels") == {"Sign": 1}
    assert counts(report, "rare_types") == {"Drug": 3, "Dose": 0}
    assert counts(report, "bare_documents") == {"documents": 5, "of": 8}
    assert counts(report, "unprintable") == {"characters": 3, "documents": 1}
    assert counts(report, "blank_documents") == {"documents": 1}
    assert counts(report, "repeated_ids") == {"documents": 1}
    assert counts(report, "repeated_documents") == {"documents": 1}
    assert counts(report, "repeated_sentences")["sentences"] == 2
    assert counts(report, "snapped")["snapped"] == 1
    assert counts(report, "not_flat") == {"nested": 1}
    # longer than 4 tokens: "same … twice ." (5, two times), "many …" (5), "Odd^G text BOM here" (5)
    assert counts(report, "long_sentences") == {"sentences": 4}
    assert not any(SECRET in str(f) or "Odd" in str(f) for f in report.findings)
    without = check_documents(documents, None, "x")
    assert counts(without, "not_flat") == {"discontinuous": 1, "nested": 1}


def test_a_repeated_note_of_one_sentence_is_a_repeated_sentence() -> None:
    report = check_documents([note("a", "Seen ."), note("b", "Seen ."), note("c", "Not seen .")])
    assert of(report, "repeated_documents") == []
    assert counts(report, "repeated_sentences") == {"sentences": 1, "of": 3}


def test_bad_offsets_and_empty_corpora_are_errors() -> None:
    report = check_documents([note("a", "short", Span(0, 99, "X"), Span(3, 3, "X"))])
    assert counts(report, "offsets") == {"mentions": 2}
    assert levels(check_documents([])) == {"error"}
    assert of(check_documents([note("a", "no mention")]), "no_mentions")[0].level == "error"
    assert levels(check_sites([])) == {"error"}


def site(name: str, types: tuple[str, ...], train: list[str], test: list[str]) -> SiteData:
    def documents(part: str, texts: list[str]) -> tuple[Document, ...]:
        return tuple(
            note(f"{part}{i}", t, Span(0, len(t.split()[0]), types[0]), patient=f"p{i}")
            for i, t in enumerate(texts)
        )

    return SiteData(name, TagSet(types), documents("tr", train), (), documents("te", test))


def test_leaks_within_and_between_sites() -> None:
    """Site a: two of three test sentences are in train, one of them with five words or more.
    Site b's test holds one sentence of a's train."""
    a = site(
        "a",
        ("Drug",),
        ["one two three four five", "short one", "other"],
        ["One two three four five", "short  one", "new"],
    )
    b = site("b", ("Drug", "ADE"), ["b one"], ["other"])
    report = check_sites([a, b])
    leak, between = of(report, "leakage"), of(report, "leakage_between_sites")
    assert [(f.where, f.level, dict(f.counts)) for f in leak] == [
        ("a", "warning", {"sentences": 2, "of": 3, "long": 1}),
    ]
    assert [(f.where, f.level, f.counts["sentences"]) for f in between] == [("b", "info", 1)]
    assert {f.where for f in of(report, "shared_patients")} == {"a", "b"}
    assert {f.where for f in of(report, "empty_part")} == {"a/valid", "b/valid"}
    assert of(report, "no_shared_types") == []
    # first words "one", "short", "other" at a and "b" at b: nothing in common
    assert counts(report, "overlapping_forms") == {"forms": 0}


def test_tag_sets_without_overlap_and_empty_sites() -> None:
    a = site("a", ("Drug",), ["one two"], ["x y"])
    b = site("b", ("Problem",), ["one three"], ["z"])
    empty = SiteData("c", TagSet(("Drug",)), (), (), ())
    bare = SiteData("c", TagSet(("Drug",)), (note("n", "nothing"),), (), ())
    report = check_sites([a, b, empty, bare])
    assert [f.where for f in of(report, "no_shared_types")] == ["b"]
    assert [f.where for f in of(report, "empty")] == ["c/train"]
    assert [f.where for f in of(report, "no_mentions")] == ["c/train"]
    assert counts(report, "site_ids") == {"sites": 2}
    assert counts(report, "overlapping_forms") == {"forms": 1}


@pytest.mark.parametrize("bare", ["valid", "test", None])
def test_held_out_parts_without_mentions(bare: str | None) -> None:
    """A warning for that part only; a part without documents is `empty_part`."""
    parts = {
        part: (Document(part, f"{part} {SECRET}", () if part == bare else (Span(0, 4, "X"),)),)
        for part in ("train", "valid", "test")
    }
    report = check_sites([SiteData("s", TagSet(("X",)), **parts)])
    for part in ("valid", "test"):
        found = [(f.level, f.where) for f in of(report, f"no_{part}_mentions")]
        assert found == ([("warning", f"s/{part}")] if part == bare else [])
    assert not any(SECRET in str(f) for f in report.findings)
    without = check_sites([SiteData("s", TagSet(("X",)), parts["train"], (), ())])
    assert len(of(without, "empty_part")) == 2
    assert not of(without, "no_valid_mentions") + of(without, "no_test_mentions")


@pytest.mark.corpora
def test_maccrobat_has_its_44_discontinuous_mentions(corpora: Path) -> None:
    report = check_documents(read(corpora / "maccrobat", "brat"))
    assert counts(report, "not_flat")["discontinuous"] == 44
