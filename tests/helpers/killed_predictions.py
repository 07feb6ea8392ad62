"""Predictions that a process begins or resumes, and during which it kills itself.

    python killed_predictions.py FOLDER SINK FORMAT KILL

The model is a function that marks the first word of each note, so that no kernel is
compiled. SIGKILL comes at the step KILL; a step is a predicted note, or the moment
before or after a file is synced or renamed, or a transaction committed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from fednotes.core.databases import DatabaseAddress
from fednotes.core.types import Document, Span
from fednotes.jobs.prediction_batches import Sink, opening_folder, write_batches
from fednotes.jobs.prediction_database import opening_table

NOTES = 23
SIZE = 5  # notes of a batch
SETTINGS = {"model": "m", "threshold": "0.0"}
TYPES = ("Word",)


def make_notes(number: int = NOTES) -> Iterator[Document]:
    """Yield notes with the ids 1, 2 and so on."""
    for n in range(1, number + 1):
        yield Document(str(n), f"word{n} and others, {'x' * (n % 7)}.", (), str(n // 2))


def find_first_words(documents: Iterable[Document]) -> Iterator[Document]:
    """Yield documents with a mention of their first word."""
    for document in documents:
        end = document.text.index(" ")
        span = Span(0, end, TYPES[0], (), 0.5)
        yield replace(document, spans=(span,))


def run_once(
    folder: Path,
    sink: str,
    format: str = "jsonl",
    *,
    resume: bool = True,
    size: int = SIZE,
    notes: Iterable[Document] | None = None,
    predict: Callable[[Iterable[Document]], Iterator[Document]] = find_first_words,
) -> None:
    """Write predictions until the input ends.

    Args:
        folder: The folder of the shards, or of the file of a SQLite database.
        sink: "folder", "sqlite", or the address of a database.
        format: Format of the shards.
        resume: Whether to resume.
        size: Notes of a batch.
        notes: The notes; by default `make_notes`.
        predict: The model.
    """
    if sink == "folder":
        context: Any = opening_folder(
            folder / "out", SETTINGS, format=format, size=size, resume=resume
        )
    else:
        place = f"sqlite:///{folder}/out.db" if sink == "sqlite" else sink
        context = opening_table(
            DatabaseAddress(place),
            SETTINGS,
            table="note_nlp",
            size=size,
            resume=resume,
        )
    with context as make_sink:
        sink_of_model: Sink = make_sink(types=TYPES)
        documents = make_notes() if notes is None else notes
        write_batches(documents, lambda notes, _: predict(notes), sink_of_model, NOTES)


def kill_at(folder: Path, sink: str, format: str, step: int) -> bool:
    """Run predictions in a process that kills itself; return whether it ended first."""
    command = [sys.executable, __file__, str(folder), sink, format, str(step)]
    code = subprocess.run(command, check=False).returncode
    assert code in (0, -signal.SIGKILL)
    return code == 0


def _main(folder: Path, sink: str, format: str, kill: int) -> None:
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1
        if steps == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            count()
            result = function(*arguments, **options)
            count()
            return result

        return call

    def predict(documents: Iterable[Document]) -> Iterator[Document]:
        for document in find_first_words(documents):
            count()
            yield document

    with (
        mock.patch("os.fsync", counted(os.fsync)),
        mock.patch("os.replace", counted(os.replace)),
    ):
        if sink != "folder":
            from sqlalchemy.engine import default

            dialect = default.DefaultDialect
            commit = counted(dialect.do_commit)
            with mock.patch.object(dialect, "do_commit", commit):
                run_once(folder, sink, format, predict=predict)
        else:
            run_once(folder, sink, format, predict=predict)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
