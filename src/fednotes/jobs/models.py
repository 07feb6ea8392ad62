"""Find and load the model in a folder, whatever its class."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Literal

from fednotes.core import plugins
from fednotes.core.errors import ConfigError, ModelError
from fednotes.core.parsing import read_json_table
from fednotes.core.settings import require_path
from fednotes.core.wording import list_names
from fednotes.jobs.mention_models import MentionModel
from fednotes.jobs.patient_models import PatientModel
from fednotes.jobs.run_folder import is_run, list_model_folders, list_runs_near
from fednotes.jobs.saved_models import LoadOptions, SavedModel

__all__ = [
    "MentionModel",
    "PatientModel",
    "find_model_class",
    "find_source_folder",
    "load",
    "load_mention_model",
    "open_model",
    "read_description",
    "require_model",
]

# Files that may describe a model that finds mentions, in search order.
_MENTION_FILES = ("tagger.json", "model.json", "config.json")


def find_model_class(folder: Path) -> type[SavedModel]:
    """Return the class of the model in a folder.

    A folder without the file of a registered class holds a model that finds mentions.
    A registered class is imported only if its file exists.

    Raises:
        ConfigError: The class cannot be loaded.
    """
    for name, entry in plugins.list_entries("models").items():
        if (folder / f"{name}.json").is_file():
            return _load_class(entry)
    return MentionModel


def require_model(folder: Path) -> None:
    """Raise ModelError, with models to choose from, unless a folder holds a model."""
    files = (
        *_MENTION_FILES,
        *(f"{name}.json" for name in plugins.list_entries("models")),
    )
    if any((folder / name).is_file() for name in files):
        return
    models = []
    if is_run(folder):
        models = [str(path) for path in list_model_folders(folder)]
    if models:
        raise ModelError(
            f"{folder} is the folder of a run: give one of its models: "
            f"{list_names(models)}"
        )
    run = next((each for each in folder.parents if is_run(each)), None)
    if run is not None:
        models_of_run = list_model_folders(run)
        models_below = [path for path in models_of_run if folder in path.parents]
        models = [str(path) for path in models_below or models_of_run]
    if run is not None and models:
        raise ModelError(
            f"{folder}: no model here: give one of the models "
            f"{'below it' if models_below else 'of its run'}: "
            f"{list_names(models)}"
        )
    if folder.is_dir():
        models = [
            str(path)
            for run in list_runs_near(folder)
            for path in list_model_folders(run)[:1]
        ]
    if models:
        raise ModelError(
            f"{folder}: no model here: give the folder of a model, such as "
            f"{list_names(models)}"
        )
    raise ModelError(
        f"{folder}: no model here: give the folder that training wrote, such as "
        "RUN/federated/model"
    )


def _load_class(entry: EntryPoint) -> type[SavedModel]:
    """Import a registered class of models.

    Raises:
        ConfigError: The class cannot be imported, or is not a `PatientModel`.
    """
    model_class: type[Any] = plugins.load_entry(entry, type)
    if not issubclass(model_class, PatientModel):
        raise ConfigError(
            f"{entry.value} is not a subclass of PatientModel: update or uninstall the "
            "package that registers it"
        )
    return model_class


def read_description(folder: Path) -> dict[str, Any]:
    """Return the content of the JSON file that describes the model in a folder.

    Returns:
        The content; empty if there is no such file, or if it cannot be read.
    """
    registered_files = [f"{name}.json" for name in plugins.list_entries("models")]
    for name in (*registered_files, *_MENTION_FILES):
        facts = read_json_table(folder / name)
        if facts:
            return facts
    return {}


def load(
    path: str | Path,
    device: str = "cpu",
    backbone: str | None = None,
    *,
    calibrated: bool = True,
    dictionary: str | None = None,
    workers: int | Literal["auto"] = 1,
) -> SavedModel:
    """Load a saved model.

    Args:
        path: The model's folder.
        device: Device to compute on, as torch names it.
        backbone: New location of the model's frozen encoder, if it has moved.
        calibrated: Whether to use a calibration in the folder.
        dictionary: New location of the dictionary or encoder that a phenotyping model
            reads notes with, if it has moved.
        workers: Number of processes that predict at the same time in `stream` and
            `predict_file`. "auto" starts several only for large inputs: with a model of
            mentions, if the input is known to have 10,000 texts or more; with a
            phenotyping model, after the first 10,000. It starts one for each free core,
            or for each GPU with the device "cuda:*". The predictions are bit-identical
            with any number of workers.

    Returns:
        A `MentionModel`, or a `PatientModel`.

    Raises:
        ConfigError: `path` is neither text nor a path object, or an option does not
            apply to the model.
        ModelError: The folder contains no model, or a damaged one.
        MissingExtra: A package is missing.
    """
    folder = find_source_folder(path)
    require_model(folder)
    options = LoadOptions(device, backbone, dictionary, calibrated, workers)
    return find_model_class(folder).load(folder, options)


def load_mention_model(
    path: str | Path, device: str = "cpu", backbone: str | None = None
) -> MentionModel:
    """Load a saved model, which must be one that finds mentions.

    Args:
        path: The model's folder.
        device: As in `load`.
        backbone: As in `load`.

    Raises:
        ConfigError: The model is a phenotyping model.
        ModelError: The folder contains no model, or a damaged one.
        MissingExtra: A package is missing.
    """
    model = load(path, device, backbone)
    if not isinstance(model, MentionModel):
        raise ConfigError(
            f"{path}: this is a phenotyping model: give one that finds mentions"
        )
    return model


def open_model(model: SavedModel | str | Path) -> SavedModel:
    """Return a loaded model unchanged, or load the model in a folder; see `load`."""
    if isinstance(model, MentionModel | PatientModel):
        return model
    return load(require_path(model, "a model's folder"))


def find_source_folder(source: object, expected: str = "a model's folder") -> Path:
    """Return a path, or the folder that a model was loaded from.

    Args:
        source: A path or a loaded model.
        expected: What was expected, for the message.

    Raises:
        ConfigError: The source is neither a path nor a model with a folder.
    """
    if isinstance(source, MentionModel | PatientModel) and source.folder is not None:
        return source.folder
    return require_path(source, expected)
