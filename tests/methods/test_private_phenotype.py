"""Differential privacy of phenotyping's classifiers: gradients, what a patient moves, noise."""

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

from fednotes.core.errors import ConfigError
from fednotes.engines.inprocess import InProcess
from fednotes.jobs.job_file import parse_job
from fednotes.methods import private
from fednotes.methods.phenotype import METHOD as PHENOTYPE
from fednotes.methods.phenotype import Config
from fednotes.methods.private import privately
from fednotes.patients.classifiers import SvmConfig
from fednotes.patients.cohort import UNLABELLED
from fednotes.patients.phenotyper import PhenotypeConfig
from fednotes.privacy.noise import SCALE
from fednotes.privacy.promise import Privacy

PRIVATE: Any = privately(PHENOTYPE)
SITES = sites_of(3)


def config_of(loss: Any = "log", **given: Any) -> Any:
    model = PhenotypeConfig(representation="none", classifier=SvmConfig(loss=loss))
    asked = {"noise": 1.5, "rate": 0.5, "clip": 0.25} | given
    settings = PHENOTYPE.private.settings | {"classifier_cycles": 2, "batch_size": 16, "seed": 5}
    made = Config(model=model, privacy=Privacy(**asked), learning_rate=0.05, **settings)
    return PHENOTYPE.for_sites(made, SITES)


def sums(monkeypatch: pytest.MonkeyPatch, units: Sequence[int], **given: Any) -> np.ndarray:
    """(features + 1, diseases) of a round of these patients without noise, from weights of 0.1."""
    picked = lambda stream, count, rate: np.isin(np.arange(count), units)  # noqa: E731
    zeros = lambda stream, count: np.zeros(count, np.int64)  # noqa: E731
    monkeypatch.setattr(private, "chosen", picked)
    monkeypatch.setattr(private, "discrete_gaussian", zeros)
    site = PRIVATE.Site(SITES[0], config_of(**given), secret=bytes(32))
    sent = {n: torch.full_like(v.detach(), 0.1) for n, v in site.site.shared.items()}
    answer = site.noisy_gradients(sent, round=0).tensors
    whole = torch.cat([answer["svm.weight"], answer["svm.intercept"][None]])
    return whole.double().numpy() * site.promise.grids[0]


@pytest.mark.parametrize("loss", ["log", "hinge"])
@pytest.mark.parametrize("clip", [0.05, 4.0])
def test_a_patient_moves_what_leaves_by_its_clipped_gradient(
    loss: str, clip: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient by hand, by NumPy: of the mean over the patient's labels, of concepts' counts
    scaled to length 1; with a patient and without it."""
    cohort = SITES[0].train.labelled()
    counts = counted(cohort.bags).astype(float)
    x = np.hstack(
        [counts / np.linalg.norm(counts, axis=1, keepdims=True), np.ones((len(counts), 1))]
    )
    every = range(len(cohort))
    whole = sums(monkeypatch, every, loss=loss, clip=clip)
    for row in (0, 7, 20):
        sign = np.where(cohort.labels[row] == UNLABELLED, 0.0, 2.0 * cohort.labels[row] - 1)
        score = 0.1 * x[row].sum()
        slope = {
            "log": -sign / (1 + np.exp(sign * score)),
            "hinge": -sign * (1 - sign * score > 0),
        }[loss]
        wanted = np.outer(x[row], slope) / np.abs(sign).sum()
        length = float(np.linalg.norm(wanted))
        wanted *= min(1.0, clip / length)
        without = sums(monkeypatch, [u for u in every if u != row], loss=loss, clip=clip)
        found = whole - without
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * min(clip, 1))
        assert np.linalg.norm(found) <= clip * (1 + 1e-9)


def test_a_run_has_noise_alone_beside_its_sums_and_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    """χ² of an answer with nobody in it, p > 1e-4; with much less noise than any promise needs, a
    run ranks patients of a disease above others."""
    drawn = private.chosen
    monkeypatch.setattr(private, "chosen", lambda stream, count, rate: np.zeros(count, bool))
    site = PRIVATE.Site(SITES[0], config_of(), secret=bytes(32))
    answer = site.noisy_gradients({n: v.detach() for n, v in site.site.shared.items()}, round=0)
    found = np.concatenate([v.double().numpy().ravel() for v in answer.tensors.values()]) / SCALE
    low, high = stats.chi2.ppf([5e-5, 1 - 5e-5], len(found))
    assert low < float(found @ found) < high
    assert (answer.weight, dict(answer.metrics)) == (1.0, {})
    monkeypatch.setattr(private, "chosen", drawn)
    config = replace(config_of(noise=0.1, clip=1.0), classifier_cycles=8, sites=3)
    sites = [PRIVATE.Site(data, config) for data in SITES]
    final = PRIVATE.train(InProcess(sites), config)
    assert final.round == 16
    # The noise is new each time: 25 runs had 0.696 to 0.732, a mean of 0.714, a deviation of 0.010.
    assert np.mean([s.scores["ranking"]["auroc"] for s in sites]) > 0.66


def test_other_notes_of_the_same_patients_have_other_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one secret, and nobody in the sum: only what is read of the notes differs."""
    monkeypatch.setattr(private, "chosen", lambda stream, count, rate: np.zeros(count, bool))
    train = SITES[0].train
    other = replace(train, bags=train.bags.take([*range(1, len(train)), 0]))
    sums = []
    for cohort in (train, train, other):
        site = PRIVATE.Site(replace(SITES[0], train=cohort), config_of(), secret=bytes(32))
        shared = {n: v.detach() for n, v in site.site.shared.items()}
        sums.append(site.noisy_gradients(shared, round=0).tensors["svm.weight"])
    assert torch.equal(sums[0], sums[1])
    assert not torch.equal(sums[0], sums[2])


def test_what_counts_patients_exactly_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'unit = "document": .* set unit = "patient"'):
        PRIVATE.Site(SITES[0], config_of(unit="document"))
    table: dict[str, Any] = {
        "method": "phenotype",
        "preset": "paper",
        "synthetic": {},
        "model": {"representation": "none"},
        "privacy": {"epsilon": 2.0},
    }
    parse_job(table, "job", Path(), "job.toml")
    for model in ({}, {"representation": "none", "classifier": {"class_weights": "balanced"}}):
        with pytest.raises(ConfigError, match=r'set model.representation = "none"'):
            parse_job({**table, "model": model}, "job", Path(), "job.toml")
    with pytest.raises(ConfigError, match=r"calibrate = True: under \[privacy\] it must be False"):
        parse_job({**table, "training": {"calibrate": True}}, "job", Path(), "job.toml")
