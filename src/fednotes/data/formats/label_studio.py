"""Label Studio's JSON: an array of tasks, as it exports them and as it imports them.

    [{"data": {"text": "…"}, "annotations": [{"result": [ {"type": "labels", "value":
        {"start": 6, "end": 10, "text": "rash", "labels": ["ADE"]}}]}]}]

Mentions with a confidence are written as a prediction, others as an annotation. The
names of the tags are "label" and "text", as in Label Studio's own template for named
entities. The rest of a document stands in its data, id and patient as they are, the
others under "fednotes".
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from fednotes.core.errors import DataError
from fednotes.core.parsing import mapping, number
from fednotes.core.store import write_out
from fednotes.core.types import Document, Span
from fednotes.data.formats import jsonl
from fednotes.data.formats.folders import find_corpus_files
from fednotes.data.formats.gathering import ReadDocument, gather
from fednotes.data.formats.json_files import read_json, read_json_keys
from fednotes.data.formats.mentions import is_same_text
from fednotes.data.formats.problems import Problems

LOOSE = 0


def accepts(path: Path) -> bool:
    """Whether the file is an array of JSON whose first lines name a task's data."""
    keys = read_json_keys(path)
    return "[" in keys and bool(
        keys & {"data", "annotations", "completions", "predictions"}
    )


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """A document a task: the last annotation, else the last prediction; skipped tasks
    are left out.

    The text is the data's "text", or the only string in it. Offsets that count as
    JavaScript does are known by the mentions' texts. Noted are tasks without a text,
    and mentions that are not what it holds.
    """
    return gather(
        find_corpus_files(path, accepts, "Label Studio"), _read_file, problems
    )


def _read_file(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    tasks = read_json(path)
    if not isinstance(tasks, list):
        raise DataError("no array of tasks: export as JSON from Label Studio")
    record = partial(_record, unread=problems.ignored)
    return jsonl.parse_items(tasks, "task", record, path, problems)


def _record(
    task: Any, noting: jsonl.MentionContext, unread: Counter[str]
) -> dict[str, Any] | None:
    data = mapping(mapping(task).get("data"))
    strings = [key for key, value in data.items() if isinstance(value, str)]
    key = "text" if "text" in data or len(strings) != 1 else strings[0]
    text = data.get(key)
    if not isinstance(text, str):
        raise DataError('its data has no "text"')
    annotation, others = _last(mapping(task))
    if annotation.get("was_cancelled"):
        return None
    results = list(map(mapping, annotation.get("result") or ()))
    regions = [own for own in results if "start" in mapping(own.get("value"))]
    unread["annotations of others"] += others
    unread["relations, and answers that are no mentions"] += len(results) - len(regions)
    spans = []
    for region in regions:
        value = mapping(region.get("value"))
        labels = value.get("labels") or value.get("hypertextlabels")
        for label in labels if isinstance(labels, list) else [None]:
            with noting():
                sure = number(region, "score")
                # of another scale
                sure = sure if sure is None or 0 <= sure <= 1 else None
                places = [_place(text, value)]
                spans.append(
                    jsonl.make_mention(text, places, label, value.get("text"), sure)
                )
    rest = {
        name: value for name, value in data.items() if name not in (key, "fednotes")
    }
    name = rest.pop("id", None)
    return rest | {
        **mapping(data.get("fednotes")),
        "id": name,
        "text": text,
        "spans": spans,
    }


def _last(task: Any) -> tuple[dict[str, Any], int]:
    """The last annotation of a task, else its last prediction; and how many stand
    beside it."""
    for name in ("annotations", "completions", "predictions"):
        if given := [own for own in task.get(name) or () if isinstance(own, dict)]:
            return given[-1], len(given) - 1
    return {}, 0


def _place(text: str, value: Any) -> tuple[Any, Any]:
    """The offsets of a region; those counted in UTF-16, as older versions did, are
    turned."""
    start, end, form = value.get("start"), value.get("end"), value.get("text")
    whole = type(start) is int and type(end) is int and 0 <= start < end
    if text.isascii() or not whole or not isinstance(form, str):
        return start, end
    if not is_same_text(text[start:end], form):
        units = text.encode("utf-16-le")
        bounds = ((0, start), (start, end))
        before, own = (
            units[2 * a : 2 * b].decode("utf-16-le", "replace") for a, b in bounds
        )
        if is_same_text(own, form):
            return len(before), len(before) + len(own)
    return start, end


def write(documents: Iterable[Document], path: str | os.PathLike[str]) -> None:
    """Writes tasks that can be imported; mentions in pieces as one stretch."""
    tasks = [jsonl.to_json(document, _task(document)) for document in documents]
    write_out(Path(path), "[" + ",\n".join(tasks) + "]\n")


def _task(document: Document) -> dict[str, Any]:
    rest = jsonl.other_fields(document)
    data = {"text": document.text, "id": document.id} | (
        {"fednotes": rest} if rest else {}
    )
    regions = [
        _region(document.text, span, n) for n, span in enumerate(document.spans, 1)
    ]
    kind = (
        "predictions" if any("score" in region for region in regions) else "annotations"
    )
    return {"data": data, kind: [{"result": regions}]}


def _region(text: str, span: Span, number: int) -> dict[str, Any]:
    value = {"start": span.start, "end": span.end, "text": text[span.start : span.end]}
    sure = {} if span.confidence is None else {"score": round(span.confidence, 6)}
    return {
        "id": f"r{number}",
        "type": "labels",
        "from_name": "label",
        "to_name": "text",
        "value": {**value, "labels": [span.label]},
    } | sure
