"""Choose where predictions are stored in batches, and describe what makes them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from fednotes.core.databases import DatabaseAddress
from fednotes.core.errors import ModelError, ParameterError, raising_if_unreadable
from fednotes.core.parsing import read_regular
from fednotes.data.notes import NoteDatabase, make_note_place
from fednotes.encoders.pretrained import compute_folder_fingerprint
from fednotes.jobs.prediction_batches import MakeSink, opening_folder
from fednotes.jobs.prediction_database import (
    BATCH,
    DEFAULT_TABLE,
    opening_table,
    require_table_name,
)
from fednotes.jobs.saved_models import NoteSource, PredictionOutput

_CALIBRATION = "calibration.json"


def describe_prediction(
    model: Path, source: NoteSource, output: PredictionOutput
) -> dict[str, str]:
    """Return what a resumed command must have in common with the first one, as text.

    Args:
        model: Folder of the model.
        source: The notes.
        output: How predictions are written.

    Raises:
        ParameterError: The notes cannot be read a second time.
    """
    if source.text is not None or source.path == "-":
        raise ParameterError(
            "predictions in shards or a database need notes that can be read a second "
            "time, from a file or a database: give a path, or leave `shard` out"
        )
    calibration = model / _CALIBRATION
    digest = ""
    if calibration.exists():
        with raising_if_unreadable(calibration, ModelError):
            digest = hashlib.sha256(read_regular(calibration)).hexdigest()
    place = make_note_place(source.path)
    query = ""
    omop = ""
    if isinstance(place, NoteDatabase):
        query = place.query
        omop = place.omop
    else:
        place = place.resolve()
    settings = {
        "model": compute_folder_fingerprint(model),
        "calibration": digest,
        "input": str(place),
        "query": query,
        "omop": omop,
        "format": source.format or "",
        "column": source.column or "",
        "encoding": source.encoding,
        "on_error": source.on_error,
        "to": output.to,
        "threshold": str(output.threshold),
        "shard": str(output.shard),
    }
    if source.id_column:  # versions without this parameter wrote no such setting
        settings["id_column"] = source.id_column
    return settings


def open_sink(
    output: PredictionOutput, settings: Mapping[str, str]
) -> AbstractContextManager[MakeSink]:
    """Return a context that holds the sink of predictions.

    Args:
        output: Where predictions are written: a folder of shards, or a database.
        settings: As in `describe_prediction`.

    Raises:
        ParameterError: The table's name is impossible, or the output has predictions
            that do not match.
        DataError: Earlier predictions are damaged, or the database cannot be used.
    """
    if output.database:
        table = output.table or DEFAULT_TABLE
        require_table_name(table)
        address = DatabaseAddress(output.database)
        if address.text == settings["input"] and address.is_sqlite():
            raise ParameterError(
                "`out`: SQLite cannot write into a file while it reads it: name "
                "another file"
            )
        return opening_table(
            address,
            settings,
            table=table,
            size=output.shard or BATCH,
            resume=output.resume,
        )
    assert output.path is not None  # `PredictionOutput.require_possible` checks it
    return opening_folder(
        output.path,
        settings,
        format=output.to,
        size=output.shard,
        resume=output.resume,
    )
