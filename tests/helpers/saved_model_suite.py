"""What every class of saved models must do, as tests that each class derives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fednotes.core.errors import DataError, ParameterError
from fednotes.core.parsing import read_json_table
from fednotes.jobs.models import (
    find_model_class,
    find_source_folder,
    load,
    open_model,
    read_description,
)
from fednotes.jobs.predict import predict
from fednotes.jobs.saved_models import NoteSource, PredictionOutput, SavedModel

NOTE = "Known gout. He took aspirin against pain."


def make_damaged_model(model: Path, folder: Path) -> Path:
    """Make a folder that has the description files of a model, which are damaged."""
    folder.mkdir()
    for description in model.glob("*.json"):
        (folder / description.name).write_text("damaged")
    return folder


def write_damaged_notes(folder: Path) -> Path:
    """Write notes that end in the middle of the second."""
    path = folder / "notes.jsonl"
    path.write_text('{"id": "1", "text": "pain"}\n{"id": "2"')
    return path


class SavedModelSuite:
    """Tests of a saved model with two types; a subclass has the fixture `folder`."""

    @pytest.fixture
    def model(self, folder: Path) -> SavedModel:
        return load(folder)

    @pytest.fixture
    def notes(self, tmp_path: Path) -> Path:
        path = tmp_path / "notes.jsonl"
        path.write_text(json.dumps({"id": "1", "text": NOTE}) + "\n")
        return path

    def test_the_class_of_a_model_follows_from_its_folder(
        self, model: SavedModel, folder: Path
    ) -> None:
        assert find_model_class(folder) is type(model)

    def test_a_loaded_model_knows_its_folder_and_its_types(
        self, model: SavedModel, folder: Path
    ) -> None:
        assert model.folder == find_source_folder(model) == folder
        assert open_model(model) is model
        assert open_model(folder).types == model.types
        assert len(model.types) == 2
        assert "not calibrated" in model.confidence

    def test_each_input_of_a_list_has_one_prediction(self, model: SavedModel) -> None:
        assert len(model([NOTE, NOTE, "Seen today."])) == 3
        assert model([]) == []

    def test_predicting_a_file_equals_predicting_its_notes(
        self, model: SavedModel, folder: Path, notes: Path
    ) -> None:
        (from_file,) = model.predict_file(notes)
        (from_list,) = model([NOTE])
        assert from_file == from_list
        out = notes.with_name("out.jsonl")
        predict(folder, NoteSource(str(notes)), PredictionOutput(out))
        assert len(out.read_text("utf-8").splitlines()) == 1

    def test_a_file_without_a_note_is_refused_before_the_model_is_loaded(
        self, folder: Path, tmp_path: Path
    ) -> None:
        broken = make_damaged_model(folder, tmp_path / "model")
        path = tmp_path / "notes.jsonl"
        path.write_text('{"id": "1", "tex')
        with pytest.raises(DataError, match=r"notes\.jsonl:1"):
            predict(broken, NoteSource(str(path)))

    def test_a_damaged_file_leaves_no_predictions(
        self, folder: Path, tmp_path: Path
    ) -> None:
        path = write_damaged_notes(tmp_path)
        out = tmp_path / "out.jsonl"
        with pytest.raises(DataError, match=r"notes\.jsonl:2"):
            predict(folder, NoteSource(str(path)), PredictionOutput(out))
        assert not out.exists()

    def test_predictions_never_replace_the_notes(
        self, folder: Path, notes: Path
    ) -> None:
        before = notes.read_bytes()
        for source, out in (
            (notes, notes),
            (notes.parent, notes),
            (notes, notes.parent),
        ):
            with pytest.raises(ParameterError, match=r"`out`.* would replace files"):
                predict(folder, NoteSource(str(source)), PredictionOutput(out))
        assert notes.read_bytes() == before

    def test_an_unknown_format_of_predictions_is_refused(self, folder: Path) -> None:
        with pytest.raises(ParameterError, match=r"`to` = 'xml': .* choose one"):
            predict(folder, NoteSource(text=NOTE), PredictionOutput(to="xml"))

    def test_a_model_is_described_by_its_description_file(
        self, model: SavedModel, folder: Path
    ) -> None:
        facts = read_description(folder)
        assert facts in [read_json_table(path) for path in folder.glob("*.json")]
        description = find_model_class(folder).describe(facts)
        assert description.labels == model.types
        assert " 2 " in description.summary

    @pytest.mark.parametrize("facts", [{}, {"tagset": 3}, {"id2label": []}])
    def test_a_damaged_description_yields_no_labels(
        self, folder: Path, facts: dict[str, object]
    ) -> None:
        assert find_model_class(folder).describe(facts).labels == ()
