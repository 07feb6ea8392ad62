"""The adversarial baselines, compared with NumPy, finite differences and `distill`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tiny_taggers import MODEL, assert_same, generated, values
from torch import Tensor, nn

from fednotes.core.errors import ConfigError
from fednotes.core.types import Document, SiteData, Span, TagSet
from fednotes.engines.inprocess import InProcess
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.simulate import simulate
from fednotes.methods import adversarial, distill
from fednotes.methods.adversarial import (
    compute_adversarial_loss,
    compute_disentanglement,
    compute_domain_loss,
    compute_matching_loss,
    compute_pseudo_entropy,
    compute_reversal_strength,
    make_discriminators,
    project_on_discriminator,
    reverse_gradient,
)
from fednotes.taggers.model import Losses
from fednotes.taggers.prompt_bart import PromptBartConfig
from fednotes.taggers.saving import build_model, load_model

VARIANTS = ("ganin", "peng", "hong")


def draw(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(
        grad
    )


def slopes(function: Callable[[], float], at: Tensor, step: float = 1e-5) -> np.ndarray:
    """Return central differences of a scalar with respect to every number of `at`."""
    slope = np.zeros(at.numel())
    flat = at.data.view(-1)  # behind the back of autograd, whose graphs stay valid
    for i, value in enumerate(flat.tolist()):
        ends = []
        for moved in (value + step, value - step):
            flat[i] = moved
            ends.append(function())
        flat[i] = value
        slope[i] = (ends[0] - ends[1]) / (2 * step)
    return slope.reshape(tuple(at.shape))


def softmax(scores: np.ndarray) -> np.ndarray:
    """Return the softmax of each row; -inf gets exactly 0."""
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def entropy(scores: np.ndarray) -> np.ndarray:
    """Over the candidates that may be, one at a time."""
    return np.array(
        [-sum(p * np.log(p) for p in row if p > 0) for row in softmax(scores)]
    )


def cross_entropy(states: np.ndarray, weight: np.ndarray, label: int) -> float:
    return float(-np.log(softmax(states @ weight.T)[:, label]).mean())


def grad_of(value: Tensor, at: Tensor) -> np.ndarray:
    (gradient,) = torch.autograd.grad(value, at, retain_graph=True, materialize_grads=True,
                                   allow_unused=True)  # fmt: skip
    return gradient.numpy()


def test_gradient_reversal_equals_finite_differences() -> None:
    """The states climb the loss, by NumPy's softmax, at `strength` times its slope; the
    discriminator descends it at its full slope, whatever the strength."""
    states, weight = draw(6, 4, seed=1), draw(3, 4, seed=2)

    def plain() -> float:
        return compute_domain_loss(states, weight, 1).item()

    value = compute_domain_loss(
        reverse_gradient(states, torch.tensor([[0.3]])), weight, 1
    )
    expected = cross_entropy(states.detach().numpy(), weight.detach().numpy(), 1)
    assert value.item() == plain() == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(
        grad_of(value, states), -0.3 * slopes(plain, states), atol=1e-8
    )
    np.testing.assert_allclose(grad_of(value, weight), slopes(plain, weight), atol=1e-9)


def test_only_states_that_reveal_their_site_are_changed() -> None:
    """Rows whose own site has a probability above 1 / K by NumPy climb the loss, the
    others stay; the discriminator learns from all."""
    states, weight = draw(12, 4, seed=1), draw(3, 4, seed=2)
    revealing = (
        softmax(states.detach().numpy() @ weight.detach().numpy().T)[:, 1] > 1 / 3
    )
    assert 3 < revealing.sum() < 9
    value = compute_matching_loss(states, weight, 1, 0.3)
    for at, scale in ((states, -0.3 * revealing[:, None]), (weight, 1.0)):
        expected = scale * slopes(
            lambda: compute_domain_loss(states, weight, 1).item(), at
        )
        np.testing.assert_allclose(grad_of(value, at), expected, atol=1e-9)


def test_default_strengths_are_those_of_the_page() -> None:
    """docs/papers.md: with strength 1 training collapses, "the default strength is
    0.1"; and Ganin's schedule 2 / (1 + exp(-10 p)) - 1, which is tanh(5 p)."""
    settings = adversarial.Config()
    assert (settings.strength, settings.entropy) == (0.1, 0.1)
    assert compute_reversal_strength(0.0) == 0.0
    for progress in np.linspace(0, 1, 9):
        assert compute_reversal_strength(progress) == pytest.approx(
            np.tanh(5 * progress), abs=1e-15
        )


MASKED = np.array([1, 4])  # candidates that may not be


def build_losses(seed: int = 0) -> tuple[Losses, dict[str, Tensor], nn.Parameter]:
    """Return two layers of 5 sentences, 7 predictions (3 of them pseudo), scores with
    -inf."""
    project = nn.Parameter(draw(6, 4, seed=seed + 9))

    def score(states: Tensor) -> Tensor:
        closed = torch.zeros(6, dtype=torch.bool)
        closed[MASKED] = True
        return (states @ project.T).masked_fill(closed, -torch.inf)

    losses = Losses(
        source=torch.zeros(5),
        target=torch.zeros(5),
        hidden=(draw(5, 4, seed=seed + 1), draw(5, 3, seed=seed + 2)),
        outputs=draw(7, 4, seed=seed + 3),
        is_added=torch.tensor([0, 1, 0, 0, 1, 1, 0], dtype=torch.bool),
        score_states=score,
    )
    weights = {
        "domain.0": draw(3, 4, seed=seed + 4),
        "domain.1": draw(3, 3, seed=seed + 5),
        "domain.outputs": draw(3, 4, seed=seed + 6),
    }
    return losses, weights, project


def plain_domain(losses: Losses, weights: dict[str, Tensor], label: int) -> float:
    """Return the mean over layers of NumPy's cross-entropies."""
    each = (
        cross_entropy(
            h.detach().numpy(), weights[f"domain.{i}"].detach().numpy(), label
        )
        for i, h in enumerate(losses.hidden)
    )
    return float(np.mean(list(each)))


def plain_scores(states: np.ndarray, project: Tensor) -> np.ndarray:
    scores = states @ project.detach().numpy().T
    scores[:, MASKED] = -np.inf
    return scores


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_loss_of_each_variant_equals_numpy(variant: str) -> None:
    """[tagsets appendix a] NumPy, and central differences for the hidden states: minus
    the strength times the slope where they tell the site, for "hong" of half the
    square."""
    losses, weights, project = build_losses()
    settings = adversarial.Config(variant=variant, strength=0.7, entropy=0.2)
    value = compute_adversarial_loss(losses, weights, 2, progress=0.25, config=settings)
    domain = plain_domain(losses, weights, 2)
    outputs, domain_outputs = (
        t.detach().numpy() for t in (losses.outputs, weights["domain.outputs"])
    )
    specific = outputs @ np.linalg.pinv(domain_outputs) @ domain_outputs
    expected = {
        "ganin": domain,
        "peng": domain
        + cross_entropy(outputs, domain_outputs, 2)
        - 0.2 * entropy(plain_scores(specific, project)).mean(),
        "hong": domain**2 / 2
        + 0.2 * entropy(plain_scores(outputs, project))[losses.is_added.numpy()].mean(),
    }
    assert value.item() == pytest.approx(expected[variant], rel=1e-6)
    scale = domain if variant == "hong" else 1.0
    for layer, hidden in enumerate(losses.hidden):
        weight = weights[f"domain.{layer}"]
        up, down = (
            scale * slopes(lambda: plain_domain(losses, weights, 2), at)
            for at in (hidden, weight)
        )
        probability = softmax((hidden @ weight.T).detach().numpy())[:, 2:3]
        up *= -0.7 * np.tanh(1.25) * (probability > 1 / 3)
        assert up.any()
        np.testing.assert_allclose(grad_of(value, hidden), up, atol=1e-8)
        np.testing.assert_allclose(grad_of(value, weight), down, atol=1e-8)


def test_entropy_is_minimised_only_at_pseudo_targets() -> None:
    """By NumPy over the open candidates; a known target's state has no gradient, a
    pseudo target's that of finite differences, and closed candidates make nothing NaN.
    """
    losses, _, project = build_losses()
    value = compute_pseudo_entropy(losses)
    scores = plain_scores(losses.outputs.detach().numpy(), project)
    assert np.isinf(scores).any()
    assert value.item() == pytest.approx(entropy(scores)[[1, 4, 5]].mean(), rel=1e-12)
    gradient = grad_of(value, losses.outputs)
    assert not gradient[[0, 2, 3, 6]].any()
    np.testing.assert_allclose(
        gradient,
        slopes(lambda: compute_pseudo_entropy(losses).item(), losses.outputs),
        atol=1e-9,
    )
    of_project = grad_of(value, project)
    assert np.isfinite(of_project).all()
    assert of_project.any()
    assert not of_project[MASKED].any()
    none = replace(losses, is_added=torch.zeros(7, dtype=torch.bool))
    assert compute_pseudo_entropy(none).item() == 0.0
    assert not grad_of(compute_pseudo_entropy(none), none.outputs).any()


def test_the_projection_splits_a_state_into_specific_and_shared_parts() -> None:
    """NumPy's pseudo-inverse; what tells the site is in it, the rest is orthogonal to
    it and to every row of the discriminator."""
    states, weight = draw(7, 9, seed=1, grad=False), draw(3, 9, seed=2, grad=False)
    specific = project_on_discriminator(states, weight)
    rows = weight.numpy()
    np.testing.assert_allclose(
        specific, states.numpy() @ np.linalg.pinv(rows) @ rows, atol=1e-5
    )
    np.testing.assert_allclose(
        specific @ weight.T, states @ weight.T, rtol=0, atol=1e-5
    )
    invariant = states - specific
    np.testing.assert_allclose(invariant @ weight.T, 0, atol=1e-5)
    np.testing.assert_allclose((invariant * specific).sum(1), 0, atol=1e-5)


WIDE = draw(3, 9, seed=2, grad=False).float()


@pytest.mark.parametrize(
    "weight",
    [
        WIDE[[0, 1, 1]],  # equal rows
        WIDE[:1] + 0.03 * WIDE,  # nearly parallel
        draw(8, 5, seed=2, grad=False).float(),  # more rows than columns
        torch.zeros(3, 9),
    ],
)
def test_the_projection_handles_dependent_rows(weight: Tensor) -> None:
    """In float32: finite with a finite gradient, and the pseudo-inverse's to three
    digits."""
    weight.requires_grad_()
    states = draw(7, weight.shape[1], seed=1, grad=False).float().requires_grad_()
    specific = project_on_discriminator(states, weight)
    rows = weight.detach().numpy()
    expected = states.detach().numpy() @ np.linalg.pinv(rows, rcond=1e-5) @ rows
    np.testing.assert_allclose(specific.detach().numpy(), expected, atol=1e-3)
    for gradient in torch.autograd.grad(specific.square().sum(), (states, weight)):
        assert torch.isfinite(gradient).all()


def test_disentanglement_does_not_change_the_output_layer() -> None:
    """States and discriminator get the slope of the (negative) entropy by finite
    differences; the output layer, which Peng et al. hold fixed, gets none."""
    losses, weights, project = build_losses()
    weight = weights["domain.outputs"]
    value = compute_disentanglement(losses, weight)
    for at in (losses.outputs, weight):
        expected = slopes(lambda: compute_disentanglement(losses, weight).item(), at)
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(grad_of(value, at), expected, atol=1e-8)
    assert not grad_of(value, project).any()


def test_the_discriminator_of_peng_does_not_change_the_states() -> None:
    """It learns (finite differences), but nothing asks a state to show its site."""
    losses, weights, _ = build_losses()
    settings = adversarial.Config(variant="peng", entropy=0.0)
    value = compute_adversarial_loss(losses, weights, 0, progress=0.5, config=settings)
    weight = weights["domain.outputs"]
    expected = slopes(
        lambda: compute_domain_loss(losses.outputs, weight, 0).item(), weight
    )
    np.testing.assert_allclose(grad_of(value, weight), expected, atol=1e-9)
    assert not grad_of(value, losses.outputs).any()


def test_the_losses_apply_to_a_prompt_tuned_bart(bart: Path) -> None:
    """The scores of other states than the model's own, closed candidates among them: a
    known target's state has no gradient of the entropy, all gradients are finite, and
    the projection onto all of R^d is the state itself, whose entropy NumPy gives."""
    settings = PromptBartConfig(backbone=str(bart), prompts=3, prompt_hidden=8)
    model: Any = build_model(settings, TagSet(("Drug", "ADE")), 1)
    documents = [
        Document("1", "ak in no pa with", (Span(0, 2, "Drug"), Span(9, 11, "ADE"))),
        Document("2", "finding", ()),
    ]
    corpus = model.annotate(model.prepare(documents), documents, {"ADE"})
    losses = model.losses(corpus, [1, 0], with_states=True)
    pseudo = losses.is_added.numpy()
    assert pseudo.tolist() == [False, True, True, True, False, False, False, False]
    scores = losses.score_states(losses.outputs).detach().numpy()
    assert np.isinf(scores).any()
    low = compute_pseudo_entropy(losses)
    assert low.item() == pytest.approx(entropy(scores)[pseudo].mean(), rel=1e-5)
    of_outputs = grad_of(low, losses.outputs)
    assert of_outputs[pseudo].any(axis=1).all()
    assert not of_outputs[~pseudo].any()
    high = compute_disentanglement(losses, nn.Parameter(torch.eye(32)))
    assert high.item() == pytest.approx(-entropy(scores).mean(), rel=1e-4)
    (losses.source.sum() + low + high).backward()  # the graph is still whole
    for name, parameter in model.trainable().items():
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize(
    ("variant", "sites", "expected"),
    [
        ("ganin", 6, 27_648),
        ("peng", 6, 32_256),
        ("hong", 3, 13_824),
        ("peng", 3, 16_128),
    ],
)
def test_discriminators_of_bart_base_have_the_published_sizes(
    variant: str, sites: int, expected: int
) -> None:
    """6·K·d for its six encoder layers, and K·d more for Peng et al.; d = 768."""
    bart: Any = SimpleNamespace(widths=(768,) * 6, output_width=768, device="cpu")
    names = tuple("abcdef"[:sites])
    settings = adversarial.Config(variant=variant, platforms=names)
    assert (
        sum(w.numel() for w in make_discriminators(settings, bart).values()) == expected
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weighting": True}, "no instance weights"),
        ({"strength": -1.0}, "strength = -1.0"),
        ({"entropy": -0.5}, "entropy = -0.5"),
        ({"rounds": 0}, "rounds = 0"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        adversarial.Config(**changes)


# runs


@pytest.fixture(scope="module")
def sites() -> list[SiteData]:
    return generated(16)


def config(sites: list[SiteData], **changes: Any) -> adversarial.Config:
    base = adversarial.Config(model=MODEL, rounds=2, seed=3, learning_rate=0.01)
    return adversarial.METHOD.configure(replace(base, **changes), sites)


def federate(sites, settings, **options):
    members = [adversarial.Site(site, settings) for site in sites]
    return members, adversarial.train(InProcess(members, **options), settings)


def by_distill(sites: list[SiteData]) -> tuple[InProcess, dict[str, Tensor]]:
    """Return the engine and the final state of the same two rounds by `distill`."""
    base = distill.Config(
        model=MODEL, rounds=2, seed=3, learning_rate=0.01, weighting=False
    )
    settings = distill.METHOD.configure(base, sites)
    engine = InProcess([distill.Site(site, settings) for site in sites])
    return engine, dict(distill.train(engine, settings).tensors)


@pytest.fixture(scope="module")
def reference(sites) -> tuple[InProcess, dict[str, Tensor]]:
    return by_distill(sites)


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_the_parameters_of_the_method_are_sent(
    sites, reference, variant: str
) -> None:
    """A matrix K × d a layer, the CNN's and the BiLSTM's, and for Peng below the
    outputs: four bytes a number more than `distill`, in each copy: two rounds of θ down
    twice (to train, to evaluate) and up once, and the final one down, at three sites.
    """
    settings = config(sites, variant=variant)
    members = [adversarial.Site(site, settings) for site in sites]
    engine = InProcess(members)
    adversarial.train(engine, settings)
    names = ["domain.0", "domain.1", *["domain.outputs"] * (variant == "peng")]
    shapes = {name: tuple(w.shape) for name, w in members[0].discriminators.items()}
    assert shapes == dict.fromkeys(names, (3, 10))
    numbers = 30 * len(names)
    assert (
        members[0]
        .describe_parameters()
        .endswith(f"{numbers:,} of them in discriminators")
    )
    assert engine.bytes_up - reference[0].bytes_up == 3 * 2 * 4 * numbers
    assert engine.bytes_down - reference[0].bytes_down == 3 * (2 * 2 + 1) * 4 * numbers


def test_one_site_has_no_discriminators_and_equals_distill(sites) -> None:
    """No discriminators, and bit for bit `distill`."""
    members, state = federate(sites[:1], config(sites[:1]))
    assert members[0].discriminators == {}
    assert_same(dict(state.tensors), by_distill(sites[:1])[1])
    for settings in adversarial.METHOD.configure_alone(config(sites), sites):
        assert settings.platforms == ()
        assert (
            make_discriminators(
                settings, build_model(settings.model, settings.tags, settings.seed)
            )
            == {}
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_global_discriminators_are_the_mean_over_sites(sites, variant: str) -> None:
    """Each site trained by itself for a round, then NumPy's mean; they did learn."""
    settings = config(sites, variant=variant, rounds=1)
    _, state = federate(sites, settings)
    start = adversarial.make_initial_parameters(settings)
    trained = []
    for site in sites:
        member = adversarial.Site(site, settings)
        member.begin(start, round=0)
        trained.append(member.train({}, round=0).tensors)
    domains = [name for name in start if name.startswith("domain.")]
    assert len(domains) == (3 if variant == "peng" else 2)
    for name in domains:
        mean = np.mean([tensors[name].double().numpy() for tensors in trained], axis=0)
        shared_value = state.tensors[f"shared.{name}"]
        assert np.array_equal(shared_value.numpy(), mean.astype(np.float32))
        assert not torch.equal(trained[0][name], trained[1][name])
        assert not torch.equal(shared_value, start[name])


def test_discriminators_start_as_unit_noise(sites) -> None:
    """Normal numbers of variance 1 / d, so that a row has length 1 on average, whatever
    d is.

    SciPy tests the scaled numbers against the standard normal distribution. Rows,
    layers and seeds differ; the sites begin alike.
    """
    wide = replace(MODEL, cnn_filters=900, lstm_units=300)
    settings = config(sites, variant="peng", model=wide)
    first = adversarial.make_initial_parameters(settings)
    domains = {
        name: value for name, value in first.items() if name.startswith("domain.")
    }
    widths = {"domain.0": 900, "domain.1": 600, "domain.outputs": 600}
    assert {name: tuple(v.shape) for name, v in domains.items()} == {
        name: (3, width) for name, width in widths.items()
    }
    for name, value in domains.items():
        scaled = value.double().numpy().ravel() * np.sqrt(widths[name])
        assert stats.kstest(scaled, "norm").pvalue > 1e-3, name
        lengths = value.double().norm(dim=1).numpy()
        np.testing.assert_allclose(lengths, 1, atol=5 / np.sqrt(2 * widths[name]))

    rows = torch.cat([value[:, :600] for value in domains.values()]).double()
    cosines = (
        torch.nn.functional.normalize(rows) @ torch.nn.functional.normalize(rows).T
    )
    assert (cosines - torch.eye(9)).abs().max() < 5 / np.sqrt(600)
    reseeded = adversarial.make_initial_parameters(
        replace(settings, seed=settings.seed + 1)
    )
    assert not torch.equal(first["domain.0"], reseeded["domain.0"])
    for data in sites:
        member = adversarial.Site(data, settings)
        assert_same(values(member.discriminators), domains)


def test_discriminators_learn_the_name_of_each_site(sites) -> None:
    """NumPy's softmax over the discriminators' scores: a round at a site makes its
    place in `platforms` more probable for its sentences, and that name's row alone does
    so."""
    settings = config(sites, rounds=1, strength=0.0)
    start = adversarial.make_initial_parameters(settings)
    for label, site in enumerate(sites):
        member = adversarial.Site(site, settings)
        member.begin(start, round=0)
        losses = member.model.losses(member.train_set, range(8), with_states=True)
        trained = member.train({}, round=0).tensors
        for layer, hidden in enumerate(losses.hidden):
            before, after = (
                softmax(
                    hidden.detach().numpy() @ weights[f"domain.{layer}"].numpy().T
                ).mean(axis=0)
                for weights in (start, trained)
            )
            assert np.argmax(after - before) == label


def test_the_strength_schedule_runs_over_the_rounds(
    sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round r of R is r / R of the way, at every site."""
    calls = set()
    loss = adversarial.compute_adversarial_loss

    def spy(losses, weights, label, *, progress, config):
        calls.add((label, progress))
        return loss(losses, weights, label, progress=progress, config=config)

    monkeypatch.setattr(adversarial, "compute_adversarial_loss", spy)
    federate(sites, config(sites, rounds=4))
    assert calls == {
        (label, part) for label in range(3) for part in (0.0, 0.25, 0.5, 0.75)
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_strength_and_entropy_the_method_equals_distill(
    sites, reference, variant: str
) -> None:
    """Bit for bit, while the discriminators learn; with them it is another tagger."""
    settings = config(sites, variant=variant, strength=0.0, entropy=0.0)
    tensors = federate(sites, settings)[1].tensors
    tagger_tensors = {
        name: v for name, v in tensors.items() if not name.startswith("shared.domain.")
    }
    assert_same(tagger_tensors, reference[1])
    start = adversarial.make_initial_parameters(settings)
    assert len(tensors) > len(tagger_tensors)
    for name in tensors.keys() - tagger_tensors.keys():
        assert not torch.equal(tensors[name], start[name.removeprefix("shared.")])
    adversarial_tensors = federate(sites, replace(settings, strength=1.0))[1].tensors
    assert any(
        not torch.equal(adversarial_tensors[name], value)
        for name, value in reference[1].items()
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_job_runs_each_variant(variant: str, tmp_path: Path) -> None:
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
    types = {}
    for part, site in places.items():
        model = load_model(tmp_path / "run" / part / "sites" / site / "model")
        assert not [name for name in model.trainable() if name.startswith("domain")]
        types[part] = set(model.tagset.types)
    assert types["federated"] > types["alone/reports"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_baselines_run_on_a_prompt_tuned_bart(sites, bart: Path, variant: str) -> None:
    """Two rounds at two sites: a discriminator for each encoder layer, and every prompt
    parameter and discriminator learns."""
    limits = {"max_subwords": 12, "max_entities": 2}
    model = PromptBartConfig(backbone=str(bart), prompts=3, prompt_hidden=8, **limits)
    few = [replace(s, train=s.train[:3], valid=s.valid[:1], test=()) for s in sites[:2]]
    settings = config(few, model=model, variant=variant)
    members, state = federate(few, settings)
    assert len(members[0].discriminators) == (3 if variant == "peng" else 2)
    for name, value in adversarial.make_initial_parameters(settings).items():
        now = state.tensors[f"shared.{name}"]
        assert torch.isfinite(now).all(), name
        assert not torch.equal(now, value), name


def test_a_tagger_without_a_trained_layer_is_refused(sites) -> None:
    """Characters and hashed words go straight to the CRF; alone it needs no such layer."""
    bare = replace(MODEL, cnn_filters=0, lstm_units=0)
    with pytest.raises(
        ConfigError,
        match=r'kind "tagger" has no layer that .*`widths` is empty.*: '
        "give the tagger project, cnn_filters or lstm_units",
    ):
        adversarial.Site(sites[0], config(sites, model=bare))
    bare_config = config(sites[:1], model=bare, rounds=1)
    assert federate(sites[:1], bare_config)[1].round == 1
