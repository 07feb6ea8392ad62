"""A hospital's tables of codes: patient → set of codes, as `codes` writes them.

    read_mimic     MIMIC-III: DIAGNOSES_ICD, PROCEDURES_ICD, CPTEVENTS, ADMISSIONS
    read_omop      OMOP: condition_occurrence, procedure_occurrence, person, visit_occurrence
    read_codiesp   CodiEsp: trainD.tsv, trainP.tsv and the like, no header

Codes are strings: "0389" is septicaemia, 389 is hearing loss. Tables are read a line at a time
and may end in .gz. A damaged row (wrong number of columns, no patient, no code of its system,
not UTF-8, a quote that is not closed) is left out, counted, and named by its line; it harms no
row after it, since none of these tables has a field over several lines. Rows whose code is
empty are counted apart: MIMIC-III has some. Notes are read by `notes`, tables of a site's own by
`code_table`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from sys import intern
from typing import Final

from fednotes.core.errors import ConfigError, DataError, nearest
from fednotes.data.codes import code_of, system_of
from fednotes.data.formats.files import visible
from fednotes.data.table_rows import (
    EXAMPLES,
    Damaged,
    Row,
    TableReport,
    find_column,
    lines,
    mostly_sound,
    open_table,
    rows,
)

__all__ = [
    "EXAMPLES",
    "MIMIC",
    "CodeRow",
    "Damaged",
    "PatientCodes",
    "TableReport",
    "collect",
    "frozen",
    "read_codiesp",
    "read_mimic",
    "read_omop",
]


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
_CONCEPTS: Final = ("condition", "procedure")  # systems of OMOP, whose 0 is no concept
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
    files = [path] if not path.is_dir() else visible(path, below=True)
    tables = [(f, kind) for f in files for kind in kinds if _is_codiesp(f, kind)]
    if not tables:
        ends = " or ".join(f"{kind}.tsv" for kind in kinds)
        raise DataError(f"{path}: no file of codes here: their names end in {ends}")
    codes: dict[str, set[str]] = {}
    reports = []
    for file, kind in tables:
        pairs = _pairs(rows(lines(file), 2, "\t"), 0, 1, _CODIESP[kind])
        reports.append(collect(file, pairs, codes))
    return PatientCodes(frozen(codes), tuple(reports))


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
        given = _table_rows(path, (table.patient, table.code), table.system)
        names = _find(folder, table.dictionary) if table.dictionary else None
        dictionary = _dictionary(names, table) if names else None
        reports.append(collect(path, given, codes, dictionary))
    others = [(path, column) for n, column in known.items() if (path := _find(folder, n))]
    everyone = {p for path, column in others for p in _people(path, column)}
    return PatientCodes(frozen(codes), tuple(reports), tuple(sorted(everyone - set(codes))))


def frozen(codes: Mapping[str, set[str]]) -> dict[str, frozenset[str]]:
    """Codes that stay as they are, in the order of the patients' ids."""
    return {patient: frozenset(given) for patient, given in sorted(codes.items())}


def _find(folder: Path, name: str) -> Path | None:
    """The table of this name in a folder, whatever its case and packing."""
    wanted = {f"{name.lower()}{ending}" for ending in (".csv", ".csv.gz", ".tsv", ".tsv.gz")}
    return next((path for path in visible(folder) if path.name.lower() in wanted), None)


CodeRow = tuple[int, str, str, str] | Damaged  # line, patient, code, coding system


def collect(
    path: Path,
    given: Iterable[CodeRow],
    codes: dict[str, set[str]],
    dictionary: Collection[str] | None = None,
) -> TableReport:
    """Adds a table's codes to `codes`, and says what became of its rows.

    dictionary: codes that are known; the others are kept and counted. Raises DataError where
    most rows are damaged.
    """
    total = kept = empty = damaged = unknown = 0
    examples: list[Damaged] = []
    parsed: dict[tuple[str, str], str | None] = {}
    for row in given:
        total += 1
        if not isinstance(row, Damaged):
            line, patient, text, system = row
            if patient and (not text or (text == "0" and system in _CONCEPTS)):
                empty += 1
                continue
            if (system, text) not in parsed:
                parsed[system, text] = code_of(system, text)
            code = parsed[system, text]
            if patient and code is not None:
                codes.setdefault(intern(patient), set()).add(code)
                kept += 1
                unknown += dictionary is not None and code not in dictionary
                continue
            row = Damaged(line, "no patient" if not patient else f"the code is none of {system}")
        damaged += 1
        if len(examples) < EXAMPLES:
            examples.append(row)
    mostly_sound(path, total, damaged, examples)
    known = None if dictionary is None else unknown
    return TableReport(str(path), total, kept, empty, damaged, tuple(examples), known)


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


def _table_rows(path: Path, columns: tuple[str, str], system: str = "") -> Iterator[CodeRow]:
    """The patients and codes of a table with a header. Raises DataError for a missing column."""
    header, given = open_table(path)
    patient, code = (find_column(path, header, column) for column in columns)
    yield from _pairs(rows(given, len(header.names), header.delimiter), patient, code, system)


def _pairs(given: Iterable[Row], patient: int, code: int, system: str) -> Iterator[CodeRow]:
    """Each row's patient and code."""
    for row in given:
        if isinstance(row, Damaged):
            yield row
        else:
            yield row[0], row[1][patient].strip(), row[1][code].strip(), system
