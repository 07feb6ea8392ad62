"""Settings of phenotyping do what they say, and what few sites have does not stop a run.

Expected values are from NumPy's network (`phenotype_patients.py`), scikit-learn's
`SGDClassifier`, loops written here, or runs that must be equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from phenotype_patients import (
    DISEASES,
    SPACE,
    VOCABULARY,
    classifiers_of,
    code_chances,
    code_labels,
    config_of,
    counted,
    dense_of,
    labelled,
    network_of,
    patients,
    relabelled,
    sites_of,
    trained,
    without_stage_1,
)
from sklearn.feature_extraction.text import TfidfTransformer
from sklearn.linear_model import SGDClassifier

from fednotes.core.errors import ConfigError
from fednotes.core.seeds import rng_of
from fednotes.engines.rounds import RoundResult
from fednotes.methods import phenotype
from fednotes.methods.phenotype import Config, Site
from fednotes.patients.classifiers import SvmConfig
from fednotes.patients.cohort import FeatureSpace, SitePatients, Vectors, pooled_patients
from fednotes.patients.dan import Dan, DanConfig, RowAdam
from fednotes.patients.phenotyper import PhenotypeConfig

NETWORK = DanConfig(embedding=8, hidden=12)


def sgd(
    x: Any, labels: np.ndarray, order: Sequence[int] | np.ndarray, weights: Any = None
) -> np.ndarray:
    """(features,) an epoch of scikit-learn's, in this order, of the patients with a label."""
    rows = [row for row in order if labels[row] >= 0]
    machine = SGDClassifier(penalty=None, shuffle=False, max_iter=1, tol=None, class_weight=weights)
    coefficients: np.ndarray = machine.fit(x[rows], labels[rows]).coef_[0]
    return coefficients


def order_of(config: Config, site: SitePatients, epoch: int, number: int) -> np.ndarray:
    return rng_of(config.seed, "phenotypes", site.id, epoch).permutation(number)


# ---- stage 2


def test_balanced_classes_are_those_of_all_sites_together() -> None:
    """SGDClassifier with n / (2 n of the class) over all sites; the mean of the sites'."""
    sites = sites_of(2)
    config = without_stage_1(classifier_cycles=1)
    config = replace(
        config, model=replace(config.model, classifier=SvmConfig(class_weights="balanced"))
    )
    state, _ = trained(sites, config)
    cohorts = [labelled(site.train) for site in sites]
    tfidf = TfidfTransformer().fit(np.concatenate([counted(c.bags) for c in cohorts]))
    for column in range(len(DISEASES)):
        everyone = Counter(v for c in cohorts for v in c.labels[:, column].tolist() if v >= 0)
        weights = {v: everyone.total() / (2 * everyone[v]) for v in (0, 1)}
        assert weights[1] > 1.1 > weights[0]
        total, number = np.zeros(VOCABULARY), 0
        for site, cohort in zip(sites, cohorts, strict=True):
            own = cohort.labels[:, column]
            order = order_of(config, site, 0, len(cohort))
            n = int((own >= 0).sum())
            total += n * sgd(tfidf.transform(counted(cohort.bags)), own, order, weights)
            number += n
        ours = state.tensors["svm.weight"][:, column].numpy()
        assert np.allclose(ours, total / number, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", ["none", "l2"])
def test_classifiers_read_the_kept_network(scale: Any) -> None:
    """SGDClassifier on NumPy's dense layer: of the cycle that is kept, scaled as asked."""
    (site,) = sites_of(1)
    model = PhenotypeConfig(network=NETWORK, scale=scale)
    config = config_of(model=model, cycles=4, keep_cycle=1, classifier_cycles=1)
    state, _ = trained((site,), config)
    early, _ = trained((site,), replace(config, cycles=1, keep_cycle=0))
    cohort = labelled(site.train)
    x = dense_of(network_of(early), cohort, scale).astype(np.float32)
    for column in range(len(DISEASES)):
        order = order_of(config, site, 1, len(cohort))
        wanted = sgd(x.astype(np.float64), cohort.labels[:, column], order)
        ours = state.tensors["svm.weight"][:, column].numpy()
        assert np.allclose(ours, wanted, rtol=1e-3, atol=1e-3)


def test_rounds_of_both_stages_are_judged_every_few() -> None:
    """Counted from each stage's first cycle; the last one of each always."""
    sites, told = sites_of(2), list[RoundResult]()
    config = config_of(cycles=4, classifier_cycles=7, evaluate_every=3)
    trained(sites, config, observer=told.append)
    assert [r.round + 1 for r in told if r.evaluated] == [3, 4, 4 + 3, 4 + 6, 4 + 7]
    assert [r.round + 1 for r in told if "valid_loss" in r.metrics] == [3, 4]
    assert [r.round + 1 for r in told if "valid_f1" in r.metrics] == [7, 10, 11]


# ---- stage 1


def test_the_best_cycle_has_the_least_held_out_loss() -> None:
    """Brute force: runs that end after each cycle, judged by NumPy on all valid patients."""
    sites, losses, ends = sites_of(2), [], []
    config = config_of(cycles=1, local_epochs=4, learning_rate=0.1, classifier_cycles=1)
    for cycles in range(1, 6):
        state, _ = trained(sites, replace(config, cycles=cycles))
        total, number = 0.0, 0
        for site in sites:
            labels = code_labels(site.valid, site.codes, state.facts["outputs"])
            known = labels[:, 0] >= 0
            p = np.clip(code_chances(network_of(state), site.valid)[known], 1e-7, 1 - 1e-7)
            total -= np.log(np.where(labels[known] == 1, p, 1 - p)).sum()
            number += p.size
        losses.append(total / number)
        ends.append(network_of(state))
    best = int(np.argmin(losses))
    assert best < 4
    assert np.argmax(losses) != best
    state, members = trained(sites, replace(config, cycles=5, keep_cycle=-1))
    for member in members:
        network = classifiers_of(member).model.network
        assert network is not None
        for name, value in network.trainable().items():
            assert np.array_equal(value.detach().numpy(), ends[best][name]), name
    for name, wanted in ends[best].items():
        assert np.array_equal(network_of(state)[name], wanted), name
        assert not np.array_equal(ends[-1][name], wanted), name


CAUSES = ("E8800", "E8859", "E8881", "E9190", "4019")


def with_causes(site: SitePatients) -> SitePatients:
    """Codes of external causes, in turn; E880, E885 and E888 differ in the fourth character."""
    everyone = [p for part in (site.train, site.valid, site.test) for p in part.patients]
    return replace(
        site,
        codes={
            p: frozenset({f"icd9:{CAUSES[i % 5]}", f"icd9:{CAUSES[(i + 1) % 3]}"})
            for i, p in enumerate(everyone)
        },
    )


@pytest.mark.parametrize(
    ("whole", "outputs"),
    [
        (True, ["icd9:401", "icd9:E880", "icd9:E885", "icd9:E888", "icd9:E919"]),
        (False, ["icd9:401", "icd9:E88", "icd9:E91"]),
    ],
)
def test_whole_causes_are_counted_and_learnt(whole: bool, outputs: list[str]) -> None:
    """Outputs, patients of each and labels by the beginnings of codes."""
    (site,) = sites_of(1)
    site = with_causes(site)
    config = phenotype.for_sites(config_of(whole_causes=whole, cycles=1), (site,))
    state, (member,) = trained((site,), config)
    assert state.facts["outputs"] == outputs
    wanted = code_labels(site.train, site.codes, outputs)
    given = member.count_codes({}).tensors["patients"].tolist()
    counts = {name: n for name, n in zip(config.candidates, given, strict=True) if n}
    assert counts == dict(zip(outputs, wanted.sum(axis=0).tolist(), strict=True))
    assert member._codes is not None
    assert np.array_equal(member._codes._labels, wanted)


def stage_1(site: SitePatients, config: Config, outputs: Sequence[str], clip: float) -> Any:
    """A plain loop over the site's batches, the gradients clipped by hand; and their norms."""
    dan = Dan(config.model.network, VOCABULARY, len(outputs), config.seed)
    adam = RowAdam(dan.trainable(), config.learning_rate)
    cohort = site.train.take([i for i, p in enumerate(site.train.patients) if p in site.codes])
    labels = code_labels(cohort, site.codes, outputs).astype(np.int8)
    read, norms = dan.read(cohort.bags), []
    for epoch in range(config.cycles):
        order = rng_of(config.seed, "order", site.id, epoch).permutation(len(cohort))
        for start in range(0, len(order), config.batch_size):
            batch = order[start : start + config.batch_size]
            dan.loss(read.take(batch), labels[batch]).backward()
            grads = {n: p.grad for n, p in dan.trainable().items()}
            norms.append(float(sum(g.to_dense().double().square().sum() for g in grads.values())))
            norms[-1] **= 0.5
            adam.step({n: g * min(1.0, clip / norms[-1]) for n, g in grads.items()})
    return {name: value.detach() for name, value in dan.trainable().items()}, norms


def test_gradients_are_clipped() -> None:
    """The plain loop with gradients scaled by hand; some are below the limit, some above."""
    (site,) = sites_of(1)
    config = config_of(cycles=3, clip=0.25, classifier_cycles=1)
    state, _ = trained((site,), config)
    wanted, norms = stage_1(site, config, state.facts["outputs"], 0.25)
    assert min(norms) < 0.25 < max(norms)
    free, _ = stage_1(site, config, state.facts["outputs"], np.inf)
    for name, value in wanted.items():
        ours = state.tensors[f"network.{name}"]
        assert torch.allclose(ours, value, rtol=1e-3, atol=1e-4), name
        assert not torch.allclose(ours, free[name], rtol=1e-3, atol=1e-4), name


def test_a_batch_in_parts_is_the_whole_batch() -> None:
    """Patients count alike: parts of 4 and one of 2 give the weights of batches at once."""
    (site,), ends, losses = sites_of(1), [], []
    coded = [p for p in site.train.patients if p in site.codes][:70]  # the last batch has 6
    site = replace(
        site, codes={p: site.codes[p] for p in (*coded, *site.valid.patients) if p in site.codes}
    )
    for accumulate in (1, 4):
        told = list[RoundResult]()
        config = config_of(cycles=3, accumulate=accumulate, classifier_cycles=1)
        state, _ = trained((site,), config, observer=told.append)
        ends.append(state.tensors)
        losses.append([r.metrics["loss"] for r in told[:3]])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for name, value in ends[0].items():
        if name.startswith("network."):
            assert torch.allclose(ends[1][name], value, rtol=1e-3, atol=1e-4), name


# ---- who may take part


def numbers(site: SitePatients) -> tuple[int, int]:
    """Training patients with codes, and with labels."""
    coded = sum(p in site.codes for p in site.train.patients)
    return coded, int((site.train.labels >= 0).any(axis=1).sum())


@pytest.mark.parametrize("stage", [0, 1])
def test_exactly_the_least_number_of_patients_is_enough(stage: int) -> None:
    """Coded ones where vectors are learnt, labelled ones for classifiers of concepts."""
    (site,) = sites_of(1)
    site = relabelled(site, -1, slice(20))
    assert numbers(site)[0] != numbers(site)[1]
    least, make = numbers(site)[stage], (config_of, without_stage_1)[stage]
    config = phenotype.for_sites(make(min_patients=least), (site,))
    assert Site(site, config).num_examples >= least
    more = replace(config, min_patients=least + 1)
    with pytest.raises(ConfigError, match=f"its {least} .* min_patients = {least + 1}"):
        Site(site, more)
    nobody = replace(relabelled(site, -1), codes={})
    assert Site(nobody, more).num_examples == 0  # it tells nothing
    for own in phenotype.alone(more, (site,)):
        assert Site(site, own).num_examples >= least
    together, settings = phenotype.pooled(more, (site,), None)
    assert Site(together[0], settings).num_examples >= least


def test_vectors_tell_no_concepts() -> None:
    """Classifiers of an encoder's vectors need no least number."""
    cohort = patients("v", 20, 1)
    values = Vectors(np.random.default_rng(0).normal(size=(20, 5)))
    cohort = replace(cohort, bags=values)
    none = cohort.take([])
    site = SitePatients("v", FeatureSpace(5, dense=True), cohort, none, none, {})
    config = phenotype.for_sites(without_stage_1(min_patients=1000), (site,))
    assert Site(site, config).num_examples == numbers(site)[1]


def test_a_model_of_another_dictionary_is_refused(tmp_path: Path) -> None:
    """Of as many concepts; the same model is taken where the fingerprint is the same."""
    sites = sites_of(2)
    trained(sites, config_of(classifier_cycles=1), tmp_path)
    later = config_of(model=PhenotypeConfig(representation=str(tmp_path / "model")))
    other = replace(SPACE, recipe={"fingerprint": "another sixty"})
    with pytest.raises(ConfigError, match="with another dictionary or encoder than this job"):
        trained(tuple(replace(site, space=other) for site in sites), later)
    trained(sites, later)


# ---- patients and sites with nothing


def without_concepts(site: SitePatients, share: int) -> SitePatients:
    """Every `share`-th training patient has none."""
    bags = [
        [] if row % share == 0 else site.train.bags.take([row]).concepts.tolist()
        for row in range(len(site.train))
    ]
    made = type(site.train.bags).of(bags, VOCABULARY)
    return replace(site, train=replace(site.train, bags=made))


@pytest.mark.parametrize("updates", ["rows", "dense"])
@pytest.mark.parametrize("share", [1, 3])
def test_patients_without_concepts_are_trained_on(share: int, updates: Any) -> None:
    """One a batch: vectors that no patient has stay as they were, the outputs' biases move."""
    sites = tuple(without_concepts(site, share) for site in sites_of(2))
    network = replace(NETWORK, updates=updates)
    told = list[RoundResult]()
    config = config_of(cycles=1, batch_size=1, model=PhenotypeConfig(network=network))
    state, members = trained(sites, config, observer=told.append)
    found, outputs = network_of(state), len(state.facts["outputs"])
    first = Dan(network, VOCABULARY, outputs, config.seed).trainable()
    seen = {
        concept
        for site in sites
        for row, patient in enumerate(site.train.patients)
        if patient in site.codes
        for concept in site.train.bags.take([row]).concepts.tolist()
    }
    assert bool(seen) == (share > 1)
    for concept in range(VOCABULARY):
        same = np.array_equal(found["embedding"][concept], first["embedding"][concept].tolist())
        assert same == (concept not in seen)
    assert (found["output_bias"] != 0).all()
    assert all(np.isfinite(r.metrics["loss"]) for r in told)
    assert all(np.isfinite(m.scores["codes"]["loss"]) for m in members)


def test_patients_of_all_sites_without_concepts() -> None:
    """A site of them among others adds its patients to the frequencies, and nothing else."""
    first, second = sites_of(2)
    sites = first, without_concepts(second, 1)
    state, members = trained(sites, without_stage_1())
    whole = labelled(pooled_patients(sites).train)
    wanted = TfidfTransformer().fit(counted(whole.bags)).idf_
    for member in members:
        idf = classifiers_of(member).model.idf
        assert np.array_equal(idf, wanted)
    assert torch.isfinite(state.tensors["svm.weight"]).all()
    assert all("phenotypes" in member.scores for member in members)
