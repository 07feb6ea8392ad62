"""Export a saved model to formats that other programs read.

The modules of this folder export models that find mentions. Other packages register
further formats as entry points (`core/plugins.py`), as `apps/phenotyping` does for
models that predict patients.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from fednotes.core import plugins
from fednotes.core.errors import ConfigError, nearest
from fednotes.core.store import write_folder, write_out
from fednotes.jobs.card import card
from fednotes.jobs.export_forms import ExportForm
from fednotes.jobs.models import MentionModel, PatientModel, folder_of
from fednotes.jobs.patient_models import is_patient_model

_CARD = "card"
# The built-in formats and the options that each of them accepts.
_BUILT_IN = {"hf": (), "onnx": ("int8",)}


def forms() -> tuple[str, ...]:
    """Return the names of all export formats."""
    return (*_BUILT_IN, *sorted(plugins.added("exports", _BUILT_IN)), _CARD)


def find(name: str) -> ExportForm:
    """Return the exporter for a format other than "card".

    Raises:
        ConfigError: There is no such format.
    """
    if name in _BUILT_IN:
        module = import_module(f"{__name__}.{name}")
        return ExportForm(module.writer, options=_BUILT_IN[name])
    entry = plugins.added("exports", _BUILT_IN).get(name)
    if entry is None:
        raise ConfigError(f"{name!r} is no form of a model; {nearest(name, forms())}")
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
        form: The format: "hf" (transformers), "onnx", "sklearn" or "card".
        out: A new or empty folder; for "card", a file.
        int8: Quantise weights to eight bits ("onnx" only).
        dictionary: The new path of the model's dictionary or encoder if it has moved
            ("sklearn" only).

    Raises:
        ConfigError: The model cannot be exported to this format, the format does not
            take an option, or the folder is not empty.
        ModelError: The model cannot be read or exported.
        MissingExtra: A package that the format needs is not installed.
    """
    folder, out = folder_of(model), folder_of(out, "a path to write")
    if form == "spacy":
        told = 'nlp.add_pipe("fednotes", config={"model": "MODEL"})'
        raise ConfigError(
            f"spaCy reads a saved model as it is, without an export: {told}"
        )
    place = dictionary and str(dictionary)
    options = {k: v for k, v in (("int8", int8), ("dictionary", place)) if v}
    known_form = None if form == _CARD else find(form)
    other = sorted(options.keys() - set(known_form.options if known_form else ()))
    if other:
        raise ConfigError(f"--{other[0]} is of another form than {form}")
    if known_form is None:
        write_out(out, card(folder))
        return out
    if known_form.of_patients and not is_patient_model(folder):
        raise ConfigError(
            f"{folder}: finds mentions, and {form} is for models of patients: "
            "`fednotes export onnx` and `hf` are for this one"
        )
    if is_patient_model(folder) and not known_form.of_patients:
        raise ConfigError(
            f"{folder}: is a model of patients, and {form} is for models that find mentions: "
            "`fednotes export sklearn` writes its classifiers"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"{out}: there is something already; name a folder that is new or empty"
        )
    write_folder(out, known_form.writer(folder, **options), private=False)
    return out
