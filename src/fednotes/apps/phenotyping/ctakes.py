"""Concepts found by cTAKES, instead of notes.

    XMI    one file per note: textsem:…Mention → ontologyConceptArr → refsem:UmlsConcept
    flat   one line per patient or note: an id, then CUIs; or a folder of files NAME.txt
           that contain only CUIs

A mention in XMI does not hold for the patient now if its polarity is −1, if its subject
is not the patient, or if it is conditional. In a flat file a minus before a CUI
(-C0011849) marks a negated mention.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fednotes.apps.phenotyping.concepts import (
    MAX_CONCEPTS,
    PatientInputs,
    join_bags,
)
from fednotes.apps.phenotyping.context import Option
from fednotes.apps.phenotyping.tables import Damaged, TableReport, read_numbered_lines
from fednotes.core.errors import DataError
from fednotes.data.formats.folders import find_corpus_files
from fednotes.data.formats.xml_files import read_elements

_CUI = re.compile(r"C\d{7}")
_FLAT_ITEM = re.compile(r"(-?)(C\d{7})")
_MAX_CONCEPTS = 1000  # maximum number for a mention
_SEPARATORS = re.compile(r"[\s,;|]+")


class Mention(NamedTuple):
    """One mention: its distinct CUIs, and whether it holds for the patient now."""

    cuis: tuple[str, ...]
    holds: bool = True


Mentions = dict[str, list[Mention]]  # by patient or note, in the order of the text


def read_ctakes(path: Path) -> tuple[Mentions, TableReport]:
    """Read the output of cTAKES.

    Args:
        path: An XMI file, a flat file, or a folder of either.

    Returns:
        The mentions, and a report of damaged lines. The names of XMI files and of files
        with only CUIs are the keys (without .xmi, .xml, .txt). Lines with the same id
        are combined.

    Raises:
        DataError: The file has neither form, or its XML is malformed.
    """
    is_folder = path.is_dir()
    files = [path]
    if is_folder:
        files = find_corpus_files(path, _is_ctakes_file, "cTAKES output")
    report = TableReport(path)
    xmi_files = [file for file in files if _is_xmi(file)]
    if xmi_files:
        mentions = _read_xmi_files(xmi_files)
        report.rows = len(xmi_files)
    else:
        mentions = Mentions()
        for file in files:
            if is_folder:
                _read_cuis(file, mentions, report)
            else:
                _read_flat(file, mentions, report)
    if not mentions or 2 * report.damaged > report.rows:
        raise _make_not_ctakes_error(path, report)
    return mentions, report


def _is_xmi(path: Path) -> bool:
    """Return whether a file has the name of an XMI file."""
    return path.suffix.lower() in (".xmi", ".xml")


def _is_ctakes_file(path: Path) -> bool:
    """Return whether a file has the name of cTAKES output."""
    return _is_xmi(path) or path.suffix.lower() == ".txt"


def _make_not_ctakes_error(path: Path, report: TableReport) -> DataError:
    """Return the error for a file or folder that is not cTAKES output."""
    expected = "an id and CUIs"
    line = report.examples[0].line if report.examples else 0
    if path.is_dir():
        expected = "CUIs only, one file per patient or note"
        line = 0
    return DataError.at(
        path,
        line,
        f"{report.damaged} of {report.rows} lines are not CUIs such as C0011849; "
        f"expected {expected} on each line: check that this is the right file",
    )


# ---- XMI -----------------------------------------------------------------------------


def _read_xmi_files(files: Sequence[Path]) -> Mentions:
    """Read XMI files, one per note.

    Raises:
        DataError: Two files have the same name, or a file is not XMI of cTAKES.
    """
    mentions = Mentions()
    for file in files:
        name = file.name[: -len(file.suffix)].removesuffix(".txt")
        if name in mentions:
            raise DataError(
                f"{file}: another file has the same name: give one folder at a time"
            )
        mentions[name] = _read_xmi(file)
    return mentions


class _XmiMention(NamedTuple):
    """A mention of an XMI file.

    Attributes:
        begin: Its start in the text.
        end: Its end in the text.
        references: Ids of its concepts, or of lists of its concepts.
        holds: Whether it is about the patient, and neither negated nor conditional.
    """

    begin: int
    end: int
    references: list[str]
    holds: bool


def _read_xmi(path: Path) -> list[Mention]:
    """Read an XMI file; return its mentions with a CUI, in the order of the text.

    Raises:
        DataError: The file is not XMI of cTAKES, is truncated, or has a DOCTYPE.
    """
    has_root = False
    cuis: dict[str, str] = {}  # xmi:id → CUI
    lists: dict[str, list[str]] = {}  # xmi:id of a list → xmi:ids
    mentions: list[_XmiMention] = []
    for line, tag, attributes, _ in read_elements(path, can_have_doctype=False):
        if attributes is None:
            continue
        prefix, _, name = tag.rpartition(":")
        if name == "XMI":
            has_root = True
        elif name == "UmlsConcept":
            cui = attributes.get("cui", "")
            if _CUI.fullmatch(cui):
                cuis[attributes.get("xmi:id", "")] = cui
        elif name in ("FSArray", "NonEmptyFSList") and "elements" in attributes:
            lists[attributes.get("xmi:id", "")] = attributes["elements"].split()
        elif prefix == "textsem" and attributes.get("ontologyConceptArr", "").split():
            mentions.append(_parse_xmi_mention(path, line, attributes))
    if not has_root:
        raise DataError(
            f"{path}: not an XMI file of cTAKES (it has no element xmi:XMI)"
        )
    return _select_mentions_with_cuis(path, mentions, cuis, lists)


def _select_mentions_with_cuis(
    path: Path,
    mentions: Sequence[_XmiMention],
    cuis: Mapping[str, str],
    lists: Mapping[str, Sequence[str]],
) -> list[Mention]:
    """Return the mentions with a CUI, by their position in the text.

    Args:
        path: The file, for messages.
        mentions: The mentions.
        cuis: The CUI of each concept's id.
        lists: The ids of concepts in each list, by the list's id.

    Raises:
        DataError: The lists of a mention have more than `_MAX_CONCEPTS` CUIs.
    """
    # A concept from outside the UMLS has no CUI.
    cuis_of_list = {
        list_id: tuple(dict.fromkeys(cuis[id] for id in ids if id in cuis))
        for list_id, ids in lists.items()
    }
    result = []
    for mention in sorted(mentions, key=lambda mention: (mention.begin, mention.end)):
        distinct: dict[str, None] = {}
        number = 0
        for ref in mention.references:
            if ref not in cuis_of_list:
                if ref in cuis:
                    distinct[cuis[ref]] = None
                continue
            number += len(cuis_of_list[ref])
            if number > _MAX_CONCEPTS:  # because mentions may share long lists
                raise DataError(
                    f"{path}: a mention has more than {_MAX_CONCEPTS:,} concepts: "
                    "check that the file is XMI of cTAKES"
                )
            distinct.update(dict.fromkeys(cuis_of_list[ref]))
        if distinct:
            result.append(Mention(tuple(distinct), mention.holds))
    return result


def _parse_xmi_mention(
    path: Path, line: int, attributes: Mapping[str, str]
) -> _XmiMention:
    """Return the mention in an element of an XMI file.

    Raises:
        DataError: It has no position in the text.
    """
    try:
        begin = int(attributes.get("begin", ""))
        end = int(attributes.get("end", ""))
    except ValueError:
        reason = "a mention has no begin and end: check that the file is XMI"
        raise DataError.at(path, line, reason) from None
    is_negated = attributes.get("polarity") == "-1"
    is_conditional = attributes.get("conditional") == "true"
    is_of_patient = attributes.get("subject", "").lower() in ("", "patient")
    return _XmiMention(
        begin,
        end,
        references=attributes["ontologyConceptArr"].split(),
        holds=is_of_patient and not is_negated and not is_conditional,
    )


# ---- flat files ----------------------------------------------------------------------


def _read_cuis(path: Path, mentions: Mentions, report: TableReport) -> None:
    """Add the mentions of a file that contains only CUIs of one patient or note."""
    name = path.stem
    mentions[name] = []
    for number, line in read_numbered_lines(path):
        if line is not None and not line.strip():
            continue
        report.rows += 1
        items = (
            None if line is None else _parse_mentions(_SEPARATORS.split(line.strip()))
        )
        if items is None:
            report.add_damaged(Damaged(number, "no CUIs"))
        else:
            mentions[name].extend(items)


def _read_flat(path: Path, mentions: Mentions, report: TableReport) -> None:
    """Add the mentions of a file whose lines are an id and CUIs.

    The parts of a line are separated by tabs, spaces, commas, semicolons or bars. The
    first line may be a header.
    """
    for number, line in read_numbered_lines(path):
        if line is not None and not line.strip():
            continue
        name, *texts = [""] if line is None else _SEPARATORS.split(line.strip())
        has_cui = any(_FLAT_ITEM.fullmatch(text) for text in texts)
        if number == 1 and texts and not has_cui:
            continue  # a header
        report.rows += 1
        items = _parse_mentions([text for text in texts if text])
        if not name or _FLAT_ITEM.fullmatch(name) or items is None:
            report.add_damaged(Damaged(number, "no CUIs"))
        else:
            mentions.setdefault(name, []).extend(items)


def _parse_mentions(texts: Sequence[str]) -> list[Mention] | None:
    """Return the mentions of a flat file's CUIs; None if one is not a CUI."""
    mentions = []
    for text in texts:
        match = _FLAT_ITEM.fullmatch(text)
        if match is None:
            return None
        mentions.append(Mention((match[2],), holds=not match[1]))
    return mentions


# ---- bags ----------------------------------------------------------------------------


def make_bags_of_mentions(
    mentions: Mapping[str, Iterable[Mention]],
    concepts: Sequence[str],
    context: Option = "drop",
    max_concepts: int = MAX_CONCEPTS,
) -> PatientInputs:
    """Return one bag of concepts per patient or note.

    Args:
        mentions: The mentions of each patient or note.
        concepts: The CUIs of the vocabulary. They must be public, so do not derive them
            from `mentions`.
        context: Treatment of mentions that do not hold, as for a `Matcher`.
        max_concepts: Patients with more concepts are left out.
    """
    index = {concept: at for at, concept in enumerate(concepts)}
    counts = Counter(
        patients=len(mentions), mentions=0, unknown=0, left_out=0, without_features=0
    )

    def make_bag(patient_mentions: Iterable[Mention]) -> np.ndarray:
        entries: list[int] = []
        for mention in patient_mentions:
            if not mention.holds and context == "drop":
                continue
            is_marked = not mention.holds and context == "mark"
            shift = len(concepts) if is_marked else 0
            known = [index[cui] + shift for cui in mention.cuis if cui in index]
            counts["unknown"] += len(mention.cuis) - len(known)
            entries += known
        return np.array(entries, dtype=np.int32)

    arrays = join_bags(map(make_bag, mentions.values()), counts, max_concepts)
    vocabulary = len(concepts) * (2 if context == "mark" else 1)
    return PatientInputs.from_arrays(tuple(mentions), arrays, vocabulary, counts)
