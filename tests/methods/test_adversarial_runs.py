"""Whole runs of the adversarial baselines against `distill` and each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_taggers import MODEL, assert_same
from torch import Tensor

from fednotes.core.errors import ConfigError
from fednotes.core.types import SiteData
from fednotes.data.synthetic import generate
from fednotes.engines.inprocess import InProcess
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.simulate import simulate
from fednotes.methods import adversarial, distill
from fednotes.methods.adversarial import discriminators
from fednotes.taggers.prompt_bart import PromptBartConfig
from fednotes.taggers.saving import build_model, load_model

VARIANTS = ("ganin", "peng", "hong")
WIDTHS, OUTPUTS = (10, 10), 10  # the CNN's, the BiLSTM's; the CRF reads the latter


@pytest.fixture(scope="module")
def sites() -> list[SiteData]:
    return [site.data for site in generate(num_sites=3, sentences_per_site=16, seed=5)]


def config(sites: list[SiteData], **changes: Any) -> adversarial.Config:
    base = adversarial.Config(model=MODEL, rounds=2, seed=3, learning_rate=0.01)
    return adversarial.for_sites(replace(base, **changes), sites)


def federate(sites, settings, **options):
    members = [adversarial.Site(site, settings) for site in sites]
    return members, adversarial.train(InProcess(members, **options), settings)


@pytest.fixture(scope="module")
def reference(sites) -> tuple[InProcess, dict[str, Tensor]]:
    """The same two rounds by `distill`: its engine and its final state."""
    return by_distill(sites)


def by_distill(sites: list[SiteData]) -> tuple[InProcess, dict[str, Tensor]]:
    base = distill.Config(model=MODEL, rounds=2, seed=3, learning_rate=0.01, weighting=False)
    settings = distill.for_sites(base, sites)
    engine = InProcess([distill.Site(site, settings) for site in sites])
    return engine, dict(distill.train(engine, settings).tensors)


def test_one_k_by_d_matrix_a_layer(sites) -> None:
    for variant in VARIANTS:
        settings = config(sites, variant=variant)
        model = build_model(settings.model, settings.tags, settings.seed)
        assert (model.widths, model.output_width) == (WIDTHS, OUTPUTS)
        shapes = {name: tuple(w.shape) for name, w in discriminators(settings, model).items()}
        expected = {"domain.0": (3, 10), "domain.1": (3, 10)}
        if variant == "peng":
            expected["domain.outputs"] = (3, 10)
        assert shapes == expected
        assert sum(w.numel() for w in discriminators(settings, model).values()) == 30 * len(
            expected
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_else_travels(sites, reference, variant: str) -> None:
    """Four bytes a number more than `distill`, in each copy: two rounds of θ down twice (to
    train, to evaluate) and up once, and the final one down, at three sites."""
    settings = config(sites, variant=variant)
    members = [adversarial.Site(site, settings) for site in sites]
    engine = InProcess(members)
    adversarial.train(engine, settings)
    numbers = sum(w.numel() for w in discriminators(settings, members[0].model).values())
    assert members[0].described().endswith(f"{numbers:,} of them in discriminators")
    assert engine.bytes_up - reference[0].bytes_up == 3 * 2 * 4 * numbers
    assert engine.bytes_down - reference[0].bytes_down == 3 * (2 * 2 + 1) * 4 * numbers


def test_one_site_has_nothing_to_tell_apart(sites) -> None:
    """No discriminators, and bit for bit `distill`."""
    settings = config(sites[:1])
    members, state = federate(sites[:1], settings)
    assert members[0].discriminators == {}
    assert_same(dict(state.tensors), by_distill(sites[:1])[1])
    for own in adversarial.METHOD.alone(config(sites), sites):
        assert own.platforms == ()
        model = build_model(own.model, own.tags, own.seed)
        assert discriminators(own, model) == {}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_global_discriminators_are_the_mean_of_the_sites(sites, variant: str) -> None:
    """Each site trained by itself for a round, then NumPy's mean; they did learn."""
    settings = config(sites, variant=variant, rounds=1)
    _, state = federate(sites, settings)
    start = adversarial.initial(settings)
    trained = []
    for site in sites:
        member = adversarial.Site(site, settings)
        member.begin(start, round=0)
        trained.append(member.train({}, round=0).tensors)
    domains = [name for name in start if name.startswith("domain.")]
    assert len(domains) == (3 if variant == "peng" else 2)
    for name in domains:
        mean = np.mean([own[name].double().numpy() for own in trained], axis=0)
        assert np.array_equal(state.tensors[f"shared.{name}"].numpy(), mean.astype(np.float32))
        assert not torch.equal(trained[0][name], trained[1][name])
        assert not torch.equal(state.tensors[f"shared.{name}"], start[name])


def test_each_site_learns_its_own_name(sites) -> None:
    """NumPy's softmax over the discriminators' scores: a round at a site makes its place in
    `platforms` more probable for its sentences, and that name's row alone does so."""
    settings = config(sites, rounds=1, strength=0.0)
    start = adversarial.initial(settings)
    for label, site in enumerate(sites):
        member = adversarial.Site(site, settings)
        member.begin(start, round=0)
        losses = member.model.losses(member.train_set, range(8), states=True)
        trained = member.train({}, round=0).tensors
        for layer, hidden in enumerate(losses.hidden):
            states, shares = hidden.detach().numpy(), []
            for weights in (start, trained):
                powers = np.exp(states @ weights[f"domain.{layer}"].numpy().T)
                shares.append((powers / powers.sum(axis=1, keepdims=True)).mean(axis=0))
            assert np.argmax(shares[1] - shares[0]) == label


def test_the_schedule_runs_over_the_rounds(sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Round r of R is r / R of the way, at every site."""
    seen = set()
    loss = adversarial.adversarial_loss

    def spy(losses, weights, label, progress, settings):
        seen.add((label, progress))
        return loss(losses, weights, label, progress, settings)

    monkeypatch.setattr(adversarial, "adversarial_loss", spy)
    federate(sites, config(sites, rounds=4))
    assert seen == {(label, part) for label in range(3) for part in (0.0, 0.25, 0.5, 0.75)}


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_strength_and_entropy_it_is_distill(sites, reference, variant: str) -> None:
    """Bit for bit, while the discriminators learn; with them it is another tagger."""
    settings = config(sites, variant=variant, strength=0.0, entropy=0.0)
    found = federate(sites, settings)[1].tensors
    own = {name: v for name, v in found.items() if not name.startswith("shared.domain.")}
    assert_same(own, reference[1])
    start = adversarial.initial(settings)
    assert len(found) > len(own)
    for name in found.keys() - own.keys():
        assert not torch.equal(found[name], start[name.removeprefix("shared.")])
    other = federate(sites, replace(settings, strength=1.0))[1].tensors
    assert any(not torch.equal(other[name], value) for name, value in reference[1].items())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_killed_run_goes_on_to_the_same_bits(sites, variant: str, tmp_path: Path) -> None:
    """Rounds 0 and 1, a restart from disk, rounds 2 and 3, against four rounds in one go.

    The schedule of the whole run holds in its first part too, so that part stops early.
    """
    whole = config(sites, variant=variant, rounds=4, select="best")
    _, expected = federate(sites, whole)

    class Killed(Exception):
        pass

    def kill(result: Any) -> None:
        if result.round == 2:
            raise Killed

    with pytest.raises(Killed):
        federate(sites, whole, directory=tmp_path, observer=kill)
    _, state = federate(sites, whole, directory=tmp_path, resume=True)
    assert_same(dict(state.tensors), dict(expected.tensors))
    assert state.facts == expected.facts


# jobs


@pytest.fixture
def _as_before() -> Iterator[None]:
    """A run chooses deterministic algorithms for its process."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_job_runs_it(variant: str, tmp_path: Path) -> None:
    """All conditions; the saved model is a plain tagger of the complete tag set."""
    table = {
        "method": "adversarial",
        "seed": 2,
        "synthetic": {"sites": 3, "sentences": 12},
        "training": {"variant": variant, "rounds": 2},
        "model": {
            "kind": "tagger", "tagger": "cnn-clstm-crf", "hashed_words": 64, "word_dim": 4,
            "char_dim": 4, "char_filters": 6, "cnn_filters": 8, "lstm_units": 4,
        },
    }  # fmt: skip
    job = parse_job(table, "tiny", tmp_path, "tiny.toml")
    assert job.config.variant == variant
    summary = simulate(job, tmp_path / "run")
    assert list(summary.conditions) == ["alone", "federated", "pooled"]
    places = {"federated": "discharge", "alone/reports": "reports", "pooled": "pooled"}
    for part, site in places.items():
        model = load_model(tmp_path / "run" / part / "sites" / site / "model")
        assert not [name for name in model.trainable() if name.startswith("domain")]
    model = load_model(tmp_path / "run" / "federated" / "sites" / "posts" / "model")
    assert len(model.tagset.types) > len(job.module.alone(job.config, sites_of(2))[0].tags.types)


def sites_of(seed: int) -> list[SiteData]:
    return [site.data for site in generate(num_sites=3, sentences_per_site=12, seed=seed)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_baselines_run_on_a_prompt_tuned_bart(sites, bart: Path, variant: str) -> None:
    """Two rounds at two sites: a discriminator for each encoder layer, and every prompt
    parameter and discriminator learns."""
    limits = {"max_subwords": 12, "max_entities": 2}
    model = PromptBartConfig(backbone=str(bart), prompts=3, prompt_hidden=8, **limits)
    few = [replace(s, train=s.train[:3], valid=s.valid[:1], test=()) for s in sites[:2]]
    settings = config(few, model=model, variant=variant)
    members, state = federate(few, settings)
    assert len(members[0].discriminators) == (3 if variant == "peng" else 2)
    for name, value in adversarial.initial(settings).items():
        now = state.tensors[f"shared.{name}"]
        assert torch.isfinite(now).all(), name
        assert not torch.equal(now, value), name


def test_a_tagger_without_a_layer_that_learns_is_refused(sites) -> None:
    """Characters and hashed words go straight to the CRF; alone it needs no such layer."""
    bare = replace(MODEL, cnn_filters=0, lstm_units=0)
    with pytest.raises(ConfigError, match="give the tagger project, cnn_filters or lstm_units"):
        adversarial.Site(sites[0], config(sites, model=bare))
    one = config(sites[:1], model=bare, rounds=1)
    assert federate(sites[:1], one)[1].round == 1
