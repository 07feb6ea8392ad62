"""Parquet and Arrow files, as Hugging Face's `datasets` uses them. Needs extra "arrow".

Columns: id, text, tokens, ner_tags (the names of its ClassLabel are in the schema's
metadata), spans, and "fednotes", JSON of everything else. A table with tokens and
ner_tags alone is read, too, and one of BigBIO's rows (`bigbio`). Arrow files are read,
as a stream or as a file; Parquet is written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fednotes.core import bounds
from fednotes.core.errors import DataError, needs
from fednotes.core.parsing import mapping
from fednotes.core.store import write_out
from fednotes.core.types import Document, TagSet
from fednotes.data.formats import bigbio, conll, jsonl
from fednotes.data.formats.files import open_seekable, starts_with
from fednotes.data.formats.folders import find_corpus_files
from fednotes.data.formats.gathering import ReadDocument, gather
from fednotes.data.formats.json_files import parse_json_line
from fednotes.data.formats.problems import Problems
from fednotes.data.tags import encode, flatten, types_of
from fednotes.data.text import tokenize

LOOSE = 0
_SIGNATURES = (b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")
# PAR1 is also a gene: a text that begins with it as a word is no Parquet.
_GENE = tuple(b"PAR1" + end for end in (b"\t", b" ", b"\n", b"\r", b",", b"-"))
_UNREADABLE = "no Parquet or Arrow that can be read: is the file complete?"
_OBJECT_SIZE = 32  # bytes that a Python value takes at least
_MAX_BATCH = 1024  # rows


def _import_arrow() -> Any:
    with needs("pyarrow", "arrow"):
        import pyarrow
        import pyarrow.parquet
    return pyarrow


# ---- reading -------------------------------------------------------------------------


def accepts(path: Path) -> bool:
    """Return whether the file begins as Parquet or Arrow do."""
    return starts_with(path, _SIGNATURES) and not starts_with(path, _GENE)


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """Return a document per row; rows whose tokens and tags do not fit are noted."""
    files = find_corpus_files(path, accepts, "Parquet or Arrow")
    return gather(files, _read_file, problems)


def _read_file(path: Path, problems: Problems) -> Iterable[ReadDocument]:
    schema = _read_schema(path)
    columns = set(schema.names)
    records = (
        dict(zip(schema.names, row, strict=True)) for row in rows(path, schema.names)
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
    tag_names = _tag_names(schema.metadata)
    tagged = list(_tagged_tokens(records, tag_names, path, problems))
    return conll.parse_rows(tagged, path)


def _tag_names(metadata: Any) -> Any:
    """Return the names of the tags that `datasets` writes into a schema, if any."""
    raw = dict(metadata or {}).get(b"huggingface", b"{}").decode("utf-8", "replace")
    info = mapping(mapping(parse_json_line(raw)).get("info"))
    feature: Any = mapping(info.get("features")).get("ner_tags")
    feature = mapping(feature).get("feature", feature)
    if isinstance(feature, list):
        feature = next(iter(feature), None)
    return mapping(feature).get("names")


def _tagged_tokens(
    records: Iterable[Any], tag_names: Any, path: Path, problems: Problems
) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield the id of each row, and its tokens with their tags."""
    for number, row in enumerate(records, 1):
        with problems.collect("document", path, 0, f"row {number}: "):
            try:
                tags = [_tag_name(tag, tag_names) for tag in row["ner_tags"]]
                pairs = [
                    [str(token), str(tag)]
                    for token, tag in zip(row["tokens"], tags, strict=True)
                ]
            except (IndexError, TypeError, ValueError):
                raise DataError(
                    "its tags do not fit its tokens, or have no names"
                ) from None
            if not all(conll.is_tag(tag) and form.strip() for form, tag in pairs):
                raise DataError(
                    "it has an empty token, or a tag that is none (O, B-Drug, …)"
                )
            if pairs:
                yield str(row.get("id") or ""), pairs


def _tag_name(tag: Any, tag_names: Any) -> Any:
    if isinstance(tag, str):
        return tag
    if tag < 0:
        raise IndexError
    return tag_names[tag]


def _to_record(row: Any, context: jsonl.MentionContext) -> dict[str, Any]:  # noqa: ARG001 - the form of `parse_items`
    """Return a row that this module wrote as a record of JSONL."""
    fields = mapping(parse_json_line(row["fednotes"])) if row.get("fednotes") else {}
    spans = [
        {key: value for key, value in span.items() if value is not None}
        for span in row["spans"] or ()
    ]
    return {"id": row.get("id"), **fields, "text": row["text"], "spans": spans}


# ---- tables --------------------------------------------------------------------------


def column_names(path: Path) -> list[str]:
    """Return the names of a file's columns, in their order."""
    return list(_read_schema(path).names)


def _read_schema(path: Path) -> Any:
    arrow = _import_arrow()
    with _open(arrow, path) as file:
        schema, _ = _open_batches(arrow, file)
        return schema


def rows(path: Path, columns: Sequence[str]) -> Iterator[list[Any]]:
    """Yield the values of some columns of each row.

    One batch of rows is in memory at a time. Rows may share a value, so a small file
    may hold far more than any memory can; the size of the rows is counted while they
    are read.

    Args:
        path: The file.
        columns: The names of the columns.

    Raises:
        DataError: The file is incomplete, or its rows are far larger than notes are.
    """
    arrow = _import_arrow()
    with _open(arrow, path) as file:
        schema, batches = _open_batches(arrow, file, columns)
        for name in columns:
            if _has_shared_values(arrow, schema.field(name).type):
                raise DataError.at(
                    path,
                    0,
                    "a column holds lists of shared values: write these as plain "
                    "values",
                )
        file_size = _size_of_file(file)
        limit = max(bounds.PACKED_FREE, bounds.PACKED_RATIO * file_size)
        size = 0
        for batch in batches:
            if batch.nbytes > bounds.ARROW_BYTES:
                raise DataError.at(
                    path,
                    0,
                    f"a batch of rows has more than {bounds.ARROW_BYTES:,} bytes: "
                    "write fewer rows into a group",
                )
            indices = [batch.schema.get_field_index(name) for name in columns]
            arrays = [batch.column(index) for index in indices]
            for row in range(batch.num_rows):
                values = [array[row].as_py() for array in arrays]
                size += sum(map(_size_in_memory, values))
                if size > limit:
                    raise DataError.at(
                        path,
                        0,
                        f"its rows have more than {limit:,} bytes, which no notes of a "
                        f"file of {file_size:,} bytes have: write it anew",
                    )
                yield values


def _size_of_file(file: BinaryIO) -> int:
    position = file.tell()
    size = file.seek(0, os.SEEK_END)
    file.seek(position)
    return size


def _size_in_memory(value: Any) -> int:
    """Return about how many bytes a value of a row takes in memory."""
    if isinstance(value, str | bytes):
        return _OBJECT_SIZE + len(value)
    if isinstance(value, dict):
        return _OBJECT_SIZE + sum(map(_size_in_memory, value.values()))
    if isinstance(value, list):
        return _OBJECT_SIZE + sum(map(_size_in_memory, value))
    return _OBJECT_SIZE


def _has_shared_values(arrow: Any, kind: Any, depth: int = 0) -> bool:
    """Return whether values within one value of a type may be shared.

    Such a value may be arbitrarily large. A column of shared values is harmless: it has
    one of them per row, and these are counted.

    Args:
        arrow: The package pyarrow.
        kind: The type.
        depth: How deep the type is nested.
    """
    is_shared = (
        arrow.types.is_dictionary(kind)
        or arrow.types.is_run_end_encoded(kind)
        or str(kind) in ("string_view", "binary_view")
    )
    if depth > 0 and is_shared:
        return True
    inner = [kind.field(index).type for index in range(kind.num_fields)]
    return any(_has_shared_values(arrow, each, depth + 1) for each in inner)


@contextmanager
def _open(arrow: Any, path: Path) -> Iterator[BinaryIO]:
    """Open a file whose errors, within the block, are DataErrors."""
    try:
        with open_seekable(path) as file:
            yield file
    except (arrow.ArrowException, OSError, ValueError):
        raise DataError.at(path, 0, _UNREADABLE) from None


def _open_batches(
    arrow: Any, file: BinaryIO, columns: Sequence[str] | None = None
) -> tuple[Any, Iterable[Any]]:
    """Return the schema of a file, and its rows in batches.

    The batches are unpacked one by one.
    """
    head = file.read(6)
    file.seek(0)
    if head.startswith(b"PAR1"):
        source = arrow.parquet.ParquetFile(file)
        metadata = source.metadata
        group_sizes = [
            metadata.row_group(index).total_byte_size
            for index in range(metadata.num_row_groups)
        ]
        # Rows may share a value, which is no larger than its group.
        largest_group = max(1, *group_sizes, 0)
        batch_size = min(_MAX_BATCH, max(1, bounds.ARROW_BYTES // largest_group))
        return source.schema_arrow, source.iter_batches(batch_size, columns=columns)
    if head.startswith(b"ARROW1"):
        source = arrow.ipc.open_file(file)
        return source.schema, map(source.get_batch, range(source.num_record_batches))
    source = arrow.ipc.open_stream(file)
    return source.schema, source


# ---- writing -------------------------------------------------------------------------


def write(documents: Iterable[Document], path: str | os.PathLike[str]) -> None:
    """Write Parquet with tokens and tags beside text and mentions, for `datasets`."""
    arrow = _import_arrow()
    all_documents = list(documents)
    tagset = TagSet(types_of(all_documents))
    records = [_to_row(document, tagset) for document in all_documents]
    table = arrow.Table.from_pylist(records, schema=_schema(arrow, tagset))
    sink = arrow.BufferOutputStream()
    arrow.parquet.write_table(table, sink)
    write_out(Path(path), sink.getvalue().to_pybytes())


def _to_row(document: Document, tagset: TagSet) -> dict[str, Any]:
    """Return a document as a row of the table."""
    if document.tokens:
        tokens = np.array(document.tokens).reshape(-1, 2)
    else:
        tokens = tokenize(document.text)
    flat, _ = flatten(document.spans, "outermost")
    tags, _ = encode(flat, tokens, tagset)
    record = jsonl.to_record(document)
    fields = jsonl.other_fields(document)
    return {
        "id": record["id"],
        "text": record["text"],
        "spans": record["spans"],
        "tokens": [document.text[start:end] for start, end in tokens],
        "ner_tags": tags.tolist(),
        "fednotes": jsonl.to_json(document, fields) if fields else None,
    }


def _schema(arrow: Any, tagset: TagSet) -> Any:
    """Return the schema of the table, with the names of the tags for `datasets`."""
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
