"""Conversion between all formats: losses are reported, and the rest survives.

`test_other_programs.py` has other programs judge what is written.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from other_packages import leave_out_others

from fednotes.core.errors import ConfigError, DataError, FednotesError
from fednotes.core.types import Document, Span
from fednotes.data.formats import (
    FORMATS,
    LossyError,
    convert,
    count_differences,
    count_losses,
    guess_format,
    list_writable_formats,
    make_format_table,
    read,
    write,
)
from fednotes.jobs.inputs import open_inputs

File = Callable[..., Path]
ROOT = Path(__file__).parents[2]
# Each format's name of a file, and what it may lose of documents that say it; kinds as
# patterns.
ALL = "patient|codes|sentences|tokens|meta .*|confidences"
MAY_LOSE = {
    "bioc": ("x.xml", "texts|labels|ids"),  # characters that XML forbids
    "bioc in JSON": ("x.json", ""),
    "bigbio": ("x.jsonl", ALL),
    "brat": ("x", f"{ALL}|texts|spacing|labels|ids|.* mentions|mentions in .*|bounds of .*"),
    "conll": ("x.conll", f"{ALL}|documents|texts|spacing|labels|ids|.* mentions|mentions in .*"
              "|bounds of mentions"),
    "docbin": ("x.spacy", ""),
    "doccano": ("x.jsonl", "mentions in pieces|confidences"),
    "fhir": ("x.json", ""),
    "jsonl": ("x.jsonl", ""),
    "label-studio": ("x.json", "mentions in pieces"),
    "medcattrainer": ("x.json", "mentions in pieces|confidences"),
    "omop": ("x", "patient|codes|sentences|tokens|meta .*|labels"),
    "parquet": ("x.parquet", ""),
    "prodigy": ("x.jsonl", "mentions in pieces|tokens"),
    "webanno-tsv": ("x", f"{ALL}|texts|spacing|labels|mentions in pieces|.* mentions|bounds of mentions"),
    "uima-xmi": ("x", f"{ALL}|texts|labels|mentions in pieces"),
}  # fmt: skip

# Every kind of character that offsets can be counted wrong in: astral, combining, line
# ends, tabs.
PIECE = st.sampled_from(
    ["He", "rash", "😀", "👩🏽\u200d⚕️", "é", "e\u0301", "\u0301", "\r\n", "\n", "\t", " ", ".",
     "&<>\"'", "]]>", "\x0b", "\x00", "\ufeff", "\u2028", "\xa0", "中", "\\"]
)  # fmt: skip
WORD = st.text(st.sampled_from("aB7_-: /é😀\t\x07"), min_size=1, max_size=5)


@st.composite
def documents(draw: st.DrawFn) -> Document:
    """Mentions that are nested, crossing, adjacent, repeated and in pieces, in odd
    text."""
    pieces = draw(st.lists(PIECE, max_size=12))
    text = "".join(pieces)
    edges = [0, *accumulate(map(len, pieces))]
    spans = []
    for _ in range(draw(st.integers(0, 4))):
        a, b, c, d = sorted(
            draw(st.lists(st.sampled_from(edges), min_size=4, max_size=4))
        )
        label = draw(st.sampled_from(["ADE", "Drug", "Dose"]) | WORD)
        sure = draw(st.none() | st.sampled_from([0.25, 1.0]))
        if a < b < c < d:
            spans.append(Span(a, d, label, ((a, b), (c, d)), sure))
        elif a < d:
            spans.append(Span(a, d, label, (), sure))
    cuts = sorted(set(edges))
    bounds = draw(st.just(()) | st.just(tuple(pairwise(cuts))))
    return Document(
        draw(WORD),
        text,
        tuple(sorted(spans, key=lambda s: (s.start, s.end, s.label, s.fragments))),
        draw(st.none() | WORD),
        draw(st.lists(WORD, max_size=2).map(tuple)),
        draw(st.dictionaries(WORD, st.integers() | WORD, max_size=2)),
        bounds,
        draw(st.just(()) | st.just(bounds)),
    )


def bare(document: Document, kinds: set[str]) -> tuple[object, ...]:
    """Return a document without what these kinds name."""
    spans = [
        (s.start, s.end, s.label, s.fragments, s.confidence) for s in document.spans
    ]
    if "confidences" in kinds:
        spans = [(*span[:4], None) for span in spans]
    meta = {k: v for k, v in document.meta.items() if f"meta {k}" not in kinds}
    remaining = [
        None if name in kinds else getattr(document, name)
        for name in ("patient", "codes", "sentences", "tokens")
    ]
    return (
        "" if "ids" in kinds else document.id,
        document.text,
        Counter(spans),
        meta,
        *remaining,
    )


GENERATED = st.lists(
    documents(), min_size=1, max_size=3, unique_by=lambda d: d.id.strip()
)


def test_every_writable_format_has_a_row_in_the_test_table() -> None:
    without = set(list_writable_formats()) - {name.split()[0] for name in MAY_LOSE}
    assert not without, f"add a row to MAY_LOSE for {without}"


@pytest.mark.parametrize("name", MAY_LOSE)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(generated=GENERATED)
def test_a_round_trip_loses_only_what_was_reported(
    name: str, generated: list[Document]
) -> None:
    """Nothing unnamed is missing, and no kind is named that the format's promise
    excludes."""
    there_and_back(name, generated)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAY_LOSE)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(generated=GENERATED)
def test_many_documents_survive_a_round_trip(
    name: str, generated: list[Document]
) -> None:
    """As above, for more documents."""
    there_and_back(name, generated)


def there_and_back(name: str, generated: list[Document]) -> None:
    """Write and read documents, and compare by hand what is not named as lost."""
    with TemporaryDirectory() as folder:
        _there_and_back(name, generated, Path(folder))


def _there_and_back(name: str, generated: list[Document], folder: Path) -> None:
    file, may = MAY_LOSE[name]
    format = name.split()[0]
    path = folder / file
    lost = write(generated, path, format, allow_loss=True)
    assert not [kind for kind in lost if not re.fullmatch(may, kind)], lost
    if {"documents", "texts", "spacing"} & set(lost) or any(
        "mention" in kind for kind in lost
    ):
        return
    again = {d.id: d for d in read(path, format)}
    if "ids" not in lost and "labels" not in lost:
        for document in generated:
            ours, theirs = document, again[document.id]
            meta = {k: v for k, v in theirs.meta.items() if k in ours.meta}
            emptied = {n: () for n in ("sentences", "tokens") if not getattr(ours, n)}
            theirs = replace(theirs, meta=meta, **emptied)
            assert bare(ours, set(lost)) == bare(theirs, set(lost))


def test_each_kind_of_difference_is_counted() -> None:
    """Each kind once, counted by hand."""
    spans = (
        Span(0, 3, "A"), Span(0, 3, "A"), Span(0, 8, "B"), Span(4, 8, "C", ((4, 5), (7, 8)), 0.5),
        Span(5, 8, "G", (), 0.5), Span(9, 11, "D"), Span(12, 13, "E"),
    )  # fmt: skip
    original = Document(
        "a",
        "one  two xy z",
        spans,
        "p",
        ("E1",),
        {"m": 1, "n": 2},
        ((0, 3),),
        ((0, 3),),
    )
    spans_kept = (Span(0, 3, "A"), Span(5, 8, "G"), Span(9, 11, "F"), Span(11, 13, "E"))
    changed = Document("b", "one  two xy z", spans_kept, meta={"n": 2, "o": 3})
    assert count_differences([original], [changed]) == {
        **{
            "ids": 1,
            "patient": 1,
            "codes": 1,
            "meta m": 1,
            "sentences": 1,
            "tokens": 1,
        },
        **{"repeated mentions": 1, "overlapping mentions": 1, "mentions in pieces": 1},
        **{"labels": 1, "bounds of mentions": 1, "confidences": 1},
    }
    assert count_differences([original, replace(original, id="c")], [original]) == {
        "documents": 1
    }
    blank = Document("a", "ab c", (Span(3, 4, "X"),))
    assert count_differences(
        [blank], [Document("a", "a b  c", (Span(5, 6, "X"),))]
    ) == {"spacing": 1}
    assert count_differences([blank], [Document("a", "ab d", (Span(3, 4, "X"),))]) == {
        "texts": 1
    }
    assert count_differences([original], [original]) == {}


def test_nothing_is_written_if_something_would_be_lost(
    tmp_path: Path, file: File
) -> None:
    """Nor over anything, nor into what is read; a format that only reads is no target."""
    line = {"text": "upper belly pain", "patient": "7", "spans": [
        {"start": 0, "end": 16, "label": "X", "fragments": [[0, 5], [12, 16]]},
        {"start": 6, "end": 11, "label": "Y"}]}  # fmt: skip
    source = file(json.dumps(line), "in/a.jsonl")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        LossyError, match=r"mentions in pieces: 1; overlapping mentions: 1; patient"
    ) as caught:
        convert(source, tmp_path / "o.conll", "conll")
    assert caught.value.lost["patient"] == 1
    for out, why in ((source, "is inside"), (source.parent / "b.jsonl", "is inside")):
        with pytest.raises(FednotesError, match=why):
            convert(source.parent if out != source else source, out, "jsonl")
    with pytest.raises(ConfigError, match="'ade' cannot be written"):
        convert(source, tmp_path / "o", "ade")
    (tmp_path / "there").write_text("mine")
    with pytest.raises(FednotesError, match="already exists"):
        convert(source, tmp_path / "there", "jsonl")
    assert (tmp_path / "there").read_text() == "mine"
    (tmp_path / "there").unlink()
    assert sorted(tmp_path.rglob("*")) == before
    number, lost, problems = convert(
        source, tmp_path / "o.conll", "conll", allow_loss=True
    )
    assert (number, problems.number) == (1, 0)
    assert lost == {"mentions in pieces": 1, "overlapping mentions": 1, "patient": 1}
    assert (tmp_path / "o.conll").stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_unreadable_files_are_left_out_only_on_request(
    file: File, tmp_path: Path
) -> None:
    source = file('{"text": "a"}\n{"text": 1}\n', "a.jsonl")
    with pytest.raises(DataError, match=r"a\.jsonl:2"):
        convert(source, tmp_path / "b.xml", "bioc")
    number, _, problems = convert(source, tmp_path / "b.xml", "bioc", on_error="skip")
    assert (number, str(problems)) == (1, "1 document")


def test_lines_with_metadata_of_another_format_are_recognised_as_lines(
    file: File, tmp_path: Path
) -> None:
    """What `meta` holds is no mark of a format; a long first value hides none."""
    reserved = {
        "documents": 1,
        "passages": [],
        "infons": {},
        "resourceType": "x",
        "document_id": 2,
    }
    path = file(json.dumps({"text": "a", "meta": reserved, "entities": []}), "a.jsonl")
    assert guess_format(path) == "jsonl"
    for name, (place, _) in MAY_LOSE.items():
        document = Document("a", "Had rash", (Span(4, 8, "ADE"),))
        format = name.split()[0]
        write([document], tmp_path / name / place, format)
        has_reader = FORMATS[format].read is not FORMATS["jsonl"].read
        reader = format if has_reader else "jsonl"
        assert guess_format(tmp_path / name / place) == reader
    late = [
        {
            "id": 1,
            "annotations": [{"result": [], "x": ["y" * 9] * 9000}],
            "data": {"text": "a"},
        }
    ]
    assert guess_format(file(json.dumps(late), "late.json")) == "label-studio"
    with pytest.raises(DataError, match="contains no documents"):
        convert(file("[]", "none.json"), tmp_path / "none", "brat", "label-studio")


def test_the_page_of_formats_has_the_current_table() -> None:
    """docs/formats.md shows what the formats do, not what they once did."""
    names = set(leave_out_others("formats", FORMATS))
    rows = [row for row in make_format_table() if row["format"] in names]
    heads = list(max(rows, key=len))
    lines = [f"| {' | '.join(row.get(head, '') for head in heads)} |" for row in rows]
    page = (ROOT / "docs" / "formats.md").read_text("utf-8")
    assert [line for line in lines if line not in page.splitlines()] == [], (
        "put the table that `fednotes corpus formats --markdown` prints into it"
    )
    assert names == set(
        re.findall(r"^\| ([\w-]+) \| (?:yes|no) \|", page, re.MULTILINE)
    )


def test_an_unclosed_quote_is_handled_quickly(file: File) -> None:
    """64 kB took minutes when a string was tried from each of its quotes."""
    start = time.monotonic()
    for end in ("x", "\\"):
        with pytest.raises(DataError, match=r"cannot recognise the format|not JSON"):
            read(file('["' + '\\"' * 30_000 + end, "a.json"))
    assert time.monotonic() - start < 5
    same = file(json.dumps({"id": "a", "text": "x"}) + "\n", "same.jsonl")
    same.write_text(same.read_text() * 20_000)
    assert read(same)[-1].id == "a~20000"
    assert time.monotonic() - start < 10


def test_texts_without_annotations_are_read_for_prediction_and_lost_in_conversion(
    file: File, tmp_path: Path
) -> None:
    """A folder with one .ann, and one that has its pair below: no note goes in silence."""
    for name in ("p/a.txt", "p/b.txt", "p/c/d.txt"):
        file("Had rash.\r\n", name)
    file("T1\tADE 4 8\trash\n", "p/a.ann")
    file("T1\tADE 4 8\trash\nT2\tADE 4 12\trash. x\n", "q/e/f.ann")
    file("Had rash.\r\n x", "q/e/f.txt")
    file("Had pain.", "q/g.txt")
    for folder, names in (("p", {"a", "b", "c/d"}), ("q", {"e/f", "g"})):
        notes = tuple(open_inputs(str(tmp_path / folder)))
        assert {d.id for d in notes} == names
        assert sum(bool(d.spans) for d in notes) == 1
        assert len(read(tmp_path / folder)) == 1  # gold is what somebody annotated
    with pytest.raises(LossyError) as caught:
        convert(tmp_path / "p", tmp_path / "o", "brat")
    ends = "texts with Windows line endings"
    assert caught.value.lost == {"texts without annotations": 2, ends: 1}
    with pytest.raises(LossyError, match=f"{ends}: 1; texts without annotations: 1"):
        convert(tmp_path / "q", tmp_path / "o", "jsonl")


def test_foreign_metadata_under_the_key_brat_is_kept(
    file: File, tmp_path: Path
) -> None:
    source = file(json.dumps({"text": "a", "brat": 1}), "a.jsonl")
    assert convert(source, tmp_path / "b.jsonl", "jsonl").lost == {}


# ---- real corpora --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.corpora
@pytest.mark.parametrize("name", MAY_LOSE)
def test_maccrobat_survives_a_round_trip_in_every_format(
    corpora: Path, name: str, tmp_path: Path
) -> None:
    """25,189 mentions, 44 of them in pieces, events in every document: there and back."""
    documents = read(corpora / "maccrobat")
    file, may = MAY_LOSE[name]
    losses = count_losses(documents, name.split()[0], tmp_path / file)
    special = {"mentions in pieces": 44, "meta brat": 200, "bounds of mentions": 3}
    lost = {kind: n for kind, n in special.items() if re.fullmatch(may, kind)}
    if name == "brat":  # the corpus is in this format
        assert losses == {}
    elif name == "conll":
        assert losses["mentions in pieces"] == 44
    else:
        assert losses == lost
