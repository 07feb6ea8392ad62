"""Export a saved model to forms that other programs read.

The modules of this folder export models that find mentions. Other packages register
further forms as entry points (`core/plugins.py`), as `apps/phenotyping` does for models
that predict patients.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from fednotes.core import plugins
from fednotes.core.errors import ConfigError, ParameterError, nearest
from fednotes.core.settings import path_of
from fednotes.core.store import write_folder, write_out
from fednotes.jobs.card import card
from fednotes.jobs.export_forms import ExportForm
from fednotes.jobs.models import MentionModel, PatientModel, folder_of
from fednotes.jobs.patient_models import is_patient_model

_CARD = "card"
# The forms of this folder and the options that each of them accepts.
_BUILT_IN: dict[str, tuple[str, ...]] = {"hf": (), "onnx": ("int8",)}


def list_forms() -> tuple[str, ...]:
    """Return the names of all forms."""
    return (*_BUILT_IN, *sorted(plugins.added("exports", _BUILT_IN)), _CARD)


def find_form(name: str) -> ExportForm:
    """Return the form with this name, other than "card".

    Raises:
        ConfigError: There is no such form.
    """
    if name in _BUILT_IN:
        module = import_module(f"{__name__}.{name}")
        return ExportForm(module.writer, options=_BUILT_IN[name])
    entry = plugins.added("exports", _BUILT_IN).get(name)
    if entry is None:
        raise ConfigError(f"unknown form {name!r}; {nearest(name, list_forms())}")
    form: ExportForm = plugins.load(entry, ExportForm)
    return form


def export(
    model: str | Path | MentionModel | PatientModel,
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
    folder = folder_of(model)
    target = path_of(out, "a path to write")
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
        _require_options(options, (), form)
        write_out(target, card(folder))
        return target

    export_form = find_form(form)
    _require_options(options, export_form.options, form)
    _require_kind(folder, form, of_patients=export_form.of_patients)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(
            f"{target}: already exists and is not an empty folder; name a new or empty "
            "one"
        )
    fill = export_form.writer(folder, **options)
    write_folder(target, fill, private=False)
    return target


def _require_options(options: Iterable[str], known: tuple[str, ...], form: str) -> None:
    """Raise ParameterError if an option does not belong to a form."""
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ParameterError(f"`{unknown[0]}` does not apply to the form {form!r}")


def _require_kind(folder: Path, form: str, *, of_patients: bool) -> None:
    """Raise ConfigError unless a model is of the kind that a form exports.

    Args:
        folder: The folder of the saved model.
        form: The name of the form.
        of_patients: Whether the form is for models of patients, not of mentions.
    """
    if of_patients == is_patient_model(folder):
        return
    if of_patients:
        raise ConfigError(
            f"{folder}: this model finds mentions, and the form {form!r} is for models "
            "of patients; use `fednotes export onnx` or `fednotes export hf`"
        )
    raise ConfigError(
        f"{folder}: this is a model of patients, and the form {form!r} is for models "
        "that find mentions; use `fednotes export sklearn`"
    )
