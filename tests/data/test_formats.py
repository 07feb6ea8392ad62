"""Readers and writers: what a file says is what a Document holds, and back."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fednotes.core.errors import ConfigError, DataError
from fednotes.core.types import Document, Span
from fednotes.data.formats import FORMATS, brat, conll, guess_format, jsonl, read
from fednotes.data.tags import Alignment

BIO = "He\tO\ntook\tO\nthe\tB-Drug\ndrug\tI-Drug\n\n#\tO\n1\tB-ADR\n\n"
OTHER_SCHEMES = {
    "IOB1": "a\tI-X\nb\tB-X\nc\tI-X\nd\tO\n\n",
    "BIOES": "a\tS-X\nb\tB-X\nc\tE-X\nd\tO\n\n",
    "BILOU": "a\tU-X\nb\tB-X\nc\tL-X\nd\tO\n\n",
    "BMES": "a\tS-X\nb\tB-X\nc\tM-X\nd\tE-X\n\n",
    "IO": "a\tI-X\nb\tI-X\nc\tO\nd\tI-Y\n\n",
}


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file and gives its path."""

    def make(content: str | bytes, name: str = "f.txt") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return make


def _forms(document: Document) -> list[tuple[str, str]]:
    return [(document.text[s.start : s.end], s.label) for s in document.spans]


def _complains(path: Path, message: str, format: str | None = None) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read(path, format)
    assert "\n" not in str(caught.value)


# CoNLL


def test_conll_without_markers_has_a_document_per_sentence(file: Callable[..., Path]) -> None:
    """Tokens joined by a space; a token # stays a token."""
    first, second = read(file(BIO, "train.tsv"))
    assert (first.id, first.text) == ("train:1", "He took the drug")
    assert (second.id, second.text) == ("train:2", "# 1")
    assert _forms(first) == [("the drug", "Drug")]
    assert _forms(second) == [("1", "ADR")]
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
def test_conll_with_markers(file: Callable[..., Path], text: str, tmp_path: Path) -> None:
    """A document per marker, sentences on lines; written again it is the same file."""
    path = file(text.replace("c\tI-X", "c\tB-X"))
    documents = read(path)
    assert documents[0].text == "a b\nc"
    assert len(documents) == 2
    assert documents[0].sentences == ((0, 3), (4, 5))
    assert _forms(documents[0])[0] == ("b", "X")
    conll.write(documents, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("scheme", OTHER_SCHEMES)
def test_conll_schemes(file: Callable[..., Path], scheme: str, tmp_path: Path) -> None:
    """Each scheme is recognised, means the same spans by hand, and is written as it was."""
    path = file(OTHER_SCHEMES[scheme])
    (document,) = read(path)
    assert document.meta["conll"]["scheme"] == scheme
    assert "repaired" not in document.meta
    spans = {"BMES": [("a", "X"), ("b c d", "X")], "IO": [("a b", "X"), ("d", "Y")]}
    assert _forms(document) == spans.get(scheme, [("a", "X"), ("b c", "X")])
    conll.write([document], tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == path.read_bytes()


def test_conll_repairs_are_counted(file: Callable[..., Path]) -> None:
    """Two I- tags that continue nothing in a file that writes B- elsewhere."""
    first, second = read(file("a\tI-X\nb\tO\nc\tB-X\nd\tI-Y\n\ne\tB-X\n\n"))
    assert _forms(first) == [("a", "X"), ("c", "X"), ("d", "Y")]
    assert first.meta["repaired"] == 2
    assert "repaired" not in second.meta


def test_conll_windows_file(file: Callable[..., Path]) -> None:
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
def test_conll_errors(file: Callable[..., Path], text: str, message: str) -> None:
    """Path, line and count; never the text."""
    _complains(file(text), message, "conll")


def test_conll_from_other_sources(tmp_path: Path) -> None:
    """Documents without tokens are cut by the project's rule; what is changed is counted."""
    spans = (Span(3, 9, "X"), Span(3, 6, "Y"), Span(12, 15, "X"))
    document = Document("n 1", "He has 60mg. Newly up.", spans)
    alignment, flat = conll.write([document], tmp_path / "o.conll")
    assert alignment == Alignment(snapped=2)
    assert (flat.spans, flat.kept, flat.nested) == (3, 2, 1)
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


# brat

ANN = """T1\tADE 12 22\tbelly pain
T2\tADE 6 11;18 22\tupper pain
R1\tCause Arg1:T1 Arg2:T3
T3\tDrug 29 36\taspirin
E1\tADE:T1
A1\tNegated E1
#1\tAnnotatorNotes T3\tsure?
*\tOVERLAP T1 T2
"""
NOTE = "Had a upper belly pain after\naspirin.\n"


def _pair(file: Callable[..., Path], note: str, ann: str) -> Path:
    file(note, "p/n1.txt")
    return file(ann, "p/n1.ann")


def _moved(ann: str, by: int) -> str:
    """The annotations with all offsets moved."""

    def move(match: re.Match[str]) -> str:
        return re.sub(r"\d+", lambda m: str(int(m.group()) + by), match.group())

    return re.sub(r"(?<= )\d+ \d+(;\d+ \d+)*(?=\t)", move, ann)


def test_brat_mentions(file: Callable[..., Path], tmp_path: Path) -> None:
    """Overlapping and discontinuous mentions; the other lines survive a round trip."""
    ann = _moved(ANN, 0).replace("12 22", "12 22")
    path = _pair(file, NOTE, ann)
    for source in (path, path.with_suffix(".txt"), path.parent):
        (document,) = read(source)
        assert document.id == "n1"
        assert document.spans[1] == Span(6, 22, "ADE", ((6, 11), (18, 22)))
        assert _forms(document) == [
            ("belly pain", "ADE"),
            ("upper belly pain", "ADE"),
            ("aspirin", "Drug"),
        ]
    brat.write([document], tmp_path / "out")
    assert (tmp_path / "out/n1.txt").read_bytes() == NOTE.encode()
    assert (tmp_path / "out/n1.ann").read_bytes() == ann.encode()


def test_brat_changed_mentions(file: Callable[..., Path], tmp_path: Path) -> None:
    """A mention that went takes along what refers to it; a new one gets a new id."""
    (document,) = read(_pair(file, NOTE, ANN))
    new = Document("n1", NOTE, (*document.spans[1:], Span(0, 3, "X")), meta=document.meta)
    brat.write([new], tmp_path / "out")
    lines = (tmp_path / "out/n1.ann").read_text().split("\n")
    assert [line.split("\t")[0] for line in lines] == ["T2", "T3", "#1", "T4", ""]
    assert lines[3] == "T4\tX 0 3\tHad"
    assert read(tmp_path / "out")[0].spans == new.spans


@pytest.mark.parametrize("counted", [True, False])
def test_brat_windows_text(file: Callable[..., Path], counted: bool) -> None:
    """Offsets may count the BOM and both characters of a line end, or neither."""
    note = "\ufeff" + NOTE.replace("\n", "\r\n")
    ann = _moved(ANN, 1).replace("30 37", "31 38") if counted else ANN
    (document,) = read(_pair(file, note, ann.replace("\n", "\r\n")))
    assert _forms(document)[0] == ("belly pain", "ADE")
    assert _forms(document)[2] == ("aspirin", "Drug")


def test_brat_counts_characters(file: Callable[..., Path]) -> None:
    """Not bytes, not UTF-16 units; a line break inside a mention is written as a space."""
    (document,) = read(_pair(file, "é😀 ear\npain", "T1\tX 3 11\tear pain\n"))
    assert document.spans == (Span(3, 11, "X"),)


def test_brat_text_in_the_folder_beside(file: Callable[..., Path]) -> None:
    """CADEC's layout; pieces out of order, overlapping, their words in another order."""
    file("bad upper pain", "cadec/text/a.txt")
    file("T1\tADR 10 14;0 3\tbad pain\nT2\tADR 4 9;5 14\tx\n".replace("x", "upper pper pain"),
         "cadec/original/a.ann")  # fmt: skip
    (document,) = read(file("", "cadec/original/b.ann").parent / "a.ann")
    assert document.spans == (Span(0, 14, "ADR", ((0, 3), (10, 14))), Span(4, 14, "ADR"))


@pytest.mark.parametrize(
    ("ann", "message"),
    [
        ("T1\tADE 12 22\tbelly pain\nT2\tADE 6", "n1.ann:2: no whole brat annotation"),
        ("T1\tADE 12 22\n", "n1.ann:1: no whole brat annotation"),
        ("T1\tADE 12 22\tother pain\n", "n1.ann:1: T1 at 12:22 is not what the text holds"),
        ("T1\tADE 12 400\tbelly pain\n", "n1.ann:1: T1 at 12:400 lies outside"),
        ("T1\tADE 22 12\tbelly pain\n", "n1.ann:1: T1 ends before it starts"),
        ("T1\tADE 12 17\tbelly\nT1\tADE 18 22\tpain\n", "n1.ann:2: the id T1 is used twice"),
        ("T1\tADE 12 17\tbelly\nhello\n", "n1.ann:2: no whole"),
        (f"T1\tADE 1 {'9' * 5000}\tbelly\n", "n1.ann:1: no whole"),
    ],
)
def test_brat_errors(file: Callable[..., Path], ann: str, message: str) -> None:
    """Path and line; never the text."""
    _complains(_pair(file, NOTE, ann), message)


def test_brat_missing_partner(file: Callable[..., Path]) -> None:
    """Annotations without a text."""
    _complains(file("T1\tX 0 1\ta\n", "x.ann"), "x.txt: no such file")


def test_brat_ids_cannot_leave_the_folder(tmp_path: Path) -> None:
    """An id is data: it must not name a path elsewhere."""
    brat.write([Document("../../evil", "a"), Document("/etc/x", "b")], tmp_path / "o/p")
    written = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.txt")}
    assert written == {"o/p/%2E%2E/%2E%2E/evil.txt", "o/p/%/etc/x.txt"}


# PubTator

PUBTATOR = """1|t|Lithium toxicity.
1|a|A case | of cardiac and renal failure.
1\t0\t7\tLithium\tChemical\tD008094
1\t33\t58\tx\tDisease\tD1|D2\tcardiac failure|renal failure
1\tCID\tD008094\tD1

2|t|Nothing here.
2|a|
"""


def test_pubtator(file: Callable[..., Path]) -> None:
    """Offsets count one character between title and abstract; concepts and relations kept."""
    text = PUBTATOR.replace("33\t58\tx", "28\t53\tcardiac and renal failure")
    text = text.replace("28\t53", "{}\t{}".format(*_where(PUBTATOR)))
    first, second = read(file(text))
    assert (first.id, second.id) == ("1", "2")
    assert first.text == "Lithium toxicity.\nA case | of cardiac and renal failure."
    assert _forms(first) == [("Lithium", "Chemical"), ("cardiac and renal failure", "Disease")]
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
def test_pubtator_errors(file: Callable[..., Path], line: str, message: str) -> None:
    """Path and line; never the text."""
    _complains(file("1|t|Lithium toxicity.\n1|a|A case.\n" + line), message)


# ADE Corpus V2


def _corpus(seed: int) -> tuple[dict[str, str], dict[tuple[str, str], set[Span]]]:
    """Invented abstracts in the corpus' files, and the spans that were put into them.

    Words repeat within a sentence, so that only the offsets tell which occurrence is meant;
    each sentence has three rows or more, one of them a dose.
    """
    rng = random.Random(seed)
    words = ["rash", "fever", "aspirin", "lithium", "and", "with", "rash", "aspirin"]
    files: dict[str, list[str]] = {"DRUG-AE.rel": [], "DRUG-DOSE.rel": [], "ADE-NEG.txt": []}
    truth: dict[tuple[str, str], set[Span]] = {}
    for pmid in ("11", "22"):
        position = rng.randrange(50)
        for number in range(6):
            forms = [rng.choice(words) for _ in range(7)] + [
                "rash",
                "aspirin",
                "5mg",
                f"x{number}.",
            ]
            rng.shuffle(forms)
            sentence = " ".join(forms)
            starts = [sum(len(f) + 1 for f in forms[:i]) for i in range(len(forms))]
            spans = truth.setdefault((pmid, sentence), set())

            def place(names: tuple[str, ...], forms=forms, starts=starts) -> tuple[str, int]:
                i = rng.choice([i for i, f in enumerate(forms) if f in names])
                return forms[i], starts[i]

            for row in range(4):
                name, label, kind = ("DRUG-AE.rel", "ADE", ("rash", "fever"))
                if row == 3:
                    name, label, kind = "DRUG-DOSE.rel", "Dosage", ("5mg",)
                ends = []
                for form, start in (place(kind), place(("aspirin", "lithium"))):
                    what = label if form in kind else "Drug"
                    spans.add(Span(start, start + len(form), what))
                    ends += [form, str(position + start), str(position + start + len(form))]
                files[name].append("|".join([pmid, sentence, *ends]))
            if number == 0:
                files["ADE-NEG.txt"].append(f"{pmid} NEG {sentence}")
            position += len(sentence) + rng.randrange(1, 40)
        files["ADE-NEG.txt"].append(f"{pmid} NEG Nothing was | seen.")
        truth[pmid, "Nothing was | seen."] = set()
    return {name: "\n".join(lines) + "\n" for name, lines in files.items()}, truth


@pytest.mark.parametrize("seed", range(12))
def test_ade_spans_are_where_they_were_put(file: Callable[..., Path], seed: int) -> None:
    """`_corpus` puts mentions at random occurrences; the reader must find just those."""
    files, truth = _corpus(seed)
    for name, text in files.items():
        file(text, f"ade/{name}")
    folder = file("about", "ade/README").parent
    assert guess_format(folder) == "ade"
    documents = read(folder)
    assert len(documents) == len({d.id for d in documents}) == len(truth)
    assert {(d.meta["pmid"], d.text): set(d.spans) for d in documents} == truth
    assert not any("unplaced" in d.meta for d in documents)


def test_ade_alone_rows(file: Callable[..., Path]) -> None:
    """One row: the distance of the two offsets decides; case and spaces are forgiven."""
    text = "7|Rash after aspirin; no rash after  Lithium salt.|rash|125|129|lithium salt|137|149\n"
    (document,) = read(file(text))
    assert _forms(document) == [("rash", "ADE"), ("Lithium salt", "Drug")]
    assert document.spans[0].start == 23
    assert document.id == "7:1"
    assert document.meta["relations"] == (("ADE", 23, 27, 35, 47),)


def test_ade_row_that_fits_nowhere(file: Callable[..., Path]) -> None:
    """1 of 21 is counted, 1 of 1 is an error with its line."""
    good = [f"7|Rash {i} after aspirin.|Rash|0|4|aspirin|13|20" for i in range(20)]
    bad = "7|Rash 3 after aspirin.|fever|0|4|aspirin|13|20"
    documents = read(file("\n".join([*good, bad])))
    assert sum(d.meta.get("unplaced", 0) for d in documents) == 1
    _complains(file(bad), r"f.txt:1: a mention is not in its sentence \(1 of 1 rows\)")


@pytest.mark.parametrize("line", ["7|a|b|1|2|c|3", "7|a|b|1|x|c|3|4", "7|a| |1|2|c|3|4", "7 POS a"])
def test_ade_errors(file: Callable[..., Path], line: str) -> None:
    """A cut line, a word for a number, an empty mention, another mark."""
    _complains(file(f"7 NEG Fine.\n{line}\n"), "f.txt:2: expected PMID", "ade")


# JSONL


def test_jsonl_of_other_tools(file: Callable[..., Path]) -> None:
    """Prodigy's and doccano's three forms say the same."""
    text = "Took aspirin."
    prodigy = {"text": text, "spans": [{"start": 5, "end": 12, "label": "Drug", "token_end": 1}]}
    prodigy |= {"tokens": [{"text": "Took", "start": 0, "end": 4, "id": 0}], "answer": "accept"}
    records = [
        prodigy,
        {"id": 7, "text": text, "label": [[5, 12, "Drug"]]},
        {"id": 7, "text": text, "labels": [[5, 12, "Drug"]], "source": ["a"]},
        {
            "text": text,
            "entities": [{"id": 1, "start_offset": 5, "end_offset": 12, "label": "Drug"}],
        },
        {"text": text, "answer": "reject"},
    ]
    documents = read(file("\n".join(map(json.dumps, records))))
    assert [d.id for d in documents] == ["f:1", "7", "7~2", "f:4"]
    assert all(d.text == text and d.spans == (Span(5, 12, "Drug"),) for d in documents)
    assert documents[0].tokens == ((0, 4),)
    assert documents[2].meta == {"source": ("a",)}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "no JSON"),
        ('{"text": 1}', 'key "text"'),
        ("[1]", "no JSON object"),
        ('{"text": "abc", "spans": [{"start": 0, "end": 4, "label": "X"}]}', "0:4 is no stretch"),
        ('{"text": "abc", "spans": [{"start": 2, "end": 1, "label": "X"}]}', "2:1 is no stretch"),
        ('{"text": "abc", "spans": [{"start": 0, "end": true, "label": "X"}]}', "no start and end"),
        ('{"text": "abc", "spans": [{"start": 1, "end": 1, "label": "X"}]}', "1:1 is no"),
        ('{"text": "abc", "spans": [{"start": 0, "end": 1}]}', "no label"),
        ('{"text": "abc", "label": [[0, 1]]}', "no label"),
        ('{"text": "abc", "label": ["X"]}', "no start and end"),
        ('{"text": "abc", "tokens": 3}', '"tokens" is no list'),
        ('{"text": "abc", "sentences": [[0, 2], [1, 3]]}', '"sentences" is not in order'),
        ('{"text": "\\ud800"}', "surrogate"),
        ("{" * 5000, "no JSON"),
    ],
)
def test_jsonl_errors(file: Callable[..., Path], line: str, message: str) -> None:
    """Path and line; never the text."""
    _complains(file(f'{{"text": "ok"}}\n{line}\n'), f"f.txt:2: .*{message}")


def test_jsonl_all_rejected(file: Callable[..., Path]) -> None:
    """Nothing would be left."""
    _complains(file('{"text": "a", "answer": "ignore"}'), "every record is marked")


CHARACTERS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | CHARACTERS,
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple) | st.dictionaries(CHARACTERS, inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def _documents(draw: st.DrawFn) -> Document:
    text = draw(CHARACTERS)
    pair = st.lists(st.integers(0, len(text)), min_size=4, max_size=4).map(sorted)
    spans = []
    for a, b, c, d in draw(st.lists(pair, max_size=4)):
        label = draw(CHARACTERS.filter(bool))
        if a < b < c < d and draw(st.booleans()):
            spans.append(Span(a, d, label, ((a, b), (c, d))))
        elif a < d:
            spans.append(Span(a, d, label))
    edges = st.lists(st.integers(0, len(text)), max_size=6, unique=True).map(sorted)
    places = edges.map(lambda e: tuple(zip(e[::2], e[1::2], strict=False)))
    return Document(
        draw(CHARACTERS),
        text,
        tuple(spans),
        draw(st.none() | CHARACTERS),
        draw(st.lists(CHARACTERS, max_size=2).map(tuple)),
        draw(st.dictionaries(CHARACTERS, VALUES, max_size=3)),
        draw(places),
        draw(places),
    )


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(documents=st.lists(_documents(), min_size=1, max_size=3, unique_by=lambda d: d.id))
def test_jsonl_round_trip(documents: list[Document], tmp_path: Path) -> None:
    """Every field of every document, whatever characters it holds."""
    jsonl.write(documents, tmp_path / "a.jsonl")
    assert read(tmp_path / "a.jsonl") == tuple(documents)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(document=_documents())
def test_brat_round_trip(document: Document, tmp_path: Path) -> None:
    """Text and spans of any document whose labels brat can hold; \\r and \\ufeff aside."""
    text = re.sub("[\r\ufeff]", "x", document.text)
    spans = tuple(sorted({Span(s.start, s.end, "L", s.fragments) for s in document.spans}))
    brat.write([Document("d", text, spans)], tmp_path / "b")
    (again,) = read(tmp_path / "b")
    assert (again.text, set(again.spans)) == (text, set(spans))


# i2b2 2010

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
def test_i2b2(file: Callable[..., Path], layout: str) -> None:
    """Lines from 1, tokens from 0 and parted by spaces only, the end included."""
    text, con = layout.split()
    file(I2B2_TEXT, text)
    path = file(I2B2_CON, con)
    (document,) = read(path.parent)
    assert document == read(path)[0]
    forms = [
        ("had chest\tpain", "problem"),
        ('" no " fever', "problem"),
        ("A chest\nx-ray", "test"),
    ]
    assert _forms(document) == forms
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
def test_i2b2_errors(file: Callable[..., Path], con: str, message: str) -> None:
    """Path and line; never the text."""
    file(I2B2_TEXT, "r.txt")
    _complains(file(con, "r.con"), message)


def test_i2b2_mismatches_are_counted(file: Callable[..., Path]) -> None:
    """A few concepts may be written otherwise than the text."""
    file(I2B2_TEXT, "r.txt")
    path = file(I2B2_CON + 'c="it" 2:0 2:0||t="x"\n', "r.con")
    assert read(path)[0].meta == {"mismatched": 1}
    _complains(file(I2B2_CON, "other/lone.con"), "its text lone.txt is neither")


# All formats


def test_wrong_files(file: Callable[..., Path], tmp_path: Path) -> None:
    """One line each, with the remedy."""
    _complains(tmp_path / "nowhere", "no such file or folder")
    _complains(file("", "empty.tsv"), "empty.tsv: the file is empty")
    _complains(file("\ufeff\n \n", "blank.tsv"), "the file is empty")
    _complains(file(BIO.encode() + b"caf\xe9\tO\n"), f"byte {len(BIO) + 3} is not UTF-8: convert")
    _complains(file("Just some prose.\nNo tags here.\n", "p"), "name one of ade, brat, conll")
    with pytest.raises(ConfigError, match="did you mean 'conll'"):
        read(tmp_path, "conl")


def test_folders(file: Callable[..., Path]) -> None:
    """One format a folder, other files passed over, folders below only if they must."""
    folder = file(BIO, "c/b.tsv").parent
    file(BIO, "c/a.tsv")
    file("A corpus.", "c/README.md")
    file(b"\x00\xff\x89PNG", "c/x.png")
    file('{"text": "a"}', "c/below/x.jsonl")
    assert [d.id for d in read(folder)] == ["a:1", "a:2", "b:1", "b:2"]
    assert len(read(folder.parent / "c/below")) == 1
    file('{"text": "a"}', "c/x.jsonl")
    _complains(folder, r"mixes formats: conll \(2 files\), jsonl \(1 files\); name one")
    assert len(read(folder, "jsonl")) == 1
    _complains(folder, "no file in this folder looks like brat", "brat")
    _complains(file("x", "d/y").parent, "of a known format: ade, brat")


def test_ids_are_unique(file: Callable[..., Path]) -> None:
    """Also where an id looks like a renamed one."""
    lines = [json.dumps({"id": i, "text": "a"}) for i in ("x", "x~2", "x", "x")]
    assert [d.id for d in read(file("\n".join(lines)))] == ["x", "x~2", "x~3", "x~4"]


def test_writing_is_whole_or_not_at_all(tmp_path: Path) -> None:
    """What cannot be written leaves the earlier file, and no debris."""
    path = tmp_path / "a.jsonl"
    jsonl.write([Document("a", "b")], path)
    before = path.read_bytes()
    for bad in (Document("a", "\ud800"), Document("a", "b", meta={"x": object()})):
        with pytest.raises(DataError, match=r"cannot be written|cannot write"):
            jsonl.write([bad], path)
    with pytest.raises(DataError, match="cannot write"):
        jsonl.write([Document("a", "b")], path / "below.jsonl")
    with pytest.raises(DataError, match="brat needs a folder"):
        brat.write([Document("a", "b")], path)
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [before]


# Real corpora

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


@pytest.mark.corpora
def test_maccrobat(corpora: Path, tmp_path: Path) -> None:
    """200 documents, 25,189 mentions, 44 in pieces; written again every file is the same."""
    documents = read(corpora / "maccrobat")
    spans = [s for d in documents for s in d.spans]
    assert (len(documents), len(spans)) == (200, 25_189)
    assert sum(bool(s.fragments) for s in spans) == 44
    brat.write(documents, tmp_path / "m")
    for path in (corpora / "maccrobat").iterdir():
        assert (tmp_path / "m" / path.name).read_bytes() == path.read_bytes()
    jsonl.write(documents, tmp_path / "m.jsonl")
    assert read(tmp_path / "m.jsonl") == documents


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


def test_every_format_reads() -> None:
    """The interface that `formats/__init__.py` promises."""
    assert set(FORMATS) == {"ade", "brat", "conll", "i2b2", "jsonl", "ontonotes", "pubtator"}
    assert all(callable(m.read) and callable(m.accepts) for m in FORMATS.values())
    assert all(callable(FORMATS[name].write) for name in ("brat", "conll", "jsonl"))
