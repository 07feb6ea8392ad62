"""SQLite files and SQL of OMOP's NOTE table."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

# The table of OMOP's common data model 5.4.
# https://ohdsi.github.io/CommonDataModel/cdm54.html#note
NOTE_DDL = """
CREATE TABLE {table} (
    note_id integer NOT NULL PRIMARY KEY,
    person_id integer NOT NULL,
    note_date date NOT NULL,
    note_datetime timestamp NULL,
    note_type_concept_id integer NOT NULL,
    note_class_concept_id integer NOT NULL,
    note_title varchar(250) NULL,
    note_text text NOT NULL,
    encoding_concept_id integer NOT NULL,
    language_concept_id integer NOT NULL,
    provider_id integer NULL,
    visit_occurrence_id integer NULL,
    visit_detail_id integer NULL,
    note_source_value varchar(50) NULL,
    note_event_id integer NULL,
    note_event_field_concept_id integer NULL)
"""
NOTE_COLUMNS = (
    "note_id, person_id, note_date, note_type_concept_id, note_class_concept_id, "
    "note_title, note_text, encoding_concept_id, language_concept_id, "
    "visit_occurrence_id"
)
Row = tuple[object, ...]


def note_row(number: int, text: str, patient: int = 7, title: str = "Letter") -> Row:
    """A row of `NOTE_COLUMNS`."""
    return number, patient, "2021-03-04", 0, 0, title, text, 0, 0, 70


def fill_sqlite(path: Path, rows: Iterable[Row]) -> str:
    """Write a SQLite file with OMOP's table of notes, and return its address."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(NOTE_DDL.format(table="note"))
        marks = ", ".join("?" * 10)
        insert = f"INSERT INTO note ({NOTE_COLUMNS}) VALUES ({marks})"
        connection.executemany(insert, rows)
    return f"sqlite:///{path}"
