"""Predict tables of notes over HTTP: `POST /batch` of `fednotes serve --batch`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from fednotes.apps.serving.gate import read_media_type
from fednotes.apps.serving.limits import Limits
from fednotes.apps.serving.model_queue import (
    BATCH_CHARACTERS,
    BATCH_INPUTS,
    ModelQueue,
)
from fednotes.apps.serving.schemas import TableFormat, Threshold, keep_confident_spans
from fednotes.core.cleaning import NAME, clean
from fednotes.core.errors import ConfigError, DataError
from fednotes.core.http_server import Refused
from fednotes.core.types import Document
from fednotes.data.encodings import AUTO
from fednotes.jobs.inputs import Inputs, open_inputs
from fednotes.jobs.prediction_writers import format_json_line

if TYPE_CHECKING:
    from fastapi import FastAPI

_FORMATS: dict[str, TableFormat] = {
    "text/csv": "csv",
    "text/tab-separated-values": "tsv",
    "application/jsonl": "jsonl",
    "application/x-ndjson": "jsonl",
    "application/vnd.apache.parquet": "parquet",
}
# Media types that say nothing about the format of a table.
_ANY_FORMAT = ("application/octet-stream", "application/gzip", "application/zstd")
_CONTENT_ENCODINGS = ("", "identity", "gzip", "zstd")

# First bytes of compressed files.
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"

# A compressed table may have this many characters per byte of the largest request.
_UNPACKED_CHARACTERS = 10


def add_table_route(app: FastAPI, queue: ModelQueue, limits: Limits) -> None:
    """Add the route `POST /batch` to an application.

    Args:
        app: The application.
        queue: The queue before a model that finds mentions.
        limits: The limits on a request and on each note.
    """
    from fastapi import Body, Header
    from fastapi.responses import StreamingResponse

    async def predict_table(  # noqa: PLR0913 - the parameters of a request
        table: bytes = Body(media_type="text/csv"),
        content_type: str = Header(""),
        content_encoding: str = Header(""),
        format: TableFormat | None = None,
        column: str | None = None,
        id_column: str | None = None,
        encoding: str = AUTO,
        threshold: Threshold = 0.0,
    ) -> Any:
        """Find the mentions in a table of notes and return one JSON line per note.

        The lines have the order of the notes. The table is CSV, TSV, JSON Lines or
        Parquet, optionally compressed with gzip or Zstandard.
        """
        _require_known_packing(content_encoding)
        ending = _choose_format_ending(content_type, format) + _find_packing_ending(
            table
        )
        with _refusing_full_disk():
            # Only the owner can read a temporary directory.
            folder = TemporaryDirectory(prefix="fednotes-")
        path = Path(folder.name, f"notes{ending}")
        try:
            with _refusing_full_disk():
                inputs = await asyncio.to_thread(
                    _store_table, path, table, column, id_column, encoding, limits
                )
        except (ConfigError, DataError) as error:
            folder.cleanup()
            message = str(error).replace(f"{folder.name}/", "")
            raise Refused(422, clean(message, 4 * NAME)) from None
        except Exception:
            folder.cleanup()
            raise

        async def predict_lines() -> AsyncIterator[str]:
            """Yield a JSON line for each note, window by window."""
            documents = iter(inputs)
            with folder:
                while window := await asyncio.to_thread(_read_window, documents):
                    predictions = await queue.predict(window)
                    for note, prediction in zip(window, predictions, strict=True):
                        spans = keep_confident_spans(prediction.spans, threshold)
                        yield format_json_line(replace(note, spans=tuple(spans)))

        return StreamingResponse(predict_lines(), media_type="application/x-ndjson")

    add = app.post("/batch", response_class=StreamingResponse, response_model=None)
    add(predict_table)


@contextmanager
def _refusing_full_disk() -> Iterator[None]:
    """Turn an OSError of storing a table into Refused, without the path."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise Refused(
            507,
            f"the server cannot store the table ({reason}): try again later, or send "
            "a smaller table",
        ) from error


def _require_known_packing(content_encoding: str) -> None:
    """Raise Refused unless the header Content-Encoding names a known compression."""
    if content_encoding.strip().lower() not in _CONTENT_ENCODINGS:
        raise Refused(
            415, "compress the table with gzip or zstd, or send it uncompressed"
        )


def _choose_format_ending(content_type: str, format: TableFormat | None) -> str:
    """Return the file name extension for a table's format, such as ".csv".

    The content type must be that of a table, because a web page of another origin
    cannot send it without a preflight request, which this server does not grant.

    Args:
        content_type: The header Content-Type.
        format: The format that the request names, or None.

    Raises:
        Refused: The content type is not supported, or the format is missing.
    """
    kind = read_media_type(content_type)
    if kind not in _FORMATS and kind not in _ANY_FORMAT:
        known = ", ".join(_FORMATS)
        raise Refused(
            415, f"send a table, with one of these values of content-type: {known}"
        )
    known_format = format or _FORMATS.get(kind)
    if known_format is None:
        raise Refused(
            415,
            "the table's format is missing: add ?format=csv, tsv, jsonl or parquet",
        )
    return f".{known_format}"


def _find_packing_ending(table: bytes) -> str:
    """Return the file name extension for a table's compression; "" if it has none."""
    if table.startswith(_GZIP):
        return ".gz"
    if table.startswith(_ZSTD):
        return ".zst"
    return ""


def _store_table(
    path: Path,
    table: bytes,
    column: str | None,
    id_column: str | None,
    encoding: str,
    limits: Limits,
) -> Inputs:
    """Write a table to a file, and read it once to check all of it.

    Args:
        path: The file to write.
        table: The content of the table.
        column: The column or JSON key that holds the text; recognised if None.
        id_column: The column or JSON key of the notes' ids; recognised if None.
        encoding: The encoding of text, or "auto".
        limits: The limits on the notes.

    Raises:
        ConfigError: The encoding is unknown.
        DataError: A note cannot be read.
        Refused: There are too many notes, or one of them or all together have too many
            characters.
    """
    path.write_bytes(table)
    inputs = open_inputs(
        str(path),
        column=column or None,
        id_column=id_column or None,
        encoding=encoding,
    )

    max_characters = _UNPACKED_CHARACTERS * limits.max_bytes
    characters = 0
    for number, note in enumerate(inputs, 1):
        if number > limits.max_notes:
            raise Refused(
                413,
                f"this table has over {limits.max_notes:,} notes: send fewer at a time",
            )
        limits.require_length(f"note {number}", note.text)
        characters += len(note.text)
        if characters > max_characters:
            raise Refused(
                413,
                f"the notes of this table have over {max_characters:,} characters: "
                "send fewer at a time",
            )
    return inputs


def _read_window(documents: Iterator[Document]) -> list[Document]:
    """Return the documents of the next joint call of the model; empty at the end."""
    window: list[Document] = []
    characters = 0
    for document in islice(documents, BATCH_INPUTS):
        window.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            break
    return window
