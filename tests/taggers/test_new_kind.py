"""A new kind of model is one file in a folder; no list names it.

`capitals` has a CRF on top, and `initials` a softmax.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_kind import SAMPLE_KINDS, SAMPLES, add_sample_kinds
from tiny_jobs import SITES, corpus

from fednotes.core.errors import ConfigError
from fednotes.core.types import Document, Span, TagSet
from fednotes.data.batches import encode_corpus
from fednotes.jobs.job_file import load_job
from fednotes.jobs.simulate import simulate
from fednotes.taggers.corpora import PreparedCorpus
from fednotes.taggers.saving import (
    build_model,
    list_model_kinds,
    load_model,
    read_model_config,
    save_model,
)

ROOT = Path(__file__).parents[2]
TEXTS = (
    "He took Aspirin and slept .",
    "Aspirin helps .",
    "She has pain from Ibuprofen .",
)
TAGS = TagSet(("Drug", "Sign"))
each_kind = pytest.mark.parametrize("kind", SAMPLE_KINDS)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    add_sample_kinds(tmp_path, monkeypatch)
    return tmp_path


def _marked(text: str) -> Document:
    drugs = [word for word in text.split() if word in ("Aspirin", "Ibuprofen")]
    starts = [text.index(drug) for drug in drugs]
    pairs = zip(starts, drugs, strict=True)
    return Document(text, text, tuple(Span(a, a + len(d), "Drug") for a, d in pairs))


@each_kind
def test_a_new_kind_is_discovered_trained_and_saved(kind: str, folder: Path) -> None:
    assert kind in list_model_kinds()
    with pytest.raises(ConfigError, match="unknown key 'widht': did you mean 'width'"):
        read_model_config({"kind": kind, "widht": 2})
    with pytest.raises(ConfigError, match="width = 0: expected"):
        read_model_config({"kind": kind, "width": 0})
    model = build_model(read_model_config({"kind": kind}), TAGS, seed=1)
    documents = [_marked(text) for text in TEXTS]
    annotated = model.annotate(model.prepare(documents), documents, ["Drug"])
    optimizer = torch.optim.Adam(model.trainable().values(), lr=0.1)
    costs = []
    for _ in range(30):
        losses = model.losses(annotated, range(3))
        optimizer.zero_grad()
        (losses.source + losses.target).sum().backward()
        optimizer.step()
        costs.append(float(losses.source.detach().sum()))
    assert costs[-1] < 0.5 * costs[0]
    each, total = model.gradients(model.soften(annotated), [2, 0])
    assert (each.shape, total.shape) == (
        (2, model.get_parameter(model.transfer).numel()),
        (each.shape[1],),
    )
    save_model(model, folder / "saved")
    assert json.loads((folder / "saved/model.json").read_text())["kind"] == kind
    loaded = load_model(folder / "saved")
    assert loaded.predict(documents) == model.predict(documents) != tuple(documents[:0])


def read_block_of_contributing(start: str) -> str:
    """Return the block of Python in CONTRIBUTING that begins in this way."""
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.+?)```", page, re.DOTALL)
    (block,) = [block for block in blocks if block.startswith(start)]
    assert isinstance(block, str)
    return block


def test_contributing_shows_two_functions_of_a_sample() -> None:
    printed = _functions_in(read_block_of_contributing("def _encode("))
    sample = _functions_in((SAMPLES / "initials.py.txt").read_text())
    assert list(printed) == ["_encode", "_read"]
    assert printed.items() <= sample.items()


def _functions_in(source: str) -> dict[str, str]:
    """Return the functions of a module and its classes by name, without layout."""
    return {
        node.name: ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
    }


def test_contributing_shows_how_a_prepared_corpus_is_extended() -> None:
    names: dict[str, Any] = {
        "dataclass": dataclass,
        "np": np,
        "PreparedCorpus": PreparedCorpus,
    }
    exec(read_block_of_contributing("@dataclass("), names)
    encoded = encode_corpus([_marked(text) for text in TEXTS], TAGS)
    corpus = names["CapitalsCorpus"](
        encoded=encoded,
        known=frozenset(TAGS.types),
        lengths=encoded.lengths,
        capital=np.zeros(encoded.lengths.sum(), bool),
    )
    assert corpus.annotate(encoded.documents, ["Drug"]).capital is corpus.capital


@each_kind
def test_states_of_a_new_kind_are_means_over_the_words_of_a_sentence(
    kind: str, folder: Path
) -> None:
    """By hand: the mean of the table's rows, of which row 1 is that of capitals."""
    model = build_model(read_model_config({"kind": kind}), TAGS, seed=1)
    losses = model.losses(
        model.prepare([*map(_marked, TEXTS)]), range(3), with_states=True
    )
    (means,) = losses.hidden
    assert means.shape == (3, *model.widths)
    rows = model.get_parameter("table").detach().numpy()
    capitals = [[word[0].isupper() for word in text.split()] for text in TEXTS]
    expected = [rows[np.array(each, np.int64)].mean(0) for each in capitals]
    np.testing.assert_allclose(means.detach().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_a_confidence_is_attributed_to_the_crf_if_there_is_one(folder: Path) -> None:
    meanings = [
        build_model(read_model_config({"kind": kind}), TAGS, seed=1).confidence_meaning
        for kind in SAMPLE_KINDS
    ]
    assert ["CRF" in meaning for meaning in meanings] == [True, False]


@each_kind
@pytest.mark.parametrize("method", ["distill", "adversarial"])
def test_a_job_trains_a_new_kind(method: str, kind: str, folder: Path) -> None:
    for name, label, word in (("north", "Drug", "dr"), ("south", "Sign", "si")):
        corpus(folder / f"{name}.conll", label, word)
    weighting = "weighting = false\n" if method == "distill" else ""
    (folder / "job.toml").write_text(
        f'method = "{method}"\nseed = 3\nconditions = ["federated"]\n'
        f'[training]\nrounds = 2\n{weighting}[model]\nkind = "{kind}"\n' + SITES
    )
    summary = simulate(load_job(folder / "job.toml"), folder / "run")
    assert summary
    assert list((folder / "run").rglob("model.json"))


def test_the_adversarial_baselines_refuse_a_kind_without_widths(folder: Path) -> None:
    path = folder / "capitals.py"
    path.write_text(
        path.read_text().replace("return (self.config.width,)", "return ()")
    )
    for name, label, word in (("north", "Drug", "dr"), ("south", "Sign", "si")):
        corpus(folder / f"{name}.conll", label, word)
    (folder / "job.toml").write_text(
        'method = "adversarial"\nconditions = ["alone", "federated"]\n'
        '[model]\nkind = "capitals"\n' + SITES
    )
    message = 'kind "capitals" has no layer that represents text .*use another kind'
    with pytest.raises(ConfigError, match=message):
        simulate(load_job(folder / "job.toml"), folder / "run")
    assert not list((folder / "run").rglob("model"))  # no site has trained alone
