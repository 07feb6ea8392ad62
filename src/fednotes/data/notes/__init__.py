"""Streams of notes without annotations, for pre-training and prediction.

    mimic        MIMIC-III NOTEEVENTS.csv: rows marked ISERROR are dropped
    mimic-iv     MIMIC-IV-Note: discharge.csv, radiology.csv
    omop         the NOTE table of the OMOP common data model
    mts-dialog   MTS-Dialog: the section written after a dialogue
    aci-bench    ACI-Bench: the note written after an encounter
    csv          any other table with a header, whose text column is user-specified or
                 called "text"
    jsonl        one JSON object per line
    fhir         FHIR R4: a resource per line, a Bundle or one resource
    parquet      any other table in Parquet or Arrow, with the columns of "csv"
    text         a file per note: one file, or every .txt file in a folder and below it

Notes are also read from a database (`NoteDatabase`), in batches of rows.

The tables of MIMIC and OMOP are also read in Parquet. Files whose names end in .gz or
.zst are unpacked during reading. One note at a time is in memory; for Parquet, one
batch of rows; for a FHIR file that is not JSON lines, the whole file, up to 64 MiB.
"""

from fednotes.data.notes._database import (
    DEFAULT_TABLE,
    NoteDatabase,
    NotePlace,
    make_note_place,
    require_database,
    require_places_of_notes,
)
from fednotes.data.notes._guessing import (
    explain_line_ids,
    find_note_files,
    find_unused_columns,
    guess_notes,
)
from fednotes.data.notes._note import (
    EMPTY,
    MISTAKEN,
    OTHER,
    SHARED,
    Key,
    Note,
    NoteStream,
    describe_left_out,
    make_patient_key,
)
from fednotes.data.notes._reading import find_packed_or_plain, read_notes
from fednotes.data.notes._records import add_standard_keys
from fednotes.data.notes._settings import FORMATS

__all__ = [
    "DEFAULT_TABLE",
    "EMPTY",
    "FORMATS",
    "MISTAKEN",
    "OTHER",
    "SHARED",
    "Key",
    "Note",
    "NoteDatabase",
    "NotePlace",
    "NoteStream",
    "add_standard_keys",
    "describe_left_out",
    "explain_line_ids",
    "find_note_files",
    "find_packed_or_plain",
    "find_unused_columns",
    "guess_notes",
    "make_note_place",
    "make_patient_key",
    "read_notes",
    "require_database",
    "require_places_of_notes",
]
