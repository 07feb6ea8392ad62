"""Two-stage phenotyping: what a federation of generated patients learns.

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
    cut,
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
from syntax_trees import names_in
from tiny_taggers import assert_same

from fednotes.apps.phenotyping import stages
from fednotes.apps.phenotyping import two_stage as phenotype
from fednotes.apps.phenotyping.classifiers import (
    LinearSVMs,
    SvmConfig,
    compute_idf,
    compute_tfidf,
    count_document_frequencies,
)
from fednotes.apps.phenotyping.codes import find_category
from fednotes.apps.phenotyping.cohort import (
    ABSENT,
    PRESENT,
    FeatureSpace,
    SitePatients,
    Vectors,
    pool_sites,
)
from fednotes.apps.phenotyping.dan import Dan, DanConfig
from fednotes.apps.phenotyping.phenotyper import PhenotypeConfig, load_phenotyper
from fednotes.apps.phenotyping.two_stage import (
    METHOD,
    Config,
    Site,
    average_classifiers,
)
from fednotes.core.errors import ConfigError, RefusedError, TrainingError
from fednotes.core.federation import State
from fednotes.core.seeds import rng_of
from fednotes.core.update import Tensors, Total, Update
from fednotes.engines.rounds import RoundResult
from fednotes.metrics.platt import MOST_PLATT_SUMS, compute_platt_sums, fit_platt
from fednotes.training.row_adam import RowAdam


def test_stages_draw_random_numbers_only_through_the_draws_of_a_site() -> None:
    """A draw by the job's seed is known to all."""
    for module in (stages, phenotype):
        source = Path(module.__file__).read_text("utf-8")
        assert not names_in(source) & {"seed_of", "rng_of"}


# ---- stage 1


def test_a_federation_of_one_site_equals_training_in_one_place() -> None:
    """Bitwise: a plain loop of Adam over the same batches, without any federation."""
    (site,) = sites_of(1)
    config = phenotype.METHOD.configure(config_of(cycles=3), (site,))
    state, _ = trained((site,), config_of(cycles=3))
    expected, _ = stage_1(site, config, state.facts["outputs"], np.inf)
    for name, value in expected.items():
        assert torch.equal(state.tensors[f"network.{name}"], value), name


def test_sites_are_weighted_by_their_coded_patients() -> None:
    """One cycle of two sites is the weighted mean of what each has trained by itself."""
    sites = sites_of(2)
    config = config_of(
        cycles=1, minimum=1, outputs=("icd9:401", "icd9:250", "icd9:428")
    )
    both_state, _ = trained(sites, replace(config, classifier_cycles=1))
    single_states = [
        trained((site,), replace(config, classifier_cycles=1))[0] for site in sites
    ]
    sizes = [sum(p in site.codes for p in site.train.patients) for site in sites]
    assert sizes[0] != sizes[1]
    for name, value in both_state.tensors.items():
        if name.startswith("network."):
            parts = [
                state.tensors[name].double() * n
                for state, n in zip(single_states, sizes, strict=True)
            ]
            assert torch.equal(value, ((parts[0] + parts[1]) / sum(sizes)).float()), (
                name
            )


def test_outputs_are_the_categories_with_enough_patients_over_all_sites() -> None:
    """A Counter over every coded training patient."""
    sites = sites_of(3)
    counted: Counter[str] = Counter()
    for site in sites:
        for patient in site.train.patients:
            counted.update(
                {find_category(code) for code in site.codes.get(patient, ())}
            )
    minimum = sorted(counted.values())[len(counted) // 2]
    state, _ = trained(sites, config_of(minimum=minimum, cycles=1))
    expected = sorted(name for name, n in counted.items() if n >= minimum)
    assert state.facts["outputs"] == expected
    assert 0 < len(expected) < len(counted)


def test_a_site_reveals_no_category_outside_the_public_list() -> None:
    """The counts are over the public list, and nothing else leaves the site."""
    (site,) = sites_of(1)
    config = phenotype.METHOD.configure(config_of(), (site,))
    update = Site(site, config).count_codes({})
    assert update.tensors["patients"].shape == (len(config.list_candidates()),)
    assert not update.metrics


def test_training_ranks_test_patients_better_than_chance() -> None:
    """Codes and diseases of test patients are ranked better than by chance."""
    _, members = trained(sites_of(2), config_of(cycles=12, classifier_cycles=5))
    for kind in ("codes", "ranking"):
        assert sum(member.scores[kind]["auroc"] for member in members) / 2 > 0.6


# ---- stage 2


def test_classifiers_of_one_site_equal_central_training_bit_for_bit() -> None:
    """Epoch by epoch in one place, going on from float32 as a federation does."""
    (site,) = sites_of(1)
    config = without_stage_1(classifier_cycles=4, classifier_epochs=2)
    state, _ = trained((site,), config)
    cohort = labelled(site.train)
    idf = compute_idf(count_document_frequencies(cohort.bags), len(cohort))
    features = compute_tfidf(cohort.bags, idf)
    svms = LinearSVMs([(0, 1)] * len(DISEASES), VOCABULARY)
    for epoch in range(8):
        order = order_of(config, site, epoch, len(cohort))
        svms.train_epoch(features, cohort.labels, order)
        if epoch % 2:
            svms.weight[:] = svms.weight.astype(np.float32)
            svms.intercept[:] = svms.intercept.astype(np.float32)
    assert np.array_equal(
        state.tensors["svm.weight"].numpy(), svms.weight.astype(np.float32)
    )
    assert np.array_equal(state.tensors["svm.intercept"].numpy(), svms.intercept)


def test_classifiers_are_weighted_by_labelled_patients_per_disease() -> None:
    """A site that nobody was labelled at for a disease has no part in its classifier."""
    first, second = sites_of(2)
    sites = (first, relabelled(second, -1, column=0))
    config = without_stage_1(classifier_cycles=1)
    state, _ = trained(sites, config)
    total = []
    pooled_patients = labelled(pool_sites(sites).train)
    idf = compute_idf(
        count_document_frequencies(pooled_patients.bags), len(pooled_patients)
    )
    for site in sites:
        cohort = labelled(site.train)
        svms = LinearSVMs([(0, 1)] * len(DISEASES), VOCABULARY)
        order = order_of(config, site, 0, len(cohort))
        svms.train_epoch(compute_tfidf(cohort.bags, idf), cohort.labels, order)
        total.append((svms.weight.astype(np.float32), (cohort.labels >= 0).sum(0)))
    (a, n), (b, m) = total
    expected = (a.astype(np.float64) * n + b.astype(np.float64) * m) / (n + m)
    assert m[0] == 0
    assert np.array_equal(
        state.tensors["svm.weight"].numpy(), expected.astype(np.float32)
    )


@pytest.mark.parametrize(("patients", "ends"), [(4.0, 2.0), (1.0, 8.0)])
def test_a_classifier_that_nobody_trained_is_unchanged(
    patients: float, ends: float
) -> None:
    """A classifier that nobody trained stays; of one patient at one site the sum is the
    mean."""
    shared = {
        "svm.weight": torch.tensor([[3.0, 5.0]]),
        "svm.intercept": torch.tensor([2.0, 1.0]),
    }
    sent = {
        "svm.weight": torch.tensor([[0.0, 8.0]]).double(),
        "svm.intercept": torch.tensor([0.0, 8.0]).double(),
        "patients": torch.tensor([0.0, patients]).double(),
    }
    mean = average_classifiers(shared, Total.of([Update(sent)]))
    assert mean["svm.weight"].tolist() == [[3.0, ends]]
    assert mean["svm.intercept"].tolist() == [2.0, ends]


def test_calibration_equals_that_of_pooled_patients() -> None:
    """Platt scaling of all held-out patients in one place gives the same a and b."""
    sites = sites_of(3)
    config = without_stage_1(classifier_cycles=3, calibrate=True)
    _state, members = trained(sites, config)
    model = classifiers_of(members[0])
    scores, targets = [], []
    for site in sites:
        cohort = labelled(site.valid)
        scores.append(model.svms.score(model.model.compute_features(cohort.bags)))
        targets.append(model.svms.make_targets(cohort.labels))
    together = np.concatenate(scores), np.concatenate(targets)
    expected = fit_platt(lambda ab: compute_platt_sums(ab, *together), len(DISEASES))
    assert np.allclose(model.model.platt, expected, rtol=1e-6)


def test_a_calibration_covers_only_labelled_held_out_patients() -> None:
    """A policy that asks for many patients must not be shown the training patients
    instead."""
    (site,) = sites_of(1)
    labels = np.full_like(site.valid.labels, -1)
    labels[[3, 5, 6], 0] = PRESENT
    labels[[3, 8], 2] = ABSENT
    site = replace(site, valid=replace(site.valid, labels=labels))
    _, (member,) = trained((site,), without_stage_1(classifier_cycles=1))
    # the sums of each classifier leave by themselves, so the rarest label counts
    assert member.count_covered("calibrate") == {"patients": 2}
    assert Site(site, member.config).count_covered("calibrate") == {"patients": 2}
    assert member.count_covered("prepare")["patients"] > 50


def test_an_update_of_classifiers_covers_the_patients_of_the_rarest_label() -> None:
    """Two patients with a label of gout have a classifier that nobody else is behind."""
    (site,) = sites_of(1)
    labels = site.train.labels.copy()
    labels[:, 2] = -1
    labels[5, 2] = PRESENT
    labels[9, 2] = ABSENT
    site = replace(site, train=replace(site.train, labels=labels))
    _, (member,) = trained((site,), without_stage_1(classifier_cycles=1))
    assert member.count_covered("train") == {"patients": 2}


def test_the_coverage_of_a_calibration_is_known_before_training() -> None:
    (site,) = sites_of(1)
    labels = np.full_like(site.valid.labels, -1)
    labels[[3, 5, 6], 0] = PRESENT
    labels[[3, 8], 2] = ABSENT
    site = replace(site, valid=replace(site.valid, labels=labels))
    (coverage,) = METHOD.list_coverage(without_stage_1(calibrate=True), site)
    assert coverage.patients == 2
    assert not METHOD.list_coverage(without_stage_1(calibrate=False), site)


def other_classifiers(tensors: Tensors) -> Tensors:
    """Return classifiers that differ in one number."""
    weight = tensors["svm.weight"].clone()
    weight[0, 0] += 1
    return {**tensors, "svm.weight": weight}


def calibrated_site() -> tuple[Site, Tensors, Tensors]:
    """Return a site after one request of a calibration, the request's tensors, and what
    it was prepared with."""
    (data,) = sites_of(1)
    config = phenotype.METHOD.configure(without_stage_1(calibrate=True), (data,))
    site = Site(data, config)
    idf = torch.ones(VOCABULARY, dtype=torch.float64)
    prepared = {"classes": torch.tensor([[1.0, 1.0, 0.0]] * len(DISEASES)), "idf": idf}
    site.prepare(prepared)
    parameters = {
        **classifiers_of(site).svms.to_float32(),
        "platt": torch.zeros(len(DISEASES), 2, dtype=torch.float64),
    }
    site.calibrate(parameters)
    return site, parameters, prepared


def test_a_run_calibrates_one_model() -> None:
    """A server that lies could otherwise choose, in each request, classifiers that tell
    one held-out patient apart."""
    site, parameters, prepared = calibrated_site()
    site.calibrate({**parameters, "platt": parameters["platt"] + 1})
    with pytest.raises(RefusedError, match="a run can calibrate only one model"):
        site.calibrate(other_classifiers(parameters))
    idf = prepared["idf"].clone()
    idf[0] = 2.0
    site.prepare({**prepared, "idf": idf})
    with pytest.raises(RefusedError, match="a run can calibrate only one model"):
        site.calibrate(parameters)
    site.prepare(prepared)
    site.calibrate(parameters)


def test_a_rebuilt_site_calibrates_no_other_model() -> None:
    """Also where its state was kept between the restart and its preparation."""
    site, parameters, prepared = calibrated_site()
    for _ in range(2):
        state = site.state()
        site = Site(site.data, site.config)
        site.restore(state)
    site.prepare(prepared)
    with pytest.raises(RefusedError, match="a run can calibrate only one model"):
        site.calibrate(other_classifiers(parameters))
    site.calibrate(parameters)


def restored(site: Site, state: State) -> Site:
    """Return a new site in a saved state of another one."""
    again = Site(site.data, site.config)
    again.restore(state)
    return again


def test_a_rebuilt_site_continues_with_stage_2() -> None:
    """Without being prepared again, as after a kill between two requests."""
    site, parameters, _ = calibrated_site()
    again = restored(site, site.state())
    for cycle in range(2):
        expected = site.train(parameters, cycle=cycle)
        assert_same(again.train(parameters, cycle=cycle).tensors, expected.tensors)
    expected = site.calibrate(parameters)
    assert_same(again.calibrate(parameters).tensors, expected.tensors)


@pytest.mark.parametrize("kind", ["live", "restored", "restored by an older version"])
def test_a_site_prepared_again_keeps_its_steps(kind: str) -> None:
    """As a server does that resumes a run."""
    site, parameters, prepared = calibrated_site()
    site.train(parameters, cycle=0)
    steps = classifiers_of(site).svms.steps.copy()
    assert steps.all()
    state = site.state()
    if kind == "restored":
        site = restored(site, state)
    elif kind == "restored by an older version":
        site = restored(site, replace(state, tensors={"steps": state.tensors["steps"]}))
        assert site.classifiers is None
    site.prepare(prepared)
    assert np.array_equal(classifiers_of(site).svms.steps, steps)


def test_a_site_rewound_to_stage_1_repeats_stage_2() -> None:
    site, parameters, prepared = calibrated_site()
    before = Site(site.data, site.config).state()
    site.train(parameters, cycle=0)
    site.restore(before)
    assert site.classifiers is None
    site.prepare(prepared)
    assert not classifiers_of(site).svms.steps.any()


def test_a_calibration_may_ask_at_most_the_sums_a_fit_can_need() -> None:
    site, parameters, _ = calibrated_site()
    for _ in range(MOST_PLATT_SUMS - 1):
        site.calibrate(parameters)
    with pytest.raises(RefusedError, match="needs at most 100 sums"):
        site.calibrate(parameters)


def test_a_fit_needs_fewer_sums_than_a_site_answers() -> None:
    """Both passes: a score that falls with the label needs the second one."""
    rng = np.random.default_rng(3)
    scores = rng.normal(size=(200, 2))
    targets = np.sign(rng.normal(size=(200, 2)) - 0.5 * scores).astype(np.int8)
    requests = 0

    def never_better(platt: np.ndarray) -> np.ndarray:
        nonlocal requests
        requests += 1
        sums = compute_platt_sums(platt, scores, targets)
        if requests > 1:
            sums[:, 0] += requests  # each step seems to make the fit worse
        return sums

    fit_platt(never_better, 2)
    assert 2 < requests <= MOST_PLATT_SUMS


# ---- both stages, files, restarts


def test_separate_runs_of_both_stages_equal_one_run(tmp_path: Path) -> None:
    """Stage 1 by itself, then stage 2 from its folder: the same bits as both in one
    run."""
    sites = sites_of(2)
    bare = tuple(
        replace(
            site,
            **{
                part: replace(
                    cohort, labels=np.zeros((len(cohort), 0), np.int8), outputs=()
                )
                for part in ("train", "valid", "test")
                for cohort in [getattr(site, part)]
            },
        )
        for site in sites
    )
    uninterrupted, members = trained(sites, config_of(), tmp_path / "whole")
    trained(bare, config_of(), tmp_path / "first")
    later = PhenotypeConfig(
        representation=str(tmp_path / "first" / "model"),
        network=config_of().model.network,
    )
    second, _ = trained(sites, config_of(model=later), tmp_path / "second")
    # the order of stage 2's patients hangs on the number of the round
    joint, _ = trained(sites, config_of(model=later, cycles=1))
    assert second.tensors.keys() == uninterrupted.tensors.keys() == joint.tensors.keys()
    for name, value in second.tensors.items():
        if name.startswith("network."):
            assert torch.equal(value, uninterrupted.tensors[name]), name
    assert torch.equal(second.tensors["svm.weight"], joint.tensors["svm.weight"])
    assert members[0].scores["phenotypes"]["f1"] > 0


def test_a_restart_does_not_change_the_result(tmp_path: Path) -> None:
    """A run cut after each of its rounds and gone on with ends with the same bits."""
    sites = sites_of(2)
    config = config_of(cycles=2, classifier_cycles=2, calibrate=True)
    uninterrupted, members = trained(sites, config, tmp_path / "whole")
    bags = sites[0].test.bags
    codes = load_phenotyper(tmp_path / "whole/model").predict_code_probabilities(bags)

    for last in range(4):
        resumed_folder = tmp_path / str(last)
        cut(sites, config, last, directory=resumed_folder)
        again, later = trained(
            sites,
            config,
            resumed_folder / "model",
            directory=resumed_folder,
            resume=True,
        )
        assert again.facts["outputs"] == uninterrupted.facts["outputs"]
        model = load_phenotyper(resumed_folder / "model/model")
        assert list(model.code_names) == uninterrupted.facts["outputs"]
        assert np.array_equal(model.predict_code_probabilities(bags), codes)
        for name, value in uninterrupted.tensors.items():
            assert torch.equal(again.tensors[name], value), (last, name)
        assert [m.scores for m in later] == [m.scores for m in members]


# ---- edges


def test_patients_without_concepts_and_single_classes_are_trained_on() -> None:
    """A disease that all have, one that nobody is labelled for, a patient without
    concepts."""
    changed = [
        replace(
            relabelled(relabelled(site, PRESENT, column=0), -1, column=1),
            test=patients(site.id, 40, seed=9, concepts=0),
        )
        for site in sites_of(2)
    ]
    _, members = trained(changed, without_stage_1(classifier_cycles=2))
    predicted_classes = classifiers_of(members[0]).model.predict_classes(
        changed[0].test.bags
    )
    assert (predicted_classes[:, 0] == PRESENT).all()
    assert (predicted_classes[:, 1] == -1).all()
    assert len(set(predicted_classes[:, 2].tolist())) == 1  # the intercept's word
    assert members[0].scores["phenotypes"]["support"] > 0


def test_a_site_without_codes_or_labels_adds_nothing_to_that_stage() -> None:
    """Stage 1 at one site, stage 2 at the other: as if each had been there alone."""
    first, second = sites_of(2)
    coded, judged = relabelled(first, -1), replace(second, codes={})
    state, members = trained((coded, judged), config_of(cycles=1, classifier_cycles=1))
    alone, _ = trained(
        (coded, replace(judged, train=judged.train.take([0]))), config_of(cycles=1)
    )
    for name, value in state.tensors.items():
        if name.startswith("network."):
            assert torch.equal(value, alone.tensors[name])
    assert "codes" not in members[1].scores


def test_questionable_is_a_class_if_enough_patients_have_it() -> None:
    """Three classifiers, and a share of probability for it."""
    changed = [relabelled(site, 2, slice(30), 2) for site in sites_of(2)]
    for least, svms in ((60, len(DISEASES) + 2), (61, len(DISEASES))):
        config = without_stage_1(least_questionable=least, classifier_cycles=1)
        _, members = trained(changed, config)
        assert len(classifiers_of(members[0]).svms.classifiers) == svms


DENSE = PhenotypeConfig(network=DanConfig(updates="dense"))
PADDED = PhenotypeConfig(network=DanConfig(length=20))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_patients": 10_000}, "fewer than min_patients = 10000"),
        ({"minimum": 10_000}, r"lower \[training\] minimum, or use more patients"),
        ({"cycles": 0}, "cycles = 0"),
        ({"classifier_cycles": 0}, "classifier_cycles = 0"),
        ({"proximal": 0.1}, 'updates = "dense"'),
        ({"systems": ("icd8",)}, "icd8"),
        ({"systems": ("condition",)}, "no list of all categories"),
        ({"optimizer": "rmsprop"}, 'updates = "dense"'),
        (
            {"optimizer": "rmsprop", "weight_decay": 0.1, "model": DENSE},
            "has no weight_decay",
        ),
        ({"model": PADDED}, "least_occurrences to 1 or more"),
        ({"least_occurrences": -1}, "least_occurrences = -1"),
    ],
)
def test_impossible_settings_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(Exception, match=message.replace("(", r"\(")) as error:
        trained(sites_of(2), config_of(**settings))
    assert "fednotes" in type(error.value).__module__


def test_jobs_without_codes_and_labels_are_refused() -> None:
    """No codes for stage 1; no labels for stage 2."""
    sites = tuple(replace(site, codes={}) for site in sites_of(2))
    with pytest.raises(ConfigError, match="predicts billing codes"):
        phenotype.METHOD.configure(config_of(), sites)
    with pytest.raises(ConfigError, match="billing codes, so it cannot learn alone"):
        phenotype.METHOD.configure_alone(config_of(), sites)
    with pytest.raises(TrainingError, match="no training patient is labelled"):
        trained([relabelled(site, -1) for site in sites], without_stage_1())


# ---- settings ------------------------------------------------------------------------


NETWORK = DanConfig(embedding=8, hidden=12)


def sgd(
    x: Any, labels: np.ndarray, order: Sequence[int] | np.ndarray, weights: Any = None
) -> np.ndarray:
    """Run an epoch of scikit-learn's SGD, in this order, on the labelled patients."""
    rows = [row for row in order if labels[row] >= 0]
    classifier = SGDClassifier(
        penalty=None, shuffle=False, max_iter=1, tol=None, class_weight=weights
    )
    coefficients: np.ndarray = classifier.fit(x[rows], labels[rows]).coef_[0]
    return coefficients


def order_of(config: Config, site: SitePatients, epoch: int, number: int) -> np.ndarray:
    return rng_of(config.seed, "phenotypes", site.id, epoch).permutation(number)


# ---- stage 2


def test_balanced_class_weights_are_those_of_all_sites_together() -> None:
    """SGDClassifier with n / (2 n of the class) over all sites; the mean of the sites'."""
    sites = sites_of(2)
    config = without_stage_1(classifier_cycles=1)
    config = replace(
        config,
        model=replace(config.model, classifier=SvmConfig(class_weights="balanced")),
    )
    state, _ = trained(sites, config)
    cohorts = [labelled(site.train) for site in sites]
    tfidf = TfidfTransformer().fit(np.concatenate([counted(c.bags) for c in cohorts]))
    for column in range(len(DISEASES)):
        everyone = Counter(
            v for c in cohorts for v in c.labels[:, column].tolist() if v >= 0
        )
        weights = {v: everyone.total() / (2 * everyone[v]) for v in (0, 1)}
        assert weights[1] > 1.1 > weights[0]
        total, number = np.zeros(VOCABULARY), 0
        for site, cohort in zip(sites, cohorts, strict=True):
            disease_labels = cohort.labels[:, column]
            order = order_of(config, site, 0, len(cohort))
            n = int((disease_labels >= 0).sum())
            total += n * sgd(
                tfidf.transform(counted(cohort.bags)), disease_labels, order, weights
            )
            number += n
        ours = state.tensors["svm.weight"][:, column].numpy()
        assert np.allclose(ours, total / number, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", ["none", "l2"])
def test_classifiers_use_the_kept_network(scale: Any) -> None:
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
        expected = sgd(x.astype(np.float64), cohort.labels[:, column], order)
        ours = state.tensors["svm.weight"][:, column].numpy()
        assert np.allclose(ours, expected, rtol=1e-3, atol=1e-3)


def test_rounds_of_both_stages_are_evaluated_at_the_period() -> None:
    """Counted from each stage's first cycle; the last one of each always."""
    sites, rounds = sites_of(2), list[RoundResult]()
    config = config_of(cycles=4, classifier_cycles=7, evaluate_every=3)
    trained(sites, config, observer=rounds.append)
    assert [r.round + 1 for r in rounds if r.evaluated] == [3, 4, 4 + 3, 4 + 6, 4 + 7]
    assert [r.round + 1 for r in rounds if "valid_loss" in r.metrics] == [3, 4]
    assert [r.round + 1 for r in rounds if "valid_f1" in r.metrics] == [7, 10, 11]


# ---- stage 1


def test_the_best_cycle_has_the_lowest_held_out_loss() -> None:
    """Brute force: runs that end after each cycle, judged by NumPy on all valid
    patients."""
    sites, losses, ends = sites_of(2), [], []
    config = config_of(cycles=1, local_epochs=4, learning_rate=0.1, classifier_cycles=1)
    for cycles in range(1, 6):
        state, _ = trained(sites, replace(config, cycles=cycles))
        total, number = 0.0, 0
        for site in sites:
            labels = code_labels(site.valid, site.codes, state.facts["outputs"])
            known = labels[:, 0] >= 0
            p = np.clip(
                code_chances(network_of(state), site.valid)[known], 1e-7, 1 - 1e-7
            )
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
    for name, expected in ends[best].items():
        assert np.array_equal(network_of(state)[name], expected), name
        assert not np.array_equal(ends[-1][name], expected), name


CAUSES = ("E8800", "E8859", "E8881", "E9190", "4019")


def with_causes(site: SitePatients) -> SitePatients:
    """Return codes of external causes, in turn.

    E880, E885 and E888 differ in the fourth character.
    """
    everyone = [
        p for part in (site.train, site.valid, site.test) for p in part.patients
    ]
    return replace(
        site,
        codes={
            p: frozenset({f"icd9:{CAUSES[i % 5]}", f"icd9:{CAUSES[(i + 1) % 3]}"})
            for i, p in enumerate(everyone)
        },
    )


@pytest.mark.parametrize(
    ("whole_causes", "outputs"),
    [
        (True, ["icd9:401", "icd9:E880", "icd9:E885", "icd9:E888", "icd9:E919"]),
        (False, ["icd9:401", "icd9:E88", "icd9:E91"]),
    ],
)
def test_external_causes_keep_four_characters_on_request(
    whole_causes: bool, outputs: list[str]
) -> None:
    """Outputs, patients of each and labels by the beginnings of codes."""
    (site,) = sites_of(1)
    site = with_causes(site)
    config = phenotype.METHOD.configure(
        config_of(whole_causes=whole_causes, cycles=1), (site,)
    )
    state, (member,) = trained((site,), config)
    assert state.facts["outputs"] == outputs
    expected_labels = code_labels(site.train, site.codes, outputs)
    patient_counts = member.count_codes({}).tensors["patients"].tolist()
    counts = {
        name: n
        for name, n in zip(config.list_candidates(), patient_counts, strict=True)
        if n
    }
    assert counts == dict(
        zip(outputs, expected_labels.sum(axis=0).tolist(), strict=True)
    )
    assert member.code_learner is not None
    assert np.array_equal(member.code_learner.train_data.labels, expected_labels)


def stage_1(
    site: SitePatients, config: Config, outputs: Sequence[str], clip: float
) -> Any:
    """A plain loop over the site's batches, the gradients clipped by hand; and their
    norms."""
    dan = Dan(config.model.network, VOCABULARY, len(outputs), config.seed)
    adam = RowAdam(dan.trainable(), config.learning_rate)
    cohort = site.train.take(
        [i for i, p in enumerate(site.train.patients) if p in site.codes]
    )
    labels = code_labels(cohort, site.codes, outputs).astype(np.int8)
    mixtures, norms = dan.make_network_input(cohort.bags), []
    for epoch in range(config.cycles):
        order = rng_of(config.seed, "order", site.id, epoch).permutation(len(cohort))
        for start in range(0, len(order), config.batch_size):
            batch = order[start : start + config.batch_size]
            dan.loss(mixtures.take(batch), labels[batch]).backward()
            grads = {n: p.grad for n, p in dan.trainable().items()}
            norms.append(
                float(sum(g.to_dense().double().square().sum() for g in grads.values()))
            )
            norms[-1] **= 0.5
            adam.step({n: g * min(1.0, clip / norms[-1]) for n, g in grads.items()})
    return {name: value.detach() for name, value in dan.trainable().items()}, norms


def test_gradients_are_clipped() -> None:
    """The plain loop with gradients scaled by hand; some are below the limit, some
    above."""
    (site,) = sites_of(1)
    config = config_of(cycles=3, clip=0.25, classifier_cycles=1)
    state, _ = trained((site,), config)
    expected, norms = stage_1(site, config, state.facts["outputs"], 0.25)
    assert min(norms) < 0.25 < max(norms)
    free, _ = stage_1(site, config, state.facts["outputs"], np.inf)
    for name, value in expected.items():
        ours = state.tensors[f"network.{name}"]
        assert torch.allclose(ours, value, rtol=1e-3, atol=1e-4), name
        assert not torch.allclose(ours, free[name], rtol=1e-3, atol=1e-4), name


def test_a_batch_in_parts_equals_the_whole_batch() -> None:
    """Patients count alike: parts of 4 and one of 2 give the weights of batches at
    once."""
    (site,), ends, losses = sites_of(1), [], []
    # the last batch has 6
    coded = [p for p in site.train.patients if p in site.codes][:70]
    site = replace(
        site,
        codes={
            p: site.codes[p] for p in (*coded, *site.valid.patients) if p in site.codes
        },
    )
    for accumulate in (1, 4):
        rounds = list[RoundResult]()
        config = config_of(cycles=3, accumulate=accumulate, classifier_cycles=1)
        state, _ = trained((site,), config, observer=rounds.append)
        ends.append(state.tensors)
        losses.append([r.metrics["loss"] for r in rounds[:3]])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for name, value in ends[0].items():
        if name.startswith("network."):
            assert torch.allclose(ends[1][name], value, rtol=1e-3, atol=1e-4), name


# ---- who may take part


def numbers(site: SitePatients) -> tuple[int, int]:
    """Return the numbers of training patients with codes, and with labels."""
    coded = sum(p in site.codes for p in site.train.patients)
    return coded, int((site.train.labels >= 0).any(axis=1).sum())


@pytest.mark.parametrize("stage", [0, 1])
def test_exactly_the_minimum_number_of_patients_is_enough(stage: int) -> None:
    """Coded ones where vectors are learnt, labelled ones for classifiers of concepts."""
    (site,) = sites_of(1)
    site = relabelled(site, -1, slice(20))
    assert numbers(site)[0] != numbers(site)[1]
    least, make = numbers(site)[stage], (config_of, without_stage_1)[stage]
    config = phenotype.METHOD.configure(make(min_patients=least), (site,))
    assert Site(site, config).num_examples >= least
    more = replace(config, min_patients=least + 1)
    with pytest.raises(ConfigError, match=f"its {least} .* min_patients = {least + 1}"):
        Site(site, more)
    nobody = replace(relabelled(site, -1), codes={})
    assert Site(nobody, more).num_examples == 0  # it tells nothing
    for site_config in phenotype.METHOD.configure_alone(more, (site,)):
        assert Site(site, site_config).num_examples >= least
    together, settings = phenotype.METHOD.configure_pooled(more, (site,), None)
    assert Site(together[0], settings).num_examples >= least


def test_vectors_need_no_minimum_number_of_patients() -> None:
    """Classifiers of an encoder's vectors need no least number."""
    cohort = patients("v", 20, 1)
    values = Vectors(np.random.default_rng(0).normal(size=(20, 5)))
    cohort = replace(cohort, bags=values)
    none = cohort.take([])
    site = SitePatients("v", FeatureSpace(5, dense=True), cohort, none, none, {})
    config = phenotype.METHOD.configure(without_stage_1(min_patients=1000), (site,))
    assert Site(site, config).num_examples == numbers(site)[1]


def test_a_model_of_another_dictionary_is_refused(tmp_path: Path) -> None:
    """Of as many concepts; the same model is taken where the fingerprint is the same."""
    sites = sites_of(2)
    trained(sites, config_of(classifier_cycles=1), tmp_path)
    later = config_of(model=PhenotypeConfig(representation=str(tmp_path / "model")))
    other_space = replace(SPACE, recipe={"fingerprint": "another sixty"})
    with pytest.raises(ConfigError, match="with a different dictionary or encoder"):
        trained(tuple(replace(site, space=other_space) for site in sites), later)
    trained(sites, later)


# ---- patients and sites with nothing


def without_concepts(site: SitePatients, share: int) -> SitePatients:
    """Return a site whose every `share`-th training patient has no concepts."""
    bags = [
        [] if row % share == 0 else site.train.bags.take([row]).concepts.tolist()
        for row in range(len(site.train))
    ]
    changed_bags = type(site.train.bags).from_lists(bags, VOCABULARY)
    return replace(site, train=replace(site.train, bags=changed_bags))


@pytest.mark.parametrize("updates", ["rows", "dense"])
@pytest.mark.parametrize("share", [1, 3])
def test_patients_without_concepts_are_trained_on(share: int, updates: Any) -> None:
    """One a batch: vectors that no patient has stay as they were, the outputs' biases
    move."""
    sites = tuple(without_concepts(site, share) for site in sites_of(2))
    network = replace(NETWORK, updates=updates)
    rounds = list[RoundResult]()
    config = config_of(cycles=1, batch_size=1, model=PhenotypeConfig(network=network))
    state, members = trained(sites, config, observer=rounds.append)
    parameters, outputs = network_of(state), len(state.facts["outputs"])
    first = Dan(network, VOCABULARY, outputs, config.seed).trainable()
    seen_concepts = {
        concept
        for site in sites
        for row, patient in enumerate(site.train.patients)
        if patient in site.codes
        for concept in site.train.bags.take([row]).concepts.tolist()
    }
    assert bool(seen_concepts) == (share > 1)
    for concept in range(VOCABULARY):
        same = np.array_equal(
            parameters["embedding"][concept], first["embedding"][concept].tolist()
        )
        assert same == (concept not in seen_concepts)
    assert (parameters["output_bias"] != 0).all()
    assert all(np.isfinite(r.metrics["loss"]) for r in rounds)
    assert all(np.isfinite(m.scores["codes"]["loss"]) for m in members)


def test_patients_without_concepts_count_in_the_frequencies() -> None:
    """A site of them among others adds its patients to the frequencies, and nothing
    else."""
    first, second = sites_of(2)
    sites = first, without_concepts(second, 1)
    state, members = trained(sites, without_stage_1())
    pooled_patients = labelled(pool_sites(sites).train)
    expected = TfidfTransformer().fit(counted(pooled_patients.bags)).idf_
    for member in members:
        idf = classifiers_of(member).model.idf
        assert np.array_equal(idf, expected)
    assert torch.isfinite(state.tensors["svm.weight"]).all()
    assert all("phenotypes" in member.scores for member in members)


def test_a_negative_sum_of_labels_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a secure sum may have, which hides whose number is wrong."""
    count = Site.count_labels

    def count_wrongly(self: Site, tensors: Tensors) -> Update:
        update = count(self, tensors)
        absent = update.tensors["absent"] - 10_000
        return replace(update, tensors={**update.tensors, "absent": absent})

    monkeypatch.setattr(Site, "count_labels", count_wrongly)
    with pytest.raises(TrainingError, match=r"counted -.* with the label 'absent'"):
        trained(sites_of(2), config_of(classifier_cycles=1))


def test_a_site_refuses_negative_weights_of_classes() -> None:
    """With them, it would learn the opposite of its labels."""
    site, _, prepared = calibrated_site()
    weights = torch.ones(len(DISEASES), 2, dtype=torch.float64)
    site.prepare({**prepared, "weights": weights})
    weights[0, 1] = -1.0
    with pytest.raises(RefusedError, match="negative weight of a class"):
        site.prepare({**prepared, "weights": weights})


@pytest.mark.parametrize("wrong", [-1.0, 1000.0])
def test_impossible_document_frequencies_are_refused(
    wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of concepts would be infinite or negative at every site."""
    count = Site.count_labels

    def count_wrongly(self: Site, tensors: Tensors) -> Update:
        update = count(self, tensors)
        frequencies = update.tensors["frequencies"].clone()
        frequencies[0] = wrong
        return replace(update, tensors={**update.tensors, "frequencies": frequencies})

    monkeypatch.setattr(Site, "count_labels", count_wrongly)
    with pytest.raises(TrainingError, match="with each concept"):
        trained(sites_of(1), without_stage_1(classifier_cycles=1))
