"""Labels from tables and from the obesity challenge.

The expected labels are drawn here, written by hand, or read by ElementTree.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from time_limits import processor_time_below

from fednotes.apps.phenotyping.labels import PatientLabels, read_labels
from fednotes.apps.phenotyping.obesity import DISEASES, read_obesity, read_summaries
from fednotes.core.errors import DataError
from fednotes.data.notes import Note

File = Callable[..., Path]
SECRET = "Wilhelmina"


# ---- tables --------------------------------------------------------------------------


def test_long_and_wide_tables_give_the_same_labels(tmp_path: Path) -> None:
    """40 patients, three phenotypes: written long and wide by the csv module."""
    rng = np.random.default_rng(1)
    names = ("gout", "asthma", "CAD")
    label_matrix = rng.integers(-1, 3, (40, 3))
    patients = [f"p{n}" for n in range(40)]
    wide, long = tmp_path / "wide.csv", tmp_path / "long.tsv"
    with wide.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["Patient ID", *names])
        writer.writerows([p, *("NYQ"[x] if x >= 0 else "" for x in r)]
                         for p, r in zip(patients, label_matrix, strict=True))  # fmt: skip
    with long.open("w", newline="") as out:
        writer = csv.writer(out, delimiter="\t")
        writer.writerow(["annotator", "label", "phenotype", "person_id"])
        for row, column in rng.permutation(
            [(r, c) for r in range(40) for c in range(3)]
        ).tolist():
            if (x := label_matrix[row, column]) >= 0:
                words = ("absent", "Present", "QUESTIONABLE")
                writer.writerow(["a", words[x], names[column], patients[row]])
    order = [2, 1, 0]  # capitals come first
    for path in (wide, long):
        labels = read_labels(path)
        assert labels.phenotypes == ("CAD", "asthma", "gout")
        assert labels.to_matrix(patients).tolist() == label_matrix[:, order].tolist()
        assert labels.to_matrix(["p3", "?"]).tolist() == [
            label_matrix[3, order].tolist(),
            [-1, -1, -1],
        ]
    assert read_labels(wide).tables[0].empty == (label_matrix == -1).sum()
    assert read_labels(long).list_messages() == ()


def test_every_spelling_of_a_label_is_read(file: File) -> None:
    words = {
        1: ("present", "Y", "1", "1.0"),
        0: ("absent", "n", "0", "0.0"),
        2: ("Questionable", "q", "2"),
        -1: ("U", "unmentioned", ""),
    }
    pairs = [(word, value) for value, every in words.items() for word in every]
    rows = [f"{n},{word}" for n, (word, _) in enumerate(pairs)]
    table = "\n".join(["patient,gout", *rows])
    labels = read_labels(file(gzip.compress(table.encode()), "l.csv.gz"))
    patients = [str(n) for n in range(len(pairs))]
    assert labels.to_matrix(patients)[:, 0].tolist() == [value for _, value in pairs]
    stated = labels.to_matrix(patients, "absent")[:, 0].tolist()
    assert stated == [
        0 if word in ("U", "unmentioned") else value for word, value in pairs
    ]
    assert labels.get_labels("0") == {"gout": 1}
    assert labels.get_labels("11") == {}
    assert labels.get_labels("11", "absent") == {"gout": 0}


def test_a_pair_labelled_twice_and_differently_has_no_label(file: File) -> None:
    """The same label twice holds; so does a label beside an empty cell.

    Three labels are one conflict.
    """
    rows = [
        "1,gout,Y",
        "2,gout,Y",
        "1,gout,1",
        "2,gout,N",
        "2,gout,Y",
        "3,gout,",
        "3,gout,Q",
    ]
    first = file("\n".join(["patient,phenotype,label", *rows]), "a.csv")
    labels = read_labels(first)
    assert labels.to_matrix(["1", "2", "3"])[:, 0].tolist() == [1, -1, 2]
    assert len(labels.conflicts) == 1
    assert labels.list_messages() == (
        f"{first}: 1 pairs of patient and phenotype without a label",
        f"{first}:5: the same pair has another label at {first}:3: neither is used",
    )
    second = file("patient,asthma,gout\n1,1,0\n4,0,0\n", "b.csv")
    joined = read_labels(first, second)
    assert joined.phenotypes == ("asthma", "gout")
    assert joined.to_matrix(["1", "2", "3", "4"]).tolist() == [
        [1, -1],
        [-1, -1],
        [-1, 2],
        [0, 0],
    ]
    assert len(joined.conflicts) == 2
    many = [f"{n},gout,{label}" for n in range(15) for label in "YN"]
    crowd = read_labels(
        file("\n".join(["patient,phenotype,label", "x,gout,Y", *many]), "c.csv")
    )
    assert crowd.list_messages()[-1] == "5 more pairs labelled twice and differently"
    assert crowd.values == {"x": {"gout": 1}}


def test_damaged_rows_are_left_out_and_reported(file: File) -> None:
    bad = [
        "1,gout",
        "1,gout,maybe",
        ",gout,Y",
        "1,,Y",
        f"1,{'x' * 101},Y",
        f"9,{SECRET},Wilh",
    ]
    good = [f"{n},gout,Y" for n in range(2, 9)]
    path = file("\n".join(["patient,disease,judgment", *bad, *good]), "l.csv")
    labels = read_labels(path)
    assert labels.phenotypes == ("gout",)
    assert labels.values.keys() == {str(n) for n in range(2, 9)}
    reason = (
        "the label is not one of present, absent, questionable; Y, N, Q, U; 1, 0, 2"
    )
    assert labels.list_messages() == (
        f"{path}:2: 2 columns instead of 3",
        f"{path}:3: {reason}",
        f"{path}:4: no patient",
        f"{path}:5: no phenotype",
        f"{path}:6: the phenotype's name is too long",
        f"{path}:7: {reason}",
    )
    wide = file("patient,gout,CAD\n1,Y,N\n2,?,Y\n3,N,N\n4,1\n,1,1\n", "w.csv")
    damaged = read_labels(wide)
    assert damaged.to_matrix(["1", "2", "3"]).tolist() == [[0, 1], [1, -1], [0, 0]]
    (table,) = damaged.tables
    assert (table.rows, table.kept, table.empty, table.damaged) == (8, 5, 0, 3)
    assert [d.line for d in table.examples] == [3, 5, 6]
    assert table.examples[0].reason.startswith("the label of 'gout' is not one of")


def test_a_phenotype_without_labels_is_kept(file: File) -> None:
    """Sites must agree on phenotypes, and one may never have judged some."""
    assert read_labels(file("patient,gout,CAD\n1,Y,\n")).phenotypes == ("CAD", "gout")
    long = file("patient,phenotype,label\n1,gout,Y\n1,CAD,\n")
    assert read_labels(long).phenotypes == ("CAD", "gout")
    judged = file(
        "\n".join(["patient,phenotype,label", *(f"1,{d},Y" for d in DISEASES[::-1])])
    )
    # a table goes with the challenge's files
    assert read_labels(judged).phenotypes == DISEASES


def test_the_columns_of_a_wide_table_are_compared_in_linear_time(file: File) -> None:
    names = ",".join(f"p{number}" for number in range(60_000))
    table = file(f"patient,{names}\n1,{'Y,' * 59_999}N\n")
    refusal = pytest.raises(DataError, match="the labels name 60,000 phenotypes, but")
    with processor_time_below(8), refusal:
        read_labels(table)


def test_the_column_of_patients_can_be_given(file: File) -> None:
    path = file("mrn,gout\n1,Y\n")
    assert read_labels(path, patient_column="MRN").values == {"1": {"gout": 1}}
    assert read_labels(
        file("patient,gout\n1,Y\n"), patient_column="mrn"
    ).phenotypes == ("gout",)
    assert PatientLabels((), {}).to_matrix(["1"]).shape == (1, 0)
    for folder, message in (
        (path.with_name("x"), "no such file"),
        (path.parent, "the table of labels"),
    ):
        with pytest.raises(DataError, match=message):
            read_labels(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f"1,{SECRET},Y\n",
            "no column 'patient': the first line has 3 columns, none with a similar name",
        ),
        (
            "patient,phenotype,labels\n1,gout,Y\n",
            "no column 'label': did you mean 'labels'",
        ),
        ("patient,label\n1,Y\n", "no column 'phenotype'"),
        ("patient\n1\n", "there is only a column of patients"),
        ("patient,gout,gout\n1,Y,N\n", "two columns are called 'gout'"),
        (",patient,gout\n0,1,Y\n", "f.txt:1: column 1 has no name"),
        (
            f"patient,{'g' * 101}\n1,Y\n",
            "f.txt:1: column 2: the name is longer than 100 characters: shorten it",
        ),
        (
            "patient,gout,Gout\n1,Y,N\n",
            "phenotypes 'Gout' and 'gout' differ only in case",
        ),
        (
            "patient,gout,age\n1,Y,71\n2,N,1\n3,N,55\n",
            r"column 'age' does not contain labels \(2 cells",
        ),
        (
            "patient,phenotype,label\n1,gout,yes\n2,gout,no\n",
            "f.txt:2: the label is not one of pres",
        ),
        ("patient,gout\n1,\n2,\n", "contains no labels"),
        ("patient,gout\n", "contains no labels"),
        ("", "the table has no header"),
    ],
)
def test_unreadable_files_are_refused_in_one_line(
    file: File, text: str, message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read_labels(file(text))
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)


# ---- the obesity challenge -----------------------------------------------------------


def _texts(*documents: tuple[str, str]) -> str:
    docs = "\n".join(
        f'<doc id="{id}"><text>\n{text}\n</text></doc>' for id, text in documents
    )
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<root><docs>\n{docs}\n</docs></root>\n'


def _judged(**sources: dict[str, dict[str, str]]) -> str:
    """Return annotations: letters by source, disease and document; one `doc` per line."""
    lines = ["<diseaseset>"]
    for source, diseases in sources.items():
        lines.append(f'<diseases source="{source}">')
        for disease, letters in diseases.items():
            lines.append(f'<disease name="{disease}">')
            lines += [
                f'<doc id="{d}" judgment="{letter}"/>' for d, letter in letters.items()
            ]
            lines.append("</disease>")
        lines.append("</diseases>")
    return "\n".join([*lines, "</diseaseset>"])


@pytest.fixture
def challenge(file: File, tmp_path: Path) -> Path:
    """Write a folder like that of the challenge, with an addendum and a test part."""
    for name, content in {
        "patient_records_training": _texts(
            ("1", "Obese , BP &lt; 140 &amp; well ."), ("2", "No asthma .")
        ),
        "patient_records_training2": _texts(("3", "Gout .")),
        "patient_records_test": _texts(("4", "Fine .")),
        "standoff_annotations_training": _judged(
            intuitive={"Obesity": {"1": "Y", "2": "N"}, "Asthma": {"1": "N", "2": "Q"}},
            textual={"Obesity": {"1": "Y", "2": "U"}, "Asthma": {"2": "N"}},
        ),
        "standoff_annotations_training_addendum": _judged(
            intuitive={"Gout": {"3": "Y", "1": "N"}, "Asthma": {"1": "Y"}}
        ),
        "standoff_annotations_test": _judged(
            intuitive={"obesity": {"4": "N"}, "CAD": {"99": "Y"}}
        ),
    }.items():
        file(content, f"c/obesity_{name}.xml")
    return tmp_path / "c"


def _labels(
    obesity: tuple[Sequence[Note], PatientLabels], unmentioned: str = "unlabelled"
) -> Any:
    """Return the (notes, diseases) labels of all notes."""
    notes, labels = obesity
    return labels.to_matrix([n.id for n in notes], unmentioned)  # type: ignore[arg-type]


def _judgments(tmp_path: Path, *files: str) -> PatientLabels:
    """Read annotations, file by file, beside one summary."""
    folder = tmp_path / "judged"
    folder.mkdir(exist_ok=True)
    (folder / "patient_records.xml").write_text(_texts(("1", "a")))
    for at, content in enumerate(files):
        (folder / f"annotations{at}.xml").write_text(content)
    return read_obesity(folder)[1]


def test_summaries_and_labels_of_the_obesity_challenge_are_read(
    challenge: Path,
) -> None:
    notes, labels = obesity = read_obesity(challenge)
    texts = ("Obese , BP < 140 & well .", "No asthma .", "Gout .", "Fine .")
    assert [n.text.strip() for n in notes] == [*texts]
    assert [n.id for n in notes] == [n.patient for n in notes] == ["1", "2", "3", "4"]
    assert labels.phenotypes == DISEASES
    rows = [
        {"Obesity": 1, "Asthma": 1, "Gout": 0},
        {"Obesity": 0, "Asthma": 2},
        {"Gout": 1},
        {"Obesity": 0},
    ]
    assert _labels(obesity).dtype == np.int8
    expected = [[row.get(disease, -1) for disease in DISEASES] for row in rows]
    assert _labels(obesity).tolist() == expected
    assert [n.id for n in notes if "test" in n.source] == ["4"]
    assert labels.get_labels("99") == {"CAD": 1}  # judged without a text
    (line,) = labels.list_messages()
    name = f"{challenge}/obesity_standoff_annotations_training"
    assert line == (
        f"{name}_addendum.xml:8: the same pair has another label at {name}.xml:8: "
        "the later one is used"
    )
    for path in list(challenge.iterdir()):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert _labels(read_obesity(challenge)).tolist() == expected


def test_contradicting_judgments_give_no_label(tmp_path: Path) -> None:
    content = (
        '<a><diseases source="intuitive"><disease name="Gout">\n<doc id="1" judgment="Y"/>\n'
        '<doc id="1" judgment="N"/>\n<doc id="2" judgment="N"/>\n<doc id="2" judgment="N"/>\n'
        "</disease></diseases></a>"
    )
    labels = _judgments(tmp_path, content)
    assert labels.values == {"2": {"Gout": 0}}
    assert [line.rpartition(": ")[2] for line in labels.conflicts] == [
        "neither is used"
    ]
    # A later file settles it.
    settled = _judgments(tmp_path, content, _judged(intuitive={"Gout": {"1": "N"}}))
    assert settled.get_labels("1") == {"Gout": 0}


def test_unmentioned_gives_no_label_unless_requested(challenge: Path) -> None:
    obesity = read_obesity(challenge, "textual")
    columns = [DISEASES.index("Obesity"), DISEASES.index("Asthma")]
    assert _labels(obesity)[:3, columns].T.tolist() == [[1, -1, -1], [-1, 0, -1]]
    assert _labels(obesity, "absent")[:3, columns].T.tolist() == [
        [1, 0, -1],
        [-1, 0, -1],
    ]


def test_random_annotations_equal_those_read_by_elementtree(
    tmp_path: Path, file: File
) -> None:
    """ElementTree reads every pair of a file with both sources."""
    rng = np.random.default_rng(0)
    sources = {
        source: {
            disease: {
                str(d): "YNQU"[rng.integers(4)] for d in range(30) if rng.random() < 0.7
            }
            for disease in DISEASES
        }
        for source in ("intuitive", "textual")
    }
    path = file(_judged(**sources), "c/annotations.xml")
    file(_texts(("1", "a")), "c/patient_records.xml")
    root = ElementTree.parse(path).getroot()
    for source in ("intuitive", "textual"):
        expected = {
            (doc.get("id"), disease.get("name")): "NYQ".find(str(doc.get("judgment")))
            for disease in root.findall(f"diseases[@source='{source}']/disease")
            for doc in disease
        }
        _, labels = read_obesity(path.parent, source)  # type: ignore[arg-type]
        patients = [str(d) for d in range(30)]
        expected_matrix = [
            [expected.get((p, d), -1) for d in DISEASES] for p in patients
        ]
        assert labels.to_matrix(patients).tolist() == expected_matrix
        assert labels.list_messages() == ()


def test_damaged_judgments_are_left_out_and_reported(tmp_path: Path) -> None:
    judged = {
        "Gout": {"1": "Y", "2": "X", "": "N"},
        "Gaut": {"1": "Y"},
        "Asthma": {"3": " n "},
    }
    labels = _judgments(tmp_path, _judged(intuitive=judged))
    assert labels.values == {"1": {"Gout": 1}, "3": {"Asthma": 0}}
    path = tmp_path / "judged" / "annotations0.xml"
    assert labels.list_messages() == (
        f"{path}:5: the judgment is not Y, N, Q or U",
        f"{path}:6: the judgment does not name a document",
        f"{path}:9: the disease is not one of the challenge's: did you mean 'Gout'?",
    )


BOMB = '<!DOCTYPE r [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;">]>\n'
OUTSIDE = '<!DOCTYPE r [<!ENTITY x SYSTEM "file:///etc/hostname">]>\n'


@pytest.mark.parametrize(
    "prolog", [BOMB, OUTSIDE, OUTSIDE.replace("<!ENTITY x", "<!ENTITY % x")]
)
def test_xml_entities_are_refused(file: File, tmp_path: Path, prolog: str) -> None:
    """A DOCTYPE without entities is accepted."""
    text = file(prolog + '<root><doc id="1"><text>&b;&x;</text></doc></root>', "t.xml")
    with pytest.raises(
        DataError, match=r"t.xml:1: the file declares or uses its own entities"
    ):
        read_summaries([text])
    with pytest.raises(DataError, match="its own entities"):
        _judgments(tmp_path, prolog + _judged(intuitive={"Gout": {"1": "Y"}}))
    path = file(
        '<!DOCTYPE root SYSTEM "x.dtd">\n<root><doc id="1"><text>a</text></doc></root>'
    )
    assert [note.text for note in read_summaries([path])] == ["a"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "<root><doc id='1'>\n<text>a</doc></root>",
            r"f.txt:2: the file is not XML \(mismatched",
        ),
        ("", r"the file is not XML \(no element found\)"),
        (
            "<?xml version='1.0' encoding='utfa8'?><root/>",
            "encoding is not known: write it",
        ),
        (
            "<?xml version='1.0' encoding='shift_jis'?><root/>",
            "encoding is not known",
        ),
        ("<root>\n<doc id='1'></doc></root>", "f.txt:2: no text"),
        ("<root><doc id='1'><text> \n </text></doc></root>", "f.txt:1: no text"),
        ("<root><doc><text>a</text></doc></root>", "the document has no id"),
        ("<root><other/></root>", "no doc element"),
        (
            _texts(("1", "a"), ("1", "b")),
            r"f.txt:6: the document at .*f.txt:3 has the same id$",
        ),
    ],
)
def test_unreadable_texts_are_refused(file: File, content: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read_summaries([file(content)])
    assert "\n" not in str(caught.value)


def test_an_error_names_missing_files(challenge: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        read_obesity(challenge / "none")
    for path in challenge.glob("*annotations*"):
        path.write_text(_judged(intuitive={"Gout": {"1": "Y"}}))
    with pytest.raises(DataError, match=r"found no textual judgment"):
        read_obesity(challenge, "textual")
    for path in challenge.glob("*records*"):
        path.unlink()
    with pytest.raises(DataError, match="no file of records"):
        read_obesity(challenge)


def test_a_table_with_as_many_phenotypes_as_patients_is_refused(file: File) -> None:
    """The matrix of a table of 1 MB would take gigabytes."""
    header = "patient,phenotype,label"
    rows = [f"{number},disease {number},1" for number in range(10_001)]
    path = file("\n".join([header, *rows]), "labels.csv")
    with pytest.raises(
        DataError, match=r"labels\.csv: the labels name 10,001 phenotyp"
    ):
        read_labels(path)
    path = file("\n".join([header, *rows[1:]]), "labels.csv")
    matrix = read_labels(path).to_matrix(["0", "7"])
    assert matrix.shape == (2, 10_000)
    assert matrix.sum(1).tolist() == [-10_000, 1 - 9_999]
