"""Differential privacy of pre-training: units, their effect, and the noise."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from small_tokens import tokens_of

from fednotes.core.errors import ConfigError
from fednotes.data.clinical import list_note_sentences
from fednotes.data.notes import Note
from fednotes.data.notes.sites import SiteNotes
from fednotes.encoders.packing import gather_sequences, mask, plan_full
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.simulate import simulate
from fednotes.methods.pretrain import METHOD as PRETRAIN
from fednotes.methods.private import DPMethod
from fednotes.privacy import training as private
from fednotes.privacy.noise import SCALE
from fednotes.privacy.promise import Privacy

WORDS = "patient has pain in the chest left knee was given aspirin daily no fever cough".split()
OWNERS = "abac"  # the notes of a patient need not stand together
LENGTH = 24


def notes(owners: Sequence[str | None] = OWNERS) -> list[Note]:
    """Return notes of four sentences by number, and one without any readable text."""
    corpus = []
    for number, owner in enumerate(owners):
        rng = np.random.default_rng(number)
        text = " ".join(" ".join(rng.choice(WORDS, 9)) + "." for _ in range(4))
        corpus.append(Note(f"n{number}", text, owner, None, "made"))
    return [corpus[0], Note("empty", "\u200b", owners[0], None, "made"), *corpus[1:]]


def site_of(site_notes: Sequence[Note]) -> SiteNotes:
    patients = len({note.patient for note in site_notes})
    return SiteNotes(
        "a", lambda: iter(site_notes), lambda: iter(()), len(site_notes), 0, patients, 0, 1, 0, 1
    )  # fmt: skip


def config_of(bert: Path, model: Any = (), **privacy: Any) -> Any:
    privacy_options = {"noise": 1.5, "rate": 0.5, "clip": 0.25} | privacy
    settings = PRETRAIN.dp.required_settings | {
        "length": LENGTH,
        "batch_size": 4,
        "cycles": 2,
    }
    named = PRETRAIN.read_model_config(
        {"encoder": str(bert), "train": "lora", **dict(model)}
    )
    return PRETRAIN.config_class(
        model=named, privacy=Privacy(**privacy_options), seed=5, sites=3, **settings
    )


def make_private_site(
    bert: Path,
    tmp_path: Path,
    site_notes: Sequence[Note] | None = None,
    model: Any = (),
    **privacy: Any,
) -> Any:
    site, config = (
        site_of(notes() if site_notes is None else site_notes),
        config_of(bert, model, **privacy),
    )
    kind: Any = DPMethod(PRETRAIN).make_site
    return kind(site, config, secret=bytes(range(32)), cache=tmp_path)


def theta(bert: Path) -> dict[str, torch.Tensor]:
    return {
        n: v.clone()
        for n, v in PRETRAIN.dp.make_initial_parameters(config_of(bert), {}).items()
    }


def draw_units(
    monkeypatch: pytest.MonkeyPatch, units: Sequence[int], noise: bool = False
) -> None:
    """Draw these units in each round, and add no noise to their sum."""
    picked = lambda stream, count, rate: np.isin(np.arange(count), units)  # noqa: E731
    monkeypatch.setattr(private, "draw_units", picked)
    if not noise:
        zeros = lambda stream, count: np.zeros(count, np.int64)  # noqa: E731
        monkeypatch.setattr(private, "draw_discrete_gaussian", zeros)


def texts(site: Any) -> list[list[list[int]]]:
    """Return the ids of each sequence of each unit, without marks."""
    ids, plan = site.site.train_set.ids, site.site.apart
    rows = [
        [
            int(i)
            for a, b in plan.stretches[plan.bounds[r] : plan.bounds[r + 1]]
            for i in ids[a:b]
        ]
        for r in range(len(plan))
    ]
    return [[rows[r] for r in unit] for unit in site.units]


def test_a_unit_has_only_the_tokens_of_its_notes(bert: Path, tmp_path: Path) -> None:
    """Against the tokens of its notes, found by hand: in sequences that are the same
    whoever else is at the site, each token once."""
    site = make_private_site(bert, tmp_path)
    tokenize = site.site.model.tokenizer.tokenize
    ids_by_note = [
        [i for line in tokenize(list_note_sentences(n.text)) for i in line]
        for n in notes()
    ]
    assert site.site.train_set.dropped == 1
    assert not ids_by_note[1]
    by_patient = [ids_by_note[0] + ids_by_note[3], ids_by_note[2], ids_by_note[4]]
    assert [sorted(chain.from_iterable(unit)) for unit in texts(site)] == [
        sorted(unit_notes) for unit_notes in by_patient
    ]
    assert all(len(row) <= LENGTH - 2 for unit in texts(site) for row in unit)
    without = make_private_site(
        bert, tmp_path, [n for n in notes() if n.patient != "b"]
    )
    assert texts(without) == [texts(site)[0], texts(site)[2]]
    documents = make_private_site(bert, tmp_path, unit="document")
    assert [sorted(chain.from_iterable(unit)) for unit in texts(documents)] == [
        sorted(unit_notes) for unit_notes in ids_by_note if unit_notes
    ]


def test_units_that_cannot_be_distinguished_are_refused(
    bert: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r'unit = "sentence".*set unit = "document"'):
        make_private_site(bert, tmp_path, unit="sentence")
    unknown = notes(["a", None, "b"])
    with pytest.raises(
        ConfigError, match=r'1 of 4 training documents.*unit = "document"'
    ):
        make_private_site(bert, tmp_path, unknown)
    make_private_site(bert, tmp_path, unknown, unit="document")
    with pytest.raises(
        ConfigError, match=r'"mlm\+nsp" puts text of one patient beside another'
    ):
        config_of(bert, {"objective": "mlm+nsp"})


@pytest.mark.parametrize("clip", [0.01, 1e6])
def test_a_unit_changes_an_update_by_at_most_the_clip(
    bert: Path, tmp_path: Path, clip: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By brute force, with a unit and without it: to the bit its own vector, min(C,
    |g|) long."""

    def sums(units: Sequence[int]) -> dict[str, torch.Tensor]:
        draw_units(monkeypatch, units)
        site = make_private_site(bert, tmp_path, clip=clip)
        return dict(site.noisy_gradients(theta(bert), round=0).tensors)

    grid, together = (
        make_private_site(bert, tmp_path, clip=clip).promise.grids[0],
        sums([0, 1, 2]),
    )
    for unit in range(3):
        without, alone = sums([u for u in range(3) if u != unit]), sums([unit])
        assert all(torch.equal(together[n] - without[n], alone[n]) for n in together)
        square = sum(
            float((value.double() * grid).square().sum()) for value in alone.values()
        )
        assert 0 < square <= clip**2
        assert clip > 1 or square == pytest.approx(clip**2, rel=2e-3)


def test_a_clipped_gradient_is_that_of_the_loss_of_the_unit(
    bert: Path, tmp_path: Path
) -> None:
    """Against torch's gradients of masked sequences of the unit's notes, packed by
    themselves."""
    site = make_private_site(bert, tmp_path, clip=0.02)
    model, unit_notes = site.site.model, [n for n in notes() if n.patient == "a"]
    model.train(True)
    torch.manual_seed(3)
    clipped = site.clip_gradient(site.units[0])
    torch.manual_seed(3)
    rng = np.random.default_rng(int(torch.randint(2**62, ())))
    split = [
        lines
        for n in unit_notes
        if (lines := model.tokenizer.tokenize(list_note_sentences(n.text)))
    ]
    tokens = tokens_of([lines for lines in split if any(lines)])
    plan = plan_full(tokens, LENGTH, 5, 0)
    batch = gather_sequences(tokens, plan, np.arange(len(plan)), model.specials)
    loss = model.loss(
        batch, mask(batch.ids, model.specials, model.vocabulary, rng)
    ).loss
    parameters = model.trainable()
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    flat = [np.zeros(0) if g is None else g.double().numpy().ravel() for g in gradients]
    norm = np.linalg.norm(np.concatenate(flat))
    assert norm > 0.02
    for name, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            expected = gradient.double().numpy() * (0.02 / norm) / site._grids[name]
            # towards zero by one at most, and float32's rounding of numbers of about s
            # at most
            assert np.abs(clipped[name].numpy() - expected).max() <= 1 + 1e-4 * SCALE


def test_an_update_has_the_promised_noise(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nobody in the round, a site's share of three sites': s of the grid, by χ², p
    > 1e-4; and nothing but that leaves."""
    draw_units(monkeypatch, [], noise=True)
    site = make_private_site(bert, tmp_path)
    answer = site.noisy_gradients(theta(bert), round=0)
    noise = (
        np.concatenate([v.double().numpy().ravel() for v in answer.tensors.values()])
        / SCALE
    )
    low, high = stats.chi2.ppf([5e-5, 1 - 5e-5], len(noise))
    assert low < float(noise @ noise) < high
    assert (answer.weight, dict(answer.metrics)) == (1.0, {})
    end = site.finish(theta(bert))
    assert (dict(end.tensors), dict(end.metrics)) == ({}, {})


def test_a_job_states_what_it_promises(bert: Path, tmp_path: Path) -> None:
    """From a job file to the summary; settings that tell more than the sums are
    refused."""
    table: dict[str, Any] = {
        "method": "pretrain",
        "conditions": ["federated"],
        "synthetic": {"sites": 2, "sentences": 20},
        "model": {"encoder": str(bert), "train": "lora"},
        "training": {"cycles": 1, "length": 24, "batch_size": 8},
        "privacy": {"epsilon": 8.0, "rate": 0.5, "unit": "document"},
    }
    result = simulate(parse_job(table, "job", Path(), "job.toml"), tmp_path / "run")
    promise = result.privacy["federated"]
    assert (promise["rounds"], promise["unit"]) == (2, "document")
    assert 7.9 < promise["epsilon"] <= 8.0
    for key, value in (("head_cycles", 1), ("long_cycles", 1), ("server", "adam")):
        wrong = {**table, "training": {**table["training"], key: value}}
        with pytest.raises(
            ConfigError, match=rf"{key} = .*under \[privacy\] it must be"
        ):
            parse_job(wrong, "job", Path(), "job.toml")
