"""What every reader shares: the files of a corpus, text out of them, what is wrong with
it, ids.

A reader goes on behind what it cannot use; all of it is refused together, or left out
and counted:

    with problems.passing("mention", path, number):
        spans.append(parse(line))      # a DataError is noted, and this mention left out
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import os
import re
import shutil
import stat
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TextIO, cast, get_args

from fednotes.core import bounds
from fednotes.core.errors import (
    ConfigError,
    DataError,
    MissingExtra,
    Problem,
    nearest,
    needs,
)
from fednotes.core.parsing import JsonError, NotAFile, parse_json, regular, require_file
from fednotes.core.types import Document, Offsets, Span
from fednotes.data import encodings
from fednotes.data.text import normalise, tokenize

_HEAD = 1 << 16  # bytes that are enough to tell a format
UNANNOTATED = "texts without annotations"  # a kind of what is unread
_WHITE_SPACE = (
    1000  # characters of white space that a mention may have more than its form
)
WINDOWS = "texts with line ends of Windows"  # another: their line ends are not kept


def open_file(path: Path) -> BinaryIO:
    """A file for reading; a FIFO, a socket or a device is not waited for.

    Raises DataError for what is missing, no file, or may not be read.
    """
    try:
        return open(path, "rb", opener=regular)
    except FileNotFoundError:
        raise DataError.at(path, 0, "no such file") from None
    except NotAFile as error:
        raise DataError.at(path, 0, str(error.strerror)) from None
    except OSError as error:
        raise DataError.at(path, 0, f"cannot read: {error.strerror or error}") from None


BROKEN = (OSError, EOFError, zlib.error)  # what a file that is not whole raises
PACKED = (".gz", ".zst")  # endings of the names of packed files


def open_bytes(path: Path) -> BinaryIO:
    """Open a file for reading, unpacked where its name ends in .gz or .zst.

    Raises:
        DataError: As `open_file`.
        MissingExtra: A .zst file, and the extra "arrow" is not installed.
    """
    suffix = path.suffix.lower()
    if suffix == ".zst":
        return _zstandard(path)
    file = open_file(path)
    if suffix != ".gz":
        return file
    return io.BufferedReader(_Unpacked(gzip.GzipFile(fileobj=file), file, path))


def _zstandard(path: Path) -> BinaryIO:
    with needs("pyarrow", "arrow"):
        import pyarrow
    file = open_file(path)
    stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd")
    return io.BufferedReader(_Unpacked(stream, file, path))


class _Unpacked(io.RawIOBase):
    """The unpacked bytes of a packed file, which is closed with this one.

    Reading raises DataError where the bytes are far more than a text would give: a
    bomb is noticed while it is unpacked, after `bounds.PACKED_FREE` bytes.
    """

    def __init__(self, stream: Any, file: BinaryIO, path: Path) -> None:
        self._stream, self._file, self._path = stream, file, path
        self._size = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self._size += len(data)
        if self._size > bounds.PACKED_FREE:
            self._require_growth_of_text()
        return len(data)

    def _require_growth_of_text(self) -> None:
        packed = self._file.tell()
        if self._size > bounds.PACKED_RATIO * packed:
            raise DataError.at(
                self._path,
                0,
                f"unpacked it grows more than {bounds.PACKED_RATIO}-fold, which no text "
                "does: unpack the file yourself if you trust it",
            )

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
            self._file.close()
        super().close()


@contextmanager
def open_seekable(path: Path) -> Iterator[BinaryIO]:
    """Open a file in which a reader moves to and fro; a packed one is unpacked on disk
    first.

    Raises:
        DataError: As `open_file`, or a packed file is not whole.
    """
    if path.suffix.lower() not in PACKED:
        with open_file(path) as file:
            yield file
        return
    # without a name: it is gone with its process
    with tempfile.TemporaryFile() as unpacked:
        try:
            with open_bytes(path) as packed:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
        except BROKEN as error:
            raise broken(path, error) from None
        unpacked.seek(0)
        yield cast(BinaryIO, unpacked)


def unpacked_name(path: Path) -> Path:
    """Return a path without the ending that says how the file is packed."""
    return path.with_suffix("") if path.suffix.lower() in PACKED else path


@contextmanager
def placed(path: Path, line: int = 0) -> Iterator[None]:
    """Give a DataError of the block this place, if it names none."""
    try:
        yield
    except DataError as error:
        raise (
            error if error.problems else DataError.at(path, line, str(error))
        ) from None


def broken(path: Path, error: Exception) -> DataError:
    """The message for a file that cannot be read to its end."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return DataError(f"{path}: cannot read to its end ({reason}): is the file whole?")


def read_text(path: Path, *, empty: bool = False, exact: bool = False) -> str:
    """A file's text, without byte-order mark and with `\\n` line ends.

    Its encoding is that of its byte-order mark, else UTF-8 or the one that the user
    named (`encodings.reading_as`). empty: whether a file without text is fine. exact:
    give the characters as they are, the mark among them.
    Raises DataError for a file that is missing, empty, larger than `bounds.FILE` or not
    text in that encoding.
    """
    data = _content(path)
    try:
        text, mark = encodings.decode(data, encodings.named_encoding())
    except DataError as error:
        raise DataError.at(path, getattr(error, "line", 0), str(error)) from None
    if not empty and not text.strip("\ufeff \t\r\n"):
        raise DataError.at(path, 0, "the file is empty")
    if exact:
        return f"\ufeff{text}" if mark else text
    return text.replace("\r\n", "\n")


def _content(path: Path) -> bytes:
    """Return the bytes of a file of at most `bounds.FILE` bytes, unpacked."""
    packed = path.suffix.lower() in PACKED
    try:
        with open_bytes(path) as file:
            data = file.read(bounds.FILE + 1)
    except BROKEN as error:
        if packed:
            raise broken(path, error) from None
        reason = getattr(error, "strerror", None) or error
        raise DataError.at(path, 0, f"cannot read: {reason}") from None
    if len(data) > bounds.FILE:
        size = "unpacked it has" if packed else "it has"
        told = f"{size} more than {bounds.FILE:,} bytes: cut it into several files"
        raise DataError.at(path, 0, told)
    return data


def encoding_for(path: Path, named: str) -> tuple[str, int]:
    """Return the codec of a text file, and the length of its byte-order mark.

    Args:
        path: The file; it is read to its end only if an encoding is named that contains
            ASCII.
        named: The encoding that the user named, or "auto".

    Raises:
        DataError: The file is missing, not whole or no text.
    """
    try:
        with open_bytes(path) as file:
            head = file.read(encodings.HEAD)
            return encodings.codec_of_stream(file, head, named)
    except DataError as error:
        raise error if error.problems else DataError.at(path, 0, str(error)) from None
    except BROKEN as error:
        raise broken(path, error) from None


@contextmanager
def open_text(
    path: Path, named: str, newline: str = "\n", errors: str = "strict"
) -> Iterator[io.TextIOWrapper]:
    """Open a file as text without its byte-order mark, unpacked where its name says it
    is packed.

    Args:
        path: The file.
        named: The encoding that the user named, or "auto".
        newline: As of Python's `open`.
        errors: As of Python's `open`.

    Raises:
        DataError: The file is missing, not whole, no text, or a byte does not fit its
            encoding; with the line of that byte.
    """
    codec, mark = encoding_for(path, named)
    with io.TextIOWrapper(_behind(path, mark), codec, errors, newline) as file:
        try:
            yield file
        except UnicodeDecodeError:
            line, position, binary = _place_of_odd_byte(path, codec, mark)
            told = encodings.undecodable(
                f"byte {position}", codec, named, binary=binary
            )
            raise DataError.at(path, line, told) from None
        except BROKEN as error:
            raise broken(path, error) from None


def _behind(path: Path, length: int) -> BinaryIO:
    """Open a file behind its byte-order mark of that length."""
    file = open_bytes(path)
    try:
        file.read(length)
    except BROKEN as error:
        file.close()
        raise broken(path, error) from None
    return file


def _place_of_odd_byte(path: Path, codec: str, mark: int) -> tuple[int, int, bool]:
    """Return where the first byte is that a codec does not decode.

    Returns:
        Its line, its position in the file, and whether NUL bytes are near it.
    """
    decoder = codecs.getincrementaldecoder(codec)()
    line = 1
    position = mark
    with _behind(path, mark) as file:
        more = True
        while more:
            data = file.read(_HEAD)
            more = bool(data)
            try:
                line += decoder.decode(data, final=not more).count("\n")
            except UnicodeDecodeError as error:
                before = error.object[: error.start]
                line += before.decode(codec, "replace").count("\n")
                pending = len(error.object) - len(data)  # bytes of the piece before
                is_binary = b"\0" in data and encodings.contains_ascii(codec)
                return line, position - pending + len(before), is_binary
            position += len(data)
    return 0, 0, False


def bounded_lines(
    file: TextIO, path: Path, most: int | None = None, expected: str = ""
) -> Iterator[str]:
    """Yield the lines of a text with their ends.

    Args:
        file: The text.
        path: Its file, for messages.
        most: Characters that a line may have; `bounds.LINE` if it is None.
        expected: What a line holds, for the message.

    Raises:
        DataError: A line has more characters; no more than these are held.
    """
    most = bounds.LINE if most is None else most
    number = 0
    while line := file.readline(most + 1):
        number += 1
        if len(line) > most:
            told = f"the line has more than {most:,} characters"
            expected = expected or "one record a line"
            told = f"{told}: expected {expected}; is the file of this format?"
            raise DataError.at(path, number, told)
        yield line


def lines(
    path: Path, *, empty: bool = False, most: int | None = None, expected: str = ""
) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text without their ends, and their numbers from 1.

    One line is in memory at a time. The encoding is that of `read_text`.

    Args:
        path: The file.
        empty: Whether a file without text is fine.
        most: As of `bounded_lines`.
        expected: As of `bounded_lines`.

    Raises:
        DataError: The file is missing, empty, no text, or has a line that is too long.
    """
    is_empty = True
    with open_text(path, encodings.named_encoding()) as file:
        for number, line in enumerate(bounded_lines(file, path, most, expected), 1):
            is_empty = is_empty and not line.strip("\ufeff \t\r\n")
            yield number, line.removesuffix("\n").removesuffix("\r")
    if is_empty and not empty:
        raise DataError.at(path, 0, "the file is empty")


def head(path: Path) -> list[str]:
    """The first non-blank lines of a file; none if it is unreadable or no text."""
    try:
        with open_bytes(path) as file:
            data = file.read(_HEAD)
        codec, mark = encodings.codec_of(data, encodings.named_encoding())
    except (DataError, MissingExtra, *BROKEN):
        return []
    lines = data[mark:].decode(codec, errors="replace").split("\n")
    if len(data) == _HEAD and len(lines) > 1:
        lines.pop()  # cut in its middle
    return [line.rstrip("\r") for line in lines if line.strip()]


def begins(path: Path, heads: tuple[bytes, ...]) -> bool:
    """Whether a file begins with one of these; False if it cannot be read."""
    with suppress(DataError, MissingExtra, *BROKEN), open_bytes(path) as file:
        return file.read(6).startswith(heads)
    return False


def first_line(path: Path) -> str:
    """The first non-blank line of a file; "" if there is none."""
    return next(iter(head(path)), "")


def numbered(path: Path, *, empty: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the lines that hold something, and their numbers. Raises as `lines`."""
    return ((number, line) for number, line in lines(path, empty=empty) if line.strip())


def listing(
    path: Path, accepts: Callable[[Path], bool], name: str, below: bool = False
) -> list[Path]:
    """The files of one format: `path` itself if it is a file, else those in the folder.

    Only where none lies in the folder itself are the folders below it searched; with
    `below` always. Other files (a README, a licence) are passed over. Raises DataError
    where none is found.
    """
    if not os.path.exists(path):
        raise DataError(f"{path}: no such file or folder")
    if not path.is_dir():
        return [path]
    found = [] if below else [p for p in visible(path) if accepts(p)]
    found = found or [p for p in visible(path, True) if accepts(p)]
    if not found:
        raise DataError(f"{path}: no file in this folder looks like {name}")
    return found


def visible(folder: Path, below: bool = False, named: str = "") -> list[Path]:
    """Files of a folder in a fixed order, hidden ones left out; links to folders are no
    folders.

    named: what their names have in them, in lower case; no other file is looked at.
    Raises DataError for a link that leads out of the folder, and for what is no file.
    """
    try:
        found = sorted(folder.rglob("*") if below else folder.iterdir())
        found = [p for p in found if named in p.name.lower()]
        shown = [
            p
            for p in found
            if not any(q[0] == "." for q in p.relative_to(folder).parts)
        ]
        return [path for path in shown if is_inside(path, folder)]
    except OSError as error:
        raise DataError(
            f"{error.filename or folder}: cannot read: {error.strerror}"
        ) from None


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path below a corpus's folder is a file of the corpus; False for a
    folder.

    The folder itself may be a link: whoever named it knows where it leads.
    Raises DataError for a link that leads out of the folder, and for what is no file,
        OSError.
    """
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
            told = f"a link that leads out of {folder}: put a copy of what it leads to there"
            raise DataError.at(path, 0, told)
        if not path.exists():
            return False  # it leads nowhere
        mode = path.stat().st_mode
    try:
        require_file(mode)
    except NotAFile as error:
        raise DataError.at(path, 0, str(error.strerror)) from None
    return stat.S_ISREG(mode)


def lying(name: str, folders: Iterable[Path]) -> Path | None:
    """The first file of that name in one of the folders.

    Raises DataError as `is_inside`.
    """
    places = (folder / name for folder in folders)
    return next(
        (p for p in places if os.path.lexists(p) and is_inside(p, p.parent.parent)),
        None,
    )


def laid_out(sentences: Sequence[Sequence[str]]) -> tuple[str, Offsets, Offsets]:
    """Words joined by a space and sentences by a line end: the text, and the offsets of
    its sentences and of its words."""
    bounds: list[tuple[int, int]] = []
    tokens: list[tuple[int, int]] = []
    at = 0
    for words in sentences:
        begin = at
        for word in words:
            tokens.append((at, at + len(word)))
            at += len(word) + 1
        bounds.append((begin, at - 1))
    return "\n".join(map(" ".join, sentences)), tuple(bounds), tuple(tokens)


def named(paths: Sequence[Path]) -> dict[str, Path]:
    """Paths by their last part, or as they are where two are alike. Raises ConfigError
    for one that is given twice."""
    names = [os.path.basename(os.path.abspath(path)) for path in paths]
    found = dict(
        zip(
            map(str, paths) if len({*names}) < len(names) else names, paths, strict=True
        )
    )
    if len(found) < len(paths):
        raise ConfigError("a path is given twice: each stands for another part")
    return found


def in_text(start: int, end: int, length: int) -> tuple[int, int]:
    """The offsets of a stretch of a text of that length.

    Raises DataError if it is none.
    """
    if not 0 <= start < end <= length:
        raise DataError(
            f"{start}:{end} is no stretch of the text ({length} characters)"
        )
    return start, end


def table_rows(
    lines: Iterable[str], path: Path, first: int = 1, delimiter: str = ","
) -> Iterator[tuple[int, list[str]]]:
    """The rows of csv that hold something, and the line that each begins on.

    first: the number of the first line. Raises DataError, behind which nothing can be
        read.
    """
    # The default, 131,072, is less than a long stay's summary.
    csv.field_size_limit(max(bounds.LINE, csv.field_size_limit()))
    measured = _Measured(lines, path, first)
    reader = csv.reader(measured, delimiter=delimiter, strict=True)
    line = first
    try:
        for row in reader:
            if row:
                yield line, row
            line = first + reader.line_num
            measured.begin_row(line)
    except csv.Error as error:
        told = f"the row is no csv ({error})"
        if "field larger" in str(error):
            told = f"a field has more than {bounds.LINE:,} characters: is a quote not closed?"
        elif "unexpected end" in str(error):
            told = "the file ends inside a quoted field that begins in this row: it is broken off"
        raise DataError.at(path, line, told) from None


class _Measured(Iterator[str]):
    """Lines of a table; a row of more than `bounds.LINE` characters, in all, is
    refused."""

    def __init__(self, lines: Iterable[str], path: Path, first: int) -> None:
        self._lines, self._path = iter(lines), path
        self.begin_row(first)

    def begin_row(self, line: int) -> None:
        """Count from here on; the row begins at this line."""
        self._begin, self._length = line, 0

    def __next__(self) -> str:
        line = next(self._lines)
        self._length += len(line)
        if self._length > bounds.LINE:
            told = f"the row has more than {bounds.LINE:,} characters: is a quote not closed?"
            raise DataError.at(self._path, self._begin, told)
        return line


def mixed(folder: Path, counts: Mapping[str, int]) -> DataError:
    """The message for a folder with files of several formats. counts: of the files, by
    format."""
    held = ", ".join(f"{name} ({n} files)" for name, n in sorted(counts.items()))
    return DataError(f"{folder}: the folder mixes formats: {held}; name one of them")


def json_value(line: str) -> Any:
    """What a line of JSONL holds. Raises DataError."""
    try:
        return parse_json(line, strict=False)
    except JsonError as error:
        raise DataError(
            f"no JSON ({error}): expected one whole object a line"
        ) from None


# A string that is cut off ends the text, or it would be tried from each quote in it.
_MARK = re.compile(r'"((?:[^"\\]|\\.)*+)(?:"(\s*:)?|\\?\Z)|[\[{]|[\]}]', re.DOTALL)


def json_keys(path: Path) -> frozenset[str]:
    """The names in a file's first JSON object, or in the first of its array ("[" is one
    more then), as far as its first lines show them."""
    text = "\n".join(head(path)).lstrip()
    if text[:1] not in ("[", "{"):
        return frozenset()
    found, depth = {"["} if text[0] == "[" else set(), 0
    base = 1 + len(found)
    for mark in _MARK.finditer(text):
        first = mark[0][0]
        depth += (first in "[{") - (first in "]}")
        if first in "]}" and depth < base:
            break
        if mark[2] and depth == base:
            found.add(mark[1])
    return frozenset(found)


def json_file(path: Path) -> Any:
    """The JSON value that a file is. Raises DataError."""
    try:
        return parse_json(read_text(path), strict=False)
    except JsonError as error:
        told = f"no JSON that can be read ({error}); a large corpus may be a folder of files"
        raise DataError.at(path, error.line, told) from None


def json_rows(path: Path) -> Iterator[Any]:
    """Yield the values of a JSON file: of its lines, of its array, or the one that it
    is.

    JSON lines are read one by one.
    """
    try:
        parse_json(next(line for _, line in numbered(path)), strict=False)
    except JsonError:
        whole = json_file(path)
        yield from whole if isinstance(whole, list) else [whole]
        return
    rows = (_json_of_line(path, number, line) for number, line in numbered(path))
    first = next(rows)
    second = next(rows, None)
    if second is None:
        yield from first if isinstance(first, list) else [first]
        return
    yield first
    yield second
    yield from rows


def _json_of_line(path: Path, number: int, line: str) -> Any:
    with placed(path, number):
        return json_value(line)


def cut(document: Document) -> list[tuple[int, int, bool]]:
    """A text cut into words (start, end, whether a blank follows that is no word) that
    make all of it again, as spaCy cuts: every end of a mention is an end of a word."""
    pieces = [piece for span in document.spans for piece in span.pieces]
    starts, ends = ({piece[i] for piece in pieces} for i in (0, 1))
    text, tokens = document.text, document.tokens or tokenize(document.text).tolist()
    edges = sorted({0, len(text), *starts, *ends}.union(*tokens))
    words: list[tuple[int, int, bool]] = []
    for start, end in pairwise(edges):
        blank = text[start] == " " and start not in starts and start + 1 not in ends
        if blank and words and not words[-1][2] and not text[start - 1].isspace():
            words[-1] = (*words[-1][:2], True)
            start += 1
        if start < end:
            words.append((start, end, False))
    return words


def json_text(record: Any, *keys: str) -> str | None:
    """The first of the keys that a record has: it holds its text. None for a record
    that an annotator rejected or ignored (Prodigy's "answer"). Raises DataError where
    there is no text."""
    if not isinstance(record, dict):
        raise DataError("the line is no JSON object")
    if record.get("answer", "accept") != "accept":
        return None
    key = next((key for key in keys if key in record), keys[0])
    text = record.get(key)
    if not isinstance(text, str):
        raise DataError(f'the key "{key}" is missing or no string')
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise DataError("the text holds half of a surrogate pair")
    return key


def mismatched(
    path: Path, text: str, mentions: Sequence[tuple[Span, str, int]], what: str
) -> dict[str, int]:
    """The number of mentions (span, their text by the file, line) whose text is not
    what their offsets hold, as a document's meta. Raises DataError where most are so:
    another text."""
    rows = (
        (normalise(text[s.start : s.end]) == normalise(form), at)
        for s, form, at in mentions
    )
    wrong = [line for right, line in rows if not right]
    if 2 * len(wrong) > len(mentions):
        message = (
            f"{len(wrong)} of {len(mentions)} {what} are not what the text holds there"
        )
        raise DataError.at(path, wrong[0], message)
    return {"mismatched": len(wrong)} if wrong else {}


def same_text(left: str, right: str) -> bool:
    """Whether two surface strings are equal but for runs of whitespace."""
    return left == right or left.split() == right.split()


def is_longer(pieces: Iterable[tuple[int, int]], form: str) -> bool:
    """Return whether pieces of a text are far longer than what they should hold.

    Checked before the text is cut out, so that many long mentions take no long time.
    """
    length = sum(end - start for start, end in pieces)
    return length > 2 * len(form) + _WHITE_SPACE


# ---- what is wrong -------------------------------------------------------------------

OnError = Literal["refuse", "skip"]


def refuses(on_error: str) -> bool:
    """Whether a corpus with something wrong in it is refused.

    Raises ConfigError for no OnError.
    """
    if on_error not in (known := get_args(OnError)):
        raise ConfigError(f"on_error = {on_error!r}; {nearest(on_error, known)}")
    return on_error == "refuse"


_KEPT = 10_000  # problems that are kept one by one; more are counted alone
DERIVED = -1  # the line of an id that the reader made


class Problems:
    """What a reader could not use, in the order of the files.

    found: each problem, the first 10,000. counts: all, by what was left out. repeated:
    documents whose id an earlier one has; they are read. without: texts that have no
    annotation file.
    unread: what was passed over of items that are read, by kind: nothing is wrong with
        it.
    """

    def __init__(self) -> None:
        self.found: list[Problem] = []
        self.repeated: list[Problem] = []
        self.counts: Counter[str] = Counter()
        self.unread: Counter[str] = Counter()
        self.without: list[Path] = []

    @property
    def number(self) -> int:
        """How many there are."""
        return self.counts.total()

    def add(self, error: DataError, kind: str) -> None:
        """Note what is wrong. kind: what is left out for it."""
        known = error.problems or (Problem("", 0, kind, str(error)),)
        self.counts[kind] += len(known)
        room = max(0, _KEPT - len(self.found))
        self.found += [replace(problem, kind=kind) for problem in known[:room]]

    def repeat(self, path: Path, line: int) -> None:
        """Note a document whose id an earlier one has."""
        if len(self.repeated) < _KEPT:
            told = "an earlier document has the same id"
            self.repeated.append(Problem(str(path), line, "repeated_id", told))

    def include(self, other: Problems) -> None:
        """Take in what another reader noted."""
        self.found += other.found[: max(0, _KEPT - len(self.found))]
        self.repeated += other.repeated[: max(0, _KEPT - len(self.repeated))]
        self.counts.update(other.counts)
        self.unread.update(other.unread)
        self.without += other.without

    def note(self, kind: str, path: Path, line: int, message: str) -> None:
        """Note what is wrong at a line of a file."""
        self.add(DataError.at(path, line, message), kind)

    @contextmanager
    def passing(
        self, kind: str, path: Path, line: int = 0, item: str = ""
    ) -> Iterator[list[DataError]]:
        """Note a DataError of the block, at this place if it names none, and go on
        behind it.

        item: what is told before the message. Gives a list that holds the error then.
        """
        wrong: list[DataError] = []
        try:
            yield wrong
        except DataError as error:
            wrong.append(error)
            placed = (
                error if error.problems else DataError.at(path, line, f"{item}{error}")
            )
            self.add(placed, kind)

    def refuse(
        self, on_error: OnError = "refuse", kept: Sequence[Document] = ()
    ) -> None:
        """Raises DataError of all problems, if there is one; with "skip" only where no
        document is kept."""
        if (refuses(on_error) or not kept) and self.found:
            raise DataError.of(self.found, self.number)

    def __str__(self) -> str:
        """What was left out, such as "2 lines, 1 mention"."""
        return ", ".join(
            f"{n:,} {kind}{'s' if n > 1 else ''}" for kind, n in self.counts.items()
        )


class Found(NamedTuple):
    """A document and where it begins.

    line: where its id stands; 0 is a whole file, DERIVED an id that no file gave. at:
    the line that messages name where `line` is none.
    """

    document: Document
    path: Path
    line: int = 0
    at: int = 0


ReadFile = Callable[[Path, Problems], Iterable[Found]]


def gather(
    files: Iterable[Path],
    read_file: ReadFile,
    problems: Problems,
    kind: str = "file",
) -> tuple[Document, ...]:
    """The documents of several files. kind: what is left out where one cannot be read."""
    found: list[Found] = []
    types = set[str]()
    for file in files:
        with problems.passing(kind, file):
            found += list(within_bounds(read_file(file, problems), problems, types))
    return unique(found, problems)


def stream_files(
    files: Iterable[Path],
    read_file: ReadFile,
    problems: Problems,
    kind: str = "file",
) -> Iterator[Found]:
    """Yield the documents of several files as they are read, under the ids that they
    have.

    Args:
        files: The files.
        read_file: Yields the documents of a file.
        problems: Takes note of what is wrong.
        kind: What is left out where a file cannot be read, from the error on.
    """
    types = set[str]()
    for file in files:
        with problems.passing(kind, file):
            yield from within_bounds(read_file(file, problems), problems, types)


def within_bounds(
    found: Iterable[Found], problems: Problems, types: set[str]
) -> Iterator[Found]:
    """Yield the documents that models can use; note those of an impossible size.

    Args:
        found: The documents.
        problems: Takes note of the others.
        types: Holds the entity types of the corpus so far.

    Raises:
        DataError: The corpus has more than `bounds.ENTITY_TYPES` entity types.
    """
    for one in found:
        document, line = one.document, max(one.at, one.line, 0)
        if told := _beyond_bounds(document):
            problems.note("document", one.path, line, told)
            continue
        types.update(span.label for span in document.spans)
        if len(types) > bounds.ENTITY_TYPES:
            told = f"more than {bounds.ENTITY_TYPES:,} entity types"
            told = f"{told}: is what stands there a type, or text?"
            raise DataError.at(one.path, line, told)
        yield one


def _beyond_bounds(document: Document) -> str:
    """Return what a document has too much of, and a remedy; "" for a usable one."""
    amounts = (
        (len(document.text), bounds.NOTE, "characters", "cut it into notes"),
        (len(document.spans), bounds.MENTIONS, "mentions", "is it one note?"),
        (len(document.tokens), bounds.TOKENS, "tokens", "cut it into notes"),
    )
    for amount, most, what, remedy in amounts:
        if amount > most:
            return f"the document has more than {most:,} {what}: {remedy}"
    return ""


def unique_ids(documents: Iterable[Document]) -> tuple[Document, ...]:
    """The documents, later ones of the same id renamed `id~2`, `id~3` …"""
    return unique((Found(document, Path()) for document in documents), Problems())


def unique(found: Iterable[Found], problems: Problems) -> tuple[Document, ...]:
    """The documents, later ones of the same id renamed `id~2`, `id~3` …, which is
    noted."""
    given = list(found)
    taken = {one.document.id for one in given}
    seen: Counter[str] = Counter()
    result: list[Document] = []
    for document, path, line, _ in given:
        if document.id in seen:
            if line != DERIVED:
                problems.repeat(path, line)
            name, number = document.id, seen[document.id] + 1
            while f"{name}~{number}" in taken:
                number += 1
            document = replace(document, id=f"{name}~{number}")
            taken.add(document.id)
            seen[name] = number
        seen[document.id] = max(1, seen[document.id])
        result.append(document)
    return tuple(result)
