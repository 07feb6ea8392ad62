"""Classifiers that are fitted to their end, against SciPy's minimum of the written objective."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from phenotype_patients import DISEASES, sites_of, trained, without_stage_1
from scipy.optimize import minimize

from fednotes.core.errors import ConfigError, MissingExtra
from fednotes.methods import phenotype
from fednotes.patients.classifiers import (
    CHOICES,
    Features,
    LinearSVMs,
    SvmConfig,
    fit,
    loss_of,
)

CONFIG = SvmConfig(loss="log", solver="converged", class_weights="balanced")
WEIGHTS = np.array([[0.7, 2.5], [1.5, 0.4], [1.0, 1.0], [0.5, 3.0]])


def data_of(seed: int, patients: int = 80) -> tuple[np.ndarray, np.ndarray]:
    """Features and labels of two diseases; the second has questionable patients, some have none."""
    rng = np.random.default_rng(seed)
    x = np.maximum(rng.normal(size=(patients, 6)), 0)
    score = x @ rng.normal(size=(6, 2)) + rng.normal(size=(patients, 2))
    labels = (score > 0.3).astype(np.int8)
    labels[score[:, 1] > 1.2, 1] = 2
    labels[rng.random((patients, 2)) < 0.1] = -1
    return x, labels


def machines_of() -> LinearSVMs:
    return LinearSVMs(((0, 1), (0, 1, 2)), 6, CONFIG)


def solved(
    own: LinearSVMs, x: np.ndarray, labels: np.ndarray, weights: np.ndarray | None, C: float
) -> tuple[float, int]:
    nobody = Features.of(x[:0]), labels[:0]
    return fit(own, (Features.of(x), labels), nobody, weights, C)


def minimum(x: np.ndarray, y: np.ndarray, s: np.ndarray, C: float) -> np.ndarray:
    """(7,) w and b of min ½ ‖w‖² + C Σ s log(1 + exp(-y (w·x + b))), by BFGS and its gradient."""

    def objective(both: np.ndarray) -> tuple[float, np.ndarray]:
        w, b = both[:-1], both[-1]
        margin = y * (x @ w + b)
        slope = -C * s * y / (1 + np.exp(margin))
        value = 0.5 * w @ w + C * (s * np.log1p(np.exp(-margin))).sum()
        return value, np.append(w + slope @ x, slope.sum())

    return np.asarray(
        minimize(objective, np.zeros(7), jac=True, method="BFGS", options={"gtol": 1e-9}).x
    )


@pytest.mark.parametrize("C", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_every_machine_is_at_the_minimum(C: float, weights: np.ndarray | None) -> None:
    x, labels = data_of(0)
    machines = machines_of()
    loss, pairs = solved(machines, x, labels, weights, C)
    total = number = 0.0
    for k, (disease, positive) in enumerate(machines.machines):
        own = labels[:, disease]
        rows = own >= 0 if disease else np.isin(own, (0, 1))
        y = np.where(own[rows] == positive, 1.0, -1.0)
        s = np.ones(len(y)) if weights is None else np.where(y > 0, *weights[k][::-1])
        wanted = minimum(x[rows], y, s, C)
        assert np.allclose(machines.weight[:, k], wanted[:-1], rtol=1e-3, atol=1e-4)
        assert machines.intercept[k] == pytest.approx(wanted[-1], rel=1e-3, abs=1e-4)
        margin = y * (x[rows] @ wanted[:-1] + wanted[-1])
        total += float((s * np.log1p(np.exp(-margin))).sum())
        number += len(y)
    assert (loss, pairs) == (pytest.approx(total, rel=1e-4), number)


def test_a_machine_without_both_kinds_of_patients_stays_at_zero() -> None:
    x, labels = data_of(0)
    labels[:, 0] = np.where(labels[:, 0] >= 0, 0, -1)
    machines = machines_of()
    machines.weight[:], machines.intercept[:] = 3.0, 4.0
    solved(machines, x, labels, None, 1.0)
    assert not machines.weight[:, 0].any()
    assert machines.intercept[0] == 0
    assert machines.weight[:, 1].all()


def test_held_out_patients_choose_the_penalty() -> None:
    """The C of the least held-out loss by SciPy's minima; another than 1 and than the bounds."""
    (x, labels), (other, known) = data_of(3, 40), data_of(3, 400)
    x, other = x * 0.02, other * 0.02  # small features ask for a large C
    labels, known = labels[:, :1], known[:, :1]
    losses = []
    for C in CHOICES:
        rows = labels[:, 0] >= 0
        y = np.where(labels[rows, 0] == 1, 1.0, -1.0)
        own = LinearSVMs(((0, 1),), 6, CONFIG)
        own.weight[:, 0], own.intercept[:] = np.split(minimum(x[rows], y, np.ones(len(y)), C), [6])
        losses.append(loss_of(own, Features.of(other), known, None)[0])
    best = CHOICES[int(np.argmin(losses))]
    assert best not in (1.0, CHOICES[0], CHOICES[-1])
    found, wanted, without = (LinearSVMs(((0, 1),), 6, CONFIG) for _ in range(3))
    fit(found, (Features.of(x), labels), (Features.of(other), known), None, 0.0)
    solved(wanted, x, labels, None, best)
    assert np.array_equal(found.weight, wanted.weight)
    solved(without, x, labels, None, 0.0)
    solved(wanted, x, labels, None, 1.0)
    assert np.array_equal(without.weight, wanted.weight)


def test_balanced_weights_at_one_place_are_scikit_learns() -> None:
    """A run's machines are those of LogisticRegression(class_weight="balanced")."""
    from sklearn.feature_extraction.text import TfidfTransformer
    from sklearn.linear_model import LogisticRegression

    (site,) = sites_of(1)
    config = without_stage_1(classifier_cycles=2)
    config = replace(config, model=replace(config.model, classifier=CONFIG))
    state, (member,) = trained((site,), config)
    cohort = site.train.take((site.train.labels >= 0).any(axis=1))
    counts = np.zeros((len(cohort), cohort.bags.vocabulary))
    row, column, count = cohort.bags.counts()
    counts[row, column] = count
    x = TfidfTransformer().fit_transform(counts)
    for k in range(len(DISEASES)):
        rows = cohort.labels[:, k] >= 0
        solver = LogisticRegression(class_weight="balanced", tol=1e-8, max_iter=10_000)
        wanted = solver.fit(x[rows], cohort.labels[rows, k])
        weight = state.tensors["svm.weight"][:, k].numpy()
        assert np.allclose(weight, wanted.coef_[0], rtol=1e-3, atol=1e-4)
    assert 0 < member.scores["phenotypes"]["f1"] <= 1


@pytest.mark.parametrize("C", [1.0, 0.0])
def test_a_run_takes_its_penalty(C: float) -> None:
    """C = 0 is the choice of the validation patients."""
    (site,) = sites_of(1)
    config = without_stage_1(classifier_cycles=1)
    config = replace(config, model=replace(config.model, classifier=replace(CONFIG, C=C)))
    _, (member,) = trained((site,), phenotype.for_sites(config, (site,)))
    told = member._classifiers
    assert told is not None
    wanted = LinearSVMs(told.machines.classes, len(told.machines.weight), CONFIG)
    train, held_out = (told._features, told._train.labels), (told._held_out, told._valid.labels)
    fit(wanted, train, held_out, told._weights, C)
    assert np.array_equal(told.machines.weight, wanted.weight.astype(np.float32))


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    x, labels = data_of(0)
    with pytest.raises(MissingExtra, match=r"scikit-learn.*fednotes\[phenotype\]"):
        solved(machines_of(), x, labels, None, 1.0)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"solver": "converged"}, 'set loss = "log"'),
        ({"C": -1.0}, "C = -1.0: at least 0"),
        ({"C": float("inf")}, "C = inf: expected a number"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        SvmConfig(**settings)
