"""The parts of the adversarial baselines against NumPy and finite differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fednotes.core.errors import ConfigError
from fednotes.core.types import Document, Span, TagSet
from fednotes.methods import adversarial
from fednotes.methods.adversarial import (
    adversarial_loss,
    discriminators,
    disentanglement,
    domain_loss,
    domain_specific,
    matching_loss,
    pseudo_entropy,
    reversal_strength,
    reverse,
)
from fednotes.taggers.model import Losses
from fednotes.taggers.prompt_bart import PromptBartConfig
from fednotes.taggers.saving import build_model

VARIANTS = ("ganin", "peng", "hong")


def draw(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(grad)


def slopes(function: Callable[[], float], at: Tensor, step: float = 1e-5) -> np.ndarray:
    """Central differences of a scalar with respect to every number of `at`."""
    found = np.zeros(at.numel())
    flat = at.data.view(-1)  # behind the back of autograd, whose graphs stay valid
    for i, value in enumerate(flat.tolist()):
        ends = []
        for moved in (value + step, value - step):
            flat[i] = moved
            ends.append(function())
        flat[i] = value
        found[i] = (ends[0] - ends[1]) / (2 * step)
    return found.reshape(tuple(at.shape))


def softmax(scores: np.ndarray) -> np.ndarray:
    """Row by row; what is -inf gets exactly 0."""
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def entropy(scores: np.ndarray) -> np.ndarray:
    """Over the candidates that may be, one at a time."""
    return np.array([-sum(p * np.log(p) for p in row if p > 0) for row in softmax(scores)])


def cross_entropy(states: np.ndarray, weight: np.ndarray, label: int) -> float:
    return float(-np.log(softmax(states @ weight.T)[:, label]).mean())


def grad_of(value: Tensor, at: Tensor) -> np.ndarray:
    (found,) = torch.autograd.grad(value, at, retain_graph=True, materialize_grads=True,
                                   allow_unused=True)  # fmt: skip
    return found.numpy()


def test_domain_loss_is_a_cross_entropy() -> None:
    """By NumPy's softmax."""
    states, weight = draw(6, 4, seed=1, grad=False), draw(3, 4, seed=2, grad=False)
    expected = cross_entropy(states.numpy(), weight.numpy(), 2)
    assert domain_loss(states, weight, 2).item() == pytest.approx(expected, rel=1e-12)


def test_reversal_against_finite_differences() -> None:
    """The states climb the loss at `strength` times its slope; the discriminator descends it
    at its full slope, whatever the strength."""
    states, weight = draw(6, 4, seed=1), draw(3, 4, seed=2)

    def plain() -> float:
        return domain_loss(states, weight, 1).item()

    value = domain_loss(reverse(states, torch.tensor([[0.3]])), weight, 1)
    assert value.item() == plain()
    np.testing.assert_allclose(grad_of(value, states), -0.3 * slopes(plain, states), atol=1e-8)
    np.testing.assert_allclose(grad_of(value, weight), slopes(plain, weight), atol=1e-9)


def test_a_state_that_tells_no_site_is_left_alone() -> None:
    """Rows whose own site has a probability above 1 / K by NumPy climb the loss, the others
    stay; the discriminator learns from all."""
    states, weight = draw(12, 4, seed=1), draw(3, 4, seed=2)
    told = softmax(states.detach().numpy() @ weight.detach().numpy().T)[:, 1] > 1 / 3
    assert 3 < told.sum() < 9
    value = matching_loss(states, weight, 1, 0.3)
    for at, scale in ((states, -0.3 * told[:, None]), (weight, 1.0)):
        expected = scale * slopes(lambda: domain_loss(states, weight, 1).item(), at)
        np.testing.assert_allclose(grad_of(value, at), expected, atol=1e-9)


def test_ganins_schedule() -> None:
    """2 / (1 + exp(-10 p)) - 1 is tanh(5 p)."""
    assert reversal_strength(0.0) == 0.0
    for progress in np.linspace(0, 1, 9):
        assert reversal_strength(progress) == pytest.approx(np.tanh(5 * progress), abs=1e-15)


MASKED = np.array([1, 4])  # candidates that may not be


def made(seed: int = 0) -> tuple[Losses, dict[str, Tensor], nn.Parameter]:
    """Two layers of 5 sentences, 7 predictions of which 3 are pseudo, scores with -inf."""
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
        pseudo=torch.tensor([0, 1, 0, 0, 1, 1, 0], dtype=torch.bool),
        score=score,
    )
    weights = {
        "domain.0": draw(3, 4, seed=seed + 4),
        "domain.1": draw(3, 3, seed=seed + 5),
        "domain.outputs": draw(3, 4, seed=seed + 6),
    }
    return losses, weights, project


def plain_domain(losses: Losses, weights: dict[str, Tensor], label: int) -> float:
    """The mean over layers of NumPy's cross-entropies."""
    each = (
        cross_entropy(h.detach().numpy(), weights[f"domain.{i}"].detach().numpy(), label)
        for i, h in enumerate(losses.hidden)
    )
    return float(np.mean(list(each)))


def plain_scores(states: np.ndarray, project: Tensor) -> np.ndarray:
    scores = states @ project.detach().numpy().T
    scores[:, MASKED] = -np.inf
    return scores


def test_strengths_unless_a_job_says_otherwise() -> None:
    """docs/papers.md: with strength 1 training collapses, "the default strength is 0.1"."""
    settings = adversarial.Config()
    assert (settings.strength, settings.entropy) == (0.1, 0.1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_loss_of_each_variant(variant: str) -> None:
    """[tagsets appendix a] NumPy, and central differences for the hidden states: minus the
    strength times the slope where they tell the site, for "hong" of half the square."""
    losses, weights, project = made()
    settings = adversarial.Config(variant=variant, strength=0.7, entropy=0.2)
    value = adversarial_loss(losses, weights, 2, 0.25, settings)
    domain = plain_domain(losses, weights, 2)
    outputs, own = (t.detach().numpy() for t in (losses.outputs, weights["domain.outputs"]))
    specific = outputs @ np.linalg.pinv(own) @ own
    expected = {
        "ganin": domain,
        "peng": domain
        + cross_entropy(outputs, own, 2)
        - 0.2 * entropy(plain_scores(specific, project)).mean(),
        "hong": domain**2 / 2
        + 0.2 * entropy(plain_scores(outputs, project))[losses.pseudo.numpy()].mean(),
    }
    assert value.item() == pytest.approx(expected[variant], rel=1e-6)
    scale = domain if variant == "hong" else 1.0
    for layer, hidden in enumerate(losses.hidden):
        weight = weights[f"domain.{layer}"]
        up, down = (
            scale * slopes(lambda: plain_domain(losses, weights, 2), at) for at in (hidden, weight)
        )
        probability = softmax((hidden @ weight.T).detach().numpy())[:, 2:3]
        up *= -0.7 * np.tanh(1.25) * (probability > 1 / 3)
        assert up.any()
        np.testing.assert_allclose(grad_of(value, hidden), up, atol=1e-8)
        np.testing.assert_allclose(grad_of(value, weight), down, atol=1e-8)


def test_entropy_is_made_low_on_pseudo_targets_alone() -> None:
    """By NumPy over the open candidates; a known target's state has no gradient, a pseudo
    target's that of finite differences, and closed candidates make nothing NaN."""
    losses, _, project = made()
    value = pseudo_entropy(losses)
    scores = plain_scores(losses.outputs.detach().numpy(), project)
    assert np.isinf(scores).any()
    assert value.item() == pytest.approx(entropy(scores)[[1, 4, 5]].mean(), rel=1e-12)
    found = grad_of(value, losses.outputs)
    assert not found[[0, 2, 3, 6]].any()
    np.testing.assert_allclose(
        found, slopes(lambda: pseudo_entropy(losses).item(), losses.outputs), atol=1e-9
    )
    of_project = grad_of(value, project)
    assert np.isfinite(of_project).all()
    assert of_project.any()
    assert not of_project[MASKED].any()


def test_without_pseudo_targets_there_is_no_entropy() -> None:
    losses, _, _ = made()
    none = replace(losses, pseudo=torch.zeros(7, dtype=torch.bool))
    value = pseudo_entropy(none)
    assert value.item() == 0.0
    assert not grad_of(value, none.outputs).any()


def test_the_projection_parts_a_state() -> None:
    """NumPy's pseudo-inverse; what tells the site is in it, the rest is orthogonal to it and
    to every row of the discriminator."""
    states, weight = draw(7, 9, seed=1, grad=False), draw(3, 9, seed=2, grad=False)
    specific = domain_specific(states, weight)
    own = weight.numpy()
    np.testing.assert_allclose(specific, states.numpy() @ np.linalg.pinv(own) @ own, atol=1e-5)
    torch.testing.assert_close(specific @ weight.T, states @ weight.T, rtol=0, atol=1e-5)
    invariant = states - specific
    torch.testing.assert_close(invariant @ weight.T, torch.zeros(7, 3).double(), rtol=0, atol=1e-5)
    torch.testing.assert_close(
        (invariant * specific).sum(1), torch.zeros(7).double(), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(
    "case", ["equal rows", "nearly parallel rows", "more rows than columns", "nothing"]
)
def test_the_projection_of_rows_that_depend_on_each_other(case: str) -> None:
    """In float32: finite with a finite gradient, and the pseudo-inverse's to three digits."""
    weight = draw(3, 9, seed=2, grad=False).float()
    if case == "equal rows":
        weight[2] = weight[1]
    elif case == "nearly parallel rows":
        weight = weight[:1] + 0.03 * weight
    elif case == "more rows than columns":
        weight = draw(8, 5, seed=2, grad=False).float()
    elif case == "nothing":
        weight = torch.zeros(3, 9)
    weight.requires_grad_()
    states = draw(7, weight.shape[1], seed=1, grad=False).float().requires_grad_()
    specific = domain_specific(states, weight)
    own = weight.detach().numpy()
    expected = states.detach().numpy() @ np.linalg.pinv(own, rcond=1e-5) @ own
    np.testing.assert_allclose(specific.detach().numpy(), expected, atol=1e-3)
    for gradient in torch.autograd.grad(specific.square().sum(), (states, weight)):
        assert torch.isfinite(gradient).all()


def test_disentanglement_leaves_what_predicts_alone() -> None:
    """States and discriminator get the slope of the (negative) entropy by finite differences;
    the output layer, which Peng et al. hold fixed, gets none."""
    losses, weights, project = made()
    weight = weights["domain.outputs"]
    value = disentanglement(losses, weight)
    for at in (losses.outputs, weight):
        expected = slopes(lambda: disentanglement(losses, weight).item(), at)
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(grad_of(value, at), expected, atol=1e-8)
    assert not grad_of(value, project).any()


def test_pengs_own_discriminator_does_not_move_the_states() -> None:
    """It learns (finite differences), but nothing asks a state to show its site."""
    losses, weights, _ = made()
    settings = adversarial.Config(variant="peng", entropy=0.0)
    value = adversarial_loss(losses, weights, 0, 0.5, settings)
    weight = weights["domain.outputs"]
    expected = slopes(lambda: domain_loss(losses.outputs, weight, 0).item(), weight)
    np.testing.assert_allclose(grad_of(value, weight), expected, atol=1e-9)
    assert not grad_of(value, losses.outputs).any()


def test_the_parts_on_a_prompt_tuned_bart(bart: Path) -> None:
    """The scores of other states than the model's own, closed candidates among them: a known
    target's state has no gradient of the entropy, all gradients are finite, and the projection
    onto all of R^d is the state itself, whose entropy NumPy gives."""
    settings = PromptBartConfig(backbone=str(bart), prompts=3, prompt_hidden=8)
    model: Any = build_model(settings, TagSet(("Drug", "ADE")), 1)
    documents = [
        Document("1", "ak in no pa with", (Span(0, 2, "Drug"), Span(9, 11, "ADE"))),
        Document("2", "finding", ()),
    ]
    corpus = model.annotate(model.prepare(documents), documents, {"ADE"})
    losses = model.losses(corpus, [1, 0], states=True)
    pseudo = losses.pseudo.numpy()
    assert pseudo.tolist() == [False, True, True, True, False, False, False, False]
    scores = losses.score(losses.outputs).detach().numpy()
    assert np.isinf(scores).any()
    low = pseudo_entropy(losses)
    assert low.item() == pytest.approx(entropy(scores)[pseudo].mean(), rel=1e-5)
    of_outputs = grad_of(low, losses.outputs)
    assert of_outputs[pseudo].any(axis=1).all()
    assert not of_outputs[~pseudo].any()
    high = disentanglement(losses, nn.Parameter(torch.eye(32)))
    assert high.item() == pytest.approx(-entropy(scores).mean(), rel=1e-4)
    (losses.source.sum() + low + high).backward()  # the graph is still whole
    for name, parameter in model.trainable().items():
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.any(), name


def test_averaged_discriminators_tell_the_sites() -> None:
    """Three sites with states around points of their own, each with one label alone: after 20
    rounds NumPy's mean of the three names the right one, one that is never averaged names its
    own site everywhere."""
    points = 2 * draw(3, 8, seed=1, grad=False).numpy()
    rng = np.random.default_rng(0)
    states = [torch.from_numpy(point + 0.5 * rng.normal(size=(40, 8))) for point in points]
    everything, names = np.concatenate([own.numpy() for own in states]), np.repeat([0, 1, 2], 40)

    def right(weight: np.ndarray) -> float:
        return float(((everything @ weight.T).argmax(axis=1) == names).mean())

    shared = draw(3, 8, seed=2, grad=False).numpy()
    assert right(one_sided(shared, states[0], 0, steps=120)) == pytest.approx(1 / 3)
    for _ in range(20):
        trained = [one_sided(shared, own, label) for label, own in enumerate(states)]
        shared = np.mean(trained, axis=0)
    assert right(shared) > 0.95


def one_sided(start: np.ndarray, states: Tensor, label: int, steps: int = 6) -> np.ndarray:
    """A discriminator trained by torch's Adam where everything has one label."""
    weight = torch.tensor(start, requires_grad=True)
    adam = torch.optim.Adam([weight], lr=0.05)
    for _ in range(steps):
        adam.zero_grad()
        domain_loss(states, weight, label).backward()
        adam.step()
    return weight.detach().numpy()


@pytest.mark.parametrize(
    ("variant", "sites", "expected"),
    [("ganin", 6, 27_648), ("peng", 6, 32_256), ("hong", 3, 13_824), ("peng", 3, 16_128)],
)
def test_numbers_of_bart_base(variant: str, sites: int, expected: int) -> None:
    """6·K·d for its six encoder layers, and K·d more for Peng et al.; d = 768."""
    bart: Any = SimpleNamespace(widths=(768,) * 6, output_width=768, device="cpu")
    names = tuple("abcdef"[:sites])
    settings = adversarial.Config(variant=variant, platforms=names)
    assert sum(w.numel() for w in discriminators(settings, bart).values()) == expected


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
