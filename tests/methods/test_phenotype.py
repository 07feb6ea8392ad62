"""Two-stage phenotyping: what a federation of invented patients learns, by other programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from phenotype_patients import (
    DISEASES,
    VOCABULARY,
    classifiers_of,
    config_of,
    cut,
    labelled,
    patients,
    relabelled,
    sites_of,
    trained,
    without_stage_1,
)

from fednotes.core.errors import ConfigError, TrainingError
from fednotes.core.seeds import rng_of
from fednotes.core.update import Total, Update
from fednotes.methods import phenotype
from fednotes.methods.phenotype import Site, averaged
from fednotes.patients.classifiers import (
    LinearSVMs,
    document_frequencies,
    fit_platt,
    inverse_document_frequencies,
    platt_sums,
    tfidf,
)
from fednotes.patients.codes import category, output_matrix
from fednotes.patients.cohort import PRESENT, pooled_patients
from fednotes.patients.dan import Dan, DanConfig, RowAdam
from fednotes.patients.phenotyper import PhenotypeConfig, load_phenotyper

# ---- stage 1


def test_one_site_is_training_in_one_place() -> None:
    """Bitwise: a plain loop of Adam over the same batches, without any federation."""
    (site,) = sites_of(1)
    config = phenotype.for_sites(config_of(cycles=3), (site,))
    state, _ = trained((site,), config_of(cycles=3))
    outputs = state.facts["outputs"]

    dan = Dan(config.model.network, VOCABULARY, len(outputs), config.seed)
    adam = RowAdam(dan.trainable(), config.learning_rate)
    rows = [i for i, p in enumerate(site.train.patients) if p in site.codes]
    cohort = site.train.take(rows)
    labels = output_matrix(cohort.patients, site.codes, outputs)
    read = dan.read(cohort.bags)
    for epoch in range(3):
        order = rng_of(config.seed, "order", site.id, epoch).permutation(len(rows))
        for start in range(0, len(order), config.batch_size):
            batch = order[start : start + config.batch_size]
            dan.loss(read.take(batch), labels[batch]).backward()
            adam.step()
    for name, value in dan.trainable().items():
        assert torch.equal(state.tensors[f"network.{name}"], value), name


def test_sites_weigh_by_their_coded_patients() -> None:
    """One cycle of two sites is the weighted mean of what each has trained by itself."""
    sites = sites_of(2)
    config = config_of(cycles=1, minimum=1, outputs=("icd9:401", "icd9:250", "icd9:428"))
    both, _ = trained(sites, replace(config, classifier_cycles=1))
    own = [trained((site,), replace(config, classifier_cycles=1))[0] for site in sites]
    sizes = [sum(p in site.codes for p in site.train.patients) for site in sites]
    assert sizes[0] != sizes[1]
    for name, value in both.tensors.items():
        if name.startswith("network."):
            parts = [state.tensors[name].double() * n for state, n in zip(own, sizes, strict=True)]
            assert torch.equal(value, ((parts[0] + parts[1]) / sum(sizes)).float()), name


def test_outputs_are_the_categories_of_enough_patients_of_all_sites() -> None:
    """A Counter over every coded training patient."""
    sites = sites_of(3)
    counted: Counter[str] = Counter()
    for site in sites:
        for patient in site.train.patients:
            counted.update({category(code) for code in site.codes.get(patient, ())})
    minimum = sorted(counted.values())[len(counted) // 2]
    state, _ = trained(sites, config_of(minimum=minimum, cycles=1))
    wanted = sorted(name for name, n in counted.items() if n >= minimum)
    assert state.facts["outputs"] == wanted
    assert 0 < len(wanted) < len(counted)


def test_a_site_shows_no_category_of_its_own() -> None:
    """The counts are over the public list, and nothing else leaves the site."""
    (site,) = sites_of(1)
    config = phenotype.for_sites(config_of(), (site,))
    update = Site(site, config).count_codes({})
    assert update.tensors["patients"].shape == (len(config.candidates),)
    assert not update.metrics


def test_learning_helps() -> None:
    """Codes and diseases of test patients are ranked better than by chance."""
    _, members = trained(sites_of(2), config_of(cycles=12, classifier_cycles=5))
    for kind in ("codes", "ranking"):
        assert sum(member.scores[kind]["auroc"] for member in members) / 2 > 0.6


# ---- stage 2


def test_one_site_is_central_bitwise() -> None:
    """Epoch by epoch in one place, going on from float32 as a federation does."""
    (site,) = sites_of(1)
    config = without_stage_1(classifier_cycles=4, classifier_epochs=2)
    state, _ = trained((site,), config)
    cohort = labelled(site.train)
    idf = inverse_document_frequencies(document_frequencies(cohort.bags), len(cohort))
    features = tfidf(cohort.bags, idf)
    machines = LinearSVMs([(0, 1)] * len(DISEASES), VOCABULARY)
    for epoch in range(8):
        order = rng_of(config.seed, "phenotypes", site.id, epoch).permutation(len(cohort))
        machines.epoch(features, cohort.labels, order)
        if epoch % 2:
            machines.weight[:] = machines.weight.astype(np.float32)
            machines.intercept[:] = machines.intercept.astype(np.float32)
    assert np.array_equal(state.tensors["svm.weight"].numpy(), machines.weight.astype(np.float32))
    assert np.array_equal(state.tensors["svm.intercept"].numpy(), machines.intercept)


def test_classifiers_weigh_by_the_patients_of_their_disease() -> None:
    """A site that nobody was labelled at for a disease has no part in its classifier."""
    first, second = sites_of(2)
    sites = (first, relabelled(second, -1, column=0))
    config = without_stage_1(classifier_cycles=1)
    both, _ = trained(sites, config)
    total = []
    whole = labelled(pooled_patients(sites).train)
    idf = inverse_document_frequencies(document_frequencies(whole.bags), len(whole))
    for site in sites:
        cohort = labelled(site.train)
        machines = LinearSVMs([(0, 1)] * len(DISEASES), VOCABULARY)
        order = rng_of(config.seed, "phenotypes", site.id, 0).permutation(len(cohort))
        machines.epoch(tfidf(cohort.bags, idf), cohort.labels, order)
        total.append((machines.weight.astype(np.float32), (cohort.labels >= 0).sum(0)))
    (a, n), (b, m) = total
    wanted = (a.astype(np.float64) * n + b.astype(np.float64) * m) / (n + m)
    assert m[0] == 0
    assert np.array_equal(both.tensors["svm.weight"].numpy(), wanted.astype(np.float32))


@pytest.mark.parametrize(("patients", "ends"), [(4.0, 2.0), (1.0, 8.0)])
def test_the_mean_over_nobody_is_not_zero(patients: float, ends: float) -> None:
    """A classifier that nobody trained stays; of one patient at one site the sum is the mean."""
    shared = {"svm.weight": torch.tensor([[3.0, 5.0]])}
    given = {"svm.weight": torch.tensor([[0.0, 8.0]]).double()}
    update = Update({**given, "patients": torch.tensor([0.0, patients]).double()})
    assert averaged(shared, Total.of([update]))["svm.weight"].tolist() == [[3.0, ends]]


def test_calibration_is_the_pooled_one() -> None:
    """Platt scaling of all held-out patients in one place gives the same a and b."""
    sites = sites_of(3)
    config = without_stage_1(classifier_cycles=3, calibrate=True)
    _state, members = trained(sites, config)
    model = classifiers_of(members[0])
    scores, targets = [], []
    for site in sites:
        cohort = labelled(site.valid)
        scores.append(model.machines.scores(model.model.features(cohort.bags)))
        targets.append(model.machines.targets(cohort.labels))
    together = np.concatenate(scores), np.concatenate(targets)
    wanted = fit_platt(lambda ab: platt_sums(ab, *together), len(DISEASES))
    assert np.allclose(model.model.platt, wanted, rtol=1e-6)


# ---- both stages, files, restarts


def test_two_runs_are_one(tmp_path: Path) -> None:
    """Stage 1 by itself, then stage 2 from its folder: the same bits as both in one run."""
    sites = sites_of(2)
    bare = tuple(
        replace(
            site,
            **{
                part: replace(cohort, labels=np.zeros((len(cohort), 0), np.int8), outputs=())
                for part in ("train", "valid", "test")
                for cohort in [getattr(site, part)]
            },
        )
        for site in sites
    )
    whole, members = trained(sites, config_of(), tmp_path / "whole")
    trained(bare, config_of(), tmp_path / "first")
    later = PhenotypeConfig(
        representation=str(tmp_path / "first" / "model"), network=config_of().model.network
    )
    second, _ = trained(sites, config_of(model=later), tmp_path / "second")
    # the order of stage 2's patients hangs on the number of the round
    alike, _ = trained(sites, config_of(model=later, cycles=1))
    assert second.tensors.keys() == whole.tensors.keys() == alike.tensors.keys()
    for name, value in second.tensors.items():
        if name.startswith("network."):
            assert torch.equal(value, whole.tensors[name]), name
    assert torch.equal(second.tensors["svm.weight"], alike.tensors["svm.weight"])
    assert members[0].scores["phenotypes"]["f1"] > 0


def test_a_restart_changes_nothing(tmp_path: Path) -> None:
    """A run cut after each of its rounds and gone on with ends with the same bits."""
    sites = sites_of(2)
    config = config_of(cycles=2, classifier_cycles=2, calibrate=True)
    whole, members = trained(sites, config, tmp_path / "whole")
    bags = sites[0].test.bags
    codes = load_phenotyper(tmp_path / "whole/model").code_probabilities(bags)

    for last in range(4):
        kept = tmp_path / str(last)
        cut(sites, config, last, directory=kept)
        again, later = trained(sites, config, kept / "model", directory=kept, resume=True)
        assert again.facts["outputs"] == whole.facts["outputs"]
        model = load_phenotyper(kept / "model/model")
        assert list(model.code_names) == whole.facts["outputs"]
        assert np.array_equal(model.code_probabilities(bags), codes)
        for name, value in whole.tensors.items():
            assert torch.equal(again.tensors[name], value), (last, name)
        assert [m.scores for m in later] == [m.scores for m in members]


# ---- edges


def test_patients_without_concepts_and_lonely_classes() -> None:
    """A disease that all have, one that nobody is labelled for, a patient without concepts."""
    changed = [
        replace(
            relabelled(relabelled(site, PRESENT, column=0), -1, column=1),
            test=patients(site.id, 40, seed=9, concepts=0),
        )
        for site in sites_of(2)
    ]
    _, members = trained(changed, without_stage_1(classifier_cycles=2))
    found = classifiers_of(members[0]).model.classes(changed[0].test.bags)
    assert (found[:, 0] == PRESENT).all()
    assert (found[:, 1] == -1).all()
    assert len(set(found[:, 2].tolist())) == 1  # the intercept's word
    assert members[0].scores["phenotypes"]["support"] > 0


def test_a_site_without_codes_or_labels_adds_nothing() -> None:
    """Stage 1 at one site, stage 2 at the other: as if each had been there alone."""
    first, second = sites_of(2)
    coded, judged = relabelled(first, -1), replace(second, codes={})
    both, members = trained((coded, judged), config_of(cycles=1, classifier_cycles=1))
    alone, _ = trained((coded, replace(judged, train=judged.train.take([0]))), config_of(cycles=1))
    for name, value in both.tensors.items():
        if name.startswith("network."):
            assert torch.equal(value, alone.tensors[name])
    assert "codes" not in members[1].scores


def test_questionable_is_a_class_where_enough_are() -> None:
    """Three machines, and a share of probability for it."""
    changed = [relabelled(site, 2, slice(30), 2) for site in sites_of(2)]
    for least, machines in ((60, len(DISEASES) + 2), (61, len(DISEASES))):
        config = without_stage_1(least_questionable=least, classifier_cycles=1)
        _, members = trained(changed, config)
        assert len(classifiers_of(members[0]).machines.machines) == machines


DENSE = PhenotypeConfig(network=DanConfig(updates="dense"))
PADDED = PhenotypeConfig(network=DanConfig(length=20))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_patients": 10_000}, "min_patients = 10000 is asked"),
        ({"minimum": 10_000}, "lower the minimum"),
        ({"cycles": 0}, "cycles = 0"),
        ({"classifier_cycles": 0}, "classifier_cycles = 0"),
        ({"proximal": 0.1}, 'updates = "dense"'),
        ({"systems": ("icd8",)}, "icd8"),
        ({"systems": ("condition",)}, "no list of all categories"),
        ({"optimizer": "rmsprop"}, 'updates = "dense"'),
        ({"optimizer": "rmsprop", "weight_decay": 0.1, "model": DENSE}, "has no weight_decay"),
        ({"model": PADDED}, "least_occurrences to 1 or more"),
        ({"least_occurrences": -1}, "least_occurrences = -1"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message.replace("(", r"\(")) as error:
        trained(sites_of(2), config_of(**settings))
    assert "fednotes" in type(error.value).__module__


def test_nothing_to_learn() -> None:
    """No codes for stage 1; no labels for stage 2."""
    sites = tuple(replace(site, codes={}) for site in sites_of(2))
    with pytest.raises(ConfigError, match="predicts billing codes"):
        phenotype.for_sites(config_of(), sites)
    with pytest.raises(ConfigError, match="billing codes, so it cannot learn alone"):
        phenotype.alone(config_of(), sites)
    with pytest.raises(TrainingError, match="no training patient is labelled"):
        trained([relabelled(site, -1) for site in sites], without_stage_1())
