"""A kind of model is one file: this one stands in a folder of its own and nothing lists it."""

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
from fednotes.taggers.saving import build_model, kinds, load_model, model_config, save_model

CAPITALS = '''
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from fednotes.core.tensors import seeded
from fednotes.data.batches import encode_corpus
from fednotes.taggers.corpora import Batch, PreparedCorpus
from fednotes.taggers.layers import CrfOutput
from fednotes.taggers.model import CrfReading, Kind, Model, ModelConfig


@dataclass(frozen=True)
class CapitalsConfig(ModelConfig):
    kind: Literal["capitals"] = "capitals"
    width: int = 3


class Capitals(Model):
    """A word is a row of two: whether it begins with a capital."""

    transfer = "crf.project.weight"
    reads = PreparedCorpus

    def __init__(self, config, tagset, seed):
        super().__init__(config, tagset)
        with seeded(seed, "table"):
            self.table = torch.nn.Parameter(torch.randn(2, config.width))
        with seeded(seed, "crf"):
            self.crf = CrfOutput(config.width, tagset)

    def _encode(self, documents, how):
        encoded = encode_corpus(documents, self.tagset)
        known = frozenset(self.tagset.types)
        return PreparedCorpus(encoded=encoded, known=known, lengths=encoded.lengths)

    def _read(self, corpus, chosen, every=False):
        batch = Batch.of(corpus, chosen, self.device)
        capital = np.array([form[0].isupper() for form in corpus.encoded.forms], np.int64)
        features = self.table[torch.from_numpy(capital[corpus.encoded.form[batch.tokens]])]
        return CrfReading(self.crf, batch, features, [features])


def build(config, tagset, seed, device="cpu"):
    return Capitals(config, tagset, seed).to(device)


KIND = Kind(CapitalsConfig, build)
'''
TEXTS = ("He took Aspirin and slept .", "Aspirin helps .", "She has pain from Ibuprofen .")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "capitals.py").write_text(CAPITALS)
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
    model = build_model(model_config({"kind": "capitals"}), TagSet(("Drug", "Sign")), seed=1)
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
