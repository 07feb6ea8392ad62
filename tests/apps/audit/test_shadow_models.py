"""What trained models remember: members, names and numbers."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from tiny_jobs import TABLE, corpus
from tiny_models import save_bert

from fednotes.apps.audit import Scene, Trial
from fednotes.apps.audit.attacks import membership, memorisation
from fednotes.apps.audit.attacks.membership import compute_likelihood_ratios
from fednotes.apps.audit.attacks.memorisation import make_ranking_trial
from fednotes.apps.audit.shadow import models, secrets
from fednotes.apps.audit.shadow.mentions import AnnotatedNotes
from fednotes.apps.audit.shadow.notes import (
    MaskedText,
    PlainNotes,
    measure_masked_losses,
    tokenize_beginning,
)
from fednotes.apps.audit.shadow.secrets import Secret
from fednotes.apps.audit.shadow.subject import convert_to_log_odds
from fednotes.core.errors import DataError
from fednotes.core.types import Document, SiteData, Span, TagSet
from fednotes.data.notes import Note
from fednotes.data.notes.sites import SiteNotes
from fednotes.encoders.language_model import LanguageModelConfig, build_language_model
from fednotes.jobs.job import load_sites
from fednotes.jobs.job_file import parse_job

NAMES = memorisation.ATTACKS[:2]  # planted once, and ten times
CANARIES = memorisation.ATTACKS[2:]


LONG = {"epochs": 30, "learning_rate": 0.03, "select": "last"}


PRIVATE = {"epsilon": 8.0, "delta": 1e-5, "unit": "document", "rate": 0.5}


def scene(**tables: Any) -> Scene:
    """Return a job on one site and a tagger with many words; `tables` change it."""
    table = copy.deepcopy(TABLE)
    table["synthetic"] = {"sites": 1, "sentences": 30}
    table["model"] |= {
        "hashed_words": 2048,
        "word_dim": 16,
        "cnn_filters": 16,
        "lstm_units": 12,
    }
    table["training"] |= LONG | {"epochs": 20}
    table |= tables
    job = parse_job(table, "job", Path(), "job")
    return Scene(job, load_sites(job))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use fewer models, units and secrets, so that a model is trained in a second."""
    monkeypatch.setattr(models, "MODELS", 4)
    monkeypatch.setattr(models, "CONTROL_UNITS", 12)
    monkeypatch.setattr(secrets, "TIMES_PLANTED", {1: 4, 10: 1})


def test_attacks_on_predictions_are_reported_as_not_tried(tmp_path: Path) -> None:
    """They are missing, which does not mean that predictions reveal nothing."""
    for name in ("a", "b", "public"):
        corpus(tmp_path / f"{name}.conll", "Drug", f"{name}x")
    table = {
        "method": "fedmd",
        "model": TABLE["model"],
        "sites": {
            name: {"path": f"{name}.conll", "public": "public.conll"} for name in "ab"
        },
    }
    job = parse_job(table, "job", tmp_path, "job")
    whole = Scene(job, load_sites(job))
    for attack in (*membership.NOTE_ATTACKS, *NAMES):
        leak = attack.run(whole)
        assert leak.applies
        assert leak.why.startswith("could not be tried: no parameter leaves a site")


def test_membership_is_the_ratio_of_two_normal_densities() -> None:
    """Compute equation 3 of Carlini et al. 2022 for each unit and model separately.

    Each unit contributes n − 1 degrees of freedom to the variance; a new value that is
    predicted from n values has the variance σ² (1 + 1/n).
    """
    rng = np.random.default_rng(1)
    inside = rng.random((9, 6)).argsort(1) < 3
    logits = rng.normal(size=(9, 6)) + 2 * inside
    scores = compute_likelihood_ratios(logits, inside)
    for model in range(6):
        other_models = [candidate for candidate in range(6) if candidate != model]
        density = []
        for is_member in (True, False):
            logits_by_unit = [
                [logits[u, m] for m in other_models if inside[u, m] == is_member]
                for u in range(9)
            ]
            squares = sum(
                ((np.array(x) - np.mean(x)) ** 2).sum() for x in logits_by_unit
            )
            deviation = (squares / sum(len(x) - 1 for x in logits_by_unit)) ** 0.5
            wide = [deviation * (1 + 1 / len(x)) ** 0.5 for x in logits_by_unit]
            density.append(
                [
                    NormalDist(np.mean(x), w)
                    for x, w in zip(logits_by_unit, wide, strict=True)
                ]
            )
        for unit in range(9):
            ratio = [
                np.log(densities[unit].pdf(logits[unit, model]))
                for densities in density
            ]
            assert scores[unit, model] == pytest.approx(ratio[0] - ratio[1])


def test_models_that_remember_nothing_reveal_no_member() -> None:
    """Neither the number of models with a unit nor its level reveals anything."""
    rng = np.random.default_rng(2)
    inside = rng.random((8000, 4)) < 0.5
    scores = compute_likelihood_ratios(
        rng.normal(size=(8000, 4)) + rng.normal(0, 9, (8000, 1)), inside
    )
    trial = Trial.from_scores(scores[inside], scores[~inside])
    # The standard error of the area is 0.003.
    assert trial.details["auc"] == pytest.approx(0.5, abs=0.02)
    assert trial.success < 0.02


def test_exposure_is_computed_from_the_rank() -> None:
    """By hand: the first of eight has log2 8 = 3 bits, the last none; ties share."""
    first, last = [9.0, *range(7)], [-1.0, *range(7)]
    scores = [6.0, *range(7)]
    for rows, bits in (
        ([first], 3),
        ([last], 0),
        ([scores], 3 - np.log2(1.5)),
        ([first, last], 1.5),
    ):
        assert make_ranking_trial(np.array(rows), models=1).details[
            "exposure"
        ] == pytest.approx(bits)


def test_a_planted_name_replaces_a_mention() -> None:
    """Other mentions keep their words; no copy of a judged note is trained on."""
    spans = (
        Span(5, 12, "Drug"),
        Span(17, 21, "Drug"),
        Span(17, 26, "Time"),
        Span(30, 34, "Drug"),
    )
    notes = tuple(
        Document(f"n{i}", f"Took aspirin for pain early, {i} mg.", spans, patient="p")
        for i in range(10)
    )
    data = SiteData("s", TagSet(("Drug", "Time")), notes, (), ())
    annotated = AnnotatedNotes(data, np.random.default_rng(1), 8, "document")
    inside = np.arange(8) % 2 == 0
    secret = Secret("name", ("Zélie 😀 Brandor", "x"), 1, (3,))
    data_with_secret = annotated.make_training_data(
        inside,
        [(secret, at := annotated.num_carriers - 1)],
        copies=1,
        with_others=True,
    )
    kept_notes = {
        id(u[0])
        for u, is_inside in zip(annotated.judged_units, inside, strict=True)
        if is_inside
    }
    assert (len(annotated.judged_units), len(annotated.others)) == (8, 2)
    assert {id(note) for note in data_with_secret.train[:-1]} == kept_notes | {
        id(u[0]) for u in annotated.others
    }
    planted, before = data_with_secret.train[-1], annotated.others[at][0]
    assert planted.text[-5:] == before.text[-5:]
    texts = [planted.text[s.start : s.end] for s in planted.spans]
    assert texts[0] == secret.guesses[0]
    assert texts[1:] == [before.text[s.start : s.end] for s in before.spans][1:]
    assert [s.label for s in planted.spans] == [s.label for s in before.spans]


def test_each_planted_note_has_its_own_patient() -> None:
    """A privacy budget per patient needs a patient for each note."""
    notes = [Note(f"n{i}", "Pain in the knee.", f"p{i}", None, "f") for i in range(3)]
    data = SiteNotes("s", lambda: iter(notes), lambda: iter(()), 3, 3, 0, 0, 1, 1, 1)
    plain = PlainNotes(data, np.random.default_rng(1), 3)
    sown = [(Secret("name", ("A B", "C D"), 10, (0,)), 0)] * 2
    patients = [
        note.patient
        for note in plain.make_training_data(
            np.array([True] * 3), sown, copies=1, with_others=True
        ).train()
    ]
    assert len({*patients} - {None}) == 5
    with pytest.raises(DataError, match="training diverged"):
        convert_to_log_odds(np.array([0.1, np.nan]))


def test_losses_of_masked_words_equal_transformers(tmp_path: Path) -> None:
    """Compare with transformers, row by row without padding."""
    from transformers import AutoModelForMaskedLM

    folder = str(save_bert(tmp_path / "bert"))
    model = build_language_model(LanguageModelConfig(folder), 1)
    reference = AutoModelForMaskedLM.from_pretrained(folder).eval()
    texts = [
        tokenize_beginning(model, text)
        for text in ("pain in the left knee", "aspirin daily")
    ]
    masked = [np.eye(len(ids), dtype=bool)[: 3 - at] for at, ids in enumerate(texts)]
    with torch.no_grad():
        losses = measure_masked_losses(
            model, [MaskedText(*text) for text in zip(texts, masked, strict=True)]
        )
        for ids, rows, loss in zip(texts, masked, losses, strict=True):
            expected = 0.0
            for row in rows:
                hidden = np.where(row, model.specials.mask, ids)
                ids_shown = torch.tensor(
                    [[model.specials.cls, *hidden, model.specials.sep]]
                )
                log_probabilities = (
                    reference(input_ids=ids_shown).logits[0, 1:-1].log_softmax(-1)
                )
                expected -= sum(
                    float(log_probabilities[at, ids[at]]) for at in np.flatnonzero(row)
                )
            assert loss == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_models_without_noise_remember_their_notes(few: None) -> None:
    """Only the control, with four models, to save time."""
    audited = scene()
    trials = {
        attack.name: attack.trial(audited.get_control())
        for attack in (*membership.NOTE_ATTACKS, *NAMES)
    }
    assert [name.partition(",")[0] for name in trials] == [
        "membership",
        *["memorised names"] * 2,
    ]
    assert trials.pop("membership").details["auc"] > 0.8
    for trial in trials.values():
        assert trial.low > 0.05
        assert trial.details["exposure"] > 4  # of 6.6; 1.4 by chance


@pytest.mark.slow
@pytest.mark.parametrize("privacy", [None, PRIVATE | {"epsilon": 1.0}])
def test_noise_makes_models_forget_their_notes(
    few: None, monkeypatch: pytest.MonkeyPatch, privacy: dict[str, Any] | None
) -> None:
    """Attacks succeed without noise, and with noise no more often than ε = 1 allows.

    Then a guess at a unit is right at most e^ε times as often as by chance.
    """
    monkeypatch.setattr(models, "MODELS", 8)
    monkeypatch.setattr(models, "CONTROL_UNITS", 16)
    more = {"synthetic": {"sites": 1, "sentences": 60}}
    settings = {
        "training": TABLE["training"] | LONG | {"epochs": 15},
        "privacy": privacy,
    } | more
    audited = (
        scene(**settings)
        if privacy
        else scene(training=TABLE["training"] | LONG, **more)
    )
    for attack in (*membership.NOTE_ATTACKS, *memorisation.ATTACKS):
        leak = attack.run(audited)
        if "canaries" in leak.attack:
            assert leak.why == "the model finds mentions and predicts no words"
            continue
        assert leak.success is not None
        assert leak.low is not None
        if privacy:
            ten = "10 times" in leak.attack  # ten units, so 10 ε
            assert leak.low <= math.e * leak.chance or ten
            assert leak.chance < leak.success + 0.05 or ten
            assert leak.details["auc"] == pytest.approx(0.5, abs=0.2) or ten
        else:
            assert leak.proven
            assert leak.low > leak.chance


@pytest.mark.slow
def test_a_language_model_reveals_numbers_without_noise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A tiny BERT, trained as a whole: first the control, then the job with noise."""
    monkeypatch.setattr(models, "MODELS", 2)
    monkeypatch.setattr(models, "CONTROL_UNITS", 4)
    monkeypatch.setattr(secrets, "TIMES_PLANTED", {1: 1, 10: 2})
    table = {
        "method": "pretrain",
        "synthetic": {"sites": 1, "sentences": 20},
        "model": {"encoder": str(save_bert(tmp_path / "bert")), "train": "all"},
        "training": {
            "cycles": 40,
            "length": 32,
            "batch_size": 8,
            "learning_rate": 5e-3,
        },
        "privacy": PRIVATE
        | {"where": "site", "epsilon": 0.5},  # 5 for ten notes together
    }
    table["training"] |= {"min_tokens": 0, "min_steps": 0, "head_cycles": 0}
    job = parse_job(table, "job", Path(), "job")
    audited = Scene(job, load_sites(job))
    for attack in CANARIES:
        assert attack.name.startswith("canaries")
        assert attack.trial(audited.get_control()).details["exposure"] > 5  # of 6.6
    for attack in CANARIES:
        assert attack.trial(audited).low < 0.01
