"""Private counts of patients that phenotyping starts with: codes, concepts, classes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from phenotype_patients import counted as table_of
from phenotype_patients import sites_of
from scipy import stats
from sklearn.feature_extraction.text import TfidfTransformer
from sklearn.utils.class_weight import compute_class_weight
from tiny_taggers import assert_same, resumed

from fednotes.apps.phenotyping.classifiers import SvmConfig
from fednotes.apps.phenotyping.cohort import ABSENT, PRESENT
from fednotes.apps.phenotyping.counting import compute_count_sizes, count_patient
from fednotes.apps.phenotyping.dan import KNOWN, DanConfig
from fednotes.apps.phenotyping.phenotyper import PhenotypeConfig, load_phenotyper
from fednotes.apps.phenotyping.two_stage import METHOD as PHENOTYPE
from fednotes.apps.phenotyping.two_stage import Config
from fednotes.core.errors import ConfigError, RefusedError, TrainingError
from fednotes.engines.inprocess import InProcess
from fednotes.methods.private import DPMethod
from fednotes.privacy import training as private
from fednotes.privacy.promise import COUNTS, Privacy, compute_epsilon

PRIVATE: Any = DPMethod(PHENOTYPE)
SITES = sites_of(3)
OFTEN, FREQUENT = 40, 60  # patients with a code, and with a concept, of 300


def config_of(representation: str = "learn", **options: Any) -> Any:
    privacy = {"noise": 1.5, "rate": 0.5, "clip": 0.25, "counts": 2.0} | options.pop(
        "privacy", {}
    )
    svm = SvmConfig(loss="log", class_weights="balanced")
    network = DanConfig(embedding=8, hidden=12)
    model = PhenotypeConfig(
        representation=representation, network=network, classifier=svm
    )
    settings = {
        **PHENOTYPE.dp.required_settings,
        "cycles": 1,
        "classifier_cycles": 1,
        "seed": 5,
    }
    settings |= {
        "batch_size": 16,
        "learning_rate": 0.05,
        "systems": ("icd9",),
        "minimum": OFTEN,
    }
    settings |= {"least_occurrences": FREQUENT} if representation == "learn" else {}
    settings |= {"model": model, "privacy": Privacy(**privacy), **options}
    return PHENOTYPE.configure(Config(**settings), SITES)


def of_use(site: Any, representation: str) -> np.ndarray:
    """(patients,) whether training reads a patient."""
    labelled = (site.train.labels >= 0).any(1)
    coded = np.isin(site.train.patients, [*site.codes])
    return np.asarray(labelled | coded if representation == "learn" else labelled)


def by_hand(site: Any, config: Any) -> list[np.ndarray]:
    """What each patient counts, by dictionaries: of ICD-9 the first three figures of a
    code."""
    rows = table_of(site.train.bags) > 0
    count_vectors = []
    for row in np.flatnonzero(of_use(site, config.model.representation)).tolist():
        categories = {code[:8] for code in site.codes.get(site.train.patients[row], ())}
        codes = (
            [float(c in categories) for c in config.list_candidates()]
            if config.has_stage_1
            else []
        )
        labels = site.train.labels[row]
        classes = [*(labels == ABSENT), *(labels == PRESENT)]
        count_vectors.append(np.array([*codes, *rows[row], 1.0, *classes], float))
    return count_vectors


def without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = lambda stream, count: np.zeros(count, np.int64)  # noqa: E731
    monkeypatch.setattr(private, "draw_discrete_gaussian", zeros)


def read_counts(site: Any) -> np.ndarray:
    answer = site.noisy_counts({}, round=0)
    assert (answer.weight, dict(answer.metrics), [*answer.tensors]) == (
        1.0,
        {},
        [COUNTS],
    )
    return np.asarray(answer.tensors[COUNTS].double().numpy() * site.promise.count_grid)


@pytest.mark.parametrize("representation", ["learn", "none"])
@pytest.mark.parametrize("bound", [2.0, 30.0])
def test_a_patient_changes_counts_by_at_most_the_bound(
    representation: str, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum of vectors by hand, each scaled to the most where it is longer; and one
    less."""
    without_noise(monkeypatch)
    config = config_of(representation, privacy={"counted": bound})
    data = SITES[0]
    full_counts, each = (
        read_counts(PRIVATE.make_site(data, config)),
        by_hand(data, config),
    )
    scaled = [v * min(1.0, bound / float(np.linalg.norm(v))) for v in each]
    np.testing.assert_allclose(full_counts, np.sum(scaled, axis=0), rtol=0, atol=1e-5)
    is_used = of_use(data, representation)
    first = int(np.flatnonzero(is_used)[0])
    less = data.train.take(np.arange(len(data.train)) != first)
    moved = full_counts - read_counts(
        PRIVATE.make_site(replace(data, train=less), config)
    )
    np.testing.assert_allclose(moved, scaled[0], rtol=0, atol=1e-6)
    assert np.linalg.norm(moved) <= bound


def test_several_rows_of_a_patient_count_once() -> None:
    """By hand, of two rows of one patient: a disease that one of them has is one that
    the patient has, and so is a concept, however often it occurs in both."""
    config, data = config_of(), SITES[0]
    labels = data.train.labels.copy()
    labels[:2] = -1
    labels[0, :2], labels[1, 1:3] = (PRESENT, ABSENT), (PRESENT, PRESENT)
    data = replace(data, train=replace(data.train, labels=labels))
    places = {name: place for place, name in enumerate(config.list_candidates())}
    places_of_patient, ones = count_patient(data, config, np.array([0, 1]), places)
    assert (ones == 1).all()
    assert len(set(places_of_patient.tolist())) == len(places_of_patient)
    counts = np.zeros(sum(compute_count_sizes(config).values()))
    counts[places_of_patient] = 1
    starts = np.cumsum([0, *compute_count_sizes(config).values()])
    parts = dict(
        zip(compute_count_sizes(config), np.split(counts, starts[1:-1]), strict=True)
    )
    concepts = (table_of(data.train.bags)[:2] > 0).any(0)
    assert np.array_equal(parts["concepts"], concepts)
    assert np.flatnonzero(parts["present"]).tolist() == [0, 1, 2]
    assert np.flatnonzero(parts["absent"]).tolist() == [1]
    assert parts["patients"].tolist() == [1]
    codes = {
        code[:8]
        for at in (0, 1)
        for code in data.codes.get(data.train.patients[at], ())
    }
    assert {
        config.list_candidates()[at] for at in np.flatnonzero(parts["codes"])
    } == codes & {*places}


def test_each_answer_has_fresh_noise() -> None:
    """A site's share, σ · 20 / √2 of three sites: χ² of an answer of nobody, p > 1e-4."""
    config = config_of()
    nobody = replace(SITES[0], train=SITES[0].train.take([]))
    noise = read_counts(PRIVATE.make_site(nobody, config, secret=bytes(32))) / (
        2.0 * 20.0 / np.sqrt(2)
    )
    low, high = stats.chi2.ppf([5e-5, 1 - 5e-5], len(noise))
    assert low < float(noise @ noise) < high
    again = read_counts(PRIVATE.make_site(nobody, config, secret=bytes(32))) / (
        2.0 * 20.0 / np.sqrt(2)
    )
    assert (noise == again).all()
    reseeded = read_counts(PRIVATE.make_site(nobody, config, secret=bytes(31) + b"1"))
    assert (reseeded != noise * (2.0 * 20.0 / np.sqrt(2))).all()


@pytest.mark.parametrize("representation", ["learn", "none"])
def test_agreed_codes_follow_from_the_counts_of_all_sites(
    representation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without noise: codes and concepts that are frequent by hand; what scikit-learn
    makes of all patients together, for concepts and for classes."""
    without_noise(monkeypatch)
    config = config_of(representation)
    sent: dict[str, Any] = {}
    sites = [PRIVATE.make_site(data, config) for data in SITES]
    for site in sites:
        monkeypatch.setattr(
            site, "begin", lambda t, keep=site.begin: sent.update(t) or keep(t)
        )
    PRIVATE.train(InProcess(sites), config)
    used_by_site = [of_use(data, representation) for data in SITES]
    train = [
        data.train.take(np.flatnonzero(k))
        for data, k in zip(SITES, used_by_site, strict=True)
    ]
    bags = np.concatenate([table_of(cohort.bags) for cohort in train])
    labels = np.concatenate([cohort.labels for cohort in train])
    if representation == "learn":
        names = Counter(
            name
            for data, cohort in zip(SITES, train, strict=True)
            for patient in cohort.patients
            for name in {code[:8] for code in data.codes.get(patient, ())}
        )
        expected = sorted(name for name, count in names.items() if count >= OFTEN)
        assert 0 < len(expected) < len(names)
        assert [
            config.list_candidates()[at] for at in sent["chosen"].tolist()
        ] == expected
        frequent = np.flatnonzero((bags > 0).sum(0) >= FREQUENT)
        assert 0 < len(frequent) < bags.shape[1]
        assert sent[KNOWN].tolist() == frequent.tolist()
    else:
        assert sent.keys() == {"idf", "weights"}
        exact = TfidfTransformer().fit(bags).idf_
        np.testing.assert_allclose(sent["idf"].numpy(), exact, rtol=1e-6)
    least = float(sites[0].promise.count_grid * private.SCALE * np.sqrt(3))
    for disease, weights in enumerate(sent["weights"].numpy()):
        disease_labels = labels[:, disease][labels[:, disease] >= 0]
        assert np.bincount(disease_labels).min() > least / 2
        exact = compute_class_weight(
            "balanced", classes=np.array([0, 1]), y=disease_labels
        )
        if np.bincount(disease_labels).min() >= least:
            np.testing.assert_allclose(weights, exact, rtol=1e-6)


def test_a_class_rarer_than_the_noise_is_weighted_as_if_as_frequent_as_it() -> None:
    """(400 + 80) / (2 · 400) and (400 + 80) / (2 · 80), of 400 and 3 with a deviation
    of 80."""
    config = config_of("none")
    sizes = [config.space.width, 1, 3, 3]
    counts = np.concatenate(
        [np.full(n, v) for n, v in zip(sizes, (50, 400, 400, 3), strict=True)]
    )
    weights = PHENOTYPE.dp.agree(config, counts.astype(float), 80.0)["weights"]
    assert weights.tolist() == [[0.6, 3.0]] * 3


def test_counts_without_a_frequent_concept_are_an_error() -> None:
    config = config_of()
    counts = np.zeros(PHENOTYPE.dp.count_size(config))
    counts[: len(config.list_candidates())] = OFTEN
    with pytest.raises(TrainingError, match="no concept occurs 60 times"):
        PHENOTYPE.dp.agree(config, counts, 1.0)


@pytest.mark.parametrize("labelled", [3, 2, 1])
def test_a_gradient_is_weighted_by_its_class(
    labelled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand, of a patient with labels of so many of three diseases: w y σ(-y s) /
    labels for the intercepts of these, and nothing for the others."""
    without_noise(monkeypatch)
    labels = SITES[0].train.labels.copy()
    complete = int(np.flatnonzero((labels >= 0).all(1))[0])
    labels[complete, labelled:] = -1
    data = replace(SITES[0], train=replace(SITES[0].train, labels=labels))
    site = PRIVATE.make_site(
        data, config_of("none", privacy={"clip": 50.0}), secret=bytes(32)
    )
    width, weights = SITES[0].space.width, [[0.5, 3.0], [1.5, 0.25], [1.0, 2.0]]
    site.begin(
        {"idf": torch.ones(width).double(), "weights": torch.tensor(weights).double()}
    )
    unit = next(u for u, rows in enumerate(site.units) if complete in rows)
    picked = lambda stream, count, rate: np.arange(count) == unit  # noqa: E731
    monkeypatch.setattr(private, "draw_units", picked)
    sent = {n: torch.full_like(v.detach(), 0.1) for n, v in site.site.shared.items()}
    gradient = (
        site.noisy_gradients(sent, round=0).tensors["svm.intercept"].double().numpy()
    )
    (row,) = site.units[unit]
    x = table_of(SITES[0].train.bags)[row].astype(float)
    sign = np.where(labels[row] == PRESENT, 1.0, -1.0) * (labels[row] >= 0)
    score = 0.1 * (x / np.linalg.norm(x)).sum() + 0.1
    weight = np.array(weights)[np.arange(3), (sign > 0).astype(int)]
    expected = -sign * weight / (1 + np.exp(sign * score)) / labelled
    np.testing.assert_allclose(
        gradient * site.promise.grids[0], expected, rtol=0, atol=1e-5
    )


def run(config: Any, directory: Path | None = None, **options: Any) -> dict[str, Any]:
    sites = [
        PRIVATE.make_site(d, config, secret=bytes([n]) * 32)
        for n, d in enumerate(SITES)
    ]
    sites[0].site.directory = directory
    final = PRIVATE.train(InProcess(sites, **options), config)
    assert final.round == PRIVATE.make_promise(config).rounds
    return dict(final.tensors)


@pytest.mark.slow
@pytest.mark.parametrize("representation", ["learn", "none"])
def test_secure_sums_and_restarts_do_not_change_a_private_run(
    representation: str, tmp_path: Path
) -> None:
    """Under the secure sum, and killed and gone on with, the counts are those of the
    first start; the model that is saved knows what was agreed. ε covers counts and
    rounds."""
    config = config_of(representation, privacy={"counts": 0.5, "counted": 4.0})
    uninterrupted = run(config, tmp_path / "kept")
    saved = load_phenotyper(tmp_path / "kept" / "model")
    if representation == "learn":
        names = [
            config.list_candidates()[at]
            for at in uninterrupted["agreed.chosen"].tolist()
        ]
        assert [*saved.code_names] == names
        assert uninterrupted["shared.network.output_bias"].shape == (len(names),)
        assert (
            len(uninterrupted["shared.network.embedding"])
            == len(uninterrupted["agreed.known"]) + 1
        )
    else:
        assert saved.idf is not None
        assert np.array_equal(saved.idf, uninterrupted["agreed.idf"].numpy())
    assert_same(uninterrupted, run(config, secure=True))
    assert_same(
        uninterrupted,
        resumed(lambda **more: run(config, **more), tmp_path / "run", kill=1),
    )
    promise = PRIVATE.make_promise(config)
    assert promise.compute_epsilon() == compute_epsilon(
        1.5, 1e-5, 0.5, promise.rounds, 0.5
    )


ODD = {
    "another name": {"network.embedding": torch.full((60, 8), math.nan)},
    "not all": {},
    "no number": {"idf": [math.nan]},
    "infinite": {"idf": [math.inf]},
    "nothing": {"idf": [0.0]},
    "negative": {"idf": [-1.0]},
    "huge": {"idf": [1e308]},
    "tiny": {"idf": [1e-320]},
    "no weight": {"weights": [math.nan]},
    "short": {"idf": torch.ones(59).double()},
    "single": {"idf": torch.ones(60)},
}


@pytest.mark.parametrize(
    "odd", [pytest.param(odd, id=name) for name, odd in ODD.items()]
)
def test_refusals_of_odd_agreements_reveal_no_patient(odd: dict[str, Any]) -> None:
    """It is refused, with the same words, whether or not a patient has the only concept
    whose number is odd."""
    config, at = config_of("none"), 7
    have = table_of(SITES[0].train.bags)[:, at] > 0
    without = replace(SITES[0], train=SITES[0].train.take(np.flatnonzero(~have)))
    agreed: dict[str, Any] = {
        "idf": torch.ones(60).double(),
        "weights": torch.ones(3, 2).double(),
    }
    for name, value in odd.items():
        if isinstance(value, list):
            agreed[name].view(-1)[at % agreed[name].numel()] = value[0]
        else:
            agreed[name] = value
    if not odd:
        del agreed["weights"]
    for data in (SITES[0], without):
        site = PRIVATE.make_site(data, config, secret=bytes(32))
        with pytest.raises(
            RefusedError, match="contradicts the noisy counts of this job"
        ):
            site.begin(agreed)


def test_a_server_can_ask_only_once_and_within_the_job() -> None:
    site = PRIVATE.make_site(SITES[0], config_of(), secret=bytes(32))
    weights = {"weights": torch.ones(3, 2).double()}
    with pytest.raises(RefusedError, match="as positions in the job's list"):
        site.begin(
            {
                "chosen": torch.tensor([1, 10**6]),
                KNOWN: torch.tensor([5, 7]),
                **weights,
            }
        )
    with pytest.raises(RefusedError, match="as ascending positions in the dictionary"):
        site.begin(
            {"chosen": torch.tensor([1, 2]), KNOWN: torch.tensor([5, 5]), **weights}
        )
    agreed = {"chosen": torch.tensor([1, 2]), KNOWN: torch.tensor([5, 7])}
    agreed["weights"] = torch.ones(3, 2).double()
    site.begin(agreed)
    site.begin(agreed)  # after a fault
    with pytest.raises(
        RefusedError, match="nothing to agree on, or training has begun"
    ):
        site.begin({**agreed, "chosen": torch.tensor([1, 3])})
    site.noisy_gradients({n: v.detach() for n, v in site.site.shared.items()}, round=0)
    with pytest.raises(RefusedError, match="no counts, or only before training"):
        site.noisy_counts({}, round=0)
    with pytest.raises(
        RefusedError, match="nothing to agree on, or training has begun"
    ):
        site.begin(agreed)
    broken = {
        n: torch.full_like(v.detach(), math.nan) for n, v in site.site.shared.items()
    }
    with pytest.raises(RefusedError, match="numbers that are not finite"):
        site.finish(broken)
    with pytest.raises(
        ConfigError, match=r"\[privacy\] counts: this job counts nothing"
    ):
        config_of(
            outputs=("icd9:401",),
            least_occurrences=0,
            model=PhenotypeConfig(
                classifier=SvmConfig(loss="log", class_weights="none")
            ),
        )
