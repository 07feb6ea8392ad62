"""Apache cTAKES' output: the concepts (CUIs) of notes, from XMI or from flat files.

    XMI    one file a note: textsem:…Mention → ontologyConceptArr → refsem:UmlsConcept cui
    flat   a line a patient or note: an id, then CUIs; or a folder of files NAME.txt of CUIs only

In XMI a mention of polarity −1 is negated, one whose subject is another than the patient is of
the family, a conditional one is hypothetical. In flat files a CUI with a minus before it
(-C0011849) is negated. XML is read as a stream of elements: a file with a document type, and so
any entity of its own, is refused, and nothing is fetched.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple
from xml.parsers import expat

import numpy as np

from fednotes.core.errors import ConfigError, DataError, nearest
from fednotes.data.formats.files import BROKEN, broken, listing, open_bytes
from fednotes.patients.cohort import Bags
from fednotes.patients.context import OPTIONS, Option
from fednotes.patients.dictionary import lines_of

_CUI = re.compile(r"C\d{7}")
_ITEM = re.compile(r"(-?)(C\d{7})")
_PARTS = re.compile(r"[\s,;|]+")
_PATIENT: Final = ("", "patient")  # subjects


class Found(NamedTuple):
    """One mention: its distinct CUIs, and where it stands (characters; 0:0 in flat files)."""

    cuis: tuple[str, ...]
    start: int = 0
    end: int = 0
    negated: bool = False
    family: bool = False
    hypothetical: bool = False


@dataclass(frozen=True)
class Extract:
    """Mentions by patient or note, in the order of the file; counts: of rows and what is wrong."""

    mentions: Mapping[str, tuple[Found, ...]]
    counts: Mapping[str, int]


def read(path: str | Path) -> Extract:
    """What cTAKES found, from an XMI file, a flat file, or a folder of either.

    XMI files and CUI-only files are named by their file (without .xmi, .xml, .txt). Several
    lines of one id add up. Raises DataError for a file that is neither, or broken XML.
    """
    path = Path(path)
    if not path.is_dir():
        return _xmi([path]) if _is_xmi(path) else _flat(path)
    files = listing(path, lambda p: _is_xmi(p) or p.suffix.lower() == ".txt", "cTAKES output")
    xmi = [file for file in files if _is_xmi(file)]
    return _xmi(xmi) if xmi else _cui_files(files)


def _is_xmi(path: Path) -> bool:
    return path.suffix.lower() in (".xmi", ".xml")


def _xmi(files: Sequence[Path]) -> Extract:
    mentions, counts = dict[str, tuple[Found, ...]](), Counter[str]()
    for file in files:
        name = file.name[: -len(file.suffix)].removesuffix(".txt")
        if name in mentions:
            raise DataError(f"{file}: another file has the same name: give one folder at a time")
        mentions[name] = read_xmi(file)
        counts.update(rows=1, mentions=len(mentions[name]))
    return Extract(mentions, counts)


def read_xmi(path: str | Path) -> tuple[Found, ...]:
    """The mentions of one XMI file that have a CUI, by their place in the text.

    Raises DataError, with the line, for a file that is no XMI, not whole, or has a DOCTYPE.
    """
    path = Path(path)
    elements = _Elements(path)
    with open_bytes(path) as file:
        try:
            elements.parser.ParseFile(file)
        except expat.ExpatError as error:
            reason = expat.errors.messages[error.code]
            raise DataError.at(path, error.lineno, f"the XML is broken ({reason})") from None
        except BROKEN as error:
            raise broken(path, error) from None
    if not elements.xmi:
        raise DataError(f"{path}: this is no XMI of cTAKES (no element xmi:XMI)")
    return elements.mentions()


class _Elements:
    """Collects mentions, concepts and lists of concepts while the file goes by."""

    def __init__(self, path: Path) -> None:
        self._path, self.xmi = path, False
        self._cuis: dict[str, str] = {}  # xmi:id → CUI
        self._lists: dict[str, list[str]] = {}  # xmi:id of a list → xmi:ids
        self._mentions: list[dict[str, str]] = []
        self.parser = expat.ParserCreate()
        self.parser.StartDoctypeDeclHandler = self._refuse
        self.parser.StartElementHandler = self._element

    def _refuse(self, *_: object) -> None:
        line = self.parser.CurrentLineNumber
        raise DataError.at(self._path, line, "the XML has a DOCTYPE: cTAKES writes none; refused")

    def _element(self, tag: str, attributes: dict[str, str]) -> None:
        prefix, _, name = tag.rpartition(":")
        if name == "XMI":
            self.xmi = True
        elif name == "UmlsConcept":
            if _CUI.fullmatch(attributes.get("cui", "")):
                self._cuis[attributes.get("xmi:id", "")] = attributes["cui"]
        elif name in ("FSArray", "NonEmptyFSList") and "elements" in attributes:
            self._lists[attributes.get("xmi:id", "")] = attributes["elements"].split()
        elif prefix == "textsem" and attributes.get("ontologyConceptArr", "").strip():
            wanted = ("begin", "end", "polarity", "subject", "conditional", "ontologyConceptArr")
            self._mentions.append({key: attributes.get(key, "") for key in wanted})

    def mentions(self) -> tuple[Found, ...]:
        return tuple(sorted(filter(None, map(self._mention, self._mentions)), key=_place))

    def _mention(self, given: Mapping[str, str]) -> Found | None:
        cuis: dict[str, None] = {}
        for reference in given["ontologyConceptArr"].split():
            for one in self._lists.get(reference, (reference,)):
                if one in self._cuis:  # a concept of another kind has no CUI
                    cuis[self._cuis[one]] = None
        try:
            start, end = int(given["begin"]), int(given["end"])
        except ValueError:
            raise DataError(f"{self._path}: a mention has no begin and end: is it XMI?") from None
        if not cuis:
            return None
        return Found(
            tuple(cuis),
            start,
            end,
            given["polarity"] == "-1",
            given["subject"].lower() not in _PATIENT,
            given["conditional"] == "true",
        )


def _place(found: Found) -> tuple[int, int]:
    return found.start, found.end


def _flat(path: Path) -> Extract:
    """Lines of an id and CUIs, parted by tabs, spaces, commas, semicolons or bars."""
    mentions, counts = dict[str, list[Found]](), Counter[str](rows=0, damaged=0)
    first = 0
    for number, line in lines_of(path):
        name, *items = _PARTS.split(line.strip()) if line is not None else [""]
        matches = [_ITEM.fullmatch(item) for item in items if item]
        if number == 1 and items and not any(matches):
            continue  # a header
        counts["rows"] += 1
        if line is None or not name or _ITEM.fullmatch(name) or not all(matches):
            counts["damaged"] += 1
            first = first or number
            continue
        found = mentions.setdefault(name, [])
        found.extend(Found((m[2],), negated=bool(m[1])) for m in matches if m)
    if not mentions or 2 * counts["damaged"] > counts["rows"]:
        message = "expected lines of an id and CUIs such as C0011849: is it the right file?"
        raise DataError.at(path, first or 1, message)
    return Extract({name: tuple(found) for name, found in mentions.items()}, counts)


def _cui_files(files: Sequence[Path]) -> Extract:
    """A file a patient or note, CUIs only; a line with anything else is damaged."""
    mentions, counts = dict[str, tuple[Found, ...]](), Counter[str](rows=0, damaged=0)
    for file in files:
        found: list[Found] = []
        for _, line in lines_of(file):
            items = [_ITEM.fullmatch(i) for i in _PARTS.split(line.strip())] if line else [None]
            counts.update(rows=1, damaged=not all(items))
            if all(items):
                found.extend(Found((m[2],), negated=bool(m[1])) for m in items if m)
        mentions[file.stem] = tuple(found)
    if 2 * counts["damaged"] > counts["rows"]:
        raise DataError(
            f"{files[0].parent}: {counts['damaged']} of {counts['rows']} lines are no CUIs: "
            "give a folder of files that hold CUIs only, one file a patient or note"
        )
    return Extract(mentions, counts)


def bags(
    mentions: Mapping[str, Iterable[Found]],
    concepts: Sequence[str],
    context: Option = "drop",
    most: int = 10_000,
) -> tuple[tuple[str, ...], Bags, dict[str, int]]:
    """Patients that stay, one bag each, and counts.

    concepts: the vocabulary's CUIs, public: never those that occur here. context: what becomes
    of negated, family and hypothetical mentions, as for a Matcher. most: patients with more
    concepts are left out.

    counts: patients, mentions, unknown (CUIs outside the vocabulary), left_out, without.
    """
    if context not in OPTIONS:
        raise ConfigError(f"context = {context!r} is unknown: {nearest(context, OPTIONS)}")
    index = {concept: at for at, concept in enumerate(concepts)}
    kept: dict[str, np.ndarray] = {}
    counts = Counter[str](patients=0, mentions=0, unknown=0, left_out=0, without=0)
    for patient, found in mentions.items():
        bag: list[int] = []
        for one in found:
            other = context != "off" and (one.negated or one.family or one.hypothetical)
            if other and context == "drop":
                continue
            places = [index[cui] for cui in one.cuis if cui in index]
            counts["unknown"] += len(one.cuis) - len(places)
            bag.extend(place + len(concepts) * other for place in places)
        counts.update(patients=1, mentions=len(bag), left_out=len(bag) > most, without=not bag)
        if len(bag) <= most:
            kept[patient] = np.array(bag, dtype=np.int32)
    size = len(concepts) * (2 if context == "mark" else 1)
    made = Bags.of((bag.tolist() for bag in kept.values()), size)
    return tuple(kept), made, dict(counts)
