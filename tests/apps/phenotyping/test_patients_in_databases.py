"""Notes of patients in a database, for jobs, predictions and scores."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from patient_files import job, load, parts, save_model, write, write_terms

from fednotes.apps.phenotyping.cohort import compute_site_fingerprint
from fednotes.core.errors import ConfigError, ParameterError
from fednotes.data.notes import NoteDatabase
from fednotes.jobs.models import load as load_model
from fednotes.jobs.predict import predict
from fednotes.jobs.saved_models import EvaluationOptions, NoteSource, PredictionOutput

pytest.importorskip("sqlalchemy")

TERMS = ("asthma", "gout", "hypertension")
TEXTS = {
    n: f"Known {TERMS[n % 3]}." if n % 2 else f"Seen with {TERMS[n % 3]}."
    for n in range(30)
}
QUERY = "SELECT note_id, person_id AS patient, body AS note_text FROM letters"
SITE = {"codes": "codes.csv", "codes_format": "table", "system": "icd9"}
PHENOTYPES = {"gout": ["icd9:274"]}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Write the same patients as a table and as a SQLite file, and their codes."""
    write_terms(tmp_path, *TERMS)
    rows = [f'{n},p{n},"{text}"' for n, text in TEXTS.items()]
    write(tmp_path / "notes.csv", "note_id,patient,text", rows)
    codes = [f"p{n},{'274' if n % 3 == 1 else '401'}" for n in TEXTS]
    write(tmp_path / "codes.csv", "patient,code", codes)
    labels = [f"p{n},gout,{'present' if n % 3 == 1 else 'absent'}" for n in TEXTS]
    write(tmp_path / "labels.csv", "patient,phenotype,label", labels)
    with closing(sqlite3.connect(tmp_path / "notes.db")) as connection, connection:
        connection.execute(
            "CREATE TABLE letters (note_id INTEGER, person_id TEXT, body TEXT)"
        )
        connection.executemany(
            "INSERT INTO letters VALUES (?, ?, ?)",
            [(n, f"p{n}", text) for n, text in reversed(TEXTS.items())],
        )
    return tmp_path


def test_a_job_on_patients_reads_the_same_notes_from_a_database(place: Path) -> None:
    by_table = load(
        place, sites={"a": {**SITE, "notes": "notes.csv"}}, phenotypes=PHENOTYPES
    )
    database = {**SITE, "notes": "sqlite:///notes.db", "query": QUERY}
    by_database = load(place, sites={"a": database}, phenotypes=PHENOTYPES)
    assert compute_site_fingerprint(by_database.data[0]) == compute_site_fingerprint(
        by_table.data[0]
    )
    assert sum(map(len, parts(by_database.data[0]))) == len(TEXTS)


def test_a_query_needs_a_database(place: Path) -> None:
    site: dict[str, Any] = {**SITE, "notes": "notes.csv", "query": QUERY}
    with pytest.raises(ConfigError, match="need the address of a database"):
        job(place, sites={"a": site}, phenotypes=PHENOTYPES)


def test_a_model_of_patients_predicts_and_is_scored_on_a_database(place: Path) -> None:
    folder = save_model(place / "model", "synthetic", Path(), *TERMS)
    database = NoteDatabase(f"sqlite:///{place}/notes.db", QUERY)
    out = place / "found.jsonl"
    predict(folder, NoteSource(database), PredictionOutput(out))
    from_database = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    predict(
        folder,
        NoteSource(str(place / "notes.csv")),
        PredictionOutput(out, overwrite=True),
    )
    from_table = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert from_database == from_table
    assert len(from_table) == len(TEXTS)

    model = load_model(folder)
    options = EvaluationOptions(labels=place / "labels.csv")
    scores = model.evaluate(database, options).scores
    assert scores == model.evaluate(place / "notes.csv", options).scores
    with pytest.raises(ParameterError, match="need a table of labels"):
        model.evaluate(database)
    with pytest.raises(ParameterError, match="need all notes of a patient"):
        predict(folder, NoteSource(database), PredictionOutput(place / "x", shard=5))
