"""Encodings of files: byte-order marks, named encodings, files that are not text."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path

import pytest

from fednotes.core.errors import ConfigError, DataError
from fednotes.data import encodings
from fednotes.data.formats import examine, read
from fednotes.data.notes import read_notes
from fednotes.jobs.inputs import open_inputs
from fednotes.jobs.job_file import parse_job

TEXT = "Frau Müller nimmt Aspirin – täglich 😀.\n"
ASPIRIN = (18, 25)
MARKED = {
    "utf-8": b"\xef\xbb\xbf",
    "utf-16-le": b"\xff\xfe",
    "utf-16-be": b"\xfe\xff",
    "utf-32-le": b"\xff\xfe\x00\x00",
    "utf-32-be": b"\x00\x00\xfe\xff",
}
LATIN = "Café, naïve patient: 5 µg.\n"


def brat(folder: Path, text: bytes, name: str = "a") -> Path:
    """Write a note and one annotation of its "Aspirin"."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.txt").write_bytes(text)
    start, end = ASPIRIN
    (folder / f"{name}.ann").write_text(f"T1\tDrug {start} {end}\tAspirin\n")
    return folder


@pytest.mark.parametrize("encoding", MARKED)
def test_a_byte_order_mark_sets_the_encoding_and_offsets_stay_right(
    tmp_path: Path, encoding: str
) -> None:
    data = MARKED[encoding] + TEXT.encode(encoding)
    (document,) = read(brat(tmp_path / "brat", data))
    assert document.text == TEXT
    (span,) = document.spans
    assert document.text[span.start : span.end] == "Aspirin"

    record = {"text": TEXT, "spans": [{"start": 18, "end": 25, "label": "Drug"}]}
    lines = tmp_path / "a.jsonl"
    line = json.dumps(record, ensure_ascii=False) + "\n"
    lines.write_bytes(MARKED[encoding] + line.encode(encoding))
    assert read(lines)[0].text == TEXT

    table = tmp_path / "a.csv"
    table.write_bytes(MARKED[encoding] + f'id,text\r\n7,"{TEXT}"\r\n'.encode(encoding))
    assert [(note.id, note.text) for note in read_notes(table)] == [("a:7", TEXT)]


@pytest.mark.parametrize(
    "encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"]
)
def test_utf_16_without_a_mark_is_refused_unless_its_encoding_is_named(
    tmp_path: Path, encoding: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        (json.dumps({"text": TEXT}, ensure_ascii=False) + "\n").encode(encoding)
    )
    for reader in (lambda: read(path), lambda: list(read_notes(path))):
        with pytest.raises(DataError, match=f'set `encoding = "{encoding}"`') as caught:
            reader()
        assert "Frau" not in str(caught.value)
    assert read(path, encoding=encoding)[0].text == TEXT
    assert [note.text for note in read_notes(path, encoding=encoding)] == [TEXT]


@pytest.mark.parametrize("name", ["utf-16", "UTF32"])
def test_an_encoding_without_a_byte_order_is_that_of_most_machines(
    tmp_path: Path, name: str
) -> None:
    """Tables of notes ended with a traceback, and other files were read."""
    path = tmp_path / "a.csv"
    table = f'id,text\n1,"{TEXT}"\n'
    path.write_bytes(table.encode(encodings.resolve_encoding(name)))
    tables = (open_inputs(str(path), encoding=name), read_notes(path, encoding=name))
    for notes in tables:
        assert [note.text for note in notes] == [TEXT]
    path.write_text(table, "utf-8")
    with pytest.raises(DataError, match=r"a\.csv:1: "):
        list(open_inputs(str(path), encoding=name))


def test_a_named_encoding_applies_to_the_files_that_are_not_utf8(
    tmp_path: Path,
) -> None:
    """A folder may mix both: 0xe9 alone is not UTF-8, and two bytes of UTF-8 are not
    cp1252."""
    for name, encoding in (("a", "utf-8"), ("b", "cp1252"), ("c", "utf-16")):
        (tmp_path / f"{name}.txt").write_bytes(LATIN.encode(encoding))
    notes = list(read_notes(tmp_path, encoding="cp1252"))
    assert [note.text for note in notes] == [LATIN] * 3
    with pytest.raises(
        DataError,
        match=r"b\.txt:1: byte [0-9]+ is not UTF-8: give the encoding.*cp1252",
    ):
        list(read_notes(tmp_path))


def test_an_error_names_the_line_and_byte_that_cannot_be_decoded(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": "fine"}).encode(), b'{"text": "caf\xe9 \x81"}']
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(
        DataError, match=r"a\.jsonl:2: byte 30 is not UTF-8: give the encoding"
    ):
        read(path)
    with pytest.raises(
        DataError,
        match=r"a\.jsonl:2: byte 32 is not cp1252: check whether the file has an",
    ):
        read(path, encoding="cp1252")
    with pytest.raises(DataError, match=r"a\.jsonl:2: byte 32 is not cp1252"):
        list(read_notes(path, encoding="cp1252"))


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"%PDF-1.7\n", "a PDF document, not text: export its text"),
        (b"{\\rtf1\\ansi", "Rich Text Format, not text: save it as plain text"),
        (
            b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",
            r"Microsoft Office document \(.doc, .xls\)",
        ),
        (
            b"\x1f\x8b\x08\x00",
            "compressed by gzip, not text: give it a name that ends in .gz",
        ),
        (
            b"\x28\xb5\x2f\xfd",
            "compressed by Zstandard, not text: give it a name that ends in .zst",
        ),
        (b"SQLite format 3\x00", "an SQLite database, not text: export its table"),
        (b"\x89PNG\r\n", "an image, not text"),
        (b"GIF89a\x00\x00", "an image, not text"),
        (b"\x00" * 128 + b"DICM", "a DICOM image, not text"),
        (b"\x07\x00\xff\x80", "binary data, not text"),
    ],
)
def test_a_file_that_is_not_text_is_refused_by_its_kind(
    tmp_path: Path, start: bytes, message: str
) -> None:
    """Also where an encoding is named in which every byte is a character."""
    path = tmp_path / "note.txt"
    path.write_bytes(start + b"\x00\x9d\xff" * 40)
    with pytest.raises(DataError, match=message):
        list(read_notes(path))
    with pytest.raises(DataError, match=message):
        read(path, "jsonl")
    if "binary data" not in message:
        with pytest.raises(DataError, match=message):
            read(path, "jsonl", encoding="latin-1")


def test_a_zip_archive_in_place_of_a_text_is_refused_by_its_kind(
    tmp_path: Path,
) -> None:
    path = tmp_path / "note.txt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "text")
    with pytest.raises(
        DataError, match=r"a ZIP archive.*\(.docx, .xlsx\), not text: unpack it"
    ):
        read(path)


def test_text_that_begins_like_a_binary_file_is_read_as_text(tmp_path: Path) -> None:
    """Neither the gene PAR1 nor GIF8 is a file format."""
    path = tmp_path / "a.conll"
    path.write_text("PAR1\tB-Gene\nis\tO\n\nGIF89\tO\n")
    assert [document.text for document in read(path)] == ["PAR1 is", "GIF89"]


@pytest.mark.parametrize(
    "name", ["utf8x", "rot13", "unicode_escape", "idna", "utf-7", "", "a\0"]
)
def test_an_unknown_encoding_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"encoding = .*: no such encoding: expected one such"
    ):
        examine(tmp_path, encoding=name)


def test_aliases_of_an_encoding_are_equal() -> None:
    assert {
        encodings.resolve_encoding(name) for name in ("latin1", "latin-1", "L1")
    } == {"iso8859-1"}
    assert encodings.contains_ascii("cp1252")
    assert not encodings.contains_ascii("utf-16-le")
    assert not encodings.contains_ascii("iso2022_jp")


def test_a_job_names_the_encoding_of_its_sites(tmp_path: Path) -> None:
    site = {"path": str(tmp_path / "a.jsonl"), "encoding": "cp1252"}
    job = parse_job(
        {"method": "fedner", "sites": {"a": site}}, "job", tmp_path, "job.toml"
    )
    assert job.sites["a"].encoding == "cp1252"
    with pytest.raises(
        ConfigError, match=r"sites.a.*encoding = 'cp125': no such encoding"
    ):
        parse_job(
            {"method": "fedner", "sites": {"a": {**site, "encoding": "cp125"}}},
            "job",
            tmp_path,
            "job.toml",
        )
    notes = {"path": "n.csv", "encoding": "utf-16-le"}
    job = parse_job(
        {"method": "pretrain", "sites": {"a": notes}}, "job", tmp_path, "job.toml"
    )
    assert job.sites["a"].encoding == "utf-16-le"


def test_compressed_corpora_are_read_within_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"id": "7", "text": "Had rash"}\n'))
    assert [document.id for document in read(path)] == ["7"]
    tasks = tmp_path / "b.json.gz"
    tasks.write_bytes(
        gzip.compress(b'[{"data": {"text": "Had rash"}, "annotations": []}]')
    )
    assert [document.text for document in read(tasks, "label-studio")] == ["Had rash"]
    monkeypatch.setattr("fednotes.core.bounds.FILE", 20)
    with pytest.raises(
        DataError, match="unpacked it has more than 20 bytes: split it into several"
    ):
        read(tasks, "label-studio")
