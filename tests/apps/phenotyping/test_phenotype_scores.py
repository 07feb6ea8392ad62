"""How phenotyping is scored: on which patients, over which pairs, by which numbers.

Expected values are NumPy's (the network and the classifiers worked out from the tensors
that a run ended with) and scikit-learn's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from phenotype_patients import (
    DISEASES,
    classifiers_of,
    code_chances,
    code_labels,
    config_of,
    disease_scores,
    network_of,
    relabelled,
    sites_of,
    trained,
    without_stage_1,
)
from sklearn.metrics import brier_score_loss, f1_score, log_loss, roc_auc_score

from fednotes.apps.phenotyping import two_stage as phenotype
from fednotes.apps.phenotyping.classifiers import SvmConfig
from fednotes.apps.phenotyping.cohort import (
    ABSENT,
    PRESENT,
    QUESTIONABLE,
    Cohort,
    SitePatients,
)
from fednotes.apps.phenotyping.dan import DanConfig
from fednotes.apps.phenotyping.phenotyper import PhenotypeConfig
from fednotes.apps.phenotyping.two_stage import Config
from fednotes.core.federation import State
from fednotes.engines.rounds import RoundResult


def pairs(
    state: State, site: SitePatients, cohort: Cohort
) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes' labels and probabilities of the cohort's coded patients."""
    labels = code_labels(cohort, site.codes, state.facts["outputs"])
    known = labels[:, 0] >= 0
    return labels[known], code_chances(network_of(state), cohort)[known]


def areas(labels: np.ndarray, scores: np.ndarray) -> list[float]:
    """Return scikit-learn's AUROC of each column, over its pairs with a label."""
    known = [(labels[:, c] == 0) | (labels[:, c] == 1) for c in range(labels.shape[1])]
    return [roc_auc_score(labels[k, c], scores[k, c]) for c, k in enumerate(known)]


def f1s(labels: np.ndarray, predicted: np.ndarray) -> list[float]:
    """Return the mean of scikit-learn's F1 of absent and present, for each disease."""
    known = labels >= 0
    return [
        f1_score(
            *(labels[k, c], predicted[k, c]),
            average="macro",
            labels=[0, 1],
            zero_division=0.0,
        )
        for c, k in enumerate(known.T)
    ]


# ---- which patients


def test_codes_are_scored_on_the_test_patients() -> None:
    """NumPy's network; scikit-learn's log loss over all pairs and the mean of its
    AUROCs."""
    sites = sites_of(2)
    state, members = trained(sites, config_of(cycles=3, classifier_cycles=1))
    for site, member in zip(sites, members, strict=True):
        labels, chances = pairs(state, site, site.test)
        code_scores = member.scores["codes"]
        assert code_scores["loss"] == pytest.approx(
            log_loss(labels.ravel(), chances.ravel()), rel=1e-5
        )
        several = [
            c for c in range(labels.shape[1]) if 0 < labels[:, c].sum() < len(labels)
        ]
        assert code_scores["outputs"] == len(several) > 2
        expected = np.mean(areas(labels[:, several], chances[:, several]))
        assert code_scores["auroc"] == pytest.approx(expected, rel=1e-6)


def test_phenotypes_are_scored_on_the_test_patients() -> None:
    """NumPy's network and classifiers; scikit-learn's F1 and AUROC, disease by disease."""
    sites = sites_of(2)
    state, members = trained(sites, config_of(cycles=4, classifier_cycles=4))
    for site, member in zip(sites, members, strict=True):
        labels, scores = site.test.labels, disease_scores(state, site.test)
        member_scores, expected = member.scores, f1s(labels, (scores > 0).astype(int))
        assert member_scores["phenotypes"]["f1"] == pytest.approx(
            np.mean(expected), rel=1e-9
        )
        assert member_scores["phenotypes"]["support"] == (labels >= 0).sum()
        for at, (disease, area) in enumerate(
            zip(DISEASES, areas(labels, scores), strict=True)
        ):
            assert member_scores["by_output"][disease]["macro"]["f1"] == pytest.approx(
                expected[at]
            )
            assert member_scores["by_output"][disease]["auroc"][
                "value"
            ] == pytest.approx(area)


def test_held_out_scores_belong_to_the_validation_patients() -> None:
    """The last evaluation of each stage: of all sites' pairs, and of all sites' counts."""
    sites, rounds = sites_of(2), list[RoundResult]()
    state, _ = trained(
        sites, config_of(cycles=2, classifier_cycles=2), observer=rounds.append
    )
    site_pairs = [pairs(state, site, site.valid) for site in sites]
    labels, chances = (
        np.concatenate(each).ravel() for each in zip(*site_pairs, strict=True)
    )
    assert rounds[1].metrics["valid_loss"] == pytest.approx(
        log_loss(labels, chances), rel=1e-5
    )
    labels = np.concatenate([site.valid.labels for site in sites])
    scores = np.concatenate([disease_scores(state, site.valid) for site in sites])
    expected = np.mean(f1s(labels, (scores > 0).astype(int)))
    assert rounds[-1].metrics["valid_f1"] == pytest.approx(expected, rel=1e-9)


def test_no_dropout_applies_in_evaluation() -> None:
    """Half of the dense layer is dropped in training; NumPy's network drops nothing."""
    (site,), rounds = sites_of(1), list[RoundResult]()
    network = DanConfig(embedding=8, hidden=12, dropout=0.5)
    config = config_of(model=PhenotypeConfig(network=network), classifier_cycles=1)
    state, (member,) = trained((site,), config, observer=rounds.append)
    labels, chances = pairs(state, site, site.valid)
    expected = log_loss(labels.ravel(), chances.ravel())
    assert rounds[1].metrics["valid_loss"] == pytest.approx(expected, rel=1e-5)
    learner = member.code_learner
    assert learner is not None
    sent = {n: v.clone() for n, v in learner.get_received_tensors().items()}
    before = learner.evaluate(sent, cycle=1).metrics
    learner.train(sent, cycle=2)  # leaves the network as training does
    assert learner.evaluate(sent, cycle=1).metrics == before
    network_scores = disease_scores(state, site.train)
    classifiers = classifiers_of(member)
    features = classifiers.model.compute_features(site.train.bags)
    assert np.allclose(
        classifiers.svms.score(features), network_scores, rtol=1e-4, atol=1e-5
    )


# ---- probabilities and rankings


def test_the_brier_score_uses_calibrated_probabilities() -> None:
    """scikit-learn's, of sigmoid(a · score + b) by NumPy."""
    sites = sites_of(2)
    state, members = trained(sites, config_of(cycles=3, calibrate=True))
    for site, member in zip(sites, members, strict=True):
        platt = classifiers_of(member).model.platt
        assert platt is not None
        a, b = platt.T
        scores, known = disease_scores(state, site.test), site.test.labels >= 0
        present = site.test.labels[known]
        fitted, plain = (1 / (1 + np.exp(-z)) for z in (a * scores + b, scores))
        expected = brier_score_loss(present, fitted[known])
        assert member.scores["calibration"]["brier"] == pytest.approx(
            expected, rel=1e-4
        )
        assert abs(expected - brier_score_loss(present, plain[known])) > 0.01


def test_scores_that_are_not_probabilities_have_no_brier_score() -> None:
    """The hinge loss without calibration has none, the loss "log" that of
    sigmoid(score)."""
    sites = sites_of(2)
    _, members = trained(sites, config_of(classifier_cycles=1))
    assert all("calibration" not in member.scores for member in members)
    small = config_of().model
    head = replace(small, classifier=SvmConfig("log", "constant", 0.3))
    state, members = trained(sites, config_of(model=head))
    for site, member in zip(sites, members, strict=True):
        known = site.test.labels >= 0
        chances = 1 / (1 + np.exp(-disease_scores(state, site.test)))
        expected = brier_score_loss(site.test.labels[known], chances[known])
        assert member.scores["calibration"]["brier"] == pytest.approx(
            expected, rel=1e-4
        )


@pytest.mark.parametrize("slope", [1e-20, -1.0])
def test_patients_are_ranked_by_raw_scores(slope: float) -> None:
    """scikit-learn's AUROC of the scores, where all probabilities are equal, or fall
    with them."""
    (site,) = sites_of(1)
    state, (member,) = trained((site,), config_of(cycles=3, calibrate=True))
    classifiers_of(member).model.platt = np.tile((slope, 0.0), (len(DISEASES), 1))
    scores = disease_scores(state, site.test)
    expected = np.mean(areas(site.test.labels, scores))
    assert abs(expected - 0.5) > 0.05
    assert member.score_on(site)["ranking"]["auroc"] == pytest.approx(
        expected, rel=1e-9
    )


# ---- which pairs


def alone(config: Config, sites: tuple[SitePatients, ...]) -> dict[str, Any]:
    """Return the scores of the first site, trained alone in a job of all sites."""
    alone_config = phenotype.METHOD.configure_alone(
        phenotype.METHOD.configure(config, sites), sites
    )[0]
    _, (member,) = trained(sites[:1], alone_config)
    return member.scores


def test_a_site_that_never_saw_a_disease_is_scored_on_it() -> None:
    """F1 of calling everybody absent, by scikit-learn: half of a mean of two classes at
    most."""
    first, second = sites_of(2)
    labels = first.train.labels.copy()
    labels[:, 0] = np.minimum(labels[:, 0], ABSENT)
    alone_scores = alone(without_stage_1(), (relabelled(first, labels), second))
    test = first.test.labels[:, [0]]
    (expected,) = f1s(test, np.zeros_like(test))
    assert 0 < expected < 0.5
    assert alone_scores["by_output"]["asthma"]["macro"]["f1"] == pytest.approx(expected)
    assert (
        alone_scores["by_output"]["asthma"]["present"]["support"]
        == (test == PRESENT).sum()
    )


def test_questionable_patients_count_if_the_sites_together_have_the_class() -> None:
    """By hand: a site without any in training, whose model never says so, is judged on
    them."""
    first, second = sites_of(2)
    first = relabelled(first, QUESTIONABLE, slice(9), 2, "test")
    sites, test = (
        (first, relabelled(second, QUESTIONABLE, slice(25), 2)),
        first.test.labels,
    )
    for least, counted in ((25, 9), (26, 0)):
        counts = alone(without_stage_1(least_questionable=least), sites)["class_counts"]
        row = [counts[f"classes/gout/questionable/{p}"] for p in ("absent", "present")]
        assert sum(row) == counted
        assert counts["classes/gout/questionable/questionable"] == 0
        uncounted = (
            sum(v for k, v in counts.items() if k.startswith("classes/gout/")) - counted
        )
        assert uncounted == np.isin(test[:, 2], (ABSENT, PRESENT)).sum()


def test_questionable_is_a_class_only_at_a_site_with_enough_patients() -> None:
    """Its own test patients count too, whatever the job's list says."""
    (site,) = sites_of(1)
    changed = relabelled(site, QUESTIONABLE, slice(25), 2)
    changed = relabelled(changed, QUESTIONABLE, slice(9), 2, "test")
    config = phenotype.METHOD.configure(without_stage_1(), (changed,))
    assert config.questionable == ("gout",)
    _, (member,) = trained((changed,), replace(config, questionable=()))
    counts = member.scores["class_counts"]
    assert (
        sum(v for k, v in counts.items() if k.startswith("classes/gout/questionable/"))
        == 9
    )


def test_a_disease_with_one_class_is_left_out_of_the_mean() -> None:
    """The mean of scikit-learn's F1 of the other two; none at all where no disease has
    two."""
    (site,) = sites_of(1)
    changed = relabelled(site, PRESENT, column=1, part="test")
    labels = changed.test.labels
    state, (member,) = trained((changed,), config_of())
    predicted = (disease_scores(state, site.test) > 0).astype(int)
    expected = f1s(labels[:, [0, 2]], predicted[:, [0, 2]])
    assert member.scores["phenotypes"]["f1"] == pytest.approx(
        np.mean(expected), rel=1e-9
    )
    assert member.scores["by_output"].keys() == {"asthma", "gout"}
    assert {k.split("/")[1] for k in member.scores["class_counts"]} == {
        "asthma",
        "gout",
    }
    scores = member.score_on(relabelled(site, PRESENT, part="test"))
    assert "phenotypes" not in scores
    assert "present" not in scores
    assert scores["ranking"]["auroc"] is None


def test_a_site_without_labelled_test_patients_has_no_score() -> None:
    """Nor has it one of codes where no test patient was coded."""
    (site,) = sites_of(1)
    _, (member,) = trained((site,), config_of(classifier_cycles=1))
    silent = relabelled(site, -1, part="test")
    assert member.score_on(silent).keys() == {"codes"}
    assert member.score_on(replace(silent, codes={})) == {}
