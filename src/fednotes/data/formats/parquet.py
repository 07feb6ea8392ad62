"""Parquet and Arrow files of Hugging Face's `datasets`. Needs the extra "arrow".

Columns: id, text, tokens, ner_tags (the names of its ClassLabel are in the schema's
metadata), spans, and "fednotes", JSON of everything else. Tables with only tokens and
ner_tags and tables of BigBIO's rows (`bigbio`) can be read as well. Both forms of Arrow
files are read, stream and file; only Parquet is written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fednotes.core import bounds
from fednotes.core.errors import DataError, needs
from fednotes.core.parsing import as_mapping
from fednotes.core.store import write_out
from fednotes.core.types import Document, TagSet
from fednotes.data.formats import bigbio, conll, jsonl
from fednotes.data.formats.arrow_buffers import check_unpacked_sizes
from fednotes.data.formats.files import open_seekable, starts_with
from fednotes.data.formats.folders import find_corpus_files
from fednotes.data.formats.gathering import ReadDocument, gather_documents
from fednotes.data.formats.json_files import parse_json_line
from fednotes.data.formats.parquet_pages import (
    ColumnChunk,
    ColumnSize,
    compute_footer_limits,
    measure_column,
    read_column_chunks,
)
from fednotes.data.formats.problems import Problems
from fednotes.data.formats.row_sizes import (
    OBJECT_SIZE,
    find_stated_widths,
    has_shared_values,
    measure_value,
    slice_within,
)
from fednotes.data.tags import encode_tags, flatten, list_types
from fednotes.data.text import tokenize

LOOSE = 0
_SIGNATURES = (b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")
# PAR1 is also a gene: a text that begins with this word is not a Parquet file.
_GENE = tuple(b"PAR1" + end for end in (b"\t", b" ", b"\n", b"\r", b",", b"-"))
_UNREADABLE = "not a readable Parquet or Arrow file: check that the file is complete"
_MAX_BATCH = 1024  # maximum number of rows that are unpacked at a time
_READ_SIZE = 2**20  # bytes of a column read at a time
_SMALL = 2**20  # bytes of a list column that may be unpacked without precautions
_GROUP_ROWS = 5000  # rows per group when writing


def import_arrow() -> Any:
    """Return pyarrow.

    Raises:
        MissingExtra: It is not installed.
    """
    with needs("pyarrow", "arrow"):
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    return pyarrow


# ---- reading -------------------------------------------------------------------------


def accepts(path: Path) -> bool:
    """Return whether the file begins like Parquet or Arrow."""
    return starts_with(path, _SIGNATURES) and not starts_with(path, _GENE)


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """Return a document per row.

    Rows without one tag for each token are added to `problems`.
    """
    files = find_corpus_files(path, accepts, "Parquet or Arrow")
    return gather_documents(files, _read_file, problems)


def _read_file(path: Path, problems: Problems) -> Iterable[ReadDocument]:
    """Return the documents of a file, whose columns decide how its rows are read."""
    schema = _read_schema(path)
    columns = set(schema.names)
    records = (
        dict(zip(schema.names, row, strict=True))
        for row in read_rows(path, schema.names)
    )
    if {"passages", "entities"} <= columns:
        return jsonl.parse_items(records, "row", bigbio.to_record, path, problems)
    if {"text", "spans"} <= columns:
        return jsonl.parse_items(records, "row", _to_record, path, problems)
    if not {"tokens", "ner_tags"} <= columns:
        raise DataError(
            'its columns are not "text" and "spans", "tokens" and "ner_tags", or '
            "BigBIO's"
        )
    tag_names = _find_tag_names(schema.metadata)
    tagged = list(_read_tagged_tokens(records, tag_names, path, problems))
    return conll.parse_rows(tagged, path)


def _find_tag_names(metadata: Any) -> Any:
    """Return the names of the tags in a schema that `datasets` wrote, if any."""
    raw = dict(metadata or {}).get(b"huggingface", b"{}").decode("utf-8", "replace")
    info = as_mapping(as_mapping(parse_json_line(raw)).get("info"))
    feature: Any = as_mapping(info.get("features")).get("ner_tags")
    feature = as_mapping(feature).get("feature", feature)
    if isinstance(feature, list):
        feature = next(iter(feature), None)
    return as_mapping(feature).get("names")


def _read_tagged_tokens(
    records: Iterable[Any], tag_names: Any, path: Path, problems: Problems
) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield the id of each row, and its tokens with their tags."""
    for number, row in enumerate(records, 1):
        with problems.collecting("document", path, 0, f"row {number}: "):
            try:
                tags = [_find_tag_name(tag, tag_names) for tag in row["ner_tags"]]
                pairs = [
                    [str(token), str(tag)]
                    for token, tag in zip(row["tokens"], tags, strict=True)
                ]
            except (IndexError, TypeError, ValueError):
                raise DataError(
                    "it needs one tag, with a name, for each token"
                ) from None
            if not all(conll.is_tag(tag) and form.strip() for form, tag in pairs):
                raise DataError(
                    "it has an empty token, or something other than a tag (O, "
                    "B-Drug, …)"
                )
            if pairs:
                yield str(row.get("id") or ""), pairs


def _find_tag_name(tag: Any, tag_names: Any) -> Any:
    """Return the name of a tag that is given by name or by number.

    Raises:
        IndexError: There is no such number.
        TypeError: The tags have no names, or this is no tag.
    """
    if isinstance(tag, str):
        return tag
    if tag < 0:
        raise IndexError
    return tag_names[tag]


def _to_record(row: Any, context: jsonl.MentionContext) -> dict[str, Any]:  # noqa: ARG001 - the form of `parse_items`
    """Return a row of this module's own tables as a record of JSONL."""
    fields = as_mapping(parse_json_line(row["fednotes"])) if row.get("fednotes") else {}
    spans = [
        {key: value for key, value in span.items() if value is not None}
        for span in row["spans"] or ()
    ]
    return {"id": row.get("id"), **fields, "text": row["text"], "spans": spans}


# ---- tables --------------------------------------------------------------------------


def list_column_names(path: Path) -> list[str]:
    """Return the names of a file's columns, in order."""
    return list(_read_schema(path).names)


def _read_schema(path: Path) -> Any:
    """Return the schema of a file."""
    arrow = import_arrow()
    with _opening(arrow, path) as file:
        schema, _ = _open_batches(arrow, file, path)
        return schema


def read_rows(path: Path, columns: Sequence[str]) -> Iterator[list[Any]]:
    """Yield the values of some columns of each row.

    One batch of rows is in memory at a time. Since rows may share a value, the rows of
    a small file may exceed any memory. Therefore the declared sizes are checked against
    the file's size before unpacking, and the size of the rows is counted while they are
    read.

    Args:
        path: The file.
        columns: The names of the columns.

    Raises:
        DataError: The file is incomplete, or its rows are far larger than notes.
    """
    arrow = import_arrow()
    with _opening(arrow, path) as file:
        schema, batches = _open_batches(arrow, file, path, columns)
        for name in columns:
            if schema.get_field_index(name) < 0:
                raise DataError.at(
                    path, 0, "two of its columns have the same name: rename one of them"
                )
            if has_shared_values(arrow, schema.field(name).type):
                raise DataError.at(
                    path,
                    0,
                    "a column contains lists of dictionary-encoded values, which "
                    "fednotes does not read: write them as plain values",
                )
        limits = _Limits.for_file(path, file)
        size = 0
        for batch in batches:
            # Arrow does not check the offsets and indices in a file.
            batch.validate(full=True)
            limits.require_batch(batch.nbytes)
            for piece, piece_size in slice_within(arrow, batch, limits.batch):
                limits.require_batch(piece_size)
                arrays = [
                    _convert_column(arrow, piece, schema, each) for each in columns
                ]
                for row in range(piece.num_rows):
                    values = [array[row].as_py() for array in arrays]
                    size += sum(map(measure_value, values))
                    limits.require_rows(size)
                    yield values


@dataclass(frozen=True)
class _Limits:
    """Limits on the memory for the rows of a file.

    Attributes:
        path: The file.
        file_size: Its size in bytes.
        rows: Maximum bytes of all rows of the file.
        batch: Maximum bytes of a batch of rows.
    """

    path: Path
    file_size: int
    rows: int
    batch: int

    @classmethod
    def for_file(cls, path: Path, file: BinaryIO) -> _Limits:
        """Return the limits of an open file."""
        position = file.tell()
        file_size = file.seek(0, os.SEEK_END)
        file.seek(position)
        rows = max(bounds.PACKED_FREE, bounds.PACKED_RATIO * file_size)
        return cls(path, file_size, rows, min(rows, bounds.ARROW_BYTES))

    def require_rows(self, size: int) -> None:
        """Raise DataError if rows of this size exceed the limit for all rows."""
        if size > self.rows:
            raise DataError.at(
                self.path,
                0,
                f"its rows have more than {self.rows:,} bytes, far more than a file "
                f"of {self.file_size:,} bytes can hold as text: write the file again",
            )

    def require_batch(self, size: int) -> None:
        """Raise DataError if a batch of this size exceeds the limit for a batch."""
        self.require_rows(size)
        if size > bounds.ARROW_BYTES:
            raise DataError.at(
                self.path,
                0,
                f"a batch of rows has more than {bounds.ARROW_BYTES:,} bytes: "
                "write fewer rows per group",
            )


def _convert_column(arrow: Any, batch: Any, schema: Any, name: str) -> Any:
    """Return a column of a batch, in the file's own type if Arrow can convert it.

    Arrow reads some columns as dictionaries, which have the same values. But their
    conversion to Python is slower.
    """
    array = batch.column(batch.schema.get_field_index(name))
    kind = schema.field(name).type
    if array.type == kind:
        return array
    try:
        return array.cast(kind)
    except arrow.ArrowNotImplementedError:  # for example, to string_view
        return array


@contextmanager
def _opening(arrow: Any, path: Path) -> Iterator[BinaryIO]:
    """Open a file; errors in the context become DataErrors."""
    try:
        with open_seekable(path) as file:
            yield file
    except (arrow.ArrowException, OSError, ValueError, OverflowError):
        # OverflowError: a time or duration that Python cannot represent.
        raise DataError.at(path, 0, _UNREADABLE) from None


def _open_batches(
    arrow: Any, file: BinaryIO, path: Path, columns: Sequence[str] | None = None
) -> tuple[Any, Iterable[Any]]:
    """Return the schema of a file, and the batches of its rows.

    The batches are unpacked one by one.
    """
    head = file.read(6)
    file.seek(0)
    if head.startswith(b"PAR1"):
        reader = _ParquetReader(arrow, file, path, columns or ())
        return reader.schema, reader.read_batches()
    if columns is not None:
        check_unpacked_sizes(file, _Limits.for_file(path, file).require_batch)
    if head.startswith(b"ARROW1"):
        source = arrow.ipc.open_file(file)
        return source.schema, map(source.get_batch, range(source.num_record_batches))
    source = arrow.ipc.open_stream(file)
    return source.schema, source


class _ParquetReader:
    """Reads a Parquet file in batches of rows that are measured first.

    Args:
        arrow: The package pyarrow.
        file: The file.
        path: Its path, for messages.
        columns: The names of the columns to read.

    Attributes:
        schema: The schema of the file.
    """

    def __init__(
        self,
        arrow: Any,
        file: BinaryIO,
        path: Path,
        columns: Sequence[str],
    ) -> None:
        self._arrow = arrow
        self._file = file
        self._footer_limits = compute_footer_limits(file)
        self._source = arrow.parquet.ParquetFile(file, **self._footer_limits)
        self.schema = self._source.schema_arrow
        self._columns = columns
        self._limits = _Limits.for_file(path, file)
        # A name stands for a column and for the columns within it.
        self._leaves = {
            number: path
            for number, path in enumerate(column.path for column in self._source.schema)
            if any(_is_within(path, name) for name in columns)
        }

    def read_batches(self) -> Iterator[Any]:
        """Yield batches of rows, one row group after the other."""
        for group, chunks in enumerate(read_column_chunks(self._file)):
            sizes = self._measure_group(chunks)
            batch_size = self._choose_batch_size(sizes)
            # Which columns stay dictionaries depends on the group and is fixed when a
            # reader is created, so every group has its own reader.
            reader = self._arrow.parquet.ParquetFile(
                self._file,
                metadata=self._source.metadata,
                read_dictionary=self._list_dictionaries(sizes),
                pre_buffer=False,
                buffer_size=_READ_SIZE,
                **self._footer_limits,
            )
            yield from reader.iter_batches(
                batch_size, row_groups=[group], columns=self._columns
            )

    def _measure_group(self, chunks: Sequence[ColumnChunk]) -> dict[int, ColumnSize]:
        """Return the sizes of the columns of a group.

        Args:
            chunks: All columns of the group.

        Raises:
            ValueError: The columns of the group differ from the schema's.
            DataError: The largest pages of the columns together exceed the limit for a
                batch, or the values or lists of the columns exceed the limit for all
                rows.
        """
        limits = self._limits
        schema = self._source.schema
        if len(chunks) != len(schema):
            raise ValueError("the columns of a group differ from the schema's")
        sizes = {
            number: measure_column(
                self._arrow,
                self._file,
                chunks[number],
                schema.column(number),
                limits.batch,
            )
            for number in self._leaves
        }
        limits.require_batch(sum(size.largest_page for size in sizes.values()))
        limits.require_rows(OBJECT_SIZE * sum(size.values for size in sizes.values()))
        # A row of lists may span all pages, and Arrow unpacks it as a whole.
        lists = (size for number, size in sizes.items() if self._is_list(number))
        limits.require_rows(sum(size.unpacked for size in lists))
        return sizes

    def _choose_batch_size(self, sizes: Mapping[int, ColumnSize]) -> int:
        """Return the number of rows of a group that may be unpacked at a time.

        Args:
            sizes: The sizes of the columns of the group.

        Raises:
            DataError: A single row may exceed the limit for a batch.
        """
        limits = self._limits
        width = 1  # maximum bytes of a row
        is_large = sum(size.unpacked for size in sizes.values()) > limits.batch
        for number, size in sizes.items():
            if is_large:
                width += size.largest_page
            if not self._is_list(number):
                width += size.shared
            elif size.has_deltas:
                limits.require_batch(size.values * size.shared)
        for name in self._columns:
            kind = self.schema.field(name).type
            row_width, item_width = find_stated_widths(self._arrow, kind)
            limits.require_batch(row_width)
            width += row_width
            values = sum(
                size.values
                for number, size in sizes.items()
                if _is_within(self._leaves[number], name)
            )
            limits.require_rows(item_width * values)
        return min(_MAX_BATCH, max(1, limits.batch // width))

    def _list_dictionaries(self, sizes: Mapping[int, ColumnSize]) -> list[str]:
        """Return the paths of the columns to read as dictionaries.

        These are list columns whose texts may be far longer than their pages, since a
        row may have any number of texts.

        Args:
            sizes: The sizes of the columns of the group.
        """
        return [
            path
            for number, path in self._leaves.items()
            if self._source.schema.column(number).physical_type == "BYTE_ARRAY"
            and self._is_list(number)
            and not sizes[number].has_deltas
            and sizes[number].values * sizes[number].shared > _SMALL
        ]

    def _is_list(self, number: int) -> bool:
        """Return whether a row may have several values in a column."""
        return bool(self._source.schema.column(number).max_repetition_level > 0)


def _is_within(path: str, name: str) -> bool:
    """Return whether a Parquet path is that of a column, or lies within it."""
    return path == name or path.startswith(f"{name}.")


# ---- writing -------------------------------------------------------------------------


def write(documents: Iterable[Document], path: str | os.PathLike[str]) -> None:
    """Write Parquet with text, mentions, tokens and tags, for `datasets`."""
    arrow = import_arrow()
    all_documents = list(documents)
    tagset = TagSet(list_types(all_documents))
    records = [to_row(document, tagset) for document in all_documents]
    table = arrow.Table.from_pylist(records, schema=make_table_schema(arrow, tagset))
    sink = arrow.BufferOutputStream()
    arrow.parquet.write_table(table, sink, row_group_size=_GROUP_ROWS)
    write_out(Path(path), sink.getvalue().to_pybytes())


def to_row(document: Document, tagset: TagSet) -> dict[str, Any]:
    """Return a document as a row of the table."""
    if document.tokens:
        tokens = np.array(document.tokens).reshape(-1, 2)
    else:
        tokens = tokenize(document.text)
    flat, _ = flatten(document.spans, "outermost")
    tags, _ = encode_tags(flat, tokens, tagset)
    record = jsonl.to_record(document)
    fields = jsonl.list_other_fields(document)
    return {
        "id": record["id"],
        "text": record["text"],
        "spans": record["spans"],
        "tokens": [document.text[start:end] for start, end in tokens],
        "ner_tags": tags.tolist(),
        "fednotes": jsonl.to_json(document, fields) if fields else None,
    }


def make_table_schema(arrow: Any, tagset: TagSet) -> Any:
    """Return the schema of the table, with the tag names for `datasets`."""
    span = arrow.struct(
        [
            ("start", arrow.int64()),
            ("end", arrow.int64()),
            ("label", arrow.string()),
            ("fragments", arrow.list_(arrow.list_(arrow.int64()))),
            ("confidence", arrow.float64()),
        ]
    )
    columns = [
        ("id", arrow.string()),
        ("text", arrow.string()),
        ("spans", arrow.list_(span)),
        ("tokens", arrow.list_(arrow.string())),
        ("ner_tags", arrow.list_(arrow.int64())),
        ("fednotes", arrow.string()),
    ]
    class_label = {"names": list(tagset.tags), "_type": "ClassLabel"}
    features = {"ner_tags": {"feature": class_label, "_type": "List"}}
    info = json.dumps({"info": {"features": features}})
    return arrow.schema(columns, {"huggingface": info})
