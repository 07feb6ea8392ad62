"""A kind of model is one file: this one stands in a folder of its own and nothing lists
it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from tiny_jobs import SITES, corpus

from fednotes import taggers
from fednotes.core.errors import ConfigError
from fednotes.core.types import Document, Span, TagSet
from fednotes.jobs.job_file import load_job
from fednotes.jobs.simulate import simulate
from fednotes.taggers.saving import (
    build_model,
    kinds,
    load_model,
    model_config,
    save_model,
)

CAPITALS = Path(__file__).parents[1] / "data" / "samples" / "capitals.py.txt"
TEXTS = (
    "He took Aspirin and slept .",
    "Aspirin helps .",
    "She has pain from Ibuprofen .",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "capitals.py").write_text(CAPITALS.read_text())
    monkeypatch.setattr(taggers, "__path__", [*taggers.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "fednotes.taggers.capitals", raising=False)
    return tmp_path


def _marked(text: str) -> Document:
    drugs = [word for word in text.split() if word in ("Aspirin", "Ibuprofen")]
    starts = [text.index(drug) for drug in drugs]
    pairs = zip(starts, drugs, strict=True)
    return Document(text, text, tuple(Span(a, a + len(d), "Drug") for a, d in pairs))


def test_it_is_found_trained_and_saved(folder: Path) -> None:
    assert "capitals" in kinds()
    with pytest.raises(ConfigError, match="unknown key 'widht'; did you mean 'width'"):
        model_config({"kind": "capitals", "widht": 2})
    model = build_model(
        model_config({"kind": "capitals"}), TagSet(("Drug", "Sign")), seed=1
    )
    documents = [_marked(text) for text in TEXTS]
    read = model.annotate(model.prepare(documents), documents, ["Drug"])
    optimizer = torch.optim.Adam(model.trainable().values(), lr=0.1)
    costs = []
    for _ in range(30):
        losses = model.losses(read, range(3))
        optimizer.zero_grad()
        (losses.source + losses.target).sum().backward()
        optimizer.step()
        costs.append(float(losses.source.detach().sum()))
    assert costs[-1] < 0.5 * costs[0]
    each, total = model.gradients(model.soften(read), [2, 0])
    assert (each.shape, total.shape) == (
        (2, model.get_parameter(model.transfer).numel()),
        (each.shape[1],),
    )
    save_model(model, folder / "saved")
    assert json.loads((folder / "saved/model.json").read_text())["kind"] == "capitals"
    loaded = load_model(folder / "saved")
    assert loaded.predict(documents) == model.predict(documents) != tuple(documents[:0])


def test_a_job_trains_it(folder: Path) -> None:
    for name, label, word in (("north", "Drug", "dr"), ("south", "Sign", "si")):
        corpus(folder / f"{name}.conll", label, word)
    (folder / "job.toml").write_text(
        'method = "distill"\nseed = 3\nconditions = ["federated"]\n[training]\nrounds = 2\n'
        'weighting = false\n[model]\nkind = "capitals"\n' + SITES
    )
    summary = simulate(load_job(folder / "job.toml"), folder / "run")
    assert summary
    assert list((folder / "run").rglob("model.json"))
