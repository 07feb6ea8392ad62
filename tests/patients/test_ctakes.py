"""cTAKES' XMI and flat files of CUIs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fednotes.core.errors import DataError
from fednotes.patients.concepts import Mention, bags_of_mentions, read_ctakes

File = Callable[..., Path]

XMI = """<?xml version="1.0" encoding="UTF-8"?>
<xmi:XMI xmlns:xmi="http://www.omg.org/XMI"
  xmlns:textsem="http:///org/apache/ctakes/typesystem/type/textsem.ecore"
  xmlns:refsem="http:///org/apache/ctakes/typesystem/type/refsem.ecore"
  xmlns:cas="http:///uima/cas.ecore" xmi:version="2.0">
  <cas:Sofa xmi:id="1" sofaString="No fever. &lt;b&gt; Mother had gout."/>
  {body}
  <cas:View sofa="1" members="1 20"/>
</xmi:XMI>
"""
BODY = """
  <textsem:DiseaseDisorderMention xmi:id="21" sofa="1" begin="28" end="32"
    ontologyConceptArr="12" polarity="1" subject="family_member" conditional="false"/>
  <textsem:SignSymptomMention xmi:id="20" sofa="1" begin="3" end="8"
    ontologyConceptArr="10 11 13" polarity="-1" subject="patient" conditional="false"/>
  <textsem:MedicationMention xmi:id="22" sofa="1" begin="40" end="44"
    ontologyConceptArr="30" polarity="1" conditional="true"/>
  <textsem:DiseaseDisorderMention xmi:id="23" sofa="1" begin="50" end="54"
    ontologyConceptArr="14" polarity="1"/>
  <textsem:EventMention xmi:id="24" sofa="1" begin="60" end="64" polarity="1"/>
  <refsem:UmlsConcept xmi:id="10" codingScheme="SNOMEDCT_US" code="1" cui="C0015967" tui="T184"/>
  <refsem:UmlsConcept xmi:id="11" codingScheme="SNOMEDCT_US" code="2" cui="C0015967" tui="T184"/>
  <refsem:UmlsConcept xmi:id="12" codingScheme="SNOMEDCT_US" code="3" cui="C0018099" tui="T047"/>
  <refsem:UmlsConcept xmi:id="13" codingScheme="SNOMEDCT_US" code="4" cui="C0000013" tui="T047"/>
  <refsem:OntologyConcept xmi:id="14" codingScheme="RXNORM" code="5"/>
  <cas:FSArray xmi:id="30" elements="12 13"/>
"""
EXPECTED = [
    Mention(("C0015967", "C0000013"), False),  # negated
    Mention(("C0018099",), False),  # of the family
    Mention(("C0018099", "C0000013"), False),  # hypothetical
]


def test_xmi(file: File) -> None:
    path = file(XMI.format(body=BODY), "notes/n1.txt.xmi")
    assert read_ctakes(path)[0] == {"n1": EXPECTED}
    holding = BODY.replace('"-1"', '"1"').replace("family_member", "Patient")
    spoken = read_ctakes(file(XMI.format(body=holding), "n3.xmi"))[0]["n3"]
    assert [found.holds for found in spoken] == [True, True, False]
    file(XMI.format(body=""), "notes/n2.xmi")
    file("a README", "notes/README.md")
    made, report = read_ctakes(path.parent)
    assert made == {"n1": EXPECTED, "n2": []}
    assert report.rows == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (XMI.format(body=BODY)[:900], "the file is no XML"),
        ("", "the file is no XML"),
        ("no xml", "the file is no XML"),
        ("<a/>", "no XMI of cTAKES"),
        (XMI.format(body='<textsem:M begin="x" end="4" ontologyConceptArr="1"/>'), "begin and end"),
        (
            '<!DOCTYPE a [<!ENTITY b "bbbb"><!ENTITY c "&b;&b;">]>\n<xmi:XMI>&c;</xmi:XMI>',
            "DOCTYPE",
        ),
        ('<!DOCTYPE a SYSTEM "file:///etc/passwd">\n<xmi:XMI/>', "DOCTYPE"),
    ],
)
def test_xmi_that_is_refused(content: str, message: str, file: File) -> None:
    path = file(content, "n.xmi")
    with pytest.raises(DataError, match=message) as caught:
        read_ctakes(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        "p1\tC0000001 C0000002 -C0000001\np2\np1 C0000003\n",
        "p1,C0000001,C0000002,-C0000001\np2,\np1,C0000003",
        "patient|cuis\np1|C0000001|C0000002|-C0000001\np2\np1|C0000003",
    ],
)
def test_flat_lines(content: str, file: File) -> None:
    made, report = read_ctakes(file(content, "cuis.txt"))
    assert (report.rows, report.damaged) == (3, 0)
    assert made["p1"] == [
        Mention(("C0000001",)),
        Mention(("C0000002",)),
        Mention(("C0000001",), False),
        Mention(("C0000003",)),
    ]
    assert made["p2"] == []


def test_flat_lines_that_are_damaged(file: File) -> None:
    path = file(b"p1 C0000001\np2 C1\n\xff C0000001\nC0000002 C0000003\np3 C0000001\np4 C0000001\n")
    made, report = read_ctakes(path)
    assert sorted(made) == ["p1", "p3", "p4"]
    assert (report.rows, report.damaged) == (6, 3)
    with pytest.raises(DataError, match=r"other\.txt:2: 1 of 1 lines .* lines of an id and CUIs"):
        read_ctakes(file("some words\nof a note\n", "other.txt"))
    with pytest.raises(DataError, match="lines of an id and CUIs"):
        read_ctakes(file("", "empty.txt"))


def test_a_folder_of_cui_files(file: File) -> None:
    path = file("C0000001 C0000002\n-C0000003\n", "flat/p1.txt")
    file("", "flat/p2.txt")
    file("C0000001\n???\n", "flat/p3.txt")
    made, report = read_ctakes(path.parent)
    assert [len(found) for found in made.values()] == [3, 0, 1]
    assert (report.rows, report.damaged) == (4, 1)
    file("words of a note\nand more\nand more\n", "flat/p4.txt")
    with pytest.raises(DataError, match="4 of 7 lines are no CUIs"):
        read_ctakes(path.parent)


def test_bags() -> None:
    mentions = {"p1": EXPECTED, "p2": [], "p3": [Mention(("C0018099",))] * 9}
    vocabulary = ("C0015967", "C0018099")
    patients, made, counts = bags_of_mentions(mentions, vocabulary, most=8)
    assert patients == ("p1", "p2")
    assert made.concepts.tolist() == []
    assert counts == {"patients": 3, "mentions": 9, "unknown": 0, "left_out": 1, "without": 2}
    patients, made, counts = bags_of_mentions(mentions, vocabulary, context="mark")
    assert made.vocabulary == 4
    assert made.take([0]).concepts.tolist() == [2, 3, 3]
    assert made.take([2]).concepts.tolist() == [1] * 9
    assert counts["unknown"] == 2
    _, made, _ = bags_of_mentions(mentions, vocabulary, context="off")
    assert made.take([0]).concepts.tolist() == [0, 1, 1]
