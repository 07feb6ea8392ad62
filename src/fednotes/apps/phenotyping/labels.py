"""Judged phenotypes of patients: tables, the i2b2 2008 obesity challenge, JSON lines.

A table is told by its header:

    long   patient, phenotype (or disease), label (or judgment): a row for each pair; other
           columns are passed over
    wide   patient, and a column for each phenotype: a row for each patient

The challenge (Uzuner 2009) is a folder of discharge summaries, judged for 16 diseases;
each is a patient of its own, as in Liu, Dligach and Miller 2019:

    obesity_patient_records_training.xml, …_training2.xml, …_test.xml   doc[@id] > text
    obesity_standoff_annotations_training.xml, …_addendum*.xml, …_test.xml
        diseases[@source] > disease[@name] > doc[@id][@judgment]

Two experts judged each summary twice: `textual`, what the text states, and `intuitive`,
what a reader concludes, which is what the paper uses. In its Table 1 the columns of
presence and absence are exchanged; labels here follow the files.

A label is a word, a letter or a number, in any case (numbers may end in ".0", as
spreadsheets write them beside empty cells):

    present       Y   1
    absent        N   0
    questionable  Q   2
    unmentioned   U       -1, or 0 on request: the text says nothing of it either way, which is a
                          label only where the question is "does the text state it?"
    (empty)               -1: counted; the phenotype is one of the table's all the same

Anything else is damaged: left out, counted, named by its line. A pair labelled twice
and differently is no label at all, since nothing says which one holds; but in the
challenge's files the later one holds, since an addendum corrects. Both are counted and
named. Phenotypes are ordered by name, so that sites that judge the same ones agree. A
site that has never judged one of them lists it without a label: an empty column, or a
row without label.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from fednotes.apps.phenotyping.cohort import (
    ABSENT,
    LABELS,
    PRESENT,
    QUESTIONABLE,
    UNLABELLED,
)
from fednotes.apps.phenotyping.concepts import by_patient
from fednotes.apps.phenotyping.tables import (
    EXAMPLES,
    PATIENT_COLUMNS,
    Damaged,
    Table,
    TableReport,
    elements,
)
from fednotes.core.errors import DataError, nearest
from fednotes.core.parsing import JsonError, parse_json
from fednotes.data.encodings import named_encoding
from fednotes.data.formats.files import bounded_lines, open_text
from fednotes.data.formats.folders import list_files
from fednotes.data.notes import Note

DISEASES: Final = (
    *("Asthma", "CAD", "CHF", "Depression", "Diabetes", "GERD", "Gallstones", "Gout"),
    *(
        "Hypercholesterolemia",
        "Hypertension",
        "Hypertriglyceridemia",
        "OA",
        "OSA",
        "Obesity",
    ),
    *("PVD", "Venous Insufficiency"),
)
Judgment = Literal["intuitive", "textual"]
Unmentioned = Literal["unlabelled", "absent"]

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
    has as many a row as it has phenotypes. conflicts: pairs labelled twice and differently, a
    line each.
    """

    phenotypes: tuple[str, ...]
    values: Mapping[str, Mapping[str, int]] = field(repr=False)
    tables: tuple[TableReport, ...] = ()
    conflicts: tuple[str, ...] = ()

    def of(
        self, patient: str, unmentioned: Unmentioned = "unlabelled"
    ) -> dict[str, int]:
        """Phenotype → label (0, 1, 2) of a patient; what is unlabelled is not in it.

        unmentioned: what U becomes.
        """
        own = self.values.get(patient, {})
        found = {
            n: ABSENT if value == _UNMENTIONED else value for n, value in own.items()
        }
        return (
            found
            if unmentioned == "absent"
            else {n: v for n, v in own.items() if v >= 0}
        )

    def matrix(
        self, patients: Sequence[str], unmentioned: Unmentioned = "unlabelled"
    ) -> np.ndarray:
        """(patients, phenotypes) int8, as in `Cohort`; -1 where there is no label."""
        given = (self.of(patient, unmentioned) for patient in patients)
        rows = [
            [own.get(name, UNLABELLED) for name in self.phenotypes] for own in given
        ]
        return np.array(rows, np.int8).reshape(len(patients), len(self.phenotypes))

    def lines(self) -> tuple[str, ...]:
        """What is wrong in the files, a line each; nothing of a patient."""
        told = [line for table in self.tables for line in table.lines()]
        told += [
            f"{table.path}: {table.empty:,} pairs of patient and phenotype without a label"
            for table in self.tables
            if table.empty
        ]
        more = len(self.conflicts) - EXAMPLES
        tail = (
            [f"{more:,} more pairs labelled twice and differently"] if more > 0 else []
        )
        return (*told, *self.conflicts[:EXAMPLES], *tail)


# line, patient, phenotype, label if any
_Pair = tuple[int, str, str, int | None] | Damaged


class _Found:
    """What files say so far.

    later_holds: of two labels of a pair in two files; else neither holds. pairs:
    (patient, phenotype) → label, None where two differ, and the place it stands at.
    """

    def __init__(self, later_holds: bool) -> None:
        self._later_holds = later_holds
        self._reports: list[TableReport] = []
        self.phenotypes: set[str] = set()
        self._pairs: dict[tuple[str, str], tuple[int | None, TableReport, int]] = {}
        self._conflicts: dict[tuple[str, str], str] = {}

    def collect(self, path: Path, pairs: Iterable[_Pair]) -> TableReport:
        """Adds a file's labels; what became of its pairs."""
        report = TableReport(path)
        self._reports.append(report)
        for line, patient, phenotype, value in report.sound(pairs):
            self.phenotypes.add(phenotype)  # a damaged row may name none
            if value is None:
                report.empty += 1
            else:
                report.kept += 1
                self._add(line, (patient, phenotype), value)
        return report

    def _add(self, line: int, pair: tuple[str, str], value: int) -> None:
        """A label in the last file."""
        report = self._reports[-1]
        old, table, at = self._pairs.get(pair, (value, report, line))
        holds = old == value
        if not holds:
            holds = self._later_holds and table is not report
            if old is None and not holds:
                return
            how = "the later one holds" if holds else "neither holds"
            self._conflicts[pair] = (
                f"{report.path}:{line}: a label of the same pair is another one at "
                f"{table.path}:{at}: {how}"
            )
        self._pairs[pair] = (value if holds else None, report, line)

    def labels(self, phenotypes: Sequence[str]) -> PatientLabels:
        """All of them."""
        values: dict[str, dict[str, int]] = {}
        for (patient, phenotype), (value, _, _) in self._pairs.items():
            if value is not None:
                values.setdefault(patient, {})[phenotype] = value
        conflicts = tuple(self._conflicts.values())
        return PatientLabels(tuple(phenotypes), values, tuple(self._reports), conflicts)


# ---- tables --------------------------------------------------------------------------


def read_labels(path: Path, *more: Path, patient_column: str = "") -> PatientLabels:
    """The labels of one table or several: CSV or tab-separated, also .gz.

    patient_column: the column of patients, where a table has one of this name;
    otherwise one of the usual names. Raises DataError for a missing file or column, a
    file of mostly damaged rows, a column of something else than labels, two phenotypes
    that differ in case alone, or if there is no label at all.
    """
    found = _Found(later_holds=False)
    for each in (path, *more):
        table = Table(each, "labels")
        named = patient_column if table.has(patient_column) else ""
        patient = table.column(named, PATIENT_COLUMNS, "patient_column")
        if table.has(*_PHENOTYPE, *_LABEL):
            pairs = _long(table, patient)
        else:
            titles = _titles(table, patient)
            found.phenotypes |= set(titles.values())
            pairs = _wide(table, patient, titles)
        report = found.collect(each, pairs)
        report.require_sound(report.rows - report.empty)
    seen: dict[str, str] = {}
    for name in sorted(found.phenotypes):
        if (other := seen.setdefault(name.casefold(), name)) != name:
            raise DataError(
                f"{path}: phenotypes {other!r} and {name!r}: name them alike"
            )
    labels = found.labels(sorted(found.phenotypes))
    if not labels.values:
        raise DataError(f"{path}: there is no label in it: expected {_EXPECTED}")
    return labels


def _long(table: Table, patient: int) -> Iterator[_Pair]:
    columns = (patient, *(table.column("", names) for names in (_PHENOTYPE, _LABEL)))
    for row in table.rows():
        if isinstance(row, Damaged):
            yield row
            continue
        who, name, text = (row[1][at].strip() for at in columns)
        if who and 0 < len(name) <= _LONGEST:
            yield _pair(row[0], who, name, text, "the label")
        else:
            reason = "no phenotype" if not name else "the phenotype's name is too long"
            yield Damaged(row[0], reason if who else "no patient")


def _wide(table: Table, patient: int, titles: Mapping[int, str]) -> Iterator[_Pair]:
    """Raises DataError for a column in which most cells are no labels."""
    odd = dict.fromkeys(titles.values(), 0)  # cells that are no labels
    cells = odd.copy()  # that are not empty
    for row in table.rows():
        if isinstance(row, Damaged):
            yield row
        elif not (who := row[1][patient].strip()):
            yield Damaged(row[0], "no patient")
        else:
            for at, name in titles.items():
                pair = _pair(
                    row[0], who, name, row[1][at].strip(), f"the label of {name!r}"
                )
                odd[name] += isinstance(pair, Damaged)
                cells[name] += isinstance(pair, Damaged) or pair[3] is not None
                yield pair
    for name, bad in odd.items():
        if 2 * bad > cells[name]:
            raise table.error(
                f"column {name!r} holds no labels ({bad} cells are none): take it out"
            )


def _pair(line: int, patient: str, phenotype: str, text: str, what: str) -> _Pair:
    value = _VALUES.get(text.lower())
    if text and value is None:
        return Damaged(line, f"{what} is none of {_EXPECTED}")
    return line, patient, phenotype, value


def _titles(table: Table, patient: int) -> dict[int, str]:
    """The phenotypes of a wide table by column.

    Raises DataError for titles that name none.
    """
    titles = {at: title for at, title in enumerate(table.titles) if at != patient}
    if not titles:
        raise table.error(
            "there is only a column of patients: add one for each phenotype"
        )
    for at, title in titles.items():
        if not 0 < len(title) <= _LONGEST:
            raise table.error(f"column {at + 1} has no name: expected a phenotype's")
        if table.titles.count(title) > 1:
            raise table.error(f"two columns are called {title!r}: rename one")
    return titles


# ---- the obesity challenge -----------------------------------------------------------


def read_obesity(
    folder: Path, judgment: Judgment = "intuitive"
) -> tuple[tuple[Note, ...], PatientLabels]:
    """The summaries of a folder, one a patient, and the judgments of them.

    Files are told by their names, `*patient_records*.xml` and `*annotations*.xml`
    (.xml.gz too); annotations are read training first, addenda in the order of their
    names, test last.
    Raises DataError for missing files or ones that are no such XML, with the line.
    """
    notes = read_texts(_files(folder, "patient_records", "records"))
    found = _Found(later_holds=True)
    for path in _files(folder, "annotations", "annotations"):
        found.collect(path, _judgments(path, judgment))
    labels = found.labels(DISEASES)
    if not labels.values:
        raise DataError(f"{folder}: there is no {judgment} judgment of a known disease")
    return notes, labels


def _files(folder: Path, mark: str, kind: str) -> list[Path]:
    """The XML files of texts or of annotations, in the order to read them in."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    named = [
        p for p in list_files(folder) if p.name.lower().endswith((".xml", ".xml.gz"))
    ]
    named = [path for path in named if mark in path.name.lower()]
    if not named:
        like = f"obesity_{'standoff_' * (kind == 'annotations')}{mark}_*.xml"
        raise DataError(
            f"{folder}: no file of {kind} here: their names are like {like}"
        )
    # In order of names an addendum follows what it adds to: "." is before "_" and
    # digits.
    return sorted(named, key=lambda path: "test" in path.name.lower())


def read_texts(paths: Iterable[Path]) -> tuple[Note, ...]:
    """The summaries of one or more files; the document's id is the note's and the
    patient's.

    Raises DataError for a document without id or text, or one that is there twice.
    """
    notes: dict[str, Note] = {}
    places: dict[str, str] = {}
    for path in paths:
        number = len(notes)
        begin, id, found = 0, "", ""
        for line, name, attrs, text in elements(path, texts="text"):
            if name == "doc" and attrs is not None:
                begin, id, found = line, attrs.get("id", "").strip(), ""
            elif name == "text":
                found = found or text
            elif name == "doc":
                if not id or not found.strip():
                    reason = "no text" if id else "the document has no id"
                    raise DataError.at(path, begin, reason)
                if id in notes:
                    reason = f"the document's id is also that at {places[id]}"
                    raise DataError.at(path, begin, reason)
                places[id] = f"{path}:{begin}"
                notes[id] = Note(
                    id, found, id, "Discharge summary", path.name.split(".")[0]
                )
        if len(notes) == number:
            raise DataError(
                f"{path}: there is no doc element: these are no patient records"
            )
    return tuple(notes.values())


def _judgments(path: Path, wanted: str) -> Iterator[_Pair]:
    """The judgments of one source in a file."""
    names = {name.casefold(): name for name in DISEASES}
    source = disease = ""
    for line, element, attrs, _ in elements(path):
        given = attrs or {}  # nothing of an element is left where it ends
        if element == "diseases":
            source = given.get("source", "").strip().lower()
        elif element == "disease":
            disease = given.get("name", "").strip()
        elif element == "doc" and attrs is not None and disease and source == wanted:
            document, letter = (
                given.get("id", "").strip(),
                given.get("judgment", "").strip(),
            )
            name = names.get(disease.casefold())
            if name is None:
                hint = nearest(disease, DISEASES)
                yield Damaged(line, f"the disease is none of the challenge's: {hint}")
            elif letter.lower() not in ("y", "n", "q", "u"):
                yield Damaged(line, "the judgment is none of Y, N, Q and U")
            elif not document:
                yield Damaged(line, "the judgment is of no document")
            else:
                yield line, document, name, _VALUES[letter.lower()]


# ---- what a model is scored on -------------------------------------------------------

_NO_GOLD = "no JSON: expected one whole object a line, or --labels with a table beside the notes"

Gold = dict[str, dict[str, int]]  # patient → phenotype → label


def rename_labels(
    gold: Gold, label_map: Mapping[str, str]
) -> tuple[Gold, tuple[str, ...], int]:
    """Labels under the model's names, and the names in the file's order.

    label_map: name in the file → the model's. Where two labels of a patient come to one
    name and differ, neither holds; the last value is how many such pairs there are.
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
    """Texts and labels by patient, of JSON lines or of a folder of the obesity
    challenge.

    Raises DataError naming file and line.
    """
    if path.is_dir():
        summaries, labels = read_obesity(path)
        return by_patient(summaries), {
            note.id: labels.of(note.id) for note in summaries
        }
    notes: dict[str, list[str]] = {}
    gold: Gold = {}
    with open_text(path, named_encoding()) as file:
        for number, line in enumerate(bounded_lines(file, path), 1):
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
                    raise DataError.at(
                        path, number, f"two different labels of one {name!r}"
                    )
    return notes, gold


def read_gold_table(
    notes: dict[str, list[str]], path: Path, labels: Path
) -> tuple[dict[str, list[str]], Gold, tuple[str, ...]]:
    """Texts of notes and labels of a table, of the patients who have both; and a line
    for each thing that is wrong in the table, or left out.

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


def _line(path: Path, number: int, line: str) -> tuple[str, str, dict[str, Any]]:
    try:
        record = parse_json(line, strict=False)
    except JsonError as error:
        raise DataError.at(path, number, f"{_NO_GOLD} ({error})") from None
    values = (
        [record.get(k) for k in ("patient", "text", "labels")]
        if type(record) is dict
        else []
    )
    if (
        not values
        or not isinstance(values[1], str)
        or not isinstance(values[2] or {}, dict)
    ):
        raise DataError.at(
            path, number, 'expected the keys "patient", "text" and "labels"'
        )
    if not isinstance(values[0], str | int):
        raise DataError.at(path, number, 'the key "patient" is missing or no id')
    return str(values[0]), values[1], values[2] or {}
