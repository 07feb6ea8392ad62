"""Notes in a database in place of files: commands, jobs and the API."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from every_kind import make
from note_databases import NOTE_COLUMNS, NOTE_DDL, fill_sqlite, note_row
from postgres import Postgres

import fednotes as fn
from fednotes.core.errors import ConfigError, DataError
from fednotes.data.notes import NoteDatabase
from fednotes.jobs.declaration import load_declared
from fednotes.jobs.inputs import open_inputs
from fednotes.jobs.job import load_sites
from fednotes.jobs.job_file import parse_job
from fednotes.taggers.saving import save_model

pytest.importorskip("sqlalchemy")

SECRET = "pa55-w0rd"
NAME = "Wilhelmina"  # stands in every note; no message may hold it
TEXTS = {n: f"{NAME} took aspirin, day {n}." for n in range(1, 31)}
URL = f"postgresql+psycopg://reader:{SECRET}@/none?host=/nowhere"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def address(tmp_path: Path) -> str:
    rows = (note_row(n, text, patient=n // 2) for n, text in TEXTS.items())
    return fill_sqlite(tmp_path / "notes.db", rows)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("saved")
    save_model(make("tagger", place), place / "model")
    return place / "model"


def job(folder: Path, **site: Any) -> Any:
    return parse_job(
        {"method": "pretrain", "sites": {"a": site}}, "j", folder, "j.toml"
    )


def test_predict_streams_notes_of_a_database_with_ids_patients_and_visits(
    address: str, model: Path, tmp_path: Path, run_cli: Run
) -> None:
    out = tmp_path / "found.jsonl"
    code, _, err = run_cli("predict", model, address, "--out", out)
    assert code == 0, err
    records = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [record["id"] for record in records] == [str(n) for n in TEXTS]
    assert [record["text"] for record in records] == list(TEXTS.values())
    assert records[3]["patient"] == "2"
    assert records[3]["visit"] == "70"

    query = "SELECT note_id, note_text FROM note WHERE note_id < 3"
    code, stdout, err = run_cli("predict", model, address, "--query", query)
    assert code == 0, err
    assert [json.loads(line)["id"] for line in stdout.splitlines()] == ["1", "2"]
    loaded = fn.load(model)
    predicted = list(loaded.predict_file(NoteDatabase(address, query)))
    assert [document.id for document in predicted] == ["1", "2"]
    assert len(fn.read(address)) == len(TEXTS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predict", "MODEL", "notes.csv", "--query", "SELECT 1"], "--query reads a"),
        (
            [
                "predict",
                "MODEL",
                "DB",
                "--format",
                "jsonl",
                "--to",
                "brat",
                "--out",
                "x",
            ],
            "--format is for files",
        ),
        (["predict", "MODEL", "DB", "--omop", "cdm.note"], "no such table"),
        (["predict", "MODEL", URL], "has a password"),
        (["predict", "MODEL", "env:NOWHERE"], "NOWHERE is not set"),
        (["evaluate", "MODEL", "DB"], "have no annotations"),
        (["evaluate", "MODEL", URL], "has a password"),
        (["check", "DB", "--other-annotation", "x"], "a database has none"),
        (["check", URL], "has a password"),
        (["init", URL], "has a password"),
        (["init", f"mercy={URL}"], "has a password"),
        (["init", "DB", "--omop", "nowhere"], "no such table"),
        (["corpus", "stats", URL], "no such file"),
        (["convert", URL, "out.jsonl", "--to", "jsonl"], "no such file"),
    ],
)
def test_a_mistake_is_reported_in_one_line_without_the_password(
    address: str, model: Path, run_cli: Run, arguments: list[str], message: str
) -> None:
    names = {"MODEL": str(model), "DB": address}
    words = [names.get(word, word) for word in arguments]
    code, stdout, err = run_cli(*words)
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1
    assert SECRET not in stdout + err
    assert NAME not in stdout + err


def test_the_api_shows_no_password(model: Path) -> None:
    loaded = fn.load(model)
    functions: list[Callable[[str], Any]] = [
        fn.read,
        fn.check,
        fn.init,
        loaded.predict_file,
        loaded.evaluate,
        lambda place: fn.evaluate(loaded, place),
    ]
    for function in functions:
        with pytest.raises(ConfigError, match="has a password") as raised:
            function(URL)
        assert SECRET not in str(raised.value)


def test_the_number_of_notes_is_known_before_prediction(
    address: str, tmp_path: Path
) -> None:
    """So that the time left is shown."""
    assert open_inputs(address).count() == len(TEXTS)
    path = tmp_path / "notes.csv"
    path.write_text("id,text\n1,a\n2,b\n", "utf-8")
    inputs = open_inputs(str(path))
    inputs.require_readable()
    assert inputs.count() == 2


def test_an_error_names_a_wrong_variable_but_not_its_value(
    model: Path, run_cli: Run, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setenv("NOTES_DB", URL)
    with caplog.at_level(logging.DEBUG):
        code, stdout, err = run_cli("predict", model, "env:NOTES_DB")
    assert code == 2
    assert err.startswith(
        "error: env:NOTES_DB: cannot connect to the database: no server"
    )
    assert SECRET not in stdout + err + caplog.text


def test_check_counts_the_notes_of_a_database(address: str, run_cli: Run) -> None:
    code, stdout, err = run_cli("check", address, "--json")
    assert code == 0, err
    assert NAME not in stdout
    result = json.loads(stdout)
    assert result["problems"] == []
    assert "no_mentions" not in stdout
    query = "SELECT note_id, CAST(note_text AS BLOB) AS text FROM note"
    code, stdout, _ = run_cli("check", address, "--query", query, "--json")
    assert code == 1
    assert json.loads(stdout)["counts"]["problems"] == len(TEXTS)


def test_init_writes_a_job_for_notes_in_a_database(
    address: str, tmp_path: Path, run_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("NOTES_DB", address)
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "jobs" / "job.toml"
    out.parent.mkdir()
    code, stdout, err = run_cli("init", "mercy=env:NOTES_DB", "--out", out)
    assert code == 0, err
    text = out.read_text("utf-8")
    assert '[sites.mercy]\npath = "env:NOTES_DB"\nomop = "note"' in text
    assert NAME not in stdout + text
    query = "SELECT note_id, person_id, note_text FROM note"
    relative = fn.init(NoteDatabase("sqlite:///notes.db", query), out, overwrite=True)
    assert f'path = "sqlite:///../notes.db"\nquery = "{query}"' in relative.text
    loaded = load_sites(fn.job(out))
    assert [site.id for site in loaded.data] == [f"silo{n}" for n in range(1, 6)]
    assert sum(site.train_notes + site.valid_notes for site in loaded.data) == 30


def test_a_job_reads_notes_to_pretrain_on_from_a_database(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTES_DB", address)
    query = "SELECT note_id, person_id AS patient, note_text FROM note"
    by_variable = load_sites(job(tmp_path, path="env:NOTES_DB")).data[0]
    by_path = load_sites(job(tmp_path, path="sqlite:///notes.db", query=query)).data[0]
    assert by_variable.content == by_path.content
    texts = [note.text for part in (by_path.train, by_path.valid) for note in part()]
    assert sorted(texts) == sorted(TEXTS.values())
    few = load_sites(job(tmp_path, path="env:NOTES_DB", max_notes=5)).data[0]
    assert few.train_notes == 5


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ({"path": URL}, r"j\.toml sites\.a\.path: .* has a password: .* env:"),
        ({"paths": ["a.csv", URL]}, r"sites\.a\.paths: .* has a password"),
        ({"path": "a.csv", "omop": "note"}, "need the address of a database"),
        ({"path": "env:DB", "omop": "note", "query": "SELECT 1"}, "not both"),
        ({"path": "oracle://host/db"}, r"postgresql\+psycopg"),
    ],
)
def test_a_job_with_an_impossible_address_is_refused(
    tmp_path: Path, site: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        job(tmp_path, **site)
    assert SECRET not in str(raised.value)


def test_a_password_in_a_variable_of_a_path_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTES_DB", URL)
    with pytest.raises(ConfigError, match=r"sites\.a\.path is the address") as raised:
        load_sites(job(tmp_path, path="$NOTES_DB"))
    assert SECRET not in str(raised.value)


def test_annotated_documents_are_not_read_from_a_database(tmp_path: Path) -> None:
    tables = {"method": "finetune", "sites": {"a": {"path": "env:NOTES_DB"}}}
    with pytest.raises(ConfigError, match="only notes without annotations"):
        load_sites(parse_job(tables, "j", tmp_path, "j.toml"))


def test_the_query_of_a_site_is_not_sent(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        'method = "pretrain"\n[sites.a]\npath = "env:DB"\nquery = "SELECT 1"\n'
        '[sites.b]\npath = "env:DB"\nomop = "cdm.note"\n',
        "utf-8",
    )
    declared = json.dumps(load_declared(path), default=str)
    assert "SELECT" not in declared
    assert "cdm.note" not in declared
    assert "env:DB" not in declared


def test_notes_that_change_between_two_passes_are_refused(
    address: str, tmp_path: Path
) -> None:
    import sqlite3
    from contextlib import closing

    site = load_sites(job(tmp_path, path=address)).data[0]
    with closing(sqlite3.connect(tmp_path / "notes.db")) as connection, connection:
        connection.execute("DELETE FROM note WHERE note_id = 2")
    with pytest.raises(DataError, match="changed while they were used"):
        list(site.train())


# ---- predictions into a database -----------------------------------------------------


def test_predictions_for_postgresql_are_written_to_note_nlp(
    postgres: Postgres,
    model: Path,
    tmp_path: Path,
    run_cli: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NOTE_NLP refers to NOTE as the constraints of OMOP's common data model say."""
    import psycopg

    place = postgres.url().replace("+psycopg", "")
    with psycopg.connect(place, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA hospital")
        connection.execute(NOTE_DDL.format(table="hospital.note"))
        marks = ", ".join(["%s"] * 10)
        with connection.cursor() as cursor:
            insert = f"INSERT INTO hospital.note ({NOTE_COLUMNS}) VALUES ({marks})"
            cursor.executemany(insert, [note_row(n, text) for n, text in TEXTS.items()])
        connection.execute(
            "CREATE TABLE hospital.note_nlp (note_nlp_id integer NOT NULL PRIMARY KEY, "
            "note_id integer NOT NULL REFERENCES hospital.note, "
            "section_concept_id integer NULL, snippet varchar(250) NULL, "
            '"offset" varchar(50) NULL, lexical_variant varchar(250) NOT NULL, '
            "note_nlp_concept_id integer NULL, note_nlp_source_concept_id integer NULL, "
            "nlp_system varchar(250) NULL, nlp_date date NOT NULL, "
            "nlp_datetime timestamp NULL, term_exists varchar(1) NULL, "
            "term_temporal varchar(50) NULL, term_modifiers varchar(2000) NULL)"
        )
        monkeypatch.setenv("NOTES_DB", postgres.url())
        words = ["predict", model, "env:NOTES_DB", "--omop", "hospital.note"]
        words += ["--to", "omop", "--out", "env:NOTES_DB"]
        words += ["--out-table", "hospital.note_nlp", "--shard", 7]
        code, stdout, err = run_cli(*words)
        assert code == 0, err
        assert NAME not in stdout + err

        query = (
            'SELECT note_nlp_id, note_id, "offset", lexical_variant, term_modifiers '
            "FROM hospital.note_nlp ORDER BY note_nlp_id"
        )
        rows = connection.execute(query).fetchall()
        predicted = fn.load(model).predict_file(
            NoteDatabase("env:NOTES_DB", omop="hospital.note")
        )
        expected = [
            (int(document.id), str(span.start), document.text[span.start : span.end])
            for document in predicted
            for span in document.spans
        ]
        assert [row[1:4] for row in rows] == expected
        assert [row[0] for row in rows] == list(range(1, len(rows) + 1))

        code, _, err = run_cli(*words)
        assert code == 2
        assert "has complete predictions" in err
        insert = f"INSERT INTO hospital.note ({NOTE_COLUMNS}) VALUES ({marks})"
        connection.execute(insert, note_row(31, TEXTS[3]))
        code, _, err = run_cli(*words, "--resume")
        assert code == 0, err
        longer = connection.execute(query).fetchall()
        assert longer[: len(rows)] == rows
        assert {row[1] for row in longer[len(rows) :]} == {31}
        code, _, err = run_cli(*words, "--resume", "--threshold", 0.9)
        assert code == 2
        assert "another threshold 0.0, now 0.9" in err


def test_shards_together_equal_the_predictions_in_one_file(
    address: str, model: Path, tmp_path: Path, run_cli: Run
) -> None:
    words = ["predict", model, address, "--out"]
    assert run_cli(*words, tmp_path / "all.jsonl")[0] == 0
    code, _, err = run_cli(*words, tmp_path / "shards", "--shard", 8)
    assert code == 0, err
    shards = sorted((tmp_path / "shards").glob("part-*.jsonl"))
    assert len(shards) == 4
    joined = b"".join(path.read_bytes() for path in shards)
    records = [json.loads(line) for line in joined.splitlines()]
    whole = (tmp_path / "all.jsonl").read_text("utf-8").splitlines()
    assert [record["id"] for record in records] == [
        json.loads(line)["id"] for line in whole
    ]
    assert {path.stat().st_mode & 0o777 for path in shards} == {0o600}
    manifest = json.loads((tmp_path / "shards/manifest.json").read_text("utf-8"))
    assert manifest["progress"]["notes"] == len(TEXTS)
    assert NAME not in json.dumps(manifest)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shard", "8"], "--shard writes a folder of files"),
        (["--resume", "--out", "x"], "--resume continues a folder of shards"),
        (["--to", "parquet"], "parquet is not a text: give the file to write in --out"),
        (["--to", "brat", "--out", "x", "--shard", "8"], "leave it out"),
        (["--out", "sqlite:///x.db"], "a database takes rows of OMOP's NOTE_NLP"),
        (["--out", "x", "--out-table", "y"], "--out-table is a table of a database"),
        (["--to", "omop", "--out", "sqlite:///x.db", "--out-table", "a b"], "not the"),
        (["--to", "omop", "--out", "DB"], "SQLite cannot write"),
        (["--to", "omop", "--out", URL], "has a password"),
    ],
)
def test_outputs_that_cannot_be_written_are_refused(
    address: str,
    model: Path,
    tmp_path: Path,
    run_cli: Run,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [address if word == "DB" else word for word in arguments]
    code, stdout, err = run_cli("predict", model, address, *words)
    assert code == 2
    assert message in err
    assert SECRET not in stdout + err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.db"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_killed_command_resumes_to_the_same_bytes(
    address: str, model: Path, tmp_path: Path, seed: int
) -> None:
    words = [sys.executable, "-m", "fednotes", "predict", str(model), address]
    words += ["--shard", "2", "--out"]
    subprocess.run([*words, str(tmp_path / "undisturbed")], check=True)
    out = tmp_path / "killed"
    kills = sorted(random.Random(seed).sample(range(1, 12), 2))
    for number in kills:
        process = subprocess.Popen([*words, str(out), "--resume"])
        while process.poll() is None:
            if (out / f"part-{number:05d}.jsonl").exists():
                process.kill()
        process.wait()
    subprocess.run([*words, str(out), "--resume"], check=True)
    names = sorted(path.name for path in (tmp_path / "undisturbed").iterdir())
    assert sorted(path.name for path in out.iterdir()) == names
    for name in names:
        expected = (tmp_path / "undisturbed" / name).read_bytes()
        assert (out / name).read_bytes() == expected, name
