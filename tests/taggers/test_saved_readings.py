"""Models of earlier versions, whose words were tokenised one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_classifiers import build
from tiny_tokenizers import FAMILIES, save_family

from fednotes.core.errors import ModelError
from fednotes.core.types import TagSet
from fednotes.encoders.pretrained import compute_folder_fingerprint
from fednotes.taggers.saving import (
    build_model,
    load_model,
    read_model_config,
    save_model,
)

pytest.importorskip("transformers")
ALIKE = ("bert",)  # words one by one have the sub-words of their text


def changed(file: Path, change: Any) -> None:
    facts = json.loads(file.read_text())
    change(facts)
    file.write_text(json.dumps(facts))


@pytest.mark.parametrize("family", FAMILIES)
def test_older_fine_tuned_models_load_unless_their_reading_would_change(
    family: str, tmp_path: Path
) -> None:
    """They are read on where nothing changes, and refused where they would find less."""
    model = build(save_family(tmp_path / "encoder", family))
    save_model(model, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    assert json.loads(file.read_text())["fednotes"]["reading"] == "text"
    load_model(tmp_path / "model")
    changed(file, lambda facts: facts["fednotes"].pop("reading"))
    if family in ALIKE:
        load_model(tmp_path / "model")
    else:
        with pytest.raises(
            ModelError, match=r"words to the tokenizer one by one.*train the model"
        ):
            load_model(tmp_path / "model")
    changed(file, lambda facts: facts["fednotes"].update(reading="letters"))
    if family not in ALIKE:
        with pytest.raises(
            ModelError, match=r"'letters'.*install the version that wrote it"
        ):
            load_model(tmp_path / "model")
    changed(file, lambda facts: facts.pop("fednotes"))
    load_model(tmp_path / "model")  # another program's


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["encoder-tagger", "tagger"])
def test_models_on_a_frozen_encoder_record_how_it_reads_text(
    kind: str, family: str, tmp_path: Path
) -> None:
    """The encoder's fingerprint names the reading, and so does the folder."""
    encoder = save_family(tmp_path / "encoder", family)
    table: dict[str, Any] = {
        "kind": "encoder-tagger",
        "encoder": str(encoder),
        "tuning": "none",
    }
    if kind == "tagger":
        table = {"contextual": str(encoder), "characters": False, "lstm_units": 4}
    model = build_model(read_model_config(table), TagSet(("Drug",)), 1)
    save_model(model, tmp_path / "model")
    load_model(tmp_path / "model")
    file = tmp_path / "model" / ("tagger.json" if kind == "tagger" else "model.json")
    name = "contextual" if kind == "tagger" else "backbone"
    old_fingerprint = compute_folder_fingerprint(encoder, kind="backbone", version=1)
    if kind == "tagger":
        options: dict[str, Any] = {"pooling": "mean", "layers": 1, "layer": None}
        old_fingerprint = compute_folder_fingerprint(
            encoder, kind="transformers", version=1, **options
        )

    def as_before(facts: dict[str, Any]) -> None:
        assert facts[name].pop("reading") == "text"
        facts[name]["fingerprint"] = old_fingerprint

    changed(file, as_before)
    if family in ALIKE:
        load_model(tmp_path / "model")
    else:
        with pytest.raises(ModelError, match=r"one by one.*train the model again"):
            load_model(tmp_path / "model")
