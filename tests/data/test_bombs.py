"""Small files that unpack to huge sizes, and sizes that no note has.

Each reader must end soon, in bounded memory, with a line that says where, what was
expected and what to do. The bounds are set low here, so that the files are small.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from time_limits import processor_time_below

from fednotes.core import bounds
from fednotes.core.errors import DataError
from fednotes.core.types import Document, Span
from fednotes.data import clinical
from fednotes.data.formats import Problems, examine, read, stream, write
from fednotes.data.formats.published import ade
from fednotes.data.notes import read_notes
from fednotes.jobs.checking import check_files

PACKING = {
    ".gz": gzip.compress,
    ".zst": lambda data: pyarrow.compress(data, "zstd", asbytes=True),
}


def refused(path: Path, message: str, format: str | None = None) -> None:
    """Check that both ways to read a corpus refuse the file in one short line."""
    with pytest.raises(DataError, match=message) as caught:
        read(path, format)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)
    problems = Problems()
    list(stream(path, problems, format))
    assert any(message.replace("\\", "") in str(actual) for actual in problems.listed)


@pytest.mark.slow
@pytest.mark.parametrize("packed", PACKING)
@pytest.mark.parametrize("name", ["a.conll", "a.jsonl"])
def test_a_compressed_file_that_grows_too_much_is_refused_while_it_is_unpacked(
    tmp_path: Path, packed: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty lines make no long line; only how much they grow tells of the bomb."""
    first = b"rash\tB-ADE\n" if name == "a.conll" else b'{"text": "rash"}\n'
    path = tmp_path / f"{name}{packed}"
    path.write_bytes(PACKING[packed](first + b"\n" * 1_200_000))
    format = name.rpartition(".")[2]
    assert len(read(path, format)) == 1
    monkeypatch.setattr(bounds, "PACKED_FREE", 300_000)
    refused(
        path, "it grows more than 100-fold when unpacked, which no text does", format
    )


@pytest.mark.parametrize("packed", PACKING)
def test_compressed_tables_and_parquet_are_unpacked_within_bounds(
    tmp_path: Path, packed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "PACKED_FREE", 200_000)
    path = tmp_path / f"a.csv{packed}"
    path.write_bytes(PACKING[packed](b"id,text\n" + b"1,rash\n" * 120_000))
    with pytest.raises(DataError, match="it grows more than 100-fold when unpacked"):
        list(read_notes(path))
    path = tmp_path / f"a.parquet{packed}"
    path.write_bytes(PACKING[packed](b"PAR1" + bytes(4_000_000)))
    with pytest.raises(DataError, match="it grows more than 100-fold when unpacked"):
        read(path, "parquet")


def test_text_that_compresses_well_is_not_refused(tmp_path: Path) -> None:
    """Numbered sentences pack to a fifteenth of their size."""
    lines = (
        json.dumps({"text": f"Note {n}: no rash, no fever."}) for n in range(20_000)
    )
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    assert len(read(path)) == 20_000


def test_an_endless_line_of_conll_is_refused_with_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "TOKEN_LINE", 1000)
    path = tmp_path / "a.conll"
    for long in (b"a" * 5000, b"a" + b"\tx" * 5000, b"# " + b"a" * 5000):
        path.write_bytes(b"rash\tB-ADE\n" + long + b"\tO\n")
        message = "a.conll:2: the line has more than 1,000 characters: expected one token per line"
        refused(path, message)


def test_sentences_documents_and_types_of_conll_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "TOKENS", 100)
    monkeypatch.setattr(bounds, "ENTITY_TYPES", 100)
    path = tmp_path / "a.conll"
    path.write_text("rash\tO\n" * 100)
    assert len(read(path)[0].tokens) == 100
    path.write_text("rash\tO\n" * 101)
    refused(path, "a.conll:101: a sentence of more than 100 tokens")
    path.write_text("# newdoc id = a\n" + "rash\tO\n\n" * 101)
    refused(
        path, "a.conll:202: a document of more than 100 tokens: split it into notes"
    )
    path.write_text("".join(f"rash\tB-T{number}\n\n" for number in range(101)))
    refused(
        path,
        "a.conll:201: more than 100 entity types: check that the last column has the tags",
    )


def test_documents_that_are_too_large_are_left_out_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "NOTE", 1000)
    monkeypatch.setattr(bounds, "MENTIONS", 10)
    monkeypatch.setattr(bounds, "ENTITY_TYPES", 30)
    path = tmp_path / "a.jsonl"
    good = json.dumps({"text": "rash", "spans": [[0, 4, "ADE"]]})
    long = json.dumps({"text": "rash " * 300})
    many = json.dumps({"text": "rash", "spans": [[0, 4, "ADE"]] * 11})
    path.write_text("\n".join((good, long, many)))
    documents, problems = examine(path)
    assert len(documents) == 1
    assert [(actual.line, actual.message) for actual in problems.listed] == [
        (2, "the document has more than 1,000 characters: split it into notes"),
        (3, "the document has more than 10 mentions: check that it is one note"),
    ]
    with pytest.raises(
        DataError, match=":2: the note has more than 1,000 characters: split it"
    ):
        list(read_notes(path))
    lines = (
        json.dumps({"text": "rash", "spans": [[0, 4, f"T{n}"]]}) for n in range(31)
    )
    path.write_text("\n".join(lines))
    refused(
        path,
        "a.jsonl:31: more than 30 entity types: check that this column or field holds types, not text",
    )


def test_annotations_of_brat_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "MENTIONS", 10)
    monkeypatch.setattr(bounds, "PIECES", 10)
    (tmp_path / "a.txt").write_text("rash " * 20)
    annotations = tmp_path / "a.ann"
    annotations.write_text("".join(f"T{n}\tADE 0 4\trash\n" for n in range(11)))
    refused(
        tmp_path,
        "a.ann:11: more than 10 mentions in one text: check that it is one note",
    )
    pieces = ";".join(f"{n} {n + 1}" for n in range(11))
    annotations.write_text(f"T1\tADE {pieces}\trash\n")
    refused(
        tmp_path, "a.ann:1: T1 has more than 10 pieces: check that it is one mention"
    )
    annotations.write_text("T1\tADE 0 999999999\trash\n")
    refused(tmp_path, "a.ann:1: T1 at 0:999999999 lies outside the text")
    annotations.write_text("T1\tADE -1 4\trash\n")
    refused(tmp_path, "a.ann:1: incomplete brat annotation")
    monkeypatch.setattr(bounds, "FILE", 50)
    refused(tmp_path, "a.txt: it has more than 50 bytes: split it into several files")


@pytest.mark.slow
def test_long_mentions_are_compared_without_copying_them(tmp_path: Path) -> None:
    """50,000 mentions of 2 MB each would be 100 GB of text."""
    (tmp_path / "a.txt").write_text("rash " * 400_000)
    lines = (f"T{n}\tADE 0 2000000\trash\n" for n in range(50_000))
    (tmp_path / "a.ann").write_text("".join(lines))
    refused(
        tmp_path,
        "50000 of 50000 mentions do not match the text: check that the text belongs",
    )


def test_markup_and_text_of_bioc_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "MARKUP", 100_000)
    path = tmp_path / "a.xml"
    long = "a" * 400_000
    attributes = " ".join(f'a{n}=""' for n in range(50_000))
    for markup in (
        f'<infon key="{long}">',
        f"<{long}>",
        f"<!--{long}-->",
        f"<infon {attributes}>",
    ):
        path.write_text(f"<collection>\n<document>{markup}")
        refused(
            path,
            "a tag or a comment has more than 100,000 bytes: check that the file is BioC",
        )
    text = f"<id>1</id><passage><offset>0</offset><text>{long}</text></passage>"
    path.write_text(f"<collection><document>{text}</document></collection>")
    assert len(read(path)[0].text) == 400_000
    monkeypatch.setattr(bounds, "FILE", 300_000)
    refused(
        path, "a document has more than 300,000 characters: check that the file is BioC"
    )


@pytest.mark.parametrize("kind", ["dictionary", "arrow"])
def test_rows_of_parquet_that_share_a_value_are_each_counted(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of some KB whose rows have 300 MB together."""
    text = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 3000, pyarrow.int32()), pyarrow.array(["a" * 100_000])
    )
    span = pyarrow.struct([("start", pyarrow.int64()), ("end", pyarrow.int64())])
    table = pyarrow.table(
        {"text": text, "spans": pyarrow.array([[]] * 3000, pyarrow.list_(span))}
    )
    path = tmp_path / "a.parquet"
    if kind == "arrow":
        with pyarrow.ipc.new_file(str(path), table.schema) as sink:
            sink.write_table(table)
    else:
        pyarrow.parquet.write_table(table, path, compression="zstd")
    assert path.stat().st_size < 300_000
    monkeypatch.setattr(bounds, "PACKED_FREE", 1_000_000)
    with pytest.raises(DataError, match="its rows have more than"):
        read(path)
    with pytest.raises(DataError, match="its rows have more than"):
        list(read_notes(path))


def test_lists_of_shared_values_are_refused(tmp_path: Path) -> None:
    """One row of them may be larger than any memory."""
    shared = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 10_000, pyarrow.int32()), pyarrow.array(["a" * 100_000])
    )
    tokens = pyarrow.ListArray.from_arrays([0, 10_000], shared)
    table = pyarrow.table({"text": ["rash"], "tokens": tokens, "spans": [[]]})
    with pyarrow.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as sink:
        sink.write_table(table)
    with pytest.raises(
        DataError, match="a column contains lists of dictionary-encoded values"
    ):
        read(tmp_path / "a.arrow")


@pytest.mark.parametrize(
    ("name", "begin", "format"),
    [
        ("a.json", '[{"data": {"text": "', "label-studio"),
        ("a.json", '{"documents": [{"text": "', "bioc"),
        ("a.json", '{"resourceType": "DocumentReference", "x":\n "', "fhir"),
        ("a.xml", "<TEXT>", "i2b2-2012"),
        ("a.json", '{"projects": [{"x": "', "medcattrainer"),
    ],
)
def test_files_that_are_read_at_once_are_bounded(
    tmp_path: Path, name: str, begin: str, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "FILE", 1000)
    path = tmp_path / name
    path.write_text(begin + "a" * 5000)
    refused(path, "it has more than 1,000 bytes: split it into several files", format)


def test_fields_and_rows_of_omop_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "LINE", 1000)
    path = tmp_path / "note.csv"
    head = "note_id,person_id,note_text\n1,1,rash\n"
    path.write_text(f"{head}2,1,{'a' * 5000}\n")
    refused(
        path,
        "note.csv:3: the line has more than 1,000 characters: expected a row",
        "omop",
    )
    path.write_text(head + '2,1,"' + "a\n" * 5000)
    refused(
        path,
        "note.csv:3: the row has more than 1,000 characters: check whether a closing quote",
        "omop",
    )


def test_a_docbin_over_the_size_bound_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "DOCBIN_BYTES", 1000)
    path = tmp_path / "a.spacy"
    path.write_bytes(zlib.compress(b"") + bytes(2000))
    refused(path, "it has more than 1,000 bytes: split it into several files")


def test_lines_of_fhir_may_be_long_and_are_read_one_by_one(tmp_path: Path) -> None:
    """The first line of a file tells whether it is of JSON lines, however long it is."""
    data = "YWFh" * 50_000
    attachment = {"contentType": "text/plain", "data": data}
    resource = {
        "resourceType": "DocumentReference",
        "content": [{"attachment": attachment}],
    }
    path = tmp_path / "a.ndjson"
    path.write_text(f"{json.dumps(resource)}\n{json.dumps(resource)}\n")
    assert [len(document.text) for document in read(path, "fhir")] == [150_000] * 2


@pytest.mark.parametrize("name", ["a.conll", "note.csv", "brat"])
def test_a_check_counts_the_documents_and_mentions_of_a_corpus(
    tmp_path: Path, name: str
) -> None:
    """Read a document at a time, a corpus has as many documents and mentions as read
    whole."""
    path = tmp_path / name
    if name == "a.conll":
        path.write_text(
            "# newdoc id = a\nrash\tB-ADE\n\nno\tO\nrash\tB-ADE\n\n# newdoc id = b\nx\tO\n"
        )
    elif name == "note.csv":
        path.write_text('note_id,person_id,note_text\n1,1,rash\n2,1,"no\nrash"\n')
    else:
        path.mkdir()
        for stem in "ab":
            (path / f"{stem}.txt").write_text("rash")
            (path / f"{stem}.ann").write_text("T1\tADE 0 4\trash\n")
    problems = Problems()
    assert tuple(stream(path, problems)) == read(path)
    assert not problems.listed
    assert not check_files([path]).problems


@pytest.mark.parametrize(
    ("format", "name"),
    [
        ("brat", "out"),
        ("bioc", "a.xml"),
        ("label-studio", "a.json"),
        ("bigbio", "b.json"),
        ("medcattrainer", "a.json"),
        ("webanno-tsv", "out"),
    ],
)
def test_mentions_that_repeat_a_text_are_not_written(
    tmp_path: Path, format: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text of each mention is written; a megabyte could become a terabyte."""
    monkeypatch.setattr(bounds, "PACKED_FREE", 1000)

    def document(number: int) -> Document:
        return Document("a", "rash", (Span(0, 4, "ADE"),) * number)

    limit = 1000 // 4
    assert not write([document(limit)], tmp_path / name, format, allow_loss=True)
    with pytest.raises(DataError, match="more than 1,000 characters in all, and this"):
        write([document(limit + 1)], tmp_path / f"2{name}", format)
    assert not (tmp_path / f"2{name}").exists()


def test_a_long_line_with_bars_is_recognised_in_linear_time() -> None:
    """One pattern for the whole line needed 40 s for 60,000 characters."""
    line = "1|" + "a " * 1_000_000 + "|"
    with processor_time_below(5):
        assert ade._split_relation(line) is None
        assert ade._split_relation(line + "rash|0|4|aspirin|5|12") is not None


def test_offsets_of_label_studio_are_converted_in_linear_time(
    tmp_path: Path,
) -> None:
    """Counting UTF-16 units anew for each region needed a minute here."""
    text = "\U0001f4a9" * 400_000 + " rash"
    regions = [
        {"value": {"start": 800_001, "end": 800_005, "text": "rash", "labels": ["ADE"]}}
    ] * 20_000
    task = {"data": {"text": text}, "annotations": [{"result": regions}]}
    path = tmp_path / "a.json"
    path.write_text(json.dumps([task]))
    with processor_time_below(10):
        (document,) = read(path, "label-studio")
    assert set(document.spans) == {Span(400_001, 400_005, "ADE")}
    assert len(document.spans) == 20_000


def _pubtator(text: str, number: int) -> str:
    mention = f"1\t0\t{len(text)}\tx\tADE\n"
    return f"1|t|{text}\n1|a|\n{mention * number}\n"


def _i2b2(text: str, number: int) -> str:
    mention = f'c="x" 1:0 1:{text.count(" ")}||t="problem"\n'
    return mention * number


def _i2b2_2012(text: str, number: int) -> str:
    mention = f'<EVENT id="E1" start="0" end="{len(text)}" text="x" type="A" />\n'
    return f"<x><TEXT><![CDATA[{text}]]></TEXT>\n<TAGS>\n{mention * number}</TAGS></x>"


@pytest.mark.parametrize(
    ("format", "name", "write"),
    [
        ("pubtator", "a.txt", _pubtator),
        ("i2b2", "a.con", _i2b2),
        ("i2b2-2012", "a.xml", _i2b2_2012),
    ],
)
def test_mentions_that_span_the_text_are_compared_in_linear_time(
    tmp_path: Path, format: str, name: str, write: Callable[[str, int], str]
) -> None:
    """Each mention claims the whole text; comparing all of it needed a minute."""
    text = "a " * 500_000 + "b"
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / name).write_text(write(text, 5_000))
    with (
        processor_time_below(15),
        pytest.raises(
            DataError, match=r"not match the text|differs from the document at"
        ),
    ):
        read(tmp_path / name, format)


def test_rows_of_the_ade_corpus_are_read_in_linear_time(
    tmp_path: Path,
) -> None:
    """All pairs of two texts that occur everywhere, and a long text at each place, took
    minutes."""
    sentence = "a " * 100_000
    row = f"1|{sentence}|a|0|1|a|4|5\n"
    long = f"1|{sentence}|{'a ' * 50_000 + 'b'}|0|1|a|4|5\n"
    path = tmp_path / "DRUG-AE.rel"
    path.write_text(row * 30 + long)
    with processor_time_below(10):
        (document,) = read(path, "ade")
    ((_, start, _, drug_start, _),) = document.meta["relations"]
    assert drug_start - start == 4
    assert document.meta["unplaced"] == 1


def _many_texts(path: Path) -> None:
    path.write_text("<x><TEXT>" + "<TEXT>" * 300_000)
    with pytest.raises(DataError, match="there is no TEXT element"):
        read(path, "i2b2-2012")


def _many_types(path: Path) -> None:
    start = '<EVENT id="E1" start="0" end="1" text="'
    types = '" type="' * 50_000
    path.write_text(f"<x><TEXT>a</TEXT><TAGS>\n{start}{types}\n")
    with pytest.raises(DataError, match="expected id, start, end, text and type"):
        read(path, "i2b2-2012")


def _long_passage(path: Path) -> None:
    text = "a" * 10_000_000
    lines = "1\tBind\t99999999\tx\tNovel\n" * 30_000
    path.write_text(f"1|t|{text}\n1|a|\n{lines}\n")
    (document,) = read(path, "pubtator")
    assert len(document.meta["relations"]) == 30_000


def _chain_of_relations(path: Path) -> None:
    relations = [f"R{n}\tof Arg1:{'R' if n else 'T'}{n - 1}" for n in range(5_000)]
    relations = [line.replace("T-1", "T1") + " " for line in relations]
    lines = ("T1\tADE 0 4\trash", *reversed(relations), "R9999\tof Arg1:T2 ")
    document = Document("a", "rash", meta={"brat": lines})
    write([document], path.parent / "out", "brat", allow_loss=True)
    last_line = (path.parent / "out/a.ann").read_text()
    assert last_line == "R9999\tof Arg1:T2 \n"


def _line_of_blanks(path: Path) -> None:
    del path
    assert clinical.list_note_sentences(f"a{' ' * 300_000}b") == ["a b"]


@pytest.mark.parametrize(
    "read_it",
    [_many_texts, _many_types, _long_passage, _chain_of_relations, _line_of_blanks],
)
def test_repeated_parts_are_read_in_linear_time(
    tmp_path: Path, read_it: Callable[[Path], None]
) -> None:
    """Each took a minute or more."""
    with processor_time_below(10):
        read_it(tmp_path / "a.xml")
