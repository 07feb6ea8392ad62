"""What all readers and writers share: guessing, folders, ids, whole files, round trips."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fednotes.core.errors import ConfigError, DataError, FednotesError
from fednotes.core.types import Document, Span
from fednotes.data import formats
from fednotes.data.formats import FORMATS, brat, jsonl, read

File = Callable[..., Path]
Complains = Callable[..., None]

BIO = "He\tO\ntook\tO\nthe\tB-Drug\ndrug\tI-Drug\n\n#\tO\n1\tB-ADR\n\n"


def test_wrong_files(file: File, tmp_path: Path, complains: Complains) -> None:
    """One line each, with the remedy."""
    complains(tmp_path / "nowhere", "no such file or folder")
    complains(file("", "empty.tsv"), "empty.tsv: the file is empty")
    complains(file("\ufeff\n \n", "blank.tsv"), "the file is empty")
    complains(file(BIO.encode() + b"caf\xe9\tO\n"), f"byte {len(BIO) + 3} is not UTF-8: convert")
    complains(file("Just some prose.\nNo tags here.\n", "p"), "name one of ade, brat, conll")
    with pytest.raises(ConfigError, match="did you mean 'conll'"):
        read(tmp_path, "conl")


def test_folders(file: File, complains: Complains) -> None:
    """One format a folder, other files passed over, folders below only if they must."""
    folder = file(BIO, "c/b.tsv").parent
    file(BIO, "c/a.tsv")
    file("A corpus.", "c/README.md")
    file(b"\x00\xff\x89PNG", "c/x.png")
    file('{"text": "a"}', "c/below/x.jsonl")
    assert [d.id for d in read(folder)] == ["a:1", "a:2", "b:1", "b:2"]
    assert len(read(folder.parent / "c/below")) == 1
    file('{"text": "a"}', "c/x.jsonl")
    complains(folder, r"mixes formats: conll \(2 files\), jsonl \(1 files\); name one")
    assert len(read(folder, "jsonl")) == 1
    complains(folder, "no file in this folder looks like brat", "brat")
    complains(file("x", "d/y").parent, "of a known format: ade, brat")


def test_ids_are_unique(file: File) -> None:
    """Also where an id looks like a renamed one."""
    lines = [json.dumps({"id": i, "text": "a"}) for i in ("x", "x~2", "x", "x")]
    assert [d.id for d in read(file("\n".join(lines)))] == ["x", "x~2", "x~3", "x~4"]


def test_writing_is_whole_or_not_at_all(tmp_path: Path) -> None:
    """What cannot be written leaves the earlier file, and no debris."""
    path = tmp_path / "a.jsonl"
    jsonl.write([Document("a", "b")], path)
    before = path.read_bytes()
    for bad in (Document("a", "\ud800"), Document("a", "b", meta={"x": object()})):
        with pytest.raises(FednotesError, match=r"cannot be written|cannot write"):
            jsonl.write([bad], path)
    with pytest.raises(FednotesError, match="cannot be written"):
        jsonl.write([Document("a", "b")], path / "below.jsonl")
    with pytest.raises(DataError, match="brat needs a folder"):
        brat.write([Document("a", "b")], path)
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [before]


# Any document comes back

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


def test_every_format_reads() -> None:
    """The interface that `formats/__init__.py` promises."""
    assert set(FORMATS) == {
        *("ade", "brat", "conll", "i2b2", "i2b2-2012", "jsonl", "ontonotes", "pubtator")
    }
    assert all(callable(FORMATS[name].write) for name in ("brat", "conll", "jsonl"))


SHOUTED = '''
"""A note a line, mentions in capitals."""

import re

from fednotes.core.types import Document, Span
from fednotes.data.formats.files import Found, first_line, gather, listing, numbered


def accepts(path):
    return first_line(path) == "SHOUTED"


def read(path, problems):
    return gather(listing(path, accepts, "shouted notes"), _read_file, problems)


def _read_file(path, problems):
    for number, line in list(numbered(path))[1:]:
        found = re.finditer("[A-Z]{2,}", line)
        spans = tuple(Span(*match.span(), "Loud") for match in found)
        yield Found(Document(f"{path.stem}:{number}", line, spans), path, number)
'''


def test_a_format_is_one_file(
    file: File, forms: Callable[[Document], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that is laid into the folder is found, guessed, read, and named in messages."""
    folder = file(SHOUTED, "more/loud_notes.py").parent
    file("no_format = True", "more/other.py")
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(folder)])
    monkeypatch.setattr(formats, "FORMATS", formats.discover())
    assert set(formats.FORMATS) == {*FORMATS, "loud-notes"}
    path = file("SHOUTED\nHe took ASPIRIN.\n\nNo RASH at all.\n")
    one, two = read(path)
    assert (one.id, forms(one), forms(two)) == ("f:2", [("ASPIRIN", "Loud")], [("RASH", "Loud")])
    with pytest.raises(ConfigError, match="did you mean 'loud-notes'"):
        read(path, "loud_note")
    for name in ("loud_notes", "other"):
        sys.modules.pop(f"fednotes.data.formats.{name}")
        monkeypatch.delattr(formats, name)
