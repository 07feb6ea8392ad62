"""Predictions for tables of notes: ids, formats, and bounded memory."""

from __future__ import annotations

import csv
import gc
import gzip
import io
import json
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from every_kind import WORDS, make

import fednotes as fn
from fednotes.core.errors import DataError
from fednotes.core.types import Document
from fednotes.jobs import mention_models, prediction_windows
from fednotes.jobs.inputs import open_inputs
from fednotes.jobs.predict import predict
from fednotes.jobs.prediction_files import write_brat, write_documents
from fednotes.jobs.saved_models import NoteSource, PredictionOutput
from fednotes.taggers.saving import save_model

TEXTS = (" ".join(WORDS * 2), 'A "quoted", text,\nof two lines', "Plain.")
IDS = ("17", "18", "19")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("served")
    save_model(make("tagger", place), place / "model")
    return place / "model"


def table(header: str, rows: list[list[Any]], delimiter: str = ",") -> bytes:
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, delimiter=delimiter, lineterminator="\r\n")
    writer.writerows([header.split(","), *rows])
    return buffer.getvalue().encode()


def rows_of(*columns: Callable[[int], Any]) -> list[list[Any]]:
    return [[column(i) for column in columns] for i in range(len(TEXTS))]


def _simple(delimiter: str = ",") -> bytes:
    about = rows_of(
        lambda i: IDS[i], lambda i: f"p{i}", lambda i: 40 + i, lambda i: TEXTS[i]
    )
    return table("note_id,patient_id,visit_id,text", about, delimiter)


def _mimic() -> bytes:
    rows = rows_of(
        lambda i: IDS[i], lambda i: f"p{i}", lambda i: 40 + i, lambda i: "Nursing",
        lambda i: "", lambda i: TEXTS[i],
    )  # fmt: skip
    return table("ROW_ID,SUBJECT_ID,HADM_ID,CATEGORY,ISERROR,TEXT", rows)


def _mimic_iv() -> bytes:
    rows = rows_of(
        lambda i: IDS[i], lambda i: f"p{i}", lambda i: 40 + i, lambda i: "DS", lambda i: i,
        lambda i: TEXTS[i],
    )  # fmt: skip
    return table("note_id,subject_id,hadm_id,note_type,note_seq,text", rows)


def _omop() -> bytes:
    rows = rows_of(
        lambda i: IDS[i], lambda i: f"p{i}", lambda i: TEXTS[i], lambda i: 40 + i
    )
    return table("note_id,person_id,note_text,visit_occurrence_id", rows)


def _records() -> list[dict[str, Any]]:
    rows = rows_of(
        lambda i: IDS[i], lambda i: f"p{i}", lambda i: 40 + i, lambda i: TEXTS[i]
    )
    return [
        dict(zip(("note_id", "subject_id", "hadm_id", "text"), r, strict=True))
        for r in rows
    ]


def _lines(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(each) + "\n" for each in records).encode()


def _resources() -> list[dict[str, Any]]:
    return [
        {
            "resourceType": "DocumentReference",
            "id": IDS[i],
            "subject": {"reference": f"Patient/p{i}"},
            "context": {"encounter": [{"reference": f"Encounter/{40 + i}"}]},
            "content": [
                {
                    "attachment": {
                        "contentType": "text/plain",
                        "data": b64encode(TEXTS[i].encode()).decode(),
                    }
                }
            ],
        }
        for i in range(len(TEXTS))
    ]


def _bundle() -> bytes:
    entries = [{"resource": resource} for resource in _resources()]
    return json.dumps({"resourceType": "Bundle", "entry": entries}, indent=1).encode()


def _parquet() -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(_records()), sink)
    return bytes(sink.getvalue())


TABLES = {
    "notes.csv": _simple,
    "notes.tsv": lambda: _simple("\t"),
    "NOTEEVENTS.csv": _mimic,
    "discharge.csv": _mimic_iv,
    "note.csv": _omop,
    "notes.jsonl": lambda: _lines(_records()),
    "other.jsonl": lambda: _lines(
        [{"note_text": r["text"], "id": r["note_id"], "patient": r["subject_id"],
          "encounter_id": r["hadm_id"]} for r in _records()]
    ),
    "notes.ndjson": lambda: _lines(_resources()),
    "bundle.json": _bundle,
    "notes.parquet": _parquet,
}  # fmt: skip


def zst(data: bytes) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    return pyarrow.compress(data, codec="zstd", asbytes=True)


PACKING = {"": lambda data: data, ".gz": gzip.compress, ".zst": zst}


@pytest.mark.parametrize("packed", PACKING)
@pytest.mark.parametrize("name", TABLES)
def test_the_notes_of_every_table_keep_their_ids(
    model: Path, tmp_path: Path, name: str, packed: str
) -> None:
    path = tmp_path / f"{name}{packed}"
    path.write_bytes(PACKING[packed](TABLES[name]()))
    out = tmp_path / "found.jsonl"
    predict(model, NoteSource(str(path)), PredictionOutput(out))
    predictions = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [
        (f["id"], f["patient"], str(f["visit"]), f["text"]) for f in predictions
    ] == [(IDS[i], f"p{i}", str(40 + i), text) for i, text in enumerate(TEXTS)]
    expected = fn.load(model)(list(TEXTS))
    labels = [
        [(s.start, s.end, s.label) for s in document.spans] for document in expected
    ]
    assert [
        [(s["start"], s["end"], s["label"]) for s in f["spans"]] for f in predictions
    ] == labels

    opened = fn.load(model)
    assert isinstance(opened, fn.MentionModel)
    again = list(opened.predict_file(path))
    assert [document.id for document in again] == [*IDS]
    assert [document.spans for document in again] == [
        document.spans for document in expected
    ]
    assert [document.text for document in fn.read(path)] == [*TEXTS]


def test_a_stream_holds_one_batch_of_notes(model: Path) -> None:
    """A generator counts the notes that were read and have no prediction yet."""
    notes_read = predicted = most_waiting = 0

    def notes() -> Iterator[Document]:
        nonlocal notes_read, most_waiting
        for number in range(40):
            notes_read += 1
            most_waiting = max(most_waiting, notes_read - predicted)
            yield Document(str(number), TEXTS[number % 3])

    opened = fn.load(model)
    assert isinstance(opened, fn.MentionModel)
    for _ in opened.stream(notes(), batch=4):
        predicted += 1
    assert (notes_read, predicted) == (40, 40)
    assert most_waiting == 4


def test_a_file_is_read_in_batches(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most `FILE_BATCH` notes are given to the model in one call."""
    monkeypatch.setattr(mention_models, "FILE_BATCH", 4)
    path = tmp_path / "notes.jsonl"
    lines = [json.dumps({"id": str(n), "text": "pain"}) + "\n" for n in range(10)]
    path.write_text("".join(lines))
    opened = fn.load(model)
    assert isinstance(opened, fn.MentionModel)
    find = opened.model.predict
    batches = []

    def count(documents: Sequence[Document], **options: bool) -> tuple[Document, ...]:
        batches.append(len(documents))
        return find(documents, **options)

    monkeypatch.setattr(opened.model, "predict", count)
    assert len(list(opened.predict_file(path))) == 10
    assert batches == [4, 4, 2]


def test_long_notes_are_read_in_small_batches(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction_windows, "MAX_CHARACTERS", 100)
    opened = fn.load(model)
    assert isinstance(opened, fn.MentionModel)
    notes_read = 0

    def notes() -> Iterator[Document]:
        nonlocal notes_read
        for number in range(5):
            notes_read += 1
            yield Document(str(number), "word " * 30)

    next(opened.stream(notes()))
    assert notes_read == 1


@pytest.mark.parametrize("name", ["notes.csv", "notes.jsonl"])
def test_a_table_is_read_note_by_note_up_to_the_first_wrong_one(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    good = _simple() if name == "notes.csv" else _lines(_records())
    path.write_bytes(good + b"{\n" if name == "notes.jsonl" else good + b"1,2\n")
    inputs = iter(open_inputs(str(path)))
    assert next(inputs).id == "17"
    with pytest.raises(DataError, match=r"notes\.\w+:\d+: "):
        list(inputs)
    usable = open_inputs(str(path), on_error="skip")
    assert [document.id for document in usable] == [*IDS]
    assert usable.problems.number == 1


def test_a_file_of_predictions_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "found.jsonl"
    out.write_text("before")

    def documents() -> Iterator[Document]:
        yield Document("a", "text")
        assert out.read_text() == "before"
        raise DataError("the table is broken off")

    with pytest.raises(DataError, match="broken off"):
        write_documents(documents(), out, "jsonl")
    with pytest.raises(DataError, match="broken off"):
        write_brat(documents(), tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["found.jsonl"]
    assert out.read_text() == "before"


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("format", ["parquet", "omop-parquet"])
def test_a_parquet_file_that_fails_leaves_no_second_error(
    format: str, tmp_path: Path
) -> None:
    def documents() -> Iterator[Document]:
        yield Document("1", "text")
        raise DataError("the table is broken off")

    with pytest.raises(DataError, match="broken off"):
        write_documents(documents(), tmp_path / "found.parquet", format)
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_table_is_refused_before_anything_is_predicted(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "notes.csv"
    path.write_bytes(_simple() + b"1,2\r\n3\r\n")
    with pytest.raises(
        DataError, match=r"notes.csv:6: the row has 2 columns.*and 1 more"
    ):
        predict(model, NoteSource(str(path)))
    assert capsys.readouterr().out == ""
    predict(model, NoteSource(str(path), on_error="skip"))
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == len(TEXTS)
    assert "left out of" in printed.err
    assert "2 notes" in printed.err


def test_predictions_for_a_table_are_written_as_brat_and_conll(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "notes.csv"
    path.write_bytes(
        table("id,text", [["x", TEXTS[0]], ["x", TEXTS[2]], ["x~2", "Third."]])
    )
    predict(model, NoteSource(str(path)), PredictionOutput(tmp_path / "out", to="brat"))
    texts = {p.stem: p.read_text() for p in (tmp_path / "out").glob("*.txt")}
    assert texts == {"x": TEXTS[0], "x~2": TEXTS[2], "x~2~2": "Third."}
    predict(model, NoteSource(str(path)), PredictionOutput(to="conll"))
    printed = capsys.readouterr().out
    assert printed.count("# newdoc id = x\n") == 2
    tokens = [line.split("\t")[0] for line in printed.splitlines() if "\t" in line]
    assert tokens[-2:] == ["Third", "."]


@pytest.mark.parametrize("name", ["notes.md", "notes", "notes.csv.bak", "notes.html"])
def test_a_file_of_an_unknown_format_is_refused(
    model: Path, tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    path.write_text("He took aspirin.")
    message = r"cannot recognise the format: name text files \*.txt, or give the format: one of"
    with pytest.raises(DataError, match=message) as caught:
        predict(model, NoteSource(str(path)), PredictionOutput(tmp_path / "out"))
    assert all(
        name in str(caught.value) for name in ("mimic", "omop", "parquet", "brat")
    )
    predict(
        model, NoteSource(str(path), format="text"), PredictionOutput(tmp_path / "out")
    )
    assert json.loads((tmp_path / "out").read_text())["text"] == "He took aspirin."


def test_an_unnamed_column_is_refused_and_can_be_named(
    model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "notes.csv"
    path.write_bytes(table("id,body", [["1", TEXTS[0]]]))
    with pytest.raises(
        DataError,
        match="no column of this table is recognised as the text of notes: set `column`",
    ):
        predict(model, NoteSource(str(path)), PredictionOutput(tmp_path / "out"))
    predict(
        model, NoteSource(str(path), column="body"), PredictionOutput(tmp_path / "out")
    )
    assert json.loads((tmp_path / "out").read_text())["text"] == TEXTS[0]


@pytest.mark.parametrize("packed", [".gz", ".zst"])
def test_a_truncated_compressed_table_is_refused(
    model: Path, tmp_path: Path, packed: str
) -> None:
    path = tmp_path / f"notes.csv{packed}"
    path.write_bytes(PACKING[packed](_simple())[:-12])
    with pytest.raises(
        DataError,
        match=r"cannot be read to its end .*: check that the file is complete",
    ):
        predict(model, NoteSource(str(path)), PredictionOutput(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("packed", PACKING)
def test_an_endless_line_is_refused_before_it_fills_memory(
    tmp_path: Path, packed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fednotes.core.bounds.LINE", 1000)
    for name, begin in (("n.csv", "id,text\n1,"), ("n.jsonl", '{"text": "')):
        path = tmp_path / f"{name}{packed}"
        path.write_bytes(PACKING[packed](begin.encode() + b"a" * 5000))
        with pytest.raises(DataError, match="the line has more than 1,000 characters"):
            list(open_inputs(str(path)))
    path = tmp_path / f"m.csv{packed}"
    path.write_bytes(PACKING[packed](b'id,text\n1,"' + b"a\n" * 5000))
    with pytest.raises(
        DataError,
        match=r":2: the row has more than 1,000 characters: check whether a closing quote",
    ):
        list(open_inputs(str(path)))


@pytest.mark.slow
def test_models_of_mentions_load_no_module_of_an_application(model: Path) -> None:
    code = (
        "import sys; from fednotes.cli.app import main\n"
        f"sys.argv = ['fednotes', 'predict', {str(model)!r}, '--text', 'He took aspirin.']\n"
        "main()\n"
        "import fednotes as fn; list(fn.load(sys.argv[2]).stream(['a']))\n"
        "print(sorted(m for m in sys.modules if m.startswith('fednotes.apps.')))"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert completed.stdout.splitlines()[-1] == "[]"
