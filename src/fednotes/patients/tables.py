"""A hospital's own table of codes: any with a header and a row for each patient and code.

    patient   patient, patient_id, patientid, subject_id, person_id, pat_id
    code      code, icd_code, icd9_code, icd10_code, dx_code, diagnosis_code, procedure_code,
              cpt_code, cpt_cd, hcpcs_cd
    system    system, coding_system, code_system; a cell such as "ICD-10-CM" or "CPT4"
    version   icd_version, 9 or 10 (MIMIC-IV's diagnoses_icd and procedures_icd)

A column's name counts without case; blanks and hyphens are underscores. Where a row names no
coding system, it is the one that the caller gives; a row without either is damaged. A version
is of procedures where the caller's system is, or, without one, where "proc" is in the file's
name; of diagnoses otherwise: 3605 is a code of both. Other columns are passed over.

Rows of a site's tables, a line each, and what was damaged in them.

Comma, tab or semicolon, as the header tells; .gz is unpacked. A row is a line: none of these
tables has a field over several lines, so a damaged row harms no row after it. What a cell holds
is in no message, and no more of the header than a column that was meant.

A hospital's tables of codes: patient → set of codes, as `codes` writes them.

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

import csv
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from sys import intern
from typing import Final

from fednotes.core.errors import ConfigError, DataError, nearest
from fednotes.data.formats.files import BROKEN, broken, open_bytes, visible
from fednotes.patients.codes import SYSTEMS, code_of, system_of

EXAMPLES: Final = 10  # damaged rows that a report names
PATIENT_COLUMNS: Final = ("patient", "patient_id", "patientid", "subject_id", "person_id", "pat_id")
_LONGEST = 1 << 20  # bytes of a row; more is no row


@dataclass(frozen=True, slots=True)
class Damaged:
    """A row that was left out: its line, counted from 1, and why."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class TableReport:
    """What became of a table's rows: kept, empty (nothing given) and damaged ones are all.

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


def mostly_sound(path: Path, total: int, damaged: int, examples: Sequence[Damaged]) -> None:
    """Raises DataError where more than half of the rows are damaged: it is another table."""
    if 2 * damaged > total:
        first = examples[0]
        message = f"{first.reason}; so are {damaged} of {total} rows: is this the right table?"
        raise DataError.at(path, first.line, message)


Lines = Iterator[tuple[int, str | None]]
Row = tuple[int, list[str]] | Damaged  # line and cells


@dataclass(frozen=True, slots=True)
class Header:
    """A table's first line: titles as they stand, names to compare, what parts them, its line."""

    titles: tuple[str, ...]
    names: tuple[str, ...]
    delimiter: str
    line: int

    def has(self, *columns: str) -> bool:
        """Whether there is a column of one of these names."""
        return any(plain(column) in self.names for column in columns if column)


def plain(title: str) -> str:
    """A column's name as names are compared: "Patient ID" is patient_id."""
    return "_".join(title.lower().replace("-", " ").split())


def open_table(path: Path) -> tuple[Header, Lines]:
    """A table's header, and its lines after it. Raises DataError where there is none."""
    given = lines(path)
    number, first = next(given, (1, ""))
    if first is None or not first.strip():
        raise DataError.at(path, number, "the table has no header: expected the columns' names")
    delimiter = max(",\t;", key=first.count)
    titles = tuple(name.strip() for name in next(csv.reader([first], delimiter=delimiter)))
    return Header(titles, tuple(map(plain, titles)), delimiter, number), given


def find_column(
    path: Path, header: Header, given: str, usual: Sequence[str] = (), key: str = ""
) -> int:
    """Where a column is: the one of the `given` name, else the only one of the usual names.

    key: the setting that names the column, for a message. Raises DataError for a column that
    is missing, or that two could be.
    """
    wanted = [plain(given)] if given else usual
    found = [at for at, name in enumerate(header.names) if name in wanted]
    if not found:
        shown = given or usual[0]
        hint = nearest(plain(shown), header.names)
        if not hint.startswith("did"):  # the first line of a table without a header is a row
            hint = f"the first line names {len(header.names)} columns, none like it"
        remedy = f" ({key} = names it)" if key and not given else ""
        raise DataError.at(path, header.line, f"there is no column {shown!r}: {hint}{remedy}")
    if len(found) > 1:
        both = " and ".join(repr(header.titles[at]) for at in found[:2])
        remedy = f": name one with {key} =" if key and not given else ": rename one"
        message = f"columns {found[0] + 1} and {found[1] + 1}, {both}, could both be meant{remedy}"
        raise DataError.at(path, header.line, message)
    return found[0]


def rows(lines: Iterable[tuple[int, str | None]], width: int, delimiter: str) -> Iterator[Row]:
    """Each line's cells, `width` of them; empty lines are passed over."""
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
        yield number, row


def lines(path: Path) -> Lines:
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


_CODE: Final = (
    *("code", "icd_code", "icd9_code", "icd10_code", "dx_code", "diagnosis_code"),
    *("procedure_code", "cpt_code", "cpt_cd", "hcpcs_cd"),
)
_SYSTEM: Final = ("system", "coding_system", "code_system")
_VERSION: Final = "icd_version"
_PROCEDURES: Final = ("icd9proc", "icd10pcs")
# What else a coding system is called, in small letters and digits alone.
_CALLED: Final = {
    **{name: name for name in SYSTEMS},
    **{"icd9cm": "icd9", "icd10cm": "icd10", "icd10gm": "icd10", "icd9pcs": "icd9proc"},
    **{"icd9cmproc": "icd9proc", "cpt4": "cpt", "hcpcs": "cpt"},
}
_System = Callable[[Sequence[str]], str | None]  # cells → a coding system; None for no known one


def read_codes(
    path: str | os.PathLike[str],
    system: str = "",
    patient_column: str = "",
    code_column: str = "",
) -> PatientCodes:
    """The codes of a table with a header: CSV or tab-separated, also .gz.

    system: the coding system of rows that name none. patient_column, code_column: names of
    columns that are called otherwise than in the list above.

    Raises ConfigError for an unknown system; DataError for a missing file or column, a table
    that says no coding system, or one of mostly damaged rows.
    """
    path = Path(path)
    if system:
        system_of(system)
    if path.is_dir():
        raise DataError(f"{path}: a folder: name the table of codes that is in it")
    header, lines = open_table(path)
    patient = find_column(path, header, patient_column, PATIENT_COLUMNS, "patient_column")
    code = find_column(path, header, code_column, _CODE, "code_column")
    system_at = _systems(path, header, system)

    def pairs() -> Iterator[CodeRow]:
        for row in rows(lines, len(header.names), header.delimiter):
            if isinstance(row, Damaged):
                yield row
                continue
            line, cells = row
            text, named = cells[code].strip(), system_at(cells)
            if text and named is None:
                yield Damaged(line, f"the coding system is none of {', '.join(SYSTEMS)}")
            else:
                yield line, cells[patient].strip(), text, named or ""

    codes: dict[str, set[str]] = {}
    report = collect(path, pairs(), codes)
    return PatientCodes(frozen(codes), (report,))


def _systems(path: Path, header: Header, system: str) -> _System:
    """How a row's coding system is told. Raises DataError where nothing tells it."""
    named = [name for name in _SYSTEM if name in header.names]
    column = find_column(path, header, "", named) if named else None
    of_icd = not system or system.startswith("icd")
    version = header.names.index(_VERSION) if of_icd and _VERSION in header.names else None
    if column is None and version is None and not system:
        raise DataError.at(
            path,
            header.line,
            'nothing says which coding system the codes are of: give system = "icd10" (or '
            f"another of {', '.join(SYSTEMS)}), or add a column `system`",
        )
    procedures = system in _PROCEDURES or (not system and "proc" in path.name.lower())
    versions = {
        "9": "icd9proc" if procedures else "icd9",
        "10": "icd10pcs" if procedures else "icd10",
    }
    known: dict[str, str | None] = {"": None}

    def of(cells: Sequence[str]) -> str | None:
        if column is not None and (text := cells[column].strip()):
            if text not in known:  # the last part of an address, as FHIR has: …/sid/icd-10-cm
                called = re.sub("[^a-z0-9]", "", text.lower().rpartition("/")[2])
                known[text] = _CALLED.get(called)
            return known[text]
        if version is not None and (text := cells[version].strip()):
            return versions.get(text)
        return system or None

    return of
