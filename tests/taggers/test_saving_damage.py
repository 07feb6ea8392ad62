"""A saved model with any change loads or is refused in one line."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from every_kind import make
from saved_folder_suite import DEEP, ODD, SavedFolderSuite

from fednotes.cli import app
from fednotes.core.errors import ModelError
from fednotes.core.types import TagSet
from fednotes.taggers.saving import (
    build_model,
    load_model,
    read_model_config,
    save_model,
)


class TestTagger(SavedFolderSuite):
    description = "tagger.json"
    weights = "tagger.safetensors"
    ignored = ("tensors",)

    @staticmethod
    def save(folder: Path) -> None:
        config = read_model_config(
            {"kind": "tagger", "char_filters": 6, "cnn_filters": 5, "lstm_units": 4}
        )
        save_model(build_model(config, TagSet(("ADR", "Drug")), 1), folder)

    @staticmethod
    def load(folder: Path) -> object:
        return load_model(folder)


class OnBackbone(SavedFolderSuite):
    """A kind that begins with a pre-trained model.

    Attributes:
        kind: A key of `every_kind.KINDS`.
        backbones: The folder of the pre-trained model.
    """

    kind: ClassVar[str]
    backbones: ClassVar[Path]
    description = "model.json"
    weights = "model.safetensors"
    ignored = ("tensors",)

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _backbones(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.backbones = tmp_path_factory.mktemp("backbones")

    @classmethod
    def save(cls, folder: Path) -> None:
        save_model(make(cls.kind, cls.backbones), folder)

    @staticmethod
    def load(folder: Path) -> object:
        return load_model(folder)


class TestEncoderTagger(OnBackbone):
    kind = "lora"


class TestPromptBart(OnBackbone):
    kind = "prompt-bart"


class TestTokenClassifier(OnBackbone):
    """A Hugging Face directory: transformers writes it, without a checksum."""

    kind = "token-classifier"
    description = "config.json"
    varied = ("architectures", "fednotes", "hidden_size", "id2label", "model_type")
    has_checksum = False
    has_one_type = False
    has_version = False
    writers = ("transformers.modeling_utils.safe_save_file",)

    @pytest.mark.slow
    def test_a_description_with_an_odd_value_loads_or_is_refused_in_one_line(
        self, folder: Path
    ) -> None:
        super().test_a_description_with_an_odd_value_loads_or_is_refused_in_one_line(
            folder
        )

    def test_an_odd_architecture_is_refused_in_one_line(self, folder: Path) -> None:
        path = folder / self.description
        facts = json.loads(path.read_text())
        for odd in ODD:
            path.write_text(json.dumps(facts | {"architectures": odd}))
            assert self.refusal(folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tagger"
    TestTagger.save(folder)
    return folder


@pytest.mark.parametrize("text", DEEP)
def test_predict_refuses_a_nested_description_in_one_line(
    saved: Path,
    tmp_path: Path,
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(saved, tmp_path / "m")
    (tmp_path / "m" / "tagger.json").write_text(text)
    (tmp_path / "note.txt").write_text("took aspirin")
    words = ["fednotes", "predict", str(tmp_path / "m"), str(tmp_path / "note.txt")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert "tagger.json" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "key", ["hashed_words", "char_filters", "cnn_filters", "lstm_units"]
)
def test_a_description_of_a_huge_model_is_refused_before_it_is_built(
    key: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a layer would take over 32 GiB; nothing near that is asked for."""
    shutil.copytree(saved, tmp_path / "m")
    file = tmp_path / "m" / "tagger.json"
    facts = json.loads(file.read_text())
    facts["config"][key] = 2**33
    file.write_text(json.dumps(facts))
    largest = 0
    empty = torch.empty

    def watched(*size: Any, **options: Any) -> Any:
        nonlocal largest
        allocated = empty(*size, **options)
        largest = max(largest, allocated.numel())
        return allocated

    monkeypatch.setattr(torch, "empty", watched)
    with pytest.raises(ModelError, match=r"tagger\.json: "):
        load_model(tmp_path / "m")
    assert largest < 2**20


def test_more_types_than_the_parameters_can_predict_are_refused(
    saved: Path, tmp_path: Path
) -> None:
    """The rules of decoding would have ten thousand times ten thousand numbers."""
    shutil.copytree(saved, tmp_path / "m")
    file = tmp_path / "m" / "tagger.json"
    facts = json.loads(file.read_text())
    facts["tagset"]["types"] = [f"type{n}" for n in range(5_000)]
    file.write_text(json.dumps(facts))
    with pytest.raises(ModelError, match="describes 5,000 entity types, far more than"):
        load_model(tmp_path / "m")


@pytest.mark.parametrize("name", ["", "Drug", "\ud800"])
def test_a_type_that_no_prediction_could_name_is_refused(
    name: str, saved: Path, tmp_path: Path
) -> None:
    """It has no name, that of another type, or one that UTF-8 cannot encode."""
    shutil.copytree(saved, tmp_path / "m")
    file = tmp_path / "m" / "tagger.json"
    facts = json.loads(file.read_text())
    facts["tagset"]["types"] = ["Drug", name]
    file.write_text(json.dumps(facts))
    with pytest.raises(ModelError, match="the name of an entity type is empty, occurs"):
        load_model(tmp_path / "m")


@pytest.mark.parametrize("name", [2**63, None, ["Drug"]])
def test_a_type_that_is_no_text_is_refused(
    name: Any, saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path / "m")
    file = tmp_path / "m" / "tagger.json"
    facts = json.loads(file.read_text())
    facts["tagset"]["types"][0] = name
    file.write_text(json.dumps(facts))
    with pytest.raises(ModelError, match="the name of an entity type is not a string"):
        load_model(tmp_path / "m")
