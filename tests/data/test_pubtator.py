"""PubTator: offsets over title and abstract, concepts, relations."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fednotes.core.types import Document, Span
from fednotes.data.formats import read

File = Callable[..., Path]
Forms = Callable[[Document], list[tuple[str, str]]]
Complains = Callable[..., None]

PUBTATOR = """1|t|Lithium toxicity.
1|a|A case | of cardiac and renal failure.
1\t0\t7\tLithium\tChemical\tD008094
1\t33\t58\tx\tDisease\tD1|D2\tcardiac failure|renal failure
1\tCID\tD008094\tD1

2|t|Nothing here.
2|a|
"""


def test_pubtator(file: File, forms: Forms) -> None:
    """Offsets count one character between title and abstract; concepts and relations kept."""
    text = PUBTATOR.replace("33\t58\tx", "28\t53\tcardiac and renal failure")
    text = text.replace("28\t53", "{}\t{}".format(*_where(PUBTATOR)))
    first, second = read(file(text))
    assert (first.id, second.id) == ("1", "2")
    assert first.text == "Lithium toxicity.\nA case | of cardiac and renal failure."
    assert forms(first) == [("Lithium", "Chemical"), ("cardiac and renal failure", "Disease")]
    assert first.meta["concepts"][0] == (0, 7, "Chemical", "D008094")
    assert first.meta["concepts"][1][3:] == ("D1|D2", "cardiac failure|renal failure")
    assert first.meta["relations"] == (("CID", "D008094", "D1"),)
    assert (second.text, second.spans) == ("Nothing here.", ())


def _where(text: str) -> tuple[int, int]:
    title, abstract = (line.split("|", 2)[2] for line in text.split("\n")[:2])
    start = f"{title} {abstract}".index("cardiac and renal failure")
    return start, start + 25


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1\t0\t7\tLithum\tChemical\tD1", "f.txt:3: 0:7 is not what the text holds"),
        ("1\t0\t900\tLithium\tChemical\tD1", "f.txt:3: 0:900 is no stretch"),
        ("1\t0\t7", "f.txt:3: 3 columns"),
        ("1\t0", "f.txt:3: 2 columns"),
        ("1\t0\t²\tLithium\tChemical\tD1", "f.txt:3: 6 columns, expected"),
        ("9\t0\t7\tLithium\tChemical\tD1", "f.txt:3: no title line with this PMID"),
        ("1|a|again", "f.txt:3: a second abstract"),
        ("1\t0\t7\tLithium\t \tD1", "f.txt:3: the type is empty"),
    ],
)
def test_pubtator_errors(file: File, line: str, message: str, complains: Complains) -> None:
    """Path and line; never the text."""
    complains(file("1|t|Lithium toxicity.\n1|a|A case.\n" + line), message)


@pytest.mark.corpora
def test_pubtator_of_bc5cdr(corpora: Path) -> None:
    """1,500 articles; mentions and relations counted on the raw lines."""
    folder = corpora / "bc5cdr" / "pubtator"
    documents = read(folder)
    lines = "\n".join(p.read_text("utf-8") for p in sorted(folder.glob("*_corpus.txt")))
    assert len(documents) == 1500
    mentions = len(re.findall(r"^\d+\t\d+\t\d+\t", lines, re.MULTILINE))
    assert sum(len(d.spans) for d in documents) == mentions == 28_785
    relations = len(re.findall(r"^\d+\tCID\t", lines, re.MULTILINE))
    assert sum(len(d.meta.get("relations", ())) for d in documents) == relations == 3116


ARTICLE = "1|t|Zyxwolan toxicity of rs12.\n1|a|A case.\n1\t0\t8\tZyxwolan\tChemical\tD1\n"


@pytest.mark.parametrize(
    "line",
    [
        "1\tx\t8\tZyxwolan\tChemical\tD1",
        "1\tx\ty\tZyxwolan\tChemical\tD1",
        "1\tx\ty\tZyxwolan\tChemical",
        "1\tx\t8\tZyxwolan",
        "1\t0\tx\tZyxwolan\tChemical\tD1",
        "1\t-1\t8\tZyxwolan\tChemical\tD1",
        "1\t0.0\t8\tZyxwolan\tChemical",
        "1\t\t8\tZyxwolan\tChemical\tD1",
        "1\t²\t8\tZyxwolan\tChemical\tD1",
        "1\tO\t8\tZyxwolan\tChemical\tD1\tx|y",
    ],
)
def test_pubtator_offsets_that_are_no_numbers(file: File, complains: Complains, line: str) -> None:
    """A mention that cannot be placed is no relation."""
    told = r"f.txt:4: \d columns, expected PMID, start, end \(numbers\)"
    complains(file(f"{ARTICLE}{line}\n"), told)


@pytest.mark.parametrize(
    "line",
    [
        "1\tCID\tD1\tD2",
        "1\tAssociation\t3175\tD1\tNovel",  # BioRED: a gene's number, and novelty
        "1\tPositive_Correlation\t3175\trs12\tNo",
        "1\tCID\t8\tD2",
    ],
)
def test_pubtator_relations(file: File, line: str) -> None:
    (document,) = read(file(f"{ARTICLE}{line}\n"))
    assert document.meta["relations"] == (tuple(line.split("\t")[1:]),)
    assert document.spans == (Span(0, 8, "Chemical"),)
