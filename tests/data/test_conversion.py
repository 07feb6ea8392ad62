"""From every format to every other: what a format cannot hold is named, and all else comes back.

Other programs judge what is written: `bioc`, `fhir.resources`, spaCy and pyarrow.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import os
import random
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import bioc
import pyarrow
import pyarrow.parquet
import pytest
from bioc import biocjson, biocxml
from fhir.resources.R4B.bundle import Bundle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spacy.tokens import Doc, DocBin
from spacy.vocab import Vocab

from fednotes.core.errors import ConfigError, DataError, FednotesError
from fednotes.core.types import Document, Span
from fednotes.data.formats import (
    FORMATS,
    LossyError,
    convert,
    differences,
    guess_format,
    lost,
    read,
    table,
    write,
)
from fednotes.jobs.predict import documents_of

File = Callable[..., Path]
ROOT = Path(__file__).parents[2]
# Each format's name of a file, and what it may lose of documents that say it; kinds as patterns.
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
    "omop": ("x", "patient|codes|sentences|tokens|meta .*|labels"),
    "parquet": ("x.parquet", ""),
    "prodigy": ("x.jsonl", "mentions in pieces|tokens"),
}  # fmt: skip

# Every kind of character that offsets can be counted wrong in: astral, combining, line ends, tabs.
PIECE = st.sampled_from(
    ["He", "rash", "😀", "👩🏽\u200d⚕️", "é", "e\u0301", "\u0301", "\r\n", "\n", "\t", " ", ".",
     "&<>\"'", "]]>", "\x0b", "\x00", "\ufeff", "\u2028", "\xa0", "中", "\\"]
)  # fmt: skip
WORD = st.text(st.sampled_from("aB7_-: /é😀\t\x07"), min_size=1, max_size=5)


@st.composite
def documents(draw: st.DrawFn) -> Document:
    """Mentions that are nested, crossing, adjacent, repeated and in pieces, in odd text."""
    pieces = draw(st.lists(PIECE, max_size=12))
    text = "".join(pieces)
    edges = [0, *accumulate(map(len, pieces))]
    spans = []
    for _ in range(draw(st.integers(0, 4))):
        a, b, c, d = sorted(draw(st.lists(st.sampled_from(edges), min_size=4, max_size=4)))
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
    """A document without what these kinds name."""
    spans = [(s.start, s.end, s.label, s.fragments, s.confidence) for s in document.spans]
    if "confidences" in kinds:
        spans = [(*span[:4], None) for span in spans]
    meta = {k: v for k, v in document.meta.items() if f"meta {k}" not in kinds}
    rest = [
        None if name in kinds else getattr(document, name)
        for name in ("patient", "codes", "sentences", "tokens")
    ]
    return ("" if "ids" in kinds else document.id, document.text, Counter(spans), meta, *rest)


MADE = st.lists(documents(), min_size=1, max_size=3, unique_by=lambda d: d.id.strip())


@pytest.mark.parametrize("name", MAY_LOSE)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(made=MADE)
def test_what_comes_back_is_all_but_what_was_named(
    name: str, made: list[Document], instant_disk: None
) -> None:
    """Nothing unnamed is missing, and no kind is named that the format's promise excludes."""
    there_and_back(name, made)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAY_LOSE)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(made=MADE)
def test_much_comes_back(name: str, made: list[Document], instant_disk: None) -> None:
    """As above, for more documents."""
    there_and_back(name, made)


def there_and_back(name: str, made: list[Document]) -> None:
    """Write and read documents, and compare by hand what is not named as lost."""
    with TemporaryDirectory() as folder:
        _there_and_back(name, made, Path(folder))


def _there_and_back(name: str, made: list[Document], folder: Path) -> None:
    file, may = MAY_LOSE[name]
    format = name.split()[0]
    path = folder / file
    gone = write(made, path, format, allow_loss=True)
    assert not [kind for kind in gone if not re.fullmatch(may, kind)], gone
    if {"documents", "texts", "spacing"} & set(gone) or any("mention" in kind for kind in gone):
        return
    again = {d.id: d for d in read(path, format)}
    if "ids" not in gone and "labels" not in gone:
        for document in made:
            ours, theirs = document, again[document.id]
            kept = {k: v for k, v in theirs.meta.items() if k in ours.meta}
            emptied = {n: () for n in ("sentences", "tokens") if not getattr(ours, n)}
            theirs = replace(theirs, meta=kept, **emptied)
            assert bare(ours, set(gone)) == bare(theirs, set(gone))


def test_differences_by_hand() -> None:
    """Each kind once, counted by hand."""
    spans = (
        Span(0, 3, "A"), Span(0, 3, "A"), Span(0, 8, "B"), Span(4, 8, "C", ((4, 5), (7, 8)), 0.5),
        Span(5, 8, "G", (), 0.5), Span(9, 11, "D"), Span(12, 13, "E"),
    )  # fmt: skip
    old = Document(
        "a", "one  two xy z", spans, "p", ("E1",), {"m": 1, "n": 2}, ((0, 3),), ((0, 3),)
    )
    kept = (Span(0, 3, "A"), Span(5, 8, "G"), Span(9, 11, "F"), Span(11, 13, "E"))
    new = Document("b", "one  two xy z", kept, meta={"n": 2, "o": 3})
    assert differences([old], [new]) == {
        **{"ids": 1, "patient": 1, "codes": 1, "meta m": 1, "sentences": 1, "tokens": 1},
        **{"repeated mentions": 1, "overlapping mentions": 1, "mentions in pieces": 1},
        **{"labels": 1, "bounds of mentions": 1, "confidences": 1},
    }
    assert differences([old, replace(old, id="c")], [old]) == {"documents": 1}
    blank = Document("a", "ab c", (Span(3, 4, "X"),))
    assert differences([blank], [Document("a", "a b  c", (Span(5, 6, "X"),))]) == {"spacing": 1}
    assert differences([blank], [Document("a", "ab d", (Span(3, 4, "X"),))]) == {"texts": 1}
    assert differences([old], [old]) == {}


def test_nothing_is_written_where_something_would_be_lost(tmp_path: Path, file: File) -> None:
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
    for out, why in ((source, "lies in"), (source.parent / "b.jsonl", "lies in")):
        with pytest.raises(FednotesError, match=why):
            convert(source.parent if out != source else source, out, "jsonl")
    with pytest.raises(ConfigError, match="'ade' is no format that can be written"):
        convert(source, tmp_path / "o", "ade")
    (tmp_path / "there").write_text("mine")
    with pytest.raises(FednotesError, match="there is something already"):
        convert(source, tmp_path / "there", "jsonl")
    assert (tmp_path / "there").read_text() == "mine"
    (tmp_path / "there").unlink()
    assert sorted(tmp_path.rglob("*")) == before
    number, gone, problems = convert(source, tmp_path / "o.conll", "conll", allow_loss=True)
    assert (number, problems.number) == (1, 0)
    assert gone == {"mentions in pieces": 1, "overlapping mentions": 1, "patient": 1}
    assert (tmp_path / "o.conll").stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_what_cannot_be_read_is_left_out_only_if_asked(file: File, tmp_path: Path) -> None:
    source = file('{"text": "a"}\n{"text": 1}\n', "a.jsonl")
    with pytest.raises(DataError, match=r"a\.jsonl:2"):
        convert(source, tmp_path / "b.xml", "bioc")
    number, _, problems = convert(source, tmp_path / "b.xml", "bioc", on_error="skip")
    assert (number, str(problems)) == (1, "1 document")


def test_lines_that_keep_what_another_format_had_are_lines(file: File, tmp_path: Path) -> None:
    """What `meta` holds is no mark of a format; a long first value hides none."""
    kept = {"documents": 1, "passages": [], "infons": {}, "resourceType": "x", "document_id": 2}
    path = file(json.dumps({"text": "a", "meta": kept, "entities": []}), "a.jsonl")
    assert guess_format(path) == "jsonl"
    for name, (place, _) in MAY_LOSE.items():
        made = Document("a", "Had rash", (Span(4, 8, "ADE"),))
        write([made], tmp_path / name / place, name.split()[0])
        folder = tmp_path / name / place
        guessed = guess_format(folder)
        assert guessed == ("jsonl" if name in ("prodigy", "doccano") else name.split()[0])
    late = [
        {"id": 1, "annotations": [{"result": [], "x": ["y" * 9] * 9000}], "data": {"text": "a"}}
    ]
    assert guess_format(file(json.dumps(late), "late.json")) == "label-studio"
    with pytest.raises(DataError, match="no document in it"):
        convert(file("[]", "none.json"), tmp_path / "none", "brat", "label-studio")


def test_the_page_has_the_table() -> None:
    """docs/formats.md shows what the formats do, not what they once did."""
    rows = table()
    heads = list(max(rows, key=len))
    lines = [f"| {' | '.join(row.get(head, '') for head in heads)} |" for row in rows]
    page = (ROOT / "docs" / "formats.md").read_text("utf-8")
    assert [line for line in lines if line not in page.splitlines()] == []
    assert set(FORMATS) == set(re.findall(r"^\| ([\w-]+) \| (?:yes|no) \|", page, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize("name", MAY_LOSE)
def test_damaged_files_are_refused_or_read(name: str, tmp_path: Path) -> None:
    """Bytes changed, cut out, put in and moved, 300 times: a DataError at worst."""
    path, format = tmp_path / MAY_LOSE[name][0], name.split()[0]
    write([NOTE], path, format, allow_loss=True)
    files = [path] if path.is_file() else sorted(path.iterdir())
    drawn = random.Random(name)
    for _ in range(300):
        file = drawn.choice(files)
        whole = file.read_bytes()
        data = bytearray(whole)
        for _ in range(drawn.randint(1, 3)):
            at, other = drawn.randrange(len(data)), drawn.randrange(len(data))
            put = (b"-1", b"null", b"[]", b'"', b"9" * 12, b"\0", b"<a>", data[other : other + 5])
            data[at : at + drawn.randint(0, 9)] = drawn.choice(put) or b" "
        file.write_bytes(data)
        with suppress(DataError):
            read(path, format)
        file.write_bytes(whole)


# ---- BioC, by the package `bioc` -----------------------------------------------------------------

NOTE = Document(
    "n1",
    "Upper 😀 belly pain.\r\nTook aspirin.",
    (Span(0, 13, "ADE", ((0, 5), (8, 13))), Span(26, 33, "Drug", (), 0.75)),
    patient="7",
)


@pytest.mark.parametrize(("name", "load"), [("n.xml", biocxml), ("n.json", biocjson)])
def test_bioc_is_what_another_program_reads(name: str, load: Any, tmp_path: Path) -> None:
    write([NOTE], tmp_path / name, "bioc")
    with open(tmp_path / name, encoding="utf-8", newline="") as file:
        (document,) = load.loads(file.read()).documents
    (passage,) = document.passages
    assert (document.id, passage.offset, passage.text) == ("n1", 0, NOTE.text)
    found = [
        (a.infons["type"], a.text, [(x.offset, x.length) for x in a.locations])
        for a in passage.annotations
    ]
    assert found == [
        ("ADE", "Upper belly", [(0, 5), (8, 5)]),
        ("Drug", "aspirin", [(26, 7)]),
    ]
    assert passage.annotations[1].infons["confidence"] == "0.75"


def test_bioc_of_another_program_comes_out_again(tmp_path: Path) -> None:
    """Passages, infons, ids and relations that `bioc` wrote, changed mentions aside."""
    collection, document = bioc.BioCCollection(), bioc.BioCDocument()
    document.id, document.infons = "9", {"journal": "J"}
    for offset, text in ((0, "Rash after aspirin"), (20, "Had rash.")):
        passage = bioc.BioCPassage()
        passage.offset, passage.text, passage.infons = offset, text, {"section": str(offset)}
        document.add_passage(passage)
    for name, start, length, text in (("A", 0, 4, "Rash"), ("B", 11, 7, "aspirin")):
        annotation = bioc.BioCAnnotation()
        annotation.id, annotation.text = name, text
        annotation.infons = {"type": "X", "identifier": f"MESH:{name}"}
        annotation.add_location(bioc.BioCLocation(start, length))
        document.passages[0].add_annotation(annotation)
    relation = bioc.BioCRelation()
    relation.id, relation.infons = "R1", {"type": "CID"}
    relation.add_node(bioc.BioCNode("A", "effect"))
    relation.add_node(bioc.BioCNode("B", "cause"))
    document.add_relation(relation)
    collection.add_document(document)
    (tmp_path / "a.xml").write_text(biocxml.dumps(collection))
    (tmp_path / "a.json").write_text(biocjson.dumps(collection))
    (one,), (two,) = read(tmp_path / "a.xml"), read(tmp_path / "a.json")
    assert one == two
    assert one.text == "Rash after aspirin \nHad rash."
    assert one.spans == (Span(0, 4, "X"), Span(11, 18, "X"))
    for name, load in (("b.xml", biocxml), ("b.json", biocjson)):
        write([one], tmp_path / name, "bioc")
        (again,) = load.loads((tmp_path / name).read_text()).documents
        assert [(p.offset, p.infons) for p in again.passages] == [
            (0, {"section": "0"}), (20, {"section": "20"})]  # fmt: skip
        assert again.infons == {"journal": "J"}
        assert [a.infons["identifier"] for a in again.passages[0].annotations] == [
            "MESH:A",
            "MESH:B",
        ]
        assert [(n.refid, n.role) for n in again.relations[0].nodes] == [
            ("A", "effect"),
            ("B", "cause"),
        ]
    less = [replace(one, spans=one.spans[1:])]
    assert write(less, tmp_path / "c.xml", "bioc", allow_loss=True) == {"meta bioc": 1}
    (left,) = biocxml.loads((tmp_path / "c.xml").read_text()).documents
    assert [a.id for a in left.passages[0].annotations] == ["B"]
    assert left.relations == []


def test_bioc_that_attacks(file: File) -> None:
    """Entities, endless nesting and a half file are refused in one line, quickly."""
    start = time.monotonic()
    bomb = '<?xml version="1.0"?><!DOCTYPE collection [<!ENTITY a "Zyx"><!ENTITY b "&a;&a;">]>'
    deep = "<collection><document>" + "<passage>" * 200_000
    far = [{"offset": n << 19, "text": "a"} for n in range(9)]  # 4.5 MB of blanks
    for text, why in (
        (f"{bomb}<collection>&b;</collection>", "declares entities"),
        (deep, "more elements, or deeper ones"),
        ("<collection><document><id>1</id>", "no whole XML"),
        ('{"documents": {"a": 1}, "infons": 1, "passages": 1}', "no"),
        (json.dumps({"infons": {}, "passages": far}), "lies far behind it"),
    ):
        path = file(text, "a.bioc")
        with pytest.raises(DataError, match=why) as caught:
            read(path, "bioc")
        assert "Zyx" not in str(caught.value)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "meta",
    [{"bioc": 1}, {"bioc": {"annotations": [1], "passages": 3}}, {"bioc": {"passages": [[1]]}}],
)
def test_bioc_meta_of_somebody_else_breaks_nothing(meta: dict[str, Any], tmp_path: Path) -> None:
    gone = write([replace(NOTE, meta=meta)], tmp_path / "a.xml", "bioc", allow_loss=True)
    assert set(gone) <= {"meta bioc"}
    assert read(tmp_path / "a.xml")[0].spans == NOTE.spans


# ---- Label Studio --------------------------------------------------------------------------------


def _task(text: str, regions: list[tuple[int, int, str, str]], **more: Any) -> dict[str, Any]:
    result = [
        {"type": "labels", "value": {"start": a, "end": b, "text": form, "labels": [label]}}
        for a, b, form, label in regions
    ]
    return {"id": 1, "data": {"text": text}, "annotations": [{"result": result, **more}]}


def test_label_studio_exports(file: File, tmp_path: Path) -> None:
    """The last annotation counts, skipped tasks go, offsets as JavaScript counts are turned."""
    text = "💩This is rash."
    right, utf16 = (9, 13, "rash", "ADE"), (10, 14, "rash", "ADE")
    twice = _task(text, [right])
    twice["annotations"].insert(0, {"result": []})
    tasks = [
        _task(text, [right]), _task(text, [utf16]), twice, _task(text, [right], was_cancelled=True),
        {"data": {"text": text}, "predictions": [_task(text, [right])["annotations"][0]]},
        {"data": {"note": text, "n": 3}},
    ]  # fmt: skip
    tasks[0]["annotations"][0]["result"] += [{"type": "choices", "value": {"choices": ["x"]}}]
    found = read(file(json.dumps(tasks, indent=2), "export.json"))
    assert [[(d.text[s.start : s.end], s.label) for s in d.spans] for d in found] == [
        *[[("rash", "ADE")]] * 4, []]  # fmt: skip
    assert [d.id for d in found] == [f"export:{n}" for n in (1, 2, 3, 5, 6)]
    assert found[4].meta == {"n": 3}
    told = "written as jsonl, this would be lost: annotations of others: 1; relations"
    with pytest.raises(LossyError, match=told) as caught:
        convert(tmp_path / "export.json", tmp_path / "out", "jsonl")
    others = {"annotations of others": 1, "relations, and answers that are no mentions": 1}
    assert caught.value.lost == others
    assert not (tmp_path / "out").exists()


def test_label_studio_imports(tmp_path: Path) -> None:
    """Mentions with a confidence are a prediction, others an annotation."""
    sure = (Span(0, 3, "X", (), 0.5),)
    write([Document("a", "abc", (Span(0, 3, "X"),)), Document("b", "abc", sure)],
          tmp_path / "t.json", "label-studio")  # fmt: skip
    one, two = json.loads((tmp_path / "t.json").read_text())
    value = {"start": 0, "end": 3, "text": "abc", "labels": ["X"]}
    region = {"id": "r1", "type": "labels", "from_name": "label", "to_name": "text", "value": value}
    assert one == {"data": {"text": "abc", "id": "a"}, "annotations": [{"result": [region]}]}
    assert two["predictions"] == [{"result": [region | {"score": 0.5}]}]


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([{"data": {"a": 1, "data": 2}}], 't.json: task 1: its data has no "text"'),
        ([_task("ab", [(0, 9, "ab", "X")])], "task 1: 0:9 is no stretch"),
        ([_task("ab", []), _task("ab", [(0, 2, "xy", "X")])], "task 2: 0:2 is not what the text"),
        ([_task("ab", [(0, 2, "ab", "")])], "task 1: a mention has no type"),
        ([{"data": 1}], "task 1"),
    ],
)
def test_label_studio_that_is_wrong(file: File, tasks: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(file(json.dumps(tasks), "t.json"), "label-studio")


# ---- FHIR, by fhir.resources ---------------------------------------------------------------------


def test_fhir_is_what_another_program_holds_valid(tmp_path: Path) -> None:
    odd = Document("odd id!", "", (), "pa tient", ("E11",), {"m": (1, 2)})
    write([NOTE, odd], tmp_path / "b.json", "fhir")
    raw = (tmp_path / "b.json").read_text()
    bundle = Bundle.model_validate_json(raw)
    first, second = (entry.resource for entry in bundle.entry)
    assert (first.id, first.status, first.subject.reference) == ("n1", "current", "Patient/7")
    attachment = first.content[0].attachment
    assert attachment.data.decode() == NOTE.text
    label, *places = first.extension[-1].extension
    assert label.valueString == "Drug"
    assert [(own.url, own.valueInteger) for own in places[:2]] == [("start", 26), ("end", 33)]
    assert float(places[2].valueDecimal) == 0.75
    assert (second.id, second.subject) == ("note-2", None)


def _attached(text: str, **more: Any) -> dict[str, Any]:
    data = base64.b64encode(text.encode("latin-1")).decode()
    return {"contentType": "text/plain; charset=iso-8859-1", "data": data, **more}


def test_fhir_of_hospitals(file: File, tmp_path: Path) -> None:
    """A Bundle, lines, and one resource; other resources and attachments are passed over."""
    report = {
        "resourceType": "DiagnosticReport", "id": "r", "status": "final", "code": {"text": "x"},
        "subject": {"reference": "https://h.example/Patient/9"},
        "presentedForm": [{"contentType": "application/pdf", "url": "x"}, _attached("Café.")],
    }  # fmt: skip
    reference = {"resourceType": "DocumentReference", "id": "d", "status": "current"}
    reference |= {"type": {"text": "Discharge"}, "content": [{"attachment": _attached("Rash.")}]}
    patient = {"resourceType": "Patient", "id": "9"}
    entries = [{"resource": own} for own in (patient, report, reference)]
    bundle = {"resourceType": "Bundle", "type": "searchset", "entry": entries}
    lines = "\n".join(map(json.dumps, (patient, report, reference)))
    for text in (json.dumps(bundle), json.dumps(bundle, indent=2), lines):
        one, two = read(file(text, "f.ndjson"))
        assert (one.id, one.text, one.patient) == ("r", "Café.", "9")
        assert (two.id, two.text, two.patient) == ("d", "Rash.", None)
    assert write([one, two], tmp_path / "b.json", "fhir") == {}
    again = Bundle.model_validate_json((tmp_path / "b.json").read_text())
    kinds = [type(entry.resource).__name__ for entry in again.entry]
    assert kinds == ["DiagnosticReport", "DocumentReference"]
    assert again.entry[1].resource.type.text == "Discharge"
    (link, _) = again.entry[0].resource.presentedForm
    assert (link.contentType, link.url) == ("application/pdf", "x")


def test_fhir_of_hospitals_comes_out_again(file: File, tmp_path: Path) -> None:
    """All of it but what is derived from the text; two texts made one are counted."""
    note = {**_attached("Rash."), "title": "Visit", "creation": "2020-01-02", "size": 5}
    pdf = {"attachment": {"contentType": "application/pdf", "data": "QUJD", "title": "Scan"}}
    coding = {"code": "urn:x"}
    held = {"resourceType": "DocumentReference", "id": "d", "status": "superseded"}
    held |= {"content": [pdf, {"attachment": note, "format": coding}]}
    out = tmp_path / "b.json"
    assert convert(file(json.dumps(held), "a.json"), out, "fhir").lost == {}
    (entry,) = Bundle.model_validate_json(out.read_text()).entry
    again = json.loads(entry.resource.model_dump_json())
    text = again["content"][1]["attachment"]
    assert base64.b64decode(text.pop("data")) == b"Rash."
    assert text.pop("contentType") == "text/plain; charset=utf-8"
    assert text == {"title": "Visit", "creation": "2020-01-02"}
    assert (again["content"][0], again["content"][1]["format"]) == (pdf, coding)
    assert again["status"] == "superseded"
    held["content"] += [{"attachment": _attached("More.")}]
    with pytest.raises(LossyError, match="meta fhir: 1"):
        convert(file(json.dumps(held), "a.json"), tmp_path / "c.json", "fhir")


@pytest.mark.parametrize(
    ("attachment", "message"),
    [
        ({"contentType": "text/plain", "url": "https://h.example/1"}, "nothing is fetched"),
        ({"contentType": "text/plain", "data": "a"}, "no base64"),
        ({"contentType": "text/plain", "data": "/w=="}, "not in the character set"),
        (
            {"contentType": "text/plain; charset=klingon", "data": "QQ=="},
            "not in the character set",
        ),
        (
            {"contentType": "text/plain; charset=punycode", "data": "QQ=="},
            "not in the character set",
        ),
        ({"contentType": "text/html", "data": ""}, "no attachment of the type text/plain"),
        ("x", "parts|no attachment"),
    ],
)
def test_fhir_that_is_wrong(file: File, attachment: Any, message: str) -> None:
    content = [{"attachment": attachment}]
    resource = {"resourceType": "DocumentReference", "content": content}
    with pytest.raises(DataError, match=f"f.json: resource 1: .*({message})"):
        read(file(json.dumps(resource), "f.json"))


# ---- OMOP ----------------------------------------------------------------------------------------


def test_omop_tables_have_the_columns_of_the_model(tmp_path: Path) -> None:
    """What CDM 5.4 makes mandatory is filled, numbers are numbers, places are the text's."""
    write([NOTE, replace(NOTE, id="12", spans=())], tmp_path / "o", "omop")
    note, term = (
        list(csv.DictReader(io.StringIO((tmp_path / f"o/{name}.csv").read_bytes().decode(), "")))
        for name in ("note", "note_nlp")
    )
    assert [(row["note_id"], row["person_id"]) for row in note] == [("1", "7"), ("12", "7")]
    mandatory = "note_date note_type_concept_id note_class_concept_id note_text"
    for name in f"{mandatory} encoding_concept_id language_concept_id".split():
        assert all(row[name] for row in note), name
    assert note[0]["note_text"] == NOTE.text
    assert note[0]["note_source_value"] == "fednotes:n1"
    assert [row["lexical_variant"] for row in term] == ["Upper belly", "aspirin"]
    assert [(row["note_nlp_id"], row["note_id"], row["offset"]) for row in term] == [
        ("1", "1", "0"), ("2", "1", "26")]  # fmt: skip
    assert [row["term_modifiers"] for row in term] == [
        "label=ADE,pieces=0-5;8-13", "label=Drug,pieces=26-33,confidence=0.750000"]  # fmt: skip
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", row["nlp_date"]) for row in term)


def test_omop_of_another_system(file: File, tmp_path: Path) -> None:
    """Only an offset, a form and a concept; other columns of NOTE come out again."""
    rows = '5,77,2020-01-02,Visit,"Had\na rash."\n6,0,2020-01-02,,"x"\nbroken\n'
    file(f"NOTE_ID,PERSON_ID,NOTE_DATE,NOTE_TITLE,NOTE_TEXT\n{rows}", "o/NOTE.csv")
    file("note_nlp_id,note_id,offset,lexical_variant,note_nlp_concept_id\n1,5,6,rash,140214\n"
         "2,5,,rash,1\n3,9,0,x,1\n", "o/NOTE_NLP.csv")  # fmt: skip
    with pytest.raises(DataError) as caught:
        read(tmp_path / "o")
    told = sorted((Path(p.file).name, p.line, p.kind) for p in caught.value.problems)
    assert told == [
        ("NOTE.csv", 5, "line"),
        ("NOTE_NLP.csv", 3, "mention"),
        ("NOTE_NLP.csv", 4, "mention"),
    ]
    one, two = read(tmp_path / "o", None, "skip")
    assert (one.id, one.text, one.patient) == ("5", "Had\na rash.", "77")
    assert one.spans == (Span(6, 10, "140214"),)
    assert (two.id, two.patient, two.spans) == ("6", None, ())
    assert write([one, two], tmp_path / "again", "omop") == {}
    assert "2020-01-02" in (tmp_path / "again/note.csv").read_text()


def test_numbers_of_omop_are_those_of_a_database(file: File, tmp_path: Path) -> None:
    """007 and 7 are one number there, and ² is none: such notes keep their ids beside a number."""
    made = [Document(name, "a", (), name) for name in ("007", "7", "\u00b2")]
    assert write(made, tmp_path / "o", "omop", allow_loss=True) == {"patient": 2}
    rows = list(csv.DictReader(io.StringIO((tmp_path / "o/note.csv").read_text())))
    assert [(row["note_id"], row["person_id"]) for row in rows] == [
        ("1", "0"), ("7", "7"), ("2", "0")]  # fmt: skip
    assert {d.id for d in read(tmp_path / "o")} == {"007", "7", "\u00b2"}
    # What lies beside a table that was named is not its business.
    (tmp_path / "o/other").symlink_to(file("x", "elsewhere"))
    assert len(read(tmp_path / "o/note.csv")) == 3


def test_a_finding_that_omop_denies_stays_denied(file: File, tmp_path: Path) -> None:
    """All that a row of NOTE_NLP says comes out again, or is named as lost."""
    file('note_id,note_text\n5,"No rash seen, rash before."\n', "o/note.csv")
    heads = "note_nlp_id,note_id,section_concept_id,offset,lexical_variant,note_nlp_concept_id,"
    heads += "nlp_system,nlp_date,term_exists,term_temporal,term_modifiers"
    denied = '7,5,99,3,rash,140214,cTAKES,2020-01-02,N,Past history,"negated=true,subject=patient"'
    file(f"{heads}\n{denied}\n8,5,0,14,rash,140214,cTAKES,2020-01-02,Y,,\n", "o/note_nlp.csv")
    assert convert(tmp_path / "o", tmp_path / "again", "omop").lost == {}
    old, new = (list(csv.DictReader(io.StringIO((tmp_path / name / "note_nlp.csv").read_text())))
                for name in ("o", "again"))  # fmt: skip
    told = [row.pop("term_modifiers") for row in new]
    assert told[0] == "label=140214,pieces=3-7,negated=true,subject=patient"
    held = [
        {k: v for k, v in row.items() if k in old[0] and k != "note_nlp_id" and v not in ("", "0")}
        for row in new
    ]
    assert held == [
        {k: v for k, v in row.items() if k in held[0] and v not in ("", "0")} for row in old
    ]
    assert (held[0]["term_exists"], held[0]["section_concept_id"]) == ("N", "99")
    with pytest.raises(LossyError, match="meta omop: 1"):
        convert(tmp_path / "o", tmp_path / "brat", "brat")


# ---- DocBin by spaCy, Parquet by pyarrow ---------------------------------------------------------


def test_docbin_is_what_spacy_reads(tmp_path: Path) -> None:
    write([NOTE], tmp_path / "a.spacy", "docbin")
    (doc,) = DocBin().from_disk(tmp_path / "a.spacy").get_docs(Vocab())
    assert doc.text == NOTE.text
    assert [(e.start_char, e.end_char, e.label_) for e in doc.ents] == [
        (0, 13, "ADE"),
        (26, 33, "Drug"),
    ]
    assert [span.label_ for span in doc.spans["sc"]] == ["ADE", "Drug"]
    bare = Doc(Vocab(), ["Took", "aspirin", "."], [True, False, False], ents=["O", "B-Drug", "O"])
    DocBin(docs=[bare]).to_disk(tmp_path / "b.spacy")
    (document,) = read((tmp_path / "b.spacy").rename(tmp_path / "b"))  # known by its content
    assert (document.text, document.spans) == ("Took aspirin.", (Span(5, 12, "Drug"),))


def test_docbin_that_is_wrong(file: File, tmp_path: Path, monkeypatch: Any) -> None:
    """Half a file, none, one that grows without end: a line each."""
    write([NOTE], tmp_path / "a.spacy", "docbin")
    whole = (tmp_path / "a.spacy").read_bytes()
    for data in (whole[:-9], b"x", zlib.compress(b"\x81\xa1a\x01"), zlib.compress(b"")):
        with pytest.raises(DataError, match=r"b\.spacy: no DocBin"):
            read(file(data, "b.spacy"))
    monkeypatch.setattr("fednotes.data.formats.docbin._MOST", 1000)
    with pytest.raises(DataError, match="more than 1,000 bytes"):
        read(file(zlib.compress(b"\0" * 5000), "c.spacy"))


def test_parquet_is_what_pyarrow_reads(tmp_path: Path) -> None:
    """Tokens and tags with their names for trainers, text and mentions beside them."""
    note = Document("n1", "Took aspirin daily.", (Span(5, 12, "Drug"), Span(5, 18, "Dose")))
    write([note], tmp_path / "a.parquet", "parquet")
    table = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    (row,) = table.to_pylist()
    assert row["tokens"] == ["Took", "aspirin", "daily", "."]
    info = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    names = info["ner_tags"]["feature"]["names"]
    assert [names[tag] for tag in row["ner_tags"]] == ["O", "B-Dose", "I-Dose", "O"]
    assert row["text"] == note.text


@pytest.mark.parametrize("old", [True, False])
def test_parquet_and_arrow_of_others(tmp_path: Path, old: bool) -> None:
    """Tokens and tags alone: numbers with a ClassLabel's names, in both ways to write it."""
    names = {"names": ["O", "B-Drug", "I-Drug"], "_type": "ClassLabel"}
    feature = [names] if old else {"feature": names, "_type": "Sequence"}
    meta = {"huggingface": json.dumps({"info": {"features": {"ner_tags": feature}}})}
    rows = {"id": ["a", "b"], "tokens": [["Took", "aspirin"], ["x"]], "ner_tags": [[0, 1], [0]]}
    table = pyarrow.table(rows).replace_schema_metadata(meta)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink:
        writer = pyarrow.ipc.new_stream if old else pyarrow.ipc.new_file
        with writer(sink, table.schema) as stream:
            stream.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        one, two = read(tmp_path / name)
        assert (one.id, one.text, one.spans) == ("a", "Took aspirin", (Span(5, 12, "Drug"),))
        assert (two.id, two.spans) == ("b", ())
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-7])
    with pytest.raises(DataError, match=r"b\.parquet: no Parquet or Arrow"):
        read(tmp_path / "b.parquet")
    bad = pyarrow.table({"tokens": [["a", "b"]], "ner_tags": [[0]]}).replace_schema_metadata(meta)
    pyarrow.parquet.write_table(bad, tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"c.parquet: row 1: its tags do not fit"):
        read(tmp_path / "c.parquet")


@pytest.mark.parametrize(
    ("info", "tag"),
    [
        *[(told, 0) for told in ([], {"features": []}, {"features": {"ner_tags": "x"}})],
        ({"features": {"ner_tags": {"feature": []}}}, 0),
        ({"features": {"ner_tags": {"feature": {"names": ["O", "B-X"]}}}}, -1),
    ],
)
def test_parquet_whose_tags_have_no_names(info: Any, tag: int, tmp_path: Path) -> None:
    """A negative number names no tag, and least of all the last one."""
    table = pyarrow.table({"tokens": [["a", "b"]], "ner_tags": [[0, tag]]})
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": info})})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="row 1: its tags do not fit its tokens, or have no names"):
        read(tmp_path / "a.parquet")


def test_parquet_that_grows_is_not_unpacked(tmp_path: Path, monkeypatch: Any) -> None:
    """A million rows of one value are a few bytes of file: they are counted piece by piece."""
    table = pyarrow.table({"text": ["x" * 999] * 9999, "spans": [[]] * 9999})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 9999
    monkeypatch.setattr("fednotes.data.formats.parquet._BYTES", 3 << 20)
    with pytest.raises(DataError, match="more than 1,048,576 rows, or 3,145,728 bytes of them"):
        read(tmp_path / "a.parquet")
    monkeypatch.setattr("fednotes.data.formats.parquet._BYTES", 1 << 30)
    monkeypatch.setattr("fednotes.data.formats.parquet._MOST", 9998)
    with pytest.raises(DataError, match="more than 9,998 rows"):
        read(tmp_path / "a.parquet")


def test_a_folder_that_datasets_saved(file: File, tmp_path: Path) -> None:
    """`save_to_disk` puts two JSON files beside its Arrow files: no part of the corpus."""
    table = pyarrow.table({"text": ["a rash"], "spans": [[{"start": 2, "end": 6, "label": "X"}]]})
    folder = file('{\n  "features": {}\n}', "d/dataset_info.json").parent
    file('{\n  "_split": null\n}', "d/state.json")
    sink = str(folder / "data-00000-of-00001.arrow")
    with pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    assert guess_format(folder) == "parquet"
    assert read(folder)[0].spans == (Span(2, 6, "X"),)


# ---- Prodigy, doccano, BigBIO, n2c2 --------------------------------------------------------------


def test_prodigy_and_doccano_lines(tmp_path: Path) -> None:
    note = Document("a", "60mg of X", (Span(0, 2, "Strength"),))
    write([note], tmp_path / "p.jsonl", "prodigy", allow_loss=True)
    line = json.loads((tmp_path / "p.jsonl").read_text())
    assert [(t["text"], t["ws"]) for t in line["tokens"]] == [
        ("60", False), ("mg", True), ("of", True), ("X", False)]  # fmt: skip
    (span,) = line["spans"]
    assert span == {"start": 0, "end": 2, "label": "Strength", "token_start": 0, "token_end": 0}
    assert line["answer"] == "accept"
    write([note], tmp_path / "d.jsonl", "doccano")
    line = json.loads((tmp_path / "d.jsonl").read_text())
    assert line == {"text": "60mg of X", "label": [[0, 2, "Strength"]], "id": "a"}


def test_bigbio_rows(file: File, tmp_path: Path) -> None:
    """Passages where their offsets say; relations come out again; JSON, lines and Parquet."""
    passages = [{"id": "p1", "type": "t", "text": ["Rash"], "offsets": [[0, 4]]},
                {"id": "p2", "type": "a", "text": ["Had pain."], "offsets": [[5, 14]]}]  # fmt: skip
    entity = {"id": "e1", "type": "ADE", "text": ["pain"], "offsets": [[9, 13]],
              "normalized": [{"db_name": "MESH", "db_id": "D1"}]}  # fmt: skip
    relation = {"id": "r", "type": "X", "arg1_id": "e1", "arg2_id": "e1", "normalized": []}
    row = {"id": "0", "document_id": "9", "passages": passages, "entities": [entity], "events": [],
           "coreferences": [], "relations": [relation]}  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "b.parquet")
    for path in (file(json.dumps([row], indent=1), "b.json"), file(json.dumps(row), "b.jsonl"),
                 tmp_path / "b.parquet"):  # fmt: skip
        (document,) = read(path)
        assert (document.id, document.text) == ("9", "Rash\nHad pain.")
        assert document.spans == (Span(9, 13, "ADE"),)
        write([document], tmp_path / f"again-{path.name}.jsonl", "bigbio")
        again = json.loads((tmp_path / f"again-{path.name}.jsonl").read_text())
        assert (again["relations"], again["entities"]) == ([relation], [entity])
        assert again["passages"] == passages
        write([replace(document, text="Rash. Had pain.", spans=())], tmp_path / "n", "bigbio", True)
        (whole,) = json.loads((tmp_path / "n").read_text())["passages"]
        assert whole["text"] == ["Rash. Had pain."]
        (tmp_path / "n").unlink()
    with pytest.raises(DataError, match="row 1: its parts are not those"):
        read(file('{"document_id": 1, "passages": [{"text": 3}]}', "c.json"), "bigbio")


def test_n2c2_2018_is_brat(file: File, tmp_path: Path) -> None:
    """Its files as they are: relations and mentions in pieces, byte for byte."""
    note = "Started on aspirin 81 mg daily. Now upper belly and pain.\n"
    ann = ("T1\tDrug 11 18\taspirin\nT2\tStrength 19 24\t81 mg\n"
           "T3\tADE 36 47;52 56\tupper belly pain\n"
           "R1\tStrength-Drug Arg1:T2 Arg2:T1\nR2\tADE-Drug Arg1:T3 Arg2:T1\n")  # fmt: skip
    file(note, "n/100035.txt")
    folder = file(ann, "n/100035.ann").parent
    (document,) = read(folder)
    assert [s.label for s in document.spans] == ["Drug", "Strength", "ADE"]
    assert document.spans[2].fragments == ((36, 47), (52, 56))
    convert(folder, tmp_path / "o", "brat")
    assert (tmp_path / "o/100035.ann").read_text() == ann


def test_a_quote_that_is_not_closed_costs_no_time(file: File) -> None:
    """64 kB took minutes when a string was tried from each of its quotes."""
    start = time.monotonic()
    for end in ("x", "\\"):
        with pytest.raises(DataError, match=r"cannot tell the format|no JSON"):
            read(file('["' + '\\"' * 30_000 + end, "a.json"))
    assert time.monotonic() - start < 5
    same = file(json.dumps({"id": "a", "text": "x"}) + "\n", "same.jsonl")
    same.write_text(same.read_text() * 20_000)
    assert read(same)[-1].id == "a~20000"
    assert time.monotonic() - start < 10


def test_texts_without_annotations_are_notes_to_predict_and_lost_to_convert(
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
        found = documents_of(str(tmp_path / folder))
        assert {d.id for d in found} == names
        assert sum(bool(d.spans) for d in found) == 1
        assert len(read(tmp_path / folder)) == 1  # gold is what somebody annotated
    with pytest.raises(LossyError) as caught:
        convert(tmp_path / "p", tmp_path / "o", "brat")
    ends = "texts with line ends of Windows"
    assert caught.value.lost == {"texts without annotations": 2, ends: 1}
    with pytest.raises(LossyError, match=f"{ends}: 1; texts without annotations: 1"):
        convert(tmp_path / "q", tmp_path / "o", "jsonl")


def test_meta_that_brat_never_wrote_is_compared(file: File, tmp_path: Path) -> None:
    source = file(json.dumps({"text": "a", "brat": 1}), "a.jsonl")
    assert convert(source, tmp_path / "b.jsonl", "jsonl").lost == {}


@pytest.mark.parametrize("key", ["bigbio", "fhir", "omop"])
@pytest.mark.parametrize("value", [1, {"resourceType": ["x"], "entities": [1]}, {"entities": 3}])
def test_meta_of_somebody_else_is_no_traceback(key: str, value: Any, tmp_path: Path) -> None:
    try:
        write([replace(NOTE, meta={key: value})], tmp_path / "x", key, allow_loss=True)
    except DataError:
        assert not (tmp_path / "x").exists()


# ---- real corpora --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.corpora
@pytest.mark.parametrize("name", MAY_LOSE)
def test_maccrobat_in_every_format(
    corpora: Path, name: str, tmp_path: Path, instant_disk: None
) -> None:
    """25,189 mentions, 44 of them in pieces, events in every document: there and back."""
    documents = read(corpora / "maccrobat")
    gone = lost(documents, name.split()[0], tmp_path / MAY_LOSE[name][0])
    if name == "conll":
        assert gone["mentions in pieces"] == 44
    else:
        whole = {"mentions in pieces": 44} if name in ("doccano", "label-studio", "prodigy") else {}
        assert gone == whole | ({"meta brat": 200} if name in ("bigbio", "omop") else {})
