"""OMOP's common data model 5.4: NOTE with the notes, and NOTE_NLP with the mentions, as
CSV.

A folder holds `note.csv` and `note_nlp.csv`. A mention's type, its pieces and a
confidence are in `term_modifiers` ("label=ADE,pieces=6-10,confidence=0.9"), its start
in `offset`. Concepts are 0, "no matching concept", where a mention brought none. Other
columns of NOTE and, under "terms", of NOTE_NLP (that a term is denied, or past) are
kept in `meta["omop"]`. A note that had no number gets one; its id is then its
`note_source_value`, after "fednotes:". Unknown dates of notes are 1970-01-01.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from fednotes.core.errors import DataError
from fednotes.core.parsing import mapping
from fednotes.core.store import write_out
from fednotes.core.types import Document, Span
from fednotes.data.encodings import named_encoding
from fednotes.data.formats import jsonl
from fednotes.data.formats.csv_rows import read_csv_rows
from fednotes.data.formats.files import bounded_lines, open_text, read_first_line
from fednotes.data.formats.folders import find_corpus_files, list_files
from fednotes.data.formats.gathering import ReadDocument, gather, stream_files
from fednotes.data.formats.problems import Problems

LOOSE = 0
_NOTE = (
    "note_id person_id note_date note_datetime note_type_concept_id note_class_concept_id "
    "note_title note_text encoding_concept_id language_concept_id provider_id "
    "visit_occurrence_id visit_detail_id note_source_value note_event_id "
    "note_event_field_concept_id"
).split()
_NLP = (
    "note_nlp_id note_id section_concept_id snippet offset lexical_variant note_nlp_concept_id "
    "note_nlp_source_concept_id nlp_system nlp_date nlp_datetime term_exists term_temporal "
    "term_modifiers"
).split()
_SYSTEM = "fednotes"
_NUMBER = re.compile("0|[1-9][0-9]{0,17}")  # as a database gives it back
_NEEDED = {
    **dict.fromkeys(
        ("person_id", "note_type_concept_id", "note_class_concept_id"), "0"
    ),
    **dict.fromkeys(("encoding_concept_id", "language_concept_id"), "0"),
    "note_date": "1970-01-01",
}
_FOUND = ("note_nlp_id", "note_id", "snippet", "offset", "lexical_variant")  # made anew
_FIELDS = ("note_id", "person_id", "note_text")  # that a Document has
_TOLD = ("label", "pieces", "confidence")  # in term_modifiers, by us
_OURS, _LONGEST, _SHORT = f"{_SYSTEM}:", 250, 50  # characters of OMOP's columns of text


def _heads(path: Path) -> list[str]:
    return [name.strip(' "').lower() for name in read_first_line(path).split(",")]


def accepts(path: Path) -> bool:
    """Whether the file's header is that of NOTE."""
    return {"note_id", "note_text"} <= {*_heads(path)}


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """A document a row of NOTE; its mentions are those of the NOTE_NLP that lies beside
    it (a file with "nlp" in its name).

    Noted, with the line, are rows that are none, notes without a number or a text, and
    mentions without a place or of a note that is not there.
    """
    return gather(find_corpus_files(path, accepts, "OMOP's NOTE"), _read_file, problems)


def stream(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    """Yield what `read` returns, a document at a time; NOTE_NLP is held."""
    files = find_corpus_files(path, accepts, "OMOP's NOTE")
    return stream_files(files, _read_file, problems)


def _read_file(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    terms: defaultdict[str, list[tuple[int, Mapping[str, str]]]] = defaultdict(list)
    near = list_files(path.parent, name_contains="nlp")
    beside = [p for p in near if "note_nlp_id" in _heads(p)]
    for file in beside:
        for line, row in _rows(file, problems):
            terms[row.get("note_id", "").strip()].append((line, row))
    for line, row in _rows(path, problems):
        found = list[ReadDocument]()
        with problems.collect("document", path, line):
            name = row.get("note_id", "").strip()
            if not name or "note_text" not in row:
                raise DataError("note_id or note_text is missing")
            text, spans, besides = row["note_text"], list[Any](), list[Any]()
            for at, term in terms.pop(name, ()):
                with problems.collect("mention", beside[0], at):
                    spans.append(_mention(text, term))
                    if columns := _columns(term):
                        besides.append({"span": spans[-1], "columns": columns})
            source = row.get("note_source_value", "")
            kept: dict[str, Any] = {
                k: v
                for k, v in row.items()
                if v and v != _NEEDED.get(k) and k not in _FIELDS
            }
            if source.startswith(_OURS):
                name = source.removeprefix(_OURS)
                del kept["note_source_value"]
            if besides:
                kept["terms"] = besides
            who = row.get("person_id", "").strip()
            meta = {"omop": kept} if kept else {}
            about = {"patient": who if who not in ("", "0") else None, "meta": meta}
            record = {"id": name, "text": text, "spans": spans, **about}
            document = jsonl.parse_record(record, path, line, problems)
            if document is not None:
                found.append(ReadDocument(document, path, line))
        yield from found
    for rows in terms.values():
        problems.note(
            "mention", beside[0], rows[0][0], "NOTE has no note of this note_id"
        )


def _rows(path: Path, problems: Problems) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of a table, by lower-case heads, with the line that each begins on."""
    with (
        open_text(path, named_encoding(), newline="") as file,
        problems.collect("line", path),
    ):
        rows = read_csv_rows(bounded_lines(file, path, expected="a row"), path)
        heads = [name.strip().lower() for name in next(rows, (0, []))[1]]
        if not heads:
            raise DataError.at(path, 0, "the file is empty")
        for line, row in rows:
            with problems.collect("line", path, line) as wrong:
                if len(row) != len(heads):
                    raise DataError(
                        f"the row has {len(row)} columns, the header {len(heads)}"
                    )
            if not wrong:
                yield line, dict(zip(heads, row, strict=True))


def _columns(row: Mapping[str, str]) -> dict[str, str]:
    """What a row of NOTE_NLP says besides place, type and confidence."""
    others = [
        p
        for p in row.get("term_modifiers", "").split(",")
        if p.split("=")[0] not in _TOLD
    ]
    said = {**row, "term_modifiers": ",".join(filter(None, others))}
    if said.get("nlp_system") == _SYSTEM:
        said["nlp_date"] = ""
    plain = {"nlp_system": _SYSTEM, "term_exists": "Y"}
    empty = ("", "0")
    return {
        name: value
        for name, value in said.items()
        if name not in _FOUND and value != plain.get(name) and value not in empty
    }


def _mention(text: str, row: Mapping[str, str]) -> dict[str, Any]:
    told = dict(
        p.split("=", 1) for p in row.get("term_modifiers", "").split(",") if "=" in p
    )
    concepts = (row.get(f"note_nlp_{name}concept_id", "0") for name in ("", "source_"))
    label = unquote(told.get("label", "")) or next(
        (c for c in concepts if c not in ("0", "")), ""
    )
    places = re.findall(r"([0-9]{1,9})-([0-9]{1,9})", told.get("pieces", ""))
    form = row.get("lexical_variant", "")
    if not places:
        start = re.match(r"\s*([0-9]{1,9})", row.get("offset", ""))
        if start is None:
            raise DataError("the offset is no number")
        places = [(start[1], int(start[1]) + len(form))]
    pieces = [(int(a), int(b)) for a, b in places]
    sure = re.fullmatch(r"[01](\.[0-9]+)?", told.get("confidence", ""))
    whole = form if len(form) < _LONGEST else None
    return jsonl.make_mention(
        text, pieces, label, whole, float(sure[0]) if sure else None
    )


def write(documents: Iterable[Document], path: str | os.PathLike[str]) -> None:
    """Writes `note.csv` and `note_nlp.csv` into the folder `path`."""
    folder = Path(path)
    given = list(documents)
    taken = {d.id for d in given if _NUMBER.fullmatch(d.id)}
    fresh = (name for n in range(1, 1 << 40) if (name := str(n)) not in taken)
    notes, terms = [_NOTE], [_NLP]
    for document in given:
        before = mapping(document.meta.get("omop"))
        kept = {k: str(v) for k, v in before.items() if k != "terms"}
        said = jsonl.rows_by_span(before.get("terms", ()))
        number = document.id if document.id in taken else next(fresh)
        if number != document.id:
            source = f"{_OURS}{document.id}"
            kept["note_source_value"] = source if len(source) <= _SHORT else ""
        if _NUMBER.fullmatch(document.patient or ""):
            kept["person_id"] = str(document.patient)
        row = {**_NEEDED, **kept, "note_id": number, "note_text": document.text}
        notes.append([row.get(name, "") for name in _NOTE])
        for span in document.spans:
            row = _term(document.text, span, said(span).get("columns", {}))
            row |= {"note_nlp_id": str(len(terms)), "note_id": number}
            terms.append([row.get(name, "") for name in _NLP])
    for name, rows in (("note", notes), ("note_nlp", terms)):
        made = io.StringIO(newline="")
        csv.writer(made, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(rows)
        write_out(folder / f"{name}.csv", made.getvalue())


def _term(text: str, span: Span, said: Mapping[str, str]) -> dict[str, str]:
    """A row of NOTE_NLP. said: what another row said besides, as `_columns` has it."""
    more = f",{said['term_modifiers']}" if said.get("term_modifiers") else ""
    pieces = ";".join(f"{start}-{end}" for start, end in span.pieces)
    sure = (
        "" if span.confidence is None else f",confidence={round(span.confidence, 6):f}"
    )
    return {
        "snippet": text[max(0, span.start - 50) : span.end + 50][:_LONGEST],
        "offset": str(span.start),
        "lexical_variant": " ".join(text[a:b] for a, b in span.pieces)[:_LONGEST],
        "note_nlp_concept_id": "0",
        "note_nlp_source_concept_id": "0",
        "nlp_system": _SYSTEM,
        "nlp_date": date.today().isoformat(),
        "term_exists": "Y",
        **said,
        "term_modifiers": f"label={quote(span.label, safe=' ')},pieces={pieces}{sure}{more}",
    }
