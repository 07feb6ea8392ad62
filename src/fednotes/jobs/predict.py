"""Predict with a saved model, and write the predictions."""

from __future__ import annotations

from pathlib import Path

from fednotes.core.databases import is_address
from fednotes.core.errors import ParameterError
from fednotes.data.notes import NoteDatabase
from fednotes.jobs.models import find_model_class, require_model
from fednotes.jobs.saved_models import LoadOptions, NoteSource, PredictionOutput


def predict(
    model: Path,
    source: NoteSource,
    output: PredictionOutput | None = None,
    options: LoadOptions | None = None,
) -> int:
    """Write the mentions in notes, or the findings of patients.

    Args:
        model: Folder of the saved model.
        source: The notes.
        output: Where and how predictions are written; by default as JSON lines to
            stdout.
        options: How the model is loaded; the defaults if None.

    Returns:
        The number of notes that were read.

    Raises:
        ConfigError: An option does not apply to the model, or the output would replace
            the input.
        DataError: The notes cannot be read.
        ModelError: The folder contains no readable model.
    """
    output = output or PredictionOutput()
    _require_apart(source, output)
    require_model(model)
    model_class = find_model_class(model)
    return model_class.write_predictions(
        model, source, output, options or LoadOptions()
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
            f"`out` {out}: predictions would replace files of {source.path}; name "
            "another place"
        )
