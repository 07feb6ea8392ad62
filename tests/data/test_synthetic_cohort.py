"""Invented cohorts: their shape, their rates, and that bags predict labels across sites."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from sklearn.decomposition import TruncatedSVD
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import normalize

from fednotes.core.errors import ConfigError
from fednotes.patients.cohort import Bags, Cohort, fingerprint, pooled
from fednotes.patients.obesity import DISEASES
from fednotes.patients.synthetic_cohort import JUDGED, LIMIT, TABLE_1, generate, phenotypes


@pytest.fixture(scope="module")
def sites() -> tuple[Cohort, ...]:
    return generate(3_001, 4, 30, 2_000, seed=3, mean_concepts=200)


def _features(bags: Bags) -> csr_matrix:
    """Log counts of unit length."""
    row, column, count = bags.counts()
    shape = (len(bags), bags.vocabulary)
    return normalize(csr_matrix((np.log1p(count), (row, column)), shape=shape))


def _auroc(train: Cohort, test: Cohort, output: int) -> float:
    """scikit-learn's logistic regression on bags, on another site's patients."""
    model = LogisticRegression(C=10, max_iter=200)
    model.fit(_features(train.bags), train.labels[:, output])
    said = model.decision_function(_features(test.bags))
    return float(roc_auc_score(test.labels[:, output], said))


def test_sites_have_their_patients_and_share_none(sites: tuple[Cohort, ...]) -> None:
    assert [len(site) for site in sites] == [751, 750, 750, 750]
    assert [site.id for site in sites] == ["site-1", "site-2", "site-3", "site-4"]
    assert len(pooled(sites)) == 3_001  # refuses a patient of two sites
    assert {site.outputs for site in sites} == {tuple(f"code-{n:03d}" for n in range(1, 31))}
    assert {site.bags.vocabulary for site in sites} == {2_000}


def test_codes_are_as_frequent_as_said(sites: tuple[Cohort, ...]) -> None:
    """From 45 % down to 1,001 of 44,211 by a power law, exactly over all sites."""
    labels = pooled(sites).labels
    assert set(np.unique(labels).tolist()) == {0, 1}
    counts = labels.sum(0)
    assert counts[0] == round(0.45 * 3_001)
    assert counts[-1] == round(3_001 * 1_001 / 44_211)
    ranks = np.log(np.arange(1, 31))
    fitted = np.polyval(np.polyfit(ranks, np.log(counts), 1), ranks)
    np.testing.assert_allclose(fitted, np.log(counts), atol=0.02)


def test_numbers_of_concepts_are_log_normal(sites: tuple[Cohort, ...]) -> None:
    """Mean 200 and σ 1 of the logarithm, within 5 standard errors."""
    sizes = pooled(sites).bags.sizes
    assert sizes.min() >= 1
    assert sizes.max() <= LIMIT
    spread = 200 * np.sqrt(np.e - 1) / np.sqrt(3_001)
    assert abs(sizes.mean() - 200) < 5 * spread
    assert abs(np.log(sizes).std() - 1) < 5 / np.sqrt(2 * 3_001)


def test_concepts_are_zipf_distributed(sites: tuple[Cohort, ...]) -> None:
    """The slope of log count by log rank is near -1 over the first 300 ranks."""
    counts = np.sort(np.bincount(pooled(sites).bags.concepts, minlength=2_000))[::-1]
    slope = np.polyfit(np.log(np.arange(1, 301)), np.log(counts[:300]), 1)[0]
    assert -1.3 < slope < -0.7


def test_bags_predict_codes_at_another_site(sites: tuple[Cohort, ...]) -> None:
    scores = [_auroc(pooled(sites[:3]), sites[3], output) for output in (0, 5, 10)]
    assert np.mean(scores) > 0.7


def test_sites_differ_in_their_mix_as_far_as_asked_for() -> None:
    """χ² of codes by site, per degree of freedom: near 1 for a random deal, grows with skew."""

    def spread(skew: float) -> float:
        dealt = generate(2_000, 5, 20, 200, seed=1, mean_concepts=20, skew=skew)
        share = pooled(dealt).labels.mean(0)
        found = np.stack([site.labels.sum(0) for site in dealt])
        expected = 400 * share
        return float(((found - expected) ** 2 / (expected * (1 - share))).sum() / (4 * 20))

    assert spread(0.0) < 1.7
    assert spread(0.5) > 2 * spread(0.0)
    assert spread(1.0) > 2 * spread(0.5)


def test_the_same_seed_gives_the_same_cohort() -> None:
    given = {"patients": 120, "sites": 3, "outputs": 5, "vocabulary": 50}
    first, again, other = (generate(**given, seed=seed) for seed in (1, 1, 2))
    assert [fingerprint(a) for a in first] == [fingerprint(b) for b in again]
    assert [fingerprint(a) for a in first] != [fingerprint(b) for b in other]
    assert fingerprint(phenotypes(50, seed=4)) == fingerprint(phenotypes(50, seed=4))


def test_phenotypes_are_at_the_rates_of_the_paper() -> None:
    """Table 1's shares of 1,237, its columns of presence and absence exchanged."""
    cohort = phenotypes()
    assert len(cohort) == 1_237
    assert cohort.outputs == DISEASES == tuple(TABLE_1)
    found = cohort.label_counts()
    for column, rates in enumerate(TABLE_1.values()):
        for name, rate in zip(("present", "absent", "questionable"), rates, strict=True):
            assert abs(int(found[name][column]) - rate * 1_237 / JUDGED) <= 1.5
    assert found["present"][DISEASES.index("Hypertension")] > 800
    assert found["present"][DISEASES.index("Asthma")] < 200


def test_questionable_patients_lie_between_the_others() -> None:
    """Even few patients have all three classes in order, and one class alone does not fail."""
    cohort = phenotypes(20, 18, 100)
    assert cohort.outputs[16:] == ("disease-17", "disease-18")
    assert cohort.labels.shape == (20, 18)
    one = phenotypes(1, 16, 100)
    assert all(len(set(column)) == 1 for column in one.labels.T.tolist())


def test_what_stage_1_has_seen_helps_in_stage_2() -> None:
    """A projection fitted to one world's codes serves its phenotypes, and not another world's.

    Features are SVD scores of stage 1's bags weighted by how they predict codes; the mean
    AUROC over five diseases falls by more than 0.05 where the worlds differ.
    """
    stage_1 = pooled(generate(4_000, 2, 40, 1_000, seed=5, mean_concepts=300))
    reduce = TruncatedSVD(40, random_state=0).fit(_features(stage_1.bags))
    scores = reduce.transform(_features(stage_1.bags))
    towards = np.linalg.lstsq(scores, stage_1.labels.astype(float), rcond=None)[0]

    def mean_auroc(world: int) -> float:
        cohort = phenotypes(900, 16, 1_000, seed=6, mean_concepts=300, world=world)
        features = reduce.transform(_features(cohort.bags)) @ towards
        found = []
        for disease in ("CAD", "CHF", "Diabetes", "Obesity", "Hypercholesterolemia"):
            label = cohort.labels[:, DISEASES.index(disease)]
            rows = np.flatnonzero((label == 0) | (label == 1))
            fit, rest = rows[: len(rows) // 2], rows[len(rows) // 2 :]
            model = LogisticRegression(C=100, max_iter=500).fit(features[fit], label[fit])
            found.append(roc_auc_score(label[rest], model.decision_function(features[rest])))
        return float(np.mean(found))

    same, other = mean_auroc(0), mean_auroc(1)
    assert same > 0.65
    assert same > other + 0.05


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patients": 0}, "number of patients must be at least 1, not 0"),
        ({"sites": 0}, "number of sites must be at least 1"),
        ({"outputs": 0}, "number of outputs"),
        ({"vocabulary": 0}, "at least 1 concept, not 0"),
        ({"sites": 6}, "5 patients cannot fill 6 sites"),
        ({"mean_concepts": 0.5}, "mean number of concepts must be at least 1, not 0.5"),
        ({"skew": -1.0}, "skew between sites must not be negative, not -1"),
        ({"skew": float("nan")}, "must not be negative"),
    ],
)
def test_settings_that_cannot_be(change: dict[str, int], message: str) -> None:
    given = {"patients": 5, "sites": 2, "outputs": 3, "vocabulary": 10} | change
    with pytest.raises(ConfigError, match=message):
        generate(**given)  # type: ignore[arg-type]


def test_one_patient_one_code_one_concept() -> None:
    (site,) = generate(1, 1, 1, 1)
    assert site.labels.tolist() == [[0]]
    assert set(site.bags.concepts.tolist()) == {0}
