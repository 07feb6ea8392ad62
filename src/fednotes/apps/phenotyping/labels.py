"""Labels of patients' phenotypes, and the tables that contain them.

The header of a table shows its form:

    long   patient, phenotype (or disease), label (or judgment): a row for each pair;
           other columns are ignored
    wide   patient, and a column for each phenotype: a row for each patient

A label is a word, a letter or a number, in any case. Numbers may end in ".0", as
spreadsheets write them in columns with empty cells:

    present       Y   1
    absent        N   0
    questionable  Q   2
    unmentioned   U       -1, or 0 on request: the text does not mention the phenotype.
                          It is a label only for the question whether the text does
    (empty)               -1: counted; the phenotype is one of the table's all the same

A row with anything else is damaged: it is left out, counted, and reported with its
line.

If a pair of patient and phenotype has two different labels, neither can be trusted, so
the pair has none. These pairs are counted and reported.

Phenotypes are sorted by name, so that sites with the same phenotypes agree. A site that
has never judged one of them lists it without a label: as an empty column, or in a row
without a label.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np

from fednotes.apps.phenotyping.cohort import ABSENT, PRESENT, QUESTIONABLE, UNLABELLED
from fednotes.apps.phenotyping.tables import (
    EXAMPLES,
    PATIENT_COLUMNS,
    Damaged,
    HeaderTable,
    TableReport,
)
from fednotes.core.errors import DataError

Unmentioned = Literal["unlabelled", "absent"]  # what a label "unmentioned" counts as

UNMENTIONED: Final = -2
LABEL_VALUES: Final = {
    "present": PRESENT,
    "y": PRESENT,
    "1": PRESENT,
    "1.0": PRESENT,
    "absent": ABSENT,
    "n": ABSENT,
    "0": ABSENT,
    "0.0": ABSENT,
    "questionable": QUESTIONABLE,
    "q": QUESTIONABLE,
    "2": QUESTIONABLE,
    "2.0": QUESTIONABLE,
    "unmentioned": UNMENTIONED,
    "u": UNMENTIONED,
}
_EXPECTED: Final = "present, absent, questionable; Y, N, Q, U; 1, 0, 2"
_PHENOTYPE_COLUMNS: Final = ("phenotype", "disease")
_LABEL_COLUMNS: Final = ("label", "judgment")
_LONGEST_NAME: Final = 100  # maximum length of a phenotype's name
# Each phenotype gets a classifier and a label for each patient. Without a bound, a
# table of 1 MB with as many phenotypes as patients would take gigabytes.
_MAX_PHENOTYPES: Final = 10_000


# ---- labels --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PatientLabels:
    """The labels of a site's patients, which never leave the site.

    Attributes:
        phenotypes: Names of the phenotypes, sorted.
        values: The valid labels, by patient and phenotype.
        tables: One report per file about its pairs of patient and phenotype. A row of a
            wide table has as many pairs as the table has phenotypes.
        conflicts: A message about each pair with two different labels.
    """

    phenotypes: tuple[str, ...]
    values: Mapping[str, Mapping[str, int]] = field(repr=False)
    tables: tuple[TableReport, ...] = ()
    conflicts: tuple[str, ...] = ()

    def get_labels(
        self, patient: str, unmentioned: Unmentioned = "unlabelled"
    ) -> dict[str, int]:
        """Return the labels of a patient.

        Args:
            patient: The patient.
            unmentioned: What a label "unmentioned" counts as.

        Returns:
            0, 1 or 2 for each phenotype that has a label.
        """
        labels = {}
        for phenotype, value in self.values.get(patient, {}).items():
            if value != UNMENTIONED:
                labels[phenotype] = value
            elif unmentioned == "absent":
                labels[phenotype] = ABSENT
        return labels

    def to_matrix(
        self, patients: Sequence[str], unmentioned: Unmentioned = "unlabelled"
    ) -> np.ndarray:
        """Return the labels of patients in the form of `Cohort`.

        Args:
            patients: The patients.
            unmentioned: What a label "unmentioned" counts as.

        Returns:
            (patients, phenotypes) int8; -1 for a missing label.
        """
        columns = {name: column for column, name in enumerate(self.phenotypes)}
        matrix = np.full((len(patients), len(columns)), UNLABELLED, np.int8)
        for row, patient in enumerate(patients):
            for name, label in self.get_labels(patient, unmentioned).items():
                if name in columns:
                    matrix[row, columns[name]] = label
        return matrix

    def list_messages(self) -> tuple[str, ...]:
        """Return a message about each problem in the files, without patients' data."""
        messages = [
            message for table in self.tables for message in table.list_messages()
        ]
        messages += [
            f"{table.path}: {table.empty:,} pairs of patient and phenotype without a "
            "label"
            for table in self.tables
            if table.empty
        ]
        messages += self.conflicts[:EXAMPLES]
        more = len(self.conflicts) - EXAMPLES
        if more > 0:
            messages.append(f"{more:,} more pairs labelled twice and differently")
        return tuple(messages)


class Pair(NamedTuple):
    """A patient and a phenotype in a file.

    Attributes:
        line: The line, counted from 1.
        patient: The patient.
        phenotype: The phenotype.
        value: The label; None if it is empty.
    """

    line: int
    patient: str
    phenotype: str
    value: int | None


class _Recorded(NamedTuple):
    """The label of a pair so far, and its location; None if labels conflict."""

    value: int | None
    table: TableReport
    line: int


class LabelCollector:
    """Collects the labels of several files.

    Args:
        prefers_later: Whether the later of two different labels in two files is used;
            otherwise neither is.

    Attributes:
        phenotypes: The phenotypes so far.
    """

    def __init__(self, *, prefers_later: bool) -> None:
        self.phenotypes: set[str] = set()
        self._prefers_later = prefers_later
        self._reports: list[TableReport] = []
        self._recorded: dict[tuple[str, str], _Recorded] = {}
        self._conflicts: dict[tuple[str, str], str] = {}

    def add_file(self, path: Path, pairs: Iterable[Pair | Damaged]) -> TableReport:
        """Add the labels of a file, and return a report about its pairs."""
        report = TableReport(path)
        self._reports.append(report)
        for pair in report.select_sound(pairs):
            self.phenotypes.add(pair.phenotype)
            if pair.value is None:
                report.empty += 1
            else:
                report.kept += 1
                self._add_label(pair, pair.value, report)
        return report

    def _add_label(self, pair: Pair, value: int, report: TableReport) -> None:
        """Add the label of a pair, and record any conflict with an earlier one."""
        key = (pair.patient, pair.phenotype)
        earlier = self._recorded.get(key)
        if earlier is None or earlier.value == value:
            self._recorded[key] = _Recorded(value, report, pair.line)
            return
        is_correction = self._prefers_later and earlier.table is not report
        if earlier.value is None and not is_correction:
            return  # the pair has a conflict already
        outcome = "the later one is used" if is_correction else "neither is used"
        self._conflicts[key] = (
            f"{report.path}:{pair.line}: the same pair has another label at "
            f"{earlier.table.path}:{earlier.line}: {outcome}"
        )
        new_value = value if is_correction else None
        self._recorded[key] = _Recorded(new_value, report, pair.line)

    def make_labels(self, phenotypes: Sequence[str]) -> PatientLabels:
        """Return all valid labels.

        Args:
            phenotypes: Names of the phenotypes, in their order.

        Raises:
            DataError: There are too many phenotypes.
        """
        if len(phenotypes) > _MAX_PHENOTYPES:
            raise DataError(
                f"{self._reports[-1].path}: the labels name {len(phenotypes):,} "
                f"phenotypes, but at most {_MAX_PHENOTYPES:,} can be learned: check "
                "that the names of phenotypes are not those of patients or notes"
            )
        values: dict[str, dict[str, int]] = {}
        for (patient, phenotype), recorded in self._recorded.items():
            if recorded.value is not None:
                values.setdefault(patient, {})[phenotype] = recorded.value
        return PatientLabels(
            tuple(phenotypes),
            values,
            tables=tuple(self._reports),
            conflicts=tuple(self._conflicts.values()),
        )


# ---- tables --------------------------------------------------------------------------


def read_labels(path: Path, *more: Path, patient_column: str = "") -> PatientLabels:
    """Read the labels in one or more tables, separated by commas or tabs, also .gz.

    Args:
        path: A table.
        more: Further tables.
        patient_column: Column of patients in the tables that have a column of this
            name. In others, the column has a usual name.

    Raises:
        DataError: A file or column is missing, most rows are damaged, a column contains
            values other than labels, two phenotypes differ only in case, or there are
            too many phenotypes or no label at all.
    """
    collector = LabelCollector(prefers_later=False)
    for file in (path, *more):
        table = HeaderTable(file, "labels")
        name = patient_column if table.has_column(patient_column) else ""
        patient = table.find_column(name, PATIENT_COLUMNS, parameter="patient_column")
        if table.has_column(*_PHENOTYPE_COLUMNS, *_LABEL_COLUMNS):
            pairs = _read_long_table(table, patient)
        else:
            phenotypes = _find_phenotype_columns(table, patient)
            collector.phenotypes |= set(phenotypes.values())
            pairs = _read_wide_table(table, patient, phenotypes)
        report = collector.add_file(file, pairs)
        report.require_sound(report.rows - report.empty)
    _require_distinct(path, collector.phenotypes)
    labels = collector.make_labels(sorted(collector.phenotypes))
    if not labels.values:
        raise DataError(f"{path} contains no labels: expected {_EXPECTED}")
    return labels


def _require_distinct(path: Path, phenotypes: Collection[str]) -> None:
    """Raise DataError if two phenotypes differ only in case."""
    names: dict[str, str] = {}
    for name in sorted(phenotypes):
        other = names.setdefault(name.casefold(), name)
        if other != name:
            raise DataError(
                f"{path}: phenotypes {other!r} and {name!r} differ only in case: "
                "use one name"
            )


def _read_long_table(
    table: HeaderTable, patient_column: int
) -> Iterator[Pair | Damaged]:
    """Yield the pairs of a table with a row for each pair."""
    phenotype_column = table.find_column("", _PHENOTYPE_COLUMNS)
    label_column = table.find_column("", _LABEL_COLUMNS)
    for row in table.read_rows():
        if isinstance(row, Damaged):
            yield row
            continue
        patient = row.cells[patient_column].strip()
        phenotype = row.cells[phenotype_column].strip()
        if not patient:
            yield Damaged(row.line, "no patient")
        elif not phenotype:
            yield Damaged(row.line, "no phenotype")
        elif len(phenotype) > _LONGEST_NAME:
            yield Damaged(row.line, "the phenotype's name is too long")
        else:
            text = row.cells[label_column].strip()
            yield _read_pair(row.line, patient, phenotype, text=text, cell="the label")


def _read_wide_table(
    table: HeaderTable, patient_column: int, phenotypes: Mapping[int, str]
) -> Iterator[Pair | Damaged]:
    """Yield the pairs of a table with a column for each phenotype.

    Raises:
        DataError: Most cells of a column are not labels.
    """
    damaged = dict.fromkeys(phenotypes.values(), 0)  # cells that are not labels
    filled = dict.fromkeys(phenotypes.values(), 0)  # cells that are not empty
    for row in table.read_rows():
        if isinstance(row, Damaged):
            yield row
            continue
        patient = row.cells[patient_column].strip()
        if not patient:
            yield Damaged(row.line, "no patient")
            continue
        for column, name in phenotypes.items():
            text = row.cells[column].strip()
            pair = _read_pair(
                row.line, patient, name, text=text, cell=f"the label of {name!r}"
            )
            damaged[name] += isinstance(pair, Damaged)
            filled[name] += bool(text)
            yield pair
    for name, number in damaged.items():
        if 2 * number > filled[name]:
            raise table.make_error(
                f"column {name!r} does not contain labels ({number} cells are not "
                "labels): remove it"
            )


def _read_pair(
    line: int, patient: str, phenotype: str, *, text: str, cell: str
) -> Pair | Damaged:
    """Return the pair in a cell.

    Args:
        line: Line of the cell.
        patient: The patient.
        phenotype: The phenotype.
        text: The content of the cell.
        cell: How messages refer to the cell.
    """
    value = LABEL_VALUES.get(text.lower())
    if text and value is None:
        return Damaged(line, f"{cell} is not one of {_EXPECTED}")
    return Pair(line, patient, phenotype, value)


def _find_phenotype_columns(table: HeaderTable, patient_column: int) -> dict[int, str]:
    """Return the phenotype of each column of a wide table, except the patients' column.

    Raises:
        DataError: A title is missing, too long or repeated, or there is no phenotype.
    """
    columns = dict(enumerate(table.titles))
    del columns[patient_column]
    if not columns:
        raise table.make_error(
            "there is only a column of patients: add one for each phenotype"
        )
    title_counts = Counter(table.titles)
    for column, title in columns.items():
        if not title:
            raise table.make_error(
                f"column {column + 1} has no name: expected the name of a phenotype"
            )
        if len(title) > _LONGEST_NAME:
            raise table.make_error(
                f"column {column + 1}: the name is longer than {_LONGEST_NAME} "
                "characters: shorten it"
            )
        if title_counts[title] > 1:
            raise table.make_error(f"two columns are called {title!r}: rename one")
    return columns
