"""FHIR R4: DocumentReference and DiagnosticReport with a text/plain attachment, in
base64.

A Bundle, one resource, or a resource a line (ndjson) is read; a Bundle of the type
"collection" is written. A mention is an extension of its resource:

    {"url": "urn:fednotes:mention", "extension": [{"url": "label", "valueString":
      "ADE"}, {"url": "start", "valueInteger": 6}, {"url": "end", "valueInteger": 10}]}

with a start and an end for each piece, and "confidence". What FHIR has no place for is
JSON in the extension "urn:fednotes:document". The rest of a resource that was read is
kept in `meta["fhir"]`.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fednotes.core.errors import DataError
from fednotes.core.parsing import mapping
from fednotes.core.store import write_out
from fednotes.core.types import Document, Span
from fednotes.data.formats import jsonl
from fednotes.data.formats.bioc import objects
from fednotes.data.formats.folders import find_corpus_files
from fednotes.data.formats.gathering import ReadDocument, gather, stream_files
from fednotes.data.formats.json_files import (
    parse_json_line,
    read_json_keys,
    read_json_rows,
)
from fednotes.data.formats.problems import Problems

LOOSE = 0
_MENTION, _REST = "urn:fednotes:mention", "urn:fednotes:document"
PLACES = {"DocumentReference": "content", "DiagnosticReport": "presentedForm"}
_ID = re.compile(r"[A-Za-z0-9.-]{1,64}")
# of resources; so many are named
_TYPE, _TYPES = re.compile(r"[A-Z][A-Za-z]{1,40}"), 40
_PLAIN = {"attachment": {"contentType": "text/plain"}}
_CHARSET = re.compile(
    r"utf|(us-)?ascii$|iso-8859-|latin-?\d|windows-\d|cp\d", re.IGNORECASE
)


def accepts(path: Path) -> bool:
    """Whether the file is JSON whose first lines name a type of resource."""
    return "resourceType" in read_json_keys(path)


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """A document for each of the resources that hold notes; others are passed over, and
    counted.

    id: the resource's; patient: its subject's. Noted are attachments that are no base64
    or no plain text, and texts that are elsewhere: nothing is fetched.
    """
    return gather(find_corpus_files(path, accepts, "FHIR"), _read_file, problems)


def stream(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    """Yield what `read` returns, a document at a time."""
    return stream_files(find_corpus_files(path, accepts, "FHIR"), _read_file, problems)


def _read_file(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    found = (own for value in read_json_rows(path) for own in resources(value))
    record = partial(_record, unread=problems.ignored)
    return jsonl.parse_items(found, "resource", record, path, problems)


def resources(value: Any) -> list[Any]:
    """Those of a Bundle; else the one that it is. Raises DataError."""
    bundle = mapping(value).get("resourceType") == "Bundle"
    return [e.get("resource") for e in objects(value, "entry")] if bundle else [value]


def text_of(resource: Any) -> str | None:
    """The note that a resource holds; None where its type holds none.

    Raises DataError.
    """
    place = PLACES.get(str(mapping(resource).get("resourceType")))
    if place is None:
        return None
    held = objects(resource, place)
    attachments = (
        [mapping(a.get("attachment")) for a in held] if place == "content" else held
    )
    texts = [a for a in attachments if _is_text(a)]
    if not texts:
        raise DataError("it has no attachment of the type text/plain")
    return "\n".join(map(_text, texts))


def about(resource: Any) -> tuple[str | None, str | None, str | None, str | None]:
    """The ids of a resource, of its patient and of its encounter, and what kind of note
    it is; None for each that it does not say."""
    known = mapping(resource)
    context = mapping(known.get("context"))
    encounter = (
        context.get("encounter") or known.get("encounter") or known.get("context")
    )
    if isinstance(encounter, list):
        encounter = next(iter(encounter), None)
    visit = (
        str(mapping(encounter).get("reference", "")).rpartition("Encounter/")[2] or None
    )
    kind = mapping(known.get("type") or known.get("code"))
    coding = kind.get("coding")
    first = mapping(next(iter(coding), None)) if isinstance(coding, list) else {}
    category = kind.get("text") or first.get("display") or first.get("code")
    name, patient = known.get("id"), _patient(mapping(known.get("subject")))
    own = str(name) if isinstance(name, str | int) else None
    return own, patient, visit, category if isinstance(category, str) else None


def _is_text(attachment: Mapping[str, Any]) -> bool:
    return str(attachment.get("contentType", "")).startswith("text/plain")


def _bare(held: Mapping[str, Any]) -> dict[str, Any]:
    """What holds an attachment, without what is said by, or of, the text in it."""
    if "attachment" in held:
        return {**held, "attachment": _bare(mapping(held["attachment"]))}
    if not _is_text(held):
        return dict(held)
    kept = {k: v for k, v in held.items() if k not in ("data", "size", "hash")}
    return kept | {"contentType": "text/plain"}


def with_mentions(resource: Mapping[str, Any], spans: Iterable[Span]) -> dict[str, Any]:
    """The resource with these mentions in the place of its own, and all else as it was."""
    others = [e for e in objects(resource, "extension") if e.get("url") != _MENTION]
    extension = [*others, *map(_extension, spans)]
    kept = {key: value for key, value in resource.items() if key != "extension"}
    return kept | ({"extension": extension} if extension else {})


def bundle(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Resources as a Bundle."""
    held = [{"resource": resource} for resource in entries]
    return {"resourceType": "Bundle", "type": "collection", "entry": held}


def _record(
    resource: Any, noting: jsonl.MentionContext, unread: Counter[str]
) -> dict[str, Any] | None:
    if (text := text_of(resource)) is None:
        kind, odd = mapping(resource).get("resourceType"), "resources of other types"
        name = (
            f"{kind} resources"
            if isinstance(kind, str) and _TYPE.fullmatch(kind)
            else odd
        )
        unread[name if name in unread or len(unread) < _TYPES else odd] += 1
        return None
    place = PLACES[resource["resourceType"]]
    rest: dict[str, Any] = {}
    spans, extensions = [], objects(resource, "extension")
    for extension in extensions:
        if extension.get("url") == _REST:
            raw = _decoded(extension.get("valueBase64Binary")).decode(
                "utf-8", "replace"
            )
            rest = dict(mapping(parse_json_line(raw)))
        elif extension.get("url") == _MENTION:
            with noting():
                spans.append(_mention(text, objects(extension, "extension")))
    others = [e for e in extensions if e.get("url") not in (_REST, _MENTION)]
    kept = {k: v for k, v in resource.items() if k != "extension"}
    kept |= {place: [_bare(held) for held in objects(resource, place)]}
    kept |= {"extension": others} if others else {}
    patient = _patient(mapping(resource.get("subject")))
    plain = {
        "resourceType": "DocumentReference",
        "id": resource.get("id"),
        "status": "current",
    }
    plain |= {"subject": {"reference": f"Patient/{patient}"}, place: [_PLAIN]}
    if any(value != plain.get(key) for key, value in kept.items()):
        rest["meta"] = {**mapping(rest.get("meta")), "fhir": kept}
    return {
        "id": resource.get("id"),
        "patient": patient,
        **rest,
        "text": text,
        "spans": spans,
    }


def _patient(subject: Any) -> str | None:
    return str(subject.get("reference", "")).rpartition("Patient/")[2] or None


def _text(attachment: Any) -> str:
    if "data" not in attachment and "url" in attachment:
        raise DataError(
            "its text is at a URL, and nothing is fetched: put it into the attachment"
        )
    named = re.search(r"charset=\"?([\w-]+)", attachment["contentType"])
    charset = named[1] if named else "utf-8"
    try:
        # Python has more, and some that take their time
        if not _CHARSET.match(charset):
            raise LookupError
        return _decoded(attachment.get("data", "")).decode(charset)
    except (LookupError, UnicodeDecodeError):
        raise DataError(
            "its text is not in the character set that it names, or UTF-8"
        ) from None


def _decoded(data: object) -> bytes:
    try:
        return base64.b64decode(re.sub(r"\s", "", str(data)), validate=True)
    except (binascii.Error, ValueError):
        raise DataError("the data of an attachment or extension is no base64") from None


def _mention(text: str, parts: list[Any]) -> dict[str, Any]:
    values: dict[str, list[Any]] = {}
    for part in parts:
        value = next((v for k, v in part.items() if k.startswith("value")), None)
        plain = "valueBase64Binary" not in part
        values.setdefault(str(part.get("url")), []).append(
            value if plain else _decoded(value).decode("utf-8", "replace")
        )
    pieces = list(zip(values.get("start", ()), values.get("end", ()), strict=False))
    (label, *_), (sure, *_) = (
        values.get("label") or [None],
        values.get("confidence") or [None],
    )
    return jsonl.make_mention(text, pieces, label, None, sure)


def write(documents: Iterable[Document], path: str | os.PathLike[str]) -> None:
    """Writes a Bundle of DocumentReferences (DiagnosticReports where that was read)."""
    made = bundle(
        _resource(document, number) for number, document in enumerate(documents, 1)
    )
    write_out(Path(path), json.dumps(made, ensure_ascii=False, indent=1) + "\n")


def _resource(document: Document, number: int) -> dict[str, Any]:
    kept = dict(mapping(document.meta.get("fhir")))
    kind = kept.get("resourceType")
    kept = kept if kind in PLACES else {"resourceType": "DocumentReference"}
    rest = jsonl.other_fields(document)
    if kind in PLACES:
        rest["meta"] = {k: v for k, v in rest["meta"].items() if k != "fhir"}
    named = bool(_ID.fullmatch(document.id))
    rest |= {} if named else {"id": document.id}
    if document.patient is not None and _ID.fullmatch(document.patient):
        del rest["patient"]
        subject = mapping(kept.get("subject"))
        if _patient(subject) != document.patient:
            kept["subject"] = {**subject, "reference": f"Patient/{document.patient}"}
    raw = jsonl.to_json(document, rest) if any(rest.values()) or not named else ""
    own = [{"url": _REST, "valueBase64Binary": _encoded(raw)}] if raw else []
    extension = [*kept.pop("extension", ()), *own, *map(_extension, document.spans)]
    made = {**kept, "id": document.id if named else f"note-{number}"}
    place = PLACES[made["resourceType"]]
    made[place] = _filled(
        made.get(place) or [_PLAIN if place == "content" else {}], document.text
    )
    return {"status": "current", **made} | (
        {"extension": extension} if extension else {}
    )


def _filled(held: Iterable[Mapping[str, Any]], text: str) -> list[dict[str, Any]]:
    """What holds attachments, as it was read, with the text in the first that is for
    text; others of that kind were a part of it."""
    data = {"data": _encoded(text)} if text else {}
    made, texts = [], 0
    for own in held:
        inner = mapping(own.get("attachment", own))
        if not inner or _is_text(inner):
            texts += 1
            filled = {**inner, "contentType": "text/plain; charset=utf-8", **data}
            if texts == 1:
                made.append(
                    {**own, "attachment": filled} if "attachment" in own else filled
                )
        else:
            made.append(dict(own))
    return made


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _extension(span: Span) -> dict[str, Any]:
    plain = span.label.isprintable() and span.label == span.label.strip()
    label = (
        {"valueString": span.label}
        if plain
        else {"valueBase64Binary": _encoded(span.label)}
    )
    places = [
        {"url": url, "valueInteger": at}
        for piece in span.pieces
        for url, at in zip(("start", "end"), piece, strict=True)
    ]
    parts: list[dict[str, Any]] = [{"url": "label", **label}, *places]
    if span.confidence is not None:
        parts.append({"url": "confidence", "valueDecimal": round(span.confidence, 6)})
    return {"url": _MENTION, "extension": parts}
