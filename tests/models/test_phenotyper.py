"""A phenotyping model as a folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fednotes.core.errors import ConfigError, DataError, ModelError
from fednotes.data.cohort import Bags, Vectors
from fednotes.data.patient_sites import FeatureSpace
from fednotes.models.dan import Dan, DanConfig
from fednotes.models.phenotyper import (
    PhenotypeConfig,
    Phenotyper,
    Representation,
    is_phenotyper,
    load_phenotyper,
    network_settings,
)
from fednotes.models.svm import LinearSVMs

SPACE = FeatureSpace(9, recipe={"fingerprint": "nine", "dictionary": "nine.tsv"})
BAGS = Bags.of([[0, 0, 4], [], [8, 1, 2, 3]], 9)


def machines(width: int) -> LinearSVMs:
    found = LinearSVMs([(0, 1), (0, 1, 2), (1,), ()], width)
    rng = np.random.default_rng(3)
    found.weight[:] = rng.normal(size=found.weight.shape)
    found.intercept[:] = rng.normal(size=found.intercept.shape)
    return found


def model(scale: str = "none") -> Phenotyper:
    network = Dan(DanConfig(embedding=4, hidden=6), 9, 5, seed=1)
    return Phenotyper(
        SPACE,
        Representation(network, scale=scale),  # type: ignore[arg-type]
        code_names=("icd9:1", "icd9:2", "icd9:3", "icd9:4", "icd9:5"),
        phenotypes=("asthma", "diabetes", "gout", "OSA"),
        machines=machines(6),
        platt=np.full((4, 2), 0.5),
    )


@pytest.mark.parametrize("scale", ["none", "l2"])
def test_features_are_the_dense_layer(scale: str) -> None:
    """NumPy: mean of vectors, dense layer, ReLU; of length 1 where that is asked for."""
    given = model(scale)
    network = given.representation.network
    assert network is not None
    assert network.embedding is not None
    table, weight, bias = (
        value.detach().double().numpy()
        for value in (network.embedding, network.hidden_weight, network.hidden_bias)
    )
    mean = np.stack([table[[0, 0, 4]].mean(0), np.zeros(4), table[[8, 1, 2, 3]].mean(0)])
    wanted = np.maximum(mean @ weight.T + bias, 0)
    if scale == "l2":
        length = np.linalg.norm(wanted, axis=1, keepdims=True)
        wanted = wanted / np.where(length > 0, length, 1)
    found = given.representation.features(BAGS)
    dense = np.zeros((3, 6))
    dense[np.repeat(np.arange(3), np.diff(found.offsets)), found.columns] = found.values
    assert np.allclose(dense, wanted, atol=1e-6)


def test_the_folder_gives_the_same_model(tmp_path: Path) -> None:
    for given in (
        model("l2"),
        Phenotyper(SPACE, Representation(idf=np.arange(9.0)), phenotypes=("a", "b", "c", "d"),
                   machines=machines(9)),
    ):  # fmt: skip
        given.save(tmp_path / "m")  # the second one replaces the first
        again = load_phenotyper(tmp_path / "m")
        assert np.array_equal(again.probabilities(BAGS), given.probabilities(BAGS))
        assert np.array_equal(again.classes(BAGS), given.classes(BAGS))
        assert np.array_equal(again.code_probabilities(BAGS), given.code_probabilities(BAGS))
        assert again.space == given.space
        assert again.phenotypes == given.phenotypes
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == [
        "phenotyper.json",
        "phenotyper.safetensors",
    ]


def test_probabilities_and_classes_of_odd_diseases() -> None:
    """One class is certain, none says nothing, three share 1."""
    chances, classes = model().probabilities(BAGS), model().classes(BAGS)
    assert np.allclose(chances[:, :3].sum(2), 1)
    assert (chances[:, 2, 1] == 1).all()
    assert (classes[:, 2] == 1).all()
    assert (chances[:, 3] == 0).all()
    assert (classes[:, 3] == -1).all()


def test_vectors_of_text(tmp_path: Path) -> None:
    """A network over vectors, and vectors as they are."""
    space = FeatureSpace(3, dense=True, recipe={"fingerprint": "three"})
    values = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
    network = Dan(DanConfig(hidden=6), 3, 2, features=True)
    learnt = Phenotyper(space, Representation(network), phenotypes=("a", "b", "c", "d"),
                        machines=machines(6), code_names=("x", "y"))  # fmt: skip
    learnt.save(tmp_path / "m")
    again = load_phenotyper(tmp_path / "m")
    wanted = learnt.probabilities(Vectors(values))
    assert np.array_equal(again.probabilities(Vectors(values)), wanted)
    plain = Representation().features(Vectors(values))
    assert np.allclose(plain.values.reshape(4, 3), values)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="vectors of text"):
        Representation(idf=np.ones(9)).features(Vectors(np.zeros((1, 9), np.float32)))
    with pytest.raises(ConfigError, match="representation"):
        PhenotypeConfig(representation="")
    stage_1 = Phenotyper(SPACE, model().representation, code_names=("a",) * 5)
    with pytest.raises(ModelError, match="no classifiers"):
        stage_1.classes(BAGS)
    parameters = {n: v.detach() for n, v in Dan(DanConfig(), 7, 2).trainable().items()}
    with pytest.raises(ModelError, match="reads 7 concepts and the job has 9"):
        network_settings(parameters, DanConfig(), SPACE)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("mine")
    with pytest.raises(ModelError, match="name another one"):
        model().save(tmp_path / "other")
    broken = model()
    assert broken.machines is not None
    broken.machines.weight[0, 0] = np.nan
    with pytest.raises(ModelError, match="not finite"):
        broken.save(tmp_path / "broken")
    assert not (tmp_path / "broken").exists()


def test_a_damaged_folder_is_named(tmp_path: Path) -> None:
    model().save(tmp_path / "m")
    tensors, facts = tmp_path / "m/phenotyper.safetensors", tmp_path / "m/phenotyper.json"
    whole, text = tensors.read_bytes(), facts.read_text()
    with pytest.raises(ModelError, match="no phenotyping model"):
        load_phenotyper(tmp_path)
    assert is_phenotyper(tmp_path / "m")
    assert not is_phenotyper(tmp_path)
    tensors.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ModelError, match="damaged"):
        load_phenotyper(tmp_path / "m")
    tensors.write_bytes(whole)
    facts.write_text(json.dumps(json.loads(text) | {"format": 2}))
    with pytest.raises(ModelError, match="format 2"):
        load_phenotyper(tmp_path / "m")
    facts.write_text("{")
    with pytest.raises(ModelError, match="not a readable"):
        load_phenotyper(tmp_path / "m")
    facts.write_text(text)
    assert torch.equal(
        load_phenotyper(tmp_path / "m").representation.network.hidden_bias,  # type: ignore[union-attr]
        model().representation.network.hidden_bias,  # type: ignore[union-attr]
    )
