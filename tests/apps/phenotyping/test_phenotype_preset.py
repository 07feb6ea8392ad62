"""The preset "paper" of phenotyping: its values against docs/papers.md, and what they
do.

Oracle of the training: the program of Dligach and Miller (2018), written out in NumPy
with padded batches, as its description in docs/papers.md says.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from applications import needs_app
from phenotype_patients import (
    SPACE,
    VOCABULARY,
    classifiers_of,
    code_labels,
    config_of,
    cut,
    sites_of,
    trained,
)

from fednotes.apps.phenotyping import two_stage as phenotype
from fednotes.apps.phenotyping.cohort import (
    Bags,
    ConceptVectors,
    SitePatients,
    pool_sites,
)
from fednotes.apps.phenotyping.dan import Dan, DanConfig, Mixtures
from fednotes.apps.phenotyping.features import ConceptsConfig
from fednotes.apps.phenotyping.job_tables import get_tables
from fednotes.apps.phenotyping.phenotyper import PhenotypeConfig, load_phenotyper
from fednotes.apps.phenotyping.two_stage import PRESETS, Config, Site
from fednotes.core.errors import (
    ConfigError,
    DataError,
    ModelError,
    RefusedError,
    TrainingError,
)
from fednotes.core.seeds import rng_of
from fednotes.core.update import Update
from fednotes.jobs.job_file import load_job, parse_job
from fednotes.training.sites import RMSprop

PAPERS = Path(__file__).parents[3] / "docs" / "papers.md"
ROW = re.compile(r"^\| `([\w.]+)` \| `(.+?)` \| (.+?) \|$", re.MULTILINE)


# ---- values


def flat(table: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return a table with dotted keys, such as {"training.cycles": 75, …}."""
    flattened: dict[str, Any] = {}
    for key, value in table.items():
        nested = isinstance(value, Mapping)
        flattened |= flat(value, f"{above}{key}.") if nested else {above + key: value}
    return flattened


def documented_values() -> dict[str, Any]:
    """Return what docs/papers.md says of the preset."""
    text = PAPERS.read_text("utf-8")
    chapter = text.split("\n## Two-stage federated phenotyping\n")[1].split("\n## ")[0]
    part = chapter.split('\n### Preset "paper"\n')[1].split("\n### ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| `")]
    rows = ROW.findall(part)
    assert len(rows) == len(lines), "a line of the table is misspelt"
    assert len({name for name, _, _ in rows}) == len(rows)
    assert all(source.strip() for _, _, source in rows)
    return {name: ast.literal_eval(value) for name, value, _ in rows}


def test_the_preset_equals_the_table_of_the_page() -> None:
    assert flat(PRESETS["paper"]) == documented_values()


def test_jobs_of_the_paper_use_every_value_of_the_preset() -> None:
    """What a job is made of has the preset's values, through presets, tables and
    defaults."""
    needs_app("experiments")
    for name in ("phenotype/mimic", "phenotype/obesity"):
        job = load_job(name)
        places = {
            "training": job.config,
            "model": job.config.model,
            "concepts": get_tables(job).features,
        }
        for setting, value in documented_values().items():
            actual: Any = places[setting.split(".")[0]]
            for key in setting.split(".")[1:]:
                actual = getattr(actual, key)
            assert (list(actual) if isinstance(actual, tuple) else actual) == value, (
                setting
            )


def test_a_job_can_change_one_value_of_a_table_of_the_preset(tmp_path: Path) -> None:
    table = {
        **{"method": "phenotype", "preset": "paper", "synthetic": {}},
        "model": {"network": {"hidden": 7}},
    }
    job = parse_job(table, "job", tmp_path, "job.toml")
    assert job.config.model.network == DanConfig(
        300, 7, mean="concepts", length=1387, layer="linear", updates="dense"
    )
    concepts = get_tables(job).features
    assert isinstance(concepts, ConceptsConfig)
    assert concepts.context == "off"
    dropped = parse_job(
        table | {"concepts": {"context": "drop"}}, "job", tmp_path, "job.toml"
    )
    changed = get_tables(dropped).features
    assert isinstance(changed, ConceptsConfig)
    assert changed.context == "drop"


# ---- parts


def test_rmsprop_equals_the_written_rule() -> None:
    """a ← 0.9 a + 0.1 g², w ← w − rate g / (√a + 1e-7), by its own rate of 0.02 until a
    step names another; a gradient of zero moves nothing."""
    rng = np.random.default_rng(0)
    w = {"one": rng.normal(size=(3, 4)), "two": rng.normal(size=4)}
    ours = {n: torch.tensor(v, dtype=torch.float32) for n, v in w.items()}
    a = {n: np.zeros_like(v) for n, v in w.items()}
    optimizer = RMSprop(ours, 0.02)
    for step in range(5):
        g = {n: rng.normal(size=v.shape) * 10.0 ** -(2 * step) for n, v in w.items()}
        g["one"][1] = 0.0
        g["two"] *= 1e-6  # where 1e-7 counts
        if step == 3:  # a restart in between
            saved_state = {n: v.clone() for n, v in optimizer.state().items()}
            optimizer = RMSprop(ours, 0.02)
            optimizer.restore(saved_state)
        rate = 0.02 if step < 2 else 0.01
        gradients = {n: torch.tensor(v, dtype=torch.float32) for n, v in g.items()}
        optimizer.step(gradients, **({} if step < 2 else {"rate": rate}))
        for n in w:
            a[n] = 0.9 * a[n] + 0.1 * g[n] ** 2
            w[n] -= rate * g[n] / (np.sqrt(a[n]) + 1e-7)
    for n in w:
        np.testing.assert_allclose(ours[n], w[n], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mean", ["occurrences", "concepts"])
@pytest.mark.parametrize("length", [0, 6])
def test_the_mean_is_padded_with_unknown_concepts(mean: Any, length: int) -> None:
    """A loop over padded lists; patients with no, few, unknown alone and too many
    concepts."""
    known = np.array([1, 4, 5, 8])
    lists = [
        [],
        [1, 1, 4],
        [0, 3],
        [2, 1, 2, 5],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [8, 8, 8, 8, 8, 8, 8],
    ]
    config = DanConfig(embedding=3, hidden=2, mean=mean, length=length)
    dan = Dan(config, 9, 2, known=known)
    table = dan.trainable()["embedding"].detach().numpy()
    assert table.shape == (5, 3)
    rows = {1: 1, 4: 2, 5: 3, 8: 4}
    for patient, concepts in enumerate(lists):
        concepts_read = (
            list(dict.fromkeys(concepts)) if mean == "concepts" else concepts
        )
        ids = [rows.get(c, 0) for c in concepts_read]
        ids = [0] * (length - len(ids)) + ids
        expected = table[ids].mean(axis=0) if ids else np.zeros(3)
        averages = (
            dan.average_vectors(Bags.from_lists(lists, 9)).detach().numpy()[patient]
        )
        np.testing.assert_allclose(averages, expected, atol=1e-7)


def test_the_linear_layer_can_represent_a_patient() -> None:
    bags = Bags.from_lists([[0, 1], [2], []], 4)
    nets = {
        layer: Dan(DanConfig(5, 6, layer=layer), 4, 2)
        for layer in ("linear", "rectified")
    }
    mean = nets["linear"].average_vectors(bags).detach().numpy()
    w = {n: v.detach().numpy() for n, v in nets["linear"].trainable().items()}
    expected = mean @ w["hidden_weight"].T + w["hidden_bias"]
    assert (expected < 0).any()
    np.testing.assert_allclose(nets["linear"].represent(bags), expected, atol=1e-7)
    rectified = nets["rectified"].represent(bags)
    np.testing.assert_allclose(rectified, np.maximum(expected, 0), atol=1e-7)
    np.testing.assert_array_equal(
        *(net.predict_probabilities(bags) for net in nets.values())
    )


def test_missing_vectors_are_the_mean_of_the_known_ones() -> None:
    values = np.array([[1.0, 2.0], [3.0, 6.0], [100.0, 100.0]], np.float32)
    vectors = ConceptVectors.from_arrays(np.array([2, 7, 9]), values)
    table = vectors.make_table(np.array([0, 2, 7]))
    assert table.tolist() == [[2, 4], [2, 4], [1, 2], [3, 6]]
    assert not vectors.make_table(np.array([1, 3])).any()
    assert table.dtype == np.float32
    large = ConceptVectors.from_arrays(
        np.arange(3), np.array([[2**24], [1], [1]], np.float32)
    )
    # float32 would lose both ones
    assert large.make_table(np.arange(3))[0].item() == (2**24 + 2) / 3


# ---- the whole


NETWORK = DanConfig(4, 5, mean="concepts", length=20, layer="linear", updates="dense")


def paper_config(**settings: Any) -> Config:
    """Return settings of a small version of the preset's program."""
    model = PhenotypeConfig(scale="none", network=NETWORK)
    values: dict[str, Any] = {
        **{"cycles": 2, "minimum": 18, "least_occurrences": 21, "optimizer": "rmsprop"},
        **{
            "require_output": True,
            "learning_rate": 0.01,
            "classifier_cycles": 2,
            "clip": 0.0,
        },
        **{"warmup": 0.0, "decay": "constant", "weight_decay": 0.0, "model": model},
    }
    return config_of(**values | settings)


def with_vectors(sites: tuple[SitePatients, ...]) -> tuple[SitePatients, ...]:
    values = np.random.default_rng(8).normal(size=(30, 4)).astype(np.float32)
    vectors = ConceptVectors.from_arrays(np.arange(0, 60, 2), values)
    return tuple(replace(site, vectors=vectors) for site in sites)


def keras_program(
    site: SitePatients, config: Config, outputs: list[str], known: list[int]
) -> tuple[dict[str, np.ndarray], int]:
    """Padded batches, an average over all places, RMSprop; float64.

    And how many patients.
    """
    start = phenotype.make_initial_parameters(config, len(outputs), torch.tensor(known))
    w = {n: v.double().numpy().copy() for n, v in start.items()}
    assert site.vectors is not None
    have = dict(zip(site.vectors.concepts.tolist(), site.vectors.values, strict=True))
    mean = np.mean([have[c] for c in known if c in have], axis=0)
    w["embedding"] = np.array([mean, *[have.get(c, mean) for c in known]], np.float64)
    rows = {c: at for at, c in enumerate(known, 1)}
    ids, targets = [], []
    for row, patient in enumerate(site.train.patients):
        if patient not in site.codes:
            continue
        labels = code_labels(site.train.take([row]), site.codes, outputs)[0]
        if not labels.any():
            continue  # rare codes only
        concept_rows = [
            rows.get(c, 0) for c in set(site.train.bags.take([row]).concepts.tolist())
        ]
        ids.append(
            [0] * (config.model.network.length - len(concept_rows)) + concept_rows
        )
        targets.append(labels)
    x, y = np.array(ids), np.array(targets, np.float64)
    a = {n: np.zeros_like(v) for n, v in w.items()}
    for epoch in range(config.cycles):
        order = rng_of(config.seed, "order", site.id, epoch).permutation(len(x))
        for at in range(0, len(x), config.batch_size):
            rows_ = order[at : at + config.batch_size]
            pooled = w["embedding"][x[rows_]].mean(axis=1)
            before = pooled @ w["hidden_weight"].T + w["hidden_bias"]
            hidden = np.maximum(before, 0)
            p = 1 / (1 + np.exp(-(hidden @ w["output_weight"].T + w["output_bias"])))
            d_out = (p - y[rows_]) / p.size
            d_hidden = (d_out @ w["output_weight"]) * (before > 0)
            d_pooled = d_hidden @ w["hidden_weight"] / x.shape[1]
            table = np.zeros_like(w["embedding"])
            np.add.at(table, x[rows_], np.repeat(d_pooled[:, None], x.shape[1], axis=1))
            g = {
                "embedding": table,
                "hidden_weight": d_hidden.T @ pooled,
                "hidden_bias": d_hidden.sum(0),
                "output_weight": d_out.T @ hidden,
                "output_bias": d_out.sum(0),
            }
            for n in w:
                a[n] = 0.9 * a[n] + 0.1 * g[n] ** 2
                w[n] -= config.learning_rate * g[n] / (np.sqrt(a[n]) + 1e-7)
    return w, len(x)


def test_stage_1_equals_the_program_of_2018() -> None:
    """One site, two epochs: vocabulary, patients, start, batches and steps of the NumPy
    program."""
    (site,) = with_vectors(sites_of(1))
    config = phenotype.METHOD.configure(paper_config(), (site,))
    state, (member,) = trained((site,), config)
    outputs = state.facts["outputs"]
    occurrences = np.zeros(VOCABULARY, int)
    np.add.at(occurrences, site.train.bags.concepts, 1)
    known = np.flatnonzero(occurrences >= 21).tolist()
    assert 0 < len(known) < VOCABULARY
    assert state.tensors["network.known"].tolist() == known
    expected, patients = keras_program(site, config, outputs, known)
    coded = sum(p in site.codes for p in site.train.patients)
    assert member.code_learner is not None
    assert member.code_learner.weight == patients < coded
    for name, value in expected.items():
        ours = state.tensors[f"network.{name}"].numpy()
        np.testing.assert_allclose(ours, value, rtol=1e-3, atol=2e-5, err_msg=name)


def test_concepts_are_counted_over_all_sites() -> None:
    """Sites end with the network of the sum's concepts, which is the pooled one's."""
    sites = with_vectors(sites_of(3))
    config = phenotype.METHOD.configure(
        paper_config(least_occurrences=60, cycles=1), sites
    )
    state, members = trained(sites, config)
    occurrences = sum(
        np.bincount(s.train.bags.concepts, minlength=VOCABULARY) for s in sites
    )
    known = np.flatnonzero(occurrences >= 60)
    alone = np.bincount(sites[0].train.bags.concepts, minlength=VOCABULARY) >= 60
    assert set(known) > set(np.flatnonzero(alone))
    assert state.tensors["network.known"].tolist() == known.tolist()
    together, settings = phenotype.METHOD.configure_pooled(config, sites, None)
    joint_state, _ = trained(together, settings)
    assert joint_state.tensors["network.known"].tolist() == known.tolist()
    assert all("phenotypes" in member.scores for member in members)


def test_a_saved_model_keeps_its_concepts_for_a_later_run(
    tmp_path: Path,
) -> None:
    sites = with_vectors(sites_of(2))
    state, members = trained(sites, paper_config(), tmp_path)
    model = load_phenotyper(tmp_path / "model")
    bags = sites[0].test.bags
    trained_model = classifiers_of(members[0]).model
    for kind in (
        "predict_probabilities",
        "predict_code_probabilities",
        "predict_classes",
    ):
        assert np.array_equal(
            getattr(model, kind)(bags), getattr(trained_model, kind)(bags)
        )
    assert np.allclose(model.predict_probabilities(bags).sum(2), 1)
    known = model.network.known  # type: ignore[union-attr]
    assert known.tolist() == state.tensors["network.known"].tolist()  # type: ignore[union-attr]
    later_model = PhenotypeConfig(
        representation=str(tmp_path / "model"), scale="none", network=NETWORK
    )
    later, _ = trained(sites, paper_config(model=later_model))
    for name, value in state.tensors.items():
        if name.startswith("network."):
            assert torch.equal(later.tensors[name], value), name
    for setting, value in (
        ("mean", "occurrences"),
        ("length", 21),
        ("layer", "rectified"),
    ):
        wrong_model = replace(later_model, network=replace(NETWORK, **{setting: value}))
        with pytest.raises(
            ConfigError, match=f"trained with {setting} = .* this job has"
        ):
            trained(sites, paper_config(model=wrong_model))


@pytest.mark.parametrize("last", [0, 2])
def test_a_killed_run_resumes_to_the_same_result(tmp_path: Path, last: int) -> None:
    """In stage 1 and in stage 2."""
    sites, config = with_vectors(sites_of(2)), paper_config(classifier_cycles=3)
    uninterrupted, _ = trained(sites, config)
    cut(sites, config, last, directory=tmp_path / "kept")
    again, _ = trained(sites, config, directory=tmp_path / "kept", resume=True)
    assert again.facts["outputs"] == uninterrupted.facts["outputs"]
    assert again.tensors.keys() == uninterrupted.tensors.keys()
    for name, value in uninterrupted.tensors.items():
        assert torch.equal(again.tensors[name], value), name


def test_a_secure_sum_gives_the_same_concepts_and_start() -> None:
    """Counts are whole numbers there; the rest differs by its fixed point."""
    sites, config = with_vectors(sites_of(3)), paper_config(cycles=1)
    plain, _ = trained(sites, config)
    secure, _ = trained(sites, config, secure=True)
    assert torch.equal(secure.tensors["network.known"], plain.tensors["network.known"])
    for name in ("embedding", "hidden_weight"):
        secure_value, plain_value = (
            state.tensors[f"network.{name}"] for state in (secure, plain)
        )
        assert torch.allclose(secure_value, plain_value, atol=1e-3), name


# ---- what cannot be


def test_patients_without_an_output_are_not_counted_for_the_minimum() -> None:
    """The number that is asked is of those who are trained on."""
    (site,) = sites_of(1)
    config = phenotype.METHOD.configure(paper_config(min_patients=0), (site,))
    _, (member,) = trained((site,), config)
    assert member.code_learner is not None
    patients_left = member.code_learner.patients
    coded = sum(p in site.codes for p in site.train.patients)
    assert 0 < patients_left < coded
    trained((site,), replace(config, min_patients=patients_left))
    with pytest.raises(
        ConfigError, match=f"its {patients_left} .* min_patients = {patients_left + 1}"
    ):
        trained((site,), replace(config, min_patients=patients_left + 1))
    assert Site(site, config).count_covered("count_codes")["patients"] == coded


def test_an_error_says_if_no_concept_is_frequent_enough() -> None:
    with pytest.raises(
        TrainingError, match=r"no concept occurs 9,999 times .*the most frequent"
    ):
        trained(sites_of(1), paper_config(least_occurrences=9999))


def test_sites_with_different_vectors_are_refused() -> None:
    first, two = with_vectors(sites_of(2))
    assert two.vectors is not None
    values = two.vectors.values.copy()
    values[3, 1] += 1
    changed = replace(
        two, vectors=ConceptVectors.from_arrays(two.vectors.concepts, values)
    )
    for sites in ((first, changed), (first, replace(two, vectors=None))):
        with pytest.raises(DataError, match=r"have different \[concepts\] vectors"):
            phenotype.METHOD.configure(paper_config(), sites)
    assert pool_sites((first, two)).vectors is first.vectors


def test_the_aggregation_rule_applies_to_the_initial_vectors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of three sites says that they are others; the median does not hear of it."""
    start_vectors: list[torch.Tensor] = []
    honest = Site.first_vectors

    def begin(_: Any, server: Any) -> None:
        start_vectors.append(server.shared["embedding"])
        raise TrainingError("enough is known")

    def send_vectors(site: Site, tensors: Any) -> Update:
        update, factor = honest(site, tensors), 1e6 if site.id == data[1].id else 1.0
        return replace(
            update, tensors={n: factor * v for n, v in update.tensors.items()}
        )

    data = with_vectors(sites_of(3))
    monkeypatch.setattr(phenotype, "run_cycles", begin)
    for rule in ("mean", "median"):
        with pytest.raises(TrainingError, match="enough is known"):
            trained(
                data, phenotype.METHOD.configure(paper_config(aggregation=rule), data)
            )
        monkeypatch.setattr(Site, "first_vectors", send_vectors)
    torch.testing.assert_close(start_vectors[0], start_vectors[1])


def test_vectors_of_another_width_are_refused() -> None:
    sites = with_vectors(sites_of(1))
    config = paper_config(model=PhenotypeConfig(network=replace(NETWORK, embedding=6)))
    with pytest.raises(ConfigError, match=r"vectors of 4 numbers for .*embedding = 6"):
        trained(sites, config)


@pytest.mark.parametrize("known", [[-1, 2], [2, 2], [3, 1], [60], [], [0.5]])
def test_a_site_refuses_impossible_concepts(known: list[Any]) -> None:
    (site,) = with_vectors(sites_of(1))
    member = Site(site, phenotype.METHOD.configure(paper_config(), (site,)))
    with pytest.raises(RefusedError, match="must list known concepts"):
        member.begin_codes({"chosen": torch.tensor([0]), "known": torch.tensor(known)})


def test_a_damaged_list_of_known_concepts_is_refused(tmp_path: Path) -> None:
    from fednotes.apps.phenotyping.phenotyper import derive_network_shape

    network = Dan(NETWORK, VOCABULARY, 2, known=np.array([1, 4]))
    good = {n: v.detach() for n, v in network.state().items()}
    assert derive_network_shape(good, NETWORK, SPACE)[2].tolist() == [1, 4]  # type: ignore[union-attr]
    for known in ([4, 1], [1], [1.0, 4.0], [-1, 4]):
        with pytest.raises(ModelError, match="do not agree"):
            derive_network_shape(good | {"known": torch.tensor(known)}, NETWORK, SPACE)
    with pytest.raises(ModelError, match="use the dictionary"):
        derive_network_shape(good | {"known": torch.tensor([1, 60])}, NETWORK, SPACE)
    assert (
        Mixtures.from_bags(Bags.from_lists([[1]], 2))
        .map_to_known(np.array([1]), np.array([1]), 0)
        .vocabulary
        == 2
    )
