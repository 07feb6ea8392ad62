"""FHIR R4: DocumentReference and DiagnosticReport with plain text in base64.

A Bundle, one resource, or a resource per line (ndjson) is read; a Bundle of the type
"collection" is written. A mention is an extension of its resource:

    {"url": "urn:fednotes:mention", "extension": [{"url": "label", "valueString":
      "ADE"}, {"url": "start", "valueInteger": 6}, {"url": "end", "valueInteger": 10}]}

with a start and an end for each piece, and "confidence". Fields without a counterpart
in FHIR are JSON in the extension "urn:fednotes:document". The remaining content of a
resource that was read is stored in `meta["fhir"]`.
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
from typing import Any, NamedTuple

from fednotes.core.errors import DataError
from fednotes.core.parsing import as_mapping
from fednotes.core.store import write_out
from fednotes.core.types import Document, Span
from fednotes.data.formats import jsonl
from fednotes.data.formats.bioc import require_objects
from fednotes.data.formats.folders import find_corpus_files
from fednotes.data.formats.gathering import ReadDocument, gather_documents, stream_files
from fednotes.data.formats.json_files import (
    parse_json_line,
    read_json_keys,
    read_json_rows,
)
from fednotes.data.formats.problems import Problems

LOOSE = 0
# The types of resources that contain notes, and the keys of their attachments.
PLACES = {"DocumentReference": "content", "DiagnosticReport": "presentedForm"}
_MENTION_URL = "urn:fednotes:mention"
_DOCUMENT_URL = "urn:fednotes:document"
_ID = re.compile(r"[A-Za-z0-9.-]{1,64}")
_TYPE = re.compile(r"[A-Z][A-Za-z]{1,40}")
_MAX_TYPES = 40  # types of ignored resources that are counted separately
_PLAIN_CONTENT = {"attachment": {"contentType": "text/plain"}}
_FILLED_KEYS = ("data", "size", "hash")  # keys of an attachment that depend on its text
# Python supports more encodings, but some are not character sets or are slow.
_CHARSET = re.compile(
    r"utf|(us-)?ascii$|iso-8859-|latin-?\d|windows-\d|cp\d", re.IGNORECASE
)
_MAX_CHARSET = 40  # characters; Python keeps each name that it has looked up


class ResourceFacts(NamedTuple):
    """Facts about the note of a resource; missing ones are None.

    Attributes:
        id: The id of the resource.
        patient: The id of the patient.
        visit: The id of the encounter.
        category: The kind of note.
    """

    id: str | None
    patient: str | None
    visit: str | None
    category: str | None


# ---- reading -------------------------------------------------------------------------


def accepts(path: Path) -> bool:
    """Return whether the file is JSON whose first object has a resource type."""
    return "resourceType" in read_json_keys(path)


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """Return a document for each resource that contains a note.

    Other resources are ignored and counted. A document has the id of its resource, and
    the patient is the resource's subject. These problems are collected: attachments
    that are not base64 or not plain text, and texts at a URL, because nothing is
    downloaded.
    """
    return gather_documents(
        find_corpus_files(path, accepts, "FHIR"), _read_file, problems
    )


def stream(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    """Yield the documents of `read` one by one."""
    return stream_files(find_corpus_files(path, accepts, "FHIR"), _read_file, problems)


def _read_file(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    """Yield the documents of a file."""
    items = (
        resource for value in read_json_rows(path) for resource in list_resources(value)
    )
    to_record = partial(_to_record, ignored=problems.ignored)
    return jsonl.parse_items(items, "resource", to_record, path, problems)


def list_resources(value: Any) -> list[Any]:
    """Return the resources of a Bundle, or any other value in a list.

    Raises:
        DataError: The entries of a Bundle are not a list of objects.
    """
    if as_mapping(value).get("resourceType") != "Bundle":
        return [value]
    return [entry.get("resource") for entry in require_objects(value, "entry")]


def extract_text(resource: Any) -> str | None:
    """Return the note in a resource; None if its type does not contain notes.

    Raises:
        DataError: It has no plain text, or the text cannot be decoded.
    """
    place = PLACES.get(str(as_mapping(resource).get("resourceType")))
    if place is None:
        return None
    attachments = require_objects(resource, place)
    if place == "content":
        attachments = [as_mapping(content.get("attachment")) for content in attachments]
    texts = [attachment for attachment in attachments if _is_text(attachment)]
    if not texts:
        raise DataError("it has no attachment of type text/plain")
    return "\n".join(_decode_attachment(attachment) for attachment in texts)


def extract_facts(resource: Any) -> ResourceFacts:
    """Return the facts about the note of a resource."""
    fields = as_mapping(resource)
    id = fields.get("id")
    return ResourceFacts(
        id=str(id) if isinstance(id, str | int) else None,
        patient=_find_patient_id(as_mapping(fields.get("subject"))),
        visit=_find_encounter_id(fields),
        category=_find_category(fields),
    )


def _find_encounter_id(fields: Mapping[str, Any]) -> str | None:
    """Return the id of a resource's encounter; None if it refers to none."""
    context = as_mapping(fields.get("context"))
    encounter = (
        context.get("encounter") or fields.get("encounter") or fields.get("context")
    )
    if isinstance(encounter, list):
        encounter = next(iter(encounter), None)
    reference = str(as_mapping(encounter).get("reference", ""))
    return reference.rpartition("Encounter/")[2] or None


def _find_category(fields: Mapping[str, Any]) -> str | None:
    """Return the name of the kind of note; None if there is none."""
    kind = as_mapping(fields.get("type") or fields.get("code"))
    coding = kind.get("coding")
    first: Mapping[str, Any] = {}
    if isinstance(coding, list):
        first = as_mapping(next(iter(coding), None))
    category = kind.get("text") or first.get("display") or first.get("code")
    return category if isinstance(category, str) else None


def _find_patient_id(subject: Any) -> str | None:
    """Return the id of the patient in a reference; None if it names no patient."""
    return str(subject.get("reference", "")).rpartition("Patient/")[2] or None


def _is_text(attachment: Mapping[str, Any]) -> bool:
    """Return whether an attachment is plain text."""
    return str(attachment.get("contentType", "")).startswith("text/plain")


def _decode_attachment(attachment: Any) -> str:
    """Return the text of an attachment.

    Raises:
        DataError: The text is at a URL, or cannot be decoded.
    """
    if "data" not in attachment and "url" in attachment:
        raise DataError(
            "its text is at a URL, which fednotes does not fetch: put the text into "
            "the attachment"
        )
    match = re.search(r"charset=\"?([\w-]+)", attachment["contentType"])
    charset = match[1] if match else "utf-8"
    try:
        if len(charset) > _MAX_CHARSET or not _CHARSET.match(charset):
            raise LookupError
        return _decode_base64(attachment.get("data", "")).decode(charset)
    except (LookupError, UnicodeDecodeError):
        raise DataError(
            "its text cannot be decoded in the character set of its contentType: "
            "correct charset= in the contentType, or use UTF-8"
        ) from None


def _decode_base64(data: object) -> bytes:
    """Return the bytes of a value in base64.

    Raises:
        DataError: It is not base64.
    """
    try:
        return base64.b64decode(re.sub(r"\s", "", str(data)), validate=True)
    except (binascii.Error, ValueError):
        raise DataError(
            "the data of an attachment or extension is not base64"
        ) from None


def _to_record(
    resource: Any, context: jsonl.MentionContext, ignored: Counter[str]
) -> dict[str, Any] | None:
    """Return a resource as a record of JSONL; None if its type contains no notes."""
    text = extract_text(resource)
    if text is None:
        _count_ignored(resource, ignored)
        return None
    fields: dict[str, Any] = {}
    spans = []
    other_extensions = []
    for extension in require_objects(resource, "extension"):
        if extension.get("url") == _DOCUMENT_URL:
            raw = _decode_base64(extension.get("valueBase64Binary"))
            value = parse_json_line(raw.decode("utf-8", "replace"))
            fields = dict(as_mapping(value))
        elif extension.get("url") == _MENTION_URL:
            with context():
                parts = require_objects(extension, "extension")
                spans.append(_parse_mention(text, parts))
        else:
            other_extensions.append(extension)

    patient = _find_patient_id(as_mapping(resource.get("subject")))
    details = _remove_text_and_own_extensions(resource, other_extensions)
    if _has_more_than_needed(details, resource, patient):
        fields["meta"] = {**as_mapping(fields.get("meta")), "fhir": details}
    return {
        "id": resource.get("id"),
        "patient": patient,
        **fields,
        "text": text,
        "spans": spans,
    }


def _count_ignored(resource: Any, ignored: Counter[str]) -> None:
    """Count a resource of a type that contains no notes."""
    other = "resources of other types"
    kind = as_mapping(resource).get("resourceType")
    name = other
    if isinstance(kind, str) and _TYPE.fullmatch(kind):
        name = f"{kind} resources"
    if name not in ignored and len(ignored) >= _MAX_TYPES:
        name = other
    ignored[name] += 1


def _remove_text_and_own_extensions(
    resource: Mapping[str, Any], other_extensions: list[Any]
) -> dict[str, Any]:
    """Return a resource without its text and without this project's extensions.

    Args:
        resource: The resource.
        other_extensions: Those of its extensions that are not this project's.
    """
    place = PLACES[resource["resourceType"]]
    details = {key: value for key, value in resource.items() if key != "extension"}
    details[place] = [_remove_text(item) for item in require_objects(resource, place)]
    if other_extensions:
        details["extension"] = other_extensions
    return details


def _has_more_than_needed(
    details: Mapping[str, Any], resource: Mapping[str, Any], patient: str | None
) -> bool:
    """Return whether a resource has content that a new one would not have."""
    new = {
        "resourceType": "DocumentReference",
        "id": resource.get("id"),
        "status": "current",
        "subject": {"reference": f"Patient/{patient}"},
        PLACES[resource["resourceType"]]: [_PLAIN_CONTENT],
    }
    return any(value != new.get(key) for key, value in details.items())


def _remove_text(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an attachment, or its container, without the text and facts about it."""
    if "attachment" in item:
        return {**item, "attachment": _remove_text(as_mapping(item["attachment"]))}
    if not _is_text(item):
        return dict(item)
    bare = {key: value for key, value in item.items() if key not in _FILLED_KEYS}
    bare["contentType"] = "text/plain"
    return bare


def _parse_mention(text: str, parts: list[Any]) -> dict[str, Any]:
    """Return the mention that the parts of an extension describe."""
    values: dict[str, list[Any]] = {}
    for part in parts:
        value = next((v for k, v in part.items() if k.startswith("value")), None)
        if "valueBase64Binary" in part:
            value = _decode_base64(value).decode("utf-8", "replace")
        values.setdefault(str(part.get("url")), []).append(value)
    pieces = list(zip(values.get("start", ()), values.get("end", ()), strict=False))
    label = next(iter(values.get("label", ())), None)
    confidence = next(iter(values.get("confidence", ())), None)
    return jsonl.make_mention(text, pieces, label, None, confidence)


# ---- writing -------------------------------------------------------------------------


def write(documents: Iterable[Document], path: str | os.PathLike[str]) -> None:
    """Write a Bundle of DocumentReferences and of DiagnosticReports that were read."""
    value = make_bundle(
        _to_resource(document, number) for number, document in enumerate(documents, 1)
    )
    write_out(Path(path), json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def make_bundle(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a Bundle of resources."""
    return {
        "resourceType": "Bundle",
        "type": "collection",
        "entry": [{"resource": resource} for resource in entries],
    }


def replace_mentions(
    resource: Mapping[str, Any], spans: Iterable[Span]
) -> dict[str, Any]:
    """Return a resource with these mentions in place of its own."""
    extensions = [
        extension
        for extension in require_objects(resource, "extension")
        if extension.get("url") != _MENTION_URL
    ]
    extensions += [_make_mention_extension(span) for span in spans]
    changed = {key: value for key, value in resource.items() if key != "extension"}
    if extensions:
        changed["extension"] = extensions
    return changed


def _to_resource(document: Document, number: int) -> dict[str, Any]:
    """Return a document as a resource.

    Args:
        document: The document.
        number: Its number from 1, for a new id.
    """
    fields = jsonl.list_other_fields(document)
    details = dict(as_mapping(document.meta.get("fhir")))
    if details.get("resourceType") in PLACES:
        meta = {key: value for key, value in fields["meta"].items() if key != "fhir"}
        fields["meta"] = meta
    else:
        details = {"resourceType": "DocumentReference"}
    can_be_id = bool(_ID.fullmatch(document.id))
    if not can_be_id:
        fields["id"] = document.id
    if document.patient is not None and _ID.fullmatch(document.patient):
        del fields["patient"]
        subject = as_mapping(details.get("subject"))
        if _find_patient_id(subject) != document.patient:
            reference = f"Patient/{document.patient}"
            details["subject"] = {**subject, "reference": reference}

    extensions = [*details.pop("extension", ())]
    if any(fields.values()) or not can_be_id:
        encoded = _encode_base64(jsonl.to_json(document, fields))
        extensions.append({"url": _DOCUMENT_URL, "valueBase64Binary": encoded})
    extensions += [_make_mention_extension(span) for span in document.spans]

    resource = {"status": "current", **details}
    resource["id"] = document.id if can_be_id else f"note-{number}"
    place = PLACES[resource["resourceType"]]
    default: list[Mapping[str, Any]] = [_PLAIN_CONTENT if place == "content" else {}]
    resource[place] = _insert_text(resource.get(place) or default, document.text)
    if extensions:
        resource["extension"] = extensions
    return resource


def _insert_text(items: Iterable[Mapping[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return attachments or their containers, with a text in the first one for text.

    Further attachments for text are left out, since the text includes theirs.
    """
    filled: list[dict[str, Any]] = []
    has_text = False
    for item in items:
        attachment = as_mapping(item.get("attachment", item))
        if attachment and not _is_text(attachment):
            filled.append(dict(item))
            continue
        if has_text:
            continue
        has_text = True
        content = {**attachment, "contentType": "text/plain; charset=utf-8"}
        if text:
            content["data"] = _encode_base64(text)
        filled.append(
            {**item, "attachment": content} if "attachment" in item else content
        )
    return filled


def _encode_base64(text: str) -> str:
    """Return a text in base64."""
    return base64.b64encode(text.encode()).decode()


def _make_mention_extension(span: Span) -> dict[str, Any]:
    """Return the extension that stores a mention."""
    label: dict[str, Any] = {"url": "label"}
    if span.label.isprintable() and span.label == span.label.strip():
        label["valueString"] = span.label
    else:
        label["valueBase64Binary"] = _encode_base64(span.label)
    parts = [label]
    for start, end in span.pieces:
        parts.append({"url": "start", "valueInteger": start})
        parts.append({"url": "end", "valueInteger": end})
    if span.confidence is not None:
        parts.append({"url": "confidence", "valueDecimal": round(span.confidence, 6)})
    return {"url": _MENTION_URL, "extension": parts}
