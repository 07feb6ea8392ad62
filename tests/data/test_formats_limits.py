"""Where a reader must not give in: empty notes, odd ids, and annotations of the wrong shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fednotes.core.errors import DataError
from fednotes.core.types import Document, SiteData, Span, TagSet
from fednotes.data.checks import check_documents, check_sites
from fednotes.data.formats import brat, read


def _complains(path: Path, message: str, secret: str = "Zyxwolan") -> None:
    with pytest.raises(DataError, match=message) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert secret not in str(caught.value)


# brat


@pytest.mark.parametrize("blank", ["", " \n\t\n"])
def test_brat_keeps_empty_notes(tmp_path: Path, blank: str) -> None:
    """One empty note among others, or alone: what was written is what is read."""
    documents = (Document("a", blank), Document("b", "has rash", (Span(4, 8, "ADE"),)))
    for name, some in (("both", documents), ("alone", documents[:1])):
        brat.write(some, tmp_path / name)
        assert [(d.id, d.text, d.spans) for d in read(tmp_path / name)] == [
            (d.id, d.text, d.spans) for d in some
        ]
    (lone,) = read(tmp_path / "both/a.txt")
    assert (lone.id, lone.text) == ("a", blank)
    report = check_documents(read(tmp_path / "both"))
    assert [dict(f.counts) for f in report.findings if f.code == "blank_documents"] == [
        {"documents": 1}
    ]


def test_brat_byte_order_mark_alone_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf")
    (tmp_path / "a.ann").write_text("")
    assert read(tmp_path) == (Document("a", ""),)


def test_brat_empty_note_holds_no_mention(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "a.ann").write_text("T1\tADE 0 4\tZyxwolan\n")
    _complains(tmp_path, r"a.ann:1: T1 at 0:4 lies outside the text \(0 characters\)")


def test_brat_folder_without_a_pair(tmp_path: Path) -> None:
    """An empty text alone is no corpus, and an annotation file needs its text."""
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="no file in this folder looks like brat"):
        read(tmp_path, "brat")
    (tmp_path / "b.ann").write_text("")
    with pytest.raises(DataError, match=r"b.txt: no such file"):
        read(tmp_path, "brat")


ID = st.text(st.sampled_from(list('ab/.:%*?"<>|\\\n\x7f~ é2356AECF')), max_size=10)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=ID)
@example(name="odd:1")
@example(name="odd%3A1")
@example(name="%")
@example(name="..")
@example(name="/a//.b/")
@example(name="100%/%253A%2")
def test_brat_keeps_ids(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever characters, hidden or relative names; in one file below the folder."""
    folder = tmp_path_factory.mktemp("b") / "in"
    brat.write([Document(name, "x")], folder)
    assert [p.name for p in folder.parent.iterdir()] == ["in"]
    assert [d.id for d in read(folder)] == [name]


def test_brat_ids_of_other_tools(tmp_path: Path) -> None:
    """A name that only looks escaped is left; names that mean one id are told apart."""
    for name in ("50%41", "a%3A1", "a:1", "100%"):
        (tmp_path / f"{name}.txt").write_text("x")
        (tmp_path / f"{name}.ann").write_text("")
    documents = read(tmp_path)
    assert [d.id for d in documents] == ["100%", "50%41", "a:1", "a:1~2"]
    brat.write(documents[:2], tmp_path / "out")
    assert {p.stem for p in (tmp_path / "out").iterdir()} == {"100%", "50%41"}


# JSONL


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"spans": {"a": 1}}, 'the key "spans" is no list of spans'),
        ({"spans": {}}, 'the key "spans" is no list'),
        ({"entities": "Zyxwolan"}, 'the key "entities" is no list'),
        ({"labels": 3}, 'the key "labels" is no list'),
        ({"label": "Zyxwolan"}, 'the key "label" is no list'),
        ({"label": False}, 'the key "label" is no list'),
        ({"spans": None, "label": "Zyxwolan"}, 'the key "label" is no list'),
        ({"spans": [], "entities": {"a": 1}}, 'the key "entities" is no list'),
        ({"spans": ["Zyxwolan"]}, "no start and end"),
        ({"spans": [None]}, "no start and end"),
        ({"label": ["Zyxwolan"]}, "no start and end"),
        ({"spans": [{"start": "0", "end": 2, "label": "X"}]}, "no start and end"),
        ({"spans": [{"start": 0.0, "end": 2, "label": "X"}]}, "no start and end"),
        ({"label": [[False, True, "X"]]}, "no start and end"),
        ({"label": [[0, 99, "X"]]}, "0:99 is no stretch"),
        ({"label": [[-1, 2, "X"]]}, "-1:2 is no stretch"),
        ({"label": [[2, 2, "X"]]}, "2:2 is no stretch"),
        ({"spans": [], "entities": [[0, 99, "X"]]}, "0:99 is no stretch"),
    ],
)
def test_jsonl_wrong_spans(tmp_path: Path, more: dict[str, object], message: str) -> None:
    """An annotation that cannot be read is never a record without annotations."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ok"}\n' + json.dumps({"text": "Zyxwolan", **more}) + "\n")
    _complains(path, f"a.jsonl:2: .*{message}")


@pytest.mark.parametrize(
    ("more", "spans"),
    [
        ({"label": None}, 0),
        ({"label": []}, 0),
        ({"spans": None, "entities": None, "labels": None}, 0),
        ({"spans": None, "label": [[0, 2, "X"]]}, 1),
        ({"spans": [], "entities": [[0, 2, "X"]]}, 1),
        ({"label": [], "labels": [[0, 2, "X"]]}, 1),
        ({"spans": [], "label": "positive"}, 0),
        ({"spans": [{"start": 0, "end": 2, "label": "X"}], "label": ["positive"]}, 1),
    ],
)
def test_jsonl_keys_that_are_fine(tmp_path: Path, more: dict[str, object], spans: int) -> None:
    """Nothing annotated, or a document's class beside its spans (kept in meta)."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "abc", **more}))
    (document,) = read(path)
    assert document.spans == (Span(0, 2, "X"),) * spans
    if more.get("label") in ("positive", ["positive"]):
        assert document.meta["label"] in ("positive", ("positive",))


# PubTator

ARTICLE = "1|t|Zyxwolan toxicity of rs12.\n1|a|A case.\n1\t0\t8\tZyxwolan\tChemical\tD1\n"


@pytest.mark.parametrize(
    "line",
    [
        "1\tx\t8\tZyxwolan\tChemical\tD1",
        "1\tx\ty\tZyxwolan\tChemical\tD1",
        "1\tx\ty\tZyxwolan\tChemical",
        "1\tx\t8\tZyxwolan",
        "1\t0\tx\tZyxwolan\tChemical\tD1",
        "1\t-1\t8\tZyxwolan\tChemical\tD1",
        "1\t0.0\t8\tZyxwolan\tChemical",
        "1\t\t8\tZyxwolan\tChemical\tD1",
        "1\t²\t8\tZyxwolan\tChemical\tD1",
        "1\tO\t8\tZyxwolan\tChemical\tD1\tx|y",
    ],
)
def test_pubtator_offsets_that_are_no_numbers(tmp_path: Path, line: str) -> None:
    """A mention that cannot be placed is no relation."""
    (tmp_path / "a.txt").write_text(ARTICLE + line + "\n")
    _complains(tmp_path / "a.txt", r"a.txt:4: \d columns, expected PMID, start, end \(numbers\)")


@pytest.mark.parametrize(
    "line",
    [
        "1\tCID\tD1\tD2",
        "1\tAssociation\t3175\tD1\tNovel",  # BioRED: a gene's number, and novelty
        "1\tPositive_Correlation\t3175\trs12\tNo",
        "1\tCID\t8\tD2",
    ],
)
def test_pubtator_relations(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.txt").write_text(ARTICLE + line + "\n")
    (document,) = read(tmp_path / "a.txt")
    assert document.meta["relations"] == (tuple(line.split("\t")[1:]),)
    assert document.spans == (Span(0, 8, "Chemical"),)


# What the checks say of held-out parts without mentions


@pytest.mark.parametrize("bare", ["valid", "test", None])
def test_held_out_parts_without_mentions(bare: str | None) -> None:
    """A warning for that part only; a part without documents is `empty_part`."""
    parts = {
        part: (Document(part, f"{part} Zyxwolan", () if part == bare else (Span(0, 4, "X"),)),)
        for part in ("train", "valid", "test")
    }
    report = check_sites([SiteData("s", TagSet(("X",)), **parts)])
    for part in ("valid", "test"):
        found = [(f.level, f.where) for f in report.findings if f.code == f"no_{part}_mentions"]
        assert found == ([("warning", f"s/{part}")] if part == bare else [])
    assert not any("Zyxwolan" in str(f) for f in report.findings)
    without = check_sites([SiteData("s", TagSet(("X",)), parts["train"], (), ())])
    codes = [finding.code for finding in without.findings]
    assert codes.count("empty_part") == 2
    assert not {"no_valid_mentions", "no_test_mentions"} & set(codes)
