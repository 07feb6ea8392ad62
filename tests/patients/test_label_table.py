"""Tables of judged phenotypes, against hand-written files and labels drawn here."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fednotes.core.errors import DataError
from fednotes.patients.labels import DISEASES, PatientLabels, read_labels

File = Callable[..., Path]
SECRET = "Wilhelmina"


def test_both_forms_give_the_labels_that_were_drawn(tmp_path: Path) -> None:
    """40 patients, three phenotypes: written long and wide by the csv module."""
    rng = np.random.default_rng(1)
    names = ("gout", "asthma", "CAD")
    drawn = rng.integers(-1, 3, (40, 3))
    patients = [f"p{n}" for n in range(40)]
    wide, long = tmp_path / "wide.csv", tmp_path / "long.tsv"
    with wide.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["Patient ID", *names])
        writer.writerows([p, *("NYQ"[x] if x >= 0 else "" for x in r)]
                         for p, r in zip(patients, drawn, strict=True))  # fmt: skip
    with long.open("w", newline="") as out:
        writer = csv.writer(out, delimiter="\t")
        writer.writerow(["annotator", "label", "phenotype", "person_id"])
        for row, column in rng.permutation([(r, c) for r in range(40) for c in range(3)]).tolist():
            if (x := drawn[row, column]) >= 0:
                words = ("absent", "Present", "QUESTIONABLE")
                writer.writerow(["a", words[x], names[column], patients[row]])
    order = [2, 1, 0]  # capitals come first
    for path in (wide, long):
        found = read_labels(path)
        assert found.phenotypes == ("CAD", "asthma", "gout")
        assert found.matrix(patients).tolist() == drawn[:, order].tolist()
        assert found.matrix(["p3", "?"]).tolist() == [drawn[3, order].tolist(), [-1, -1, -1]]
    assert read_labels(wide).tables[0].empty == (drawn == -1).sum()
    assert read_labels(long).lines() == ()


def test_every_way_to_write_a_label(file: File) -> None:
    words = {
        1: ("present", "Y", "1", "1.0"),
        0: ("absent", "n", "0", "0.0"),
        2: ("Questionable", "q", "2"),
        -1: ("U", "unmentioned", ""),
    }
    given = [(word, value) for value, every in words.items() for word in every]
    rows = [f"{n},{word}" for n, (word, _) in enumerate(given)]
    path = file(gzip.compress("\n".join(["patient;gout".replace(";", ","), *rows]).encode()),
                "l.csv.gz")  # fmt: skip
    found = read_labels(path)
    patients = [str(n) for n in range(len(given))]
    assert found.matrix(patients)[:, 0].tolist() == [value for _, value in given]
    stated = found.matrix(patients, "absent")[:, 0].tolist()
    assert stated == [0 if word in ("U", "unmentioned") else value for word, value in given]
    assert found.of("0") == {"gout": 1}
    assert found.of("11") == {}
    assert found.of("11", "absent") == {"gout": 0}


def test_a_pair_labelled_twice_and_differently_is_none(file: File) -> None:
    """The same twice holds; so does one beside an empty cell. Three labels are one conflict."""
    rows = ["1,gout,Y", "2,gout,Y", "1,gout,1", "2,gout,N", "2,gout,Y", "3,gout,", "3,gout,Q"]
    first = file("\n".join(["patient,phenotype,label", *rows]), "a.csv")
    found = read_labels(first)
    assert found.matrix(["1", "2", "3"])[:, 0].tolist() == [1, -1, 2]
    assert len(found.conflicts) == 1
    line = f"{first}:5: a label of the same pair is another one at {first}:3: neither holds"
    assert found.lines() == (
        f"{first}: 1 pairs of patient and phenotype without a label",
        line,
    )
    second = file("patient,asthma,gout\n1,1,0\n4,0,0\n", "b.csv")
    both = read_labels(first, second)
    assert both.phenotypes == ("asthma", "gout")
    assert both.matrix(["1", "2", "3", "4"]).tolist() == [[1, -1], [-1, -1], [-1, 2], [0, 0]]
    assert len(both.conflicts) == 2
    many = [f"{n},gout,{label}" for n in range(15) for label in "YN"]
    crowd = read_labels(file("\n".join(["patient,phenotype,label", "x,gout,Y", *many]), "c.csv"))
    assert crowd.lines()[-1] == "5 more pairs labelled twice and differently"
    assert crowd.values == {"x": {"gout": 1}}


def test_damaged_rows_are_left_out_counted_and_named(file: File) -> None:
    bad = ["1,gout", "1,gout,maybe", ",gout,Y", "1,,Y", f"1,{'x' * 101},Y", f"9,{SECRET},Wilh"]
    good = [f"{n},gout,Y" for n in range(2, 9)]
    path = file("\n".join(["patient,disease,judgment", *bad, *good]), "l.csv")
    found = read_labels(path)
    assert found.phenotypes == ("gout",)
    assert found.values.keys() == {str(n) for n in range(2, 9)}
    reason = "the label is none of present, absent, questionable; Y, N, Q, U; 1, 0, 2"
    assert found.lines() == (
        f"{path}:2: 2 columns instead of 3",
        f"{path}:3: {reason}",
        f"{path}:4: no patient",
        f"{path}:5: no phenotype",
        f"{path}:6: the phenotype's name is too long",
        f"{path}:7: {reason}",
    )
    wide = file("patient,gout,CAD\n1,Y,N\n2,?,Y\n3,N,N\n4,1\n,1,1\n", "w.csv")
    read = read_labels(wide)
    assert read.matrix(["1", "2", "3"]).tolist() == [[0, 1], [1, -1], [0, 0]]
    (table,) = read.tables
    assert (table.rows, table.kept, table.empty, table.damaged) == (8, 5, 0, 3)
    assert [d.line for d in table.examples] == [3, 5, 6]
    assert table.examples[0].reason.startswith("the label of 'gout' is none of")


def test_a_phenotype_without_labels_is_one(file: File) -> None:
    """Sites must agree on phenotypes, and one may never have judged some."""
    assert read_labels(file("patient,gout,CAD\n1,Y,\n")).phenotypes == ("CAD", "gout")
    long = file("patient,phenotype,label\n1,gout,Y\n1,CAD,\n")
    assert read_labels(long).phenotypes == ("CAD", "gout")
    judged = file("\n".join(["patient,phenotype,label", *(f"1,{d},Y" for d in DISEASES[::-1])]))
    assert read_labels(judged).phenotypes == DISEASES  # a table goes with the challenge's files


def test_the_column_of_patients_may_be_named(file: File) -> None:
    path = file("mrn,gout\n1,Y\n")
    assert read_labels(path, patient_column="MRN").values == {"1": {"gout": 1}}
    assert read_labels(file("patient,gout\n1,Y\n"), patient_column="mrn").phenotypes == ("gout",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"1,{SECRET},Y\n", "no column 'patient': the first line names 3 columns, none like it"),
        ("patient,phenotype,labels\n1,gout,Y\n", "no column 'label': did you mean 'labels'"),
        ("patient,label\n1,Y\n", "no column 'phenotype'"),
        ("patient\n1\n", "there is only a column of patients"),
        ("patient,gout,gout\n1,Y,N\n", "two columns are called 'gout'"),
        (",patient,gout\n0,1,Y\n", "f.txt:1: column 1 has no name"),
        ("patient,gout,Gout\n1,Y,N\n", "phenotypes 'Gout' and 'gout': name them alike"),
        ("patient,gout,age\n1,Y,71\n2,N,1\n3,N,55\n", r"column 'age' holds no labels \(2 cells"),
        ("patient,phenotype,label\n1,gout,yes\n2,gout,no\n", "f.txt:2: the label is none of pres"),
        ("patient,gout\n1,\n2,\n", "there is no label in it"),
        ("patient,gout\n", "there is no label in it"),
        ("", "the table has no header"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(file: File, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read_labels(file(text))
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_labels(tmp_path / "none.csv")
    with pytest.raises(DataError, match="a folder: name the table of labels"):
        read_labels(tmp_path)


def test_labels_are_values_of_a_cohort() -> None:
    assert PatientLabels((), {}).matrix(["1"]).shape == (1, 0)
    assert PatientLabels(("a",), {}).matrix(["1"]).dtype == np.int8
