"""`tools/trap.py` can read single sentences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from applications import needs_app

needs_app("deployment")
needs_app("phenotyping")

import trap

from fednotes.apps.deployment.rules.policy import Policy, PolicyRefusal


@pytest.fixture(autouse=True)
def few_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trap, "SENTENCES", 40)


@pytest.mark.parametrize(
    "job",
    [
        "fedner, 8 sentences",
        "fedner, an epoch of Adam",
        "distill, an epoch of Adam",
        "adversarial, an epoch of Adam",
    ],
)
def test_trap_weights_read_neighbours_of_words_through_a_secure_sum(job: str) -> None:
    setting = trap.WORDS[job]
    trapped = trap.words_read(setting, 1, secure=True, honest=False)
    honest = trap.words_read(setting, 1, secure=True, honest=True)
    assert trapped >= 0.25
    assert honest <= 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        "finetune, encoder",
        "finetune, LoRA, one step",
        "pretrain, encoder",
        "personal, LoRA, one step",
    ],
)
def test_trap_weights_of_an_encoder_read_a_sentence_through_a_secure_sum(
    job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trap, "ENCODER_SENTENCES", 20)
    setting = trap.ENCODER_JOBS[job]
    trapped = trap.sentences_read(setting, 1, secure=True, honest=False, tries=2)
    honest = trap.sentences_read(setting, 1, secure=True, honest=True, tries=2)
    assert trapped >= 0.4
    assert honest <= 0.1


@pytest.mark.parametrize("job", [*trap.PATIENT_JOBS])
def test_trap_weights_of_stage_1_read_a_patient_through_a_secure_sum(
    job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trap, "CHOSEN", 3)
    setting = trap.PATIENT_JOBS[job]
    assert trap.patients_read(setting, 1, secure=True, honest=False) == 1
    assert trap.patients_read(setting, 1, secure=True, honest=True) == 0


@pytest.mark.parametrize("job", [*trap.CLASSIFIER_JOBS])
def test_trap_weights_of_classifiers_read_a_patient_through_a_secure_sum(
    job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trap, "CHOSEN", 3)  # a third of them is tried
    setting = trap.CLASSIFIER_JOBS[job]
    assert trap.classifiers_read(setting, 1, secure=True, honest=False) == 1
    assert trap.classifiers_read(setting, 1, secure=True, honest=True) == 0


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        (Policy(min_patients=1000), "min_patients"),
        (Policy(denied_layers=("svm",)), "denied_layers"),
        (Policy(allowed_layers=("network",)), "allowed_layers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_classifiers_are_read_under_the_policy_of_the_sites(
    policy: Policy, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trap, "CHOSEN", 3)
    monkeypatch.setattr(trap, "POLICY", policy)
    setting = trap.CLASSIFIER_JOBS["phenotype, classifiers, an epoch"]
    with pytest.raises(PolicyRefusal) as refusal:
        trap.classifiers_read(setting, 1, secure=True, honest=False)
    assert refusal.value.rule == rule


def test_a_required_secure_sum_does_not_stop_trap_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trap, "CHOSEN", 3)
    monkeypatch.setattr(trap, "POLICY", Policy(secure_sum="required"))
    setting = trap.CLASSIFIER_JOBS["phenotype, classifiers, an epoch"]
    assert trap.classifiers_read(setting, 1, secure=True, honest=False) == 1


def test_words_are_recognised_by_the_signs_of_their_states() -> None:
    rng = np.random.default_rng(0)
    vocabulary, width = 300, trap.SIZES["hidden_size"]
    words = rng.normal(size=(vocabulary, width))
    positions = rng.normal(size=(trap.SIZES["max_position_embeddings"], width))
    types = rng.normal(size=(2, width))
    tables = {"word": words, "position": positions, "token_type": types}
    embeddings = {
        f"embeddings.{name}_embeddings.weight": torch.from_numpy(table)
        for name, table in tables.items()
    }
    sentence_trap = trap.SentenceTrap(embeddings, chosen=40, is_low_rank=True)

    sentence = rng.integers(len(trap.MARKS), vocabulary, size=8)
    flag = 14.0 * sentence_trap.flag.numpy()
    summed = words[sentence] + positions[1:9] + types[0]
    states = summed - summed.mean(axis=1, keepdims=True)
    states = states / states.std(axis=1, keepdims=True) + flag
    pulls = rng.choice([-1e-3, 1e-3], size=(8, 1))
    # a tenth of the coordinates is lost to dropout
    signs_kept = rng.random(states.shape) >= 0.1
    moved = torch.from_numpy(pulls * np.sign(states) * signs_kept)

    assert sentence_trap.name_words(moved) == sentence.tolist()
