"""Word vectors from text files."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest

from fednotes.core.errors import ModelError
from fednotes.encoders.vectors import load_vectors


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_numbers_are_parsed_as_by_float(tmp_path: Path) -> None:
    """Python's float() of each column, rounded to float32, for all notations that
    occur."""
    columns = [
        ["0.1", "-0.010167", "1e-3", "+2.5E+2", "7"],
        ["-6.3371", ".5", "3.", "0.00000012", "-1.2345678e-05"],
        ["1234567.875", "-0", "9.999999", "1e10", "4e-40"],
    ]
    text = "".join(f"w{i} {' '.join(row)}\n" for i, row in enumerate(columns))
    loaded = load_vectors(_write(tmp_path / "v.txt", text))
    expected = np.array([[float(c) for c in row] for row in columns], np.float32)
    assert loaded.dim == 5
    np.testing.assert_array_equal(loaded.table[1:].numpy(), expected)
    assert not loaded.table[0].any()
    assert not loaded.table.requires_grad


def test_unusual_layouts_of_a_file_are_read(tmp_path: Path) -> None:
    """Header, tabs, carriage returns, trailing space, no last newline, words with
    spaces, repeated words (the first counts)."""
    text = "5 2\nthe 1 2\r\nα\t3 4 \nat name.com 5 6\nthe 9 9\n7 7 8"
    loaded = load_vectors(_write(tmp_path / "v.txt", text))
    rows = {w: loaded.table[r].tolist() for w, r in loaded.index.items()}
    assert rows == {"the": [1, 2], "α": [3, 4], "at name.com": [5, 6], "7": [7, 8]}
    assert loaded.find_rows(["the", "THE", "The", "unknown", "α", "Α"]).tolist() == [
        1,
        1,
        1,
        0,
        2,
        2,
    ]


def test_an_exact_form_is_preferred_to_lower_case(tmp_path: Path) -> None:
    loaded = load_vectors(_write(tmp_path / "v.txt", "us 1 1\nUS 2 2\n"))
    assert [
        loaded.table[r][0].item() for r in loaded.find_rows(["US", "us", "Us"])
    ] == [
        2.0,
        1.0,
        1.0,
    ]


def test_a_file_is_read_once_and_again_after_a_change(tmp_path: Path) -> None:
    path = _write(tmp_path / "v.txt", "a 1\nb 2\nc 3\n")
    first = load_vectors(path)
    assert load_vectors(str(path)) is first
    assert first.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    head = load_vectors(path, max_words=2)
    assert set(head.index) == {"a", "b"}
    assert head.table.shape == (3, 1)
    _write(path, "a 1\nb 2\nc 3\nd 4\n")
    assert len(load_vectors(path).index) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a 1 2\nb 1\n", r"v\.txt:2: fewer than 2 numbers"),
        ("a 1 2\nb 1 2\nc 1 2 3\n", r"v\.txt:3: more than 2 numbers"),
        ("a 1 2\n\nb 1 2\n", r"v\.txt:2: fewer than 2 numbers"),
        ("a 1 2\nb 1 nan\n", r"v\.txt:2: a column is not a finite number"),
        ("a 1 2\nb inf 1\n", r"v\.txt:2: a column is not a finite number"),
        ("a 1 2\nb 1e99 1\n", r"v\.txt:2: a column is not a finite number"),
        ("a 1 2\nb 1-2 1\n", r"v\.txt:2: a column is not a finite number"),
        ("2 2\na 1 2\nb 1 x\n", r"v\.txt:3: a column is not a finite number"),
        ("word\n", r"v\.txt:1: a line must be a word and its numbers"),
        ("", "no word vectors"),
    ],
)
def test_an_error_names_the_bad_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_vectors(_write(tmp_path / "v.txt", text))


def test_a_missing_file_or_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot read word vectors"):
        load_vectors(tmp_path / "none.txt")
    for absent in ("n" * 100_000, "~no-such-user/v.txt", "v\0.txt"):
        with pytest.raises(ModelError, match="cannot read word vectors"):
            load_vectors(absent)
    with pytest.raises(ModelError, match="not a folder"):
        load_vectors(tmp_path)


@pytest.mark.corpora
def test_published_glove_vectors_are_read_exactly(corpora: Path) -> None:
    """Every row of a published file against str.split and float()."""
    path = corpora / "vectors" / "glove.twitter.27B.25d.12k.txt"
    loaded = load_vectors(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    expected = np.array(
        [[float(x) for x in line.split(" ")[1:]] for line in lines], np.float32
    )
    np.testing.assert_array_equal(loaded.table[1:].numpy(), expected)
    assert loaded.index["the"] == 1


def binary(
    path: Path, words: list[bytes], values: np.ndarray, between: bytes = b""
) -> Path:
    """Write word2vec's binary format byte by byte; `between` ends a word's line."""
    head = f"{len(words)} {values.shape[1]}\n".encode()
    rows = [
        word + b" " + struct.pack(f"<{len(row)}f", *row) + between
        for word, row in zip(words, values.tolist(), strict=True)
    ]
    path.write_bytes(head + b"".join(rows))
    return path


@pytest.mark.parametrize("between", [b"", b"\n"])
def test_the_binary_format_is_read(tmp_path: Path, between: bytes) -> None:
    """With line ends as the program of 2013 writes them and without, as gensim; numbers
    that hold the bytes of a space and of a line end; repeated words (the first counts).
    """
    number = struct.unpack("<f", b"\n \n ")[0]
    values = np.array([[1, -2.5, number], [number, 0, 4], [7, 8, 9]], np.float32)
    words = [b"C0011849", "α".encode(), b"C0011849"]
    loaded = load_vectors(binary(tmp_path / "v.bin", words, values, between))
    assert loaded.index == {"C0011849": 1, "α": 2}
    np.testing.assert_array_equal(loaded.table[1:].numpy(), values)
    assert not loaded.table[0].any()
    first = load_vectors(tmp_path / "v.bin", 1)
    assert first.index == {"C0011849": 1}
    assert first.table.shape == (2, 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"word 1 2\n", "the first line does not give"),
        (b"2 0\n", "the first line does not give"),
        (
            b"1000000000 300\nC1 ",
            "too short for the 1,000,000,000 words of 300 numbers",
        ),
        (
            b"1 2\nC1 " + struct.pack("<2f", 1, float("nan")),
            "word 1: expected 2 finite numbers",
        ),
        (
            b"1 2\nC1234567890" + struct.pack("<2f", 1, 2),
            "word 1: expected 2 finite numbers",
        ),
    ],
)
def test_a_damaged_binary_file_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "v.bin").write_bytes(content)
    with pytest.raises(ModelError, match=f"v.bin: {message}"):
        load_vectors(tmp_path / "v.bin")


@pytest.mark.parametrize("header", ["1 1000000000000", f"1 {'9' * 5000}"])
@pytest.mark.parametrize("name", ["v.txt", "v.bin"])
def test_a_huge_header_takes_no_memory(tmp_path: Path, name: str, header: str) -> None:
    """Of 5,000 digits Python makes no number."""
    with pytest.raises(ModelError, match=r"numbers|too short"):
        load_vectors(_write(tmp_path / name, f"{header}\nrash 1 2\n"))
