"""What a trained model remembers: members, names and numbers are found without defence, and not
under noise."""

from __future__ import annotations

import copy
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from tiny_jobs import TABLE
from tiny_models import save_bert

from fednotes.apps.audit import Scene, Trial, attacks, memory
from fednotes.core.errors import DataError
from fednotes.core.types import Document, SiteData, Span, TagSet
from fednotes.data.notes import Note
from fednotes.data.notes.sites import SiteNotes
from fednotes.encoders.language_model import LanguageModelConfig, build_language_model
from fednotes.jobs.job import load_sites
from fednotes.jobs.job_file import parse_job

LONG = {"epochs": 30, "learning_rate": 0.03, "select": "last"}
PRIVATE = {"epsilon": 8.0, "delta": 1e-5, "unit": "document", "rate": 0.5}


def scene(**tables: Any) -> Scene:
    """Generated sites and a tagger with many words; `tables` change the job."""
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
    """Fewer of everything, so that a model is trained in a second."""
    monkeypatch.setattr(memory, "MODELS", 4)
    monkeypatch.setattr(memory, "CONTROL", 12)
    monkeypatch.setattr(memory, "PLANTED", {1: 4, 10: 1})


def test_membership_is_the_ratio_of_two_normal_densities() -> None:
    """Carlini et al. 2022, equation 3, for each unit and model by itself, with the variances that
    n − 1 degrees of freedom of each unit give, of a value that is predicted from n."""
    rng = np.random.default_rng(1)
    inside = rng.random((9, 6)).argsort(1) < 3
    logits = rng.normal(size=(9, 6)) + 2 * inside
    scores = memory.lira(logits, inside)
    for model in range(6):
        rest = [other for other in range(6) if other != model]
        density = []
        for seen in (True, False):
            own = [
                [logits[u, m] for m in rest if inside[u, m] == seen] for u in range(9)
            ]
            off = sum(((np.array(x) - np.mean(x)) ** 2).sum() for x in own)
            deviation = (off / sum(len(x) - 1 for x in own)) ** 0.5
            wide = [deviation * (1 + 1 / len(x)) ** 0.5 for x in own]
            density.append(
                [NormalDist(np.mean(x), w) for x, w in zip(own, wide, strict=True)]
            )
        for unit in range(9):
            ratio = [np.log(of[unit].pdf(logits[unit, model])) for of in density]
            assert scores[unit, model] == pytest.approx(ratio[0] - ratio[1])


def test_who_remembers_nothing_tells_no_member() -> None:
    """Noise alone, of four models: neither how many others had a unit nor its own level tells."""
    rng = np.random.default_rng(2)
    inside = rng.random((8000, 4)) < 0.5
    scores = memory.lira(
        rng.normal(size=(8000, 4)) + rng.normal(0, 9, (8000, 1)), inside
    )
    told = Trial.of(scores[inside], scores[~inside])
    assert told.details["auc"] == pytest.approx(
        0.5, abs=0.02
    )  # its standard error is 0.003
    assert told.success < 0.02


def test_exposure_is_of_the_rank() -> None:
    """By hand: of eight the first has log2 8 = 3 bits, the last none; of two that are equal and
    best each is the first or the second."""
    first, last = [9.0, *range(7)], [-1.0, *range(7)]
    both = [6.0, *range(7)]
    for rows, bits in (
        ([first], 3),
        ([last], 0),
        ([both], 3 - np.log2(1.5)),
        ([first, last], 1.5),
    ):
        assert memory.guessed(np.array(rows)).details["exposure"] == pytest.approx(bits)


def test_a_name_stands_in_the_place_of_a_mention() -> None:
    """All else that is annotated keeps its words, and only half of what is judged is trained on,
    of which there is no copy."""
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
    own = memory._Mentions(data, np.random.default_rng(1), 8, "document")
    inside = np.arange(8) % 2 == 0
    secret = memory.Secret("name", ("Zélie 😀 Brandor", "x"), 1, (3,))
    given = own.training(inside, [(secret, at := own.carriers - 1)], 1)
    kept = {id(u[0]) for u, here in zip(own.judged, inside, strict=True) if here}
    assert (len(own.judged), len(own.rest)) == (8, 2)
    assert {id(note) for note in given.train[:-1]} == kept | {
        id(u[0]) for u in own.rest
    }
    planted, before = given.train[-1], own.rest[at][0]
    assert planted.text[-5:] == before.text[-5:]
    texts = [planted.text[s.start : s.end] for s in planted.spans]
    assert texts[0] == secret.right[0]
    assert texts[1:] == [before.text[s.start : s.end] for s in before.spans][1:]
    assert [s.label for s in planted.spans] == [s.label for s in before.spans]


def test_planted_notes_are_of_patients_and_losses_are_numbers() -> None:
    """A promise of each patient needs whose each note is, that of an invented name too."""
    notes = [Note(f"n{i}", "Pain in the knee.", f"p{i}", None, "f") for i in range(3)]
    data = SiteNotes("s", lambda: iter(notes), lambda: iter(()), 3, 3, 0, 0, 1, 1, 1)
    own = memory._Notes(data, np.random.default_rng(1), 3)
    sown = [(memory.Secret("name", ("A B", "C D"), 10, (0,)), 0)] * 2
    patients = [
        note.patient for note in own.training(np.array([True] * 3), sown, 1).train()
    ]
    assert len({*patients} - {None}) == 5
    with pytest.raises(DataError, match="astray"):
        memory._logit(np.array([0.1, np.nan]))


def test_masked_words_cost_what_the_model_s_own_logits_say(tmp_path: Path) -> None:
    """Against transformers: texts of several lengths, each row by itself without padding."""
    from transformers import AutoModelForMaskedLM

    folder = str(save_bert(tmp_path / "bert"))
    model = build_language_model(LanguageModelConfig(folder), 1)
    other = AutoModelForMaskedLM.from_pretrained(folder).eval()
    texts = [
        memory._ids(model, text) for text in ("pain in the left knee", "aspirin daily")
    ]
    masked = [np.eye(len(ids), dtype=bool)[: 3 - at] for at, ids in enumerate(texts)]
    with torch.no_grad():
        losses = memory._guesses(model, [*zip(texts, masked, strict=True)])
        for ids, rows, loss in zip(texts, masked, losses, strict=True):
            wanted = 0.0
            for row in rows:
                hidden = np.where(row, model.specials.mask, ids)
                given = torch.tensor(
                    [[model.specials.cls, *hidden, model.specials.sep]]
                )
                told = other(input_ids=given).logits[0, 1:-1].log_softmax(-1)
                wanted -= sum(float(told[at, ids[at]]) for at in np.flatnonzero(row))
            assert loss == pytest.approx(wanted, rel=1e-4)


def test_models_remember_without_a_promise(few: None) -> None:
    """Four models of the control alone, for time."""
    made = scene()
    told = {attack.name: attack.trial(made.plain) for attack in memory.ATTACKS[:3]}
    assert [name.partition(",")[0] for name in told] == [
        "membership",
        *["memorised names"] * 2,
    ]
    assert told.pop("membership").details["auc"] > 0.8
    for trial in told.values():
        assert trial.low > 0.05
        assert trial.details["exposure"] > 4  # of 6.6; 1.4 by chance


@pytest.mark.slow
@pytest.mark.parametrize("privacy", [None, PRIVATE | {"epsilon": 1.0}])
def test_noise_makes_them_forget(
    few: None, monkeypatch: pytest.MonkeyPatch, privacy: dict[str, Any] | None
) -> None:
    """Each succeeds on the control and without a promise, and falls to chance with one."""
    monkeypatch.setattr(memory, "MODELS", 8)
    monkeypatch.setattr(memory, "CONTROL", 16)
    more = {"synthetic": {"sites": 1, "sentences": 60}}
    settings = {
        "training": TABLE["training"] | LONG | {"epochs": 15},
        "privacy": privacy,
    } | more
    made = (
        scene(**settings)
        if privacy
        else scene(training=TABLE["training"] | LONG, **more)
    )
    for attack in memory.ATTACKS[:5]:
        leak = attack.on(made)
        if "canaries" in leak.attack:
            assert leak.why == "the model says where mentions are, and no words"
            continue
        assert leak.success is not None
        assert leak.low is not None
        if privacy:
            ten = "10 times" in leak.attack  # ten units, of which 10 ε are promised
            assert leak.low <= leak.chance < leak.success + 0.05 or ten
            assert leak.details["auc"] == pytest.approx(0.5, abs=0.2) or ten
        else:
            assert leak.proven
            assert leak.low > leak.chance


@pytest.mark.slow
def test_a_language_model_tells_numbers_and_no_more_under_noise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A tiny BERT of which all is trained: first the control, then the job with its promise."""
    for name, small in {"MODELS": 2, "CONTROL": 4, "PLANTED": {1: 1, 10: 2}}.items():
        monkeypatch.setattr(memory, name, small)
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
        | {"where": "site", "epsilon": 0.5},  # of ten notes together 5
    }
    table["training"] |= {"min_tokens": 0, "min_steps": 0, "head_cycles": 0}
    job = parse_job(table, "job", Path(), "job")
    made = Scene(job, load_sites(job))
    for attack in memory.ATTACKS[3:5]:
        assert attack.name.startswith("canaries")
        assert attack.trial(made.plain).details["exposure"] > 5  # of 6.6
    for attack in memory.ATTACKS[3:5]:
        assert attack.trial(made).low < 0.01


def test_they_are_found_by_lying_there() -> None:
    assert {*memory.ATTACKS} <= {*attacks()}
