"""Tables of codes, against hand-written files and the standard library's csv module."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from fednotes.core.errors import ConfigError, DataError
from fednotes.patients.tables import EXAMPLES, read_codiesp, read_mimic, read_omop

File = Callable[..., Path]
DIAGNOSES = (
    "ROW_ID,SUBJECT_ID,HADM_ID,SEQ_NUM,ICD9_CODE\n"
    '1,101,2001,1,"4019"\n2,101,2001,2,"0389"\n3,102,2002,1,"V4581"\n4,102,2002,2,"25000"\n'
)
PROCEDURES = (
    'ROW_ID,SUBJECT_ID,HADM_ID,SEQ_NUM,ICD9_CODE\n1,101,2001,1,"0331"\n2,103,2003,1,"3605"\n'
)
CPT = (
    "ROW_ID,SUBJECT_ID,HADM_ID,COSTCENTER,CHARTDATE,CPT_CD,CPT_NUMBER,CPT_SUFFIX,TICKET_ID_SEQ,"
    "SECTIONHEADER,SUBSECTIONHEADER,DESCRIPTION\n"
    '1,101,2001,"ICU",,"99254",99254,,1,"Evaluation and management","Consultations",\n'
    '2,101,2001,"Resp",2130-01-02,"94002",94002,,,"Medicine","Pulmonary","VENT MGMT, 1ST DAY"\n'
    '3,104,2004,"ICU",,"0075T",75,T,1,"Emerging technology","",\n'
)
EXPECTED = {
    "101": {"icd9:4019", "icd9:0389", "icd9proc:0331", "cpt:99254", "cpt:94002"},
    "102": {"icd9:V4581", "icd9:25000"},
    "103": {"icd9proc:3605"},
    "104": {"cpt:0075T"},
}


@pytest.fixture
def hospital(file: File, tmp_path: Path) -> Path:
    """A folder of the three tables."""
    for name, text in (("DIAGNOSES_ICD", DIAGNOSES), ("PROCEDURES_ICD", PROCEDURES)):
        file(text, f"h/{name}.csv")
    file(CPT, "h/CPTEVENTS.csv")
    return tmp_path / "h"


def test_codes_are_strings_and_of_their_system(hospital: Path) -> None:
    found = read_mimic(hospital)
    assert found.codes == EXPECTED
    assert [(t.rows, t.kept, t.damaged, t.empty) for t in found.tables] == [
        (4, 4, 0, 0),
        (2, 2, 0, 0),
        (3, 3, 0, 0),
    ]
    assert read_mimic(hospital, ["procedures"]).codes == {
        "101": {"icd9proc:0331"},
        "103": {"icd9proc:3605"},
    }


def test_packed_lower_case_tables_with_other_line_ends_are_the_same(tmp_path: Path) -> None:
    for name, text in (
        ("diagnoses_icd", DIAGNOSES),
        ("PROCEDURES_ICD", PROCEDURES),
        ("cptevents", CPT),
    ):
        data = b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()
        (tmp_path / f"{name}.csv.gz").write_bytes(gzip.compress(data))
    assert read_mimic(tmp_path).codes == EXPECTED


def test_damaged_rows_are_left_out_counted_and_named(hospital: Path, file: File) -> None:
    """Lines 6 to 12 are damaged or empty; the rows after them are read as ever."""
    bad = (
        b"5,105,2005,1\n"  # a column too few
        b"6,105,2005,1,4019,x\n"  # one too many
        b"7,,2005,1,4019\n"  # no patient
        b"8,105,2005,1,4.02E+03\n"  # a spreadsheet's number
        b'9,105,2005,1,"4019\n'  # a quote that is not closed
        b"10,105,2005,1,40\xff9\n"  # not UTF-8
        b"11,105,2005,1,\n"  # no code: empty, not damaged
        b"\n"  # nothing
        b"12,106,2006,1,4019.0\n"  # a number of a spreadsheet: not 4019, and not 40190
    )
    rest = "".join(f"{n},107,2007,{n},401.9\n" for n in range(20, 24))
    file(DIAGNOSES.encode() + bad + rest.encode(), "h/DIAGNOSES_ICD.csv")
    found = read_mimic(hospital, ["diagnoses"])
    assert found.codes == {
        "101": {"icd9:4019", "icd9:0389"},
        "102": {"icd9:V4581", "icd9:25000"},
        "107": {"icd9:4019"},
    }
    (report,) = found.tables
    assert (report.rows, report.kept, report.empty, report.damaged) == (16, 8, 1, 7)
    assert [(d.line, d.reason) for d in report.examples] == [
        (6, "4 columns instead of 5"),
        (7, "6 columns instead of 5"),
        (8, "no patient"),
        (9, "the code is none of icd9"),
        (10, "a quote is not closed"),
        (11, "a byte is not UTF-8, or the row is too long"),
        (14, "the code is none of icd9"),
    ]
    assert report.lines()[0] == f"{hospital / 'DIAGNOSES_ICD.csv'}:6: 4 columns instead of 5"
    assert not any("4.02E" in line for line in report.lines())


def test_only_the_first_damaged_rows_are_named(file: File, tmp_path: Path) -> None:
    good = "".join(f"{n},1,1,1,4019\n" for n in range(100))
    file(DIAGNOSES + good + "1,2\n" * 30, "DIAGNOSES_ICD.csv")
    (report,) = read_mimic(tmp_path, ["diagnoses"]).tables
    assert report.damaged == 30
    assert len(report.examples) == EXAMPLES
    assert report.lines()[-1].endswith("20 more damaged rows")


def test_a_row_of_no_end_is_one_damaged_row(file: File, tmp_path: Path) -> None:
    file(DIAGNOSES + "5,9,1,1," + "1" * (5 << 19) + "\n6,9,1,1,4019", "DIAGNOSES_ICD.csv")
    found = read_mimic(tmp_path, ["diagnoses"])
    assert [d.line for d in found.tables[0].examples] == [6]
    assert found.codes["9"] == {"icd9:4019"}


def test_codes_that_the_dictionary_does_not_know_are_kept_and_counted(
    hospital: Path, file: File
) -> None:
    file(
        'ROW_ID,ICD9_CODE,SHORT_TITLE,LONG_TITLE\n1,"4019",x,"y, z"\n2,"0389",x,y\n3,V4581,x,y\n',
        "h/D_ICD_DIAGNOSES.csv",
    )
    found = read_mimic(hospital)
    assert [t.unknown for t in found.tables] == [1, 0, 0]
    assert found.codes == EXPECTED


def test_what_cannot_be_read_is_said_in_one_line(hospital: Path, file: File) -> None:
    def complains(message: str, **options: list[str]) -> None:
        with pytest.raises((DataError, ConfigError), match=message) as caught:
            read_mimic(hospital, **options)
        assert "\n" not in str(caught.value)

    complains(
        "unknown table 'diagnosis' of MIMIC-III: did you mean 'diagnoses'", tables=["diagnosis"]
    )
    file(DIAGNOSES.replace("ICD9_CODE", "ICD9"), "h/DIAGNOSES_ICD.csv")
    complains(r"DIAGNOSES_ICD.csv:1: there is no column 'ICD9_CODE': did you mean 'icd9'")
    file("", "h/DIAGNOSES_ICD.csv")
    complains("DIAGNOSES_ICD.csv:1: the table has no header")
    file(DIAGNOSES.split("\n")[0] + "\n1,2,3,4,hypertension\n", "h/DIAGNOSES_ICD.csv")
    complains("DIAGNOSES_ICD.csv:2: the code is none of icd9; so are 1 of 1 rows")
    (hospital / "DIAGNOSES_ICD.csv").unlink()
    complains("there is no DIAGNOSES_ICD.csv")
    (hospital / "DIAGNOSES_ICD.csv.gz").write_bytes(gzip.compress(DIAGNOSES.encode())[:-9])
    complains("cannot read to its end")
    with pytest.raises(DataError, match="no such folder"):
        read_mimic(hospital / "none")


def test_a_table_without_rows_has_no_patients(file: File, tmp_path: Path) -> None:
    file(DIAGNOSES.split("\n")[0] + "\n", "DIAGNOSES_ICD.csv")
    found = read_mimic(tmp_path, ["diagnoses"])
    assert found.codes == {}
    assert found.tables[0].rows == 0


@pytest.fixture
def omop(file: File, tmp_path: Path) -> Path:
    conditions = (
        "condition_occurrence_id\tperson_id\tcondition_concept_id\tcondition_source_value\n"
        "1\t7\t320128\tI10\n2\t7\t0\te11.9\n3\t8\t201826\tE11.65\n"
    )
    procedures = (
        "procedure_occurrence_id,person_id,procedure_concept_id,procedure_source_value\n"
        "1,8,4336464,99254\n"
    )
    file(conditions, "o/CONDITION_OCCURRENCE.csv")
    file(procedures, "o/procedure_occurrence.csv")
    return tmp_path / "o"


def test_omop_concepts_and_source_codes(omop: Path) -> None:
    found = read_omop(omop)
    assert found.codes == {
        "7": {"condition:320128"},
        "8": {"condition:201826", "procedure:4336464"},
    }
    assert found.tables[0].empty == 1
    source = read_omop(omop, "icd10", "cpt")
    assert source.codes == {"7": {"icd10:I10", "icd10:E119"}, "8": {"icd10:E1165", "cpt:99254"}}
    assert read_omop(omop, "icd10", "").codes.keys() == {"7", "8"}
    with pytest.raises(ConfigError, match="unknown coding system 'icd11': did you mean"):
        read_omop(omop, "icd11")


def test_codiesp_diagnoses_and_procedures(file: File, tmp_path: Path) -> None:
    file("S1-1\tn44.8\nS1-1\tI10\nS2-1\tz20.818\n", "c/train/trainD.tsv")
    file("S1-1\tbw03zzz\nS3-1\tct13\nS3-1\n", "c/train/trainP.tsv")
    file("S1-1\tDIAGNOSTICO\tn44.8\tteste\t1 2\n", "c/train/trainX.tsv")
    found = read_codiesp(tmp_path / "c")
    assert found.codes == {
        "S1-1": {"icd10:N448", "icd10:I10", "icd10pcs:BW03ZZZ"},
        "S2-1": {"icd10:Z20818"},
        "S3-1": {"icd10pcs:CT13"},
    }
    assert [t.damaged for t in found.tables] == [0, 1]
    only = read_codiesp(tmp_path / "c/train/trainD.tsv", "D")
    assert only.codes.keys() == {"S1-1", "S2-1"}
    with pytest.raises(DataError, match=r"end in P.tsv"):
        read_codiesp(tmp_path / "c/train/trainD.tsv", "P")
    with pytest.raises(DataError, match="no such file"):
        read_codiesp(tmp_path / "none")


def test_a_link_that_leads_nowhere_does_not_stop_the_reading(hospital: Path) -> None:
    (hospital / "D_ICD_PROCEDURES.csv").symlink_to(hospital / "gone.csv")
    assert read_mimic(hospital).codes == EXPECTED


@pytest.mark.corpora
def test_the_demo_tables_of_mimic(corpora: Path) -> None:
    """Against csv.DictReader: 100 patients and every row's code."""
    folder = corpora / "mimic_iii_demo"
    expected: dict[str, set[str]] = {}
    for name, system, column in (
        ("DIAGNOSES_ICD", "icd9", "ICD9_CODE"),
        ("PROCEDURES_ICD", "icd9proc", "ICD9_CODE"),
        ("CPTEVENTS", "cpt", "CPT_CD"),
    ):
        with (folder / f"{name}.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                expected.setdefault(row["SUBJECT_ID"], set()).add(f"{system}:{row[column]}")
    found = read_mimic(folder)
    assert found.codes == expected
    assert len(expected) == 100
    assert [t.damaged for t in found.tables] == [0, 0, 0]
    diagnoses, procedures, _ = found.tables
    assert diagnoses.unknown
    assert procedures.unknown


@pytest.mark.corpora
def test_the_cases_of_codiesp(corpora: Path) -> None:
    """Against splitting the lines: 750 cases with at least one code."""
    expected: dict[str, set[str]] = {}
    for part in ("train", "dev"):
        for kind, system in (("D", "icd10"), ("P", "icd10pcs")):
            text = (corpora / "codiesp" / part / f"{part}{kind}.tsv").read_text("utf-8")
            for line in text.splitlines():
                case, code = line.split("\t")
                expected.setdefault(case, set()).add(f"{system}:{code.upper().replace('.', '')}")
    found = read_codiesp(corpora / "codiesp")
    assert found.codes == expected
    assert len(expected) == 750
    assert sum(t.damaged for t in found.tables) == 0
