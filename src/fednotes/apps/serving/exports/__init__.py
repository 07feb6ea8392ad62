"""Export a saved model to forms that other programs read.

The modules of this folder export models that find mentions. Applications and other
packages register further forms as entry points (`core/plugins.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from fednotes.core import plugins
from fednotes.core.errors import ConfigError, ParameterError, suggest_name
from fednotes.core.settings import require_path
from fednotes.core.store import write_folder, write_out
from fednotes.jobs.card import render_card
from fednotes.jobs.export_forms import ExportForm
from fednotes.jobs.models import find_model_class, find_source_folder
from fednotes.jobs.saved_models import ModelInput, SavedModel

_CARD = "card"
# Models, by what they read, in words.
_MODELS: dict[ModelInput, str] = {
    "documents": "models that find mentions",
    "patients": "models of patients",
}
# The forms of this folder and the options that each of them accepts.
_BUILT_IN: dict[str, tuple[str, ...]] = {"hf": (), "onnx": ("int8",)}


def list_forms() -> tuple[str, ...]:
    """Return the names of the forms in which models are exported."""
    return (
        *_BUILT_IN,
        *sorted(plugins.list_added_entries("exports", _BUILT_IN)),
        _CARD,
    )


def find_form(name: str) -> ExportForm:
    """Return the export form with this name; "card" is not one.

    Raises:
        ConfigError: There is no such form.
    """
    if name in _BUILT_IN:
        module = import_module(f"{__name__}.{name}")
        return ExportForm(module.make_writer, options=_BUILT_IN[name])
    entry = plugins.list_added_entries("exports", _BUILT_IN).get(name)
    if entry is None:
        raise ConfigError(f"unknown form {name!r}: {suggest_name(name, list_forms())}")
    form: ExportForm = plugins.load_entry(entry, ExportForm)
    return form


def export(
    model: str | Path | SavedModel,
    form: str,
    out: str | Path,
    *,
    int8: bool = False,
    dictionary: str | Path | None = None,
) -> Path:
    """Export a saved model and return the path of the export.

    Args:
        model: A loaded model, or its folder.
        form: "hf" (transformers), "onnx", "sklearn" or "card".
        out: A new or empty folder; for "card", a file.
        int8: Quantise weights to eight bits ("onnx" only).
        dictionary: The new path of the model's dictionary or encoder if it has moved
            ("sklearn" only).

    Raises:
        ConfigError: The model cannot be exported to this form, the form does not take
            an option, or the folder is not empty.
        ModelError: The model cannot be read or exported.
        MissingExtra: A package that the form needs is not installed.
    """
    folder = find_source_folder(model)
    target = require_path(out, "a path to write")
    if form == "spacy":
        raise ConfigError(
            "spaCy reads a saved model without an export: "
            'nlp.add_pipe("fednotes", config={"model": "MODEL"})'
        )
    options: dict[str, Any] = {}
    if int8:
        options["int8"] = True
    if dictionary:
        options["dictionary"] = str(dictionary)
    if form == _CARD:
        _refuse_other_options(options, (), form)
        write_out(target, render_card(folder))
        return target

    export_form = find_form(form)
    _refuse_other_options(options, export_form.options, form)
    _require_matching_model(folder, form, export_form)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(
            f"{target}: already exists and is not an empty folder: give a new or empty "
            "one"
        )
    write_into = export_form.writer(folder, **options)
    write_folder(target, write_into, private=False)
    return target


def _refuse_other_options(
    options: Iterable[str], known: tuple[str, ...], form: str
) -> None:
    """Raise ParameterError if an option does not belong to a form."""
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ParameterError(f"`{unknown[0]}` does not apply to the form {form!r}")


def _require_matching_model(folder: Path, form: str, export_form: ExportForm) -> None:
    """Raise ConfigError unless a form is for models like the one in a folder.

    Args:
        folder: The folder of the saved model.
        form: The name of the form.
        export_form: The form.
    """
    reads = find_model_class(folder).reads
    if export_form.reads == reads:
        return
    fitting = [
        name for name in list_forms() if name == _CARD or find_form(name).reads == reads
    ]
    raise ConfigError(
        f"{folder}: the form {form!r} exports only {_MODELS[export_form.reads]}; for "
        f"this model, use one of the forms {', '.join(fitting)}"
    )
