"""The JSON that MedCATtrainer exports and imports: projects of annotated documents.

    {"projects": [{"name": "p", "documents": [{"name": "n1", "text": "Had a rash.",
      "annotations": [{"start": 6, "end": 10, "cui": "C0015230", "value": "rash",
        "correct": true, "meta_anns": {}}]}]}]}

An annotation is a mention if an annotator has confirmed it: it is correct, or has an
alternative concept. Those that were deleted, killed or judged irrelevant, and those
that nobody has judged, are counted but not read. The type of a mention is its concept,
or that of the concept in a table that the user names (`CHOICE`). Offsets are
characters.

Meta-annotations, and concepts behind a table's types, are stored in
`meta["medcattrainer"]` and written back. Fields without a counterpart are in the
document's key "fednotes", which MedCATtrainer ignores.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fednotes.core import bounds
from fednotes.core.errors import DataError
from fednotes.core.parsing import as_mapping
from fednotes.core.store import write_out
from fednotes.core.types import Document
from fednotes.data import encodings
from fednotes.data.formats import jsonl
from fednotes.data.formats.choices import get_choice
from fednotes.data.formats.csv_rows import read_csv_rows
from fednotes.data.formats.files import open_text, read_bounded_lines
from fednotes.data.formats.folders import find_corpus_files
from fednotes.data.formats.gathering import ReadDocument, gather_documents
from fednotes.data.formats.json_files import read_json, read_json_keys
from fednotes.data.formats.mentions import require_short_mentions
from fednotes.data.formats.problems import Problems

LOOSE = 0
CHOICE = "TABLE.csv"
_KEY = "medcattrainer"  # in a document's meta
_REJECTED = ("deleted", "killed", "irrelevant")
_USER = "admin"  # the first user of each installation; an import refuses unknown users
_PROJECT = "fednotes"

Types = Mapping[str, str] | None  # the type of each concept; None if it is the concept


# ---- reading -------------------------------------------------------------------------


def accepts(path: Path) -> bool:
    """Return whether the file is a JSON object with projects."""
    return read_json_keys(path) >= {"projects"}


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """Return a document for each document of each project.

    Its id is the document's name. These problems are collected: documents without a
    text, and mentions that differ from the text at their offsets.
    """
    types = _read_types(get_choice(), path) if get_choice() else None
    files = find_corpus_files(path, accepts, "MedCATtrainer's export")
    return gather_documents(files, partial(_read_file, types), problems)


def _read_types(choice: str, corpus: Path) -> dict[str, str]:
    """Return the type of each concept in a table with the columns cui and type.

    Args:
        choice: The path of the table, beside the corpus or in the working folder.
        corpus: The corpus.

    Raises:
        DataError: There is no such table, or it lacks a column or a cell.
    """
    folder = corpus if corpus.is_dir() else corpus.parent
    table = folder / choice
    if not os.path.lexists(table):
        table = Path(choice)
    types: dict[str, str] = {}
    with open_text(table, encodings.get_user_encoding(), newline="") as file:
        rows = read_csv_rows(read_bounded_lines(file, table), table)
        _, header = next(rows, (1, []))
        names = [name.strip().lower() for name in header]
        if not {"cui", "type"} <= set(names):
            raise DataError.at(table, 1, "expected the columns cui and type")
        for line, row in rows:
            cells = dict(zip(names, (cell.strip() for cell in row), strict=False))
            if not cells.get("cui") or not cells.get("type"):
                raise DataError.at(table, line, "a concept or a type is missing")
            types[cells["cui"]] = cells["type"]
            if len(types) > bounds.JSON_VALUES:
                raise DataError.at(
                    table, line, f"more than {bounds.JSON_VALUES:,} concepts"
                )
    return types


def _read_file(types: Types, path: Path, problems: Problems) -> Iterator[ReadDocument]:
    """Yield the documents of a file."""
    projects = as_mapping(read_json(path)).get("projects")
    if not isinstance(projects, list):
        raise DataError('"projects" is not a list: export the projects again')
    items = [
        (as_mapping(project).get("name"), document)
        for project in projects
        for document in as_mapping(project).get("documents") or ()
    ]
    to_record = partial(_to_record, types=types, ignored=problems.ignored)
    return jsonl.parse_items(items, "document", to_record, path, problems)


def _to_record(
    item: tuple[Any, Any],
    context: jsonl.MentionContext,
    types: Types,
    ignored: Counter[str],
) -> dict[str, Any]:
    """Return a document of a project as a record of JSONL."""
    project, document = item
    text = as_mapping(document).get("text")
    if not isinstance(text, str):
        raise DataError(
            "it has no text: export the projects with text from MedCATtrainer"
        )
    ignored["relations"] += len(document.get("relations") or ())
    spans = []
    details = []
    for annotation in document.get("annotations") or ():
        if not _is_confirmed(annotation):
            ignored["unconfirmed annotations"] += 1
            continue
        cui = annotation.get("cui")
        label = cui if types is None else types.get(cui)
        if label is None and types is not None:
            ignored["annotations of concepts that are not in the table"] += 1
            continue
        with context():
            place = (annotation.get("start"), annotation.get("end"))
            span = jsonl.make_mention(text, [place], label, annotation.get("value"))
            spans.append(span)
            meta = as_mapping(annotation.get("meta_anns"))
            details.append({"span": span, "cui": cui, "meta_anns": meta})
    fields = dict(as_mapping(document.get("fednotes")))
    rows = [
        row for row in details if row["meta_anns"] or row["cui"] != row["span"]["label"]
    ]
    stored: dict[str, Any] = {"annotations": rows} if rows else {}
    if isinstance(project, str) and project != _PROJECT:
        stored["project"] = project
    if stored:
        fields["meta"] = {**as_mapping(fields.get("meta")), _KEY: stored}
    name = document.get("name") or document.get("id")
    return {"id": name, **fields, "text": text, "spans": spans}


def _is_confirmed(annotation: Any) -> bool:
    """Return whether an annotator has confirmed an annotation.

    Files for MedCAT's training may lack the judgements: all in them is confirmed.
    """
    if any(annotation.get(judgement) for judgement in _REJECTED):
        return False
    is_judged = "correct" in annotation or "alternative" in annotation
    is_correct = annotation.get("correct") or annotation.get("alternative")
    return bool(is_correct) or not is_judged


# ---- writing -------------------------------------------------------------------------


def write(documents: Iterable[Document], path: str | os.PathLike[str]) -> None:
    """Write projects for import; a mention of several pieces becomes one stretch.

    All annotations are correct ones of the user "admin".
    """
    projects: dict[str, dict[str, Any]] = {}
    for number, document in enumerate(documents, 1):
        name = str(as_mapping(document.meta.get(_KEY)).get("project") or _PROJECT)
        project = projects.setdefault(name, _make_project(name, len(projects) + 1))
        project["documents"].append(_to_value(document, number))
    for project in projects.values():
        concepts = {a["cui"] for d in project["documents"] for a in d["annotations"]}
        project["cuis"] = ",".join(sorted(concepts))
    content = {"projects": list(projects.values())}
    write_out(Path(path), json.dumps(content, ensure_ascii=False, indent=1) + "\n")


def _make_project(name: str, id: int) -> dict[str, Any]:
    """Return a project without documents."""
    return {
        "name": name,
        "id": id,
        "cuis": "",
        "meta_anno_defs": [],
        "relation_anno_defs": [],
        "documents": [],
    }


def _to_value(document: Document, number: int) -> dict[str, Any]:
    """Return a document as a document of a project.

    Args:
        document: The document.
        number: Its number from 1, for its id.
    """
    require_short_mentions(document)
    try:
        details = as_mapping(document.meta.get(_KEY))
        annotations = _to_annotations(document, details.get("annotations", ()))
    except (AttributeError, KeyError, TypeError, ValueError):
        # `meta["medcattrainer"]` was not written by this reader.
        annotations = _to_annotations(document, ())
    meta = {name: value for name, value in document.meta.items() if name != _KEY}
    value = {
        "id": number,
        "name": document.id,
        "text": document.text,
        "annotations": annotations,
        "relations": [],
    }
    fields = jsonl.list_other_fields(replace(document, meta=meta))
    if not document.id:
        fields["id"] = ""
    if fields:
        value["fednotes"] = fields
    return value


def _to_annotations(document: Document, rows: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the annotations of a document, with what was read beside them."""
    take_stored_row = jsonl.make_row_finder(rows)
    annotations = []
    for number, span in enumerate(document.spans, 1):
        row = take_stored_row(span)
        annotations.append(
            {
                "id": number,
                "user": _USER,
                "cui": row.get("cui", span.label),
                "value": document.text[span.start : span.end],
                "start": span.start,
                "end": span.end,
                "validated": True,
                "correct": True,
                "deleted": False,
                "alternative": False,
                "killed": False,
                "irrelevant": False,
                "manually_created": True,
                "acc": 1.0,
                "comment": None,
                "meta_anns": dict(row.get("meta_anns", {})),
            }
        )
    return annotations
