"""Formats of other programs: they read what we write, and we read what they write.

`bioc`, `fhir.resources`, spaCy and pyarrow judge what is written, or write it.
"""

from __future__ import annotations

import base64
import csv
import encodings
import io
import json
import re
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import bioc
import pyarrow
import pyarrow.parquet
import pytest
from bioc import biocjson, biocxml
from fhir.resources.R4B.bundle import Bundle
from spacy.tokens import Doc, DocBin
from spacy.vocab import Vocab
from tiny_notes import NOTE

from fednotes.core.errors import DataError
from fednotes.core.types import Document, Span
from fednotes.data.formats import LossyError, convert, guess_format, read, write
from fednotes.jobs.checking import check_files

File = Callable[..., Path]

# ---- BioC, by the package `bioc` -----------------------------------------------------


@pytest.mark.parametrize(("name", "load"), [("n.xml", biocxml), ("n.json", biocjson)])
def test_the_bioc_package_reads_what_is_written(
    name: str, load: Any, tmp_path: Path
) -> None:
    write([NOTE], tmp_path / name, "bioc")
    with open(tmp_path / name, encoding="utf-8", newline="") as file:
        (document,) = load.loads(file.read()).documents
    (passage,) = document.passages
    assert (document.id, passage.offset, passage.text) == ("n1", 0, NOTE.text)
    parsed = [
        (a.infons["type"], a.text, [(x.offset, x.length) for x in a.locations])
        for a in passage.annotations
    ]
    assert parsed == [
        ("ADE", "Upper belly", [(0, 5), (8, 5)]),
        ("Drug", "aspirin", [(26, 7)]),
    ]
    assert passage.annotations[1].infons["confidence"] == "0.75"


def test_bioc_of_another_program_survives_a_round_trip(tmp_path: Path) -> None:
    """Passages, infons, ids and relations that `bioc` wrote, changed mentions aside."""
    collection, document = bioc.BioCCollection(), bioc.BioCDocument()
    document.id, document.infons = "9", {"journal": "J"}
    for offset, text in ((0, "Rash after aspirin"), (20, "Had rash.")):
        passage = bioc.BioCPassage()
        passage.offset, passage.text, passage.infons = (
            offset,
            text,
            {"section": str(offset)},
        )
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
    (from_xml,), (from_json,) = read(tmp_path / "a.xml"), read(tmp_path / "a.json")
    assert from_xml == from_json
    assert from_xml.text == "Rash after aspirin \nHad rash."
    assert from_xml.spans == (Span(0, 4, "X"), Span(11, 18, "X"))
    for name, load in (("b.xml", biocxml), ("b.json", biocjson)):
        write([from_xml], tmp_path / name, "bioc")
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
    less = [replace(from_xml, spans=from_xml.spans[1:])]
    assert write(less, tmp_path / "c.xml", "bioc", allow_loss=True) == {"meta bioc": 1}
    (reference,) = biocxml.loads((tmp_path / "c.xml").read_text()).documents
    assert [a.id for a in reference.passages[0].annotations] == ["B"]
    assert reference.relations == []


def test_malicious_bioc_is_refused_quickly(file: File) -> None:
    """Entities, endless nesting and a half file are refused in one line, quickly."""
    start = time.monotonic()
    bomb = '<?xml version="1.0"?><!DOCTYPE collection [<!ENTITY a "Zyx"><!ENTITY b "&a;&a;">]>'
    deep = "<collection><document>" + "<passage>" * 200_000
    far = [{"offset": n << 19, "text": "a"} for n in range(9)]  # 4.5 MB of blanks
    for text, why in (
        (f"{bomb}<collection>&b;</collection>", "declares entities"),
        (deep, "too many elements, or they are nested too deeply"),
        ("<collection><document><id>1</id>", "the XML is incomplete"),
        ('{"documents": {"a": 1}, "infons": 1, "passages": 1}', "no"),
        (json.dumps({"infons": {}, "passages": far}), "starts far after it"),
    ):
        path = file(text, "a.bioc")
        with pytest.raises(DataError, match=why) as caught:
            read(path, "bioc")
        assert "Zyx" not in str(caught.value)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("encoding", ["utf-99", "base64", "idna", "gb18030"])
def test_bioc_in_an_encoding_that_cannot_be_read_is_refused(
    file: File, encoding: str
) -> None:
    path = file(f'<?xml version="1.0" encoding="{encoding}"?><collection/>', "a.xml")
    with pytest.raises(DataError, match=r"a\.xml:1: .* save the file as UTF-8$"):
        read(path, "bioc")


@pytest.mark.parametrize(
    "meta",
    [
        {"bioc": 1},
        {"bioc": {"annotations": [1], "passages": 3}},
        {"bioc": {"passages": [[1]]}},
    ],
)
def test_foreign_metadata_is_ignored_when_bioc_is_written(
    meta: dict[str, Any], tmp_path: Path
) -> None:
    lost = write(
        [replace(NOTE, meta=meta)], tmp_path / "a.xml", "bioc", allow_loss=True
    )
    assert set(lost) <= {"meta bioc"}
    assert read(tmp_path / "a.xml")[0].spans == NOTE.spans


# ---- Label Studio --------------------------------------------------------------------


def _task(
    text: str, regions: list[tuple[int, int, str, str]], **more: Any
) -> dict[str, Any]:
    result = [
        {
            "type": "labels",
            "value": {"start": a, "end": b, "text": form, "labels": [label]},
        }
        for a, b, form, label in regions
    ]
    return {
        "id": 1,
        "data": {"text": text},
        "annotations": [{"result": result, **more}],
    }


def test_exports_of_label_studio_are_read(file: File, tmp_path: Path) -> None:
    """The last annotation counts, skipped tasks go, offsets as JavaScript counts are
    turned."""
    text = "💩This is rash."
    right, utf16 = (9, 13, "rash", "ADE"), (10, 14, "rash", "ADE")
    twice = _task(text, [right])
    twice["annotations"].insert(0, {"result": []})
    tasks = [
        _task(text, [right]), _task(text, [utf16]), twice, _task(text, [right], was_cancelled=True),
        {"data": {"text": text}, "predictions": [_task(text, [right])["annotations"][0]]},
        {"data": {"note": text, "n": 3}},
    ]  # fmt: skip
    tasks[0]["annotations"][0]["result"] += [
        {"type": "choices", "value": {"choices": ["x"]}}
    ]
    documents = read(file(json.dumps(tasks, indent=2), "export.json"))
    assert [[(d.text[s.start : s.end], s.label) for s in d.spans] for d in documents] == [
        *[[("rash", "ADE")]] * 4, []]  # fmt: skip
    assert [d.id for d in documents] == [f"export:{n}" for n in (1, 2, 3, 5, 6)]
    assert documents[4].meta == {"n": 3}
    message = "the format jsonl cannot represent: annotations of others: 1; relations"
    with pytest.raises(LossyError, match=message) as caught:
        convert(tmp_path / "export.json", tmp_path / "out", "jsonl")
    others = {
        "annotations of others": 1,
        "relations, and answers that are not mentions": 1,
    }
    assert caught.value.lost == others
    assert not (tmp_path / "out").exists()


def test_utf_16_offsets_of_label_studio_are_converted(file: File) -> None:
    """Units are those of Python's codec; offsets in characters come first."""
    text = "a💩💩é𝒳b 💩c"
    units = text.encode("utf-16-le")
    for start, end in combinations(range(len(text) + 1), 2):
        before = len(text[:start].encode("utf-16-le")) // 2
        after = len(text[:end].encode("utf-16-le")) // 2
        form = units[2 * before : 2 * after].decode("utf-16-le")
        tasks = [_task(text, [(before, after, form, "X")])]
        (document,) = read(file(json.dumps(tasks), "t.json"), "label-studio")
        expected = (start, end)
        if after <= len(text) and text[before:after] == form:
            expected = (before, after)
        assert [(s.start, s.end) for s in document.spans] == [expected]
    split = [_task(text, [(2, 3, "\ufffd", "X"), (1, 2, "a", "X")])]
    with pytest.raises(DataError, match="differs from the document at"):
        read(file(json.dumps(split), "t.json"), "label-studio")


def test_written_tasks_can_be_imported_into_label_studio(tmp_path: Path) -> None:
    """Mentions with a confidence are a prediction, others an annotation."""
    sure = (Span(0, 3, "X", (), 0.5),)
    write([Document("a", "abc", (Span(0, 3, "X"),)), Document("b", "abc", sure)],
          tmp_path / "t.json", "label-studio")  # fmt: skip
    first_task, second_task = json.loads((tmp_path / "t.json").read_text())
    value = {"start": 0, "end": 3, "text": "abc", "labels": ["X"]}
    region = {
        "id": "r1",
        "type": "labels",
        "from_name": "label",
        "to_name": "text",
        "value": value,
    }
    assert first_task == {
        "data": {"text": "abc", "id": "a"},
        "annotations": [{"result": [region]}],
    }
    assert second_task["predictions"] == [{"result": [region | {"score": 0.5}]}]


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([{"data": {"a": 1, "data": 2}}], 't.json: task 1: its data has no "text"'),
        ([_task("ab", [(0, 9, "ab", "X")])], "task 1: 0:9 is not a span"),
        (
            [_task("ab", []), _task("ab", [(0, 2, "xy", "X")])],
            "task 2: the text of the mention differs from the document at 0:2",
        ),
        ([_task("ab", [(0, 2, "ab", "")])], "task 1: a mention has no type"),
        ([{"data": 1}], "task 1"),
    ],
)
def test_a_malformed_task_of_label_studio_is_refused(
    file: File, tasks: Any, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read(file(json.dumps(tasks), "t.json"), "label-studio")


# ---- FHIR, by fhir.resources ---------------------------------------------------------


def test_written_fhir_is_valid_for_another_program(tmp_path: Path) -> None:
    odd_note = Document("odd id!", "", (), "pa tient", ("E11",), {"m": (1, 2)})
    write([NOTE, odd_note], tmp_path / "b.json", "fhir")
    raw = (tmp_path / "b.json").read_text()
    bundle = Bundle.model_validate_json(raw)
    first, second = (entry.resource for entry in bundle.entry)
    assert (first.id, first.status, first.subject.reference) == (
        "n1",
        "current",
        "Patient/7",
    )
    attachment = first.content[0].attachment
    assert attachment.data.decode() == NOTE.text
    label, *places = first.extension[-1].extension
    assert label.valueString == "Drug"
    assert [(extension.url, extension.valueInteger) for extension in places[:2]] == [
        ("start", 26),
        ("end", 33),
    ]
    assert float(places[2].valueDecimal) == 0.75
    assert (second.id, second.subject) == ("note-2", None)


def _attached(text: str, **more: Any) -> dict[str, Any]:
    data = base64.b64encode(text.encode("latin-1")).decode()
    return {"contentType": "text/plain; charset=iso-8859-1", "data": data, **more}


def test_fhir_of_hospitals_is_read(file: File, tmp_path: Path) -> None:
    """A Bundle, lines, and one resource; other resources and attachments are passed
    over."""
    report = {
        "resourceType": "DiagnosticReport", "id": "r", "status": "final", "code": {"text": "x"},
        "subject": {"reference": "https://h.example/Patient/9"},
        "presentedForm": [{"contentType": "application/pdf", "url": "x"}, _attached("Café.")],
    }  # fmt: skip
    reference = {"resourceType": "DocumentReference", "id": "d", "status": "current"}
    reference |= {
        "type": {"text": "Discharge"},
        "content": [{"attachment": _attached("Rash.")}],
    }
    patient = {"resourceType": "Patient", "id": "9"}
    entries = [{"resource": resource} for resource in (patient, report, reference)]
    bundle = {"resourceType": "Bundle", "type": "searchset", "entry": entries}
    lines = "\n".join(map(json.dumps, (patient, report, reference)))
    for text in (json.dumps(bundle), json.dumps(bundle, indent=2), lines):
        first, second = read(file(text, "f.ndjson"))
        assert (first.id, first.text, first.patient) == ("r", "Café.", "9")
        assert (second.id, second.text, second.patient) == ("d", "Rash.", None)
    assert write([first, second], tmp_path / "b.json", "fhir") == {}
    again = Bundle.model_validate_json((tmp_path / "b.json").read_text())
    kinds = [type(entry.resource).__name__ for entry in again.entry]
    assert kinds == ["DiagnosticReport", "DocumentReference"]
    assert again.entry[1].resource.type.text == "Discharge"
    (link, _) = again.entry[0].resource.presentedForm
    assert (link.contentType, link.url) == ("application/pdf", "x")


def test_other_resources_of_a_bundle_are_counted(file: File, tmp_path: Path) -> None:
    """By type, as far as it is one; another's words are not repeated, and no list is
    endless."""
    note = {
        "resourceType": "DocumentReference",
        "id": "d",
        "content": [{"attachment": _attached("Rash.")}],
    }
    others: list[Any] = [
        "Patient",
        "Observation",
        "Observation",
        "\x1b[2J<b>",
        7,
        "X" * 99,
    ]
    others += [f"Type{chr(65 + n)}{chr(97 + m)}" for n in range(8) for m in range(8)]
    resources = [note, *({"resourceType": kind} for kind in others), None]
    path = file(
        json.dumps(
            {"resourceType": "Bundle", "entry": [{"resource": r} for r in resources]}
        ),
        "b.json",
    )
    with pytest.raises(
        LossyError, match="Observation resources: 2; Patient resources: 1"
    ) as caught:
        convert(path, tmp_path / "out.jsonl", "jsonl")
    lost = convert(path, tmp_path / "out.jsonl", "jsonl", allow_loss=True).lost
    assert caught.value.lost == lost
    assert (lost.total(), len(lost)) == (len(others) + 1, 40)
    assert lost["resources of other types"] == 4 + 64 - 37
    (finding,) = (f for f in check_files([path]).findings if f.code == "passed_over")
    assert finding.counts == dict(lost)
    assert "Patient resources: 1" in finding.message
    assert finding.message.isprintable()


def test_fhir_of_hospitals_survives_a_round_trip(file: File, tmp_path: Path) -> None:
    """All of it but what is derived from the text; two texts made one are counted."""
    note = {**_attached("Rash."), "title": "Visit", "creation": "2020-01-02", "size": 5}
    pdf = {
        "attachment": {
            "contentType": "application/pdf",
            "data": "QUJD",
            "title": "Scan",
        }
    }
    coding = {"code": "urn:x"}
    resource = {"resourceType": "DocumentReference", "id": "d", "status": "superseded"}
    resource |= {"content": [pdf, {"attachment": note, "format": coding}]}
    out = tmp_path / "b.json"
    assert convert(file(json.dumps(resource), "a.json"), out, "fhir").lost == {}
    (entry,) = Bundle.model_validate_json(out.read_text()).entry
    again = json.loads(entry.resource.model_dump_json())
    text = again["content"][1]["attachment"]
    assert base64.b64decode(text.pop("data")) == b"Rash."
    assert text.pop("contentType") == "text/plain; charset=utf-8"
    assert text == {"title": "Visit", "creation": "2020-01-02"}
    assert (again["content"][0], again["content"][1]["format"]) == (pdf, coding)
    assert again["status"] == "superseded"
    resource["content"] += [{"attachment": _attached("More.")}]
    with pytest.raises(LossyError, match="meta fhir: 1"):
        convert(file(json.dumps(resource), "a.json"), tmp_path / "c.json", "fhir")


@pytest.mark.parametrize(
    ("attachment", "message"),
    [
        (
            {"contentType": "text/plain", "url": "https://h.example/1"},
            "fednotes does not fetch",
        ),
        ({"contentType": "text/plain", "data": "a"}, "not base64"),
        (
            {"contentType": "text/plain", "data": "/w=="},
            "cannot be decoded in the character set",
        ),
        (
            {"contentType": "text/plain; charset=klingon", "data": "QQ=="},
            "cannot be decoded in the character set",
        ),
        (
            {"contentType": "text/plain; charset=punycode", "data": "QQ=="},
            "cannot be decoded in the character set",
        ),
        (
            {"contentType": "text/html", "data": ""},
            "no attachment of type text/plain",
        ),
        ("x", "parts|no attachment"),
    ],
)
def test_an_unusable_attachment_of_fhir_is_refused(
    file: File, attachment: Any, message: str
) -> None:
    content = [{"attachment": attachment}]
    resource = {"resourceType": "DocumentReference", "content": content}
    with pytest.raises(DataError, match=f"f.json: resource 1: .*({message})"):
        read(file(json.dumps(resource), "f.json"))


def test_a_long_name_of_a_character_set_is_not_looked_up(file: File) -> None:
    """Python keeps each name that it has looked up, so a server would need ever more
    memory."""
    name = "utf" + 100 * "x"
    attachment = {"contentType": f"text/plain; charset={name}", "data": "QQ=="}
    content = [{"attachment": attachment}]
    resource = {"resourceType": "DocumentReference", "content": content}
    with pytest.raises(DataError, match="cannot be decoded in the character set"):
        read(file(json.dumps(resource), "f.json"))
    assert name not in encodings._cache


# ---- OMOP ----------------------------------------------------------------------------


def test_omop_tables_have_the_columns_of_the_common_data_model(tmp_path: Path) -> None:
    """What CDM 5.4 makes mandatory is filled, numbers are numbers, places are the
    text's."""
    write([NOTE, replace(NOTE, id="12", spans=())], tmp_path / "o", "omop")
    note, term = (
        list(
            csv.DictReader(
                io.StringIO((tmp_path / f"o/{name}.csv").read_bytes().decode(), "")
            )
        )
        for name in ("note", "note_nlp")
    )
    assert [(row["note_id"], row["person_id"]) for row in note] == [
        ("1", "7"),
        ("12", "7"),
    ]
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


def test_omop_of_another_system_is_read(file: File, tmp_path: Path) -> None:
    """Only an offset, a form and a concept; other columns of NOTE come out again."""
    rows = '5,77,2020-01-02,Visit,"Had\na rash."\n6,0,2020-01-02,,"x"\nbroken\n'
    file(f"NOTE_ID,PERSON_ID,NOTE_DATE,NOTE_TITLE,NOTE_TEXT\n{rows}", "o/NOTE.csv")
    file("note_nlp_id,note_id,offset,lexical_variant,note_nlp_concept_id\n1,5,6,rash,140214\n"
         "2,5,,rash,1\n3,9,0,x,1\n", "o/NOTE_NLP.csv")  # fmt: skip
    with pytest.raises(DataError) as caught:
        read(tmp_path / "o")
    problems = sorted(
        (Path(p.file).name, p.line, p.kind) for p in caught.value.problems
    )
    assert problems == [
        ("NOTE.csv", 5, "line"),
        ("NOTE_NLP.csv", 3, "mention"),
        ("NOTE_NLP.csv", 4, "mention"),
    ]
    first, second = read(tmp_path / "o", None, "skip")
    assert (first.id, first.text, first.patient) == ("5", "Had\na rash.", "77")
    assert first.spans == (Span(6, 10, "140214"),)
    assert (second.id, second.patient, second.spans) == ("6", None, ())
    assert write([first, second], tmp_path / "again", "omop") == {}
    assert "2020-01-02" in (tmp_path / "again/note.csv").read_text()


def test_a_problem_of_omop_names_the_table_with_the_mention(
    file: File, tmp_path: Path
) -> None:
    file("note_id,note_text\n5,Had a rash.\n", "o/note.csv")
    header = "note_nlp_id,note_id,offset,lexical_variant,note_nlp_concept_id\n"
    file(f"{header}1,5,6,rash,140214\n", "o/note_nlp.csv")
    file(f"{header}2,5,,rash,1\n", "o/note_nlp_2.csv")
    file(f"{header}3,9,0,x,1\n", "o/note_nlp_3.csv")
    with pytest.raises(DataError) as caught:
        read(tmp_path / "o")
    places = sorted((Path(p.file).name, p.line) for p in caught.value.problems)
    assert places == [("note_nlp_2.csv", 2), ("note_nlp_3.csv", 2)]


def test_predictions_written_as_omop_keep_the_visit(file: File, tmp_path: Path) -> None:
    """A line of `fednotes predict` becomes a row with the number of the visit."""
    line = {"id": "1", "text": "Takes aspirin.", "patient": "7", "visit": "70"}
    spans = [{"start": 6, "end": 13, "label": "Drug"}]
    predictions = file(json.dumps({**line, "spans": spans}), "found.jsonl")
    assert convert(predictions, tmp_path / "o", "omop").lost == {}
    (row,) = csv.DictReader(io.StringIO((tmp_path / "o/note.csv").read_text()))
    assert (row["person_id"], row["visit_occurrence_id"]) == ("7", "70")
    (document,) = read(tmp_path / "o")
    assert document.meta == {"visit": "70"}
    # The column holds numbers only.
    named = [replace(document, meta={"visit": "ward 3"})]
    assert write(named, tmp_path / "named", "omop", allow_loss=True) == {
        "meta visit": 1
    }


def test_equal_numbers_of_omop_do_not_collide(file: File, tmp_path: Path) -> None:
    """007 and 7 are one number there, and ² is none: such notes keep their ids beside a
    number."""
    documents = [Document(name, "a", (), name) for name in ("007", "7", "\u00b2")]
    assert write(documents, tmp_path / "o", "omop", allow_loss=True) == {"patient": 2}
    rows = list(csv.DictReader(io.StringIO((tmp_path / "o/note.csv").read_text())))
    assert [(row["note_id"], row["person_id"]) for row in rows] == [
        ("1", "0"), ("7", "7"), ("2", "0")]  # fmt: skip
    assert {d.id for d in read(tmp_path / "o")} == {"007", "7", "\u00b2"}
    # What lies beside a table that was named is not its business.
    (tmp_path / "o/other").symlink_to(file("x", "elsewhere"))
    assert len(read(tmp_path / "o/note.csv")) == 3


def test_a_negated_finding_of_omop_survives_a_round_trip(
    file: File, tmp_path: Path
) -> None:
    """All that a row of NOTE_NLP says comes out again, or is named as lost."""
    file('note_id,note_text\n5,"No rash seen, rash before."\n', "o/note.csv")
    heads = "note_nlp_id,note_id,section_concept_id,offset,lexical_variant,note_nlp_concept_id,"
    heads += "nlp_system,nlp_date,term_exists,term_temporal,term_modifiers"
    denied = '7,5,99,3,rash,140214,cTAKES,2020-01-02,N,Past history,"negated=true,subject=patient"'
    file(
        f"{heads}\n{denied}\n8,5,0,14,rash,140214,cTAKES,2020-01-02,Y,,\n",
        "o/note_nlp.csv",
    )
    assert convert(tmp_path / "o", tmp_path / "again", "omop").lost == {}
    originals, rewritten = (list(csv.DictReader(io.StringIO((tmp_path / name / "note_nlp.csv").read_text())))
                for name in ("o", "again"))  # fmt: skip
    modifiers = [row.pop("term_modifiers") for row in rewritten]
    assert modifiers[0] == "label=140214,pieces=3-7,negated=true,subject=patient"
    compared = [
        {
            k: v
            for k, v in row.items()
            if k in originals[0] and k != "note_nlp_id" and v not in ("", "0")
        }
        for row in rewritten
    ]
    assert compared == [
        {k: v for k, v in row.items() if k in compared[0] and v not in ("", "0")}
        for row in originals
    ]
    assert (compared[0]["term_exists"], compared[0]["section_concept_id"]) == (
        "N",
        "99",
    )
    with pytest.raises(LossyError, match="meta omop: 1"):
        convert(tmp_path / "o", tmp_path / "brat", "brat")


# ---- DocBin by spaCy, Parquet by pyarrow ---------------------------------------------


def test_spacy_reads_a_written_docbin(tmp_path: Path) -> None:
    write([NOTE], tmp_path / "a.spacy", "docbin")
    (doc,) = DocBin().from_disk(tmp_path / "a.spacy").get_docs(Vocab())
    assert doc.text == NOTE.text
    assert [(e.start_char, e.end_char, e.label_) for e in doc.ents] == [
        (0, 13, "ADE"),
        (26, 33, "Drug"),
    ]
    assert [span.label_ for span in doc.spans["sc"]] == ["ADE", "Drug"]
    bare = Doc(
        Vocab(),
        ["Took", "aspirin", "."],
        [True, False, False],
        ents=["O", "B-Drug", "O"],
    )
    DocBin(docs=[bare]).to_disk(tmp_path / "b.spacy")
    # known by its content
    (document,) = read((tmp_path / "b.spacy").rename(tmp_path / "b"))
    assert (document.text, document.spans) == ("Took aspirin.", (Span(5, 12, "Drug"),))


def test_a_malformed_docbin_is_refused(
    file: File, tmp_path: Path, monkeypatch: Any
) -> None:
    """Half a file, none, one that grows without end: a line each."""
    write([NOTE], tmp_path / "a.spacy", "docbin")
    content = (tmp_path / "a.spacy").read_bytes()
    for data in (
        content[:-9],
        b"x",
        zlib.compress(b"\x81\xa1a\x01"),
        zlib.compress(b""),
    ):
        with pytest.raises(DataError, match=r"b\.spacy: not a DocBin"):
            read(file(data, "b.spacy"))
    monkeypatch.setattr("fednotes.core.bounds.DOCBIN_BYTES", 1000)
    with pytest.raises(DataError, match="more than 1,000 bytes"):
        read(file(zlib.compress(b"\0" * 5000), "c.spacy"))


def test_pyarrow_reads_written_parquet(tmp_path: Path) -> None:
    """Tokens and tags with their names for trainers, text and mentions beside them."""
    note = Document(
        "n1", "Took aspirin daily.", (Span(5, 12, "Drug"), Span(5, 18, "Dose"))
    )
    write([note], tmp_path / "a.parquet", "parquet")
    table = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    (row,) = table.to_pylist()
    assert row["tokens"] == ["Took", "aspirin", "daily", "."]
    info = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    names = info["ner_tags"]["feature"]["names"]
    assert [names[tag] for tag in row["ner_tags"]] == ["O", "B-Dose", "I-Dose", "O"]
    assert row["text"] == note.text


@pytest.mark.parametrize("is_old", [True, False])
def test_parquet_and_arrow_of_other_programs_are_read(
    tmp_path: Path, is_old: bool
) -> None:
    """Tokens and tags alone: numbers with a ClassLabel's names, in both ways to write
    it."""
    names = {"names": ["O", "B-Drug", "I-Drug"], "_type": "ClassLabel"}
    feature = [names] if is_old else {"feature": names, "_type": "Sequence"}
    meta = {"huggingface": json.dumps({"info": {"features": {"ner_tags": feature}}})}
    rows = {
        "id": ["a", "b"],
        "tokens": [["Took", "aspirin"], ["x"]],
        "ner_tags": [[0, 1], [0]],
    }
    table = pyarrow.table(rows).replace_schema_metadata(meta)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink:
        writer = pyarrow.ipc.new_stream if is_old else pyarrow.ipc.new_file
        with writer(sink, table.schema) as stream:
            stream.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        first, second = read(tmp_path / name)
        assert (first.id, first.text, first.spans) == (
            "a",
            "Took aspirin",
            (Span(5, 12, "Drug"),),
        )
        assert (second.id, second.spans) == ("b", ())
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-7])
    with pytest.raises(DataError, match=r"b\.parquet: not a readable Parquet or Arrow"):
        read(tmp_path / "b.parquet")
    bad = pyarrow.table(
        {"tokens": [["a", "b"]], "ner_tags": [[0]]}
    ).replace_schema_metadata(meta)
    pyarrow.parquet.write_table(bad, tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"c.parquet: row 1: it needs one tag"):
        read(tmp_path / "c.parquet")


@pytest.mark.parametrize(
    ("info", "tag"),
    [
        *[
            (features, 0)
            for features in ([], {"features": []}, {"features": {"ner_tags": "x"}})
        ],
        ({"features": {"ner_tags": {"feature": []}}}, 0),
        ({"features": {"ner_tags": {"feature": {"names": ["O", "B-X"]}}}}, -1),
    ],
)
def test_parquet_with_unnamed_or_negative_tags_is_refused(
    info: Any, tag: int, tmp_path: Path
) -> None:
    """A negative number names no tag, and least of all the last one."""
    table = pyarrow.table({"tokens": [["a", "b"]], "ner_tags": [[0, tag]]})
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": info})})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(
        DataError, match="row 1: it needs one tag, with a name, for each token"
    ):
        read(tmp_path / "a.parquet")


def test_parquet_that_grows_too_much_is_refused(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """A million rows of one value are a few bytes of file: they are counted piece by
    piece."""
    table = pyarrow.table({"text": ["x" * 999] * 9999, "spans": [[]] * 9999})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 9999
    assert len(read(tmp_path / "a.parquet")) == 9999
    monkeypatch.setattr("fednotes.core.bounds.PACKED_FREE", 3 << 20)
    with pytest.raises(
        DataError, match="its rows have more than 3,145,728 bytes, far more than a file"
    ):
        read(tmp_path / "a.parquet")
    monkeypatch.setattr("fednotes.core.bounds.ARROW_BYTES", 900)
    with pytest.raises(DataError, match="a batch of rows has more than 900 bytes"):
        read(tmp_path / "a.parquet")


def test_a_folder_saved_by_datasets_is_read(file: File, tmp_path: Path) -> None:
    """`save_to_disk` puts two JSON files beside its Arrow files: no part of the corpus."""
    table = pyarrow.table(
        {"text": ["a rash"], "spans": [[{"start": 2, "end": 6, "label": "X"}]]}
    )
    folder = file('{\n  "features": {}\n}', "d/dataset_info.json").parent
    file('{\n  "_split": null\n}', "d/state.json")
    sink = str(folder / "data-00000-of-00001.arrow")
    with pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    assert guess_format(folder) == "parquet"
    assert read(folder)[0].spans == (Span(2, 6, "X"),)


# ---- Prodigy, doccano, BigBIO, n2c2 --------------------------------------------------


def test_lines_of_prodigy_and_doccano_survive_a_round_trip(tmp_path: Path) -> None:
    note = Document("a", "60mg of X", (Span(0, 2, "Strength"),))
    write([note], tmp_path / "p.jsonl", "prodigy", allow_loss=True)
    line = json.loads((tmp_path / "p.jsonl").read_text())
    assert [(t["text"], t["ws"]) for t in line["tokens"]] == [
        ("60", False), ("mg", True), ("of", True), ("X", False)]  # fmt: skip
    (span,) = line["spans"]
    assert span == {
        "start": 0,
        "end": 2,
        "label": "Strength",
        "token_start": 0,
        "token_end": 0,
    }
    assert line["answer"] == "accept"
    write([note], tmp_path / "d.jsonl", "doccano")
    line = json.loads((tmp_path / "d.jsonl").read_text())
    assert line == {"text": "60mg of X", "label": [[0, 2, "Strength"]], "id": "a"}


def test_rows_of_bigbio_survive_a_round_trip(file: File, tmp_path: Path) -> None:
    """Passages where their offsets say; relations come out again; JSON, lines and
    Parquet."""
    passages = [{"id": "p1", "type": "t", "text": ["Rash"], "offsets": [[0, 4]]},
                {"id": "p2", "type": "a", "text": ["Had pain."], "offsets": [[5, 14]]}]  # fmt: skip
    entity = {"id": "e1", "type": "ADE", "text": ["pain"], "offsets": [[9, 13]],
              "normalized": [{"db_name": "MESH", "db_id": "D1"}]}  # fmt: skip
    relation = {
        "id": "r",
        "type": "X",
        "arg1_id": "e1",
        "arg2_id": "e1",
        "normalized": [],
    }
    row = {"id": "0", "document_id": "9", "passages": passages, "entities": [entity], "events": [],
           "coreferences": [], "relations": [relation]}  # fmt: skip
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([row]), tmp_path / "b.parquet"
    )
    for path in (file(json.dumps([row], indent=1), "b.json"), file(json.dumps(row), "b.jsonl"),
                 tmp_path / "b.parquet"):  # fmt: skip
        (document,) = read(path)
        assert (document.id, document.text) == ("9", "Rash\nHad pain.")
        assert document.spans == (Span(9, 13, "ADE"),)
        write([document], tmp_path / f"again-{path.name}.jsonl", "bigbio")
        again = json.loads((tmp_path / f"again-{path.name}.jsonl").read_text())
        assert (again["relations"], again["entities"]) == ([relation], [entity])
        assert again["passages"] == passages
        write(
            [replace(document, text="Rash. Had pain.", spans=())],
            tmp_path / "n",
            "bigbio",
            allow_loss=True,
        )
        (passage,) = json.loads((tmp_path / "n").read_text())["passages"]
        assert passage["text"] == ["Rash. Had pain."]
        (tmp_path / "n").unlink()
    with pytest.raises(DataError, match="row 1: its fields are not those"):
        read(file('{"document_id": 1, "passages": [{"text": 3}]}', "c.json"), "bigbio")


def test_n2c2_2018_files_are_read_and_written_as_brat(
    file: File, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize("key", ["bigbio", "fhir", "omop"])
@pytest.mark.parametrize(
    "value", [1, {"resourceType": ["x"], "entities": [1]}, {"entities": 3}]
)
def test_foreign_metadata_does_not_break_a_writer(
    key: str, value: Any, tmp_path: Path
) -> None:
    try:
        write([replace(NOTE, meta={key: value})], tmp_path / "x", key, allow_loss=True)
    except DataError:
        assert not (tmp_path / "x").exists()
