"""The obesity challenge's XML, against hand-written files and ElementTree."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from fednotes.core.errors import DataError
from fednotes.data.notes import Note
from fednotes.patients.labels import DISEASES, PatientLabels, read_obesity, read_texts

File = Callable[..., Path]


def _texts(*documents: tuple[str, str]) -> str:
    docs = "\n".join(f'<doc id="{id}"><text>\n{text}\n</text></doc>' for id, text in documents)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<root><docs>\n{docs}\n</docs></root>\n'


def _judged(**sources: dict[str, dict[str, str]]) -> str:
    """Annotations: source → disease → document → letter; one `doc` a line."""
    lines = ["<diseaseset>"]
    for source, diseases in sources.items():
        lines.append(f'<diseases source="{source}">')
        for disease, letters in diseases.items():
            lines.append(f'<disease name="{disease}">')
            lines += [f'<doc id="{d}" judgment="{letter}"/>' for d, letter in letters.items()]
            lines.append("</disease>")
        lines.append("</diseases>")
    return "\n".join([*lines, "</diseaseset>"])


@pytest.fixture
def challenge(file: File, tmp_path: Path) -> Path:
    """A folder as the challenge has it: two files of training texts, an addendum, a test part."""
    name = "c/obesity_{}.xml"
    file(
        _texts(("1", "Obese , BP &lt; 140 &amp; well ."), ("2", "No asthma .")),
        name.format("patient_records_training"),
    )
    file(_texts(("3", "Gout .")), name.format("patient_records_training2"))
    file(_texts(("4", "Fine .")), name.format("patient_records_test"))
    file(
        _judged(
            intuitive={"Obesity": {"1": "Y", "2": "N"}, "Asthma": {"1": "N", "2": "Q"}},
            textual={"Obesity": {"1": "Y", "2": "U"}, "Asthma": {"2": "N"}},
        ),
        name.format("standoff_annotations_training"),
    )
    file(
        _judged(intuitive={"Gout": {"3": "Y", "1": "N"}, "Asthma": {"1": "Y"}}),
        name.format("standoff_annotations_training_addendum"),
    )
    file(
        _judged(intuitive={"obesity": {"4": "N"}, "CAD": {"99": "Y"}}),
        name.format("standoff_annotations_test"),
    )
    return tmp_path / "c"


def _labels(found: tuple[Sequence[Note], PatientLabels], unmentioned: str = "unlabelled") -> Any:
    """(notes, diseases) of all the notes that were read."""
    notes, labels = found
    return labels.matrix([n.id for n in notes], unmentioned)  # type: ignore[arg-type]


def _judgments(tmp_path: Path, *files: str) -> PatientLabels:
    """The labels of annotations, file by file, beside one summary."""
    folder = tmp_path / "judged"
    folder.mkdir(exist_ok=True)
    (folder / "patient_records.xml").write_text(_texts(("1", "a")))
    for at, content in enumerate(files):
        (folder / f"annotations{at}.xml").write_text(content)
    return read_obesity(folder)[1]


def test_summaries_and_labels_of_the_whole_challenge(challenge: Path) -> None:
    notes, labels = found = read_obesity(challenge)
    assert [(n.id, n.patient, n.text.strip()) for n in notes] == [
        ("1", "1", "Obese , BP < 140 & well ."),
        ("2", "2", "No asthma ."),
        ("3", "3", "Gout ."),
        ("4", "4", "Fine ."),
    ]
    assert labels.phenotypes == DISEASES
    rows = [
        {"Obesity": 1, "Asthma": 1, "Gout": 0},
        {"Obesity": 0, "Asthma": 2},
        {"Gout": 1},
        {"Obesity": 0},
    ]
    assert _labels(found).dtype == np.int8
    expected = [[row.get(disease, -1) for disease in DISEASES] for row in rows]
    assert _labels(found).tolist() == expected
    assert [n.id for n in notes if "test" in n.source] == ["4"]
    assert labels.of("99") == {"CAD": 1}  # judged without a text
    for path in list(challenge.iterdir()):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert _labels(read_obesity(challenge)).tolist() == expected


def test_the_later_of_two_files_holds_and_the_conflict_is_named(challenge: Path) -> None:
    (line,) = read_obesity(challenge)[1].lines()
    name = f"{challenge}/obesity_standoff_annotations_training"
    assert line == (
        f"{name}_addendum.xml:8: a label of the same pair is another one at {name}.xml:8: "
        "the later one holds"
    )


def test_a_file_that_contradicts_itself_holds_for_neither(tmp_path: Path) -> None:
    content = (
        '<a><diseases source="intuitive"><disease name="Gout">\n<doc id="1" judgment="Y"/>\n'
        '<doc id="1" judgment="N"/>\n<doc id="2" judgment="N"/>\n<doc id="2" judgment="N"/>\n'
        "</disease></diseases></a>"
    )
    labels = _judgments(tmp_path, content)
    assert labels.values == {"2": {"Gout": 0}}
    assert [line.rpartition(": ")[2] for line in labels.conflicts] == ["neither holds"]
    # A later file settles it.
    settled = _judgments(tmp_path, content, _judged(intuitive={"Gout": {"1": "N"}}))
    assert settled.of("1") == {"Gout": 0}


def test_unmentioned_is_no_label_unless_asked_for(challenge: Path) -> None:
    found = read_obesity(challenge, "textual")
    both = [DISEASES.index("Obesity"), DISEASES.index("Asthma")]
    assert _labels(found)[:3, both].T.tolist() == [[1, -1, -1], [-1, 0, -1]]
    assert _labels(found, "absent")[:3, both].T.tolist() == [[1, 0, -1], [-1, 0, -1]]


def test_random_annotations_against_elementtree(tmp_path: Path, file: File) -> None:
    """Every pair of a file with both sources, read by ElementTree."""
    rng = np.random.default_rng(0)
    sources = {
        source: {
            disease: {str(d): "YNQU"[rng.integers(4)] for d in range(30) if rng.random() < 0.7}
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
        wanted = [[expected.get((p, d), -1) for d in DISEASES] for p in patients]
        assert labels.matrix(patients).tolist() == wanted
        assert labels.lines() == ()


def test_damaged_judgments_are_left_out_and_named(tmp_path: Path) -> None:
    content = _judged(
        intuitive={
            "Gout": {"1": "Y", "2": "X", "": "N"},
            "Gaut": {"1": "Y"},
            "Asthma": {"3": " n "},
        }
    )
    labels = _judgments(tmp_path, content)
    assert labels.values == {"1": {"Gout": 1}, "3": {"Asthma": 0}}
    path = tmp_path / "judged" / "annotations0.xml"
    assert labels.lines() == (
        f"{path}:5: the judgment is none of Y, N, Q and U",
        f"{path}:6: the judgment is of no document",
        f"{path}:9: the disease is none of the challenge's: did you mean 'Gout'?",
    )


BOMB = '<!DOCTYPE r [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;">]>\n'
OUTSIDE = '<!DOCTYPE r [<!ENTITY x SYSTEM "file:///etc/hostname">]>\n'


@pytest.mark.parametrize("prolog", [BOMB, OUTSIDE, OUTSIDE.replace("<!ENTITY x", "<!ENTITY % x")])
def test_entities_are_refused(file: File, tmp_path: Path, prolog: str) -> None:
    text = file(prolog + '<root><doc id="1"><text>&b;&x;</text></doc></root>', "t.xml")
    with pytest.raises(DataError, match=r"t.xml:1: the file declares or uses entities"):
        read_texts([text])
    with pytest.raises(DataError, match="entities of its own"):
        _judgments(tmp_path, prolog + _judged(intuitive={"Gout": {"1": "Y"}}))


def test_a_plain_doctype_is_fine(file: File) -> None:
    path = file('<!DOCTYPE root SYSTEM "x.dtd">\n<root><doc id="1"><text>a</text></doc></root>')
    assert [note.text for note in read_texts([path])] == ["a"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "<root><doc id='1'>\n<text>a</doc></root>",
            r"f.txt:2: the file is no XML \(mismatched tag\)",
        ),
        ("", r"the file is no XML \(no element found\)"),
        ("<root>\n<doc id='1'></doc></root>", "f.txt:2: no text"),
        ("<root><doc id='1'><text> \n </text></doc></root>", "f.txt:1: no text"),
        ("<root><doc><text>a</text></doc></root>", "the document has no id"),
        ("<root><other/></root>", "no doc element"),
        (_texts(("1", "a"), ("1", "b")), r"f.txt:6: the document's id is also that at .*f.txt:3$"),
    ],
)
def test_texts_that_cannot_be_read(file: File, content: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read_texts([file(content)])
    assert "\n" not in str(caught.value)


def test_what_is_missing_is_said(challenge: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        read_obesity(challenge / "none")
    for path in challenge.glob("*annotations*"):
        path.write_text(_judged(intuitive={"Gout": {"1": "Y"}}))
    with pytest.raises(DataError, match=r"there is no textual judgment"):
        read_obesity(challenge, "textual")
    for path in challenge.glob("*records*"):
        path.unlink()
    with pytest.raises(DataError, match="no file of records here"):
        read_obesity(challenge)
