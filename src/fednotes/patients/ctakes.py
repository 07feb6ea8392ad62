"""Apache cTAKES' output: the concepts (CUIs) of notes, from XMI or from flat files.

    XMI    one file a note: textsem:…Mention → ontologyConceptArr → refsem:UmlsConcept cui
    flat   a line a patient or note: an id, then CUIs; or a folder of files NAME.txt of CUIs only

In XMI a mention does not hold for the patient now where its polarity is −1, its subject another
than the patient, or where it is conditional. In flat files a CUI with a minus before it
(-C0011849) is negated.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fednotes.core.errors import DataError
from fednotes.data.formats.files import listing
from fednotes.patients.cohort import Bags
from fednotes.patients.context import Option
from fednotes.patients.tables import Damaged, TableReport, XmlFile, lines

_CUI = re.compile(r"C\d{7}")
_ITEM = re.compile(r"(-?)(C\d{7})")
_PARTS = re.compile(r"[\s,;|]+")


class Found(NamedTuple):
    """One mention: its distinct CUIs, and whether it holds for the patient now."""

    cuis: tuple[str, ...]
    holds: bool = True


Mentions = dict[str, list[Found]]  # by patient or note, in the order of the text


def read(path: Path) -> tuple[Mentions, TableReport]:
    """What cTAKES found, from an XMI file, a flat file, or a folder of either.

    XMI files and CUI-only files are named by their file (without .xmi, .xml, .txt). Several
    lines of one id add up. Raises DataError for a file that is neither, or broken XML.
    """
    found, report = Mentions(), TableReport(path)
    files = [path]
    if path.is_dir():
        files = listing(path, lambda p: _is_xmi(p) or p.suffix.lower() == ".txt", "cTAKES output")
    if xmi := [file for file in files if _is_xmi(file)]:
        for file in xmi:
            name = file.name[: -len(file.suffix)].removesuffix(".txt")
            if name in found:
                raise DataError(
                    f"{file}: another file has the same name: give one folder at a time"
                )
            found[name] = _Xmi(file).mentions()
            report.rows += 1
        return found, report
    for file in files:
        _flat(file, found, report, file.stem if path.is_dir() else "")
    if not found or 2 * report.damaged > report.rows:
        what = "CUIs alone, one file a patient or note" if path.is_dir() else "an id and CUIs"
        first = report.examples[0].line if report.examples and not path.is_dir() else 0
        raise DataError.at(
            path,
            first,
            f"{report.damaged} of {report.rows} lines are no CUIs such as C0011849: "
            f"expected lines of {what}: is it the right file?",
        )
    return found, report


def _is_xmi(path: Path) -> bool:
    return path.suffix.lower() in (".xmi", ".xml")


class _Xmi(XmlFile):
    """Collects mentions, concepts and lists of concepts while the file goes by."""

    doctype = False

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._whole = False
        self._cuis: dict[str, str] = {}  # xmi:id → CUI
        self._lists: dict[str, list[str]] = {}  # xmi:id of a list → xmi:ids
        self._mentions: list[tuple[int, int, list[str], bool]] = []

    def startElement(self, tag: str, attrs: Any) -> None:  # noqa: N802
        prefix, _, name = tag.rpartition(":")
        id, references = attrs.get("xmi:id", ""), attrs.get("ontologyConceptArr", "").split()
        if name == "XMI":
            self._whole = True
        elif name == "UmlsConcept":
            if _CUI.fullmatch(attrs.get("cui", "")):
                self._cuis[id] = attrs["cui"]
        elif name in ("FSArray", "NonEmptyFSList") and "elements" in attrs:
            self._lists[id] = attrs["elements"].split()
        elif prefix == "textsem" and references:
            try:
                place = int(attrs.get("begin", "")), int(attrs.get("end", ""))
            except ValueError:
                raise self.error("a mention has no begin and end: is it XMI?") from None
            denied = attrs.get("polarity") == "-1" or attrs.get("conditional") == "true"
            holds = not denied and attrs.get("subject", "").lower() in ("", "patient")
            self._mentions.append((*place, references, holds))

    def mentions(self) -> list[Found]:
        """Those that have a CUI, by their place in the text.

        Raises DataError for a file that is no XMI, not whole, or has a DOCTYPE.
        """
        self.read()
        if not self._whole:
            raise DataError(f"{self.path}: this is no XMI of cTAKES (no element xmi:XMI)")
        made = []
        for _, _, references, holds in sorted(self._mentions, key=lambda mention: mention[:2]):
            every = (one for ref in references for one in self._lists.get(ref, (ref,)))
            # a concept of another kind has no CUI
            if cuis := dict.fromkeys(self._cuis[one] for one in every if one in self._cuis):
                made.append(Found(tuple(cuis), holds))
        return made


def _flat(path: Path, found: Mentions, report: TableReport, name: str) -> None:
    """Lines of CUIs, parted by tabs, spaces, commas, semicolons or bars. name: of whom all lines
    are; if empty, each begins with an id, and the first one may be a header."""
    if name:
        found[name] = []
    for number, line in lines(path):
        if line is not None and not line.strip():
            continue
        items = _PARTS.split(line.strip()) if line is not None else [""]
        who = name or items.pop(0)
        matches = [_ITEM.fullmatch(item) for item in items if item or name]
        if not name and number == 1 and items and not any(matches):
            continue  # a header
        report.rows += 1
        if line is None or not who or _ITEM.fullmatch(who) or not all(matches):
            report.damage(Damaged(number, "no CUIs"))
            continue
        own = (Found((match[2],), not match[1]) for match in matches if match)
        found.setdefault(who, []).extend(own)


def bags(
    mentions: Mapping[str, Iterable[Found]],
    concepts: Sequence[str],
    context: Option = "drop",
    most: int = 10_000,
) -> tuple[tuple[str, ...], Bags, dict[str, int]]:
    """Patients that stay, one bag each, and counts.

    concepts: the vocabulary's CUIs, public: never those that occur here. context: what becomes
    of mentions that do not hold, as for a Matcher. most: patients with more concepts are left out.

    counts: patients, mentions, unknown (CUIs outside the vocabulary), left_out, without.
    """
    index = {concept: at for at, concept in enumerate(concepts)}
    kept: dict[str, np.ndarray] = {}
    counts = Counter[str](patients=0, mentions=0, unknown=0, left_out=0, without=0)
    for patient, found in mentions.items():
        bag: list[int] = []
        for one in found:
            other = context != "off" and not one.holds
            if other and context == "drop":
                continue
            places = [index[cui] for cui in one.cuis if cui in index]
            counts["unknown"] += len(one.cuis) - len(places)
            bag.extend(place + len(concepts) * other for place in places)
        counts.update(patients=1, mentions=len(bag), left_out=len(bag) > most, without=not bag)
        if len(bag) <= most:
            kept[patient] = np.array(bag, dtype=np.int32)
    made = Bags.of(kept.values(), len(concepts) * (2 if context == "mark" else 1))
    return tuple(kept), made, dict(counts)
