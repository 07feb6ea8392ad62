"""Differential privacy of both stages: what a patient changes, noise, faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from phenotype_patients import counted, sites_of
from scipy import stats

from fednotes.apps.phenotyping.classifiers import SvmConfig
from fednotes.apps.phenotyping.cohort import UNLABELLED
from fednotes.apps.phenotyping.dan import DanConfig
from fednotes.apps.phenotyping.phenotyper import PhenotypeConfig, load_phenotyper
from fednotes.apps.phenotyping.two_stage import METHOD as PHENOTYPE
from fednotes.apps.phenotyping.two_stage import Config
from fednotes.core.errors import ConfigError
from fednotes.engines.inprocess import InProcess
from fednotes.jobs.job_file import parse_job
from fednotes.methods.private import DPMethod
from fednotes.privacy import training as private
from fednotes.privacy.noise import SCALE
from fednotes.privacy.promise import Privacy

PRIVATE: Any = DPMethod(PHENOTYPE)
SITES = sites_of(3)


def config_of(loss: Any = "log", **privacy_options: Any) -> Any:
    model = PhenotypeConfig(representation="none", classifier=SvmConfig(loss=loss))
    privacy = {"noise": 1.5, "rate": 0.5, "clip": 0.25} | privacy_options
    settings = PHENOTYPE.dp.required_settings | {
        "classifier_cycles": 2,
        "batch_size": 16,
        "seed": 5,
    }
    config = Config(
        model=model, privacy=Privacy(**privacy), learning_rate=0.05, **settings
    )
    return PHENOTYPE.configure(config, SITES)


def sums(
    monkeypatch: pytest.MonkeyPatch, units: Sequence[int], **privacy_options: Any
) -> np.ndarray:
    """(features + 1, diseases) of a round of these patients without noise, from weights
    of 0.1."""
    picked = lambda stream, count, rate: np.isin(np.arange(count), units)  # noqa: E731
    zeros = lambda stream, count: np.zeros(count, np.int64)  # noqa: E731
    monkeypatch.setattr(private, "draw_units", picked)
    monkeypatch.setattr(private, "draw_discrete_gaussian", zeros)
    site = PRIVATE.make_site(SITES[0], config_of(**privacy_options), secret=bytes(32))
    sent = {n: torch.full_like(v.detach(), 0.1) for n, v in site.site.shared.items()}
    answer = site.noisy_gradients(sent, round=0).tensors
    weights = torch.cat([answer["svm.weight"], answer["svm.intercept"][None]])
    return weights.double().numpy() * site.promise.grids[0]


@pytest.mark.parametrize("loss", ["log", "hinge"])
@pytest.mark.parametrize("clip", [0.05, 4.0])
def test_a_patient_changes_an_update_by_its_clipped_gradient(
    loss: str, clip: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient by hand, by NumPy: of the mean over the patient's labels, of
    concepts' counts scaled to length 1; with a patient and without it."""
    cohort = SITES[0].train.select_labelled()
    counts = counted(cohort.bags).astype(float)
    x = np.hstack(
        [
            counts / np.linalg.norm(counts, axis=1, keepdims=True),
            np.ones((len(counts), 1)),
        ]
    )
    every = range(len(cohort))
    full_sum = sums(monkeypatch, every, loss=loss, clip=clip)
    for row in (0, 7, 20):
        sign = np.where(
            cohort.labels[row] == UNLABELLED, 0.0, 2.0 * cohort.labels[row] - 1
        )
        score = 0.1 * x[row].sum()
        slope = {
            "log": -sign / (1 + np.exp(sign * score)),
            "hinge": -sign * (1 - sign * score > 0),
        }[loss]
        expected = np.outer(x[row], slope) / np.abs(sign).sum()
        length = float(np.linalg.norm(expected))
        expected *= min(1.0, clip / length)
        without = sums(
            monkeypatch, [u for u in every if u != row], loss=loss, clip=clip
        )
        contribution = full_sum - without
        np.testing.assert_allclose(
            contribution, expected, rtol=0, atol=1e-5 * min(clip, 1)
        )
        assert np.linalg.norm(contribution) <= clip * (1 + 1e-9)


@pytest.mark.slow
def test_a_private_run_learns_and_its_noise_is_as_promised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """χ² of an answer with nobody in it, p > 1e-4; with much less noise than any
    promise needs, a run ranks patients of a disease above others."""
    choose_units = private.draw_units
    monkeypatch.setattr(
        private, "draw_units", lambda stream, count, rate: np.zeros(count, bool)
    )
    site = PRIVATE.make_site(SITES[0], config_of(), secret=bytes(32))
    answer = site.noisy_gradients(
        {n: v.detach() for n, v in site.site.shared.items()}, round=0
    )
    noise = (
        np.concatenate([v.double().numpy().ravel() for v in answer.tensors.values()])
        / SCALE
    )
    low, high = stats.chi2.ppf([5e-5, 1 - 5e-5], len(noise))
    assert low < float(noise @ noise) < high
    assert (answer.weight, dict(answer.metrics)) == (1.0, {})
    monkeypatch.setattr(private, "draw_units", choose_units)
    config = replace(config_of(noise=0.1, clip=1.0), classifier_cycles=8, sites=3)
    sites = [PRIVATE.make_site(data, config) for data in SITES]
    final = PRIVATE.train(InProcess(sites), config)
    assert final.round == 16
    # The noise is new each time: 25 runs had 0.696 to 0.732, a mean of 0.714, a
    # deviation of 0.010.
    assert np.mean([s.scores["ranking"]["auroc"] for s in sites]) > 0.66


def test_different_notes_of_the_same_patients_have_different_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one secret, and nobody in the sum: only what is read of the notes differs."""
    monkeypatch.setattr(
        private, "draw_units", lambda stream, count, rate: np.zeros(count, bool)
    )
    train = SITES[0].train
    rotated = replace(train, bags=train.bags.take([*range(1, len(train)), 0]))
    sums = []
    for cohort in (train, train, rotated):
        site = PRIVATE.make_site(
            replace(SITES[0], train=cohort), config_of(), secret=bytes(32)
        )
        shared = {n: v.detach() for n, v in site.site.shared.items()}
        sums.append(site.noisy_gradients(shared, round=0).tensors["svm.weight"])
    assert torch.equal(sums[0], sums[1])
    assert not torch.equal(sums[0], sums[2])


def test_settings_that_count_patients_exactly_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r'unit = "document": .* set unit = "patient"'
    ):
        config_of(unit="document")
    table: dict[str, Any] = {
        "method": "phenotype",
        "preset": "paper",
        "synthetic": {},
        "model": {"representation": "none"},
        "privacy": {"epsilon": 2.0},
    }
    parse_job(table, "job", Path(), "job.toml")
    none = {"representation": "none"}
    for model in (
        {"representation": "elsewhere"},
        {**none, "classifier": {"solver": "converged", "loss": "log"}},
    ):
        with pytest.raises(
            ConfigError, match=r'set model.representation = "learn" or "none"'
        ):
            parse_job({**table, "model": model}, "job", Path(), "job.toml")
    balanced = {**none, "classifier": {"class_weights": "balanced"}}
    with pytest.raises(ConfigError, match=r"what a class weighs: set privacy.counts"):
        parse_job({**table, "model": balanced}, "job", Path(), "job.toml")
    counts = {"epsilon": 2.0, "counts": 8.0}
    parse_job(
        {**table, "model": balanced, "privacy": counts}, "job", Path(), "job.toml"
    )
    codes = {"outputs": ["icd9:250"], "least_occurrences": 0}
    learnt = {
        **table,
        "preset": "best",
        "model": {"classifier": {"class_weights": "none"}},
    }
    parse_job({**learnt, "training": codes}, "job", Path(), "job.toml")
    counted: list[dict[str, Any]] = [
        {},
        {**codes, "outputs": []},
        {**codes, "least_occurrences": 2},
    ]
    for training in counted:
        with pytest.raises(
            ConfigError, match=r"exact counts .* or give training.outputs"
        ):
            parse_job({**learnt, "training": training}, "job", Path(), "job.toml")
    assert PHENOTYPE.list_warnings(config_of()) == ()
    steeper = replace(
        config_of(),
        model=replace(config_of().model, classifier=SvmConfig(eta0=5.0, alpha=0.1)),
    )
    (warning,) = PHENOTYPE.list_warnings(steeper)
    assert warning.endswith(
        "learning_rate: eta0, alpha of [model.classifier] have no effect"
    )
    with pytest.raises(
        ConfigError, match=r"calibrate = True: under \[privacy\] it must be False"
    ):
        parse_job({**table, "training": {"calibrate": True}}, "job", Path(), "job.toml")


def test_rounds_of_a_method_with_stages_cannot_be_averaged() -> None:
    table = {
        "method": "phenotype",
        "preset": "paper",
        "synthetic": {},
        "model": {"representation": "none"},
        "privacy": {"epsilon": 2.0, "averaged_rounds": 2},
    }
    with pytest.raises(ConfigError, match="this method trains in stages"):
        parse_job(table, "job", Path(), "job.toml")


# ---- both stages ---------------------------------------------------------------------

CLASSES = ("icd9:401", "icd9:250", "icd9:428", "icd9:493")


def learning(**options: Any) -> Any:
    """Return settings of two answers of stage 1, and two of stage 2."""
    network = DanConfig(embedding=8, hidden=12)
    svm = SvmConfig(loss="log")
    privacy = {"noise": 1.5, "rate": 0.5, "clip": 0.25} | options.pop("privacy", {})
    settings = {
        **PHENOTYPE.dp.required_settings,
        "cycles": 1,
        "classifier_cycles": 1,
        "seed": 5,
    }
    settings |= {"batch_size": 16, "learning_rate": 0.05, "outputs": CLASSES, **options}
    model = PhenotypeConfig(network=network, classifier=svm)
    return PHENOTYPE.configure(
        Config(model=model, privacy=Privacy(**privacy), **settings), SITES
    )


def run_stage(
    monkeypatch: pytest.MonkeyPatch, stage: int, units: Sequence[int], clip: float
) -> Any:
    """Whole numbers of a round of these patients without noise, and of what they are
    steps."""
    picked = lambda stream, count, rate: np.isin(np.arange(count), units)  # noqa: E731
    zeros = lambda stream, count: np.zeros(count, np.int64)  # noqa: E731
    monkeypatch.setattr(private, "draw_units", picked)
    monkeypatch.setattr(private, "draw_discrete_gaussian", zeros)
    site = PRIVATE.make_site(
        SITES[0], learning(privacy={"clip": clip}), secret=bytes(32)
    )
    assert site.promise.rounds == 4
    rng = np.random.default_rng(3)
    sent = {
        n: torch.from_numpy(rng.normal(size=tuple(v.shape)).astype(np.float32))
        for n, v in site.site.shared.items()
    }
    answer = dict(site.noisy_gradients(sent, round=2 * stage).tensors)
    return site, sent, answer


def by_hand(sent: dict[str, Any], patient: str, stage: int) -> dict[str, np.ndarray]:
    """A patient's gradients by NumPy, in float64: of the mean cross-entropy of its
    codes, or of the mean logistic loss of its labels, which are of a representation of
    length 1."""
    value = {n.removeprefix("network."): v.double().numpy() for n, v in sent.items()}
    cohort = SITES[0].train
    row = cohort.patients.index(patient)
    patient_concepts = cohort.bags.concepts[
        cohort.bags.offsets[row] : cohort.bags.offsets[row + 1]
    ]
    mean = value["embedding"][patient_concepts].mean(0)
    before = value["hidden_weight"] @ mean + value["hidden_bias"]
    hidden = np.maximum(before, 0)
    if stage:
        labels = cohort.labels[row]
        x = hidden / np.linalg.norm(hidden)
        sign = np.where(labels == UNLABELLED, 0.0, 2.0 * labels - 1)
        score = x @ value["svm.weight"] + value["svm.intercept"]
        slope = -sign / (1 + np.exp(sign * score)) / np.abs(sign).sum()
        return {"svm.weight": np.outer(x, slope), "svm.intercept": slope}
    codes = {c[:8] for c in SITES[0].codes[patient]}
    odds = value["output_weight"] @ hidden + value["output_bias"]
    slope = (1 / (1 + np.exp(-odds)) - [c in codes for c in CLASSES]) / len(CLASSES)
    hidden_slope = (value["output_weight"].T @ slope) * (before > 0)
    table = np.zeros_like(value["embedding"])
    np.add.at(
        table,
        patient_concepts,
        value["hidden_weight"].T @ hidden_slope / len(patient_concepts),
    )
    gradients = {
        "embedding": table,
        "hidden_weight": np.outer(hidden_slope, mean),
        "hidden_bias": hidden_slope,
    }
    gradients |= {"output_weight": np.outer(slope, hidden), "output_bias": slope}
    return {f"network.{name}": gradient for name, gradient in gradients.items()}


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("clip", [0.05, 50.0])
def test_a_patient_changes_the_trained_stage_by_its_clipped_gradient(
    stage: int, clip: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand, and whole numbers that are the same in company; the other stage's part
    rests, and nothing of it leaves. A patient without codes, or without labels, adds
    nothing there."""
    coded = np.isin(SITES[0].train.patients, [*SITES[0].codes])
    labelled = (SITES[0].train.labels >= 0).any(1)
    has_labels_of_stage = np.stack((coded, labelled))[
        :, coded | labelled
    ]  # of each unit
    chosen = np.flatnonzero(has_labels_of_stage.all(0))[[3, 8, 21]].tolist()
    site, sent, together = run_stage(monkeypatch, stage, chosen, clip)
    singles = [run_stage(monkeypatch, stage, [unit], clip)[2] for unit in chosen]
    assert together.keys() == {n for n in sent if n.startswith("svm.") == bool(stage)}
    for name, value in together.items():
        assert torch.equal(
            value, sum((s[name] for s in singles), torch.zeros_like(value))
        )
    for unit, single in zip(chosen, singles, strict=True):
        (row,) = site.units[unit]
        expected_gradient = by_hand(sent, SITES[0].train.patients[row], stage)
        length = np.sqrt(sum((w**2).sum() for w in expected_gradient.values()))
        actual = {
            n: v.double().numpy() * site.promise.grids[0] for n, v in single.items()
        }
        for name, gradient in expected_gradient.items():
            expected = gradient * min(1, clip / length)
            np.testing.assert_allclose(
                actual[name], expected, rtol=0, atol=2e-5 * min(clip, 1)
            )
        assert 0 < np.sqrt(sum((f**2).sum() for f in actual.values())) <= clip
    assert (
        np.concatenate(site.units).tolist() == np.flatnonzero(coded | labelled).tolist()
    )
    nothing = run_stage(
        monkeypatch, stage, np.flatnonzero(~has_labels_of_stage[stage]).tolist(), clip
    )[2]
    assert not any(value.any() for value in nothing.values())


def run(
    config: Any, directory: Path | None = None, **options: Any
) -> tuple[Any, list[Any]]:
    """Three sites' training; the first one saves its model."""
    sites = [
        PRIVATE.make_site(d, config, secret=bytes([n]) * 32)
        for n, d in enumerate(SITES)
    ]
    sites[0].site.directory = directory
    final = PRIVATE.train(InProcess(sites, **options), config)
    assert final.round == PRIVATE.make_promise(config).rounds
    return dict(final.tensors), [site.scores for site in sites]


def test_a_private_run_of_both_stages_saves_its_model(tmp_path: Path) -> None:
    uninterrupted, _ = run(learning(), tmp_path / "kept")
    saved = load_phenotyper(tmp_path / "kept" / "model")
    assert saved.code_names == CLASSES
    assert saved.network is not None
    for name, value in saved.network.trainable().items():
        assert torch.equal(value, uninterrupted[f"shared.network.{name}"])


@pytest.mark.slow
def test_both_stages_learn_with_little_noise() -> None:
    """With much less noise than any promise needs, diseases and codes of test patients
    are ranked."""
    long = {"cycles": 10, "classifier_cycles": 10, "learning_rate": 0.2}
    _, scores = run(learning(**long, privacy={"noise": 0.1, "clip": 1.0}))
    assert np.mean([s["ranking"]["auroc"] for s in scores]) > 0.6
    assert np.mean([s["codes"]["auroc"] for s in scores]) > 0.7


def test_codes_alone_can_be_learnt_with_differential_privacy() -> None:
    """Sites without labels: stage 1 is all."""
    bare = [replace(s, **{p: replace(getattr(s, p), labels=np.zeros((len(getattr(s, p)), 0)),
            outputs=()) for p in ("train", "valid", "test")}) for s in SITES]  # fmt: skip
    config = PHENOTYPE.configure(replace(learning(), phenotypes=()), bare)
    site = PRIVATE.make_site(bare[0], config, secret=bytes(32))
    assert site.promise.rounds == 2
    assert {n.split(".")[0] for n in site.site.shared} == {"network"}
    final = PRIVATE.train(
        InProcess([site, *(PRIVATE.make_site(b, config) for b in bare[1:])]), config
    )
    assert final.round == 2
    assert "codes" in site.scores
