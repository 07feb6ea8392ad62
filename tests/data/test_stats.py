"""Counts of small corpora, counted by hand, and of the real ones, as published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fednotes.core.types import Document, Span
from fednotes.data.formats import FORMATS, corpora, read
from fednotes.data.stats import corpus_stats, overlapping_forms, span_form

#      0123456789012345678901234567
ONE = "Aspirin gave me a  bad Rash."
SITES = {
    "posts": [
        Document("1", ONE, (Span(0, 7, "Drug"), Span(18, 27, "ADE"))),
        Document(
            "2", "Took aspirin.\nOK now.", (Span(5, 12, "Drug"),), sentences=((0, 13), (14, 21))
        ),
    ],
    "wards": [
        Document(
            "3",
            "No bad  rash, arm and leg pain",
            (Span(3, 12, "Sign"), Span(14, 30, "Sign", ((14, 17), (26, 30)))),
        ),
    ],
    "labs": [Document("4", "ASPIRIN", (Span(0, 7, "Test"),)), Document("5", "Nothing .")],
}


def test_table_by_hand() -> None:
    """Every number below was counted on the texts above; they are plain values for JSON."""
    stats = corpus_stats(SITES)
    posts, wards, labs = stats["sites"]
    assert posts == {
        **{"site": "posts", "documents": 2, "sentences": 3, "annotated_sentences": 2},
        **{"tokens": 7 + 3 + 3, "entities": {"ADE": 1, "Drug": 2}, "types": ["ADE", "Drug"]},
        **{"mentions": 3, "forms": 2, "discontinuous": 0},
    }
    assert (wards["entities"], wards["discontinuous"], wards["forms"]) == ({"Sign": 2}, 1, 2)
    assert (labs["sentences"], labs["annotated_sentences"], labs["documents"]) == (2, 1, 2)
    # "aspirin" at posts and labs, "bad rash" at posts and wards
    assert stats["overlapping"] == 2
    assert stats["pairwise"] == [[2, 1, 1], [1, 2, 0], [1, 0, 1]]
    assert json.loads(json.dumps(stats)) == stats
    assert corpus_stats({})["overlapping"] == 0


def test_forms() -> None:
    wards = SITES["wards"][0]
    assert [span_form(wards.text, s) for s in wards.spans] == ["bad rash", "arm pain"]
    assert overlapping_forms(SITES.values()) == {"aspirin", "bad rash"}


def test_catalogue_names_readers_that_exist() -> None:
    known = corpora()
    assert {item["format"] for item in known.values() if "format" in item} <= FORMATS.keys()
    told = {"what", "size", "licence", "source", "reference"}
    assert all(told <= item.keys() for item in known.values())
    assert len(known) == 21
    assert known["psytar"]["licence"] == "CC BY 4.0"


@pytest.mark.corpora
def test_psytar_counts_as_published(corpora: Path) -> None:
    """Mentions and sentences of the data's own description (ADR 3,543, DI 716, ...)."""
    documents = [
        d for f in ("train", "dev", "test") for d in read(corpora / "psytar" / f"{f}.txt", "conll")
    ]
    (site,) = corpus_stats({"psytar": documents})["sites"]
    assert site["entities"] == {"ADR": 3543, "DI": 716, "SSI": 340, "WD": 444}
    assert site["sentences"] == 5591


@pytest.mark.corpora
def test_maccrobat_counts_as_published(corpora: Path) -> None:
    (site,) = corpus_stats({"m": read(corpora / "maccrobat", "brat")})["sites"]
    assert (site["documents"], site["mentions"], len(site["types"])) == (200, 25189, 41)
    assert site["entities"]["Sign_symptom"] == 3382
    assert site["entities"]["Medication"] == 1080
