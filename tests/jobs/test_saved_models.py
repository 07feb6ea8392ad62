"""Models that find mentions satisfy the contract of saved models."""

from __future__ import annotations

from pathlib import Path

import pytest
from every_kind import make
from saved_model_suite import (
    NOTE,
    SavedModelSuite,
    make_damaged_model,
    write_damaged_notes,
)

from fednotes.core.errors import ConfigError, DataError, ModelError, ParameterError
from fednotes.jobs.models import (
    MentionModel,
    find_model_class,
    load,
    open_model,
    read_description,
)
from fednotes.jobs.predict import predict
from fednotes.jobs.saved_models import (
    EvaluationOptions,
    LoadOptions,
    NoteSource,
    PredictionOutput,
)
from fednotes.taggers.saving import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    save_model(make("tagger", place), place / "model")
    return place / "model"


class TestMentionModel(SavedModelSuite):
    """The suite for a light tagger, whose folder is the fixture above."""


def test_a_model_of_mentions_reads_documents(folder: Path, tmp_path: Path) -> None:
    assert find_model_class(folder) is find_model_class(tmp_path) is MentionModel
    assert load(folder).reads == "documents"


def test_a_model_of_mentions_refuses_options_for_patients(folder: Path) -> None:
    with pytest.raises(
        ParameterError, match=r"`dictionary` applies only to phenotyping"
    ):
        load(folder, dictionary="terms.csv")
    options = EvaluationOptions(labels=Path("labels.csv"))
    with pytest.raises(ParameterError, match=r"`labels` applies only to phenotyping"):
        load(folder).evaluate("notes.csv", options)
    with pytest.raises(ParameterError, match="written as jsonl, csv, conll, parquet"):
        predict(folder, NoteSource(text=NOTE), PredictionOutput(to="xlsx"))


def test_a_damaged_file_is_refused_before_a_model_of_mentions_is_loaded(
    folder: Path, tmp_path: Path
) -> None:
    """Predictions of the notes before the damage would be written already."""
    model = make_damaged_model(folder, tmp_path / "model")
    with pytest.raises(DataError, match=r"notes\.jsonl:2"):
        predict(model, NoteSource(str(write_damaged_notes(tmp_path))))


def test_brat_predictions_need_a_folder(folder: Path) -> None:
    with pytest.raises(ParameterError, match="give the folder in `out`"):
        predict(folder, NoteSource(text=NOTE), PredictionOutput(to="brat"))


def test_a_value_that_is_neither_a_model_nor_a_path_is_refused() -> None:
    for wrong in (None, 3):
        with pytest.raises(ConfigError, match="expected a model's folder, not"):
            open_model(wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="expected a model's folder, not"):
            load(wrong)  # type: ignore[arg-type]


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    assert read_description(tmp_path) == {}
    with pytest.raises(ModelError, match="no model here"):
        load(tmp_path)
    with pytest.raises(ModelError, match="no model here"):
        predict(tmp_path, NoteSource(text=NOTE), options=LoadOptions())
