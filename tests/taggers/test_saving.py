"""Saved models of every kind: complete, small, and refused if something is wrong."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from every_kind import DOCUMENTS, KINDS, TAGS, make, write_backbone
from safetensors.torch import load_file, save_file

from fednotes.api import evaluate
from fednotes.core.errors import ConfigError, ModelError
from fednotes.core.types import Document
from fednotes.jobs.predict import predict
from fednotes.jobs.saved_models import NoteSource
from fednotes.taggers.saving import (
    build_model,
    list_model_kinds,
    load_model,
    read_model_config,
    save_model,
)

transformers = pytest.importorskip("transformers")

TEXT = DOCUMENTS[0].text
# which is a directory of others
MODELS = [kind for kind in KINDS if kind != "token-classifier"]


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return make(request.param, tmp_path)


def test_a_loaded_model_equals_the_saved_one(model: Any, tmp_path: Path) -> None:
    """Parameters bit for bit, predictions and losses; nothing of the backbone on disk."""
    path = tmp_path / "model"
    save_model(model, path)
    stem = "tagger" if model.config.kind == "tagger" else "model"
    assert sorted(f.name for f in path.iterdir()) == [
        f"{stem}.json",
        f"{stem}.safetensors",
    ]
    stored = load_file(path / f"{stem}.safetensors")
    assert set(stored) == set(model.trainable())
    assert sum(v.numel() for v in stored.values()) == sum(
        p.numel() for p in model.trainable().values()
    )
    state = torch.random.get_rng_state()
    loaded: Any = load_model(path)
    assert torch.equal(state, torch.random.get_rng_state())
    assert not loaded.training
    assert (loaded.config, loaded.tagset) == (model.config, model.tagset)
    for name, parameter in model.trainable().items():
        assert torch.equal(parameter, loaded.trainable()[name])
        assert parameter.data_ptr() != loaded.trainable()[name].data_ptr()
    assert loaded.predict(DOCUMENTS) == model.predict(DOCUMENTS)
    model.train(False)
    losses = [m.losses(m.prepare(DOCUMENTS), [0, 1]).source for m in (model, loaded)]
    assert torch.equal(*losses)


def _edit(path: Path, **changes: Any) -> None:
    file = next(path.glob("*.json"))
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _replace(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replace tensors, and make the description agree with them."""
    file = next(path.glob("*.safetensors"))
    save_file(tensors, file)
    _edit(path, sha256=hashlib.sha256(file.read_bytes()).hexdigest())


def _damage(path: Path, kind: str) -> None:
    weights = next(path.glob("*.safetensors"))
    tensors = load_file(weights)
    name = sorted(tensors)[0]
    if kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:-9])
    elif kind == "nan":
        tensors[name].view(-1)[0] = float("nan")
        _replace(path, tensors)
    elif kind == "missing":
        _replace(path, {n: v for n, v in tensors.items() if n != name})
    elif kind == "unknown":
        _replace(path, tensors | {"encoder.weight": torch.zeros(2)})
    elif kind == "shape":
        _replace(path, tensors | {name: torch.zeros(1, 1, 1, 1)})
    elif kind == "no weights":
        weights.unlink()
    elif kind == "later":
        _edit(path, format=2, fednotes="7.0")
    elif kind == "kind":
        _edit(path, kind="promt-bart")
    elif kind == "config":
        _edit(path, config={"dropuot": 0.1})
    elif kind == "truncated and resealed":
        weights.write_bytes(weights.read_bytes()[:-100])
        _edit(path, sha256=hashlib.sha256(weights.read_bytes()).hexdigest())
    elif kind == "no facts":
        next(path.glob("*.json")).unlink()
    elif kind == "tagset":
        _edit(path, tagset={"types": ["A"]})
    else:
        next(path.glob("*.json")).write_text({"not json": "{", "list": "[]"}[kind])


DAMAGES = {
    "truncated": "the SHA-256 differs",
    "nan": "is not finite",
    "missing": "is missing",
    "unknown": r"'encoder\.weight' is unknown",
    "shape": r"has shape \[1, 1, 1, 1\]",
    "no weights": r"\.safetensors: cannot be read",
    "later": r"format 2, written by fednotes 7\.0.*install the version that wrote it",
    "kind": "did you mean 'prompt-bart'",
    "config": "did you mean 'dropout'",
    "not json": "not JSON",
    "truncated and resealed": "damaged",
    "no facts": "no model here",
    "list": "not a model's description",
    "tagset": "incomplete",
}


def test_a_damaged_model_is_refused_in_one_line(model: Any, tmp_path: Path) -> None:
    save_model(model, tmp_path / "whole")
    for kind, message in DAMAGES.items():
        path = tmp_path / kind
        shutil.copytree(tmp_path / "whole", path)
        _damage(path, kind)
        with pytest.raises(ModelError, match=message) as caught:
            load_model(path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("which", ["lora", "prompt-bart"])
def test_a_backbone_may_have_moved_but_not_changed(which: str, tmp_path: Path) -> None:
    model = make(which, tmp_path)
    save_model(model, tmp_path / "model")
    original = tmp_path / ("bart" if which == "prompt-bart" else "bert")
    moved = tmp_path / "elsewhere"
    shutil.move(original, moved)
    with pytest.raises(ModelError, match=r"no such directory.*with `backbone`"):
        load_model(tmp_path / "model")
    loaded = load_model(tmp_path / "model", backbone=str(moved))
    assert loaded.predict(DOCUMENTS) == model.predict(DOCUMENTS)
    save_model(loaded, tmp_path / "again")
    assert load_model(tmp_path / "again").predict(DOCUMENTS) == model.predict(DOCUMENTS)
    write_backbone(moved, "bart" if which == "prompt-bart" else "bert", seed=1)
    with pytest.raises(
        ModelError, match=r"has a different encoder: give the path of .*`backbone`"
    ):
        load_model(tmp_path / "model", backbone=str(moved))


def test_a_relative_backbone_is_saved_as_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative backbone is saved as what it was then."""
    make("lora", tmp_path)
    monkeypatch.chdir(tmp_path)
    model = build_model(
        read_model_config({"kind": "encoder-tagger", "encoder": "bert"}), TAGS, 1
    )
    save_model(model, "model")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert load_model("../model").predict(DOCUMENTS) == model.predict(DOCUMENTS)


def test_the_name_of_the_minilm_package_is_saved_unchanged_beside_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder's name is opened as the package, so it must be saved as the package."""
    (tmp_path / "minilm").mkdir()
    monkeypatch.chdir(tmp_path)
    config = read_model_config({"kind": "encoder-tagger", "encoder": "minilm"})
    save_model(build_model(config, TAGS, 1), "model")
    facts = json.loads((tmp_path / "model" / "model.json").read_text())
    assert facts["config"]["encoder"] == "minilm"


def test_folders_of_earlier_versions_are_loaded(tmp_path: Path) -> None:
    """They name no kind: a tagger."""
    model = make("tagger", tmp_path)
    save_model(model, tmp_path / "model")
    file = tmp_path / "model" / "tagger.json"
    facts = json.loads(file.read_text())
    assert facts.pop("kind") == "tagger"
    assert "kind" not in facts["config"]
    file.write_text(json.dumps(facts))
    assert load_model(tmp_path / "model").predict(DOCUMENTS) == model.predict(DOCUMENTS)


def test_a_model_of_another_kind_replaces_the_whole_folder(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save_model(make("tagger", tmp_path), path)
    lora = make("lora", tmp_path)
    save_model(lora, path)
    assert sorted(f.name for f in path.iterdir()) == ["model.json", "model.safetensors"]
    before = {f.name: f.read_bytes() for f in path.iterdir()}
    with torch.no_grad():
        lora.lora.up[0, 0, 0] = float("inf")
    with pytest.raises(ModelError, match=r"'lora\.up' is not finite"):
        save_model(lora, path)
    assert {f.name: f.read_bytes() for f in path.iterdir()} == before
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "a.txt").write_text("x")
    with pytest.raises(ModelError, match="is not a model's folder"):
        save_model(lora, notes)
    with pytest.raises(ModelError, match="no model here"):
        load_model(notes)


@pytest.mark.parametrize("which", ["lora", "prompt-bart", "token-classifier"])
def test_predict_and_evaluate_accept_every_kind(
    which: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fednotes.data.formats import FORMATS

    model = make(which, tmp_path)
    save_model(model, tmp_path / "model")
    predict(tmp_path / "model", NoteSource("-", text=TEXT))
    line = json.loads(capsys.readouterr().out.splitlines()[0])
    (predicted,) = model.predict((Document("text", TEXT),))
    assert line["text"] == TEXT
    assert len(line["spans"]) == len(predicted.spans)
    FORMATS["jsonl"].write(DOCUMENTS, tmp_path / "gold.jsonl")
    evaluation = evaluate(tmp_path / "model", tmp_path / "gold.jsonl")
    assert evaluation.scores["support"] == sum(len(d.spans) for d in DOCUMENTS)
    assert evaluation.unknown == ()


def test_every_kind_is_configured_by_its_name() -> None:
    for kind in list_model_kinds():
        assert read_model_config({"kind": kind}).kind == kind
    assert read_model_config({"tagger": "cnn-crf", "dropout": 0.5}).kind == "tagger"
    with pytest.raises(
        ConfigError, match="model: unknown kind 'promptbart': did you mean 'prompt-b"
    ):
        read_model_config({"kind": "promptbart"})
    with pytest.raises(ConfigError, match="unknown kind 3"):
        read_model_config({"kind": 3})
