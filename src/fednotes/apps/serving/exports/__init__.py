"""A saved model in forms that other programs read: a form is a file of this folder."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from fednotes.core.errors import ConfigError, nearest
from fednotes.core.store import write_folder, write_out
from fednotes.jobs.card import card
from fednotes.jobs.models import MentionModel, PatientModel, folder_of
from fednotes.jobs.patient_models import is_patient_model

FORMS = {
    "hf": (),
    "onnx": ("int8",),
    "sklearn": ("dictionary",),
    "card": (),
}  # and their options


def export(
    model: str | Path | MentionModel | PatientModel,
    form: str,
    out: str | Path,
    *,
    int8: bool = False,
    dictionary: str | Path | None = None,
) -> Path:
    """Write a saved model in a form that other programs read; where it is.

    model: opened, or its folder. form: "hf" (transformers), "onnx", "sklearn", or "card". out: a
    new or empty folder; of a card, a file. int8: of "onnx", eight bits a number. dictionary: of
    "sklearn", where the model's is, or its encoder, if it has moved. Raises ConfigError
    for a form that the model does not have or a folder that is not empty, ModelError, MissingExtra.
    """
    folder, out = folder_of(model), folder_of(out, "a path to write")
    if form == "spacy":
        told = 'nlp.add_pipe("fednotes", config={"model": "MODEL"})'
        raise ConfigError(
            f"spaCy reads a saved model as it is, without an export: {told}"
        )
    if form not in FORMS:
        raise ConfigError(f"{form!r} is no form of a model; {nearest(form, FORMS)}")
    place = dictionary and str(dictionary)
    options = {k: v for k, v in (("int8", int8), ("dictionary", place)) if v}
    if other := sorted(options.keys() - {*FORMS[form]}):
        raise ConfigError(f"--{other[0]} is of another form than {form}")
    if form == "card":
        write_out(out, card(folder))
        return out
    if is_patient_model(folder) != (form == "sklearn"):
        raise ConfigError(
            f"{folder}: finds mentions; scikit-learn's form is for models of patients: "
            "`fednotes export onnx` and `hf` are for this one"
            if form == "sklearn"
            else f"{folder}: is a model of patients, and {form} is for models that find mentions: "
            "`fednotes export sklearn` writes its classifiers"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"{out}: there is something already; name a folder that is new or empty"
        )
    form_of = import_module(
        f"{__name__}.{form}"
    )  # its `writer` gives what fills a new folder
    write_folder(out, form_of.writer(folder, **options), private=False)
    return out
