"""`fednotes.export` and `fednotes.serve` as functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from applications import needs_app
from every_kind import make
from typer.testing import CliRunner

import fednotes as fn
from fednotes.cli.app import app
from fednotes.core.errors import ConfigError
from fednotes.taggers.saving import save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_model(make("tagger", folder), folder / "model")
    return folder / "model"


def test_an_opened_model_is_accepted_in_place_of_its_folder(
    model: Path, tmp_path: Path
) -> None:
    opened = fn.load(model)
    assert isinstance(opened, fn.MentionModel)
    card = fn.export(opened, "card", tmp_path / "opened.md").read_text()
    assert card == fn.export(model, "card", tmp_path / "named.md").read_text()
    with pytest.raises(ConfigError, match=r"expected .*, not MentionModel$"):
        fn.export(fn.MentionModel(opened.model), "card", tmp_path / "x")


def test_a_model_is_exported_by_command_and_function(
    model: Path, tmp_path: Path
) -> None:
    """By the command and by the function; what a form does not have is said."""
    assert fn.export(model, "card", tmp_path / "card.md") == tmp_path / "card.md"
    command = CliRunner().invoke(app, ["export", "card", str(model)])
    assert command.stdout == (tmp_path / "card.md").read_text()
    (tmp_path / "edited.md").write_text("mine")
    words = ["export", "card", str(model), str(tmp_path / "edited.md")]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert (tmp_path / "edited.md").read_text() == command.stdout
    for form, options, message in (
        ("hf", {}, "fednotes export onnx"),
        ("onxx", {}, "did you mean 'onnx'"),
        ("spacy", {}, "without an export"),
        ("card", {"int8": True}, "`int8` does not apply to the form .card."),
        ("onnx", {"dictionary": "d"}, "`dictionary` does not apply to the form .onnx."),
    ):
        with pytest.raises(ConfigError, match=message):
            fn.export(model, form, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_an_export_for_patients_is_refused_for_mentions(
    model: Path, tmp_path: Path
) -> None:
    needs_app("phenotyping")
    with pytest.raises(ConfigError, match="exports only models of patients"):
        fn.export(model, "sklearn", tmp_path / "out")


def test_wrong_arguments_are_refused_with_what_was_expected(model: Path) -> None:
    wrong_kind: Any = 5
    with pytest.raises(ConfigError, match="unknown form 5: known: card, "):
        fn.export(model, wrong_kind, "out")
    folder = "expected a model's folder, not NoneType"
    with pytest.raises(fn.FednotesError, match=folder):
        fn.export(None, "hf", "out")
    with pytest.raises(fn.FednotesError, match=folder):
        fn.serve(None)
    with pytest.raises(fn.FednotesError, match="70000: the server cannot listen there"):
        fn.serve(model, port=70000)
