"""Public word vectors: any GloVe or word2vec file, by path.

One file is read once a process and shared by every tagger in it: the table is frozen,
no part of a tagger's state, and never travels. Nothing here looks at a site's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fednotes.core.errors import ModelError
from fednotes.encoders.pretrained import file_sha256

_NO_NUMBER = "a column is not a finite number"


@dataclass(frozen=True, slots=True, eq=False)
class WordVectors:
    """A frozen table of word vectors.

    path: the file. index: word → row. table: (1 + words, dim) float32; row 0 is the
    vector of an unknown word, all zeros.
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

    An optional first line `count dimension` (word2vec) is skipped. Of a word that
    stands twice, the first line counts. A file called .bin is word2vec's binary format:
    that first line, then for each word its letters, a space and float32 numbers, little
    end first. max_words: rows read at most (0 = all). The result is cached by path,
    change time and max_words.

    Raises ModelError (naming path and line or word) if the file is missing or empty, or
    a line has another number of columns than the first or what is not a finite number.
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
    index: dict[str, int] = {}
    if path.suffix == ".bin":
        return _load_binary(path, max_words)
    with path.open("rb") as stream, np.errstate(over="ignore"):
        head = list(islice(stream, 2))
        columns = head[0].split() if head else []
        if not columns and len(head) < 2:
            raise ModelError(f"{path}: no word vectors in this file")
        if len(columns) < 2:
            raise ModelError(
                f"{path}:1: a line must be a word and its numbers, divided by spaces"
            )
        header = len(columns) == 2 and all(c.isdigit() for c in columns)
        header = header and len(head) > 1 and len(head[1].split()) > 2
        dim = int(columns[1]) if header else len(columns) - 1
        table = [np.zeros(dim, np.float32)]
        for number, line in enumerate(chain(head[header:], stream), 1 + header):
            if max_words and len(table) > max_words:
                break
            word, values = _parse(f"{path}:{number}", line, dim)
            index.setdefault(word, len(table))
            table.append(values)
    found = torch.from_numpy(np.stack(table))
    finite = torch.isfinite(found).all(1)
    if not finite.all():
        raise _wrong(f"{path}:{int(finite.int().argmin()) + header}", _NO_NUMBER, dim)
    return WordVectors(path, index, found)


def _parse(place: str, line: bytes, dim: int) -> tuple[str, np.ndarray]:
    """Word and numbers (dim,), read from the right: some published files hold words
    with spaces."""
    word, *numbers = line.rsplit(None, dim) or [b""]
    if len(numbers) < dim:
        raise _wrong(place, f"fewer than {dim} numbers after the word", dim)
    try:
        values = np.fromiter(map(float, numbers), np.float32, dim)
    except ValueError:
        raise _wrong(place, _NO_NUMBER, dim) from None
    if len(pieces := word.rsplit(None, 1)) > 1:
        with suppress(ValueError):
            float(pieces[1])
            raise _wrong(place, f"more than {dim} numbers after the word", dim)
    return word.decode("utf-8", "replace"), values


def _wrong(place: str, problem: str, dim: int) -> ModelError:
    return ModelError(
        f"{place}: {problem}; the first line has a word and {dim} numbers"
    )


def _load_binary(path: Path, max_words: int) -> WordVectors:
    index: dict[str, int] = {}
    with path.open("rb") as stream:
        head = stream.readline(64).split()
        if (
            len(head) != 2
            or not all(part.isdigit() for part in head)
            or not int(head[1])
        ):
            raise ModelError(
                f"{path}: no first line with the numbers of words and of columns"
            )
        count, dim = (int(part) for part in head)
        rows = min(count, max_words) if max_words else count
        # a word has a letter, and a space behind it
        least = stream.tell() + rows * (4 * dim + 2)
        if least > path.stat().st_size:
            raise ModelError(f"{path}: too short for {count:,} words of {dim} numbers")
        table = np.zeros((1 + rows, dim), np.float32)
        for row in range(1, rows + 1):
            word = bytearray()
            while (letter := stream.read(1)) not in (b" ", b""):
                word += letter
            values = np.frombuffer(stream.read(4 * dim), "<f4")
            if len(values) < dim or not np.isfinite(values).all():
                raise ModelError(
                    f"{path}: word {row}: {dim} finite numbers were expected"
                )
            index.setdefault(word.decode("utf-8", "replace").strip("\n"), row)
            table[row] = values
    return WordVectors(path, index, torch.from_numpy(table))
