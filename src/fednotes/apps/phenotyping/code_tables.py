"""Read the billed codes of patients from tables.

    read_mimic     MIMIC-III: DIAGNOSES_ICD, PROCEDURES_ICD, CPTEVENTS
    read_omop      OMOP: condition_occurrence, procedure_occurrence
    read_codiesp   CodiEsp: trainD.tsv, trainP.tsv and the like, without a header
    read_codes     a table of a site's own, with a header and a row per patient and code

Damaged rows are left out as `tables.py` describes; so are rows with a code outside
their coding system. Rows with an empty code are counted separately; MIMIC-III has some.
Codes are strings: "0389" is septicaemia, 389 is hearing loss.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from sys import intern
from typing import Final, NamedTuple

from fednotes.apps.phenotyping.codes import SYSTEMS, get_system, normalise_code
from fednotes.apps.phenotyping.tables import (
    PATIENT_COLUMNS,
    Damaged,
    HeaderTable,
    NumberedRow,
    TableReport,
    read_numbered_lines,
    split_lines,
)
from fednotes.core.errors import ConfigError, DataError, suggest_name
from fednotes.data.formats.folders import list_files

# Coding systems of OMOP, where the concept 0 means "not mapped".
_OMOP_CONCEPTS: Final = ("condition", "procedure")


@dataclass
class PatientCodes:
    """The codes of a site's patients. They never leave the site.

    Attributes:
        codes: The codes of each patient in the form of `codes.py`; at least one each.
        tables: One report per table about its rows.
    """

    codes: dict[str, set[str]] = field(default_factory=dict, repr=False)
    tables: list[TableReport] = field(default_factory=list)

    def add_rows(
        self,
        path: Path,
        rows: Iterable[NumberedRow | Damaged],
        columns: _Columns,
        known: Collection[str | None] | None = None,
    ) -> None:
        """Add the codes of a table, and a report of its rows.

        Args:
            path: The table.
            rows: Its rows.
            columns: The columns of patients and codes.
            known: The valid codes. Others are kept, and counted.

        Raises:
            DataError: Most rows are damaged.
        """
        report = TableReport(path)
        self.tables.append(report)
        for line, cells in report.select_sound(rows):
            patient = cells[columns.patient].strip()
            text = cells[columns.code].strip()
            system = columns.system.read(cells)
            code = None if system is None else normalise_code(system, text)
            is_unmapped = text == "0" and system in _OMOP_CONCEPTS
            if not patient and system is not None:
                report.add_damaged(Damaged(line, "no patient"))
            elif patient and (not text or is_unmapped):
                report.empty += 1
            elif system is None:
                expected = ", ".join(SYSTEMS)
                reason = f"the coding system is not one of {expected}"
                report.add_damaged(Damaged(line, reason))
            elif code is None:
                report.add_damaged(Damaged(line, f"the code is not a code of {system}"))
            else:
                self.codes.setdefault(intern(patient), set()).add(code)
                report.kept += 1
                report.unknown += known is not None and code not in known
        report.require_sound(report.rows)


class _Columns(NamedTuple):
    """A table's columns of patients and codes, and how to find a row's system."""

    patient: int
    code: int
    system: _RowSystem


@dataclass(frozen=True)
class _RowSystem:
    """The rule for recognising a row's coding system.

    Attributes:
        default: The system of rows that do not name one; None if there is no default.
        column: The column that names a system; None if there is none.
        version_column: The column with the version of ICD; None if there is none.
        versions: The coding system of each version.
    """

    default: str | None
    column: int | None = None
    version_column: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def read(self, cells: Sequence[str]) -> str | None:
        """Return the coding system of a row; None if it names an unknown one."""
        if self.column is not None:
            name = cells[self.column].strip()
            if name:
                return _find_system(name)
        if self.version_column is not None:
            version = cells[self.version_column].strip()
            if version:
                return self.versions.get(version)
        return self.default


def _find_table(folder: Path, name: str) -> Path | None:
    """Return the table of this name in a folder, in any case, compressed or not."""
    endings = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
    names = {f"{name.lower()}{ending}" for ending in endings}
    return next(
        (path for path in list_files(folder) if path.name.lower() in names), None
    )


def _require_table(folder: Path, name: str) -> Path:
    """Return the table of this name in a folder.

    Raises:
        DataError: There is no such folder or table.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder of tables")
    path = _find_table(folder, name)
    if path is None:
        raise DataError(
            f"{folder}: there is neither {name}.csv nor {name}.csv.gz: add the table "
            "or leave it out of the tables to read"
        )
    return path


def _add_table(
    result: PatientCodes,
    path: Path,
    *,
    patient: str,
    code: str,
    system: str,
    known: Collection[str | None] | None = None,
) -> None:
    """Add the codes of a table whose columns and coding system are known.

    Args:
        result: Receives the codes.
        path: The table.
        patient: Name of the column of patients.
        code: Name of the column of codes.
        system: The coding system of all rows.
        known: The valid codes; None if they are not known.

    Raises:
        DataError: A column is missing, or most rows are damaged.
    """
    table = HeaderTable(path)
    columns = _Columns(
        table.find_column(patient), table.find_column(code), _RowSystem(system)
    )
    result.add_rows(path, table.read_rows(), columns, known=known)


# ---- MIMIC-III -----------------------------------------------------------------------


class _MimicTable(NamedTuple):
    """A table of MIMIC-III with codes.

    Attributes:
        name: Name of the table.
        column: Column of codes.
        system: Their coding system.
        dictionary: Name of the table with all codes of the system; empty if there is
            none.
    """

    name: str
    column: str
    system: str
    dictionary: str


MIMIC: Final = {
    "diagnoses": _MimicTable("DIAGNOSES_ICD", "ICD9_CODE", "icd9", "D_ICD_DIAGNOSES"),
    "procedures": _MimicTable(
        "PROCEDURES_ICD", "ICD9_CODE", "icd9proc", "D_ICD_PROCEDURES"
    ),
    "cpt": _MimicTable("CPTEVENTS", "CPT_CD", "cpt", ""),
}


def read_mimic(folder: Path, tables: Collection[str] = ()) -> PatientCodes:
    """Read the codes in a folder of MIMIC-III tables.

    Args:
        folder: The folder. Tables end in .csv or .csv.gz, in upper or lower case.
        tables: Which of "diagnoses", "procedures" and "cpt" to read; all if empty. Each
            must exist.

    Raises:
        ConfigError: `tables` contains an unknown name.
        DataError: A file or column is missing, or a table has mostly damaged rows.
    """
    for name in tables:
        if name not in MIMIC:
            raise ConfigError(
                f"unknown table {name!r} of MIMIC-III: {suggest_name(name, MIMIC)}"
            )
    selected_tables = [MIMIC[name] for name in tables or MIMIC]
    paths = [_require_table(folder, table.name) for table in selected_tables]
    result = PatientCodes()
    for path, facts in zip(paths, selected_tables, strict=True):
        known = _read_dictionary_codes(folder, facts)
        _add_table(
            result,
            path,
            patient="SUBJECT_ID",
            code=facts.column,
            system=facts.system,
            known=known,
        )
    return result


def _read_dictionary_codes(
    folder: Path, facts: _MimicTable
) -> Collection[str | None] | None:
    """Return all codes in the dictionary beside a table; None if there is none."""
    path = _find_table(folder, facts.dictionary) if facts.dictionary else None
    if path is None:
        return None
    table = HeaderTable(path)
    column = table.find_column(facts.column)
    return {
        normalise_code(facts.system, row.cells[column])
        for row in table.read_rows()
        if not isinstance(row, Damaged)
    }


# ---- OMOP ----------------------------------------------------------------------------


def read_omop(
    folder: Path, conditions: str = "condition", procedures: str = "procedure"
) -> PatientCodes:
    """Read the codes in a folder of OMOP tables.

    Args:
        folder: The folder. Tables end in .csv or .csv.gz, separated by commas or tabs.
        conditions: Coding system of the table of conditions; "" leaves it out.
            "condition" reads standard concepts (condition_concept_id; 0, not mapped,
            counts as empty). Any other system, such as "icd10", reads the source's
            codes (condition_source_value), whose system the tables do not name.
        procedures: The same for the table of procedures.

    Raises:
        ConfigError: A coding system is unknown.
        DataError: As in `read_mimic`.
    """
    systems = {"condition": conditions, "procedure": procedures}
    selected_systems = {kind: system for kind, system in systems.items() if system}
    for system in selected_systems.values():
        get_system(system)
    paths = {
        kind: _require_table(folder, f"{kind}_occurrence") for kind in selected_systems
    }
    result = PatientCodes()
    for kind, system in selected_systems.items():
        suffix = "concept_id" if system in _OMOP_CONCEPTS else "source_value"
        _add_table(
            result,
            paths[kind],
            patient="person_id",
            code=f"{kind}_{suffix}",
            system=system,
        )
    return result


# ---- CodiEsp -------------------------------------------------------------------------

_CODIESP: Final = {"D": "icd10", "P": "icd10pcs"}


def read_codiesp(path: Path, kinds: str = "DP") -> PatientCodes:
    """Read the ICD-10 codes of CodiEsp's cases.

    The files have two columns without a header: the article, and a code in lower case.

    Args:
        path: A file such as trainD.tsv; or a folder, whose files that end in D.tsv
            (diagnoses) and P.tsv (procedures) are all read.
        kinds: "D", "P" or both.

    Raises:
        DataError: As in `read_mimic`.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    result = PatientCodes()
    for file in list_files(path, recursive=True) if path.is_dir() else [path]:
        name = file.name.removesuffix(".gz")
        for kind in kinds:
            if name.endswith(f"{kind}.tsv"):
                rows = split_lines(read_numbered_lines(file), 2, "\t")
                columns = _Columns(0, 1, _RowSystem(_CODIESP[kind]))
                result.add_rows(file, rows, columns)
    if not result.tables:
        endings = " or ".join(f"{kind}.tsv" for kind in kinds)
        raise DataError(f"{path}: not a code file: its name must end in {endings}")
    return result


# ---- other tables --------------------------------------------------------------------

_CODE_COLUMNS: Final = (
    "code",
    "icd_code",
    "icd9_code",
    "icd10_code",
    "dx_code",
    "diagnosis_code",
    "procedure_code",
    "cpt_code",
    "cpt_cd",
    "hcpcs_cd",
)
_SYSTEM_COLUMNS: Final = ("system", "coding_system", "code_system")
_VERSION_COLUMN: Final = "icd_version"  # 9 or 10, as in MIMIC-IV
_DIAGNOSES: Final = {"9": "icd9", "10": "icd10"}
_PROCEDURES: Final = {"9": "icd9proc", "10": "icd10pcs"}
# Other names of coding systems, reduced to lower-case letters and digits.
_SYSTEM_NAMES: Final = {
    **{name: name for name in SYSTEMS},
    "icd9cm": "icd9",
    "icd10cm": "icd10",
    "icd10gm": "icd10",
    "icd9pcs": "icd9proc",
    "icd9cmproc": "icd9proc",
    "cpt4": "cpt",
    "hcpcs": "cpt",
}


def read_codes(
    path: Path, system: str = "", patient_column: str = "", code_column: str = ""
) -> PatientCodes:
    """Read the codes of a table with a header, separated by commas or tabs, also .gz.

    Columns are recognised by their names in any case; spaces and hyphens count as
    underscores. Other columns are ignored. A row's coding system is the one that it
    names (in a cell such as "ICD-10-CM" or "CPT4"), or the one of its ICD version, or
    `system`. A version alone does not tell diagnoses from procedures: 3605 is a code of
    both. `system` decides, or, without a system, whether "proc" is in the file's name.

    Args:
        path: The table.
        system: Coding system of rows that do not name one.
        patient_column: Column of patients, if it does not have a usual name.
        code_column: Column of codes, if it does not have a usual name.

    Raises:
        DataError: A file or column is missing, nothing names a coding system, or most
            rows are damaged.
    """
    table = HeaderTable(path)
    columns = _Columns(
        table.find_column(patient_column, PATIENT_COLUMNS, parameter="patient_column"),
        table.find_column(code_column, _CODE_COLUMNS, parameter="code_column"),
        _choose_row_system(table, system),
    )
    result = PatientCodes()
    result.add_rows(path, table.read_rows(), columns)
    return result


def _choose_row_system(table: HeaderTable, system: str) -> _RowSystem:
    """Return how the coding system of a table's rows is recognised.

    A column that names it takes precedence, then a column of ICD versions, then
    `system`.

    Raises:
        DataError: Neither a column nor `system` gives the coding system.
    """
    names = [name for name in _SYSTEM_COLUMNS if name in table.names]
    column = table.find_column("", names) if names else None
    can_have_version = not system or system.startswith("icd")
    version_column = None
    if can_have_version and table.has_column(_VERSION_COLUMN):
        version_column = table.names.index(_VERSION_COLUMN)
    if column is None and version_column is None and not system:
        raise table.make_error(
            'the coding system of the codes is unknown: set system = "icd10" '
            f"(or another of {', '.join(SYSTEMS)}), or add a column `system`"
        )
    versions = _PROCEDURES if _is_of_procedures(table, system) else _DIAGNOSES
    return _RowSystem(
        system or None,
        column=column,
        version_column=version_column,
        versions=versions,
    )


def _is_of_procedures(table: HeaderTable, system: str) -> bool:
    """Return whether ICD versions mean codes of procedures; see `read_codes`."""
    if system:
        return system in ("icd9proc", "icd10pcs")
    return "proc" in table.path.name.lower()


@lru_cache(maxsize=1000)
def _find_system(text: str) -> str | None:
    """Return the coding system that a cell names; None if it is unknown.

    The cell may be a URL as in FHIR, whose last part is the name: …/sid/icd-10-cm.
    """
    last_part = text.lower().rpartition("/")[2]
    return _SYSTEM_NAMES.get(re.sub("[^a-z0-9]", "", last_part))


# ---- sources -------------------------------------------------------------------------


class CodeSource(ABC):
    """Billed codes in files of one kind, as a job describes them."""

    @abstractmethod
    def read(self, path: Path) -> PatientCodes:
        """Read the codes in a file or folder.

        Raises:
            ConfigError: A setting does not match the files.
            DataError: A file cannot be read.
        """


@dataclass(frozen=True)
class CodeTable(CodeSource):
    """One of a site's own code tables; its fields are parameters of `read_codes`."""

    system: str = ""
    patient_column: str = ""
    code_column: str = ""

    def read(self, path: Path) -> PatientCodes:
        """Read the table."""
        return read_codes(path, self.system, self.patient_column, self.code_column)


@dataclass(frozen=True)
class MimicFolder(CodeSource):
    """A folder of MIMIC-III; its field is a parameter of `read_mimic`."""

    tables: tuple[str, ...] = ()

    def read(self, path: Path) -> PatientCodes:
        """Read the tables."""
        return read_mimic(path, self.tables)


@dataclass(frozen=True)
class OmopFolder(CodeSource):
    """A folder of OMOP tables; its fields are parameters of `read_omop`."""

    conditions: str = "condition"
    procedures: str = "procedure"

    def read(self, path: Path) -> PatientCodes:
        """Read the tables."""
        return read_omop(path, self.conditions, self.procedures)


@dataclass(frozen=True)
class CodiespFolder(CodeSource):
    """A file or folder of CodiEsp; its field is a parameter of `read_codiesp`."""

    kinds: str = "DP"

    def read(self, path: Path) -> PatientCodes:
        """Read the files."""
        return read_codiesp(path, self.kinds)
