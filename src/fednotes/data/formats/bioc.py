"""BioC, XML or JSON: documents of passages, with annotations at offsets of the
document.

    <document><id>n1</id><passage><offset>0</offset><text>Had a rash.</text>
      <annotation id="T1"><infon key="type">ADE</infon>
        <location offset="6" length="4"/><text>rash</text></annotation></passage></document>

The infon "type" is a mention's type, "confidence" a model's; several locations are one
mention in pieces. Passages, relations and other infons are kept in `meta["bioc"]` and
come out again. What BioC has no place for stands as JSON in the document's infon
"fednotes". XML is written unless the file's name ends in .json; in it, characters that
XML forbids become U+FFFD.
"""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from defusedxml.common import DefusedXmlException
from defusedxml.ElementTree import XMLParser

from fednotes.core import bounds
from fednotes.core.errors import DataError
from fednotes.core.parsing import mapping
from fednotes.core.store import write_out
from fednotes.core.types import Document
from fednotes.data.formats import jsonl
from fednotes.data.formats.files import (
    READ_ERRORS,
    incomplete_file,
    open_bytes,
    read_first_line,
    read_head,
)
from fednotes.data.formats.folders import find_corpus_files
from fednotes.data.formats.gathering import ReadDocument, gather, stream_files
from fednotes.data.formats.json_files import parse_json_line, read_json, read_json_keys
from fednotes.data.formats.problems import Problems

LOOSE = 0
_LISTS = {
    name: f"{name}s"
    for name in "passage sentence annotation relation location node".split()
}
_PIECE = 1 << 16  # bytes that are parsed at a time
_GAP = 1 << 20  # characters between the passages of a document, at most
_FORBIDDEN = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_OWN = "fednotes"


def accepts(path: Path) -> bool:
    """Whether the file is XML with a collection, or JSON with passages and infons."""
    lines = read_head(path)
    if lines and lines[0].startswith("<"):
        return any("<collection" in line for line in lines[:10])
    keys = read_json_keys(path)
    return not keys & {"text", "[", "resourceType"} and bool(
        "documents" in keys or {"infons", "passages"} <= keys
    )


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """A document for each of the collections' documents; passages lie where their
    offsets say.

    Noted are passages that overlap, mentions without a type, and mentions that are not
    what the text holds there.
    """
    return gather(find_corpus_files(path, accepts, "BioC"), _read_file, problems)


def stream(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    """Yield what `read` returns, a document at a time; BioC's JSON is held."""
    return stream_files(find_corpus_files(path, accepts, "BioC"), _read_file, problems)


def _read_file(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    if read_first_line(path).startswith("<"):
        items: Iterable[Any] = _elements(path)
    else:
        value = read_json(path)
        items = mapping(value).get("documents", [value])
        if not isinstance(items, list) or not all(
            isinstance(own, dict) for own in items
        ):
            raise DataError('"documents" is no list of objects')
    return jsonl.parse_items(items, "document", _record, path, problems)


def _elements(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the documents of an XML file, one by one, as they stand in BioC's JSON.

    Each is bounded in depth, elements and characters, and goes when it has been given.
    """
    builder = _Builder()
    parser = XMLParser(target=builder)
    unread = 0  # bytes in which nothing began, ended or went on
    with open_bytes(path) as file:
        more = True
        while more:
            before = builder.events
            try:
                data = file.read(_PIECE)
                more = bool(data)
                if more:
                    parser.feed(data)
                else:
                    parser.close()
            except ElementTree.ParseError as error:
                told = "this is no whole XML: expected a collection of BioC"
                raise DataError.at(path, error.position[0], told) from None
            except DefusedXmlException:
                raise DataError(
                    "the XML declares entities, which are not read"
                ) from None
            except READ_ERRORS as error:
                raise incomplete_file(path, error) from None
            unread = 0 if builder.events > before else unread + len(data)
            if unread > bounds.MARKUP:
                told = f"a tag or a comment has more than {bounds.MARKUP:,} bytes"
                line = parser.parser.CurrentLineNumber
                raise DataError.at(path, line, f"{told}: is the file BioC?")
            while builder.documents:
                yield _plain(builder.documents.popleft())


class _Builder(ElementTree.TreeBuilder):
    """Builds the documents of a collection, and forgets each that was taken."""

    def __init__(self) -> None:
        super().__init__()
        self.documents: deque[ElementTree.Element] = deque()
        self.events = 0
        self._depth = self._elements = self._characters = 0

    def start(self, tag: str, attrs: dict[str, str]) -> ElementTree.Element:
        """Begin an element. Raises DataError beyond the bounds of a document."""
        self.events += 1
        self._depth += 1
        self._elements += 1
        if self._depth > bounds.JSON_DEPTH or self._elements > bounds.JSON_VALUES:
            raise DataError(
                "a document of more elements, or deeper ones, than are read"
            )
        return super().start(tag, attrs)

    def data(self, data: str) -> None:
        """Take in characters. Raises DataError where a document has too many."""
        self.events += 1
        self._characters += len(data)
        if self._characters > bounds.FILE:
            told = f"a document has more than {bounds.FILE:,} characters"
            raise DataError(f"{told}: is the file BioC?")
        super().data(data)

    def end(self, tag: str) -> ElementTree.Element:
        """End an element."""
        self.events += 1
        self._depth -= 1
        element = super().end(tag)
        if tag == "document":
            whole = ElementTree.Element(tag, element.attrib)
            whole.extend(list(element))
            self.documents.append(whole)
            element.clear()
            self._elements = self._characters = 0
        return element


def _plain(element: ElementTree.Element) -> dict[str, Any]:
    found: dict[str, Any] = dict(element.attrib)
    for child in element:
        if child.tag == "infon":
            found.setdefault("infons", {})[child.get("key", "")] = child.text or ""
        elif child.tag in _LISTS:
            found.setdefault(_LISTS[child.tag], []).append(_plain(child))
        else:
            found[child.tag] = child.text or ""
    return found


def _record(value: Any, noting: jsonl.MentionContext) -> dict[str, Any]:
    """A document of BioC as a record of JSONL."""
    passages = objects(value, "passages")
    text = laid(passages)
    parts: list[Any] = [
        value,
        *passages,
        *(s for p in passages for s in objects(p, "sentences")),
    ]
    spans, known = [], []
    for annotation in (a for part in parts for a in objects(part, "annotations")):
        with noting():
            infons = dict(mapping(annotation.get("infons")))
            label, sure = infons.pop("type", None), infons.pop("confidence", None)
            places = [
                (start, start + _int(place, "length"))
                for place in objects(annotation, "locations")
                for start in [_int(place, "offset")]
            ]
            form = annotation.get("text") or None
            span = jsonl.make_mention(text, places, label, form, _float(sure))
            spans.append(span)
            known.append(
                {"id": str(annotation.get("id", "")), "span": span, "infons": infons}
            )
    relations = [
        {"id": str(r.get("id", "")), "infons": mapping(r.get("infons")), "nodes": nodes}
        for part in parts
        for r in objects(part, "relations")
        for nodes in [objects(r, "nodes")]
    ]
    infons = dict(mapping(value.get("infons")))
    own = infons.pop(_OWN, None)
    rest = dict(mapping(parse_json_line(own))) if isinstance(own, str) else {}
    bounds = [[_int(p, "offset"), mapping(p.get("infons"))] for p in passages]
    kept = {
        "infons": infons,
        "passages": bounds if len(bounds) > 1 or any(row[1] for row in bounds) else [],
        "annotations": known if relations or any(a["infons"] for a in known) else [],
        "relations": relations,
    }
    if kept := {name: held for name, held in kept.items() if held}:
        rest["meta"] = {**mapping(rest.get("meta")), "bioc": kept}
    return {"id": value.get("id"), **rest, "text": text, "spans": spans}


def objects(value: Any, key: str) -> list[Any]:
    """The objects of a list in an object. Raises DataError."""
    found = mapping(value).get(key) or []
    if not isinstance(found, list) or not all(isinstance(own, dict) for own in found):
        raise DataError(f'"{key}" is no list of objects')
    return found


def _int(value: Mapping[str, Any], key: str) -> int:
    found = value.get(key)
    if isinstance(found, str) and re.fullmatch("[0-9]{1,9}", found.strip()):
        return int(found)
    if type(found) is not int or found < 0:
        raise DataError(f'"{key}" is no whole number')
    return found


def _float(value: object) -> float | None:
    try:
        return float(str(value)) if value is not None else None
    except ValueError:
        raise DataError("a confidence is no number") from None


def laid(passages: Iterable[Mapping[str, Any]]) -> str:
    """The text of a document: passages, or their sentences, where their offsets put
    them."""
    text, spare = "", _GAP
    for passage in passages:
        sentences = [] if passage.get("text") else objects(passage, "sentences")
        for part in sentences or [passage]:
            own, gap = part.get("text") or "", _int(part, "offset") - len(text)
            spare -= gap
            if gap < 0 or spare < 0 or not isinstance(own, str):
                raise DataError(
                    "a passage overlaps the one before, or lies far behind it"
                )
            text += f"{' ' * (gap - 1)}\n"[:gap] if part is passage else " " * gap
            text += own
    return text


def write(documents: Iterable[Document], path: str | os.PathLike[str]) -> None:
    """Writes a collection; `read` gives the same documents, but for characters of no
    XML."""
    made = [_whole(document) for document in documents]
    collection: dict[str, Any] = {
        "source": "fednotes",
        "date": "",
        "key": "",
        "infons": {},
    }
    if Path(path).suffix == ".json":
        whole = collection | {"documents": made}
        write_out(Path(path), json.dumps(whole, ensure_ascii=False, indent=1) + "\n")
        return
    root = _element("collection", collection)
    root.extend(_element("document", own) for own in made)
    ElementTree.indent(root, "")
    text = ElementTree.tostring(root, encoding="unicode").replace("\r", "&#13;")
    write_out(Path(path), f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n')


def _whole(document: Document) -> dict[str, Any]:
    try:
        return _document(document, mapping(document.meta.get("bioc")))
    except (AttributeError, KeyError, TypeError, ValueError):
        # others' values under that key
        return _document(document, {})


def _document(document: Document, kept: Mapping[str, Any]) -> dict[str, Any]:
    """A document in BioC's JSON. kept: what was read of it besides text and mentions."""
    meta = {name: value for name, value in document.meta.items() if name != "bioc"}
    rest = jsonl.other_fields(replace(document, meta=meta))
    if (
        document.id != document.id.strip()
        or not document.id
        or _FORBIDDEN.search(document.id)
    ):
        rest["id"] = document.id
    own = {_OWN: jsonl.to_json(document, rest, ascii=True)} if rest else {}
    passages = _passages(document.text, kept)
    known = jsonl.rows_by_span(kept.get("annotations", ()))
    ids = {value.get("id") for value in kept.get("annotations", ())}
    fresh = (name for n in range(1, 1 << 30) if (name := f"T{n}") not in ids)
    held: set[str] = set()
    for span, raw in zip(
        document.spans, jsonl.to_record(document)["spans"], strict=True
    ):
        same = known(span)
        name = same.get("id") or next(fresh)
        held.add(name)
        sure = {"confidence": repr(raw["confidence"])} if "confidence" in raw else {}
        annotation = {
            "id": name,
            "infons": {"type": span.label, **sure, **same.get("infons", {})},
            "locations": [{"offset": a, "length": b - a} for a, b in span.pieces],
            "text": " ".join(document.text[a:b] for a, b in span.pieces),
        }
        within = [p for p in passages if p["offset"] <= span.start]
        within[-1]["annotations"].append(annotation)
    relations = [
        relation
        for relation in kept.get("relations", ())
        if all(
            mapping(n).get("refid") in held for n in mapping(relation).get("nodes", ())
        )
    ]
    infons = {**mapping(kept.get("infons")), **own}
    made: dict[str, Any] = {"id": document.id, "infons": infons, "passages": passages}
    return made | {"annotations": [], "relations": relations}


def _passages(text: str, kept: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The passages that were read, if the text is still theirs; else one."""
    rows = [(start, own) for start, own in kept.get("passages", ())]
    ends = [*(offset - 1 for offset, _ in rows[1:]), len(text)][: len(rows)]
    found = [
        (start, text[start:end], own)
        for (start, own), end in zip(rows, ends, strict=True)
    ]
    if not found or found[0][0] != 0 or laid(_passage(*row) for row in found) != text:
        found = [(0, text, {})]
    return [_passage(*row) for row in found]


def _passage(offset: int, text: str, infons: Mapping[str, Any]) -> dict[str, Any]:
    held: dict[str, Any] = {"offset": offset, "infons": dict(infons), "text": text}
    return held | {"sentences": [], "annotations": [], "relations": []}


def _element(tag: str, value: Mapping[str, Any]) -> ElementTree.Element:
    """The XML of what BioC's JSON holds."""
    found = ElementTree.Element(tag)
    singular = {many: one for one, many in _LISTS.items()}
    for key, held in value.items():
        if key == "infons":
            for name, told in held.items():
                ElementTree.SubElement(found, "infon", key=_safe(name)).text = _safe(
                    told
                )
        elif key in singular:
            found.extend(_element(singular[key], own) for own in held)
        elif tag in ("location", "node") or (key == "id" and tag != "document"):
            found.set(key, _safe(held))
        else:
            ElementTree.SubElement(found, key).text = _safe(held)
    return found


def _safe(text: object) -> str:
    return _FORBIDDEN.sub("\ufffd", str(text))
