"""BioC in XML or JSON: documents of passages, annotated at document offsets.

    <document><id>n1</id><passage><offset>0</offset><text>Had a rash.</text>
      <annotation id="T1"><infon key="type">ADE</infon>
        <location offset="6" length="4"/><text>rash</text></annotation></passage>
    </document>

The infon "type" is the type of a mention, and "confidence" a model's confidence;
several locations are the pieces of one mention. Passages, relations and other infons
are stored in `meta["bioc"]` and written back. Fields without a counterpart in BioC are
JSON in the document's infon "fednotes". XML is written unless the file's name ends in
.json; characters that XML forbids become U+FFFD.
"""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from defusedxml.common import DefusedXmlException
from defusedxml.ElementTree import XMLParser

from fednotes.core import bounds
from fednotes.core.errors import DataError
from fednotes.core.parsing import as_mapping
from fednotes.core.store import write_out
from fednotes.core.types import Document, Span
from fednotes.data.formats import jsonl
from fednotes.data.formats.files import (
    READ_ERRORS,
    make_incomplete_error,
    open_bytes,
    read_first_line,
    read_head,
)
from fednotes.data.formats.folders import find_corpus_files
from fednotes.data.formats.gathering import ReadDocument, gather_documents, stream_files
from fednotes.data.formats.json_files import parse_json_line, read_json, read_json_keys
from fednotes.data.formats.mentions import require_short_mentions
from fednotes.data.formats.problems import Problems
from fednotes.data.formats.xml_files import FORBIDDEN

LOOSE = 0
_ACCEPT_LINES = 10  # a collection must begin within these lines
# Names of BioC's JSON lists, by the XML element of their items.
_LISTS = {
    name: f"{name}s"
    for name in "passage sentence annotation relation location node".split()
}
_SINGULAR = {plural: name for name, plural in _LISTS.items()}
_CHUNK = 1 << 16  # bytes that are parsed at a time
_MAX_GAPS = 1 << 20  # total number of characters between the passages of a document
_OWN_INFON = "fednotes"


# ---- reading -------------------------------------------------------------------------


def accepts(path: Path) -> bool:
    """Return whether the file is XML with a collection, or JSON with passages."""
    lines = read_head(path)
    if lines and lines[0].startswith("<"):
        return any("<collection" in line for line in lines[:_ACCEPT_LINES])
    keys = read_json_keys(path)
    if keys & {"text", "[", "resourceType"}:
        return False
    return "documents" in keys or {"infons", "passages"} <= keys


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """Return the documents of the collections.

    Passages are placed at their offsets. These problems are collected: passages that
    overlap, mentions without a type, and mentions that differ from the text at their
    offsets.
    """
    return gather_documents(
        find_corpus_files(path, accepts, "BioC"), _read_file, problems
    )


def stream(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    """Yield the documents of `read` one by one; JSON is read as a whole."""
    return stream_files(find_corpus_files(path, accepts, "BioC"), _read_file, problems)


def _read_file(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    """Yield the documents of a file in XML or JSON."""
    items: Iterable[Any]
    if read_first_line(path).startswith("<"):
        items = _read_xml(path)
    else:
        value = read_json(path)
        items = as_mapping(value).get("documents", [value])
        if not _is_list_of_objects(items):
            raise DataError('"documents" is not a list of objects')
    return jsonl.parse_items(items, "document", _to_record, path, problems)


def _read_xml(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the documents of an XML file one by one, in the form of BioC's JSON.

    The depth, elements and characters of each are bounded. Its memory is freed after it
    is yielded.
    """
    builder = _DocumentBuilder()
    parser = XMLParser(target=builder)
    idle_bytes = 0  # since the last parser event
    with open_bytes(path) as file:
        has_more = True
        while has_more:
            events_before = builder.events
            size = _feed(parser, file.read, path)
            has_more = size > 0
            is_idle = builder.events == events_before
            idle_bytes = idle_bytes + size if is_idle else 0
            if idle_bytes > bounds.MARKUP:
                raise DataError.at(
                    path,
                    parser.parser.CurrentLineNumber,
                    f"a tag or a comment has more than {bounds.MARKUP:,} bytes: check "
                    "that the file is BioC",
                )
            while builder.documents:
                yield _element_to_json(builder.documents.popleft())


def _feed(parser: Any, read_bytes: Any, path: Path) -> int:
    """Read and parse one chunk; return its size, 0 at the end of the file."""
    try:
        data = read_bytes(_CHUNK)
        if data:
            parser.feed(data)
        else:
            parser.close()
    except ElementTree.ParseError as error:
        raise DataError.at(
            path,
            error.position[0],
            "the XML is incomplete: expected a BioC collection",
        ) from None
    except DefusedXmlException:
        raise DataError("the XML declares entities, which are not read") from None
    except READ_ERRORS as error:
        raise make_incomplete_error(path, error) from None
    except (LookupError, ValueError):
        # Raised by Python's decoders, which the parser calls.
        raise DataError.at(
            path,
            1,
            "the XML declares an encoding that cannot be read: save the file as UTF-8",
        ) from None
    return len(data)


class _DocumentBuilder(ElementTree.TreeBuilder):
    """Builds the documents of a collection one by one.

    Attributes:
        documents: The completed documents that were not taken yet.
        events: The number of element starts, element ends and stretches of text.
    """

    def __init__(self) -> None:
        super().__init__()
        self.documents: deque[ElementTree.Element] = deque()
        self.events = 0
        self._depth = 0
        self._elements = 0
        self._characters = 0

    def start(self, tag: str, attrs: dict[str, str]) -> ElementTree.Element:
        """Begin an element.

        Raises:
            DataError: A document has more or deeper elements than the bounds permit.
        """
        self.events += 1
        self._depth += 1
        self._elements += 1
        if self._depth > bounds.JSON_DEPTH or self._elements > bounds.JSON_VALUES:
            raise DataError(
                "a document has too many elements, or they are nested too deeply"
            )
        return super().start(tag, attrs)

    def data(self, data: str) -> None:
        """Add characters.

        Raises:
            DataError: A document has more characters than the bounds permit.
        """
        self.events += 1
        self._characters += len(data)
        if self._characters > bounds.FILE:
            raise DataError(
                f"a document has more than {bounds.FILE:,} characters: check that "
                "the file is BioC"
            )
        super().data(data)

    def end(self, tag: str) -> ElementTree.Element:
        """End an element."""
        self.events += 1
        self._depth -= 1
        element = super().end(tag)
        if tag == "document":
            document = ElementTree.Element(tag, element.attrib)
            document.extend(list(element))
            self.documents.append(document)
            element.clear()
            self._elements = 0
            self._characters = 0
        return element


def _element_to_json(element: ElementTree.Element) -> dict[str, Any]:
    """Return an element of BioC's XML in the form of BioC's JSON."""
    value: dict[str, Any] = dict(element.attrib)
    for child in element:
        if child.tag == "infon":
            value.setdefault("infons", {})[child.get("key", "")] = child.text or ""
        elif child.tag in _LISTS:
            value.setdefault(_LISTS[child.tag], []).append(_element_to_json(child))
        else:
            value[child.tag] = child.text or ""
    return value


def _to_record(value: Any, context: jsonl.MentionContext) -> dict[str, Any]:
    """Return a document of BioC's JSON as a record of JSONL."""
    passages = require_objects(value, "passages")
    text = join_passages(passages)
    parts: list[Any] = [value, *passages]
    for passage in passages:
        parts += require_objects(passage, "sentences")

    spans = []
    annotations = []
    for part in parts:
        for annotation in require_objects(part, "annotations"):
            with context():
                details = _parse_annotation(annotation, text)
                spans.append(details["span"])
                annotations.append(details)
    relations = [
        _parse_relation(r) for p in parts for r in require_objects(p, "relations")
    ]

    infons = dict(as_mapping(value.get("infons")))
    own_infon = infons.pop(_OWN_INFON, None)
    fields: dict[str, Any] = {}
    if isinstance(own_infon, str):
        fields = dict(as_mapping(parse_json_line(own_infon)))
    details = _collect_details(infons, passages, annotations, relations)
    if details:
        fields["meta"] = {**as_mapping(fields.get("meta")), "bioc": details}
    return {"id": value.get("id"), **fields, "text": text, "spans": spans}


def _parse_relation(relation: Any) -> dict[str, Any]:
    """Return the id, the infons and the nodes of a relation."""
    return {
        "id": str(relation.get("id", "")),
        "infons": as_mapping(relation.get("infons")),
        "nodes": require_objects(relation, "nodes"),
    }


def _collect_details(
    infons: Mapping[str, Any],
    passages: Sequence[Any],
    annotations: Sequence[Mapping[str, Any]],
    relations: Sequence[Any],
) -> dict[str, Any]:
    """Return the parts of a document to store in its meta, without empty ones.

    Args:
        infons: The infons of the document.
        passages: Its passages, which are stored unless a plain text has the same.
        annotations: Its annotations, which are stored if they have more than mentions.
        relations: Its relations.
    """
    layout = [
        [_parse_whole_number(p, "offset"), as_mapping(p.get("infons"))]
        for p in passages
    ]
    details: dict[str, Any] = {
        "infons": infons,
        "passages": [],
        "annotations": [],
        "relations": relations,
    }
    if len(layout) > 1 or any(passage_infons for _, passage_infons in layout):
        details["passages"] = layout
    if relations or any(annotation["infons"] for annotation in annotations):
        details["annotations"] = annotations
    return {name: detail for name, detail in details.items() if detail}


def _parse_annotation(annotation: Any, text: str) -> dict[str, Any]:
    """Return the id, the mention and the other infons of an annotation."""
    infons = dict(as_mapping(annotation.get("infons")))
    label = infons.pop("type", None)
    confidence = _parse_confidence(infons.pop("confidence", None))
    pieces = []
    for location in require_objects(annotation, "locations"):
        start = _parse_whole_number(location, "offset")
        pieces.append((start, start + _parse_whole_number(location, "length")))
    form = annotation.get("text") or None
    span = jsonl.make_mention(text, pieces, label, form, confidence)
    return {"id": str(annotation.get("id", "")), "span": span, "infons": infons}


def _is_list_of_objects(value: object) -> bool:
    """Return whether a JSON value is a list of objects."""
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def require_objects(value: Any, key: str) -> list[Any]:
    """Return an object's list of objects; [] if the key is missing.

    Raises:
        DataError: The value is not a list of objects.
    """
    items: list[Any] = as_mapping(value).get(key) or []
    if not _is_list_of_objects(items):
        raise DataError(f'"{key}" is not a list of objects')
    return items


def _parse_whole_number(value: Mapping[str, Any], key: str) -> int:
    """Return a field's whole number, which is at least 0 and may be written as text."""
    number = value.get(key)
    if isinstance(number, str) and re.fullmatch("[0-9]{1,9}", number.strip()):
        return int(number)
    if type(number) is not int or number < 0:
        raise DataError(f'"{key}" is not a whole number')
    return number


def _parse_confidence(value: object) -> float | None:
    """Return a confidence as a number; None if there is none."""
    try:
        return float(str(value)) if value is not None else None
    except ValueError:
        raise DataError("a confidence is not a number") from None


def join_passages(passages: Iterable[Mapping[str, Any]]) -> str:
    """Return the text of a document, with its passages at their offsets.

    If a passage has no text, its sentences are used.

    Raises:
        DataError: Passages overlap, or are far apart.
    """
    text = ""
    gaps_left = _MAX_GAPS
    for passage in passages:
        sentences: Sequence[Any] = ()
        if not passage.get("text"):
            sentences = require_objects(passage, "sentences")
        for part in sentences or [passage]:
            part_text = part.get("text") or ""
            gap = _parse_whole_number(part, "offset") - len(text)
            gaps_left -= gap
            if gap < 0 or gaps_left < 0 or not isinstance(part_text, str):
                raise DataError(
                    "a passage overlaps the one before it, or starts far after it"
                )
            if part is passage and gap > 0:
                text += " " * (gap - 1) + "\n"
            else:
                text += " " * gap
            text += part_text
    return text


# ---- writing -------------------------------------------------------------------------


def write(documents: Iterable[Document], path: str | os.PathLike[str]) -> None:
    """Write a collection from which `read` returns equal documents.

    Only characters that XML forbids are lost.
    """
    values = [_to_json(document) for document in documents]
    collection: dict[str, Any] = {
        "source": "fednotes",
        "date": "",
        "key": "",
        "infons": {},
    }
    if Path(path).suffix == ".json":
        content = {**collection, "documents": values}
        write_out(Path(path), json.dumps(content, ensure_ascii=False, indent=1) + "\n")
        return
    root = _json_to_element("collection", collection)
    root.extend(_json_to_element("document", value) for value in values)
    ElementTree.indent(root, "")
    xml = ElementTree.tostring(root, encoding="unicode").replace("\r", "&#13;")
    write_out(Path(path), f'<?xml version="1.0" encoding="UTF-8"?>\n{xml}\n')


def _to_json(document: Document) -> dict[str, Any]:
    """Return a document as BioC's JSON."""
    require_short_mentions(document)
    try:
        return _to_json_with(document, as_mapping(document.meta.get("bioc")))
    except (AttributeError, KeyError, TypeError, ValueError):
        # `meta["bioc"]` was not written by this reader.
        return _to_json_with(document, {})


def _to_json_with(document: Document, details: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document as BioC's JSON.

    Args:
        document: The document.
        details: The other parts of it that were read (`meta["bioc"]`).
    """
    meta = {name: value for name, value in document.meta.items() if name != "bioc"}
    fields = jsonl.list_other_fields(replace(document, meta=meta))
    if not _can_be_id(document.id):
        fields["id"] = document.id
    infons = dict(as_mapping(details.get("infons")))
    if fields:
        infons[_OWN_INFON] = jsonl.to_json(document, fields, ascii=True)
    passages = _make_passages(document.text, details)
    written_ids = _add_annotations(document, passages, details.get("annotations", ()))
    relations = [
        relation
        for relation in details.get("relations", ())
        if all(
            as_mapping(node).get("refid") in written_ids
            for node in as_mapping(relation).get("nodes", ())
        )
    ]
    return {
        "id": document.id,
        "infons": infons,
        "passages": passages,
        "annotations": [],
        "relations": relations,
    }


def _can_be_id(id: str) -> bool:
    """Return whether an id survives writing to XML and reading."""
    return bool(id) and id == id.strip() and not FORBIDDEN.search(id)


def _add_annotations(
    document: Document,
    passages: Sequence[Mapping[str, Any]],
    read_annotations: Iterable[Any],
) -> set[str]:
    """Add the mentions of a document to its passages; return their ids."""
    annotations = list(read_annotations)
    take_stored_row = jsonl.make_row_finder(annotations)
    used_ids = {annotation.get("id") for annotation in annotations}
    new_ids = (f"T{number}" for number in count(1) if f"T{number}" not in used_ids)
    written_ids: set[str] = set()
    for span in document.spans:
        row = take_stored_row(span)
        id = row.get("id") or next(new_ids)
        written_ids.add(id)
        infons = {"type": span.label}
        if span.confidence is not None:
            infons["confidence"] = repr(round(span.confidence, 6))
        passage = [p for p in passages if p["offset"] <= span.start][-1]
        passage["annotations"].append(
            {
                "id": id,
                "infons": {**infons, **row.get("infons", {})},
                "locations": _make_locations(span),
                "text": " ".join(document.text[a:b] for a, b in span.pieces),
            }
        )
    return written_ids


def _make_locations(span: Span) -> list[dict[str, int]]:
    """Return the locations of a mention, one for each piece."""
    return [{"offset": start, "length": end - start} for start, end in span.pieces]


def _make_passages(text: str, details: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the passages of a document, without annotations.

    They are those that were read if these still make up the text, otherwise one.

    Args:
        text: The text of the document.
        details: What was read of it (`meta["bioc"]`).
    """
    layout = list(details.get("passages", ()))
    starts = [start for start, _ in layout]
    ends = [*(start - 1 for start in starts[1:]), len(text)]
    passages = [
        _make_passage(start, text[start:end], infons)
        for (start, infons), end in zip(layout, ends, strict=False)
    ]
    if not passages or starts[0] != 0 or join_passages(passages) != text:
        return [_make_passage(0, text, {})]
    return passages


def _make_passage(offset: int, text: str, infons: Mapping[str, Any]) -> dict[str, Any]:
    """Return a passage without annotations."""
    return {
        "offset": offset,
        "infons": dict(infons),
        "text": text,
        "sentences": [],
        "annotations": [],
        "relations": [],
    }


def _json_to_element(tag: str, value: Mapping[str, Any]) -> ElementTree.Element:
    """Return an object of BioC's JSON as XML."""
    element = ElementTree.Element(tag)
    for key, content in value.items():
        if key == "infons":
            for name, infon in content.items():
                child = ElementTree.SubElement(
                    element, "infon", key=_replace_forbidden(name)
                )
                child.text = _replace_forbidden(infon)
        elif key in _SINGULAR:
            element.extend(_json_to_element(_SINGULAR[key], item) for item in content)
        elif tag in ("location", "node") or (key == "id" and tag != "document"):
            element.set(key, _replace_forbidden(content))
        else:
            ElementTree.SubElement(element, key).text = _replace_forbidden(content)
    return element


def _replace_forbidden(text: object) -> str:
    """Return a text with U+FFFD for each character that XML forbids."""
    return FORBIDDEN.sub("\ufffd", str(text))
