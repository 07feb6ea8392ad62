"""i2b2 2010: lines and tokens as offsets, texts beside or in another folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fednotes.core.types import Document
from fednotes.data.formats import read

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
