"""Public word vectors from a GloVe or word2vec file.

A process reads a file once, and all its taggers share the table. The table is frozen;
it is not part of a tagger's state and never leaves the site. This module does not read
a site's text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fednotes.core.errors import ModelError
from fednotes.core.parsing import open_regular
from fednotes.core.settings import expand_home
from fednotes.encoders.pretrained import compute_file_sha256

_NUMBER = re.compile(b"[0-9]{1,12}")  # a number of words or of columns
_NOT_FINITE = "a column is not a finite number"


@dataclass(frozen=True, slots=True, eq=False)
class WordVectors:
    """A frozen table of word vectors.

    Attributes:
        path: The file.
        index: The row of each word.
        table: (1 + words, dim) float32; row 0 is the vector of unknown words, all
            zeros.
    """

    path: Path
    index: dict[str, int]
    table: Tensor

    @property
    def dim(self) -> int:
        """Number of columns of the table."""
        return int(self.table.shape[1])

    def find_rows(self, forms: Sequence[str]) -> np.ndarray:
        """Return the row of each form, (forms,) int64.

        The form is looked up as written, then in lower case; unknown forms have row 0.
        """
        index = self.index
        rows = (index.get(form) or index.get(form.lower(), 0) for form in forms)
        return np.fromiter(rows, dtype=np.int64, count=len(forms))

    @property
    def sha256(self) -> str:
        """SHA-256 of the file's content."""
        return compute_file_sha256(self.path)


def load_vectors(path: str | Path, max_words: int = 0) -> WordVectors:
    """Read a text file of word vectors: `word number number …`, one word a line.

    An optional first line `count dimension` (word2vec) is skipped. If a word occurs
    twice, its first line is used. A file with the suffix .bin is in word2vec's binary
    format: the first line as above, then for each word its letters, a space and
    little-endian float32 numbers. The result is cached by path, modification time, size
    and `max_words`.

    Args:
        path: The file.
        max_words: The maximum number of words to read; 0 reads all.

    Raises:
        ModelError: The file is missing or empty, or a line has a different number of
            columns than the first line or a column that is not a finite number. The
            message names the path and the line or word.
    """
    try:
        file = expand_home(path).resolve()
        stat = file.stat()
        if file.is_dir():
            raise ModelError(f"{path}: word vectors must be a file, not a folder")
        return _load(file, stat.st_mtime_ns, stat.st_size, max_words)
    except (OSError, ValueError) as error:  # a NUL character is a ValueError
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(
            f"{path}: cannot read word vectors ({reason}): set word_vectors to "
            "a GloVe or word2vec text file"
        ) from None


@lru_cache(maxsize=4)
def _load(
    path: Path,
    mtime: int,  # noqa: ARG001 - a file that changed is read anew
    size: int,  # noqa: ARG001
    max_words: int,
) -> WordVectors:
    """Read a file of word vectors in the format that its suffix tells."""
    if path.suffix == ".bin":
        return _load_binary(path, max_words)
    return _load_text(path, max_words)


def _load_text(path: Path, max_words: int) -> WordVectors:
    """Read a text file of word vectors; see `load_vectors`."""
    index: dict[str, int] = {}
    with (
        open(path, "rb", opener=open_regular) as stream,
        np.errstate(over="ignore"),
    ):
        head = list(islice(stream, 2))
        dim, skipped = _read_layout(path, head)
        table = [np.zeros(dim, np.float32)]
        lines = chain(head[skipped:], stream)
        for number, line in enumerate(lines, start=1 + skipped):
            if max_words and len(table) > max_words:
                break
            word, values = _parse_line(f"{path}:{number}", line, dim)
            index.setdefault(word, len(table))
            table.append(values)

    stacked = torch.from_numpy(np.stack(table))
    is_finite = torch.isfinite(stacked).all(1)
    if not is_finite.all():
        line_number = int(is_finite.int().argmin()) + skipped
        raise _make_line_error(f"{path}:{line_number}", _NOT_FINITE, dim)
    return WordVectors(path, index, stacked)


def _read_layout(path: Path, head: list[bytes]) -> tuple[int, int]:
    """Return the number of columns, and of lines before the first word.

    Args:
        path: The file, for messages.
        head: The file's first two lines.
    """
    columns = head[0].split() if head else []
    if not columns and len(head) < 2:
        raise ModelError(f"{path}: no word vectors in this file")
    if len(columns) < 2:
        raise ModelError(
            f"{path}:1: a line must be a word and its numbers, separated by spaces"
        )
    is_count_and_dim = len(columns) == 2 and all(map(_NUMBER.fullmatch, columns))
    if is_count_and_dim and len(head) > 1 and len(head[1].split()) > 2:
        dim = int(columns[1])
        if dim > len(head[1]):  # each number takes at least a byte
            raise _make_line_error(
                f"{path}:2", f"fewer than {dim} numbers after the word", dim
            )
        return dim, 1
    return len(columns) - 1, 0


def _parse_line(place: str, line: bytes, dim: int) -> tuple[str, np.ndarray]:
    """Return a line's word and its numbers, (dim,).

    The line is split from the right, because some published files have words with
    spaces.
    """
    word, *numbers = line.rsplit(None, dim) or [b""]
    if len(numbers) < dim:
        raise _make_line_error(place, f"fewer than {dim} numbers after the word", dim)
    try:
        values = np.fromiter(map(float, numbers), np.float32, dim)
    except ValueError:
        raise _make_line_error(place, _NOT_FINITE, dim) from None
    pieces = word.rsplit(None, 1)
    if len(pieces) > 1 and _is_number(pieces[1]):
        raise _make_line_error(place, f"more than {dim} numbers after the word", dim)
    return word.decode("utf-8", "replace"), values


def _is_number(text: bytes) -> bool:
    """Return whether a text can be read as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _make_line_error(place: str, problem: str, dim: int) -> ModelError:
    """Return the error for a line whose form differs from that of the first one."""
    return ModelError(
        f"{place}: {problem}; the first line has a word and {dim} numbers"
    )


def _load_binary(path: Path, max_words: int) -> WordVectors:
    """Read a file in word2vec's binary format; see `load_vectors`."""
    index: dict[str, int] = {}
    with open(path, "rb", opener=open_regular) as stream:
        head = stream.readline(64).split()
        are_numbers = len(head) == 2 and all(map(_NUMBER.fullmatch, head))
        if not are_numbers or not int(head[1]):
            raise ModelError(
                f"{path}: the first line does not give the numbers of words and "
                "dimensions: expected a word2vec binary file"
            )
        count, dim = (int(part) for part in head)
        rows = min(count, max_words) if max_words else count
        # A word has at least one letter and is followed by a space.
        min_size = stream.tell() + rows * (4 * dim + 2)
        if min_size > path.stat().st_size:
            raise ModelError(
                f"{path}: too short for the {count:,} words of {dim} numbers that its "
                "first line announces: check that the file is complete"
            )
        table = np.zeros((1 + rows, dim), np.float32)
        for row in range(1, rows + 1):
            word = bytearray()
            while (letter := stream.read(1)) not in (b" ", b""):
                word += letter
            values = np.frombuffer(stream.read(4 * dim), "<f4")
            if len(values) < dim or not np.isfinite(values).all():
                raise ModelError(f"{path}: word {row}: expected {dim} finite numbers")
            index.setdefault(word.decode("utf-8", "replace").strip("\n"), row)
            table[row] = values
    return WordVectors(path, index, torch.from_numpy(table))
