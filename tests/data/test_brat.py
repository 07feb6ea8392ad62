"""brat: pieces, counted offsets, lines that refer to each other, and names of files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fednotes.core.types import Document, Span
from fednotes.data.formats import brat, jsonl, read

File = Callable[..., Path]
Forms = Callable[[Document], list[tuple[str, str]]]
Complains = Callable[..., None]

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


def _pair(file: File, note: str, ann: str) -> Path:
    file(note, "p/n1.txt")
    return file(ann, "p/n1.ann")


def _moved(ann: str, by: int) -> str:
    """The annotations with all offsets moved."""

    def move(match: re.Match[str]) -> str:
        return re.sub(r"\d+", lambda m: str(int(m.group()) + by), match.group())

    return re.sub(r"(?<= )\d+ \d+(;\d+ \d+)*(?=\t)", move, ann)


def test_brat_mentions(file: File, tmp_path: Path, forms: Forms) -> None:
    """Overlapping and discontinuous mentions; the other lines survive a round trip."""
    path = _pair(file, NOTE, ANN)
    for source in (path, path.with_suffix(".txt"), path.parent):
        (document,) = read(source)
        assert document.id == "n1"
        assert document.spans[1] == Span(6, 22, "ADE", ((6, 11), (18, 22)))
        assert forms(document) == [
            ("belly pain", "ADE"),
            ("upper belly pain", "ADE"),
            ("aspirin", "Drug"),
        ]
    brat.write([document], tmp_path / "out")
    assert (tmp_path / "out/n1.txt").read_bytes() == NOTE.encode()
    assert (tmp_path / "out/n1.ann").read_bytes() == ANN.encode()


def test_brat_changed_mentions(file: File, tmp_path: Path) -> None:
    """A mention that went takes along what refers to it; a new one gets a new id."""
    (document,) = read(_pair(file, NOTE, ANN))
    new = Document("n1", NOTE, (*document.spans[1:], Span(0, 3, "X")), meta=document.meta)
    brat.write([new], tmp_path / "out")
    lines = (tmp_path / "out/n1.ann").read_text().split("\n")
    assert [line.split("\t")[0] for line in lines] == ["T2", "T3", "#1", "T4", ""]
    assert lines[3] == "T4\tX 0 3\tHad"
    assert read(tmp_path / "out")[0].spans == new.spans


@pytest.mark.parametrize("counted", [True, False])
def test_brat_windows_text(file: File, counted: bool, forms: Forms) -> None:
    """Offsets may count the BOM and both characters of a line end, or neither."""
    note = "\ufeff" + NOTE.replace("\n", "\r\n")
    ann = _moved(ANN, 1).replace("30 37", "31 38") if counted else ANN
    (document,) = read(_pair(file, note, ann.replace("\n", "\r\n")))
    assert forms(document)[0] == ("belly pain", "ADE")
    assert forms(document)[2] == ("aspirin", "Drug")


def test_brat_counts_characters(file: File) -> None:
    """Not bytes, not UTF-16 units; a line break inside a mention is written as a space."""
    (document,) = read(_pair(file, "é😀 ear\npain", "T1\tX 3 11\tear pain\n"))
    assert document.spans == (Span(3, 11, "X"),)


def test_brat_text_in_the_folder_beside(file: File) -> None:
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
def test_brat_errors(file: File, ann: str, message: str, complains: Complains) -> None:
    """Path and line; never the text."""
    complains(_pair(file, NOTE, ann), message)


@pytest.mark.parametrize("blank", ["", " \n\t\n"])
def test_brat_keeps_empty_notes(tmp_path: Path, blank: str) -> None:
    """One empty note among others, or alone: what was written is what is read."""
    documents = (Document("a", blank), Document("b", "has rash", (Span(4, 8, "ADE"),)))
    for name, some in (("both", documents), ("alone", documents[:1])):
        brat.write(some, tmp_path / name)
        found = [(d.id, d.text, d.spans) for d in read(tmp_path / name)]
        assert found == [(d.id, d.text, d.spans) for d in some]
    (lone,) = read(tmp_path / "both/a.txt")
    assert (lone.id, lone.text) == ("a", blank)


def test_brat_texts_and_annotations_alone(file: File, complains: Complains) -> None:
    """An empty text alone is no corpus, a mark alone no text; nothing is annotated in none."""
    folder = file("", "p/a.txt").parent
    complains(folder, "no file in this folder looks like brat", "brat")
    file("T1\tADE 0 4\tZyxwolan\n", "p/a.ann")
    complains(folder, r"a.ann:1: T1 at 0:4 lies outside the text \(0 characters\)")
    file("\ufeff", "p/a.txt")
    file("", "p/a.ann")
    assert read(folder) == (Document("a", ""),)
    complains(file("T1\tX 0 1\ta\n", "x.ann"), "x.txt: no such file")


ID = st.text(st.sampled_from(list('ab/.:%*?"<>|\\\n\x7f~ é2356AECF')), max_size=10)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=ID)
@example(name="odd:1")
@example(name="odd%3A1")
@example(name="%")
@example(name="..")
@example(name="/a//.b/")
@example(name="100%/%253A%2")
def test_brat_keeps_ids(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever characters, hidden or relative names; in one file below the folder."""
    folder = tmp_path_factory.mktemp("b") / "in"
    brat.write([Document(name, "x")], folder)
    assert [p.name for p in folder.parent.iterdir()] == ["in"]
    assert [d.id for d in read(folder)] == [name]


def test_brat_ids_of_other_tools(file: File, tmp_path: Path) -> None:
    """A name that only looks escaped is left; names that mean one id are told apart."""
    for name in ("50%41", "a%3A1", "a:1", "100%"):
        file("x", f"p/{name}.txt")
        file("", f"p/{name}.ann")
    documents = read(tmp_path / "p")
    assert [d.id for d in documents] == ["100%", "50%41", "a:1", "a:1~2"]
    brat.write(documents[:2], tmp_path / "out")
    assert {p.stem for p in (tmp_path / "out").iterdir()} == {"100%", "50%41"}


def test_brat_folders_below(file: File, tmp_path: Path) -> None:
    """Ids with and without a / beside each other: all of them come back, as each folder's own."""
    ids = ["a", "b", "b/c", "b/d/a", "e/a"]
    brat.write([Document(name, f"Text of {name}.") for name in ids], tmp_path / "o")
    documents = read(tmp_path / "o")
    assert sorted((d.id, d.text) for d in documents) == [(n, f"Text of {n}.") for n in ids]
    assert [d.id for d in read(tmp_path / "o/b")] == ["c", "d/a"]
    assert [d.id for d in read(tmp_path / "o/b.ann")] == ["b"]
    file("No note.", "o/b/README.txt")
    file("", "o/.old/a.ann")
    assert read(tmp_path / "o") == documents


def test_brat_ids_cannot_leave_the_folder(tmp_path: Path) -> None:
    """An id is data: it must not name a path elsewhere."""
    brat.write([Document("../../evil", "a"), Document("/etc/x", "b")], tmp_path / "o/p")
    written = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.txt")}
    assert written == {"o/p/%2E%2E/%2E%2E/evil.txt", "o/p/%/etc/x.txt"}


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
