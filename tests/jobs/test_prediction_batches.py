"""Predictions in batches: what a killed process leaves and how it resumes."""

from __future__ import annotations

import csv
import json
import random
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from killed_predictions import (
    NOTES,
    SETTINGS,
    SIZE,
    find_first_words,
    kill_at,
    make_notes,
    run_once,
)
from postgres import Postgres

from fednotes.core.errors import BusyError, DataError, FednotesError, ParameterError
from fednotes.core.types import Document, Span
from fednotes.data.formats import read
from fednotes.jobs.prediction_batches import MANIFEST, opening_folder

FORMATS = ["jsonl", "csv", "conll", "omop", "parquet", "omop-parquet"]
# NOTE_NLP of OMOP's common data model 5.4, with the types of its columns.
# https://ohdsi.github.io/CommonDataModel/cdm54.html#note_nlp
NOTE_NLP = {
    "note_nlp_id": "integer",
    "note_id": "integer",
    "section_concept_id": "integer",
    "snippet": "varchar(250)",
    "offset": "varchar(50)",
    "lexical_variant": "varchar(250)",
    "note_nlp_concept_id": "integer",
    "note_nlp_source_concept_id": "integer",
    "nlp_system": "varchar(250)",
    "nlp_date": "date",
    "nlp_datetime": "datetime",
    "term_exists": "varchar(1)",
    "term_temporal": "varchar(50)",
    "term_modifiers": "varchar(2000)",
}


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of each file of a folder of shards."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def rows(folder: Path) -> list[tuple[Any, ...]]:
    """The rows of NOTE_NLP and the record of progress in a SQLite file."""
    with closing(sqlite3.connect(folder / "out.db")) as connection:
        nlp = connection.execute("SELECT * FROM note_nlp ORDER BY 1").fetchall()
        return [*nlp, *connection.execute("SELECT * FROM fednotes_progress")]


def resume_after_kills(folder: Path, sink: str, format: str, seed: int) -> None:
    """Kill and resume predictions at random steps, and then let them end.

    Of the seeds, those from 3 on are of slow tests, and kill until the input ends.
    """
    rng = random.Random(seed)
    folder.mkdir()
    num_kills = 2 if seed < 3 else 20
    for _ in range(num_kills):
        if kill_at(folder, sink, format, rng.randint(1, 45)):
            return
    run_once(folder, sink, format)


# ---- kills ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "seed"),
    [
        ("jsonl", 2),
        *(
            pytest.param(format, seed, marks=pytest.mark.slow)
            for format in FORMATS
            for seed in range(3, 6)
        ),
    ],
)
def test_shards_of_a_killed_and_resumed_process_equal_those_of_an_undisturbed_one(
    tmp_path: Path, format: str, seed: int
) -> None:
    if "parquet" in format:
        pytest.importorskip("pyarrow")
    (tmp_path / "undisturbed").mkdir()
    run_once(tmp_path / "undisturbed", "folder", format, resume=False)
    resume_after_kills(tmp_path / "killed", "folder", format, seed)
    expected = contents(tmp_path / "undisturbed" / "out")
    assert contents(tmp_path / "killed" / "out") == expected
    assert len(expected) == -(-NOTES // SIZE) + 1


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 8))]
)
def test_rows_of_a_killed_and_resumed_process_equal_those_of_an_undisturbed_one(
    tmp_path: Path, seed: int
) -> None:
    pytest.importorskip("sqlalchemy")
    (tmp_path / "undisturbed").mkdir()
    run_once(tmp_path / "undisturbed", "sqlite", resume=False)
    resume_after_kills(tmp_path / "killed", "sqlite", "omop", seed)
    expected = rows(tmp_path / "undisturbed")
    assert rows(tmp_path / "killed") == expected
    assert [row[1] for row in expected[:-1]] == list(range(1, NOTES + 1))


@pytest.mark.slow
def test_a_kill_at_any_step_of_the_first_batches_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "undisturbed").mkdir()
    run_once(tmp_path / "undisturbed", "folder", resume=False)
    expected = contents(tmp_path / "undisturbed" / "out")
    for step in range(1, 30):
        folder = tmp_path / str(step)
        folder.mkdir()
        assert not kill_at(folder, "folder", "jsonl", step)
        run_once(folder, "folder")
        assert contents(folder / "out") == expected, step


def test_a_failed_start_without_predictions_leaves_no_trace(tmp_path: Path) -> None:
    def fail(documents: Iterable[Document]) -> Iterator[Document]:
        raise DataError("out of memory")
        yield from documents

    with pytest.raises(DataError, match="out of memory"):
        run_once(tmp_path, "folder", resume=False, predict=fail)
    run_once(tmp_path, "folder", "omop", resume=False)
    assert len(contents(tmp_path / "out")) == -(-NOTES // SIZE) + 1


@pytest.mark.slow
def test_rows_in_postgresql_are_written_once_whenever_the_process_is_killed(
    postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    psycopg = pytest.importorskip("psycopg")
    monkeypatch.setenv("KILLED_DB", postgres.url())
    resume_after_kills(tmp_path / "killed", "env:KILLED_DB", "omop", seed=3)
    with psycopg.connect(postgres.url().replace("+psycopg", "")) as connection:
        query = "SELECT note_nlp_id, note_id FROM note_nlp ORDER BY note_nlp_id"
        rows = connection.execute(query).fetchall()
    assert rows == [(n, n) for n in range(1, NOTES + 1)]


# ---- what resuming refuses -----------------------------------------------------------


def test_resuming_with_other_settings_is_refused_by_name(tmp_path: Path) -> None:
    run_once(tmp_path, "folder", resume=False)
    changed = {**SETTINGS, "model": "other", "threshold": "0.5"}
    with (
        pytest.raises(ParameterError, match=r"another model; threshold 0\.0, now 0\.5"),
        opening_folder(
            tmp_path / "out", changed, format="jsonl", size=SIZE, resume=True
        ),
    ):
        pass
    with pytest.raises(ParameterError, match="set `resume` to continue"):
        run_once(tmp_path, "folder", resume=False)


def test_resuming_with_other_notes_is_refused(tmp_path: Path) -> None:
    run_once(tmp_path, "folder", resume=False, notes=make_notes(12))
    notes = list(make_notes())
    for changed in (
        notes[1:],
        [*notes[:3], replace(notes[3], text="word4 changed."), *notes[4:]],
        notes[:11],
    ):
        with pytest.raises(DataError, match="first 12 notes of the input are not"):
            run_once(tmp_path, "folder", notes=changed)
    run_once(tmp_path, "folder")  # further notes are predicted
    ids = [
        json.loads(line)["id"]
        for path in sorted((tmp_path / "out").glob("*.jsonl"))
        for line in path.read_text("utf-8").splitlines()
    ]
    assert ids == [str(n) for n in range(1, NOTES + 1)]


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    run_once(tmp_path, "folder", resume=False)
    shard = tmp_path / "out" / "part-00001.jsonl"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(DataError, match="missing or changed since"):
        run_once(tmp_path, "folder")
    shard.write_bytes(content)
    (tmp_path / "out" / MANIFEST).write_text("{", "utf-8")
    with pytest.raises(DataError, match="cannot be read as a manifest"):
        run_once(tmp_path, "folder")
    other = tmp_path / "other" / "out"
    other.mkdir(parents=True)
    (other / "notes.csv").write_text("text\n", "utf-8")
    with pytest.raises(ParameterError, match="is not empty"):
        run_once(tmp_path / "other", "folder")


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([], "do not contain the number of notes"),
        (
            [{"file": "../elsewhere", "notes": NOTES, "bytes": 4}],
            "lists a file that predictions do not have",
        ),
        (
            [{"file": "x" * 5000, "notes": NOTES, "bytes": 4}],
            "lists a file that predictions do not have",
        ),
    ],
)
def test_a_manifest_with_other_files_than_predictions_is_refused(
    shards: list[Any], message: str, tmp_path: Path
) -> None:
    run_once(tmp_path, "folder", resume=False)
    (tmp_path / "elsewhere").write_text("text", "utf-8")
    manifest = tmp_path / "out" / MANIFEST
    content = json.loads(manifest.read_text("utf-8"))
    manifest.write_text(json.dumps(content | {"shards": shards}), "utf-8")
    with pytest.raises(DataError, match=message):
        run_once(tmp_path, "folder")


@pytest.mark.parametrize(
    "changes",
    [
        {"notes": -1},
        {"notes": 10**30},
        {"notes": "many"},
        {"mentions": None},
        {"started": "yesterday"},
        {"settings": ["m"]},
    ],
)
def test_invalid_values_of_a_record_are_refused(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    run_once(tmp_path, "folder", resume=False)
    manifest = tmp_path / "out" / MANIFEST
    content = json.loads(manifest.read_text("utf-8"))
    content["progress"] |= changes
    manifest.write_text(json.dumps(content), "utf-8")
    with pytest.raises(DataError, match="cannot be read as a manifest"):
        run_once(tmp_path, "folder")

    run_once(tmp_path, "sqlite", resume=False)
    _change_record(tmp_path, json.dumps(content["progress"]))
    with pytest.raises(DataError, match="cannot be read as a record of predictions"):
        run_once(tmp_path, "sqlite")


@pytest.mark.parametrize("record", ["", "{", "[1]", "[" * 100_000, b"\xff", 7])
def test_a_damaged_record_of_a_database_is_refused(
    record: object, tmp_path: Path
) -> None:
    run_once(tmp_path, "sqlite", resume=False)
    _change_record(tmp_path, record)
    with pytest.raises(DataError, match="begin again with another `out_table`"):
        run_once(tmp_path, "sqlite")


def _change_record(folder: Path, record: object) -> None:
    """Replace the record of progress in a SQLite file."""
    with closing(sqlite3.connect(folder / "out.db")) as connection, connection:
        connection.execute("UPDATE fednotes_progress SET record = ?", (record,))


@pytest.mark.parametrize("label", ["Word\tO", "Word\n\nadded\tB-Word", "Word\rO"])
def test_a_type_of_a_model_adds_no_tokens_to_conll(label: str, tmp_path: Path) -> None:
    def predict(documents: Iterable[Document]) -> Iterator[Document]:
        for document in documents:
            yield replace(document, spans=(Span(0, 4, label),))

    with pytest.raises(DataError, match="separate columns and lines in CoNLL"):
        run_once(tmp_path, "folder", "conll", predict=predict)


@pytest.mark.parametrize("largest", ["'last'", "9223372036854775807"])
def test_a_table_without_a_free_id_is_refused(largest: str, tmp_path: Path) -> None:
    columns = ", ".join(NOTE_NLP)
    with closing(sqlite3.connect(tmp_path / "out.db")) as connection, connection:
        connection.execute(f"CREATE TABLE note_nlp ({columns})")
        connection.execute(f"INSERT INTO note_nlp (note_nlp_id) VALUES ({largest})")
    with pytest.raises(DataError, match="no id is free"):
        run_once(tmp_path, "sqlite", resume=False)


def test_a_folder_in_place_of_a_file_of_predictions_is_refused(tmp_path: Path) -> None:
    run_once(tmp_path, "folder", resume=False)
    (tmp_path / "out" / "part-x").mkdir()
    with pytest.raises(FednotesError, match=r"part-x: cannot be removed \(Is a direct"):
        run_once(tmp_path, "folder")


def test_two_processes_do_not_write_into_the_same_folder(tmp_path: Path) -> None:
    with (
        opening_folder(
            tmp_path / "out", SETTINGS, format="jsonl", size=SIZE, resume=True
        ),
        pytest.raises(BusyError),
    ):
        run_once(tmp_path, "folder")


@pytest.mark.parametrize("num_first", [0, 2 * SIZE])
def test_two_commands_do_not_write_the_same_notes_into_a_table(
    num_first: int, tmp_path: Path
) -> None:
    """Another command resumes and ends while the first one is in its next batch."""
    pytest.importorskip("sqlalchemy")

    def predict(documents: Iterable[Document]) -> Iterator[Document]:
        for number, document in enumerate(find_first_words(documents)):
            if number == num_first:
                run_once(tmp_path, "sqlite", resume=True)
            yield document

    with pytest.raises(DataError, match=r"another command|end other programs"):
        run_once(tmp_path, "sqlite", resume=False, predict=predict)
    note_ids = [row[1] for row in rows(tmp_path)[:-1]]
    assert note_ids == list(range(1, NOTES + 1))


def test_complete_predictions_of_a_table_are_not_repeated(tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy")
    run_once(tmp_path, "sqlite", resume=False)
    before = rows(tmp_path)
    with pytest.raises(ParameterError, match="has complete predictions"):
        run_once(tmp_path, "sqlite", resume=False)
    run_once(tmp_path, "sqlite")
    assert rows(tmp_path) == before


def test_rows_of_other_systems_keep_their_ids_in_note_nlp(tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy")
    columns = ", ".join(f'"{name}" {type_}' for name, type_ in NOTE_NLP.items())
    with closing(sqlite3.connect(tmp_path / "out.db")) as connection, connection:
        connection.execute(f"CREATE TABLE note_nlp ({columns})")
        connection.execute(
            "INSERT INTO note_nlp (note_nlp_id, note_id, lexical_variant, nlp_date) "
            "VALUES (40, 1, 'x', '2020-01-01')"
        )
    run_once(tmp_path, "sqlite", resume=False)
    assert [row[0] for row in rows(tmp_path)[:-1]] == [40, *range(41, 41 + NOTES)]


# ---- what files hold -----------------------------------------------------------------


def test_files_of_note_nlp_have_the_columns_of_the_common_data_model(
    tmp_path: Path,
) -> None:
    run_once(tmp_path, "folder", "omop", resume=False)
    found: list[dict[str, str]] = []
    for path in sorted((tmp_path / "out").glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            assert table.fieldnames == list(NOTE_NLP)
            found += table
    assert [row["note_nlp_id"] for row in found] == [str(n + 1) for n in range(NOTES)]
    assert [row["note_id"] for row in found] == [str(n + 1) for n in range(NOTES)]
    assert found[2]["lexical_variant"] == "word3"
    assert found[2]["offset"] == "0"
    assert found[2]["term_modifiers"] == "label=Word,pieces=0-5,confidence=0.500000"


def test_parquet_of_note_nlp_has_numbers_and_dates(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    run_once(tmp_path, "folder", "omop-parquet", resume=False)
    table = parquet.read_table(tmp_path / "out" / "part-00004.parquet")
    types = {field.name: str(field.type) for field in table.schema}
    expected = {"integer": "int64", "date": "date32[day]", "datetime": "timestamp[us]"}
    assert types == {
        name: expected.get(type_, "string") for name, type_ in NOTE_NLP.items()
    }
    assert table.column("note_id").to_pylist() == [21, 22, 23]
    assert table.column("note_nlp_id").to_pylist() == [21, 22, 23]


def test_written_parquet_is_read_by_pyarrow_and_by_fednotes(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    run_once(tmp_path, "folder", "parquet", resume=False)
    paths = sorted((tmp_path / "out").glob("*.parquet"))
    schemas = {str(parquet.read_schema(path)) for path in paths}
    assert len(schemas) == 1
    tables = [parquet.read_table(path) for path in paths]
    ids = [id for table in tables for id in table.column("id").to_pylist()]
    assert ids == [str(n) for n in range(1, NOTES + 1)]
    expected = list(find_first_words(make_notes(SIZE)))
    assert list(read(paths[0])) == expected


def test_a_note_without_a_number_is_refused_for_note_nlp(tmp_path: Path) -> None:
    notes = [Document("letter/1", "word one")]
    with pytest.raises(DataError, match="NOTE_NLP refers to notes by numbers"):
        run_once(tmp_path, "folder", "omop", resume=False, notes=notes)


# ---- memory --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("sink", ["folder", "sqlite"])
def test_memory_does_not_grow_with_the_number_of_notes(
    tmp_path: Path, sink: str
) -> None:
    import subprocess
    import sys

    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from killed_predictions import make_notes, run_once\n"
        "number = int(sys.argv[3])\n"
        "run_once(Path(sys.argv[1]), sys.argv[2], resume=False, size=500, "
        "notes=make_notes(number))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )

    def measure(number: int) -> int:
        folder = tmp_path / str(number)
        folder.mkdir()
        command = [sys.executable, "-c", code, str(folder), sink, str(number)]
        helpers = Path(__file__).parents[1] / "helpers"
        output = subprocess.run(
            command, check=True, capture_output=True, cwd=helpers, text=True
        )
        return int(output.stdout)

    assert measure(20_000) < measure(1000) + 8 * 1024  # KiB


@pytest.mark.parametrize("sink", ["folder", "sqlite"])
def test_resuming_without_earlier_predictions_warns_and_starts(
    sink: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_once(tmp_path, sink, resume=True)
    assert "there are no predictions to resume, so the command begins" in caplog.text
    caplog.clear()
    run_once(tmp_path, sink, resume=True)
    assert "no predictions to resume" not in caplog.text
