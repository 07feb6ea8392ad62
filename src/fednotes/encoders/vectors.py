"""Public word vectors: any GloVe or word2vec file, by path.

One file is read once a process and shared by every tagger in it: the table is frozen, no
part of a tagger's state, and never travels. Nothing here looks at a site's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from fednotes.core.errors import ModelError
from fednotes.core.kernels import kernel, part
from fednotes.encoders.pretrained import file_sha256

CHUNK = 1 << 24  # bytes parsed at a time
_POWERS = 10.0 ** np.arange(23)  # each one exact in float64
_TOO_FEW, _TOO_MANY, _NOT_A_NUMBER = 1, 2, 3


@dataclass(frozen=True, slots=True, eq=False)
class WordVectors:
    """A frozen table of word vectors.

    path: the file. index: word → row. table: (1 + words, dim) float32; row 0 is the vector of
    an unknown word, all zeros.
    """

    path: Path
    index: dict[str, int]
    table: Tensor

    @property
    def dim(self) -> int:
        """Columns of the table."""
        return int(self.table.shape[1])

    def rows(self, forms: Sequence[str]) -> np.ndarray:
        """The row of every form, (forms,) int64: as written, else lower-cased, else 0."""
        index = self.index
        found = (index.get(form) or index.get(form.lower(), 0) for form in forms)
        return np.fromiter(found, dtype=np.int64, count=len(forms))

    @property
    def sha256(self) -> str:
        """SHA-256 of the file's content."""
        return file_sha256(self.path)


def load_vectors(path: str | Path, max_words: int = 0) -> WordVectors:
    """Read a text file of word vectors: `word number number …`, one word a line.

    An optional first line `count dimension` (word2vec) is skipped. Of a word that stands
    twice, the first line counts. A file called .bin is word2vec's binary format: that first line,
    then for each word its letters, a space and float32 numbers, little end first. max_words: rows
    read at most (0 = all). The result is cached by path, change time and max_words.

    Raises ModelError (naming path and line or word) if the file is missing or empty, or a line
    has another number of columns than the first or what is not a finite number.
    """
    file = Path(path).expanduser().resolve()
    try:
        stat = file.stat()
        if not file.is_file():
            raise ModelError(f"{path}: word vectors must be a file, not a folder")
        return _load(file, stat.st_mtime_ns, stat.st_size, max_words)
    except OSError as error:
        raise ModelError(
            f"{path}: cannot read word vectors ({error.strerror}): set word_vectors to a GloVe "
            "or word2vec text file"
        ) from None


@lru_cache(maxsize=4)
def _load(path: Path, mtime: int, size: int, max_words: int) -> WordVectors:
    if path.suffix == ".bin":
        return _load_binary(path, max_words)
    index: dict[str, int] = {}
    tables: list[np.ndarray] = []
    rows = 1
    with path.open("rb") as stream:
        dim, header, rest = _shape(path, stream)
        line = 1 + header
        block = rest
        while (block or rest) and not (max_words and rows > max_words):
            block = stream.read(CHUNK)
            data = rest + block
            cut = data.rfind(b"\n") + 1 if block else len(data)
            data, rest = data[:cut], data[cut:]
            wanted = max_words - rows + 1 if max_words else 0
            table, words = _parse(path, data, dim, line, wanted)
            for word in words:
                index.setdefault(word, rows)
                rows += 1
            tables.append(table)
            line += len(words)
    table = np.concatenate([np.zeros((1, dim), np.float32), *tables])
    return WordVectors(path, index, torch.from_numpy(table))


def _load_binary(path: Path, max_words: int) -> WordVectors:
    index: dict[str, int] = {}
    with path.open("rb") as stream:
        head = stream.readline(64).split()
        if len(head) != 2 or not all(part.isdigit() for part in head) or not int(head[1]):
            raise ModelError(f"{path}: no first line with the numbers of words and of columns")
        count, dim = (int(part) for part in head)
        rows = min(count, max_words) if max_words else count
        least = stream.tell() + rows * (4 * dim + 2)  # a word has a letter, and a space behind it
        if least > path.stat().st_size:
            raise ModelError(f"{path}: too short for {count:,} words of {dim} numbers")
        table = np.zeros((1 + rows, dim), np.float32)
        for row in range(1, rows + 1):
            word = bytearray()
            while (letter := stream.read(1)) not in (b" ", b""):
                word += letter
            values = np.frombuffer(stream.read(4 * dim), "<f4")
            if len(values) < dim or not np.isfinite(values).all():
                raise ModelError(f"{path}: word {row}: {dim} finite numbers were expected")
            index.setdefault(word.decode("utf-8", "replace").strip("\n"), row)
            table[row] = values
    return WordVectors(path, index, torch.from_numpy(table))


def _shape(path: Path, stream: IO[bytes]) -> tuple[int, bool, bytes]:
    """The dimension, whether there is a word2vec header, and the bytes read behind it."""
    first, second = stream.readline(), stream.readline()
    columns = first.split()
    if not columns and not second:
        raise ModelError(f"{path}: no word vectors in this file")
    if len(columns) < 2:
        raise ModelError(f"{path}:1: a line must be a word and its numbers, divided by spaces")
    header = len(columns) == 2 and all(c.isdigit() for c in columns) and len(second.split()) > 2
    return (int(columns[1]), True, second) if header else (len(columns) - 1, False, first + second)


def _parse(
    path: Path, data: bytes, dim: int, line: int, wanted: int
) -> tuple[np.ndarray, list[str]]:
    """Whole lines → table (lines, dim) float32 and words. `line` is the first one's number."""
    buffer = np.frombuffer(bytearray(data), dtype=np.uint8)
    ends = np.flatnonzero(buffer == 10)
    if len(buffer) and (len(ends) == 0 or ends[-1] != len(buffer) - 1):
        ends = np.append(ends, len(buffer))
    starts = np.concatenate([[0], ends[:-1] + 1])[: len(ends)].astype(np.int64)
    if wanted:
        starts, ends = starts[:wanted], ends[:wanted]
    table = np.zeros((len(starts), dim), np.float32)
    word_ends = np.zeros(len(starts), np.int64)
    code, at = _parse_lines(buffer, starts, ends.astype(np.int64), table, word_ends)
    if code:
        problem = {
            _TOO_FEW: f"fewer than {dim} numbers after the word",
            _TOO_MANY: f"more than {dim} numbers after the word",
            _NOT_A_NUMBER: "a column is not a finite number",
        }[int(code)]
        raise ModelError(
            f"{path}:{line + int(at)}: {problem}; the first line has a word and {dim} numbers"
        )
    words = [
        data[a:b].decode("utf-8", "replace")
        for a, b in zip(starts.tolist(), word_ends.tolist(), strict=True)
    ]
    return table, words


@part
def _number(buffer, start, end):
    """Text → (value, valid). Exact up to 15 digits and 22 decimal places, like float()."""
    sign, p = 1.0, start
    if p < end and (buffer[p] == 45 or buffer[p] == 43):
        sign = -1.0 if buffer[p] == 45 else 1.0
        p += 1
    mantissa, digits, places, point = 0.0, 0, 0, False
    while p < end:
        c = buffer[p]
        if 48 <= c <= 57:
            mantissa = mantissa * 10.0 + (c - 48)
            digits += 1
            places += point
        elif c == 46 and not point:
            point = True
        else:
            break
        p += 1
    if digits == 0:
        return 0.0, False
    exponent = 0
    if p < end and (buffer[p] == 101 or buffer[p] == 69):
        p += 1
        negative = False
        if p < end and (buffer[p] == 45 or buffer[p] == 43):
            negative = buffer[p] == 45
            p += 1
        if p == end:
            return 0.0, False
        while p < end and 48 <= buffer[p] <= 57:
            exponent = min(exponent * 10 + (buffer[p] - 48), 9999)
            p += 1
        exponent = -exponent if negative else exponent
    if p != end:
        return 0.0, False
    exponent -= places
    if -22 <= exponent <= 0:  # a table: the general power takes longer than all the rest
        value = mantissa / _POWERS[-exponent]
    elif exponent > 0:
        value = mantissa * 10.0**exponent
    else:
        value = mantissa / 10.0 ** (-exponent)
    return sign * value, value < 3.5e38


@kernel("UniTuple(i8, 2)(u1[::1], i8[::1], i8[::1], f4[:,::1], i8[::1])")
def _parse_lines(buffer, starts, ends, table, word_ends):
    """Fill table and word_ends; (0, 0), or the code of the first error and its line.

    A line is read from its right end, since some published files hold words with spaces.
    """
    dim = table.shape[1]
    for row in range(len(starts)):
        p = ends[row]
        while p > starts[row] and buffer[p - 1] <= 32:
            p -= 1
        for column in range(dim - 1, -1, -1):
            end = p
            while p > starts[row] and buffer[p - 1] > 32:
                p -= 1
            if p == starts[row]:
                return 1, row
            value, valid = _number(buffer, p, end)
            if not valid:
                return 3, row
            table[row, column] = value
            while p > starts[row] and buffer[p - 1] <= 32:
                p -= 1
        word_ends[row] = p
        if p == starts[row]:
            return 1, row
        q = p
        while q > starts[row] and buffer[q - 1] > 32:
            q -= 1
        if q > starts[row] and _number(buffer, q, p)[1]:
            return 2, row
    return 0, 0
