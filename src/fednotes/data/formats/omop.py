"""OMOP's common data model 5.4: notes in NOTE, mentions in NOTE_NLP, as CSV.

A folder contains `note.csv` and `note_nlp.csv`. The type, pieces and confidence of a
mention are in `term_modifiers` ("label=ADE,pieces=6-10,confidence=0.9"), its start is
in `offset`. Concepts are 0, "no matching concept", unless a mention was read with one.
Other columns of NOTE and, under "terms", of NOTE_NLP (such as negation or tense) are
stored in `meta["omop"]`. A note whose id is not a number gets a number; its id is then
in `note_source_value`, after "fednotes:". Unknown dates of notes are 1970-01-01.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from fednotes.core.errors import DataError
from fednotes.core.parsing import as_mapping
from fednotes.core.store import write_out
from fednotes.core.types import Document, Span
from fednotes.data.encodings import get_user_encoding
from fednotes.data.formats import jsonl
from fednotes.data.formats.csv_rows import read_csv_rows
from fednotes.data.formats.files import open_text, read_bounded_lines, read_first_line
from fednotes.data.formats.folders import find_corpus_files, list_files
from fednotes.data.formats.gathering import ReadDocument, gather_documents, stream_files
from fednotes.data.formats.problems import Problems

LOOSE = 0
_NOTE_COLUMNS = (
    "note_id person_id note_date note_datetime note_type_concept_id "
    "note_class_concept_id note_title note_text encoding_concept_id "
    "language_concept_id provider_id visit_occurrence_id visit_detail_id "
    "note_source_value note_event_id note_event_field_concept_id"
).split()
NLP_COLUMNS = (
    "note_nlp_id note_id section_concept_id snippet offset lexical_variant "
    "note_nlp_concept_id note_nlp_source_concept_id nlp_system nlp_date nlp_datetime "
    "term_exists term_temporal term_modifiers"
).split()
# Required columns of NOTE, with their values for "unknown".
_NOTE_DEFAULTS = {
    "person_id": "0",
    "note_type_concept_id": "0",
    "note_class_concept_id": "0",
    "encoding_concept_id": "0",
    "language_concept_id": "0",
    "note_date": "1970-01-01",
}
_DOCUMENT_COLUMNS = ("note_id", "person_id", "note_text")  # fields of a Document
# Columns of NOTE_NLP that are not stored but computed again.
_PLACE_COLUMNS = ("note_nlp_id", "note_id", "snippet", "offset", "lexical_variant")
_OWN_MODIFIERS = ("label", "pieces", "confidence")
_SYSTEM = "fednotes"
_OWN_SOURCE = f"{_SYSTEM}:"
_NUMBER = re.compile("0|[1-9][0-9]{0,17}")  # in a database's canonical form
_MAX_TEXT = 250  # maximum length of columns such as lexical_variant
_MAX_SOURCE = 50  # maximum length of note_source_value
_CONTEXT = 50  # characters before and after a mention in its snippet

_Row = Mapping[str, str]


# ---- reading -------------------------------------------------------------------------


def accepts(path: Path) -> bool:
    """Return whether the file's header is that of NOTE."""
    return {"note_id", "note_text"} <= set(_read_header(path))


def _read_header(path: Path) -> list[str]:
    """Return the column names of a table, in lower case."""
    return [name.strip(' "').lower() for name in read_first_line(path).split(",")]


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """Return a document per row of NOTE, with the mentions of NOTE_NLP next to it.

    NOTE_NLP is a file with "nlp" in its name. These problems are collected with their
    lines: rows with a wrong number of columns, notes without an id or a text, and
    mentions without a position or of a missing note.
    """
    return gather_documents(
        find_corpus_files(path, accepts, "OMOP's NOTE"), _read_file, problems
    )


def stream(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    """Yield the documents of `read` one by one; NOTE_NLP is kept in memory."""
    files = find_corpus_files(path, accepts, "OMOP's NOTE")
    return stream_files(files, _read_file, problems)


class _Term(NamedTuple):
    """A row of NOTE_NLP and its place."""

    file: Path
    line: int
    row: _Row


def _read_file(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    """Yield the documents of a table NOTE, with the mentions of NOTE_NLP beside it."""
    terms = _read_terms(path.parent, problems)
    for line, row in _read_rows(path, problems):
        documents: list[ReadDocument] = []
        with problems.collecting("document", path, line):
            note_id = row.get("note_id", "").strip()
            if not note_id or "note_text" not in row:
                raise DataError("note_id or note_text is missing")
            record = _make_record(row, terms.pop(note_id, []), problems)
            document = jsonl.parse_record(record, path, line, problems)
            if document is not None:
                documents.append(ReadDocument(document, path, line))
        yield from documents

    # The terms that are left belong to no note.
    for first_term, *_ in terms.values():
        problems.note(
            "mention",
            first_term.file,
            first_term.line,
            "the table NOTE has no row of this note_id",
        )


def _read_terms(folder: Path, problems: Problems) -> dict[str, list[_Term]]:
    """Return the rows of all tables NOTE_NLP in a folder by the id of their note."""
    terms: dict[str, list[_Term]] = {}
    for file in list_files(folder, name_contains="nlp"):
        if "note_nlp_id" not in _read_header(file):
            continue
        for line, row in _read_rows(file, problems):
            note_id = row.get("note_id", "").strip()
            terms.setdefault(note_id, []).append(_Term(file, line, row))
    return terms


def _make_record(
    row: _Row, terms: Iterable[_Term], problems: Problems
) -> dict[str, Any]:
    """Return a row of NOTE and its terms as a record of JSONL."""
    spans: list[Any] = []
    details: list[Any] = []
    for term in terms:
        with problems.collecting("mention", term.file, term.line):
            span = _parse_term(row["note_text"], term.row)
            spans.append(span)
            columns = _select_other_columns(term.row)
            if columns:
                details.append({"span": span, "columns": columns})
    return _convert_row(row, spans, details)


def _read_rows(path: Path, problems: Problems) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows of a table by lower-case column names, each with its line."""
    with (
        open_text(path, get_user_encoding(), newline="") as file,
        problems.collecting("line", path),
    ):
        rows = read_csv_rows(read_bounded_lines(file, path, expected="a row"), path)
        _, first_row = next(rows, (0, []))
        header = [name.strip().lower() for name in first_row]
        if not header:
            raise DataError.at(path, 0, "the file is empty")
        for line, row in rows:
            with problems.collecting("line", path, line) as errors:
                if len(row) != len(header):
                    raise DataError(
                        f"the row has {len(row)} columns, but the header has "
                        f"{len(header)}: check its delimiters and quotes"
                    )
            if not errors:
                yield line, dict(zip(header, row, strict=True))


def _convert_row(row: _Row, spans: list[Any], details: list[Any]) -> dict[str, Any]:
    """Return a row of NOTE as a record of JSONL.

    Args:
        row: The row.
        spans: Its mentions.
        details: The other columns of NOTE_NLP for them.
    """
    other: dict[str, Any] = {
        name: value
        for name, value in row.items()
        if value and value != _NOTE_DEFAULTS.get(name) and name not in _DOCUMENT_COLUMNS
    }
    id = row["note_id"].strip()
    source = row.get("note_source_value", "")
    if source.startswith(_OWN_SOURCE):
        id = source.removeprefix(_OWN_SOURCE)
        del other["note_source_value"]
    visit = other.pop("visit_occurrence_id", None)
    if details:
        other["terms"] = details
    meta: dict[str, Any] = {"omop": other} if other else {}
    if visit is not None:
        meta["visit"] = visit
    patient = row.get("person_id", "").strip()
    return {
        "id": id,
        "text": row["note_text"],
        "spans": spans,
        "patient": None if patient in ("", "0") else patient,
        "meta": meta,
    }


def _split_modifiers(row: _Row) -> list[str]:
    """Return the parts of the term_modifiers of a row of NOTE_NLP."""
    return row.get("term_modifiers", "").split(",")


def _parse_term(text: str, row: _Row) -> dict[str, Any]:
    """Return the mention of a row of NOTE_NLP."""
    modifiers = dict(
        part.split("=", 1) for part in _split_modifiers(row) if "=" in part
    )
    label = unquote(modifiers.get("label", "")) or _find_concept(row)
    form = row.get("lexical_variant", "")
    places = re.findall(r"([0-9]{1,9})-([0-9]{1,9})", modifiers.get("pieces", ""))
    pieces = [(int(start), int(end)) for start, end in places]
    if not pieces:
        match = re.match(r"\s*([0-9]{1,9})", row.get("offset", ""))
        if match is None:
            raise DataError("the offset is not a number")
        start = int(match[1])
        pieces = [(start, start + len(form))]
    confidence = None
    if re.fullmatch(r"[01](\.[0-9]+)?", modifiers.get("confidence", "")):
        confidence = float(modifiers["confidence"])
    is_complete = len(form) < _MAX_TEXT
    return jsonl.make_mention(
        text, pieces, label, form if is_complete else None, confidence
    )


def _find_concept(row: _Row) -> str:
    """Return the concept of a term; "" if it has none."""
    for column in ("note_nlp_concept_id", "note_nlp_source_concept_id"):
        concept = row.get(column, "0")
        if concept not in ("0", ""):
            return concept
    return ""


def _select_other_columns(row: _Row) -> dict[str, str]:
    """Return the columns of NOTE_NLP other than position, type and confidence."""
    modifiers = [
        part
        for part in _split_modifiers(row)
        if part and part.split("=")[0] not in _OWN_MODIFIERS
    ]
    columns = {**row, "term_modifiers": ",".join(modifiers)}
    if columns.get("nlp_system") == _SYSTEM:
        columns["nlp_date"] = ""
    defaults = {"nlp_system": _SYSTEM, "term_exists": "Y"}
    return {
        name: value
        for name, value in columns.items()
        if name not in _PLACE_COLUMNS
        and value != defaults.get(name)
        and value not in ("", "0")
    }


# ---- writing -------------------------------------------------------------------------


def write(documents: Iterable[Document], path: str | os.PathLike[str]) -> None:
    """Write `note.csv` and `note_nlp.csv` into a folder."""
    folder = Path(path)
    notes = list(documents)
    used_numbers = {note.id for note in notes if _NUMBER.fullmatch(note.id)}
    new_numbers = (str(n) for n in count(1) if str(n) not in used_numbers)
    note_rows = [_NOTE_COLUMNS]
    nlp_rows = [NLP_COLUMNS]
    for document in notes:
        note_id = document.id if document.id in used_numbers else next(new_numbers)
        details = as_mapping(document.meta.get("omop"))
        note = _to_note(document, note_id, details)
        note_rows.append([note.get(name, "") for name in _NOTE_COLUMNS])
        take_stored_row = jsonl.make_row_finder(details.get("terms", ()))
        for span in document.spans:
            term = _to_term(
                document.text, span, take_stored_row(span).get("columns", {})
            )
            term["note_nlp_id"] = str(len(nlp_rows))  # row 0 is the header: ids from 1
            term["note_id"] = note_id
            nlp_rows.append([term.get(name, "") for name in NLP_COLUMNS])
    _write_table(folder / "note.csv", note_rows)
    _write_table(folder / "note_nlp.csv", nlp_rows)


def list_nlp_rows(
    document: Document, first_id: int, nlp_date: str
) -> Iterator[dict[str, str]]:
    """Yield the rows of NOTE_NLP for the mentions in a note of the table NOTE.

    Args:
        document: The note; its id is the number of its row of NOTE.
        first_id: The id of the first row; the others follow.
        nlp_date: The date of the rows, such as "2026-01-31".

    Raises:
        DataError: The note's id is not a number.
    """
    if document.spans and not _NUMBER.fullmatch(document.id):
        raise DataError(
            "NOTE_NLP refers to notes by numbers, but the id of a note is not one: "
            "write jsonl or csv, or name a column of numbers with `id_column`"
        )
    for number, span in enumerate(document.spans, first_id):
        row = _to_term(document.text, span, {"nlp_date": nlp_date})
        row["note_nlp_id"] = str(number)
        row["note_id"] = document.id
        yield row


def _write_table(path: Path, rows: Iterable[Sequence[str]]) -> None:
    """Write a table; the first row is the header."""
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerows(rows)
    write_out(path, buffer.getvalue())


def _to_note(
    document: Document, note_id: str, details: Mapping[str, Any]
) -> dict[str, str]:
    """Return a document as a row of NOTE.

    Args:
        document: The document.
        note_id: The id of the row.
        details: The other columns that were read (`meta["omop"]`).
    """
    row = dict(_NOTE_DEFAULTS)
    row |= {name: str(value) for name, value in details.items() if name != "terms"}
    if note_id != document.id:
        source = f"{_OWN_SOURCE}{document.id}"
        row["note_source_value"] = source if len(source) <= _MAX_SOURCE else ""
    if _NUMBER.fullmatch(document.patient or ""):
        row["person_id"] = str(document.patient)
    visit = str(document.meta.get("visit", ""))
    if _NUMBER.fullmatch(visit):
        row["visit_occurrence_id"] = visit
    row["note_id"] = note_id
    row["note_text"] = document.text
    return row


def _to_term(text: str, span: Span, columns: _Row) -> dict[str, str]:
    """Return a mention as a row of NOTE_NLP, without the ids.

    Args:
        text: The text of the note.
        span: The mention.
        columns: The other columns of the row that was read (`_select_other_columns`).
    """
    pieces = ";".join(f"{start}-{end}" for start, end in span.pieces)
    modifiers = [f"label={quote(span.label, safe=' ')}", f"pieces={pieces}"]
    if span.confidence is not None:
        modifiers.append(f"confidence={round(span.confidence, 6):f}")
    if columns.get("term_modifiers"):
        modifiers.append(columns["term_modifiers"])
    start = max(0, span.start - _CONTEXT)
    return {
        "snippet": text[start : min(span.end + _CONTEXT, start + _MAX_TEXT)],
        "offset": str(span.start),
        "lexical_variant": " ".join(
            text[a : min(b, a + _MAX_TEXT)] for a, b in span.pieces
        )[:_MAX_TEXT],
        "note_nlp_concept_id": "0",
        "note_nlp_source_concept_id": "0",
        "nlp_system": _SYSTEM,
        "nlp_date": date.today().isoformat(),
        "term_exists": "Y",
        **columns,
        "term_modifiers": ",".join(modifiers),
    }
