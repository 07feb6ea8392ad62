"""Judged phenotypes of patients: tables, the i2b2 2008 obesity challenge, JSON lines.

A table is told by its header:

    long   patient, phenotype (or disease), label (or judgment): a row for each pair; other
           columns are passed over
    wide   patient, and a column for each phenotype: a row for each patient

The challenge (Uzuner 2009) is a folder of discharge summaries, judged for 16 diseases; each is a
patient of its own, as in Liu, Dligach and Miller 2019:

    obesity_patient_records_training.xml, …_training2.xml, …_test.xml   doc[@id] > text
    obesity_standoff_annotations_training.xml, …_addendum*.xml, …_test.xml
        diseases[@source] > disease[@name] > doc[@id][@judgment]

Two experts judged each summary twice: `textual`, what the text states, and `intuitive`, what a
reader concludes, which is what the paper uses. In its Table 1 the columns of presence and absence
are exchanged; labels here follow the files.

A label is a word, a letter or a number, in any case (numbers may end in ".0", as spreadsheets
write them beside empty cells):

    present       Y   1
    absent        N   0
    questionable  Q   2
    unmentioned   U       -1, or 0 on request: the text says nothing of it either way, which is a
                          label only where the question is "does the text state it?"
    (empty)               -1: counted; the phenotype is one of the table's all the same

Anything else is damaged: left out, counted, named by its line. A pair labelled twice and
differently is no label at all, since nothing says which one holds; but in the challenge's files
the later one holds, since an addendum corrects. Both are counted and named. Phenotypes are ordered
by name, so that sites that judge the same ones agree. A site that has never judged one of them
lists it without a label: an empty column, or a row without label.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from fednotes.core.errors import DataError, nearest
from fednotes.core.parsing import JsonError, parse_json
from fednotes.data.formats.files import open_file, visible
from fednotes.data.notes import LARGEST, Note
from fednotes.patients.cohort import ABSENT, LABELS, PRESENT, QUESTIONABLE, UNLABELLED
from fednotes.patients.concepts import by_patient
from fednotes.patients.tables import EXAMPLES, PATIENT_COLUMNS, Damaged, Table, TableReport, XmlFile

DISEASES: Final = (
    *("Asthma", "CAD", "CHF", "Depression", "Diabetes", "GERD", "Gallstones", "Gout"),
    *("Hypercholesterolemia", "Hypertension", "Hypertriglyceridemia", "OA", "OSA", "Obesity"),
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
    values: Mapping[str, Mapping[str, int]]
    tables: tuple[TableReport, ...] = ()
    conflicts: tuple[str, ...] = ()

    def of(self, patient: str, unmentioned: Unmentioned = "unlabelled") -> dict[str, int]:
        """Phenotype → label (0, 1, 2) of a patient; what is unlabelled is not in it.

        unmentioned: what U becomes.
        """
        own = self.values.get(patient, {})
        found = {n: ABSENT if value == _UNMENTIONED else value for n, value in own.items()}
        return found if unmentioned == "absent" else {n: v for n, v in own.items() if v >= 0}

    def matrix(
        self, patients: Sequence[str], unmentioned: Unmentioned = "unlabelled"
    ) -> np.ndarray:
        """(patients, phenotypes) int8, as in `Cohort`; -1 where there is no label."""
        given = (self.of(patient, unmentioned) for patient in patients)
        rows = [[own.get(name, UNLABELLED) for name in self.phenotypes] for own in given]
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
        tail = [f"{more:,} more pairs labelled twice and differently"] if more > 0 else []
        return (*told, *self.conflicts[:EXAMPLES], *tail)


class _Found:
    """What files say so far.

    later_holds: of two labels of a pair in two files; else neither holds. pairs: (patient,
    phenotype) → label, None where two differ, and the place it stands at.
    """

    def __init__(self, later_holds: bool) -> None:
        self._later_holds = later_holds
        self.reports: list[TableReport] = []
        self.phenotypes: dict[str, None] = {}
        self._pairs: dict[tuple[str, str], tuple[int | None, TableReport, int]] = {}
        self._conflicts: dict[tuple[str, str], str] = {}

    def add(self, line: int, patient: str, phenotype: str, value: int) -> None:
        """A label in the last file."""
        pair, report = (patient, phenotype), self.reports[-1]
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
        return PatientLabels(tuple(phenotypes), values, tuple(self.reports), conflicts)


# ---- tables ----------------------------------------------------------------------------------

_Pair = tuple[int, str, str, str] | Damaged  # line, patient, phenotype, label as it stands


def read_labels(path: Path, *more: Path, patient_column: str = "") -> PatientLabels:
    """The labels of one table or several: CSV or tab-separated, also .gz.

    patient_column: the column of patients, where a table has one of this name; otherwise one of
    the usual names. Raises DataError for a missing file or column, a file of mostly damaged rows,
    a column of something else than labels, two phenotypes that differ in case alone, or if
    there is no label at all.
    """
    found = _Found(later_holds=False)
    for each in (path, *more):
        table = Table(each, "labels")
        named = patient_column if table.has(patient_column) else ""
        patient = table.column(named, PATIENT_COLUMNS, "patient_column")
        found.reports.append(TableReport(each))
        if table.has(*_PHENOTYPE, *_LABEL):
            _collect(found, table, _long(table, patient), wide=False)
        else:
            titles = _titles(table, patient)
            found.phenotypes |= dict.fromkeys(titles.values())
            _collect(found, table, _wide(table, patient, titles), wide=True)
    seen: dict[str, str] = {}
    for name in sorted(found.phenotypes):
        if (other := seen.setdefault(name.casefold(), name)) != name:
            raise DataError(f"{path}: phenotypes {other!r} and {name!r}: name them alike")
    labels = found.labels(sorted(found.phenotypes))
    if not labels.values:
        raise DataError(f"{path}: there is no label in it: expected {_EXPECTED}")
    return labels


def _long(table: Table, patient: int) -> Iterator[_Pair]:
    phenotype, label = (table.column("", names) for names in (_PHENOTYPE, _LABEL))
    for row in table.rows():
        if isinstance(row, Damaged):
            yield row
            continue
        who, name, text = (row[1][at].strip() for at in (patient, phenotype, label))
        if not who or not 0 < len(name) <= _LONGEST:
            reason = "no phenotype" if not name else "the phenotype's name is too long"
            yield Damaged(row[0], reason if who else "no patient")
        else:
            yield row[0], who, name, text


def _wide(table: Table, patient: int, titles: Mapping[int, str]) -> Iterator[_Pair]:
    for row in table.rows():
        if isinstance(row, Damaged):
            yield row
        elif not (who := row[1][patient].strip()):
            yield Damaged(row[0], "no patient")
        else:
            yield from ((row[0], who, name, row[1][at].strip()) for at, name in titles.items())


def _titles(table: Table, patient: int) -> dict[int, str]:
    """The phenotypes of a wide table by column. Raises DataError for titles that name none."""
    titles = {at: title for at, title in enumerate(table.titles) if at != patient}
    if not titles:
        raise table.error("there is only a column of patients: add one for each phenotype")
    for at, title in titles.items():
        if not 0 < len(title) <= _LONGEST:
            raise table.error(f"column {at + 1} has no name: expected a phenotype's")
        if list(titles.values()).count(title) > 1:
            raise table.error(f"two columns are called {title!r}: rename one")
    return titles


def _collect(found: _Found, table: Table, pairs: Iterable[_Pair], wide: bool) -> None:
    """Adds a table's labels, and what became of its pairs."""
    report = found.reports[-1]
    sound: dict[str, list[int]] = {}  # a wide table's phenotype → labels and other cells
    for row in pairs:
        report.rows += 1
        if not isinstance(row, Damaged):
            line, patient, phenotype, text = row
            value = _VALUES.get(text.lower())
            if text:
                sound.setdefault(phenotype, [0, 0])[value is None] += 1
            if text and value is None:
                of = f"the label of {phenotype!r}" if wide else "the label"
                row = Damaged(line, f"{of} is none of {_EXPECTED}")
            else:
                found.phenotypes[phenotype] = None  # a damaged row may name none
                report.empty += not text
        if isinstance(row, Damaged):
            report.damage(row)
        elif value is not None:
            report.kept += 1
            found.add(line, patient, phenotype, value)
    for name, (good, bad) in sound.items():
        if wide and bad > good:
            raise table.error(
                f"column {name!r} holds no labels ({bad} cells are none): take it out"
            )
    report.require_sound(report.rows - report.empty)


# ---- the obesity challenge -------------------------------------------------------------------


def read_obesity(
    folder: Path, judgment: Judgment = "intuitive"
) -> tuple[tuple[Note, ...], PatientLabels]:
    """The summaries of a folder, one a patient, and the judgments of them.

    Files are told by their names, `*patient_records*.xml` and `*annotations*.xml` (.xml.gz
    too); annotations are read training first, addenda in the order of their names, test last.
    Raises DataError for missing files or ones that are no such XML, with the line.
    """
    notes = read_texts(_files(folder, "patient_records", "records"))
    found = _Found(later_holds=True)
    for path in _files(folder, "annotations", "annotations"):
        found.reports.append(TableReport(path))
        _Judged(found, path, judgment).read()
    labels = found.labels(DISEASES)
    if not labels.values:
        raise DataError(f"{folder}: there is no {judgment} judgment of a known disease")
    return notes, labels


def _files(folder: Path, mark: str, kind: str) -> list[Path]:
    """The XML files of texts or of annotations, in the order to read them in."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    named = [p for p in visible(folder) if p.name.lower().endswith((".xml", ".xml.gz"))]
    named = [path for path in named if mark in path.name.lower()]
    if not named:
        like = f"obesity_{'standoff_' * (kind == 'annotations')}{mark}_*.xml"
        raise DataError(f"{folder}: no file of {kind} here: their names are like {like}")
    # In order of names an addendum follows what it adds to: "." is before "_" and digits.
    return sorted(named, key=lambda path: "test" in path.name.lower())


def read_texts(paths: Iterable[Path]) -> tuple[Note, ...]:
    """The summaries of one or more files; the document's id is the note's and the patient's.

    Raises DataError for a document without id or text, or one that is there twice.
    """
    notes: dict[str, Note] = {}
    places: dict[str, str] = {}
    for path in paths:
        documents = _Documents(path)
        documents.read()
        if not documents.made:
            raise DataError(f"{path}: there is no doc element: these are no patient records")
        for line, id, text in documents.made:
            if not id or not text.strip():
                raise DataError.at(path, line, "the document has no id" if not id else "no text")
            if id in notes:
                raise DataError.at(path, line, f"the document's id is also that at {places[id]}")
            places[id] = f"{path}:{line}"
            notes[id] = Note(id, text, id, "Discharge summary", path.name.split(".")[0])
    return tuple(notes.values())


class _Documents(XmlFile):
    """Line, id and text of each `doc` of a file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.made: list[tuple[int, str, str]] = []
        self._doc: tuple[int, str] | None = None
        self._pieces: list[str] | None = None
        self._text, self._length = "", 0

    def startElement(self, name: str, attrs: Any) -> None:  # noqa: N802
        if name == "doc":
            self._doc, self._text, self._length = (self.line, attrs.get("id", "").strip()), "", 0
        self._pieces = [] if name == "text" and self._doc is not None else self._pieces

    def characters(self, content: str) -> None:
        if self._pieces is not None:
            self._length += len(content)
            if self._length > LARGEST:
                raise self.error(f"a text has more than {LARGEST:,} characters")
            self._pieces.append(content)

    def endElement(self, name: str) -> None:  # noqa: N802
        if name == "text" and self._pieces is not None:
            self._text, self._pieces = self._text or "".join(self._pieces), None
        elif name == "doc" and self._doc is not None:
            self.made.append((*self._doc, self._text))
            self._doc = None


class _Judged(XmlFile):
    """The judgments of one source in a file, which has been added to the reports."""

    def __init__(self, found: _Found, path: Path, judgment: str) -> None:
        super().__init__(path)
        self._found, self._wanted = found, judgment
        self._names = {name.casefold(): name for name in DISEASES}
        self._source = self._disease = ""

    def startElement(self, name: str, attrs: Any) -> None:  # noqa: N802
        if name == "diseases":
            self._source = attrs.get("source", "").strip().lower()
        elif name == "disease":
            self._disease = attrs.get("name", "").strip()
        elif name == "doc" and self._disease and self._source == self._wanted:
            self._judgment(attrs.get("id", "").strip(), attrs.get("judgment", "").strip().lower())

    def _judgment(self, document: str, letter: str) -> None:
        report, disease = self._found.reports[-1], self._names.get(self._disease.casefold())
        report.rows += 1
        if disease is None:
            hint = nearest(self._disease, DISEASES)
            reason = f"the disease is none of the challenge's: {hint}"
        elif letter not in ("y", "n", "q", "u"):
            reason = "the judgment is none of Y, N, Q and U"
        elif not document:
            reason = "the judgment is of no document"
        else:
            report.kept += 1
            self._found.add(self.line, document, disease, _VALUES[letter])
            return
        report.damage(Damaged(self.line, reason))

    def endElement(self, name: str) -> None:  # noqa: N802
        if name == "diseases":
            self._source = ""
        elif name == "disease":
            self._disease = ""


# ---- what a model is scored on ---------------------------------------------------------------

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
        summaries, labels = read_obesity(path)
        return by_patient(summaries), {note.id: labels.of(note.id) for note in summaries}
    notes: dict[str, list[str]] = {}
    gold: Gold = {}
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
