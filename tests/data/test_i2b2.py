"""i2b2 2010 (lines and tokens as offsets, texts beside or in another folder) and 2012."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fednotes.core.types import Document, Span
from fednotes.data.formats import guess_format, read

File = Callable[..., Path]
Forms = Callable[[Document], list[tuple[str, str]]]
Complains = Callable[..., None]

I2B2_TEXT = (
    'Admission Date :\nShe  had chest\tpain and " no " fever .\n\nA chest\nx-ray was done .\n'
)
I2B2_CON = """c="had chest\tpain" 2:1 2:2||t="problem"
c="" no " fever" 2:4 2:7||t="problem"
c="a chest x-ray" 4:0 5:0||t="test"
"""


@pytest.mark.parametrize(
    "layout", ["r.txt r.con", "txt/r.txt concept/r.con", "test_data/r.txt ref/concepts/r.con"]
)
def test_i2b2(file: File, layout: str, forms: Forms) -> None:
    """Lines from 1, tokens from 0 and parted by spaces only, the end included."""
    text, con = layout.split()
    file(I2B2_TEXT, text)
    path = file(I2B2_CON, con)
    (document,) = read(path.parent)
    assert document == read(path)[0]
    concepts = [
        ("had chest\tpain", "problem"),
        ('" no " fever', "problem"),
        ("A chest\nx-ray", "test"),
    ]
    assert forms(document) == concepts
    assert document.id == "r"
    assert len(document.sentences) == 4
    assert [document.text[a:b] for a, b in document.tokens[:3]] == ["Admission", "Date", ":"]


@pytest.mark.parametrize(
    ("con", "message"),
    [
        ('c="she" 2:0 2:0', "r.con:1: expected"),
        ('c="she" 0:0 0:0||t="x"', "r.con:1: 0:0 0:0 lies outside"),
        ('c="she" 2:0 2:90||t="x"', "r.con:1: 2:0 2:90 lies outside"),
        ('c="she" 99:0 99:0||t="x"', "r.con:1: 99:0 99:0 lies outside"),
        ('c="she" 2:2 2:1||t="x"', "r.con:1: the concept ends before"),
        ('c="he" 2:0 2:0||t="x"', "r.con:1: 1 of 1 concepts are not"),
    ],
)
def test_i2b2_errors(file: File, con: str, message: str, complains: Complains) -> None:
    """Path and line; never the text."""
    file(I2B2_TEXT, "r.txt")
    complains(file(con, "r.con"), message)


def test_i2b2_mismatches_are_counted(file: File, complains: Complains) -> None:
    """A few concepts may be written otherwise than the text."""
    file(I2B2_TEXT, "r.txt")
    path = file(I2B2_CON + 'c="it" 2:0 2:0||t="x"\n', "r.con")
    assert read(path)[0].meta == {"mismatched": 1}
    complains(file(I2B2_CON, "other/lone.con"), "its text lone.txt is neither")


# i2b2 2012: an invented record, its dirt, and what is refused. No real record is public.

REST = 'modality="FACTUAL" polarity="POS"'
RECORD = """<?xml version="1.0" encoding="UTF-8" ?>
<ClinicalNarrativeTemporalAnnotation>
<TEXT><![CDATA[
Admission Date :
2001-02-03
He had chest pain and was given aspirin .
]]></TEXT>
<TAGS>
<EVENT id="E0" start="36" end="46" text="chest pain" REST type="PROBLEM" />
<EVENT id="E1" start="61" end="68" text="aspirin" REST type="TREATMENT" />
<TIMEX3 id="T0" start="18" end="28" text="2001-02-03" type="DATE" val="2001-02-03" mod="NA" />
<SECTIME id="S0" start="18" end="28" text="2001-02-03" type="ADMISSION" dvalue="2001-02-03" />
<TLINK id="TL0" fromID="E0" fromText="chest pain" toID="E1" toText="aspirin" type="BEFORE" />
</TAGS>
</ClinicalNarrativeTemporalAnnotation>
""".replace("REST", REST)


def test_events_and_times(file: File, forms: Forms) -> None:
    path = file(RECORD, "1.xml")
    assert guess_format(path) == "i2b2-2012"
    (document,) = read(path)
    text = "Admission Date :\n2001-02-03\nHe had chest pain and was given aspirin .\n"
    assert (document.id, document.text, document.meta) == ("1", text, {})
    assert forms(document) == [
        ("chest pain", "PROBLEM"),
        ("aspirin", "TREATMENT"),
        ("2001-02-03", "DATE"),
    ]
    assert [text[a:b] for a, b in document.sentences] == text.splitlines()


def test_folder_and_line_ends(file: File) -> None:
    """Other files beside records are passed over; CRLF counts as one character, as in XML."""
    file(RECORD, "1.xml")
    file(RECORD.replace("\n", "\r\n"), "2.xml")
    one, two = read(file("x", "1.xml.extent").parent)
    assert (one.id, two.id) == ("1", "2")
    assert (one.text, one.spans) == (two.text, two.spans)


def test_dirt(file: File) -> None:
    """Quotes and ampersands as they are, or as entities; the same tag twice; text without CDATA."""
    body = 'A 5" cut & burn , R&amp;D .'
    mentions = [
        (3, 9, '5" cut', "problem"),
        (3, 9, "5&quot; cut", "PROBLEM"),
        (10, 16, "& burn", "PROBLEM"),
        (10, 16, "& scald", "TEST"),
    ]
    tags = "".join(
        f'<EVENT id="E" start="{start}" end="{end}" text="{form}" {REST} type="{label}" />\n'
        for start, end, form, label in mentions
    )
    record = f"<x>\n<TEXT><![CDATA[\n{body}\n]]></TEXT>\n<TAGS>\n{tags}</TAGS>\n</x>\n"
    (document,) = read(file(record, "1.xml"))
    assert document.text == body + "\n"
    assert document.spans == (
        Span(2, 8, "PROBLEM"),
        Span(9, 15, "PROBLEM"),
        Span(9, 15, "TEST"),
    )
    assert document.meta == {"mismatched": 1}
    escaped = (
        record.replace("<![CDATA[", "")
        .replace("]]>", "")
        .replace(body, "A 5&quot; cut &amp; burn .")
    )
    (document,) = read(file(escaped, "2.xml"))
    assert document.text == 'A 5" cut & burn .\n'
    assert document.spans[0] == Span(2, 8, "PROBLEM")


def test_offsets_after_a_strip(file: File, forms: Forms) -> None:
    """Public readers strip the text and subtract one: with three line ends first, that fits."""
    (document,) = read(file(RECORD.replace("[CDATA[\n", "[CDATA[\n\n\n"), "1.xml"))
    assert [form for form, _ in forms(document)] == ["chest pain", "aspirin", "2001-02-03"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('end="46"', 'end="4600"', r"1.xml:9: 36:4600 is no stretch of the text \(71 characters\)"),
        ('end="46"', 'end="36"', "1.xml:9: 36:36 is no stretch"),
        ('end="46"', 'end="x"', "1.xml:9: expected id, start, end, text"),
        ('polarity="POS" type="PROBLEM" ', "", "1.xml:9: expected id, start, end, text"),
        ("He had", "Zyxwolan", "3 mentions are not what|2 of 3 mentions are not what"),
        ("<TAGS>", "", "no TAGS element"),
        ("</TEXT>", "", "no TEXT element"),
    ],
)
def test_what_is_refused(
    file: File, complains: Complains, old: str, new: str, message: str
) -> None:
    complains(file(RECORD.replace(old, new, 1), "1.xml"), message, "i2b2-2012")


def test_a_record_without_mentions(file: File) -> None:
    lines = [line for line in RECORD.splitlines() if not line.startswith(("<EVENT", "<TIMEX3"))]
    (document,) = read(file("\n".join(lines), "1.xml"))
    assert document.spans == ()
