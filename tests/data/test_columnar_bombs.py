"""Parquet and Arrow files of a few hundred bytes that claim gigabytes of values."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from parquet_files import (
    DELTA_LENGTH,
    DELTA_TEXT,
    DICTIONARY,
    FIXED,
    INT32,
    PLAIN,
    ZSTD,
    column_file,
    deltas,
    dictionary,
    levels,
    page,
    run,
    struct,
    text,
    varint,
    with_footer,
    zigzag,
)
from peak_memory import read_apart

from fednotes.core.errors import DataError
from fednotes.core.types import Document
from fednotes.data.formats import read, write
from fednotes.data.formats.parquet import read_rows
from fednotes.data.notes import read_notes

MIB = 100  # that reading a hostile file may take


def shared_text(length: int, rows: int) -> bytes:
    """Return rows that all have the one text of a dictionary."""
    return column_file(
        [
            dictionary(text(length), 1, codec=ZSTD),
            page(b"\1" + run(0, rows), rows, DICTIONARY, codec=ZSTD),
        ],
        rows,
        codec=ZSTD,
    )


def long_list(length: int, stated: int) -> bytes:
    """Return one row, a list, for which footer and page state different lengths."""
    repetitions = varint(2) + b"\0" + run(1, length - 1)
    content = levels(repetitions) + levels(run(1, length)) + b"\1" + run(0, length)
    pages = [dictionary(text(1), 1), page(content, length, DICTIONARY)]
    return column_file(pages, stated, rows=1, is_list=True)


def list_of_shared_text(length: int, items: int) -> bytes:
    """Return one row, a list whose items are all the one text of a dictionary."""
    repetitions = varint(2) + b"\0" + run(1, items - 1)
    content = levels(repetitions) + levels(run(1, items)) + b"\1" + run(0, items)
    pages = [
        dictionary(text(length), 1, codec=ZSTD),
        page(content, items, DICTIONARY, codec=ZSTD),
    ]
    return column_file(pages, items, rows=1, is_list=True, codec=ZSTD)


def list_over_pages(pages: int, length: int) -> bytes:
    """Return one row, a list of texts, each of which is in a page of its own."""

    def text_page(repetition: int) -> bytes:
        content = levels(run(repetition, 1)) + levels(run(1, 1)) + text(length)
        return page(content, 1, PLAIN, codec=ZSTD)

    return column_file(
        [
            dictionary(text(1), 1, codec=ZSTD),
            text_page(0),
            *[text_page(1)] * (pages - 1),
        ],
        pages,
        rows=1,
        is_list=True,
        codec=ZSTD,
    )


def stated_lengths(number: int) -> bytes:
    """Return a page of ten texts that states any number of lengths."""
    content = deltas(0, number, block=max(128, number))
    return column_file([page(content, 10, DELTA_LENGTH)], 10)


def same_beginning(length: int, rows: int) -> bytes:
    """Return texts that begin as the one before them, which is stated by a length."""
    prefixes = varint(128) + varint(4) + varint(rows) + zigzag(0)
    ends = varint(128) + varint(4) + varint(rows) + zigzag(length)
    width = length.bit_length()
    # The first difference is the length, or its negative; all others are 0.
    once = length.to_bytes(4 * width, "little")
    others = sum(length << width * place for place in range(1, 32))
    blocks = -(-(rows - 1) // 128)
    prefixes += zigzag(0) + bytes([width, 0, 0, 0]) + once
    ends += zigzag(-length) + bytes([width] * 4)
    ends += others.to_bytes(4 * width, "little")
    ends += sum(length << width * place for place in range(96)).to_bytes(
        12 * width, "little"
    )
    prefixes += (zigzag(0) + bytes(4)) * (blocks - 1)
    ends += (zigzag(0) + bytes(4)) * (blocks - 1)
    content = prefixes + ends + b"a" * length
    return column_file([page(content, rows, DELTA_TEXT, codec=ZSTD)], rows, codec=ZSTD)


def null_bytes(rows: int, length: int) -> bytes:
    """Return nulls of bytes of a fixed length, each of which takes this length."""
    content = levels(run(0, rows))
    return column_file(
        [page(content, rows, PLAIN)],
        rows,
        kind=FIXED,
        length=length,
        is_optional=True,
    )


def null_lists(rows: int, length: int) -> bytes:
    """Return nulls of lists of a fixed length, each of which takes this length."""
    kind = pyarrow.list_(pyarrow.int32(), length)
    content = levels(run(0, rows)) * 2
    return column_file(
        [page(content, rows, PLAIN)],
        rows,
        kind=INT32,
        is_list=True,
        is_optional=True,
        schema=pyarrow.schema([("text", kind)]),
    )


def many_columns(number: int, length: int) -> bytes:
    """Return columns with a page of their own, each within the bound of a page."""
    sink = pyarrow.BufferOutputStream()
    column = pyarrow.array(["a" * length])
    columns = {f"c{index}": column for index in range(number)}
    table = pyarrow.table({"text": ["a"], "spans": [[]], **columns})
    pyarrow.parquet.write_table(table, sink, compression="zstd", write_statistics=False)
    return sink.getvalue().to_pybytes()


def stated_columns(number: int) -> bytes:
    """Return a footer that begins a list of columns, and ends there."""
    schema = struct([(4, "binary", b"s"), (5, "i32", 0)])
    group = b"\x19\x1c\x19\xfc" + varint(number)
    start = b"\x15" + zigzag(2) + b"\x19\x1c" + schema + b"\x16" + zigzag(1)
    return with_footer(b"", start + group)


def deep_schema(depth: int) -> bytes:
    element = struct([(3, "i32", 0), (4, "binary", b"s"), (5, "i32", 1)])
    leaf = struct([(1, "i32", 6), (3, "i32", 0), (4, "binary", b"t")])
    schema = b"\x19\xfc" + varint(depth + 1) + element * depth + leaf
    return with_footer(
        b"", b"\x15" + zigzag(2) + schema + b"\x16" + zigzag(0) + b"\x19\x0c\0"
    )


FEW = {
    "text that rows share": shared_text(5, 3),
    "lengths of texts": stated_lengths(10),
    "texts that begin alike": same_beginning(5, 200),
    "nulls of bytes": null_bytes(3, 4),
    "nulls of lists": null_lists(3, 4),
}
BOMBS = {
    "text that rows share": shared_text(2_000_000, 1024),
    "text that more rows share": shared_text(2**23, 10**6),
    "list": long_list(2**27, 2**27),
    "list that the footer hides": long_list(2**27, 1),
    "lengths of texts": stated_lengths(2**28),
    "list of a shared text": list_of_shared_text(2**20, 2**12),
    "texts that begin alike": same_beginning(2**20, 1024),
    "nulls of bytes": null_bytes(100, 2**26),
    "nulls of lists": null_lists(100, 2**24),
    "columns of a footer": stated_columns(10**6),
    "schema": deep_schema(10**5),
}


def arrow(
    table: pyarrow.Table, *, is_stream: bool, packing: str | None = None
) -> bytes:
    sink = pyarrow.BufferOutputStream()
    open_writer = pyarrow.ipc.new_stream if is_stream else pyarrow.ipc.new_file
    options = pyarrow.ipc.IpcWriteOptions(compression=packing)
    with open_writer(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def example(folder: Path, ending: str) -> Path:
    """Return a small file of one document."""
    path = folder / f"example{ending}"
    table = pyarrow.table({"text": ["a rash"], "spans": [[]]})
    if ending == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        path.write_bytes(arrow(table, is_stream=False))
    return path


def write_all(folder: Path, files: Mapping[str, bytes], ending: str) -> list[Path]:
    paths = [folder / f"{name.replace(' ', '-')}{ending}" for name in files]
    for path, data in zip(paths, files.values(), strict=True):
        path.write_bytes(data)
    return paths


def test_parquet_that_claims_gigabytes_is_refused_before_it_is_unpacked(
    tmp_path: Path,
) -> None:
    paths = write_all(tmp_path, BOMBS, ".parquet")
    readings = read_apart("notes", example(tmp_path, ".parquet"), paths)
    for path, reading in zip(paths, readings, strict=True):
        assert path.stat().st_size < 1000 or "schema" in path.name
        assert reading.mib < MIB, (path.name, reading)
        assert reading.end.startswith(f"DataError: {path}: "), reading


def test_a_list_over_many_pages_is_refused_before_it_is_unpacked(
    tmp_path: Path,
) -> None:
    (path,) = write_all(tmp_path, {"a": list_over_pages(400, 10**6)}, ".parquet")
    assert path.stat().st_size < 50_000
    (reading,) = read_apart("notes", example(tmp_path, ".parquet"), [path])
    assert "its rows have more than 16,777,216 bytes" in reading.end
    assert reading.mib < 20


def test_a_list_over_a_few_pages_is_read(tmp_path: Path) -> None:
    (path,) = write_all(tmp_path, {"a": list_over_pages(10, 100)}, ".parquet")
    (row,) = read_rows(path, ["text"])
    assert row == [["a" * 100] * 10]


def test_the_bound_applies_to_all_columns_of_parquet_together(tmp_path: Path) -> None:
    (path,) = write_all(tmp_path, {"columns": many_columns(40, 2**21)}, ".parquet")
    assert path.stat().st_size < 200_000
    (reading,) = read_apart("documents", example(tmp_path, ".parquet"), [path])
    assert "its rows have more than" in reading.end
    assert reading.mib < 40


@pytest.mark.parametrize("name", FEW)
def test_small_parquet_of_the_same_form_is_read(tmp_path: Path, name: str) -> None:
    (path,) = write_all(tmp_path, {name: FEW[name]}, ".parquet")
    assert all(note.text == "aaaaa" for note in read_notes(path))


def test_parquet_is_written_in_groups_that_can_be_read_one_by_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.parquet"
    write((Document(str(number), "rash") for number in range(5001)), path, "parquet")
    metadata = pyarrow.parquet.read_metadata(path)
    assert [metadata.row_group(index).num_rows for index in range(2)] == [5000, 1]
    assert len(read(path)) == 5001


def test_columns_with_equal_names_are_refused(tmp_path: Path) -> None:
    columns = [pyarrow.array(["a"]), pyarrow.array(["b"])]
    table = pyarrow.Table.from_arrays(columns, names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(
        DataError, match="two of its columns have the same name: rename"
    ):
        list(read_notes(tmp_path / "a.parquet"))


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "lz4"])
def test_delta_encodings_of_other_programs_are_read(
    tmp_path: Path, encoding: str, version: str, compression: str
) -> None:
    texts = [
        f"Note {number}: no rash{' at all' * (number % 7)}." for number in range(999)
    ]
    pyarrow.parquet.write_table(
        pyarrow.table({"text": texts, "id": list(map(str, range(999)))}),
        tmp_path / "a.parquet",
        use_dictionary=False,
        column_encoding=encoding,
        data_page_version=version,
        compression=compression,
    )
    assert [note.text for note in read_notes(tmp_path / "a.parquet")] == texts


@pytest.mark.parametrize("kind", ["string", "large_string"])
def test_lists_of_texts_are_read(tmp_path: Path, kind: str) -> None:
    """They are read as dictionaries if their texts may be longer than their pages."""
    tokens = [["rash" * 50, f"w{number % 300}"] for number in range(400)]
    column = pyarrow.array(tokens, pyarrow.list_(pyarrow.type_for_alias(kind)))
    tags = pyarrow.array([["B-ADE", "O"]] * 400)
    table = pyarrow.table({"tokens": column, "ner_tags": tags})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    documents = read(tmp_path / "a.parquet")
    assert [document.text.split()[1] for document in documents] == [
        pair[1] for pair in tokens
    ]


# ---- Arrow ---------------------------------------------------------------------------


def one_text(length: int) -> pyarrow.Array:
    return pyarrow.array(["a" * length])


def in_dictionary(texts: pyarrow.Array) -> pyarrow.Array:
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0]), texts)


def list_of(items: pyarrow.Array) -> pyarrow.Array:
    return pyarrow.ListArray.from_arrays([0, len(items)], items)


def nested_nulls(number: int, fields: int) -> pyarrow.Array:
    """Return structs of nulls, which take no bytes at all."""
    nulls = [pyarrow.nulls(number)] * fields
    return pyarrow.StructArray.from_arrays(nulls, [str(n) for n in range(fields)])


@pytest.mark.parametrize("is_stream", [False, True], ids=["file", "stream"])
@pytest.mark.parametrize("packing", ["lz4", "zstd"])
def test_arrow_that_unpacks_to_much_is_refused_before_it_is_unpacked(
    tmp_path: Path, packing: str, is_stream: bool
) -> None:
    text_of_100_mb = one_text(10**8)
    tables = [text_of_100_mb, in_dictionary(text_of_100_mb)]
    files = {
        f"{index}": arrow(
            pyarrow.table({"text": column}), is_stream=is_stream, packing=packing
        )
        for index, column in enumerate(tables)
    }
    paths = write_all(tmp_path, files, ".arrow")
    readings = read_apart("notes", example(tmp_path, ".arrow"), paths)
    for path, reading in zip(paths, readings, strict=True):
        assert path.stat().st_size < 500_000
        assert reading.mib < 40, (path.name, reading)
        assert "more than" in reading.end, reading


@pytest.mark.parametrize("is_stream", [False, True], ids=["file", "stream"])
def test_rows_of_arrow_are_measured_before_they_become_values(
    tmp_path: Path, is_stream: bool
) -> None:
    columns = {
        "nulls": list_of(pyarrow.nulls(2**31 - 1)),
        "structs": list_of(nested_nulls(10**6, 200)),
        "dictionary": in_dictionary(list_of(pyarrow.nulls(2**31 - 1))),
    }
    files = {
        name: arrow(
            pyarrow.table({"text": ["a"], "spans": column}), is_stream=is_stream
        )
        for name, column in columns.items()
    }
    paths = write_all(tmp_path, files, ".arrow")
    readings = read_apart("documents", example(tmp_path, ".arrow"), paths)
    for path, reading in zip(paths, readings, strict=True):
        assert path.stat().st_size < 100_000
        assert reading.mib < MIB, (path.name, reading)
        assert "its rows have more than" in reading.end, reading


@pytest.mark.parametrize("is_stream", [False, True], ids=["file", "stream"])
def test_arrow_with_offsets_outside_its_texts_is_refused(
    tmp_path: Path, is_stream: bool
) -> None:
    offsets = pyarrow.array([0, 10**6, 2, 4], pyarrow.int32()).buffers()[1]
    texts = pyarrow.StringArray.from_buffers(3, offsets, pyarrow.py_buffer(b"rash"))
    indices = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([5], pyarrow.int32()), pyarrow.array(["rash"]), safe=False
    )
    files = {
        "offsets": arrow(pyarrow.table({"text": texts}), is_stream=is_stream),
        "indices": arrow(pyarrow.table({"text": indices}), is_stream=is_stream),
        "inner": arrow(
            pyarrow.table({"text": in_dictionary(texts)}), is_stream=is_stream
        ),
    }
    paths = write_all(tmp_path, files, ".arrow")
    readings = read_apart("notes", example(tmp_path, ".arrow"), paths)
    for path, reading in zip(paths, readings, strict=True):
        assert f"{path}: not a readable Parquet or Arrow file" in reading.end


def test_nested_list_views_are_refused(tmp_path: Path) -> None:
    """A view of lists of a view of lists grows by the power of its depth."""
    view = pyarrow.array(["a"])
    for _ in range(3):
        view = pyarrow.ListViewArray.from_arrays(
            pyarrow.array([0] * 100, pyarrow.int32()),
            pyarrow.array([len(view)] * 100, pyarrow.int32()),
            view,
        )
    table = pyarrow.table({"text": ["a"] * 100, "spans": view})
    (path,) = write_all(tmp_path, {"a": arrow(table, is_stream=False)}, ".arrow")
    with pytest.raises(
        DataError, match="a column contains lists of dictionary-encoded values"
    ):
        read(path)


@pytest.mark.parametrize("is_stream", [False, True], ids=["file", "stream"])
@pytest.mark.parametrize("packing", [None, "lz4", "zstd"])
def test_arrow_of_any_compression_is_read(
    tmp_path: Path, packing: str | None, is_stream: bool
) -> None:
    texts = [f"Note {number}: no rash." for number in range(3000)]
    table = pyarrow.table({"text": texts, "category": ["a", "b", "c"] * 1000})
    table = table.set_column(1, "category", table["category"].dictionary_encode())
    data = arrow(table, is_stream=is_stream, packing=packing)
    (path,) = write_all(tmp_path, {"a": data}, ".arrow")
    assert [note.text for note in read_notes(path)] == texts
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match="not a readable Parquet or Arrow file"):
        list(read_notes(path))


def test_a_duration_that_python_cannot_represent_is_refused(tmp_path: Path) -> None:
    lengths = pyarrow.array([2**60], pyarrow.duration("s"))
    path = tmp_path / "durations.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": lengths}), path)
    with pytest.raises(DataError, match="not a readable Parquet"):
        list(read_rows(path, ["text"]))


READ_DAMAGED = """
import io, sys
from pathlib import Path
import pyarrow as arrow, pyarrow.parquet
from fednotes.core.errors import DataError
from fednotes.data.formats.parquet import read_rows

sink = io.BytesIO()
arrow.parquet.write_table(arrow.table({"text": ["no pain"] * 100}), sink)
raw = sink.getvalue()
path = Path(sys.argv[1])
footer = len(raw) - 8 - int.from_bytes(raw[-8:-4], "little")
refused = 0
for position in range(footer, len(raw) - 8):
    for value in (0, raw[position] ^ 1, raw[position] ^ 16):
        damaged = bytearray(raw)
        damaged[position] = value
        path.write_bytes(damaged)
        try:
            list(read_rows(path, ["text"]))
        except DataError:
            refused += 1
print(refused)
"""


def test_no_damaged_byte_of_a_footer_ends_the_process(tmp_path: Path) -> None:
    """Arrow aborts if a column's statistics do not match the schema, and Python cannot
    catch that: one small request would end a server."""
    completed = subprocess.run(
        [sys.executable, "-c", READ_DAMAGED, tmp_path / "damaged.parquet"],
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stderr[-500:]
    assert int(completed.stdout) > 300
