"""Labelled patients to score a phenotyping model on: JSON lines, a table, the obesity challenge.

Judged phenotypes of a hospital's own: a table of labels, told by its header.

    long   patient, phenotype (or disease), label (or judgment): a row for each pair; other
           columns are passed over
    wide   patient, and a column for each phenotype: a row for each patient

A label is a word, a letter or a number, in any case:

    present       Y   1
    absent        N   0
    questionable  Q   2
    unmentioned   U       -1, or 0 on request, as in `obesity`
    (empty)               -1: counted; the phenotype is one of the table's all the same

Anything else is damaged: left out, counted, named by its line. Numbers may end in ".0", as
spreadsheets and data frames write them beside empty cells. A pair labelled twice and
differently is no label at all, since nothing says which one holds; it is counted and named.

Phenotypes are ordered by name, so that sites that judge the same ones agree. A site that has
never judged one of them lists it without a label: an empty column, or a row without label.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from fednotes.core.errors import ConfigError, DataError
from fednotes.core.parsing import JsonError, parse_json
from fednotes.data.formats.files import open_file
from fednotes.patients.cohort import ABSENT, PRESENT, QUESTIONABLE, UNLABELLED
from fednotes.patients.concepts import by_patient
from fednotes.patients.obesity import Unmentioned, read_obesity
from fednotes.patients.tables import (
    EXAMPLES,
    PATIENT_COLUMNS,
    Damaged,
    Header,
    Row,
    TableReport,
    find_column,
    mostly_sound,
    open_table,
    rows,
)

_PHENOTYPE: Final = ("phenotype", "disease")
_LABEL: Final = ("label", "judgment")
_LONGEST: Final = 100  # characters of a phenotype's name; more is no name
_UNMENTIONED: Final = -2
_VALUES: Final = {
    **dict.fromkeys(("present", "y", "1", "1.0"), PRESENT),
    **dict.fromkeys(("absent", "n", "0", "0.0"), ABSENT),
    **dict.fromkeys(("questionable", "q", "2", "2.0"), QUESTIONABLE),
    **dict.fromkeys(("unmentioned", "u"), _UNMENTIONED),
}
_EXPECTED: Final = "present, absent, questionable; Y, N, Q, U; 1, 0, 2"


@dataclass(frozen=True, eq=False)
class PatientLabels:
    """The labels of a site's patients. They never leave the site.

    phenotypes: in order of their names. values: patient → phenotype → label, those that hold.
    tables: what became of the pairs of patient and phenotype, a report a file; a wide table
    has as many a row as it has phenotypes. conflicts: pairs labelled twice and differently, of
    which neither holds; disagreeing: the first of them, a line each.
    """

    phenotypes: tuple[str, ...]
    values: Mapping[str, Mapping[str, int]]
    tables: tuple[TableReport, ...]
    conflicts: int = 0
    disagreeing: tuple[str, ...] = ()

    def of(self, patient: str, unmentioned: Unmentioned = "unlabelled") -> dict[str, int]:
        """Phenotype → label (0, 1, 2) of a patient; what is unlabelled is not in it.

        unmentioned: what U becomes, "unlabelled" or "absent". Raises ConfigError for another.
        """
        if unmentioned not in ("unlabelled", "absent"):
            raise ConfigError(f"unmentioned must be unlabelled or absent, not {unmentioned!r}")
        of_u = ABSENT if unmentioned == "absent" else UNLABELLED
        own = self.values.get(patient, {})
        found = {name: of_u if value == _UNMENTIONED else value for name, value in own.items()}
        return {name: value for name, value in found.items() if value != UNLABELLED}

    def matrix(
        self, patients: Sequence[str], unmentioned: Unmentioned = "unlabelled"
    ) -> np.ndarray:
        """(patients, phenotypes) int8, as in `Cohort`; -1 where there is no label."""
        labels = np.full((len(patients), len(self.phenotypes)), UNLABELLED, dtype=np.int8)
        column = {name: at for at, name in enumerate(self.phenotypes)}
        for row, patient in enumerate(patients):
            for name, value in self.of(patient, unmentioned).items():
                labels[row, column[name]] = value
        return labels

    def lines(self) -> tuple[str, ...]:
        """What is wrong in the files, a line each; nothing of a patient."""
        told = [line for table in self.tables for line in table.lines()]
        told += [
            f"{table.path}: {table.empty:,} pairs of patient and phenotype without a label"
            for table in self.tables
            if table.empty
        ]
        more = self.conflicts - len(self.disagreeing)
        tail = [f"{more:,} more pairs labelled twice and differently"] if more else []
        return (*told, *self.disagreeing, *tail)


_Pair = tuple[int, str, str, str] | Damaged  # line, patient, phenotype, label as it stands


def read_labels(
    path: str | os.PathLike[str], *more: str | os.PathLike[str], patient_column: str = ""
) -> PatientLabels:
    """The labels of one table or several: CSV or tab-separated, also .gz.

    patient_column: the column of patients, where a table has one of this name; otherwise as in
    `code_table`. Raises DataError for a missing file or column, a file of mostly damaged rows,
    a column of something else than labels, two phenotypes that differ in case alone, or if
    there is no label at all.
    """
    found = _Found()
    reports = [_read(Path(each), patient_column, found) for each in (path, *more)]
    values: dict[str, dict[str, int]] = {}
    for (patient, phenotype), (value, _) in found.pairs.items():
        if value is not None:
            values.setdefault(patient, {})[phenotype] = value
    if not values:
        raise DataError(f"{path}: there is no label in it: expected {_EXPECTED}")
    disagreeing = tuple(found.conflicts.values())
    names = _ordered(Path(path), found.phenotypes)
    return PatientLabels(
        names, values, tuple(reports), len(disagreeing), tuple(disagreeing[:EXAMPLES])
    )


class _Found:
    """What tables say so far.

    pairs: (patient, phenotype) → label, None where two differ, and the place it stands at.
    conflicts: pairs labelled differently → a line that names both places.
    """

    def __init__(self) -> None:
        self.phenotypes: dict[str, None] = {}
        self.pairs: dict[tuple[str, str], tuple[int | None, str]] = {}
        self.conflicts: dict[tuple[str, str], str] = {}

    def add(self, where: str, patient: str, phenotype: str, value: int) -> None:
        pair = (patient, phenotype)
        before = self.pairs.setdefault(pair, (value, where))
        if before[0] is not None and before[0] != value:
            self.pairs[pair] = (None, where)
            self.conflicts[pair] = (
                f"{where}: a label of the same pair is another one at {before[1]}: neither holds"
            )


def _read(path: Path, patient_column: str, found: _Found) -> TableReport:
    """A table's labels, into `found`; what became of its pairs."""
    if path.is_dir():
        raise DataError(f"{path}: a folder: name the table of labels that is in it")
    header, given = open_table(path)
    named = patient_column if header.has(patient_column) else ""
    patient = find_column(path, header, named, PATIENT_COLUMNS, "patient_column")
    cells = rows(given, len(header.names), header.delimiter)
    is_long = header.has(*_PHENOTYPE, *_LABEL)
    if is_long:
        pairs = _long(path, header, cells, patient)
    else:
        titles = _titles(path, header, patient)
        found.phenotypes |= dict.fromkeys(titles.values())
        pairs = _wide(cells, patient, titles)
    return _collect(path, pairs, found, header, wide=not is_long)


def _long(path: Path, header: Header, cells: Iterator[Row], patient: int) -> Iterator[_Pair]:
    phenotype, label = (find_column(path, header, "", names) for names in (_PHENOTYPE, _LABEL))
    for row in cells:
        if isinstance(row, Damaged):
            yield row
            continue
        who, name, text = (row[1][at].strip() for at in (patient, phenotype, label))
        if not who or not 0 < len(name) <= _LONGEST:
            reason = "no phenotype" if not name else "the phenotype's name is too long"
            yield Damaged(row[0], reason if who else "no patient")
        else:
            yield row[0], who, name, text


def _wide(cells: Iterator[Row], patient: int, titles: Mapping[int, str]) -> Iterator[_Pair]:
    for row in cells:
        if isinstance(row, Damaged):
            yield row
        elif not (who := row[1][patient].strip()):
            yield Damaged(row[0], "no patient")
        else:
            yield from ((row[0], who, name, row[1][at].strip()) for at, name in titles.items())


def _titles(path: Path, header: Header, patient: int) -> dict[int, str]:
    """The phenotypes of a wide table by column. Raises DataError for titles that name none."""
    titles = {at: title for at, title in enumerate(header.titles) if at != patient}
    if not titles:
        message = "there is only a column of patients: add one for each phenotype"
        raise DataError.at(path, header.line, message)
    for at, title in titles.items():
        if not 0 < len(title) <= _LONGEST:
            message = f"column {at + 1} has no name: expected a phenotype's"
            raise DataError.at(path, header.line, message)
        if list(titles.values()).count(title) > 1:
            raise DataError.at(path, header.line, f"two columns are called {title!r}: rename one")
    return titles


def _collect(
    path: Path, pairs: Iterator[_Pair], found: _Found, header: Header, wide: bool
) -> TableReport:
    """Adds a table's labels, and says what became of its pairs."""
    total = kept = empty = damaged = 0
    examples: list[Damaged] = []
    sound: dict[str, list[int]] = {}  # a wide table's phenotype → labels and other cells
    for row in pairs:
        total += 1
        if not isinstance(row, Damaged):
            line, patient, phenotype, text = row
            value = _VALUES.get(text.lower())
            if value is not None:
                found.add(f"{path}:{line}", patient, phenotype, value)
            kept += value is not None
            empty += not text
            if value is not None or not text:  # a damaged row may name none
                found.phenotypes[phenotype] = None
            if not text:
                continue
            sound.setdefault(phenotype, [0, 0])[value is None] += 1
            if value is not None:
                continue
            of = f"the label of {phenotype!r}" if wide else "the label"
            row = Damaged(line, f"{of} is none of {_EXPECTED}")
        damaged += 1
        if len(examples) < EXAMPLES:
            examples.append(row)
    for name, (good, bad) in sound.items():
        if wide and bad > good:
            message = f"column {name!r} holds no labels ({bad} cells are none): take it out"
            raise DataError.at(path, header.line, message)
    mostly_sound(path, total - empty, damaged, examples)
    return TableReport(str(path), total, kept, empty, damaged, tuple(examples))


def _ordered(path: Path, phenotypes: Mapping[str, None]) -> tuple[str, ...]:
    """The names in order. Raises DataError for two that are one but for their case."""
    seen: dict[str, str] = {}
    for name in sorted(phenotypes):
        if (other := seen.setdefault(name.casefold(), name)) != name:
            raise DataError(f"{path}: phenotypes {other!r} and {name!r}: name them alike")
    return tuple(sorted(phenotypes))


LABELS: Final = {"absent": ABSENT, "present": PRESENT, "questionable": QUESTIONABLE}
_NO_GOLD = "no JSON: expected one whole object a line, or --labels with a table beside the notes"

Gold = dict[str, dict[str, int]]  # patient → phenotype → label


def renamed(gold: Gold, label_map: Mapping[str, str]) -> tuple[Gold, tuple[str, ...], int]:
    """Labels under the model's names, and the names in the file's order.

    label_map: name in the file → the model's. Where two labels of a patient come to one name and
    differ, neither holds; the last value is how many such pairs there are.
    """
    made: Gold = {}
    names: dict[str, None] = {}
    clashes = 0
    for patient, of in gold.items():
        labels: dict[str, set[int]] = {}
        for name, label in of.items():
            labels.setdefault(label_map.get(name, name), set()).add(label)
        names |= dict.fromkeys(labels)
        made[patient] = {n: label for n, (label, *more) in labels.items() if not more}
        clashes += len(labels) - len(made[patient])
    return made, tuple(names), clashes


def read_gold(path: Path) -> tuple[dict[str, list[str]], Gold]:
    """Texts and labels by patient, of JSON lines or of a folder of the obesity challenge.

    Raises DataError naming file and line.
    """
    if path.is_dir():
        read = read_obesity(path)
        labels = read.labels.tolist()
        gold = {
            note.id: {d: c for d, c in zip(read.diseases, row, strict=True) if c != UNLABELLED}
            for note, row in zip(read.notes, labels, strict=True)
        }
        return by_patient(read.notes), gold
    notes: dict[str, list[str]] = {}
    gold = {}
    with open_file(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            patient, text, given = _line(path, number, line)
            notes.setdefault(patient, []).append(text)
            known = gold.setdefault(patient, {})
            for name, word in given.items():
                if not isinstance(word, str) or word not in LABELS:
                    expected = ", ".join(LABELS)
                    raise DataError.at(path, number, f"a label is none of {expected}")
                if known.setdefault(name, LABELS[word]) != LABELS[word]:
                    raise DataError.at(path, number, f"two different labels of one {name!r}")
    return notes, gold


def read_beside(
    notes: dict[str, list[str]], path: Path, labels: Path
) -> tuple[dict[str, list[str]], Gold, tuple[str, ...]]:
    """Texts of notes and labels of a table, of the patients who have both; and a line for each
    thing that is wrong in the table, or left out.

    notes: those of `path`. Raises what `read_labels` raises.
    """
    table = read_labels(labels)
    told = list(table.lines())
    gold = {patient: of for patient in notes if (of := table.of(patient))}
    if noteless := len(set(table.values) - set(notes)):
        told.append(f"{noteless} labelled patient(s) have no notes in {path}: left out")
    if bare := len(notes) - len(gold):
        told.append(f"{bare} patient(s) have notes and no label: left out")
    return {patient: notes[patient] for patient in gold}, gold, tuple(told)


def _line(path: Path, number: int, line: bytes) -> tuple[str, str, dict[str, Any]]:
    try:
        record = parse_json(line, strict=False)
    except JsonError as error:
        raise DataError.at(path, number, f"{_NO_GOLD} ({error})") from None
    values = [record.get(k) for k in ("patient", "text", "labels")] if type(record) is dict else []
    if not values or not isinstance(values[1], str) or not isinstance(values[2] or {}, dict):
        raise DataError.at(path, number, 'expected the keys "patient", "text" and "labels"')
    if not isinstance(values[0], str | int):
        raise DataError.at(path, number, 'the key "patient" is missing or no id')
    return str(values[0]), values[1], values[2] or {}
