"""Predict with a saved model, and write the predictions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fednotes.core.databases import is_address
from fednotes.core.errors import FednotesError, ParameterError
from fednotes.core.store import is_stream
from fednotes.data.encodings import resolve_encoding
from fednotes.data.notes import FORMATS as NOTE_FORMATS
from fednotes.data.notes import NoteDatabase, explain_line_ids
from fednotes.jobs.input_readers import choose_reader
from fednotes.jobs.mention_models import MentionModel
from fednotes.jobs.models import find_model_class, require_model
from fednotes.jobs.saved_models import LoadOptions, NoteSource, PredictionOutput


def predict(
    model: Path,
    source: NoteSource,
    output: PredictionOutput | None = None,
    options: LoadOptions | None = None,
    tell: Callable[[str], None] | None = None,
) -> int:
    """Write the mentions in notes, or the findings of patients.

    Args:
        model: Folder of the saved model.
        source: The notes.
        output: Where and how predictions are written; by default as JSON lines to
            stdout.
        options: How the model is loaded; the defaults if None.
        tell: Receives a remark on the notes, which may name a parameter in backticks.

    Returns:
        The number of notes that were read.

    Raises:
        ConfigError: An option does not apply to the model, the output exists, or it
            would replace the input.
        DataError: The notes cannot be read.
        ModelError: The folder contains no readable model.
    """
    output = output or PredictionOutput()
    _require_apart(source, output)
    _require_new(output)
    require_model(model)
    model_class = find_model_class(model)
    # The findings of a phenotyping model name patients, so ids of notes do not matter.
    if tell is not None and issubclass(model_class, MentionModel):
        remark = _explain_line_ids(source)
        if remark:
            tell(remark)
    return model_class.write_predictions(
        model, source, output, options or LoadOptions()
    )


def _explain_line_ids(source: NoteSource) -> str:
    """Return the remark that the ids of notes are line numbers; "" if they are not.

    Files that cannot be read have no remark: their reader raises the error.
    """
    if isinstance(source.path, NoteDatabase) or is_address(source.path):
        return ""  # a database without a column of ids is refused
    if source.path == "-" or source.id_column is not None:
        return ""
    path = Path(source.path)
    # `explain_line_ids` knows formats of notes; with None, it guesses from the content.
    format = source.format if source.format in NOTE_FORMATS else None
    try:
        encoding = resolve_encoding(source.encoding)
        reader = choose_reader(path, source.format, source.column, encoding)
        if reader.holds_all_documents:
            return ""  # a corpus, whose documents have ids
        return explain_line_ids(path, format, source.column, encoding)
    except (FednotesError, OSError):
        return ""


def _require_new(output: PredictionOutput) -> None:
    """Raise ParameterError if predictions would replace those of an earlier call.

    A folder of shards and a database check this themselves. A stream, a pipe or a
    device is not replaced.
    """
    out = output.path
    if out is None or is_stream(out) or output.overwrite or output.is_in_batches:
        return
    is_used_folder = out.is_dir() and any(out.iterdir())
    if out.is_file() or is_used_folder:
        raise ParameterError(
            f"`out` {out} exists already: give another `out`, or `overwrite` to "
            "replace it"
        )


def _require_apart(source: NoteSource, output: PredictionOutput) -> None:
    """Raise ParameterError if predictions would replace the input notes."""
    out = output.path
    if isinstance(source.path, NoteDatabase) or is_address(source.path):
        return
    if out is None or source.path == "-" or not out.exists():
        return
    path = Path(source.path).resolve()
    target = out.resolve()
    # A file's annotations are in the same folder.
    folder = path.parent if path.is_file() else path
    is_in_folder = target.is_file() and path in target.parents
    if target in (path, folder) or is_in_folder:
        raise ParameterError(
            f"`out` {out}: predictions would replace files of {source.path}: name "
            "another place"
        )
