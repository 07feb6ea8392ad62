"""i2b2 2012: an invented record, its dirt, and what is refused. No real record is public."""

from __future__ import annotations

from pathlib import Path

import pytest

from fednotes.core.errors import DataError
from fednotes.core.types import Span
from fednotes.data.formats import guess_format, read

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


def _record(tmp_path: Path, content: str = RECORD, name: str = "1.xml") -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode())
    return path


def test_events_and_times(tmp_path: Path) -> None:
    path = _record(tmp_path)
    assert guess_format(path) == "i2b2-2012"
    (document,) = read(path)
    text = "Admission Date :\n2001-02-03\nHe had chest pain and was given aspirin .\n"
    assert (document.id, document.text, document.meta) == ("1", text, {})
    assert [(text[s.start : s.end], s.label) for s in document.spans] == [
        ("chest pain", "PROBLEM"),
        ("aspirin", "TREATMENT"),
        ("2001-02-03", "DATE"),
    ]
    assert [text[a:b] for a, b in document.sentences] == text.splitlines()


def test_folder_and_line_ends(tmp_path: Path) -> None:
    """Other files beside records are passed over; CRLF counts as one character, as in XML."""
    _record(tmp_path)
    _record(tmp_path, RECORD.replace("\n", "\r\n"), "2.xml")
    _record(tmp_path, "x", "1.xml.extent")
    one, two = read(tmp_path)
    assert (one.id, two.id) == ("1", "2")
    assert (one.text, one.spans) == (two.text, two.spans)


def test_dirt(tmp_path: Path) -> None:
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
    (document,) = read(_record(tmp_path, record))
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
    (document,) = read(_record(tmp_path, escaped, "2.xml"))
    assert document.text == 'A 5" cut & burn .\n'
    assert document.spans[0] == Span(2, 8, "PROBLEM")


def test_offsets_after_a_strip(tmp_path: Path) -> None:
    """Public readers strip the text and subtract one: with three line ends first, that fits."""
    (document,) = read(_record(tmp_path, RECORD.replace("[CDATA[\n", "[CDATA[\n\n\n")))
    assert [document.text[s.start : s.end] for s in document.spans] == [
        "chest pain",
        "aspirin",
        "2001-02-03",
    ]


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
def test_what_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read(_record(tmp_path, RECORD.replace(old, new, 1)), "i2b2-2012")
    assert "\n" not in str(caught.value)
    assert "Zyxwolan" not in str(caught.value)


def test_a_record_without_mentions(tmp_path: Path) -> None:
    lines = [line for line in RECORD.splitlines() if not line.startswith(("<EVENT", "<TIMEX3"))]
    (document,) = read(_record(tmp_path, "\n".join(lines)))
    assert document.spans == ()
