"""Classifiers of all diseases in one matrix, compared with scikit-learn and SciPy.

Those trained to convergence are compared with SciPy's minimum of the written objective,
TF-IDF with scikit-learn's.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from phenotype_patients import (
    DISEASES,
    classifiers_of,
    counted,
    labelled,
    sites_of,
    trained,
    without_stage_1,
)
from scipy import optimize, sparse, special
from sklearn.feature_extraction.text import TfidfTransformer
from sklearn.linear_model import LogisticRegression, SGDClassifier

from fednotes.apps.phenotyping import two_stage as phenotype
from fednotes.apps.phenotyping.classifiers import (
    C_CHOICES,
    Features,
    LabelledFeatures,
    LinearSVMs,
    SvmConfig,
    agree_on_classes,
    compute_idf,
    compute_tfidf,
    count_document_frequencies,
    measure_logistic_loss,
    train_to_convergence,
)
from fednotes.apps.phenotyping.cohort import Bags
from fednotes.core.errors import ConfigError, DataError, MissingExtra
from fednotes.core.settings import build
from fednotes.metrics.platt import compute_platt_sums, fit_platt

CLASSES = ((0, 1), (0, 1, 2), (0, 1), (0, 2))
PATIENTS, WIDTH = 60, 13


def random_features(seed: int = 0) -> np.ndarray:
    """Return features as after a ReLU, with many zeros."""
    return np.maximum(np.random.default_rng(seed).normal(size=(PATIENTS, WIDTH)), 0)


def epoch(svms: LinearSVMs, x: np.ndarray, labels: np.ndarray) -> tuple[float, int]:
    """In the patients' own order."""
    return svms.train_epoch(Features.from_dense(x), labels, np.arange(len(x)))


def random_labels(seed: int = 1) -> np.ndarray:
    """Return labels of which a sixth is missing; some are of a class the disease
    lacks."""
    rng = np.random.default_rng(seed)
    return rng.choice([-1, 0, 0, 1, 1, 2], (PATIENTS, len(CLASSES))).astype(np.int8)


def scikit_learn(
    config: SvmConfig,
    x: np.ndarray | sparse.csr_matrix,
    labels: np.ndarray,
    disease: int,
    orders: list[np.ndarray],
) -> SGDClassifier:
    """Train one disease on its labelled patients, an epoch a call."""
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
    disease_labels = labels[:, disease]
    if config.class_weights == "balanced":
        numbers = {c: (disease_labels == c).sum() for c in classes}
        total = sum(numbers.values())
        model.set_params(
            class_weight={c: total / len(classes) / n for c, n in numbers.items()}
        )
    for order in orders:
        labelled_order = order[np.isin(disease_labels[order], classes)]
        model.partial_fit(
            x[labelled_order], disease_labels[labelled_order], classes=np.array(classes)
        )
    return model


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("class_weights", ["none", "balanced"])
@pytest.mark.parametrize("learning_rate", ["constant", "optimal", "invscaling"])
@pytest.mark.parametrize("loss", ["hinge", "log"])
def test_every_classifier_equals_scikit_learn(
    loss: str, learning_rate: str, class_weights: str, kind: str
) -> None:
    """Oracle: SGDClassifier(penalty=None, shuffle=False), disease by disease, three
    epochs."""
    table = {
        "loss": loss,
        "learning_rate": learning_rate,
        "class_weights": class_weights,
    }
    config = build(SvmConfig, table | {"eta0": 0.3, "power_t": 0.25}, "test")
    x, labels = random_features(), random_labels()
    orders = [np.random.default_rng(epoch).permutation(PATIENTS) for epoch in range(3)]
    ours = Features.from_dense(x)
    if kind == "sparse":
        features = sparse.csr_matrix(x)
        entries = (
            features.data,
            features.indices.astype(np.int64),
            features.indptr.astype(np.int64),
        )
        ours = Features(*entries, WIDTH)
    svms = LinearSVMs(CLASSES, WIDTH, config)
    counts = np.stack([(labels == c).sum(0) for c in range(3)], axis=1)
    weights = (
        svms.compute_class_weights(counts) if class_weights == "balanced" else None
    )
    for order in orders:
        svms.train_epoch(ours, labels, order, weights)
    for disease, classes in enumerate(CLASSES):
        features = sparse.csr_matrix(x) if kind == "sparse" else x
        model = scikit_learn(config, features, labels, disease, orders)
        own_columns = [k for k, (d, _) in enumerate(svms.classifiers) if d == disease]
        np.testing.assert_allclose(
            svms.weight[:, own_columns].T, model.coef_, rtol=1e-10, atol=1e-10
        )
        np.testing.assert_allclose(
            svms.intercept[own_columns], model.intercept_, rtol=1e-10, atol=1e-10
        )
        decision = svms.score_classes(ours)[:, disease]
        expected = model.decision_function(features)
        actual = decision[:, classes] if len(classes) == 3 else decision[:, classes[1]]
        np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)
        np.testing.assert_array_equal(
            svms.predict(ours)[:, disease], model.predict(features)
        )
        if loss == "log":
            chances = svms.predict_probabilities(ours)[:, disease][:, classes]
            np.testing.assert_allclose(
                chances, model.predict_proba(features), atol=1e-9
            )


def test_losses_are_summed_before_each_step() -> None:
    """Oracle: a loop over patients and classifiers in NumPy, with a step of the hinge loss
    each."""
    x, labels = random_features(), random_labels()
    svms = LinearSVMs(CLASSES, WIDTH, SvmConfig(learning_rate="constant", eta0=0.1))
    weight, total, pairs = np.zeros((len(svms.classifiers), WIDTH + 1)), 0.0, 0
    for row, target in zip(
        np.c_[x, np.ones(PATIENTS)], svms.make_targets(labels), strict=True
    ):
        for k, y in enumerate(target):
            if y:
                margin, pairs = float(y * weight[k] @ row), pairs + 1
                total += max(0, 1 - margin)
                weight[k] += 0.1 * y * row * (margin <= 1)
    assert epoch(svms, x, labels) == (pytest.approx(total), pairs)
    np.testing.assert_allclose(svms.weight.T, weight[:, :-1], atol=1e-12)
    assert (
        svms.steps.tolist()
        == np.count_nonzero(svms.make_targets(labels), axis=0).tolist()
    )


def test_diseases_with_fewer_than_two_classes_need_no_classifier() -> None:
    """Oracle: the definition: one class is predicted always, none never, unseen ones
    from zero."""
    classes = ((1,), (), (0, 1), (0, 1, 2))
    svms = LinearSVMs(classes, WIDTH)
    x = random_features()
    labels = np.full((PATIENTS, 4), -1, np.int8)
    labels[:, 0] = 1
    loss, pairs = epoch(svms, x, labels)
    assert (loss, pairs) == (0.0, 0)
    assert svms.classifiers == ((2, 1), (3, 0), (3, 1), (3, 2))
    assert not svms.weight.any()
    assert np.unique(svms.predict(Features.from_dense(x)), axis=0).tolist() == [
        [1, -1, 0, 0]
    ]
    expected = [[0, 1, 0], [0, 0, 0], [0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3]]
    np.testing.assert_allclose(
        svms.predict_probabilities(Features.from_dense(x)),
        np.tile(expected, (PATIENTS, 1, 1)),
    )


def test_a_site_with_one_class_of_a_disease_trains_like_scikit_learn() -> None:
    """Oracle: SGDClassifier told of both classes, fed with one."""
    x, labels = random_features(), random_labels()
    labels[:, 0] = np.where(labels[:, 0] == 1, 1, -1)
    svms = LinearSVMs(CLASSES, WIDTH)
    epoch(svms, x, labels)
    model = scikit_learn(svms.config, x, labels, 0, [np.arange(PATIENTS)])
    np.testing.assert_allclose(svms.weight[:, :1].T, model.coef_, rtol=1e-10)
    assert (svms.predict(Features.from_dense(x))[:, 0] == 1).all()


def test_no_classifiers_and_no_patients_are_accepted() -> None:
    """Oracle: shapes."""
    svms = LinearSVMs(((1,),), WIDTH)
    assert epoch(svms, random_features(), np.ones((PATIENTS, 1), np.int8)) == (0.0, 0)
    empty = np.zeros((0, WIDTH))
    assert svms.predict(Features.from_dense(empty)).shape == (0, 1)
    assert epoch(LinearSVMs(CLASSES, WIDTH), empty, np.zeros((0, 4), np.int8)) == (
        0.0,
        0,
    )
    assert LinearSVMs((), WIDTH).predict_probabilities(
        Features.from_dense(random_features())
    ).shape == (
        PATIENTS,
        0,
        3,
    )


def test_classes_follow_from_the_counts_of_sites() -> None:
    """Oracle: Table 1's CAD, Asthma and OSA, and made-up columns."""
    counts = {
        "absent": np.array([265, 596, 606, 50, 0, 0]),
        "present": np.array([391, 86, 99, 30, 7, 0]),
        "questionable": np.array([5, 0, 8, 20, 0, 0]),
    }
    assert agree_on_classes(counts) == ((0, 1), (0, 1), (0, 1), (0, 1, 2), (1,), ())
    assert agree_on_classes(counts, 8) == (
        (0, 1),
        (0, 1),
        (0, 1, 2),
        (0, 1, 2),
        (1,),
        (),
    )
    assert agree_on_classes(counts, 0)[1] == (0, 1)


# ---- calibration ---------------------------------------------------------------------


def platt_by_scipy(scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Platt's problem for one classifier by a general minimiser, in the scores' own scale.

    The slope is bounded from below by a tenth of the inverse standard deviation.
    """
    has_target = targets != 0
    s, y = scores[has_target], targets[has_target] > 0
    scale = np.abs(s).max()
    soft = np.where(y, (y.sum() + 1) / (y.sum() + 2), 1 / ((~y).sum() + 2))

    def loss(ab: np.ndarray) -> float:
        z = ab[0] * s / scale + ab[1]
        return float((np.logaddexp(0, z) - soft * z).sum())

    least = (0.1 / s.std() * scale, None)
    options = {"gtol": 1e-9, "ftol": 1e-14}
    solution = optimize.minimize(
        loss,
        (1.0, 0.0),
        method="L-BFGS-B",
        bounds=(least, (None, None)),
        options=options,
    ).x
    return np.array([solution[0] / scale, solution[1]])


@pytest.mark.parametrize("scale", [0.01, 1.0, 1000.0])
def test_platt_scaling_equals_the_minimum_of_scipy(scale: float) -> None:
    """Oracle: scipy; a noisy, a separated, a one-sided, a misled and an unlabelled
    classifier."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(200, 5))
    targets = np.sign(scores + rng.normal(size=(200, 5))).astype(np.int8)
    targets[:, 1] = np.sign(scores[:, 1] - 0.3)
    targets[:, 2], targets[:, 4] = 1, 0
    # against its score
    targets[:, 3] = np.sign(rng.normal(size=200) - 0.5 * scores[:, 3] - 1)
    targets[:50, 0] = 0
    fitted = fit_platt(lambda ab: compute_platt_sums(ab, scores * scale, targets), 5)
    for k in range(4):
        expected = platt_by_scipy(scores[:, k] * scale, targets[:, k])
        np.testing.assert_allclose(fitted[k], expected, rtol=2e-3, atol=2e-3 / scale)
        assert fitted[k, 0] > 0  # a higher score is never a lower probability
    assert fitted[4].tolist() == [1.0, 0.0]


def test_calibrated_probabilities_equal_the_sigmoid_and_are_finite() -> None:
    """Oracle: sigmoid(a s + b) in NumPy, scaled over the classes; no warning at huge
    scores."""
    x, labels = random_features() * 1e4, random_labels()
    svms = LinearSVMs(CLASSES, WIDTH)
    epoch(svms, x, labels)
    assert np.isfinite(svms.predict_probabilities(Features.from_dense(x))).all()
    platt = np.random.default_rng(0).uniform(1e-8, 1e-7, (len(svms.classifiers), 2))
    p = special.expit(platt[:, 0] * svms.score(Features.from_dense(x)) + platt[:, 1])
    probabilities = svms.predict_probabilities(Features.from_dense(x), platt)
    np.testing.assert_allclose(
        probabilities[:, 0], np.c_[1 - p[:, 0], p[:, 0], 0 * p[:, 0]]
    )
    np.testing.assert_allclose(
        probabilities[:, 1], p[:, 1:4] / p[:, 1:4].sum(1, keepdims=True)
    )
    np.testing.assert_allclose(probabilities.sum(2), 1)


def test_errors_name_their_cause() -> None:
    """Oracle: the messages."""
    svms, two = LinearSVMs(CLASSES, WIDTH), Features.from_dense(np.zeros((2, WIDTH)))
    labels = np.zeros((3, 4), np.int8)
    for error, message, wrong in (
        (
            DataError,
            "have 12 features, but the classifiers were trained on 13",
            lambda: svms.predict(NARROW),
        ),
        (
            DataError,
            "2 patients have 3 rows",
            lambda: svms.train_epoch(two, labels, np.arange(2)),
        ),
        (
            DataError,
            "rows beyond",
            lambda: svms.train_epoch(two, labels[:2], np.array([2])),
        ),
        (
            DataError,
            "matrix of finite numbers",
            lambda: Features.from_dense(np.full((2, 3), np.nan)),
        ),
        (ConfigError, "each once", lambda: LinearSVMs(((0, 3),), WIDTH)),
        (
            ConfigError,
            "eta0 = 0",
            lambda: build(SvmConfig, {"eta0": 0.0}, "job.toml [svm]"),
        ),
        (ConfigError, "power_t", lambda: SvmConfig(power_t=-1.0)),
        (ConfigError, 'set loss = "log"', lambda: SvmConfig(solver="converged")),
        (ConfigError, "C = -1.0: expected at least 0", lambda: SvmConfig(C=-1.0)),
        (ConfigError, "C = inf: expected a number", lambda: SvmConfig(C=float("inf"))),
        (
            DataError,
            "dictionary of 25 concepts, but the model was trained with one of 24",
            lambda: compute_tfidf(bags(1), np.ones(24)),
        ),
        (
            DataError,
            "not a finite number",
            lambda: compute_tfidf(bags(1), np.full(25, np.nan)),
        ),
        (
            DataError,
            "not a finite number",
            lambda: compute_tfidf(bags(1), np.full(25, np.inf)),
        ),
        (
            DataError,
            "not a finite number",
            lambda: compute_tfidf(bags(1), np.zeros(25)),
        ),
    ):
        with pytest.raises(error, match=message):
            wrong()


NARROW = Features.from_dense(np.zeros((2, 12)))


# ---- fitted to the end ---------------------------------------------------------------

CONVERGED = SvmConfig(loss="log", solver="converged", class_weights="balanced")
WEIGHTS = np.array([[0.7, 2.5], [1.5, 0.4], [1.0, 1.0], [0.5, 3.0]])


def draw_patients(seed: int, patients: int = 80) -> tuple[np.ndarray, np.ndarray]:
    """Return features and labels of two diseases, the second with questionable
    patients."""
    rng = np.random.default_rng(seed)
    x = np.maximum(rng.normal(size=(patients, 6)), 0)
    score = x @ rng.normal(size=(6, 2)) + rng.normal(size=(patients, 2))
    labels = (score > 0.3).astype(np.int8)
    labels[score[:, 1] > 1.2, 1] = 2
    labels[rng.random((patients, 2)) < 0.1] = -1
    return x, labels


def svms_of() -> LinearSVMs:
    return LinearSVMs(((0, 1), (0, 1, 2)), 6, CONVERGED)


def solved(
    svms: LinearSVMs,
    x: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray | None,
    C: float,
) -> tuple[float, int]:
    patients = LabelledFeatures(Features.from_dense(x), labels)
    nobody = LabelledFeatures(Features.from_dense(x[:0]), labels[:0])
    return train_to_convergence(svms, patients, nobody, weights=weights, C=C)


def minimum(x: np.ndarray, y: np.ndarray, s: np.ndarray, C: float) -> np.ndarray:
    """Return (7,) w and b of min ½ ‖w‖² + C Σ s log(1 + exp(-y (w·x + b))), by BFGS."""

    def objective(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        w, b = parameters[:-1], parameters[-1]
        margin = y * (x @ w + b)
        slope = -C * s * y / (1 + np.exp(margin))
        value = 0.5 * w @ w + C * (s * np.log1p(np.exp(-margin))).sum()
        return value, np.append(w + slope @ x, slope.sum())

    options = {"gtol": 1e-9}
    solution = optimize.minimize(
        objective, np.zeros(7), jac=True, method="BFGS", options=options
    )
    return np.asarray(solution.x)


@pytest.mark.parametrize("C", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_every_converged_classifier_is_at_the_minimum(
    C: float, weights: np.ndarray | None
) -> None:
    x, labels = draw_patients(0)
    svms = svms_of()
    loss, pairs = solved(svms, x, labels, weights, C)
    total = number = 0.0
    for k, (disease, positive) in enumerate(svms.classifiers):
        disease_labels = labels[:, disease]
        rows = disease_labels >= 0 if disease else np.isin(disease_labels, (0, 1))
        y = np.where(disease_labels[rows] == positive, 1.0, -1.0)
        s = np.ones(len(y)) if weights is None else np.where(y > 0, *weights[k][::-1])
        solution = minimum(x[rows], y, s, C)
        assert np.allclose(svms.weight[:, k], solution[:-1], rtol=1e-3, atol=1e-4)
        assert svms.intercept[k] == pytest.approx(solution[-1], rel=1e-3, abs=1e-4)
        margin = y * (x[rows] @ solution[:-1] + solution[-1])
        total += float((s * np.log1p(np.exp(-margin))).sum())
        number += len(y)
    assert (loss, pairs) == (pytest.approx(total, rel=1e-4), number)


def test_a_classifier_without_both_classes_stays_at_zero() -> None:
    x, labels = draw_patients(0)
    labels[:, 0] = np.where(labels[:, 0] >= 0, 0, -1)
    svms = svms_of()
    svms.weight[:], svms.intercept[:] = 3.0, 4.0
    solved(svms, x, labels, None, 1.0)
    assert not svms.weight[:, 0].any()
    assert svms.intercept[0] == 0
    assert svms.weight[:, 1].all()


def test_held_out_patients_choose_the_penalty() -> None:
    """The C of the least held-out loss by SciPy's minima; another than 1 and than the
    bounds."""
    (x, labels), (held_out_features, known) = (
        draw_patients(3, 40),
        draw_patients(3, 400),
    )
    x, held_out_features = (
        x * 0.02,
        held_out_features * 0.02,
    )  # small features ask for a large C
    labels, known = labels[:, :1], known[:, :1]
    losses = []
    for C in C_CHOICES:
        rows = labels[:, 0] >= 0
        y = np.where(labels[rows, 0] == 1, 1.0, -1.0)
        candidate = LinearSVMs(((0, 1),), 6, CONVERGED)
        candidate.weight[:, 0], candidate.intercept[:] = np.split(
            minimum(x[rows], y, np.ones(len(y)), C), [6]
        )
        losses.append(
            measure_logistic_loss(
                candidate,
                LabelledFeatures(Features.from_dense(held_out_features), known),
                None,
            )[0]
        )
    best = C_CHOICES[int(np.argmin(losses))]
    assert best not in (1.0, C_CHOICES[0], C_CHOICES[-1])
    chosen, expected, without = (LinearSVMs(((0, 1),), 6, CONVERGED) for _ in range(3))
    train = LabelledFeatures(Features.from_dense(x), labels)
    held_out = LabelledFeatures(Features.from_dense(held_out_features), known)
    train_to_convergence(chosen, train, held_out, weights=None, C=0.0)
    solved(expected, x, labels, None, best)
    assert np.array_equal(chosen.weight, expected.weight)
    solved(without, x, labels, None, 0.0)
    solved(expected, x, labels, None, 1.0)
    assert np.array_equal(without.weight, expected.weight)


def test_balanced_weights_in_one_place_equal_scikit_learn() -> None:
    """A run's classifiers are those of LogisticRegression(class_weight="balanced")."""
    (site,) = sites_of(1)
    config = without_stage_1(classifier_cycles=2)
    config = replace(config, model=replace(config.model, classifier=CONVERGED))
    state, (member,) = trained((site,), config)
    cohort = labelled(site.train)
    x = TfidfTransformer().fit_transform(counted(cohort.bags))
    for k in range(len(DISEASES)):
        rows = cohort.labels[:, k] >= 0
        solver = LogisticRegression(class_weight="balanced", tol=1e-8, max_iter=10_000)
        solution = solver.fit(x[rows], cohort.labels[rows, k])
        weight = state.tensors["svm.weight"][:, k].numpy()
        assert np.allclose(weight, solution.coef_[0], rtol=1e-3, atol=1e-4)
    assert 0 < member.scores["phenotypes"]["f1"] <= 1


@pytest.mark.parametrize("C", [1.0, 0.0])
def test_a_run_uses_its_penalty(C: float) -> None:
    """C = 0 is the choice of the validation patients."""
    (site,) = sites_of(1)
    config = without_stage_1(classifier_cycles=1)
    config = replace(
        config, model=replace(config.model, classifier=replace(CONVERGED, C=C))
    )
    _, (member,) = trained((site,), phenotype.METHOD.configure(config, (site,)))
    learner = classifiers_of(member)
    expected = LinearSVMs(learner.svms.classes, len(learner.svms.weight), CONVERGED)
    train_to_convergence(
        expected,
        learner.train_data,
        learner.held_out_data,
        weights=learner.weights,
        C=C,
    )
    assert np.array_equal(learner.svms.weight, expected.weight.astype(np.float32))


def test_an_error_about_a_missing_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    x, labels = draw_patients(0)
    with pytest.raises(MissingExtra, match=r"scikit-learn.*fednotes\[phenotype\]"):
        solved(svms_of(), x, labels, None, 1.0)


# ---- TF-IDF --------------------------------------------------------------------------


def bags(seed: int, patients: int = 40, vocabulary: int = 25) -> Bags:
    rng = np.random.default_rng(seed)
    return Bags.from_lists(
        [
            rng.integers(vocabulary - 3, size=rng.integers(0, 12))
            for _ in range(patients)
        ],
        vocabulary,
    )


def test_features_equal_scikit_learn() -> None:
    """TfidfTransformer of the same counts; patients without concepts and unseen ones
    included."""
    train, unseen = bags(1), bags(2)
    fitted = TfidfTransformer().fit(counted(train))
    idf = compute_idf(count_document_frequencies(train), len(train))
    assert np.array_equal(idf, fitted.idf_)
    for documents in (train, unseen):
        features = compute_tfidf(documents, idf)
        shape = (len(features), features.width)
        ours = sparse.csr_matrix(
            (features.values, features.columns, features.offsets), shape
        )
        assert np.allclose(
            ours.toarray(), fitted.transform(counted(documents)).toarray()
        )
    assert (
        np.diff(compute_tfidf(train, idf).offsets) == 0
    ).any()  # somebody without concepts


def test_document_frequencies_add_up_over_sites() -> None:
    """Counted by hand over the patients of both."""
    a, b = bags(3), bags(4)
    expected = (counted(a) > 0).sum(0) + (counted(b) > 0).sum(0)
    assert np.array_equal(
        count_document_frequencies(a) + count_document_frequencies(b), expected
    )
