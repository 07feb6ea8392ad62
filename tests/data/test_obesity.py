"""The obesity challenge's XML, against hand-written files and ElementTree."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from fednotes.core.errors import ConfigError, DataError
from fednotes.patients.obesity import (
    DISEASES,
    label_matrix,
    read_judgments,
    read_obesity,
    read_texts,
)

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


def _expected(rows: list[dict[str, int]]) -> list[list[int]]:
    return [[row.get(disease, -1) for disease in DISEASES] for row in rows]


def test_summaries_and_labels_of_the_whole_challenge(challenge: Path) -> None:
    found = read_obesity(challenge)
    assert [(n.id, n.patient, n.text.strip()) for n in found.notes] == [
        ("1", "1", "Obese , BP < 140 & well ."),
        ("2", "2", "No asthma ."),
        ("3", "3", "Gout ."),
        ("4", "4", "Fine ."),
    ]
    assert found.diseases == DISEASES
    assert found.labels.dtype == np.int8
    assert found.labels.tolist() == _expected(
        [
            {"Obesity": 1, "Asthma": 1, "Gout": 0},
            {"Obesity": 0, "Asthma": 2},
            {"Gout": 1},
            {"Obesity": 0},
        ]
    )
    assert (found.without_text, found.unlabelled) == (1, 0)


def test_the_later_of_two_files_holds_and_the_conflict_is_named(challenge: Path) -> None:
    judgments = read_obesity(challenge).judgments
    (conflict,) = judgments.conflicts
    assert (conflict.document, conflict.disease, conflict.kept) == ("1", "Asthma", "Y")
    assert [Path(w).name for w in conflict.where] == [
        "obesity_standoff_annotations_training.xml:8",
        "obesity_standoff_annotations_training_addendum.xml:8",
    ]
    (line,) = judgments.lines()
    first, second = conflict.where
    assert line == f"{second}: another judgment of the pair than at {first}: the later one holds"


def test_a_file_that_contradicts_itself_holds_for_neither(file: File) -> None:
    content = (
        '<a><diseases source="intuitive"><disease name="Gout">\n<doc id="1" judgment="Y"/>\n'
        '<doc id="1" judgment="N"/>\n<doc id="2" judgment="N"/>\n<doc id="2" judgment="N"/>\n'
        "</disease></diseases></a>"
    )
    judgments = read_judgments([file(content, "a.xml")])
    assert dict(judgments.letters) == {("2", "Gout"): "N"}
    assert [c.kept for c in judgments.conflicts] == [None]
    assert label_matrix(["1", "2"], judgments)[:, DISEASES.index("Gout")].tolist() == [-1, 0]
    # A later file settles it.
    settled = read_judgments(
        [file(content, "a.xml"), file(_judged(intuitive={"Gout": {"1": "N"}}), "b.xml")]
    )
    assert settled.letters["1", "Gout"] == "N"


def test_unmentioned_is_no_label_unless_asked_for(challenge: Path) -> None:
    obesity, asthma = DISEASES.index("Obesity"), DISEASES.index("Asthma")
    left = read_obesity(challenge, "textual", "train")
    assert left.labels[:, obesity].tolist() == [1, -1, -1]
    assert left.labels[:, asthma].tolist() == [-1, 0, -1]
    assert left.unlabelled == 1
    stated = read_obesity(challenge, "textual", "train", unmentioned="absent")
    assert stated.labels[:, obesity].tolist() == [1, 0, -1]
    assert stated.labels[:, asthma].tolist() == [-1, 0, -1]


def test_the_parts_of_the_challenge(challenge: Path) -> None:
    train, test = (read_obesity(challenge, part=part) for part in ("train", "test"))
    assert [n.id for n in train.notes] == ["1", "2", "3"]
    assert [n.id for n in test.notes] == ["4"]
    assert train.without_text == 0
    whole = read_obesity(challenge)
    assert np.vstack([train.labels, test.labels]).tolist() == whole.labels.tolist()


def test_a_disease_of_one_class_and_one_of_none(challenge: Path) -> None:
    labels = read_obesity(challenge).labels
    assert set(labels[:, DISEASES.index("CAD")].tolist()) == {-1}
    assert set(labels[:, DISEASES.index("Gout")].tolist()) == {-1, 0, 1}


def test_random_annotations_against_elementtree(file: File) -> None:
    """Every pair of a file with both sources, read by ElementTree."""
    rng = np.random.default_rng(0)
    sources = {
        source: {
            disease: {str(d): "YNQU"[rng.integers(4)] for d in range(30) if rng.random() < 0.7}
            for disease in DISEASES
        }
        for source in ("intuitive", "textual")
    }
    path = file(_judged(**sources), "a.xml")
    root = ElementTree.parse(path).getroot()
    for source in ("intuitive", "textual"):
        expected = {
            (doc.get("id"), disease.get("name")): doc.get("judgment")
            for disease in root.findall(f"diseases[@source='{source}']/disease")
            for doc in disease
        }
        found = read_judgments([path], source)  # type: ignore[arg-type]
        assert dict(found.letters) == expected
        assert found.conflicts == found.damaged == ()


def test_damaged_judgments_are_left_out_and_named(file: File) -> None:
    content = _judged(
        intuitive={
            "Gout": {"1": "Y", "2": "X", "": "N"},
            "Gaut": {"1": "Y"},
            "Asthma": {"3": " n "},
        }
    )
    path = file(content, "a.xml")
    judgments = read_judgments([path])
    assert dict(judgments.letters) == {("1", "Gout"): "Y", ("3", "Asthma"): "N"}
    assert list(judgments.damaged) == [
        f"{path}:5: the judgment is none of Y, N, Q and U",
        f"{path}:6: the judgment is of no document",
        f"{path}:9: the disease is none of the challenge's: did you mean 'Gout'?",
    ]
    assert judgments.lines() == judgments.damaged


def test_packed_files_in_a_sub_folder_of_their_own(challenge: Path) -> None:
    whole = read_obesity(challenge).labels.tolist()
    for path in list(challenge.iterdir()):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert read_obesity(challenge).labels.tolist() == whole


BOMB = '<!DOCTYPE r [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;">]>\n'
OUTSIDE = '<!DOCTYPE r [<!ENTITY x SYSTEM "file:///etc/hostname">]>\n'


@pytest.mark.parametrize("prolog", [BOMB, OUTSIDE, OUTSIDE.replace("<!ENTITY x", "<!ENTITY % x")])
def test_entities_are_refused(file: File, prolog: str) -> None:
    text = file(prolog + '<root><doc id="1"><text>&b;&x;</text></doc></root>', "t.xml")
    with pytest.raises(DataError, match=r"t.xml:1: the file declares or uses entities"):
        read_texts([text])
    with pytest.raises(DataError, match="entities of its own"):
        read_judgments([file(prolog + _judged(intuitive={"Gout": {"1": "Y"}}), "a.xml")])


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


def test_what_is_missing_is_said(challenge: Path, file: File) -> None:
    with pytest.raises(DataError, match="no such folder"):
        read_obesity(challenge / "none")
    with pytest.raises(ConfigError, match="source must be one of intuitive, textual, not 'x'"):
        read_obesity(challenge, "x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="part must be one of"):
        read_obesity(challenge, part="dev")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unmentioned must be one of"):
        read_obesity(challenge, unmentioned="U")  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"a.xml: there is no textual judgment"):
        read_judgments([file(_judged(intuitive={"Gout": {"1": "Y"}}), "a.xml")], "textual")
    for path in challenge.glob("*test*"):
        path.unlink()
    with pytest.raises(DataError, match="no test file of records here"):
        read_obesity(challenge, part="test")
