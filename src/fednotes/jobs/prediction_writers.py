"""Write documents with predicted mentions into one open file, one by one."""

from __future__ import annotations

import csv
import io
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from typing import IO, Any

from fednotes.core.types import Document, TagSet
from fednotes.data.formats import FORMATS, parquet
from fednotes.data.formats.jsonl import to_json, to_record
from fednotes.data.formats.omop import NLP_COLUMNS, list_nlp_rows

# Formats of one file, with the suffixes of their files.
SUFFIXES = {
    "jsonl": "jsonl",
    "csv": "csv",
    "conll": "conll",
    "parquet": "parquet",
    "omop": "csv",
    "omop-parquet": "parquet",
}
BINARY = ("parquet", "omop-parquet")  # formats that a terminal cannot show
_GROUP_ROWS = 1000  # rows of a Parquet file that are in memory at a time
_CSV_COLUMNS = (
    "note_id",
    "patient",
    "visit",
    "start",
    "end",
    "text",
    "label",
    "confidence",
)  # columns of CSV, with a row for each mention
_WHOLE_NUMBERS = (
    "note_nlp_id",
    "note_id",
    "section_concept_id",
    "note_nlp_concept_id",
    "note_nlp_source_concept_id",
)  # columns of NOTE_NLP


@dataclass(frozen=True)
class FileFacts:
    """What a file of predictions needs to know beside its documents.

    Attributes:
        types: The entity types of the model.
        nlp_date: The date of rows of NOTE_NLP, such as "2026-01-31".
        first_mention: The number of the file's first mention, from 1 over all files.
    """

    types: Sequence[str]
    nlp_date: str
    first_mention: int = 1


def format_json_line(document: Document) -> str:
    """Return a document as a JSON line.

    The line has the project's own format, with the key "visit" beside "patient" if the
    note has a visit.
    """
    meta = dict(document.meta)
    visit = meta.pop("visit", None)
    if visit is None:
        return f"{to_json(document, to_record(document))}\n"
    record = to_record(replace(document, meta=meta))
    return f"{to_json(document, {**record, 'visit': visit})}\n"


class DocumentWriter(ABC):
    """Writes documents into an open file.

    Attributes:
        notes: The number of notes so far.
        mentions: The number of mentions so far.
    """

    def __init__(self, file: IO[bytes], facts: FileFacts) -> None:
        self.notes = 0
        self.mentions = 0
        self._file = file
        self._facts = facts

    def add(self, document: Document) -> None:
        """Write one document.

        Raises:
            DataError: The format cannot represent it.
        """
        self._write(document)
        self.notes += 1
        self.mentions += len(document.spans)

    def finish(self) -> None:
        """Write what the format has after its documents; the file stays open."""
        self._file.flush()

    def discard(self) -> None:  # noqa: B027 - most writers have nothing to do
        """Write nothing more: the file will not be used."""

    @abstractmethod
    def _write(self, document: Document) -> None:
        """Write one document."""

    @property
    def _next_mention(self) -> int:
        """The number of the next mention, counted from 1 over all files."""
        return self._facts.first_mention + self.mentions


class _JsonWriter(DocumentWriter):
    """Writes JSON lines."""

    def _write(self, document: Document) -> None:
        self._file.write(format_json_line(document).encode("utf-8"))


class _CsvWriter(DocumentWriter):
    """Writes CSV with a header and a row for each mention."""

    def __init__(self, file: IO[bytes], facts: FileFacts) -> None:
        super().__init__(file, facts)
        self._write_row(_CSV_COLUMNS)

    def _write(self, document: Document) -> None:
        visit = document.meta.get("visit")
        for span in document.spans:
            self._write_row(
                [
                    document.id,
                    document.patient,
                    visit,
                    span.start,
                    span.end,
                    document.text[span.start : span.end],
                    span.label,
                    span.confidence,
                ]
            )

    def _write_row(self, cells: Sequence[object]) -> None:
        """Write one row of CSV; a missing value is an empty cell."""
        buffer = io.StringIO(newline="")
        csv.writer(buffer, lineterminator="\n").writerow(cells)
        self._file.write(buffer.getvalue().encode("utf-8"))


class _ConllWriter(DocumentWriter):
    """Writes CoNLL."""

    def _write(self, document: Document) -> None:
        for lines in FORMATS["conll"].make_document_lines([document]):
            self._file.write("".join(f"{line}\n" for line in lines).encode("utf-8"))


class _NlpCsvWriter(DocumentWriter):
    """Writes NOTE_NLP as CSV."""

    def __init__(self, file: IO[bytes], facts: FileFacts) -> None:
        super().__init__(file, facts)
        self._write_row(NLP_COLUMNS)

    def _write(self, document: Document) -> None:
        rows = list_nlp_rows(document, self._next_mention, self._facts.nlp_date)
        for row in rows:
            self._write_row([row.get(name, "") for name in NLP_COLUMNS])

    def _write_row(self, cells: Sequence[str]) -> None:
        """Write one row of CSV."""
        buffer = io.StringIO(newline="")
        csv.writer(buffer, quoting=csv.QUOTE_ALL, lineterminator="\n").writerow(cells)
        self._file.write(buffer.getvalue().encode("utf-8"))


class _ParquetWriter(DocumentWriter):
    """Writes Parquet in groups of rows."""

    def __init__(self, file: IO[bytes], facts: FileFacts) -> None:
        super().__init__(file, facts)
        self._arrow = parquet.import_arrow()
        self._schema = self._make_schema()
        self._rows: list[dict[str, Any]] = []
        self._table = self._arrow.parquet.ParquetWriter(file, self._schema)

    def _make_schema(self) -> Any:
        """Return the schema of the file's columns."""
        return parquet.make_table_schema(self._arrow, TagSet(tuple(self._facts.types)))

    def _write(self, document: Document) -> None:
        self._rows += self._list_rows(document)
        if len(self._rows) >= _GROUP_ROWS:
            self._write_group()

    def _list_rows(self, document: Document) -> list[dict[str, Any]]:
        """Return the rows of one document."""
        return [parquet.to_row(document, TagSet(tuple(self._facts.types)))]

    def _write_group(self) -> None:
        """Write the rows that are in memory as a group of rows."""
        table = self._arrow.Table.from_pylist(self._rows, schema=self._schema)
        self._table.write_table(table)
        self._rows = []

    def finish(self) -> None:
        """Write the remaining rows and the file's footer."""
        if self._rows:
            self._write_group()
        self._table.close()

    def discard(self) -> None:
        """Keep pyarrow from writing a footer into a file that is closed by then."""
        self._table.is_open = False


class _NlpParquetWriter(_ParquetWriter):
    """Writes NOTE_NLP as Parquet."""

    def _make_schema(self) -> Any:
        arrow = self._arrow
        types = dict.fromkeys(NLP_COLUMNS, arrow.string())
        types |= dict.fromkeys(_WHOLE_NUMBERS, arrow.int64())
        types["nlp_date"] = arrow.date32()
        types["nlp_datetime"] = arrow.timestamp("us")
        return arrow.schema(list(types.items()))

    def _list_rows(self, document: Document) -> list[dict[str, Any]]:
        rows = list_nlp_rows(document, self._next_mention, self._facts.nlp_date)
        return [convert_nlp_row(row) for row in rows]


def convert_nlp_row(row: dict[str, str]) -> dict[str, Any]:
    """Return a row of NOTE_NLP with numbers and dates, and None for missing values."""
    typed: dict[str, Any] = {name: row.get(name) or None for name in NLP_COLUMNS}
    for name in _WHOLE_NUMBERS:
        if typed[name] is not None:
            typed[name] = int(typed[name])
    typed["nlp_date"] = date.fromisoformat(row["nlp_date"])
    # Required, and empty if a mention has no visible character.
    typed["lexical_variant"] = row["lexical_variant"]
    return typed


_WRITERS: dict[str, type[DocumentWriter]] = {
    "jsonl": _JsonWriter,
    "csv": _CsvWriter,
    "conll": _ConllWriter,
    "parquet": _ParquetWriter,
    "omop": _NlpCsvWriter,
    "omop-parquet": _NlpParquetWriter,
}


@contextmanager
def open_writer(
    format: str, file: IO[bytes], facts: FileFacts
) -> Iterator[DocumentWriter]:
    """Yield a writer into an open file; it is finished when the context ends.

    Args:
        format: One of `SUFFIXES`.
        file: The file; the caller closes it.
        facts: What the file needs to know.

    Raises:
        MissingExtra: The format needs a package that is not installed.
    """
    writer = _WRITERS[format](file, facts)
    try:
        yield writer
        writer.finish()
    except BaseException:
        writer.discard()
        raise
