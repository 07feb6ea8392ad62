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
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from fednotes.core.errors import DataError
from fednotes.data.codes import SYSTEMS, system_of
from fednotes.data.ehr import CodeRow, PatientCodes, collect, frozen
from fednotes.data.table_rows import (
    PATIENT_COLUMNS,
    Damaged,
    Header,
    find_column,
    open_table,
    rows,
)

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
