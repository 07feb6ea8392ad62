"""Attacks on sites with differential privacy: a lying server learns no more."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fault_net import Net, seal_of
from fault_toy import JOB, SITES
from private_sites import make_private_site, patients, theta
from tiny_models import save_bert

from fednotes.core.errors import ConfigError
from fednotes.core.update import Total
from fednotes.engines.requests import Patience
from fednotes.engines.secure import SecureSum
from fednotes.jobs.job_file import parse_job
from fednotes.methods.finetune import METHOD as FINETUNE
from fednotes.methods.private import DPMethod
from fednotes.privacy import training as private
from fednotes.privacy.noise import SCALE
from fednotes.privacy.training import NOISY, DPSite

SPREAD = 1.2  # of a difference of two noises, in units of s: √2 but for chance


def apart(first: Any, second: Any) -> float:
    """Return the spread of the difference of two answers, in units of a site's
    noise."""
    differences = [
        (first[n] - second[n]).double().numpy().ravel() / SCALE for n in first
    ]
    return float(np.concatenate(differences).std())


def test_sums_that_differ_by_one_step_have_different_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graphics card, a new version of a library or another file of word vectors
    computes another gradient of the same parameters: with the same noise the difference
    would be free of it."""
    first, again = make_private_site(), make_private_site()
    exact = DPSite.clip_gradient

    def inexact(site: DPSite, indices: np.ndarray) -> dict[str, torch.Tensor]:
        clipped = exact(site, indices)
        name = next(iter(clipped))
        return {**clipped, name: clipped[name] + (clipped[name] != 0).long()}

    monkeypatch.setattr(
        private, "draw_units", lambda stream, count, rate: np.ones(count, bool)
    )
    answer = first.noisy_gradients(theta(first), round=0).tensors
    monkeypatch.setattr(DPSite, "clip_gradient", inexact)
    assert apart(answer, again.noisy_gradients(theta(again), round=0).tensors) > SPREAD


def test_dropout_does_not_follow_a_public_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a public seed and a unit's place, a unit that is left out would change the
    dropout of all behind it, and the sum could move by any number of clips: it has to
    be by chance."""
    monkeypatch.setattr(
        private, "draw_units", lambda stream, count, rate: np.ones(count, bool)
    )
    zeros = lambda stream, count: np.zeros(count, np.int64)  # noqa: E731
    monkeypatch.setattr(private, "draw_discrete_gaussian", zeros)
    dropping = replace(make_private_site().site.config.model, dropout=0.5)

    def answer(secret: bytes) -> dict[str, torch.Tensor]:
        site = make_private_site(secret=secret, model=dropping)
        return dict(site.noisy_gradients(theta(site), round=0).tensors)

    first, same, reseeded = (answer(bytes([n]) * 32) for n in (1, 1, 2))
    assert all(torch.equal(first[n], same[n]) for n in first)
    assert not all(torch.equal(first[n], reseeded[n]) for n in first)


def test_sums_with_and_without_a_site_have_different_noise(
    tmp_path: Path,
) -> None:
    """Two of three sites may be summed. The server has a sum of all, sends all back,
    and asks the same of two in another round: with the same answers the difference
    would be the third's, hidden by its share of the noise alone."""
    answers: dict[str, list[Any]] = {site: [] for site in SITES}

    def make(name: str) -> DPSite:
        data = replace(patients(SITES.index(name)), id=name)
        config: Any = {"min_sites": 2, "privacy": {"colluding": 0}}
        site = make_private_site(
            data, name_request=lambda: net.hosts[name].question, **config
        )
        noisy_gradients = site.noisy_gradients

        def noted(tensors: Any, *, round: int) -> Any:
            answers[name].append(noisy_gradients(tensors, round=round))
            return answers[name][-1]

        site.noisy_gradients = noted  # type: ignore[method-assign]
        return site

    net = Net({name: lambda name=name: make(name) for name in SITES}, tmp_path)
    net.seal = lambda site: seal_of(tmp_path, site, 2)
    patience = Patience(
        min_sites=2, timeout=10, knock=1, grace=0, pause=1, knock_every=0
    )
    summing = SecureSum(SITES, job=JOB, threshold=2)
    server = net.engine(SITES, patience, summing=summing)
    sent = theta(make_private_site(patients()))
    turns = server.rounds(0, 2)
    next(turns)
    before = dict(server._members.counted)
    full_sum = server.sum(NOISY, sent, round=0)
    server._members.counted.update(before)
    net.down = {"a"}
    next(turns)
    less = server.sum(NOISY, sent, round=1)
    assert (full_sum.included, less.included) == (SITES, ("b", "c"))
    for site in ("b", "c"):
        first, again = (update.tensors for update in answers[site])
        assert apart(first, again) > SPREAD, site
    assert _are_sums(full_sum, [answers[site][0] for site in SITES])


def _are_sums(total: Total, updates: list[Any]) -> bool:
    exact = {
        n: sum(update.tensors[n] for update in updates) for n in updates[0].tensors
    }
    return all(torch.equal(total.tensors[n].long(), exact[n]) for n in exact)


@pytest.mark.parametrize(("place", "units"), [("start", 1), ("transitions", 2)])
def test_refusals_do_not_reveal_the_tags_of_a_site(
    place: str,
    units: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A CRF in which a tag may not stand has no loss for a sentence that has it. To say
    so would ask the site whether a unit of this round has it, and cost nothing: such a
    unit adds nothing. One of three patients has a note that begins with a drug, two
    have notes with one behind it."""
    monkeypatch.setattr(
        private, "draw_units", lambda stream, count, rate: np.ones(count, bool)
    )
    zeros = lambda stream, count: np.zeros(count, np.int64)  # noqa: E731
    monkeypatch.setattr(private, "draw_discrete_gaussian", zeros)
    site = make_private_site(private=())
    sent = theta(site)
    (name,) = [n for n in sent if n.startswith("crf") and n.endswith(place)]
    beginning = site.site.model.tagset.tags.index("B-Drug")
    sent[name] = sent[name].clone()
    sent[name][..., beginning] = -math.inf
    answer = site.noisy_gradients(sent, round=0)
    assert (
        f"gradients that cannot be computed: {{'ModelError': {units}}}" in caplog.text
    )
    assert answer.tensors.keys() == sent.keys()


def test_patients_whose_names_differ_only_in_case_or_blanks_are_one() -> None:
    site = patients()
    names = ("p 1", "P 1", " p  1 ", "p2", "P2\t", "p3")
    owned = tuple(replace(d, patient=p) for d, p in zip(site.train, names, strict=True))
    units = make_private_site(replace(site, train=owned)).units
    assert [list(unit) for unit in units] == [[0, 1, 2], [3, 4], [5]]
    blank = (*owned[:-1], replace(owned[-1], patient="  "))
    with pytest.raises(ConfigError, match="1 of 6 training documents"):
        make_private_site(replace(site, train=blank))


def test_scores_do_not_reveal_which_forms_were_trained_on(tmp_path: Path) -> None:
    """Scores of test mentions may be shared; which of their forms are new is a count of
    training data without noise."""
    site = make_private_site(directory=tmp_path)
    site.finish(theta(site))
    saved = json.loads((tmp_path / "scores.json").read_text())
    for scores in (site.scores, site.score_on(site.site.data), saved):
        assert "strict" in scores
        assert "unseen" not in scores
        assert scores["counts"]["unseen_gold"] == scores["counts"]["gold"] > 0


def test_a_model_that_reads_documents_cannot_protect_sentences(tmp_path: Path) -> None:
    """What it reads at once is a document: one sentence less would be another gradient
    of the rest, 2 C away, and not C."""
    pytest.importorskip("transformers")
    encoder = str(save_bert(tmp_path / "bert"))
    model: dict[str, Any] = {"encoder": encoder, "context": "document"}
    table: Any = {"method": "finetune", "model": model, "synthetic": {}}
    table["privacy"] = {"noise": 1.0, "unit": "sentence"}
    config: Any = FINETUNE.configure(
        parse_job(table, "job", Path(), "job.toml").config, [patients()]
    )
    with pytest.raises(
        ConfigError, match='reads whole documents: set unit = "document"'
    ):
        DPMethod(FINETUNE).make_site(patients(), config)
    sentence_model = replace(config.model, context="sentence")
    assert (
        len(
            DPMethod(FINETUNE)
            .make_site(patients(), replace(config, model=sentence_model))
            .units
        )
        == 6
    )
