"""Parquet and Arrow files, as Hugging Face's `datasets` has them. Needs the extra
"arrow".

Columns: id, text, tokens, ner_tags (the names of its ClassLabel are in the schema's
metadata), spans, and "fednotes", a JSON of the rest. A table with tokens and ner_tags
alone is read too, and one of BigBIO's rows (`bigbio`). Arrow files are read, as a
stream or as a file; Parquet is written.
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
_HEADS = (b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")
# a gene in text
_WORDS = tuple(b"PAR1" + end for end in (b"\t", b" ", b"\n", b"\r", b",", b"-"))
_UNREADABLE = "no Parquet or Arrow that can be read: is the file complete?"
_OBJECT = 32  # bytes that a value of Python takes at least


def _arrow() -> Any:
    with needs("pyarrow", "arrow"):
        import pyarrow
        import pyarrow.parquet
    return pyarrow


def accepts(path: Path) -> bool:
    """Whether the file begins as Parquet or Arrow do."""
    return starts_with(path, _HEADS) and not starts_with(path, _WORDS)


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """A document a row. Noted are rows whose tokens and tags do not fit each other."""
    return gather(
        find_corpus_files(path, accepts, "Parquet or Arrow"), _read_file, problems
    )


def _read_file(path: Path, problems: Problems) -> Iterable[ReadDocument]:
    schema = _schema(path)
    names, told = {*schema.names}, dict(schema.metadata or {})
    values = rows(path, schema.names)
    records = (dict(zip(schema.names, row, strict=True)) for row in values)
    if {"passages", "entities"} <= names:
        return jsonl.parse_items(records, "row", bigbio.to_record, path, problems)
    if {"text", "spans"} <= names:
        return jsonl.parse_items(records, "row", _record, path, problems)
    if not {"tokens", "ner_tags"} <= names:
        raise DataError(
            'its columns are not "text" and "spans", "tokens" and "ner_tags", or BigBIO\'s'
        )
    raw = told.get(b"huggingface", b"{}").decode("utf-8", "replace")
    info = mapping(mapping(parse_json_line(raw)).get("info"))
    feature: Any = mapping(info.get("features")).get("ner_tags")
    feature = mapping(feature).get("feature", feature)
    tags = mapping(
        next(iter(feature), None) if isinstance(feature, list) else feature
    ).get("names")
    return conll.parse_rows(list(_tagged(records, tags, path, problems)), path)


def column_names(path: Path) -> list[str]:
    """Return the names of a file's columns, in their order."""
    return list(_schema(path).names)


def _schema(path: Path) -> Any:
    pa = _arrow()
    with _opened(pa, path) as file:
        return _batches(pa, file)[0]


def rows(path: Path, columns: Sequence[str]) -> Iterator[list[Any]]:
    """Yield the values of these columns of each row.

    One batch of rows is in memory at a time. Rows may share a value, so that a small
    file can hold far more than any memory: their size is counted while they are read.

    Raises:
        DataError: The file is not whole, or its rows are far more than it could hold.
    """
    pa = _arrow()
    with _opened(pa, path) as file:
        schema, batches = _batches(pa, file, columns)
        if any(_shares_values(pa, schema.field(name).type, 0) for name in columns):
            told = "a column holds lists of shared values: write these as plain values"
            raise DataError.at(path, 0, told)
        most = max(bounds.PACKED_FREE, bounds.PACKED_RATIO * _size_of_file(file))
        size = 0
        for batch in batches:
            if batch.nbytes > bounds.ARROW_BYTES:
                told = f"a batch of rows has more than {bounds.ARROW_BYTES:,} bytes"
                raise DataError.at(path, 0, f"{told}: write fewer rows into a group")
            held = [
                batch.column(batch.schema.get_field_index(name)) for name in columns
            ]
            for at in range(batch.num_rows):
                values = [column[at].as_py() for column in held]
                size += sum(map(_size, values))
                if size > most:
                    told = f"its rows have more than {most:,} bytes, which no notes of a file "
                    told += f"of {_size_of_file(file):,} bytes have: write it anew"
                    raise DataError.at(path, 0, told)
                yield values


def _size_of_file(file: BinaryIO) -> int:
    before = file.tell()
    size = file.seek(0, os.SEEK_END)
    file.seek(before)
    return size


def _size(value: Any) -> int:
    """Return about how many bytes a value of a row takes in memory."""
    if isinstance(value, str | bytes):
        return _OBJECT + len(value)
    if isinstance(value, dict):
        return _OBJECT + sum(map(_size, value.values()))
    if isinstance(value, list):
        return _OBJECT + sum(map(_size, value))
    return _OBJECT


def _shares_values(pa: Any, kind: Any, depth: int) -> bool:
    """Return whether values within one value of this type may be shared.

    Such a value may be large beyond measure. A column of shared values has one of them
    a row, which is counted.
    """
    if depth and (
        pa.types.is_dictionary(kind)
        or pa.types.is_run_end_encoded(kind)
        or str(kind) in ("string_view", "binary_view")
    ):
        return True
    inside = (kind.field(at).type for at in range(kind.num_fields))
    return any(_shares_values(pa, own, depth + 1) for own in inside)


@contextmanager
def _opened(pa: Any, path: Path) -> Iterator[BinaryIO]:
    """A file whose errors, within the block, are DataErrors."""
    try:
        with open_seekable(path) as file:
            yield file
    except (pa.ArrowException, OSError, ValueError):
        raise DataError.at(path, 0, _UNREADABLE) from None


def _batches(
    pa: Any, file: BinaryIO, columns: Sequence[str] | None = None
) -> tuple[Any, Iterable[Any]]:
    """The schema of a file, and its rows in batches, which are unpacked one by one."""
    head = file.read(6)
    file.seek(0)
    if head.startswith(b"PAR1"):
        source = pa.parquet.ParquetFile(file)
        told = source.metadata
        sizes = [told.row_group(i).total_byte_size for i in range(told.num_row_groups)]
        # Rows may share a value, which is no larger than the whole group.
        size = min(1024, max(1, bounds.ARROW_BYTES // max(1, *sizes, 0)))
        return source.schema_arrow, source.iter_batches(size, columns=columns)
    if head.startswith(b"ARROW1"):
        source = pa.ipc.open_file(file)
        return source.schema, map(source.get_batch, range(source.num_record_batches))
    source = pa.ipc.open_stream(file)
    return source.schema, source


def _tagged(
    rows: Iterable[Any], names: Any, path: Path, problems: Problems
) -> Iterator[tuple[str, list[list[str]]]]:
    """The id of each row, and its tokens with their tags."""
    for number, row in enumerate(rows, 1):
        with problems.collect("document", path, 0, f"row {number}: "):
            try:
                if any(not isinstance(t, str) and t < 0 for t in row["ner_tags"]):
                    raise IndexError
                tags = [t if isinstance(t, str) else names[t] for t in row["ner_tags"]]
                pairs = [
                    [str(a), str(b)] for a, b in zip(row["tokens"], tags, strict=True)
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


def _record(row: Any, noting: jsonl.MentionContext) -> dict[str, Any]:
    rest = mapping(parse_json_line(row["fednotes"])) if row.get("fednotes") else {}
    spans = [
        {k: v for k, v in span.items() if v is not None} for span in row["spans"] or ()
    ]
    return {"id": row.get("id"), **rest, "text": row["text"], "spans": spans}


def write(documents: Iterable[Document], path: str | os.PathLike[str]) -> None:
    """Writes Parquet with tokens and tags beside text and mentions, as `datasets` reads
    it."""
    pa = _arrow()
    held = list(documents)
    tagset = TagSet(types_of(held))
    records = []
    for document in held:
        tokens = (
            np.array(document.tokens).reshape(-1, 2)
            if document.tokens
            else tokenize(document.text)
        )
        tags, _ = encode(flatten(document.spans, "outermost")[0], tokens, tagset)
        record, rest = jsonl.to_record(document), jsonl.other_fields(document)
        row = {name: record[name] for name in ("id", "text", "spans")}
        row |= {
            "tokens": [document.text[a:b] for a, b in tokens],
            "ner_tags": tags.tolist(),
        }
        records.append(
            row | {"fednotes": jsonl.to_json(document, rest) if rest else None}
        )
    span = {"start": pa.int64(), "end": pa.int64(), "label": pa.string()}
    span |= {"fragments": pa.list_(pa.list_(pa.int64())), "confidence": pa.float64()}
    columns = {
        "id": pa.string(),
        "text": pa.string(),
        "spans": pa.list_(pa.struct([*span.items()])),
    }
    columns |= {"tokens": pa.list_(pa.string()), "ner_tags": pa.list_(pa.int64())}
    names = {"names": list(tagset.tags), "_type": "ClassLabel"}
    features = {"ner_tags": {"feature": names, "_type": "List"}}
    told = json.dumps({"info": {"features": features}})
    schema = pa.schema(
        [*columns.items(), ("fednotes", pa.string())], {"huggingface": told}
    )
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(pa.Table.from_pylist(records, schema=schema), sink)
    write_out(Path(path), sink.getvalue().to_pybytes())
