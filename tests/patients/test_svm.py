"""All diseases' classifiers in one matrix against scikit-learn's, one by one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import optimize, sparse, special
from sklearn.linear_model import SGDClassifier

from fednotes.core.errors import ConfigError, DataError
from fednotes.core.settings import build
from fednotes.core.update import Total, Update
from fednotes.patients.classifiers import (
    Features,
    LinearSVMs,
    SvmConfig,
    classes_of,
    fit_platt,
    platt_sums,
)

CLASSES = ((0, 1), (0, 1, 2), (0, 1), (0, 2))
PATIENTS, WIDTH = 60, 13


def random_features(seed: int = 0) -> np.ndarray:
    """As after a ReLU: many zeros."""
    return np.maximum(np.random.default_rng(seed).normal(size=(PATIENTS, WIDTH)), 0)


def random_labels(seed: int = 1) -> np.ndarray:
    """A sixth of all pairs unlabelled; some with a class that the disease does not have."""
    rng = np.random.default_rng(seed)
    return rng.choice([-1, 0, 0, 1, 1, 2], (PATIENTS, len(CLASSES))).astype(np.int8)


def scikit_learn(
    config: SvmConfig,
    x: np.ndarray | sparse.csr_matrix,
    labels: np.ndarray,
    disease: int,
    orders: list[np.ndarray],
) -> SGDClassifier:
    """One disease alone, on its own labelled patients, an epoch a call."""
    classes = CLASSES[disease]
    model = SGDClassifier(
        loss="hinge" if config.loss == "hinge" else "log_loss",
        penalty=None,
        shuffle=False,
        learning_rate=config.learning_rate,
        eta0=config.eta0,
        power_t=config.power_t,
        alpha=config.alpha,
    )
    given = labels[:, disease]
    if config.class_weights == "balanced":
        numbers = {c: (given == c).sum() for c in classes}
        total = sum(numbers.values())
        model.set_params(class_weight={c: total / len(classes) / n for c, n in numbers.items()})
    for order in orders:
        kept = order[np.isin(given[order], classes)]
        model.partial_fit(x[kept], given[kept], classes=np.array(classes))
    return model


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("class_weights", ["none", "balanced"])
@pytest.mark.parametrize("learning_rate", ["constant", "optimal", "invscaling"])
@pytest.mark.parametrize("loss", ["hinge", "log"])
def test_every_machine_is_scikit_learns(
    loss: str, learning_rate: str, class_weights: str, kind: str
) -> None:
    """Oracle: SGDClassifier(penalty=None, shuffle=False), disease by disease, three epochs."""
    table = {"loss": loss, "learning_rate": learning_rate, "class_weights": class_weights}
    config = build(SvmConfig, table | {"eta0": 0.3, "power_t": 0.25}, "test")
    x, labels = random_features(), random_labels()
    orders = [np.random.default_rng(epoch).permutation(PATIENTS) for epoch in range(3)]
    ours: np.ndarray | Features = x
    if kind == "sparse":
        given = sparse.csr_matrix(x)
        entries = given.data, given.indices.astype(np.int64), given.indptr.astype(np.int64)
        ours = Features(*entries, WIDTH)
    svms = LinearSVMs(CLASSES, WIDTH, config)
    counts = np.stack([(labels == c).sum(0) for c in range(3)], axis=1)
    weights = svms.balanced(counts) if class_weights == "balanced" else None
    for order in orders:
        svms.epoch(ours, labels, order, weights)
    for disease, classes in enumerate(CLASSES):
        given = sparse.csr_matrix(x) if kind == "sparse" else x
        model = scikit_learn(config, given, labels, disease, orders)
        own = [k for k, (d, _) in enumerate(svms.machines) if d == disease]
        np.testing.assert_allclose(svms.weight[:, own].T, model.coef_, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(svms.intercept[own], model.intercept_, rtol=1e-10, atol=1e-10)
        decision = svms.decision(ours)[:, disease]
        wanted = model.decision_function(given)
        shown = decision[:, classes] if len(classes) == 3 else decision[:, classes[1]]
        np.testing.assert_allclose(shown, wanted, rtol=1e-9, atol=1e-9)
        np.testing.assert_array_equal(svms.predict(ours)[:, disease], model.predict(given))
        if loss == "log":
            chances = svms.probabilities(ours)[:, disease][:, classes]
            np.testing.assert_allclose(chances, model.predict_proba(given), atol=1e-9)


def test_losses_are_the_sums_before_each_step() -> None:
    """Oracle: a loop over patients and machines in NumPy, with a step of the hinge loss each."""
    x, labels = random_features(), random_labels()
    svms = LinearSVMs(CLASSES, WIDTH, SvmConfig(learning_rate="constant", eta0=0.1))
    weight, total, pairs = np.zeros((len(svms.machines), WIDTH + 1)), 0.0, 0
    for row, target in zip(np.c_[x, np.ones(PATIENTS)], svms.targets(labels), strict=True):
        for k, y in enumerate(target):
            if y:
                margin, pairs = float(y * weight[k] @ row), pairs + 1
                total += max(0, 1 - margin)
                weight[k] += 0.1 * y * row * (margin <= 1)
    assert svms.epoch(x, labels) == (pytest.approx(total), pairs)
    np.testing.assert_allclose(svms.weight.T, weight[:, :-1], atol=1e-12)
    assert svms.steps.tolist() == np.count_nonzero(svms.targets(labels), axis=0).tolist()


def test_diseases_without_choice() -> None:
    """Oracle: the definition: one class is predicted always, none never, unseen ones from zero."""
    classes = ((1,), (), (0, 1), (0, 1, 2))
    svms = LinearSVMs(classes, WIDTH)
    x = random_features()
    labels = np.full((PATIENTS, 4), -1, np.int8)
    labels[:, 0] = 1
    loss, pairs = svms.epoch(x, labels)
    assert (loss, pairs) == (0.0, 0)
    assert svms.machines == ((2, 1), (3, 0), (3, 1), (3, 2))
    assert not svms.weight.any()
    assert np.unique(svms.predict(x), axis=0).tolist() == [[1, -1, 0, 0]]
    wanted = [[0, 1, 0], [0, 0, 0], [0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3]]
    np.testing.assert_allclose(svms.probabilities(x), np.tile(wanted, (PATIENTS, 1, 1)))


def test_a_site_with_one_class_of_a_disease() -> None:
    """Oracle: SGDClassifier told of both classes, fed with one."""
    x, labels = random_features(), random_labels()
    labels[:, 0] = np.where(labels[:, 0] == 1, 1, -1)
    svms = LinearSVMs(CLASSES, WIDTH)
    svms.epoch(x, labels)
    model = scikit_learn(svms.config, x, labels, 0, [np.arange(PATIENTS)])
    np.testing.assert_allclose(svms.weight[:, :1].T, model.coef_, rtol=1e-10)
    assert (svms.predict(x)[:, 0] == 1).all()


def test_no_machine_and_no_patient() -> None:
    """Oracle: shapes."""
    svms = LinearSVMs(((1,),), WIDTH)
    assert svms.epoch(random_features(), np.ones((PATIENTS, 1), np.int8)) == (0.0, 0)
    empty = np.zeros((0, WIDTH))
    assert svms.predict(empty).shape == (0, 1)
    assert LinearSVMs(CLASSES, WIDTH).epoch(empty, np.zeros((0, 4), np.int8)) == (0.0, 0)
    assert LinearSVMs((), WIDTH).probabilities(random_features()).shape == (PATIENTS, 0, 3)


def test_classes_from_counts() -> None:
    """Oracle: Table 1's CAD, Asthma and OSA, and made-up columns."""
    counts = {
        "absent": np.array([265, 596, 606, 50, 0, 0]),
        "present": np.array([391, 86, 99, 30, 7, 0]),
        "questionable": np.array([5, 0, 8, 20, 0, 0]),
    }
    assert classes_of(counts) == ((0, 1), (0, 1), (0, 1), (0, 1, 2), (1,), ())
    assert classes_of(counts, 8) == ((0, 1), (0, 1), (0, 1, 2), (0, 1, 2), (1,), ())
    assert classes_of(counts, 0)[1] == (0, 1)


def test_one_site_is_central_training_to_the_bit() -> None:
    """Oracle: the same epochs without the sum; the tensors share the classifiers' memory."""
    x, labels = random_features(), random_labels()
    central, site = LinearSVMs(CLASSES, WIDTH), LinearSVMs(CLASSES, WIDTH)
    shared = site.sent()
    for _ in range(4):
        central.epoch(x, labels)
        central.take(central.sent())
        site.take(shared)
        site.epoch(x, labels)
        shared = Total.of([Update(site.sent(), weight=41.0)]).mean()
    site.take(shared)
    np.testing.assert_array_equal(site.weight, central.weight)
    np.testing.assert_array_equal(site.intercept, central.intercept)
    assert central.weight.any()
    assert shared["svm.weight"].dtype == torch.float32


def test_average_of_sites_is_numpys() -> None:
    """Oracle: Eq. 1 in NumPy over two sites' matrices."""
    x, labels = random_features(), random_labels()
    sites = [LinearSVMs(CLASSES, WIDTH) for _ in range(2)]
    parts = (slice(0, 20), slice(20, 60))
    for svms, rows in zip(sites, parts, strict=True):
        svms.epoch(x[rows], labels[rows])
    updates = [Update(s.sent(), n) for s, n in zip(sites, (20, 40), strict=True)]
    mean = Total.of(updates).mean()["svm.weight"]
    np.testing.assert_allclose(mean, (sites[0].weight + 2 * sites[1].weight) / 3, rtol=1e-6)


# ---- calibration -----------------------------------------------------------------------------


def platt_by_scipy(scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Platt's problem for one machine by a general minimiser, in the scores' own scale.

    The slope is bounded from below by a tenth of the inverse standard deviation.
    """
    kept = targets != 0
    s, y = scores[kept], targets[kept] > 0
    scale = np.abs(s).max()
    soft = np.where(y, (y.sum() + 1) / (y.sum() + 2), 1 / ((~y).sum() + 2))

    def loss(ab: np.ndarray) -> float:
        z = ab[0] * s / scale + ab[1]
        return float((np.logaddexp(0, z) - soft * z).sum())

    least = (0.1 / s.std() * scale, None)
    options = {"gtol": 1e-9, "ftol": 1e-14}
    found = optimize.minimize(
        loss, (1.0, 0.0), method="L-BFGS-B", bounds=(least, (None, None)), options=options
    ).x
    return np.array([found[0] / scale, found[1]])


@pytest.mark.parametrize("scale", [0.01, 1.0, 1000.0])
def test_platt_scaling_is_scipys_minimum(scale: float) -> None:
    """Oracle: scipy; a noisy, a separated, a one-sided, a misled and an unlabelled machine."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(200, 5))
    targets = np.sign(scores + rng.normal(size=(200, 5))).astype(np.int8)
    targets[:, 1] = np.sign(scores[:, 1] - 0.3)
    targets[:, 2], targets[:, 4] = 1, 0
    targets[:, 3] = np.sign(rng.normal(size=200) - 0.5 * scores[:, 3] - 1)  # against its score
    targets[:50, 0] = 0
    found = fit_platt(lambda ab: platt_sums(ab, scores * scale, targets), 5)
    for k in range(4):
        wanted = platt_by_scipy(scores[:, k] * scale, targets[:, k])
        np.testing.assert_allclose(found[k], wanted, rtol=2e-3, atol=2e-3 / scale)
        assert found[k, 0] > 0  # a higher score is never a lower probability
    assert found[4].tolist() == [1.0, 0.0]


def test_platt_sums_add_over_sites() -> None:
    """Oracle: the fit on all patients together."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(90, 2)) * 5
    targets = np.sign(scores + rng.normal(size=(90, 2)) * 5).astype(np.int8)

    def sums(cuts: list[int]) -> Callable[[np.ndarray], np.ndarray]:
        groups = np.split(np.arange(90), cuts)
        return lambda ab: sum(platt_sums(ab, scores[g], targets[g]) for g in groups)

    np.testing.assert_allclose(fit_platt(sums([20, 21]), 2), fit_platt(sums([]), 2), rtol=1e-8)


def test_calibrated_probabilities() -> None:
    """Oracle: sigmoid(a s + b) in NumPy, scaled over the classes; no warning at huge scores."""
    x, labels = random_features() * 1e4, random_labels()
    svms = LinearSVMs(CLASSES, WIDTH)
    svms.epoch(x, labels)
    assert np.isfinite(svms.probabilities(x)).all()
    platt = np.random.default_rng(0).uniform(1e-8, 1e-7, (len(svms.machines), 2))
    p = special.expit(platt[:, 0] * svms.scores(x) + platt[:, 1])
    found = svms.probabilities(x, platt)
    np.testing.assert_allclose(found[:, 0], np.c_[1 - p[:, 0], p[:, 0], 0 * p[:, 0]])
    np.testing.assert_allclose(found[:, 1], p[:, 1:4] / p[:, 1:4].sum(1, keepdims=True))
    np.testing.assert_allclose(found.sum(2), 1)


def test_errors_name_the_cause() -> None:
    """Oracle: the messages."""
    svms = LinearSVMs(CLASSES, WIDTH)
    with pytest.raises(DataError, match="12 features for classifiers of 13"):
        svms.predict(np.zeros((2, 12)))
    with pytest.raises(DataError, match="2 patients have 3 rows"):
        svms.epoch(np.zeros((2, WIDTH)), np.zeros((3, 4), np.int8))
    with pytest.raises(DataError, match="rows beyond"):
        svms.epoch(np.zeros((2, WIDTH)), np.zeros((2, 4), np.int8), np.array([2]))
    with pytest.raises(DataError, match="matrix of finite numbers"):
        svms.predict(np.full((2, WIDTH), np.nan))
    with pytest.raises(ConfigError, match="each once"):
        LinearSVMs(((0, 3),), WIDTH)
    with pytest.raises(ConfigError, match="eta0 = 0"):
        build(SvmConfig, {"eta0": 0.0}, "job.toml [svm]")
    with pytest.raises(ConfigError, match="power_t"):
        SvmConfig(power_t=-1.0)
