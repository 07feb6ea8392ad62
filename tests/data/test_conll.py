"""CoNLL: documents, schemes, repairs, and the same bytes when written again."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fednotes.core.types import Document, Span
from fednotes.data.formats import conll, read

File = Callable[..., Path]
Forms = Callable[[Document], list[tuple[str, str]]]
Complains = Callable[..., None]

BIO = "He\tO\ntook\tO\nthe\tB-Drug\ndrug\tI-Drug\n\n#\tO\n1\tB-ADR\n\n"
OTHER_SCHEMES = {
    "IOB1": "a\tI-X\nb\tB-X\nc\tI-X\nd\tO\n\n",
    "BIOES": "a\tS-X\nb\tB-X\nc\tE-X\nd\tO\n\n",
    "BILOU": "a\tU-X\nb\tB-X\nc\tL-X\nd\tO\n\n",
    "BMES": "a\tS-X\nb\tB-X\nc\tM-X\nd\tE-X\n\n",
    "IO": "a\tI-X\nb\tI-X\nc\tO\nd\tI-Y\n\n",
}


def test_conll_without_markers_has_a_document_per_sentence(file: File, forms: Forms) -> None:
    """Tokens joined by a space; a token # stays a token."""
    first, second = read(file(BIO, "train.tsv"))
    assert (first.id, first.text) == ("train:1", "He took the drug")
    assert (second.id, second.text) == ("train:2", "# 1")
    assert forms(first) == [("the drug", "Drug")]
    assert forms(second) == [("1", "ADR")]
    assert first.tokens == ((0, 2), (3, 7), (8, 11), (12, 16))
    assert first.sentences == ((0, 16),)


@pytest.mark.parametrize(
    "text",
    [
        "# newdoc id = n1\na\tO\nb\tB-X\n\n# sent 2\n# more\nc\tI-X\n\n# newdoc id = n2\nd\tO\n\n",
        "-DOCSTART-\t-X-\tO\n\na\tNN\tO\nb\tVB\tB-X\n\nc\tNN\tO\n\n-DOCSTART-\t-X-\tO\n\nd\tNN\tO\n\n",
        "-DOCSTART- O\n\na O\nb B-X\n\nc O\n\n-DOCSTART- O\n\n# O\n\n",
    ],
)
def test_conll_with_markers(file: File, text: str, tmp_path: Path, forms: Forms) -> None:
    """A document per marker, sentences on lines; written again it is the same file."""
    path = file(text.replace("c\tI-X", "c\tB-X"))
    documents = read(path)
    assert documents[0].text == "a b\nc"
    assert len(documents) == 2
    assert documents[0].sentences == ((0, 3), (4, 5))
    assert forms(documents[0])[0] == ("b", "X")
    conll.write(documents, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("scheme", OTHER_SCHEMES)
def test_conll_schemes(file: File, scheme: str, tmp_path: Path, forms: Forms) -> None:
    """Each scheme is recognised, means the same spans by hand, and is written as it was."""
    path = file(OTHER_SCHEMES[scheme])
    (document,) = read(path)
    assert document.meta["conll"]["scheme"] == scheme
    assert "repaired" not in document.meta
    spans = {"BMES": [("a", "X"), ("b c d", "X")], "IO": [("a b", "X"), ("d", "Y")]}
    assert forms(document) == spans.get(scheme, [("a", "X"), ("b c", "X")])
    conll.write([document], tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == path.read_bytes()


def test_conll_repairs_are_counted(file: File, forms: Forms) -> None:
    """Two I- tags that continue nothing in a file that writes B- elsewhere."""
    first, second = read(file("a\tI-X\nb\tO\nc\tB-X\nd\tI-Y\n\ne\tB-X\n\n"))
    assert forms(first) == [("a", "X"), ("c", "X"), ("d", "Y")]
    assert first.meta["repaired"] == 2
    assert "repaired" not in second.meta


def test_conll_windows_file(file: File) -> None:
    """A byte-order mark and CRLF change nothing."""
    plain = read(file(BIO))
    assert read(file("\ufeff" + BIO.replace("\n", "\r\n"))) == plain


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\tO\nb\tx\tO\n", "f.txt:2: 3 columns, expected 2"),
        ("a\tO\nb\n", "f.txt:2: 1 columns, expected 2"),
        ("a\tO\nb\tDrug\n", "f.txt:2: the last column is no tag"),
        ("a\tO\n\tO\n", "f.txt:2: the token is empty"),
        ("a\tO\n# remark\nb\tO\n", "f.txt:2: 1 columns"),
        ("a O\nb O x\n", "f.txt:2: 3 columns, expected 2"),
        ("# newdoc id = x\n\n", "no tokens"),
    ],
)
def test_conll_errors(file: File, text: str, message: str, complains: Complains) -> None:
    """Path, line and count; never the text."""
    complains(file(text), message, "conll")


def test_conll_from_other_sources(tmp_path: Path) -> None:
    """Documents without tokens are cut by the project's rule."""
    spans = (Span(3, 9, "X"), Span(3, 6, "Y"), Span(12, 15, "X"))
    document = Document("n 1", "He has 60mg. Newly up.", spans)
    conll.write([document], tmp_path / "o.conll")
    lines = "He\tO|has\tB-X|60mg\tI-X|.\tO||Newly\tB-X|up\tO|.\tO||"
    expected = "# newdoc id = n 1\n" + lines.replace("|", "\n")
    assert (tmp_path / "o.conll").read_text() == expected
    (again,) = read(tmp_path / "o.conll")
    assert again.id == "n 1"


FORM = st.text(st.characters(exclude_categories=["Cs", "Z", "C"]), min_size=1, max_size=6)
ROWS = st.lists(
    st.lists(st.tuples(FORM, st.sampled_from(["O", "B-X", "B-Y"])), min_size=1, max_size=6),
    min_size=1,
    max_size=5,
)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=ROWS)
def test_conll_round_trip(rows: list[list[tuple[str, str]]], tmp_path: Path) -> None:
    """Any tokens, also `#` and accents: the written file is the read one."""
    text = "".join("".join(f"{f}\t{t}\n" for f, t in s) + "\n" for s in [[("a", "O")], *rows])
    if "-DOCSTART-" in text:
        return
    (tmp_path / "a").write_bytes(text.encode())
    documents = read(tmp_path / "a", "conll")
    assert len(documents) == len(rows) + 1
    conll.write(documents, tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == text.encode()


LABELS = {
    "psytar": Counter(ADR=3543, DI=716, WD=444, SSI=340),
    "ncbi_disease": Counter(Disease=787 + 960 + 5134),
}


@pytest.mark.corpora
@pytest.mark.parametrize("folder", ["psytar", "ncbi_disease", "bc5cdr", "gum"])
def test_real_conll_files_come_out_as_they_went_in(
    corpora: Path, folder: str, tmp_path: Path
) -> None:
    """Byte for byte; mentions are counted on the raw lines (each has one B-)."""
    labels: Counter[str] = Counter()
    for path in sorted(corpora.joinpath(folder).iterdir()):
        if not path.is_file() or not conll.accepts(path):
            continue
        documents = read(path)
        conll.write(documents, tmp_path / path.name)
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
        found = Counter(s.label for d in documents for s in d.spans)
        assert found == Counter(re.findall(r"\tB-(.+)$", path.read_text("utf-8"), re.MULTILINE))
        labels += found
    assert labels == LABELS.get(folder, labels)
    assert labels.total() > 5000
