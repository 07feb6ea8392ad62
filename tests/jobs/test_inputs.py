"""How the input of a prediction is opened and read."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from corpus_files import write_damaged_brat

import fednotes as fn
from fednotes.core.errors import ConfigError, DataError, ParameterError
from fednotes.core.types import Document
from fednotes.jobs.inputs import find_source, open_inputs

RECORD = {"id": "7", "text": "Took aspirin."}


def write_json_lines(path: Path, *records: dict[str, str]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def texts_of(name: Path, **options: str) -> list[str]:
    return [document.text for document in open_inputs(str(name), **options)]


# ---- how a path is read --------------------------------------------------------------


def test_json_lines_with_a_key_text_keep_their_mentions(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "Took aspirin.", "spans": [[5, 12, "Drug"]]}\n')
    inputs = open_inputs(str(path))
    (document,) = inputs
    assert [span.label for span in document.spans] == ["Drug"]
    assert not inputs.holds_all_documents


def test_json_lines_with_another_key_are_a_table_of_notes(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "a.jsonl", {"id": "7", "note": "Took aspirin."})
    assert texts_of(path, column="note") == ["Took aspirin."]


def test_read_takes_ids_from_the_column_or_key_that_the_user_names(
    tmp_path: Path,
) -> None:
    table = tmp_path / "notes.csv"
    table.write_text("key,text\nA1,Took aspirin.\n", encoding="utf-8")
    records = tmp_path / "notes.jsonl"
    records.write_text('{"key": "A1", "text": "Took aspirin."}\n', encoding="utf-8")
    for path in (table, records):
        (note,) = fn.read(path, id_column="key")
        assert note.id == "A1"


def test_a_table_is_read_note_by_note_with_ids_and_metadata(tmp_path: Path) -> None:
    path = tmp_path / "notes.csv"
    path.write_text("note_id,patient_id,visit_id,category,text\n7,p,v,Nursing,Fine.\n")
    inputs = open_inputs(str(path))
    meta = {"visit": "v", "category": "Nursing"}
    assert [*inputs] == [Document("7", "Fine.", (), "p", meta=meta)]
    assert not inputs.holds_all_documents


def test_a_folder_of_texts_is_read_as_notes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"Note {name}.")
    assert texts_of(tmp_path) == ["Note a.", "Note b."]


def test_a_licence_beside_a_table_is_not_read_as_a_note(tmp_path: Path) -> None:
    (tmp_path / "LICENSE").write_text("All rights reserved.")
    (tmp_path / "notes.csv").write_text("id,text\n7,Fine.\n")
    assert texts_of(tmp_path) == ["Fine."]


def test_texts_of_a_corpus_without_annotations_are_read_as_notes(
    tmp_path: Path,
) -> None:
    folder = write_damaged_brat(tmp_path / "notes")
    inputs = open_inputs(str(folder), on_error="skip")
    assert inputs.holds_all_documents
    assert inputs.where == str(folder)
    first = [*inputs]
    assert first[-1].id == "unread"
    assert [*inputs] == first
    assert inputs.problems.number == 6


def test_an_unknown_format_gets_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown format 'brt': did you mean 'brat'"):
        open_inputs(str(tmp_path), format="brt")


# ---- problems ------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Return a file whose second and third lines cannot be used."""
    path = write_json_lines(tmp_path / "a.jsonl", RECORD)
    path.write_text(path.read_text() + "{\n{\n")
    return path


def test_a_source_is_refused_before_its_first_note_with_all_problems(
    damaged: Path,
) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:2: .*\(and 1 more\)") as caught:
        open_inputs(str(damaged)).require_readable()
    assert [problem.line for problem in caught.value.problems] == [2, 3]


def test_a_skipping_source_leaves_out_damaged_notes(damaged: Path) -> None:
    inputs = open_inputs(str(damaged), on_error="skip")
    inputs.require_readable()
    assert [document.id for document in inputs.read_all()] == ["7"]
    assert inputs.problems.number == 2


def test_a_source_without_usable_notes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{\n")
    inputs = open_inputs(str(path), on_error="skip")
    with pytest.raises(DataError, match=r"a\.jsonl:1"):
        list(inputs)
    with pytest.raises(DataError, match=r"a\.jsonl:1"):
        inputs.read_all()


# ---- texts and stdin -----------------------------------------------------------------


def test_a_text_is_read_as_one_document() -> None:
    inputs = open_inputs("-", "Took aspirin.")
    assert [*inputs] == [*inputs] == [Document("text", "Took aspirin.")]
    assert inputs.holds_all_documents


def test_stdin_is_read_as_one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = SimpleNamespace(buffer=io.BytesIO("Zoë took aspirin.".encode("cp1252")))
    monkeypatch.setattr("sys.stdin", stdin)
    source = find_source("-", None, "cp1252")
    assert source == Document("stdin", "Zoë took aspirin.")


def test_stdin_longer_than_a_note_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fednotes.jobs.inputs._MAX_BYTES", 10)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"a" * 11)))
    with pytest.raises(DataError, match="too large for a single note: give a file"):
        find_source("-", None)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("notes.csv", "Fine.", "give a path or `text`, not both"),
        ("-", " \n", "`text` is empty"),
        ("no/such", None, "no/such: no such file or folder"),
        (" ", None, "no such file or folder"),
        ("a" * 5000, None, "^a{100}…: no such file or folder"),
        ("a\0b", None, "no such file or folder"),
    ],
)
def test_a_source_that_does_not_exist_is_refused(
    name: str, text: str | None, message: str
) -> None:
    with pytest.raises(ParameterError, match=message):
        find_source(name, text)
