"""UIMA CAS in XMI, as INCEpTION, WebAnno and DKPro write it.

    <type:NamedEntity xmi:id="9" sofa="1" begin="4" end="8" value="ADE"/>
    <cas:Sofa xmi:id="1" sofaID="_InitialView" sofaString="Had rash."/>
    <cas:View sofa="1" members="9"/>

Offsets count UTF-16 units. The annotations of one layer are the mentions, and one of
its features is their type (`layers.py`). Types derived from the layer belong to it; the
type system that says so is `TypeSystem.xml` beside the file, or in the same ZIP
archive, as INCEpTION exports it. Sentences and tokens are those of DKPro. Annotations
of other layers are counted but not read.
"""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple
from xml.sax.saxutils import quoteattr

from fednotes.core import bounds
from fednotes.core.errors import DataError
from fednotes.core.store import write_out
from fednotes.core.types import Document
from fednotes.data.formats import jsonl, layers
from fednotes.data.formats.choices import get_choice
from fednotes.data.formats.file_names import file_of_id, id_of_file
from fednotes.data.formats.files import (
    open_bytes,
    open_file,
    read_start,
    remove_packed_suffix,
    starts_with,
)
from fednotes.data.formats.folders import find_file
from fednotes.data.formats.gathering import ReadDocument
from fednotes.data.formats.layered_files import DocumentLayers, LayeredFormat
from fednotes.data.formats.layers import Layer
from fednotes.data.formats.problems import Problems
from fednotes.data.formats.uima_types import TypeSystem, parse_type_system
from fednotes.data.formats.utf16 import Utf16Units
from fednotes.data.formats.xml_files import FORBIDDEN, Element, parse_elements

LOOSE = 0
CHOICE = layers.CHOICE
_SUFFIX = ".xmi"
_TYPE_SYSTEMS = ("TypeSystem.xml", "typesystem.xml")
_XMI_MARK = "http://www.omg.org/XMI"
_ZIP = b"PK\x03\x04"
_VIEW = "_InitialView"  # the text that tools annotate
_SEGMENTATION = "de.tudarmstadt.ukp.dkpro.core.api.segmentation.type"
_SENTENCE = f"{_SEGMENTATION}.Sentence"
_TOKEN = f"{_SEGMENTATION}.Token"
_NO_NAMESPACE = "uima.noNamespace."
_STANDARD = {"xmi:id", "sofa", "begin", "end"}
_NOT_TEXT = re.compile(r"[-+0-9.eE ]*|true|false|NaN|-?Infinity")
_LAYER_PREFIX = "layer"
_SEGMENTATION_PREFIX = "segmentation"


class _Annotation(NamedTuple):
    """An element with a place in a text.

    Attributes:
        id: Its xmi:id.
        type: The full name of its type.
        sofa: The xmi:id of its text.
        begin: Its first UTF-16 unit.
        end: The unit after its last one.
        features: All attributes.
    """

    id: str
    type: str
    sofa: str
    begin: int
    end: int
    features: Mapping[str, str]


class _Sofa(NamedTuple):
    """A text; `view` is the name of the view to which it belongs."""

    id: str
    view: str
    text: str | None


@dataclass
class _Cas:
    """The content of an XMI file.

    Attributes:
        id: The id of its document.
        types: Its type system; empty if there is none.
        sofas: Its texts.
        members: The ids of a view's members, by the id of its text.
        annotations: Its annotations.
    """

    id: str
    types: TypeSystem
    sofas: list[_Sofa] = field(default_factory=list)
    members: dict[str, set[str]] = field(default_factory=dict)
    annotations: list[_Annotation] = field(default_factory=list)


# ---- reading -------------------------------------------------------------------------


def accepts(path: Path) -> bool:
    """Return whether the file is XMI, is called .xmi, or is a ZIP archive of XMI."""
    if remove_packed_suffix(path).suffix.lower() == _SUFFIX:
        return True
    if starts_with(path, (_ZIP,)):
        with suppress(DataError), _opening_archive(path) as archive:
            return bool(_list_xmi_members(archive))
        return False
    return _XMI_MARK in read_start(path)


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """Return a document for each XMI file; its id is the name of the file.

    These problems are collected: files that are not XMI or have no text, and mentions
    outside the text. Annotations without a label or without text, and those of other
    layers, are ignored and counted.
    """
    return _make_format().read(path, problems)


def stream(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    """Yield the documents of `read` one by one."""
    return _make_format().stream(path, problems)


def _make_format() -> LayeredFormat:
    """Return the format, whose mentions are in one layer."""
    return LayeredFormat("UIMA XMI", accepts, _find_layers, _read_file)


def _find_layers(base: Path, file: Path) -> Iterator[DocumentLayers]:
    """Yield the layers of each document of a file."""
    for cas in _load_contents(base, file):
        used = {
            layer
            for annotation in cas.annotations
            for layer in _list_layers(annotation, cas.types)
        }
        yield DocumentLayers(used, declared=set(cas.types.list_layers()))


def _list_layers(annotation: _Annotation, types: TypeSystem) -> Iterator[Layer]:
    """Yield the layer of an annotation with each of its features that is a string."""
    if {"Governor", "Dependent"} <= annotation.features.keys():
        return  # a relation between two annotations
    for name, value in annotation.features.items():
        if name in _STANDARD:
            continue
        layer = types.find_layer(annotation.type, name)
        if layer is None:
            if not _NOT_TEXT.fullmatch(value):
                yield Layer(annotation.type, name)
        elif types.has_string(layer):
            yield layer


def _read_file(
    base: Path, layer: Layer, path: Path, problems: Problems
) -> Iterator[ReadDocument]:
    """Yield the documents of a file, with the mentions of a layer."""
    to_record = partial(_to_record, layer=layer, ignored=problems.ignored)
    return jsonl.parse_items(
        _load_contents(base, path), "document", to_record, path, problems
    )


def _to_record(
    cas: _Cas, context: jsonl.MentionContext, layer: Layer, ignored: Counter[str]
) -> dict[str, Any]:
    """Return the content of an XMI file as a record of JSONL."""
    sofa = _choose_sofa(cas.sofas)
    if sofa.text is None:
        raise DataError("its text is in another file, which is not read")
    units = Utf16Units(sofa.text)
    members = cas.members.get(sofa.id)
    spans = []
    places: dict[str, list[tuple[int, int]]] = {_SENTENCE: [], _TOKEN: []}
    for annotation in cas.annotations:
        if annotation.sofa != sofa.id or (
            members is not None and annotation.id not in members
        ):
            continue
        if annotation.type in places:
            with suppress(DataError):
                places[annotation.type].append(_to_characters(annotation, units))
        elif not cas.types.is_derived_from(annotation.type, layer.type):
            if layers.can_hold_mentions(annotation.type):
                ignored["annotations of other layers"] += 1
        elif not annotation.features.get(layer.feature):
            ignored["annotations without a label"] += 1
        elif annotation.begin == annotation.end:
            ignored["annotations without text"] += 1
        else:
            with context():
                place = _to_characters(annotation, units)
                label = annotation.features[layer.feature]
                spans.append(jsonl.make_mention(sofa.text, [place], label))
    return {
        "id": cas.id,
        "text": sofa.text,
        "spans": spans,
        "sentences": _sort_places(places[_SENTENCE], len(sofa.text), ignored),
        "tokens": _sort_places(places[_TOKEN], len(sofa.text), ignored),
    }


def _choose_sofa(sofas: Sequence[_Sofa]) -> _Sofa:
    """Return the text that is annotated.

    Raises:
        DataError: There is none, or there are several.
    """
    chosen_sofas = [sofa for sofa in sofas if sofa.view == _VIEW] or sofas
    if len(chosen_sofas) != 1:
        raise DataError(
            f"it has {len(sofas)} texts (sofa), and none of them is the {_VIEW}: "
            "export one text per file"
        )
    return chosen_sofas[0]


def _to_characters(annotation: _Annotation, units: Utf16Units) -> tuple[int, int]:
    """Return the place of an annotation in characters.

    Raises:
        DataError: It begins or ends inside a character.
    """
    begin = units.to_character(annotation.begin)
    end = units.to_character(annotation.end)
    if begin is None or end is None:
        raise DataError(
            f"{annotation.begin}:{annotation.end} begins or ends inside a character"
        )
    return begin, end


def _sort_places(
    places: Iterable[tuple[int, int]], length: int, ignored: Counter[str]
) -> list[list[int]]:
    """Return the places of sentences or tokens in order; [] if they overlap.

    Args:
        places: The places.
        length: The length of the text; places beyond it are left out.
        ignored: Counts the cases of overlap.
    """
    ordered = sorted({place for place in places if place[0] < place[1] <= length})
    last_end = 0
    for begin, end in ordered:
        if begin < last_end:
            ignored["tokens or sentences that overlap"] += 1
            return []
        last_end = end
    return [list(place) for place in ordered]


# ---- files and archives --------------------------------------------------------------


def _load_contents(base: Path, path: Path) -> Iterator[_Cas]:
    """Yield the content of an XMI file, or of each one in a ZIP archive.

    Args:
        base: The folder to which ids are relative.
        path: The file.

    Raises:
        DataError: Something cannot be read.
    """
    stem = _remove_suffixes(path.relative_to(base))
    if not starts_with(path, (_ZIP,)):
        types = _find_types(base, path)
        with open_bytes(path) as file:
            yield _parse_content(file, path, _Cas(id_of_file(stem), types))
        return
    with _opening_archive(path) as archive:
        members = _list_xmi_members(archive)
        types = TypeSystem()
        for info in archive.infolist():
            if PurePosixPath(info.filename).name in _TYPE_SYSTEMS:
                types = parse_type_system(_open_member(archive, info, path), path)
        for info in members:
            name = stem
            if len(members) > 1:
                name = stem / _remove_suffixes(PurePosixPath(info.filename))
            file = _open_member(archive, info, path)
            yield _parse_content(file, path, _Cas(id_of_file(name), types))


def _remove_suffixes(path: PurePosixPath | Path) -> PurePosixPath:
    """Return a path without .xmi, .zip or .xml, and without .gz or .zst."""
    unpacked = remove_packed_suffix(Path(path))
    if unpacked.suffix.lower() in (_SUFFIX, ".zip", ".xml"):
        unpacked = unpacked.with_suffix("")
    return PurePosixPath(unpacked)


def _find_types(base: Path, path: Path) -> TypeSystem:
    """Return the type system beside a file or in the corpus's folder."""
    for name in _TYPE_SYSTEMS:
        file = find_file(name, (path.parent, base), base)
        if file is not None:
            with open_bytes(file) as stream:
                return parse_type_system(stream, file)
    return TypeSystem()


@contextmanager
def _opening_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a ZIP archive.

    Raises:
        DataError: It is not a ZIP archive, or is damaged or too large.
    """
    with open_file(path) as file:
        if file.seek(0, os.SEEK_END) > bounds.PACKED_FREE:
            raise DataError.at(
                path,
                0,
                f"the archive has more than {bounds.PACKED_FREE:,} bytes: unpack it, "
                "and give the folder",
            )
        try:
            archive = zipfile.ZipFile(file)
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
            raise DataError.at(
                path, 0, "the ZIP archive is damaged: export it again"
            ) from None
        with archive:
            yield archive


def _list_xmi_members(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Return the entries of the XMI files in an archive, sorted by name."""
    infos = [
        info for info in archive.infolist() if info.filename.lower().endswith(_SUFFIX)
    ]
    return sorted(infos, key=lambda info: info.filename)


def _open_member(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path
) -> BinaryIO:
    """Return a file of an archive, unpacked within bounds.

    Raises:
        DataError: It is too large, grows too much, or cannot be unpacked.
    """
    limit = max(bounds.PACKED_FREE, bounds.PACKED_RATIO * info.compress_size)
    if info.file_size > min(limit, bounds.FILE):
        raise DataError.at(
            path, 0, "a file in the archive is too large: unpack it if you trust it"
        )
    try:
        return BytesIO(archive.read(info))
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        OSError,
        ValueError,
        RuntimeError,  # the archive is encrypted; its subclass: an unknown compression
    ):
        raise DataError.at(
            path,
            0,
            "a file in the ZIP archive cannot be unpacked: export it again, without a "
            "password",
        ) from None


# ---- parsing -------------------------------------------------------------------------


def _parse_content(file: BinaryIO, path: Path, cas: _Cas) -> _Cas:
    """Add the texts, views and annotations of an XMI file to a CAS; return it.

    Raises:
        DataError: The file is not XMI, is unsafe, or has too many elements.
    """
    namespaces: dict[str, str] = {}
    has_root = False
    elements = parse_elements(file, path, can_have_doctype=False, max_tag=bounds.FILE)
    for element in elements:
        if element.attributes is None:
            continue
        _add_namespaces(namespaces, element.attributes)
        prefix, _, name = element.name.rpartition(":")
        namespace = namespaces.get(prefix, "")
        has_root = has_root or (namespace == _XMI_MARK and name == "XMI")
        if namespace.endswith("uima/cas.ecore"):
            _add_part_of_cas(cas, name, element.attributes)
        elif {"sofa", "begin", "end"} <= element.attributes.keys():
            type = _make_type_name(namespace, name)
            cas.annotations.append(_parse_annotation(element, type, path))
        if len(cas.annotations) > bounds.TOKENS + bounds.MENTIONS:
            raise DataError.at(
                path,
                element.line,
                f"more than {bounds.TOKENS + bounds.MENTIONS:,} annotations: split it "
                "into notes",
            )
    if not has_root:
        raise DataError.at(path, 0, "it has no element xmi:XMI: check that it is XMI")
    return cas


def _add_namespaces(namespaces: dict[str, str], attributes: Mapping[str, str]) -> None:
    """Add the namespaces that an element declares, by prefix."""
    for name, value in attributes.items():
        if name.startswith("xmlns:"):
            namespaces[name.removeprefix("xmlns:")] = value


def _make_type_name(namespace: str, name: str) -> str:
    """Return the full name of a type, such as "webanno.custom.Finding"."""
    package = namespace.removeprefix("http:///").removesuffix(".ecore")
    return f"{package}/{name}".replace("/", ".").removeprefix(_NO_NAMESPACE)


def _add_part_of_cas(cas: _Cas, name: str, attributes: Mapping[str, str]) -> None:
    """Add a text or a view; ignore other parts.

    Args:
        cas: The content to which it is added.
        name: The name of the element, without prefix.
        attributes: The attributes of the element.
    """
    if name == "Sofa":
        id = attributes.get("xmi:id", "")
        view = attributes.get("sofaID", "")
        text = attributes.get("sofaString")
        if (
            text is None
            and "sofaURI" not in attributes
            and "sofaArray" not in attributes
        ):
            text = ""
        cas.sofas.append(_Sofa(id, view, text))
    elif name == "View":
        members = cas.members.setdefault(attributes.get("sofa", ""), set())
        members.update(attributes.get("members", "").split())


def _parse_annotation(element: Element, type: str, path: Path) -> _Annotation:
    """Return an element's annotation; raise DataError if an offset is not a number."""
    attributes = element.attributes or {}
    offsets = (attributes["begin"], attributes["end"])
    if not all(re.fullmatch("[0-9]{1,9}", offset) for offset in offsets):
        raise DataError.at(
            path, element.line, "the begin or end of an annotation is not a number"
        )
    return _Annotation(
        id=attributes.get("xmi:id", ""),
        type=type,
        sofa=attributes["sofa"],
        begin=int(attributes["begin"]),
        end=int(attributes["end"]),
        features=attributes,
    )


# ---- writing -------------------------------------------------------------------------


def write(documents: Iterable[Document], path: str | os.PathLike[str]) -> None:
    """Write an XMI file per document into a folder, and their type system.

    The mentions are in the layer that the user chooses, or are named entities. A
    mention of several pieces becomes one stretch. Characters that XML forbids become
    U+FFFD.

    Raises:
        DataError: The path is a file.
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise DataError(
            f"{folder} is a file, but UIMA XMI needs a folder: give the folder that "
            "contains the files"
        )
    layer = layers.choose_layer_to_write(get_choice())
    write_out(folder / _TYPE_SYSTEMS[0], _make_type_system(layer))
    for document in documents:
        name = f"{file_of_id(document.id)}{_SUFFIX}"
        write_out(folder / name, _to_xmi(document, layer))


def _to_xmi(document: Document, layer: Layer) -> str:
    """Return a document as XMI."""
    units = Utf16Units(document.text)
    rows: list[tuple[str, int, int, str]] = []
    for type, places in (
        ("Sentence", document.sentences),
        ("Token", document.tokens),
    ):
        rows += [(f"{_SEGMENTATION_PREFIX}:{type}", a, b, "") for a, b in places]
    name = f"{_LAYER_PREFIX}:{layer.type.rpartition('.')[2]}"
    for span in document.spans:
        label = f" {layer.feature}={_quote_attribute(span.label)}"
        rows.append((name, span.start, span.end, label))
    lines = [
        f'<{tag} xmi:id="{id}" sofa="1" begin="{units.to_unit(begin)}" '
        f'end="{units.to_unit(end)}"{feature}/>'
        for id, (tag, begin, end, feature) in enumerate(rows, 2)
    ]
    members = " ".join(str(id) for id in range(2, len(rows) + 2))
    return "\n".join(
        (
            '<?xml version="1.0" encoding="UTF-8"?>',
            f'<xmi:XMI xmlns:xmi="{_XMI_MARK}" xmlns:cas="http:///uima/cas.ecore" '
            f'xmlns:{_SEGMENTATION_PREFIX}="{_make_namespace(_TOKEN)}" '
            f'xmlns:{_LAYER_PREFIX}="{_make_namespace(layer.type)}" xmi:version="2.0">',
            '<cas:NULL xmi:id="0"/>',
            *lines,
            f'<cas:Sofa xmi:id="1" sofaNum="1" sofaID="{_VIEW}" mimeType="text/plain" '
            f"sofaString={_quote_attribute(document.text)}/>",
            f'<cas:View sofa="1" members="{members}"/>',
            "</xmi:XMI>\n",
        )
    )


def _quote_attribute(text: str) -> str:
    """Return a text as a quoted attribute, with line ends and tabs as references."""
    return quoteattr(FORBIDDEN.sub("\ufffd", text))


def _make_namespace(type: str) -> str:
    """Return the XML namespace of a type."""
    package = type.rpartition(".")[0] or _NO_NAMESPACE.removesuffix(".")
    return f"http:///{package.replace('.', '/')}.ecore"


def _make_type_system(layer: Layer) -> str:
    """Return a type system with the written types only."""
    types = "".join(
        f"<typeDescription><name>{name}</name><description/>"
        f"<supertypeName>uima.tcas.Annotation</supertypeName>{features}"
        "</typeDescription>\n"
        for name, features in (
            (_SENTENCE, ""),
            (_TOKEN, ""),
            (
                layer.type,
                "<features><featureDescription>"
                f"<name>{layer.feature}</name><description/>"
                "<rangeTypeName>uima.cas.String</rangeTypeName>"
                "</featureDescription></features>",
            ),
        )
    )
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        '<typeSystemDescription xmlns="http://uima.apache.org/resourceSpecifier">\n'
        f"<types>\n{types}</types>\n</typeSystemDescription>\n"
    )
