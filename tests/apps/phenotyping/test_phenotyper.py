"""Saved phenotyping models, and the recipes that rebuild their features."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save
from saved_folder_suite import SavedFolderSuite
from time_limits import no_waiting

from fednotes.apps.phenotyping.classifiers import LinearSVMs
from fednotes.apps.phenotyping.cohort import Bags, FeatureSpace, Vectors
from fednotes.apps.phenotyping.concepts import Notes
from fednotes.apps.phenotyping.dan import Dan, DanConfig
from fednotes.apps.phenotyping.features import (
    ConceptsConfig,
    TextConfig,
    build_features,
    load_features,
)
from fednotes.apps.phenotyping.phenotyper import (
    PhenotypeConfig,
    Phenotyper,
    derive_network_shape,
    is_phenotyper,
    load_phenotyper,
)
from fednotes.core.errors import ConfigError, DataError, ModelError
from fednotes.data.text import Passage

SPACE = FeatureSpace(9, recipe={"fingerprint": "nine", "dictionary": "nine.tsv"})
BAGS = Bags.from_lists([[0, 0, 4], [], [8, 1, 2, 3]], 9)


def svms(width: int) -> LinearSVMs:
    classifiers = LinearSVMs([(0, 1), (0, 1, 2), (1,), ()], width)
    rng = np.random.default_rng(3)
    classifiers.weight[:] = rng.normal(size=classifiers.weight.shape)
    classifiers.intercept[:] = rng.normal(size=classifiers.intercept.shape)
    return classifiers


def model(scale: str = "none") -> Phenotyper:
    network = Dan(DanConfig(embedding=4, hidden=6), 9, 5, seed=1)
    return Phenotyper(
        SPACE,
        network,
        scale=scale,  # type: ignore[arg-type]
        code_names=("icd9:1", "icd9:2", "icd9:3", "icd9:4", "icd9:5"),
        phenotypes=("asthma", "diabetes", "gout", "OSA"),
        svms=svms(6),
        platt=np.full((4, 2), 0.5),
    )


@pytest.mark.parametrize("scale", ["none", "l2"])
def test_features_equal_the_dense_layer(scale: str) -> None:
    """Expected in NumPy: mean of vectors, dense layer, ReLU, length 1 on request."""
    phenotyper = model(scale)
    network = phenotyper.network
    assert network is not None
    assert network.embedding is not None
    table, weight, bias = (
        value.detach().double().numpy()
        for value in (network.embedding, network.hidden_weight, network.hidden_bias)
    )
    mean = np.stack(
        [table[[0, 0, 4]].mean(0), np.zeros(4), table[[8, 1, 2, 3]].mean(0)]
    )
    expected = np.maximum(mean @ weight.T + bias, 0)
    if scale == "l2":
        length = np.linalg.norm(expected, axis=1, keepdims=True)
        expected = expected / np.where(length > 0, length, 1)
    features = phenotyper.compute_features(BAGS)
    dense = np.zeros((3, 6))
    dense[np.repeat(np.arange(3), np.diff(features.offsets)), features.columns] = (
        features.values
    )
    assert np.allclose(dense, expected, atol=1e-6)


def test_a_saved_model_is_loaded_unchanged(tmp_path: Path) -> None:
    for phenotyper in (
        model("l2"),
        Phenotyper(SPACE, idf=np.arange(9.0), phenotypes=("a", "b", "c", "d"),
                   svms=svms(9)),
    ):  # fmt: skip
        phenotyper.save(tmp_path / "m")  # the second one replaces the first
        again = load_phenotyper(tmp_path / "m")
        assert np.array_equal(
            again.predict_probabilities(BAGS), phenotyper.predict_probabilities(BAGS)
        )
        assert np.array_equal(
            again.predict_classes(BAGS), phenotyper.predict_classes(BAGS)
        )
        assert np.array_equal(
            again.predict_code_probabilities(BAGS),
            phenotyper.predict_code_probabilities(BAGS),
        )
        assert again.space == phenotyper.space
        assert again.phenotypes == phenotyper.phenotypes
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == [
        "phenotyper.json",
        "phenotyper.safetensors",
    ]


def test_a_fifo_in_place_of_the_tensors_is_refused_without_waiting(
    tmp_path: Path,
) -> None:
    model("l2").save(tmp_path / "m")
    weights = tmp_path / "m/phenotyper.safetensors"
    weights.unlink()
    os.mkfifo(weights)
    with no_waiting(), pytest.raises(ModelError, match="a FIFO, but only files"):
        load_phenotyper(tmp_path / "m")


def test_vectors_can_be_the_input_of_a_model(tmp_path: Path) -> None:
    """Inputs are vectors, with a network and as they are."""
    space = FeatureSpace(3, dense=True, recipe={"fingerprint": "three"})
    values = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
    network = Dan(DanConfig(hidden=6), 3, 2, features=True)
    learnt = Phenotyper(space, network, phenotypes=("a", "b", "c", "d"),
                        svms=svms(6), code_names=("x", "y"))  # fmt: skip
    learnt.save(tmp_path / "m")
    again = load_phenotyper(tmp_path / "m")
    expected = learnt.predict_probabilities(Vectors(values))
    assert np.array_equal(again.predict_probabilities(Vectors(values)), expected)
    plain = Phenotyper(space).compute_features(Vectors(values))
    assert np.allclose(plain.values.reshape(4, 3), values)


def test_inputs_and_folders_that_do_not_match_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a model of text reads vectors"):
        Phenotyper(SPACE, idf=np.ones(9)).compute_features(
            Vectors(np.zeros((1, 9), np.float32))
        )
    with pytest.raises(ConfigError, match="representation"):
        PhenotypeConfig(representation="")
    stage_1 = Phenotyper(SPACE, model().network, code_names=("a",) * 5)
    with pytest.raises(ModelError, match="no classifiers"):
        stage_1.predict_classes(BAGS)
    parameters = {n: v.detach() for n, v in Dan(DanConfig(), 7, 2).trainable().items()}
    with pytest.raises(ModelError, match="reads 7 concepts, but the input has 9"):
        derive_network_shape(parameters, DanConfig(), SPACE)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("mine")
    with pytest.raises(ModelError, match="choose another one"):
        model().save(tmp_path / "other")
    broken = model()
    assert broken.svms is not None
    broken.svms.weight[0, 0] = np.nan
    with pytest.raises(ModelError, match="not finite"):
        broken.save(tmp_path / "broken")
    assert not (tmp_path / "broken").exists()


def test_an_error_names_a_damaged_folder(tmp_path: Path) -> None:
    model().save(tmp_path / "m")
    assert is_phenotyper(tmp_path / "m")
    assert not is_phenotyper(tmp_path)
    with pytest.raises(ModelError, match="not the folder of a phenotyping model"):
        load_phenotyper(tmp_path)
    tensors, facts = (
        tmp_path / "m/phenotyper.safetensors",
        tmp_path / "m/phenotyper.json",
    )
    complete = tensors.read_bytes()
    older = json.dumps(json.loads(facts.read_text()) | {"format": 1}).encode()
    for path, changed, message in (
        (tensors, complete[:-1] + bytes([complete[-1] ^ 1]), "damaged"),
        (facts, older, r"m: has format 1, .* reads 2"),
        (facts, b"{", "not a readable"),
    ):
        before = path.read_bytes()
        path.write_bytes(changed)
        with pytest.raises(ModelError, match=message):
            load_phenotyper(tmp_path / "m")
        path.write_bytes(before)
    assert torch.equal(
        load_phenotyper(tmp_path / "m").network.hidden_bias,  # type: ignore[union-attr]
        model().network.hidden_bias,  # type: ignore[union-attr]
    )


def without(facts: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in facts.items() if k != key}


def test_a_changed_fact_is_detected(tmp_path: Path) -> None:
    """Any change is damage, even to a possible value; another layout is none."""
    folder = tmp_path / "m"
    model().save(folder)
    path = folder / "phenotyper.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps(dict(sorted(facts.items())), ensure_ascii=True))
    assert load_phenotyper(folder).phenotypes == tuple(facts["phenotypes"])
    names = ["asthma", "gout", "diabetes", "OSA"]
    config = {**facts["network"], "mean": "concepts"}
    for key, value in {
        "phenotypes": names,
        "scale": "l2",
        "network": config,
        "new": 1,
    }.items():
        path.write_text(json.dumps(facts | {key: value}))
        with pytest.raises(
            ModelError, match=r"m: damaged \(the checksum of phenotyper.json"
        ):
            load_phenotyper(folder)
    for key in facts.keys() - {"format"}:
        path.write_text(json.dumps(without(facts, key)))
        with pytest.raises(ModelError, match=f"^{folder}: damaged"):
            load_phenotyper(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"phenotypes": ["asthma", "gout"]}, "2 phenotypes, but 4 lists of classes"),
        ({"phenotypes": "asthma"}, "phenotypes = 'asthma': expected a list"),
        ({"code_names": ["icd9:1"]}, "1 codes, but 5 outputs of the network"),
        ({"scale": "foo"}, "scale = 'foo': expected one of 'none', 'l2'"),
        ({"network": {"mean": "foo"}}, "network.mean = 'foo': expected one of"),
        (
            {"network": {"embedding": "4"}},
            "network.embedding = '4': expected a whole number",
        ),
        (
            {"network": {"length": 2**63}},
            "network.length = 9223372036854775808: expected at most",
        ),
        (
            {"network": None, "code_names": []},
            "9 features, but 6 features that the classifiers read",
        ),
        ({"network": None, "code_names": ["icd9:1"]}, "it names codes, but has no"),
        ({"classifier": {"loss": "foo"}}, "classifier.loss = 'foo'"),
        ({"classifier": {"alpha": 0}}, "alpha = 0"),
        (
            {"classes": [[0, 1]] * 3 + [[]]},
            "3 classifiers, but 4 columns of 'svm.weight'",
        ),
        ({"classes": [[0, 7]] * 4}, "classes of a disease"),
        ({"classes": [0, 1, 1, 1]}, "classes = 0: expected a list"),
        ({"classes": None}, "4 phenotypes, but 0 lists of classes"),
        ({"space": {"width": "9"}}, "space.width = '9'"),
        ({"space": {"width": 7}}, "reads 9 concepts, but the input has 7"),
        ({"space": {"width": 9, "recipe": [1]}}, "space.recipe = .*expected a table"),
        ({"kind": "other"}, "kind = 'other'"),
        ({"more": 1}, "unknown key 'more'"),
    ],
)
def test_an_error_names_impossible_facts(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """The checksum fits, so the message is about the fact, and names the folder."""
    folder = tmp_path / "m"
    model().save(folder)
    forge(folder, {}, **changes)
    with pytest.raises(ModelError, match=message) as error:
        load_phenotyper(folder)
    assert str(error.value).startswith(f"{folder}: ")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "svm.weight",
            lambda value: value.mul_(float("nan")),
            "'svm.weight' has a number that",
        ),
        (
            "platt",
            lambda value: value.add_(float("inf")),
            "'platt' has a number that is not",
        ),
        ("idf", lambda value: value[:, None], r"'idf' has shape \(9, 1\)"),
    ],
)
def test_an_error_names_impossible_numbers(
    tmp_path: Path,
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    message: str,
) -> None:
    """The checksums fit, so the numbers themselves are checked."""
    folder = tmp_path / "m"
    model().save(folder)
    tensors = load_file(folder / "phenotyper.safetensors")
    forge(folder, {name: change(tensors.get(name, torch.ones(9))).contiguous()})
    with pytest.raises(ModelError, match=message):
        load_phenotyper(folder)


def forge(folder: Path, changed: Mapping[str, torch.Tensor], **facts: Any) -> None:
    """Change tensors and facts of a saved model, with checksums that fit."""
    data = save(load_file(folder / "phenotyper.safetensors") | changed)
    (folder / "phenotyper.safetensors").write_bytes(data)
    path = folder / "phenotyper.json"
    forged = without(json.loads(path.read_text()) | facts, "checksum")
    forged["sha256"] = hashlib.sha256(data).hexdigest()
    digest = hashlib.sha256(json.dumps(forged, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(forged | {"checksum": digest}))


HUGE = 2**40


@pytest.mark.parametrize(
    ("name", "shape", "facts"),
    [
        ("network.embedding", (HUGE, 0), {"space": {"width": HUGE}}),
        ("network.output_bias", (HUGE, 0), {"code_names": []}),
        (
            "svm.weight",
            (HUGE, 0),
            {"space": {"width": HUGE}, "network": None, "code_names": []},
        ),
    ],
)
def test_a_description_of_a_huge_model_is_refused_before_it_is_built(
    tmp_path: Path, name: str, shape: tuple[int, ...], facts: dict[str, Any]
) -> None:
    """A tensor without numbers has the shape, and would be built in terabytes."""
    folder = tmp_path / "m"
    model().save(folder)
    forge(folder, {name: torch.empty(shape)}, **facts)
    with pytest.raises(ModelError, match=f"^{folder}: ") as error:
        load_phenotyper(folder)
    assert re.search(
        "over [0-9,]+ values|4 classifiers, but 0 columns", str(error.value)
    )


# ---- recipes -------------------------------------------------------------------------


NOTES = {
    "p": ["Has gout and a cough.", "No gout."],
    "q": ["Well."],
    "r": ["cough " * 9],
}


def features_of(
    recipe: Mapping[str, Any], notes: Notes, dictionary: str | None = None
) -> tuple[tuple[str, ...], Bags | Vectors]:
    return load_features(recipe, dictionary).make(notes)[:2]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "terms.tsv"
    path.write_text("C1\tgout\nC2\tcough\n")
    return path


@pytest.mark.parametrize("context", ["drop", "off", "mark"])
def test_a_recipe_gives_the_same_bags(table: Path, context: str) -> None:
    """The recipe passes through JSON; the expected bags are read off the texts."""
    config = ConceptsConfig("terms.tsv", context=context, most=5)  # type: ignore[arg-type]
    features = build_features(config, table.parent)
    recipe = json.loads(json.dumps(dict(features.space.recipe)))
    assert recipe == {**features.space.recipe, "dictionary": str(table), "names": 2}
    patients, bags = features_of(recipe, NOTES)
    assert patients == ("p", "q")  # r has more than five
    assert isinstance(bags, Bags)
    assert (
        bags.concepts.tolist()
        == {"drop": [0, 1], "off": [0, 1, 0], "mark": [0, 1, 2]}[context]
    )
    assert bags.vocabulary == features.space.width == (4 if context == "mark" else 2)


def test_a_missing_or_different_dictionary_is_refused(
    table: Path, tmp_path: Path
) -> None:
    recipe = build_features(ConceptsConfig(str(table)), tmp_path).space.recipe
    moved = table.rename(tmp_path / "moved.tsv")
    with pytest.raises(ModelError, match=r"terms\.tsv cannot be read .*`dictionary`"):
        features_of(recipe, NOTES)
    assert features_of(recipe, NOTES, dictionary=str(moved))[0] == ("p", "q", "r")
    moved.write_text("C1\tgout\nC3\tcough\n")
    with pytest.raises(
        ModelError, match=r"moved\.tsv is not the one .*terms\.tsv.*`dictionary`"
    ):
        features_of(recipe, NOTES, dictionary=str(moved))
    with pytest.raises(ModelError, match="unknown kind, 'x'"):
        features_of({"kind": "x"}, NOTES)


def test_environment_variables_are_saved_unexpanded(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERMS_HERE", str(table.parent))
    recipe = build_features(
        ConceptsConfig("$TERMS_HERE/terms.tsv"), Path()
    ).space.recipe
    assert recipe["dictionary"] == "$TERMS_HERE/terms.tsv"
    assert len(features_of(recipe, NOTES)[0]) == 3
    monkeypatch.delenv("TERMS_HERE")
    with pytest.raises(ModelError, match=r"TERMS_HERE is not set.*`dictionary`"):
        features_of(recipe, NOTES)
    with pytest.raises(ConfigError, match="TERMS_HERE is not set"):
        build_features(ConceptsConfig("$TERMS_HERE/terms.tsv"), Path())


def test_the_generated_dictionary_is_saved_by_name(tmp_path: Path) -> None:
    features = build_features(ConceptsConfig("synthetic"), tmp_path)
    patients, bags = features_of(
        features.space.recipe, {"x": ["History of gout.", "Denies gout."]}
    )
    assert isinstance(bags, Bags)
    assert (patients, len(bags.concepts)) == (("x",), 1)


class Encoder:
    """Makes each word (its number of letters, 1) in two layers, and counts its calls."""

    fingerprint, layers, dim = "letters", 2, 2

    def __init__(self) -> None:
        self.calls = 0

    def encode(self, sentences: list[Passage]) -> np.ndarray:
        self.calls += 1
        words = [word for sentence in sentences for word in sentence.forms]
        return np.array([[[len(w), 1]] * 2 for w in words], dtype=np.float16)


def test_vectors_are_cached_under_their_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expected by hand: ((3+4+3+1+5+1)/6 + (2+4+1)/3) / 2."""
    encoder = Encoder()
    monkeypatch.setattr(
        "fednotes.apps.phenotyping.features.load_encoder", lambda spec: encoder
    )
    features = build_features(TextConfig("x"), tmp_path)
    progress: list[tuple[int, int]] = []
    inputs = features.make(
        {**NOTES, "e": [" "]}, lambda *n: progress.append(n), tmp_path / "cache"
    )
    assert isinstance(inputs.values, Vectors)
    mean = ((3 + 4 + 3 + 1 + 5 + 1) / 6 + (2 + 4 + 1) / 3) / 2
    assert inputs.values.values[0].tolist() == pytest.approx(
        [mean, 1, mean, 1], rel=1e-3
    )
    assert inputs.values.values[3].tolist() == [0] * 4
    assert (
        inputs.counts["without_features"],
        inputs.counts["notes"],
        progress[-1],
    ) == (
        1,
        5,
        (5, 5),
    )
    calls = encoder.calls
    again = features.make({**NOTES, "e": [" "]}, None, tmp_path / "cache").values
    assert isinstance(again, Vectors)
    assert (encoder.calls, again.values.tobytes()) == (
        calls,
        inputs.values.values.tobytes(),
    )
    (folder,) = (tmp_path / "cache").iterdir()
    assert {stat.S_IMODE(p.stat().st_mode) for p in (folder, *folder.iterdir())} == {
        0o700,
        0o600,
    }
    encoder.fingerprint = "others"
    with pytest.raises(
        ModelError, match=r"the encoder x is not the one .*with `backbone`"
    ):
        features_of(features.space.recipe, NOTES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"most": "5"}, "recipe most = '5': expected a whole number"),
        ({"most": 0}, "recipe: most = 0: expected at least 1"),
        ({"context": "no"}, "recipe context = 'no': expected one of"),
        ({"format": 3}, "recipe format = 3"),
        ({"dictionary": 7}, "recipe dictionary = 7: expected text"),
        ({"dictionary": ""}, "set it to the path of a dictionary"),
        ({"scopes": "EXACT"}, "recipe scopes = 'EXACT': expected a list"),
        ({"scopes": [["EXACT"]]}, "recipe scopes = .*expected text"),
        ({"fingerprint": 3}, "recipe fingerprint = 3: expected text"),
        ({"mode": "x"}, "unknown key 'mode'"),
        ({"kind": "text"}, "the key 'encoder' is missing"),
        ({"kind": ["text"]}, "unknown kind"),
    ],
)
def test_impossible_recipes_are_refused(
    table: Path, changes: dict[str, object], message: str
) -> None:
    recipe = build_features(ConceptsConfig(str(table)), Path()).space.recipe
    with pytest.raises(ModelError, match=message):
        features_of({**recipe, **changes}, NOTES)


class TestDamage(SavedFolderSuite):
    description = "phenotyper.json"
    weights = "phenotyper.safetensors"

    @staticmethod
    def save(folder: Path) -> None:
        model().save(folder)

    @staticmethod
    def load(folder: Path) -> object:
        return load_phenotyper(folder)
