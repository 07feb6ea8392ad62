"""Notes in: what a file says is what comes out, one by one, and nothing goes missing unsaid."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fednotes.core.errors import ConfigError, DataError
from fednotes.data.notes import EMPTY, MISTAKEN, OTHER, Note, guess_notes, read_notes

HEADER = (
    "ROW_ID,SUBJECT_ID,HADM_ID,CHARTDATE,CHARTTIME,STORETIME,CATEGORY,DESCRIPTION,CGID,ISERROR,TEXT"
)
MIMIC = f"""{HEADER}
1,101,2001,2130-01-05,,,"Discharge summary","Report",,,"Admission Date:  [**2130-1-1**]
Patient with ""hypertension"" .
"
2,102,2002,2131-02-06,2131-02-06 08:00:00,,"Nursing ","Progress",501,,"Pt stable."
3,102,,2131-02-07,,,"Radiology","CHEST",,1,"Zyxwolan wrong patient."
4,103,,2131-02-07,,,"Radiology","CHEST",,,"  "
5,103,,2131-02-07,,,"Radiology","CHEST",,,"No effusion."
"""


def _write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def _complains(path: Path, message: str, secret: str = "Zyxwolan", **options: object) -> None:
    with pytest.raises(DataError, match=message) as caught:
        list(read_notes(path, **options))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert secret not in str(caught.value)


@pytest.mark.parametrize("packed", [False, True])
def test_mimic(tmp_path: Path, packed: bool) -> None:
    """Text over lines, quotes doubled, blanks after a category, errors and empty notes out."""
    data = gzip.compress(MIMIC.encode()) if packed else MIMIC.encode()
    path = _write(tmp_path / ("NOTEEVENTS.csv" + ".gz" * packed), data)
    notes = read_notes(path)
    first = next(notes)
    assert notes.counts == Counter({"notes": 1})
    assert first == Note(
        "1",
        'Admission Date:  [**2130-1-1**]\nPatient with "hypertension" .\n',
        "101",
        "Discharge summary",
        "NOTEEVENTS",
    )
    rest = [(n.id, n.patient, n.category, n.text) for n in notes]
    assert rest == [
        ("2", "102", "Nursing", "Pt stable."),
        ("5", "103", "Radiology", "No effusion."),
    ]
    assert notes.counts == Counter({"notes": 3, EMPTY: 1, MISTAKEN: 1})


def test_lower_case_header_crlf_and_a_byte_order_mark(tmp_path: Path) -> None:
    """The demo of MIMIC has lower-case names; spreadsheets write a mark and CRLF."""
    head, rest = MIMIC.split("\n", 1)
    content = b"\xef\xbb\xbf" + (head.lower() + "\n" + rest).replace("\n", "\r\n").encode()
    path, plain = _write(tmp_path / "a.csv", content), _write(tmp_path / "b.csv", MIMIC)
    assert [n.text for n in read_notes(path)] == [n.text for n in read_notes(plain)]


def test_category_filter(tmp_path: Path) -> None:
    path = _write(tmp_path / "n.csv", MIMIC)
    notes = read_notes(path, categories=["nursing", "Discharge summary "])
    assert [n.id for n in notes] == ["1", "2"]
    assert notes.counts == Counter({"notes": 2, EMPTY: 1, MISTAKEN: 1, OTHER: 1})
    _complains(path, "no note of category nursin: did you mean 'Nursing'", categories=["Nursin"])
    with pytest.raises(ConfigError, match="must be a list"):
        read_notes(path, categories="Nursing")


def test_headers_alone_are_no_notes(tmp_path: Path) -> None:
    notes = read_notes(_write(tmp_path / "n.csv", HEADER + "\r\n"))
    assert list(notes) == []
    assert notes.counts == Counter()


def test_a_note_longer_than_csv_allows(tmp_path: Path) -> None:
    """csv gives up at 131,072 characters unless told otherwise."""
    text = "Stable overnight. " * 20_000  # 360,000 characters
    path = _write(tmp_path / "n.csv", f'{HEADER}\n1,2,,,,,C,,,,"{text}"\n')
    assert [n.text for n in read_notes(path)] == [text]
    # The limit is the process's own: what others read is not cut shorter than before.
    assert csv.field_size_limit() >= 131_072


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (MIMIC[:-40], r"n.csv:7: the row has 7 columns, the header 11"),
        (MIMIC[: MIMIC.index("effusion")], r"n.csv:8: the file ends inside a quoted field"),
        (MIMIC.replace('"Pt stable."', '"Zyxwolan" b'), r"n.csv:5: the row is no csv"),
        (MIMIC.replace("CATEGORY", "KIND"), r"n.csv:1: there is no column 'category'"),
        (MIMIC.replace("SUBJECT_ID", "SUBJECTID"), r"did you mean 'subjectid'"),
        (MIMIC.split("\n", 1)[1].replace("Report", "Zyxwolan"), r"n.csv:1: there is no column"),
    ],
)
def test_what_is_wrong_with_a_table(tmp_path: Path, content: str, message: str) -> None:
    path = _write(tmp_path / "n.csv", content)
    if "columns, the header" in message:
        path.write_text(MIMIC[: MIMIC.index("5,103")] + '5,103,,2131-02-07,,,"Radiology"\n')
        message = message.replace(":7:", ":8:")
    _complains(path, message, format="mimic", categories=["Radiology", "Nursing"])


def test_bytes_that_are_not_utf8_are_named_by_line(tmp_path: Path) -> None:
    bad = MIMIC.encode().replace(b"Pt stable", b"Pt st\xe4ble")
    _complains(_write(tmp_path / "n.csv", bad), r"n.csv:5: a byte is not UTF-8.*iconv")
    _complains(_write(tmp_path / "n.txt", b"one\ntwo\nthr\xe9e"), r"n.txt:3: a byte is not UTF-8")
    bad = b'{"text": "a"}\n{"text": "\xe9"}\n'
    _complains(_write(tmp_path / "n.jsonl", bad), r"n.jsonl:2: a byte is not UTF-8")


def test_a_packed_file_that_is_broken_off(tmp_path: Path) -> None:
    data = gzip.compress(MIMIC.encode() * 3)
    _complains(
        _write(tmp_path / "n.csv.gz", data[: len(data) // 2]), "is the file whole", format="mimic"
    )


def test_omop(tmp_path: Path) -> None:
    """Commas or tabs; the first of title and type that says something is the category."""
    rows = [
        ["note_id", "person_id", "note_date", "note_type_concept_id", "note_title", "note_text"],
        ["7", "31", "2020-01-01", "44814645", "Discharge", "Went home.\nWell."],
        ["8", "32", "2020-01-02", "44814646", "", "Came in."],
    ]
    for delimiter in ",\t":
        buffer = io.StringIO()
        csv.writer(buffer, delimiter=delimiter).writerows(rows)
        path = _write(tmp_path / "NOTE.csv", buffer.getvalue())
        assert guess_notes(path) == "omop"
        assert [(n.id, n.patient, n.category, n.text) for n in read_notes(path)] == [
            ("7", "31", "Discharge", "Went home.\nWell."),
            ("8", "32", "44814646", "Came in."),
        ]


def test_other_tables_by_a_named_column(tmp_path: Path) -> None:
    path = _write(tmp_path / "x.csv", "key,remark,patient\n1,Well.,p1\n2,Ill.,p2\n")
    _complains(path, "x.csv:1: no column of this table is known to hold notes")
    notes = list(read_notes(path, column="Remark"))
    assert [(n.id, n.text, n.patient) for n in notes] == [
        ("x:2", "Well.", "p1"),
        ("x:3", "Ill.", "p2"),
    ]
    _complains(
        path,
        "no column 'remarks' for the text: did you mean 'remark'",
        column="remarks",
        format="csv",
    )


def test_jsonl(tmp_path: Path) -> None:
    lines = [
        json.dumps({"text": "a\r\nb", "id": 5, "patient": "p", "category": "Nursing "}),
        "",
        json.dumps({"note": "c"}),
        json.dumps({"text": " \n"}),
        json.dumps({"text": "d", "answer": "reject"}),
    ]
    path = _write(tmp_path / "n.jsonl", "\ufeff" + "\n".join(lines))
    notes = read_notes(path)
    assert list(notes) == [
        Note("5", "a\nb", "p", "Nursing", "n"),
        Note("n:3", "c", None, None, "n"),
    ]
    assert notes.counts == Counter({"notes": 2, EMPTY: 1, MISTAKEN: 1})
    for bad, message in [
        ('{"text": "Zyxwolan', "no JSON"),
        ("[1]", "no JSON object"),
        ('{"text": 1}', "missing or no string"),
        ('{"text": "\\ud800"}', "half of a surrogate pair"),
    ]:
        _complains(
            _write(tmp_path / "b.jsonl", f'{{"text": "a"}}\n{bad}\n'), f"b.jsonl:2: .*{message}"
        )


def test_folder_of_texts(tmp_path: Path) -> None:
    """Below as well; ids are paths; other files, and a table without text, are passed over."""
    for name, text in {
        "b.txt": "two",
        "a/1.txt": "\ufeffone\r\nline",
        "a/2.txt": "\n",
        ".hidden.txt": "no",
        "README.md": "no",
        "codes.tsv": "file\tcode\n",
        "a/1.ann": "T1",
    }.items():
        _write(tmp_path / "notes" / name, text)
    notes = read_notes(tmp_path / "notes")
    assert [(n.id, n.text, n.source) for n in notes] == [
        ("a/1", "one\nline", "notes"),
        ("b", "two", "notes"),
    ]
    assert notes.counts == Counter({"notes": 2, EMPTY: 1})
    with pytest.raises(ConfigError, match="no category"):
        read_notes(tmp_path / "notes", categories=["x"])
    (lone,) = read_notes(tmp_path / "notes/b.txt", source="ward")
    assert (lone.id, lone.text, lone.source) == ("b", "two", "ward")


def test_folders_that_cannot_be_told(tmp_path: Path) -> None:
    _complains(tmp_path / "none", "no such file or folder")
    _complains(tmp_path, "no file in this folder holds notes")
    _write(tmp_path / "LICENSE.txt", "Zyxwolan")
    _write(tmp_path / "a.csv", MIMIC)
    assert len(list(read_notes(tmp_path))) == 3
    _write(tmp_path / "b.jsonl", '{"text": "x"}\n')
    _complains(tmp_path, r"mixes formats: jsonl \(1 files\), mimic \(1 files\)")
    assert [n.text for n in read_notes(tmp_path, "jsonl")] == ["x"]
    with pytest.raises(ConfigError, match="unknown format 'mimik' of notes: did you mean 'mimic'"):
        read_notes(tmp_path, "mimik")


def test_a_note_that_looks_like_a_header_is_a_note(tmp_path: Path) -> None:
    path = _write(tmp_path / "n.txt", "Progress note, text\nwell, text\n")
    assert [n.text for n in read_notes(path)] == ["Progress note, text\nwell, text\n"]
    _complains(_write(tmp_path / "e.csv", ""), "e.csv:1: the table is empty")


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\r"), min_size=1, max_size=60),
        max_size=8,
    )
)
def test_csv_written_by_the_library_is_read_back(tmp_path: Path, texts: list[str]) -> None:
    """Python's csv.writer is the independent program; blank texts are what is left out."""
    with (tmp_path / "h.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerow(["note_id", "person_id", "note_text"])
        writer.writerows([str(i), "p", text] for i, text in enumerate(texts))
    found = [(n.id, n.text) for n in read_notes(tmp_path / "h.csv")]
    assert found == [(str(i), text) for i, text in enumerate(texts) if text.strip()]


def test_a_large_file_needs_little_memory(tmp_path: Path) -> None:
    """24 MB of notes are read with less than 3 MB held (one note and the file's buffer)."""
    row = '{i},{i},,,,,C,,,,"' + "Stable overnight.\n" * 1000 + '"\n'
    with (tmp_path / "n.csv").open("w") as file:
        file.write(HEADER + "\n")
        for i in range(1300):
            file.write(row.replace("{i}", str(i)))
    assert (tmp_path / "n.csv").stat().st_size > 23e6
    tracemalloc.start()
    count = sum(1 for _ in read_notes(tmp_path / "n.csv"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 1300
    assert peak < 3e6


@pytest.mark.corpora
def test_real_corpora(corpora: Path) -> None:
    """Numbers of notes as the corpora's own page gives them; csv.DictReader reads the same."""
    cases = read_notes(corpora / "codiesp/background")
    assert sum(1 for _ in cases) == 3001
    mts = list(read_notes(corpora / "mts_dialog"))
    assert len(mts) == 1701
    assert len({n.id for n in mts}) == 1701
    aci = list(read_notes(corpora / "aci_bench"))
    assert len(aci) == 207
    assert {n.source for n in aci} == {"aci_bench"}
    with (corpora / "aci_bench/train.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    train = read_notes(corpora / "aci_bench/train.csv")
    assert [n.text for n in train] == [r["note"].replace("\r\n", "\n") for r in rows]
    talk = read_notes(corpora / "aci_bench/train.csv", column="dialogue")
    assert next(talk).text == rows[0]["dialogue"].replace("\r\n", "\n")
    demo = read_notes(corpora / "mimic_iii_demo/NOTEEVENTS.csv")
    assert (list(demo), demo.counts) == ([], Counter())
    assert guess_notes(corpora / "mimic_iii_demo/NOTEEVENTS.csv") == "mimic"
    assert list(read_notes(corpora / "mimic_iii_demo")) == []
