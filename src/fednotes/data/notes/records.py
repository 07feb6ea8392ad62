"""Records of notes as their files give them, and the parts that every reader shares."""

from __future__ import annotations

import enum
import gzip
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from fednotes.core.errors import DataError
from fednotes.core.parsing import JsonError, parse_json
from fednotes.data.formats.files import open_file

LARGEST = 1 << 26  # characters of one note; more is a quote that was never closed

_ID = ("id", "note_id", "row_id")
PATIENT = ("patient", "patient_id", "subject_id", "person_id")
CATEGORY = ("category", "note_type", "note_title", "section_header", "type")
TEXT = ("text", "note_text", "note", "section_text")


@dataclass(frozen=True, slots=True)
class Record:
    """What a file says of one note."""

    id: str
    text: str
    patient: str | None
    category: str | None


class Skipped(enum.Enum):
    """A record that is no note."""

    ERROR = "marked as an error"
    EMPTY = "without text"


def open_bytes(path: Path) -> BinaryIO:
    """A file for reading (`open_file`), unpacked where its name ends in .gz."""
    file = open_file(path)
    if path.suffix.lower() != ".gz":
        return file
    unpacked = gzip.GzipFile(fileobj=file)
    unpacked.myfileobj = file  # type: ignore[assignment] # closed with it
    return cast(BinaryIO, unpacked)


# What a file that cannot be read to its end raises.
BROKEN = (OSError, EOFError, zlib.error)


def broken(path: Path, error: Exception) -> DataError:
    """The message for a file that cannot be read to its end."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return DataError(f"{path}: cannot read to its end ({reason}): is the file whole?")


def not_utf8(path: Path) -> DataError:
    """The message for bytes that are no UTF-8, with their line."""
    line = 0
    with open_bytes(path) as file:
        for line, data in enumerate(file, 1):  # noqa: B007 - used after the loop
            try:
                data.decode("utf-8")
            except UnicodeDecodeError:
                break
    return DataError.at(
        path,
        line,
        "a byte is not UTF-8: convert the file, for example with `iconv -f latin1 -t utf-8`",
    )


def lines_end(text: str) -> str:
    """The text with `\\n` at the end of its lines."""
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def stem(path: Path) -> str:
    """The file's name without what tells its format."""
    return path.name.removesuffix(".gz").rpartition(".")[0] or path.name


def text_record(path: Path, root: Path) -> Record:
    """A text file as a note; its id is its path below `root` without the suffix."""
    with open_bytes(path) as file:
        try:
            data = file.read(LARGEST + 1)
        except BROKEN as error:
            raise broken(path, error) from None
    if len(data) > LARGEST:
        raise DataError(f"{path}: more than {LARGEST:,} bytes in one note: give one file a note")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise not_utf8(path) from None
    name = path.relative_to(root).parent / stem(path) if path != root else Path(stem(path))
    return Record(name.as_posix(), lines_end(text), None, None)


def json_records(path: Path, column: str | None) -> Iterator[Record | Skipped]:
    """The notes of a JSONL file: keys `text`, `id`, `patient`, `category` and what is like them.

    A record that an annotator rejected (Prodigy's "answer") counts as an error.
    """
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            record = parse_json(line, strict=False)
        except JsonError as error:
            reason = f"no JSON ({error}): expected one whole object a line"
            raise DataError.at(path, number, reason) from None
        if not isinstance(record, dict):
            raise DataError.at(path, number, "the line is no JSON object")
        if record.get("answer", "accept") != "accept":
            yield Skipped.ERROR
            continue
        yield _json_record(path, number, record, column)


def holds_json(line: str, column: str | None) -> bool:
    """Whether a file's first line is a JSON object with a text."""
    if not line.startswith("{"):
        return False
    try:
        record = parse_json(line, strict=False)
    except JsonError:
        return False
    return any(key in record for key in ((column,) if column else TEXT))


def _json_record(path: Path, number: int, record: dict[str, Any], column: str | None) -> Record:
    key = column or next((k for k in TEXT if k in record), "text")
    text = record.get(key)
    if not isinstance(text, str):
        raise DataError.at(path, number, f'the key "{key}" is missing or no string')
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise DataError.at(path, number, "the text holds half of a surrogate pair")
    return Record(
        _value(record, _ID) or f"{stem(path)}:{number}",
        lines_end(text),
        _value(record, PATIENT),
        _value(record, CATEGORY),
    )


def _value(record: dict[str, Any], keys: tuple[str, ...]) -> str | None:
    """The first of the keys whose value says something."""
    for key in keys:
        value = record.get(key)
        if isinstance(value, str | int) and str(value).strip():
            return str(value).strip()
    return None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a UTF-8 file; none longer than a note may be."""
    with open_bytes(path) as file:
        number = 0
        while True:
            try:
                data = file.readline(LARGEST)
            except BROKEN as error:
                raise broken(path, error) from None
            if not data:
                return
            number += 1
            if len(data) == LARGEST:
                raise DataError.at(path, number, f"the line is longer than {LARGEST:,} bytes")
            try:
                line = data.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise not_utf8(path) from None
            yield number, line


def open_text(path: Path) -> io.TextIOWrapper:
    """A UTF-8 file for csv: line ends as they are, without byte-order mark."""
    return io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="")
