"""A hospital's own table of codes, against hand-written files and the csv module."""

from __future__ import annotations

import csv
import gzip
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from fednotes.core.errors import DataError
from fednotes.patients.tables import read_codes, read_mimic

File = Callable[..., Path]
SECRET = "Wilhelmina"
ROWS = [("7", "I10"), ("7", "E11.9"), ("8", "e11.65"), ("9", "Z00")]
EXPECTED = {"7": {"icd10:I10", "icd10:E119"}, "8": {"icd10:E1165"}, "9": {"icd10:Z00"}}


@pytest.mark.parametrize("delimiter", [",", "\t", ";"])
@pytest.mark.parametrize(
    "header", ["patient,code", "PATIENT ID,ICD_Code", "subject_id,icd10_code", "person-id,dx code"]
)
def test_any_header_and_delimiter(file: File, header: str, delimiter: str) -> None:
    lines = [header.replace(",", delimiter), *(delimiter.join(row) for row in ROWS)]
    found = read_codes(file("\n".join(lines), "c.txt"), "icd10")
    assert found.codes == EXPECTED
    assert (found.tables[0].rows, found.tables[0].kept) == (4, 4)


def test_packed_with_other_columns_quotes_and_line_ends(file: File) -> None:
    rows = [f'{n},"{p}","{c}","{SECRET}, seen today"' for n, (p, c) in enumerate(ROWS)]
    text = "\r\n".join(["row,mrn,found,remark", *rows])
    path = file(gzip.compress(b"\xef\xbb\xbf" + text.encode()), "c.csv.gz")
    assert read_codes(path, "icd10", "MRN", "Found").codes == EXPECTED


def test_each_row_may_name_its_system(file: File) -> None:
    """Names as registries, OMOP and FHIR write them; rows that name none are of `system`."""
    named = [
        *(("icd10", "I10", "icd10:I10"), ("ICD-10-CM", "E11.9", "icd10:E119")),
        *(("ICD10PCS", "0DTJ4ZZ", "icd10pcs:0DTJ4ZZ"), ("ICD9CM", "0389", "icd9:0389")),
        *(("ICD9Proc", "0331", "icd9proc:0331"), ("CPT4", "99254", "cpt:99254")),
        *(("http://hl7.org/fhir/sid/icd-9-cm", "4019", "icd9:4019"), ("HCPCS", "A0428", None)),
        *(("", "V4581", "icd9:V4581"), ("SNOMED", "38341003", "")),
    ]
    rows = [f"{n},{system},{code}" for n, (system, code, _) in enumerate(named)]
    path = file("\n".join(["patient,System,code", *rows]), "c.csv")
    found = read_codes(path, "icd9")
    wanted = {str(n): {code or "cpt:A0428"} for n, (_, _, code) in enumerate(named) if code != ""}
    assert found.codes == wanted
    (bad,) = found.tables[0].examples
    assert bad.line == 11
    assert bad.reason.startswith("the coding system is none of icd9, icd9proc, cpt, icd10")
    assert "8" not in read_codes(path).codes


MIMIC_IV = "subject_id,hadm_id,seq_num,icd_code,icd_version\n"


def test_tables_of_mimic_iv(file: File) -> None:
    """3605 is a code of diagnoses and of procedures: the file's name, or the system, says it."""
    diagnoses = file(
        MIMIC_IV + "1,2,1,4019   ,9\n1,2,2,I10,10\n2,3,1,0389,9\n", "diagnoses_icd.csv"
    )
    found = read_codes(diagnoses)
    assert found.codes == {"1": {"icd9:4019", "icd10:I10"}, "2": {"icd9:0389"}}
    rows = MIMIC_IV + "1,2,1,3605,9\n1,2,2,0DTJ4ZZ,10\n"
    wanted = {"1": {"icd9proc:3605", "icd10pcs:0DTJ4ZZ"}}
    assert read_codes(file(rows, "procedures_icd.csv")).codes == wanted
    other = file(rows, "other.csv")
    assert read_codes(other, "icd10pcs").codes == wanted
    assert read_codes(other, "icd9proc").codes == wanted
    assert read_codes(other, "icd10").codes == {"1": {"icd9:3605"}}
    cpt = file("patient,code,icd_version\n1,99254,\n2,99255,10\n", "c.csv")
    assert read_codes(cpt, "cpt").codes == {"1": {"cpt:99254"}, "2": {"cpt:99255"}}
    odd = file(MIMIC_IV + "1,2,1,I10,11\n1,2,2,I10,10\n2,2,1,I10,\n3,2,1,I10,10\n", "odd.csv")
    assert read_codes(odd).codes.keys() == {"1", "3"}
    assert [d.line for d in read_codes(odd).tables[0].examples] == [2, 4]


def test_damaged_rows_are_left_out_counted_and_named(file: File) -> None:
    bad = (
        b"3\n"
        b"3,I10,x\n"
        b",I10\n"
        b"3,hypertension\n"
        b'3,"I10\n'
        b"3,I1\xff0\n"
        b"3,\n"  # empty, not damaged
        b"\n"  # nothing
    )
    good = "".join(f"{n},I10\n" for n in range(10, 20)).encode()
    path = file(b"patient,code\n" + bad + good, "c.csv")
    found = read_codes(path, "icd10")
    assert found.codes == {str(n): {"icd10:I10"} for n in range(10, 20)}
    (report,) = found.tables
    assert (report.rows, report.kept, report.empty, report.damaged) == (17, 10, 1, 6)
    assert report.lines() == (
        f"{path}:2: 1 columns instead of 2",
        f"{path}:3: 3 columns instead of 2",
        f"{path}:4: no patient",
        f"{path}:5: the code is none of icd10",
        f"{path}:6: a quote is not closed",
        f"{path}:7: a byte is not UTF-8, or the row is too long",
    )


def test_as_the_csv_module_reads_it(tmp_path: Path) -> None:
    """A thousand random rows, written and read by the csv module."""
    draw = random.Random(1)
    path = tmp_path / "c.csv"
    with path.open("w", newline="") as out:
        writer = csv.writer(out, quoting=csv.QUOTE_MINIMAL)
        writer.writerow(["remark", "code", "patient"])
        for _ in range(1000):
            code = f"{draw.choice('ABCEZ')}{draw.randrange(100):02d}.{draw.randrange(10)}"
            writer.writerow([draw.choice(["", 'a "b", c', "x"]), code, draw.randrange(90)])
    expected: dict[str, set[str]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            code = f"icd10:{row['code'].replace('.', '')}"
            expected.setdefault(row["patient"], set()).add(code)
    assert read_codes(path, "icd10").codes == expected


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("patient,code\n1,I10\n", {}, r"c\.csv:1: nothing says which coding system .*system = "),
        (
            "patient,codes\n1,I10\n",
            {},
            r"c\.csv:1: there is no column 'code': did you mean 'codes'",
        ),
        (f"1,{SECRET}\n", {}, "no column 'patient': the first line names 2 columns, none like it"),
        ("patient,code\n1,I10\n", {"code_column": "icd"}, "no column 'icd'"),
        (
            "patient,subject_id,code\n1,1,I10\n",
            {"system": "icd10"},
            "columns 1 and 2, 'patient' and 'subject_id', could both be meant: name one with pat",
        ),
        ("patient,code\n1,I10\n2,I10\n", {"system": "cpt"}, "2: the code is none of cpt; so are 2"),
        ("\n", {"system": "cpt"}, "the table has no header"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(
    file: File, text: str, options: dict[str, str], message: str
) -> None:
    path = file(text, "c.csv")
    with pytest.raises(DataError, match=message) as caught:
        read_codes(path, **options)
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)


def test_no_file_a_folder_a_broken_one(tmp_path: Path, file: File) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_codes(tmp_path / "none.csv", "icd10")
    with pytest.raises(DataError, match="a folder: name the table of codes"):
        read_codes(tmp_path, "icd10")
    whole = gzip.compress(b"patient,code\n1,I10\n")
    with pytest.raises(DataError, match="cannot read to its end"):
        read_codes(file(whole[:-9], "c.csv.gz"), "icd10")
    assert read_codes(file("patient,code\n", "c.csv"), "icd10").codes == {}


@pytest.mark.corpora
def test_tables_of_the_mimic_demo(corpora: Path) -> None:
    """As `read_mimic` reads them, which is held against csv.DictReader."""
    folder = corpora / "mimic_iii_demo"
    for name, system, kind in (
        ("DIAGNOSES_ICD", "icd9", "diagnoses"),
        ("CPTEVENTS", "cpt", "cpt"),
    ):
        found = read_codes(folder / f"{name}.csv", system)
        assert found.codes == read_mimic(folder, [kind]).codes
        assert found.tables[0].damaged == 0
