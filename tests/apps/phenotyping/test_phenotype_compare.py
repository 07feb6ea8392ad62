"""Comparison of two phenotyping models with classifiers set by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from phenotype_patients import DISEASES, SPACE, VOCABULARY, sites_of
from sklearn.metrics import f1_score, roc_auc_score

from fednotes.apps.phenotyping.classifiers import LinearSVMs
from fednotes.apps.phenotyping.cohort import Bags, Cohort, SitePatients
from fednotes.apps.phenotyping.compare_patients import ALL_SITES, compare_patients
from fednotes.apps.phenotyping.phenotyper import Phenotyper
from fednotes.core.errors import DataError
from fednotes.jobs.job import Job, Side
from fednotes.metrics.paired_tests import Bootstrap, bootstrap_patients


def side(run: Path, sites: Sequence[SitePatients], condition: str) -> Side:
    """Return one side of a comparison; its job is not read."""
    return Side(run, job=cast(Job, None), sites=tuple(sites), condition=condition)


def compared(
    a: Side, b: Side, samples: int, metric: str = "strict"
) -> dict[str, Bootstrap]:
    """Return the test of each site, after checking that it tests the sides' F1."""
    tests = compare_patients(a, b, samples, metric)
    for each in tests.values():
        if each.scores is not None:
            first, second = each.scores
            assert first["f1"] == pytest.approx(each.test.f1_a)
            assert second["f1"] == pytest.approx(each.test.f1_b)
    return {site: each.test for site, each in tests.items()}


def save_model(folder: Path, columns: dict[int, int]) -> None:
    """Save a model that finds disease d by ten concepts from `columns[d]` on."""
    svms = LinearSVMs([(0, 1)] * len(DISEASES), VOCABULARY)
    for disease, block in columns.items():
        svms.weight[block : block + 10, disease] = 10
    svms.intercept[:] = -0.5
    idf = np.ones(VOCABULARY)
    Phenotyper(SPACE, idf=idf, phenotypes=DISEASES, svms=svms).save(folder)


GOOD, POOR = {0: 0, 1: 10, 2: 20}, {0: 0, 1: 10}


def shares(cohort: Cohort, columns: dict[int, int]) -> np.ndarray:
    """Return the (patients, diseases) shares that such a model counts, by a loop."""
    out = np.zeros((len(cohort), 3))
    assert isinstance(cohort.bags, Bags)
    for row in range(len(cohort)):
        concepts = cohort.bags.take([row]).concepts
        length = np.linalg.norm(np.bincount(concepts, minlength=VOCABULARY)) or 1.0
        for disease, block in columns.items():
            out[row, disease] = (concepts // 10 * 10 == block).sum() / length
    return out


def predict_labels(cohort: Cohort, columns: dict[int, int]) -> np.ndarray:
    """Return the labels that a model of these columns predicts for a cohort."""
    return (10 * shares(cohort, columns) > 0.5).astype(np.int8)


def macro(labels: np.ndarray, predicted: np.ndarray) -> float:
    each = []
    for column in range(labels.shape[1]):
        known = labels[:, column] >= 0
        each.append(
            f1_score(labels[known, column], predicted[known, column], average="macro")
        )
    return float(np.mean(each))


def test_each_site_is_compared_on_its_own_patients(tmp_path: Path) -> None:
    """Oracle: scikit-learn's macro F1 of what a loop over patients finds."""
    sites = sites_of(2)
    save_model(tmp_path / "run/federated/model", GOOD)
    for site in sites:
        save_model(tmp_path / f"run/alone/{site.id}/model", POOR)
    run = tmp_path / "run"
    tests = compared(side(run, sites, "federated"), side(run, sites, "alone"), 100)
    assert list(tests) == [site.id for site in sites]
    for site in sites:
        test, labels = tests[site.id], site.test.labels
        assert test.f1_a == pytest.approx(
            macro(labels, predict_labels(site.test, GOOD))
        )
        assert test.f1_b == pytest.approx(
            macro(labels, predict_labels(site.test, POOR))
        )
        assert test.difference == pytest.approx(test.f1_a - test.f1_b)


def test_shared_test_patients_are_compared_once(tmp_path: Path) -> None:
    """One model per side gives one row; one per site adds the mean of the macro F1s."""
    first, second = sites_of(2)
    sites, run = (first, replace(second, test=first.test)), tmp_path / "run"
    save_model(run / "federated/model", GOOD)
    save_model(run / "pooled/sites/pooled/model", POOR)
    save_model(run / "alone/s0/sites/s0/model", POOR)
    save_model(run / "alone/s1/model", {0: 0})
    once = compared(side(run, sites, "federated"), side(run, sites, "pooled"), 100)
    test = sites[0].test
    assert list(once) == [ALL_SITES]
    known = (test.labels >= 0).any(axis=1)
    assert once[ALL_SITES] == bootstrap_patients(
        test.labels[known],
        predict_labels(test, GOOD)[known],
        predict_labels(test, POOR)[known],
        samples=100,
    )
    each = compared(side(run, sites, "federated"), side(run, sites, "alone"), 100)
    assert list(each) == ["s0", "s1", ALL_SITES]
    assert each[ALL_SITES].f1_b == pytest.approx(
        (each["s0"].f1_b + each["s1"].f1_b) / 2
    )
    assert each[ALL_SITES].f1_a == pytest.approx(each["s0"].f1_a)


def test_runs_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    sites, run = sites_of(2), tmp_path / "run"
    with pytest.raises(DataError, match="has no federated model of site 's0'"):
        compared(side(run, sites, "federated"), side(run, sites, "federated"), 10)
    save_model(run / "federated/model", GOOD)
    mine = side(run, sites, "federated")
    with pytest.raises(
        DataError, match="same test patients, labels and phenotypes at site 's0'"
    ):
        compared(mine, side(run, sites[1:], "federated"), 10)
    relabelled_site = replace(
        sites[0], test=replace(sites[0].test, labels=np.abs(sites[0].test.labels))
    )
    with pytest.raises(DataError, match="at site 's0'"):
        compared(mine, side(run, (relabelled_site, sites[1]), "federated"), 10)
    Phenotyper(SPACE, idf=np.ones(VOCABULARY)).save(run / "pooled/model")
    with pytest.raises(DataError, match="predicts codes and no phenotypes"):
        compared(mine, side(run, sites, "pooled"), 10)
    bare = tuple(replace(site, test=site.test.take([])) for site in sites)
    with pytest.raises(DataError, match="no test patient is labelled"):
        compared(side(run, bare, "federated"), side(run, bare, "federated"), 10)


def test_rankings_are_compared_by_their_areas(tmp_path: Path) -> None:
    """Oracle: scikit-learn's area under the curve of the share of a disease's concepts."""
    (site,) = sites_of(1)
    save_model(tmp_path / "good" / "federated" / "model", GOOD)
    save_model(tmp_path / "poor" / "federated" / "model", POOR)
    tests = compared(
        side(tmp_path / "good", (site,), "federated"),
        side(tmp_path / "poor", (site,), "federated"),
        50,
        "auroc",
    )[site.id]

    def area(columns: dict[int, int]) -> float:
        labels, scores, each = site.test.labels, shares(site.test, columns), []
        for d in range(len(DISEASES)):
            known = labels[:, d] >= 0
            each.append(roc_auc_score(labels[known, d], scores[known, d]))
        return float(np.mean(each))

    # The last bit of a sum breaks ties here that it does not break there: half a pair
    # each.
    assert (tests.f1_a, tests.f1_b) == pytest.approx((area(GOOD), area(POOR)), abs=2e-3)
    assert tests.difference > 0.05
