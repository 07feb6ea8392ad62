"""Text that may identify a patient: prefilters save time and miss nothing."""

from __future__ import annotations

import re
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from fednotes.core.parsing import read_shipped_table
from fednotes.data.identifiers import KINDS, count_identifiers

# Pieces of identifiers, and what may stand between them.
PIECES = [
    *("Dr", "Mrs", "Prof", "Mary", "Wei", "Q", "Smith", "O'Neil", "Jones-Roe"),
    *("patient", "NAME", "Signed by", "MRN", "ssn", "Record No", "unit number", "ID"),
    *("3", "12", "03", "31", "078", "1999", "2021", "4567", "00123456", "62704"),
    *("Jan", "March", "Sept", "3rd", "of", "Old Mill", "Road", "St", "Springfield"),
    *("IL", "j.roe", "mail.example.org", "X", "ſſN", "[**Name**]", "___", "<DATE>"),
]
BETWEEN = [
    "",
    " ",
    "  ",
    ".",
    ". ",
    ",",
    ", ",
    "-",
    "/",
    ":",
    ": ",
    "@",
    "(",
    ") ",
    "+",
]

note = st.lists(
    st.tuples(st.sampled_from(PIECES), st.sampled_from(BETWEEN)), max_size=14
).map(lambda pairs: "".join(piece + between for piece, between in pairs))


def count_without_hints(text: str) -> Counter[str]:
    text = re.sub(
        read_shipped_table("data/identifiers.toml")["placeholder"], "\n", text
    )
    counts: Counter[str] = Counter()
    for kind, pattern in KINDS.items():
        text, number = pattern.subn("\n", text)
        counts[kind] += number
    return +counts


@settings(max_examples=400)
@given(note)
def test_prefilters_miss_no_identifier(text: str) -> None:
    assert count_identifiers(text) == count_without_hints(text)


def test_each_kind_of_identifier_has_an_example_that_passes_its_prefilter() -> None:
    examples = {
        "e-mail addresses": ["a@b.org"],
        "record numbers": ["MRN 12345", "unit number: no. 1234", "078-05-1120"],
        "dates": [
            *("1/2/2021", "01-02-2021", "3.4.2021", "2021-03-04", "2021/3/4"),
            *("Jan 3, 2021", "May 3rd 2021", "3rd of March, 2021", "3 Sept. 2021"),
        ],
        "telephone numbers": ["(555) 010-9999", "555.010.8888", "+49 30 1234 5678"],
        "addresses": ["12 Old Mill Road", "7 Elm Terrace", "Austin, TX 78701-1234"],
        "names": ["Mrs. Q. Roe", "Dr Okafor", "Name: Jane Roe", "Mary Q. Contrary"],
    }
    assert examples.keys() == KINDS.keys()
    for kind, texts in examples.items():
        for text in texts:
            assert count_identifiers(text) == {kind: 1}, text
