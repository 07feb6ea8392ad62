"""Test the counts of an evaluation with differential privacy.

What a unit changes, the noise of the counts, and how often they are sent.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from private_sites import config_of, make_private_site, patients, theta
from scipy import stats
from tiny_jobs import TABLE

from fednotes.core.errors import ConfigError, RefusedError
from fednotes.core.types import Document, SiteData, Span
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.simulate import simulate
from fednotes.privacy import training as private
from fednotes.privacy.noise import SCALE
from fednotes.privacy.promise import COUNTS, compute_epsilon
from fednotes.privacy.training import DPSite

PRIVACY = {"counts": 2.0, "unit": "patient"}
COUNTED = 20.0


def note(name: str, patient: str, mentions: int) -> Document:
    """Return a note with as many mentions as words."""
    spans = tuple(Span(4 * n, 4 * n + 3, "Drug") for n in range(mentions))
    return Document(name, "abc " * max(1, mentions), spans, patient=patient)


NOTES = (note("1", "p", 2), note("2", "q", 40), note("3", "p", 1), note("4", "r", 0))


def site_of(valid: tuple[Document, ...] = NOTES) -> SiteData:
    """Return a site with these validation notes."""
    return replace(patients(), valid=valid)


def ended(
    monkeypatch: pytest.MonkeyPatch,
    valid: tuple[Document, ...] = NOTES,
    **settings: Any,
) -> DPSite:
    """Return a site after the only round of its job.

    Its model finds every other mention, and a false one in each note.
    """
    site = make_private_site(
        site_of(valid), rounds=1, **{"privacy": PRIVACY, **settings}
    )
    site.noisy_gradients(theta(site), round=0)

    def predict(documents: list[Document]) -> tuple[Document, ...]:
        wrong = Span(1, 2, "Drug")
        return tuple(replace(d, spans=(*d.spans[::2], wrong)) for d in documents)

    monkeypatch.setattr(site.site.model, "predict", predict)
    return site


def without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the noise by zeros."""
    zeros = lambda stream, count: np.zeros(count, np.int64)  # noqa: E731
    monkeypatch.setattr(private, "draw_discrete_gaussian", zeros)


def read_counts(site: DPSite) -> np.ndarray:
    """Return (3,) noisy counts of right, predicted and annotated mentions."""
    answer = site.noisy_counts(theta(site), round=0)
    assert (answer.weight, dict(answer.metrics), [*answer.tensors]) == (
        1.0,
        {},
        [COUNTS],
    )
    assert answer.tensors[COUNTS].dtype == torch.int64
    return answer.tensors[COUNTS].double().numpy() * site.promise.count_grid


def test_a_unit_changes_counts_by_at_most_the_clip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The right, predicted and annotated mentions of each patient are counted by hand.

    Those of q, (20, 21, 40), are scaled to a length of 20.
    """
    without_noise(monkeypatch)
    full_counts = read_counts(ended(monkeypatch))
    expected = {"p": [2.0, 4.0, 3.0], "q": [20.0, 21.0, 40.0], "r": [0.0, 1.0, 0.0]}
    length = float(np.linalg.norm(expected["q"]))
    expected["q"] = [n * COUNTED / length for n in expected["q"]]
    for patient, contribution in expected.items():
        without = read_counts(
            ended(monkeypatch, tuple(d for d in NOTES if d.patient != patient))
        )
        assert np.linalg.norm(full_counts - without) <= COUNTED
        np.testing.assert_allclose(
            full_counts - without, contribution, rtol=0, atol=1e-6
        )


def test_each_answer_has_fresh_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The site has no patients, so its answer is noise alone.

    With three sites, its share has the standard deviation σ · 20 / √2. A χ² test over
    150 secrets has p > 1e-4.
    """
    nobody, answers = ended(monkeypatch, ()), []
    for number in range(150):
        nobody._noise_secret = bytes([number]) * 32
        answers.append(read_counts(nobody) / (2.0 * COUNTED / math.sqrt(2)))
    flat = np.concatenate(answers)
    low, high = stats.chi2.ppf([5e-5, 1 - 5e-5], len(flat))
    assert low < float(flat @ flat) < high
    first, again = ended(monkeypatch), ended(monkeypatch)
    assert (
        read_counts(first) == read_counts(again)
    ).all()  # what is made again is the same
    difference = read_counts(ended(monkeypatch, NOTES[1:])) - read_counts(first)
    assert (
        np.abs(difference[1:]).max() > 1e3 / SCALE
    )  # not the counts' difference alone
    assert not np.allclose(difference, np.round(difference), atol=1e-3)


def test_an_answer_is_the_sum_of_counts_and_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The site has no patients, and all noise is 7."""
    sevens = lambda stream, count: np.full(count, 7)  # noqa: E731
    monkeypatch.setattr(private, "draw_discrete_gaussian", sevens)
    nobody = ended(monkeypatch, ())
    assert nobody.noisy_counts(theta(nobody), round=0).tensors[COUNTS].tolist() == [
        7,
        7,
        7,
    ]


@pytest.mark.parametrize("clipped", [True, False])
def test_an_attacker_who_knows_all_other_patients_guesses_no_better_than_promised(
    clipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attacker guesses whether a patient with 400 mentions is in the data.

    The best test subtracts the counts of the others and projects the rest onto the
    counts of this patient. With Gaussian noise it is right with probability Φ(1 / 2σ).
    The ε of so many right guesses, by Clopper and Pearson at 1 - 1e-4, is below the
    promised one. It is above it if the counts are not clipped.
    """
    if not clipped:
        exact = private.clip_to_grid
        monkeypatch.setattr(
            private,
            "clip_to_grid",
            lambda tensors, clip, grids: exact(tensors, 1e9, grids),
        )
    privacy = {**PRIVACY, "counts": 3.0, "where": "site"}
    others = (NOTES[0], *NOTES[2:])
    neighbours = ((*others, note("2", "q", 400)), others)
    sites = [ended(monkeypatch, notes, privacy=privacy) for notes in neighbours]
    secret, contribution = bytes(32), np.array([200.0, 201.0, 400.0])
    known, right = np.array([2.0, 5.0, 3.0]), 0
    length = COUNTED if clipped else float(np.linalg.norm(contribution))
    for number in range(trials := 200):
        inside = number % 2
        site = sites[1 - inside]
        site._noise_secret = secret[:30] + number.to_bytes(2, "big")
        score = float(
            (read_counts(site) - known) @ contribution / np.linalg.norm(contribution)
        )
        right += (score > length / 2) == inside
    least = float(stats.beta.ppf(1e-4, right, trials - right + 1))
    refuted = math.log(least / (1 - least))
    promised = compute_epsilon(3.0, 1e-5, 1.0, 1)
    assert (refuted < promised) == clipped
    sure = float(stats.norm.cdf(1 / 6))
    assert not clipped or stats.binomtest(right, trials, sure).pvalue > 1e-4


def test_counts_are_sent_only_after_training_and_only_if_requested() -> None:
    early = make_private_site(site_of(), rounds=2, privacy=PRIVACY)
    with pytest.raises(RefusedError, match="sends no counts, or only after training"):
        early.noisy_counts(theta(early), round=0)
    site = make_private_site(site_of(), rounds=1)
    site.noisy_gradients(theta(site), round=0)
    with pytest.raises(RefusedError, match="the job sends no counts"):
        site.noisy_counts(theta(site), round=0)


def test_an_error_of_a_model_does_not_reveal_the_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A refusal for parameters that are NaN would reveal that a note was read."""
    without_noise(monkeypatch)
    site = make_private_site(site_of(), rounds=1, privacy=PRIVACY)
    site.noisy_gradients(theta(site), round=0)
    broken = {
        name: torch.full_like(value, math.nan) for name, value in theta(site).items()
    }
    assert not site.noisy_counts(broken, round=0).tensors[COUNTS].any()


def test_counts_of_indistinguishable_units_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r'counts = 2.0: counts are of whole notes.*"document"'
    ):
        config_of(patients(), privacy={"counts": 2.0, "unit": "sentence"})
    with pytest.raises(ConfigError, match=r"counts = 0\.01: expected at least 0.1"):
        config_of(patients(), privacy={"counts": 0.01})
    unknown = tuple(replace(d, patient=None) for d in NOTES)
    with pytest.raises(ConfigError, match=r"4 of 4 .* documents .* name no patient"):
        make_private_site(site_of(unknown), privacy=PRIVACY)
    table = {
        "method": "pretrain",
        "synthetic": {},
        "privacy": {"epsilon": 1.0, "counts": 2.0},
    }
    with pytest.raises(ConfigError, match="nothing to count"):
        parse_job(table, "job", Path(), "job.toml")


def test_a_run_shows_a_score_and_its_privacy_cost(tmp_path: Path) -> None:
    """The last line of metrics.jsonl has the score.

    ε is that of the rounds and the counts together.
    """
    privacy = {"noise": 1.0, "rate": 0.5, "unit": "document", "counts": 3.0}
    table = {**TABLE, "conditions": ["federated"], "privacy": privacy}
    result = simulate(parse_job(table, "job", Path(), "job.toml"), tmp_path)
    lines = [
        json.loads(line)
        for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert ["valid_f1" in line for line in lines] == [False, True]
    assert 0 <= lines[-1]["valid_f1"] <= 1
    promised = result.privacy["federated"]
    assert (
        promised["epsilon"]
        == compute_epsilon(1.0, 1e-5, 0.5, 4, 3.0)
        > compute_epsilon(1.0, 1e-5, 0.5, 4)
    )
    assert promised["counts"] == 3.0
