"""A saved phenotyping model satisfies the contract of saved models."""

from __future__ import annotations

from pathlib import Path

import pytest
from patient_files import save_model
from saved_model_suite import NOTE, SavedModelSuite

from fednotes.core.errors import ConfigError, ParameterError
from fednotes.core.types import Document
from fednotes.jobs.models import load, load_mention_model
from fednotes.jobs.predict import predict
from fednotes.jobs.saved_models import (
    EvaluationOptions,
    NoteSource,
    PredictionOutput,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    return save_model(place / "model", "synthetic", place, "asthma", "gout")


class TestPhenotypeModel(SavedModelSuite):
    """The suite for a phenotyping model, whose folder is the fixture above."""


@pytest.mark.parametrize(
    ("parameter", "options"),
    [
        ("types", EvaluationOptions(types=("gout",))),
        ("format", EvaluationOptions(format="jsonl")),
        ("on_error", EvaluationOptions(on_error="skip")),
    ],
)
def test_options_of_annotated_text_are_refused(
    folder: Path, parameter: str, options: EvaluationOptions
) -> None:
    with pytest.raises(
        ParameterError, match=f"`{parameter}` applies only to annotated text"
    ):
        load(folder).evaluate("patients.jsonl", options)


def test_a_model_of_patients_refuses_options_for_mentions(folder: Path) -> None:
    model = load(folder)
    assert model.reads == "patients"
    with pytest.raises(
        ConfigError, match="path of a file or folder of labelled patients"
    ):
        model.evaluate([Document("1", NOTE)])
    with pytest.raises(ConfigError, match="calibrated in training"):
        model.judge_confidences([Document("1", NOTE)], None, "auto")
    with pytest.raises(ParameterError, match="`threshold` applies only to mentions"):
        predict(folder, NoteSource(text=NOTE), PredictionOutput(threshold=0.5))
    with pytest.raises(ParameterError, match="written as jsonl or csv"):
        predict(folder, NoteSource(text=NOTE), PredictionOutput(to="brat"))
    with pytest.raises(ParameterError, match="a whole number of at least 1, or auto"):
        load(folder, workers=0)
    with pytest.raises(ConfigError, match="give one that finds mentions"):
        load_mention_model(folder)
