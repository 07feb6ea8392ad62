"""A phenotyping model as a scikit-learn pipeline gives the same probabilities."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from applications import needs_app

from fednotes.apps.phenotyping.classifiers import LinearSVMs
from fednotes.apps.phenotyping.cohort import Bags, FeatureSpace
from fednotes.apps.phenotyping.dan import Dan, DanConfig
from fednotes.apps.phenotyping.features import ConceptsConfig, build_features
from fednotes.apps.phenotyping.phenotyper import Phenotyper
from fednotes.core.errors import FednotesError

needs_app("serving")
from fednotes.apps.serving.exports import export

if find_spec("skops") is None:  # its import takes two seconds
    pytest.skip("skops is missing", allow_module_level=True)
sparse = pytest.importorskip("scipy.sparse")
CLASSES = ((0, 1), (0, 1, 2), (1,), (), (0, 2))
NAMES = tuple(f"disease {n}" for n in range(len(CLASSES)))


def space() -> FeatureSpace:
    return build_features(
        ConceptsConfig(dictionary="synthetic", context="off"), Path()
    ).space


def svms(width: int) -> LinearSVMs:
    rng = np.random.default_rng(1)
    classifiers = LinearSVMs(CLASSES, width)
    classifiers.weight[:] = rng.normal(size=classifiers.weight.shape)
    classifiers.intercept[:] = rng.normal(size=classifiers.intercept.shape)
    return classifiers


def patients(width: int) -> Bags:
    """Twenty; the last has no concept."""
    rng = np.random.default_rng(2)
    return Bags.from_lists(
        [*(rng.integers(width, size=n) for n in range(1, 20)), []], width
    )


def counted(bags: Bags) -> Any:
    row, column, count = bags.count_concepts()
    return sparse.csr_matrix((count, (row, column)), shape=(len(bags), bags.width))


def networked(**settings: Any) -> Phenotyper:
    feature_space, known = space(), settings.pop("known", None)
    config = DanConfig(embedding=5, hidden=7, **settings)
    network = Dan(config, feature_space.width, 3, seed=3, known=known)
    network.hidden_bias.data.uniform_(-0.02, 0.02)
    names = ("a", "b", "c")
    return Phenotyper(feature_space, network, None, "l2", names, NAMES, svms(7))


def weighted() -> Phenotyper:
    feature_space, rng = space(), np.random.default_rng(4)
    idf, classifiers = (
        rng.uniform(1, 3, feature_space.width),
        svms(feature_space.width),
    )
    platt = np.stack([rng.uniform(0.5, 2, 5), rng.normal(size=5)], 1)
    return Phenotyper(feature_space, None, idf, "none", (), NAMES, classifiers, platt)


@pytest.mark.parametrize(
    "make",
    [
        weighted,
        networked,
        lambda: networked(mean="concepts", layer="linear"),
        lambda: replace(networked(known=np.array([1, 3, 8])), scale="none"),
        lambda: networked(length=9, known=np.array([1, 3, 8])),
        lambda: networked(length=4, known=np.array([0, 2]), mean="concepts"),
    ],
    ids=["tfidf", "network", "linear", "known", "filled", "filled once"],
)
def test_the_pipeline_gives_the_probabilities_of_the_model(
    make: Any, tmp_path: Path
) -> None:
    """With nothing trusted but scikit-learn's own types.

    Networks compute in float32.
    """
    import skops.io as sio

    model = make()
    model.save(tmp_path / "model")
    export(tmp_path / "model", "sklearn", tmp_path / "out")
    file, bags = tmp_path / "out" / "pipeline.skops", patients(model.space.width)
    assert sio.get_untrusted_types(file=file) == []
    pipeline = sio.load(file)
    facts = json.loads((tmp_path / "out" / "fednotes.json").read_text())
    assert facts["phenotypes"] == [NAMES[n] for n in (0, 1, 2, 4)]
    assert len(facts["columns"]) == model.space.width
    of_model = model.predict_probabilities(bags)
    for counts in (counted(bags), counted(bags).toarray()):
        probabilities = pipeline.predict_proba(counts)
        for disease, each in zip((0, 1, 2, 4), probabilities, strict=True):
            expected = of_model[:, disease, list(CLASSES[disease])]
            np.testing.assert_allclose(
                each, expected, atol=1e-12 if model.network is None else 2e-5
            )
    assert [list(c) for c in pipeline.classes_][1] == [
        "absent",
        "present",
        "questionable",
    ]


def test_a_model_without_a_pipeline_is_refused_by_name(tmp_path: Path) -> None:
    replace(networked(), svms=None, phenotypes=()).save(tmp_path / "stage1")
    with pytest.raises(FednotesError, match="ends with stage 1"):
        export(tmp_path / "stage1", "sklearn", tmp_path / "out")
    with pytest.raises(FednotesError, match="exports only models of patients"):
        export(tmp_path, "sklearn", tmp_path / "out")
    assert not (tmp_path / "out").exists()
