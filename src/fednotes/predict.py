"""A saved model on new text."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fednotes.core.errors import ConfigError, DataError
from fednotes.core.types import Document
from fednotes.data.formats import FORMATS, guess_format, read
from fednotes.data.tags import flatten, relabel, types_of
from fednotes.metrics.spans import SpanCounts
from fednotes.models.saving import load_model

_NAME = 100  # characters of a path that a message shows


def predict_text(
    model: Path,
    text: str,
    format: str,
    out: Path | None,
    device: str,
    backbone: str | None = None,
) -> None:
    """Predict and write. text: a path, `-` for stdin, or the text itself.

    backbone: where the frozen encoder is, if it has moved since the model was saved.

    Raises ConfigError where brat is asked for without a folder, DataError for a bad file.
    """
    if format == "brat" and out is None:
        raise ConfigError("brat is a folder of files: give --out FOLDER")
    recogniser = load_model(model, device, backbone)
    predicted = recogniser.predict(documents_of(text))
    if out is not None:
        FORMATS[format].write(predicted, out)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "predictions"
        FORMATS[format].write(predicted, path)
        sys.stdout.write(path.read_text(encoding="utf-8"))


def documents_of(text: str) -> tuple[Document, ...]:
    """Documents from a corpus file or folder, plain text files, stdin or the text itself.

    Raises DataError for a single word that is no path, and for what cannot be read.
    """
    if text == "-":
        return (Document("stdin", _decoded("stdin", sys.stdin.buffer.read())),)
    path = Path(text)
    try:
        exists = bool(text.strip()) and path.exists()
    except (OSError, ValueError):  # a text longer than a path may be
        exists = False
    if not exists:
        if text.split() == [text]:  # rather a slip in a path than a note of one word
            name = text if len(text) <= _NAME else f"{text[:_NAME]}…"
            raise DataError(f"{name}: no such file; for text give more than one word or use -")
        return (Document("text", _decoded("the text", os.fsencode(text))),)
    try:
        format = guess_format(path)
    except DataError:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        if not files or (path.is_dir() and any(file.suffix != ".txt" for file in files)):
            raise
        return tuple(Document(f.stem, _decoded(str(f), f.read_bytes())) for f in files)
    return read(path, format)


def _decoded(source: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{source}: not UTF-8 at byte {error.start}: convert it first") from error


def evaluate_path(
    model: Path,
    path: Path,
    format: str | None,
    device: str,
    label_map: Mapping[str, str] | None = None,
    backbone: str | None = None,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Scores of a saved model on annotated documents, and the labels that it does not know.

    label_map: as in the job; unknown labels are left out of the scores. backbone: as in
    `predict_text`.
    Raises DataError if the file annotates none of the model's types.
    """
    recogniser = load_model(model, device, backbone)
    documents = relabel(read(path, format), label_map or {}, None)
    types, found = recogniser.tagset.types, types_of(documents)
    if not set(found) & set(types):
        raise DataError(
            f"{path} annotates {', '.join(found) or 'nothing'}, the model knows "
            f"{', '.join(types)}: no label is common; name them alike with --map OLD=NEW"
        )
    gold = tuple(
        replace(d, spans=flatten(d.spans, "outermost")[0]) for d in relabel(documents, {}, types)
    )
    scores = SpanCounts.of(gold, recogniser.predict(gold), types=types).scores()
    return scores, tuple(label for label in found if label not in types)


def score_table(scores: dict[str, Any]) -> Table:
    """Precision, recall and F1 in percent, all types together and one by one."""
    table = Table()
    for head in ("type", "mentions", "strict P", "R", "F1", "relaxed P", "R", "F1"):
        table.add_column(head, justify="left" if head == "type" else "right")
    for label, score in scores["by_type"].items():
        table.add_row(Text(label), str(score["support"]), *_numbers(score))
    table.add_section()
    support = sum(score["support"] for score in scores["by_type"].values())
    table.add_row("all", str(support), *_numbers(scores), style="bold")
    return table


def _numbers(score: dict[str, Any]) -> list[str]:
    return [
        f"{100 * score[kind][key]:.1f}"
        for kind in ("strict", "relaxed")
        for key in ("precision", "recall", "f1")
    ]
