"""MedCATtrainer's export: which annotations count, their types, and files to import.

The form is the one that its function `retrieve_project_data` writes, and
`upload_projects_export` reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fednotes.cli.app import app
from fednotes.core.errors import DataError
from fednotes.core.types import Document, Span
from fednotes.data.formats import (
    LossyError,
    convert,
    examine,
    guess_format,
    read,
    write,
)

File = Callable[..., Path]
TEXT = "Had 😀 rash after aspirin."
JUDGEMENTS = (
    *("validated", "correct", "deleted", "alternative"),
    *("killed", "irrelevant", "manually_created"),
)


def annotation(form: str, cui: str, *judgements: str, **more: Any) -> dict[str, Any]:
    """Return an annotation with the judgements that are true."""
    start = TEXT.index(form)
    return {
        "id": 7,
        "user": "anna",
        "cui": cui,
        "value": form,
        "start": start,
        "end": start + len(form),
        **{name: name in judgements for name in JUDGEMENTS},
        "create_time": "2025-01-31 10:00:00.000001",
        "last_modified": "2025-01-31 10:00:00.000001",
        "comment": None,
        "acc": 0.5,
        "meta_anns": {},
        **more,
    }


def export(*annotations: dict[str, Any], **more: Any) -> str:
    """Return an export of one project with one document."""
    document = {
        "id": 33,
        "name": "letter 1",
        "text": TEXT,
        "last_modified": "2025-01-31 10:00:00.000001",
        "annotations": list(annotations),
        "relations": [],
        **more,
    }
    project = {
        "name": "Ward 7",
        "id": 1,
        "cuis": "",
        "project_status": "C",
        "project_locked": False,
        "documents": [document],
    }
    return json.dumps({"projects": [project]})


def forms(document: Document) -> list[tuple[str, str]]:
    """Return the text and label of each mention."""
    return [(document.text[s.start : s.end], s.label) for s in document.spans]


def test_confirmed_annotations_are_the_mentions(file: File, tmp_path: Path) -> None:
    path = file(
        export(
            annotation("rash", "C1", "validated", "correct"),
            annotation("aspirin", "C2", "validated", "alternative"),
            annotation("Had", "C3", "validated", "deleted"),
            annotation("after", "C4", "validated", "killed"),
            annotation("after", "C5", "validated", "irrelevant"),
            annotation("after", "C6"),
            annotation("after", "C7", "correct", "killed"),
            relations=[{"relation": "caused by"}],
        ),
        "export.json",
    )
    assert guess_format(path) == "medcattrainer"
    (document,), problems = examine(path)
    assert document.id == "letter 1"
    assert forms(document) == [("rash", "C1"), ("aspirin", "C2")]
    assert problems.ignored == {
        "unconfirmed annotations": 5,
        "relations": 1,
    }
    with pytest.raises(LossyError, match="unconfirmed annotations: 5"):
        convert(path, tmp_path / "a.jsonl", "jsonl")


def test_annotations_without_judgements_count_as_confirmed(file: File) -> None:
    """Files for MedCAT's training may have no more than these fields."""
    kept = {"start": 6, "end": 10, "cui": "C1", "value": "rash"}
    killed = {"start": 0, "end": 3, "cui": "C2", "value": "Had", "killed": True}
    documents, _ = examine(file(export(kept, killed), "export.json"))
    assert forms(documents[0]) == [("rash", "C1")]


@pytest.mark.parametrize("where", ["beside", "absolute", "working folder"])
def test_entity_types_are_mapped_by_a_table(
    where: str, file: File, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file(
        export(
            annotation("rash", "C1", "correct"),
            annotation("aspirin", "C2", "correct"),
            annotation("after", "C3", "correct"),
        ),
        "corpus/export.json",
    )
    folder = path.parent if where == "beside" else tmp_path
    table = folder / "types.csv"
    table.write_text('name,CUI,Type\n"a, b",C1,Symptom\n,C2, Drug\n')
    monkeypatch.chdir(tmp_path)
    choice = str(table) if where == "absolute" else "types.csv"
    for source in (path, path.parent):
        (document,), problems = examine(source, f"medcattrainer:{choice}")
        assert forms(document) == [("rash", "Symptom"), ("aspirin", "Drug")]
        ignored = +problems.ignored
        assert ignored == {"annotations of concepts that are not in the table": 1}
    write([document], tmp_path / "again.json", "medcattrainer", allow_loss=True)
    assert forms(read(tmp_path / "again.json")[0]) == [
        ("rash", "C1"),
        ("aspirin", "C2"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "types.csv:1: expected the columns cui and type"),
        ("cui\nC1\n", "types.csv:1: expected the columns cui and type"),
        ("cui,type\nC1,\n", "types.csv:2: a concept or a type is missing"),
        ("cui,type\nC1\n", "types.csv:2: a concept or a type is missing"),
        (None, "types.csv: no such file"),
    ],
)
def test_a_wrong_table_of_types_is_refused(
    content: str | None, message: str, file: File
) -> None:
    path = file(export(annotation("rash", "C1", "correct")), "export.json")
    if content is not None:
        (path.parent / "types.csv").write_text(content)
    with pytest.raises(DataError, match=message):
        read(path, "medcattrainer:types.csv")


def test_meta_annotations_survive_a_round_trip(file: File, tmp_path: Path) -> None:
    meta = {"Time": {"name": "Time", "value": "Past", "acc": 1, "validated": True}}
    first = annotation("rash", "C1", "correct", meta_anns=meta)
    path = file(export(first, annotation("aspirin", "C2", "correct")), "export.json")
    (document,) = read(path)
    assert not write([document], tmp_path / "again.json", "medcattrainer")
    (project,) = json.loads((tmp_path / "again.json").read_text())["projects"]
    assert project["name"] == "Ward 7"
    (written,) = project["documents"]
    assert [row["meta_anns"] for row in written["annotations"]] == [meta, {}]
    with pytest.raises(LossyError, match="meta medcattrainer: 1"):
        convert(path, tmp_path / "notes", "brat")


def test_written_files_have_every_field_that_an_import_reads(tmp_path: Path) -> None:
    document = Document(
        "n1", TEXT, (Span(6, 10, "C1"), Span(17, 24, "C2")), patient="7"
    )
    assert not write([document], tmp_path / "a.json", "medcattrainer")
    (project,) = json.loads((tmp_path / "a.json").read_text())["projects"]
    assert (project["name"], project["cuis"]) == ("fednotes", "C1,C2")
    (written,) = project["documents"]
    assert (written["name"], written["text"]) == ("n1", TEXT)
    needed = {"user", "cui", "value", "start", "end", "acc", "meta_anns", *JUDGEMENTS}
    for row, span in zip(written["annotations"], document.spans, strict=True):
        assert needed <= row.keys()
        assert (row["start"], row["end"], row["cui"]) == (
            span.start,
            span.end,
            span.label,
        )
        assert row["value"] == TEXT[span.start : span.end]
        assert row["correct"]
        assert row["user"] == "admin"
        assert not any(row[name] for name in ("deleted", "killed", "alternative"))
    assert read(tmp_path / "a.json") == (document,)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"projects": 1}', '"projects" is not a list'),
        (
            export(text=None),
            "document 1: it has no text: export the projects with text",
        ),
        (
            export(annotation("rash", "C1", "correct", value="Zyxwolan")),
            "document 1: the text of the mention differs from the document at 6:10",
        ),
        (
            export(annotation("rash", "C1", "correct", end=900)),
            "document 1: 6:900 is not a span of the text",
        ),
        (
            export(annotation("rash", "", "correct")),
            "document 1: a mention has no type",
        ),
        (export(annotations={"a": 1}), "document 1: its fields are not those of the"),
        ('{"projects": [{"documents": [1]}]}', "document 1: it has no text"),
    ],
)
def test_a_malformed_export_is_refused(content: str, message: str, file: File) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read(file(content, "export.json"))
    assert "Zyxwolan" not in str(caught.value)


@pytest.mark.parametrize("meta", [1, {"annotations": [1]}, {"annotations": 3}])
def test_foreign_metadata_is_dropped(meta: Any, tmp_path: Path) -> None:
    document = Document("a", TEXT, (Span(6, 10, "C1"),), meta={"medcattrainer": meta})
    lost = write([document], tmp_path / "a.json", "medcattrainer", allow_loss=True)
    assert set(lost) <= {"meta medcattrainer"}
    assert read(tmp_path / "a.json")[0].spans == document.spans


def test_commands_read_and_write_the_format(file: File, tmp_path: Path) -> None:
    path = file(export(annotation("rash", "C1", "correct")), "export.json")
    (path.parent / "types.csv").write_text("cui,type\nC1,ADE\n")
    options = ["--format", "medcattrainer:types.csv"]
    checked = CliRunner().invoke(app, ["check", str(path), *options])
    assert checked.exit_code == 0, checked.output
    assert "😀" not in checked.output
