"""Label Studio's JSON for import and export: an array of tasks.

    [{"data": {"text": "…"}, "annotations": [{"result": [ {"type": "labels", "value":
        {"start": 6, "end": 10, "text": "rash", "labels": ["ADE"]}}]}]}]

Mentions with a confidence are written as a prediction, others as an annotation. The
names of the tags are "label" and "text", as in Label Studio's own template for named
entities. Other fields of a document are in the task's data: the id under "id", the rest
under "fednotes".
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fednotes.core.errors import DataError
from fednotes.core.parsing import as_mapping, find_number
from fednotes.core.store import write_out
from fednotes.core.types import Document, Span
from fednotes.data.formats import jsonl
from fednotes.data.formats.folders import find_corpus_files
from fednotes.data.formats.gathering import ReadDocument, gather_documents
from fednotes.data.formats.json_files import read_json, read_json_keys
from fednotes.data.formats.mentions import has_form, require_short_mentions
from fednotes.data.formats.problems import Problems
from fednotes.data.formats.utf16 import Utf16Units

LOOSE = 0
_TASK_KEYS = {"data", "annotations", "completions", "predictions"}


# ---- reading -------------------------------------------------------------------------


def accepts(path: Path) -> bool:
    """Return whether the file is a JSON array whose first object is a task."""
    keys = read_json_keys(path)
    return "[" in keys and not keys.isdisjoint(_TASK_KEYS)


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """Return a document per task, with its last annotation or prediction.

    Skipped tasks are left out. The text is "text" in the data, or the only string
    there. Offsets in JavaScript's UTF-16 units are recognised by the mentions' texts.
    These problems are collected: tasks without a text, and mentions that differ from
    the text at their offsets.
    """
    files = find_corpus_files(path, accepts, "Label Studio")
    return gather_documents(files, _read_file, problems)


def _read_file(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    """Yield the documents of a file."""
    tasks = read_json(path)
    if not isinstance(tasks, list):
        raise DataError("not a list of tasks: export as JSON from Label Studio")
    to_record = partial(_to_record, ignored=problems.ignored)
    return jsonl.parse_items(tasks, "task", to_record, path, problems)


def _to_record(
    task: Any, context: jsonl.MentionContext, ignored: Counter[str]
) -> dict[str, Any] | None:
    """Return a task as a record of JSONL; None if it was skipped."""
    data = as_mapping(as_mapping(task).get("data"))
    text_key = _find_text_key(data)
    text = data.get(text_key)
    if not isinstance(text, str):
        raise DataError('its data has no "text"')
    annotation, others = _find_last_annotation(as_mapping(task))
    if annotation.get("was_cancelled"):
        return None
    results = [as_mapping(result) for result in annotation.get("result") or ()]
    regions = [
        result for result in results if "start" in as_mapping(result.get("value"))
    ]
    ignored["annotations of others"] += others
    ignored["relations, and answers that are not mentions"] += len(results) - len(
        regions
    )
    units = Utf16Units(text)
    spans = []
    for region in regions:
        value = as_mapping(region.get("value"))
        labels = value.get("labels") or value.get("hypertextlabels")
        for label in labels if isinstance(labels, list) else [None]:
            with context():
                spans.append(
                    jsonl.make_mention(
                        text,
                        [_find_offsets(text, units, value)],
                        label,
                        value.get("text"),
                        _find_confidence(region),
                    )
                )
    fields = {
        key: value for key, value in data.items() if key not in (text_key, "fednotes")
    }
    id = fields.pop("id", None)
    fields |= as_mapping(data.get("fednotes"))
    return {**fields, "id": id, "text": text, "spans": spans}


def _find_text_key(data: Mapping[str, Any]) -> str:
    """Return the key of the text in a task's data."""
    strings = [key for key, value in data.items() if isinstance(value, str)]
    if "text" in data or len(strings) != 1:
        return "text"
    return strings[0]


def _find_confidence(region: Mapping[str, Any]) -> float | None:
    """Return the score of a region; None if it is not between 0 and 1."""
    score = find_number(region, "score")
    return score if score is not None and 0 <= score <= 1 else None


def _find_last_annotation(task: Any) -> tuple[dict[str, Any], int]:
    """Return the last annotation of a task, and the number of the others.

    If there are none, predictions are used.
    """
    for key in ("annotations", "completions", "predictions"):
        items = [item for item in task.get(key) or () if isinstance(item, dict)]
        if items:
            return items[-1], len(items) - 1
    return {}, 0


def _find_offsets(text: str, units: Utf16Units, value: Any) -> tuple[Any, Any]:
    """Return the offsets of a region, in characters.

    Older versions of Label Studio count in UTF-16 units.
    """
    start = value.get("start")
    end = value.get("end")
    form = value.get("text")
    are_offsets = type(start) is int and type(end) is int and 0 <= start < end
    if text.isascii() or not are_offsets or not isinstance(form, str):
        return start, end
    if end <= len(text) and has_form(text, [(start, end)], form):
        return start, end
    first = units.to_character(start)
    last = units.to_character(end)
    if first is not None and last is not None:
        last = min(last, len(text))
        if has_form(text, [(first, last)], form):
            return first, last
    return start, end


# ---- writing -------------------------------------------------------------------------


def write(documents: Iterable[Document], path: str | os.PathLike[str]) -> None:
    """Write tasks for import; a mention of several pieces becomes one stretch."""
    tasks = [jsonl.to_json(document, _to_task(document)) for document in documents]
    write_out(Path(path), "[" + ",\n".join(tasks) + "]\n")


def _to_task(document: Document) -> dict[str, Any]:
    """Return a document as a task."""
    require_short_mentions(document)
    data: dict[str, Any] = {"text": document.text, "id": document.id}
    fields = jsonl.list_other_fields(document)
    if fields:
        data["fednotes"] = fields
    regions = [
        _to_region(document.text, span, number)
        for number, span in enumerate(document.spans, 1)
    ]
    has_scores = any("score" in region for region in regions)
    key = "predictions" if has_scores else "annotations"
    return {"data": data, key: [{"result": regions}]}


def _to_region(text: str, span: Span, number: int) -> dict[str, Any]:
    """Return a mention as a region of a result.

    Args:
        text: The text of the document.
        span: The mention.
        number: Its number in the document, for the region's id.
    """
    region: dict[str, Any] = {
        "id": f"r{number}",
        "type": "labels",
        "from_name": "label",
        "to_name": "text",
        "value": {
            "start": span.start,
            "end": span.end,
            "text": text[span.start : span.end],
            "labels": [span.label],
        },
    }
    if span.confidence is not None:
        region["score"] = round(span.confidence, 6)
    return region
