"""A hospital's tables of codes: patient → set of codes, as `codes` writes them.

    read_mimic     MIMIC-III: DIAGNOSES_ICD, PROCEDURES_ICD, CPTEVENTS, ADMISSIONS
    read_omop      OMOP: condition_occurrence, procedure_occurrence, person, visit_occurrence
    read_codiesp   CodiEsp: trainD.tsv, trainP.tsv and the like, no header

Codes are strings: "0389" is septicaemia, 389 is hearing loss. Tables are read a line at a time
and may end in .gz. A damaged row (wrong number of columns, no patient, no code of its system,
not UTF-8, a quote that is not closed) is left out, counted, and named by its line; it harms no
row after it, since none of these tables has a field over several lines. Rows whose code is
empty are counted apart: MIMIC-III has some. Notes are read by `notes`.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from sys import intern
from typing import Final

from fednotes.core.errors import ConfigError, DataError, nearest
from fednotes.data.codes import code_of, system_of
from fednotes.data.formats.files import visible
from fednotes.data.notes.records import BROKEN, broken, open_bytes

EXAMPLES = 10  # damaged rows that a report names
_LONGEST = 1 << 20  # bytes of a row; more is no row


@dataclass(frozen=True, slots=True)
class Damaged:
    """A row that was left out: its line, counted from 1, and why."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class TableReport:
    """What became of a table's rows: kept, empty (no code given) and damaged ones are all.

    unknown: kept rows whose code the dictionary beside the table (D_ICD_DIAGNOSES and
    D_ICD_PROCEDURES) does not know, for example because a spreadsheet ate a leading zero; None
    without a dictionary. examples: the first damaged rows.
    """

    path: str
    rows: int
    kept: int
    empty: int
    damaged: int
    examples: tuple[Damaged, ...]
    unknown: int | None = None

    def lines(self) -> tuple[str, ...]:
        """The damaged rows, a line each, as in an error message."""
        named = tuple(f"{self.path}:{d.line}: {d.reason}" for d in self.examples)
        more = self.damaged - len(named)
        return (*named, f"{self.path}: {more} more damaged rows") if more else named


@dataclass(frozen=True, eq=False)
class PatientCodes:
    """The codes of a site's patients. They never leave the site.

    codes: patient → codes, at least one each. tables: what became of the rows. uncoded:
    patients that the site knows (ADMISSIONS; person, visit_occurrence) without any code.
    """

    codes: Mapping[str, frozenset[str]]
    tables: tuple[TableReport, ...]
    uncoded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of codes: its name, its columns, its coding system, its dictionary of codes."""

    name: str
    patient: str
    code: str
    system: str
    dictionary: str | None = None


MIMIC: Final[dict[str, _Table]] = {
    "diagnoses": _Table("DIAGNOSES_ICD", "SUBJECT_ID", "ICD9_CODE", "icd9", "D_ICD_DIAGNOSES"),
    "procedures": _Table(
        "PROCEDURES_ICD", "SUBJECT_ID", "ICD9_CODE", "icd9proc", "D_ICD_PROCEDURES"
    ),
    "cpt": _Table("CPTEVENTS", "SUBJECT_ID", "CPT_CD", "cpt"),
}
_CODIESP: Final = {"D": "icd10", "P": "icd10pcs"}


def read_mimic(
    folder: str | os.PathLike[str], tables: Collection[str] = tuple(MIMIC)
) -> PatientCodes:
    """The codes in a folder of MIMIC-III tables (.csv or .csv.gz, upper or lower case).

    tables: which of "diagnoses", "procedures", "cpt"; each must be there. ADMISSIONS is read
    where it is there. Raises ConfigError for another table, DataError for a missing file or
    column, or a table of mostly damaged rows.
    """
    folder = Path(folder)
    for name in tables:
        if name not in MIMIC:
            raise ConfigError(f"unknown table {name!r} of MIMIC-III: {nearest(name, MIMIC)}")
    return _read(folder, [MIMIC[name] for name in tables], {"ADMISSIONS": "SUBJECT_ID"})


def read_omop(
    folder: str | os.PathLike[str],
    conditions: str | None = "condition",
    procedures: str | None = "procedure",
) -> PatientCodes:
    """The codes in a folder of OMOP tables (.csv or .csv.gz; comma or tab).

    conditions, procedures: the coding system of each table; None leaves it out. "condition"
    and "procedure" take standard concepts (condition_concept_id; 0, not mapped, counts as
    empty); any other, such as "icd10" or "cpt", takes the source's codes
    (condition_source_value), which the tables do not say the system of. person and
    visit_occurrence are read where they are there. Raises as `read_mimic`.
    """
    wanted = []
    for kind, system in (("condition", conditions), ("procedure", procedures)):
        if system is not None:
            system_of(system)
            column = "concept_id" if system in ("condition", "procedure") else "source_value"
            table = _Table(f"{kind}_occurrence", "person_id", f"{kind}_{column}", system)
            wanted.append(table)
    return _read(Path(folder), wanted, {"person": "person_id", "visit_occurrence": "person_id"})


def read_codiesp(path: str | os.PathLike[str], kinds: Collection[str] = "DP") -> PatientCodes:
    """The codes of CodiEsp's cases: article → ICD-10 codes.

    path: a file such as trainD.tsv, or a folder whose files ending in D.tsv (diagnoses) and
    P.tsv (procedures) are all read. kinds: "D", "P" or both. Two columns without a header:
    article, code; codes are lower case there. Raises as `read_mimic`.
    """
    path = Path(path)
    for kind in kinds:
        if kind not in _CODIESP:
            raise ConfigError(f"CodiEsp has codes of kind D and P, not {kind!r}")
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    files = [path] if path.is_file() else visible(path, below=True)
    tables = [(f, kind) for f in files for kind in kinds if _is_codiesp(f, kind)]
    if not tables:
        ends = " or ".join(f"{kind}.tsv" for kind in kinds)
        raise DataError(f"{path}: no file of codes here: their names end in {ends}")
    codes: dict[str, set[str]] = {}
    reports = []
    for file, kind in tables:
        rows = _pairs(file, _lines(file), 0, 1, 2, "\t")
        reports.append(_collect(file, rows, _CODIESP[kind], codes))
    return PatientCodes(_frozen(codes), tuple(reports))


def _is_codiesp(path: Path, kind: str) -> bool:
    return path.name.removesuffix(".gz").endswith(f"{kind}.tsv")


def _read(folder: Path, tables: Sequence[_Table], known: Mapping[str, str]) -> PatientCodes:
    """All tables of a folder, and the patients that other tables know."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder of tables")
    found = [(table, _find(folder, table.name)) for table in tables]
    for table, path in found:
        if path is None:
            raise DataError(
                f"{folder}: there is no {table.name}.csv (nor .csv.gz): add the table or leave "
                "it out of the tables to read"
            )
    codes: dict[str, set[str]] = {}
    reports = []
    for table, path in found:
        assert path is not None
        rows = _table_rows(path, (table.patient, table.code))
        names = _find(folder, table.dictionary) if table.dictionary else None
        dictionary = _dictionary(names, table) if names else None
        reports.append(_collect(path, rows, table.system, codes, dictionary))
    others = [(path, column) for n, column in known.items() if (path := _find(folder, n))]
    everyone = {p for path, column in others for p in _people(path, column)}
    return PatientCodes(_frozen(codes), tuple(reports), tuple(sorted(everyone - set(codes))))


def _frozen(codes: Mapping[str, set[str]]) -> dict[str, frozenset[str]]:
    return {patient: frozenset(given) for patient, given in sorted(codes.items())}


def _find(folder: Path, name: str) -> Path | None:
    """The table of this name in a folder, whatever its case and packing."""
    wanted = {f"{name.lower()}{ending}" for ending in (".csv", ".csv.gz", ".tsv", ".tsv.gz")}
    return next((path for path in visible(folder) if path.name.lower() in wanted), None)


_Row = tuple[int, str, str] | Damaged  # line, patient, code


def _collect(
    path: Path,
    rows: Iterable[_Row],
    system: str,
    codes: dict[str, set[str]],
    dictionary: Collection[str] | None = None,
) -> TableReport:
    """Adds a table's codes to `codes`, and says what became of its rows."""
    total = kept = empty = damaged = unknown = 0
    examples: list[Damaged] = []
    nothing = ("", "0") if system in ("condition", "procedure") else ("",)
    parsed: dict[str, str | None] = {}
    for row in rows:
        total += 1
        if not isinstance(row, Damaged):
            line, patient, text = row
            if text in nothing and patient:
                empty += 1
                continue
            if text not in parsed:
                parsed[text] = code_of(system, text)
            code = parsed[text]
            if patient and code is not None:
                codes.setdefault(intern(patient), set()).add(code)
                kept += 1
                unknown += dictionary is not None and code not in dictionary
                continue
            row = Damaged(line, "no patient" if not patient else f"the code is none of {system}")
        damaged += 1
        if len(examples) < EXAMPLES:
            examples.append(row)
    if 2 * damaged > total:
        first = examples[0]
        message = f"{first.reason}; so are {damaged} of {total} rows: is this the right table?"
        raise DataError.at(path, first.line, message)
    return TableReport(
        str(path),
        total,
        kept,
        empty,
        damaged,
        tuple(examples),
        None if dictionary is None else unknown,
    )


def _dictionary(path: Path, table: _Table) -> set[str]:
    """The codes that a dictionary of codes lists."""
    rows = _table_rows(path, (table.code, table.code))
    listed = (code_of(table.system, row[2]) for row in rows if not isinstance(row, Damaged))
    return {code for code in listed if code is not None}


def _people(path: Path, column: str) -> Iterator[str]:
    """The patients of a table."""
    for row in _table_rows(path, (column, column)):
        if not isinstance(row, Damaged) and row[1]:
            yield row[1]


def _table_rows(path: Path, columns: tuple[str, str]) -> Iterator[_Row]:
    """The patients and codes of a table with a header. Raises DataError for a missing column."""
    lines = _lines(path)
    number, header = next(lines, (1, ""))
    if not isinstance(header, str) or not header.strip():
        raise DataError.at(path, number, "the table has no header: expected the columns' names")
    delimiter = "\t" if header.count("\t") > header.count(",") else ","
    names = [name.strip().lower() for name in next(csv.reader([header], delimiter=delimiter))]
    places = []
    for column in columns:
        if column.lower() not in names:
            hint = nearest(column.lower(), names)
            raise DataError.at(path, number, f"there is no column {column!r}: {hint}")
        places.append(names.index(column.lower()))
    yield from _pairs(path, lines, places[0], places[1], len(names), delimiter)


def _pairs(
    path: Path,
    lines: Iterable[tuple[int, str | None]],
    patient: int,
    code: int,
    width: int,
    delimiter: str,
) -> Iterator[_Row]:
    """Each line's patient and code."""
    for number, line in lines:
        if line is None:
            yield Damaged(number, "a byte is not UTF-8, or the row is too long")
            continue
        if not line.strip():
            continue
        if '"' not in line:
            row = line.split(delimiter)
        else:
            try:
                row = next(csv.reader([line], delimiter=delimiter, strict=True))
            except csv.Error:
                yield Damaged(number, "a quote is not closed")
                continue
        if len(row) != width:
            yield Damaged(number, f"{len(row)} columns instead of {width}")
            continue
        yield number, row[patient].strip(), row[code].strip()


def _lines(path: Path) -> Iterator[tuple[int, str | None]]:
    """Numbered lines without their ends; None for one that is no text or too long for a row."""
    with open_bytes(path) as file:
        number, inside = 0, False  # inside: within a line that is too long
        while True:
            try:
                data = file.readline(_LONGEST)
            except BROKEN as error:
                raise broken(path, error) from None
            if not data:
                return
            goes_on = len(data) == _LONGEST and not data.endswith(b"\n")
            if not inside:
                number += 1
                yield number, None if goes_on else _decoded(data, number)
            inside = goes_on


def _decoded(data: bytes, number: int) -> str | None:
    try:
        return data.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError:
        return None
