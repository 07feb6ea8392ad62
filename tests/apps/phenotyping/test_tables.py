"""Tables of codes, compared with files written by hand and with the csv module."""

from __future__ import annotations

import csv
import gzip
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from fednotes.apps.phenotyping.code_tables import (
    read_codes,
    read_codiesp,
    read_mimic,
    read_omop,
)
from fednotes.apps.phenotyping.tables import EXAMPLES, Damaged, HeaderTable
from fednotes.core.errors import ConfigError, DataError
from fednotes.data.encodings import reading_as

File = Callable[..., Path]
SECRET = "Wilhelmina"
ROWS = [("7", "I10"), ("7", "E11.9"), ("8", "e11.65"), ("9", "Z00")]
EXPECTED = {"7": {"icd10:I10", "icd10:E119"}, "8": {"icd10:E1165"}, "9": {"icd10:Z00"}}


# ---- a hospital's own ----------------------------------------------------------------


@pytest.mark.parametrize("delimiter", [",", "\t", ";"])
@pytest.mark.parametrize(
    "header",
    [
        "patient,code",
        "PATIENT ID,ICD_Code",
        "subject_id,icd10_code",
        "person-id,dx code",
    ],
)
def test_common_headers_and_delimiters_are_recognised(
    file: File, header: str, delimiter: str
) -> None:
    lines = [header.replace(",", delimiter), *(delimiter.join(row) for row in ROWS)]
    result = read_codes(file("\n".join(lines), "c.txt"), "icd10")
    assert result.codes == EXPECTED
    assert (result.tables[0].rows, result.tables[0].kept) == (4, 4)


def test_compressed_tables_with_extra_columns_and_quotes_are_read(file: File) -> None:
    rows = [f'{n},"{p}","{c}","{SECRET}, seen today"' for n, (p, c) in enumerate(ROWS)]
    text = "\r\n".join(["row,mrn,found,remark", *rows])
    path = file(gzip.compress(b"\xef\xbb\xbf" + text.encode()), "c.csv.gz")
    assert read_codes(path, "icd10", "MRN", "Found").codes == EXPECTED


def test_each_row_may_name_its_code_system(file: File) -> None:
    """Systems are named as in registries, OMOP and FHIR; the default is `system`."""
    named = [
        *(("icd10", "I10", "icd10:I10"), ("ICD-10-CM", "E11.9", "icd10:E119")),
        *(("ICD10PCS", "0DTJ4ZZ", "icd10pcs:0DTJ4ZZ"), ("ICD9CM", "0389", "icd9:0389")),
        *(("ICD9Proc", "0331", "icd9proc:0331"), ("CPT4", "99254", "cpt:99254")),
        *(
            ("http://hl7.org/fhir/sid/icd-9-cm", "4019", "icd9:4019"),
            ("HCPCS", "A0428", None),
        ),
        *(("", "V4581", "icd9:V4581"), ("SNOMED", "38341003", "")),
    ]
    rows = [f"{n},{system},{code}" for n, (system, code, _) in enumerate(named)]
    path = file("\n".join(["patient,System,code", *rows]), "c.csv")
    result = read_codes(path, "icd9")
    expected = {
        str(n): {code or "cpt:A0428"}
        for n, (_, _, code) in enumerate(named)
        if code != ""
    }
    assert result.codes == expected
    (bad,) = result.tables[0].examples
    assert bad.line == 11
    assert bad.reason.startswith(
        "the coding system is not one of icd9, icd9proc, cpt, icd10"
    )
    assert "8" not in read_codes(path).codes


MIMIC_IV = "subject_id,hadm_id,seq_num,icd_code,icd_version\n"
BOTH = MIMIC_IV + "1,2,1,3605,9\n1,2,2,0DTJ4ZZ,10\n"
PROCEDURES_IV = {"1": {"icd9proc:3605", "icd10pcs:0DTJ4ZZ"}}


@pytest.mark.parametrize(
    ("text", "name", "system", "codes"),
    [
        (
            MIMIC_IV + "1,2,1,4019   ,9\n1,2,2,I10,10\n2,3,1,0389,9\n",
            *(
                "diagnoses_icd.csv",
                "",
                {"1": {"icd9:4019", "icd10:I10"}, "2": {"icd9:0389"}},
            ),
        ),
        (BOTH, "procedures_icd.csv", "", PROCEDURES_IV),
        (BOTH, "other.csv", "icd10pcs", PROCEDURES_IV),
        (BOTH, "other.csv", "icd9proc", PROCEDURES_IV),
        (BOTH, "other.csv", "icd10", {"1": {"icd9:3605"}}),
        (
            "patient,code,icd_version\n1,99254,\n2,99255,10\n",
            *("c.csv", "cpt", {"1": {"cpt:99254"}, "2": {"cpt:99255"}}),
        ),
    ],
)
def test_tables_of_mimic_iv_are_read(
    file: File, text: str, name: str, system: str, codes: dict[str, set[str]]
) -> None:
    """3605 is a code of both kinds: the name of the file or `system` decides."""
    assert read_codes(file(text, name), system).codes == codes


def test_rows_with_an_invalid_code_version_are_damaged(file: File) -> None:
    path = file(
        MIMIC_IV + "1,2,1,I10,11\n1,2,2,I10,10\n2,2,1,I10,\n3,2,1,I10,10\n", "odd.csv"
    )
    result = read_codes(path)
    assert result.codes.keys() == {"1", "3"}
    assert [d.line for d in result.tables[0].examples] == [2, 4]


def test_random_rows_equal_those_of_the_csv_module(tmp_path: Path) -> None:
    """A thousand random rows, written and read by the csv module."""
    draw = random.Random(1)
    path = tmp_path / "c.csv"
    with path.open("w", newline="") as out:
        writer = csv.writer(out, quoting=csv.QUOTE_MINIMAL)
        writer.writerow(["remark", "code", "patient"])
        for _ in range(1000):
            code = (
                f"{draw.choice('ABCEZ')}{draw.randrange(100):02d}.{draw.randrange(10)}"
            )
            writer.writerow(
                [draw.choice(["", 'a "b", c', "x"]), code, draw.randrange(90)]
            )
    assert read_codes(path, "icd10").codes == read_by_csv(
        (path, "icd10", "patient", "code")
    )


def read_by_csv(*tables: tuple[Path, str, str, str]) -> dict[str, set[str]]:
    """Return codes by patient of tables (path, system, columns of patient and code)."""
    expected: dict[str, set[str]] = {}
    for path, system, patient, code in tables:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                codes = expected.setdefault(row[patient], set())
                codes.add(f"{system}:{row[code].replace('.', '')}")
    return expected


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            "patient,code\n1,I10\n",
            {},
            r"c\.csv:1: the coding system of the codes is unknown: set system = ",
        ),
        (
            "patient,codes\n1,I10\n",
            {},
            r"c\.csv:1: there is no column 'code': did you mean 'codes",
        ),
        (
            f"1,{SECRET}\n",
            {},
            "no column 'patient': the first line has 2 columns, none with a similar name",
        ),
        ("patient,code\n1,I10\n", {"code_column": "icd"}, "no column 'icd'"),
        (
            "patient,subject_id,code\n1,1,I10\n",
            {"system": "icd10"},
            "columns 1 \\('patient'\\) and 2 \\('subject_id'\\) both match: choose one with pat",
        ),
        (
            "patient,code\n1,I10\n2,I10\n",
            {"system": "cpt"},
            "2: the code is not a code of cpt; 2 of 2 rows are damaged",
        ),
        ("\n", {"system": "cpt"}, "the table has no header"),
        ("patient\rx,code\n1,I10\n", {}, ":1: the columns' names cannot be read"),
    ],
)
def test_unreadable_files_are_refused_in_one_line(
    file: File, text: str, options: dict[str, str], message: str
) -> None:
    path = file(text, "c.csv")
    with pytest.raises(DataError, match=message) as caught:
        read_codes(path, **options)
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)


def test_missing_and_broken_files_are_refused(tmp_path: Path, file: File) -> None:
    complete = gzip.compress(b"patient,code\n1,I10\n")
    for path, message in (
        (tmp_path / "none.csv", "no such file"),
        (tmp_path, "a folder: give the table of codes"),
        (file(complete[:-9], "c.csv.gz"), "cannot be read to its end"),
    ):
        with pytest.raises(DataError, match=message):
            read_codes(path, "icd10")
    assert read_codes(file("patient,code\n", "c.csv"), "icd10").codes == {}


# ---- MIMIC-III, OMOP, CodiEsp --------------------------------------------------------

DIAGNOSES = (
    "ROW_ID,SUBJECT_ID,HADM_ID,SEQ_NUM,ICD9_CODE\n"
    '1,101,2001,1,"4019"\n2,101,2001,2,"0389"\n3,102,2002,1,"V4581"\n4,102,2002,2,"25000"\n'
)
PROCEDURES = 'ROW_ID,SUBJECT_ID,HADM_ID,SEQ_NUM,ICD9_CODE\n1,101,2001,1,"0331"\n2,103,2003,1,"3605"\n'
CPT = (
    "ROW_ID,SUBJECT_ID,HADM_ID,COSTCENTER,CHARTDATE,CPT_CD,CPT_NUMBER,CPT_SUFFIX,TICKET_ID_SEQ,"
    "SECTIONHEADER,SUBSECTIONHEADER,DESCRIPTION\n"
    '1,101,2001,"ICU",,"99254",99254,,1,"Evaluation and management","Consultations",\n'
    '2,101,2001,"Resp",2130-01-02,"94002",94002,,,"Medicine","Pulmonary","VENT MGMT, 1ST DAY"\n'
    '3,104,2004,"ICU",,"0075T",75,T,1,"Emerging technology","",\n'
)
TABLES = {"DIAGNOSES_ICD": DIAGNOSES, "PROCEDURES_ICD": PROCEDURES, "CPTEVENTS": CPT}
OF_ALL = {
    "101": {"icd9:4019", "icd9:0389", "icd9proc:0331", "cpt:99254", "cpt:94002"},
    "102": {"icd9:V4581", "icd9:25000"},
    "103": {"icd9proc:3605"},
    "104": {"cpt:0075T"},
}


@pytest.fixture
def hospital(file: File, tmp_path: Path) -> Path:
    """A folder of the three tables."""
    for name, text in TABLES.items():
        file(text, f"h/{name}.csv")
    return tmp_path / "h"


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "cp1252"]
)
def test_tables_are_read_in_the_encoding_that_they_have(
    tmp_path: Path, encoding: str
) -> None:
    """The byte-order mark or the user names the encoding; the rows are the same."""
    path = tmp_path / "codes.csv"
    text = 'patient,größe\r\n7,"a,ü"\r\n8,b\r\n'
    path.write_bytes(text.encode(encoding))
    with reading_as("cp1252"):
        table = HeaderTable(path)
        assert table.titles == ("patient", "größe")
        assert list(table.read_rows()) == [(2, ["7", "a,ü"]), (3, ["8", "b"])]


def test_a_line_in_another_encoding_does_not_affect_others(tmp_path: Path) -> None:
    path = tmp_path / "codes.csv"
    path.write_bytes(b"patient,name\n7,\xfc\n8,b\n")
    damaged, sound = HeaderTable(path).read_rows()
    reason = "a byte is not valid in the file's encoding, or the row is too long"
    assert damaged == Damaged(2, reason)
    assert sound == (3, ["8", "b"])


def test_codes_are_text_and_belong_to_their_system(hospital: Path) -> None:
    result = read_mimic(hospital)
    assert result.codes == OF_ALL
    counts = [(t.rows, t.kept, t.damaged, t.empty) for t in result.tables]
    assert counts == [(n, n, 0, 0) for n in (4, 2, 3)]
    procedures = {"101": {"icd9proc:0331"}, "103": {"icd9proc:3605"}}
    assert read_mimic(hospital, ["procedures"]).codes == procedures
    # a link that leads nowhere does not stop the reading
    (hospital / "D_ICD_PROCEDURES.csv").symlink_to(hospital / "gone.csv")
    assert read_mimic(hospital).codes == OF_ALL


def test_compressed_lower_case_tables_give_the_same_codes(
    tmp_path: Path,
) -> None:
    for name, text in TABLES.items():
        data = b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()
        called = name.lower() if name != "PROCEDURES_ICD" else name
        (tmp_path / f"{called}.csv.gz").write_bytes(gzip.compress(data))
    assert read_mimic(tmp_path).codes == OF_ALL


def test_damaged_rows_are_left_out_and_reported(hospital: Path, file: File) -> None:
    """Lines 6 to 12 are damaged or empty; the rows after them are read."""
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
    sound_rows = "".join(f"{n},107,2007,{n},401.9\n" for n in range(20, 24))
    path = file(DIAGNOSES.encode() + bad + sound_rows.encode(), "h/DIAGNOSES_ICD.csv")
    result = read_mimic(hospital, ["diagnoses"])
    known = {
        "101": {"icd9:4019", "icd9:0389"},
        "102": OF_ALL["102"],
        "107": {"icd9:4019"},
    }
    assert result.codes == known
    (report,) = result.tables
    assert (report.rows, report.kept, report.empty, report.damaged) == (16, 8, 1, 7)
    assert report.list_messages() == (
        f"{path}:6: 4 columns instead of 5",
        f"{path}:7: 6 columns instead of 5",
        f"{path}:8: no patient",
        f"{path}:9: the code is not a code of icd9",
        f"{path}:10: a closing quote is missing",
        f"{path}:11: a byte is not valid in the file's encoding, or the row is too long",
        f"{path}:14: the code is not a code of icd9",
    )


def test_only_the_first_damaged_rows_are_listed(file: File, tmp_path: Path) -> None:
    """A row that is too long is one of them."""
    good = "".join(f"{n},1,1,1,4019\n" for n in range(100))
    endless = "5,9,1,1," + "1" * (5 << 19) + "\n6,9,1,1,4019\n"
    file(DIAGNOSES + endless + good + "1,2\n" * 29, "DIAGNOSES_ICD.csv")
    result = read_mimic(tmp_path, ["diagnoses"])
    (report,) = result.tables
    assert (report.damaged, report.examples[0].line) == (30, 6)
    assert len(report.examples) == EXAMPLES
    assert report.list_messages()[-1].endswith("20 more damaged rows")
    assert result.codes["9"] == {"icd9:4019"}


def test_codes_outside_the_dictionary_are_kept_and_counted(
    hospital: Path, file: File
) -> None:
    rows = '1,"4019",x,"y, z"\n2,"0389",x,y\n3,V4581,x,y\n'
    file("ROW_ID,ICD9_CODE,SHORT_TITLE,LONG_TITLE\n" + rows, "h/D_ICD_DIAGNOSES.csv")
    result = read_mimic(hospital)
    assert [t.unknown for t in result.tables] == [1, 0, 0]
    assert result.codes == OF_ALL


HEADER = DIAGNOSES.split("\n")[0]


def test_unreadable_tables_of_mimic_are_refused(hospital: Path, file: File) -> None:
    def complains(message: str, **options: list[str]) -> None:
        with pytest.raises((DataError, ConfigError), match=message) as caught:
            read_mimic(hospital, **options)
        assert "\n" not in str(caught.value)

    complains(
        "unknown table 'diagnosis' of MIMIC-III: did you mean 'diag",
        tables=["diagnosis"],
    )
    for text, message in (
        (
            DIAGNOSES.replace("_CODE", ""),
            ":1: there is no column 'ICD9_CODE': did you mean 'icd9'",
        ),
        ("", ":1: the table has no header"),
        (
            f"{HEADER}\n1,2,3,4,hypertension\n",
            ":2: the code is not a code of icd9; 1 of 1 rows are damaged",
        ),
    ):
        path = file(text, "h/DIAGNOSES_ICD.csv")
        complains(f"DIAGNOSES_ICD.csv{message}")
    file(f"{HEADER}\n", "h/DIAGNOSES_ICD.csv")
    without = read_mimic(hospital, ["diagnoses"])
    assert (without.codes, without.tables[0].rows) == ({}, 0)
    path.unlink()
    complains("there is neither DIAGNOSES_ICD.csv nor DIAGNOSES_ICD.csv.gz")
    (hospital / "DIAGNOSES_ICD.csv.gz").write_bytes(
        gzip.compress(DIAGNOSES.encode())[:-9]
    )
    complains("cannot be read to its end")
    with pytest.raises(DataError, match="no such folder"):
        read_mimic(hospital / "none")


def test_omop_concepts_and_source_codes_are_read(file: File) -> None:
    folder = file(
        "condition_occurrence_id\tperson_id\tcondition_concept_id\tcondition_source_value\n"
        "1\t7\t320128\tI10\n2\t7\t0\te11.9\n3\t8\t201826\tE11.65\n",
        "o/CONDITION_OCCURRENCE.csv",
    ).parent
    file(
        "procedure_occurrence_id,person_id,procedure_concept_id,procedure_source_value\n"
        "1,8,4336464,99254\n",
        "o/procedure_occurrence.csv",
    )
    result = read_omop(folder)
    assert result.codes == {
        "7": {"condition:320128"},
        "8": {"condition:201826", "procedure:4336464"},
    }
    assert result.tables[0].empty == 1
    source = read_omop(folder, "icd10", "cpt")
    assert source.codes == {
        "7": {"icd10:I10", "icd10:E119"},
        "8": {"icd10:E1165", "cpt:99254"},
    }
    assert read_omop(folder, "icd10", "").codes.keys() == {"7", "8"}
    with pytest.raises(
        ConfigError, match="unknown coding system 'icd11': did you mean"
    ):
        read_omop(folder, "icd11")


def test_codiesp_diagnoses_and_procedures_are_read(file: File, tmp_path: Path) -> None:
    only = file("S1-1\tn44.8\nS1-1\tI10\nS2-1\tz20.818\n", "c/train/trainD.tsv")
    file("S1-1\tbw03zzz\nS3-1\tct13\nS3-1\n", "c/train/trainP.tsv")
    file("S1-1\tDIAGNOSTICO\tn44.8\tteste\t1 2\n", "c/train/trainX.tsv")
    result = read_codiesp(tmp_path / "c")
    assert result.codes == {
        "S1-1": {"icd10:N448", "icd10:I10", "icd10pcs:BW03ZZZ"},
        "S2-1": {"icd10:Z20818"},
        "S3-1": {"icd10pcs:CT13"},
    }
    assert [t.damaged for t in result.tables] == [0, 1]
    assert read_codiesp(only, "D").codes.keys() == {"S1-1", "S2-1"}
    for path, message in ((only, r"end in P.tsv"), (tmp_path / "none", "no such file")):
        with pytest.raises(DataError, match=message):
            read_codiesp(path, "P")


@pytest.mark.corpora
def test_the_demo_tables_of_mimic_have_the_counted_codes(corpora: Path) -> None:
    """The expected codes are read by csv.DictReader: 100 patients."""
    folder = corpora / "mimic_iii_demo"
    places = {
        "diagnoses": (folder / "DIAGNOSES_ICD.csv", "icd9", "SUBJECT_ID", "ICD9_CODE"),
        "procedures": (
            folder / "PROCEDURES_ICD.csv",
            "icd9proc",
            "SUBJECT_ID",
            "ICD9_CODE",
        ),
        "cpt": (folder / "CPTEVENTS.csv", "cpt", "SUBJECT_ID", "CPT_CD"),
    }
    result, expected = read_mimic(folder), read_by_csv(*places.values())
    assert result.codes == expected
    assert len(expected) == 100
    assert [(t.damaged, t.unknown > 0) for t in result.tables] == [
        (0, n < 2) for n in range(3)
    ]
    for kind in ("diagnoses", "cpt"):  # tables whose columns have usual names
        table_result = read_codes(*places[kind][:2])
        assert table_result.codes == read_mimic(folder, [kind]).codes
        assert table_result.tables[0].damaged == 0


@pytest.mark.corpora
def test_cases_of_codiesp_have_the_counted_codes(corpora: Path) -> None:
    """The expected codes are read by splitting lines: 750 cases with a code."""
    expected: dict[str, set[str]] = {}
    for part in ("train", "dev"):
        for kind, system in (("D", "icd10"), ("P", "icd10pcs")):
            text = (corpora / "codiesp" / part / f"{part}{kind}.tsv").read_text("utf-8")
            for line in text.splitlines():
                case, code = line.split("\t")
                expected.setdefault(case, set()).add(
                    f"{system}:{code.upper().replace('.', '')}"
                )
    result = read_codiesp(corpora / "codiesp")
    assert result.codes == expected
    assert len(expected) == 750
    assert sum(t.damaged for t in result.tables) == 0
